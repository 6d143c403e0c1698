"""What layers say of wrong arguments and inputs: one table, of classes and what the text names."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.nn.dtypes import canonicalize_dtype, promote_dtype
from tests.nn.quick import QUICK, quick

KEY = jax.random.key(0)
ONES = jnp.ones
attend = nnx.dot_product_attention


def made(kind, *args, **options):
    """A layer, quickly made where it has a kernel."""
    if issubclass(kind, (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose)):
        options = {**QUICK, **options}
    if kind is nnx.MultiHeadAttention:
        options = {**QUICK, "decode": False, **options}
    return kind(*args, **{"rngs": nnx.Rngs(0), **options})


linear = functools.partial(made, nnx.Linear)
general = functools.partial(made, nnx.LinearGeneral)
einsum = functools.partial(made, nnx.Einsum)
conv = functools.partial(made, nnx.Conv)
transposed = functools.partial(made, nnx.ConvTranspose)
embed = functools.partial(made, nnx.Embed, 7, 3, embedding_init=quick)
multi = functools.partial(made, nnx.MultiHeadAttention)
group_norm = functools.partial(made, nnx.GroupNorm)


def qkv(*shapes):
    return [ONES(shape) for shape in shapes or [(2, 5, 4, 8), (2, 7, 4, 8), (2, 7, 4, 8)]]


def stack():
    return nnx.vmap(lambda rngs: nnx.Linear(3, 4, rngs=rngs))(nnx.Rngs(0).fork(split=5))


def decoder(decode=False):
    layer = multi(2, 8, decode=decode)
    layer.init_cache((3, 6, 8))
    return layer


def lost_mask(kind):
    layer = made(kind, 2, 4, 3, mask=ONES((3, 2, 4)))
    layer.mask = ONES((1, 2, 4))
    return layer


class KeyOnly:
    """Streams for parameters that are no Rngs."""

    def params(self):
        return KEY


CONVS = (nnx.Conv, nnx.ConvTranspose)
NORMS = {
    nnx.BatchNorm: (6,),
    nnx.LayerNorm: (6,),
    nnx.RMSNorm: (6,),
    nnx.GroupNorm: (6, 3),
    nnx.InstanceNorm: (6,),
}
X = ONES((4, 5, 6))
Q = ONES((3, 6, 8))
KV = ONES((3, 4, 5))


def linear_layers():
    for shape in [(2, 5), (3, 2), ()]:
        text = (
            rf"Linear expects 3 feature.*`kernel` has shape \(3, 4\).*input of shape {same(shape)}"
        )
        yield TypeError, text, lambda s=shape: linear(3, 4)(ONES(s))
    text = r"looks like a stack of layers: map over it with nnx.vmap"
    yield TypeError, text, lambda: stack()(ONES((2, 3)))
    for sizes in [(2.5, 3), (3, -1), ("a", 3), ((2,), 3)]:
        text = r"Linear: `\w+` must be a whole number, zero or more"
        yield TypeError, text, lambda sizes=sizes: linear(*sizes)
    text = r"in_features and axis must have the same length. Got \(3, 2\) and \(-1,\)"
    yield ValueError, text, lambda: general((3, 2), 4, axis=(-1,))
    for batch in [{1: 2}, {0: 2, -1: 3}, {1: 3, 0: 2}]:
        text = r"batch_dims \(.*\) must be consecutive leading dimensions starting from 0\."
        yield ValueError, text, lambda batch=batch: general(3, 4, batch_axis=batch)
    for shape in [(2, 3, 3), (2,)]:
        text = r"LinearGeneral expects the sizes \(3, 2\).*`kernel` has shape \(3, 2, 4\).*input of"
        text += f" shape {same(shape)}"
        yield TypeError, text, lambda s=shape: general((3, 2), 4, axis=(-2, -1))(ONES(s))
    text = r"\(2,\) along the batch axes \(0,\)"
    yield TypeError, text, lambda: general(3, 4, batch_axis={0: 2})(ONES((5, 3)))
    for equation in ["ab,bc", "a->b->c", None]:
        text = 'equation must be explicit and include "->"'
        yield ValueError, text, lambda equation=equation: einsum(equation, (3, 4))
    for equation, count in [("ab->a", 1), ("a,b,c->a", 3)]:
        text = f"`einsum_str` equation must have exactly two operands.*got {count}"
        yield (
            ValueError,
            text,
            lambda e=equation: einsum("ab,bc->ac", (3, 4))(ONES((2, 3)), e),
        )
    text = r"a bias of shape \(3,\) does not fit .* sizes \(4,\)"
    yield TypeError, text, lambda: einsum("ab,bc->ac", (3, 4), (3,))(ONES((2, 3)))
    for numbers in [ONES(2), jnp.array([True]), [0.5]]:
        text = "Embed: Input type must be an integer or unsigned integer"
        yield ValueError, text, lambda numbers=numbers: embed()(numbers)
    text = r"length 3: `embedding` has shape \(7, 3\).*\(2, 4\)"
    yield TypeError, text, lambda: embed().attend(ONES((2, 4)))
    text = "Embed: `num_embeddings` must be a whole number"
    yield TypeError, text, lambda: made(nnx.Embed, -1, 3)
    text = "LoRA: `base_module` must be callable, got int"
    yield ValueError, text, lambda: made(nnx.LoRA, 3, 2, 4, base_module=3)
    text = r"LoRA expects 3 feature.*`lora_a` has shape \(3, 2\)"
    yield TypeError, text, lambda: made(nnx.LoRA, 3, 2, 4)(ONES((2, 5)))
    text = "LoRALinear: `lora_rank` must be a whole number"
    yield TypeError, text, lambda: made(nnx.LoRALinear, 3, 4, lora_rank=1.5)


def same(shape):
    """A shape as part of a pattern."""
    return str(shape).replace("(", r"\(").replace(")", r"\)")


def convolutions():
    paddings = [{"padding": "FOO"}, {"padding": [1]}, {"padding": [(1, 2, 3), 1]}]
    for kind, options in itertools.product(CONVS, [*paddings, {"padding": None}]):
        text = r"Invalid padding format: .*, should be .* SAME, .*each of the 2 spatial axes"
        yield ValueError, text, lambda k=kind, o=options: made(k, 2, 4, (3, 2), **o)
    for padding in ["CAUSAL", "REFLECT"]:
        text = "ConvTranspose: Invalid padding format: .* SAME, SAME_LO"
        yield ValueError, text, lambda padding=padding: transposed(2, 4, 3, padding=padding)
    text = r"'SAME_LOWER' padding needs strides of one, got str.*2"
    lower = functools.partial(transposed, 2, 4, 3, 2, padding="SAME_LOWER")
    yield ValueError, text, lambda: lower()(ONES((1, 5, 2)))
    text = r"Causal padding is only implemented for 1D convolutions, and kernel_size is \(3, 2\)"
    yield ValueError, text, lambda: conv(2, 4, (3, 2), padding="CAUSAL")
    text = "with input_dilation=2 the padding must be given in num"
    yield ValueError, text, lambda: conv(2, 4, 3, input_dilation=2)
    for kind, name, value in itertools.product(
        CONVS, ["strides", "kernel_dilation"], [(1,), (1, 2, 3), 0]
    ):
        text = f"`{name}` must be a positive number, or one for each"
        yield ValueError, text, lambda k=kind, o={name: value}: made(k, 2, 4, (3, 2), **o)
    for features, groups in [((4, 9), 4), ((3, 4), 2), ((4, 4), 0)]:
        text = f"feature_group_count={groups} must divide in_features"
        yield ValueError, text, lambda f=features, g=groups: conv(*f, 3, feature_group_count=g)
    for kind in CONVS:
        text = r"Mask needs to have the same shape as weights. Shapes are: .*, \(3, 2, 4\)"
        yield ValueError, text, lambda kind=kind: made(kind, 2, 4, 3, mask=ONES((2, 4)))
        text = r"Shapes are: \(1, 2, 4\), \(3, 2, 4\)"
        yield ValueError, text, lambda kind=kind: lost_mask(kind)(ONES((5, 2)))
        for shape in [(2, 8, 8, 5), (8, 2), (2,)]:
            text = (
                rf"{kind.__name__} expects an input of shape.*kernel_size is \(3, 3\) and `kernel`"
            )
            text += rf" has shape \(3, 3, 2, 4\).*got {same(shape)}\.$"
            yield ValueError, text, lambda k=kind, s=shape: made(k, 2, 4, (3, 3))(ONES(s))
    text = r"Invalid padding format: \[1\], should be a number, .* 2 spatial axes"
    yield ValueError, text, lambda: nnx.nn.linear.canonicalize_padding([1], rank=2)


def pools():
    x = ONES((1, 4, 4, 1))
    for options, text in [
        ({"window_shape": 2}, "needs `window_shape` as a sequence"),
        ({"window_shape": (2, 2), "strides": 2}, "needs `strides` as a sequence"),
        ({"window_shape": (2, 0)}, "needs `window_shape` as a sequence with a positive number"),
        ({"window_shape": (2.5, 2)}, "needs `window_shape` as a sequence with a positive number"),
        ({"window_shape": (2, 2), "strides": (1, -1)}, "needs `strides` as a sequence with a pos"),
    ]:
        yield TypeError, text, lambda options=options: nnx.max_pool(x, **options)
    for padding in ["foo", "CIRCULAR", "", None, ((1, 0),)]:
        text = f"Pooling: Invalid padding format: {same(repr(padding))}, should be one of SAME, "
        yield ValueError, text, lambda padding=padding: nnx.avg_pool(x, (2, 2), padding=padding)
    text = r"window \(2, 2\) expects .* got the strides \(1,\)"
    yield ValueError, text, lambda: nnx.avg_pool(x, (2, 2), strides=(1,))
    text = r"\(2, 2\) expects .* 2 spatial axes; .* shape \(4, 1\)"
    yield ValueError, text, lambda: nnx.avg_pool(ONES((4, 1)), (2, 2))


def norms():
    for kind, args in NORMS.items():
        name = kind.__name__
        text = rf"{name} was made for 6 feature\(s\).*\(4, 5, 7\) has 7 along"
        yield TypeError, text, lambda k=kind, a=args: made(k, *a)(ONES((4, 5, 7)))
        text = rf"{name} got a mask of shape \(3, 6\).*\(4, 5, 6\)"
        yield ValueError, text, lambda k=kind, a=args: made(k, *a)(X, mask=ONES((3, 6)))
    for kind, args, options in [
        (nnx.BatchNorm, (6,), {"axis": 3}),
        (nnx.LayerNorm, (6,), {"feature_axes": (0, 3)}),
        (nnx.RMSNorm, (6,), {"reduction_axes": 3}),
        (nnx.GroupNorm, (6, 2), {"reduction_axes": (3, -1)}),
        (nnx.InstanceNorm, (6,), {"feature_axes": 3}),
    ]:
        text = rf"{kind.__name__} works along axis 3, and.*\(6, 6, 6\) has 3"
        yield IndexError, text, lambda k=kind, a=args, o=options: made(k, *a, **o)(ONES((6, 6, 6)))
    for args, text in [
        ((6, 2, 3), "Either `num_groups` or `group_size` .*num_groups=2, group_size=3"),
        ((6, None, None), "Either `num_groups` or `group_size` should be specified"),
        ((6, 4), r"Number of groups \(4\) does not divide the number of channels \(6\)"),
        ((6, None, 4), r"Number of features \(6\) is not multiple of the group size \(4\)"),
        ((6, 0), "num_groups=0"),
        ((6, -2), "num_groups=-2"),
    ]:
        yield ValueError, text, lambda args=args: group_norm(*args)
    yield (
        ValueError,
        r"examples along the first axis.*\(6,\)",
        lambda: group_norm(6, 2)(ONES(6)),
    )
    text = "must name the last axis; they are 1"
    yield ValueError, text, lambda: group_norm(6, 2, reduction_axes=1)(X)
    text = r"The channel axes cannot include the leading dimension.*feature_axes=\(0, -1\)"
    yield ValueError, text, lambda: made(nnx.InstanceNorm, 24, feature_axes=(0, -1))(X)
    text = r"No `use_running_average` argument was provided to BatchNorm.*model.eval"
    yield ValueError, text, lambda: made(nnx.BatchNorm, 6, use_running_average=None)(X)
    text = "n_steps of SpectralNorm is a number of steps, not -1"
    yield ValueError, text, lambda: made(nnx.SpectralNorm, linear(3, 4), n_steps=-1)
    text = "SpectralNorm wraps a module.*got a value of type"
    yield TypeError, text, lambda: made(nnx.SpectralNorm, jnp.tanh)
    text = r"parameter is 3D .*table of Dict has the shape \(2, 3"
    table = lambda: nnx.Dict(table=nnx.Param(ONES((2, 3, 4))))
    yield ValueError, text, lambda: made(nnx.SpectralNorm, table(), error_on_non_matrix=True)
    text = r"feature_axes=1\) names an axis that does not exist in bias of Linear, of shape \(4,\)"
    wrong = {"feature_axes": 1, "variable_filter": nnx.Param}
    yield IndexError, text, lambda: made(nnx.WeightNorm, linear(3, 4), **wrong)
    text = "WeightNorm wraps a module.*got a value of type list"
    yield TypeError, text, lambda: made(nnx.WeightNorm, [linear(3, 4)])


SHAPES = {
    "number of dimensions": ((5, 4, 8), (2, 7, 4, 8), (2, 7, 4, 8)),
    "three or more": ((5, 8), (7, 8), (7, 8)),
    "batch dimensions": ((2, 5, 4, 8), (1, 7, 4, 8), (1, 7, 4, 8)),
    "one value for every key": ((2, 5, 4, 8), (2, 7, 4, 8), (2, 6, 4, 8)),
    "same number of heads": ((2, 5, 4, 8), (2, 7, 4, 8), (2, 7, 2, 8)),
    "must divide the number of query heads": ((2, 5, 4, 8), (2, 7, 3, 8), (2, 7, 3, 8)),
    "same depth": ((2, 5, 4, 8), (2, 7, 4, 6), (2, 7, 4, 8)),
}


def attention():
    rotating = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
    for text, shapes in SHAPES.items():
        whole = f"dot_product_attention: .*{text}.*query has shape"
        yield ValueError, whole, lambda shapes=shapes: attend(*qkv(*shapes))
        yield ValueError, text, lambda shapes=shapes: rotating(*qkv(*shapes))
    for name, shape in itertools.product(["mask", "bias"], [(2, 4, 5, 6), (1, 2, 4, 5, 7)]):
        text = f"a {name} of shape {same(shape)}" + (r".*\(2, 4, 5, 7\)" if len(shape) == 4 else "")
        yield TypeError, text, lambda n=name, s=shape: attend(*qkv(), **{n: ONES(s)})
    text = "dropout_rng is required when .* dropout_rate=0.5"
    yield ValueError, text, lambda: attend(*qkv(), dropout_rate=0.5)
    fused = functools.partial(attend, implementation="xla")
    for options, text in [
        ({"dropout_rate": 0.5, "dropout_rng": KEY}, "excludes dropout"),
        ({"module": nnx.Module()}, "excludes recording the weights"),
        ({"precision": "high"}, "excludes precision='high'"),
    ]:
        text = f"implementation='xla'.* is fused, which {text}"
        yield ValueError, text, lambda options=options: fused(*qkv(), **options)
    other = ((2, 5, 4, 8), (2, 7, 4, 8), (2, 7, 4, 3))
    yield ValueError, "excludes having values of shape", lambda: fused(*qkv(*other))
    text = r"masks must have same rank, got the shapes \[\(2,\), \(1, 2\)"
    yield ValueError, text, lambda: nnx.combine_masks(ONES(2), ONES((1, 2)))
    text = r"do not broadcast: \[\(2,\), \(3,\)\]"
    yield TypeError, text, lambda: nnx.combine_masks(ONES(2), ONES(3))
    text = r"compares sequences.*shape \(\) and \(3,\)"
    yield ValueError, text, lambda: nnx.make_attention_mask(ONES(()), ONES(3))
    yield ValueError, "compares sequences", lambda: nnx.make_causal_mask(ONES(()))

    text = "both `embedding_size` and `max_seq_len` .*max_seq_len=None"
    yield ValueError, text, lambda: nnx.RoPE(embedding_size=8)
    text = "must be positive and even, and it is 7"
    yield ValueError, text, lambda: nnx.RoPE(embedding_size=7, max_seq_len=3)
    yield ValueError, "must be positive and even, and it is 3", lambda: nnx.RoPE()(ONES((2, 3)))
    yield ValueError, r"\(..., length, depth\), got shape \(8,\)", lambda: nnx.RoPE()(ONES(8))
    kept = functools.partial(nnx.RoPE, embedding_size=8, max_seq_len=4)
    for shape in [(5, 8), (4, 6)]:
        text = r"RoPE\(embedding_size=8, max_seq_len=4\) got an"
        yield TypeError, text, lambda s=shape: kept()(ONES(s))
    for shape in [(4,), (), (2, 5), (3, 1)]:
        text = r"input_positions of shape .* the length of the inp"
        yield ValueError, text, lambda s=shape: nnx.RoPE()(ONES((3, 5, 8)), jnp.zeros(s, int))


def attention_layers():
    for args, options, text in [
        ((3, 8), {}, r"Memory dimension \(8\) must be divisible by 'num_heads' heads \(3\)"),
        ((0, 8), {}, r"divisible by 'num_heads' heads \(0\)"),
        ((2, 8, 9), {}, r"Memory dimension \(9\) must be divisible by 'num_heads' heads \(2\)"),
        ((4, 8), {"num_kv_heads": 3}, r"num_heads \(4\) must be divisible by num_kv_heads \(3\)"),
        ((2, 8), {"num_kv_heads": 4}, r"num_heads \(2\) must be divisible by num_kv_heads \(4\)"),
        ((2, 8), {"num_kv_heads": 0}, r"divisible by num_kv_heads \(0\)"),
    ]:
        yield ValueError, text, lambda args=args, options=options: multi(*args, **options)
    cross = functools.partial(multi, 2, 8, in_kv_features=5)
    for name, kind, inputs in [
        ("inputs_q", ValueError, (Q[..., :7], KV)),
        ("inputs_k", TypeError, (Q, Q)),
        ("inputs_v", TypeError, (Q, KV, Q)),
    ]:
        text = r"Incompatible input dimension, got \d+ but module expects \d+.*: "
        text += rf"{name} has the shape .*; got"
        yield kind, text, lambda inputs=inputs: cross()(*inputs)
    yield ValueError, r"inputs_q has the shape \(.*; got \(8,\)", lambda: multi(2, 8)(Q[0, 0])
    text = "`inputs_k` cannot be None if `inputs_v` is not None"
    yield ValueError, text, lambda: cross()(Q, None, KV)
    text = "batch dimensions of query, key and value differ"
    yield ValueError, text, lambda: cross()(Q, KV[:2])
    text = r"a mask of shape \(3, 1, 6, 5\)"
    yield TypeError, text, lambda: cross()(Q, KV, mask=ONES((3, 1, 6, 5)))
    dropping = functools.partial(multi, 2, 8, dropout_rate=0.5)
    bare = functools.partial(dropping, keep_rngs=False)
    text = "MultiHeadAttention: 'rngs' must be provided for dropout.*keep_"
    yield ValueError, text, lambda: bare()(Q, deterministic=False)
    text = "must be an Rngs, an RngStream or a key, got int"
    yield TypeError, text, lambda: bare()(Q, deterministic=False, rngs=3)
    text = "must be an Rngs, .* an RngStream or None; got KeyOnly"
    yield TypeError, text, lambda: dropping(rngs=KeyOnly())
    text = "No `decode` argument was provided to MultiHeadAttention"
    yield ValueError, text, lambda: multi(2, 8, decode=None)(Q)
    text = "No `deterministic` argument was provided"
    yield ValueError, text, lambda: dropping(decode=None)(Q, decode=False)

    text = "Autoregressive cache not initialized, call init_cache"
    yield ValueError, text, lambda: multi(2, 8)(Q[:, :1], decode=True)
    text = r"init_cache takes the shape of a whole input.*\(8,\)"
    yield ValueError, text, lambda: multi(2, 8).init_cache((8,))
    text = "needs both or none; got batch_size=3, max_length=None"
    yield ValueError, text, lambda: multi(2, 8).set_view(decode=True, batch_size=3)
    for x in (jnp.concatenate([Q, Q], axis=1), Q[:, :0], Q[:1, :1], Q[None, :, :1]):
        text = r"cache shape error, expected key shape .*\(3, 6, 2, 4\)"
        yield ValueError, text, lambda x=x: decoder()(x, decode=True)
    for shape in ((5,), (3, 1, 2, 6), (4, 1, 1, 6)):
        text = r"a mask of shape .* \(3, 2, 1, 6\)"
        yield (
            TypeError,
            text,
            lambda s=shape: decoder()(Q[:, :1], decode=True, mask=ONES(s)),
        )


def others():
    for function in [lambda x, **k: promote_dtype((x,), **k), canonicalize_dtype]:
        text = "Dtype must be inexact: a layer computes .*, got 'int32'"
        yield ValueError, text, lambda f=function: f(jnp.arange(2), dtype=jnp.int32)
    for args, options in itertools.product([None, 1.0, True], [{}, {"dtype": jnp.float32}]):
        text = rf"promote_dtype\(\(x, kernel\)\); got {args} alone"
        yield TypeError, text, lambda args=args, options=options: promote_dtype(args, **options)
    yield ValueError, "at least one array or dtype", lambda: promote_dtype((None,))
    text = r"Sequential: layers\[1\] is not callable, it is of type int\.$"
    yield TypeError, text, lambda: nnx.Sequential(nnx.relu, 3)(ONES(2))
    text = r"layers\[1\] gets the keyword argument\(s\) \['b'\] both"
    yield TypeError, text, lambda: nnx.Sequential(lambda x: {"b": x}, lambda b: b)(1, b=2)
    for name in ["in_features", "out_features", "width", "depth"]:
        sizes = {"in_features": 3, "out_features": 2, "width": 8, "depth": 1, name: -1}
        text = f"MLP: `{name}` must be a whole number, zero or more"
        yield TypeError, text, lambda sizes=sizes: made(nnx.MLP, **sizes)
    text = r"`deterministic` is False, but no `rngs` argument was provided to Dropout"
    text += r".*model.eval\(\).*rngs=rngs"
    yield ValueError, text, lambda: nnx.Dropout(0.5)(ONES(3))
    text = "No `deterministic` argument was provided to Dropout"
    yield ValueError, text, lambda: made(nnx.Dropout, 0.5, deterministic=None)(ONES(3))
    text = r"Dropout: .* rngs=nnx.Rngs\(0\), .* None; got int"
    yield TypeError, text, lambda: nnx.Dropout(0.5, rngs=3)
    text = "must be an Rngs, an RngStream or a key, got str"
    yield TypeError, text, lambda: nnx.Dropout(0.5)(ONES(3), rngs="key")
    params = nnx.Rngs(params=0)
    yield KeyError, "dropout", lambda: nnx.Dropout(0.5, rngs=params)
    yield KeyError, "dropout", lambda: nnx.Dropout(0.5)(ONES(3), rngs=params)
    yield KeyError, "dropout", lambda: made(nnx.MLP, 3, 2, 8, 1, dropout_rate=0.1, rngs=params)
    text = r"needs a floating input; got int32\[3\]"
    yield TypeError, text, lambda: made(nnx.Dropout, 0.5)(jnp.arange(3))
    text = r"names the axis 2, and the input has shape \(3, 4\)"
    yield IndexError, text, lambda: made(nnx.Dropout, 0.5, broadcast_dims=(2,))(ONES((3, 4)))


TABLES = [linear_layers, convolutions, pools, norms, attention, attention_layers, others]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_the_error_names_what_is_wrong(table):
    for kind, text, call in table():
        with pytest.raises(kind, match=f"(?s){text}"):
            call()


REFUSED = {
    "Linear": (TypeError, lambda rngs: nnx.Linear(2.5, 3, rngs=rngs)),
    "LoRA": (ValueError, lambda rngs: nnx.LoRA(3, 2, 4, base_module=3, rngs=rngs)),
    "LoRALinear": (TypeError, lambda rngs: nnx.LoRALinear(3, 4, lora_rank=1.5, rngs=rngs)),
    "MLP": (TypeError, lambda rngs: nnx.MLP(3, 2, -1, 1, rngs=rngs)),
    "a padding": (ValueError, lambda rngs: conv(2, 4, 3, padding="FOO", rngs=rngs)),
    "strides": (ValueError, lambda rngs: conv(2, 4, 3, strides=(1, 2), rngs=rngs)),
    "a mask": (ValueError, lambda rngs: conv(2, 4, 3, mask=ONES(2), rngs=rngs)),
    "a kernel size": (TypeError, lambda rngs: conv(2, 4, 2.5, rngs=rngs)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_layer_has_drawn_nothing(name):
    rngs, (kind, make) = nnx.Rngs(0), REFUSED[name]
    with pytest.raises(kind):
        make(rngs)
    assert rngs.default.count.value == 0


def test_a_refused_call_leaves_the_layer_as_it_was():
    layer = decoder()
    for wrong in (
        lambda: layer(Q[:1, :1], decode=True),
        lambda: layer.set_view(decode=True, batch_size=3),
        lambda: layer(Q[:, :1], decode=True, mask=ONES(5)),
    ):
        with pytest.raises((ValueError, TypeError)):
            wrong()
    assert layer.decode is False and int(layer.cache_index.value) == 0
    for kind, args in NORMS.items():
        norm = made(kind, *args)
        before = jax.tree.leaves(nnx.state(norm))
        with pytest.raises(ValueError):
            norm(X, mask=ONES((3, 6)))
        assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(norm))))


@pytest.mark.parametrize(
    ("equation", "message"), [("ab,bcd->acd", "'bcd'"), ("ab,bc->ac", "label 'b' .*5.*3")]
)
def test_errors_of_einsum_name_the_layer_and_both_shapes(equation, message):
    layer = einsum(equation, (3, 4))
    with pytest.raises(ValueError, match=message) as error:
        layer(ONES((2, 5)))
    notes = " ".join(error.value.__notes__)
    assert f"'{equation}' of shapes (2, 5) and (3, 4)" in notes and "called by Einsum" in notes


def test_what_is_nearly_wrong_is_not():
    assert nnx.avg_pool(ONES((1, 4, 4, 1)), (2, 2), padding="same_lower").shape == (1, 4, 4, 1)
    assert nnx.nn.linear.canonicalize_padding(2, rank=2) == [(2, 2), (2, 2)]
    for function in (lambda x, **k: promote_dtype((x,), **k), canonicalize_dtype):
        function(np.arange(2), dtype=jnp.int32, inexact=False)
