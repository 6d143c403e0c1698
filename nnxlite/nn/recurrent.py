"""Recurrent networks: `RNN` and `Bidirectional`, which run cells over sequences.

`RNN` runs a cell along the time axis of its input, starting from the carry that the cell's
`initialize_carry` makes.  Any module can be a cell; it may write Variables and draw from random
streams, with the same effect as in a Python loop over the positions.  The carry keeps its dtype.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from nnxlite._base.errors import short_type
from nnxlite.boundary._labels import Carry, StateAxes
from nnxlite.filters import All, Filter
from nnxlite.graph._functional import variables
from nnxlite.nn._common import KeySource, broadcasts_to, own_stream
from nnxlite.nn.recurrent_cells import RNNCellBase
from nnxlite.nn.recurrent_cells import modified_orthogonal as modified_orthogonal
from nnxlite.objects._fields import data
from nnxlite.objects._module import Module, note_layer
from nnxlite.objects._rng_scopes import split_rngs
from nnxlite.objects._rngs import Rngs, RngStream
from nnxlite.transforms._loops import scan
from nnxlite.variables._kinds import RngState

__all__ = ["Bidirectional", "RNN"]

_logger = logging.getLogger(__name__)


class Keywords(tp.TypedDict, total=False):
    """The options of a call of `RNN` or `Bidirectional`, but for `return_carry`."""

    initial_carry: tp.Any
    seq_lengths: jax.Array | None
    time_major: bool | None
    reverse: bool | None
    keep_order: bool | None
    rngs: KeySource | None


class RNN(Module):
    """Runs a cell along the time axis of its input.

    Args:
        cell: the cell.
        time_major: the time axis comes first; otherwise it comes before the features.
        return_carry: return the last carry as well.
        reverse: run from the end to the start.
        keep_order: with `reverse`, return the outputs in the order of the inputs; otherwise they
            are in the order in which they were computed.
        unroll: how many steps make one iteration of the compiled loop.
        state_axes: how the cell's Variables pass through the loop, by filter: `Carry` (the default
            for all) if each step gets what the previous one left, None if all steps read the same
            value and none writes it, or the axis along which each step has its own value.
        broadcast_rngs: a filter of random streams from which every step draws the same keys; the
            streams themselves advance by one draw.
        rngs: the source of keys for the carry: True for a stream of its own that starts from seed
            0, an Rngs to fork the stream "carry" from, a stream to draw from, or False for none.

    Attributes:
        cell: the cell.
        rngs: an `RngStream`, or None.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> layer = nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)), return_carry=True)
    >>> carry, outputs = layer(jnp.ones((2, 5, 3)), seq_lengths=jnp.array([5, 2]))
    >>> outputs.shape
    (2, 5, 4)
    >>> bool((carry[1] == outputs[1, 1]).all())
    True
    """

    rngs: RngStream | None

    def __init__(
        self,
        cell: RNNCellBase,
        *,
        time_major: bool = False,
        return_carry: bool = False,
        reverse: bool = False,
        keep_order: bool = False,
        unroll: int = 1,
        state_axes: tp.Mapping[tp.Any, tp.Any] | StateAxes | None = None,
        broadcast_rngs: Filter = None,
        rngs: Rngs | RngStream | bool = True,
    ) -> None:
        self.cell = cell
        self.time_major = time_major
        self.return_carry = return_carry
        self.reverse = reverse
        self.keep_order = keep_order
        self.unroll = unroll
        self.rngs = data(_carry_stream(self, rngs))
        self.state_axes = _checked_axes({...: Carry} if state_axes is None else state_axes)
        self.broadcast_rngs = broadcast_rngs

    @tp.overload
    def __call__(
        self, inputs: jax.Array, *, return_carry: tp.Literal[True], **options: tp.Unpack[Keywords]
    ) -> tuple[tp.Any, jax.Array]: ...
    @tp.overload
    def __call__(
        self, inputs: jax.Array, *, return_carry: tp.Literal[False], **options: tp.Unpack[Keywords]
    ) -> jax.Array: ...
    @tp.overload
    def __call__(
        self, inputs: jax.Array, *, return_carry: bool | None = None, **options: tp.Unpack[Keywords]
    ) -> tp.Any: ...
    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: tp.Any = None,
        seq_lengths: jax.Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: KeySource | None = None,
    ) -> tp.Any:
        """The outputs of all steps, or a pair of the last carry and these.

        Args:
            inputs: (*batch, time, *features), or (time, *batch, *features) if `time_major`.
            initial_carry: the initial carry; by default the cell makes one.
            seq_lengths: integers, (*batch,): the length of each sequence; later positions are
                padding.  The carry is the one at this length (the initial one, for length zero),
                and `reverse` reverses the sequence without its padding.  Outputs of padding have
                no meaning.
            return_carry, time_major, reverse, keep_order: options for this call; by default those
                of the layer.
            rngs: the source of keys for the carry; takes precedence over the layer's own.  Of
                several streams, "carry" is forked.

        Raises:
            ValueError: for an input without a time axis, or lengths that do not match it.
            TypeError: for lengths that are not integers.
        """
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        keep_order = self.keep_order if keep_order is None else keep_order

        features = self.cell.num_feature_axes
        if inputs.ndim <= features:
            raise ValueError(
                f"RNN runs {type(self.cell).__name__} along a time axis: its input needs more than "
                f"the {features} feature axes of the cell, and has shape {inputs.shape}."
            )
        time_axis = 0 if time_major else inputs.ndim - features - 1
        xs = jnp.moveaxis(inputs, time_axis, 0)
        lengths = _checked_lengths(seq_lengths, xs.shape[0], xs.shape[1 : xs.ndim - features])
        if isinstance(rngs, Rngs):
            rngs = rngs.carry.fork()
        carry = initial_carry
        if carry is None:
            carry = self.cell.initialize_carry(xs.shape[1:], self.rngs if rngs is None else rngs)

        if reverse:
            xs = _reversed(xs, lengths)
        try:
            carry, ys = _run(self, carry, xs, lengths if return_carry else None)
        except (TypeError, ValueError) as error:
            note_layer(error, self)
            raise
        if reverse and keep_order:
            ys = jax.tree.map(lambda y: _reversed(y, lengths), ys)
        ys = jax.tree.map(lambda y: jnp.moveaxis(y, 0, time_axis), ys)
        return (carry, ys) if return_carry else ys


def _run(rnn: RNN, carry: tp.Any, xs: tp.Any, lengths: jax.Array | None) -> tuple[tp.Any, tp.Any]:
    """Run the cell over (time, *batch, *features).

    With `lengths`, the carry returned is the one after that many steps.
    """
    step: tp.Callable[..., tp.Any] = _step
    constants: tuple[tp.Any, ...] = ()
    if lengths is not None:
        step, constants = _step_up_to_length, (lengths,)
        carry, xs = (carry, carry), (xs, jnp.arange(xs.shape[0]))
    broadcast = rnn.broadcast_rngs
    if broadcast is not None:
        step = functools.partial(_restart, step, broadcast)
    loop = scan(
        step,
        in_axes=(rnn.state_axes, Carry, 0, *(None for _ in constants)),
        out_axes=(Carry, 0),
        unroll=rnn.unroll,
    )
    streams: tp.Any = contextlib.nullcontext()
    if broadcast is not None:
        streams = split_rngs(rnn.cell, splits=1, only=broadcast, squeeze=True)
    with streams:
        carry, ys = loop(rnn.cell, carry, xs, *constants)
    return carry if lengths is None else carry[1], ys


def _carry_stream(layer: tp.Any, rngs: tp.Any) -> RngStream | None:
    if rngs is True:
        return RngStream(0, tag="carry")
    if rngs is None or rngs is False:
        return None
    if isinstance(rngs, RngStream):
        return rngs
    if not isinstance(rngs, Rngs):
        error = TypeError if isinstance(layer, Bidirectional) else ValueError
        raise error(
            f"{type(layer).__name__}: Expected rngs to be an Rngs, such as rngs=nnx.Rngs(0), an "
            f"RngStream or a bool; got {short_type(rngs)}."
        )
    return own_stream(layer, rngs, "carry")


def _checked_axes(axes: tp.Mapping[tp.Any, tp.Any] | StateAxes) -> StateAxes:
    """The axes of a cell's Variables, each Carry, None or a number."""
    axes = axes if isinstance(axes, StateAxes) else StateAxes(axes)
    for axis in axes.axes:
        carried = axis is Carry or isinstance(axis, Carry)
        if not (axis is None or carried or isinstance(axis, int)):
            raise TypeError(
                f"RNN(state_axes=...) takes Carry, None or the number of an axis; got {axis!r}."
            )
    return axes


def _checked_lengths(
    lengths: jax.Array | None, time: int, batch: tuple[int, ...]
) -> jax.Array | None:
    """The lengths as an array of the batch's shape; raises an error unless they are possible."""
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"RNN needs integers as seq_lengths, got {lengths.dtype}.")
    if not broadcasts_to(lengths.shape, batch):
        raise ValueError(
            f"RNN got seq_lengths of shape {lengths.shape} for inputs with the batch axes {batch}."
        )
    if not isinstance(lengths, Tracer) and lengths.size:
        known = np.asarray(lengths)
        shortest, longest = known.min(), known.max()
        if shortest < 0 or longest > time:
            raise ValueError(
                f"RNN got seq_lengths from {shortest} to {longest} for inputs of {time} positions."
            )
    return jnp.broadcast_to(lengths, batch)


def _align(mask: jax.Array, x: jax.Array) -> jax.Array:
    """A mask over the leading axes of `x`, with as many axes as `x`."""
    return mask.reshape(*mask.shape, *(1,) * (np.ndim(x) - mask.ndim))


def _reversed(xs: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """(time, *batch, ...) reversed in time; with lengths, padding stays at the end."""
    if lengths is None:
        return jnp.flip(xs, axis=0)
    time = xs.shape[0]
    positions = jnp.arange(time).reshape(-1, *(1,) * lengths.ndim)
    sources = (lengths - 1 - positions) % max(time, 1)
    return jnp.take_along_axis(xs, _align(sources, xs), axis=0)


def flip_sequences(
    inputs: jax.Array, seq_lengths: jax.Array | None, num_batch_dims: int, time_major: bool
) -> jax.Array:
    """Sequences reversed in time; padding stays at the end.

    Args:
        inputs: (*batch, time, *features), or (time, *batch, *features) if `time_major`.
        seq_lengths: integers, (*batch,): the length of each without padding; None for no padding.
        num_batch_dims: the number of batch axes.
        time_major: the time axis comes first.

    >>> import jax.numpy as jnp
    >>> from nnxlite.nn.recurrent import flip_sequences
    >>> flip_sequences(jnp.array([[1, 2, 3, 0]]), jnp.array([3]), 1, False).tolist()
    [[3, 2, 1, 0]]
    """
    time_axis = 0 if time_major else num_batch_dims
    return jnp.moveaxis(_reversed(jnp.moveaxis(inputs, time_axis, 0), seq_lengths), 0, time_axis)


def _step(cell: tp.Any, carry: tp.Any, x: tp.Any) -> tuple[tp.Any, tp.Any]:
    """One step of the cell."""
    new, y = cell(carry, x)
    return _with_dtypes_of(carry, new), y


def _step_up_to_length(
    cell: tp.Any, carry: tp.Any, x: tp.Any, lengths: jax.Array
) -> tuple[tp.Any, tp.Any]:
    """One step with two carries: the running one, and one that stays once the length is reached."""
    running, at_length = carry
    x, time = x
    running, y = _step(cell, running, x)
    at_length = jax.tree.map(
        lambda new, old: jnp.where(_align(time < lengths, new), new, old), running, at_length
    )
    return (running, at_length), y


def _restart(
    step: tp.Callable[..., tuple[tp.Any, tp.Any]], streams: Filter, cell: tp.Any, *args: tp.Any
) -> tuple[tp.Any, tp.Any]:
    """One step, after which some random streams have the key and count they had before it."""
    state = variables(cell, All(RngState, streams))
    before = [(variable, variable.get_raw_value()) for _, variable in state.flat_state()]
    result = step(cell, *args)
    for variable, value in before:
        variable.set_raw_value(value)
    return result


def _with_dtypes_of(old: tp.Any, new: tp.Any) -> tp.Any:
    """A new carry, with floating arrays in the dtypes of the old one.

    Raises TypeError if it has another structure.
    """
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise TypeError(
            "The cell of an RNN must return a carry of the structure it got: it got "
            f"{jax.tree.structure(old)} and returned {jax.tree.structure(new)}."
        )

    def cast(was: tp.Any, now: tp.Any) -> jax.Array:
        was, now = jnp.asarray(was), jnp.asarray(now)
        both = jnp.issubdtype(was.dtype, jnp.floating) and jnp.issubdtype(now.dtype, jnp.floating)
        return now.astype(was.dtype) if both else now

    return jax.tree.map(cast, old, new)


def _concatenate(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.concatenate([a, b], axis=-1)


class Bidirectional(Module):
    """Runs one RNN forwards and another backwards, and merges their outputs.

    Args:
        forward_rnn: the RNN that runs from the start.
        backward_rnn: the RNN that runs from the end; its outputs are returned in the order of the
            inputs.  The options of this layer override those of the two RNNs.
        merge_fn: merges the outputs of the two; by default it concatenates them along the last axis.
        time_major: the time axis comes first; otherwise it comes before the features.
        return_carry: return the last carries of both as well.
        rngs: the source of keys for the carries: True for a stream of its own that starts from
            seed 0, an Rngs to fork the stream "carry" from, a stream to draw from, or False to leave
            it to the two RNNs.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> rngs = nnx.Rngs(0)
    >>> forward = nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs))
    >>> backward = nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs))
    >>> nnx.Bidirectional(forward, backward)(jnp.ones((2, 5, 3))).shape
    (2, 5, 8)
    """

    rngs: RngStream | None
    merge_fn: tp.Callable[[jax.Array, jax.Array], jax.Array] = staticmethod(_concatenate)

    def __init__(
        self,
        forward_rnn: tp.Any,
        backward_rnn: tp.Any,
        *,
        merge_fn: tp.Callable[[jax.Array, jax.Array], jax.Array] = _concatenate,
        time_major: bool = False,
        return_carry: bool = False,
        rngs: Rngs | RngStream | bool = True,
    ) -> None:
        if forward_rnn is backward_rnn:
            _logger.warning(
                "Bidirectional got one object for both directions; they share their parameters."
            )
        self.forward_rnn = forward_rnn
        self.backward_rnn = backward_rnn
        self.merge_fn = merge_fn
        self.time_major = time_major
        self.return_carry = return_carry
        self.rngs = data(_carry_stream(self, rngs))

    @tp.overload
    def __call__(
        self, inputs: jax.Array, *, return_carry: tp.Literal[True], **options: tp.Unpack[Keywords]
    ) -> tuple[tp.Any, jax.Array]: ...
    @tp.overload
    def __call__(
        self, inputs: jax.Array, *, return_carry: bool | None = None, **options: tp.Unpack[Keywords]
    ) -> tp.Any: ...
    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: tuple[tp.Any, tp.Any] | None = None,
        rngs: KeySource | None = None,
        seq_lengths: jax.Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> tp.Any:
        """The merged outputs, or a pair of the two last carries and these.

        Args:
            inputs: (*batch, time, *features), or (time, *batch, *features) if `time_major`.
            initial_carry: the initial carries, forward and backward.
            rngs: the source of keys for the carries; takes precedence over the layer's own.
            seq_lengths: as in `RNN`.
            return_carry, time_major: options for this call; by default those of the layer.
            reverse, keep_order: have no effect; accepted so that the layer can replace an RNN.
        """
        return_carry = self.return_carry if return_carry is None else return_carry
        forward_carry, backward_carry = (None, None) if initial_carry is None else initial_carry
        if isinstance(rngs, Rngs):
            rngs = rngs.carry
        rngs = self.rngs if rngs is None else rngs
        time_major = self.time_major if time_major is None else time_major

        options = {"rngs": rngs, "seq_lengths": seq_lengths, "time_major": time_major}
        options |= {"return_carry": True, "keep_order": True}
        forward_carry, forward = self.forward_rnn(
            inputs, initial_carry=forward_carry, reverse=False, **options
        )
        backward_carry, backward = self.backward_rnn(
            inputs, initial_carry=backward_carry, reverse=True, **options
        )
        outputs = jax.tree.map(self.merge_fn, forward, backward)
        return ((forward_carry, backward_carry), outputs) if return_carry else outputs
