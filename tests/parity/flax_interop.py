"""Programs around the other parts of Flax and other libraries, run under Flax and under `nnxlite.flax`.

`python flax_interop.py FILE` writes the result of each program, as plain data. `test_flax_interop.py`
runs it twice and compares. A program is a function of this file whose name says what it does.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import sys
import tempfile
import typing as tp

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import cloudpickle
import flax
import flax.core.spmd
import flax.errors
import flax.jax_utils
import flax.linen as nn
import flax.serialization as ser
import flax.struct
import flax.traverse_util as tu
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import safetensors.flax
import treescope
from flax import nnx
from flax.training import checkpoints, common_utils, dynamic_scale, early_stopping, orbax_utils
from flax.training.train_state import TrainState

PROGRAMS: dict[str, tp.Callable[[], tp.Any]] = {}


def program(f):
    PROGRAMS[f.__name__] = f
    return f


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 3, use_bias=False, rngs=rngs) for _ in range(2)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.name = "block"

    def __call__(self, x):
        x = self.norm(self.linear(x))
        for layer in self.layers:
            x = layer(x)
        return self.drop(x)


def block():
    return Block(nnx.Rngs(0, dropout=1))


def linear():
    return nnx.Linear(2, 3, rngs=nnx.Rngs(0))


def params():
    return nnx.state(block(), nnx.Param)


def pure():
    return nnx.to_pure_dict(params())


def paths(tree):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


X = jnp.arange(6.0).reshape(3, 2)


def plain(x):
    """A result as data for JSON."""
    if isinstance(x, nnx.Variable):
        metadata = sorted((k, str(v)) for k, v in x.get_metadata().items())
        return ["Variable", type(x).__name__, plain(x.get_value()), metadata]
    if isinstance(x, nnx.State):
        return ["State", [[list(map(str, p)), plain(v)] for p, v in nnx.to_flat_state(x)]]
    if isinstance(x, nnx.Pytree):
        return ["Pytree", type(x).__name__, plain(nnx.state(x))]
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        array = np.asarray(x)
        return [type(x).__name__, str(array.dtype), list(array.shape), array.tobytes().hex()]
    if isinstance(x, tp.Mapping):
        return [type(x).__name__, [[str(k), plain(v)] for k, v in x.items()]]
    if isinstance(x, (list, tuple)):
        return [type(x).__name__, [plain(v) for v in x]]
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = [[f.name, plain(getattr(x, f.name))] for f in dataclasses.fields(x)]
        return [type(x).__name__, fields]
    if isinstance(x, bytes):
        return x.hex()
    return x if x is None or isinstance(x, (int, float, str)) else type(x).__name__


# flax.serialization ------------------------------------------------------------------------------


@program
def state_dicts():
    m = block()
    optimizer = nnx.Optimizer(m, optax.adam(0.1), wrt=nnx.Param)
    rngs, metrics = nnx.Rngs(0), nnx.MultiMetric(a=nnx.metrics.Average())
    values = [nnx.state(v) for v in (m, optimizer, rngs, metrics)]
    values += [
        m,
        optimizer,
        rngs,
        nnx.List([1]),
        nnx.Param(jnp.ones(2)),
        nnx.to_flat_state(params()),
    ]
    values += [{"s": params(), "t": (params(), 3), "o": optax.adam(0.1).init(params())}]
    return [ser.to_state_dict(value) for value in values]


@program
def from_state_dict():
    s, whole = params(), ser.to_state_dict(params())
    doubled = jax.tree.map(lambda x: np.asarray(x) * 2, whole)
    without = {k: v for k, v in whole.items() if k != "linear"}
    found = [ser.from_state_dict(s, doubled)]
    return found + [
        fails(lambda d=d: ser.from_state_dict(s, d)) for d in (without, {**whole, "a": 3})
    ]


@program
def state_to_bytes():
    values = [params(), {"a": nnx.Param(jnp.ones(2))}, optax.adam(0.1).init(params())]
    return [fails(lambda value=value: ser.to_bytes(value)) for value in values]


@program
def pure_dict_to_bytes():
    data = ser.to_bytes(pure())
    return [data, ser.from_bytes(pure(), data), ser.msgpack_restore(data)]


def fails(f):
    """What a function returns, or the class of its error."""
    try:
        return f()
    except Exception as error:
        return type(error).__name__


# flax.traverse_util, flax.core, flax.struct ------------------------------------------------------


@program
def traversals():
    flat = tu.flatten_dict(pure())
    named = ser.to_state_dict(pure())
    return [
        [[list(map(str, k)), v] for k, v in flat.items()],
        tu.flatten_dict(named, sep="/"),
        tu.unflatten_dict(flat),
        nnx.State(tu.unflatten_dict(dict(nnx.to_flat_state(params())))),
        tu.path_aware_map(lambda path, x: "/".join(map(str, path)), pure()),
        tu.ModelParamTraversal(lambda path, _: "kernel" in path).update(lambda x: x * 0, named),
        fails(lambda: tu.flatten_dict(params())),
        fails(lambda: tu.path_aware_map(lambda path, x: x, params())),
        fails(lambda: tu.ModelParamTraversal(lambda path, _: True).update(lambda x: x, params())),
    ]


@program
def frozen_dicts():
    frozen, core = flax.core.freeze(pure()), flax.core
    s = params()
    nnx.replace_by_pure_dict(s, core.freeze(jax.tree.map(lambda x: x + 1, pure())))
    return [
        *(frozen, core.unfreeze(frozen), core.freeze(params()), core.FrozenDict(params())),
        *(core.unfreeze(params()), core.copy(pure(), {"more": 1}), core.pop(pure(), "linear")),
        *(nnx.State(frozen), s),
    ]


@program
def frozen_dict_in_a_module():
    class M(nnx.Module):
        def __init__(self):
            self.static = flax.core.freeze({"a": 2, "b": {"c": 3}})
            self.data = nnx.data(flax.core.freeze({"a": nnx.Param(jnp.ones(1)), "b": jnp.ones(2)}))

    m = M()
    result = nnx.jit(lambda m: m.data["a"] * m.static["a"])(m)
    return [nnx.state(m), nnx.clone(m).data, nnx.clone(m).static["b"]["c"], result]


@flax.struct.dataclass
class Record:
    params: tp.Any
    step: int = 0
    graphdef: tp.Any = flax.struct.field(pytree_node=False, default=None)


class Node(flax.struct.PyTreeNode):
    p: tp.Any
    n: int = flax.struct.field(pytree_node=False, default=1)


@program
def struct_of_state_and_module():
    graphdef, state = nnx.split(block())
    record = Record(state, 0, graphdef)
    after = jax.jit(lambda r: r.replace(step=r.step + 1))(record)
    module = Record(block(), 0)
    return [
        *(after.params, after.step, after.graphdef == graphdef, paths(after)),
        *(paths(module), nnx.state(module), nnx.jit(lambda r: r.params(X))(module)),
        nnx.grad(lambda n: n.p(X).sum())(Node(linear())),
        *(nnx.state(Node(block())), jax.tree.map(lambda a: a, Node(params()))),
        *(ser.to_state_dict(Record(params(), 3)), fails(lambda: ser.to_bytes(Record(params())))),
    ]


@program
def struct_in_a_module():
    class M(nnx.Module):
        def __init__(self):
            self.record = nnx.data(Record(nnx.Param(jnp.ones(1)), 2))
            self.settings = Record(3)

    m = M()
    result = nnx.jit(lambda m: m.record.params + m.record.step * m.settings.params)(m)
    return [nnx.state(m), result, nnx.clone(m).record, nnx.clone(m).settings]


# flax.training, flax.jax_utils -------------------------------------------------------------------


@program
def train_state():
    graphdef, p, rest = nnx.split(linear(), nnx.Param, ...)
    apply = lambda p, x: nnx.merge(graphdef, p, rest)(x)
    state = TrainState.create(apply_fn=apply, params=p, tx=optax.adam(0.1))

    @jax.jit
    def step(state):
        grads = jax.grad(lambda p: state.apply_fn(p, X).sum())(state.params)
        return state.apply_gradients(grads=grads)

    for _ in range(3):
        state = step(state)
    return [state.params, state.step, state.opt_state, ser.to_state_dict(state), paths(state)]


@program
def train_state_with_statistics():
    class State(TrainState):
        rest: tp.Any = None

    graphdef, p, rest = nnx.split(block(), nnx.Param, ...)
    state = State.create(apply_fn=None, params=p, tx=optax.sgd(0.1, momentum=0.9), rest=rest)

    def loss(p, rest):
        m = nnx.merge(graphdef, p, rest, copy=True)
        return m(X).sum(), nnx.state(m, nnx.Not(nnx.Param))

    @jax.jit
    def step(state):
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(state.params, state.rest)
        return state.apply_gradients(grads=grads, rest=rest), value

    state, _ = step(state)
    state, value = step(state)
    return [state.params, state.rest, value]


@program
def replicated():
    optimizer = nnx.Optimizer(linear(), optax.adam(0.1), wrt=nnx.Param)
    results = []
    for value in (params(), linear(), nnx.state(optimizer)):
        r = flax.jax_utils.replicate(value)
        results += [
            [x.shape for x in jax.tree.leaves(r)],
            fails(lambda r=r: flax.jax_utils.unreplicate(r)),
        ]
    batches = [{"a": np.ones((8, 2)), "s": nnx.State({"x": np.ones((8, 1))})}]
    return [*results, fails(lambda: list(flax.jax_utils.prefetch_to_device(iter(batches), 2)))]


@program
def training_utilities():
    s, scale = params(), dynamic_scale.DynamicScale()
    graphdef, p = nnx.split(linear())
    f = scale.value_and_grad(lambda p: nnx.merge(graphdef, p)(X).sum())
    stop = early_stopping.EarlyStopping().update(1.0).update(jnp.float32(0.5))
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 8), s)
    one = {"loss": jnp.ones((8,))}
    return [
        *(
            common_utils.stack_forest([s, s]),
            [x.shape for x in jax.tree.leaves(common_utils.shard(stacked))],
        ),
        *(
            fails(lambda: common_utils.get_metrics([nnx.State(one)] * 2)),
            common_utils.shard_prng_key(jax.random.key(0)),
        ),
        *(f(p), stop),
    ]


@program
def dynamic_scale_in_a_module():
    class M(nnx.Module):
        def __init__(self):
            self.scale = nnx.data(dynamic_scale.DynamicScale())

    return nnx.state(M())


@program
def checkpoints_of_flax_training():
    results, s = [], params()
    zeros = jax.tree.map(lambda x: x * 0, s)
    for orbax in (True, False):
        flax.config.update("flax_use_orbax_checkpointing", orbax)
        for value, like in ((s, zeros), (pure(), pure())):
            with tempfile.TemporaryDirectory() as folder:

                def saved(value=value, like=like, folder=folder):
                    checkpoints.save_checkpoint(folder, value, 1)
                    return [checkpoints.restore_checkpoint(folder, x) for x in (like, None)]

                results.append(fails(saved))
    return results


@program
def orbax_utilities():
    with tempfile.TemporaryDirectory() as folder:
        s, checkpointer = params(), ocp.PyTreeCheckpointer()
        arguments = orbax_utils.save_args_from_target(s)
        checkpointer.save(folder + "/a", s, save_args=arguments)
        restore_args = orbax_utils.restore_args_from_target(s)
        zeros = jax.tree.map(lambda x: x * 0, s)
        return [
            checkpointer.restore(folder + "/a", item=zeros, restore_args=restore_args),
            jax.tree.structure(arguments) == jax.tree.structure(s),
        ]


@program
def boxes():
    box = flax.core.meta.Partitioned(jnp.ones((2, 2)), ("a", None))

    class M(nnx.Module):
        def __init__(self):
            self.box = nnx.data(box)

    meta = flax.core.meta
    return [
        nnx.state(M()),
        paths(M()),
        meta.unbox(params()),
        meta.replace_boxed(params(), params()),
    ]


# optax, treescope, safetensors, pickle -----------------------------------------------------------


def trained(tx, p):
    state = tx.init(p)
    for i in range(2):
        grads = jax.tree.map(lambda x, i=i: x * 0 + 0.1 * (i + 1), p)
        updates, state = tx.update(grads, state, p)
        p = optax.apply_updates(p, updates)
    return [p, state]


def labels(p):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "k" if "kernel" in jax.tree_util.keystr(path) else "b", p
    )


@program
def transformations_by_label():
    each = {"k": optax.adam(0.1), "b": optax.set_to_zero()}
    by_name = lambda p: nnx.map_state(lambda path, v: "k" if path[-1] == "kernel" else "b", p)
    is_matrix = lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    mask = jax.tree.map(lambda label: label == "k", labels(params()))
    transformations = [
        *(optax.multi_transform(each, f) for f in (labels, labels(params()), by_name)),
        optax.masked(optax.adam(0.1), is_matrix),
        optax.chain(optax.masked(optax.add_decayed_weights(0.1), mask), optax.sgd(0.1)),
        optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0, 10)),
        *(optax.adafactor(0.1), optax.MultiSteps(optax.adam(0.1), 2)),
    ]
    return [trained(tx, params()) for tx in transformations]


@program
def transformations_of_modules():
    m, tx = linear(), optax.adam(0.1)
    updates, state = tx.update(jax.tree.map(jnp.ones_like, m), tx.init(m), m)
    optimizer = nnx.Optimizer(block(), optax.inject_hyperparams(optax.adam)(0.1), wrt=nnx.Param)
    optimizer.opt_state.hyperparams["learning_rate"][...] = 0.5
    return [
        *(state, updates, optax.apply_updates(m, updates), optax.global_norm(m)),
        optax.tree_utils.tree_get(optimizer.opt_state, "learning_rate"),
        nnx.state(optimizer),
    ]


@program
def trees_of_optax():
    s, t = params(), optax.tree_utils
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    state = t.tree_set(tx.init(s), learning_rate=0.3)
    return [
        *(t.tree_zeros_like(s), t.tree_add(s, s), t.tree_cast(s, jnp.bfloat16), t.tree_sum(s)),
        *(t.tree_vdot(s, s), t.tree_get(state, "learning_rate")),
        t.tree_get_all_with_path(state, "mu")[0][1],
        t.tree_map_params(optax.adam(0.1), lambda x: x + 1, optax.adam(0.1).init(s)),
        optax.incremental_update(s, s, 0.1),
    ]


@program
def pictures():
    values = [linear(), params(), nnx.graphdef(block()), nnx.Rngs(0), nnx.Param(jnp.ones(2))]
    return [
        bool(f(v)) for v in values for f in (treescope.render_to_text, treescope.render_to_html)
    ]


@program
def key_paths():
    m = block()
    optimizer = nnx.Optimizer(m, optax.adam(0.1), wrt=nnx.Param)
    values = [m, nnx.state(m), optimizer, nnx.state(optimizer), nnx.Rngs(0), nnx.List([m, 3])]
    values += [
        nnx.Dict(a=m),
        nnx.Param({"a": X}),
        nnx.MultiMetric(a=nnx.metrics.Average()),
        {"m": m},
    ]
    values += [nnx.to_flat_state(params()), nnx.Sequential(linear(), nnx.relu)]
    is_variable = lambda x: isinstance(x, nnx.Variable)
    return [
        [
            [jax.tree_util.keystr(p), [type(k).__name__ for k in p], type(leaf).__name__]
            for p, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_leaf)
        ]
        for value in values
        for is_leaf in (None, is_variable)
    ]


@program
def tensors():
    by_name = tu.flatten_dict(ser.to_state_dict(pure()), sep=".")
    data = safetensors.flax.save(by_name)
    variables = {".".join(map(str, p)): v for p, v in nnx.to_flat_state(params())}
    return [
        data,
        sorted(safetensors.flax.load(data)),
        fails(lambda: safetensors.flax.save(variables)),
    ]


@program
def copies():
    m = block()
    optimizer = nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param)
    values = [m, optimizer, nnx.Rngs(0)]  # deepcopy of a Variable is an array there
    ways = [copy.copy, copy.deepcopy, lambda x: cloudpickle.loads(cloudpickle.dumps(x))]
    graphdef, shared = nnx.graphdef(linear()), nnx.List([m, m])
    pickled = lambda x: pickle.loads(pickle.dumps(x))
    return [
        *(way(value) for value in values for way in ways),
        *(way(graphdef) == graphdef for way in (copy.copy, copy.deepcopy, pickled)),
        *((c[0] is c[1], c[0] is m) for c in (way(shared) for way in ways)),
        *(pickled(params()), pickled(nnx.Rngs(0).params)),
    ]


# flax.linen --------------------------------------------------------------------------------------

RULES = (("embed", "x"), ("mlp", "y"))


def annotated():
    init = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))
    return nnx.Linear(8, 8, kernel_init=init, use_bias=False, rngs=nnx.Rngs(0))


@program
def rules_of_linen_and_nnx():
    spmd, results = flax.core.spmd, []
    unplaced = nnx.Param(jnp.ones((8, 8)), out_sharding=("embed", "mlp"), eager_sharding=False)

    def now():
        spec = nnx.get_partition_spec(unplaced).get_value()
        axes = nn.logical_to_mesh_axes(("embed", "mlp"))
        results.append([str(spec), str(axes), str(nn.get_logical_axis_rules()), fails(created)])

    def created():
        with jax.set_mesh(
            jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        ):
            return str(annotated().kernel.get_value().sharding.spec)

    now()
    for outer in (nn.logical_axis_rules, nnx.logical_axis_rules, spmd.logical_axis_rules):
        for inner in (nn.logical_axis_rules, nnx.logical_axis_rules):
            with outer(RULES):
                now()
                with inner((("embed", "y"),)):
                    now()
                now()
    spmd.set_logical_axis_rules(RULES)
    now()
    with nnx.logical_axis_rules([("embed", None), ("mlp", ["x", "y"])]):
        results.append(str(nnx.get_partition_spec(unplaced).get_value()))
    now()
    spmd.set_logical_axis_rules(())
    now()
    return results


@program
def specs_of_linen():
    dense = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.ones, ("x", "y")))
    variables = dense.init(jax.random.key(0), jnp.ones((1, 8)))
    specs = nn.get_partition_spec(nnx.state(nnx.Linear(8, 8, rngs=nnx.Rngs(0))))
    return [str(nn.get_partition_spec(variables)), nnx.State(variables["params"]), paths(specs)]


@program
def linen_in_nnx():
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x)

    class Outer(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.act = Inner(), nn.relu
            self.variables = nnx.data(self.inner.init(rngs.params(), X))
            self.out = nnx.Linear(3, 1, kernel_init=nn.initializers.ones, rngs=rngs)

        def __call__(self, x):
            return self.out(self.act(self.inner.apply(self.variables, x)))

    m = Outer(nnx.Rngs(0))
    grads = nnx.grad(lambda m: m(X).sum())(m)
    return [nnx.jit(lambda m: m(X))(m), nnx.state(m), grads, nnx.clone(m)(X), nnx.relu is nn.relu]


@program
def nnx_in_linen():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            p = self.param("state", lambda key: nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(key))))
            return nnx.merge(nnx.graphdef(linear()), p)(x)

    variables = Outer().init(jax.random.key(0), X)
    grads = jax.grad(lambda v: Outer().apply(v, X).sum())(variables)
    return [variables, Outer().apply(variables, X), grads]


# flax.errors -------------------------------------------------------------------------------------


def caught(write):
    """The classes of `flax.errors` that catch what a write inside a transform raises."""
    try:
        jax.jit(write)(1.0)
    except flax.errors.TraceContextError as error:
        return ["TraceContextError", isinstance(error, flax.errors.FlaxError), str(error)[:13]]
    except Exception as error:
        return type(error).__name__
    return None


@program
def writes_from_another_trace_level():
    m, v, rngs = block(), nnx.Variable(jnp.ones(2)), nnx.Rngs(0)
    optimizer, metric = nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param), nnx.metrics.Average()
    items, named = nnx.List([1]), nnx.Dict(a=1)
    writes = [
        *(lambda x: v.set_value(x), lambda x: v.set_metadata(a=3), lambda x: setattr(v, "a", 3)),
        *(lambda x: setattr(m, "a", 3), lambda x: setattr(m.linear, "kernel", nnx.Param(x))),
        *(lambda x: items.append(3), lambda x: named.update(b=3), lambda x: rngs.params()),
        *(lambda x: rngs.fork(), lambda x: m.sow(nnx.Intermediate, "a", x)),
        *(lambda x: optimizer.update(m, params()), lambda x: metric.update(values=x)),
        *(lambda x: nnx.update(m, params()), nnx.jit(lambda x: v.set_value(x))),
        *(nnx.grad(lambda x: v.set_value(x)), nnx.remat(lambda x: setattr(m, "a", x))),
        lambda x: nnx.scan(lambda c, x: (v.set_value(x), x))(x, jnp.ones(2)),
    ]
    return [caught(write) for write in writes]


if __name__ == "__main__":
    chosen = sys.argv[2:]
    results = {n: plain(f()) for n, f in PROGRAMS.items() if not chosen or n in chosen}
    with open(sys.argv[1], "w") as file:
        json.dump(results, file)
