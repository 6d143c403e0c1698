"""`filter_vmap` and `filter_pmap`: an axis for each leaf.

Inside, every mapped result has its new axis in front, because JAX needs the axes before the function
runs; outside, the axis is moved to the position in `out_axes`.
"""

from __future__ import annotations

import functools
import re
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError

from nnxlite._base.config import Modes, context_key
from nnxlite._base.errors import path_text
from nnxlite._base.jax import as_integer
from nnxlite._base.typing import P, R
from nnxlite.boundary._call_def import CallDef, enter
from nnxlite.boundary._labels import Layout, new_variables, output_settings, unpack
from nnxlite.boundary._leave import leave
from nnxlite.boundary._operands import Division, Partition
from nnxlite.boundary._out import Fixed, Outputs, Source, output_paths, pick, replay
from nnxlite.boundary._prefixes import NodePrefix
from nnxlite.boundary._refusals import call_difference
from nnxlite.filtered._arguments import ArgumentSpecs
from nnxlite.filtered._crossing import Call, Filtered, divide, must_be_traced
from nnxlite.filtered._donation import DONATED, KEPT, grouped, without_warnings
from nnxlite.filtered._predicates import if_array, is_array, is_array_like
from nnxlite.filtered._specs import IN_AXES, OUT_AXES, answers, check_axes, is_mapped, root_parts
from nnxlite.graph._rebuild import Path
from nnxlite.transforms._donation import run_donating
from nnxlite.transforms._finish import raise_failed
from nnxlite.transforms._map_errors import marks_errors, passed_through
from nnxlite.transforms._stages import Lowered, Staged, other_structure
from nnxlite.transforms._wrapper import Options, decorated, program, weakly
from nnxlite.variables._definition import MISSING

OUT_GROUPS = FRONT, WHOLE, STATIC = "front", "whole", "static"
"""The groups of outputs: with the mapped axis in front, the same in all slices, or not an array."""


class FilterVmap(Filtered[P, R]):
    """A function over slices of its arguments, as `filter_vmap` returns it."""

    def staged(self, args: tp.Any, kwargs: tp.Any, program: CallDef | None = None) -> Staged:
        """A call, ready for JAX; see `Stageable`."""
        call, options = self.call(args, kwargs), self.options
        specs = options.in_axes
        spec = specs.of_call(self.__wrapped__, self.bound, args, kwargs, repr(self))
        axes = answers(call, spec, IN_AXES)
        if options.transform is jax.pmap:  # what is not an array has no axis, and is static
            one = lambda axis, leaf: axis if not is_mapped(axis) or is_array(leaf) else None
            axes = list(map(one, axes, call.leaves))
        check_axes(repr(self), call, axes, options.axis_size)
        may_donate = options.donate != "none"
        groups = [_group(axis, leaf, may_donate) for axis, leaf in zip(axes, call.leaves)]
        division, (kept, donated) = divide(call.leaves, grouped(self, call, groups))
        key, traced, mapped = self._program(call, division, tuple(axes), spec)
        if program is not None and key != program:
            what = call_difference(program, key)
            raise other_structure(self, what)
        # JAX needs one mapped argument to know the size of the axis
        size = [] if options.axis_size is None else [np.zeros(options.axis_size, bool)]
        arguments = size, kept, donated
        run = functools.partial(self._run, call, traced, arguments)
        return Staged(key, lambda: mapped, arguments, run)

    def _run(self, call: Call, program: _Program, arguments: tp.Any, jitted: tp.Any) -> tp.Any:
        """Call JAX's function, or what it was compiled to, and write back what it returns."""
        finish = marks_errors(lambda out: replay(call.inputs, _outputs(*out)))
        try:
            if self.options.donate == "none":
                return finish(jitted(*arguments))
            named = lambda: zip((place.text() for place in call.definition.leaves()), call.leaves)
            with without_warnings(self.options.donate):
                return run_donating(jitted, arguments, finish, named)
        except ValueError as error:
            if passed_through(error):
                raise  # by the function itself, or by this library
            raise ValueError(f"{self!r}: {program.explained(error)}") from None
        except JaxRuntimeError as error:
            raise_failed(error)
            raise

    def _program(
        self, call: Call, division: Division, axes: tuple[tp.Any, ...], spec: tp.Any
    ) -> tp.Any:
        """The key, which equal calls share, the program, and JAX's function of its leaves."""

        def make() -> tuple[_Program, tp.Any]:
            made = _Program(call, division, axes, spec, self.options.out_axes)
            return made, self._transformed(made)

        if self.options.transform is jax.vmap:  # nothing to find again: JAX traces in each call
            return None, *make()
        key = call.inputs.define((context_key(), division, axes, call.definition.structure))
        return key, *program(self, key.exactly, make)

    def _transformed(self, program: _Program) -> tp.Any:
        """JAX's transform of a program."""
        options = self.options
        axes = [axis if is_mapped(axis) else None for axis in program.axes]
        kept, donated, _ = program.division.partition.split(axes)
        return options.transform(
            program,
            in_axes=(0, kept, donated),
            out_axes=(None, 0, None),
            axis_size=options.axis_size,
            **options.jax_options,
        )


class FilterPmap(FilterVmap[P, R]):
    """A function over slices of its arguments, one on each device, as `filter_pmap` returns it."""

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered[R]:
        """Lower the function for these arguments, without running it."""
        with without_warnings(self.options.donate):
            return Lowered.of("lower", self, args, kwargs)


def _group(axis: tp.Any, leaf: tp.Any, may_donate: bool) -> str:
    """The group of an argument leaf."""
    if axis is False or (axis is None and not is_array(leaf)):
        return STATIC
    return DONATED if may_donate and is_mapped(axis) and isinstance(leaf, jax.Array) else KEPT


class _Program:
    """A function of slices of leaves; it refers to no object, and weakly to the user's function.

    Attributes:
        call, division, axes: of the arguments.
        root_specs: the parts of `in_axes` for graph objects, which new leaves in them follow.
        whole_paths: the paths of results that are not mapped, after a trace.
    """

    __name__ = "run"

    def __init__(
        self,
        call: Call,
        division: Division,
        axes: tuple[tp.Any, ...],
        in_axes: tp.Any,
        out_axes: tp.Any,
    ) -> None:
        self._find_function = weakly(call.fun)
        self.call, self.division, self.axes, self._out_axes = (
            call.definition,
            division,
            axes,
            out_axes,
        )
        self.root_specs = root_parts(call.definition, in_axes, IN_AXES)
        self.whole_paths: list[Path] = []

    @marks_errors
    def __call__(
        self, size: tp.Any, kept: list[tp.Any], donated: list[tp.Any]
    ) -> tuple[Fixed, list[tp.Any], list[tp.Any]]:
        leaves = self.division.join(kept, donated)
        (args, kwargs), inner = enter(self.call, leaves)
        result = self._find_function()(*args, **kwargs)
        labels = zip(self.call.leaves(), self.division.partition.labels)
        numbers = {leaf.graph_leaf for leaf, label in labels if label == DONATED}
        gone = [number for number in numbers if number is not None]
        return self._take_out(leave(inner, result, all_written=gone), leaves)

    def _take_out(
        self, out: Outputs, inputs: list[tp.Any]
    ) -> tuple[Fixed, list[tp.Any], list[tp.Any]]:
        """The outputs: static data, mapped arrays, and those that are the same in all slices."""
        leaves, treedef = jax.tree_util.tree_flatten(out.values)
        paths, axes = self._out_axes_of(out, inputs)
        for path, leaf, axis in zip(paths, leaves, axes):
            if is_mapped(axis) and not is_array_like(leaf):
                raise must_be_traced("out_axes", path_text(path), leaf)
        groups = [
            FRONT if is_mapped(axis) else WHOLE if is_array(leaf) else STATIC
            for axis, leaf in zip(axes, leaves)
        ]
        partition = Partition(tuple(groups), OUT_GROUPS)
        division, (front, whole) = divide(leaves, partition)
        self.whole_paths[:] = partition.split(paths)[1]
        form = Layout(out.definition, treedef, division)
        final_axes = tuple(partition.split(axes)[0])
        return Fixed((form, final_axes)), list(map(jnp.asarray, front)), whole

    def _out_axes_of(self, out: Outputs, inputs: list[tp.Any]) -> tuple[list[Path], list[tp.Any]]:
        """The path and the final axis of each output leaf."""

        def axis_of(setting: tp.Any, path: Path, variable: tp.Any, source: Source) -> tp.Any:
            leaves = jax.tree_util.tree_leaves(pick(source, values_in, out.new))
            axis = OUT_AXES.answer(setting, path, variable, leaves[0] if leaves else None)
            return axis if is_mapped(axis) else None

        call = self.call
        by_number = {leaf.graph_leaf: axis for leaf, axis in zip(call.leaves(), self.axes)}
        by_root = {leaf.root: axis for leaf, axis in zip(call.leaves(), self.axes)}
        values_in = call.whole(inputs)[1]
        specs = enumerate(self.root_specs)
        settings = output_settings(
            call,
            out,
            [by_number.get(number) for number in range(call.graphdef.num_leaves)],
            [by_root.get(root) if isinstance(spec, NodePrefix) else spec for root, spec in specs],
            self._out_axes,
            "out_axes",
            if_array(0),
            axis_of,
        )
        arrays, written, _ = out.definition.split(out.values)
        variables = [*arrays, *written, *new_variables(out)]
        paths: list[Path] = []
        axes: list[tp.Any] = []
        outputs = zip(output_paths(call, out.definition), out.values, variables, settings)
        for path, value, variable, setting in outputs:
            for leaf in jax.tree_util.tree_leaves(value):
                paths.append(path)
                axes.append(OUT_AXES.answer(setting, path, variable, leaf))
        return paths, axes

    def explained(self, error: ValueError) -> str:
        """JAX's message, with the path of the result if it is about one of them."""
        batched = re.search(r"out_axes\[2\]\[(\d+)\]", str(error))
        if batched is None:
            return str(error)
        return (
            f"out_axes: the leaf at '{path_text(self.whole_paths[int(batched[1])])}' has the axis "
            "None, and its value differs between the slices. Give it an axis."
        )


def _outputs(fixed: Fixed, front: tp.Sequence[tp.Any], whole: tp.Sequence[tp.Any]) -> Outputs:
    """The outputs of a mapping, with the axes of arrays in their final positions."""
    form, axes = fixed.value
    arrays = map(jnp.asarray, front)  # `jax.vmap` gives back NumPy arrays that pass through as such
    moved = [x if axis == 0 else jnp.moveaxis(x, 0, axis) for x, axis in zip(arrays, axes)]
    return unpack(form, (moved, whole))


def _run(mapped: FilterVmap[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    staged = mapped.staged(args, kwargs)
    return staged.run(staged.jitted())


def _mapped(
    kind: type[FilterVmap],
    fun: tp.Any,
    transform: tp.Any,
    in_axes: tp.Any,
    out_axes: tp.Any,
    axis_size: int | None,
    donate: str,
    more: dict[str, tp.Any],
) -> tp.Any:
    """A function under a mapping transform of JAX, with axes in either form."""
    arrays = if_array(0)
    names = ("default", "fn", "args", "kwargs", "out")
    given = {name: more.pop(name) for name in names if name in more}
    if given:
        out_axes = given.get("out", out_axes)
        specs = ArgumentSpecs.given(
            given.get("default", arrays),
            given.get("fn", arrays),
            given.get("args", ()),
            given.get("kwargs"),
        )
    elif isinstance(in_axes, dict):
        by_name = tuple(in_axes.items())
        specs = ArgumentSpecs(arrays, arrays, None, (), by_name, "in_axes" if by_name else "")
    elif isinstance(in_axes, (tuple, list)):
        specs = ArgumentSpecs(None, arrays, None, tuple(in_axes), (), "in_axes")
    else:
        specs = ArgumentSpecs(in_axes, arrays, None)
    options = Options.of(
        f"filter_{transform.__name__}",
        Modes(True, True),
        _run,
        transform=transform,
        in_axes=specs,
        out_axes=out_axes,
        axis_size=as_integer(axis_size),
        donate=donate,
        jax_options=more,
    )
    return decorated(kind, fun, options)


@tp.overload
def filter_vmap(fun: tp.Callable[P, R], **options: tp.Any) -> FilterVmap[P, R]: ...
@tp.overload
def filter_vmap(
    **options: tp.Any,
) -> tp.Callable[[tp.Callable[P, R]], FilterVmap[P, R]]: ...
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
            mapped itself, except with `fn=`.
        in_axes: the axis of each leaf: an int, None (not mapped), a function of the leaf, or a tuple
            with a prefix of these for each positional argument, or a dict of them by the arguments'
            names. Other arguments, and those by keyword, are mapped over axis 0.
        out_axes: the same for the result.
        axis_name, axis_size: as for `jax.vmap`.
        vmapkwargs: `default=`, `fn=` (the function itself), `args=` (a tuple for the first
            arguments), `kwargs=` (by name) and `out=`, which replace the axes above, and
            are axis 0 of arrays where one is left out; the rest as for `jax.vmap`.

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
    vmapkwargs["axis_name"] = axis_name
    return _mapped(FilterVmap, fun, jax.vmap, in_axes, out_axes, axis_size, "none", vmapkwargs)


@tp.overload
def filter_pmap(fun: tp.Callable[P, R], **options: tp.Any) -> FilterPmap[P, R]: ...
@tp.overload
def filter_pmap(
    **options: tp.Any,
) -> tp.Callable[[tp.Callable[P, R]], FilterPmap[P, R]]: ...
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
    False are static, and so are leaves with an axis that are not arrays. With `donate="all"` the call
    may reuse the buffers of mapped arrays (objects get their values back), and with `"warn"` JAX warns
    of those it could not use. The result has a method `lower`, like that of `filter_jit`.

    Args:
        fun: the function; without it a decorator is returned.
        in_axes, out_axes, axis_name, axis_size: as for `filter_vmap`.
        donate: `"all"`, `"warn"` or `"none"`, see above.
        pmapkwargs: `default=`, `fn=`, `args=`, `kwargs=` and `out=` as for `filter_vmap`; the rest
            as for `jax.pmap`.

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
                f"filter_pmap takes no {name}=: whether a leaf is static or donated is decided leaf by "
                "leaf. Use in_axes= and donate=."
            )
    pmapkwargs |= {"axis_name": axis_name, "donate_argnums": (2,)}
    return _mapped(FilterPmap, fun, jax.pmap, in_axes, out_axes, axis_size, donate, pmapkwargs)
