"""Temporary observation of method calls; nothing else in the library edits users' classes.

While a method of a class is observed, another function replaces it, which passes each call through
all observers and finally to the method itself.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import typing as tp

from nnxlite._base.interning import LOCK

Call: tp.TypeAlias = tp.Callable[..., tp.Any]
"""A method as a function of its object and its arguments."""

Observer: tp.TypeAlias = tp.Callable[
    [Call, tp.Any, str, tuple[tp.Any, ...], dict[str, tp.Any]], tp.Any
]
"""A function that makes a call in place of the caller, and returns its result.

Its arguments are the method, the object, the name, and the arguments of the call.
"""

_observed: dict[tuple[type, str], tuple[list[Observer], tp.Callable[[], None]]] = {}
"""The observers of each replaced method, and a function that restores it."""


def _replace(cls: type, name: str) -> tuple[list[Observer], tp.Callable[[], None]]:
    """Replace a method by one that passes calls through observers, unless `super()` makes them."""
    observers: list[Observer] = []
    is_own = name in vars(cls)
    original = inspect.getattr_static(cls, name)

    @functools.wraps(getattr(cls, name))
    def method(obj: tp.Any, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        def call(obj: tp.Any, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
            return original.__get__(obj, type(obj))(*args, **kwargs)

        if getattr(type(obj), name, None) is method:
            for observer in dict.fromkeys(observers):  # each once, also in nested blocks
                call = _through(observer, call, name)
        return call(obj, *args, **kwargs)

    setattr(cls, name, method)
    return observers, lambda: setattr(cls, name, original) if is_own else delattr(cls, name)


def _through(observer: Observer, call: Call, name: str) -> Call:
    return lambda obj, /, *args, **kwargs: observer(call, obj, name, args, kwargs)


@contextlib.contextmanager
def observed(methods: tp.Iterable[tuple[type, str]], observer: Observer) -> tp.Iterator[None]:
    """Pass the calls of some methods through an observer while the block runs.

    This includes calls in other threads.

    >>> import nnxlite as nnx
    >>> from nnxlite.objects._observed import observed
    >>> class Double(nnx.Module):
    ...     def __call__(self, x):
    ...         return 2 * x
    >>> def show(call, obj, name, args, kwargs):
    ...     print(name, args)
    ...     return call(obj, *args, **kwargs)
    >>> with observed([(Double, "__call__")], show):
    ...     Double()(3)
    __call__ (3,)
    6
    """
    keys = dict.fromkeys(methods)
    with LOCK:  # no entry without observers: a signal handler that does the same would remove it
        for key in keys:
            entry = _observed.get(key) or _observed.setdefault(key, _replace(*key))
            entry[0].append(observer)
    try:
        yield
    finally:
        with LOCK:
            for key in keys:
                observers, restore = _observed[key]
                observers.remove(observer)
                if not observers:
                    del _observed[key]
                    restore()
