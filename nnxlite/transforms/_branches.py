"""`cond` and `switch`: one of several functions of mutable objects."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing as tp

import jax
from jax.tree_util import tree_leaves

from nnxlite._config import Modes
from nnxlite.boundary import (
    Body,
    CallDef,
    Crossing,
    Fixed,
    numbered,
    parameter_names,
    trace_body,
    with_arrays,
)
from nnxlite.transforms._arguments import refuse_shared_result, unwrapped_value
from nnxlite.transforms._branch_checks import branch_name, check_branches
from nnxlite.transforms._core import Core
from nnxlite.transforms._flow import FlowOptions, run_flow
from nnxlite.transforms._programs import run_bodies
from nnxlite.transforms._wrapper import R, unbind

Operands = tp.TypeVarTuple("Operands")


class Branches(Core):
    """`cond` and `switch`: the first leaf of the arguments says which function runs."""

    @property
    def chooser(self) -> str:
        """The name of the first leaf, which is not an argument of the branches."""
        return "pred" if self.name == "cond" else "index"

    def run(self, call: CallDef, leaves: list[tp.Any]) -> Crossing:
        if not isinstance(call.template()[0][0], int) or 0 in call.where:
            kind = "a boolean" if self.name == "cond" else "an integer"
            raise TypeError(
                f"{self.name}: '{self.chooser}' must be {kind} scalar (or a Variable that holds "
                "one), got an object, None or a container."
            )
        chooser, *rest = leaves
        funs = self.funs

        def apply(number: int, tree: tp.Any) -> tp.Any:
            (_, *operands), carried = tree
            args, kwargs = carried.get(branch_name(self.name, number), ((), {}))
            result = funs[number](*args, *operands, **kwargs)
            refuse_shared_result(result, self.options.name, self.options.modes.graph)
            return result

        def body(number: int) -> Body:
            return trace_body(
                call.renamed(_names(self.chooser, funs[number], len(call.template()[0]) - 1)),
                functools.partial(apply, number),
                leaves,
                user=funs[number],
                structure=self.options.modes.updates,
                captured=self.options.modes.updates,
                after=lambda inner, out: (with_arrays(inner, out), None),
            )

        bodies = [body(number) for number in range(len(funs))]
        written = tuple(sorted({leaf for b in bodies for leaf in b.definition.written}))
        definitions = [dataclasses.replace(b.definition, written=written) for b in bodies]
        before = call.by_side(leaves)[1]
        check_branches(self.name, funs, call, bodies, definitions, before)

        old = call.by_side(_from_inputs(leaves))[1]
        outputs = [_picks(body, written, old) for body in bodies]
        settings = _Choice(self.name, tuple(tuple(tree_leaves(picks)) for picks in outputs))
        flat = run_bodies(_choice, settings, bodies, tree_leaves(leaves))
        structure = jax.tree_util.tree_structure(outputs[0])
        return Fixed(definitions[0]), *jax.tree_util.tree_unflatten(structure, flat)


class _Choice(tp.NamedTuple):
    """The settings of `cond` and `switch`.

    Attributes:
        name: of the transform.
        outputs: for each branch and each output its position among those of the body, or -1 - position
            for an input that the branch leaves as it is.
    """

    name: str
    outputs: tuple[tuple[int, ...], ...]


def _names(chooser: str, branch: tp.Any, count: int) -> tuple[str, ...]:
    """The names of the arguments in a branch, of which the chooser is none, and `count` operands."""
    names = parameter_names(branch)[:count]
    return chooser, *names, *[f"args[{number}]" for number in range(len(names), count)]


def _picks(body: Body, written: tp.Iterable[int], old: list[tp.Any]) -> tuple[tp.Any, ...]:
    """The outputs of a branch as a `_Choice` has them: result, written leaves, and fresh ones."""
    out = body.numbers()
    new = dict(zip(body.definition.written, out.written))
    return out.result, [new.get(leaf, old[leaf]) for leaf in written], out.fresh


def _from_inputs(leaves: list[tp.Any]) -> list[tp.Any]:
    """Leaves as outputs of a `_Choice`."""
    return jax.tree_util.tree_map(lambda number: -1 - number, numbered(leaves))


def _choice(
    settings: _Choice, funs: list[tp.Callable[..., list[tp.Any]]], inputs: list[tp.Any]
) -> list[tp.Any]:
    chooser, *rest = inputs

    def branch(
        fun: tp.Callable[..., list[tp.Any]], outputs: tuple[int, ...]
    ) -> tp.Callable[..., list[tp.Any]]:
        def run(*rest: tp.Any) -> list[tp.Any]:
            given = chooser, *rest
            out = fun(*given)
            return [out[i] if i >= 0 else given[-1 - i] for i in outputs]

        return run

    branches = [*map(branch, funs, settings.outputs)]
    if settings.name == "cond":
        return jax.lax.cond(chooser, *branches, *rest)
    return jax.lax.switch(chooser, branches, *rest)


def cond(
    pred: tp.Any,
    true_fun: tp.Callable[[*Operands], R],
    false_fun: tp.Callable[[*Operands], R],
    *operands: *Operands,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> R:
    """Run one of two functions on the operands, as a scalar predicate says.

    What the chosen function writes to the operands stays written; both must leave the same structure.

    Args:
        pred: a boolean scalar, or a Variable with one.
        true_fun, false_fun: functions of the operands. Objects behind bound methods, callable
            objects and partials are operands, too.
        operands: arguments of the functions: objects, arrays, or pytrees of these.
        graph, graph_updates: see `jit`.

    Returns:
        The result of the function that ran.

    Raises:
        TypeError: where the branches return or leave different structures or types.

    >>> import nnxlite as nnx
    >>> counter = nnx.Dict(n=nnx.Variable(0))
    >>> def up(c): c.n.value += 1
    >>> def keep(c): pass
    >>> nnx.cond(True, up, keep, counter)
    >>> int(counter.n.value)
    1
    """
    modes = Modes.of(graph, graph_updates)
    return _run_choice("cond", pred, (true_fun, false_fun), operands, modes)


def switch(
    index: tp.Any,
    branches: tp.Sequence[tp.Callable[[*Operands], R]],
    *operands: *Operands,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> R:
    """Run the function of number `index` (clamped to the range) on the operands.

    Arguments and errors as for `cond`; ValueError without branches.

    Args:
        index: an integer scalar, or a Variable with one.
        branches: functions of the operands.
        operands, graph, graph_updates: as for `cond`.

    Returns:
        The result of the function that ran.

    Raises:
        ValueError: without branches.
        TypeError: as for `cond`.

    >>> import nnxlite as nnx
    >>> int(nnx.switch(1, [lambda x: x, lambda x: 2 * x], 5))
    10
    """
    branches = tuple(branches)
    if not branches:
        raise ValueError("Empty branch sequence: switch needs at least one branch.")
    modes = Modes.of(graph, graph_updates)
    return _run_choice("switch", index, branches, operands, modes)


def _run_choice(
    name: str,
    chooser: tp.Any,
    branches: tuple[tp.Callable[..., tp.Any], ...],
    operands: tuple[tp.Any, ...],
    modes: Modes,
) -> tp.Any:
    """Run one of the branches; what bound methods and partials carry is an operand, too."""
    carried = {}
    if not all(type(fun) is types.FunctionType for fun in branches):
        unbound = [unbind(fun) for fun in branches]
        branches = tuple(u.fun for u in unbound)
        carried = {
            branch_name(name, i): (u.args, u.kwargs)
            for i, u in enumerate(unbound)
            if u.args or u.kwargs
        }
    names = _names("pred" if name == "cond" else "index", branches[0], len(operands))
    options = FlowOptions(name, modes)
    chooser = unwrapped_value(chooser)
    return run_flow(Branches, branches, options, names, chooser, *operands, **carried)
