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
    [Call, bool, tp.Any, str, tuple[tp.Any, ...], dict[str, tp.Any]], tp.Any
]
"""A function that makes a call in place of the caller, and returns its result.

Its arguments are the method; whether it is the one that the object's class has under this name (rather
than one called through `super()`); the object; the name; and the arguments of the call.
"""


class _Observed:
    """A method of one class that has been replaced in order to observe it."""

    def __init__(self, cls: type, name: str, observer: Observer) -> None:
        self._own = name in vars(cls)
        self._original = inspect.getattr_static(cls, name)
        self._cls, self._name = cls, name
        self.observers: tuple[Observer, ...] = (observer,)

        @functools.wraps(getattr(cls, name))
        def method(obj: tp.Any, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
            call: Call = self._call
            outermost = getattr(type(obj), name, None) is method
            for observer in dict.fromkeys(self.observers):  # each once, also in nested blocks
                call = _through(observer, call, outermost, name)
            return call(obj, *args, **kwargs)

        setattr(cls, name, method)

    def _call(self, obj: tp.Any, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        return self._original.__get__(obj, type(obj))(*args, **kwargs)

    def restore(self) -> None:
        """Restore the original method."""
        if self._own:
            setattr(self._cls, self._name, self._original)
        else:
            delattr(self._cls, self._name)


def _through(observer: Observer, call: Call, outermost: bool, name: str) -> Call:
    return lambda obj, /, *args, **kwargs: observer(call, outermost, obj, name, args, kwargs)


_observed: dict[tuple[type, str], _Observed] = {}


@contextlib.contextmanager
def observed(methods: tp.Iterable[tuple[type, str]], observer: Observer) -> tp.Iterator[None]:
    """Pass the calls of some methods through an observer while the block runs.

    This includes calls in other threads.

    >>> import nnxlite as nnx
    >>> from nnxlite.objects._observed import observed
    >>> class Double(nnx.Module):
    ...     def __call__(self, x):
    ...         return 2 * x
    >>> def show(call, outermost, obj, name, args, kwargs):
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
            known = _observed.get(key)
            if known is None:
                _observed[key] = _Observed(*key, observer)
            else:
                known.observers += (observer,)
    try:
        yield
    finally:
        with LOCK:
            for key in keys:
                known = _observed[key]
                remaining = list(known.observers)
                remaining.remove(observer)
                if not remaining:
                    del _observed[key]
                    known.restore()
                known.observers = tuple(remaining)
