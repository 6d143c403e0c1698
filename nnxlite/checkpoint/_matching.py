"""Which stored leaf goes where: names, renamings, shapes and dtypes, before anything is read."""

from __future__ import annotations

import difflib
import typing as tp
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import MOST_PATHS
from nnxlite.checkpoint._contents import Contents, Leaf, Spec, in_arrays, other_names
from nnxlite.checkpoint._report import CheckpointError, Mismatch, MismatchError, Report, near_text
from nnxlite.checkpoint._rules import Conversion
from nnxlite.training.patterns import Pattern

Renaming: tp.TypeAlias = tp.Mapping[str, str]
"""Patterns of stored names, and what each becomes: `{"encoder.**": "backbone.**"}`."""


class Matches(tp.NamedTuple):
    """Which stored arrays are for which of ours, by names alone.

    Attributes:
        made: how they become ours.
        missing: names of ours that none is for.
        left_over: stored names that are for none of ours.
    """

    made: list[Conversion]
    missing: list[str]
    left_over: list[str]


def by_name(
    stored: Iterable[str],
    wanted: Contents,
    rename: Renaming | None,
    aliases: tp.Mapping[str, str] = {},
) -> Matches:
    """Match stored names with those of some objects, after a renaming.

    Args:
        stored: the stored names.
        wanted: the objects; leaves that are not chosen are left alone, as are those of their names.
        rename: see `Renaming`; the first pattern that matches a stored name counts.
        aliases: of what is stored, as in `Contents`.

    Raises CheckpointError for a renaming that matches no stored name, or that leads two to one.
    """
    names = renamed(stored, rename or {})
    targets = {name: old for old, name in names.items()}
    for name, old in list(targets.items()):
        for other in other_names(name, aliases):
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
            made.append(Conversion((known[0],), (name,), [(leaf.spec.shape,)]))
        else:
            missing.append(name)
    return Matches(made, missing, [name for old, name in names.items() if old not in used])


def compare(
    source: str,
    stored: tp.Mapping[str, Spec],
    wanted: Contents,
    matches: Matches,
    *,
    strict: bool,
    cast: bool | None,
    within: tp.Container[str] | None = None,
    plain: tp.Container[str] = (),
) -> tuple[list[tuple[Conversion, list[str]]], Report]:
    """What is to be read, with the stored names that there are, and what that will have done.

    Args:
        source: what is read, in words, for messages.
        stored: the stored leaves, by name.
        wanted: the objects.
        matches: which stored leaf is for which of the objects.
        strict: whether an incomplete report is an error.
        cast: whether a value may lose precision or range by a cast; None for no casts at all.
        within: the first parts of stored names that have to be used; by default all.
        plain: items that were saved as plain data.

    Raises:
        MismatchError: for an incomplete report; also without `strict` for a leaf that has no value yet.
    """
    missing, foreign = [*matches.missing], dict[str, str]()
    restored, renamings = list[str](), list[tuple[str, str]]()
    misshapen, casts = list[Mismatch](), list[Mismatch]()
    reads: list[tuple[Conversion, list[str]]] = []
    remedies: dict[str | None, None] = {}
    for conversion in matches.made:
        names = [name for name in conversion.ours if name in wanted.chosen]
        present = [name for name in conversion.foreign if name in stored]
        absent = [name for name in conversion.foreign if name not in stored]
        if absent and not (present and conversion.ties):
            missing += names
            foreign.update(dict.fromkeys(names, absent[0]))
            continue
        first = stored[present[0]]
        needed = zip(conversion.foreign, conversion.shapes[0])
        forms = {name: Spec(shape, first.dtype) for name, shape in needed if name in present}
        odd = next((name for name in present if stored[name] != forms[name]), None)
        good: list[str] = []
        for name in names:
            leaf = wanted.leaves[name]
            then = Spec(leaf.spec.shape, first.dtype) if conversion.operations else first
            if conversion.operations and odd is not None:
                misshapen.append(Mismatch(name, f"{stored[odd]} as {odd}", str(forms[odd])))
            elif not compatible(then, leaf.spec, cast if conversion.cast is None else True):
                misshapen.append(Mismatch(name, str(then), str(leaf.spec)))
                remedies[_remedy(then, leaf.spec)] = None
            else:
                good.append(name)
                casts += [] if (change := changed(then, leaf, cast)) is None else [change]
        restored += good
        renamings += [(old, name) for old in present for name in good if old != name]
        if good:
            reads.append((conversion, present))
    sought = {name: foreign.get(name, name) for name in missing[:MOST_PATHS]}
    some = matches.left_over[:500]
    near = {name: difflib.get_close_matches(old, some, 1) for name, old in sought.items()}
    report = Report(
        source,
        restored=tuple(restored),
        missing=tuple(missing),
        unexpected=tuple(
            n for n in matches.left_over if within is None or n.partition(".")[0] in within
        ),
        misshapen=tuple(misshapen),
        cast=tuple(casts),
        renamed=tuple(renamings),
        near={name: found[0] for name, found in near.items() if found},
        foreign=foreign,
    )
    if strict and not report.complete:
        raise MismatchError(_refusal(report, list(filter(None, remedies)), plain), report)
    _check_abstract(report, wanted)
    return reads, report


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
        rule, names[name] = _renamed(name, rules)
        matched.add(rule)
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
    then = {_renamed(name, rules)[1]: text for name, text in stored.items()}
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


def _renamed(name: str, rules: Iterable[tuple[Pattern, Pattern]]) -> tuple[str, str]:
    """The first pattern that matches a name, if any, and what becomes of the name."""
    for old, new in rules:
        if (found := old.match(name)) is not None:
            return old.text, new.fill(found)
    return "", name


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


def _check_abstract(report: Report, wanted: Contents) -> None:
    """Refuse to leave abstract values without one."""
    kept = [*report.missing, *(m.name for m in report.misshapen)]
    values = {name: wanted.leaves[name].value for name in kept}
    abstract = [name for name in kept if isinstance(values[name], jax.ShapeDtypeStruct)]
    if abstract:
        shown = ", ".join(abstract[:3]) + (" ..." if len(abstract) > 3 else "")
        raise MismatchError(
            f"{report.source} has no value for {len(abstract):,} abstract leaves, which would stay "
            f"without one: {shown}. Restore into objects that have values.",
            report,
        )


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


def _refusal(report: Report, remedies: list[str], plain: tp.Container[str]) -> str:
    lines = [f"{report.source} does not match the objects, and nothing was changed."]
    lines += [f"  {line}" for line in report.problems()]
    wrong = [*report.missing, *report.unexpected, *(m.name for m in report.misshapen)]
    for item in dict.fromkeys(name.partition(".")[0] for name in wrong):
        if item in plain:
            remedies.append(f"without {item}=, report.values[{item!r}] has what was saved")
    if remedy := report.remedy():
        remedies.append(f"{remedy} restores by another name")
    remedies.append("strict=False restores what matches and reports the rest")
    return "\n".join([*lines, "  " + "; ".join(remedies) + "."])
