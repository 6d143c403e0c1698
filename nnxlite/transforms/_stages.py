"""The stages of ahead-of-time compilation: `Traced`, `Lowered`, `Compiled`, as in `jax.stages`.

They are the same for `jit`, `filter_jit` and `filter_pmap`, each of which gives a call as a `Staged`.
"""

from __future__ import annotations

import typing as tp

from jax.errors import JaxRuntimeError

from nnxlite.boundary._call_def import CallDef
from nnxlite.transforms._finish import raise_failed
from nnxlite.transforms._wrapper import R


class Staged(tp.NamedTuple):
    """A call of a compiled function, ready for JAX, as its method `staged` gives it.

    `staged(args, kwargs, program=None)` takes the key of a compiled program that is called, without its
    static arguments; it raises TypeError, made by `other_structure`, for a call of another program.

    Attributes:
        key: the same object for all calls of the same program.
        jitted: finds JAX's function, which must be traced for its shardings first, if it has any.
        groups: its arguments.
        run: calls the function, or what it was compiled to, and gives the caller's result.
    """

    key: CallDef
    jitted: tp.Callable[[], tp.Any]
    groups: tp.Sequence[tp.Any]
    run: tp.Callable[[tp.Any], tp.Any]


def other_structure(function: object, what: str) -> TypeError:
    """The error for a call of a compiled function whose arguments have another structure."""
    return TypeError(
        f"{function!r} was compiled for arguments of another structure: "
        f"{what or 'the static leaves, or settings, differ'}. Lower and compile it again for these "
        "arguments."
    )


class Stage(tp.Generic[R]):
    """A stage of ahead-of-time compilation; attributes it lacks are those of JAX's own stage."""

    def __init__(self, function: tp.Any, key: CallDef, stage: tp.Any) -> None:
        self._function = function
        self._key = key
        self._stage = stage

    @classmethod
    def of(cls, method: str, function: tp.Any, args: tp.Any, kwargs: tp.Any) -> tp.Self:
        """The first stage of a call, which a method of JAX's function makes."""
        staged = function.staged(args, kwargs)
        return cls(function, staged.key, getattr(staged.jitted(), method)(*staged.groups))

    def __getattr__(self, name: str) -> tp.Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._stage, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._function!r})"


class Traced(Stage[R]):
    """A traced function; `jaxpr` and `lower` as in `jax.stages.Traced`."""

    def lower(self, *args: tp.Any, **kwargs: tp.Any) -> Lowered[R]:
        """Lower the traced function."""
        return Lowered(self._function, self._key, self._stage.lower(*args, **kwargs))


class Lowered(Stage[R]):
    """A lowered function; as `jax.stages.Lowered`."""

    @property
    def lowered(self) -> tp.Any:
        """JAX's own object."""
        return self._stage

    def compile(self, *args: tp.Any, **kwargs: tp.Any) -> Compiled[R]:
        """Compile the lowered function; the result is callable with objects."""
        return Compiled(self._function, self._key, self._stage.compile(*args, **kwargs))


class Compiled(Stage[R]):
    """A compiled function, callable with arguments of the structure it was lowered for.

    Calls leave out static arguments, which are part of it, as with `jax.stages.Compiled`; static leaves
    of `filter_jit` are given again.
    """

    @property
    def compiled(self) -> tp.Any:
        """JAX's own object."""
        return self._stage

    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> R:
        staged = self._function.staged(args, kwargs, self._key)
        try:
            return staged.run(self._stage)
        except TypeError as error:
            raise TypeError(f"{self._function!r}: {error}") from None
        except JaxRuntimeError as error:
            raise_failed(error)
            raise
