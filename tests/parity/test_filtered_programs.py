"""Programs in the filtered style, run by this library and by Equinox as a black box.

Values, which leaves are None, structure, and the classes of errors.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx

eqx = pytest.importorskip("equinox")

X = jnp.arange(3.0)
MLP = eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0))


class Scaled(eqx.Module):
    """A callable of the peer, to be transformed itself."""

    weight: jax.Array

    def __call__(self, x):
        return self.weight * x

    def scaled(self, x):
        return self.weight * x


SCALED = Scaled(X)


def custom_vjp(lib):
    @lib.filter_custom_vjp
    def f(args, scale):
        return args[0] * scale, args[1]

    @f.def_fwd
    def forward(perturbed, args, scale):
        return f(args, scale), (args[0],)

    @f.def_bwd
    def backward(residuals, grad, perturbed, args, scale):
        assert grad[1] is None
        return grad[0] * scale * 5, None, None

    return lib.filter_grad(lambda args: f(args, 3.0)[0].sum())((X, "a", 2))


def custom_jvp(lib, tangent=lambda t: 5 * t):
    @lib.filter_custom_jvp
    def f(x, n):
        return x * n

    @f.def_jvp
    def rule(primals, tangents):
        assert tangents[1] is None
        return f(*primals), tangent(tangents[0])

    return jax.grad(lambda x: f(x, 2).sum())(X)


MAPPED = {
    "a module": lambda lib: lib.filter_vmap(SCALED)(X),
    "a bound method": lambda lib: lib.filter_vmap(SCALED.scaled)(X),
    "a module over devices": lambda lib: lib.filter_pmap(SCALED)(X),
    "one axis for all of a module": lambda lib: lib.filter_vmap(SCALED, in_axes=0)(X),
    "a partial": lambda lib: lib.filter_vmap(jax.tree_util.Partial(jnp.add, X))(X),
    "a partial of functools": lambda lib: lib.filter_vmap(functools.partial(jnp.add, X))(X),
    "int default": lambda lib: lib.filter_vmap(lambda x, y: (x + y, 1, "a"))(X, 2.0),
    "in_axes dict": lambda lib: lib.filter_vmap(
        lambda t: t["a"] * t["b"], in_axes=({"a": 0, "b": None},)
    )({"a": X, "b": X}),
    "in_axes callable": lambda lib: lib.filter_vmap(
        lambda t: t["a"] * 2 + t["b"], in_axes=({"a": lib.if_array(0), "b": None},)
    )({"a": X, "b": 1.0}),
    "in_axes one for all": lambda lib: lib.filter_vmap(lambda a, b: a + b, in_axes=0)(X, X),
    "in_axes nonarray 0": lambda lib: lib.filter_vmap(lambda a, b: a + b, in_axes=(0, 0))(X, 1.0),
    "in_axes str": lambda lib: lib.filter_vmap(lambda a, b: a, in_axes=(0, 0))(X, "a"),
    "out 1": lambda lib: lib.filter_vmap(lambda a: (a, a * 2), out_axes=(0, 1))(jnp.ones((2, 3))),
    "out none": lambda lib: lib.filter_vmap(lambda a: (a, 3.0), out_axes=(0, None))(
        jnp.ones((2, 3))
    ),
    "out none batched": lambda lib: lib.filter_vmap(lambda a: a, out_axes=None)(jnp.ones((2, 3))),
    "out str 0": lambda lib: lib.filter_vmap(lambda a: "a", out_axes=0)(X),
    "scalar arr": lambda lib: lib.filter_vmap(lambda a: a)(jnp.array(1.0)),
    "size differ": lambda lib: lib.filter_vmap(lambda a, b: a)(jnp.ones(2), jnp.ones(3)),
    "axis size only": lambda lib: lib.filter_vmap(lambda a: a, axis_size=3)(1.0),
    "axis_size arr": lambda lib: lib.filter_vmap(lambda: jnp.ones(2), axis_size=3)(),
    "in_axes too long": lambda lib: lib.filter_vmap(lambda a: a, in_axes=(0, 0))(X),
    "in_axes too short": lambda lib: lib.filter_vmap(lambda a, b: a, in_axes=(0,))(X, X),
    "numpy scalar": lambda lib: lib.filter_vmap(lambda a, b: (a, b))(np.ones(2), np.float32(1)),
    "mlp": lambda lib: lib.filter_vmap(MLP)(jnp.ones((3, 2))),
    "mlp method": lambda lib: lib.filter_vmap(MLP.layers[0].__call__)(jnp.ones((3, 2))),
    "ensemble": lambda lib: lib.filter_vmap(lambda k: eqx.nn.MLP(2, 2, 2, 1, key=k))(
        jax.random.split(jax.random.key(0), 3)
    ),
    "decorator": lambda lib: lib.filter_vmap(in_axes=(None, 0))(lambda a, b: a + b)(X, X),
    "axis_name": lambda lib: lib.filter_vmap(
        lambda a: jax.lax.psum(a, "i"), axis_name="i", out_axes=None
    )(X),
    "spmd": lambda lib: lib.filter_vmap(lambda a: a, spmd_axis_name="i")(X),
    "NumPy passes through": lambda lib: lib.filter_vmap(lambda a, b: (a, b), out_axes=(0, None))(
        np.ones((2, 3)), 2.0
    ),
    "neg": lambda lib: lib.filter_vmap(lambda a: a, in_axes=-1, out_axes=-1)(jnp.ones((2, 3))),
    "oob": lambda lib: lib.filter_vmap(lambda a: a, in_axes=2)(jnp.ones((2, 3))),
    "returns fn": lambda lib: lib.filter_vmap(lambda a: (len, None, a))(X),
    "float in": lambda lib: lib.filter_vmap(lambda a: a, in_axes=1.5)(X),
}
JITTED = {
    "noarg": lambda lib: lib.filter_jit(lambda: 3)(),
    "struct out": lambda lib: lib.filter_jit(lambda x: {"a": x, "f": jnp.sin, "n": None})(X),
    "mlp": lambda lib: lib.filter_jit(MLP)(jnp.ones(2)),
    "mlp out": lambda lib: lib.filter_jit(lambda m: m)(MLP),
    "unhashable static": lambda lib: lib.filter_jit(lambda x: x)(bytearray(b"a")),
    "np arr": lambda lib: lib.filter_jit(lambda x: x)(np.ones(2)),
    "np scalar": lambda lib: lib.filter_jit(lambda x: x)(np.float32(2)),
    "bool concret": lambda lib: lib.filter_jit(lambda x: 1 if x else 2)(jnp.array(True)),
    "int branch": lambda lib: lib.filter_jit(lambda x: 1 if x else 2)(True),
    "static_argnums": lambda lib: lib.filter_jit(lambda x: x, static_argnums=0)(1),
    "donate_argnums": lambda lib: lib.filter_jit(lambda x: x, donate_argnums=0)(1),
    "donate bad": lambda lib: lib.filter_jit(lambda x: x, donate="yes")(1),
    "kwargs": lambda lib: lib.filter_jit(lambda x, *, y: x + y)(1, y=X),
    "missing arg": lambda lib: lib.filter_jit(lambda x: x)(),
    "inner raise": lambda lib: lib.filter_jit(lambda x: [][1])(1),
    "partial": lambda lib: lib.filter_jit(functools.partial(lambda x, y: x + y, X))(1.0),
    "eqx partial": lambda lib: lib.filter_jit(eqx.Partial(lambda x, y: x + y, X))(1.0),
    "struct": lambda lib: lib.filter_jit(lambda x: x)(jax.ShapeDtypeStruct((2,), jnp.float32)),
    "key": lambda lib: jax.random.key_data(lib.filter_jit(lambda x: x)(jax.random.key(0))),
    "lower": lambda lib: lib.filter_jit(lambda x, n: x * n).lower(X, 2).compile()(X, 2),
    "jit in vmap": lambda lib: jax.vmap(lib.filter_jit(lambda x: x * 2))(X),
    "grad of jit": lambda lib: jax.grad(lib.filter_jit(lambda x: x**2))(2.0),
    "return arg fn": lambda lib: lib.filter_jit(lambda f: f)(jnp.sin) is jnp.sin,
    "not callable": lambda lib: lib.filter_jit(3)(1),
    "nan float static": lambda lib: lib.filter_jit(lambda x: x)(float("nan")),
}
DERIVATIVES = {
    "arr": lambda lib: lib.filter_grad(lambda x: (x**2).sum())(X),
    "np": lambda lib: lib.filter_grad(lambda x: (x**2).sum())(np.ones(2, np.float32)),
    "int arr": lambda lib: lib.filter_grad(lambda x: jnp.ones(()))(jnp.arange(2)),
    "float": lambda lib: lib.filter_grad(lambda x: x**2)(2.0),
    "dict": lambda lib: lib.filter_grad(lambda t: (t["a"] ** 2).sum() * t["n"])(
        {"a": X, "n": 2, "s": "s", "i": jnp.arange(2)}
    ),
    "mlp": lambda lib: lib.filter_grad(lambda m: m(jnp.ones(2)).sum())(MLP),
    "nonscalar": lambda lib: lib.filter_grad(lambda x: x)(X),
    "int out": lambda lib: lib.filter_grad(lambda x: jnp.array(1))(X),
    "str out": lambda lib: lib.filter_grad(lambda x: "a")(X),
    "none out": lambda lib: lib.filter_grad(lambda x: None)(X),
    "aux": lambda lib: lib.filter_grad(lambda x: (x.sum(), {"s": "a", "x": x}), has_aux=True)(X),
    "aux not pair": lambda lib: lib.filter_grad(lambda x: x.sum(), has_aux=True)(X),
    "noarg": lambda lib: lib.filter_grad(lambda: 1.0)(),
    "kw": lambda lib: lib.filter_grad(lambda x, y: x.sum() * y)(X, y=3),
    "argnums": lambda lib: lib.filter_grad(lambda x, y: x.sum() * y, argnums=1)(X, 2.0),
    "vag": lambda lib: lib.filter_value_and_grad(lambda x: (x**2).sum())(X),
    "complex": lambda lib: lib.filter_grad(lambda x: jnp.real(x * x))(jnp.array(1 + 2j)),
    "complex out": lambda lib: lib.filter_grad(lambda x: x * x)(jnp.array(1 + 2j)),
    "holomorphic": lambda lib: lib.filter_grad(lambda x: x * x, holomorphic=True)(
        jnp.array(1 + 2j)
    ),
    "bf16": lambda lib: lib.filter_grad(lambda x: (x * x).sum())(jnp.ones(2, jnp.bfloat16)),
    "jvp": lambda lib: lib.filter_jvp(lambda x, y: (x * y, "a"), (X, 2.0), (X, None)),
    "jvp none": lambda lib: lib.filter_jvp(lambda x, y: (x * y, "a"), (X, 2), (X, None)),
    "jvp bad shape": lambda lib: lib.filter_jvp(lambda x: x, (X,), (jnp.ones(2),)),
    "jvp bad len": lambda lib: lib.filter_jvp(lambda x: x, (X,), ()),
    "jvp bad struct": lambda lib: lib.filter_jvp(lambda x: x["a"], ({"a": X},), ({"b": X},)),
    "jvp kwargs": lambda lib: lib.filter_jvp(lambda x, y=None: x * y, (X,), (X,), y=2.0),
    "jvp list": lambda lib: lib.filter_jvp(lambda x, y: x * y, [X, X], [X, X]),
    "vjp": lambda lib: lib.filter_vjp(lambda x, n: x * n, X, 2)[1](X),
    "vjp aux": lambda lib: (lambda o: (o[0], o[2], o[1](X)))(
        lib.filter_vjp(lambda x: (x * 2, "aux"), X, has_aux=True)
    ),
    "vjp bad struct": lambda lib: lib.filter_vjp(lambda x: [x], X)[1](X),
    "vjp bad shape": lambda lib: lib.filter_vjp(lambda x: x, X)[1](jnp.ones(2)),
    "vjp bad none": lambda lib: lib.filter_vjp(lambda x: x, X)[1](None),
    "vjp nonarr ct": lambda lib: lib.filter_vjp(lambda x: (x, "a"), X)[1]((X, "a")),
    "vjp mlp": lambda lib: lib.filter_vjp(lambda m, x: m(x), MLP, jnp.ones(2))[1](jnp.ones(2)),
    "vjp int out": lambda lib: lib.filter_vjp(lambda x: (x, jnp.arange(2)), X)[1]((X, None)),
    "jacrev": lambda lib: lib.filter_jacrev(lambda t: {"o": t["a"] * 2})({"a": X, "n": 1}),
    "jac aux": lambda lib: lib.filter_jacrev(lambda t: (t * 2, "aux"), has_aux=True)(X),
    "hess": lambda lib: lib.filter_hessian(lambda t: (t["a"] ** 3).sum())({"a": X, "n": 1}),
    "checkpoint": lambda lib: lib.filter_grad(lib.filter_checkpoint(lambda x: (x**2).sum()))(X),
    "checkpoint static": lambda lib: lib.filter_checkpoint(lambda x, s: (x, s))(X, "a"),
    "eval_shape": lambda lib: lib.filter_eval_shape(lambda x, s: (x, s, 1), X, "a"),
    "eval_shape mlp": lambda lib: lib.filter_eval_shape(
        eqx.nn.MLP, 2, 2, 4, 1, key=jax.random.key(0)
    ),
    "eval_shape struct": lambda lib: lib.filter_eval_shape(
        lambda x: x.sum(), jax.ShapeDtypeStruct((2,), jnp.float32)
    ),
    "jaxpr": lambda lib: lib.filter_make_jaxpr(lambda x, s: (x, s, 1))(X, "a")[1:],
    "closure": lambda lib: lib.filter_closure_convert(lambda x: x * X, X)(X),
    "closure other": lambda lib: lib.filter_closure_convert(lambda x: x * X, X)(jnp.ones(1)),
    "closure other dtype": lambda lib: lib.filter_closure_convert(lambda x: x * X, X)(
        jnp.arange(3)
    ),
    "callback": lambda lib: lib.filter_pure_callback(
        lambda x, s: np.asarray(x) * s,
        X,
        2,
        result_shape_dtypes=jax.ShapeDtypeStruct((3,), jnp.float32),
    ),
    "callback bad": lambda lib: lib.filter_pure_callback(
        lambda x: np.ones(2, np.float32),
        X,
        result_shape_dtypes=jax.ShapeDtypeStruct((3,), jnp.float32),
    ),
    "shard": lambda lib: lib.filter_shard((X, "a"), jax.devices()[0]),
}
TREES = {
    "apply int": lambda lib: lib.apply_updates([1.0, 2, None], [1.0, None, None]),
    "apply struct": lambda lib: lib.apply_updates([1.0, 2], [1.0]),
    "tree_at both": lambda lib: lib.tree_at(lambda t: t[0], [1, 2], 3, replace_fn=lambda x: x),
    "tree_at len": lambda lib: lib.tree_at(lambda t: (t[0], t[1]), [1, 2], (3,)),
    "tree_at none": lambda lib: lib.tree_at(lambda t: t[0], [None, 2], 3),
    "tree_at none leaf": lambda lib: lib.tree_at(
        lambda t: t[0], [None, 2], 3, is_leaf=lambda x: x is None
    ),
    "tree_at subtree": lambda lib: lib.tree_at(lambda t: t[1], [1, [2, 3]], "x"),
    "tree_at nested overlap": lambda lib: lib.tree_at(
        lambda t: (t[1], t[1][0]), [1, [2, 3]], ("x", "y")
    ),
    "tree_at attr": lambda lib: lib.tree_at(lambda t: t.foo, [1], 1),
    "tree_check ok": lambda lib: lib.tree_check([1, 2]),
    "tree_check dup": lambda lib: (lambda a: lib.tree_check([a, a]))([1]),
    "flatten1": lambda lib: lib.tree_flatten_one_level({"a": [1, 2], "b": 3})[0],
    "flatten1 leaf": lambda lib: lib.tree_flatten_one_level(1),
    "inference": lambda lib: lib.tree_inference(eqx.nn.Dropout(0.5)).inference,
    "equal 1": lambda lib: lib.tree_equal([1]),
    "equal jit": lambda lib: jax.jit(lambda a, b: lib.tree_equal(a, b))(X, X),
    "partition none spec": lambda lib: lib.partition([1, 2], None),
    "pformat": lambda lib: lib.tree_pformat({"a": X, "b": [1, "x", None, (2.0,)], "c": np.ones(2)}),
    "pformat e": lambda lib: lib.tree_pformat([[], {}, (), (1,), set(), frozenset({1})]),
    "pformat s": lambda lib: lib.tree_pformat(
        jax.ShapeDtypeStruct((2,), jnp.float32), struct_as_array=True
    ),
    "pformat s2": lambda lib: lib.tree_pformat(jax.ShapeDtypeStruct((2,), jnp.float32)),
    "pformat t": lambda lib: lib.tree_pformat(
        [X, 1, "a"], truncate_leaf=lambda x: isinstance(x, str)
    ),
    "pformat l": lambda lib: lib.tree_pformat([X], short_arrays=False),
    "pformat str": lambda lib: lib.tree_pformat({"a": "it's", "b": "line\nbreak"}),
}
RULES = {
    "custom_vjp": custom_vjp,
    "custom_jvp": custom_jvp,
    "custom_jvp without a tangent": lambda lib: custom_jvp(lib, lambda t: None),
    "no rule": lambda lib: lib.filter_custom_jvp(lambda x: x)(X),
}
TIMES = lambda x, y: x * y
MIXED = lambda x, y: (x * 2, y * 3, x * y, "a", 2.0, jnp.arange(2))
HALF = eqx.tree_at(lambda m: m.layers[1].bias, MLP, None)
BIASES = lambda m: [layer.bias for layer in m.layers if layer.bias is not None]


def rules(lib, call, fwd=None, bwd=lambda r, g, p, x, *a, **k: g * 5):
    """Differentiate a call of a function with rules, and what these were told."""
    seen = []
    f = lib.filter_custom_vjp(lambda x, *a, **k: jnp.sum(x * 2))
    f.def_fwd(
        lambda p, x, *a, **k: (seen.append((p, len(a), sorted(k))), (jnp.sum(x * 2), None))[1]
    )
    f.def_bwd(bwd)
    return jax.grad(lambda x: call(f, x))(X), repr(seen)


def converted(lib, example, *args):
    f = lib.filter_closure_convert(lambda x: (x * X, "a"), example)
    return f(*args), repr(f.in_struct), repr(f.out_struct)


def traces(lib, wrap):
    count = []
    f = lambda x: (count.append(None), (x**2).sum())[1]
    for _ in range(3):
        wrap(f)(X)
    return len(count)


PLACES = {
    "one of two empty tuples": lambda lib: lib.tree_at(lambda t: t["b"], {"a": (), "b": ()}, 5),
    "two empty tuples": lambda lib: lib.tree_at(
        lambda t: (t["a"], t["b"]), {"a": (), "b": ()}, (5, 6)
    ),
    "biases that exist": lambda lib: lib.tree_at(BIASES, HALF, replace_fn=lambda b: b * 0),
    "the one None": lambda lib: lib.tree_at(lambda t: (t[0], t[1]), [1, None], (2, 3)),
    "a None that is a leaf": lambda lib: lib.tree_at(
        lambda t: t[1], [None, None], 5, is_leaf=lambda x: x is None
    ),
    "leaves": lambda lib: lib.tree_at(jax.tree.leaves, [X, (1, None), "a"], [9, 8, 7]),
    "an array of replacements": lambda lib: lib.tree_at(lambda t: t[:2], [1, 2, 3], jnp.arange(2)),
    "text of replacements": lambda lib: lib.tree_at(lambda t: t[:2], [1, 2, 3], "ab"),
    "no places": lambda lib: lib.tree_at(lambda t: [], [1, 2, 3], []),
    "an update of None": lambda lib: type(lib.apply_updates([1.0], [None])),
}
TANGENTS = {
    "jvp of some": lambda lib: lib.filter_jvp(MIXED, (X, X), (X, None)),
    "jvp of none": lambda lib: lib.filter_jvp(MIXED, (X, X), (None, None)),
    "jvp beside a number": lambda lib: lib.filter_jvp(MIXED, (X, 2.0), (X, None)),
    "jvp of a number": lambda lib: lib.filter_jvp(MIXED, (X, 2.0), (X, 1.0)),
    "jvp beside NumPy": lambda lib: lib.filter_jvp(MIXED, (X, np.ones(3, np.float32)), (X, None)),
    "jvp with complex": lambda lib: lib.filter_jvp(jnp.sin, (X,), (X + 1j,)),
    "jvp with bfloat16": lambda lib: lib.filter_jvp(jnp.sin, (X,), (X.astype(jnp.bfloat16),)),
    "jvp with an int": lambda lib: lib.filter_jvp(jnp.sin, (1.0,), (1,)),
    "jvp with float64": lambda lib: lib.filter_jvp(jnp.sin, (X,), (np.ones(3),)),
    "vjp beside a number": lambda lib: lib.filter_vjp(lambda x: (x, 3.0), X)[1]((X, None)),
    "vjp of a number": lambda lib: lib.filter_vjp(lambda x: 3.0, X)[1](None),
    "vjp with complex": lambda lib: lib.filter_vjp(jnp.sin, X)[1](X + 1j),
    "vjp with bfloat16": lambda lib: lib.filter_vjp(jnp.sin, X)[1](X.astype(jnp.bfloat16)),
    "vjp with a number": lambda lib: lib.filter_vjp(jnp.sin, jnp.array(1.0))[1](1.0),
}
WITH_RULES = {
    "first argument": lambda lib: rules(lib, lambda f, x: f(x)),
    "another argument": lambda lib: rules(lib, lambda f, x: f(x, x)),
    "another argument in jit": lambda lib: rules(lib, lambda f, x: jax.jit(f)(X, x)),
    "a keyword": lambda lib: rules(lib, lambda f, x: f(x, y=x)),
    "constants": lambda lib: rules(lib, lambda f, x: f(x, X, 2, y="a")),
    "no gradient": lambda lib: rules(lib, lambda f, x: f(x), bwd=lambda r, g, p, x: None),
}
CONVERTED = {
    "weak": lambda lib: converted(lib, jnp.array(1.0), jnp.ones(())),
    "strong": lambda lib: converted(lib, jnp.ones(()), jnp.array(1.0)),
    "abstract": lambda lib: converted(lib, jax.ShapeDtypeStruct((3,), jnp.float32), X),
    "another dtype": lambda lib: converted(lib, X, jnp.arange(3)),
    "another number": lambda lib: converted(lib, 1.0, 2.0),
    "constants of a module": lambda lib: [
        np.shape(c) for c in lib.filter_make_jaxpr(SCALED)(X)[0].consts
    ],
    "constants of a method": lambda lib: [
        np.shape(c) for c in lib.filter_make_jaxpr(SCALED.scaled)(X)[0].consts
    ],
    "compiler options": lambda lib: (
        lib.filter_jit(jnp.sin)
        .lower(X)
        .compile(compiler_options={"xla_cpu_enable_fast_math": True})(X)
    ),
}
BY_NAME = {
    "by name": lambda lib: lib.filter_vmap(TIMES, in_axes={"x": 0, "y": None})(X, X),
    "one name": lambda lib: lib.filter_vmap(TIMES, in_axes={"y": None})(X, X),
    "names of a method": lambda lib: lib.filter_vmap(SCALED.scaled, in_axes={"x": 0})(X),
    "names of a module": lambda lib: lib.filter_vmap(SCALED, in_axes={"x": None}, axis_size=2)(X),
    "no name of a method": lambda lib: lib.filter_vmap(SCALED.scaled, in_axes={"self": 0})(X),
    "another name": lambda lib: lib.filter_vmap(TIMES, in_axes={"z": None})(X, X),
    "a name not given": lambda lib: lib.filter_vmap(lambda x, y=1: x, in_axes={"y": 0})(X),
    "pmap by name": lambda lib: lib.filter_pmap(TIMES, in_axes={"y": None})(X, X),
    "pmap with a size": lambda lib: lib.filter_pmap(lambda: jnp.ones(2), axis_size=2)(),
    "pmap over an axis of no array": lambda lib: lib.filter_pmap(
        lambda x, y, z: (x, y, z), in_axes=0
    )(X, 2.0, "a"),
    "pmap over an axis of a NumPy scalar": lambda lib: lib.filter_pmap(TIMES, in_axes=0)(
        X, np.float32(2)
    ),
    "pmap of a number": lambda lib: lib.filter_pmap(lambda x: x * 2, axis_size=2)(2.0),
    "pmap without an axis": lambda lib: lib.filter_pmap(lambda x: x)(jnp.array(1.0)),
    "pmap ahead of time": lambda lib: (
        lib.filter_pmap(lambda x, n: (x * n, n)).lower(X, 2).compile()(X, 2)
    ),
}
LOOPS = {
    "grad": lambda lib: traces(lib, lambda f: lib.filter_jit(lib.filter_grad(f))),
    "checkpoint": lambda lib: traces(lib, lambda f: lib.filter_jit(lib.filter_checkpoint(f))),
    "vmap": lambda lib: traces(lib, lambda f: lib.filter_jit(lib.filter_vmap(f))),
}
GROUPS = {
    "places": PLACES,
    "tangents": TANGENTS,
    "with rules": WITH_RULES,
    "converted": CONVERTED,
    "by name": BY_NAME,
    "loops": LOOPS,
    "mapped": MAPPED,
    "jitted": JITTED,
    "derivatives": DERIVATIVES,
    "trees": TREES,
    "rules": RULES,
}
PROGRAMS = {f"{group} {name}": f for group, table in GROUPS.items() for name, f in table.items()}


def plain(value):
    """A leaf in a form that `==` compares."""
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return repr(value) if isinstance(value, float) else value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return type(value), str(value.dtype), jnp.asarray(value, jnp.complex64).round(4).tolist()


def outcome(program, lib):
    try:
        leaves, treedef = jax.tree.flatten(program(lib))
    except Exception as error:
        return type(error)
    return [plain(leaf) for leaf in leaves], treedef


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_do_the_same(name):
    assert outcome(PROGRAMS[name], nnx) == outcome(PROGRAMS[name], eqx)
