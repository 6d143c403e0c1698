"""`generate`: the same tokens as step by step, whatever else is in the batch."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import nnxlite as nnx

VOCAB = 11
TRACES = []


class Decoder(nnx.Module):
    """A small language model that has learned an embedding of positions, or has rotary ones."""

    def __init__(self, kind="learned", longest=64, layers=1):
        rngs = nnx.Rngs(0)
        attend = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
        self.embed = nnx.Embed(VOCAB, 8, rngs=rngs)
        self.positions = nnx.Embed(longest, 8, rngs=rngs) if kind == "learned" else None
        self.attention = nnx.List(
            nnx.MultiHeadAttention(
                2,
                8,
                num_kv_heads=1,
                dropout_rate=0.5,
                rngs=rngs,
                **({} if kind == "learned" else {"attention_fn": attend}),
            )
            for _ in range(layers)
        )
        self.head = nnx.Linear(8, VOCAB, rngs=rngs)

    def __call__(self, tokens, input_positions=None):
        TRACES.append(tokens.shape)
        x = self.embed(tokens)
        if self.positions is not None:
            steps = jnp.arange(tokens.shape[1])
            x = x + self.positions(steps if input_positions is None else input_positions)
        for layer in self.attention:
            x = x + layer(x, is_causal=True)
        return 8 * self.head(x)


class Counter(nnx.Module):
    """Without attention: the next token is the sum of all so far, which it keeps in a Cache."""

    def __init__(self):
        self.total = nnx.Cache(jnp.array(7))
        self.decode = False

    def set_view(self, decode=None, batch_size=None, max_length=None):
        self.decode = self.decode if decode is None else decode
        if batch_size is not None:
            self.total = nnx.Cache(jnp.zeros(batch_size, jnp.int32))

    def __call__(self, tokens):
        sums = jnp.cumsum(tokens, axis=1)
        if self.decode:
            sums += self.total[...][:, None]
            self.total[...] = sums[:, -1]
        return nnx.one_hot(sums % VOCAB, VOCAB)


def by_hand(model, prompt, max_new, choose=lambda logits, step: logits.argmax()):
    """Whole sequences, one token more each time."""
    model = nnx.view(model, deterministic=True, decode=False, raise_if_not_found=False)
    tokens = list(prompt)
    for step in range(max_new):
        padded = np.zeros((1, 24), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(choose(forward(model, padded)[0, len(tokens) - 1], step)))
    return tokens[len(prompt) :]


forward = nnx.jit(lambda model, tokens: model(tokens))
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 0, 1, 2]]


@pytest.mark.parametrize("kind", ["learned", "rope"])
def test_equal_to_step_by_step(kind):
    model = Decoder(kind)
    expected = [by_hand(model, prompt, 6) for prompt in PROMPTS]
    assert len({tuple(row) for row in expected}) == 3
    alone = [nnx.generate(model, prompt, 6, max_length=24).lists() for prompt in PROMPTS]
    assert alone == expected
    assert nnx.generate(model, PROMPTS, 6).lists() == expected
    if kind == "rope":
        return
    assert nnx.generate(model, PROMPTS, 6, use_cache=False).lists() == expected
    padded = np.full((3, 20), 3)
    for row, prompt in zip(padded, PROMPTS):
        row[: len(prompt)] = prompt
    given = nnx.generate(model, jnp.asarray(padded), 6, lengths=[3, 1, 9])
    assert given.tokens.shape == (3, 6) and given.tokens.dtype == jnp.int32
    assert given.tokens.tolist() == expected and given.lengths.tolist() == [6, 6, 6]


class Scanned(nnx.Module):
    """Blocks of attention in a stack of stacks."""

    def __init__(self, longest=24):
        make = lambda rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        for size in (2, 3):
            make = nnx.split_rngs(splits=size)(nnx.vmap(make))
        rngs = nnx.Rngs(0)
        self.embed, self.positions = (
            nnx.Embed(VOCAB, 8, rngs=rngs),
            nnx.Embed(longest, 8, rngs=rngs),
        )
        self.blocks = make(rngs)

    def __call__(self, tokens, input_positions):
        run = lambda x, block: x + block(x, is_causal=True)
        for _ in range(2):
            run = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x = run(self.embed(tokens) + self.positions(input_positions), self.blocks)
        return 8 * self.embed.attend(x)


def test_a_scanned_stack_of_blocks():
    model = Scanned()
    before = nnx.graphdef(model)
    for function in (nnx.generate, functools.partial(nnx.beam_search, beams=2)):
        cached = function(model, PROMPTS, 5)
        assert cached.lists() == function(model, PROMPTS, 5, use_cache=False).lists()
    assert nnx.graphdef(model) == before


@pytest.mark.quick
def test_state_of_the_models_own():
    model = Counter()
    assert nnx.generate(model, [1, 2], 5).lists() == [3, 6, 1, 2, 4]
    assert nnx.generate(model, [[1, 2], [3]], 5).lists() == [[3, 6, 1, 2, 4], [3, 6, 1, 2, 4]]
    assert nnx.generate(model, [1, 2], 5, use_cache=False).lists() == [3, 6, 1, 2, 4]
    assert int(model.total[...]) == 7 and model.decode is False


def test_rows_end_after_a_stop_token():
    model = Counter()
    both = nnx.generate(model, [[1, 2], [1, 3]], 6, stop=(6, 5), pad=9)
    assert both.tokens.tolist() == [[3, 6, 9, 9, 9, 9], [4, 8, 5, 9, 9, 9]]
    assert both.lengths.tolist() == [2, 3]
    assert both.lists() == [[3, 6], [4, 8, 5]]
    single = nnx.generate(model, np.array([1, 6]), 2, stop=6)  # a stop token in the prompt is none
    assert single.tokens.tolist() == [7, 3] and single.lengths.shape == ()


def test_the_loop_stops_when_all_rows_have_ended():
    model, calls = Counter(), []
    counted = nnx.sampling.greedy

    def sampler(logits, key):
        jax.debug.callback(lambda: calls.append(1))
        return counted(logits)

    key = jax.random.key(0)
    assert nnx.generate(model, [1, 2], 50, sampler=sampler, rngs=key, stop=6).lists() == [3, 6]
    jax.effects_barrier()
    assert len(calls) == 2


def test_the_second_call_traces_nothing():
    model = Decoder()
    sampler = lambda t: nnx.Sampler(temperature=t, top_p=t)
    draw = functools.partial(nnx.generate, model, max_new=4, max_length=20)
    draw(PROMPTS, sampler=sampler(0.5), rngs=nnx.Rngs(0), stop=3)
    traced = len(TRACES)
    draw([[3], [4, 4], [1, 2, 3, 4, 5]], sampler=sampler(0.9), rngs=nnx.Rngs(1), stop=7)
    assert len(TRACES) == traced


def test_the_model_is_left_as_it_was():
    model = Decoder("rope")
    model.attention[0].init_cache((1, 9, 8))  # a cache of the size that is needed, half full
    model.attention[0].cache_index[...] = jnp.array(4)
    graphdef, state = nnx.split(model)
    before = jax.tree.leaves(state)
    assert nnx.generate(model, [1, 2, 3], 6).lists() == by_hand(Decoder("rope"), [1, 2, 3], 6)
    list(nnx.generate_stream(model, [1, 2, 3], 6))
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

    def choose(logits, step):
        return sampler(logits, jax.random.fold_in(keys[0], step))

    assert by_hand(model, PROMPTS[0], 6, choose) == together[0]
    rngs = nnx.Rngs(sample=3)
    one, two = (draw(PROMPTS, rngs=rngs) for _ in range(2))
    assert one.lists() != two.lists() and rngs.sample.count[...] == 2
    raw = draw(PROMPTS, rngs=jax.random.PRNGKey(5)).lists()
    assert raw == draw(PROMPTS, rngs=jax.random.key(5)).lists()


def test_one_temperature_for_each_row():
    sampler = nnx.Sampler(temperature=jnp.array([0.0, 5.0, 0.0]))
    out = nnx.generate(Counter(), [[1, 2]] * 3, 5, sampler=sampler, rngs=jax.random.key(0))
    rows = out.lists()
    assert rows[0] == rows[2] == [3, 6, 1, 2, 4] != rows[1]


def test_a_stream_gives_the_same_tokens():
    model = Decoder()
    whole = nnx.generate(model, PROMPTS, 7).lists()
    chunks = list(nnx.generate_stream(model, PROMPTS, 7, chunk=3))
    assert [sum((chunk[i] for chunk in chunks), []) for i in range(3)] == whole
    assert len(chunks) > 2 and all(len(row) <= 3 for chunk in chunks for row in chunk)
    traced = len(TRACES)
    assert [sum(row, []) for row in zip(*nnx.generate_stream(model, PROMPTS, 7, chunk=5))] == whole
    assert len(TRACES) == traced  # the number of positions is an operand


def test_a_stream_of_one_sequence():
    model, sampler, key = Counter(), nnx.Sampler(2.0), jax.random.key(2)
    stream = nnx.generate_stream(model, [1, 2], 50, chunk=2, stop=4)
    assert next(stream) == [3, 6]
    assert list(stream) == [[1, 2], [4]]
    whole = nnx.generate(model, [1, 2], 7, sampler=sampler, rngs=key).lists()
    parts = list(nnx.generate_stream(model, [1, 2], 7, sampler=sampler, rngs=key, chunk=1))
    assert len(parts) == 7 and sum(parts, []) == whole


def log_probs_by_hand(model, prompt, new):
    tokens = np.zeros((1, 24), np.int32)
    tokens[0, : len(prompt) + len(new)] = [*prompt, *new]
    logs = jax.nn.log_softmax(forward(nnx.view(model, deterministic=True, decode=False), tokens)[0])
    return [float(logs[len(prompt) + i - 1, token]) for i, token in enumerate(new)]


@pytest.mark.parametrize("use_cache", [True, False])
def test_log_probabilities_of_the_new_tokens(use_cache):
    model, sampler = Decoder(), nnx.Sampler(temperature=2.0, top_k=4)
    options = {"sampler": sampler, "rngs": jax.random.key(3), "stop": (2, 3, 4, 5)}
    found = nnx.generate(model, PROMPTS, 6, use_cache=use_cache, **options)
    assert found.log_probs.dtype == jnp.float32 and found.cache is None
    for prompt, new, logs in zip(PROMPTS, found.lists(), found.log_probs):
        expected = log_probs_by_hand(model, prompt, new) + [0.0] * (6 - len(new))
        np.testing.assert_allclose(logs, expected, atol=1e-4)
    assert {len(new) for new in found.lists()} != {6}
    assert nnx.generate(model, [1, 2], 3).log_probs.shape == (3,)


TURNS = [PROMPTS, [[3], [7, 7, 7, 7], [1, 2]], [[5], [6], [0]]]


@pytest.mark.parametrize(
    ("make", "length"),
    [
        (Decoder, None),
        (lambda: Decoder("rope", layers=2), 64),
        (lambda: Scanned(64), 64),
        (Counter, None),
    ],
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
    nnx.generate(model, np.array([5, 6]), 3, cache=first.cache, max_length=32)  # compiles
    jax.effects_barrier()
    read.clear()
    second = nnx.generate(model, np.array([5, 6]), 3, cache=first.cache, max_length=32)
    jax.effects_barrier()
    assert read == [1] * 5  # the last token of the first call, two of the prompt, two new ones
    whole = nnx.generate(Counter(), [1, 2, 4, *first.lists(), 5, 6], 3)
    assert second.lists() == whole.lists()

    @nnx.jit
    def turn(model, prompt, cache):
        return nnx.generate(model, prompt, 3, cache=cache)

    assert turn(Counter(), jnp.array([5, 6]), first.cache).lists() == whole.lists()


class Untold(nnx.Module):
    """Counts positions from zero in each call, which is wrong with a cache."""

    def __init__(self):
        self.inner = Decoder()

    def __call__(self, tokens):
        return self.inner(tokens)


def test_a_model_that_is_not_told_positions_runs_without_a_cache():
    model = Untold()
    with pytest.warns(UserWarning, match="Untold runs without a cache: with one, nothing tells it"):
        tokens = nnx.generate(model, PROMPTS[0], 6).lists()
    assert tokens == by_hand(Decoder(), PROMPTS[0], 6)
    assert nnx.generate(model, PROMPTS[0], 6, use_cache=True).lists() != tokens


class Mixing(nnx.Module):
    """A model in whose logits positions mix in one of several ways."""

    def __init__(self, mix, layers=1):
        rngs = nnx.Rngs(0)
        self.embed, self.positions = nnx.Embed(VOCAB, 8, rngs=rngs), nnx.Embed(64, 8, rngs=rngs)
        self.layers = nnx.List(mix(rngs) for _ in range(layers))

    def __call__(self, tokens, input_positions):
        x = self.embed(tokens) + self.positions(input_positions)
        for layer in self.layers:
            x = x + layer(x)
        return 8 * self.embed.attend(x)


class Attention(nnx.MultiHeadAttention):
    """Attention that is causal or not."""

    def __init__(self, causal, rngs):
        super().__init__(2, 8, decode=False, rngs=rngs)
        self.causal = causal

    def __call__(self, x):
        return super().__call__(x, is_causal=self.causal)


def conv(padding):
    return lambda rngs: nnx.Conv(8, 8, 3, padding=padding, rngs=rngs)


def rnn(rngs):
    return nnx.RNN(nnx.GRUCell(8, 8, rngs=rngs))


NOT_CAUSAL = {
    "attention": lambda rngs: Attention(False, rngs),
    "convolution": conv("SAME"),
    "mean": lambda rngs: lambda x: jnp.broadcast_to(x.mean(1, keepdims=True), x.shape),
    "both directions": lambda rngs: nnx.Sequential(
        nnx.Bidirectional(rnn(rngs), rnn(rngs)), nnx.Linear(16, 8, rngs=rngs)
    ),
}
CAUSAL = {
    "attention": lambda rngs: Attention(True, rngs),
    "convolution": conv("CAUSAL"),
    "cumulative sum": lambda rngs: lambda x: jnp.cumsum(x, 1),
    "recurrent": rnn,
}


def stream(*args, **options):
    return list(nnx.generate_stream(*args, **options))


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, nnx.generate) for name in NOT_CAUSAL),
        *(("mean", f) for f in (stream, nnx.beam_search)),
    ],
)
def test_a_model_that_is_not_causal_is_told_once(name, way):
    model, prompt = Mixing(NOT_CAUSAL[name]), [1, 2, 3]
    for use_cache in (None, False) if name == "attention" else (None,):
        cached = name == "attention" and use_cache is None
        text = "in steps with a cache" if cached else "with padding after them"
        with pytest.warns(UserWarning, match=f"Mixing gives other logits for tokens {text} than"):
            way(model, prompt, 5, use_cache=use_cache)
        way(model, prompt, 5, use_cache=use_cache)  # the same program: no warning


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_generates_alike_in_all_ways(name):
    model = Mixing(CAUSAL[name])
    found = nnx.generate(model, PROMPTS, 4).lists()
    if name == "attention":  # the others have no cache
        assert found == nnx.generate(model, PROMPTS, 4, use_cache=False).lists()
    assert found == [nnx.generate(model, prompt, 4, max_length=24).lists() for prompt in PROMPTS]


def test_a_cache_that_gives_other_logits_is_told():
    class Backwards(Counter):
        def __call__(self, tokens):
            return super().__call__(tokens[:, ::-1] if self.decode else tokens)

    with pytest.warns(UserWarning, match="the positions or caches of Backwards are wrong"):
        nnx.generate(Backwards(), [1, 2], 3)


def test_a_model_that_takes_no_short_calls_is_not_checked():
    class Long(Counter):
        def __call__(self, tokens):
            if tokens.shape[1] not in (1, 9):
                raise ValueError("of another length")
            return super().__call__(tokens)

    assert nnx.generate(Long(), [1] * 10, 2).lists() == [10, 9]


def test_a_cache_has_the_dtype_of_the_computation():
    """Wider inputs promote the parameters of a layer, and so the keys."""
    model = Mixing(CAUSAL["attention"])
    nnx.cast(model, "bfloat16", keep=nnx.PathContains("positions"))
    seen = []

    def attend(query, key, value, **options):
        seen.append(key.dtype)
        return nnx.dot_product_attention(query, key, value, **options)

    for layer in model.layers:
        layer.attention_fn = attend
    text = str(jax.make_jaxpr(lambda: nnx.generate(model, [1, 2, 3], 5).tokens)())
    assert set(seen) == {jnp.dtype("float32")} and "f32[1,8,2,4]" in text
    cached = nnx.generate(model, [1, 2, 3], 5, use_cache=True).lists()
    assert cached == nnx.generate(model, [1, 2, 3], 5, use_cache=False).lists()


def test_a_cache_of_a_model_in_half_precision():
    model = Mixing(CAUSAL["attention"])
    nnx.cast(model, "bfloat16")
    text = str(jax.make_jaxpr(lambda: nnx.generate(model, [1, 2, 3], 5).tokens)())
    assert "bf16[1,8,2,4]" in text and "f32[1,8,2,4]" not in text


def test_inside_a_transform():
    model = Counter()

    @nnx.jit
    def generate(model, prompt, lengths):
        return nnx.generate(model, prompt, 3, lengths=lengths)

    out = generate(model, jnp.array([[1, 2], [3, 0]]), jnp.array([2, 1]))
    assert out.lists() == [[3, 6, 1], [3, 6, 1]]
    with pytest.raises(
        ValueError, match="generate_stream hands tokens to Python, which a function"
    ):
        nnx.jit(lambda m, p: nnx.generate_stream(m, p, 3))(model, jnp.array([1]))


def test_a_sharded_model():
    model = Decoder()
    expected = nnx.generate(model, [[1, 2, 3], [4, 5, 6]], 6).lists()
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))

    def place(path, value):
        spec = PartitionSpec(None, "model") if path[-1] == "kernel" and "query" in path else ()
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    nnx.update(model, nnx.map_state(lambda p, v: v.replace(place(p, v[...])), nnx.state(model)))
    assert len(model.attention[0].query.kernel[...].sharding.device_set) == 4
    rows = NamedSharding(mesh, PartitionSpec("data"))
    prompt = jax.device_put(jnp.array([[1, 2, 3], [4, 5, 6]]), rows)
    assert nnx.generate(model, prompt, 6).lists() == expected


class Wrong(nnx.Module):
    def __call__(self, tokens):
        return nnx.one_hot(tokens, VOCAB)[:, -1]


class Pair(nnx.Module):
    def __call__(self, tokens):
        return tokens, tokens


def with_cache(model, prompt=(1,)):
    return {"cache": nnx.generate(model, list(prompt), 2, cache=True).cache}


DRAWN = {"sampler": nnx.Sampler()}


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1] * 9, {"max_length": 12}, "the prompt is longer than the cache"),
        ([[1] * 9, [1]], {"max_length": 12}, "9 tokens of prompt and 4 new"),
        ([], {}, r"with at least one token; got shape \(0,\)"),
        ([[1], []], {}, r"each row of the prompt, from 1 to 1; got \[1 0\]"),
        (np.zeros((2, 0), int), {}, r"one token; got shape \(2, 0\)"),
        (np.zeros((1, 2, 3), int), {}, r"got shape \(1, 2, 3\)"),
        ([[[1]]], {}, r"got shape \(1, 1, 1\)"),
        ([1], {"max_new": 0}, "max_new must be a whole number from 1 up, not 0"),
        ([1], {"max_length": "8"}, "max_length must be a whole number"),
        (np.array([[1, 2]]), {"lengths": [3]}, r"must be 1 integers, .*, from 1 to 2; got \[3\]"),
        (np.array([[1, 2]]), {"lengths": [1, 2]}, r"one for each row of .*; got \[1 2\]"),
        ([[1], [2]], with_cache, "the cache is of a batch of 1 rows, and the prompt has 2"),
        (
            [1],
            lambda _: with_cache(Decoder()),
            r"the cache is not one of Counter: it has arrays \[\(\), .*, and the model has \[\(1,\)\]",
        ),
        ([1], DRAWN, r"generate: the sampler needs a random key\. Pass rngs=nnx\.Rngs\(0\)"),
        (
            [1],
            DRAWN | {"rngs": jax.random.split(jax.random.key(0), 3)},
            r"one key, or one for each of 1 rows; got \(3,\)",
        ),
        ([1.5], {}, "tokens are integers; the prompt has dtype float64"),
        (np.ones(3, np.float32), {}, "the prompt has dtype float32"),
        ([1], {"sampler": 3, "rngs": jax.random.key(0)}, "callable"),
        ([1], DRAWN | {"rngs": 0}, "rngs must be an Rngs, a stream or keys, not"),
    ],
)
def test_bad_arguments(prompt, options, message):
    model = Counter()
    options = options(model) if callable(options) else options
    with pytest.raises((ValueError, TypeError), match=message):
        nnx.generate(model, prompt, **{"max_new": 4, **options})


NAN = "Decoder gave logits that are NaN for the token at position 9 of 12"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: nnx.generate(len, [1], 4),
            TypeError,
            "generate takes a module that can be called",
        ),
        (lambda: stream(nnx.Dict(), [1], 4), TypeError, "generate_stream takes a module that"),
        (lambda: stream(Counter(), [1], 4, chunk=0), ValueError, "chunk must be a whole number fr"),
        (
            lambda: nnx.generate(Wrong(), [1], 4, use_cache=True),
            ValueError,
            "Wrong has no cache for use_cac",
        ),
        (
            lambda: nnx.generate(Wrong(), [1, 2], 4),
            ValueError,
            r"Wrong must return logits \(batch, length, vocabulary\) for .* returned shape \(1, 11\)",
        ),
        (lambda: nnx.generate(Pair(), [1, 2], 4), ValueError, "it returned tuple"),
        (lambda: nnx.generate(Decoder(longest=8), [1, 2, 3], 9), ValueError, NAN),
        (lambda: stream(Decoder(longest=8), [1, 2, 3], 9), ValueError, NAN),
    ],
)
def test_models_that_do_not_decode(call, error, message):
    with pytest.raises(error, match=message):
        call()
