"""`filter_jit`: compile a function of anything; arrays are traced, all else is static."""

from __future__ import annotations

import functools
import typing as tp

import jax.numpy as jnp
from jax.core import Tracer

from nnxlite._base.config import Modes
from nnxlite._base.jax import as_integer
from nnxlite._base.typing import P, R
from nnxlite.boundary._inputs import Inputs
from nnxlite.filtered._arguments import ArgumentSpecs
from nnxlite.filtered._crossing import inputs_of_call, leaves_of, must_be_traced, unbound
from nnxlite.filtered._donation import Donate, as_donated, donated_owners, without_warnings
from nnxlite.filtered._predicates import are_arrays, is_array, is_array_like, only_arrays
from nnxlite.filtered._specs import MASK, answers
from nnxlite.transforms._jit import JitOptions, JitWrapped
from nnxlite.transforms._stages import Lowered
from nnxlite.transforms._wrapper import decorated
from nnxlite.variables._definition import MISSING


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


class FilterJit(JitWrapped[P, R]):
    """A compiled function, as `filter_jit` returns it: `jit` whose leaves may be static."""

    _unbound = staticmethod(unbound)

    def _donated(self) -> tp.Any:
        donate = self.options.donated
        return None if donate == "none" else functools.partial(donated_owners, repr(self), donate)

    def _check(self) -> tp.Callable[[tp.Any], tp.Any]:
        out = self.options.out
        return super()._check() if out is is_array else functools.partial(_checked_result, spec=out)

    def _inputs(self, args: tp.Any, kwargs: tp.Any) -> Inputs:
        inputs = inputs_of_call(self.bound, args, kwargs)
        # Training loops pass arrays only: no leaf needs a check of its own. That is 1.4x of `jax.jit`
        # for 72 arrays, and would be 2.3x (benchmarks/filtered.py).
        leaves, specs = inputs.leaves, self.options.specs
        if specs != ARRAYS:
            spec = specs.of_call(self.__wrapped__, self.bound, args, kwargs, self.name)
            inputs.make_static([not traced for traced in self._traced(inputs, leaves, spec)], self)
        elif not only_arrays(leaves):
            inputs.make_static([not traced for traced in are_arrays(leaves)], self)
        return inputs

    def _traced(self, inputs: Inputs, leaves: list[tp.Any], spec: tp.Any) -> list[bool]:
        """Whether each leaf is traced.

        Raises TypeError for a leaf that must be traced and cannot be.
        """
        traced = answers(inputs, spec, MASK._replace(name="filter_jit's spec"))
        for number, (leaf, wanted) in enumerate(zip(leaves, traced)):
            if wanted and not is_array_like(leaf):
                place = inputs.definition.leaves()[number]
                raise must_be_traced(repr(self), place.text(), leaf)
        return traced

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.options.donated == "none":
            return super().__call__(*args, **kwargs)
        with without_warnings(self.options.donated):
            return super().__call__(*args, **kwargs)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered[R]:
        """Lower the function for these arguments, without running it."""
        with without_warnings(self.options.donated):
            return super().lower(*args, **kwargs)


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
    options = JitOptions(
        name="filter_jit",
        modes=Modes(graph=True, updates=True),
        jax_options=tuple(jitkwargs.items()),
        max_traces=as_integer(max_traces),
        is_array=is_array,
        specs=ArgumentSpecs.given(default, fn, args, kwargs),
        out=out,
        donated=as_donated(donate),
    )
    return decorated(FilterJit, fun, options)
