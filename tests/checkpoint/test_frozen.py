"""Objects that cannot be changed: another one takes their place, and is in the report."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.checkpoint.models import READ, SAVE


class Scale(nnx.Module, frozen=True):
    factor: jax.Array
    count: nnx.Variable
    name: str = nnx.field(static=True, default="scale")


class Pair(nnx.Module, frozen=True):
    first: Scale
    rest: tuple


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Theirs:
    """A module of another library; for those of Equinox see `parity/test_equinox_modules.py`."""

    factor: jax.Array


def scale(x):
    return Scale(jnp.full(2, x), nnx.Variable(jnp.full(1, x)))


def shared(x):
    one = scale(x)
    return nnx.Dict(one=one, pair=Pair(one, (one, jnp.full(3, x))), items=nnx.data([(one,)]))


FORMS = {
    "frozen": scale,
    "frozen in frozen": lambda x: Pair(scale(x), (scale(x), jnp.full(3, x))),
    "frozen in a module": lambda x: nnx.Dict(s=scale(x)),
    "frozen in containers": lambda x: nnx.Dict(s=nnx.data([scale(x), {"a": (scale(x),)}])),
    "shared": shared,
    "another library": lambda x: Theirs(jnp.full(2, x)),
    "another library in a module": lambda x: nnx.Dict(s=Theirs(jnp.full(2, x))),
    "frozen in another library": lambda x: Theirs(scale(x)),
}


def brought(way, folder, source, target):
    """What the target becomes with the values of the source."""
    if way in SAVE:
        SAVE[way](folder, source)
        return READ[way](folder, target).values["model"]
    holder = [target]
    nnx.update(holder, nnx.state([source]))
    return holder[0]


def references(tree):
    return {path: x for path, x in nnx.iter_graph(tree) if nnx.graphlib.is_graph_node(x)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", [*SAVE, "update"])
@pytest.mark.parametrize("abstract", [False, True], ids=["concrete", "abstract"])
def test_what_cannot_be_changed_is_replaced(tmp_path, form, way, abstract):
    source, target = FORMS[form](1.0), FORMS[form](0.0)
    if abstract:
        target = nnx.as_abstract(target)
    before = references(target)
    factors = [x.factor for x in before.values() if isinstance(x, Scale)]
    new = brought(way, tmp_path, source, target)
    assert nnx.tree_equal(new, source)
    assert nnx.graphdef(new) == nnx.graphdef(source)  # with its sharing
    replaced = [x for path, x in references(new).items() if x is not before[path]]
    assert all(isinstance(x, (Scale, Pair)) for x in replaced)  # all else is the caller's own
    assert (new is target) == isinstance(target, nnx.Dict)
    old = [x.factor for x in before.values() if isinstance(x, Scale)]
    assert all(x is y for x, y in zip(old, factors, strict=True))


def test_update_has_nowhere_to_put_another_root():
    for root, error, message in (
        (scale(1.0), dataclasses.FrozenInstanceError, "cannot change Scale, a frozen module"),
        (Theirs(jnp.ones(2)), ValueError, "cannot change an array inside a Theirs in place"),
    ):
        with pytest.raises(error, match=f"update {message}"):
            nnx.update(root, {"factor": jnp.zeros(2)})
        assert root.factor.sum() == 2
    module = scale(1.0)  # the remedy
    new = nnx.merge(nnx.graphdef(module), nnx.state(scale(2.0)))
    assert new.factor.tolist() == [2, 2] and module.factor.tolist() == [1, 1]
