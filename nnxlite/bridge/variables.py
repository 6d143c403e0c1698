"""Variables of both worlds: leaves of Linen's collections, and Variables at the same paths.

A collection of Linen is a kind of Variable here, by the registered name: `params` is `Param`, and an
unknown collection becomes a new kind. A leaf without metadata is a bare value there; one with metadata
is in a box, an `AxisMetadata` of Flax: `nn.Partitioned` and its like where the Variable came from
one (the metadata entry `linen_meta_type`), else `NNXMeta`.
"""

from __future__ import annotations

import dataclasses
import typing as tp

import jax
import numpy as np
from flax import struct
from flax.core import meta

from nnxlite.graph._kinds import Kind, is_node, kind_of
from nnxlite.graph._walk import children_of_node
from nnxlite.sharding import get_partition_spec
from nnxlite.variables._definition import PARTITION_NAME, add_axis, normal_entries, remove_axis
from nnxlite.variables._kinds import (
    RngState,
    variable_name_from_type,
    variable_type_from_name,
    with_metadata,
)
from nnxlite.variables._variable import Variable, is_variable

A = tp.TypeVar("A")
Tree: tp.TypeAlias = dict[tp.Any, tp.Any]
Pairs: tp.TypeAlias = tp.Iterable[tuple[tuple[tp.Any, ...], tp.Any]]

BOX = "linen_meta_type"
"""The metadata entry with the class of the box that a Variable has in Linen."""

RENAMED = {"names": "out_sharding", "rules": "sharding_rules"}
"""Fields of Linen's boxes that have another name in metadata."""


class NNXMeta(struct.PyTreeNode, meta.AxisMetadata[A]):
    """The box of a Variable with metadata in the collections of Linen.

    Args:
        var_type: the class of the Variable.
        value: its value.
        metadata: its metadata.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> box = nnx.bridge.NNXMeta(nnx.Param, jnp.ones((2, 3)), {"out_sharding": (None, "model")})
    >>> box.to_nnx_variable().sharding_names, tuple(box.get_partition_spec())
    ((None, 'model'), (None, 'model'))
    """

    var_type: type[Variable[tp.Any]] = struct.field(pytree_node=False)
    value: tp.Any = struct.field(pytree_node=True)
    metadata: dict[str, tp.Any] = struct.field(pytree_node=False)

    def unbox(self) -> tp.Any:
        """The value."""
        return self.value

    def replace_boxed(self, val: tp.Any) -> tp.Any:
        """The same box around another value."""
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[tp.Any, tp.Any]) -> tp.Any:
        """The box after a lifted transform of Linen has added an axis: its sharding names have it."""
        variable = self._nnx_variable()
        add_axis(variable, index, {PARTITION_NAME: params.get(PARTITION_NAME)})
        return self.replace(metadata=variable.get_metadata(exclude_required=True))

    def remove_axis(self, index: int, params: dict[tp.Any, tp.Any]) -> tp.Any:
        """The box without an axis that has the name in `params`; unchanged where it has another."""
        variable = self._nnx_variable()
        names = variable.get_metadata("out_sharding", None)
        name = params.get(PARTITION_NAME)
        if isinstance(names, tuple) and names[index : index + 1] != (name,):
            return self
        remove_axis(variable, index, {PARTITION_NAME: name})
        return self.replace(metadata=variable.get_metadata(exclude_required=True))

    def get_partition_spec(self) -> jax.sharding.PartitionSpec:
        """The spec that `nnx.get_partition_spec` gives for the Variable."""
        return get_partition_spec(self._nnx_variable()).get_raw_value()

    def to_nnx_variable(self) -> Variable[tp.Any]:
        """The Variable."""
        return self.var_type(self.value, **self.metadata)

    def _nnx_variable(self) -> Variable[tp.Any]:
        """A Variable with this metadata, which runs no callback and is placed on no mesh."""
        return self.var_type.from_metadata(self.value, normal_entries(self.metadata))


def is_vanilla_variable(vs: Variable[tp.Any]) -> bool:
    """Whether a Variable has no metadata, so that Linen sees its bare value.

    >>> import nnxlite as nnx
    >>> nnx.bridge.variables.is_vanilla_variable(nnx.Param(1)), nnx.bridge.variables.is_vanilla_variable(
    ...     nnx.Param(1, tag="a")
    ... )
    (True, False)
    """
    return not vs.get_metadata(exclude_required=True)


def to_linen_var(vs: Variable[tp.Any]) -> tp.Any:
    """The leaf of a Linen collection for a Variable: its bare value, or a box with its metadata.

    Args:
        vs: the Variable.

    Returns:
        The value; in an `NNXMeta`, or the box of Linen that the Variable came from, if it has metadata.

    >>> import nnxlite as nnx, flax.linen as nn
    >>> w = nnx.bridge.variables.to_nnx_var("params", nn.Partitioned(1.0, names=("model",)))
    >>> nnx.bridge.variables.to_linen_var(w)
    Partitioned(value=1.0, names=('model',), mesh=None)
    """
    value = vs.get_raw_value()
    metadata = vs.get_metadata(exclude_required=True)
    if not metadata:
        return value
    box = metadata.get(BOX)
    if box is None:
        return NNXMeta(type(vs), value, metadata)
    fields = [(f.name, RENAMED.get(f.name, f.name)) for f in dataclasses.fields(box) if f.init]
    given = {name: metadata[entry] for name, entry in fields if entry in metadata}
    return box(**{**given, "value": value})


def to_nnx_var(col: str, x: tp.Any) -> Variable[tp.Any]:
    """The Variable for a leaf of a Linen collection; the inverse of `to_linen_var`.

    Args:
        col: the collection.
        x: a value, or a box of Linen.

    Returns:
        A Variable of the kind registered for the collection; an unknown one is registered.

    Raises:
        ValueError: for an `NNXMeta` of a kind that belongs to another collection.

    >>> import nnxlite as nnx
    >>> nnx.bridge.variables.to_nnx_var("batch_stats", 3)
    BatchStat(
      value=3
    )
    """
    kind = variable_type_from_name(col, allow_register=True)
    if isinstance(x, NNXMeta):
        if x.var_type is not kind:
            raise ValueError(
                f"The collection {col!r} is for {kind.__name__}, and has an NNXMeta of "
                f"{x.var_type.__name__}. Put it into the collection of its kind, or register the "
                "kind for this one with nnx.register_variable_name."
            )
        return x.to_nnx_variable()
    if not (isinstance(x, meta.AxisMetadata) and dataclasses.is_dataclass(x)):
        return kind(x)
    metadata = {RENAMED.get(f.name, f.name): getattr(x, f.name) for f in dataclasses.fields(x)}
    return kind(metadata.pop("value", None), **{**metadata, BOX: type(x)})


def with_partitioning(
    fn: tp.Callable[..., tp.Any],
    names: tuple[str | None, ...],
    mesh: jax.sharding.Mesh | None = None,
) -> tp.Callable[..., tp.Any]:
    """An initializer whose Variable has sharding names, and is an `nn.Partitioned` in Linen.

    Args:
        fn: an initializer.
        names: the mesh axis, or None, for each axis of the value.
        mesh: the mesh, if it is to be that of the Variable.

    Returns:
        An initializer of the same arguments.

    >>> import nnxlite as nnx, jax
    >>> init = nnx.bridge.with_partitioning(nnx.initializers.ones_init(), (None, "model"))
    >>> box = nnx.bridge.variables.to_linen_var(nnx.Param(init(jax.random.key(0), (2, 4))))
    >>> type(box).__name__, box.names
    ('Partitioned', (None, 'model'))
    """
    return with_metadata(fn, out_sharding=names, mesh=mesh, **{BOX: meta.Partitioned})


def get_col_name(keypath: tp.Sequence[tp.Any]) -> str:
    """The collection of a leaf in Linen's variables: the first key of its path.

    >>> import nnxlite as nnx, jax
    >>> [(path, _)] = jax.tree_util.tree_leaves_with_path({"params": {"kernel": 1.0}})
    >>> nnx.bridge.variables.get_col_name(path)
    'params'
    """
    if not keypath or not isinstance(keypath[0], jax.tree_util.DictKey):
        raise ValueError(
            "The path of a leaf in Linen's variables begins with the name of a collection, as "
            f"DictKey('params'), got {keypath!r}."
        )
    return str(keypath[0].key)


def sort_variable_types(types: tp.Iterable[type]) -> list[type]:
    """Classes of Variables with subclasses before their bases, so that the first match is the nearest.

    >>> import nnxlite as nnx
    >>> kinds = [nnx.Variable, nnx.RngKey, nnx.Param]
    >>> [t.__name__ for t in nnx.bridge.variables.sort_variable_types(kinds)]
    ['RngKey', 'Param', 'Variable']
    """
    return sorted(types, key=lambda t: -len(t.__mro__))


def linen_vars_to_nnx_attrs(variables: tp.Mapping[str, tp.Any]) -> Tree:
    """Variables at the paths of Linen's variables, without the collection.

    Args:
        variables: a tree for each collection.

    Returns:
        Nested dicts with Variables.

    Raises:
        ValueError: where two collections have a leaf at the same path.
        TypeError: for a collection that is not a mapping.

    >>> import nnxlite as nnx
    >>> attrs = nnx.bridge.variables.linen_vars_to_nnx_attrs(
    ...     {"params": {"bn": {"scale": 1.0}}, "batch_stats": {"bn": {"mean": 0.0}}}
    ... )
    >>> {name: type(v).__name__ for name, v in attrs["bn"].items()}
    {'scale': 'Param', 'mean': 'BatchStat'}
    """
    attrs: Tree = {}
    for col, tree in variables.items():
        if not isinstance(tree, tp.Mapping):
            raise TypeError(
                f"The collection {col!r} is a {type(tree).__name__}, not a mapping. Linen's variables "
                "are a tree for each collection, such as {'params': {'kernel': w}}."
            )
        _add(attrs, col, tree, ())
    return attrs


def _add(attrs: Tree, col: str, tree: tp.Mapping[tp.Any, tp.Any], path: tuple[tp.Any, ...]) -> None:
    for name, leaf in tree.items():
        is_tree = isinstance(leaf, tp.Mapping)
        if is_tree and not leaf:
            continue
        old = attrs.get(name)
        if old is not None and not (is_tree and type(old) is dict):
            what = "other variables below it" if type(old) is dict else f"a {type(old).__name__}"
            raise ValueError(
                f"Found duplicate variable path {(*path, name)}: Linen has one in the collection "
                f"{col!r}, and {what}. An attribute can have one of them only: give them different "
                "names."
            )
        if is_tree:
            _add(attrs.setdefault(name, {}), col, leaf, (*path, name))
            if not attrs[name]:
                del attrs[name]
        else:
            attrs[name] = to_nnx_var(col, leaf)


def nnx_attrs_to_linen_vars(nnx_attrs: tp.Mapping[tp.Any, tp.Any]) -> Tree:
    """Linen's variables for Variables at paths; the inverse of `linen_vars_to_nnx_attrs`.

    Args:
        nnx_attrs: nested dicts, or a State, with Variables.

    Returns:
        A tree for each collection, with boxes as `to_linen_var` makes them.

    Raises:
        ValueError: for an array that is not in a Variable, or a kind without a collection.

    >>> import nnxlite as nnx
    >>> attrs = {"bn": {"scale": nnx.Param(1.0), "mean": nnx.BatchStat(0.0)}}
    >>> nnx.bridge.variables.nnx_attrs_to_linen_vars(attrs)
    {'batch_stats': {'bn': {'mean': 0.0}}, 'params': {'bn': {'scale': 1.0}}}
    """
    attrs = dict(nnx_attrs.items())
    pairs = [*named_leaves(attrs)]
    for path, leaf in pairs:
        if not isinstance(leaf, Variable):
            raise ValueError(
                f"Cannot infer collection name from value at {path}: it is of type "
                f"{type(leaf).__name__}, and only a Variable has one. Put it into nnx.Param."
            )
        variable_name_from_type(type(leaf))
    return as_collections(pairs)


def as_collections(
    pairs: Pairs, box: tp.Callable[[Variable[tp.Any]], tp.Any] | None = to_linen_var
) -> Tree:
    """A tree for each collection, of leaves by path; `box` makes a leaf of a Variable."""
    collections: Tree = {}
    for path, leaf in pairs:
        if isinstance(leaf, Variable):
            col = variable_name_from_type(type(leaf), allow_register=True)
            leaf = box(leaf) if box is not None else leaf.get_raw_value()
        else:
            col = "ndarray" if isinstance(leaf, np.ndarray) else "ArrayImpl"  # traced ones, too
        tree = collections.setdefault(col, {})
        for name in path[:-1]:
            tree = tree.setdefault(name, {})
        tree[path[-1]] = leaf
    return collections


def named_leaves(
    node: tp.Any, path: tuple[tp.Any, ...] = (), seen: dict[int, tp.Any] | None = None
) -> tp.Iterator[tuple[tuple[tp.Any, ...], tp.Any]]:
    """Every (path, leaf) of an object: Variables, each at its first path, and arrays; no streams."""
    seen = {} if seen is None else seen
    kind = kind_of(node)
    if kind == Kind.ARRAY:
        yield path, node
        return
    if node is None or isinstance(node, RngState) or id(node) in seen:
        return
    seen[id(node)] = node
    if is_variable(node):
        yield path, node
    elif is_node(node):
        for name, child in getattr(type(node), "_nnx_ordered", children_of_node)(node):
            yield from named_leaves(child, (*path, name), seen)
