"""`generate` with beams, against all sequences there are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.decoding.test_generate import VOCAB, Counter, Decoder, logits_of

STOP = 3


@pytest.fixture(scope="module")
def model():
    return Decoder()


@pytest.fixture(scope="module")
def continuations(model):
    """The log probability of each continuation of (1, 2) by two tokens, or by one that stops."""
    after = lambda *tokens: jax.nn.log_softmax(logits_of(model, [1, 2, *tokens])[-1])
    first = after()
    found = {(STOP,): float(first[STOP])}
    for a in {*range(VOCAB)} - {STOP}:
        found |= {(a, b): float(first[a] + second) for b, second in enumerate(after(a))}
    return found


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_wide_enough_it_finds_the_best_sequences_of_all(model, continuations, penalty):
    found = nnx.generate(model, [1, 2], 2, beams=VOCAB, stop=STOP, length_penalty=penalty)
    scores = {tokens: total / len(tokens) ** penalty for tokens, total in continuations.items()}
    best = sorted(scores, key=lambda tokens: -scores[tokens])[:VOCAB]
    assert [tuple(tokens) for tokens in found.lists()] == best
    np.testing.assert_allclose(found.scores, [scores[tokens] for tokens in best], rtol=1e-5)
    assert found.tokens.shape == (VOCAB, 2) and found.lengths.dtype == jnp.int32
    assert found.log_probs is None


def test_one_beam_is_greedy(model):
    prompts = [[1, 2], [4, 5, 6, 7]]
    out, greedy = (
        nnx.generate(model, prompts, 6, beams=beams, stop=STOP, pad=9) for beams in (1, None)
    )
    np.testing.assert_array_equal(out.tokens[:, 0], greedy.tokens)
    np.testing.assert_array_equal(out.lengths[:, 0], greedy.lengths)


def test_prompts_do_not_depend_on_each_other_or_on_the_cache(model):
    prompts = [[1, 2], [4, 5, 6, 7]]
    out = nnx.generate(model, prompts, 4, beams=3, stop=STOP)
    alone = {"beams": 3, "stop": STOP, "max_length": 8}  # one program
    assert out.lists() == [nnx.generate(model, one, 4, **alone).lists() for one in prompts]
    again = nnx.generate(model, prompts, 4, beams=3, stop=STOP, use_cache=False)
    assert out.lists() == again.lists()
    assert np.all(np.diff(out.scores) <= 0)


def test_caches_move_with_their_rows_along_any_axis():
    out, plain = (
        nnx.generate(Counter(2), [[1, 2], [3]], 5, beams=4, use_cache=use_cache).lists()
        for use_cache in (True, False)
    )
    assert out == plain


class Table(nnx.Module):
    """The probabilities of the next token depend on the last one alone."""

    def __init__(self, rows):
        table = np.zeros((VOCAB, VOCAB), np.float32)
        for token, probabilities in rows.items():
            for following, p in probabilities.items():
                table[token, following] = p
        self.logits = nnx.data(jnp.log(jnp.array(table)))

    def __call__(self, tokens):
        return self.logits[tokens]


def test_nan_after_the_end_of_a_beam_is_not_an_error():
    """A beam ends, is overtaken by a longer one, and the model gives NaN for its padding."""
    rows = {1: {3: 0.5, 2: 0.45, 4: 0.05}, 2: {5: 0.5, 4: 0.3, 6: 0.2}, 5: {6: 1.0}, 6: {7: 1.0}}
    options = {"beams": 2, "stop": STOP, "pad": 9, "length_penalty": 1.0}
    model = Table(rows | {4: {4: 1.0}, 7: {7: 1.0}, 9: {0: np.nan}})
    assert nnx.generate(model, [1], 3, **options).lists() == [[2, 5, 6], [3]]
    with pytest.raises(ValueError, match="gave logits that are NaN for the token at position 3"):
        nnx.generate(Table(rows | {5: {0: np.nan}}), [1], 3, **options)
