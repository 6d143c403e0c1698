"""The stages of ahead-of-time compilation: `Traced`, `Lowered`, `Compiled`, as in `jax.stages`."""

from __future__ import annotations

import functools
import typing as tp

from nnxlite.boundary import CallDef, Inputs, call_difference, replay_crossing
from nnxlite.transforms._arguments import with_statics
from nnxlite.transforms._wrapper import R


class Jitted(tp.Protocol):
    """The part of a jitted function that its stages use."""

    _core: tp.Any
    partial_args: tuple[tp.Any, ...]

    def _enter(self, args: tp.Any, kwargs: tp.Any) -> tuple[Inputs, CallDef]: ...


class Stage(tp.Generic[R]):
    """A stage of ahead-of-time compilation; attributes it lacks are those of JAX's own stage."""

    def __init__(self, wrapped: Jitted, call: CallDef, stage: tp.Any) -> None:
        self._wrapped = wrapped
        self._call = call
        self._stage = stage

    def __getattr__(self, name: str) -> tp.Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._stage, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._wrapped!r})"


class Traced(Stage[R]):
    """A traced function; `jaxpr` and `lower` as in `jax.stages.Traced`."""

    def lower(self, *args: tp.Any, **kwargs: tp.Any) -> Lowered[R]:
        """Lower the traced function."""
        return Lowered(self._wrapped, self._call, self._stage.lower(*args, **kwargs))


class Lowered(Stage[R]):
    """A lowered function; as `jax.stages.Lowered`."""

    def compile(self, *args: tp.Any, **kwargs: tp.Any) -> Compiled[R]:
        """Compile the lowered function; the result is callable with objects."""
        return Compiled(self._wrapped, self._call, self._stage.compile(*args, **kwargs))


class Compiled(Stage[R]):
    """A compiled function, callable with arguments of the structure it was lowered for.

    Calls leave out static arguments, which are part of it, as with `jax.stages.Compiled`.
    """

    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> R:
        key = self._call.extra
        given_again = any(where in kwargs for where, _ in key.statics)
        first = key.num_bound + len(self._wrapped.partial_args)
        whole = with_statics(key.statics, args, kwargs, first)
        inputs, call = self._wrapped._enter(*whole)
        core = self._wrapped._core
        if call is not self._call or given_again:
            what = [call_difference(*map(core.in_words, (self._call, call)))]
            if key.statics or call.extra.statics:
                what.append("a static argument, which is part of the program, was given again")
            what = ", or ".join(filter(None, what)) or "settings of nnxlite differ"
            raise TypeError(
                f"{self._wrapped!r} was compiled for arguments of another structure: {what}. Lower "
                "and compile it again for these arguments."
            )
        groups = core.groups(call, inputs.leaves)
        finish = functools.partial(replay_crossing, inputs)
        try:
            if core.donor is not None:
                return core.donor.run(call, self._stage, groups, finish)
            crossing = self._stage(*groups)
        except TypeError as error:
            raise TypeError(f"{self._wrapped!r}: {error}") from None
        return finish(crossing)
