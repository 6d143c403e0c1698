"""Stacked layers: equal layers as one, whose arrays have a leading axis, and back.

A model with a list of layers is unrolled: each layer is traced and compiled by itself.  The same layers
stacked are scanned (`nnx.scan`), traced and compiled once, or spread over devices.
`stack_layers` and `unstack_layers` are inverse to each other; arrays keep their shardings behind the new
axis, and none is gathered.  `remat_layers` chooses layers that the backward pass computes again.
"""

from __future__ import annotations

import difflib
import functools
import typing as tp

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from nnxlite._base.errors import MOST_PATHS, listed, path_text, short_type, warn_user
from nnxlite._base.jax import P, R, RematPolicy, key_name
from nnxlite._state._flat import content
from nnxlite.checkpoint.patterns import Pattern
from nnxlite.filtered._calls import filter_checkpoint
from nnxlite.graph._compare import compare, differences_text
from nnxlite.graph._functional import merge, split
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._kinds import is_graph_node
from nnxlite.graph._rebuild import Path
from nnxlite.graph._walk import find_duplicates, iter_graph
from nnxlite.objects._capture import observed
from nnxlite.objects._containers import List
from nnxlite.objects._module import Module, iter_modules
from nnxlite.sharding._decide import matching, paths_of
from nnxlite.transforms._wrapper import name_of
from nnxlite.variables._definition import PLACEMENT, changed_names
from nnxlite.variables._variable import Variable, is_variable

__all__ = ["remat_layers", "stack_layers", "unstack_layers"]

M = tp.TypeVar("M")
Change: tp.TypeAlias = tp.Callable[[tuple[tp.Any, ...]], tuple[tp.Any, ...]]


def stack_layers(layers: tp.Iterable[M], *, partition: str | None = None) -> M:
    """One layer in place of equal ones: each array has a leading axis, with one entry per layer.

    Each layer keeps what it has: parameters, statistics, and the random streams that are its own.

    Args:
        layers: modules (or other objects, or pytrees) of equal structure, shapes and dtypes.
        partition: name of the new axis in sharding annotations.  Where arrays are on a mesh that has
            an axis of this name, the layers are spread along it.

    Returns:
        A new object of the same class.  It shares nothing with the layers.

    Raises:
        ValueError: if the list is empty, if two of them share a Variable, if they differ in
            structure, shape, dtype or sharding, or if the mesh axis does not divide their number.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> layers = [nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(4)]
    >>> stacked = nnx.stack_layers(layers)
    >>> stacked.kernel.shape
    (4, 3, 3)
    >>> forward = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    >>> y = nnx.Sequential(*layers)(jnp.ones((2, 3)))
    >>> bool(jnp.allclose(forward(jnp.ones((2, 3)), stacked), y, atol=1e-6))
    True
    """
    layers = list(layers)
    if not layers:
        raise ValueError("stack_layers needs one layer at least, and got none.")
    _refuse_shared(layers)
    first = _Leaves(layers[0])
    rows = [first.values]
    for number, layer in enumerate(layers[1:], 1):
        other = _Leaves(layer)
        _refuse_different(number, first, other)
        rows.append(other.values)
    columns = list(zip(*rows))
    shardings = [_sharding_of(p, c, partition) for p, c in zip(first.paths, columns)]
    values = _computed(lambda columns: [jnp.stack(c) for c in columns], columns, shardings)
    stacked = first.rebuilt(values, lambda names: (partition, *names))
    for variable in _variables(stacked):
        variable.add_axis(0, partition)
    return stacked


def unstack_layers(layer: M) -> List[M]:
    """The layers that were stacked, each with its entry of every array.

    Args:
        layer: an object whose arrays all have a leading axis of one size, as `stack_layers` and
            `nnx.vmap` make it.

    Returns:
        A `List` of new objects of the same class.

    Raises:
        ValueError: if an array has no leading axis, or one of another size than the others.

    >>> import nnxlite as nnx
    >>> layers = [nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(4)]
    >>> again = nnx.unstack_layers(nnx.stack_layers(layers))
    >>> bool((again[2].kernel.value == layers[2].kernel.value).all()), len(again)
    (True, 4)
    """
    stacked = _Leaves(layer)
    count = _leading_size(stacked, layer)
    rest: Change = lambda names: names[1:]
    shardings = [_changed(getattr(v, "sharding", None), rest) for v in stacked.values]
    rows = _computed(
        lambda values: [[v[i] for v in values] for i in range(count)],
        stacked.values,
        [shardings] * count,
    )
    layers = List(stacked.rebuilt(values, rest) for values in rows)
    for variable in _variables(layers):
        variable.remove_axis(0, None)
    return layers


def _leading_size(leaves: _Leaves, stacked: tp.Any) -> int:
    sizes = {p: _shape(v)[:1] for p, v in zip(leaves.paths, leaves.values)}
    (path, size), *_ = [*sizes.items(), ((), ())]
    others = [other for other, its in sizes.items() if its != size]
    if size and not others:
        return size[0]
    what = "it has no arrays"
    if size:
        other = others[0]
        got = f"{sizes[other][0]} entries" if sizes[other] else "no leading axis"
        place = f"'{path_text(path)}' has {size[0]} entries along its leading axis"
        what = f"{place}, '{path_text(other)}' has {got}"
    elif sizes:
        what = f"'{path_text(path)}' is a scalar"
    raise ValueError(
        f"unstack_layers: {short_type(stacked)} is not a stack of layers: {what}. Make one with "
        "nnx.stack_layers(layers)."
    )


class _Leaves:
    """An object as its definition and leaves.

    Attributes:
        graphdef: the definition.
        contents: the values of its leaves, as one pytree; those of references, where they are in one.
        paths: the path of each array in them.
        values: the arrays.
    """

    def __init__(self, layer: tp.Any) -> None:
        self.graphdef: GraphDef[tp.Any]
        self.graphdef, state = split(layer)
        pairs, self._treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_variable)
        self._leaves = [leaf for _, leaf in pairs]
        found, self.contents = jax.tree_util.tree_flatten_with_path([*map(content, self._leaves)])
        keys = [(*pairs[number.idx][0], *rest) for (number, *rest), _ in found]
        self.paths: list[Path] = [tuple(map(key_name, path)) for path in keys]
        self.values = [value for _, value in found]

    def rebuilt(self, values: tp.Sequence[tp.Any], change: Change) -> tp.Any:
        """A new object with other values, and a change to the names of axes in annotations."""
        leaves = [
            leaf.replace(value, **_metadata(leaf, value, change))
            if isinstance(leaf, Variable)
            else value
            for leaf, value in zip(self._leaves, self.contents.unflatten(values))
        ]
        return merge(self.graphdef, self._treedef.unflatten(leaves))


def _shape(value: tp.Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def _metadata(variable: Variable[tp.Any], value: tp.Any, change: Change) -> dict[str, tp.Any]:
    """The metadata entries that change when axes are added or removed."""
    new: dict[str, tp.Any] = {}
    names, sharding = variable.sharding_names, getattr(value, "sharding", None)
    if names is not None:
        new["out_sharding"] = changed_names(names, change)
    if PLACEMENT in variable.get_metadata() and isinstance(sharding, NamedSharding):
        spec = tuple(sharding.spec)
        new[PLACEMENT] = PartitionSpec(*spec, *[None] * (value.ndim - len(spec)))
    return new


def _changed(sharding: tp.Any, change: Change) -> NamedSharding | None:
    return changed_names(sharding, change) if isinstance(sharding, NamedSharding) else None


def _computed(f: tp.Callable[[tp.Any], tp.Any], values: tp.Any, shardings: tp.Any) -> tp.Any:
    """The result of a function, with these shardings; for abstract arrays abstract ones."""
    leaves = jax.tree.leaves(values)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        with_sharding = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        return jax.tree.map(with_sharding, jax.eval_shape(f, values), shardings)
    return jax.jit(f, out_shardings=shardings)(values)


def _sharding_of(
    path: Path, values: tp.Sequence[tp.Any], partition: str | None
) -> NamedSharding | None:
    """The sharding of the values of all layers together; None if they are not on a mesh."""
    shardings: list[tp.Any] = [getattr(value, "sharding", None) for value in values]
    first = shardings[0]
    for number, other in enumerate(shardings):
        if isinstance(first, NamedSharding) or isinstance(other, NamedSharding):
            ndim = len(_shape(values[0]))
            if None in (first, other) or not first.is_equivalent_to(other, ndim):
                raise ValueError(
                    f"stack_layers: '{path_text(path)}' is sharded differently in layer 0 "
                    f"({first}) and layer {number} ({other}). Give all layers the same sharding, as "
                    "nnx.shard(model, mesh, plan) does."
                )
    if not isinstance(first, NamedSharding):
        return None
    along = partition if partition in first.mesh.axis_names else None
    if along and len(values) % first.mesh.shape[along]:
        raise ValueError(
            f"stack_layers: {len(values)} layers cannot be spread evenly over the "
            f"{first.mesh.shape[along]} devices along the mesh axis {along!r}. Take a multiple of "
            "them, or another name for partition."
        )
    return _changed(first, lambda names: (along, *names))


def _variables(tree: tp.Any) -> list[Variable[tp.Any]]:
    return [node for _, node in iter_graph(tree) if isinstance(node, Variable)]


def _refuse_shared(layers: list[tp.Any]) -> None:
    """Raise ValueError for a Variable that two of the layers have."""
    owners: dict[int, tuple[int, Path]] = {}
    for number, layer in enumerate(layers):
        for path, node in iter_graph(layer):
            if not isinstance(node, Variable):
                continue
            owner, its_path = owners.setdefault(id(node), (number, path))
            if owner != number:
                raise ValueError(
                    f"stack_layers: layers {owner} and {number} share a {type(node).__name__}, at "
                    f"'{path_text(its_path)}' and '{path_text(path)}'. In a stack each layer has its "
                    "own entry. Give each layer a copy (nnx.clone; for random streams "
                    "rngs.fork()), or pass what is shared to the call."
                )


def _refuse_different(number: int, first: _Leaves, other: _Leaves) -> None:
    if first.graphdef != other.graphdef:
        what = differences_text(compare(first.graphdef, other.graphdef))
    else:
        one, two = (dict(zip(x.paths, map(short_type, x.values))) for x in (first, other))
        known = ((path, one.get(path, "absent"), two.get(path, "absent")) for path in one | two)
        what = next((f"'{path_text(p)}' is {b}, and {a} there" for p, a, b in known if a != b), "")
        if not what and first.contents != other.contents:
            what = f"its values are {other.contents}, and {first.contents} there"
    if what:
        raise ValueError(
            f"stack_layers: layer {number} differs from layer 0: {what}. Layers of a stack are equal "
            "but for the values of their arrays."
        )


def remat_layers(
    f: tp.Callable[P, R], policies: tp.Mapping[str, RematPolicy | None]
) -> tp.Callable[P, R]:
    """A function in which some modules of its arguments are called under `nnx.remat`.

    The model stays as it is. A module that is called inside another one of these is part of that call.

    If `f` calls none of them, which is so for the copies inside `nnx.jit`, there is a warning.

    Args:
        f: a function of a model, such as a loss; apply `nnx.grad` and `nnx.jit` to the result.
        policies: for patterns of paths in the model ("blocks.*", "encoder.layers.0") a policy of
            `jax.checkpoint_policies`, or None: remember only the inputs. The first pattern that matches
            counts; modules that none matches are called as ever.

    Returns:
        A function of the same arguments.

    Raises:
        ValueError: when called, for a pattern that matches no module of the arguments.

    >>> import jax, jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> mlp = nnx.MLP(4, 4, width=8, depth=2, rngs=nnx.Rngs(0))
    >>> loss = lambda m, x: jnp.sum(jnp.sin(m(x)))
    >>> policies = {"layers.0": None, "layers.*": jax.checkpoint_policies.dots_saveable}
    >>> grads = nnx.grad(nnx.remat_layers(loss, policies))(mlp, jnp.ones((2, 4)))
    >>> same = nnx.grad(loss)(mlp, jnp.ones((2, 4)))
    >>> bool(jnp.allclose(grads["layers"][0]["kernel"][...], same["layers"][0]["kernel"][...]))
    True
    """
    patterns = {text: Pattern(text) for text in policies}

    @functools.wraps(f)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        chosen: dict[int, tuple[type, RematPolicy | None]] = {}
        used, names, called = set[str](), list[str](), list[str]()
        for model in jax.tree.leaves((args, kwargs), is_leaf=is_graph_node):
            duplicates = find_duplicates(model)
            for path, module in iter_modules(model) if isinstance(model, Module) else ():
                here = [path_text(one) for one in paths_of(path, duplicates)]
                names += here
                if found := matching(patterns, here):
                    used.update(found)
                    chosen.setdefault(id(module), (type(module), policies[found[0]]))
        for text in patterns.keys() - used:
            near = difflib.get_close_matches(text, names, n=3, cutoff=0.3) or names[:MOST_PATHS]
            raise ValueError(
                f"remat_layers: the pattern {text!r} matches no module among the arguments of "
                f"{name_of(f)}; there are {', '.join(near) or 'none'}."
            )

        def observer(
            call: tp.Any, module: tp.Any, name: str, args: tp.Any, kwargs: tp.Any
        ) -> tp.Any:
            if id(module) not in chosen:
                return call(module, *args, **kwargs)
            called.append(name)
            return filter_checkpoint(call, policy=chosen[id(module)][1])(module, *args, **kwargs)

        with observed([(kind, "__call__") for kind, _ in chosen.values()], observer):
            result = f(*args, **kwargs)
        if policies and not called:
            warn_user(
                f"remat_layers: {name_of(f)} called none of the modules at {listed([*policies])}, so "
                "nothing is computed again. Other methods do not count, nor do copies inside a "
                "transform: apply remat_layers to the function inside nnx.jit and nnx.grad."
            )
        return result

    return wrapper
