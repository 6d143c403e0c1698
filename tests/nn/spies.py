"""Functions of JAX replaced for a while, as libraries for quantisation and adapters do it."""

from __future__ import annotations

import contextlib
import types

ORIGINALS = {}
"""The functions whose code is swapped, by name, with their own code."""
SEEN = []
"""The names of the replaced functions that were called."""
ON_CALL = []
"""What is run in every call of a replaced function."""


def replacement(name, original):
    """A function that notes its call, and gives twice what the original gives."""

    def doubled(*args, **kwargs):
        SEEN.append(name)
        for action in ON_CALL:
            action()
        return 2 * original(*args, **kwargs)

    return doubled


def _swapped(*args, **kwargs):  # its code runs among the globals of the function that gets it
    from tests.nn import spies

    return spies.ORIGINALS["NAME"](*args, **kwargs)


@contextlib.contextmanager
def replaced(module, name, by_code=False):
    """Replace a function: under its name, or by the code in it."""
    fun = getattr(module, name)
    if not by_code:
        setattr(module, name, replacement(name, fun))
        try:
            yield
        finally:
            setattr(module, name, fun)
        return
    code = fun.__code__
    original = types.FunctionType(code, fun.__globals__, name, fun.__defaults__, fun.__closure__)
    original.__kwdefaults__ = fun.__kwdefaults__
    ORIGINALS[name] = replacement(name, original)
    constants = tuple(name if c == "NAME" else c for c in _swapped.__code__.co_consts)
    fun.__code__ = _swapped.__code__.replace(co_consts=constants)
    try:
        yield
    finally:
        fun.__code__ = code
