"""Law L11: no value of one object turns up in another.

Two objects that are equal but for the identity of their static values and metadata go through everything
that rebuilds objects. What comes back has its own values, or copies of its own.
"""

import copy
import dataclasses
import datetime
import decimal
import functools
import pickle
import types
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx


@dataclasses.dataclass
class Config:
    width: int = 3
    owner: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    width: int = 3
    owner: str = dataclasses.field(default="", compare=False)


class Name(str):
    owner = ""


class Equal:
    owner = ""

    def __eq__(self, other):
        return type(other) is type(self)

    def __hash__(self):
        return 1


class Unhashable(Equal):
    __hash__ = None


def owned(value, owner):
    value.owner = owner
    return value


def named(owner):
    return owned(Name("n"), owner)


def function(owner):
    return lambda x: nnx.relu(x)


def zoned(owner):
    hours = 1 if owner == "a" else 2
    zone = datetime.timezone(datetime.timedelta(hours=hours))
    return datetime.datetime(2020, 1, 1, hours, tzinfo=zone)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["config"])
@dataclasses.dataclass
class Tree:
    x: tp.Any
    config: tp.Any


KINDS = {
    "dataclass": lambda owner: Config(owner=owner),
    "frozen": lambda owner: Frozen(owner=owner),
    "text": named,
    "equal": lambda owner: owned(Equal(), owner),
    "function": function,
    "decimal": lambda owner: decimal.Decimal("1.0" if owner == "a" else "1.00"),
    "datetime": zoned,
    "array": lambda owner: np.arange(3),
    "list": lambda owner: [1, "x", Frozen(owner=owner)],
    "dict": lambda owner: {"k": Config(owner=owner), "n": [Frozen(owner=owner)]},
    "set": lambda owner: {1, 2},
    "tuple": lambda owner: (1, (Frozen(owner=owner), named(owner))),
    "partial": lambda owner: functools.partial(function(owner), 1.0),
    "unhashable": lambda owner: Unhashable(),
    "namespace": lambda owner: types.SimpleNamespace(inner={"a": [Config(owner=owner)]}),
}
"""Each makes a value that equals that of another owner."""


class Part(nnx.Module):
    def __init__(self, make, where, owner):
        metadata = {"held": make(owner)} if where == "metadata" else {}
        self.weight = nnx.Param(jnp.ones(()), **metadata)
        if where == "attribute":
            self.held = nnx.static(make(owner))
        if where == "item":
            self.items = nnx.data([nnx.Param(jnp.ones(())), make(owner)])
        if where == "tree":
            self.tree = nnx.data(Tree(jnp.ones(()), make(owner)))


def held_by(part, where):
    if where == "metadata":
        return part.weight.get_metadata("held")
    if where == "attribute":
        return part.held
    return part.items[1] if where == "item" else part.tree.config


def atoms(value):
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if type(value) in (list, tuple):
        return [atom for part in value for atom in atoms(part)]
    return [value]


def assert_own(result, original, where, copied=False):
    """The static value of a result is that of the original, or a copy of it."""
    mine, theirs = atoms(held_by(result, where)), atoms(held_by(original, where))
    assert len(mine) == len(theirs)
    for new, old in zip(mine, theirs):
        if copied:
            assert getattr(new, "owner", str(new)) == getattr(old, "owner", str(old))
        elif type(old) not in (int, str, set):
            assert new is old, where


def same(part):
    part.weight[...] += 1
    return part


def renamed(part):
    part.weight.set_metadata(other="x")
    return part


def updated(part):
    nnx.update(part, jax.tree.map(lambda x: x + 1, nnx.state(part)))
    return part


def merged(part):
    return nnx.merge(*nnx.split(part))


plain = jax.jit(lambda graphdef, state: nnx.state(nnx.merge(graphdef, state)))
OVER_NONE = {"in_axes": None, "out_axes": None, "axis_size": 2}
OPERATIONS = {
    "clone": nnx.clone,
    "merge": merged,
    "merge of a plain jit": lambda part: nnx.merge(nnx.graphdef(part), plain(*nnx.split(part))),
    "tree_map": lambda part: jax.tree.map(lambda x: x, part),
    "map": lambda part: nnx.map(lambda path, leaf: leaf, part),
    "jit, cloned": nnx.jit(nnx.clone),
    "jit, merged": nnx.jit(merged),
    "jit, the same": nnx.jit(same),
    "jit, new metadata": nnx.jit(renamed),
    "vmap": nnx.vmap(lambda part: part, **OVER_NONE),
    "vmap, cloned": nnx.vmap(nnx.clone, **OVER_NONE),
    "remat": nnx.remat(nnx.clone),
    "grad": lambda part: nnx.value_and_grad(
        lambda part: (part.weight[...], nnx.clone(part)), has_aux=True
    )(part)[0][1],
    "cond": lambda part: nnx.cond(True, lambda part: part, lambda part: part, part),
    "fori_loop": lambda part: nnx.fori_loop(0, 1, lambda i, part: part, part),
    "update": updated,
    "filter_jit": nnx.filter_jit(nnx.clone),
    "eval_shape": lambda part: nnx.eval_shape(nnx.clone, part),
}
COPIES = {
    "deepcopy": copy.deepcopy,
    "deepcopy, split": lambda part: nnx.merge(*copy.deepcopy(nnx.split(part))),
    "pickle": lambda part: pickle.loads(pickle.dumps(part)),
    "pickle, split": lambda part: nnx.merge(*pickle.loads(pickle.dumps(nnx.split(part)))),
}
WHERE = ("attribute", "metadata", "item", "tree")


def can_be(kind, where):
    """Whether a kind of value is static there: arrays are data everywhere else than in metadata."""
    if where == "tree":  # JAX compares the static fields of a registered class by `==` and hash
        return kind not in ("list", "dict", "set", "array", "unhashable", "namespace")
    return kind != "array" or where == "metadata"


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("where", WHERE)
def test_an_object_keeps_its_own_static_values(where, operation):
    """Each operation with a third of the kinds; the others have their turn in another place."""
    first = ([*OPERATIONS].index(operation) + WHERE.index(where)) % 3
    for kind, make in [*KINDS.items()][first::3]:
        if not can_be(kind, where):
            continue
        parts = [Part(make, where, owner) for owner in "ab"]
        for part in (*parts, parts[0]):
            assert_own(OPERATIONS[operation](part), part, where)


@pytest.mark.parametrize("operation", COPIES)
def test_a_copy_has_copies_of_the_static_values_of_its_original(operation):
    for where in ("attribute", "metadata", "item"):
        for kind in ("dataclass", "frozen", "text", "list", "dict", "decimal", "datetime"):
            parts = [Part(KINDS[kind], where, owner) for owner in "ab"]
            for part in parts:
                assert_own(COPIES[operation](part), part, where, copied=True)


def test_equal_metadata_are_no_shared_object():
    for make in (list, dict, set, Config, lambda: np.zeros(2)):
        p, q = (nnx.Param(jnp.ones(()), held=make()) for _ in range(2))
        held = p.get_metadata("held"), q.get_metadata("held")
        assert held[0] is not held[1]
        a, b = (nnx.Linear(1, 1, rngs=nnx.Rngs(0), kernel_metadata={"held": make()}) for _ in "ab")
        assert a.kernel.get_metadata("held") is not b.kernel.get_metadata("held")
        for again in (copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
            assert again.get_metadata("held") is not held[0]


def test_an_edit_of_metadata_in_a_call_reaches_its_own_variable():
    @nnx.jit
    def note(model):
        model.weight.notes.append("seen")

    models = [nnx.Dict(weight=nnx.Param(jnp.ones(()), notes=[])) for _ in range(2)]
    note(models[0])
    assert [model.weight.notes for model in models] == [["seen"], []]
    note(models[1])
    assert [model.weight.notes for model in models] == [["seen"], ["seen"]]
    with pytest.raises(ZeroDivisionError):
        nnx.jit(lambda model: model.weight.notes.append("lost") or 1 / 0)(models[0])
    assert models[0].weight.notes == ["seen"]


def test_equal_models_with_their_own_values_compile_once():
    traces = []

    @nnx.jit
    def run(part):
        traces.append(1)
        return part.weight[...] + 1

    for kind, make in KINDS.items():
        for where in filter(functools.partial(can_be, kind), WHERE[:3]):
            before = len(traces)
            for owner in "ab":
                run(Part(make, where, owner))
            assert len(traces) == before + 1, (kind, where)


def test_a_compiled_function_returns_the_static_values_of_its_own_call():
    held = nnx.filter_jit(lambda part: part.held)
    both = nnx.filter_jit(lambda part, given: (part.weight[...], given))
    made = nnx.jit(lambda given: Part(lambda _: given, "attribute", ""), static_argnums=0)
    for owner in "ab":
        part, given = Part(KINDS["dataclass"], "attribute", owner), Frozen(owner=owner)
        assert held(part) is part.held and both(part, given)[1] is given
        assert made(given).held is given
    first = nnx.jit(lambda pair: nnx.Dict(held=pair.a))
    for a, b in ((given, given), (Frozen(owner="a"), Frozen(owner="b"))):
        assert first(nnx.Dict(a=a, b=b, x=jnp.ones(1))).held is a
