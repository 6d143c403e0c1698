"""`filter_vmap` and `filter_pmap`: an axis for each leaf.

Inside the mapping every mapped result has its new axis in front, because JAX wants to know the axes
before the function runs; outside it is moved to where `out_axes` says.
"""

from __future__ import annotations

import re
import typing as tp
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._errors import path_text, short_type
from nnxlite._jax import key_name
from nnxlite.boundary import Fixed, Fresh, OutDef, Outputs, leave, output_settings, replay
from nnxlite.filtered._apart import Apart
from nnxlite.filtered._crossing import (
    Call,
    Choice,
    must_be_traced,
    refuse_shared_buffers,
)
from nnxlite.filtered._jit import ArgumentSpecs, FilterLowered, Staged, argument_specs
from nnxlite.filtered._predicates import if_array, is_array, is_array_like
from nnxlite.filtered._specs import Reading, settle
from nnxlite.graph import Path
from nnxlite.transforms import (
    PerFunction,
    StaticArgument,
    Wrapper,
    decorated,
    hidden_argument,
    passed_through,
    traced_context,
)
from nnxlite.variables import MISSING


def _is_axis(answer: tp.Any) -> bool:
    return answer is None or isinstance(answer, int)


IN_AXES = Reading(
    "in_axes", _is_axis, "axes (ints or None), callables and Variable filters", 0, None
)
OUT_AXES = IN_AXES._replace(name="out_axes")


class MapOptions(tp.NamedTuple):
    """The options of a mapping transform, as they travel together.

    Attributes:
        in_axes: axes of positional arguments, by position or by name.
        specs: axes in the form of `default=`, `fn=`, `args=`, `kwargs=`, or None.
        donate: whether the buffers of mapped arrays may be reused; see `filter_pmap`.
        jax_options: for `jax.vmap` or `jax.pmap`.
    """

    in_axes: tp.Any
    specs: ArgumentSpecs | None
    out_axes: tp.Any
    axis_size: int | None
    donate: str
    jax_options: tuple[tuple[str, tp.Any], ...]


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


class FilterVmap(Wrapper):
    """A function over slices of its arguments, as `filter_vmap` returns it."""

    name = "filter_vmap"
    options: MapOptions

    def __call__(self, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        staged = self.staged(args, kwargs)
        program: _Program = staged.program
        try:
            with warnings.catch_warnings():
                if self.options.donate == "all":
                    warnings.filterwarnings(
                        "ignore", message="Some donated buffers were not usable"
                    )
                out = staged.jitted(*staged.groups)
        except ValueError as error:
            if passed_through(error, _Program.__call__):
                raise  # the function's own, or said by this library
            batched = re.search(r"out_axes\[2\]\[(\d+)\]", str(error))
            if batched is not None:
                raise ValueError(
                    f"{self!r}: out_axes: the leaf at "
                    f"'{path_text(program.whole_paths[int(batched[1])])}' has the axis None, and its "
                    "value differs between the slices. Give it an axis."
                ) from None
            raise ValueError(f"{self!r}: {error}") from None
        return staged.finish(out)

    def staged(self, args: tp.Any, kwargs: tp.Any) -> Staged:
        """A call that is not made yet."""
        call = Call(self.__wrapped__, args, kwargs)
        apart, options = call.apart, self.options
        axes = self._axes(call, len(args), kwargs)
        self._check(apart, axes)
        donated = Choice(
            [
                options.donate != "none" and not _unmapped(a) and isinstance(x, jax.Array)
                for a, x in zip(axes, apart.leaves)
            ]
        )
        if options.donate != "none":
            refuse_shared_buffers(repr(self), apart, donated.mask)
        kept = Choice(
            [_is_traced(a, x) and not d for a, x, d in zip(axes, apart.leaves, donated.mask)]
        )
        key, program, mapped = self._mapped(call, axes, kept, donated)
        size = [] if options.axis_size is None else [np.zeros(options.axis_size, bool)]
        groups = (size, kept.chosen(apart.leaves), donated.chosen(apart.leaves))
        finish = lambda out: replay(apart.inputs, _outputs(out[0].value, *out[1:]))
        return Staged(key, mapped, (), groups, finish, program)

    def _axes(self, call: Call, visible: int, kwargs: dict[str, tp.Any]) -> list[tp.Any]:
        """The axis of each leaf."""
        options, given = self.options, self.options.in_axes
        num_args = visible + call.num_bound
        named = dict.fromkeys(kwargs, if_array(0))
        if options.specs is not None:
            specs, named = argument_specs(
                self.__wrapped__, call.num_bound, num_args, kwargs, options.specs
            )
        elif isinstance(given, dict):
            by_name = ArgumentSpecs(
                repr(self), if_array(0), None, (), tuple(given.items()), "in_axes"
            )
            specs, named = argument_specs(
                self.__wrapped__, call.num_bound, num_args, kwargs, by_name
            )
        elif isinstance(given, (tuple, list)):
            if len(given) != visible:
                raise ValueError(
                    f"{self!r}: in_axes has {len(given)} entries for {visible} positional arguments."
                )
            specs = (*[None] * call.num_bound, *given)
        else:
            specs = (*[None] * call.num_bound, *[given] * visible)
        return settle(call.apart, (specs, named), IN_AXES)

    def _check(self, apart: Apart, axes: list[tp.Any]) -> None:
        """Raise an error for a leaf that has not the axis it is mapped over, or another size."""
        sizes = set()
        for number, (leaf, axis) in enumerate(zip(apart.leaves, axes)):
            if axis is None or axis is False:
                continue
            if not is_array_like(leaf):
                raise must_be_traced(f"{self!r}: in_axes", apart.paths[number][1:], leaf)
            if axis is True:
                continue
            shape = jnp.shape(leaf)
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"{self!r}: in_axes: the leaf at '{path_text(apart.paths[number][1:])}' is "
                    f"{short_type(leaf)} and has no axis {axis}."
                )
            sizes.add(shape[axis])
        wanted = self.options.axis_size
        if wanted is not None:
            sizes.add(wanted)
        if len(sizes) > 1:
            size = "" if wanted is None else f", axis_size={wanted}"
            raise ValueError(
                f"{self!r}: inconsistent sizes for array axes to be mapped. {_shapes(apart, axes)}"
                f"{size}."
            )
        if not sizes:
            raise ValueError(
                f"{self!r}: no leaf of the arguments is mapped, so the size of the axis is unknown. "
                "Give an array an axis, or pass axis_size=."
            )

    def _mapped(self, call: Call, axes: list[tp.Any], kept: Choice, donated: Choice) -> tp.Any:
        """What equal calls have in common, the program, and JAX's function of the traced leaves."""
        program = _Program(call, self.options.out_axes, axes, kept, donated)
        return None, program, self._transform(jax.vmap, program)

    def _transform(self, transform: tp.Any, program: _Program, **more: tp.Any) -> tp.Any:
        bare = [None if _unmapped(a) else a for a in program.axes]
        return transform(
            program,
            in_axes=(0, program.kept.chosen(bare), program.donated.chosen(bare)),
            out_axes=(None, 0, None),
            axis_size=self.options.axis_size,
            **dict(self.options.jax_options),
            **more,
        )


class FilterPmap(FilterVmap):
    """A function over slices of its arguments, one on each device, as `filter_pmap` returns it."""

    name = "filter_pmap"

    def _axes(self, call: Call, visible: int, kwargs: dict[str, tp.Any]) -> list[tp.Any]:
        """The axis of each leaf; what is no array has none, and is static."""
        axes = super()._axes(call, visible, kwargs)
        return [a if _unmapped(a) or is_array(x) else None for a, x in zip(axes, call.apart.leaves)]

    def _mapped(self, call: Call, axes: list[tp.Any], kept: Choice, donated: Choice) -> tp.Any:
        def make() -> tuple[_Program, tp.Any]:
            rest = [None if a or b else x for a, b, x in zip(*masks, leaves)]
            program = _Program(
                call.without_values(rest), self.options.out_axes, axes, kept, donated
            )
            return program, self._transform(jax.pmap, program, donate_argnums=(2,))

        leaves, masks = call.apart.leaves, (tuple(kept.mask), tuple(donated.mask))
        statics = [hidden_argument(x) for x, *m in zip(leaves, *masks) if not any(m)]
        extra = (traced_context(), tuple(statics), tuple(axes), masks, tuple(call.apart.defs))
        key = call.apart.inputs.define(extra)
        return key, *_programs.get(call.fun, (key, hidden_argument(self.options)), make)

    def lower(self, *args: tp.Any, **kwargs: tp.Any) -> FilterLowered:
        """Lower the function for these arguments, without running it."""
        return FilterLowered.of(self, args, kwargs)


_programs: PerFunction[tuple[_Program, tp.Any]] = PerFunction()


class _Program:
    """A function of slices of leaves.

    Attributes:
        axes: of every leaf.
        kept, donated: which leaves are traced and stay, or are donated.
        whole_paths: where the results are that are not mapped, after a trace.
    """

    __name__ = "run"

    def __init__(
        self, call: Call, out_axes: tp.Any, axes: list[tp.Any], kept: Choice, donated: Choice
    ) -> None:
        self.call, self.out_axes, self.axes = call, out_axes, axes
        self.kept, self.donated = kept, donated
        self.whole_paths: list[Path] = []

    def __call__(
        self, size: tp.Any, kept_leaves: list[tp.Any], donated_leaves: list[tp.Any]
    ) -> tuple[Fixed, list[tp.Any], list[tp.Any]]:
        apart, donated = self.call.apart, self.donated
        leaves = donated.into(self.kept.into(apart.leaves, kept_leaves), donated_leaves)
        inner, result = self.call.run(leaves)
        given = {p.number for p, g in zip(apart.places, donated.mask) if g and p.number is not None}
        out = leave(inner, result, all_written=given)
        by_graph_leaf: list[tp.Any] = [None] * len(apart.defs)
        by_position: dict[int, tp.Any] = {}
        for place, axis in zip(apart.places, self.axes):
            if place.number is not None:
                by_graph_leaf[place.number] = axis
                by_position[place.position] = axis
        roots = [by_position.get(p) for p in apart.call.where]
        settings = output_settings(
            apart.call, out, by_graph_leaf, roots, self.out_axes, "out_axes", if_array(0)
        )
        self.whole_paths.clear()
        return _sorted(apart, out, settings, self.whole_paths)


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
            if isinstance(source, Fresh):
                fresh[source.number] = ("result", *decoded.path(decoded.leaf_frames[leaf])[1:])
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
                    kinds.append(hidden_argument(leaf))
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
            if isinstance(leaf, np.ndarray):  # `jax.vmap` gives back what passes through as it was
                leaf = jnp.asarray(leaf)
            leaves.append(leaf if kind == 0 else jnp.moveaxis(leaf, 0, kind))
    result, written, fresh = jax.tree_util.tree_unflatten(sorting.treedef, leaves)
    return Outputs(sorting.definition, result, written, fresh)


def _unmapped(axis: tp.Any) -> bool:
    return axis is None or isinstance(axis, bool)


def _is_traced(axis: tp.Any, leaf: tp.Any) -> bool:
    if axis is None or axis is False:
        return axis is None and is_array(leaf)
    return True


def _shapes(apart: Apart, axes: list[tp.Any]) -> str:
    parts = [
        f"'{path_text(path[1:])}' {short_type(leaf)}: axis {axis!r}"
        for path, leaf, axis in zip(apart.paths, apart.leaves, axes)
        if not _unmapped(axis)
    ]
    more = f" and {len(parts) - 12} more" if len(parts) > 12 else ""
    return "Mapped leaves: " + "; ".join(parts[:12]) + more


def _make(
    kind: type[FilterVmap],
    fun: tp.Any,
    in_axes: tp.Any,
    out_axes: tp.Any,
    axis_name: tp.Hashable,
    axis_size: int | None,
    more: dict[str, tp.Any],
    donate: str = "none",
) -> tp.Any:
    legacy = {
        key: more.pop(key) for key in ("default", "fn", "args", "kwargs", "out") if key in more
    }
    specs = None
    if legacy:
        specs = ArgumentSpecs(
            kind.name,
            legacy.get("default", if_array(0)),
            legacy.get("fn", if_array(0)),
            tuple(legacy.get("args", ())),
            tuple((legacy.get("kwargs") or {}).items()),
        )
        out_axes = legacy.get("out", out_axes)
    jax_options = (("axis_name", axis_name), *more.items())
    options = MapOptions(in_axes, specs, out_axes, axis_size, donate, jax_options)
    return decorated(kind, fun, options)


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
            with a prefix of these for each positional argument, or a dict of them by the arguments'
            names. Other arguments, and those by keyword, are mapped over axis 0.
        out_axes: the same for the result.
        axis_name, axis_size: as for `jax.vmap`.
        vmapkwargs: `default=`, `fn=` (the function itself), `args=` (a tuple for the first
            arguments), `kwargs=` (by name) and `out=`, which take the place of the axes above, and
            are axis 0 of arrays where one is left out; the rest as for `jax.vmap`.

    Raises:
        ValueError: for a prefix that does not fit, an axis of an argument that was not given, sizes
            that differ, or where nothing is mapped.
        TypeError: for a leaf with an axis that is no array.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter_vmap(lambda x, n: (x**n, "power"))(jnp.array([1.0, 2.0]), 2)
    (Array([1., 4.], dtype=float32), 'power')
    """

    return _make(FilterVmap, fun, in_axes, out_axes, axis_name, axis_size, vmapkwargs)


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
    False are static, and so are leaves with an axis that are no arrays. With `donate="all"` the call may
    reuse the buffers of mapped arrays (objects get back what they hold), and `"warn"` lets JAX tell of
    those it could not use. The result has `lower`, as that of `filter_jit` has.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter_pmap(lambda x, name: (x + 1, name))(jnp.ones((1, 2)), "one")[1]
    'one'
    """
    if donate not in ("all", "warn", "none"):
        raise ValueError(f"filter_pmap: donate={donate!r}; it must be 'all', 'warn' or 'none'.")

    for name in ("static_broadcasted_argnums", "donate_argnums"):
        if name in pmapkwargs:
            raise ValueError(
                f"filter_pmap takes no {name}=: whether a leaf is static or donated is decided leaf by "
                "leaf. Use in_axes= and donate=."
            )
    return _make(FilterPmap, fun, in_axes, out_axes, axis_name, axis_size, pmapkwargs, donate)
