"""Every layer in many settings: how it is made, called, and what it should compute.

A case makes its layer in any dtypes. `reference` gets the parameters by path, as float64, and the
inputs; what it computes is in `reference.py`.
"""

from __future__ import annotations

import functools
import itertools
import typing as tp
import zlib

import jax
import jax.numpy as jnp
import numpy as np

import nnxlite as nnx
from tests.numerics import reference as ref


class Case(tp.NamedTuple):
    """A layer in one setting.

    Attributes:
        name: of the layer and the setting.
        make: makes it, given the keyword arguments `param_dtype` and `dtype`.
        inputs: shapes of floating inputs, or arrays of anything else.
        reference: the result, of the parameters by path and the inputs.
        call: how the layer is called.
        batched: whether the first axis of the first input is a batch of independent examples.
        unbatched: whether the layer takes an example without that axis.
        smooth: whether the result has a derivative.
        stateless: whether a call leaves the layer as it was.
        half: how many units of rounding of a half dtype the result may be off, where it is of size 1.
        types: whether the layer has dtypes.
    """

    name: str
    make: tp.Callable[..., tp.Any]
    inputs: tuple[tp.Any, ...]
    reference: tp.Callable[..., tp.Any]
    call: tp.Callable[..., tp.Any] = lambda layer, *x: layer(*x)
    batched: bool = True
    unbatched: bool = False
    smooth: bool = True
    stateless: bool = True
    half: float = 4
    types: bool = True


def empty(key, shape, dtype=jnp.float32):
    """An initializer that compiles nothing: `fill` draws all parameters."""
    return jnp.asarray(np.zeros(shape), dtype)


KERNEL = {"kernel_init": empty, "bias_init": empty}
AFFINE = {"scale_init": empty, "bias_init": empty}


def seed_of(name):
    return zlib.crc32(name.encode())


def made(case, seed=0, **dtypes):
    """The layer of a case, with random parameters."""
    layer = case.make(**dtypes)
    rng = np.random.default_rng([seed, seed_of(case.name)])
    for path, variable in sorted(nnx.to_flat_state(nnx.state(layer)), key=lambda p: str(p[0])):
        if isinstance(variable, nnx.Param | nnx.BatchStat) and variable.get_value().size:
            value = rng.uniform(-0.7, 0.7, variable.shape)
            if path[-1] in ("scale", "var"):
                value = value + 1.2
            elif path[-1] == "sigma":
                value = np.ones(())
            variable.set_value(jnp.asarray(value, variable.dtype))
    return layer


def inputs_of(case, seed=0, dtype="float64"):
    rng = np.random.default_rng([seed + 1, seed_of(case.name)])
    return tuple(
        jnp.asarray(rng.normal(size=x), dtype) if isinstance(x, tuple) else jnp.asarray(x)
        for x in case.inputs
    )


def parameters(layer):
    """The values of a layer by path, as float64."""
    return {
        ".".join(map(str, path)): np.asarray(leaf.get_value(), np.float64)
        for path, leaf in nnx.to_flat_state(nnx.state(layer))
        if isinstance(leaf, nnx.Variable) and jnp.issubdtype(leaf.get_value().dtype, jnp.number)
    }


def expected(case, layer, inputs):
    """What the reference computes, before the layer is called."""
    values = (
        np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)
        for x in inputs
    )
    return case.reference(parameters(layer), *values)


# Linear maps ---------------------------------------------------------------------------------


def linear_cases():
    linear = functools.partial(nnx.Linear, 3, 4, **KERNEL, rngs=nnx.Rngs(0))
    affine = lambda p, x: x @ p["kernel"] + p.get("bias", 0)
    yield Case("Linear", linear, ((5, 3),), affine, unbatched=True)
    yield Case(
        "Linear without bias",
        functools.partial(linear, use_bias=False),
        ((5, 3),),
        affine,
        unbatched=True,
    )
    yield Case(
        "Linear of one feature",
        functools.partial(nnx.Linear, 1, 1, **KERNEL, rngs=nnx.Rngs(0)),
        ((5, 1),),
        affine,
        unbatched=True,
    )
    yield Case(
        "Linear of no features",
        functools.partial(nnx.Linear, 0, 2, **KERNEL, rngs=nnx.Rngs(0)),
        ((5, 0),),
        affine,
        unbatched=True,
    )
    yield Case(
        "Linear to no features",
        functools.partial(nnx.Linear, 2, 0, **KERNEL, rngs=nnx.Rngs(0)),
        ((5, 2),),
        affine,
        unbatched=True,
    )
    general = functools.partial(nnx.LinearGeneral, **KERNEL, rngs=nnx.Rngs(0))
    yield Case(
        "LinearGeneral, two axes to two",
        functools.partial(general, (2, 3), (4, 2), axis=(-2, -1)),
        ((5, 2, 3),),
        lambda p, x: np.einsum("bij,ijkl->bkl", x, p["kernel"]) + p["bias"],
        unbatched=True,
    )
    yield Case(
        "LinearGeneral, an inner axis",
        functools.partial(general, (2, 4), 3, axis=(1, 3)),
        ((5, 2, 3, 4),),
        lambda p, x: np.einsum("bicj,ijk->bck", x, p["kernel"]) + p["bias"],
    )
    yield Case(
        "LinearGeneral, batch axis",
        functools.partial(general, 3, 4, batch_axis={0: 2}),
        ((2, 5, 3),),
        lambda p, x: np.einsum("bti,bio->bto", x, p["kernel"]) + p["bias"][:, None],
        batched=False,
    )
    for equation, kernel, bias, shape in (
        ("bti,io->bto", (3, 4), (4,), (2, 5, 3)),
        ("nta,hab->nthb", (2, 3, 4), (2, 4), (5, 2, 3)),
        ("...i,io->...o", (3, 4), (4,), (5, 2, 3)),
        ("bij,ji->b", (3, 2), None, (5, 2, 3)),
    ):
        yield Case(
            f"Einsum {equation}",
            functools.partial(nnx.Einsum, equation, kernel, bias, **KERNEL, rngs=nnx.Rngs(0)),
            (shape,),
            lambda p, x, e=equation: (
                np.einsum(e, x, p["kernel"])
                + (p["bias"][:, :] if e == "nta,hab->nthb" else p.get("bias", 0))
            ),
            unbatched="..." in equation,
        )
    yield Case(
        "Embed",
        functools.partial(nnx.Embed, 6, 3, embedding_init=empty, rngs=nnx.Rngs(0)),
        (np.array([[0, 5, -1], [2, 2, -6]]),),
        lambda p, x: p["embedding"][x],
        unbatched=True,
        half=1,
    )
    yield Case(
        "Embed.attend",
        functools.partial(nnx.Embed, 6, 3, embedding_init=empty, rngs=nnx.Rngs(0)),
        ((5, 3),),
        lambda p, x: x @ p["embedding"].T,
        call=lambda layer, x: layer.attend(x),
        unbatched=True,
    )

    def lora(param_dtype=jnp.float32, dtype=None):
        types = {"param_dtype": param_dtype, "dtype": dtype}
        base = nnx.Linear(3, 4, **KERNEL, **types, rngs=nnx.Rngs(0))
        init = {"a_initializer": empty, "b_initializer": empty}
        return nnx.LoRA(3, 2, 4, base_module=base, **init, **types, rngs=nnx.Rngs(0))

    yield Case(
        "LoRA",
        lora,
        ((5, 3),),
        lambda p, x: (
            x @ p["lora_a"] @ p["lora_b"] + x @ p["base_module.kernel"] + p["base_module.bias"]
        ),
        unbatched=True,
        half=6,
    )

    def lora_linear(param_dtype=jnp.float32, dtype=None):
        return nnx.LoRALinear(
            3, 4, lora_rank=2, **KERNEL, a_initializer=empty, b_initializer=empty,
            param_dtype=param_dtype, dtype=dtype, lora_param_dtype=param_dtype, lora_dtype=dtype,
            rngs=nnx.Rngs(0),
        )  # fmt: skip

    yield Case(
        "LoRALinear",
        lora_linear,
        ((5, 3),),
        lambda p, x: x @ p["lora.lora_a"] @ p["lora.lora_b"] + x @ p["kernel"] + p["bias"],
        unbatched=True,
        half=6,
    )
    yield Case(
        "PReLU",
        lambda param_dtype=jnp.float32, dtype=None: nnx.PReLU(
            0.3, param_dtype=param_dtype, dtype=dtype
        ),
        ((5, 3),),
        lambda p, x: np.where(x >= 0, x, p["negative_slope"] * x),
        unbatched=True,
    )
    yield Case(
        "MLP",
        lambda param_dtype=jnp.float32, dtype=None: nnx.MLP(
            3,
            2,
            4,
            2,
            activation=nnx.tanh,
            **KERNEL,
            param_dtype=param_dtype,
            dtype=dtype,
            rngs=nnx.Rngs(0),
        ),
        ((5, 3),),
        mlp,
        unbatched=True,
        half=8,
    )
    for name, fun in ref.ACTIVATIONS.items():
        activation = getattr(nnx, name.partition(",")[0], None) or getattr(
            jax.nn, name.partition(",")[0]
        )
        exact = functools.partial(activation, approximate=False) if "exact" in name else activation
        yield Case(
            name,
            lambda **_: nnx.Dict(),
            ((4, 6),),
            lambda p, x, f=fun: f(x),
            call=lambda layer, x, f=exact: f(x),
            batched=name != "logsumexp",
            half=8,
            types=False,
        )


def mlp(p, x):
    count = sum(path.endswith("kernel") for path in p)
    for i in range(count):
        x = x @ p[f"layers.{i}.kernel"] + p[f"layers.{i}.bias"]
        x = np.tanh(x) if i < count - 1 else x
    return x


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
    (2, (2, 1), "SAME", 1, (1, 2), 1),
    (2, 1, "CIRCULAR", 1, 1, 2),
    (2, (1, 2), "REFLECT", 1, 1, 1),
    (2, 2, [(1, 2), (0, 3)], (1, 2), 1, 2),
    (3, (1, 2, 1), "VALID", 1, 1, 1),
    (3, 1, "SAME", 1, 1, 4),
]


def per_axis(value, rank):
    return (value,) * rank if isinstance(value, int) else tuple(value)


def conv_cases():
    for rank, strides, padding, inner, dilation, groups in CONVOLUTIONS:
        make = functools.partial(
            nnx.Conv, 4, 8, KERNELS[rank], strides, padding=padding, input_dilation=inner,
            kernel_dilation=dilation, feature_group_count=groups, **KERNEL, rngs=nnx.Rngs(0),
        )  # fmt: skip
        options = (
            per_axis(strides, rank),
            padding,
            per_axis(inner, rank),
            per_axis(dilation, rank),
        )
        yield Case(
            f"Conv {rank}d stride {strides} {padding} dilations {inner} {dilation} groups {groups}",
            make,
            ((2, *SPATIAL[rank], 4),),
            lambda p, x, o=options, g=groups: ref.conv(x, p["kernel"], p["bias"], *o, g),
            unbatched=True,
            half=8,
        )
    wide = functools.partial(nnx.Conv, 2, 3, (3,), kernel_dilation=4, **KERNEL, rngs=nnx.Rngs(0))
    for padding in ("CIRCULAR", "REFLECT"):  # further than the input reaches
        yield Case(
            f"Conv of a short input {padding}",
            functools.partial(wide, padding=padding),
            ((2, 3, 2),),
            lambda p, x, pad=padding: ref.conv(x, p["kernel"], p["bias"], (1,), pad, (1,), (4,), 1),
            unbatched=True,
            half=8,
        )
    masked = np.random.default_rng(0).random((3, 2, 4)) < 0.5
    yield Case(
        "Conv with a mask",
        functools.partial(nnx.Conv, 2, 4, 3, mask=jnp.asarray(masked), **KERNEL, rngs=nnx.Rngs(0)),
        ((2, 5, 2),),
        lambda p, x: ref.conv(x, p["kernel"] * masked, p["bias"], (1,), "SAME", (1,), (1,), 1),
        unbatched=True,
        half=8,
    )
    transposed = [
        (1, 1, "SAME", 1, False),
        (1, 2, "SAME", 1, True),
        (1, 3, "VALID", 2, False),
        (1, 2, "CIRCULAR", 1, True),
        (1, 3, "CIRCULAR", 1, False),
        (1, 2, [(1, 2)], 1, False),
        (2, (2, 1), "SAME", 1, False),
        (2, 2, "CIRCULAR", (1, 2), False),
        (2, (1, 2), "VALID", 1, True),
        (3, 2, "SAME", 1, False),
    ]
    for rank, strides, padding, dilation, flipped in transposed:
        options = (per_axis(strides, rank), padding, per_axis(dilation, rank), flipped)
        yield Case(
            f"ConvTranspose {rank}d stride {strides} {padding} dilation {dilation} {flipped}",
            functools.partial(
                nnx.ConvTranspose,
                4,
                2,
                KERNELS[rank],
                strides,
                padding=padding,
                kernel_dilation=dilation,
                transpose_kernel=flipped,
                **KERNEL,
                rngs=nnx.Rngs(0),
            ),  # fmt: skip
            ((2, *SPATIAL[rank], 4),),
            lambda p, x, o=options: ref.conv_transpose(x, p["kernel"], p["bias"], *o),
            unbatched=True,
            half=8,
        )


def pool_cases():
    settings = [
        (1, (2,), None, "VALID"),
        (1, (3,), (2,), "SAME"),
        (2, (2, 3), (2, 1), "SAME"),
        (2, (2, 2), (1, 2), ((1, 0), (0, 1))),
        (3, (2, 2, 1), (1, 1, 2), "VALID"),
    ]
    for kind, (rank, window, strides, padding) in itertools.product(
        ("avg", "max", "min"), settings
    ):
        for counts in (True, False) if kind == "avg" else (True,):
            options = {"count_include_pad": counts} if kind == "avg" else {}
            yield Case(
                f"{kind}_pool {window} {strides} {padding} {counts}",
                lambda **_: nnx.Dict(),
                ((2, *SPATIAL[rank], 2),),
                lambda p, x, k=kind, w=window, s=strides, pad=padding, c=counts: ref.pool(
                    x, k, w, s or (1,) * len(w), pad, c
                ),
                call=lambda layer, x, k=kind, w=window, s=strides, pad=padding, o=options: getattr(
                    nnx, f"{k}_pool"
                )(x, w, s, pad, **o),
                unbatched=True,
                types=False,
                half=2,
            )


# Normalisation -------------------------------------------------------------------------------


def norm_cases():
    mask = np.random.default_rng(0).random((2, 3, 4)) < 0.6
    mask[0] |= ~mask[0].any()
    padding = np.ones((2, 3, 1), bool)
    padding[1] = False  # an example without any element
    for fast, keep in itertools.product((True, False), (None, mask, padding)):
        suffix = (
            f"{'fast' if fast else 'two passes'}{'' if keep is None else f', mask {keep.shape}'}"
        )
        options = {"use_fast_variance": fast, "rngs": nnx.Rngs(0)}
        # Of two elements of similar size the default would magnify every error a thousandfold.
        small = 1e-6 if keep is None else 1e-2
        options["epsilon"] = small
        call = lambda layer, x, m=keep: layer(x) if m is None else layer(x, mask=jnp.asarray(m))
        common = {"call": call, "batched": keep is None, "half": 6}

        def layer(make, reference, name, common=common, suffix=suffix, **more):
            more = {**common, **more}
            return Case(f"{name}, {suffix}", make, ((2, 3, 4),), reference, **more)

        yield layer(
            functools.partial(nnx.LayerNorm, 4, **AFFINE, **options),
            lambda p, x, m=keep, e=small: ref.norm(x, [-1], e, p["scale"], p["bias"], mask=m),
            "LayerNorm",
            unbatched=keep is None,
        )
        yield layer(
            functools.partial(
                nnx.LayerNorm,
                12,
                reduction_axes=(-2, -1),
                feature_axes=(-2, -1),
                **AFFINE,
                **options,
            ),
            lambda p, x, m=keep, e=small: ref.norm(
                x, [-2, -1], e, p["scale"].reshape(3, 4), p["bias"].reshape(3, 4), (-2, -1), m
            ),
            "LayerNorm of two axes",
            unbatched=keep is None,
        )
        yield layer(
            functools.partial(nnx.RMSNorm, 4, scale_init=empty, **options),
            lambda p, x, m=keep, e=small: ref.norm(
                x, [-1], e, p["scale"], None, mask=m, centred=False
            ),
            "RMSNorm",
            unbatched=keep is None,
        )
        yield layer(
            functools.partial(nnx.InstanceNorm, 4, **AFFINE, **options),
            lambda p, x, m=keep, e=small: ref.norm(x, [1], e, p["scale"], p["bias"], mask=m),
            "InstanceNorm",
        )
        for groups in (1, 2, 4):
            yield layer(
                functools.partial(nnx.GroupNorm, 4, groups, **AFFINE, **options),
                lambda p, x, m=keep, e=small, g=groups: ref.group_norm(
                    x, g, e, p["scale"], p["bias"], m
                ),
                f"GroupNorm of {groups}",
            )
        yield layer(
            functools.partial(nnx.BatchNorm, 4, **AFFINE, **options),
            lambda p, x, m=keep, e=small: ref.norm(x, [0, 1], e, p["scale"], p["bias"], mask=m),
            "BatchNorm",
            batched=False,
            stateless=False,
        )
        yield layer(
            functools.partial(nnx.BatchNorm, 3, axis=1, **AFFINE, **options),
            lambda p, x, m=keep, e=small: ref.norm(x, [0, 2], e, p["scale"], p["bias"], (-2,), m),
            "BatchNorm of axis 1",
            batched=False,
            stateless=False,
        )
        yield layer(
            functools.partial(nnx.BatchNorm, 4, use_running_average=True, **AFFINE, **options),
            lambda p, x, e=small: (x - p["mean"]) / np.sqrt(p["var"] + e) * p["scale"] + p["bias"],
            "BatchNorm with averages",
            batched=True,
            unbatched=keep is None,
        )

    def weight_norm(param_dtype=jnp.float32, dtype=None, **options):
        linear = nnx.Linear(3, 4, **KERNEL, param_dtype=param_dtype, dtype=dtype, rngs=nnx.Rngs(0))
        options = {"scale_init": empty, **options}
        return nnx.WeightNorm(
            linear, param_dtype=param_dtype, dtype=dtype, **options, rngs=nnx.Rngs(0)
        )

    def by_weight_norm(p, x, axes, use_scale=True):
        kernel = p["layer_instance.kernel"]
        kernel = kernel / np.sqrt((kernel**2).sum(axes, keepdims=True) + 1e-12)
        scale = next((v for k, v in p.items() if k.startswith("scales")), np.ones(()))
        shape = [n if a not in axes else 1 for a, n in enumerate(kernel.shape)]
        kernel = kernel * scale.reshape(shape if use_scale else ())
        return x @ kernel + p["layer_instance.bias"]

    for feature_axes, axes in ((-1, (0,)), (None, (0, 1)), (0, (1,))):
        yield Case(
            f"WeightNorm {feature_axes}",
            functools.partial(weight_norm, feature_axes=feature_axes),
            ((5, 3),),
            lambda p, x, a=axes: by_weight_norm(p, x, a),
            stateless=False,
            half=8,
        )

    def spectral_norm(param_dtype=jnp.float32, dtype=None):
        linear = nnx.Linear(3, 4, **KERNEL, param_dtype=param_dtype, dtype=dtype, rngs=nnx.Rngs(0))
        # The estimates are held in the dtype of the parameters; many steps make them exact.
        return nnx.SpectralNorm(
            linear, n_steps=200, param_dtype=param_dtype, dtype=dtype, rngs=nnx.Rngs(0)
        )

    yield Case(
        "SpectralNorm",
        spectral_norm,
        ((5, 3),),
        lambda p, x: (
            x @ (p["layer_instance.kernel"] / np.linalg.svd(p["layer_instance.kernel"])[1][0])
            + p["layer_instance.bias"]
        ),
        stateless=False,
        smooth=False,  # singular vectors count as constants
        half=8,
    )


# Attention -----------------------------------------------------------------------------------


def attention_cases():
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
        "bias": {"bias": rng.normal(size=(2, 3, 5))},
        "bias of -inf": {"bias": infinite},
        "bias, mask, causal": {"bias": rng.normal(size=(3, 5)), "mask": mask, "is_causal": True},
        "causal": {"is_causal": True},
    }
    for (shape, inputs), (variant, options) in itertools.product(shapes.items(), variants.items()):
        if variant == "bias" and shape != "equal heads":
            options = {"bias": options["bias"][:1]}
        for explicit in (False, True):
            how = {"dropout_rate": 0.5, "deterministic": True} if explicit else {}
            yield Case(
                f"dot_product_attention {shape} {variant} {explicit}",
                lambda **_: nnx.Dict(),
                inputs,
                lambda p, q, k, v, o=options: ref.attention(
                    q, k, v, o.get("bias"), o.get("mask"), o.get("is_causal", False)
                ),
                call=lambda layer, q, k, v, o=options, how=how: nnx.dot_product_attention(
                    q,
                    k,
                    v,
                    **{
                        n: x
                        if n == "is_causal"
                        else jnp.asarray(x, q.dtype if n == "bias" else bool)
                        for n, x in o.items()
                    },
                    **how,
                ),  # fmt: skip
                batched=False,
                types=False,
                half=8,
            )
    bare = {"dropout_rate": 0.0, "deterministic": True, "decode": False, **KERNEL}
    layer = lambda *args, **kwargs: functools.partial(
        nnx.MultiHeadAttention, *args, **bare, **kwargs, rngs=nnx.Rngs(0)
    )
    x = ((2, 3, 4),)
    yield Case("MultiHeadAttention", layer(2, 4), x, ref.multi_head, unbatched=True, half=16)
    yield Case(
        "MultiHeadAttention, causal, grouped",
        layer(4, 4, qkv_features=8, out_features=3, num_kv_heads=2),
        x,
        lambda p, x: ref.multi_head(p, x, causal=True),
        call=lambda layer, x: layer(x, is_causal=True),
        unbatched=True,
        half=16,
    )
    yield Case(
        "MultiHeadAttention, cross, without bias, normalized",
        layer(2, 4, 8, in_kv_features=3, use_bias=False, normalize_qk=True),
        ((2, 3, 4), (2, 5, 3)),
        ref.multi_head,
        batched=False,
        half=16,
    )
    attend = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE(theta=100.0))
    rotating = layer(2, 8, attention_fn=attend)
    rotated = lambda p, x: ref.multi_head(p, x, causal=True, theta=100.0)
    yield Case(
        "MultiHeadAttention with RoPE",
        rotating,
        ((2, 4, 8),),
        rotated,
        call=lambda layer, x: layer(x, is_causal=True),
        unbatched=True,
        half=16,
    )

    def decoded(layer, x, sizes):
        layer = nnx.clone(layer)
        layer.init_cache(x.shape, x.dtype)
        steps, start = [], 0
        for size in sizes:
            steps.append(layer(x[:, start : start + size], decode=True))
            start += size
        return jnp.concatenate(steps, axis=1)

    for sizes in ((1, 1, 1, 1), (3, 1)):
        yield Case(
            f"MultiHeadAttention, decoding {sizes}",
            rotating,
            ((2, 4, 8),),
            rotated,
            call=lambda layer, x, s=sizes: decoded(layer, x, s),
            half=16,
        )
    for length in (None, 7):
        size = None if length is None else 6
        yield Case(
            f"RoPE {length}",
            lambda length=length, s=size, **_: nnx.RoPE(50.0, s, length),
            ((2, 5, 6),),
            lambda p, x: ref.rope(x, 50.0, np.arange(5)),
            unbatched=True,
            types=False,
            half=4,
        )
    positions = np.array([[3, 0, 9, 100, 2], [1, 1, 1, 1, 1]])
    yield Case(
        "RoPE with positions",
        lambda **_: nnx.RoPE(50.0),
        ((2, 5, 6),),
        lambda p, x: ref.rope(x, 50.0, positions),
        call=lambda layer, x: layer(x, jnp.asarray(positions)),
        batched=False,
        types=False,
    )


# Recurrence ----------------------------------------------------------------------------------


def recurrent_cases():
    cells = {
        "SimpleCell": (nnx.SimpleCell, ref.simple_step, 1),
        "LSTMCell": (nnx.LSTMCell, ref.lstm_step, 2),
        "OptimizedLSTMCell": (nnx.OptimizedLSTMCell, ref.lstm_step, 2),
        "GRUCell": (nnx.GRUCell, ref.gru_step, 1),
    }
    lengths = np.array([4, 1, 0])

    def zeros(batch, parts):
        arrays = tuple(np.zeros((batch, 4)) for _ in range(parts))
        return arrays if parts > 1 else arrays[0]

    def at(p, prefix):
        return {k[len(prefix) :]: v for k, v in p.items() if k.startswith(prefix)}

    for name, (kind, step, parts) in cells.items():
        make = functools.partial(
            kind, 3, 4, recurrent_kernel_init=empty, **KERNEL, rngs=nnx.Rngs(0)
        )
        carries = ((5, 4),) * parts
        yield Case(
            f"{name}, a step",
            make,
            ((5, 3), *carries),
            lambda p, x, *c, step=step: step(p, c if len(c) > 1 else c[0], x)[1],
            call=lambda cell, x, *c: cell(c if len(c) > 1 else c[0], x)[1],
            batched=False,
            half=12,
        )
        for reverse, keep in ((False, False), (True, False), (True, True)):
            run = lambda p, x, step=step, parts=parts, r=reverse, k=keep: ref.rnn(
                functools.partial(step, at(p, "cell.")),
                zeros(len(x), parts),
                x, reverse=r, keep_order=k,
            )[0]  # fmt: skip
            yield Case(
                f"RNN of {name}, reverse {reverse} {keep}",
                lambda make=make, r=reverse, k=keep, **types: nnx.RNN(
                    make(**types), reverse=r, keep_order=k, rngs=False
                ),
                ((3, 4, 3),),
                run,
                half=24,
            )
        carry = lambda p, x, step=step, parts=parts: np.stack(
            np.atleast_3d(
                ref.rnn(
                    functools.partial(step, at(p, "cell.")),
                    zeros(3, parts),
                    x, lengths, reverse=True,
                )[1]
            ).reshape(-1, 3, 4)
        )  # fmt: skip
        yield Case(
            f"RNN of {name}, carry at lengths, reversed",
            lambda make=make, **types: nnx.RNN(make(**types), reverse=True, rngs=False),
            ((3, 4, 3),),
            carry,
            call=lambda rnn, x: jnp.stack(
                jax.tree.leaves(rnn(x, seq_lengths=jnp.asarray(lengths), return_carry=True)[0])
            ),
            batched=False,
            half=24,
        )

    def both(**types):
        make = functools.partial(
            nnx.GRUCell, 3, 4, recurrent_kernel_init=empty, **KERNEL, rngs=nnx.Rngs(0)
        )
        return nnx.Bidirectional(
            nnx.RNN(make(**types), rngs=False), nnx.RNN(make(**types), rngs=False), rngs=False
        )

    def by_both(p, x):
        halves = [
            ref.rnn(
                functools.partial(ref.gru_step, at(p, f"{name}_rnn.cell.")),
                np.zeros((len(x), 4)), x, reverse=name == "backward", keep_order=True,
            )[0]
            for name in ("forward", "backward")
        ]  # fmt: skip
        return np.concatenate(halves, -1)

    yield Case("Bidirectional", both, ((3, 4, 3),), by_both, half=24)


FAMILIES: dict[str, tp.Callable[[], tp.Iterator[Case]]] = {
    "linear": linear_cases,
    "convolutions": conv_cases,
    "pools": pool_cases,
    "norms": norm_cases,
    "attention": attention_cases,
    "recurrence": recurrent_cases,
}
