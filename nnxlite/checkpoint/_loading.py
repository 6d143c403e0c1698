"""Loading: named arrays of any source into objects.

A source says which arrays it has, by name, shape and dtype: the folder of a checkpoint, files of
safetensors, a dictionary. Stored names are matched with those of the objects, either by a renaming or by
the rules of a `Mapping`; shapes and dtypes are compared; then arrays are read, and only when all have
been read are the objects changed.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import typing as tp
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import MOST_PATHS
from nnxlite.checkpoint._contents import PLAIN, Contents, Leaf, Spec, every_name, placed
from nnxlite.checkpoint._report import CheckpointError, Mismatch, MismatchError, Report, near_text
from nnxlite.checkpoint._rules import Conversion, Entry, Ignore, Rule, any_matches, conversions
from nnxlite.checkpoint.patterns import Pattern
from nnxlite.filters import Filter

Reads: tp.TypeAlias = list[tuple[Conversion, dict[str, str]]]
"""What is to be read: conversions, each with the names of the leaves it is for and their new dtypes."""

Renaming: tp.TypeAlias = tp.Mapping[str, str]
"""Patterns of stored names, and what each becomes: `{"encoder.**": "backbone.**"}`."""


class Source:
    """Where arrays come from.

    Attributes:
        text: what it is, for messages.
        specs: shape and dtype of each array, by name.
        aliases: further names, as in `Contents`.
    """

    text: str
    specs: dict[str, Spec]
    aliases: tp.Mapping[str, str] = {}

    def open(self, wanted: tp.Mapping[str, tp.Any]) -> Callable[[str], tp.Any]:
        """A function from the name of an array to its value, which is copied if it is to stay.

        Args:
            wanted: the names that will be asked for, each with the sharding it will have, or None. A
                value may have this sharding already.
        """
        return self.read

    def read(self, name: str) -> tp.Any:
        """One array; of random keys, their data."""
        raise NotImplementedError


def load_model(source: Source, model: tp.Any, only: Filter, **options: tp.Any) -> Report:
    """Load what a source has into a model; options are those of `load`."""
    contents = Contents({"model": model}, only, named=False)
    new, report = load(source, contents, **options)
    contents.write(new)
    return dataclasses.replace(report, values=contents.root)


def load(
    source: Source,
    contents: Contents,
    *,
    entries: tuple[Entry, ...] | None = None,
    rename: Renaming | None = None,
    strict: bool,
    cast: bool | None,
) -> tuple[dict[str, tp.Any], Report]:
    """What `contents.write` has to write, by name, and a report of it.

    Args:
        source: what has arrays.
        contents: of the objects that get them.
        entries: of a `Mapping`, if names and layouts are related by one.
        rename: see `Renaming`.
        strict: whether an incomplete report is an error.
        cast: whether a value may lose precision or range by a cast; None for no casts at all.

    Raises:
        MismatchError: for an incomplete report; also without `strict` for a leaf that has no value yet.
    """
    if entries is None:
        made, missing, left_over = by_name(source, contents, rename or {})
    elif rename is not None:
        raise ValueError("Pass `mapping` or `rename`, not both: the rules of a mapping rename.")
    else:
        made, missing = conversions(entries, contents, strict)
        used = {name for conversion in made for name in conversion.foreign}
        ignored = [entry.foreign for entry in entries if isinstance(entry, Ignore)]
        left_over = [n for n in source.specs if n not in used and not any_matches(ignored, n)]
    reads, report, remedies = compare(source, contents, made, missing, left_over, cast)
    kept = [*report.missing, *(m.name for m in report.misshapen)]
    abstract = [n for n in kept if isinstance(contents.leaves[n].value, jax.ShapeDtypeStruct)]
    if abstract or (strict and not report.complete):
        last = "strict=False restores what matches and reports the rest"
        if abstract:
            last = (
                f"{len(abstract):,} abstract leaves, such as {abstract[0]}, have no value to keep: "
                "restore into objects that have values"
            )
        lines = [f"{report.source} does not match the objects, and nothing was changed."]
        lines += [*report.problems(), f"{'; '.join([*remedies, last])}."]
        raise MismatchError("\n  ".join(lines), report)
    return _read(source, reads, contents), report


def by_name(
    source: Source, wanted: Contents, rename: Renaming
) -> tuple[list[Conversion], list[str], list[str]]:
    """Match stored names with those of some objects, after a renaming.

    Args:
        source: what has arrays.
        wanted: the objects; leaves that are not chosen are left alone, as are those of their names.
        rename: see `Renaming`; the first pattern that matches a stored name counts.

    Returns:
        How stored arrays become ours; names of ours that none is for; stored names for none of ours.

    Raises CheckpointError for a renaming that matches no stored name.
    """
    stored = every_name(source.specs, source.aliases)
    became = collections.defaultdict[str, list[str]](list)  # the stored names, by what they become
    moved: set[str] = set()
    for rule in [Rule(old, new) for old, new in rename.items()]:
        old, new = Pattern(rule.foreign[0]), Pattern(rule.ours[0])
        found = {name: match for name in stored if (match := old.match(name)) is not None}
        if not found:
            near = near_text(old.text, stored, cutoff=0.3)
            raise CheckpointError(f"rename: no stored name matches {old.text!r}{near}.")
        for name in [name for name in found if name not in moved]:
            became[new.fill(found[name])].append(stored[name])
        moved |= found.keys()
    for name in [name for name in stored if name not in moved]:
        became[name].append(stored[name])
    made: list[Conversion] = []
    missing: list[str] = []
    used: set[str] = set()
    for name, leaf in wanted.leaves.items():
        names = name, *wanted.also_named(name)
        known = [old for ours in names for old in became.get(ours, ())]
        if name not in wanted.chosen:
            used.update(known)
        elif known:  # further ones are left over, unless they are this one
            used.add(known[0])
            made.append(Conversion({known[0]: leaf.spec.shape}, {name: leaf.spec.shape}))
        elif not leaf.plain or leaf.value not in (None, {}, [], ()):  # of these, nothing is lost
            missing.append(name)
    return made, missing, [name for name in source.specs if name not in used]


def compare(
    source: Source,
    contents: Contents,
    made: list[Conversion],
    missing: list[str],
    left_over: list[str],
    cast: bool | None,
) -> tuple[Reads, Report, list[str]]:
    """Compare shapes and dtypes: what is to be read for which leaves, a report of it, and remedies."""
    by_field = collections.defaultdict[str, list[tp.Any]](list, missing=[*missing])
    foreign: dict[str, str] = {}  # what was looked for in place of what is missing
    reads: Reads = []
    remedies: list[str] = []
    for conversion in made:
        names = [name for name in conversion.ours if name in contents.chosen]
        if absent := [name for name in conversion.foreign if name not in source.specs]:
            by_field["missing"] += names
            foreign.update(dict.fromkeys(names, absent[0]))
            continue
        specs = {name: source.specs[name] for name in conversion.foreign}
        first, renames = next(iter(specs.values())), conversion.rule.renames
        forms = {name: Spec(shape, first.dtype) for name, shape in conversion.foreign.items()}
        odd = [name for name in specs if specs[name] != forms[name] and not renames]
        good: dict[str, str] = {}
        for leaf in map(contents.leaves.__getitem__, names):
            stored = first if renames else Spec(leaf.spec.shape, first.dtype)
            if odd:
                texts = f"{specs[odd[0]]} as {odd[0]}", str(forms[odd[0]])
                by_field["misshapen"].append(Mismatch(leaf.name, *texts))
            elif (dtype := new_dtype(stored, leaf, cast)) is None:
                by_field["misshapen"].append(Mismatch(leaf.name, str(stored), str(leaf.spec)))
                remedies.append(_remedy(stored, leaf, cast))
            else:
                good[leaf.name] = dtype
                if dtype != stored.dtype and not leaf.spec.key_impl:
                    new = Spec(leaf.spec.shape, dtype)
                    by_field["cast"].append(Mismatch(leaf.name, str(stored), str(new)))
        by_field["restored"] += good
        by_field["renamed"] += [(old, name) for old in specs for name in good if old != name]
        reads += [(conversion, good)] if good else []
    by_field["unexpected"] = [name for name in left_over if contents.has_item(name)]
    hints: dict[str, str] = {}
    alike: list[tuple[str, str]] = []
    for name in by_field["missing"][:MOST_PATHS]:
        sought = foreign[name] if name in foreign else name
        near = difflib.get_close_matches(sought, left_over[:500], 1)
        texts = [f"as {sought}"] if name in foreign else []
        if texts := [*texts, *(f"near: {old}" for old in near)]:
            hints[name] = ", ".join(texts)
        alike += [(old, name) for old in near]
    if alike and not foreign:
        remedies.append(f"{renaming(*alike[0])} restores by another name")
    fields: dict[str, tp.Any] = {field: tuple(values) for field, values in by_field.items()}
    report = Report(source.text, **fields, hints=hints)
    return reads, report, [*dict.fromkeys(filter(None, remedies))]


def renaming(old: str, new: str) -> str:
    """The option that restores one stored name, and those beside it, by another.

    >>> from nnxlite.checkpoint._loading import renaming
    >>> renaming("a.first.kernel", "b.kernel")
    'rename={"a.first.**": "b.**"}'
    """
    olds, news, rest = old.split("."), new.split("."), ""
    while len(olds) > 1 and len(news) > 1 and olds[-1] == news[-1]:
        del olds[-1], news[-1]
        rest = ".**"
    return f'rename={{"{".".join(olds)}{rest}": "{".".join(news)}{rest}"}}'


def _read(source: Source, reads: Reads, contents: Contents) -> dict[str, tp.Any]:
    """The new values by name."""
    wanted: dict[str, tp.Any] = {}
    for conversion, dtypes in reads:
        for leaf in map(contents.leaves.__getitem__, dtypes):
            check_sharding(leaf)
            sharding = leaf.sharding if conversion.rule.renames else None
            # One that two leaves get is read for none of them, and copied for each.
            wanted |= {n: None if n in wanted else sharding for n in conversion.foreign}
    read, new = source.open(wanted), dict[str, tp.Any]()
    for (foreign, ours, rule), dtypes in reads:
        parts = rule.to_ours([read(name) for name in foreign], [*ours.values()])
        arrays = dict(zip(ours, parts))
        for name, dtype in dtypes.items():
            new[name] = placed(arrays[name], contents.leaves[name], dtype)
    return new


def check_sharding(leaf: Leaf) -> None:
    """Raise CheckpointError if an array cannot have the sharding that it is to have."""
    sharding = leaf.sharding
    if sharding is None or leaf.spec.is_python:
        return
    if not sharding.addressable_devices:
        raise CheckpointError(
            f"'{leaf.name}' has no shard on process {jax.process_index()}: its sharding is over "
            f"{len(sharding.device_set)} devices of other processes. Build the mesh from jax.devices()."
        )
    try:
        sharding.shard_shape(leaf.spec.shape)
    except ValueError as error:
        raise CheckpointError(
            f"'{leaf.name}' was saved as {leaf.spec}, which {sharding} does not divide: "
            f"{error}. Restore on a mesh of a size that divides it, or give it another "
            "sharding."
        ) from error


def new_dtype(stored: Spec, leaf: Leaf, cast: bool | None) -> str | None:
    """The dtype of a leaf once a stored one has taken its place; None where it cannot.

    That is its own one, or with `cast=None` the stored one; but without x64, arrays of JAX have at most
    32 bits. Plain data takes the place of plain data, and data that of random keys.
    """
    wanted, dtype = leaf.spec, leaf.spec.dtype
    if leaf.plain and stored.is_python:
        return stored.dtype
    if wanted.key_impl and (stored.dtype, stored.shape) == wanted.raw:  # its data
        return dtype
    kept = stored.key_impl or wanted.key_impl or NOT_CAST.intersection((stored.dtype, dtype))
    if stored.shape != wanted.shape or (kept and stored.dtype != dtype):
        return None
    alike = cast is None and stored.is_python == wanted.is_python
    dtype = stored.dtype if alike else dtype
    if not (wanted.is_python or kept or isinstance(leaf.value, (np.ndarray, np.generic))):
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype)).name
    fine = dtype == stored.dtype or (not alike and (cast or lossless(stored.dtype, dtype)))
    return dtype if fine else None


NOT_CAST = {"Python str", PLAIN}

_PYTHON = [f"Python {name}" for name in ("bool", "int", "float", "complex")]
_CATEGORIES = dict(zip(_PYTHON, (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)))
_NUMBERS = dict(zip(_PYTHON, ("bool", "int64", "float64", "complex128")))


def lossless(stored: str, wanted: str) -> bool:
    """Whether every value of a dtype is one of another dtype.

    A Python number has the precision of the array that it becomes, or that it was.
    """
    for python, array in ((stored, wanted), (wanted, stored)):
        if python in _CATEGORIES and array not in _CATEGORIES:
            return jnp.issubdtype(array, _CATEGORIES[python])
    old, new = (jnp.dtype(_NUMBERS.get(name, name)) for name in (stored, wanted))
    if not np.can_cast(old, new):
        return False
    # NumPy allows casts to floats of 8 bits, and of them, and of integers of 64 bits, that lose values.
    if not jnp.issubdtype(new, jnp.inexact):
        return not jnp.issubdtype(old, jnp.inexact)
    return new.itemsize > 1 and not (old.kind in "iu" and old.itemsize == 8)


def _remedy(stored: Spec, leaf: Leaf, cast: bool | None) -> str:
    """What can be done about a leaf that is stored in another form than it is wanted in, if anything."""
    impl, other = stored.key_impl, leaf.spec.key_impl
    if impl and other and impl != other:
        return (
            f"random keys of {impl} cannot be cast to {other}: make the streams with keys of the stored "
            f"implementation, nnx.Rngs(jax.random.key(0, impl='{impl}')), or leave them as they "
            "are with only=nnx.Not(nnx.RngKey)"
        )
    if bool(impl) != bool(other):
        return (
            "a random key and other values are not cast to each other: jax.random.wrap_key_data makes "
            "a key of its data, only=nnx.Not(nnx.RngKey) leaves keys as they are"
        )
    if new_dtype(stored, leaf, True) is None:
        return ""
    if cast is None and stored.is_python == leaf.spec.is_python:
        return (
            f"without x64 JAX has no arrays of {stored.dtype}: cast=True casts, or set "
            "jax.config.update('jax_enable_x64', True)"
        )
    keeps = ", cast=None keeps the stored dtypes" if new_dtype(stored, leaf, None) else ""
    return f"cast=True casts with loss of precision{keeps}"
