"""LoRA, LoRALinear, and `nnx.lora`: adapters put into models, trained, merged and taken out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx
from tests.messages import refused, rows
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


names = lambda state: [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
values = lambda model: [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
loss = lambda model: ((model(IDS) - 1) ** 2).mean()
inject = functools.partial(nnx.lora.inject, rank=np.int64(2), alpha=8, rngs=nnx.Rngs(1))


ADAPTED = "attention.key attention.out attention.query attention.value again blocks.0.layers.0"


def test_the_life_of_an_adapter():
    model, forward = Net(nnx.Rngs(0)), nnx.jit(lambda model: model(IDS))
    plain, before = forward(model), values(model)
    structure = nnx.graphdef(model)
    inject(model, ...)
    assert (forward(model) == plain).all()
    expected = {f"{layer}.kernel.lora_{x}" for layer in ADAPTED.split() for x in "ab"}
    expected |= {"embed.embedding.lora_a", "embed.embedding.lora_b"}
    grads = nnx.jit(nnx.grad(loss))(model)
    assert set(names(grads)) == set(names(nnx.state(model, nnx.LoRAParam))) == expected
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    assert set(names(optimizer.opt_state[0].mu)) == expected

    @nnx.jit
    def step(model, optimizer):
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(5)]
    assert losses[-1] < losses[0] and model.again is model.linear
    assert not jnp.allclose(forward(model), plain)

    nnx.lora.remove(model)
    assert all((a == b).all() for a, b in zip(values(model), before, strict=True))
    nnx.unfreeze(model)
    assert nnx.graphdef(model) == structure


JOINING = functools.partial(nnx.LinearGeneral, axis=(-2, -1))
MATRICES = [
    # layer, shapes of a and b, names of the axes of the kernel, of a and of b
    (nnx.Linear, (3, 4), (3, 2), (2, 4), "eh", "e.", ".h"),
    (nnx.LinearGeneral, (3, (2, 4)), (3, 2), (2, 8), "ehd", "e.", ".h"),
    (JOINING, ((2, 4), 3), (8, 2), (2, 3), "hde", "h.", ".e"),
    (nnx.Conv, (3, 4, (2, 5)), (30, 2), (2, 4), ".xio", "..", ".o"),
    (nnx.Einsum, ("bi,ihd->bhd", (3, 2, 4)), (6, 2), (2, 4), "", "", ""),
    (nnx.ConvTranspose, (3, 4, (2,)), (6, 2), (2, 4), "", "", ""),
]


@pytest.mark.parametrize("kind, args, a, b, names, a_names, b_names", MATRICES)
def test_the_kernel_is_a_matrix_of_inputs_by_outputs(kind, args, a, b, names, a_names, b_names):
    named = lambda text: tuple(None if name == "." else name for name in text) or None
    layer = kind(*args, kernel_metadata={"sharding_names": named(names)}, rngs=nnx.Rngs(0))
    base = layer.kernel
    inject(layer, ...)
    kernel = layer.kernel
    assert kernel.base is base and kernel.lora_a.shape == a and kernel.lora_b.shape == b
    assert kernel.shape == base.shape and (kernel.ndim, kernel.dtype) == (base.ndim, base.dtype)
    kernel.lora_b[...] = jax.random.normal(jax.random.key(0), b)
    delta = (np.asarray(kernel.lora_a[...]) @ kernel.lora_b[...]).reshape(base.shape)
    np.testing.assert_allclose(kernel[...], base[...] + 4 * delta, rtol=1e-5)
    assert (kernel[0] == kernel.value[0]).all() and (kernel + 1 == kernel.value + 1).all()
    assert kernel.lora_a.sharding_names == named(a_names)
    assert kernel.lora_b.sharding_names == named(b_names)


def test_stacked_layers_have_an_adapter_each():
    make = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)))
    layers = make(jax.random.split(jax.random.key(0), 3))
    inject(layers, nnx.Linear, dropout=0.5)
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


def test_half_precision_keeps_its_dtype():
    layer = nnx.Linear(4, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    inject(layer, ...)
    assert layer.kernel[...].dtype == jnp.bfloat16 and layer.kernel.lora_a.dtype == jnp.float32
    assert layer(jnp.ones((1, 4), jnp.bfloat16)).dtype == jnp.bfloat16


def test_the_base_may_be_trained_too():
    model = nnx.MLP(4, 2, 8, 1, rngs=nnx.Rngs(0))
    inject(model.layers[0], ..., freeze_base=False)
    assert names(nnx.state(model, nnx.Frozen())) == []
    inject(model.layers[1], ...)
    assert names(nnx.state(model, nnx.Frozen())) == ["layers.1.bias", "layers.1.kernel.base"]


R = nnx.Rngs(0)
KINDS = "Linear LinearGeneral Einsum Conv ConvTranspose MultiHeadAttention".split()
ROWS = {name: row for family in FAMILIES.values() for name, row in family.items()}
WITH_KERNELS = [name for name, row in ROWS.items() if name.split(",")[0] in KINDS and row.stateless]


def with_random_adapters(layer, **options):
    inject(layer, ..., a_initializer=nnx.initializers.zeros, **options)
    for path, leaf in nnx.to_flat_state(nnx.state(layer, nnx.LoRAParam)):
        leaf[...] = jax.random.normal(jax.random.key(len(path)), leaf.shape)
    return layer


@pytest.mark.parametrize("name", ["Embed", "Embed, attend", *WITH_KERNELS[::4]])
def test_an_adapter_adds_what_the_merged_kernel_would(name):
    """In each kind of layer, in value and gradient."""
    row = ROWS[name]
    layer, (x, *more) = with_random_adapters(row.make(nnx.Rngs(0))), row.arrays("float32")
    run = lambda x: row.run(layer, x, *more)
    gradient = lambda: jax.grad(lambda x: (run(x) ** 2).sum())(x) if name != "Embed" else ()
    y, by_input = run(x), gradient()
    nnx.lora.merge(layer)
    np.testing.assert_allclose(y, run(x), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(by_input, gradient(), rtol=1e-3, atol=1e-2)


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


@pytest.mark.parametrize(
    "name", ["Linear", "Conv, a short input, CIRCULAR", "Einsum", "LinearGeneral"]
)
def test_dropout_is_for_the_inputs(name):
    """Each element of the input is dropped by itself, in training alone; or a row of the kernel."""
    layer, shape = with_random_adapters(ROWS[name].make(R), dropout=0.5), ROWS[name].x.shape
    changed = lambda: np.asarray((layer.kernel[...] != layer.kernel.base[...]).any(-1))
    assert len({changed().tobytes() for _ in range(4)}) > 1
    x = jnp.broadcast_to(jax.random.normal(jax.random.key(1), shape[1:]), (16, *shape[1:]))
    y = layer(x)
    assert len({row.tobytes() for row in np.asarray(y)}) > 3
    layer.eval()
    y = layer(x)
    np.testing.assert_allclose(y, jnp.broadcast_to(y[0], y.shape), rtol=1e-4, atol=1e-4)
    assert changed().all()


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


linear = lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0))
WRONG = """
inject(net, nnx.MultiHeadAttention)
    ValueError: lora.inject: the filter MultiHeadAttention matches no lay
inject(net, nnx.PathContains('qeury'))
    ValueError: Similar in the paths: 'query'. It has again, attention.k
inject(net, ..., rank=0)
    ValueError: rank must be a whole number, 1 or more, got
inject(net, ..., rank=True)
    ValueError: rank must be a whole number, 1 or more, got
inject(net, ..., dropout=1)
    ValueError: `dropout` must be a probability in the range [0, 1), got 1
nnx.lora.merge(net)
    ValueError: lora.merge: Net has no adapters. nnx
nnx.lora.remove(net)
    ValueError: lora.remove: Net has no adapters. nnx
nnx.lora.merge(tied)
    ValueError: lora.merge: 1.kernel is the Variable that is adapted in 0.kernel, without
inject(query, nnx.LinearGeneral)
    ValueError: already adapted: attention.query. Choose other layers
inject(tied, ...)
    ValueError: already adapted: 0, 1.
inject(nnx.Dict(a=nnx.WeightNorm(linear(), rngs=nnx.Rngs(0))), ...)
    ValueError: WeightNorm at a sets a.layer_instance.kernel in each
inject(nnx.Dict(lora=nnx.LoRALinear(2, 2, lora_rank=1, rngs=nnx.Rngs(0))), ...)
    ValueError: already adapted: lora.
inject(linear(), ..., weight='bias')
    ValueError: bias is float32[2]; a kernel that can be adapted is a
"""


@functools.cache
def scope():
    """What the lines use; a refused call changes none of it."""
    query = Net(R)
    inject(query, nnx.PathContains("query"))
    tied = nnx.List([linear(), linear()])
    tied[1].kernel = tied[0].kernel
    inject(tied[0], ...)
    return {**globals(), "net": Net(R), "query": query, "tied": tied}


@pytest.mark.quick
@rows(WRONG)
def test_refused(line, message):
    refused(line, message, scope())


def test_a_layer_with_an_adapter_shares_its_base_and_passes_options_to_it():
    base = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    layer = nnx.LoRA(3, 2, 4, base_module=base, rngs=nnx.Rngs(1))
    assert layer.base_module is base
    scaled = lambda x, scale: scale * x[..., :1]
    layer = nnx.LoRA(3, 2, 4, base_module=scaled, lora_param_type=nnx.Cache, rngs=nnx.Rngs(0))
    assert (layer(jnp.ones((2, 3)), scale=2) == 2).all()
    layer = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
    assert names(nnx.state(layer, nnx.LoRAParam)) == ["lora.lora_a", "lora.lora_b"]
