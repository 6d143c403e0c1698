"""Whole programs, as people write them, give what they give with the reference.

Each program takes the library under the name `nnx` and returns whatever it would print or save.
"""

from __future__ import annotations

import dataclasses
import functools
import typing as tp
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import nnxlite

flax = pytest.importorskip("flax")
from flax import nnx as flax_nnx  # noqa: E402

Lib = tp.Any
SETTINGS = {"hijax", "ref", "eager_sharding", "mesh"}
PROGRAMS: dict[str, tp.Callable[[Lib], tp.Any]] = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


# What a program returned, as values that can be compared ----------------------------------------


def plain(lib: Lib, value: tp.Any) -> tp.Any:
    """The value with States, Variables and arrays of a library as plain tuples and arrays."""
    again = functools.partial(plain, lib)
    if isinstance(value, lib.State):
        return [(path, again(leaf)) for path, leaf in lib.to_flat_state(value)]
    if isinstance(value, lib.Variable):
        metadata = {k: again(v) for k, v in value.get_metadata().items() if k not in SETTINGS}
        return type(value).__name__, again(value.get_value()), metadata
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return again(jax.random.key_data(value))
    if isinstance(value, (jax.Array, np.ndarray)):
        return str(value.dtype), np.asarray(value)
    if isinstance(value, jax.ShapeDtypeStruct):
        return value.shape, str(value.dtype)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return again({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {key: again(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [again(item) for item in value]
    return value.__name__ if isinstance(value, type) else value


def assert_same(ours: tp.Any, theirs: tp.Any, where: str) -> None:
    assert type(ours) is type(theirs), where
    if isinstance(ours, dict):
        assert set(ours) == set(theirs), where
        for key, item in ours.items():
            assert_same(item, theirs[key], f"{where}.{key}")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), where
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    elif isinstance(ours, np.ndarray):
        if ours.dtype.kind not in "biu":
            ours, theirs = ours.astype(np.float32), theirs.astype(np.float32)
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6, err_msg=where)
    else:
        assert ours == theirs, where


def raised(function: tp.Callable[[], tp.Any]) -> str:
    """The name of the exception that a call raises."""
    with pytest.raises(Exception) as caught:
        function()
    return caught.type.__name__


# Parts that several programs share --------------------------------------------------------------


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def perceptron(nnx: Lib, seed: int = 0, rate: float = 0.0):
    class Perceptron(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(3, rngs=rngs)  # first, so that no parameter is without effect
            self.linear1 = nnx.Linear(3, 4, rngs=rngs)
            self.dropout = nnx.Dropout(rate, rngs=rngs)
            self.linear2 = nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, x):
            return self.linear2(nnx.tanh(self.dropout(self.linear1(self.norm(x)))))

    return Perceptron(nnx.Rngs(seed))


def squares(model, x, y=0.0):
    return jnp.mean((model(x) - y) ** 2)


# Training ---------------------------------------------------------------------------------------


@program
def classifier(nnx):
    class CNN(nnx.Module):
        def __init__(self, *, rngs):
            self.conv = nnx.Conv(1, 4, kernel_size=(3, 3), use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(rate=0.25)
            self.pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
            self.out = nnx.Linear(16, 5, rngs=rngs)

        def __call__(self, x, rngs=None):
            x = self.pool(nnx.relu(self.norm(self.dropout(self.conv(x), rngs=rngs))))
            return self.out(x.reshape(x.shape[0], -1))

    model = CNN(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(0.005, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    batch = {"image": normal(1, 6, 4, 4, 1), "label": jnp.arange(6) % 5}

    def loss_fn(model, rngs, batch):
        logits = model(batch["image"], rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), logits

    @nnx.jit
    def train_step(model, optimizer, metrics, rngs, batch):
        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, rngs, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)

    rngs, history = nnx.Rngs(0), []
    model.train()
    for _ in range(2):
        train_step(model, optimizer, metrics, rngs, batch)
        history.append(metrics.compute())
        metrics.reset()
    model.eval()
    flags = model.norm.use_running_average, model.dropout.deterministic
    states = nnx.state((model, optimizer, metrics, rngs))
    return history, flags, states, model(batch["image"])


@program
def functional_loop(nnx):
    graphdef, params, stats, keys = nnx.split(
        perceptron(nnx, rate=0.5), nnx.Param, nnx.BatchStat, nnx.RngState
    )
    tx = optax.adamw(1e-2)
    opt_state, x = tx.init(params), normal(7, 4, 3)

    @jax.jit
    def step(params, stats, keys, opt_state):
        def loss_fn(params):
            model = nnx.merge(graphdef, params, stats, keys, copy=True)
            loss = squares(model, x)
            return loss, nnx.split(model, nnx.Param, nnx.BatchStat, ...)[2:]

        (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, new = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), *rest, new, loss

    for _ in range(2):
        params, stats, keys, opt_state, loss = step(params, stats, keys, opt_state)
    model = nnx.merge(graphdef, params, stats, keys)
    model.eval()
    graphdef, state = nnx.split(model)
    each = jax.vmap(lambda x: nnx.merge(graphdef, state)(x[None])[0])(x)
    return (
        loss,
        params,
        stats,
        keys,
        each,
        nnx.call((graphdef, state))(x)[0],
        jax.tree.leaves(model),
    )


@program
def line_search_and_hyperparameters(nnx):
    x = normal(8, 5, 3)
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        graphdef = nnx.graphdef(model)
        loss, grads = nnx.value_and_grad(squares)(model, x, 1.0)
        further = {"grad": grads, "value": loss}
        further["value_fn"] = lambda params: squares(nnx.merge(graphdef, params), x, 1.0)
        optimizer.update(model, grads, **further)
        return loss

    losses = [step(model, optimizer) for _ in range(2)]
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    second = nnx.Optimizer(model, tx, wrt=nnx.Param)
    second.opt_state.hyperparams["learning_rate"][...] = 0.5
    second.update(model=model, grads=nnx.grad(squares)(model, x))
    return losses, nnx.state(model), nnx.state(second)


@program
def frozen_parts_and_surgery(nnx):
    model = perceptron(nnx)

    class Frozen(nnx.Param):
        pass

    model.linear1.kernel = Frozen(model.linear1.kernel[...])
    model.linear2 = nnx.Linear(4, 5, rngs=nnx.Rngs(1))
    wrt = nnx.All(nnx.Param, nnx.Not(Frozen), nnx.Not(nnx.PathContains("norm")))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=wrt)
    x = normal(9, 2, 3)
    loss, grads = nnx.value_and_grad(squares, argnums=nnx.DiffState(0, wrt))(model, x)
    optimizer.update(model, grads)
    optimizer.update(model, nnx.grad(squares)(model, x))  # of all, not only of what it updates
    adapted = nnx.recursive_map(
        lambda path, node: (
            nnx.LoRA(node.in_features, 2, node.out_features, base_module=node, rngs=nnx.Rngs(2))
            if isinstance(node, nnx.Linear)
            else node
        ),
        model,
    )
    modules = [(path, type(module)) for path, module in nnx.iter_modules(model)]
    errors = [
        raised(lambda: model.set_attributes(nothing=1)),
        raised(lambda: nnx.view(model, nothing=True)),
        raised(lambda: nnx.split(model, nnx.BatchStat)),
    ]
    return loss, grads, nnx.state(model), nnx.state(adapted), modules, errors


# Models -----------------------------------------------------------------------------------------


@program
def language_model_with_cached_decoding(nnx):
    @dataclasses.dataclass(frozen=True)
    class Config:
        vocabulary: int = 11
        width: int = 4
        length: int = 4

    class LM(nnx.Module):
        def __init__(self, config, rngs):
            self.config = config
            self.tokens = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
            self.places = nnx.Embed(config.length, config.width, rngs=rngs)
            self.norm = nnx.LayerNorm(config.width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                num_heads=2, in_features=config.width, dropout_rate=0.1, decode=False, rngs=rngs
            )
            self.index = nnx.Cache(jnp.zeros((), jnp.int32))

        def __call__(self, tokens, decode=False):
            places, mask = jnp.arange(tokens.shape[1]), None
            if decode:
                places = places + self.index[...]
                self.index[...] += tokens.shape[1]
            else:
                mask = nnx.make_causal_mask(tokens)
            x = self.tokens(tokens) + self.places(places)
            x = x + self.attention(self.norm(x), mask=mask, decode=decode)
            return self.tokens.attend(x)

    config = Config()
    model = LM(config, nnx.Rngs(0, dropout=1))
    tokens = jnp.array([[1, 2, 3, 4]])
    modeless = raised(lambda: model(tokens))
    model.train()
    noisy = model(tokens)
    model.eval()
    whole = model(tokens)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.MultiHeadAttention):
            module.init_cache((1, config.length, config.width))
    decode = nnx.jit(lambda model, token: model(token, decode=True))
    parts = [decode(model, tokens[:, i : i + 1]) for i in range(config.length)]
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, rtol=1e-4, atol=1e-5)
    return noisy, whole, parts, nnx.state(model), modeless


# State, structure and devices -------------------------------------------------------------------


@program
def weights_from_elsewhere(nnx):
    model = perceptron(nnx)
    graphdef, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    foreign = {"linear1.weight": np.ones((4, 3), "f"), "linear2.bias": np.ones(2, "f")}
    for name, value in foreign.items():
        module, leaf = name.split(".")
        path = module, {"weight": "kernel"}.get(leaf, leaf)
        flat[path] = flat[path].replace(jnp.asarray(value.T))
    other = nnx.merge(graphdef, nnx.from_flat_state(flat))
    params = nnx.state(other, nnx.Param)
    pure = nnx.to_pure_dict(params)
    nnx.replace_by_pure_dict(params, {"linear1": {"bias": jnp.full(4, 7.0)}})
    nnx.update(other, params)
    doubled = nnx.map_state(lambda path, v: v.replace(v * 2) if "bias" in path else v, params)
    names = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
    parts = nnx.split_state(nnx.state(other), nnx.PathContains("linear1"), nnx.BatchStat, ...)
    abstract = nnx.state(nnx.eval_shape(lambda: perceptron(nnx)), nnx.Param)
    flattened = {".".join(p): v for p, v in nnx.traversals.flatten_mapping(pure).items()}
    return nnx.state(other), flattened, doubled, names, parts, abstract


@program
def sharded_parameters(nnx):
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=axis_types)

    class Net(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
            self.inner = nnx.Linear(8, 8, kernel_init=init, use_bias=False, rngs=rngs)
            self.outer = nnx.Param(rngs.normal((8, 4)), out_sharding=("model", None))

        def __call__(self, x):
            return nnx.relu(self.inner(x)) @ self.outer[...]

    @nnx.jit
    def create():
        model = Net(nnx.Rngs(0))
        state = nnx.state(model)
        nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return model

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(squares)(model, x)
        optimizer.update(model, grads)
        return loss

    with jax.set_mesh(mesh):
        model = create()
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        x = jax.device_put(normal(16, 4, 8), jax.NamedSharding(mesh, P("data", None)))
        loss = step(model, optimizer, x)
    specs = nnx.get_partition_spec(nnx.state(model))
    shardings = nnx.get_named_sharding(nnx.state(model), mesh)
    shards = [
        (p, v.get_value().addressable_shards[0].data.shape)
        for p, v in nnx.to_flat_state(nnx.state((model, optimizer)))
    ]
    return (
        loss,
        nnx.state(model),
        shards,
        [str(spec) for spec in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))],
        [str(sharding.spec) for sharding in jax.tree.leaves(shardings)],
    )


def checkpointed(nnx, folder):
    import orbax.checkpoint as ocp

    model = perceptron(nnx)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    optimizer.update(model, nnx.grad(squares)(model, normal(17, 5, 3)))
    state, opt_state = nnx.state(model, nnx.Not(nnx.RngState)), nnx.state(optimizer)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "both", {"model": state, "optimizer": opt_state})
        checkpointer.save(folder / "pure", nnx.to_pure_dict(state))
        checkpointer.wait_until_finished()
        abstract = nnx.eval_shape(lambda: perceptron(nnx))
        form = {"model": nnx.state(abstract, nnx.Not(nnx.RngState)), "optimizer": opt_state}
        both = checkpointer.restore(folder / "both", form)
        pure = nnx.restore_int_paths(checkpointer.restore(folder / "pure"))
    again = perceptron(nnx)
    nnx.update(again, both["model"])
    target = nnx.state(perceptron(nnx, 1), nnx.Not(nnx.RngState))
    nnx.replace_by_pure_dict(target, pure)
    return both, pure, nnx.state(again), target


# ------------------------------------------------------------------------------------------------


def compare(function: tp.Callable[[Lib], tp.Any], name: str) -> None:
    results = []
    for lib in (nnxlite, flax_nnx):
        with warnings.catch_warnings():
            if lib is flax_nnx:
                warnings.simplefilter("ignore")
            results.append(plain(lib, function(lib)))
    assert_same(*results, name)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_the_same_with_both_libraries(name):
    compare(PROGRAMS[name], name)


def test_checkpoints_are_saved_and_restored_as_with_the_reference(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    compare(lambda nnx: checkpointed(nnx, tmp_path / nnx.__name__), "checkpoints")
