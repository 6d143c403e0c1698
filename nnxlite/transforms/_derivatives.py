"""Derivatives of a call: what `grad`, `vjp`, `jvp`, the filtered forms and custom rules share.

All treat a function of objects as a function of leaves, and JAX differentiates it with respect to the
chosen ones alone.  What else leaves the call crosses beside its value, and is not differentiated.

A tangent has the form of its primal: an array for an array, an object of the same kind for an
object (or `None`, or a State where only some of the Variables matter).  Leaves are matched by path,
so static attributes do not matter; what is shared in the primal must be shared in the tangent.
"""

from __future__ import annotations

import functools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import path_text, short_type
from nnxlite._base.jax import as_integer, is_ref, new_ref
from nnxlite._state._definition import State
from nnxlite.boundary._call_def import CallDef, Partition
from nnxlite.boundary._inputs import Inputs, further_leaves
from nnxlite.boundary._labels import DiffState, labels
from nnxlite.boundary._leave import is_foreign, not_returnable
from nnxlite.boundary._out import Fixed
from nnxlite.graph._defs import StaticDef
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._kinds import Kind
from nnxlite.graph._rebuild import Code, ContainerCode, NodeCode, Path
from nnxlite.transforms._call import Call, unwrapped_value
from nnxlite.transforms._wrapper import name_of
from nnxlite.variables._definition import VariableDef
from nnxlite.variables._variable import make

Argnums: tp.TypeAlias = int | DiffState | tp.Sequence[int | DiffState]


# Which leaves are differentiated ------------------------------------------------------------------


def argument_numbers(option: str, given: tp.Any, updates: bool) -> tuple[int | DiffState, ...]:
    """The arguments that an option such as `argnums` names, one or several.

    Raises TypeError for anything else than an int and a DiffState; ValueError for a DiffState where
    derivatives have the arguments' own form.
    """
    entries = tuple(map(as_integer, given if isinstance(given, (tuple, list)) else (given,)))
    for entry in entries:
        if not isinstance(entry, (int, DiffState)):
            raise TypeError(
                f"{option} must be an int, a DiffState, or a sequence of these, got "
                f"{entry!r} of type {type(entry).__name__}."
            )
        if isinstance(entry, DiffState) and not updates:
            raise ValueError(
                f"`{option}` cannot contain `DiffState` objects when `graph=False` or "
                f"`graph_updates=False`, got {entry!r}: derivatives have the form of whole arguments "
                "there. Use graph=True and graph_updates=True, or split the argument and pass one of "
                "the states."
            )
    return entries


def numbered_arguments(
    name: str, option: str, entries: tp.Any, first: int, visible: int
) -> dict[int, DiffState | None]:
    """The arguments that an option names, by their positions behind those that the function carries.

    Args:
        name: of the transform and its function.
        option, entries: the option, and what it contains.
        first: how many arguments the function carries.
        visible: how many others there are.

    Raises ValueError where a number is out of range, or an argument is named twice; TypeError, as JAX
    does, for a number in `argnums` that is too large.
    """
    out: dict[int, DiffState | None] = {}
    for entry in entries:
        number = getattr(entry, "argnum", entry)
        if not -visible <= number < visible:
            as_jax = option == "argnums"
            of = "differentiating with respect to " if as_jax else ""
            raise (TypeError if as_jax and number >= 0 else ValueError)(
                f"{name}: {of}{option}={number} requires at least {max(number + 1, -number)} positional "
                f"arguments, but the function was called with {visible}."
            )
        number %= visible
        if first + number in out:
            raise ValueError(
                f"{option} names argument {number} twice. Give it once, with a DiffState whose filter "
                "matches all that is wanted."
            )
        out[first + number] = entry if isinstance(entry, DiffState) else None
    return out


def differentiated(
    call: CallDef,
    numbers: tp.Iterable[int],
    setting: tp.Callable[[int, int], tp.Any] = lambda number, position: True,
    seen: tp.Sequence[tp.Any] = (),
) -> Partition:
    """The leaves of a call, those first that are differentiated.

    Args:
        call: the call.
        numbers: the arguments of which something is differentiated.
        setting: for an argument, and the position of a root or leaf in it, whether it is: True, or the
            `DiffState` that chooses its Variables.
        seen: see `labels`.

    Raises ValueError where a shared Variable is differentiated by one path and not by another. Where
    an argument contains a Variable both by itself and in an object, the first path decides.
    """
    settings: list[tp.Any] = [False] * call.treedef.num_leaves
    argument: dict[int, int] = {}
    args, _ = call.template()
    for number in numbers:
        for position in jax.tree_util.tree_leaves(args[number]):
            settings[position], argument[position] = setting(number, position), number

    def first_decides(first: int, again: int) -> bool:
        together = argument.get(first, -1) == argument.get(again, -2)
        return together and (settings[first] is True or settings[again] is True)

    return Partition.chosen(labels(call, settings, "differentiation", seen, first_decides))


# Tangents -----------------------------------------------------------------------------------------


class Tangents(tp.NamedTuple):
    """What tangents have to be like.

    Attributes:
        what: the tangents, for messages.
        error: the class of errors about structure.
        dtype_error: that of errors about dtypes.
        needed: which leaves must have one: all, none, or those of each object that has some tangents,
            and of each State that has some.
        wanted: which leaves can have one; None for all.
        lenient: whether any tangent of a leaf without a derivative is ignored.
    """

    what: str
    error: type[Exception]
    dtype_error: type[Exception] = TypeError
    needed: tp.Literal["none", "of objects", "of objects and States", "all"] = "none"
    wanted: tp.Sequence[bool] | None = None
    lenient: bool = False

    def of_leaves(self, call: CallDef, leaves: tp.Sequence[tp.Any], given: tp.Any) -> list[tp.Any]:
        """The tangent of each leaf; None for a leaf that has none.

        Args:
            call, leaves: the values, or their shapes.
            given: the tangents, in the form of the values.

        Raises:
            ValueError: for a tangent of another shape.
            error: for one of another structure, or of a leaf without a derivative.
            dtype_error: for one of another dtype.
        """
        other = Inputs(given, call.trees, call.names, inside=True)
        found = dict(enumerate(other.leaves))
        if other.definition.shared is not call.shared:
            found = self._by_path(call, leaves, other)
        return [self._checked(call, i, x, found.get(i)) for i, x in enumerate(leaves)]

    def _by_path(
        self, call: CallDef, leaves: tp.Sequence[tp.Any], given: Inputs
    ) -> dict[int, tp.Any]:
        """The tangents by the number of the leaf that they belong to."""
        offered, values, places = given.definition, given.leaves, call.leaves()
        number_of = {place.path: i for i, place in (*enumerate(places), *further_leaves(call))}
        # Objects of which every leaf needs a tangent: a State may be without some.
        free = [self.needed == "of objects" and isinstance(x, State) for x in given.roots]
        at = dict(zip(offered.root_paths(), free))
        whole: set[int | None]
        whole = {root for root, path in enumerate(call.root_paths()) if at.get(path) is False}
        source: dict[int, tuple[int, Path]] = {}
        for other, place in (*enumerate(offered.leaves()), *further_leaves(offered)):
            leaf = number_of.get(place.path)
            if leaf is None:
                raise self.error(
                    f"{self.what} at '{place.text()}' is a {short_type(values[other])}, which "
                    "matches no leaf. Give it the form of the value it belongs to; a State may stand "
                    "for an object, and None for all that has none."
                )
            known, first = source.setdefault(leaf, (other, place.path))
            # A tree may have lost its sharing in `jax.tree.map`.
            if known != other and not call.trees:
                raise self.error(
                    f"{self.what}: the leaf shared by '{path_text(first)}' and '{place.text()}' has "
                    "two different ones. Share them in the same way."
                )
            if place.root is None or not free[place.root]:
                whole.add(places[leaf].root)
        for leaf, place in enumerate(places if self.needed != "none" else ()):
            needed = self.needed == "all" or (place.root is not None and place.root in whole)
            if needed and leaf not in source and self._is_wanted(leaf, leaves[leaf]):
                raise self.error(
                    f"{self.what} at '{place.text()}' is nothing, where the "
                    f"{short_type(leaves[leaf])} needs an array of its shape."
                )
        return {leaf: values[other] for leaf, (other, _) in source.items()}

    def _is_wanted(self, leaf: int, value: tp.Any) -> bool:
        return (self.wanted is None or self.wanted[leaf]) and has_derivative(value)

    def _checked(self, call: CallDef, leaf: int, value: tp.Any, tangent: tp.Any) -> tp.Any:
        """The tangent of a leaf, as an array; a Python float is one of any floating-point dtype."""
        if tangent is None or getattr(tangent, "dtype", None) == FLOAT0:
            return None
        at = lambda: f"{self.what} at '{call.leaves()[leaf].text()}' is"
        if not self._is_wanted(leaf, value):
            if self.lenient and (self.wanted is None or self.wanted[leaf]):
                return None
            raise self.error(
                f"{at()} a {short_type(tangent)}, but the {short_type(value)} there is not "
                "differentiated: it must be None."
            )
        if is_ref(value):  # its tangent is a reference, too
            content = tangent[...] if is_ref(tangent) else tangent
            return new_ref(self._checked(call, leaf, struct_of(value), content))
        is_number = isinstance(tangent, (bool, int, float, complex))
        if not (is_number or hasattr(tangent, "dtype")) or np.shape(tangent) != np.shape(value):
            raise ValueError(
                f"{at()} {short_type(tangent)}, where {short_type(value)} needs one of its shape."
            )
        dtype = _dtype(value)
        array = tangent if isinstance(tangent, jax.Array) else jnp.asarray(tangent)
        if array.dtype == dtype:
            return array
        if type(tangent) is float and jnp.issubdtype(dtype, jnp.floating):
            return array.astype(dtype)
        raise self.dtype_error(
            f"{at()} {short_type(array)}, where {short_type(value)} needs one of its own dtype. "
            f"Convert it with .astype({str(dtype)!r})."
        )


def as_states(graphdef: GraphDef[tp.Any], leaves: tp.Mapping[int, tp.Any]) -> list[tp.Any]:
    """The roots of a graph, in the form that gradients have with graph updates on.

    Each object is a State. A shared object has its leaves at its first path, and is an empty State at
    the others; a State is without the entries that have no leaf.

    Args:
        graphdef: the graph.
        leaves: values for some of its leaves, by number.
    """
    decoded = graphdef.decoded

    def variable(leaf: int) -> tp.Any:
        node, value = decoded.leaf_nodes[leaf], leaves.get(leaf)
        definition = decoded.node_defs[node] if node >= 0 else None
        return make(definition, value) if isinstance(definition, VariableDef) else value

    @functools.cache
    def nested() -> State[tp.Any, tp.Any]:  # below the numbers of the roots if there are several
        return graphdef.program(tuple(leaves)).build([*map(variable, leaves)])

    def state(path: Path) -> tp.Any:
        part = nested()
        for name in path[1:] if graphdef.num_roots == 1 else path:
            part = part._mapping.get(name) or State({})
        return part

    def of_code(code: Code, path: Path) -> tp.Any:
        if isinstance(code, StaticDef):
            return code.value
        if isinstance(code, ContainerCode):
            if code.definition.kind == Kind.STATE and len(path) == 1:
                inside = (decoded.leaf_of(part) for _, part in decoded.visit(code))
                if any(leaf >= 0 and leaf not in leaves for leaf in inside):
                    return state(path)
            below = decoded.below(code)
            return code.definition.build([of_code(c, (*path, name)) for name, c in below])
        leaf = decoded.leaf_of(code)
        if isinstance(code, NodeCode) and decoded.path(decoded.node_frames[code.number]) != path:
            return State({})
        return state(path) if leaf < 0 else variable(leaf)

    return [of_code(code, (i,)) for i, code in enumerate(decoded.roots)]


FLOAT0 = np.dtype(jax.dtypes.float0)
"""The dtype of tangents of values without a derivative."""


def _dtype(x: tp.Any) -> tp.Any:
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return x.dtype
    dtype = getattr(x, "dtype", None)
    return dtype if dtype == FLOAT0 else jax.typeof(x).dtype


_inexact = functools.lru_cache(maxsize=64)(lambda dtype: jnp.issubdtype(dtype, jnp.inexact))


def has_derivative(x: tp.Any) -> bool:
    """Whether a value has floating-point or complex numbers; TypeError unless it is an array."""
    return _inexact(_dtype(x))


def zero_tangent(x: tp.Any) -> tp.Any:
    """The zero tangent of a value."""
    return jnp.zeros_like(x) if has_derivative(x) else np.zeros(np.shape(x), FLOAT0)


def struct_of(x: tp.Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a value."""
    return _struct(np.shape(x), _dtype(x))


_struct = functools.lru_cache(maxsize=1024)(jax.ShapeDtypeStruct)


# The function of leaves ---------------------------------------------------------------------------


class Derivation:
    """A call as a function of the leaves that are differentiated, under transforms of JAX.

    Args:
        call: the call.
        selected: its leaves, the differentiated ones first.
        has_aux: whether the function returns `(value, aux)`, of which the value is differentiated.
        wanted: which leaves of the value are differentiated; None where it must be one number.

    Attributes:
        chosen, rest: the leaves that are differentiated, and the others.
    """

    def __init__(
        self,
        call: Call,
        selected: Partition,
        has_aux: bool,
        wanted: tp.Callable[[tp.Any], tp.Any] | None = lambda leaf: True,
    ) -> None:
        self.call, self.selected, self.has_aux, self.wanted = call, selected, has_aux, wanted
        self.chosen, self.rest = selected.split(call.leaves)

    def run(self, chosen: list[tp.Any]) -> tp.Any:
        """The call, for JAX, as a function of the leaves that are differentiated.

        Returns the leaves of the value that are differentiated; and beside them what else leaves the
        function, and as static data the form of the value: its static side, its leaves divided into
        those that are differentiated and the rest, and their shapes, None for those that have none.
        """
        inner, result = self.call.run(self.selected.join(chosen, self.rest))
        value, *aux = value_and_aux(result, self.call.fun) if self.has_aux else (result,)
        if self.wanted is None:
            leaves, form, value = unwrapped_value(value), None, None
            parts = () if isinstance(leaves, jax.Array) else jax.tree_util.tree_leaves(leaves)
            if any(map(is_foreign, parts)):
                raise TypeError(
                    f"{self.call.name}: gradient only defined for scalar-output functions, and this one "
                    f"returned a value of type '{type(leaves).__name__}'. Return a scalar, or with "
                    "has_aux=True a pair of a scalar and anything else."
                )
        else:
            shown = Inputs(value, self.call.definition.trees, inside=True)
            partition = Partition.chosen(map(self.wanted, shown.leaves))
            every = list(shown.leaves)
            for i, (x, flag) in enumerate(zip(shown.leaves, partition.labels)):
                if flag and not isinstance(x, jax.Array):
                    if is_foreign(x):
                        path = shown.definition.leaves()[i].path
                        raise not_returnable(self.call.name, path, x)
                    every[i] = jnp.asarray(x)
            shapes = [struct_of(x) if hasattr(x, "dtype") else None for x in every]
            leaves, form = partition.split(every)[0], (shown.definition, partition, shapes)
        return leaves, (Fixed(form), self.call.leave(inner, (value, *aux) if aux else value))

    def finish(self, crossing: tp.Any) -> list[tp.Any]:
        """Write back what left the function; the caller's value, and the aux if there is one."""
        left = self.call.put_back(crossing)
        return [*left] if self.has_aux else [left]

    def gradients(self, shown: tp.Callable[[list[tp.Any]], tp.Any], remedy: str) -> tp.Any:
        """The result of `grad` or `value_and_grad`, as the name of the transform says.

        Args:
            shown: from the gradients of leaves to what the user gets.
            remedy: what to do about a leaf without a derivative.

        Raises TypeError for such a leaf.
        """
        options = self.call.options
        jax_options = dict(options.jax_options)
        if not (jax_options.get("allow_int") or jax_options.get("holomorphic")):
            self._refuse_others(remedy)
        differentiated = jax.value_and_grad(self.run, has_aux=True, **jax_options)
        (value, (_, crossing)), grads = differentiated(self.chosen)
        _, *aux = self.finish(crossing)
        grads = shown(grads)
        if options.name.endswith("value_and_grad"):
            return ((value, *aux) if aux else value), grads
        return (grads, *aux) if aux else grads

    def _refuse_others(self, remedy: str) -> None:
        """Raise TypeError naming the first chosen leaf that has no derivative."""
        for leaf, value in zip(self.selected.positions[0], self.chosen):
            for part in jax.tree_util.tree_leaves(value):
                if not _inexact(getattr(part, "dtype", type(part))):
                    dtype = getattr(part, "dtype", f"a value of type {type(part).__name__}")
                    raise TypeError(
                        f"{self.call.options.name} requires real- or complex-valued inputs (input "
                        "dtype that is a sub-dtype of np.inexact), but argument "
                        f"'{self.call.leaf_text(leaf)}' is {dtype}. Differentiate only float leaves: "
                        f"{remedy}."
                    )

    def pulled_back(
        self, form: Tangents, rest: tp.Sequence[tp.Any] = (), **options: tp.Any
    ) -> tp.Any:
        """The result of `vjp`: the value, its pullback, and the aux if there is one.

        Args:
            form: what a cotangent has to be like.
            rest: the cotangents of the leaves that are not differentiated.
            options: of JAX.
        """
        _, vjp, (fixed, crossing) = jax.vjp(self.run, self.chosen, has_aux=True, **options)
        value, *aux = self.finish(crossing)
        # The pullback lives longer than the call, so it refers to parts of it only.
        definition, num_bound, selected = self.call.definition, self.call.num_bound, self.selected
        of_value, partition, shapes = fixed.value
        form = form._replace(wanted=partition.labels)

        def pull(vjp: tp.Callable[..., tp.Any], cotangent: tp.Any) -> tuple[tp.Any, ...]:
            given = form.of_leaves(of_value, shapes, cotangent)
            pairs = zip(partition.split(shapes)[0], partition.split(given)[0])
            (grads,) = vjp([zero_tangent(x) if t is None else t for x, t in pairs])
            return definition.build(selected.join(grads, rest))[0][num_bound:]

        return value, jax.tree_util.Partial(pull, vjp), *aux

    def pushed_forward(self, tangents: tp.Sequence[tp.Any]) -> tp.Any:
        """The result of `jvp` along the tangents of all leaves: value, tangent, and the aux."""
        chosen = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in self.chosen]
        along, _ = self.selected.split(tangents)
        _, moved, (fixed, crossing) = jax.jvp(self.run, (chosen,), (along,), has_aux=True)
        (definition, partition, _), (value, *aux) = fixed.value, self.finish(crossing)
        return value, definition.build(partition.join(moved)), *aux


def of_arguments(form: Tangents, call: Call, tangents: tp.Sequence[tp.Any]) -> list[tp.Any]:
    """The tangent of each leaf of a call, from those of the arguments that are given by position."""
    primals = len(call.definition.template()[0]) - call.num_bound
    if primals != len(tangents):
        raise form.error(
            f"{form.what}: {primals} primals and {len(tangents)} tangents; give one tangent, possibly "
            "None, for each primal."
        )
    tree = (*[None] * call.num_bound, *tangents), {}
    return form.of_leaves(call.definition, call.leaves, tree)


def value_and_aux(result: tp.Any, fun: tp.Any) -> tuple[tp.Any, tp.Any]:
    """The result of a function with `has_aux=True`; TypeError or ValueError unless it is a pair."""
    several = isinstance(result, (tuple, list))
    if not several or len(result) != 2:
        raise (ValueError if several else TypeError)(  # as unpacking does
            f"With has_aux=True {name_of(fun)} must return a pair (value, aux), got "
            f"{type(result).__name__}{f' of {len(result)}' if several else ''}."
        )
    return result[0], result[1]
