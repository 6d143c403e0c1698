"""One call of a function under a transform: its arguments, their errors, and what runs inside.

A transform that runs its function once, where it is called, gives JAX `run_out` of a `Call`, a function
of leaves, and what comes back to `put_back`.  Under the filtered transforms leaves are of any type: on
the way in, those that are not traced are captured (`tracing`); on the way out, those that are not arrays
cross as static data.
"""

from __future__ import annotations

import contextlib
import inspect
import typing as tp

import jax

from nnxlite._base.jax import as_integers, key_name
from nnxlite._base.statics import facts
from nnxlite.boundary._call_def import (
    CallDef,
    Inner,
    StaticLeaves,
    enter,
    names_by_position,
    parameter_names,
    parameters_of,
)
from nnxlite.boundary._inputs import Inputs, is_root
from nnxlite.boundary._leave import leave
from nnxlite.boundary._out import Outputs, replay
from nnxlite.boundary._refusals import refuse_foreign_outputs, refuse_non_arrays
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._kinds import Kind, kind_by_type
from nnxlite.graph._plan import refuse_sharing, view
from nnxlite.graph._rebuild import traverse
from nnxlite.transforms._finish import Owner, owners, raise_failed
from nnxlite.transforms._wrapper import (
    Options,
    StaticArgument,
    Unbound,
    boxed,
    holds_object,
    inputs_in_mode,
    name_of,
)
from nnxlite.variables._variable import Variable


def static_argument(value: tp.Any, name: tp.Any, fun: tp.Callable[..., tp.Any]) -> StaticArgument:
    """Box a static argument.

    Raises ValueError naming the argument when its value is unhashable, or contains objects.
    """
    if type(value) in _PLAIN:
        return StaticArgument(value, facts(value).key, True)
    settings = _settings_key(value)
    if settings is None and holds_object(value):
        raise ValueError(
            f"Static argument {_shown(name, fun)} of {name_of(fun)} holds a {type(value).__name__}: its "
            "values would be constants of the program. Make the argument a traced one, or, where it has "
            "settings alone, its class an nnx.dataclass(frozen=True)."
        )
    try:
        hash(value)  # a list has a key, but a cached program would not see a later change of it
    except TypeError:
        raise ValueError(
            "Non-hashable static arguments are not supported. "
            f"Static argument {_shown(name, fun)} of {name_of(fun)} is unhashable: it is of type "
            f"'{type(value).__name__}'. Pass a hashable value, such as a tuple, or make the "
            "argument a traced one."
        ) from None
    if settings is not None:
        return StaticArgument(value, settings, False)
    key, exact, *_ = facts(value)
    return StaticArgument(value, key, exact)


_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})


def _settings_key(value: tp.Any) -> GraphDef[tp.Any] | None:
    """The definition of an object without data that cannot be changed, a frozen dataclass; else None."""
    if not _is_frozen_dataclass(value) or not is_root(value):
        return None
    seen = view(value)
    constant = not seen.leaves and all(map(_is_frozen_dataclass, seen.nodes()))
    return seen.graphdef if constant else None


def _is_frozen_dataclass(value: tp.Any) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def _shown(name: int | str, fun: tp.Callable[..., tp.Any]) -> str:
    """The name of an argument that is given by number or name, if it is known."""
    known = parameter_names(fun)
    return repr(known[name] if isinstance(name, int) and 0 <= name < len(known) else name)


# A leaf: what the arguments look like is known from their types.
kind_by_type[StaticArgument] = Kind.OTHER


def unboxed(inputs: Inputs) -> None:
    """Make the static arguments among some inputs, which are boxed, static leaves."""
    numbers = tuple([n for n, leaf in enumerate(inputs.arrays) if type(leaf) is StaticArgument])
    if numbers:
        boxes: list[StaticArgument] = [inputs.arrays[number] for number in numbers]
        for number, box in zip(numbers, boxes):
            inputs.arrays[number] = box.value
        exact = all(box.exact for box in boxes)
        keys = tuple([box.key for box in boxes])
        inputs.static = StaticLeaves(numbers, [box.value for box in boxes], keys, exact)


def boxed_arguments(
    args: tuple[tp.Any, ...],
    numbers: tp.Iterable[int],
    name: str,
    option: str = "static_argnums",
    box: tp.Callable[[tp.Any, int], StaticArgument] = lambda value, number: boxed(value),
) -> tuple[tp.Any, ...]:
    """The arguments of a call, the static ones boxed; `unboxed` makes them static leaves.

    Args:
        args: the arguments.
        numbers: which are static, negative ones from the end.
        name: of the transform and its function, for the message.
        option: the name of the numbers, for the message.
        box: from a static argument, and its number, to a part of a key.

    Raises ValueError for a number out of range.
    """
    out = list(args)
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise ValueError(
                f"{name}: {option} has {number}, but the call has {len(args)} positional "
                f"arguments; numbers from {-len(args)} to {len(args) - 1} are possible."
            )
        number %= len(args)
        out[number] = box(args[number], number)
    return tuple(out)


class Selection(tp.NamedTuple):
    """Arguments chosen by number and by name."""

    numbers: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.numbers or self.names)

    def boxed(
        self, fun: tp.Any, args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any], first: int
    ) -> tuple[tuple[tp.Any, ...], dict[str, tp.Any]]:
        """The arguments of a call with these boxed, as they are static; numbers count from `first`."""
        numbers = {n + first if n >= 0 else n + len(args) for n in self.numbers}
        box = lambda value, where, chosen: static_argument(value, where, fun) if chosen else value
        args = tuple([box(value, n, n in numbers) for n, value in enumerate(args)])
        return args, {n: box(value, n, n in self.names) for n, value in kwargs.items()}


def select_arguments(
    fun: tp.Callable[..., tp.Any], argnums: tp.Any, argnames: tp.Any, what: str
) -> Selection:
    """Arguments given by number or name; each also under its other name, as `jax.jit` does.

    Raises ValueError for a number or name that the function does not have.
    """
    numbers, names = set(as_integers(argnums)), set(as_integers(argnames))
    if not numbers and not names:
        return Selection()
    parameters = parameters_of(fun)
    if parameters is None:
        return Selection(frozenset(numbers), frozenset(names))
    positional, kinds = names_by_position(parameters), {p.kind for p in parameters}
    count = len(positional)
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        if not all(-count <= number < count for number in numbers):
            raise ValueError(
                f"{what}_argnums={argnums} is out of range: {name_of(fun)} takes {count} "
                "positional arguments."
            )
        numbers = {number % count for number in numbers}
    known = {p.name for p in parameters}
    if inspect.Parameter.VAR_KEYWORD not in kinds and not names <= known:
        raise ValueError(
            f"{what}_argnames={argnames!r}: {name_of(fun)} has no argument "
            f"{min(names - known)!r}; it has {sorted(known)}."
        )
    by_name = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    names |= {positional[n] for n in numbers if 0 <= n < count and positional[n] in by_name}
    numbers |= {positional.index(name) for name in names if name in positional}
    return Selection(frozenset(numbers), frozenset(names))


def refuse_shared_result(result: tp.Any, name: str, graph: bool) -> None:
    """Raise ValueError where a result contains a Variable twice, or itself, and `graph` is False.

    Objects without Variables may be there twice, as in the reference.
    """
    if graph:
        return
    places = jax.tree_util.tree_leaves_with_path(result, is_leaf=is_root)
    places = [(path, value) for path, value in places if is_root(value)]
    walk = traverse([value for _, value in places], trees=True)
    starts = [tuple(map(key_name, path)) for path, _ in places]
    graphdef = GraphDef(walk.tokens, len(places))
    refuse_sharing(graphdef, name, lambda: starts, " of the result", arrays=False)


def unwrapped_value(value: tp.Any) -> tp.Any:
    """The value of a Variable; anything else unchanged."""
    return value.get_value() if isinstance(value, Variable) else value


def positional(
    fun: tp.Callable[..., tp.Any],
    args: tuple[tp.Any, ...],
    kwargs: dict[str, tp.Any],
    wanted: int,
    bound: Unbound | None = None,
    defaults: bool = False,
) -> tuple[tuple[tp.Any, ...], dict[str, tp.Any]]:
    """The first `wanted` arguments moved to their positions, where they were given by keyword.

    With `defaults` all that have a position are moved; defaults fill the gaps in between, and further
    positions until there are `wanted` arguments. Keyword-only arguments stay keywords.

    Args:
        fun: the function.
        args, kwargs: the arguments of the call.
        wanted: for how many positions there are settings.
        bound: the parts of the function, with the arguments that it carries.
        defaults: see above.
    """
    if len(args) >= wanted and not (defaults and kwargs):
        return args, kwargs
    parameters, given = parameters_of(fun) or [], ()
    if bound is not None:
        parameters, given = parameters[len(bound.args) :], bound.kwargs
    names = names_by_position(parameters)
    if defaults:
        wanted = max(wanted, *(names.index(name) + 1 for name in kwargs if name in names), 0)
    out, rest = list(args), dict(kwargs)
    for parameter in parameters[len(args) : wanted]:
        if parameter.name not in names or parameter.name in given:
            break
        if parameter.name in rest:
            out.append(rest.pop(parameter.name))
        elif not defaults:
            break
        elif parameter.default is not parameter.empty:
            out.append(parameter.default)
        else:
            return args, kwargs  # the call itself raises for the missing one
    return tuple(out), rest


def check_arguments(
    name: str, fun: tp.Callable[..., tp.Any], args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]
) -> None:
    """Raise TypeError where the function of a transform cannot be called with these arguments."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}({name_of(fun)}): {error}.") from None


PARTIAL = "Give it to the function with functools.partial."
STATIC = f"{PARTIAL[:-1]}, or make it static with static_argnums."


@contextlib.contextmanager
def naming_arguments(
    name: str, call: CallDef, inputs: Inputs, remedy: str = PARTIAL
) -> tp.Iterator[None]:
    """A context in which JAX's error for an argument that is not an array names the argument.

    An error of `error_if` becomes that of the condition.

    Args:
        name: of the transform and its function.
        call: the arguments, with the user's names for them.
        inputs: the same with their leaves.
        remedy: what to do instead.
    """
    try:
        yield
    except TypeError:
        refuse_non_arrays(name, call, inputs.leaves, remedy)
        raise
    except RuntimeError as error:
        raise_failed(error)
        raise


class Call:
    """One call of a function: what JAX traces, the arguments, and the way back.

    Attributes:
        fun: the function, without the arguments that it carries.
        num_bound: how many arguments it carries; they come first.
        inputs: the arguments.
        leaves: their leaves.
        definition: their static side.
        options: of the transform.
        captured: whether objects that the function captured may leave it; see `leave` of the boundary.
        look: whether the arguments stay as they are: structure leaves only where objects are returned.
    """

    def __init__(
        self,
        options: Options,
        bound: Unbound,
        args: tuple[tp.Any, ...],
        kwargs: dict[str, tp.Any],
        *,
        static_argnums: tuple[int, ...] = (),
        captured: bool = False,
        look: bool = False,
        inside: bool = False,
    ) -> None:
        """A call under a transform with these options.

        Args:
            options, bound, args, kwargs: the transform, the function, and the arguments.
            static_argnums: which of the arguments are static.
            captured, look: see the class.
            inside: whether the leaves inside the values of Variables count, see `Inputs`.

        Raises ValueError for a static argument that is not given, or with `graph=False` for an object
        in several places.
        """
        self.fun, self.num_bound, self.options = bound.fun, len(bound.args), options
        self.captured, self.look = captured, look
        if static_argnums:
            args = boxed_arguments(args, static_argnums, self.name)
        self.inputs = inputs_in_mode(bound, args, kwargs, options, inside)
        unboxed(self.inputs)
        self.leaves, self.definition = self.inputs.leaves, self.inputs.definition

    def tracing(self, traced: tp.Iterable[tp.Any]) -> tp.Self:
        """The same call with only the leaves for which `traced` is true; the others are captured."""
        self.inputs.make_static([not flag for flag in traced])
        self.leaves, self.definition = self.inputs.leaves, self.inputs.definition
        return self

    def owners(self) -> list[Owner]:
        """For each leaf the number or name of its argument; None where the function carries it."""
        return owners(self.definition, self.num_bound)

    def arguments(self, leaves: tp.Sequence[tp.Any]) -> tuple[tp.Any, ...]:
        """The positional arguments of the caller, with other leaves; their objects are new."""
        return self.definition.build(leaves)[0][self.num_bound :]

    def leaf_text(self, leaf: int) -> str:
        """The path of a leaf, for messages."""
        return self.definition.leaves()[leaf].text()

    def naming_arguments(self, remedy: str = PARTIAL) -> contextlib.AbstractContextManager[None]:
        """A context in which JAX's errors for arguments name them."""
        return naming_arguments(self.name, self.definition, self.inputs, remedy)

    def put_back(self, out: Outputs) -> tp.Any:
        """Write what left the function into the caller's objects; returns the caller's result."""
        return replay(self.inputs, out)

    @property
    def name(self) -> str:
        """Of the transform and its function, for messages."""
        return f"{self.options.name}({name_of(self.fun)})"

    def enter(self, leaves: tp.Sequence[tp.Any]) -> tuple[tp.Any, Inner]:
        """The arguments `(args, kwargs)` with these leaves, and the objects that `leave` needs."""
        return enter(self.definition, leaves)

    def run(self, leaves: tp.Sequence[tp.Any]) -> tuple[Inner, tp.Any]:
        """Call the function with these leaves."""
        (args, kwargs), inner = self.enter(leaves)
        return inner, self.fun(*args, **kwargs)

    def leave(self, inner: Inner, result: tp.Any) -> Outputs:
        """What leaves the function with this result."""
        refuse_shared_result(result, self.options.name, self.options.modes.graph)
        structure = self.options.modes.updates and (not self.look or holds_object(result))
        out = leave(inner, result, structure=structure, captured=self.captured)
        return out if self.options.is_array is None else out.as_arrays(self.options.is_array)

    def outputs(self, leaves: tp.Sequence[tp.Any]) -> tuple[tp.Any, Outputs]:
        """The result of the function for these leaves, and what leaves it.

        Raises TypeError where it returned or stored something that JAX cannot return.
        """
        inner, result = self.run(leaves)
        out = self.leave(inner, result)
        if self.options.is_array is None:
            refuse_foreign_outputs(self.definition, out, self.name)
        return result, out

    def run_out(self, leaves: tp.Sequence[tp.Any]) -> Outputs:
        """The function between leaves: from those of the arguments to what leaves it; see `outputs`."""
        return self.outputs(leaves)[1]
