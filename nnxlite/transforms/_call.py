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
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnxlite._base.errors import listed, path_text
from nnxlite._base.jax import as_integers, constrained
from nnxlite.boundary._call_def import (
    CallDef,
    Inner,
    StaticArgument,
    boxed,
    enter,
    names_by_position,
    parameters_of,
    paths_of,
)
from nnxlite.boundary._inputs import Inputs, is_root
from nnxlite.boundary._labels import broadcast, labels
from nnxlite.boundary._leave import leave, refuse_non_arrays
from nnxlite.boundary._out import Outputs, replay
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._plan import view
from nnxlite.transforms._checks import raise_failed
from nnxlite.transforms._wrapper import Options, Unbound, holds_object, name_of
from nnxlite.variables._definition import PARTITION_NAME, PLACEMENT
from nnxlite.variables._variable import Variable

Selection: tp.TypeAlias = frozenset[int | str]
"""Arguments of a call by number and by name; one that has both is in it twice."""


def inputs_in_mode(
    bound: Unbound,
    args: tuple[tp.Any, ...],
    kwargs: dict[str, tp.Any],
    options: Options,
    inside: bool = False,
    static: Selection = frozenset(),
    option: str = "",
    any_value: bool = False,
) -> Inputs:
    """The arguments of a call, after those that the function carries; the static ones part of the key.

    Args:
        bound, args, kwargs, options: the call.
        inside: whether the leaves inside the values of Variables count, see `Inputs`.
        static: the static arguments.
        option: the option with their numbers, where one that is out of range is refused.
        any_value: whether they may be unhashable, or contain objects.

    Raises ValueError for a static argument that is not given, is unhashable or contains objects, and
    with `graph=False` for an object in several places.
    """
    if static:
        args, kwargs = _boxed(bound, args, kwargs, options, static, option, any_value)
    if bound.args or bound.kwargs:
        args, kwargs = (*bound.args, *args), {**bound.kwargs, **kwargs}
    any_leaf = options.is_array is not None
    inputs = Inputs.of_call(args, kwargs, bound.names, trees=any_leaf, inside=inside or any_leaf)
    if not options.modes.graph:
        inputs.in_mode(False, options.name)
    if static:
        inputs.unbox()
    return inputs


def _boxed(
    bound: Unbound,
    args: tuple[tp.Any, ...],
    kwargs: dict[str, tp.Any],
    options: Options,
    static: Selection,
    option: str,
    any_value: bool,
) -> tuple[tuple[tp.Any, ...], dict[str, tp.Any]]:
    """The arguments of a call, the static ones boxed, so that they are leaves."""
    out, named, count = list(args), dict(kwargs), len(args)
    names = bound.names[len(bound.args) :]
    box = lambda x, name: boxed(x) if any_value else _checked(x, name, bound)
    for which in static:
        if isinstance(which, str):
            if which in kwargs:
                named[which] = box(kwargs[which], which)
        elif -count <= which < count:
            number = which % count
            name = names[number] if number < len(names) else f"args[{number}]"
            out[number] = box(args[number], name)
        elif option:
            raise ValueError(
                f"{options.name}({name_of(bound.fun)}): {option} has {which}, but the call has "
                f"{count} positional arguments; numbers from {-count} to {count - 1} are possible."
            )
    return tuple(out), named


def _checked(value: tp.Any, name: str, bound: Unbound) -> StaticArgument:
    """Box a static argument.

    Raises ValueError naming the argument when its value is unhashable, or contains objects.
    """
    if type(value) in _PLAIN:
        return boxed(value)
    what = f"Static argument {name!r} of {name_of(bound.fun)}"
    settings = _settings_key(value)
    if settings is None and holds_object(value):
        raise ValueError(
            f"{what} holds a {type(value).__name__}: its values would be constants of the program. Make "
            "the argument a traced one, or, where it has settings alone, its class an "
            "nnx.dataclass(frozen=True)."
        )
    try:
        hash(value)  # a list has a key, but a cached program would not see a later change of it
    except TypeError:
        raise ValueError(
            f"Non-hashable static arguments are not supported. {what} is unhashable: it is of type "
            f"'{type(value).__name__}'. Pass a hashable value, such as a tuple, or make the "
            "argument a traced one."
        ) from None
    return boxed(value) if settings is None else StaticArgument(value, settings, False)


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


def select_arguments(
    fun: tp.Callable[..., tp.Any], argnums: tp.Any, argnames: tp.Any, what: str
) -> Selection:
    """Arguments given by number or name; each also under its other name, as `jax.jit` does.

    Raises ValueError for a number or name that the function does not have.
    """
    numbers, names = set(as_integers(argnums)), set(as_integers(argnames))
    parameters = parameters_of(fun) if numbers or names else None
    if parameters is None:
        return frozenset({*numbers, *names})
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
    return frozenset({*numbers, *names})


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


Owner: tp.TypeAlias = int | str | None
"""The number or name of an argument; None for one that the function carries."""


def owners(call: CallDef, num_bound: int) -> list[Owner]:
    """For each leaf of a call its argument."""

    def owner(by_name: int, key: tp.Any, *_: tp.Any) -> Owner:
        if by_name:
            return key
        return key - num_bound if key >= num_bound else None

    paths = paths_of(call.treedef)
    return [owner(*paths[leaf.position]) for leaf in call.leaves()]


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
        read_only: whether the arguments stay as they are: structure leaves with returned objects alone.
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
        read_only: bool = False,
        inside: bool = False,
    ) -> None:
        """A call under a transform with these options.

        Args:
            options, bound, args, kwargs: the transform, the function, and the arguments.
            static_argnums: which of the arguments are static.
            captured, read_only: see the class.
            inside: whether the leaves inside the values of Variables count, see `Inputs`.

        Raises ValueError for a static argument that is not given, or with `graph=False` for an object
        in several places.
        """
        self.fun, self.num_bound, self.options = bound.fun, len(bound.args), options
        self.captured, self.read_only = captured, read_only
        static = frozenset(static_argnums)
        self.inputs = inputs_in_mode(
            bound, args, kwargs, options, inside, static, "static_argnums", any_value=True
        )
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
        return inner, inner.run(self.fun, *args, **kwargs)

    def leave(self, inner: Inner, result: tp.Any, **more: tp.Any) -> Outputs:
        """What leaves the function with this result; `more` is for `leave` of the boundary."""
        modes, is_array = self.options.modes, self.options.is_array
        structure = modes.updates and (not self.read_only or holds_object(result))
        more |= {"structure": structure, "captured": self.captured}
        out = leave(inner, result, name=self.name, graph=modes.graph, **more)
        return out if is_array is None else out.as_arrays(is_array)

    def refuse_writes(self, inner: Inner, what: str) -> None:
        """Raise ValueError where a function changed its arguments and the change would be dropped."""
        left = leave(inner, None).definition
        if left.written or left.restructures:
            leaves = self.definition.graph_leaves()
            names = ", ".join(f"'{path_text(leaves[i].below)}'" for i in left.written[:5])
            raise ValueError(
                f"{what} changes its arguments ({names or 'their structure'}), and the change cannot "
                "leave it. Return the new value instead, and write it outside."
            )

    def run_out(self, leaves: tp.Sequence[tp.Any]) -> Outputs:
        """The function between leaves: from those of the arguments to what leaves it.

        Raises TypeError where it returned or stored something that JAX cannot return.
        """
        return self.leave(*self.run(leaves), foreign=self.options.is_array is not None)


# Around the run of a program ------------------------------------------------------------------------


def stay_in_place(call: CallDef, leaves: list[tp.Any], out: Outputs) -> Outputs:
    """Constrain the new values of Variables that `shard` has placed to their present shardings.

    Otherwise XLA would choose a sharding for the new value, and the next call would compile again.

    Args:
        call: the arguments.
        leaves: of the arguments.
        out: the outputs.
    """
    decoded, values, new = call.graphdef.decoded, call.whole(leaves)[1], [*out.values]
    for i, leaf in enumerate(out.definition.written, out.definition.num_arrays):
        node = decoded.leaf_nodes[leaf]
        metadata = getattr(decoded.node_defs[node], "metadata", {}) if node >= 0 else {}
        if PLACEMENT in metadata:
            new[i] = _in_place(new[i], values[leaf], metadata[PLACEMENT])
    return Outputs(out.definition, new)


def _in_place(new: tp.Any, old: tp.Any, spec: tp.Any) -> tp.Any:
    """A new value with the sharding of the old one, if that has this spec, or a pytree these."""
    if not isinstance(spec, PartitionSpec):
        (values, treedef), (before, known) = map(jax.tree_util.tree_flatten, (new, old))
        if treedef != known or len(values) != len(spec):
            return new
        return treedef.unflatten(map(_in_place, values, before, spec))
    if not isinstance(old, jax.Array) or not isinstance(new, jax.Array):
        return new
    if new.shape != old.shape or new.ndim != len(spec):
        return new  # within a loop over layers, say, a Variable has one axis less
    mesh = jax.typeof(old).sharding.mesh
    if mesh.empty or set(mesh.axis_types) != {AxisType.Auto}:
        return new  # explicit axes keep their sharding by themselves
    try:
        sharding = NamedSharding(mesh, spec)
        sharding.shard_shape(new.shape)
    except ValueError:  # by now it is on another mesh
        return new
    return constrained(new, sharding)


def in_positions(
    mapped: tp.Any, args: tp.Any, kwargs: tp.Any, wanted: int, moves: tp.Any
) -> tuple[tp.Any, tp.Any]:
    """The arguments of a call at the positions for which there are settings.

    Args:
        mapped, args, kwargs: the call.
        wanted: for how many positions there are settings.
        moves: whether arguments by keyword move to their positions, and defaults fill these.

    Raises TypeError where the function cannot be called with these arguments.
    """
    bound = mapped.bound
    if moves:
        args, kwargs = positional(bound.fun, args, kwargs, wanted, bound, True)
    if wanted and len(args) != wanted:
        every, keywords = (*bound.args, *args), {**bound.kwargs, **kwargs}
        check_arguments(mapped.name, bound.fun, every, keywords)
    return args, kwargs


def argument_settings(
    call: CallDef,
    bound: Unbound | None,
    prefix: tp.Any,
    what: str,
    constant: tp.Any = None,
    default: tp.Any = None,
    without: tp.Collection[int] = (),
    label: str = "",
) -> tuple[list[tp.Any], list[tp.Any]]:
    """The setting of each leaf, and of each root, of the arguments of a call.

    Args:
        call: the arguments.
        bound: the function, whose own arguments are constant; None if these have settings as well.
        prefix, what: the settings of positional arguments.
        constant: the setting that means the same as None.
        default: that of keyword arguments.
        without: the positions of arguments for which the prefix has no setting.
        label: the settings in messages about one leaf, if not `what`.
    """
    # In the template each leaf is its position: an argument that is an int is one leaf.
    args, kwargs = call.template()
    count = lambda tree: len(jax.tree_util.tree_leaves(tree))
    has_setting = lambda arg: not (type(arg) is int and arg in without)
    own, names = (len(bound.args), bound.kwargs) if bound else (0, ())
    settings = [constant] * count(args[:own])
    args = tuple(filter(has_setting, args[own:]))
    prefix = tuple(prefix) if isinstance(prefix, list) else prefix
    settings += [constant if s is None else s for s in broadcast(prefix, args, what)]
    for name in sorted(kwargs):
        if has_setting(kwargs[name]):
            settings += [constant if name in names else default] * count(kwargs[name])
    for position in without:
        settings.insert(position, None)
    return labels(call, settings, label or what), [settings[i] for i in call.where]


def axis_names_of(metadata: tp.Mapping[str, tp.Any]) -> tuple[tuple[str, tp.Any], ...]:
    """The names that `transform_metadata` gives to the mapped axis, as an option."""
    return tuple(metadata.items()) if PARTITION_NAME in metadata else ()


def axis_complaint(
    names: list[str],
    leaves: list[tp.Any],
    axes: tp.Sequence[tp.Any],
    size: int | None,
    size_name: str = "axis_size",
) -> str | None:
    """The problem with the sizes of mapped (or scanned) axes; None if there is none.

    Args:
        names, leaves, axes: the leaves of the arguments.
        size: the size that the user gives.
        size_name: the name of that option.
    """
    sizes: dict[int, list[str]] = {}
    verb = "scan" if size_name == "length" else "map"
    for name, leaf, axis in zip(names, leaves, axes):
        for part in jax.tree_util.tree_leaves(leaf) if isinstance(axis, int) else ():
            shape = jax.typeof(part).shape
            if not -len(shape) <= axis < len(shape):
                return (
                    f"was asked to {verb} over axis {axis} of '{name}', which implies that its rank "
                    f"should be at least {axis + 1 if axis >= 0 else -axis}, but its shape is "
                    f"{shape}. Give it another axis, or None to pass it whole."
                )
            sizes.setdefault(shape[axis], []).append(name)
    if not sizes and size is None:
        return (
            f"got no values to {verb} over and `{size_name}` not provided. Pass {size_name}, or at "
            f"least one non-None value in in_axes or {size_name}."
        )
    parts = [f"{size} at {listed(at, most=3, text=repr)}" for size, at in sizes.items()]
    if size is not None and any(other != size for other in sizes):
        return (
            f"got `{size_name}` argument of {size} which disagrees with leading axis sizes "
            f"{[*sizes]} ({', '.join(parts)}). Leave `{size_name}` out, or give arrays of that size."
        )
    if len(sizes) < 2:
        return None
    return (
        f"got inconsistent sizes for array axes to be mapped: {', '.join(parts)}. Give all the "
        "same size, or None to what is passed whole."
    )
