"""Exponential moving averages of Variables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx


def make(value=1.0, width=2):
    return nnx.Dict(kernel=nnx.Param(jnp.full(width, value)), mean=nnx.BatchStat(jnp.full(2, 5.0)))


def mixed(n):
    half = jnp.full(2, n, jnp.bfloat16)
    values = {"half": half, "number": jnp.array(n), "table": {"a": n, "b": half}}
    values |= {"flag": jnp.array(n > 3), "key": jax.random.key(n)}
    return nnx.Dict({name: nnx.Param(value) for name, value in values.items()})


def test_integers_flags_and_keys_take_the_latest():
    ema = nnx.EMA(mixed(3), 0.5)
    model = mixed(6)
    ema.update(model)
    found = nnx.to_pure_dict(ema.params)
    assert (found["half"] == 4.5).all() and (found["table"]["b"] == 4.5).all() and found["flag"]
    assert found["table"]["a"] == 6 and ema.apply_to(model).table.value["b"].dtype == jnp.bfloat16
    assert found["number"] == 6 and found["number"].dtype == jnp.int32
    assert found["key"] == jax.random.key(6)
    assert found["key"] is not model.key.value and found["number"] is not model.number.value


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32", "complex64"])
def test_an_average_in_low_precision_does_not_stall(dtype):
    """In bfloat16, a decay of 0.999 stopped at half of the way."""
    model = nnx.Dict(w=nnx.Param(jnp.zeros(2, dtype)))
    ema = nnx.EMA(model, 0.999)
    model.w[...] = jnp.ones(2, dtype)

    @nnx.jit
    def update(ema, model):
        for _ in range(100):
            ema.update(model)

    for _ in range(30):
        update(ema, model)
    wide = jnp.dtype("complex64" if dtype == "complex64" else "float32")
    assert ema.params.w.dtype == wide
    np.testing.assert_allclose(ema.params.w[...], 1 - 0.999**3000, rtol=1e-4)
    averaged = ema.apply_to(model)
    assert averaged.w.dtype == model.w.dtype == dtype and type(averaged.w) is nnx.Param
    np.testing.assert_array_equal(averaged.w[...], ema.params.w[...].astype(dtype))
    assert (averaged.w is ema.params.w) == (dtype == wide)


def test_shared_variables_are_averaged_once():
    model = nnx.Dict(a=nnx.Param(jnp.ones(1)))
    model.b = model.a
    ema = nnx.EMA(model, 0.5)
    assert list(ema.params) == ["a"]
    averaged = ema.apply_to(model)
    assert averaged.a is averaged.b
    with pytest.raises(ValueError, match="graph"):
        nnx.EMA(model, 0.5, graph=False)


def test_law_7_another_structure_or_shape_is_refused_before_any_change():
    ema = nnx.EMA(make(), 0.5, only=nnx.Param)
    other = nnx.Dict(weights=nnx.Param(jnp.zeros(2)))
    expected = "missing from the update: kernel; not among the averaged Variables: weights"
    with pytest.raises(ValueError, match=expected):
        ema.update(other)
    with pytest.raises(ValueError, match="missing from the model: kernel"):
        ema.apply_to(other)
    for call, name in ((ema.update, "update"), (ema.apply_to, "model")):
        with pytest.raises(ValueError, match=rf"kernel: {name} float32\[7\], average float32\[2\]"):
            call(make(width=7))
    assert (ema.params["kernel"].value == 1).all()


def test_bare_arrays_are_refused_with_the_remedy():
    model = nnx.Dict(inner=nnx.Dict(table=jnp.ones(2)))
    with pytest.raises(TypeError, match="leaf at inner.table is not one: float32.*only=nnx.Param"):
        nnx.EMA(model, 0.5)


@pytest.mark.parametrize("whole", [False, True], ids=["model", "state of the whole model"])
def test_averages_are_updated_inside_jit_also_with_a_traced_decay(whole):
    model = make(3.0)
    ema = nnx.EMA(make(1.0), 0.5, only=nnx.Param)

    @nnx.jit
    def step(ema, model, decay):
        ema.update(nnx.state(model) if whole else model)
        other = nnx.EMA(nnx.Param(jnp.ones(2)), decay)
        other.update(nnx.Param(jnp.full(2, 3.0)))
        return ema.apply_to(model).kernel.value, other.params.value

    assert all((x == 2).all() for x in step(ema, model, 0.5))
    assert (ema.params["kernel"].value == 2).all()


@pytest.mark.parametrize("bad", [True, -0.1, 2])
def test_decay_is_a_number_between_0_and_1(bad):
    message = rf"decay must be (a number )?between 0 and 1, got {bad}"
    with pytest.raises(TypeError if bad is True else ValueError, match=message):
        nnx.EMA(make(), bad)
