"""The differences that stay on purpose, each as narrow as it can be told from outside."""

from __future__ import annotations

import dataclasses
import re
import typing as tp

from tests.parity.fuzz.run import Difference


@dataclasses.dataclass
class Rule:
    """A deliberate difference: its name, its reason, and how it is recognised."""

    name: str
    reason: str
    matches: tp.Callable[[Difference], bool]


RULES: list[Rule] = []


def rule(name: str, reason: str) -> tp.Any:
    """Register a rule."""

    def add(matches: tp.Callable[[Difference], bool]) -> tp.Any:
        RULES.append(Rule(name, reason, matches))
        return matches

    return add


def explain(found: Difference) -> str | None:
    """The name of the rule that a difference falls under."""
    return next((rule.name for rule in RULES if rule.matches(found)), None)


def _message(x: tp.Any) -> str:
    return f"{type(x).__name__}: {x}" if isinstance(x, BaseException) else ""


def _only_theirs(name: str, reason: str, message: str, text: str = "") -> None:
    """The reference refuses, with a certain message, and nnxlite does not."""
    rule(name, reason)(
        lambda d: (
            d.kind == "passes"
            and re.search(message, _message(d.theirs), re.DOTALL) is not None
            and re.search(text, "\n".join(d.program)) is not None
        )
    )


def _only_ours(name: str, reason: str, message: str, text: str = "") -> None:
    """nnxlite refuses, with a certain message, and the reference does not."""
    rule(name, reason)(
        lambda d: (
            d.kind == "raises"
            and re.search(message, _message(d.ours), re.DOTALL) is not None
            and re.search(text, "\n".join(d.program)) is not None
        )
    )


_only_theirs(
    "captured objects are handed on",
    "Every transform takes what is bound: an object from outside may be an argument of an inner transform.",
    "^TraceContextError: Cannot mutate|^ValueError: Cannot extract graph node from different trace",
)
_only_theirs(
    "jit_partial takes Variables",
    "Every transform propagates structure, and takes what is bound.",
    "jit_partial only supports Var",
)
_only_theirs(
    "prefixes in every mode",
    "Settings work in every mode.",
    "TreeState",
)
_only_theirs(
    "another mesh",
    "Sharding annotations need no mesh, and one mesh may follow another.",
    "does not match the mesh shape of the target sharding",
)
_only_theirs(
    "references as carries",
    "A Variable with `ref=True` may be in the carry of a loop; the reference trips over its own bookkeeping.",
    "NoUpdate",
)


@rule(
    "references and NoUpdate",
    "The reference leaves a mark of its own bookkeeping in a Variable with `ref=True`.",
)
def _(d: Difference) -> bool:
    return d.kind == "value" and "NoUpdate" in repr(d.theirs)


@rule(
    "the caller's own object out of a loop",
    "Settings work in every mode: a loop that returns the object it was given returns the caller's own.",
)
def _(d: Difference) -> bool:
    tail = d.program[d.index]
    return (
        d.kind == "value"
        and re.search(r"(fori_loop|while_loop|scan)\(", "\n".join(d.program)) is not None
        and re.search("graph_updates=False|graph=False", "\n".join(d.program)) is not None
        and re.search(r"\br\d+ = ", tail) is not None
        and isinstance(d.ours, tuple)
        and d.ours[:1] == ("same",)
    )
