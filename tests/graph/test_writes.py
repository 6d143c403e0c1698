"""Every write of a Variable, in whatever way, is seen by the next call, and keeps no old value alive."""

from __future__ import annotations

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.graph._plan import find_plan


class Model(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.zeros(2))
        self.b = nnx.Param(jnp.zeros(2))


@nnx.jit
def read(model: Model) -> jax.Array:
    return model.a.value + 10 * model.b.value


@nnx.jit
def write_a(model: Model, by: jax.Array) -> None:
    model.a += by


@nnx.jit
def write_both(model: Model, by: jax.Array) -> None:
    model.a += by
    model.b += by


filter_read = nnx.filter_jit(lambda model: model.a.value + 10 * model.b.value)


def through_context(model: Model) -> None:
    with nnx.update_context("tag"):
        with nnx.split_context("tag") as context:
            graphdef, state = context.split(model)
        with nnx.merge_context("tag", True) as context:
            inner = context.merge(graphdef, state)
        inner.a += 1
        with nnx.split_context("tag") as context:
            out = context.split(inner)
        with nnx.merge_context("tag", False) as context:
            context.merge(*out)


WRITES = {
    "value": lambda m: setattr(m.a, "value", jnp.ones(2)),
    "whole": lambda m: m.a.__setitem__(..., jnp.ones(2)),
    "part": lambda m: m.a.__setitem__(slice(0, 2), 1.0),
    "operator": lambda m: m.a.__iadd__(1.0),
    "set_value": lambda m: m.a.set_value(jnp.ones(2)),
    "set_raw_value": lambda m: m.a.set_raw_value(jnp.ones(2)),
    "raw_value": lambda m: setattr(m.a, "raw_value", jnp.ones(2)),
    "copy_from": lambda m: m.a.copy_from(nnx.Param(jnp.ones(2))),
    "update_from_state": lambda m: m.a.update_from_state(nnx.Param(jnp.ones(2))),
    "update": lambda m: nnx.update(m, {"a": jnp.ones(2)}),
    "update by Variables": lambda m: nnx.update(m, nnx.State({"a": nnx.Param(jnp.ones(2))})),
    "another Variable": lambda m: setattr(m, "a", nnx.Param(jnp.ones(2))),
    "jit, one": lambda m: write_a(m, jnp.ones(2)),
    "jit, donated": lambda m: nnx.jit(write_a.fun, donate="written")(m, jnp.ones(2)),
    "contexts": through_context,
}


@pytest.mark.parametrize("reader", [read, filter_read], ids=["jit", "filter_jit"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_the_next_call_sees_what_was_written(write, reader):
    model = Model()
    for _ in range(2):
        assert np.array_equal(reader(model), [0, 0])
    write(model)
    assert np.array_equal(reader(model), [1, 1])
    write_both(model, jnp.ones(2))
    assert np.array_equal(reader(model), [12, 12])


@pytest.mark.parametrize("use", [read, filter_read, lambda m: write_a(m, jnp.ones(2))])
@pytest.mark.parametrize("write", ["value", "update", "part"])
def test_no_value_outlives_its_writing_over(use, write):
    model = Model()
    model.a.value = jnp.full(2, 0.5)
    for _ in range(3):
        use(model)
    old = weakref.ref(model.a.value)
    WRITES[write](model)
    assert old() is None


def test_a_value_of_another_type_is_looked_at_again():
    seen = []

    @nnx.filter_jit
    def look(model):
        seen.append(type(model.a.value))
        return model.b.value

    model = Model()
    for _ in range(3):
        look(model)
    model.a.value = "words"
    look(model)
    look(model)
    assert [issubclass(t, str) for t in seen] == [False, True]


def test_an_update_that_fails_half_way_is_seen_as_it_is():
    model = Model()
    for _ in range(3):
        read(model)

    class Interrupts:
        """Stands for an interrupt between two writes."""

        def __iter__(self):
            yield jnp.ones(2)
            raise KeyboardInterrupt

    plan = find_plan((model,))
    with pytest.raises(KeyboardInterrupt):
        plan.write((0, 1), Interrupts())
    assert np.array_equal(read(model), model.a.value + 10 * model.b.value)


def test_other_arguments_than_last_time():
    seen = []

    @nnx.jit
    def scaled(model, by):
        seen.append(type(by).__name__)
        return model.a.value * (by.a.value if isinstance(by, Model) else by)

    one, two = Model(), Model()
    one.a.value, two.a.value = jnp.ones(2), 3 * jnp.ones(2)
    for _ in range(2):
        assert scaled(one, 2.0)[0] == 2
        assert scaled(two, 2.0)[0] == 6
        assert scaled(one, jnp.float32(4))[0] == 4
        assert scaled(one, two)[0] == scaled(two, one)[0] == 3
        assert scaled(two, two)[0] == 9
        assert scaled(one, by=2.0)[0] == 2
    assert len(seen) == 5  # a float, an array, two Models, one twice, a name


def test_a_variable_is_updated_from_what_unpack_gave():
    v = nnx.Param(jnp.array(1.0))
    nnx.update(v, nnx.unpack(nnx.Param(jnp.array(2.0))))
    assert float(v.value) == 2
