"""Every difference between versions of JAX or Python, and every semi-private JAX name.

The library needs three facts that JAX keeps just outside its documented surface: which trace is
running now (to refuse writes that would leak tracers), what a mutable array reference is, and how
to look one level into a registered pytree.  What moves between JAX releases is handled here.
"""

from __future__ import annotations

import os
import sys
import typing as tp
import weakref

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core as _core
from jax._src import linear_util as _linear_util
from jax._src import source_info_util as _source_info_util
from jax._src import traceback_util as _traceback_util
from jax._src.interpreters import partial_eval as _partial_eval
from jax.core import Tracer as Tracer

T = tp.TypeVar("T")

TraceRef = weakref.ReferenceType  # JAX hands out one weak reference per trace; compare with `is`


trace_state: tp.Any = _core.trace_state
"""Holder of the running trace: `trace_state.value` is a weak reference, the same object each time."""

EAGER: TraceRef = trace_state.value
"""The trace reference seen outside every transform."""


def is_tracing() -> bool:
    """Whether any JAX transform is tracing right now in this thread."""
    return trace_state.value is not EAGER


def is_sharding() -> bool:
    """Whether the running trace is that of an eager `shard_map`, which computes op by op."""
    return type(trace_state.value()).__name__ == "ShardMapTrace"


def is_compiling() -> bool:
    """Whether `jax.jit` compiles functions, which `jax.disable_jit` prevents."""
    return not jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]


def is_recording() -> bool:
    """Whether operations go into a program, now or after the transforms that are running."""
    trace = trace_state.value()
    while trace is not None and not isinstance(trace, _partial_eval.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def in_this_trace(value: tp.Any) -> bool:
    """Whether a value is a tracer of the running trace; under `jvp`, whether it has a tangent."""
    return isinstance(value, Tracer) and value._trace is trace_state.value()


def describe_trace(ref: TraceRef) -> str:
    """A trace reference in words, for error messages."""
    if ref is EAGER:
        return "eager code (outside every transform)"
    trace = ref()
    if trace is None:
        return "a transform that has ended"
    return f"a transform ({type(trace).__name__})"


# Mutable array references -----------------------------------------------------------------

Ref: type = jax.Ref
"""The class of JAX's mutable array references."""


def new_ref(value: tp.Any) -> tp.Any:
    """A new mutable reference that contains a copy of `value`."""
    return jax.new_ref(value)


def is_ref(value: tp.Any) -> bool:
    """Whether `value` is a JAX reference, concrete or traced."""
    return isinstance(value, Ref)


# Arrays -------------------------------------------------------------------------------------

ARRAYS = (jax.Array, np.ndarray, np.generic)
"""The classes of arrays: those of JAX, traced or not, and of NumPy, its scalars included."""

NUMBERS = (*ARRAYS, int, float, complex)
"""The same, and the numbers of Python."""


def is_concrete(value: tp.Any) -> tp.TypeGuard[jax.Array]:
    """Whether a value is an array of JAX that is not traced."""
    return isinstance(value, jax.Array) and not isinstance(value, Tracer)


def is_deleted(value: tp.Any) -> bool:
    """Whether a value is an array that is gone: a call that donates has reused its memory."""
    return is_concrete(value) and value.is_deleted()


def same_form(one: tp.Any, other: tp.Any) -> bool:
    """Whether two values are JAX arrays of one shape and dtype, the other where the one has to be."""
    try:
        a, b = one.aval, other.aval
        if a is not b and (a.shape != b.shape or a.dtype != b.dtype):
            return False
        if isinstance(one, Tracer) or not one.committed or isinstance(other, Tracer):
            return True
        return one.sharding == other.sharding
    except AttributeError:  # also for NumPy arrays that JAX has wrapped: they have an aval alone
        return False


def same_shape(one: tp.Any, other: tp.Any) -> bool:
    """Whether two values are JAX arrays of one shape; quicker than asking each for its `shape`."""
    try:
        return one.aval.shape == other.aval.shape
    except AttributeError:
        return False


def abstract(value: tp.Any, axis: int | None = None) -> tp.Any:
    """An array without its values; inside a mesh with its manual axes and explicit sharding.

    With `axis`, what a scan along that axis gives its body.
    """
    shape = list(np.shape(value))
    empty = axis is not None and shape[axis] == 0
    if not jax.sharding.get_abstract_mesh().empty and not empty and not is_ref(value):
        first = lambda x: x if axis is None else jax.lax.index_in_dim(x, 0, axis, keepdims=False)
        return jax.eval_shape(first, value)
    if axis is not None:
        del shape[axis]
    aval = jax.typeof(value)
    return jax.ShapeDtypeStruct(
        tuple(shape), aval.dtype, weak_type=aval.weak_type, is_ref=is_ref(value)
    )


def as_integer(value: tp.Any) -> tp.Any:
    """An integer of NumPy, or a concrete array of one integer, as an int; any other value unchanged.

    >>> from nnxlite._base.jax import as_integer
    >>> as_integer(np.uint8(3)), as_integer(np.array(3)), as_integer(None), as_integer(True)
    (3, 3, None, True)
    """
    if isinstance(value, (np.ndarray, jax.Array)):
        one = value.shape == () and not isinstance(value, Tracer)
        return int(value) if one and np.issubdtype(value.dtype, np.integer) else value
    return int(value) if isinstance(value, np.integer) else value


def as_integers(given: tp.Any) -> tuple[tp.Any, ...]:
    """None, one integer or name, or several, as a tuple."""
    given = as_integer(given)
    if given is None:
        return ()
    return (given,) if isinstance(given, (int, str)) else tuple(map(as_integer, given))


if tp.TYPE_CHECKING:
    from jaxlib._jax.pytree import PyTreeDef as PyTreeDef
else:
    PyTreeDef = jax.tree_util.PyTreeDef

# Pytrees ------------------------------------------------------------------------------------


def flatten_one_level(
    tree: tp.Any,
) -> tuple[list[tuple[tp.Any, tp.Any]], PyTreeDef]:
    """The direct children of a registered pytree with their key entries, and its one-level treedef."""
    first = iter((False,))  # the first call is for the tree itself
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda _: next(first, True))
    return [(path[0] if path else None, child) for path, child in pairs], treedef


def static_part(treedef: PyTreeDef) -> tp.Any:
    """The static data of the outermost node of a tree."""
    data = treedef.node_data()
    return None if data is None else data[1]


def with_static_part(treedef: PyTreeDef, part: tp.Any) -> PyTreeDef:
    """The treedef with other static data in its outermost node."""
    node = (tp.cast(tp.Any, treedef.node_data())[0], part)
    registry = jax.tree_util.default_registry
    return PyTreeDef.from_node_data_and_children(registry, node, treedef.children())


def without_literals(tree: T) -> T:
    """A tree of results with arrays in place of literals.

    Outside a program, functions made by `jax.checkpoint` and `checkify` return a scalar that is the
    same for all arguments as the literal that it was in their program, which is not a `jax.Array`.
    """
    return jax.tree_util.tree_map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), tree)


def is_pytree_leaf(value: tp.Any) -> bool:
    """Whether JAX sees `value` as one leaf (None, an empty node, is not)."""
    return jax.tree_util.all_leaves((value,))


def key_name(entry: tp.Any) -> tp.Any:
    """The plain name (str, int, ...) inside a JAX key-path entry."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry


def jaxpr_as_fun(jaxpr: tp.Any, consts: tp.Sequence[tp.Any]) -> tp.Callable[..., list[tp.Any]]:
    """The function of flat arrays that a jaxpr with these constants stands for."""
    # Not by way of jax.extend: to import that takes long, and adds settings to JAX's trace key, so
    # that everything traced before, or during the import, would be traced again.
    close = getattr(_core, "ClosedJaxpr", None)  # since JAX 0.12 a Jaxpr holds its constants
    return _core.jaxpr_as_fun(close(jaxpr, consts) if close else jaxpr.with_consts(consts))


Literal: tp.Any = _core.Literal
"""A scalar constant in an equation of a jaxpr."""

RULES: dict[str, frozenset[str]] = {
    "custom_jvp_call": frozenset({"jvp_jaxpr_fun"}),
    "custom_vjp_call": frozenset({"fwd_jaxpr_thunk", "bwd", "out_trees"}),
    "checkpoint": frozenset({"policy"}),
}
"""By primitive, the parameters that matter only where its equation is differentiated."""


def inner_consts(jaxpr: tp.Any) -> tp.Sequence[tp.Any]:
    """The constants of a jaxpr among the parameters of an equation, which may be open."""
    return getattr(jaxpr, "consts", ())


def is_typed_literal(value: tp.Any) -> bool:
    """Whether a value is one of JAX's arrays on the host, which it makes of NumPy's."""
    return type(value).__name__ == "TypedNdArray"


def opened(jaxpr: tp.Any) -> tp.Any:
    """A closed jaxpr without its constants, for `jaxpr_as_fun`."""
    return jaxpr.with_consts([]) if jaxpr.jaxpr is jaxpr else jaxpr.jaxpr


def without_rules(value: tp.Any) -> tp.Any:
    """A jaxpr, an equation or a parameter of one, without the user's rules for derivatives.

    Its equations must not be differentiated. It refers to nothing that the rules captured.
    """
    if hasattr(value, "primitive"):  # an equation
        rules = RULES.get(value.primitive.name, ())
        params = {
            name: _no_rule(x) if name in rules else without_rules(x)
            for name, x in value.params.items()
        }
        same = all(params[name] is x for name, x in value.params.items())
        return value if same else value.replace(params=params)
    if isinstance(value, (tuple, list)):
        parts = [without_rules(part) for part in value]
        make: tp.Any = getattr(type(value), "_make", type(value))
        return value if all(a is b for a, b in zip(value, parts)) else make(parts)
    if not hasattr(value, "eqns"):
        return value
    part = "eqns" if getattr(value, "jaxpr", value) is value else "jaxpr"
    before = getattr(value, part)
    after = without_rules(before)
    return value if after is before else value.replace(**{part: after})


def _no_rule(rule: tp.Any) -> tp.Any:
    if isinstance(rule, _linear_util.WrappedFun):
        return _linear_util.wrap_init(_undifferentiated, debug_info=rule.debug_info)
    return _undifferentiated if callable(rule) else rule


def _undifferentiated(*args: tp.Any) -> tp.Any:
    raise AssertionError  # pragma: no cover - a program for eager calls is never differentiated


def used_inputs(jaxpr: tp.Any) -> list[bool]:
    """For each input of a closed jaxpr whether its outputs, or its effects, depend on it.

    >>> import jax
    >>> from nnxlite._base.jax import used_inputs
    >>> used_inputs(jax.make_jaxpr(lambda x, y: jax.jit(lambda x, y: (y, x))(x, y)[1])(1.0, 2.0))
    [True, False]
    """
    open_jaxpr = jaxpr.jaxpr
    return list(_partial_eval.dce_jaxpr(open_jaxpr, [True] * len(open_jaxpr.outvars))[1])


# Python -------------------------------------------------------------------------------------


def own_annotations(cls: type) -> tp.Mapping[str, tp.Any]:
    """The annotations in the body of a class itself; names not yet defined do not fail."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return annotationlib.get_annotations(cls, format=annotationlib.Format.FORWARDREF)
    return cls.__dict__.get("__annotations__", {})


# Meshes -------------------------------------------------------------------------------------


def current_mesh() -> tp.Any:
    """The mesh in force: set by `jax.set_mesh` or entered with `with mesh:`; None without one."""
    if not is_tracing():
        concrete = jax.sharding.get_mesh()
        if not concrete.empty:
            return concrete
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        return abstract
    from jax._src import mesh as _mesh

    entered = _mesh.thread_resources.env.physical_mesh
    return None if entered.empty else entered


def constrained(value: tp.Any, sharding: tp.Any) -> tp.Any:
    """A traced value with a sharding: a constraint on automatic axes, a resharding on explicit ones.

    `sharding` is a `PartitionSpec` on the mesh in force, or a `Sharding`.
    """
    mesh = sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else None
    here = jax.sharding.get_abstract_mesh()
    kinds = getattr(here if mesh is None else mesh, "axis_types", ())
    if jax.sharding.AxisType.Explicit not in kinds:
        return jax.lax.with_sharding_constraint(value, sharding)
    if mesh is None or mesh.abstract_mesh == here:
        return jax.sharding.reshard(value, sharding)
    return jax.device_put(value, sharding)  # the function is not inside `jax.set_mesh(mesh)`


# Frames -------------------------------------------------------------------------------------


def hide_frames(*packages: str) -> None:
    """Treat these subpackages as part of JAX in tracebacks and in the source lines of operations.

    Both then show the user's line. `JAX_TRACEBACK_FILTERING=off` shows all frames.
    """
    root = os.path.dirname(os.path.dirname(__file__))
    for package in packages:
        path = os.path.join(root, package) + os.sep
        _traceback_util.register_exclusion(path)
        _source_info_util.register_exclusion(path)


def drop_hidden_frames(error: BaseException) -> None:
    """Remove the hidden frames from the traceback of an error that is about to be raised again.

    JAX does so for the frames inside one of its own functions; a transform that calls the user's
    function through several of this library's calls it where it catches the error.
    """
    mode: tp.Any = jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
    if mode != "off" and error.__traceback__ is not None:
        error.__traceback__ = _traceback_util.filter_traceback(error.__traceback__)


hide_frames("boundary", "filtered", "graph", "objects", "transforms", "variables")


# Processes ----------------------------------------------------------------------------------


def coordination() -> tuple[tp.Any, int, int]:
    """The client of the coordination service, the number of processes, and that of this one.

    No client for a process that is alone. `jax.distributed` has no public name for it; Orbax and others
    take it from here as well.
    """
    from jax._src import distributed

    state = distributed.global_state
    client = state.client if state.num_processes > 1 else None
    return client, state.num_processes, state.process_id


# Type variables and protocols by which programs annotate their own functions -----------------

A = tp.TypeVar("A")
B = tp.TypeVar("B")
C = tp.TypeVar("C")
F = tp.TypeVar("F", bound=tp.Callable[..., tp.Any])
K = tp.TypeVar("K")
M = tp.TypeVar("M", bound="Module")  # type: ignore[name-defined]  # noqa: F821 - of nnxlite.objects
P = tp.ParamSpec("P")
R = tp.TypeVar("R")
S = tp.TypeVar("S")
V = tp.TypeVar("V")
Leaf = tp.TypeVar("Leaf")
Node = tp.TypeVar("Node")

Numbers: tp.TypeAlias = "jax.Array | np.ndarray | complex"
"""Arrays and numbers: `complex` includes int and float for type checkers."""

RematPolicy: tp.TypeAlias = tp.Callable[..., bool]
"""Which intermediate values `remat` keeps for the backward pass; see `jax.checkpoint_policies`."""


class Key(tp.Hashable, tp.Protocol):
    """A key of a path: hashable, with an order."""

    def __lt__(self, other: tp.Any, /) -> bool:
        """Whether it comes before another."""
        ...


_State = tp.TypeVar("_State", covariant=True)


class ApplyCaller(tp.Protocol[_State]):
    """What `nnx.call` and `GraphDef.apply` give: a call returns (output, (graphdef, state))."""

    def __getattr__(self, name: str) -> ApplyCaller[_State]:
        """The same for an attribute."""
        ...

    def __getitem__(self, key: tp.Any) -> ApplyCaller[_State]:
        """The same for an item."""
        ...

    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> tuple[tp.Any, _State]:
        """Merge, call, split."""
        ...
