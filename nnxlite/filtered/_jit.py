"""`filter_jit`: compile a function of anything; arrays are traced, all else is static.

The common call has arrays in its objects, and arrays or static leaves among its other arguments: it
goes through without looking at more than the types.  Everything else (specs, donation, objects with
leaves that are no arrays) is sorted leaf by leaf.
"""

from __future__ import annotations

import functools
import inspect
import typing as tp
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from nnxlite._config import context_key
from nnxlite._errors import path_text
from nnxlite._statics import UnhashableStatic, static_key
from nnxlite.boundary import (
    CallDef,
    Crossing,
    Inputs,
    Site,
    enter,
    leave,
    replay,
    replay_crossing,
)
from nnxlite.filtered._apart import Apart
from nnxlite.filtered._crossing import (
    must_be_traced,
    outputs_of,
    refuse_shared_buffers,
    take_out,
    taken_apart,
)
from nnxlite.filtered._predicates import is_array, is_array_like
from nnxlite.filtered._specs import MASK, settle
from nnxlite.transforms import (
    Core,
    Stage,
    StaticArgument,
    Surroundings,
    Wrapper,
    core_for,
    decorated,
    name_of,
)
from nnxlite.variables import MISSING

Donate = tp.Literal["all", "all-except-first", "warn", "warn-except-first", "none"]


class JitOptions(tp.NamedTuple):
    """The options of `filter_jit`, as they travel together."""

    donate: str
    jax_options: tuple[tuple[str, tp.Any], ...]
    default: tp.Any
    fn: tp.Any
    args: tuple[tp.Any, ...]
    kwargs: tuple[tuple[str, tp.Any], ...]
    out: tp.Any

    @property
    def plain(self) -> bool:
        """Whether arrays are traced, the rest is static, and nothing is donated."""
        specs = (self.default, self.fn, self.out)
        return (
            all(s is is_array for s in specs)
            and not (self.args or self.kwargs)
            and self.donate == "none"
        )


class Key(tp.NamedTuple):
    """What besides the structure of the arguments identifies a compiled program.

    Attributes:
        context: settings in force.
        statics: positions and values of static leaves; among the ordinary leaves, or, with `sorted`,
            among all.
        sorted: where every leaf was sorted: how many are ordinary, the structures of the values of
            graph leaves, and which of the traced leaves are donated.
    """

    context: tp.Any
    statics: tuple[tuple[int, StaticArgument], ...]
    sorted: tuple[int, tuple[tp.Any, ...], tuple[bool, ...]] | None


class JitCore(Core):
    """The compiled side of one function under one set of options."""

    options: JitOptions
    traced_late = True

    def __init__(
        self,
        funs: tuple[tp.Callable[..., tp.Any], ...],
        options: JitOptions,
        seen: Surroundings | None = None,
    ) -> None:
        super().__init__(funs, options, seen)
        run = functools.partial(self.traced)
        run.__name__ = name_of(funs[0]).rpartition(".")[2].strip("<>") or "fun"  # type: ignore[attr-defined]
        more = dict(options.jax_options)
        if options.donate != "none":
            more["donate_argnums"] = (2,)
        self.jitted = jax.jit(run, static_argnums=0, **more)

    def traced(self, call: CallDef, plain: list[tp.Any], values: list[tp.Any]) -> tp.Any:
        """What JAX traces: rebuild, run, take apart."""
        key: Key = call.extra
        written: tp.Collection[int] = ()
        if key.sorted is not None:
            plain, values, written = _joined(key, plain, values)
        elif key.statics:
            plain = list(plain)
            for position, box in key.statics:
                plain.insert(position, box.value)
        (args, kwargs), inner = enter(call, plain, list(values))
        result = self.fun(*args, **kwargs)
        if self.options.out is not is_array:
            result = _checked_result(result, self.options.out)
        out = leave(inner, result, all_written=written)
        if all(map(is_array, jax.tree_util.tree_leaves((out.result, out.written, out.fresh)))):
            return out.crossing()
        return take_out(out)


def _joined(
    key: Key, kept: list[tp.Any], given: list[tp.Any]
) -> tuple[list[tp.Any], list[tp.Any], tp.Collection[int]]:
    """Sorted leaves as ordinary ones and values, and which graph leaves were donated."""
    assert key.sorted is not None
    num_plain, defs, donated = key.sorted
    sources = (iter(kept), iter(given))
    leaves = [next(sources[d]) for d in donated]
    flags = list(donated)
    for position, box in key.statics:
        leaves.insert(position, box.value)
        flags.insert(position, False)
    rest, rest_flags = iter(leaves[num_plain:]), iter(flags[num_plain:])
    values, written = [], set()
    for number, treedef in enumerate(defs):
        parts = [next(rest) for _ in range(treedef.num_leaves)]
        if True in [next(rest_flags) for _ in parts]:
            written.add(number)
        values.append(jax.tree_util.tree_unflatten(treedef, parts))
    return leaves[:num_plain], values, written


def _checked_result(result: tp.Any, spec: tp.Any) -> tp.Any:
    """The result with arrays where `out` says traced.

    Raises ValueError for a traced value where it says static, TypeError for the opposite.
    """
    apart = Apart(result)
    leaves = []
    for path, leaf, traced in zip(
        apart.paths, apart.leaves, settle(apart, spec, MASK._replace(name="out"))
    ):
        if traced and not is_array(leaf):
            if not is_array_like(leaf):
                raise must_be_traced("filter_jit(out=)", path, leaf)
            leaf = jnp.asarray(leaf)
        if not traced and isinstance(leaf, Tracer):
            raise ValueError(
                f"filter_jit: out says that the result at '{path_text(path)}' is static, but it is "
                "computed from traced values."
            )
        leaves.append(leaf)
    return apart.build(leaves) if apart.call.where == () else result


def _come_out(inputs: Inputs, crossed: tuple[tp.Any, ...]) -> tp.Any:
    """Write back what left the compiled function; static leaves are with the static data."""
    if len(crossed) == 4:
        return replay_crossing(inputs, tp.cast(Crossing, crossed))
    fixed, arrays = crossed
    return replay(inputs, outputs_of(fixed.value, arrays))


class _Arrays:
    """Whether all of some values are arrays; quick for those that look like the last ones."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: list[type] = []

    def __call__(self, values: list[tp.Any]) -> bool:
        classes = [value.__class__ for value in values]
        if classes == self._last:
            return True
        if not all(issubclass(c, (jax.Array, np.ndarray, np.generic)) for c in set(classes)):
            return False
        self._last = classes
        return True


class FilterJit(Wrapper):
    """A compiled function, as `filter_jit` returns it."""

    name = "filter_jit"
    options: JitOptions

    def __init__(self, fun: tp.Any, options: JitOptions) -> None:
        super().__init__(fun, options)
        self._fun, self._args, self._kwargs = taken_apart(fun)
        self._plain = options.plain
        self._silent = options.donate in ("all", "all-except-first")
        self._arrays_in_objects, self._arrays_beside = _Arrays(), _Arrays()
        self._core: JitCore = core_for(JitCore, (self._fun,), options)
        self._keys: dict[tp.Any, Key] = {}
        self._site = Site()

    def _enter(self, args: tp.Any, kwargs: tp.Any) -> tuple[Inputs, CallDef, tp.Any, tp.Any]:
        if self._args or self._kwargs:
            args, kwargs = (*self._args, *args), {**self._kwargs, **kwargs}
        inputs = self._site.inputs(args, kwargs)
        plain, values = inputs.plain, inputs.values
        if not self._plain or not self._arrays_in_objects(values):
            return self._sorted(inputs, len(args), kwargs)
        context = context_key()
        if self._arrays_beside(plain):
            key = self._keys.get(context)
            if key is None:
                key = self._keys[context] = Key(context, (), None)
        else:
            statics, traced = [], []
            for position, leaf in enumerate(plain):
                if is_array(leaf):
                    traced.append(leaf)
                else:
                    statics.append((position, self._box(inputs, position, leaf)))
            plain, key = traced, Key(context, tuple(statics), None)
        return inputs, inputs.define(key), plain, values

    def _sorted(
        self, inputs: Inputs, num_args: int, kwargs: dict[str, tp.Any]
    ) -> tuple[Inputs, CallDef, tp.Any, tp.Any]:
        """Every leaf by its own answer."""
        apart = Apart.of(inputs)
        mask = self._mask(apart, num_args, kwargs)
        donate = self._donated(apart, mask)
        if True in donate:
            refuse_shared_buffers(repr(self), apart, donate)
        statics: list[tuple[int, StaticArgument]] = []
        groups: tuple[list[tp.Any], list[tp.Any]] = ([], [])
        flags: list[bool] = []
        for position, (leaf, traced) in enumerate(zip(apart.leaves, mask)):
            if not traced:
                statics.append((position, self._box(inputs, position, leaf)))
                continue
            if not is_array_like(leaf):
                raise must_be_traced(repr(self), apart.paths[position][1:], leaf)
            flags.append(donate[position])
            groups[donate[position]].append(leaf)
        sorting = (apart.num_plain, tuple(apart.defs), tuple(flags))
        key = Key(context_key(), tuple(statics), sorting)
        return inputs, inputs.define(key), *groups

    def _mask(self, apart: Apart, num_args: int, kwargs: dict[str, tp.Any]) -> list[tp.Any]:
        options, num_bound = self.options, len(self._args)
        if (
            options.default is is_array
            and options.fn is is_array
            and not (options.args or options.kwargs)
        ):
            return [is_array(x) for x in apart.leaves]
        given = ArgumentSpecs(
            "filter_jit", options.default, options.fn, options.args, options.kwargs
        )
        specs, named = argument_specs(self.__wrapped__, num_bound, num_args, kwargs, given)
        return settle(apart, (specs, named), MASK._replace(name="filter_jit's spec"))

    def _donated(self, apart: Apart, mask: list[tp.Any]) -> list[bool]:
        donate = self.options.donate
        if donate == "none":
            return [False] * len(mask)
        if not donate.endswith("except-first"):
            return [m and is_array(x) for m, x in zip(mask, apart.leaves)]
        first = (0, len(self._args))  # the path of the first visible argument
        keep = [p[:2] == first for p in apart.position_paths]
        found = [
            m and is_array(x) and not keep[place.position]
            for m, x, place in zip(mask, apart.leaves, apart.places)
        ]
        return found

    def _box(self, inputs: Inputs, position: int, leaf: tp.Any) -> StaticArgument:
        try:
            key = static_key(leaf)
            hash(key)
        except (UnhashableStatic, TypeError):
            path = Apart.of(inputs).paths[position]
            raise ValueError(
                f"{self!r}: the static leaf at '{path_text(path[1:])}' of the arguments is "
                f"unhashable: it is of type '{type(leaf).__name__}'. Static leaves are part of the "
                "key of a compiled program. Pass a hashable value, such as a tuple or frozenset, "
                "or an array."
            ) from None
        return StaticArgument(leaf, key)

    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        inputs, call, plain, values = self._enter(args, kwargs)
        if self._silent:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
                crossed = self._core.jitted(call, plain, values)
        else:
            crossed = self._core.jitted(call, plain, values)
        return _come_out(inputs, crossed)

    def staged(self, args: tp.Any, kwargs: tp.Any) -> Staged:
        """A call that is not made yet."""
        inputs, call, *groups = self._enter(args, kwargs)
        return Staged(
            call, self._core.jitted, (call,), groups, functools.partial(_come_out, inputs)
        )

    def lower(self, *args: tp.Any, **kwargs: tp.Any) -> FilterLowered:
        """Lower the function for these arguments, without running it."""
        return FilterLowered.of(self, args, kwargs)


class Staged(tp.NamedTuple):
    """A call of a compiled function, before it is made.

    Attributes:
        key: what it has in common with all calls of the same program.
        jitted: JAX's function.
        statics, groups: its static arguments, and the others.
        finish: what makes the caller's result of JAX's.
        program: what JAX traces, where the caller wants to know more of it.
    """

    key: tp.Any
    jitted: tp.Any
    statics: tuple[tp.Any, ...]
    groups: tp.Sequence[tp.Any]
    finish: tp.Callable[[tp.Any], tp.Any]
    program: tp.Any = None


class FilterLowered(Stage[tp.Any]):
    """A lowered function; `compile` makes it callable."""

    @classmethod
    def of(cls, owner: tp.Any, args: tp.Any, kwargs: tp.Any) -> FilterLowered:
        """Lower what stands behind a call."""
        staged = owner.staged(args, kwargs)
        return cls(owner, staged.key, staged.jitted.lower(*staged.statics, *staged.groups))

    @property
    def lowered(self) -> tp.Any:
        """JAX's own object."""
        return self._stage

    def compile(self, *args: tp.Any, **kwargs: tp.Any) -> FilterCompiled:
        """Compile the program, with options as for `jax.stages.Lowered.compile`."""
        return FilterCompiled(self._wrapped, self._call, self._stage.compile(*args, **kwargs))


class FilterCompiled(Stage[tp.Any]):
    """A compiled function for arguments of one structure."""

    @property
    def compiled(self) -> tp.Any:
        """JAX's own object."""
        return self._stage

    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        staged = tp.cast(tp.Any, self._wrapped).staged(args, kwargs)
        if staged.key is not self._call:
            raise TypeError(
                f"{self._wrapped!r} was compiled for arguments of another structure, or with other "
                "static leaves. Lower and compile it for these."
            )
        return staged.finish(self._stage(*staged.groups))


def argument_specs(
    fun: tp.Any,
    num_bound: int,
    num_args: int,
    kwargs: tp.Mapping[str, tp.Any],
    specs: ArgumentSpecs,
) -> tuple[tuple[tp.Any, ...], dict[str, tp.Any]]:
    """The spec of each argument of a call, from a default and what differs.

    `fun` is what was transformed, with all that it is bound to: a method, an object, a partial.

    Raises ValueError for specs of arguments that are not there.
    """
    visible = num_args - num_bound
    if len(specs.args) > visible:
        raise ValueError(
            f"{specs.what}: args= has specs for {len(specs.args)} arguments of {name_of(fun)}, the "
            f"call has {visible}."
        )
    out = [specs.fn] * num_bound + [*specs.args]
    out += [specs.default] * (num_args - len(out))
    named = dict(specs.kwargs)
    if named:
        parameters = _parameters(fun)
        positional = [p.name for p in parameters[:visible] if p.kind in _BY_POSITION]
        for position, name in enumerate(positional):
            if name in named:
                out[num_bound + position] = named[name]
        known = [p.name for p in parameters]
        anything = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)
        for name in named:
            if name not in known and not anything:
                raise ValueError(
                    f"{specs.what}: {specs.exactly or 'kwargs'}= has a spec for {name!r}, and "
                    f"{name_of(fun)} has no argument of that name; it has {known}."
                )
        given = {*kwargs, *positional}
        left = [name for name in named if name not in given] if specs.exactly else ()
        if left:
            raise ValueError(
                f"{specs.what}: {specs.exactly}= has a spec for the arguments {left}, which the call "
                "does not give. Pass them, or leave them out."
            )
    return tuple(out), {name: named.get(name, specs.default) for name in kwargs}


class ArgumentSpecs(tp.NamedTuple):
    """Specs of arguments in the form of `default=`, `fn=`, `args=` and `kwargs=`."""

    what: str
    default: tp.Any
    fn: tp.Any
    args: tuple[tp.Any, ...]
    kwargs: tuple[tuple[str, tp.Any], ...]
    exactly: str = ""
    """Name of `kwargs` where each argument in it must be given, or empty."""


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _parameters(fun: tp.Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return []


def filter_jit(
    fun: tp.Any = MISSING,
    *,
    donate: Donate = "none",
    default: tp.Any = is_array,
    fn: tp.Any = is_array,
    args: tp.Sequence[tp.Any] = (),
    kwargs: tp.Mapping[str, tp.Any] | None = None,
    out: tp.Any = is_array,
    **jitkwargs: tp.Any,
) -> tp.Any:
    """Compile a function of anything: arrays are traced, everything else is static.

    Arguments and results may be any pytrees and graph objects, with leaves of any type. What the
    function writes into objects is kept, as in `nnx.jit`. Equal static leaves compile once.

    Args:
        fun: the function; a bound method or callable object enters with its arrays traced. Without
            it a decorator is returned.
        donate: whose arrays the call may reuse: `"all"`, `"all-except-first"` (argument), `"none"`;
            the forms with `"warn"` let JAX tell of those it could not use.
        default: spec of what is traced in every argument; a bool, a function of a leaf, a Variable
            filter, or a prefix of these.
        fn: the same for the function itself.
        args: the same for the first positional arguments, in order.
        kwargs: the same for arguments by name, positional or not.
        out: the same for the result: what must be an array, and what must not depend on one.
        jitkwargs: as for `jax.jit`.

    Raises:
        ValueError: for a static leaf that is unhashable, or a spec that is no prefix.
        TypeError: for a leaf that is to be traced and is no array or number.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> @nnx.filter_jit
    ... def power(x, n, name):
    ...     return {name: x**n}
    >>> power(jnp.array(3.0), 2, "square")
    {'square': Array(9., dtype=float32, weak_type=True)}
    """
    if donate not in tp.get_args(Donate):
        raise ValueError(f"filter_jit: donate={donate!r}; it must be one of {tp.get_args(Donate)}.")
    for name in ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames"):
        if name in jitkwargs:
            raise ValueError(
                f"filter_jit takes no {name}=: whether a leaf is static or donated is decided leaf "
                "by leaf. Use args=, kwargs= and donate=."
            )
    options = JitOptions(
        donate,
        tuple(jitkwargs.items()),
        default,
        fn,
        tuple(args),
        tuple((kwargs or {}).items()),
        out,
    )
    return decorated(FilterJit, fun, options)
