"""Programs around the other parts of Flax and other libraries, run under Flax and under `nnxlite.flax`.

`results` says what each gives, as `fuzz.observe` describes it; `test_flax_interop.py` compares. A program is
a line of `LINES`, or a function whose name says what it does.
"""

import abc
import collections.abc
import copy
import dataclasses
import pickle
import tempfile
import typing as tp

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
from flax import nnx
from flax.training import checkpoints, common_utils, dynamic_scale, early_stopping, orbax_utils
from flax.training.train_state import TrainState

from tests.parity.fuzz.observe import Observer

PROGRAMS: dict[str, tp.Callable[[], tp.Any]] = {}


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def fails(f):
    """What a function returns, or the class of its error."""
    try:
        return f()
    except NameError:  # a mistake of the program
        raise
    except Exception as error:
        return type(error).__name__


class Around(Observer):
    """Describes FrozenDicts and dataclasses as well."""

    def describe(self, x):
        if isinstance(x, flax.core.FrozenDict):
            return "FrozenDict", {str(k): self(v) for k, v in x.items()}
        if dataclasses.is_dataclass(x) and not isinstance(x, (type, nnx.Pytree, nnx.Variable)):
            fields = {f.name: self(getattr(x, f.name)) for f in dataclasses.fields(x)}
            return type(x).__name__, fields
        return super().describe(x)


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


def optimizer(tx=None):
    return nnx.Optimizer(block(), tx or optax.adam(0.1), wrt=nnx.Param)


def params():
    return nnx.state(block(), nnx.Param)


def pure():
    return nnx.to_pure_dict(params())


def named():
    return ser.to_state_dict(pure())


def paths(tree, is_leaf=None):
    """Key paths, the classes of their keys, and those of the leaves."""
    return [
        (jax.tree_util.keystr(path), [type(k).__name__ for k in path], type(leaf).__name__)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    ]


def doubled(tree):
    return jax.tree.map(lambda x: np.asarray(x) * 2, tree)


def shapes(tree):
    return [x.shape for x in jax.tree.leaves(tree)]


def again(x):
    return pickle.loads(pickle.dumps(x))


def by_value(x):
    return cloudpickle.loads(cloudpickle.dumps(x))


X = jnp.arange(6.0).reshape(3, 2)
VARIABLE = lambda x: isinstance(x, nnx.Variable)
KERNELS = tu.ModelParamTraversal(lambda path, _: "kernel" in path)
GRAPHDEF = nnx.graphdef(linear())


@flax.struct.dataclass
class Record:
    params: tp.Any
    step: int = 0
    graphdef: tp.Any = flax.struct.field(pytree_node=False, default=None)


class Node(flax.struct.PyTreeNode):
    p: tp.Any
    n: int = flax.struct.field(pytree_node=False, default=1)


class Holder(nnx.Module):
    """A module with something of another part of Flax as data, and as a setting."""

    def __init__(self, data, setting=None):
        self.data, self.setting = nnx.data(data), setting


FROZEN = {"a": nnx.Param(jnp.ones(1)), "b": jnp.ones(2)}
SETTINGS = {"a": 2, "b": {"c": 3}}


def frozen():
    return Holder(flax.core.freeze(FROZEN), flax.core.freeze(SETTINGS))


def recorded():
    return Holder(Record(nnx.Param(jnp.ones(1)), 2), Record(3))


BOX = flax.core.meta.Partitioned(jnp.ones((2, 2)), ("a", None))
STATE = nnx.State({"loss": jnp.ones((8,))})
EACH = {"k": optax.adam(0.1), "b": optax.set_to_zero()}


def labels(p):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "k" if "kernel" in jax.tree_util.keystr(path) else "b", p
    )


def trained(tx):
    p = params()
    state = tx.init(p)
    for i in range(2):
        grads = jax.tree.map(lambda x, i=i: x * 0 + 0.1 * (i + 1), p)
        updates, state = tx.update(grads, state, p)
        p = optax.apply_updates(p, updates)
    return p, state


def replaced(kind, name, use):
    """On which classes a method is called that another has taken the place of."""
    original, calls, inherited = getattr(kind, name), [], name not in vars(kind)

    def method(self, *args, **kwargs):
        calls.append(type(self).__name__)
        return original(self, *args, **kwargs)

    setattr(kind, name, method)
    try:
        use()
    finally:
        delattr(kind, name) if inherited else setattr(kind, name, original)
    return calls


KINDS = [nnx.Module, nnx.Pytree, nnx.Object, nnx.Variable, nnx.Param, nnx.List, nnx.Dict, dict]
ABSTRACT = "MutableMapping Mapping MutableSequence Sequence Iterable Callable".split()
KINDS += [getattr(collections.abc, name) for name in ABSTRACT]
INJECTED = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)

LINES = """
ser.to_state_dict(nnx.state(block()))
ser.to_state_dict(nnx.state(optimizer()))
ser.to_state_dict(block())
ser.to_state_dict(nnx.List([1]))
ser.to_state_dict(nnx.Param(jnp.ones(2)))
ser.to_state_dict(nnx.to_flat_state(params()))
ser.to_state_dict({"s": params(), "t": (params(), 3), "o": optax.adam(0.1).init(params())})
ser.from_state_dict(params(), doubled(ser.to_state_dict(params())))
ser.from_state_dict(params(), {k: v for k, v in ser.to_state_dict(params()).items() if k != "linear"})
ser.from_state_dict(params(), {**ser.to_state_dict(params()), "a": 3})
ser.to_bytes(params())
ser.to_bytes({"a": nnx.Param(jnp.ones(2))})
ser.to_bytes(pure())
ser.from_bytes(pure(), ser.to_bytes(pure()))
ser.msgpack_restore(ser.to_bytes(pure()))

tu.flatten_dict(named(), sep="/")
tu.unflatten_dict(tu.flatten_dict(pure()))
nnx.State(tu.unflatten_dict(dict(nnx.to_flat_state(params()))))
tu.path_aware_map(lambda path, x: "/".join(map(str, path)), pure())
KERNELS.update(lambda x: x * 0, named())
tu.flatten_dict(params())
tu.path_aware_map(lambda path, x: x, params())
KERNELS.update(lambda x: x, params())
flax.core.freeze(pure())
flax.core.freeze(params())
flax.core.unfreeze(params())
flax.core.copy(pure(), {"more": 1})
flax.core.pop(pure(), "linear")
nnx.to_flat_state(nnx.State(flax.core.freeze(pure())))
(lambda s: (nnx.replace_by_pure_dict(s, flax.core.freeze(doubled(pure()))), s))(params())
nnx.state(frozen())
nnx.clone(frozen()).data, nnx.clone(frozen()).setting["b"]["c"]
nnx.jit(lambda m: m.data["a"] * m.setting["a"])(frozen())
nnx.state(recorded())
nnx.clone(recorded()).data, nnx.clone(recorded()).setting
nnx.jit(lambda m: m.data.params + m.data.step * m.setting.params)(recorded())
(lambda r: (paths(r), r))(jax.jit(lambda r: r.replace(step=r.step + 1))(Record(params())))
(lambda g, s: Record(s, 0, g).replace(step=1).graphdef == g)(*nnx.split(block()))
paths(Record(block(), 0))
nnx.state(Record(block(), 0))
nnx.jit(lambda r: r.params(X))(Record(block(), 0))
nnx.grad(lambda n: n.p(X).sum())(Node(linear()))
nnx.state(Node(block()))
jax.tree.map(lambda a: a, Node(params()))
ser.to_state_dict(Record(params(), 3))
ser.to_bytes(Record(params()))

shapes(flax.jax_utils.replicate(params()))
shapes(flax.jax_utils.replicate(nnx.state(optimizer())))
flax.jax_utils.unreplicate(flax.jax_utils.replicate(linear()))
list(flax.jax_utils.prefetch_to_device(iter([{"a": np.ones((8, 2)), "s": STATE}]), 2))
common_utils.stack_forest([params(), params()])
shapes(common_utils.shard(jax.tree.map(lambda x: jnp.stack([x] * 8), params())))
common_utils.get_metrics([STATE] * 2)
common_utils.shard_prng_key(jax.random.key(0))
dynamic_scale.DynamicScale().value_and_grad(lambda p: nnx.merge(GRAPHDEF, p)(X).sum())(nnx.state(linear()))
early_stopping.EarlyStopping().update(1.0).update(jnp.float32(0.5))
nnx.state(Holder(dynamic_scale.DynamicScale()))
nnx.state(Holder(BOX)), paths(Holder(BOX))
flax.core.meta.unbox(params())
flax.core.meta.replace_boxed(params(), params())

trained(optax.multi_transform(EACH, labels(params())))
trained(optax.multi_transform(EACH, lambda p: nnx.map_state(lambda path, v: "k" if path[-1] == "kernel" else "b", p)))
trained(optax.masked(optax.adam(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)))
trained(optax.masked(optax.add_decayed_weights(0.1), jax.tree.map(lambda label: label == "k", labels(params()))))
trained(optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0, 10)))
trained(optax.adafactor(0.1))
trained(optax.MultiSteps(optax.adam(0.1), 2))
optax.adam(0.1).update(jax.tree.map(jnp.ones_like, linear()), optax.adam(0.1).init(linear()), linear())
optax.apply_updates(linear(), linear()), optax.global_norm(linear())
(lambda o: (o.opt_state.hyperparams["learning_rate"].set_value(0.5), o))(optimizer(INJECTED))
optax.tree_utils.tree_get(optimizer(INJECTED).opt_state, "learning_rate")
optax.tree_utils.tree_set(INJECTED.init(params()), learning_rate=0.3)
optax.tree_utils.tree_zeros_like(params()), optax.tree_utils.tree_add(params(), params())
optax.tree_utils.tree_get_all_with_path(INJECTED.init(params()), "mu")[0][1]
optax.tree_utils.tree_map_params(optax.adam(0.1), lambda x: x + 1, optax.adam(0.1).init(params()))
optax.incremental_update(params(), params(), 0.1)

safetensors.flax.save(tu.flatten_dict(named(), sep="."))
safetensors.flax.save({".".join(map(str, p)): v for p, v in nnx.to_flat_state(params())})
[way(block()) for way in (copy.copy, copy.deepcopy, by_value)]
[way(GRAPHDEF) == GRAPHDEF for way in (copy.copy, copy.deepcopy, again)]
[way(nnx.List([m, m])) for m in [block()] for way in (copy.copy, copy.deepcopy, by_value)]
again(params()), again(nnx.Rngs(0).params)
str(nn.get_partition_spec(nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.ones, ("x", "y"))).init(jax.random.key(0), jnp.ones((1, 8)))))
paths(nn.get_partition_spec(nnx.state(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))))

sorted(k for k in vars(block()) if k[0] != "_"), [m == m and m != block() for m in [block()]]
[k.__qualname__ for k in (nnx.Module, nnx.State, nnx.Param, nnx.Rngs, nnx.List)]
replaced(nnx.Linear, "__call__", lambda: [call(linear(), X) for call in (nnx.Linear.__call__, nnx.jit(lambda m, x: m(x)))])
replaced(nnx.Linear, "__init__", linear)
replaced(nnx.Module, "__setattr__", linear)
replaced(nnx.Module, "train", block().train)
""".splitlines()
for _value in """block() nnx.state(block()) optimizer() nnx.state(optimizer()) nnx.Rngs(0) nnx.List([block(),3])
    nnx.Dict(a=block()) nnx.Param({"a":X}) nnx.MultiMetric(a=nnx.metrics.Average()) {"m":block()}
    nnx.to_flat_state(params()) nnx.Sequential(linear(),nnx.relu)""".split():
    LINES += [f"paths({_value})", f"paths({_value}, VARIABLE)"]
    LINES += [f"[isinstance({_value}, kind) for kind in KINDS]"]
LINES += [f"paths(block(), lambda x: isinstance(x, nnx.{kind}))" for kind in ("Linear", "Module")]
for _line in filter(None, LINES):
    PROGRAMS[_line] = lambda line=_line: eval(line, globals())


@program
def train_state():
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
    parts = state.params, state.rest, state.opt_state
    return parts, value, ser.to_state_dict(state), paths(state)


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
        restored = checkpointer.restore(folder + "/a", item=zeros, restore_args=restore_args)
        return restored, jax.tree.structure(arguments) == jax.tree.structure(s)


# flax.linen --------------------------------------------------------------------------------------

RULES = (("embed", "x"), ("mlp", "y"))


@program
def rules_of_linen_and_nnx():
    spmd, results = flax.core.spmd, []
    unplaced = nnx.Param(jnp.ones((8, 8)), out_sharding=("embed", "mlp"), eager_sharding=False)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def now():
        spec = nnx.get_partition_spec(unplaced).get_value()
        axes = nn.logical_to_mesh_axes(("embed", "mlp"))
        results.append([str(spec), str(axes), str(nn.get_logical_axis_rules()), fails(created)])

    def created():
        init = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))
        with jax.set_mesh(mesh):
            layer = nnx.Linear(8, 8, kernel_init=init, use_bias=False, rngs=nnx.Rngs(0))
        return str(layer.kernel.get_value().sharding.spec)

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
    m, v, rngs, items = block(), nnx.Variable(jnp.ones(2)), nnx.Rngs(0), nnx.List([1])
    writes = [
        *(lambda x: v.set_value(x), lambda x: setattr(v, "a", 3), lambda x: setattr(m, "a", 3)),
        *(lambda x: items.append(3), lambda x: rngs.params(), lambda x: nnx.update(m, params())),
        *(nnx.jit(lambda x: v.set_value(x)), nnx.grad(lambda x: v.set_value(x))),
        lambda x: nnx.scan(lambda c, x: (v.set_value(x), x))(x, jnp.ones(2)),
    ]
    return [caught(write) for write in writes]


# Classes and objects -----------------------------------------------------------------------------


@program
def classes_of_every_kind():
    class Interface(abc.ABC):
        @abc.abstractmethod
        def f(self): ...

    class Abstract(nnx.Module, Interface): ...

    class Implementation(Interface, nnx.Module):
        f = lambda self: 2

    class Tagged(nnx.Module):
        def __init_subclass__(cls, *, tag=None, **options):
            super().__init_subclass__(**options)
            cls.tag = tag

    class NoPytree(Tagged, tag="y", pytree=False): ...

    class Counting(type(nnx.Module)):
        def __call__(cls, *args):
            made = super().__call__(*args)
            made.made = True
            return made

    class Base:
        def __new__(cls, *args):
            made = super().__new__(cls)
            made.__dict__["made"] = 5
            return made

        def __init__(self, *args):
            self.base = 1
            super().__init__(*args)

    class Several(Base, nnx.Module):
        def __init__(self):
            super().__init__()
            self.w = nnx.Param(jnp.ones(1))

    implementation, several = Implementation(), Several()
    made = Counting("Counted", (nnx.Module,), {})()
    return [
        *(fails(Abstract), implementation.f(), isinstance(implementation, abc.ABC)),
        *(type("Own", (Tagged,), {}, tag="x").tag, NoPytree.tag, made.made),
        *(several.base, several.made, jax.tree.leaves(several)),
    ]


def results():
    return {name: Around(nnx)(fails(run)) for name, run in PROGRAMS.items()}
