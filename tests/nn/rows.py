"""A row of the catalogue: how a layer is made and called, and what it computes."""

from __future__ import annotations

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
        make: makes it from streams; also takes `lib`, and `param_dtype` and `dtype` if it has `types`.
        inputs: shapes of floating inputs, or arrays of anything else.
        formula: the result in float64, of the parameters by path and the inputs; None: it is random.
        run: how the layer is called.
        everywhere: whether it is in `LAYERS`; then it has one input.
        batched: whether the first axis of the first input is a batch of independent examples.
        unbatched: whether the layer takes an example without that axis.
        smooth: whether gradients are those of the formula: a layer may take a part for constant.
        stateless: whether a call leaves the layer as it was.
        half: how many units of rounding of a half dtype the result may be off, where it is of size 1.
        types: whether the layer has dtypes.
        wide: when half inputs have a float32 result: "half" where parameters are half as well,
            "mixed" where the layer only computes in half.
    """

    make: tp.Callable[..., tp.Any]
    inputs: tuple[tp.Any, ...] = X
    formula: tp.Callable[..., tp.Any] | None = None
    run: tp.Callable[..., tp.Any] = call
    everywhere: bool = False
    batched: bool = True
    unbatched: bool = False
    smooth: bool = True
    stateless: bool = True
    half: float = 4
    types: bool = True
    wide: str = ""

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

    def made(self, **dtypes):
        """The layer, with random parameters and statistics."""
        layer = self.make(nnx.Rngs(0), **(dtypes if self.types else {}))
        rng = np.random.default_rng(0)
        state = nnx.to_flat_state(nnx.state(layer, (nnx.Param, nnx.BatchStat)))
        for path, variable in state:
            value = rng.uniform(-0.7, 0.7, variable.shape)
            if path[-1] in ("scale", "var"):
                value = value + 1.2
            elif path[-1] == "sigma":
                value = np.ones(())
            if value.size:
                variable.set_value(jnp.asarray(value, variable.dtype))
        return layer

    def computed(self, layer, inputs):
        """What the formula gives for a layer before it is called."""
        parameters = {
            ".".join(map(str, path)): np.asarray(leaf.get_value(), np.float64)
            for path, leaf in nnx.to_flat_state(nnx.state(layer))
            if isinstance(leaf, nnx.Variable) and not isinstance(leaf, nnx.RngState)
        }
        wide = [
            np.asarray(x, "f8" if jnp.issubdtype(x.dtype, jnp.floating) else None) for x in inputs
        ]
        return self.formula(parameters, *wide)


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


def function(run, inputs, formula, **more):
    """A row of a function, whose layer has no parameters."""
    call = lambda _, *inputs: run(*inputs)
    return Layer(lambda rngs, lib=nnx: lib.Dict(), inputs, formula, call, types=False, **more)


def at(p, prefix):
    """The parameters of a part."""
    return {path.removeprefix(prefix): v for path, v in p.items() if path.startswith(prefix)}
