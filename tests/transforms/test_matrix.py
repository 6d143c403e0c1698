"""A catalogue of stateful models, through every transform and every pair of transforms.

A transform is written twice: for a function `f(model, x)` that changes the model, and for the same
function by hand, `g(p, s, x)` with parameters and other values in dicts, under JAX's own transform.
Both forms keep their signature, so that transforms can be put into each other.  What must agree:
values (gradients are among them), the state that is left, the structure that plain Python leaves,
the identity of every object that was there, and how often the Python function runs.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.transforms.models import (
    CATALOGUE,
    EACH,
    Medley,
    assert_close,
    by_path,
    objects_by_path,
    snapshot,
)

X = jnp.array([[1.0, 2.0], [0.5, -1.0], [-1.0, 0.25]])
OTHER = nnx.Not(nnx.Param)


def total(tree):
    """The sum of the means of all leaves."""
    return sum((leaf.mean() for leaf in jax.tree.leaves(tree)), jnp.array(0.0))


def scaled(f):
    return lambda m, x: f(m, 2 * x)


def scaled_by_hand(g):
    return lambda p, s, x: g(p, s, 2 * x)


# Each transform: for models, and by hand ----------------------------------------------------------


def value_and_grad(f):
    def loss(m, x):
        y = f(m, x)
        return y.sum(), y * 2

    def run(m, x):
        (value, aux), (d_m, d_x) = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(m, x)
        return value + aux + d_x + total(nnx.state(d_m, nnx.Param))

    return run


def value_and_grad_by_hand(g):
    def run(p, s, x):
        def loss(p, x):
            y, s_new = g(p, s, x)
            return y.sum(), (y * 2, s_new)

        both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (value, (aux, s_new)), (d_p, d_x) = both(p, x)
        return value + aux + d_x + total(d_p), s_new

    return run


def vjp(f):
    def run(m, x):
        y, pull = nnx.vjp(f, m, x)
        d_m, d_x = pull(jnp.cos(y))
        return d_x + total(nnx.state(d_m, nnx.Param))

    return run


def vjp_by_hand(g):
    def run(p, s, x):
        y, pull, s_new = jax.vjp(lambda p, x: g(p, s, x), p, x, has_aux=True)
        d_p, d_x = pull(jnp.cos(y))
        return d_x + total(d_p), s_new

    return run


def jvp(f):
    def run(m, x):
        along = jax.tree.map(jnp.ones_like, nnx.state(m, nnx.Param))
        y, dy = nnx.jvp(f, (m, x), (along, jnp.ones_like(x)))
        return y + dy

    return run


def jvp_by_hand(g):
    def run(p, s, x):
        along = jax.tree.map(jnp.ones_like, (p, x))
        y, dy, s_new = jax.jvp(lambda p, x: g(p, s, x), (p, x), along, has_aux=True)
        return y + dy, s_new

    return run


def vmap(f):
    """Two lanes with states of their own; afterwards the model has the state of the first."""

    def run(m, x):
        for v in others(m):
            v.value = stacked(v.get_raw_value())
        axes = nnx.StateAxes({nnx.Param: None, ...: 0})
        y = nnx.vmap(f, in_axes=(axes, 0))(m, lanes(x))
        for v in others(m):
            v.value = v.get_raw_value()[0]
        return y.sum(0)

    return run


def vmap_by_hand(g):
    def run(p, s, x):
        y, s_new = jax.vmap(g, in_axes=(None, 0, 0))(p, jax.tree.map(stacked, s), lanes(x))
        return y.sum(0), jax.tree.map(lambda v: v[0], s_new)

    return run


def variables(m):
    return [node for _, node in nnx.iter_graph(m) if isinstance(node, nnx.Variable)]


def others(m):
    return [v for v in variables(m) if not isinstance(v, nnx.Param)]


def stacked(value):
    return jnp.stack([value, value])


def lanes(x):
    return jnp.stack([x, 3 * x])


def must_hold(found, expected):
    """Assert that an object has the Variables of another, without code that changes when traced."""
    pairs = zip(variables(found), variables(expected), strict=True)
    if not all(one is other for one, other in pairs):
        raise AssertionError(f"{found!r} does not have the Variables of {expected!r}")


def scan(lib, step, start):
    f, ks = lambda carry, k: (step(carry, k), None), jnp.array([1.0, 0.5])
    return (lib.scan(f)(start, ks) if lib is nnx else lib.scan(f, start, ks))[0]


def while_loop(lib, step, start):
    body = lambda carry: (carry[0] + 1, step(carry[1], 1.0))
    return lib.while_loop(lambda carry: carry[0] < 2, body, (0, start))[1]


def fori_loop(lib, step, start):
    return lib.fori_loop(0, 2, lambda i, carry: step(carry, 1 / (1 + i)), start)


def looped(loop):
    def ours(f):
        def run(m, x):
            same, y = loop(nnx, lambda carry, k: (carry[0], f(carry[0], k * carry[1])), (m, x))
            must_hold(same, m)
            return y

        return run

    return ours


def looped_by_hand(loop):
    def by_hand(g):
        def run(p, s, x):
            s, y = loop(jax.lax, lambda carry, k: g(p, carry[0], k * carry[1])[::-1], (s, x))
            return y, s

        return run

    return by_hand


def cond(f):
    return lambda m, x: nnx.cond(x.sum() > 100, scaled(f), f, m, x)


def cond_by_hand(g):
    return lambda p, s, x: jax.lax.cond(x.sum() > 100, scaled_by_hand(g), g, p, s, x)


def switch(f):
    return lambda m, x: nnx.switch(1 + (x.sum() > 100), [f, scaled(f), f], m, x)


def switch_by_hand(g):
    branches = [g, scaled_by_hand(g), g]
    return lambda p, s, x: jax.lax.switch(1 + (x.sum() > 100), branches, p, s, x)


class Transform(tp.NamedTuple):
    """A transform in both forms.

    Attributes:
        ours, by_hand: from a function to a function of the same signature.
        loops: the structure must be there before: the function runs several times in one trace.
        once: Python runs once for equal arguments.
        reverse: there is a derivative in reverse.
    """

    ours: tp.Callable[..., tp.Any]
    by_hand: tp.Callable[..., tp.Any]
    loops: bool = False
    once: bool = False
    reverse: bool = True


TRANSFORMS = {
    "jit": Transform(nnx.jit, jax.jit, once=True),
    "value_and_grad": Transform(value_and_grad, value_and_grad_by_hand),
    "vjp": Transform(vjp, vjp_by_hand),
    "jvp": Transform(jvp, jvp_by_hand),
    "remat": Transform(nnx.remat, jax.checkpoint),
    "vmap": Transform(vmap, vmap_by_hand),
    "scan": Transform(looped(scan), looped_by_hand(scan), loops=True),
    "while_loop": Transform(
        looped(while_loop), looped_by_hand(while_loop), loops=True, reverse=False
    ),
    "fori_loop": Transform(looped(fori_loop), looped_by_hand(fori_loop), loops=True),
    "cond": Transform(cond, cond_by_hand),
    "switch": Transform(switch, switch_by_hand),
}
REVERSE = {"value_and_grad", "vjp"}


# The law ------------------------------------------------------------------------------------------


def counted(calls):
    def call(m, x):
        calls.append(None)
        return m(x)

    return call


def check(cls, warm, chain):
    """Run a model through transforms, the last one innermost, and compare everything."""

    def make():
        model = cls()
        if warm:
            model(X)
        return model

    calls: list[None] = []
    ours, by_hand = counted(calls), cls.pure
    for transform in reversed(chain):
        ours, by_hand = transform.ours(ours), transform.by_hand(by_hand)

    model, plain = make(), make()
    plain(X)
    before = objects_by_path(model)
    params, rest = by_path(model, nnx.Param), by_path(model, OTHER)
    with jax.disable_jit():  # the same values, without a program to compile
        expected, rest_after = by_hand(params, rest, X)
    y = ours(model, X)

    assert_close(y, expected, 1e-5)
    assert_close(without_keys(by_path(model)), without_keys({**params, **rest, **rest_after}))
    assert nnx.graphdef(model) == nnx.graphdef(plain)
    after = objects_by_path(model)
    assert all(after[path] is node for path, node in before.items())
    assert not any(isinstance(v, jax.core.Tracer) for v in by_path(model).values())

    if chain[0].once:
        runs = len(calls)
        ours(make(), X)
        assert len(calls) == runs


def without_keys(values):
    return {
        k: jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v
        for k, v in values.items()
    }


SINGLE = [
    (transform, name)
    for i, transform in enumerate(TRANSFORMS)
    for j, name in enumerate(CATALOGUE)
    if name == "medley" or (i + j) % 2
]
"""The medley through every transform, and half of the rest, as on a chessboard."""


@pytest.mark.parametrize(("transform", "name"), SINGLE)
def test_every_model_through_every_transform(name, transform):
    transform, cls = TRANSFORMS[transform], CATALOGUE[name]
    grows = cls is Medley and transform.loops  # in its first call, which a loop refuses
    check(cls, grows, [transform])
    if not grows:
        return
    model = cls()
    before = snapshot(model)
    with pytest.raises((TypeError, ValueError), match="carry"):
        transform.ours(lambda m, x: m(x))(model, X)
    assert snapshot(model) == before


@pytest.mark.parametrize("transform", [*TRANSFORMS][::2])
def test_the_same_without_graph_updates(transform):
    with nnx.set_graph_updates(False):
        check(CATALOGUE["norm"], False, [TRANSFORMS[transform]])


def allowed(outer, inner):
    """Whether JAX can: no derivative in reverse of `while_loop`."""
    return not (outer in REVERSE and not TRANSFORMS[inner].reverse)


PAIRS = [(a, b) for a in TRANSFORMS for b in TRANSFORMS if allowed(a, b)][::5]
"""A fifth of them, with each transform outside and inside; `laws/machine.py` draws others."""


@pytest.mark.parametrize(
    ("name", "outer", "inner"),
    [
        ("norm", "jit", "value_and_grad"),
        ("drop", "value_and_grad", "scan"),
        ("norm", "scan", "vmap"),
    ],
)
def test_statistics_and_dropout_through_pairs(name, outer, inner):
    check(CATALOGUE[name], False, [TRANSFORMS[outer], TRANSFORMS[inner]])


@pytest.mark.parametrize("outer, inner", PAIRS)
def test_pairs_of_transforms(outer, inner):
    chain = [TRANSFORMS[outer], TRANSFORMS[inner]]
    check(Medley, any(t.loops for t in chain), chain)


def test_calls_of_the_same_arguments_are_kept_apart():
    """Equal static sides are one object, so what each transform adds to them must differ."""

    def run(name):
        return str(EACH[name](lambda m: m.w * 2.0)(nnx.Dict(w=nnx.Param(jnp.float32(2)))))

    first = {name: run(name) for name in EACH}
    assert float(first["vmap"]) == 4.0
    for name in reversed(EACH):
        assert run(name) == first[name]
