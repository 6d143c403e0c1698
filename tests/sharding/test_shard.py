"""Models on a mesh, by plans and by annotations: built there, trained there; shardings of `jit`."""

import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.nn.quick import normal
from tests.sharding.meshes import TOKENS, build, linear, make_step, mesh_of, names_of

grid = functools.partial(nnx.make_mesh, data=4, model=2)


def spec_of(array):
    return getattr(array, "raw_value", array).sharding.spec


def shardings(*trees):
    return [leaf.sharding for leaf in jax.tree.leaves(nnx.state(trees))]


@pytest.fixture(scope="module")
def losses_on_one_device():
    model, optimizer = build()
    step, _ = make_step()
    return [float(step(model, optimizer, TOKENS)) for _ in range(3)]


def explicit():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))


@pytest.mark.parametrize(
    ("mesh", "plan"), [(grid, "fsdp+tensor"), (explicit, "data")], ids=["auto", "explicit"]
)
def test_training_gives_the_losses_of_one_device_and_moves_nothing(
    mesh, plan, losses_on_one_device
):
    model, optimizer = build()
    layout = nnx.shard((model, optimizer), mesh(), plan)
    before = shardings(model, optimizer)
    step, traced = make_step()
    batch = layout.put(TOKENS)
    losses = [float(step(model, optimizer, batch)) for _ in range(3)]
    assert np.allclose(losses, losses_on_one_device, rtol=1e-5)
    assert shardings(model, optimizer) == before
    assert len(traced) == step._cache_size() == 1


def test_a_model_is_built_where_it_is_to_lie():
    mesh, plan = grid(), "fsdp+tensor"
    pair = build()
    nnx.shard(pair, mesh, plan)
    runs = []
    made = nnx.init_sharded(lambda: runs.append(1) or build(), mesh, plan)
    assert len(runs) == 1  # what is static and what is an array are of one model
    assert shardings(*made) == shardings(*pair)
    values, wanted = (nnx.to_pure_dict(nnx.state(x, nnx.Not(nnx.RngState))) for x in (made, pair))
    assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-6), values, wanted))
    before = [id(leaf) for leaf in jax.tree.leaves(nnx.state(made))]
    nnx.shard(made, mesh, plan)
    assert [id(leaf) for leaf in jax.tree.leaves(nnx.state(made))] == before


def test_the_state_of_an_optimizer_has_rules_of_its_own():
    pair = build()
    rules = {"1.opt_state.**.head.kernel": ("model", None), "head.bias": ("data",)}
    layout = nnx.shard(pair, grid(), nnx.Plan(fsdp="data", rules=rules))
    model, optimizer = pair
    moments = optimizer.opt_state[0].mu
    assert spec_of(model.head.kernel) == P(None, "data")
    assert spec_of(moments["head"]["kernel"]) == P("model")
    assert spec_of(moments["head"]["bias"]) == spec_of(model.head.bias) == P("data")
    by_name = {entry.name: entry.why for entry in layout}
    assert by_name["1.opt_state.0.mu.head.bias"] == "like its parameter"
    assert by_name["1.opt_state.0.mu.head.kernel"] == "rule 1.opt_state.**.head.kernel"


class Everything(nnx.Module):
    """A shared Variable, arrays in attributes and lists, a pytree in a Variable, a reference, a key."""

    def __init__(self) -> None:
        self.a = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        self.b = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(1))
        self.b.kernel = self.a.kernel
        self.array = jnp.ones((64, 64))
        self.items = nnx.List([jnp.ones((64, 64))])
        self.tree = nnx.Variable({"big": jnp.ones((64, 64)), "small": jnp.ones(3)})
        self.reference = nnx.Param(jnp.ones((64, 64)), ref=True)
        self.rngs = nnx.Rngs(0)
        self.number = 3


@pytest.mark.parametrize("born", [False, True], ids=["moved", "born"])
def test_whatever_holds_arrays(born):
    mesh = nnx.make_mesh(data=8)
    model = nnx.init_sharded(Everything, mesh, "fsdp") if born else Everything()
    layout = nnx.shard(model, mesh, "fsdp")
    assert model.a.kernel is model.b.kernel and model.number == 3
    arrays = model.array, model.items[0], model.tree.value["big"], model.reference[...]
    for array in (*arrays, model.a.kernel.value):
        assert array.sharding == NamedSharding(mesh, P("data"))
    assert model.tree.value["small"].sharding.is_fully_replicated
    assert [entry.name for entry in layout if entry.why == "random keys"] == []
    keys = {entry.name: entry.why for entry in layout if "rngs" in entry.name}
    assert keys == {"rngs.default.count": "a scalar", "rngs.default.key": "a scalar"}


def test_one_array_in_two_places_of_a_variable_has_two_shardings():
    model = nnx.Dict(v=nnx.Variable(dict.fromkeys("ab", jnp.ones((8, 8)))))
    nnx.shard(model, grid(), {"v.a": ("data",), "v.b": (None, "data")})
    assert [spec_of(x) for x in model.v.value.values()] == [P("data"), P(None, "data")]


def test_annotations_come_before_the_plan():
    names = {"out_sharding": ("embed", "mlp")}
    model = nnx.Linear(64, 64, kernel_metadata=names, rngs=nnx.Rngs(0))
    with nnx.logical_axis_rules([("embed", None), ("mlp", "model")]):
        layout = nnx.shard(model, grid(), "fsdp")
    assert spec_of(model.kernel) == P("data", "model")
    assert model.kernel.sharding_names == ("embed", "mlp")  # the annotation is still there
    assert next(entry.why for entry in layout if entry.name == "kernel") == "annotation + fsdp"


def test_a_model_leaves_its_mesh_again():
    model = nnx.Linear(64, 128, rngs=nnx.Rngs(0))
    nnx.shard(model, grid(), "fsdp+tensor")
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
    copy = pickle.loads(pickle.dumps(model))
    assert len(copy.kernel.value.devices()) == 1
    nnx.shard((model, optimizer), nnx.make_mesh(data=1, devices=jax.devices()[:1]), "data")
    assert np.array_equal(model.kernel.value, copy.kernel.value)
    eight = nnx.make_mesh(data=8)
    nnx.shard((model, optimizer), eight, "fsdp")
    assert model.kernel.value.sharding == NamedSharding(eight, P(None, "data"))


def test_stacked_layers_are_divided_like_one():
    layers = nnx.vmap(lambda i: nnx.Linear(64, 64, rngs=nnx.Rngs(0)))(jnp.arange(4))
    nnx.shard(layers, grid(), "fsdp+tensor")
    assert spec_of(layers.kernel) == P(None, "data", "model")
    assert spec_of(layers.bias) == P(None, "model")


def test_what_a_step_writes_in_another_shape_goes_where_xla_puts_it():
    cache = nnx.Cache(jnp.zeros((4, 8)))
    nnx.shard([cache], grid(), {"0": ("data", None)})
    nnx.jit(lambda cache: cache.set_value(jnp.concatenate([cache, jnp.ones((1, 8))])))(cache)
    assert cache.value.shape == (5, 8)


def test_an_abstract_model_gets_the_shardings_of_an_abstract_mesh():
    mesh = AbstractMesh((4,), ("data",))
    abstract = nnx.eval_shape(lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    nnx.shard(abstract, mesh, "fsdp")
    assert abstract.kernel.value.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)


def test_explicit_axes_are_warned_of():
    mesh, model = explicit(), nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    with pytest.warns(UserWarning, match=r"the axes of the mesh \(data=8\) are explicit"):
        nnx.shard(model, mesh, "fsdp")
    assert spec_of(model.kernel) == P("data", None)
    nnx.shard(model, mesh, "data")  # nothing is divided: no warning


SGD, ADAM = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), optax.adam(1e-2)
ADAFACTOR = optax.adafactor(1e-2, min_dim_size_to_factor=16)  # states of other shapes
COLUMNS = {"**.kernel": (None, "model")}  # XLA would divide the bias, which is whole


@pytest.mark.parametrize(
    ("tx", "plan", "after", "options"),
    [
        (SGD, "data", True, {"donate": "written"}),
        (ADAM, "fsdp+tensor", True, {"donate": "written"}),
        (ADAM, COLUMNS, False, {}),
        (ADAFACTOR, nnx.Plan(fsdp="data", min_size=64), False, {"donate": "written"}),
        (optax.sm3(1e-2), "fsdp+tensor", False, {}),  # a list in a Variable
    ],
)
def test_a_step_moves_nothing_and_compiles_once(tx, plan, after, options):
    """Made after sharding, an optimizer had counts on no certain device until the first step."""
    model = nnx.Linear(64, 128, rngs=nnx.Rngs(0))
    make = lambda: nnx.Optimizer(model, tx, wrt=nnx.Param)
    layout, optimizer = nnx.shard(model, grid(), plan) if after else None, make()
    layout = layout or nnx.shard((model, optimizer), grid(), plan)
    before = shardings(model, optimizer)
    assert all(s.mesh == model.kernel.sharding.mesh for s in before)
    if tx is ADAM:
        moment = optimizer.opt_state[0].nu["kernel"]
        assert moment.value.sharding == model.kernel.value.sharding
    if tx is ADAFACTOR:
        assert spec_of(optimizer.opt_state[0].v_row["kernel"]) == P("data")

    @nnx.jit(**options)
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: (model(x) ** 2).mean())(model))

    for _ in range(3):
        step(model, optimizer, layout.put(np.ones((8, 64), np.float32)))
    assert shardings(model, optimizer) == before and step._cache_size() == 1


def test_an_optimizer_of_parameters_on_one_chosen_device_lies_there():
    device = jax.devices()[3]
    model = jax.device_put(nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0))), device)
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    assert {next(iter(s.device_set)) for s in shardings(optimizer)} == {device}
    free = nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param)
    assert not free.step.value.committed  # goes where the parameters go


REMEDY = r".*4 does not divide the vocabulary of 101.*with_sharding_constraint\(x, layout.batch\)"


@pytest.mark.parametrize(
    ("rows", "plan", "spec", "why"),
    [
        # With features along the batch's axes, a step exchanged 2.5 times the bytes.
        (128, "fsdp", ("data", None), "fsdp"),
        (101, "fsdp", (None, "data"), REMEDY),
        (102, "fsdp+tensor", ("model", "data"), ".*8 does not divide"),
        (101, "fsdp+tensor", (None, "model"), ".*vocabulary of 101$"),
        (128, "fsdp+tensor", (("model", "data"), None), r"tensor: vocabulary \+ fsdp$"),
    ],
)
def test_an_embedding_whose_rows_cannot_be_divided_says_what_to_do(rows, plan, spec, why):
    embed = nnx.eval_shape(lambda: nnx.Embed(rows, 64, rngs=nnx.Rngs(0)))
    (entry,) = nnx.plan_layout(embed, grid(), plan)
    assert tuple(entry.spec) == spec and re.match(why, entry.why)


# Annotated models, whose training is that of the reference beside it ------------------------------


def test_shardings_of_moments_with_axes_of_their_own():
    whole = NamedSharding(mesh_of(), P("data", "model"))
    for annotation in (whole, Format(Layout((1, 0)), whole)):
        model = nnx.Dict(w=nnx.Param(jnp.zeros((8, 4)), sharding=annotation))
        state = nnx.Optimizer(model, optax.lbfgs(memory_size=2), wrt=nnx.Param).opt_state[0]
        memory = state.diff_params_memory["w"]
        assert memory.value.shape == (2, 8, 4)
        assert names_of(memory) == (None, "data", "model")
        assert memory.sharding_names == whole.update(spec=P(None, "data", "model"))
        state = nnx.Optimizer(model, optax.sm3(1e-2), wrt=nnx.Param).opt_state[0]
        assert state.mu["w"].sharding_names is None  # a vector for each axis


@pytest.mark.parametrize("partition", ["data", None])
def test_moments_of_stacked_layers_have_the_stacked_axis(partition):
    named = {} if partition is None else {"transform_metadata": {nnx.PARTITION_NAME: partition}}
    make = nnx.vmap(lambda i: linear(None, "model"), **named)
    with jax.set_mesh(mesh_of()):
        model = nnx.jit(make)(jnp.arange(2))
        moments = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param).opt_state[0].mu
    for name, rest in (("kernel", (None, "model")), ("bias", ("model",))):
        moment, variable = moments[name], getattr(model, name)
        assert moment.sharding_names == variable.sharding_names == (partition, *rest)
        if partition is None:
            assert moment.value.sharding == variable.value.sharding


X = normal(16, 8)


def columns(mesh):
    whole = NamedSharding(mesh, P())
    return nnx.StateSharding(
        {nnx.PathContains("kernel"): whole.update(spec=P(None, "model")), ...: whole}
    )


def test_shardings_of_arguments_and_results():
    rows, model = NamedSharding(mesh_of(), P("data")), linear()
    for options in ({}, {"out_shardings": rows}):
        assert nnx.jit(lambda m: m, in_shardings=rows, **options)(model) is model
        assert names_of(model.kernel) == ("data",)
    with jax.set_mesh(mesh_of()):  # specs are on the mesh in force
        step = nnx.jit(lambda m, x: m(x), in_shardings=(P(), P("data")), out_shardings=P("data"))
        model = linear()
        assert names_of(step(model, X)) == ("data",)
        assert names_of(model.kernel) == ()


def test_jit_with_shardings_donates_and_compiles_ahead_of_time():
    mesh = mesh_of()
    rows = NamedSharding(mesh, P("data"))
    step = nnx.jit(lambda m, x: m(x), in_shardings=(columns(mesh), rows), out_shardings=rows)
    model = linear()
    np.testing.assert_allclose(step.lower(model, X).compile()(model, X), model(X), rtol=1e-5)
    model.kernel.value = jax.device_put(model.kernel.value, NamedSharding(mesh, P(None, "model")))
    before, double = model.kernel.value, lambda model: model.kernel.set_value(model.kernel * 2)
    nnx.jit(double, in_shardings=(columns(mesh),), donate="written")(model)
    assert before.is_deleted() and names_of(model.kernel) == (None, "model")
    assert not model.bias.value.is_deleted()


def test_state_sharding_as_a_value():
    one, same = (nnx.StateSharding({nnx.Param: P("a"), ...: None}) for _ in range(2))
    assert one == same and hash(one) == hash(same)
    assert one != nnx.StateSharding({nnx.Param: P("b"), ...: None}) and one != nnx.StateAxes({})
    assert one.filters == (nnx.Param, ...) and one.shardings == (P("a"), None)
    assert repr(one).startswith("StateSharding({") and "Ellipsis: None" in repr(one)
