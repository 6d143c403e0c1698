"""Splitting an import in two: what moves to nnxlite, and what stays."""

from __future__ import annotations

import typing as tp
from collections.abc import Callable, Sequence

from nnxlite.migrate._edits import Edit
from nnxlite.migrate._program import Program, dotted

if tp.TYPE_CHECKING:
    import libcst as cst


def alias_text(name: str, alias: cst.ImportAlias) -> str:
    """`name`, or `name as other` where the alias has another name."""
    if alias.asname is None:
        return name
    return f"{name} as {alias.asname.name.value}"  # type: ignore[union-attr]


def bound_name(alias: cst.ImportAlias) -> str:
    """The name that an alias of an import binds."""
    if alias.asname is not None:
        return alias.asname.name.value  # type: ignore[union-attr, return-value]
    return dotted(alias.name)[0]


def rewrite(
    program: Program,
    statement: cst.Import | cst.ImportFrom,
    moved: Callable[[cst.ImportAlias], tuple[str, ...]],
    *,
    keep: Callable[[cst.ImportAlias], bool] = lambda alias: False,
) -> list[Edit]:
    """An edit of an import statement.

    Args:
        program: the program.
        statement: the import.
        moved: the statements that take the place of an alias; none for an alias that stays. Those
            that begin with the same `from ... import` are joined.
        keep: whether an alias that moves stays as well.
    """
    aliases: Sequence[cst.ImportAlias] = statement.names  # type: ignore[assignment]
    new = {alias: moved(alias) for alias in aliases}
    if not any(new.values()):
        return []
    lines = _joined([text for texts in new.values() for text in texts])
    stay = [alias for alias in aliases if not new[alias] or keep(alias)]
    comments = [] if len(stay) == len(aliases) else _comments(program, aliases, new)
    if stay:
        lines.insert(0, _with_names(program, statement, stay))
    node = program.parent(statement)
    alone = type(node).__name__ == "SimpleStatementLine" and len(node.body) == 1  # type: ignore[attr-defined]
    between = program.newline + program.indent(statement) if alone else "; "
    text = between.join(lines)
    if alone and comments:
        text += "".join(f"  {comment}" for comment in comments)
    return [program.replaced(statement, text)]


def _joined(parts: list[str]) -> list[str]:
    """Statements, with the names of those that import from the same module in one."""
    found: dict[str, list[str]] = {}
    for part in parts:
        head, _, name = part.partition(" import ")
        found.setdefault(head if name else part, []).extend([name] if name else [])
    return [f"{head} import {', '.join(names)}" if names else head for head, names in found.items()]


def _comments(
    program: Program,
    aliases: Sequence[cst.ImportAlias],
    new: dict[cst.ImportAlias, tuple[str, ...]],
) -> list[str]:
    """The comments behind the aliases that move."""
    found = []
    for alias in aliases:
        if new[alias]:
            found += _comments_in(alias.comma)
    return found


def _comments_in(node: tp.Any) -> list[str]:
    if type(node).__name__ == "Comment":
        return [node.value]
    children = getattr(node, "children", ())
    return [comment for child in children for comment in _comments_in(child)]


def _with_names(
    program: Program, statement: cst.Import | cst.ImportFrom, stay: list[cst.ImportAlias]
) -> str:
    """The import with some of its aliases, as it was written."""
    import libcst as cst

    names = list(stay)
    if getattr(statement, "lpar", None) is None:
        names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return program.module.code_for_node(statement.with_changes(names=names))
