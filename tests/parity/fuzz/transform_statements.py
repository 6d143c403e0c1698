"""Statements about transforms: functions with random bodies, and what is done with them."""

from __future__ import annotations

import typing as tp

import jax
import numpy as np

from tests.parity.fuzz.graph_statements import STATEMENTS, mode, statement
from tests.parity.fuzz.scope import SHAPES, Place, Scope, indent

MAX_DEPTH = 3


# Functions ------------------------------------------------------------------------------------------


def fill(s: Scope, count: int) -> None:
    """Add some statements to a body."""
    kinds = [k for k in STATEMENTS if k.body and not (s.values_only and k.structural)]
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
        models = [p for p in objects if s.is_object(p.value)]
        if models:
            options.append(f"nnx.state({s.one(models).text})")
    return s.one(options)


class Function:
    """A function with a random body, and the text that defines it."""

    def __init__(
        self,
        s: Scope,
        params: list[str],
        values: list[tp.Any],
        result: tp.Callable[[Scope], str] = any_result,
        head: str = "",
        values_only: bool = False,
        frozen: tp.Sequence[str] = (),
        size: tuple[int, int] = (1, 4),
        name: str | None = None,
        before: list[str] | None = None,
    ):
        captures = []
        if s.chance(0.2):
            plain = [n for n in s.roots if n not in params]
            plain = [n for n in plain if isinstance(s.env[n], (s.lib.Pytree, jax.Array))]
            captures = s.some(plain, 0, 1)
        inner = s.child(params, values, captures)
        inner.values_only = values_only
        for p in frozen:
            inner.freeze(inner.env[p])
        if before:
            for text in before:
                inner.attempt(text)
        fill(inner, s.rng.randint(*size))
        self.name = name or s.fresh("f")
        self.inner = inner
        self.returns = result(inner)
        lines = [f"TICKS.append({self.name!r})", *inner.lines, f"return {self.returns}"]
        self.text = f"{head}def {self.name}({', '.join(params)}):\n{indent(lines)}"


def modes(s: Scope, updates: float = 0.3) -> tuple[str, bool]:
    """Keywords `graph=` and `graph_updates=`, and whether structure is propagated."""
    text, updating = mode(s, 0.2), True
    if s.chance(updates):
        setting = s.one(["False", "False", "True", "None"])
        text += f", graph_updates={setting}"
        updating = setting != "False"
    if "graph=False" in text:
        updating = False
    return text, updating


def tidy(options: str) -> str:
    """Keywords as the only arguments of a call."""
    return options.removeprefix(", ")


def arguments(
    s: Scope, low: int = 1, high: int = 2, arrays: bool = True
) -> list[tuple[str, tp.Any]]:
    """Texts and values of arguments: models, Variables, containers, arrays, States."""
    found: list[tuple[str, tp.Any]] = []
    for _ in range(s.rng.randint(low, high)):
        r = s.rng.random()
        text: str | None
        if arrays and (r < 0.3 or not s.models()):
            text = s.array(s.one(SHAPES)) if s.chance(0.4) else literal_name(s)
        elif r < 0.37 and s.states():
            text = s.one(s.states())
        else:
            text = s.node()
        if text is None:
            continue
        try:
            found.append((text, s.evaluate(text)))
        except Exception:
            continue
    return found


def literal_name(s: Scope) -> str:
    """The name of an array, or a number."""
    names = s.named(lambda x: isinstance(x, jax.Array))
    return s.one(names) if names and s.chance(0.8) else s.one(["2.0", "3", "jnp.ones(2)"])


def called(s: Scope, name: str, texts: list[str], again: float = 0.4) -> list[str]:
    """A call of a function, sometimes repeated."""
    call = f"{name}({', '.join(texts)})"
    lines = [f"{s.fresh('r')} = {call}"]
    if not s.depth and s.chance(again):
        lines.append(f"{s.fresh('r')} = {call}")
    return lines


def wrapped(s: Scope, name: str, transform: str, options: str) -> tuple[str, list[str]]:
    """A decorator for the head of a definition, or an assignment that follows it."""
    options = tidy(options)
    if s.chance(0.5):
        return (f"@nnx.{transform}({options})\n" if options else f"@nnx.{transform}\n"), []
    more = f", {options}" if options else ""
    return "", [f"{name} = nnx.{transform}({name}{more})"]


# jit and its kin -----------------------------------------------------------------------------------


@statement(3.0, body=True)
def t_jit(s: Scope) -> list[str] | None:
    args = arguments(s, 1, 3)
    if not args:
        return None
    options, updating = modes(s)
    transform = s.one(["jit"] * 6 + ["remat", "remat", "checkify"])
    texts = [t for t, _ in args]
    params = [s.fresh("a") for _ in args]
    name = s.fresh("f")
    if transform == "jit" and s.chance(0.15):
        options += s.one([", inline=True", ", keep_unused=True", ", static_argnames=('k',)"])
    head, after = wrapped(s, name, transform, options)
    f = Function(
        s,
        params,
        [v for _, v in args],
        head=head,
        values_only=not updating and s.chance(0.85),
        name=name,
    )
    text = f.text
    if "static_argnames" in options:
        text = text.replace(
            f"def {name}({', '.join(params)}):", f"def {name}({', '.join(params)}, k=1):"
        )
        texts.append(f"k={s.rng.randint(0, 2)}")
    elif s.chance(0.1):
        texts[-1] = f"{params[-1]}={texts[-1]}"
    return [text, *after, *called(s, name, texts, 0.5)]


@statement(0.8)
def t_partial(s: Scope) -> list[str] | None:
    first = s.node(variables=0, containers=0.1)
    if first is None:
        return None
    values = [s.evaluate(first)]
    rest = arguments(s, 0, 1)
    kind = s.one(["cached_partial", "cached_partial", "jit_partial"])
    params = [s.fresh("a") for _ in range(1 + len(rest))]
    updating = kind == "cached_partial"
    f = Function(
        s,
        params,
        values + [v for _, v in rest],
        head="@nnx.jit\n" if kind == "cached_partial" else "",
        values_only=not updating or s.chance(0.5),
    )
    options = (
        "" if updating else s.one([", graph_updates=False", ", graph=False, graph_updates=False"])
    )
    name = s.fresh("f")
    line = f"{name} = nnx.{kind}({f.name}, {first}{options})"
    calls = called(s, name, [t for t, _ in rest], 0.8)
    return [f.text, line, *calls, f"del {name}"]


@statement(0.7)
def t_eval_shape(s: Scope) -> list[str] | None:
    args = arguments(s, 1, 2)
    if not args:
        return None
    options, updating = modes(s)
    f = Function(s, [s.fresh("a") for _ in args], [v for _, v in args], values_only=not updating)
    return [
        f.text,
        f"{s.fresh('u')} = nnx.eval_shape({', '.join([f.name, *[t for t, _ in args]])}{options})",
    ]


# Derivatives ---------------------------------------------------------------------------------------


def differentiable(s: Scope) -> list[Place]:
    """Arrays, Variables and objects of which all leaves are floating point, mostly."""
    found = []
    for p in s.places():
        if isinstance(p.value, (s.lib.Pytree, s.lib.Variable, jax.Array)):
            leaves = leaf_arrays(s, p.value)
            if leaves and (s.chance(0.02) or all(str(x.dtype) == "float32" for x in leaves)):
                found.append(p)
    return found


def leaf_arrays(s: Scope, value: tp.Any) -> list[tp.Any]:
    """The arrays of a value, Variables unwrapped."""
    s.env["_value"] = value
    places = s.places(["_value"])
    del s.env["_value"]
    found = []
    for p in places:
        x = p.value.get_raw_value() if isinstance(p.value, s.lib.Variable) else p.value
        if hasattr(x, "dtype") or isinstance(p.value, s.lib.Variable):
            found.append(x if hasattr(x, "dtype") else np.asarray(x))
    return found


def with_params(s: Scope) -> list[Place]:
    """Objects with floating Params."""
    found = []
    for p in s.places():
        if s.is_object(p.value):
            s.env["_value"] = p.value
            inner = [q.value for q in s.places(["_value"]) if isinstance(q.value, s.lib.Param)]
            del s.env["_value"]
            good = [v for v in inner if str(getattr(v.get_raw_value(), "dtype", "")) == "float32"]
            if good and (len(good) == len(inner) or s.chance(0.02)):
                found.append(p)
    return found


@statement(2.0, body=True)
def t_grad(s: Scope) -> list[str] | None:
    places = with_params(s) or differentiable(s)
    if not places:
        return None
    transform = s.one(["grad", "grad", "value_and_grad"])
    options, updating = modes(s)
    if updating or s.chance(0.1):
        chosen = [s.one(places) for _ in range(s.rng.choice([1, 1, 1, 2]))]
    else:
        places = differentiable(s)
        if not places:
            return None
        chosen = [s.one(places) for _ in range(s.rng.choice([1, 1, 2]))]
    texts, values = [p.text for p in chosen], [p.value for p in chosen]
    if s.chance(0.12):  # in a plain container
        texts[0], values[0] = (f"[{texts[0]}, {s.one(places).text}]", None)
        values[0] = s.evaluate(texts[0])
    if s.chance(0.4):
        more = arguments(s, 1, 1)
        texts, values = texts + [t for t, _ in more], values + [v for _, v in more]
    argnums = s.one(
        ["", "", ", argnums=0", ", argnums=(0,)", f", argnums={tuple(range(len(chosen)))}"]
    )
    if updating and s.chance(0.25):
        kind = s.one(
            ["nnx.Param", "nnx.Param", "nnx.PathContains('a')", "nnx.Any(nnx.Param, 'a')", "Scale"]
        )
        argnums = f", argnums=nnx.DiffState(0, {kind})"
    aux = s.chance(0.3)
    if aux:
        options += ", has_aux=True"
    result = (lambda i: f"({i.scalar(3)}, {any_result(i)})") if aux else (lambda i: i.scalar(3))
    name = s.fresh("f")
    head, after = wrapped(s, name, transform, options + argnums)
    params = [s.fresh("a") for _ in texts]
    f = Function(
        s, params, values, result, head, values_only=not updating or s.chance(0.6), name=name
    )
    return [f.text, *after, *called(s, name, texts, 0.3)]


@statement(0.7, body=True)
def t_vjp(s: Scope) -> list[str] | None:
    places = differentiable(s)
    if not places:
        return None
    chosen = [s.one(places) for _ in range(s.rng.randint(1, 2))]
    texts = [p.text for p in chosen]
    options = s.one(
        [", graph_updates=False", ", graph_updates=False", ", graph=False, graph_updates=False"]
    )
    params = [s.fresh("a") for _ in texts]
    shape = s.one([(), (2,)])
    result = lambda i: (
        i.array(shape) if s.chance(0.5) else i.scalar(3) if shape == () else i.array(shape)
    )
    f = Function(s, params, [p.value for p in chosen], result, values_only=True)
    if s.chance(0.5):
        y, pull = s.fresh("y"), s.fresh("f")
        lines = [
            f"{y}, {pull} = nnx.vjp({f.name}, {', '.join(texts)}{options})",
            f"{s.fresh('r')} = {pull}(jnp.ones_like({y}))",
            f"del {pull}",
        ]
    else:
        tangents = ", ".join(f"jax.tree.map(jnp.ones_like, {t})" for t in texts)
        lines = [
            f"{s.fresh('r')} = nnx.jvp({f.name}, ({', '.join(texts)},), ({tangents},){options})"
        ]
    return [f.text, *lines]


@statement(0.5)
def t_custom_vjp(s: Scope) -> list[str] | None:
    """A rule that gives three times the cotangent, or a gradient of ones."""
    places = differentiable(s)
    places = [p for p in places if s.is_object(p.value)] or places
    if not places:
        return None
    place = s.one(places)
    is_object = isinstance(place.value, (s.lib.Pytree, s.lib.Variable))
    options, updating = modes(s, 0.5)
    name = s.fresh("f")
    a, x = s.fresh("a"), s.fresh("a")
    f = Function(
        s, [a, x], [place.value, s.evaluate("jnp.float32(2.0)")], lambda i: i.scalar(2),
        head=f"@nnx.custom_vjp({tidy(options)})\n", values_only=True, name=name,
    )  # fmt: skip
    ones = f"jax.tree.map(jnp.ones_like, {'inputs_g[0]' if updating and is_object else 'res[0]'})"
    unpack = "inputs_g, g = g\n    " if updating else ""
    rules = (
        f"def {name}_fwd(a, x):\n    return {name}(a, x), (a, x)\n"
        f"def {name}_bwd(res, g):\n    {unpack}return {ones}, 3.0 * g\n"
        f"{name}.defvjp({name}_fwd, {name}_bwd)"
    )
    lines = [f.text, rules]
    if s.chance(0.4):
        lines.append(f"{s.fresh('r')} = {name}({place.text}, jnp.float32(2.0))")
    argnums = s.one(["0", "1", "(0, 1)"])
    lines.append(
        f"{s.fresh('r')} = nnx.grad({name}, argnums={argnums}{options})({place.text}, jnp.float32(2.0))"
    )
    return lines


# Mapped transforms ------------------------------------------------------------------------------------


def axes_of(
    s: Scope, value: tp.Any, carry: bool = False
) -> tuple[str, tp.Callable[[tuple, tp.Any], tp.Any]] | None:
    """The text of axes for a value, and which leaf has which axis."""
    lib = s.lib
    s.env["_value"] = value
    leaves = [
        p
        for p in s.places(["_value"])
        if isinstance(p.value, (lib.Variable, jax.Array, np.ndarray))
    ]
    del s.env["_value"]

    def sliced(p: Place) -> bool:
        x = p.value.get_raw_value() if isinstance(p.value, lib.Variable) else p.value
        return bool(getattr(x, "ndim", 0)) and x.shape[0] == 2

    if leaves and all(map(sliced, leaves)) and s.chance(0.75):
        return "0", lambda path, x: 0
    if s.is_object(value) and leaves and s.chance(0.7):
        kinds = [
            k
            for k in ("Param", "BatchStat", "Variable")
            if any(isinstance(p.value, getattr(lib, k)) for p in leaves)
        ]
        s.rng.shuffle(kinds)
        for kind in kinds:
            mine = [p for p in leaves if isinstance(p.value, getattr(lib, kind))]
            if all(map(sliced, mine)):
                rest = "nnx.Carry" if carry and s.chance(0.3) else "None"
                rules = f"{{nnx.{kind}: 0, ...: {rest}}}"
                cls = getattr(lib, kind)
                return rules, lambda path, x, cls=cls: 0 if isinstance(x, cls) else None
    return "None", lambda path, x: None


def slice_copy(s: Scope, value: tp.Any, axis: tp.Callable[[tuple, tp.Any], tp.Any]) -> tp.Any:
    """A copy of a value of which the mapped leaves are one slice."""
    lib = s.lib
    if isinstance(value, (jax.Array, np.ndarray)):
        return value[0] if axis((), value) == 0 else value

    def one_slice(path: tuple, x: tp.Any) -> tp.Any:
        if isinstance(x, lib.Variable):
            return x.replace(x.get_raw_value()[0]) if axis(path, x) == 0 else x
        return x[0] if isinstance(x, (jax.Array, np.ndarray)) and axis(path, x) == 0 else x

    return lib.map(one_slice, value)


def mapped_arguments(
    s: Scope, carry: bool = False
) -> tuple[list[str], list[tp.Any], list[str], list[bool]] | None:
    """Texts, sliced values, axes, and which of them must only be read."""
    texts, values, axes, frozen = [], [], [], []
    for text, value in arguments(s, 1, 2):
        if isinstance(value, (int, float)):
            continue
        found = axes_of(s, value, carry)
        if found is None:
            continue
        prefix, axis = found
        if prefix.startswith("{"):
            prefix = s.one(
                [f"nnx.StateAxes({prefix})"] * 3 + [f"nnx.prefix({text}, {prefix}, graph=False)"]
            )
            if "Carry" in prefix and "prefix(" in prefix:
                prefix = "None"
        try:
            sliced = slice_copy(s, value, axis)
        except Exception:
            continue
        texts.append(text), values.append(sliced), axes.append(prefix)
        frozen.append(prefix != "0" and s.chance(0.9))
    if not texts or all(a == "None" for a in axes):
        x = s.named(
            lambda v: isinstance(v, jax.Array) and v.ndim > 0 and v.shape[0] == 2 and v.size < 40
        )
        name = s.one(x) if x else "jnp.arange(2.0)"
        (
            texts.append(name),
            values.append(s.evaluate(name)[0]),
            axes.append("0"),
            frozen.append(False),
        )
    return texts, values, axes, frozen


@statement(2.0, body=True)
def t_vmap(s: Scope) -> list[str] | None:
    found = mapped_arguments(s)
    if found is None:
        return None
    texts, values, axes, frozen = found
    options, updating = modes(s)
    if any("StateAxes" in a for a in axes) and s.chance(0.9):
        options, updating = "", True
    if any("prefix(" in a for a in axes) and s.chance(0.9):
        options, updating = ", graph=False", False
    transform = "pmap" if not s.depth and s.chance(0.08) else "vmap"
    in_axes = f", in_axes=({', '.join(axes)},)"
    if len(texts) == 1 and s.chance(0.3):
        in_axes = f", in_axes={axes[0]}" if axes[0] == "0" or "nnx" not in axes[0] else in_axes
    out = s.one(["", "", "", ", out_axes=0", ", out_axes=(0, 0)"])
    result = mapped_result
    if out == ", out_axes=(0, 0)":
        result = lambda i: f"({i.array((2,))}, {i.scalar()})"
    name = s.fresh("f")
    head, after = wrapped(s, name, transform, in_axes + out + options)
    params = [s.fresh("a") for _ in texts]
    f = Function(
        s, params, values, result, head, values_only=not updating or s.chance(0.7), name=name,
        frozen=[p for p, no in zip(params, frozen) if no],
    )  # fmt: skip
    return [f.text, *after, *called(s, name, texts, 0.3)]


def mapped_result(s: Scope) -> str:
    """What a mapped function may return."""
    options = [
        s.scalar(),
        s.array((2,)),
        s.array((2, 2)),
        f"{{'k': {s.scalar()}, 'n': [{s.array((2,))}]}}",
    ]
    options += [f"nnx.Param({s.array((2,))})", f"Box(a=nnx.Param({s.scalar()}), n=3)"]
    if s.chance(0.1):
        options = [any_result(s)]
    return s.one(options)


@statement(1.6, body=True)
def t_scan(s: Scope) -> list[str] | None:
    found = mapped_arguments(s, carry=True)
    if found is None:
        return None
    texts, values, axes, frozen = found
    options, _ = modes(s)
    if any("StateAxes" in a for a in axes) and s.chance(0.9):
        options = ""
    if any("prefix(" in a for a in axes) and s.chance(0.9):
        options = ", graph=False"
    shape = s.one([(), (2,)])
    carry_text = f"jnp.zeros({shape})"
    carried = None
    if s.models() and s.chance(0.3):
        carry_text = s.one(s.models())
        carried = s.evaluate(carry_text)
    name = s.fresh("f")
    c = s.fresh("a")
    params = [c, *[s.fresh("a") for _ in texts]]
    outs = s.one(["both", "both", "carry"])
    in_axes = f", in_axes=(nnx.Carry, {', '.join(axes)})"
    out_axes = ", out_axes=(nnx.Carry, 0)" if outs == "both" else ", out_axes=nnx.Carry"
    extra = s.one(["", "", "", ", reverse=True", ", unroll=2", ", length=2"])

    def result(i: Scope) -> str:
        kept = c if carried is not None else i.array(shape)
        return f"{kept}, {mapped_result(i)}" if outs == "both" else kept

    head, after = wrapped(s, name, "scan", in_axes + out_axes + extra + options)
    value = carried if carried is not None else s.evaluate(carry_text)
    f = Function(
        s, params, [value, *values], result, head, values_only=s.chance(0.9), name=name,
        frozen=[p for p, no in zip(params[1:], frozen) if no],
    )  # fmt: skip
    return [f.text, *after, *called(s, name, [carry_text, *texts], 0.3)]


# Control flow -------------------------------------------------------------------------------------------


@statement(1.4, body=True)
def t_cond(s: Scope) -> list[str] | None:
    args = arguments(s, 1, 2)
    if not args:
        return None
    options, _ = modes(s)
    texts, values = [t for t, _ in args], [v for _, v in args]
    shape = s.one([(), (2,)])
    count = s.one([2, 2, 2, 3])
    whole = s.chance(0.2) and isinstance(values[0], (s.lib.Pytree, s.lib.Variable))
    functions = []
    for _ in range(count):
        params = [s.fresh("a") for _ in args]
        result = (lambda p: lambda i: p[0])(params) if whole else (lambda i: i.array(shape))
        functions.append(Function(s, params, values, result, values_only=s.chance(0.95)))
    names = [f.name for f in functions]
    operands = ", ".join(texts)
    if count == 2 and s.chance(0.8):
        pred = s.one(["True", "False", "jnp.array(True)", f"{s.scalar(1)} > 0.5"])
        call = f"nnx.cond({pred}, {names[0]}, {names[1]}, {operands}{options})"
    else:
        index = s.one(["0", "1", "jnp.array(1)", "jnp.array(5)"])
        call = f"nnx.switch({index}, [{', '.join(names)}], {operands}{options})"
    return [*[f.text for f in functions], f"{s.fresh('r')} = {call}"]


@statement(1.0, body=True)
def t_loop(s: Scope) -> list[str] | None:
    args = arguments(s, 1, 2)
    args = [(t, v) for t, v in args if not isinstance(v, (int, float))]
    if not args:
        return None
    options, _ = modes(s)
    texts, values = [t for t, _ in args], [v for _, v in args]
    inner = [s.fresh("a") for _ in args]
    i, c = s.fresh("i"), s.fresh("c")
    results = lambda k: ", ".join(
        k.array(v.shape) if isinstance(v, jax.Array) and str(v.dtype) == "float32" else p
        for p, v in zip(inner, values)
    )
    unpack = f"{', '.join(inner)}, = {c}"
    if s.chance(0.5):
        body = Function(
            s, [i, c], [s.evaluate("jnp.array(0)"), tuple(values)],
            lambda k: f"({results(k)},)", before=[unpack], values_only=s.chance(0.95),
        )  # fmt: skip
        more = s.one(["", "", ", unroll=2"])
        call = f"nnx.fori_loop(0, 2, {body.name}, ({', '.join(texts)},){options}{more})"
        return [body.text, f"{s.fresh('r')} = {call}"]
    body = Function(
        s, [c], [(s.evaluate("jnp.array(0)"), *values)],
        lambda k: f"({i} + 1, {results(k)})", before=[f"{i}, {unpack}"], values_only=s.chance(0.95),
    )  # fmt: skip
    test = f"lambda c: c[0] < {s.rng.randint(0, 3)}"
    call = f"nnx.while_loop({test}, {body.name}, (jnp.array(0), {', '.join(texts)}){options})"
    return [body.text, f"{s.fresh('r')} = {call}"]


# Bodies that raise ----------------------------------------------------------------------------------------


@statement(0.6)
def t_failing(s: Scope) -> list[str] | None:
    """A body that raises in the middle: the objects outside are as they were."""
    args = arguments(s, 1, 2, arrays=False)
    if not args:
        return None
    params = [s.fresh("a") for _ in args]
    transform = s.one(["jit", "remat", "grad", "eval_shape"])
    f = Function(s, params, [v for _, v in args], lambda i: "{}['missing']", size=(2, 4))
    texts = ", ".join(t for t, _ in args)
    call = (
        f"nnx.eval_shape({f.name}, {texts})"
        if transform == "eval_shape"
        else f"nnx.{transform}({f.name})({texts})"
    )
    return [f.text, f"{s.fresh('r')} = fails(lambda: {call})[0]"]


@statement(0.5)
def t_captured_write(s: Scope) -> list[str] | None:
    """A body that writes a Variable from outside."""
    leaves = [p for p in s.places(s.models()) if isinstance(p.value, s.lib.Variable)]
    leaves = [p for p in leaves if str(getattr(p.value.get_raw_value(), "dtype", "")) == "float32"]
    leaves = [p for p in leaves if isinstance(p.value.get_raw_value(), jax.Array)]
    if not leaves:
        return None
    t = s.one(leaves).text
    transform = s.one(["jit", "remat", "grad", "vmap"])
    arg = "jnp.ones(2)" if transform == "vmap" else "1.0"
    name = s.fresh("f")
    text = f"def {name}(x):\n    {t}[...] = {t} * x\n    return x * 2.0"
    options = s.one(["", "", ", graph_updates=False"])
    return [text, f"{s.fresh('r')} = fails(lambda: nnx.{transform}({name}{options})({arg}))"]


# Other forms ----------------------------------------------------------------------------------------------


@statement(0.7, body=True)
def t_methods(s: Scope) -> list[str] | None:
    """Methods, bound and not, partial functions, and transforms of transforms."""
    names = [p for p in s.places() if type(p.value).__name__ == "Affine"]
    names = [p for p in names if getattr(getattr(p.value, "w", None), "shape", None) == (2,)]
    names = [p for p in names if id(p.value) not in s.frozen and not s.values_only]
    if not names:
        return None
    t, x = s.one(names).text, s.array((2,))
    form = s.one(
        [
            "nnx.jit(Affine.__call__)({t}, {x})",
            "nnx.remat(Affine.__call__)({t}, {x})",
            "nnx.jit(functools.partial(Affine.__call__, x={x}))({t})",
            "nnx.jit(lambda m, x: m(x))(x={x}, m={t})",
            "nnx.grad(lambda m, x: m(x).sum())({t}, {x})",
            "nnx.jit(nnx.grad(lambda m, x: nnx.jit(Affine.__call__)(m, x).sum()))({t}, {x})",
            "nnx.jit(nnx.vmap(lambda m, x: m.w[...].sum() * x, in_axes=(None, 0)))({t}, {x})",
            "nnx.vmap(nnx.grad(lambda m, x: m.w[...].sum() * x), in_axes=(None, 0))({t}, {x})",
            "nnx.value_and_grad(nnx.remat(lambda m, x: (m(x) ** 2).sum()))({t}, {x})",
            "nnx.grad(lambda m, x: nnx.grad(lambda m: (m(x) ** 2).sum())(m)['w'][...].sum())({t}, {x})",
            "nnx.jit(nnx.scan(lambda c, m, x: (c + m.w[...].sum() * x, c), in_axes=(nnx.Carry, None, 0)))(0.0, {t}, {x})",
        ]
    )
    return [f"{s.fresh('r')} = {form.format(t=t, x=x)}"]


@statement(0.6)
def t_modes_of_a_block(s: Scope) -> list[str] | None:
    """`set_graph_mode` and `set_graph_updates` as contexts."""
    args = arguments(s, 1, 2)
    if not args:
        return None
    setting = s.one(
        ["nnx.set_graph_mode(False)", "nnx.set_graph_updates(False)", "nnx.set_graph_mode(True)"]
    )
    f = Function(s, [s.fresh("a") for _ in args], [v for _, v in args], values_only=True)
    texts = ", ".join(t for t, _ in args)
    call = s.one(
        [
            "nnx.jit({f})({x})",
            "nnx.remat({f})({x})",
            "nnx.split({y})",
            "nnx.clone({y})",
            "nnx.state({y})",
        ]
    )
    call = call.format(f=f.name, x=texts, y=args[0][0])
    if not isinstance(args[0][1], s.lib.Pytree) and "{f}" not in call and "jit" not in call:
        call = f"nnx.jit({f.name})({texts})"
    return [f.text, f"with {setting}:\n    {s.fresh('r')} = {call}"]


@statement(0.5)
def t_state_axes(s: Scope) -> list[str] | None:
    """Axes as nested States, for a State and for its object."""
    models = [n for n in s.models() if type(s.env[n]).__name__ == "Box"]
    if not models:
        return None
    m = s.one(models)
    axes = []
    for key, value in s.lib.state(s.env[m]).raw_mapping.items():
        leaves = leaf_arrays(s, value)
        sliced = all(x.ndim and x.shape[0] == 2 for x in leaves)
        axes.append(f"{key!r}: {'0' if sliced and s.chance(0.8) else 'None'}")
    if not any(": 0" in a for a in axes):
        return None
    prefix = f"nnx.State({{{', '.join(axes)}}})"
    read = "[x.sum() for x in jax.tree.leaves({})]"
    if s.chance(0.6):
        f = f"lambda t: {read.format('t')}"
        return [f"{s.fresh('r')} = nnx.vmap({f}, in_axes=({prefix},))(nnx.state({m}))"]
    f = f"lambda m: {read.format('nnx.state(m)')}"
    return [f"{s.fresh('r')} = nnx.vmap({f}, in_axes=(nnx.StateAxes({prefix}),))({m})"]


@statement(0.4)
def t_donated(s: Scope) -> list[str] | None:
    """Donated arguments."""
    models = s.models()
    if not models:
        return None
    name, m = s.fresh("f"), s.fresh("m")
    f = Function(
        s,
        ["a"],
        [s.env[models[0]]],
        head="@nnx.jit(donate_argnums=0)\n",
        values_only=True,
        name=name,
    )
    return [f"{m} = nnx.clone({models[0]}, arrays=True)", f.text, *called(s, name, [m], 0.5)]
