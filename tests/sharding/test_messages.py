"""What is refused: plans, rules, annotations, stacks and shardings, each with its message."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.messages import refused, rows
from tests.sharding.meshes import Decoder, linear, mesh_of, tied  # noqa: F401  # in lines

MESH = AbstractMesh((4, 2), ("data", "model"))
ABSTRACT = nnx.eval_shape(lambda: Decoder(nnx.Rngs(0), blocks=2))


def planned(plan, tree=ABSTRACT, mesh=MESH):
    return nnx.plan_layout(tree, mesh, plan)


def made(*args):
    return nnx.eval_shape(lambda: nnx.Linear(*args, rngs=nnx.Rngs(0)))


PLANS = """
planned('fsp')
    ValueError: plan_layout: no plan is called 'fsp'; there are 'data', 'fsdp', 'tensor' and
    combinations such as 'fsdp+tensor'. Was 'fsdp' meant?
planned(3)
    TypeError: plan_layout: a plan is a text such as 'fsdp+tensor', a mapping of path patterns to
    specs, or an nnx.Plan, got 3.
planned(nnx.Plan(fsdp='x'))
    ValueError: plan_layout: the plan uses the mesh axis 'x' for 'fsdp', and the mesh has the axes
    data=4, model=2. Name one of these, or make a mesh with 'x'.
planned(nnx.Plan(fsdp='model', tensor='model'))
    ValueError: the plan uses the mesh axis 'model' for 'tensor' and to divide batches. Give each an
planned(nnx.Plan(fsdp='data', min_size=10**9))
    ValueError: the plan (fsdp=data) divides none of the 33 arrays: blocks.0. ... elements, min_size
    is 1,000,000,000 ... Change sizes or min_size, add rules for the paths, or use the plan 'data'.
planned('fsdp', mesh=AbstractMesh((2, 2), ('a', 'b')))
    ValueError: the plan 'fsdp' uses the mesh axis 'fsdp' or 'data', and the mesh has the axes a=2,
    b=2. Say which one: nnx.Plan(fsdp='a').
planned('fsdp', mesh=8)
    TypeError: plan_layout: the mesh has to be a jax.sharding.Mesh, got 8.
planned('fsdp', nnx.Dict(a=1))
    ValueError: plan_layout: found no arrays in Dict.
"""
RULES = """
planned({'head.kernel': ('modle', None)})
    ValueError: plan_layout: the rule 'head.kernel' for head.kernel divides shape (32, 64) as
    ('modle', None) on the mesh data=4, model=2: ... modle ... Give one entry for each array axis:
    None, or axes of the mesh whose sizes divide it equally. Logical names are mapped to mesh axes
    by nnx.logical_axis_rules.
planned({'head.bias': ('data', 'data')})
    ValueError: divides shape (64,) as ... model=2: 2 entries for 1 axes. Give one entry
planned({'head.kernel': ('data', 'data')})
    ValueError: has duplicate entries for `data`
planned({'kernel': (None, 'data')}, made(6, 10))
    ValueError: plan_layout: the rule 'kernel' for kernel divides shape (6, 10) as ... 10
planned('fsdp', nnx.Dict(w=nnx.Param(jnp.zeros((6, 10)), sharding=('embed', None))))
    ValueError: plan_layout: the annotation of w divides shape (6, 10) as ('embed', None) on the mesh
    data=4, model=2: ... embed ... nnx.logical_axis_rules.
planned({'hed.kernel': None})
    ValueError: plan_layout: the rule 'hed.kernel' matches no array. The nearest paths are
    head.kernel ... `*` stands for text within one segment, `**` for any number of segments.
planned({'zzzz': None})
    ValueError: the rule 'zzzz' matches no array. There are blocks.0
planned({'head.kernel': 5})
    TypeError: plan_layout: the rule 'head.kernel' has to be a PartitionSpec or a tuple of mesh axes,
    such as (None, 'model'), or None for an array that every device has as a whole; got 5.
planned({'a.kernel': ('data', None), 'b.inner.kernel': ('model', None)}, nnx.eval_shape(tied))
    ValueError: plan_layout: a.kernel and b.inner.kernel are one array, and two rules divide it in
    different ways: 'a.kernel' says (data, -), 'b.inner.kernel' says (model, -). Give both the same,
    or take one of the two rules away.
"""
SHARD = """
nnx.jit(lambda m: nnx.shard(m, mesh_of(), 'fsdp') and None)(layer)
    ValueError: shard: an array inside a transform has no placement yet. Call it outside, or build the
    model by nnx.init_sharded.
nnx.jit(lambda: nnx.init_sharded(tied, mesh_of(), 'fsdp'))()
    ValueError: init_sharded: call it outside of transforms, or only build() inside.
nnx.shard(layer, MESH, 'data')
    TypeError: shard: bias is an array, and an abstract mesh has no devices for it. Give a
    jax.sharding.Mesh, or only ask for the layout: nnx.plan_layout.
nnx.init_sharded(tied, MESH, 'fsdp')
    TypeError: init_sharded: the mesh has to be a jax.sharding.Mesh, got AbstractMesh
nnx.shard((layer, (x,)), mesh_of(), {'0.kernel': ('data',), '**': None})
    ValueError: cannot change an array inside a tuple in place; pass the object that holds it
nnx.shard(layer, mesh_of(), {'kernel': ('data',), 'bias': (None, 'model')})
    ValueError: shard: the rule 'bias' for bias divides shape (16,)
nnx.plan_layout(layer, nnx.make_mesh(data=4, model=2), 'data').put({'x': jnp.zeros((6, 1))})
    ValueError: put: batch['x'] has 6 rows, which 4 devices ('data') cannot divide equally. Drop or
    pad the last batch.
nnx.make_mesh()
    ValueError: make_mesh: the axes () do not make a grid of 8 devices (cpu). The product of the sizes
nnx.make_mesh(data=3)
    ValueError: make_mesh: the axes data=3 do not make a grid of 8 devices
nnx.make_mesh(a=-1, b=-1)
    ValueError: do not make a grid of 8 devices
nnx.make_mesh(a=-1, devices=[])
    ValueError: make_mesh: the axes a=-1 do not make a grid of 0 devices
nnx.make_mesh(a=0)
    ValueError: do not make a grid of 8 devices
"""
ANNOTATIONS = """
param(8, 4, sharding=('nope', None))
    ValueError: Sharding annotation ('nope', None) names ['nope'], which the mesh with axes ('data',
    'model') does not have. Use its axes, or map logical names with nnx.logical_axis_rules.
param(8, 4, sharding=('data', None, 'model'))
    ValueError: has 3 axes, the value has shape (8, 4). Give one name (or None) for each array axis.
param(8, 4, sharding='data')
    ValueError: A sharding annotation is one name (or None) for each array axis, got the str 'data'.
    Write ('data',).
param(8, 4, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    ValueError: got the SingleDeviceSharding ... Write a NamedSharding.
param(7, 4, sharding=("data", None))
    IndivisibleError: array axis 0 is partitioned 2 times, but the dimension size is 7
nnx.as_abstract(ABSENT)
    ValueError: names ['nope'], which the mesh
nnx.abstract_with_sharding(SHORT)
    ValueError: 2 axes, the value has shape (3,)
nnx.as_abstract(nnx.Dict(a=stages, b=stages), graph=False)
    ValueError: graph=False
with nnx.logical_axis_rules({'batch': 'data'}): pass
    ValueError: A logical axis rule is a pair (logical name, mesh axis), got 'batch'; for several mesh
    axes write (name, (axis, axis)).
with nnx.logical_axis_rules([('batch', 'data', 'model')]): pass
    ValueError: A logical axis rule is a pair (logical name, mesh axis), got ('batch', 'data', 'model')
with nnx.logical_axis_rules([('batch', 'data')]): spec(sharding_rules=[('batch', 'model')])
    ValueError: Inconsistent rules for the logical axis 'batch': 'data' by logical_axis_rules, 'model'
    by the Variable's sharding_rules. Keep one.
"""
AXES = """
nnx.spmd.add_axis(stages, 0, {'other': 1})
    ValueError: The name of the axis is missing: transform_metadata has no entry 'partition_name' in
    {'other': 1}. Give {nnx.PARTITION_NAME: name}.
nnx.spmd.remove_axis([layers, stages], 0, LAYERS)
    ValueError: names ('stages',): axis 0 is 'stages', not 'layers'
nnx.vmap(lambda m: None, transform_metadata={nnx.PARTITION_NAME: 'stages'})(layers)
    ValueError: axis 0 is 'layers', not 'stages'
over(lambda *args: 1 // 0)(layers)
    ZeroDivisionError: by zero
over(id)(layers, stages)
    ValueError: axis 0 is 'stages', not 'layers'
over(id, in_axes=(0, 0))(layers)
    ValueError: in_axes is not a prefix of the arguments
over(lambda v: (v, v), out_axes=(0,))(layers)
    ValueError: out_axes is not a prefix of the result
over(id, in_axes=(0, None))(layers, layers)
    ValueError: different in_axes for a shared Param
over(lambda v, *, k: v)(layers, k=nnx.Dict(w=stages))
    TypeError: The keyword argument 'k' of ... contains Variables, and in_axes goes by position. Pass
    it as a positional argument.
over(id, graph=False)([layers, layers])
    ValueError: graph=False
"""
STACKS = """
nnx.stack_layers([])
    ValueError: stack_layers needs one layer at least, and got none.
nnx.stack_layers([dropout(0.3), dropout(0.3), dropout(0.5)])
    ValueError: stack_layers: layer 2 differs from layer 0: 'rate': 0.3 became 0.5. Layers of a stack
    are equal but for the values of their arrays.
nnx.stack_layers([wide, nnx.Dict(w=nnx.Param(jnp.ones((4, 3))))])
    ValueError: layer 1 differs from layer 0: 'w' is float32[4, 3], and float32[4, 2] there. Layers of
    a stack are equal but for the values of their arrays.
nnx.stack_layers([wide, nnx.Dict(w=wide.w)])
    ValueError: stack_layers: layers 0 and 1 share a Param, at 'w' and 'w'. In a stack each layer has
    its own entry. Give each layer a copy (nnx.clone; for random streams rngs.fork()), or pass what
nnx.stack_layers([on('model'), on(None, 'model')])
    ValueError: stack_layers: 'kernel' is sharded differently in layer 0 (NamedSharding ... and layer 1
    (NamedSharding ... Give all layers the same sharding, as nnx.shard(model, mesh, plan) does.
nnx.stack_layers([on('model') for _ in range(3)], partition='data')
    ValueError: stack_layers: 3 layers cannot be spread evenly over the 2 devices along the mesh axis
    'data'. Take a multiple of them, or another name for partition.
nnx.stack_layers([holding({'a': x}), holding({'a': x, 'b': x})])
    ValueError: layer 1 differs from layer 0: 'v.b' is float32[16, 8], and absent there. Layers
nnx.stack_layers([holding([x]), holding((x,))])
    ValueError: layer 1 differs from layer 0: its values are PyTreeDef([(*,)]), and PyTreeDef([[*]])
nnx.unstack_layers(nnx.Dict(n=nnx.Variable(jnp.array(1))))
    ValueError: unstack_layers: Dict is not a stack of layers: 'n' is a scalar. Make one with
    nnx.stack_layers(layers).
nnx.unstack_layers(nnx.Dict())
    ValueError: Dict is not a stack of layers: it has no arrays.
nnx.unstack_layers(nnx.Dict(a=nnx.Param(jnp.ones(2)), n=nnx.Variable(jnp.array(1))))
    ValueError: 'a' has 2 entries along its leading axis, 'n' has no leading axis. Make
nnx.remat_layers(lambda m: m, {'layer.*': None})(nnx.MLP(2, 2, width=2, depth=1, rngs=nnx.Rngs(0)))
    ValueError: remat_layers: the pattern 'layer.*' matches no module among the arguments of <lambda>;
    there are layers.
"""
JIT = """
nnx.jit(lambda m: m, in_shardings=whole, out_shardings=rows)(layer)
    ValueError: different out_shardings for a shared Param ... 'm.kernel'
call(nnx.StateSharding({nnx.PathContains('kernel'): whole}), layer)
    ValueError: No sharding found for Param at 'bias' ... PathContains
call((whole, whole, whole), layer, x)
    ValueError: in_shardings is not a prefix of the arguments
call(whole, layer, out_shardings=(whole, whole))
    ValueError: out_shardings is not a prefix of the result
call((whole, columns), layer, layer)
    ValueError: different sharding for a shared Param: at 'args[0].kernel' ... at 'args[1].kernel'
call(whole.update(spec=P(None, 'model')), layer)
    ValueError: key path args[0].bias is incompatible with its sharding
call(columns, on("data"))
    ValueError: does not match the sharding on the respective arg
nnx.jit(lambda m: setattr(m, 'w', 1) or 1 // 0, in_shardings=whole)(layer)
    ZeroDivisionError: by zero
"""


def param(*shape, **metadata):
    return nnx.Param(jnp.zeros(shape), **metadata)


def on(*names):
    """A Linear whose kernel is on the mesh."""
    layer = linear()
    layer.kernel.value = jax.device_put(layer.kernel.value, NamedSharding(mesh_of(), P(*names)))
    return layer


@functools.cache
def scope():
    """What the lines use; a refused call changes none of it."""
    whole = NamedSharding(mesh_of(), P())
    kernel = {nnx.PathContains("kernel"): whole.update(spec=P(None, "model")), ...: whole}
    x = jnp.ones((16, 8))
    values = {
        "layer": linear(),
        "stages": param(3, sharding=("stages",)),
        "layers": param(3, 4, sharding=("layers", "x")),
        "LAYERS": {nnx.PARTITION_NAME: "layers"},
        "wide": nnx.Dict(w=param(4, 2)),
        "whole": whole,
        "rows": whole.update(spec=P("data")),
        "columns": nnx.StateSharding(kernel),
        "x": x,
        "ABSENT": jax.eval_shape(lambda: nnx.state(linear("data", "nope"))),
        "SHORT": nnx.Param(jax.ShapeDtypeStruct((3,), "float32"), sharding=(None, "model")),
        "spec": lambda **rules: nnx.get_partition_spec(param(2, sharding=("batch",), **rules)),
        "over": lambda f, **axes: nnx.transform_metadata(f, partition="layers", **axes),
        "holding": lambda tree: nnx.Dict(v=nnx.Variable(tree)),
        "dropout": lambda rate: nnx.Dropout(rate, rngs=nnx.Rngs(0)),
        "call": lambda places, *args, **options: nnx.jit(
            lambda *args: args[0](x), in_shardings=places, **options
        )(*args),
    }
    return {**globals(), **values}


@rows(PLANS + RULES + SHARD + AXES + STACKS + JIT)
def test_refused(line, message):
    refused(line, message, scope())


@rows(ANNOTATIONS)
def test_refused_on_a_mesh(line, message):
    given = scope()
    with jax.set_mesh(mesh_of()):
        refused(line, message, given)


@pytest.mark.parametrize("names", [("nowhere",), ("a", "b", "c"), "a"], ids=str)
def test_without_a_mesh_an_annotation_is_metadata_and_nothing_is_refused(names):
    before = param(8, 4).value.sharding
    variable = param(8, 4, sharding=names)
    assert variable.sharding_names == names and variable.value.sharding == before
    copy = nnx.clone(nnx.jit(lambda m: m)(nnx.Dict(v=variable)))
    assert copy.v.sharding_names == names
