"""Every layer against NumPy: in float64, float32 and half precision, and for unusual batches."""

from __future__ import annotations

import jax
import pytest

from tests.numerics import checks
from tests.numerics.cases import FAMILIES

every_family = pytest.mark.parametrize("family", FAMILIES)


@every_family
def test_results_in_float64_are_those_of_the_formula(family):
    with jax.enable_x64(True):
        assert checks.values(list(FAMILIES[family]()), "float64").wrong == []


@every_family
def test_results_in_half_precision_are_off_by_a_few_units_of_rounding(family):
    """Inputs and parameters in float16; or, of every second case, computed in bfloat16."""
    cases = list(FAMILIES[family]())
    assert checks.values_of_half_precision(cases[::2], "float16").wrong == []
    typed = [case for case in cases if case.types][1::2]
    if typed:
        assert checks.values_of_half_precision(typed, "bfloat16", mixed=True).wrong == []


@every_family
def test_batches_of_any_shape(family):
    """None, one, no batch axis, two: in float32."""
    assert checks.batches(list(FAMILIES[family]())[::2]).wrong == []
