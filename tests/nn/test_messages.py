"""What layers say of wrong arguments and inputs, and where in the model they are."""

import builtins
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.nn.dtypes import canonicalize_dtype, promote_dtype
from tests.nn.catalogue import LAYERS
from tests.nn.quick import QUICK, quick

KEY = jax.random.key(0)
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
gru = functools.partial(made, nnx.GRUCell, 3, 4, recurrent_kernel_init=quick)
lstm = functools.partial(made, nnx.LSTMCell, 3, 4, recurrent_kernel_init=quick)
cross = functools.partial(multi, 2, 8, in_kv_features=5)
dropping = functools.partial(multi, 2, 8, dropout_rate=0.5)
rotating = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())


def ones(*shape):
    return jnp.ones(shape)


def qkv(*shapes):
    return [ones(*shape) for shape in shapes or [(2, 5, 4, 8), (2, 7, 4, 8), (2, 7, 4, 8)]]


def rnn(**options):
    return nnx.RNN(gru(), **options)


def stack():
    return nnx.vmap(lambda rngs: nnx.Linear(3, 4, rngs=rngs))(nnx.Rngs(0).fork(split=5))


def decoder(decode=False):
    layer = multi(2, 8, decode=decode)
    layer.init_cache((3, 6, 8))
    return layer


def lost_mask(kind):
    layer = made(kind, 2, 4, 3, mask=ones(3, 2, 4))
    layer.mask = ones(1, 2, 4)
    return layer


class KeyOnly:
    """Streams for parameters that are no Rngs."""

    def params(self):
        return KEY


NORMS = {
    nnx.BatchNorm: (6,),
    nnx.LayerNorm: (6,),
    nnx.RMSNorm: (6,),
    nnx.GroupNorm: (6, 3),
    nnx.InstanceNorm: (6,),
}
X = ones(4, 5, 6)
Q = ones(3, 6, 8)
KV = ones(3, 4, 5)


MESSAGES = r"""
TypeError Linear expects 3 feature.*`kernel` has shape \(3, 4\).*input of shape \((2, 5|3, 2|)\)
    linear(3, 4)(ones(2, 5))
    linear(3, 4)(ones())
TypeError looks like a stack of layers: map over it with nnx.vmap
    stack()(ones(2, 3))
TypeError Linear: `\w+` must be a whole number, zero or more
    linear(2.5, 3)
    linear(3, -1)
ValueError in_features and axis must have the same length. Got \(3, 2\) and \(-1,\)
    general((3, 2), 4, axis=(-1,))
ValueError batch_dims \(.*\) must be consecutive leading dimensions starting from 0\.
    general(3, 4, batch_axis={1: 2})
    general(3, 4, batch_axis={0: 2, -1: 3})
TypeError LinearGeneral expects the sizes \(3, 2\).*`kernel` has shape \(3, 2, 4\).*input of shape \(2,
    general((3, 2), 4, axis=(-2, -1))(ones(2, 3, 3))
    general((3, 2), 4, axis=(-2, -1))(ones(2))
TypeError \(2,\) along the batch axes \(0,\)
    general(3, 4, batch_axis={0: 2})(ones(5, 3))
ValueError equation must be explicit and include "->"
    einsum("ab,bc", (3, 4))
    einsum("a->b->c", (3, 4))
ValueError `einsum_str` equation must have exactly two operands.*got [13]
    einsum("ab,bc->ac", (3, 4))(ones(2, 3), "ab->a")
    einsum("ab,bc->ac", (3, 4))(ones(2, 3), "a,b,c->a")
TypeError a bias of shape \(3,\) does not fit .* sizes \(4,\)
    einsum("ab,bc->ac", (3, 4), (3,))(ones(2, 3))
ValueError Embed: Input type must be an integer or unsigned integer
    embed()(ones(2))
TypeError length 3: `embedding` has shape \(7, 3\).*\(2, 4\)
    embed().attend(ones(2, 4))
TypeError Embed: `num_embeddings` must be a whole number
    made(nnx.Embed, -1, 3)
ValueError LoRA: `base_module` must be callable, got int
    made(nnx.LoRA, 3, 2, 4, base_module=3)
TypeError LoRA expects 3 feature.*`lora_a` has shape \(3, 2\)
    made(nnx.LoRA, 3, 2, 4)(ones(2, 5))
TypeError LoRALinear: `lora_rank` must be a whole number
    made(nnx.LoRALinear, 3, 4, lora_rank=1.5)

ValueError Invalid padding format: .*, should be .* SAME, .*each of the 2 spatial axes
    conv(2, 4, (3, 2), padding="FOO")
    conv(2, 4, (3, 2), padding=[1])
ValueError ConvTranspose: Invalid padding format: .* SAME, SAME_LO
    transposed(2, 4, 3, padding="CAUSAL")
ValueError 'SAME_LOWER' padding needs strides of one, got str.*2
    transposed(2, 4, 3, 2, padding="SAME_LOWER")(ones(1, 5, 2))
ValueError Causal padding is only implemented for 1D convolutions, and kernel_size is \(3, 2\)
    conv(2, 4, (3, 2), padding="CAUSAL")(ones(1, 5, 5, 2))
ValueError with input_dilation=2 the padding must be given in num
    conv(2, 4, 3, input_dilation=2)(ones(1, 5, 2))
ValueError `strides` must be a positive number, or one for each
    conv(2, 4, (3, 2), strides=(1,))
    transposed(2, 4, (3, 2), strides=0)
ValueError `kernel_dilation` must be a positive number, or one for each
    transposed(2, 4, (3, 2), kernel_dilation=(1,))
ValueError feature_group_count=[042] must divide in_features
    conv(4, 9, 3, feature_group_count=4)
    conv(4, 4, 3, feature_group_count=0)
ValueError Mask needs to have the same shape as weights. Shapes are: .*, \(3, 2, 4\)
    conv(2, 4, 3, mask=ones(2, 4))
ValueError Shapes are: \(1, 2, 4\), \(3, 2, 4\)
    lost_mask(nnx.Conv)(ones(5, 2))
    lost_mask(nnx.ConvTranspose)(ones(5, 2))
ValueError expects an input of shape.*kernel_size is \(3, 3\) and `kernel` has shape \(3, 3, 2, 4\).*got
    conv(2, 4, (3, 3))(ones(2, 8, 8, 5))
    conv(2, 4, (3, 3))(ones(8, 2))
ValueError Invalid padding format: \[1\], should be a number, .* 2 spatial axes
    nnx.nn.linear.canonicalize_padding([1], rank=2)

TypeError needs `window_shape` as a sequence with a positive number
    nnx.max_pool(ones(1, 4, 4, 1), 2)
    nnx.max_pool(ones(1, 4, 4, 1), (2, 0))
TypeError needs `strides` as a sequence with a pos
    nnx.max_pool(ones(1, 4, 4, 1), (2, 2), strides=2)
    nnx.max_pool(ones(1, 4, 4, 1), (2, 2), strides=(1, -1))
ValueError Pooling: Invalid padding format: ('\w*'|None|\(\(1, 0\),\)), should be one of SAME,
    nnx.avg_pool(ones(1, 4, 4, 1), (2, 2), padding="CIRCULAR")
    nnx.avg_pool(ones(1, 4, 4, 1), (2, 2), padding=((1, 0),))
ValueError window \(2, 2\) expects .* got the strides \(1,\)
    nnx.avg_pool(ones(1, 4, 4, 1), (2, 2), strides=(1,))
ValueError \(2, 2\) expects .* 2 spatial axes; .* shape \(4, 1\)
    nnx.avg_pool(ones(4, 1), (2, 2))

IndexError (Batch|Layer|RMS|Group|Instance)Norm works along axis 3, and.*\(6, 6, 6\) has 3
    made(nnx.BatchNorm, 6, axis=3)(ones(6, 6, 6))
    group_norm(6, 2, reduction_axes=(3, -1))(ones(6, 6, 6))
    made(nnx.InstanceNorm, 6, feature_axes=3)(ones(6, 6, 6))
ValueError Either `num_groups` or `group_size` .*num_groups=2, group_size=3
    group_norm(6, 2, 3)
ValueError Either `num_groups` or `group_size` should be specified
    group_norm(6, None, None)
ValueError Number of groups \(4\) does not divide the number of channels \(6\)
    group_norm(6, 4)
ValueError Number of features \(6\) is not multiple of the group size \(4\)
    group_norm(6, None, 4)
ValueError num_groups=(0|-2)
    group_norm(6, 0)
ValueError examples along the first axis.*\(6,\)
    group_norm(6, 2)(ones(6))
ValueError must name the last axis; they are 1
    group_norm(6, 2, reduction_axes=1)(X)
ValueError The channel axes cannot include the leading dimension.*feature_axes=\(0, -1\)
    made(nnx.InstanceNorm, 24, feature_axes=(0, -1))(X)
ValueError No `use_running_average` argument was provided to BatchNorm.*model.eval
    made(nnx.BatchNorm, 6, use_running_average=None)(X)
ValueError n_steps of SpectralNorm is a number of steps, not -1
    made(nnx.SpectralNorm, linear(3, 4), n_steps=-1)
TypeError SpectralNorm wraps a module.*got a value of type
    made(nnx.SpectralNorm, jnp.tanh)
ValueError parameter is 3D .*table of Dict has the shape \(2, 3
    made(nnx.SpectralNorm, nnx.Dict(table=nnx.Param(ones(2, 3, 4))), error_on_non_matrix=True)
IndexError feature_axes=1\) names an axis that does not exist in bias of Linear, of shape \(4,\)
    made(nnx.WeightNorm, linear(3, 4), feature_axes=1, variable_filter=nnx.Param)
TypeError WeightNorm wraps a module.*got a value of type list
    made(nnx.WeightNorm, [linear(3, 4)])

ValueError dot_product_attention: .*number of dimensions.*query has shape
    attend(*qkv((5, 4, 8), (2, 7, 4, 8), (2, 7, 4, 8)))
    rotating(*qkv((5, 4, 8), (2, 7, 4, 8), (2, 7, 4, 8)))
ValueError dot_product_attention: .*three or more.*query has shape
    attend(*qkv((5, 8), (7, 8), (7, 8)))
ValueError dot_product_attention: .*batch dimensions.*query has shape
    attend(*qkv((2, 5, 4, 8), (1, 7, 4, 8), (1, 7, 4, 8)))
ValueError dot_product_attention: .*one value for every key.*query has shape
    attend(*qkv((2, 5, 4, 8), (2, 7, 4, 8), (2, 6, 4, 8)))
ValueError dot_product_attention: .*same number of heads.*query has shape
    attend(*qkv((2, 5, 4, 8), (2, 7, 4, 8), (2, 7, 2, 8)))
ValueError dot_product_attention: .*must divide the number of query heads.*query has shape
    attend(*qkv((2, 5, 4, 8), (2, 7, 3, 8), (2, 7, 3, 8)))
ValueError dot_product_attention: .*same depth.*query has shape
    attend(*qkv((2, 5, 4, 8), (2, 7, 4, 6), (2, 7, 4, 8)))
TypeError a (mask|bias) of shape \(2, 4, 5, 6\).*\(2, 4, 5, 7\)
    attend(*qkv(), mask=ones(2, 4, 5, 6))
    attend(*qkv(), bias=ones(2, 4, 5, 6))
TypeError a (mask|bias) of shape \(1, 2, 4, 5, 7\)
    attend(*qkv(), mask=ones(1, 2, 4, 5, 7))
ValueError dropout_rng is required when .* dropout_rate=0.5
    attend(*qkv(), dropout_rate=0.5)
ValueError implementation='xla'.* is fused, which excludes dropout
    attend(*qkv(), implementation="xla", dropout_rate=0.5, dropout_rng=KEY)
ValueError implementation='xla'.* is fused, which excludes recording the weights
    attend(*qkv(), implementation="xla", module=nnx.Module())
ValueError implementation='xla'.* is fused, which excludes precision='high'
    attend(*qkv(), implementation="xla", precision="high")
ValueError excludes having values of shape
    attend(*qkv((2, 5, 4, 8), (2, 7, 4, 8), (2, 7, 4, 3)), implementation="xla")
ValueError masks must have same rank, got the shapes \[\(2,\), \(1, 2\)
    nnx.combine_masks(ones(2), ones(1, 2))
TypeError do not broadcast: \[\(2,\), \(3,\)\]
    nnx.combine_masks(ones(2), ones(3))
ValueError compares sequences.*shape \(\) and \(
    nnx.make_attention_mask(ones(), ones(3))
    nnx.make_causal_mask(ones())
ValueError both `embedding_size` and `max_seq_len` .*max_seq_len=None
    nnx.RoPE(embedding_size=8)
ValueError must be positive and even, and it is (7|3)
    nnx.RoPE(embedding_size=7, max_seq_len=3)
    nnx.RoPE()(ones(2, 3))
ValueError \(..., length, depth\), got shape \(8,\)
    nnx.RoPE()(ones(8))
TypeError RoPE\(embedding_size=8, max_seq_len=4\) got an
    nnx.RoPE(embedding_size=8, max_seq_len=4)(ones(5, 8))
    nnx.RoPE(embedding_size=8, max_seq_len=4)(ones(4, 6))
ValueError input_positions of shape .* the length of the inp
    nnx.RoPE()(ones(3, 5, 8), jnp.zeros((), int))
    nnx.RoPE()(ones(3, 5, 8), jnp.zeros((2, 5), int))

ValueError Memory dimension \([89]\) must be divisible by 'num_heads' heads \([302]\)
    multi(3, 8)
    multi(2, 8, 9)
ValueError num_heads \([42]\) must be divisible by num_kv_heads \([340]\)
    multi(4, 8, num_kv_heads=3)
ValueError Incompatible input dimension, got 7 but module expects 8.*: inputs_q has the shape .*; got
    cross()(Q[..., :7], KV)
TypeError Incompatible input dimension, got 8 but module expects 5.*: inputs_k has the shape .*; got
    cross()(Q, Q)
TypeError Incompatible input dimension, got 8 but module expects 5.*: inputs_v has the shape .*; got
    cross()(Q, KV, Q)
ValueError inputs_q has the shape \(.*; got \(8,\)
    multi(2, 8)(Q[0, 0])
ValueError `inputs_k` cannot be None if `inputs_v` is not None
    cross()(Q, None, KV)
ValueError batch dimensions of query, key and value differ
    cross()(Q, KV[:2])
TypeError a mask of shape \(3, 1, 6, 5\)
    cross()(Q, KV, mask=ones(3, 1, 6, 5))
ValueError MultiHeadAttention: 'rngs' must be provided for dropout.*keep_
    dropping(keep_rngs=False)(Q, deterministic=False)
TypeError must be an Rngs, an RngStream or a key, got int
    dropping(keep_rngs=False)(Q, deterministic=False, rngs=3)
TypeError must be an Rngs, .* an RngStream or None; got KeyOnly
    dropping(rngs=KeyOnly())
ValueError No `decode` argument was provided to MultiHeadAttention
    multi(2, 8, decode=None)(Q)
ValueError No `deterministic` argument was provided
    dropping(decode=None)(Q, decode=False)
ValueError Autoregressive cache not initialized, call init_cache
    multi(2, 8)(Q[:, :1], decode=True)
ValueError init_cache takes the shape of a whole input.*\(8,\)
    multi(2, 8).init_cache((8,))
ValueError needs both or none; got batch_size=3, max_length=None
    multi(2, 8).set_view(decode=True, batch_size=3)
ValueError cache shape error, expected key shape .*\(3, 6, 2, 4\)
    decoder()(jnp.concatenate([Q, Q], axis=1), decode=True)
    decoder()(Q[:1, :1], decode=True)
    decoder()(Q[None, :, :1], decode=True)
TypeError a mask of shape .* \(3, 2, 1, 6\)
    decoder()(Q[:, :1], decode=True, mask=ones(5))
    decoder()(Q[:, :1], decode=True, mask=ones(3, 1, 2, 6))

ValueError Dtype must be inexact: a layer computes .*, got 'int32'
    promote_dtype((jnp.arange(2),), dtype=jnp.int32)
    canonicalize_dtype(jnp.arange(2), dtype=jnp.int32)
TypeError promote_dtype\(\(x, kernel\)\); got (None|1.0|True) alone
    promote_dtype(None)
    promote_dtype(1.0, dtype=jnp.float32)
ValueError at least one array or dtype
    promote_dtype((None,))
TypeError Sequential: layers\[1\] is not callable, it is of type int\.$
    nnx.Sequential(nnx.relu, 3)(ones(2))
TypeError layers\[1\] gets the keyword argument\(s\) \['b'\] both
    nnx.Sequential(lambda x: {"b": x}, lambda b: b)(1, b=2)
TypeError MLP: `(in_features|out_features|width|depth)` must be a whole number, zero or more
    made(nnx.MLP, -1, 2, 8, 1)
ValueError `deterministic` is False, but no `rngs` .* provided to Dropout.*model.eval\(\).*rngs=rngs
    nnx.Dropout(0.5)(ones(3))
ValueError No `deterministic` argument was provided to Dropout
    made(nnx.Dropout, 0.5, deterministic=None)(ones(3))
TypeError Dropout: .* rngs=nnx.Rngs\(0\), .* None; got int
    nnx.Dropout(0.5, rngs=3)
TypeError must be an Rngs, an RngStream or a key, got str
    nnx.Dropout(0.5)(ones(3), rngs="key")
KeyError dropout
    nnx.Dropout(0.5)(ones(3), rngs=nnx.Rngs(params=0))
TypeError needs a floating input; got int32\[3\]
    made(nnx.Dropout, 0.5)(jnp.arange(3))
IndexError names the axis 2, and the input has shape \(3, 4\)
    made(nnx.Dropout, 0.5, broadcast_dims=(2,))(ones(3, 4))

TypeError Linear at `\w+` of (GRU|LSTM)Cell expects [34] feature
    gru()(ones(2, 4), ones(2, 4))
    gru()(ones(2, 3), ones(2, 3))
    lstm()((ones(2, 3), ones(2, 3)), ones(2, 3))
TypeError (GRU|LSTM)Cell got a carry of shape \(2, 4\) for .*\(3, 3\)
    gru()(ones(2, 4), ones(3, 3))
    lstm()((ones(2, 4), ones(2, 4)), ones(3, 3))
TypeError takes a carry of two arrays, .memory, hidden.*; got int
    lstm()(3, ones(2, 3))
ValueError GRUCell: RNGs must be provided to initialize the cell carry.*keep_rngs=True
    gru().initialize_carry((2, 3), carry_init=quick)
TypeError GRUCell: `rngs` must be an Rngs.* or a key, got int
    gru().initialize_carry((2, 3), 1)
NotImplementedError RNNCellBase is an RNN cell.*`(__call__|initialize_carry|num_feature_axes)`
    nnx.RNNCellBase()(None, None)
    nnx.RNNCellBase().initialize_carry((1,))
    nnx.RNNCellBase().num_feature_axes
ValueError RNN runs GRUCell along a time axis.* has shape \(3,\)
    rnn()(ones(3))
ValueError seq_lengths of shape \(3,\) for inputs with .*\(2,\)
    rnn()(ones(2, 4, 3), seq_lengths=jnp.array([1, 2, 3]))
TypeError integers as seq_lengths, got float32
    rnn()(ones(2, 4, 3), seq_lengths=ones(2))
ValueError seq_lengths from (0|-1) to (5|2) for inputs of 4 positions
    rnn()(ones(2, 4, 3), seq_lengths=jnp.array([0, 5]))
TypeError takes Carry, None or the number of an axis; got 'a'
    rnn(state_axes={...: "a"})
ValueError RNN: Expected rngs to be an Rngs, .* a bool; got int
    rnn(rngs=3)
TypeError Bidirectional: Expected rngs to be an Rngs, .* a bool; got int
    nnx.Bidirectional(rnn(), rnn(), rngs=3)
"""


def calls():
    """The calls of the table, each with the class and the pattern above it."""
    kind = pattern = ""
    for line in filter(None, MESSAGES.splitlines()):
        if line.startswith(" "):
            yield pytest.param(line.strip(), kind, pattern, id=line.strip())
        else:
            kind, _, pattern = line.partition(" ")


@pytest.mark.parametrize("call, kind, pattern", [*calls()])
def test_the_error_names_what_is_wrong(call, kind, pattern):
    with pytest.raises(getattr(builtins, kind), match=f"(?s){pattern}"):
        eval(call)


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_names_features_and_masks_that_do_not_fit(kind):
    norm, name = made(kind, *NORMS[kind]), kind.__name__
    text = rf"{name} was made for 6 feature\(s\).*\(4, 5, 7\) has 7 along"
    with pytest.raises(TypeError, match=text):
        norm(ones(4, 5, 7))
    with pytest.raises(ValueError, match=rf"{name} got a mask of shape \(3, 6\).*\(4, 5, 6\)"):
        norm(X, mask=ones(3, 6))


REFUSED = {
    "Linear": (TypeError, lambda rngs: nnx.Linear(2.5, 3, rngs=rngs)),
    "LoRA": (ValueError, lambda rngs: nnx.LoRA(3, 2, 4, base_module=3, rngs=rngs)),
    "LoRALinear": (TypeError, lambda rngs: nnx.LoRALinear(3, 4, lora_rank=1.5, rngs=rngs)),
    "MLP": (TypeError, lambda rngs: nnx.MLP(3, 2, -1, 1, rngs=rngs)),
    "a padding": (ValueError, lambda rngs: conv(2, 4, 3, padding="FOO", rngs=rngs)),
    "strides": (ValueError, lambda rngs: conv(2, 4, 3, strides=(1, 2), rngs=rngs)),
    "a mask": (ValueError, lambda rngs: conv(2, 4, 3, mask=ones(2), rngs=rngs)),
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
        lambda: layer(Q[:, :1], decode=True, mask=ones(5)),
    ):
        with pytest.raises((ValueError, TypeError)):
            wrong()
    assert layer.decode is False and int(layer.cache_index.value) == 0
    for kind, args in NORMS.items():
        norm = made(kind, *args)
        before = jax.tree.leaves(nnx.state(norm))
        with pytest.raises(ValueError):
            norm(X, mask=ones(3, 6))
        assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(norm))))


@pytest.mark.parametrize(
    ("equation", "message"), [("ab,bcd->acd", "'bcd'"), ("ab,bc->ac", "label 'b' .*5.*3")]
)
def test_errors_of_einsum_name_the_layer_and_both_shapes(equation, message):
    layer = einsum(equation, (3, 4))
    with pytest.raises(ValueError, match=message) as error:
        layer(ones(2, 5))
    notes = " ".join(error.value.__notes__)
    assert f"'{equation}' of shapes (2, 5) and (3, 4)" in notes and "called by Einsum" in notes


def test_what_is_nearly_wrong_is_not():
    assert nnx.avg_pool(ones(1, 4, 4, 1), (2, 2), padding="same_lower").shape == (1, 4, 4, 1)
    assert nnx.nn.linear.canonicalize_padding(2, rank=2) == [(2, 2), (2, 2)]
    for function in (lambda x, **k: promote_dtype((x,), **k), canonicalize_dtype):
        function(np.arange(2), dtype=jnp.int32, inexact=False)


# Where the layer is --------------------------------------------------------------------------------

RNGS = nnx.Rngs(0)


class Net(nnx.Module):
    """Layers in a list; the last one is called with too many features, by a function."""

    def __init__(self, layer):
        self.blocks = nnx.List([nnx.Identity(), nnx.Sequential(nnx.relu, layer)])
        self.parent = self  # a circle is no obstacle

    def __call__(self, x):
        call = lambda block, x: block(x)
        for block in self.blocks:
            x = call(block, x)
        return x


INPUT = ones(2, 3, 5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nnx.Linear(4, 2, rngs=RNGS), "expects 4 feature"),
        (lambda: nnx.Embed(4, 2, rngs=RNGS), ": Input type must be an integer"),
        (lambda: nnx.Conv(4, 2, (3,), rngs=RNGS), "expects an input of shape"),
        (lambda: nnx.BatchNorm(4, rngs=RNGS), "was made for 4 feature"),
        (lambda: nnx.GroupNorm(4, 2, rngs=RNGS), "was made for 4 feature"),
        (lambda: nnx.MultiHeadAttention(2, 4, decode=False, rngs=RNGS), ": Incompatible input dim"),
        (lambda: nnx.MultiHeadAttention(1, 5, decode=True, rngs=RNGS), ": Autoregressive cache"),
        (lambda: nnx.Dropout(0.5), ": `deterministic` is False, but no `rngs`"),
        (lambda: nnx.Dropout(0.5, deterministic=None), ": No `deterministic` argument was"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_path_of_a_layer(make, message):
    layer = make()
    where = rf"{type(layer).__name__} at `blocks\.1\.layers\.1` of Net"
    for call in (Net.__call__, nnx.jit(Net.__call__)):
        with pytest.raises((TypeError, ValueError), match=f"^{where} ?{message}"):
            call(Net(layer), INPUT)


def test_the_model_is_the_outermost_object():
    layer = nnx.Linear(4, 2, rngs=RNGS)
    with pytest.raises(TypeError, match=r"^Linear expects"):
        layer(INPUT)
    with pytest.raises(TypeError, match=r"^Linear at `layers\.1\.blocks\.1\.layers\.1` of Sequent"):
        nnx.Sequential(nnx.Identity(), Net(layer))(INPUT)


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (nnx.RNN(nnx.GRUCell(4, 2, rngs=RNGS)), {}, "^Linear at `dense_i` of GRUCell expects 4"),
        (
            nnx.MultiHeadAttention(1, 5, decode=False, rngs=RNGS),
            {"mask": jnp.ones((2, 1, 3, 4), bool)},
            r"a mask of shape \(2, 1, 3, 4\), which does not broadcast",
        ),
    ],
    ids=["RNN", "MultiHeadAttention"],
)
def test_errors_of_what_a_layer_calls_name_the_layer_too(layer, options, message):
    def run(model):
        return model.inner(INPUT, **options)

    with pytest.raises((TypeError, ValueError), match=message) as caught:
        nnx.jit(run)(nnx.Dict(inner=layer))
    where = f"This was called by {type(layer).__name__} at `inner` of Dict."
    assert where in caught.value.__notes__


def draws(name):
    """Whether a layer needs random streams."""
    rngs = inspect.signature(getattr(nnx, name.split(",")[0])).parameters.get("rngs")
    return rngs is not None and rngs.default is inspect.Parameter.empty


@pytest.mark.parametrize("name", [*filter(draws, LAYERS)])
def test_a_number_or_key_in_place_of_streams(name):
    """The class of the error is that of Python, where something without streams is asked for one."""
    message = r"^\w+: `rngs` must be an Rngs, such as rngs=nnx\.Rngs\(0\); got "
    for given in (0, jax.random.key(0), None):
        with pytest.raises(AttributeError, match=message):
            LAYERS[name].make(given)
