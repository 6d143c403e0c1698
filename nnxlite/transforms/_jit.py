"""`jit`: compile functions of mutable objects, at the cost of `jax.jit` over flat leaves.

Each call flattens the arguments (but not graph objects), finds their plan, reads the leaves, runs the
compiled function, and stores the values that it wrote.  The compiled function is one `jax.jit` object
for each user function; its cache key is the interned `CallDef`.

Donation and shardings are labels of leaves.  JAX wants both before it calls the function, and which
leaves a call has, and what it writes, is known only then.  So leaves cross in groups, one for each label
that a leaf may have, and JAX is given the labels of the groups.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import typing as tp
import weakref

import jax
import numpy as np

from nnxlite._base.errors import Modes, context_key, listed
from nnxlite._base.jax import as_integer, drop_hidden_frames, is_compiling, is_deleted, is_tracing
from nnxlite.boundary._body import Body, trace_body
from nnxlite.boundary._call_def import (
    CallDef,
    Inner,
    Operands,
    Partition,
    describe,
    enter,
    leaf_names,
    paths_of,
    put,
)
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._labels import by_path, mentioned, output_settings
from nnxlite.boundary._leave import leave, refuse_non_arrays
from nnxlite.boundary._out import OutputGroups, Outputs, replay, write_leaves
from nnxlite.objects._module import note_deleted
from nnxlite.transforms._call import (
    argument_settings,
    inputs_in_mode,
    owners,
    select_arguments,
    stay_in_place,
)
from nnxlite.transforms._checks import (
    checks_noted,
    has_several_cpus,
    note_check,
    raise_failed,
    wait,
    wait_in_turn,
)
from nnxlite.transforms._compiles import (
    CacheInfo,
    Explanation,
    Lowered,
    Staged,
    Traced,
    Traces,
    refuse_other_structure,
    with_shapes,
)
from nnxlite.transforms._wrapper import (
    G,
    JitKeywords,
    Options,
    P,
    R,
    Transform,
    name_of,
    program,
    weakly,
)
from nnxlite.variables._definition import MISSING

__all__ = ["jit"]


class JitProgram:
    """The compiled side of one function under one set of options; shared by equal wrappers.

    Args:
        transform: one of them.

    Attributes:
        jitted: the `jax.jit` object, of a group of leaves for each label, the first as `Operands`.
        sharded, plain: whether there are shardings; whether nothing is donated, and there are none.
        order: the labels of the groups: whether a leaf is donated, and its sharding.
        out_order: those of the outputs: their shardings.
        traces: the log of its traces.
    """

    def __init__(self, transform: Transform[..., tp.Any]) -> None:
        fun, options = transform.bound.fun, transform.options
        self.options, self.donate = options, options.donate
        self.num_bound = len(transform.bound.args)
        self.title, self.fun = f"{options.name}({name_of(fun)})", weakly(fun)
        shardings = mentioned(None, options.in_shardings)
        donated = (False, True) if self.donate else (False,)
        self.order = tuple(itertools.product(donated, shardings))
        self.out_order = mentioned(None, options.in_shardings, options.out_shardings)
        self.sharded = not (options.in_shardings is None and options.out_shardings is None)
        self.plain = not (self.donate or self.sharded)
        self._checks = self._in_turn = False
        # Not on the CallDef, which outlives functions. JAX keeps the CallDefs of the programs in its
        # cache, and a plan those of its calls: an entry is needed no longer than one of the two.
        self._labels = weakref.WeakKeyDictionary[CallDef, tuple[Partition, list[tp.Any]]]()
        self._traced: tuple[CallDef, Body] | None = None
        # JAX's caches keep what a traced function refers to, tracers too, until the function dies: in a
        # circle, until the next garbage collection.
        find: tp.Any = weakref.ref(self)
        run = lambda *operands: find().run(*operands)
        names = lambda *operands: find().named(*operands)
        name = name_of(fun).rpartition(".")[2].strip("<>") or "fun"
        run = describe(run, fun, name, names)
        given = dict(options.jax_options)
        if len(shardings) > 1:
            given["in_shardings"] = tuple([sharding for _, sharding in self.order])
        if len(self.out_order) > 1:
            given["out_shardings"] = (None, self.out_order)
        if self.donate:
            given["donate_argnums"] = [n for n, (donated, _) in enumerate(self.order) if donated]
            given["keep_unused"] = True  # so that XLA sees all users of a donated buffer
        self.jitted = jax.jit(run, **given)
        self.traces = Traces(self.title, fun, options.max_traces)

    def named(self, operands: Operands, *groups: tp.Any) -> tp.Iterator[tuple[str, tp.Any]]:
        """The leaves that JAX is given, by name."""
        names = leaf_names(operands.call)
        parts = self.labels(operands.call)[0].split(names) if groups else [names]
        for part, group in zip(parts, (operands, *groups)):
            yield from zip(part, group)

    def run(self, operands: Operands, *groups: list[tp.Any]) -> tp.Any:
        """What JAX traces: enter, run, leave."""
        call, leaves = operands.call, self.joined(operands, *groups)
        checks = checks_noted()
        with self.traces.recorded(call, leaves):
            out = stay_in_place(call, leaves, self._outputs(call, leaves))
        self._in_turn = has_several_cpus()
        self._checks = self._checks or checks_noted() != checks
        if self.options.is_array is not None:
            out = out.as_arrays(self.options.is_array)
        if self.plain:
            return out
        settings = [None] * len(out.values)
        if self.sharded:
            asked = self.options.out_shardings
            settings = output_settings(call, out, *self.shardings(call), asked, "out_shardings")
        return OutputGroups.of(out, settings, self.out_order)

    def _outputs(self, call: CallDef, leaves: list[tp.Any]) -> Outputs:
        traced, self._traced = self._traced, None
        if traced is not None and traced[0] is call and traced[1].accepts(leaves):
            return traced[1](leaves)  # it was traced to know what is donated
        tree, inner = enter(call, leaves)
        labelled = zip(call.leaves(), self.labels(call)[0].labels) if self.donate else ()
        donated = {leaf.graph_leaf for leaf, (flag, _) in labelled if flag}
        return self.left(inner, tree, all_written=donated - {None})

    def left(self, inner: Inner, tree: tp.Any, **more: tp.Any) -> Outputs:
        """What leaves the function for the rebuilt arguments of a call."""
        (args, kwargs), modes = tree, self.options.modes
        more |= {"foreign": self.options.is_array is not None, "graph": modes.graph}
        result = inner.run(self.fun(), *args, **kwargs)
        return leave(inner, result, name=self.title, structure=modes.updates, **more)

    def finish(self, inputs: Inputs, left: tp.Any) -> tp.Any:
        """Write back what left the function, where a check in it may fail only once that is there."""
        out = left if self.plain else left[0].value.outputs(left[1])  # a call less
        if self._checks and not wait(out):
            note_check()  # of the function around this one, whose trace may not run the check again
        if self._in_turn:
            wait_in_turn(out.values)
        return replay(inputs, out)

    def __call__(
        self,
        inputs: Inputs,
        call: CallDef,
        jitted: tp.Callable[..., tp.Any],
    ) -> tp.Any:
        """Call one of JAX's functions, and write back, where something is donated or has a sharding.

        An interrupt that arrives while JAX runs is raised as soon as Python code runs again. By then
        donated buffers are gone, so the outputs are written back first. If there are none, as after
        an error on the device, the exception names the arrays that are gone.
        """
        moves = self.options.in_shardings is not None and not is_tracing()
        moved = self._moved(call, inputs) if moves else {}
        groups = self.groups(call, inputs.leaves)
        returned: list[tp.Any] = []

        def finish() -> tp.Any:
            write_leaves(inputs, moved)
            return self.finish(inputs, returned[0])

        try:
            returned.extend(map(jitted, *zip(groups)))  # no Python in between
            return finish()
        except BaseException as error:
            if not self.donate:
                raise
            leaves = self.joined(*groups)
            if returned:
                with contextlib.suppress(Exception):  # the error itself matters more
                    finish()
            elif gone := [
                f"'{at.text()}'" for at, x in zip(call.leaves(), leaves) if is_deleted(x)
            ]:
                error.add_note(
                    f"The arrays of {listed(gone, most=1)} are gone: this call, or one before it, was "
                    "to reuse their memory. Restore them, from a checkpoint for example; before a call "
                    "that donates, nnx.clone(model, arrays=True) makes a copy with its own arrays. A "
                    "call that does not donate leaves all objects as they were when it fails."
                )
            drop_hidden_frames(error)
            if isinstance(error, (ValueError, RuntimeError)):  # which of the two depends on JAX
                self._refuse_shared_buffers(call, leaves)
            raise

    # labels ------------------------------------------------------------------------------------

    def groups(self, call: CallDef, leaves: list[tp.Any]) -> tuple[tp.Any, ...]:
        """What JAX is given for these leaves of a call, before it runs."""
        if not self.donate and self.options.in_shardings is None:
            return (Operands(call, leaves),)
        self._traced = None  # of a call that failed: what the function reads may have changed
        first, *others = self.labels(call, leaves)[0].split(leaves)
        return Operands(call, first), *others

    def joined(self, operands: Operands, *groups: list[tp.Any]) -> list[tp.Any]:
        """The inverse of `groups`."""
        if not groups:
            return operands.leaves
        return self.labels(operands.call)[0].join(operands.leaves, *groups)

    def labels(
        self, call: CallDef, leaves: tp.Sequence[tp.Any] = ()
    ) -> tuple[Partition, list[tp.Any]]:
        """The leaves of a kind of call by label, and the sharding of each root.

        Args:
            call: the arguments.
            leaves: theirs, in case they are not known yet.
        """
        known = self._labels.get(call)
        if known is None:
            given = None, self.options.in_shardings, "in_shardings"
            static = call.static_positions()
            shardings, roots = argument_settings(call, *given, without=static, label="sharding")
            flags = self._choose_donated(call, leaves) if self.donate else [False] * len(shardings)
            known = Partition(tuple(zip(flags, shardings)), self.order), roots
            self._labels[call] = known
            # XLA refuses it, too, but in a first call only after JAX's warnings.
            self._refuse_shared_buffers(call, leaves)
        return known

    def _refuse_shared_buffers(self, call: CallDef, leaves: tp.Sequence[tp.Any]) -> None:
        """Raise ValueError where one buffer would be donated twice, or donated and read."""
        flags = [donated for donated, _ in self.labels(call)[0].labels]
        if not (any(flags) and is_compiling()):
            return  # nothing is donated
        numbered = [*enumerate(leaves)]
        first = {id(leaf): number for number, leaf in reversed(numbered) if flags[number]}
        for number, leaf in numbered:
            donor = first.get(id(leaf), number)
            # JAX copies NumPy arrays, and equal Python scalars may be one object.
            if donor != number and isinstance(leaf, jax.Array):
                texts = [leaf.text() for leaf in call.leaves()]
                raise ValueError(
                    f"{self.title}: the same array buffer is donated at '{texts[donor]}' and used at "
                    f"'{texts[number]}'. A donated buffer can be used once: copy the array in one of "
                    "the two places (nnx.clone(model, arrays=True) copies those of an object), share "
                    "one Variable between them, or do not donate."
                )

    def _choose_donated(self, call: CallDef, leaves: tp.Sequence[tp.Any]) -> list[bool]:
        if self.donate == "written":
            run = lambda inner, tree: (self.left(inner, tree), None)
            body = trace_body(call, run, [*leaves], user=self.fun())
            self._traced = (call, body)
            written = set(body.definition.written)
            return [leaf.graph_leaf in written for leaf in call.leaves()]
        found = owners(call, self.num_bound)
        if isinstance(self.donate, str):  # of `filter_jit`
            return [owner != 0 or not self.donate.endswith("except-first") for owner in found]
        return [owner in self.donate for owner in found]

    def shardings(
        self, call: CallDef, leaves: tp.Sequence[tp.Any] = ()
    ) -> tuple[list[tp.Any], list[tp.Any]]:
        """The sharding of each graph leaf, and of each root; arguments as for `labels`."""
        partition, roots = self.labels(call, leaves)
        return call.by_side([sharding for _, sharding in partition.labels])[1], roots

    def _moved(self, call: CallDef, inputs: Inputs) -> dict[int, tp.Any]:
        """Put uncommitted arrays of objects where `in_shardings` says; the new values, by leaf number.

        JAX would do this in every call, and drop the result for arrays that are only read.
        """
        moved: dict[int, tp.Any] = {}
        shardings, _ = self.shardings(call, inputs.leaves)
        for leaf, (value, sharding) in enumerate(zip(inputs.values, shardings)):
            committed = getattr(value, "committed", not isinstance(value, np.ndarray))
            if sharding is not None and not committed:
                with contextlib.suppress(ValueError):  # JAX will refuse it, by name
                    moved[leaf] = jax.device_put(value, sharding)
        put(inputs.values, moved, moved.values())
        return moved


class JitWrapped(Transform[P, R]):
    """A compiled function, as `jit` returns it.

    Attributes:
        fun: the function that was given to `jit`.
        jitted_fn: the `jax.jit` object, which takes leaves; `jitted_fn._cache_size()` is the number of
            compiled programs. A function that wraps this one with `functools.wraps` has it as well.
    """

    partial_args: tuple[tp.Any, ...] = ()

    def __init__(self, fun: tp.Callable[P, R], options: Options) -> None:
        super().__init__(fun, options)
        self.fun = fun
        self._static = options.static  # faster to read
        self._compiled: JitProgram = program(self, None, lambda: JitProgram(self))
        self.jitted_fn: tp.Any = self._compiled.jitted

    def _inputs(self, args: tp.Any, kwargs: tp.Any) -> Inputs:
        """The arguments of a call, those that are not traced being static leaves."""
        return inputs_in_mode(self.bound, args, kwargs, self.options, False, self._static)

    def explain(self) -> Explanation:
        """Why this function was last compiled: what was new in its most recent trace.

        >>> import nnxlite as nnx, jax.numpy as jnp
        >>> step = nnx.jit(lambda model, x: model(x))
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> _ = step(model, jnp.ones((1, 2))), step(model, jnp.ones((5, 2)))
        >>> step.explain().causes
        ('x: float32[1,2] -> float32[5,2]',)
        """
        return self._compiled.traces.explain()

    def cache_info(self) -> CacheInfo:
        """The number of traces and of programs in the cache, and the seconds that the traces took."""
        traces = self._compiled.traces
        return CacheInfo(traces.count, self._cache_size(), traces.seconds)

    def clear_cache(self) -> None:
        """Drop all compiled programs of this function."""
        self.jitted_fn.clear_cache()

    def _cache_size(self) -> int:
        return self.jitted_fn._cache_size()

    # ahead of time -----------------------------------------------------------------------------

    def staged(self, args: tp.Any, kwargs: tp.Any, program: CallDef | None = None) -> Staged:
        """A call, ready for JAX; see `Staged`."""
        static = {} if program is None else self._static_arguments(program)
        given_again = not static.keys().isdisjoint(kwargs)
        first = len(self.bound.args) + len(self.partial_args)
        for where, value in static.items():
            if isinstance(where, str):
                kwargs = {**kwargs, where: value}
            elif where >= first:
                args = (*args[: where - first], value, *args[where - first :])
        inputs = self._inputs(args, kwargs)
        call, own = inputs.define(context_key()), self._compiled
        if program is not None:
            more = call.treedef.num_leaves > program.treedef.num_leaves
            again = given_again or (more and self._static and call.static is not None)
            why = ["a static argument, which is part of the program, was given again"]
            refuse_other_structure(self, program, call, *(why if again else ()))
        groups = own.groups(call, inputs.leaves)
        return Staged(call, own.jitted, groups, functools.partial(own, inputs, call))

    def _static_arguments(self, program: CallDef) -> dict[int | str, tp.Any]:
        """The static arguments of a program, by number or name."""
        if program.static is None or not self._static:
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
        call, own = inputs.define(context_key()), self._compiled
        left = own.jitted.eval_shape(*own.groups(call, inputs.leaves))
        left = left if own.plain else left[0].value.outputs(left[1])
        return with_shapes(call, inputs.leaves, left)


def run_jit(jitted: JitWrapped[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    """Call a compiled function."""
    inputs = jitted._inputs(args, kwargs)
    call, own = inputs.define(context_key()), jitted._compiled
    try:
        if own.plain:
            return own.finish(inputs, own.jitted(Operands(call, inputs.leaves)))
        return own(inputs, call, own.jitted)
    except TypeError:
        remedy = "Make it static (static_argnums, static_argnames) if it is not a number."
        inside = "Use nnx.filter_jit: every leaf that is not an array is static there."
        refuse_non_arrays(repr(jitted), call, inputs.leaves, remedy, inside)
        raise
    except RuntimeError as error:
        raise_failed(error)
        note_deleted(error, "the call", lambda: zip(leaf_names(call), inputs.leaves))
        raise


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
        graph_updates: False propagates values and metadata of Variables, not structure.

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
        given = {"backend": backend, "device": device, "inline": inline, "keep_unused": keep_unused}
        static = select_arguments(fun, static_argnums, static_argnames, "static")
        donated = select_arguments(fun, donate_argnums, donate_argnames, "donate")
        both = {which for which in static & donated if isinstance(which, str)} or static & donated
        if both:
            raise ValueError(
                f"jit({name_of(fun)}): an argument is either static or donated, but "
                f"{sorted(both, key=str)} are given as both."
            )
        more = {
            "static": static,
            "donate": donate or donated,
            "in_shardings": by_path(in_shardings),
            "out_shardings": by_path(out_shardings),
            "jax_options": tuple([(key, x) for key, x in given.items() if x is not None]),
            "max_traces": as_integer(max_traces),
        }
        return JitWrapped(fun, Options.of("jit", modes, run_jit, **more))

    return jitted if fun is MISSING else jitted(fun)
