"""`jit`: compile functions of mutable objects, at the cost of `jax.jit` over flat leaves.

Each call flattens the arguments (but not graph objects), finds their plan, reads the leaves, runs the
compiled function, and stores the values that it wrote.  The compiled function is one `jax.jit` object
for each user function; its cache key is the interned `CallDef`.
"""

from __future__ import annotations

import functools
import typing as tp
import weakref

import jax

from nnxlite._base.config import Modes, context_key
from nnxlite._base.jax import as_integer, drop_hidden_frames
from nnxlite.boundary._body import Body, body_outputs, trace_body
from nnxlite.boundary._call_def import CallDef, enter, paths_of
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._leave import leave
from nnxlite.boundary._operands import Operands, describe, leaf_names
from nnxlite.boundary._out import Outputs, replay, write_leaves
from nnxlite.boundary._prefixes import by_path
from nnxlite.boundary._refusals import call_difference, refuse_foreign_outputs, refuse_non_arrays
from nnxlite.objects._scopes import note_deleted
from nnxlite.transforms._arguments import (
    Selection,
    refuse_shared_result,
    select_arguments,
    static_argument,
    unboxed,
    with_statics,
)
from nnxlite.transforms._compiles import CacheInfo, Explanation, Traces
from nnxlite.transforms._donation import Donation, Donor, Owner
from nnxlite.transforms._finish import (
    Waiting,
    checks_noted,
    has_several_cpus,
    raise_failed,
    wait_in_turn,
)
from nnxlite.transforms._mapping import marks_errors
from nnxlite.transforms._placement import Placement, stay_in_place
from nnxlite.transforms._shapes import place_abstract
from nnxlite.transforms._stages import Lowered, Staged, Traced, other_structure
from nnxlite.transforms._wrapper import (
    P,
    R,
    Transform,
    name_of,
    not_owning,
    program,
    program_name,
    weakly,
)
from nnxlite.variables._definition import MISSING

if tp.TYPE_CHECKING:
    from nnxlite.transforms._signatures import G, JitKeywords


class JitOptions(tp.NamedTuple):
    """The options of `jit` and `filter_jit`, in one object.

    Attributes:
        static, donate: of `jit`, arguments.
        is_array: of `filter_jit`, which leaves of the result are arrays; the others are static.
        specs, out, donated: of `filter_jit`; see there.
    """

    name: str
    modes: Modes
    jax_options: tuple[tuple[str, tp.Any], ...]
    max_traces: int | None = None
    static: Selection = Selection()
    donate: Selection = Selection()
    donate_written: bool = False
    in_shardings: tp.Any = None
    out_shardings: tp.Any = None
    is_array: tp.Callable[[tp.Any], bool] | None = None
    specs: tp.Any = None
    out: tp.Any = None
    donated: tp.Any = "none"


class JitCore:
    """The compiled side of one function under one set of options; shared by equal wrappers.

    Args:
        fun: the function.
        num_bound: how many arguments a wrapper of it carries.
        options: of the transform.
        donated: chooses the arguments to donate; see `Donor`. None where nothing is donated.
        check: from the function's result to the one that leaves it.

    Attributes:
        jitted: the `jax.jit` object, of a function of the interned `CallDef` and groups of leaves.
        donor: decides about donation, if anything is donated.
        placement: decides about shardings, if any are given.
        finish: writes outputs back; set when the function is traced, see `_finish`.
    """

    finish: tp.Callable[[Inputs, Outputs], tp.Any] = staticmethod(replay)

    def __init__(
        self,
        fun: tp.Callable[..., tp.Any],
        num_bound: int,
        options: JitOptions,
        donated: tp.Any,
        check: tp.Callable[[tp.Any], tp.Any],
    ) -> None:
        self.options = options
        self.name = name_of(fun)
        self.fun = weakly(fun)
        self.check = check
        title = f"{options.name}({self.name})"
        self.donor: Donor | None = None
        if donated is not None or options.donate_written:
            self.donor = Donor(title, donated or _none, num_bound, not_owning(self.trace_written))
        self.placement: Placement | None = None
        shardings = options.in_shardings, options.out_shardings
        if any(s is not None for s in shardings):
            self.placement = Placement(not_owning(self.make), not_owning(self.groups), *shardings)
        self.plain = self.donor is None and self.placement is None
        program = program_name(fun)
        # One function for all `jax.jit` objects, so that JAX traces it once.
        run = _run if self.placement is None else marks_errors(_run)
        find = tp.cast(tp.Any, weakref.ref(self))
        self.run = describe(functools.partial(run, find), fun, program, not_owning(self.named))
        self.jitted = self.make()
        self.traces = Traces(title, fun, program, options.max_traces)

    def make(self, **shardings: tp.Any) -> tp.Any:
        """A `jax.jit` object for this function."""
        options = {**dict(self.options.jax_options), **shardings}
        if self.donor is not None:
            options["donate_argnums"] = 1
            options["keep_unused"] = True  # so that XLA sees all users of a donated buffer
        return jax.jit(self.run, **options)

    def named(self, operands: Operands, *groups: tp.Any) -> tp.Iterator[tuple[str, tp.Any]]:
        """The leaves that JAX is given, by name."""
        call = operands.call
        for names, group in zip(self.groups(call, leaf_names(call)), (operands, *groups)):
            yield from zip(names, group)

    def result(self, args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]) -> tp.Any:
        """The result of the function for the rebuilt arguments of a call."""
        result = self.check(self.fun()(*args, **kwargs))
        refuse_shared_result(result, "jit", self.options.modes.graph)
        return result

    def trace_written(self, call: CallDef, leaves: list[tp.Any]) -> Body | None:
        """The body, traced to find out what it writes; None unless `donate="written"`."""
        if not self.options.donate_written:
            return None
        updates = self.options.modes.updates
        run = lambda inner, tree: (body_outputs(inner, self.result(*tree), updates), None)
        return trace_body(call, run, leaves, user=self.fun())

    def jitted_for(self, call: CallDef, groups: tp.Sequence[tp.Any]) -> tp.Any:
        """The `jax.jit` object to use for a call: one for all, except where shardings are given."""
        return self.jitted if self.placement is None else self.placement.jitted_for(call, groups)

    def __call__(self, inputs: Inputs, call: CallDef) -> tp.Any:
        """Run and write back, where something is donated or has a sharding."""
        donor, placement = self.donor, self.placement

        def finish(out: tp.Any) -> tp.Any:
            if moved:
                write_leaves(inputs, moved)
            return self.finish(inputs, out)

        try:
            moved = {} if placement is None else placement.move(call, inputs)
            groups = self.groups(call, inputs.leaves)
            if donor is None:
                return finish(tp.cast(Placement, placement)(call, groups))
            return donor.run(call, self.jitted_for(call, groups), groups, finish)
        except Exception as error:
            drop_hidden_frames(error)
            raise

    def clear_cache(self) -> None:
        """Drop all compiled programs."""
        self.jitted.clear_cache()
        if self.placement is not None:
            self.placement.clear_cache()

    def _cache_size(self) -> int:
        placed = 0 if self.placement is None else self.placement.cache_size()
        return self.jitted._cache_size() + placed

    def groups(self, call: CallDef, leaves: list[tp.Any]) -> tuple[tp.Any, ...]:
        """Leaves in the groups that are passed to JAX, the first as `Operands`."""
        if self.donor is None:
            return (Operands(call, leaves),)
        kept, donated = self.donor.split(call, leaves)
        return Operands(call, kept), donated


def _none(names: tp.Sequence[str], owners: tp.Sequence[Owner]) -> tp.Container[Owner]:
    return ()


def _run(find: tp.Callable[[], JitCore], operands: Operands, *groups: tp.Any) -> tp.Any:
    """What JAX traces: enter, run, leave."""
    core, call = find(), operands.call
    donor = core.donor
    if has_several_cpus() and core.finish is replay:
        core.finish = _finish_in_turn
    leaves = operands.leaves if donor is None else donor.join(call, (operands, *groups))
    checks = checks_noted()
    with core.traces.recorded(call, leaves):
        out = _traced(core, call, leaves)
    if checks_noted() != checks and not isinstance(core.finish, Waiting):
        core.finish = Waiting(core.finish)
    return out


def _finish_in_turn(inputs: Inputs, out: Outputs) -> tp.Any:
    wait_in_turn(out.values)
    return replay(inputs, out)


def _traced(core: JitCore, call: CallDef, leaves: list[tp.Any]) -> Outputs:
    donor, options = core.donor, core.options
    body = None if donor is None else donor.take_traced(call, leaves)
    if body is not None:
        out = body(leaves)
    else:
        (args, kwargs), inner = enter(call, leaves)
        result = core.result(args, kwargs)
        kept = () if donor is None else donor.donated(call)
        out = leave(inner, result, all_written=kept, structure=options.modes.updates)
        if options.is_array is None:
            refuse_foreign_outputs(call, out, core.name)
    out = stay_in_place(call, leaves, out)
    return out if options.is_array is None else out.as_arrays(options.is_array)


class JitWrapped(Transform[P, R]):
    """A compiled function, as `jit` returns it.

    Attributes:
        fun: the function that was given to `jit`.
        jitted_fn: the `jax.jit` object, which takes leaves (with shardings there are several, and this
            is the object that manages them); `jitted_fn._cache_size()` is the number of compiled
            programs. A function that wraps this one with `functools.wraps` has it, too.
    """

    options: JitOptions
    partial_args: tuple[tp.Any, ...] = ()

    def __init__(self, fun: tp.Callable[P, R], options: JitOptions) -> None:
        super().__init__(fun, options)
        self.fun = fun
        self._has_static = options.static.any
        num_bound = len(self.bound.args)
        make = lambda: JitCore(self.bound.fun, num_bound, options, self._donated(), self._check())
        self._core: JitCore = program(self, None, make)
        self.jitted_fn = self._core if self._core.placement else self._core.jitted

    def _donated(self) -> tp.Any:
        """Which arguments are donated; see `JitCore`."""
        chosen = self.options.donate
        return (lambda names, owners: chosen.names | chosen.numbers) if chosen.any else None

    def _check(self) -> tp.Callable[[tp.Any], tp.Any]:
        """From the function's result to the one that leaves it."""
        return lambda result: result

    def _inputs(self, args: tp.Any, kwargs: tp.Any) -> Inputs:
        """The arguments of a call, those that are not traced being static leaves."""
        _, first, named = self.bound
        if first or named:
            args, kwargs = (*first, *args), {**named, **kwargs}
        if self._has_static:
            args, kwargs = self._boxed(args, kwargs, len(first))
        inputs = Inputs.of_call(args, kwargs, self.bound.names)
        if not self.options.modes.graph:
            inputs.in_mode(False, "jit")
        if self._has_static:
            unboxed(inputs)
        return inputs

    def _boxed(self, args: tp.Any, kwargs: tp.Any, first: int) -> tp.Any:
        """The arguments with the static ones boxed, so that each is one leaf."""
        static, fun = self.options.static, self.bound.fun
        numbers = {n + first if n >= 0 else n + len(args) for n in static.numbers}
        box = lambda value, where, chosen: static_argument(value, where, fun) if chosen else value
        args = tuple([box(value, n, n in numbers) for n, value in enumerate(args)])
        return args, {n: box(value, n, n in static.names) for n, value in kwargs.items()}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        inputs = self._inputs(args, kwargs)
        call, core = inputs.define(context_key()), self._core
        try:
            if core.plain:
                out = core.jitted(Operands(call, inputs.leaves))
                return core.finish(inputs, out)
            return core(inputs, call)
        except TypeError:
            remedy = "Make it static (static_argnums, static_argnames) if it is not a number."
            inside = "Use nnx.filter_jit: every leaf that is not an array is static there."
            refuse_non_arrays(repr(self), call, inputs.leaves, remedy, inside)
            raise
        except RuntimeError as error:
            raise_failed(error)
            note_deleted(error, "the call", lambda: zip(leaf_names(call), inputs.leaves))
            raise

    def explain(self) -> Explanation:
        """Why this function was last compiled: what was new in its most recent trace.

        >>> import nnxlite as nnx, jax.numpy as jnp
        >>> step = nnx.jit(lambda model, x: model(x))
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> _ = step(model, jnp.ones((1, 2))), step(model, jnp.ones((5, 2)))
        >>> step.explain().causes
        ('x: float32[1,2] -> float32[5,2]',)
        """
        return self._core.traces.explain()

    def cache_info(self) -> CacheInfo:
        """How many times this function was traced, the programs in the cache, and the time it took."""
        return self._core.traces.info(self._cache_size())

    def clear_cache(self) -> None:
        """Drop all compiled programs of this function."""
        self.jitted_fn.clear_cache()

    def _cache_size(self) -> int:
        return self.jitted_fn._cache_size()

    # ahead of time -----------------------------------------------------------------------------

    def staged(self, args: tp.Any, kwargs: tp.Any, program: CallDef | None = None) -> Staged:
        """A call, ready for JAX; see `Stageable`."""
        static = {} if program is None else self._static_arguments(program)
        given_again = not static.keys().isdisjoint(kwargs)
        if static:
            args, kwargs = with_statics(
                static.items(), args, kwargs, len(self.bound.args) + len(self.partial_args)
            )
        inputs = self._inputs(args, kwargs)
        call, core = inputs.define(context_key()), self._core
        if program is not None and (call != program or given_again):
            what = [call_difference(program, call)]
            if static or (call.static and self.options.static.any):
                what.append("a static argument, which is part of the program, was given again")
            same = "settings of nnxlite differ" if call.static == program.static else ""
            raise other_structure(self, ", or ".join(filter(None, what)) or same)
        groups = core.groups(call, inputs.leaves)
        finish = functools.partial(core.finish, inputs)

        def run(jitted: tp.Any) -> tp.Any:
            if core.donor is None:
                return finish(jitted(*groups))
            return core.donor.run(call, jitted, groups, finish)

        return Staged(call, lambda: core.jitted_for(call, groups), groups, run)

    def _static_arguments(self, program: CallDef) -> dict[int | str, tp.Any]:
        """The static arguments of a program, by number or name."""
        if program.static is None or not self.options.static.any:
            return {}
        paths, positions = paths_of(program.treedef), program.array_positions()
        static = zip(program.static.numbers, program.static.values)
        return {tp.cast(tp.Any, paths[positions[n]][1]): value for n, value in static}

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered[R]:
        """Lower the function for these arguments, without running it."""
        return Lowered.of("lower", self, args, kwargs)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced[R]:
        """Trace the function for these arguments, without lowering it."""
        return Traced.of("trace", self, args, kwargs)

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> tp.Any:
        """The result with `jax.ShapeDtypeStruct`s for arrays; nothing is computed or written."""
        inputs = self._inputs(args, kwargs)
        call = inputs.define(context_key())
        groups = self._core.groups(call, inputs.leaves)
        crossing = self._core.jitted_for(call, groups).eval_shape(*groups)
        out = replay(Inputs.rebuilt(call, inputs.leaves), crossing)
        place_abstract(out)
        return out

    def donation(self, *args: P.args, **kwargs: P.kwargs) -> Donation:
        """What `donate="written"` reuses in a call with these arguments; nothing runs.

        Raises ValueError for a function without `donate="written"`.
        """
        donor = self._core.donor
        if donor is None or not self.options.donate_written:
            raise ValueError(f"{self!r} does not donate what it writes: pass donate='written'.")
        inputs = self._inputs(args, kwargs)
        call = inputs.define(context_key())
        donor.split(call, inputs.leaves)
        chosen, places = sorted(donor.donated(call)), call.graph_leaves()
        names = tuple(places[i].text() for i in chosen)
        leaves = jax.tree_util.tree_leaves([inputs.values[i] for i in chosen])
        return Donation(names, sum(getattr(x, "nbytes", 0) for x in leaves))


@tp.overload
def jit(fun: G, **options: tp.Unpack[JitKeywords]) -> G: ...
@tp.overload
def jit(fun: tp.Callable[P, R], **options: tp.Unpack[JitKeywords]) -> JitWrapped[P, R]: ...
@tp.overload
def jit(
    **options: tp.Unpack[JitKeywords],
) -> tp.Callable[[tp.Callable[P, R]], JitWrapped[P, R]]: ...
def jit(
    fun: tp.Any = MISSING,
    *,
    in_shardings: tp.Any = None,
    out_shardings: tp.Any = None,
    static_argnums: int | tp.Sequence[int] | None = None,
    static_argnames: str | tp.Iterable[str] | None = None,
    donate_argnums: int | tp.Sequence[int] | None = None,
    donate_argnames: str | tp.Iterable[str] | None = None,
    keep_unused: bool = False,
    device: tp.Any = None,
    backend: str | None = None,
    inline: bool = False,
    donate: tp.Literal["written"] | None = None,
    max_traces: int | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """Compile a function whose arguments may contain modules, Variables and states.

    Inside, the arguments are new objects of the same structure and sharing; what the function
    writes (values of Variables, attributes, new objects) appears on the caller's own objects after
    the call. A failed call changes nothing.

    A program is compiled for each structure of the arguments: shapes and dtypes of arrays, static
    attributes and sharing of objects, values of static arguments. `explain()` of the result says
    why the last one was compiled.

    Args:
        fun: the function, bound method, or callable object; without it `jit` returns a decorator.
        in_shardings: one sharding for each argument, or a prefix; `StateSharding` for objects.
        out_shardings: the same for the result.
        static_argnums, static_argnames: arguments that are part of the program; hashable.
        donate_argnums, donate_argnames: arguments whose buffers may be reused for the outputs.
        keep_unused, device, backend, inline: as in `jax.jit`.
        donate: "written" donates the buffers of exactly the Variables that the function writes.
        max_traces: how many times the function may be traced; see `JitWrapped.explain`.
        graph: False refuses shared references.
        graph_updates: False propagates values of Variables only, not structure.

    Returns:
        A function of the same arguments. It has the methods `lower`, `trace` and `eval_shape` of a
        function under `jax.jit`, and `explain`, `cache_info` and `clear_cache`.

    Raises:
        ValueError: for an unhashable static argument, or a buffer donated twice.
        TypeError: where an argument contains something that is not an array.
        TraceContextError: where an object to be written belongs to another trace level.
        RuntimeError: by a call that would need one trace more than `max_traces`; it says why.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> @nnx.jit
    ... def double(model):
    ...     model.kernel *= 2
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> before = model.kernel.value
    >>> double(model)
    >>> bool((model.kernel.value == 2 * before).all())
    True

    Arguments that are neither arrays nor objects must be static; a training step may donate what it
    replaces:

    >>> @nnx.jit(static_argnames="train", donate="written")
    ... def step(model, x, train):
    ...     if train:
    ...         model.bias += 1.0
    ...     return model(x)
    >>> step(model, jnp.ones((4, 2)), train=True).shape, model.bias[...].tolist()
    ((4, 3), [1.0, 1.0, 1.0])
    >>> step.cache_info().traces
    1
    """
    modes = Modes.of(graph, graph_updates)

    def jitted(fun: tp.Any) -> JitWrapped[..., tp.Any]:
        if donate not in (None, "written"):
            raise ValueError(f"donate must be 'written' or None, got {donate!r}.")
        if donate and (donate_argnums is not None or donate_argnames is not None):
            raise ValueError("Give either donate='written' or donate_argnums/donate_argnames.")
        jax_options: dict[str, tp.Any] = {"keep_unused": keep_unused, "inline": inline}
        if device is not None:
            jax_options["device"] = device
        if backend is not None:
            jax_options["backend"] = backend
        options = JitOptions(
            name="jit",
            modes=modes,
            static=select_arguments(fun, static_argnums, static_argnames, "static"),
            donate=select_arguments(fun, donate_argnums, donate_argnames, "donate"),
            donate_written=donate == "written",
            in_shardings=by_path(in_shardings),
            out_shardings=by_path(out_shardings),
            jax_options=tuple(sorted(jax_options.items())),
            max_traces=as_integer(max_traces),
        )
        both = (options.static.names & options.donate.names) or (
            options.static.numbers & options.donate.numbers
        )
        if both:
            raise ValueError(
                f"jit({name_of(fun)}): an argument is either static or donated, but "
                f"{sorted(both)} are given as both."
            )
        return JitWrapped(fun, options)

    return jitted if fun is MISSING else jitted(fun)
