"""Makes programs."""

from __future__ import annotations

import random

from tests.parity.fuzz import again_statements, training_statements  # noqa: F401  (register statements)
from tests.parity.fuzz.graph_statements import STATEMENTS, new_ensemble, new_model
from tests.parity.fuzz.run import Peers, Step
from tests.parity.fuzz.scope import Scope

# How much each kind of program has of each group of statements.
PROFILES = {
    "graph": {"t_": 0.15, "": 1.0},
    "transforms": {"t_": 3.0, "": 0.5},
    "streams": {"t_": 1.0, "": 0.2, "streams": 6.0},
    "training": {"t_": 0.7, "": 0.4, "training": 5.0},
    "meshes": {"t_": 0.2, "": 0.2, "meshes": 10.0},
    "again": {"t_": 0.7, "": 0.4, "again": 8.0},
}
SHARES = {"graph": 40, "transforms": 38, "streams": 8, "training": 9, "meshes": 5, "again": 25}
GROUPS = {
    "new_rngs": "streams", "draw": "streams", "fork": "streams", "split_streams": "streams",
    "broadcast_streams": "streams", "train": "training", "metrics": "training",
    "average_of_weights": "training", "train_state": "training", "sharded_model": "meshes", "use_sharded": "meshes",
    "again_function": "again", "again_settings": "again",
}  # fmt: skip


def generate(peers: Peers, seed: int) -> list[Step]:
    """The steps of a new program, run with the reference."""
    rng = random.Random(f"program {seed}")
    session = peers.session("theirs")
    scope = Scope(rng, session.lib, session.env, [], session.base)
    profile = rng.choices(list(SHARES), list(SHARES.values()))[0]
    weights = PROFILES[profile]
    rate = [k.weight * weights.get(GROUPS.get(k.name, k.name[:2]), weights[""]) for k in STATEMENTS]
    wanted = rng.randint(3, 9)
    first = [new_ensemble if scope.chance(0.35) else new_model]
    while len(session.steps) < wanted:
        make = first.pop() if first else rng.choices(STATEMENTS, rate)[0].make
        made = make(scope)
        for text in [made] if isinstance(made, str) else made or []:
            if not scope.allowed(text):
                break
            if session.step(text).error is not None:
                return session.steps
            scope.notice()
    return session.steps
