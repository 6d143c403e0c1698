"""Messages of layers say where in the model that was called the layer is."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.nn.catalogue import LAYERS

RNGS = nnx.Rngs(0)


class Net(nnx.Module):
    """Layers in a list; the last one is called with too many features, by a function."""

    def __init__(self, layer):
        self.blocks = nnx.List([nnx.Identity(), nnx.Sequential(nnx.relu, layer)])
        self.parent = self  # a circle is no obstacle

    def __call__(self, x):
        call = lambda block, x: block(x)
        for block in self.blocks:
            x = call(block, x)
        return x


X = jnp.ones((2, 3, 5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nnx.Linear(4, 2, rngs=RNGS), "expects 4 feature"),
        (lambda: nnx.Embed(4, 2, rngs=RNGS), ": Input type must be an integer"),
        (lambda: nnx.Conv(4, 2, (3,), rngs=RNGS), "expects an input of shape"),
        (lambda: nnx.BatchNorm(4, rngs=RNGS), "was made for 4 feature"),
        (lambda: nnx.GroupNorm(4, 2, rngs=RNGS), "was made for 4 feature"),
        (lambda: nnx.MultiHeadAttention(2, 4, decode=False, rngs=RNGS), ": Incompatible input dim"),
        (lambda: nnx.MultiHeadAttention(1, 5, decode=True, rngs=RNGS), ": Autoregressive cache"),
        (lambda: nnx.Dropout(0.5), ": `deterministic` is False, but no `rngs`"),
        (lambda: nnx.Dropout(0.5, deterministic=None), ": No `deterministic` argument was"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_path_of_a_layer(make, message):
    layer = make()
    where = rf"{type(layer).__name__} at `blocks\.1\.layers\.1` of Net"
    for call in (Net.__call__, nnx.jit(Net.__call__)):
        with pytest.raises((TypeError, ValueError), match=f"^{where} ?{message}"):
            call(Net(layer), X)


def test_the_model_is_the_outermost_object():
    layer = nnx.Linear(4, 2, rngs=RNGS)
    with pytest.raises(TypeError, match=r"^Linear expects"):
        layer(X)
    with pytest.raises(TypeError, match=r"^Linear at `layers\.1\.blocks\.1\.layers\.1` of Sequent"):
        nnx.Sequential(nnx.Identity(), Net(layer))(X)


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (nnx.RNN(nnx.GRUCell(4, 2, rngs=RNGS)), {}, "^Linear at `dense_i` of GRUCell expects 4"),
        (
            nnx.MultiHeadAttention(1, 5, decode=False, rngs=RNGS),
            {"mask": jnp.ones((2, 1, 3, 4), bool)},
            r"a mask of shape \(2, 1, 3, 4\), which does not broadcast",
        ),
    ],
    ids=["RNN", "MultiHeadAttention"],
)
def test_errors_of_what_a_layer_calls_name_the_layer_too(layer, options, message):
    def run(model):
        return model.inner(X, **options)

    with pytest.raises((TypeError, ValueError), match=message) as caught:
        nnx.jit(run)(nnx.Dict(inner=layer))
    where = f"This was called by {type(layer).__name__} at `inner` of Dict."
    assert where in caught.value.__notes__


def draws(name):
    """Whether a layer needs random streams."""
    rngs = inspect.signature(getattr(nnx, name.split(",")[0])).parameters.get("rngs")
    return rngs is not None and rngs.default is inspect.Parameter.empty


@pytest.mark.parametrize("name", [*filter(draws, LAYERS)])
def test_a_number_or_key_in_place_of_streams(name):
    """The class of the error is that of Python, where something without streams is asked for one."""
    message = r"^\w+: `rngs` must be an Rngs, such as rngs=nnx\.Rngs\(0\); got "
    for given in (0, jax.random.key(0), None):
        with pytest.raises(AttributeError, match=message):
            LAYERS[name].make(given)
