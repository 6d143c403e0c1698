"""Sharding annotations, and what transforms make of them, are those of the reference."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.parity.layers import ref
from tests.parity.programs import Lines, agree
from tests.sharding.meshes import mesh_of, steps

pytestmark = pytest.mark.filterwarnings("ignore")  # of the reference, about its own spellings

lines, on_mesh, placed = Lines(), Lines(), Lines()
"""Where nothing is placed (the reference places annotated values always, and wants a mesh for it); on a
mesh with automatic and one with explicit axes; and with a mesh that each program brings."""

KINDS = pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=lambda k: k.name)
RULES = (("batch", "data"), ("mlp", "model"), ("embed", None))
BOOLS = (False, True)


def place(leaf):
    sharding = getattr(leaf, "sharding", None)
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else None


def programs(lib):
    """What the lines call: models, programs with parameters, and what is compared of them."""

    def linear(*names):
        init = lambda names: lib.with_partitioning(steps, names)
        inits = {"kernel_init": init(names), "bias_init": init(names[-1:])}
        return lib.Linear(8, 16, **inits, rngs=lib.Rngs(0))

    def with_stat():
        layer = linear("data", "model")
        layer.stat = lib.BatchStat(jnp.zeros(3))
        return layer

    def described(tree):
        """Path to (kind, annotation, shape, place on the mesh) of every leaf."""
        state = tree if isinstance(tree, lib.State) else lib.state(tree)
        out = {}
        for path, v in lib.to_flat_state(state):
            if not isinstance(v, lib.Variable):
                out[path] = ("array", None, getattr(v, "shape", v), place(v))
                continue
            held, names = v.get_raw_value(), v.get_metadata().get("out_sharding")
            names = None if names is None else tuple(names)
            out[path] = (type(v), names, getattr(held, "shape", held), place(held))
        return out

    def exactly(v):
        """Metadata, with a tuple told from a list."""
        return repr(sorted(v.get_metadata().items())), repr(v.sharding_names)

    def param(names, shape=(8, 8), **metadata):
        return lib.Param(jnp.zeros(shape), sharding=names, **metadata)

    def spec(*args, **metadata):
        found = lib.get_partition_spec(param(*args, **metadata))
        return found.get_raw_value(), dict(sorted(found.get_metadata().items()))

    def own_mesh_and_settings(mesh):
        own = param(("data", None), mesh=mesh)
        with jax.set_mesh(mesh), lib.use_eager_sharding(False):
            off = param(("data", None))
            on = param(("data", None), eager_sharding=True)
            using = lib.using_eager_sharding()
        kept = [v.get_metadata("eager_sharding") for v in (own, off, on)]
        return [place(v.get_value()) for v in (own, off, on)], kept, using

    def under(rules, names):
        return lib.logical_axis_rules(rules)(spec)(names), spec(names, sharding_rules=rules)

    def of_trees():
        layer = with_stat()
        layer.number = lib.Variable(3)
        layer.nested = lib.Variable({"a": jnp.zeros(2)})
        layer.array = jnp.zeros(2)
        state = lib.state(layer)
        found = lib.get_partition_spec(state), lib.get_partition_spec(layer)
        return [described(x) for x in (*found, lib.get_named_sharding(state, mesh_of()))]

    def axes_added_and_removed(index, names):
        told = []
        note = lambda what: lambda v, index, name: told.append((what, index, name))
        told_of = {"on_add_axis": note("add"), "on_remove_axis": note("remove")}
        v, layers = param(names, (2, 3), **told_of), {lib.PARTITION_NAME: "layers"}
        added = lib.spmd.add_axis(v, index, layers)
        first = v.sharding_names
        lib.spmd.remove_axis(v, index, layers)
        return added is v, repr(first), repr(v.sharding_names), told

    def stacked(transform, axes, partition):
        over = {"transform_metadata": {lib.PARTITION_NAME: partition}}
        if axes == "by kind":
            axes = lib.StateAxes({lib.PathContains("kernel"): 2, ...: 0})
        stack = getattr(lib, transform)
        make = stack(lambda i: linear("a", "b"), in_axes=0, out_axes=axes, **over)
        model = make(jnp.arange(3))
        born, seen = described(model), []

        def body(x, model):
            seen.append((model.kernel.sharding_names, model.bias.sharding_names))
            model.kernel.value = model.kernel.value + 1
            return x + model.bias.value[:8]

        carry = {"in_axes": (lib.Carry, axes), "out_axes": lib.Carry}
        carry = {"in_axes": (None, axes)} if transform == "vmap" else carry
        stack(body, **carry, **over)(jnp.ones(8), model)
        return born, seen[0], described(model), model

    def optimized(metadata, jitted):
        jit = lib.jit if jitted else lambda f: f

        def make():
            model = lib.Dict(w=lib.Param(jnp.ones((8, 4)), **metadata))
            return model, lib.Optimizer(model, optax.adam(1e-2), wrt=lib.Param)

        def step(model, optimizer):
            grads = lib.grad(lambda m: (m["w"][...] ** 2).sum())(model)
            optimizer.update(model, grads)

        model, optimizer = jit(make)()
        born = described(optimizer)
        jit(step)(model, optimizer)
        kept = optimizer.opt_state[0].mu["w"].get_metadata().items()
        return born, described([model, optimizer]), dict(sorted(kept))

    def whole_values():
        mesh = jax.sharding.get_mesh()
        rows, whole = NamedSharding(mesh, P("data", None)), NamedSharding(mesh, P())
        ones, zeros = jnp.ones((4, 2)), jnp.zeros((4, 2))
        assign = lambda v, value: v.__setitem__(..., value)
        writes, found = [(assign, zeros), (assign, jax.device_put(zeros, whole))], []
        writes += [(assign, zeros.astype(jnp.bfloat16)), (lib.jit(assign), zeros)]
        for write, value in writes:
            v = lib.Param(jax.device_put(ones, rows))
            write(v, value)
            found.append((str(v.dtype), v.get_raw_value().sharding == rows))
        v.value = zeros
        return found, v.get_raw_value().sharding == rows

    def grouped_queries(*names):
        layer = lib.MultiHeadAttention(4, 16, num_kv_heads=2, decode=False, rngs=lib.Rngs(0))
        x = NamedSharding(jax.sharding.get_mesh(), P(*names))
        y = layer(jax.device_put(jnp.ones((4, 4, 16)), x))
        return place(y), y

    layers = {lib.PARTITION_NAME: "layers"}
    over = {lib.PARTITION_NAME: "data"}
    names = {k: v for k, v in locals().items() if k != "lib"}
    return {**names, "P": P, "PartitionSpec": P, "RULES": RULES, "place": place, "mesh_of": mesh_of}


def each(table, text, *choices):
    for values in itertools.product(*choices):
        table("", programs, text.format(*map(repr, values)))


for _names in ("'data', 'model'", "None, 'model'", "('data', 'model'), None"):
    for _call in ("{}", "lib.jit(lambda: {})()", "lib.eval_shape(lambda: {})"):
        on_mesh("parameters", programs, f"described({_call.format(f'linear({_names})')})")
on_mesh(
    "models",
    programs,
    """
    described(lib.get_abstract_model(with_stat, jax.sharding.get_mesh())[1])
    described(lib.abstract_with_sharding(lib.state(lib.eval_shape(with_stat))))
    described(lib.jit(lib.vmap(lambda i: linear(None, 'model'), transform_metadata=over))(jnp.arange(4)))
    whole_values()
    grouped_queries('data')
    grouped_queries('data', None, 'model')
    """,
)
OWN = (
    {"sharding": ("data", "model")},
    {"optimizer_sharding": ("data", None)},
    {"sharding": (None, "model"), "optimizer_sharding": ("data", None)},
    {"sharding": (None, "model"), "optimizer_sharding": None},
    {"optimizer_sharding": ("b", None), "sharding_rules": (("b", "data"),)},
    {"sharding": (None, "model"), "opt_sharding": ("data", None)},  # a name that nobody reads
    {"optimizer_sharding": ("data", None), "eager_sharding": False},
)
each(on_mesh, "optimized({}, {})", OWN, BOOLS)

SPELLINGS = ("sharding", "sharding_names", "out_sharding")
ANNOTATIONS = (("a", None), P("a", None), ["a", None], None, ())
each(lines, "exactly(lib.Variable(jnp.zeros((2, 3)), **{{{}: {}}}))", SPELLINGS, ANNOTATIONS)
SEVERAL_RULES = (
    *((), RULES, (("batch", ("data", "model")), ("mlp", None))),
    *((("batch", "mlp"), ("mlp", "data"), ("batch", "model")), [("batch", ["data", "model"])]),
)
SPECS = (
    *(("batch", "mlp"), ("embed", "other"), ("data", None), (("data", "model"), None)),
    *(P("batch", None), (), ("mlp", "mlp")),
)
each(lines, "under({}, {})", SEVERAL_RULES, SPECS)
each(lines, "axes_added_and_removed({}, {})", range(4), (("a", "b"), ("a",), None))
each(lines, "stacked({}, {}, {})", ("vmap", "scan"), (0, 1, "by kind"), ("layers", None))
lines(
    "specs, rules and axes",
    programs,
    """
    of_trees()
    lib.get_partition_spec({'a': jnp.ones(2), 'n': np.ones(2), 'b': 1.0, 'd': None})
    lib.get_named_sharding({'a': jnp.ones(2), 'b': 1.0, 'd': None}, mesh_of())
    exactly(lib.vmap(lambda i: lib.Param(jnp.ones(2), sharding=P('a')), transform_metadata=layers)(jnp.arange(3)))
    exactly((lambda v: (lib.spmd.remove_axis(v, 0, layers), v)[1])(param(P('layers', 'a'), (3, 2))))
    (lambda v: (v.add_axis(0, 'x'), v.told))(type('Told', (lib.Param,), {'on_add_axis': lambda v, *given: v.set_metadata(told=given)})(1))
    (lambda v: [(v.add_axis(0, n), exactly(v), v.remove_axis(0, n), exactly(v)) for n in (None, 'layers')])(param(('a', 'b')))
    """,
)

placed(
    "",
    programs,
    """
    own_mesh_and_settings(mesh_of())
    own_mesh_and_settings(mesh_of(jax.sharding.AxisType.Explicit))
    place(lib.eval_shape(lambda: param(('data', None), mesh=mesh_of())).get_raw_value())
    place(param((P.UNCONSTRAINED, None), mesh=mesh_of()).get_raw_value())
    """,
)


@pytest.mark.parametrize("scope, line, mode", lines.params)
def test_line(scope, line, mode):
    with nnx.use_eager_sharding(False), ref.use_eager_sharding(False):
        agree(scope, line, mode)


@KINDS
@pytest.mark.parametrize("scope, line, mode", on_mesh.params)
def test_line_on_a_mesh(kind, scope, line, mode):
    with jax.set_mesh(mesh_of(kind)):
        agree(scope, line, mode)


test_line_with_places = placed.test()
