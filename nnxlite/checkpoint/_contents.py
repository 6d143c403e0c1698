"""What a checkpoint contains of some objects: every leaf under a readable name.

The name of a leaf is its path, joined by dots: `blocks.0.first.kernel`.  It does not depend on the
order of attributes.  A Variable that several paths lead to has one name, that of its first path; the
other paths are aliases.  A dot, a slash or a percent sign within a key is written as `%2E`, `%2F`,
`%25`.  Where the value of a Variable is a pytree, its leaves are named by their key paths.

A leaf is an array, a typed random key, or a Python number or text.  The rest of
an object is its structure, which is neither stored nor restored.

An item without objects and arrays is plain data: `None`, a number, text, bytes, or dictionaries,
lists and tuples of these. It is one leaf, and comes back as it was saved. In a container around
objects and arrays, these, numbers and text are leaves, and anything else but `None` is refused.
"""

from __future__ import annotations

import base64
import cmath
import collections
import dataclasses
import math
import typing as tp
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import filter_text
from nnxlite._base.interning import Writes
from nnxlite._base.jax import Tracer, current_mesh, is_deleted, is_ref, key_name
from nnxlite._base.text import mesh_text
from nnxlite._state._flat import FlatState, content
from nnxlite.checkpoint._report import CheckpointError
from nnxlite.filters import Filter, to_predicate
from nnxlite.graph._edit import note_update
from nnxlite.graph._kinds import Kind, Leaves, is_graph_node, kind_of
from nnxlite.graph._plan import view
from nnxlite.graph._rebuild import Path
from nnxlite.graph._walk import find_duplicates, iter_graph
from nnxlite.sharding import abstract_with_sharding
from nnxlite.variables._variable import Variable

NUMBERS_AND_TEXT = {f"Python {t.__name__}": t for t in (bool, int, float, complex, str)}
"""Types of the leaves that are values of Python, by their names in a `Spec`."""

PLAIN = "plain data"
"""The name of all other leaves that are values of Python."""

_KIND_OF = {dict: "dict", collections.OrderedDict: "dict", collections.defaultdict: "dict"}
_KIND_OF |= {list: "list", tuple: "tuple"}


def entries(container: tp.Any) -> Iterator[tuple[tp.Any, tp.Any]]:
    """The keys or indices of a plain container with what is there."""
    yield from container.items() if isinstance(container, dict) else enumerate(container)


def is_plain(value: tp.Any) -> bool:
    """Whether a value is plain data."""
    cls = type(value)
    if cls in _KIND_OF:
        return all(is_plain(child) for _, child in entries(value))
    return value is None or cls is bytes or cls in NUMBERS_AND_TEXT.values()


def as_json(value: tp.Any) -> tp.Any:
    """Plain data as JSON, in which a list is `[kind, content]`; keys that are not plain become text."""
    match value:
        case bytes():
            return ["bytes", base64.b64encode(value).decode()]
        case complex():
            return [value.real, value.imag]
        case dict() | list() | tuple():
            pairs = [(_json_key(key), as_json(child)) for key, child in entries(value)]
            return [_KIND_OF[type(value)], pairs]
    return value


def of_json(value: tp.Any) -> tp.Any:
    """The inverse of `as_json`."""
    match value:
        case ["bytes", text]:
            return base64.b64decode(text)
        case [float(), float()]:
            return complex(*value)
        case ["dict", pairs]:
            return {of_json(key): of_json(child) for key, child in pairs}
        case ["list" | "tuple" as kind, pairs]:
            values = [of_json(child) for _, child in pairs]
            return values if kind == "list" else tuple(values)
    return value


def _json_key(key: tp.Any) -> tp.Any:
    key = key.item() if isinstance(key, np.generic) else key
    return as_json(key) if is_plain(key) else str(key)


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a leaf is, without its value.

    Attributes:
        shape: of an array; that of a random key is without the axis of its data.
        dtype: the name of an array's dtype, `key<...>` for random keys with their implementation,
            or `Python int`, `Python float`, `Python bool`, `Python complex`, `Python str`, or `plain
            data`.

    >>> from nnxlite.checkpoint._contents import Spec
    >>> str(Spec((2, 3), "float32")), str(Spec((), "Python int"))
    ('float32[2,3]', 'Python int')
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def is_python(self) -> bool:
        """Whether it is not an array, but a value of Python."""
        return self.dtype == PLAIN or self.dtype in NUMBERS_AND_TEXT

    def as_python(self, value: tp.Any) -> tp.Any:
        """A value of Python, of the type that this says."""
        return value if self.dtype == PLAIN else NUMBERS_AND_TEXT[self.dtype](value)

    @property
    def key_impl(self) -> str | None:
        """The implementation of a typed random key; None for what is not one."""
        return self.dtype[4:-1] if self.dtype.startswith("key<") else None

    @property
    def raw(self) -> tuple[str, tuple[int, ...]]:
        """The dtype and shape of the array that is written: random keys as their data."""
        if (impl := self.key_impl) is None:
            return self.dtype, self.shape
        data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
        return data.dtype.name, (*self.shape, *data.shape)

    @property
    def nbytes(self) -> int:
        """The size of the array."""
        dtype, shape = self.raw
        return 0 if self.is_python else math.prod(shape) * jnp.dtype(dtype).itemsize

    def __str__(self) -> str:
        return self.dtype if self.is_python else f"{self.dtype}[{','.join(map(str, self.shape))}]"


def spec_of(value: tp.Any) -> Spec | None:
    """The spec of an array (also abstract), number or text; None for anything else."""
    if type(value) in NUMBERS_AND_TEXT.values():
        return Spec((), f"Python {type(value).__name__}")
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        return None
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return Spec(shape, f"key<{_impl_name(value)}>")
    return None if np.dtype(dtype).kind in "OSUMm" else Spec(shape, np.dtype(dtype).name)


def _impl_name(value: tp.Any) -> str:
    key = value if isinstance(value, jax.Array) else jnp.empty((), value.dtype)  # it is abstract
    return str(jax.random.key_impl(key))


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """One leaf of some objects.

    Attributes:
        name: unique among the leaves.
        path: of the Variable, or of the array outside of one.
        owner: the Variable, or what is at the path.
        position: among the leaves of the owner's value.
        value: an array, number or text.
        spec: its shape and dtype.
        plain: whether it is an item of plain data, which comes back as it was saved.
    """

    name: str
    path: Path
    owner: tp.Any
    position: int
    value: tp.Any
    spec: Spec
    plain: bool

    @property
    def stored(self) -> tp.Any:
        """The value as it is saved: of random keys their data; what all processes have is NumPy's.

        Raises CheckpointError for one that this process has nothing of.
        """
        value = self.value
        if isinstance(value, jax.ShapeDtypeStruct):
            raise CheckpointError(f"'{self.name}' is abstract: it has no value to save.")
        value = jax.random.key_data(value) if self.spec.key_impl else value
        if not isinstance(value, jax.Array):
            return value if self.spec.is_python else np.asarray(value)
        if not value.addressable_shards:
            raise CheckpointError(
                f"'{self.name}' has no shard on this process; a checkpoint needs arrays of which each "
                "process has a part. Build its mesh from jax.devices()."
            )
        copied = value.is_fully_replicated and not value.is_fully_addressable
        return np.asarray(value.addressable_data(0)) if copied else value

    @property
    def sharding(self) -> jax.sharding.Sharding | None:
        """How a new value is to be laid out; None for an array that is bound to no device.

        That of a concrete array, if it is committed to devices; that of an abstract one, or else the one
        that the annotation of its Variable means on the mesh in use.
        """
        value = self.value
        if not isinstance(value, jax.ShapeDtypeStruct):
            return value.sharding if isinstance(value, jax.Array) and value.committed else None
        sharding = value.sharding
        if sharding is None and isinstance(self.owner, Variable):
            annotated = jax.tree.leaves(abstract_with_sharding(self.owner).get_raw_value())
            sharding = getattr(annotated[self.position], "sharding", None)
        return _with_devices(self.name, sharding)


def _with_devices(
    name: str, sharding: jax.sharding.Sharding | None
) -> jax.sharding.Sharding | None:
    """A sharding on the mesh in use, where it is only on the shape of a mesh.

    Such a one is in the type of each array that is traced under a mesh with explicit axes.
    """
    abstract = getattr(sharding, "mesh", None)
    if not isinstance(abstract, jax.sharding.AbstractMesh):
        return sharding
    mesh = current_mesh()
    if not isinstance(mesh, jax.sharding.Mesh) or mesh.shape_tuple != abstract.shape_tuple:
        raise CheckpointError(
            f"'{name}' is abstract, on a mesh of {mesh_text(abstract)} whose devices are not known, and "
            f"the mesh in use is {mesh_text(mesh) if mesh else 'none'}. Restore inside "
            "`with jax.set_mesh(mesh):`, with such a mesh."
        )
    sharding = tp.cast(jax.sharding.NamedSharding, sharding)
    return jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def placed(value: tp.Any, leaf: Leaf, dtype: str) -> tp.Any:
    """A value that was read in the form and sharding of a leaf; a copy.

    Args:
        value: an array of NumPy, or one of JAX in the sharding already; of random keys, also their data;
            or a value of Python.
        leaf: what it is for.
        dtype: the one that it will have.
    """
    spec = leaf.spec
    if spec.key_impl:
        return jax.random.wrap_key_data(_on_devices(value, leaf.sharding), impl=spec.key_impl)
    if isinstance(value, jax.Array) and not spec.is_python:
        return value.astype(dtype)
    try:
        if spec.is_python:
            return Spec((), dtype).as_python(value.item() if hasattr(value, "item") else value)
        with np.errstate(over="ignore", invalid="ignore"):  # the report says what is cast
            array = np.asanyarray(value).astype(jnp.dtype(dtype), copy=False)
        if getattr(value, "dtype", np.dtype("O")).kind == "O":
            _check_range(value, array)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"'{leaf.name}' was saved as the number {value}, which is out of the range of {dtype}. "
            "Restore it into a number of its type, or an array of another dtype."
        ) from error
    if isinstance(leaf.value, (np.ndarray, np.generic)):
        return np.array(array) if isinstance(leaf.value, np.ndarray) else np.array(array)[()]
    return _on_devices(array, leaf.sharding)


def _check_range(numbers: tp.Any, array: np.ndarray) -> None:
    """Raise OverflowError if numbers of Python are not in the range of the array they became."""
    whole = jnp.issubdtype(array.dtype, jnp.integer)
    kind = lambda x: int(x) if whole else (cmath.isinf(x), cmath.isnan(x))
    if [*map(kind, np.ravel(numbers).tolist())] != [*map(kind, np.ravel(array).tolist())]:
        raise OverflowError


def _on_devices(array: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """A copy of an array on its devices, of which only their parts are read."""
    copied = lambda index: np.array(array[index], order="C")
    if sharding is None:
        new = jnp.asarray(copied(...))
    else:
        new = jax.make_array_from_callback(array.shape, sharding, copied, dtype=array.dtype)
    return new.block_until_ready()  # or the memory of several transfers adds up


class Contents:
    """The leaves of named items, by name.

    Attributes:
        root: the items. `write` changes them, or puts others here where they cannot be changed: frozen
            modules, those of Equinox, numbers and text.
        leaves: by name, in the order of their paths; those of plain data come last.
        chosen: those that the filter matches.
        aliases: further paths of shared references, as text, with the first path of each.

    Args:
        items: by name.
        only: a filter, which sees paths within the items; what it does not match may be something that
            cannot be stored.
        named: whether names begin with that of the item, and what cannot be stored is refused; if not,
            the leaves of one model are the arrays and numbers in it.

    Raises CheckpointError without items, for what a checkpoint cannot contain, unless `only` leaves it
    out, and for a filter that matches nothing.
    """

    def __init__(
        self, items: tp.Mapping[str, tp.Any], only: Filter = ..., named: bool = True
    ) -> None:
        if not items:
            raise CheckpointError(
                "Pass what is to be saved or restored by name: model=model, step=3."
            )
        self.root = dict(items)
        self.leaves: dict[str, Leaf] = {}
        self.chosen: dict[str, Leaf] = {}
        self._start = 0 if named else 1
        predicate = to_predicate(only)
        found = list(self._leaves())
        names = names_of(whole[self._start :] for whole, *_ in found)
        for name, (_, path, owner, position, value) in zip(names, found):
            wanted, plain = predicate(path[1:], owner), path in self._plain
            spec = _spec_or_problem(value, plain)
            if isinstance(spec, Spec):
                self.leaves[name] = Leaf(name, path, owner, position, value, spec, plain)
            elif wanted:
                raise CheckpointError(f"'{name}' {spec}")
            if wanted:
                self.chosen[name] = self.leaves[name]
        if self.leaves and not self.chosen:
            of = ", ".join(items if named else (type(x).__name__ for x in items.values()))
            raise CheckpointError(
                f"only={filter_text(only)} matches none of the {len(self.leaves):,} leaves of {of}, "
                f"such as '{next(iter(self.leaves))}'."
            )
        self.aliases: dict[str, str] = {}
        for first, *others in find_duplicates(self.root, only=_is_shared):
            self.aliases.update((self._name(path), self._name(first)) for path in others)

    def _name(self, path: Path) -> str:
        return name_of(path[self._start :])

    def _leaves(self) -> Iterator[Found]:
        """The leaves, with what is to be refused, and with plain data whole."""
        items, named = self.root, not self._start
        plain = {name: value for name, value in items.items() if named and is_plain(value)}
        self._plain = {(name,) for name in plain}
        objects = {name: value for name, value in items.items() if name not in plain}
        static = dict(objects)  # without a leaf
        seen = view(objects, trees=Leaves.EVERY if named else Leaves.NUMBERS)
        for path, owner in zip(seen.graphdef.each_path(), seen.leaves):
            parts, treedef = jax.tree_util.tree_flatten_with_path(content(owner))
            if jax.tree_util.treedef_is_leaf(treedef) and _is_setting(items, path, owner, named):
                continue
            for position, (keys, part) in enumerate(parts):
                yield (*path, *map(key_name, keys)), path, owner, position, part
            static.pop(path[0], None)
        rest = {name: x for name, x in static.items() if named and not is_graph_node(x)}
        filled = lambda value: jax.tree.leaves(value) or getattr(value, "__dict__", None)
        plain |= {name: value for name, value in rest.items() if filled(value)}
        yield from (((name,), (name,), value, 0, value) for name, value in plain.items())

    def also_named(self, name: str) -> list[str]:
        """The other names of a leaf."""
        return other_names(name, self.aliases)

    def has_item(self, name: str) -> bool:
        """Whether a stored name begins with that of an item, where names do."""
        return self._start > 0 or name.partition(".")[0] in {name_of((item,)) for item in self.root}

    def classes(self) -> dict[str, str]:
        """The classes of objects and Variables, by name."""
        return {
            self._name(path): type(value).__name__
            for path, value in iter_graph(self.root)
            if is_graph_node(value)
        }

    def write(self, new: tp.Mapping[str, tp.Any]) -> None:
        """Put new values in the place of leaves, by name.

        What can fail comes first: values are put together, by code of users, and compared with
        references, whose dtype stays, before the first one is written. Then all are, in one step.

        Raises CheckpointError for a reference of another dtype.
        """
        by_path: dict[Path, list[Leaf]] = collections.defaultdict(list)
        for leaf in map(self.leaves.__getitem__, new):
            by_path[leaf.path].append(leaf)
        plain = {path[0]: new[by_path.pop(path)[0].name] for path in self._plain & by_path.keys()}
        pairs: list[tuple[Path, tp.Any]] = []
        for path, leaves in by_path.items():
            owner = leaves[0].owner
            ref = owner.get_raw_value() if isinstance(owner, Variable) else owner
            parts, treedef = jax.tree.flatten(content(owner))
            for leaf in leaves:
                parts[leaf.position] = new[leaf.name]
            if is_ref(ref) and ref.dtype != parts[0].dtype:
                raise CheckpointError(
                    f"'{leaves[0].name}' is a reference to {ref.dtype}, which cannot become "
                    f"{parts[0].dtype}. Nothing was changed. Pass cast=True."
                )
            pairs.append((path, treedef.unflatten(parts)))
        writes = Writes()
        note_update(writes, self.root, FlatState(pairs, sort=False))
        writes.make()
        for name, value in plain.items():  # dictionaries and lists stay the same
            old = self.root[name]
            if isinstance(old, dict) and isinstance(value, dict):
                old.clear()
                old.update(value)
            elif isinstance(old, list) and isinstance(value, list):
                old[:] = value
            else:
                self.root[name] = value


Found: tp.TypeAlias = tuple[Path, Path, tp.Any, int, tp.Any]
"""The path of a leaf, also within its owner; that of the owner; and the rest of a `Leaf`."""


def _is_shared(path: Path, value: tp.Any) -> bool:
    return is_graph_node(value) or is_ref(value)


def _is_setting(items: tp.Any, path: Path, value: tp.Any, named: bool) -> bool:
    """Whether the value at a path is not a leaf, but a function or the like within an object."""
    if isinstance(value, Variable) or kind_of(value) != Kind.OTHER:
        return False
    if not named:  # text is a setting of a module of another library
        return isinstance(value, str) or spec_of(value) is None
    if spec_of(value) is not None:
        return False
    for key in path:
        if type(items) not in _KIND_OF:
            return True
        items = items[key]
    return False


def name_of(path: tp.Iterable[tp.Any], quoted: bool = False) -> str:
    """A path as a name: `blocks.0.kernel`.

    Args:
        path: attribute names, keys and indices.
        quoted: whether keys are written as Python does, which tells 0 and "0" apart.

    >>> from nnxlite.checkpoint._contents import name_of
    >>> name_of(("layers", 0, "a.b")), name_of(("layers", "0"), quoted=True)
    ('layers.0.a%2Eb', "'layers'.'0'")
    """
    return ".".join(_segment(repr(key) if quoted else str(key)) for key in path)


def names_of(paths: tp.Iterable[tp.Sequence[tp.Any]]) -> list[str]:
    """Names of paths, with quotes where they tell keys apart.

    >>> from nnxlite.checkpoint._contents import names_of
    >>> names_of([("a", 0), ("a", "0"), ("b", 0)])
    ["'a'.0", "'a'.'0'", 'b.0']
    """
    paths = [*paths]
    counts = collections.Counter(map(name_of, paths))
    return unique([name_of(path, quoted=counts[name_of(path)] > 1) for path in paths])


def unique(names: list[str]) -> list[str]:
    """The same names; CheckpointError if two of them are equal."""
    if twice := [name for name, times in collections.Counter(names).items() if times > 1]:
        raise CheckpointError(
            f"Several arrays have the name '{twice[0]}'. Change some of their keys."
        )
    return names


def _segment(text: str) -> str:
    for char in "%./":
        text = text.replace(char, f"%{ord(char):02X}")
    return text or "%"


def other_names(name: str, aliases: tp.Mapping[str, str]) -> list[str]:
    """The names of a leaf that aliases of it, or of an object above it, give."""
    starts = [(alias, first) for alias, first in aliases.items() if is_below(name, first)]
    return [alias + name[len(first) :] for alias, first in starts]


def every_name(names: tp.Iterable[str], aliases: tp.Mapping[str, str]) -> dict[str, str]:
    """The names of leaves, and then the other ones that they have, each with the first one.

    A name of another leaf is not one of these:

    >>> from nnxlite.checkpoint._contents import every_name
    >>> every_name(["a.w", "b.w"], {"b": "a", "c": "a"})
    {'a.w': 'a.w', 'b.w': 'b.w', 'c.w': 'a.w'}
    """
    found = {name: name for name in names}
    for name in [*found]:
        for other in other_names(name, aliases):
            found.setdefault(other, name)
    return found


def is_below(name: str, above: str) -> bool:
    """Whether a name is another one, or begins with it; every name is below the empty one."""
    return name == above or name.startswith(above + ".") or not above


def _spec_or_problem(value: tp.Any, plain: bool) -> Spec | str:
    """The spec of a leaf; or what is said of one that cannot be stored."""
    if isinstance(value, Tracer):
        return "is traced: save and restore outside of transforms, with concrete values."
    if is_deleted(value):
        return (
            "has been deleted, probably donated to a jitted function. Save the objects that hold its "
            "results, or do not donate it."
        )
    if (spec := spec_of(value)) is not None or plain:
        return spec or Spec((), PLAIN)
    return (
        f"is a {type(value).__name__}, which a checkpoint cannot contain here. Beside objects and "
        "arrays it stores random keys, numbers and text; in items of their own also None, bytes, "
        "dictionaries, lists and tuples of these. Leave it out by `only=`, hold it in a static "
        "attribute, or save its content as these (dataclasses.asdict)."
    )
