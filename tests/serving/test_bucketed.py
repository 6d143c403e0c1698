"""Batches of any size through programs of a few sizes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx

X = np.arange(40, dtype=np.float32).reshape(20, 2)


@pytest.mark.quick
def test_a_known_number_of_programs():
    model, traced = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), []

    @nnx.jit
    def predict(model, x):
        traced.append(x.shape[0])
        return {"y": model(x), "z": (x.sum(-1),)}

    call = nnx.bucketed(predict, sizes=(8, 1, 4))
    assert repr(call).endswith("predict, sizes=(1, 4, 8))")
    whole = np.asarray(model(X))
    for rows in (1, 2, 3, 4, 5, 8, 9, 13, 20):
        out = call(model, X[:rows])
        assert isinstance(out["y"], np.ndarray) and out["y"].shape == (rows, 3)
        np.testing.assert_allclose(out["y"], whole[:rows], rtol=1e-5)
        np.testing.assert_array_equal(out["z"][0], X[:rows].sum(-1))
    assert sorted(traced) == [1, 4, 8] and predict.cache_info().programs == 3
    assert call.calls == {1: 2, 4: 4, 8: 7}


def test_all_kinds_of_functions():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    expected = np.asarray(model(X[:3]))
    calls = [
        nnx.bucketed(model, (2, 4)),
        nnx.bucketed(model.__call__, (2, 4)),
        nnx.bucketed(jax.jit(lambda x: x @ model.kernel[...] + model.bias[...]), (2, 4)),
        nnx.bucketed(nnx.export(model, X, shapes="b, 2"), (2, 4)),
    ]
    for call in calls:
        np.testing.assert_allclose(call(X[:3]), expected, rtol=1e-5)
    assert repr(calls[0]) == repr(calls[3]) == "bucketed(Linear, sizes=(2, 4))"
    model.kernel[...] = jnp.zeros((2, 3))
    assert not calls[0](X[:3]).any()  # the model as it is now


def test_warm_up_compiles_everything():
    exported = nnx.export(lambda x: 2 * x, X, shapes="b, 2")
    call = nnx.bucketed(exported, (1, 4, 16))
    call.warm_up(X[:2])
    assert exported.num_programs == 3 and sum(call.calls.values()) == 0
    for rows in range(1, 20):
        np.testing.assert_array_equal(call(X[:rows]), 2 * X[:rows])
    assert exported.num_programs == 3


def test_axis_and_arguments_that_have_no_rows():
    call = nnx.bucketed(lambda a, w: jnp.einsum("ib,ij->jb", a, w), (4,), axis=1, batched=0)
    a, w = X[:6].reshape(2, 6), np.ones((2, 5), np.float32)
    np.testing.assert_allclose(call(a, w), w.T @ a, rtol=1e-6)
    assert call.calls == {4: 2}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nnx.bucketed(jnp.sin, ()), r"sizes must be whole numbers from 1 up; got \(\)"),
        (
            lambda: nnx.bucketed(jnp.sin, (0, 2)),
            r"sizes must be whole numbers from 1 up; got \(0, 2",
        ),
        (
            lambda: nnx.bucketed(jnp.sin, (2,), larger="cut"),
            "larger must be 'split' or 'refuse', not",
        ),
        (
            lambda: nnx.bucketed(jnp.sin, (2,), axis=-1),
            "axis must be counted from the front; got -1",
        ),
        (
            lambda: nnx.bucketed(abs, (2, 4), larger="refuse")(X),
            r"bucketed abs takes at most 4 rows \(its sizes are \(2, 4\)\); got 20",
        ),
        (lambda: nnx.bucketed(abs, (4,))(X[:0]), "bucketed abs got a batch without rows"),
        (lambda: nnx.bucketed(abs, (4,))(), "bucketed abs needs one number of rows; got no argum"),
        (
            lambda: nnx.bucketed(jnp.add, (4,))(X, 1.0),
            r"bucketed ufunc: argument 1 has no axis 0 for rows: float of shape \(\)\. Name the arg",
        ),
        (
            lambda: nnx.bucketed(lambda d: d["a"], (4,))({"a": X, "b": X[:3]}),
            r"one number of rows; got 20 in argument 0\['a'\], 3 in argument 0\['b'\]",
        ),
        (
            lambda: nnx.bucketed(lambda x: {"mean": x.mean(0)}, (4,))(X[:3]),
            r"the result\['mean'\] has shape \(2,\), without the 4 rows of the padded batch on axis 0",
        ),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
