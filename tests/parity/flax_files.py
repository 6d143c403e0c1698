"""Writes and reads files with objects of `flax.nnx`: pickles, Orbax checkpoints, msgpack.

`python flax_files.py write FOLDER`, then `python flax_files.py read_pickles FOLDER`, each under Flax or
under `nnxlite.flax`; `programs` writes what those of `flax_interop` give. Pickles are those of
cloudpickle: optimizers contain closures.
"""

import functools
import pickle
import sys
from pathlib import Path

import cloudpickle
import flax
import flax.serialization as ser
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from tests.nn.catalogue import LAYERS
from tests.parity.fuzz.observe import Values, difference


def rngs():
    return nnx.Rngs(0, dropout=1, carry=2)


class Model(nnx.Module):
    """Shared parts, a cycle, containers, static values, arrays without a Variable."""

    def __init__(self):
        self.linear = nnx.Linear(2, 2, rngs=rngs())
        self.tied = self.linear.kernel
        self.items = nnx.List([nnx.Variable(jnp.ones(1), tag="x"), "text", *range(10), self.linear])
        self.named = nnx.Dict(up=self, size=3)
        self.data = nnx.data([nnx.Param(1.0), (2, "x"), {"k": nnx.BatchStat(jnp.ones(2))}])
        self.state = nnx.data(optax.TraceState(jnp.zeros(1)))
        self.array = nnx.data(jnp.arange(3))
        self.settings, self.function, self.nothing = {"a": [1]}, len, None


class Outside(nnx.Module, pytree=False):
    def __init__(self):
        self.items = [nnx.Param(jnp.ones(2)), 3]


class Own(nnx.Variable):
    pass


class Written(nnx.Module):
    """Leaves the function out of its pickles."""

    def __init__(self):
        self.weight, self.array, self.f = nnx.Param(jnp.ones(2)), jnp.ones(1), lambda x: x

    def __getstate__(self):
        state = self.__dict__.copy()
        del state["f"]
        return state

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.f = len


for cls in (Model, Outside, Own):  # pickled by value
    cls.__module__ = "__main__"


def optimizer(tx):
    return nnx.Optimizer(nnx.Linear(2, 3, rngs=rngs()), tx, wrt=nnx.Param)


IN_BOTH = {name: row for name, row in LAYERS.items() if hasattr(nnx, name.partition(",")[0])}
OBJECTS = {name: lambda row=row: row.make(rngs(), nnx) for name, row in IN_BOTH.items()} | {
    "Rngs": rngs,
    "RngStream": lambda: rngs().dropout,
    "split Rngs": lambda: rngs().fork(split=2),
    "metrics": lambda: nnx.MultiMetric(a=nnx.metrics.Average("x"), b=nnx.metrics.Accuracy()),
    "Welford": lambda: nnx.metrics.Welford(),
    "sgd": lambda: optimizer(optax.sgd(0.1, momentum=0.9)),
    "chain": lambda: optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))),
    "inject": lambda: optimizer(optax.inject_hyperparams(optax.adam)(learning_rate=0.1)),
    "multi": lambda: optimizer(optax.multi_transform({"a": optax.adam(0.1)}, lambda p: "a")),
    "MultiSteps": lambda: optimizer(optax.MultiSteps(optax.adam(0.1), 2)),
    "ModelAndOptimizer": lambda: nnx.ModelAndOptimizer(
        nnx.Linear(2, 3, rngs=rngs()), optax.adam(0.1), wrt=nnx.Param
    ),
    "EMA": lambda: nnx.EMA(nnx.Linear(2, 3, rngs=rngs()), 0.9),
    "Model": Model,
    "Outside": Outside,
    "Written": Written,
}

OLDER = tuple(map(int, flax.__version__.split("."))) < (0, 12, 12)
CHANGED = {"WeightNorm"} if OLDER else set()  # its scales are arrays there, Params from 0.12.12

VALUES = {
    "Variable": lambda: [nnx.Param(jnp.ones(2)), Own(jnp.ones(1), tag="x", hook=[1])],
    "shared": lambda: (lambda m: [m, nnx.List([m, m.kernel]), nnx.state(m)])(OBJECTS["Linear"]()),
    "filters": lambda: (
        *(nnx.All(nnx.Param, "a"), nnx.Not(nnx.Param), nnx.PathContains("x"), nnx.Any("a", ...)),
        *(nnx.OfType(nnx.Param), nnx.WithTag("x"), nnx.Everything(), nnx.Nothing()),
    ),
    "prefixes": lambda: (
        *(nnx.StateAxes({nnx.Param: 0, ...: None}), nnx.DiffState(0, nnx.Param), nnx.Carry),
        nnx.StateSharding({nnx.Param: jax.P("a"), ...: None}),
    ),
    "metadata": lambda: nnx.VariableMetadata(1, metadata={"a": 1}),
    "abstract": lambda: nnx.eval_shape(OBJECTS["BatchNorm"]),
    "optax": lambda: optax.adam(0.1).init(nnx.state(OBJECTS["Linear"](), nnx.Param)),
}


def facts(value):
    """What a file has of a value: classes, names, sharing, kinds, metadata and values."""
    return Values(nnx)(value)


def same(found, expected, what=""):
    exactly = lambda a, b: a.dtype == b.dtype and np.array_equal(a, b)
    different = difference(found, expected, close=exactly)
    assert not different, (what, different)


def forms(make):
    made = make()
    return {"object": made, "state": nnx.state(made), "flat": nnx.to_flat_state(nnx.state(made))}


CHECKPOINTS = ["Linear", "BatchNorm", "Dropout", "MultiHeadAttention"]
CHECKPOINTS += ["Sequential", "split Rngs", "metrics", "chain", "inject", "ModelAndOptimizer"]


@functools.cache
def states_of():
    return {name: nnx.state(OBJECTS[name]()) for name in CHECKPOINTS}


def write(folder):
    values = {(n, form): v for n, make in OBJECTS.items() for form, v in forms(make).items()}
    values |= {(name, "value"): make() for name, make in VALUES.items()}
    pickles = {key: (cloudpickle.dumps(v), facts(v)) for key, v in values.items()}
    (folder / "pickles").write_bytes(pickle.dumps(pickles))
    states = states_of()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "states", states)
        is_state = lambda x: isinstance(x, nnx.State)
        checkpointer.save(folder / "pure", jax.tree.map(nnx.to_pure_dict, states, is_leaf=is_state))
        checkpointer.wait_until_finished()
    ocp.PyTreeCheckpointer().save(folder / "tree", states)
    with ocp.CheckpointManager(folder / "steps") as manager:
        items = {"model": ocp.args.StandardSave(states["chain"])}
        items |= {"note": ocp.args.JsonSave({"a": 1})}
        items |= {"tree": ocp.args.PyTreeSave(states["BatchNorm"])}
        manager.save(3, args=ocp.args.Composite(**items))
    (folder / "msgpack").write_bytes(ser.to_bytes(nnx.to_pure_dict(states["chain"])))


def read_pickles(folder):
    written = pickle.loads((folder / "pickles").read_bytes())
    for (name, form), (data, expected) in written.items():
        try:
            value = pickle.loads(data)
        except Exception as error:
            raise RuntimeError(f"{name}: {form} cannot be read") from error
        if name not in CHANGED:
            same(facts(value), expected, (name, form))
        if name in ("filters", "prefixes", "metadata"):
            assert value == VALUES[name]()
        if form == "object":
            use(name, value)


def read_checkpoints(folder):
    states = states_of()
    expected = facts(states)
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, states)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    on_device = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device)
    placed = jax.tree.map(on_device, abstract)
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    zeros = jax.tree.map(lambda x: x if is_key(x) else x * 0, states)
    with ocp.StandardCheckpointer() as checkpointer:
        for like in (abstract, placed, zeros):
            same(facts(checkpointer.restore(folder / "states", like)), expected)
        pure = checkpointer.restore(folder / "pure")
    empty = jax.tree.map(lambda x: x, zeros)
    for name, state in empty.items():
        nnx.replace_by_pure_dict(state, nnx.restore_int_paths(pure[name]))
    same(facts(empty), expected)
    tree = ocp.PyTreeCheckpointer()
    args = ocp.checkpoint_utils.construct_restore_args(placed)
    same(facts(tree.restore(folder / "tree", item=zeros)), expected)
    same(facts(tree.restore(folder / "tree", item=placed, restore_args=args)), expected)
    with ocp.CheckpointManager(folder / "steps") as manager:
        items = {"model": ocp.args.StandardRestore(abstract["chain"])}
        items |= {"note": ocp.args.JsonRestore()}
        items |= {"tree": ocp.args.PyTreeRestore(zeros["BatchNorm"])}
        restored = manager.restore(3, args=ocp.args.Composite(**items))
    same(facts(restored.model), facts(states["chain"]))
    same(facts(restored.tree), facts(states["BatchNorm"]))
    assert restored.note == {"a": 1}
    data = (folder / "msgpack").read_bytes()
    again = ser.from_bytes(nnx.to_pure_dict(zeros["chain"]), data)
    same(facts(again), facts(nnx.to_pure_dict(states["chain"])))


def programs(folder):
    from tests.parity.flax_interop import results

    (folder / "results").write_bytes(pickle.dumps(results()))


def use(name, value):
    """An object that was read computes what a new one does, and takes part in transforms."""
    fresh = OBJECTS[name]()
    if row := IN_BOTH.get(name):
        same(facts(row.run(value, row.x)), facts(row.run(fresh, row.x)), name)
    if name == "chain":
        model = nnx.Linear(2, 3, rngs=rngs())
        for optimizer in (value, fresh):
            optimizer.update(model, nnx.grad(lambda m: m(jnp.ones((1, 2))).sum())(model))
        same(facts(nnx.state(value)), facts(nnx.state(fresh)))
        assert value.step == 1
    if name == "Rngs":
        assert (jax.random.key_data(value.dropout()) == jax.random.key_data(fresh.dropout())).all()
    if name == "Model":
        assert value.named.up is value and value.items[12] is value.linear
        value.items.append(1)
        value.settings["a"].append(2)
        assert value.items[13] == 1 and fresh.settings == {"a": [1]}
    if name == "Written":
        assert value.f is len and set(vars(value)) >= {"weight", "array", "f"}
    nnx.jit(lambda m: jax.tree.leaves(nnx.state(m))[:1])(value)


if __name__ == "__main__":
    import flax_files  # its classes are found by name, as those of a library

    for mode, folder in zip(sys.argv[1::2], sys.argv[2::2]):
        getattr(flax_files, mode)(Path(folder))
