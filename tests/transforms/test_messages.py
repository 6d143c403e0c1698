"""What the transforms refuse, in one table: the message, and that the call changed nothing."""

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
BY_Y = nnx.DiffState(0, nnx.PathContains("y"))
ONLY_X = nnx.DiffState(0, "x")
WRITTEN = nnx.jit(lambda m: m.x.set_value(m.x + 1), donate="written").lower(Foo()).compile()


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
    donated, stack = Foo(), nnx.Dict(a=nnx.Param(X), n=nnx.BatchStat(jnp.array(3.0)))
    donated.y.value = donated.x.value
    tied, loop = nnx.clone(stack), nnx.Dict(w=nnx.data(0))
    tied.b, loop.me = tied.a, loop
    ref = nnx.Dict(r=nnx.Variable(jnp.array(1.0), ref=True), x=nnx.Param(1.0))
    made = {"m": Foo(), "k": Foo(), "array": jnp.ones(2), "stack": stack, "loop": loop, "ref": ref}
    made |= {"donated": donated, "tied": tied, "wide": Wide(), "eight": Wide(8)}
    return {**vars(models), **globals(), **made, "jax": jax, "np": np, "P": P}


def two(x, y):
    return x


def call(m, x):
    return m(x)


def product(m, x=1.0):
    return m.x**2 * m.y * x


def rules(fwd=None, bwd=lambda r, g: (None, None), fun=lambda m, x: m.x * x, **options):
    """A function with rules."""
    f = nnx.custom_vjp(fun, **options)
    f.defvjp(fwd or (lambda m, x: (f(m, x), None)), bwd)
    return f


def ruled(*cotangents, argnums=(0, 1), **options):
    """The gradient of it, with a rule that returns the cotangents."""
    return nnx.grad(rules(bwd=lambda r, g: cotangents, **options), argnums=argnums)


def keyword_only(m, *, k):
    return m.x * k


def writes_n(m, x):
    m.n[...] = 1.0
    return m.x * x, None


def by_reference(m):
    m.r[...] = m.r * 2
    return m.x * m.r[...]


def pull(f, *args):
    return nnx.vjp(f, *args)[1]


def writes_text(m):
    m.a.value = "x"
    return m


def text_in_place(m):
    m.n = "new"
    return m


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
    nnx.jit(two, donate="all")
        ValueError: 'written' or None, got 'all'
    nnx.jit(two, donate="written", donate_argnums=0)
        ValueError: either donate='written' or donate_argnums/donate_argnames
    nnx.jit(two, static_argnums=0, donate_argnames="x")
        ValueError: jit(two) ... either static or donated ... ['x']
    nnx.jit(two, static_argnums=(0, 2))
        ValueError: static_argnums=(0, 2) is out of range ... two takes 2 positional
    nnx.jit(two, static_argnames="z")
        ValueError: static_argnames='z' ... two has no argument 'z' ... ['x', 'y']
    nnx.jit(two, static_argnums=1)(1, [1])
        ValueError: Static argument 'y' of two is unhashable ... 'list' ... tuple
    nnx.jit(two, static_argnums=1)(1, X)
        ValueError: Static argument 'y' of two is unhashable ... 'ArrayImpl' ... traced
    nnx.jit(two, static_argnums=1)(1, y=m.x)
        ValueError: Static argument 'y' of two holds a Param ... constants of the program ...
            traced
    nnx.jit(two, donate="written")({"k": [X, object()]}, 1)
        TypeError: jit(two): cannot interpret argument 'x.k.1' ... 'object' ... Use nnx.filter_jit
    nnx.jit(two)(lambda: 1, 1)
        TypeError: jit(two): cannot interpret argument 'x' ... 'function' ... static_argnums
    nnx.jit(two)(1, 2, 3)
        TypeError: two() takes 2 positional arguments but 3 were given
    nnx.jit(lambda x: x, out_shardings=(None, None))(jnp.ones(8))
        ValueError: out_shardings is not a prefix of the result
    nnx.jit(lambda: m)()
        ValueError: Cannot extract graph node from different trace level ... returned or stored ...
            argument ... or return a copy: nnx.clone(captured)
    nnx.jit(lambda x: m, graph_updates=False)(1.0)
        ValueError: from different trace level: the Foo at '<root>'
    nnx.jit(lambda x: nnx.jit(lambda m: m.x.set_value(x))(m))(5.0)
        TraceContextError: different trace level: it belongs to eager ... argument
    nnx.jit(writes_text)(stack)
        TypeError: jit(writes_text) stored a value of type 'str' at 'm.a', which is not a valid JAX
            type
    nnx.checkify(text_in_place)(stack)
        TypeError: checkify(text_in_place) stored a value of type 'str' at 'm.n'
    nnx.cond(True, text_in_place, text_in_place, stack)
        TypeError: cond(text_in_place) stored a value of type 'str' at 'm.n'
    nnx.fori_loop(0, 2, lambda i, m: text_in_place(m), stack)
        TypeError: fori_loop ... stored a value of type 'str' at 'm.n'
    nnx.jit(lambda m: m.x.set_value(m.x + 1), donate="written")(donated)
        ValueError: donated at 'm.x' and used at 'm.y'. A donated buffer can be used once
    WRITTEN(donated)
        ValueError: donated at 'm.x' and used at 'm.y'. A donated buffer can be used once
    nnx.filter_jit(lambda x, y: x + y, donate="all")(array, array)
        ValueError: donated at 'x' and used at 'y'
    nnx.remat(two, static_argnums=5)(m, 1.0)
        ValueError: static_argnums has 5, but the call has 2 positional
    nnx.jit_partial(lambda pair: pair[0].x, [m, m.x], graph=False)
        ValueError: Duplicate Param found at paths: '0.x', '1' ... graph=False
    nnx.cached_partial(nnx.jit(call), m, graph=False)
        ValueError: cached_partial is a graph-mode-only API
    nnx.cached_partial(nnx.jit(adds), m)()
        ValueError: The graph structure of a Foo was changed ... 'new'
    nnx.cached_partial(nnx.jit(annotates), m)()
        ValueError: The graph structure of a Param was changed ... 'metadata'
    nnx.cached_partial(adds, m)()
        ValueError: The graph structure of a Foo was changed ... 'found after the call'
""")
def test_jit(line, message):
    refused(line, message, scope())


@rows("""
    nnx.grad(product)("text")
        TypeError: grad requires real- or complex-valued inputs ... argument 'm' is a value of type
            str ... DiffState(argnum, filter) ... allow_int=True
    nnx.grad(two)({"a": [1.0, 2]}, 1.0)
        TypeError: argument 'x.a.1' is a value of type int
    nnx.grad(two)("float32", 1.0)
        TypeError: argument 'x' is a value of type str
    nnx.grad(two)(nnx.state(nnx.Rngs(0), nnx.RngKey), 1.0)
        TypeError: argument 'x.default.key' is key<fry>
    nnx.grad(product, holomorphic=True)(m)
        TypeError: holomorphic=True requires inputs with complex dtype
    nnx.grad(lambda m: 1)(m)
        TypeError: real-valued outputs ... but got int
    nnx.grad(product, argnums="0")(m, 1.0)
        TypeError: an int, a DiffState, or a sequence of these, got '0' of type str
    nnx.grad(product, argnums=())(m, 1.0)
        ValueError: argnums is empty
    nnx.grad(product, argnums=3)(m, 1.0)
        TypeError: argnums=3 requires at least 4 positional arguments, ... called with 2
    nnx.grad(product, argnums=(0, -2))(m, 1.0)
        ValueError: argnums names argument 0 twice
    nnx.grad(product, argnums=(nnx.DiffState(0, nnx.Param), BY_Y))(m, 1.0)
        ValueError: argument 0 twice ... DiffState whose filter matches all
    nnx.grad(product, argnums=(BY_Y, 1), graph=False)(m, 1.0)
        ValueError: cannot contain `DiffState` objects when `graph=False` or ... got
            DiffState(argnum=0,
    nnx.grad(lambda m: (m.n.set_value(9.0), 1.0)[1], has_aux=True)(m)
        TypeError: has_aux=True ... must return a pair (value, aux), got float
    nnx.grad(lambda m: (1.0, 2.0, 3.0), has_aux=True)(m)
        ValueError: has_aux=True ... must return a pair (value, aux), got tuple of 3
    nnx.grad(lambda m: {"loss": m.x, "note": "text"})(m)
        TypeError: scalar-output functions, and this one returned a value of type 'dict'. Return a
    nnx.vjp(lambda m: {"a": m.x, "b": ["text"]}, m)
        TypeError: returned a value of type 'str' at 'b.0', which is not ... Return arrays
    nnx.jvp(lambda x: "text", (1.0,), (1.0,))
        TypeError: returned a value of type 'str', which is not a valid JAX type. Return arrays
    nnx.grad(lambda a, b: a.x * b)(m, m.x)
        ValueError: shared Param: at 'a.x' it is True, at 'b' it is False
    nnx.grad(lambda m: m.a.sum(), argnums=nnx.DiffState(0, nnx.PathContains("b")))(tied)
        ValueError: at 'm.a' it is False, at 'm.b' it is True
    nnx.grad(lambda v, m: v * m.n, argnums=(0, nnx.DiffState(1, nnx.Param)))(tied.n, tied)
        ValueError: at 'v' it is True, at 'm.n' it is False
    pull(lambda m: {"m": m}, m)({"m": nnx.State({"z": nnx.Param(1.0)})})
        ValueError: cotangent at 'm.z' is a float, which matches
    pull(lambda m: {"m": m}, m)({"m": nnx.Dict(x=nnx.Param(1.0))})
        ValueError: cotangent at 'm.n' is nothing, where the float32
    pull(lambda m: {"m": m}, m)({"m": 3.0})
        ValueError: cotangent at 'm' is a float, which matches no leaf ... a State may stand
    pull(lambda m: {"m": m}, m)({"m": nnx.State({"x": jnp.array(1)})})
        TypeError: 'm.x' is int32[], ... needs one of its own
    pull(by_reference, nnx.clone(ref))(1.0)
        ValueError: vjp(by_reference): 'm.r' is an array refer ... to_arr
    nnx.jvp(two, 1.0, 1.0)
        TypeError: must be tuples or lists
    nnx.jvp(two, (1.0, 1.0), (1.0,))
        TypeError: 2 primals and 1 tangents; give one
    nnx.jvp(two, (1.0, 1.0), (X, 1.0))
        ValueError: at 'x' is float32[2], where float needs one of its
    nnx.jvp(two, (1, 1.0), (1, 1.0))
        TypeError: at 'x' is a int, but ... not differentiated: it must be None
    nnx.jvp(product, (m,), (nnx.Dict(x=1.0),))
        TypeError: at 'm.n' is nothing, where
    nnx.jvp(lambda a, b: a.x, (m, m), (nnx.state(m, nnx.Param), nnx.State({"x": nnx.Param(1.0)})))
        TypeError: shared by 'a.x' and 'b.x' has two different ones
    nnx.jvp(lambda m: m.x * m.r, (ref,), (nnx.State({"r": jnp.ones(2)}),))
        ValueError: tangent at 'm.r' is float32[2], where ... its shape
""")
def test_derivatives(line, message):
    refused(line, message, scope())


@rows("""
    nnx.custom_vjp(two)(m, 1.0)
        ValueError: No VJP defined for custom_vjp function ... : call its defvjp(fwd, bwd)
    nnx.custom_vjp(two, graph=False)(m, 1.0)
        AttributeError: No VJP defined for custom_vjp function ... : call its defvjp(fwd, bwd)
    ruled(None)(m, 2.0)
        TypeError: one cotangent for each differentiated argument, 2
    nnx.grad(rules(bwd=lambda r, g: 3.0))(m, 2.0)
        TypeError: of them, got float
    nnx.grad(rules(product))(m, 2.0)
        TypeError: must return a pair (result, residual)
    nnx.jit(nnx.grad(nnx.jit(rules(writes_n))))(m, 2.0)
        TypeError: the function itself, but it writes 'm.n'
    rules(fun=keyword_only)(m, k=2.0)
        TypeError: arguments ['k'] of ... can only be given by keyword
    rules(nondiff_argnums=ONLY_X, graph_updates=False)(m, 1.0)
        ValueError: `nondiff_argnums` cannot contain `DiffState` objects when
    rules(nondiff_argnums=(2,))(m, 1.0)
        ValueError: nondiff_argnums=2 requires at least 3 positional arguments, ... with 2
    ruled(argnums=0, nondiff_argnums=(0,))(m, 2.0)
        ValueError: 'm.x' of ... is being differentiated, but nondiff_argnums excludes it: its
            gradient would be lost. Leave it out of nondiff_argnums, or differentiate with respect
            to something else
""")
def test_custom_vjp(line, message):
    refused(line, message, scope())


@rows("""
    nnx.to_tree(m, ctxtag="gone")
        ValueError: No update context found for tag 'gone'
    nnx.to_tree((m, {"a": m}), prefix=(0, 1))
        ValueError: Inconsistent aliasing detected: ... '0.y' it is 0, at '1.a.y' it is 1
    nnx.to_tree((m, 1), prefix=(0, 1, 2))
        ValueError: prefix is not a prefix of the tree
    nnx.from_tree(nnx.to_tree((m, 2.0)), map_non_graph_nodes=True)
        ValueError: Expected NodeStates at '1', got float. Pass a merge_fn
    nnx.NodeStates.from_states(nnx.state(m)).graphdef
        ValueError: No graphdef available
    nnx.NodeStates.from_split(*nnx.split(m, nnx.Param, ...)).state
        ValueError: Expected exactly one state, got 2
    nnx.prefix({"m": m}, {nnx.Param: 0})
        ValueError: No setting found for BatchStat at 'm.n': none of the filters (<cl
    nnx.vmap(nothing, in_axes=(nnx.prefix(nnx.Dict(a=stack.a), {...: 0}, graph=False),))(stack)
        ValueError: No setting found for BatchStat at 'n': ... Dict has
    nnx.vmap(nothing, in_axes=(nnx.prefix(stack, {...: 0}, graph=False),))(nnx.Dict(a=stack.a))
        ValueError: of type Dict has 0 at 'n', where the argument has nothing
    nnx.vmap(nothing, in_axes=(nnx.Param(0),))(stack)
        ValueError: Variables prefixes are not supported: found a Param
    nnx.vmap(two, in_axes=(nnx.prefix(stack, {...: 0}, graph=False), 0))(X, X)
        ValueError: Cannot use Dict({'a': 0, 'n': 0}) on non-graph node
    nnx.vmap(lambda x: (x, x), out_axes=(0, nnx.StateAxes({...: 0})))(X)
        ValueError: as out_axes it is given to the leaf at '1', which has
    nnx.jit(lambda x: x, out_shardings=nnx.StateSharding({...: None}))(X)
        ValueError: as out_shardings it is given to the leaf at '<root>'
""")
def test_prefixes(line, message):
    refused(line, message, scope())


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
    nnx.vmap(call, out_axes=nnx.StateAxes({...: 1.5}))
        TypeError: vmap out_axes must be an int, None, or ... but got ... of type
    nnx.vmap(lambda a, b, x: a(x), in_axes=(0, None, 0))(wide, {"m": wide}, XS)
        ValueError: different in_axes for a shared Param: at 'a.w' it is 0, at 'b.m.w' it is None
    nnx.vmap(call, in_axes=(0, 0))(wide)
        TypeError: missing a required argument: 'x'
    nnx.vmap(lambda m: m.w, in_axes=(loop,))(loop)
        ValueError: prefix of type Dict contains itself at 'me'. Choose
    nnx.pmap(call, in_axes=(None, 0))(eight, jnp.ones(9))
        ValueError: partitioned 8 times, but the dimension size is 9
    nnx.pmap(call, static_broadcasted_argnums=4)(eight, jnp.ones(8))
        ValueError: pmap(call): static_broadcasted_argnums has 4, but the call has 2
    nnx.pmap(call, static_broadcasted_argnums=0)(eight, jnp.ones(8))
        ValueError: Static argument 'm' of call holds a Wide
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
    sharded(call, (nnx.StateSharding({nnx.BatchStat: P()}), P()), P())(m, jnp.ones(8))
        ValueError: No sharding found for Param at 'x'
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
    nnx.scan(lambda x, c: steps(c, x)[1], in_axes=(0, None), out_axes=0)(XS, m)
        ValueError: the body writes 'c.n', which is broadcast (axis None): the writes of the
            iterations would be lost. Carry it, ... or give it an axis
    nnx.scan(count, length=5)(m, XS)
        ValueError: `length` argument of 5 which disagrees ... [3] (3 at 'x'). Leave `length` out
    nnx.scan(count, in_axes=(CARRY, None))(m, XS)
        ValueError: no values to scan over and `length` not provided. Pass length
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
    nnx.scan(count, in_axes=CARRY, out_axes=CARRY, length=2)(1.0, 2.0)
        ValueError: in_axes=Carry the one argument is the carry, got 2
    nnx.scan(count, in_axes=CARRY, out_axes=CARRY, length=2)(1.0, x=2.0)
        ValueError: such as in_axes=(nnx.Carry, None)
    nnx.scan(count)(m, {"k": m})
        ValueError: different in_axes for a shared Param: at 'c.y' it is Carry, at 'x.k.y' it is 0
    nnx.scan(lambda c, x: c)(m, XS)
        ValueError: out_axes is not a prefix of the result: out_axes=(Carry, 0) has the structure
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
    nnx.while_loop(always, lambda m: nnx.clone(m), m)
        ValueError: same reference and pytree structure, ... puts a new Foo in the place of 'm'
    nnx.while_loop(always, lambda m: m.x * 1, m)
        ValueError: at 'm' the input is an object, the output an array
    nnx.while_loop(always, lambda m: None, m)
        ValueError: the output is None in place of the Foo
    carried(adds, m)
        TypeError: scan body function carry input ... ['new'] of 'm' ... Do this before the loop
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
    nnx.fori_loop(0, jnp.int32(2), over(exchanges), m)
        TypeError: the body puts 'c.y' in the place of 'c.x'
    nnx.fori_loop(0, 2, lambda i, c: (nnx.Param(c[0] * 1), c[1]), (m.x, m))
        TypeError: carry that is shared
    nnx.fori_loop(0, 2, lambda i, c: (c[0], nnx.Variable(c[1])), (m, 1.0))
        TypeError: 1' the input is an array, the output an
    nnx.fori_loop(0, 2, lambda i, c: (c[0], nnx.clone(c[1])), (m, m))
        TypeError: that is shared with another, at 'c.1'
    nnx.while_loop(lambda m: steps(m).n < 3, steps, m)
        ValueError: cond_fun ( ... ) changed its argument. Only body_fun
    nnx.while_loop(lambda m: m.n, steps, m)
        TypeError: cond_fun must return a boolean scalar, but got ... float32
    nnx.fori_loop("0", 3, over(nothing), m)
        TypeError: fori_loop: cannot interpret argument 'lower' as an array, it is of
    nnx.fori_loop(jnp.float32(0), jnp.int32(3), over(nothing), m)
        TypeError: lower and upper arguments to fori_loop must have equal
    jax.jit(lambda n: nnx.fori_loop(0, n, over(nothing), 0, unroll=2))(3)
        ValueError: `unroll` in `fori_loop` if the loop bounds are statically
    nnx.while_loop(always, adds, m, graph=False)
        ValueError: the body changes attributes ['new'] of
    nnx.fori_loop(0, 2, over(rebinds), m, graph=False)
        ValueError: Variable identity must be preserved across iterations, but the body puts
            another Variable in the place of 'c.x' ... write into the Variable
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
    nnx.switch(0, [], m)
        ValueError: switch needs at least one branch
    nnx.cond(None, nothing, nothing, m)
        TypeError: cond: 'pred' must be a boolean scalar
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
