"""The calls inside one call of a model: the objects, their shapes, and the cost of each call.

`watched` passes the calls of some objects, in the current context only, through a function that learns
their paths.  Each object has its path as a static attribute, which stays with it in the transforms that
the model itself may apply; so the objects are always copies.  There are two ways to make the copies:

- `PackedCall` splits a model and merges it inside a trace, so that only shapes are computed;
- `copied_call` clones the arguments of a function, which runs without compilation, on values.

To get the cost of calls, each runs as a compiled function of its own, so that XLA can count its
operations, and those of the calls around it, without running the model again.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.jax import is_ref, new_ref
from nnxlite._base.outline import array_text
from nnxlite._base.text import is_array, short
from nnxlite.boundary._call_def import parameter_names
from nnxlite.filtered._calls import filter_jit
from nnxlite.graph._functional import clone, merge, split
from nnxlite.graph._kinds import GraphNode, hidden_writes_undone
from nnxlite.graph._walk import iter_graph
from nnxlite.objects._capture import observed, public_methods
from nnxlite.transforms._wrapper import unbind
from nnxlite.variables._variable import Variable

Path = tuple[tp.Any, ...]


@dataclasses.dataclass(frozen=True)
class CallInfo:
    """One row of a table: a call of an object, the first with inputs of this form.

    Attributes:
        call_order: number of rows that began before it.
        object_id: `id` of the object.
        type: its class.
        path: where the object is, and the name of the method if that is not `__call__`.
        inputs_repr: its arguments, arrays by dtype and shape.
        outputs: what it returned, with a `jax.ShapeDtypeStruct` in place of each array.
        flops: floating-point operations of the call, if they were asked for.
        vjp_flops: those of the call and its gradient with respect to parameters and inputs.
    """

    call_order: int
    object_id: int
    type: type
    path: Path
    inputs_repr: str
    outputs: tp.Any
    flops: int | None = None
    vjp_flops: int | None = None


def is_called(node: tp.Any) -> bool:
    """Whether calls of this object can make a row."""
    return isinstance(node, GraphNode) and any(public_methods(type(node)))


# One call as data ----------------------------------------------------------------------------


def abstract(value: tp.Any) -> jax.ShapeDtypeStruct:
    weak_type = bool(getattr(value, "weak_type", False))
    dtype = value.dtype
    if isinstance(value, np.ndarray):  # of float64, say
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(value.shape, dtype, weak_type=weak_type)


def _is_object(value: tp.Any) -> bool:
    return isinstance(value, (GraphNode, Variable))


def _is_array(value: tp.Any) -> bool:
    return (is_array(value) or isinstance(value, np.generic)) and not _is_object(value)


class PackedCall:
    """An object and the arguments of one call: abstract arrays, and how to rebuild the rest.

    Attributes:
        arrays: shape and dtype of every array, in the object and in the arguments.
        has_refs: whether one of them is in an array reference.
    """

    def __init__(self, obj: tp.Any, args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]) -> None:
        self._graphdef, state = split([obj, args, kwargs])
        self._leaves, self._tree = jax.tree.flatten(state)
        self.arrays = [abstract(leaf) for leaf in self._leaves if _is_array(leaf)]
        self.has_refs = any(map(is_ref, self._leaves))

    def unpack(self, arrays: tp.Sequence[tp.Any]) -> tuple[tp.Any, tp.Any, tp.Any]:
        """A new object, and new positional and keyword arguments, with these arrays."""
        remaining = iter(arrays)
        as_before = lambda leaf, array: new_ref(array) if is_ref(leaf) else array
        leaves = [as_before(x, next(remaining)) if _is_array(x) else x for x in self._leaves]
        call: tp.Any = merge(self._graphdef, jax.tree.unflatten(self._tree, leaves))
        return tuple(call)


def _result(value: tp.Any) -> tp.Any:
    """A returned value without its tracers."""
    if isinstance(value, Variable):
        value = value.get_raw_value()
    if isinstance(value, GraphNode):
        return type(value)
    return abstract(value) if _is_array(value) else value


# Watching ------------------------------------------------------------------------------------

_LABEL = "_watched_label"


class _Label:
    """The path of an object; equal to no other, so that JAX traces functions again to watch them."""

    def __init__(self, path: Path) -> None:
        self.path = path


_watched: contextvars.ContextVar[object] = contextvars.ContextVar("watched", default=None)

Watch: tp.TypeAlias = tp.Callable[
    [tp.Callable[..., tp.Any], Path, tp.Any, str, tuple[tp.Any, ...], dict[str, tp.Any]], tp.Any
]
"""Makes a call in place of the caller: `watch(call, path, obj, name, args, kwargs)`."""


@contextlib.contextmanager
def watched(
    roots: tp.Iterable[tuple[Path, tp.Any]],
    watch: Watch,
    methods: tp.Iterable[tuple[type, str]] = (),
) -> tp.Iterator[None]:
    """Pass the calls of the objects below some roots through a function while the block runs.

    It changes the objects.

    Args:
        roots: each with the beginning of the paths below it.
        watch: the function.
        methods: further methods to watch, beside `__call__` and the public ones.

    >>> import nnxlite as nnx
    >>> from nnxlite.inspect._calls import watched
    >>> def show(call, path, obj, name, args, kwargs):
    ...     print(path, name, args)
    ...     return call(obj, *args, **kwargs)
    >>> model = nnx.Sequential(abs, nnx.Identity())
    >>> with watched([(("model",), model)], show):
    ...     y = model(-3)
    ('model',) __call__ (-3,)
    ('model', 'layers', 1) __call__ (3,)
    """
    found = [((*at, *path), x) for at, root in roots for path, x in iter_graph(root)]
    nodes: list[tuple[Path, tp.Any]] = [(p, x) for p, x in found if isinstance(x, GraphNode)]
    paths = {id(node): path for path, node in reversed(nodes)}  # the first of each
    for _, node in nodes:
        if is_called(node):
            with contextlib.suppress(AttributeError, TypeError):  # an immutable object
                node._nnx_assign(_LABEL, _Label(paths[id(node)]))  # not by a user's `__setattr__`
    this = object()

    def observe(call: tp.Any, obj: tp.Any, name: str, args: tp.Any, kwargs: tp.Any) -> tp.Any:
        label = getattr(obj, "__dict__", {}).get(_LABEL)
        path = paths.get(id(obj)) if label is None else label.path
        if path is None or _watched.get() is not this:
            return call(obj, *args, **kwargs)
        return watch(call, path, obj, name, args, kwargs)

    with observed([*public_methods(*(type(node) for _, node in nodes)), *methods], observe):
        token = _watched.set(this)
        try:
            with hidden_writes_undone(node for _, node in nodes):
                yield
        finally:
            _watched.reset(token)


def copied_call(
    fun: tp.Any, args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]
) -> tuple[list[tuple[Path, tp.Any]], tp.Callable[[], tp.Any]]:
    """A call of a function with copies of the objects in its arguments.

    Args:
        fun: a function, a module, or a method of one; the module is copied as well, and so are objects
            in the arguments of a partial.
        args, kwargs: its arguments.

    Returns:
        The copies, each with the beginning of the paths below it: nothing for the module of `fun`, the
        name of the parameter for an argument. And the function that makes the call.
    """
    unbound = unbind(fun)
    copies: tp.Any = clone([unbound.args, args, {**unbound.kwargs, **kwargs}])
    carried, args, kwargs = copies
    call, method = unbound.fun, getattr(unbound.fun, "__name__", "")
    if carried and getattr(type(carried[0]), method, None) is call:  # the class will have another
        call = lambda obj, *args, **kwargs: getattr(obj, method)(*args, **kwargs)
    names = [*parameter_names(fun)]
    names += [f"args[{i}]" for i in range(len(names), len(args))]
    named = (*zip(unbound.names[1:], carried[1:]), *zip(names, args), *kwargs.items())
    roots = [*(((), owner) for owner in carried[:1]), *(((name,), x) for name, x in named)]
    return roots, functools.partial(call, *carried, *args, **kwargs)


# Recording -----------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Row:
    """One call while it is recorded."""

    packed: PackedCall
    run: tp.Callable[[tp.Any, tp.Any, tp.Any], tp.Any]
    outputs: tp.Any = None


def trace_calls(
    obj: tp.Any,
    method: str,
    args: tuple[tp.Any, ...],
    kwargs: dict[str, tp.Any],
    *,
    depth: int | None = None,
    costs: tp.Sequence[str] = (),
) -> list[CallInfo]:
    """The calls of the objects in a model while `obj.method(*args, **kwargs)` runs on shapes.

    Calls are in the order in which they began, one for each object, method and form of the inputs;
    those with paths longer than `depth` are omitted. `costs` are "flops" and "vjp_flops", if wanted:
    then each call runs as a compiled function.

    Raises:
        ValueError: if `obj` is not a module or another graph object.
        AttributeError: if it does not have this method.
    """
    if not isinstance(obj, GraphNode):
        raise ValueError(
            f"Expected a Module or another graph object, got {type(obj).__name__}. To tabulate a "
            "plain function, make it the `__call__` of a Module."
        )
    if not any(method in base.__dict__ for base in type(obj).__mro__):  # a class itself is callable
        raise AttributeError(
            f"{type(obj).__name__} has no method {method!r} to tabulate. Define it, or name "
            "another with `method=`."
        )
    nodes = dict(iter_graph(obj))
    packed = PackedCall(obj, args, kwargs)
    rows: dict[tuple[Path, str, str], _Row] = {}

    def record(
        call: tp.Any, where: Path, obj: tp.Any, name: str, args: tp.Any, kwargs: tp.Any
    ) -> tp.Any:
        """Make a call, and record it as a row if it is the first with inputs of this form."""
        inputs = arguments_text(args, kwargs)
        if (where, name, inputs) in rows:
            return call(obj, *args, **kwargs)
        made: tp.Any = lambda obj, args, kwargs: call(obj, *args, **kwargs)
        row = rows[where, name, inputs] = _Row(PackedCall(obj, args, kwargs), made)
        if costs and not row.packed.has_refs:  # a compiled function cannot take them as arrays
            row.run = filter_jit(made)
        outputs = row.run(obj, args, kwargs)
        row.outputs = jax.tree.map(_result, outputs, is_leaf=_is_object)
        return outputs

    def run(arrays: list[tp.Any]) -> None:
        copy, copied_args, copied_kwargs = packed.unpack(arrays)
        with watched([((), copy)], record, [(type(obj), method)]):
            getattr(copy, method)(*copied_args, **copied_kwargs)

    jax.eval_shape(run, packed.arrays)

    infos = []
    for order, ((where, name, inputs), row) in enumerate(rows.items()):
        path = where if name == "__call__" else (*where, name)
        is_root = where == () and name == method
        if where not in nodes or (depth is not None and len(path) > depth and not is_root):
            continue
        node = nodes[where]
        flops = {cost: _flops(row, with_gradient=cost == "vjp_flops") for cost in costs}
        infos.append(CallInfo(order, id(node), type(node), path, inputs, row.outputs, **flops))
    return infos


# Cost ----------------------------------------------------------------------------------------


def _flops(row: _Row, with_gradient: bool) -> int:
    """Floating-point operations for the results of one call, as XLA counts them.

    They are counted before the program is optimised, which XLA does on the CPU only; where there is
    none, in the compiled program. 0 if XLA does not count them.

    Args:
        row: the call.
        with_gradient: count the gradient for all floating inputs and parameters as well.
    """

    def results(arrays: list[tp.Any]) -> list[tp.Any]:
        obj, args, kwargs = row.packed.unpack(arrays)
        with hidden_writes_undone([node for _, node in iter_graph(obj)]):
            outputs = row.run(obj, args, kwargs)
        return [x for x in jax.tree.leaves(outputs) if _is_array(x) and not is_ref(x)]

    def gradients(arrays: list[tp.Any]) -> tp.Any:
        is_real = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
        real = lambda arrays: [x for x in results(arrays) if is_real(x)]
        values, pull_back = jax.vjp(real, arrays)
        return values, [x for x in pull_back([*map(jnp.ones_like, values)])[0] if is_real(x)]

    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names other backends only
        device = None
    # Traced here: for another device JAX would trace all layers again.
    traced = jax.jit(gradients if with_gradient else results).trace(row.packed.arrays)
    with jax.default_device(device):
        lowered = traced.lower()
    cost = lowered.cost_analysis() or lowered.compile().cost_analysis() or {}
    return int(cost.get("flops", 0))


# Arguments and results as text ---------------------------------------------------------------


def arguments_text(args: tuple[tp.Any, ...], kwargs: tp.Mapping[str, tp.Any]) -> str:
    """Arguments, one per line; a single positional one without a bullet."""
    if len(args) == 1 and not kwargs:
        return layout(args[0])
    return "\n".join([*map(_item, args), *[field_text(k, v) for k, v in kwargs.items()]])


def layout(value: tp.Any) -> str:
    """A value with arrays by dtype and shape; containers by indentation.

    >>> import jax.numpy as jnp
    >>> from nnxlite.inspect._calls import layout
    >>> print(layout({"mean": jnp.zeros((2, 3)), "sizes": (4, 5)}))
    mean: float32[2,3]
    sizes:
      - 4
      - 5
    """
    if isinstance(value, Variable):
        return layout(value.get_raw_value())
    if isinstance(value, GraphNode):
        return type(value).__name__
    if _is_array(value):
        return array_text(value)
    if isinstance(value, (list, tuple)) and value and not hasattr(value, "_fields"):
        return "\n".join(map(_item, value))
    if isinstance(value, tp.Mapping) and value:
        return "\n".join(field_text(key, item) for key, item in value.items())
    leaves = jax.tree_util.tree_leaves_with_path(value)
    if not leaves or leaves[0][1] is value:
        return short(value)
    keys = [jax.tree_util.keystr(path).lstrip(".") for path, _ in leaves]
    return "\n".join(field_text(key, leaf) for key, (_, leaf) in zip(keys, leaves, strict=True))


def _item(value: tp.Any) -> str:
    return "- " + layout(value).replace("\n", "\n  ")


def field_text(name: tp.Any, value: tp.Any) -> str:
    """A named value: on the line of its name, or indented below if it is a container."""
    text = layout(value)
    if "\n" in text or text.startswith("- "):
        return f"{name}:\n  " + text.replace("\n", "\n  ")
    return f"{name}: {text}"
