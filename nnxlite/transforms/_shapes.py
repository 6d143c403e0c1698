"""`eval_shape`, `make_jaxpr`, `checkify`, `remat`: functions looked at, checked, or computed again."""

from __future__ import annotations

import functools
import typing as tp

import jax
from jax.experimental import checkify as jax_checkify
from jax.sharding import NamedSharding, PartitionSpec

from nnxlite._base.config import Modes
from nnxlite._base.jax import (
    EAGER,
    as_integers,
    current_mesh,
    is_compiling,
    trace_state,
    without_literals,
)
from nnxlite._base.typing import RematPolicy
from nnxlite.boundary._body import Body
from nnxlite.boundary._call_def import CallDef, describe, replaced
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._out import Fixed, Outputs, replay
from nnxlite.graph._plan import view
from nnxlite.transforms._call import STATIC, Call, positional
from nnxlite.transforms._control import run_bodies
from nnxlite.transforms._wrapper import (
    Decorator,
    Options,
    P,
    R,
    Transform,
    decorated,
    unbind,
)
from nnxlite.variables._definition import MISSING, place
from nnxlite.variables._variable import Variable

if tp.TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

    from nnxlite.transforms._signatures import JaxprKeywords, RematKeywords


def eval_shape(
    f: tp.Callable[..., R],
    *args: tp.Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **kwargs: tp.Any,
) -> R:
    """What a function would return, with a `jax.ShapeDtypeStruct` for each array; nothing is computed.

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
    options = Options.of("eval_shape", Modes.of(graph, graph_updates), eval_shape)
    call = Call(options, unbind(f), args, kwargs, captured=True, look=True)
    with call.naming_arguments():
        left = jax.eval_shape(call.run_out, call.leaves)
    shapes = jax.tree_util.tree_map(_shape_of, call.leaves)
    out = replay(Inputs(call.definition.build(shapes), call.definition.trees), left)
    place_abstract(out)
    return out


def _shape_of(x: tp.Any) -> tp.Any:
    """The shape, dtype and sharding of a value."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    aval = jax.typeof(x)
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        sharding = None
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)


def place_abstract(tree: tp.Any) -> None:
    """Give abstract values of Variables without a sharding the annotated one.

    On a mesh, Variables without an annotation are replicated.
    """
    mesh = current_mesh()
    replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    roots = Inputs(tree).roots
    for node in view(*roots).nodes() if roots else ():
        if isinstance(node, Variable):
            asked = node.get_metadata("out_sharding", None) or replicated
            metadata = {**node.get_metadata(), "out_sharding": asked, "eager_sharding": True}
            place = functools.partial(_placed, metadata=metadata)
            node.set_raw_value(jax.tree_util.tree_map(place, node.get_raw_value()))


def _placed(value: tp.Any, metadata: dict[str, tp.Any]) -> tp.Any:
    known = getattr(value, "sharding", None)
    return value if known is not None else place(value, metadata)


@tp.overload
def make_jaxpr(
    f: tp.Callable[P, tp.Any], **options: tp.Unpack[JaxprKeywords]
) -> Transform[P, ClosedJaxpr]: ...
@tp.overload
def make_jaxpr(
    **options: tp.Unpack[JaxprKeywords],
) -> tp.Callable[[tp.Callable[P, tp.Any]], Transform[P, ClosedJaxpr]]: ...
def make_jaxpr(
    f: tp.Any = MISSING,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    static_argnums: int | tp.Sequence[int] = (),
) -> tp.Any:
    """A function that gives the jaxpr of `f` for its arguments; nothing is computed or changed.

    The inputs of the jaxpr are the leaves of the arguments in order; its outputs are the leaves of the
    result, and with `graph_updates` on, the new values of Variables that the function writes and
    of those it adds to its arguments.

    Args:
        f: the function; without it the result is a decorator.
        graph: False refuses shared references.
        graph_updates: whether what the function writes is among the outputs.
        static_argnums: arguments that JAX never sees.

    Returns:
        A function of the same arguments, which returns a `jax.core.ClosedJaxpr`.

    Raises:
        TypeError: for an argument that is not an array, object or pytree of these.

    >>> import nnxlite as nnx
    >>> jaxpr = nnx.make_jaxpr(lambda m: m.w + 1, graph_updates=False)(nnx.Dict(w=nnx.Param(2.0)))
    >>> [str(eqn.primitive) for eqn in jaxpr.eqns]
    ['add']
    """
    modes, numbers = Modes.of(graph, graph_updates), as_integers(static_argnums)
    return decorated(Transform, f, Options.of("make_jaxpr", modes, _jaxpr, static_argnums=numbers))


def _jaxpr(maker: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    options = maker.options
    numbers = options.static_argnums
    call = Call(options, maker.bound, args, kwargs, static_argnums=numbers, captured=True)
    order = _order(call.definition)

    def run(*ordered: tp.Any) -> list[tp.Any]:
        result, out = call.outputs(replaced(ordered, order, ordered))
        shown = Inputs(result, call.definition.trees)
        every = shown.leaves
        leaves_out = [every[i] for i in _order(shown.define())]
        return [*leaves_out, *_updates(out)] if options.modes.updates else leaves_out

    with call.naming_arguments(STATIC):
        return jax.make_jaxpr(run)(*[call.leaves[i] for i in order])


def _order(call: CallDef) -> list[int]:
    """The numbers of the leaves in the order of the tree."""
    leaves = call.leaves()
    return sorted(range(len(leaves)), key=lambda i: leaves[i].position)


def _updates(out: Outputs) -> list[tp.Any]:
    """New values of what came in, and values that were added to it."""
    left, decoded = out.definition, out.definition.graphdef.decoded
    added = [
        out.new[~source]
        for source, frame in zip(left.sources, decoded.leaf_frames)
        if source < 0 and decoded.path(frame)[0] < left.first_result
    ]
    return [*out.written, *added]


def checkify(
    f: tp.Callable[P, R],
    errors: frozenset[tp.Any] = jax_checkify.user_checks,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Transform[P, tuple[jax_checkify.Error, R]]:
    """A function that returns `(error, result)`: what its `checkify.check`s found, and its result.

    What the function writes into its arguments is kept, whether a check failed or not.

    Args:
        f: the function.
        errors: which checks to make, as in `jax.experimental.checkify.checkify`.
        graph: False refuses shared references.
        graph_updates: False propagates values of Variables only, not structure.

    Returns:
        A function of the same arguments, which returns `(error, result)`; `error.throw()` raises if
        a check failed.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> from jax.experimental import checkify
    >>> def positive(m):
    ...     checkify.check(m.x.value > 0, "x must be positive")
    ...     return m.x + 1
    >>> error, y = nnx.checkify(positive)(nnx.Dict(x=nnx.Param(jnp.float32(-1.0))))
    >>> float(y), "x must be positive" in error.get()
    (0.0, True)
    """
    modes = Modes.of(graph, graph_updates)
    return Transform(f, Options.of("checkify", modes, _checkify, errors=frozenset(errors)))


def _checkify(checked: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    options = checked.options
    call = Call(options, checked.bound, args, kwargs, captured=options.modes.updates)
    with call.naming_arguments():
        error, out = jax_checkify.checkify(call.run_out, options.errors)(call.leaves)
    return error, call.put_back(without_literals(out))


def run_remat(rematted: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    """Call a function under `remat`, or `filter_checkpoint`: there, what is not an array is static."""
    bound, options = rematted.bound, rematted.options
    if numbers := options.static_argnums:
        wanted = max(numbers) + 1
        args, kwargs = positional(bound.fun, args, kwargs, wanted, bound, True)
    updates = options.modes.updates
    call = Call(options, bound, args, kwargs, static_argnums=numbers, captured=updates)
    if options.is_array is not None:
        call.tracing(map(options.is_array, call.leaves))
    # A new function in each call: JAX's caches keep what they are keyed by, and with it all that
    # the user's function captured.
    run = describe(call.run_out, bound.fun, "remat")
    checkpointed: tp.Any = jax.checkpoint(
        run, prevent_cse=options.prevent_cse, policy=options.policy
    )
    with call.naming_arguments(STATIC):
        if trace_state.value is EAGER and is_compiling():
            return call.put_back(_run_eagerly(checkpointed, call.leaves))
        return call.put_back(without_literals(checkpointed(call.leaves)))


def _run_eagerly(run: tp.Callable[..., Outputs], leaves: list[tp.Any]) -> Outputs:
    """Run a function that nothing differentiates, as a compiled program."""
    closed, out = jax.make_jaxpr(run, return_shape=True)(leaves)
    body = Body(closed, (Fixed(None), out))
    return body.outputs(run_bodies(_once, "remat", [body], jax.tree_util.tree_leaves(leaves)))


def _once(
    settings: str, funs: list[tp.Callable[..., list[tp.Any]]], inputs: list[tp.Any]
) -> list[tp.Any]:
    return funs[0](*inputs)


@tp.overload
def remat(f: tp.Callable[P, R], **options: tp.Unpack[RematKeywords]) -> Transform[P, R]: ...
@tp.overload
def remat(**options: tp.Unpack[RematKeywords]) -> Decorator: ...
def remat(
    f: tp.Any = MISSING,
    *,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
    policy: RematPolicy | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """A function that keeps few intermediate values for its gradient, and computes the rest again.

    Its value, its gradient and its effects on the arguments are those of the function itself.

    Args:
        f: the function; without it the result is a decorator.
        prevent_cse: as in `jax.checkpoint`; False is safe, and faster, in the body of a `scan`.
        static_argnums: arguments that JAX never sees, such as flags.
        policy: which intermediate values to keep, one of `jax.checkpoint_policies`.
        graph: False refuses shared references.
        graph_updates: False propagates values of Variables only, not structure.

    Returns:
        A function of the same arguments.

    Raises:
        ValueError: for a number in `static_argnums` that the call has no argument for.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> loss = lambda m, x: jnp.sin(m(x)).sum()
    >>> one = nnx.grad(loss)(model, jnp.ones((1, 2)))
    >>> two = nnx.grad(nnx.remat(loss))(model, jnp.ones((1, 2)))
    >>> bool((one["kernel"].value == two["kernel"].value).all())
    True
    """
    options = Options.of(
        "remat",
        Modes.of(graph, graph_updates),
        run_remat,
        static_argnums=as_integers(static_argnums),
        prevent_cse=prevent_cse,
        policy=policy,
    )
    return decorated(Transform, f, options)
