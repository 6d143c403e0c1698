"""Ahead-of-time compilation of `filter_jit` and `filter_pmap`, in the stages of `jit`."""

from __future__ import annotations

import typing as tp

from nnxlite._typing import R
from nnxlite.transforms import Stage, run_donating


class Staged(tp.NamedTuple):
    """A call of a compiled function, ready for JAX.

    Attributes:
        key: the same object for all calls of the same program.
        jitted: JAX's function.
        groups: its arguments.
        finish: from JAX's result to the caller's.
        named: gives the arrays among the arguments, with their names.
        program: the function that JAX traces, where the caller needs it.
        difference: how the structure of the arguments differs from that of another key, in words.
    """

    key: tp.Any
    jitted: tp.Any
    groups: tp.Sequence[tp.Any]
    finish: tp.Callable[[tp.Any], tp.Any]
    named: tp.Callable[[], tp.Iterable[tuple[str, tp.Any]]]
    program: tp.Any = None
    difference: tp.Callable[[tp.Any], str] = lambda key: ""


class FilterLowered(Stage[R]):
    """A lowered function; `compile` makes it callable."""

    @classmethod
    def of(cls, owner: tp.Any, args: tp.Any, kwargs: tp.Any) -> FilterLowered[R]:
        """Lower the program of a call."""
        staged = owner.staged(args, kwargs)
        return cls(owner, staged.key, staged.jitted.lower(*staged.groups))

    @property
    def lowered(self) -> tp.Any:
        """JAX's own object."""
        return self._stage

    def compile(self, *args: tp.Any, **kwargs: tp.Any) -> FilterCompiled[R]:
        """Compile the program, with options as for `jax.stages.Lowered.compile`."""
        return FilterCompiled(self._wrapped, self._call, self._stage.compile(*args, **kwargs))


class FilterCompiled(Stage[R]):
    """A compiled function for arguments of one structure."""

    @property
    def compiled(self) -> tp.Any:
        """JAX's own object."""
        return self._stage

    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> R:
        staged = tp.cast(tp.Any, self._wrapped).staged(args, kwargs)
        if staged.key is not self._call:
            what = staged.difference(self._call)
            raise TypeError(
                f"{self._wrapped!r} was compiled for arguments of another structure: "
                f"{what or 'the static leaves, or settings, differ'}. Lower and compile it for these."
            )
        return run_donating(self._stage, staged.groups, staged.finish, staged.named)
