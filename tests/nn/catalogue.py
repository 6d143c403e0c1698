"""Every layer in many settings, a row each: how it is made and called, and what it computes.

A new layer needs one row, with `everywhere=True`: `LAYERS` has these rows, each layer once, and they go
through every transform, into an exported program, and beside the reference. They are small, and most map
an array of shape (2, 3, 4) to one of the same shape, so that they can be stacked. `FAMILIES` has all
rows; those with a formula are compared with it, in values, gradients, dtypes and unusual batches.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import nnxlite as nnx
from tests.nn import formulas
from tests.nn.quick import QUICK, quick
from tests.nn.rows import Layer, X, at, function, of

# Linear maps and what is made of them --------------------------------------------------------


def affine(p, x):
    return x @ p["kernel"] + p.get("bias", 0)


EINSUMS = [
    # equation, kernel, bias, input, shape of the bias in the output
    ("btf,fg->btg", (4, 4), (4,), (2, 3, 4), (1, 1, 4)),
    ("nta,hab->nthb", (3, 4, 5), (3, 5), (2, 6, 4), (1, 1, 3, 5)),
    ("nta,hab->nbth", (3, 4, 5), (5, 3), (2, 6, 4), (1, 5, 1, 3)),
    ("...a,ab->...b", (4, 5), (5,), (2, 3, 4), (5,)),
    ("a...,ab->b...", (4, 5), (5,), (4, 2, 3), (5, 1, 1)),
    ("ab,...b->a...", (3, 2, 4), (3, 2), (5, 4), (1, 3, 2)),
    ("bij,ji->b", (3, 2), None, (5, 2, 3), ()),
    ("be,he->bhe", (4, 3), None, (5, 3), ()),
    ("...a,...ab->...b", (2, 3, 4), None, (2, 3), ()),
]


def lora_linear(rngs, lib=nnx, **types):
    more = {f"lora_{name}": dtype for name, dtype in types.items()}
    inits = {"kernel_init": quick, "bias_init": quick}
    return of("LoRALinear", 4, 4, lora_rank=2, **inits)(rngs, lib, **types, **more)


def lora(rngs, lib=nnx, **types):
    base = of("Linear", 4, 4)(rngs, lib, **types)
    return of("LoRA", 4, 2, 4, base_module=base)(rngs, lib, **types)


def sequential(rngs, lib=nnx):
    linear = of("Linear", 4, 4)(rngs, lib)
    return lib.Sequential(linear, lib.gelu, lib.Dropout(0.3, rngs=rngs), linear)  # one layer twice


def mlp(p, x):
    layers = sorted({path.rpartition(".")[0] for path in p})
    for layer in layers:
        x = affine(at(p, f"{layer}."), x)
        x = x if layer == layers[-1] else np.tanh(x)
    return x


def linear():
    row = functools.partial(Layer, unbatched=True)
    everywhere = functools.partial(row, everywhere=True)
    rows = {
        "Linear": everywhere(of("Linear", 4, 4), X, affine),
        "Linear, without bias": row(of("Linear", 4, 3, use_bias=False), X, affine),
        "LinearGeneral": everywhere(
            of("LinearGeneral", (3, 4), (3, 4), axis=(-2, -1)),
            X,
            lambda p, x: np.tensordot(x, p["kernel"], 2) + p["bias"],
        ),
        "LinearGeneral, an inner axis": Layer(
            of("LinearGeneral", (2, 4), 3, axis=(1, 3)),
            ((5, 2, 3, 4),),
            lambda p, x: np.einsum("bicj,ijk->bck", x, p["kernel"]) + p["bias"],
        ),
        "LinearGeneral, batch axis": Layer(
            of("LinearGeneral", (3, 2), (4, 5), axis=(1, 3), batch_axis={0: 6}),
            ((6, 3, 7, 2),),
            lambda p, x: np.einsum("bixj,bijkl->bxkl", x, p["kernel"]) + p["bias"][:, None],
            batched=False,
        ),
        "Embed": everywhere(
            of("Embed", 4, 4), (np.array([[0, 2, -1], [3, 3, -4]]),),
            lambda p, x: p["embedding"][x], half=1,
        ),
        "Embed, attend": row(
            of("Embed", 6, 3), ((5, 3),), lambda p, x: x @ p["embedding"].T,
            lambda layer, x: layer.attend(x),
        ),
        "LoRA": everywhere(
            lora, X, lambda p, x: x @ p["lora_a"] @ p["lora_b"] + affine(at(p, "base_module."), x),
            half=6,
        ),
        "LoRALinear": everywhere(
            lora_linear, X, lambda p, x: x @ p["lora.lora_a"] @ p["lora.lora_b"] + affine(p, x),
            half=6,
        ),
        "PReLU": everywhere(
            of("PReLU", 0.2), X, lambda p, x: np.where(x >= 0, x, p["negative_slope"] * x)
        ),
        "MLP": everywhere(
            of("MLP", 4, 4, 4, 1, activation=nnx.tanh, **QUICK), X, mlp, half=8
        ),
        "Identity": everywhere(of("Identity"), X, lambda p, x: x, types=False),
        "Sequential": Layer(sequential, everywhere=True),
        "Dropout": Layer(of("Dropout", 0.5), everywhere=True),
    }  # fmt: skip
    for ins, outs in ((1, 1), (0, 2), (2, 0)):
        rows[f"Linear, {ins} to {outs}"] = row(of("Linear", ins, outs), ((5, ins),), affine)
    for i, (equation, kernel, bias, shape, full) in enumerate(EINSUMS):
        rows[f"Einsum{f', {equation}' if i else ''}"] = Layer(
            of("Einsum", equation, kernel, bias),
            (shape,),
            lambda p, x, e=equation, full=full: (
                np.einsum(e, x, p["kernel"]) + p.get("bias", np.zeros(full)).reshape(full)
            ),
            everywhere=i == 0,
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


def per_axis(value, rank):
    return (value,) * rank if isinstance(value, int) else tuple(value)


def convolutions():
    def conv(strides=(1,), padding="SAME", inner=(1,), dilation=(1,), groups=1, mask=1.0):
        return lambda p, x: formulas.conv(
            x, p["kernel"] * mask, p["bias"], strides, padding, inner, dilation, groups
        )

    row = functools.partial(Layer, unbatched=True, half=8)
    mask = np.random.default_rng(0).random((3, 2, 4)) < 0.5
    rows = {
        "Conv": row(
            of("Conv", 4, 4, (3,), feature_group_count=2), X, conv(groups=2), everywhere=True
        ),
        "Conv, mask": row(
            of("Conv", 2, 4, 3, mask=jnp.asarray(mask)), ((2, 5, 2),), conv(mask=mask)
        ),
        "ConvTranspose": row(
            of("ConvTranspose", 4, 4, (2,)),
            X,
            lambda p, x: formulas.conv_transpose(
                x, p["kernel"], p["bias"], (1,), "SAME", (1,), False
            ),
            everywhere=True,
        ),
    }
    for padding in ("CIRCULAR", "REFLECT"):  # further than the input reaches
        make = of("Conv", 2, 3, (3,), kernel_dilation=4, padding=padding)
        formula = conv(padding=padding, dilation=(4,))
        rows[f"Conv, a short input, {padding}"] = row(make, ((2, 3, 2),), formula)
    for setting in CONVOLUTIONS:
        rank, strides, padding, inner, dilation, groups = setting
        sizes = (per_axis(n, rank) for n in (inner, dilation))
        dilations = {"input_dilation": inner, "kernel_dilation": dilation}
        rows[f"Conv, {setting}"] = row(
            of("Conv", 4, 8, KERNELS[rank], strides, padding=padding, feature_group_count=groups,
               **dilations),
            ((2, *SPATIAL[rank], 4),),
            conv(per_axis(strides, rank), padding, *sizes, groups),
        )  # fmt: skip
    for setting in TRANSPOSED:
        rank, strides, padding, dilation, flipped = setting
        options = (per_axis(strides, rank), padding, per_axis(dilation, rank), flipped)
        rows[f"ConvTranspose, {setting}"] = row(
            of("ConvTranspose", 4, 2, KERNELS[rank], strides, padding=padding,
               kernel_dilation=dilation, transpose_kernel=flipped),
            ((2, *SPATIAL[rank], 4),),
            lambda p, x, o=options: formulas.conv_transpose(x, p["kernel"], p["bias"], *o),
        )  # fmt: skip
    return rows


def pools():
    rows = {}
    kinds = [("avg", True), ("avg", False), ("max", True), ("min", True)]
    for (kind, counts), setting in itertools.product(kinds, POOLS):
        rank, window, strides, padding = setting
        options = {"count_include_pad": counts} if kind == "avg" else {}
        rows[f"{kind}_pool, {setting} {counts}"] = function(
            functools.partial(
                getattr(nnx, f"{kind}_pool"),
                window_shape=window, strides=strides, padding=padding, **options,
            ),
            ((2, *SPATIAL[rank], 2),),
            lambda p, x, k=kind, w=window, s=strides, pad=padding, c=counts: formulas.pool(
                x, k, w, s or (1,) * len(w), pad, c
            ),
            unbatched=True,
            half=2,
        )  # fmt: skip
    return rows


# Normalisation -------------------------------------------------------------------------------

TWO_AXES = {"reduction_axes": (-2, -1), "feature_axes": (-2, -1)}
NORMS = [
    # name, arguments, options, axes of the moments, axes of scale and bias
    ("LayerNorm", (4,), {}, (-1,), (-1,)),
    ("LayerNorm", (12,), TWO_AXES, (-2, -1), (-2, -1)),
    ("RMSNorm", (4,), {}, (-1,), (-1,)),
    ("InstanceNorm", (4,), {}, (1,), (-1,)),
    ("GroupNorm", (4, 2), {}, None, (-1,)),
    ("GroupNorm", (4, 4), {}, None, (-1,)),
    ("GroupNorm", (4, 2), {"reduction_axes": (-1,)}, None, (-1,)),
    ("BatchNorm", (4,), {}, (0, 1), (-1,)),
    ("BatchNorm", (3,), {"axis": 1}, (0, 2), (-2,)),
]


def with_averages(p, x):
    return (x - p["mean"]) / np.sqrt(p["var"] + 1e-5) * p["scale"] + p["bias"]


def by_norm(name, args, options, axes, features, epsilon, mask):
    def formula(p, x):
        if name == "GroupNorm":
            along = mask, options.get("reduction_axes")
            return formulas.group_norm(x, args[1], epsilon, p["scale"], p["bias"], *along)
        parameters = p["scale"], p.get("bias")
        return formulas.norm(x, axes, epsilon, *parameters, features, mask, name != "RMSNorm")

    return formula


def norms():
    mask = np.random.default_rng(0).random((2, 3, 4)) < 0.6
    mask[0] |= ~mask[0].any()
    padding = np.ones((2, 3, 1), bool)
    padding[1] = False  # an example without any element
    averages = of("BatchNorm", 4, use_running_average=True)
    rows = {
        "BatchNorm, with averages": Layer(
            averages, X, with_averages, unbatched=True, half=6, wide="half"
        )
    }
    for kind, fast, keep in itertools.product(NORMS, (True, False), (None, mask, padding)):
        name, args, options, *_ = kind
        # Of two elements of similar size the default would magnify every error a thousandfold.
        epsilon = 1e-5 if keep is None else 1e-2
        masked = {} if keep is None else {"mask": keep}
        setting = [*args[1:], *options.items(), *(f"mask {mask.shape}" for mask in masked.values())]
        setting += [] if fast else ["two passes"]
        first = setting in ([], [2])
        rows[name if first else f"{name}, {setting}"] = Layer(
            of(name, *args, **options, use_fast_variance=fast, epsilon=epsilon),
            X,
            by_norm(*kind, epsilon, keep),
            lambda layer, x, masked=masked: layer(x, **masked),
            everywhere=first,
            batched=keep is None and name != "BatchNorm",
            unbatched=keep is None and name in ("LayerNorm", "RMSNorm"),
            stateless=name != "BatchNorm",
            half=6,
            wide="half" if name == "BatchNorm" else "",
        )
    ones = nnx.initializers.ones  # the reference gives others no key
    for feature_axes, axes in ((-1, (0,)), (None, (0, 1)), (0, (1,)), ((0, 1), ())):
        rows[f"WeightNorm{f', {feature_axes}' if feature_axes != -1 else ''}"] = Layer(
            functools.partial(wrapped, "WeightNorm", feature_axes=feature_axes, scale_init=ones),
            X,
            lambda p, x, axes=axes: by_weight_norm(p, x, axes),
            everywhere=feature_axes == -1,
            stateless=False,
            half=8,
        )
    rows["SpectralNorm, many steps"] = Layer(
        # The estimates are in the dtype of the parameters; many steps make them exact.
        functools.partial(wrapped, "SpectralNorm", n_steps=200),
        X,
        lambda p, x: x @ unit_matrix(p["layer_instance.kernel"]) + p["layer_instance.bias"],
        stateless=False,
        smooth=False,  # singular vectors count as constants
        half=8,
    )
    a_step = functools.partial(wrapped, "SpectralNorm")
    rows["SpectralNorm"] = Layer(a_step, everywhere=True, smooth=False)
    return rows


def wrapped(name, rngs, lib=nnx, **options):
    types = {k: options[k] for k in ("dtype", "param_dtype") if k in options}
    return of(name, of("Linear", 4, 4)(rngs, lib, **types), **options)(rngs, lib)


def unit_matrix(kernel):
    return kernel / np.linalg.svd(kernel)[1][0]


def by_weight_norm(p, x, axes):
    kernel = p["layer_instance.kernel"]
    kernel = kernel / np.sqrt((kernel**2).sum(axes, keepdims=True) + 1e-12)
    scale = next(v for path, v in p.items() if path.startswith("scales"))
    shape = [1 if axis in axes else n for axis, n in enumerate(kernel.shape)]
    return x @ (kernel * scale.reshape(shape)) + p["layer_instance.bias"]


# Attention -----------------------------------------------------------------------------------


def multi(*args, **options):
    """A maker of a layer without dropout."""
    return of("MultiHeadAttention", *args, **{"decode": False, **options})


def decoding(rngs, lib=nnx, **types):
    layer = multi(2, 4, decode=True)(rngs, lib, **types)
    layer.init_cache((2, 3, 4))
    return layer


def decoded(layer, x, sizes):
    """All positions by way of a cache, so many at a time."""
    layer = nnx.clone(layer)
    layer.init_cache(x.shape, x.dtype)
    parts = jnp.split(x, np.cumsum(sizes)[:-1], axis=1)
    return jnp.concatenate([layer(part, decode=True) for part in parts], axis=1)


def attention():
    rng = np.random.default_rng(0)
    shapes = {
        "equal heads": ((2, 3, 2, 4), (2, 5, 2, 4), (2, 5, 2, 4)),
        "grouped": ((2, 3, 4, 4), (2, 5, 2, 4), (2, 5, 2, 4)),
        "one key head, other depth": ((2, 3, 2, 4), (2, 5, 1, 4), (2, 5, 1, 3)),
    }
    mask = rng.random((2, 1, 3, 5)) < 0.6
    mask[0, 0, 1] = False  # a query without keys
    infinite = np.where(mask, rng.normal(size=(2, 1, 3, 5)), -np.inf)
    variants = {
        "": {},
        "mask": {"mask": mask},
        "mask for all": {"mask": mask[1, 0]},
        "bias": {"bias": rng.normal(size=(1, 3, 5))},
        "bias of -inf": {"bias": infinite},
        "bias, mask, causal": {"bias": rng.normal(size=(3, 5)), "mask": mask, "is_causal": True},
        "causal": {"is_causal": True},
    }
    fused, explicit = {}, {"dropout_rate": 0.5, "deterministic": True}
    rows = {}
    for (shape, inputs), (variant, options), how in itertools.product(
        shapes.items(), variants.items(), (fused, explicit)
    ):

        def attend(query, key, value, options=options, how=how):
            options = dict(options)
            if "bias" in options:
                options["bias"] = jnp.asarray(options["bias"], query.dtype)
            return nnx.dot_product_attention(query, key, value, **options, **how)

        rows[f"dot_product_attention, {shape} {variant} {'explicit' if how else ''}"] = function(
            attend,
            inputs,
            lambda p, *qkv, options=options: formulas.attention(*qkv, **options),
            batched=False,
            half=8,
        )  # fmt: skip
    causal = lambda layer, x: layer(x, is_causal=True)
    attend = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE(theta=100.0))
    rotating = multi(2, 8, attention_fn=attend)
    rotated = lambda p, x: formulas.multi_head(p, x, causal=True, theta=100.0)
    row = functools.partial(Layer, half=16)
    rows |= {
        "MultiHeadAttention": Layer(
            multi(2, 4, dropout_rate=0.3, deterministic=False, normalize_qk=True, num_kv_heads=1),
            everywhere=True,
        ),
        "MultiHeadAttention, decoding": Layer(decoding, ((2, 1, 4),), everywhere=True),
        "MultiHeadAttention, recording weights": Layer(
            multi(2, 4), run=lambda layer, x: layer(x, sow_weights=True), everywhere=True
        ),
        "MultiHeadAttention, plain": row(multi(2, 4), X, formulas.multi_head, unbatched=True),
        "MultiHeadAttention, causal, grouped": row(
            multi(4, 4, qkv_features=8, out_features=3, num_kv_heads=2), X,
            lambda p, x: formulas.multi_head(p, x, causal=True), causal, unbatched=True,
        ),
        "MultiHeadAttention, cross, without bias, normalized": row(
            multi(2, 4, 8, in_kv_features=3, use_bias=False, normalize_qk=True),
            ((2, 3, 4), (2, 5, 3)), formulas.multi_head, batched=False,
        ),
        "MultiHeadAttention, RoPE": row(
            rotating, ((2, 4, 8),), rotated, causal, unbatched=True, wide="half"
        ),
        "RoPE, positions": function(
            lambda x: nnx.RoPE(50.0)(x, jnp.asarray(POSITIONS)), ((2, 5, 6),),
            lambda p, x: formulas.rope(x, 50.0, POSITIONS), batched=False, wide="half",
        ),
    }  # fmt: skip
    for sizes in ((1, 1, 1, 1), (3, 1)):
        rows[f"MultiHeadAttention, decoding {sizes}"] = row(
            rotating, ((2, 4, 8),), rotated, lambda layer, x, s=sizes: decoded(layer, x, s),
            wide="half",
        )  # fmt: skip
    for name, args in {"RoPE": (4, 3), "RoPE, without sizes": ()}.items():
        rows[name] = Layer(
            of("RoPE", 50.0, *args), X, lambda p, x: formulas.rope(x, 50.0, np.arange(3)),
            everywhere=bool(args), unbatched=True, types=False, wide="half",
        )  # fmt: skip
    return rows


POSITIONS = np.array([[3, 0, 9, 100, 2], [1, 1, 1, 1, 1]])


# Recurrence ----------------------------------------------------------------------------------

CELLS = {
    "SimpleCell": (formulas.simple_step, 1),
    "LSTMCell": (formulas.lstm_step, 2),
    "OptimizedLSTMCell": (formulas.lstm_step, 2),
    "GRUCell": (formulas.gru_step, 1),
}


def joined(tree):
    """The arrays of a tree, one after the other."""
    lib = np if isinstance(jax.tree.leaves(tree)[0], np.ndarray) else jnp
    return lib.concatenate(jax.tree.leaves(tree), -1)


def rnn(name, **options):
    """A maker of a network of one kind of cell."""
    cell = of(name, 4, 4)
    return lambda rngs, lib=nnx, **types: lib.RNN(cell(rngs, lib, **types), **options)


def by_rnn(name, prefix="", **options):
    """The formula of such a network: outputs, and the last carry."""
    step, parts = CELLS[name]

    def formula(p, x):
        zeros = tuple(np.zeros((len(x), 4)) for _ in range(parts))
        start = zeros if parts > 1 else zeros[0]
        cell = functools.partial(step, at(p, f"{prefix}cell."))
        return formulas.rnn(cell, start, x, **options)

    return formula


def bidirectional(rngs, lib=nnx, **types):
    return lib.Bidirectional(
        rnn("LSTMCell")(rngs, lib, **types), rnn("SimpleCell")(rngs, lib, **types)
    )


def by_both(p, x):
    forward = by_rnn("LSTMCell", "forward_rnn.")(p, x)[0]
    backward = by_rnn("SimpleCell", "backward_rnn.", reverse=True, keep_order=True)(p, x)[0]
    return np.concatenate([forward, backward], -1)


def recurrence():
    rows = {
        "Bidirectional": Layer(
            bidirectional, X, by_both, everywhere=True, half=24, wide="half mixed"
        )
    }
    lengths = np.array([3, 1, 0])
    for name, (step, parts) in CELLS.items():
        simple = "half" if name == "SimpleCell" else ""  # which has a dtype of its own
        carry = lambda x, parts=parts: (x, x) if parts > 1 else x
        rows[name] = Layer(
            of(name, 4, 4),
            X,
            lambda p, x, step=step, carry=carry: joined(step(p, carry(x), x)),
            lambda cell, x, carry=carry: joined(cell(carry(x), x)),
            everywhere=True,
            unbatched=True,
            half=12,
            wide=simple,
        )
        for reverse, keep in ((False, False), (True, False), (True, True)):
            options = {"reverse": reverse, "keep_order": keep}
            formula = by_rnn(name, **options)
            first = name == "GRUCell" and not reverse
            rows["RNN" if first else f"RNN, {name} {options}"] = Layer(
                rnn(name, **options),
                X,
                lambda *args, formula=formula: formula(*args)[0],
                everywhere=first,
                half=24,
                wide=simple or "mixed",
            )
        formula = by_rnn(name, lengths=lengths, reverse=True)
        rows[f"RNN, {name}, carry at lengths, reversed"] = Layer(
            rnn(name, reverse=True),
            ((3, 3, 4),),
            lambda *args, formula=formula: joined(formula(*args)[1]),
            lambda rnn, x: joined(rnn(x, seq_lengths=lengths, return_carry=True)[0]),
            batched=False,
            half=24,
            wide="mixed",  # in the dtype of the parameters
        )
    return rows


FAMILIES = {
    make.__name__: make() for make in (linear, convolutions, pools, norms, attention, recurrence)
}
LAYERS = {name: row for rows in FAMILIES.values() for name, row in rows.items() if row.everywhere}
