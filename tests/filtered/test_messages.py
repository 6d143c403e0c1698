"""What the filtered functions refuse, in one table, and that the call changed nothing."""

import jax
import jax.numpy as jnp

import nnxlite as nnx
from tests.filtered.models import Tied
from tests.messages import refused, rows

X, ONES = jnp.ones((1, 3)), jnp.ones(2)
ADD = lambda x, y: x + y
COMPILED = nnx.filter_jit(lambda x, n: x * n).lower(ONES, 3).compile()
MAPPED = nnx.filter_pmap(lambda x, k: x * k).lower(ONES, 2).compile()


def scope():
    """What a line sees: new models, and all that stands on this page."""
    loop: list = []
    loop.append(loop)
    spec = nnx.List([nnx.Dict(a=nnx.Param(True))])
    spec[0].me = spec[0]
    nones = {"a": 1, "b": None, "c": None}
    made = {"model": Tied(), "loop": loop, "spec": spec, "nones": nones}
    return {**globals(), **made, "jax": jax}


def loss(model, x):
    return model(x).sum()


def same(x):
    return x


def pull(f, *args):
    return nnx.filter_vjp(f, *args)[1]


def ruled(f, cotangent=None):
    f = nnx.filter_custom_vjp(f)
    f.defvjp(lambda m: (m if cotangent is not None else None, None), lambda r, g, m: cotangent)
    return f


def ruled_jvp(rule):
    f = nnx.filter_custom_jvp(same)
    f.def_jvp(rule)
    return f


@rows("""
    nnx.filter_grad(loss)()
        TypeError: first argument, which must be given, and by
    nnx.filter_grad(loss, argnums=1)
        ValueError: takes no argnums=
    nnx.filter_grad(lambda p: 1.0, arg=True)([1.0, "a"])
        TypeError: 'p.1' is a value of type str. Differentiate only float leaves: choose
    pull(lambda x: (x, "a"), X)((None, None))
        ValueError: the cotangent at '0' is nothing
    pull(same, X)([X])
        ValueError: the cotangent at '0' is a float32[1, 3], which matches no leaf
    pull(lambda x: (x, 3.0), X)((X, 1.0))
        ValueError: at '1' is a float, but ... it must be None
    pull(same, X)(X.astype(jnp.bfloat16))
        ValueError: is bfloat16[1, 3], where float32[1, 3] needs one of its own
    jax.jvp(ruled_jvp(lambda p, t: (p[0], X > 0)), (X,), (X,))
        TypeError: is bool[1, 3], where float32[1, 3] needs one of its own
    jax.grad(lambda x: ruled(same, X.astype(int))(x).sum())(X)
        TypeError: is int32[1, 3], where float32[1, 3] needs one of its own
    nnx.filter_custom_jvp(abs)(1.0)
        AttributeError: define it with .defjvp
    nnx.filter_custom_vjp(abs)(1.0)
        AttributeError: define them with .defvjp
    ruled(lambda m: m.parts[0].set_value(m.scale))(model)
        ValueError: changes its arguments ('parts.0')
""")
def test_derivatives(line, message):
    refused(line, message, scope())


@rows("""
    nnx.filter_jit(same)({"a": [bytearray()]})
        ValueError: leaf at 'x.a.0' of the
    nnx.filter_jit(same, static_argnums=0)
        ValueError: no static_argnums=
    nnx.filter_jit(same, out=True)
        ValueError: no out=: arrays are traced
    nnx.filter_jit(ADD, donate="some")
        ValueError: it must be one of ('all', 'all-except-first', 'warn'
    COMPILED(ONES, 4)
        TypeError: filter_jit ... was compiled for arguments of another structure: n: 3 -> 4. Lower
    COMPILED(jnp.ones(4), 3)
        TypeError: filter_jit( ... ): ... compiled with
    MAPPED(ONES, 3)
        TypeError: was compiled for arguments of another structure: k: 2 -> 3. Lower
    nnx.filter_vmap(ADD, in_axes=(0, 0))(ONES, "a")
        TypeError: cannot interpret argument 'y' as an array, it is of type 'str'
    nnx.filter_vmap(ADD, in_axes=(0,))(1, 2)
        ValueError: 1 entries for 2 posit
    nnx.filter_vmap(ADD, args=(0, 0))
        ValueError: filter_vmap takes no args=: use in_
    nnx.filter_vmap(lambda x: "a", out_axes=0)(ONES)
        TypeError: out_axes: the leaf at 'result' must be traced
    nnx.filter_vmap(lambda x: {"a": [1.0, x]}, out_axes=None)(ONES)
        ValueError: batched: the result 'a.1' has axis None, and its value differs
    nnx.filter_vmap(lambda x: [x], out_axes=[lambda x: "a"])(ONES)
        ValueError: answered 'a' for the leaf at 'result.0'
    nnx.filter_vmap(same, in_axes=nnx.Param, out_axes=None)(nnx.Dict(w=nnx.Param(ONES)))
        ValueError: out_axes for a shared Param: at 'x.w' it is 0, in the result at 'w' it is None
    nnx.filter_pmap(ADD, donate="x")
        ValueError: filter_pmap: donate='x'; it must be 'all', 'warn' or 'none'
    nnx.filter_pmap(ADD, donate_argnums=0)
        ValueError: filter_pmap takes no donate_argnums=
    nnx.filter_vmap(lambda x, y=1: x, in_axes={"x": 0, "y": 0})(ONES)
        ValueError: in_axes= has a spec for the arguments ['y'], which the call does not give
    nnx.filter_shard([ONES], [3])
        ValueError: device_or_shardings must consist of shardings and dev
    nnx.error_if(ONES, True, "x", on_error="often")
        ValueError: on_error='often'
    jax.jit(lambda x: nnx.error_if("a", x > 0, "no"))(1.0)
        ValueError: no array to carry the check
""")
def test_transforms(line, message):
    refused(line, message, scope())


@rows("""
    nnx.filter([1, (2, 3)], [True, (True,)])
        ValueError: filter_spec is not a prefix of the tree
    nnx.filter([1, 2], [True, 3])
        ValueError: filter_spec must consist of booleans, callables and Variable filters only, got
            int 3 for the leaf at '1'
    nnx.filter([1], [model])
        ValueError: as filter_spec it is given to the leaf at '0', which has no Variables. Give
    nnx.filter(model, nnx.List([True]))
        ValueError: No setting found for Param at 'first.bias': the prefix of type List has nothing
    nnx.filter(model, nnx.PathContains("first"))
        ValueError: Inconsistent aliasing detected: different filter_spec for a shared Param: at
            'first.kernel' it is True, at 'second.kernel' it is False
    nnx.filter(spec, spec)
        ValueError: prefix of type List contains itself at '0.me'. Choose
    nnx.combine()
        ValueError: combine needs at least one pytree
    nnx.combine({"a": [1, 2]}, {"a": [1]})
        ValueError: combine: the trees differ in structure at 'a': one has list with 2 children
    nnx.tree_at(lambda t: t[0], [1])
        ValueError: exactly one of `replace` and `replace_fn`
    nnx.tree_at(lambda t: 7, [1], 2)
        ValueError: does not return a part of the tree, but 7
    nnx.tree_at(lambda m: m.rate, model, 2)
        ValueError: For a static attribute give its path
    nnx.tree_at(lambda m: (m.first, m.second), model, (2, 3))
        ValueError: twice; each part can be replaced once
    nnx.tree_at(lambda t: (t[0], t[0][1]), [[1, 2]], (2, 3))
        ValueError: the parts overlap: '0.1' lies inside '0'
    nnx.tree_at(lambda t: (t[0], t[1]), [1, 2], (3,))
        ValueError: sequence of 2 parts
    nnx.tree_at(lambda t: (t[0], t[1]), [1, 2], 3)
        ValueError: same length, got int
    nnx.tree_at("a.c", {"a": {"b": 1}}, 3)
        ValueError: nothing at 'a.c': dict at 'a' has no 'c'
    nnx.tree_at(lambda t: t[0][0], [1], 2)
        TypeError: it looked inside a leaf int with
    nnx.tree_at(lambda t: t["c"] if t["b"] is None else t["a"], nones, 5)
        ValueError: `where` returns a None, and it is unclear which one
    nnx.apply_updates([1, 2], [1, (2,)])
        ValueError: apply_updates: the trees differ in structure at '1'
    nnx.apply_updates([None, 1.0], [ONES, 1.0])
        ValueError: the update float32[2] belongs to a None of the model
    nnx.tree_check((lambda shared: {"a": shared, "b": (shared,)})([1]))
        ValueError: The list at 'a' appears again at 'b.0'
    nnx.tree_flatten_one_level(loop)
        ValueError: The list contains itself: it is not a tree
""")
def test_trees(line, message):
    refused(line, message, scope())
