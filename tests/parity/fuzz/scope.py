"""What is in scope of a program, and expressions over it.

A program is made while it runs: each statement is chosen by what the objects of the reference look
like at that moment. The body of a function is made in the same way, with copies of its arguments
in place of the arguments.
"""

import re
import types
import typing as tp
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from tests.parity.fuzz.grammar import Chance

SHAPES: list[tuple[int, ...]] = [(), (2,), (2, 2), (2, 3)]
ATTRIBUTES = "abcde"
FLATTENS = re.compile(
    "graph=False|jax.tree|keystrs|check_pytree|eval_shape|graph_updates=False|abstract|pure"
)


class Place(tp.NamedTuple):
    """An object in scope, with the text that reaches it, how deep it is, and its holder."""

    text: str
    value: tp.Any
    depth: int = 0
    holder: tp.Any = None


def is_array(x, dtype=""):
    """Whether x is an array of numbers, of a dtype."""
    found = str(x.dtype) if isinstance(x, (jax.Array, np.ndarray)) else "key"
    return not found.startswith("key") and dtype in ("", found)


class Scope(Chance):
    """Names with their values, and the statements that were made in it."""

    def __init__(self, lib, env, hidden, *drawn):
        super().__init__(*drawn)
        self.lib = lib
        self.env = env
        self.hidden = hidden  # names that are no part of the program, or of this scope
        self.roots: list[str] = []
        self.depth = 0
        self.lines: list[str] = []
        self.frozen: set[int] = set()  # objects that a body must not write
        self.values_only = False  # the body must leave the structure as it is

    # What is in scope --------------------------------------------------------------------------

    def is_object(self, x):
        return isinstance(x, self.lib.Pytree)

    def is_variable(self, x):
        return isinstance(x, self.lib.Variable)

    def raw(self, x):
        return x.get_raw_value() if self.is_variable(x) else x

    def children(self, x):
        """Text of access and value of what an object or container has."""
        lib = self.lib
        if isinstance(x, (lib.List, list, tuple)):
            try:
                return [(f"[{i}]", v) for i, v in enumerate(x)]
            except AttributeError:  # a List that the reference left without its items
                return []
        if isinstance(x, lib.State):
            x = x.raw_mapping
        if isinstance(x, (lib.Dict, tp.Mapping)):
            return [(f"[{k!r}]", v) for k, v in x.items()]
        if isinstance(x, lib.Pytree):
            return [(f".{k}", v) for k, v in sorted(vars(x).items()) if k[0] != "_"]
        return []

    def walk(self, place, seen):
        yield place
        x = place.value
        if id(x) in seen or place.depth > 12:
            return
        if self.is_object(x):
            seen.add(id(x))
        for text, child in self.children(x):
            yield from self.walk(Place(place.text + text, child, place.depth + 1, x), seen)

    def places(self, names=None):
        seen: set[int] = set()
        roots = [Place(n, self.env[n]) for n in (self.roots if names is None else names)]
        return [place for root in roots for place in self.walk(root, seen)]

    def below(self, value):
        return [place.value for place in self.walk(Place("", value), set())]

    def writable(self, *kinds):
        """The objects that a body may write: of certain classes, or names of classes."""
        found = [p for p in self.places() if id(p.value) not in self.frozen]
        named = lambda x: type(x).__name__ in kinds
        types = tuple(kind for kind in kinds if isinstance(kind, type))
        return [p for p in found if isinstance(p.value, types) or named(p.value)]

    def named(self, test):
        return [n for n in self.roots if test(self.env[n])]

    def models(self):
        return self.named(self.is_object)

    def node(self, variables=0.1, containers=0.15):
        """The text of a graph node, a Variable, or a plain container of some."""
        places = self.places(self.models())
        objects = [p for p in places if self.is_object(p.value)]
        leaves = [p.text for p in places if self.is_variable(p.value)]
        if not objects:
            return None
        if self.chance(containers):
            parts = [p.text for p in self.some(objects, 1, 2)] + self.some(leaves, 0, 1)
            named = ", ".join(f"{k!r}: {p}" for k, p in zip("uvw", parts))
            listed = ", ".join(parts)
            return self.one([f"[{listed}]", f"({listed},)", f"{{{named}}}"])
        if leaves and self.chance(variables):
            return self.one(leaves)
        top = [p for p in objects if not p.depth]
        return self.one(top if self.chance(0.8) else objects).text

    def allowed(self, text):
        """Whether a statement may be run: JAX may fail for good where it flattens a cycle."""

        def cyclic(x, above):
            if self.is_object(x):
                if id(x) in above:
                    return True
                above |= {id(x)}
            return len(above) < 30 and any(cyclic(child, above) for _, child in self.children(x))

        return not FLATTENS.search(text) or not any(
            cyclic(self.env[name], frozenset()) for name in self.roots
        )

    # Expressions ----------------------------------------------------------------------------------

    def numeric(self, dtype=""):
        """Texts and values of small arrays in scope: Variables as they are read, and arrays."""
        found = []
        for text, x, *_ in self.places():
            if self.is_variable(x):
                text, x = text + self.one(["[...]", "[...]", ".get_value()"]), x.get_value()
            if is_array(x, dtype) and x.size < 40:
                found.append((text, x))
        return found

    def scalar(self, terms=2):
        parts = []
        sources = self.numeric()
        for _ in range(self.rng.randint(1, terms)):
            if not sources or self.chance(0.08):
                parts.append(self.one(["jnp.float32(0.5)", "jnp.sin(jnp.float32(2.0))"]))
                continue
            text, x = self.one(sources)
            term = f"jnp.sum({text})"
            if x.dtype != jnp.float32:
                term = f"{term}.astype(jnp.float32)"
            parts.append(self.one(["jnp.sin({})", "0.5 * {}", "jnp.tanh({})", "{}"]).format(term))
        return self.one([" + ", " + ", " * "]).join(parts)

    def array(self, shape, dtype="float32"):
        if dtype != "float32":
            return f"jnp.full({shape}, {3 if 'int' in dtype else 0.25}).astype(jnp.{dtype})"
        factor = f"jnp.tanh({self.scalar(1)})" if self.chance(0.5) else self.one(["0.5", "1.5"])
        same = [text for text, x in self.numeric(dtype) if x.shape == shape]
        if not same or self.chance(0.15):
            return f"jnp.full({shape}, 0.5) * {factor}"
        form = self.one(["jnp.sin({})", "{} * 0.5", "0.25 * {}", "jnp.tanh({}) + 1.0", "{}"])
        text = form.format(self.one(same))
        return f"{text} + {factor}" if self.chance(0.3) else text

    def literal(self, shape=None):
        shape = shape if shape is not None else tuple(self.one(SHAPES))
        if self.chance(0.12):
            return f"jnp.ones({shape}, jnp.{self.one(['int32', 'bfloat16', 'bool', 'float16'])})"
        options = [f"jnp.ones({shape})", f"jnp.full({shape}, 0.5)", f"jnp.zeros({shape})"]
        options.append(f"jnp.arange({np.prod(shape, dtype=float)}).reshape({shape})")
        if shape == ():
            options += ["jnp.float32(1.5)", "jnp.array(0.75)", "jnp.asarray(2.0)"]
        return self.one(options)

    # Statements ---------------------------------------------------------------------------------

    def attempt(self, text):
        """Run a statement of a body; it becomes part of the body where it did not raise."""
        if not self.allowed(text):
            return False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exec(compile(text, "<body>", "exec"), self.env)
            except Exception:
                return False
        self.lines.append(text)
        self.notice()
        return True

    def notice(self):
        """Take the names that the last statement made into the scope, but `u1`, `u2`, ..."""
        for name, value in self.env.items():
            known = name in self.hidden or name in self.roots or name[0] == "u"
            if not known and not isinstance(value, types.FunctionType):
                self.roots.append(name)
        self.roots[:] = [n for n in self.roots if n in self.env]

    def evaluate(self, text):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return eval(text, self.env)

    def child(self, params, values, captures):
        """A scope for the body of a function, with copies of arguments and captured values."""
        names = params + captures
        env = {**self.env, "TICKS": []}
        env |= zip(names, self.lib.clone((*values, *[self.env[c] for c in captures])))
        scope = Scope(self.lib, env, env.keys() - {*names}, self.rng, self.counter)
        scope.roots, scope.depth = names, self.depth + 1
        for name in captures:
            scope.freeze(env[name])
        return scope

    def freeze(self, value):
        self.frozen |= {id(x) for x in self.below(value)}
