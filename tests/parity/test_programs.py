"""Whole programs, as people write them, give what they give with the reference.

Each program takes the library under the name `nnx` and returns whatever it would print or save.
"""

from __future__ import annotations

import dataclasses
import functools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.parity.programs import Programs, compare, mesh_of, models

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference warns of its own plans

Lib = tp.Any
program = Programs()


def raised(function: tp.Callable[[], tp.Any]) -> str:
    """The name of the exception that a call raises."""
    with pytest.raises(Exception) as caught:
        function()
    return caught.type.__name__


# Parts that several programs share --------------------------------------------------------------


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def squares(model, x, y=0.0):
    return jnp.mean((model(x) - y) ** 2)


# Training ---------------------------------------------------------------------------------------


@program()
def classifier(nnx):
    class CNN(nnx.Module):
        def __init__(self, *, rngs):
            self.conv = nnx.Conv(1, 4, kernel_size=(3, 3), use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(rate=0.25)
            self.pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
            self.out = nnx.Linear(16, 5, rngs=rngs)

        def __call__(self, x, rngs=None):
            x = self.pool(nnx.relu(self.norm(self.dropout(self.conv(x), rngs=rngs))))
            return self.out(x.reshape(x.shape[0], -1))

    model = CNN(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(0.005, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    batch = {"image": normal(1, 6, 4, 4, 1), "label": jnp.arange(6) % 5}

    def loss_fn(model, rngs, batch):
        logits = model(batch["image"], rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), logits

    @nnx.jit
    def train_step(model, optimizer, metrics, rngs, batch):
        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, rngs, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)

    rngs, history = nnx.Rngs(0), []
    model.train()
    for _ in range(2):
        train_step(model, optimizer, metrics, rngs, batch)
        history.append(metrics.compute())
        metrics.reset()
    model.eval()
    flags = model.norm.use_running_average, model.dropout.deterministic
    states = nnx.state((model, optimizer, metrics, rngs))
    return history, flags, states, model(batch["image"])


@program()
def line_search_and_hyperparameters(nnx):
    x = normal(8, 5, 3)
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        graphdef = nnx.graphdef(model)
        loss, grads = nnx.value_and_grad(squares)(model, x, 1.0)
        further = {"grad": grads, "value": loss}
        further["value_fn"] = lambda params: squares(nnx.merge(graphdef, params), x, 1.0)
        optimizer.update(model, grads, **further)
        return loss

    losses = [step(model, optimizer) for _ in range(2)]
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    second = nnx.Optimizer(model, tx, wrt=nnx.Param)
    second.opt_state.hyperparams["learning_rate"][...] = 0.5
    second.update(model=model, grads=nnx.grad(squares)(model, x))
    return losses, nnx.state(model), nnx.state(second)


@program()
def sharded_training(nnx):
    """Losses, steps, and the place of each parameter and moment on a mesh of eight devices."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            init = nnx.initializers.lecun_normal()
            columns = nnx.with_partitioning(init, ("data", "model"))
            rows = nnx.with_partitioning(init, ("model", "data"))
            self.norm = nnx.LayerNorm(8, rngs=rngs)
            self.up = nnx.Linear(8, 16, kernel_init=columns, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(16, 8, kernel_init=rows, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    @nnx.jit
    def build():
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(squares)(model, x, y)
        optimizer.update(model, grads)
        return loss

    mesh = mesh_of(2, 4, names=("data", "model"))
    with jax.set_mesh(mesh):
        model, optimizer = build()
        rows = jax.NamedSharding(mesh, jax.P("data"))
        x = jax.device_put(np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8), rows)
        losses = [step(model, optimizer, x, x**2) for _ in range(4)]
    assert losses[-1] < losses[0]
    adam = optimizer.opt_state[0]
    places = [
        (str(x.sharding.spec), x.sharding.shard_shape(x.shape))
        for tree in (nnx.state(model), adam.mu, adam.nu)
        for x in (tree[layer]["kernel"].get_value() for layer in ("up", "down"))
    ]
    assert {shape for _, shape in places} == {(4, 4)}
    return losses, places, model, optimizer


# Models -----------------------------------------------------------------------------------------


@program()
def language_model_with_cached_decoding(nnx):
    @dataclasses.dataclass(frozen=True)
    class Config:
        vocabulary: int = 11
        width: int = 4
        length: int = 4

    class LM(nnx.Module):
        def __init__(self, config, rngs):
            self.config = config
            self.tokens = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
            self.places = nnx.Embed(config.length, config.width, rngs=rngs)
            self.norm = nnx.LayerNorm(config.width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                num_heads=2, in_features=config.width, dropout_rate=0.1, decode=False, rngs=rngs
            )
            self.index = nnx.Cache(jnp.zeros((), jnp.int32))

        def __call__(self, tokens, decode=False):
            places, mask = jnp.arange(tokens.shape[1]), None
            if decode:
                places = places + self.index[...]
                self.index[...] += tokens.shape[1]
            else:
                mask = nnx.make_causal_mask(tokens)
            x = self.tokens(tokens) + self.places(places)
            x = x + self.attention(self.norm(x), mask=mask, decode=decode)
            return self.tokens.attend(x)

    config = Config()
    model = LM(config, nnx.Rngs(0, dropout=1))
    tokens = jnp.array([[1, 2, 3, 4]])
    modeless = raised(lambda: model(tokens))
    model.train()
    noisy = model(tokens)
    model.eval()
    whole = model(tokens)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.MultiHeadAttention):
            module.init_cache((1, config.length, config.width))
    decode = nnx.jit(lambda model, token: model(token, decode=True))
    parts = [decode(model, tokens[:, i : i + 1]) for i in range(config.length)]
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, rtol=1e-4, atol=1e-5)
    return noisy, whole, parts, nnx.state(model), modeless


# Contexts, partials, rules and settings ---------------------------------------------------------

PLAIN = ("plain", "tree")


@program()
def variables_as_roots_in_contexts(lib):
    v = lib.Param(jnp.arange(3.0))

    def there_and_back(split, merge):
        @jax.jit
        def double(*parts):
            with lib.merge_context("step", inner=True) as ctx:
                inside = getattr(ctx, merge)(*parts)
            inside[...] = 2 * inside[...]
            with lib.split_context("step") as ctx:
                return getattr(ctx, split)(inside)

        with lib.update_context("step"):
            with lib.split_context("step") as ctx:
                parts = getattr(ctx, split)(v)
            parts = double(*parts)
            with lib.merge_context("step", inner=False) as ctx:
                return getattr(ctx, merge)(*parts) is v, v[...]

    out = [there_and_back("split", "merge"), there_and_back("flatten", "unflatten")]
    with lib.split_context() as ctx:
        graphdef, *groups = ctx.flatten(v, lib.BatchStat, ...)
    with lib.merge_context() as ctx:
        return out, ctx.unflatten(graphdef, *groups) is v, list(groups[1])


@program()
def contexts_are_nested(lib):
    a, b = models(lib).Counted(), models(lib).Counted()
    with lib.update_context("outer"), lib.update_context("inner"):
        with lib.split_context("outer") as outer, lib.split_context("inner") as inner:
            one, two = outer.split(a), inner.split(b, lib.Param, ...)
        with lib.merge_context("inner", inner=True) as inner:
            c = inner.merge(*two)
        c.w[...] = 9.0
        with lib.split_context("inner") as inner:
            two = inner.split(c)
        with lib.merge_context("inner", inner=False) as inner:
            same = inner.merge(*two) is b
        with lib.merge_context("outer", inner=True) as outer:
            copy = outer.merge(*one)
    return same, b, copy is a, copy


@program()
def trees_with_split_and_merge_functions(lib):
    m = models(lib).Counted()
    seen = []
    axes = lib.StateAxes({lib.Param: 0, ...: None})

    def split_fn(ctx, path, prefix, x):
        seen.append((str(path), type(prefix).__name__, type(x).__name__))
        return lib.NodeStates.from_split(*ctx.split(x, *prefix.filters), metadata=prefix.axes)

    tree = lib.to_tree(({"m": m}, 2.0), prefix=(axes, 7), split_fn=split_fn)

    def merge_fn(ctx, path, prefix, leaf):
        seen.append((str(path), prefix, type(leaf).__name__))
        return ctx.merge(leaf.graphdef, *leaf.states)

    return seen, tree, lib.from_tree(tree, prefix=(0, 1), merge_fn=merge_fn)


@program("tree", "plain")
def numbers_count_the_arguments_of_a_partial_as_one(lib, mode):
    m, X = models(lib).Counted(), jnp.ones(2)
    out = []
    for given in ((m,), (m, X)):
        partial = lib.jit_partial(
            lambda m, *args: m(args[0] * args[-2]) + args[-1], *given, static_argnums=1, **mode
        )
        compiled = partial.lower(3, X).compile()
        out += [partial(2, X), compiled(X), m]
    donated = [X + i for i in range(4)]
    lib.jit_partial(lambda *xs: [x + 1 for x in xs], *donated[:2], donate_argnums=(0, 2), **mode)(
        *donated[2:]
    )
    return out, [x.is_deleted() for x in donated]


@program("tree")
def cotangents_of_numbers_in_containers(lib, mode):
    def make():
        return lib.Dict(held=lib.data({"lr": 0.5, "n": [None]}), w=lib.Param(jnp.ones(1)))

    step = lambda m, x: m.held["lr"] * m.w[...].sum() * x
    rule = lib.custom_vjp(step, **mode)

    def backward(residual, g):
        return jax.tree.map(lambda v: 0 * v + 7.0, residual[0]), 3 * g

    rule.defvjp(lambda m, x: (rule(m, x), (m, x)), backward)
    out, pull = lib.vjp(step, make(), 2.0, **mode)
    found = [pull(1.0), lib.grad(rule, argnums=(0, 1), **mode)(make(), 2.0)]
    tangent = jax.tree.map(lambda v: 0 * v + 1.0, make())
    found.append(lib.jvp(step, (make(), 2.0), (tangent, 1.0), **mode))
    # The reference leaves a cotangent that is a number as it is; here it becomes an array.
    return out, [list(map(jnp.asarray, jax.tree.leaves(part))) for part in found]


@program(*PLAIN)
def a_rule_gets_the_cotangents_of_what_is_written(lib, mode):
    out = []
    sevens = lambda residual: jax.tree.map(lambda x: jnp.full_like(x, 7), residual)
    for bwd in (
        lambda seen, residual, g, updates_g: (seen.append((g, updates_g)), sevens(residual))[1],
        lambda seen, residual, g, **more: (seen.append((g, more)), sevens(residual))[1],
    ):

        @lib.custom_vjp(**mode)
        def f(m, x, d):
            m.c[...] += m.w * x
            d["v"][...] = x * 2
            return m.w * x

        seen, m = [], models(lib).Counted()
        x, d = (
            jnp.asarray(3.0),
            {"v": lib.Param(jnp.asarray(2.0)), "u": lib.Param(jnp.asarray(2.0))},
        )
        f.defvjp(lambda m, x, d, f=f: (f(m, x, d), (m, x, d)), functools.partial(bwd, seen))
        loss = lambda m, x, d, f=f: f(m, x, d) + 10 * m.c[...] + 100 * d["v"][...]
        out += [lib.grad(loss, argnums=(0, 1, 2), **mode)(m, x, d), seen, m, d]
    return out


@program(*PLAIN)
def a_nondifferentiated_argument_has_no_updates(lib, mode):
    seen = []

    @lib.custom_vjp(nondiff_argnums=(0,), **mode)
    def f(k, m, x):
        m.c[...] += k
        return m.w * x

    def bwd(k, residual, g, *, updates_g):
        seen.append((k, g, updates_g))
        return jax.tree.map(lambda x: jnp.full_like(x, 7), residual)

    f.defvjp(lambda k, m, x: (f(k, m, x), (m, x)), bwd)
    m = models(lib).Counted()
    loss = lambda m, x: f(2, m, x) + 10 * m.c[...]
    return lib.grad(loss, argnums=(0, 1), **mode)(m, jnp.asarray(3.0)), seen, m


@program()
def scan_that_replaces_a_part_by_one_with_other_settings(lib):
    def part(value, size):
        return lib.Dict(value=lib.Param(jnp.asarray(value)), size=size)

    def body(m, x):
        m.seen[...] += m.part.value * m.part.size
        m.part = part(m.part.value[...] + x, m.part.size + 1)
        return m, m.part.value[...]

    m = lib.Dict(part=part(1.0, 1), seen=lib.Param(jnp.asarray(0.0)))
    before = m.part
    out, ys = lib.scan(body)(m, jnp.arange(1.0, 4.0))
    return out is m, m.part is before, m, m.part.size, before, before.size, ys


@program()
def custom_vjp_cotangents_of_inputs(lib):
    seen = []

    @lib.custom_vjp
    def f(m, x, d):
        m.w[...] = m.w[...] * 2
        return {"y": m.w * x, "v": lib.Param(m.c * 3)}

    def bwd(residual, g):
        seen.append(g)
        (d_m, none, d_d), d_out = g
        return d_m, None, {"m": d_d["m"], "k": None}

    f.defvjp(lambda m, x, d: (f(m, x, d), None), bwd)
    m, other = models(lib).Counted(), models(lib).Counted(1.0, 3.0)

    def loss(m, other):
        out = f(m, 3.0, {"m": other, "k": 2.0})
        return out["y"] + out["v"] * 5 + m.w * 7

    return lib.grad(loss, argnums=(0, 1))(m, other), seen, m


@pytest.mark.parametrize("run", program.found)
def test_a_program_gives_the_same_with_both_libraries(run):
    compare(run)
