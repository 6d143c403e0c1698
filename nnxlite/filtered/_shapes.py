"""Programs and shapes of functions of anything; checkpoints, shardings and callbacks."""

from __future__ import annotations

import functools
import typing as tp

import jax
from jax.core import Tracer

from nnxlite.boundary import Inputs
from nnxlite.filtered._apart import Apart
from nnxlite.filtered._crossing import Call, Choice, put_back, tree_out
from nnxlite.filtered._predicates import has_shape, is_array
from nnxlite.filtered._specs import Reading, settle
from nnxlite.transforms import Wrapper, decorated
from nnxlite.variables import MISSING

T = tp.TypeVar("T")


def filter_make_jaxpr(
    fun: tp.Callable[..., tp.Any],
) -> tp.Callable[..., tuple[tp.Any, tp.Any, tp.Any]]:
    """The program of a function of anything.

    Arrays and `jax.ShapeDtypeStruct`s among the arguments are traced, all else is static. What the
    function holds (a module that is called, say) are constants of the program.

    Returns:
        A function of example arguments that gives `(closed_jaxpr, shapes, statics)`: the program; the
        result with a `jax.ShapeDtypeStruct` for each array and None elsewhere; and with None for
        each array.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> jaxpr, shapes, statics = nnx.filter_make_jaxpr(lambda x, n: (x + n, n))(jnp.ones(2), 1)
    >>> shapes, statics
    ((ShapeDtypeStruct(shape=(2,), dtype=float32), None), (None, 1))
    """

    @functools.wraps(fun)
    def make(*args: tp.Any, **kwargs: tp.Any) -> tuple[tp.Any, tp.Any, tp.Any]:
        call = Call(fun, args, kwargs)
        leaves, visible = call.apart.leaves, call.visible()
        choice = Choice([v and has_shape(x) for x, v in zip(leaves, visible)])

        def run(*traced: tp.Any) -> tp.Any:
            _, result = call.run(choice.into(leaves, traced))
            return tree_out(result)

        traced = choice.chosen(leaves)
        jaxpr, (fixed, shapes) = jax.make_jaxpr(run, return_shape=True)(*traced)
        shape = fixed.value
        return jaxpr, shape.only(shapes), shape.build([None] * len(shapes))

    return make


def filter_eval_shape(fun: tp.Callable[..., tp.Any], /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
    """The result of a function with a `jax.ShapeDtypeStruct` for each array; nothing is computed.

    Arguments and result may be of any type. Nothing is written into the arguments.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter_eval_shape(lambda x, name: (x @ x.T, name), jnp.ones((2, 3)), "gram")
    (ShapeDtypeStruct(shape=(2, 2), dtype=float32), 'gram')
    """
    call = Call(fun, args, kwargs)
    leaves = call.apart.leaves
    choice = Choice([has_shape(x) for x in leaves])
    run = lambda traced: call.run_out(choice.into(leaves, traced))
    fixed, shapes = jax.eval_shape(run, choice.chosen(leaves))
    return put_back(Inputs(call.apart.build(leaves)), fixed, shapes)


def filter_checkpoint(
    fun: tp.Any = MISSING,
    *,
    prevent_cse: bool = True,
    policy: tp.Callable[..., bool] | None = None,
) -> tp.Any:
    """A function whose intermediate values are computed again on the backward pass.

    Args:
        fun: a function of anything; without it a decorator is returned.
        prevent_cse, policy: as for `jax.checkpoint`.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> jax.grad(nnx.filter_checkpoint(lambda x: jnp.sin(jnp.sin(x))))(0.0)
    Array(1., dtype=float32, weak_type=True)
    """
    return decorated(FilterCheckpoint, fun, (prevent_cse, policy))


class FilterCheckpoint(Wrapper):
    """A function that is computed again on the backward pass, as `filter_checkpoint` returns it."""

    name = "filter_checkpoint"

    def __call__(self, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        call = Call(self.__wrapped__, args, kwargs)
        leaves = call.apart.leaves
        choice = Choice([is_array(x) for x in leaves])
        prevent_cse, policy = self.options
        run = lambda traced: call.run_out(choice.into(leaves, traced))
        checkpointed = jax.checkpoint(run, prevent_cse=prevent_cse, policy=policy)
        return call.put_back(checkpointed(choice.chosen(leaves)))


_SHARDINGS = (jax.Device, jax.sharding.Sharding, jax.sharding.PartitionSpec)
SHARDING = Reading(
    "device_or_shardings",
    lambda x: x is None or isinstance(x, _SHARDINGS),
    "shardings and devices, callables",
)


def filter_shard(x: T, device_or_shardings: tp.Any) -> T:
    """A tree with its arrays on a device, or sharded; other leaves are as they were.

    Under `jit` it constrains the shardings. Graph objects in the result are new.

    Args:
        x: any pytree, or a graph object.
        device_or_shardings: a device or sharding, or a prefix of the tree with them; None leaves
            arrays where they are.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> nnx.filter_shard((jnp.ones(2), "name"), jax.devices()[0])[1]
    'name'
    """
    apart = Apart(x)
    shardings = settle(apart, device_or_shardings, SHARDING)
    return apart.build([_placed(leaf, s) for leaf, s in zip(apart.leaves, shardings)])


def _placed(leaf: tp.Any, sharding: tp.Any) -> tp.Any:
    if sharding is None or not is_array(leaf):
        return leaf
    if not isinstance(leaf, Tracer):
        return jax.device_put(leaf, sharding)
    if isinstance(sharding, jax.Device):
        sharding = jax.sharding.SingleDeviceSharding(sharding)
    return jax.lax.with_sharding_constraint(leaf, sharding)


def filter_pure_callback(
    callback: tp.Callable[..., tp.Any],
    *args: tp.Any,
    result_shape_dtypes: tp.Any,
    sharding: tp.Any = None,
    vmap_method: str | None = None,
    vectorized: bool | None = None,
    **kwargs: tp.Any,
) -> tp.Any:
    """Call a Python function from a compiled one, with arguments of any type.

    Args:
        callback: a function without side effects; it gets concrete arrays.
        args, kwargs: its arguments; leaves that are no arrays reach it as they are.
        result_shape_dtypes: the form of its result: a `jax.ShapeDtypeStruct` for each array; other
            leaves are given back as they are.
        sharding, vmap_method: as for `jax.pure_callback`.
        vectorized: the older name of `vmap_method="legacy_vectorized"` and `"sequential"`.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp, numpy as np
    >>> shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    >>> power = lambda x, n: np.asarray(x) ** n
    >>> jax.jit(lambda x: nnx.filter_pure_callback(power, x, 2, result_shape_dtypes=shape))(
    ...     jnp.array([1.0, 3.0]))
    Array([1., 9.], dtype=float32)
    """
    if vectorized is not None:
        vmap_method = "expand_dims" if vectorized else "sequential"
    apart = Apart((args, kwargs))
    choice = Choice([is_array(x) for x in apart.leaves])
    result = Apart(result_shape_dtypes)
    wanted = Choice([has_shape(x) for x in result.leaves])

    def run(*arrays: tp.Any) -> list[tp.Any]:
        inner_args, named = apart.build(choice.into(apart.leaves, arrays))
        found = Apart(callback(*inner_args, **named))
        if found.paths != result.paths:
            raise ValueError(
                f"filter_pure_callback: the callback returned a result of structure "
                f"{found.call.treedef}, result_shape_dtypes has {result.call.treedef}."
            )
        return wanted.chosen(found.leaves)

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in wanted.chosen(result.leaves)]
    arrays = jax.pure_callback(
        run, shapes, *choice.chosen(apart.leaves), sharding=sharding, vmap_method=vmap_method
    )
    return result.build(wanted.into(result.leaves, arrays))
