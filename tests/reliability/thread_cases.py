"""Pairs of operations that two threads may run at once, and what must hold afterwards.

A case is a function that makes new objects and returns a `Pair`: two operations, and a check.  It is
called once for each place at which the first operation is stopped, so that nothing is compiled or
cached that is not meant to be.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import optax

import nnxlite as nnx
from nnxlite._jax import EAGER, trace_state
from nnxlite.graph import register_graph_node_type
from tests.laws import model as slow
from tests.laws.programs import content
from tests.reliability.interleave import Interleaving, Operation

_numbers = itertools.count(1)
ONE = jnp.ones(2)

EDITED = (RuntimeError, KeyError, ValueError, AttributeError, IndexError)
"""What a reader may get while another thread changes the structure that it reads."""


class Pair(tp.NamedTuple):
    """Two operations, and a check of what they did.

    Attributes:
        outer: the operation that is stopped at a line.
        inner: the operation that runs there.
        check: raises AssertionError if something is wrong.
        reentrant: whether the inner one may run in the same thread, as a signal handler does.
        may_fail: errors that either of them may raise.
    """

    outer: Operation
    inner: Operation
    check: tp.Callable[[Interleaving], None]
    reentrant: bool = False
    may_fail: tuple[type[Exception], ...] = ()


CASES: dict[str, tp.Callable[[], Pair]] = {}


def case(make: tp.Callable[[], Pair]) -> tp.Callable[[], Pair]:
    """Add a case."""
    CASES[make.__name__] = make
    return make


class Layer(nnx.Module):
    def __init__(self, tag: tp.Any) -> None:
        self.kernel = nnx.Param(jnp.array([1.0, 1.0]), tag=tag)
        self.count = nnx.BatchStat(jnp.array(0.0))
        self.tag = tag
        self.sizes = [tag]
        self.training = True

    def __call__(self, x: tp.Any) -> tp.Any:
        return x * self.kernel + (1.0 if self.training else 0.0)


class Model(nnx.Module):
    """Layers with sharing, a cycle and arrays in plain containers."""

    def __init__(self, tag: tp.Any) -> None:
        self.layers = nnx.List([Layer((tag, i)) for i in range(2)])
        self.tied = self.layers[0]
        twos, threes = jnp.array([2.0, 2.0]), jnp.array([3.0, 3.0])
        self.plain = [nnx.Param(twos), {"array": threes, "static": tag}]
        self.me = self
        self.first, self.second = False, False

    def __call__(self, x: tp.Any) -> tp.Any:
        for layer in self.layers:
            x = layer(x)
        return x


def new_tag() -> str:
    """A static value that no object had before."""
    return f"tag {next(_numbers)}"


def no_tracers(*models: tp.Any) -> None:
    """Check that the thread is outside of every trace, and that objects contain no tracer."""
    assert trace_state.value is EAGER
    for model in models:
        for leaf in jax.tree.leaves(nnx.state(model)):
            assert not isinstance(leaf, jax.core.Tracer)


def consistent(*models: tp.Any) -> None:
    """Check that what the engine has cached of some objects is what they are."""
    for model in models:
        assert slow.canonical(nnx.merge(*nnx.split(model))) == slow.canonical(model)
        assert nnx.graphdef(model) is not None
        assert nnx.graphdef(model) == nnx.graphdef(slow.copied(model))
    no_tracers(*models)


def read(model: tp.Any) -> tp.Any:
    """Read a model in every way; returns its definition and the leaves of its copy."""
    graphdef, state = nnx.split(model)
    nnx.state(model, nnx.Param)
    list(nnx.iter_graph(model))
    new = nnx.merge(graphdef, state)
    return graphdef, [np.asarray(x).tolist() for x in jax.tree.leaves(nnx.state(new))]


def bump(model: tp.Any) -> tp.Any:
    """Write all Parameters of a model."""
    for layer in model.layers:
        layer.kernel.value = layer.kernel.value + 1.0
    model.plain[0].value = model.plain[0].value + 1.0
    return model(ONE)


# Definitions and plans --------------------------------------------------------------------------


@case
def equal_objects_are_split() -> Pair:
    """Two equal models of a structure that is new to the process have one definition."""
    tag = new_tag()
    models = Model(tag), Model(tag)

    def check(run: Interleaving) -> None:
        assert run.outer.result[0].structure is run.inner.result[0].structure
        assert run.outer.result == run.inner.result
        consistent(*models)

    return Pair(lambda: read(models[0]), lambda: read(models[1]), check, reentrant=True)


@case
def objects_are_made() -> Pair:
    tag = new_tag()
    made: list[Model] = []

    def make() -> None:
        made.append(Model(tag))

    def check(run: Interleaving) -> None:
        assert nnx.graphdef(made[0]).structure is nnx.graphdef(made[1]).structure
        assert made[0].tied.kernel._box.definition is made[1].tied.kernel._box.definition
        consistent(*made)

    return Pair(make, make, check, reentrant=True)


@case
def one_object_is_split() -> Pair:
    model = Model(new_tag())

    def check(run: Interleaving) -> None:
        found = run.outer.result[0], run.inner.result[0], nnx.graphdef(model)
        assert len({id(graphdef.structure) for graphdef in found}) == 1
        consistent(model)

    return Pair(lambda: read(model), lambda: read(model), check, reentrant=True)


def _edit_and_read(edit: tp.Callable[[Model], None], edit_first: bool, *, warm: bool) -> Pair:
    model = Model(new_tag())
    untouched = slow.canonical(slow.copied(model))
    if warm:
        read(model)
    operations: tuple[Operation, Operation] = (lambda: edit(model), lambda: nnx.split(model))
    outer, inner = operations if edit_first else operations[::-1]

    def check(run: Interleaving) -> None:
        consistent(model)
        seen = (run.inner if edit_first else run.outer).result
        if seen is not None:
            assert slow.canonical(nnx.merge(*seen)) in (untouched, slow.canonical(model))

    return Pair(outer, inner, check, reentrant=True, may_fail=EDITED)


def _set_flag(model: Model) -> None:
    model.first = True


def _add_attribute(model: Model) -> None:
    model.extra = nnx.Param(ONE)


def _remove_attribute(model: Model) -> None:
    del model.tied


def _rebind(model: Model) -> None:
    model.tied = model.layers[1]


def _set_metadata(model: Model) -> None:
    model.layers[1].kernel.set_metadata(tag="other")


def _append(model: Model) -> None:
    model.layers.append(Layer("new"))


def _grow_static_list(model: Model) -> None:
    model.layers[0].sizes.append("new")


def _evaluate(model: Model) -> None:
    model.layers[0].training = False


for _edit in (
    _set_flag,
    _add_attribute,
    _remove_attribute,
    _rebind,
    _set_metadata,
    _append,
    _grow_static_list,
    _evaluate,
):
    for _first, _warm in itertools.product((True, False), (True, False)):
        _when = "in" if _first else "around"
        CASES[f"a_read_{_when}{_edit.__name__}{'_warm' if _warm else ''}"] = (
            lambda e=_edit, f=_first, w=_warm: _edit_and_read(e, f, warm=w)
        )


def _two_edits(one: tp.Callable[[Model], None], other: tp.Callable[[Model], None]) -> Pair:
    model = Model(new_tag())
    expected = slow.copied(model)
    read(model)
    one(expected)
    other(expected)

    def check(run: Interleaving) -> None:
        consistent(model)
        assert slow.canonical(model) == slow.canonical(expected)

    return Pair(lambda: one(model), lambda: other(model), check)


def _set_other_flag(model: Model) -> None:
    model.second = True


def _set_other_metadata(model: Model) -> None:
    model.layers[1].kernel.set_metadata(note="other")


def _add_other_attribute(model: Model) -> None:
    model.other = nnx.Param(ONE)


CASES["two_flags"] = lambda: _two_edits(_set_flag, _set_other_flag)
CASES["a_flag_and_an_attribute"] = lambda: _two_edits(_set_flag, _add_attribute)
CASES["an_attribute_and_a_flag"] = lambda: _two_edits(_add_attribute, _set_flag)
CASES["two_attributes"] = lambda: _two_edits(_add_attribute, _add_other_attribute)
CASES["two_metadata"] = lambda: _two_edits(_set_metadata, _set_other_metadata)


@case
def modes_of_one_model() -> Pair:
    model = Model(new_tag())
    read(model)

    def check(run: Interleaving) -> None:
        consistent(model)

    return Pair(model.eval, model.train, check, reentrant=True)


@case
def a_split_while_the_mode_changes() -> Pair:
    model = Model(new_tag())
    read(model)

    def check(run: Interleaving) -> None:
        consistent(model)

    return Pair(lambda: read(model), model.eval, check, reentrant=True)


@case
def a_change_of_mode_while_it_is_split() -> Pair:
    model = Model(new_tag())
    read(model)

    def check(run: Interleaving) -> None:
        consistent(model)

    return Pair(model.eval, lambda: read(model), check, reentrant=True)


@case
def updates() -> Pair:
    model = Model(new_tag())
    state = nnx.state(model)
    states = [jax.tree.map(lambda x, n=n: x * 0 + n, state) for n in (1.0, 2.0)]

    def check(run: Interleaving) -> None:
        for leaf in jax.tree.leaves(nnx.state(model)):
            assert set(np.asarray(leaf).ravel().tolist()) <= {1.0, 2.0}
        consistent(model)

    return Pair(
        lambda: nnx.update(model, states[0]),
        lambda: nnx.update(model, states[1]),
        check,
        reentrant=True,
    )


# Readers beside a writer of values -----------------------------------------------------------------


def _reader(name: str, reader: tp.Callable[[Model], tp.Any]) -> None:
    """A reader of a model beside a compiled step that writes its values, and the reverse."""

    def make(reads_first: bool) -> Pair:
        model = Model("read")
        step = _steps.setdefault("bump", nnx.jit(bump))
        step(model)
        operations = (lambda: reader(model)), (lambda: step(model))
        outer, inner = operations if reads_first else operations[::-1]

        def check(run: Interleaving) -> None:
            assert model.layers[0].kernel.value.tolist() == [3.0, 3.0]
            consistent(model)

        return Pair(outer, inner, check)

    CASES[f"a_step_while_{name}"] = lambda: make(True)
    CASES[f"{name}_during_a_step"] = lambda: make(False)


_steps: dict[str, tp.Any] = {}

_reader("split_and_merged", read)
_reader("cloned", nnx.clone)
_reader("printed", repr)
_reader("copied", copy.deepcopy)
_reader("pickled", lambda model: pickle.loads(pickle.dumps(model)))


# Compiled functions --------------------------------------------------------------------------------


def _calls(
    transform: tp.Callable[[tp.Any], tp.Any], body: tp.Any, *, shared: bool = False, traces: int = 2
) -> Pair:
    """The first calls of one function in two threads."""
    counted: list[int] = []

    def function(model: tp.Any, x: tp.Any) -> tp.Any:
        counted.append(1)
        return body(model, x)

    fun = transform(function)
    tag = new_tag()
    one = Model(tag)
    models = one, one if shared else Model(tag)
    reference = Model(tag)
    alone = transform(lambda model, x: body(model, x))
    expected = np.asarray(alone(reference, ONE)).tolist()

    def check(run: Interleaving) -> None:
        for outcome, model in ((run.outer, models[0]), (run.inner, models[1])):
            assert np.asarray(outcome.result).tolist() == expected
            assert slow.canonical(model, content) == slow.canonical(reference, content)
        consistent(*models)
        assert len(counted) <= traces
        before = len(counted)
        fun(Model(tag), ONE)
        assert len(counted) == before, "traced again"

    return Pair(lambda: fun(models[0], ONE), lambda: fun(models[1], ONE), check)


def _write(model: Model, x: tp.Any) -> tp.Any:
    model.layers[0].count[...] += 1.0
    return model(x).sum()


def _read(model: Model, x: tp.Any) -> tp.Any:
    return model(x).sum()


def _grow(model: Model, x: tp.Any) -> tp.Any:
    model.extra = nnx.Variable(x)
    model.first = True
    return model(x).sum()


CASES["jit"] = lambda: _calls(nnx.jit, _write)
CASES["jit_that_grows"] = lambda: _calls(nnx.jit, _grow)
CASES["jit_of_one_model"] = lambda: _calls(nnx.jit, _read, shared=True)
CASES["jit_donates"] = lambda: _calls(lambda f: nnx.jit(f, donate_argnums=0), _write)
CASES["jit_donates_written"] = lambda: _calls(
    lambda f: nnx.jit(f, donate="written"), _write, traces=3
)
CASES["jit_max_traces"] = lambda: _calls(lambda f: nnx.jit(f, max_traces=1), _write, traces=1)
CASES["filter_jit"] = lambda: _calls(nnx.filter_jit, _read)
CASES["remat"] = lambda: _calls(
    lambda f: nnx.jit(lambda model, x: nnx.remat(f)(model, x)), _write, traces=4
)


@case
def wrapping_and_calling() -> Pair:
    """Both threads wrap one function: it has one core, and is traced for both at once."""
    counted: list[int] = []

    def function(model: tp.Any) -> tp.Any:
        counted.append(1)
        return model(ONE)

    tag = new_tag()

    def call() -> tp.Any:
        return nnx.jit(function)(Model(tag)).tolist()

    def check(run: Interleaving) -> None:
        assert run.outer.result == run.inner.result
        before = len(counted)
        call()
        assert len(counted) == before

    return Pair(call, call, check)


def _eager_bodies(x: jax.Array) -> tp.Any:
    """Loops and branches of bodies that are defined in each call."""
    total, _ = nnx.scan(lambda c, y: (c + y, y * 2.0), in_axes=(nnx.Carry, 0))(jnp.zeros(()), x)
    chosen = nnx.cond(x.sum() > 0, lambda y: y * 2.0, lambda y: y, x)
    looped = nnx.while_loop(lambda c: c.sum() < 9.0, lambda c: c + 1.0, x)
    return float(total), chosen.tolist(), looped.tolist()


@case
def eager_loops_and_branches() -> Pair:
    """Bodies of other shapes: each call traces, with a body that is gone after it."""
    sizes = next(_numbers) + 2, next(_numbers) + 2
    inputs = [jnp.ones(size) for size in sizes]
    expected = [(float(n), [2.0] * n, [float(-(-9 // n))] * n) for n in sizes]
    expected = [(t, c, _looped(n)) for (t, c, _), n in zip(expected, sizes)]

    def check(run: Interleaving) -> None:
        assert run.outer.result == expected[0]
        assert run.inner.result == expected[1]

    return Pair(lambda: _eager_bodies(inputs[0]), lambda: _eager_bodies(inputs[1]), check)


def _looped(size: int) -> list[float]:
    values = np.ones(size)
    while values.sum() < 9.0:
        values += 1.0
    return values.tolist()


@case
def eager_grad_and_vmap() -> Pair:
    tag = new_tag()
    models = Model(tag), Model(tag)

    def work(model: Model) -> tp.Any:
        grads = nnx.grad(lambda model: model(ONE).sum())(model)
        rows = nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))(model, jnp.ones((3, 2)))
        return jax.tree.map(lambda x: np.asarray(x).tolist(), (nnx.to_pure_dict(grads), rows))

    expected = work(Model(tag))

    def check(run: Interleaving) -> None:
        assert run.outer.result == run.inner.result == expected
        consistent(*models)

    return Pair(lambda: work(models[0]), lambda: work(models[1]), check)


@case
def optimizers() -> Pair:
    tag = new_tag()
    models = Model(tag), Model(tag)

    def train(model: Model) -> tp.Any:
        optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
        grads = nnx.grad(lambda model: model(ONE).sum())(model)
        optimizer.update(model, grads)
        return model.layers[0].kernel.value.tolist()

    expected = train(Model(tag))

    def check(run: Interleaving) -> None:
        assert run.outer.result == run.inner.result == expected
        consistent(*models)

    return Pair(lambda: train(models[0]), lambda: train(models[1]), check)


@case
def explained() -> Pair:
    """Why a function was compiled is asked for while another thread compiles it."""
    fun = nnx.jit(lambda x: x * 2.0)
    fun(jnp.ones(next(_numbers)))
    size = next(_numbers)

    def check(run: Interleaving) -> None:
        assert run.inner.result.tolist() == [2.0] * size
        info = fun.cache_info()
        assert info.traces == info.programs == 2

    return Pair(lambda: str(fun.explain()), lambda: fun(jnp.ones(size)), check)


@case
def compiled_while_it_is_explained() -> Pair:
    fun = nnx.jit(lambda x: x * 2.0)
    fun(jnp.ones(next(_numbers)))
    size = next(_numbers)

    def check(run: Interleaving) -> None:
        assert run.outer.result.tolist() == [2.0] * size

    return Pair(lambda: fun(jnp.ones(size)), lambda: str(fun.explain()), check)


# Streams, settings, registration -----------------------------------------------------------------


@case
def draws_of_one_stream() -> Pair:
    """Every draw gives another key."""
    rngs = nnx.Rngs(next(_numbers))

    def draw() -> list[tuple[int, ...]]:
        keys = rngs(), rngs.params(), rngs.fork().default.key.value
        return [tuple(jax.random.key_data(key).tolist()) for key in keys]

    def check(run: Interleaving) -> None:
        keys = [*run.outer.result, *run.inner.result]
        assert len(set(keys)) == len(keys), "the same key was drawn twice"
        assert int(rngs.default.count.value) == 6

    return Pair(draw, draw, check)


@case
def settings() -> Pair:
    """A setting holds in its own thread."""

    def outer() -> tp.Any:
        with nnx.set_graph_mode(False), nnx.var_defaults(ref=True), nnx.use_eager_sharding(False):
            return _settings()

    def check(run: Interleaving) -> None:
        assert run.outer.result == (False, True, False)
        assert run.inner.result == _settings() == (True, False, True)

    return Pair(outer, _settings, check)


def _settings() -> tuple[bool, ...]:
    return (
        nnx.set_graph_mode.current_value(),
        nnx.var_defaults().ref,
        nnx.using_eager_sharding(),
    )


@case
def a_node_type_is_registered() -> Pair:
    """A class of pytree nodes becomes one of graph nodes while another thread meets it."""

    class Box:
        def __init__(self, value: tp.Any) -> None:
            self.value = value

    jax.tree_util.register_pytree_node(Box, lambda b: ((b.value,), None), lambda _, c: Box(*c))
    box = Box(ONE)

    def register() -> None:
        register_graph_node_type(
            Box,
            lambda box: ((("value", box.value),), None),
            lambda box, key, value: setattr(box, key, value),
            lambda box, key: box.__dict__.pop(key),
            lambda _: Box(None),
            lambda box: box.__dict__.clear(),
            lambda box, pairs: box.__dict__.update(pairs),
        )

    def look() -> None:
        nnx.is_data(box)

    def check(run: Interleaving) -> None:
        assert nnx.is_data(box)
        one, other = nnx.merge(*nnx.split([box, box]))
        assert one is other

    return Pair(look, register, check)


@case
def classes_are_made() -> Pair:
    def make() -> tp.Any:
        class Kind(nnx.Param):
            pass

        class Made(nnx.Module):
            def __init__(self) -> None:
                self.w = Kind(ONE)

        made = Made()
        return type(nnx.merge(*nnx.split(made))) is Made, type(jax.tree.map(lambda x: x, made).w)

    def check(run: Interleaving) -> None:
        for outcome in (run.outer, run.inner):
            same, kind = outcome.result
            assert same and issubclass(kind, nnx.Param)

    return Pair(make, make, check)


@case
def a_table_while_another_thread_calls() -> Pair:
    """Only calls of the thread that asked for a table are in it."""
    model, other = Model("table"), Model("table")
    expected = nnx.tabulate(model, ONE)

    def check(run: Interleaving) -> None:
        assert run.outer.result == expected
        assert run.inner.result.tolist() == [3.0, 3.0]
        consistent(model, other)

    return Pair(lambda: nnx.tabulate(model, ONE), lambda: other(ONE), check)


class Recording(nnx.Module):
    """A model whose parts record."""

    def __init__(self, tag: tp.Any) -> None:
        self.layers = nnx.List([Layer((tag, i)) for i in range(2)])

    def __call__(self, x: tp.Any) -> tp.Any:
        for layer in self.layers:
            x = layer(x)
            self.sow(nnx.Intermediate, "seen", x)
        return x


@case
def one_model_is_captured_twice() -> Pair:
    """A capture has its own values, or is refused while another one runs; it leaves nothing behind."""
    model = Recording(new_tag())
    before = nnx.graphdef(model)
    captured = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)

    def check(run: Interleaving) -> None:
        for outcome, factor in ((run.outer, 1.0), (run.inner, 2.0)):
            if outcome.error is not None:
                assert "another thread is capturing" in str(outcome.error)
            else:
                y, state = outcome.result
                assert y.tolist() == [2.0 + factor] * 2
                assert [x.tolist() for x in state["seen"].value] == [[1.0 + factor] * 2, y.tolist()]
                assert [x.tolist() for x in state["__call__"].value] == [y.tolist()]
        assert nnx.graphdef(model) == before
        consistent(model)

    operations = (lambda: captured(ONE)), (lambda: captured(2 * ONE))
    return Pair(*operations, check, reentrant=True, may_fail=(RuntimeError,))
