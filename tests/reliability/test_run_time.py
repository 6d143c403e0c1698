"""Calls that fail while they run on the device leave the objects as they were.

A call that donates has given the arrays away by then: its error says which.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx

every_donation = pytest.mark.parametrize(
    "options", [{}, {"donate": "written"}, {"donate_argnums": 0}], ids=str
)
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def made():
    return nnx.Dict(weight=nnx.Param(jnp.ones(3)), count=nnx.Variable(jnp.zeros(())))


def refuse(refused):
    if refused:
        raise ValueError("on purpose")
    return np.float32(0)


def debug(refused):
    jax.debug.callback(refuse, refused, ordered=True)
    return 0.0


CALLBACKS = {
    "pure": lambda refused: jax.pure_callback(refuse, SCALAR, refused),
    "ordered": lambda refused: jax.experimental.io_callback(refuse, SCALAR, refused, ordered=True),
    "debug": debug,
}


def written(model):
    model.count[...] += 1
    model.weight[...] *= 2


def is_after(model, steps):
    weight, count = np.asarray(model.weight[...]), np.asarray(model.count[...])
    return bool((weight == 2.0**steps).all() and count == steps)


def restored_where_donated(error, model, steps, donates):
    """Check what a failed call has left, and make it what it was before."""
    notes = "".join(getattr(error, "__notes__", []))
    if donates:
        assert "'model.weight'" in notes or "'model.count'" in notes
        assert "gone" in notes and "checkpoint" in notes
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(model.weight.get_value())
        model.weight.set_value(jnp.full(3, 2.0**steps))
        model.count.set_value(jnp.float32(steps))
    else:
        assert "gone" not in notes
    assert is_after(model, steps)


@pytest.mark.parametrize("callback", CALLBACKS)
@every_donation
def test_a_callback_that_raises_leaves_all_as_it_was(callback, options):
    @nnx.jit(**options)
    def step(model, refused):
        written(model)
        model.count[...] += CALLBACKS[callback](refused)

    model = made()
    parts = [model.weight, model.count]
    step(model, False)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="on purpose") as caught:
        step(model, True)
    restored_where_donated(caught.value, model, 1, bool(options))
    step(model, False)
    assert is_after(model, 2) and parts[0] is model.weight and parts[1] is model.count


@every_donation
def test_without_enough_memory_all_stays_as_it_was(options):
    @nnx.jit(static_argnums=1, **options)
    def step(model, size):
        written(model)
        model.large = nnx.Variable(jnp.ones((size, 1 << 20)) * model.count)

    model = made()
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        step(model, 1 << 26)  # 256 TiB
    restored_where_donated(caught.value, model, 0, bool(options))
    assert not hasattr(model, "large")
    step(model, 1)
    assert is_after(model, 1) and model.large.shape == (1, 1 << 20)


def large(model, x):
    written(model)
    return jnp.broadcast_to(model.count[...], (1 << 26, 1 << 20)).at[0].set(x)


EAGER = {
    "grad": lambda model: nnx.grad(lambda m, x: large(m, x).sum())(model, 1.0),
    "scan": lambda model: nnx.scan(lambda m, x: (m, large(m, x)))(model, jnp.ones(2)),
    "vmap": lambda model: nnx.vmap(large, in_axes=(None, 0))(model, jnp.ones(2)),
    "remat": lambda model: nnx.remat(large)(model, 1.0),
}


@pytest.mark.parametrize("transform", EAGER)
def test_eager_transforms_without_enough_memory_leave_all_as_it_was(transform):
    model = made()
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        EAGER[transform](model)
    assert is_after(model, 0)
    nnx.jit(written)(model)
    assert is_after(model, 1)


@every_donation
def test_a_call_that_makes_a_nan_leaves_all_as_it_was(options):
    @nnx.jit(**options)
    def step(model, x):
        written(model)
        model.count[...] += 0 * jnp.log(x)

    model = made()
    with jax.debug_nans(True):
        step(model, 1.0)
        with pytest.raises(FloatingPointError, match="nan"):
            step(model, -1.0)
        assert is_after(model, 1)
        step(model, 1.0)
    assert is_after(model, 2)


def test_a_filtered_call_that_fails_names_the_arrays_that_are_gone():
    @nnx.filter_jit(donate="all")
    def step(model, refused):
        written(model)
        return CALLBACKS["pure"](refused) + 0 * model.weight[0]

    model = nnx.Dict(weight=nnx.Param(jnp.ones((1, 3))), count=nnx.Variable(jnp.zeros(1)))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="on purpose") as caught:
        step(model, jnp.array([True]))
    (note,) = [note for note in caught.value.__notes__ if "gone" in note]
    assert "model" in note and ("weight" in note or "count" in note)
