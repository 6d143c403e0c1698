"""Metadata of Variables, the callbacks among it, and the names of their kinds."""

import jax.numpy as jnp

import nnxlite as nnx

ONES = jnp.ones(2)
REQUIRED = {"hijax": False, "ref": False, "eager_sharding": True}


def plus(amount):
    """A callback that adds."""
    return lambda variable, value: value + amount


def test_reading_entries():
    v = nnx.Param(ONES, tag="t", table=[1])
    assert v.get_metadata() == {**REQUIRED, "tag": "t", "table": [1]}
    assert v.get_metadata(exclude_required=True) == {"tag": "t", "table": [1]}
    assert v.get_metadata("tag") == v.tag == "t" and v.get_metadata("zz", 3) == 3
    assert v.has_metadata("tag") and v.has_metadata("ref") and not v.has_metadata("zz")
    v.get_metadata()["tag"] = "changed"
    assert v.tag == "t"
    v.del_metadata("tag")
    assert v.get_metadata(exclude_required=True) == {"table": [1]}


def test_with_metadata_annotates_an_initializer():
    def zeros(key, shape):
        """Zeros."""
        return jnp.zeros(shape)

    init = nnx.with_metadata(
        zeros,
        on_get_value=plus(1.0),
        on_set_value=[plus(2.0), plus(3.0)],
        on_create_value=plus(10.0),
        tag="t",
    )
    assert init.__doc__ == "Zeros." and isinstance(init(0, (2,)), nnx.VariableMetadata)
    v = nnx.Param(init(0, (2,)), other=1)
    assert v.get_raw_value()[0] == 10.0 and v.value[0] == 11.0 and (v.tag, v.other) == ("t", 1)
    v.value = jnp.zeros(2)
    assert v.get_raw_value()[0] == 5.0
    v.raw_value = ONES  # around the callbacks
    assert v.raw_value is ONES and v.value[0] == 2.0
    entries = v.get_metadata(exclude_required=True)
    assert sorted(entries) == ["on_create_value", "on_get_value", "on_set_value", "other", "tag"]


# Callbacks ---------------------------------------------------------------------------------------


def test_several_callbacks_run_in_order():
    double = lambda v, x: 2 * x
    for hooks in ((plus(1.0), double), [plus(1.0), double]):
        assert nnx.Param(1.0, on_get_value=hooks).value == 4.0
    v = nnx.Param(1.0, on_create_value=(plus(1.0), double))
    assert v.value == 4.0 and v.create_value(2.0) == 2.0


def test_callbacks_with_references():
    v = nnx.Param(ONES, ref=True, on_get_value=plus(1.0), on_set_value=plus(10.0))
    v[0] = 1.0
    assert v.get_raw_value()[...].tolist() == [11.0, 1.0] and v[0] == 12.0
    v.value = jnp.zeros(2)
    assert v.value.tolist() == [11.0, 11.0]


# Names -------------------------------------------------------------------------------------------


def test_kinds_can_be_registered():
    class Momentum(nnx.Variable): ...

    @nnx.register_variable_name("test_decorated")
    class Decorated(nnx.Param): ...

    assert nnx.register_variable_name("test_momenta", Momentum) is Momentum
    assert nnx.variable_name_from_type(Momentum) == "test_momenta"
    assert nnx.variable_type_from_name("test_decorated") is Decorated
    nnx.register_variable_name("test_momenta", Decorated, overwrite=True)
    assert nnx.variable_type_from_name("test_momenta") is Decorated


def test_a_name_that_another_thread_registers_in_the_meantime():
    class Base(nnx.Variable):
        def __init_subclass__(cls):
            if not made:  # what another thread may do at this moment
                made.append(nnx.variable_type_from_name("test_race", allow_register=True))

    made: list[type] = []
    found = nnx.variable_type_from_name("test_race", base=Base, allow_register=True)
    assert made == [found]


def test_names_can_be_made_on_demand():
    made = nnx.variable_type_from_name("test_made", base=nnx.Param, allow_register=True)
    assert issubclass(made, nnx.Param) and made.__name__ == "test_made"
    assert nnx.variable_type_from_name("test_made") is made

    def fresh():
        class TestFresh(nnx.Variable): ...

        return TestFresh

    first, second = fresh(), fresh()
    names = [nnx.variable_name_from_type(kind, allow_register=True) for kind in (first, second)]
    assert names == ["TestFresh", "TestFresh_1"]
    assert nnx.variable_name_from_type(second) == "TestFresh_1"
