"""`filter_jit`: compile a function of anything; arrays are traced, all else is static."""

from __future__ import annotations

import functools
import typing as tp

import jax
import jax.numpy as jnp
from jax.core import Tracer

from nnxlite._config import context_key
from nnxlite._integers import as_integer
from nnxlite._typing import P, R
from nnxlite.boundary import (
    CallDef,
    Crossing,
    Inputs,
    Operands,
    Partition,
    argument_names,
    call_difference,
    describe,
    enter,
    leave,
    replay_crossing,
)
from nnxlite.filtered._arguments import ArgumentSpecs
from nnxlite.filtered._crossing import (
    Call,
    Filtered,
    inputs_of_call,
)
from nnxlite.filtered._donation import (
    DONATED,
    KEPT,
    Donate,
    Donated,
    as_donated,
    grouped,
    is_donated,
    without_warnings,
)
from nnxlite.filtered._errors import must_be_traced
from nnxlite.filtered._leaves import leaves_of
from nnxlite.filtered._predicates import are_arrays, is_array, is_array_like, only_arrays
from nnxlite.filtered._specs import MASK, answers
from nnxlite.objects import note_deleted
from nnxlite.transforms import (
    Jitted,
    Lowered,
    PerFunction,
    Staged,
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
    """What besides the arguments identifies a compiled program; the context alone if none is donated.

    Attributes:
        context: settings in force.
        donated: the leaves that are kept, and those that are donated.
    """

    context: tp.Any
    donated: Partition


def _finish_in_turn(inputs: Inputs, crossing: Crossing) -> tp.Any:
    wait_in_turn(crossing[1:])
    return replay_crossing(inputs, crossing)


class FilterJitCore:
    """The compiled side of one function under one set of options; shared by equal wrappers."""

    finish: tp.Callable[[Inputs, Crossing], tp.Any] = staticmethod(replay_crossing)
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
        key, names = operands.call.extra, argument_names(operands.call).leaves
        groups = key.donated.split(names) if isinstance(key, FilterJitKey) else (names,)
        for group, leaves in zip(groups, (operands, *donated)):
            yield from zip(group, leaves)

    def traced(self, operands: Operands, *donated_leaves: list[tp.Any]) -> tp.Any:
        """The function that JAX traces, from leaves to the outputs of the call."""
        call, leaves = operands.call, operands.leaves
        key: tp.Any = call.extra
        donated: tp.Collection[int | None] = ()
        if has_several_cpus() and self.finish is replay_crossing:
            self.finish = _finish_in_turn
        checks = checks_noted()
        if isinstance(key, FilterJitKey):
            leaves = key.donated.join(leaves, *donated_leaves)
            flags = zip(call.leaves(), key.donated.labels)
            donated = {leaf.graph_leaf for leaf, label in flags if label == DONATED}
        with self.traces.recorded(call, argument_names, leaves):
            (args, kwargs), inner = enter(call, leaves)
            result = self.fun()(*args, **kwargs)
            if self.options.out is not is_array:
                result = _checked_result(result, self.options.out)
            out = leave(inner, result, all_written=donated).crossing(is_array)
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
    for place, leaf, traced in zip(tree.definition.leaves(), tree.leaves, mask):
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
    return result if tree.where else tree.definition.build(leaves)


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
        leaves = inputs.leaves
        if not (self.options.specs == ARRAYS and only_arrays(leaves)):
            inputs.make_static([not t for t in self._traced(inputs, leaves, args, kwargs)], self)
            leaves = inputs.leaves
        if self.options.donate == "none":
            call = inputs.define(context_key())
            return inputs, call, (Operands(call, leaves),)
        partition = self._donate(Call(self.bound, inputs))
        call = inputs.define(FilterJitKey(context_key(), partition))
        kept, donated = partition.split(leaves)
        return inputs, call, (Operands(call, kept), donated)

    def _traced(
        self, inputs: Inputs, leaves: list[tp.Any], args: tp.Any, kwargs: tp.Any
    ) -> list[bool]:
        """Whether each leaf is traced.

        Raises TypeError for a leaf that must be traced and cannot be.
        """
        if self.options.specs == ARRAYS:
            return are_arrays(leaves)
        spec = self.options.specs.of_call(self.__wrapped__, self.bound, args, kwargs, self.name)
        traced = answers(inputs, spec, MASK._replace(name="filter_jit's spec"))
        for number, (leaf, wanted) in enumerate(zip(leaves, traced)):
            if wanted and not is_array_like(leaf):
                place = inputs.definition.leaves()[number]
                raise must_be_traced(repr(self), place.text(), leaf)
        return traced

    def _donate(self, call: Call) -> Partition:
        """The leaves that are kept, and those that are donated."""
        wanted = is_donated(self, self.options.donate, call)
        owners = zip(call.leaves, call.owners())
        groups = [DONATED if is_array(leaf) and wanted(o) else KEPT for leaf, o in owners]
        return grouped(self, call, groups, (KEPT, DONATED))

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
