"""Statements about random streams, optimizers, metrics and meshes."""

from __future__ import annotations

from tests.parity.fuzz.graph_statements import filters, kind_filter, some_filter, statement
from tests.parity.fuzz.scope import Scope
from tests.parity.fuzz.transform_statements import Function, modes, with_params, wrapped

# Random streams ---------------------------------------------------------------------------------------


def streams(s: Scope) -> list[str]:
    """The names of Rngs."""
    return s.named(lambda x: isinstance(x, s.lib.Rngs))


@statement(0.8)
def new_rngs(s: Scope) -> str | None:
    if len(streams(s)) >= 2:
        return None
    form = s.one(["nnx.Rngs(0)", "nnx.Rngs(1, params=2)", "nnx.Rngs(0, params=0, dropout=3)"])
    return f"{s.fresh('k')} = {form}"


@statement(0.8, body=True)
def draw(s: Scope) -> str | None:
    found = [
        p for p in s.places() if isinstance(p.value, s.lib.Rngs) and id(p.value) not in s.frozen
    ]
    if not found:
        return None
    t = s.one(found).text
    form = s.one(
        [
            "{}.params()",
            "{}.params.normal((2,))",
            "{}.params.bernoulli(0.5, (2,))",
            "{}['params']()",
            "list({})",
            "'params' in {}",
            "nnx.initializers.normal()({}.params(), (2, 2))",
        ]
    )
    return f"{s.fresh('x')} = {form.format(t)}"


@statement(0.8, body=True)
def fork(s: Scope) -> str | None:
    found = [
        p for p in s.places() if isinstance(p.value, s.lib.Rngs) and id(p.value) not in s.frozen
    ]
    if not found:
        return None
    t = s.one(found).text
    form = s.one(
        [
            "{}.fork()",
            "{}.fork(split=2)",
            "{}.fork(split={{'params': 2, ...: None}})",
            "{}.split(2)",
            "{}.split({{'params': 2}})",
            "{}.broadcast(2)",
            "nnx.fork_rngs({})",
            "nnx.fork_rngs({}, split=2)",
            "nnx.with_rngs({}, split=2, graph_updates=False)",
            "nnx.with_rngs({}, fork='params', graph_updates=False)",
            "nnx.with_rngs({}, split={{'params': 2}}, graph_updates=False)",
            "nnx.with_rngs({}, broadcast=2, graph_updates=False)",
        ]
    )
    return f"{s.fresh('k')} = {form.format(t)}"


@statement(0.7)
def split_streams(s: Scope) -> list[str] | None:
    """`split_rngs` as a context, as a function, or in front of `vmap`."""
    node = s.one([s.node(variables=0, containers=0.1), *streams(s), *streams(s)])
    if node is None:
        return None
    only = s.one(["", "", ", only='params'", f", only={some_filter(s, 1)}"])
    form = s.rng.randrange(4)
    if form == 0:
        return [
            f"with nnx.split_rngs({node}, splits=2{only}):\n    {s.fresh('r')} = nnx.as_pure(nnx.state({node}))"
        ]
    if form == 1:
        z = s.fresh("z")
        lines = [f"{z} = nnx.split_rngs({node}, splits=2{only})", f"nnx.restore_rngs({z})"]
        return lines if s.chance(0.7) else lines[:1]
    if form == 2:
        return [f"nnx.reseed({node}, {s.one(['params=7', 'default=3', 'dropout=1, params=2'])})"]
    name = s.fresh("f")
    axes = s.one(["0", "nnx.StateAxes({nnx.RngState: 0, ...: None})"])
    tail = "a.params.normal((2,))" if node in streams(s) else "nnx.state(a, nnx.RngKey)"
    return [
        (
            f"@nnx.split_rngs(splits=2{only})\n@nnx.vmap(in_axes=({axes},))\n"
            f"def {name}(a):\n    TICKS.append({name!r})\n    return {tail}"
        ),
        f"{s.fresh('r')} = {name}({node})",
        f"{s.fresh('r')} = {name}({node})",
    ]


@statement(0.4)
def broadcast_streams(s: Scope) -> list[str] | None:
    """A stream that is broadcast draws the same keys in every slice."""
    if not streams(s):
        return None
    t, name = s.one(streams(s)), s.fresh("f")
    options, _ = modes(s)
    if s.chance(0.5):
        return [
            f"@nnx.vmap(in_axes=(None, 0){options})\ndef {name}(k, x):\n    return k.params.normal((2,)) + x",
            f"{s.fresh('r')} = {name}({t}, jnp.arange(2.0))",
        ]
    return [
        (
            f"@nnx.scan(in_axes=(nnx.Carry, None, 0){options})\n"
            f"def {name}(c, k, x):\n    y = k.params.normal(())\n    return c + y, y + x"
        ),
        f"{s.fresh('r')} = {name}(0.0, {t}, jnp.arange(2.0))",
    ]


# Training -----------------------------------------------------------------------------------------------


TRANSFORMATIONS = [
    "optax.sgd(0.1)",
    "optax.sgd(0.1, momentum=0.9)",
    "optax.adam(0.1)",
    "optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))",
    "optax.masked(optax.sgd(0.1), lambda t: jax.tree_util.tree_map_with_path(lambda p, x: 'a' in str(p), t))",
    "optax.adamw(0.1, mask=lambda t: jax.tree_util.tree_map_with_path(lambda p, x: len(p) > 2, t))",
    (
        "optax.multi_transform({'x': optax.sgd(0.1), 'y': optax.set_to_zero()}, lambda t: "
        "jax.tree_util.tree_map_with_path(lambda p, x: 'x' if \"'a'\" in jax.tree_util.keystr(p) else 'y', t))"
    ),
]


@statement(1.0)
def train(s: Scope) -> list[str] | None:
    places = [p for p in with_params(s) if p.root == p.text]
    if not places:
        return None
    place = s.one(places)
    wrt = s.one(
        ["nnx.Param", "nnx.Param", "nnx.All(nnx.Param, nnx.Not(Scale))", "Scale", some_filter(s, 1)]
    )
    o, a = s.fresh("o"), s.fresh("a")
    kind = s.one(["Optimizer", "Optimizer", "ModelAndOptimizer"])
    cls = "nnx.Optimizer" if kind == "Optimizer" else "nnx.optimizer.ModelAndOptimizer"
    lines = [f"{o} = {cls}({place.text}, {s.one(TRANSFORMATIONS)}, wrt={wrt})"]
    f = Function(s, [a], [place.value], lambda i: i.scalar(3), values_only=True, size=(0, 2))
    lines.append(f.text)
    argnums = "" if wrt == "nnx.Param" else f"argnums=nnx.DiffState(0, {wrt})"
    model = f"{place.text}, " if kind == "Optimizer" else ""
    if s.chance(0.5):
        g = s.fresh("s")
        update = f"{o}.update({model}{g})"
        lines += [
            f"{g} = nnx.grad({f.name}{', ' + argnums if argnums else ''})({place.text})",
            update,
        ]
    else:
        step = s.fresh("f")
        inner = "o.update(m, g)" if kind == "Optimizer" else "o.update(g)"
        head, after = wrapped(s, step, "jit", "")
        lines.append(
            f"{head}def {step}(m, o):\n    TICKS.append({step!r})\n"
            f"    g = nnx.grad({f.name}{', ' + argnums if argnums else ''})(m)\n    {inner}"
        )
        lines += [*after, f"{step}({place.text}, {o})"]
        lines += [f"{step}({place.text}, {o})"] * s.rng.randint(0, 1)
    return lines


@statement(0.6)
def metrics(s: Scope) -> list[str] | None:
    form = s.one(
        [
            "nnx.MultiMetric(loss=nnx.metrics.Average('loss'), acc=nnx.metrics.Accuracy())",
            "nnx.metrics.Average()",
            "nnx.metrics.Welford()",
        ]
    )
    t = s.fresh("q")
    values = s.array((2,))
    update = f"{t}.update(values={values})"
    if "Multi" in form:
        logits = s.array((2, 3))
        update = f"{t}.update(loss={values}, logits={logits}, labels=jnp.array([0, 2]))"
    lines = [f"{t} = {form}", update]
    if s.chance(0.4):
        f = s.fresh("f")
        lines.append(f"@nnx.jit\ndef {f}({t}):\n    TICKS.append({f!r})\n    {update}")
        lines += [f"{f}({t})", f"{f}({t})"]
    lines.append(f"{s.fresh('r')} = {t}.compute()")
    if s.chance(0.4):
        lines.append(s.one([f"{t}.reset()", f"{s.fresh('s')} = nnx.split({t})[1]"]))
    return lines


@statement(0.3)
def train_state(s: Scope) -> list[str] | None:
    places = [p for p in with_params(s) if p.root == p.text]
    if not places:
        return None
    m, t = s.one(places).text, s.fresh("q")
    params = f"nnx.state({m}, nnx.Param)"
    lines = [
        f"{t} = nnx.TrainState.create(nnx.graphdef({m}), params={params}, tx={s.one(TRANSFORMATIONS)})"
    ]
    if s.chance(0.7):
        lines.append(f"{t} = {t}.apply_gradients(jax.tree.map(jnp.ones_like, {t}.params))")
    return [*lines, f"{s.fresh('r')} = {t}.params, {t}.step, jax.tree.leaves({t}.opt_state)"]


@statement(0.3)
def average_of_weights(s: Scope) -> list[str] | None:
    if not s.models():
        return None
    m, e = s.one(s.models()), s.fresh("e")
    only = s.one(["", ", only=nnx.Param", f", only={kind_filter(s)}"])
    return [
        f"{e} = nnx.EMA({m}, 0.5{only})",
        f"{e}.update({m})",
        s.one([f"{s.fresh('m')} = {e}.apply_to({m})", f"{e}.update(nnx.state({m}))"]),
    ]


# Meshes ----------------------------------------------------------------------------------------------------


@statement(0.5)
def sharded_model(s: Scope) -> str | None:
    """A model with annotations, made on a mesh."""
    if len(s.models()) >= 5:
        return None
    shape = s.one(["2", "8", "2, 2", "2, 4"])
    second = s.one(["None", "'e'"]) if "," in shape else "None"
    form = s.one(["sharding=('d', {})", "sharding_names=('d', {})", "sharding=P('d', {})"]).format(
        second
    )
    body = f"Box(a=nnx.Param(jnp.ones((8, 4)), {form}), b=nnx.Param(jnp.arange(8.0), {form.split(', {')[0]}))"
    body = body.replace(f", {second}))", ",))") if "P(" not in form else body
    body = f"Box(a=nnx.Param(jnp.ones((8, 4)), {form}), b=nnx.BatchStat(jnp.arange(8.0)))"
    return f"with jax.set_mesh(mesh_of({shape})):\n    {s.fresh('w')} = {body}"


@statement(0.6)
def use_sharded(s: Scope) -> list[str] | None:
    names = [n for n in s.models() if n.startswith("w")]
    if not names:
        return None
    m, name = s.one(names), s.fresh("f")
    form = s.rng.randrange(5)
    mesh = f"mesh_of({s.one(['2', '8', '4'])})"
    if form == 0:
        return [
            f"{s.fresh('r')} = {s.one(['nnx.get_partition_spec', 'nnx.state'])}(nnx.state({m}))"
        ]
    write = s.one(
        [
            "    a.a[...] = a.a * 2\n",
            "    a.a = nnx.Param(a.a * 2)\n",
            "    a.c = nnx.Param(a.a + 1)\n",
            "",
        ]
    )
    if form == 1:
        rules = s.one(
            [
                "{nnx.Param: NamedSharding(h, P('d')), ...: NamedSharding(h, P())}",
                "{...: NamedSharding(h, P('d'))}",
            ]
        )
        h = s.fresh("h")
        axes = f"nnx.StateSharding({rules.replace('h,', h + ',')})"
        return [
            f"{h} = {mesh}",
            f"@nnx.jit(in_shardings=({axes},))\ndef {name}(a):\n    TICKS.append({name!r})\n{write}    return a.a.sum()",
            f"{s.fresh('r')} = {name}({m})",
            f"{s.fresh('r')} = {name}({m})",
        ]
    if form == 2:
        specs = s.one(["nnx.StateSharding({nnx.Param: P('d'), ...: P()})", "P('d')"])
        write = write if "nnx.Param(" not in write else ""
        return [
            (
                f"@nnx.shard_map(mesh={mesh}, in_specs=({specs},), out_specs=P('d'))\n"
                f"def {name}(a):\n    TICKS.append({name!r})\n{write}    return a.a * 2"
            ),
            f"{s.fresh('r')} = {name}({m})",
        ]
    if form == 3:
        return [
            (
                f"with jax.set_mesh({mesh}):\n"
                f"    {s.fresh('o')} = nnx.Optimizer({m}, {s.one(TRANSFORMATIONS[:3])}, wrt=nnx.Param)"
            )
        ]
    return [
        (
            f"with jax.set_mesh({mesh}):\n"
            f"    {s.fresh('s')} = keystrs(nnx.get_named_sharding(nnx.state({m}), {mesh}))"
        )
    ]


__all__ = ["filters"]
