"""Why a function was compiled again: a record of each trace, and its differences from earlier ones.

A trace is recorded where JAX runs the function that it was given, so a call that does not trace costs
nothing more.  The differences are computed on demand: by `explain`, inside `explain_compiles`, or when
`max_traces` is exceeded.

The stages of ahead-of-time compilation, `Traced`, `Lowered` and `Compiled`, are as in `jax.stages`, and
the same for `jit`, `filter_jit` and `filter_pmap`, each of which gives a call as a `Staged`.
`eval_shape` gives shapes alone.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import sys
import time
import types
import typing as tp
import weakref
from collections.abc import Mapping

import jax
from jax.core import Tracer
from jax.errors import JaxRuntimeError
from jax.sharding import NamedSharding, PartitionSpec

from nnxlite._base.errors import Modes, listed
from nnxlite._base.interning import LOCK, Bounded
from nnxlite._base.jax import current_mesh
from nnxlite._base.text import Atom, mesh_text, safely, short
from nnxlite.boundary._call_def import ArgumentLeaf, CallDef, leaf_names, step_text
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._leave import described
from nnxlite.boundary._out import Outputs, replay
from nnxlite.graph._compare import SHOWN, compare
from nnxlite.graph._plan import view
from nnxlite.transforms._call import Call
from nnxlite.transforms._checks import raise_failed
from nnxlite.transforms._wrapper import Options, R, unbind
from nnxlite.variables._definition import place
from nnxlite.variables._variable import Variable

__all__ = ["CacheInfo", "Explanation", "eval_shape", "explain_compiles"]

RECORDS_PER_FUNCTION = 16
"""How many traces are kept for a function: the last one is compared with those before."""


@dataclasses.dataclass
class Trace:
    """One trace of a function.

    Attributes:
        call: the structure of its arguments.
        types: of the leaves.
        seconds: how long it took.
    """

    call: CallDef
    types: tuple[str, ...] = ()
    seconds: float = 0.0

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of the leaves."""
        return leaf_names(self.call)

    def parts(self) -> dict[str, tuple[tp.Any, tp.Any]]:
        """What the program depends on beside the objects: a key and a value to show, by name.

        These are the types of the leaves, static leaves, and settings.
        """
        call = self.call
        parts = {name: (text, Atom(text)) for name, text in zip(self.names, self.types)}
        if call.static is not None:
            static = leaf_names(call, [call.all_leaves[number] for number in call.static.numbers])
            parts |= zip(static, zip(call.static.keys, call.static.values))
        settings = dict(call.extra or ())
        return parts | {f"setting {n}": (x, Atom(str(x))) for n, x in settings.items()}

    def causes(self, before: Trace) -> list[str]:
        """The differences from an earlier trace, a line for each."""
        old, new = before.call, self.call
        then, now = before.parts(), self.parts()
        causes = [] if old is new else _objects(old, new)
        arrays = [dict.fromkeys(leaf_names(c, c.all_leaves[: c.num_arrays])) for c in (old, new)]
        for name in {**arrays[0], **then, **arrays[1], **now}:
            if name.startswith("setting ") or (name in then and name in now):
                (key, value), (other_key, other) = (p.get(name, _DEFAULT) for p in (then, now))
                if key != other_key:
                    causes.append(sides_text(name, value, other))
            elif (name in arrays[0]) != (name in arrays[1]):  # of others the objects tell
                causes.append(f"{name}: {'gone' if name in arrays[0] else 'new'}")
        if old.treedef != new.treedef and arrays[0] == arrays[1]:
            causes.append(f"structure of the arguments: {old.treedef} -> {new.treedef}")
        return causes or [_NOTHING]


_NOTHING = (
    "nothing in the arguments: a setting of JAX has changed (the mesh, enable_x64, the default "
    "precision, ...), or its caches were cleared"
)
_DEFAULT = ("default", Atom("default"))


def _objects(old: CallDef, new: CallDef) -> list[str]:
    """How the objects among the arguments differ."""
    if old.graphdef is new.graphdef and old.where == new.where:
        return []
    at = [ArgumentLeaf(position, None, (), ()) for position in old.where]
    roots = [(name,) for name in leaf_names(old, at)]
    causes: list[str] = []
    for one in compare(old.graphdef, new.graphdef, roots):
        path, setting = ".".join(map(str, one.path)), one.kind == "setting"
        causes.append(
            sides_text(path, one.before, one.after) if setting else f"{path}: {one.words}"
        )
    return causes


# Where two static values differ that look the same -----------------------------------------------

DEEPEST = 12
"""How far values are followed."""


def sides_text(name: str, before: tp.Any, after: tp.Any) -> str:
    """Two values that differ, as `name: before -> after`; if they look the same, a part that does not.

    >>> import optax
    >>> from nnxlite.transforms._compiles import sides_text
    >>> sides_text("n", 2, 3)
    'n: 2 -> 3'
    >>> sides_text("tx", optax.scale(0.5), optax.scale(0.25))
    'tx.update.step_size: 0.5 -> 0.25'
    """
    found = safely(lambda one: _first_difference(one, after, DEEPEST, ()), before)
    if not isinstance(found, tuple):
        return f"{name}: another object, which looks the same: {safely(short, before)}"
    names, *parts = found
    return f"{name}{''.join(names)}: {' -> '.join(safely(short, part) for part in parts)}"


def _first_difference(
    before: tp.Any, after: tp.Any, depth: int, above: tuple[int, ...]
) -> tuple[tuple[str, ...], tp.Any, tp.Any] | None:
    """Names that lead to the first two parts that look different, and the parts."""
    if before is after or depth == 0 or id(before) in above:
        return None
    if safely(short, before) != safely(short, after):
        return (), before, after
    one, other = _parts(before), _parts(after)
    for name in [*one, *(name for name in other if name not in one)]:
        found = _first_difference(
            one.get(name, _ABSENT), other.get(name, _ABSENT), depth - 1, (*above, id(before))
        )
        if found is not None:
            names, *parts = found
            return ((name, *names), *parts)
    return None


_ABSENT = Atom("nothing")


def _parts(value: tp.Any) -> dict[str, tp.Any]:
    """The parts of a value by name, as they are written after the value."""
    parts: tp.Mapping[tp.Any, tp.Any]
    match value:
        case functools.partial():
            parts = {"func": value.func, **dict(enumerate(value.args)), **value.keywords}
        case types.MethodType():
            parts = {"self": value.__self__, "func": value.__func__}
        case types.FunctionType():
            cells = zip(value.__code__.co_freevars, value.__closure__ or ())
            parts = {name: safely(lambda c: c.cell_contents, cell) for name, cell in cells}
            parts |= {**dict(enumerate(value.__defaults__ or ())), **(value.__kwdefaults__ or {})}
        case tuple() if hasattr(value, "_asdict"):
            parts = tp.cast(tp.Any, value)._asdict()
        case list() | tuple():
            parts = dict(enumerate(value))
        case Mapping():
            parts = value
        case type():
            parts = {}
        case _ if dataclasses.is_dataclass(value):
            parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        case _:
            parts = getattr(value, "__dict__", {})
    return {step_text(name): part for name, part in parts.items()}


# The log -------------------------------------------------------------------------------------------


class Explanation(tp.NamedTuple):
    """The reason why a function was last compiled; `str` gives it as text.

    Attributes:
        function: its name.
        traces: how many times it has been traced.
        seconds: how long the last trace took. JAX logs the times of its compiler, which come on top,
            inside `jax.log_compiles()`.
        causes: the differences from the most similar earlier call, a line for each; empty for the
            first call, and if nothing has been compiled yet.

    >>> import nnxlite as nnx
    >>> double = nnx.jit(lambda x: 2 * x)
    >>> _ = double(1.0), double(2)
    >>> isinstance(double.explain(), nnx.Explanation), double.explain().traces
    (True, 2)
    """

    function: str
    traces: int
    seconds: float
    causes: tuple[str, ...]

    def __str__(self) -> str:
        if not self.traces:
            return f"{self.function} has not been compiled."
        took = f"traced in {self.seconds:.2f} s"
        if not self.causes:
            return f"{self.function} was compiled ({took}): its first call."
        count = f"; traces so far: {self.traces}" if self.traces > 1 else ""  # 1: defined again
        head = f"{self.function} was compiled again ({took}{count}):"
        weak = any("weakly typed" in cause for cause in self.causes)
        lines = [head, *(f"  {cause}" for cause in self.causes), *([_WEAK] if weak else [])]
        return "\n".join(lines)


_WEAK = (
    "  Weakly typed is what takes its dtype from a number of Python: make the array with a dtype, as in "
    "jnp.full((1,), -1.0, jnp.float32)."
)


class CacheInfo(tp.NamedTuple):
    """The compiled programs of a function.

    Attributes:
        traces: how many times it has been traced.
        programs: how many compiled programs are in JAX's cache.
        seconds: how long the traces took.

    >>> import nnxlite as nnx
    >>> double = nnx.jit(lambda x: 2 * x)
    >>> _ = double(1.0), double(2), double(3)
    >>> double.cache_info().traces
    2
    """

    traces: int
    programs: int
    seconds: float


class Traces:
    """The traces of one function under one set of options.

    Args:
        function: its name.
        fun: the function.
        limit: how many traces are allowed, or None.
    """

    def __init__(self, function: str, fun: tp.Any, limit: int | None = None) -> None:
        self.function = function
        self.limit = limit
        self.count = 0
        self.seconds = 0.0
        self.log: collections.deque[Trace] = collections.deque(maxlen=RECORDS_PER_FUNCTION)
        inner = inspect.unwrap(fun) if isinstance(fun, types.FunctionType) else None
        self._fun = weakref.ref(fun) if inner else lambda: None
        self._former = self._find_former(getattr(inner, "__code__", None))

    def _find_former(self, code: types.CodeType | None) -> weakref.ReferenceType[Traces] | None:
        """The traces of another function that was defined before on the same line, if there was one."""
        if code is None:
            return None
        place = (code.co_filename, code.co_firstlineno, code.co_name)
        with LOCK:
            former = _by_place.pop(place, None)
            _by_place[place] = weakref.ref(self)
        alive = former and former()
        same = alive is not None and alive._fun() is self._fun()
        return None if same else former

    @contextlib.contextmanager
    def recorded(self, call: CallDef, leaves: tp.Sequence[tp.Any]) -> tp.Iterator[None]:
        """Record the trace that runs in a `with` block; a trace that fails does not count.

        Raises RuntimeError where it is one more than `max_traces` allows.
        """
        trace = Trace(call, tuple(map(_type_text, leaves)))
        if self.limit is not None and self.count >= self.limit:
            causes = "\n".join(f"  {cause}" for cause in self._causes(trace, [*self.log.copy()]))
            raise RuntimeError(
                f"{self.function} would be traced {self.count + 1} times; max_traces={self.limit} "
                f"allows {self.limit}. This call differs from the most similar one before:\n{causes}\n"
                "Keep shapes, dtypes and static values the same from call to call (pad the arrays), or "
                "allow more traces."
            )
        start = time.perf_counter()
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(Exception):  # the error itself matters more than the note
                self._note_on(error, trace)
            raise
        trace.seconds = time.perf_counter() - start
        with LOCK:
            self.count += 1
            self.seconds += trace.seconds
            self.log.append(trace)
        if (show := _printer.get()) is not None:
            show(str(self.explain()))

    def _note_on(self, error: BaseException, trace: Trace) -> None:
        """Add a note to an error: in which module, and for which arguments of the function."""
        if getattr(error, "_nnx_noted", False):  # by a function that this one called
            return
        error._nnx_noted = True  # type: ignore[attr-defined]
        layer = getattr(error, "_nnx_layer", None)
        where = f"Raised in {layer}, while" if layer else "Raised while"
        pairs = [f"{n}: {t}" for n, t in zip(trace.names, trace.types)]
        arrays = [p for p, leaf in zip(pairs, trace.call.leaves()) if leaf.root is None] or pairs
        error.add_note(f"{where} {self.function} was traced with {listed(arrays, SHOWN)}.")

    def explain(self) -> Explanation:
        """Why the function was last compiled."""
        log = self.log.copy()  # another thread may add to it
        if not log:
            return Explanation(self.function, 0, 0.0, ())
        *earlier, last = log
        causes = tuple(self._causes(last, earlier))
        return Explanation(self.function, self.count, last.seconds, causes)

    def _causes(self, trace: Trace, earlier: list[Trace]) -> list[str]:
        """The differences of a trace from the most similar earlier one."""
        first = []
        if not earlier and self._former is not None:
            jit = self.function.partition("(")[0]
            again = f"another function: {self.function} has been defined again since"
            first = [f"{again}. In a loop, define it and call nnx.{jit} once, before the loop"]
            former = self._former()
            earlier = [*former.log.copy()] if former is not None else []
        if not earlier:
            return first
        fewest = lambda causes: (causes != [_NOTHING], len(causes))
        causes = min((trace.causes(one) for one in reversed(earlier)), key=fewest)
        return [*first, *(cause for cause in causes if not (first and "nothing in" in cause))]


def _type_text(leaf: tp.Any) -> str:
    """The type of a leaf while it is traced; a static one by its value."""
    if not any(isinstance(part, Tracer) for part in jax.tree_util.tree_leaves(leaf)):
        return safely(short, leaf)
    if not isinstance(leaf, Tracer):
        return described(leaf)
    kind: tp.Any = jax.typeof(leaf)
    text = "weakly typed " * getattr(kind, "weak_type", False) + str(kind).lstrip("~")
    sharding = getattr(kind, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return text
    kinds = listed([axis_type.name for axis_type in sharding.mesh.axis_types])
    return f"{text} on the mesh {mesh_text(sharding.mesh)} ({kinds})"


_by_place: Bounded[tp.Any, weakref.ReferenceType[Traces]] = Bounded(1024)
_printer: contextvars.ContextVar[tp.Callable[[str], object] | None]
_printer = contextvars.ContextVar("explain_compiles", default=None)


class explain_compiles:
    """Print why functions are compiled, as it happens.

    For each function that `jit` or `filter_jit` traces: how long that took, and what was different
    from the most similar earlier call of the function. It is on until the end of a `with` block, or,
    after a call without `with`, until it is called with False.

    Args:
        on: whether to print.
        show: what to do with each text; by default it goes to the standard error output.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> double = nnx.jit(lambda x: 2 * x)
    >>> texts = []
    >>> with nnx.explain_compiles(show=texts.append):
    ...     _ = double(jnp.ones(2)), double(jnp.ones(2)), double(jnp.ones(3))
    >>> len(texts), texts[1].splitlines()[1].strip()
    (2, 'x: float32[2] -> float32[3]')
    """

    def __init__(
        self, on: bool = True, /, *, show: tp.Callable[[str], object] | None = None
    ) -> None:
        self._before = _printer.get()
        show = show or (lambda text: print(text, file=sys.stderr))
        _printer.set(show if on else None)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        _printer.set(self._before)


# Ahead of time -------------------------------------------------------------------------------------


class Staged(tp.NamedTuple):
    """A call of a compiled function, ready for JAX, as its method `staged` gives it.

    `staged(args, kwargs, program=None)` takes the key of a compiled program that is called, without its
    static arguments; a call of another program raises, see `refuse_other_structure`.

    Attributes:
        key: the same object for all calls of the same program.
        jitted: JAX's function.
        groups: its arguments.
        run: calls the function, or what it was compiled to, and gives the caller's result.
    """

    key: CallDef
    jitted: tp.Any
    groups: tp.Sequence[tp.Any]
    run: tp.Callable[[tp.Any], tp.Any]


def refuse_other_structure(
    function: tp.Any, before: CallDef, after: CallDef, *further: str
) -> None:
    """Raise TypeError where a compiled function is called with arguments of another structure.

    Args:
        function: before it was compiled.
        before, after: the arguments that it was compiled for, and those of the call.
        further: other reasons.
    """
    if before == after and not further:
        return
    causes = Trace(after).causes(Trace(before)) if before != after else ()
    raise TypeError(
        f"{function!r} was compiled for arguments of another structure: "
        f"{'; '.join([*causes, *further])}. Lower and compile it again for these arguments."
    )


class Stage(tp.Generic[R]):
    """A stage of ahead-of-time compilation; attributes it lacks are those of JAX's own stage."""

    def __init__(self, function: tp.Any, key: CallDef, stage: tp.Any) -> None:
        self._function = function
        self._key = key
        self._stage = stage

    @classmethod
    def of(cls, method: str, function: tp.Any, args: tp.Any, kwargs: tp.Any) -> tp.Self:
        """The first stage of a call, which a method of JAX's function makes."""
        staged = function.staged(args, kwargs)
        return cls(function, staged.key, getattr(staged.jitted, method)(*staged.groups))

    def __getattr__(self, name: str) -> tp.Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._stage, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._function!r})"


class Traced(Stage[R]):
    """A traced function; `jaxpr` and `lower` as in `jax.stages.Traced`."""

    def lower(self, *args: tp.Any, **kwargs: tp.Any) -> Lowered[R]:
        """Lower the traced function."""
        return Lowered(self._function, self._key, self._stage.lower(*args, **kwargs))


class Lowered(Stage[R]):
    """A lowered function; as `jax.stages.Lowered`."""

    @property
    def lowered(self) -> tp.Any:
        """JAX's own object."""
        return self._stage

    def compile(self, *args: tp.Any, **kwargs: tp.Any) -> Compiled[R]:
        """Compile the lowered function; the result is callable with objects."""
        return Compiled(self._function, self._key, self._stage.compile(*args, **kwargs))


class Compiled(Stage[R]):
    """A compiled function, callable with arguments of the structure it was lowered for.

    Calls leave out static arguments, which are part of it, as with `jax.stages.Compiled`; static leaves
    of `filter_jit` are given again.
    """

    @property
    def compiled(self) -> tp.Any:
        """JAX's own object."""
        return self._stage

    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> R:
        staged = self._function.staged(args, kwargs, self._key)
        try:
            return staged.run(self._stage)
        except TypeError as error:
            raise TypeError(f"{self._function!r}: {error}") from None
        except JaxRuntimeError as error:
            raise_failed(error)
            raise


# Shapes -------------------------------------------------------------------------------------------


def eval_shape(
    f: tp.Callable[..., R],
    *args: tp.Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **kwargs: tp.Any,
) -> R:
    """The result of a function, with a `jax.ShapeDtypeStruct` for each array; nothing is computed.

    Objects in the result are new and hold ShapeDtypeStructs; the arguments stay as they are. The
    shardings of arrays are kept; on a mesh, Variables have the sharding that their annotation asks for.

    Args:
        f: the function.
        args, kwargs: its arguments, arrays or ShapeDtypeStructs.
        graph: False refuses shared references.
        graph_updates: False ignores structure changes of arguments.

    Returns:
        The result of `f`, with new objects in it.

    Raises:
        TypeError: for an argument that is not an array, object or pytree of these.

    >>> import nnxlite as nnx
    >>> model = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> model.kernel.value
    ShapeDtypeStruct(shape=(2, 3), dtype=float32)
    """
    options = Options.of("eval_shape", Modes.of(graph, graph_updates))
    call = Call(options, unbind(f), args, kwargs, captured=True, read_only=True)
    with call.naming_arguments():
        left = jax.eval_shape(call.run_out, call.leaves)
    return with_shapes(call.definition, call.leaves, left)


def with_shapes(call: CallDef, leaves: list[tp.Any], left: Outputs) -> tp.Any:
    """The result of a function that was not run, with new objects in it.

    On a mesh, Variables without a sharding get the annotated one; without an annotation they are
    replicated.

    Args:
        call, leaves: the arguments.
        left: what leaves the function, by shape.
    """
    shapes = jax.tree_util.tree_map(_struct_of, leaves)
    out = replay(Inputs(call.build(shapes), call.trees), left)
    mesh = current_mesh()
    replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    roots = Inputs(out).roots
    for node in view(*roots).nodes() if roots else ():
        if isinstance(node, Variable):
            asked = node.get_metadata("out_sharding", None) or replicated
            metadata = {**node.get_metadata(), "out_sharding": asked, "eager_sharding": True}
            placed = lambda x, m=metadata: (
                place(x, m) if getattr(x, "sharding", None) is None else x
            )
            node.set_raw_value(jax.tree_util.tree_map(placed, node.get_raw_value()))
    return out


def _struct_of(x: tp.Any) -> tp.Any:
    """The shape, dtype and sharding of a value."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    aval = jax.typeof(x)
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        sharding = None
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)
