"""Makes programs."""

from __future__ import annotations

import random

from flax import nnx

from tests.parity.fuzz import again_statements, prelude, training_statements  # noqa: F401  (register statements)
from tests.parity.fuzz.grammar import KINDS
from tests.parity.fuzz.graph_statements import new_ensemble, new_model
from tests.parity.fuzz.run import Peers, Step
from tests.parity.fuzz.scope import Scope

PROFILES = {
    "graph": {"t": 0.15, "": 1.0},
    "transforms": {"t": 3.0, "": 0.5},
    "streams": {"t": 1.0, "": 0.2, "streams": 6.0},
    "training": {"t": 0.7, "": 0.4, "training": 5.0},
    "meshes": {"t": 0.2, "": 0.2, "meshes": 10.0},
    "again": {"t": 0.7, "": 0.4, "again": 8.0},
}
"""How much each kind of program has of each group of statements: the first word of their names."""
SHARES = {"graph": 40, "transforms": 38, "streams": 8, "training": 9, "meshes": 5, "again": 25}


def flax() -> Peers:
    """This library and Flax NNX."""
    return Peers(nnx, prelude.names_of)


def generate(peers: Peers, seed: int) -> list[Step]:
    """The steps of a new program, run with the reference."""
    rng = random.Random(f"program {seed}")
    session = peers.session("theirs")
    scope = Scope(rng, session.lib, session.env, [], session.base)
    weights = PROFILES[rng.choices(list(SHARES), list(SHARES.values()))[0]]
    rate = [k.weight * weights.get(k.name.split("_")[0], weights[""]) for k in KINDS]
    wanted = rng.randint(3, 9)
    first = [new_ensemble if scope.chance(0.35) else new_model]
    while len(session.steps) < wanted:
        make = first.pop() if first else rng.choices(KINDS, rate)[0].make
        made = make(scope)
        for text in [made] if isinstance(made, str) else made or []:
            if not scope.allowed(text):
                break
            if session.step(text).error is not None:
                return session.steps
            scope.notice()
    return session.steps
