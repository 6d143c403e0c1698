"""`cond`, `switch`, `remat` and `checkify`; how control flow and loops run the bodies that they traced.

Outside every transform JAX would compile a loop again in each call, as its bodies are new functions each
time.  Here the bodies are traced in each call, so that whatever they read is what it is now, and the
compiled program is found by the content of the traces: equations, parameters and types, compared down
into inner programs.  What a body captured is an operand of the program, not part of it.

Custom rules of derivatives do not count: the program runs outside every transform, so that nothing
differentiates it.  Where a trace contains something that cannot be compared, such as a callback, JAX
compiles in each call.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing as tp

import jax
import numpy as np
from jax.experimental import checkify as jax_checkify
from jax.tree_util import tree_leaves

from nnxlite._base.errors import Modes, path_text
from nnxlite._base.interning import Bounded
from nnxlite._base.jax import (
    EAGER,
    RULES,
    Literal,
    RematPolicy,
    as_integers,
    drop_hidden_frames,
    inner_consts,
    is_compiling,
    is_typed_literal,
    jaxpr_as_fun,
    opened,
    trace_state,
    without_literals,
    without_rules,
)
from nnxlite._base.statics import VALUE_TYPES
from nnxlite.boundary._body import Body, numbered, trace_body
from nnxlite.boundary._call_def import CallDef, Inner, describe, parameter_names
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._leave import (
    described,
    edits_text,
    leave,
    result_words,
    tree_difference,
    tree_text,
)
from nnxlite.boundary._out import Fixed, Outputs, output_paths, output_roots, replay
from nnxlite.graph._compare import compare, differences_text
from nnxlite.transforms._call import STATIC, Call, naming_arguments, positional, unwrapped_value
from nnxlite.transforms._checks import checks_noted, wait
from nnxlite.transforms._wrapper import (
    Options,
    P,
    R,
    Transform,
    both_forms,
    decorated,
    name_of,
    unbind,
)
from nnxlite.variables._definition import MISSING

__all__ = ["checkify", "cond", "remat", "switch"]

S = tp.TypeVar("S", bound=tp.Hashable)
Operands = tp.TypeVarTuple("Operands")

Run: tp.TypeAlias = tp.Callable[
    [S, list[tp.Callable[..., list[tp.Any]]], list[tp.Any]], list[tp.Any]
]
"""JAX's control flow between flat lists of arrays: from settings, bodies and inputs to outputs.

It must depend on nothing else: the settings and the content of the bodies are the key.
"""


def run_bodies(
    run: Run[S], settings: S, bodies: tp.Sequence[Body], inputs: list[tp.Any]
) -> list[tp.Any]:
    """Run traced bodies under JAX's control flow; outside every transform as one compiled program."""
    if trace_state.value is EAGER and is_compiling():
        program = _program(run, settings, bodies)
        if program is not None:
            return program([body.consts for body in bodies], inputs)
    return run(settings, [body.flat for body in bodies], inputs)


def run_flow(
    name: str, inputs: tp.Callable[[], Inputs], run: tp.Callable[[CallDef, list[tp.Any]], Outputs]
) -> tp.Any:
    """Run control flow on the caller's objects, and write back what it changed.

    Args:
        name: of the transform.
        inputs: gives the arguments.
        run: from the static side of the arguments and their leaves to what leaves.
    """
    try:
        given = inputs()
        call, checks = given.define(), checks_noted()
        remedy = "Pass an array, or let the function capture the value."
        with naming_arguments(name, call, given, remedy):
            out = run(call, given.leaves)
            if checks_noted() != checks:
                wait(out)
        return replay(given, out)
    except Exception as error:
        drop_hidden_frames(error)
        raise


# Key: the control flow, its settings, the content of its bodies; `jax.jit` adds types of operands and
# JAX's own settings. Nothing invalidates an entry: another content is another key. Bound: the last
# 256 stay. Threads: two may compile one program. It contains no constants, functions or objects
# of the user. Without it each eager loop compiles in each call: 100 times as long (bench `eager`).
_programs: Bounded[tp.Any, tp.Any] = Bounded(256)


def _program(run: Run[S], settings: S, bodies: tp.Sequence[Body]) -> tp.Any:
    """The compiled program of a control flow; None where the bodies cannot be compared."""
    try:
        key = (run, _content(settings), *[content(body.jaxpr) for body in bodies])
    except Incomparable:
        return None
    return _programs.get_or_make(key, lambda: _compiled(run, settings, bodies))


def _compiled(run: Run[S], settings: S, bodies: tp.Sequence[Body]) -> tp.Any:
    jaxprs = [without_rules(opened(body.jaxpr)) for body in bodies]

    def program(consts: list[list[tp.Any]], inputs: list[tp.Any]) -> list[tp.Any]:
        return run(settings, [*map(jaxpr_as_fun, jaxprs, consts)], inputs)

    program.__name__ = program.__qualname__ = run.__name__.strip("_")
    return jax.jit(program)


# Content ------------------------------------------------------------------------------------------


class Incomparable(Exception):
    """A program contains something that cannot be compared with that of another program."""


_MOST_BYTES = 1024
_ATOMS = (bool, int, str, bytes, types.NoneType, types.EllipsisType)


def content(jaxpr: tp.Any) -> tuple[tp.Any, ...]:
    """A key of a program: what it computes from its inputs and constants.

    Raises Incomparable.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    numbers: dict[tp.Any, int] = {}

    def read(atom: tp.Any) -> tp.Any:
        if type(atom) is Literal:
            return atom.aval, np.asarray(atom.val).tobytes()
        return numbers[atom]

    def define(variables: list[tp.Any]) -> tuple[tp.Any, ...]:
        for variable in variables:
            numbers[variable] = len(numbers)
        return tuple([variable.aval for variable in variables])

    inputs = define([*jaxpr.constvars, *jaxpr.invars])
    equations = [
        (
            eqn.primitive,
            eqn.ctx,
            tuple([read(atom) for atom in eqn.invars]),
            _parameters(eqn) if eqn.params else (),
            define(eqn.outvars),
        )
        for eqn in jaxpr.eqns
    ]
    return len(jaxpr.constvars), inputs, *equations, tuple([read(atom) for atom in jaxpr.outvars])


def _parameters(eqn: tp.Any) -> tuple[tp.Any, ...]:
    rules = RULES.get(eqn.primitive.name, ())
    return tuple([(name, _content(x)) for name, x in eqn.params.items() if name not in rules])


def _content(value: tp.Any) -> tp.Any:
    """A key of a parameter of an equation: equal for values that are interchangeable in a program."""
    kind: tp.Any = type(value)
    if kind in _ATOMS:
        return kind, value
    if isinstance(value, tuple | list):
        return kind, *map(_content, value)
    if kind is dict:
        return kind, *[(_content(k), _content(v)) for k, v in value.items()]
    if kind in (set, frozenset):
        return kind, frozenset(map(_content, value))
    if hasattr(value, "eqns"):
        return content(value), *map(_constant, inner_consts(value))
    if isinstance(value, float | complex):
        return kind, np.asarray(value).tobytes()
    if isinstance(value, np.ndarray | np.generic) or is_typed_literal(value):
        return kind, *_constant(value)
    if isinstance(value, (type, *VALUE_TYPES)):
        return value
    module = kind.__module__.partition(".")[0]
    if isinstance(value, types.FunctionType):
        if str(value.__module__).partition(".")[0] != "jax" or value.__closure__ is not None:
            raise Incomparable
        return value
    if module not in ("jax", "jaxlib") or isinstance(value, jax.tree_util.PyTreeDef | jax.Array):
        raise Incomparable
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
        return kind, *[_content(getattr(value, name)) for name in fields]
    if callable(value):
        raise Incomparable
    try:
        hash(value)
    except TypeError:
        raise Incomparable from None
    return kind, value


def _constant(value: tp.Any) -> tuple[tp.Any, ...]:
    """A key of an array among the constants of an inner program, which are part of the outer one."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        raise Incomparable
    if isinstance(value, jax.Array) and not isinstance(value.dtype, np.dtype):  # keys
        raise Incomparable
    array = np.asarray(value) if getattr(value, "nbytes", 0) <= _MOST_BYTES else None
    if array is None or array.dtype == object:
        raise Incomparable
    return jax.typeof(value), array.tobytes()


# cond and switch ------------------------------------------------------------------------------------


def _run_choice(
    name: str,
    chooser: str,
    value: tp.Any,
    branches: dict[str, tp.Callable[..., tp.Any]],
    operands: tuple[tp.Any, ...],
    modes: Modes,
) -> tp.Any:
    """Run one of the branches; the objects that bound methods and partials carry are operands as well.

    Args:
        name: `cond` or `switch`.
        chooser, value: the name of the argument that says which branch, and the argument.
        branches: by their names in messages.
        operands, modes: the other arguments.
    """
    unbound = {label: unbind(fun) for label, fun in branches.items()}

    def names(fun: tp.Any) -> tuple[str, ...]:
        """The names of the call's arguments: the chooser, then the parameters of a branch."""
        known, count = parameter_names(fun)[: len(operands)], len(operands)
        return chooser, *known, *[f"args[{number}]" for number in range(len(known), count)]

    def inputs() -> Inputs:
        carried = {label: (u.args, u.kwargs) for label, u in unbound.items() if u.args or u.kwargs}
        args = (unwrapped_value(value), *operands)
        first, *_ = unbound.values()
        return Inputs.of_call(args, carried, names(first.fun)).in_mode(modes.graph, name)

    def traced(call: CallDef, leaves: list[tp.Any], label: str, fun: tp.Any) -> Body:
        def run(inner: Inner, tree: tp.Any) -> tuple[Outputs, None]:
            (_, *operands), carried = tree
            args, kwargs = carried.get(label, ((), {}))
            result = fun(*args, *operands, **kwargs)
            more: dict[str, tp.Any] = {"structure": modes.updates, "captured": modes.updates}
            shown = f"{name}({name_of(fun)})"
            return leave(inner, result, name=shown, graph=modes.graph, foreign=False, **more), None

        return trace_body(call.renamed(names(fun)), run, leaves, user=fun)

    def run(call: CallDef, leaves: list[tp.Any]) -> Outputs:
        if not isinstance(call.template()[0][0], int) or 0 in call.where:
            kind = "a boolean" if name == "cond" else "an integer"
            raise TypeError(
                f"{name}: '{chooser}' must be {kind} scalar (or a Variable that holds "
                "one), got an object, None or a container."
            )
        bodies = [traced(call, leaves, label, u.fun) for label, u in unbound.items()]
        written = tuple(sorted({leaf for b in bodies for leaf in b.definition.written}))
        # A branch leaves as it is what it does not write: an output is one of the body's, or an input.
        before = call.by_side(leaves)[1]
        first, *others = [_completed(body.shapes, written, before) for body in bodies]
        shown, *more = [f"{label} ({name_of(u.fun)})" for label, u in unbound.items()]
        for label, out in zip(more, others):
            _check_equal(name, f"{shown} and {label}", call, (first, out))
        old = call.by_side(jax.tree_util.tree_map(lambda n: -1 - n, numbered(leaves)))[1]
        outputs = [_completed(body.numbers(), written, old) for body in bodies]
        settings = name, tuple([tuple(tree_leaves(out)) for out in outputs])
        flat = run_bodies(_choice, settings, bodies, tree_leaves(leaves))
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(outputs[0]), flat)

    return run_flow(name, inputs, run)


def _completed(out: Outputs, written: tuple[int, ...], before: list[tp.Any]) -> Outputs:
    """The outputs of a branch with all of these leaves, from what they were before."""
    new = dict(zip(out.definition.written, out.written))
    return out.with_written({leaf: new.get(leaf, before[leaf]) for leaf in written})


def _check_equal(name: str, names: str, call: CallDef, outputs: tuple[Outputs, Outputs]) -> None:
    """Raise TypeError where two branches do not leave the same structure and types.

    Args:
        name, names: of the transform, and of the two branches.
        call: the arguments.
        outputs: what leaves them; both write the same leaves.
    """
    if outputs[0].definition != outputs[1].definition:
        raise TypeError(
            f"{name} branch outputs must have the same structure, but {names} differ: "
            f"{_difference(call, outputs)}. Make every "
            "branch create, remove and return the same objects and attributes."
        )

    for number, (x, y) in enumerate(zip(*[out.values for out in outputs])):
        if described(x) != described(y):
            path = output_paths(call, outputs[0].definition)[number]
            raise TypeError(
                f"{name} branches must have equal output types, but {names} differ at "
                f"'{path_text(path)}': {described(x)} and {described(y)}. Convert one of the two, for "
                "example with .astype."
            )


def _difference(call: CallDef, outputs: tuple[Outputs, Outputs]) -> str:
    """How what two branches leave differs in structure."""
    first, second = (out.definition for out in outputs)
    trees, words = (first.treedef, second.treedef), [result_words(call, out) for out in outputs]
    if trees[0] != trees[1] and all(words):
        return f"the result of the second is {tree_difference(*trees, *words)}"
    texts = [*map(tree_text, trees, words)]
    if first.where != second.where or texts[0] != texts[1]:
        return f"the first returns {texts[0]}, the second {texts[1]}"
    edits = [edits_text(call, left) for left in (first, second)]
    if edits[0] != edits[1]:
        return f"the first changes {edits[0]}, the second {edits[1]}"
    differences = compare(first.graphdef, second.graphdef, output_roots(call, first))
    return f"from the first to the second, {differences_text(differences)}"


def _choice(
    settings: tuple[str, tuple[tuple[int, ...], ...]],
    funs: list[tp.Callable[..., list[tp.Any]]],
    inputs: list[tp.Any],
) -> list[tp.Any]:
    """Run one of the branches.

    The settings are the name of the transform, and for each branch and each output its position among
    those of the body, or -1 - position for an input that the branch leaves as it is.
    """
    (name, positions), (chooser, *rest) = settings, inputs

    def run(fun: tp.Any, outputs: tuple[int, ...], *rest: tp.Any) -> list[tp.Any]:
        given = chooser, *rest
        out = fun(*given)
        return [out[i] if i >= 0 else given[-1 - i] for i in outputs]

    branches = [functools.partial(run, *each) for each in zip(funs, positions)]
    if name == "cond":
        return jax.lax.cond(chooser, *branches, *rest)
    return jax.lax.switch(chooser, branches, *rest)


def cond(
    pred: tp.Any,
    true_fun: tp.Callable[[*Operands], R],
    false_fun: tp.Callable[[*Operands], R],
    *operands: *Operands,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> R:
    """Run one of two functions on the operands, as a scalar predicate says.

    What the chosen function writes to the operands stays written; both must leave the same structure.

    Args:
        pred: a boolean scalar, or a Variable with one.
        true_fun, false_fun: functions of the operands. Objects behind bound methods, callable
            objects and partials are operands as well.
        operands: arguments of the functions: objects, arrays, or pytrees of these.
        graph, graph_updates: see `jit`.

    Returns:
        The result of the function that ran.

    Raises:
        TypeError: where the branches return or leave different structures or types.

    >>> import nnxlite as nnx
    >>> counter = nnx.Dict(n=nnx.Variable(0))
    >>> def up(c): c.n.value += 1
    >>> def keep(c): pass
    >>> nnx.cond(True, up, keep, counter)
    >>> int(counter.n.value)
    1
    """
    modes = Modes.of(graph, graph_updates)
    branches = {"true_fun": true_fun, "false_fun": false_fun}
    return _run_choice("cond", "pred", pred, branches, operands, modes)


def switch(
    index: tp.Any,
    branches: tp.Sequence[tp.Callable[[*Operands], R]],
    *operands: *Operands,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> R:
    """Run the function of number `index` (clamped to the range) on the operands.

    Arguments and errors as for `cond`; ValueError without branches.

    Args:
        index: an integer scalar, or a Variable with one.
        branches: functions of the operands.
        operands, graph, graph_updates: as for `cond`.

    Returns:
        The result of the function that ran.

    Raises:
        ValueError: without branches.
        TypeError: as for `cond`.

    >>> import nnxlite as nnx
    >>> int(nnx.switch(1, [lambda x: x, lambda x: 2 * x], 5))
    10
    """
    by_name = {f"branch {number}": fun for number, fun in enumerate(branches)}
    if not by_name:
        raise ValueError("Empty branch sequence: switch needs at least one branch.")
    modes = Modes.of(graph, graph_updates)
    return _run_choice("switch", "index", index, by_name, operands, modes)


# remat and checkify --------------------------------------------------------------------------------


def run_remat(rematted: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    """Call a function under `remat`, or `filter_checkpoint`: there, what is not an array is static."""
    bound, options = rematted.bound, rematted.options
    if numbers := options.static_argnums:
        wanted = max(numbers) + 1
        args, kwargs = positional(bound.fun, args, kwargs, wanted, bound, True)
    updates = options.modes.updates
    call = Call(options, bound, args, kwargs, static_argnums=numbers, captured=updates)
    if options.is_array is not None:
        call.tracing(map(options.is_array, call.leaves))
    # A new function in each call: JAX's caches keep what they are keyed by, and with it all that
    # the user's function captured.
    run: tp.Any = describe(call.run_out, bound.fun, "remat")
    run = jax.checkpoint(run, prevent_cse=options.prevent_cse, policy=options.policy)
    with call.naming_arguments(STATIC):
        if trace_state.value is EAGER and is_compiling():
            closed, shapes = jax.make_jaxpr(run, return_shape=True)(call.leaves)
            body = Body(closed, (Fixed(None), shapes))
            out = body.outputs(run_bodies(_once, "remat", [body], tree_leaves(call.leaves)))
        else:
            out = without_literals(run(call.leaves))
        return call.put_back(out)


def _once(
    settings: str, funs: list[tp.Callable[..., list[tp.Any]]], inputs: list[tp.Any]
) -> list[tp.Any]:
    return funs[0](*inputs)


@both_forms
def remat(
    f: tp.Any = MISSING,
    *,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
    policy: RematPolicy | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """A function that keeps few intermediate values for its gradient, and computes the rest again.

    Its value, its gradient and its effects on the arguments are those of the function itself.

    Args:
        f: the function; without it the result is a decorator.
        prevent_cse: as in `jax.checkpoint`; False is safe, and faster, in the body of a `scan`.
        static_argnums: arguments that JAX never sees, such as flags.
        policy: which intermediate values to keep, one of `jax.checkpoint_policies`.
        graph: False refuses shared references.
        graph_updates: False propagates values and metadata of Variables, not structure.

    Returns:
        A function of the same arguments.

    Raises:
        ValueError: for a number in `static_argnums` that the call has no argument for.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> loss = lambda m, x: jnp.sin(m(x)).sum()
    >>> one = nnx.grad(loss)(model, jnp.ones((1, 2)))
    >>> two = nnx.grad(nnx.remat(loss))(model, jnp.ones((1, 2)))
    >>> bool((one["kernel"].value == two["kernel"].value).all())
    True
    """
    options = Options.of(
        "remat",
        Modes.of(graph, graph_updates),
        run_remat,
        static_argnums=as_integers(static_argnums),
        prevent_cse=prevent_cse,
        policy=policy,
    )
    return decorated(Transform, f, options)


def checkify(
    f: tp.Callable[P, R],
    errors: frozenset[tp.Any] = jax_checkify.user_checks,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Transform[P, tuple[jax_checkify.Error, R]]:
    """A function that returns `(error, result)`: what its `checkify.check`s found, and its result.

    What the function writes into its arguments is kept, whether a check failed or not.

    Args:
        f: the function.
        errors: which checks to make, as in `jax.experimental.checkify.checkify`.
        graph: False refuses shared references.
        graph_updates: False propagates values and metadata of Variables, not structure.

    Returns:
        A function of the same arguments, which returns `(error, result)`; `error.throw()` raises if
        a check failed.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> from jax.experimental import checkify
    >>> def positive(m):
    ...     checkify.check(m.x.value > 0, "x must be positive")
    ...     return m.x + 1
    >>> error, y = nnx.checkify(positive)(nnx.Dict(x=nnx.Param(jnp.float32(-1.0))))
    >>> float(y), "x must be positive" in error.get()
    (0.0, True)
    """
    modes = Modes.of(graph, graph_updates)
    return Transform(f, Options.of("checkify", modes, _checkify, errors=frozenset(errors)))


def _checkify(checked: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    options = checked.options
    call = Call(options, checked.bound, args, kwargs, captured=options.modes.updates)
    with call.naming_arguments():
        error, out = jax_checkify.checkify(call.run_out, options.errors)(call.leaves)
    return error, call.put_back(without_literals(out))
