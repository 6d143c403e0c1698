"""Closures as explicit leaves."""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp

from nnxlite._base.jax import jaxpr_as_fun
from nnxlite._base.statics import ById
from nnxlite._base.typing import P, R
from nnxlite.boundary._body import Body, trace_body
from nnxlite.boundary._call_def import CallDef
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._leave import leave
from nnxlite.boundary._out import Outputs, replay
from nnxlite.filtered._specs import has_shape, is_array, tree_out
from nnxlite.transforms._wrapper import name_of


@jax.tree_util.register_pytree_node_class
class ClosureConverted(tp.Generic[P, R]):
    """A function whose captured arrays are leaves, as `filter_closure_convert` returns it.

    Attributes:
        consts: the captured arrays.
    """

    def __init__(self, consts: list[tp.Any], traced: tuple[str, CallDef, Body]) -> None:
        self.consts = consts
        self._traced = traced  # the name of the function, its example arguments, and its program

    def tree_flatten(self) -> tp.Any:
        """For JAX."""
        return (self.consts,), ById(self._traced)

    @classmethod
    def tree_unflatten(cls, traced: ById, children: tp.Any) -> ClosureConverted[P, R]:
        """For JAX."""
        return cls(children[0], traced.value)

    @property
    def in_struct(self) -> tp.Any:
        """The example arguments, `(args, kwargs)`, with a `jax.ShapeDtypeStruct` for each array."""
        _, call, body = self._traced
        return call.build(_structs(body.jaxpr.in_avals))

    @property
    def out_struct(self) -> tp.Any:
        """The result, with a `jax.ShapeDtypeStruct` for each array."""
        _, call, body = self._traced
        inputs = Inputs(call.build(_structs(body.jaxpr.in_avals)), call.trees)
        return replay(inputs, body.outputs(_structs(body.jaxpr.out_avals)))

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        name, call, body = self._traced
        inputs = Inputs((args, kwargs), trees=True)
        given, arrays = tree_out((args, kwargs))
        if given.value != call or not body.accepts(arrays):
            raise ValueError(
                f"{name} was closure-converted for other arguments: call it with the "
                "structure, shapes and static leaves of the example."
            )
        out = jaxpr_as_fun(body.jaxpr.jaxpr, self.consts)(*arrays)
        return replay(inputs, body.outputs(map(jnp.asarray, out)))

    def __repr__(self) -> str:
        return f"ClosureConverted({self._traced[0]}, {len(self.consts)} consts)"


def _structs(avals: tp.Iterable[tp.Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]


def filter_closure_convert(
    fn: tp.Callable[P, R], *args: tp.Any, **kwargs: tp.Any
) -> ClosureConverted[P, R]:
    """A function whose captured arrays are explicit: they are leaves of the function itself.

    The function is traced for the example arguments, not run; call the result with arguments of the
    same structure, shapes, dtypes and static leaves. A `jax.ShapeDtypeStruct` is an example of an
    array.

    Args:
        fn: the function.
        args, kwargs: examples of its arguments.

    Returns:
        A function of the same arguments, and a pytree of the arrays that it captured; `out_struct`
        has the shapes and dtypes of its result.

    Raises:
        ValueError: (by the result) for arguments of another form than the example.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> weight = jnp.array(3.0)
    >>> converted = nnx.filter_closure_convert(lambda x: x * weight, jnp.array(1.0))
    >>> jax.tree.leaves(converted), float(converted(jnp.array(2.0)))
    ([Array(3., dtype=float32, weak_type=True)], 6.0)
    >>> converted.out_struct
    ShapeDtypeStruct(shape=(), dtype=float32)
    """
    given, arrays = tree_out((args, kwargs), has_shape)

    def run(inner: tp.Any, tree: tp.Any) -> tuple[Outputs, None]:
        out = leave(inner, tp.cast(tp.Any, fn)(*tree[0], **tree[1]))
        return out.as_arrays(is_array), None

    body = trace_body(given.value, run, arrays, user=fn)
    return ClosureConverted(body.consts, (name_of(fn), given.value, body))
