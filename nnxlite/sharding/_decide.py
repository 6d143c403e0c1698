"""What a plan means for one model: a spec and its reason for each array; `shard` puts arrays there.

Tensor parallelism divides a linear layer by columns (its output features; the result is divided too) or
by rows (its input features; the partial results are summed). A pair of them, up by columns and down by
rows, needs one sum and nothing else; so do attention heads with the projection after them. See M.
Shoeybi and others, "Megatron-LM: training multi-billion parameter language models using model
parallelism" (2019). The larger side is divided; axes are counted from the end, so that stacked layers
are divided like one of them.
"""

from __future__ import annotations

import difflib
import itertools
import math
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from nnxlite._base.errors import Modes, path_text, warn_user
from nnxlite._base.jax import is_tracing, key_name, new_ref
from nnxlite._base.text import mesh_text
from nnxlite._state._definition import from_flat_state
from nnxlite._state._flat import content
from nnxlite.boundary._body import Body
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._out import Fixed, replay
from nnxlite.checkpoint.patterns import Pattern
from nnxlite.graph._edit import update
from nnxlite.graph._kinds import Kind, kind_of
from nnxlite.graph._rebuild import Path
from nnxlite.graph._walk import find_duplicates, iter_graph
from nnxlite.nn import Conv, Embed, Linear, LinearGeneral, LoRA, MultiHeadAttention
from nnxlite.nn.lora_kernel import LoRAKernel, entries_of_matrices
from nnxlite.sharding._annotations import get_var_pspec, placed
from nnxlite.sharding._plan import (
    AnyMesh,
    Layout,
    Placement,
    Plan,
    PlanLike,
    Spec,
    as_plan,
    full_spec,
    names_in,
    spec_text,
    ways,
)
from nnxlite.transforms._call import Call
from nnxlite.transforms._wrapper import Options, unbind
from nnxlite.variables._definition import PLACEMENT
from nnxlite.variables._variable import Variable

__all__ = ["init_sharded", "plan_layout", "shard"]

M = tp.TypeVar("M")

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
    def whole(self) -> Path:
        """Its path with keys."""
        return (*self.path, *self.keys)


class Division(tp.NamedTuple):
    """How an array is divided."""

    spec: Spec
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
        adapted = isinstance(by_path.get(path[:-1]), LoRAKernel) and path[-1] in _ADAPTED
        place = path[:-1] if adapted else path
        layer, parent = by_path.get(place[:-1]), by_path.get(place[:-2])
        if isinstance(node, Variable):
            for keys, array in jax.tree_util.tree_flatten_with_path(content(node))[0]:
                if _is_array(array):
                    names = tuple(map(key_name, keys))
                    found.append(Leaf(path, names, array, node, layer, parent, place, rank))
        elif _is_array(node) and path[:-1] not in inside:
            found.append(Leaf(path, (), node, None, layer, parent, place, rank))
    return sorted(found, key=lambda leaf: [(str(type(k)), k) for k in leaf.path])


_ADAPTED = ("base", "original")  # what a `LoRAKernel` has in the place of its layer's kernel


def _rank(above: list[tp.Any]) -> int:
    if above and kind_of(above[-1]) == Kind.OBJECT:
        return IN_OBJECT
    in_tuple = any(isinstance(part, tuple) and hasattr(part, "_fields") for part in above)
    return IN_NAMED_TUPLE if in_tuple else IN_CONTAINER


def _is_array(value: tp.Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def paths_of(path: Path, duplicates: list[list[Path]]) -> list[Path]:
    """All paths of something, those that lead through a shared object included.

    Args:
        path: its first one.
        duplicates: the paths of what is shared, as `find_duplicates` gives them.
    """
    paths = [path]
    for first, *others in duplicates:
        if path[: len(first)] == first:
            paths += [other + path[len(first) :] for other in others]
    return paths


def matching(patterns: tp.Mapping[str, Pattern], names: tp.Sequence[str]) -> list[str]:
    """The texts of the patterns that match one of these names."""
    return [t for t, p in patterns.items() if any(p.match(name) is not None for name in names)]


def decide(tree: tp.Any, leaves: list[Leaf], mesh: AnyMesh, plan: Plan, caller: str) -> Layout:
    """The layout of the arrays of a tree.

    Raises ValueError for rules and annotations that do not fit, and for a plan that divides nothing.
    """
    ruled = _by_rules(tree, leaves, plan, mesh, caller)
    if not leaves:
        raise ValueError(f"{caller}: found no arrays in {type(tree).__name__}.")
    divisions = [
        ruled.get(number) or _division(leaf, plan, mesh, caller)
        for number, leaf in enumerate(leaves)
    ]
    _adapters_like_kernels(leaves, divisions)
    own = [division.final or any(division.spec) for division in divisions]
    divisions = [_with_fsdp(*pair, plan, mesh) for pair in zip(leaves, divisions)]
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
    shape, dtype = tuple(leaf.value.shape), jnp.result_type(leaf.value)  # float32 for float64
    size = math.prod(shape) * dtype.itemsize
    part = size // math.prod(ways(axes, mesh) for axes in division.spec)
    spec = PartitionSpec(*division.spec)
    return Placement(leaf.whole, shape, str(dtype), spec, size, part, division.why)


def _division(leaf: Leaf, plan: Plan, mesh: AnyMesh, caller: str) -> Division:
    """What annotations and the kind of layer say about an array."""
    shape, variable = leaf.value.shape, leaf.variable
    whole: Spec = (None,) * len(shape)
    if variable is not None and variable.sharding_names is not None and not leaf.keys:
        begin = f"{caller}: the annotation of {path_text(leaf.whole)}"
        return Division(full_spec(shape, get_var_pspec(variable) or (), mesh, begin), "annotation")
    if not shape:
        return Division((), "a scalar")
    if leaf.keys or variable is None:
        return Division(whole, "")
    axes, refused = plan.tensor, []
    for axis, why in _choices(leaf) if axes else ():
        if axis is None:
            return Division(whole, why)
        if shape[axis] % ways(axes, mesh) == 0:
            return Division(_with(whole, axis, axes), f"tensor: {why}")
        refused.append(f"{why}: {ways(axes, mesh)} does not divide {shape[axis]}")
    return Division(whole, "; ".join(refused))


def _choices(leaf: Leaf) -> list[tuple[int | None, str]]:
    """Axes along which a parameter of a layer may be divided, best first, and why.

    None for an axis: each device has the whole parameter. Nothing where the layer is not known.
    """
    layer, name = leaf.layer, path_text(leaf.place[-1:])  # the root itself has no name
    if isinstance(layer, Embed):
        return [(-2, "vocabulary"), (-1, "features")] if name == "embedding" else []
    if not isinstance(layer, (Linear, LinearGeneral, Conv)) or name not in ("kernel", "bias"):
        return []
    of_out, of_in = 1, 1  # how many axes of the kernel are features
    if isinstance(layer, LinearGeneral):
        of_out, of_in = len(layer.out_features), len(layer.axis)

    def rows(why: str) -> tuple[int | None, str]:
        return (-of_out - of_in, why) if name == "kernel" else (None, f"{why}: added to the sum")

    if isinstance(leaf.parent, MultiHeadAttention) and isinstance(layer, LinearGeneral):
        return [rows("heads") if leaf.place[-2] == "out" else (-of_out, "heads")]
    if isinstance(layer, Conv) and layer.feature_group_count != 1:
        return [(-of_out, "columns")]
    inputs, outputs = np.prod(layer.in_features), np.prod(layer.out_features)
    if outputs < inputs:
        return [rows("rows"), (-of_out, "columns")]
    why = "columns (square: a rule can divide rows)" if outputs == inputs else "columns"
    return [(-of_out, why), rows("rows")]


def _adapters_like_kernels(leaves: list[Leaf], divisions: list[Division]) -> None:
    """Divide the matrices of adapters like their kernels, where nothing of their own decides."""
    numbers = {leaf.path: i for i, leaf in enumerate(leaves) if not leaf.keys}
    for i, leaf in enumerate(leaves):
        if leaf.keys or leaf.path[-1:] not in (("lora_a",), ("lora_b",)) or divisions[i].why:
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


def _with(spec: Spec, axis: int, names: tp.Any) -> Spec:
    """A spec with another entry for one axis."""
    entries = list(spec)
    entries[axis] = names
    return tuple(entries)


def _with_fsdp(leaf: Leaf, division: Division, plan: Plan, mesh: AnyMesh) -> Division:
    """The division with one more axis divided by `fsdp`, if one can be divided equally."""
    spec, why, final = division
    shape, names, number = leaf.value.shape, names_in(plan.fsdp), ways(plan.fsdp, mesh)
    if not names and not final and not why and not any(spec):
        return Division(spec, f"plan: {plan}")
    used = {name for axes in spec for name in names_in(axes)}
    if final or not names or not shape or used & set(names):
        return division
    before = f"{why}; " if why else ""
    if jnp.issubdtype(leaf.value.dtype, jax.dtypes.prng_key):
        return Division(spec, f"{before}random keys")
    if (count := math.prod(shape)) < plan.min_size:
        return Division(spec, f"{before}{count:,} elements, min_size is {plan.min_size:,}")
    if isinstance(leaf.layer, Embed) and leaf.place[-1] == "embedding":
        return _embedding_with_fsdp(shape, division, plan, mesh)
    free = [axis for axis, part in enumerate(spec) if part is None and shape[axis] % number == 0]
    if not free:
        return Division(spec, f"{before}{number} divides no free axis of {shape}")
    axis = max(free, key=lambda axis: (shape[axis], -axis))
    return Division(_with(spec, axis, plan.fsdp), f"{why} + fsdp" if why and any(spec) else "fsdp")


def _embedding_with_fsdp(
    shape: tuple[int, ...], division: Division, plan: Plan, mesh: AnyMesh
) -> Division:
    """The division of a table with its rows divided by `fsdp`, as well as by `tensor`.

    Rows are looked up by a batch. Where their features are divided along the axes of the batch, the
    compiler divides the activations of all that follows like that, and no longer by examples: a GPT on
    4 x 2 devices exchanges more than twice the bytes.
    """
    spec, why, _ = division
    both = (*names_in(spec[-2]), *names_in(plan.fsdp))
    number = ways(both, mesh)
    if shape[-2] % number == 0:
        names = both if len(both) > 1 else plan.fsdp
        return Division(
            _with(spec, -2, names), f"{why} + fsdp" if any(spec) else "fsdp: vocabulary"
        )
    before = f"{why}; " if why else ""
    reason = f"{number} does not divide the vocabulary of {shape[-2]}"
    if spec[-1] is not None or shape[-1] % ways(plan.fsdp, mesh):
        return Division(spec, before + reason)
    why = (
        f"{before}fsdp: features, for {reason}. Pad it, or constrain the result of the embedding: "
        "jax.lax.with_sharding_constraint(x, layout.batch)"
    )
    return Division(_with(spec, -1, plan.fsdp), why)


# Rules -------------------------------------------------------------------------------------------


def _by_rules(
    tree: tp.Any, leaves: list[Leaf], plan: Plan, mesh: AnyMesh, caller: str
) -> dict[int, Division]:
    """The divisions of the arrays that rules are about, by their numbers.

    Raises ValueError for a rule that matches nothing or does not fit, and for two rules that divide one
    array in different ways; TypeError for a rule that is not a spec.
    """
    if not plan.rules:
        return {}
    patterns = {text: Pattern(text) for text in plan.rules}
    duplicates, in_container = find_duplicates(tree), isinstance(tree, (tuple, list, dict))
    matched, divisions = set[str](), dict[int, Division]()
    for number, leaf in enumerate(leaves):
        said: list[tuple[Path, str, Spec]] = []  # for each path the first rule that matches
        for path in paths_of(leaf.whole, duplicates):
            paths = [path]
            if leaf.place != leaf.path:  # a rule for a kernel is one for the base of its adapter
                paths.append(path[: len(path) - len(leaf.keys) - 1])
            paths += [inside[1:] for inside in paths if in_container]
            names = [path_text(one) for one in paths]
            matched.update(texts := matching(patterns, names))
            if texts:
                text = texts[0]
                spec = _spec_of_rule(path, text, plan.rules[text], leaf.value.shape, mesh, caller)
                said.append((path, text, spec))
        for path, text, spec in said:
            first, its_text, its_spec = said[0]
            if spec != its_spec:
                raise ValueError(
                    f"{caller}: {path_text(first)} and {path_text(path)} are one array, and two rules "
                    f"divide it in different ways: {its_text!r} says {spec_text(its_spec)}, "
                    f"{text!r} says {spec_text(spec)}. Give both the same, or take one "
                    "of the two rules away."
                )
            divisions[number] = Division(spec, f"rule {its_text}", final=True)
    for text in [text for text in patterns if text not in matched]:
        names = [path_text(leaf.whole) for leaf in leaves]
        near = difflib.get_close_matches(text, names[:1000], n=3, cutoff=0.3)
        listed = ", ".join(near or names[:MOST_REASONS])
        raise ValueError(
            f"{caller}: the rule {text!r} matches no array. "
            f"{'The nearest paths are' if near else 'There are'} {listed}. `*` stands for text "
            "within one segment, `**` for any number of segments."
        )
    return divisions


def _spec_of_rule(
    path: Path, text: str, rule: tp.Any, shape: tuple[int, ...], mesh: AnyMesh, caller: str
) -> Spec:
    if rule is not None and not isinstance(rule, (tuple, list, PartitionSpec)):
        raise TypeError(
            f"{caller}: the rule {text!r} has to be a PartitionSpec or a tuple of mesh axes, such as "
            f"(None, 'model'), or None for an array that every device has as a whole; got {rule!r}."
        )
    return full_spec(shape, rule or (), mesh, f"{caller}: the rule {text!r} for {path_text(path)}")


# Arrays that belong to parameters ------------------------------------------------------------------


def _follow_parameters(leaves: list[Leaf], divisions: list[Division], own: list[bool]) -> None:
    """Divide what belongs to a parameter like the parameter: moments, averages, gradients.

    Such an array is outside of the model's objects (its rank is higher), its path ends like the
    parameter's, and it has the same shape. A rule or an annotation of its own takes precedence.
    """
    parameters: dict[tuple[Path, tuple[int, ...], int], int] = {}  # the first of each rank
    for i in sorted(range(len(leaves)), key=lambda i: leaves[i].rank):
        whole, shape, rank = leaves[i].whole, leaves[i].value.shape, leaves[i].rank
        ends = [(whole[start:], shape) for start in range(len(whole))]
        below = [(*end, lower) for end in ends for lower in range(rank)]
        found = next((parameters[end] for end in below if end in parameters), None)
        if found is not None and shape and not own[i]:
            divisions[i] = divisions[found]._replace(why="like its parameter")
        for end in ends:
            parameters.setdefault((*end, rank), i)


# Putting arrays there ------------------------------------------------------------------------------


def plan_layout(tree: tp.Any, mesh: AnyMesh, plan: PlanLike) -> Layout:
    """The sharding that `shard` would give each array of a model on a mesh. Nothing is moved.

    Args:
        tree: a module, also an abstract one of `nnx.eval_shape`; or a tuple of objects, such as
            `(model, optimizer)`: the optimizer's state is divided like the parameters.
        mesh: the devices; a `jax.sharding.AbstractMesh` stands for devices that this machine lacks.
        plan: "data", "fsdp", "tensor", a combination such as "fsdp+tensor", a mapping from
            patterns of paths to specs, or a `Plan`.

    Returns:
        A `Layout`, which prints as a table.

    Raises:
        ValueError: for a mesh axis that does not exist or does not divide an array equally, a rule that
            matches nothing, rules that disagree about a shared Variable, or a plan that divides nothing.
        TypeError: if `mesh` is not a mesh, or `plan` not a plan.

    >>> import nnxlite as nnx, jax
    >>> mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    >>> build = lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0))
    >>> nnx.plan_layout(nnx.eval_shape(build), mesh, "fsdp+tensor").bytes_per_device
    2105344
    """
    return _decided(tree, mesh, plan, "plan_layout")[1]


def _decided(tree: tp.Any, mesh: AnyMesh, plan: PlanLike, caller: str) -> tuple[list[Leaf], Layout]:
    leaves = leaves_of(tree)
    return leaves, decide(tree, leaves, mesh, as_plan(plan, mesh, caller), caller)


def shard(tree: tp.Any, mesh: AnyMesh, plan: PlanLike) -> Layout:
    """Put the arrays of a model on a mesh, in place, as a plan says.

    Each Variable keeps its spec as metadata, and a jitted function that writes the Variable leaves the
    new value where the old one was. Arrays that are in the right place already are not moved. If an
    array is refused, none is moved.

    Args:
        tree: a module, or a tuple of objects such as `(model, optimizer)`. An optimizer that is made
            afterwards is laid out like its model. In an abstract model (of `nnx.eval_shape`) each
            `jax.ShapeDtypeStruct` gets its sharding; to be filled by `nnx.checkpoint.restore` or
            `nnx.load_safetensors`, which read straight into it.
        mesh: the devices.
        plan: as for `plan_layout`.

    Returns:
        A `Layout`, which says where each array is and prints as a table.

    Raises:
        ValueError: as `plan_layout`; and inside a transform.
        TypeError: as `plan_layout`; and for arrays on an abstract mesh.

    >>> import nnxlite as nnx
    >>> mesh = nnx.make_mesh(data=-1)
    >>> model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    >>> layout = nnx.shard(model, mesh, "fsdp")
    >>> tuple(model.kernel.value.sharding.spec)
    ('data',)
    """
    if is_tracing():
        raise ValueError(
            "shard: an array inside a transform has no placement yet. Call it outside, or build the "
            "model by nnx.init_sharded."
        )
    leaves, layout = _decided(tree, mesh, plan, "shard")
    if isinstance(mesh, jax.sharding.Mesh):
        _warn_of_explicit_axes(layout)
    else:
        for leaf, entry in zip(leaves, layout):
            if not isinstance(leaf.value, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"shard: {entry.name} is an array, and an abstract mesh has no devices for it. Give "
                    "a jax.sharding.Mesh, or only ask for the layout: nnx.plan_layout."
                )
    new = [placed(leaf.value, layout.sharding_of(entry)) for leaf, entry in zip(leaves, layout)]
    _write(tree, leaves, layout, new)
    return layout


def _warn_of_explicit_axes(layout: Layout) -> None:
    if AxisType.Explicit in layout.mesh.axis_types and not all(
        entry.is_replicated for entry in layout
    ):
        warn_user(
            f"shard: the axes of the mesh ({mesh_text(layout.mesh)}) are explicit, which is the default "
            "of jax.make_mesh: JAX then refuses operations on divided arrays for which it cannot tell "
            "the sharding of the result. Make the mesh by nnx.make_mesh, with automatic axes, unless "
            "the model is written for explicit ones."
        )


def _write(tree: tp.Any, leaves: list[Leaf], layout: Layout, new: list[tp.Any]) -> None:
    """Put new arrays in the place of the old ones, and each spec into the metadata of its Variable."""
    moved = [(leaf, value) for leaf, value in zip(leaves, new) if value is not leaf.value]
    if bare := {leaf.path: value for leaf, value in moved if leaf.variable is None}:
        update(tree, from_flat_state(bare))  # first: it refuses arrays in tuples
    for _, same in itertools.groupby(zip(leaves, layout, new), lambda each: id(each[0].variable)):
        group = list(same)
        leaf, entry, _ = group[0]
        if (variable := leaf.variable) is None:
            continue
        if any(value is not old.value for old, _, value in group):
            values = iter([value for _, _, value in group])
            swap = lambda x, values=values: next(values) if _is_array(x) else x
            raw = jax.tree.map(swap, content(variable))
            variable.set_raw_value(new_ref(raw) if variable.ref else raw)
        spec = tuple([entry.spec for _, entry, _ in group]) if leaf.keys else entry.spec
        if variable.get_metadata().get(PLACEMENT) != spec:
            variable.set_metadata(PLACEMENT, spec)


def init_sharded(build: tp.Callable[[], M], mesh: jax.sharding.Mesh, plan: PlanLike) -> M:
    """The model that a function builds, with every array created where a plan puts it.

    The function runs in one compiled program, in which each device computes its own part of each array;
    none of them ever contains the whole model.

    Args:
        build: a function without arguments that returns a model, or a tuple such as
            `(model, optimizer)`. The optimizer's state is divided like the parameters.
        mesh: the devices.
        plan: as for `plan_layout`.

    Returns:
        What `build()` returns. `nnx.shard(model, mesh, plan)` then moves nothing, and returns the
        layout.

    Raises:
        ValueError: as `plan_layout`; and inside a transform.
        TypeError: as `plan_layout`.

    >>> import nnxlite as nnx
    >>> mesh = nnx.make_mesh(data=-1)
    >>> model = nnx.init_sharded(lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0)), mesh, "fsdp")
    >>> tuple(model.kernel.value.sharding.spec)
    ('data',)
    """
    if is_tracing():
        raise ValueError("init_sharded: call it outside of transforms, or only build() inside.")
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"init_sharded: the mesh has to be a jax.sharding.Mesh, got {mesh!r}.")
    options = Options.of("init_sharded", Modes.of(None, None))
    call = Call(options, unbind(build), (), {}, captured=True, read_only=True)
    closed, shapes = jax.make_jaxpr(call.run_out, return_shape=True)(call.leaves)
    body = Body(closed, (Fixed(None), shapes))  # `build` runs once
    arguments = call.definition.build(call.leaves), call.definition.trees
    leaves, layout = _decided(replay(Inputs(*arguments), shapes), mesh, plan, "init_sharded")
    known = {id(leaf.value): layout.sharding_of(entry) for leaf, entry in zip(leaves, layout)}
    shardings = [known.get(id(shape)) for shape in jax.tree.leaves(shapes)]
    made = jax.jit(body.flat, out_shardings=shardings)(*jax.tree.leaves(call.leaves))
    model = replay(Inputs(*arguments), body.outputs(made))
    leaves = leaves_of(model)
    _write(model, leaves, layout, [leaf.value for leaf in leaves])
    return model
