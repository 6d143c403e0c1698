"""Load checkpoints of Hugging Face transformers into models written here, and save them back.

Nothing is downloaded: transformers makes a GPT-2, a Llama and a ViT with random weights on the spot, and
saves each as it saves a published one, in several safetensors files. The models below are the same
networks. A mapping relates the names and layouts of both sides, and is used in both directions.

Result: logits agree with those of transformers to a relative difference of at most 1e-5, both ways.

    pip install -e ".[checkpoint,pretrained]"
    python examples/load_pretrained.py            # half a minute on two CPU cores
    python examples/load_pretrained.py --quick    # smaller models

The output folder has the checkpoints, as transformers saved them and as nnxlite did.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import typing as tp
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import nnxlite as nnx
from nnxlite.checkpoint import Ignore, Mapping, Rule, Unstack

os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import torch
    import transformers
except ImportError as error:
    sys.exit(
        f"load_pretrained.py: error: {error.name} is not installed; install it by"
        ' pip install -e ".[checkpoint,pretrained]"'
    )

PARTS = ("query", "key", "value")

# GPT-2: learned positions, one linear layer for queries, keys and values, embeddings used twice.


class GPT2Block(nnx.Module):
    """Attention and a perceptron, each on normalised inputs and added to them."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        width = config.n_embd
        norm = functools.partial(nnx.LayerNorm, width, epsilon=config.layer_norm_epsilon, rngs=rngs)
        self.norm1, self.norm2 = norm(), norm()
        self.attention = nnx.MultiHeadAttention(config.n_head, width, decode=False, rngs=rngs)
        self.fc1 = nnx.Linear(width, 4 * width, rngs=rngs)
        self.fc2 = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.fc2(nnx.gelu(self.fc1(self.norm2(x))))


class GPT2(nnx.Module):
    """Radford et al. 2019: tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(config.vocab_size, config.n_embd, rngs=rngs)
        self.positions = nnx.Embed(config.n_positions, config.n_embd, rngs=rngs)
        self.blocks = nnx.List([GPT2Block(config, rngs=rngs) for _ in range(config.n_layer)])
        self.norm = nnx.LayerNorm(config.n_embd, epsilon=config.layer_norm_epsilon, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def gpt2_mapping() -> Mapping:
    """Names of `GPT2LMHeadModel`; its layers have kernels (in, out)."""
    theirs, ours = "transformer.h.{i}", "blocks.{i}"
    parts = [f"{ours}.attention.{part}" for part in PARTS]
    return Mapping(
        [
            Rule("transformer.wte.weight", "tokens.embedding"),
            Rule("transformer.wpe.weight", "positions.embedding"),
            *norms(f"{theirs}.ln_{{k}}", f"{ours}.norm{{k}}"),
            Rule(
                f"{theirs}.attn.c_attn.weight",
                [f"{part}.kernel" for part in parts],
                "d (part heads depth) -> part d heads depth",
                Unstack(),
            ),
            Rule(
                f"{theirs}.attn.c_attn.bias",
                [f"{part}.bias" for part in parts],
                "(part heads depth) -> part heads depth",
                Unstack(),
            ),
            Rule(
                f"{theirs}.attn.c_proj.weight",
                f"{ours}.attention.out.kernel",
                "(heads depth) d -> heads depth d",
            ),
            Rule(f"{theirs}.attn.c_proj.bias", f"{ours}.attention.out.bias"),
            Rule(f"{theirs}.mlp.c_fc.weight", f"{ours}.fc1.kernel"),
            Rule(f"{theirs}.mlp.c_fc.bias", f"{ours}.fc1.bias"),
            Rule(f"{theirs}.mlp.c_proj.weight", f"{ours}.fc2.kernel"),
            Rule(f"{theirs}.mlp.c_proj.bias", f"{ours}.fc2.bias"),
            *norms("transformer.ln_f", "norm"),
            Ignore("transformer.h.*.attn.bias"),  # causal masks, in older checkpoints
        ]
    )


# Llama: rotated queries and keys, fewer heads for keys than for queries, gated perceptrons.


class LlamaBlock(nnx.Module):
    """Attention and a gated perceptron, each on normalised inputs and added to them."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        width, hidden = config.hidden_size, config.intermediate_size
        norm = functools.partial(nnx.RMSNorm, width, epsilon=config.rms_norm_eps, rngs=rngs)
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        rope = nnx.RoPE(theta=config.rope_parameters["rope_theta"])
        self.norm1, self.norm2 = norm(), norm()
        self.attention = nnx.MultiHeadAttention(
            config.num_attention_heads,
            width,
            config.num_attention_heads * config.head_dim,
            num_kv_heads=config.num_key_value_heads,
            use_bias=False,
            attention_fn=functools.partial(nnx.dot_product_attention_with_rope, rope=rope),
            decode=False,
            rngs=rngs,
        )
        self.gate, self.up = linear(width, hidden), linear(width, hidden)
        self.down = linear(hidden, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), is_causal=True)
        y = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    """Touvron et al. 2023: tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        width = config.hidden_size
        self.tokens = nnx.Embed(config.vocab_size, width, rngs=rngs)
        blocks = range(config.num_hidden_layers)
        self.blocks = nnx.List([LlamaBlock(config, rngs=rngs) for _ in blocks])
        self.norm = nnx.RMSNorm(width, epsilon=config.rms_norm_eps, rngs=rngs)
        self.head = nnx.Linear(width, config.vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def llama_mapping() -> Mapping:
    """Names of `LlamaForCausalLM`; its layers have kernels (out, in)."""
    theirs, ours = "model.layers.{i}", "blocks.{i}"
    return Mapping(
        [
            Rule("model.embed_tokens.weight", "tokens.embedding"),
            Rule(f"{theirs}.input_layernorm.weight", f"{ours}.norm1.scale"),
            Rule(f"{theirs}.post_attention_layernorm.weight", f"{ours}.norm2.scale"),
            *[
                Rule(
                    f"{theirs}.self_attn.{part[0]}_proj.weight",
                    f"{ours}.attention.{part}.kernel",
                    "(heads depth) d -> d heads depth",
                )
                for part in PARTS
            ],
            Rule(
                f"{theirs}.self_attn.o_proj.weight",
                f"{ours}.attention.out.kernel",
                "d (heads depth) -> heads depth d",
            ),
            Rule(f"{theirs}.mlp.{{part}}_proj.weight", f"{ours}.{{part}}.kernel", "o i -> i o"),
            Rule("model.norm.weight", "norm.scale"),
            Rule("lm_head.weight", "head.kernel", "o i -> i o"),
        ]
    )


# ViT: patches of an image as tokens, and one more that the class is read from.


class ViTBlock(nnx.Module):
    """Attention and a perceptron, each on normalised inputs and added to them."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        width, hidden = config.hidden_size, config.intermediate_size
        norm = functools.partial(nnx.LayerNorm, width, epsilon=config.layer_norm_eps, rngs=rngs)
        heads = config.num_attention_heads
        self.norm1, self.norm2 = norm(), norm()
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.fc1 = nnx.Linear(width, hidden, rngs=rngs)
        self.fc2 = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(nnx.gelu(self.fc1(self.norm2(x)), approximate=False))


class ViT(nnx.Module):
    """Dosovitskiy et al. 2021: images (batch, height, width, channels) to logits (batch, classes)."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        width, patch = config.hidden_size, (config.patch_size, config.patch_size)
        patches = (config.image_size // config.patch_size) ** 2
        self.patches = nnx.Conv(
            config.num_channels, width, patch, strides=patch, padding="VALID", rngs=rngs
        )
        self.class_token = nnx.Param(jnp.zeros((1, 1, width)))
        self.positions = nnx.Param(jnp.zeros((1, patches + 1, width)))
        blocks = range(config.num_hidden_layers)
        self.blocks = nnx.List([ViTBlock(config, rngs=rngs) for _ in blocks])
        self.norm = nnx.LayerNorm(width, epsilon=config.layer_norm_eps, rngs=rngs)
        self.head = nnx.Linear(width, config.num_labels, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        x = x.reshape(len(x), -1, x.shape[-1])
        first = jnp.broadcast_to(self.class_token[...], (len(x), 1, x.shape[-1]))
        x = jnp.concatenate([first, x], axis=1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def vit_mapping() -> Mapping:
    """Names of `ViTForImageClassification`; its kernels are (out, in) and (out, in, height, width)."""
    theirs, ours = "vit.encoder.layer.{i}", "blocks.{i}"
    return Mapping(
        [
            Rule("vit.embeddings.cls_token", "class_token"),
            Rule("vit.embeddings.position_embeddings", "positions"),
            *linear("vit.embeddings.patch_embeddings.projection", "patches", "o i h w -> h w i o"),
            *norms(f"{theirs}.layernorm_before", f"{ours}.norm1"),
            *norms(f"{theirs}.layernorm_after", f"{ours}.norm2"),
            *[
                Rule(
                    f"{theirs}.attention.attention.{part}.weight",
                    f"{ours}.attention.{part}.kernel",
                    "(heads depth) d -> d heads depth",
                )
                for part in PARTS
            ],
            *[
                Rule(
                    f"{theirs}.attention.attention.{part}.bias",
                    f"{ours}.attention.{part}.bias",
                    "(heads depth) -> heads depth",
                )
                for part in PARTS
            ],
            *linear(
                f"{theirs}.attention.output.dense",
                f"{ours}.attention.out",
                "d (heads depth) -> heads depth d",
            ),
            *linear(f"{theirs}.intermediate.dense", f"{ours}.fc1"),
            *linear(f"{theirs}.output.dense", f"{ours}.fc2"),
            *norms("vit.layernorm", "norm"),
            *linear("classifier", "head"),
        ]
    )


def linear(theirs: str, ours: str, layout: str = "o i -> i o") -> list[Rule]:
    return [
        Rule(f"{theirs}.weight", f"{ours}.kernel", layout),
        Rule(f"{theirs}.bias", f"{ours}.bias"),
    ]


def norms(theirs: str, ours: str) -> list[Rule]:
    return [
        Rule(f"{theirs}.weight", f"{ours}.scale"),
        Rule(f"{theirs}.bias", f"{ours}.bias"),
    ]


class Case(tp.NamedTuple):
    """A model of transformers, the same one here, and what relates them."""

    name: str
    theirs: tp.Any
    ours: tp.Callable[..., nnx.Module]
    mapping: Mapping
    inputs: np.ndarray
    """Tokens (batch, length), or images (batch, height, width, channels)."""

    def their_logits(self, model) -> np.ndarray:
        inputs = self.inputs
        if inputs.ndim == 4:
            inputs = inputs.transpose(0, 3, 1, 2)
        with torch.no_grad():
            return model(torch.from_numpy(inputs.copy())).logits.numpy()


def cases(width: int, layers: int, seed: int = 0) -> list[Case]:
    """The three of them, with random weights, and without anything that is random when they run."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    gpt2 = transformers.GPT2Config(
        vocab_size=101,
        n_positions=24,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    llama = transformers.LlamaConfig(
        vocab_size=101,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    vit = transformers.ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        image_size=16,
        patch_size=4,
        id2label=dict(enumerate("abcdefg")),
    )
    tokens = rng.integers(0, 101, (2, 13))
    images = rng.normal(size=(2, 16, 16, 3)).astype("float32")
    made = [
        ("GPT-2", transformers.GPT2LMHeadModel, gpt2, GPT2, gpt2_mapping(), tokens),
        ("Llama", transformers.LlamaForCausalLM, llama, Llama, llama_mapping(), tokens),
        ("ViT", transformers.ViTForImageClassification, vit, ViT, vit_mapping(), images),
    ]
    return [
        Case(
            name,
            distinct(kind(config)).eval(),
            functools.partial(ours, config),
            mapping,
            inputs,
        )
        for name, kind, config, ours, mapping, inputs in made
    ]


def distinct(model):
    """The model with random biases and norms too, which start as zeros and ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


class Result(tp.NamedTuple):
    """What became of one model."""

    name: str
    parameters: int
    files: int
    report: nnx.checkpoint.Report
    loaded: float
    """The largest difference of logits after loading, relative to the largest logit."""
    returned: float
    """The same for transformers' own model after loading what was saved here."""


def run(case: Case, folder: Path) -> Result:
    """Load what transformers saved; save it; let transformers load that."""
    there, back = folder / case.name / "transformers", folder / case.name / "nnxlite"
    parameters = sum(p.numel() for p in case.theirs.parameters())
    case.theirs.save_pretrained(there, max_shard_size=2 * parameters)  # two files or more
    expected = case.their_logits(case.theirs)

    model = nnx.eval_shape(lambda: case.ours(rngs=nnx.Rngs(0)))  # shapes; no arrays yet
    report = nnx.load_safetensors(there, model, mapping=case.mapping)
    logits = np.asarray(nnx.jit(lambda model, x: model(x))(model, case.inputs))

    nnx.save_safetensors(back, model, mapping=case.mapping, max_shard_bytes=2 * parameters)
    case.theirs.config.save_pretrained(back)
    again = case.their_logits(type(case.theirs).from_pretrained(back).eval())
    scale = np.abs(expected).max()
    return Result(
        case.name,
        parameters,
        len(list(there.glob("*.safetensors"))),
        report,
        float(np.abs(logits - expected).max() / scale),
        float(np.abs(again - expected).max() / scale),
    )


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="load_pretrained.py", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder; default: out")
    parser.add_argument("--quick", action="store_true", help="smaller models")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    transformers.utils.logging.disable_progress_bar()
    width, layers = (32, 2) if options.quick else (256, 6)
    results = [run(case, options.out) for case in cases(width, layers)]
    table = Table(title="Checkpoints of transformers, loaded and saved by nnxlite")
    columns = "model", "parameters", "files", "arrays", "missing", "left over", "logits", "and back"
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, parameters, files, report, loaded, returned in results:
        table.add_row(
            name,
            f"{parameters:,}",
            str(files),
            str(len(report.restored)),
            str(len(report.missing)),
            str(len(report.unexpected)),
            f"{loaded:.1e}",
            f"{returned:.1e}",
        )
    Console(width=100).print(table)
    worst = max(max(result.loaded, result.returned) for result in results)
    print(f"largest difference of logits, relative to the largest logit: {worst:.1e}")
    if worst > 1e-5:
        sys.exit("load_pretrained.py: error: the logits differ by more than rounding")


if __name__ == "__main__":
    main()
