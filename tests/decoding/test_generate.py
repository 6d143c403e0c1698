"""`generate`: the same tokens as step by step, whatever is in the batch; beams beside all there are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import nnxlite as nnx

VOCAB = 11
TRACES = []
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 0, 1, 2]]


class Attention(nnx.MultiHeadAttention):
    def __init__(self, rngs, causal=True, **options):
        super().__init__(2, 8, num_kv_heads=1, dropout_rate=0.5, rngs=rngs, **options)
        self.causal = causal

    def __call__(self, x):
        return super().__call__(x, is_causal=self.causal)


class Decoder(nnx.Module):
    """A small language model: an embedding of positions, unless `longest` is 0, and mixing layers."""

    def __init__(self, mix=Attention, layers=1, longest=64):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCAB, 8, rngs=rngs)
        self.positions = nnx.Embed(longest, 8, rngs=rngs) if longest else None
        self.layers = nnx.List(mix(rngs) for _ in range(layers))
        self.head = nnx.Linear(8, VOCAB, rngs=rngs)

    def __call__(self, tokens, input_positions=None):
        TRACES.append(tokens.shape)
        x = self.embed(tokens)
        if self.positions is not None:
            steps = jnp.arange(tokens.shape[1])
            x = x + self.positions(steps if input_positions is None else input_positions)
        for layer in self.layers:
            x = x + layer(x)
        return 8 * self.head(x)


def rotary(layers=1):
    attend = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
    return Decoder(functools.partial(Attention, attention_fn=attend), layers, longest=0)


class Counter(nnx.Module):
    """The next token is the sum of all so far; a Cache has it, with rows along its last axis."""

    def __init__(self, *shape):
        self.total, self.shape = nnx.Cache(jnp.array(7)), shape
        self.decode = False

    def set_view(self, decode=None, batch_size=None, max_length=None):
        self.decode = self.decode if decode is None else decode
        if batch_size is not None:
            self.total = nnx.Cache(jnp.zeros((*self.shape, batch_size), jnp.int32))

    def __call__(self, tokens):
        sums = jnp.cumsum(tokens, axis=1)
        if self.decode:
            sums += self.total[...].reshape(-1, len(tokens))[0, :, None]
            self.total[...] = jnp.broadcast_to(sums[:, -1], self.total.shape)
        likely, less = (nnx.one_hot(x % VOCAB, VOCAB) for x in (sums, 3 * sums + 4))
        return likely + 0.7 * less


class Scanned(nnx.Module):
    """Blocks of attention in a stack of stacks."""

    def __init__(self, longest=24):
        make = lambda rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        for size in (2, 3):
            make = nnx.split_rngs(splits=size)(nnx.vmap(make))
        rngs = nnx.Rngs(0)
        self.embed, self.positions = (nnx.Embed(n, 8, rngs=rngs) for n in (VOCAB, longest))
        self.blocks = make(rngs)

    def __call__(self, tokens, input_positions):
        run = lambda x, block: x + block(x, is_causal=True)
        for _ in range(2):
            run = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x = run(self.embed(tokens) + self.positions(input_positions), self.blocks)
        return 8 * self.embed.attend(x)


forward = nnx.jit(lambda model, tokens: model(tokens))


def logits_of(model, tokens):
    """The logits of a call on these tokens alone, all in one program."""
    model = nnx.view(model, deterministic=True, decode=False, raise_if_not_found=False)
    return forward(model, np.pad([tokens], ((0, 0), (0, 24 - len(tokens)))))[0, : len(tokens)]


def by_hand(model, prompt, max_new, choose=lambda logits, step: logits.argmax()):
    """Whole sequences, one token more each time."""
    tokens = list(prompt)
    for step in range(max_new):
        tokens.append(int(choose(logits_of(model, tokens)[-1], step)))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("make", [Decoder, rotary])
def test_equal_to_step_by_step(make):
    model = make()
    expected = [by_hand(model, prompt, 6) for prompt in PROMPTS]
    assert len({tuple(row) for row in expected}) == 3
    alone = [nnx.generate(model, prompt, 6, max_length=24).lists() for prompt in PROMPTS]
    assert alone == expected
    assert nnx.generate(model, PROMPTS, 6).lists() == expected
    if make is rotary:
        return
    assert nnx.generate(model, PROMPTS, 6, use_cache=False).lists() == expected
    padded = jnp.array([row + [3] * (20 - len(row)) for row in PROMPTS])
    given = nnx.generate(model, padded, 6, lengths=[3, 1, 9])
    assert given.tokens.shape == (3, 6) and given.tokens.dtype == jnp.int32
    assert given.tokens.tolist() == expected and given.lengths.tolist() == [6, 6, 6]


@pytest.mark.parametrize("beams", [None, 2])
def test_a_scanned_stack_of_blocks(beams):
    model = Scanned()
    before = nnx.graphdef(model)
    cached = nnx.generate(model, PROMPTS, 5, beams=beams).lists()
    assert cached == nnx.generate(model, PROMPTS, 5, beams=beams, use_cache=False).lists()
    assert nnx.graphdef(model) == before


@pytest.mark.quick
def test_state_of_the_models_own():
    model = Counter()
    assert nnx.generate(model, [[1, 2], [3]], 5).lists() == [[3, 6, 1, 2, 4], [3, 6, 1, 2, 4]]
    assert nnx.generate(model, [1, 2], 5, use_cache=False).lists() == [3, 6, 1, 2, 4]
    assert int(model.total[...]) == 7 and model.decode is False


def test_rows_end_after_a_stop_token():
    model = Counter()
    both = nnx.generate(model, [[1, 2], [1, 3]], 6, stop=(6, 5), pad=9)
    assert both.tokens.tolist() == [[3, 6, 9, 9, 9, 9], [4, 8, 5, 9, 9, 9]]
    assert both.lengths.tolist() == [2, 3] and both.lists() == [[3, 6], [4, 8, 5]]
    single = nnx.generate(model, np.array([1, 6]), 2, stop=6)  # a stop token in the prompt is none
    assert single.tokens.tolist() == [7, 3] and single.lengths.shape == ()


def test_the_loop_stops_when_all_rows_have_ended():
    calls = []

    def sampler(logits, key):
        jax.debug.callback(lambda: calls.append(1))
        return nnx.sampling.greedy(logits)

    options = {"sampler": sampler, "rngs": jax.random.key(0), "stop": 6}
    assert nnx.generate(Counter(), [1, 2], 50, **options).lists() == [3, 6]
    jax.effects_barrier()
    assert len(calls) == 2


def test_the_second_call_traces_nothing():
    sampler = lambda t: nnx.Sampler(temperature=t, top_p=t)
    draw = functools.partial(nnx.generate, Decoder(), max_new=4, max_length=20)
    draw(PROMPTS, sampler=sampler(0.5), rngs=nnx.Rngs(0), stop=3)
    traced = len(TRACES)
    draw([[3], [4, 4], [1, 2, 3, 4, 5]], sampler=sampler(0.9), rngs=nnx.Rngs(1), stop=7)
    assert len(TRACES) == traced


def test_the_model_is_left_as_it_was():
    model = rotary()
    model.layers[0].init_cache((1, 9, 8))  # a cache of the size that is needed, half full
    model.layers[0].cache_index[...] = jnp.array(4)
    graphdef, state = nnx.split(model)
    before = jax.tree.leaves(state)
    assert nnx.generate(model, [1, 2, 3], 6).lists() == by_hand(rotary(), [1, 2, 3], 6)
    after, state = nnx.split(model)
    assert after == graphdef
    assert all(a is b for a, b in zip(before, jax.tree.leaves(state), strict=True))

    def broken(logits, key):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        nnx.generate(model, [1, 2, 3], 6, sampler=broken, rngs=jax.random.key(0))
    assert nnx.graphdef(model) == graphdef


def test_rows_with_keys_of_their_own_do_not_depend_on_the_batch():
    model, sampler = Counter(), nnx.Sampler(temperature=3.0, top_k=8)
    keys = jax.random.split(jax.random.key(1), 3)
    draw = functools.partial(nnx.generate, model, max_new=6, sampler=sampler, max_length=20)
    together = draw(PROMPTS, rngs=keys).lists()
    alone = [draw([prompt], rngs=keys[i : i + 1]).lists()[0] for i, prompt in enumerate(PROMPTS)]
    assert alone == together
    choose = lambda logits, step: sampler(logits, jax.random.fold_in(keys[0], step))
    assert by_hand(model, PROMPTS[0], 6, choose) == together[0]
    rngs = nnx.Rngs(sample=3)
    one, two = (draw(PROMPTS, rngs=rngs) for _ in range(2))
    assert one.lists() != two.lists() and rngs.sample.count[...] == 2


class Favours(nnx.Module):
    def __init__(self):
        self.bias = nnx.Param(jnp.zeros(VOCAB))

    def __call__(self, logits, key):
        return jnp.argmax(logits + self.bias[...])

    def writing(self, logits, key):
        self.bias[...] += 1.0
        return self(logits, key)


def test_numbers_for_each_row_and_objects_of_a_sampler():
    draw = functools.partial(nnx.generate, Counter(), [[1, 2]] * VOCAB, 5, rngs=jax.random.key(0))
    rows = draw(sampler=nnx.Sampler(temperature=jnp.array([0.0, 5.0] * 5 + [0.0]))).lists()
    assert rows[0] == rows[2] == [3, 6, 1, 2, 4] != rows[1]
    favours = Favours()
    for token in (5, 7):  # the second time there is a program, with as many rows as tokens
        favours.bias[...] = 9.0 * nnx.one_hot(token, VOCAB)
        assert draw(sampler=favours).lists() == [[token] * 5] * VOCAB
        assert draw(sampler=favours.__call__).lists() == [[token] * 5] * VOCAB
    with pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate Param from a different"):
        draw(sampler=favours.writing)


@pytest.mark.parametrize("use_cache", [True, False])
def test_log_probabilities_of_the_new_tokens(use_cache):
    model, sampler = Decoder(), nnx.Sampler(temperature=2.0, top_k=4)
    options = {"sampler": sampler, "rngs": jax.random.key(3), "stop": (2, 3, 4, 5)}
    found = nnx.generate(model, PROMPTS, 6, use_cache=use_cache, **options)
    assert found.log_probs.dtype == jnp.float32 and found.cache is None
    for prompt, new, logs in zip(PROMPTS, found.lists(), found.log_probs):
        expected = jax.nn.log_softmax(logits_of(model, prompt + new))[len(prompt) - 1 : -1]
        expected = [float(row[token]) for row, token in zip(expected, new, strict=True)]
        np.testing.assert_allclose(logs, expected + [0.0] * (6 - len(new)), atol=1e-4)
    assert {len(new) for new in found.lists()} != {6}
    assert nnx.generate(model, [1, 2], 3).log_probs.shape == (3,)


TURNS = [PROMPTS, [[3], [7, 7, 7, 7], [1, 2]], [[5], [], [0]]]


@pytest.mark.parametrize(
    ("make", "length"), [(lambda: rotary(2), 64), (lambda: Scanned(64), 64), (Counter, None)]
)
def test_a_conversation_goes_on_as_one_call_over_all_of_it(make, length):
    model, cache, spoken = make(), True, [[], [], []]
    for turn in TURNS:
        found = nnx.generate(model, turn, 5, stop=(3, 6), cache=cache, max_length=length)
        cache, spoken = found.cache, [[*a, *b] for a, b in zip(spoken, turn)]
        whole = nnx.generate(model, spoken, 5, stop=(3, 6), max_length=64)
        assert found.lists() == whole.lists()
        np.testing.assert_allclose(found.log_probs, whole.log_probs, atol=1e-4)
        spoken = [[*a, *b] for a, b in zip(spoken, found.lists())]
    assert cache.lengths.tolist() == [len(row) for row in spoken]
    assert [row[:n].tolist() for row, n in zip(cache.tokens, cache.lengths)] == spoken


def test_a_conversation_reads_only_what_is_new():
    read = []

    class Counted(Counter):
        def __call__(self, tokens):
            jax.debug.callback(lambda: read.append(tokens.shape[1]))
            return super().__call__(tokens)

    model = Counted()
    first = nnx.generate(model, [1, 2, 4], 4, cache=True, max_length=32)
    assert repr(first.cache).endswith(" arrays, tokens of shape (1, 32))")
    for _ in range(2):  # the first one compiles, and is checked
        jax.effects_barrier()
        read.clear()
        second = nnx.generate(model, np.array([5, 6]), 3, cache=first.cache, max_length=32)
    jax.effects_barrier()
    assert read == [1] * 5  # the last token of the first call, two of the prompt, two new ones
    whole = nnx.generate(Counter(), [1, 2, 4, *first.lists(), 5, 6], 3)
    assert second.lists() == whole.lists()

    @nnx.jit
    def turn(model, prompt, lengths, cache):
        return nnx.generate(model, prompt, 3, lengths=lengths, cache=cache)

    prompt = jnp.array([[5, 6, 0]])
    assert turn(Counter(), prompt, jnp.array([2]), first.cache).lists() == [whole.lists()]


def test_an_empty_prompt_goes_on_with_the_last_turn():
    model, parts, traces = Decoder(), [], []
    out = nnx.generate(model, PROMPTS, 2, max_length=24, cache=True)
    for _ in range(3):
        parts.append(out.lists())
        out = nnx.generate(model, [[]] * 3, 2, max_length=24, cache=out.cache)
        traces.append(len(TRACES))
    whole = nnx.generate(model, PROMPTS, 6).lists()
    assert [sum(row, []) for row in zip(*parts)] == whole and traces[0] == traces[2]
    one = nnx.generate(model, PROMPTS[1], 2, cache=True)
    assert one.lists() + nnx.generate(model, [], 4, cache=one.cache).lists() == whole[1]


def test_a_model_that_is_not_told_positions_runs_without_a_cache():
    class Untold(Decoder):
        def __call__(self, tokens):
            return super().__call__(tokens)  # positions from zero, which is wrong with a cache

    model = Untold()
    with pytest.warns(UserWarning, match="Untold runs without a cache: with one, nothing tells it"):
        tokens = nnx.generate(model, PROMPTS[0], 6).lists()
    assert tokens == by_hand(Decoder(), PROMPTS[0], 6)
    assert nnx.generate(model, PROMPTS[0], 6, use_cache=True).lists() != tokens


NOT_CAUSAL = {
    "attention": lambda rngs: Attention(rngs, causal=False),
    "convolution": lambda rngs: nnx.Conv(8, 8, 3, padding="SAME", rngs=rngs),
    "mean": lambda rngs: lambda x: jnp.broadcast_to(x.mean(1, keepdims=True), x.shape),
}
CAUSAL = {
    "convolution": lambda rngs: nnx.Conv(8, 8, 3, padding="CAUSAL", rngs=rngs),
    "cumulative sum": lambda rngs: lambda x: jnp.cumsum(x, 1),
    "recurrent": lambda rngs: nnx.RNN(nnx.GRUCell(8, 8, rngs=rngs)),
}


@pytest.mark.parametrize(("name", "beams"), [*((name, None) for name in NOT_CAUSAL), ("mean", 2)])
def test_a_model_that_is_not_causal_is_told_once(name, beams):
    model = Decoder(NOT_CAUSAL[name])
    for use_cache in (None, False) if name == "attention" else (None,):
        options = {"beams": beams, "use_cache": use_cache}
        cached = name == "attention" and use_cache is None
        text = "in steps with a cache" if cached else "with padding after them"
        with pytest.warns(UserWarning, match=f"Decoder gives other logits for tokens {text} than"):
            nnx.generate(model, [1, 2, 3], 5, **options)
        nnx.generate(model, [1, 2, 3], 5, **options)  # the same program: no warning


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_without_a_cache_generates_alike_in_all_ways(name):
    model = Decoder(CAUSAL[name])
    found = nnx.generate(model, PROMPTS, 4).lists()
    assert found == [nnx.generate(model, prompt, 4, max_length=24).lists() for prompt in PROMPTS]


def test_a_cache_that_gives_other_logits_is_told():
    class Backwards(Counter):
        def __call__(self, tokens):
            return super().__call__(tokens[:, ::-1] if self.decode else tokens)

    with pytest.warns(UserWarning, match="the positions or caches of Backwards are wrong"):
        nnx.generate(Backwards(), [1, 2], 3)

    class Masked(nnx.MultiHeadAttention):  # of single tokens each would see all in the cache
        def __call__(self, x):
            return super().__call__(x, mask=jnp.tri(x.shape[1]))

    with pytest.warns(UserWarning, match=r"cannot read 4 tokens at once .* mask of shape \(4, 4"):
        nnx.generate(Decoder(lambda rngs: Masked(2, 8, rngs=rngs)), [1], 4)


def test_a_model_that_takes_no_short_calls_is_not_checked():
    class Long(Counter):
        def __call__(self, tokens):
            if tokens.shape[1] not in (1, 9):
                raise ValueError("of another length")
            return super().__call__(tokens)

    assert nnx.generate(Long(), [1] * 10, 2).lists() == [10, 9]


def test_a_cache_has_the_dtype_of_the_parameters():
    model = Decoder()
    nnx.cast(model, "bfloat16", keep=nnx.PathContains("positions"))  # inputs of layers are float32
    cached = nnx.generate(model, [1, 2, 3], 5, use_cache=True).lists()
    assert cached == nnx.generate(model, [1, 2, 3], 5, use_cache=False).lists()
    text = str(jax.make_jaxpr(lambda: nnx.generate(model, [1, 2, 3], 5).tokens)())
    assert "bf16[1,8,1,4]" in text


def test_a_sharded_model():
    model = Decoder()
    expected = nnx.generate(model, [[1, 2, 3], [4, 5, 6]], 6).lists()
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, PartitionSpec())))
    kernel = model.layers[0].query.kernel
    kernel[...] = jax.device_put(kernel[...], NamedSharding(mesh, PartitionSpec(None, "model")))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    prompt = jax.device_put(jnp.array([[1, 2, 3], [4, 5, 6]]), rows)
    assert nnx.generate(model, prompt, 6).lists() == expected


cached = lambda model: nnx.generate(model, [1], 2, cache=True).cache
LAST = lambda tokens: nnx.one_hot(tokens, VOCAB)[:, -1]
DRAWN = {"sampler": nnx.Sampler()}
KEYS = DRAWN | {"rngs": jax.random.split(jax.random.key(0), 3)}
EMPTY, THREE_AXES, PAIR = np.zeros((2, 0), int), np.zeros((1, 2, 3), int), np.array([[1, 2]])
OTHER_CACHE = r"not one of Counter: it has arrays \[\(\), .*, and the model has \[\(1,\)\]"


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1] * 9, {"max_length": 12}, "the prompt is longer than the cache"),
        ([[1] * 9, [1]], {"max_length": 12}, "9 tokens of prompt and 4 new"),
        ([], {}, r"with at least one token; got shape \(0,\)"),
        ([[1], []], {}, r"each row of the prompt, from 1 to 1; got \[1 0\]"),
        (EMPTY, {}, r"one token; got shape \(2, 0\)"),
        (THREE_AXES, {}, r"got shape \(1, 2, 3\)"),
        ([[[1]]], {}, r"got shape \(1, 1, 1\)"),
        ([1.5], {}, r"generate: the prompt must be integers of 32 bits, not \[1\.5\]"),
        (PAIR + 2**32, {}, r"the prompt must be integers of 32 bits, not array\(\[\[4294967297"),
        (PAIR, {"lengths": [1.5]}, r"generate: lengths must be integers of 32 bits, not \[1\.5\]"),
        ([1], {"stop": "3"}, "generate: stop must be integers of 32 bits, not '3'"),
        ([1], {"pad": None}, "generate: pad must be integers of 32 bits, not None"),
        ([1], {"cache": None}, "generate: cache is NoneType; it must be True, False, or the"),
        ([1], {"sampler": lambda *_: 0.5, "rngs": jax.random.key(0)}, "integer type, got float32"),
        ([1], {"max_new": 0}, "max_new must be a whole number from 1 up, not 0"),
        ([1], {"max_length": "8"}, "max_length must be a whole number"),
        (PAIR, {"lengths": [3]}, r"must be 1 integers, .*, from 1 to 2; got \[3\]"),
        (PAIR, {"lengths": [1, 2]}, r"one for each row of .*; got \[1 2\]"),
        ([[1], [2]], lambda: {"cache": cached(Counter())}, "of a batch of 1 rows, .* prompt has 2"),
        ([1], lambda: {"cache": cached(Decoder())}, OTHER_CACHE),
        ([1], DRAWN, r"generate: the sampler needs a random key\. Pass rngs=nnx\.Rngs\(0\)"),
        ([1], KEYS, r"one key, or one for each of 1 rows; got \(3,\)"),
        ([1], DRAWN | {"rngs": 0}, "a stream or keys; rngs is int"),
        ([1], {"sampler": 3, "rngs": jax.random.key(0)}, "callable"),
        ([1], {"beams": 0}, "beams must be a whole number from 1 up, not 0"),
        ([1], {"beams": 2, **DRAWN}, "Pass beams, or a sampler and a cache"),
        ([1], {"beams": 2, "cache": True}, "beams draws no tokens and returns no cache"),
    ],
)
def test_bad_arguments(prompt, options, message):
    options = options() if callable(options) else options
    with pytest.raises((ValueError, TypeError), match=message):
        nnx.generate(Counter(), prompt, **{"max_new": 4, **options})


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (len, {}, "generate takes a module that can be called"),
        (nnx.Dict(), {}, "generate takes a module that can be called"),
        (nnx.Sequential(len), {"use_cache": True}, "Sequential has no cache for use_cache=True"),
        (nnx.Sequential(LAST), {}, r"logits \(batch, length, vocabulary\) for .*\[1, 11\]"),
        (nnx.Sequential(lambda tokens: (tokens, tokens)), {}, "it returned tuple"),
    ],
)
def test_models_that_do_not_decode(model, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        nnx.generate(model, [1, 2, 3], 4, **options)


def test_logits_that_are_nan_are_refused():
    expected = "Decoder gave logits that are NaN for the token at position 9 of 12"
    with pytest.raises(ValueError, match=expected):
        nnx.generate(Decoder(longest=8), [1, 2, 3], 9)


# Beams ------------------------------------------------------------------------------------------

STOP = 3
decoder = functools.cache(Decoder)


@pytest.fixture(scope="module")
def continuations():
    """The log probability of each continuation of (1, 2) by two tokens, or by one that stops."""
    after = lambda *tokens: jax.nn.log_softmax(logits_of(decoder(), [1, 2, *tokens])[-1])
    first = after()
    found = {(STOP,): float(first[STOP])}
    for a in {*range(VOCAB)} - {STOP}:
        found |= {(a, b): float(first[a] + second) for b, second in enumerate(after(a))}
    return found


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_wide_enough_it_finds_the_best_sequences_of_all(continuations, penalty):
    found = nnx.generate(decoder(), [1, 2], 2, beams=VOCAB, stop=STOP, length_penalty=penalty)
    scores = {tokens: total / len(tokens) ** penalty for tokens, total in continuations.items()}
    best = sorted(scores, key=lambda tokens: -scores[tokens])[:VOCAB]
    assert [tuple(tokens) for tokens in found.lists()] == best
    np.testing.assert_allclose(found.scores, [scores[tokens] for tokens in best], rtol=1e-5)
    assert found.tokens.shape == (VOCAB, 2) and found.lengths.dtype == jnp.int32
    assert found.log_probs is None


def test_one_beam_is_greedy():
    run = functools.partial(nnx.generate, decoder(), [[1, 2], [4, 5, 6, 7]], 6, stop=STOP, pad=9)
    out, greedy = run(beams=1), run()
    np.testing.assert_array_equal(out.tokens[:, 0], greedy.tokens)
    np.testing.assert_array_equal(out.lengths[:, 0], greedy.lengths)


def test_beams_do_not_depend_on_each_other_or_on_the_cache():
    prompts = [[1, 2], [4, 5, 6, 7]]
    out = nnx.generate(decoder(), prompts, 4, beams=3, stop=STOP)
    alone = {"beams": 3, "stop": STOP, "max_length": 8}  # one program
    assert out.lists() == [nnx.generate(decoder(), one, 4, **alone).lists() for one in prompts]
    again = nnx.generate(decoder(), prompts, 4, beams=3, stop=STOP, use_cache=False)
    assert out.lists() == again.lists()
    assert np.all(np.diff(out.scores) <= 0)


def test_caches_move_with_their_rows_along_any_axis():
    run = functools.partial(nnx.generate, Counter(2), [[1, 2], [3]], 5, beams=4)
    assert run(use_cache=True).lists() == run(use_cache=False).lists()


def table(rows):
    """A model in which the probabilities of the next token depend on the last one alone."""
    probabilities = np.zeros((VOCAB, VOCAB), np.float32)
    for token, following in rows.items():
        probabilities[token, [*following]] = [*following.values()]
    logits = jnp.log(jnp.array(probabilities))
    return nnx.Sequential(lambda tokens: logits[tokens])


def test_nan_after_the_end_of_a_beam_is_not_an_error():
    """A beam ends, is overtaken by a longer one, and the model gives NaN for its padding."""
    rows = {1: {3: 0.5, 2: 0.45, 4: 0.05}, 2: {5: 0.5, 4: 0.3, 6: 0.2}, 5: {6: 1.0}, 6: {7: 1.0}}
    options = {"beams": 2, "stop": STOP, "pad": 9, "length_penalty": 1.0}
    model = table(rows | {4: {4: 1.0}, 7: {7: 1.0}, 9: {0: np.nan}})
    assert nnx.generate(model, [1], 3, **options).lists() == [[2, 5, 6], [3]]
    with pytest.raises(ValueError, match="gave logits that are NaN for the token at position 3"):
        nnx.generate(table(rows | {5: {0: np.nan}}), [1], 3, **options)
