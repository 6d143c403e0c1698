"""Statements about random streams, optimizers, metrics and meshes."""

from tests.parity.fuzz.grammar import HOLES, made, table
from tests.parity.fuzz.graph_statements import any_of, filter
from tests.parity.fuzz.transform_statements import floats


def streams(s):
    return s.one(s.named(lambda x: isinstance(x, s.lib.Rngs)))


TRANSFORMATION = """<<optax.sgd(0.1)|optax.sgd(0.1, momentum=0.9)|optax.adam(0.1)\
|optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))\
|optax.masked(optax.sgd(0.1), lambda t: jax.tree_util.tree_map_with_path(lambda p, x: 'a' in str(p), t))\
|optax.adamw(0.1, mask=lambda t: jax.tree_util.tree_map_with_path(lambda p, x: len(p) > 2, t))\
|optax.multi_transform({'x': optax.sgd(0.1), 'y': optax.set_to_zero()}, lambda t: \
jax.tree_util.tree_map_with_path(lambda p, x: 'x' if \"'a'\" in jax.tree_util.keystr(p) else 'y', t))>>"""

HOLES.update(
    rngs=any_of("Rngs"),
    streams=streams,
    random=lambda s: s.one([s.node(variables=0, containers=0.1), streams(s), streams(s)]),
    trained=lambda s: s.one([t for t, _ in floats(s, True) if t in s.roots]),
    part=lambda s: made(
        s, "<<nnx.All(nnx.Param, nnx.Not(Scale))|Scale|nnx.Any(nnx.Param, $filter)>>"
    ),
    tx=lambda s: made(s, TRANSFORMATION),
    mesh=lambda s: f"mesh_of({s.one(['2', '8', '4'])})",
    sharded=lambda s: s.one([n for n in s.models() if n[0] == "w"]),
    only=lambda s: s.one(["", "", ", only='params'", f", only={filter(s, 1)}"]),
)

table(r"""
training_step 1.0
    $def:model:scalar ; $o = nnx.Optimizer($args, $tx, wrt=nnx.Param) ; $s = nnx.grad($f)($args) ; $o.update($args, $s)
    $def:model:scalar ; $o = nnx.Optimizer($args, $tx, wrt=nnx.Param) ; @nnx.jit\ndef $f2(m, o):\n    TICKS.append('$f2')\n    o.update(m, nnx.grad($f)(m)) ; $f2($args, $o)<<| ; $f2($args, $o)>>
    $def:model:scalar ; $o = nnx.ModelAndOptimizer($args, $tx, wrt=nnx.Param) ; @nnx.jit\ndef $f2(m, o):\n    TICKS.append('$f2')\n    o.update(nnx.grad($f)(m)) ; $f2($args, $o)<<| ; $f2($args, $o)>>
training_part 0.5
    $o = nnx.Optimizer($trained, $tx, wrt=$part) ; $s = nnx.grad(lambda m: sum(jnp.sum(x ** 2) for x in jax.tree.leaves(nnx.state(m, nnx.Param))), argnums=nnx.DiffState(0, $part))($trained) ; $o.update($trained, $s)
streams_new 0.8
    $k = nnx.Rngs(<<0|1, params=2|0, params=0, dropout=3>>)
streams_draw 0.8 body
    $x = $rngs.params<<()|.normal((2,))|.bernoulli(0.5, (2,))>>
    $x = <<$rngs['params']()|list($rngs)|'params' in $rngs|nnx.initializers.normal()($rngs.params(), (2, 2))>>
streams_fork 0.8 body
    $k = $rngs.fork(<<|split=2|split={'params': 2, ...: None}>>)
    $k = $rngs.<<split(2)|split({'params': 2})|broadcast(2)>>
    $k = nnx.fork_rngs($rngs<<|, split=2>>)
    $k = nnx.with_rngs($rngs, <<split=2|fork='params'|split={'params': 2}|broadcast=2>>, graph_updates=False)
streams_split 0.7
    with nnx.split_rngs($random, splits=2$only):\n    $r = nnx.as_pure(nnx.state($random))
    $z = nnx.split_rngs($random, splits=2$only) ; nnx.restore_rngs($z)
    $z = nnx.split_rngs($random, splits=2$only)
    nnx.reseed($random, <<params=7|default=3|dropout=1, params=2>>)
    @nnx.split_rngs(splits=2$only)\n@nnx.vmap(in_axes=(<<0|nnx.StateAxes({nnx.RngState: 0, ...: None})>>,))\ndef $f(a):\n    TICKS.append('$f')\n    return nnx.state(a, nnx.RngKey) ; $r1 = $f($random) ; $r2 = $f($random)
    @nnx.split_rngs(splits=2$only)\n@nnx.vmap(in_axes=(<<0|nnx.StateAxes({nnx.RngState: 0, ...: None})>>,))\ndef $f(a):\n    TICKS.append('$f')\n    return a.params.normal((2,)) ; $r1 = $f($streams) ; $r2 = $f($streams)
streams_broadcast 0.4
    @nnx.vmap(in_axes=(None, 0)$modes)\ndef $f(k, x):\n    return k.params.normal((2,)) + x ; $r = $f($streams, jnp.arange(2.0))
    @nnx.scan(in_axes=(nnx.Carry, None, 0)$modes)\ndef $f(c, k, x):\n    y = k.params.normal(())\n    return c + y, y + x ; $r = $f(0.0, $streams, jnp.arange(2.0))

training_metrics 0.6
    $q = nnx.metrics.<<Average|Welford>>() ; $q.update(values=$pair) ; $r = $q.compute() ; $q.reset()
    $q = nnx.metrics.<<Average|Welford>>() ; $x = $pair ; @nnx.jit\ndef $f($q):\n    TICKS.append('$f')\n    $q.update(values=$x) ; $f($q) ; $f($q) ; $r = $q.compute() ; $s = nnx.split($q)[1]
    $q = nnx.MultiMetric(loss=nnx.metrics.Average('loss'), acc=nnx.metrics.Accuracy()) ; $q.update(loss=$pair, logits=$rows, labels=jnp.array([0, 2])) ; $r = $q.compute() ; $q.reset()
training_state 0.3
    $q = nnx.TrainState.create(nnx.graphdef($trained), params=nnx.state($trained, nnx.Param), tx=$tx) ; $q = $q.apply_gradients(jax.tree.map(jnp.ones_like, $q.params)) ; $r = $q.params, $q.step, jax.tree.leaves($q.opt_state)

meshes_model 0.5
    with jax.set_mesh(mesh_of(<<2|8>>)):\n    $w = Box(a=nnx.Param(jnp.ones((8, 4)), <<sharding=('d', None)|sharding_names=('d', None)|sharding=P('d', None)>>), b=nnx.BatchStat(jnp.arange(8.0)))
    with jax.set_mesh(mesh_of(2, <<2|4>>)):\n    $w = Box(a=nnx.Param(jnp.ones((8, 4)), <<sharding=('d', 'e')|sharding_names=('d', 'e')|sharding=P('d', 'e')>>), b=nnx.BatchStat(jnp.arange(8.0)))
meshes_use 0.6
    $r = nnx.<<get_partition_spec|state>>(nnx.state($sharded))
    $h = $mesh ; @nnx.jit(in_shardings=(nnx.StateSharding(<<{nnx.Param: NamedSharding($h, P('d')), ...: NamedSharding($h, P())}|{...: NamedSharding($h, P('d'))}>>),))\ndef $f(a):\n    TICKS.append('$f')\n    <<a.a[...] = a.a * 2|a.a = nnx.Param(a.a * 2)|a.c = nnx.Param(a.a + 1)|pass>>\n    return a.a.sum() ; $r1 = $f($sharded) ; $r2 = $f($sharded)
    $h = $mesh ; @nnx.jit(out_shardings=<<NamedSharding($h, P('d'))|nnx.StateSharding({nnx.Param: NamedSharding($h, P('d')), ...: NamedSharding($h, P())})>>)\ndef $f(x):\n    return Box(a=nnx.Param(x * 2), b=nnx.Param(x + 1)) ; $r = $f(jnp.ones((8, 4)))
    $r = nnx.vmap(lambda i: nnx.Param(i * jnp.ones(2), sharding_names=('d',), eager_sharding=False), <<out_axes=1, |>>transform_metadata={nnx.PARTITION_NAME: <<'e'|None>>})(jnp.arange(3.0))
    @nnx.shard_map(mesh=$mesh, in_specs=(<<nnx.StateSharding({nnx.Param: P('d'), ...: P()})|P('d')>>,), out_specs=P('d'))\ndef $f(a):\n    TICKS.append('$f')\n    <<a.a[...] = a.a * 2|a.c = nnx.Param(a.a + 1)|pass>>\n    return a.a * 2 ; $r = $f($sharded)
    with jax.set_mesh($mesh):\n    $o = nnx.Optimizer($sharded, optax.<<sgd(0.1)|sgd(0.1, momentum=0.9)|adam(0.1)>>, wrt=nnx.Param)
    with jax.set_mesh($mesh):\n    $s = keystrs(nnx.get_named_sharding(nnx.state($sharded), $mesh))
""")
