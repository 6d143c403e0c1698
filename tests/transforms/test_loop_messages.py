"""What maps, loops and branches refuse, in one table, and that the call changed nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.messages import refused, rows
from tests.sharding.meshes import mesh_of
from tests.transforms import models
from tests.transforms.models import Foo

X, XS, CARRY = jnp.array([1.0, 2.0]), jnp.arange(3.0), nnx.Carry
MESH = mesh_of()


class Wide(nnx.Module):
    """A stack of three; of eight for the devices."""

    def __init__(self, size=3):
        self.w = nnx.Param(jnp.ones((size, 2)))
        self.n = nnx.BatchStat(jnp.zeros(size))

    def __call__(self, x):
        self.n[...] += 1
        return self.w * x


def scope():
    """What a line sees: new models, and all that stands on this page."""
    loop = nnx.Dict(w=nnx.data(0))
    loop.me = loop
    stack = nnx.Dict(a=nnx.Param(X), n=nnx.BatchStat(jnp.array(3.0)))
    made = {"m": Foo(), "k": Foo(), "wide": Wide(), "eight": Wide(8), "stack": stack, "loop": loop}
    return {**vars(models), **globals(), **made, "jax": jax, "np": np, "P": P}


def call(m, x):
    return m(x)


def count(c, x):
    c.n[...] += x * c.x
    return c, c.n * 1.0


def writes(m, x):
    m.n.value = x.sum()
    return x


def over(f):
    """A body for `fori_loop`."""
    return lambda i, c: f(c)


def carried(f, carry, **options):
    return nnx.scan(f, in_axes=CARRY, out_axes=CARRY, length=2, **options)(carry)


def always(c):
    return True


def sharded(f, in_specs, out_specs, **options):
    return nnx.shard_map(f, mesh=MESH, in_specs=in_specs, out_specs=out_specs, **options)


@rows("""
    nnx.vmap(call, in_axes=(1, 0))(wide, XS)
        ValueError: axis 1 of 'm.n' ... rank should be at least 2, but its shape is (3,). Give
    nnx.vmap(call, axis_size=5)(wide, XS)
        ValueError: `axis_size` argument of 5 which disagrees ... [3] (3 at 'x', 'm.n'
    nnx.vmap(call, in_axes=(0, 0, 0))(wide, XS)
        ValueError: in_axes is not a prefix of the arguments: in_axes=(0, 0, 0) ... nnx.StateAxes
    nnx.vmap(call, out_axes=(0, 0))(wide, XS)
        ValueError: out_axes is not a prefix of the result: ... is PyTreeDef(*). Give
    nnx.vmap(call, out_axes=4)(wide, XS)
        ValueError: axis 4 of the result '<root>' is out of bounds: each slice of it has shape
            (2,).
    nnx.vmap(lambda m, x: (x, {"m": m}), out_axes=(0, None))(wide, XS)
        ValueError: at 'm.w' it is 0, in the result at '1.m.w' it is None. ... nnx.clone
    nnx.vmap(lambda m, x: (lambda p: (p, p))(nnx.Param(m.w + x)), out_axes=(0, 1))(wide, XS)
        ValueError: different out_axes ... at its first place it is 0, in the result at '1' it is 1
    nnx.vmap(lambda m, x: {"y": [x]}, out_axes=None)(wide, XS)
        ValueError: batched: the result 'y.0' has axis None, and its value differs ... in out_axes
    nnx.vmap(lambda m, x: nnx.Param(x), out_axes=None)(wide, XS)
        ValueError: batched: the new Variable 'result' has axis None
    nnx.vmap(lambda m, x: m.n.set_value(x), in_axes=(None, 0))(wide, XS)
        ValueError: batched: the value at 'm.n' has axis None, ... with nnx.StateAxes in in_axes
    nnx.vmap(call, in_axes=(nnx.StateAxes({nnx.Param: 0}), 0))(wide, XS)
        ValueError: No axis found for BatchStat at 'n': none of the filters ... Add one
    nnx.vmap(call, in_axes=None)(wide, XS)
        ValueError: at least one non-None value in in_axes or axis_size
    nnx.vmap(call)(wide, "text")
        TypeError: vmap(call): cannot interpret argument 'x' as an array, it is of type 'str'.
    nnx.vmap(call, in_axes=(0, "x"))
        TypeError: vmap in_axes must be an int, None, or ... but got ... of type
    nnx.vmap(call, in_axes=np.array([0]))
        TypeError: in_axes must be an int
    nnx.vmap(call, out_axes=nnx.StateAxes({...: 1.5}))
        TypeError: vmap out_axes must be an int, None, or ... but got ... of type
    nnx.vmap(lambda a, b, x: a(x), in_axes=(0, None, 0))(wide, {"m": wide}, XS)
        ValueError: different in_axes for a shared Param: at 'a.w' it is 0, at 'b.m.w' it is None
    nnx.vmap(lambda a, b: None, in_axes=(0, nnx.StateAxes({nnx.BatchStat: 0, ...: 1})))(wide, wide)
        ValueError: different in_axes for a shared Param: at 'a.w' it is 0, at 'b.w' it is 1
    nnx.vmap(call, in_axes=(0, 0))(wide)
        TypeError: missing a required argument: 'x'
    nnx.vmap(call, in_axes=(0, 0))(wide, XS, XS)
        TypeError: too many positional arguments
    nnx.vmap(nothing, in_axes=(0, nnx.StateAxes({"a": 0})))(nnx.Dict(c=stack.a), nnx.Dict(c=m.x))
        ValueError: No axis found for Param at 'c'
    nnx.vmap(lambda m: m.w, in_axes=(loop,))(loop)
        ValueError: prefix of type Dict contains itself at 'me'. Choose
    nnx.pmap(call, in_axes=(None, 0))(eight, jnp.ones(9))
        ValueError: partitioned 8 times, but the dimension size is 9
    nnx.pmap(call, static_broadcasted_argnums=4)(eight, jnp.ones(8))
        ValueError: pmap(call): static_broadcasted_argnums has 4, but the call has 2
    nnx.pmap(call, static_broadcasted_argnums=0)(eight, jnp.ones(8))
        ValueError: Static argument 'm' of call holds a Wide
    nnx.pmap(call, in_axes="i")
        TypeError: pmap in_axes must be an int, None
    sharded(call, (P(), P("data")), P("data"))(m, jnp.ones(7))
        ValueError: passed 'x' of shape float32[7] corresponds to the spec of 'x' of value
            P('data',) ... does not evenly divide 7 ... in_specs by argument: 'x': P('data',), 'm.
    sharded(call, (P("data"), P("data")), P("data"))(m, jnp.ones(8))
        ValueError: the spec of 'm.n' is P('data',) which has length 1
    sharded(call, (P(), P("z")), P())(m, jnp.ones(8))
        ValueError: the spec of 'x' refers to 'z'
    sharded(call, (P(), "x"), P())(m, jnp.ones(8))
        TypeError: shard_map(call): ... the spec of 'x' is x of type str
    sharded(writes, (P(), P("data")), P("data"))(m, jnp.ones(8))
        ValueError: out_specs is P() which implies ... check_vma=False ... out_specs by output: the
            result '<root>': P('data',), the value at 'm.n': P()
    sharded(lambda m, x: (x, x.sum()), (P(), P("data")), P("data"))(m, jnp.ones(8))
        ValueError: but the result '1' has shape float32[], which has rank 0
    sharded(call, (P(),) * 3, P())(m, jnp.ones(8))
        ValueError: in_specs is not a prefix of the arguments ... nnx.StateSharding chooses
    sharded(writes, (P(), P("data")), (P(), P()))(m, jnp.ones(8))
        ValueError: out_specs is not a prefix of the result: ... is PyTreeDef(*). Give
    sharded(call, (nnx.StateSharding({nnx.BatchStat: P()}), P()), P())(m, jnp.ones(8))
        ValueError: No sharding found for Param at 'x'
    sharded(lambda m, x: m, (P(), P("data")), P("data"))(m, jnp.ones(8))
        ValueError: out_specs for a shared Param: at 'm.y' it is P(), ... at 'y' it is P('data',)
    nnx.shard_map(call, mesh=3, in_specs=P(), out_specs=P())(m, 1.0)
        TypeError: shard_map(call): ... requires a `jax.sharding.Mesh`
""")
def test_mapped(line, message):
    refused(line, message, scope())


@rows("""
    nnx.scan(lambda c, x: ({"b": (x, x)}, x))({"a": 0.0}, XS)
        ValueError: but they differ: the output is without 'a', with 'b.0', 'b.1'
    nnx.scan(lambda c, x: removes(c, x)[1], in_axes=(None, 0), out_axes=0)(m, XS)
        TypeError: but they differ: the body changes attributes ['y'] of 'c'
    nnx.scan(lambda c, x: (c, c))(m, XS)
        ValueError: a shared Param: at 'c.y' it is Carry, in the result at '1.y' it is 0
    nnx.scan(lambda x, c: steps(c, x)[1], in_axes=(0, None), out_axes=0)(XS, m)
        ValueError: the body writes 'c.n', which is broadcast (axis None): the writes of the
            iterations would be lost. Carry it, ... or give it an axis
    nnx.scan(count, length=5)(m, XS)
        ValueError: `length` argument of 5 which disagrees ... [3] (3 at 'x'). Leave `length` out
    nnx.scan(count, in_axes=(CARRY, None))(m, XS)
        ValueError: no values to scan over and `length` not provided. Pass length
    nnx.scan(count, out_axes=(CARRY, 2))(m, XS)
        ValueError: scan(count): axis 2 of the result '1' is out of bounds: ... shape (). Give
    nnx.scan(count)(m, XS, XS)
        TypeError: scan(count): too many positional arguments
    nnx.scan(count, in_axes=(nnx.StateAxes({nnx.BatchStat: CARRY}), 0), out_axes=0)(m, XS)
        ValueError: No axis found for Param at 'x': none of the filters ... matches
    nnx.scan(count, in_axes=((CARRY, 0), 0))
        ValueError: Carry must be at the top level, ... axes=((Carry, 0), 0). Make the carry one
    nnx.scan(count, out_axes={"a": CARRY})
        ValueError: cannot be nested. Found axes={'a': Carry}
    nnx.scan(in_axes=(0, 0))(count)
        ValueError: If one of in_axes or out_axes has Carry, the other must ... in_axes=(0, 0) and
    nnx.scan(count, out_axes=(CARRY, {"a": None}))
        ValueError: Got out_axes=None at: out_axes[1]['a']. Every result
    nnx.scan(count, out_axes=(CARRY, nnx.StateAxes({nnx.Param: 0, ...: None})))
        ValueError: Cannot broadcast output state. Got StateAxes( ... None}) at: out_axes[1]
    nnx.scan(count, out_axes=(CARRY, nnx.StateAxes({...: CARRY})))
        ValueError: Cannot carry output state. Got StateAxes( ... ) at: out_axes[1]
    nnx.scan(count, in_axes=(CARRY, CARRY))
        ValueError: Found multiple Carry definitions in in_axes=(Carry, Carry)
    nnx.scan(in_axes=(CARRY, "x"))(count)
        TypeError: scan in_axes must be an int, None, ... but got 'x' of type 'str' in (Carry, 'x')
    nnx.scan(count, out_axes=(CARRY, 0.5))
        TypeError: scan out_axes must be an int, None, ... but got 0.5 of type 'float'
    nnx.scan(count, in_axes=CARRY, out_axes=CARRY, length=2)(1.0, 2.0)
        ValueError: in_axes=Carry the one argument is the carry, got 2
    nnx.scan(count, in_axes=CARRY, out_axes=CARRY, length=2)(1.0, x=2.0)
        ValueError: such as in_axes=(nnx.Carry, None)
    nnx.scan(count)(m, {"k": m})
        ValueError: different in_axes for a shared Param: at 'c.y' it is Carry, at 'x.k.y' it is 0
    nnx.scan(lambda c, x: ((c[1], c[1]), x))((nnx.state(m), m), XS)
        ValueError: 'c.0': ... became Foo
""")
def test_scan(line, message):
    refused(line, message, scope())


@rows("""
    nnx.while_loop(always, sets, m)
        ValueError: while_loop requires body function's input and output to have the same reference
            and pytree structure, but they differ: the body changes attributes ['extra'] of 'm'. Do
            this before the loop
    nnx.fori_loop(0, 4, over(sets), m)
        TypeError: fori_loop body function carry input and carry output must have the same pytree
            ... ['extra'] of 'c'. Do this before the loop
    nnx.fori_loop(0, 4, over(annotates), m)
        TypeError: the body changes metadata of 'c.x' ... Do this before
    nnx.fori_loop(0, 4, lambda i, c: stack, m)
        TypeError: 'c': Foo became Dict
    nnx.while_loop(always, annotates, m)
        ValueError: the body changes metadata of 'm.x'
    nnx.while_loop(always, rebinds, m)
        ValueError: the body changes attributes ['x'] of 'm'
    nnx.while_loop(always, lambda m: m.x * 1, m)
        ValueError: at 'm' the input is an object, the output an array
    nnx.while_loop(always, lambda m: None, m)
        ValueError: the output is None in place of the Foo
    nnx.while_loop(always, lambda m: k, m)
        ValueError: different trace level
    carried(adds, m)
        TypeError: scan body function carry input ... ['new'] of 'm' ... Do this before the loop
    carried(annotates, m)
        TypeError: the body changes metadata of 'm.x' ... Do this before
    carried(lambda c: c.x * 1, m)
        ValueError: Carry references must be the same between iterations of scan, but ... at 'c'
    carried(lambda c: nnx.Dict(x=nnx.Param(c.x * 1)), m)
        ValueError: the body puts a new Dict in the place of 'c'
    nnx.while_loop(always, lambda c: {**c, "k": jnp.ones(2)}, {"m": m, "k": 1.0})
        TypeError: must have equal types, but they differ at 'c.k': the input is float32[]
    nnx.fori_loop(0, 4, lambda i, c: {**c, "k": c["k"] * 1j}, {"m": m, "k": jnp.float32(1.0)})
        TypeError: must have equal types, but they differ at 'c.k': ... the output complex64[]
    nnx.while_loop(always, lambda c: c[::-1], (m, k))
        ValueError: the body puts ' ... ' in the place of ' ... '. Return each object of the carry
    nnx.fori_loop(0, 2, lambda i, c: (c[0], c[0]), (m, k))
        TypeError: the body puts 'c.0' in the place of 'c.1'
    nnx.fori_loop(0, jnp.int32(2), over(exchanges), m)
        TypeError: the body puts 'c.y' in the place of 'c.x'
    nnx.fori_loop(0, 2, lambda i, c: (nnx.Param(c[0] * 1), c[1]), (m.x, m))
        TypeError: carry that is shared
    nnx.fori_loop(0, 2, lambda i, c: (c[0], nnx.Variable(c[1])), (m, 1.0))
        TypeError: 1' the input is an array, the output an
    nnx.fori_loop(0, 2, lambda i, c: (c[0], nnx.clone(c[1])), (m, m))
        TypeError: that is shared with another, at 'c.1'
    carried(exchanges, m)
        ValueError: the body puts 'm.y' in the place of 'm.x'
    carried(lambda c: (c[0], nnx.clone(c[1])), (m, m))
        TypeError: that is shared with another, at 'c.1'
    nnx.while_loop(lambda m: steps(m).n < 3, steps, m)
        ValueError: cond_fun ( ... ) changed its argument. Only body_fun
    nnx.while_loop(lambda m: m.n, steps, m)
        TypeError: cond_fun must return a boolean scalar, but got ... float32
    nnx.while_loop(fails, steps, m)
        ZeroDivisionError: by zero
    nnx.fori_loop("0", 3, over(nothing), m)
        TypeError: fori_loop: cannot interpret argument 'lower' as an array, it is of
    nnx.fori_loop(jnp.float32(0), jnp.int32(3), over(nothing), m)
        TypeError: lower and upper arguments to fori_loop must have equal
    jax.jit(lambda n: nnx.fori_loop(0, n, over(nothing), 0, unroll=2))(3)
        ValueError: `unroll` in `fori_loop` if the loop bounds are statically
    nnx.while_loop(always, adds, m, graph=False)
        ValueError: the body changes attributes ['new'] of
    carried(annotates, m, graph_updates=False)
        ValueError: the body changes metadata of 'm.x'
    nnx.fori_loop(0, 2, over(rebinds), m, graph=False)
        ValueError: Variable identity must be preserved across iterations, but the body puts
            another Variable in the place of 'c.x' ... write into the Variable
    carried(nnx.clone, m, graph_updates=False)
        ValueError: Variable identity must be preserved ... the body puts another Variable
""")
def test_loops(line, message):
    refused(line, message, scope())


@rows("""
    nnx.cond(True, adds, nothing, m)
        TypeError: cond branch outputs must have the same structure, but true_fun (adds) and
            false_fun (nothing) differ: the first changes attributes ['new'] of 'm', the second no
            structure. Make every branch create
    nnx.jit(lambda p, m: nnx.cond(p, exchanges, nothing, m))(True, m)
        TypeError: the first changes attributes ['x', 'y'] of 'm'
    nnx.cond(True, annotates, nothing, m)
        TypeError: the first changes metadata of 'm.x', the second no
    nnx.cond(True, lambda m: setattr(m, "mode", "a"), lambda m: setattr(m, "mode", "b"), m)
        TypeError: from the first to the second, 'm.mode': 'a' became 'b'
    nnx.cond(True, adds, lambda m: setattr(m, "new", nnx.BatchStat(1.0)) or m, m)
        TypeError: from the first to the second, 'm.new': Param became BatchStat
    nnx.cond(True, adds, lambda m: setattr(m, "new", nnx.Param(X)) or m, m)
        TypeError: equal output types, but ... differ at 'm.new': float32[] and float32[2]. Convert
    nnx.jit(lambda p, m: nnx.cond(p, reshapes, nothing, m))(False, m)
        TypeError: have equal output types, ... at 'm.n': float32[3] and float32[]
    nnx.cond(True, lambda m: {"a": 1.0, "b": (1, 2)}, lambda m: {"a": 1.0}, m)
        TypeError: true_fun ... the result of the second is without 'b.0', 'b.1'
    nnx.cond(True, lambda m: {"a": m.x * 1}, lambda m: {"a": jnp.arange(2)}, m)
        TypeError: cond branches must have equal output types, ... 'result.a': float32[] and
    nnx.cond(True, lambda m: m.x, lambda m: m.y, m)
        TypeError: the first returns 'm.x', the second 'm.y'
    nnx.cond(False, nothing, nnx.clone, m)
        TypeError: the first returns 'm', the second a new Foo
    nnx.cond(True, lambda m: Foo(), lambda m: nnx.Dict(), m)
        TypeError: first returns a new Foo, the second a new Dict
    nnx.switch(0, [nnx.state, lambda m: None], m)
        TypeError: the first returns a new State, the second None
    nnx.switch(0, [lambda m: [m, nnx.state(m)], nothing], m)
        TypeError: the second is 'm' in place of ['m', a new State]
    nnx.switch(0, [nothing, nothing, removes], m)
        TypeError: switch ... but branch 0 (nothing) and branch 2 (removes)
    nnx.switch(0, [nothing, reshapes], m)
        TypeError: switch branches must have equal output types, but branch 0
    nnx.switch(0, [], m)
        ValueError: switch needs at least one branch
    nnx.cond(None, nothing, nothing, m)
        TypeError: cond: 'pred' must be a boolean scalar
    nnx.cond(m, nothing, nothing, m)
        TypeError: 'pred' must be ... got an object, None or
    nnx.switch((0, 1), [nothing], m)
        TypeError: 'index' must be an integer scalar
    nnx.cond("x", nothing, nothing, m)
        TypeError: cond: cannot interpret argument 'pred' as
    nnx.cond(X, nothing, nothing, m)
        TypeError: Pred must be a scalar
    nnx.switch(1.5, [nothing, nothing], m)
        TypeError: Index type must be an integer
    nnx.cond(True, nothing, 3, m)
        TypeError: Expected a callable to transform, got int
    nnx.switch(0, [lambda: m], graph=False)
        ValueError: different trace level: the Foo
""")
def test_branches(line, message):
    refused(line, message, scope())
