"""scan: carries, axes, constants of the loop, layers, memory, new names for what is carried."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.transforms.models import Foo, rebinds, snapshot

CARRY = nnx.Carry
XS = jnp.ones(3)


def count(c, x):
    """A body that writes a Variable of its carry and reads another."""
    c.n[...] += x * c.x
    return c, c.n * 1.0


# Carries ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "in_axes", "out_axes"),
    [
        (lambda x, c: count(c, x)[::-1], (0, CARRY), (0, CARRY)),
        (lambda x, c: count(c, x)[::-1], (0, nnx.Carry()), (0, nnx.Carry())),
        (lambda x, c, y: ({"z": x * y}, count(c, x)[0], y), (0, CARRY, None), ({"z": 0}, CARRY, 0)),
        (lambda c, x: count(c, x)[0], (CARRY, 0), CARRY),
        (lambda c: count(c, 1.0)[0], CARRY, CARRY),
        (lambda c: count(c, 1.0), (CARRY,), (CARRY, 0)),
    ],
    ids=["last", "instance", "middle", "alone", "everything", "only-argument"],
)
def test_the_carry_may_be_any_argument_and_any_part_of_the_result(f, in_axes, out_axes):
    m, axes = Foo(2.0), in_axes if isinstance(in_axes, tuple) else (in_axes,)
    given = {0: XS, None: jnp.array(1.0)}
    length = None if 0 in axes else 3
    run = nnx.scan(f, in_axes=in_axes, out_axes=out_axes, length=length)
    out = run(*[given.get(axis, m) for axis in axes])
    parts = out if isinstance(out, tuple) else (out,)
    assert float(m.n.value) == 6.0 and sum(part is m for part in parts) == 1
    assert all(x.shape == (3,) for x in jax.tree.leaves([p for p in parts if p is not m]))


def renews(c, x):
    c.y, c.x = nnx.Param(c.x * 1), nnx.Param(c.y + x)
    c.plain = [nnx.Param(c.plain[0] * x), "name"]
    return c, x


def replaces_a_part(c, x):
    c.part = nnx.Dict(w=nnx.Param(c.part.w + c.x + x))
    return c, x


def replaces_what_is_shared(c, x):
    c.x = c.part.tied = nnx.Param(c.part.tied + x)
    return c, x


@pytest.mark.parametrize("times", [0, 3])
@pytest.mark.parametrize("f", [renews, replaces_a_part, replaces_what_is_shared])
def test_a_body_may_put_new_variables_into_the_places_of_its_carry(f, times):
    def model():
        foo = Foo(3.0, 5.0)
        foo.part = nnx.Dict(w=nnx.Param(jnp.array(1.0)))
        foo.plain = [nnx.Param(jnp.array(1.0)), "name"]
        if f is replaces_what_is_shared:
            foo.part.tied = foo.x
        return foo

    foo, expected, xs = model(), model(), jnp.arange(1.0, times + 1)
    for x in xs:
        f(expected, x)
    out, ys = nnx.scan(lambda c, x: (f(c, x)[0], c.x[...]))(foo, xs)
    assert out is foo and ys.shape == (times,)
    nnx.jit(lambda foo: nnx.scan(f, in_axes=(CARRY, 0))(foo, xs)[1])(again := model())
    for found in (foo, again):
        states = nnx.to_flat_state(nnx.state(found)), nnx.to_flat_state(nnx.state(expected))
        assert all(mine.value == theirs.value for (_, mine), (_, theirs) in zip(*states))
        assert nnx.graphdef(found) == nnx.graphdef(expected)


# Axes ---------------------------------------------------------------------------------------------


def test_length_reverse_unroll():
    m, xs = Foo(2.0), jnp.arange(5.0)
    _, ys = nnx.scan(count, reverse=True)(m, xs)
    assert ys.tolist() == [20.0, 20.0, 18.0, 14.0, 8.0] and float(m.n.value) == 20.0
    assert nnx.scan(lambda c: c * 2.0, length=3, in_axes=CARRY, out_axes=CARRY)(1.0) == 8.0
    assert nnx.scan(lambda k: k, length=3, in_axes=None, out_axes=0)(jnp.ones(2)).shape == (3, 2)
    for unroll, steps in ((1, 1), (2, 2), (True, 5)):
        assert only_scan(nnx.scan(count, unroll=unroll), m, xs).params["unroll"] == steps
    split = lambda m: nnx.scan(count, _split_transpose=True)(m, xs)[1].sum()
    assert float(nnx.jit(nnx.grad(split))(Foo(2.0))["x"].value) == 20.0


def test_new_variables_of_a_scanned_argument_and_of_the_result_are_stacked():
    def f(x, m):
        m.seen = nnx.Intermediate(x)
        m.size = 2
        del m.y
        return nnx.Dict(w=nnx.Param(x * jnp.ones(2)))

    m = nnx.Dict(x=nnx.Param(XS), y=nnx.Param(XS))
    out = nnx.scan(f, in_axes=(0, 0), out_axes=1)(jnp.arange(3.0), m)
    assert m.seen.value.tolist() == [0, 1, 2] and m.size == 2 and not hasattr(m, "y")
    assert out.w.value.tolist() == [[0, 1, 2]] * 2


def test_forms_and_keywords():
    class Net(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(2.0)

        @nnx.scan(in_axes=(None, CARRY, 0), out_axes=(CARRY, 0))
        def run(self, c, x):
            return c + self.w * x, c

    assert Net().run(0.0, jnp.arange(3.0))[0] == 6.0
    f = nnx.scan(lambda c, x, k=3.0, *, j=1.0: (c + x * k * j, None), in_axes=(CARRY, 0, None))
    assert f(x=jnp.ones(2), c=0.0)[0] == 6.0 and f(0.0, jnp.ones(2), k=1.0)[0] == 2.0
    assert f(0.0, jnp.ones(2), j=2.0)[0] == 12.0  # no position: constant
    bound = nnx.scan(Foo(2.0).x.__mul__, in_axes=0, out_axes=0)
    assert bound(jnp.arange(3.0)).tolist() == [0.0, 2.0, 4.0]
    built = nnx.scan(Foo, in_axes=(0, None), out_axes=0)(jnp.arange(3.0), 1.0)
    assert type(built) is Foo and built.x.value.tolist() == [0, 1, 2] and built.y.shape == (3,)


# What is only read --------------------------------------------------------------------------------


def only_scan(f, *args):
    """The scan equation of a function's jaxpr."""
    found = []

    def search(jaxpr):
        for eqn in jaxpr.eqns:
            if str(eqn.primitive) == "scan":
                found.append(eqn)
                continue
            for value in eqn.params.values():
                if hasattr(value, "jaxpr"):
                    search(value.jaxpr)

    search(nnx.make_jaxpr(f)(*args).jaxpr)
    (eqn,) = found
    return eqn


def shapes(variables):
    return sorted(v.aval.shape for v in variables)


def test_variables_that_are_only_read_are_constants_of_the_loop():
    """Neither stacked, nor carried, nor returned, in a carry, as an argument or captured."""
    captured = nnx.Param(jnp.ones((7, 7)))

    def f(carry, x, other):
        carry["m"].n[...] += carry["m"].w[...] @ x + other.w.sum() + captured.sum()
        return carry, x.sum()

    big = nnx.Dict(w=nnx.Param(jnp.ones((5, 5))), n=nnx.BatchStat(jnp.zeros(5)))
    other = nnx.Dict(w=nnx.Param(jnp.ones((6, 6))))
    run = lambda m, xs, other: nnx.scan(f, in_axes=(CARRY, 0, None))({"m": m}, xs, other)
    eqn = only_scan(run, big, jnp.ones((3, 5)), other)
    constants = [(5, 5), (6, 6), (7, 7)]
    assert shapes(eqn.invars) == sorted([*constants, (5,), (3, 5)])
    # as large in one iteration as outside, so not scanned; no output, so neither carried nor stacked
    inside = eqn.params["jaxpr"]
    assert shapes(getattr(inside, "jaxpr", inside).invars) == sorted([*constants, (5,), (5,)])
    assert shapes(eqn.outvars) == [(3,), (5,)]


def test_a_scanned_variable_that_is_only_read_is_not_returned():
    stack, x = linear_stack(3, 2), jnp.ones((1, 2))
    assert shapes(only_scan(mlp, stack, x).outvars) == [(1, 2)]
    before = snapshot(stack)
    mlp(stack, x)
    assert snapshot(stack) == before


def mlp(stack, x):
    step = lambda x, layer: jnp.tanh(layer(x))
    return nnx.scan(step, in_axes=(CARRY, 0), out_axes=CARRY)(x, stack)


def bare_mlp(leaves, x):
    step = lambda x, layer: (jnp.tanh(x @ layer["kernel"] + layer["bias"]), None)
    return jax.lax.scan(step, x, leaves)[0]


def linear_stack(layers, size):
    zeros = nnx.initializers.zeros_init()  # of which each layer compiles quickly
    make = lambda r: nnx.Linear(size, size, kernel_init=zeros, rngs=r)
    return nnx.vmap(make)(nnx.Rngs(0).fork(split=layers))


def peak(jitted, *args):
    analysis = jitted.lower(*args).compile().memory_analysis()
    return analysis.temp_size_in_bytes, analysis.output_size_in_bytes


def test_memory_of_the_gradient_of_32_layers_is_that_of_hand_written_jax():
    """Parameters that are only read are neither copied nor returned (XLA's own analysis)."""
    stack, x = linear_stack(32, 64), jnp.ones((8, 64))
    leaves = {"kernel": stack.kernel.value, "bias": stack.bias.value}
    mine = nnx.grad(lambda m, x: (mlp(m, x) ** 2).mean())
    hand = jax.grad(lambda p, x: (bare_mlp(p, x) ** 2).mean())
    assert peak(nnx.jit(mine), stack, x) <= peak(jax.jit(hand), leaves, x)


# Parts that are shared, replaced and named again --------------------------------------------------

SOME = nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: 0})


def test_what_is_shared_in_an_argument_with_an_axis_can_be_replaced():
    def replace(m):
        m.first = nnx.Dict(new=nnx.Param(jnp.ones(3)))

    model = nnx.Dict(w=nnx.Param(jnp.ones(2)), first=nnx.Dict())
    model.second, model.again = model.first, model
    nnx.scan(replace, in_axes=0, out_axes=0, length=2)(model)
    assert model.first.new.shape == (2, 3) and "new" not in vars(model.second)
    assert model.again is model


@pytest.mark.parametrize(
    "new", [jnp.ones, lambda n: nnx.Param(jnp.ones(n))], ids=["array", "Param"]
)
def test_what_is_added_to_an_object_that_is_then_removed_has_the_axis_of_its_argument(new):
    def add_and_remove(other, model):
        model.inner.new = new(3)
        del model.inner

    for wrap in (functools.partial(nnx.scan, length=2), functools.partial(nnx.vmap, axis_size=2)):
        inner = nnx.Dict()
        wrap(add_and_remove, in_axes=0, out_axes=0)(nnx.Dict(), nnx.Dict(inner=inner))
        assert inner.new.shape == (2, 3)


def test_a_shared_part_is_replaced_beside_a_scanned_one():
    """A list cannot be carried as a whole; what it shares with others is compared without it."""

    def replace(m):
        m.first = [nnx.Param(m.first[0] * 2), nnx.Dict()]
        m.second = nnx.Dict()
        m.n[...] += 1

    empty, n = nnx.Dict(), nnx.BatchStat(jnp.array(0.0))
    model = nnx.Dict(first=[nnx.Param(jnp.arange(3.0)), empty], second=empty, n=n)
    nnx.scan(replace, in_axes=SOME, out_axes=0)(model)
    assert model.first[0].value.tolist() == [0, 2, 4] and model.n is n and float(n.value) == 3
    assert model.first[1] is not model.second is not empty


def test_a_carried_variable_moves_on_beside_a_scanned_one_while_others_are_replaced():
    def add(m):
        m.part.n[...] += m.part.w
        m.note = nnx.Dict()

    part = nnx.Dict(w=nnx.Param(jnp.arange(1.0, 4.0)), n=nnx.BatchStat(jnp.array(0.0)))
    model = nnx.Dict(part=part, note=nnx.Dict())
    nnx.scan(add, in_axes=SOME, out_axes=0)(model)
    assert model.part is part and float(part.n.value) == 6 and part.w.value.tolist() == [1, 2, 3]


def test_a_broadcast_object_may_get_another_name_for_what_it_has():
    @nnx.scan(in_axes=(nnx.Carry, None, 0), out_axes=nnx.Carry)
    def run(carry, m, x):
        m.alias = m.a
        return carry + m.alias.sum()

    m = nnx.Dict(a=nnx.Param(jnp.ones(2)))
    assert run(jnp.zeros(()), m, XS) == 6 and m.alias is m.a


@pytest.mark.parametrize("axes", [nnx.Carry, nnx.StateAxes({...: nnx.Carry})])
def test_a_carried_object_may_get_another_name_for_what_stays_in_its_place(axes):
    def run(body, m, **mode):
        if axes is nnx.Carry:
            f = lambda m, x: (body(m, x), m)[1]
            return nnx.scan(f, in_axes=(axes, 0), out_axes=axes, **mode)(m, jnp.arange(3.0))
        nnx.scan(body, in_axes=(axes, 0), out_axes=0, **mode)(m, jnp.arange(3.0))
        return m

    def name(m, x):
        m.part.alias, m.box = m.part.n, nnx.List([m.part.n])
        m.part.n[...] += x

    def replace(m, x):
        m.before, m.n = m.n, nnx.Variable(m.n + x)

    def copy(m, x):
        m.copy = nnx.Variable(m.n[...])

    def move(m, x):
        m.other = m.n
        del m.n

    n = nnx.Variable(jnp.array(1.0))
    m = nnx.Dict(part=nnx.Dict(n=n))
    assert run(name, m) is m
    assert m.part.alias is m.box[0] is m.part.n is n and n.value == 4
    for body, wrong in ((replace, "'before', 'n'"), (copy, "'copy'"), (move, "'n'")):
        m = nnx.Dict(n=n)
        with pytest.raises(TypeError, match=f"the body .*{wrong}"):
            run(body, m)
        assert list(m) == ["n"]
    if axes is nnx.Carry:
        with pytest.raises(ValueError, match="the body changes attributes"):
            run(name, nnx.Dict(part=nnx.Dict(n=n)), graph_updates=False)


def new_entry(m):
    m.parts["b"] = nnx.Param(jnp.ones(2))


@pytest.mark.parametrize("edit", [new_entry, rebinds])
@pytest.mark.parametrize(
    ("axis", "mode"), [(None, {"graph_updates": False}), (0, {"graph": False})]
)
def test_without_updates_a_body_edits_its_own_arguments(edit, axis, mode):
    def body(carry, m):
        edit(m)
        carry.n[...] += m.x.sum()
        return carry

    m = nnx.Dict(x=nnx.Param(jnp.ones(2)), parts=nnx.data({"a": nnx.Param(jnp.ones(2))}))
    carry = nnx.Dict(n=nnx.Param(jnp.array(0.0)))
    if axis == 0:
        m = nnx.vmap(lambda _: nnx.clone(m))(jnp.ones(3))
    before = nnx.graphdef(m)
    nnx.scan(body, in_axes=(nnx.Carry, axis), out_axes=nnx.Carry, length=3, **mode)(carry, m)
    assert nnx.graphdef(m) == before and m.x.tolist() == jnp.ones_like(m.x).tolist()
    assert carry.n[...] == (12.0 if edit is rebinds else 6.0)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: nnx.scan(lambda y: y * 2, length=x.shape[0], in_axes=0, out_axes=1)(x),
        lambda x: nnx.scan(nnx.remat(lambda c, y: (c * y, y)), reverse=True)(x[0], x),
        lambda x: nnx.fori_loop(np.int8(0), x.shape[0], lambda i, c: c + x[i], x[0]),
        lambda x: nnx.while_loop(lambda c: c[0] < x.shape[0], lambda c: (c[0] + 2, c[1] + 1), (0, x)),
        lambda x: nnx.RNN(nnx.GRUCell(4, 3, rngs=nnx.Rngs(0)))(x),
    ],
    ids=["length", "reverse", "fori_loop", "while_loop", "RNN"],
)  # fmt: skip
def test_a_symbolic_number_of_iterations(run):
    x = jnp.arange(28.0).reshape(7, 4) / 10
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("t, 4"), x.dtype)
    found = jax.export.export(jax.jit(run))(shape).call(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, run(x))
