"""Statements about transforms: functions with random bodies, and what is done with them."""

from __future__ import annotations

import typing as tp

import jax
import numpy as np

from tests.parity.fuzz.grammar import HOLES, KINDS, expand, statement, table
from tests.parity.fuzz.graph_statements import mode
from tests.parity.fuzz.scope import SHAPES, Scope, indent

MAX_DEPTH = 3
Args: tp.TypeAlias = "list[tuple[str, tp.Any]]"
"""Texts and values of arguments."""

# Functions ------------------------------------------------------------------------------------------


def fill(s: Scope, count: int) -> None:
    """Add some statements to a body."""
    kinds = [k for k in KINDS if k.body and not (s.values_only and k.structural)]
    if s.depth >= MAX_DEPTH:
        kinds = [k for k in kinds if not k.name.startswith("t_")]
    weights = [k.weight * (0.35 if k.name.startswith("t_") else 1) for k in kinds]
    for _ in range(count):
        made = s.rng.choices(kinds, weights)[0].make(s)
        for text in [made] if isinstance(made, str) else made or []:
            if not s.attempt(text):
                break


def any_result(s: Scope) -> str:
    """What a function may return where anything goes."""
    objects = [p for p in s.places() if isinstance(p.value, (s.lib.Pytree, s.lib.Variable))]
    options = [s.scalar(), s.array(s.one(SHAPES)), f"({s.array((2,))}, {{'k': {s.scalar()}}})"]
    options += ["None", s.array((2,))]
    options += [f"nnx.Param({s.array((2,))})", f"Box(a=nnx.Param({s.array((2,))}), n=3)"]
    if objects and s.chance(0.5):
        options = [s.one(objects).text, f"[{s.one(objects).text}, {s.scalar()}]"]
        options += [f"Box(inner={s.one(objects).text}, b=nnx.Param({s.array(())}))"]
        options += [f"nnx.state({p.text})" for p in objects if s.is_object(p.value)][:1]
    return s.one(options)


class Function:
    """A function with a random body, and the text that defines it."""

    def __init__(
        self,
        s: Scope,
        values: tp.Sequence[tp.Any],
        result: tp.Callable[[Scope], str] = any_result,
        *,
        params: list[str] | None = None,
        head: str = "",
        name: str | None = None,
        values_only: bool = False,
        frozen: tp.Sequence[bool] = (),
        size: tuple[int, int] = (1, 4),
        before: str = "",
    ):
        self.params = params = params or [s.fresh("a") for _ in values]
        captures = []
        if s.chance(0.2):
            others = [n for n in s.roots if n not in params]
            captures = s.some(
                [n for n in others if isinstance(s.env[n], (s.lib.Pytree, jax.Array))], 0, 1
            )
        inner = s.child(params, list(values), captures)
        inner.values_only = values_only
        for param, is_frozen in zip(params, frozen):
            if is_frozen:
                inner.freeze(inner.env[param])
        if before:
            inner.attempt(before)
        fill(inner, s.rng.randint(*size))
        self.name = name or s.fresh("f")
        lines = [f"TICKS.append({self.name!r})", *inner.lines, f"return {result(inner)}"]
        self.text = f"{head}def {self.name}({', '.join(params)}):\n{indent(lines)}"


def modes(s: Scope, updates: float = 0.3) -> tuple[str, bool]:
    """Keywords `graph=` and `graph_updates=`, and whether structure is propagated."""
    text = mode(s, 0.2)
    if s.chance(updates):
        text += f", graph_updates={s.one(['False', 'False', 'True', 'None'])}"
    return text, "graph=False" not in text and "graph_updates=False" not in text


def arguments(s: Scope, low: int = 1, high: int = 2, arrays: bool = True) -> Args:
    """Models, Variables, containers, arrays, States."""
    found: Args = []
    for _ in range(s.rng.randint(low, high)):
        r = s.rng.random()
        text: str | None
        if arrays and (r < 0.3 or not s.models()):
            text = s.array(s.one(SHAPES)) if s.chance(0.4) else array_or_number(s)
        elif r < 0.37 and s.states():
            text = s.one(s.states())
        else:
            text = s.node()
        if text is not None:
            try:
                found.append((text, s.evaluate(text)))
            except Exception:
                continue
    return found


def array_or_number(s: Scope) -> str:
    names = s.named(lambda x: isinstance(x, jax.Array))
    return s.one(names) if names and s.chance(0.8) else s.one(["2.0", "3", "jnp.ones(2)"])


def called(s: Scope, name: str, texts: tp.Sequence[str], again: float = 0.4) -> list[str]:
    """A call of a function, sometimes repeated."""
    call = f"{name}({', '.join(texts)})"
    times = 2 if not s.depth and s.chance(again) else 1
    return [f"{s.fresh('r')} = {call}" for _ in range(times)]


def wrapped(s: Scope, name: str, transform: str, options: str) -> tuple[str, list[str]]:
    """A decorator for the head of a definition, or an assignment that follows it."""
    if s.chance(0.5):
        options = options.removeprefix(", ")
        return (f"@nnx.{transform}({options})\n" if options else f"@nnx.{transform}\n"), []
    return "", [f"{name} = nnx.{transform}({name}{options})"]


def transformed(
    s: Scope, transform: str, args: Args, options: str = "", again: float = 0.3, **how: tp.Any
) -> list[str]:
    """A function, its transform, and a call or two."""
    name = s.fresh("f")
    head, after = wrapped(s, name, transform, options)
    f = Function(s, [v for _, v in args], head=head, name=name, **how)
    return [f.text, *after, *called(s, name, [t for t, _ in args], again)]


def texts_of(args: Args) -> str:
    return ", ".join(text for text, _ in args)


# jit and its kin -----------------------------------------------------------------------------------


@statement(3.0, body=True)
def t_jit(s: Scope) -> list[str] | None:
    args = arguments(s, 1, 3)
    if not args:
        return None
    options, updating = modes(s)
    transform = s.one(["jit"] * 6 + ["remat", "remat", "checkify"])
    if transform == "jit" and s.chance(0.1):
        options += s.one([", inline=True", ", keep_unused=True"])
    values_only = not updating and s.chance(0.85)
    return transformed(s, transform, args, options, 0.5, values_only=values_only)


@statement(0.3, body=True)
def t_jit_keywords(s: Scope) -> list[str] | None:
    args = arguments(s, 1, 2)
    if not args:
        return None
    f = Function(s, [v for _, v in args])
    head, more, k = f"def {f.name}({', '.join(f.params)}", "", f"k={s.rng.randint(0, 2)}"
    if s.chance(0.6):
        more = "(static_argnames=('k',))"
        text = f.text.replace(head, f"{head}, k=1")
        return [f"@nnx.jit{more}\n{text}", *called(s, f.name, [texts_of(args), k], 0.5)]
    texts = [t for t, _ in args]
    texts[-1] = f"{f.params[-1]}={texts[-1]}"
    return [f"@nnx.jit\n{f.text}", *called(s, f.name, texts, 0.5)]


@statement(0.8)
def t_partial(s: Scope) -> list[str] | None:
    first = s.node(variables=0, containers=0.1)
    if first is None:
        return None
    rest, name = arguments(s, 0, 1), s.fresh("f")
    values = [s.evaluate(first), *[v for _, v in rest]]
    if s.chance(0.67):
        f = Function(s, values, head="@nnx.jit\n", values_only=s.chance(0.5))
        line = f"{name} = nnx.cached_partial({f.name}, {first})"
    else:
        f = Function(s, values, values_only=True)
        tree = s.one(["", ", graph=False"])
        line = f"{name} = nnx.jit_partial({f.name}, {first}{tree}, graph_updates=False)"
    return [f.text, line, *called(s, name, [t for t, _ in rest], 0.8), f"del {name}"]


@statement(0.7)
def t_eval_shape(s: Scope) -> list[str] | None:
    args = arguments(s, 1, 2)
    if not args:
        return None
    options, updating = modes(s)
    f = Function(s, [v for _, v in args], values_only=not updating)
    return [f.text, f"{s.fresh('u')} = nnx.eval_shape({f.name}, {texts_of(args)}{options})"]


@statement(0.4)
def t_donated(s: Scope) -> list[str] | None:
    if not s.models():
        return None
    m, first = s.fresh("m"), s.models()[0]
    f = Function(s, [s.env[first]], head="@nnx.jit(donate_argnums=0)\n", values_only=True)
    return [f"{m} = nnx.clone({first}, arrays=True)", f.text, *called(s, f.name, [m], 0.5)]


# Derivatives ---------------------------------------------------------------------------------------


def leaf_arrays(s: Scope, value: tp.Any) -> list[tp.Any]:
    """The arrays of a value, Variables unwrapped."""
    found = []
    for p in s.below(value):
        x = p.value.get_raw_value() if isinstance(p.value, s.lib.Variable) else p.value
        if hasattr(x, "dtype") or isinstance(p.value, s.lib.Variable):
            found.append(x if hasattr(x, "dtype") else np.asarray(x))
    return found


def is_float(x: tp.Any) -> bool:
    return str(getattr(x, "dtype", "")) == "float32"


def differentiable(s: Scope) -> Args:
    """Arrays, Variables and objects of which all leaves are floating point, mostly."""
    found = []
    for p in s.places():
        if isinstance(p.value, (s.lib.Pytree, s.lib.Variable, jax.Array)):
            leaves = leaf_arrays(s, p.value)
            if leaves and (s.chance(0.02) or all(map(is_float, leaves))):
                found.append((p.text, p.value))
    return found


def with_params(s: Scope) -> Args:
    """Objects with floating Params."""
    found = []
    for p in filter(lambda p: s.is_object(p.value), s.places()):
        inner = [q.value for q in s.below(p.value) if isinstance(q.value, s.lib.Param)]
        good = [v for v in inner if is_float(v.get_raw_value())]
        if good and (len(good) == len(inner) or s.chance(0.02)):
            found.append((p.text, p.value))
    return found


@statement(2.0, body=True)
def t_grad(s: Scope) -> list[str] | None:
    options, updating = modes(s)
    places = differentiable(s) if not updating and s.chance(0.9) else with_params(s)
    if not places:
        return None
    args = [s.one(places) for _ in range(s.one([1, 1, 1, 2]))]
    argnums = s.one(["", "", ", argnums=0", ", argnums=(0,)", f", argnums={(*range(len(args)),)}"])
    if s.chance(0.12):  # in a plain container
        text = f"[{args[0][0]}, {s.one(places)[0]}]"
        args[0] = (text, s.evaluate(text))
    if s.chance(0.4):
        args += arguments(s, 1, 1)
    if updating and s.chance(0.25):
        kinds = ["nnx.Param", "nnx.Param", "nnx.PathContains('a')", "nnx.Any(nnx.Param, 'a')"]
        argnums = f", argnums=nnx.DiffState(0, {s.one([*kinds, 'Scale'])})"
    result = lambda i: i.scalar(3)
    if s.chance(0.3):
        options += ", has_aux=True"
        result = lambda i: f"({i.scalar(3)}, {any_result(i)})"
    values_only = not updating or s.chance(0.6)
    transform = s.one(["grad", "grad", "value_and_grad"])
    how = {"result": result, "values_only": values_only}
    return transformed(s, transform, args, options + argnums, **how)


@statement(0.7, body=True)
def t_vjp(s: Scope) -> list[str] | None:
    places = differentiable(s)
    if not places:
        return None
    args = [s.one(places) for _ in range(s.rng.randint(1, 2))]
    options = s.one(["", "", ", graph=False"]) + ", graph_updates=False"
    result = s.one([lambda i: i.array((2,)), lambda i: i.array(()), lambda i: i.scalar(3)])
    f = Function(s, [v for _, v in args], result, values_only=True)
    if s.chance(0.5):
        tangents = ", ".join(f"jax.tree.map(jnp.ones_like, {t})" for t, _ in args)
        call = f"nnx.jvp({f.name}, ({texts_of(args)},), ({tangents},){options})"
        return [f.text, f"{s.fresh('r')} = {call}"]
    y, pull = s.fresh("y"), s.fresh("f")
    return [
        f.text,
        f"{y}, {pull} = nnx.vjp({f.name}, {texts_of(args)}{options})",
        f"{s.fresh('r')} = {pull}(jnp.ones_like({y}))",
        f"del {pull}",
    ]


@statement(0.5)
def t_custom_vjp(s: Scope) -> list[str] | None:
    """A rule that gives three times the cotangent, or a gradient of ones."""
    places = differentiable(s)
    places = [p for p in places if s.is_object(p[1])] or places
    if not places:
        return None
    text, value = s.one(places)
    is_object = isinstance(value, (s.lib.Pytree, s.lib.Variable))
    options, updating = modes(s, 0.5)
    head = f"@nnx.custom_vjp({options.removeprefix(', ')})\n"
    values, result = [value, s.evaluate("jnp.float32(2.0)")], lambda i: i.scalar(2)
    f = Function(s, values, result, head=head, values_only=True)
    name = f.name
    ones = f"jax.tree.map(jnp.ones_like, {'inputs_g[0]' if updating and is_object else 'res[0]'})"
    unpack = "inputs_g, g = g\n    " if updating else ""
    rules = (
        f"def {name}_fwd(a, x):\n    return {name}(a, x), (a, x)\n"
        f"def {name}_bwd(res, g):\n    {unpack}return {ones}, 3.0 * g\n"
        f"{name}.defvjp({name}_fwd, {name}_bwd)"
    )
    call, argnums = f"({text}, jnp.float32(2.0))", s.one(["0", "1", "(0, 1)"])
    direct = [f"{s.fresh('r')} = {name}{call}"] if s.chance(0.4) else []
    grad = f"{s.fresh('r')} = nnx.grad({name}, argnums={argnums}{options}){call}"
    return [f.text, rules, *direct, grad]


# Mapped transforms ------------------------------------------------------------------------------------

Axis: tp.TypeAlias = tp.Callable[[tp.Any], "int | None"]


def axes_of(s: Scope, value: tp.Any, carry: bool = False) -> tuple[str, Axis]:
    """The text of axes for a value, and which leaf has which axis."""
    lib = s.lib
    kinds = (lib.Variable, jax.Array, np.ndarray)
    leaves = [p.value for p in s.below(value) if isinstance(p.value, kinds)]

    def sliced(x: tp.Any) -> bool:
        x = x.get_raw_value() if isinstance(x, lib.Variable) else x
        return bool(getattr(x, "ndim", 0)) and x.shape[0] == 2

    if leaves and all(map(sliced, leaves)) and s.chance(0.75):
        return "0", lambda x: 0
    if s.is_object(value) and leaves and s.chance(0.7):
        for kind in s.some(["Param", "BatchStat", "Variable"], 3, 3):
            cls = getattr(lib, kind)
            mine = [x for x in leaves if isinstance(x, cls)]
            if mine and all(map(sliced, mine)):
                rest = "nnx.Carry" if carry and s.chance(0.3) else "None"
                rules = f"{{nnx.{kind}: 0, ...: {rest}}}"
                return rules, lambda x, cls=cls: 0 if isinstance(x, cls) else None
    return "None", lambda x: None


def slice_copy(s: Scope, value: tp.Any, axis: Axis) -> tp.Any:
    """A copy of a value of which the mapped leaves are one slice."""

    def one_slice(x: tp.Any) -> tp.Any:
        if isinstance(x, s.lib.Variable):
            return x.replace(x.get_raw_value()[0]) if axis(x) == 0 else x
        return x[0] if isinstance(x, (jax.Array, np.ndarray)) and axis(x) == 0 else x

    if isinstance(value, (jax.Array, np.ndarray)):
        return one_slice(value)
    return s.lib.map(lambda path, x: one_slice(x), value)


class Mapped(tp.NamedTuple):
    """Arguments with sliced values, their axes, and which of them must only be read."""

    args: Args
    axes: list[str]
    frozen: list[bool]

    def modes(self, s: Scope) -> tuple[str, bool]:
        """Keywords that suit the axes, mostly."""
        if any("StateAxes" in a for a in self.axes) and s.chance(0.9):
            return "", True
        if any("prefix(" in a for a in self.axes) and s.chance(0.9):
            return ", graph=False", False
        return modes(s)


def mapped_arguments(s: Scope, carry: bool = False) -> Mapped:
    found = Mapped([], [], [])

    def add(text: str, value: tp.Any, axes: str, frozen: bool) -> None:
        found.args.append((text, value)), found.axes.append(axes), found.frozen.append(frozen)

    for text, value in arguments(s, 1, 2):
        if isinstance(value, (int, float)):
            continue
        rules, axis = axes_of(s, value, carry)
        prefix = rules
        if rules.startswith("{"):
            prefix = f"nnx.StateAxes({rules})"
            if "Carry" not in rules and s.chance(0.25):
                prefix = f"nnx.prefix({text}, {rules}, graph=False)"
        try:
            add(text, slice_copy(s, value, axis), prefix, prefix != "0" and s.chance(0.9))
        except Exception:
            continue
    if all(a == "None" for a in found.axes):
        two = lambda v: isinstance(v, jax.Array) and v.ndim and v.shape[0] == 2 and v.size < 40
        name = s.one(s.named(two) or ["jnp.arange(2.0)"])
        add(name, s.evaluate(name)[0], "0", False)
    return found


@statement(2.0, body=True)
def t_vmap(s: Scope) -> list[str] | None:
    found = mapped_arguments(s)
    options, updating = found.modes(s)
    transform = "pmap" if not s.depth and s.chance(0.08) else "vmap"
    in_axes = f", in_axes=({', '.join(found.axes)},)"
    if found.axes == ["0"] and s.chance(0.3):
        in_axes = ", in_axes=0"
    out = s.one(["", "", "", ", out_axes=0", ", out_axes=(0, 0)"])
    result = mapped_result
    if out == ", out_axes=(0, 0)":
        result = lambda i: f"({i.array((2,))}, {i.scalar()})"
    return transformed(
        s, transform, found.args, in_axes + out + options, result=result, frozen=found.frozen,
        values_only=not updating or s.chance(0.7),
    )  # fmt: skip


def mapped_result(s: Scope) -> str:
    """What a mapped function may return."""
    if s.chance(0.1):
        return any_result(s)
    pair, scalar = s.array((2,)), s.scalar()
    parts = [scalar, pair, s.array((2, 2)), f"{{'k': {scalar}, 'n': [{pair}]}}"]
    return s.one([*parts, f"nnx.Param({pair})", f"Box(a=nnx.Param({scalar}), n=3)"])


@statement(1.6, body=True)
def t_scan(s: Scope) -> list[str] | None:
    found = mapped_arguments(s, carry=True)
    options, _ = found.modes(s)
    shape = s.one([(), (2,)])
    carry = s.one(s.models()) if s.models() and s.chance(0.3) else None
    first = carry or f"jnp.zeros({shape})"
    both = s.chance(0.67)
    axes = f", in_axes=(nnx.Carry, {', '.join(found.axes)}), out_axes="
    axes += "(nnx.Carry, 0)" if both else "nnx.Carry"
    extra = s.one(["", "", "", ", reverse=True", ", unroll=2", ", length=2"])
    params = [s.fresh("a") for _ in range(1 + len(found.args))]

    def result(i: Scope) -> str:
        kept = params[0] if carry else i.array(shape)
        return f"{kept}, {mapped_result(i)}" if both else kept

    return transformed(
        s, "scan", [(first, s.evaluate(first)), *found.args], axes + extra + options,
        params=params, result=result, frozen=[False, *found.frozen], values_only=s.chance(0.9),
    )  # fmt: skip


@statement(0.5)
def t_state_axes(s: Scope) -> list[str] | None:
    """Axes as nested States, for a State and for its object."""
    models = [n for n in s.models() if type(s.env[n]).__name__ == "Box"]
    if not models:
        return None
    m, axes = s.one(models), []
    for key, value in s.lib.state(s.env[m]).raw_mapping.items():
        sliced = all(x.ndim and x.shape[0] == 2 for x in leaf_arrays(s, value))
        axes.append(f"{key!r}: {'0' if sliced and s.chance(0.8) else 'None'}")
    if not any(": 0" in a for a in axes):
        return None
    prefix, read = f"nnx.State({{{', '.join(axes)}}})", "[x.sum() for x in jax.tree.leaves({})]"
    if s.chance(0.6):
        f = f"lambda t: {read.format('t')}"
        return [f"{s.fresh('r')} = nnx.vmap({f}, in_axes=({prefix},))(nnx.state({m}))"]
    f = f"lambda m: {read.format('nnx.state(m)')}"
    return [f"{s.fresh('r')} = nnx.vmap({f}, in_axes=(nnx.StateAxes({prefix}),))({m})"]


# Control flow -------------------------------------------------------------------------------------------


@statement(1.4, body=True)
def t_cond(s: Scope) -> list[str] | None:
    args = arguments(s, 1, 2)
    if not args:
        return None
    options, shape, count = modes(s)[0], s.one([(), (2,)]), s.one([2, 2, 2, 3])
    whole = s.chance(0.2) and isinstance(args[0][1], (s.lib.Pytree, s.lib.Variable))
    functions = []
    for _ in range(count):
        params = [s.fresh("a") for _ in args]
        result = (lambda p: lambda i: p[0])(params) if whole else (lambda i: i.array(shape))
        how = {"params": params, "values_only": s.chance(0.95)}
        functions.append(Function(s, [v for _, v in args], result, **how))
    names = ", ".join(f.name for f in functions)
    if count == 2 and s.chance(0.8):
        pred = s.one(["True", "False", "jnp.array(True)", f"{s.scalar(1)} > 0.5"])
        call = f"nnx.cond({pred}, {names}, {texts_of(args)}{options})"
    else:
        index = s.one(["0", "1", "jnp.array(1)", "jnp.array(5)"])
        call = f"nnx.switch({index}, [{names}], {texts_of(args)}{options})"
    return [*[f.text for f in functions], f"{s.fresh('r')} = {call}"]


@statement(1.0, body=True)
def t_loop(s: Scope) -> list[str] | None:
    args = [(t, v) for t, v in arguments(s, 1, 2) if not isinstance(v, (int, float))]
    if not args:
        return None
    options, values = modes(s)[0], [v for _, v in args]
    inner, i, c = [s.fresh("a") for _ in args], s.fresh("i"), s.fresh("c")
    carried = lambda k: ", ".join(
        k.array(v.shape) if isinstance(v, jax.Array) and is_float(v) else p
        for p, v in zip(inner, values)
    )
    zero, unpack = s.evaluate("jnp.array(0)"), f"{', '.join(inner)}, = {c}"
    how = {"values_only": s.chance(0.95)}
    if s.chance(0.5):
        body = Function(
            s, [zero, tuple(values)], lambda k: f"({carried(k)},)",
            params=[i, c], before=unpack, **how,
        )  # fmt: skip
        more = s.one(["", "", ", unroll=2"])
        call = f"nnx.fori_loop(0, 2, {body.name}, ({texts_of(args)},){options}{more})"
    else:
        body = Function(
            s, [(zero, *values)], lambda k: f"({i} + 1, {carried(k)})",
            params=[c], before=f"{i}, {unpack}", **how,
        )  # fmt: skip
        test = f"lambda c: c[0] < {s.rng.randint(0, 3)}"
        first = f"(jnp.array(0), {texts_of(args)})"
        call = f"nnx.while_loop({test}, {body.name}, {first}{options})"
    return [body.text, f"{s.fresh('r')} = {call}"]


# Other forms ----------------------------------------------------------------------------------------------


@statement(0.6)
def t_failing(s: Scope) -> list[str] | None:
    """A body that raises in the middle: the objects outside are as they were."""
    args = arguments(s, 1, 2, arrays=False)
    if not args:
        return None
    f = Function(s, [v for _, v in args], lambda i: "{}['missing']", size=(2, 4))
    form = s.one(["jit({})({})", "remat({})({})", "grad({})({})", "eval_shape({}, {})"])
    call = form.format(f.name, texts_of(args))
    return [f.text, f"{s.fresh('r')} = fails(lambda: nnx.{call})[0]"]


@statement(0.6)
def t_modes_of_a_block(s: Scope) -> list[str] | None:
    """`set_graph_mode` and `set_graph_updates` as contexts."""
    args = arguments(s, 1, 2)
    if not args:
        return None
    f = Function(s, [v for _, v in args], values_only=True)
    forms = ["nnx.jit({f})({x})", "nnx.remat({f})({x})"]
    if isinstance(args[0][1], s.lib.Pytree):
        forms += ["nnx.split({y})", "nnx.clone({y})", "nnx.state({y})"]
    call = s.one(forms).format(f=f.name, x=texts_of(args), y=args[0][0])
    setting = s.one(["graph_mode(False)", "graph_updates(False)", "graph_mode(True)"])
    return [f.text, f"with nnx.set_{setting}:\n    {s.fresh('r')} = {call}"]


@statement(0.7, body=True)
def t_methods(s: Scope) -> list[str] | None:
    """Methods, bound and not, partial functions, and transforms of transforms."""
    return None if s.values_only else expand(s, s.one(METHODS.strip().splitlines()).strip())


METHODS = """
    $r = <<nnx.jit|nnx.remat>>(Affine.__call__)($vector, $pair)
    $r = nnx.jit(functools.partial(Affine.__call__, x=$pair))($vector)
    $r = nnx.jit(lambda m, x: m(x))(x=$pair, m=$vector)
    $r = nnx.grad(lambda m, x: m(x).sum())($vector, $pair)
    $r = nnx.jit(nnx.grad(lambda m, x: nnx.jit(Affine.__call__)(m, x).sum()))($vector, $pair)
    $r = nnx.jit(nnx.vmap(lambda m, x: m.w[...].sum() * x, in_axes=(None, 0)))($vector, $pair)
    $r = nnx.vmap(nnx.grad(lambda m, x: m.w[...].sum() * x), in_axes=(None, 0))($vector, $pair)
    $r = nnx.value_and_grad(nnx.remat(lambda m, x: (m(x) ** 2).sum()))($vector, $pair)
    $r = nnx.grad(lambda m, x: nnx.grad(lambda m: (m(x) ** 2).sum())(m)['w'][...].sum())($vector, $pair)
    $r = nnx.jit(nnx.scan(lambda c, m, x: (c + m.w[...].sum() * x, c), in_axes=(nnx.Carry, None, 0)))(0.0, $vector, $pair)
"""


def vector(s: Scope) -> str | None:
    """An Affine of two elements that a body may write."""
    found = [p for p in s.places() if type(p.value).__name__ == "Affine"]
    found = [p for p in found if getattr(getattr(p.value, "w", None), "shape", None) == (2,)]
    found = [p.text for p in found if id(p.value) not in s.frozen]
    return s.one(found) if found else None


def float_variable(s: Scope) -> str | None:
    """A Variable with a floating-point array of JAX."""
    leaves = [p for p in s.places(s.models()) if isinstance(p.value, s.lib.Variable)]
    raw = [(p.text, p.value.get_raw_value()) for p in leaves]
    found = [t for t, x in raw if is_float(x) and isinstance(x, jax.Array)]
    return s.one(found) if found else None


HOLES.update(vector=vector, captured=float_variable)

table(r"""
t_order 1.0
    $r = nnx.scan(lambda c, x: (c * 0.5 + x, c), in_axes=(nnx.Carry, 0)<<|, reverse=True|, reverse=True, unroll=2|, length=3, unroll=3>>$modes)(1.0, jnp.arange(3.0))
    $r = nnx.scan(lambda m, x: m.w[...] * x, in_axes=(None, 0), out_axes=<<0|1|-1>><<|, reverse=True>>$modes)($vector, jnp.arange(3.0))
    $r = nnx.vmap(lambda m, x: m.w[...] * x, in_axes=(None, <<0|1|-1>>), out_axes=<<0|1|-1>>$modes)($vector, jnp.arange(6.0).reshape(<<3, 2|2, 3|2, 3>>))
    $r = nnx.fori_loop(1, 4, lambda i, c: c * 0.5 + i, 1.0$modes)
    $r = nnx.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, c[1] * 0.5 + c[0]), (1, 1.0)$modes)
    $r = nnx.<<grad|value_and_grad>>(lambda m, x, y: (m.w[...] * x * y ** 2).sum(), argnums=<<(0, 2)|(2, 1)|1|(1, 0)>>$modes)($vector, 2.0, 3.0)
    $r = nnx.cond($scalar > 0, lambda m: m.w * 2, lambda m: m.w - 1, $vector$modes)
t_captured_write 0.5
    def $f(x):\n    $captured[...] = $captured * x\n    return x * 2.0 ; $r = fails(lambda: nnx.<<jit|remat|grad>>($f<<||, graph_updates=False>>)(1.0))
    def $f(x):\n    $captured[...] = $captured * x\n    return x * 2.0 ; $r = fails(lambda: nnx.vmap($f<<||, graph_updates=False>>)(jnp.ones(2)))
""")
