"""What a plan means for one model: a spec, and the reason for it, for each array."""

from __future__ import annotations

import difflib
import math
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from nnxlite._base.jax import key_name
from nnxlite._base.text import mesh_text
from nnxlite._state._walk import content
from nnxlite.graph._kinds import OBJECT, kind_of
from nnxlite.graph._rebuild import Path
from nnxlite.graph._walk import find_duplicates, iter_graph
from nnxlite.layouts._layers import by_columns, by_rows, choices, is_linear
from nnxlite.layouts._layout import Layout
from nnxlite.layouts._placement import Placement
from nnxlite.layouts._plan import WORDS, AnyMesh, Plan, Rule, names_in
from nnxlite.layouts._specs import names_in_spec, spec_text, ways
from nnxlite.nn import Embed, Linear, LoRA
from nnxlite.nn.lora_kernel import LoRAKernel, entries_of_matrices
from nnxlite.sharding import get_var_pspec
from nnxlite.training.patterns import Pattern
from nnxlite.variables._variable import Variable

MOST_REASONS = 5
"""How many arrays a message lists."""


IN_OBJECT, IN_CONTAINER, IN_NAMED_TUPLE = range(3)
"""Where an array is: in a module or other object; in a State, dict or other plain container; in a named
tuple, as the states of optax are. An array follows one of a lower rank, see `_follow_parameters`."""


class Leaf(tp.NamedTuple):
    """An array of a model, real or abstract.

    Attributes:
        path: of its Variable, or of the array itself; the first one, if there are several.
        keys: within the Variable's value, if that is a pytree.
        value: the array.
        variable: its Variable, if it has one.
        layer: the object that contains the Variable; for a kernel with an adapter its layer.
        parent: the object that contains the layer.
        place: where the Variable is, or the adapted kernel that it is the base of.
        rank: IN_OBJECT, IN_CONTAINER or IN_NAMED_TUPLE.
    """

    path: Path
    keys: tuple[tp.Any, ...]
    value: tp.Any
    variable: Variable[tp.Any] | None
    layer: tp.Any
    parent: tp.Any
    place: Path
    rank: int

    @property
    def name(self) -> str:
        """Its path with keys, joined by dots."""
        return ".".join(map(str, (*self.path, *self.keys)))


class Division(tp.NamedTuple):
    """How an array is divided."""

    spec: tuple[tp.Any, ...]
    why: str
    final: bool = False  # whether fsdp must not change it


def leaves_of(tree: tp.Any) -> list[Leaf]:
    """Every array of the objects in a tree, once."""
    nodes = list(iter_graph(tree))
    by_path = dict(nodes)
    found: list[Leaf] = []
    inside = {path for path, node in nodes if isinstance(node, Variable)}
    for path, node in nodes:
        rank = _rank([by_path.get(path[:end]) for end in range(len(path))])
        adapted = isinstance(by_path.get(path[:-1]), LoRAKernel) and path[-1] in (
            "base",
            "original",
        )
        place = path[:-1] if adapted else path
        layer, parent = by_path.get(place[:-1]), by_path.get(place[:-2])
        if isinstance(node, Variable):
            for keys, array in jax.tree_util.tree_flatten_with_path(content(node))[0]:
                if is_array(array):
                    names = tuple(map(key_name, keys))
                    found.append(Leaf(path, names, array, node, layer, parent, place, rank))
        elif is_array(node) and path[:-1] not in inside:
            found.append(Leaf(path, (), node, None, layer, parent, place, rank))
    return sorted(found, key=lambda leaf: [(str(type(k)), k) for k in leaf.path])


def _rank(above: list[tp.Any]) -> int:
    if above and kind_of(above[-1]) == OBJECT:
        return IN_OBJECT
    in_tuple = any(isinstance(part, tuple) and hasattr(part, "_fields") for part in above)
    return IN_NAMED_TUPLE if in_tuple else IN_CONTAINER


def paths_of(leaf: Leaf, duplicates: list[list[Path]]) -> list[Path]:
    """All paths of an array; those that lead through a shared object, too.

    Args:
        leaf: the array.
        duplicates: the paths of what is shared, as `find_duplicates` gives them.
    """
    whole = (*leaf.path, *leaf.keys)
    paths = [whole]
    for first, *others in duplicates:
        if leaf.path[: len(first)] == first:
            paths += [other + whole[len(first) :] for other in others]
    return paths


def is_array(value: tp.Any) -> bool:
    """Whether a value is an array that can lie on devices, or describes one."""
    return isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def decide(tree: tp.Any, leaves: list[Leaf], mesh: AnyMesh, plan: Plan, caller: str) -> Layout:
    """The layout of the arrays of a tree.

    Raises ValueError for rules and annotations that do not fit, and for a plan that divides nothing.
    """
    rules = Rules(tree, leaves, plan, mesh, caller)
    if not leaves:
        raise ValueError(f"{caller}: there are no arrays in {type(tree).__name__}.")
    divisions = [_division(leaf, plan, mesh, rules, caller) for leaf in leaves]
    _adapters_like_kernels(leaves, divisions)
    own = [bool(division.final or any(division.spec)) for division in divisions]
    divisions = [
        division if division.final else _with_fsdp(leaf, division, plan, mesh)
        for leaf, division in zip(leaves, divisions)
    ]
    _follow_parameters(leaves, divisions, own)
    entries = tuple(_placement(*pair, mesh) for pair in zip(leaves, divisions))
    asked = plan.fsdp or plan.tensor
    if asked and all(entry.is_replicated for entry in entries):
        reasons = "".join(
            f"\n  {entry.name} {entry.shape}: {entry.why}" for entry in entries[:MOST_REASONS]
        )
        raise ValueError(
            f"{caller}: the plan ({plan}) divides none of the {len(entries)} arrays:{reasons}\n"
            "Change sizes or min_size, add rules for the paths, or use the plan 'data'."
        )
    return Layout(mesh, plan, entries)


def _placement(leaf: Leaf, division: Division, mesh: AnyMesh) -> Placement:
    spec = PartitionSpec(*division.spec)
    shape = tuple(leaf.value.shape)
    size = math.prod(shape) * leaf.value.dtype.itemsize
    return Placement(
        (*leaf.path, *leaf.keys),
        shape,
        str(leaf.value.dtype),
        spec,
        size,
        size // ways(spec, mesh),
        division.why,
    )


def _division(leaf: Leaf, plan: Plan, mesh: AnyMesh, rules: Rules, caller: str) -> Division:
    """What rules, annotations and the kind of layer say about an array."""
    shape = leaf.value.shape
    whole = (None,) * len(shape)
    ruled = rules.division(leaf)
    if ruled is not None:
        return ruled
    if leaf.variable is not None and leaf.variable.sharding_names is not None and not leaf.keys:
        spec = tuple(get_var_pspec(leaf.variable) or ())
        checked = check_spec(leaf.name, shape, spec, mesh, caller, "its annotation")
        return Division(checked, "annotation")
    if not shape:
        return Division((), "a scalar")
    if leaf.keys or leaf.variable is None:
        return Division(whole, "")
    name = str(leaf.place[-1])
    axes, found = plan.tensor, []
    if axes is not None:
        layer_name = leaf.place[-2] if len(leaf.place) > 1 else None
        found = choices(name, leaf.layer, layer_name, leaf.parent, shape)
    refused = []
    for axis, why in found:
        if axis is None:
            return Division(whole, why)
        size, number = shape[axis], ways(PartitionSpec(axes), mesh)
        if size % number == 0:
            return Division(_along(shape, axis, axes), f"tensor: {why}")
        refused.append(f"{why}: {number} does not divide {size}")
    return Division(whole, "; ".join(refused))


def _adapters_like_kernels(leaves: list[Leaf], divisions: list[Division]) -> None:
    """Divide the matrices of adapters like their kernels, where nothing of their own decides."""
    numbers = {leaf.path: i for i, leaf in enumerate(leaves) if not leaf.keys}
    for i, leaf in enumerate(leaves):
        if leaf.keys or leaf.path[-1] not in ("lora_a", "lora_b") or divisions[i].why:
            continue
        if isinstance(leaf.layer, LoRAKernel):
            base, outputs = numbers.get((*leaf.path[:-1], "base")), leaf.layer.outputs
        elif isinstance(leaf.layer, LoRA) and isinstance(leaf.parent, Linear):
            base, outputs = numbers.get((*leaf.path[:-2], "kernel")), 1
        else:
            continue
        if base is None or not any(divisions[base].spec):
            continue
        stacked = len(leaf.value.shape) - 2
        both = entries_of_matrices(divisions[base].spec, stacked, outputs)
        spec = both[leaf.path[-1] == "lora_b"]
        divisions[i] = Division(spec, "like its kernel", divisions[base].final)


def _along(shape: tuple[int, ...], axis: int, names: tp.Any) -> tuple[tp.Any, ...]:
    spec: list[tp.Any] = [None] * len(shape)
    spec[axis] = names
    return tuple(spec)


def _with_fsdp(leaf: Leaf, division: Division, plan: Plan, mesh: AnyMesh) -> Division:
    """The division with one more axis divided by `fsdp`, if one can be divided equally."""
    spec, why, _ = division
    shape = leaf.value.shape
    if plan.fsdp is None:
        return division if why or any(spec) else Division(spec, f"plan: {plan}")
    if not shape:
        return division
    number = ways(PartitionSpec(plan.fsdp), mesh)
    used = set(names_in_spec(PartitionSpec(*spec)))
    if used & set(names_in(plan.fsdp)):
        return division
    before = f"{why}; " if why else ""
    if jnp.issubdtype(leaf.value.dtype, jax.dtypes.prng_key):
        return Division(spec, f"{before}random keys")
    count = math.prod(shape)
    if count < plan.min_size:
        return Division(spec, f"{before}{count:,} elements, min_size is {plan.min_size:,}")
    if isinstance(leaf.layer, Embed) and leaf.place[-1] == "embedding":
        return _embedding_with_fsdp(leaf, division, plan, mesh)
    free = [axis for axis, part in enumerate(spec) if part is None and shape[axis] % number == 0]
    if not free:
        return Division(spec, f"{before}{number} divides no free axis of {shape}")
    axis = max(free, key=lambda axis: (shape[axis], -axis))
    divided = (*spec[:axis], plan.fsdp, *spec[axis + 1 :])
    return Division(divided, f"{why} + fsdp" if why and any(spec) else "fsdp")


def _embedding_with_fsdp(leaf: Leaf, division: Division, plan: Plan, mesh: AnyMesh) -> Division:
    """The division of a table with its rows divided by `fsdp`, as well as by `tensor`.

    Rows are looked up by a batch. Where their features are divided along the axes of the batch, the
    compiler divides the activations of all that follows like that, and no longer by examples: a GPT on
    4 x 2 devices exchanges more than twice the bytes.
    """
    spec, why, _ = division
    shape, rows = leaf.value.shape, leaf.value.ndim - 2
    both = (*names_in(spec[rows]), *names_in(plan.fsdp))
    number = ways(PartitionSpec(both), mesh)
    if shape[rows] % number == 0:
        divided = (*spec[:rows], both if len(both) > 1 else plan.fsdp, *spec[rows + 1 :])
        return Division(divided, f"{why} + fsdp" if any(spec) else "fsdp: vocabulary")
    number_of_features = ways(PartitionSpec(plan.fsdp), mesh)
    before = f"{why}; " if why else ""
    if spec[-1] is not None or shape[-1] % number_of_features:
        return Division(spec, f"{before}{number} does not divide the vocabulary of {shape[rows]}")
    why = (
        f"{before}fsdp: features, for {number} does not divide the vocabulary of {shape[rows]}. Pad it, "
        "or constrain the result of the embedding: jax.lax.with_sharding_constraint(x, layout.batch)"
    )
    return Division((*spec[:-1], plan.fsdp), why)


def check_spec(
    name: str,
    shape: tuple[int, ...],
    spec: tp.Sequence[tp.Any],
    mesh: AnyMesh,
    caller: str,
    what: str,
) -> tuple[tp.Any, ...]:
    """A spec with an entry for each array axis.

    Raises ValueError where it does not fit the array or the mesh.
    """
    begin = f"{caller}: {name} has shape {tuple(shape)}, and {what} is {tuple(spec)}"
    if len(spec) > len(shape):
        raise ValueError(
            f"{begin}: {len(spec)} entries. Give one name (or None) for each array axis."
        )
    used: set[str] = set()
    for axis, part in enumerate(spec):
        for mesh_axis in names_in(part):
            if mesh_axis not in mesh.axis_names:
                near = difflib.get_close_matches(str(mesh_axis), mesh.axis_names, n=1)
                hint = f" (is {near[0]!r} meant?)" if near else ""
                raise ValueError(
                    f"{begin}: the mesh has the axes {mesh_text(mesh)}, and no {mesh_axis!r}{hint}. "
                    "Logical names are mapped to mesh axes by nnx.logical_axis_rules."
                )
            if mesh_axis in used:
                raise ValueError(f"{begin}: {mesh_axis!r} is used twice. Divide one axis by it.")
            used.add(mesh_axis)
        number = ways(PartitionSpec(part), mesh)
        if shape[axis] % number:
            raise ValueError(
                f"{begin}: {number} devices ({part!r}) cannot divide axis {axis} of size {shape[axis]} "
                "equally. Divide another axis, or change the size."
            )
    parts = [tuple(part) if isinstance(part, list) else part for part in spec]
    return (*parts, *[None] * (len(shape) - len(parts)))


# Rules -------------------------------------------------------------------------------------------


class Rules:
    """The rules of a plan, applied to the paths of one tree."""

    def __init__(
        self, tree: tp.Any, leaves: list[Leaf], plan: Plan, mesh: AnyMesh, caller: str
    ) -> None:
        self._rules = [(Pattern(text), rule) for text, rule in plan.rules.items()]
        self._plan, self._mesh, self._caller = plan, mesh, caller
        self._in_container = isinstance(tree, (tuple, list, dict))
        self._duplicates = find_duplicates(tree) if self._rules else []
        self._found: dict[Path, tuple[str, Rule]] = {}  # what the first rule for a path says
        matched: set[str] = set()
        for leaf in leaves if self._rules else ():
            for path in paths_of(leaf, self._duplicates):
                self._find(path, matched, leaf)
        self._check_all_match(leaves, matched)

    def _find(self, path: Path, matched: set[str], leaf: Leaf) -> None:
        paths = [path]
        if leaf.place != leaf.path:  # a rule for a kernel is one for the base of its adapter
            paths.append(path[: len(path) - len(leaf.keys) - 1])
        if self._in_container:
            paths += [inside[1:] for inside in paths]
        names = [".".join(map(str, one)) for one in paths]
        for pattern, rule in self._rules:
            if any(pattern.match(name) is not None for name in names):
                matched.add(pattern.text)
                self._found.setdefault(path, (pattern.text, rule))

    def _check_all_match(self, leaves: list[Leaf], matched: set[str]) -> None:
        for pattern, _ in self._rules:
            if pattern.text not in matched:
                names = [leaf.name for leaf in leaves]
                near = difflib.get_close_matches(pattern.text, names[:1000], n=3, cutoff=0.3)
                listed = ", ".join(near or names[:MOST_REASONS])
                raise ValueError(
                    f"{self._caller}: the rule {pattern.text!r} matches no array. "
                    f"{'The nearest paths are' if near else 'There are'} {listed}. `*` stands for text "
                    "within one segment, `**` for any number of segments."
                )

    def division(self, leaf: Leaf) -> Division | None:
        """What the rules say about an array.

        Raises ValueError where they say different things about paths of one array, or what does not fit.
        """
        found: dict[Path, tuple[str, Division]] = {}
        for path in paths_of(leaf, self._duplicates) if self._rules else ():
            if path in self._found:
                text, rule = self._found[path]
                found[path] = text, self._division(leaf, path, text, rule)
        if not found:
            return None
        (first, (text, division)), *others = found.items()
        for path, (other_text, other) in others:
            if other.spec != division.spec:
                one, two = (".".join(map(str, p)) for p in (first, path))
                raise ValueError(
                    f"{self._caller}: {one} and {two} are one array, and two rules divide it in "
                    f"different ways: {text!r} says {spec_text(PartitionSpec(*division.spec))}, "
                    f"{other_text!r} says {spec_text(PartitionSpec(*other.spec))}. Give both the "
                    "same, or take one of the two rules away."
                )
        return division

    def _division(self, leaf: Leaf, path: Path, text: str, rule: Rule) -> Division:
        shape, caller = leaf.value.shape, self._caller
        name = ".".join(map(str, path))
        why = f"rule {text}"
        if rule is None or rule == "replicated":
            return Division((None,) * len(shape), why, final=True)
        if isinstance(rule, str):
            rule, why = self._in_words(leaf, name, text, rule), f"{why}: {rule}"
        if not isinstance(rule, (tuple, list, PartitionSpec)):
            raise TypeError(
                f"{caller}: the rule {text!r} has to be a PartitionSpec, a tuple of mesh axes, None or "
                f"one of {', '.join(map(repr, WORDS))}, got {rule!r}."
            )
        spec = check_spec(name, shape, tuple(rule), self._mesh, caller, f"the rule {text!r}")
        return Division(spec, why, final=True)

    def _in_words(self, leaf: Leaf, name: str, text: str, word: str) -> tuple[tp.Any, ...]:
        caller, tensor = self._caller, self._plan.tensor
        if word not in WORDS:
            raise ValueError(
                f"{caller}: the rule {text!r} says {word!r}; it can be one of "
                f"{', '.join(map(repr, WORDS))}, or a spec such as ({word!r}, None)."
            )
        if tensor is None:
            raise ValueError(
                f"{caller}: the rule {text!r} says {word!r}, and the plan has no mesh axis for "
                "'tensor'. Give one: nnx.Plan(tensor=..., rules=...)."
            )
        if not is_linear(leaf.layer) or str(leaf.place[-1]) not in ("kernel", "bias"):
            raise ValueError(
                f"{caller}: the rule {text!r} says {word!r} of {name}, which is not the kernel or bias "
                f"of a linear layer but in {type(leaf.layer).__name__}. Give a spec."
            )
        way = by_columns if word == "column" else by_rows
        axis = way(str(leaf.place[-1]), leaf.layer).axis
        shape = leaf.value.shape
        return (None,) * len(shape) if axis is None else _along(shape, axis, tensor)


# Arrays that belong to parameters ------------------------------------------------------------------


def _follow_parameters(leaves: list[Leaf], divisions: list[Division], own: list[bool]) -> None:
    """Divide what belongs to a parameter like the parameter: moments, averages, gradients.

    Such an array is outside of the model's objects (its rank is higher), its path ends like the
    parameter's, and it has the same shape. A rule or an annotation of its own takes precedence.
    """
    parameters: dict[tuple[Path, tuple[int, ...]], int] = {}
    for i in sorted(range(len(leaves)), key=lambda i: leaves[i].rank):
        whole, shape = (*leaves[i].path, *leaves[i].keys), leaves[i].value.shape
        ends = [(whole[start:], shape) for start in range(len(whole))]
        found = next((parameters[end] for end in ends if end in parameters), None)
        if found is not None and leaves[found].rank < leaves[i].rank and shape and not own[i]:
            divisions[i] = divisions[found]._replace(why="like its parameter")
        for end in ends:
            parameters.setdefault(end, i)
