"""The whole real graph beside the slow one: types, statics, values, identity, sharing, order."""

from __future__ import annotations

import typing as tp
import weakref

import jax
import numpy as np

import nnxlite as nnx
from tests.laws import model, objects

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
