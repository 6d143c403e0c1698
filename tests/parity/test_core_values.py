"""Variables, containers and settings beside the reference: less trodden paths of the core."""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import math
import operator
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite
from tests.parity.layers import OLDER

ref = pytest.importorskip("flax.nnx")

pytestmark = pytest.mark.filterwarnings("ignore")

PROGRAMS: dict[str, tp.Callable[[tp.Any], tp.Any]] = {}


def program(function: tp.Callable[[tp.Any], tp.Any]) -> tp.Callable[[tp.Any], tp.Any]:
    """A program written against `nnx`, to be run with both libraries."""
    PROGRAMS[function.__name__] = function
    return function


def plain(x: tp.Any) -> tp.Any:
    """Results of both libraries in one form."""
    if isinstance(x, (nnxlite.Variable, ref.Variable)):
        return type(x).__name__, plain(x.get_raw_value()), plain(x.get_metadata())
    if isinstance(x, (nnxlite.State, ref.State, dict)):
        return {k: plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(v) for v in x]
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return plain(jax.random.key_data(x))
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return str(x.dtype), x.tolist()
    return x


def outcome(function: tp.Callable[[tp.Any], tp.Any], nnx: tp.Any) -> tp.Any:
    """What a program gives: its result, or the builtin class of its error."""
    try:
        return plain(function(nnx))
    except Exception as error:
        return next(c for c in type(error).__mro__ if c.__module__ == "builtins").__name__


# Variables ---------------------------------------------------------------------------------------


def doubling(nnx: tp.Any) -> tp.Any:
    class Doubling(nnx.Variable):
        calls: tp.ClassVar[list[str]] = []

        def get_value(self, **kwargs):
            self.calls.append("get" + "".join(kwargs))
            return super().get_value(**kwargs) * 2

        def set_value(self, value, **kwargs):
            self.calls.append("set" + "".join(kwargs))
            super().set_value(value + 1, **kwargs)

        def create_value(self, value):
            return value + 100

    return Doubling


@program
def overriding_create_value(nnx):
    class Own(nnx.Variable):
        def on_create_value(self, value):
            return value * 10

        def create_value(self, value):
            return value * self.scale

    hook = lambda variable, value: value + 1
    made = Own(1.0, scale=2), Own(1.0, scale=2, on_create_value=hook)
    return [v.value for v in made], nnx.Param(1.0, on_create_value=hook).create_value(2.0)


@program
def overriding_get_value(nnx):
    v = doubling(nnx)(jnp.array([1.0, 2.0]))
    read = [v, v[...], v[0], v.value, v.get_value(), v + 1, v == 202, jnp.asarray(v), list(v)]
    return read, len(v), v.shape, v.calls[:2]


@program
def overriding_set_value(nnx):
    v = doubling(nnx)(jnp.array([1.0, 2.0]))
    seen = []
    for write in (
        lambda: v.__setitem__(..., jnp.array([5.0, 6.0])),
        lambda: v.__setitem__(0, 9.0),
        lambda: setattr(v, "value", jnp.array([7.0, 8.0])),
        lambda: v.set_value(jnp.array([1.0, 1.0])),
        lambda: v.set_raw_value(jnp.array([3.0, 3.0])),
    ):
        write()
        seen.append(v.get_raw_value())
    return seen, v.calls


@program
def overriding_in_transforms(nnx):
    kind = doubling(nnx)

    class Model(nnx.Module):
        def __init__(self):
            self.v = kind(jnp.array([1.0, 2.0]))

    model = Model()

    @nnx.jit
    def step(model):
        model.v[...] = model.v[...] + 1
        return model.v[...]

    out = step(model)
    grads = nnx.grad(lambda m: jnp.sum(m.v[...]), argnums=nnx.DiffState(0, kind))(model)
    nnx.update(model, {"v": jnp.zeros(2)})
    return out, grads, nnx.state(model), nnx.to_pure_dict(nnx.state(model)), nnx.clone(model).v


@program
def a_constant_in_place_of_the_value(nnx):
    class Named(nnx.Variable):
        def get_value(self, *, index=...):
            return "got"

    v = Named(1)
    return v.value, v[...], v.get_raw_value()


@program
def truth(nnx):
    values = (jnp.ones(3), jnp.zeros(3), np.zeros(1), jnp.zeros((0, 2)), jnp.zeros(()).reshape(1))
    return [bool(nnx.Param(v)) for v in values], ["no", "yes"][bool(nnx.Param([]))]


@program
def rounding(nnx):
    values = (jnp.array([1.25, 2.75]), jnp.array(2.6), jnp.array(2), 2.5, np.float32(2.5))
    return [[round(nnx.Param(v)), round(nnx.Param(v), 1)] for v in values], [
        f(nnx.Param(2.5)) for f in (math.trunc, math.floor, math.ceil)
    ]


@program
def required_metadata(nnx):
    return sorted(nnx.Variable.required_metadata), sorted(nnx.Param(1).required_metadata)


@program
def one_name_and_a_choice_of_names(nnx):
    return nnx.Param(1, a=2).get_metadata("a", exclude_required=True)


@program
def defaults_as_a_mapping(nnx):
    before = nnx.var_defaults()
    with nnx.var_defaults(ref=True):
        inside = dict(nnx.var_defaults())
    again = nnx.variablelib.VarDefaults(hijax=False, ref=False)
    return dict(**before), before["ref"], list(before), inside, before == again


@program
def callbacks_are_kept_as_they_are_given(nnx):
    def add(variable, value):
        return value + 1

    v = nnx.Param(jnp.ones(1), on_get_value=add)
    kept = v.get_metadata("on_get_value")
    return kept is add, v.on_get_value is add, list(v.get_metadata(exclude_required=True))


@program
def items_are_deleted(nnx):
    mapping, sequence = nnx.Variable({"a": 1, "b": 2}), nnx.Variable([1, 2, 3])
    del mapping["a"], sequence[:2]
    return mapping, sequence


@program
def an_item_that_is_not_there_is_deleted(nnx):
    del nnx.Variable({"a": 1})["b"]


@program
def items_of_arrays_are_not_deleted(nnx):
    del nnx.Param(jnp.ones(2))[0]


# Objects -----------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Settings:
    """A pytree of one's own, with what is an array or a Variable and what is not."""

    weight: tp.Any
    flag: tp.Any = True
    name: tp.Any = None


@program
def static_values_in_pytrees_of_ones_own(nnx):
    class Model(nnx.Module):
        def __init__(self):
            self.settings = nnx.data(Settings(nnx.Param(jnp.ones(1)), True, "x"))
            self.scale = nnx.data(Settings(jnp.ones(1), 2.5))

    @nnx.jit
    def run(model):
        assert model.settings.name == "x" and model.scale.flag == 2.5
        return model.settings.weight * 2 if model.settings.flag else model.settings.weight

    model = Model()
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    new = nnx.merge(graphdef, params, rest)
    nnx.update(new, {"settings": {"weight": jnp.zeros(1)}})
    paths = nnx.to_flat_state(nnx.state(model)).paths
    return run(model), params, rest, paths, new.settings.flag, new.scale.flag, nnx.state(new)


@program
def a_mapping_type_of_ones_own(nnx):
    tree = collections.OrderedDict(b=nnx.Param(1), a=2, c=jnp.ones(1))
    graphdef, state = nnx.split(tree)
    new = nnx.merge(graphdef, state)
    return state, list(new), new["a"], type(new).__name__


@program
def arguments_without_a_constructor(nnx):
    class Empty(nnx.Module):
        pass

    return Empty(1)


@program
def keywords_without_a_constructor(nnx):
    class Empty(nnx.Module):
        pass

    return Empty(a=1)


@program
def a_constructor_by_new(nnx):
    class Made(nnx.Module):
        def __new__(cls, *args):
            return super().__new__(cls)

        def __init__(self, x):
            self.x = x

    return Made(3).x


@program
def children_by_method(nnx):
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(1)
            self.layers = nnx.List([nnx.Param(2)])
            self.again = self.w

    model = Model()
    return [
        [(name, type(c).__name__) for name, c in it]
        for it in (model.iter_children(), nnx.iter_children(model), nnx.iter_module_children(model))
    ]


@program
def equal_containers(nnx):
    w = nnx.Param(jnp.ones(2))
    lists = [
        nnx.List([1, "a"]) == nnx.List([1, "a"]),
        nnx.List() == nnx.List(),
        nnx.List([1]) == [1],
    ]
    dicts = [
        nnx.Dict(a=1) == nnx.Dict(a=1),
        nnx.Dict(a=1) == nnx.Dict(a=2),
        nnx.Dict(a=1) == {"a": 1},
        {"a": 1} == nnx.Dict(a=1),
        nnx.Dict(a=nnx.Dict(b=1)) == nnx.Dict(a=nnx.Dict(b=1)),
        nnx.Dict(a=w) == nnx.Dict(a=w),
        nnx.Dict(a=1) != nnx.Dict(a=1),
        nnx.Dict() == 3,
    ]
    return lists, dicts


@program
def positions_as_names(nnx):
    layers = nnx.Sequential(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), nnx.relu).layers
    layers[0].bias[...] = jnp.array([3.0])
    found = functools.reduce(getattr, "0.bias".split("."), layers)
    there = [hasattr(layers, name) for name in ("0", "1", "2", "-1", "01", "x")]
    setattr(layers, "1", nnx.Param(7))
    return found, there, len(layers), layers[1], nnx.state(layers)


@program
def a_position_that_is_not_there(nnx):
    return getattr(nnx.List([1]), "1")


@program
def a_descriptor_with_a_value_of_its_class(nnx):
    class Doubled:
        def __get__(self, owner, cls):
            return 0 if owner is None else owner.half * 2

        def __set__(self, owner, value):
            owner.half = value // 2

    class Model(nnx.Module):
        size = Doubled()

        def __init__(self):
            self.size = 6

    model = Model()
    model.size = 8
    return model.half, model.size, Model.size, nnx.clone(model).size


@program
def private_names_of_ones_own(nnx):
    class Padded(nnx.Conv):
        def __init__(self):
            super().__init__(1, 1, (3,), padding="CAUSAL", rngs=nnx.Rngs(0))
            self._wrap = self._inner = self._record = self._add = self._window = nnx.Param(1.0)

        def _pad(self, x):
            return x * self._inner

        def __call__(self, x):
            x = self.perturb("x", super().__call__(self._pad(x)))
            self.sow(nnx.Intermediate, "mean", x.mean())
            return x

    model = Padded()
    x = model(jnp.ones((1, 4, 1)))
    state = nnx.state(model)
    captured = nnx.capture(model, nnx.Intermediate, nnx.Perturbation)(jnp.ones((1, 4, 1)))
    return x, state, state._inner.shape, state["_wrap"] is state._wrap, captured[1]


@program
def static_values_of_ones_own(nnx):
    add = jax.jit(lambda x, by: x + by.value)
    by = nnx.graphlib.Static(2)
    return add(1, by), jax.tree.leaves([by]), by == nnx.graphlib.Static(2), by.value


@program
def names_of_the_methods_beside_the_functions(nnx):
    @dataclasses.dataclass
    class Split(nnx.Module):
        split: int
        update: tp.Any
        last: int

        def __call__(self, x):
            return x * self.split

    class Plain(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "update", x)
            return self.perturb("split", x)

    plain = Plain()
    plain(jnp.ones(1))
    model = Split(2, nnx.Param(1.0), last=3)
    model.set_attributes(split=4)
    fields = [f.default is dataclasses.MISSING for f in dataclasses.fields(Split)]
    return fields, model(1), nnx.state(model), nnx.state(plain), nnx.clone(plain).update


@program
def setting_a_method_beside_the_functions(nnx):
    nnx.Linear(1, 1, rngs=nnx.Rngs(0)).set_attributes(update=1)


@program
def parameters_of_generic_types(nnx):
    types = (nnx.State, nnx.GraphDef, nnx.Param, nnx.Sequential, nnx.VariableMetadata, nnx.List)
    named = [kind[int].__origin__ is kind for kind in types]

    class Chain(nnx.Sequential[int]):
        pass

    chain = nnx.Sequential[int](nnx.relu)
    return named, nnx.State[str, int]({"a": 1}), chain(-1.0), Chain(nnx.relu)(-1.0)


@program
def merge_of_a_list_of_leaves(nnx):
    linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(linear)
    new = nnx.merge(graphdef, jax.tree.leaves(state))
    return new.kernel, new.bias


@program
def merge_of_too_short_a_list(nnx):
    graphdef, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    return nnx.merge(graphdef, jax.tree.leaves(state)[:1])


@program
def reseeding_by_shape(nnx):
    scalar, split = nnx.Rngs(0, params=1), nnx.Rngs(0, params=1).split({"params": 2})
    for rngs in (scalar, split):
        nnx.reseed(rngs, params=5, policy="match_shape")
    return nnx.state(scalar), nnx.state(split)


@program
def outputs_of_methods_left_out(nnx):
    class Model(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "x", x)
            return x

    return nnx.capture(Model(), nnx.Intermediate, method_outputs=False)(1)[1]


@program
def settings(nnx):
    seen = []
    for setting in (nnx.set_graph_mode, nnx.set_graph_updates, nnx.use_eager_sharding):
        depth = len(setting.get_stack())
        with setting(False):
            seen.append(list(setting.get_stack())[depth:])
            setting(True)
            seen.append(list(setting.get_stack())[depth:])
            with setting(False):
                seen.append(list(setting.get_stack())[depth:])
            seen.append(list(setting.get_stack())[depth:])
        seen.append((list(setting.get_stack())[depth:], setting.get_default()))
    return seen


NEWER = {"parameters_of_generic_types"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_agree(name):
    if OLDER and name in NEWER:
        pytest.skip("needs flax 0.12.12")
    assert outcome(PROGRAMS[name], nnxlite) == outcome(PROGRAMS[name], ref)


MODULES = [
    "filterlib",
    "graphlib",
    "helpers",
    "module",
    "pytreelib",
    "rnglib",
    "spmd",
    "statelib",
    "traversals",
    "variablelib",
]


@pytest.mark.parametrize("name", MODULES)
def test_submodules_are_imported_by_their_names(name):
    ours = importlib.import_module(f"nnxlite.{name}")
    assert ours is getattr(nnxlite, name)
    expected = {
        "graphlib": "State FlatState Variable VariableDef NodeDef NodeRef GraphDef split merge pop "
        "is_array_ref map_state pure as_pure iter_graph register_graph_node_type",
        "helpers": "Sequential List Dict TrainState",
        "module": "Module iter_modules capture",
    }.get(name, "").split()
    theirs = importlib.import_module(f"flax.nnx.{name}")
    assert [n for n in expected if not (hasattr(theirs, n) and hasattr(ours, n))] == []


# The library's own side of it --------------------------------------------------------------------


def test_messages():
    class Empty(nnxlite.Module):
        pass

    with pytest.raises(TypeError, match=r"Empty\(\) takes no arguments: it has no __init__"):
        Empty(1)
    with pytest.raises(TypeError, match="a name or exclude_required, not both; got name='a'"):
        nnxlite.Param(1, a=2).get_metadata("a", exclude_required=True)
    with pytest.raises(ValueError, match="(?s)Invalid rng value: Rngs.*expected an integer seed"):
        nnxlite.Rngs(nnxlite.Rngs(0))
    with pytest.raises(AttributeError, match="'List' object has no attribute '1'"):
        getattr(nnxlite.List([0]), "1")
    graphdef, state = nnxlite.split(nnxlite.Linear(2, 3, rngs=nnxlite.Rngs(0)))
    with pytest.raises(ValueError, match="expected 2 leaves, but got 1 in the list. Pass one"):
        nnxlite.merge(graphdef, jax.tree.leaves(state)[:1])


def test_a_plain_call_of_a_setting_takes_the_place_of_the_one_before():
    with nnxlite.set_graph_mode(True):
        depth = len(nnxlite.set_graph_mode.get_stack())
        for value in (False, True, False):
            nnxlite.set_graph_mode(value)
        assert len(nnxlite.set_graph_mode.get_stack()) == depth
        assert nnxlite.set_graph_mode.current_value() is False


def test_comparisons_and_hashes_go_further_than_the_reference():
    v = nnxlite.Param(jnp.array([1.0, 2.0]))
    for op in (operator.lt, operator.le, operator.gt, operator.ge, operator.ne):
        assert op(v, 1.5).tolist() == op(v.value, 1.5).tolist()
    assert len({v, nnxlite.Param(jnp.array([1.0, 2.0])), v}) == 2
    assert [
        f"{nnxlite.Param(1.25):.1f}",
        divmod(nnxlite.Param(7), 2),
        complex(nnxlite.Param(2)),
    ] == [
        "1.2",
        (3, 1),
        2 + 0j,
    ]
