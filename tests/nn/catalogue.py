"""Every layer in many settings, a row each: how it is made and called.

A new layer needs one row, with `everywhere=True`: `LAYERS` has these rows, each layer once, and they go
through every transform, into an exported program and a file, and meet replaced functions of JAX. They
are small, and most map an array of shape (2, 3, 4) to one of the same shape, so that they can be
stacked. `FAMILIES` has all rows: values in each dtype are those of the reference, which is asked unless
a row says `peer=False`; gradients are the limits of differences; batches may have any shape.
"""

import functools
import inspect
import itertools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

import nnxlite as nnx
from tests.nn.quick import QUICK, quick

X = ((2, 3, 4),)


def call(layer, *inputs):
    """A plain call."""
    return layer(*inputs)


class Layer(tp.NamedTuple):
    """A layer in one setting.

    Attributes:
        make: makes it from streams, for a `lib`; also takes `param_dtype` and `dtype` if it has `types`.
        inputs: shapes of floating inputs, or arrays of anything else.
        run: how the layer is called.
        everywhere: whether it is in `LAYERS`; then it has one input.
        peer: whether the reference gives the same values.
        batched: whether the first axis of the first input is a batch of independent examples.
        unbatched: whether the layer takes an example without that axis.
        smooth: whether gradients are those of the function: a layer may take a part for constant.
        stateless: whether a call leaves the layer as it was.
        types: whether the layer has dtypes.
    """

    make: tp.Callable[..., tp.Any]
    inputs: tuple[tp.Any, ...] = X
    run: tp.Callable[..., tp.Any] = call
    everywhere: bool = False
    peer: bool = True
    batched: bool = True
    unbatched: bool = False
    smooth: bool = True
    stateless: bool = True
    types: bool = True

    @property
    def x(self):
        """The input of a row that has one."""
        (x,) = self.arrays("float32")
        return x

    def arrays(self, dtype):
        """The inputs."""
        rng = np.random.default_rng(0)
        return tuple(
            jnp.asarray(rng.normal(size=x), dtype) if isinstance(x, tuple) else jnp.asarray(x)
            for x in self.inputs
        )

    def made(self, lib=nnx, **dtypes):
        """The layer, with random parameters and statistics."""
        layer = self.make(lib.Rngs(0), lib, **(dtypes if self.types else {}))
        rng = np.random.default_rng(0)
        for path, variable in lib.to_flat_state(lib.state(layer)):
            if not isinstance(variable, (lib.Param, lib.BatchStat)):
                continue
            value = rng.uniform(-0.7, 0.7, variable.shape)
            if path[-1] in ("scale", "var"):
                value = value + 1.2
            elif path[-1] == "sigma":
                value = np.ones(())
            if value.size:
                variable.set_value(jnp.asarray(value, variable.dtype))
        return layer


INITS = (
    *("kernel_init", "bias_init", "recurrent_kernel_init", "embedding_init", "scale_init"),
    *("a_initializer", "b_initializer"),
)


def of(name, *args, **options):
    """A maker of a layer with quick initializers."""
    known = inspect.signature(getattr(nnx, name)).parameters
    options = {**{init: quick for init in INITS if init in known}, **options}

    def make(rngs, lib=nnx, **types):
        streams = {"rngs": rngs} if "rngs" in known else {}
        return getattr(lib, name)(*args, **options, **types, **streams)

    return make


def function(name, inputs, *args, **options):
    """A row of a function, which is the one layer of a Sequential."""

    def make(rngs, lib=nnx):
        return lib.Sequential(functools.partial(getattr(lib, name), *args, **options))

    return Layer(make, inputs, types=False, unbatched=True)


# Linear maps and what is made of them --------------------------------------------------------

EINSUMS = [
    # equation, kernel, bias, input
    ("btf,fg->btg", (4, 4), (4,), (2, 3, 4)),
    ("nta,hab->nthb", (3, 4, 5), (3, 5), (2, 6, 4)),
    ("nta,hab->nbth", (3, 4, 5), (5, 3), (2, 6, 4)),
    ("...a,ab->...b", (4, 5), (5,), (2, 3, 4)),
    ("a...,ab->b...", (4, 5), (5,), (4, 2, 3)),
    ("ab,...b->a...", (3, 2, 4), (3, 2), (5, 4)),
    ("bij,ji->b", (3, 2), None, (5, 2, 3)),
    ("...a,...ab->...b", (2, 3, 4), None, (2, 3)),
]


def lora_linear(rngs, lib=nnx, **types):
    more = {f"lora_{name}": dtype for name, dtype in types.items()}
    return of("LoRALinear", 4, 4, lora_rank=2, **QUICK)(rngs, lib, **types, **more)


def lora(rngs, lib=nnx, **types):
    base = of("Linear", 4, 4)(rngs, lib, **types)
    return of("LoRA", 4, 2, 4, base_module=base)(rngs, lib, **types)


def sequential(rngs, lib=nnx, **types):
    linear = of("Linear", 4, 4)(rngs, lib, **types)
    return lib.Sequential(linear, lib.gelu, lib.Dropout(0.3, rngs=rngs), linear)  # one layer twice


def linear():
    row = functools.partial(Layer, unbatched=True)
    everywhere = functools.partial(row, everywhere=True)
    general = functools.partial(of, "LinearGeneral")
    random = functools.partial(Layer, everywhere=True, batched=False, stateless=False)
    rows = {
        "Linear": everywhere(of("Linear", 4, 4)),
        "Linear, without bias": row(of("Linear", 4, 3, use_bias=False)),
        "LinearGeneral": everywhere(general((3, 4), (3, 4), axis=(-2, -1))),
        "LinearGeneral, an inner axis": Layer(general((2, 4), 3, axis=(1, 3)), ((5, 2, 3, 4),)),
        "LinearGeneral, batch axis": Layer(
            general((3, 2), (4, 5), axis=(1, 3), batch_axis={0: 6}), ((6, 3, 7, 2),), batched=False
        ),
        "Embed": everywhere(of("Embed", 4, 4), (np.array([[0, 2, -1], [3, 3, -4]]),)),
        "Embed, attend": row(of("Embed", 6, 3), ((5, 3),), lambda layer, x: layer.attend(x)),
        "LoRA": everywhere(lora),
        "LoRALinear": everywhere(lora_linear),
        "PReLU": everywhere(of("PReLU", 0.2)),
        "MLP": everywhere(of("MLP", 4, 4, 4, 1, activation=nnx.tanh, **QUICK), peer=False),
        "Identity": everywhere(of("Identity"), types=False, peer=False),
        "Sequential": random(sequential),
        "Dropout": random(of("Dropout", 0.5), types=False),
    }
    for ins, outs in ((1, 1), (0, 2), (2, 0)):
        rows[f"Linear, {ins} to {outs}"] = row(of("Linear", ins, outs), ((5, ins),))
    for equation, kernel, bias, shape in EINSUMS:
        first = equation == EINSUMS[0][0]
        rows["Einsum" if first else f"Einsum, {equation}"] = Layer(
            of("Einsum", equation, kernel, bias),
            (shape,),
            everywhere=first,
            batched=not equation.startswith(("a", "...a,...")),
            unbatched=equation == "...a,ab->...b",
        )
    return rows


# Convolutions and pools ----------------------------------------------------------------------

SPATIAL = {1: (7,), 2: (5, 4), 3: (3, 2, 3)}
KERNELS = {1: (3,), 2: (2, 3), 3: (2, 1, 2)}

CONVOLUTIONS = [
    # rank, strides, padding, input dilation, kernel dilation, groups
    (1, 1, "SAME", 1, 1, 1),
    (1, 2, "SAME_LOWER", 1, 2, 2),
    (1, 2, "CAUSAL", 1, 2, 1),
    (1, 1, "CIRCULAR", 1, 3, 1),
    (1, 2, "REFLECT", 1, 1, 2),
    (1, 3, [(2, 1)], 2, 1, 1),
    (2, 1, "CIRCULAR", 1, 1, 2),
    (2, (1, 2), "REFLECT", 1, 1, 1),
    (2, 2, [(1, 2), (0, 3)], (1, 2), 1, 2),
    (3, (1, 2, 1), "VALID", 1, 1, 1),
]
TRANSPOSED = [
    # rank, strides, padding, dilation, whether the kernel is flipped
    (1, 2, "SAME", 1, True),
    (1, 3, "VALID", 2, False),
    (1, 2, "CIRCULAR", 1, True),
    (1, 3, "CIRCULAR", 1, False),
    (1, 2, [(1, 2)], 1, False),
    (2, (2, 1), "SAME", 1, False),
    (2, 2, "CIRCULAR", (1, 2), False),
    (3, 2, "SAME", 1, False),
]
POOLS = [
    # rank, window, strides, padding
    (1, (2,), None, "VALID"),
    (1, (3,), (2,), "SAME"),
    (2, (2, 3), (2, 1), "SAME"),
    (2, (2, 2), (1, 2), ((1, 0), (0, 1))),
    (3, (2, 2, 1), (1, 1, 2), "VALID"),
]


def convolutions():
    row = functools.partial(Layer, unbatched=True)
    mask = jnp.asarray(np.random.default_rng(0).random((3, 2, 4)) < 0.5)
    rows = {
        "Conv": row(of("Conv", 4, 4, (3,), feature_group_count=2), everywhere=True),
        "Conv, mask": row(of("Conv", 2, 4, 3, mask=mask), ((2, 5, 2),)),
        "ConvTranspose": row(of("ConvTranspose", 4, 4, (2,)), everywhere=True),
    }
    for padding in ("CIRCULAR", "REFLECT"):  # further than the input reaches
        make = of("Conv", 2, 3, (3,), kernel_dilation=4, padding=padding)
        rows[f"Conv, a short input, {padding}"] = row(make, ((2, 3, 2),))
    for setting in CONVOLUTIONS:
        rank, strides, padding, inner, dilation, groups = setting
        options = {"padding": padding, "input_dilation": inner, "kernel_dilation": dilation}
        make = of("Conv", 4, 8, KERNELS[rank], strides, feature_group_count=groups, **options)
        rows[f"Conv, {setting}"] = row(make, ((2, *SPATIAL[rank], 4),))
    for setting in TRANSPOSED:
        rank, strides, padding, dilation, flipped = setting
        options = {"padding": padding, "kernel_dilation": dilation, "transpose_kernel": flipped}
        make = of("ConvTranspose", 4, 2, KERNELS[rank], strides, **options)
        rows[f"ConvTranspose, {setting}"] = row(make, ((2, *SPATIAL[rank], 4),))
    return rows


def pools():
    rows = {}
    kinds = [("avg", True), ("avg", False), ("max", True), ("min", True)]
    for (kind, counts), (rank, *setting) in itertools.product(kinds, POOLS):
        options = dict(zip(("window_shape", "strides", "padding"), setting))
        options |= {} if counts else {"count_include_pad": False}
        row = function(f"{kind}_pool", ((2, *SPATIAL[rank], 2),), **options)
        rows[f"{kind}_pool, {rank} {setting} {counts}"] = row
    return rows


# Normalisation -------------------------------------------------------------------------------

TWO_AXES = {"reduction_axes": (-2, -1), "feature_axes": (-2, -1)}
NORMS = [
    # name, arguments, options
    ("LayerNorm", (4,), {}),
    ("LayerNorm", (12,), TWO_AXES),
    ("RMSNorm", (4,), {}),
    ("InstanceNorm", (4,), {}),
    ("GroupNorm", (4, 2), {}),
    ("GroupNorm", (4, 4), {}),
    ("GroupNorm", (4, 2), {"reduction_axes": (-1,)}),
    ("BatchNorm", (4,), {}),
    ("BatchNorm", (3,), {"axis": 1}),
]


def wrapped(name, rngs, lib=nnx, **options):
    types = {k: options[k] for k in ("dtype", "param_dtype") if k in options}
    return of(name, of("Linear", 4, 4)(rngs, lib, **types), **options)(rngs, lib)


def norms():
    mask = np.random.default_rng(0).random((2, 3, 4)) < 0.6
    mask[..., 0] = True  # of nothing, the reference gives NaN
    averages = of("BatchNorm", 4, use_running_average=True)
    rows = {"BatchNorm, with averages": Layer(averages, unbatched=True)}
    for kind, fast, keep in itertools.product(NORMS, (True, False), (None, mask)):
        name, args, options = kind
        # Of two elements of similar size the default would magnify every error a thousandfold.
        epsilon = 1e-5 if keep is None else 1e-2
        setting = [*args[1:], *options.items()]
        setting += ([] if keep is None else ["mask"]) + ([] if fast else ["two passes"])
        first = setting in ([], [2])
        rows[name if first else f"{name}, {setting}"] = Layer(
            of(name, *args, **options, use_fast_variance=fast, epsilon=epsilon),
            run=functools.partial(masked, keep),
            everywhere=first,
            peer="reduction_axes" not in options or name != "GroupNorm",
            batched=keep is None and name != "BatchNorm",
            unbatched=keep is None and name in ("LayerNorm", "RMSNorm"),
            stateless=name != "BatchNorm",
        )
    ones = nnx.initializers.ones  # the reference gives others no key
    for feature_axes in (-1, None, 0, (0, 1)):
        rows[f"WeightNorm{f', {feature_axes}' if feature_axes != -1 else ''}"] = Layer(
            functools.partial(wrapped, "WeightNorm", feature_axes=feature_axes, scale_init=ones),
            everywhere=feature_axes == -1,
            stateless=False,
        )
    spectral = functools.partial(wrapped, "SpectralNorm")
    rows["SpectralNorm"] = Layer(spectral, everywhere=True, smooth=False, stateless=False)
    return rows


def masked(mask, layer, x):
    return layer(x) if mask is None else layer(x, mask=mask)


# Attention -----------------------------------------------------------------------------------


def multi(*args, **options):
    """A maker of a layer without dropout."""
    return of("MultiHeadAttention", *args, **{"decode": False, **options})


def rotating(rngs, lib=nnx, **types):
    attend = functools.partial(lib.dot_product_attention_with_rope, rope=lib.RoPE(theta=100.0))
    return multi(2, 8, attention_fn=attend)(rngs, lib, **types)


def decoding(rngs, lib=nnx, **types):
    layer = multi(2, 4, decode=True)(rngs, lib, **types)
    layer.init_cache((2, 3, 4))
    return layer


def attention():
    rng = np.random.default_rng(0)
    shapes = {
        "equal heads": ((2, 3, 2, 4), (2, 5, 2, 4), (2, 5, 2, 4)),
        "grouped": ((2, 3, 4, 4), (2, 5, 2, 4), (2, 5, 2, 4)),
        "one key head, other depth": ((2, 3, 2, 4), (2, 5, 1, 4), (2, 5, 1, 3)),
    }
    mask = rng.random((2, 1, 3, 5)) < 0.6
    mask[0, 0, 1] = False  # a query without keys
    none = (1, 1, 1, 1), np.ones((1, 1, 1, 1), bool)
    variants = {
        "plain": (none, {}),
        "mask": ((none[0], mask), {}),
        "bias": (((1, 3, 5), none[1]), {}),
        "bias, mask, causal": (((1, 1, 3, 5), mask), {"is_causal": True}),
    }
    explicit = {"dropout_rate": 0.5, "deterministic": True}
    rows = {}
    for (shape, qkv), (variant, (more, options)) in itertools.product(
        shapes.items(), variants.items()
    ):
        for how in ({}, explicit):
            name = f"dot_product_attention, {shape} {variant} {'explicit' if how else ''}"
            row = function("dot_product_attention", (*qkv, *more), **options, **how)
            is_taken = bool(how) or "other depth" not in shape
            rows[name] = row._replace(batched=False, peer=is_taken)
    causal = lambda layer, x: layer(x, is_causal=True)
    dropping = {"dropout_rate": 0.3, "deterministic": False, "num_kv_heads": 1}
    random = functools.partial(Layer, everywhere=True, batched=False, stateless=False)
    cross = {"in_kv_features": 3, "use_bias": False, "normalize_qk": True}
    grouped = multi(4, 4, qkv_features=8, out_features=3, num_kv_heads=2)
    recording = lambda layer, x: layer(x, sow_weights=True)
    rows |= {
        # Of two features normalisation would leave little more than the sign.
        "MultiHeadAttention": random(multi(2, 4, 8, normalize_qk=True, **dropping)),
        "MultiHeadAttention, decoding": random(decoding, ((2, 1, 4),)),
        "MultiHeadAttention, recording weights": random(multi(2, 4), run=recording),
        "MultiHeadAttention, plain": Layer(multi(2, 4), unbatched=True),
        "MultiHeadAttention, grouped": Layer(grouped, run=causal, unbatched=True),
        "MultiHeadAttention, cross": Layer(
            multi(2, 4, 8, **cross), ((2, 3, 4), (2, 5, 3)), batched=False
        ),
        "MultiHeadAttention, RoPE": Layer(rotating, ((2, 4, 8),), causal, unbatched=True),
        "RoPE": Layer(of("RoPE", 50.0, 4, 3), everywhere=True, unbatched=True, types=False),
        "RoPE, without sizes": Layer(of("RoPE", 50.0), unbatched=True, types=False),
    }
    return rows


# Recurrence ----------------------------------------------------------------------------------

CELLS = {"SimpleCell": 1, "LSTMCell": 2, "OptimizedLSTMCell": 2, "GRUCell": 1}
"""How many arrays each kind of cell carries."""


def joined(tree):
    """The arrays of a tree, one after the other."""
    return jnp.concatenate(jax.tree.leaves(tree), -1)


def rnn(name, rngs, lib=nnx, reverse=False, keep_order=False, **types):
    """A network of one kind of cell."""
    cell = of(name, 4, 4)(rngs, lib, **types)
    return lib.RNN(cell, reverse=reverse, keep_order=keep_order)


def bidirectional(rngs, lib=nnx, **types):
    cells = [rnn(name, rngs, lib, **types) for name in ("LSTMCell", "SimpleCell")]
    return lib.Bidirectional(*cells)


def recurrence():
    rows = {"Bidirectional": Layer(bidirectional, everywhere=True)}
    lengths = np.array([3, 1, 2])
    at_lengths = lambda rnn, x: joined(rnn(x, seq_lengths=lengths, return_carry=True)[0])
    for name, parts in CELLS.items():
        step = lambda cell, x, n=parts: joined(cell((x, x) if n > 1 else x, x))
        rows[name] = Layer(of(name, 4, 4), run=step, everywhere=True, unbatched=True)
        for reverse, keep in ((False, False), (True, False), (True, True)):
            options = {"reverse": reverse, "keep_order": keep}
            first = name == "GRUCell" and not reverse
            rows["RNN" if first else f"RNN, {name} {options}"] = Layer(
                functools.partial(rnn, name, **options), everywhere=first
            )
        make = functools.partial(rnn, name, reverse=True)
        rows[f"RNN, {name}, carry at lengths, reversed"] = Layer(
            make, ((3, 3, 4),), at_lengths, batched=False
        )
    return rows


FAMILIES = {
    make.__name__: make() for make in (linear, convolutions, pools, norms, attention, recurrence)
}
LAYERS = {name: row for rows in FAMILIES.values() for name, row in rows.items() if row.everywhere}
