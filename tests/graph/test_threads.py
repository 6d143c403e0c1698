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
