"""Random programs over random object graphs, compared with a slow model after every step.

    NNXLITE_MACHINE=1000 python -m pytest tests/laws/test_machine.py

A `Session` has a few object graphs, and the same ones in the slow model (`worlds`). A step edits
them or gives them to a transform (`programs` has the steps); then the whole real graph is compared with
the slow one: types, statics, values, identity, sharing, order.
`NNXLITE_MACHINE` is the number of programs.
"""

from __future__ import annotations

import copy
import gc
import pickle
import random
import typing as tp
import weakref

import jax
import numpy as np

import nnxlite as nnx
from tests.laws import model, objects, programs
from tests.laws.model import pick, references
from tests.laws.programs import EDIT, KEEPING, LOOPS, VALUE_STEPS, Step, run
from tests.laws.worlds import Broken, Slow, form, values_in

FIRST = ("Node", "Dict", "Stream")
"""The roots of a new session."""
FIRST_STEPS = [Step("new_variable", number // 4, number, number) for number in range(10)]
"""What is done to them."""
LARGEST = 4
"""Roots from which on no new one is added."""


# Random steps -------------------------------------------------------------------------------------


def random_step(rng: random.Random, depth: int = 3) -> Step:
    """A step of any kind; a call has a program of further steps."""
    numbers = [rng.randrange(12) for _ in range(3)]
    chance = rng.random()
    if depth == 3 and chance < 0.12:
        return Step(rng.choice(SESSION_STEPS), *numbers)
    if depth == 0 or chance < 0.65:
        return Step(rng.choice(list(EDIT)), *numbers)
    return random_call(rng, rng.choice(programs.CALLS), depth)


def random_call(rng: random.Random, name: str, depth: int) -> Step:
    """A call with a program."""
    if name in LOOPS or rng.random() < 0.8 * (name in KEEPING):
        inner = [
            Step(rng.choice(VALUE_STEPS), *(rng.randrange(12) for _ in range(3)))
            for _ in range(rng.randrange(4))
        ]
    else:
        inner = [random_step(rng, min(depth, 2) - 1) for _ in range(rng.randrange(5))]
    if rng.random() < 0.15:
        inner.insert(rng.randint(0, len(inner)), Step("fail", rng.randrange(6), rng.randrange(6)))
    return Step(name, *(rng.randrange(12) for _ in range(3)), tuple(inner))


# Comparison ---------------------------------------------------------------------------------------

IMPLIED = ("hijax", "ref", "eager_sharding")
"""Metadata that every real Variable has."""


class Mismatch(AssertionError):
    """The two graphs differ, in what, and how."""

    def __init__(self, what: str, text: str) -> None:
        super().__init__(f"{what}: {text}")
        self.what = what


class Pairs:
    """Which real object stands for which object of the slow model, for as long as both live."""

    def __init__(self) -> None:
        self.real: dict[int, tuple[tp.Any, weakref.ref]] = {}

    def match(self, path: str, slow: tp.Any, real: tp.Any) -> None:
        known = self.real.get(id(slow))
        if known is None:
            self.real[id(slow)] = slow, weakref.ref(real)
        elif known[1]() is not real:
            raise Mismatch("identity", f"{path} is another {type(real).__name__} than before")

    def of(self, slow: tp.Any) -> tp.Any:
        return self.real[id(slow)][1]()

    def dead(self, reachable: tp.Iterable[tp.Any]) -> list[tp.Any]:
        """The real objects that should be gone; they are forgotten here."""
        known = {id(x) for x in reachable}
        gone = [entry for key, entry in self.real.items() if key not in known]
        self.real = {key: entry for key, entry in self.real.items() if key in known}
        return [entry[1]() for entry in gone if entry[1]() is not None]


def compare(pairs: Pairs, real: tp.Any, slow: tp.Any) -> None:
    """Raise `Mismatch` at the first difference; references that are new to `pairs` are added."""
    slow_of: dict[int, tp.Any] = {}
    real_of: dict[int, tp.Any] = {}

    def expect(what: str, path: str, found: tp.Any, expected: tp.Any) -> None:
        if found != expected:
            raise Mismatch(what, f"{path} is {found!r} where the model has {expected!r}")

    def visit(path: str, real: tp.Any, slow: tp.Any) -> None:
        if isinstance(real, jax.core.Tracer):
            raise Mismatch("tracer", f"{path} is {real}")
        if model.is_reference(slow):
            expect("type", path, type(real), objects.REAL[type(slow)])
            if id(slow) in real_of or id(real) in slow_of:
                if real_of.get(id(slow)) is not real or slow_of.get(id(real)) is not slow:
                    raise Mismatch("sharing", path)
                return
            real_of[id(slow)], slow_of[id(real)] = real, slow
            pairs.match(path, slow, real)
        if model.is_variable(slow):
            metadata = real.get_metadata()
            metadata = {k: v for k, v in metadata.items() if k not in IMPLIED}
            expect("metadata", path, metadata, slow.metadata)
            visit(f"{path}.value", real.get_raw_value(), slow.value)
        elif model.is_object(slow):
            expect("status", path, real._nnx_status, slow._nnx_status)
            attributes = real._nnx_dict if isinstance(real, nnx.List) else vars(real)
            expect("attributes", path, set(attributes), set(vars(slow)))
            for key, value in vars(slow).items():
                visit(f"{path}.{key}", attributes[key], value)
        elif model.is_array(slow):
            if not isinstance(real, jax.Array):
                raise Mismatch("array", f"{path} is {real!r}")
            expect("shape", path, (real.dtype, real.shape), (slow.dtype, slow.shape))
            if objects.is_key(slow):
                real, slow = jax.random.key_data(real), jax.random.key_data(slow)
            if not np.array_equal(np.asarray(real), slow):
                raise Mismatch("value", f"{path} is {real} where the model has {slow}")
        elif model.is_branch(slow):
            expect("type", path, type(real), type(slow))
            inside, other = model.children(real), model.children(slow)
            expect("keys", path, [k for k, *_ in inside], [k for k, *_ in other])
            for (key, x, _), (_, y, _) in zip(inside, other, strict=True):
                visit(f"{path}.{key}", x, y)
            if model.is_foreign(slow):
                expect("label", path, real.label, slow.label)
        else:
            expect("static", path, (type(real), real), (type(slow), slow))

    visit("", real, slow)


# The session --------------------------------------------------------------------------------------

COUNTED = ("jit", "filter_jit")
RECENT = 200
TRACED: dict[int, int] = {}
"""What was traced already: form of the call, number of forms before it."""
INSIDE_OTHERS: set[tuple[tp.Any, ...]] = set()
"""Calls that were in programs of others, of whatever form: those may be traced already, too."""


class Session:
    """A few object graphs, and the same ones in the slow model."""

    def __init__(self) -> None:
        self.real, self.slow = programs.REAL, Slow()
        self.real.outer.clear()
        self.reals: tuple[tp.Any, ...] = tuple(map(self.real.new, FIRST))
        self.slows: tuple[tp.Any, ...] = tuple(map(self.slow.new, FIRST))
        self.pairs = Pairs()
        self.inside: list[weakref.ref] = []
        programs.INSIDE[:] = [self.notice]
        self.check()
        for step in FIRST_STEPS:
            self.step(step)

    def notice(self, here: tp.Any) -> None:
        """Note what a function got: what is inside of a transform must not outlive the call."""
        self.inside += [weakref.ref(x) for x in references(here)]

    def step(self, step: Step) -> None:
        """Perform one step on both sides and compare them."""
        if step.name in SESSION_STEPS:
            getattr(self, step.name)(step.a, step.b, step.c)
        else:
            self.both(step)
        self.check(step.a + step.b + step.c)

    def both(self, step: Step) -> None:
        """A step of a program on both sides."""
        values = [(x, x.value) for x in references(self.slows) if model.is_variable(x)]
        cells = [(self.pairs.of(x), x, value) for x, value in values]
        before = [(real, real.get_raw_value(), x, value) for real, x, value in cells]
        INSIDE_OTHERS.update(map(call_of, steps_inside(step.program)))
        expected_traces = self.expected_traces(step)
        traces = programs.ENTERED[step.program, step.b]
        expected = self.perform(self.slow, step, self.slows)
        refused = self.perform(self.real, step, self.reals)
        if bool(expected) is not bool(refused):
            cause = refused[0] if refused else None
            raise Mismatch("refused", f"{refused}, in the model: {expected}") from cause
        for real, raw, x, value in before:
            if x.value is value and real.get_raw_value() is not raw:
                raise Mismatch("written", str(real))
        if expected_traces is not None and not refused:
            traces = programs.ENTERED[step.program, step.b] - traces
            if traces not in expected_traces:
                raise Mismatch("traced", f"{traces} times instead of {expected_traces}")

    def perform(self, w: tp.Any, step: Step, here: tp.Any) -> list[Exception]:
        try:
            return run(w, (step,), here)
        except Broken as error:
            return [error]

    def expected_traces(self, step: Step) -> tuple[int, ...] | None:
        """How often the call may run the function: once for each form, where the model knows."""
        if step.name not in COUNTED:
            return None
        targets = programs.targets_of(self.slow, step, self.slows)
        reals = programs.targets_of(self.real, step, self.reals)
        types = tuple(map(jax.typeof, values_in(reals)))  # the mesh of an array is part of its type
        key = hash((step.name, step.program, step.b, form(list(targets)), types))
        number = TRACED.get(key)
        if number is None:
            TRACED[key] = len(TRACED)
            return (0, 1) if call_of(step) in INSIDE_OTHERS else (1,)
        return (0,) if len(TRACED) - number < RECENT else (0, 1)

    def check(self, number: int = 0) -> None:
        """Everything is as in the slow model, and the engine sees it as it is now."""
        compare(self.pairs, self.reals, self.slows)
        check_plan(self.reals, self.slows, pick(range(len(self.reals)), number))

    # Steps that are not for functions under transforms

    def again(self, a: int, b: int, c: int) -> None:
        """Call a compiled function that writes values, often enough for an equal form to come again.

        The first call puts its result into an argument, which changes the form; a copy does not.
        """
        rng = random.Random(f"{a} {b} {c}")
        program = tuple(
            Step(rng.choice(VALUE_STEPS), *(rng.randrange(12) for _ in range(3)))
            for _ in range(1 + a % 3)
        )
        for _ in range(3):
            self.both(Step(pick(COUNTED, a + b + c), a, b, c, program))
            self.check()
        self.copy(rng.randrange(len(self.reals)), b, c)
        self.check()
        self.both(Step(pick(COUNTED, a + b + c), a, b, c, program))

    def drop(self, a: int, b: int, c: int) -> None:
        """Forget a root."""
        index = a % len(self.reals)
        if len(self.reals) > 1:
            self.reals = self.reals[:index] + self.reals[index + 1 :]
            self.slows = self.slows[:index] + self.slows[index + 1 :]

    def add(self, a: int, b: int, c: int) -> None:
        """Make an inner object a root, too."""
        if len(self.reals) < LARGEST:
            self.slows += (pick([x for x in references(self.slows) if model.is_object(x)], a),)
            self.reals += (self.pairs.of(self.slows[-1]),)

    def renew(self, a: int, b: int, c: int) -> None:
        """Replace a root by an empty object."""
        name, index = pick(programs.OBJECTS, b), a % len(self.reals)
        self.reals = replaced(self.reals, index, self.real.new(name))
        self.slows = replaced(self.slows, index, self.slow.new(name))

    def copy(self, a: int, b: int, c: int) -> None:
        """Replace a root by a copy of it."""
        index = a % len(self.reals)
        makers = [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), nnx.clone]
        new = pick(makers, b)(self.reals[index])
        self.reals = replaced(self.reals, index, new)
        self.slows = replaced(self.slows, index, self.slow.clone(self.slows[index]))

    def collect(self, a: int, b: int, c: int) -> None:
        """What is not reachable any more is gone, and so is all that was inside of transforms."""
        gc.collect()
        left = self.pairs.dead(references(self.slows))
        reachable = {id(x) for x in references(self.reals)}
        left += [x() for x in self.inside if x() is not None and id(x()) not in reachable]
        self.inside.clear()
        if left:
            raise Mismatch("kept alive", str(left))


SESSION_STEPS = (*["again"] * 3, "drop", *["add"] * 2, "renew", *["copy"] * 2, "collect")


def replaced(roots: tuple[tp.Any, ...], index: int, new: tp.Any) -> tuple[tp.Any, ...]:
    return (*roots[:index], new, *roots[index + 1 :])


def call_of(step: Step) -> tuple[tp.Any, ...]:
    """The function that a step calls, under which transform."""
    return step.name, step.program, step.b


def steps_inside(program: tp.Sequence[Step]) -> tp.Iterator[Step]:
    """All steps of a program, those of its calls included."""
    for step in program:
        yield step
        yield from steps_inside(step.program)


def check_plan(reals: tuple[tp.Any, ...], slows: tuple[tp.Any, ...], index: int) -> None:
    """The engine's view of a root, whose plan may be warm, and of a copy that nobody has seen."""
    real, slow = reals[index], slows[index]
    graphdef, state = nnx.split(real)
    expected = model.leaves(slow)
    found = nnx.to_flat_state(state)
    if [path for path, _ in found] != [path for path, _ in expected]:
        raise Mismatch("split", f"{found} instead of {expected}")
    for (path, leaf), (_, direct) in zip(found, model.leaves(real), strict=True):
        if leaf is not direct:
            raise Mismatch("split", f"{path} is {leaf} instead of {direct}")
    by_hand = model.copied(slow, variable=real_variable, classes=objects.REAL)
    if nnx.graphdef(by_hand) is not graphdef:
        raise Mismatch("split", f"{graphdef} instead of {nnx.graphdef(by_hand)}")


def real_variable(cell: objects.Cell) -> nnx.Variable:
    return objects.REAL[type(cell)](cell.value, **cell.metadata)
