"""What type checkers infer of layers, training, files, layouts, serving and generating."""

import typing as tp
from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax

import nnxlite as nnx

State: tp.TypeAlias = nnx.State[tp.Any, tp.Any]

x, y = jnp.ones((4, 2)), jnp.ones((4, 3))
model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
assert_type(optimizer, nnx.Optimizer[nnx.Linear])
assert_type(optimizer.step, nnx.OptState[jax.Array])
assert_type(optimizer.step.value, jax.Array)


@nnx.jit
def train_step(
    model: nnx.Linear, optimizer: nnx.Optimizer[nnx.Linear], x: jax.Array, y: jax.Array
) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
    assert_type(grads, State)
    assert_type(optimizer.update(model, grads), State)
    return loss


assert_type(train_step(model, optimizer, x, y), jax.Array)
both = nnx.ModelAndOptimizer(model, optax.sgd(0.1), wrt=nnx.Param)
assert_type(both.model, nnx.Linear)

metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
assert_type(metrics.compute(), dict[str, tp.Any])
assert_type(nnx.metrics.Average().compute(), jax.Array)
assert_type(nnx.metrics.Welford().compute(), nnx.metrics.Statistics)
assert_type(nnx.metrics.Welford().compute().mean, jax.Array)
assert issubclass(nnx.metrics.Average, nnx.Metric)

assert_type(nnx.freeze(model, nnx.PathContains("kernel")), None)
assert_type(nnx.unfreeze(model), None)
assert_type(nnx.Frozen()(("kernel",), model.kernel), bool)
assert_type(nnx.cast(model, "bfloat16", keep=nnx.PathContains("bias")), None)
policy = nnx.Policy(compute="bfloat16")
assert_type(policy.apply(model), None)
assert_type(policy.cast_output(x), jax.Array)
assert_type(nnx.lora.inject(model, nnx.Linear, rank=2, rngs=nnx.Rngs(0)), None)
assert_type(nnx.lora.merge(model), None)
averages = nnx.EMA(model, 0.9)
assert_type(averages.apply_to(model), nnx.Linear)
assert_type(averages.params, State)

graphdef, params = nnx.split(model)
tx = optax.sgd(0.1)
train_state: nnx.TrainState[nnx.Linear] = nnx.TrainState.create(graphdef, params=params, tx=tx)
assert_type(train_state, nnx.TrainState[nnx.Linear])
assert_type(train_state.params, State)
assert_type(train_state.apply_gradients(params), nnx.TrainState[nnx.Linear])

run = nnx.training.loop(3, evaluate=lambda: {"loss": 0.5}, progress=False)
assert_type(run, nnx.training.Loop)
for step in run:
    assert_type(step, nnx.training.Step)
    assert_type(step.number, int)
    assert_type(step.every(2), bool)
    step.log(loss=x.sum())
assert_type(run.history, list[dict[str, tp.Any]])
with nnx.training.interruptible() as stop:
    assert_type(stop, nnx.training.Stop)

# Files

if tp.TYPE_CHECKING:  # what needs files, and further packages
    rule = nnx.checkpoint.Rule("fc.weight", "kernel", "o i -> i o")
    mapping = nnx.checkpoint.Mapping([rule, nnx.checkpoint.Ignore("**.mask")])
    assert_type(
        mapping.load({"fc.weight": x}, model, strict=False, only=nnx.Param), nnx.checkpoint.Report
    )
    assert_type(mapping.export(model), dict[str, tp.Any])
    assert_type(nnx.save_safetensors("model.safetensors", model, mapping=mapping), None)
    loaded = nnx.load_safetensors("model.safetensors", model, mapping=mapping)
    assert_type(loaded, nnx.checkpoint.Report)
    assert_type(loaded.restored, tuple[str, ...])
    assert_type(nnx.checkpoint.save("folder", model=model, step=3, overwrite=True), None)
    report = nnx.checkpoint.restore("folder", model=model, rename={"old.**": "model.**"}, cast=None)
    assert_type(report, nnx.checkpoint.Report)
    assert_type(report.missing, tuple[str, ...])
    assert_type(report.misshapen, tuple[nnx.checkpoint.Mismatch, ...])
    assert_type(report.misshapen[0].stored, str)
    assert_type(report.complete, bool)
    assert_type(report.values, tp.Mapping[str, tp.Any])
    assert_type(nnx.checkpoint.info("folder").leaves, dict[str, str])

    with nnx.checkpoint.Manager("folder", keep=3, best="loss", mode="min") as manager:
        assert_type(manager, nnx.checkpoint.Manager)
        assert_type(manager.save(3, model=model, metrics={"loss": 0.1}), bool)
        assert_type(manager.restore(manager.best, model=model), nnx.checkpoint.Report)
        assert_type(manager.steps, list[int])
        assert_type(manager.latest, int | None)
        assert_type(manager.metrics(3), dict[str, float])
        assert_type(manager.should_stop(patience=100), bool)
        assert_type(nnx.training.resume(manager, model=model), int)
        nnx.training.loop(3, checkpoints=manager, items={"model": model})

# Layouts on a mesh, several processes

mesh = nnx.make_mesh(data=-1)
assert_type(mesh, jax.sharding.Mesh)
square = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
layout = nnx.shard(square, mesh, "fsdp")
assert_type(layout, nnx.Layout)
assert_type(nnx.plan_layout(square, mesh, nnx.Plan(fsdp="data")), nnx.Layout)
assert_type(nnx.plan_layout(square, mesh, {"kernel": (None, "data"), "bias": None}), nnx.Layout)
assert_type(layout.entries, tuple[nnx.Placement, ...])
assert_type(layout.entries[0].spec, jax.sharding.PartitionSpec)
assert_type(layout.entries[0].why, str)
assert_type(layout.bytes_per_device, int)
assert_type(layout.replicated, tuple[nnx.Placement, ...])
assert_type(layout.batch, jax.sharding.NamedSharding)
assert_type(layout.put(np.ones((8, 2))), jax.Array)


def build() -> tuple[nnx.Linear, nnx.Optimizer[nnx.Linear]]:
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


assert_type(nnx.init_sharded(build, mesh, "fsdp"), tuple[nnx.Linear, nnx.Optimizer[nnx.Linear]])
assert_type(
    nnx.init_sharded(lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0)), mesh, "fsdp"), nnx.Linear
)
assert_type(nnx.distributed.exchange("names", "a"), list[str])
with nnx.distributed.agreed("reading"):
    pass

# Serving, generating

exported = nnx.export(model, x, shapes="batch, 2")
assert_type(exported, nnx.Exported)
assert_type(exported.weights, dict[str, jax.Array])
assert_type(exported.num_programs, int)
if tp.TYPE_CHECKING:
    assert_type(nnx.load_exported("call"), nnx.Exported)


class Next(nnx.Module):
    """After each token the next one."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits."""
        return nnx.one_hot(tokens + 1, 10)


out = nnx.generate(Next(), [3, 4], 3)
assert_type(out, nnx.Generated)
assert_type(out.tokens, jax.Array)
assert_type(out.lists(), list[tp.Any])
beams = nnx.generate(Next(), [3, 4], 3, beams=2, length_penalty=1.0)
assert_type(beams.scores, jax.Array | None)
sampler = nnx.Sampler(temperature=0.5, top_k=3)
assert_type(sampler(jnp.ones(4), jax.random.key(0)), jax.Array)
assert_type(nnx.sampling.top_p(jnp.ones(4), 0.5), jax.Array)
nnx.generate(Next(), [[3], [4, 5]], 3, sampler=sampler, rngs=nnx.Rngs(0), stop=[1, 2])

# Layers

Parameter: tp.TypeAlias = nnx.Param[jax.Array]
Three: tp.TypeAlias = tuple[jax.Array, jax.Array, jax.Array]

rngs = nnx.Rngs(0)
inputs = jnp.ones((2, 8, 4))
image = jnp.ones((2, 8, 8, 4))

linear = nnx.Linear(4, 3, rngs=rngs)
assert_type(linear, nnx.Linear)
assert_type(linear.kernel, Parameter)
assert_type(linear.bias, Parameter | None)
assert_type(linear.in_features, int)
assert_type(linear(inputs), jax.Array)
assert_type(inputs @ linear.kernel, jax.Array)
general = nnx.LinearGeneral(4, (2, 3), rngs=rngs)
assert_type(general.kernel, Parameter)
assert_type(general(inputs), jax.Array)
einsum = nnx.Einsum("bld,df->blf", (4, 3), (3,), rngs=rngs)
assert_type(einsum.bias, Parameter | None)
assert_type(einsum(inputs), jax.Array)
conv = nnx.Conv(4, 3, (3, 3), rngs=rngs)
assert_type(conv.kernel, Parameter)
assert_type(conv.bias, Parameter | None)
assert_type(conv(image), jax.Array)
assert_type(nnx.ConvTranspose(4, 3, (3, 3), rngs=rngs)(image), jax.Array)
wide = nnx.Linear(4, 4, rngs=rngs)
stacked = nnx.stack_layers([nnx.clone(wide) for _ in range(8)])
assert_type(stacked, nnx.Linear)
assert_type(nnx.unstack_layers(stacked), nnx.List[nnx.Linear])
embed = nnx.Embed(10, 4, rngs=rngs)
assert_type(embed.embedding, Parameter)
assert_type(embed(jnp.arange(3)), jax.Array)
assert_type(embed.attend(inputs), jax.Array)
attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
assert_type(attention(inputs), jax.Array)
assert_type(attention.query, nnx.LinearGeneral)
norm = nnx.BatchNorm(4, rngs=rngs)
assert_type(norm.scale, Parameter | None)
assert_type(norm.mean, nnx.BatchStat[jax.Array])
assert_type(norm(inputs), jax.Array)
assert_type(nnx.LayerNorm(4, rngs=rngs).bias, Parameter | None)
assert_type(nnx.RMSNorm(4, rngs=rngs).scale, Parameter | None)
norms = nnx.LayerNorm(4, rngs=rngs), nnx.RMSNorm(4, rngs=rngs), nnx.GroupNorm(4, 2, rngs=rngs)
assert_type((norms[0](inputs), norms[1](inputs), norms[2](inputs)), Three)
assert_type(nnx.InstanceNorm(4, rngs=rngs)(inputs), jax.Array)
assert_type(nnx.Dropout(0.5, rngs=rngs)(inputs), jax.Array)
assert_type(nnx.PReLU().negative_slope, Parameter)
assert_type(nnx.PReLU()(inputs), jax.Array)
assert_type(nnx.SpectralNorm(linear, rngs=rngs)(inputs), tp.Any)
assert_type(nnx.WeightNorm(linear, rngs=rngs)(inputs), tp.Any)
assert_type(nnx.LoRA(4, 2, 3, rngs=rngs)(inputs), jax.Array)
assert_type(nnx.LoRALinear(4, 3, lora_rank=2, rngs=rngs)(inputs), jax.Array)
assert_type(nnx.RoPE()(jnp.ones((1, 3, 2, 4))), jax.Array)
assert_type(nnx.Identity()(inputs), tp.Any)

# Layers made of others

sequential = nnx.Sequential(linear, nnx.relu, nnx.Linear(3, 2, rngs=rngs))
assert_type(sequential, nnx.Sequential[jax.Array])
assert_type(sequential(inputs), jax.Array)
assert_type(nnx.Sequential(*[linear])(inputs), jax.Array)
mlp = nnx.MLP(4, 2, 8, 1, rngs=rngs)
remembering = nnx.remat_layers(nnx.MLP.__call__, {"layers.*": None})
assert_type(remembering(mlp, inputs), jax.Array)
assert_type(mlp.layers, nnx.List[nnx.Linear])
assert_type(mlp(inputs), jax.Array)
lstm = nnx.LSTMCell(4, 3, rngs=rngs)
carry = lstm.initialize_carry((2, 4))
assert_type(lstm(carry, inputs[:, 0])[1], jax.Array)
assert_type(nnx.OptimizedLSTMCell(4, 3, rngs=rngs)(carry, inputs[:, 0])[1], jax.Array)
assert_type(nnx.GRUCell(4, 3, rngs=rngs)(carry[0], inputs[:, 0])[1], jax.Array)
assert_type(nnx.SimpleCell(4, 3, rngs=rngs)(carry[0], inputs[:, 0])[1], jax.Array)
cell: nnx.RNNCellBase = lstm
forward, backward = nnx.RNN(lstm), nnx.RNN(nnx.LSTMCell(4, 3, rngs=rngs))
assert_type(forward(inputs), tp.Any)
assert_type(forward(inputs, return_carry=False, time_major=False), jax.Array)
assert_type(forward(inputs, return_carry=True), tuple[tp.Any, jax.Array])
directions = nnx.Bidirectional(forward, backward)
assert_type(directions(inputs), tp.Any)
assert_type(directions(inputs, return_carry=True), tuple[tp.Any, jax.Array])

# Functions

mask = nnx.make_causal_mask(jnp.ones((2, 8)))
activations = [
    nnx.celu, nnx.elu, nnx.gelu, nnx.glu, nnx.hard_sigmoid, nnx.hard_silu, nnx.hard_swish,
    nnx.hard_tanh, nnx.identity, nnx.leaky_relu, nnx.log_sigmoid, nnx.log_softmax, nnx.relu,
    nnx.relu6, nnx.selu, nnx.sigmoid, nnx.silu, nnx.soft_sign, nnx.softmax, nnx.softplus,
    nnx.standardize, nnx.swish, nnx.tanh,
]  # fmt: skip
assert_type((nnx.relu(inputs), nnx.gelu(inputs), nnx.tanh(inputs)), Three)
assert_type((nnx.softmax(inputs, axis=-1), nnx.one_hot(jnp.arange(3), 4), mask), Three)
assert float(nnx.logsumexp(inputs, axis=None)) > 0
pools = nnx.avg_pool(image, (2, 2)), nnx.max_pool(image, (2, 2)), nnx.min_pool(image, (2, 2))
assert_type(pools, Three)
assert_type(nnx.pool(image, 0.0, jax.lax.add, (2, 2), None, "VALID"), jax.Array)
assert_type(nnx.make_attention_mask(jnp.ones((2, 8)), jnp.ones((2, 8))), jax.Array)
assert_type(nnx.combine_masks(mask, None), jax.Array | None)
heads = jnp.ones((2, 8, 2, 4))
assert_type(nnx.dot_product_attention(heads, heads, heads), jax.Array)
assert_type(nnx.dot_product_attention_with_rope(heads, heads, heads, rope=nnx.RoPE()), jax.Array)
init: nnx.Initializer = nnx.initializers.he_normal()
assert nnx.dtypes.canonicalize_dtype(inputs, dtype=None) == inputs.dtype
