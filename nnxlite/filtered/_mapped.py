"""`filter_vmap` and `filter_pmap`: an axis for each leaf.

Inside the mapping every mapped result has its new axis in front, because JAX wants to know the axes
before the function runs; outside it is moved to where `out_axes` says.
"""

from __future__ import annotations

import functools
import re
import typing as tp
import warnings

import jax
import jax.numpy as jnp

from nnxlite._errors import path_text, short_type
from nnxlite._jax import key_name
from nnxlite._statics import ById
from nnxlite.boundary import Fixed, OutDef, Outputs, leave, replay
from nnxlite.boundary._settings import output_settings
from nnxlite.filtered._apart import Apart
from nnxlite.filtered._crossing import (
    Call,
    Choice,
    must_be_traced,
    refuse_shared_buffers,
    static_box,
)
from nnxlite.filtered._jit import ArgumentSpecs, argument_specs
from nnxlite.filtered._predicates import if_array, is_array, is_array_like
from nnxlite.filtered._specs import Reading, settle
from nnxlite.graph._graphdef import Path
from nnxlite.transforms._callables import MISSING, StaticArgument, context_key, name_of
from nnxlite.transforms._mapped import _passed_through


def _is_axis(answer: tp.Any) -> bool:
    return answer is None or isinstance(answer, int)


IN_AXES = Reading(
    "in_axes", _is_axis, "axes (ints or None), callables and Variable filters", 0, None
)
OUT_AXES = IN_AXES._replace(name="out_axes")


class MapOptions(tp.NamedTuple):
    """The options of a mapping transform, as they travel together.

    Attributes:
        in_axes: axes of positional arguments, or None where `specs` are given.
        specs: axes in the form of `default=`, `fn=`, `args=`, `kwargs=`.
        donate: whether the buffers of mapped arrays may be reused; see `filter_pmap`.
    """

    name: str
    in_axes: tp.Any
    specs: ArgumentSpecs | None
    out_axes: tp.Any
    axis_size: int | None
    donate: str


class Sorting(tp.NamedTuple):
    """The static side of what leaves a mapping.

    Attributes:
        definition: see `Outputs`.
        treedef: of (result, written, fresh).
        leaves: for each leaf its final axis, None for one that is not mapped, or its static value.
    """

    definition: OutDef
    treedef: tp.Any
    leaves: tuple[int | None | StaticArgument, ...]


class FilterMapped:
    """A function over slices of its arguments, as `filter_vmap` and `filter_pmap` return it."""

    def __init__(
        self, fun: tp.Any, options: MapOptions, make: tp.Callable[..., tp.Any], keep: bool
    ) -> None:
        self._fun, self._options, self._make = fun, options, make
        self._made: dict[tp.Any, tp.Any] | None = {} if keep else None
        functools.update_wrapper(self, fun, updated=())
        self.__wrapped__ = fun

    def __get__(self, instance: tp.Any, owner: tp.Any = None) -> tp.Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"{self._options.name}({name_of(self._fun)})"

    def __call__(self, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        call = Call(self._fun, args, kwargs)
        apart, options = call.apart, self._options
        axes = self._axes(call, len(args), kwargs)
        traced = Choice([_is_traced(a, x) for a, x in zip(axes, apart.leaves)])
        for path, leaf, axis in _refusable(apart, axes):
            if axis is not None and axis is not False:
                raise must_be_traced(f"{self!r}: in_axes", path, leaf)
        if options.axis_size is None and all(_unmapped(a) for a in axes):
            raise ValueError(
                f"{self!r}: no leaf of the arguments is mapped, so the size of the axis is unknown. "
                "Give an array an axis, or pass axis_size=."
            )
        given = Choice(
            [
                options.donate != "none" and not _unmapped(a) and isinstance(x, jax.Array)
                for a, x in zip(axes, apart.leaves)
            ]
        )
        kept = Choice([t and not g for t, g in zip(traced.mask, given.mask)])
        if options.donate != "none":
            refuse_shared_buffers(repr(self), apart, given.mask)
        mapped, whole_paths = self._mapped(call, axes, kept, given)
        try:
            with warnings.catch_warnings():
                if options.donate == "all":
                    warnings.filterwarnings(
                        "ignore", message="Some donated buffers were not usable"
                    )
                fixed, front, whole = mapped(kept.chosen(apart.leaves), given.chosen(apart.leaves))
        except ValueError as error:
            if _passed_through(error, FilterMapped._run):
                raise  # the function's own, or said by this library
            batched = re.search(r"out_axes\[2\]\[(\d+)\]", str(error))
            if batched is not None:
                raise ValueError(
                    f"{self!r}: out_axes: the leaf at '{path_text(whole_paths[int(batched[1])])}' has "
                    "the axis None, and its value differs between the slices. Give it an axis."
                ) from None
            raise ValueError(f"{self!r}: {error}\n{_shapes(apart, axes)}") from None
        return replay(apart.inputs, _outputs(fixed.value, front, whole))

    def _axes(self, call: Call, visible: int, kwargs: dict[str, tp.Any]) -> list[tp.Any]:
        """The axis of each leaf."""
        options = self._options
        num_args = visible + call.num_bound
        if options.specs is not None:
            specs, named = argument_specs(call.fun, call.num_bound, num_args, kwargs, options.specs)
        else:
            given = options.in_axes
            if isinstance(given, (tuple, list)):
                if len(given) != visible:
                    raise ValueError(
                        f"{self!r}: in_axes has {len(given)} entries for {visible} positional "
                        "arguments."
                    )
                specs = (*[None] * call.num_bound, *given)
            else:
                specs = (*[None] * call.num_bound, *[given] * visible)
            named = dict.fromkeys(kwargs, if_array(0))
        return settle(call.apart, (specs, named), IN_AXES)

    def _mapped(
        self, call: Call, axes: list[tp.Any], kept: Choice, given: Choice
    ) -> tuple[tp.Any, list[Path]]:
        """The JAX function of the traced leaves, and a list of what it found to be unmapped.

        For `pmap` they are the same ones for equal calls.
        """
        whole_paths: list[Path] = []
        run = functools.partial(self._run, call, axes, kept, given, whole_paths)
        bare = [None if _unmapped(a) else a for a in axes]
        in_axes = (kept.chosen(bare), given.chosen(bare))
        if self._made is None:
            return self._make(run, in_axes), whole_paths
        inputs = call.apart.inputs
        masks = tuple(zip(kept.mask, given.mask))
        statics = [static_box(x) for x, m in zip(call.apart.leaves, masks) if not any(m)]
        what = (context_key(), ById(call.fun), tuple(statics), tuple(axes))
        extra = (*what, masks, tuple(call.apart.defs))
        key = inputs.define(extra)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._make(run, in_axes), whole_paths
        return found

    def _run(
        self,
        call: Call,
        axes: list[tp.Any],
        kept: Choice,
        given: Choice,
        whole_paths: list[Path],
        kept_leaves: list[tp.Any],
        given_leaves: list[tp.Any],
    ) -> tuple[Fixed, list[tp.Any], list[tp.Any]]:
        apart = call.apart
        inner, result = call.run(given.into(kept.into(apart.leaves, kept_leaves), given_leaves))
        donated = {p.number for p, g in zip(apart.places, given.mask) if g and p.number is not None}
        out = leave(inner, result, all_written=donated)
        by_graph_leaf: list[tp.Any] = [None] * len(apart.defs)
        by_position: dict[int, tp.Any] = {}
        for place, axis in zip(apart.places, axes):
            if place.number is not None:
                by_graph_leaf[place.number] = axis
                by_position[place.position] = axis
        roots = [by_position.get(p) for p in apart.call.where]
        default = if_array(0)
        settings = output_settings(
            apart.call, out, by_graph_leaf, roots, self._options.out_axes, "out_axes", default
        )
        whole_paths.clear()
        return _sorted(apart, out, settings, whole_paths)


def _out_paths(apart: Apart, out: Outputs, treedef: tp.Any) -> list[Path]:
    """Where each output is: in the result, at a written leaf, in what is new."""
    definition = out.definition
    tree = jax.tree_util.tree_unflatten(treedef, range(treedef.num_leaves))
    paths: list[Path] = [
        ("result", *map(key_name, keys))
        for i, (keys, _) in enumerate(jax.tree_util.tree_leaves_with_path(tree))
        if i not in definition.where
    ]
    inside, roots = apart.call.leaf_paths(), apart.call.leaf_roots()
    for number in definition.written:
        position = apart.call.where[roots[number]]
        paths.append((*apart.call.argument_of(position)[1:], *inside[number]))
    fresh: dict[int, Path] = {}
    if definition.graph is not None:
        decoded = definition.graph.graphdef.decoded
        for leaf, source in enumerate(definition.graph.sources):
            if source < 0:
                fresh[~source] = ("result", *decoded.path(decoded.leaf_frames[leaf])[1:])
    return paths + [fresh[i] for i in sorted(fresh)]


def _sorted(
    apart: Apart, out: Outputs, settings: tp.Any, whole_paths: list[Path]
) -> tuple[Fixed, list[tp.Any], list[tp.Any]]:
    """What leaves, as static data, mapped arrays and unmapped ones."""
    if out.definition.treedef is None:
        values, result_def = jax.tree_util.tree_flatten(out.result)
    else:
        values, result_def = list(out.result), None
    paths = _out_paths(apart, out, out.definition.treedef if result_def is None else result_def)
    every = [*values, *out.written, *out.fresh]
    wanted = [*settings.result, *settings.written, *settings.fresh]
    kinds: list[int | None | StaticArgument] = []
    front: list[tp.Any] = []
    whole: list[tp.Any] = []
    for path, value, setting in zip(paths, every, wanted):
        for leaf in jax.tree_util.tree_leaves(value):
            axis = OUT_AXES.answer(setting, path, leaf, leaf)
            if _unmapped(axis):
                if is_array(leaf):
                    whole.append(leaf)
                    whole_paths.append(path)
                    kinds.append(None)
                else:
                    kinds.append(static_box(leaf))
                continue
            if not is_array_like(leaf):
                raise must_be_traced("out_axes", path, leaf)
            front.append(jnp.asarray(leaf))
            kinds.append(axis)
    result = out.result if result_def is None else jax.tree_util.tree_unflatten(result_def, values)
    treedef = jax.tree_util.tree_structure((result, out.written, out.fresh))
    return Fixed(Sorting(out.definition, treedef, tuple(kinds))), front, whole


def _outputs(sorting: Sorting, front: tp.Sequence[tp.Any], whole: tp.Sequence[tp.Any]) -> Outputs:
    fronts, wholes = iter(front), iter(whole)
    leaves = []
    for kind in sorting.leaves:
        if isinstance(kind, StaticArgument):
            leaves.append(kind.value)
        elif kind is None:
            leaves.append(next(wholes))
        else:
            leaf = next(fronts)
            leaves.append(leaf if kind == 0 else jnp.moveaxis(leaf, 0, kind))
    result, written, fresh = jax.tree_util.tree_unflatten(sorting.treedef, leaves)
    return Outputs(sorting.definition, result, written, fresh)


def _unmapped(axis: tp.Any) -> bool:
    return axis is None or isinstance(axis, bool)


def _is_traced(axis: tp.Any, leaf: tp.Any) -> bool:
    if axis is None or axis is False:
        return axis is None and is_array(leaf)
    return True


def _refusable(apart: Apart, axes: list[tp.Any]) -> tp.Iterable[tuple[tp.Any, tp.Any, tp.Any]]:
    """The leaves that no axis can be given: (path, leaf, axis)."""
    if all(a is None or a is False or is_array_like(x) for a, x in zip(axes, apart.leaves)):
        return ()
    return [
        (path[1:], leaf, axis)
        for path, leaf, axis in zip(apart.paths, apart.leaves, axes)
        if not is_array_like(leaf)
    ]


def _shapes(apart: Apart, axes: list[tp.Any]) -> str:
    parts = [
        f"'{path_text(path[1:])}' {short_type(leaf)}: axis {axis!r}"
        for path, leaf, axis in zip(apart.paths, apart.leaves, axes)
        if not _unmapped(axis)
    ]
    more = f" and {len(parts) - 12} more" if len(parts) > 12 else ""
    return "Mapped leaves: " + "; ".join(parts[:12]) + more


_LEGACY = ("default", "fn", "args", "kwargs", "out")


def _make(
    fun: tp.Any,
    name: str,
    in_axes: tp.Any,
    out_axes: tp.Any,
    axis_size: int | None,
    more: dict[str, tp.Any],
    make: tp.Callable[[dict[str, tp.Any]], tp.Any],
    keep: bool,
    donate: str = "none",
) -> tp.Any:
    legacy = {key: more.pop(key) for key in _LEGACY if key in more}
    specs = None
    if legacy:
        specs = ArgumentSpecs(
            name,
            legacy.get("default", if_array(0)),
            legacy.get("fn", if_array(0)),
            tuple(legacy.get("args", ())),
            tuple((legacy.get("kwargs") or {}).items()),
        )
        out_axes = legacy.get("out", out_axes)
    options = MapOptions(name, in_axes, specs, out_axes, axis_size, donate)
    wrap = lambda f: FilterMapped(f, options, make(more), keep)
    return wrap if fun is MISSING else wrap(fun)


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

    Arguments and results may be any pytrees and graph objects with leaves of any type. What is
    written into objects is kept, with the axis it came in with.

    Args:
        fun: the function; without it a decorator is returned. A module or a bound method is not
            mapped itself, except with `fn=`.
        in_axes: the axis of each leaf: an int, None (not mapped), a function of the leaf, or a tuple
            with a prefix of these for each positional argument. Arguments by keyword are mapped
            over axis 0.
        out_axes: the same for the result.
        axis_name, axis_size: as for `jax.vmap`.
        vmapkwargs: `default=`, `fn=` (the function itself), `args=` (a tuple for the first
            arguments), `kwargs=` (by name) and `out=`, which take the place of the axes above, and
            are axis 0 of arrays where one is left out; the rest as for `jax.vmap`.

    Raises:
        ValueError: for a prefix that does not fit, sizes that differ, or where nothing is mapped.
        TypeError: for a leaf with an axis that is no array.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter_vmap(lambda x, n: (x**n, "power"))(jnp.array([1.0, 2.0]), 2)
    (Array([1., 4.], dtype=float32), 'power')
    """

    def make(more: dict[str, tp.Any]) -> tp.Any:
        def mapped(run: tp.Any, axes: tuple[list[tp.Any], ...]) -> tp.Any:
            return jax.vmap(
                run,
                in_axes=axes,
                out_axes=(None, 0, None),
                axis_name=axis_name,
                axis_size=axis_size,
                **more,
            )

        return mapped

    return _make(fun, "filter_vmap", in_axes, out_axes, axis_size, vmapkwargs, make, False)


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

    As `filter_vmap`, with `jax.pmap`. Leaves with axis None or True go to every device, those with
    False are static. With `donate="all"` the call may reuse the buffers of mapped arrays (objects get
    back what they hold), and `"warn"` lets JAX tell of those it could not use.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter_pmap(lambda x, name: (x + 1, name))(jnp.ones((1, 2)), "one")[1]
    'one'
    """
    if donate not in ("all", "warn", "none"):
        raise ValueError(f"filter_pmap: donate={donate!r}; it must be 'all', 'warn' or 'none'.")

    def make(more: dict[str, tp.Any]) -> tp.Any:
        def mapped(run: tp.Any, axes: tuple[list[tp.Any], ...]) -> tp.Any:
            return jax.pmap(
                run,
                donate_argnums=(1,),
                in_axes=axes,
                out_axes=(None, 0, None),
                axis_name=axis_name,
                axis_size=axis_size,
                **more,
            )

        return mapped

    return _make(fun, "filter_pmap", in_axes, out_axes, axis_size, pmapkwargs, make, True, donate)
