"""`cond`, `switch`, `while_loop`, `fori_loop`: control flow over mutable objects."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._config import Modes
from nnxlite._errors import path_text
from nnxlite._jax import Tracer, key_name
from nnxlite.boundary import (
    OTHER,
    Body,
    CallDef,
    Crossing,
    Fixed,
    Handover,
    Inner,
    Inputs,
    OutDef,
    OutGraph,
    Outputs,
    argument_path,
    described,
    edits_text,
    enter,
    graph_difference,
    hand_over,
    is_random,
    leave,
    node_text,
    refuse_replaced,
    same,
    settle,
    structure_error,
    trace_body,
    tree_difference,
    warn_of_streams,
    with_arrays,
)
from nnxlite.graph import GraphDef, Path, build_nodes, resolve, traverse
from nnxlite.transforms._arguments import refuse_shared_result, traced_context
from nnxlite.transforms._core import Core, core_for
from nnxlite.transforms._wrapper import name_of, unbind
from nnxlite.variables import Variable


class FlowOptions(tp.NamedTuple):
    """The options of control flow, as they travel together."""

    name: str
    modes: Modes
    unroll: tuple[type, tp.Any] = (type(None), None)  # with the type, since True equals 1
    bounds: tuple[int, int] | None = None


def _unwrapped(value: tp.Any) -> tp.Any:
    return value.get_value() if isinstance(value, Variable) else value


def _run(
    kind: type[Core], funs: tuple[tp.Callable[..., tp.Any], ...], tree: tp.Any, options: FlowOptions
) -> tp.Any:
    inputs = Inputs(tree).in_mode(options.modes.graph, options.name)
    return core_for(kind, funs, options)(inputs, inputs.define(traced_context()))


# Branches ----------------------------------------------------------------------------------------


class Branches(Core):
    """`cond` and `switch`: the first leaf of the arguments says which function runs."""

    @property
    def first(self) -> tuple[str, ...]:  # type: ignore[override]
        """The first leaf is no argument of the branches."""
        return ("pred" if self.name == "cond" else "index",)

    def run(self, call: CallDef, plain: list[tp.Any], values: list[tp.Any]) -> Crossing:
        tree = jax.tree_util.tree_unflatten(call.treedef, range(call.treedef.num_leaves))
        if not isinstance(tree[0], int) or 0 in call.where:
            kind = "a boolean" if self.name == "cond" else "an integer"
            raise TypeError(
                f"{self.name}: '{self.first[0]}' must be {kind} scalar (or a Variable that holds "
                "one), got an object, None or a container."
            )
        chooser, rest = plain[0], plain[1:]
        funs = self.funs

        def apply(number: int, tree: tp.Any) -> tp.Any:
            operands, carried = tree[1:]
            args, kwargs = carried.get(_branch(self.name, number), ((), {}))
            result = funs[number](*args, *operands, **kwargs)
            refuse_shared_result(result, self.options.name, self.options.modes.graph)
            return result

        def body(number: int) -> Body:
            return trace_body(
                call,
                functools.partial(apply, number),
                lambda plain, values: ([chooser, *plain], values),
                (rest, values),
                structure=self.options.modes.updates,
                captured=self.options.modes.updates,
                after=lambda inner, out: (with_arrays(inner, out), None),
            )

        bodies = [body(number) for number in range(len(funs))]
        written = tuple(sorted({leaf for b in bodies for leaf in b.definition.written}))
        definitions = [dataclasses.replace(b.definition, written=written) for b in bodies]
        self._check(call, bodies, definitions, values)

        def branch(body: Body) -> tp.Callable[..., tp.Any]:
            def run(plain: list[tp.Any], values: list[tp.Any]) -> tp.Any:
                out = body(plain, values)
                new = dict(zip(body.definition.written, out.written))
                return out.result, [new.get(leaf, values[leaf]) for leaf in written], out.fresh

            return run

        branches = [branch(b) for b in bodies]
        if self.options.name == "cond":
            result, new, fresh = jax.lax.cond(chooser, *branches, rest, values)
        else:
            result, new, fresh = jax.lax.switch(chooser, branches, rest, values)
        return Fixed(definitions[0]), result, new, fresh

    def _check(
        self,
        call: CallDef,
        bodies: list[Body],
        definitions: list[OutDef],
        values: list[tp.Any],
    ) -> None:
        """Raise TypeError where the branches do not leave the same structure."""
        name, funs = self.options.name, self.funs
        first = definitions[0]
        for number, (body, definition) in enumerate(zip(bodies[1:], definitions[1:]), 1):
            names = f"{_branch(name, 0)} ({name_of(funs[0])}) and {_branch(name, number)} "
            names += f"({name_of(funs[number])})"
            mine = jax.tree_util.tree_structure(bodies[0].shapes.result)
            theirs = jax.tree_util.tree_structure(body.shapes.result)
            if definition != first or mine != theirs:
                raise TypeError(
                    f"{name} branch outputs must have the same structure, but {names} differ: "
                    f"{_structure_difference(call, first, definition, mine, theirs)}. Make every "
                    "branch create, remove and return the same objects and attributes."
                )
            pairs = zip(
                jax.tree_util.tree_leaves_with_path(bodies[0].shapes.result),
                jax.tree_util.tree_leaves(body.shapes.result),
            )
            for (path, x), y in pairs:
                if described(x) != described(y):
                    raise TypeError(
                        f"{name} branches must have equal output types, but {names} differ at "
                        f"'{path_text(map(key_name, path))}' of their results: {described(x)} and "
                        f"{described(y)}. Convert one of the two, for example with .astype."
                    )
            for number, (x, y) in enumerate(zip(bodies[0].shapes.fresh, body.shapes.fresh)):
                if described(x) != described(y):
                    raise TypeError(
                        f"{name} branches must leave equal types, but {names} differ at "
                        f"'{_fresh_text(call, definition, number)}': {described(x)} and "
                        f"{described(y)}. Convert one of the two, for example with .astype."
                    )
            a = dict(zip(bodies[0].definition.written, bodies[0].shapes.written))
            b = dict(zip(body.definition.written, body.shapes.written))
            for leaf in definition.written:  # a branch that does not write leaves what came in
                x, y = a.get(leaf, values[leaf]), b.get(leaf, values[leaf])
                if described(x) != described(y):
                    where = argument_path(call, call.leaf_roots()[leaf], call.leaf_paths()[leaf])
                    raise TypeError(
                        f"{name} branches must leave equal types, but {names} differ at "
                        f"'{where}': {described(x)} and {described(y)}. Convert one of the two, "
                        "for example with .astype."
                    )


def _branch(name: str, number: int) -> str:
    return ("true_fun", "false_fun")[number] if name == "cond" else f"branch {number}"


def _structure_difference(
    call: CallDef, a: OutDef, b: OutDef, a_tree: tp.Any, b_tree: tp.Any
) -> str:
    a_tree, b_tree = a.treedef or a_tree, b.treedef or b_tree
    if a_tree != b_tree:
        return f"the result of the second is {tree_difference(a_tree, b_tree)}"
    returned = [_returned_text(call, d) for d in (a, b)]
    if returned[0] != returned[1]:
        return f"the first returns {returned[0]}, the second {returned[1]}"
    parts = [edits_text(call, d.graph) for d in (a, b)]
    if parts[0] != parts[1]:
        return f"the first changes {parts[0]}, the second {parts[1]}"
    results = [call.graphdef if d.graph is None else d.graph.graphdef for d in (a, b)]
    difference = graph_difference(results[0], results[1], _root_paths(call, a))
    return f"from the first to the second, {difference}"


def _returned_text(call: CallDef, definition: OutDef) -> str:
    """The objects and arrays that a branch returns, in words."""
    graph = definition.graph
    nodes: list[tp.Any] = list(definition.nodes)
    kinds: list[str] = [""] * len(nodes)
    if graph is not None:
        decoded = graph.graphdef.decoded
        codes = decoded.roots[graph.first_result : graph.first_result + len(definition.where)]
        numbers = [code if isinstance(code, int) else None for code in codes]
        nodes = [None if n is None else graph.origin[n] for n in numbers]
        kinds = ["State" if n is None else decoded.node_defs[n].type.__name__ for n in numbers]
    texts = [f"a new {k}" if n is None else node_text(call, n) for n, k in zip(nodes, kinds)]
    return ", ".join(texts) or "no object"


def _root_paths(call: CallDef, definition: OutDef) -> list[Path]:
    """Where the roots of what a branch leaves are: those of the arguments, then of the result."""
    paths: list[Path] = [call.argument_of(position)[1:] for position in call.where]
    if definition.treedef is not None:
        tree = jax.tree_util.tree_unflatten(
            definition.treedef, range(definition.treedef.num_leaves)
        )
        found = jax.tree_util.tree_leaves_with_path(tree)
        paths += [("result", *map(key_name, found[p][0])) for p in definition.where]
    return paths


def _fresh_text(call: CallDef, definition: OutDef, number: int) -> str:
    """Where a value is found that a branch leaves and that did not come in."""
    graph = tp.cast(OutGraph, definition.graph)
    decoded = graph.graphdef.decoded
    root, *path = decoded.path(decoded.leaf_frames[graph.sources.index(~number)])
    return path_text((*_root_paths(call, definition)[root], *path))


def cond(
    pred: tp.Any,
    true_fun: tp.Callable[..., tp.Any],
    false_fun: tp.Callable[..., tp.Any],
    *operands: tp.Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """Run one of two functions on the operands, as a scalar predicate says.

    What the chosen function writes into the operands is kept; both must leave the same structure.

    Args:
        pred: a boolean scalar, or a Variable that holds one.
        true_fun, false_fun: functions of the operands. Objects behind bound methods, callable
            objects and partials are operands, too.
        graph, graph_updates: see `jit`.

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
    return _choose("cond", pred, (true_fun, false_fun), operands, graph, graph_updates)


def switch(
    index: tp.Any,
    branches: tp.Sequence[tp.Callable[..., tp.Any]],
    *operands: tp.Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """Run the function of number `index` (clamped to the range) on the operands.

    Arguments and errors as for `cond`; ValueError without branches.

    >>> import nnxlite as nnx
    >>> int(nnx.switch(1, [lambda x: x, lambda x: 2 * x], 5))
    10
    """
    branches = tuple(branches)
    if not branches:
        raise ValueError("switch needs at least one branch.")
    return _choose("switch", index, branches, operands, graph, graph_updates)


def _choose(
    name: str,
    chooser: tp.Any,
    branches: tuple[tp.Callable[..., tp.Any], ...],
    operands: tuple[tp.Any, ...],
    graph: bool | None,
    graph_updates: bool | None,
) -> tp.Any:
    """`cond` and `switch`; objects that bound methods and partials carry are operands, too."""
    carried = {}
    if not all(type(fun) is types.FunctionType for fun in branches):
        unbound = [unbind(fun) for fun in branches]
        branches = tuple(u.fun for u in unbound)
        carried = {
            _branch(name, i): (u.args, u.kwargs)
            for i, u in enumerate(unbound)
            if u.args or u.kwargs
        }
    options = FlowOptions(name, Modes.of(graph, graph_updates))
    return _run(Branches, branches, (_unwrapped(chooser), operands, carried), options)


# Loops -------------------------------------------------------------------------------------------


class Loop(Core):
    """`while_loop` and `fori_loop`: the arguments are the carry (after the bounds, if traced)."""

    @property
    def skip(self) -> int:  # type: ignore[override]
        """The arguments are the carry itself, or the bounds and the carry."""
        return int(self.name == "fori_loop" and self.options.bounds is None)

    @property
    def first(self) -> tuple[str, ...]:  # type: ignore[override]
        """The bounds, if traced, are no part of the carry."""
        return ("lower", "upper") if self.skip else ()

    def run(self, call: CallDef, plain: list[tp.Any], values: list[tp.Any]) -> Crossing:
        options = self.options
        counted = options.name == "fori_loop"
        lower, upper = options.bounds or (plain[:2] if counted else (None, None))
        skip = 2 if counted and options.bounds is None else 0
        head, carry = plain[:skip], plain[skip:]
        body, carry, values = self._settle(call, counted, head, carry, values)
        handover: Handover = body.extra

        def full(state: tp.Any) -> list[tp.Any]:
            every = list(values)
            for leaf, value in zip(handover.leaves, state[1]):
                every[leaf] = value
            return every

        def advance(*state: tp.Any) -> tp.Any:
            *number, (plain_now, _) = state
            out = body(*number, head, plain_now, full(state[-1]))
            return _carry_values(out, handover)

        start = (list(carry), [values[leaf] for leaf in handover.leaves])
        if counted:
            unroll = options.unroll[1]
            final = jax.lax.fori_loop(lower, upper, advance, start, unroll=unroll)
        else:
            test = self.funs[0]

            def proceed(state: tp.Any) -> tp.Any:
                tree, inner = enter(call, [*head, *state[0]], full(state))
                verdict = _unwrapped(test(tree))
                self._check_test(call, leave(inner, None).definition)
                return verdict

            final = jax.lax.while_loop(proceed, advance, start)
        return self._crossing(body, final)

    def _check_test(self, call: CallDef, left: OutDef) -> None:
        """Raise ValueError where the condition of a loop changes more than random streams."""
        name = f"cond_fun ({name_of(self.funs[0])})"
        if left.graph is not None or not all(is_random(call, leaf) for leaf in left.written):
            raise ValueError(f"while_loop: {name} changed its argument. Only body_fun may write.")
        warn_of_streams(
            call,
            left.written,
            self.warned,
            f"does not move on in {name} of while_loop: body_fun draws the same keys again",
            "Draw in body_fun, and carry what was drawn.",
        )

    def _settle(
        self,
        call: CallDef,
        counted: bool,
        head: list[tp.Any],
        carry: list[tp.Any],
        values: list[tp.Any],
    ) -> tuple[Body, list[tp.Any], list[tp.Any]]:
        """Trace the body until the types of the carry hold: Python scalars may need a second round.

        Returns the body, and the initial plain and graph leaves.
        """
        while True:
            body = self._trace(call, self.funs[-1], counted, head, carry, values)
            self._check(call, body)
            leaves = body.extra.leaves
            plain_ends, value_ends = _carry_values(body.shapes, body.extra)
            ends = [*plain_ends, *value_ends]
            before = [*carry, *[values[leaf] for leaf in leaves]]
            starts, bad = settle(before, ends)
            if bad:
                self._refuse(call, bad, carry, leaves, starts, ends, len(head))
            if same(starts, before):
                return body, carry, values
            carry, values = starts[: len(carry)], list(values)
            for leaf, value in zip(leaves, starts[len(carry) :]):
                values[leaf] = value

    def _trace(
        self,
        call: CallDef,
        step: tp.Callable[..., tp.Any],
        counted: bool,
        head: list[tp.Any],
        carry: list[tp.Any],
        values: list[tp.Any],
    ) -> Body:
        if not counted:
            return trace_body(
                call,
                step,
                lambda head, plain, values: ([*head, *plain], values),
                (head, carry, values),
                structure=True,
                after=self._hand_over,
            )
        bounds = self.options.bounds
        number = jax.typeof(0 if bounds else head[0])
        index: list[tp.Any] = []

        def join(i: tp.Any, head: tp.Any, plain: tp.Any, values: tp.Any) -> tp.Any:
            index[:] = [i]
            return [*head, *plain], values

        return trace_body(
            call,
            lambda tree: step(index.pop(), tree if bounds else tree[2]),
            join,
            (
                jax.ShapeDtypeStruct((), number.dtype, weak_type=number.weak_type),
                head,
                carry,
                values,
            ),
            structure=True,
            captured=self.options.modes.updates,
            after=self._hand_over,
        )

    def _hand_over(self, inner: Inner, out: Outputs) -> tuple[Outputs, Handover | str]:
        """What leaves a body, with how its carry changes."""
        count = len(inner.call.where)
        if count != len(out.definition.where):
            return out, OTHER
        structure = self.options.modes.updates
        return hand_over(
            inner,
            with_arrays(inner, out),
            [(i, i) for i in range(count)],
            moves=self.options.name == "fori_loop" or not structure,
            only_carry=not structure,
        )

    def _check(self, call: CallDef, body: Body) -> None:
        """Raise TypeError where the body's result has not the structure of the carry."""
        treedef = body.definition.treedef or jax.tree_util.tree_structure(body.shapes.result)
        tree = jax.tree_util.tree_unflatten(call.treedef, range(call.treedef.num_leaves))
        if self.options.name == "fori_loop" and self.options.bounds is None:
            tree = tree[2]
        wanted = jax.tree_util.tree_structure(tree)
        graph = body.definition.graph
        name = self.options.name
        rebinds = name == "fori_loop" or not self.options.modes.updates
        # The reference's classes: a loop over objects compares references first.
        references = name == "while_loop" or not self.options.modes.updates
        error = ValueError if references and call.where else TypeError
        what = "reference and pytree structure" if error is ValueError else "pytree structure"
        start = f"{name} body function carry input and carry output must have the same {what}, but "
        before = {position - 2 * self.skip for position in call.where}
        if treedef != wanted:
            error = structure_error(wanted, treedef, before)
            raise error(f"{start}they differ: the output is {tree_difference(wanted, treedef)}.")
        misplaced = sorted(before ^ set(body.definition.where))
        if misplaced:
            path = call.argument_of(misplaced[0] + 2 * self.skip)[self.skip :]
            sides = ["an object", "an array"][:: 1 if misplaced[0] in before else -1]
            raise error(
                f"{start}they differ at '{path_text(path)}': the input is {sides[0]}, the output "
                f"{sides[1]}. Return objects and Variables where they came in."
            )
        handover: Handover | str = body.extra
        if graph is not None:
            edits = graph.edits
            if isinstance(handover, Handover) and rebinds:
                edits = handover.edits
            if edits or graph.kinds:
                changes = edits_text(call, graph, self.skip)
                raise error(
                    f"{start}the body changes {changes}. A loop cannot change the structure of its "
                    "carry: make attributes and objects before the loop."
                )
        if isinstance(handover, str):
            result = _result_graphdef(graph, len(body.definition.where)) if graph else call.graphdef
            if result is not call.graphdef:
                paths = [call.argument_of(position)[self.skip :] for position in call.where]
                difference = graph_difference(call.graphdef, result, paths)
                raise error(f"{start}the objects differ: {difference}.")
            raise error(f"{start}the body {handover}.")
        if not self.options.modes.updates:
            refuse_replaced(call, handover, name, self.skip)

    def _refuse(
        self,
        call: CallDef,
        bad: list[int],
        carry: list[tp.Any],
        written: tuple[int, ...],
        starts: list[tp.Any],
        ends: list[tp.Any],
        skip: int,
    ) -> tp.NoReturn:
        number = bad[0]
        positions = [i for i in range(call.treedef.num_leaves) if i not in set(call.where)][skip:]
        if number < len(carry):
            where = path_text(call.argument_of(positions[number])[self.skip :])
        else:
            leaf = written[number - len(carry)]
            root = call.leaf_roots()[leaf]
            where = argument_path(call, root, call.leaf_paths()[leaf], self.skip)
        raise TypeError(
            f"{self.options.name} body function carry input and carry output must have equal "
            f"types, but they differ at '{where}': the input is {described(starts[number])}, the "
            f"output {described(ends[number])}."
        )

    def _crossing(self, body: Body, final: tp.Any) -> Crossing:
        definition, handover = body.definition, tp.cast(Handover, body.extra)
        result, values = final
        if definition.treedef is None:
            treedef = jax.tree_util.tree_structure(body.shapes.result)
            result = jax.tree_util.tree_unflatten(treedef, result)
        last = handover.by_source(values)
        written = [last[leaf] for leaf in definition.written]
        fresh = [last[~number] for number in range(len(body.shapes.fresh))]
        return Fixed(definition), result, written, fresh


def _result_graphdef(graph: OutGraph, count: int) -> GraphDef[tp.Any]:
    """The definition of the graph below the result alone."""
    decoded = graph.graphdef.decoded
    leaves: list[tp.Any] = [np.zeros(())] * decoded.num_leaves
    nodes = build_nodes(decoded, leaves)
    codes = decoded.roots[graph.first_result : graph.first_result + count]
    roots = [resolve(code, nodes, leaves) for code in codes]
    return GraphDef(traverse(roots).tokens, len(roots))


def _carry_values(out: Outputs, handover: Handover) -> tuple[list[tp.Any], list[tp.Any]]:
    """Plain leaves and graph leaves of the carry that a body returns."""
    definition: OutDef = out.definition
    plain = (
        jax.tree_util.tree_leaves(out.result) if definition.treedef is None else list(out.result)
    )
    return plain, handover.values(out)


def while_loop(
    cond_fun: tp.Callable[[tp.Any], tp.Any],
    body_fun: tp.Callable[[tp.Any], tp.Any],
    init_val: tp.Any,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """Run `body_fun` on the carry as long as `cond_fun` says so.

    The carry may be any pytree of objects and arrays. Objects that the body returns in their places
    are the caller's own, and keep what was written. Variables that are only read are constants.

    Raises:
        TypeError: where structure or types of the carry change.
        ValueError: where `cond_fun` writes into its argument. (Random streams can be drawn from: they
            are left as they were, and a warning says so.)

    >>> import nnxlite as nnx
    >>> counter = nnx.Dict(n=nnx.Variable(0))
    >>> def body(c):
    ...     c.n.value += 1
    ...     return c
    >>> out = nnx.while_loop(lambda c: c.n.value < 3, body, counter)
    >>> out is counter, int(counter.n.value)
    (True, 3)
    """
    options = FlowOptions("while_loop", Modes.of(graph, graph_updates))
    return _run(Loop, (cond_fun, body_fun), init_val, options)


def fori_loop(
    lower: tp.Any,
    upper: tp.Any,
    body_fun: tp.Callable[[tp.Any, tp.Any], tp.Any],
    init_val: tp.Any,
    *,
    unroll: int | bool | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """Run `body_fun(i, carry)` for i from `lower` up to `upper`, exclusive.

    Carry and errors as for `while_loop`; bounds that are Python ints make the loop differentiable
    in reverse.

    >>> import nnxlite as nnx
    >>> int(nnx.fori_loop(0, 4, lambda i, total: total + i, 0))
    6
    """
    lower, upper = _unwrapped(lower), _unwrapped(upper)
    if unroll is not None:  # JAX wants bounds that it knows
        lower, upper = (int(b) if _is_known(b) else b for b in (lower, upper))
    known = (lower, upper) if type(lower) is int and type(upper) is int else None
    modes = Modes.of(graph, graph_updates)
    options = FlowOptions("fori_loop", modes, (type(unroll), unroll), known)
    return _run(Loop, (body_fun,), init_val if known else (lower, upper, init_val), options)


def _is_known(bound: tp.Any) -> bool:
    """Whether a bound is an integer whose value is known now."""
    return not isinstance(bound, Tracer) and jnp.issubdtype(jnp.result_type(bound), jnp.integer)
