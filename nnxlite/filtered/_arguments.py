"""Specs of the arguments of a function: from the user's to one for each argument of a call."""

from __future__ import annotations

import typing as tp

from nnxlite.boundary._operands import names_by_position, parameters_of
from nnxlite.transforms._wrapper import Unbound, name_of


class ArgumentSpecs(tp.NamedTuple):
    """Specs of the arguments of a function.

    Attributes:
        default: for positional arguments that have no other.
        keyword_default: the same for keyword arguments.
        fn: for what the function carries itself.
        args: for the first positional arguments, in order.
        kwargs: for arguments by name, positional or not.
        exactly: name of the parameter with `args` or `kwargs`, if the call must give exactly these
            positional arguments, or all the named ones; otherwise empty.
    """

    default: tp.Any
    keyword_default: tp.Any
    fn: tp.Any
    args: tuple[tp.Any, ...] = ()
    kwargs: tuple[tuple[str, tp.Any], ...] = ()
    exactly: str = ""

    @classmethod
    def given(
        cls, default: tp.Any, fn: tp.Any, args: tp.Iterable[tp.Any], kwargs: tp.Any
    ) -> ArgumentSpecs:
        """The specs in the form of `default=`, `fn=`, `args=` and `kwargs=`."""
        return cls(default, default, fn, tuple(args), tuple((kwargs or {}).items()))

    def of_call(
        self,
        fun: tp.Any,
        bound: Unbound,
        args: tp.Sequence[tp.Any],
        kwargs: tp.Mapping[str, tp.Any],
        what: str,
    ) -> tp.Any:
        """The specs of a call, in the form of `(args, kwargs)`, those of carried arguments first.

        Args:
            fun: the function as the user gave it: a method, an object, a partial.
            bound: its parts.
            args, kwargs: the arguments of the call.
            what: the transform, in messages.

        Raises ValueError for specs of arguments that are not given.
        """
        count, given = len(args), len(self.args)
        if self.exactly and not self.kwargs and given != count:
            raise ValueError(
                f"{what}: {self.exactly} has {given} entries for {count} positional arguments."
            )
        if given > count:
            raise ValueError(
                f"{what}: args= has specs for {given} arguments of {name_of(fun)}, the call has "
                f"{count}."
            )
        by_name = dict(self.kwargs)
        positional = [*self.args, *[self.default] * (count - given)]
        for number, name in enumerate(self._positional_names(fun, count, kwargs, what)):
            positional[number] = by_name.get(name, positional[number])
        named = {name: by_name.get(name, self.keyword_default) for name in kwargs}
        carried = dict.fromkeys(bound.kwargs, self.fn)
        return (*[self.fn] * len(bound.args), *positional), {**carried, **named}

    def _positional_names(
        self, fun: tp.Any, count: int, kwargs: tp.Mapping[str, tp.Any], what: str
    ) -> list[str]:
        """The names of the positional arguments of a call, where there are specs by name.

        Raises ValueError for a spec of an argument that is not given.
        """
        if not self.kwargs:
            return []
        parameters = parameters_of(fun) or []
        positional = names_by_position(parameters[:count])
        known = [p.name for p in parameters]
        anything = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)
        unknown = [name for name, _ in self.kwargs if name not in known and not anything]
        if unknown:
            raise ValueError(
                f"{what}: {self.exactly or 'kwargs'}= has a spec for {unknown[0]!r}, and "
                f"{name_of(fun)} has no argument of that name; it has {known}."
            )
        missing = [name for name, _ in self.kwargs if name not in kwargs and name not in positional]
        if self.exactly and missing:
            raise ValueError(
                f"{what}: {self.exactly}= has a spec for the arguments {missing}, which the call "
                "does not give. Pass them, or leave them out."
            )
        return positional
