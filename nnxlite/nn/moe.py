"""`MoE`: a layer of experts, of which each token passes through a few.

A *router* gives each token a probability for each expert.  The token goes to the `top_k` most probable
ones, and the result is the mean of what they return, weighted by their gates.  Shapes are known when a
program is compiled, so an expert has a fixed number of places, its *capacity*, for the tokens of each
group (a group is what lies along the last token axis: one sequence of a batch).  Tokens take places in
their order, all first choices before any second one; an expert without a place left *drops* the token.

The dispatch is two products with an array (groups, tokens, experts, capacity) of zeros and ones, as in
GShard (Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668).  Where experts and groups lie along an
axis of the mesh, JAX makes an all-to-all of each: one sends tokens to experts, one brings them back.

Further formulas: the load-balancing loss of Switch Transformers (Fedus et al. 2021,
https://arxiv.org/abs/2101.03961, equation 4) and the router z-loss of ST-MoE (Zoph et al. 2022,
https://arxiv.org/abs/2202.08906, equation 5).  The router computes in float32, as these papers advise.
"""

from __future__ import annotations

import math
import typing as tp

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from nnxlite._base.errors import short_type
from nnxlite._base.jax import constrained, is_tracing
from nnxlite.graph._walk import iter_graph
from nnxlite.nn import initializers
from nnxlite.nn._common import NO_METADATA, Arguments, Metadata, Precision, check_size, value_of
from nnxlite.nn.activations import gelu
from nnxlite.nn.dtypes import Dtype, PromoteDtypeFn, default_promote_dtype
from nnxlite.nn.initializers import Initializer
from nnxlite.objects._module import Module
from nnxlite.objects._rngs import Rngs
from nnxlite.objects._scopes import layer_name
from nnxlite.variables._kinds import Param
from nnxlite.variables._variable import Variable

T = tp.TypeVar("T")

default_router_init: tp.Final[Initializer] = initializers.lecun_normal()
default_bias_init: tp.Final[Initializer] = initializers.zeros_init()
default_expert_init: tp.Final[Initializer] = initializers.lecun_normal(batch_axis=0)
"""`lecun_normal` for each expert by itself."""


class RouterStat(Variable[T]):
    """What a router did in its last call: its losses, and how loaded its experts were.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> layer = nnx.MoE(4, 8, num_experts=2, rngs=nnx.Rngs(0))
    >>> sorted(nnx.state(layer, nnx.RouterStat))
    ['balance_loss', 'dropped', 'load', 'z_loss']
    """

    __slots__ = ()


class MoE(Module):
    """A mixture of experts: each token passes through `top_k` of many two-layer networks.

    Maps `(*batch, tokens, features)` to the same shape.  A token that all its experts drop becomes zero,
    so add the result to the input: `x + moe(x)`.

    Args:
        features: size of the last axis.
        hidden_features: width of an expert.
        num_experts: number of experts.
        top_k: how many experts a token goes to.
        capacity_factor: an expert has places for `capacity_factor * top_k * tokens / num_experts`
            tokens of a group, rounded up; with `num_experts / top_k` none is ever dropped.
        activation: a function of the hidden features.
        gated: multiply the hidden features by those of a second projection (Shazeer 2020,
            https://arxiv.org/abs/2002.05202), which has no activation.
        normalize: make the gates of a token sum to one; by default if `top_k` is more than one. (With
            a single expert, the router would get no gradient.)
        axis: the mesh axis that experts lie along.  Where the mesh of `jax.set_mesh` has it, tokens
            are sent there; otherwise it means nothing.
        batch_axes: other mesh axes that a batch may lie along; those that the mesh does not have mean
            nothing. Along explicit axes the batch stays where it is.
        use_bias: whether the experts have biases.
        dtype: dtype of the experts' computation; None: what input and parameters promote to.
        param_dtype: dtype of the parameters.
        precision: precision of the products.
        router_init, kernel_init, bias_init: initializers; those of kernels and biases are called for
            all experts at once, (experts, in, out).
        promote_dtype: casts input and parameters to the dtype of the computation.
        rngs: the stream "params" is drawn for router, up, gate, down and the biases, in this order.
        router_metadata, kernel_metadata, bias_metadata: metadata of the parameters, such as the
            sharding `{"out_sharding": ("expert", None, None)}` of the kernels.

    Attributes:
        router: Param (features, experts).
        up, down: Params (experts, features, hidden) and (experts, hidden, features).
        gate: Param like `up`, or None.
        up_bias, gate_bias, down_bias: Params (experts, hidden) and (experts, features), or None.
        balance_loss: `RouterStat`, a float32 scalar: `experts * sum(f * p)`, where `f` is the part of
            all choices that fell on an expert, and `p` the mean of its probabilities. It is 1 where
            the load is even, and `experts` at most.
        z_loss: `RouterStat`, a float32 scalar: the mean of `logsumexp(logits) ** 2`.
        load: `RouterStat`, float32 (experts,): the part of all choices that fell on each expert.
        dropped: `RouterStat`, a float32 scalar: the part of all choices that found no place.

    Raises:
        TypeError: for a size that is not a whole number, or an input of another size.
        ValueError: if `top_k` is not between one and the number of experts, the capacity is not
            positive, or the mesh axis does not divide the number of experts.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> layer = nnx.MoE(4, 8, num_experts=4, top_k=2, rngs=nnx.Rngs(0))
    >>> x = nnx.Rngs(1).normal((2, 6, 4))
    >>> layer(x).shape, layer.up.shape
    ((2, 6, 4), (4, 4, 8))
    >>> round(float(layer.load.value.sum()), 3)
    1.0

    The losses are a part of what is minimised:

    >>> def loss_of(layer, x):
    ...     y = layer(x)
    ...     return jnp.mean((y - x) ** 2) + nnx.router_loss(layer)
    >>> nnx.grad(loss_of)(layer, x)["router"].shape
    (4, 4)
    """

    features: int
    hidden_features: int
    num_experts: int
    top_k: int
    capacity_factor: float
    activation: tp.Callable[[jax.Array], jax.Array]
    gated: bool
    normalize: bool
    axis: str
    batch_axes: tuple[str, ...]
    use_bias: bool
    dtype: Dtype | None
    param_dtype: Dtype
    precision: Precision
    promote_dtype: PromoteDtypeFn
    router: Param[jax.Array]
    up: Param[jax.Array]
    gate: Param[jax.Array] | None
    down: Param[jax.Array]
    up_bias: Param[jax.Array] | None
    gate_bias: Param[jax.Array] | None
    down_bias: Param[jax.Array] | None
    balance_loss: RouterStat[jax.Array]
    z_loss: RouterStat[jax.Array]
    load: RouterStat[jax.Array]
    dropped: RouterStat[jax.Array]

    def __init__(
        self,
        features: int,
        hidden_features: int,
        num_experts: int,
        *,
        top_k: int = 2,
        capacity_factor: float = 1.25,
        activation: tp.Callable[[jax.Array], jax.Array] = gelu,
        gated: bool = False,
        normalize: bool | None = None,
        axis: str = "expert",
        batch_axes: tp.Sequence[str] = ("data", "fsdp"),
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: Precision = None,
        router_init: Initializer = default_router_init,
        kernel_init: Initializer = default_expert_init,
        bias_init: Initializer = default_bias_init,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        rngs: Rngs,
        router_metadata: Metadata = NO_METADATA,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ) -> None:
        arguments = Arguments(self, locals())
        size = check_size(self, "features", features)
        hidden = check_size(self, "hidden_features", hidden_features)
        experts = check_size(self, "num_experts", num_experts)
        if not 1 <= top_k <= experts:
            raise ValueError(
                f"{layer_name(self)}: top_k must be between 1 and num_experts ({experts}), got "
                f"{top_k}."
            )
        _check_capacity(self, capacity_factor)
        new = arguments.parameter
        self.router = new("router", (size, experts))
        self.up = new("kernel", (experts, size, hidden))
        self.gate = new("kernel", (experts, size, hidden) if gated else None)
        self.down = new("kernel", (experts, hidden, size))
        self.up_bias = new("bias", (experts, hidden))
        self.gate_bias = new("bias", (experts, hidden) if gated else None)
        self.down_bias = new("bias", (experts, size))
        self.balance_loss = RouterStat(jnp.zeros((), jnp.float32))
        self.z_loss = RouterStat(jnp.zeros((), jnp.float32))
        self.load = RouterStat(jnp.zeros((experts,), jnp.float32))
        self.dropped = RouterStat(jnp.zeros((), jnp.float32))
        arguments.set_attributes(
            batch_axes=tuple(batch_axes), normalize=top_k > 1 if normalize is None else normalize
        )

    def __call__(self, x: jax.Array, *, capacity_factor: float | None = None) -> jax.Array:
        """The result for each token, of the shape of `x`; sets the losses and the load.

        Args:
            x: (*batch, tokens, features), or (tokens, features): one group.
            capacity_factor: of this call, such as a larger one for evaluation; by default that of
                the layer.
        """
        x = jnp.asarray(x)
        if x.ndim < 2 or x.shape[-1] != self.features:
            raise TypeError(
                f"{layer_name(self)} expects an input (*batch, tokens, {self.features}), got one of "
                f"shape {x.shape}."
            )
        factor = self.capacity_factor if capacity_factor is None else capacity_factor
        _check_capacity(self, factor)
        groups = x.reshape(-1, *x.shape[-2:])
        combine = _route(self, groups, factor)
        biases = (value_of(b) for b in (self.up_bias, self.gate_bias, self.down_bias))
        kernels = (self.up[...], value_of(self.gate), self.down[...])
        groups, *parameters = self.promote_dtype((groups, *kernels, *biases), dtype=self.dtype)
        combine = combine.astype(groups.dtype)

        placed = (combine > 0).astype(groups.dtype)
        tokens = jnp.einsum("gsec,gsm->egcm", placed, groups, precision=self.precision)
        tokens, bring_back = _sent(self, tokens)
        tokens = bring_back(_experts(self, tokens, *parameters))
        y = jnp.einsum("gsec,egcm->gsm", combine, tokens, precision=self.precision)
        return y.reshape(x.shape)


# These functions read public attributes of a layer only, so that `nnx.MoE.__call__(other, x)` works for
# any object that has the same attributes.


def _check_capacity(layer: MoE, factor: float) -> None:
    if not factor > 0:
        raise ValueError(
            f"{layer_name(layer)}: capacity_factor must be positive, got {factor}. 1 means as many "
            "places as there are choices; num_experts / top_k means that none is dropped."
        )


def _route(layer: MoE, x: jax.Array, capacity_factor: float) -> jax.Array:
    """The gate of each token at its place, (groups, tokens, experts, capacity), in float32."""
    experts, top_k = layer.num_experts, layer.top_k
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.einsum(
        "gsm,me->gse", x.astype(dtype), layer.router[...].astype(dtype), precision=layer.precision
    )
    probabilities = jax.nn.softmax(logits)
    choices, left = [], probabilities
    for _ in range(top_k):  # not `lax.top_k`, for which JAX gathers all tokens on every device
        choices.append(jax.nn.one_hot(left.argmax(-1), experts, dtype=dtype))
        left = jnp.where(choices[-1] > 0, -1.0, left)
    choices = jnp.stack(choices, 1)  # (groups, top_k, tokens, experts)
    gates = (choices * probabilities[:, None]).sum(-1)
    if layer.normalize:
        gates = gates / gates.sum(1, keepdims=True)

    groups, tokens = x.shape[:2]
    queue = choices.reshape(groups, top_k * tokens, experts)  # all first choices come first
    place = ((jnp.cumsum(queue, 1) - queue) * queue).sum(-1).astype(jnp.int32)
    place = place.reshape(groups, top_k, tokens)
    capacity = math.ceil(capacity_factor * top_k * tokens / experts)
    places = jax.nn.one_hot(place, capacity, dtype=dtype)  # zeros beyond the capacity

    load = choices.mean((0, 1, 2))
    for stat, value in (
        (layer.balance_loss, experts * (load * probabilities.mean((0, 1))).sum()),
        (layer.z_loss, (jax.nn.logsumexp(logits, axis=-1) ** 2).mean()),
        (layer.load, load),
        (layer.dropped, 1.0 - places.sum(-1).mean()),
    ):
        stat.value = value.astype(stat.value.dtype)
    return jnp.einsum("gkse,gksc->gsec", choices * gates[..., None], places)


def _experts(
    layer: MoE,
    x: jax.Array,
    up: jax.Array,
    gate: jax.Array | None,
    down: jax.Array,
    up_bias: jax.Array | None,
    gate_bias: jax.Array | None,
    down_bias: jax.Array | None,
) -> jax.Array:
    """What each expert returns for the tokens at its places, (experts, groups, capacity, features)."""

    def projected(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = jnp.einsum("egci,eio->egco", x, kernel, precision=layer.precision)
        return y if bias is None else y + bias[:, None, None, :]

    hidden = layer.activation(projected(x, up, up_bias))
    if gate is not None:
        hidden = hidden * projected(x, gate, gate_bias)
    return projected(hidden, down, down_bias)


def _sent(layer: MoE, tokens: jax.Array) -> tuple[jax.Array, tp.Callable[[jax.Array], jax.Array]]:
    """Tokens (experts, groups, capacity, features) with the experts, and what brings them back."""
    mesh = jax.sharding.get_abstract_mesh()
    axis = layer.axis
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    if not is_tracing() or kinds.get(axis, AxisType.Manual) is AxisType.Manual:
        return tokens, lambda x: x
    if layer.num_experts % mesh.shape[axis]:
        raise ValueError(
            f"{layer_name(layer)}: {layer.num_experts} experts cannot be spread evenly over the "
            f"{mesh.shape[axis]} devices along the mesh axis {axis!r}. Take a multiple of them, or "
            "another name for `axis`."
        )
    if kinds[axis] is AxisType.Explicit:
        before = jax.typeof(tokens).sharding.spec
        names = before[1] if isinstance(before[1], tuple) else (before[1],)
        there = PartitionSpec(axis, tuple(n for n in names if n and n != axis), *before[2:])
    else:
        anyhow: tp.Any = PartitionSpec.UNCONSTRAINED
        along = _batch_axes(layer, mesh, tokens.shape[1])
        before = PartitionSpec(None, along or anyhow, anyhow, anyhow)
        there = PartitionSpec(axis, tuple(n for n in along if n != axis), anyhow, anyhow)
    # Both sides of each move, so that the way of the gradient is known as well.
    sent = constrained(constrained(tokens, before), there)
    return sent, lambda x: constrained(constrained(x, there), before)


def _batch_axes(layer: MoE, mesh: tp.Any, groups: int) -> tuple[str, ...]:
    """The mesh axes that the groups lie along, as many as divide their number."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    axes = [n for n in (*layer.batch_axes, layer.axis) if kinds.get(n) is AxisType.Auto]
    while axes and groups % math.prod(mesh.shape[n] for n in axes):
        axes.pop(0)
    return tuple(axes)


def router_loss(model: tp.Any, *, balance: float = 1e-2, z: float = 1e-3) -> jax.Array:
    """What the routers of a model add to its loss, after a call of the model.

    Args:
        model: a module, or any pytree of modules; `MoE`s in it may be stacked.
        balance: the factor of `balance_loss`; that of Switch Transformers, by default.
        z: the factor of `z_loss`; that of ST-MoE, by default.

    Returns:
        A float32 scalar: the sum over all `MoE` layers.

    Raises:
        ValueError: if there is no `MoE`.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> layer = nnx.MoE(4, 8, num_experts=4, router_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
    >>> _ = layer(jnp.ones((3, 4)))
    >>> round(float(nnx.router_loss(layer, balance=1.0, z=0.0)), 3)
    1.0
    """
    losses = [
        balance * node.balance_loss[...].sum() + z * node.z_loss[...].sum()
        for _, node in iter_graph(model)
        if isinstance(node, MoE)
    ]
    if not losses:
        raise ValueError(f"router_loss: there is no MoE in {short_type(model)}.")
    return jnp.sum(jnp.stack(losses))
