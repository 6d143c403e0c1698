"""`scan`: a loop over slices of mutable objects, with a carry.

Every leaf of the arguments is scanned (it has an axis), carried, or constant.  Of the carried
Variables only those that the body writes are carried; those it only reads are constants of the
loop, and are neither copied nor returned.
"""

from __future__ import annotations

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp

from nnxlite._config import Modes
from nnxlite._errors import path_text
from nnxlite._jax import is_ref
from nnxlite.boundary import (
    OTHER,
    SHARED,
    Body,
    CallDef,
    Carry,
    Crossing,
    Edit,
    FilterMapping,
    Fixed,
    Handover,
    Inner,
    OutDef,
    OutGraph,
    Outputs,
    argument_path,
    broadcast,
    by_path,
    described,
    edits_text,
    hand_over,
    is_random,
    leaves_of_code,
    no_room,
    output_names,
    output_settings,
    refuse_foreign_axes,
    refuse_replaced,
    same,
    settle,
    split_settings,
    structure_error,
    trace_body,
    tree_difference,
    warn_of_streams,
    with_arrays,
)
from nnxlite.graph import StaticDef
from nnxlite.transforms._arguments import (
    by_position,
    check_arguments,
    refuse_shared_result,
    traced_context,
)
from nnxlite.transforms._core import Core, core_for
from nnxlite.transforms._mapped import _with_axis_names, from_front
from nnxlite.transforms._wrapper import Transformed, decorated, name_of
from nnxlite.variables import MISSING, PARTITION_NAME, Variable, remove_axis

CARRY, CONSTANT = "carry", "constant"


_NO_LEAVES = StaticDef(None)


class ScanOptions(tp.NamedTuple):
    """The options of `scan`, as they travel together."""

    name: str
    length: int | None
    reverse: bool
    unroll: tuple[type, int | bool]  # with the type, since True equals 1
    split_transpose: bool
    in_axes: tp.Any
    out_axes: tp.Any
    axis_names: tuple[tuple[str, tp.Any], ...]
    modes: Modes
    num_bound: int = 0


class Sorted(tp.NamedTuple):
    """Leaves of a call by what the loop does with them: the role of each plain and graph leaf."""

    plain: list[tp.Any]
    values: list[tp.Any]
    roots: list[tp.Any]

    def take(self, plain: list[tp.Any], values: list[tp.Any], role: str) -> tp.Any:
        """The plain and graph leaves of one role (CARRY, CONSTANT, or "scanned")."""
        return (
            [x for x, r in zip(plain, self.plain) if _role(r) == role],
            [x for x, r in zip(values, self.values) if _role(r) == role],
        )

    def join(self, carry: tp.Any, scanned: tp.Any, constant: tp.Any) -> tp.Any:
        """The inverse of taking all three."""
        parts = {CARRY: carry, "scanned": scanned, CONSTANT: constant}
        plain = {role: iter(part[0]) for role, part in parts.items()}
        values = {role: iter(part[1]) for role, part in parts.items()}
        return (
            [next(plain[_role(r)]) for r in self.plain],
            [next(values[_role(r)]) for r in self.values],
        )


def _role(setting: tp.Any) -> str:
    if setting is Carry:
        return CARRY
    return CONSTANT if setting is None else "scanned"


def _moved(tree: tp.Any, source: int, target: int) -> tp.Any:
    """A leaf (or a Variable's pytree) with an axis moved."""
    if source == target:
        return tree
    return jax.tree_util.tree_map(lambda x: jnp.moveaxis(x, source, target), tree)


class Scan(Core):
    """The compiled side of a scanned function."""

    def run(self, call: CallDef, plain: list[tp.Any], values: list[tp.Any]) -> Crossing:
        options: ScanOptions = self.options
        roles = self._sort(call)
        scanned = roles.take(plain, values, "scanned")
        axes = roles.take(roles.plain, roles.values, "scanned")
        length = self._length(call, roles, scanned, axes)
        scanned = tuple([_moved(x, a, 0) for x, a in zip(*pair)] for pair in zip(scanned, axes))
        constant = roles.take(plain, values, CONSTANT)
        carry_plain, carry_values = roles.take(plain, values, CARRY)
        carried = [i for i, r in enumerate(roles.values) if r is Carry]
        place = {leaf: i for i, leaf in enumerate(carried)}
        slices = jax.tree_util.tree_map(
            lambda x: jax.ShapeDtypeStruct(
                jnp.shape(x)[1:],
                jax.typeof(x).dtype,
                weak_type=jax.typeof(x).weak_type,
                is_ref=is_ref(x),
            ),
            scanned,
        )
        body, (carry_plain, carry_values) = self._settle(
            call, roles, place, (carry_plain, carry_values), slices, constant
        )
        settings, handover = body.extra
        loop = handover.leaves
        fixed_values = list(carry_values)

        def step(state: tp.Any, slices: tp.Any) -> tp.Any:
            now_plain, now_loop = state
            now_values = list(fixed_values)
            for leaf, value in zip(loop, now_loop):
                now_values[place[leaf]] = value
            out = body((now_plain, now_values), slices, constant)
            return _split(out, settings, handover)

        final, stacked = jax.lax.scan(
            step,
            (carry_plain, [carry_values[place[leaf]] for leaf in loop]),
            scanned,
            length=length,
            reverse=options.reverse,
            unroll=options.unroll[1],
            _split_transpose=options.split_transpose,
        )
        return self._crossing(body, final, stacked)

    def _settle(
        self,
        call: CallDef,
        roles: Sorted,
        place: dict[int, int],
        carry: tuple[list[tp.Any], list[tp.Any]],
        slices: tp.Any,
        constant: tp.Any,
    ) -> tuple[Body, tuple[list[tp.Any], list[tp.Any]]]:
        """Trace the body until the types of the carry hold: Python scalars may need a second round.

        Returns the body and the initial carry.
        """
        plain, values = carry
        while True:
            body = self._trace(call, roles, (plain, values), slices, constant)
            self._check(call, body, roles)
            loop = body.extra[1].leaves
            self._check_structure(call, body)
            ends = self._ends(body)
            starts = [*plain, *[values[place[leaf]] for leaf in loop]]
            fitted, bad = settle(starts, ends)
            if bad:
                self._refuse(call, roles, bad[0], plain, loop, fitted, ends)
            if same(fitted, starts):
                return body, (plain, values)
            values = list(values)
            for leaf, value in zip(loop, fitted[len(plain) :]):
                values[place[leaf]] = value
            plain = fitted[: len(plain)]

    # preparation -------------------------------------------------------------------------------

    def _sort(self, call: CallDef) -> Sorted:
        options: ScanOptions = self.options
        args, kwargs = jax.tree_util.tree_unflatten(call.treedef, range(call.treedef.num_leaves))
        carried = jax.tree_util.tree_leaves(args[: options.num_bound])
        settings: list[tp.Any] = [None] * len(carried)
        settings += broadcast(options.in_axes, args[options.num_bound :], "in_axes")
        settings += [None] * len(jax.tree_util.tree_leaves(kwargs))
        plain, values = split_settings(call, settings, "in_axes")
        if not options.modes.updates:  # writes carry over
            nodes = call.graphdef.decoded.leaf_nodes
            values = [Carry if s is None and n >= 0 else s for s, n in zip(values, nodes)]
        return Sorted(plain, values, [settings[i] for i in call.where])

    def _length(self, call: CallDef, roles: Sorted, scanned: tp.Any, axes: tp.Any) -> int | None:
        """The number of iterations.

        Raises ValueError where sizes and `length` disagree, or nothing says how many.
        """
        options: ScanOptions = self.options
        sizes: dict[int, str] = {}
        positions = [i for i in range(call.treedef.num_leaves) if i not in set(call.where)]
        names = [path_text(call.argument_of(p)[1:]) for p in positions]
        roots, paths = call.leaf_roots(), call.leaf_paths()
        value_names = [argument_path(call, roots[i], paths[i]) for i in range(len(roles.values))]
        names_of = roles.take(names, value_names, "scanned")
        for kind in (0, 1):
            for name, value, axis in zip(names_of[kind], scanned[kind], axes[kind]):
                for leaf in jax.tree_util.tree_leaves(value):
                    shape = jnp.shape(leaf)
                    if not -len(shape) <= axis < len(shape):
                        raise ValueError(
                            f"scan: the value at '{name}' has shape {shape} and no axis {axis} to "
                            "scan over. Give its axis in in_axes, None for a constant, or Carry."
                        )
                    sizes.setdefault(shape[axis], name)
        if options.length is not None and any(size != options.length for size in sizes):
            raise ValueError(
                f"scan got `length` argument of {options.length} which disagrees with leading axis "
                f"sizes {list(sizes)} (at {', '.join(map(repr, sizes.values()))}). Leave `length` out, "
                "or scan over axes of that size."
            )
        if len(sizes) > 1:
            parts = [f"{size} at '{name}'" for size, name in sizes.items()]
            raise ValueError(
                f"scan got values with different axis sizes: {', '.join(parts)}. Give all the same "
                "size, or None to what is the same in every iteration."
            )
        if not sizes and options.length is None:
            raise ValueError(
                "scan got no values to scan over and `length` not provided. Pass length, or an "
                "axis for an argument in in_axes."
            )
        return options.length if options.length is not None else next(iter(sizes))

    def _trace(
        self, call: CallDef, roles: Sorted, carry: tp.Any, slices: tp.Any, constant: tp.Any
    ) -> Body:
        options: ScanOptions = self.options
        names = dict(options.axis_names)

        def before(inner: Inner) -> None:
            if not names:
                return
            for leaf, node in enumerate(call.graphdef.decoded.leaf_nodes):
                variable = inner.nodes[node] if node >= 0 else None
                axis = roles.values[leaf]
                if isinstance(variable, Variable) and isinstance(axis, int):
                    remove_axis(variable, from_front(axis, inner.values[leaf]), names)

        def after(inner: Inner, out: Outputs) -> tuple[Outputs, tp.Any]:
            constants = [leaf for leaf in out.definition.written if roles.values[leaf] is None]
            if structure:
                constants = [leaf for leaf in constants if is_random(call, leaf)]
                warn_of_streams(
                    call,
                    constants,
                    self.warned,
                    f"is broadcast under scan({name_of(self.fun)}): every iteration draws the "
                    "same keys",
                    "Carry its count, with nnx.StateAxes({nnx.RngCount: nnx.Carry, ...: None}), or "
                    "give each iteration a key of its own with nnx.split_rngs(splits=...) and an "
                    "axis.",
                )
            out = _without(out, constants)  # the next iteration finds what came in
            out, handover = self._hand_over(inner, with_arrays(inner, out), roles, structure)
            settings = output_settings(
                call, out, roles.values, roles.roots, options.out_axes, "out_axes", None
            )
            if names:
                out = _with_axis_names(inner, out, roles.values, settings.fresh, names)
            return out, (tuple(map(tuple, settings)), handover)

        def run(tree: tp.Any) -> tp.Any:
            result = self.fun(*tree[0], **tree[1])
            refuse_shared_result(result, "scan", options.modes.graph)
            return result

        structure = options.modes.updates
        return trace_body(
            call,
            run,
            roles.join,
            (carry, slices, constant),
            structure=True,
            before=before,
            after=after,
        )

    def _hand_over(
        self, inner: Inner, out: Outputs, roles: Sorted, structure: bool
    ) -> tuple[Outputs, Handover | str]:
        """What leaves the body, with how its carry changes."""
        before = [i for i, s in enumerate(roles.roots) if s is Carry]
        after = [i for i, s in enumerate(self._result_roots(out.definition)) if s is Carry]
        if len(before) != len(after):
            return out, OTHER
        return hand_over(
            inner,
            out,
            list(zip(before, after)),
            new_objects=not structure,
            only_carry=not structure,
            statics=structure,
            is_carried=lambda leaf: roles.values[leaf] is Carry,
        )

    # checks ------------------------------------------------------------------------------------

    def _check(self, call: CallDef, body: Body, roles: Sorted) -> None:
        """Raise where the body writes what it must not, or changes the structure of its carry."""
        definition = body.definition
        (_, _, fresh_settings), handover = body.extra
        for leaf in definition.written:
            if roles.values[leaf] is None:
                where = argument_path(call, call.leaf_roots()[leaf], call.leaf_paths()[leaf])
                raise ValueError(
                    f"scan: the body writes '{where}', which is broadcast (axis None): the writes "
                    "of the iterations would be lost. Carry it, with Carry in in_axes or "
                    "nnx.StateAxes({...: nnx.Carry}), or give it an axis."
                )
        graph = definition.graph
        if handover is SHARED:
            raise TypeError(
                "scan body function carry input and carry output must have the same pytree "
                f"structure, but the body {SHARED}."
            )
        if isinstance(handover, str):
            raise ValueError(
                "Carry references must be the same between iterations: the body of "
                f"scan({name_of(self.fun)}) must return the objects of its carry themselves, in "
                "their places. Update them in place (nnx.update) instead of returning new ones."
            )
        updates = self.options.modes.updates
        error = TypeError if updates else ValueError
        if graph is not None:
            carried = {~source for source in handover.by_source(handover.leaves) if source < 0}
            for leaf, setting in enumerate(fresh_settings):
                if leaf not in carried and not isinstance(setting, int):
                    raise error(
                        "scan body function carry input and carry output must have the same pytree "
                        f"structure, but they differ: the body adds {self._added(graph, leaf)} to "
                        "an argument that is carried or broadcast. Create it before the loop, or "
                        "give the argument an axis."
                    )
            if self._restructures(call, graph, handover.edits, roles, fresh_settings):
                raise error(
                    "scan body function carry input and carry output must have the same pytree "
                    f"structure, but they differ: the body changes {edits_text(call, graph)}, of "
                    "an argument that is carried or broadcast. Do this before the loop or after "
                    "it, or give the argument an axis."
                )
        if not updates:
            refuse_replaced(call, handover, "scan")
        self._check_room(call, body, roles)

    def _added(self, graph: tp.Any, number: int) -> str:
        decoded = graph.graphdef.decoded
        for leaf, source in enumerate(graph.sources):
            if source == ~number:
                root, *path = decoded.path(decoded.leaf_frames[leaf])
                node = decoded.leaf_nodes[leaf]
                kind = decoded.node_defs[node].type.__name__ if node >= 0 else "array"
                return f"{kind} '{path_text(path)}'"
        return "a Variable"

    def _restructures(
        self,
        call: CallDef,
        graph: OutGraph,
        edits: tp.Sequence[Edit],
        roles: Sorted,
        fresh: tp.Sequence[tp.Any],
    ) -> bool:
        """Whether the next iteration would find other Variables than this one in its places."""
        came_in, decoded = call.graphdef.decoded, graph.graphdef.decoded
        codes_in, codes_out = dict(came_in.children), dict(decoded.children)
        if any(roles.values[came_in.node_leaves[old]] is Carry for old, _ in graph.kinds):
            return True
        for number, names, removed in edits:
            old = tp.cast(int, graph.origin[number])
            before = dict(zip(came_in.node_defs[old].layout.data, codes_in[old]))
            after = dict(zip(decoded.node_defs[number].layout.data, codes_out[number]))
            for name in (*names, *removed):
                settings = [
                    roles.values[leaf]
                    for leaf, _ in leaves_of_code(came_in, before.get(name, _NO_LEAVES))
                ]
                for leaf, _ in leaves_of_code(decoded, after.get(name, _NO_LEAVES)):
                    source = graph.sources[leaf]
                    settings.append(roles.values[source] if source >= 0 else fresh[~source])
                if not all(isinstance(s, int) for s in settings):
                    return True
        return False

    def _check_room(self, call: CallDef, body: Body, roles: Sorted) -> None:
        """Raise ValueError where an output has no room for the axis it is to get."""
        shapes = body.shapes
        result = jax.tree_util.tree_leaves(shapes.result)
        for part, values in enumerate((result, shapes.written, shapes.fresh)):
            for number, (axis, value) in enumerate(zip(body.extra[0][part], values)):
                if no_room(axis, value, ""):
                    leaves = [
                        argument_path(call, root, path)
                        for root, path in zip(call.leaf_roots(), call.leaf_paths())
                    ]
                    treedef = body.definition.treedef or jax.tree_util.tree_structure(shapes.result)
                    name = output_names(call, body.definition, treedef, leaves)[part][number]
                    raise ValueError(f"scan({name_of(self.fun)}): {no_room(axis, value, name)}")

    def _result_roots(self, definition: OutDef) -> list[tp.Any]:
        if definition.treedef is None:
            return []
        count = definition.treedef.num_leaves
        tree = jax.tree_util.tree_unflatten(definition.treedef, range(count))
        settings = broadcast(self.options.out_axes, tree, "out_axes")
        return [settings[p] for p in definition.where]

    def _check_structure(self, call: CallDef, body: Body) -> None:
        """Raise where the carry comes out as another pytree than it went in."""
        options: ScanOptions = self.options
        args, _ = jax.tree_util.tree_unflatten(call.treedef, range(call.treedef.num_leaves))
        treedef = body.definition.treedef or jax.tree_util.tree_structure(body.shapes.result)
        result = jax.tree_util.tree_unflatten(treedef, range(treedef.num_leaves))
        visible = args[options.num_bound :]
        before = _carry_part(options.in_axes, next(iter(visible), None), visible)
        after = _carry_part(options.out_axes, result, result)
        structures = [jax.tree_util.tree_structure(part) for part in (before, after)]
        if structures[0] != structures[1]:
            # The reference's classes: with updates it compares references first.
            updates = options.modes.updates
            positions = jax.tree_util.tree_leaves(before)
            roots = {i for i, position in enumerate(positions) if position in call.where}
            error = ValueError if updates else structure_error(structures[0], structures[1], roots)
            raise error(
                "scan body function carry input and carry output must have the same pytree "
                f"structure, but they differ: the output is {tree_difference(*structures)}."
            )

    def _refuse(
        self,
        call: CallDef,
        roles: Sorted,
        number: int,
        carry_plain: list[tp.Any],
        loop: list[int],
        starts: list[tp.Any],
        ends: list[tp.Any],
    ) -> tp.NoReturn:
        if number < len(carry_plain):
            positions = [i for i in range(call.treedef.num_leaves) if i not in set(call.where)]
            carried = [p for p, r in zip(positions, roles.plain) if r is Carry]
            where = path_text(call.argument_of(carried[number])[1:])
        else:
            leaf = loop[number - len(carry_plain)]
            where = argument_path(call, call.leaf_roots()[leaf], call.leaf_paths()[leaf])
        raise TypeError(
            "scan body function carry input and carry output must have equal types, but they "
            f"differ at '{where}': the input is {described(starts[number])}, the output "
            f"{described(ends[number])}."
        )

    # the way out -------------------------------------------------------------------------------

    def _ends(self, body: Body) -> list[tp.Any]:
        """The carry leaves as the body leaves them, abstract."""
        (plain, values), _ = _split(body.shapes, *body.extra)
        return [*plain, *values]

    def _crossing(self, body: Body, final: tp.Any, stacked: tp.Any) -> Crossing:
        (result_settings, written_settings, fresh_settings), handover = body.extra
        definition = body.definition
        carry, values = iter(final[0]), handover.by_source(final[1])
        result_stack, written_stack, fresh_stack = map(iter, stacked)
        result: tp.Any = [
            next(carry) if s is Carry else _moved(next(result_stack), 0, s) for s in result_settings
        ]
        written = [
            values[leaf] if leaf in values else _moved(next(written_stack), 0, s)
            for leaf, s in zip(definition.written, written_settings)
        ]
        fresh = [
            values[~number] if ~number in values else _moved(next(fresh_stack), 0, s)
            for number, s in enumerate(fresh_settings)
        ]
        if definition.treedef is None:
            treedef = jax.tree_util.tree_structure(body.shapes.result)
            result = jax.tree_util.tree_unflatten(treedef, result)
        return Fixed(definition), result, written, fresh


def _carry_part(axes: tp.Any, whole: tp.Any, parts: tp.Any) -> tp.Any:
    """The part of the arguments, or of the result, that is the carry; None without one."""
    if axes is Carry:
        return whole
    if isinstance(axes, tuple):
        for axis, part in zip(axes, parts):
            if axis is Carry:
                return part
    return None


def _without(out: Outputs, leaves: tp.Container[int]) -> Outputs:
    """Outputs without what was written to some leaves."""
    at = out.definition.written
    kept = [i for i, leaf in enumerate(at) if leaf not in leaves]
    definition = dataclasses.replace(out.definition, written=tuple(at[i] for i in kept))
    return out._replace(definition=definition, written=[out.written[i] for i in kept])


def _split(out: Outputs, settings: tp.Any, handover: Handover) -> tp.Any:
    """What a body leaves, as the new carry and the slices to be stacked."""
    result_settings = settings[0]
    leaves = (
        jax.tree_util.tree_leaves(out.result)
        if out.definition.treedef is None
        else list(out.result)
    )
    carry = [x for x, s in zip(leaves, result_settings) if s is Carry]
    result = [x for x, s in zip(leaves, result_settings) if s is not Carry]
    carried = {source for _, source in handover.slots}
    stacked = [x for leaf, x in zip(out.definition.written, out.written) if leaf not in carried]
    fresh = [x for number, x in enumerate(out.fresh) if ~number not in carried]
    return (carry, handover.values(out)), (result, stacked, fresh)


def _check_prefixes(in_axes: tp.Any, out_axes: tp.Any) -> None:
    """Raise ValueError where Carry is used in a way that cannot be."""
    for axes in (in_axes, out_axes):
        parts = axes if isinstance(axes, tuple) else (axes,)
        for part in parts:
            inside = jax.tree_util.tree_leaves(
                part, is_leaf=lambda x: x is None or isinstance(x, FilterMapping)
            )
            if part is not Carry and any(setting is Carry for setting in inside):
                raise ValueError(
                    f"Carry must be at the top level, it cannot be nested. Found axes={axes!r}. "
                    "Make the carry one argument (any pytree)."
                )

    _check_results(out_axes)

    def count(axes: tp.Any) -> int:
        return (axes if isinstance(axes, tuple) else (axes,)).count(Carry)

    if bool(count(in_axes)) != bool(count(out_axes)):
        raise ValueError(
            "If one of in_axes or out_axes has Carry, the other must also have Carry. Got "
            f"in_axes={in_axes!r} and out_axes={out_axes!r}."
        )
    if count(in_axes) > 1 or count(out_axes) > 1:
        raise ValueError(
            f"Found multiple Carry definitions in in_axes={in_axes!r} or out_axes={out_axes!r}. "
            "Make the carries one pytree."
        )


def _check_results(out_axes: tp.Any) -> None:
    """Raise ValueError where a result would be broadcast, or a part of an object carried."""
    settings, _ = jax.tree_util.tree_flatten_with_path(
        out_axes, is_leaf=lambda x: x is None or isinstance(x, FilterMapping)
    )
    for path, setting in settings:
        inside = setting._settings if isinstance(setting, FilterMapping) else [setting]
        for word, refused in (("carry", Carry), ("broadcast", None)):
            if setting is not Carry and any(axis is refused for axis in inside):
                where = "".join(map(str, path))
                shown = f"out_axes={setting!r}" if setting is None else repr(setting)
                raise ValueError(
                    f"Cannot {word} output state. Got {shown} at: out_axes{where}. Every result of "
                    "an iteration needs an axis, or is the carry as a whole."
                )


class ScanWrapped(Transformed):
    """A scanned function, as `scan` returns it."""

    options: ScanOptions

    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        bound, axes = self.bound, self.options.in_axes
        wanted = len(axes) if isinstance(axes, tuple) else int(axes is Carry)
        if kwargs or len(args) < wanted:
            args, kwargs = by_position(bound.fun, args, kwargs, bound, wanted)
        if wanted and len(args) != wanted:
            every, keywords = (*bound.args, *args), {**bound.kwargs, **kwargs}
            check_arguments("scan", bound.fun, every, keywords)
            if axes is Carry:
                raise ValueError(
                    f"scan({name_of(bound.fun)}): with in_axes=Carry the one argument is the carry, "
                    f"got {len(args)} arguments. Carry them as one pytree, or give each its axis, "
                    "such as in_axes=(nnx.Carry, None)."
                )
        inputs = self.inputs(args, kwargs)
        call = inputs.define(traced_context())
        options = self.options._replace(num_bound=len(bound.args))
        return core_for(Scan, (bound.fun,), options)(inputs, call)


def scan(
    f: tp.Any = MISSING,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    in_axes: tp.Any = (Carry, 0),
    out_axes: tp.Any = (Carry, 0),
    transform_metadata: tp.Mapping[str, tp.Any] = {},
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """Run a function over slices of its arguments, one after the other, with a carry.

    Args:
        f: the function; without it `scan` returns a decorator.
        length: number of iterations, where no argument is scanned.
        reverse, unroll, _split_transpose: as in `jax.lax.scan`.
        in_axes: for each argument an axis, None (the same in every iteration), `Carry`, or
            `StateAxes` to choose by Variable.
        out_axes: the same for the result.
        transform_metadata: as for `vmap`.
        graph, graph_updates: see `jit`.

    Raises:
        ValueError: for prefixes or sizes that do not fit, a result that would be broadcast, a
            broadcast Variable that is written, or a carry whose objects are replaced or whose
            structure changes.
        TypeError: where types of the carry change, or (with `graph_updates=False`) an array of it
            becomes a tree.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> blocks = nnx.vmap(lambda key: nnx.Linear(2, 2, rngs=nnx.Rngs(key)))(
    ...     jax.random.split(jax.random.key(0), 3))
    >>> forward = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    >>> forward(jnp.ones((1, 2)), blocks).shape
    (1, 2)
    """
    in_axes = by_path(tuple(in_axes) if isinstance(in_axes, list) else in_axes)
    out_axes = by_path(tuple(out_axes) if isinstance(out_axes, list) else out_axes)
    refuse_foreign_axes("scan", "in_axes", in_axes)
    refuse_foreign_axes("scan", "out_axes", out_axes)
    _check_prefixes(in_axes, out_axes)
    options = ScanOptions(
        "scan",
        length,
        reverse,
        (type(unroll), unroll),
        _split_transpose,
        in_axes,
        out_axes,
        tuple(transform_metadata.items()) if PARTITION_NAME in transform_metadata else (),
        Modes.of(graph, graph_updates),
    )
    return decorated(ScanWrapped, f, options)
