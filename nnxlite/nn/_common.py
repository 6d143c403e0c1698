"""Shared by several families of layers: parameters, checks, products, shapes, random keys, modes."""

from __future__ import annotations

import operator
import types
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nnxlite._base.errors import short_type
from nnxlite._base.jax import as_integer
from nnxlite.nn import initializers
from nnxlite.nn.dtypes import Dtype, PromoteDtypeFn
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.lora_kernel import weight_of
from nnxlite.objects._fields import data
from nnxlite.objects._module import Module, layer_name
from nnxlite.objects._rngs import Rngs, RngStream
from nnxlite.variables._kinds import Param
from nnxlite.variables._variable import Variable

Metadata = tp.Mapping[str, tp.Any]
"""Keyword arguments for the Variable of a parameter."""

NO_METADATA: tp.Final[Metadata] = types.MappingProxyType({})

Precision = tp.Any
"""None, a name such as "highest", a `jax.lax.Precision`, a pair of these, or a dot algorithm."""

OutSharding = tp.Any
"""A `NamedSharding` or `PartitionSpec` for the output, or None."""

Axes = int | tp.Sequence[int]

Padding = str | int | tp.Sequence[int | tuple[int, int]]
Pads = str | tuple[tuple[int, int], ...]


def value_of(parameter: Variable[jax.Array] | None) -> jax.Array | None:
    """The array of an optional parameter."""
    return None if parameter is None else parameter[...]


def params_key(layer: tp.Any, rngs: tp.Any) -> jax.Array:
    """The next key of the stream "params"; raises AttributeError where `rngs` has no streams.

    Args:
        layer: the layer, or the name of a function that adds to one.
        rngs: its source of keys.
    """
    try:
        stream = rngs.params
    except AttributeError:
        if isinstance(rngs, Rngs):  # its own error names the missing stream
            raise
        name = layer if isinstance(layer, str) else type(layer).__name__
        raise AttributeError(
            f"{name}: `rngs` must be an Rngs, such as rngs=nnx.Rngs(0); got {short_type(rngs)}."
        ) from None
    return stream()


def new_param(
    layer: tp.Any,
    rngs: tp.Any,
    init: Initializer,
    shape: tp.Sequence[int],
    dtype: Dtype,
    metadata: Metadata,
    kind: type[Variable[tp.Any]] = Param,
) -> tp.Any:
    """A parameter of a layer, made by its initializer."""
    return kind(init(params_key(layer, rngs), shape, dtype), **metadata)


class Arguments:
    """The arguments of a layer's constructor: `Arguments(self, locals())`, as its first statement.

    The constructors of one family take the same long list of options.  This passes them on as a
    whole, and makes parameters and attributes by the naming rules that all layers follow:

        {name}_init, {name}_metadata   how the parameter `name` is made, in `param_dtype`
        use_{name}                     False: the layer does not have this parameter
        rngs, keep_rngs                random keys and streams; not attributes
        anything else                  becomes the attribute of the same name
    """

    __slots__ = ("layer", "values")

    def __init__(self, layer: tp.Any, values: tp.Mapping[str, tp.Any]) -> None:
        self.layer = layer
        self.values = {k: v for k, v in values.items() if k not in ("self", "__class__")}

    def parameter(
        self, name: str, shape: tp.Sequence[int] | None, init: Initializer | None = None
    ) -> tp.Any:
        """A new parameter, or None (as data) if the layer does not have it or its shape is None.

        Args:
            name: the name of the parameter.
            shape: its shape.
            init: an initializer to use in place of `{name}_init`.
        """
        values = self.values
        if shape is None or not values.get(f"use_{name}", True):
            return data(None)
        made_by, metadata = init or values[f"{name}_init"], values[f"{name}_metadata"]
        dtype, rngs = values["param_dtype"], values["rngs"]
        return new_param(self.layer, rngs, made_by, shape, dtype, metadata)

    def sizes(self, *names: str) -> tuple[int, ...]:
        """The arguments of these names, each of them a size."""
        return tuple(check_size(self.layer, name, self.values[name]) for name in names)

    def passed_on(self, *names: str, prefix: str = "") -> dict[str, tp.Any]:
        """Arguments for another constructor, by the names that they have without the prefix."""
        return {name: self.values[prefix + name] for name in names}

    def set_attributes(self, *without: str, **replaced: tp.Any) -> None:
        """Set the attributes, in the order of the signature.

        Args:
            *without: names of arguments that do not become attributes.
            **replaced: values to use in place of the arguments.
        """
        for name, value in {**self.values, **replaced}.items():
            if name.endswith(("_init", "_metadata", "rngs")) or name in without:
                continue
            setattr(self.layer, name, value)


class AffineLayer(Module):
    """A layer that multiplies its input by a kernel and adds a bias."""

    kernel: Param[jax.Array]
    bias: Param[jax.Array] | None
    dtype: Dtype | None
    param_dtype: Dtype
    precision: Precision
    promote_dtype: PromoteDtypeFn
    preferred_element_type: Dtype | None


def promoted(layer: tp.Any, inputs: tp.Any) -> tuple[tp.Any, ...]:
    """Input, kernel without an adapter, and bias (or None) in the dtype of the computation."""
    arrays = (inputs, weight_of(layer.kernel), value_of(layer.bias))
    return layer.promote_dtype(arrays, dtype=layer.dtype)


class FrozenMapping(tp.Mapping[tp.Any, tp.Any]):
    """A hashable mapping, which can be a static attribute.

    >>> from nnxlite.nn._common import FrozenMapping
    >>> FrozenMapping({0: 5})
    FrozenMapping({0: 5})
    """

    __slots__ = ("_items",)

    def __init__(self, items: tp.Mapping[tp.Any, tp.Any] = NO_METADATA) -> None:
        self._items = dict(items)

    def __getitem__(self, key: tp.Any) -> tp.Any:
        return self._items[key]

    def __iter__(self) -> tp.Iterator[tp.Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"FrozenMapping({self._items!r})"


def check_size(layer: tp.Any, name: str, value: tp.Any) -> int:
    """`value` as a size; raises TypeError unless it is a whole number, zero or more."""
    try:
        size = operator.index(value)
    except TypeError:
        size = -1
    if size < 0:
        raise TypeError(
            f"{layer_name(layer)}: `{name}` must be a whole number, zero or more, got {value!r}."
        )
    return size


def name_of(caller: tp.Any) -> str:
    """The name of a layer in a message; that of a function is given as it is."""
    return caller if isinstance(caller, str) else layer_name(caller)


def check_rate(caller: tp.Any, name: str, rate: tp.Any, *, below_one: bool = True) -> None:
    """Raise unless `rate` is a probability; a traced one is not looked at.

    Args:
        caller: the layer, or the name of the function.
        name: of the argument.
        rate: its value.
        below_one: whether one is refused.

    Raises:
        TypeError: for anything but a number.
        ValueError: for a number outside the range, NaN among them.
    """
    try:
        number = None if isinstance(rate, str) else float(rate)
    except jax.errors.ConcretizationTypeError:
        return
    except (TypeError, ValueError):
        number = None
    if number is not None and 0 <= number <= 1 and not (below_one and number == 1):
        return
    span = "[0, 1)" if below_one else "[0, 1]"
    kind = TypeError if number is None else ValueError
    raise kind(
        f"{name_of(caller)}: `{name}` must be a probability in the range {span}, got {rate!r}."
    )


def check_sizes(layer: tp.Any, name: str, values: Axes) -> tuple[int, ...]:
    """One or several sizes as a tuple."""
    values = without_numpy(values)
    if isinstance(values, tp.Sequence) and not isinstance(values, str):
        return tuple(check_size(layer, name, v) for v in values)
    return (check_size(layer, name, values),)


def as_tuple(values: Axes) -> tuple[int, ...]:
    """One or several axes as a tuple."""
    values = without_numpy(values)
    return tuple(values) if isinstance(values, tp.Sequence) else (values,)


def without_numpy(values: tp.Any) -> tp.Any:
    """A NumPy array as a list of numbers; any other value unchanged."""
    return values.tolist() if isinstance(values, np.ndarray) else values


def padding_of(caller: tp.Any, padding: tp.Any, names: tuple[str, ...], rank: int) -> Pads:
    """Padding as one of the names, or a pair of numbers for each of `rank` axes.

    Args:
        caller: the layer, or the name of the function.
        padding: a name, one number for all, or a number or pair of numbers for each axis.
        names: the names that are known.
        rank: the number of spatial axes.

    Raises ValueError for anything else.
    """
    given = without_numpy(as_integer(padding))
    if isinstance(given, str):
        if given.upper() in names:
            return given.upper()
    elif isinstance(given, int):
        return ((given, given),) * rank
    elif isinstance(given, tp.Sequence) and len(given) == rank:
        pairs = [(p, p) if isinstance(p, int) else p for p in map(as_integer, given)]
        if all(isinstance(p, tp.Sequence) and len(p) == 2 for p in pairs):
            return tuple((p[0], p[1]) for p in pairs)
    raise ValueError(
        f"{name_of(caller)}: Invalid padding format: {padding!r}, should be "
        f"{'one of ' if names else ''}{''.join(f'{name}, ' for name in names)}a number, or a number or "
        f"pair of numbers for each of the {rank} spatial axes."
    )


def feature_mismatch(layer: tp.Any, inputs: tp.Any, kernel: tp.Any, name: str = "kernel") -> str:
    """The message for inputs whose last axis does not match the second-last axis of a parameter."""
    shape, expected = tuple(inputs.shape), kernel.shape[-2]
    got = f"{shape[-1]} on its last axis" if shape else "no axis at all"
    stacked = (
        " It looks like a stack of layers: map over it with nnx.vmap, or loop with nnx.scan."
        if kernel.ndim > 2
        else ""
    )
    return (
        f"{layer_name(layer)} expects {expected} feature(s) on the last axis of its input: "
        f"`{name}` has shape {tuple(kernel.shape)}; got an input of shape {shape}, with {got}.{stacked}"
    )


_DEFAULTS = tuple(
    (module, name, getattr(module, name))
    for module, name in ((lax, "dot_general"), (lax, "conv_general_dilated"), (jnp, "einsum"))
)


def current(fun: tp.Any) -> tp.Any:
    """`fun`, or, if it is the default of a layer, what JAX currently has under its name.

    Some libraries replace functions of JAX temporarily; a default argument would still refer to
    the original.
    """
    for module, name, default in _DEFAULTS:
        if fun is default:
            return getattr(module, name)
    return fun


def product_options(layer: tp.Any, out_sharding: OutSharding) -> dict[str, tp.Any]:
    """The options of a layer's product.

    `preferred_element_type` is among them only if it is set: replacements of JAX's products may lack it.
    """
    options = {"precision": layer.precision, "out_sharding": out_sharding}
    dtype = layer.preferred_element_type
    return options if dtype is None else options | {"preferred_element_type": dtype}


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """`y + bias` along the last axes of `y`; `y` itself if `bias` is None."""
    if bias is None:
        return y
    return y + broadcastable(bias, (1,) * (y.ndim - bias.ndim) + bias.shape)


def broadcastable(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x` reshaped to `shape`, or unchanged if JAX adds the missing leading axes itself.

    Differentiating a reshape costs more than the addition after it. `jax_numpy_rank_promotion` may
    forbid that; then `x` is reshaped.
    """
    added = len(shape) - x.ndim
    rank_promotion = jax.config.jax_numpy_rank_promotion  # pyright: ignore[reportAttributeAccessIssue]
    if rank_promotion == "allow" and (1,) * added + x.shape == shape:
        return x
    return lax.reshape(x, shape)


# Shapes


def broadcast_shape(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that arrays of these shapes broadcast to; None if they do not.

    >>> from nnxlite.nn._common import broadcast_shape
    >>> broadcast_shape((3, 1), (4,)), broadcast_shape((3,), (4,))
    ((3, 4), None)
    """
    try:
        return jnp.broadcast_shapes(*shapes)
    except ValueError:
        return None


def broadcasts_to(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether an array of the one shape broadcasts to the other.

    >>> from nnxlite.nn._common import broadcasts_to
    >>> broadcasts_to((3, 1), (3, 4)), broadcasts_to((3, 4), (3, 1))
    (True, False)
    """
    return broadcast_shape(shape, full) == full


# Random keys

KeySource = Rngs | RngStream | jax.Array
"""Several streams, of which one is chosen by name; one stream; or the key itself."""

KEYLESS: tp.Final = (initializers.zeros, initializers.ones)
"""Initializers that ignore their key, so that none has to be drawn."""


def own_stream(layer: tp.Any, rngs: Rngs | RngStream | None, name: str) -> RngStream | None:
    """The stream of a layer: forked from the stream `name` of `rngs`, or from `rngs` itself.

    Raises:
        AttributeError: if `rngs` does not have this stream.
        TypeError: if `rngs` is of another type.
    """
    if isinstance(rngs, Rngs):
        return getattr(rngs, name).fork()
    if isinstance(rngs, RngStream):
        return rngs.fork()
    if rngs is None:
        return None
    raise TypeError(
        f"{type(layer).__name__}: `rngs` must be an Rngs, such as rngs=nnx.Rngs(0), an RngStream or "
        f"None; got {short_type(rngs)}."
    )


def draw_key(
    layer: tp.Any,
    given: KeySource | None,
    own: RngStream | None,
    name: str,
    purpose: str,
    keep: str,
) -> jax.Array:
    """A key for one call: from its argument, or else from the layer's own stream.

    Args:
        layer: the layer, for messages.
        given: the argument of the call.
        own: the stream of the layer.
        name: the stream to draw from if there are several.
        purpose: why a key is needed, as a sentence.
        keep: the argument of the constructor that gives the layer a stream of its own.

    Raises:
        ValueError: if there is neither.
        AttributeError: if the source does not have this stream.
        TypeError: if the source is of another type.
    """
    source = own if given is None else given
    if isinstance(source, Rngs):
        return getattr(source, name)()
    if isinstance(source, RngStream):
        return source()
    if isinstance(source, jax.Array):
        return source
    kind = type(layer).__name__
    if source is None:
        raise ValueError(
            f"{layer_name(layer)}: {purpose}. Pass a key, or streams, with the call (rngs=...), or "
            f"let the layer keep a stream ({kind}(..., {keep}))."
        )
    raise TypeError(
        f"{layer_name(layer)}: `rngs` must be an Rngs, an RngStream or a key, got {short_type(source)}."
    )


# Modes.  A mode (`deterministic`, `decode`, ...) is a static attribute, so that `train`,
# `eval` and `view` can set it.  An argument of the call takes precedence; None means "not set".

M = tp.TypeVar("M")

SET_BY_TRAIN: tp.Final = ("deterministic", "use_running_average")
"""The modes that `Module.train` and `Module.eval` set."""


def resolve_mode(layer: tp.Any, name: str, given: M | None, own: M | None) -> M:
    """The mode `name` of a layer: the argument of the call if there is one, else the attribute.

    Raises ValueError, which explains both, if neither is set.
    """
    if given is not None:
        return given
    if own is not None:
        return own
    kind = type(layer).__name__
    ways = f"`model.set_attributes({name}=False)`"
    if name in SET_BY_TRAIN:
        ways = "`model.train()`, `model.eval()`"
    raise ValueError(
        f"{layer_name(layer)}: No `{name}` argument was provided to {kind}, and none is set. Pass "
        f"`{name}=...` to the call, give it to the constructor ({kind}(..., {name}=...)), or "
        f"set it on a whole model with {ways} or `nnx.view(model, {name}=...)`."
    )


def wide(x: jax.Array) -> jax.Array:
    """`x` in float32 or better: in smaller dtypes sums and squares overflow, or lose digits."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
