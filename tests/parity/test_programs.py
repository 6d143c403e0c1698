"""Whole programs, as people write them, give what they give with the reference.

Each program takes the library under the name `nnx` or `lib`, and returns what it would print or save.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.parity.programs import Programs, attempt, compare, models

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference warns of its own plans

program = Programs()
PLAIN = ("plain", "tree")


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
    x, labels = jax.random.normal(jax.random.key(1), (6, 4, 4, 1)), jnp.arange(6) % 5

    def loss_fn(model, rngs, x):
        logits = model(x, rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), logits

    @nnx.jit
    def train_step(model, optimizer, metrics, rngs, x):
        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, rngs, x)
        metrics.update(loss=loss, logits=logits, labels=labels)
        optimizer.update(model, grads)

    rngs, history = nnx.Rngs(0), []
    model.train()
    for _ in range(2):
        train_step(model, optimizer, metrics, rngs, x)
        history.append(metrics.compute())
        metrics.reset()
    model.eval()
    flags = model.norm.use_running_average, model.dropout.deterministic
    return history, flags, nnx.state((model, optimizer, metrics, rngs)), model(x)


@program()
def language_model_with_cached_decoding(nnx):
    class LM(nnx.Module):
        def __init__(self, width, length, rngs):
            self.tokens = nnx.Embed(11, width, rngs=rngs)
            self.places = nnx.Embed(length, width, rngs=rngs)
            self.norm = nnx.LayerNorm(width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                num_heads=2, in_features=width, dropout_rate=0.1, decode=False, rngs=rngs
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

    model, tokens = LM(4, 4, nnx.Rngs(0, dropout=1)), jnp.array([[1, 2, 3, 4]])
    modeless = attempt(lambda: model(tokens))
    model.train()
    noisy = model(tokens)
    model.eval()
    whole = model(tokens)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.MultiHeadAttention):
            module.init_cache((1, 4, 4))
    decode = nnx.jit(lambda model, token: model(token, decode=True))
    parts = [decode(model, tokens[:, i : i + 1]) for i in range(4)]
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, rtol=1e-4, atol=1e-5)
    return noisy, whole, parts, nnx.state(model), modeless


# Contexts ----------------------------------------------------------------------------------------


@program()
def variables_as_roots_in_contexts(lib):
    v = lib.Param(jnp.arange(3.0))

    @jax.jit
    def double(*parts):
        with lib.merge_context("step", inner=True) as ctx:
            inside = ctx.unflatten(*parts)
        inside[...] = 2 * inside[...]
        with lib.split_context("step") as ctx:
            return ctx.flatten(inside)

    with lib.update_context("step"):
        with lib.split_context("step") as ctx:
            parts = ctx.flatten(v)
        parts = double(*parts)
        with lib.merge_context("step", inner=False) as ctx:
            return ctx.unflatten(*parts) is v, v[...]


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


# Partial functions, rules and scans ---------------------------------------------------------------


@program("tree", "plain")
def numbers_count_the_arguments_of_a_partial_as_one(lib, mode):
    m, X = models(lib).Counted(), jnp.ones(2)
    out = []
    for given in ((m,), (m, X)):
        partial = lib.jit_partial(
            lambda m, *args: m(args[0] * args[-2]) + args[-1], *given, static_argnums=1, **mode
        )
        out += [partial(2, X), partial.lower(3, X).compile()(X), m]
    donated = [X + i for i in range(4)]
    add = lambda *xs: [x + 1 for x in xs]
    lib.jit_partial(add, *donated[:2], donate_argnums=(0, 2), **mode)(*donated[2:])
    return out, [x.is_deleted() for x in donated]


@program("tree")
def cotangents_of_numbers_in_containers(lib, mode):
    def make():
        return lib.Dict(held=lib.data({"lr": 0.5, "n": [None]}), w=lib.Param(jnp.ones(1)))

    step = lambda m, x: m.held["lr"] * m.w[...].sum() * x
    out, pull = lib.vjp(step, make(), 2.0, **mode)
    tangent = jax.tree.map(lambda v: 0 * v + 1.0, make())
    found = [pull(1.0), lib.jvp(step, (make(), 2.0), (tangent, 1.0), **mode)]
    # The reference leaves a cotangent that is a number as it is; here it becomes an array.
    return out, [list(map(jnp.asarray, jax.tree.leaves(part))) for part in found]


@program(*PLAIN)
def a_rule_gets_the_cotangents_of_what_is_written(lib, mode):
    """By name or with what else there is; a number that is not differentiated has none."""
    out, seen = [], []
    sevens = lambda residual: jax.tree.map(lambda x: jnp.full_like(x, 7), residual)
    for bwd in (
        lambda k, residual, g, updates_g: (seen.append((k, g, updates_g)), sevens(residual))[1],
        lambda k, residual, g, **more: (seen.append((k, g, more)), sevens(residual))[1],
    ):

        @lib.custom_vjp(nondiff_argnums=(0,), **mode)
        def f(k, m, x, d):
            m.c[...] += k * m.w * x
            d["v"][...] = x * 2
            return m.w * x

        m, x = models(lib).Counted(), jnp.asarray(3.0)
        d = {"v": lib.Param(jnp.asarray(2.0)), "u": lib.Param(jnp.asarray(2.0))}
        f.defvjp(lambda k, m, x, d, f=f: (f(k, m, x, d), (m, x, d)), bwd)
        loss = lambda m, x, d, f=f: f(2, m, x, d) + 10 * m.c[...] + 100 * d["v"][...]
        out += [lib.grad(loss, argnums=(0, 1, 2), **mode)(m, x, d), m, d]
    return out, seen


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


@pytest.mark.parametrize("run", program.found)
def test_a_program_gives_the_same_with_both_libraries(run):
    compare(run)
