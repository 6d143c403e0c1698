"""Abstract models: shapes, dtypes and shardings without arrays.

They describe arrays that do not exist yet: the shardings for a checkpoint that is to be loaded, or
for the results of a jitted initialisation.
"""

from __future__ import annotations

import typing as tp

import jax
from jax.sharding import NamedSharding, PartitionSpec

from nnxlite._base.jax import current_mesh, is_tracing
from nnxlite._state._definition import State
from nnxlite.graph._functional import split
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._walk import map as map_graph
from nnxlite.sharding._annotations import annotation_of, check_spec, spec_of
from nnxlite.variables._variable import Variable

__all__ = ["abstract_with_sharding", "as_abstract", "get_abstract_model"]

A = tp.TypeVar("A")
M = tp.TypeVar("M")


def as_abstract(tree: A, graph: bool | None = None) -> A:
    """The same tree with a `jax.ShapeDtypeStruct` for each array.

    A Variable with a sharding annotation has that sharding, on its own `mesh` or the current one;
    all others keep their sharding.

    Args:
        tree: a module, a State, or any pytree.
        graph: False refuses shared references.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: for an annotation that does not match the mesh.

    >>> import nnxlite as nnx
    >>> nnx.as_abstract(nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))["bias"].shape
    (3,)
    """
    return _mapped(tree, current_mesh(), graph, arrays=True)


def abstract_with_sharding(tree: A, graph: bool | None = None) -> A:
    """The same tree with the annotated sharding in each `jax.ShapeDtypeStruct`; arrays are kept.

    See `as_abstract`.

    Args:
        tree: a module, a State, or any pytree.
        graph: False refuses shared references.

    Returns:
        A tree of the same structure.

    >>> import nnxlite as nnx, jax
    >>> mesh = jax.make_mesh((1,), ("model",))
    >>> bias = nnx.Param(jax.ShapeDtypeStruct((4,), "float32"), sharding=("model",), mesh=mesh)
    >>> nnx.abstract_with_sharding(bias).value.sharding.spec == jax.sharding.PartitionSpec("model")
    True
    """
    return _mapped(tree, current_mesh(), graph, arrays=False)


def get_abstract_model(
    init_fn: tp.Callable[[], M], mesh: tp.Any, *, graph: bool | None = None
) -> tuple[GraphDef[M], State[tp.Any, tp.Any]]:
    """Definition and abstract state of the model that `init_fn()` builds, with shardings on `mesh`.

    Nothing is computed. Arrays without annotation are replicated.

    Args:
        init_fn: a function without arguments that returns a model.
        mesh: a `jax.sharding.Mesh`.
        graph: False refuses shared references.

    Returns:
        `(graphdef, state)`, as of `split`, with `jax.ShapeDtypeStruct`s in the state.

    >>> import nnxlite as nnx, jax
    >>> mesh = jax.make_mesh((1,), ("model",))
    >>> graphdef, state = nnx.get_abstract_model(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)), mesh)
    >>> state["kernel"].value.sharding.spec == jax.sharding.PartitionSpec()
    True
    """
    definition, shapes = jax.eval_shape(lambda: split(init_fn(), graph=graph))
    return definition, _mapped(shapes, mesh, graph, arrays=False, replicate=True)


def _mapped(
    tree: tp.Any, mesh: tp.Any, graph: bool | None, *, arrays: bool, replicate: bool = False
) -> tp.Any:
    def convert(value: tp.Any, metadata: tp.Mapping[str, tp.Any]) -> tp.Any:
        abstract = isinstance(value, jax.ShapeDtypeStruct)
        if not abstract and not (arrays and hasattr(value, "shape") and hasattr(value, "dtype")):
            return value
        own = getattr(value, "sharding", None) if abstract or not is_tracing() else None
        known = own
        if replicate or not abstract or own is None:
            known = _annotated(value, metadata, mesh, replicate) or own
        if abstract and known is own:
            return value  # with its weak type
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=known)

    def one(path: tp.Any, x: tp.Any) -> tp.Any:
        metadata = x.get_metadata() if isinstance(x, Variable) else {}
        old, treedef = jax.tree_util.tree_flatten(x)
        new = [convert(value, metadata) for value in old]
        return x if all(a is b for a, b in zip(old, new)) else treedef.unflatten(new)

    return map_graph(one, tree, graph=graph)


def _annotated(
    value: tp.Any, metadata: tp.Mapping[str, tp.Any], mesh: tp.Any, replicate: bool
) -> NamedSharding | None:
    """The sharding for an annotation, if there is one and a mesh."""
    annotation = annotation_of(metadata)
    mesh = annotation.mesh or mesh
    if metadata.get("out_sharding") is None:
        return NamedSharding(mesh, PartitionSpec()) if replicate and mesh is not None else None
    if mesh is None:
        return None
    spec = spec_of(metadata)
    check_spec(value, spec, mesh)
    return NamedSharding(mesh, spec, memory_kind=annotation.memory_kind)
