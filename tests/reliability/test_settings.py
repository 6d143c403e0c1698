"""Settings of JAX and dying objects: the same results."""

import contextlib
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx

SAME_RESULTS = {
    "disable_jit": jax.disable_jit,
    "checking_leaks": jax.checking_leaks,
    "debug_nans": functools.partial(jax.debug_nans, True),
    "debug_infs": functools.partial(jax.debug_infs, True),
    "enable_checks": functools.partial(jax.enable_checks, True),
    "strict_promotion": functools.partial(jax.numpy_dtype_promotion, "strict"),
    "no_implicit_transfers": functools.partial(jax.transfer_guard, "disallow"),
}
SETTINGS = SAME_RESULTS | {
    "x64": functools.partial(jax.enable_x64, True),
    "matmul_precision": functools.partial(jax.default_matmul_precision, "highest"),
    "rank_promotion": functools.partial(jax.numpy_rank_promotion, "raise"),
    "threefry": functools.partial(jax.threefry_partitionable, False),
    "prng": functools.partial(jax.default_prng_impl, "rbg"),
    "device": lambda: jax.default_device(jax.devices()[-1]),
}


class Net(nnx.Module):
    """Sharing, a stream, statistics, and a structure that each step changes."""

    def __init__(self):
        self.first = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.tied = [self.first.kernel]
        self.rngs = nnx.Rngs(1)
        self.seen = nnx.List([])

    def __call__(self, x):
        self.seen.append(nnx.BatchStat(self.first(x)))
        noise = jax.random.normal(self.rngs(), x.shape) + jax.random.uniform(jax.random.key(0))
        return (self.first(x) * noise).sum()


def step_of(transform):

    def step(model, x):
        y = model(x)
        model.first.bias[...] -= y.astype(jnp.float32)
        return y

    return TRANSFORMS[transform](step)


TRANSFORMS = {
    "donated": functools.partial(nnx.jit, donate_argnums=0),
    "grad": nnx.value_and_grad,
    "filter_jit": nnx.filter_jit,
}


def assert_same(one, two):
    """Models of one structure, dtypes and (to rounding) values, without tracers."""
    (graphdef, state), (same, other) = nnx.split(one), nnx.split(two)
    assert graphdef == same
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        assert isinstance(x, jax.Array) and x.dtype == y.dtype
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


CASES = [(transform, name) for transform in TRANSFORMS for name in SETTINGS]


@pytest.mark.parametrize(
    ("transform", "name"), [case for case in CASES if case != ("grad", "no_implicit_transfers")]
)
def test_nothing_cached_under_one_setting_serves_another(transform, name):
    """A function that has seen a setting does what a new one does, and one that never saw it.

    Without jit nothing is donated: an array may be in two places then.
    """
    x = jnp.ones((1, 2))
    old, new, step = Net(), Net(), step_of(transform)
    for number in range(3):
        setting = SETTINGS[name] if number == 1 else contextlib.nullcontext
        outside = contextlib.nullcontext if name in SAME_RESULTS else setting
        outcomes = []
        for scope, fun, model in ((setting, step, old), (outside, step_of(transform), new)):
            with scope():
                try:
                    outcomes.append(jax.tree.map(np.asarray, fun(model, x)))
                except ValueError as error:  # of ranks that are promoted
                    outcomes.append(type(error))
        assert str(outcomes[0]) == str(outcomes[1])
        assert_same(old, new)


@pytest.mark.parametrize("donate", [{}, {"donate": "written"}])
def test_what_a_call_drops_dies_and_the_rest_is_right(donate):
    """Finalizers of what dies during the write-back use and edit the objects that are written."""
    seen = []

    def end(model):
        nnx.split(model)
        model.ended = nnx.Variable(jnp.int32(len(seen)))
        seen.append(float(model.kept[...]))

    @nnx.jit(**donate)
    def step(model):
        model.kept[...] += 1
        model.items.pop()
        model.part = nnx.Dict(weight=nnx.Param(model.kept[...] * 2))

    model, died = nnx.Dict(kept=nnx.Variable(jnp.zeros(()))), []
    for number in range(3):
        model.part = nnx.Dict(weight=nnx.Param(jnp.ones(2)))
        model.part.me = model.part
        model.items = nnx.List([nnx.Variable(jnp.ones(1)), nnx.Variable(jnp.ones(1))])
        for dying in (model.part, model.items[1]):
            weakref.finalize(dying, end, model)
            died.append(weakref.ref(dying))
        del dying
        step(model)
        gc.collect()
        assert not any(ref() for ref in died) and len(seen) == len(died) == 2 * (number + 1)
        assert float(model.kept[...]) == number + 1 and len(model.items) == 1
        assert float(model.part.weight[...]) == 2 * (number + 1)
        assert int(model.ended[...]) == len(seen) - 1
    assert set(seen) <= {0.0, 1.0, 2.0, 3.0}
