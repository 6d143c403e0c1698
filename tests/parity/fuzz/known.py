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


_only_theirs(
    "with_rngs in every mode",
    "Settings work in every mode.",
    "graph_updates=True is not supported for `with_rngs`",
)
_only_theirs(
    "arrays of references",
    "`clone(arrays=True)` copies the array in a reference; the reference library passes the reference on.",
    "copy got a Ref of type",
)
_only_theirs(
    "the same prefix twice",
    "What a filter leaves out and what is no argument to differentiate are both constants.",
    r"Inconsistent aliasing.*: (False.*: None|None.*: False)",
    "grad",
)
_only_ours(
    "objects twice in a loop",
    "graph=False refuses sharing everywhere; the loops of the reference do not look.",
    "Duplicate .* With graph=False objects must form a tree",
    "while_loop|fori_loop",
)
_only_ours(
    "objects of arrays twice",
    "graph=False refuses every object that is found twice; the reference looks at Variables only.",
    "Duplicate (Box|Plain|List|Dict) .* With graph=False objects must form a tree",
)
_only_ours(
    "a shared array with two axes",
    "A prefix that contradicts itself raises; the reference looks at Variables only.",
    "Inconsistent aliasing detected: different in_axes for a shared array",
)


_only_theirs(
    "recursive_map of a cycle",
    "A cycle is walked like any other graph.",
    "Found cycle in the graph",
    "recursive_map",
)
_only_theirs(
    "annotations without a mesh",
    "Sharding annotations need no mesh.",
    "An auto mesh context or metadata is required",
)


@rule(
    "metadata of a body",
    "Metadata set in a body reaches the caller's Variable; the reference drops it.",
)
def _(d: Difference) -> bool:
    return (
        d.kind == "value"
        and "set_metadata" in "".join(d.program)
        and re.search(r"\[3\]\.(keys|tag|note)$", d.where) is not None
    )


@rule(
    "weak types of derivatives",
    "A differentiated function keeps weak types of what it writes, and not of cotangents.",
)
def _(d: Difference) -> bool:
    return (
        d.kind == "value"
        and d.where.endswith("[3]")
        and {d.ours, d.theirs} == {True, False}
        and re.search(r"nnx\.(grad|value_and_grad|vjp|jvp|custom_vjp)", "".join(d.program))
        is not None
    )


@rule(
    "averages are raw",
    "EMA and optimizers read and write raw values; callbacks belong to the model's own use of a Variable.",
)
def _(d: Difference) -> bool:
    return (
        d.kind == "value"
        and "EMA(" in "".join(d.program)
        and re.search("on_[sg]et_value|ref=True", "".join(d.program)) is not None
    )


@rule(
    "references and NoUpdate",
    "The reference leaves a mark of its own bookkeeping in a Variable with `ref=True`.",
)
def _(d: Difference) -> bool:
    return (
        d.kind == "value"
        and "ref=True" in "".join(d.program)
        and ("NoUpdate" in repr(d.theirs) or d.theirs == ("some",))
    )


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
