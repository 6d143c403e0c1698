"""A row of the catalogue: how a layer is made and called."""

from __future__ import annotations

import functools
import inspect
import typing as tp

import jax.numpy as jnp
import numpy as np

import nnxlite as nnx
from tests.nn.quick import quick

X = ((2, 3, 4),)


def call(layer, *inputs):
    """A plain call."""
    return layer(*inputs)


class Layer(tp.NamedTuple):
    """A layer in one setting.

    Attributes:
        make: makes it from streams, for a `lib`; also takes `param_dtype` and `dtype` if it has `types`.
        inputs: shapes of floating inputs, or arrays of anything else.
        run: how the layer is called.
        everywhere: whether it is in `LAYERS`; then it has one input.
        peer: whether the reference gives the same values.
        batched: whether the first axis of the first input is a batch of independent examples.
        unbatched: whether the layer takes an example without that axis.
        smooth: whether gradients are those of the function: a layer may take a part for constant.
        stateless: whether a call leaves the layer as it was.
        types: whether the layer has dtypes.
    """

    make: tp.Callable[..., tp.Any]
    inputs: tuple[tp.Any, ...] = X
    run: tp.Callable[..., tp.Any] = call
    everywhere: bool = False
    peer: bool = True
    batched: bool = True
    unbatched: bool = False
    smooth: bool = True
    stateless: bool = True
    types: bool = True

    @property
    def x(self):
        """The input of a row that has one."""
        (x,) = self.arrays("float32")
        return x

    def arrays(self, dtype):
        """The inputs."""
        rng = np.random.default_rng(0)
        return tuple(
            jnp.asarray(rng.normal(size=x), dtype) if isinstance(x, tuple) else jnp.asarray(x)
            for x in self.inputs
        )

    def made(self, lib=nnx, **dtypes):
        """The layer, with random parameters and statistics."""
        layer = self.make(lib.Rngs(0), lib, **(dtypes if self.types else {}))
        rng = np.random.default_rng(0)
        for path, variable in lib.to_flat_state(lib.state(layer)):
            if not isinstance(variable, (lib.Param, lib.BatchStat)):
                continue
            value = rng.uniform(-0.7, 0.7, variable.shape)
            if path[-1] in ("scale", "var"):
                value = value + 1.2
            elif path[-1] == "sigma":
                value = np.ones(())
            if value.size:
                variable.set_value(jnp.asarray(value, variable.dtype))
        return layer


INITS = (
    *("kernel_init", "bias_init", "recurrent_kernel_init", "embedding_init", "scale_init"),
    *("a_initializer", "b_initializer"),
)


def of(name, *args, **options):
    """A maker of a layer with quick initializers."""
    known = inspect.signature(getattr(nnx, name)).parameters
    options = {**{init: quick for init in INITS if init in known}, **options}

    def make(rngs, lib=nnx, **types):
        streams = {"rngs": rngs} if "rngs" in known else {}
        return getattr(lib, name)(*args, **options, **types, **streams)

    return make


def function(name, inputs, *args, **options):
    """A row of a function, which is the one layer of a Sequential."""

    def make(rngs, lib=nnx):
        return lib.Sequential(functools.partial(getattr(lib, name), *args, **options))

    return Layer(make, inputs, types=False, unbatched=True)
