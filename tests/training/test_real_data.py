"""Small training runs that reach a stated figure on data that was not made for these tests.

The figures leave room for other versions of JAX: a run that only just reaches one is a bad run.
"""

from __future__ import annotations

import importlib

import jax
import numpy as np
import optax
import pytest

import nnxlite as nnx


@pytest.fixture(scope="module", autouse=True)
def optimizations():
    """These programs run thousands of times."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


# Scans of handwritten digits -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits():
    """1,000 scans for training and 500 for the figure, (8, 8), from 0 to 1, and their labels."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))[:1500]
    images = (data.images[order] / 16).astype(np.float32)
    labels = data.target[order].astype(np.int32)
    return (images[:1000], labels[:1000]), (images[1000:], labels[1000:])


class CNN(nnx.Module):
    """Two convolutions with batch normalisation, and dropout before the classes."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.second = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.norm(self.first(images[..., None]))), (2, 2), (2, 2))
        x = nnx.max_pool(nnx.relu(self.second(x)), (2, 2), (2, 2))
        return self.head(self.dropout(x.reshape(len(x), -1)))


class Flat(nnx.Module):
    """An MLP over the 64 pixels."""

    def __init__(self, rngs: nnx.Rngs):
        self.mlp = nnx.MLP(64, 10, 64, 2, activation=nnx.gelu, dropout_rate=0.1, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.mlp(images.reshape(len(images), -1))


class Rows(nnx.Module):
    """A recurrent network that reads an image row by row; its last output tells the class."""

    def __init__(self, cell: nnx.RNNCellBase, rngs: nnx.Rngs):
        self.rnn = nnx.RNN(cell)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.head(self.rnn(images)[:, -1])


def classification(model, images, labels):
    """The loss, and what the metrics need."""
    logits = model(images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), (losses, logits)


@nnx.jit
def train_step(model, optimizer, metrics, images, labels):
    (_, (losses, logits)), grads = nnx.value_and_grad(classification, has_aux=True)(
        model, images, labels
    )
    optimizer.update(model, grads)
    metrics.update(loss=losses, logits=logits, labels=labels)


@nnx.jit
def evaluate(model, metrics, images, labels):
    _, (losses, logits) = classification(model, images, labels)
    metrics.update(loss=losses, logits=logits, labels=labels)


@pytest.mark.parametrize(
    ("make", "epochs", "figure"),
    [
        pytest.param(CNN, 6, 0.93, id="CNN"),
        pytest.param(Flat, 8, 0.94, id="MLP"),
        pytest.param(lambda rngs: Rows(nnx.LSTMCell(8, 32, rngs=rngs), rngs), 10, 0.88, id="LSTM"),
        pytest.param(lambda rngs: Rows(nnx.GRUCell(8, 32, rngs=rngs), rngs), 8, 0.9, id="GRU"),
    ],
)
def test_handwritten_digits_are_told_apart(digits, make, epochs, figure):
    (images, labels), held_out = digits
    model = make(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    draw = np.random.default_rng(1)

    losses = []
    model.train()
    for _ in range(epochs):
        metrics.reset()
        for batch in draw.permutation(len(images)).reshape(-1, 50):
            train_step(model, optimizer, metrics, images[batch], labels[batch])
        losses.append(float(metrics.compute()["loss"]))
    assert losses[-1] < losses[0] / 3
    assert int(optimizer.step[...]) == epochs * 20

    model.eval()
    metrics.reset()
    evaluate(model, metrics, *held_out)
    assert float(metrics.compute()["accuracy"]) > figure


# English text --------------------------------------------------------------------------------------

LENGTH = 32


@pytest.fixture(scope="module")
def text():
    """Windows of the documentation of Python's statements: for training, and for the figure.

    Letters are numbers below 64, whatever the version of Python: rare ones share the last number.
    """
    topics = importlib.import_module("pydoc_data.topics").topics
    letters = " ".join("".join(topics[name] for name in sorted(topics)).lower().split())[:200_000]
    common = sorted(set(letters), key=lambda letter: (-letters.count(letter), letter))
    number = {letter: min(place, 63) for place, letter in enumerate(common)}
    numbers = np.array([number[letter] for letter in letters], np.int32)
    windows = numbers[: len(numbers) // LENGTH * LENGTH].reshape(-1, LENGTH)
    windows = np.random.default_rng(3).permutation(windows)
    return windows[:-500], windows[-500:]


class Recurrent(nnx.Module):
    """Letters through a GRU; the table of letters serves as the output layer too."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Embed(64, 48, rngs=rngs)
        self.rnn = nnx.RNN(nnx.GRUCell(48, 48, rngs=rngs))

    def __call__(self, letters: jax.Array) -> jax.Array:
        return self.table.attend(self.rnn(self.table(letters)))


class Attentive(nnx.Module):
    """A block of causal attention with an MLP, both beside the main path."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Embed(64, 48, rngs=rngs)
        self.places = nnx.Param(0.1 * rngs.params.normal((LENGTH, 48)))
        self.before = nnx.LayerNorm(48, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 48, decode=False, rngs=rngs)
        self.between = nnx.RMSNorm(48, rngs=rngs)
        self.mlp = nnx.MLP(48, 48, 96, 1, activation=nnx.gelu, rngs=rngs)

    def __call__(self, letters: jax.Array) -> jax.Array:
        x = self.table(letters) + self.places[: letters.shape[-1]]
        x = x + self.attention(self.before(x), is_causal=True)
        return self.table.attend(x + self.mlp(self.between(x)))


def next_letter(model, windows):
    """The mean negative logarithm of the probability of each letter after the first."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(windows[:, :-1]), windows[:, 1:])
    return losses.mean()


@nnx.jit
def next_letter_step(model, optimizer, windows):
    optimizer.update(model, nnx.grad(next_letter)(model, windows))


def by_frequency(windows, held_out):
    """What a letter costs that is guessed by frequency: alone, and by the letter before it."""
    alone, pairs = np.bincount(windows.ravel(), minlength=64) + 1.0, np.ones((64, 64))
    np.add.at(pairs, (windows[:, :-1].ravel(), windows[:, 1:].ravel()), 1)
    before, after = held_out[:, :-1], held_out[:, 1:]
    cost_alone = -np.log(alone / alone.sum())[after].mean()
    return cost_alone, -np.log(pairs / pairs.sum(1, keepdims=True))[before, after].mean()


@pytest.mark.parametrize("make", [Recurrent, Attentive])
def test_a_letter_of_english_is_foretold_by_those_before_it(text, make):
    windows, held_out = text
    model = make(nnx.Rngs(0))
    schedule = optax.cosine_decay_schedule(1e-2, 400)
    transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
    draw = np.random.default_rng(2)
    for _ in range(400):
        next_letter_step(model, optimizer, windows[draw.integers(len(windows), size=32)])

    loss = float(nnx.jit(next_letter)(model, held_out))
    alone, after_another = by_frequency(windows, held_out)
    assert loss < alone - 1.0
    assert loss < after_another - 0.3
