"""`jit`: compile functions of mutable objects, at the cost of `jax.jit` over flat leaves.

Per call: flatten the arguments (graph objects stay closed), find their plan, read the leaves, run
the compiled function, store what was written.  The compiled function is one `jax.jit` object for
each user function; its static argument is the interned `CallDef`.
"""

from __future__ import annotations

import functools
import re
import typing as tp

import jax
import numpy as np

from nnxlite._config import Modes, context_key
from nnxlite._jax import is_tracing
from nnxlite._statics import replaced_functions
from nnxlite.boundary import (
    CallDef,
    Inputs,
    Outputs,
    Site,
    enter,
    leave,
    replay_crossing,
)
from nnxlite.boundary._body import Body, trace_body
from nnxlite.boundary._outputs import refuse_foreign_result, write_leaves
from nnxlite.boundary._prefixes import (
    argument_path,
    by_path,
    leaf_shardings,
    refuse_non_arrays,
)
from nnxlite.boundary._settings import output_settings
from nnxlite.transforms._arguments import (
    Selection,
    refuse_shared_result,
    select_arguments,
    static_argument,
    with_statics,
)
from nnxlite.transforms._donation import Donation, Groups, leaf_texts
from nnxlite.transforms._shapes import place_abstract
from nnxlite.transforms._stages import Lowered, Traced
from nnxlite.transforms._wrapper import (
    P,
    PerFunction,
    R,
    StaticArgument,
    Transformed,
    name_of,
    weakly,
)
from nnxlite.variables import MISSING


class JitOptions(tp.NamedTuple):
    """The options of `jit`, as they travel together."""

    name: str
    static: Selection
    donate: Selection
    donate_written: bool
    in_shardings: tp.Any
    out_shardings: tp.Any
    modes: Modes
    jax_options: tuple[tuple[str, tp.Any], ...]


class CallKey(tp.NamedTuple):
    """What besides the arguments' structure identifies a compiled program."""

    context: tuple[tp.Any, ...]
    statics: tuple[tuple[int | str, StaticArgument], ...]
    num_bound: int


class Core:
    """The compiled side of one function under one set of options; shared by equal wrappers."""

    def __init__(self, fun: tp.Callable[..., tp.Any], options: JitOptions) -> None:
        self.options = options
        self.name = name_of(fun)
        self.fun = weakly(fun)
        self.by_call: dict[CallDef, tp.Any] = {}
        self.leaving: dict[CallDef, tp.Any] = {}  # the structure that was placed
        self.shardings: dict[CallDef, tuple[list[tp.Any], list[tp.Any], list[tp.Any]]] = {}
        self.donates = options.donate.any or options.donate_written
        self.traced: tuple[CallDef, Body] | None = None
        self.sharded = options.in_shardings is not None
        self.placed = self.sharded or options.out_shardings is not None
        self.run = functools.partial(_run, self)  # one for all, so that JAX traces it once
        self.run.__name__ = self.name.rpartition(".")[2].strip("<>") or "fun"  # type: ignore[attr-defined]
        self.jitted = self.make()

    def make(self, **shardings: tp.Any) -> tp.Any:
        """A `jax.jit` object for this function."""
        options = {**dict(self.options.jax_options), **shardings}
        if self.donates:
            options["donate_argnums"] = (3, 4)
            options["keep_unused"] = True  # so that XLA sees what shares a donated buffer
        return jax.jit(self.run, static_argnums=0, **options)

    def result(self, call: CallDef, args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]) -> tp.Any:
        """What the function gives for the rebuilt arguments of a call, and its static ones."""
        args, kwargs = with_statics(call.extra.statics, args, kwargs)
        result = self.fun()(*args, **kwargs)
        refuse_shared_result(result, "jit", self.options.modes.graph)
        return result

    def compiled_for(self, call: CallDef, groups: tp.Sequence[tp.Any]) -> tp.Any:
        """The `jax.jit` object to use for a call: one for all, except where shardings are given.

        What leaves is found by tracing for the given leaves; JAX does not trace again.
        """
        if not self.placed:
            return self.jitted
        return self.by_call.get(call) or self.place(call, groups)

    def place(self, call: CallDef, groups: tp.Sequence[tp.Any]) -> tp.Any:
        """A `jax.jit` object that puts what a call leaves where it is to be."""
        shardings: dict[str, tp.Any] = {}
        if self.sharded:
            plain, values, _ = self.shardings_in(call)
            shardings["in_shardings"] = self.groups(call, plain, values)
        out = self.make(**shardings).trace(call, *groups).out_info
        shardings["out_shardings"] = self.shardings_out(call, out)
        self.leaving[call] = jax.tree_util.tree_structure(out)
        found = self.by_call[call] = self.make(**shardings)
        return found

    def placed_call(self, call: CallDef, groups: tp.Sequence[tp.Any]) -> tp.Any:
        """Call the function, whose result may have another structure for other shapes of leaves."""
        jitted = self.compiled_for(call, groups)
        before = self.leaving.get(call)
        try:
            return jitted(call, *groups)
        except ValueError as error:
            try:
                again = self.place(call, groups)
            except Exception:
                raise error from None
            if self.leaving[call] == before:
                raise
            return again(call, *groups)

    def shardings_out(self, call: CallDef, out: tp.Any) -> tp.Any:
        """Where JAX is to put what leaves; what belongs to an argument stays where that one is."""
        fixed, result, written, fresh = out
        _, values, roots = self.shardings_in(call)
        settings = output_settings(
            call,
            Outputs(fixed.value, result, written, fresh),
            values,
            roots,
            self.options.out_shardings,
            "out_shardings",
            None,
        )
        treedef = jax.tree_util.tree_structure(result)
        placed = jax.tree_util.tree_unflatten(treedef, settings.result)
        return None, placed, settings.written, settings.fresh

    def shardings_in(self, call: CallDef) -> tuple[list[tp.Any], list[tp.Any], list[tp.Any]]:
        """`in_shardings` of the plain leaves, of the graph leaves, and of the roots."""
        found = self.shardings.get(call)
        if found is None:
            found = self.shardings[call] = leaf_shardings(call, self.options.in_shardings)
        return found

    def settle(self, call: CallDef, inputs: Inputs) -> dict[int, tp.Any]:
        """Put arrays that no device was chosen for where `in_shardings` says.

        JAX would do it in every call, and for what is only read throw the result away.
        Returns the values that moved, by leaf number.
        """
        if is_tracing():
            return {}
        plain, values, _ = self.shardings_in(call)
        inputs.plain = [_settled(x, s) for x, s in zip(inputs.plain, plain)]
        before, inputs.values = inputs.values, [_settled(*x) for x in zip(inputs.values, values)]
        pairs = zip(before, inputs.values)
        return {leaf: new for leaf, (old, new) in enumerate(pairs) if new is not old}

    def where_in(self, call: CallDef) -> list[tuple[str, tp.Any]]:
        """For each dynamic argument leaf its ("arg", number) or ("kwarg", name)."""
        tree = jax.tree_util.tree_unflatten(call.treedef, range(call.treedef.num_leaves))
        args, kwargs = tree
        static = {n for n, _ in call.extra.statics if isinstance(n, int)}
        numbers = [n for n in range(len(args) + len(static)) if n not in static]
        where: list[tuple[str, tp.Any]] = []
        for number, arg in zip(numbers, args):
            where += [("arg", number - call.extra.num_bound)] * len(jax.tree_util.tree_leaves(arg))
        for name in sorted(kwargs):
            where += [("kwarg", name)] * len(jax.tree_util.tree_leaves(kwargs[name]))
        return where

    def donated(self, call: CallDef) -> tuple[list[bool], list[bool]]:
        """For each plain leaf and each graph leaf whether it is donated."""
        return call.cache[self].flags

    def settle_groups(self, call: CallDef, plain: list[tp.Any], values: list[tp.Any]) -> Groups:
        """Find out what to donate in the calls of this kind.

        Raises ValueError where a buffer would be donated and used elsewhere.
        """
        if self.options.donate_written:
            flags = self.find_written(call, plain, values)
        else:
            flags = self.find_given(call)
        found = call.cache[self] = Groups(*flags)
        self.refuse_shared_buffers(call, found(plain, values))
        return found

    def find_given(self, call: CallDef) -> tuple[list[bool], list[bool]]:
        """For each plain leaf and each graph leaf whether its argument is to be donated."""
        donate = self.options.donate
        flags = [
            (key in donate.numbers) if kind == "arg" else (key in donate.names)
            for kind, key in self.where_in(call)
        ]
        roots = set(call.where)
        plain = [f for i, f in enumerate(flags) if i not in roots]
        return plain, [flags[call.where[root]] for root in call.leaf_roots()]

    def find_written(
        self, call: CallDef, plain: list[tp.Any], values: list[tp.Any]
    ) -> tuple[list[bool], list[bool]]:
        """Trace the function once to learn which Variables it writes; they will be donated."""

        def fun(tree: tp.Any) -> tp.Any:
            return self.result(call, *tree)

        updates = self.options.modes.updates
        body = trace_body(call, fun, lambda *leaves: leaves, (plain, values), structure=updates)
        written = set(body.definition.written)
        self.traced = (call, body)
        return [False] * len(plain), [i in written for i in range(len(values))]

    def take_traced(self, call: CallDef, plain: list[tp.Any], values: list[tp.Any]) -> Body | None:
        """The body traced by `find_written`, if it is for these arguments; it is used once."""
        traced, self.traced = self.traced, None
        if traced is None or traced[0] is not call or not traced[1].fits(plain, values):
            return None
        return traced[1]

    def clear_cache(self) -> None:
        """Forget every compiled program."""
        for jitted in (self.jitted, *self.by_call.values()):
            jitted.clear_cache()
        for known in (self.by_call, self.leaving, self.shardings):
            known.clear()

    def _cache_size(self) -> int:
        return sum(jitted._cache_size() for jitted in (self.jitted, *self.by_call.values()))

    def groups(
        self, call: CallDef, plain: list[tp.Any], values: list[tp.Any]
    ) -> tuple[tp.Sequence[tp.Any], ...]:
        """Leaves in the groups in which they are handed to JAX.

        Raises ValueError where a buffer would be donated and used elsewhere in the first call of its
        kind; XLA refuses it in the others.
        """
        if not self.donates:
            return plain, values
        deal = call.cache.get(self) or self.settle_groups(call, plain, values)
        return deal(plain, values)

    def ungroup(
        self, call: CallDef, groups: tuple[tp.Sequence[tp.Any], ...]
    ) -> tuple[list[tp.Any], list[tp.Any]]:
        """The inverse of `groups`."""
        if not self.donates:
            return tp.cast(tp.Any, groups)
        plain_flags, value_flags = self.donated(call)
        kept_plain, kept_values, given_plain, given_values = map(iter, groups)
        return (
            [next(given_plain if d else kept_plain) for d in plain_flags],
            [next(given_values if d else kept_values) for d in value_flags],
        )

    def in_words(self, call: CallDef, message: str) -> str:
        """A message of JAX, with the user's arguments in place of the groups they travel in."""
        texts = self.groups(call, *leaf_texts(call))
        return re.sub(
            r"[Aa]rgument '?groups\[(\d+)\]\[(\d+)\]((?:\[[^\]]*\]|\.\w+)*)'?",
            lambda m: texts[int(m[1])][int(m[2])] + m[3],
            message,
        )

    def refuse_in_words(self, call: CallDef, error: Exception) -> None:
        """Raise ValueError where JAX refused an argument for its devices or its sharding."""
        if type(error) is ValueError and "rgument groups[" in str(error):
            raise ValueError(f"jit({self.name}): {self.in_words(call, str(error))}") from error

    def refuse_shared_buffers(self, call: CallDef, groups: tuple[tp.Sequence[tp.Any], ...]) -> None:
        """Raise ValueError where one buffer would be donated twice, or donated and read."""
        kept_plain, kept_values, given_plain, given_values = groups
        given = [*given_plain, *given_values]
        seen = set(map(id, given))
        if (
            len(seen) == len(given)
            and seen.isdisjoint(map(id, kept_values))
            and seen.isdisjoint(map(id, kept_plain))
        ):
            return
        seen = {id(x) for x in given if isinstance(x, jax.Array)}
        plain, values = self.ungroup(call, groups)
        names: dict[int, list[str]] = {}
        for leaves, flags, texts in zip((plain, values), self.donated(call), leaf_texts(call)):
            for x, donated, text in zip(leaves, flags, texts):
                found = names.setdefault(id(x), [])
                found.insert(0 if donated else len(found), text)
        twice = next((f for key, f in names.items() if key in seen and len(f) > 1), None)
        if twice is None:  # Python scalars may well be the same object
            return
        raise ValueError(
            f"jit({self.name}): the same array buffer is donated at {twice[0]} and used at "
            f"{twice[1]}. A donated buffer can be used once: copy the array in one of the two "
            "places, share one Variable between them, or do not donate."
        )


def _run(core: Core, call: CallDef, *groups: tp.Any) -> tp.Any:
    """What JAX traces: rebuild, run, take apart."""
    plain, values = core.ungroup(call, groups)
    body = core.take_traced(call, plain, values)
    if body is not None:
        out = body(plain, values)
    else:
        (args, kwargs), inner = enter(call, plain, list(values))
        result = core.result(call, args, kwargs)
        kept: tp.Collection[int] = ()
        if core.donates:
            kept = {i for i, d in enumerate(core.donated(call)[1]) if d}
        updates = core.options.modes.updates
        out = leave(inner, result, all_written=kept, structure=updates)
        refuse_foreign_result(out, core.name)
    return out.crossing()


def _settled(value: tp.Any, sharding: tp.Any) -> tp.Any:
    if sharding is None or getattr(value, "committed", not isinstance(value, np.ndarray)):
        return value
    return jax.device_put(value, sharding)


_cores: PerFunction[Core] = PerFunction()


class JitWrapped(Transformed, tp.Generic[P, R]):
    """A compiled function, as `jit` returns it.

    Attributes:
        fun: the function that was given to `jit`.
        jitted_fn: the `jax.jit` object under it, which takes leaves (where shardings are given there
            are several, and this is what they have in common); `jitted_fn._cache_size()` tells how many
            programs were compiled. What wraps a compiled function with `functools.wraps` has it, too.
    """

    options: JitOptions
    partial_args: tuple[tp.Any, ...] = ()

    def __init__(self, fun: tp.Callable[P, R], options: JitOptions) -> None:
        super().__init__(fun, options)
        self.fun = fun
        self._fun, self._args, self._kwargs = self.bound
        key = (options, replaced_functions())
        self._core = _cores.get(self._fun, key, functools.partial(Core, self._fun, options))
        self._static = options.static
        self._graph = options.modes.graph
        self._last_key: CallKey | None = None
        self._site = Site()
        self.jitted_fn: tp.Any = self._core if self._core.placed else self._core.jitted

    def _enter(self, args: tp.Any, kwargs: tp.Any) -> tuple[Inputs, CallDef]:
        bound = len(self._args)
        if bound or self._kwargs:
            args, kwargs = (*self._args, *args), {**self._kwargs, **kwargs}
        statics: tuple[tuple[int | str, StaticArgument], ...] = ()
        if self._static.any:
            args, kwargs, statics = self._take_statics(args, kwargs, bound)
        inputs = self._site.inputs(args, kwargs)
        if not self._graph:
            inputs.in_mode(False, "jit")
        context, key = context_key(), self._last_key
        if statics or key is None or key.context is not context:
            key = CallKey(context, statics, bound)
            if not statics:
                self._last_key = key
        return inputs, inputs.define(key)

    def _take_statics(self, args: tp.Any, kwargs: tp.Any, bound: int) -> tp.Any:
        statics: list[tuple[int | str, StaticArgument]] = []
        kept = []
        numbers = {n + bound if n >= 0 else n + len(args) for n in self._static.numbers}
        for number, arg in enumerate(args):
            if number in numbers:
                statics.append((number, static_argument(arg, number - bound, self._fun)))
            else:
                kept.append(arg)
        dynamic = {}
        for name, arg in kwargs.items():
            if name in self._static.names:
                statics.append((name, static_argument(arg, name, self._fun)))
            else:
                dynamic[name] = arg
        return tuple(kept), dynamic, tuple(statics)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        inputs, call = self._enter(args, kwargs)
        core = self._core
        moved = core.settle(call, inputs) if core.sharded else {}
        try:
            if core.donates:
                groups = core.groups(call, inputs.plain, inputs.values)
                jitted = core.compiled_for(call, groups) if core.placed else core.jitted
                try:
                    out = jitted(call, *groups)
                except (ValueError, RuntimeError):  # which one depends on JAX's own path
                    core.refuse_shared_buffers(call, groups)
                    raise
            elif core.placed:
                out = core.placed_call(call, (inputs.plain, inputs.values))
            else:
                out = core.jitted(call, inputs.plain, inputs.values)
        except ValueError as error:
            core.refuse_in_words(call, error)
            raise
        except TypeError:
            remedy = "Make it static (static_argnums, static_argnames) if it is no number."
            refuse_non_arrays(repr(self), call, inputs.plain, inputs.values, remedy)
            raise
        write_leaves(inputs, moved)
        return replay_crossing(inputs, out)

    # ahead of time -----------------------------------------------------------------------------

    def _staged(self, method: str, args: tp.Any, kwargs: tp.Any) -> tuple[CallDef, tp.Any]:
        inputs, call = self._enter(args, kwargs)
        groups = self._core.groups(call, inputs.plain, inputs.values)
        return call, getattr(self._core.compiled_for(call, groups), method)(call, *groups)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered[R]:
        """Lower the function for these arguments, without running it."""
        call, lowered = self._staged("lower", args, kwargs)
        return Lowered(self, call, lowered)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced[R]:
        """Trace the function for these arguments, without lowering it."""
        call, traced = self._staged("trace", args, kwargs)
        return Traced(self, call, traced)

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> tp.Any:
        """The result with `jax.ShapeDtypeStruct`s for arrays; nothing is computed or written."""
        inputs, call = self._enter(args, kwargs)
        groups = self._core.groups(call, inputs.plain, inputs.values)
        crossing = self._core.compiled_for(call, groups).eval_shape(call, *groups)
        tree, _ = enter(call, inputs.plain, list(inputs.values))
        out = replay_crossing(Inputs(tree), crossing)
        place_abstract(out)
        return out

    def donation(self, *args: P.args, **kwargs: P.kwargs) -> Donation:
        """What `donate="written"` reuses in a call with these arguments; nothing runs.

        Raises ValueError for a function without `donate="written"`.
        """
        if not self._core.options.donate_written:
            raise ValueError(f"{self!r} does not donate what it writes: pass donate='written'.")
        inputs, call = self._enter(args, kwargs)
        self._core.groups(call, inputs.plain, inputs.values)
        chosen = [i for i, d in enumerate(self._core.donated(call)[1]) if d]
        roots, paths = call.leaf_roots(), call.leaf_paths()
        names = tuple(argument_path(call, roots[i], paths[i]) for i in chosen)
        leaves = jax.tree_util.tree_leaves([inputs.values[i] for i in chosen])
        return Donation(names, sum(getattr(x, "nbytes", 0) for x in leaves))

    def clear_cache(self) -> None:
        """Forget every compiled program of this function."""
        self._core.clear_cache()

    def _cache_size(self) -> int:
        return self._core._cache_size()


@tp.overload
def jit(
    fun: tp.Callable[P, R],
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
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> JitWrapped[P, R]: ...
@tp.overload
def jit(
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
    graph: bool | None = None,
    graph_updates: bool | None = None,
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
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """Compile a function whose arguments may hold modules, Variables and states.

    Inside, the arguments are fresh objects of the same structure and sharing; what the function
    writes (values of Variables, attributes, new objects) appears on the caller's own objects after
    the call. A failed call changes nothing.

    Args:
        fun: the function, bound method, or callable object; without it `jit` returns a decorator.
        in_shardings: one sharding for each argument, or a prefix; `StateSharding` for objects.
        out_shardings: the same for the result.
        static_argnums, static_argnames: arguments that are part of the program; hashable.
        donate_argnums, donate_argnames: arguments whose buffers may be reused for the outputs.
        keep_unused, device, backend, inline: as in `jax.jit`.
        donate: "written" donates the buffers of exactly the Variables that the function writes.
        graph: False refuses shared references.
        graph_updates: False propagates values of Variables only, not structure.

    Raises:
        ValueError: for an unhashable static argument, or a buffer donated twice.
        TypeError: where an argument holds something that is no array.
        TraceContextError: where an object to be written belongs to another trace level.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> @nnx.jit
    ... def double(model):
    ...     model.kernel *= 2
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> before = model.kernel.value
    >>> double(model)
    >>> bool((model.kernel.value == 2 * before).all())
    True
    """
    graph, graph_updates = Modes.of(graph, graph_updates)
    if fun is MISSING:
        return functools.partial(
            jit,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            keep_unused=keep_unused,
            device=device,
            backend=backend,
            inline=inline,
            donate=donate,
            graph=graph,
            graph_updates=graph_updates,
        )
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
        static=select_arguments(fun, static_argnums, static_argnames, "static"),
        donate=select_arguments(fun, donate_argnums, donate_argnames, "donate"),
        donate_written=donate == "written",
        in_shardings=by_path(in_shardings),
        out_shardings=by_path(out_shardings),
        modes=Modes(graph, graph_updates),
        jax_options=tuple(sorted(jax_options.items())),
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
