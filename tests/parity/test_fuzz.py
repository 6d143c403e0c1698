"""Random programs give the same in both libraries: see `fuzz`, `filtered_fuzz` and `layer_fuzz`.

`NNXLITE_FUZZ=3000` sets the number of programs, `NNXLITE_FUZZ_FIRST` the first seed. A failure shows
the seed, a small program that still differs, and both outcomes.
"""

import functools
import os

import jax
import pytest

pytest.importorskip("flax")
pytest.importorskip("equinox")

from tests.parity import filtered_fuzz, layer_fuzz
from tests.parity.fuzz.generate import alone, flax, generate, turns
from tests.parity.fuzz.grammar import KINDS
from tests.parity.fuzz.known import RULES, explain
from tests.parity.fuzz.run import compare
from tests.parity.layers import OLDER

peers = functools.cache(flax)
BATCH = 10
FIRST = int(os.environ.get("NNXLITE_FUZZ_FIRST", "0"))


def of_objects(seed):
    """What differs in a program about objects, if that is not known."""
    theirs = generate(peers(), seed)
    found = compare(peers().run("ours", [step.text for step in theirs]), theirs)
    return peers().report(found) if found and not explain(found) else None


def of_lines(module, seed):
    found = module.peers().compare(module.program_of(seed))
    return module.peers().report(found) if found and not module.is_known(found) else None


MODULES = (filtered_fuzz, layer_fuzz)
FILTERED, LAYERS = (functools.partial(of_lines, module) for module in MODULES)
LANGUAGES = {"objects": (of_objects, 100), "filtered": (FILTERED, 80)}
LANGUAGES |= {} if OLDER else {"layers": (LAYERS, 124)}
BATCHES = [
    (name, start)
    for name, (_, programs) in LANGUAGES.items()
    for start in range(FIRST, FIRST + int(os.environ.get("NNXLITE_FUZZ", programs)), BATCH)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("language", "start"), BATCHES)
def test_random_programs(language, start):
    differ, _ = LANGUAGES[language]
    seeds = range(start, start + BATCH)
    found = [f"{seed}\n{text}" for seed in seeds if (text := differ(seed))]
    jax.clear_caches()
    assert not found, "\n\n".join(found)


ALONE = [(t, turn) for kind in KINDS for t in kind.templates for turn in range(turns(t))]


@pytest.mark.parametrize("start", range(0, len(ALONE), 4 * BATCH))
def test_each_template(start):
    """Each option of each statement, in programs that have something of everything."""
    pairs = ALONE[start : start + 4 * BATCH]
    while pairs:
        theirs, tried = alone(peers(), pairs)
        found = compare(peers().run("ours", [step.text for step in theirs]), theirs)
        assert not found or explain(found), peers().report(found)
        last = found.index if found else -1  # a known difference hides what follows
        pairs = pairs[tried[last] :]
    jax.clear_caches()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name.partition(":")[0])
def test_every_known_difference_is_one(rule):
    found = peers().compare(rule.example)
    assert found is not None
    assert explain(found) == rule.name, str(found)


def test_programs_are_the_same_for_the_same_seed():
    first, second = ([step.text for step in generate(peers(), 7)] for _ in range(2))
    assert first == second
    for module in MODULES:
        assert module.program_of(7) == module.program_of(7) != module.program_of(8)


def test_a_fault_is_found_and_shrunk(monkeypatch):
    monkeypatch.setattr(peers().libs["ours"], "clone", lambda x: x)
    program = [
        "m = Box(a=nnx.Param(jnp.ones(2)))",
        "x = jnp.arange(3.0)",
        "r = nnx.clone(m)",
        "z = x + 1",
    ]
    found = peers().compare(program)
    assert found is not None and (found.kind, found.index) == ("value", 2)
    small = peers().shrink(found)
    assert small.program == [program[0], program[2]] and explain(small) is None


def test_what_is_compared():
    differs = lambda a, b: peers().compare([f"r = {a} if nnx.__name__ == 'nnxlite' else {b}"])
    assert differs("1", "1") is None
    assert differs("jnp.ones(2)", "np.ones(2, np.float32)") is None
    for a, b in (
        ("1", "True"),
        ("jnp.ones(2)", "jnp.ones(2, jnp.bfloat16)"),
        ("jnp.ones(2)", "jnp.zeros(2)"),
        ("jnp.asarray(1.0)", "jnp.float32(1.0)"),
        ("nnx.Param(1)", "nnx.BatchStat(1)"),
        ("nnx.Param(1)", "nnx.Param(1, tag='t')"),
        ("(lambda v: [v, v])(nnx.Param(1))", "[nnx.Param(1), nnx.Param(1)]"),
        ("{'a': 1}", "{'b': 1}"),
        ("Box(a=1)", "Plain(a=1)"),
        ("1 / 0", "1"),
        ("1", "1 / 0"),
        ("1 / 0", "int('x')"),
    ):
        assert differs(a, b) is not None, (a, b)
