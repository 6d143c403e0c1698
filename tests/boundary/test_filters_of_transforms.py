"""Filters that are given to a transform: what they see of a Variable, and what they are refused."""

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx


class Model(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.array([1.0, 2.0]), tag="decay")
        self.bias = nnx.Param(jnp.array([3.0, 4.0]))
        self.mean = nnx.BatchStat(jnp.array([5.0, 6.0]))
        self.scale = jnp.array([7.0, 8.0])


def product(m):
    return (m.kernel * m.bias * m.mean * m.scale).sum()


SEEN = {
    "class": (lambda path, x: isinstance(x, nnx.Param), {"kernel", "bias"}),
    "path": (lambda path, x: path[-1] in ("bias", "mean"), {"bias", "mean"}),
    "metadata": (lambda path, x: getattr(x, "tag", None) == "decay", {"kernel"}),
    "get_metadata": (
        lambda path, x: isinstance(x, nnx.Variable) and x.get_metadata("tag", None) is None,
        {"bias", "mean"},
    ),
    "array": (lambda path, x: isinstance(x, jax.Array), {"scale"}),
    "class of arrays": (jax.Array, {"scale"}),
    "string": ("decay", {"kernel"}),
    "several": ((nnx.BatchStat, "decay"), {"kernel", "mean"}),
    "nothing": (nnx.Cache, set()),
}


@pytest.mark.parametrize(("chosen", "names"), SEEN.values(), ids=SEEN)
def test_functions_see_class_path_and_metadata(chosen, names):
    model = Model()
    assert set(nnx.grad(product, argnums=nnx.DiffState(-1, chosen))(model)) == names
    axes, sliced = nnx.StateAxes({chosen: 0, ...: None}), []

    def look(m):
        shapes = {name: jnp.shape(getattr(m, name)[...]) for name in vars(model)}
        sliced.append({name for name, shape in shapes.items() if shape == ()})

    nnx.vmap(look, in_axes=axes, axis_size=2)(model)
    assert sliced == [names]


WITH_FILTER = {
    "vmap": lambda f: nnx.vmap(product, in_axes=nnx.StateAxes({f: 0, ...: None})),
    "scan": lambda f: nnx.scan(product, in_axes=nnx.StateAxes({f: 0, ...: None}), out_axes=0),
    "jit": lambda f: nnx.jit(product, in_shardings=(nnx.StateSharding({f: None, ...: None}),)),
    "grad": lambda f: nnx.grad(product, argnums=nnx.DiffState(0, f)),
}
ASKED = r"(?s)not by the value, and asked for '{}'.*set_metadata"
FAULTY = {
    "value": (lambda path, x: x.get_value().ndim > 1, TypeError, ASKED.format("ndim")),
    "shape": (lambda path, x: len(x.shape) > 1, TypeError, ASKED.format("shape")),
    "dtype": (lambda path, x: getattr(x, "dtype", None) == 1, TypeError, ASKED.format("dtype")),
    "TypeError": (lambda path, x: len(5), TypeError, "has no len"),
    "ValueError": (lambda path, x: int("five"), ValueError, "invalid literal"),
    "AttributeError": (lambda path, x: x.no_such_thing, AttributeError, "no_such_thing"),
    "of an array": (lambda path, x: x.get_raw_value().no, AttributeError, "array has no .*'no'"),
}


@pytest.mark.parametrize("transform", WITH_FILTER)
@pytest.mark.parametrize("name", FAULTY)
def test_a_filter_that_raises_or_asks_for_the_value_is_refused_and_runs_once(transform, name):
    faulty, error, match = FAULTY[name]
    if transform == "grad" and "Error" not in name:
        return  # it takes functions that ask for the value
    calls, model = [], Model()
    before = [x for _, x in nnx.iter_graph(model)]
    with pytest.raises(error, match=match):
        WITH_FILTER[transform](lambda path, x: (calls.append(path), faulty(path, x))[1])(model)
    assert len(calls) == 1
    assert all(x is y for x, (_, y) in zip(before, nnx.iter_graph(model), strict=True))


@pytest.mark.parametrize("chosen", [lambda p, x: x.ndim > 1, lambda p, x: jnp.ndim(x[...]) > 1])
def test_grad_takes_functions_that_ask_for_the_shape(chosen):
    model = Model()
    model.kernel = nnx.Param(jnp.ones((3, 2)))
    grad = nnx.grad(product, argnums=nnx.DiffState(0, chosen))
    assert set(grad(model)) == set(nnx.jit(lambda m: grad(m))(model)) == {"kernel"}
    model.bias.set_value(jnp.ones((3, 2)))  # the structure is the same
    assert set(grad(model)) == {"kernel", "bias"}


def test_an_array_whose_argument_has_a_filter_is_differentiated():
    model, wrt = Model(), nnx.DiffState(0, nnx.BatchStat)
    grads = nnx.grad(lambda pair: product(pair[1]) * pair[0], argnums=wrt)((2.0, model))
    assert float(grads[0]) == float(product(model)) and set(grads[1]) == {"mean"}


def test_grad_takes_functions_that_ask_for_the_value():
    model = Model()
    ones = nnx.DiffState(0, lambda path, x: bool((jnp.asarray(x) == 1).all()))
    grad = nnx.grad(product, argnums=ones)
    assert set(grad(model)) == set()
    model.bias[...] = jnp.ones(2)
    assert set(grad(model)) == {"bias"}


def doubled(variable, value):
    return value * 2


class Doubled(nnx.Param):
    def get_value(self, **kwargs):
        return super().get_value(**kwargs) * 2


def test_filters_that_look_for_metadata_run_no_hook():
    model = nnx.Dict(
        a=nnx.Param(jnp.ones(2), on_get_value=doubled),
        b=Doubled(jnp.ones(2)),
        c=nnx.Param(jnp.ones(2), tag="t"),
    )
    tagged = nnx.WithTag("t")
    grad = nnx.grad(lambda m: (m.a * m.b * m.c).sum(), argnums=nnx.DiffState(0, tagged))
    assert {name: x[...].tolist() for name, x in grad(model).items()} == {"c": [4.0, 4.0]}
    axes = nnx.StateAxes({tagged: 0, ...: None})
    out = nnx.vmap(lambda m: m.a[...] + m.b[...] + m.c[...], in_axes=(axes,))(model)
    assert out.tolist() == [[5.0, 5.0]] * 2


def test_a_state_of_axes_chooses_by_path():
    axes = nnx.StateAxes(nnx.State({"a": {"w": 0, "n": None}, "b": nnx.Variable(0)}))
    same = nnx.StateAxes([(nnx.filterlib.PathIn(("a", "n")), None)])
    assert axes.axes == (None, 0) and len(axes.filters) == 2  # one filter for each axis
    assert axes.filters[:1] == same.filters
    assert [axes.map_prefix(path, nnx.Param(1)) for path in (("a", "w"), ("b",))] == [0, 0]
    with pytest.raises(ValueError, match="No axis found for Param at 'a': none of the filters"):
        axes.map_prefix(("a",), nnx.Param(1))

    w, n = nnx.Param(jnp.arange(3.0)), nnx.BatchStat(jnp.ones(3))
    model = nnx.Dict(a=nnx.Dict(w=w, n=n), b=nnx.Param(jnp.ones(3)))
    found = nnx.vmap(lambda m: m.a.w + m.a.n.sum() + m.b, in_axes=(axes,))(model)
    assert found.tolist() == [4, 5, 6]
    carry, found = nnx.scan(
        lambda c, m: (c + m.b, m.a.n + c), in_axes=(nnx.Carry, axes), out_axes=(nnx.Carry, 0)
    )(0.0, model)
    assert carry == 3 and found.tolist() == [[1] * 3, [2] * 3, [3] * 3]


def test_state_axes_are_a_mapping():
    axes = nnx.StateAxes({nnx.Param: 1, ...: None})
    assert dict(axes) == {nnx.Param: 1, ...: None} and nnx.StateAxes(axes) == axes
    assert list(axes.keys()) == [nnx.Param, ...] and list(axes.values()) == [1, None]
    with pytest.raises(KeyError, match="^'Cache'$"):
        axes["Cache"]
    assert axes.get(nnx.BatchStat, 5) == 5 and list(axes.items())[0] == (nnx.Param, 1)
