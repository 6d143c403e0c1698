"""Errors for what a function must not be given or return, and words for structures that differ."""

from __future__ import annotations

import typing as tp

import jax

from nnxlite._base.errors import path_text
from nnxlite._base.jax import PyTreeDef
from nnxlite._base.outline import array_text
from nnxlite.boundary._call_def import CallDef, paths_of, template_of
from nnxlite.boundary._out import OutDef, Outputs, output_paths
from nnxlite.graph._compare import SHOWN, kind_at, worded
from nnxlite.graph._rebuild import Code, Decoded, Path


def refuse_foreign_outputs(call: CallDef, out: Outputs, name: str = "the function") -> None:
    """Raise TypeError where a function returned or stored something that JAX cannot return.

    Args:
        call: the arguments, with the user's names.
        out: the outputs.
        name: of the function.
    """
    for number, value in enumerate(out.values):
        for leaf in filter(_is_foreign, jax.tree_util.tree_leaves(value)):
            path = output_paths(call, out.definition)[number]
            kind = type(leaf).__name__
            if number < out.definition.num_arrays:
                raise TypeError(
                    f"{name} returned a value of type '{kind}' at '{path_text(path[1:])}', "
                    "which is not a valid JAX type. Return arrays, objects, or pytrees of these; static "
                    "values can be attributes of objects."
                )
            raise TypeError(
                f"{name} stored a value of type '{kind}' at '{path_text(path)}', which is not a "
                "valid JAX type. Store an array; to make an attribute static, assign "
                "nnx.static(value)."
            )


def refuse_non_arrays(
    name: str, call: CallDef, leaves: tp.Sequence[tp.Any], remedy: str, inside: str | None = None
) -> None:
    """Raise TypeError naming the first leaf of the arguments that JAX does not accept.

    Called after JAX refused the arguments; returns if JAX had another reason.

    Args:
        name: of the transform.
        call, leaves: the arguments.
        remedy: what to do instead.
        inside: the same for a leaf inside a module or container, where it differs.
    """
    pairs = zip(call.leaves(), leaves)
    parts = ((leaf.text(), x) for leaf, value in pairs for x in jax.tree_util.tree_leaves(value))
    bad = next((pair for pair in parts if _is_foreign(pair[1])), None)
    if bad is not None:
        if inside is not None and not str(bad[0]).isidentifier():
            remedy = inside
        raise TypeError(
            f"{name}: cannot interpret argument '{bad[0]}' as an array, it is of type "
            f"'{type(bad[1]).__name__}'. {remedy}"
        ) from None


def _is_foreign(value: tp.Any) -> bool:
    try:
        jax.typeof(value)
    except TypeError:
        return True
    return False


def structure_error(
    before: PyTreeDef, after: PyTreeDef, roots: tp.Container[int] = ()
) -> type[Exception]:
    """The class of the error for a carry that changes its structure, as in the reference.

    It is TypeError where only arrays became trees; `roots` are the leaves that are objects.
    """
    try:
        parts = before.flatten_up_to(template_of(after))
    except ValueError:
        return ValueError
    kept = all(isinstance(part, int) for i, part in enumerate(parts) if i in roots)
    return TypeError if kept else ValueError


def tree_difference(
    before: PyTreeDef,
    after: PyTreeDef,
    words: tuple[tp.Sequence[str], tp.Sequence[str]] | None = None,
) -> str:
    """How two pytree structures differ: the paths that only one of them has.

    Args:
        before, after: the structures.
        words: for each of them what its leaves are.

    >>> import jax
    >>> from nnxlite.boundary._refusals import tree_difference
    >>> before, after = map(jax.tree.structure, ({"a": 1, "b": 2}, {"a": 1, "c": (2, 3)}))
    >>> tree_difference(before, after)
    "without 'b', with 'c.0', 'c.1'"
    """
    difference = _difference(paths_of(before), paths_of(after))
    texts = [tree_text(tree, w) for tree, w in zip((before, after), words or (None, None))]
    return difference or f"{texts[1]} in place of {texts[0]}"


def tree_text(treedef: PyTreeDef, words: tp.Sequence[str] | None = None) -> str:
    """A pytree structure as Python would print it, with words for its leaves.

    >>> import jax
    >>> from nnxlite.boundary._refusals import tree_text
    >>> tree_text(jax.tree.structure([1, None]), ["a State"]), tree_text(jax.tree.structure(()))
    ('[a State, None]', '()')
    """
    leaves = [_Word(word) for word in words or ["a leaf"] * treedef.num_leaves]
    text = repr(jax.tree_util.tree_unflatten(treedef, leaves))
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."


_LONGEST = 200


class _Word(str):
    """Text that prints without quotes in a container."""

    __repr__ = str.__str__


def _difference(before: tp.Iterable[Path], after: tp.Iterable[Path]) -> str:
    """The paths that only one of two trees has; nothing where a tree has only one leaf."""
    old, new = (dict.fromkeys(map(path_text, paths)) for paths in (before, after))
    if _ROOT in old or _ROOT in new:
        return ""
    parts = []
    for word, one, other in (("without", old, new), ("with", new, old)):
        missing = [repr(path) for path in one if path not in other]
        if missing:
            more = ", ..." if len(missing) > SHOWN else ""
            parts.append(f"{word} {', '.join(missing[:SHOWN])}{more}")
    return ", ".join(parts)


_ROOT = path_text(())


def edits_text(call: CallDef, left: OutDef) -> str:
    """The structure changes that a function made to its arguments, in words."""
    out = []
    for number, names, removed in left.edits:
        where = node_text(call, tp.cast(int, left.origin[number]))
        out.append(f"attributes {[*names, *removed]} of {where}")
    out += [f"metadata of {node_text(call, old)}" for old, _ in left.kinds]
    return ", ".join(out) or "no structure"


def node_text(call: CallDef, node: int) -> str:
    """The path of an object among the arguments."""
    decoded = call.graphdef.decoded
    root, *below = decoded.path(decoded.node_frames[node])
    return f"'{call.text_of(root, below)}'"


def code_text(code: Code, decoded: Decoded) -> str:
    """What is at some path of a graph: the class of an object or container, an array, a value."""
    return worded(kind_at(decoded, code))


def argument_words(call: CallDef) -> list[str]:
    """What each leaf of the arguments is: an object or an array."""
    words, decoded = ["an array"] * call.treedef.num_leaves, call.graphdef.decoded
    for position, code in zip(call.where, decoded.roots):
        words[position] = f"the {code_text(code, decoded)}"
    return words


def result_words(call: CallDef, out: Outputs) -> list[str]:
    """What each leaf of a result is: an object, a State, or the type of an array."""
    left = out.definition
    words = [described(x) for x in left.split(out.values)[0]]
    for position, code, old in zip(left.where, left.roots, left.known_roots()):
        new = f"a new {code_text(code, left.graphdef.decoded)}"
        words.insert(position, new if old is None else node_text(call, old))
    return words


def described(value: tp.Any) -> str:
    """A leaf (or small tree) by type and shape."""

    def one(x: tp.Any) -> str:
        return array_text(x if hasattr(x, "shape") and hasattr(x, "dtype") else jax.typeof(x))

    leaves, treedef = jax.tree_util.tree_flatten(value)
    if treedef == jax.tree_util.tree_structure(0):
        return one(leaves[0])
    return str(jax.tree_util.tree_unflatten(treedef, [one(x) for x in leaves]))
