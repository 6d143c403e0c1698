"""What type checkers infer of Variables, modules, containers, random streams, graphs and states."""

from __future__ import annotations

import typing as tp
from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import nnxlite as nnx

State: tp.TypeAlias = nnx.State[tp.Any, tp.Any]
Path: tp.TypeAlias = tuple[tp.Any, ...]

x = jnp.ones((1, 2))
model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

assert_type(nnx.__version__, str)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow(nnx.Intermediate, "mean", x.mean())
        return self.linear(x)


block = Block(nnx.Rngs(0))

# Containers

blocks = nnx.List([block, Block(nnx.Rngs(1))])
assert_type(blocks, nnx.List[Block])
assert_type(blocks[0], Block)
assert_type(blocks[:1], list[Block])
assert_type(blocks.pop(), Block)
blocks.append(block)
blocks[0] = block
for item in blocks:
    assert_type(item(x), jax.Array)
heads = nnx.Dict(left=block)
assert_type(heads, nnx.Dict[Block])
assert_type(heads["left"], Block)
assert_type(nnx.Dict({"left": block}), nnx.Dict[Block])
assert_type(heads.left, tp.Any)
heads.right = block
for name, head in heads.items():
    assert_type(name, str)
    assert_type(head, Block)

# Attributes


class Scaled(nnx.Pytree):
    def __init__(self) -> None:
        self.factor = nnx.data(3.0)
        self.name = nnx.static("scaled")


assert_type(Scaled().factor, float)
assert_type(Scaled().name, str)


@nnx.dataclass
class Point(nnx.Pytree):
    x: nnx.Data[float]
    name: nnx.Static[str]
    weight: float = nnx.data(default=1.0)


assert_type(Point(1.0, name="p").x, float)
assert_type(Point(1.0, "p", weight=2.0).weight, float)


class Frozen(nnx.Module, frozen=True):
    factor: jax.Array = nnx.field(converter=jnp.asarray)


assert_type(Frozen(2.0).factor, jax.Array)


class Plain(nnx.Object):
    pass


assert isinstance(Plain(), nnx.Pytree)

# Methods of modules

assert_type(block.train(), None)
assert_type(block.eval(), None)
assert_type(block.sow(nnx.Intermediate, "seen", x), bool)
assert_type(block.perturb("x", x), jax.Array)
for _, module in block.iter_modules():
    assert_type(module, nnx.Module)
assert_type(nnx.capture(block, nnx.Intermediate)(x), tuple[jax.Array, State])
assert_type(nnx.capture(block)(x), jax.Array)

# Random streams

rngs = nnx.Rngs(0, dropout=1)
assert_type(rngs(), jax.Array)
assert_type(rngs.params(), jax.Array)
assert_type(rngs.params, nnx.RngStream)
assert_type(rngs["dropout"], nnx.RngStream)
assert_type(rngs.dropout.key, nnx.RngKey[jax.Array])
assert_type(rngs.normal((2, 3)), jax.Array)
assert_type(rngs.lecun_normal()((2, 3)), jax.Array)
assert_type(rngs.split(3), nnx.Rngs)
assert_type(rngs.fork(), nnx.Rngs)
assert_type(nnx.with_rngs(block, split=2), Block)
with nnx.split_rngs(rngs, splits=2) as backups:
    assert_type(list(backups)[0][0], nnx.RngStream)
nnx.restore_rngs(nnx.fork_rngs(rngs))
nnx.reseed(rngs, dropout=3)


@nnx.split_rngs(splits=2)
def draw(rngs: nnx.Rngs, factor: float) -> int:
    return len(rngs.params.key.shape)


assert_type(draw(rngs, 2.0), int)


@nnx.fork_rngs
def drawn(rngs: nnx.Rngs) -> jax.Array:
    return rngs.params()


assert_type(drawn(rngs), jax.Array)

# Text

assert_type(nnx.tabulate(block, x), str)
assert_type(nnx.display(), None)
differences = nnx.diff(block, Block(nnx.Rngs(1)))
assert_type(differences, nnx.Diff)
assert_type(differences.entries, tuple[nnx.Difference, ...])
assert_type(nnx.draw(block), nnx.Drawing)
assert_type(nnx.draw(block).text, str)
assert nnx.find_nan(block, x) is None
findings = nnx.check(block, None, x)
assert_type(findings, nnx.Findings)
assert_type(findings.entries, tuple[nnx.Finding, ...])
assert_type(findings.entries[0].text, str)
usage = nnx.memory(block)
assert_type(usage, nnx.Memory)
assert_type(usage.by_kind, dict[str, int])
assert_type(usage.step, nnx.StepMemory | None)

# state, split, merge

assert_type(nnx.state(model), State)
assert_type(nnx.state(model, nnx.Param), State)
assert_type(nnx.state(model, nnx.Param, ...), tuple[State, State])
assert_type(nnx.state(model, nnx.Param, nnx.BatchStat, ...), tuple[State, State, State])
assert_type(nnx.variables(model), State)
assert_type(nnx.variables(model, nnx.Param, ...), tuple[State, State])
assert_type(nnx.graphdef(model), nnx.GraphDef[nnx.Linear])
assert_type(nnx.split(model), tuple[nnx.GraphDef[nnx.Linear], State])
graphdef, params, rest = nnx.split(model, nnx.Param, ...)
assert_type(graphdef, nnx.GraphDef[nnx.Linear])
assert_type(params, State)
assert_type(nnx.merge(graphdef, params, rest), nnx.Linear)
assert_type(graphdef.merge(params, rest), nnx.Linear)
assert_type(nnx.unpack(model), nnx.GraphState[nnx.Linear])
assert_type(nnx.merge(nnx.unpack(model)), nnx.Linear)
assert_type(nnx.flatten(model), tuple[nnx.GraphDef[nnx.Linear], nnx.FlatState[tp.Any]])
assert_type(nnx.unflatten(*nnx.flatten(model)), nnx.Linear)
assert_type(nnx.clone(model), nnx.Linear)
nnx.update(model, params)
parts: nnx.PureState[nnx.Linear] = nnx.split(model)
y, parts = nnx.call(parts)(x)
assert_type(y, tp.Any)
assert_type(parts, tuple[nnx.GraphDef[nnx.Linear], State])
y, (graphdef, state) = graphdef.apply(params, rest)(x)
assert_type(state, State)


class Recorder(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow(nnx.Intermediate, "seen", x)
        return x


recorder = Recorder()
assert_type(recorder(x), jax.Array)
assert_type(nnx.pop(recorder, nnx.Intermediate), State)
assert_type(nnx.pop(recorder, nnx.Intermediate, nnx.Cache), tuple[State, State])

# Walks

for path, _ in nnx.iter_graph(model):
    assert_type(path, Path)
for _, module in nnx.iter_modules(model):
    assert_type(module, nnx.Module)
for _, child in nnx.iter_children(model):
    assert_type(child, tp.Any)
for _, part in nnx.iter_module_children(model):
    assert_type(part, nnx.Pytree)
assert_type(nnx.map(lambda path, leaf: leaf, model), nnx.Linear)
assert_type(nnx.recursive_map(lambda path, node: node, model), nnx.Linear)
assert_type(nnx.find_duplicates(model), list[list[Path]])
assert_type(nnx.has_data(model), bool)
assert_type(nnx.is_data(x), bool)
nnx.set_metadata(model, tag="a")
nnx.check_pytree(model)


@nnx.register_data_type
class Opaque:
    pass


# Copies with something changed

assert_type(nnx.view(model), nnx.Linear)
assert_type(nnx.view_info(model), str)
assert_type(nnx.with_attributes(model, use_bias=True), nnx.Linear)
assert_type(nnx.to_arrays(nnx.to_refs(model)), nnx.Linear)
assert_type(nnx.with_vars(model, ref=True), nnx.Linear)
assert_type(nnx.vars_as(model, ref=False), nnx.Linear)
assert_type(nnx.pure(params), State)
assert_type(nnx.pure(model.kernel), jax.Array)
assert_type(nnx.as_pure(params), State)
assert_type(nnx.as_abstract(model), nnx.Linear)
assert_type(nnx.abstract_with_sharding(params), State)

# States

assert_type(nnx.split_state(params, nnx.Param), State)
assert_type(nnx.filter_state(params, nnx.Param), State)
assert_type(nnx.merge_state(params, rest), State)
assert_type(nnx.map_state(lambda path, leaf: leaf, params), State)
assert_type(nnx.to_flat_state(params), nnx.FlatState[tp.Any])
assert_type(nnx.from_flat_state(nnx.to_flat_state(params)), State)
assert_type(nnx.to_pure_dict(params), dict[tp.Any, tp.Any])
assert_type(nnx.restore_int_paths({"0": 1}), dict[tp.Any, tp.Any])
nnx.replace_by_pure_dict(params, nnx.to_pure_dict(params))
assert_type(params.flat_state(), nnx.FlatState[tp.Any])
assert_type(params.flat_state().paths, tuple[Path, ...])
assert_type(params["kernel"], tp.Any)
counts: nnx.State[str, int] = nnx.State({"a": 1})
assert_type(list(counts), list[str])

# Filters

place = ("kernel",), model.kernel
assert_type(nnx.All(nnx.Param, nnx.Not(nnx.WithTag("a")))(*place), bool)
assert_type(nnx.Any(nnx.OfType(nnx.Param), nnx.PathContains("bias"))(*place), bool)
assert_type(nnx.Everything()(*place), bool)
assert_type(nnx.Nothing()(*place), bool)

# Sharding annotations, settings, contexts

mesh = jax.make_mesh((1,), ("model",))
assert_type(nnx.get_partition_spec(params), State)
assert_type(nnx.get_partition_spec(x), PartitionSpec)
assert_type(nnx.get_named_sharding(params, mesh), State)
assert_type(nnx.get_named_sharding(x, mesh), NamedSharding)
assert_type(
    nnx.get_abstract_model(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)), mesh),
    tuple[nnx.GraphDef[nnx.Linear], State],
)
with nnx.logical_axis_rules([("embed", "model")]):
    pass
assert_type(nnx.using_eager_sharding(), bool)
with (
    nnx.use_named_scopes(False),
    nnx.use_eager_sharding(False),
    nnx.set_graph_mode(True),
    nnx.set_graph_updates(True),
):
    pass
with nnx.update_context("step") as context:
    assert_type(context, nnx.UpdateContext)
    assert_type(nnx.current_update_context("step"), nnx.UpdateContext)
    with nnx.split_context("step") as splitter:
        assert_type(splitter, nnx.SplitContext)
        definition, inner = splitter.split(model)
    with nnx.merge_context("step", inner=True) as merger:
        assert_type(merger, nnx.MergeContext)
        merger.merge(definition, inner)
assert issubclass(nnx.TraceContextError, nnx.NnxError)
assert issubclass(nnx.RuntimeCheckError, nnx.NnxError)

# Variables

square = jnp.ones((3, 3))
param, bits = nnx.Param(jnp.ones(3)), nnx.Param(jnp.array(True))
Four: tp.TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

assert_type(param, nnx.Param[jax.Array])
assert_type(nnx.Variable(0), nnx.Variable[int])
assert_type(nnx.BatchStat(square), nnx.BatchStat[jax.Array])
assert_type(nnx.Cache(square), nnx.Cache[jax.Array])
assert_type(nnx.Intermediate((square,)), nnx.Intermediate[tuple[jax.Array]])
assert_type(nnx.Perturbation(square), nnx.Perturbation[jax.Array])
assert_type(nnx.LoRAParam(square), nnx.LoRAParam[jax.Array])
assert_type(nnx.OptState(square), nnx.OptState[jax.Array])
assert_type(nnx.OptArray(square), nnx.OptArray[jax.Array])
assert_type(nnx.OptVariable(square), nnx.OptVariable[jax.Array])
assert_type(nnx.RngKey(jax.random.key(0)), nnx.RngKey[jax.Array])
assert_type(nnx.RngCount(jnp.zeros((), jnp.uint32)), nnx.RngCount[jax.Array])
assert_type(nnx.RngState(square), nnx.RngState[jax.Array])
assert_type(nnx.VariableState(square), nnx.Variable[jax.Array])

# Their values

assert_type((param.value, param.raw_value, param[...], param[0]), Four)
assert_type((param[0:2], param.get_value(), param.get_value(index=0), param.get_raw_value()), Four)
assert_type(nnx.Variable(0).value, int)
assert_type(nnx.Variable(0)[...], int)
assert_type(nnx.Variable({"a": 1})["a"], tp.Any)
assert_type(param.copy(), nnx.Param[jax.Array])
assert_type(param.replace(square), nnx.Param[jax.Array])
assert_type(param.type, type[nnx.Param[jax.Array]])
param.value = jnp.zeros(3)
param[0] = 1.0
param.set_value(jnp.ones(3))

# Their operators

assert_type((param + 1, 1 - param, 2.0 * param, param / param), Four)
assert_type((param // 2, param % 2, param**2, 2**param), Four)
assert_type((square @ param, param @ square, square + param, -param), Four)
assert_type((nnx.Param(jnp.array(3)) << 1, bits & True, ~bits, abs(param)), Four)
assert_type((round(param), *divmod(param, 2), param < 1), Four)
assert_type((param >= param, param == param, param != 0, param.at[0].set(1)), Four)
assert_type(float(param[0]), float)
assert_type(bool(param), bool)
assert_type(len(param), int)
assert_type(np.asarray(param).ndim, int)
same = param
assert {param: 1}[param] == 1
param += 1
assert_type(param, nnx.Param[jax.Array])
assert param is same

# Members of the array

assert_type(param.shape, tuple[int, ...])
assert_type(param.dtype, np.dtype[tp.Any])
assert_type(param.ndim, int)
assert_type(param.size, int)
assert_type((param.T, param.sum(), param.max(), param.reshape(3, 1)), Four)
assert_type(param.mean(axis=0, keepdims=True), jax.Array)
assert_type(param.astype(jnp.float16), jax.Array)
assert_type(param.sharding, jax.sharding.Sharding)

# Their metadata and names

assert_type(param.sharding_names, tp.Any)
assert_type(param.has_metadata("tag"), bool)
assert_type(nnx.Param(square, tag="a").tag, tp.Any)
assert_type(nnx.VariableMetadata(square).raw_value, jax.Array)
zeros = nnx.initializers.zeros_init()
with_tag = nnx.with_metadata(nnx.initializers.lecun_normal(), tag="head")
assert_type(nnx.Param(with_tag(jax.random.key(0), (3, 3))), nnx.Param[jax.Array])
assert_type(nnx.Param(zeros(jax.random.key(0), (3,))), nnx.Param[jax.Array])
sharded = nnx.with_partitioning(nnx.initializers.ones_init(), ("model",))
assert_type(nnx.Param(sharded(jax.random.key(0), (3,))), nnx.Param[jax.Array])
assert_type(nnx.var_defaults(), nnx.VarDefaults)
assert_type(nnx.variable_name_from_type(nnx.Param), str)
assert_type(nnx.variable_type_from_name("params"), type[nnx.Variable[tp.Any]])


@nnx.register_variable_name("momenta of the type tests")
class Momentum(nnx.Variable[jax.Array]):
    pass


assert_type(Momentum(square).value, jax.Array)
assert_type(nnx.is_array_ref(nnx.array_ref(square)), bool)
assert isinstance(nnx.array_ref(square), nnx.ArrayRef)


def without_parameter(variable: nnx.Param) -> None:
    assert_type(variable.value, tp.Any)
    assert_type(variable[...], tp.Any)


without_parameter(param)
