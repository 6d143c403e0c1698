"""`custom_vjp`: functions of objects with a backward rule of their own.

To JAX it is a function of leaves.  Its outputs are the leaves of the result and the values it wrote.
The user's rules see objects again:

    fwd(*args) -> (result, residual)          args and residual may contain objects
    bwd(*nondiff, residual, cotangent)        -> one cotangent for each differentiated argument

The form of the cotangent depends on `graph_updates`.  With updates the arguments, as the function left
them, are outputs, too: `cotangent` is `(inputs, result)`, with a State in place of each object (and None
in place of each array of the inputs), and so are the cotangents that `bwd` returns.  Without updates
`cotangent` has the form of the result, and cotangents of objects are objects of the same form; a rule
with a parameter `updates_g` also gets the cotangents of the written Variables.
"""

from __future__ import annotations

import functools
import typing as tp

import jax
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from nnxlite._base.errors import Modes
from nnxlite._base.jax import is_sharding
from nnxlite.boundary._call_def import Inner, parameters_of, put, replaced
from nnxlite.boundary._inputs import Inputs, is_root, leaves_of_code
from nnxlite.boundary._out import Fixed, OutDef, Outputs, pick, replay
from nnxlite.graph._rebuild import build_nodes, resolve
from nnxlite.transforms._call import PARTIAL, Call, check_arguments, positional
from nnxlite.transforms._derivatives import (
    Argnums,
    Tangents,
    argument_numbers,
    as_states,
    differentiated,
    numbered_arguments,
    struct_of,
    zero_tangent,
)
from nnxlite.transforms._wrapper import (
    ModeKeywords,
    Options,
    P,
    R,
    Transform,
    Unbound,
    Unequal,
    decorated,
    name_of,
)
from nnxlite.variables._definition import MISSING
from nnxlite.variables._variable import is_variable

__all__ = ["custom_vjp"]

Fwd = tp.Callable[..., tuple[tp.Any, tp.Any]]
Bwd = tp.Callable[..., tp.Any]


class CustomVjp(Unequal, Transform[P, R]):
    """A function with a backward rule of its own, as `custom_vjp` returns it.

    Attributes:
        fwd, bwd, symbolic_zeros: see `defvjp`.
        takes_updates: whether `bwd` has a parameter `updates_g`, or takes any keyword.
    """

    fwd: Fwd | None = None
    bwd: Bwd | None = None
    symbolic_zeros = False
    takes_updates = False

    @property
    def fun(self) -> tp.Callable[P, R]:
        """The function."""
        return self.__wrapped__

    def defvjp(self, fwd: Fwd, bwd: Bwd, symbolic_zeros: bool = False) -> None:
        """Give the rules; see `custom_vjp`.

        Args:
            fwd: from the arguments to `(result, residual)`.
            bwd: from nondifferentiated arguments, residual and cotangent to cotangents.
            symbolic_zeros: as in `jax.custom_vjp`: `fwd` gets `CustomVJPPrimal`s for values, `bwd`
                may get `SymbolicZero`s for cotangents.
        """
        self.fwd, self.bwd, self.symbolic_zeros = fwd, bwd, symbolic_zeros
        parameters = parameters_of(bwd) or ()
        takes = lambda p: p.kind is p.VAR_KEYWORD or p.name == "updates_g"
        self.takes_updates = any(map(takes, parameters))


def _run(
    rules: CustomVjp[..., tp.Any], args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]
) -> tp.Any:
    updates = rules.options.modes.updates
    if rules.fwd is None:
        raise (ValueError if updates else AttributeError)(
            f"No VJP defined for custom_vjp function {name_of(rules.fun)}: call its "
            "defvjp(fwd, bwd) before the function."
        )
    call = _Call(rules, args, kwargs)
    inputs, leaves = call.inputs, call.leaves
    with call.naming_arguments(f"{PARTIAL[:-1]}, or name it in nondiff_argnums."):
        call.shapes = [*map(struct_of, leaves)]
        del call.inputs, call.leaves
        # JAX refuses symbolic zeros in a sharding rule, and nothing differentiates there.
        out: Outputs = (call.run_out if is_sharding() else call.with_rules())(leaves)
    at = out.definition.written
    if at and not updates and not rules.takes_updates:
        written = constant_if([inputs.values[i] for i in at], [*out.written])
        out = out.with_written(dict(zip(at, written)))
    return replay(inputs, out)


class _Call(Call):
    """One call of a function with rules, as JAX sees it: between leaves.

    The arguments are those of the call, defaults included, after those that the function carries. JAX
    may keep the call as long as a program, so it loses its arguments, except for static ones, before
    the function runs.

    Attributes:
        rules: the function, with its rules.
        shown: its name.
        diff: numbers of the arguments that are differentiated, at least in part.
        nondiff: numbers of the arguments that the backward rule gets unchanged.
        selected: for each leaf whether it is differentiated.
        shapes: of the leaves.
        known: what left the function, for the forward rule to compare.
    """

    rules: tp.Any
    shapes: list[tp.Any]
    known: OutDef | None = None

    def __init__(
        self, rules: CustomVjp[..., tp.Any], args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]
    ) -> None:
        """Raises TypeError where the function, or the rules, cannot be called with these arguments."""
        options, bound, name = rules.options, rules.bound, name_of(rules.fun)
        check_arguments("custom_vjp", rules.fun, args, kwargs)
        args, kwargs = (*bound.args, *args), {**bound.kwargs, **kwargs}
        args, rest = positional(bound.fun, args, kwargs, len(bound.names), defaults=True)
        if rest:
            raise TypeError(
                f"custom_vjp: the arguments {sorted(rest)} of {name} can only be given by keyword; the "
                "rules take arguments by position."
            )
        title, entries, first = f"custom_vjp({name})", options.nondiff_argnums, len(bound.args)
        states = numbered_arguments(title, "nondiff_argnums", entries, first, len(args) - first)
        self.rules, self.shown = rules, name
        self.nondiff = sorted(number for number, state in states.items() if state is None)
        self.diff = [n for n in range(first, len(args)) if n not in self.nondiff]
        statics = tuple([n for n in self.nondiff if not _crosses(args[n])])
        whole = Unbound(bound.fun, (), {})
        super().__init__(options, whole, args, {}, static_argnums=statics, inside=True)
        self.num_bound = first
        setting = lambda number, position: states.get(number) or True
        self.selected = differentiated(self.definition, self.diff, setting).labels

    def with_rules(self) -> tp.Any:
        """The function with its rules, for JAX; two calls, of two threads say, share nothing."""
        # Plain functions: JAX asks for their signatures at each call, which is slow for methods.
        function = jax.custom_vjp(lambda leaves: self.run_out(leaves))
        forward, backward = lambda x: self._forward(x), lambda *x: self._backward(*x)
        function.defvjp(forward, backward, symbolic_zeros=True)  # they tell what is differentiated
        return function

    def run_out(self, leaves: tp.Sequence[tp.Any]) -> Outputs:
        """The function itself."""
        out = super().run_out(leaves)
        self.known = out.definition
        return out

    def leave(
        self, inner: Inner, result: tp.Any, written: tp.Collection[int] = (), **more: tp.Any
    ) -> Outputs:
        """What leaves the function; Variables that it returns are outputs, even if only read."""
        out = super().leave(inner, result, all_written=written, **more)
        left, leaf_nodes = out.definition, self.definition.graphdef.decoded.leaf_nodes
        parts = [leaves_of_code(left.graphdef.decoded, code) for code in left.roots]
        returned = {left.sources[leaf] for leaves in parts for leaf, _ in leaves}
        read = {i: inner.values[i] for i in returned if i >= 0 and leaf_nodes[i] >= 0}
        return out.with_written(read | dict(zip(left.written, out.written))) if read else out

    def _forward(self, leaves: list[tp.Any]) -> tp.Any:
        """The user's forward rule, between leaves."""
        self._refuse_lost(leaves)
        rules, values, known = self.rules, values_of(leaves), self.known
        rest = [None if flag else x for x, flag in zip(values, self.selected)]
        if rules.symbolic_zeros:
            values = [x if flag else y for x, y, flag in zip(leaves, rest, self.selected)]
        (args, _), inner = self.enter(values)
        pair = rules.fwd(*args[self.num_bound :])
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(
                f"custom_vjp: the forward rule of {self.shown} must return a pair (result, "
                f"residual), got {type(pair).__name__}."
            )
        saved = Inputs(pair[1], self.definition.trees)
        out = self.leave(inner, pair[0], () if known is None else known.written)
        if known is not None and known != out.definition:
            self._refuse_other(known, out.definition)
        return values_of(out), (Fixed(saved.define()), saved.leaves, rest if self.nondiff else None)

    def _backward(self, residual: tp.Any, cotangents: Outputs) -> tp.Any:
        """The user's backward rule, between leaves."""
        (fixed, leaves, rest), rules, call = residual, self.rules, self.definition
        saved, nondiff, more = fixed.value.build(leaves), list[tp.Any](), dict[str, tp.Any]()
        if self.nondiff:
            args, _ = call.build(rest)
            nondiff = [args[number] for number in self.nondiff]
        left, symbolic = cotangents.definition, cotangents.written
        if not rules.symbolic_zeros:
            cotangents = jax.tree_util.tree_map(instantiated, cotangents, is_leaf=is_symbolic_zero)
        # The cotangents of the arguments' leaves, and of the leaves that left.
        updates = self.options.modes.updates
        _, values = call.whole([zero_tangent(x) if updates else None for x in self.shapes])
        put(values, left.written, cotangents.written)
        arrays, _, new = left.split(cotangents.values)
        leaves = [pick(source, values, new) for source in left.sources]
        if updates:
            roots = as_states(left.graphdef, dict(enumerate(leaves)))
            args, _ = call.tree([None] * call.num_arrays, roots)
            result = left.tree(arrays, roots[left.first_result :])
            result = tuple([args[number] for number in self.diff]), result
        else:
            nodes = build_nodes(left.graphdef.decoded, leaves)
            result = left.tree(arrays, [resolve(code, nodes, leaves) for code in left.roots])
            if rules.takes_updates:
                more = {"updates_g": self._written(left.written, values)}
            else:
                self._refuse_dropped(left, symbolic)
        return (self._checked(rules.bwd(*nondiff, saved, result, **more)),)

    def _written(self, at: tp.Sequence[int], values: list[tp.Any]) -> tuple[tp.Any, ...]:
        """The differentiated arguments with cotangents for the Variables written, None for all else."""
        call = self.definition
        inner = Inner(call, values)
        written = {id(inner.nodes[call.graphdef.decoded.leaf_nodes[leaf]]) for leaf in at}
        args, _ = call.tree([None] * call.num_arrays, inner.roots())
        shown = lambda x: x if id(x) in written else None
        args = jax.tree_util.tree_map(shown, args, is_leaf=is_variable)
        parts = [x if number in self.diff else None for number, x in enumerate(args)]
        return tuple(parts[self.num_bound :])

    def _checked(self, grads: tp.Any) -> list[tp.Any]:
        """The result of the backward rule, one cotangent for each leaf; None for zero.

        Raises TypeError where it does not match the arguments, ValueError for another shape.
        """
        rule, diff = f"custom_vjp: the backward rule of {self.shown}", self.diff
        several = isinstance(grads, (tuple, list))
        if not several or len(grads) != len(diff):
            raise TypeError(
                f"{rule} must return a tuple with one cotangent for each differentiated argument, "
                f"{len(diff)} of them, got {len(grads) if several else type(grads).__name__}."
            )
        args = replaced([None] * len(self.definition.template()[0]), diff, grads)
        more = {"wanted": self.selected, "lenient": True}
        form = Tangents(f"{rule}: the cotangent", TypeError, needed="of objects and States", **more)
        return form.of_leaves(self.definition, self.shapes, (tuple(args), {}))

    # refusals ----------------------------------------------------------------------------------

    def _refuse_other(self, fun: OutDef, fwd: OutDef) -> tp.NoReturn:
        """Raise TypeError: the forward rule has other outputs than the function."""
        leaves, more = self.definition.graph_leaves(), set(fwd.written) - set(fun.written)
        names = ", ".join(f"'{leaves[leaf].text()}'" for leaf in sorted(more))
        what = f"it writes {names}" if names else "result or structure of the arguments differ"
        raise TypeError(
            f"custom_vjp: the forward rule of {self.shown} must return the same result, and "
            f"leave its arguments in the same structure, as the function itself, but {what}."
        )

    def _refuse_lost(self, leaves: list[tp.Any]) -> None:
        """Raise ValueError where a leaf that has no cotangent is differentiated outside."""
        for position, (x, flag) in enumerate(zip(leaves, self.selected)):
            if x.perturbed and not flag:
                raise ValueError(
                    f"custom_vjp: '{self.leaf_text(position)}' of {self.shown} is being "
                    "differentiated, but nondiff_argnums excludes it: its gradient would be lost. Leave "
                    "it out of nondiff_argnums, or differentiate with respect to something else."
                )

    def _refuse_dropped(self, out: OutDef, written: tp.Sequence[tp.Any]) -> None:
        """Raise ValueError where a rule without `updates_g` drops the cotangent of what was written.

        Only a Variable that is differentiated outside can have one: see `constant_if`.
        """
        used = [leaf for leaf, tree in zip(out.written, written) if not all_zero(tree)]
        if used:
            name = self.definition.graph_leaves()[used[0]].text()
            raise ValueError(
                f"custom_vjp: {self.shown} writes the Variable '{name}', which is being "
                "differentiated, and the new value is used: its cotangent would be lost. With "
                "graph_updates=False the backward rule gets the cotangents of what was written as "
                "its argument 'updates_g', if it has one. Add it, return the new value instead, or "
                "pass graph=True and graph_updates=True."
            )


def _crosses(value: tp.Any) -> bool:
    """Whether an argument contains an object or an array, and so is passed to JAX."""
    leaves = jax.tree_util.tree_leaves(value, is_leaf=is_root)
    return any(is_root(x) or isinstance(x, (jax.Array, np.ndarray)) for x in leaves)


# JAX's wrappers of leaves say which of them are differentiated, and which cotangents are zero -------


@jax.custom_jvp
def constant_if(before: list[tp.Any], after: list[tp.Any]) -> list[tp.Any]:
    """New values of Variables; constants where the old ones are not differentiated.

    So the running statistics of a model carry no gradient from one call to the next.
    """
    return after


@functools.partial(constant_if.defjvp, symbolic_zeros=True)
def _constant_if_jvp(primals: tp.Any, tangents: tp.Any) -> tp.Any:
    moves = [not all_zero(tree) for tree in tangents[0]]
    still = lambda x: x if is_symbolic_zero(x) else SymbolicZero.from_primal_value(x)
    out = [t if m else jax.tree_util.tree_map(still, t) for m, t in zip(moves, tangents[1])]
    return primals[1], out


def is_symbolic_zero(x: tp.Any) -> bool:
    return isinstance(x, SymbolicZero)


def all_zero(tree: tp.Any) -> bool:
    """Whether all leaves of a tree are symbolic zeros."""
    return all(map(is_symbolic_zero, jax.tree_util.tree_leaves(tree, is_leaf=is_symbolic_zero)))


def instantiated(x: tp.Any) -> tp.Any:
    return zero_tangent(jax.ShapeDtypeStruct(x.shape, x.dtype)) if is_symbolic_zero(x) else x


def values_of(leaves: tp.Any) -> tp.Any:
    """The values of leaves that JAX has wrapped."""
    value = lambda x: x.value if isinstance(x, CustomVJPPrimal) else x
    return jax.tree_util.tree_map(value, leaves, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))


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
    modes = Modes.of(graph, graph_updates)
    argnums = argument_numbers("nondiff_argnums", nondiff_argnums, modes.updates)
    return decorated(CustomVjp, fun, Options.of("custom_vjp", modes, _run, nondiff_argnums=argnums))
