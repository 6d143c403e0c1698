"""Random programs with layers, metrics and optimizers, as text, and what of them is compared.

A program is a list of lines.  It sees `lib` (one of the libraries) and the helpers below.  What each
line assigns, the state of the objects after it, or the error that it raises is an outcome.
"""

from __future__ import annotations

import random
import re
import typing as tp
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax


def x(*shape: int, dtype: tp.Any = "float32") -> jax.Array:
    """An array that depends on its shape only."""
    rng = np.random.default_rng(zlib.crc32(repr(shape).encode()))
    return jnp.asarray(rng.normal(size=shape) * 2, dtype)


def mask(*shape: int) -> jax.Array:
    """A mask in which most elements count."""
    rng = np.random.default_rng(len(shape))
    return jnp.asarray(rng.random(shape) < 0.7)


def total(tree: tp.Any) -> jax.Array:
    """A real number that depends on every inexact leaf in its own way."""
    parts = [
        jnp.sum(jnp.real(y).astype(jnp.float32) * jnp.cos(jnp.arange(y.size)).reshape(y.shape))
        for y in map(jnp.asarray, jax.tree.leaves(tree))
        if jnp.issubdtype(y.dtype, jnp.inexact)
    ]
    return sum(parts, jnp.zeros(()))


HELPERS = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "x": x, "mask": mask, "total": total}

# Options ------------------------------------------------------------------------------------------

Options = dict[str, list[str]]

FLAG = ["True", "False"]
DTYPES = ["jnp.float32", "jnp.bfloat16", "jnp.float16", "None", "jnp.complex64", "'float16'"]
PARAM = ["jnp.float32", "jnp.bfloat16", "jnp.float16", "jnp.complex64", "jnp.float64"]
INITS = [
    "lib.initializers.ones",
    "lib.initializers.ones_init()",
    "lib.initializers.normal(0.5)",
    "lib.initializers.constant(2.0)",
    "lib.initializers.uniform()",
    "lib.initializers.truncated_normal(0.3)",
    "jax.nn.initializers.zeros",
    "lambda key, shape, dtype: jnp.full(shape, 0.5, dtype)",
]
KERNEL_INITS = [
    *INITS,
    "lib.initializers.xavier_uniform()",
    "lib.initializers.he_normal()",
    "lib.initializers.kaiming_uniform()",
    "lib.initializers.glorot_normal()",
    "lib.initializers.lecun_uniform()",
    "lib.initializers.orthogonal()",
    "lib.initializers.variance_scaling(2.0, 'fan_avg', 'uniform')",
    "lib.initializers.delta_orthogonal()",
]
METADATA = ["{'tag': 1}", "{'on_get_value': lambda v, a: a * 2}"]
RNGS = ["lib.Rngs(0)", "lib.Rngs(params=1)", "lib.Rngs(0, params=2)", "lib.Rngs(jax.random.key(3))"]
PRECISION = ["'highest'", "jax.lax.Precision.HIGH", "None"]
COMMON: Options = {"dtype": DTYPES, "param_dtype": PARAM}
WEIGHTS: Options = {
    **COMMON,
    "use_bias": FLAG,
    "kernel_init": KERNEL_INITS,
    "bias_init": INITS,
    "kernel_metadata": METADATA,
    "bias_metadata": METADATA,
    "precision": PRECISION,
    "preferred_element_type": ["jnp.float32", "jnp.bfloat16"],
}
NORM: Options = {
    **COMMON,
    "epsilon": ["1e-3", "0.1"],
    "use_bias": FLAG,
    "use_scale": FLAG,
    "bias_init": INITS,
    "scale_init": INITS,
    "use_fast_variance": ["False"],
    "scale_metadata": METADATA,
    "bias_metadata": METADATA,
}
PADDINGS = [
    "'SAME'",
    "'VALID'",
    "'CIRCULAR'",
    "'CAUSAL'",
    "'REFLECT'",
    "0",
    "1",
    "(1,)",
    "[(1, 2)]",
]
PADDINGS_2D = ["'SAME'", "'VALID'", "'CIRCULAR'", "1", "(1, 2)", "[(0, 1), (2, 1)]", "((1, 1), 0)"]
CELL: Options = {
    **COMMON,
    "carry_init": INITS,
    "kernel_init": INITS,
    "recurrent_kernel_init": INITS,
    "bias_init": INITS,
    "activation_fn": ["jax.nn.relu", "lib.tanh"],
    "keep_rngs": FLAG,
    "kernel_metadata": METADATA,
    "recurrent_kernel_metadata": METADATA,
    "bias_metadata": METADATA,
}
GATED: Options = {**CELL, "gate_fn": ["jax.nn.hard_sigmoid", "lib.sigmoid"]}
CELLS = {
    "SimpleCell": {**CELL, "residual": FLAG},
    "GRUCell": GATED,
    "LSTMCell": GATED,
    "OptimizedLSTMCell": GATED,
}
RNN: Options = {
    "time_major": FLAG,
    "return_carry": FLAG,
    "reverse": FLAG,
    "keep_order": FLAG,
    "unroll": ["1", "2", "3"],
    "rngs": ["False", "lib.Rngs(4)", "lib.Rngs(4).carry", "True"],
    "broadcast_rngs": ["True", "'carry'", "..."],
    "state_axes": [
        "lib.StateAxes({lib.Param: None, ...: lib.Carry})",
        "lib.StateAxes({...: lib.Carry})",
    ],
}
LENGTHS = ["jnp.array([5, 3])", "jnp.array([1, 4])", "np.array([2, 2])"]
ATTENTION: Options = {
    "dtype": ["jnp.float32", "jnp.bfloat16", "None"],
    "param_dtype": ["jnp.float32", "jnp.bfloat16"],
    "qkv_features": ["4", "8"],
    "out_features": ["3", "6"],
    "num_kv_heads": ["1", "2"],
    "broadcast_dropout": FLAG,
    "dropout_rate": ["0.5", "0.0"],
    "deterministic": FLAG,
    "precision": PRECISION,
    "kernel_init": KERNEL_INITS,
    "out_kernel_init": INITS,
    "bias_init": INITS,
    "out_bias_init": INITS,
    "use_bias": FLAG,
    "decode": FLAG,
    "normalize_qk": FLAG,
    "keep_rngs": FLAG,
    "kernel_metadata": METADATA,
    "out_bias_metadata": METADATA,
    "query_ln_scale_metadata": METADATA,
}
MASKS = [
    "lib.make_causal_mask(x(2, 3))",
    "lib.make_causal_mask(x(2, 3), dtype=bool)",
    "lib.make_attention_mask(mask(2, 3), mask(2, 3))",
    "lib.combine_masks(mask(2, 1, 3, 3), None, lib.make_causal_mask(x(2, 3)))",
    "mask(2, 1, 1, 3)",
    "mask(2, 2, 3, 3)",
]
BATCH_DIMS = ["extra_batch_dims=0", "extra_batch_dims=1"]
OPTIMIZERS = [
    "optax.sgd(0.1)",
    "optax.sgd(0.1, momentum=0.9, nesterov=True)",
    "optax.adam(0.01)",
    "optax.adamw(optax.cosine_decay_schedule(0.1, 5), weight_decay=0.1)",
    "optax.adamw(0.1, mask=lambda p: jax.tree.map(lambda v: v.ndim > 1, p))",
    "optax.chain(optax.clip_by_global_norm(0.5), optax.rmsprop(0.01))",
    "optax.MultiSteps(optax.adam(0.1), 2)",
    "optax.adafactor(0.1, min_dim_size_to_factor=2)",
    "optax.lion(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 5))",
    "optax.masked(optax.adam(0.1), lambda p: jax.tree.map(lambda v: v.ndim > 1, p))",
    "optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)",
    "optax.lookahead(optax.sgd(0.1), 2, 0.5)",
    "optax.contrib.schedule_free_adamw(0.1)",
    "optax.apply_if_finite(optax.sgd(0.1), 2)",
    "optax.ema(0.9)",
]
WRT = ["lib.Param", "lib.Param", "...", "lib.PathContains('kernel')", "(lib.Param, lib.BatchStat)"]
FLOATS = ["", ", dtype='bfloat16'", ", dtype='float16'", ", dtype='int32'", ", dtype='complex64'"]
MASKED = [
    "",
    "",
    ", mask=mask({s})",
    ", mask=mask(*({s},)[:-1], 1)",
    ", mask=None",
]


class Writer:
    """Writes one program."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []

    def pick(self, options: tp.Sequence[tp.Any]) -> tp.Any:
        """One of some options."""
        return self.random.choice(options)

    def some(self, options: Options, share: float = 0.25) -> str:
        """Some keyword arguments, each with a comma before it."""
        chosen = [(k, self.pick(v)) for k, v in options.items() if self.random.random() < share]
        return "".join(f", {k}={v}" for k, v in chosen)

    def made(self, cls: str, args: str, options: Options, share: float = 0.25) -> str:
        """The text of a layer."""
        rngs = "" if "rngs" in options else f", rngs={self.pick(RNGS)}"
        return f"lib.{cls}({args}{self.some(options, share)}{rngs})"

    def array(self, *shape: int) -> str:
        """The text of an array."""
        dtype = self.random.choices(FLOATS, [12, 2, 2, 1, 1])[0]
        if self.random.random() < 0.03:
            shape = (*shape[:-1], shape[-1] + 1)
        return f"x({', '.join(map(str, shape))}{dtype})"

    def batch(self, *most: int) -> tuple[int, ...]:
        """Some batch axes."""
        return self.pick([(), (1,), (2,), (2,), (2, 3), (0,)] if not most else most)

    def run(self, array: str, more: str = "") -> None:
        """Lines that call the layer."""
        for _ in range(self.pick([1, 1, 2])):
            call = self.random.choices(
                [
                    f"layer({array}{more})",
                    f"lib.jit(lambda m, x: m(x{more}))(layer, {array})",
                    f"lib.grad(lambda m: total(m({array}{more})))(layer)",
                    f"jax.grad(lambda x: total(lib.clone(layer)(x{more})))({array})",
                    f"lib.eval_shape(lambda m, x: m(x{more}), layer, {array})",
                    f"lib.vmap(lambda m, x: m(x{more}), in_axes=(None, 0))(layer, {array}[None])",
                ],
                [10, 2, 2, 1, 1, 1],
            )[0]
            self.lines.append(f"y = {call}")
            if self.random.random() < 0.15:
                self.lines.append(self.pick(["_ = layer.eval()", "_ = layer.train()"]))

    def program(self) -> list[str]:
        """The lines of the program."""
        kind = self.pick(KINDS)
        getattr(self, kind)()
        return self.lines

    # Kinds of programs ----------------------------------------------------------------------------

    def linear(self) -> None:
        i, o = self.pick([1, 3, 4]), self.pick([1, 2, 4])
        options = {
            **WEIGHTS,
            "dot_general": ["lambda *a, **k: 2 * jax.lax.dot_general(*a, **k)"],
            "promote_dtype": ["lambda a, *, dtype=None: tuple(a)"],
        }
        self.lines.append("layer = " + self.made("Linear", f"{i}, {o}", options))
        self.run(self.array(*self.batch(), i))

    def linear_general(self) -> None:
        args, shape = self.pick(
            [
                ("3, 4", (2, 3)),
                ("3, (2, 4)", (2, 3)),
                ("(2, 3), 4, axis=(-2, -1)", (5, 2, 3)),
                ("(3, 2), (2, 2), axis=(-1, -2)", (5, 2, 3)),
                ("(2,), (3, 1), axis=(1,)", (3, 2, 4)),
                ("3, 4, batch_axis={0: 2}", (2, 5, 3)),
                ("3, (4, 2), batch_axis={0: 2, 1: 3}", (2, 3, 3)),
                ("2, 4, axis=0", (2, 3)),
                ("3, 4, axis=(1, 2)", (2, 3, 3)),
            ]
        )
        self.lines.append("layer = " + self.made("LinearGeneral", args, WEIGHTS, 0.2))
        self.run(self.array(*shape))

    def einsum(self) -> None:
        args, shape = self.pick(
            [
                ("'ab,bc->ac', (3, 4), (4,)", (2, 3)),
                ("'...b,bc->...c', (3, 4), (4,)", (2, 2, 3)),
                ("'abc,cde->abde', (3, 2, 4), (2, 4)", (2, 2, 3)),
                ("'bf,hf->bh', (4, 3)", (2, 3)),
                ("'bf,hf->b', (4, 3), (1,)", (2, 3)),
                ("'nta,hab->nthb', (2, 3, 4), (2, 4)", (2, 2, 3)),
                ("'ab->ba', (3, 4)", (2, 3)),
            ]
        )
        options = {k: v for k, v in WEIGHTS.items() if k != "use_bias"}
        self.lines.append("layer = " + self.made("Einsum", args, options, 0.2))
        self.run(self.array(*shape), self.pick(["", "", "", ", einsum_str='...b,bc->...c'"]))

    def embed(self) -> None:
        options = {**COMMON, "embedding_init": KERNEL_INITS, "embedding_metadata": METADATA}
        self.lines.append("layer = " + self.made("Embed", f"{self.pick([1, 4, 5])}, 3", options))
        index = self.pick(
            [
                "jnp.array([0, 3, 2])",
                "jnp.array(1)",
                "jnp.array([[1, 9], [-1, 0]])",
                "np.arange(2)",
                "1",
            ]
            + ["jnp.array([1.0])", "jnp.array([True])", "jnp.array([2], jnp.uint8)", "[0, 1]"]
        )
        if self.random.random() < 0.3:
            self.lines.append(f"y = layer.attend({self.array(*self.batch(), 3)})")
        else:
            self.run(index)

    def conv(self) -> None:
        i, o, groups = self.pick([(3, 4, 1), (4, 2, 2), (2, 4, 2), (1, 1, 1), (4, 4, 4)])
        one = self.random.random() < 0.6
        kernel = self.pick(["2", "3", "(3,)", "(1,)"] if one else ["(2, 3)", "(3, 1)"])
        pair = ["2", "1", "3"] if one else ["2", "(1, 2)"]
        options = {
            **WEIGHTS,
            "strides": pair,
            "padding": PADDINGS if one else PADDINGS_2D,
            "input_dilation": pair,
            "kernel_dilation": pair,
            "mask": [f"mask(3, {i // groups}, {o})"]
            if one
            else [f"mask(2, 3, {i // groups}, {o})"],
        }
        args = f"{i}, {o}, {kernel}" + (f", feature_group_count={groups}" if groups > 1 else "")
        self.lines.append("layer = " + self.made("Conv", args, options, 0.2))
        self.run(self.array(*self.batch(), *((6,) if one else (5, 4)), i))

    def conv_transpose(self) -> None:
        i, o = self.pick([(3, 4), (1, 1), (2, 2)])
        one = self.random.random() < 0.6
        kernel = self.pick(["2", "3", "(3,)", "(1,)"] if one else ["(2, 3)", "(3, 1)"])
        pair = ["(2,)", "2", "(1,)", "(3,)"] if one else ["(2, 1)", "(2, 2)"]
        flipped = f"mask(3, {o}, {i})" if one else f"mask(2, 3, {o}, {i})"
        options = {
            **WEIGHTS,
            "strides": pair,
            "padding": [p for p in (PADDINGS if one else PADDINGS_2D) if "REFL" not in p],
            "kernel_dilation": pair,
            "transpose_kernel": FLAG,
            "mask": [f"mask(3, {i}, {o})" if one else f"mask(2, 3, {i}, {o})", flipped],
        }
        self.lines.append(
            "layer = " + self.made("ConvTranspose", f"{i}, {o}, {kernel}", options, 0.2)
        )
        self.run(self.array(*self.batch(), *((4,) if one else (3, 4)), i))

    def norm(self) -> None:
        name = self.pick(["BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"])
        options, more = dict(NORM), {}
        shape = self.pick([(2, 3, 4), (3, 4), (2, 5, 3, 4)])
        if name == "BatchNorm":
            more = {"axis": ["-1", "1"], "momentum": ["0.5", "0.0"], "use_running_average": FLAG}
        elif name in ("LayerNorm", "RMSNorm"):
            more = {
                "reduction_axes": ["(-2, -1)", "-1", "1", "0"],
                "feature_axes": ["-1", "(-1,)"],
            }
        if name == "RMSNorm":
            options = {k: v for k, v in options.items() if "bias" not in k}
        features = "4"
        if name == "GroupNorm":
            features += self.pick([", 2", ", 4", ", num_groups=None, group_size=2", ", 1", ", 3"])
        text = self.made(name, features, {**options, **more}, 0.2)
        if self.random.random() < 0.2:
            text = text[:-1] + ", axis_name='d')"
        self.lines.append("layer = " + text)
        sizes = ", ".join(map(str, shape))
        more_args = self.pick(MASKED).replace("{s}", sizes)
        if name == "BatchNorm":
            more_args += self.pick(["", "", ", use_running_average=True"])
        array = self.array(*shape)
        if "axis_name" in text:
            self.lines.append(
                f"y = lib.vmap(lambda m, x: lib.clone(m)(x{more_args}), in_axes=(None, 0), "
                f"axis_name='d')(layer, jnp.stack([{array}, {array} * 2]))"
            )
        else:
            self.run(array, more_args)

    def wrapped(self) -> None:
        inner, shape = self.pick(
            [
                ("lib.Linear(3, 4, rngs=lib.Rngs(0))", (2, 3)),
                (
                    "lib.Linear(3, 4, use_bias=False, param_dtype=jnp.bfloat16, rngs=lib.Rngs(0))",
                    (2, 3),
                ),
                ("lib.Conv(3, 4, 2, rngs=lib.Rngs(0))", (2, 5, 3)),
                ("lib.LinearGeneral(3, (2, 4), rngs=lib.Rngs(0))", (2, 3)),
                ("lib.Sequential(lib.Linear(3, 4, rngs=lib.Rngs(0)), jax.nn.relu)", (2, 3)),
                ("lib.Einsum('ab,bc->ac', (3, 4), (4,), rngs=lib.Rngs(0))", (2, 3)),
                ("lib.Embed(3, 4, rngs=lib.Rngs(0))", (2, 3)),
            ]
        )
        if self.random.random() < 0.5:
            inner = inner.replace(", param_dtype=jnp.bfloat16", "")
            options: Options = {
                "dtype": DTYPES[:1],
                "feature_axes": ["-1", "0", "(0, 1)", "None"],
                "use_scale": FLAG,
                "scale_init": INITS[:1],
                "epsilon": ["1e-3"],
                "variable_filter": ["lib.PathContains('bias')", "lib.Param", "lib.Any('kernel')"],
            }
            self.lines.append("layer = " + self.made("WeightNorm", inner, options))
            return self.run(self.array(*shape))
        options = {
            **COMMON,
            "n_steps": ["1", "3", "0"],
            "epsilon": ["1e-3"],
            "error_on_non_matrix": FLAG,
            "update_stats": FLAG,
        }
        self.lines.append("layer = " + self.made("SpectralNorm", inner, options))
        self.run(self.array(*shape), self.pick(["", ", update_stats=False", ", update_stats=True"]))

    def lora(self) -> None:
        options: Options = {
            "a_initializer": INITS,
            "b_initializer": INITS,
            "a_metadata": METADATA,
            "b_metadata": METADATA,
            "lora_param_type": ["lib.Param", "lib.LoRAParam"],
        }
        if self.random.random() < 0.5:
            base = ["lib.Linear(3, 4, rngs=lib.Rngs(1))", "lambda x: x[..., :1]", "None"]
            options |= {**COMMON, "base_module": base}
            self.lines.append("layer = " + self.made("LoRA", "3, 2, 4", options))
        else:
            options |= {**WEIGHTS, "lora_dtype": DTYPES, "lora_param_dtype": PARAM}
            self.lines.append(
                "layer = " + self.made("LoRALinear", "3, 4, lora_rank=2", options, 0.2)
            )
        self.run(self.array(*self.batch(), 3))

    def dropout(self) -> None:
        options: Options = {
            "broadcast_dims": ["(0,)", "(-1,)", "[0, 1]", "(1,)"],
            "deterministic": FLAG,
            "rngs": [
                "lib.Rngs(0)",
                "lib.Rngs(dropout=1)",
                "lib.Rngs(0).dropout",
                "lib.Rngs(0, noise=1)",
            ],
            "rng_collection": ["'noise'", "'dropout'"],
        }
        rate = self.pick(["0.5", "0.5", "0.3", "0.0", "1.0", "0"])
        self.lines.append("layer = " + self.made("Dropout", rate, options, 0.5))
        more = self.some(
            {
                "deterministic": FLAG,
                "rngs": ["lib.Rngs(2)", "jax.random.key(3)", "lib.Rngs(2).dropout()"],
            }
        )
        self.run(self.array(*self.pick([(2, 3), (3,), (2, 1, 4)])), more)

    def simple(self) -> None:
        layer, shape = self.pick(
            [
                (f"lib.PReLU({self.pick(['0.1', '-1', ''])}{self.some(COMMON)})", (2, 3)),
                ("lib.Sequential(lib.Linear(3, 2, rngs=lib.Rngs(0)), jnp.tanh)", (2, 3)),
                (
                    "lib.Sequential(lambda x: (x, x), lambda a, b: {'a': a, 'b': b}, lambda a, b: a)",
                    (2, 3),
                ),
                ("lib.Sequential()", (2, 3)),
            ]
        )
        self.lines.append(f"layer = {layer}")
        self.run(self.array(*shape))

    def cell(self) -> None:
        name = self.pick(list(CELLS))
        self.lines.append("layer = " + self.made(name, "3, 4", CELLS[name], 0.2))
        batch = self.pick([(2,), (), (2, 3)])
        more = self.some({"rngs": ["lib.Rngs(0)", "lib.Rngs(carry=1)"], "carry_init": INITS})
        self.lines.append(f"carry = layer.initialize_carry({(*batch, 3)}{more})")
        self.run(f"carry, {self.array(*batch, 3)}")
        self.lines = [
            re.sub(r"lambda m, x: m\(x", "lambda m, *x: m(*x", line) for line in self.lines
        ]

    def rnn(self) -> None:
        def one() -> str:
            name = self.pick(list(CELLS))
            return f"lib.RNN({self.made(name, '3, 4', CELLS[name], 0.1)}{self.some(RNN, 0.2)})"

        text = one()
        if self.random.random() < 0.3:
            options = {k: RNN[k] for k in ("time_major", "return_carry", "rngs")}
            merge = {"merge_fn": ["jnp.add", "lambda a, b: (a, b)"]}
            text = f"lib.Bidirectional({one()}, {one()}{self.some({**options, **merge})})"
        self.lines.append(f"layer = {text}")
        array = self.array(*self.pick([(2, 5, 3), (2, 5, 3), (5, 3), (2, 3, 4, 3), (2, 1, 3)]))
        calls: Options = {
            "return_carry": FLAG,
            "time_major": FLAG,
            "reverse": FLAG,
            "keep_order": FLAG,
            "rngs": ["lib.Rngs(5)", "lib.Rngs(carry=5)", "lib.Rngs(5).carry"],
        }
        more = self.some(calls, 0.2)
        if "2, 5, 3" in array and "time_major" not in text + more:
            more += self.some({"seq_lengths": LENGTHS}, 0.4)
        self.run(array, more)

    def attention(self) -> None:
        heads, features = self.pick([(2, 4), (1, 3), (4, 8)])
        text = self.made("MultiHeadAttention", f"{heads}, {features}", ATTENTION, 0.15)
        self.lines.append(f"layer = {text}")
        if "decode=True" in text and self.random.random() < 0.9:
            dtype = self.pick(["", ", dtype=jnp.bfloat16"])
            if "param_dtype=jnp.bfloat16" in text:  # a wider cache widens a step of the reference
                dtype = ", dtype=jnp.bfloat16"
            self.lines.append(f"_ = layer.init_cache((2, 3, {features}){dtype})")
            for _ in range(self.pick([2, 3])):
                self.lines.append(f"y = layer({self.array(2, 1, features)})")
            return
        calls: Options = {
            "mask": MASKS,
            "is_causal": FLAG,
            "deterministic": FLAG,
            "rngs": ["lib.Rngs(7)", "lib.Rngs(dropout=7)", "lib.Rngs(7).dropout"],
            "sow_weights": FLAG,
            "decode": ["False"],
        }
        more = ", decode=False" if "decode" not in text else ""
        calls = calls if not more else {k: v for k, v in calls.items() if k != "decode"}
        other = self.pick(["", "", f", {self.array(2, 3, features)}"])
        self.run(self.array(2, 3, features), f"{other}{self.some(calls, 0.2)}{more}")

    def function(self) -> None:
        a, shape = self.array(2, 6, 4, 3), self.pick(["(2, 2)", "(3, 1)", "(2,)", "(1, 2)"])
        strides = self.pick(["", ", strides=(2, 1)", ", strides=(2, 2)", ", strides=(2,)"])
        pad = self.pick(
            ["'SAME'", "'VALID'", "((1, 0), (0, 1))", "[(1, 1), (0, 0)]", "((1, 1),)", "1"]
        )
        q, k = self.array(2, 3, 2, 4), self.array(2, 3, 2, 4)
        act = self.pick(ACTIVATIONS)
        attend = self.some(
            {
                "mask": MASKS,
                "bias": ["x(2, 1, 3, 3)", "x(1, 2, 3, 3)"],
                "dropout_rate": ["0.5"],
                "dropout_rng": ["jax.random.key(0)"],
                "deterministic": FLAG,
                "broadcast_dropout": FLAG,
                "dtype": DTYPES,
                "is_causal": FLAG,
            },
            0.3,
        )
        init = self.pick(KERNEL_INITS)
        size = self.pick(["(3, 4)", "(2, 3, 4)", "(4,)", "(3, 3, 2, 2)", "()", "(0, 2)"])
        dtype = self.pick(["", *[f", {d}" for d in PARAM], ", jnp.int32"])
        counted = self.some({"count_include_pad": FLAG}, 0.5)
        text = self.pick(
            [
                f"lib.avg_pool({a}, {shape}{strides}, padding={pad}{counted})",
                f"lib.max_pool({a}, {shape}{strides}, padding={pad})",
                f"lib.min_pool({a}, {shape}{strides}, padding={pad})",
                f"jax.grad(lambda a: total(lib.max_pool(a, {shape}{strides}, padding={pad})))({a})",
                f"lib.pool({a}, 1.0, jax.lax.mul, {shape}, None, {pad})",
                f"lib.dot_product_attention({q}, {k}, {k}{attend})",
                f"lib.dot_product_attention_weights({q}, {k}{attend})",
                f"lib.{act}({self.array(2, 3)})",
                f"lib.{act}({self.pick(['1', '2.0', 'np.float32(2)', 'np.ones(2)', 'True'])})",
                f"({init})(jax.random.key(1), {size}{dtype})",
                f"lib.make_attention_mask({self.array(2, 3)}, mask(2, 4), {self.pick(BATCH_DIMS)})",
                f"lib.make_causal_mask({self.array(2, 3)}, {self.pick(BATCH_DIMS)})",
                f"lib.combine_masks({self.pick(MASKS)}, {self.pick([*MASKS, 'None'])})",
            ]
        )
        self.lines.append(f"y = {text}")

    def metric(self) -> None:
        s = self.pick(["3", "2, 3", "", "1, 1"])
        name = self.pick(["Average", "Welford", "Accuracy", "MultiMetric"])
        masked = self.pick(["", f", mask=mask({s})", ", mask=None"]) if name == "Average" else ""
        dtype = self.pick(["jnp.float32", "jnp.float32", "jnp.int32"])
        values = f"x({s}{', ' if s else ''}dtype={dtype})"
        if name in ("Average", "Welford"):
            named = self.pick(["", "'loss'"])
            values = self.pick([values, values, "2.0", "3", "np.ones((2, 3))"])
            text, update = (
                f"lib.metrics.{name}({named})",
                f"{named[1:-1] or 'values'}={values}{masked}",
            )
        elif name == "Accuracy":
            text = f"lib.metrics.Accuracy({self.pick(['', '', 'threshold=0.5'])})"
            update = self.pick(
                [
                    "logits=x(3, 4), labels=jnp.array([0, 1, 3])",
                    "logits=x(2, 3, 4), labels=jnp.ones((2, 3), jnp.int32), mask=mask(2, 3)",
                    "logits=x(3), labels=jnp.array([0, 1, 1])",
                    "logits=x(3, 1), labels=jnp.array([0, 1, 1])",
                    "logits=x(3, 4), labels=jnp.array([0.0, 1.0, 1.0])",
                ]
            )
        else:
            text = "lib.MultiMetric(a=lib.metrics.Average('loss'), b=lib.metrics.Welford('loss'))"
            update = f"loss={values}{masked}"
        self.lines.append(f"layer = {text}")
        for _ in range(self.pick([0, 1, 2, 3])):
            self.lines.append(
                self.pick(
                    [f"_ = layer.update({update})"] * 4
                    + [f"_ = lib.jit(lambda m: m.update({update}))(layer)", "_ = layer.reset()"]
                )
            )
            self.lines.append("y = layer.compute()")
        self.lines.append("y = layer.compute()")

    def optimizer(self) -> None:
        model = self.pick(
            [
                "lib.Linear(3, 2, rngs=lib.Rngs(0))",
                "lib.Linear(3, 2, param_dtype=jnp.bfloat16, rngs=lib.Rngs(0))",
                "lib.Sequential(lib.Linear(3, 2, rngs=lib.Rngs(0)), lib.BatchNorm(2, rngs=lib.Rngs(1)))",
                "lib.Sequential(*[lib.Linear(3, 3, rngs=lib.Rngs(0))] * 2)",
                "lib.LoRALinear(3, 2, lora_rank=1, rngs=lib.Rngs(0))",
            ]
        )
        wrt, tx = self.pick(WRT), self.pick(OPTIMIZERS)
        self.lines += [f"model = {model}", f"layer = lib.Optimizer(model, {tx}, wrt={wrt})"]
        loss = "lambda m: total(m(x(2, 3))) ** 2"
        chosen = "lib.Param" if wrt.startswith("(") or wrt == "..." else wrt
        step = f"o.update(m, lib.grad({loss}, argnums=lib.DiffState(0, {self.pick([wrt, chosen])}))(m))"
        for _ in range(self.pick([1, 2, 4])):
            self.lines.append(
                self.pick(
                    [f"_ = (lambda m, o: {step})(model, layer)"]
                    + [f"_ = lib.jit(lambda m, o: {step})(model, layer)"]
                )
            )
            self.lines.append("y = lib.state(model)")


ACTIVATIONS = (
    "celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu log_sigmoid log_softmax "
    "logsumexp relu relu6 selu sigmoid silu soft_sign softmax softplus standardize swish tanh identity"
).split()
KINDS = [
    *[
        "linear",
        "linear_general",
        "einsum",
        "embed",
        "conv",
        "conv",
        "conv_transpose",
        "norm",
        "norm",
    ],
    *["wrapped", "lora", "dropout", "simple", "cell", "rnn", "rnn", "attention", "attention"],
    *["function", "function", "metric", "optimizer"],
]


def program_of(seed: int) -> list[str]:
    """The lines of the program of a seed."""
    return Writer(seed).program()


# Outcomes -----------------------------------------------------------------------------------------


def run(lines: tp.Sequence[str], lib: tp.Any) -> list[tp.Any]:
    """What each line assigns and leaves behind, in a form that both libraries share."""
    names = {**HELPERS, "lib": lib}
    outcomes: list[tp.Any] = []
    for line in lines:
        target, _, text = line.partition(" = ")
        try:
            value = eval(text, names)
            names[target] = value
            layer = names.get("layer")
            outcomes.append((None if target == "_" else plain(lib, value), plain(lib, layer)))
        except Exception as error:
            outcomes.append(error)
            break
    return outcomes


def plain(lib: tp.Any, value: tp.Any) -> tp.Any:
    """A value in a form that both libraries share."""
    if isinstance(value, lib.Pytree) and not isinstance(value, lib.State):
        static = {
            k: repr(v)
            for k, v in vars(value).items()
            if isinstance(v, (bool, int, float, str)) and not k.startswith("_")
        }
        return type(value).__name__, static, plain(lib, lib.state(value))
    if isinstance(value, lib.State):
        return [
            (path, type(leaf).__name__, _metadata(leaf), plain(lib, leaf))
            for path, leaf in lib.to_flat_state(value)
        ]
    if isinstance(value, lib.Variable):
        return plain(lib, value.get_raw_value())
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        return "array", str(value.dtype), value.weak_type, np.asarray(value)
    if isinstance(value, jax.ShapeDtypeStruct):
        return "struct", str(value.dtype), value.weak_type, value.shape
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *[plain(lib, v) for v in value]]
    if isinstance(value, dict):
        return [(k, plain(lib, v)) for k, v in sorted(value.items())]
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value).__name__, str(value.dtype), np.asarray(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value).__name__


def _metadata(leaf: tp.Any) -> tp.Any:
    return sorted(leaf.get_metadata()) if hasattr(leaf, "get_metadata") else None


def unequal(one: tp.Any, other: tp.Any, ulps: int) -> tuple[tp.Any, tp.Any] | None:
    """The first parts that differ, of values in the form of `plain`; arrays in more than last bits."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return None if one.shape == other.shape and close(one, other, ulps) else (one, other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) == len(other):
            return next((d for a, b in zip(one, other) if (d := unequal(a, b, ulps))), None)
        return one, other
    return None if type(one) is type(other) and one == other else (one, other)


def close(one: np.ndarray, other: np.ndarray, ulps: int) -> bool:
    """Whether two arrays differ by so many units in the last place of the largest element."""
    if np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"):
        return True
    if not jnp.issubdtype(one.dtype, jnp.inexact):
        return False
    epsilon = float(jnp.finfo(one.dtype).eps) * ulps
    wide = np.complex128 if one.dtype.kind == "c" else np.float64
    one, other = one.astype(wide), other.astype(wide)
    finite = np.abs(other[np.isfinite(other)])
    largest = max(finite.max(initial=0.0), 1e-6)
    with np.errstate(all="ignore"):
        return bool(np.allclose(one, other, rtol=0, atol=epsilon * largest, equal_nan=True))


LENIENT = [
    ("RNN", "Expected rngs to be a jax.Array, int, Rngs, or bool"),
    ("layer", "RNGs must be provided to initialize|qr does not accept dtype"),
    ("RNN|layer", "scan body function carry input and carry output must have equal types"),
    ("layer", "object has no attribute 'dtype'|should be a jax array"),
    ("layer", "Cannot broadcast to shape with fewer dimensions|dynamic_update_slice requires"),
    ("layer", "integer modulo by zero"),
    ("pool", r"safe_zip\(\) argument 1"),  # numbers as padding, beside several batch axes
    ("mask", "cannot reshape array of shape .* into shape"),
]
"""What the reference refuses and this library takes: patterns of a line, and of the message."""


def difference(lines: tp.Sequence[str], mine: tp.Any, theirs: tp.Any, ulps: int = 1) -> str | None:
    """The first line with different outcomes in two libraries, with both; None without one."""
    ours, others = run(lines, mine), run(lines, theirs)
    if _raise_alike(ours[-1], others[-1], len(ours) <= len(others)):
        return None
    for number, (line, one, other) in enumerate(zip(lines, ours, others)):
        found: tp.Any = (one, other)
        if not (isinstance(one, Exception) or isinstance(other, Exception)):
            found = unequal(
                one, other, ulps * (8 if re.search("grad|jit|vmap|update", line) else 1)
            )
        elif any(re.search(a, line) and re.search(b, str(other)) for a, b in LENIENT):
            return None
        if found:
            text = "\n".join(f"{'>' if i == number else ' '} {x}" for i, x in enumerate(lines))
            shown = "".join(
                f"\n{lib.__name__}: {_shown(x)}" for lib, x in zip((mine, theirs), found)
            )
            return text + shown
    return None


def _raise_alike(mine: tp.Any, theirs: tp.Any, early: bool) -> bool:
    """Whether two programs end with an error of one class, or one that is better here."""
    if not (isinstance(mine, Exception) and isinstance(theirs, Exception) and early):
        return False
    ordinary = (TypeError, ValueError)
    return (
        type(mine) is type(theirs)
        or (isinstance(mine, ordinary) and not isinstance(theirs, ordinary))
        or "Dropout scales what it keeps" in str(mine)  # said before the stream is looked for
    )


def _shown(value: tp.Any) -> str:
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {str(value)[:300]}"
    return str(value)[:600]
