"""Laws L4, L5, L6, L8 and L9: random programs against the slow model; `machine` says how to run many.

What they compare after each step: values, sharing and identity (L4, L5), how often a function was traced
(L6), that a failed call left all as it was (L8), and that nothing is kept alive (L9).
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.laws.machine import Session, random_step
from tests.laws.programs import Step

pytestmark = pytest.mark.filterwarnings("ignore:The random stream .* is broadcast")


class Machine(RuleBasedStateMachine):
    """A session as hypothesis drives it: each step is chosen by one number."""

    def __init__(self) -> None:
        super().__init__()
        self.session = Session()

    @rule(number=st.integers(0, 2**32 - 1))
    def step(self, number: int) -> None:
        """A step, performed on both sides and compared."""
        self.session.step(random_step(random.Random(number)))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=5, stateful_step_count=20, derandomize=True)


@pytest.mark.parametrize("seed", range(int(os.environ.get("NNXLITE_MACHINE", "12"))))
def test_L4_to_L9_long_sessions(seed):
    rng, session = random.Random(seed), Session()
    for _ in range(45):
        session.step(random_step(rng))


def test_a_step_is_text_that_can_be_read_back():
    step = random_step(random.Random(5))
    assert eval(repr(step)) == step and isinstance(step, Step)
