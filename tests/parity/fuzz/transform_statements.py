"""Statements about transforms: functions with random bodies, and what is done with them.

`$def:words` is the definition of `$f` (and `$def2:words` of `$f2`), for the arguments `$args`, which it
draws, with the settings `$modes`. Its words are

- what the arguments are: `float` for those to differentiate, `mapped` with `$axes`, `model`, or any;
- what it returns: `scalar`, `pair`, `aux` (a scalar and something), `sliced`, `carry` (the first argument
  is a carry), `missing` (it raises); or anything;
- how it is called: `index` and `counter` are bodies of loops; `k` gives it a keyword argument.
"""

import dataclasses
import textwrap
import typing as tp

import jax

from tests.parity.fuzz.grammar import HOLES, KINDS, expand, hole, name_of, table
from tests.parity.fuzz.graph_statements import mode, text_of
from tests.parity.fuzz.scope import SHAPES, is_array

MAX_DEPTH = 3


@dataclasses.dataclass
class Call:
    """The arguments of a function, their axes, which of them must only be read, and the settings."""

    args: list[tuple[str, tp.Any]]
    modes: str = ""
    axes: list[str] = dataclasses.field(default_factory=list)
    frozen: list[bool] = dataclasses.field(default_factory=list)
    differentiated: int = 1

    @property
    def updates(self):
        return "graph=False" not in self.modes and "graph_updates=False" not in self.modes


# Arguments ------------------------------------------------------------------------------------------


def modes_of(s):
    updates = f", graph_updates={s.one(['False', 'False', 'True', 'None'])}"
    return mode(s, 0.2) + (updates if s.chance(0.3) else "")


def some(s, low=1, high=2):
    found = []
    for _ in range(s.rng.randint(low, high)):
        r = s.rng.random()
        if r < 0.3 or not s.models():
            arrays = s.named(lambda x: isinstance(x, jax.Array))
            numbers = ["2.0", "3", "jnp.ones(2)", s.array(s.one(SHAPES))]
            text = s.one(arrays) if arrays and s.chance(0.5) else s.one(numbers)
        else:
            text = (HOLES["state"] if r < 0.37 else HOLES["node"])(s)
        if text is not None:
            try:
                found.append((text, s.evaluate(text)))
            except Exception:
                continue
    return found


def floats(s, updates):
    """Objects with floating Params, or where structure stays anything of floating-point numbers."""
    kinds = (s.lib.Pytree,) if updates else (s.lib.Pytree, s.lib.Variable, jax.Array)
    counted = (s.lib.Param,) if updates else (s.lib.Variable, jax.Array)
    found = []
    for text, value, *_ in s.places():
        if isinstance(value, kinds):
            leaves = [s.raw(x) for x in s.below(value) if isinstance(x, counted)]
            if leaves and all(is_array(x, "float32") for x in leaves):
                found.append((text, value))
    return found


def axes_of(s, value, carry):
    """The text of axes for a value, and which leaves are mapped."""
    lib, never = s.lib, lambda x: False
    leaves = [x for x in s.below(value) if isinstance(x, (lib.Variable, jax.Array))]
    sliced = lambda x: getattr(s.raw(x), "shape", ())[:1] == (2,)
    if leaves and all(map(sliced, leaves)) and s.chance(0.75):
        return "0", lambda x: True
    if s.is_object(value) and s.chance(0.7):
        for kind in s.some(["Param", "BatchStat", "Variable"], 3, 3):
            cls = getattr(lib, kind)
            mine = [x for x in leaves if isinstance(x, cls)]
            if mine and all(map(sliced, mine)):
                rest = "nnx.Carry" if carry and s.chance(0.3) else "None"
                return f"{{nnx.{kind}: 0, ...: {rest}}}", lambda x, cls=cls: isinstance(x, cls)
    return "None", never


def mapped(s, carry):
    """Arguments of which some leaves are sliced, and axes for them."""
    call = Call([])

    def add(text, value, axes, is_mapped):
        def one(path, x):
            if not is_mapped(x):
                return x
            return x.replace(x.get_raw_value()[0]) if s.is_variable(x) else x[0]

        slices = one((), value) if isinstance(value, jax.Array) else s.lib.map(one, value)
        if axes.startswith("{"):
            axes = f"nnx.StateAxes({axes})"
        call.args.append((text, slices))
        call.axes.append(axes)
        call.frozen.append(axes != "0" and s.chance(0.9))

    for text, value in some(s):
        if not isinstance(value, (int, float)):
            try:
                add(text, value, *axes_of(s, value, carry))
            except Exception:
                continue
    if {"None"}.issuperset(call.axes):
        pair = s.array((2,))
        add(pair, s.evaluate(pair), "0", lambda x: True)
    tree = any("StateAxes" in axes for axes in call.axes)
    call.modes = "" if tree and s.chance(0.9) else modes_of(s)
    return call


def call_of(s, words):
    if "mapped" in words:
        call = mapped(s, "carry" in words)
        if "carry" in words:
            model = s.one(s.models()) if s.models() and s.chance(0.3) else s.array((2,))
            call.args.insert(0, (model, s.evaluate(model)))
            call.frozen.insert(0, False)
        return call
    call = Call([], ", graph_updates=False" if "tree" in words else modes_of(s))
    if "float" in words:
        options = floats(s, call.updates)
        if not options:
            return None
        call.args = [s.one(options) for _ in range(s.one([1, 1, 1, 2]))]
        call.differentiated = len(call.args)
        call.args += some(s, 0, 1)
    elif "model" in words:
        trained = [text for text, _ in floats(s, True) if text in s.roots]
        models = trained if "scalar" in words else s.models()
        name = s.one(models)
        call.args = [(name, s.env[name])] if name else []
    else:
        call.args = some(s)
    is_loop = "index" in words or "counter" in words
    call.args = [a for a in call.args if not (is_loop and isinstance(a[1], (int, float)))]
    return call if call.args else None


# Functions ------------------------------------------------------------------------------------------


def fill(s, count):
    kinds = [k for k in KINDS if "body" in k.flags]
    kinds = [k for k in kinds if not (s.values_only and "structural" in k.flags)]
    is_transform = lambda k: k.name.startswith("t_")
    if s.depth >= MAX_DEPTH:
        kinds = [k for k in kinds if not is_transform(k)]
    weights = [k.weight * (0.35 if is_transform(k) else 1) for k in kinds]
    for _ in range(count):
        for text in expand(s, s.one(s.rng.choices(kinds, weights)[0].templates)) or []:
            if not s.attempt(text):
                break


def anything(s):
    """What a function may return where anything goes."""
    objects = [p.text for p in s.places() if s.is_object(p.value) or s.is_variable(p.value)]
    options = [s.scalar(), s.array(s.one(SHAPES)), f"({s.array((2,))}, {{'k': {s.scalar()}}})"]
    options += ["None", f"nnx.Param({s.array((2,))})", f"Box(a=nnx.Param({s.array((2,))}), n=3)"]
    if objects and s.chance(0.5):
        x = s.one(objects)
        options = [x, f"[{x}, {s.scalar()}]", f"Box(inner={x}, b=nnx.Param({s.array(())}))"]
    return s.one(options)


def result_of(s, words, params, call):
    values = dict(zip(params, call.args))
    next_of = lambda p: s.array(x.shape) if is_array(x := values[p][1], "float32") else p
    carried = ", ".join(map(next_of, params))
    pair, scalar = s.array((2,)), s.scalar()
    sliced = [scalar, pair, s.array((2, 2)), f"{{'k': {scalar}, 'n': [{pair}]}}"]
    sliced += [f"nnx.Param({pair})", f"Box(a=nnx.Param({scalar}), n=3)"]
    options = {
        "index": f"({carried},)",
        "counter": f"(i + 1, {carried})",
        "missing": "{}['missing']",
        "pair": pair,
        "scalar": s.scalar(3),
        "aux": f"({scalar}, {anything(s)})",
        "sliced": s.one(sliced),
    }
    found = next((text for word, text in options.items() if word in words), None) or anything(s)
    return f"{next_of(params[0])}, {found}" if "carry" in words else found


@hole
def define(s, number, words):
    call = s.filled.get("call") or call_of(s, words)
    if call is None:
        return None
    s.filled["call"] = call
    s.filled.setdefault("modes", call.modes)
    params, values = [s.fresh("a") for _ in call.args], [value for _, value in call.args]
    others = [n for n in s.roots if isinstance(s.env[n], (s.lib.Pytree, jax.Array))]
    inner = s.child(params, values, s.some(others, 0, 1) if s.chance(0.2) else [])
    strict = "index" in words or "counter" in words or "pair" in words
    inner.values_only = not call.updates or s.chance(0.95 if strict else 0.6)
    for param, is_frozen in zip(params, call.frozen):
        if is_frozen:
            inner.freeze(inner.env[param])
    fill(inner, s.rng.randint(1, 4))
    name = name_of(s, f"f{number}")
    lines = [f"TICKS.append({name!r})", *inner.lines]
    lines.append(f"return {result_of(inner, words, params, call)}")
    signature = ", ".join([*params, *(["k=1"] if "k" in words else [])])
    unpack = f"{', '.join(params)}, = c"
    if "index" in words:
        signature, lines = "i, c", [unpack, *lines]
    elif "counter" in words:
        signature, lines = "c", [f"i, {unpack}", *lines]
    s.filled["named"] = f"{params[-1]}={call.args[-1][0]}"
    return f"def {name}({signature}):\n" + textwrap.indent("\n".join(lines), "    ")


def from_call(make):
    """A hole for what depends on the arguments of the function at hand."""
    return lambda s: make(s, s.filled["call"])


def argnums(s, call):
    if call.updates and s.chance(0.25):
        kinds = ["nnx.Param", "nnx.Param", "nnx.PathContains('a')", "Scale"]
        return f", argnums=nnx.DiffState(0, {s.one(kinds)})"
    each = (*range(call.differentiated),)
    return s.one(["", "", ", argnums=0", ", argnums=(0,)", f", argnums={each}"])


def vector(s):
    """An Affine of two elements that a body may write."""
    found = [p for p in s.writable("Affine") if getattr(p.value, "w", None) is not None]
    return text_of(s, [p for p in found if getattr(p.value.w, "shape", None) == (2,)])


def captured(s):
    """A Variable with a floating-point array."""
    leaves = [p for p in s.places(s.models()) if s.is_variable(p.value)]
    return text_of(s, [p for p in leaves if is_array(s.raw(p.value), "float32")])


HOLES.update(
    {"def": define},
    args=from_call(lambda s, call: ", ".join(text for text, _ in call.args)),
    axes=from_call(lambda s, call: ", ".join(call.axes)),
    ones=from_call(
        lambda s, call: ", ".join(f"jax.tree.map(jnp.ones_like, {text})" for text, _ in call.args)
    ),
    named=lambda s: s.filled["named"],
    argnums=from_call(argnums),
    modes=modes_of,
    vector=vector,
    captured=captured,
)

table(r"""
t_jit 3.0 body
    $def:any ; $f = nnx.<<jit|jit|jit|remat>>($f$modes) ; $r = $f($args)<<| ; $r2 = $f($args)>>
    @nnx.<<jit|remat>>\n$def:any ; $r = $f($args)<<| ; $r2 = $f($args)>>
t_jit_options 0.5 body
    $def:any ; $f = nnx.jit($f, <<inline=True|keep_unused=True>>) ; $r = $f($args)
    @nnx.jit(static_argnames=('k',))\n$def:any:k ; $r = $f($args, k=<<1|2>>) ; $r2 = $f($args, k=2)
    @nnx.jit\n$def:model ; $r = $f($named) ; $r2 = $f($args)
    @nnx.jit(donate_argnums=0)\n$def:model ; $m = nnx.clone($args, arrays=True) ; $r = $f($m)
t_eval_shape 0.7
    $def:any ; $u = nnx.eval_shape($f, $args$modes)
t_partial 0.4
    $def:model ; $f = nnx.cached_partial(nnx.jit($f), $args) ; $r = $f() ; $r2 = $f() ; del $f
    $f = nnx.<<cached_partial(nnx.jit(lambda m, x: m(x)), $affine)|jit_partial(lambda m, x: m(x), $affine, graph_updates=False)>> ; $r = $f($pair) ; $r2 = $f($pair) ; del $f
t_checkify 0.3 body
    $r = nnx.checkify(lambda m, x: m(x)$modes)($vector, $pair)[1]

t_grad 2.0 body
    $def:float:scalar ; $r = nnx.<<grad|value_and_grad>>($f$argnums$modes)($args)
    $def:float:scalar ; $f = nnx.<<grad|value_and_grad>>($f$argnums$modes) ; $r = $f($args) ; $r2 = $f($args)
    $def:float:aux ; $r = nnx.<<grad|value_and_grad>>($f, has_aux=True$argnums$modes)($args)
t_vjp 0.7 body
    $def:float:tree:pair ; $r = nnx.jvp($f, ($args,), ($ones,)<<|, graph=False>>, graph_updates=False)
    $def:float:tree:scalar ; $y, $f2 = nnx.vjp($f, $args<<|, graph=False>>, graph_updates=False) ; $r = $f2(jnp.ones_like($y)) ; del $f2
t_custom_vjp 0.5
    $f = nnx.custom_vjp(lambda m, x: m(x).sum()) ; $f.defvjp(lambda m, x: ($f(m, x), x), lambda res, g: (jax.tree.map(jnp.ones_like, g[0][0]), 3.0 * g[1] * res)) ; $r = nnx.grad($f, argnums=<<0|1|(0, 1)>>)($vector, $pair) ; $r2 = $f($vector, $pair)
    $f = nnx.custom_vjp(lambda m, x: (m.w[...] * x).sum(), graph_updates=False) ; $f.defvjp(lambda m, x: ($f(m, x), m), lambda res, g: (jax.tree.map(jnp.zeros_like, res), 3.0 * g * jnp.ones(2))) ; $r = nnx.grad($f, argnums=1, graph_updates=False)($vector, $pair)

t_vmap 2.0 body
    $def:mapped:sliced ; $r = nnx.vmap($f, in_axes=($axes,)<<||, out_axes=0>>$modes)($args)
    $def:mapped:any ; $r = nnx.vmap($f, in_axes=($axes,)$modes)($args)
t_scan 1.6 body
    $def:mapped:carry:sliced ; $r = nnx.scan($f, in_axes=(nnx.Carry, $axes)<<||, reverse=True|, unroll=2|, length=2>>$modes)($args)
t_axes 0.5
    $m = Box(a=nnx.Param(jnp.arange(4.0).reshape(2, 2)), b=nnx.BatchStat(jnp.ones((2, 2)))) ; $r = nnx.vmap(lambda m: m.a.sum() + m.b.sum(), in_axes=(<<nnx.StateAxes(nnx.State({'a': 0, 'b': None}))|nnx.StateAxes(nnx.State({'a': None, 'b': 0}))|nnx.StateAxes({'a': 0, ...: 1})>>,))($m)
    $m = Box(a=nnx.Param(jnp.arange(4.0).reshape(2, 2)), b=nnx.BatchStat(jnp.ones((2, 2)))) ; $r = nnx.vmap(lambda t: [x.sum() for x in jax.tree.leaves(t)], in_axes=(nnx.State({'a': <<0|1|None>>, 'b': <<0|1>>}),))(nnx.state($m))
    $m = Box(a=nnx.Param(jnp.arange(4.0).reshape(2, 2)), b=nnx.BatchStat(jnp.ones((2, 2)))) ; $r = nnx.vmap(lambda m: m.a.sum() + m.b.sum(), in_axes=(nnx.prefix($m, {nnx.Param: <<0|1>>, ...: None}, graph=False),), graph=False)($m)
t_cond 1.4 body
    $def:any:pair ; $def2:any:pair ; $r = nnx.cond(<<True|False|jnp.array(True)|$scalar > 0.5>>, $f, $f2, $args$modes)
    $def:any:pair ; $def2:any:pair ; $def3:any:pair ; $r = nnx.switch(<<0|1|jnp.array(1)|jnp.array(5)>>, [$f, $f2, $f3], $args$modes)
t_loop 1.0 body
    $def:index ; $r = nnx.fori_loop(0, 2, $f, ($args,)<<|, unroll=2>>$modes)
    $def:counter ; $r = nnx.while_loop(lambda c: c[0] < <<0|1|2|3>>, $f, (jnp.array(0), $args)$modes)

t_failing 0.6
    $def:model:missing ; $r = fails(lambda: nnx.<<jit|remat|grad>>($f)($args))[0]
    $def:model:missing ; $r = fails(lambda: nnx.eval_shape($f, $args))[0]
t_modes_of_a_block 0.6
    $def:any ; with nnx.set_graph_<<mode(False)|mode(True)|updates(False)>>:\n    $r = nnx.<<jit|remat>>($f)($args)
    with nnx.set_graph_<<mode(False)|mode(True)|updates(False)>>:\n    $r = nnx.<<split|clone|state>>($node)
t_methods 0.7 body structural
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
