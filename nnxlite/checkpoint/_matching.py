"""Which stored leaf goes where: names, renamings, shapes and dtypes, before anything is read."""

from __future__ import annotations

import dataclasses
import difflib
import typing as tp

import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import MOST_PATHS
from nnxlite.checkpoint._contents import Contents, Leaf, Spec, in_arrays, other_names
from nnxlite.checkpoint._errors import CheckpointError, MismatchError
from nnxlite.checkpoint._report import Mismatch, Report
from nnxlite.training.patterns import Pattern

Renaming: tp.TypeAlias = tp.Mapping[str, str]
"""Patterns of stored names, and what each becomes: `{"encoder.**": "backbone.**"}`."""


@dataclasses.dataclass
class Comparison:
    """What is stored, beside what some objects need.

    Attributes:
        source: what is read, in words, for messages.
        wanted: the objects.
        cast: whether a value may lose precision or range by a cast; None for no casts at all.
        within: the first parts of stored names that have to be used; by default all.
        restored, missing, misshapen, casts, renamed, foreign: as in a `Report`.
        left_over: stored names that no leaf has.
    """

    source: str
    wanted: Contents
    cast: bool | None
    within: tp.Container[str] | None = None
    restored: list[str] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)
    misshapen: list[Mismatch] = dataclasses.field(default_factory=list)
    casts: list[Mismatch] = dataclasses.field(default_factory=list)
    renamed: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    left_over: list[str] = dataclasses.field(default_factory=list)
    foreign: dict[str, str] = dataclasses.field(default_factory=dict)

    def fits(self, name: str, stored: Spec, cast: bool | None) -> bool:
        """Whether a leaf can be restored from one that is stored so."""
        leaf = self.wanted.leaves[name]
        if not compatible(stored, leaf.spec, cast):
            self.misshapen.append(Mismatch(name, str(stored), str(leaf.spec)))
            return False
        if (change := changed(stored, leaf, self.cast)) is not None:
            self.casts.append(change)
        self.restored.append(name)
        return True

    @property
    def report(self) -> Report:
        """All of this."""
        within = self.within
        sought = {name: self.foreign.get(name, name) for name in self.missing[:MOST_PATHS]}
        some = self.left_over[:500]
        near = {name: difflib.get_close_matches(old, some, 1) for name, old in sought.items()}
        return Report(
            self.source,
            restored=tuple(self.restored),
            missing=tuple(self.missing),
            unexpected=tuple(
                n for n in self.left_over if within is None or n.partition(".")[0] in within
            ),
            misshapen=tuple(self.misshapen),
            cast=tuple(self.casts),
            renamed=tuple(self.renamed),
            near={name: found[0] for name, found in near.items() if found},
            foreign=self.foreign,
        )


def match(
    stored: tp.Mapping[str, Spec],
    wanted: Contents,
    *,
    source: str,
    aliases: tp.Mapping[str, str] = {},
    only: tp.Callable[[str], bool] = lambda name: True,
    within: tp.Container[str] | None = None,
    rename: Renaming | None = None,
    strict: bool = True,
    cast: bool | None = False,
    plain: tp.Container[str] = (),
) -> tuple[dict[str, str], Report]:
    """The stored name for each leaf to be restored, and what restoring them will have done.

    Args:
        stored: the stored leaves, by name.
        wanted: the objects.
        source: what is read, in words, for messages.
        aliases: of what is stored, as in `Contents`.
        only: whether the leaf of a name is wanted; others are left alone, as are stored ones of their
            names.
        within: the first parts of names that are considered; by default all.
        rename: see `Renaming`; the first pattern that matches a stored name counts.
        strict: whether an incomplete report is an error.
        cast: whether a value may lose precision or range by a cast; None for no casts at all.
        plain: items that were saved as plain data.

    Raises:
        MismatchError: for an incomplete report; also without `strict` for a leaf that has no value yet.
        CheckpointError: for a renaming that matches no stored name, or that leads two to one.
    """
    names = renamed(stored, rename or {})
    targets = {name: old for old, name in names.items()}
    for name, old in list(targets.items()):
        for other in other_names(name, aliases):
            targets.setdefault(other, old)
    comparison = Comparison(source, wanted, cast, within)
    sources: dict[str, str] = {}
    used: set[str] = set()
    for name in wanted.leaves:
        known = [targets[n] for n in (name, *wanted.also_named(name)) if n in targets]
        if not only(name):
            used.update(known)
        elif not known:
            comparison.missing.append(name)
        else:
            old = known[0]  # further ones are left over, unless they are this one
            used.add(old)
            if comparison.fits(name, stored[old], cast):
                sources[name] = old
                comparison.renamed += [(old, name)] if names[old] != old else []
    comparison.left_over = [name for old, name in names.items() if old not in used]
    report = comparison.report
    check(report, wanted, strict, plain)
    return sources, report


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
                matched.add(old.text)
                names[name] = new.fill(found)
                break
    for old, _ in rules:
        if old.text not in matched:
            near = difflib.get_close_matches(old.text, list(names)[:1000], 1, cutoff=0.3)
            raise CheckpointError(
                f"rename: no stored name matches {old.text!r}"
                + (f"; the nearest is '{near[0]}'." if near else ".")
            )
    by_new: dict[str, str] = {}
    for old, new in names.items():
        if (first := by_new.setdefault(new, old)) != old:
            raise CheckpointError(
                f"rename: both '{first}' and '{old}' would become '{new}'. Give each a name of its own."
            )
    return names


def other_settings(
    stored: tp.Mapping[str, str],
    wanted: Contents,
    rename: Renaming | None = None,
    within: tp.Container[str] = (),
    frozen: bool = True,
) -> list[Mismatch]:
    """Settings that are stored in another form than the objects have, and what is frozen on one side.

    Args:
        stored: the stored settings, by name.
        wanted: the objects.
        rename: see `Renaming`.
        within: the items that are considered.
        frozen: whether it is stored what was frozen.
    """
    rules = [(Pattern(old), Pattern(new)) for old, new in (rename or {}).items()]
    then = {_renamed(name, rules) or name: text for name, text in stored.items()}
    now = wanted.settings()
    for name in {*then, *now}:  # a Variable that is not frozen has no setting
        variable, _, setting = name.rpartition(".")
        if setting == "frozen" and variable in wanted.leaves and frozen:
            then.setdefault(name, "False")
            now.setdefault(name, "False")
    return [
        Mismatch(name, then[name], text)
        for name, text in now.items()
        if text != then.get(name, text) and name.partition(".")[0] in within
    ]


def _renamed(name: str, rules: tp.Iterable[tuple[Pattern, Pattern]]) -> str | None:
    """What the first pattern that matches a name makes of it."""
    for old, new in rules:
        if (found := old.match(name)) is not None:
            return new.fill(found)
    return None


def compatible(stored: Spec, wanted: Spec, cast: bool | None) -> bool:
    """Whether a stored leaf can take the place of another."""
    if stored.shape != wanted.shape:
        return False
    if stored.dtype == wanted.dtype:
        return True
    if stored.key_impl or wanted.key_impl or stored.is_plain or wanted.is_plain:
        return False
    if "Python str" in (stored.dtype, wanted.dtype):
        return False
    return cast is None or cast or lossless(stored.dtype, wanted.dtype)


def changed(stored: Spec, leaf: Leaf, cast: bool | None) -> Mismatch | None:
    """The cast of a stored leaf that takes the place of another, if there is one.

    There may be one with `cast=None`: without x64 an array of JAX has no 64 bits.
    """
    wanted = stored.dtype if cast is None and not leaf.spec.is_python else leaf.spec.dtype
    if cast is None and leaf.spec.is_python or (dtype := in_arrays(wanted, leaf)) == stored.dtype:
        return None
    return Mismatch(leaf.name, str(stored), str(Spec(leaf.spec.shape, dtype)))


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


def check(report: Report, wanted: Contents, strict: bool, plain: tp.Container[str] = ()) -> None:
    """Refuse a report that is not complete, or leaves abstract values."""
    if strict and not report.complete:
        raise MismatchError(_refusal(report, plain), report)
    kept = [*report.missing, *(m.name for m in report.misshapen)]
    abstract = [name for name in kept if not _has_value(wanted.leaves[name])]
    if abstract:
        shown = ", ".join(abstract[:3]) + (" ..." if len(abstract) > 3 else "")
        raise MismatchError(
            f"{report.source} has no value for {len(abstract):,} abstract leaves, which would stay "
            f"without one: {shown}. Restore into objects that have values.",
            report,
        )


def _has_value(leaf: Leaf) -> bool:
    return (
        leaf.spec.is_python
        or hasattr(leaf.value, "__array__")
        or hasattr(leaf.value, "addressable_shards")
    )


def _castable(mismatch: Mismatch) -> bool:
    """Whether `cast=` makes a mismatch none."""
    stored, _, shape = mismatch.stored.partition("[")
    wanted, _, other = mismatch.wanted.partition("[")
    fixed = ("key<", "None", "empty ", "Python str", "Python bytes")
    return shape == other and not stored.startswith(fixed) and not wanted.startswith(fixed)


def _key_remedy(mismatch: Mismatch) -> str | None:
    """What can be done about random keys of another implementation, or stored as numbers."""
    stored, wanted = map(_implementation, mismatch[1:])
    if stored and wanted and stored != wanted:
        return (
            f"random keys of {stored} cannot be cast to {wanted}: make the streams with keys of the "
            f"stored implementation, nnx.Rngs(jax.random.key(0, impl='{stored}')), or leave them as "
            "they are with only=nnx.Not(nnx.RngKey)"
        )
    if bool(stored) != bool(wanted):
        return (
            "a random key and other values are not cast to each other: jax.random.wrap_key_data makes "
            "a key of its data"
        )
    return None


def _implementation(form: str) -> str | None:
    """That of the random keys which a text such as `key<rbg>[3]` describes; None for other leaves."""
    return form[4:].partition(">")[0] if form.startswith("key<") else None


def _refusal(report: Report, plain: tp.Container[str] = ()) -> str:
    lines = [f"{report.source} does not match the objects, and nothing was changed."]
    lines += [f"  {line}" for line in report.problems()]
    remedies = []
    if any(map(_castable, report.misshapen)):
        remedies.append("cast=True casts with loss of precision, cast=None keeps the stored dtypes")
    remedies += list(dict.fromkeys(filter(None, map(_key_remedy, report.misshapen))))
    wrong = [*report.missing, *report.unexpected, *(m.name for m in report.misshapen)]
    for item in dict.fromkeys(name.partition(".")[0] for name in wrong):
        if item in plain:
            remedies.append(f"without {item}=, report.values[{item!r}] has what was saved")
    if remedy := report.remedy():
        remedies.append(f"{remedy} restores by another name")
    remedies.append("strict=False restores what matches and reports the rest")
    return "\n".join([*lines, "  " + "; ".join(remedies) + "."])
