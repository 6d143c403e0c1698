"""Calls that fail while they run on the device leave the objects as they were.

A call that donates has given the arrays away by then: its error says which.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx

TRANSFORMS = {
    "none": nnx.jit,
    "written": functools.partial(nnx.jit, donate="written"),
    "argument": functools.partial(nnx.jit, donate_argnums=0),
    "all": lambda step, **_: nnx.filter_jit(step, donate="all"),
}
every_donation = pytest.mark.parametrize("donated", TRANSFORMS)
FAILED = (ValueError, jax.errors.JaxRuntimeError)
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
def test_a_callback_that_raises_leaves_all_as_it_was(callback, donated):
    @TRANSFORMS[donated]
    def step(model, refused):
        written(model)
        model.count[...] += CALLBACKS[callback](refused)

    model = made()
    parts = [model.weight, model.count]
    step(model, False)
    with pytest.raises(FAILED, match="on purpose") as caught:
        step(model, True)
    restored_where_donated(caught.value, model, 1, donated != "none")
    step(model, False)
    assert is_after(model, 2) and parts[0] is model.weight and parts[1] is model.count


@every_donation
def test_without_enough_memory_all_stays_as_it_was(donated):
    @functools.partial(TRANSFORMS[donated], static_argnums=1)
    def step(model, size):
        written(model)
        model.large = nnx.Variable(jnp.ones((size, 1 << 20)) * model.count)

    model = made()
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        step(model, 1 << 26)  # 256 TiB
    restored_where_donated(caught.value, model, 0, donated != "none")
    assert not hasattr(model, "large")
    step(model, 1)
    assert is_after(model, 1) and model.large.shape == (1, 1 << 20)


def large(model, x):
    written(model)
    return jnp.broadcast_to(model.count[...], (1 << 26, 1 << 20)).at[0].set(x)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: nnx.grad(lambda m, x: large(m, x).sum())(model, 1.0),
        lambda model: nnx.scan(lambda m, x: (m, large(m, x)))(model, jnp.ones(2)),
        lambda model: nnx.vmap(large, in_axes=(None, 0))(model, jnp.ones(2)),
    ],
    ids=["grad", "scan", "vmap"],
)
def test_eager_transforms_without_enough_memory_leave_all_as_it_was(call):
    model = made()
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        call(model)
    assert is_after(model, 0)
    nnx.jit(written)(model)
    assert is_after(model, 1)


@every_donation
def test_a_call_that_makes_a_nan_leaves_all_as_it_was(donated):
    @TRANSFORMS[donated]
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
