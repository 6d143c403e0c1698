"""What the transforms share: decorator forms, methods as functions, static arguments."""

from __future__ import annotations

import functools
import inspect
import types
import typing as tp
import weakref

import jax

from nnxlite._config import GRAPH_UPDATES
from nnxlite._config import context_key as context_key
from nnxlite._errors import path_text
from nnxlite._jax import key_name
from nnxlite._statics import ById, UnhashableStatic, replaced_functions, static_key
from nnxlite.boundary import Inputs, is_root
from nnxlite.graph._functional import resolve_mode
from nnxlite.graph._graphdef import Path
from nnxlite.objects._frozen import BoundMethod
from nnxlite.variables import MISSING as MISSING
from nnxlite.variables import Variable

P = tp.ParamSpec("P")
R = tp.TypeVar("R")


T = tp.TypeVar("T")


class Wrapper:
    """Base of what a transform returns: equal to another one of the same function and options.

    So a transform that is applied in every step of a loop finds what was compiled in the first.

    Attributes:
        __wrapped__: the function.
        options: all else that `type(self)(function, options)` needs; it does not hold the function.
        name: of the transform.
    """

    name: tp.Any = ""

    def __init__(self, fun: tp.Any, options: tp.Any) -> None:
        self.options = options
        functools.update_wrapper(tp.cast(tp.Any, self), fun, updated=())
        self.__wrapped__ = fun

    def __get__(self, instance: tp.Any, owner: tp.Any = None) -> tp.Any:
        return self if instance is None else functools.partial(tp.cast(tp.Any, self), instance)

    def __repr__(self) -> str:
        return f"{self.name}({name_of(self.__wrapped__)})"

    def __eq__(self, other: tp.Any) -> bool:
        if self is other or not isinstance(other, Wrapper):
            return self is other
        (fun, layers), (other_fun, others) = unwrapped(self), unwrapped(other)
        return fun is other_fun and layers == others

    def __hash__(self) -> int:
        fun, layers = unwrapped(self)
        return hash((id(fun), layers))


Layers = tuple[tuple[type[Wrapper], "StaticArgument"], ...]
"""What makes a wrapper of a function: classes and options, the outermost first."""


def unwrapped(fun: tp.Any) -> tuple[tp.Any, Layers]:
    """The function inside of wrappers, and these."""
    layers: list[tuple[type[Wrapper], StaticArgument]] = []
    while isinstance(fun, Wrapper) and type(fun).__eq__ is Wrapper.__eq__:
        layers.append((type(fun), hidden_argument(fun.options)))
        fun = fun.__wrapped__
    return fun, tuple(layers)


def wrapped(fun: tp.Any, layers: Layers) -> tp.Any:
    """The inverse of `unwrapped`."""
    for kind, options in reversed(layers):
        fun = kind(fun, options.value)
    return fun


def traced_context() -> tp.Any:
    """What else a trace depends on: the settings in force, and functions of JAX that are replaced."""
    return context_key(), replaced_functions()


class PerFunction(tp.Generic[T]):
    """What is made once for each function and each key, and kept as long as the function lives.

    It must not refer to the function, but weakly.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[tp.Any, dict[tp.Any, T]]
        self._known = weakref.WeakKeyDictionary()

    def get(self, fun: tp.Callable[..., tp.Any], key: tp.Any, make: tp.Callable[[], T]) -> T:
        """What was made before, if it can be remembered; else a new one."""
        fun, layers = unwrapped(fun)
        key = (key, layers) if layers else key
        if type(fun).__eq__ is not object.__eq__:  # an equal one may live longer than the first
            return make()
        try:
            mine = self._known.setdefault(fun, {})
            found = mine.get(key)
        except TypeError:  # not weakly referable, or an unhashable key
            return make()
        if found is None:
            if len(mine) >= KEPT_PER_FUNCTION:
                del mine[next(iter(mine))]
            found = mine[key] = make()
        return found


KEPT_PER_FUNCTION = 64
"""For how many keys something is kept for one function."""


def weakly(fun: tp.Callable[..., tp.Any]) -> tp.Callable[[], tp.Any]:
    """A function that returns another (or one equal), and does not keep it alive where possible."""
    inner, layers = unwrapped(fun)
    if layers:
        find = weakly(inner)
        return lambda: wrapped(find(), layers)
    try:
        return weakref.ref(fun)
    except TypeError:
        return lambda: fun


class Unbound(tp.NamedTuple):
    """A callable taken apart: the plain function, and the arguments it already carries."""

    fun: tp.Callable[..., tp.Any]
    args: tuple[tp.Any, ...]
    kwargs: dict[str, tp.Any]


def unbind(fun: tp.Callable[..., tp.Any]) -> Unbound:
    """Take bound methods, partials and callable objects apart.

    What they carry enters the transform as arguments, so that a model behind a bound method is
    treated like a model that is passed. Arguments of a partial that hold no objects stay where they
    are: they are constants, and may be anything.
    """
    if not callable(fun):
        raise TypeError(f"Expected a callable to transform, got {type(fun).__name__}.")
    if isinstance(fun, (types.MethodType, BoundMethod)) and is_root(fun.__self__):
        inner = unbind(fun.__func__)
        return Unbound(inner.fun, (*inner.args, fun.__self__), inner.kwargs)
    if isinstance(fun, functools.partial):
        return _unbind_partial(fun)
    if is_root(fun) and not isinstance(fun, type):
        return Unbound(_call_object, (fun,), {})
    inner, layers = unwrapped(fun)
    return rewrap(unbind(inner), layers) if layers else Unbound(fun, (), {})


def rewrap(found: Unbound, layers: Layers) -> Unbound:
    """The callable that wrappers make of one that was taken apart; it carries the same."""
    if not (found.args or found.kwargs):
        return found._replace(fun=wrapped(found.fun, layers))
    return found._replace(fun=_Carrying(found.fun, (layers, len(found.args), tuple(found.kwargs))))


class _Carrying(Wrapper):
    """A wrapper of a function whose first arguments the function itself carried."""

    def __call__(self, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        layers, count, names = self.options
        named = {name: kwargs.pop(name) for name in names}
        inner = functools.partial(self.__wrapped__, *args[:count], **named)
        return wrapped(inner, layers)(*args[count:], **kwargs)


def _unbind_partial(fun: functools.partial[tp.Any]) -> Unbound:
    inner = unbind(fun.func)
    args, kwargs = (*inner.args, *fun.args), {**inner.kwargs, **fun.keywords}
    carried = tuple(filter(_holds_object, args))
    keywords = {k: v for k, v in kwargs.items() if _holds_object(v)}
    if not carried and not keywords:
        return Unbound(fun, (), {})
    if len(carried) == len(args) and len(keywords) == len(kwargs):
        return Unbound(inner.fun, args, kwargs)
    layout = tuple(_HOLE if _holds_object(x) else x for x in args)
    constants = {k: v for k, v in kwargs.items() if k not in keywords}
    inside: tp.Any = functools.partial(_call_partly, inner.fun, layout, constants)
    inside.__qualname__ = name_of(inner.fun)
    inside.__signature__ = _signature_of_rest(inner.fun, layout, constants)
    return Unbound(inside, carried, keywords)


_HOLE = object()


def _holds_object(value: tp.Any) -> bool:
    return any(map(is_root, jax.tree_util.tree_leaves(value, is_leaf=is_root)))


def _call_partly(
    fun: tp.Callable[..., tp.Any],
    layout: tuple[tp.Any, ...],
    constants: dict[str, tp.Any],
    /,
    *args: tp.Any,
    **kwargs: tp.Any,
) -> tp.Any:
    """Call a function some of whose arguments are constants; the given ones fill the holes first."""
    given = iter(args)
    first = [next(given) if x is _HOLE else x for x in layout]
    return fun(*first, *given, **constants, **kwargs)


def _signature_of_rest(
    fun: tp.Callable[..., tp.Any], layout: tuple[tp.Any, ...], constants: dict[str, tp.Any]
) -> inspect.Signature | None:
    """The signature of a function without the arguments that are constants."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return None
    fixed = {p.name for p, x in zip(parameters, layout) if x is not _HOLE} | set(constants)
    return inspect.Signature([p for p in parameters if p.name not in fixed])


def _call_object(fun: tp.Any, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
    return fun(*args, **kwargs)


class StaticArgument:
    """A static argument as part of a cache key; equal as `static_key` says."""

    __slots__ = ("key", "value")

    def __init__(self, value: tp.Any, key: tp.Any) -> None:
        self.value = value
        self.key = key

    def __eq__(self, other: tp.Any) -> bool:
        return isinstance(other, StaticArgument) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"StaticArgument({self.value!r})"


def static_argument(value: tp.Any, name: tp.Any, fun: tp.Callable[..., tp.Any]) -> StaticArgument:
    """Box a static argument.

    Raises ValueError naming the argument when its value is unhashable, or holds objects.
    """
    if _holds_object(value):
        raise ValueError(
            f"Static argument {name!r} of {name_of(fun)} holds a {type(value).__name__}: its values "
            "would be constants of the program. Make the argument a traced one."
        )
    try:
        hash(value)  # a list has a key, but may change while a program that has seen it lives on
        key = static_key(value)
        hash(key)
    except (UnhashableStatic, TypeError):
        raise ValueError(
            f"Static argument {name!r} of {name_of(fun)} is unhashable: it is of type "
            f"'{type(value).__name__}'. Pass a hashable value, such as a tuple, or make the "
            "argument a traced one."
        ) from None
    return StaticArgument(value, key)


def with_statics(
    statics: tp.Iterable[tuple[int | str, StaticArgument]],
    args: tuple[tp.Any, ...],
    kwargs: dict[str, tp.Any],
    first: int = 0,
) -> tuple[tuple[tp.Any, ...], dict[str, tp.Any]]:
    """Arguments with the static ones put back; `first` is the number of the first that is given."""
    if not statics:
        return args, kwargs
    out = list(args)
    kwargs = dict(kwargs)
    for where, box in statics:
        if isinstance(where, str):
            kwargs[where] = box.value
        elif where >= first:
            out.insert(where - first, box.value)
    return tuple(out), kwargs


Hidden = tuple[tuple[int, StaticArgument], ...]
"""Arguments that JAX never sees, by number; None stands in their places."""


def hidden_argument(value: tp.Any) -> StaticArgument:
    """Box a static argument of any kind; an unhashable one counts by identity."""
    try:
        key = static_key(value)
        hash(key)
    except (UnhashableStatic, TypeError):
        key = ById(value)
    return StaticArgument(value, key)


def hide(
    args: tuple[tp.Any, ...], numbers: tp.Iterable[int], first: int, name: str
) -> tuple[tuple[tp.Any, ...], Hidden]:
    """Arguments with None in place of the static ones, and these.

    Args:
        args: the arguments.
        numbers: which are static, negative ones from the end.
        first: how many arguments will come before these in the call.
        name: of the transform and its function, for the message.

    Raises ValueError for a number out of range.
    """
    left, hidden = list(args), []
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise ValueError(
                f"{name}: static_argnums has {number}, but the call has {len(args)} positional "
                f"arguments; numbers from {-len(args)} to {len(args) - 1} are possible."
            )
        number %= len(args)
        hidden.append((first + number, hidden_argument(args[number])))
        left[number] = None
    return tuple(left), tuple(sorted(hidden, key=lambda pair: pair[0]))


def reveal(args: tuple[tp.Any, ...], hidden: Hidden) -> list[tp.Any]:
    """The inverse of `hide`."""
    out = list(args)
    for number, box in hidden:
        out[number] = box.value
    return out


def name_of(fun: tp.Any) -> str:
    """A function's name for messages."""
    if isinstance(fun, functools.partial) and "__qualname__" not in fun.__dict__:
        fun = fun.func
    return getattr(fun, "__qualname__", None) or type(fun).__name__


def as_tuple(given: tp.Any) -> tuple[tp.Any, ...]:
    """None, one item, or several, as a tuple."""
    if given is None:
        return ()
    return (given,) if isinstance(given, (int, str)) else tuple(given)


class Selection(tp.NamedTuple):
    """Arguments chosen by number and by name."""

    numbers: frozenset[int]
    names: frozenset[str]

    @property
    def any(self) -> bool:
        """Whether anything is chosen."""
        return bool(self.numbers or self.names)


def select_arguments(
    fun: tp.Callable[..., tp.Any], argnums: tp.Any, argnames: tp.Any, what: str
) -> Selection:
    """Arguments given by number or name; each also under its other name, as `jax.jit` does.

    Raises ValueError for a number or name that the function cannot have.
    """
    numbers, names = set(as_tuple(argnums)), set(as_tuple(argnames))
    if not numbers and not names:
        return _NOTHING
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return Selection(frozenset(numbers), frozenset(names))
    kinds = inspect.Parameter
    positional = [
        p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    variadic = any(p.kind is kinds.VAR_POSITIONAL for p in parameters)
    keywords = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    count = len(positional)
    for number in list(numbers):
        if not -count <= number < count and not variadic:
            raise ValueError(
                f"{what}_argnums={argnums} is out of range: {name_of(fun)} takes {count} "
                "positional arguments."
            )
        if number < 0 and not variadic:
            numbers.discard(number)
            numbers.add(number % count)
    known = {p.name for p in parameters}
    for name in names:
        if name not in known and not keywords:
            raise ValueError(
                f"{what}_argnames={argnames!r}: {name_of(fun)} has no argument {name!r}; it has "
                f"{sorted(known)}."
            )
    by_name = {p.name for p in parameters if p.kind is not kinds.POSITIONAL_ONLY}
    names |= {positional[n] for n in numbers if 0 <= n < count and positional[n] in by_name}
    numbers |= {positional.index(name) for name in names if name in positional}
    return Selection(frozenset(numbers), frozenset(names))


_NOTHING = Selection(frozenset(), frozenset())


def resolve_updates(graph_updates: bool | None, graph: bool | None = None) -> bool:
    """Whether structure changes propagate, by `graph_updates=`, `graph=` and the defaults in force.

    With `graph=False` arguments and results are trees, and only values of Variables propagate.
    """
    graph, updates = bind_modes(graph, graph_updates)
    return updates and graph


def refuse_shared_result(result: tp.Any, name: str, graph: bool | None) -> None:
    """Raise ValueError where one Variable is in two places of a result, and `graph` is False."""
    if resolve_mode(graph):
        return
    first: dict[int, tp.Any] = {}
    leaves = jax.tree_util.tree_leaves_with_path(result, is_leaf=lambda x: isinstance(x, Variable))
    for path, leaf in leaves:
        if isinstance(leaf, Variable) and first.setdefault(id(leaf), path) is not path:
            texts = [path_text(map(key_name, p)) for p in (first[id(leaf)], path)]
            raise ValueError(
                f"Duplicate {type(leaf).__name__} found at paths of the result: {texts[0]!r}, "
                f"{texts[1]!r}. With graph=False objects must form a tree. Remove the sharing, or "
                f"pass graph=True to nnxlite.{name}."
            )


def bind_modes(graph: bool | None, graph_updates: bool | None) -> tuple[bool, bool]:
    """`graph=` and `graph_updates=`, or the defaults in force where the transform is made."""
    updates = GRAPH_UPDATES.get() if graph_updates is None else graph_updates
    return resolve_mode(graph), updates


def positional(
    fun: tp.Callable[..., tp.Any],
    args: tuple[tp.Any, ...],
    kwargs: dict[str, tp.Any],
    last: int,
    bound: int,
) -> tuple[tuple[tp.Any, ...], dict[str, tp.Any]]:
    """Arguments up to number `last` made positional, where they were given by keyword."""
    if last < len(args):
        return args, kwargs
    try:
        parameters = list(inspect.signature(fun).parameters.values())[bound:]
    except (TypeError, ValueError):
        return args, kwargs
    moved, rest = list(args), dict(kwargs)
    for parameter in parameters[len(args) : last + 1]:
        wanted = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        if not wanted or parameter.name not in rest:
            break
        moved.append(rest.pop(parameter.name))
    return tuple(moved), rest


def by_position(
    fun: tp.Callable[..., tp.Any],
    args: tuple[tp.Any, ...],
    kwargs: dict[str, tp.Any],
    bound: Unbound,
    wanted: int,
) -> tuple[tuple[tp.Any, ...], dict[str, tp.Any]]:
    """Keyword arguments put at their positions, where a setting for each position finds them.

    Defaults fill the gaps between, and further positions as long as fewer than `wanted` are given.
    What has no position stays a keyword.

    Args:
        fun: the function.
        args, kwargs: what the call gives.
        bound: what the function carries already.
        wanted: for how many positions there are settings.
    """
    if not kwargs and len(args) >= wanted:
        return args, kwargs
    try:
        parameters = list(inspect.signature(fun).parameters.values())[len(bound.args) :]
    except (TypeError, ValueError):
        return args, kwargs
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = {p.name: i for i, p in enumerate(parameters) if p.kind in kinds}
    last = max((names.get(name, -1) for name in kwargs), default=-1)
    out, rest = list(args), dict(kwargs)
    for parameter in parameters[len(args) : max(last + 1, wanted)]:
        if parameter.name not in names or parameter.name in bound.kwargs:
            break
        if parameter.name in rest:
            out.append(rest.pop(parameter.name))
        elif parameter.default is not inspect.Parameter.empty:
            out.append(parameter.default)
        else:
            return args, kwargs  # the call itself will say what is missing
    return tuple(out), rest


def check_arguments(
    name: str, fun: tp.Callable[..., tp.Any], args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]
) -> None:
    """Raise TypeError where the function of a transform cannot be called like this."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}({name_of(fun)}): {error}.") from None


class naming_arguments:
    """A context in which JAX's complaint about an argument that is no array names the argument.

    Args:
        name: of the transform and its function.
        inputs: the arguments.
        remedy: what to do instead.
    """

    def __init__(self, name: str, inputs: Inputs, remedy: str = "") -> None:
        self._name = name
        self._inputs = inputs
        self._remedy = remedy

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: tp.Any, error: tp.Any, traceback: tp.Any) -> None:
        if not isinstance(error, TypeError):
            return
        found = _no_array(self._inputs)
        if found is not None:
            path, value = found
            raise TypeError(
                f"{self._name}: the argument at '{path}' is of type {type(value).__name__}, which "
                f"is no array. Give it to the function with functools.partial{self._remedy}."
            ) from error


def _no_array(inputs: Inputs) -> tuple[str, tp.Any] | None:
    """The first leaf of some arguments that JAX does not know, with its path."""
    call = inputs.define()
    skip = 1 if _is_call(call.treedef) else 0
    roots = set(call.where)
    plain = iter(inputs.plain)
    below: dict[int, list[tuple[Path, tp.Any]]] = {}
    for root, path, value in zip(call.leaf_roots(), call.leaf_paths(), inputs.values):
        below.setdefault(call.where[root], []).append((path, value))
    for position in range(call.treedef.num_leaves):
        leaves = below.get(position, []) if position in roots else [((), next(plain))]
        for path, value in leaves:
            for part in jax.tree_util.tree_leaves(value):
                if not _is_array(part):
                    return path_text((*call.argument_of(position)[skip:], *path)), part
    return None


def _is_call(treedef: tp.Any) -> bool:
    """Whether a tree is a pair (args, kwargs)."""
    tree = jax.tree_util.tree_unflatten(treedef, [0] * treedef.num_leaves)
    return (
        type(tree) is tuple and len(tree) == 2 and type(tree[1]) is dict and type(tree[0]) is tuple
    )


def _is_array(value: tp.Any) -> bool:
    if isinstance(value, jax.ShapeDtypeStruct):
        return True
    try:
        jax.typeof(value)
    except TypeError:
        return False
    return True
