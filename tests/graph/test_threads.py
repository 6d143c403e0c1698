"""Threads may split, merge and update different objects freely, and read the same object together."""

from __future__ import annotations

import sys
import threading
import typing as tp

import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.laws import model as slow

ONE = jnp.ones(2)
THREADS, ROUNDS = 4, 60


class Layer(nnx.Module):
    def __init__(self, size: tp.Any):
        self.kernel = nnx.Param(ONE, tag=size)
        self.size = size
        self.sizes = [size]


class Model(nnx.Module):
    def __init__(self, size: tp.Any = 0):
        self.layers = nnx.List([Layer((size, i)) for i in range(5)])
        self.plain = [nnx.Param(ONE), {"array": ONE, "static": size}]
        self.tied = self.layers[0]


@pytest.fixture(autouse=True)
def switch_often():
    """Threads take turns every few bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*works: tp.Callable[[int], object]) -> None:
    """Run each work in `THREADS` threads at once; the first error of any is raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(THREADS * len(works))

    def run(work: tp.Callable[[int], object], number: int) -> None:
        start.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(work, number))
        for work in works
        for number in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def read_everything(model: tp.Any) -> tuple:
    graphdef, state = nnx.split(model)
    nnx.state(model, nnx.Param)
    nnx.split(model, lambda path, leaf: True)
    nnx.update(model, state)
    list(nnx.iter_graph(model))
    copy = nnx.merge(graphdef, nnx.to_pure_dict(state))
    assert nnx.graphdef(copy) == graphdef
    return graphdef, slow.canonical(copy)


def test_equal_objects_made_at_the_same_time_have_one_definition():
    for attempt in range(ROUNDS):
        found: list[tuple] = []
        together(lambda n, f=found, size=attempt: f.append(read_everything(Model(("s", size)))))
        assert len({graphdef for graphdef, _ in found}) == 1
        assert len({id(graphdef.structure) for graphdef, _ in found}) == 1
        assert len({form for _, form in found}) == 1


def test_different_objects_in_different_threads():
    def work(number: int) -> None:
        model = Model(number)
        expected = slow.canonical(model)
        for i in range(ROUNDS):
            assert read_everything(model)[1] == expected
            model.extra = i
            model.layers.append(Layer(i))
            read_everything(model)
            model.layers.pop()
            del model.extra

    together(work)


def test_the_same_object_read_by_all():
    model = Model()
    expected = slow.canonical(model)
    reference = nnx.graphdef(model)

    def work(number: int) -> None:
        for _ in range(ROUNDS):
            graphdef, form = read_everything(model)
            assert graphdef is reference
            assert form == expected

    together(work)


def test_the_same_fresh_object_seen_first_by_all():
    for _ in range(ROUNDS):
        model = Model()
        found: list[tuple] = []
        together(lambda n, m=model, f=found: f.append(read_everything(m)))
        assert len({id(graphdef.structure) for graphdef, _ in found}) == 1


def test_no_stale_definition_stays_after_edits_from_other_threads():
    """While some edit and some read, a reader sees one state or the other; afterwards the last."""
    for attempt in range(ROUNDS // 3):
        model = Model(attempt)

        def write(number: int, m: tp.Any = model) -> None:
            layer = m.layers[number]
            for i in range(30):
                layer.size = i
                layer.kernel.set_metadata(tag=i)
                setattr(layer, f"extra_{i % 3}", nnx.Param(ONE))
                layer.sizes.append(i)

        def read(number: int, m: tp.Any = model) -> None:
            for _ in range(15):
                try:
                    nnx.merge(*nnx.split(m))
                    nnx.graphdef(m.layers[number])
                except RuntimeError as error:  # as of a dict that another thread edits
                    assert "changed size during iteration" in str(error)
                except (KeyError, ValueError):  # names and values read at different moments
                    pass

        together(write, read)
        assert slow.canonical(nnx.merge(*nnx.split(model))) == slow.canonical(model)
        assert nnx.graphdef(model) == nnx.graphdef(slow.copied(model))


class Flags(nnx.Module):
    def __init__(self, name: tp.Any):
        self.kernel = nnx.Param(ONE)
        self.name, self.first, self.second = name, False, False


def test_flags_of_one_object_set_from_all_threads():
    """Several write static attributes of one object, one adds and removes others; some read."""
    for attempt in range(ROUNDS):
        model = Flags(f"flags{attempt}")
        nnx.split(model)

        def write(number: int, m: tp.Any = model) -> None:
            name = ("first", "second", "name", "extra")[number]
            for i in range(40):
                setattr(m, name, i if number == 2 else nnx.Param(ONE) if number == 3 else i % 3 > 0)
                if number == 3:
                    del m.extra

        def read(number: int, m: tp.Any = model) -> None:
            for _ in range(20):
                try:
                    nnx.split(m)
                except KeyError:  # names and values read at different moments
                    pass

        together(write, read)
        assert nnx.graphdef(model) == nnx.graphdef(slow.copied(model))
        assert slow.canonical(nnx.merge(*nnx.split(model))) == slow.canonical(model)


def test_updates_of_one_object_from_all_threads_leave_one_of_them():
    model = nnx.List([nnx.Param(jnp.array(0)) for _ in range(20)])
    states = [nnx.State({i: jnp.array(n) for i in range(20)}) for n in range(THREADS)]
    together(lambda number: [nnx.update(model, states[number]) for _ in range(ROUNDS)])
    assert {int(v[...]) for v in model} <= set(range(THREADS))


def test_settings_of_one_thread_are_not_seen_by_others():
    layer = Layer(1)
    model = nnx.List([layer, layer])
    inside, outside = threading.Event(), threading.Event()
    refused: list[bool] = []

    def in_tree_mode() -> None:
        with nnx.set_graph_mode(False):
            inside.set()
            outside.wait(10)
            try:
                nnx.split(model)
            except ValueError:
                refused.append(True)

    thread = threading.Thread(target=in_tree_mode)
    thread.start()
    assert inside.wait(10)
    nnx.split(model)
    outside.set()
    thread.join()
    assert refused == [True]


@pytest.mark.filterwarnings("ignore:.*neither an nnx.Module")
def test_a_list_that_grows_while_it_is_described():
    """What a definition holds, and what it is known by, are of the same moment."""

    class Growing:
        """As if another thread came by whenever its hash is asked for."""

        def __init__(self):
            self.owner: tp.Any = None

        def __hash__(self):
            if self.owner is not None and len(self.owner.sizes) < 2:
                self.owner.sizes.append(0)
            return 1

    growing = Growing()
    layer = Layer(0)
    layer.sizes = [growing]
    growing.owner = layer
    nnx.graphdef(layer)
    assert len(layer.sizes) == 2
    other = Layer(0)
    other.sizes = [*layer.sizes]
    assert nnx.graphdef(layer) == nnx.graphdef(other)
