"""Bodies of loops and branches: traced once to find out what they write, then run as often as needed.

A loop must know its carry, and a branch must know what the other branches write, before JAX sees
either.  So the user function is traced to a jaxpr first.  The trace shows what the function writes, and
the loop runs the jaxpr: the user's Python code runs once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing as tp

import jax
import jax.numpy as jnp

from nnxlite._base.errors import path_text, warn_user
from nnxlite._base.jax import jaxpr_as_fun
from nnxlite._base.statics import alike
from nnxlite.boundary._call_def import CallDef, Inner, describe, enter, leaf_names, template_of
from nnxlite.boundary._inputs import leaves_of_code
from nnxlite.boundary._labels import Carry, is_setting, refuse_foreign_axes, settings_in
from nnxlite.boundary._leave import code_text, edits_text, node_text, result_words, tree_difference
from nnxlite.boundary._out import Fixed, Outputs, Source, pick
from nnxlite.graph._defs import ObjectDef, StaticDef
from nnxlite.graph._rebuild import ArrayCode, Code, ContainerCode, NodeCode, Path
from nnxlite.variables._definition import MISSING, VariableDef
from nnxlite.variables._kinds import RngCount, RngState


class Body:
    """A traced function of leaves.

    Attributes:
        definition: what leaves it.
        shapes: its outputs, abstract.
        jaxpr: what was traced.
        consts: the arrays that it captured.
        more: what else the traced function gave; see `trace_body`.
    """

    def __init__(self, closed: tp.Any, out: tp.Any) -> None:
        self.more, self.shapes = out[0].value, tp.cast(Outputs, out[1])
        self.definition = self.shapes.definition
        self.jaxpr = closed
        self.consts: list[tp.Any] = [*closed.consts]
        self._treedef = jax.tree_util.tree_structure(self.shapes)

    def __call__(self, leaves: tp.Sequence[tp.Any]) -> Outputs:
        """Run the body on leaves of the structure it was traced with."""
        return self.outputs(self.flat(*jax.tree_util.tree_leaves([*leaves])))

    def flat(self, *inputs: tp.Any) -> list[tp.Any]:
        """Run the body as a function of arrays: those of the leaves, and of what `more` gave."""
        return jaxpr_as_fun(self.jaxpr.jaxpr, self.consts)(*inputs)

    def outputs(self, values: tp.Iterable[tp.Any]) -> Outputs:
        """The outputs, from what `flat` returns or something else for each."""
        return jax.tree_util.tree_unflatten(self._treedef, values)

    def numbers(self) -> Outputs:
        """The outputs, with the position of each among those that `flat` returns."""
        return self.outputs(range(self._treedef.num_leaves))

    def accepts(self, leaves: tp.Sequence[tp.Any]) -> bool:
        """Whether the body was traced for leaves of these types."""
        types = [jax.typeof(x).str_short() for x in jax.tree_util.tree_leaves([*leaves])]
        return types == [aval.str_short() for aval in self.jaxpr.in_avals]


def trace_body(
    call: CallDef,
    fun: tp.Callable[..., tuple[Outputs, tp.Any]],
    leaves: tp.Sequence[tp.Any],
    *more: tp.Any,
    user: tp.Callable[..., tp.Any],
) -> Body:
    """Trace a function of objects as a function of leaves.

    Args:
        call: how the arguments are rebuilt, and their names for messages.
        fun: from the rebuilt arguments, their tree (and what `more` gives) to the outputs, and
            static data that the body then has as `more`.
        leaves: those of the arguments, possibly abstract.
        more: further arguments of the function.
        user: the function that JAX's messages speak of.
    """

    def run(leaves: list[tp.Any], more: tuple[tp.Any, ...]) -> tp.Any:
        tree, inner = enter(call, leaves)
        out, static = inner.run(fun, inner, tree, *more)
        return Fixed(static), out

    pairs = lambda leaves, more: [*zip(leaf_names(call), leaves), ("more", more)]
    body = describe(run, user, "run", pairs)
    closed, shapes = jax.make_jaxpr(body, return_shape=True)([*leaves], more)
    return Body(closed, shapes)


def with_type(start: tp.Any, end: tp.Any) -> tp.Any:
    """A carry leaf with the type that the body gives it, where a Python scalar would change it.

    Returns MISSING where no conversion keeps the type. Variables may contain pytrees; those are
    converted leaf by leaf.
    """
    leaves, treedef = jax.tree_util.tree_flatten(start)
    ends, end_treedef = jax.tree_util.tree_flatten(end)
    if treedef != end_treedef:
        return MISSING
    new = [*map(_promoted, leaves, ends)]
    return MISSING if any(x is MISSING for x in new) else jax.tree_util.tree_unflatten(treedef, new)


def _promoted(start: tp.Any, end: tp.Any) -> tp.Any:
    aval = jax.typeof(start) if not isinstance(start, jax.ShapeDtypeStruct) else start
    if tuple(aval.shape) == tuple(end.shape):
        if aval.dtype == end.dtype:
            return start
        if getattr(aval, "weak_type", False) and jnp.result_type(start, end.dtype) == end.dtype:
            return jnp.asarray(start, dtype=end.dtype)
    return MISSING


def numbered(tree: tp.Any) -> tp.Any:
    """A tree with the position of each leaf among its leaves."""
    return template_of(jax.tree_util.tree_structure(tree))


# Random streams that a transform broadcasts: each slice or iteration draws the same keys ------------


def is_random(call: CallDef, leaf: int) -> bool:
    """Whether a graph leaf is the key or the count of a random stream."""
    node = call.graphdef.decoded.leaf_nodes[leaf]
    kind = getattr(call.graphdef.decoded.node_defs[node], "type", None) if node >= 0 else None
    return isinstance(kind, type) and issubclass(kind, RngState)


def warn_of_streams(
    call: CallDef, leaves: tp.Iterable[int], warned: set[str], what: str, remedy: str
) -> None:
    """Warn once of each random stream that draws the same keys again.

    Not of the stream "carry": recurrent layers start every sequence with the same keys.

    Args:
        call: the arguments.
        leaves: the broadcast leaves that were written.
        warned: tags of the streams that the user was warned of.
        what: what happens to the stream.
        remedy: what to do instead.
    """
    decoded = call.graphdef.decoded
    for leaf in leaves:
        node = decoded.leaf_nodes[leaf]
        definition = decoded.node_defs[node]
        if not is_random(call, leaf) or not issubclass(definition.type, RngCount):
            continue
        tag = str(definition.metadata.get("tag", "default"))
        if tag != "carry" and tag not in warned:
            warned.add(tag)
            warn_user(f"The random stream {tag!r} {what} (the same dropout mask, say). {remedy}")


# Carries --------------------------------------------------------------------------------------------
#
# The values of a carry are carried by position.  An object or Variable that the body returns in
# its own position is the caller's: its new value is carried, and after the loop it has the value
# that the last iteration wrote.  In other positions the body may return new objects and Variables
# of the same kind; the next iteration gets their values.  After the loop, everything is where a
# single run of the body would have put it, with the last values.  An object of the carry cannot
# take the position of another.


def check_scan_axes(in_axes: tp.Any, out_axes: tp.Any) -> None:
    """Raise TypeError or ValueError for axes that `scan` cannot have."""
    counts: list[int] = []
    for what, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
        refuse_foreign_axes("scan", what, axes)
        parts = axes if isinstance(axes, tuple) else (axes,)
        counts.append(parts.count(Carry))
        nested = [part for part in parts if part is not Carry]
        if Carry in jax.tree_util.tree_leaves(nested, is_leaf=is_setting):
            raise ValueError(
                f"Carry must be at the top level, it cannot be nested. Found axes={axes!r}. "
                "Make the carry one argument (any pytree)."
            )
    for path, setting in jax.tree_util.tree_leaves_with_path(out_axes, is_leaf=is_setting):
        inside = [*settings_in(setting)]
        for word, refused in (("carry", Carry), ("broadcast", None)):
            if setting is not Carry and any(axis is refused for axis in inside):
                where = "".join(map(str, path))
                shown = f"out_axes={setting!r}" if setting is None else repr(setting)
                raise ValueError(
                    f"Cannot {word} output state. Got {shown} at: out_axes{where}. Every result of "
                    "an iteration needs an axis, or is the carry as a whole."
                )
    shown = f"in_axes={in_axes!r} and out_axes={out_axes!r}"
    if bool(counts[0]) != bool(counts[1]):
        raise ValueError(
            f"If one of in_axes or out_axes has Carry, the other must also have Carry. Got {shown}."
        )
    if max(counts) > 1:
        raise ValueError(
            f"Found multiple Carry definitions in {shown}. Make the carries one pytree."
        )


Slots: tp.TypeAlias = tuple[tuple[int, Source], ...]
"""The graph leaves of a carry whose values change, each with the source of its next value."""

_SAME_STRUCTURE = (
    "{} body function carry input and carry output must have the same pytree structure"
)
_SAME_REFERENCES = (
    "{} requires body function's input and output to have the same reference and pytree structure"
)
_CARRY_REFERENCES = "Carry references must be the same between iterations of {}"


def carried(
    loop: tuple[str, bool],
    inner: Inner,
    out: Outputs,
    carry: tuple[tp.Any, tp.Any],
    roles: tp.Sequence[tp.Any],
    of_new: tp.Sequence[tp.Any],
) -> tuple[Outputs, Slots]:
    """The outputs of a loop body with all values that the next iteration needs, and which these are.

    Args:
        loop: its name, and whether structure changes propagate.
        inner, out: its arguments, and the outputs of its body.
        carry: the carry among the arguments, and in the result, as trees of positions.
        roles: of the graph leaves: an axis, `Carry`, or None.
        of_new: of the new values.

    Raises ValueError or TypeError where the next iteration would have other objects than this one.
    """
    comparison = _Comparison(loop, inner.call, out, roles, of_new)
    comparison.compare(carry)
    sources = comparison.sources
    if not comparison.updates:  # structure changes of other arguments do not leave
        left = out.definition
        edits = tuple([edit for edit in left.edits if edit[0] in comparison.was])
        left = dataclasses.replace(left, edits=edits)
        out = out._replace(definition=left)
        if not left.restructures:
            arrays, written, _ = left.split(out.values)
            out = Outputs(left, [*arrays, *written])
    written = dict(zip(out.definition.written, out.written))
    for leaf in written:
        if roles[leaf] is Carry:
            sources.setdefault(leaf, leaf)
    slots = tuple((i, s) for i, s in sorted(sources.items()) if s != i or i in written)
    needed = {source for _, source in slots if source >= 0}
    written = {i: x for i, x in written.items() if i in needed or roles[i] is not Carry}
    written |= {i: inner.values[i] for i in needed - written.keys()}
    return out.with_written(written), slots


def next_values(slots: Slots, out: Outputs) -> list[tp.Any]:
    """The next values of the leaves that change, from the outputs of an iteration."""
    written = dict(zip(out.definition.written, out.written))
    return [pick(source, written, out.new) for _, source in slots]


class _Comparison:
    """A carry before and after an iteration, compared node by node; arguments as for `carried`.

    Leaves that have an axis may change: no iteration sees those of another.

    Attributes:
        name: `scan`, `while_loop` or `fori_loop`.
        updates: whether structure changes propagate; without, Variables must stay themselves.
        before, after: the graphs of the arguments, and of what leaves.
        sources: for each leaf of the carry the source of its next value.
        now, was: the new number of each node that was compared, and the old one.
        pending: pairs of codes with their path, and whether they are the carry itself, and not a part of
            its objects.
    """

    def __init__(
        self, loop: tuple[str, bool], call: CallDef, out: Outputs, roles: tp.Any, of_new: tp.Any
    ) -> None:
        self.name, self.updates = loop
        self.call, self.out, self.left = call, out, out.definition
        self.roles, self.of_new = roles, of_new
        self.before, self.after = call.graphdef.decoded, self.left.graphdef.decoded
        self.is_scan = self.name == "scan"
        self.sources: dict[int, Source] = {}
        self.now: dict[int, int] = {}
        self.was: dict[int, int] = {}
        self.pending: list[tuple[Code, Code, Path, bool]] = []

    def differ(self, what: str, references: bool = False, error: tp.Any = None) -> Exception:
        """The error for a carry that comes out in another structure: class and words of the reference.

        Args:
            what: what is different, and what to do instead.
            references: whether an object is not where it was: `scan` compares this first.
            error: another class for it.
        """
        first = self.name == "while_loop" or not self.updates
        if not (self.call.where and (first or (references and self.is_scan))):
            usual, start = TypeError, _SAME_STRUCTURE
        elif not self.is_scan:
            usual, start = ValueError, _SAME_REFERENCES
        else:
            usual, start = ValueError, _CARRY_REFERENCES if references else _SAME_STRUCTURE
        return (error or usual)(f"{start.format(self.name)}, but they differ: {what}")

    def puts(self, what: str, path: Path, references: bool = True) -> Exception:
        """The error for a body that puts something in the place of an object of the carry."""
        remedy = "Return each object of the carry where it came in, and write into it"
        return self.differ(
            f"the body puts {what} in the place of '{path_text(path)}'. {remedy} "
            "(variable[...] = value, nnx.update).",
            references,
        )

    def compare(self, carry: tuple[tp.Any, tp.Any]) -> None:
        """Compare the roots of the carry, and other arguments that have carried leaves."""
        before, paths = self.before.roots, self.call.root_paths()
        pairs = self.paired_roots(*carry)
        self.pending += [(before[a], self.left.roots[b], paths[a], True) for a, b in pairs]
        for root, code in enumerate(before if self.updates else ()):
            if root not in dict(pairs) and any(role is Carry for role in self.roles_at(code)):
                self.pending.append((code, self.after.roots[root], paths[root], False))
        for old, new, path, is_carry in self.pending:  # which grows
            if old == new and not self.left.restructures:
                continue
            error = None
            match old, new:
                case ContainerCode(), ContainerCode() if new.definition.matches(old.definition):
                    below = zip(old.codes, new.codes, old.definition.keys)
                    self.pending += [(a, b, (*path, key), is_carry) for a, b, key in below]
                case NodeCode(), NodeCode():
                    error = self.compare_nodes(old.number, new.number, path, is_carry)
                case ArrayCode(), ArrayCode():
                    if self.roles[old.leaf] is Carry:
                        self.sources[old.leaf] = self.left.sources[new.leaf]
                case StaticDef(), StaticDef() if alike(old.value, new.value):
                    pass
                case _:
                    error = self.became(old, new, path)
            if error is not None and (is_carry or not self.is_free(old, new)):
                raise error
        self.check_edits()

    def paired_roots(self, before: tp.Any, after: tp.Any) -> list[tuple[int, int]]:
        """The roots of the carry: the number of each among those of the arguments, and of the result.

        Raises ValueError or TypeError where the two are different pytrees.
        """
        call, where = self.call, (self.call.where, self.left.where)
        one, other = map(jax.tree_util.tree_structure, (before, after))
        positions = [jax.tree_util.tree_leaves(part) for part in (before, after)]
        if one != other:
            objects, news = dict(zip(where[0], self.before.roots)), result_words(call, self.out)
            name = lambda i: f"the {code_text(objects[i], self.before)}"
            words = [name(i) if i in objects else "an array" for i in positions[0]]
            difference = tree_difference(one, other, words, [news[i] for i in positions[1]])
            objects_stay = False  # and arrays became trees: of another class, as in the reference
            with contextlib.suppress(ValueError):
                parts = zip(positions[0], one.flatten_up_to(after))
                objects_stay = all(type(part) is int for at, part in parts if at in objects)
            is_type = objects_stay and not (self.is_scan and self.updates)
            error = TypeError if is_type else ValueError
            raise self.differ(f"the output is {difference}.", error=error)
        for old, new in zip(*positions):
            if (old in where[0]) != (new in where[1]):
                word = lambda is_object: "an object" if is_object else "an array"
                raise self.differ(
                    f"at '{path_text(call.paths()[old])}' the input is {word(old in where[0])}, the "
                    f"output {word(new in where[1])}. Return objects and Variables where they came in.",
                    references=True,
                )
        return [(where[0].index(a), where[1].index(b)) for a, b in zip(*positions) if a in where[0]]

    def compare_nodes(self, old: int, new: int, path: Path, is_carry: bool) -> Exception | None:
        """Compare two nodes; what is below them becomes pending. Returns the error if they differ."""
        if self.now.get(old, new) != new or self.was.get(new, old) != old:
            if self.left.origin[new] in (None, old):
                return self.differ(
                    "the body replaces a part of its carry that is shared with another, at "
                    f"'{path_text(path)}'. Replace it everywhere, or write into it.",
                )
        elif old in self.now:
            return None
        if self.left.origin[new] != old:
            error = self.other_node(old, new, path, is_carry)
            if error is not None:
                return error
        self.now[old], self.was[new] = new, old
        leaf = self.before.node_leaves[old]
        if leaf < 0:
            olds, news = self.attributes(old, new)
            self.pending += [(olds[n], news[n], (*path, n), False) for n in olds if n in news]
            return None
        source = self.left.sources[self.after.node_leaves[new]]
        if self.roles[leaf] is Carry:
            self.sources[leaf] = source
        elif self.roles[leaf] is None and source != leaf:
            return self.became(NodeCode(old), NodeCode(new), path)
        return None

    def other_node(self, old: int, new: int, path: Path, is_carry: bool) -> Exception | None:
        """The error for another node in the place of one, unless the next iteration may have it."""
        came = self.left.origin[new]
        known: tp.Any = self.before.node_defs[old]
        kind: tp.Any = self.after.node_defs[new]
        is_variable = self.before.node_leaves[old] >= 0
        if is_variable and isinstance(kind, VariableDef) and not self.updates:
            return ValueError(
                f"{self.name} Variable identity must be preserved across iterations, but the body puts "
                f"another Variable in the place of '{path_text(path)}'. With graph_updates=False (or "
                "graph=False) only values are carried: write into the Variable (variable[...] = value)."
            )
        if came is not None:
            return self.puts(node_text(self.call, came), path)
        if is_variable and (not isinstance(kind, VariableDef) or kind.is_ref):
            what = "a new Variable that lives in a reference"
            return self.puts(what, path, references=False)
        is_object = isinstance(known, ObjectDef) and isinstance(kind, ObjectDef)
        if is_carry and is_object and self.updates and self.name != "fori_loop":
            return self.puts(f"a new {kind.type.__name__}", path)
        # In `scan` static attributes may differ.
        form = lambda definition: (definition.type, definition.names.data)
        same = kind is known or (self.is_scan and is_object and form(known) == form(kind))
        return None if same else self.became(NodeCode(old), NodeCode(new), path)

    def check_edits(self) -> None:
        """Raise ValueError or TypeError where an object stays, and its attributes change.

        Without updates only the changes of the carry leave, and metadata.
        """
        left, every, leaf_of = self.left, self.updates, self.before.node_leaves
        changed = any(self.roles[leaf_of[old]] is Carry for old, _ in left.redefined)
        for number, names, removed in left.edits:
            if not (every or number in self.was):
                continue
            olds, news = self.attributes(tp.cast(int, left.origin[number]), number)
            same = number in self.was and not (every and self.name == "while_loop")
            compared = olds.keys() & news.keys() if same else ()
            for name in {*names, *removed}.difference(compared):
                old, new = olds.get(name), news.get(name)
                is_alias = old is None and new is not None and self.is_alias(new)
                changed |= not (is_alias or self.is_free(old, new))
        if changed:
            of = ", of an argument that is carried or broadcast" if self.is_scan else ""
            remedy = ", or give the argument an axis" if self.is_scan else ""
            raise self.differ(
                f"the body changes {edits_text(self.call, left)}{of}. Do this before the loop or "
                f"after it{remedy}.",
            )

    def attributes(self, old: int, new: int) -> tuple[dict[tp.Any, Code], dict[tp.Any, Code]]:
        """The data attributes of two objects."""
        return dict(self.before.below(NodeCode(old))), dict(self.after.below(NodeCode(new)))

    def is_alias(self, new: Code) -> bool:
        """Whether a new attribute in a `scan` is another name for Variables that stay where they are."""
        sources = [self.left.sources[leaf] for leaf, _ in leaves_of_code(self.after, new)]
        stay = all(s >= 0 and self.sources.get(s, s) == s for s in sources)
        constant = all(role is None for role in self.roles_at(None, new))
        return self.is_scan and stay and (self.updates or constant)

    def is_free(self, old: Code | None, new: Code | None) -> bool:
        """Whether all leaves in two attributes have an axis."""
        return self.is_scan and all(isinstance(role, int) for role in self.roles_at(old, new))

    def roles_at(self, old: Code | None, new: Code | None = None) -> list[tp.Any]:
        """The roles of the leaves in two attributes, one of the arguments and one that leaves."""
        before = leaves_of_code(self.before, old) if old is not None else ()
        after = leaves_of_code(self.after, new) if new is not None else ()
        sources = [self.left.sources[leaf] for leaf, _ in after]
        roles = [self.roles[leaf] for leaf, _ in before]
        return roles + [pick(source, self.roles, self.of_new) for source in sources]

    def became(self, old: Code, new: Code, path: Path) -> Exception:
        """The error for something else at a path."""
        texts = f"{code_text(old, self.before)} became {code_text(new, self.after)}"
        return self.differ(f"'{path_text(path)}': {texts}.", references=True)
