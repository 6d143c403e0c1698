"""Sharding annotations of Variables: names of mesh (or logical) axes, and the shardings they mean.

An annotation is the metadata entry `out_sharding` of a Variable: one axis name, tuple of names or
None for each array axis.  Without a mesh it is only metadata.  With one, a Variable is sharded when it
is created (`use_eager_sharding`), under `jit` as well, so parameters are never on one device only.
A `NamedSharding`, or a `Format` with one, is an annotation that includes its mesh.

Names may be logical: `logical_axis_rules`, or the entry `sharding_rules`, map them to mesh axes.
"""

from __future__ import annotations

import contextlib
import functools
import typing as tp

import jax
from jax.experimental.layout import Format, with_layout_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnxlite._base.errors import GRAPH_MODE, Setting
from nnxlite._base.jax import constrained, current_mesh, is_ref, is_tracing
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._labels import broadcast, by_path, labels
from nnxlite.graph._walk import iter_graph
from nnxlite.transforms._call import positional
from nnxlite.transforms._wrapper import name_of
from nnxlite.variables._definition import MISSING, PARTITION_NAME, VariableMetadata, plug
from nnxlite.variables._definition import add_axis as _add_axis
from nnxlite.variables._definition import remove_axis as _remove_axis
from nnxlite.variables._kinds import with_metadata
from nnxlite.variables._variable import Variable, is_variable

__all__ = ["get_named_sharding", "get_partition_spec", "logical_axis_rules", "transform_metadata"]
__all__ += ["with_partitioning"]

Rules = tp.Sequence[tuple[str, tp.Any]]
Names = tp.Sequence[tp.Any]
A = tp.TypeVar("A")
P = tp.ParamSpec("P")
F = tp.TypeVar("F", bound=tp.Callable[..., tp.Any])

LOGICAL_AXIS_RULES: Setting[tuple[tuple[str, tp.Any], ...]] = Setting("logical_axis_rules", ())
"""The pairs that `logical_axis_rules` sets."""


# What an annotation means ------------------------------------------------------------------------


@contextlib.contextmanager
def logical_axis_rules(rules: Rules) -> tp.Iterator[None]:
    """Within the block (or the decorated function), map logical axis names to mesh axes.

    Rules of an outer block do not apply in an inner one; the last rule for a name applies.

    Args:
        rules: pairs (logical name, mesh axis, tuple of mesh axes, or None).

    Returns:
        A context manager, which is a decorator too.

    Raises:
        ValueError: for a rule that is not a pair.

    >>> import nnxlite as nnx
    >>> with nnx.logical_axis_rules([("embed", None), ("mlp", "model")]):
    ...     v = nnx.Param(nnx.initializers.zeros_init()(None, (2, 4)), sharding=("embed", "mlp"))
    ...     tuple(nnx.get_partition_spec(v).value)
    (None, 'model')
    """
    with LOGICAL_AXIS_RULES.scope(tuple(rule_pairs(rules))):
        yield


def rule_pairs(rules: Rules) -> tp.Iterator[tuple[str, tp.Any]]:
    """The rules as pairs; raises ValueError for one that is not a pair."""
    for rule in rules:
        if not isinstance(rule, (tuple, list)) or len(rule) != 2:
            raise ValueError(
                f"A logical axis rule is a pair (logical name, mesh axis), got {rule!r}; for "
                "several mesh axes write (name, (axis, axis))."
            )
        name, axis = rule
        yield name, tuple(axis) if isinstance(axis, list) else axis


def _rules_for(metadata: tp.Mapping[str, tp.Any]) -> dict[str, tp.Any]:
    """The rules of the current block and of the Variable itself.

    Raises ValueError if the two disagree.
    """
    current = dict(LOGICAL_AXIS_RULES.get())
    own = dict(rule_pairs(metadata.get("sharding_rules") or ()))
    for name in own.keys() & current.keys():
        if own[name] != current[name]:
            raise ValueError(
                f"Inconsistent rules for the logical axis {name!r}: {current[name]!r} by "
                f"logical_axis_rules, {own[name]!r} by the Variable's sharding_rules. Keep one."
            )
    return {**current, **own}


class Annotation(tp.NamedTuple):
    """What the metadata of a Variable says about its sharding."""

    names: tp.Any
    mesh: tp.Any
    memory_kind: str | None = None
    layout: tp.Any = None


def annotation_of(metadata: tp.Mapping[str, tp.Any]) -> Annotation:
    """The annotation in metadata: names and mesh are two entries, or together in a `NamedSharding`."""
    given, layout = metadata.get("out_sharding"), None
    if isinstance(given, Format):
        given, layout = given.sharding, given.layout
    if isinstance(given, NamedSharding):
        return Annotation(given.spec, given.mesh, given.memory_kind, layout)
    return Annotation(given, metadata.get("mesh"), None, layout)


def spec_of(metadata: tp.Mapping[str, tp.Any]) -> PartitionSpec:
    """The PartitionSpec for a Variable's metadata; empty without an annotation.

    Raises ValueError for an annotation that is not a sequence of names, or rules that disagree.
    """
    names = annotation_of(metadata).names
    if names is None:
        return PartitionSpec()
    if isinstance(names, (str, jax.sharding.Sharding)):
        right = f"({names!r},)" if isinstance(names, str) else "a NamedSharding"
        raise ValueError(
            "A sharding annotation is one name (or None) for each array axis, got the "
            f"{type(names).__name__} {names!r}. Write {right}."
        )
    rules = _rules_for(metadata)
    return PartitionSpec(*[_resolve(name, rules) for name in names] if rules else names)


def _resolve(name: tp.Any, rules: tp.Mapping[str, tp.Any]) -> tp.Any:
    if not isinstance(name, (tuple, list)):
        return rules.get(name, name)
    axes: list[tp.Any] = []
    for part in name:
        axis = rules.get(part, part)
        axes += axis if isinstance(axis, tuple) else [axis]
    return tuple(axis for axis in axes if axis is not None) or None


def place(value: tp.Any, metadata: tp.Mapping[str, tp.Any]) -> tp.Any:
    """A new value, sharded as its annotation says; unchanged without a mesh or names.

    Raises ValueError if the annotation has too many axes, or an axis that the mesh does not have.
    """
    if not metadata.get("out_sharding") or not metadata.get("eager_sharding", True):
        return value
    annotation = annotation_of(metadata)
    mesh = annotation.mesh or current_mesh()
    if mesh is None or is_ref(value):
        return value
    spec = spec_of(metadata)
    check_spec(value, spec, mesh)
    mesh, spec = _without_manual(mesh, spec)
    if spec is None:
        return value
    sharding = NamedSharding(mesh, spec, memory_kind=annotation.memory_kind)
    put = lambda x: placed(x, sharding, annotation.layout) if hasattr(x, "shape") else x
    return jax.tree_util.tree_map(put, value)


def placed(value: tp.Any, sharding: NamedSharding, layout: tp.Any = None) -> tp.Any:
    """An array, abstract, traced or not, with this sharding; itself if that is so already."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    if is_tracing() or PartitionSpec.UNCONSTRAINED in sharding.spec:
        traced = constrained(value, sharding)
        return traced if layout is None else with_layout_constraint(traced, layout)
    if layout is None and getattr(value, "sharding", None) == sharding and value.committed:
        return value
    return jax.device_put(value, sharding if layout is None else Format(layout, sharding))


def _without_manual(mesh: tp.Any, spec: PartitionSpec) -> tuple[tp.Any, PartitionSpec | None]:
    """The mesh and spec inside `shard_map`, where a value is one shard and only other axes divide it."""
    here = jax.sharding.get_abstract_mesh()
    manual = {n for n, kind in zip(here.axis_names, here.axis_types) if kind is AxisType.Manual}
    if not manual:
        return mesh, spec
    left = []
    for part in spec:
        names = [n for n in (part if isinstance(part, tuple) else (part,)) if n not in manual]
        left.append(tuple(names) if isinstance(part, tuple) else next(iter(names), None))
    return here, PartitionSpec(*left) if any(left) else None


def check_spec(value: tp.Any, spec: PartitionSpec, mesh: tp.Any) -> None:
    """Raise ValueError if a spec has an axis that the mesh or a value of the tree does not have."""
    for leaf in jax.tree_util.tree_leaves(value):
        if hasattr(leaf, "shape") and len(spec) > len(leaf.shape):
            raise ValueError(
                f"Sharding annotation {tuple(spec)} has {len(spec)} axes, the value has shape "
                f"{tuple(leaf.shape)}. Give one name (or None) for each array axis."
            )
    named = [n for part in spec for n in (part if isinstance(part, tuple) else (part,))]
    unknown = [n for n in named if isinstance(n, str) and n not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"Sharding annotation {tuple(spec)} names {unknown}, which the mesh with axes "
            f"{tuple(mesh.axis_names)} does not have. Use its axes, or map logical names with "
            "nnx.logical_axis_rules."
        )


plug(place)


def with_partitioning(
    initializer: tp.Callable[P, A], sharding: Names, mesh: tp.Any = None, **metadata: tp.Any
) -> tp.Callable[P, VariableMetadata[A]]:
    """An initializer whose Variable carries a sharding annotation.

    Args:
        initializer: a function such as `nnx.initializers.normal()`.
        sharding: one axis name, tuple of names, or None for each array axis.
        mesh: the mesh to shard the value on; by default the current one at creation.
        metadata: further entries.

    Returns:
        An initializer of the same arguments, which returns a `VariableMetadata`.

    >>> import nnxlite as nnx
    >>> init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    >>> nnx.Linear(2, 4, kernel_init=init, rngs=nnx.Rngs(0)).kernel.sharding_names
    (None, 'model')
    """
    names = tuple(sharding) if isinstance(sharding, list) else sharding
    return with_metadata(initializer, out_sharding=names, mesh=mesh, **metadata)


# Reading annotations -----------------------------------------------------------------------------


def get_var_pspec(variable: Variable[tp.Any]) -> PartitionSpec | None:
    """The PartitionSpec of one Variable; None if it has neither annotation nor array.

    Args:
        variable: the Variable.

    Returns:
        A `PartitionSpec`, or None.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> v = nnx.Param(jnp.zeros((2, 4)), sharding=(None, "model"))
    >>> tuple(nnx.spmd.get_var_pspec(v))
    (None, 'model')
    """
    if variable.sharding_names is None and not hasattr(variable.get_raw_value(), "shape"):
        return None
    return spec_of(variable.get_metadata())


@tp.overload
def get_partition_spec(tree: jax.Array) -> PartitionSpec: ...
@tp.overload
def get_partition_spec(tree: Variable[tp.Any]) -> Variable[PartitionSpec]: ...
@tp.overload
def get_partition_spec(tree: A) -> A: ...
def get_partition_spec(tree: tp.Any) -> tp.Any:
    """The same tree with a `PartitionSpec` for each array; Variables keep their class and metadata.

    Args:
        tree: a module, a State, or any pytree.

    Returns:
        A tree of the same structure.

    >>> import nnxlite as nnx, jax
    >>> spec = nnx.get_partition_spec(nnx.Param(jax.numpy.ones(2))).value
    >>> spec == jax.sharding.PartitionSpec()
    True
    """

    def spec(x: tp.Any) -> tp.Any:
        if isinstance(x, Variable):
            return x.replace(get_var_pspec(x), _copy_ref=False) if not x.ref else get_var_pspec(x)
        return PartitionSpec() if hasattr(x, "shape") else None

    return jax.tree_util.tree_map(spec, tree, is_leaf=is_variable)


@tp.overload
def get_named_sharding(tree: jax.Array, mesh: tp.Any) -> NamedSharding: ...
@tp.overload
def get_named_sharding(tree: Variable[tp.Any], mesh: tp.Any) -> Variable[NamedSharding]: ...
@tp.overload
def get_named_sharding(tree: A, mesh: tp.Any) -> A: ...
def get_named_sharding(tree: tp.Any, mesh: tp.Any) -> tp.Any:
    """The same tree with a `NamedSharding` on `mesh` for each array.

    Args:
        tree: a module, a State, or any pytree.
        mesh: a `jax.sharding.Mesh`.

    Returns:
        A tree of the same structure.

    >>> import nnxlite as nnx, jax
    >>> mesh = jax.make_mesh((1,), ("model",))
    >>> bias = nnx.Param(jax.numpy.zeros(4), sharding=("model",))
    >>> nnx.get_named_sharding(bias, mesh).value.spec == jax.sharding.PartitionSpec("model")
    True
    """
    return jax.tree_util.tree_map(
        lambda spec: NamedSharding(mesh, spec),
        get_partition_spec(tree),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


# Axes that transforms add and remove -------------------------------------------------------------


def add_axis(tree: A, index: int, transform_metadata: tp.Mapping[str, tp.Any]) -> A:
    """Add an axis at `index` to the annotations of the Variables in a tree; returns the tree.

    Args:
        tree: a Variable, a State, a module, or any pytree of these.
        index: position of the new axis, from the end if negative.
        transform_metadata: `{nnx.PARTITION_NAME: name of the axis}`; other entries are names for the
            tuples that Variables have in their metadata under the same keys.

    Returns:
        The tree.

    Raises:
        ValueError: if the name is missing.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> v = nnx.Param(jnp.zeros((3, 2, 4)), sharding=(None, "model"))
    >>> nnx.spmd.add_axis(v, 0, {nnx.PARTITION_NAME: "layers"}).sharding_names
    ('layers', None, 'model')
    """
    return _changed(tree, index, transform_metadata, _add_axis)


def remove_axis(tree: A, index: int, transform_metadata: tp.Mapping[str, tp.Any]) -> A:
    """Remove the axis at `index` from the annotations of the Variables in a tree; returns the tree.

    Args:
        tree: a Variable, a State, a module, or any pytree of these.
        index: position of the axis, from the end if negative.
        transform_metadata: as for `add_axis`.

    Returns:
        The tree.

    Raises:
        ValueError: before any change, if a Variable has another name at that axis.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> v = nnx.Param(jnp.zeros((2, 4)), sharding=("layers", None, "model"))
    >>> nnx.spmd.remove_axis(v, 0, {nnx.PARTITION_NAME: "layers"}).sharding_names
    (None, 'model')
    """
    return _changed(tree, index, transform_metadata, _remove_axis)


Change: tp.TypeAlias = tp.Callable[[tp.Any, int, tp.Mapping[str, tp.Any]], None]
OPPOSITE: dict[Change, Change] = {_add_axis: _remove_axis, _remove_axis: _add_axis}


def _changed(tree: A, index: int, names: tp.Mapping[str, tp.Any], change: Change) -> A:
    if PARTITION_NAME not in names:
        raise ValueError(
            f"The name of the axis is missing: transform_metadata has no entry {PARTITION_NAME!r} "
            f"in {dict(names)}. Give {{nnx.PARTITION_NAME: name}}."
        )
    axes = [(node, index) for _, node in iter_graph(tree) if isinstance(node, Variable)]
    _change_all(axes, names, change)
    return tree


def _change_all(
    axes: tp.Sequence[tuple[Variable[tp.Any], int]], names: tp.Mapping[str, tp.Any], change: Change
) -> None:
    """Change the annotation of each Variable, or of none if one raises an error."""
    for done, (variable, axis) in enumerate(axes):
        try:
            change(variable, axis, names)
        except Exception:
            for other, its_axis in axes[:done]:
                OPPOSITE[change](other, its_axis, names)
            raise


@tp.overload
def transform_metadata(
    f: F, *, in_axes: tp.Any = 0, out_axes: tp.Any = 0, partition: str, graph: bool | None = None
) -> F: ...
@tp.overload
def transform_metadata(
    *, in_axes: tp.Any = 0, out_axes: tp.Any = 0, partition: str, graph: bool | None = None
) -> tp.Callable[[F], F]: ...
def transform_metadata(
    f: tp.Any = MISSING,
    *,
    in_axes: tp.Any = 0,
    out_axes: tp.Any = 0,
    partition: str,
    graph: bool | None = None,
) -> tp.Any:
    """Make a function change annotations as a transform over these axes would.

    Inside, the annotations of the arguments' Variables lack the axis named `partition`; afterwards
    they, and those of the result, have it. For use with JAX's own transforms, or without any.

    Args:
        f: the function; without it a decorator is returned.
        in_axes: for each argument an axis, None, or `StateAxes` to choose by Variable (a prefix).
        out_axes: the same for the result. A Variable of the arguments keeps its input axis.
        partition: name of the axis.
        graph: False refuses shared references.

    Returns:
        A function of the same arguments.

    Raises:
        ValueError: for prefixes that do not match, or an argument with another name at its axis;
            annotations have not changed then.
        TypeError: for Variables in an argument that can be given by keyword only.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> @nnx.transform_metadata(in_axes=(0, None), out_axes=None, partition="layers")
    ... def names(stacked, x):
    ...     return stacked.sharding_names
    >>> v = nnx.Param(jnp.zeros((3, 2, 4)), sharding=("layers", None, "model"))
    >>> names(v, 1.0), v.sharding_names
    ((None, 'model'), ('layers', None, 'model'))
    """
    if f is MISSING:
        return functools.partial(
            transform_metadata, in_axes=in_axes, out_axes=out_axes, partition=partition, graph=graph
        )
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    names = {PARTITION_NAME: partition}

    @functools.wraps(f)
    def wrapper(*args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        args, kwargs = _by_position(f, args, kwargs)
        came_in = _axes(args, in_axes, "in_axes", graph)
        mapped = [(v, axis) for v, axis in came_in if isinstance(axis, int)]
        _change_all(mapped, names, _remove_axis)
        try:
            out = f(*args, **kwargs)
            new = _axes(args, in_axes, "in_axes", graph) + _axes(out, out_axes, "out_axes", graph)
        finally:
            _change_all(mapped, names, _add_axis)
        known = {id(v) for v, _ in came_in}
        for variable, axis in new:
            if id(variable) not in known and isinstance(axis, int):
                _add_axis(variable, axis, names)
            known.add(id(variable))
        return out

    return wrapper


def _by_position(f: tp.Any, args: tp.Any, kwargs: tp.Any) -> tuple[tp.Any, tp.Any]:
    """Keyword arguments as positional ones, so that `in_axes` has an axis for each.

    Raises TypeError for one with Variables that cannot be positional.
    """
    args, kwargs = positional(f, args, kwargs, len(args) + len(kwargs))
    for name, value in kwargs.items():
        if any(isinstance(node, Variable) for _, node in iter_graph(value)):
            raise TypeError(
                f"The keyword argument {name!r} of {name_of(f)} contains Variables, and in_axes goes "
                "by position. Pass it as a positional argument."
            )
    return args, kwargs


def _axes(
    tree: tp.Any, prefix: tp.Any, what: str, graph: bool | None
) -> list[tuple[Variable[tp.Any], tp.Any]]:
    """Each Variable of a tree with its setting in a prefix."""
    inputs = Inputs(tree).in_mode(GRAPH_MODE.given(graph), "transform_metadata")
    call = inputs.define()
    settings = labels(call, broadcast(by_path(prefix), call.template(), what), what)
    numbers, nodes = call.graphdef.decoded.leaf_nodes, inputs.nodes()
    leaves = [(nodes[n], s) for n, s in zip(numbers, call.by_side(settings)[1]) if n >= 0]
    return [(node, setting) for node, setting in leaves if isinstance(node, Variable)]
