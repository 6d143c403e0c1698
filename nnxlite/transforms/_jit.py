"""`jit`: compile functions of mutable objects, at the cost of `jax.jit` over flat leaves.

Each call flattens the arguments (but not graph objects), finds their plan, reads the leaves, runs the
compiled function, and stores the values that it wrote.  The compiled function is one `jax.jit` object
for each user function; its cache key is the interned `CallDef`.

The stages of ahead-of-time compilation, `Traced`, `Lowered` and `Compiled`, are as in `jax.stages`, and
the same for `jit`, `filter_jit` and `filter_pmap`, each of which gives a call as a `Staged`.
"""

from __future__ import annotations

import functools
import typing as tp

import jax
from jax.errors import JaxRuntimeError

from nnxlite._base.config import Modes, context_key
from nnxlite._base.jax import as_integer
from nnxlite.boundary._call_def import CallDef, Operands, leaf_names, paths_of
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._out import replay
from nnxlite.boundary._prefixes import by_path
from nnxlite.boundary._refusals import call_difference, refuse_non_arrays
from nnxlite.objects._scopes import note_deleted
from nnxlite.transforms._call import select_arguments, unboxed
from nnxlite.transforms._compiles import CacheInfo, Explanation
from nnxlite.transforms._finish import raise_failed
from nnxlite.transforms._jit_program import JitProgram, outputs_of
from nnxlite.transforms._shapes import place_abstract
from nnxlite.transforms._wrapper import Options, P, R, Transform, name_of, program
from nnxlite.variables._definition import MISSING

if tp.TYPE_CHECKING:
    from nnxlite.transforms._signatures import G, JitKeywords


class Staged(tp.NamedTuple):
    """A call of a compiled function, ready for JAX, as its method `staged` gives it.

    `staged(args, kwargs, program=None)` takes the key of a compiled program that is called, without its
    static arguments; it raises TypeError, made by `other_structure`, for a call of another program.

    Attributes:
        key: the same object for all calls of the same program.
        jitted: finds JAX's function, which must be traced for its shardings first, if it has any.
        groups: its arguments.
        run: calls the function, or what it was compiled to, and gives the caller's result.
    """

    key: CallDef
    jitted: tp.Callable[[], tp.Any]
    groups: tp.Sequence[tp.Any]
    run: tp.Callable[[tp.Any], tp.Any]


def other_structure(function: object, what: str) -> TypeError:
    """The error for a call of a compiled function whose arguments have another structure."""
    return TypeError(
        f"{function!r} was compiled for arguments of another structure: "
        f"{what or 'the static leaves, or settings, differ'}. Lower and compile it again for these "
        "arguments."
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
        return cls(function, staged.key, getattr(staged.jitted(), method)(*staged.groups))

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


class JitWrapped(Transform[P, R]):
    """A compiled function, as `jit` returns it.

    Attributes:
        fun: the function that was given to `jit`.
        jitted_fn: the `jax.jit` object, which takes leaves (with shardings there are several, and this
            is the object that manages them); `jitted_fn._cache_size()` is the number of compiled
            programs. A function that wraps this one with `functools.wraps` has it as well.
    """

    partial_args: tuple[tp.Any, ...] = ()

    def __init__(self, fun: tp.Callable[P, R], options: Options) -> None:
        super().__init__(fun, options)
        self.fun = fun
        self._static = options.static  # faster to read
        self._has_static = bool(self._static)
        self._compiled: JitProgram = program(self, None, lambda: JitProgram(self))
        self.jitted_fn = self._compiled if self._compiled.sharded else self._compiled.jitted

    def _inputs(self, args: tp.Any, kwargs: tp.Any) -> Inputs:
        """The arguments of a call, those that are not traced being static leaves."""
        fun, first, named = self.bound
        if first or named:
            args, kwargs = (*first, *args), {**named, **kwargs}
        if self._has_static:
            args, kwargs = self._static.boxed(fun, args, kwargs, len(first))
        inputs = Inputs.of_call(args, kwargs, self.bound.names)
        if not self.options.modes.graph:
            inputs.in_mode(False, "jit")
        if self._has_static:
            unboxed(inputs)
        return inputs

    def explain(self) -> Explanation:
        """Why this function was last compiled: what was new in its most recent trace.

        >>> import nnxlite as nnx, jax.numpy as jnp
        >>> step = nnx.jit(lambda model, x: model(x))
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> _ = step(model, jnp.ones((1, 2))), step(model, jnp.ones((5, 2)))
        >>> step.explain().causes
        ('x: float32[1,2] -> float32[5,2]',)
        """
        return self._compiled.traces.explain()

    def cache_info(self) -> CacheInfo:
        """How many times this function was traced, the programs in the cache, and the time it took."""
        return self._compiled.traces.info(self._cache_size())

    def clear_cache(self) -> None:
        """Drop all compiled programs of this function."""
        self.jitted_fn.clear_cache()

    def _cache_size(self) -> int:
        return self.jitted_fn._cache_size()

    # ahead of time -----------------------------------------------------------------------------

    def staged(self, args: tp.Any, kwargs: tp.Any, program: CallDef | None = None) -> Staged:
        """A call, ready for JAX; see `Staged`."""
        static = {} if program is None else self._static_arguments(program)
        given_again = not static.keys().isdisjoint(kwargs)
        first = len(self.bound.args) + len(self.partial_args)
        for where, value in static.items():
            if isinstance(where, str):
                kwargs = {**kwargs, where: value}
            elif where >= first:
                args = (*args[: where - first], value, *args[where - first :])
        inputs = self._inputs(args, kwargs)
        call, own = inputs.define(context_key()), self._compiled
        if program is not None and (call != program or given_again):
            what = [call_difference(program, call)]
            if static or (call.static and self._has_static):
                what.append("a static argument, which is part of the program, was given again")
            same = "settings of nnxlite differ" if call.static == program.static else ""
            raise other_structure(self, ", or ".join(filter(None, what)) or same)
        groups = own.groups(call, inputs.leaves)
        finish = functools.partial(own.finish, inputs)
        run = lambda jitted: own.call_jitted(jitted, call, groups, finish)
        return Staged(call, lambda: own.jitted_for(call, groups), groups, run)

    def _static_arguments(self, program: CallDef) -> dict[int | str, tp.Any]:
        """The static arguments of a program, by number or name."""
        if program.static is None or not self._has_static:
            return {}
        paths, positions = paths_of(program.treedef), program.array_positions()
        static = zip(program.static.numbers, program.static.values)
        return {tp.cast(tp.Any, paths[positions[n]][1]): value for n, value in static}

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered[R]:
        """Lower the function for these arguments, without running it."""
        return Lowered.of("lower", self, args, kwargs)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced[R]:
        """Trace the function for these arguments, without lowering it."""
        return Traced.of("trace", self, args, kwargs)

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> tp.Any:
        """The result with `jax.ShapeDtypeStruct`s for arrays; nothing is computed or written."""
        inputs = self._inputs(args, kwargs)
        call = inputs.define(context_key())
        groups = self._compiled.groups(call, inputs.leaves)
        crossing = self._compiled.jitted_for(call, groups).eval_shape(*groups)
        out = replay(Inputs(call.build(inputs.leaves), call.trees), outputs_of(crossing))
        place_abstract(out)
        return out

    def donation(self, *args: P.args, **kwargs: P.kwargs) -> Donation:
        """What `donate="written"` reuses in a call with these arguments; nothing runs.

        Raises ValueError for a function without `donate="written"`.
        """
        if self.options.donate != "written":
            raise ValueError(f"{self!r} does not donate what it writes: pass donate='written'.")
        inputs = self._inputs(args, kwargs)
        call = inputs.define(context_key())
        self._compiled.groups(call, inputs.leaves)
        chosen, places = self._compiled.donated(call), call.graph_leaves()
        leaves = jax.tree_util.tree_leaves([inputs.values[i] for i in chosen])
        size = sum(getattr(x, "nbytes", 0) for x in leaves)
        return Donation(tuple(places[i].text() for i in chosen), size)


class Donation(tp.NamedTuple):
    """What `donate="written"` reuses for one structure of arguments.

    Attributes:
        paths: of the donated Variables, argument first.
        bytes: the memory that is reused in each call.
    """

    paths: tuple[str, ...]
    bytes: int


def run_jit(jitted: JitWrapped[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    """Call a compiled function."""
    inputs = jitted._inputs(args, kwargs)
    call, own = inputs.define(context_key()), jitted._compiled
    try:
        if own.plain:
            return own.finish(inputs, own.jitted(Operands(call, inputs.leaves)))
        return own(inputs, call)
    except TypeError:
        remedy = "Make it static (static_argnums, static_argnames) if it is not a number."
        inside = "Use nnx.filter_jit: every leaf that is not an array is static there."
        refuse_non_arrays(repr(jitted), call, inputs.leaves, remedy, inside)
        raise
    except RuntimeError as error:
        raise_failed(error)
        note_deleted(error, "the call", lambda: zip(leaf_names(call), inputs.leaves))
        raise


@tp.overload
def jit(fun: G, **options: tp.Unpack[JitKeywords]) -> G: ...
@tp.overload
def jit(fun: tp.Callable[P, R], **options: tp.Unpack[JitKeywords]) -> JitWrapped[P, R]: ...
@tp.overload
def jit(
    **options: tp.Unpack[JitKeywords],
) -> tp.Callable[[tp.Callable[P, R]], JitWrapped[P, R]]: ...
def jit(
    fun: tp.Any = MISSING,
    *,
    in_shardings: tp.Any = None,
    out_shardings: tp.Any = None,
    static_argnums: int | tp.Sequence[int] | None = None,
    static_argnames: str | tp.Iterable[str] | None = None,
    donate_argnums: int | tp.Sequence[int] | None = None,
    donate_argnames: str | tp.Iterable[str] | None = None,
    keep_unused: bool = False,
    device: tp.Any = None,
    backend: str | None = None,
    inline: bool = False,
    donate: tp.Literal["written"] | None = None,
    max_traces: int | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """Compile a function whose arguments may contain modules, Variables and states.

    Inside, the arguments are new objects of the same structure and sharing; what the function
    writes (values of Variables, attributes, new objects) appears on the caller's own objects after
    the call. A failed call changes nothing.

    A program is compiled for each structure of the arguments: shapes and dtypes of arrays, static
    attributes and sharing of objects, values of static arguments. `explain()` of the result says
    why the last one was compiled.

    Args:
        fun: the function, bound method, or callable object; without it `jit` returns a decorator.
        in_shardings: one sharding for each argument, or a prefix; `StateSharding` for objects.
        out_shardings: the same for the result.
        static_argnums, static_argnames: arguments that are part of the program; hashable.
        donate_argnums, donate_argnames: arguments whose buffers may be reused for the outputs.
        keep_unused, device, backend, inline: as in `jax.jit`.
        donate: "written" donates the buffers of exactly the Variables that the function writes.
        max_traces: how many times the function may be traced; see `JitWrapped.explain`.
        graph: False refuses shared references.
        graph_updates: False propagates values of Variables only, not structure.

    Returns:
        A function of the same arguments. It has the methods `lower`, `trace` and `eval_shape` of a
        function under `jax.jit`, and `explain`, `cache_info` and `clear_cache`.

    Raises:
        ValueError: for an unhashable static argument, or a buffer donated twice.
        TypeError: where an argument contains something that is not an array.
        TraceContextError: where an object to be written belongs to another trace level.
        RuntimeError: by a call that would need one trace more than `max_traces`; it says why.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> @nnx.jit
    ... def double(model):
    ...     model.kernel *= 2
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> before = model.kernel.value
    >>> double(model)
    >>> bool((model.kernel.value == 2 * before).all())
    True

    Arguments that are neither arrays nor objects must be static; a training step may donate what it
    replaces:

    >>> @nnx.jit(static_argnames="train", donate="written")
    ... def step(model, x, train):
    ...     if train:
    ...         model.bias += 1.0
    ...     return model(x)
    >>> step(model, jnp.ones((4, 2)), train=True).shape, model.bias[...].tolist()
    ((4, 3), [1.0, 1.0, 1.0])
    >>> step.cache_info().traces
    1
    """
    modes = Modes.of(graph, graph_updates)

    def jitted(fun: tp.Any) -> JitWrapped[..., tp.Any]:
        if donate not in (None, "written"):
            raise ValueError(f"donate must be 'written' or None, got {donate!r}.")
        if donate and (donate_argnums is not None or donate_argnames is not None):
            raise ValueError("Give either donate='written' or donate_argnums/donate_argnames.")
        jax_options: dict[str, tp.Any] = {"keep_unused": keep_unused, "inline": inline}
        if device is not None:
            jax_options["device"] = device
        if backend is not None:
            jax_options["backend"] = backend
        static = select_arguments(fun, static_argnums, static_argnames, "static")
        donated = select_arguments(fun, donate_argnums, donate_argnames, "donate")
        both = (static.names & donated.names) or (static.numbers & donated.numbers)
        if both:
            raise ValueError(
                f"jit({name_of(fun)}): an argument is either static or donated, but "
                f"{sorted(both)} are given as both."
            )
        more = {
            "static": static,
            "donate": donate or donated,
            "in_shardings": by_path(in_shardings),
            "out_shardings": by_path(out_shardings),
            "jax_options": tuple(sorted(jax_options.items())),
            "max_traces": as_integer(max_traces),
        }
        return JitWrapped(fun, Options.of("jit", modes, run_jit, **more))

    return jitted if fun is MISSING else jitted(fun)
