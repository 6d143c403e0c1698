"""Writes and reads files with objects of `flax.nnx`: pickles, Orbax checkpoints, msgpack.

`python flax_files.py FOLDER write`, then `python flax_files.py FOLDER read`, each under Flax or under
`nnxlite.flax`. Pickles are those of cloudpickle, since optimizers contain closures.
"""

from __future__ import annotations

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


OBJECTS = {
    "Linear": lambda: nnx.Linear(2, 3, dtype=jnp.bfloat16, rngs=rngs()),
    "LinearGeneral": lambda: nnx.LinearGeneral((2, 3), (4, 5), axis=(0, 1), rngs=rngs()),
    "Einsum": lambda: nnx.Einsum("ab,bc->ac", (2, 3), (3,), rngs=rngs()),
    "Embed": lambda: nnx.Embed(2, 3, rngs=rngs()),
    "Conv": lambda: nnx.Conv(2, 3, (3, 3), padding="CIRCULAR", rngs=rngs()),
    "ConvTranspose": lambda: nnx.ConvTranspose(2, 3, (3, 3), rngs=rngs()),
    "BatchNorm": lambda: nnx.BatchNorm(2, rngs=rngs()),
    "LayerNorm": lambda: nnx.LayerNorm(2, rngs=rngs()),
    "RMSNorm": lambda: nnx.RMSNorm(2, rngs=rngs()),
    "GroupNorm": lambda: nnx.GroupNorm(4, num_groups=2, rngs=rngs()),
    "InstanceNorm": lambda: nnx.InstanceNorm(4, rngs=rngs()),
    "WeightNorm": lambda: nnx.WeightNorm(nnx.Linear(2, 3, rngs=rngs()), rngs=rngs()),
    "SpectralNorm": lambda: nnx.SpectralNorm(nnx.Linear(2, 3, rngs=rngs()), rngs=rngs()),
    "Dropout": lambda: nnx.Dropout(0.5, rngs=rngs()),
    "MultiHeadAttention": lambda: nnx.MultiHeadAttention(
        2, 4, dropout_rate=0.1, decode=True, normalize_qk=True, rngs=rngs()
    ),
    "LSTMCell": lambda: nnx.LSTMCell(2, 3, rngs=rngs()),
    "OptimizedLSTMCell": lambda: nnx.OptimizedLSTMCell(2, 3, rngs=rngs()),
    "GRUCell": lambda: nnx.GRUCell(2, 3, rngs=rngs()),
    "RNN": lambda: nnx.RNN(nnx.SimpleCell(2, 3, rngs=rngs()), rngs=rngs()),
    "LoRA": lambda: nnx.LoRA(2, 3, 4, rngs=rngs()),
    "LoRALinear": lambda: nnx.LoRALinear(2, 3, lora_rank=1, rngs=rngs()),
    "PReLU": lambda: nnx.PReLU(),
    "Sequential": lambda: nnx.Sequential(nnx.Linear(2, 3, rngs=rngs()), len),
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


def leaves(value):
    """Path, kind, metadata and value of each leaf."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        value, is_leaf=lambda x: isinstance(x, nnx.Variable)
    ):
        raw, metadata = leaf, None
        if isinstance(leaf, nnx.Variable):
            raw, metadata = leaf.get_raw_value(), sorted(leaf.get_metadata().items())
        if jnp.issubdtype(getattr(raw, "dtype", int), jax.dtypes.prng_key):
            raw = jax.random.key_data(raw)
        kind = type(leaf).__name__, str(getattr(raw, "dtype", None)), getattr(raw, "shape", ())
        data = np.asarray(raw).tobytes() if isinstance(raw, (jax.Array, np.ndarray)) else str(raw)
        found.append((jax.tree_util.keystr(path), kind, str(metadata), data))
    return found


def graph(value):
    """The shape of an object graph: class, names and the number of each node that is shared."""
    numbers, found = {}, []

    def visit(node):
        if isinstance(node, (nnx.Pytree, nnx.Variable)):
            found.append((type(node).__name__, numbers.setdefault(id(node), len(numbers))))
            if len(numbers) - 1 != found[-1][1] or isinstance(node, nnx.Variable):
                return
            children = {k: v for k, v in vars(node).items() if not str(k).startswith("_")}
            for name, child in sorted(children.items(), key=lambda item: str(item[0])):
                found.append(str(name))
                visit(child)
        elif isinstance(node, (list, tuple)):
            found.append(type(node).__name__)
            for child in node:
                visit(child)
        elif isinstance(node, dict):
            for key in sorted(node, key=str):
                found.append(str(key))
                visit(node[key])
        elif node is None or isinstance(node, (int, str, float)):
            found.append(repr(node))

    visit(value)
    return found


def forms(make):
    """What is written of an object."""
    made = make()
    graphdef, state = nnx.split(made)
    return {
        "object": made,
        "graphdef": graphdef,
        "split": (graphdef, state),
        "state": state,
        "flat": nnx.to_flat_state(state),
    }


def facts(form, value, make):
    """What is to be the same, of any of these."""
    if form == "object":
        return [leaves(nnx.state(value)), graph(value)]
    if form == "graphdef":
        made = nnx.merge(value, nnx.state(make()))
        return [leaves(nnx.state(made)), graph(made)]
    if form == "split":
        made = nnx.merge(*value)
        return [leaves(nnx.state(made)), graph(made)]
    if form == "state":
        return [leaves(value), type(value).__name__]
    return [[list(map(str, p)) for p, _ in value], leaves([v for _, v in value])]


CHECKPOINTS = ["Linear", "BatchNorm", "Dropout", "MultiHeadAttention"]
CHECKPOINTS += ["Sequential", "split Rngs", "metrics", "chain", "inject", "ModelAndOptimizer"]


def write(folder):
    pickles = {}
    for name, make in OBJECTS.items():
        for form, value in forms(make).items():
            data = cloudpickle.dumps(value)
            pickles[name, form] = data, facts(form, value, make)
    for name, make in VALUES.items():
        pickles[name, "value"] = cloudpickle.dumps(make()), leaves(make())
    (folder / "pickles").write_bytes(pickle.dumps(pickles))
    states = {name: nnx.state(OBJECTS[name]()) for name in CHECKPOINTS}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "states", states)
        checkpointer.save(folder / "pure", jax.tree.map(nnx.to_pure_dict, states, is_leaf=is_state))
        checkpointer.wait_until_finished()
    ocp.PyTreeCheckpointer().save(folder / "tree", states)
    with ocp.CheckpointManager(folder / "steps") as manager:
        items = {
            "model": ocp.args.StandardSave(states["chain"]),
            "note": ocp.args.JsonSave({"a": 1}),
        }
        items["tree"] = ocp.args.PyTreeSave(states["BatchNorm"])
        manager.save(3, args=ocp.args.Composite(**items))
    (folder / "msgpack").write_bytes(ser.to_bytes(nnx.to_pure_dict(states["chain"])))


def is_state(x):
    return isinstance(x, nnx.State)


def read(folder, pickles=True):
    written = pickle.loads((folder / "pickles").read_bytes()) if pickles else {}
    for (name, form), (data, expected) in written.items():
        try:
            value = pickle.loads(data)
            if name in ("filters", "prefixes", "metadata"):
                assert value == VALUES[name]()
                found = expected
            elif form == "value":
                found = leaves(value)
            else:
                found = facts(form, value, OBJECTS[name])
        except Exception as error:
            raise RuntimeError(f"{name}: {form} cannot be read") from error
        if name not in CHANGED:
            assert found == expected, (name, form, found, expected)
        if form == "object":
            use(name, value)

    states = {name: nnx.state(OBJECTS[name]()) for name in CHECKPOINTS}
    expected = leaves(states)
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, states)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract
    )
    zeros = jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x * 0, states
    )
    with ocp.StandardCheckpointer() as checkpointer:
        for like in (abstract, placed, zeros):
            assert leaves(checkpointer.restore(folder / "states", like)) == expected
        pure = checkpointer.restore(folder / "pure")
        for name, state in states.items():
            nnx.replace_by_pure_dict(state, nnx.restore_int_paths(pure[name]))
        assert leaves(states) == expected
    tree = ocp.PyTreeCheckpointer()
    args = ocp.checkpoint_utils.construct_restore_args(placed)
    assert leaves(tree.restore(folder / "tree", item=zeros)) == expected
    assert leaves(tree.restore(folder / "tree", item=placed, restore_args=args)) == expected
    with ocp.CheckpointManager(folder / "steps") as manager:
        items = {
            "model": ocp.args.StandardRestore(abstract["chain"]),
            "note": ocp.args.JsonRestore(),
        }
        items["tree"] = ocp.args.PyTreeRestore(zeros["BatchNorm"])
        restored = manager.restore(3, args=ocp.args.Composite(**items))
        assert leaves(restored.model) == leaves(states["chain"]) and restored.note == {"a": 1}
        assert leaves(restored.tree) == leaves(states["BatchNorm"])
    like = nnx.to_pure_dict(zeros["chain"])
    again = ser.from_bytes(like, (folder / "msgpack").read_bytes())
    assert leaves(jax.tree.map(jnp.asarray, again)) == leaves(nnx.to_pure_dict(states["chain"]))


def read_checkpoints(folder):
    read(folder, pickles=False)


def use(name, value):
    """An object that was read computes what a new one does, and takes part in transforms."""
    fresh = OBJECTS[name]()
    if name in ("Linear", "WeightNorm", "SpectralNorm", "LoRA", "BatchNorm"):
        x = jnp.ones((3, 2))
        assert (nnx.jit(lambda m, x: m(x))(value, x) == nnx.jit(lambda m, x: m(x))(fresh, x)).all()
    if name == "chain":
        model = nnx.Linear(2, 3, rngs=rngs())
        for optimizer in (value, fresh):
            optimizer.update(model, nnx.grad(lambda m: m(jnp.ones((1, 2))).sum())(model))
        assert leaves(nnx.state(value))[0] == leaves(nnx.state(fresh))[0] and value.step == 1
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

    for mode in sys.argv[2:]:
        getattr(flax_files, mode)(Path(sys.argv[1]))
