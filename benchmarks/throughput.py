"""How fast whole programs run beside their peers: `python -m benchmarks.throughput --help`.

Made for an accelerator, where the device computes while Python prepares the next step.  A run takes
a batch of steps and waits once, for the last result.  All contenders start from the same values, and
the results of their first steps are compared with those of `limit`, plain JAX.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib
import itertools
import json
import time
import typing as tp
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import programs
from benchmarks.harness import Build, Calls, Case, Pace, Spread, measure
from benchmarks.loops import by_hand
from benchmarks.models import WIDTH, library, train_body, with_adam
from benchmarks.programs import HALF, Sizes, Values
from benchmarks.report import machine, spread_text

FIRST = 3
"""The steps whose results are compared."""

Step = Callable[[], tp.Any]


@dataclass
class Workload:
    """Work of `units` in each of `steps` steps, and who does it.

    A builder returns a function that takes a step and returns the loss; or with `whole`, one that
    takes all steps and returns a result of each, or of the first and the last.
    """

    name: str
    unit: str
    steps: int
    units: int
    tolerance: float
    build: Callable[[], Mapping[str, Callable[[], Step]]]
    whole: bool = False
    first: dict[str, list[float]] = field(default_factory=dict)

    def case(self, deadline: float) -> Case:
        """The case that `measure` takes; after `deadline` no more contenders are built."""

        def contenders() -> dict[str, Build]:
            return {
                name: functools.partial(built, name, make) for name, make in self.build().items()
            }

        def built(name: str, make: Callable[[], Step]) -> Calls:
            if time.monotonic() > deadline:
                raise TimeoutError("no time was left for it")
            step = make()
            if self.whole:
                results = itertools.islice(step(), FIRST)
                run = lambda: jax.block_until_ready(step())
            else:
                results = (step() for _ in range(FIRST))
                run = lambda: jax.block_until_ready([step() for _ in range(self.steps)][-1])
            self.first[name] = [float(np.ravel(result)[0]) for result in results]
            return Calls(run, units=self.steps * self.units)

        return Case("throughput", self.name, contenders)


def copies(values: Values) -> Values:
    """The values on the device, in arrays of their own."""
    return {name: jnp.array(value) for name, value in values.items()}


# Training ----------------------------------------------------------------------------------------


def training(
    name: str,
    build: Callable[[tp.Any], tp.Any],
    values: Values,
    tx: optax.GradientTransformation,
    loss_of: Callable[..., jax.Array],
    batch: tuple[jax.Array, ...],
) -> Step:
    """A step of the modules of `nnxlite` or `flax`, which donates as its users would."""
    nnx = library(name)
    model = programs.modules(nnx, lambda: build(nnx), values)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    donated = {"donate": "written"} if name == "nnxlite" else {"donate_argnums": (0, 1)}
    step = nnx.jit(programs.train_step(nnx, loss_of), **donated)
    return lambda: step(model, optimizer, *batch)


def plain_training(
    values: Values,
    tx: optax.GradientTransformation,
    loss_of: Callable[..., tuple[jax.Array, Values]],
    batch: tuple[jax.Array, ...],
) -> Step:
    """The same in plain JAX; `loss_of` also returns new values of what is not trained."""
    trained = {n: v for n, v in copies(values).items() if n.split(".")[-1] not in ("mean", "var")}
    other = {n: v for n, v in copies(values).items() if n not in trained}

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(trained, other, state, *batch):
        grad = jax.value_and_grad(lambda p: loss_of({**p, **other}, *batch), has_aux=True)
        (loss, other), grads = grad(trained)
        updates, state = tx.update(grads, state, trained)
        return optax.apply_updates(trained, updates), other, state, loss

    carry = trained, other, tx.init(trained)

    def run():
        nonlocal carry
        *carry, loss = step(*carry, *batch)
        return loss

    return run


def equinox_training(sizes: Sizes, values: Values, tx: tp.Any, tokens: jax.Array) -> Step:
    """The transformer in Equinox, cast to half precision in the loss."""
    eqx: tp.Any = importlib.import_module("equinox")
    model = programs.equinox_transformer(eqx, sizes, values)
    state = tx.init(eqx.filter(model, eqx.is_array))

    def loss_of(model, tokens):
        half = lambda x: x.astype(HALF) if eqx.is_inexact_array(x) else x
        return programs.next_token_loss(jax.vmap(jax.tree.map(half, model))(tokens), tokens)

    @eqx.filter_jit(donate="all-except-first")
    def step(tokens, model, state):
        loss, grads = eqx.filter_value_and_grad(loss_of)(model, tokens)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    def run():
        nonlocal model, state
        model, state, loss = step(tokens, model, state)
        return loss

    return run


def transformer_training(sizes: Sizes, batch: int, steps: int) -> Workload:
    """Tokens a second of training a transformer with AdamW."""

    def build():
        shape = batch, sizes.length
        tokens = jnp.array(np.random.default_rng(1).integers(0, sizes.vocabulary, shape, np.int32))
        tx = optax.adamw(3e-4)
        values = programs.initial(
            library("nnxlite"), lambda: programs.transformer(library("nnxlite"), sizes)
        )

        def modules(name, **attention):
            model = lambda nnx: programs.transformer(nnx, sizes, **attention)
            return training(name, model, values, tx, programs.next_token_loss, (tokens,))

        def plain_loss(p, tokens):
            return programs.next_token_loss(
                programs.plain_logits(p, tokens, sizes.layers), tokens
            ), {}

        return {
            "limit": lambda: plain_training(values, tx, plain_loss, (tokens,)),
            "nnxlite": lambda: modules("nnxlite"),
            "nnxlite, cudnn": lambda: modules("nnxlite", implementation="cudnn"),
            "flax": lambda: modules("flax"),
            "equinox": lambda: equinox_training(sizes, values, tx, tokens),
        }

    return Workload("train a transformer", "tokens/s", steps, batch * sizes.length, 0.005, build)


def residual_training(
    widths: programs.Stages, blocks: int, batch: int, pixels: int, steps: int
) -> Workload:
    """Images a second of training a residual network with momentum."""

    def build():
        generator = np.random.default_rng(1)
        images = jnp.array(generator.standard_normal((batch, pixels, pixels, 3), np.float32))
        labels = jnp.array(generator.integers(0, 10, batch, np.int32))
        tx = optax.sgd(0.01, momentum=0.9)
        model = lambda nnx: programs.residual(nnx, widths, blocks)
        values = programs.initial(library("nnxlite"), lambda: model(library("nnxlite")))
        data = images, labels

        def plain_loss(p, images, labels):
            logits, new = programs.plain_residual(p, images)
            return programs.cross_entropy(logits, labels), new

        loss = programs.cross_entropy
        return {
            "limit": lambda: plain_training(values, tx, plain_loss, data),
            "nnxlite": lambda: training("nnxlite", model, values, tx, loss, data),
            "flax": lambda: training("flax", model, values, tx, loss, data),
        }

    return Workload("train a residual network", "images/s", steps, batch, 0.02, build)


def small_training(layers: int, steps: int) -> Workload:
    """Steps a second where dispatch is all: each layer has 14 arrays, and there are two counts."""
    generator = np.random.default_rng(1)
    x, y = (jnp.array(generator.standard_normal((4, WIDTH), np.float32)) for _ in range(2))

    def modules(name):
        nnx = library(name)
        objects = with_adam(nnx, layers)
        step = nnx.jit(train_body(nnx))
        return lambda: step(*objects, x, y)

    def plain():
        nnx = library("nnxlite")
        step, leaves = by_hand(nnx, train_body(nnx), with_adam(nnx, layers))
        return lambda: step(leaves, x, y)

    contenders = {
        "limit": plain,
        "nnxlite": lambda: modules("nnxlite"),
        "flax": lambda: modules("flax"),
    }
    name = f"train an MLP of {14 * layers + 2} arrays"
    return Workload(name, "steps/s", steps, 1, 1e-3, lambda: contenders)


# Decoding ----------------------------------------------------------------------------------------


def decoding_by_steps(name: str, sizes: Sizes, values: Values, batch: int, new: int) -> Step:
    """A jitted step for each token, which writes the caches of the modules."""
    nnx = library(name)
    model = programs.modules(nnx, lambda: programs.transformer(nnx, sizes), values)
    model.set_attributes(decode=True, raise_if_not_found=False)
    for layer in model.layers:
        layer.attention.init_cache((batch, new, sizes.width), HALF)
    donated = {"donate": "written"} if name == "nnxlite" else {"donate_argnums": 0}
    step = nnx.jit(programs.decode_step, **donated)

    def run():
        for layer in model.layers:
            layer.attention.cache_index.set_value(jnp.zeros((), jnp.int32))
        token, position = jnp.zeros(batch, jnp.int32), jnp.zeros((), jnp.int32)
        found = []
        for _ in range(new):
            token, log_prob, position = step(model, token, position)
            found.append(log_prob)
        return [*found[:FIRST], token]

    return run


def generating(sizes: Sizes, values: Values, batch: int, new: int) -> Step:
    """`nnx.generate`, one program."""
    nnx = library("nnxlite")
    model = programs.modules(nnx, lambda: programs.transformer(nnx, sizes), values)
    prompt = np.zeros((batch, 1), np.int32)
    return lambda: nnx.generate(model, prompt, new).log_probs[0]


def plain_decoding(loop: bool, sizes: Sizes, values: Values, batch: int, new: int) -> Step:
    """The same in plain JAX: a jitted step for each token, or one program with a loop."""
    p = copies(values)
    start = jnp.zeros(batch, jnp.int32), jnp.zeros((), jnp.int32)

    @jax.jit
    def looped(p, token, position):
        def body(i, carry):
            cache, token, position, found = carry
            cache, token, log_prob, position = programs.plain_decode_step(p, cache, token, position)
            return cache, token, position, found.at[i].set(log_prob[0])

        carry = programs.plain_cache(sizes, batch, new), token, position, jnp.zeros(new)
        return jax.lax.fori_loop(0, new, body, carry)[-1]

    step = jax.jit(programs.plain_decode_step, donate_argnums=1)

    def stepped():
        cache, (token, position), found = programs.plain_cache(sizes, batch, new), start, []
        for _ in range(new):
            cache, token, log_prob, position = step(p, cache, token, position)
            found.append(log_prob)
        return [*found[:FIRST], token]

    return (lambda: looped(p, *start)) if loop else stepped


def decoding(sizes: Sizes, batch: int, new: int) -> Workload:
    """Tokens a second after a prompt of one token."""

    def build():
        nnx = library("nnxlite")
        values = programs.initial(nnx, lambda: programs.transformer(nnx, sizes))
        size = sizes, values, batch, new
        return {
            "limit": lambda: plain_decoding(True, *size),
            "limit, by steps": lambda: plain_decoding(False, *size),
            "nnxlite": lambda: generating(*size),
            "nnxlite, by steps": lambda: decoding_by_steps("nnxlite", *size),
            "flax, by steps": lambda: decoding_by_steps("flax", *size),
        }

    name = f"decode {new} tokens, batch {batch}"
    return Workload(name, "tokens/s", new, batch, 0.005, build, whole=True)


# The command line --------------------------------------------------------------------------------

PARTS: dict[str, Callable[[bool], list[Workload]]] = {
    "transformer": lambda quick: [
        transformer_training(TINY, 2, 2) if quick else transformer_training(Sizes(), 16, 10)
    ],
    "decoding": lambda quick: [
        decoding(TINY, batch, 4) if quick else decoding(Sizes(), batch, 256) for batch in (1, 32)
    ],
    "small": lambda quick: [
        small_training(1, 2) if quick else small_training(layers, 20) for layers in (5, 50)
    ][: 1 if quick else 2],
    "residual": lambda quick: [
        residual_training((4, 8), 1, 4, 8, 2)
        if quick
        else residual_training((64, 128, 256), 2, 512, 32, 20)
    ],
}
TINY = Sizes(layers=1, width=16, heads=2, vocabulary=32, length=8)


def measured(workload: Workload, rounds: int, deadline: float) -> dict[str, tp.Any]:
    """The figures of a workload, by contender."""
    start = time.monotonic()
    result = measure(workload.case(deadline), Pace(rounds=rounds, batch=0.0, warm_calls=1))
    contenders: dict[str, dict[str, tp.Any]] = {}
    for name, samples in result.samples.items():
        rate = Spread.of(1 / sample for sample in samples)
        of_limit = result.ratio("limit", name)
        contenders[name] = {
            "rate": vars(rate).copy(),
            "of_limit": None if of_limit is None else of_limit.median,
            "first": workload.first[name],
            "agrees": agrees(workload, name),
            "recompiled": name in result.recompiled,
        }
    return {
        "workload": workload.name,
        "unit": workload.unit,
        "contenders": contenders,
        "failed": result.failed,
        "seconds": time.monotonic() - start,
    }


def agrees(workload: Workload, name: str) -> bool | None:
    """Whether the first results are those of `limit`; None where there are none of it."""
    if "limit" not in workload.first:
        return None
    limit = workload.first["limit"]
    return bool(np.allclose(workload.first[name], limit, rtol=workload.tolerance, atol=1e-6))


def print_figures(figures: dict[str, tp.Any]) -> None:
    """A line for each contender: the rate, its spread, its share of `limit`'s, the first results."""
    print(f"\n{figures['workload']} ({figures['unit']}; {figures['seconds']:.0f} s to measure)")
    for name, row in figures["contenders"].items():
        rate = spread_text(Spread(**row["rate"]), lambda x: f"{x:,.0f}" if x > 100 else f"{x:.3g}")
        share = "" if row["of_limit"] is None else f"{row['of_limit']:.2f} of limit"
        verdict = "  OTHER RESULTS" if row["agrees"] is False else ""
        verdict += "  compiled again while it was timed" if row["recompiled"] else ""
        first = " ".join(f"{x:.5g}" for x in row["first"])
        print(f"  {name:18}{rate:>18}  {share:14}  {first}{verdict}")
    for name, reason in figures["failed"].items():
        print(f"  {name:18}failed: {reason}")


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; the status is 1 where nnxlite has no figure, or results that differ."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput", description="Throughput of whole programs."
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that all works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--only", action="append", choices=PARTS, help="measure this part")
    parser.add_argument("--rounds", type=int, default=3, help="at least 2; default: 3")
    parser.add_argument(
        "--seconds", type=float, default=600, help="build nothing more after this; default: 600"
    )
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error(f"argument --rounds: at least 2, not {options.rounds}")
    deadline = time.monotonic() + options.seconds
    for peer in ("flax.nnx", "equinox"):
        with contextlib.suppress(ImportError):
            importlib.import_module(peer)  # now: a later import makes JAX compile all again
    content = {"date": f"{datetime.date.today()}", "machine": machine(), "workloads": []}
    print(content["date"], *(f"{k} {v}" for k, v in content["machine"].items()), sep=", ")
    for part in options.only or PARTS:
        for workload in PARTS[part](options.quick):
            figures = measured(workload, options.rounds, deadline)
            print_figures(figures)
            content["workloads"].append(figures)
            if options.json:  # after each, so that a run cut short leaves what it has
                options.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(not all(map(is_sound, content["workloads"])))


def is_sound(figures: dict[str, tp.Any]) -> bool:
    """Whether nnxlite has a figure, and all who have one had the same results."""
    rows = figures["contenders"]
    return "nnxlite" in rows and all(row["agrees"] is not False for row in rows.values())


if __name__ == "__main__":
    raise SystemExit(main())
