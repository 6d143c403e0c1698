"""Makes programs."""

import random

from flax import nnx

from tests.parity.fuzz import prelude, training_statements  # noqa: F401  (registers statements)
from tests.parity.fuzz.grammar import CHOICE, KINDS, expand
from tests.parity.fuzz.run import Peers
from tests.parity.fuzz.scope import Scope

PROFILES = {
    "graph": {"t": 0.15, "": 1.0},
    "transforms": {"t": 3.0, "": 0.5},
    "streams": {"t": 1.0, "": 0.2, "streams": 6.0},
    "training": {"t": 0.7, "": 0.4, "training": 5.0},
    "meshes": {"t": 0.2, "": 0.2, "meshes": 10.0},
}
"""How much each kind of program has of each group of statements: the first word of their names."""
SHARES = {"graph": 40, "transforms": 38, "streams": 8, "training": 9, "meshes": 5}


EVERYTHING = [
    "m1 = Box(a=nnx.Param(jnp.arange(2.0) + 1, tag='t'), b=Scale(jnp.ones((2, 3)), note=1), c=3)",
    "m1.d = nnx.List([nnx.Param(jnp.arange(2.0)), Count(jnp.ones(())), m1.a])",
    "m1.e = nnx.Dict(p=nnx.BatchStat(jnp.full((2,), 0.5)), q=Plain(a=nnx.Param(jnp.float32(1.5))))",
    "m1.s = m1.b",
    "m2 = Affine(jnp.arange(2.0) + 2, jnp.ones(2))",
    "m3 = Recorder(jnp.arange(2.0))",
    "m4 = Net(nnx.Rngs(0))",
    "k1 = nnx.Rngs(0, params=1, noise=2)",
    "s1 = nnx.state(m1)",
    "x1 = jnp.arange(3.0)",
    "with jax.set_mesh(mesh_of(2, 4)):\n    w1 = Box(a=nnx.Param(jnp.ones((8, 4)), sharding=('d', 'e')), b=nnx.BatchStat(jnp.arange(8.0)))",
]
"""Something of every kind that a template may name."""


class Turn(Scope):
    """Takes the options in turn: those of one number for all choices."""

    turn = 0

    def one(self, options):
        return options[self.turn % len(options)]


def turns(template):
    """How many turns there are until each option of a template was taken."""
    return max([found.count("|") + 1 for found in CHOICE.findall(template)], default=1)


def alone(peers, pairs):
    """A program that has something of everything, and then templates, until one raises.

    Returns its steps, and how many of the templates were tried with each step, and at the end.
    """
    session = peers.session("theirs")
    scope = Turn(session.lib, session.env, session.base, random.Random(pairs[0][1]))
    scope.counter[0] = 9
    for text in EVERYTHING:
        assert session.step(text).error is None, text
        scope.notice()
    number, tried = 1, [1] * len(EVERYTHING)
    for number, (template, scope.turn) in enumerate(pairs, 1):
        for text in expand(scope, template) or []:
            if not scope.allowed(text):
                break
            tried.append(number)
            if session.step(text).error is not None:
                return session.steps, [*tried, number]
            scope.notice()
        if len(session.steps) > 40:
            break
    return session.steps, [*tried, number]


def flax():
    return Peers(nnx, prelude.names_of)


def generate(peers, seed):
    """The steps of a new program, run with the reference."""
    rng = random.Random(f"program {seed}")
    session = peers.session("theirs")
    scope = Scope(session.lib, session.env, session.base, rng)
    weights = PROFILES[rng.choices(list(SHARES), list(SHARES.values()))[0]]
    rate = [k.weight * weights.get(k.name.split("_")[0], weights[""]) for k in KINDS]
    wanted = rng.randint(3, 9)
    first = ["$m = <<$new_model|$new_model|$ensemble>>"]
    while len(session.steps) < wanted:
        template = first.pop() if first else rng.choice(rng.choices(KINDS, rate)[0].templates)
        for text in expand(scope, template) or []:
            if not scope.allowed(text):
                break
            if session.step(text).error is not None:
                return session.steps
            scope.notice()
    return session.steps
