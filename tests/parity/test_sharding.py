"""Sharding annotations, and what transforms make of them, are those of the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.sharding.meshes import mesh_of, steps

flax_nnx = pytest.importorskip("flax.nnx")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the reference, about its own spellings

LIBRARIES = (nnx, flax_nnx)
KINDS = pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=lambda k: k.name)
RULES = (("batch", "data"), ("mlp", "model"), ("embed", None))


def linear(lib, *names, **metadata):
    return lib.Linear(
        8,
        16,
        kernel_init=lib.with_partitioning(steps, names, **metadata),
        bias_init=lib.with_partitioning(steps, names[-1:], **metadata),
        rngs=lib.Rngs(0),
    )


def place(leaf):
    sharding = getattr(leaf, "sharding", None)
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else None


def described(lib, tree):
    """Path to (kind, annotation, shape, place on the mesh) of every leaf."""
    state = tree if isinstance(tree, lib.State) else lib.state(tree)
    out = {}
    for path, v in lib.to_flat_state(state):
        held, names, kind = v, None, "array"
        if isinstance(v, lib.Variable):
            held, names, kind = v.get_raw_value(), v.get_metadata().get("out_sharding"), type(v)
            kind = kind.__name__
        names = None if names is None else tuple(names)
        out[path] = (kind, names, getattr(held, "shape", held), place(held))
    return out


def both(program, *args):
    """What the program gives in nnxlite and in the reference."""
    return [program(lib, *args) for lib in LIBRARIES]


def assert_same(program, *args):
    ours, theirs = both(program, *args)
    assert ours == theirs


@pytest.fixture
def unplaced():
    """The reference places annotated values always, and wants a mesh for it."""
    with nnx.use_eager_sharding(False), flax_nnx.use_eager_sharding(False):
        yield


# Parameters --------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("names", [("data", "model"), (None, "model"), (("data", "model"), None)])
def test_parameters_are_born_in_the_same_places(kind, names):
    def eager(lib):
        return described(lib, linear(lib, *names))

    def jitted(lib):
        return described(lib, lib.jit(lambda: linear(lib, *names))())

    def abstract(lib):
        return described(lib, lib.eval_shape(lambda: linear(lib, *names)))

    with jax.set_mesh(mesh_of(kind)):
        assert_same(eager)
        assert_same(jitted)
        assert_same(abstract)


@KINDS
def test_own_mesh_and_settings(kind):
    mesh = mesh_of(kind)

    def program(lib):
        own = lib.Param(jnp.zeros((8, 4)), sharding=("data", None), mesh=mesh)
        with jax.set_mesh(mesh), lib.use_eager_sharding(False):
            off = lib.Param(jnp.zeros((8, 4)), sharding=("data", None))
            on = lib.Param(jnp.zeros((8, 4)), sharding=("data", None), eager_sharding=True)
            using = lib.using_eager_sharding()
        kept = [v.get_metadata("eager_sharding") for v in (own, off, on)]
        return [place(v.get_value()) for v in (own, off, on)], kept, using

    assert_same(program)


@pytest.mark.parametrize("spelling", ["sharding", "sharding_names", "out_sharding"])
@pytest.mark.parametrize("names", [("a", None), P("a", None), ["a", None], None, ()])
def test_metadata(spelling, names, unplaced):
    def program(lib):
        v = lib.Variable(jnp.zeros((2, 3)), **{spelling: names})
        return v.get_metadata(), v.sharding_names

    assert_same(program)


@pytest.mark.parametrize("error", [("nope", None), ("data", None, "model")], ids=str)
def test_names_that_do_not_fit(error):
    with jax.set_mesh(mesh_of()):
        for lib in LIBRARIES:
            with pytest.raises(ValueError):
                lib.Param(jnp.zeros((8, 4)), sharding=error)


# Specs and rules ---------------------------------------------------------------------------------


SPECS = [
    ("batch", "mlp"),
    ("embed", "other"),
    ("data", None),
    (("data", "model"), None),
    P("batch", None),
    (),
    ("mlp", "mlp"),
]


@pytest.mark.parametrize("names", SPECS, ids=str)
@pytest.mark.parametrize(
    "rules",
    [
        (),
        RULES,
        (("batch", ("data", "model")), ("mlp", None)),
        (("batch", "mlp"), ("mlp", "data"), ("batch", "model")),
        [("batch", ["data", "model"])],
    ],
    ids=str,
)
def test_specs_under_rules(names, rules, unplaced):
    def program(lib):
        with lib.logical_axis_rules(rules):
            v = lib.Param(jnp.zeros((8, 8)), sharding=names)
            found = lib.get_partition_spec(v)
        own = lib.get_partition_spec(
            lib.Param(jnp.zeros((8, 8)), sharding=names, sharding_rules=rules)
        )
        return found.get_raw_value(), found.get_metadata(), own.get_raw_value()

    assert_same(program)


def test_rules_nest_and_decorate_alike(unplaced):
    def program(lib):
        spec = lambda: lib.get_partition_spec(
            lib.Param(jnp.zeros((8, 8)), sharding=("batch", "mlp"))
        ).get_raw_value()
        with lib.logical_axis_rules((("batch", "data"),)):
            first = spec()
            with lib.logical_axis_rules((("mlp", "model"),)):
                second = spec()
            third = spec()
        return first, second, third, spec(), lib.logical_axis_rules(RULES)(spec)()

    assert_same(program)


def test_rules_that_disagree(unplaced):
    for lib in LIBRARIES:
        v = lib.Param(jnp.zeros(8), sharding=("batch",), sharding_rules=(("batch", "model"),))
        with lib.logical_axis_rules(RULES), pytest.raises(ValueError, match="[Ii]nconsistent"):
            lib.get_partition_spec(v)
        with pytest.raises(ValueError):
            with lib.logical_axis_rules([("batch", "data", "model")]):
                lib.get_partition_spec(v)


def test_specs_of_trees(unplaced):
    def program(lib):
        layer = linear(lib, "data", "model")
        layer.stat = lib.BatchStat(jnp.zeros(3))
        layer.number = lib.Variable(3)
        layer.nested = lib.Variable({"a": jnp.zeros(2)})
        layer.array = jnp.zeros(2)
        state = lib.state(layer)
        return (
            described(lib, lib.get_partition_spec(state)),
            described(lib, lib.get_partition_spec(layer)),
            described(lib, lib.get_named_sharding(state, mesh_of())),
            lib.get_partition_spec({"a": jnp.ones(2), "n": np.ones(2), "b": 1.0, "d": None}),
            lib.get_named_sharding({"a": jnp.ones(2), "b": 1.0, "d": None}, mesh_of()),
        )

    assert_same(program)


# Abstract models ---------------------------------------------------------------------------------


@KINDS
def test_abstract_models(kind):
    mesh = mesh_of(kind)

    def make(lib):
        def init():
            layer = linear(lib, "data", "model")
            layer.stat = lib.BatchStat(jnp.zeros(3))
            return layer

        return init

    def abstract(lib):
        return described(lib, lib.get_abstract_model(make(lib), mesh)[1])

    def with_sharding(lib):
        with jax.set_mesh(mesh):
            state = lib.state(lib.eval_shape(make(lib)))
            return described(lib, lib.abstract_with_sharding(state))

    with jax.set_mesh(mesh):
        assert_same(abstract)
    assert_same(with_sharding)


# Axes that transforms add and remove -------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1, 2, 3])
@pytest.mark.parametrize("names", [("a", "b"), ("a",), None])
def test_axes_added_and_removed(index, names, unplaced):
    def program(lib):
        told = []
        note = lambda what: lambda v, index, name: told.append((what, index, name))
        v = lib.Param(
            jnp.zeros((2, 3)),
            sharding=names,
            on_add_axis=note("add"),
            on_remove_axis=note("remove"),
        )
        added = lib.spmd.add_axis(v, index, {lib.PARTITION_NAME: "layers"})
        assert added is v
        first = v.sharding_names
        lib.spmd.remove_axis(v, index, {lib.PARTITION_NAME: "layers"})
        return first, v.sharding_names, told

    assert_same(program)


def test_names_with_an_axis_more_or_less_are_a_tuple(unplaced):
    def program(lib):
        names = {lib.PARTITION_NAME: "layers"}
        make = lambda i: lib.Param(jnp.ones(2), sharding=P("a"))
        more = lib.vmap(make, transform_metadata=names)(jnp.arange(3))
        less = lib.Param(jnp.ones((3, 2)), sharding=P("layers", "a"))
        lib.spmd.remove_axis(less, 0, names)
        return [(v.sharding_names, type(v.sharding_names)) for v in (more, less)]

    assert_same(program)


def test_an_abstract_variable_on_its_own_mesh():
    def program(lib):
        make = lambda: lib.Param(jnp.zeros((8, 4)), sharding=("data", None), mesh=mesh_of())
        return place(lib.eval_shape(make).get_raw_value())

    assert_same(program)


def test_axes_that_are_refused(unplaced):
    for lib in LIBRARIES:
        v = lib.Param(jnp.zeros((2, 3)), sharding=("x", "b"))
        with pytest.raises(ValueError):
            lib.spmd.remove_axis(v, 0, {lib.PARTITION_NAME: "layers"})
        with pytest.raises(ValueError, match="partition_name"):
            lib.spmd.add_axis(v, 0, {})


@pytest.mark.parametrize("transform", ["vmap", "scan"])
@pytest.mark.parametrize("out_axes", [0, 1, "by kind"])
@pytest.mark.parametrize("partition", ["layers", None])
def test_stacked_annotations(transform, out_axes, partition, unplaced):
    def program(lib):
        over = {"transform_metadata": {lib.PARTITION_NAME: partition}}
        axes = out_axes
        if axes == "by kind":
            axes = lib.StateAxes({lib.PathContains("kernel"): 2, ...: 0})
        stack = getattr(lib, transform)
        make = stack(lambda i: linear(lib, "a", "b"), in_axes=0, out_axes=axes, **over)
        model = make(jnp.arange(3))
        born, seen = described(lib, model), []

        def body(x, model):
            seen.append((model.kernel.sharding_names, model.bias.sharding_names))
            model.kernel.value = model.kernel.value + 1
            return x + model.bias.value[:8]

        if transform == "vmap":
            lib.vmap(body, in_axes=(None, axes), **over)(jnp.ones(8), model)
        else:
            lib.scan(body, in_axes=(lib.Carry, axes), out_axes=lib.Carry, **over)(
                jnp.ones(8), model
            )
        return born, seen[0], described(lib, model), np.asarray(model.kernel.value).tolist()

    assert_same(program)


@KINDS
def test_stacked_parameters_on_a_mesh(kind):
    def program(lib):
        over = {"transform_metadata": {lib.PARTITION_NAME: "data"}}
        make = lib.vmap(lambda i: linear(lib, None, "model"), **over)
        return described(lib, lib.jit(make)(jnp.arange(4)))

    with jax.set_mesh(mesh_of(kind)):
        assert_same(program)


@pytest.mark.parametrize("axes", [(0, None), (0, 0), (1, 0)])
def test_transform_metadata(axes, unplaced):
    def program(lib):
        seen = []

        @lib.transform_metadata(in_axes=axes, out_axes=axes, partition="layers")
        def f(a, b):
            seen.append((a.sharding_names, b["v"].sharding_names))
            make = lambda: lib.Param(jnp.zeros((4, 4)), sharding=("x", "y"))
            return make(), [make()]

        def param(axis):
            names = ["x", "y"]
            if axis is not None:
                names.insert(axis, "layers")
            return lib.Param(jnp.zeros((3, 4, 4)), sharding=tuple(names))

        a, b = map(param, axes)
        first, (second,) = f(a, b={"v": b})
        return seen, [v.sharding_names for v in (a, b, first, second)]

    assert_same(program)


# Optimizers and jit ------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("jitted", [False, True])
def test_optimizer_state(kind, jitted):
    def program(lib):
        def make():
            model = linear(lib, "data", "model")
            return lib.Optimizer(model, optax.adam(1e-2), wrt=lib.Param)

        found = described(lib, (lib.jit(make) if jitted else make)())
        return {path: facts for path, facts in found.items() if facts[1]}

    with jax.set_mesh(mesh_of(kind)):
        assert_same(program)


OWN = {
    "optimizer's own": {"optimizer_sharding": ("data", None)},
    "both": {"sharding": (None, "model"), "optimizer_sharding": ("data", None)},
    "replicated": {"sharding": (None, "model"), "optimizer_sharding": None},
    "rules": {"optimizer_sharding": ("b", None), "sharding_rules": (("b", "data"),)},
    "a name that nobody reads": {"sharding": (None, "model"), "opt_sharding": ("data", None)},
    "not placed": {"optimizer_sharding": ("data", None), "eager_sharding": False},
}


@KINDS
@pytest.mark.parametrize("metadata", OWN.values(), ids=OWN)
@pytest.mark.parametrize("jitted", [False, True])
def test_optimizer_sharding(kind, metadata, jitted):
    def program(lib):
        def make():
            model = lib.Dict(w=lib.Param(jnp.ones((8, 4)), **metadata))
            return model, lib.Optimizer(model, optax.adam(1e-2), wrt=lib.Param)

        def step(model, optimizer):
            grads = lib.grad(lambda m: (m["w"][...] ** 2).sum())(model)
            optimizer.update(model, grads)

        model, optimizer = (lib.jit(make) if jitted else make)()
        born = described(lib, optimizer)
        (lib.jit(step) if jitted else step)(model, optimizer)
        kept = optimizer.opt_state[0].mu["w"].get_metadata()
        return born, described(lib, [model, optimizer]), kept

    with jax.set_mesh(mesh_of(kind)):
        assert_same(program)


@pytest.mark.parametrize("annotation", ["sharding", "format"])
@pytest.mark.parametrize("jitted", [False, True])
def test_an_annotation_with_a_mesh_of_its_own(annotation, jitted):
    whole = NamedSharding(mesh_of(), P("data", "model"))
    if annotation == "format":
        whole = Format(Layout((1, 0)), whole)

    def program(lib):
        def make():
            layer = lib.Linear(8, 4, kernel_metadata={"sharding": whole}, rngs=lib.Rngs(0))
            layer.other = lib.Param(jnp.zeros((8, 4)), optimizer_sharding=whole)
            return layer, lib.Optimizer(layer, optax.adam(1e-2), wrt=lib.Param)

        made = (lib.jit(make) if jitted else make)()
        return [
            (path, v.get_metadata("out_sharding", None), place(v.get_value()))
            for path, v in lib.to_flat_state(lib.state(made))
            if v.shape == (8, 4) and path[-1] != "other"
        ], made[0].kernel.get_value().format.layout

    assert_same(program)


@pytest.mark.parametrize("form", ["mapping", "state", "one for all"])
@pytest.mark.parametrize("out", [False, True])
def test_shardings_of_new_variables(form, out):
    mesh = mesh_of()
    columns, rows, whole = (NamedSharding(mesh, P(*n)) for n in ((None, "model"), ("data",), ()))

    def program(lib):
        model = lib.Linear(8, 16, kernel_init=steps, rngs=lib.Rngs(0))
        places = whole
        if form == "mapping":
            places = lib.StateSharding({lib.PathContains("kernel"): columns, ...: whole})
        elif form == "state":
            state = lib.state(model)
            places = lib.StateSharding(
                jax.tree.map(lambda x: columns if x.ndim == 2 else whole, state)
            )

        def step(model, x):
            model.kernel = lib.Param(model.kernel[...] * 2)
            if form != "state":
                model.stat = lib.BatchStat(x.sum(0))
                model.inner = lib.Linear(8, 16, kernel_init=steps, rngs=lib.Rngs(1))
            return model(x)

        step = lib.jit(step, in_shardings=(places, rows), out_shardings=rows if out else None)
        found = []
        for _ in range(2):
            y = step(model, jnp.ones((8, 8)))
            found.append((described(lib, model), place(y)))
        return found

    assert_same(program)


def test_the_methods_for_axes_run_callbacks_alone():
    def program(lib):
        class Told(lib.Param):
            def on_add_axis(self, index, name):
                self.set_metadata(told=("add", index, name))

            def on_remove_axis(self, index, name):
                self.set_metadata(told=("remove", index, name))

        v, out = Told(jnp.ones((2, 2)), sharding=("a", "b"), eager_sharding=False), []
        for name in (None, "layers"):
            for change in (v.add_axis, v.remove_axis):
                change(0, name)
                out.append((v.told, v.get_metadata("out_sharding")))
        return out

    assert_same(program)


@pytest.mark.parametrize("kernel_axis", [None, 0, 1])
@pytest.mark.parametrize("writes", [False, True])
def test_places_after_pmap(kernel_axis, writes):
    def program(lib):
        model = lib.Linear(8, 8, kernel_init=steps, rngs=lib.Rngs(0))
        model.bare = jnp.ones(3)
        axes = lib.StateAxes({"kernel": kernel_axis, "bias": 0, ...: None})

        def forward(model, x):
            if writes:
                model.bias[...] += 1
            return model.kernel.sum() * x + model.bias

        y = lib.pmap(forward, in_axes=(axes, 0))(model, jnp.ones(8))
        return described(lib, model), place(y)

    assert_same(program)


@pytest.mark.parametrize("before", ["one device", "rows"])
@pytest.mark.parametrize("writes", [False, True])
def test_places_after_shard_map(before, writes):
    mesh = mesh_of()

    def program(lib):
        model = lib.Linear(8, 16, kernel_init=steps, rngs=lib.Rngs(0))
        model.bare = jnp.ones(3)
        if before == "rows":
            rows = NamedSharding(mesh, P("data"))
            model.kernel.set_raw_value(jax.device_put(model.kernel[...], rows))
        specs = lib.State({"kernel": P(None, "model"), "bias": P("model"), "bare": P()})

        def forward(model, x):
            if writes:
                model.bias[...] += 1
            return model(x)

        forward = lib.shard_map(
            forward,
            mesh=mesh,
            in_specs=(lib.StateSharding(specs), P("data")),
            out_specs=P("data", "model"),
        )
        y = forward(model, jnp.ones((8, 8)))
        return described(lib, model), place(y)

    assert_same(program)


@pytest.mark.parametrize("form", ["mapping", "state", "one for all"])
def test_shardings_of_jit(form):
    mesh = mesh_of()
    columns, rows, whole = (NamedSharding(mesh, P(*n)) for n in ((None, "model"), ("data",), ()))

    def program(lib):
        model = lib.Linear(8, 16, kernel_init=steps, rngs=lib.Rngs(0))
        places = whole
        if form == "mapping":
            places = lib.StateSharding({lib.PathContains("kernel"): columns, ...: whole})
        elif form == "state":
            state = lib.state(model)
            places = lib.StateSharding(
                jax.tree.map(lambda x: columns if x.ndim == 2 else whole, state)
            )

        def step(model, x):
            model.kernel.value = model.kernel.value * 2
            return model(x)

        y = lib.jit(step, in_shardings=(places, rows), out_shardings=rows)(model, jnp.ones((8, 8)))
        if form == "mapping":
            made = lib.jit(lambda: linear(lib, None, "model", mesh=mesh), out_shardings=places)()
            return described(lib, model), place(y), described(lib, made), places.filters[1:]
        return described(lib, model), place(y)

    assert_same(program)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_whole_value_is_written_where_the_old_one_is(kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    rows, whole = NamedSharding(mesh, P("data", None)), NamedSharding(mesh, P())
    ones, zeros = jnp.ones((4, 2)), jnp.zeros((4, 2))

    def write(v, value):
        v[...] = value

    def program(lib):
        found = []
        with jax.set_mesh(mesh):
            for value in (zeros, jax.device_put(zeros, whole), zeros.astype(jnp.bfloat16)):
                v = lib.Param(jax.device_put(ones, rows))
                v[...] = value
                found.append((str(v.dtype), v.get_raw_value().sharding == rows))
            v = lib.Param(jax.device_put(ones, rows))
            lib.jit(write)(v, zeros)
            found.append(v.get_raw_value().sharding == rows)
            v.value = zeros
            found.append(v.get_raw_value().sharding == rows)
        return found

    assert_same(program)


def test_a_whole_value_keeps_its_own_weak_type():
    kinds = [jnp.asarray(1.0), jnp.float32(1), jnp.asarray(1), jnp.int32(1), jnp.bfloat16(1), 1.0]

    def program(lib):
        found = []
        for old in kinds[:-1]:
            for new in kinds:
                v = lib.Variable(old)
                v[...] = new
                found.append((str(v.dtype), v.get_raw_value().weak_type))
        return found

    assert_same(program)


def test_as_abstract_leaves_weak_types_as_they_are():
    def program(lib):
        model = lib.eval_shape(lambda: lib.Dict(a=lib.Param(jnp.full(2, 0.5)), b=lib.data(1.5)))
        found = [lib.as_abstract(model), lib.as_abstract(lib.state(model))]
        return [jax.tree.leaves(tree)[0].weak_type for tree in (model, *found)]

    assert_same(program)
    assert program(nnx) == [True] * 3


def test_as_abstract_keeps_sharing():
    def program(lib):
        model = lib.eval_shape(lambda: lib.Dict(a=lib.Param(jnp.ones(2)), b=lib.BatchStat(1.0)))
        model.again, model.me = model.a, model
        one, other = lib.as_abstract([model, {"model": model, "leaf": model.a}])
        state = lib.state(model)
        return [
            one is other["model"] and one.me is one and one is not model,
            one.again is one.a and other["leaf"] is one.a,
            one.a is model.a,  # nothing about it changed
            lib.as_abstract(state)["a"] is state["a"],
        ]

    assert_same(program)
    assert all(program(nnx))


@pytest.mark.parametrize("names", [("data",), ("data", None, "model")], ids=str)
def test_grouped_queries_on_explicit_axes(names):
    mesh = mesh_of(AxisType.Explicit)

    def program(lib):
        with jax.set_mesh(mesh):
            layer = lib.MultiHeadAttention(4, 16, num_kv_heads=2, decode=False, rngs=lib.Rngs(0))
            x = jax.device_put(jnp.ones((4, 4, 16)), NamedSharding(mesh, P(*names)))
            y = layer(x)
        return place(y), np.asarray(y).tolist()

    assert_same(program)
