"""filter_vmap and filter_pmap: axes leaf by leaf."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlite as nnx

ADD = lambda x, y: x + y


@settings(max_examples=15)
@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=2),
    st.sampled_from([None, 0, 1, -1]),
    st.sampled_from([0, 1, -1]),
)
def test_against_a_loop(shape, in_axis, out_axis):
    size = 3
    x = np.arange(size * np.prod(shape), dtype=np.float32).reshape(size, *shape)
    y = np.arange(size, dtype=np.float32)
    if in_axis is None:
        moved, part = x[0], lambda i: x[0]
    else:
        moved, part = np.moveaxis(x, 0, in_axis), lambda i: x[i]
    f = lambda tree, y, name: {"out": tree["x"] * y + tree["n"], "name": name}
    out = nnx.filter_vmap(
        f, in_axes=({"x": in_axis, "n": None}, 0, None), out_axes={"out": out_axis, "name": None}
    )({"x": jnp.asarray(moved), "n": 2}, jnp.asarray(y), "n")
    expected = np.stack([np.asarray(part(i) * y[i] + 2) for i in range(size)], out_axis)
    np.testing.assert_allclose(out["out"], expected)
    assert out["name"] == "n"


def test_pmap():
    traces = []

    @nnx.filter_pmap(in_axes=(None, 0, None))
    def f(model, x, name):
        traces.append(None)
        return model(x), name

    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    x = jnp.ones((4, 1, 2))
    out, name = f(model, x, "n")
    assert out.shape == (4, 1, 3) and name == "n"
    np.testing.assert_allclose(out[3], model(x[3]), rtol=1e-5)
    f(model, x, "n")
    assert len(traces) == 1
    assert nnx.filter_pmap(ADD, in_axes=(0, True))(jnp.ones(2), 1.0).tolist() == [2, 2]


ONES = jnp.ones(2)


def write(model, x):
    model.n[...] = x


def test_a_module_is_mapped_only_as_an_argument():
    models = nnx.filter_vmap(lambda key: nnx.Linear(2, 3, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 4)
    )
    one = jax.tree.map(lambda leaf: leaf[1], models)
    x = jnp.arange(8.0).reshape(4, 2)
    np.testing.assert_allclose(nnx.filter_vmap(one)(x), one(x), rtol=1e-6)
    each = nnx.filter_vmap(lambda m, x: m(x))(models, x)
    np.testing.assert_allclose(each[1], one(x[1]), rtol=1e-6)
    one.kernel.value = models.kernel.value
    axes = (nnx.PathContains("kernel"), None)
    kernels = nnx.filter_vmap(lambda m, x: m(x), in_axes=axes, out_axes=1)
    assert kernels(one, x).shape == (4, 4, 3)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: nnx.filter_vmap(ADD, in_axes=(0, 0))(jnp.ones(2), "a"), TypeError,
         "cannot interpret argument 'y' as an array, it is of type 'str'"),
        (lambda: nnx.filter_vmap(ADD, in_axes=(0,))(1, 2), ValueError, "1 entries for 2 posit"),
        (lambda: nnx.filter_vmap(ADD, args=(0, 0)), ValueError,
         "filter_vmap takes no args=: use in_"),
        (lambda: nnx.filter_vmap(lambda x: "a", out_axes=0)(jnp.ones(2)), TypeError,
         "out_axes: the leaf at 'result' must be traced"),
        (lambda: nnx.filter_vmap(lambda x: {"a": [x, "s"]}, out_axes={"a": [0, 0]})(jnp.ones(2)),
         TypeError,
         "out_axes: the leaf at 'result.a.1' must be traced, but str 's' is neither an array"),
        (lambda: nnx.filter_vmap(lambda x: {"a": [1.0, x]}, out_axes=None)(jnp.ones(2)), ValueError,
         "output was batched: the result 'a.1' has axis None, and its value differs"),
        (lambda: nnx.filter_vmap(lambda x: [x], out_axes=[lambda x: "a"])(ONES), ValueError,
         "answered 'a' for the leaf at 'result.0'"),
        (lambda: nnx.filter_vmap(ADD, in_axes=lambda x: "a")(ONES, 1), ValueError,
         "answered 'a' for the leaf at 'x'"),
        (lambda: nnx.filter_pmap(ADD, donate="x"), ValueError, "donate='x'"),
        (lambda: nnx.filter_pmap(ADD, donate_argnums=0), ValueError,
         "filter_pmap takes no donate_argnums="),
        (lambda: nnx.filter_vmap(lambda x, y=1: x, in_axes={"x": 0, "y": 0})(ONES), ValueError,
         "in_axes= has a spec for the arguments ['y'], which the call does not give"),
        (lambda: nnx.filter_vmap(lambda x: x, in_axes={"z": 0})(jnp.ones(3)), ValueError,
         "for the arguments ['z'], which the call does not give: "),
    ],
)  # fmt: skip
def test_messages(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert message in str(error.value)


def test_axes_by_name():
    x, y = jnp.arange(2.0), jnp.arange(3.0)
    times = lambda x, y, *, z=1.0: x * y * z
    for mapped in (nnx.filter_vmap, nnx.filter_pmap):
        assert mapped(times, in_axes={"y": None})(x, y).tolist() == [[0, 0, 0], [0, 1, 2]]
        assert mapped(times, in_axes={"x": None})(x[1], y[:2], z=x).tolist() == [0, 1]
        keyword = mapped(times, in_axes={"y": None, "z": None})(x, y=y, z=2.0)
        assert keyword.tolist() == [[0, 0, 0], [0, 2, 4]]

    class Scaled(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.array(2.0))

        def apply(self, x, y):
            return self.scale * x + y

    assert nnx.filter_vmap(Scaled().apply, in_axes={"y": None})(x, 1.0).tolist() == [1, 3]


def test_pmap_with_a_size_alone_and_ahead_of_time():
    ones = nnx.filter_pmap(lambda name: (jnp.ones(2), name), axis_size=4)("n")
    assert ones[0].shape == (4, 2) and ones[1] == "n"
    whole = nnx.filter_pmap(lambda x: 2 * x, in_axes=None, axis_size=2)(jnp.arange(2.0))
    assert whole.tolist() == [[0, 2], [0, 2]]
    model = nnx.Dict(n=nnx.Param(jnp.zeros(2)))
    lowered = nnx.filter_pmap(lambda m, x, k: write(m, k * x)).lower(model, jnp.arange(2.0), 2)
    assert "module" in lowered.as_text() and model.n.value.tolist() == [0, 0]
    run = lowered.compile()
    run(model, jnp.arange(2.0), 2)
    assert model.n.value.tolist() == [0, 2]
    other = "was compiled for arguments of another structure"
    with pytest.raises(TypeError, match=f"{other}: k: 2 -> 3. Lower"):
        run(model, jnp.arange(2.0), 3)
    with pytest.raises(TypeError, match=f"{other}: k: gone. Lower"):
        run(model, jnp.arange(2.0))


def test_pmap_keeps_programs_by_function_and_nothing_else_alive():
    traces = []

    def f(m, x):
        traces.append(None)
        return m.n * x

    models = [nnx.Dict(n=nnx.Param(jnp.ones(2))) for _ in range(3)]
    for model in models:
        assert nnx.filter_pmap(f)(model, jnp.arange(2.0)).tolist() == [0, 1]
        assert nnx.filter_pmap(f, in_axes={"x": 0})(model, jnp.arange(2.0)).tolist() == [0, 1]
    assert len(traces) == 2
    alive = [weakref.ref(m) for m in models]
    del models, model
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
    alive = weakref.ref(f)
    del f
    gc.collect()
    assert alive() is None


def test_an_argument_may_be_returned_and_gets_what_is_new_along_its_axes():
    def add(m, x):
        m.new = nnx.Param(x)
        return m

    for model in (nnx.Dict(), nnx.Dict(a=jnp.ones(2), w=nnx.Param(jnp.ones(2)))):
        assert nnx.filter_vmap(add)(model, jnp.arange(2.0)) is model
        assert model.new.value.tolist() == [0, 1]

    model = nnx.Dict(w=nnx.Param(jnp.ones(2)), mean=nnx.BatchStat(jnp.zeros(3)))
    only_params = nnx.filter_vmap(add, in_axes=(nnx.Param, 0), out_axes=nnx.Param)
    assert only_params(model, jnp.arange(2.0)) is model
    assert (model.new.shape, model.mean.shape) == ((2,), (3,))

    with pytest.raises(
        ValueError,
        match="different out_axes for a shared Param: at 'm.w' it is 0, in the result at 'w' it is None",
    ):
        nnx.filter_vmap(lambda m: m, in_axes=nnx.Param, out_axes=None)(model)


def test_an_object_of_axes_may_have_none():
    model = nnx.Dict(w=nnx.Param(jnp.arange(2.0)), c=nnx.Param(jnp.ones(())))
    axes = nnx.prefix(model, {nnx.PathContains("w"): 0, ...: None}, graph=False)
    run = nnx.filter_vmap(lambda m: m.w + m.c, in_axes=(axes,))
    assert run(model).tolist() == [1.0, 2.0]


def test_filters_choose_the_axes_of_a_result():
    def make(x):
        return nnx.Dict(w=nnx.Param(x), mean=nnx.BatchStat(jnp.zeros(3)))

    made = nnx.filter_vmap(make, out_axes=nnx.Param)(jnp.arange(2.0))
    assert made.w.value.tolist() == [0, 1] and made.mean.shape == (3,)
