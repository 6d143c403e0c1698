"""Small stateful models that the tests of transforms share."""

import collections
import contextlib

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest

import nnxlite as nnx


class Counted(nnx.Module):
    """`w * x * count`, where every call counts."""

    def __init__(self):
        self.w = nnx.Param(jnp.array([1.0, 2.0]))
        self.count = nnx.BatchStat(jnp.array(3.0))

    def __call__(self, x):
        self.count[...] += 1
        return self.w * x * self.count


class Foo(nnx.Module):
    """Two parameters and a statistic."""

    def __init__(self, x=1.0, y=2.0):
        self.x = nnx.Param(jnp.array(x))
        self.y = nnx.Param(jnp.array(y))
        self.n = nnx.BatchStat(jnp.array(0.0))


class Tied(nnx.Module):
    """One parameter under two names, and a way back to the owner."""

    def __init__(self):
        self.a = nnx.Param(jnp.array([1.0, -2.0]))
        self.b = self.a
        self.child = nnx.Dict(owner=self, leaf=self.a)

    def __call__(self, x):
        return (jnp.sin(self.a) * self.b + self.child.leaf) * x


def values(tree):
    """Leaves of a pytree of Variables, objects and arrays as nested lists."""
    return [jnp.asarray(x).tolist() for x in jax.tree.leaves(tree)]


def snapshot(*objects):
    """What must not change in a failed call: definition and values."""

    def raw(leaf):
        return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf

    return [
        (nnx.graphdef(x), [id(raw(v)) for _, v in nnx.to_flat_state(nnx.state(x))]) for x in objects
    ]


class Medley(nnx.Module):
    """All else in one small call: sharing, a cycle, a count, a cache, intermediates, growth."""

    def __init__(self):
        self.mode = "new"
        self.w = nnx.Param(jnp.array([1.0, -2.0]))
        self.mean = nnx.BatchStat(jnp.zeros(2))
        self.draws = nnx.RngCount(jnp.array(0, jnp.uint32))
        self.child = nnx.Dict(tied=self.w, owner=self, last=nnx.Cache(jnp.ones(2)))

    def __call__(self, x):
        mean = x.mean(0)
        self.mean.value = (self.mean + mean) / 2
        y = jnp.sin(x * self.w + self.child.tied * self.child.last + self.draws)
        self.draws[...] += 1
        self.child.owner.child.last.value = mean
        self.sow(nnx.Intermediate, "h", y, init_fn=lambda: None, reduce_fn=lambda old, new: new)
        if self.mode == "new":
            self.mode = "used"
            self.child.n = nnx.Variable(jnp.array(0.0))
        self.child.n[...] += 1
        return y + self.child.n


@contextlib.contextmanager
def refuses(kind, *texts):
    """The block raises an exception whose message holds all the texts."""
    with pytest.raises(kind) as caught:
        yield caught
    for text in texts:
        assert text in str(caught.value)


# Edits of a Foo, as bodies of loops, branches and other calls -------------------------------------


def edit(name, change):
    """A function that edits a model and returns all its arguments."""

    def run(m, *rest):
        change(m)
        return (m, *rest) if rest else m

    run.__name__ = run.__qualname__ = name
    return run


nothing = edit("nothing", lambda m: None)
sets = edit("sets", lambda m: setattr(m, "extra", 1))
adds = edit("adds", lambda m: setattr(m, "new", nnx.Param(m.x * 1)))
removes = edit("removes", lambda m: delattr(m, "y"))
annotates = edit("annotates", lambda m: m.x.set_metadata(note=1))
reshapes = edit("reshapes", lambda m: m.n.set_value(jnp.ones(3)))
rebinds = edit("rebinds", lambda m: setattr(m, "x", nnx.Param(m.x * 2)))
steps = edit("steps", lambda m: m.n.set_value(m.n + m.x))
fails = edit("fails", lambda m: (adds(m), 1 // 0))


def exchanges(m):
    m.x, m.y = m.y, m.x
    return m


# Every transform ----------------------------------------------------------------------------------


def through_rule(f, **mode):
    g = nnx.custom_vjp(f, **mode)
    g.defvjp(lambda m: (f(m), None), lambda _, y: (None,))
    return g


def through_pmap(f, **mode):
    mapped = nnx.pmap(lambda m, _: f(m), in_axes=(None, 0), **mode)
    return lambda m: mapped(m, jnp.ones(1))[0]


def through_scan(f, **mode):
    return lambda m: nnx.scan(lambda m, _: (m, f(m)), length=1, **mode)(m, None)[1][0]


def through_while(f, **mode):
    start = lambda m: (m, 0.0, 0)
    body = lambda c: (c[0], f(c[0]), c[2] + 1)
    return lambda m: nnx.while_loop(lambda c: c[2] < 1, body, start(m), **mode)[1]


def through_fori(f, **mode):
    return lambda m: nnx.fori_loop(0, 1, lambda i, c: (c[0], f(c[0])), (m, 0.0), **mode)[1]


def through_shards(f, **mode):
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    return nnx.shard_map(f, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), **mode)


EACH = {
    "jit": nnx.jit,
    "jit, donated": lambda f, **mode: nnx.jit(f, donate="written", **mode),
    "jit_partial": lambda f, **mode: lambda m: nnx.jit_partial(f, m, **mode)(),
    "value_and_grad": lambda f, **mode: lambda m: nnx.value_and_grad(f, **mode)(m)[0],
    "vjp": lambda f, **mode: lambda m: nnx.vjp(f, m, **mode)[0],
    "jvp": lambda f, **mode: lambda m: nnx.jvp(f, (m,), (None,), **mode)[0],
    "custom_vjp": through_rule,
    "vmap": lambda f, **mode: lambda m: nnx.vmap(f, in_axes=None, axis_size=1, **mode)(m)[0],
    "pmap": through_pmap,
    "shard_map": through_shards,
    "remat": nnx.remat,
    "scan": through_scan,
    "while_loop": through_while,
    "fori_loop": through_fori,
    "cond": lambda f, **mode: lambda m: nnx.cond(True, f, f, m, **mode),
    "switch": lambda f, **mode: lambda m: nnx.switch(0, [f], m, **mode),
    "checkify": lambda f, **mode: lambda m: nnx.checkify(f, **mode)(m)[1],
    "eval_shape": lambda f, **mode: lambda m: nnx.eval_shape(f, m, **mode),
    "make_jaxpr": nnx.make_jaxpr,
    "cached_partial": lambda f: lambda m: nnx.cached_partial(nnx.jit(f), m)(),
    "filter_jit": nnx.filter_jit,
    "filter_value_and_grad": lambda f: lambda m: nnx.filter_value_and_grad(f)(m)[0],
    "filter_vjp": lambda f: lambda m: nnx.filter_vjp(f, m)[0],
    "filter_jvp": lambda f: lambda m: nnx.filter_jvp(f, (m,), (None,))[0],
    "filter_vmap": lambda f: lambda m: nnx.filter_vmap(f, in_axes=None, axis_size=1)(m)[0],
    "filter_pmap": lambda f: lambda m: nnx.filter_pmap(f, in_axes=None, axis_size=1)(m)[0],
    "filter_checkpoint": nnx.filter_checkpoint,
    "filter_eval_shape": lambda f: lambda m: nnx.filter_eval_shape(f, m),
}  # fmt: skip
"""Every transform of a function of one argument: a function that gives the same number.

`eval_shape` and `make_jaxpr` give no number, and no write. `mode` is `graph=` or `graph_updates=`.
"""

MODAL = [name for name in EACH if not name.startswith(("filter", "cached"))]
"""The transforms that have a mode."""


# What JAX does ------------------------------------------------------------------------------------


@contextlib.contextmanager
def jax_events():
    """What JAX traces, lowers and compiles within the block."""
    seen = collections.Counter()

    def listen(name, _seconds, **_):
        if name.startswith("/jax/core/compile"):
            seen[name] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextlib.contextmanager
def compilations(expected):
    """Within the block XLA compiles as often as told."""
    with jax_events() as seen:
        yield
    assert seen["/jax/core/compile/backend_compile_duration"] == expected
