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

import jax
import numpy as np

from nnxlite._base.config import Modes
from nnxlite._base.integers import as_integers
from nnxlite._base.jax import is_sharding
from nnxlite.boundary._call_def import CallDef, Inner, enter
from nnxlite.boundary._inputs import Inputs, is_root
from nnxlite.boundary._labels import labels, leaves_of_code
from nnxlite.boundary._operands import parameters_of
from nnxlite.boundary._outdef import CameIn, Fixed, OutDef, Outputs
from nnxlite.boundary._outputs import leave
from nnxlite.boundary._partition import Partition
from nnxlite.boundary._prefixes import DiffState
from nnxlite.boundary._replay import replay
from nnxlite.transforms._arguments import PARTIAL, naming_arguments, refuse_shared_result
from nnxlite.transforms._cotangents import (
    Cotangents,
    all_zero,
    constant_if,
    instantiated,
    is_symbolic_zero,
    values_of,
)
from nnxlite.transforms._tangents import Tangents, abstract, zero_tangent
from nnxlite.transforms._wrapper import Options, P, R, Transform, Unequal, decorated, name_of
from nnxlite.variables._definition import MISSING

if tp.TYPE_CHECKING:
    from nnxlite.transforms._signatures import ModeKeywords

Fwd = tp.Callable[..., tuple[tp.Any, tp.Any]]
Bwd = tp.Callable[..., tp.Any]
Argnums = int | DiffState | tuple[int | DiffState, ...]


class CustomVjp(Unequal, Transform[P, R]):
    """A function with a backward rule of its own, as `custom_vjp` returns it."""

    fwd: Fwd | None = None
    bwd: Bwd | None = None
    symbolic_zeros = False
    takes_updates = False

    def __init__(self, fun: tp.Callable[..., tp.Any], options: Options) -> None:
        super().__init__(fun, options)
        self.fun = fun
        self.updates = options.modes.updates  # structure, too, and the signature of the rule
        if not self.updates and any(isinstance(n, DiffState) for n in options.nondiff_argnums):
            raise ValueError(
                "custom_vjp: `nondiff_argnums` cannot contain `DiffState` objects when `graph=False` or "
                "`graph_updates=False`, where cotangents have the form of whole arguments. Remove the "
                "DiffState, or pass graph=True and graph_updates=True."
            )
        try:
            self.signature: inspect.Signature | None = inspect.signature(self.bound.fun)
        except (ValueError, TypeError):  # a callable without signature
            self.signature = None

    def defvjp(self, fwd: Fwd, bwd: Bwd, symbolic_zeros: bool = False) -> None:
        """Give the rules; see `custom_vjp`.

        Args:
            fwd: from the arguments to `(result, residual)`.
            bwd: from nondifferentiated arguments, residual and cotangent to cotangents.
            symbolic_zeros: as in `jax.custom_vjp`: `fwd` gets `CustomVJPPrimal`s for values, `bwd`
                may get `SymbolicZero`s for cotangents.
        """
        self.fwd, self.bwd, self.symbolic_zeros = fwd, bwd, symbolic_zeros
        self.takes_updates = _takes(bwd, "updates_g") and not self.updates


def _run(
    rules: CustomVjp[..., tp.Any], args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]
) -> tp.Any:
    if rules.fwd is None:
        raise (ValueError if rules.updates else AttributeError)(
            f"No VJP defined for custom_vjp function {name_of(rules.__wrapped__)}: call its "
            "defvjp(fwd, bwd) before the function."
        )
    args = _positional(rules, args, kwargs)
    call = _Call(rules, args)
    inputs = call.enters(args)
    chosen, rest = call.selected.split(inputs.leaves)
    remedy = f"{PARTIAL[:-1]}, or name it in nondiff_argnums."
    with naming_arguments(repr(rules), call.definition, inputs, remedy):
        # JAX refuses symbolic zeros in a sharding rule, and nothing differentiates there.
        run = call.run if is_sharding() else call.with_rules()
        fixed, result, written, fresh = run(chosen, rest)
    if written and not rules.updates and not rules.takes_updates:
        written = constant_if([inputs.values[i] for i in fixed.value.written], written)
    return replay(inputs, Outputs(fixed.value, result, written, fresh))


def _positional(
    rules: CustomVjp[..., tp.Any], args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]
) -> tuple[tp.Any, ...]:
    """All arguments by position, defaults included.

    Raises TypeError where one can only be given by keyword.
    """
    args, kwargs = (*rules.bound.args, *args), {**rules.bound.kwargs, **kwargs}
    if rules.signature is None:
        return args
    bound = rules.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(
            f"custom_vjp: the arguments {sorted(bound.kwargs)} of {name_of(rules.__wrapped__)} can "
            "only be given by keyword; the rules take arguments by position."
        )
    return bound.args


class _Call:
    """One call of a function with rules, as JAX sees it: between leaves.

    JAX may keep it as long as a program, so it has none of the arguments but static ones.

    Attributes:
        rules: the function, with its rules.
        num_bound: how many arguments it carries; they come first.
        diff: numbers of the arguments that are differentiated, at least in part.
        nondiff: numbers of the arguments that the backward rule gets unchanged.
        static: those of them that JAX does not see, by number.
        definition: the static side of the others.
        selected: which leaves are differentiated.
    """

    definition: CallDef
    selected: Partition

    def __init__(self, rules: CustomVjp[..., tp.Any], args: tuple[tp.Any, ...]) -> None:
        self.rules, self.name, self.num_bound = (
            rules,
            name_of(rules.__wrapped__),
            len(rules.bound.args),
        )
        self._left: OutDef | None = None  # what left the function, for the forward rule to compare
        self.nondiff, self._states = self._argnums(len(args))
        self.diff = [n for n in range(self.num_bound, len(args)) if n not in self.nondiff]
        self.static = {n: args[n] for n in self.nondiff if not _crosses(args[n])}

    def enters(self, args: tuple[tp.Any, ...]) -> Inputs:
        """The arguments that JAX sees."""
        seen = tuple([None if n in self.static else x for n, x in enumerate(args)])
        inputs = Inputs.of_call(seen, {}, self.rules.bound.names, inside=True)
        inputs = inputs.in_mode(self.rules.options.modes.graph, "custom_vjp")
        call = self.definition = inputs.define()
        key = (CustomVjp, *self.diff, *self._states.items())
        known = call.cache.get(key)
        self.selected = known or call.remember(key, _select(call, self.diff, self._states))
        return inputs

    def _argnums(self, num_args: int) -> tuple[list[int], dict[int, DiffState]]:
        """Numbers of the nondifferentiated arguments, and filters for those in part."""
        visible = num_args - self.num_bound
        nondiff: list[int] = []
        states: dict[int, DiffState] = {}
        for entry in self.rules.options.nondiff_argnums:
            number = entry.argnum if isinstance(entry, DiffState) else entry
            if not -visible <= number < visible:
                raise ValueError(
                    f"custom_vjp: nondiff_argnums has {entry!r}, but {self.name} was called with "
                    f"{visible} arguments. Give numbers from {-visible} to {visible - 1}."
                )
            number = self.num_bound + number % visible
            if isinstance(entry, DiffState):
                states[number] = entry
            else:
                nondiff.append(number)
        return sorted(nondiff), states

    def with_rules(self) -> tp.Any:
        """The function with its rules, for JAX; two calls, of two threads say, share nothing."""
        # Plain functions: JAX asks for their signatures at each call, which is slow for methods.
        function = jax.custom_vjp(lambda chosen, rest: self.run(chosen, rest))
        # JAX's own symbolic zeros tell which leaves are differentiated outside.
        function.defvjp(
            lambda chosen, rest: self._forward(chosen, rest),
            lambda residual, cotangents: self._backward(residual, cotangents),
            symbolic_zeros=True,
        )
        return function

    def _enter(self, chosen: tp.Any, rest: tp.Any) -> tuple[list[tp.Any], Inner]:
        (args, _), inner = enter(self.definition, self.selected.join(chosen, rest))
        return [self.static.get(n, x) for n, x in enumerate(args)], inner

    def run(self, chosen: tp.Any, rest: tp.Any) -> tp.Any:
        """The function itself."""
        args, inner = self._enter(chosen, rest)
        result = self.rules.bound.fun(*args)
        refuse_shared_result(result, "custom_vjp", self.rules.options.modes.graph)
        out = self._leave(inner, result)
        self._left = out.definition
        return out.crossing()

    def _leave(self, inner: Inner, result: tp.Any, written: tp.Collection[int] = ()) -> Outputs:
        """What leaves the function; Variables that it returns are outputs, even if only read."""
        structure = self.rules.updates
        out = leave(inner, result, all_written=written, structure=structure)
        returned = _returned(inner.call, out.definition)
        if returned <= set(out.definition.written):
            return out
        return leave(inner, result, all_written={*written, *returned}, structure=structure)

    def _forward(self, chosen: tp.Any, rest: tp.Any) -> tp.Any:
        """The user's forward rule, between leaves."""
        self._refuse_lost(rest)
        chosen_values, rest_values = values_of(chosen), values_of(rest)
        seen = chosen if self.rules.symbolic_zeros else chosen_values
        args, inner = self._enter(seen, rest_values)
        pair = tp.cast(Fwd, self.rules.fwd)(*args[self.num_bound :])
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(
                f"custom_vjp: the forward rule of {self.name} must return a pair (result, "
                f"residual), got {type(pair).__name__}."
            )
        result, residual = pair
        kept = Inputs(residual, self.definition.trees)
        known = self._left
        out = self._leave(inner, result, () if known is None else known.written)
        if known is not None and known != out.definition:
            self._refuse_other(known, out.definition)
        shapes = tuple(map(abstract, self.selected.join(chosen_values, rest_values)))
        fixed = Fixed((out.definition, kept.define(), shapes))
        crossing = Fixed(out.definition), *values_of((out.result, out.written, out.fresh))
        return crossing, (fixed, kept.leaves, rest_values if self.nondiff else None)

    def _backward(self, residual: tp.Any, cotangents: tp.Any) -> tp.Any:
        """The user's backward rule, between leaves."""
        fixed, leaves, rest = residual
        rules, (definition, form, shapes) = self.rules, fixed.value
        saved, _ = enter(form, leaves)
        nondiff: list[tp.Any] = []
        if self.nondiff:
            args, _ = self._enter([None] * len(self.selected.positions[0]), rest)
            nondiff = [args[number] for number in self.nondiff]
        written = cotangents[2]
        if not rules.symbolic_zeros:
            cotangents = jax.tree_util.tree_map(instantiated, cotangents, is_leaf=is_symbolic_zero)
        given = Cotangents(
            self.definition, definition, cotangents, self.definition.whole(shapes)[1]
        )
        more = {}
        if rules.updates:
            shown: tp.Any = (given.inputs(self.diff), given.result_states())
        else:
            shown = given.result_objects()
            if rules.takes_updates:
                more = {"updates_g": given.updates(self.num_bound, self.diff)}
            else:
                self._refuse_dropped(definition, written)
        return self._checked(tp.cast(Bwd, rules.bwd)(*nondiff, saved, shown, **more), shapes), None

    def _checked(self, grads: tp.Any, shapes: tp.Sequence[tp.Any]) -> list[tp.Any]:
        """The result of the backward rule, as leaves.

        Raises TypeError where it does not match the arguments, ValueError for another shape.
        """
        rule, diff = f"custom_vjp: the backward rule of {self.name}", self.diff
        several = isinstance(grads, (tuple, list))
        if not several or len(grads) != len(diff):
            raise TypeError(
                f"{rule} must return a tuple with one cotangent for each differentiated argument, "
                f"{len(diff)} of them, got {len(grads) if several else type(grads).__name__}."
            )
        by_number = dict(zip(diff, grads))
        args = tuple(map(by_number.get, range(len(self.definition.template()[0]))))
        form = Tangents(
            f"{rule}: the cotangent",
            TypeError,
            needed="of objects and States",
            wanted=self.selected.labels,
            lenient=True,
        )
        given = form.of_leaves(self.definition, shapes, (args, {}))
        return [
            zero_tangent(shapes[i]) if given[i] is None else given[i]
            for i in self.selected.positions[0]
        ]

    # refusals ----------------------------------------------------------------------------------

    def _refuse_other(self, fun: OutDef, fwd: OutDef) -> tp.NoReturn:
        """Raise TypeError: the forward rule has other outputs than the function."""
        leaves, more = self.definition.graph_leaves(), set(fwd.written) - set(fun.written)
        names = ", ".join(f"'{leaves[leaf].text()}'" for leaf in sorted(more))
        what = f"it writes {names}" if names else "result or structure of the arguments differ"
        raise TypeError(
            f"custom_vjp: the forward rule of {self.name} must return the same result, and "
            f"leave its arguments in the same structure, as the function itself, but {what}."
        )

    def _refuse_lost(self, rest: tp.Any) -> None:
        """Raise ValueError where a leaf that has no cotangent is differentiated outside."""
        for position, x in zip(self.selected.positions[1], rest):
            if x.perturbed:
                raise ValueError(
                    f"custom_vjp: '{self.definition.leaves()[position].text()}' of {self.name} is being "
                    "differentiated, but nondiff_argnums excludes it: its gradient would be lost. Leave "
                    "it out of nondiff_argnums, or differentiate with respect to something else."
                )

    def _refuse_dropped(self, definition: OutDef, written: list[tp.Any]) -> None:
        """Raise ValueError where a rule without `updates_g` drops the cotangent of what was written.

        Only a Variable that is differentiated outside can have one: see `constant_if`.
        """
        used = [leaf for leaf, tree in zip(definition.written, written) if not all_zero(tree)]
        if used:
            name = self.definition.graph_leaves()[used[0]].text()
            raise ValueError(
                f"custom_vjp: {self.name} writes the Variable '{name}', which is being "
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
    modes, argnums = Modes.of(graph, graph_updates), as_integers(nondiff_argnums)
    return decorated(CustomVjp, fun, Options.of("custom_vjp", modes, _run, nondiff_argnums=argnums))
