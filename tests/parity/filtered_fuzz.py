"""Random programs in the filtered style, as text, and what of their results is compared.

A program is a list of lines.  It sees `lib` (one of the libraries), modules made with it, and the
helpers below.  Each line is run by itself: what it assigns, or that it raises, is an outcome, and the
program goes on.  The same seed gives the same program.
"""

from __future__ import annotations

import collections
import functools
import random
import re
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

Point = collections.namedtuple("Point", "x y")


@functools.cache
def modules(lib: tp.Any) -> dict[str, tp.Any]:
    """The modules of the programs, their fields in alphabetical order: dataclasses of either library."""
    options: dict[str, tp.Any] = {"frozen": True} if lib.__name__ == "nnxlite" else {}

    class Layer(lib.Module, **options):
        scale: tp.Any
        shift: tp.Any = None

        def __call__(self, x):
            return self.scale * x if self.shift is None else self.scale * x + self.shift

        def twice(self, x):
            return self(self(x))

    class Tagged(lib.Module, **options):
        body: tp.Any
        label: str = lib.field(static=True, default="a")
        post: tp.Any = jnp.tanh

        def __call__(self, x):
            return self.post(self.body(x)) if callable(self.body) else self.post(x)

    class Scaled(lib.Module, **options):
        factor: tp.Any = lib.field(converter=jnp.asarray)
        power: int = 2

        def __call__(self, x):
            return self.factor * x**self.power

    for cls in (Layer, Tagged, Scaled):
        cls.__qualname__ = cls.__name__
    return {"Layer": Layer, "Tagged": Tagged, "Scaled": Scaled}


def is_float(x: tp.Any) -> bool:
    """Whether a leaf is a floating-point or complex array, or such a number."""
    return isinstance(x, (float, complex)) or (
        hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
    )


def total(*trees: tp.Any) -> tp.Any:
    """A real number that depends on every floating-point leaf."""
    parts = [jnp.real(jnp.sum(x * x)) for x in jax.tree.leaves(trees) if is_float(x)]
    return sum(parts, jnp.zeros(()))


def scaled(tree: tp.Any, factor: tp.Any) -> tp.Any:
    """The tree with its floating-point leaves multiplied."""
    return jax.tree.map(lambda x: x * factor if is_float(x) else x, tree)


def first(tree: tp.Any) -> tp.Any:
    """The first array of a tree, or zero."""
    return next((x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")), jnp.zeros(()))


def again(tree: tp.Any) -> tp.Any:
    """A copy of a tree: a module that is found twice is one in this library, and two in the peer."""
    return jax.tree.map(lambda x: x, tree)


def data(tree: tp.Any) -> tp.Any:
    """The arrays of a tree: in the container of a module, all else is static in this library."""
    return [x for x in jax.tree.leaves(tree) if isinstance(x, (jax.Array, np.ndarray))]


def pair(t: tp.Any, u: tp.Any) -> tp.Any:
    """Something of two trees."""
    return first(t), u


def arrays(tree: tp.Any) -> tp.Any:
    """The tree with arrays of JAX for those of NumPy, which `error_if` may give back as they are."""
    return jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, (np.ndarray, np.generic)) else x, tree
    )


def even(tree: tp.Any) -> tp.Any:
    """Every second leaf, as places for `tree_at`."""
    return jax.tree.leaves(tree)[::2]


def ones(tree: tp.Any) -> tp.Any:
    """A tangent or cotangent for a tree: ones at floating-point arrays, None elsewhere."""
    given = lambda x: isinstance(x, (jax.Array, np.ndarray, np.generic)) and is_float(x)
    return jax.tree.map(lambda x: jnp.ones_like(x) if given(x) else None, tree)


def none(tree: tp.Any) -> tp.Any:
    """A tangent of what is constant."""
    return jax.tree.map(lambda x: None, tree)


def traces(fun: tp.Any, arguments: tp.Sequence[tp.Any], lib: tp.Any) -> tp.Any:
    """Results of `filter_jit` made anew for each call, and how often the function was traced."""
    count = 0

    def counted(t: tp.Any) -> tp.Any:
        nonlocal count
        count += 1
        return fun(t)

    wrapped = lambda: lib.filter_jit(lib.filter_checkpoint(counted))
    return [wrapped()(t) for t in arguments], count


HELPERS = {
    "jax": jax,
    "leaves": jax.tree.leaves,
    "jnp": jnp,
    "np": np,
    "functools": functools,
    "Point": Point,
    "total": total,
    "scaled": scaled,
    "first": first,
    "again": again,
    "arrays": arrays,
    "data": data,
    "even": even,
    "none": none,
    "ones": ones,
    "pair": pair,
    "traces": traces,
}


# Programs -----------------------------------------------------------------------------------------

FLOATS = [
    "jnp.arange(3.0)",
    "jnp.ones((3, 2))",
    "jnp.array(2.0)",
    "jnp.ones(())",
    "jnp.ones(3, jnp.bfloat16)",
    "jnp.array([1j, 2.0, 3.0])",
    "np.arange(3, dtype=np.float32)",
    "np.ones((3, 2))",
    "shared",
    "shared",
    "np.float32(2)",
]
OTHERS = ["jnp.arange(3)", "jnp.array(True)", "np.arange(3)", "jnp.ones(0)", "np.int32(3)"]
NUMBERS = ["1", "2.0", "True", "1j", "0.5"]
STATICS = ['"a"', "None", "jnp.sin", "()", "{}", "[]"]
SPECS = [
    "True",
    "False",
    "lib.is_array",
    "lib.is_inexact_array",
    "lib.is_array_like",
    "lib.is_inexact_array_like",
    "lambda x: isinstance(x, (int, float))",
    "jax.tree.map(lambda x: hasattr(x, 'ndim') and x.ndim == 1, {t})",
    "jax.tree.map(lib.is_inexact_array, {t})",
    "jax.tree.map(lambda x: lib.is_array, {t})",
    "None",
]
PLACES = [
    "lambda t: jax.tree.leaves(t)[0]",
    "lambda t: jax.tree.leaves(t)[-1]",
    "even",
    "lambda t: jax.tree.leaves(t)[:2]",
    "lambda t: t",
    "lambda t: []",
    "lambda t: tuple(jax.tree.leaves(t))",
    "lambda t: jax.tree.leaves(t, is_leaf=lambda x: x is None)",
]
AXES = ["lib.if_array(0)", "0", "None", "1", "lib.if_array(1)"]
PREDICATES = ["total({t}) > 1e6", "jnp.array(False)", "False", "total({t}) > 0"]


class Writer:
    """Writes one program."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = ["shared = jnp.array([1.0, -2.0, 0.5])"]
        self.trees: list[str] = []
        self.functions: list[str] = []

    def pick(self, options: tp.Sequence[str], **names: str) -> str:
        """One of some texts, with names filled in."""
        text = self.random.choice(options)
        for name, value in names.items():
            text = text.replace("{" + name + "}", value)
        return text

    def leaf(self, held: bool) -> str:
        """One leaf; in the container of an object only data is one in this library."""
        kinds = [FLOATS[:-1], OTHERS[:-1]] if held else [FLOATS, OTHERS, NUMBERS, STATICS]
        return self.pick(self.random.choices(kinds, [6, 1, 2, 2][: len(kinds)])[0])

    def tree(self, depth: int = 2, held: bool = False) -> str:
        """The text of a tree; `held` by a module or not."""
        if depth == 0 or self.random.random() < 0.15:
            return self.leaf(held)
        kind = self.random.randrange(8)
        held = held or kind > 4
        below = [self.tree(depth - 1, held) for _ in range(self.random.choice([1, 2, 2, 3]))]
        if kind <= 1:
            return "{" + ", ".join(f'"{k}": {v}' for k, v in zip("abc", below)) + "}"
        if kind == 2:
            return "[" + ", ".join(below) + "]"
        if kind == 3:
            return "(" + ", ".join(below) + ",)"
        if kind == 4:
            return f"Point({below[0]}, {below[-1]})"
        if kind == 5:
            return f"Layer({self.pick(FLOATS)}, {below[0]})"
        if kind == 6:
            return f'Tagged({below[0]}, label="{self.random.choice("ab")}")'
        return f"Scaled({self.pick(FLOATS)}, {self.pick(NUMBERS)})"

    def spec(self, tree: str) -> str:
        """A filter spec for a tree."""
        return self.pick(SPECS, t=tree)

    def scalar(self) -> str:
        """A function of a tree that returns a real number."""
        return self.pick(
            [
                "total",
                "lambda t: total(t)",
                "lambda t: total(scaled(t, 2.0)) / 3",
                "lambda t: total(first(t)) + 1.0",
                "lib.filter_jit(total)",
                "lib.filter_checkpoint(total)",
                "lambda t: lib.filter_jit(total)(scaled(t, 0.5))",
                "lambda t: total(lib.filter_grad(total)(t))",
                "lambda t: lib.filter_value_and_grad(total)(t)[0]",
                "rule_vjp",
                "rule_jvp",
                "lambda t: rule_vjp((t, 2)) + total(t)",
                "lambda t: total(rule_jvp(t), shared)",
                "lambda t: total(lib.filter_vmap(lambda x: x * 2)(first(t)))",
                "lambda t: lib.error_if(total(t), total(t) < 0, 'negative')",
            ]
        )

    def function(self, depth: int = 2) -> str:
        """A function of a tree that returns a tree."""
        if depth == 0 or self.random.random() < 0.3:
            return self.pick(
                [
                    "lambda t: scaled(t, 2.0)",
                    "lambda t: (total(t), t)",
                    'lambda t: {"y": total(t), "n": 3, "s": "a", "z": None}',
                    "lambda t: [first(t), 1.5, np.ones(2, np.float32)]",
                    "lambda t: (first(t) * shared, jnp.arange(2))",
                    "lambda t: Layer(first(t), data(t))",
                    "lambda t: Tagged(Layer(first(t)))(2.0)",
                    "Layer(jnp.ones(3), shared)",
                    "Layer(jnp.array(2.0)).twice",
                    "Scaled(1.5, 2)",
                    "functools.partial(lambda a, t: (a, total(t)), shared)",
                    "lambda t: 3.0",
                    "lambda t: None",
                ]
            )
        inner, scalar = self.function(depth - 1), self.scalar()
        return self.pick(
            [
                "lib.filter_jit({f})",
                "lib.filter_jit({f}, donate='none')",
                "lib.filter_checkpoint({f})",
                "lambda t: ({f})(({g})(t))",
                "lib.filter_vmap({f})",
                "lib.filter_vmap({f}, in_axes={axis}, out_axes={out})",
                "lib.filter_vmap({f}, axis_size=3)",
                "lib.filter_vmap({f}, in_axes=({axis},))",
                "lib.filter_pmap({f})",
                "lib.filter_pmap({f}, in_axes={axis}, axis_size=3)",
                "lib.filter_grad({s})",
                "lib.filter_value_and_grad({s})",
                "lib.filter_grad(lambda t: (({s})(t), ({f})(t)), has_aux=True)",
                "lib.filter_value_and_grad(lambda t: (({s})(t), ({f})(t)), has_aux=True)",
                "lib.filter_jacfwd({s})",
                "lib.filter_jacrev({s})",
                "lib.filter_jacrev(lambda t: lib.filter(({f})(t), lib.is_inexact_array))",
                "lib.filter_jacfwd(lambda t: lib.filter(({f})(t), lib.is_inexact_array))",
                "lib.filter_hessian({s})",
                "lambda t: lib.filter_jvp({f}, (t,), (ones(t),))",
                "lambda t: lib.filter_jvp(lambda t, u: ({s})((t, u)), (t, again(t)), (ones(t), {none}))",
                "lambda t: lib.filter_vjp({f}, t)[0]",
                "lambda t: lib.filter_vjp({s}, t)[1](jnp.ones(()))",
                "lambda t: (lambda y, pull: pull(ones(y)))(*lib.filter_vjp({f}, t))",
                "lambda t: lib.filter_eval_shape(lambda t: jax.tree.leaves(({f})(t)), t)",
                "lambda t: lib.filter_make_jaxpr(lambda t: jax.tree.leaves(({f})(t)))(t)[1:]",
                "lambda t: len(lib.filter_make_jaxpr({f})(t)[0].jaxpr.invars)",
                "lambda t: arrays(lib.filter_closure_convert({f}, t)(t))",
                "lambda t: lib.filter_closure_convert(lambda t: leaves(({f})(t)), t).out_struct",
                "lambda t: lib.filter_closure_convert({f}, jax.tree.leaves(t)).in_struct",
                "lambda t: lib.combine(*lib.partition(({f})(t), lib.is_array))",
                "lambda t: lib.error_if(arrays(({f})(t)), {p}, 'wrong')",
                "lambda t: jax.tree.map(lambda x: x, lib.filter_jit({f})(t))",
            ],
            f=inner,
            g=self.pick(
                ["lambda t: (t, again(t))", "lambda t: scaled(t, -1.0)", "lambda t: first(t)"]
            ),
            s=scalar,
            axis=self.pick(AXES),
            out=self.pick(AXES[:3]),
            none=self.pick(["ones(t)", "none(t)"]),
            p=self.pick(PREDICATES, t="t"),
        )

    def step(self) -> str:
        """The text of one value."""
        tree, other = self.random.choice(self.trees), self.random.choice(self.trees)
        spec = self.spec(tree)
        return self.pick(
            [
                "lib.partition({t}, {spec})",
                "lib.partition({t}, {spec}, replace=0)",
                "lib.filter({t}, {spec})",
                "lib.filter({t}, {spec}, inverse=True)",
                "lib.filter({t}, {spec}, replace=1.5)",
                "lib.filter([1, ({t}, 'a')], {spec}, is_leaf=lambda x: type(x) is list)",
                "lib.combine(*lib.partition({t}, {spec}))",
                "lib.combine(lib.filter({t}, {spec}), {u})",
                "lib.combine({t}, {t})",
                "lib.tree_at({where}, {t}, replace_fn=lambda x: (x, 1))",
                "lib.tree_at({where}, {t}, replace=7)",
                "lib.tree_at({where}, {t}, replace=jnp.arange(2.0))",
                "lib.tree_at({where}, {t}, replace=[1, 'b'])",
                "lib.tree_at({where}, {t}, replace_fn=lambda x: None)",
                "lib.tree_at({where}, {t}, replace_fn=lambda x: 0, is_leaf=lambda x: x is None)",
                "lib.tree_equal({t}, {t})",
                "lib.tree_equal({t}, {u})",
                "lib.tree_equal({t}, scaled({t}, 1.0))",
                "lib.tree_equal({t}, scaled({t}, 1.001), rtol=1e-2)",
                "lib.tree_equal({t}, jax.tree.map(lambda x: x, {t}), typematch=True)",
                "lib.tree_equal({t}, jax.tree.map(jnp.asarray, {t}))",
                "jax.jit(lambda x: lib.tree_equal([x, {t}], [x, {u}]))(1.0)",
                "lib.apply_updates({t}, {u})",
                "lib.apply_updates({t}, lib.filter({t}, {spec}))",
                "lib.apply_updates({t}, lib.filter_grad({s})({t}))",
                "lib.tree_check({t})",
                "lib.tree_flatten_one_level({t})[0]",
                "lib.filter_jit({f}).lower({t}).compile()({u})",
                "lib.filter_pmap({f}).lower({t}).compile()({t})",
                "[jax.tree.leaves({t}), jax.tree.structure({t}).num_nodes]",
                "lib.error_if(arrays({t}), {p}, 'wrong')",
                "traces({f}, [{t}, {t}, {u}, scaled({t}, 2.0)], lib)",
                "traces(lib.filter_grad({s}), [{t}] * 3, lib)",
                "lib.filter_jit(lambda t, u, *, k: ({f})((t, u, k)))({t}, again({u}), k=again({t}))",
                "lib.filter_grad(lambda t, u: total(t, u))({t}, again({u}))",
                "arrays(lib.filter_vmap(pair, in_axes=({axis}, {v}))({t}, again({u})))",
                "arrays(lib.filter_vmap(pair, in_axes={'u': {axis}})({t}, again({u})))",
                "lib.filter_jvp(lambda t, u: ({f})((t, u)), ({t}, again({u})), (ones({t}), none({u})))",
                "lib.filter_jvp({f}, ({t},), ({u},))",
                "lib.filter_vjp({f}, {t})[1]({u})",
                "lib.filter_vjp(lambda *a: (({s})(a), 2.0), {t}, again({u}))[1]((jnp.ones(()), None))",
                "lib.filter_vjp(lambda t: (({s})(t), ({f})(t)), {t}, has_aux=True)[::2]",
                "arrays(lib.filter_closure_convert({f}, {t})({u}))",
                "jax.grad(lambda x: rule_vjp((x, {t})))(shared)",
                "jax.grad(lambda x: total(rule_vjp(x, x)))(shared)",
                "jax.grad(lambda x: total(rule_jvp(x, k=x)))(shared)",
                "jax.grad(lambda x: total(rule_jvp((x, {t}), k={u})))(shared)",
                "jax.vmap(lambda x: rule_vjp((x, {t})))(shared)",
                *["({f})({t})"] * 25,
            ],
            t=tree,
            u=other,
            spec=spec,
            where=self.pick(PLACES),
            p=self.pick(PREDICATES, t=tree),
            f=self.function(),
            s=self.scalar(),
            axis=self.pick(AXES),
            v=self.pick(AXES),
        )

    def rules(self) -> None:
        """Functions with rules by hand, of which the program may make use."""
        grad = self.pick(
            [
                "scaled(jax.tree.map(jnp.asarray, lib.filter(t, lib.is_inexact_array)), 3.0)",
                "jax.tree.map(lambda x, p: jnp.asarray(2 * x) if p else None, t, p)",
                "jax.tree.map(lambda x: (x * first(g)).astype(x.dtype), ones(t))",
            ]
        )
        tangent = self.pick(["total(d) + 0.0", "2.0", "total(p) * 0 + 1"])
        self.lines += [
            "rule_vjp = lib.filter_custom_vjp(lambda t, *a, **k: total(t, a, k))",
            "_ = rule_vjp.def_fwd(lambda p, t, *a, **k: (total(t, a, k), ('r', p)))",
            f"_ = rule_vjp.def_bwd(lambda r, g, p, t, *a, **k: {grad})",
            "rule_jvp = lib.filter_custom_jvp(lambda *t, k=1.0: total(t) * 2)",
            f"_ = rule_jvp.def_jvp(lambda p, d, k=1.0: (total(p) * 2, {tangent}))",
        ]

    def program(self) -> list[str]:
        """The lines of the program."""
        self.rules()
        for number in range(self.random.choice([1, 2])):
            self.trees.append(f"t{number}")
            self.lines.append(f"t{number} = {self.tree()}")
        for number in range(self.random.choice([1, 2, 3, 4])):
            self.lines.append(f"r{number} = {self.step()}")
            # What is put into the container of a module is static in this library if it is no array.
            if self.random.random() < 0.5 and "replace" not in self.lines[-1]:
                self.trees.append(f"r{number}")
        return self.lines


def program_of(seed: int) -> list[str]:
    """The lines of the program of a seed."""
    return Writer(seed).program()


# Outcomes -----------------------------------------------------------------------------------------


class Raised(tp.NamedTuple):
    """A line that raised."""

    error: Exception


def run(lines: tp.Sequence[str], lib: tp.Any) -> list[tp.Any]:
    """What each line assigns, or that it raises."""
    names = {**HELPERS, **modules(lib), "lib": lib}
    outcomes: list[tp.Any] = []
    for line in lines:
        target, _, text = line.partition(" = ")
        try:
            names[target] = eval(text, names)
            jax.block_until_ready(jax.tree.leaves(names[target]))
            outcomes.append(names[target])
        except Exception as error:
            names[target] = None
            outcomes.append(Raised(error))
    return outcomes


def plain(value: tp.Any, held: bool = False) -> tp.Any:
    """A value in a form that both libraries share; `held` in a module, at any depth."""
    if isinstance(value, Raised):
        return "raised"
    if isinstance(value, jax.Array):
        return "array", str(value.dtype), value.shape, value.weak_type, np.asarray(value)
    if isinstance(value, (np.ndarray, np.generic)):
        # What a transform gives back as it was is the caller's own here, with 64 bits if it has them.
        dtype = jax.dtypes.canonicalize_dtype(value.dtype)
        return "numpy", str(dtype), value.shape, np.asarray(value)
    if isinstance(value, dict):
        return ["dict", *[(k, plain(v, held)) for k, v in value.items()]]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *[plain(v, held) for v in value]]
    if type(value).__name__ in ("Layer", "Tagged", "Scaled"):
        # Modules that come back unchanged are the caller's own here, NumPy arrays and all.
        fields = [(k, arrays(getattr(value, k, "missing"))) for k in value.__dataclass_fields__]
        return [type(value).__name__, *[(k, plain(v, True)) for k, v in fields]]
    if isinstance(value, jax.ShapeDtypeStruct):
        return "struct", value.shape, str(value.dtype)
    if isinstance(value, (bool, int, float, complex)):
        return type(value).__name__, np.asarray(value)
    if held and value is not None:
        return STATIC
    return (
        value if value is None or isinstance(value, str) else getattr(value, "__name__", "object")
    )


STATIC = "static"
"""Stands for a function or text in a module: a leaf in the peer, and part of the structure here."""


def same(one: tp.Any, other: tp.Any) -> bool:
    """Whether two values in the form of `plain` are equal, arrays up to rounding."""
    if one is STATIC or other is STATIC:
        return True
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.dtype.kind == "V":
            one, other = one.astype(np.float32), other.astype(np.float32)
        with np.errstate(all="ignore"):
            return bool(
                np.allclose(
                    one, other, rtol=2e-2 if one.itemsize == 2 else 1e-4, atol=1e-5, equal_nan=True
                )
            )
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


DOCUMENTED = [
    ("jac|hessian", "not a valid JAX type|requires real-valued"),
    ("vmap|pmap", "keyword arguments cannot be used"),
    ("jvp|rule_", "same pytree structure|same structure as"),
    ("combine|apply_updates", "pytree structure error"),
    ("vjp", "unexpected tree structure"),
    ("error_if", "No arrays to thread error"),
    ("", "PjitFunction"),  # a function in a module, which is static here
    (
        "tree_at",
        "does not uniquely identify a single element|must not depend on the leaves|index out of range",
    ),
]
"""What this library takes and the peer refuses: patterns of a line, and of the peer's message."""


REFUSED = [
    ("", "no leaf of the arguments is mapped|Inconsistent aliasing|must be traced, but"),
    ("combine", "combine: the trees differ in structure"),
    (
        "tree_at",
        "index out of range|`where` returns a sequence of",
    ),  # fewer leaves, see `_documented`
    ("compile", "was compiled for arguments of another structure"),
    ("error_if", "negative|wrong"),  # the peer drops a check where only the gradient is wanted
    ("in_struct", ""),  # this library traces at once, the peer when the function is called
]
"""What this library refuses and the peer may take: patterns of a line, and of the message."""


def _documented(line: str, mine: tp.Any, theirs: tp.Any) -> bool:
    if isinstance(mine, Raised):
        return _matches(REFUSED, line, mine)
    if isinstance(theirs, Raised):
        return _matches(DOCUMENTED, line, theirs)
    # A function in a module is a leaf of the peer alone: lists of leaves, and places in them, differ.
    if re.search(r"leaves\(t\)|even", line):
        return True
    # The peer gives numbers and NumPy arrays as they are where there is a tangent.
    if "jvp" not in line:
        return False
    return "make_jaxpr" in line or same(plain(_numbers(mine)), plain(_numbers(theirs)))


def _matches(patterns: tp.Any, line: str, raised: Raised) -> bool:
    return any(re.search(a, line) and re.search(b, str(raised.error)) for a, b in patterns)


def _numbers(tree: tp.Any) -> tp.Any:
    number = lambda x: is_float(x) and not isinstance(x, jax.ShapeDtypeStruct)
    return jax.tree.map(lambda x: np.asarray(jnp.asarray(x)) if number(x) else x, tree)


def difference(lines: tp.Sequence[str], mine: tp.Any, theirs: tp.Any) -> str | None:
    """The first line with different outcomes in two libraries, with both; None without one."""
    for number, (line, one, other) in enumerate(zip(lines, run(lines, mine), run(lines, theirs))):
        if line.startswith(("_", "rule")) or same(plain(one), plain(other)):
            continue
        if _documented(line, one, other):
            return None  # what follows works with another value
        text = "\n".join(f"{'>' if i == number else ' '} {x}" for i, x in enumerate(lines))
        return f"{text}\n{mine.__name__}: {_shown(one)}\n{theirs.__name__}: {_shown(other)}"
    return None


def _shown(value: tp.Any) -> str:
    if isinstance(value, Raised):
        return f"{type(value.error).__name__}: {str(value.error)[:400]}"
    return str(plain(value))
