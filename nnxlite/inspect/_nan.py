"""`find_nan`: where the first value that is not finite comes from.

The function runs on copies of its arguments, without compilation, while every method call of its
modules is observed.  The arrays that a call returns pass through a probe: an identity that looks at the
values, and, where they are differentiated, at the gradients that come back.

A module that returns the first values that are not finite is not to blame if it was called with such
values: they arose before the call, in the code of the module around it.  So each call knows the call
around it, and whether its own arguments were finite.  The report then names the code around the
outermost of the calls that were given such values, and the calls there between which they arose.
"""

from __future__ import annotations

import dataclasses
import functools
import typing as tp
import weakref

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves_with_path

from nnxlite._base.errors import path_text
from nnxlite._base.jax import key_name
from nnxlite._base.outline import array_text
from nnxlite._state._flat import content
from nnxlite.boundary._call_def import parameter_names
from nnxlite.graph._kinds import is_graph_node
from nnxlite.graph._walk import iter_graph
from nnxlite.inspect._calls import Path, copied_call, is_called, watched
from nnxlite.variables._variable import Variable

Where = tp.Literal["argument", "output", "between", "gradient", "result", "written"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Range:
    """The values of one array in short.

    Attributes:
        name: which array: a path.
        type: its dtype and shape, as `float32[2,3]`.
        low, high: the least and the greatest finite value, of complex ones the parts; NaN if there is
            none.
        nans, infinities: how many values are NaN, and how many infinite.
    """

    name: str
    type: str
    low: float
    high: float
    nans: int
    infinities: int

    @property
    def finite(self) -> bool:
        """Whether all values are finite."""
        return not (self.nans or self.infinities)

    def __str__(self) -> str:
        ends = f" from {self.low:.3g} to {self.high:.3g}" if self.low <= self.high else ""
        text = f"{self.name}: {self.type}{ends}"
        counts = (self.nans, "NaN"), (self.infinities, "infinite")
        return ", ".join([text, *(f"{count:,} {kind}" for count, kind in counts if count)])


@dataclasses.dataclass(frozen=True)
class NotFinite:
    """The origin of the first values that are not finite; `str` gives it as text.

    Attributes:
        where: "argument" if they were there before the call, "output" of a module, "between" the calls
            that a module (or the function) makes, "gradient" that came back to the output of a module,
            "result" of the function, or "written" by it to an object that it was given.
        path: of the module (or of the array, for an argument, a result or what was written), from the
            arguments; for "between" that of the module whose code it is, "" for the function itself.
        module: the class of the module and, unless it is `__call__`, its method; else "".
        values: the array; for "between" an argument of the next call.
        inputs: the arrays that the module was called with.
        between: the call before and the call after, each as "path (class)"; the first is "" where
            there is none.
        iteration: how many times the loops around it, such as `scan`, had made the call before: where
            one loop makes it each time, the number of the iteration, from 0; None outside of loops.
    """

    where: Where
    path: str
    module: str
    values: Range
    inputs: tuple[Range, ...] = ()
    between: tuple[str, str] | None = None
    iteration: int | None = None

    def __str__(self) -> str:
        who = _who(self.path, self.module)
        place = f"the {self.where} of {who}"
        if self.between is not None:
            before, after = self.between
            place = f"between {before} and {after}" if before else f"before {after}"
            place = f"{place}, in {who or 'the function'}"
        loop = "" if self.iteration is None else f", earlier calls in the loop: {self.iteration}"
        what = {"argument": "argument ", "result": "", "written": "value written to "}
        if self.where in what:  # the name of a result says "result"
            return f"First not finite: the {what[self.where]}{self.values}"
        called = ["  called with", *(f"    {one}" for one in self.inputs)] if self.inputs else []
        return "\n".join([f"First not finite: {place}{loop}", f"  {self.values}", *called])


def _who(path: str, module: str) -> str:
    return f"{path} ({module})" if module else path


def find_nan(fun: tp.Callable[..., tp.Any], /, *args: tp.Any, **kwargs: tp.Any) -> NotFinite | None:
    """The first value that is not finite in a call of a function; None if all are finite.

    It looks at the arguments, then at what the methods of their modules return, in the order in which
    they return, then at the gradients of these outputs, in the order in which they come back, and
    finally at the result and at what the arguments contain then. A module that was called with such
    values is not named: they arose in the code around it, which is. Infinities are meant so in an array
    whose name has the word "mask". The function runs operation by operation, so the call is slow, and
    the first one slowest: give it the loss where the whole step is not needed. The arguments stay as
    they are. Objects that the function does not take as arguments are not looked at.

    Args:
        fun: a function, such as a training step, which may be under `jit`, `grad` and other transforms;
            a module; or a method of one.
        args, kwargs: its arguments.

    Returns:
        A `NotFinite`, or None.

    Raises:
        Exception: whatever the function itself raises.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> class Log(nnx.Module):
    ...     def __call__(self, x):
    ...         return jnp.log(x)
    >>> model = nnx.Sequential(nnx.relu, Log())
    >>> found = nnx.find_nan(lambda model, x: model(x).sum(), model, -jnp.ones((1, 2)))
    >>> found.where, found.path, found.module
    ('output', 'model.layers.1', 'Log')

    What arises between two modules is found there:

    >>> class Net(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.a, self.b = nnx.Linear(2, 2, rngs=rngs), nnx.Linear(2, 2, rngs=rngs)
    ...     def __call__(self, x):
    ...         return self.b(jnp.log(0 * self.a(x)))
    >>> print(str(nnx.find_nan(Net(nnx.Rngs(0)), jnp.ones((1, 2)))).splitlines()[0])
    First not finite: between a (Linear) and b (Linear), in <root> (Net)
    """
    search = _Search()
    roots, call = copied_call(fun, args, kwargs)
    for path, root in roots:
        search.look("argument", path, root)
    if search.first:
        return search.first[0][0]
    with watched(roots, search.call), jax.disable_jit():
        result = call()
        jax.effects_barrier()
    search.first.sort(key=lambda found: found[0].where == "gradient")  # these after the outputs
    numbers = float, complex, np.generic
    as_array = lambda x: np.asarray(x) if isinstance(x, numbers) else x
    search.look("result", ("result",), jax.tree.map(as_array, result, is_leaf=is_graph_node))
    for path, root in roots:
        search.look("written", path, root)
    if not search.first:
        return None
    one, iteration = search.first[0]
    return dataclasses.replace(one, iteration=iteration())


@dataclasses.dataclass(eq=False)
class _Running:
    """A call of a module that is running, or the function itself.

    Attributes:
        path, module: of the module; empty for the function.
        around: the call that it is made in.
        node: the module, weakly: in each iteration of a loop it is another object of the same path.
        inputs: the arrays that it was called with, by name.
        measured: their values in short; see `measure`.
        ended: the last call that has returned values, of those made in it; see `_who`.
        runs: how many times it began after it had returned: more than 1 in a loop that is traced once.
        returned: whether it has, since it last began.
        nodes: for each module that has returned in it, by path, the objects that did: more than one in a
            loop of Python.
    """

    path: str = ""
    module: str = ""
    around: _Running | None = None
    node: tp.Any = None
    inputs: list[tuple[str, tp.Any]] = dataclasses.field(default_factory=list)
    measured: list[tuple[tp.Any, ...]] = dataclasses.field(default_factory=list)
    ended: str = ""
    runs: int = 0
    returned: bool = True
    nodes: dict[str, list[tp.Any]] = dataclasses.field(default_factory=dict)

    def begin(self, *_: tp.Any) -> None:
        """Note that it begins; under `vmap` that is called for each slice before any of them returns."""
        self.runs += self.returned
        self.returned = False
        if self.around is not None:
            nodes = self.around.nodes.setdefault(self.path, [])
            if not any(node is self.node for node in nodes):
                nodes.append(self.node)

    def iteration(self, runs: tp.Sequence[int]) -> int | None:
        """The number of the iteration of the innermost loop around it, after the whole run.

        Args:
            runs: how many times it, and the calls around it, had begun, outwards.
        """
        if self.around is None or not runs:
            return None
        if self.runs > 1:
            return runs[0] - 1
        nodes = self.around.nodes.get(self.path, ())
        if len(nodes) > 1:
            return next(i for i, node in enumerate(nodes) if node is self.node)
        return self.around.iteration(runs[1:])


Found = tuple["NotFinite", tp.Callable[[], int | None]]
"""What was found, and what gives the number of its iteration after the run."""


class _Search:
    """What was found in one search, in order."""

    def __init__(self) -> None:
        self.first: list[Found] = []
        self._running = _Running()

    def look(self, where: Where, beginning: Path, tree: tp.Any) -> None:
        """Look at the arrays in an argument, or in the result."""
        for path, leaf in _arrays(tree):
            full = path_text((*beginning, *path))
            if getattr(leaf, "is_deleted", bool)():  # donated
                continue
            values = range_of(full, leaf)
            if values.nans or (values.infinities and "mask" not in full.rpartition(".")[2]):
                self.first.append((NotFinite(where, full, "", values), lambda: None))

    def call(
        self, call: tp.Any, where: Path, obj: tp.Any, name: str, args: tp.Any, kwargs: tp.Any
    ) -> tp.Any:
        """Make a call, with probes on what it returns."""
        path = path_text(where) if where else ""
        module = type(obj).__name__ + ("" if name == "__call__" else f".{name}")
        named = _named(obj, name, args, kwargs)
        inputs = [(".".join(map(str, keys)), leaf) for keys, leaf in _arrays(named)]
        measured = [measure(x) for _, x in inputs]
        around = self._running
        this = _Running(path, module, around, weakref.ref(obj), inputs, measured)
        self._running = this
        jax.debug.callback(this.begin, measured)
        try:
            outputs = call(obj, *args, **kwargs)
        finally:
            self._running = around
        leaves, treedef = jax.tree.flatten(outputs, is_leaf=is_opaque)
        probed = [
            self._probe(f"output {i}" if leaves[1:] else "output", leaf, this, around)
            if is_measured(leaf)
            else leaf
            for i, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(treedef, probed)

    def _probe(self, name: str, leaf: tp.Any, this: _Running, around: _Running) -> tp.Any:
        """The array; its values, and its gradient if it gets one, are looked at."""
        calls = [this]
        while (outer := calls[-1].around) is not None and outer.around is not None:
            calls.append(outer)

        def note(values: tp.Any, by_call: tp.Sequence[tp.Any]) -> None:
            seen = range_of(name, leaf, values)
            this.returned = True
            if seen.finite:
                around.ended = _who(this.path or _ROOT, this.module)
                return
            ranges = [
                [range_of(n, x, one) for (n, x), one in zip(call.inputs, measured)]
                for call, measured in zip(calls, by_call)
            ]
            self.first.append(_blamed(calls, ranges, seen))

        def note_gradient(values: tp.Any) -> None:
            seen = range_of(name, leaf, values)
            if not seen.finite:
                found = NotFinite("gradient", this.path or _ROOT, this.module, seen)
                self.first.append((found, functools.partial(this.iteration, ())))

        inputs = [call.measured for call in calls]
        jax.debug.callback(note, measure(leaf), inputs)
        return leaf if isinstance(leaf, np.ndarray) else _with_gradient(note_gradient, leaf)


_ROOT = path_text(())


def _blamed(calls: list[_Running], ranges: list[list[Range]], seen: Range) -> Found:
    """Where the values came from that a call has returned.

    Args:
        calls: that call, and those around it, outwards.
        ranges: the arrays that each of them was called with.
        seen: the first array that it returned with values that are not finite.
    """
    number, bad = 0, None
    for at, inputs in enumerate(ranges):
        given = next((one for one in inputs if _is_bad(one, seen)), None)
        if given is None:
            break
        number, bad = at, given
    this = calls[number]
    path, outer = this.path or _ROOT, this.around
    iteration = functools.partial(this.iteration, [call.runs for call in calls[number:]])
    if bad is None:
        return NotFinite("output", path, this.module, seen, tuple(ranges[0])), iteration
    assert outer is not None
    where = outer.path or (_ROOT if outer.module else "")
    bad = dataclasses.replace(bad, name=f"{bad.name} of {path}")
    ends = outer.ended, _who(path, this.module)
    return NotFinite("between", where, outer.module, bad, between=ends), iteration


def _is_bad(given: Range, returned: Range) -> bool:
    """Whether values that are not finite were given already.

    Infinities in a mask are meant so: there the module made NaN of them.
    """
    masked = any(word in given.name for word in ("mask", "bias"))
    return bool(given.nans or (given.infinities and not (masked and returned.nans)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_gradient(note: tp.Callable[[tp.Any], None], x: jax.Array) -> jax.Array:
    return x


@_with_gradient.defjvp
def _with_tangent(note: tp.Callable[[tp.Any], None], primals: tp.Any, tangents: tp.Any) -> tp.Any:
    """The tangent, as the solution of an equation, which can be transposed, batched, differentiated."""

    def solve(_: tp.Any, gradient: jax.Array) -> jax.Array:
        jax.debug.callback(note, measure(gradient))
        return gradient

    equal = jax.lax.custom_linear_solve(lambda x: x, tangents[0], lambda _, x: x, solve)
    return primals[0], equal


def _named(obj: tp.Any, name: str, args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]) -> tp.Any:
    """The arguments of a call by name."""
    names = parameter_names(getattr(obj, name))
    return {**{names[i] if i < len(names) else i: arg for i, arg in enumerate(args)}, **kwargs}


def is_measured(value: tp.Any) -> bool:
    is_array = isinstance(value, (jax.Array, np.ndarray)) and value.size > 0
    return is_array and jnp.issubdtype(value.dtype, jnp.inexact)


def is_opaque(value: tp.Any) -> bool:
    return isinstance(value, Variable) or is_called(value)


def _arrays(tree: tp.Any) -> tp.Iterator[tuple[tuple[tp.Any, ...], tp.Any]]:
    """The floating arrays in a tree of objects, with their paths."""
    for path, value in iter_graph(tree):
        is_variable = isinstance(value, Variable)
        pairs = tree_leaves_with_path(content(value)) if is_variable else [((), value)]
        for keys, array in pairs:
            if is_measured(array):
                yield (*path, *map(key_name, keys)), array


def is_finite(x: tp.Any) -> tp.Any:
    """Whether each value is finite; JAX would make float32 of NumPy's float64."""
    return np.isfinite(x) if isinstance(x, np.ndarray) else jnp.isfinite(x)


def measure(x: tp.Any) -> tp.Any:
    """The least and greatest finite value, and how many are NaN or infinite; see `range_of`."""
    if isinstance(x, np.ndarray):
        return range_of("", x, _measure(x, np))
    with jax.disable_jit(False):  # one program for each shape, not one for each operation
        return _compiled(jax.lax.stop_gradient(x))


def _measure(x: tp.Any, np: tp.Any = jnp) -> tuple[tp.Any, ...]:
    x = x if x.dtype.itemsize > 4 else np.asarray(x, np.float32)
    nans, wrong = np.isnan(x).sum(), (~is_finite(x)).sum()
    x = np.stack([x.real, x.imag]) if np.iscomplexobj(x) else x
    finite = is_finite(x)
    low = np.min(np.where(finite, x, np.inf))
    high = np.max(np.where(finite, x, -np.inf))
    low, high = (np.where(finite.any(), end, np.nan) for end in (low, high))
    return low, high, nans, wrong - nans


_compiled = jax.jit(_measure)


def range_of(name: str, array: tp.Any, measured: tp.Any = None) -> Range:
    """The values of an array in short, of one that `measure` measured while it was traced too."""
    measured = measure(array) if measured is None else measured
    if isinstance(measured, Range):
        return dataclasses.replace(measured, name=name)
    low, high, nans, infinities = measured
    return Range(name, array_text(array), float(low), float(high), int(nans), int(infinities))
