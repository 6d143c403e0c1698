"""Predicates, specs and their answers for the leaves of a tree or call; trees divided by leaves; text.

Leaves are arrays, numbers, functions and so on at the ends of a pytree, and, in its graph objects, the
values of Variables and of data attributes; functions, text and other objects in their containers are
static.  A Variable (or object) with several paths is one: its value is one leaf, and the rebuilt tree
refers to it by all of these paths.  None is not a leaf.

On the way in, leaves that are not traced become part of the key (`filter_jit`) or are captured (the
other transforms).  On the way out, leaves that are not arrays cross as static data beside the `OutDef`.

A spec is a literal, or a pytree of literals that is a prefix of the tree.  A literal is an answer
itself (a bool, or an axis), a function of the leaf, or a Variable filter of the library (`Param`,
`PathContains("head")`, `Not(...)`), which looks at the leaf's path and Variable.  Where the tree
has a graph object the spec may have one of the same form, whose leaves are literals.

How a spec is divided among the leaves is that of every prefix (`labels` of `boundary`): here is only
which parts of it are literals, and what one answers.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from nnxlite import filters
from nnxlite._base.errors import Modes, path_text, short_type
from nnxlite._base.jax import ARRAYS, as_integer
from nnxlite._base.text import Style, Text, expanded, laid_out, open_up, short
from nnxlite.boundary._call_def import CallDef
from nnxlite.boundary._inputs import Inputs, is_root
from nnxlite.boundary._labels import broadcast, labels, node_prefix
from nnxlite.boundary._out import Fixed
from nnxlite.graph._kinds import Kind, kind_of
from nnxlite.graph._rebuild import Path
from nnxlite.graph._walk import iter_graph
from nnxlite.objects._pytree import Pytree
from nnxlite.transforms._call import Call
from nnxlite.transforms._wrapper import Options, unbind

__all__ = ["filter", "if_array", "is_array", "is_array_like", "is_inexact_array"]
__all__ += ["is_inexact_array_like", "partition", "tree_equal", "tree_inference", "tree_pformat"]
__all__ += ["tree_pprint"]

T = tp.TypeVar("T")
IsLeaf: tp.TypeAlias = tp.Callable[[tp.Any], bool]


_SCALARS = (bool, int, float, complex)


def is_array(element: tp.Any) -> tp.TypeGuard[jax.Array | np.ndarray]:
    """Whether a leaf is an array: of JAX (traced or not) or of NumPy, NumPy scalars included.

    Args:
        element: a leaf.

    Returns:
        A bool.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.is_array(jnp.zeros(2)), nnx.is_array(1.0)
    (True, False)
    """
    return isinstance(element, ARRAYS)


def not_arrays(leaves: tp.Sequence[tp.Any]) -> list[bool]:
    """Which leaves are not arrays, empty if all are; each class is checked once, as there are few."""
    by_class = {kind: issubclass(kind, ARRAYS) for kind in set(map(type, leaves))}
    if all(by_class.values()):
        return []
    return [not (by_class[type(leaf)] or is_array(leaf)) for leaf in leaves]


def has_shape(element: tp.Any) -> bool:
    """Whether a leaf is an array or a `jax.ShapeDtypeStruct`."""
    return isinstance(element, (*ARRAYS, jax.ShapeDtypeStruct))


def is_inexact_array(element: tp.Any) -> tp.TypeGuard[jax.Array | np.ndarray]:
    """Whether a leaf is an array of floating-point or complex numbers.

    Args:
        element: a leaf.

    Returns:
        A bool.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.is_inexact_array(jnp.zeros(2)), nnx.is_inexact_array(jnp.arange(2))
    (True, False)
    """
    return isinstance(element, ARRAYS) and jnp.issubdtype(element.dtype, jnp.inexact)


def is_array_like(element: tp.Any) -> bool:
    """Whether JAX can make an array of a leaf: an array, a number, or an object with `__jax_array__`.

    Args:
        element: a leaf.

    Returns:
        A bool.

    >>> import nnxlite as nnx
    >>> nnx.is_array_like(1.0), nnx.is_array_like("one")
    (True, False)
    """
    return isinstance(element, (*ARRAYS, *_SCALARS)) or _converts(element)


def _converts(element: tp.Any) -> bool:  # a tracer has the attribute, and None in it
    return callable(getattr(element, "__jax_array__", None)) and not isinstance(element, type)


def is_inexact_array_like(element: tp.Any) -> bool:
    """Whether JAX can make a floating-point or complex array of a leaf.

    Args:
        element: a leaf.

    Returns:
        A bool.

    >>> import nnxlite as nnx
    >>> nnx.is_inexact_array_like(1.0), nnx.is_inexact_array_like(1)
    (True, False)
    """
    if not isinstance(element, ARRAYS) and _converts(element):
        element = element.__jax_array__()
    return isinstance(element, (float, complex)) or is_inexact_array(element)


@dataclasses.dataclass(frozen=True)
class if_array:
    """An axis for arrays, None for every other leaf; the default axes of `filter_vmap`.

    Args:
        axis: the axis of arrays.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.if_array(1)(jnp.zeros(2)), nnx.if_array(1)("name")
    (1, None)
    """

    axis: int

    def __call__(self, element: tp.Any) -> int | None:
        """The axis of one leaf.

        Args:
            element: a leaf.
        """
        return self.axis if is_array(element) else None


_ALGEBRA = [x for x in vars(filters).values() if isinstance(x, type)]
_FILTERS = (str, types.EllipsisType, *[x for x in _ALGEBRA if x.__module__ == filters.__name__])


def is_filter(literal: tp.Any) -> bool:
    """Whether a literal is a Variable filter, as opposed to a function of a leaf."""
    return isinstance(literal, (type, *_FILTERS))


class SpecKind(tp.NamedTuple):
    """The kind of the answers of a spec.

    Attributes:
        name: of the spec, in messages.
        is_answer: whether a literal is an answer by itself.
        needs: the valid literals, in messages.
        matched, unmatched: the answer of a filter that matches, or does not.
    """

    name: str
    is_answer: tp.Callable[[tp.Any], bool]
    needs: str
    matched: tp.Any = True
    unmatched: tp.Any = False

    def is_literal(self, spec: tp.Any) -> bool:
        """Whether a whole spec is one literal."""
        return self.is_answer(spec) or is_filter(spec) or isinstance(spec, types.FunctionType)

    def answer(self, literal: tp.Any, path: Path, variable: tp.Any, leaf: tp.Any) -> tp.Any:
        """The answer of a literal for one leaf.

        Raises ValueError for a literal of another type, or a function that gives no answer.
        """
        literal = as_integer(literal)
        if self.is_answer(literal):
            return literal
        if is_filter(literal):
            matches = filters.to_predicate(literal)(path, variable)
            return self.matched if matches else self.unmatched
        if not callable(literal):
            raise ValueError(
                f"{self.name} must consist of {self.needs} only, got {short_type(literal)} "
                f"{literal!r} for the leaf at '{path_text(path)}'."
            )
        answer: tp.Any = literal(leaf)
        if hasattr(answer, "dtype"):
            answer = answer.item()  # a NumPy bool, or a concrete array
        if not self.is_answer(answer):
            raise ValueError(
                f"{self.name}: the function {literal!r} answered {answer!r} for the leaf at "
                f"'{path_text(path)}'; it must answer with {self.needs.partition(',')[0]}."
            )
        return answer


MASK = SpecKind(
    "filter_spec",
    lambda x: isinstance(x, bool),
    "booleans, callables and Variable filters",
)


def answers(tree: Inputs, spec: tp.Any, kind: SpecKind = MASK) -> list[tp.Any]:
    """The answer for each leaf of a tree.

    Raises ValueError where the spec is not a prefix of the tree, for an invalid literal, and where a
    shared Variable would get two answers.
    """
    call, leaves, variables = tree.definition, tree.leaves, tree.variables()
    answer = lambda part, path, leaf: kind.answer(part, path, variables[leaf], leaves[leaf])
    return labels(call, parts(call, spec, kind), kind.name, variables, meaning=answer)


def parts(call: CallDef, spec: tp.Any, kind: SpecKind) -> list[tp.Any]:
    """The part of a spec that belongs to each argument leaf or root."""
    stops = lambda part: is_root(part) or kind.is_literal(part)
    found = broadcast(spec, call.template(), kind.name, stops, "a filter")
    return [node_prefix(x, kind.is_literal) if is_root(x) else x for x in found]


# Axes ---------------------------------------------------------------------------------------------


IN_AXES = SpecKind(
    "in_axes",
    lambda x: x is None or isinstance(x, int),
    "axes (ints or None), callables and Variable filters",
    0,
    None,
)

OUT_AXES = IN_AXES._replace(name="out_axes")


def is_mapped(axis: tp.Any) -> bool:
    """Whether a leaf is mapped; None and True pass it whole to every slice, False makes it static."""
    return axis is not None and not isinstance(axis, bool)


# Calls and trees, by their leaves -----------------------------------------------------------------


def leaves_of(tree: tp.Any) -> Inputs:
    """The leaves of any tree, and its `definition`."""
    return Inputs(tree, trees=True, inside=True)


def tree_out(
    tree: tp.Any, is_traced: tp.Callable[[tp.Any], bool] = is_array
) -> tuple[Fixed, list[tp.Any]]:
    """A tree that crosses on its own, as a `CallDef` and the traced leaves; its objects will be new."""
    parts = leaves_of(tree)
    parts.make_static([not is_traced(leaf) for leaf in parts.leaves])
    return Fixed(parts.definition), parts.leaves


def filtered(name: str, run: tp.Callable[..., tp.Any] = Call, **more: tp.Any) -> Options:
    """The options of a filtered transform."""
    return Options.of(name, Modes(True, True), run, is_array, **more)


def call_of(name: str, fun: tp.Any, args: tp.Iterable[tp.Any], kwargs: dict[str, tp.Any]) -> Call:
    """A call of a function under a transform that returns no wrapper."""
    return Call(filtered(name), unbind(fun, pytrees=True), tuple(args), kwargs)


def filter(
    pytree: T,
    filter_spec: tp.Any,
    inverse: bool = False,
    replace: tp.Any = None,
    is_leaf: IsLeaf | None = None,
) -> T:
    """A tree with only the leaves that a spec selects, and None for the others.

    Graph objects in the tree keep their types and sharing; the result has new ones. A shared
    Variable is one leaf. Static attributes are not leaves and stay.

    Args:
        pytree: any pytree, or a graph object.
        filter_spec: a bool, a function of a leaf, a Variable filter (`nnx.Param`, ...), or a pytree
            of these that is a prefix of the tree.
        inverse: return the leaves that the spec does not select instead.
        replace: what to put in place of the other leaves.
        is_leaf: parts for which it is true are leaves.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: for a spec that is not a prefix of the tree, or one that selects a shared Variable
            by one path and not by another.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter([jnp.array(1.0), "name"], nnx.is_array)
    [Array(1., dtype=float32, weak_type=True), None]
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.filter(model, nnx.PathContains("bias")).kernel.value is None
    True
    """
    return partition(pytree, filter_spec, replace, is_leaf)[bool(inverse)]


def _leaves(tree: tp.Any, spec: tp.Any, is_leaf: IsLeaf | None) -> Inputs:
    """The leaves of a tree; `is_leaf` is called only for parts below the literals of the spec."""
    if is_leaf is None:
        return leaves_of(tree)
    ends = lambda part: is_root(part) or MASK.is_literal(part)
    stops = lambda part: is_root(part) or is_leaf(part)
    close = lambda part: _Closed(part) if is_leaf(part) else part
    below = lambda _, part: jax.tree_util.tree_map(close, part, is_leaf=stops)
    try:
        closed = jax.tree_util.tree_map(below, spec, tree, is_leaf=ends)
    except ValueError:  # the spec is not a prefix, and `answers` has a better message for it
        closed = tree
    parts = leaves_of(closed)
    parts.arrays = [x.value if type(x) is _Closed else x for x in parts.arrays]
    return parts


@dataclasses.dataclass
class _Closed:
    """A part of a tree that counts as one leaf."""

    value: tp.Any


def partition(
    pytree: T,
    filter_spec: tp.Any,
    replace: tp.Any = None,
    is_leaf: IsLeaf | None = None,
) -> tuple[T, T]:
    """The leaves that a spec selects and the rest, as two trees; see `filter`.

    `combine` is the inverse.

    Args:
        pytree: any pytree, or a graph object.
        filter_spec, replace, is_leaf: as for `filter`.

    Returns:
        Two trees of the same structure, with `replace` in place of the leaves of the other.

    Raises:
        ValueError: as for `filter`.

    >>> import nnxlite as nnx
    >>> nnx.partition([1, "a", 2.5], lambda x: isinstance(x, str))
    ([None, 'a', None], [1, None, 2.5])
    >>> nnx.combine(*nnx.partition([1, "a", 2.5], lambda x: isinstance(x, str)))
    [1, 'a', 2.5]
    """
    tree = _leaves(pytree, filter_spec, is_leaf)
    mask = answers(tree, filter_spec)
    call, leaves = tree.definition, tree.leaves
    half = lambda flag: call.build([x if m is flag else replace for x, m in zip(leaves, mask)])
    return half(True), half(False)


def tree_equal(
    *pytrees: tp.Any, typematch: bool = False, rtol: tp.Any = 0.0, atol: tp.Any = 0.0
) -> bool | jax.Array:
    """Whether trees are equal: in structure, static values, sharing, and every leaf.

    Arrays are equal with the same shape, dtype and values; NaN differs from itself. A number is equal
    to numbers only, not to an array.

    Args:
        pytrees: trees, or graph objects.
        typematch: leaves must also have the same type, so that NumPy and JAX arrays differ.
        rtol, atol: tolerances for floating-point and complex arrays.

    Returns:
        A bool; or, where values decide and some array is of JAX, a JAX array of one bool (which also
        works under `jit`).

    >>> import nnxlite as nnx
    >>> nnx.tree_equal([1, "a"], [1, "a"]), nnx.tree_equal([1], (1,))
    (True, False)
    """
    if len(pytrees) < 2:
        return True
    first, *others = map(leaves_of, pytrees)
    answer: tp.Any = True
    for other in others:
        if first.definition.key != other.definition.key:
            return False
        for x, y in zip(first.leaves, other.leaves):
            same = _same_leaf(x, y, typematch, rtol, atol)
            if same is False:
                return False
            if same is not True:
                answer = same if answer is True else answer & same
    return answer


def _same_leaf(x: tp.Any, y: tp.Any, typematch: bool, rtol: tp.Any, atol: tp.Any) -> tp.Any:
    if typematch and type(x) is not type(y):
        if not (isinstance(x, jax.Array) and isinstance(y, jax.Array)):
            return False
    if not (is_array(x) and is_array(y)):
        return not is_array(x) and not is_array(y) and bool(x == y)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    xnp = jnp if isinstance(x, jax.Array) or isinstance(y, jax.Array) else np
    if jnp.issubdtype(x.dtype, jnp.inexact):
        same = xnp.allclose(x, y, rtol=rtol, atol=atol)
    else:
        same = xnp.all(x == y)
    return bool(same) if xnp is np else same


def tree_inference(pytree: T, value: bool = True) -> T:
    """A copy of a tree with every layer in inference mode (or, with False, in training mode).

    On the modules of this library it sets `deterministic` and `use_running_average`, and everywhere
    attributes called `inference`, where they exist.

    Args:
        pytree: any pytree, or a graph object.
        value: True for inference, False for training.

    Returns:
        A tree of the same structure, with new modules around the same arrays.

    >>> import nnxlite as nnx
    >>> dropout = nnx.Dropout(0.5)
    >>> nnx.tree_inference(dropout).deterministic, dropout.deterministic
    (True, False)
    """
    tree = leaves_of(pytree)
    new = tree.definition.build(tree.leaves)
    for _, node in iter_graph(new):
        if kind_of(node) == Kind.OBJECT:
            for name in _MODES.intersection(node._nnx_dict):
                Pytree._nnx_assign(node, name, value)  # frozen or not: the copy is ours
    return jax.tree_util.tree_map_with_path(
        lambda path, x: value if path and getattr(path[-1], "name", None) == "inference" else x,
        new,
        is_leaf=is_root,
    )


_MODES = frozenset({"deterministic", "use_running_average", "inference"})


# Text ---------------------------------------------------------------------------------------------


def array_text(array: tp.Any) -> str:
    """An array by dtype and shape: `f32[2,3]`.

    >>> import jax.numpy as jnp
    >>> from nnxlite.filtered._specs import array_text
    >>> array_text(jnp.zeros((2, 3)))
    'f32[2,3]'
    """
    text = ShapedArray(array.shape, array.dtype).str_short(short_dtypes=True)
    return f"{text}(numpy)" if isinstance(array, (np.ndarray, np.generic)) else text


def tree_pformat(
    pytree: tp.Any,
    *,
    width: int = 80,
    indent: int = 2,
    short_arrays: bool = True,
    struct_as_array: bool = False,
    truncate_leaf: tp.Callable[[tp.Any], bool] = lambda leaf: False,
) -> str:
    """A tree as text, with arrays by dtype and shape.

    Args:
        pytree: any pytree, or a graph object.
        width: the number of characters that a line may have, if possible.
        indent: of each level, in characters.
        short_arrays: False writes arrays out.
        struct_as_array: writes `jax.ShapeDtypeStruct`s like arrays.
        truncate_leaf: parts for which it is true are written as `Type(...)`.

    Returns:
        A string, of several lines where one is not enough.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.tree_pformat({"w": jnp.zeros((2, 3)), "name": "head"})
    "{'w': f32[2,3], 'name': 'head'}"
    """

    def leaf(value: tp.Any) -> str:
        if truncate_leaf(value):
            return f"{type(value).__name__}(...)"
        if short_arrays if is_array(value) else struct_as_array and has_shape(value):
            return array_text(value)
        return repr(value) if has_shape(value) else short(value)

    def opened(value: tp.Any) -> Text | None:
        return None if has_shape(value) or truncate_leaf(value) else open_up(value)

    style = Style(leaf, opened, width, indent)
    with expanded(pytree, style) as order:
        return laid_out(order, style)


def tree_pprint(pytree: tp.Any, **options: tp.Any) -> None:
    """Print a tree; arguments as for `tree_pformat`.

    Args:
        pytree: any pytree, or a graph object.
        width, indent, short_arrays, struct_as_array, truncate_leaf: as for `tree_pformat`.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.tree_pprint([jnp.zeros(3), "a"])
    [f32[3], 'a']
    """
    print(tree_pformat(pytree, **options))


tree_pprint.__signature__ = inspect.signature(tree_pformat).replace(  # type: ignore[attr-defined]
    return_annotation="None"
)
