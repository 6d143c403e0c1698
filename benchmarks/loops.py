"""Whole loops, as programs run them: training with evaluation, a GAN, decoding, sowing.

The limit is traced from the same steps through split and merge, so that XLA runs the same programs;
their leaves are carried by hand.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
import optax

from benchmarks.harness import Budget, Calls, case
from benchmarks.models import WIDTH, block_stack, library, train_body

LAYERS = 24
STEPS = 10
X = jnp.ones((4, WIDTH))
Y = jnp.zeros((4, WIDTH))


def by_hand(nnx: tp.Any, body: tp.Callable[..., tp.Any], objects: tuple[tp.Any, ...]) -> tp.Any:
    """`body(*objects, *arrays)` under `jax.jit` on leaves: `step(leaves, *arrays)`.

    Returns the step, which gives the result and writes into the list of leaves what is new, and the
    first leaves.
    """
    graphdef, state = nnx.split(objects)
    leaves, treedef = jax.tree.flatten(state)
    written: list[int] = []

    @jax.jit
    def compiled(leaves, *arrays):
        objects = nnx.merge(graphdef, treedef.unflatten(leaves))
        result = body(*objects, *arrays)
        new = jax.tree.leaves(nnx.state(objects))
        written[:] = [i for i, (old, now) in enumerate(zip(leaves, new)) if old is not now]
        return result, [new[i] for i in written]

    def step(leaves, *arrays):
        result, new = compiled(leaves, *arrays)
        for number, value in zip(written, new):
            leaves[number] = value
        return result

    return step, leaves


# Training as in tutorials ------------------------------------------------------------------------


def tutorial(nnx: tp.Any) -> tuple[tp.Any, ...]:
    """Model, optimizer and metrics, and the bodies of a training and an evaluation step."""
    model = block_stack(nnx, LAYERS)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), error=nnx.metrics.Average("error"))
    train = train_body(nnx)

    def train_step(model, optimizer, metrics, x, y):
        loss = train(model, optimizer, x, y)
        metrics.update(loss=loss, error=loss)
        return loss

    def eval_step(model, metrics, x, y):
        y = model(x) - y
        metrics.update(loss=jnp.mean(y**2), error=jnp.abs(y))

    return model, optimizer, metrics, train_step, eval_step


def tutorial_loop(name: str) -> tp.Callable[[], object]:
    """`run()` takes ten training steps and one of evaluation."""
    nnx = library(name)
    model, optimizer, metrics, train_step, eval_step = tutorial(nnx)
    train_step, eval_step = nnx.jit(train_step), nnx.jit(eval_step)

    def run():
        for _ in range(STEPS):
            model.train()
            train_step(model, optimizer, metrics, X, Y)
        model.eval()
        eval_step(model, metrics, X, Y)
        values = metrics.compute()
        metrics.reset()
        return jax.block_until_ready(values)

    return run


def tutorial_by_hand() -> tp.Callable[[], object]:
    """The same, by hand."""
    nnx = library("nnxlite")
    model, optimizer, metrics, train_body, eval_body = tutorial(nnx)
    model.train()
    train_step, leaves = by_hand(nnx, train_body, (model, optimizer, metrics))
    model.eval()
    eval_step, leaves_of_eval = by_hand(nnx, eval_body, (model, metrics))
    # Where the leaves of model and metrics are among those of the training step.
    numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
    chosen = [numbers[id(leaf)] for leaf in leaves_of_eval]
    fresh = {number: leaves[number] for number in chosen[-4:]}

    def run():
        for _ in range(STEPS):
            train_step(leaves, X, Y)
        after = [leaves[number] for number in chosen]
        eval_step(after, X, Y)
        count, total, other_count, other_total = after[-4:]
        values = {"error": total / count, "loss": other_total / other_count}
        for number, value in fresh.items():
            leaves[number] = value
        return jax.block_until_ready(values)

    return run


@case("loops", f"training as in tutorials, {LAYERS} layers", Budget(1.15, "limit"))
def training():
    """Ten steps and an evaluation; the mode is set before each step."""
    return {
        "limit": lambda: Calls(tutorial_by_hand(), units=STEPS),
        "nnxlite": lambda: Calls(tutorial_loop("nnxlite"), units=STEPS),
        "flax": lambda: Calls(tutorial_loop("flax"), units=STEPS),
    }


# Two models that train against each other ---------------------------------------------------------


def gan(nnx: tp.Any) -> tuple[tuple[tp.Any, ...], tp.Callable[..., tp.Any]]:
    """Two models, two optimizers and a stream of noise; the body of a step of both."""
    generator, critic = block_stack(nnx, 4), block_stack(nnx, 4)
    objects = (
        generator,
        critic,
        nnx.Optimizer(generator, optax.adam(1e-3), wrt=nnx.Param),
        nnx.Optimizer(critic, optax.adam(1e-3), wrt=nnx.Param),
        nnx.Rngs(noise=0),
    )

    def body(generator, critic, of_generator, of_critic, rngs, real):
        noise = jax.random.normal(rngs.noise(), real.shape)

        def loss_of_critic(critic, generator):
            return jnp.mean(critic(generator(noise))) - jnp.mean(critic(real))

        def loss_of_generator(generator, critic):
            return -jnp.mean(critic(generator(noise)))

        of_critic.update(critic, nnx.grad(loss_of_critic)(critic, generator))
        loss, grads = nnx.value_and_grad(loss_of_generator)(generator, critic)
        of_generator.update(generator, grads)
        return loss

    return objects, body


def carried(run_of: tp.Callable[[], tuple[tp.Any, tp.Callable[..., tp.Any]]], *arrays: tp.Any):
    """`run()` calls the body of `run_of` by hand, again and again."""
    nnx = library("nnxlite")
    objects, body = run_of()
    step, leaves = by_hand(nnx, body, objects)

    return lambda: jax.block_until_ready(step(leaves, *arrays))


def jitted(nnx: tp.Any, objects: tuple[tp.Any, ...], body: tp.Any, *arrays: tp.Any):
    """`run()` calls the body under `nnx.jit`."""
    step = nnx.jit(body)
    return lambda: jax.block_until_ready(step(*objects, *arrays))


@case("loops", "GAN step", Budget(1.1, "limit"))
def adversaries():
    """Two models, two optimizers, a stream of noise."""

    def ours(name: str):
        nnx = library(name)
        return Calls(jitted(nnx, *gan(nnx), X))

    return {
        "limit": lambda: Calls(carried(lambda: gan(library("nnxlite")), X)),
        "nnxlite": lambda: ours("nnxlite"),
        "flax": lambda: ours("flax"),
    }


# Decoding ----------------------------------------------------------------------------------------


def decoder(nnx: tp.Any) -> tuple[tuple[tp.Any, ...], tp.Callable[..., tp.Any]]:
    """A small decoder with a cache, and the body of one step of decoding."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=True, rngs=rngs)
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            x = x + self.attention(self.norm(x))
            return x + nnx.relu(self.dense(x))

    class Decoder(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(32, WIDTH, rngs=rngs)
            self.layers = nnx.List([Layer(rngs) for _ in range(4)])
            for layer in self.layers:
                layer.attention.init_cache((1, 64, WIDTH))

        def __call__(self, token):
            x = self.embed(token)
            for layer in self.layers:
                x = layer(x)
                # Decoding goes round and round, so that the benchmark may run as long as it likes.
                layer.attention.cache_index[...] = layer.attention.cache_index[...] % 63
            return self.embed.attend(x)

    def body(model, token):
        return jnp.argmax(model(token), axis=-1)

    return (Decoder(nnx.Rngs(0)),), body


@case("loops", "decoding with a cache, batch 1", Budget(1.1, "limit"))
def decoding():
    """One token goes in, the next comes out."""
    token = jnp.zeros((1, 1), jnp.int32)

    def ours(name: str):
        nnx = library(name)
        return Calls(jitted(nnx, *decoder(nnx), token))

    return {
        "limit": lambda: Calls(carried(lambda: decoder(library("nnxlite")), token)),
        "nnxlite": lambda: ours("nnxlite"),
        "flax": lambda: ours("flax"),
    }


# Structure that changes in each step ----------------------------------------------------------------


@case("loops", "sow in each step and pop after it", Budget(1 / 5, "flax"))
def sowing():
    """The structure of the model changes twice in each step."""

    def ours(name: str):
        nnx = library(name)

        class Sower(nnx.Module):
            def __init__(self, rngs):
                self.stack = block_stack(nnx, 8)

            def __call__(self, x):
                y = self.stack(x)
                self.sow(nnx.Intermediate, "mean", jnp.mean(y))
                return y

        model = Sower(nnx.Rngs(0))
        step = nnx.jit(lambda model, x: model(x))

        def run():
            y = step(model, X)
            sown = nnx.pop(model, nnx.Intermediate)
            return jax.block_until_ready((y, sown["mean"]))

        return Calls(run)

    return {"nnxlite": lambda: ours("nnxlite"), "flax": lambda: ours("flax")}


@case("loops", "a fresh optimizer in each step", Budget(1 / 5, "flax"))
def fresh_optimizer():
    """An optimizer is built for each step, as in meta-learning."""

    def ours(name: str):
        nnx = library(name)
        model = block_stack(nnx, 8)
        step = nnx.jit(train_body(nnx))

        def run():
            optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)
            return step(model, optimizer, X, Y).block_until_ready()

        return Calls(run)

    return {"nnxlite": lambda: ours("nnxlite"), "flax": lambda: ours("flax")}
