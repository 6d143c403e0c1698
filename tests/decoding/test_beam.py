"""`beam_search` against all sequences there are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.decoding.test_generate import VOCAB, Decoder

STOP = 3


@pytest.fixture(scope="module")
def model():
    return Decoder("learned")


def every_continuation(model, prompt, count, penalty):
    """All continuations of a prompt with their scores, best first."""
    whole = nnx.view(model, decode=False, deterministic=True)

    @jax.jit
    def log_probs(sequences):
        return jax.nn.log_softmax(whole(sequences)[:, -1])

    ended: list[tuple[tuple[int, ...], float]] = []
    going = {(): 0.0}
    for length in range(1, count + 1):
        rows = jnp.array([[*prompt, *tokens] for tokens in going])
        longer = {
            (*tokens, token): score + float(row[token])
            for (tokens, score), row in zip(going.items(), log_probs(rows), strict=True)
            for token in range(VOCAB)
        }
        ends = {tokens for tokens in longer if tokens[-1] == STOP or length == count}
        ended += [(tokens, longer[tokens] / length**penalty) for tokens in ends]
        going = {tokens: score for tokens, score in longer.items() if tokens not in ends}
    return sorted(ended, key=lambda pair: -pair[1])


def test_wide_enough_it_finds_the_best_sequences_of_all(model):
    for penalty in (0.0, 1.0):  # one program
        found = nnx.beam_search(model, [1, 2], 2, beams=VOCAB, stop=STOP, length_penalty=penalty)
        expected = every_continuation(model, [1, 2], 2, penalty)[:VOCAB]
        assert [tuple(tokens) for tokens in found.lists()] == [tokens for tokens, _ in expected]
        np.testing.assert_allclose(found.scores, [score for _, score in expected], rtol=1e-5)
    assert found.tokens.shape == (VOCAB, 2) and found.lengths.dtype == jnp.int32


def test_one_beam_is_greedy(model):
    prompts = [[1, 2], [4, 5, 6, 7]]
    out = nnx.beam_search(model, prompts, 6, beams=1, stop=STOP, pad=9)
    greedy = nnx.generate(model, prompts, 6, stop=STOP, pad=9)
    np.testing.assert_array_equal(out.tokens[:, 0], greedy.tokens)
    np.testing.assert_array_equal(out.lengths[:, 0], greedy.lengths)


def test_prompts_do_not_depend_on_each_other_or_on_the_cache(model):
    prompts = [[1, 2], [4, 5, 6, 7]]
    out = nnx.beam_search(model, prompts, 4, beams=3, stop=STOP)
    alone = {"beams": 3, "stop": STOP, "max_length": 8}  # one program
    assert out.lists() == [nnx.beam_search(model, one, 4, **alone).lists() for one in prompts]
    again = nnx.beam_search(model, prompts, 4, beams=3, stop=STOP, use_cache=False)
    assert out.lists() == again.lists()
    assert np.all(np.diff(out.scores) <= 0)


class Sums(nnx.Module):
    """The next token follows from the sum of all so far; its Cache has rows along the second axis."""

    def __init__(self):
        self.sums = nnx.Cache(jnp.zeros((2, 1), jnp.int32))
        self.decode = False

    def set_view(self, decode=None, batch_size=None, max_length=None):
        self.decode = bool(decode)
        if decode:
            self.sums = nnx.Cache(jnp.zeros((2, batch_size), jnp.int32))

    def __call__(self, tokens):
        sums = jnp.cumsum(tokens, axis=1)
        if self.decode:
            sums += self.sums[0][:, None]
            self.sums[...] = jnp.stack([sums[:, -1], sums[:, -1]])
        likely, less = ((a * sums + b) % VOCAB for a, b in ((2, 1), (3, 4)))
        return nnx.one_hot(likely, VOCAB) + 0.7 * nnx.one_hot(less, VOCAB)


def test_caches_move_with_their_rows_along_any_axis():
    out = nnx.beam_search(Sums(), [[1, 2], [3]], 5, beams=4)
    plain = nnx.beam_search(Sums(), [[1, 2], [3]], 5, beams=4, use_cache=False)
    assert out.lists() == plain.lists()


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
    model = Table(rows | {4: {4: 1.0}, 7: {7: 1.0}, 9: {0: np.nan}})
    out = nnx.beam_search(model, [1], 3, beams=2, stop=STOP, pad=9, length_penalty=1.0)
    assert out.lists() == [[2, 5, 6], [3]]
    model = Table(rows | {5: {0: np.nan}})
    with pytest.raises(ValueError, match="gave logits that are NaN for the token at position 3"):
        nnx.beam_search(model, [1], 3, beams=2, stop=STOP, pad=9, length_penalty=1.0)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1], {"beams": 0}, "beam_search: beams must be a whole number from 1 up, not 0"),
        ([1, 2, 3], {"max_length": 4}, "beam_search: the prompt is longer than the cache"),
    ],
)
def test_bad_input(model, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        nnx.beam_search(model, prompt, 2, **options)
