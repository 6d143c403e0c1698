"""Bodies of loops and branches: traced once to find out what they write, then run as often as needed.

A loop must know its carry, and a branch must know what the other branches write, before JAX sees
either.  So the user function is traced to a jaxpr first.  The trace shows what the function writes, and
the loop runs the jaxpr: the user's Python code runs once.
"""

from __future__ import annotations

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp

from nnxlite._base.errors import path_text, warn_user
from nnxlite._base.jax import jaxpr_as_fun
from nnxlite._base.statics import alike
from nnxlite.boundary._call_def import CallDef, Inner, describe, enter, leaf_names, template_of
from nnxlite.boundary._labels import leaves_of_code
from nnxlite.boundary._leave import leave, only_structure_of
from nnxlite.boundary._out import Fixed, OutDef, Outputs, Source, pick
from nnxlite.boundary._prefixes import Carry
from nnxlite.boundary._refusals import (
    argument_words,
    code_text,
    edits_text,
    node_text,
    refuse_foreign_outputs,
    result_words,
    structure_error,
    tree_difference,
)
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
        self._avals = closed.in_avals

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
        flat = jax.tree_util.tree_leaves([*leaves])
        return len(flat) == len(self._avals) and all(
            jax.typeof(x).str_short() == aval.str_short() for x, aval in zip(flat, self._avals)
        )


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
        out, static = fun(inner, tree, *more)
        return Fixed(static), out

    pairs = lambda leaves, more: [*zip(leaf_names(call), leaves), ("more", more)]
    body = describe(run, user, "run", pairs)
    closed, shapes = jax.make_jaxpr(body, return_shape=True)([*leaves], more)
    return Body(closed, shapes)


def body_outputs(inner: Inner, result: tp.Any, structure: bool, captured: bool = False) -> Outputs:
    """What leaves a body with this result; see `leave`. Arrays of the arguments in it are new arrays.

    Raises TypeError where it returned or stored something that JAX cannot return.
    """
    out = leave(inner, result, structure=structure, captured=captured)
    refuse_foreign_outputs(inner.call, out)
    return with_arrays(inner, out)


def with_arrays(inner: Inner, out: Outputs) -> Outputs:
    """The outputs, with arrays of the arguments that are in the result as new arrays.

    Arrays have no identity: a result with an array that came in is the same as one with a copy.
    """
    left, decoded = out.definition, out.definition.graphdef.decoded
    if not left.restructures:
        return out
    sources, more, count = list(left.sources), list[tp.Any](), len(out.new)
    for leaf, source in enumerate(sources):
        root = decoded.path(decoded.leaf_frames[leaf])[0]
        if source >= 0 and decoded.leaf_nodes[leaf] < 0 and root >= left.first_result:
            sources[leaf] = ~(count + len(more))
            more.append(inner.values[source])
    return Outputs(dataclasses.replace(left, sources=tuple(sources)), [*out.values, *more])


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


Slots: tp.TypeAlias = tuple[tuple[int, Source], ...]
"""The graph leaves of a carry whose values change, each with the source of its next value."""

Pairs: tp.TypeAlias = list[tuple[int, int]]
"""The roots of a carry: the number of each among those of the arguments, and of the result."""


class LoopKind(tp.NamedTuple):
    """A kind of loop, for what its body may do and for messages.

    Attributes:
        name: `scan`, `while_loop` or `fori_loop`.
        updates: whether structure changes propagate; without, Variables must stay themselves.
    """

    name: str
    updates: bool

    def differ(self, call: CallDef, what: str, references: bool = False) -> Exception:
        """The error for a carry that comes out in another structure: class and words of the reference.

        Args:
            call: the arguments.
            what: what is different, and what to do instead.
            references: whether an object is not where it was: `scan` compares this first.
        """
        first = self.name == "while_loop" or not self.updates
        is_scan = self.name == "scan"
        if not (call.where and (first or (references and is_scan))):
            error, start = TypeError, _SAME_STRUCTURE
        elif not is_scan:
            error, start = ValueError, _SAME_REFERENCES
        else:
            error, start = ValueError, _CARRY_REFERENCES if references else _SAME_STRUCTURE
        return error(f"{start.format(self.name)}, but they differ: {what}")


_SAME_STRUCTURE = (
    "{} body function carry input and carry output must have the same pytree structure"
)
_SAME_REFERENCES = (
    "{} requires body function's input and output to have the same reference and pytree structure"
)
_CARRY_REFERENCES = "Carry references must be the same between iterations of {}"


def paired_roots(
    loop: LoopKind, call: CallDef, out: Outputs, before: tp.Any, after: tp.Any
) -> Pairs:
    """The roots of a carry before and after an iteration.

    Args:
        loop, call, out: the loop, its arguments, and the outputs of its body.
        before, after: the carry among the arguments, and in the result: positions for leaves.

    Raises ValueError or TypeError where the two are different pytrees.
    """
    where = call.where, out.definition.where
    structures = [jax.tree_util.tree_structure(part) for part in (before, after)]
    positions = [jax.tree_util.tree_leaves(part) for part in (before, after)]
    if structures[0] != structures[1]:
        words = argument_words(call), result_words(call, out)
        shown = tuple([w[i] for i in at] for w, at in zip(words, positions))
        error: type[Exception] = ValueError
        if not (loop.name == "scan" and loop.updates):
            roots = {i for i, position in enumerate(positions[0]) if position in where[0]}
            error = structure_error(structures[0], structures[1], roots)
        difference = tree_difference(structures[0], structures[1], tp.cast(tp.Any, shown))
        raise error(*loop.differ(call, f"the output is {difference}.").args)
    for old, new in zip(*positions):
        if (old in where[0]) != (new in where[1]):
            sides = ["an object", "an array"][:: 1 if old in where[0] else -1]
            raise loop.differ(
                call,
                f"at '{path_text(call.paths()[old])}' the input is {sides[0]}, the output {sides[1]}. "
                "Return objects and Variables where they came in.",
                references=True,
            )
    return [(where[0].index(a), where[1].index(b)) for a, b in zip(*positions) if a in where[0]]


def carried(
    loop: LoopKind,
    inner: Inner,
    out: Outputs,
    pairs: Pairs,
    roles: tp.Sequence[tp.Any],
    fresh: tp.Sequence[tp.Any],
) -> tuple[Outputs, Slots]:
    """The outputs of a loop body with all values that the next iteration needs, and which these are.

    Args:
        loop, inner, out: the loop, its arguments, and the outputs of its body.
        pairs: see `paired_roots`.
        roles: of the graph leaves: an axis, `Carry`, or None.
        fresh: of the new values.

    Raises ValueError or TypeError where the next iteration would have other objects than this one.
    """
    comparison = _Comparison(loop, inner.call, out.definition, roles, fresh)
    comparison.compare(pairs)
    if not loop.updates:
        out = only_structure_of(inner.call, out, comparison.backward)
    comparison.check_edits(out.definition)
    places = comparison.places
    written = dict(zip(out.definition.written, out.written))
    for leaf in written:
        if roles[leaf] is Carry:
            places.setdefault(leaf, leaf)
    slots = tuple((i, s) for i, s in sorted(places.items()) if s != i or i in written)
    needed = {source for _, source in slots if source >= 0}
    written = {i: x for i, x in written.items() if i in needed or roles[i] is not Carry}
    written |= {i: inner.values[i] for i in needed - written.keys()}
    return out.with_written(written), slots


def next_values(slots: Slots, out: Outputs) -> list[tp.Any]:
    """The next values of the leaves that change, from the outputs of an iteration."""
    written = dict(zip(out.definition.written, out.written))
    return [pick(source, written, out.new) for _, source in slots]


class _Comparison:
    """A carry before and after an iteration, compared node by node.

    Attributes:
        compares_references: whether objects must keep what they refer to, as in the reference.
        places: for each carried leaf the source of its next value.
        forward, backward: the new number of each node that was compared, and the old one.
    """

    def __init__(
        self,
        loop: LoopKind,
        call: CallDef,
        left: OutDef,
        roles: tp.Sequence[tp.Any],
        fresh: tp.Sequence[tp.Any],
    ) -> None:
        self.loop, self.call, self.left, self.roles, self.fresh = loop, call, left, roles, fresh
        self.before, self.after = call.graphdef.decoded, left.graphdef.decoded
        self.compares_references = loop.name == "while_loop" and loop.updates
        self.places: dict[int, Source] = {}
        self.forward: dict[int, int] = {}
        self.backward: dict[int, int] = {}

    def compare(self, pairs: Pairs) -> None:
        """Compare the roots of the carry, and other arguments that have carried leaves."""
        paths, arguments, results = self.call.root_paths(), self.after.roots, self.left.roots
        # With each pair of codes, whether it is the carry itself, and not a part of its objects.
        pending = [(self.before.roots[a], results[b], paths[a], True) for a, b in pairs]
        for root, code in enumerate(self.before.roots if self.loop.updates else ()):
            if root not in dict(pairs) and any(r is Carry for r in self._roles(code)):
                pending.append((code, arguments[root], paths[root], False))
        for old, new, path, is_top in pending:  # which grows
            if old == new and not self.left.restructures:
                continue
            match old, new:
                case ContainerCode(), ContainerCode() if new.definition.matches(old.definition):
                    below = zip(old.codes, new.codes, old.definition.keys)
                    pending += [(a, b, (*path, key), is_top) for a, b, key in below]
                    continue
                case _, NodeCode(number) if is_top and self._is_new_object(number):
                    raise self._renewed(self.after.node_defs[number].type.__name__, path)
                case NodeCode(), NodeCode():
                    problem = self._compare_nodes(old.number, new.number, path, pending)
                case ArrayCode(), ArrayCode():
                    problem = None
                    if self.roles[old.leaf] is Carry:
                        self.places[old.leaf] = self.left.sources[new.leaf]
                case StaticDef(), StaticDef() if alike(old.value, new.value):
                    problem = None
                case _:
                    problem = self._became(old, new, path)
            if problem is not None and not self._is_free(old, new):
                raise problem

    def _is_new_object(self, number: int) -> bool:
        """Whether `scan` refuses a node in the place of the carry."""
        is_new = (
            isinstance(self.after.node_defs[number], ObjectDef) and self.left.origin[number] is None
        )
        return is_new and self.loop.name == "scan" and self.loop.updates

    def _renewed(self, kind: str, path: Path, references: bool = True) -> Exception:
        """The error for a new object in the place of one of the carry."""
        return self.loop.differ(
            self.call,
            f"the body puts a new {kind} in the place of '{path_text(path)}'. Update the old one in "
            "place (variable[...] = value, nnx.update).",
            references,
        )

    def _compare_nodes(
        self, old: int, new: int, path: Path, pending: list[tuple[Code, Code, Path, bool]]
    ) -> Exception | None:
        """Compare two nodes; what is below them becomes pending. Returns the error if they differ."""
        if self.forward.get(old, new) != new or self.backward.get(new, old) != old:
            if self.left.origin[new] in (None, old):
                return self.loop.differ(
                    self.call,
                    f"the body replaces a part of its carry that is shared with another, at "
                    f"'{path_text(path)}'. Replace it everywhere, or write into it.",
                )
        elif old in self.forward:
            return None
        came, is_variable = self.left.origin[new], self.before.node_leaves[old] >= 0
        known, kind = self.before.node_defs[old], self.after.node_defs[new]
        if came != old:
            if is_variable and isinstance(kind, VariableDef) and not self.loop.updates:
                return ValueError(
                    f"{self.loop.name} Variable identity must be preserved across iterations, but the "
                    f"body puts another Variable in the place of '{path_text(path)}'. With "
                    "graph_updates=False (or graph=False) only values are carried: write into the "
                    "Variable (variable[...] = value)."
                )
            if came is not None:
                return self.loop.differ(
                    self.call,
                    f"the body puts {node_text(self.call, came)} in the place of "
                    f"{node_text(self.call, old)}. Return each object of the carry where it came in "
                    "(nnx.update writes into it), or exchange their values.",
                    references=True,
                )
            if is_variable and (not isinstance(kind, VariableDef) or kind.is_ref):
                return self._renewed("Variable that lives in a reference", path, references=False)
            if not (kind is known or self._differs_in_statics_alone(known, kind)):
                return self._became(NodeCode(old), NodeCode(new), path)
        self.forward[old], self.backward[new] = new, old
        if is_variable:
            leaf = self.before.node_leaves[old]
            source = self.left.sources[self.after.node_leaves[new]]
            if self.roles[leaf] is Carry:
                self.places[leaf] = source
            elif self.roles[leaf] is None and source != leaf:
                return self._became(NodeCode(old), NodeCode(new), path)
        else:
            olds, news = self._attributes(old, new)
            for code in news.values() if came is None and self.compares_references else ():
                moved = self.left.origin[code.number] if isinstance(code, NodeCode) else None
                if moved is not None:
                    return self.loop.differ(
                        self.call,
                        f"the body puts {node_text(self.call, moved)} into a new object. Return the "
                        "objects of the carry themselves, or new Variables.",
                        references=True,
                    )
            pending += [(olds[n], news[n], (*path, n), False) for n in olds if n in news]
        return None

    def _attributes(self, old: int, new: int) -> tuple[dict[tp.Any, Code], dict[tp.Any, Code]]:
        """The data attributes of two objects."""
        return dict(self.before.below(NodeCode(old))), dict(self.after.below(NodeCode(new)))

    def _differs_in_statics_alone(self, known: tp.Any, kind: tp.Any) -> bool:
        both = isinstance(known, ObjectDef) and isinstance(kind, ObjectDef)
        same = both and known.type is kind.type and known.layout.data == kind.layout.data
        return self.loop.name == "scan" and same

    def check_edits(self, left: OutDef) -> None:
        """Raise ValueError or TypeError where an object stays, and its attributes change."""
        is_scan = self.loop.name == "scan"
        changed = any(self.roles[self.before.node_leaves[old]] is Carry for old, _ in left.kinds)
        for number, names, removed in left.edits:
            olds, news = self._attributes(tp.cast(int, left.origin[number]), number)
            same = number in self.backward and not self.compares_references
            compared = olds.keys() & news.keys() if same else ()
            for name in {*names, *removed}.difference(compared):
                old, new = olds.get(name), news.get(name)
                is_alias = old is None and new is not None and self._is_alias(new)
                changed |= not (is_alias or self._is_free(old, new))
        if changed:
            of = ", of an argument that is carried or broadcast" if is_scan else ""
            remedy = ", or give the argument an axis" if is_scan else ""
            raise self.loop.differ(
                self.call,
                f"the body changes {edits_text(self.call, left)}{of}. Do this before the loop or "
                f"after it{remedy}.",
            )

    def _is_alias(self, new: Code) -> bool:
        """Whether a new attribute in a `scan` is another name for Variables that stay where they are."""
        sources = [self.left.sources[leaf] for leaf, _ in leaves_of_code(self.after, new)]
        stay = all(s >= 0 and self.places.get(s, s) == s for s in sources)
        constant = all(role is None for role in self._roles(None, new))
        return self.loop.name == "scan" and stay and (self.loop.updates or constant)

    def _is_free(self, old: Code | None, new: Code | None) -> bool:
        """Whether all leaves in two attributes have an axis: no iteration sees those of another."""
        every = all(isinstance(role, int) for role in self._roles(old, new))
        return self.loop.name == "scan" and every

    def _roles(self, old: Code | None, new: Code | None = None) -> list[tp.Any]:
        """The roles of the leaves in two attributes, one of the arguments and one that leaves."""
        before = leaves_of_code(self.before, old) if old is not None else ()
        after = leaves_of_code(self.after, new) if new is not None else ()
        sources = [self.left.sources[leaf] for leaf, _ in after]
        return [self.roles[leaf] for leaf, _ in before] + [
            pick(source, self.roles, self.fresh) for source in sources
        ]

    def _became(self, old: Code, new: Code, path: Path) -> Exception:
        texts = f"{code_text(old, self.before)} became {code_text(new, self.after)}"
        return self.loop.differ(self.call, f"'{path_text(path)}': {texts}.", references=True)
