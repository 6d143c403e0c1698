"""Arrays of a model on their way out: under our names, or under those of a mapping."""

from __future__ import annotations

import contextlib
import functools
import typing as tp
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from nnxlite.checkpoint._contents import Contents, Leaf, Spec, spec_of
from nnxlite.checkpoint._errors import CheckpointError
from nnxlite.checkpoint._loading import only_of
from nnxlite.checkpoint._operations import same_bits
from nnxlite.checkpoint._rules import (
    Constant,
    Conversion,
    Entry,
    MappingError,
    conversions,
    without_rule,
)

_PYTHON = {"Python bool": "bool", "Python int": "int64", "Python float": "float64"}
"""The dtypes that Python numbers are written in."""


class Piece(tp.NamedTuple):
    """Arrays that are made together, and their specs by name."""

    specs: dict[str, Spec]
    make: tp.Callable[[], list[np.ndarray]]


class Exported:
    """What leaves a model.

    Attributes:
        specs: shape and dtype of each array, by name.
    """

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces
        self.specs = {name: spec for piece in self._pieces for name, spec in piece.specs.items()}

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """The arrays by name, each made when it is asked for."""
        for piece in self._pieces:
            yield from zip(piece.specs, piece.make())


def exported(model: tp.Any, only: tp.Any, entries: Sequence[Entry] | None) -> Exported:
    """The arrays of a model, under foreign names if there are entries of a mapping."""
    contents, wanted = Contents(model, only), only_of(only)
    for name, leaf in contents.leaves.items():
        if wanted(leaf):
            _check_concrete(name, leaf)
    if entries is not None:
        return _mapped(contents, wanted, entries)
    return Exported(
        [
            Piece({name: _spec(leaf)}, lambda leaf=leaf: [_host(leaf)])
            for name, leaf in contents.leaves.items()
            if wanted(leaf)
        ]
    )


def _mapped(
    contents: Contents, only: tp.Callable[[Leaf], bool], entries: Sequence[Entry]
) -> Exported:
    leaves = contents.leaves
    made = conversions(entries, contents)
    problems = [
        f"{name}: no rule is for it; add one, or Keep({name!r})."
        for name in without_rule(entries, made, leaves, only)
    ]
    wanted = [c for c in made if any(only(leaves[name]) for name in c.ours)]
    wanted.sort(key=lambda c: c.is_tied)  # the rule that a foreign array belongs to comes first
    owners: dict[str, Conversion] = {}
    tied: list[Conversion] = []
    for conversion in wanted:
        if conversion.is_tied and conversion.foreign[0] in owners:
            tied.append(conversion)
        else:
            owners.update(dict.fromkeys(conversion.foreign, conversion))
    pieces = []
    for conversion in dict.fromkeys(owners.values()):
        dtypes = sorted({_spec(leaves[name]).dtype for name in conversion.ours})
        if len(dtypes) > 1:
            problems.append(f"{conversion.foreign[0]}: ours are of {' and '.join(dtypes)}.")
        dtype = dtypes[0] if conversion.cast is None else conversion.cast.name
        specs = {name: Spec(shape, dtype) for name, shape in conversion.foreign_shape.items()}
        pieces.append(Piece(specs, functools.partial(_saved, conversion, leaves)))
    for entry in entries:
        if isinstance(entry, Constant):
            name, value = entry.foreign, np.asarray(entry.value)
            if name in owners:
                problems.append(
                    f"{name}: it is a constant, and {owners[name].rule} is for it as well."
                )
            pieces.append(Piece({name: tp.cast(Spec, spec_of(value))}, lambda value=value: [value]))
    if problems:
        raise MappingError(
            f"The mapping cannot save {type(contents.root).__name__}; nothing was written:",
            problems,
        )
    for conversion in tied:
        _check_tied(conversion, owners[conversion.foreign[0]], leaves)
    return Exported(pieces)


def _check_tied(conversion: Conversion, owner: Conversion, leaves: tp.Mapping[str, Leaf]) -> None:
    (name,) = conversion.foreign
    theirs = _saved(owner, leaves)[owner.foreign.index(name)]
    if not same_bits(_saved(conversion, leaves)[0], theirs):
        raise MappingError(
            f"'{conversion.ours[0]}' and '{owner.ours[0]}' are tied, as both are saved as '{name}', and "
            "differ. Nothing was written. Share one Variable between them, or save one of them under "
            "another foreign name."
        )


def _saved(conversion: Conversion, leaves: tp.Mapping[str, Leaf]) -> list[np.ndarray]:
    return conversion.save([_host(leaves[name]) for name in conversion.ours])


def _spec(leaf: Leaf) -> Spec:
    return Spec(leaf.spec.shape, _PYTHON.get(leaf.spec.dtype, leaf.spec.dtype))


def _check_concrete(name: str, leaf: Leaf) -> None:
    if isinstance(leaf.value, jax.ShapeDtypeStruct):
        raise CheckpointError(f"'{name}' is abstract, and has no value to be saved.")
    if isinstance(leaf.value, jax.Array) and not (
        leaf.value.is_fully_addressable or leaf.value.is_fully_replicated
    ):
        raise CheckpointError(
            f"'{name}' is spread over several processes. Gather it first "
            "(jax.experimental.multihost_utils.process_allgather), or use nnx.checkpoint.save, "
            "with which every process writes its part."
        )


def _host(leaf: Leaf) -> np.ndarray:
    """The value as NumPy's; the model does not keep this copy."""
    value = leaf.value
    if leaf.spec.is_python:
        return np.asarray(value, _PYTHON[leaf.spec.dtype])
    if leaf.spec.key_impl:
        value = jax.random.key_data(value)
    if isinstance(value, jax.Array):
        if not value.is_fully_addressable:
            value = value.addressable_data(0)
        with contextlib.suppress(RuntimeError):  # where JAX was told to do without the CPU
            value = jax.device_put(value, jax.local_devices(backend="cpu")[0])
    return np.asarray(value)
