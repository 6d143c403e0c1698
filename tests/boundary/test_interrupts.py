"""What an interrupt leaves behind, in the hard place: while results are written back."""

import contextlib
import linecache
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import nnxlite as nnx
from tests.laws import model as slow_model
from tests.laws.model import content

# An interrupt that arrives in a finalizer, or in a callback of the garbage collector, is reported only.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
)


LIBRARY = os.fspath(Path(nnx.__file__).parent) + os.sep


class Lines:
    """Calls a function, counts its lines in the library, and interrupts it before one of them."""

    def __init__(self, call, at=0):
        self.count, self.place, self.at = 0, "", at
        before = sys.gettrace()
        sys.settrace(self.entered)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                call()
        finally:
            sys.settrace(before)

    def entered(self, frame, event, arg):
        name, blocks = frame.f_code.co_filename, set()

        def line(frame, event, arg):
            if event == "line" and not leaves_a_block(frame, blocks):
                self.count += 1
                if self.count == self.at:
                    self.place = f"{name.removeprefix(LIBRARY)}:{frame.f_lineno}"
                    raise KeyboardInterrupt
            return line

        return line if name.startswith(LIBRARY) else None


def leaves_a_block(frame, entered):
    """Whether a `with` block is being left: Python raises nothing there, which would skip `__exit__`."""
    number = frame.f_lineno
    if not linecache.getline(frame.f_code.co_filename, number).lstrip().startswith("with "):
        return False
    entered ^= {number}
    return number not in entered


class Many(nnx.Module):
    """Many Variables that always have the same value."""

    def __init__(self, count=5):
        self.parts = nnx.List([nnx.Param(jnp.zeros(2)) for _ in range(count)])
        self.bare = jnp.zeros(2)
        self.plain = [jnp.zeros(2), nnx.Variable(jnp.zeros(2))]
        self.last = nnx.Variable(jnp.zeros(2))

    def arrays(self):
        parts = [part.value for part in self.parts]
        return [*parts, self.bare, self.plain[0], self.plain[1].value, self.last.value]


def count_values(model):
    for part in model.parts:
        part[...] += 1


def count_all(model):
    count_values(model)
    model.bare = model.bare + 1
    model.plain[0] = model.plain[0] + 1
    model.plain[1].value = model.plain[1].value + 1
    model.last = nnx.Variable(model.last.value + 1)
    return {"model": model}


def steps_of(model):
    """How many steps the model has done; all of it must have done the same."""
    done = {int(x[0]) for x in model.arrays()}
    assert len(done) == 1, done
    return done.pop()


@pytest.mark.parametrize("options", [{}, {"donate": "written"}, {"donate_argnums": 0}], ids=str)
def test_L8_an_interrupt_at_any_line_of_a_call_leaves_all_or_nothing(options):
    """Also where buffers are donated: what JAX has returned is written before the interrupt goes on."""
    step = nnx.jit(count_all, **options)
    model = Many()
    step(model)
    outcomes = {True: 0, False: 0}
    total = Lines(lambda: step(model)).count
    for at in range(1, total + 1, 11):
        before = steps_of(model)
        lines = Lines(lambda: step(model), at)
        outcomes[steps_of(model) == before + 1] += 1
        assert steps_of(model) in (before, before + 1), lines.place
        nnx.split(model)
    assert outcomes[True] > 0 and outcomes[False] > 8
    assert step.cache_info().traces == 1


def test_L8_an_eager_update_of_an_optimizer_is_interrupted_before_or_after_it_is_done():
    model = nnx.Dict(a=nnx.Param(jnp.zeros(2)), b=nnx.Param(jnp.zeros(2)))
    optimizer = nnx.Optimizer(model, optax.trace(1.0), wrt=nnx.Param)
    grads = nnx.grad(lambda m: (m.a + m.b).sum())(model)
    optimizer.update(model, grads)

    def state():
        leaves = [model.a.value, model.b.value]
        leaves += [x for _, x in nnx.to_flat_state(nnx.state(optimizer))]
        return [float(jnp.sum(jnp.asarray(x))) for x in leaves]

    total = Lines(lambda: optimizer.update(model, grads)).count
    for at in range(1, total + 1, 7):
        before, kept = state(), nnx.to_pure_dict(nnx.state((model, optimizer)))
        optimizer.update(model, grads)
        after = state()
        nnx.update((model, optimizer), kept)
        lines = Lines(lambda: optimizer.update(model, grads), at)
        assert state() in (before, after), lines.place


def test_L8_a_result_that_cannot_be_built_is_found_before_anything_is_written():
    class Odd:
        def __init__(self, child):
            self.child = child

    def build(_, children):
        raise ValueError("not again")

    jax.tree_util.register_pytree_node(Odd, lambda odd: ((odd.child,), None), build)
    model = Many()

    @nnx.jit
    def step(model):
        count_values(model)
        return Odd(model)

    with pytest.raises(ValueError, match="not again"):
        step(model)
    assert steps_of(model) == 0


class Edited(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones(2))
        self.bias = nnx.Param(jnp.ones(2))
        self.items = nnx.List([nnx.Param(jnp.zeros(n)) for n in range(3)])
        self.table = nnx.Dict(a=nnx.Param(jnp.zeros(1)))
        self.number, self.text, self.training = 1, "a", True
        inside = {"x": jnp.zeros(2), "y": nnx.Param(jnp.zeros(2))}
        self.arrays, self.plain = [jnp.zeros(1), inside, self.bias], jnp.zeros(2)


def changed_in_many_places(model):
    """An update with new values, metadata, paths and arrays in an object and in containers."""
    param = nnx.Param(jnp.full(2, 7.0), tag=3)
    return nnx.update(
        model,
        {
            "kernel": param,
            "bias": jnp.full(3, 5.0),  # another shape
            "new": nnx.Param(jnp.ones(1)),
            "items": {0: jnp.full(0, 1.0), 3: nnx.BatchStat(jnp.ones(3))},
            "table": {"a": jnp.full(1, 2.0), "b": param},
            "arrays": {0: jnp.full(1, 4.0), 1: {"x": jnp.full(2, 6.0)}},
            "plain": jnp.full(2, 8.0),
        },
    )


NEW = nnx.Param(jnp.ones(2))
EDITS = [
    lambda model: setattr(model, "new", NEW),
    lambda model: setattr(model, "number", 2),
    lambda model: setattr(model, "kernel", NEW),
    lambda model: delattr(model, "bias"),
    lambda model: model.items.append(NEW),
    lambda model: model.items.insert(0, NEW),
    lambda model: model.items.reverse(),
    lambda model: model.table.__delitem__("a"),
    lambda model: model.kernel.set_metadata(tag=1),
    lambda model: nnx.update(model, {"kernel": nnx.Param(jnp.zeros(2), tag=3)}),
    lambda model: model.eval(),
]
"""Ways to edit an object, after an observer has seen it."""
ONE_STEP = [
    changed_in_many_places,
    lambda model: nnx.pop(model, nnx.Param),
    lambda model: nnx.pop(model, nnx.PathContains("arrays"), nnx.PathContains(0)),
]
"""Of these an interrupt leaves all or nothing."""


@pytest.mark.parametrize("edit", EDITS + ONE_STEP, ids=range(len(EDITS + ONE_STEP)))
def test_L8_an_edit_that_is_interrupted_leaves_no_plan_valid_and_no_update_half_done(edit):
    """What the library has cached of an object is never believed after an edit was begun."""

    def interrupted(at):
        model = Edited()
        nnx.split(model)
        return model, Lines(lambda: edit(model), at), nnx.split(model)

    def form(model):
        return slow_model.canonical(model, content)

    after, all_lines, _ = interrupted(0)
    before, after, found = form(Edited()), form(after), set()
    for at in (*range(1, all_lines.count, max(5, all_lines.count // 25)), all_lines.count):
        model, lines, (graphdef, state) = interrupted(at)
        assert graphdef == nnx.graphdef(slow_model.copied(model)), lines.place
        leaves = [id(x) for _, x in slow_model.leaves(model)]
        assert [id(x) for _, x in nnx.to_flat_state(state)] == leaves
        assert edit not in ONE_STEP or form(model) in (before, after), lines.place
        found.add(form(model) == before)
    assert edit not in ONE_STEP or found == {True, False}
