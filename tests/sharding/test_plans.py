"""What plans mean for the layers of the library, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.sharding.meshes import Decoder, tied

MESH = AbstractMesh((4, 2), ("data", "model"))
ABSTRACT = nnx.eval_shape(lambda: Decoder(nnx.Rngs(0), blocks=2))


def made(layer, *args, **kwargs):
    return nnx.eval_shape(lambda: layer(*args, rngs=nnx.Rngs(0), **kwargs))


def specs(tree, plan, mesh=MESH):
    return {entry.name: tuple(entry.spec) for entry in nnx.plan_layout(tree, mesh, plan)}


def whys(tree, plan, mesh=MESH):
    return {entry.name: entry.why for entry in nnx.plan_layout(tree, mesh, plan)}


TENSOR = [
    ((nnx.Linear, 8, 32), {"kernel": (None, "model"), "bias": ("model",)}),
    ((nnx.Linear, 32, 8), {"kernel": ("model", None), "bias": (None,)}),
    ((nnx.Linear, 8, 8), {"kernel": (None, "model"), "bias": ("model",)}),
    ((nnx.Linear, 8, 33), {"kernel": ("model", None), "bias": (None,)}),
    ((nnx.LinearGeneral, 4, (6, 8)), {"kernel": (None, "model", None), "bias": ("model", None)}),
    ((nnx.Embed, 6, 4), {"embedding": ("model", None)}),
    ((nnx.Embed, 5, 4), {"embedding": (None, "model")}),
    ((nnx.Conv, 4, 8, 3), {"kernel": (None, None, "model"), "bias": ("model",)}),
]


@pytest.mark.parametrize("layer, expected", TENSOR, ids=str)
def test_tensor_parallel_layers(layer, expected):
    assert specs(made(*layer), "tensor") == expected
    if layer[0] is nnx.Conv:  # also where it is depthwise
        assert specs(made(*layer, feature_group_count=4), "tensor") == expected


def test_attention_is_divided_by_heads_and_a_block_by_columns_and_rows():
    found = specs(ABSTRACT, "tensor")
    expected = {
        "blocks.0.attention.query.kernel": (None, "model", None),
        "blocks.0.attention.query.bias": ("model", None),
        "blocks.0.attention.out.kernel": ("model", None, None),
        "blocks.0.attention.out.bias": (None,),
        "blocks.0.up.kernel": (None, "model"),
        "blocks.0.down.kernel": ("model", None),
        "embed.embedding": ("model", None),
    }
    assert expected.items() <= found.items()


def test_square_layers_are_divided_by_columns_whatever_they_are_called():
    square = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    model = nnx.eval_shape(lambda: nnx.Dict(fc1=square(), proj=square(), wo=nnx.List([square()])))
    found = specs(model, "tensor")
    assert {found[f"{name}.kernel"] for name in ("fc1", "proj", "wo.0")} == {(None, "model")}
    why = "tensor: columns (square: a rule can divide rows)"
    assert whys(model, "tensor")["proj.kernel"] == why
    assert why in str(nnx.plan_layout(model, MESH, "tensor"))
    rules = {"proj.kernel": ("model", None), "proj.bias": None}
    found = specs(model, nnx.Plan(tensor="model", rules=rules))
    assert found["proj.kernel"] == ("model", None) and found["proj.bias"] == (None,)


ROWS_FIRST = {"sharding": ("model", "data")}
BY_COLUMNS, BY_ROWS = (("data", None), ("data", "model")), (("model", "data"), (None, "data"))
ADAPTED = [
    # a layer, the path of a kernel, where the matrices of its adapter lie
    ((nnx.Linear, 8, 32), "kernel", BY_COLUMNS),
    ((nnx.Linear, 32, 8), "kernel", BY_ROWS),
    ((functools.partial(nnx.LinearGeneral, axis=(-2, -1)), (2, 4), (6, 8)), "kernel", BY_COLUMNS),
    ((nnx.Conv, 4, 8, (3, 3)), "kernel", BY_COLUMNS),
    ((nnx.Embed, 64, 32), "embedding", BY_ROWS),
    ((functools.partial(nnx.MultiHeadAttention, decode=False), 4, 32), "query.kernel", BY_COLUMNS),
    ((functools.partial(nnx.MultiHeadAttention, decode=False), 4, 32), "out.kernel", BY_ROWS),
    ((functools.partial(nnx.Linear, kernel_metadata=ROWS_FIRST), 8, 32), "kernel", BY_ROWS),
]


@pytest.mark.parametrize("layer, kernel, expected", ADAPTED, ids=range(len(ADAPTED)))
def test_adapters_lie_where_their_kernels_lie(layer, kernel, expected):
    def adapted(model):
        nnx.lora.inject(model, ..., rank=4, rngs=nnx.Rngs(1))
        return model

    plan = nnx.Plan(fsdp="data", tensor="model", min_size=16)
    found, model = specs(nnx.eval_shape(adapted, made(*layer)), plan), made(*layer)
    assert (found[f"{kernel}.lora_a"], found[f"{kernel}.lora_b"]) == expected
    bases = {n.removesuffix(".base"): spec for n, spec in found.items() if "lora_" not in n}
    assert bases == specs(model, plan)
    if kernel == "kernel":
        stack = nnx.vmap(lambda rngs: adapted(layer[0](*layer[1:], rngs=rngs)))
        found = specs(nnx.eval_shape(lambda: stack(nnx.Rngs(0).fork(split=3))), plan)
        stacked = found[f"{kernel}.lora_a"], found[f"{kernel}.lora_b"]
        assert stacked == tuple((None, *spec) for spec in expected)


def test_rules_for_kernels_are_rules_for_the_bases_of_adapters():
    def adapted():
        model = nnx.Dict(
            up=nnx.Linear(8, 32, rngs=nnx.Rngs(0)),
            own=nnx.LoRALinear(8, 32, lora_rank=4, rngs=nnx.Rngs(0)),
        )
        nnx.lora.inject(model, nnx.PathContains("up"), rank=4, rngs=nnx.Rngs(1))
        return model

    model = nnx.eval_shape(adapted)
    for rule, kernel, a, b in (
        (("model", None), ("model", None), ("model", None), (None, None)),
        ((None, "model"), (None, "model"), (None, None), (None, "model")),
        (("data", "model"), ("data", "model"), ("data", None), (None, "model")),
    ):
        for tree, prefix in ((model, ""), ((model,), "0.")):
            found = specs(tree, nnx.Plan(tensor="model", rules={"*.kernel": rule}))
            assert found[f"{prefix}up.kernel.base"] == found[f"{prefix}own.kernel"] == kernel
            assert found[f"{prefix}up.kernel.lora_a"] == found[f"{prefix}own.lora.lora_a"] == a
            assert found[f"{prefix}up.kernel.lora_b"] == found[f"{prefix}own.lora.lora_b"] == b
    own = {"*.kernel": ("model", None), "**.lora_a": (None, "data")}
    assert specs(model, nnx.Plan(tensor="model", rules=own))["up.kernel.lora_a"] == (None, "data")


RAW = optax.chain(optax.clip(1.0), optax.adamw(1e-3))


@pytest.mark.parametrize(
    "build",
    [
        lambda model: nnx.Optimizer(model, RAW, wrt=nnx.Param),
        lambda model: nnx.Dict(anything=nnx.Optimizer(model, RAW, wrt=nnx.Param)),
        lambda model: RAW.init(nnx.state(model, nnx.Param)),
        lambda model: {"anything": RAW.init(nnx.to_pure_dict(nnx.state(model, nnx.Param)))},
        lambda model: nnx.TrainState.create(None, params=nnx.state(model, nnx.Param), tx=RAW),
        lambda model: nnx.EMA(model, decay=0.9),
        lambda model: nnx.state(model, nnx.Param),
    ],
    ids=["optimizer", "in an object", "states", "dicts", "train state", "averages", "gradients"],
)
def test_what_belongs_to_parameters_is_divided_like_them_whatever_it_is_called(build):
    def both():
        model = nnx.Dict(up=nnx.Linear(32, 64, rngs=nnx.Rngs(0)), w=nnx.Param(jnp.ones((32, 64))))
        return model, nnx.clone(build(model)), nnx.clone(build(model))

    plan = nnx.Plan(tensor="model", fsdp="data", rules={"0.w": ("model", "data")})
    layout = nnx.plan_layout(nnx.eval_shape(both), MESH, plan)
    parameters = {e.path[1:]: e for e in layout if e.path[0] == 0}
    others = [e for e in layout if e.path[0] != 0 and e.shape]
    assert len(others) >= 6
    for entry in others:
        parameter = next(p for path, p in parameters.items() if entry.path[-len(path) :] == path)
        assert (entry.spec, entry.why) == (parameter.spec, "like its parameter")


def test_fsdp_divides_the_largest_axis_that_can_be():
    shapes = {"wide": (64, 128), "high": (128, 64), "odd": (128, 33), "odder": (33, 35)}
    model = nnx.Dict({name: nnx.Param(jnp.zeros(shape)) for name, shape in shapes.items()})
    model.small = nnx.Param(jnp.zeros((4, 4)))
    assert specs(model, "fsdp") == {
        "wide": (None, "data"),
        "high": ("data", None),
        "odd": ("data", None),
        "odder": (None, None),
        "small": (None, None),
    }
    reasons = whys(model, "fsdp")
    assert reasons["odder"] == "4 divides no free axis of (33, 35)"
    assert reasons["small"] == "16 elements, min_size is 1,024"
    assert specs(model, nnx.Plan(fsdp="data", min_size=1))["small"] == ("data", None)
    assert specs(model, nnx.Plan(fsdp=("data", "model")))["high"] == (("data", "model"), None)


def test_parts_are_combined_and_axes_have_their_usual_names_or_are_the_only_one():
    layer = made(nnx.Linear, 64, 128)
    for plan in ("fsdp+tensor", "fsdp, tensor", ["fsdp", "tensor"]):
        assert specs(layer, plan) == {"kernel": ("data", "model"), "bias": ("model",)}
    three = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"))
    layout = nnx.plan_layout(layer, three, "data+fsdp+tensor")
    assert layout.plan == nnx.Plan("data", "fsdp", "tensor")
    assert layout.batch.spec == P(("data", "fsdp"))
    one = nnx.plan_layout(layer, AbstractMesh((2,), ("x",)), "fsdp")
    assert one.plan.fsdp == "x" and one.batch.spec == P("x")
    assert nnx.plan_layout(layer, MESH, nnx.Plan(tensor="model")).batch.spec == P()


def test_rules_decide_first_and_alone():
    rules = {
        "blocks.0.up.kernel": None,
        "blocks.*.up.kernel": (("data", "model"), None),
        "**.down.*": None,
        "head.kernel": P("model"),
    }
    expected = {
        "blocks.0.up.kernel": (None, None),
        "blocks.1.up.kernel": (("data", "model"), None),
        "blocks.1.down.kernel": (None, None),
        "head.kernel": ("model", None),
        "embed.embedding": (("model", "data"), None),
    }
    found = specs(ABSTRACT, nnx.Plan(fsdp="data", tensor="model", rules=rules))
    assert expected.items() <= found.items()


def test_rules_for_any_path_of_what_is_shared():
    found = specs(nnx.eval_shape(tied), {"b.inner.kernel": ("model", None)})
    assert found["a.kernel"] == ("model", None)


def test_meshes():
    mesh = nnx.make_mesh(data=-1, model=2)
    assert mesh.shape == {"data": 4, "model": 2}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert [*nnx.make_mesh(data=2, devices=[jax.devices()[:2]]).devices] == jax.devices()[:2]


def test_a_layout_says_what_lies_where(monkeypatch):
    layout = nnx.plan_layout(ABSTRACT, MESH, "fsdp+tensor")
    text = str(layout)
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    assert str(layout) == text  # in a notebook too
    assert text.startswith(
        "Layout on 8 abstract devices (data=4, model=2); plan: fsdp=data, tensor=model"
    )
    row = next(line for line in text.splitlines() if "blocks.*.up.kernel" in line)
    assert row.split() == (
        "blocks.*.up.kernel 2 x (32, 128) float32 (data, model) 4.1 KB tensor: columns + fsdp".split()
    )
    whole = sum(entry.bytes for entry in layout.replicated)
    assert layout.bytes == sum(entry.bytes for entry in layout)
    parts = [entry.bytes_per_device for entry in layout]
    assert layout.bytes_per_device == sum(parts) < layout.bytes / 7
    assert text.splitlines()[-1] == (
        f"{layout.bytes_per_device / 1000:.1f} KB on each device, of {layout.bytes / 1000:.1f} KB; "
        f"{whole / 1000:.1f} KB in {len(layout.replicated)} arrays on every device"
    )


def test_a_long_layout_lists_its_largest_arrays():
    model = nnx.Dict({f"w{i}": nnx.Param(np.zeros(i + 1)) for i in range(70)})
    layout = nnx.plan_layout(model, MESH, "data")
    assert layout.bytes == 4 * sum(range(71))  # on a device they are float32
    text = str(layout)
    assert "w69" in text and "w3 " not in text and "... and 10 rows of smaller arrays" in text


def test_batches_are_put_on_the_mesh():
    layout = nnx.plan_layout(nnx.Param(jnp.ones(2)), nnx.make_mesh(data=4, model=2), "data")
    batch = layout.put({"x": np.arange(8.0).reshape(8, 1), "scale": 2.0})
    assert batch["x"].sharding == layout.batch
    assert batch["x"].addressable_shards[0].data.shape == (2, 1)
    assert batch["scale"].sharding.is_fully_replicated
