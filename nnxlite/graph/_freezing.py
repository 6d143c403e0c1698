"""Freezing: which Variables `nnx.grad` and the optimizers leave alone.

A frozen Variable has an additional entry in its metadata.  `grad` and `value_and_grad` do not
differentiate it, and an `Optimizer` does not change it, whatever their filters select.  Metadata is part
of the structure: it goes through `split`, `clone` and every transform, a compiled step is compiled again
after a change, and unfreezing brings the former program back.  Models without frozen Variables pay
nothing.
"""

from __future__ import annotations

import difflib
import typing as tp

from nnxlite._base.errors import filter_text, listed, path_text
from nnxlite.filters import Filter, OfType, PathContains, WithTag, to_predicate
from nnxlite.graph._rebuild import Path
from nnxlite.graph._walk import iter_graph
from nnxlite.variables._definition import FROZEN
from nnxlite.variables._variable import Variable, is_variable

Pairs = list[tuple[Path, tp.Any]]


def freeze(model: tp.Any, filter: Filter = ..., /) -> None:
    """Freeze Variables: `nnx.grad` does not differentiate them and no optimizer changes them.

    An optimizer made afterwards has no state for them. One made before keeps their state as it is,
    and goes on with it once they are unfrozen.

    Args:
        model: an object, or a pytree of objects.
        filter: the Variables to freeze; by default all.

    Raises:
        ValueError: if the filter matches no Variable; nothing is changed then.
        TraceContextError: when called from another trace level than the Variables' own.

    >>> import nnxlite as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.freeze(model, nnx.PathContains("kernel"))
    >>> list(nnx.grad(lambda m: m.kernel.sum() + m.bias.sum())(model))
    ['bias']
    >>> list(nnx.state(model, nnx.Frozen()))
    ['kernel']
    """
    for variable in _chosen(model, filter, "freeze"):
        variable.set_metadata(FROZEN, True)


def unfreeze(model: tp.Any, filter: Filter = ..., /) -> None:
    """The inverse of `freeze`.

    Args:
        model: an object, or a pytree of objects.
        filter: the Variables to unfreeze; by default all.

    Raises:
        ValueError: if the filter matches no Variable; nothing is changed then.
        TraceContextError: when called from another trace level than the Variables' own.

    >>> import nnxlite as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.freeze(model)
    >>> nnx.unfreeze(model, nnx.PathContains("bias"))
    >>> list(nnx.state(model, nnx.Not(nnx.Frozen())))
    ['bias']
    """
    for variable in _chosen(model, filter, "unfreeze"):
        if variable.has_metadata(FROZEN):
            variable.del_metadata(FROZEN)


def _chosen(model: tp.Any, filter: Filter, caller: str) -> list[Variable[tp.Any]]:
    """The Variables that a filter matches, all of the present trace."""
    chosen = [variable for _, variable in matches(model, filter, is_variable, "Variable", caller)]
    for variable in chosen:
        variable._check_level("metadata")
    return chosen


def matches(
    model: tp.Any,
    filter: Filter,
    wanted: tp.Callable[[tp.Any], bool],
    what: str,
    caller: str,
) -> Pairs:
    """The nodes of a graph that a filter matches, each once, with their paths.

    Args:
        model: an object, or a pytree of objects.
        filter: the filter.
        wanted: whether a node is considered.
        what: the name of the wanted nodes, for messages.
        caller: the user's call, for messages.

    Raises ValueError, which suggests similar names, if none matches.
    """
    predicate = to_predicate(filter)
    nodes = [(path, node) for path, node in iter_graph(model) if wanted(node)]
    chosen = [(path, node) for path, node in nodes if predicate(path, node)]
    if not chosen:
        raise ValueError(
            f"{caller}: the filter {filter_text(filter)} matches no {what} of {type(model).__name__}. "
            f"{_hint(predicate, nodes, what)}{_listed(nodes, what)}"
        )
    return chosen


def _hint(predicate: tp.Any, nodes: Pairs, what: str) -> str:
    """What was probably meant."""
    names = {str(part) for path, _ in nodes for part in path}
    if isinstance(predicate, PathContains):
        return _similar(str(predicate.key), names, "in the paths")
    if isinstance(predicate, WithTag):
        if predicate.tag in names:
            return (
                f"A string is the tag of a Variable; for a name in the path use "
                f"PathContains({predicate.tag!r}). "
            )
        tags = {str(getattr(node, "tag", "")) for _, node in nodes}
        return _similar(predicate.tag, tags | names, "among tags and paths")
    if isinstance(predicate, OfType) and isinstance(predicate.type, type):
        kinds = ", ".join(sorted({type(node).__name__ for _, node in nodes}))
        if what == "Variable" and nodes and not issubclass(predicate.type, Variable):
            part = path_text(("model", *nodes[0][0][:-1]))
            return (
                "Filters match Variables here, not the objects that contain them; give the part "
                f"itself, such as {part}. "
            )
        return f"Its {what}s are of the kinds {kinds}. " if kinds else ""
    return ""


def _similar(word: str, words: tp.Iterable[str], where: str) -> str:
    near = difflib.get_close_matches(word, sorted(words), n=3)
    return f"Similar {where}: {', '.join(map(repr, near))}. " if near else ""


def _listed(nodes: Pairs, what: str) -> str:
    if not nodes:
        return f"It has no {what}s."
    return f"It has {listed(nodes, text=lambda pair: path_text(pair[0]))}."
