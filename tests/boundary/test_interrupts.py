"""What an interrupt leaves behind, in the hard place: while results are written back."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import optax
import pytest

import nnxlite as nnx
from tests.reliability import faults
from tests.reliability.interrupts import interrupted_at_random, library_lines

# An interrupt that arrives in a finalizer, or in a callback of the garbage collector, is reported only.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
)


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
    total = library_lines(lambda: step(model))
    for at in range(1, total + 1, 3):
        lines = faults.Lines(faults.in_library, at, faults.raising(KeyboardInterrupt))
        before = steps_of(model)
        with contextlib.suppress(KeyboardInterrupt):
            lines.run(lambda: step(model))
        outcomes[steps_of(model) == before + 1] += 1
        assert steps_of(model) in (before, before + 1), lines.place
        nnx.split(model)
    assert outcomes[True] > 0 and outcomes[False] > 20
    assert step.cache_info().traces == 1


@pytest.mark.parametrize("options", [{}, {"donate": "written"}], ids=str)
def test_L8_interrupts_at_random_moments_leave_all_or_nothing(options):
    model = Many(30)
    step = nnx.jit(count_values, **options)
    step(model)

    def check():
        assert len({int(part.value[0]) for part in model.parts}) == 1

    assert interrupted_at_random(lambda: step(model), check, count=60, seed=0) == 60


def test_L8_an_eager_update_of_an_optimizer_is_interrupted_before_or_after_it_is_done():
    model = nnx.Dict(a=nnx.Param(jnp.zeros(2)), b=nnx.Param(jnp.zeros(2)))
    optimizer = nnx.Optimizer(model, optax.trace(1.0), wrt=nnx.Param)
    grads = nnx.grad(lambda m: (m.a + m.b).sum())(model)
    optimizer.update(model, grads)

    def state():
        leaves = [model.a.value, model.b.value]
        leaves += [x for _, x in nnx.to_flat_state(nnx.state(optimizer))]
        return [float(jnp.sum(jnp.asarray(x))) for x in leaves]

    total = library_lines(lambda: optimizer.update(model, grads))
    for at in range(1, total + 1, 7):
        before = state()
        after = state_after(model, optimizer, grads, state)
        lines = faults.Lines(faults.in_library, at, faults.raising(KeyboardInterrupt))
        with contextlib.suppress(KeyboardInterrupt):
            lines.run(lambda: optimizer.update(model, grads))
        assert state() in (before, after), lines.place


def state_after(model, optimizer, grads, state):
    """The state that an update leads to, which is taken back."""
    kept = nnx.to_pure_dict(nnx.state((model, optimizer)))
    optimizer.update(model, grads)
    after = state()
    nnx.update((model, optimizer), kept)
    return after


def test_L8_an_update_is_interrupted_before_or_after_it_is_done():
    model = Many()
    new = nnx.to_pure_dict(nnx.state(Many(), nnx.Param))
    update = lambda: nnx.update(model, new)
    for number in range(1, library_lines(update) + 1):
        before = model.parts[0].value[0]
        new = {"parts": {n: jnp.full(2, before + 1) for n in range(5)}}
        lines = faults.Lines(faults.in_library, number, faults.raising(KeyboardInterrupt))
        with contextlib.suppress(KeyboardInterrupt):
            lines.run(update)
        assert len({float(part.value[0]) for part in model.parts}) == 1


def test_L8_a_result_that_cannot_be_built_is_found_before_anything_is_written():
    class Odd:
        def __init__(self, child):
            self.child = child

    building = []

    def build(_, children):
        building.append(children)
        if len(building) > 1:
            raise ValueError("not again")
        return Odd(*children)

    jax.tree_util.register_pytree_node(Odd, lambda odd: ((odd.child,), None), build)
    model = Many()

    @nnx.jit
    def step(model):
        count_values(model)
        return Odd(model)

    building.append("none is built")
    with pytest.raises(ValueError, match="not again"):
        step(model)
    assert steps_of(model) == 0
