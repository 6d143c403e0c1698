"""Statements about what is defined again: a function after what it reads has changed, and settings.

A function is made by one of `WAYS`, used in one of `USES`, made again by the same code after what it
reads was edited, and used again. Settings and metadata are edited in place after they were copied.
"""

from __future__ import annotations

import string

from tests.parity.fuzz.grammar import statement
from tests.parity.fuzz.scope import Scope

# How a function depends on something: what sets it to $v, and the function.
GLOBAL = "$d = $v"
CONTENT = "$d = {'gain': $v}", "$d['gain'] = $v"
ITEM = "$d = [$v]", "$d[0] = $v"
ARRAY = "$d = np.full(1, $v, np.float32)", "$d[0] = $v"
OBJECT = "$d = Settings($v)", "$d.gain = $v"
CLASS = "class $d:\n    gain = $v", "$d.gain = $v"
HELPER = "def ${f}h(x):\n    return x * $v"
WAYS = [
    (GLOBAL, GLOBAL, "def $f(x):\n    return x * $d"),
    (GLOBAL, GLOBAL, "$f = lambda x: jnp.sin(x) * $d"),
    (GLOBAL, GLOBAL, "$f = (lambda gain: lambda x: x * gain)($d)"),
    (GLOBAL, GLOBAL, "def $f(x, gain=$d):\n    return x * gain"),
    (GLOBAL, GLOBAL, "$f = functools.partial(scaled, gain=$d)"),
    (GLOBAL, GLOBAL, "$f = functools.partial(lambda x: x * $d)"),
    (GLOBAL, GLOBAL, "$f = functools.wraps(scaled)(lambda x: scaled(x, $d))"),
    (GLOBAL, GLOBAL, "$f = jax.jit(lambda x: x * $d)"),
    (GLOBAL, GLOBAL, "$f = nnx.jit(lambda x: x * $d)"),
    (GLOBAL, GLOBAL, "$f = Settings(0.0, lambda: $d).scale"),
    (HELPER, HELPER, "def $f(x):\n    return ${f}h(x)"),
    (HELPER, HELPER, "$f = (lambda inner: lambda x: inner(x))(${f}h)"),
    (HELPER, HELPER, "$f = functools.partial(lambda inner, x: inner(x), ${f}h)"),
    (*CONTENT, "def $f(x):\n    return x * $d['gain']"),
    (*CONTENT, "$f = (lambda table: lambda x: x * table['gain'])($d)"),
    (*CONTENT, "def $f(x, table=$d):\n    return x * table['gain']"),
    (*CONTENT, "$f = functools.partial(lambda table, x: x * table['gain'], $d)"),
    (*ITEM, "$f = (lambda row: lambda x: x * row[0])($d)"),
    (*ITEM, "def $f(x, *, row=$d):\n    return x * row[0]"),
    (*ARRAY, "$f = (lambda row: lambda x: x * row[0])($d)"),
    (*OBJECT, "$f = (lambda settings: lambda x: x * settings.gain)($d)"),
    (*OBJECT, "def $f(x):\n    return $d.scale(x)"),
    (*OBJECT, "$f = functools.partial(Settings.scale, $d)"),
    (*CLASS, "def $f(x):\n    return x * $d.gain"),
    ("$d = $v", "$d = $v", "def $f(x):\n    return x * $f.gain\n$f.gain = $d"),
]

# Where a function is used: what is defined once, and the call, in which it is static.
MODEL = "Box(a=nnx.Param(jnp.ones(2)), act=$f)"
STEP = (
    (
        "@nnx.jit\ndef ${f}s(m, o):\n    TICKS.append('${f}s')\n"
        "    o.update(m, nnx.grad(lambda m: m.a.sum())(m))\n    return m.a[...]"
    ),
    (
        "$m = Box(a=nnx.Param(jnp.ones(2)), b=nnx.Param(jnp.ones(2)))\n"
        "$r = ${f}s($m, nnx.Optimizer($m, $tx, wrt=nnx.Param))"
    ),
)
RUN = "@nnx.jit\ndef ${f}s(m, x):\n    TICKS.append('${f}s')\n    return $body"
USES = [
    (RUN.replace("$body", "m.act(m.a * x)"), f"$r = ${{f}}s({MODEL}, $x)"),
    (RUN.replace("$body", "m.act(m.a * x)"), "$m.act = $f\n$r = ${f}s($m, $x)"),
    (RUN.replace("$body", "m.h[0](m.a * x)"), f"$r = ${{f}}s({MODEL.replace('act=$f', 'h=($f,)')}, $x)"),
    (RUN.replace("$body", "m(x)"), "$r = ${f}s(nnx.Sequential($f, nnx.Linear(2, 2, rngs=nnx.Rngs(0))), $x)"),
    (RUN.replace("$body", "m.a * x"), "$r = ${f}s(Box(a=nnx.Param(jnp.ones(2), on_get_value=lambda v, x: $f(x))), $x)"),
    (RUN.replace("$body", "m.a.set_value(x)"), "$m = Box(a=nnx.Param(jnp.ones(2), on_set_value=lambda v, x: $f(x)))\n$r = ${f}s($m, $x)"),
    (
        "@nnx.jit(static_argnums=0)\ndef ${f}s(act, m, x):\n    TICKS.append('${f}s')\n    return act(m.a * x)",
        "$r = ${f}s($f, $m, $x)",
    ),
    (
        "@nnx.jit(static_argnames='act')\ndef ${f}s(m, x, act):\n    TICKS.append('${f}s')\n    return act(m.a * x)",
        "$r = ${f}s($m, $x, act=$f)",
    ),
    (
        "@functools.partial(jax.jit, static_argnums=0)\ndef ${f}s(g, s, x):\n    m = nnx.merge(g, s)\n    return m.act(m.a * x)",
        f"$r = ${{f}}s(*nnx.split({MODEL}), $x)",
    ),
    ("", f"$r = jax.jit(lambda m, x: m.act(m.a * x))({MODEL}, $x)"),
    ("", f"$r = nnx.grad(lambda m, x: m.act(m.a * x).sum())({MODEL}, $x)"),
    ("", f"$r = nnx.vmap(lambda m, x: m.act(m.a * x), in_axes=(None, 0))({MODEL}, $x)"),
    ("", f"$r = nnx.remat(lambda m, x: m.act(m.a * x))({MODEL}, $x)"),
    ("", f"$r = nnx.cond(True, lambda m, x: m.act(x), lambda m, x: x, {MODEL}, $x)"),
    ("", "$r = nnx.cond(True, $f, lambda x: x, $x)"),
    ("", "$r = nnx.switch(1, [lambda x: x, lambda x: $f(x), $f], $x)"),
    ("", "$r = nnx.scan(lambda c, x: ($f(c) + x, c), in_axes=(nnx.Carry, 0))(1.0, $x)"),
    ("", "$r = nnx.scan(lambda c, m: $f(c) + m.a.sum(), in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=2)(1.0, $m)"),
    ("", "$r = nnx.fori_loop(0, 2, lambda i, c: $f(c), $x)"),
    ("", "$r = nnx.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, $f(c[1])), (0, $x))"),
    ("", "def ${f}b(m):\n    m.a[...] = $f(m.a[...])\n$r = nnx.cond(True, ${f}b, lambda m: None, $m)"),
    ("", "def ${f}b(i, m):\n    m.a[...] = $f(m.a[...])\n    return m\n$r = nnx.fori_loop(0, 2, ${f}b, $m)"),
    (STEP[0], STEP[1].replace("$tx", "optax.sgd(lambda count: $f(0.1))")),
    (STEP[0], STEP[1].replace("$tx", "optax.adam(lambda count: $f(0.1))")),
    (
        STEP[0],
        STEP[1].replace("$tx", "optax.masked(optax.sgd(0.5), lambda t: jax.tree.map(lambda x: fails(lambda: bool($f(1.0) > 1)) == ('passed', True), t))"),
    ),
    (
        "",
        (
        "$f2 = nnx.custom_vjp(lambda m, x: m.act(m.a * x).sum())\n"
        "$f2.defvjp(lambda m, x: ($f2(m, x), x), lambda res, g: (jax.tree.map(jnp.ones_like, g[0][0]), $f(res)))\n"
        f"$r = nnx.grad($f2, argnums=1)({MODEL}, $x)"
        ),
    ),
]  # fmt: skip


@statement(1.5)
def again_function(s: Scope) -> list[str] | None:
    """A function that is defined again after what it reads has changed, and used again."""
    before, edit, define = s.one(WAYS)
    once, use = s.one(USES)
    names = {n: s.fresh(n) for n in "dfm"}
    names["f2"] = s.fresh("f")
    names["x"] = s.one(["jnp.ones(2)", "jnp.arange(2.0)"])

    def text(template: str, v: float = 0.0) -> str:
        return string.Template(template).substitute(names, v=v, r=s.fresh("r"))

    lines = [text(f"$m = {MODEL.replace(', act=$f', '')}"), *([text(once)] if once else [])]
    gains = s.one([(2.0, 3.0), (2.0, 3.0, 2.0), (0.5, 2.0, 2.0)])
    for i, gain in enumerate(gains):
        lines += [text(before if i == 0 else edit, gain), text(define), text(use)]
    return lines


FORMS = {"Settings({})": ".gain", "Sizes({})": ".gain", "[{}]": "[0]", "{{0: {}}}": "[0]"}
COPIES = """nnx.clone({0})|nnx.merge(*nnx.split({0}))|nnx.merge(*nnx.split({0}, nnx.Param, ...))\
|nnx.jit(lambda m: m)({0})|nnx.cond(True, lambda m: m, lambda m: m, {0})\
|nnx.recursive_map(lambda path, x: x, {0})|jax.tree.map(lambda x: x, {0})\
|nnx.merge(nnx.graphdef({0}), nnx.state({0}))"""
RUNS = [
    "nnx.jit",
    "nnx.jit",
    "nnx.remat",
    "jax.jit",
    "(lambda f: lambda m: nnx.cond(True, f, f, m))",
]


@statement(1.0)
def again_settings(s: Scope) -> list[str] | None:
    """Equal, distinct settings or metadata of two models, edited in place after they were copied."""
    in_metadata = s.chance(0.5)
    form = s.one([*FORMS] if in_metadata else [*FORMS][:2])
    note = f"{'.a' if in_metadata else ''}.note{FORMS[form]}"
    make = "nnx.Param(jnp.ones(2), note={})" if in_metadata else "nnx.Param(jnp.ones(2)), note={}"
    m, n, c, f = (s.fresh(x) for x in "mmmf")
    lines = [f"{x} = Box(a={make.format(form.format(1.0))})" for x in (m, n)]
    lines.append(f"{c} = {s.one(COPIES.split('|')).format(n)}")
    lines.append(f"{f} = {s.one(RUNS)}(lambda m: m.a * m{note})")
    use = f"[{', '.join(f'{f}({x})' for x in (m, n, c))}]"
    read = f"{s.fresh('r')} = [{', '.join(f'{x}{note}' for x in (m, n, c))}]"
    lines += [f"{s.fresh('r')} = {use}"] if s.chance(0.6) else []
    for _ in range(s.rng.randint(1, 2)):
        edited, gain = s.one([m, n, n, c]), s.one(["2.0", "3.0"])
        lines += [f"{edited}{note} = {gain}", read, f"{s.fresh('r')} = {use}"]
    return lines
