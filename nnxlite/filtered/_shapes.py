"""Shapes and programs of functions of any pytrees; checkpoints, shardings, callbacks, closures."""

from __future__ import annotations

import functools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.errors import JaxRuntimeError

from nnxlite._base.errors import RuntimeCheckError
from nnxlite._base.jax import P, R, is_recording, jaxpr_as_fun
from nnxlite._base.statics import ById
from nnxlite.boundary._body import Body, trace_body
from nnxlite.boundary._call_def import CallDef, Partition
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._leave import leave
from nnxlite.boundary._out import Outputs, replay
from nnxlite.filtered._specs import (
    SpecKind,
    answers,
    call_of,
    filtered,
    has_shape,
    is_array,
    is_inexact_array,
    leaves_of,
    tree_out,
)
from nnxlite.graph._rebuild import Path
from nnxlite.transforms._call import note_check, raise_failed
from nnxlite.transforms._control import run_remat
from nnxlite.transforms._wrapper import Transform, decorated, name_of
from nnxlite.variables._definition import MISSING

if tp.TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr


T = tp.TypeVar("T")
OnError = tp.Literal["default", "raise", "breakpoint", "nan", "off"]


def _nothing() -> None:
    """What is called beside a check: an effect.

    JAX calls a program without effects in another way from the second time on, and then raises an error
    of another class (a ValueError) for a callback that fails.
    """


def error_if(x: T, pred: tp.Any, msg: str, *, on_error: OnError = "default") -> T:
    """The tree itself, with a check: an error when it is computed and a condition is true.

    The error is a `RuntimeCheckError` with this message: at once in eager code, and by the call in which
    the condition is true under a transform of this library. A function under JAX's own `jax.jit` raises
    JAX's `jax.errors.JaxRuntimeError`, of which `RuntimeCheckError` is one, with the message at its end.

    Args:
        x: any pytree, or a graph object. Its arrays carry the check, so use the returned tree.
        pred: the condition, one bool or an array of them, of which any is enough.
        msg: the message.
        on_error: `"raise"` (as `"default"`); `"breakpoint"` opens a debugger; `"nan"` gives NaN for
            floating-point arrays instead; `"off"` checks nothing.

    Returns:
        `x`, with the check in its arrays.

    Raises:
        ValueError: for a tree without arrays when the condition is traced.
        RuntimeCheckError: where the condition is true.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.error_if(jnp.array(1.0), False, "never")
    Array(1., dtype=float32, weak_type=True)
    """
    return branched_error_if(x, pred, 0, [msg], on_error=on_error)


def branched_error_if(
    x: T,
    pred: tp.Any,
    index: tp.Any,
    msgs: tp.Sequence[str],
    *,
    on_error: OnError = "default",
) -> T:
    """Like `error_if`, with the message chosen by an index, which may be traced.

    Args:
        x: any pytree, or a graph object. Its arrays carry the check, so use the returned tree.
        pred: the condition, one bool or an array of them, of which any is enough.
        index: number of the message; the largest, where it is an array.
        msgs: the messages.
        on_error: as for `error_if`.

    Returns:
        `x`, with the check in its arrays.

    Raises:
        RuntimeCheckError: where the condition is true.
        ValueError: for a tree without arrays when the condition is traced.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.branched_error_if(1.0, jnp.array(True), 1, ["first", "second"])
    Traceback (most recent call last):
    nnxlite._base.errors.RuntimeCheckError: second
    """
    if on_error not in tp.get_args(OnError):
        raise ValueError(f"on_error={on_error!r}; it must be one of {tp.get_args(OnError)}.")
    if on_error == "off":
        return x
    tree = leaves_of(x)
    if on_error == "nan":
        bad = jnp.any(jnp.asarray(pred))
        return tree.definition.build(
            [jnp.where(bad, jnp.nan, y) if is_inexact_array(y) else y for y in tree.leaves]
        )

    def check(pred: tp.Any, index: tp.Any) -> tp.Any:
        if np.any(pred):
            chosen = np.broadcast_to(index, np.shape(pred))[np.asarray(pred, bool)]
            if on_error == "breakpoint":
                breakpoint()
            raise RuntimeCheckError(msgs[int(np.max(chosen))])
        return np.ones(np.shape(pred), bool)

    if not isinstance(pred, Tracer) and not isinstance(index, Tracer):
        check(np.asarray(pred), np.asarray(index))
        return x
    if not any(map(is_array, tree.leaves)):
        raise ValueError(
            "error_if: the condition is traced, and the tree has no array to carry the check. Pass "
            "an array that is used afterwards, and use the result."
        )
    pred = jnp.any(jnp.asarray(pred))
    index = jnp.max(jnp.asarray(index))
    note_check()
    if is_recording():
        jax.debug.callback(_nothing)
    try:
        fine = jax.pure_callback(
            check, jax.ShapeDtypeStruct((), bool), pred, index, vmap_method="broadcast_all"
        )
    except JaxRuntimeError as error:  # in an eager `vmap` or `grad`
        raise_failed(error)
        raise
    carry = lambda y: jnp.where(fine, y, jnp.zeros_like(y))
    return tree.definition.build([carry(y) if is_array(y) else y for y in tree.leaves])


def filter_make_jaxpr(
    fun: tp.Callable[P, R],
) -> tp.Callable[P, tuple[ClosedJaxpr, tp.Any, tp.Any]]:
    """The program of a function of any pytrees.

    Arrays and `jax.ShapeDtypeStruct`s among the arguments are traced, all else is static. Leaves that
    the function carries (such as those of a module that is called) are constants of the program.

    Args:
        fun: a function of any pytrees.

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
    def make(*args: P.args, **kwargs: P.kwargs) -> tuple[ClosedJaxpr, tp.Any, tp.Any]:
        call = call_of("filter_make_jaxpr", fun, args, kwargs)
        owners = zip(call.leaves, call.owners())
        call.tracing(owner is not None and has_shape(x) for x, owner in owners)
        run = lambda *traced: tree_out(call.run(traced)[1])
        jaxpr, (fixed, shapes) = jax.make_jaxpr(run, return_shape=True)(*call.leaves)
        form = fixed.value
        return jaxpr, form.build(shapes, blank=True), form.build([None] * len(shapes))

    return make


def filter_eval_shape(fun: tp.Callable[..., R], /, *args: tp.Any, **kwargs: tp.Any) -> R:
    """The result of a function with a `jax.ShapeDtypeStruct` for each array; nothing is computed.

    Arguments and result may be of any type. Nothing is written into the arguments.

    Args:
        fun: the function.
        args, kwargs: its arguments, with arrays or `jax.ShapeDtypeStruct`s.

    Returns:
        The result, with `jax.ShapeDtypeStruct`s for arrays; all other leaves are unchanged.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter_eval_shape(lambda x, name: (x @ x.T, name), jnp.ones((2, 3)), "gram")
    (ShapeDtypeStruct(shape=(2, 2), dtype=float32), 'gram')
    """
    call = call_of("filter_eval_shape", fun, args, kwargs)
    call.tracing(map(has_shape, call.leaves))
    crossed = jax.eval_shape(call.run_out, call.leaves)
    return replay(Inputs(call.definition.build(call.leaves), trees=True), crossed)


@tp.overload
def filter_checkpoint(
    fun: tp.Callable[P, R],
    *,
    prevent_cse: bool = True,
    policy: tp.Callable[..., bool] | None = None,
) -> Transform[P, R]: ...
@tp.overload
def filter_checkpoint(
    *, prevent_cse: bool = True, policy: tp.Callable[..., bool] | None = None
) -> tp.Callable[[tp.Callable[P, R]], Transform[P, R]]: ...
def filter_checkpoint(
    fun: tp.Any = MISSING,
    *,
    prevent_cse: bool = True,
    policy: tp.Callable[..., bool] | None = None,
) -> tp.Any:
    """A function whose intermediate values are computed again on the backward pass.

    Args:
        fun: a function of any pytrees; without it a decorator is returned.
        prevent_cse, policy: as for `jax.checkpoint`.

    Returns:
        A function with the parameters and the result of `fun`.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> jax.grad(nnx.filter_checkpoint(lambda x: jnp.sin(jnp.sin(x))))(0.0)
    Array(1., dtype=float32, weak_type=True)
    """
    more = {"static_argnums": (), "prevent_cse": prevent_cse, "policy": policy}
    return decorated(Transform, fun, filtered("filter_checkpoint", run_remat, **more))


_SHARDINGS = (jax.Device, jax.sharding.Sharding, jax.sharding.PartitionSpec)
SHARDING = SpecKind(
    "device_or_shardings",
    lambda x: x is None or isinstance(x, _SHARDINGS),
    "shardings and devices, callables",
)


def filter_shard(x: T, device_or_shardings: tp.Any) -> T:
    """A tree with its arrays on a device, or sharded; other leaves are unchanged.

    Under `jit` it constrains the shardings. Graph objects in the result are new.

    Args:
        x: any pytree, or a graph object.
        device_or_shardings: a device or sharding, or a prefix of the tree with them; None leaves
            arrays where they are.

    Returns:
        A tree of the same structure and values.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> nnx.filter_shard((jnp.ones(2), "name"), jax.devices()[0])[1]
    'name'
    """
    tree = leaves_of(x)
    shardings = answers(tree, device_or_shardings, SHARDING)
    return tree.definition.build(list(map(_placed, tree.leaves, shardings)))


def _placed(leaf: tp.Any, sharding: tp.Any) -> tp.Any:
    if sharding is None or not is_array(leaf):
        return leaf
    if not isinstance(leaf, Tracer):
        return jax.device_put(leaf, sharding)
    if isinstance(sharding, jax.Device):
        sharding = jax.sharding.SingleDeviceSharding(sharding)
    return jax.lax.with_sharding_constraint(leaf, sharding)


@tp.overload
def filter_pure_callback(
    callback: tp.Callable[..., tp.Any],
    *args: tp.Any,
    result_shape_dtypes: jax.ShapeDtypeStruct,
    **options: tp.Any,
) -> jax.Array: ...
@tp.overload
def filter_pure_callback(
    callback: tp.Callable[..., tp.Any], *args: tp.Any, **options: tp.Any
) -> tp.Any: ...
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
        args, kwargs: its arguments; leaves that are not arrays are passed unchanged.
        result_shape_dtypes: the form of its result: a `jax.ShapeDtypeStruct` for each array; other
            leaves are returned unchanged.
        sharding, vmap_method: as for `jax.pure_callback`.
        vectorized: the older name of `vmap_method="legacy_vectorized"` and `"sequential"`.

    Returns:
        The result of the callback, in the form of `result_shape_dtypes`.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp, numpy as np
    >>> shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    >>> power = lambda x, n: np.asarray(x) ** n
    >>> jax.jit(lambda x: nnx.filter_pure_callback(power, x, 2, result_shape_dtypes=shape))(
    ...     jnp.array([1.0, 3.0]))
    Array([1., 9.], dtype=float32)
    """
    if vectorized is not None:
        vmap_method = "expand_dims" if vectorized else "sequential"
    given, arrays = tree_out((args, kwargs))
    result = leaves_of(result_shape_dtypes)
    wanted = Partition.chosen(map(has_shape, result.leaves))
    shapes, others = wanted.split(result.leaves)

    def run(*arrays: tp.Any) -> list[tp.Any]:
        inner_args, named = given.value.build(arrays)
        returned = leaves_of(callback(*inner_args, **named))
        if _paths(returned) != _paths(result):
            raise ValueError(
                f"filter_pure_callback: the callback returned a result of structure "
                f"{returned.treedef}, result_shape_dtypes has {result.treedef}."
            )
        return wanted.split(returned.leaves)[0]

    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes]
    out = jax.pure_callback(run, structs, *arrays, sharding=sharding, vmap_method=vmap_method)
    return result.definition.build(wanted.join(out, others))


def _paths(tree: Inputs) -> list[Path]:
    return [leaf.path for leaf in tree.definition.leaves()]


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
