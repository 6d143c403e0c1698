"""Statements about functions that are defined again after what they read has changed.

A function `$f` is made by one of `WAYS`, used in one of `USES`, made again by the same code with
another gain, and used again.
"""

from __future__ import annotations

from tests.parity.fuzz.grammar import KINDS, Kind

SETUP = (
    "$m, $t, $o, $c = "
    "Box(a=nnx.Param(jnp.ones(2))), {'gain': 1.0}, Settings(1.0), type('C', (), {'gain': 1.0})"
)
WAYS = r"""
$d = GAIN\ndef $f(x):\n    return x * $d
$d = GAIN\n$f = lambda x: jnp.sin(x) * $d
$d = GAIN\n$f = (lambda gain: lambda x: x * gain)($d)
$d = GAIN\ndef $f(x, gain=$d):\n    return x * gain
$d = GAIN\n$f = functools.partial(scaled, gain=$d)
$d = GAIN\n$f = functools.wraps(scaled)(lambda x: scaled(x, $d))
$d = GAIN\n$f = jax.jit(lambda x: x * $d)
$d = GAIN\n$f = nnx.jit(lambda x: x * $d)
$d = GAIN\n$f = Settings(0.0, lambda: $d).scale
$d = GAIN\ndef $f(x):\n    return x * $f.gain\n$f.gain = $d
def $h(x):\n    return x * GAIN\ndef $f(x):\n    return $h(x)
def $h(x):\n    return x * GAIN\n$f = functools.partial(lambda inner, x: inner(x), $h)
$t['gain'] = GAIN\ndef $f(x):\n    return x * $t['gain']
$t['gain'] = GAIN\ndef $f(x, *, table=$t):\n    return x * table['gain']
$t['gain'] = GAIN\n$f = (lambda table: lambda x: x * table['gain'])($t)
$t['gain'] = GAIN\n$f = functools.partial(lambda table, x: x * table['gain'], $t)
$o.gain = GAIN\ndef $f(x):\n    return $o.scale(x)
$o.gain = GAIN\n$f = functools.partial(Settings.scale, $o)
$c.gain = GAIN\ndef $f(x):\n    return x * $c.gain
"""
USES = r"""
@nnx.jit\ndef $f2(m, x):\n    TICKS.append('$f2')\n    return m.act(m.a * x) => $m.act = $f\n$r = $f2($m, $x)
@nnx.jit\ndef $f2(m, x):\n    TICKS.append('$f2')\n    return m.h[0](m.a * x) => $r = $f2(Box(a=nnx.Param(jnp.ones(2)), h=($f,)), $x)
@nnx.jit\ndef $f2(m, x):\n    TICKS.append('$f2')\n    return m(x) => $r = $f2(nnx.Sequential($f, nnx.Linear(2, 2, rngs=nnx.Rngs(0))), $x)
@nnx.jit\ndef $f2(m, x):\n    TICKS.append('$f2')\n    return m.a * x => $r = $f2(Box(a=nnx.Param(jnp.ones(2), on_get_value=lambda v, x: $f(x))), $x)
@nnx.jit\ndef $f2(m, x):\n    TICKS.append('$f2')\n    return m.a.set_value(x) => $m = Box(a=nnx.Param(jnp.ones(2), on_set_value=lambda v, x: $f(x)))\n$r = $f2($m, $x)
@nnx.jit(static_argnums=0)\ndef $f2(act, m, x):\n    TICKS.append('$f2')\n    return act(m.a * x) => $r = $f2($f, $m, $x)
@nnx.jit(static_argnames='act')\ndef $f2(m, x, act):\n    TICKS.append('$f2')\n    return act(m.a * x) => $r = $f2($m, $x, act=$f)
@functools.partial(jax.jit, static_argnums=0)\ndef $f2(g, s, x):\n    m = nnx.merge(g, s)\n    return m.act(m.a * x) => $m.act = $f\n$r = $f2(*nnx.split($m), $x)
@nnx.jit\ndef $f2(m, o):\n    TICKS.append('$f2')\n    o.update(m, nnx.grad(lambda m: m.a.sum())(m))\n    return m.a[...] => $m = Box(a=nnx.Param(jnp.ones(2)))\n$r = $f2($m, nnx.Optimizer($m, optax.<<sgd|adam>>(lambda count: $f(0.1)), wrt=nnx.Param))
pass => $r = jax.jit(lambda m, x: m.act(m.a * x))(Box(a=nnx.Param(jnp.ones(2)), act=$f), $x)
pass => $m.act = $f\n$r = nnx.<<remat|jit>>(lambda m, x: m.act(m.a * x))($m, $x)
pass => $m.act = $f\n$r = nnx.grad(lambda m, x: m.act(m.a * x).sum())($m, $x)
pass => $m.act = $f\n$r = nnx.vmap(lambda m, x: m.act(m.a * x), in_axes=(None, 0))($m, $x)
pass => $r = nnx.cond(True, $f, lambda x: x, $x)
pass => $r = nnx.switch(1, [lambda x: x, lambda x: $f(x), $f], $x)
pass => $r = nnx.scan(lambda c, x: ($f(c) + x, c), in_axes=(nnx.Carry, 0))(1.0, $x)
pass => $r = nnx.scan(lambda c, m: $f(c) + m.a.sum(), in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=2)(1.0, $m)
pass => $r = nnx.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, $f(c[1])), (0, $x))
pass => def $h2(i, m):\n    m.a[...] = $f(m.a[...])\n    return m\n$r = nnx.fori_loop(0, 2, $h2, $m)
pass => $f2 = nnx.custom_vjp(lambda m, x: (m.a * x).sum())\n$f2.defvjp(lambda m, x: ($f2(m, x), x), lambda res, g: (jax.tree.map(jnp.ones_like, g[0][0]), $f(res)))\n$r = nnx.grad($f2, argnums=1)($m, $x)
"""


def again(way: str, use: str) -> str:
    """A template in which a function is made and used three times."""
    once, call = use.split(" => ")
    lines = [SETUP, "$x = jnp.ones(2)", once]
    for number, gain in enumerate(["2.0", "3.0", "2.0"]):
        lines += [way.replace("GAIN", gain), call.replace("$r", f"$r{number}")]
    return " ; ".join(lines)


CROSSED = [again(way, use) for way in WAYS.split("\n")[1:-1] for use in USES.split("\n")[1:-1]]
KINDS.append(Kind("again_function", 2.0, "", CROSSED))
