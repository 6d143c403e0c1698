"""A catalogue of stateful models, through every transform and every pair of transforms.

A transform is written twice: for a function `f(model, x)` that changes the model, and by hand, as plain
Python or JAX's own transform, for `g(p, s, x)`, which merges the model of its parameters and other
values, and splits it again.  Both keep their signature, so that they can be put into each other.  What
must agree: values (gradients are among them), the state that is left, the structure that plain Python
leaves, the identity of every object that was there, and how often the Python function runs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.transforms.models import EACH, Medley, snapshot

X = jnp.array([[1.0, 2.0], [0.5, -1.0], [-1.0, 0.25]])
OTHER = nnx.Not(nnx.Param)
CATALOGUE = {
    "norm": lambda: nnx.BatchNorm(2, rngs=nnx.Rngs(0)),
    "drop": lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(1)),
    "medley": Medley,
}


def total(tree):
    """The sum of the means of all leaves."""
    return sum((leaf.mean() for leaf in jax.tree.leaves(tree)), jnp.array(0.0))


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


def scan(step, start):
    return nnx.scan(lambda carry, k: (step(carry, k), None))(start, jnp.array([1.0, 0.5]))[0]


def while_loop(step, start):
    body = lambda carry: (carry[0] + 1, step(carry[1], 1 / (1 + carry[0])))
    return nnx.while_loop(lambda carry: carry[0] < 2, body, (0, start))[1]


def fori_loop(step, start):
    return nnx.fori_loop(0, 2, lambda i, carry: step(carry, 1 / (1 + i)), start)


def looped(loop):
    def ours(f):
        def run(m, x):
            same, y = loop(lambda carry, k: (carry[0], f(carry[0], k * carry[1])), (m, x))
            must_hold(same, m)
            return y

        return run

    return ours


def looped_by_hand(g):
    def run(p, s, x):
        for k in (1.0, 0.5):
            x, s = g(p, s, k * x)
        return x, s

    return run


def other_branch(f):
    return lambda m, x: f(m, 2 * x)


def cond(f):
    return lambda m, x: nnx.cond(x.sum() > 100, other_branch(f), f, m, x)


def switch(f):
    return lambda m, x: nnx.switch(1 + (x.sum() > 100), [other_branch(f), f, other_branch(f)], m, x)


same = lambda g: g
TRANSFORMS = {
    "jit": (nnx.jit, same),
    "value_and_grad": (value_and_grad, value_and_grad_by_hand),
    "vjp": (vjp, vjp_by_hand),
    "jvp": (jvp, jvp_by_hand),
    "remat": (nnx.remat, same),
    "vmap": (vmap, vmap_by_hand),
    "scan": (looped(scan), looped_by_hand),
    "while_loop": (looped(while_loop), looped_by_hand),
    "fori_loop": (looped(fori_loop), looped_by_hand),
    "cond": (cond, same),
    "switch": (switch, same),
}
"""Each transform in both forms: from a function to a function of the same signature."""
LOOPS = {"scan", "while_loop", "fori_loop"}


# The law ------------------------------------------------------------------------------------------


def counted(calls):
    def call(m, x):
        calls.append(None)
        return m(x)

    return call


def merged(graphdef):
    """A model as a function of its parameters and other values, which returns the latter."""

    def g(p, s, x):
        model = nnx.merge(graphdef, p, s, copy=True)
        y = model(x)
        return y, nnx.state(model, OTHER)

    return g


def values_of(*states):
    """The values of States by path, the last one's; a random key as the numbers in it."""
    found = {p: v.get_raw_value() for state in states for p, v in nnx.to_flat_state(state)}
    is_key = lambda v: jnp.issubdtype(v.dtype, jax.dtypes.prng_key)
    return {p: jax.random.key_data(v) if is_key(v) else v for p, v in found.items()}


def objects_by_path(model):
    """Every object and Variable of a model, by path."""
    kinds = nnx.Pytree, nnx.Variable
    return {path: node for path, node in nnx.iter_graph(model) if isinstance(node, kinds)}


def check(cls, *chain):
    """Run a model through transforms, the last one innermost, and compare everything."""

    def make():
        model = cls()
        if cls is Medley and LOOPS & set(chain):
            model(X)  # it grows in its first call, which a loop refuses
        return model

    calls: list[None] = []
    model, plain = make(), make()
    graphdef, params, rest = nnx.split(make(), nnx.Param, ...)
    ours, by_hand = counted(calls), merged(graphdef)
    for name in reversed(chain):
        ours, by_hand = TRANSFORMS[name][0](ours), TRANSFORMS[name][1](by_hand)

    plain(X)
    before = objects_by_path(model)
    with jax.disable_jit():  # the same values, without a program to compile
        expected, rest_after = by_hand(params, rest, X)
    y = ours(model, X)

    found = y, values_of(nnx.state(model))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, found, (expected, values_of(params, rest, rest_after)))
    assert nnx.graphdef(model) == nnx.graphdef(plain)
    after = objects_by_path(model)
    assert all(after[path] is node for path, node in before.items())
    assert not any(isinstance(v, jax.core.Tracer) for v in jax.tree.leaves(nnx.state(model)))

    if chain[0] == "jit":  # Python runs once for equal arguments
        runs = len(calls)
        ours(make(), X)
        assert len(calls) == runs


SINGLE = [
    (transform, name)
    for i, transform in enumerate(TRANSFORMS)
    for j, name in enumerate(CATALOGUE)
    if name == "medley" or (i + j) % 2
]
"""The medley through every transform, and half of the rest, as on a chessboard."""


@pytest.mark.parametrize(("transform", "name"), SINGLE)
def test_every_model_through_every_transform(name, transform):
    check(CATALOGUE[name], transform)


@pytest.mark.parametrize("transform", sorted(LOOPS))
def test_a_model_that_grows_is_refused_by_a_loop(transform):
    model = Medley()
    before = snapshot(model)
    with pytest.raises((TypeError, ValueError), match="carry"):
        TRANSFORMS[transform][0](lambda m, x: m(x))(model, X)
    assert snapshot(model) == before


@pytest.mark.parametrize("transform", [*TRANSFORMS][::2])
def test_the_same_without_graph_updates(transform):
    with nnx.set_graph_updates(False):
        check(CATALOGUE["norm"], transform)


def allowed(outer, inner):
    """Whether JAX can: no derivative in reverse of `while_loop`."""
    return not (outer in {"value_and_grad", "vjp"} and inner == "while_loop")


PAIRS = [(a, b) for a in TRANSFORMS for b in TRANSFORMS if allowed(a, b)][::5]
"""A fifth of them, with each transform outside and inside; `laws/test_machine.py` draws others."""
OTHERS = [
    ("norm", "jit", "value_and_grad"),
    ("drop", "value_and_grad", "scan"),
    ("norm", "scan", "vmap"),
]


@pytest.mark.parametrize(("name", "outer", "inner"), [*OTHERS, *[("medley", *p) for p in PAIRS]])
def test_pairs_of_transforms(name, outer, inner):
    check(CATALOGUE[name], outer, inner)


def test_calls_of_the_same_arguments_are_kept_apart():
    """Equal static sides are one object, so what each transform adds to them must differ."""

    def run(name):
        return str(EACH[name](lambda m: m.w * 2.0)(nnx.Dict(w=nnx.Param(jnp.float32(2)))))

    first = {name: run(name) for name in EACH}
    assert float(first["vmap"]) == 4.0
    for name in reversed(EACH):
        assert run(name) == first[name]
