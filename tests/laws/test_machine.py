"""Laws L4, L5, L6, L8 and L9: random programs under transforms, and the same as plain Python.

    NNXLITE_MACHINE=1000 python -m pytest tests/laws/test_machine.py

runs so many. After each step it compares values, types, statics, sharing and identity (L4, L5), how
often a function was traced (L6), what a failed call left (L8), and now and then what is alive (L9).
"""

import copy
import gc
import os
import pickle
import weakref

import cloudpickle
import jax
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

import nnxlite as nnx
from tests.laws import model, programs
from tests.laws.edits import OBJECTS, PLAIN, REAL, Broken, all_of, new, pick, raw, values_in
from tests.laws.graphs import Node
from tests.laws.model import content, references
from tests.laws.programs import CALLS, Step, calls, edits, numbers, run, value_programs

pytestmark = pytest.mark.filterwarnings("ignore:The random stream .* is broadcast")

COUNTED = ("jit", "filter_jit")
"""Calls whose traces are counted."""
COPIES = (
    copy.deepcopy,
    lambda x: pickle.loads(pickle.dumps(x)),
    lambda x: pickle.loads(cloudpickle.dumps(x, protocol=2)),
    nnx.clone,
)
LARGEST = 4
"""Roots from which on no new one is added."""


class Machine(RuleBasedStateMachine):
    """A few object graphs that transforms work on, and a copy of them for plain Python."""

    def __init__(self) -> None:
        super().__init__()
        self.real = Node(), nnx.Dict(), new(REAL, nnx.RngStream)
        for number in range(10):
            run(REAL, [Step("new_variable", number // 4, number, number)], self.real)
        self.plain = model.copied(self.real)
        self.traced: set[int] = set()
        self.made: list[weakref.ref] = []
        programs.INSIDE[:] = [self.notice]

    def notice(self, here):
        """Note what there was: objects from inside of a transform must not outlive the call."""
        self.made += map(weakref.ref, references(here))

    def perform(self, step):
        """A step in both worlds."""
        real, plain = references(self.real), references(self.plain)
        arrays, expected = raw(real), raw(plain)
        self.notice(self.real)
        call = self.call_of(step)
        traces = programs.ENTERED[step.program, step.b]
        refused = attempt(REAL, step, self.real)
        expected_refusal = attempt(PLAIN, step, self.plain)
        if bool(refused) is not bool(expected_refusal):
            cause = (refused or expected_refusal)[0]
            raise AssertionError("refused in one of the worlds only") from cause
        if call and call in self.traced and not refused:
            assert traces == programs.ENTERED[step.program, step.b], "traced again"
        self.traced.add(call)
        for x, old, now, before, after in zip(
            real, arrays, raw(real), expected, raw(plain), strict=True
        ):
            assert now is old or after is not before, f"{x} was written"
        self.compare(real, plain)
        model.check_plan(pick(self.real, step.a + step.b + step.c))

    def compare(self, real=(), plain=()):
        """Both worlds have one form: values, sharing, and which of the former references is where."""
        mine, theirs = ([self.real, real], [self.plain, plain])
        assert model.canonical(mine, content) == model.canonical(theirs, content)

    def call_of(self, step):
        """A call whose traces are counted: what is called, and the structure that it gets."""
        if step.name not in COUNTED:
            return None
        targets = programs.targets_of(step, self.real)
        types = tuple(map(jax.typeof, values_in(targets)))  # with the mesh of an array
        return hash((step, programs.form(targets), types))

    @rule(
        steps=st.lists(edits | calls(2), min_size=2, max_size=8),
        how=st.sampled_from(["drop", "add", "renew", "copy", "collect"]),
        a=numbers,
        b=numbers,
    )
    def program(self, steps, how, a, b):
        """Some steps, and a change of the roots; a rule of its own would be most of many sessions."""
        for step in steps:
            self.perform(step)
        getattr(self, how)(a, b)

    @rule(
        name=st.sampled_from(COUNTED) | st.sampled_from(sorted(CALLS)),
        program=value_programs,
        a=numbers,
        b=numbers,
        c=numbers,
    )
    def call_again(self, name, program, a, b, c):
        """Call a function that writes values often enough for an equal structure to come again.

        The first call puts its result into an argument, which changes the structure; a copy does not.
        """
        for _ in range(3):
            self.perform(Step(name, a, b, c, program))
        self.copy(a, b)
        self.perform(Step(name, a, b, c, program))

    def drop(self, a, b):
        """Forget a root."""
        if len(self.real) > 1:
            self.real, self.plain = (
                tuple(x for i, x in enumerate(roots) if i != a % len(roots))
                for roots in (self.real, self.plain)
            )

    def add(self, a, b):
        """Make an inner object a root as well."""
        if len(self.real) < LARGEST:
            self.real, self.plain = (
                (*roots, pick(all_of(roots, nnx.Pytree), a)) for roots in (self.real, self.plain)
            )

    def renew(self, a, b):
        """Replace a root by an empty object."""
        kind = pick(OBJECTS, b)
        self.replace(a, new(REAL, kind), new(PLAIN, kind))

    def copy(self, a, b):
        """Replace a root by a copy of it."""
        roots = pick(self.real, a), pick(self.plain, a)
        self.replace(a, pick(COPIES, b)(roots[0]), model.copied(roots[1]))

    def replace(self, a, real, plain):
        index = a % len(self.real)
        self.real = (*self.real[:index], real, *self.real[index + 1 :])
        self.plain = (*self.plain[:index], plain, *self.plain[index + 1 :])
        self.compare()

    def collect(self, a, b):
        """What is not reachable any more is gone, and so is all that was inside of transforms."""
        gc.collect()
        reachable = {id(x) for x in references(self.real)}
        made, self.made = self.made, []
        left = [x() for x in made if x() is not None and id(x()) not in reachable]
        assert not left, "kept alive"


def attempt(world, step, here):
    """Perform a step; why it was refused."""
    try:
        return run(world, [step], here)
    except Broken as error:
        return [error]


def sessions(count):
    """Settings for so many sessions, the same in every run."""
    return settings(
        max_examples=int(os.environ.get("NNXLITE_MACHINE", count)),
        stateful_step_count=8,
        derandomize=True,
    )


TestMachine = Machine.TestCase
TestMachine.settings = sessions(4)


@pytest.mark.slow
class TestMoreSessions(Machine.TestCase):
    settings = sessions(16)
