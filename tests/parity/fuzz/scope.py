"""The basis of the generator: what is in scope, and expressions over it.

A program is made while it runs: each statement is chosen by what the objects of the reference look
like at that moment. The body of a function is made in the same way, with copies of its arguments
in place of the arguments.
"""

from __future__ import annotations

import dataclasses
import random
import re
import textwrap
import types
import typing as tp
import warnings

import jax
import jax.numpy as jnp
import numpy as np

SHAPES: list[tuple[int, ...]] = [(), (2,), (2, 2), (2, 3)]
ATTRIBUTES = "abcde"
FLATTENS = re.compile(
    "graph=False|jax.tree|keystrs|check_pytree|EMA|eval_shape|graph_updates=False|abstract|pure"
)


@dataclasses.dataclass
class Place:
    """An object in scope, with the text that reaches it, its path and its holder."""

    text: str
    value: tp.Any
    root: str
    path: tuple[tp.Any, ...] = ()
    holder: tp.Any = None


class Chance:
    """Draws from a random generator, and new names."""

    def __init__(self, rng: random.Random, counter: list[int] | None = None):
        self.rng = rng
        self.counter = [0] if counter is None else counter

    def chance(self, p: float) -> bool:
        """True with probability p."""
        return self.rng.random() < p

    def one(self, options: tp.Sequence[tp.Any]) -> tp.Any:
        """One of the options."""
        return self.rng.choice(options)

    def some(self, options: tp.Sequence[tp.Any], low: int, high: int) -> list[tp.Any]:
        """Between low and high of the options, without repetition."""
        return self.rng.sample(list(options), min(len(options), self.rng.randint(low, high)))

    def fresh(self, prefix: str) -> str:
        """A new name."""
        self.counter[0] += 1
        return f"{prefix}{self.counter[0]}"


class Scope(Chance):
    """Names with their values, and the statements that were made in it."""

    def __init__(
        self,
        rng: random.Random,
        lib: types.ModuleType,
        env: dict[str, tp.Any],
        roots: list[str],
        hidden: tp.Collection[str],
        depth: int = 0,
        counter: list[int] | None = None,
    ):
        super().__init__(rng, counter)
        self.lib = lib
        self.env = env
        self.roots = roots
        self.hidden = hidden  # names that are no part of the program, or of this scope
        self.depth = depth
        self.lines: list[str] = []
        self.frozen: set[int] = set()  # objects that a body must not write
        self.values_only = False  # the body must leave the structure as it is

    # What is in scope --------------------------------------------------------------------------

    def is_object(self, x: tp.Any) -> bool:
        """Whether x is a graph node other than a Variable."""
        return isinstance(x, self.lib.Pytree)

    def children(self, x: tp.Any) -> list[tuple[str, tp.Any, tp.Any]]:
        """Text of access, key and value of what an object or container holds."""
        lib = self.lib
        if isinstance(x, lib.List) or isinstance(x, (list, tuple)):
            try:
                return [(f"[{i}]", i, v) for i, v in enumerate(x)]
            except AttributeError:  # a List that the reference left without its items
                return []
        if isinstance(x, (lib.Dict, lib.State, dict)):
            items = x.raw_mapping.items() if isinstance(x, lib.State) else x.items()
            return [(f"[{k!r}]", k, v) for k, v in items]
        if isinstance(x, lib.Pytree):
            return [(f".{k}", k, v) for k, v in sorted(vars(x).items()) if k[0] != "_"]
        return []

    def places(self, roots: tp.Sequence[str] | None = None) -> list[Place]:
        """Everything that can be reached from the names in scope."""
        found: list[Place] = []
        seen: set[int] = set()
        roots = list(self.roots if roots is None else roots)

        def visit(place: Place) -> None:
            found.append(place)
            x = place.value
            if isinstance(x, self.lib.Pytree):
                if id(x) in seen:
                    return
                seen.add(id(x))
            if len(place.path) > 12:
                return
            for text, key, child in self.children(x):
                path = (*place.path, key)
                visit(Place(place.text + text, child, place.root, path, x))

        for name in roots:
            visit(Place(name, self.env[name], name))
        return found

    def below(self, value: tp.Any) -> list[Place]:
        """Everything that can be reached from a value."""
        self.env["_value"] = value
        found = self.places(["_value"])
        del self.env["_value"]
        return found

    def named(self, test: tp.Callable[[tp.Any], bool]) -> list[str]:
        """The names whose values pass a test."""
        return [n for n in self.roots if test(self.env[n])]

    def models(self) -> list[str]:
        """The names of graph nodes."""
        return self.named(self.is_object)

    def states(self) -> list[str]:
        """The names of States."""
        return self.named(lambda x: isinstance(x, self.lib.State))

    def node(self, variables: float = 0.1, containers: float = 0.15) -> str | None:
        """The text of a graph node, a Variable, or a plain container of some."""
        names = self.models()
        places = [p for p in self.places(names) if self.is_object(p.value)]
        if not places:
            return None
        if self.chance(containers):
            parts = [self.one(places).text for _ in range(self.rng.randint(1, 2))]
            variable = [
                p.text for p in self.places(names) if isinstance(p.value, self.lib.Variable)
            ]
            if variable and self.chance(0.5):
                parts.append(self.one(variable))
            keys = [repr(k) for k in "uvw"]
            form = self.rng.randrange(3)
            if form == 0:
                return "[" + ", ".join(parts) + "]"
            if form == 1:
                return "(" + ", ".join(parts) + ",)"
            return "{" + ", ".join(f"{k}: {p}" for k, p in zip(keys, parts)) + "}"
        if self.chance(variables):
            places = [
                p for p in self.places(names) if isinstance(p.value, self.lib.Variable)
            ] or places
            return self.one(places).text
        top = [p for p in places if not p.path]
        return self.one(top if self.chance(0.8) else places).text

    def cyclic(self) -> bool:
        """Whether an object in scope contains itself."""
        lib = self.lib

        def below(x: tp.Any, above: frozenset[int]) -> bool:
            if isinstance(x, lib.Pytree):
                if id(x) in above:
                    return True
                above |= {id(x)}
            return len(above) < 30 and any(below(child, above) for _, _, child in self.children(x))

        return any(below(self.env[name], frozenset()) for name in self.roots)

    def allowed(self, text: str) -> bool:
        """Whether a statement may be run: JAX may fail for good where it flattens a cycle."""
        return not (FLATTENS.search(text) and self.cyclic())

    # Expressions ----------------------------------------------------------------------------------

    def numeric(
        self, shape: tuple[int, ...] | None = None, dtype: tp.Any = None
    ) -> list[tuple[str, tp.Any]]:
        """Texts and values of arrays in scope: Variables as they are read, and arrays."""
        found = []
        for place in self.places():
            x = place.value
            text = place.text
            if isinstance(x, self.lib.Variable):
                x = x.get_value()
                text = text + self.one(["[...]", "[...]", ".get_value()"])
            if not isinstance(x, (jax.Array, np.ndarray)):
                continue
            if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                continue
            if x.size > 40 or (shape is not None and x.shape != shape):
                continue
            if dtype is not None and x.dtype != dtype:
                continue
            found.append((text, x))
        return found

    def scalar(self, terms: int = 2) -> str:
        """An expression that gives a scalar float32."""
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

    def array(self, shape: tuple[int, ...], dtype: str = "float32") -> str:
        """An expression that gives an array of a shape and dtype."""
        if dtype in ("int32", "uint32"):
            same = self.numeric(shape, jnp.dtype(dtype))
            return f"{self.one(same)[0]} + 1" if same else f"jnp.full({shape}, 3, jnp.{dtype})"
        if dtype != "float32":
            return f"jnp.full({shape}, 0.25).astype(jnp.{dtype})"
        same = self.numeric(shape, jnp.float32)
        if not same or self.chance(0.15):
            return f"jnp.full({shape}, 0.5) * {self.factor()}"
        form = self.one(["jnp.sin({})", "{} * 0.5", "0.25 * {}", "jnp.tanh({}) + 1.0", "{}"])
        text = form.format(self.one(same)[0])
        return f"{text} + {self.factor()}" if self.chance(0.3) else text

    def factor(self) -> str:
        """A scalar to multiply or to add."""
        return (
            f"jnp.tanh({self.scalar(1)})" if self.chance(0.5) else self.one(["0.5", "2.0", "1.5"])
        )

    def literal(self, shape: tuple[int, ...] | None = None) -> str:
        """A new array, as a literal."""
        shape = self.one(SHAPES) if shape is None else shape
        size = int(np.prod(shape))
        options = [f"jnp.ones({shape})", f"jnp.full({shape}, 0.5)", f"jnp.zeros({shape})"]
        options.append(f"jnp.arange({size}.0).reshape({shape})")
        if shape == ():
            options += ["jnp.float32(1.5)", "jnp.array(0.75)", "jnp.asarray(2.0)"]
        if self.chance(0.12):
            options = [
                f"jnp.ones({shape}, jnp.{t})" for t in ("int32", "bfloat16", "bool", "float16")
            ]
        return self.one(options)

    # Statements ---------------------------------------------------------------------------------

    def attempt(self, text: str) -> bool:
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

    def notice(self) -> None:
        """Take the names that the last statement made into the scope."""
        for name, value in self.env.items():
            known = name in self.hidden or name in self.roots or name[0] == "u"  # abstract values
            if not known and not isinstance(value, types.FunctionType):
                self.roots.append(name)
        self.roots[:] = [n for n in self.roots if n in self.env]

    def evaluate(self, text: str) -> tp.Any:
        """The value of an expression now."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return eval(text, self.env)

    def child(self, params: list[str], values: list[tp.Any], captures: list[str]) -> Scope:
        """A scope for the body of a function, with copies of arguments and captured values."""
        env = dict(self.env)
        copies = self.lib.clone(tuple(values) + tuple(self.env[c] for c in captures))
        names = params + captures
        env.update(zip(names, copies))
        for place in self.below(copies):
            if isinstance(place.value, self.lib.Variable):
                raw = place.value.get_raw_value()
                if isinstance(raw, np.ndarray):  # which the reference writes in place
                    place.value.set_raw_value(raw.copy())
        env["TICKS"] = []
        scope = Scope(
            self.rng, self.lib, env, names, set(env) - set(names), self.depth + 1, self.counter
        )
        for name in captures:
            scope.freeze(env[name])
        return scope

    def freeze(self, value: tp.Any) -> None:
        """Let a body only read what is in value."""
        self.frozen |= {id(p.value) for p in self.below(value)}


def indent(lines: list[str]) -> str:
    """Lines as the body of a block."""
    return textwrap.indent("\n".join(lines), "    ")
