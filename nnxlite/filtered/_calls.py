"""Transforms of functions of any pytrees: arrays are traced or mapped, all else is static.

`filter_vmap` and `filter_pmap` are `vmap` and `pmap` with other settings: a spec gives each leaf an
axis, and leaves without one that are not arrays are static. The axis of a result may depend on the
result, and JAX needs it before the function runs: inside, every mapped result has its new axis in front,
and outside, it is moved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import typing as tp
import warnings

import jax
import jax.numpy as jnp

from nnxlite._base.errors import context_key, path_text, short_type
from nnxlite._base.jax import P, R, RematPolicy, as_integer, jaxpr_as_fun
from nnxlite._base.statics import ById
from nnxlite.boundary._body import trace_body
from nnxlite.boundary._call_def import names_by_position, parameters_of
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._labels import NodePrefix
from nnxlite.boundary._leave import leave
from nnxlite.boundary._out import Outputs, replay
from nnxlite.filtered._specs import (
    IN_AXES,
    OUT_AXES,
    answers,
    call_of,
    filtered,
    has_shape,
    if_array,
    is_array,
    is_array_like,
    is_mapped,
    leaves_of,
    not_arrays,
    parts,
    tree_out,
)
from nnxlite.graph._rebuild import Path
from nnxlite.transforms._call import inputs_in_mode
from nnxlite.transforms._compiles import Lowered
from nnxlite.transforms._control import run_remat
from nnxlite.transforms._jit import JitWrapped, run_jit
from nnxlite.transforms._mapped import Mapped, Resolved, mapped_forms, run_mapped
from nnxlite.transforms._wrapper import Transform, both_forms, decorated, name_of
from nnxlite.variables._definition import MISSING

__all__ = ["filter_checkpoint", "filter_closure_convert", "filter_eval_shape", "filter_jit"]
__all__ += ["filter_make_jaxpr", "filter_pmap", "filter_pure_callback", "filter_vmap"]

if tp.TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

Donate = tp.Literal["all", "all-except-first", "warn", "warn-except-first", "none"]
Callback: tp.TypeAlias = tp.Callable[..., tp.Any]


@contextlib.contextmanager
def _quiet(donate: str) -> tp.Iterator[None]:
    """Suppress JAX's warnings about buffers that are not reused, unless `donate=` asks for them."""
    with warnings.catch_warnings():
        if donate.startswith("all"):
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield


class FilterJit(JitWrapped[P, R]):
    """A compiled function, as `filter_jit` returns it: `jit` whose leaves may be static."""

    def _inputs(self, args: tp.Any, kwargs: tp.Any) -> Inputs:
        inputs = inputs_in_mode(self.bound, args, kwargs, self.options)
        # Training loops pass arrays only: no leaf needs a check of its own. That is 1.4x of `jax.jit`
        # for 72 arrays, and would be 2.3x (benchmarks/filtered.py).
        if static := not_arrays(inputs.leaves):
            inputs.make_static(static, self)
        return inputs

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered[R]:
        """Lower the function for these arguments, without running it."""
        with _quiet(self.options.donate):
            return super().lower(*args, **kwargs)


def _run_quietly(jitted: FilterJit[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    with _quiet(jitted.options.donate):
        return run_jit(jitted, args, kwargs)


_NOT_TAKEN = (
    *("static_argnums", "static_argnames", "donate_argnums", "donate_argnames"),
    *("default", "fn", "args", "kwargs", "out"),
)
"""Options of `jax.jit`, and of early versions of Equinox, that say which arguments are static."""


@tp.overload
def filter_jit(fun: tp.Callable[P, R], **options: tp.Any) -> FilterJit[P, R]: ...
@tp.overload
def filter_jit(**options: tp.Any) -> tp.Callable[[tp.Callable[P, R]], FilterJit[P, R]]: ...
def filter_jit(
    fun: tp.Any = MISSING,
    *,
    donate: Donate = "none",
    max_traces: int | None = None,
    **jitkwargs: tp.Any,
) -> tp.Any:
    """Compile a function of any pytrees: arrays are traced, everything else is static.

    Arguments and results may be any pytrees and graph objects, with leaves of any type. What the
    function writes into objects stays there, as with `nnx.jit`. Equal static leaves compile once.

    Args:
        fun: the function; a bound method or callable object enters with its arrays traced. Without
            it a decorator is returned.
        donate: the arguments whose arrays the call may reuse: `"all"`, `"all-except-first"`, `"none"`;
            with `"warn"` and `"warn-except-first"` JAX warns of those it could not use.
        max_traces: how many times the function may be traced; one more raises RuntimeError with the
            reason.
        jitkwargs: as for `jax.jit`.

    Returns:
        A function of the same arguments, compiled for each structure of them; its methods `lower`,
        `explain`, `cache_info` and `clear_cache` are those of `nnx.jit`.

    Raises:
        ValueError: for a static leaf that is unhashable, and for options that say which arguments are
            static: pass `jnp.asarray(number)` to trace a number.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> @nnx.filter_jit
    ... def power(x, n, name):
    ...     return {name: x**n}
    >>> power(jnp.array(3.0), 2, "square")
    {'square': Array(9., dtype=float32, weak_type=True)}
    """
    for name in _NOT_TAKEN:
        if name in jitkwargs:
            raise ValueError(
                f"filter_jit takes no {name}=: arrays are traced, and all other leaves are static. "
                "Pass jnp.asarray(number) to trace a number, and use donate= to donate."
            )
    if not (isinstance(donate, str) and donate in tp.get_args(Donate)):
        raise ValueError(f"filter_jit: donate={donate!r}; it must be one of {tp.get_args(Donate)}.")
    donated = "" if donate == "none" else donate
    more = {
        "static": frozenset(),
        "donate": donated,
        "in_shardings": None,
        "out_shardings": None,
        "jax_options": tuple(jitkwargs.items()),
        "max_traces": as_integer(max_traces),
    }
    run = _run_quietly if donated.startswith("all") else run_jit
    return decorated(FilterJit, fun, filtered("filter_jit", run, **more))


ARRAYS = if_array(0)
"""The axes of keyword arguments and results by default."""


def _by_leaf_axes(mapped: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> Resolved:
    options, spec = mapped.options, axes_of_call(mapped, args, kwargs)
    inputs = inputs_in_mode(mapped.bound, args, kwargs, options)
    axes, leaves = answers(inputs, spec, IN_AXES), inputs.leaves
    if options.make is jax.pmap:  # what is not an array has no axis, and is static
        axes = [x if not is_mapped(x) or is_array(leaf) else None for x, leaf in zip(axes, leaves)]
    static = [axis is False or (axis is None and not is_array(x)) for axis, x in zip(axes, leaves)]
    inputs.make_static(static)
    if inputs.static is not None:
        axes = inputs.static.split(axes)
    axes = [axis if is_mapped(axis) else None for axis in axes]
    call = inputs.define_always((*context_key(), ("in_axes", tuple(axes))))

    def settings() -> tuple[list[tp.Any], list[tp.Any]]:
        by_position = parts(call, spec, IN_AXES)
        of_root = {leaf.root: axis for leaf, axis in zip(call.leaves(), axes)}
        of_roots = enumerate([by_position[position] for position in call.where])
        return axes, [of_root.get(i) if isinstance(x, NodePrefix) else x for i, x in of_roots]

    return inputs, call, settings


def axes_of_call(mapped: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    """`in_axes` of a call, in the form of `(args, kwargs)`; what the function carries has none.

    Raises ValueError for a tuple of another length, or a name that the call does not give.
    """
    axes, bound, fun = mapped.options.in_axes, mapped.bound, mapped.__wrapped__
    is_dict = isinstance(axes, dict)
    by_name = axes if is_dict else {}
    parameters = (parameters_of(fun) or []) if is_dict else []
    names = names_by_position(parameters[: len(args)])
    names += [""] * (len(args) - len(names))
    missing = [name for name in by_name if name not in kwargs and name not in names]
    if missing:
        raise ValueError(
            f"{mapped!r}: in_axes= has a spec for the arguments {missing}, which the call does "
            f"not give: {name_of(fun)} has {[p.name for p in parameters]}. Pass them, or leave "
            "them out."
        )
    others = ARRAYS if is_dict else axes
    positional = axes if isinstance(axes, tuple) else [by_name.get(n, others) for n in names]
    if len(positional) != len(args):
        raise ValueError(
            f"{mapped!r}: in_axes has {len(axes)} entries for {len(args)} positional arguments."
        )
    named = {name: by_name.get(name, ARRAYS) for name in kwargs}
    return (*[None] * len(bound.args), *positional), {**dict.fromkeys(bound.kwargs), **named}


def _axis_of(setting: tp.Any, path: Path, variable: tp.Any, leaf: tp.Any) -> int | None:
    """The axis of a leaf of the result; None where it has none.

    Raises TypeError for an axis of something that is not an array.
    """
    axis = OUT_AXES.answer(setting, path, variable, leaf)
    if not is_mapped(axis):
        return None
    if leaf is not None and not is_array_like(leaf):
        raise TypeError(
            f"out_axes: the leaf at '{path_text(path)}' must be traced, but {short_type(leaf)} "
            f"{leaf!r} is neither an array nor a number."
        )
    return axis


def _mapped(
    fun: tp.Any, make: tp.Any, in_axes: tp.Any, out_axes: tp.Any, jax_options: dict[str, tp.Any]
) -> tp.Any:
    """A function under a mapping transform of JAX, with axes in either form."""
    for name in ("default", "fn", "args", "kwargs", "out"):
        if name in jax_options:
            raise ValueError(
                f"filter_{make.__name__} takes no {name}=: use in_axes= and out_axes=. To map a module "
                "itself, make it an argument: filter_vmap(lambda m, x: m(x))(models, x)."
            )
    jax_options["axis_size"] = as_integer(jax_options["axis_size"])
    options = filtered(
        f"filter_{make.__name__}",
        run_mapped,
        resolve=_by_leaf_axes,
        make=make,
        in_axes=tuple(in_axes) if isinstance(in_axes, list) else in_axes,
        out_prefix=out_axes,
        kind="axes",
        default=ARRAYS,
        order=(0, None),
        axis_of=_axis_of,
        axis_names=(),
        jax_options=tuple(jax_options.items()),
    )
    return decorated(Mapped if make is jax.pmap else Transform, fun, options)


@both_forms
def filter_vmap(
    fun: tp.Any = MISSING,
    *,
    in_axes: tp.Any = if_array(0),  # noqa: B008
    out_axes: tp.Any = if_array(0),  # noqa: B008
    axis_name: tp.Hashable = None,
    axis_size: int | None = None,
    **vmapkwargs: tp.Any,
) -> tp.Any:
    """Vectorise a function over an axis of each array among its arguments.

    Arguments and results may be any pytrees and graph objects with leaves of any type. What the
    function writes into objects stays there, with the axis that it came in with.

    Args:
        fun: the function; without it a decorator is returned. A module or a bound method is not
            mapped itself.
        in_axes: the axis of each leaf: an int, None (not mapped), a function of the leaf, or a tuple
            with a prefix of these for each positional argument, or a dict of them by the arguments'
            names. Other arguments, and those by keyword, are mapped over axis 0.
        out_axes: the same for the result.
        axis_name, axis_size: as for `jax.vmap`.
        vmapkwargs: as for `jax.vmap`.

    Returns:
        A function of the same arguments, with an axis more in what it returns.

    Raises:
        ValueError: for a prefix that does not match, an axis of an argument that was not given, sizes
            that differ, or where nothing is mapped.
        TypeError: for a leaf with an axis that is not an array.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter_vmap(lambda x, n: (x**n, "power"))(jnp.array([1.0, 2.0]), 2)
    (Array([1., 4.], dtype=float32), 'power')
    """
    vmapkwargs |= {"axis_name": axis_name, "axis_size": axis_size}
    return _mapped(fun, jax.vmap, in_axes, out_axes, vmapkwargs)


@mapped_forms
def filter_pmap(
    fun: tp.Any = MISSING,
    *,
    in_axes: tp.Any = if_array(0),  # noqa: B008
    out_axes: tp.Any = if_array(0),  # noqa: B008
    axis_name: tp.Hashable = None,
    axis_size: int | None = None,
    donate: tp.Literal["all", "warn", "none"] = "none",
    **pmapkwargs: tp.Any,
) -> tp.Any:
    """Run a function on several devices, one slice of each array on each of them.

    As `filter_vmap`, with `jax.pmap`. Leaves with axis None or True go to every device; those with
    False are static, and so are leaves with an axis that are not arrays. The result has a method
    `lower`, like that of `filter_jit`.

    Args:
        fun: the function; without it a decorator is returned.
        in_axes, out_axes, axis_name, axis_size: as for `filter_vmap`.
        donate: accepted, and without effect, as `donate_argnums` of `pmap`: objects need their buffers.
        pmapkwargs: as for `jax.pmap`.

    Returns:
        A function of the same arguments.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter_pmap(lambda x, name: (x + 1, name))(jnp.ones((1, 2)), "one")[1]
    'one'
    """
    if donate not in ("all", "warn", "none"):
        raise ValueError(f"filter_pmap: donate={donate!r}; it must be 'all', 'warn' or 'none'.")

    for name in ("static_broadcasted_argnums", "donate_argnums"):
        if name in pmapkwargs:
            raise ValueError(
                f"filter_pmap takes no {name}=: whether a leaf is static is decided leaf by "
                "leaf. Use in_axes=."
            )
    pmapkwargs |= {"axis_name": axis_name, "axis_size": axis_size}
    return _mapped(fun, jax.pmap, in_axes, out_axes, pmapkwargs)


# Shapes and programs, checkpoints, shardings, callbacks, closures ---------------------------------


def filter_make_jaxpr(
    fun: tp.Callable[P, R],
) -> tp.Callable[P, tuple[ClosedJaxpr, tp.Any, tp.Any]]:
    """The program of a function of any pytrees.

    Arrays and `jax.ShapeDtypeStruct`s among the arguments are traced, all else is static. Leaves that
    the function carries (such as those of a module that is called) are constants of the program.

    Args:
        fun: a function of any pytrees.

    Returns:
        A function of example arguments that gives `(closed_jaxpr, shapes, statics)`: the program; the
        result with a `jax.ShapeDtypeStruct` for each array and None elsewhere; and with None for
        each array.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> jaxpr, shapes, statics = nnx.filter_make_jaxpr(lambda x, n: (x + n, n))(jnp.ones(2), 1)
    >>> shapes, statics
    ((ShapeDtypeStruct(shape=(2,), dtype=float32), None), (None, 1))
    """

    @functools.wraps(fun)
    def make(*args: P.args, **kwargs: P.kwargs) -> tuple[ClosedJaxpr, tp.Any, tp.Any]:
        call = call_of("filter_make_jaxpr", fun, args, kwargs)
        owners = zip(call.leaves, call.owners())
        call.tracing(owner is not None and has_shape(x) for x, owner in owners)
        run = lambda *traced: tree_out(call.run(traced)[1])
        jaxpr, (fixed, shapes) = jax.make_jaxpr(run, return_shape=True)(*call.leaves)
        return jaxpr, fixed.value.build(shapes, blank=True), fixed.value.build([None] * len(shapes))

    return make


def filter_eval_shape(fun: tp.Callable[..., R], /, *args: tp.Any, **kwargs: tp.Any) -> R:
    """The result of a function with a `jax.ShapeDtypeStruct` for each array; nothing is computed.

    Arguments and result may be of any type. Nothing is written into the arguments.

    Args:
        fun: the function.
        args, kwargs: its arguments, with arrays or `jax.ShapeDtypeStruct`s.

    Returns:
        The result, with `jax.ShapeDtypeStruct`s for arrays; all other leaves are unchanged.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter_eval_shape(lambda x, name: (x @ x.T, name), jnp.ones((2, 3)), "gram")
    (ShapeDtypeStruct(shape=(2, 2), dtype=float32), 'gram')
    """
    call = call_of("filter_eval_shape", fun, args, kwargs)
    call.tracing(map(has_shape, call.leaves))
    crossed, leaves = jax.eval_shape(lambda leaves: (call.run_out(leaves), leaves), call.leaves)
    return replay(Inputs(call.definition.build(leaves), trees=True), crossed)


@both_forms
def filter_checkpoint(
    fun: tp.Any = MISSING, *, prevent_cse: bool = True, policy: RematPolicy | None = None
) -> tp.Any:
    """A function whose intermediate values are computed again on the backward pass.

    Args:
        fun: a function of any pytrees; without it a decorator is returned.
        prevent_cse, policy: as for `jax.checkpoint`.

    Returns:
        A function with the parameters and the result of `fun`.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> jax.grad(nnx.filter_checkpoint(lambda x: jnp.sin(jnp.sin(x))))(0.0)
    Array(1., dtype=float32, weak_type=True)
    """
    more = {"static_argnums": (), "prevent_cse": prevent_cse, "policy": policy}
    return decorated(Transform, fun, filtered("filter_checkpoint", run_remat, **more))


@tp.overload
def filter_pure_callback(
    callback: Callback, *args: tp.Any, result_shape_dtypes: jax.ShapeDtypeStruct, **options: tp.Any
) -> jax.Array: ...
@tp.overload
def filter_pure_callback(callback: Callback, *args: tp.Any, **options: tp.Any) -> tp.Any: ...
def filter_pure_callback(
    callback: Callback,
    *args: tp.Any,
    result_shape_dtypes: tp.Any,
    sharding: tp.Any = None,
    vmap_method: str | None = None,
    vectorized: bool | None = None,
    **kwargs: tp.Any,
) -> tp.Any:
    """Call a Python function from a compiled one, with arguments of any type.

    Args:
        callback: a function without side effects; it gets concrete arrays.
        args, kwargs: its arguments; leaves that are not arrays are passed unchanged.
        result_shape_dtypes: the form of its result: a `jax.ShapeDtypeStruct` for each array; other
            leaves are returned unchanged.
        sharding, vmap_method: as for `jax.pure_callback`.
        vectorized: True for `vmap_method="expand_dims"`, False for `"sequential"`.

    Returns:
        The result of the callback, in the form of `result_shape_dtypes`.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp, numpy as np
    >>> shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    >>> power = lambda x, n: np.asarray(x) ** n
    >>> jax.jit(lambda x: nnx.filter_pure_callback(power, x, 2, result_shape_dtypes=shape))(
    ...     jnp.array([1.0, 3.0]))
    Array([1., 9.], dtype=float32)
    """
    if vectorized is not None:
        vmap_method = "expand_dims" if vectorized else "sequential"
    given, arrays = tree_out((args, kwargs))
    form, shapes = tree_out(result_shape_dtypes, has_shape)

    def run(*arrays: tp.Any) -> list[tp.Any]:
        inner_args, named = given.value.build(arrays)
        returned, wanted = leaves_of(callback(*inner_args, **named)), form.value
        paths = [[at.path for at in call.all_leaves] for call in (returned.definition, wanted)]
        if paths[0] != paths[1]:
            raise ValueError(
                f"filter_pure_callback: the callback returned a result of structure "
                f"{returned.treedef}, result_shape_dtypes has {wanted.treedef}."
            )
        leaves = returned.leaves
        return leaves if wanted.static is None else wanted.static.split(leaves)

    more = {"sharding": sharding, "vmap_method": vmap_method}
    return form.value.build(jax.pure_callback(run, _structs(shapes), *arrays, **more))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["consts"], meta_fields=["_traced"]
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ClosureConverted(tp.Generic[P, R]):
    """A function whose captured arrays are leaves, as `filter_closure_convert` returns it.

    Attributes:
        consts: the captured arrays.
    """

    consts: list[tp.Any]
    _traced: ById  # the name of the function, its example arguments, and its program

    @property
    def in_struct(self) -> tp.Any:
        """The example arguments, `(args, kwargs)`, with a `jax.ShapeDtypeStruct` for each array."""
        _, call, body = self._traced.value
        return call.build(_structs(body.jaxpr.in_avals))

    @property
    def out_struct(self) -> tp.Any:
        """The result, with a `jax.ShapeDtypeStruct` for each array."""
        _, call, body = self._traced.value
        inputs = Inputs(call.build(_structs(body.jaxpr.in_avals)), call.trees)
        return replay(inputs, body.outputs(_structs(body.jaxpr.out_avals)))

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        name, call, body = self._traced.value
        inputs = Inputs((args, kwargs), trees=True)
        given, arrays = tree_out((args, kwargs))
        if given.value != call or not body.accepts(arrays):
            raise ValueError(
                f"{name} was closure-converted for other arguments: call it with the "
                "structure, shapes and static leaves of the example."
            )
        out = jaxpr_as_fun(body.jaxpr.jaxpr, self.consts)(*arrays)
        return replay(inputs, body.outputs(map(jnp.asarray, out)))


def _structs(avals: tp.Iterable[tp.Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]


def filter_closure_convert(
    fn: tp.Callable[P, R], *args: tp.Any, **kwargs: tp.Any
) -> ClosureConverted[P, R]:
    """A function whose captured arrays are explicit: they are leaves of the function itself.

    The function is traced for the example arguments, not run; call the result with arguments of the
    same structure, shapes, dtypes and static leaves. A `jax.ShapeDtypeStruct` is an example of an
    array.

    Args:
        fn: the function.
        args, kwargs: examples of its arguments.

    Returns:
        A function of the same arguments, and a pytree of the arrays that it captured; `out_struct`
        has the shapes and dtypes of its result.

    Raises:
        ValueError: (by the result) for arguments of another form than the example.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> weight = jnp.array(3.0)
    >>> converted = nnx.filter_closure_convert(lambda x: x * weight, jnp.array(1.0))
    >>> jax.tree.leaves(converted), float(converted(jnp.array(2.0)))
    ([Array(3., dtype=float32, weak_type=True)], 6.0)
    >>> converted.out_struct
    ShapeDtypeStruct(shape=(), dtype=float32)
    """
    given, arrays = tree_out((args, kwargs), has_shape)

    def run(inner: tp.Any, tree: tp.Any) -> tuple[Outputs, None]:
        out = leave(inner, tp.cast(tp.Any, fn)(*tree[0], **tree[1]))
        return out.as_arrays(is_array), None

    body = trace_body(given.value, run, arrays, user=fn)
    return ClosureConverted(body.consts, ById((name_of(fn), given.value, body)))
