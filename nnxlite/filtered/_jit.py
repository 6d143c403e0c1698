"""`filter_jit`: compile a function of anything; arrays are traced, all else is static."""

from __future__ import annotations

import functools
import typing as tp

import jax
import jax.numpy as jnp
from jax.core import Tracer

from nnxlite._config import context_key
from nnxlite._integers import as_integer
from nnxlite._jax import PyTreeDef
from nnxlite._statics import UnhashableStatic, facts, static_key
from nnxlite._typing import P, R
from nnxlite.boundary import (
    CallDef,
    Division,
    Inputs,
    Operands,
    argument_names,
    call_difference,
    describe,
    enter,
    leave,
)
from nnxlite.filtered._arguments import ArgumentSpecs
from nnxlite.filtered._crossing import (
    Call,
    Crossed,
    Filtered,
    inputs_of_call,
    put_back,
    take_out,
)
from nnxlite.filtered._donation import (
    DONATED,
    KEPT,
    STATIC,
    Donate,
    Donated,
    as_donated,
    grouped,
    is_donated,
    without_warnings,
)
from nnxlite.filtered._errors import must_be_traced
from nnxlite.filtered._leaves import form_of, leaves_of
from nnxlite.filtered._predicates import are_arrays, is_array, is_array_like, only_arrays
from nnxlite.filtered._specs import MASK, answers
from nnxlite.objects import note_deleted
from nnxlite.transforms import (
    Jitted,
    Lowered,
    PerFunction,
    Staged,
    StaticArgument,
    Traces,
    Waiting,
    checks_noted,
    decorated,
    failed_check,
    has_several_cpus,
    name_of,
    not_owning,
    other_structure,
    program_name,
    run_donating,
    wait_in_turn,
    weakly,
)
from nnxlite.variables import MISSING


class FilterJitOptions(tp.NamedTuple):
    """The options of `filter_jit`."""

    donate: Donated
    specs: ArgumentSpecs
    out: tp.Any
    jax_options: tuple[tuple[str, tp.Any], ...]
    max_traces: int | None = None


class FilterJitKey(tp.NamedTuple):
    """What besides the structure of the arguments identifies a compiled program.

    It is the context alone if all leaves are traced and none is donated.

    Attributes:
        context: settings in force.
        division: the group of each leaf, and the static leaves.
        values: the structure of the values of graph leaves; see `Form`.
    """

    context: tp.Any
    division: Division
    values: PyTreeDef


def _finish_in_turn(inputs: Inputs, crossed: Crossed) -> tp.Any:
    wait_in_turn(crossed[1])
    return put_back(inputs, crossed)


class FilterJitCore:
    """The compiled side of one function under one set of options; shared by equal wrappers."""

    finish: tp.Callable[[Inputs, Crossed], tp.Any] = staticmethod(put_back)
    names = staticmethod(argument_names)

    def __init__(self, fun: tp.Callable[..., tp.Any], options: FilterJitOptions) -> None:
        self.fun, self.options = weakly(fun), options
        program, more = program_name(fun), dict(options.jax_options)
        if options.donate != "none":
            more["donate_argnums"] = (1,)
        run, names = not_owning(self.traced), not_owning(self.named)
        self.jitted = jax.jit(describe(run, fun, program, names), **more)
        name = f"filter_jit({name_of(fun)})"
        self.traces = Traces(name, fun, program, options.max_traces)

    def named(self, operands: Operands, *donated: list[tp.Any]) -> tp.Iterator[tuple[str, tp.Any]]:
        """The leaves that JAX is given, with the names of their arguments."""
        call = operands.call
        names = argument_names(call).leaves
        groups: tp.Sequence[tp.Any] = (names,)
        if isinstance(call.extra, FilterJitKey):
            form = form_of(call, call.extra.values)
            inside = [
                names[call.num_arrays + n] + "".join(f"[{k!r}]" for k in keys)
                for n, keys in form.inside
            ]
            groups = call.extra.division.partition.split([*names[: call.num_arrays], *inside])
        for group, leaves in zip(groups, (operands, *donated)):
            yield from zip(group, leaves)

    def traced(self, operands: Operands, *donated_leaves: list[tp.Any]) -> tp.Any:
        """The function that JAX traces, from leaves to the outputs of the call."""
        call, leaves = operands.call, operands.leaves
        key: tp.Any = call.extra
        donated: tp.Collection[int] = ()
        if has_several_cpus() and self.finish is put_back:
            self.finish = _finish_in_turn
        checks = checks_noted()
        if isinstance(key, FilterJitKey):
            form = form_of(call, key.values)
            leaves = form.for_boundary(key.division.join(leaves, *donated_leaves))
            donated = form.numbers([x == DONATED for x in key.division.partition.labels])
        with self.traces.recorded(call, argument_names, leaves):
            (args, kwargs), inner = enter(call, leaves)
            result = self.fun()(*args, **kwargs)
            if self.options.out is not is_array:
                result = _checked_result(result, self.options.out)
            out = take_out(leave(inner, result, all_written=donated))
        if checks_noted() != checks and not isinstance(self.finish, Waiting):
            self.finish = Waiting(self.finish)
        return out

    def run_donating(self, inputs: Inputs, jitted: tp.Any, groups: tp.Any) -> tp.Any:
        """Call the function, or what it was compiled to, and write back; arrays may be donated."""
        finish = lambda crossed: self.finish(inputs, crossed)  # which the trace may set
        return run_donating(jitted, groups, finish, lambda: self.named(*groups))


def _checked_result(result: tp.Any, spec: tp.Any) -> tp.Any:
    """The result, with arrays where `out` is true.

    Raises ValueError for a traced value where `out` is false, TypeError for the opposite.
    """
    tree = leaves_of(result)
    leaves = []
    mask = answers(tree, spec, MASK._replace(name="out"))
    for place, leaf, traced in zip(tree.form.places, tree.leaves, mask):
        if traced and not is_array(leaf):
            if not is_array_like(leaf):
                raise must_be_traced("filter_jit(out=)", place.text(), leaf)
            leaf = jnp.asarray(leaf)
        if not traced and isinstance(leaf, Tracer):
            raise ValueError(
                f"filter_jit: out says that the result at '{place.text()}' is static, but it is "
                "computed from traced values."
            )
        leaves.append(leaf)
    return result if tree.form.where else tree.form.build(leaves)


# As for `jit`: one `jax.jit` object for each function and options, which lives as long as the function.
_cores: PerFunction[FilterJitCore] = PerFunction()


class FilterJit(Filtered[P, R], Jitted):
    """A compiled function, as `filter_jit` returns it."""

    name = "filter_jit"
    options: FilterJitOptions

    def __init__(self, fun: tp.Any, options: FilterJitOptions) -> None:
        super().__init__(fun, options)
        make = functools.partial(FilterJitCore, self.bound.fun, options)
        self._core = _cores.get(self.bound.fun, options, make)
        self.jitted_fn = self._core.jitted
        self._default = options.specs == ARRAYS and options.donate == "none"

    def _enter(self, args: tp.Any, kwargs: tp.Any) -> tuple[Inputs, CallDef, tp.Any]:
        """The arguments, the key of the program, and the groups of leaves that it takes."""
        inputs = inputs_of_call(self.bound, args, kwargs)
        # Training loops pass arrays only and donate nothing: no leaf needs a check of its own. That is
        # 1.4x of `jax.jit` for 72 arrays, and would be 2.3x (benchmarks/filtered.py).
        leaves = inputs.leaves
        if self._default and only_arrays(leaves):
            call = inputs.define(context_key())
            return inputs, call, (Operands(call, leaves),)
        key, (kept, donated) = self._divided(Call(self.bound, inputs), args, kwargs)
        own = not all(box.exact for box in key.division.statics)
        call = inputs.define(key, own)
        return inputs, call, (Operands(call, kept), donated)

    def _divided(self, call: Call, args: tp.Any, kwargs: tp.Any) -> tuple[FilterJitKey, tp.Any]:
        """The key and the groups, from a check of each leaf."""
        traced = self._traced(call, args, kwargs)
        groups = [KEPT if t else STATIC for t in traced]
        if self.options.donate != "none":
            self._donate(call, groups)
        partition = grouped(self, call, groups)
        kept, donated, _ = partition.split(call.leaves)
        division = Division(partition, self._boxes(call, partition.positions[2]))
        return FilterJitKey(context_key(), division, call.form.values), (kept, donated)

    def _traced(self, call: Call, args: tp.Any, kwargs: tp.Any) -> list[bool]:
        """Whether each leaf is traced.

        Raises TypeError for a leaf that must be traced and cannot be.
        """
        if self.options.specs == ARRAYS:
            return are_arrays(call.leaves)
        spec = self.options.specs.of_call(self.__wrapped__, self.bound, args, kwargs, self.name)
        traced = answers(call, spec, MASK._replace(name="filter_jit's spec"))
        for number, (leaf, wanted) in enumerate(zip(call.leaves, traced)):
            if wanted and not is_array_like(leaf):
                raise must_be_traced(repr(self), call.form.places[number].text(), leaf)
        return traced

    def _donate(self, call: Call, groups: list[str]) -> None:
        """Move the donated leaves to their group."""
        wanted = is_donated(self, self.options.donate, call)
        for number, (leaf, owner) in enumerate(zip(call.leaves, call.owners())):
            if groups[number] == KEPT and is_array(leaf) and wanted(owner):
                groups[number] = DONATED

    def _boxes(self, call: Call, numbers: list[int]) -> tuple[StaticArgument, ...]:
        """Static leaves, given by number, as part of a key.

        Raises ValueError for one that is unhashable.
        """
        out = []
        for number in numbers:
            leaf = call.leaves[number]
            try:
                out.append(StaticArgument(leaf, static_key(leaf), facts(leaf).exact))
            except UnhashableStatic:
                path = call.form.places[number].text()
                raise ValueError(
                    f"{self!r}: the static leaf at '{path}' of the arguments is unhashable: it is of "
                    f"type '{type(leaf).__name__}'. Static leaves are part of the key of a compiled "
                    "program. Pass a hashable value, such as a tuple or frozenset, or an array."
                ) from None
        return tuple(out)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        inputs, call, groups = self._enter(args, kwargs)
        core = self._core
        donate = self.options.donate
        try:
            if donate == "none":
                crossed = core.jitted(*groups)
                return core.finish(inputs, crossed)
            with without_warnings(donate):
                return core.run_donating(inputs, core.jitted, groups)
        except RuntimeError as error:
            failed = failed_check(error)
            if failed is None:
                note_deleted(
                    error, "the call", lambda: zip(argument_names(call).leaves, inputs.leaves)
                )
                raise
            raise failed from None

    def staged(self, args: tp.Any, kwargs: tp.Any, program: CallDef | None = None) -> Staged:
        """A call, ready for JAX; see `Stageable`."""
        inputs, call, groups = self._enter(args, kwargs)
        core = self._core
        if program is not None and call != program:
            what = call_difference(program, call)
            raise other_structure(self, what)
        run = lambda jitted: core.run_donating(inputs, jitted, groups)
        return Staged(call, lambda: core.jitted, groups, run)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered[R]:
        """Lower the function for these arguments, without running it."""
        with without_warnings(self.options.donate):
            return Lowered.of("lower", self, args, kwargs)


ARRAYS = ArgumentSpecs.given(is_array, is_array, (), None)
"""The specs by default: arrays are traced, and all else is static."""


@tp.overload
def filter_jit(
    fun: tp.Callable[P, R],
    *,
    donate: Donate | int | tp.Sequence[int | str] = "none",
    default: tp.Any = is_array,
    fn: tp.Any = is_array,
    args: tp.Sequence[tp.Any] = (),
    kwargs: tp.Mapping[str, tp.Any] | None = None,
    out: tp.Any = is_array,
    max_traces: int | None = None,
    **jitkwargs: tp.Any,
) -> FilterJit[P, R]: ...
@tp.overload
def filter_jit(
    *,
    donate: Donate | int | tp.Sequence[int | str] = "none",
    default: tp.Any = is_array,
    fn: tp.Any = is_array,
    args: tp.Sequence[tp.Any] = (),
    kwargs: tp.Mapping[str, tp.Any] | None = None,
    out: tp.Any = is_array,
    max_traces: int | None = None,
    **jitkwargs: tp.Any,
) -> tp.Callable[[tp.Callable[P, R]], FilterJit[P, R]]: ...
def filter_jit(
    fun: tp.Any = MISSING,
    *,
    donate: Donate | int | tp.Sequence[int | str] = "none",
    default: tp.Any = is_array,
    fn: tp.Any = is_array,
    args: tp.Sequence[tp.Any] = (),
    kwargs: tp.Mapping[str, tp.Any] | None = None,
    out: tp.Any = is_array,
    max_traces: int | None = None,
    **jitkwargs: tp.Any,
) -> tp.Any:
    """Compile a function of any pytrees: arrays are traced, everything else is static.

    Arguments and results may be any pytrees and graph objects, with leaves of any type. What the
    function writes into objects stays there, as with `nnx.jit`. Equal static leaves compile once.

    Args:
        fun: the function; a bound method or callable object enters with its arrays traced. Without
            it a decorator is returned.
        donate: the arguments whose arrays the call may reuse: `"all"`, `"all-except-first"`, `"none"`;
            with `"warn"` and `"warn-except-first"` JAX warns of those it could not use. Or the number
            of an argument, or a sequence of numbers and names.
        default: a spec of the traced leaves in every argument: a bool, a function of a leaf, a Variable
            filter, or a prefix of these.
        fn: the same for the function itself.
        args: the same for the first positional arguments, in order.
        kwargs: the same for arguments by name, positional or not.
        out: the same for the result: which leaves must be arrays; the others must not depend on one.
        max_traces: how many times the function may be traced; one more raises RuntimeError with the
            reason.
        jitkwargs: as for `jax.jit`.

    Returns:
        A function of the same arguments, compiled for each structure of them; its methods `lower`,
        `explain`, `cache_info` and `clear_cache` are those of `nnx.jit`.

    Raises:
        ValueError: for a static leaf that is unhashable, or a spec that is not a prefix.
        TypeError: for a leaf that must be traced and is not an array or number.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> @nnx.filter_jit
    ... def power(x, n, name):
    ...     return {name: x**n}
    >>> power(jnp.array(3.0), 2, "square")
    {'square': Array(9., dtype=float32, weak_type=True)}
    """
    for name in ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames"):
        if name in jitkwargs:
            raise ValueError(
                f"filter_jit takes no {name}=: whether a leaf is static or donated is decided leaf "
                "by leaf. Use args=, kwargs= and donate=."
            )
    specs = ArgumentSpecs.given(default, fn, args, kwargs)
    options = FilterJitOptions(
        as_donated(donate), specs, out, tuple(jitkwargs.items()), as_integer(max_traces)
    )
    return decorated(FilterJit, fun, options)
