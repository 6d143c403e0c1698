"""Loading: named arrays of any source into objects.

A source says which arrays it has, by name, shape and dtype: the folder of a checkpoint, files of
safetensors, a dictionary. Stored names are matched with those of the objects, either by a renaming or by
the rules of a `Mapping`; shapes and dtypes are compared; then arrays are read, and only when all have
been read are the objects changed.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing as tp
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import MOST_PATHS
from nnxlite.checkpoint._contents import PLAIN, Contents, Leaf, Spec, new_dtype, other_names, placed
from nnxlite.checkpoint._report import CheckpointError, Mismatch, MismatchError, Report, near_text
from nnxlite.checkpoint._rules import Conversion, Entry, Ignore, any_matches, conversions, same_bits
from nnxlite.filters import Filter
from nnxlite.training.patterns import Pattern

Renaming: tp.TypeAlias = tp.Mapping[str, str]
"""Patterns of stored names, and what each becomes: `{"encoder.**": "backbone.**"}`."""


class Source(tp.Protocol):
    """Where arrays come from.

    Attributes:
        text: what it is, for messages.
        specs: shape and dtype of each array, by name.
        aliases: further names, as in `Contents`.
    """

    text: str
    specs: dict[str, Spec]
    aliases: dict[str, str]

    def open(self, wanted: tp.Mapping[str, tp.Any]) -> Callable[[str], tp.Any]:
        """A function from the name of an array to its value, which is copied if it is to stay.

        Args:
            wanted: the names that will be asked for, each with the sharding it will have, or None. A
                value may have this sharding already.
        """
        ...


def load_model(source: Source, model: tp.Any, only: Filter, **options: tp.Any) -> Report:
    """Load what a source has into a model; options are those of `load`."""
    contents = Contents(model, only)
    new, report = load(source, contents, **options)
    contents.write(new)
    return dataclasses.replace(report, values={"model": contents.root})


def load(
    source: Source,
    contents: Contents,
    *,
    entries: tuple[Entry, ...] | None = None,
    rename: Renaming | None = None,
    strict: bool,
    cast: bool | None,
    within: tp.Mapping[str, tp.Any] | None = None,
) -> tuple[dict[str, tp.Any], Report]:
    """What `contents.write` has to write, by name, and a report of it.

    Args:
        source: what has arrays.
        contents: of the objects that get them.
        entries: of a `Mapping`, if names and layouts are related by one.
        rename: see `Renaming`.
        strict: whether an incomplete report is an error.
        cast: whether a value may lose precision or range by a cast; None for no casts at all.
        within: the items; of stored names, only those that begin with the name of one have to be used.

    Raises:
        MismatchError: for an incomplete report; also without `strict` for a leaf that has no value yet.
    """
    if entries is None:
        made, missing, left_over = by_name(source, contents, rename)
    elif rename is not None:
        raise ValueError("Pass `mapping` or `rename`, not both: the rules of a mapping rename.")
    else:
        made, missing = conversions(entries, contents, strict)
        used = {name for conversion in made for name in conversion.foreign}
        ignored = [entry.foreign for entry in entries if isinstance(entry, Ignore)]
        left_over = [n for n in source.specs if n not in used and not any_matches(ignored, n)]
    reads, report, remedies = compare(source, contents, made, missing, left_over, within, cast)
    kept = [*report.missing, *(m.name for m in report.misshapen)]
    abstract = [n for n in kept if isinstance(contents.leaves[n].value, jax.ShapeDtypeStruct)]
    if abstract or (strict and not report.complete):
        raise MismatchError(_refusal(report, remedies, within or {}, abstract), report)
    return _read(source, reads, report, contents, cast), report


def by_name(
    source: Source, wanted: Contents, rename: Renaming | None
) -> tuple[list[Conversion], list[str], list[str]]:
    """Match stored names with those of some objects, after a renaming.

    Args:
        source: what has arrays.
        wanted: the objects; leaves that are not chosen are left alone, as are those of their names.
        rename: see `Renaming`; the first pattern that matches a stored name counts.

    Returns:
        How stored arrays become ours; names of ours that none is for; stored names for none of ours.

    Raises CheckpointError for a renaming that matches no stored name, or that leads two to one.
    """
    names = renamed(source.specs, rename or {})
    targets = {name: old for old, name in names.items()}
    for name, old in list(targets.items()):
        for other in other_names(name, source.aliases):
            targets.setdefault(other, old)
    made: list[Conversion] = []
    missing: list[str] = []
    used: set[str] = set()
    for name, leaf in wanted.leaves.items():
        known = [targets[n] for n in (name, *wanted.also_named(name)) if n in targets]
        if name not in wanted.chosen:
            used.update(known)
        elif known:  # further ones are left over, unless they are this one
            used.add(known[0])
            shape = leaf.spec.shape
            made.append(Conversion({known[0]: shape}, {name: shape}))
        elif leaf.spec.dtype != PLAIN or leaf.value:  # None, an empty list: nothing is lost
            missing.append(name)
    return made, missing, [name for old, name in names.items() if old not in used]


def compare(
    source: Source,
    wanted: Contents,
    made: list[Conversion],
    missing: list[str],
    left_over: list[str],
    within: tp.Container[str] | None,
    cast: bool | None,
) -> tuple[list[tuple[Conversion, list[str]]], Report, list[str]]:
    """Compare shapes and dtypes.

    Returns:
        What is to be read, with the stored names that there are; what that will have done; remedies for
        what does not match.
    """
    stored = source.specs
    missing, foreign = [*missing], dict[str, str]()
    restored, renamings = list[str](), list[tuple[str, str]]()
    misshapen, casts = list[Mismatch](), list[Mismatch]()
    reads: list[tuple[Conversion, list[str]]] = []
    remedies: dict[str | None, None] = {}
    for conversion in made:
        names = [name for name in conversion.ours if name in wanted.chosen]
        present = [name for name in conversion.foreign if name in stored]
        absent = [name for name in conversion.foreign if name not in stored]
        if absent and not (present and conversion.rule.tie):
            missing += names
            foreign.update(dict.fromkeys(names, absent[0]))
            continue
        first = stored[present[0]]
        changed = not conversion.rule.renames
        needed = conversion.foreign.items()
        forms = {name: Spec(shape, first.dtype) for name, shape in needed}
        odd = next((name for name in present if stored[name] != forms[name]), None)
        good: list[str] = []
        for name in names:
            leaf = wanted.leaves[name]
            then = Spec(leaf.spec.shape, first.dtype) if changed else first
            if changed and odd is not None:
                misshapen.append(Mismatch(name, f"{stored[odd]} as {odd}", str(forms[odd])))
            elif not compatible(then, leaf.spec, cast):
                misshapen.append(Mismatch(name, str(then), str(leaf.spec)))
                remedies[_remedy(then, leaf.spec)] = None
            else:
                good.append(name)
                if (dtype := new_dtype(then, leaf, cast)) != then.dtype:
                    casts.append(Mismatch(name, str(then), str(Spec(leaf.spec.shape, dtype))))
        restored += good
        renamings += [(old, name) for old in present for name in good if old != name]
        if good:
            reads.append((conversion, present))
    sought = {name: foreign.get(name, name) for name in missing[:MOST_PATHS]}
    near = {n: difflib.get_close_matches(old, left_over[:500], 1) for n, old in sought.items()}
    report = Report(
        source.text,
        restored=tuple(restored),
        missing=tuple(missing),
        unexpected=tuple(n for n in left_over if within is None or n.partition(".")[0] in within),
        misshapen=tuple(misshapen),
        cast=tuple(casts),
        renamed=tuple(renamings),
        near={name: found[0] for name, found in near.items() if found},
        foreign=foreign,
    )
    return reads, report, list(filter(None, remedies))


def _read(
    source: Source,
    reads: list[tuple[Conversion, list[str]]],
    report: Report,
    contents: Contents,
    cast: bool | None,
) -> dict[str, tp.Any]:
    """The new values by name; MismatchError for ties that differ."""
    restored, new = set(report.restored), dict[str, tp.Any]()
    wanted: dict[str, tp.Any] = {}
    for conversion, names in reads:
        for name in restored.intersection(conversion.ours):
            check_sharding(leaf := contents.leaves[name])
            wanted.update(dict.fromkeys(names, leaf.sharding if conversion.rule.renames else None))
    read = source.open(wanted)
    for conversion, names in reads:
        arrays = [read(name) for name in names]
        for name, array in zip(names, arrays):
            if conversion.rule.tie and not same_bits(arrays[0], array):
                raise MismatchError(
                    f"{source.text} has different values for '{names[0]}' and '{name}', which "
                    f"{conversion.rule} ties. Nothing was changed. To load only '{names[0]}', leave the "
                    f"other to Ignore({name!r}).",
                    report,
                )
        for name, array in zip(conversion.ours, conversion.load(arrays)):
            leaf = contents.leaves[name]
            if name in restored:
                new[name] = placed(array, leaf, source.specs[names[0]], cast)
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


def renamed(stored: tp.Iterable[str], rename: Renaming) -> dict[str, str]:
    """The new name of each stored one."""
    rules = [(Pattern(old), Pattern(new)) for old, new in rename.items()]
    for old, new in rules:
        if unknown := sorted(new.wildcards - old.wildcards):
            raise CheckpointError(
                f"rename: {new.text!r} has {', '.join(unknown)}, which {old.text!r} does not have. "
                "Each wildcard of the new name has to be one of the old name."
            )
    matched: set[str] = set()
    names: dict[str, str] = {}
    for name in stored:
        names[name] = name
        for old, new in rules:
            if (found := old.match(name)) is not None:
                names[name] = new.fill(found)
                matched.add(old.text)
                break
    for old, _ in rules:
        if old.text not in matched:
            near = near_text(old.text, names, cutoff=0.3)
            raise CheckpointError(f"rename: no stored name matches {old.text!r}{near}.")
    by_new: dict[str, str] = {}
    for old, new in names.items():
        if (first := by_new.setdefault(new, old)) != old:
            raise CheckpointError(
                f"rename: both '{first}' and '{old}' would become '{new}'. Give each a name of its own."
            )
    return names


def compatible(stored: Spec, wanted: Spec, cast: bool | None) -> bool:
    """Whether a stored leaf can take the place of another."""
    if stored.shape != wanted.shape:
        return False
    if stored.dtype == wanted.dtype:
        return True
    if stored.key_impl or wanted.key_impl or NOT_CAST.intersection((stored.dtype, wanted.dtype)):
        return False
    return cast is None or cast or lossless(stored.dtype, wanted.dtype)


NOT_CAST = {"Python str", PLAIN}

_CATEGORIES = {
    "Python bool": jnp.bool_,
    "Python int": jnp.integer,
    "Python float": jnp.floating,
    "Python complex": jnp.complexfloating,
}


def lossless(stored: str, wanted: str) -> bool:
    """Whether every value of a dtype is one of another dtype.

    A Python number has the precision of the array that it becomes, or that it was.
    """
    for python, array in ((stored, wanted), (wanted, stored)):
        if python in _CATEGORIES and array not in _CATEGORIES:
            return jnp.issubdtype(array, _CATEGORIES[python])
    return np.can_cast(jnp.dtype(stored), jnp.dtype(wanted))


def _remedy(stored: Spec, wanted: Spec) -> str | None:
    """What can be done about a leaf that is stored in another form than it is wanted in."""
    impl, other = stored.key_impl, wanted.key_impl
    if impl and other and impl != other:
        return (
            f"random keys of {impl} cannot be cast to {other}: make the streams with keys of the stored "
            f"implementation, nnx.Rngs(jax.random.key(0, impl='{impl}')), or leave them as they "
            "are with only=nnx.Not(nnx.RngKey)"
        )
    if bool(impl) != bool(other):
        return (
            "a random key and other values are not cast to each other: jax.random.wrap_key_data makes "
            "a key of its data"
        )
    if not compatible(stored, wanted, True):
        return None
    return "cast=True casts with loss of precision, cast=None keeps the stored dtypes"


def _refusal(
    report: Report, remedies: list[str], items: tp.Mapping[str, tp.Any], abstract: list[str]
) -> str:
    lines = [f"{report.source} does not match the objects, and nothing was changed."]
    lines += [f"  {line}" for line in report.problems()]
    wrong = [*report.missing, *report.unexpected, *(m.name for m in report.misshapen)]
    for item in dict.fromkeys(name.partition(".")[0] for name in wrong):
        if isinstance(items.get(item), (dict, list, tuple)):
            remedies.append(f"without {item}=, report.values[{item!r}] has what was saved")
    if remedy := report.remedy():
        remedies.append(f"{remedy} restores by another name")
    if abstract:
        some = f"{len(abstract):,} abstract leaves, such as {abstract[0]}, have no value to keep"
        remedies.append(f"{some}: restore into objects that have values")
    else:
        remedies.append("strict=False restores what matches and reports the rest")
    return "\n".join([*lines, "  " + "; ".join(remedies) + "."])
