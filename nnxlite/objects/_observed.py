"""Methods of classes that are observed for a while: the one place that edits users' classes.

While anybody observes a method of a class, another stands in its place, which hands each call from
observer to observer and at last to the method itself.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import typing as tp

Call: tp.TypeAlias = tp.Callable[..., tp.Any]
"""A method as a function of its object and its arguments."""

Observer: tp.TypeAlias = tp.Callable[
    [Call, bool, tp.Any, str, tuple[tp.Any, ...], dict[str, tp.Any]], tp.Any
]
"""What makes a call, and gives its result.

Its arguments are the method, whether it is the one that the object's class has under this name (and is
not called through `super()`), the object, the name, and the arguments of the call.
"""


class _Observed:
    """A method that stands in the place of another, in one class."""

    def __init__(self, cls: type, name: str) -> None:
        self._own = name in vars(cls)
        self._former = inspect.getattr_static(cls, name)
        self._cls, self._name = cls, name
        self.observers: tuple[Observer, ...] = ()

        @functools.wraps(getattr(cls, name))
        def method(obj: tp.Any, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
            call: Call = self._call
            outermost = getattr(type(obj), name, None) is method
            for observer in dict.fromkeys(self.observers):  # one may be there several times
                call = _told(observer, call, outermost, name)
            return call(obj, *args, **kwargs)

        setattr(cls, name, method)

    def _call(self, obj: tp.Any, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        return self._former.__get__(obj, type(obj))(*args, **kwargs)

    def restore(self) -> None:
        """Put the method back."""
        if self._own:
            setattr(self._cls, self._name, self._former)
        else:
            delattr(self._cls, self._name)


def _told(observer: Observer, call: Call, outermost: bool, name: str) -> Call:
    return lambda obj, /, *args, **kwargs: observer(call, outermost, obj, name, args, kwargs)


_lock = threading.Lock()
_observed: dict[tuple[type, str], _Observed] = {}


@contextlib.contextmanager
def observed(methods: tp.Iterable[tuple[type, str]], observer: Observer) -> tp.Iterator[None]:
    """Have an observer told of the calls of some methods while the block runs.

    Calls in other threads reach it, too.

    >>> import nnxlite as nnx
    >>> from nnxlite.objects._observed import observed
    >>> class Double(nnx.Module):
    ...     def __call__(self, x):
    ...         return 2 * x
    >>> def tell(call, outermost, obj, name, args, kwargs):
    ...     print(name, args)
    ...     return call(obj, *args, **kwargs)
    >>> with observed([(Double, "__call__")], tell):
    ...     Double()(3)
    __call__ (3,)
    6
    """
    keys = dict.fromkeys(methods)
    with _lock:
        for key in keys:
            if key not in _observed:
                _observed[key] = _Observed(*key)
            _observed[key].observers += (observer,)
    try:
        yield
    finally:
        with _lock:
            for key in keys:
                found = _observed[key]
                others = list(found.observers)
                others.remove(observer)
                found.observers = tuple(others)
                if not others:
                    _observed.pop(key).restore()
