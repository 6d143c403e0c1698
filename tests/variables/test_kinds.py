"""The kinds of Variables and the registry of their names."""

from __future__ import annotations

import pytest

import nnxlite as nnx

NAMES = {
    "params": nnx.Param,
    "batch_stats": nnx.BatchStat,
    "cache": nnx.Cache,
    "intermediates": nnx.Intermediate,
    "perturbations": nnx.Perturbation,
}


def test_kinds_can_be_registered():
    class Momentum(nnx.Variable): ...

    @nnx.register_variable_name("test_decorated")
    class Decorated(nnx.Param): ...

    assert nnx.register_variable_name("test_momenta", Momentum) is Momentum
    assert nnx.variable_name_from_type(Momentum) == "test_momenta"
    assert nnx.variable_type_from_name("test_decorated") is Decorated
    nnx.register_variable_name("test_momenta", Decorated, overwrite=True)
    assert nnx.variable_type_from_name("test_momenta") is Decorated


def test_a_taken_name_is_refused():
    class Other(nnx.Variable): ...

    with pytest.raises(
        ValueError, match="Name params already mapped to type Param.*overwrite=True"
    ):
        nnx.register_variable_name("params", Other)
    with pytest.raises(ValueError, match="Name params already mapped to type Param"):
        nnx.register_variable_name("params", nnx.Param)
    assert nnx.variable_type_from_name("params") is nnx.Param


def test_a_name_that_another_thread_registers_in_the_meantime():
    class Base(nnx.Variable):
        def __init_subclass__(cls):
            if not made:  # what another thread may do at this moment
                made.append(nnx.variable_type_from_name("test_race", allow_register=True))

    made: list[type] = []
    found = nnx.variable_type_from_name("test_race", base=Base, allow_register=True)
    assert made == [found]


def test_only_variable_classes_have_names():
    for kind in (int, 3, nnx.Param(1)):
        with pytest.raises(TypeError, match="Expected a Variable class for the name 'x', got"):
            nnx.register_variable_name("x", kind)


def test_unknown_names_and_kinds():
    class Unknown(nnx.Variable): ...

    with pytest.raises(
        ValueError, match="Name test_none is not registered in the registry.*allow_register=True"
    ):
        nnx.variable_type_from_name("test_none")
    with pytest.raises(
        ValueError, match="Type Unknown is not registered in the registry.*allow_register=True"
    ):
        nnx.variable_name_from_type(Unknown)
    for kind in (nnx.Variable, nnx.RngState, nnx.RngKey, nnx.RngCount):
        with pytest.raises(ValueError, match="is not registered in the registry"):
            nnx.variable_name_from_type(kind)


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
