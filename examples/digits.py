"""Train a small convolutional network on real handwritten digits, look at it, save it, load it.

The 1,797 scans of 8 x 8 pixels ship inside scikit-learn; a fifth of them is the test set.

    python examples/digits.py            # well under two minutes on two CPU cores
    python examples/digits.py --quick    # a few seconds, and a weaker network

Result: a test accuracy of at least 99 %; with `--quick`, at least 95 %. The output folder gets
`digits.png`, with curves and misread digits, and `digits.npz`, the trained network.
"""

import jax
import numpy as np
import optax
from _common import BLUE, RED, options, picture
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nnxlite as nnx

BATCH = 32


class Network(nnx.Module):
    """Images (batch, 8, 8, 1) to logits (batch, 10)."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(64, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(2 * 2 * 64, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
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
def eval_step(model, metrics, images, labels) -> jax.Array:
    """The probabilities (batch, 10)."""
    loss, logits = loss_fn(model, images, labels)
    metrics.update(loss=loss, logits=logits, labels=labels)
    return nnx.softmax(logits)


def main() -> None:
    run = options(__doc__)
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype("float32").reshape(-1, 8, 8, 1)
    split = lambda x, y, share: train_test_split(x, y, test_size=share, stratify=y, random_state=0)
    images, test, labels, test_labels = split(images, labels, 0.2)
    images, valid, labels, valid_labels = split(images, labels, 0.1)

    model = Network(nnx.Rngs(0))
    epochs, steps = 3 if run.quick else 15, len(labels) // BATCH
    schedule = optax.cosine_onecycle_schedule(epochs * steps, 0.01)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=1e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    order, curves = np.random.default_rng(0), {"train": [], "validation": []}
    for epoch in range(1, epochs + 1):
        model.train()
        for rows in order.permutation(len(labels))[: steps * BATCH].reshape(steps, BATCH):
            train_step(model, optimizer, metrics, images[rows], labels[rows])
        curves["train"].append(jax.tree.map(float, metrics.compute()))
        metrics.reset()
        model.eval()
        eval_step(model, metrics, valid, valid_labels)
        curves["validation"].append(jax.tree.map(float, metrics.compute()))
        metrics.reset()
        last = [(name, curve[-1]) for name, curve in curves.items()]
        texts = [f"{name} {x['loss']:.3f} {100 * x['accuracy']:5.1f} %" for name, x in last]
        print(f"epoch {epoch:2}: {'  '.join(texts)}")

    probs = np.asarray(eval_step(model, metrics, test, test_labels))
    flat = nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat)))
    path = run.out / "digits.npz"
    np.savez(path, **{"/".join(key): variable[...] for key, variable in flat})
    loaded = nnx.view(Network(nnx.Rngs(1)), deterministic=True, use_running_average=True)
    with np.load(path) as file:
        arrays = {tuple(name.split("/")): file[name] for name in file}
    nnx.update(loaded, nnx.from_flat_state(arrays))
    assert np.array_equal(probs, eval_step(loaded, metrics, test, test_labels))

    read = probs.argmax(-1)
    with picture(run.out / "digits.png", 11, 4.6) as figure:
        left, right = figure.subfigures(1, 2, wspace=0.04)
        for axes, name in zip(left.subplots(2, 1, sharex=True), ("loss", "accuracy")):
            for (part, curve), colour in zip(curves.items(), (BLUE, RED)):
                values = [row[name] for row in curve]
                axes.plot(range(1, epochs + 1), values, "o-", color=colour, label=part, ms=3)
            axes.set(ylabel=name, xlabel="epoch")
        axes.legend()
        misread_first = np.lexsort((probs[np.arange(len(read)), test_labels], read == test_labels))
        for axes, i in zip(right.subplots(3, 4).flat, misread_first):
            axes.imshow(test[i, :, :, 0], cmap="gray_r")
            axes.set_title(f"{test_labels[i]} read as {read[i]}, {probs[i].max():.0%}", size=8)
            axes.axis("off")
    count = int((read == test_labels).sum())
    print(f"network, loaded again with identical predictions: {path}")
    print(f"test accuracy {100 * count / len(read):.2f} % ({count} of {len(read)})")


if __name__ == "__main__":
    main()
