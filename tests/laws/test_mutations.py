"""Plans never serve stale structure: random edits between calls, compared with the slow model.

After each edit every function is called on the object that was edited, whose plan is warm, and on a
copy that was built by hand and that nothing has ever looked at.
"""

from __future__ import annotations

import typing as tp

from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlite as nnx
from tests.laws import model
from tests.laws.graphs import (
    NAMES,
    Box,
    Pool,
    arrays,
    graphs,
    metadata,
    statics,
    values,
    variables,
)


def editable(root: tp.Any) -> list[tp.Any]:
    """What can be edited in place, static containers included, and the Variables."""
    found: dict[int, tp.Any] = {}

    def visit(value: tp.Any) -> None:
        if id(value) in found or not (model.is_branch(value) or model.is_variable(value)):
            return
        if not isinstance(value, tuple) or model.is_object(value):
            found[id(value)] = value
        if model.is_branch(value):
            for _, child, _ in model.children(value):
                visit(child)

    visit(root)
    return list(found.values())


def is_static_place(root: tp.Any, value: tp.Any) -> bool:
    """Whether a plain container is a static attribute, or inside one."""
    places: list[bool] = []

    def visit(here: tp.Any, static: bool, seen: set[int]) -> None:
        if here is value:
            places.append(static)
        if id(here) in seen or not model.is_branch(here):
            return
        seen.add(id(here))
        for _, child, data in model.children(here):
            visit(child, static or not data, seen)

    visit(root, False, set())
    return any(places)


def edit(draw: tp.Any, root: tp.Any, pool: Pool) -> None:
    """One random edit of one random thing."""
    target = draw(st.sampled_from(editable(root)))
    if isinstance(target, nnx.Variable):
        how = draw(st.sampled_from(["value", "set", "replace", "remove"]))
        names = [k for k in target.get_metadata() if k in ("tag", "axes", "note")]
        if how == "value":
            target.value = draw(arrays)
        elif how == "remove" and names:
            target.del_metadata(draw(st.sampled_from(names)))
        elif how == "replace":
            target.set_metadata(draw(metadata))
        else:
            target.set_metadata(tag=draw(st.integers(0, 3)))
    elif isinstance(target, nnx.List):
        edit_list(draw, target, draw(values(pool, 1)))
    elif isinstance(target, nnx.Dict):
        edit_dict(draw, target, draw(values(pool, 1)), st.sampled_from(NAMES))
    elif isinstance(target, nnx.State):
        edit_dict(draw, target, draw(st.one_of(arrays, variables())), st.sampled_from(NAMES))
    elif isinstance(target, nnx.Pytree):
        edit_object(draw, target, draw(values(pool, 2)))
    elif isinstance(target, Box):
        if draw(st.booleans()):
            target.label = draw(st.sampled_from(["box", "other", "third"]))
        else:
            target.content = draw(arrays)
    else:
        new = draw(statics if is_static_place(root, target) else plain_values(pool))
        if isinstance(target, list):
            edit_list(draw, target, new)
        elif isinstance(target, dict):
            keys = [k for k in target if isinstance(k, str)]
            edit_dict(draw, target, new, st.sampled_from(sorted({*keys, *NAMES})))


def plain_values(pool: Pool) -> st.SearchStrategy[tp.Any]:
    """What may be put into a plain container: anything but marked values."""
    return st.one_of(arrays, statics, st.sampled_from(pool.known), variables())


def edit_list(draw: tp.Any, target: tp.Any, new: tp.Any) -> None:
    how = draw(st.sampled_from(["append", "insert", "set", "delete", "pop", "clear", "reverse"]))
    if how == "append" or not len(target):
        target.append(new)
    elif how == "insert":
        target.insert(draw(st.integers(0, len(target))), new)
    elif how == "clear":
        target.clear()
    elif how == "reverse":
        target.reverse()
    elif how == "pop":
        target.pop()
    else:
        index = draw(st.integers(0, len(target) - 1))
        if how == "set":
            target[index] = new
        else:
            del target[index]


def edit_dict(draw: tp.Any, target: tp.Any, new: tp.Any, names: tp.Any) -> None:
    name = draw(names)
    how = draw(st.sampled_from(["set", "delete", "update", "clear"]))
    if how == "delete" and name in target:
        del target[name]
    elif how == "update":
        target.update({name: new})
    elif how == "clear":
        target.clear()
    else:
        target[name] = new


def edit_object(draw: tp.Any, target: tp.Any, new: tp.Any) -> None:
    name = draw(st.sampled_from(NAMES))
    if draw(st.integers(0, 3)) == 0 and name in vars(target):
        delattr(target, name)
    else:
        setattr(target, name, new)


@settings(max_examples=150)
@given(st.data(), graphs(depth=2))
def test_every_function_sees_every_edit(data, made):
    root, pool = made
    model.check(root)
    for _ in range(data.draw(st.integers(1, 4), label="edits")):
        before = model.canonical(root)
        try:
            edit(data.draw, root, pool)
        except (ValueError, KeyError, IndexError):  # refused: nothing may have changed (L8)
            assert model.canonical(root) == before
        try:
            nnx.split(root)
        except ValueError as error:  # data was put into a static container, or into itself
            assert "static attribute" in str(error) or "contains itself" in str(error)
            return
        model.check(root)
