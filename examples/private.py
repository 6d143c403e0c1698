"""A transform and a Variable of your own: train with differential privacy.

`private_grad` is `nnx.grad` for data that must not be recognisable in the model: it takes the gradient
of each example by `nnx.vmap`, clips it, and adds noise to the sum (Abadi et al. 2016, arXiv:1607.00133).
Built of the library's transforms, it works like one of them, with any module and under `nnx.jit`. The
privacy that was spent is a Variable of a new kind: a filter selects it, the compiled step writes it.

    python examples/private.py            # a few seconds on two CPU cores
    python examples/private.py --quick    # half the steps

Result: at least 90 % of the test scans are read correctly with an epsilon of 3 (delta 1e-4), at least
96 % by the same network without privacy; with --quick, 85 % and 94 %.
"""

import math
import typing as tp

import jax
import jax.numpy as jnp
import optax
from _common import curves, options
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nnxlite as nnx

EPSILON, DELTA = 3.0, 1e-4


class Spent(nnx.Variable):
    """Privacy that was spent, as rho of concentrated differential privacy, which adds up."""

    def epsilon(self, delta: float) -> float:
        """By Proposition 1.3 of Bun and Steinke (2016), arXiv:1605.02065."""
        rho = float(self[...])
        return rho + 2 * math.sqrt(rho * math.log(1 / delta))


class Mechanism(nnx.Module):
    """Noise for sums of vectors of a norm up to `clip`, and the account of what it has cost."""

    def __init__(self, noise: float, clip: float, rngs: nnx.Rngs):
        self.noise, self.clip = noise, clip
        self.spent = Spent(jnp.zeros(()))
        self.rngs = rngs

    def mean(self, examples: tp.Any) -> tp.Any:
        """The noisy mean of a tree of arrays (examples, ...), each example cut to the norm."""
        norms = jax.vmap(optax.tree.norm)(examples)
        weights = jnp.minimum(1.0, self.clip / jnp.maximum(norms, 1e-12))

        def noisy(x: jax.Array) -> jax.Array:
            total = jnp.tensordot(weights, x, 1)
            return (total + self.noise * self.clip * self.rngs.normal(total.shape)) / len(weights)

        self.spent[...] += 1 / (2 * self.noise**2)
        return jax.tree.map(noisy, examples)


def private_grad(loss_fn: tp.Callable[..., jax.Array]) -> tp.Callable[..., nnx.State]:
    """`nnx.grad` of a loss of a model and one example, for a whole batch and with privacy."""

    def grads(model: nnx.Module, mechanism: Mechanism, *batch: jax.Array) -> nnx.State:
        in_axes = (None, *[0] * len(batch))
        return mechanism.mean(nnx.vmap(nnx.grad(loss_fn), in_axes=in_axes)(model, *batch))

    return grads


def loss_fn(model: nnx.MLP, image: jax.Array, label: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(image), label).mean()


@nnx.jit
def train_step(model, optimizer, mechanism, images, labels) -> None:
    """One step on all scans; without a mechanism, an ordinary one."""
    if mechanism is None:
        grads = nnx.grad(loss_fn)(model, images, labels)
    else:
        grads = private_grad(loss_fn)(model, mechanism, images, labels)
    optimizer.update(model, grads)


@nnx.jit
def accuracy(model: nnx.MLP, images, labels) -> jax.Array:
    return 100 * (model(images).argmax(-1) == labels).mean()


def main() -> None:
    run = options(__doc__)
    pixels, labels = load_digits(return_X_y=True)
    images, test, labels, test_labels = train_test_split(
        (pixels / 16).astype("float32"), labels, test_size=0.2, stratify=labels, random_state=0
    )
    steps = 40 if run.quick else 80
    rho = (math.sqrt(math.log(1 / DELTA) + EPSILON) - math.sqrt(math.log(1 / DELTA))) ** 2
    mechanism = Mechanism(math.sqrt(steps / (2 * rho)), clip=1.0, rngs=nnx.Rngs(1))
    series: dict[str, list[float]] = {}
    for name, chosen in (("without privacy", None), (f"epsilon {EPSILON:g}", mechanism)):
        model = nnx.MLP(64, 10, 64, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(2e-2), wrt=nnx.Param)
        series[name] = []
        for _ in range(steps):
            train_step(model, optimizer, chosen, images, labels)
            series[name].append(float(accuracy(model, test, test_labels)))

    curves(run.out / "private.png", series, "step", "test scans read correctly (%)")
    ordinary, private = (values[-1] for values in series.values())
    print(
        f"test accuracy {private:.1f} % with epsilon {mechanism.spent.epsilon(DELTA):.2f}, "
        f"{ordinary:.1f} % without privacy"
    )


if __name__ == "__main__":
    main()
