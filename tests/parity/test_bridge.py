"""`nnx.bridge` beside the reference: the same values at the same paths, bit for bit.

Linen is the same for both. Names and parameters of the bridge are compared in `test_signatures`.
"""

import functools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity.programs import Lines, Plain, agree

flax = pytest.importorskip("flax")
from flax import linen as nn  # noqa: E402
from flax.core import meta  # noqa: E402

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)
ONES = np.ones(40, np.float32)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Bridged(Plain):
    """Describes boxes and the collections of Linen as well."""

    def describe(self, x):
        if isinstance(x, self.lib.bridge.NNXMeta):
            hidden = {"hijax", "ref", "eager_sharding"}
            metadata = {k: v for k, v in x.metadata.items() if k not in hidden}
            return x.var_type.__name__, self(x.value), self(metadata)
        if isinstance(x, meta.AxisMetadata):
            return type(x).__name__, self(x.unbox()), repr(x.get_partition_spec())
        if isinstance(x, (dict, flax.core.FrozenDict)):  # in any order
            return {key: self(item) for key, item in x.items()}
        return super().describe(x)


def exactly(a, b):
    return a.dtype == b.dtype and np.array_equal(a, b)


# Modules of Linen ------------------------------------------------------------------------------------


class Net(nn.Module):
    """Parameters, statistics, a counter, dropout, sown values and a submodule."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(4, name="d")(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        self.sow("intermediates", "h", x)
        calls = self.variable("counter", "calls", lambda: jnp.zeros((), int))
        if train:
            calls.value += 1
        return nn.Dense(2)(x)

    def double(self, x, by=2):
        return x * by


class Boxed(nn.Module):
    names: tp.Any = (None, "model")
    logical: bool = False

    @nn.compact
    def __call__(self, x):
        box = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        return nn.Dense(4, kernel_init=box(nn.initializers.lecun_normal(), self.names))(x)


class Writes(nn.Module):
    @nn.compact
    def __call__(self, x):
        cache = self.variable("cache", "at", lambda: {"k": jnp.zeros(2), "n": {"m": jnp.ones(1)}})
        cache.value = jax.tree.map(lambda a: a + 1, cache.value)
        self.variable("cache", "pair", lambda: (jnp.ones(1), 2))
        self.sow("losses", "l", x.sum(), reduce_fn=jnp.add, init_fn=lambda: 0.0)
        return self.perturb("p", x)


class Step(nn.Module):
    make: tp.Any

    @nn.compact
    def __call__(self, x, _):
        return self.make(name="body")(x), None


class Lifted(nn.Module):
    make: tp.Any
    kind: str

    @nn.compact
    def __call__(self, x):
        options: tp.Any = {
            "variable_axes": {"params": 0, "batch_stats": 0, "Variable": 0, "intermediates": 0},
            "split_rngs": {"params": True, "dropout": True},
        }
        if self.kind == "vmap":
            lifted = nn.vmap(Step, in_axes=(None, None), axis_size=3, **options)
        else:
            lifted = nn.scan(Step, length=3, **options)
        return lifted(self.make)(x, None)[0]


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(2, qkv_features=4, decode=True)(x, x, x)


class SharedScope(nn.Module):
    make: tp.Any

    @nn.compact
    def __call__(self, x):
        inner = self.make()
        nn.share_scope(self, inner)
        return inner(x)


class Clash(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.variable("stat", "w", lambda: x)
        return x + self.param("w", nn.initializers.ones, (3,))


# Lines -----------------------------------------------------------------------------------------------

KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
DROPOUT = {"dropout": jax.random.key(2)}
MUTABLE = ["batch_stats", "intermediates"]
STEPS = jnp.linspace(0.0, 1.0, 20).reshape(1, 5, 4)
lines = Lines()


@functools.cache
def modules(nnx):
    """Modules of a library, of its bridge, and functions of what they give."""
    Wrapped, to_linen = nnx.bridge.ToNNX, nnx.bridge.to_linen
    mix, bv = nnx.bridge.interop, nnx.bridge.variables

    class Body(nnx.Module):
        def __init__(self, size, *, rngs):
            self.layers = nnx.List([nnx.Linear(n, size, rngs=rngs) for n in (3, size)])
            self.bn = nnx.BatchNorm(size, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.calls = nnx.Variable(jnp.zeros((), int))
            self.tied = self.layers[1]

        def __call__(self, x, train=True):
            self.calls[...] += 1
            self.sow(nnx.Intermediate, "h", x)
            x = self.bn(self.tied(self.layers[0](x)), use_running_average=not train)
            return self.dropout(x, deterministic=not train)

        def first(self, x):
            return self.layers[0](x)

    class Marked(nnx.Module):
        def __init__(self, rngs, **metadata):
            self.w = nnx.Param(jax.random.uniform(rngs.params(), (3, 3)), **metadata)

        def __call__(self, x):
            self.w[...] *= 2
            return x @ self.w

    class Dense(nnx.bridge.Module):
        features: int

        @nnx.bridge.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
            return x @ w + self.param("b", nn.initializers.zeros, (self.features,))

    class Draws(nnx.Module):
        def __init__(self, rngs):
            self.rngs = rngs
            self.w = nnx.Param(jax.random.uniform(rngs.params(), (2,)))

        def __call__(self, x):
            return x, self.rngs.dropout(), self.rngs.params()

    class Odd(nnx.Module):
        def __init__(self, rngs):
            self.pair = nnx.Variable((1, 2))
            self.array = nnx.data(jnp.ones(3))
            self.dict = nnx.data({"p": nnx.Param(jnp.ones(3))})

        def __call__(self, x):
            self.array = self.array * 2
            self.new = nnx.Cache(x)
            return x * self.array * self.dict["p"]

    class Parts(nnx.bridge.Module):
        size: int = 3

        def setup(self):
            self.d = Dense(self.size)
            self.w = self.param("w", nn.initializers.ones, (3,))
            self.many = [Dense(3), mix.linen_in_bridge_mdl(nn.Dense(3))]
            self.named = {"a": Dense(3)}
            self.ours = mix.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(3, 3, rngs=rngs))

        def __call__(self, x):
            x = self.ours(self.many[1](self.many[0](self.d(x))))
            return x * self.w + self.named["a"](x)

        def one(self, x):
            return self.d(x)

    class Counts(nnx.bridge.Module):
        @nnx.bridge.compact
        def __call__(self, x):
            calls = self.variable("counter", "calls", lambda: jnp.zeros(()))
            stat = self.variable("batch_stats", "stat", jnp.ones, (2,))
            if not self.is_initializing():
                calls[...] += 1
                stat[...] *= 2
            return x, self.make_rng("params"), self.make_rng(), dict(self.variables)

        def record(self, x):
            self.sow(nnx.Intermediate, "h", x)
            self.sow("intermediates", "g", x)
            return self.perturb("p", x)

    class Mixed(nnx.bridge.Module):
        @nnx.bridge.compact
        def __call__(self, x):
            x = mix.linen_in_bridge_mdl(nn.Dense(4))(x)
            x = mix.linen_in_bridge_mdl(nn.BatchNorm(use_running_average=False), name="bn")(x)
            x = mix.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(4, 3, rngs=rngs))(x)
            self.head = nnx.Linear(3, 3, rngs=self.scope.rngs)
            ours = mix.nnx_in_bridge_mdl(lambda rngs: nnx.Dropout(0.5, rngs=rngs), name="d")
            theirs = mix.linen_in_bridge_mdl(nn.Dropout(0.5, deterministic=False))
            is_current = nnx.bridge.current_module() is self
            return self.head(x), ours(ONES), theirs(ONES), is_current

    def drops(rngs):
        found = Wrapped(nn.Dropout(0.5, deterministic=False), rngs=rngs)
        return [found.lazy_init(ONES)(ONES), found(ONES), found, rngs]

    @nnx.vmap
    def stack(key):
        return Wrapped(nn.Dense(3), nnx.Rngs(params=key)).lazy_init(X)

    def lifted(kind):
        module = Lifted(functools.partial(to_linen, Body, 3), kind)
        v = module.init(KEYS, X)

        def loss(params):
            out, updates = module.apply({**v, "params": params}, X, rngs=DROPOUT, mutable=MUTABLE)
            return out.sum(), (out, updates)

        return v, jax.jit(jax.value_and_grad(loss, has_aux=True))(v["params"])

    def steps(decoding):
        step = nnx.jit(lambda m, x: m(x, mutable=["cache"]))
        return [step(decoding, STEPS[:, i : i + 1]) for i in range(3)]

    def made(module, *rngs):
        """What a module of Linen or of the bridge makes, and what it then gives."""
        v = module.init(*rngs or (jax.random.key(0),), X)
        unboxed = meta.unbox(v)
        outs = [module.apply(x, X) for x in (v, unboxed)]
        return v, outs, module.apply(v, X, mutable=["params"]), nn.get_partition_spec(v)

    def converted(box):
        variable = bv.to_nnx_var("params", box)
        back = bv.to_linen_var(variable)
        spec = nnx.get_partition_spec(nnx.State({"w": variable}))
        return variable, back, jax.tree.map(lambda x: x * 2, back), spec

    def annotated(nnx_init):
        return to_linen(nnx.Linear, 3, 4, kernel_init=nnx_init(INIT, (None, "model")))

    return {k: v for k, v in {**globals(), **locals()}.items() if k[0] != "_" and k != "nnx"}


INIT = nn.initializers.lecun_normal()
NESTED = {
    "params": {"a": {"k": X, "e": {}}, "b": X},
    "batch_stats": {"a": {"m": X}},
    "t": {"c": (1, 2)},
}


@functools.cache
def variables(nnx):
    """Modules of Linen, wrapped; and modules of the library as modules of Linen, with variables."""
    net, writes = (nnx.bridge.ToNNX(m, nnx.Rngs(0, dropout=1)) for m in (Net(), Writes()))
    net.lazy_init(X), writes.lazy_init(X)
    names = modules(nnx)
    body, dense, counts = (
        nnx.bridge.to_linen(names["Body"], 3),
        names["Dense"](4),
        names["Counts"](),
    )
    v, w, c = body.init(KEYS, X), dense.init(0, X), counts.init(0, X)
    found = {"body": body, "dense": dense, "counts": counts, "v": v, "w": w, "c": c}
    return (net, writes), found


def to_nnx(nnx):
    (net, writes), _ = variables(nnx)
    net, raw, writes = map(nnx.clone, (net, net, writes))
    return modules(nnx) | {"net": net, "raw": raw, "writes": writes, "out": {}}


def to_linen(nnx):
    return modules(nnx) | variables(nnx)[1] | {"out": {}}


lines(
    "to nnx",
    to_nnx,
    """
    lib.bridge.lazy_init(raw, X) is raw
    net(X, train=False)
    net(X, mutable=["batch_stats", "counter"])
    net(X, mutable=nn.DenyList("params"))
    net(X, mutable=True, rngs=jax.random.key(3))
    net(X, mutable=True, rngs=lib.Rngs(4))
    net(X, method="double", by=3), net(X, method=Net.double), net.double(X, by=5)
    net(X, method=lambda module, x: x + 1)
    type(net.calls), lib.variable_type_from_name("counter")
    net(X, mutable=True), lib.pop(net, lib.Intermediate)
    drops(lib.Rngs(7))
    drops(lib.Rngs(params=1))
    drops(lib.Rngs(0, dropout=3))
    drops(lib.Rngs(0).fork())
    drops(jax.random.key(1))
    drops(jax.random.PRNGKey(2))
    stack(jax.random.split(jax.random.key(0), 3))
    lib.vmap(lambda m, x: m(x), in_axes=(0, None))(stack(jax.random.split(jax.random.key(0), 3)), X)
    lib.scan(lambda x, m: m(x), in_axes=(lib.Carry, 0), out_axes=lib.Carry)(X, stack(jax.random.split(jax.random.key(0), 3)))
    lib.eval_shape(lambda: stack(jnp.stack([jax.random.key(0)])))
    writes(X, mutable=True)
    (lambda m: (steps(m), m))(Wrapped(Attention(), lib.Rngs(0)).lazy_init(STEPS))
    (lambda m: [m(X, mutable=["batch_stats"]), m(X, mutable=["batch_stats"]), m])(Wrapped(to_linen(Body, 3), lib.Rngs(0, dropout=1)).lazy_init(X))
    (lambda m: (m(STEPS), m))(Wrapped(nn.RNN(nn.LSTMCell(4)), lib.Rngs(0)).lazy_init(STEPS))
    """,
)
lines(
    "to linen",
    to_linen,
    """
    [type(key) for key in v["params"]["layers"]], body.init_with_output(KEYS, X)
    body.apply(v, X)
    body.apply(v, X, rngs=DROPOUT, mutable=True)
    body.apply(flax.core.freeze(v), X, train=False)
    body.apply(v, X, train=False, mutable=["intermediates"])
    body.apply({"params": v["params"]}, X, train=False, mutable=True)
    body.apply(v, X, nnx_method="first"), body.apply(v, X, nnx_method=Body.first)
    jax.jit(functools.partial(body.apply, mutable=True))(v, X, rngs=DROPOUT)
    jax.grad(lambda p: body.apply({**v, "params": p}, X).sum())(v["params"])
    (lambda m: [m.apply(m.init(KEYS, X), X, rngs=r) for r in (None, jax.random.key(0), {"params": jax.random.key(4)}, DROPOUT, KEYS)])(to_linen(Draws))
    (lambda m: (m.init(KEYS, X), m.apply(m.init(KEYS, X), X), m.apply(m.init(KEYS, X), X, mutable=["ArrayImpl", "cache"])))(to_linen(Odd))
    made(to_linen(lambda rngs: lib.Sequential(Wrapped(nn.Dense(3), rngs).lazy_init(X), lib.Linear(3, 3, rngs=rngs))))
    (lambda m: m.apply(m.init(KEYS, X), X, rngs=DROPOUT, mutable=MUTABLE + ["counter"]))(to_linen(lambda rngs: Wrapped(Net(), rngs).lazy_init(X)))
    made(to_linen(Marked))
    made(to_linen(Marked, tag=1))
    to_linen(Marked, tag=1, metadata_fn=None).init(jax.random.key(0), X)
    lifted("scan")
    lifted("vmap")
    SharedScope(functools.partial(to_linen, lib.Linear, 3, 3)).init(KEYS, X)
    jax.eval_shape(SharedScope(functools.partial(to_linen, lib.Linear, 3, 3)).init, KEYS, X)
    """,
)
lines(
    "modules of the bridge",
    to_linen,
    """
    [dense.init(r, X) for r in (jax.random.key(0), {"params": 0}, lib.Rngs(0))]
    dense.init_with_output(0, X), dense.apply(w, X)
    dense.apply(flax.core.freeze(w), X, mutable=True)
    dense.apply(w, X, method=lambda m, x: m(x) + 1)
    dense.apply({"params": {"w": w["params"]["w"]}}, X, rngs=1, mutable=["params"])
    dense.apply({**w, "more": {"q": X}}, X, mutable=True)
    dense.variables, dense.scope, dense.is_initializing()
    jax.jit(dense.apply)(w, X), jax.grad(lambda v: dense.apply(v, X).sum())(w)
    jax.vmap(lambda key: dense.init(key, X))(jax.random.split(jax.random.key(0), 2))
    lib.bridge.current_module(), lib.bridge.current_context()
    (lambda v: (v, Parts().apply(v, X), Parts().apply(v, X, method="one")))(Parts().init(0, X))
    [counts.apply(c, X, rngs=r, mutable=["counter"]) for r in (0, jax.random.key(1), {"default": 2})]
    counts.apply({}, X, method="record", mutable=True), counts.init(0, X, method="record")
    (lambda v: [v, *[Mixed().apply(v, X, rngs=r, mutable=True) for r in (1, {"params": 0, "dropout": 2})]])(Mixed().init(0, X))
    """,
)
lines(
    "variables",
    to_linen,
    """
    bv.linen_vars_to_nnx_attrs(NESTED)
    bv.nnx_attrs_to_linen_vars(bv.linen_vars_to_nnx_attrs(NESTED))
    bv.nnx_attrs_to_linen_vars(lib.state(lib.Linear(2, 3, rngs=lib.Rngs(0))))
    bv.sort_variable_types([lib.Variable, lib.RngState, lib.Param, lib.RngKey, lib.BatchStat])
    bv.get_col_name(jax.tree_util.tree_leaves_with_path({"params": {"x": 1}})[0][0])
    [(bv.is_vanilla_variable(v), bv.to_linen_var(v)) for v in (lib.Param(1), lib.Param(1, tag=2), lib.BatchStat(X), lib.Param(X, tag=None))]
    [bv.to_nnx_var(col, x) for col in ("params", "counter") for x in (X, 3, nn.Dense)]
    """,
)
on_mesh = Lines()
"""On a mesh of one device."""
on_mesh(
    "annotations",
    to_linen,
    """
    converted(nn.Partitioned(X, names=("model", None)))
    converted(nn.Partitioned(X, names=("model", None), mesh=jax.sharding.get_mesh()))
    converted(nn.LogicallyPartitioned(X, names=("in", None), rules=(("in", "model"),)))
    converted(lib.bridge.NNXMeta(lib.Param, X, {"out_sharding": ("model", None), "tag": 1}))
    converted(lib.bridge.NNXMeta(lib.Param, X, {"tag": 1}))
    bv.to_linen_var(lib.Param(lib.bridge.with_partitioning(nn.initializers.ones, (None, "model"))(jax.random.key(0), (3, 2))))
    (lambda m: (m, m(X), lib.grad(lambda m: m(X).sum())(m), lib.get_partition_spec(lib.state(m, lib.Param))))(Wrapped(Boxed(), lib.Rngs(0)).lazy_init(X))
    with nn.logical_axis_rules((("in", None), ("out", "model"))): m = Wrapped(Boxed(("in", "out"), logical=True), lib.Rngs(0)).lazy_init(X); out["m"] = m, m(X), lib.get_partition_spec(lib.state(m, lib.Param))
    lib.vmap(lambda key: Wrapped(Boxed(), lib.Rngs(params=key)).lazy_init(X), transform_metadata={lib.PARTITION_NAME: "data"})(jax.random.split(jax.random.key(0), 2))
    made(annotated(lib.with_partitioning))
    made(annotated(lib.bridge.with_partitioning))
    """,
)
lines(
    "mistakes",
    to_linen,
    """
    lib.bridge.ToNNX(nn.Dense(3), lib.Rngs(0))(X)
    lib.bridge.ToNNX(nn.Dense(3)).lazy_init(X)
    lib.bridge.ToNNX(Net(), lib.Rngs(0)).lazy_init(X)(X)
    lib.bridge.ToNNX(Clash(), lib.Rngs(0)).lazy_init(X)
    lib.bridge.ToNNX(nn.Dense(3), lib.Rngs(0))(X, method="nothing")
    lib.bridge.to_linen(Body, 3).init(KEYS["params"], X)
    lib.bridge.to_linen(lib.Linear, 3, 4).init({}, X)
    lib.bridge.to_linen(lib.Linear, 3, 4).init(KEYS, X, nnx_method="no")
    Dense(3).apply({}, X)
    Dense(3).apply({}, X, method="no")
    """,
)


test_line = lines.test(observer=Bridged, close=exactly)


@pytest.mark.parametrize("scope, line, mode", on_mesh.params)
def test_line_on_a_mesh(scope, line, mode):
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=auto, devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        agree(scope, line, mode, observer=Bridged, close=exactly)
