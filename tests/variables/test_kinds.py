"""The kinds of Variables and the registry of their names."""

from __future__ import annotations

import nnxlite as nnx


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
