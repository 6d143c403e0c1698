"""`filter_jit`, `filter_vmap` and `filter_pmap`: arrays are traced or mapped, all else is static.

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

from nnxlite._base.errors import context_key, path_text, short_type
from nnxlite._base.jax import P, R, as_integer
from nnxlite.boundary._call_def import (
    CallDef,
    Inner,
    StaticLeaves,
    names_by_position,
    parameters_of,
    static_leaves,
)
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._labels import Meaning, NodePrefix, new_variables
from nnxlite.boundary._out import Outputs, Source, output_paths, pick
from nnxlite.filtered._specs import (
    IN_AXES,
    OUT_AXES,
    answers,
    are_arrays,
    filtered,
    if_array,
    is_array,
    is_array_like,
    is_mapped,
    only_arrays,
    parts,
)
from nnxlite.graph._rebuild import Path
from nnxlite.transforms._call import Selection, inputs_in_mode
from nnxlite.transforms._compiles import Lowered, Staged, refuse_other_structure
from nnxlite.transforms._jit import JitWrapped, run_jit
from nnxlite.transforms._mapped import Program
from nnxlite.transforms._wrapper import Transform, decorated, name_of, program
from nnxlite.variables._definition import MISSING

Donate = tp.Literal["all", "all-except-first", "warn", "warn-except-first", "none"]


@contextlib.contextmanager
def without_warnings(donate: str) -> tp.Iterator[None]:
    """Suppress JAX's warnings about buffers that are not reused, unless `donate=` asks for them."""
    if not donate.startswith("all"):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield


class FilterJit(JitWrapped[P, R]):
    """A compiled function, as `filter_jit` returns it: `jit` whose leaves may be static."""

    def _inputs(self, args: tp.Any, kwargs: tp.Any) -> Inputs:
        inputs = inputs_in_mode(self.bound, args, kwargs, self.options)
        # Training loops pass arrays only: no leaf needs a check of its own. That is 1.4x of `jax.jit`
        # for 72 arrays, and would be 2.3x (benchmarks/filtered.py).
        leaves = inputs.leaves
        if not only_arrays(leaves):
            inputs.make_static([not traced for traced in are_arrays(leaves)], self)
        return inputs

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered[R]:
        """Lower the function for these arguments, without running it."""
        with without_warnings(self.options.donate):
            return super().lower(*args, **kwargs)


def _run_quietly(jitted: FilterJit[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    with without_warnings(jitted.options.donate):
        return run_jit(jitted, args, kwargs)


_NOT_TAKEN = (
    *("static_argnums", "static_argnames", "donate_argnums", "donate_argnames"),
    *("default", "fn", "args", "kwargs", "out"),
)
"""Options of `jax.jit`, and of early versions of Equinox, that say which arguments are static."""


@tp.overload
def filter_jit(fun: tp.Callable[P, R], **options: tp.Any) -> FilterJit[P, R]: ...
@tp.overload
def filter_jit(
    **options: tp.Any,
) -> tp.Callable[[tp.Callable[P, R]], FilterJit[P, R]]: ...
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
        "static": Selection(),
        "donate": donated,
        "in_shardings": None,
        "out_shardings": None,
        "jax_options": tuple(jitkwargs.items()),
        "max_traces": as_integer(max_traces),
    }
    run = _run_quietly if donated else run_jit
    return decorated(FilterJit, fun, filtered("filter_jit", run, **more))


ARRAYS = if_array(0)
"""The axes of keyword arguments and results by default."""


class FilterPmap(Transform[P, R]):
    """A function over slices of its arguments, one on each device, as `filter_pmap` returns it."""

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered[R]:
        """Lower the function for these arguments, without running it."""
        return Lowered.of("lower", self, args, kwargs)

    def staged(self, args: tp.Any, kwargs: tp.Any, program: CallDef | None = None) -> Staged:
        """A call, ready for JAX; see `Staged`."""
        staged = _staged(self, args, kwargs)
        if program is not None:
            refuse_other_structure(self, program, staged.key)
        return staged


def _staged(mapped: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> Staged:
    """A call of a mapped function, ready for JAX."""
    options, is_pmap = mapped.options, mapped.options.make is jax.pmap
    spec = axes_of_call(mapped, args, kwargs)
    inputs = inputs_in_mode(mapped.bound, args, kwargs, options)
    axes, leaves = answers(inputs, spec, IN_AXES), inputs.leaves
    if is_pmap:  # what is not an array has no axis, and is static
        axes = [x if not is_mapped(x) or is_array(leaf) else None for x, leaf in zip(axes, leaves)]
    inputs.make_static(
        [axis is False or (axis is None and not is_array(x)) for axis, x in zip(axes, leaves)]
    )
    if inputs.static is not None:
        axes = inputs.static.split(axes)
    axes = [axis if is_mapped(axis) else None for axis in axes]
    key = (
        inputs.define((*context_key(), ("in_axes", tuple(axes)))) if is_pmap else inputs.definition
    )

    def make() -> Program:
        by_position = parts(key, spec, IN_AXES)
        of_root = {leaf.root: axis for leaf, axis in zip(key.leaves(), axes)}
        of_roots = enumerate([by_position[position] for position in key.where])
        roots = [of_root.get(i) if isinstance(x, NodePrefix) else x for i, x in of_roots]
        return Program(mapped, key, axes, roots)

    made = program(mapped, key.exactly, make) if is_pmap else make()  # JAX traces in each call
    run = functools.partial(made.run, inputs)
    return Staged(key, made.mapped, (inputs.leaves, *made.size), run)


def axes_of_call(mapped: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    """`in_axes` of a call, in the form of `(args, kwargs)`; what the function carries has none.

    Raises ValueError for a tuple of another length, or a name that the call does not give.
    """
    axes, bound, fun = mapped.options.in_axes, mapped.bound, mapped.__wrapped__
    positional = axes if isinstance(axes, tuple) else [axes] * len(args)
    if len(positional) != len(args):
        raise ValueError(
            f"{mapped!r}: in_axes has {len(axes)} entries for {len(args)} positional arguments."
        )
    by_name = axes if isinstance(axes, dict) else {}
    if isinstance(axes, dict):
        parameters = parameters_of(fun) or []
        names = names_by_position(parameters[: len(args)])
        missing = [name for name in axes if name not in kwargs and name not in names]
        if missing:
            raise ValueError(
                f"{mapped!r}: in_axes= has a spec for the arguments {missing}, which the call does "
                f"not give: {name_of(fun)} has {[p.name for p in parameters]}. Pass them, or leave "
                "them out."
            )
        names += [""] * (len(args) - len(names))
        positional = [axes.get(name, ARRAYS) for name in names]
    named = {name: by_name.get(name, ARRAYS) for name in kwargs}
    return (*[None] * len(bound.args), *positional), {**dict.fromkeys(bound.kwargs), **named}


def _meaning(inner: Inner, out: Outputs) -> Meaning:
    """Gives the axis of a leaf that has a setting, by the path and source of the leaf."""

    def axis_of(setting: tp.Any, path: Path, variable: tp.Any, source: Source) -> int | None:
        leaves = jax.tree_util.tree_leaves(pick(source, inner.values, out.new))
        axis = OUT_AXES.answer(setting, path, variable, leaves[0] if leaves else None)
        return axis if is_mapped(axis) else None

    return axis_of


def _by_leaf(
    call: CallDef, out: Outputs, settings: list[tp.Any]
) -> tuple[Outputs, list[int | None]]:
    """The leaves of the outputs, of which those that are not arrays are static, and their axes.

    Raises TypeError for an axis of something that is not an array.
    """
    variables = [*out.values[: len(out.values) - len(out.new)], *new_variables(out)]
    leaves, axes = list[tp.Any](), list[int | None]()
    outputs = zip(output_paths(call, out.definition), out.values, variables, settings)
    for path, value, variable, setting in outputs:
        for leaf in jax.tree_util.tree_leaves(value):
            axis = OUT_AXES.answer(setting, path, variable, leaf)
            if is_mapped(axis) and not is_array_like(leaf):
                raise TypeError(
                    f"out_axes: the leaf at '{path_text(path)}' must be traced, but {short_type(leaf)} "
                    f"{leaf!r} is neither an array nor a number."
                )
            leaves.append(leaf)
            axes.append(axis if is_mapped(axis) else None)
    chosen = [axis is None and not is_array(leaf) for axis, leaf in zip(axes, leaves)]
    static = static_leaves(leaves, chosen) or StaticLeaves((), (), (), True)
    structure = jax.tree_util.tree_structure([*out.values])
    definition = dataclasses.replace(out.definition, static=(structure, static))
    return Outputs(definition, static.split(leaves)), static.split(axes)


def _run_mapped(mapped: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    staged = _staged(mapped, args, kwargs)
    return staged.run(staged.jitted)


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
        _run_mapped,
        make=make,
        in_axes=tuple(in_axes) if isinstance(in_axes, list) else in_axes,
        in_name="in_axes",
        out_prefix=out_axes,
        out_name="out_axes",
        default=ARRAYS,
        order=(0, None),
        meaning=_meaning,
        by_leaf=_by_leaf,
        metadata={},
        jax_options=jax_options,
    )
    return decorated(FilterPmap if make is jax.pmap else Transform, fun, options)


@tp.overload
def filter_vmap(fun: tp.Callable[P, R], **options: tp.Any) -> Transform[P, R]: ...
@tp.overload
def filter_vmap(**options: tp.Any) -> tp.Callable[[tp.Callable[P, R]], Transform[P, R]]: ...
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


@tp.overload
def filter_pmap(fun: tp.Callable[P, R], **options: tp.Any) -> FilterPmap[P, R]: ...
@tp.overload
def filter_pmap(**options: tp.Any) -> tp.Callable[[tp.Callable[P, R]], FilterPmap[P, R]]: ...
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
