"""`custom_vjp`: functions of objects with a backward rule of their own.

To JAX it is a function of leaves: those that are differentiated, and the rest.  Its outputs are the
leaves of the result and the values it wrote.  The user's rules see objects again:

    fwd(*args) -> (result, residual)          args and residual may contain objects
    bwd(*nondiff, residual, cotangent)        -> one cotangent for each differentiated argument

The form of the cotangent depends on `graph_updates`.  With updates the arguments, as the function left
them, are outputs, too: `cotangent` is `(inputs, result)`, with a State in place of each object (and None
in place of each array of the inputs), and so are the cotangents that `bwd` returns.  Without updates
`cotangent` has the form of the result, and cotangents of objects are objects of the same form; a rule
with a parameter `updates_g` also gets the cotangents of the written Variables.
"""

from __future__ import annotations

import inspect
import typing as tp
import weakref

import jax
import numpy as np

from nnxlite._config import Modes
from nnxlite._integers import as_integers
from nnxlite._jax import is_sharding
from nnxlite.boundary import (
    CallDef,
    CameIn,
    DiffState,
    Fixed,
    Inner,
    Inputs,
    OutDef,
    Outputs,
    Partition,
    enter,
    is_root,
    labels,
    leave,
    leaves_of_code,
    parameters_of,
    replay,
)
from nnxlite.transforms._arguments import (
    blank_statics,
    fill_statics,
    naming_arguments,
    refuse_shared_result,
)
from nnxlite.transforms._cotangents import (
    Cotangents,
    Shapes,
    all_zero,
    constant_if,
    instantiated,
    is_perturbed,
    is_symbolic_zero,
    values_of,
)
from nnxlite.transforms._tangents import (
    TangentForm,
    by_leaf,
    tangent_leaves,
)
from nnxlite.transforms._wrapper import P, R, Transformed, Unequal, decorated, have_own, name_of
from nnxlite.variables import MISSING

if tp.TYPE_CHECKING:
    from nnxlite.transforms._signatures import ModeKeywords

Fwd = tp.Callable[..., tuple[tp.Any, tp.Any]]
Bwd = tp.Callable[..., tp.Any]
Argnums = int | DiffState | tuple[int | DiffState, ...]


class ArgumentSplit(tp.NamedTuple):
    """Which arguments of a call are differentiated, and which are not.

    Attributes:
        diff: numbers of the arguments that are differentiated, at least in part.
        nondiff: numbers of the arguments that the backward rule gets unchanged.
        selected: which leaves are differentiated.
    """

    diff: list[int]
    nondiff: list[int]
    selected: Partition


class VjpOptions(tp.NamedTuple):
    """The options of `custom_vjp`, in one object."""

    name: str
    nondiff_argnums: tuple[int | DiffState, ...]
    modes: Modes


class CustomVjp(Unequal, Transformed[P, R]):
    """A function with a backward rule of its own, as `custom_vjp` returns it."""

    options: VjpOptions

    def __init__(self, fun: tp.Callable[..., tp.Any], options: VjpOptions) -> None:
        super().__init__(fun, options)
        self.fun = fun
        self.fwd: Fwd | None = None
        self.bwd: Bwd | None = None
        self.symbolic_zeros = False
        self.takes_updates = False
        self._updates = options.modes.updates  # structure, too, and the signature of the rule
        if not self._updates and any(isinstance(n, DiffState) for n in options.nondiff_argnums):
            raise ValueError(
                "custom_vjp: `nondiff_argnums` cannot contain `DiffState` objects when `graph=False` or "
                "`graph_updates=False`, where cotangents have the form of whole arguments. Remove the "
                "DiffState, or pass graph=True and graph_updates=True."
            )
        try:
            self._signature: inspect.Signature | None = inspect.signature(self.bound.fun)
        except (ValueError, TypeError):  # a callable without signature
            self._signature = None
        self._splits: weakref.WeakKeyDictionary[CallDef, ArgumentSplit] = (
            weakref.WeakKeyDictionary()
        )

    def defvjp(self, fwd: Fwd, bwd: Bwd, symbolic_zeros: bool = False) -> None:
        """Give the rules; see `custom_vjp`.

        Args:
            fwd: from the arguments to `(result, residual)`.
            bwd: from nondifferentiated arguments, residual and cotangent to cotangents.
            symbolic_zeros: as in `jax.custom_vjp`: `fwd` gets `CustomVJPPrimal`s for values, `bwd`
                may get `SymbolicZero`s for cotangents.
        """
        self.fwd, self.bwd, self.symbolic_zeros = fwd, bwd, symbolic_zeros
        self.takes_updates = _takes(bwd, "updates_g") and not self._updates

    def _with_rules(self) -> tp.Any:
        """JAX's function for one call; two calls, of two threads say, share nothing."""
        left: list[OutDef] = []  # what left the function, for the forward rule to compare
        # Plain functions: JAX asks for their signatures at each call, which is slow for methods.
        function = jax.custom_vjp(
            lambda call, chosen, rest: self._run(call.value, chosen, rest, left)
        )
        # JAX's own symbolic zeros tell which leaves are differentiated outside.
        function.defvjp(
            lambda call, chosen, rest: self._forward(call.value, chosen, rest, left),
            lambda residual, cotangents: self._backward(residual, cotangents),
            symbolic_zeros=True,
        )
        return function

    # the call, outside -------------------------------------------------------------------------

    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> R:
        if self.fwd is None:
            raise (ValueError if self._updates else AttributeError)(
                f"No VJP defined for custom_vjp function {name_of(self.fun)}: call its "
                "defvjp(fwd, bwd) before the function."
            )
        args = self._positional(args, kwargs)
        diff, nondiff, states = self._argnums(len(args))
        static = [number for number in nondiff if not _crosses(args[number])]
        args, statics = blank_statics(args, static, 0, repr(self))
        inputs = Inputs.of_call(args, {}, self.bound.names).in_mode(
            self.options.modes.graph, "custom_vjp"
        )
        call = inputs.define(statics, have_own(statics))
        if call.shared not in self._splits:
            selected = _select(call, diff, states)
            self._splits[call.shared] = ArgumentSplit(diff, nondiff, selected)
        chosen, rest = self._splits[call.shared].selected.split(inputs.leaves)
        with naming_arguments(repr(self), call, inputs, ", or name it in nondiff_argnums"):
            if is_sharding():  # nothing differentiates here, and JAX refuses symbolic zeros
                fixed, result, written, fresh = self._run(call, chosen, rest, [])
            else:
                fixed, result, written, fresh = self._with_rules()(Fixed(call), chosen, rest)
        if written and not self._updates and not self.takes_updates:
            written = constant_if([inputs.values[i] for i in fixed.value.written], written)
        return replay(inputs, Outputs(fixed.value, result, written, fresh))

    def _positional(
        self, args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]
    ) -> tuple[tp.Any, ...]:
        """All arguments by position, defaults included.

        Raises TypeError where one can only be given by keyword.
        """
        args, kwargs = (*self.bound.args, *args), {**self.bound.kwargs, **kwargs}
        if self._signature is None:
            return args
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.kwargs:
            raise TypeError(
                f"custom_vjp: the arguments {sorted(bound.kwargs)} of {name_of(self.fun)} can only "
                "be given by keyword; the rules take arguments by position."
            )
        return bound.args

    def _argnums(self, num_args: int) -> tuple[list[int], list[int], dict[int, DiffState]]:
        """Numbers of differentiated and nondifferentiated arguments, and the filters of the former."""
        first = len(self.bound.args)
        visible = num_args - first
        nondiff: list[int] = []
        states: dict[int, DiffState] = {}
        for entry in self.options.nondiff_argnums:
            number = entry.argnum if isinstance(entry, DiffState) else entry
            if not -visible <= number < visible:
                raise ValueError(
                    f"custom_vjp: nondiff_argnums has {entry!r}, but {name_of(self.fun)} was called "
                    f"with {visible} arguments. Give numbers from {-visible} to {visible - 1}."
                )
            number = first + (number if number >= 0 else number + visible)
            if isinstance(entry, DiffState):
                states[number] = entry
            else:
                nondiff.append(number)
        diff = [n for n in range(first, num_args) if n not in nondiff]
        return diff, sorted(nondiff), states

    # what JAX sees -----------------------------------------------------------------------------

    def _arguments(self, call: CallDef, chosen: tp.Any, rest: tp.Any) -> tuple[list[tp.Any], Inner]:
        leaves = self._splits[call.shared].selected.join(chosen, rest)
        (args, _), inner = enter(call, leaves)
        return fill_statics(args, call.extra), inner

    def _run(self, call: CallDef, chosen: tp.Any, rest: tp.Any, left: list[OutDef]) -> tp.Any:
        """The function itself."""
        args, inner = self._arguments(call, chosen, rest)
        result = self.bound.fun(*args)
        refuse_shared_result(result, "custom_vjp", self.options.modes.graph)
        out = self._leave(inner, result)
        left[:] = [out.definition]
        return out.crossing()

    def _leave(self, inner: Inner, result: tp.Any, written: tp.Collection[int] = ()) -> Outputs:
        """What leaves the function; Variables that it returns are outputs, even if only read."""
        out = leave(inner, result, all_written=written, structure=self._updates)
        returned = _returned(inner.call, out.definition)
        if returned <= set(out.definition.written):
            return out
        return leave(inner, result, all_written={*written, *returned}, structure=self._updates)

    def _forward(self, call: CallDef, chosen: tp.Any, rest: tp.Any, left: list[OutDef]) -> tp.Any:
        """The user's forward rule, between leaves."""
        self._refuse_lost(call, rest)
        chosen_values, rest_values = values_of(chosen), values_of(rest)
        args, inner = self._arguments(
            call, chosen if self.symbolic_zeros else chosen_values, rest_values
        )
        pair = tp.cast(Fwd, self.fwd)(*args[len(self.bound.args) :])
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(
                f"custom_vjp: the forward rule of {name_of(self.fun)} must return a pair (result, "
                f"residual), got {type(pair).__name__}."
            )
        result, residual = pair
        kept = Inputs(residual, call.trees)
        known = left[0] if left else None
        written = known.written if known is not None else ()
        out = self._leave(inner, result, written)
        if known is not None and known != out.definition:
            self._refuse_other(call, known, out.definition)
        shapes = Shapes.of((chosen_values, rest_values))
        fixed = Fixed((call, out.definition, kept.define(), shapes))
        saved_rest = rest_values if self._splits[call.shared].nondiff else None
        crossing = Fixed(out.definition), *values_of((out.result, out.written, out.fresh))
        return crossing, (fixed, kept.leaves, saved_rest)

    def _backward(self, residual: tp.Any, cotangents: tp.Any) -> tp.Any:
        """The user's backward rule, between leaves."""
        fixed, leaves, rest = residual
        call, definition, form, shapes = fixed.value
        chosen_shapes, rest_shapes = shapes.tree()
        diff, numbers, selected = self._splits[call.shared]
        saved, _ = enter(form, leaves)
        nondiff: list[tp.Any] = []
        if numbers:
            blank = jax.tree_util.tree_map(lambda _: None, chosen_shapes)
            args, _ = self._arguments(call, blank, rest)
            nondiff = [args[number] for number in numbers]
        written = cotangents[2]
        if not self.symbolic_zeros:
            cotangents = jax.tree_util.tree_map(instantiated, cotangents, is_leaf=is_symbolic_zero)
        all_shapes = selected.join(chosen_shapes, rest_shapes)
        given = Cotangents(call, definition, cotangents, call.by_side(all_shapes)[1])
        if self._updates:
            shown: tp.Any = (given.inputs(diff), given.result_states())
        else:
            shown = given.result_objects()
            self._refuse_dropped(call, definition, written)
        more = (
            {"updates_g": given.updates(len(self.bound.args), diff)} if self.takes_updates else {}
        )
        grads = tp.cast(Bwd, self.bwd)(*nondiff, saved, shown, **more)
        return Fixed(call), self._checked(call, grads, all_shapes), None

    def _checked(self, call: CallDef, grads: tp.Any, shapes: list[tp.Any]) -> list[tp.Any]:
        """The result of the backward rule, as leaves.

        Raises TypeError where it does not match the arguments, ValueError for another shape.
        """
        diff, _, selected = self._splits[call.shared]
        rule = f"custom_vjp: the backward rule of {name_of(self.fun)}"
        several = isinstance(grads, (tuple, list))
        if not several or len(grads) != len(diff):
            raise TypeError(
                f"{rule} must return a tuple with one cotangent for each differentiated argument, "
                f"{len(diff)} of them, got {len(grads) if several else type(grads).__name__}."
            )
        tree = call.template()[0]
        pairs = [(tree[n], g) for n, g in zip(diff, grads) if g is not None]
        form = TangentForm(
            call,
            tuple(template for template, _ in pairs),
            shapes,
            what="cotangent",
            error=lambda text: TypeError(f"{rule} does not fit the arguments. {text}"),
            partial=False,
            wanted=selected.labels,
            lenient=True,
        )
        given = by_leaf(form, tuple(g for _, g in pairs))
        return tangent_leaves(form, given, selected.positions[0])

    # refusals ----------------------------------------------------------------------------------

    def _refuse_other(self, call: CallDef, fun: OutDef, fwd: OutDef) -> tp.NoReturn:
        """Raise TypeError: the forward rule has other outputs than the function."""
        leaves, more = call.graph_leaves(), set(fwd.written) - set(fun.written)
        names = ", ".join(f"'{leaves[leaf].text()}'" for leaf in sorted(more))
        what = f"it writes {names}" if names else "result or structure of the arguments differ"
        raise TypeError(
            f"custom_vjp: the forward rule of {name_of(self.fun)} must return the same result, and "
            f"leave its arguments in the same structure, as the function itself, but {what}."
        )

    def _refuse_lost(self, call: CallDef, rest: tp.Any) -> None:
        """Raise ValueError where a leaf that has no cotangent is differentiated outside."""
        positions = self._splits[call.shared].selected.positions[1]
        for position in [i for i, x in zip(positions, rest) if is_perturbed(x)]:
            where = call.leaves()[position].text()
            raise ValueError(
                f"custom_vjp: '{where}' of {name_of(self.fun)} is being "
                "differentiated, but nondiff_argnums excludes it: its gradient would be lost. Leave "
                "it out of nondiff_argnums, or differentiate with respect to something else."
            )

    def _refuse_dropped(self, call: CallDef, definition: OutDef, written: list[tp.Any]) -> None:
        """Raise ValueError where a rule without `updates_g` drops the cotangent of what was written.

        Only a Variable that is differentiated outside can have one: see `constant_if`.
        """
        if self.takes_updates:
            return
        used = [leaf for leaf, tree in zip(definition.written, written) if not all_zero(tree)]
        if used:
            name = call.graph_leaves()[used[0]].text()
            raise ValueError(
                f"custom_vjp: {name_of(self.fun)} writes the Variable '{name}', which is being "
                "differentiated, and the new value is used: its cotangent would be lost. With "
                "graph_updates=False the backward rule gets the cotangents of what was written as "
                "its argument 'updates_g', if it has one. Add it, return the new value instead, or "
                "pass graph=True and graph_updates=True."
            )


def _select(call: CallDef, diff: list[int], states: dict[int, DiffState]) -> Partition:
    """Which leaves are differentiated."""
    tree = call.template()[0]
    settings: list[tp.Any] = [False] * call.treedef.num_leaves
    for number in diff:
        for position in jax.tree_util.tree_leaves(tree[number]):
            settings[position] = states.get(number, True)
    return Partition(tuple(map(bool, labels(call, settings, "differentiation"))))


def _returned(call: CallDef, definition: OutDef) -> set[int]:
    """The Variables of the arguments that are in the result: outputs, even if only read."""
    graph, decoded = definition.graph, call.graphdef.decoded
    if graph is None:
        leaves = {leaf for node in definition.nodes for leaf, _ in leaves_of_code(decoded, node)}
    else:
        codes = graph.graphdef.decoded.roots[graph.first_result :][: len(definition.where)]
        below = [leaves_of_code(graph.graphdef.decoded, code) for code in codes]
        sources = {graph.sources[leaf] for leaves in below for leaf, _ in leaves}
        leaves = {source.leaf for source in sources if isinstance(source, CameIn)}
    return {leaf for leaf in leaves if decoded.leaf_nodes[leaf] >= 0}


def _crosses(value: tp.Any) -> bool:
    """Whether an argument contains an object or an array, and so is passed to JAX."""
    leaves = jax.tree_util.tree_leaves(value, is_leaf=is_root)
    return any(is_root(x) or isinstance(x, (jax.Array, np.ndarray)) for x in leaves)


def _takes(fun: tp.Callable[..., tp.Any], name: str) -> bool:
    """Whether a function has a parameter of this name, or takes any keyword."""
    return any(
        p.kind is p.VAR_KEYWORD
        or (p.name == name and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        for p in parameters_of(fun) or ()
    )


@tp.overload
def custom_vjp(
    fun: tp.Callable[P, R],
    *,
    nondiff_argnums: Argnums = (),
    **modes: tp.Unpack[ModeKeywords],
) -> CustomVjp[P, R]: ...
@tp.overload
def custom_vjp(
    *,
    nondiff_argnums: Argnums = (),
    **modes: tp.Unpack[ModeKeywords],
) -> tp.Callable[[tp.Callable[P, R]], CustomVjp[P, R]]: ...
def custom_vjp(
    fun: tp.Any = MISSING,
    *,
    nondiff_argnums: Argnums = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """A function whose derivative is given by hand, with `defvjp(fwd, bwd)`.

    `fwd(*args)` returns `(result, residual)`; `bwd(*nondiff, residual, cotangent)` returns one
    cotangent for each differentiated argument, None for zero. Arguments, result and residual may
    contain objects; what the function (or `fwd`) writes is kept.

    With `graph_updates` on, `cotangent` is `(inputs, result)`: the cotangents of the differentiated
    arguments as the function left them, and of its result. A State stands in place of each
    object, None in place of each array of the inputs; `bwd` returns States for objects. With
    `graph_updates=False`, `cotangent` has the form of the result, and `bwd` returns objects
    of the arguments' form. If `bwd` has a parameter `updates_g`, it gets the cotangents of what was
    written by this keyword: the arguments, with None in place of everything that was not written.

    Args:
        fun: the function; without it the result is a decorator.
        nondiff_argnums: numbers of arguments that are not differentiated, passed to `bwd` unchanged;
            `DiffState(number, filter)` names the Variables of an argument that are.
        graph: False refuses shared references, and implies the signature without updates.
        graph_updates: which signature `bwd` has, and whether structure changes propagate.

    Returns:
        A function of the same arguments; its derivative is given with `defvjp(fwd, bwd)`.

    Raises:
        ValueError: for a call before `defvjp`; for a leaf that is differentiated outside although
            `nondiff_argnums` excludes it; for a cotangent of a written Variable that would be dropped,
            because `bwd` has no `updates_g`.
        TypeError: for a backward rule whose cotangents do not match the arguments.

    >>> import nnxlite as nnx, jax
    >>> @nnx.custom_vjp
    ... def twice(m):
    ...     return 2 * m.x
    >>> def fwd(m):
    ...     return twice(m), None
    >>> def bwd(residual, cotangent):
    ...     (d_m,), d_y = cotangent
    ...     d_m["x"].value = d_m["x"].value + 20.0 * d_y  # not 2: to show where it comes from
    ...     return (d_m,)
    >>> twice.defvjp(fwd, bwd)
    >>> float(nnx.grad(twice)(nnx.Dict(x=nnx.Param(1.0)))["x"].value)
    20.0
    """
    if isinstance(nondiff_argnums, DiffState):
        nondiff_argnums = (nondiff_argnums,)
    modes = Modes.of(graph, graph_updates)
    return decorated(CustomVjp, fun, VjpOptions("custom_vjp", as_integers(nondiff_argnums), modes))
