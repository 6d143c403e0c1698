"""scan: carries, axes, constants of the loop, layers, memory, refusals."""

from __future__ import annotations

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.transforms.models import Block, Counted, Foo, Tied, lane, snapshot

CARRY = nnx.Carry


def looped(f, carry, *slices, reverse=False):
    """What scan does with a carry first and slices after it, in plain Python."""
    ys, steps = [], list(zip(*slices))
    for step in reversed(steps) if reverse else steps:
        carry, y = f(carry, *step)
        ys.append(y)
    return carry, jnp.stack(ys[::-1] if reverse else ys)


def count(c, x):
    """A body that writes a Variable of its carry and reads another."""
    c.n[...] += x * c.x
    return c, c.n * 1.0


# carries -----------------------------------------------------------------------------------------


def swapped(x, c):
    c, y = count(c, x)
    return y, c


def between(x, c, y):
    c, z = count(c, x * y)
    return {"z": z}, c, y


@pytest.mark.parametrize(
    ("f", "in_axes", "out_axes"),
    [
        (swapped, (0, CARRY), (0, CARRY)),
        (swapped, (0, nnx.Carry()), (0, nnx.Carry())),
        (between, (0, CARRY, None), ({"z": 0}, CARRY, 0)),
        (lambda c, x: count(c, x)[0], (CARRY, 0), CARRY),
        (lambda c: count(c, 1.0)[0], CARRY, CARRY),
        (lambda c: count(c, 1.0), (CARRY,), (CARRY, 0)),
    ],
    ids=["last", "instance", "middle", "alone", "everything", "only-argument"],
)
def test_the_carry_may_be_any_argument_and_any_part_of_the_result(f, in_axes, out_axes):
    m, other = Foo(2.0), Foo(2.0)
    values = {0: jnp.ones(3), None: jnp.array(1.0)}
    args = [values.get(a, m) for a in (in_axes if isinstance(in_axes, tuple) else (in_axes,))]
    length = None if 0 in (in_axes if isinstance(in_axes, tuple) else ()) else 3
    out = nnx.scan(f, in_axes=in_axes, out_axes=out_axes, length=length)(*args)
    expected, ys = looped(count, other, jnp.ones(3))
    assert float(m.n.value) == float(expected.n.value) == 6.0
    parts = out if isinstance(out, tuple) else (out,)
    assert sum(part is m for part in parts) == 1
    if out_axes == ({"z": 0}, CARRY, 0):
        assert out[0]["z"].tolist() == ys.tolist() and out[2].shape == (3,)


def test_shared_variables_are_replaced_together():
    tied = Tied()

    def f(c, x):
        c.a = c.b = c.child.leaf = nnx.Param(c.a + x)
        c.note = "set"
        return c, None

    nnx.scan(f)(tied, jnp.ones(3))
    assert tied.a is tied.b is tied.child.leaf and tied.note == "set"
    assert tied.a.value.tolist() == [4, 1]

    def apart(c, x):
        c.a = nnx.Param(c.a + x)
        return c, None

    with pytest.raises(TypeError, match="the body replaces a part of its carry that is shared"):
        nnx.scan(apart)(tied, jnp.ones(3))
    assert tied.a is tied.b and tied.a.value.tolist() == [4, 1]


def renews(c, x):
    c.y, c.x = nnx.Param(c.x * 1), nnx.Param(c.y + x)
    return c, x


def replaces_a_part(c, x):
    c.part = nnx.Dict(w=nnx.Param(c.part.w + c.x + x))
    return c, x


@pytest.mark.parametrize("times", [0, 1, 2, 3])
@pytest.mark.parametrize("f", [renews, replaces_a_part])
def test_a_body_may_put_new_variables_into_the_places_of_its_carry(f, times):
    def model():
        foo = Foo(3.0, 5.0)
        foo.part = nnx.Dict(w=nnx.Param(jnp.array(1.0)))
        return foo

    def values(foo):
        return [float(v.value) for v in (foo.x, foo.y, foo.part.w)]

    foo, expected = model(), model()
    xs = jnp.arange(1.0, times + 1)
    for x in xs:
        f(expected, x)
    out, ys = nnx.scan(lambda c, x: (f(c, x)[0], c.x[...]))(foo, xs)
    assert out is foo and values(foo) == values(expected) and ys.shape == (times,)
    through = nnx.jit(lambda foo: nnx.scan(f, in_axes=(CARRY, 0))(foo, xs)[1])
    through(again := model())
    assert values(again) == values(expected)


def test_variables_in_containers_are_replaced_too():
    tower = nnx.Dict(plain=[nnx.Param(jnp.array(1.0)), "name"], items=nnx.List([nnx.Param(0.0)]))
    first = tower.plain[0]

    def f(x, c):
        c.plain = [nnx.Param(c.plain[0] * x), "name"]
        c["items"][0] = nnx.Param(c["items"][0] + c.plain[0])
        return x

    nnx.scan(f, in_axes=(0, nnx.StateAxes({...: nnx.Carry})), out_axes=0)(
        jnp.array([2.0, 3.0]), tower
    )
    assert float(first.value) == 1
    assert [float(v[...]) for v in (tower.plain[0], tower["items"][0])] == [6, 8]


# axes --------------------------------------------------------------------------------------------


def test_scanned_carried_and_constant_variables_of_one_object():
    m = nnx.Dict(
        w=nnx.Param(jnp.arange(1.0, 4.0)), n=nnx.BatchStat(jnp.array(0.0)), k=nnx.Variable(2.0)
    )
    axes = nnx.StateAxes({nnx.Param: 0, nnx.BatchStat: CARRY, ...: None})

    def f(x, m):
        m.n[...] += m.w * m.k
        m.w[...] = m.n[...]
        return x

    nnx.scan(f, in_axes=(0, axes), out_axes=0)(jnp.ones(3), m)
    assert float(m.n.value) == 12.0 and m.w.value.tolist() == [2.0, 6.0, 12.0]


def test_length_reverse_unroll():
    m, other, xs = Foo(2.0), Foo(2.0), jnp.arange(5.0)
    out, ys = nnx.scan(count, reverse=True)(m, xs)
    expected, expected_ys = looped(count, other, xs, reverse=True)
    assert ys.tolist() == expected_ys.tolist() and float(m.n.value) == float(other.n.value)
    assert nnx.scan(lambda c: c * 2.0, length=3, in_axes=CARRY, out_axes=CARRY)(1.0) == 8.0
    assert nnx.scan(lambda k: k, length=3, in_axes=None, out_axes=0)(jnp.ones(2)).shape == (3, 2)
    for unroll, steps in ((1, 1), (2, 2), (True, 5)):
        assert only_scan(nnx.scan(count, unroll=unroll), m, xs).params["unroll"] == steps
    split = lambda on: lambda m: nnx.scan(count, _split_transpose=on)(m, xs)[1].sum()
    grads = [float(nnx.jit(nnx.grad(split(on)))(m)["x"].value) for on in (False, True)]
    assert grads == [20.0, 20.0]
    unrolled, _ = nnx.scan(count, unroll=2)(Foo(2.0), xs)
    assert float(unrolled.n.value) == 20.0


def test_new_variables_of_a_scanned_argument_and_of_the_result_are_stacked():
    m = Foo(jnp.ones(3), jnp.ones(3))
    m.n.value = jnp.zeros(3)

    def f(x, m):
        m.seen = nnx.Intermediate(x)
        m.size = 2
        del m.y
        return nnx.Dict(w=nnx.Param(x * jnp.ones(2)))

    out = nnx.scan(f, in_axes=(0, 0), out_axes=1)(jnp.arange(3.0), m)
    assert m.seen.value.tolist() == [0, 1, 2] and m.size == 2 and not hasattr(m, "y")
    assert out.w.value.tolist() == [[0, 1, 2]] * 2
    quiet = nnx.scan(f, in_axes=(0, 0), out_axes=1, graph_updates=False)
    other = Foo(jnp.ones(3), jnp.ones(3))
    other.n.value = jnp.zeros(3)
    quiet(jnp.arange(3.0), other)
    assert hasattr(other, "y") and not hasattr(other, "seen")


def test_forms_and_keywords():
    m = Counted()

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
    read = nnx.scan(lambda x, m: m.w.sum() * x, in_axes=(0, None), out_axes=0)
    assert read(m=m, x=jnp.ones(2)).tolist() == [3.0, 3.0]
    bound = nnx.scan(Foo(2.0).x.__mul__, in_axes=0, out_axes=0)
    assert bound(jnp.arange(3.0)).tolist() == [0.0, 2.0, 4.0]
    assert repr(nnx.scan(count)) == "scan(count)" and nnx.scan(count).__name__ == "count"
    built = nnx.scan(Foo, in_axes=(0, None), out_axes=0)(jnp.arange(3.0), 1.0)
    assert type(built) is Foo and built.x.value.tolist() == [0, 1, 2] and built.y.shape == (3,)


# what is only read -------------------------------------------------------------------------------


def only_scan(f, *args):
    """The scan equation of a function's jaxpr."""
    found = []

    def search(jaxpr):
        for eqn in jaxpr.eqns:
            if str(eqn.primitive) == "scan":
                found.append(eqn)
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", None)
                if inner is not None and str(eqn.primitive) != "scan":
                    search(inner)

    search(nnx.make_jaxpr(f)(*args).jaxpr)
    (eqn,) = found
    return eqn


def shapes(variables):
    return sorted(v.aval.shape for v in variables)


def test_variables_that_are_only_read_are_constants_of_the_loop():
    """Neither stacked, nor carried, nor returned, in a carry, as an argument or captured."""
    captured = nnx.Param(jnp.ones((7, 7)))

    class Big(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((5, 5)))
            self.n = nnx.BatchStat(jnp.zeros(5))

    def f(carry, x, other):
        carry["m"].n[...] += carry["m"].w[...] @ x + other.w.sum() + captured.sum()
        return carry, x.sum()

    def run(m, xs, other):
        return nnx.scan(f, in_axes=(CARRY, 0, None))({"m": m}, xs, other)

    other = nnx.Dict(w=nnx.Param(jnp.ones((6, 6))))
    eqn = only_scan(run, Big(), jnp.ones((3, 5)), other)
    constants = [(5, 5), (6, 6), (7, 7)]
    assert shapes(eqn.invars) == sorted([*constants, (5,), (3, 5)])
    # as large in one iteration as outside, so not scanned; no output, so neither carried nor stacked
    inside = eqn.params["jaxpr"]
    assert shapes(getattr(inside, "jaxpr", inside).invars) == sorted([*constants, (5,), (5,)])
    assert shapes(eqn.outvars) == [(3,), (5,)]


def test_a_scanned_variable_that_is_only_read_is_not_returned():
    stack = nnx.vmap(Block)(nnx.Rngs(0).fork(split=3))
    stack.eval()
    forward = nnx.scan(lambda x, layer: layer(x), in_axes=(CARRY, 0), out_axes=CARRY)
    eqn = only_scan(lambda m, x: forward(x, m), stack, jnp.ones((2, 3)))
    assert shapes(eqn.outvars) == [(2, 3)]
    before = snapshot(stack)
    forward(jnp.ones((2, 3)), stack)
    assert snapshot(stack) == before


# layers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [{}, {"graph": False}])
def test_layers_with_random_streams_and_batch_statistics(mode):
    stack = nnx.vmap(Block)(nnx.Rngs(0).fork(split=4))
    layers = [lane(stack, i) for i in range(4)]
    x = jax.random.normal(jax.random.key(1), (5, 3))
    scan = nnx.scan(lambda x, layer: layer(x), in_axes=(CARRY, 0), out_axes=CARRY, **mode)
    y = nnx.jit(scan)(x, stack)
    expected = x
    for layer in layers:
        expected = layer(expected)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    for i, layer in enumerate(layers):
        np.testing.assert_allclose(stack.norm.mean.value[i], layer.norm.mean.value, atol=1e-5)
        assert int(stack.drop.rngs.count.value[i]) == int(layer.drop.rngs.count.value)


def mlp(stack, x):
    return nnx.scan(
        lambda x, layer: jnp.tanh(layer(x)), in_axes=(CARRY, 0), out_axes=CARRY
    )(x, stack)  # fmt: skip


def bare_mlp(leaves, x):
    def step(x, layer):
        return jnp.tanh(x @ layer["kernel"] + layer["bias"]), None

    return jax.lax.scan(step, x, leaves)[0]


def linear_stack(layers, size):
    return nnx.vmap(lambda r: nnx.Linear(size, size, rngs=r))(nnx.Rngs(0).fork(split=layers))


def peak(jitted, *args):
    analysis = jitted.lower(*args).compile().memory_analysis()
    return analysis.temp_size_in_bytes, analysis.output_size_in_bytes


@pytest.mark.parametrize("differentiated", [False, True], ids=["forward", "gradient"])
def test_memory_of_32_layers_is_that_of_hand_written_jax(differentiated):
    """Parameters that are only read are neither copied nor returned (XLA's own analysis)."""
    stack, x = linear_stack(32, 64), jnp.ones((8, 64))
    leaves = {"kernel": stack.kernel.value, "bias": stack.bias.value}
    mine, hand = mlp, bare_mlp
    if differentiated:
        mine = nnx.grad(lambda m, x: (mlp(m, x) ** 2).mean())
        hand = jax.grad(lambda p, x: (bare_mlp(p, x) ** 2).mean())
    assert peak(nnx.jit(mine), stack, x) <= peak(jax.jit(hand), leaves, x)


# bad input ---------------------------------------------------------------------------------------


def adds(c, x):
    c.new = nnx.Param(x)
    return c, x


def removes(c, x):
    del c.n
    return c, x


def writes_constant(x, c):
    c.n[...] += x
    return x


XS = jnp.arange(3.0)
STRUCTURE = "carry input and carry output must have the same pytree structure, but they differ: "


def refused(name, match, f, *, error=ValueError, carry=None, args=(XS,), **options):
    """A body, its options, and the arguments; a Foo stands where the carry is not given."""
    return pytest.param(match, f, error, carry, args, options, id=name)


BAD = [
    refused("structure", STRUCTURE + "the output is without 'a', with 'b.0', 'b.1'",
            lambda c, x: ({"b": (x, x)}, x), carry={"a": 0.0}),
    refused("removes from a constant", STRUCTURE + r"the body changes attributes \['n'\] of 'c'",
            lambda c, x: removes(c, x)[1], error=TypeError, in_axes=(None, 0), out_axes=0),
    refused("carry in a slice", r"different out_axes for a shared Param: at 'c.y' it is "
            r"Carry, in the result at '1.y' it is 0", lambda c, x: (c, c)),
    refused("constant written", r"the body writes 'c.n', which is broadcast \(axis None\): the "
            r"writes of the iterations would be lost. Carry it, .*or give it an axis",
            writes_constant, args=(Foo(),), carry=XS, in_axes=(0, None), out_axes=0),
    refused("sizes", r"inconsistent sizes .*: 3 at 'x', 4 at 'y'\. Give all the same size, or None",
            lambda c, x, y: (c, x), args=(XS, jnp.ones(4)), in_axes=(CARRY, 0, 0)),
    refused("length", r"`length` argument of 5 which disagrees with leading axis sizes \[3\] "
            r"\(3 at 'x'\)\. Leave `length` out", count, length=5),
    refused("no length", r"no values to scan over and `length` not provided\. Pass length",
            count, in_axes=(CARRY, None)),
    refused("no such axis", r"axis 1 of 'x', .* its shape is \(3,\)\. Give it another axis, or None",
            count, in_axes=(CARRY, 1)),
    refused("no such axis of an object", r"axis 0 of 'c.n', .* but its shape is \(\)", count,
            in_axes=(0, CARRY), out_axes=(0, CARRY)),
    refused("no room", r"scan\(count\): axis 2 of the result '1' is out of bounds: each slice of it "
            r"has shape \(\)\. Give it another axis, in out_axes", count, out_axes=(CARRY, 2)),
    refused("prefix", r"in_axes is not a prefix of the arguments: in_axes=\(Carry, 0, 0\) has",
            count, in_axes=(CARRY, 0, 0)),
    refused("too few arguments", r"scan\(count\): missing a required argument: 'x'", count, args=(),
            error=TypeError),
    refused("too many arguments", r"scan\(count\): too many positional arguments", count,
            args=(XS, XS), error=TypeError),
    refused("out prefix", r"out_axes is not a prefix of the result: out_axes=\(Carry, 0, 0\) has",
            count, out_axes=(CARRY, 0, 0)),
    refused("no match", r"No axis found for Param at 'x': none of the filters .* matches", count,
            in_axes=(nnx.StateAxes({nnx.BatchStat: CARRY}), 0), out_axes=0),
    refused("no array", r"scan: cannot interpret argument 'x' as an array, it is of type 'str'",
            count, error=TypeError, args=("x",)),
    refused("failure", "by zero", lambda c, x: (adds(c, x), 1 // 0),
            error=ZeroDivisionError),
]  # fmt: skip


@pytest.mark.parametrize("outer", [lambda f: f, nnx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(("match", "f", "error", "carry", "args", "options"), BAD)
def test_bad_input_is_told_of_by_path_and_changes_nothing(
    match, f, error, carry, args, options, outer, request
):
    if outer is nnx.jit and "x" in args:
        return  # jit refuses a string itself
    carry = Foo() if carry is None else carry
    roots = jax.tree.leaves((carry, args), is_leaf=lambda x: isinstance(x, nnx.Module))
    roots = [x for x in roots if isinstance(x, nnx.Module)]
    before = snapshot(*roots)
    with pytest.raises(error, match=match):
        outer(nnx.scan(f, **options))(carry, *args)
    assert snapshot(*roots) == before


@pytest.mark.parametrize(
    ("match", "error", "options"),
    [
        (r"Carry must be at the top level, .*Found axes=\(\(Carry, 0\), 0\)\. Make the carry one",
         ValueError, {"in_axes": ((CARRY, 0), 0)}),
        (r"cannot be nested. Found axes=\{'a': Carry\}", ValueError, {"out_axes": {"a": CARRY}}),
        (r"If one of in_axes or out_axes has Carry, the other must .* in_axes=\(0, 0\) and", ValueError,
         {"in_axes": (0, 0)}),
        ("If one of in_axes or out_axes has Carry", ValueError, {"out_axes": 0}),
        (r"Got out_axes=None at: out_axes\[1\]\['a'\]. Every result of an iteration needs an axis",
         ValueError,
         {"out_axes": (CARRY, {"a": None})}),
        (r"Cannot broadcast output state. Got StateAxes\(.*Ellipsis: None}\) at: out_axes\[1\]",
         ValueError, {"out_axes": (CARRY, nnx.StateAxes({nnx.Param: 0, ...: None}))}),
        (r"Cannot carry output state. Got StateAxes\(.*\) at: out_axes\[1\]", ValueError,
         {"out_axes": (CARRY, nnx.StateAxes({...: CARRY}))}),
        (r"Found multiple Carry definitions in in_axes=\(Carry, Carry\)", ValueError,
         {"in_axes": (CARRY, CARRY)}),
        (r"scan in_axes must be an int, None, .* but got 'x' of type 'str' in \(Carry, 'x'\)",
         TypeError, {"in_axes": (CARRY, "x")}),
        (r"scan out_axes must be an int, None, .* but got 0.5 of type 'float'", TypeError,
         {"out_axes": (CARRY, 0.5)}),
    ],
    ids=["nested", "nested-out", "only-out", "only-in", "none-out", "some-none-out", "some-carry-out",
         "two", "in-type", "out-type"],
)  # fmt: skip
def test_wrong_axes_are_refused_at_once(match, error, options):
    with pytest.raises(error, match=match):
        nnx.scan(count, **options)
    with pytest.raises(error, match=match):
        nnx.scan(**options)(count)


def test_one_carry_is_one_argument():
    f = lambda c, x: c
    with pytest.raises(ValueError, match=r"in_axes=Carry the one argument is the carry, got 2"):
        nnx.scan(f, in_axes=CARRY, out_axes=CARRY, length=2)(1.0, 2.0)
    with pytest.raises(ValueError, match=r"such as in_axes=\(nnx.Carry, None\)"):
        nnx.scan(f, in_axes=CARRY, out_axes=CARRY, length=2)(1.0, x=2.0)
    assert nnx.scan(f, in_axes=(CARRY, None), out_axes=CARRY, length=2)(1.0, 2.0) == 1.0
    with pytest.raises(TypeError, match=r"scan\(.*\): too many positional arguments"):
        nnx.scan(lambda c: c, in_axes=CARRY, out_axes=CARRY, length=2)(1.0, 2.0)


def test_shared_objects_under_inconsistent_axes_are_refused():
    m = Foo()
    match = r"different in_axes for a shared Param: at 'c.y' it is Carry, at 'x.k.y' it is 0"
    with pytest.raises(ValueError, match=match):
        nnx.scan(lambda c, x: (c, None))(m, {"k": m})
    out, _ = nnx.scan(lambda c, x: (c, x))([m, m], XS)
    assert out[0] is out[1] is m


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


SOME = nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: 0})


def test_a_shared_part_is_replaced_beside_a_scanned_one():
    """A list cannot be carried as a whole; what it shares with others is compared without it."""

    def replace(m):
        m.first = [nnx.Param(m.first[0] * 2), nnx.Dict()]
        m.second = nnx.Dict()
        m.n[...] += 1

    empty = nnx.Dict()
    n = nnx.BatchStat(jnp.array(0.0))
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
    m = nnx.Dict(a=nnx.Param(jnp.ones(2)))

    @nnx.scan(in_axes=(nnx.Carry, None, 0), out_axes=nnx.Carry)
    def run(carry, m, x):
        m.alias = m.a
        return carry + m.alias.sum()

    assert run(jnp.zeros(()), m, jnp.ones(3)) == 6
    assert m.alias is m.a

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def carried(m, x):
        m.other = m.a
        return m

    assert carried(m, jnp.ones(3)) is m
    assert m.other is m.a and set(m) == {"a", "alias", "other"}


@pytest.mark.parametrize("axes", [nnx.Carry, nnx.StateAxes({...: nnx.Carry})])
def test_a_carried_object_may_get_another_name_for_what_stays_in_its_place(axes):
    def name(m, x):
        m.part.alias, m.box = m.part.n, nnx.List([m.part.n])
        m.part.n[...] += x

    def run(body, m, **mode):
        if axes is nnx.Carry:
            return nnx.scan(
                lambda m, x: (body(m, x), m)[1], in_axes=(axes, 0), out_axes=axes, **mode
            )(m, jnp.arange(3.0))
        nnx.scan(body, in_axes=(axes, 0), out_axes=0, **mode)(m, jnp.arange(3.0))
        return m

    n = nnx.Variable(jnp.array(1.0))
    m = nnx.Dict(part=nnx.Dict(n=n))
    assert run(name, m) is m
    assert m.part.alias is m.box[0] is m.part.n is n and n.value == 4

    def replace(m, x):
        m.before, m.n = m.n, nnx.Variable(m.n + x)

    def copy(m, x):
        m.copy = nnx.Variable(m.n[...])

    def move(m, x):
        m.other = m.n
        del m.n

    for body, wrong in ((replace, "'before', 'n'"), (copy, "'copy'"), (move, "'n'")):
        m = nnx.Dict(n=n)
        with pytest.raises(TypeError, match=f"the body .*{wrong}"):
            run(body, m)
        assert list(m) == ["n"]
    if axes is nnx.Carry:
        with pytest.raises(ValueError, match="the body changes attributes"):
            run(name, nnx.Dict(part=nnx.Dict(n=n)), graph_updates=False)


def metadata(m):
    m.x.set_metadata("tag", 1)


def new_entry(m):
    m.parts["b"] = nnx.Param(jnp.ones(2))


def new_variable(m):
    m.x = nnx.Param(m.x * 2)


@pytest.mark.parametrize("edit", [metadata, new_entry, new_variable])
@pytest.mark.parametrize("axis", [None, 0], ids=["broadcast", "scanned"])
@pytest.mark.parametrize("mode", [{"graph_updates": False}, {"graph": False}])
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
    assert carry.n[...] == (12.0 if edit is new_variable else 6.0)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: nnx.scan(lambda c, y: (c + y, c), in_axes=(CARRY, 0), out_axes=(CARRY, 0))(x[0], x),
        lambda x: nnx.scan(lambda y: y * 2, length=x.shape[0], in_axes=0, out_axes=1)(x),
        lambda x: nnx.scan(nnx.remat(lambda c, y: (c * y, y)), reverse=True)(x[0], x),
        lambda x: nnx.fori_loop(np.int8(0), x.shape[0], lambda i, c: c + x[i], x[0]),
        lambda x: nnx.while_loop(lambda c: c[0] < x.shape[0], lambda c: (c[0] + 2, c[1] + 1), (0, x)),
        lambda x: nnx.RNN(nnx.GRUCell(4, 3, rngs=nnx.Rngs(0)))(x),
    ],
    ids=["carry", "length", "reverse", "fori_loop", "while_loop", "RNN"],
)  # fmt: skip
def test_a_symbolic_number_of_iterations(run):
    x = jnp.arange(28.0).reshape(7, 4) / 10
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("t, 4"), x.dtype)
    found = jax.export.export(jax.jit(run))(shape).call(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, run(x))


def test_an_object_in_the_place_of_a_state_is_refused():
    with pytest.raises(ValueError, match="'c.0': .* became Foo"):
        nnx.scan(lambda c, x: ((c[1], c[1]), x))((nnx.state(Foo()), Foo()), jnp.ones(2))
