"""Views: copies of a model that share its Variables and differ in their modes.

`view` sets modes through the `set_view` methods of layers, `with_attributes` sets attributes
directly.  Both leave the model unchanged; but writing to a Variable of the copy writes to the
model's, since it is the same Variable.
"""

from __future__ import annotations

import inspect
import re
import typing as tp

from nnxlite.filters import Filter, to_predicate
from nnxlite.graph._functional import clone
from nnxlite.graph._walk import iter_graph
from nnxlite.objects._module import set_existing
from nnxlite.objects._pytree import Pytree

A = tp.TypeVar("A")


def view(
    node: A,
    /,
    *,
    only: Filter = ...,
    raise_if_not_found: bool = True,
    graph: bool | None = None,
    **kwargs: tp.Any,
) -> A:
    """A copy of a model in other modes, with the same Variables.

    The method `set_view` of every object that has one is called with those of the keyword arguments
    that it accepts; `view_info` lists them.

    Args:
        node: a model, or any pytree of graph objects.
        only: a filter that selects objects; by default all.
        raise_if_not_found: whether each keyword must be accepted by some object.
        graph: False refuses shared references.
        kwargs: the modes, such as `deterministic=True`.

    Returns:
        A pytree of the same structure, with new objects.

    Raises:
        ValueError: for a keyword that no object accepts.

    >>> import nnxlite as nnx
    >>> model = nnx.Dict(drop=nnx.Dropout(0.5), linear=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> still = nnx.view(model, deterministic=True)
    >>> still.drop.deterministic, model.drop.deterministic
    (True, False)
    >>> still.linear.kernel is model.linear.kernel
    True
    """
    copy = clone(node, variables=False, graph=graph)
    unused = set(kwargs)
    for viewed in _viewed(copy, only, None):
        accepted = _keywords(viewed, kwargs)
        unused -= accepted.keys()
        viewed.set_view(**accepted)
    if unused and raise_if_not_found:
        raise ValueError(
            f"Unused keys found in nnx.view: {sorted(unused)}. No set_view method in this "
            f"{type(node).__name__} takes them; nnx.view_info(model) lists what can be set. "
            "Correct the names, or pass raise_if_not_found=False."
        )
    return copy


def _viewed(node: tp.Any, only: Filter, graph: bool | None) -> list[tp.Any]:
    """The objects with a `set_view` method that a filter matches."""
    matches = to_predicate(only)
    return [
        value
        for path, value in iter_graph(node, graph=graph)
        if isinstance(value, Pytree)
        and callable(getattr(value, "set_view", None))
        and matches(path, value)
    ]


def _keywords(viewed: tp.Any, kwargs: dict[str, tp.Any]) -> dict[str, tp.Any]:
    """Those of the keyword arguments that an object's `set_view` accepts."""
    parameters = inspect.signature(viewed.set_view).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return kwargs
    names = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    return {name: value for name, value in kwargs.items() if name in names}


def view_info(node: tp.Any, /, *, only: Filter = ..., graph: bool | None = None) -> str:
    """The modes that `view` can set, as text: by class, with types, defaults and meaning.

    Args:
        node: a model, or any pytree of graph objects.
        only: a filter that selects objects; by default all.
        graph: False refuses shared references.

    Returns:
        A string; empty where nothing can be set.

    >>> import nnxlite as nnx
    >>> print(nnx.view_info(nnx.Dict(drop=nnx.Dropout(0.5))))
    Dropout:
      deterministic: bool | None = None
        if True, the layer gives its input back unchanged.
    """
    classes = {type(viewed) for viewed in _viewed(node, only, graph)}
    return "\n".join(
        line
        for cls in sorted(classes, key=lambda c: (c.__qualname__, c.__module__))
        for line in _describe(cls)
    )


def _describe(cls: tp.Any) -> tp.Iterator[str]:
    yield f"{cls.__qualname__}:"
    method = cls.set_view
    meanings = _meanings(inspect.getdoc(method) or "")
    _, *parameters = inspect.signature(method).parameters.values()
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        text, note = str(parameter), parameter.annotation
        # An annotation that is text, without quotes: as it is written in the source.
        yield "  " + (text.replace(repr(note), note, 1) if isinstance(note, str) else text)
        yield from (f"    {line}" for line in meanings.get(parameter.name, ()))


_SECTION = re.compile(r"^ *(?:Args|Arguments|Parameters):\n((?:[ \t]+.*\n?|\n)*)", re.M)
_ENTRY = re.compile(r"^([ \t]+)\*{0,2}(\w+)[^:\n]*:(.*(?:\n+\1[ \t]+.*)*)", re.M)


def _meanings(doc: str) -> dict[str, list[str]]:
    """The lines of the section "Args:" of a docstring, by name of the argument."""
    section = _SECTION.search(doc)
    entries = _ENTRY.findall(section.group(1)) if section else []
    return {name: [*filter(None, map(str.strip, text.splitlines()))] for _, name, text in entries}


def with_attributes(
    node: A,
    /,
    *,
    only: Filter = ...,
    raise_if_not_found: bool = True,
    graph: bool | None = None,
    **attributes: tp.Any,
) -> A:
    """A copy of a model with other attributes, with the same Variables.

    The attributes are set on those modules that have them already, as by `Module.set_attributes`.

    Args:
        node: a model, or any pytree of graph objects.
        only: a filter that selects modules; by default all.
        raise_if_not_found: whether each attribute must exist in some module.
        graph: False refuses shared references.
        attributes: names and new values.

    Returns:
        A pytree of the same structure, with new objects.

    Raises:
        ValueError: for an attribute that no module has.

    >>> import nnxlite as nnx
    >>> model = nnx.Dict(drop=nnx.Dropout(0.5))
    >>> nnx.with_attributes(model, rate=0.1).drop.rate, model.drop.rate
    (0.1, 0.5)
    """
    copy = clone(node, variables=False, graph=graph)
    set_existing(copy, only, attributes, raise_if_not_found)
    return copy
