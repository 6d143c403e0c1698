"""The rules by which docs/migrating moves weights give the outputs of the libraries they come from."""

import jax
import numpy as np
import pytest

import nnxlite as nnx

RNGS = nnx.Rngs(0)


def close(ours, theirs):
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=1e-5, rtol=1e-4)


def noise(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype("float32")


def test_layers_of_linen_have_the_same_parameters():
    linen = pytest.importorskip("flax.linen")
    attention = nnx.MultiHeadAttention(2, 6, decode=False, rngs=RNGS)
    convolution = nnx.Conv(3, 4, (3, 3), strides=2, rngs=RNGS)
    cases = [
        (linen.Dense(4), nnx.Linear(3, 4, rngs=RNGS), noise(2, 3)),
        (linen.Conv(4, (3, 3), strides=2), convolution, noise(2, 7, 7, 3)),
        (linen.BatchNorm(use_running_average=False), nnx.BatchNorm(3, rngs=RNGS), noise(6, 3)),
        (linen.LayerNorm(), nnx.LayerNorm(3, rngs=RNGS), noise(2, 3)),
        (linen.GroupNorm(2), nnx.GroupNorm(4, 2, rngs=RNGS), noise(2, 3, 4)),
        (linen.Embed(7, 4), nnx.Embed(7, 4, rngs=RNGS), np.array([1, 5])),
        (linen.MultiHeadDotProductAttention(2), attention, noise(2, 4, 6)),
    ]
    for theirs, ours, x in cases:
        variables = jax.tree.map(lambda p: p + 0.1, theirs.init(jax.random.key(0), x))
        for collection in variables.values():
            nnx.update(ours, collection)
        y, new = theirs.apply(variables, x, mutable=["batch_stats"])
        close(ours(x), y)
        for name, kind in ("params", nnx.Param), ("batch_stats", nnx.BatchStat):
            pure = nnx.to_pure_dict(nnx.state(ours, kind))
            jax.tree.map(close, pure, {**variables, **new}.get(name, {}))

    x = noise(2, 4, 3)
    theirs = linen.RNN(linen.LSTMCell(5))
    params = theirs.init(jax.random.key(0), x)["params"]
    (layers,) = params.values()
    cell = nnx.LSTMCell(3, 5, rngs=RNGS)
    nnx.update(cell, {"if_" if name == "if" else name: layers[name] for name in layers})
    close(nnx.RNN(cell)(x), theirs.apply({"params": params}, x))


def test_layers_of_torch():
    torch = pytest.importorskip("torch")

    array = lambda tensor: tensor.detach().numpy()
    x = noise(2, 3)
    theirs, ours = torch.nn.Linear(3, 4), nnx.Linear(3, 4, rngs=RNGS)
    ours.kernel[...], ours.bias[...] = array(theirs.weight).T, array(theirs.bias)
    close(ours(x), array(theirs(torch.tensor(x))))

    x = noise(2, 3, 8, 8)
    theirs = torch.nn.Conv2d(3, 4, 3, stride=2, padding=1)
    ours = nnx.Conv(3, 4, (3, 3), strides=2, padding=1, rngs=RNGS)
    ours.kernel[...] = array(theirs.weight).transpose(2, 3, 1, 0)
    ours.bias[...] = array(theirs.bias)
    close(ours(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2), array(theirs(torch.tensor(x))))

    x = noise(2, 4, 3)
    theirs = torch.nn.LSTM(3, 5, batch_first=True)
    cell = nnx.OptimizedLSTMCell(3, 5, rngs=RNGS)
    cell.dense_i.kernel[...] = array(theirs.weight_ih_l0).T
    cell.dense_h.kernel[...] = array(theirs.weight_hh_l0).T
    cell.dense_h.bias[...] = array(theirs.bias_ih_l0 + theirs.bias_hh_l0)
    close(nnx.RNN(cell)(x), array(theirs(torch.tensor(x))[0]))

    x = noise(6, 4)
    options = {"epsilon": 1e-5, "rngs": RNGS}
    for theirs, ours in (
        (torch.nn.LayerNorm(4), nnx.LayerNorm(4, **options)),
        (torch.nn.GroupNorm(2, 4), nnx.GroupNorm(4, 2, use_fast_variance=False, **options)),
        (torch.nn.BatchNorm1d(4), nnx.BatchNorm(4, momentum=0.9, **options)),
    ):
        close(ours(x), array(theirs(torch.tensor(x))))
    close(ours.mean[...], array(theirs.running_mean))
    close((ours.var[...] - 0.9) * 6 / 5 + 0.9, array(theirs.running_var))  # of a sample
    close(nnx.gelu(x, approximate=False), array(torch.nn.functional.gelu(torch.tensor(x))))


def test_layers_of_equinox():
    eqx = pytest.importorskip("equinox")
    key = jax.random.key(0)
    x = noise(3)
    theirs, ours = eqx.nn.Linear(3, 4, key=key), nnx.Linear(3, 4, rngs=RNGS)
    ours.kernel[...], ours.bias[...] = theirs.weight.T, theirs.bias
    close(ours(x), theirs(x))
    x = noise(3, 8, 8)
    theirs = eqx.nn.Conv2d(3, 4, 5, key=key)
    ours = nnx.Conv(3, 4, (5, 5), padding="VALID", rngs=RNGS)
    assert theirs.bias.shape == (4, 1, 1)
    ours.kernel[...], ours.bias[...] = theirs.weight.transpose(2, 3, 1, 0), theirs.bias.ravel()
    close(ours(x.transpose(1, 2, 0)).transpose(2, 0, 1), theirs(x))
    close(nnx.LayerNorm(3, epsilon=1e-5, rngs=RNGS)(x[:, 0, 0]), eqx.nn.LayerNorm(3)(x[:, 0, 0]))
    assert eqx.nn.Embedding(7, 4, key=key).weight.shape == (7, 4)
