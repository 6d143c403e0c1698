"""`nnx.bridge`: what it does beyond the reference, what it says, and what it costs."""

import functools
import importlib
import sys
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx
from tests.flax.launching import printed
from tests.messages import refused, rows

nn = pytest.importorskip("flax.linen")

from flax import struct  # noqa: E402
from flax.core import meta  # noqa: E402

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)
KEY = jax.random.key(0)


def test_the_bridge_is_imported_at_first_use_and_imports_linen_alone():
    program = "import sys, nnxlite as nnx; print('flax' in sys.modules); nnx.bridge.ToNNX; "
    program += "print('flax.nnx' in sys.modules)"
    assert printed("-W", "error::UserWarning", "-c", program) == ["False", "False"]
    assert nnx.wrappers.ToNNX is nnx.bridge.ToNNX
    assert nnx.wrappers.functional is nnx.bridge.functional
    with pytest.raises(AttributeError, match=r"'nnxlite\.wrappers' has no attribute 'nothing'"):
        getattr(nnx.wrappers, "nothing")  # noqa: B009


def test_the_error_without_linen(monkeypatch):
    assert nnx.bridge  # it is there again afterwards
    for name in [name for name in sys.modules if name.startswith("nnxlite.bridge")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flax.linen", None)
    with pytest.raises(ImportError, match="Flax is not installed: pip install flax"):
        importlib.import_module("nnxlite.bridge")


# ToNNX ---------------------------------------------------------------------------------------------


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        self.sow("intermediates", "h", x)
        return x


def test_a_call_writes_into_the_variables_that_are_there():
    """An optimizer, or another module with the same Variable, sees the new value."""
    model = nnx.bridge.ToNNX(Norm(), nnx.Rngs(0)).lazy_init(X)
    shared = nnx.Dict(mean=model.BatchNorm_0["mean"])
    kernel = model.Dense_0["kernel"]
    model(X, mutable=True)
    assert shared.mean is model.BatchNorm_0["mean"] and shared.mean[...].any()
    assert model.Dense_0["kernel"] is kernel
    model(X, mutable=True)
    assert len(model.h[...]) == 2


def test_a_training_step_is_traced_once_and_equal_models_share_it():
    traces = []

    @nnx.jit
    def step(model, optimizer):
        traces.append(1)
        loss = lambda model: (model(X, mutable=["batch_stats"]) ** 2).mean()
        optimizer.update(model, nnx.grad(loss)(model))

    for seed in range(2):
        model = nnx.bridge.ToNNX(Norm(), nnx.Rngs(seed)).lazy_init(X)
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        for _ in range(3):
            step(model, optimizer)
    assert len(traces) == 1


def test_a_failed_lazy_init_leaves_no_mark():
    class Fails(nnx.Module):
        def __init__(self):
            self.a = nnx.bridge.ToNNX(nn.Dense(3), nnx.Rngs(0))

        def __call__(self, x):
            raise RuntimeError(str(self.a(x).shape))

    model = Fails()
    with pytest.raises(RuntimeError, match="2, 3"):
        nnx.bridge.lazy_init(model, X)
    assert sorted(vars(model.a)) == ["bias", "kernel", "to_nnx__module", "to_nnx__rngs"]
    assert np.array_equal(model.a(X), model.a(X))


def test_other_attributes_of_a_wrapper_are_left_out_of_the_collections():
    model = nnx.bridge.ToNNX(nn.Dense(3), 0).lazy_init(X)
    model.other, model.text = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "text"
    assert model(X).shape == (2, 3) and model.module is model.to_nnx__module
    assert model.rngs is model.to_nnx__rngs
    assert model(X, rngs={"params": KEY}).shape == (2, 3)


# ToLinen -------------------------------------------------------------------------------------------


class Hooked(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones(3), on_get_value=lambda variable, value: value * 10)

    def __call__(self, x):
        return x * self.w


def test_a_value_with_a_hook_goes_to_linen_as_it_is_stored():
    module = nnx.bridge.to_linen(Hooked)
    v = module.init(KEY, X)
    assert meta.unbox(v)["params"]["w"].tolist() == [1.0] * 3
    out, updates = module.apply(v, X, mutable=True)
    assert np.array_equal(out, X * 10) and updates["params"]["w"].value.tolist() == [1.0] * 3


def test_sown_values_may_be_passed_in():
    class Sows(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "h", x)
            return x

    module = nnx.bridge.to_linen(Sows, skip_rng=True)
    _, first = module.apply({}, X, mutable=True)
    _, second = module.apply(first, X, mutable=True)
    assert len(second["intermediates"]["h"]) == 2


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        init = nnx.with_partitioning(nnx.initializers.ones_init(), (None, "model"))
        return nnx.bridge.to_linen(nnx.Linear, 3, 3, kernel_init=init, name="l")(x), None


@pytest.mark.parametrize("given, name", [({"partition_name": "layers"}, "layers"), ({}, None)])
def test_an_axis_that_linen_adds_has_its_name(given, name):
    lifted = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
    stack = nn.scan(Step, **lifted, metadata_params=given)
    v = stack().init(KEY, X, None)
    spec = nn.get_partition_spec(v)["params"]["l"]["kernel"]
    assert tuple(spec) == (name, None, "model")
    assert stack().apply(v, X, None)[0].shape == X.shape
    box = nnx.bridge.NNXMeta(nnx.Param, X, {"sharding": (None, "model")})  # without the axis
    assert box.remove_axis(0, {"partition_name": "layers"}) is box


class Tagged(struct.PyTreeNode, meta.AxisMetadata):
    """A box of the user's."""

    value: tp.Any
    tag: str = struct.field(default="t", pytree_node=False)

    def unbox(self):
        return self.value

    def replace_boxed(self, val):
        return self.replace(value=val)

    def add_axis(self, index, params):
        return self

    def remove_axis(self, index, params):
        return self


def test_a_box_of_the_user_comes_back():
    variables = nnx.bridge.variables
    variable = variables.to_nnx_var("params", Tagged(X, tag="mine"))
    assert variable.tag == "mine"
    box = variables.to_linen_var(variable)
    assert (type(box), box.tag) == (Tagged, "mine") and np.array_equal(box.value, X)


# bridge.Module -------------------------------------------------------------------------------------


class Dense(nnx.bridge.Module):
    features: int

    @nnx.bridge.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return x @ self.param("w", init, (x.shape[-1], self.features))


class Twice(nnx.bridge.Module):
    @nnx.bridge.compact
    def __call__(self, x):
        return self.more(Dense(3)(x))

    @nnx.bridge.compact
    def more(self, x):
        inner = Dense(3)
        return inner(inner(x))


class Trees(nnx.bridge.Module):
    @nnx.bridge.compact
    def __call__(self, x):
        pair = self.variable("cache", "pair", lambda: {"a": jnp.ones(2), "b": {"c": jnp.zeros(1)}})
        self.sow("intermediates", "h", x)
        box = lambda key: nn.Partitioned(x, names=(None, "model"))
        boxed = self.param("boxed", box, unbox=False)
        assert isinstance(boxed.get_value(), nn.Partitioned) is self.is_initializing()
        return x * pair["b"]["c"]


@pytest.mark.parametrize("make", [Twice, Trees, functools.partial(Dense, 3)])
def test_apply_gives_back_what_init_made(make):
    module = make()
    out, v = module.init_with_output(0, X)
    again, same = module.apply(v, X, mutable=True)
    assert np.array_equal(again, out)
    same.pop("intermediates", None), v.pop("intermediates", None)
    assert jax.tree.structure(same) == jax.tree.structure(v)
    assert all(map(np.array_equal, jax.tree.leaves(same), jax.tree.leaves(v)))
    assert make is not Twice or [*v["params"]] == ["Dense_0", "Dense_1"]


# What it says --------------------------------------------------------------------------------------


class Conflict(nnx.bridge.Module):
    def setup(self):
        self.Dense_0 = Dense(3)

    @nnx.bridge.compact
    def __call__(self, x):
        return Dense(2)(self.Dense_0(x))


class Outside(nnx.bridge.Module):
    def __call__(self, x):
        with_entry = nnx.bridge.compact(lambda self: nnx.bridge.linen_in_bridge_mdl(nn.Dense(3)))
        return with_entry(self)


class Named(nn.Module):
    name_of: str

    @nn.compact
    def __call__(self, x):
        return self.param(self.name_of, nn.initializers.ones, (3,))


bv = nnx.bridge.variables


@rows("""
    bv.to_nnx_var("params", nnx.bridge.NNXMeta(nnx.Cache, X, {}))
        ValueError: collection 'params' is for Param, and has an NNXMeta of Cache
        ... register_variable_name
    bv.get_col_name(("params",))
        ValueError: begins with the name of a collection, as DictKey('params'), got ('params',)
    bv.linen_vars_to_nnx_attrs({"w": X})
        TypeError: The collection 'w' is a ndarray, not a mapping ... {'params': {'kernel': w}}
    bv.linen_vars_to_nnx_attrs({"params": {"a": {"w": X}}, "stats": {"a": {"w": X}}})
        ValueError: duplicate variable path ('a', 'w'): ... collection 'stats', and a Param
        ... different names
    bv.linen_vars_to_nnx_attrs({"params": {"a": {"w": X}}, "stats": {"a": X}})
        ValueError: path ('a',): ... 'stats', and other variables below it
    bv.linen_vars_to_nnx_attrs({"params": {"a": X}, "stats": {"a": {"w": X}}})
        ValueError: path ('a',): ... 'stats', and a Param
    bv.nnx_attrs_to_linen_vars({"a": {"w": X}})
        ValueError: collection name from value at ('a', 'w'): it is of type ndarray ... nnx.Param
    nnx.bridge.lazy_init(len, X)
        ValueError: fn = <built-in function len> needs to be an nnx.Module or one of its methods
    nnx.bridge.ToNNX(nn.Dense(3), nnx.Rngs(0)).kernel
        AttributeError: 'ToNNX' object has no attribute 'kernel': neither a variable of Dense (lazy_init
        makes
    nnx.bridge.ToNNX(Named("to_nnx__rngs"), nnx.Rngs(0)).lazy_init(X)
        ValueError: Named has a variable 'to_nnx__rngs', which is an attribute of ToNNX itself
    nnx.bridge.to_linen(nnx.Linear(3, 4, rngs=nnx.Rngs(0))).init(KEY, X)
        TypeError: makes its module in each call, and got a Linear that exists
        ... to_linen(nnx.Linear, 3, 4)
    nnx.bridge.to_linen(lambda rngs: nnx.bridge.ToNNX(nn.Dense(3), rngs)).init(KEY, X)
        ValueError: ToNNX of Dense has no variables yet ... Call lazy_init where the ToNNX is made
    nnx.bridge.to_linen(dict, skip_rng=True).init(KEY, X)
        TypeError: ToLinen: <class 'dict'> returned a dict, not an nnx.Module
    nnx.bridge.to_linen(nnx.Linear, 3, 4).init(KEY, X, nnx_method=3)
        TypeError: nnx_method=3 must be a callable or the name of a method, got <class 'int'>
    Dense(3)(X)
        ValueError: Dense is not bound, and makes 'w'. Parameters must be initialized in `setup()`
    Dense(3).make_rng("dropout")
        ValueError: Dense.make_rng('dropout'): Can't use RNGs on unbound modules
    Dense(3).apply({}, X, method=lambda m, x: m.variable("cache", "k"))
        ValueError: Dense has no variable 'k' in the collection 'cache'. Expected 'init_fn' to be a
        callable
    Conflict().init(0, X)
        ValueError: Conflict has an attribute 'Dense_0', which is also the name of a submodule
        ... : a Dense.
    nnx.bridge.linen_in_bridge_mdl(nn.Dense(3))
        ValueError: linen_in_bridge_mdl() only needed inside bridge Module: call it in `setup` or under
    Outside()(X)
        ValueError: linen_in_bridge_mdl: Outside is not bound; call it by `init` or `apply`
""")
def test_a_mistake_says_what_is_wrong(line, message):
    refused(line, message, globals())
