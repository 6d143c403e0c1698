"""Modules made of modules, `Sequential` and `MLP`; and `Identity`, which returns its input."""

from __future__ import annotations

import itertools
import types
import typing as tp

import jax

from nnxlite._base.jax import R
from nnxlite.boundary._call_def import parameters_of
from nnxlite.nn._common import Arguments
from nnxlite.nn.activations import identity, relu
from nnxlite.nn.linear import Linear
from nnxlite.objects._containers import List
from nnxlite.objects._module import Module, layer_name
from nnxlite.objects._rngs import Rngs

__all__ = ["Identity", "MLP", "Sequential"]


class Sequential(Module, tp.Generic[R]):
    """Calls functions or modules one after the other, each with the result of the previous one.

    A tuple becomes the positional arguments of the next function, a dict its keyword arguments, any
    other result its only argument.  Keyword arguments of the call are passed to every function that
    has a parameter of that name.  Without functions, `Sequential` returns its arguments.

    Args:
        *fns: the functions or modules.

    Attributes:
        layers: List of the functions.

    Raises:
        TypeError: when called, if a layer is not callable, or if a keyword argument comes both from
            the call and from the previous layer.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> rngs = nnx.Rngs(0)
    >>> model = nnx.Sequential(nnx.Linear(3, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 2, rngs=rngs))
    >>> model(jnp.ones((5, 3))).shape
    (5, 2)
    """

    if not tp.TYPE_CHECKING:  # any number of parameters, for annotations
        __class_getitem__ = classmethod(types.GenericAlias)

    @tp.overload
    def __init__(
        self, *fns: *tuple[*tuple[tp.Callable[..., tp.Any], ...], tp.Callable[..., R]]
    ) -> None: ...
    @tp.overload
    def __init__(  # pyright: ignore[reportOverlappingOverload] - for `Sequential(*layers)`
        self, *fns: tp.Callable[..., R]
    ) -> None: ...
    def __init__(self, *fns: tp.Callable[..., tp.Any]) -> None:
        self.layers = List(fns)

    def __iter__(self) -> tp.Iterator[tp.Callable[..., tp.Any]]:
        """The functions, in order."""
        return iter(self.layers)

    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> R:
        """The result of the last function.

        Args:
            args, kwargs: arguments of the first function; each further one gets the result of the
                one before.
        """
        output: tp.Any = args[0] if len(args) == 1 else args or kwargs or None
        positional: tuple[tp.Any, ...] = args
        named: dict[str, tp.Any] = {}
        for index, layer in enumerate(self.layers):
            if not callable(layer):
                hint = ""
                if isinstance(layer, (list, tuple, List)):
                    hint = " Sequential takes the functions one by one: nnx.Sequential(*layers)."
                raise TypeError(
                    f"{layer_name(self)}: layers[{index}] is not callable, it is of type "
                    f"{type(layer).__name__}.{hint}"
                )
            options = _accepted(layer, kwargs) if kwargs else {}
            twice = sorted(named.keys() & options.keys())
            if twice:
                raise TypeError(
                    f"{layer_name(self)}: layers[{index}] gets the keyword argument(s) {twice} both "
                    "from the call and from the layer before."
                )
            output = layer(*positional, **named, **options)
            positional, named = (output,), {}
            if isinstance(output, tuple):
                positional = output
            elif isinstance(output, dict):
                positional, named = (), output
        return output  # pyright: ignore[reportReturnType] - the last function returned it


def _accepted(fun: tp.Callable[..., tp.Any], options: dict[str, tp.Any]) -> dict[str, tp.Any]:
    """The options for which `fun` has a parameter."""
    parameters = parameters_of(fun) or ()  # builtins may have no signature
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return options
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in options.items() if name in named}


class Identity(Module):
    """Returns its input.

    Args:
        args, kwargs: ignored, as are further arguments of a call.

    >>> import nnxlite as nnx
    >>> nnx.Identity()(3)
    3
    """

    def __init__(self, *args: tp.Any, **kwargs: tp.Any) -> None:
        pass

    def __call__(self, x: tp.Any, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        """The input itself.

        Args:
            x: anything.
            args, kwargs: ignored.
        """
        return x


class MLP(Module):
    """A multilayer perceptron: `depth` hidden layers of `width` features, and an output layer.

    Maps `(..., in_features)` to `(..., out_features)`.  A hidden layer is a `Linear`, then the
    activation; the output layer is a `Linear`, then `final_activation`.  With depth zero there is only
    the output layer.

    Args:
        in_features, out_features: sizes of the last axis before and after.
        width: number of features of a hidden layer.
        depth: number of hidden layers.
        activation, final_activation: functions or modules; all hidden layers share one module.
        use_bias, use_final_bias: whether the hidden layers and the output layer have a bias.
        rngs: the stream "params" is drawn layer by layer (kernel, then bias).
        **options: further arguments of every `Linear`, such as `dtype` or `kernel_init`.

    Attributes:
        layers: List of depth + 1 Linears.

    Raises:
        TypeError: for a size that is not a whole number, or an input of another size.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> mlp = nnx.MLP(3, 2, width=16, depth=2, rngs=nnx.Rngs(0))
    >>> mlp(jnp.ones((5, 3))).shape, len(mlp.layers)
    ((5, 2), 3)
    """

    layers: List[Linear]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        width: int,
        depth: int,
        *,
        activation: tp.Callable[[tp.Any], tp.Any] = relu,
        final_activation: tp.Callable[[tp.Any], tp.Any] = identity,
        use_bias: bool = True,
        use_final_bias: bool = True,
        rngs: Rngs,
        **options: tp.Any,
    ) -> None:
        Arguments(self, locals()).sizes("in_features", "out_features", "width", "depth")
        self.in_features = in_features
        self.out_features = out_features
        self.width = width
        self.depth = depth
        self.activation = activation
        self.final_activation = final_activation
        self.layers = List()
        sizes = (in_features, *(width for _ in range(depth)), out_features)
        for index, (rows, columns) in enumerate(itertools.pairwise(sizes)):
            bias = use_final_bias if index == depth else use_bias
            self.layers.append(Linear(rows, columns, use_bias=bias, rngs=rngs, **options))

    def __call__(self, x: jax.Array) -> jax.Array:
        """The image of `x`, (..., in_features) -> (..., out_features).

        Args:
            x: array whose last axis has the size `in_features`.
        """
        for index in range(self.depth):
            x = self.activation(self.layers[index](x))
        return self.final_activation(self.layers[-1](x))
