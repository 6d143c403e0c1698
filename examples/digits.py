"""Train a small convolutional network on real handwritten digits, look at it, save it, load it.

The 1,797 scans of 8 x 8 pixels ship inside scikit-learn, so nothing is downloaded. One fifth of
them is the test set, never seen in training; a tenth of the rest gives the validation figures.

    python examples/digits.py            # well under two minutes on two CPU cores
    python examples/digits.py --quick    # a few seconds, and a weaker network

Result: a test accuracy of at least 99 %; with `--quick`, at least 95 %. The output folder gets
`digits.png`, which shows how training went and which digits are misread, and `digits.npz`, the
trained network.
"""

from __future__ import annotations

import jax
import numpy as np
import optax
from _common import BLUE, RED, options, picture
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nnxlite as nnx

BATCH = 32


class Network(nnx.Module):
    """Two rounds of convolution, normalisation and pooling, and one linear layer on top."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(64, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(2 * 2 * 64, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Images (batch, 8, 8, 1) to logits (batch, 10)."""
        x = nnx.max_pool(nnx.relu(self.norm1(self.conv1(images))), (2, 2), strides=(2, 2))
        x = nnx.max_pool(nnx.relu(self.norm2(self.conv2(x))), (2, 2), strides=(2, 2))
        return self.head(self.dropout(x.reshape(x.shape[0], -1)))


def loss_fn(model: Network, images, labels) -> tuple[jax.Array, jax.Array]:
    logits = model(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits


@nnx.jit
def train_step(model, optimizer, metrics, images, labels) -> None:
    """One step of gradient descent; model, optimizer and metrics change in place."""
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, images, labels)
    optimizer.update(model, grads)
    metrics.update(loss=loss, logits=logits, labels=labels)


@nnx.jit
def eval_step(model, metrics, images, labels) -> None:
    loss, logits = loss_fn(model, images, labels)
    metrics.update(loss=loss, logits=logits, labels=labels)


@nnx.jit
def probabilities(model: Network, images) -> jax.Array:
    return nnx.softmax(model(images))


def load_splits():
    """Training, validation and test scans: pairs of images (count, 8, 8, 1) and labels (count,)."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype("float32").reshape(-1, 8, 8, 1)
    labels = labels.astype("int32")
    rest, test, rest_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    train, valid, train_labels, valid_labels = train_test_split(
        rest, rest_labels, test_size=0.1, stratify=rest_labels, random_state=0
    )
    return (train, train_labels), (valid, valid_labels), (test, test_labels)


def train(model: Network, train_set, valid_set, epochs: int, seed: int) -> list[dict[str, float]]:
    """Train in place; loss and accuracy of each epoch, in training and validation."""
    images, labels = train_set
    steps = len(labels) // BATCH
    schedule = optax.cosine_onecycle_schedule(epochs * steps, 0.01)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=1e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    order = np.random.default_rng(seed)
    history = []
    for epoch in range(1, epochs + 1):
        model.train()
        for rows in order.permutation(len(labels))[: steps * BATCH].reshape(steps, BATCH):
            train_step(model, optimizer, metrics, images[rows], labels[rows])
        row = {f"train_{name}": float(value) for name, value in metrics.compute().items()}
        metrics.reset()
        model.eval()
        eval_step(model, metrics, *valid_set)
        row |= {f"valid_{name}": float(value) for name, value in metrics.compute().items()}
        metrics.reset()
        history.append(row)
        print(
            f"epoch {epoch:2}: train {row['train_loss']:.3f} {100 * row['train_accuracy']:5.1f} %"
            f"  validation {row['valid_loss']:.3f} {100 * row['valid_accuracy']:5.1f} %"
        )
    return history


def draw(history, probs, test_set, path) -> None:
    """Curves of loss and accuracy, and the digits that were misread or the closest calls."""
    images, labels = test_set
    certainty = probs[np.arange(len(labels)), labels]
    right = probs.argmax(-1) == labels
    with picture(path, 11, 4.6) as figure:
        left, middle = figure.subfigures(1, 2, wspace=0.04)
        for axes, name in zip(left.subplots(2, 1, sharex=True), ("loss", "accuracy")):
            for part, colour in (("train", BLUE), ("valid", RED)):
                values = [row[f"{part}_{name}"] for row in history]
                axes.plot(range(1, len(history) + 1), values, "o-", color=colour, label=part, ms=3)
            axes.set(ylabel=name, xlabel="epoch")
        axes.legend()
        places = np.lexsort((certainty, right))
        for axes, i in zip(middle.subplots(3, 4).flat, places):
            axes.imshow(images[i, :, :, 0], cmap="gray_r")
            axes.set(xticks=[], yticks=[])
            title = f"{labels[i]} read as {probs[i].argmax()}" if not right[i] else f"{labels[i]}"
            axes.set_title(f"{title}, {100 * probs[i].max():.0f} %", fontsize=8)


def save(model: Network, path) -> None:
    """Every parameter and statistic under its path in the model, such as `conv1/kernel`."""
    flat = nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat)))
    np.savez(path, **{"/".join(key): np.asarray(variable[...]) for key, variable in flat})


def load(model: Network, path) -> None:
    flat = nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat)))
    with np.load(path) as file:
        loaded = [(key, variable.replace(file["/".join(key)])) for key, variable in flat]
    nnx.update(model, nnx.from_flat_state(loaded))


def main() -> None:
    run = options(__doc__)
    train_set, valid_set, test_set = load_splits()
    model = Network(nnx.Rngs(run.seed))
    history = train(model, train_set, valid_set, 3 if run.quick else 15, run.seed)
    probs = np.asarray(probabilities(model, test_set[0]))

    save(model, run.out / "digits.npz")
    loaded = nnx.view(Network(nnx.Rngs(run.seed + 1)), deterministic=True, use_running_average=True)
    load(loaded, run.out / "digits.npz")
    assert np.array_equal(probs, probabilities(loaded, test_set[0]))

    draw(history, probs, test_set, run.out / "digits.png")
    right = int((probs.argmax(-1) == test_set[1]).sum())
    print(f"curves and misread digits: {run.out / 'digits.png'}")
    print(f"network, loaded again with identical predictions: {run.out / 'digits.npz'}")
    print(f"test accuracy {100 * right / len(probs):.2f} % ({right} of {len(probs)})")


if __name__ == "__main__":
    main()
