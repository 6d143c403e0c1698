"""What the transforms refuse, in one table: the message, and that the call changed nothing."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import nnxlite as nnx
from tests.messages import refused, rows
from tests.transforms import models
from tests.transforms.models import Counted, Foo

X = jnp.array([1.0, 2.0])
BY_Y = nnx.DiffState(0, nnx.PathContains("y"))
ONLY_X = nnx.DiffState(0, "x")
WRITTEN = nnx.jit(lambda m: m.x.set_value(m.x + 1), donate="written").lower(Foo()).compile()


def scope():
    """What a line sees: new models, and all that stands on this page."""
    donated, stack = Foo(), nnx.Dict(a=nnx.Param(X), n=nnx.BatchStat(jnp.array(3.0)))
    donated.y.value = donated.x.value
    tied = nnx.clone(stack)
    tied.b = tied.a
    v = nnx.Param({"a": jnp.array(1.0), "b": jnp.array(2.0)})
    ref = nnx.Dict(r=nnx.Variable(jnp.array(1.0), ref=True), x=nnx.Param(1.0))
    made = {"m": Foo(), "k": Foo(), "counted": Counted(), "array": jnp.ones(2), "stack": stack}
    made |= {"donated": donated, "tied": tied, "v": v, "ref": ref, "np": np}
    return {**vars(models), **globals(), **made}


def two(x, y):
    return x


def keyword(x, *, k):
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


@rows("""
    nnx.jit(two, donate="all")
        ValueError: 'written' or None, got 'all'
    nnx.jit(two, donate="written", donate_argnums=0)
        ValueError: either donate='written' or donate_argnums/donate_argnames
    nnx.jit(two, static_argnums=0, donate_argnames="x")
        ValueError: jit(two) ... either static or donated ... ['x']
    nnx.jit(two, static_argnums=(0, 2))
        ValueError: static_argnums=(0, 2) is out of range ... two takes 2 positional
    nnx.jit(two, donate_argnums=-3)
        ValueError: donate_argnums=-3 is out of range
    nnx.jit(two, static_argnames="z")
        ValueError: static_argnames='z' ... two has no argument 'z' ... ['x', 'y']
    nnx.jit(keyword, donate_argnames=["k", "q"])
        ValueError: donate_argnames=['k', 'q'] ... no argument 'q' ... ['k', 'x']
    nnx.jit(two, static_argnums=1)(1, [1])
        ValueError: Static argument 'y' of two is unhashable ... 'list' ... tuple
    nnx.jit(two, static_argnums=1)(1, X)
        ValueError: Static argument 'y' of two is unhashable ... 'ArrayImpl' ... traced
    nnx.jit(two, static_argnums=1)(1, y=m.x)
        ValueError: Static argument 'y' of two holds a Param ... constants of the program ...
            traced
    nnx.jit(two, static_argnums=1)(1, (1, {"m": m}))
        ValueError: Static argument 'y' of two holds a tuple ... traced
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
            argument
    nnx.jit(lambda k: setattr(k, "other", m))(k)
        ValueError: Cannot extract graph node from different trace level
    nnx.jit(lambda x: m, graph_updates=False)(1.0)
        ValueError: from different trace level: the Foo at '<root>'
    nnx.jit(lambda x: nnx.jit(lambda m: m.x.set_value(x))(m))(5.0)
        TraceContextError: different trace level: it belongs to eager ... argument
    nnx.jit(lambda x: nnx.grad(lambda m: (m.n.set_value(x), m.x * 1.0)[1])(m))(5.0)
        TraceContextError: different trace level: it belongs to eager ... argument
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
    nnx.grad(product, argnums=-3)(m, 1.0)
        ValueError: argnums=-3 requires at least 3 positional arguments, ... with 2
    nnx.grad(product, argnums=(0, 0))(m, 1.0)
        ValueError: argnums names argument 0 twice
    nnx.grad(product, argnums=(nnx.DiffState(0, nnx.Param), BY_Y))(m, 1.0)
        ValueError: argument 0 twice ... DiffState whose filter matches all
    nnx.grad(counted.__call__, argnums=1)(1.0)
        TypeError: at least 2 positional arguments, ... called with 1
    nnx.grad(lambda: 1.0)()
        TypeError: at least 1 positional arguments, ... called with 0
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
    nnx.vjp(two, 1.0, 1.0, has_aux=True)
        TypeError: must return a pair (value, aux), got
    nnx.grad(lambda a, b: a.x * b.x)(m, m)
        ValueError: different differentiation for a shared Param
    nnx.grad(lambda a, b: a.x * b)(m, m.x)
        ValueError: shared Param: at 'a.x' it is True, at 'b' it is False
    nnx.grad(lambda m: m.a.sum(), argnums=nnx.DiffState(0, nnx.PathContains("b")))(tied)
        ValueError: at 'm.a' it is False, at 'm.b' it is True
    nnx.grad(lambda v, m: v * m.n, argnums=(0, nnx.DiffState(1, nnx.Param)))(tied.n, tied)
        ValueError: at 'v' it is True, at 'm.n' it is False
    nnx.grad(lambda m, v: v * m.n, argnums=nnx.DiffState(1, nnx.Param))(tied, tied.n)
        ValueError: at 'm.n' it is False, at 'v' it is True
    nnx.grad(lambda m: (m.x * 1, k), has_aux=True, graph_updates=False)(m)
        ValueError: different trace level: the Foo
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
    nnx.jvp(product, (m,), (nnx.State({"x": X}),))
        ValueError: tangent at 'm.x' is float32[2], where float32[] needs
    nnx.jvp(lambda a, b: a.x, (m, m), (nnx.state(m, nnx.Param), nnx.State({"x": nnx.Param(1.0)})))
        TypeError: shared by 'a.x' and 'b.x' has two different ones
    nnx.jvp(lambda v: v.value["a"], (v,), (nnx.Param({"a": 1.0}),))
        TypeError: tangent at 'v.b' is nothing
    nnx.jvp(lambda m: m.x * m.r, (ref,), (nnx.State({"r": jnp.ones(2)}),))
        ValueError: tangent at 'm.r' is float32[2], where ... its shape
""")
def test_derivatives(line, message):
    refused(line, message, scope())


@rows("""
    nnx.custom_vjp(two)(m, 1.0)
        ValueError: No VJP defined for custom_vjp function ... : call its defvjp(fwd, bwd)
    nnx.grad(nnx.custom_vjp(product))(m, 1.0)
        ValueError: No VJP defined for custom_vjp function ... : call its defvjp(fwd, bwd)
    nnx.custom_vjp(two, graph=False)(m, 1.0)
        AttributeError: No VJP defined for custom_vjp function ... : call its defvjp(fwd, bwd)
    ruled(None)(m, 2.0)
        TypeError: one cotangent for each differentiated argument, 2
    nnx.grad(rules(bwd=lambda r, g: 3.0))(m, 2.0)
        TypeError: of them, got float
    ruled(1.0, 1.0)(m, 2.0)
        TypeError: 'm' is a float, which matches no leaf. Give
    ruled(nnx.State({"x": 1.0}), 1.0)(m, 2.0)
        TypeError: at 'm.n' is nothing, where
    ruled(None, jnp.ones(2))(m, 2.0)
        ValueError: at 'x' is float32[2], where
    ruled(None, jnp.array(1))(m, 2.0)
        TypeError: at 'x' is int32[], ... own dtype
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
    rules(nondiff_argnums=(nnx.DiffState(2, ...),))(m, 1.0)
        ValueError: nondiff_argnums=2 requires at least 3 positional arguments, ... with 2
    ruled(argnums=0, nondiff_argnums=(0,))(m, 2.0)
        ValueError: 'm.x' of ... is being differentiated, but nondiff_argnums excludes it: its
            gradient would be lost. Leave it out of nondiff_argnums, or differentiate with respect
            to something else
    ruled(argnums=1, nondiff_argnums=(1,))(m, 2.0)
        ValueError: custom_vjp: 'x' of ... is being differentiated, but nondiff_argnums excludes it
    nnx.grad(rules(fails))(m, 1.0)
        ZeroDivisionError: by zero
    nnx.grad(rules(bwd=lambda r, g: 1 // 0))(m, 1.0)
        ZeroDivisionError: by zero
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
    nnx.prefix(m, {3.5: 0})
        TypeError: 3.5
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
