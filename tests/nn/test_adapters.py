"""LoRA, LoRALinear, and `nnx.lora`: adapters put into models, trained, merged and taken out."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx
from tests.nn.catalogue import FAMILIES

IDS = jnp.array([[1, 2, 0]])


class Net(nnx.Module):
    """One of each kind of layer, shared ones and containers."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, rngs=rngs, decode=False)
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.again = self.linear
        self.blocks = nnx.List([nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.relu)])

    def __call__(self, ids):
        x = self.attention(self.embed(ids))
        x = self.blocks[0](self.again(self.linear(x)))
        return self.embed.attend(x)


def names(state):
    return [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]


def values(model):
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]


def loss(model):
    return ((model(IDS) - 1) ** 2).mean()


@nnx.jit
def step(model, optimizer):
    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


forward = nnx.jit(lambda model: model(IDS))
gradients = nnx.jit(nnx.grad(loss))
inject = functools.partial(nnx.lora.inject, rank=2, alpha=8, rngs=nnx.Rngs(1))


ADAPTED = """attention.key attention.out attention.query attention.value again
    blocks.0.layers.0""".split()


def test_the_life_of_an_adapter():
    model = Net(nnx.Rngs(0))
    plain, before = forward(model), values(model)
    structure = nnx.graphdef(model)
    inject(model, ...)
    assert (forward(model) == plain).all()
    expected = {f"{layer}.kernel.lora_{x}" for layer in ADAPTED for x in "ab"}
    expected |= {"embed.embedding.lora_a", "embed.embedding.lora_b"}
    grads = gradients(model)
    assert set(names(grads)) == set(names(nnx.state(model, nnx.LoRAParam))) == expected
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    assert set(names(optimizer.opt_state[0].mu)) == expected
    losses = [float(step(model, optimizer)) for _ in range(5)]
    assert losses[-1] < losses[0] and model.again is model.linear
    adapted = forward(model)
    assert not jnp.allclose(adapted, plain)

    nnx.lora.remove(model)
    assert all((a == b).all() for a, b in zip(values(model), before, strict=True))
    nnx.unfreeze(model)
    assert nnx.graphdef(model) == structure


@pytest.mark.parametrize(
    ("layer", "a", "b"),
    [
        (nnx.Linear(3, 4, rngs=nnx.Rngs(0)), (3, 2), (2, 4)),
        (nnx.LinearGeneral(3, (2, 4), rngs=nnx.Rngs(0)), (3, 2), (2, 8)),
        (nnx.LinearGeneral((2, 4), 3, axis=(-2, -1), rngs=nnx.Rngs(0)), (8, 2), (2, 3)),
        (nnx.Conv(3, 4, (2, 5), rngs=nnx.Rngs(0)), (30, 2), (2, 4)),
        (nnx.Einsum("bi,ihd->bhd", (3, 2, 4), rngs=nnx.Rngs(0)), (6, 2), (2, 4)),
        (nnx.ConvTranspose(3, 4, (2,), rngs=nnx.Rngs(0)), (6, 2), (2, 4)),
    ],
)
def test_the_kernel_is_a_matrix_of_inputs_by_outputs(layer, a, b):
    base = layer.kernel
    inject(layer, type(layer))
    kernel = layer.kernel
    assert kernel.base is base and kernel.lora_a.shape == a and kernel.lora_b.shape == b
    assert kernel.shape == base.shape and (kernel.ndim, kernel.dtype) == (base.ndim, base.dtype)
    kernel.lora_b[...] = jax.random.normal(jax.random.key(0), b)
    delta = (np.asarray(kernel.lora_a[...]) @ kernel.lora_b[...]).reshape(base.shape)
    np.testing.assert_allclose(kernel[...], base[...] + 4 * delta, rtol=1e-5)
    assert (kernel[0] == kernel.value[0]).all() and (kernel + 1 == kernel.value + 1).all()


def test_stacked_layers_have_an_adapter_each():
    make = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)))
    layers = make(jax.random.split(jax.random.key(0), 3))
    inject(layers, nnx.Linear)
    assert layers.kernel.lora_a.shape == (3, 4, 2) and layers.kernel.lora_b.shape == (3, 2, 4)
    assert not (layers.kernel.lora_a[0] == layers.kernel.lora_a[1]).any()
    run = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    assert run(layers, jnp.ones((2, 4))).shape == (2, 4)


def test_layers_of_ones_own():
    class Mine(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.eye(3))

        def __call__(self, x):
            return x @ self.w

    model = nnx.List([Mine(), Mine()])
    model[1].w = model[0].w
    inject(model, Mine, weight="w", alpha=None)
    assert model[0].w is model[1].w and len(nnx.state(model, nnx.LoRAParam)) == 1
    model[0].w.lora_b[...] = jnp.ones((2, 3))
    expected = jnp.eye(3) + model[0].w.lora_a[...] @ jnp.ones((2, 3))
    np.testing.assert_allclose(model[1](jnp.eye(3)), expected, rtol=1e-5)


def test_dropout_is_for_training():
    layer = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
    inject(layer, ..., dropout=0.5)
    layer.kernel.lora_b[...] += 1
    rows = lambda: np.asarray((layer.kernel[...] != layer.kernel.base[...]).any(1))
    assert 0 < sum(not row for _ in range(4) for row in rows()) < 32
    layer.eval()
    assert rows().all()


def test_the_base_may_be_trained_too():
    model = nnx.MLP(4, 2, 8, 1, rngs=nnx.Rngs(0))
    inject(model.layers[0], ..., freeze_base=False)
    assert names(nnx.state(model, nnx.Frozen())) == []
    inject(model.layers[1], ...)
    assert names(nnx.state(model, nnx.Frozen())) == ["layers.1.bias", "layers.1.kernel.base"]


def test_half_precision_keeps_its_dtype():
    layer = nnx.Linear(4, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    inject(layer, ...)
    assert layer.kernel[...].dtype == jnp.bfloat16 and layer.kernel.lora_a.dtype == jnp.float32
    assert layer(jnp.ones((1, 4), jnp.bfloat16)).dtype == jnp.bfloat16


R = nnx.Rngs(0)
KINDS = "Linear LinearGeneral Einsum Conv ConvTranspose MultiHeadAttention".split()
ROWS = {name: row for family in FAMILIES.values() for name, row in family.items() if row.formula}
WITH_KERNELS = [name for name in ROWS if name.split(",")[0] in KINDS and "decoding" not in name]


def with_random_adapters(layer, **options):
    inject(layer, ..., a_initializer=nnx.initializers.zeros, **options)
    for path, leaf in nnx.to_flat_state(nnx.state(layer, nnx.LoRAParam)):
        leaf[...] = jax.random.normal(jax.random.key(len(path)), leaf.shape)
    return layer


@pytest.mark.parametrize("name", WITH_KERNELS[::2])
def test_an_adapter_adds_what_the_merged_kernel_would(name):
    """In each kind of layer, in value and gradient."""
    row = ROWS[name]
    layer, (x, *more) = with_random_adapters(row.make(nnx.Rngs(0))), row.arrays("float32")
    gradient = lambda: jax.grad(lambda x: (row.run(layer, x, *more) ** 2).sum())(x)
    y, by_input = row.run(layer, x, *more), gradient()
    nnx.lora.merge(layer)
    np.testing.assert_allclose(y, row.run(layer, x, *more), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(by_input, gradient(), rtol=1e-3, atol=1e-2)


def test_an_adapted_table():
    table = with_random_adapters(nnx.Embed(5, 4, rngs=R))
    x, ids = jax.random.normal(jax.random.key(1), (2, 4)), jnp.array([[0, 4, -1, 7]])
    rows, scores = table(ids), table.attend(x)
    nnx.lora.merge(table)
    np.testing.assert_allclose(rows, table(ids), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(scores, table.attend(x), rtol=1e-4, atol=1e-4)


def sizes_of(jaxpr):
    """The sizes of the arrays that a program computes; what only moves elements does not count."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in ("transpose", "rev", "reshape", "concatenate"):
            yield from (v.aval.size for v in eqn.outvars)
        for inner in eqn.params.values():
            inner = getattr(inner, "jaxpr", inner)
            yield from sizes_of(inner) if hasattr(inner, "eqns") else ()


WIDE = {
    "linear": (lambda: nnx.Linear(64, 64, rngs=R), (2, 64)),
    "heads": (lambda: nnx.LinearGeneral(64, (8, 8), rngs=R), (2, 64)),
    "einsum": (lambda: nnx.Einsum("ta,hab->thb", (8, 64, 8), rngs=R), (2, 64)),
    "conv": (lambda: nnx.Conv(64, 64, 3, rngs=R), (1, 4, 64)),
    "table": (lambda: nnx.Embed(64, 64, rngs=R), (2, 64)),
}


@pytest.mark.parametrize("name", WIDE)
def test_nothing_as_large_as_a_kernel_is_formed(name):
    make, shape = WIDE[name]
    layer = make()
    inject(layer, ..., dropout=0.1)

    def loss(x, layer):
        y = layer.attend(layer(jnp.arange(2)) * x) if name == "table" else layer(x)
        return y.sum()

    program = jax.make_jaxpr(lambda x: nnx.grad(loss, argnums=(0, 1))(x, nnx.clone(layer)))
    kernel = layer.embedding if name == "table" else layer.kernel
    assert max(sizes_of(program(jnp.ones(shape)).jaxpr)) < kernel.base.size


def test_an_injected_layer_costs_and_computes_what_a_LoRALinear_does():
    built = nnx.LoRALinear(256, 128, lora_rank=4, rngs=nnx.Rngs(0))
    layer = nnx.Linear(256, 128, rngs=nnx.Rngs(0))
    nnx.lora.inject(layer, ..., rank=4, rngs=nnx.Rngs(1))
    for name in ("lora_a", "lora_b"):
        value = jax.random.normal(jax.random.key(2), getattr(built.lora, name).shape)
        for owner in (built.lora, layer.kernel):
            getattr(owner, name)[...] = value
    x = jax.random.normal(jax.random.key(1), (8, 256))
    np.testing.assert_allclose(layer(x), built(x), rtol=1e-5, atol=1e-4)
    costs = []
    for model in (layer, built):
        program = jax.jit(lambda x, model=model: model(x)).lower(x).compile()
        costs.append(program.cost_analysis()["flops"])
    assert costs[0] <= 1.05 * costs[1]


@pytest.mark.parametrize(
    "name", ["Linear", "Conv, a short input, CIRCULAR", "Einsum", "LinearGeneral"]
)
def test_dropout_is_for_the_inputs(name):
    """Each element of the input is dropped by itself, in training alone."""
    layer, shape = with_random_adapters(ROWS[name].make(R), dropout=0.5), ROWS[name].x.shape
    x = jnp.broadcast_to(jax.random.normal(jax.random.key(1), shape[1:]), (16, *shape[1:]))
    y = layer(x)
    assert len({row.tobytes() for row in np.asarray(y)}) > 3
    layer.eval()
    y = layer(x)
    np.testing.assert_allclose(y, jnp.broadcast_to(y[0], y.shape), rtol=1e-4, atol=1e-4)


def test_dropout_of_a_table_drops_lookups():
    table = with_random_adapters(nnx.Embed(5, 4, rngs=R), dropout=0.5)
    dropped = (table(jnp.zeros(64, int)) == table.embedding.base[0]).all(1)
    assert 0 < dropped.sum() < 64


def test_adapters_lie_where_their_kernel_lies():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
    sharding = lambda *spec: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    for spec, a, b in (
        ((None, "model"), (None, None), (None, "model")),
        (("model", None), ("model", None), (None, None)),
    ):
        layer = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
        layer.kernel[...] = jax.device_put(layer.kernel[...], sharding(*spec))
        inject(layer, ...)
        assert layer.kernel.lora_a[...].sharding == sharding(*a)
        assert layer.kernel.lora_b[...].sharding == sharding(*b)


@pytest.mark.parametrize(
    ("make", "names", "a", "b"),
    [
        (lambda m: nnx.Linear(4, 6, kernel_metadata=m, rngs=R), "eh", "e.", ".h"),
        (lambda m: nnx.LinearGeneral(3, (2, 4), kernel_metadata=m, rngs=R), "ehd", "e.", ".h"),
        (
            lambda m: nnx.LinearGeneral((2, 4), 3, axis=(-2, -1), kernel_metadata=m, rngs=R),
            "hde",
            "h.",
            ".e",
        ),
        (lambda m: nnx.Conv(3, 4, (2, 5), kernel_metadata=m, rngs=R), ".xio", "..", ".o"),
    ],
)
def test_sharding_annotations_of_the_matrices(make, names, a, b):
    named = lambda text: tuple(None if name == "." else name for name in text)
    layer = make({"sharding_names": named(names)})
    inject(layer, ...)
    assert layer.kernel.lora_a.sharding_names == named(a)
    assert layer.kernel.lora_b.sharding_names == named(b)


def once(model, *args, **options):
    inject(model, *args, **options)
    return model


def wrong():
    """Calls, and what their message says."""
    net, linear = (lambda: Net(R)), (lambda: nnx.Linear(2, 2, rngs=R))
    matches = r"lora.inject: the filter MultiHeadAttention matches no lay"
    yield lambda: inject(net(), nnx.MultiHeadAttention), matches
    similar = r"Similar in the paths: 'query'. It has again, attention.k"
    yield lambda: inject(net(), nnx.PathContains("qeury")), similar
    for rank in (0, 2.0, True):
        yield lambda: inject(net(), ..., rank=rank), "rank must be a whole number, 1 or more, got"  # noqa: B023
    rate = r"`dropout` must be a probability in the range \[0, 1\), got 1"
    yield lambda: inject(net(), ..., dropout=1), rate
    yield lambda: nnx.lora.merge(net()), "lora.merge: Net has no adapters. nnx"
    yield lambda: nnx.lora.remove(net()), "lora.remove: Net has no adapters. nnx"
    query = lambda: once(net(), nnx.PathContains("query"))
    again = "already adapted: attention.query. Choose other layers"
    yield lambda: inject(query(), nnx.LinearGeneral), again
    wrapped = lambda: nnx.Dict(a=nnx.WeightNorm(linear(), rngs=R))
    yield lambda: inject(wrapped(), ...), "WeightNorm at a sets a.layer_instance.kernel in each"
    built = lambda: nnx.Dict(lora=nnx.LoRALinear(2, 2, lora_rank=1, rngs=R))
    yield lambda: inject(built(), ...), "already adapted: lora. "
    vector = r"bias is float32\[2\]; a kernel that can be adapted is a"
    yield lambda: inject(linear(), ..., weight="bias"), vector


@pytest.mark.quick
def test_messages():
    for call, text in wrong():
        with pytest.raises(ValueError, match=text):
            call()


def test_a_kernel_is_adapted_once():
    tied = nnx.List([nnx.Linear(2, 2, rngs=R), nnx.Linear(2, 2, rngs=R)])
    tied[1].kernel = tied[0].kernel
    inject(tied[0], ...)
    with pytest.raises(ValueError, match="already adapted: 0, 1. "):
        inject(tied, ...)
    assert math.prod(tied[1].kernel.shape) == 4 and isinstance(tied[1].kernel, nnx.Param)


# Layers that have an adapter built in -----------------------------------------------------------


def test_lora_shares_its_base_and_passes_options_to_it():
    base = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    layer = nnx.LoRA(3, 2, 4, base_module=base, a_metadata={"tag": 1}, rngs=nnx.Rngs(1))
    assert layer.base_module is base and layer.lora_a.get_metadata("tag") == 1
    expected = ["base_module.bias", "base_module.kernel", "lora_a", "lora_b"]
    assert names(nnx.state(nnx.clone(layer))) == expected
    scaled = lambda x, scale: scale * x[..., :1]
    layer = nnx.LoRA(3, 2, 4, base_module=scaled, lora_param_type=nnx.Cache, rngs=nnx.Rngs(0))
    assert type(layer.lora_a) is type(layer.lora_b) is nnx.Cache
    assert (layer(jnp.ones((2, 3)), scale=2) == 2).all()


def test_only_the_adaptation_is_trained():
    layer = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
    trained = nnx.DiffState(0, nnx.LoRAParam)
    grads = nnx.grad(lambda m: jnp.sum(m(jnp.ones((5, 3))) ** 2), argnums=trained)(layer)
    assert names(grads) == ["lora.lora_a", "lora.lora_b"]
