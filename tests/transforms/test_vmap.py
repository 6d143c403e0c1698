"""vmap: axes by argument and by Variable, state, sharing, construction, warnings and refusals."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.transforms.models import Block, Foo, Tied, lane, snapshot

MODES = [{}, {"graph_updates": False}, {"graph": False}]


def call(m, x):
    return m(x)


def stack(count=4):
    return nnx.vmap(Block)(nnx.Rngs(0).fork(split=count))


one = nnx.jit(call)


def assert_same(a, b):
    a, b = (dict(nnx.to_flat_state(nnx.state(x))) for x in (a, b))
    assert a.keys() == b.keys()
    for path, variable in a.items():
        x, y = (jnp.asarray(v.get_value()) for v in (variable, b[path]))
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=str(path))


# axes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_stack_runs_as_its_slices_would(mode):
    stacked = stack()
    alone = [lane(stacked, i) for i in range(4)]
    xs = jax.random.normal(jax.random.key(1), (4, 5, 3))
    ys = nnx.jit(nnx.vmap(call, **mode))(stacked, xs)
    for i, m in enumerate(alone):
        np.testing.assert_allclose(ys[i], one(m, xs[i]), rtol=1e-4, atol=1e-5)
        assert_same(lane(stacked, i), m)


def test_axes_by_variable_and_what_is_written_keeps_its_axis():
    m = nnx.Dict(
        w=nnx.Param(jnp.ones((2, 4))), n=nnx.BatchStat(jnp.zeros(4)), k=nnx.Variable(jnp.array(3.0))
    )
    axes = nnx.StateAxes({nnx.Param: 1, "n": 0, nnx.BatchStat: 0, ...: None})

    def f(m, x):
        assert m.w.shape == (2,) and m.n.shape == () and m.k.shape == ()
        m.n[...] += x
        m.w.value = m.w * x
        m.k.value = m.k + 1.0
        return m.w.sum()

    variables = dict(m.items())
    out = nnx.vmap(f, in_axes=(axes, 0))(m, jnp.arange(4.0))
    assert out.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert m.w.value.tolist() == [[0.0, 1.0, 2.0, 3.0]] * 2 and m.n.value.tolist() == [0, 1, 2, 3]
    assert float(m.k.value) == 4.0
    assert all(m[name] is variable for name, variable in variables.items())


def test_a_result_follows_out_axes_by_variable():
    axes = nnx.StateAxes({nnx.Param: 1, nnx.BatchStat: None, ...: 0})

    def make(x):
        return nnx.Dict(w=nnx.Param(x * jnp.ones(2)), n=nnx.BatchStat(5.0), k=nnx.Variable(x))

    out = nnx.vmap(make, out_axes=axes)(jnp.arange(3.0))
    assert out.w.value.tolist() == [[0, 1, 2]] * 2 and out.k.value.tolist() == [0, 1, 2]
    assert float(out.n.value) == 5.0


def test_names_and_sizes_of_the_axis():
    m = Foo(2.0)
    total = nnx.vmap(
        lambda m, x: jax.lax.psum(m.x * x, "i"), in_axes=(None, 0), out_axes=None, axis_name="i"
    )
    assert float(total(m, jnp.arange(4.0))) == 12.0
    sized = nnx.vmap(
        lambda m: jax.lax.axis_index("i") * m.x, in_axes=None, axis_name="i", axis_size=3
    )
    assert sized(m).tolist() == [0.0, 2.0, 4.0]
    assert nnx.vmap(lambda: nnx.Param(jnp.ones(2)), axis_size=3)().shape == (3, 2)


def test_spmd_axis_name_reaches_the_compiler():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P())

    def f(m, x):
        return jax.lax.with_sharding_constraint(m.x * x, rows)

    m = Foo()
    for name in (None, "data"):
        mapped = nnx.vmap(f, in_axes=(None, 0), spmd_axis_name=name)
        jaxpr = nnx.make_jaxpr(mapped, graph_updates=False)(m, jnp.ones((8, 4)))
        (eqn,) = [e for e in jaxpr.eqns if str(e.primitive) == "sharding_constraint"]
        assert (eqn.params["sharding"].spec == jax.P("data")) == (name is not None)


# keyword arguments and forms -------------------------------------------------------------------------


def test_keyword_arguments_count_at_their_positions():
    def f(m, x, k=2.0, *, extra=0.0):
        return m.x * x * k + extra

    m, xs = Foo(3.0), jnp.arange(3.0)
    mapped = nnx.vmap(f, in_axes=(None, 0))
    assert mapped(m, x=xs).tolist() == mapped(x=xs, m=m).tolist() == [0.0, 6.0, 12.0]
    assert mapped(m, xs, extra=xs).tolist() == [0.0, 7.0, 14.0]  # no position: axis 0
    both = nnx.vmap(f, in_axes=(None, 0, None))
    assert both(m, xs).tolist() == [0.0, 6.0, 12.0] and both(m, k=1.0, x=xs).tolist() == [0, 3, 6]


@pytest.mark.parametrize("mode", [{"graph_updates": False}, {"graph": False}])
@pytest.mark.parametrize("axes", [None, (None,)])
def test_without_graph_updates_keyword_arguments_have_axis_0(mode, axes):
    m, xs = Foo(3.0), jnp.arange(3.0)
    mapped = nnx.vmap(lambda m, x: m.x * x, in_axes=axes, **mode)
    assert mapped(m, x=xs).tolist() == [0.0, 3.0, 6.0]


# construction ------------------------------------------------------------------------------------


def test_a_class_is_a_function_that_builds_stacks():
    rngs = nnx.Rngs(0, dropout=1)
    stacked = nnx.vmap(Block)(rngs.fork(split=4))
    assert type(stacked) is Block and stacked.linear.kernel.shape == (4, 3, 3)
    for i in range(4):
        assert_same(lane(stacked, i), Block(lane(nnx.Rngs(0, dropout=1).fork(split=4), i)))
    kernels = stacked.linear.kernel.value
    assert not any(jnp.array_equal(kernels[0], k) for k in kernels[1:])
    inside = nnx.vmap(nnx.Linear, in_axes=(None, None), axis_size=2)
    assert inside(2, 3, rngs=nnx.Rngs(0).fork(split=2)).kernel.shape == (2, 2, 3)


# sharing, structure ----------------------------------------------------------------------------------


def test_one_object_in_two_arguments_is_one_object_inside():
    m = Tied()
    m.a.value = jnp.ones((3, 2))

    def f(first, rest, x):
        assert first is rest["m"] and first.child.owner is first and first.a is first.b
        first.a[...] *= x
        return first, rest["m"].child

    out, child = nnx.vmap(f)(m, {"m": m}, jnp.arange(3.0))
    assert out is m and child is m.child and m.a is m.b is m.child.leaf
    assert m.a.value.tolist() == [[0, 0], [1, 1], [2, 2]]


def test_structure_changes_are_repeated_outside():
    m = Foo()
    m.x.value, m.y.value, m.n.value = jnp.ones((3, 2)), jnp.ones(3), jnp.zeros(3)
    y = m.y

    def grow(m, x):
        m.new = nnx.Dict(w=nnx.Param(x * jnp.ones(2)))
        m.again, m.size = m.new.w, 3
        del m.n
        m.x, m.y = m.y, m.x
        return m.new

    new = nnx.vmap(grow)(m, jnp.arange(3.0))
    assert new is m.new and m.again is m.new.w and m.size == 3 and not hasattr(m, "n")
    assert m.x is y and m.x.shape == (3,) and m.y.shape == (3, 2)
    assert m.new.w.value.tolist() == [[0, 0], [1, 1], [2, 2]]
    quiet = Foo()
    nnx.vmap(lambda m: setattr(m, "new", 1), in_axes=None, axis_size=2, graph_updates=False)(quiet)
    assert not hasattr(quiet, "new")


def test_new_variables_of_an_argument_follow_its_prefix():
    m = Foo()
    axes = nnx.StateAxes({nnx.Intermediate: 1, ...: None})

    def f(m, x):
        m.seen = nnx.Intermediate(x * jnp.ones(2))
        m.whole = nnx.Variable(1.0)

    nnx.vmap(f, in_axes=(axes, 0))(m, jnp.arange(3.0))
    assert m.seen.value.tolist() == [[0, 1, 2]] * 2 and m.whole.value == 1.0


# random streams --------------------------------------------------------------------------------------


def test_recurrent_layers_start_alike_without_a_warning():
    layer = nnx.RNN(nnx.GRUCell(2, 3, rngs=nnx.Rngs(0)))
    x = jnp.ones((2, 4, 5, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))(layer, x)
    np.testing.assert_allclose(y[1], layer(x[1]), rtol=1e-6)


@pytest.mark.parametrize("ways", ["split_rngs", "fork_rngs", "built"])
def test_streams_of_their_own_are_no_cause_for_a_warning(ways):
    drop, xs = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), jnp.ones((4, 32))
    axes = nnx.StateAxes({nnx.RngState: 0, ...: None})
    mapped = nnx.vmap(call, in_axes=(axes, 0))
    if ways == "split_rngs":
        mapped = nnx.split_rngs(splits=4)(mapped)
    elif ways == "fork_rngs":
        mapped = nnx.fork_rngs(split=4)(mapped)
    else:
        drop = nnx.vmap(lambda key: nnx.Dropout(0.5, rngs=nnx.Rngs(key)))(
            jax.random.split(jax.random.key(0), 4)
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = mapped(drop, xs)
    assert len({tuple(row) for row in rows.tolist()}) == 4


# bad input -------------------------------------------------------------------------------------------


class Wide(nnx.Module):
    """A stack of three."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones((3, 2)))
        self.n = nnx.BatchStat(jnp.zeros(3))

    def __call__(self, x):
        self.n[...] += 1
        return self.w * x


THREE = jnp.ones(3)


def refused(match, fun=call, args=(THREE,), error=ValueError, **options):
    return pytest.param(match, fun, args, error, options, id=match[:40])


BAD = [
    refused(r"vmap\(call\): got inconsistent sizes .*: 4 at 'x', 3 at 'm.n', 'm.w'\. Give all the same",
            args=(jnp.ones(4),)),
    refused(r"axis 1 of 'm.n', which implies that its rank should be at least 2, but its shape is "
            r"\(3,\)\. Give it another axis, or None", in_axes=(1, 0)),
    refused(r"axis -3 of 'x', .* rank should be at least 3", in_axes=(0, -3)),
    refused(r"axis 0 of 'x', .* its shape is \(\)", args=(1.0,)),
    refused(r"`axis_size` argument of 5 which disagrees with leading axis sizes \[3\] \(3 at 'x', 'm.n'",
            axis_size=5),
    refused(r"in_axes is not a prefix of the arguments: in_axes=\(0, 0, 0\) .* nnx.StateAxes chooses by",
            in_axes=(0, 0, 0)),
    refused(r"in_axes is not a prefix of the arguments: .*'w': ", in_axes=({"w": 0}, 0)),
    refused(r"out_axes is not a prefix of the result: .* is PyTreeDef\(\*\)\. Give", out_axes=(0, 0)),
    refused(r"vmap\(call\): axis 4 of the result '<root>' is out of bounds: each slice of it has shape "
            r"\(2,\)\. Give it another axis, in out_axes", out_axes=4),
    refused(r"out_axes for a shared Param: at 'm.w' it is 0, in the result at '1.m.w' it is None\. "
            r".*nnx.clone", fun=lambda m, x: (x, {"m": m}), out_axes=(0, None)),
    refused(r"different out_axes .* at its first place it is 0, in the result at '1' it is 1",
            fun=lambda m, x: (lambda p: (p, p))(nnx.Param(m.w + x)), out_axes=(0, 1)),
    refused("batched: the result 'y.0' has axis None, and its value differs .* in out_axes",
            fun=lambda m, x: {"y": [x]}, out_axes=None),
    refused("batched: the new Variable 'result' has axis None",
            fun=lambda m, x: nnx.Param(x), out_axes=None),
    refused(r"batched: the value at 'm.n' has axis None, .* with nnx.StateAxes in in_axes",
            fun=lambda m, x: m.n.set_value(x), in_axes=(None, 0)),
    refused(r"No axis found for BatchStat at 'n': none of the filters .* of StateAxes matches\. Add one",
            in_axes=(nnx.StateAxes({nnx.Param: 0}), 0)),
    refused("at least one non-None value in in_axes or axis_size", in_axes=None),
    refused(r"vmap\(.*\) returned a value of type 'str' at 'a', which is not a valid JAX type",
            fun=lambda m, x: {"a": "text"}, error=TypeError),
    refused(r"vmap\(call\): cannot interpret argument 'x' as an array, it is of type 'str'\. Pass an",
            args=("text",), error=TypeError),
]  # fmt: skip


@pytest.mark.parametrize(("match", "fun", "args", "error", "options"), BAD)
def test_bad_input_is_told_of_by_path_and_changes_nothing(match, fun, args, error, options):
    m = Wide()
    before = snapshot(m)
    with pytest.raises(error, match=match):
        nnx.vmap(fun, **options)(m, *args)
    assert snapshot(m) == before


@pytest.mark.parametrize(
    ("name", "options"),
    [("in_axes", {"in_axes": (0, "x")}), ("out_axes", {"out_axes": nnx.StateAxes({...: 1.5})})],
)
def test_what_is_no_axis_is_refused_at_once(name, options):
    with pytest.raises(
        TypeError, match=f"vmap {name} must be an int, None, or .* but got .* of type"
    ):
        nnx.vmap(call, **options)


@pytest.mark.parametrize(("axes", "other"), [((0, None, 0), "None"), ((0, 1, 0), "1")])
def test_one_variable_under_two_axes_is_refused(axes, other):
    m = Wide()
    before = snapshot(m)
    match = rf"different in_axes for a shared Param: at 'a.w' it is 0, at 'b.m.w' it is {other}"
    with pytest.raises(ValueError, match=match):
        nnx.vmap(lambda a, b, x: a(x), in_axes=axes)(m, {"m": m}, jnp.ones(3))
    by_variable = nnx.StateAxes({nnx.BatchStat: 0, ...: axes[1]})
    with pytest.raises(ValueError, match=rf"'a.w' it is 0, at 'b.w' it is {other}"):
        nnx.vmap(lambda a, b: None, in_axes=(0, by_variable))(m, m)
    assert snapshot(m) == before
    with pytest.raises(ValueError, match="Duplicate Wide"):
        nnx.vmap(lambda a, b: None, graph=False)(m, m)
    same = nnx.StateAxes({...: 0})  # another way to say the same
    assert nnx.vmap(lambda a, b: a.w is b.w, in_axes=(0, same))(m, m).all()


def test_a_call_that_does_not_fit_the_function_is_a_type_error():
    add = nnx.vmap(lambda a, b: a + b, in_axes=(0, 0))
    with pytest.raises(TypeError, match="missing a required argument: 'b'"):
        add(jnp.ones(2))
    with pytest.raises(TypeError, match="too many positional arguments"):
        add(jnp.ones(2), jnp.ones(2), jnp.ones(2))


def test_filters_by_path_need_not_match_the_other_places_of_a_shared_variable():
    m = nnx.Dict(a=nnx.Param(jnp.arange(2.0)), b=nnx.Param(jnp.ones(3)))
    m.c = m.a
    axes = nnx.StateAxes({nnx.PathContains("a"): 0, nnx.PathContains("b"): None})
    out = nnx.vmap(lambda m: m.a + m.b.sum() + m.c, in_axes=axes)(m)
    assert out.tolist() == [3, 5]
    with pytest.raises(ValueError, match="No axis found for Param at 'c'"):
        nnx.vmap(lambda m, n: m.a + n.a, in_axes=(0, axes))(nnx.Dict(c=m.a), nnx.Dict(c=m.b))


def test_an_object_of_axes_that_contains_itself_is_refused():
    model = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    axes = nnx.Dict(w=nnx.data(0))
    model.me, axes.me = model, axes
    with pytest.raises(ValueError, match="prefix of type Dict contains itself at 'me'. Choose"):
        nnx.vmap(lambda m, x: m.w * x, in_axes=(axes, 0))(model, jnp.ones(2))
