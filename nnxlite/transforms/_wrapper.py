"""What a transform returns: a function under a transform, and what it carries.

Every transform returns a `Transform`: a function, the options of the transform, and among these what
runs a call.  `unbind` splits the callable that a user passes (a bound method, a partial, a callable
object, another `Transform`) into a function and the arguments that it carries, so that these enter the
transform as arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import sys
import types
import typing as tp
import weakref

import jax

from nnxlite._base.errors import Modes
from nnxlite._base.interning import Bounded
from nnxlite._base.jax import (
    EAGER,
    Numbers,
    drop_hidden_frames,
    is_pytree_leaf,
    trace_state,
)
from nnxlite._state._definition import State
from nnxlite.boundary._call_def import StaticArgument, boxed, parameter_names, parameters_of
from nnxlite.boundary._inputs import is_root
from nnxlite.objects._module import Module, called
from nnxlite.objects._pytree import BoundMethod, Pytree
from nnxlite.variables._definition import MISSING
from nnxlite.variables._variable import Variable

if tp.TYPE_CHECKING:
    from nnxlite.transforms._derivatives import Argnums

P = tp.ParamSpec("P")
Q = tp.ParamSpec("Q")
R = tp.TypeVar("R")
T = tp.TypeVar("T")
A = tp.TypeVar("A")
F_co = tp.TypeVar("F_co", bound=tp.Callable[..., tp.Any], covariant=True)
AnyState: tp.TypeAlias = State[tp.Any, tp.Any]


class _Options(tp.NamedTuple):
    name: str
    modes: Modes
    run: tp.Callable[..., tp.Any] | None
    more: tuple[tuple[str, tp.Any], ...] = ()
    is_array: tp.Callable[[tp.Any], bool] | None = None


class Options(_Options):
    """The options of a transform, in one object; further ones are attributes as well.

    Attributes:
        name: of the transform.
        modes: how it treats objects.
        run: what a call runs, from the `Transform` and the arguments `args, kwargs` to the result;
            None where no `Transform` is made.
        more: the options of this transform alone.
        is_array: of the filtered transforms, which leaves cross; all others are static or captured.
    """

    @classmethod
    def of(
        cls,
        name: str,
        modes: Modes,
        run: tp.Callable[..., tp.Any] | None = None,
        is_array: tp.Callable[[tp.Any], bool] | None = None,
        **more: tp.Any,
    ) -> Options:
        """The options of a transform, its own ones by name."""
        return cls(name, modes, run, tuple(more.items()), is_array)

    def __init__(self, *_: tp.Any) -> None:
        self.__dict__.update(self.more)  # a call reads up to sixteen (bench `eager`)

    if tp.TYPE_CHECKING:

        def __getattr__(self, name: str) -> tp.Any: ...


class Transform(tp.Generic[P, R]):
    """A function under a transform; equal to another one of the same function and options.

    So a transform that is applied in every step of a loop uses the program of the first step.

    Attributes:
        name: of the transform.
        __wrapped__: the function.
        options: all else that `type(self)(function, options)` needs; they do not refer to the function.
        bound: the function, and the arguments that it carries.
    """

    name: tp.Any = property(operator.attrgetter("options.name"))
    options: tp.Any
    __wrapped__: tp.Callable[P, R]
    __name__: str
    __qualname__: str
    _calls_module = False  # whether it is the `__call__` of a Module

    def __init__(self, fun: tp.Any, options: tp.Any) -> None:
        functools.update_wrapper(tp.cast(tp.Any, self), fun)  # first, so that own attributes win
        self.__wrapped__ = fun
        self.options = options
        self.bound = unbind(fun, pytrees=options.is_array is not None)
        self._programs: Bounded[tp.Any, tp.Any] | None = None

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return self.options.run(self, args, kwargs)
        except Exception as error:
            drop_hidden_frames(error)
            raise

    @tp.overload
    def __get__(self, instance: None, owner: tp.Any = None) -> tp.Self: ...
    @tp.overload
    def __get__(
        self: Transform[tp.Concatenate[tp.Any, Q], R], instance: object, owner: tp.Any = None
    ) -> tp.Callable[Q, R]: ...
    def __get__(self, instance: tp.Any, owner: tp.Any = None) -> tp.Any:
        if instance is None:
            return self
        if self._calls_module and trace_state.value is not EAGER:
            return functools.partial(called, self, instance)
        return BoundTransform(tp.cast(tp.Any, self), instance)

    def __set_name__(self, owner: type, name: str) -> None:
        self._calls_module = name == "__call__" and issubclass(owner, Module)

    def __repr__(self) -> str:
        return f"{self.name}({name_of(self.__wrapped__)})"

    def __reduce__(self) -> tp.Any:
        if _has_name(self):
            return self.__qualname__
        return type(self), (self.__wrapped__, self.options)

    def __eq__(self, other: object, /) -> bool:
        if self is other or not isinstance(other, Transform):
            return self is other
        (fun, layers), (other_fun, others) = unwrapped(self), unwrapped(other)
        return fun is other_fun and layers == others

    def __hash__(self) -> int:
        fun, layers = unwrapped(self)
        return hash((id(fun), layers))


def _has_name(fun: tp.Any) -> bool:
    """Whether a module has this object under its name, so that it can be pickled by name.

    Not in `__main__`, which is another module in another process.
    """
    module = getattr(fun, "__module__", None)
    found: tp.Any = None if module in (None, "__main__") else sys.modules.get(module)
    for part in getattr(fun, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return found is fun


class Unequal:
    """Mixin for transforms with more state than function and options, each equal only to itself."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__
    __reduce__ = object.__reduce__


# The transforms around a function: classes and options, the outermost first.
Layers = tuple[tuple["type[Transform[..., tp.Any]]", StaticArgument], ...]


def unwrapped(fun: tp.Any) -> tuple[tp.Any, Layers]:
    """The function inside all transforms, and the transforms."""
    layers: list[tuple[type[Transform[..., tp.Any]], StaticArgument]] = []
    while isinstance(fun, Transform) and type(fun).__eq__ is Transform.__eq__:
        layers.append((type(fun), boxed(fun.options)))
        fun = fun.__wrapped__
    return fun, tuple(layers)


def wrapped(fun: tp.Any, layers: Layers) -> tp.Any:
    """The inverse of `unwrapped`."""
    for kind, options in reversed(layers):
        fun = kind(fun, options.value)
    return fun


_programs: weakref.WeakKeyDictionary[tp.Any, Bounded[tp.Any, Bounded[tp.Any, tp.Any]]]
_programs = weakref.WeakKeyDictionary()
PROGRAMS_PER_FUNCTION = 64  # options with programs of one function, and programs for each


def program(transform: Transform[..., tp.Any], key: tp.Any, make: tp.Callable[[], T]) -> T:
    """What a transform has made for one kind of call, such as a function of JAX; found by equal ones.

    Key: the function, its name, the options, the number and names of the arguments that the function
    carries, and `key`. It is dropped with the function, or when there are more than
    `PROGRAMS_PER_FUNCTION`. Threads: two may make the same, one stays. JAX compiles again for each new
    function that it is given.

    Args:
        transform, key: the transform, and the kind of call.
        make: makes the value, which must not refer to the function, except weakly.
    """
    known = transform._programs
    if known is None:
        known = transform._programs = _programs_of(transform)
    return known.get_or_make(key, make)


def _programs_of(transform: Transform[..., tp.Any]) -> Bounded[tp.Any, tp.Any]:
    """The programs of a function under some options, shared by equal transforms where possible."""
    bound, new = transform.bound, Bounded[tp.Any, tp.Any](PROGRAMS_PER_FUNCTION)
    fun, layers = unwrapped(bound.fun)
    if type(fun).__eq__ is not object.__eq__:  # an equal function may outlive the first
        return new
    try:
        mine = _programs.setdefault(fun, Bounded(PROGRAMS_PER_FUNCTION))
    except TypeError:  # not weakly referable
        return new
    options = transform.options
    try:
        hash(options)
    except TypeError:
        options = boxed(options)
    carried, name = (len(bound.args), *bound.kwargs), name_of(transform.__wrapped__)
    return mine.get_or_make((options, layers, carried, name), lambda: new)


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


@dataclasses.dataclass
class Unbound:
    """A callable as a function and the arguments that it carries."""

    fun: tp.Callable[..., tp.Any]
    args: tuple[tp.Any, ...]
    kwargs: dict[str, tp.Any]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the function's parameters, worked out once for each wrapper."""
        return parameter_names(self.fun)


def unbind(fun: tp.Callable[..., tp.Any], pytrees: bool = False) -> Unbound:
    """Split bound methods, partials and callable objects into function and arguments.

    What they carry enters the transform as arguments, so the model of a bound method is treated like a
    model that is passed. Arguments of a partial without objects stay in the partial: they are constants
    of any type. With `pytrees`, a callable pytree of another library is an argument as well.
    """
    parts = _unbind(fun)
    if not pytrees:
        return parts
    inner, layers = unwrapped(parts.fun)
    if isinstance(inner, type) or is_pytree_leaf(inner):
        return parts
    return rewrap(Unbound(call_object, (inner, *parts.args), parts.kwargs), layers)


def _unbind(fun: tp.Callable[..., tp.Any]) -> Unbound:
    if not callable(fun):
        raise TypeError(f"Expected a callable to transform, got {type(fun).__name__}.")
    if isinstance(fun, (types.MethodType, BoundMethod)) and is_root(fun.__self__):
        inner = _unbind(fun.__func__)
        return Unbound(inner.fun, (*inner.args, fun.__self__), inner.kwargs)
    if isinstance(fun, functools.partial):
        return _unbind_partial(fun)
    if is_root(fun) and not isinstance(fun, type):
        return Unbound(_caller_of(type(fun)), (fun,), {})
    inner, layers = unwrapped(fun)
    unbound = _unbind(inner) if layers else Unbound(fun, (), {})
    return Unbound(fun, (), {}) if unbound.fun is inner else rewrap(unbound, layers)


def rewrap(unbound: Unbound, layers: Layers) -> Unbound:
    """An unbound callable under transforms, with the same arguments carried."""
    fun, args, kwargs = unbound.fun, unbound.args, unbound.kwargs
    if not (args or kwargs):
        return Unbound(wrapped(fun, layers), args, kwargs)
    carried = {"layers": layers, "num_bound": len(args), "names": tuple(kwargs)}
    options = Options.of("carrying", Modes(True, True), _run_carrying, **carried)
    return Unbound(Transform(fun, options), args, kwargs)


def _run_carrying(outer: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    """Call a function under transforms; its first arguments are those that the function carried."""
    options = outer.options
    named = {name: kwargs.pop(name) for name in options.names}
    inner = functools.partial(outer.__wrapped__, *args[: options.num_bound], **named)
    return wrapped(inner, options.layers)(*args[options.num_bound :], **kwargs)


def _unbind_partial(fun: functools.partial[tp.Any]) -> Unbound:
    inner = _unbind(fun.func)
    args, kwargs = (*inner.args, *fun.args), {**inner.kwargs, **fun.keywords}
    carried = tuple(filter(holds_object, args))
    keywords = {k: v for k, v in kwargs.items() if holds_object(v)}
    if not carried and not keywords:
        return Unbound(fun, (), {})
    if len(carried) == len(args) and len(keywords) == len(kwargs):
        return Unbound(inner.fun, args, kwargs)
    layout = tuple(_HOLE if holds_object(x) else x for x in args)
    constants = {k: v for k, v in kwargs.items() if k not in keywords}

    def partly(*args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        given = iter(args)
        first = [next(given) if x is _HOLE else x for x in layout]
        return inner.fun(*first, *given, **constants, **kwargs)

    inside: tp.Any = functools.update_wrapper(partly, inner.fun, updated=())
    inside.__qualname__ = name_of(inner.fun)
    if (parameters := parameters_of(inner.fun)) is not None:
        fixed = {p.name for p, x in zip(parameters, layout) if x is not _HOLE} | set(constants)
        inside.__signature__ = inspect.Signature([p for p in parameters if p.name not in fixed])
    return Unbound(inside, carried, keywords)


_HOLE = object()


def holds_object(value: tp.Any) -> bool:
    """Whether a value is, or contains, an object, Variable or State."""
    return any(map(is_root, jax.tree_util.tree_leaves(value, is_leaf=is_root)))


class BoundTransform(functools.partial[tp.Any]):
    """A transformed function as a method, bound to its object: `model.step.lower(x)` works as well."""

    def __getattr__(self, name: str) -> tp.Any:
        if name.startswith("_"):  # those of the function would hide that an argument is bound
            raise AttributeError(name)
        found = getattr(self.func, name)
        return functools.partial(found, *self.args) if name in _OF_A_CALL else found


_OF_A_CALL = frozenset({"lower", "trace", "eval_shape"})
"""The methods of transformed functions that take the arguments of a call."""


def call_object(fun: tp.Any, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
    return fun(*args, **kwargs)


def _caller_of(cls: type) -> tp.Any:
    """`call_object` for one `__call__`, which has its own programs, and gives the names.

    It calls the method that the class has then: `capture`, say, replaces methods for a while.
    """
    method = cls.__call__
    if not inspect.isfunction(method):
        return call_object
    caller = vars(method).get("_nnx_caller")
    if caller is None or caller.__wrapped__ is not method:  # a wrapper has the other's attributes
        copy = types.FunctionType(call_object.__code__, globals())
        caller = vars(method)["_nnx_caller"] = functools.wraps(method)(copy)
    return caller


def decorated(kind: type[Transform[..., tp.Any]], fun: tp.Any, options: tp.Any) -> tp.Any:
    """A function under a transform; without a function, a decorator."""
    return (lambda fun: kind(fun, options)) if fun is MISSING else kind(fun, options)


def name_of(fun: tp.Any) -> str:
    """A function's name for messages."""
    if isinstance(fun, functools.partial) and "__qualname__" not in fun.__dict__:
        fun = fun.func
    return getattr(fun, "__qualname__", None) or type(fun).__name__


# Types for type checkers ----------------------------------------------------------------------------
#
# Transforms have two forms: of a function, and with options alone a decorator.  Where what they return
# has methods of its own, or depends on the options, each form is declared.  The options of these are
# listed here; a test compares them with the parameters of the transforms.


class ModeKeywords(tp.TypedDict, total=False):
    """How a transform treats objects."""

    graph: bool | None
    graph_updates: bool | None


class JitKeywords(ModeKeywords, total=False):
    """The options of `jit` and `jit_partial`."""

    in_shardings: tp.Any
    out_shardings: tp.Any
    static_argnums: int | tp.Sequence[int] | None
    static_argnames: str | tp.Iterable[str] | None
    donate_argnums: int | tp.Sequence[int] | None
    donate_argnames: str | tp.Iterable[str] | None
    keep_unused: bool
    device: tp.Any
    backend: str | None
    inline: bool
    donate: tp.Literal["written"] | None
    max_traces: int | None


class JaxprKeywords(ModeKeywords, total=False):
    """The options of `make_jaxpr`."""

    static_argnums: int | tp.Sequence[int]


class NumericGradKeywords(tp.TypedDict, total=False):
    """The options of `grad` that JAX's has as well."""

    holomorphic: bool
    allow_int: bool
    reduce_axes: tp.Sequence[tp.Any]


class GraphGradKeywords(NumericGradKeywords, total=False):
    """The options of `grad` where gradients of objects are States."""

    graph: tp.Literal[True] | None
    graph_updates: tp.Literal[True] | None


class FirstGradKeywords(GraphGradKeywords, total=False):
    """The same where the first argument is differentiated."""

    argnums: tp.Literal[0]


class GradKeywords(NumericGradKeywords, ModeKeywords, total=False):
    """The options of `grad`."""

    argnums: Argnums
    has_aux: bool


# The gradient of an object is a State; that of a State, a Variable or an array is another one. The call
# tells the type of the argument, so the loss function needs no annotations.

Leaf = tp.TypeVar("Leaf", bound=AnyState | Variable[tp.Any])


class Derivative(Transform[..., tp.Any], tp.Generic[F_co]):
    """Base of the following; `vmap` and `jit` of one are declared as of the same class."""


G = tp.TypeVar("G", bound=Derivative[tp.Any])


class BothForms(tp.Protocol[Q]):
    """A transform whose options are `Q`: of a function, and as a decorator."""

    @tp.overload
    def __call__(self, f: G, /, *args: Q.args, **options: Q.kwargs) -> G: ...
    @tp.overload
    def __call__(
        self, f: tp.Callable[P, R], /, *args: Q.args, **options: Q.kwargs
    ) -> Transform[P, R]: ...
    @tp.overload
    def __call__(
        self, *args: Q.args, **options: Q.kwargs
    ) -> tp.Callable[[tp.Callable[P, R]], Transform[P, R]]: ...


def both_forms(transform: tp.Callable[tp.Concatenate[tp.Any, Q], tp.Any]) -> BothForms[Q]:
    """The transform itself, declared in both forms with the options that it lists."""
    return tp.cast(tp.Any, transform)


_Fun: tp.TypeAlias = tp.Callable[tp.Concatenate[T, P], R]
_WithAux: tp.TypeAlias = tp.Callable[tp.Concatenate[T, P], tuple[tp.Any, A]]


class Grad(Derivative[F_co]):
    """What `grad(f)` returns."""

    @tp.overload
    def __call__(
        self: Grad[_Fun[tp.Any, P, tp.Any]], arg: Pytree, /, *args: P.args, **kwargs: P.kwargs
    ) -> AnyState: ...
    @tp.overload
    def __call__(
        self: Grad[_Fun[tp.Any, P, tp.Any]], arg: Numbers, /, *args: P.args, **kwargs: P.kwargs
    ) -> jax.Array: ...
    @tp.overload
    def __call__(
        self: Grad[_Fun[tp.Any, P, tp.Any]], arg: Leaf, /, *args: P.args, **kwargs: P.kwargs
    ) -> Leaf: ...
    @tp.overload
    def __call__(
        self: Grad[tp.Callable[Q, tp.Any]], /, *args: Q.args, **kwargs: Q.kwargs
    ) -> tp.Any: ...
    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        """Differentiate."""


class GradAux(Derivative[F_co]):
    """What `grad(f, has_aux=True)` returns."""

    @tp.overload
    def __call__(
        self: GradAux[_WithAux[tp.Any, P, A]], arg: Pytree, /, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[AnyState, A]: ...
    @tp.overload
    def __call__(
        self: GradAux[_WithAux[tp.Any, P, A]], arg: Numbers, /, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[jax.Array, A]: ...
    @tp.overload
    def __call__(
        self: GradAux[_WithAux[tp.Any, P, A]], arg: Leaf, /, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[Leaf, A]: ...
    @tp.overload
    def __call__(
        self: GradAux[tp.Callable[Q, tuple[tp.Any, A]]], /, *args: Q.args, **kwargs: Q.kwargs
    ) -> tuple[tp.Any, A]: ...
    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        """Differentiate."""


class ValueAndGrad(Derivative[F_co]):
    """What `value_and_grad(f)` returns; the value is that of `f`, also where it has an aux."""

    @tp.overload
    def __call__(
        self: ValueAndGrad[_Fun[tp.Any, P, R]], arg: Pytree, /, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[R, AnyState]: ...
    @tp.overload
    def __call__(
        self: ValueAndGrad[_Fun[tp.Any, P, R]], arg: Numbers, /, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[R, jax.Array]: ...
    @tp.overload
    def __call__(
        self: ValueAndGrad[_Fun[tp.Any, P, R]], arg: Leaf, /, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[R, Leaf]: ...
    @tp.overload
    def __call__(
        self: ValueAndGrad[tp.Callable[Q, R]], /, *args: Q.args, **kwargs: Q.kwargs
    ) -> tuple[R, tp.Any]: ...
    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        """Differentiate."""
