"""`save` and `restore`: everything comes back, into the objects that are there, or nothing changes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from nnxlite.checkpoint._contents import Contents
from tests.checkpoint.models import Net, batch, bits, build, step
from tests.laws.graphs import roots

checkpoint = nnx.checkpoint


def linear(seed=0, features=3, **kwargs):
    return nnx.Linear(2, features, rngs=nnx.Rngs(seed), **kwargs)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model, its optimizer and metrics after some steps, with a checkpoint of all."""
    model, optimizer = build()
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    for position in range(3):
        step(model, optimizer, metrics, batch(position))
    path = tmp_path_factory.mktemp("trained") / "last"
    rngs = nnx.Rngs(0, noise=jax.random.key(3, impl="rbg"))
    rngs.noise()
    items = {"model": model, "optimizer": optimizer, "metrics": metrics, "rngs": rngs}
    checkpoint.save(path, **items, step=3, note="abc", rate=0.1, done=False)
    return items, path


def test_everything_comes_back(trained):
    items, path = trained
    model, optimizer = build(1)
    new = {
        "model": model,
        "optimizer": optimizer,
        "metrics": nnx.MultiMetric(loss=nnx.metrics.Average("loss")),
        "rngs": nnx.Rngs(5, noise=jax.random.key(4, impl="rbg")),
    }
    model.tables["name"] = "new"
    variables = {id(leaf) for _, leaf in nnx.to_flat_state(nnx.state(model))}
    report = checkpoint.restore(path, **new, cast=None)  # an average of Adam has become float32
    assert report.complete and not report.cast and not report.renamed
    assert bits(*new.values()) == bits(*items.values())
    assert model.last is model.blocks[0] and model.again is model
    kept = {
        id(leaf)
        for _, leaf in nnx.to_flat_state(nnx.state(model))
        if isinstance(leaf, nnx.Variable)
    }
    assert kept <= variables
    assert type(model.host) is np.ndarray and model.tables["name"] == "old"
    others = {name: value for name, value in report.values.items() if name not in new}
    assert others == {"step": 3, "note": "abc", "rate": 0.1, "done": False}
    assert report.values["model"] is model


def test_a_restored_run_goes_on_as_if_it_had_not_ended(trained):
    items, path = trained
    names = ("model", "optimizer", "metrics")
    goes_on = nnx.clone(tuple(items[name] for name in names))
    restored = (*build(7), nnx.MultiMetric(loss=nnx.metrics.Average("loss")))
    checkpoint.restore(path, **dict(zip(names, restored)), cast=None)
    for run in (goes_on, restored):
        step(*run, batch(3))
    assert bits(*restored) == bits(*goes_on)


def test_names_are_readable_and_do_not_depend_on_the_order_of_attributes(trained):
    _, path = trained
    leaves = checkpoint.info(path).leaves
    assert leaves["model.blocks.1.kernel"] == "float32[4,4]"
    assert leaves["optimizer.opt_state.1.hyperparams.learning_rate"] == "float32[]"
    assert leaves["model.drop.rngs.key"] == "key<threefry2x32>[]"
    assert leaves["rngs.noise.key"] == "key<rbg>[]"
    assert leaves["model.pair.b.1"] == "Python float" and leaves["step"] == "Python int"
    forward, backward = nnx.Dict(), nnx.Dict()
    for name in ("a", "b"):
        forward[name] = linear()
    for name in ("b", "a"):
        backward[name] = linear()
    assert list(Contents(forward).leaves) == list(Contents(backward).leaves)


def test_names_of_unusual_keys_are_told_apart():
    keys = {0: 1.0, "0": 2.0, "a.b": 3.0, "": 4.0, "a/b": 5.0, "%": 6.0}
    model = nnx.Dict(table=nnx.Variable(dict.fromkeys(["a.b", "%"], 1.0)))
    assert set(Contents(model).leaves) == {"table.a%2Eb", "table.%25"}
    tables = {key: nnx.Variable(jnp.array(value)) for key, value in keys.items() if key != 0}
    assert list(Contents(tables).leaves) == ["%", "%25", "0", "a%2Eb", "a%2Fb"]
    both = Contents([{0: jnp.zeros(1)}, {"0": jnp.zeros(2)}])
    assert list(both.leaves) == ["0.0", "1.0"]


def test_the_summary_of_a_checkpoint(trained):
    _, path = trained
    text = repr(checkpoint.info(path))
    assert text.splitlines()[0].startswith(f"{path}: ")
    assert "model: Net with 22 leaves" in text and "step: 3" in text and "note: 'abc'" in text
    found = checkpoint.info(path)
    assert found.aliases["model.last"] == "model.blocks.0"
    assert found.classes["model.norm.mean"] == "BatchStat"


def test_an_abstract_model_is_filled(trained):
    items, path = trained
    model = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    report = checkpoint.restore(path, model=model)
    assert [m.name for m in report.cast] == ["model.pair.b.0", "model.pair.b.1"]
    np.testing.assert_array_equal(model.blocks[0].kernel, items["model"].blocks[0].kernel)
    x = batch(0)
    for m in (model, items["model"]):
        m.eval()
    np.testing.assert_array_equal(model(x), items["model"](x))
    items["model"].train()


def test_a_saved_checkpoint_has_what_was_there_when_it_was_saved(tmp_path):
    model = linear()
    model.host = np.zeros(3)
    with checkpoint.Manager(tmp_path, keep=None) as manager:
        for number in range(4):
            model.kernel[...] = float(number)
            model.host[:] = number
            manager.save(number, model=model)
            donated = jax.jit(lambda x: x * 100, donate_argnums=0)
            model.kernel.set_value(donated(model.kernel.get_value()))
            model.host[:] = -1
    for number in range(4):
        checkpoint.restore(tmp_path / str(number), model=model)
        assert set(np.asarray(model.kernel).flat) == {float(number)} == set(model.host)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(roots)
def test_random_graphs_come_back_with_their_sharing(tmp_path, root):
    path = tmp_path / "graph"
    before = nnx.clone(root)
    try:
        checkpoint.save(path, root=root, overwrite=True)
    except checkpoint.CheckpointError as error:
        assert "a checkpoint cannot contain" in str(error)  # the graphs contain objects as values
        return
    contents = Contents({"root": root})
    contents.write({name: zero(leaf.value) for name, leaf in contents.leaves.items()})
    report = checkpoint.restore(path, root=contents.root["root"])
    assert report.complete and not report.cast
    assert not nnx.diff(before, report.values["root"])


def zero(value):
    if isinstance(value, (bool, int, float, complex, str)):
        return type(value)()
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(value)
        return jax.random.wrap_key_data(data * 0, impl=str(jax.random.key_impl(value)))
    return (value * 0).astype(value.dtype)


# sharing


def test_a_tied_layer_comes_back_into_a_model_that_does_not_tie_it(trained):
    items, path = trained
    model, _ = build(1, tied=False)
    assert checkpoint.restore(path, model=model).complete
    np.testing.assert_array_equal(model.last.kernel, items["model"].blocks[0].kernel)
    assert model.last is not model.blocks[0]


def test_two_layers_do_not_come_back_into_one_unnoticed(tmp_path):
    untied, _ = build(1, tied=False)
    checkpoint.save(tmp_path / "c", model=untied)
    tied, _ = build(2)
    before = bits(tied)
    with pytest.raises(
        checkpoint.MismatchError, match=r"unexpected, 2: model\.last\.bias, model\.l"
    ):
        checkpoint.restore(tmp_path / "c", model=tied)
    assert bits(tied) == before


def test_what_items_share_is_stored_once_and_found_by_each(tmp_path):
    model = linear()
    pair = nnx.ModelAndOptimizer(model, optax.sgd(0.1))
    checkpoint.save(tmp_path / "c", model=model, pair=pair)
    assert sum("kernel" in name for name in checkpoint.info(tmp_path / "c").leaves) == 1
    other = nnx.ModelAndOptimizer(linear(1), optax.sgd(0.1))
    assert checkpoint.restore(tmp_path / "c", pair=other).complete
    np.testing.assert_array_equal(other.model.kernel, model.kernel)


# items that are not objects


def test_pytrees_numbers_and_states(tmp_path):
    model = linear()
    items = {
        "params": {"w": jnp.ones(2), "layers": (jnp.zeros(1), 3)},
        "state": nnx.state(model),
        "key": jax.random.key(1),
        "epoch": 4,
        "complex": 1 + 2j,
        "inf": float("inf"),
    }
    checkpoint.save(tmp_path / "c", **items)
    state = nnx.state(linear(1))
    report = checkpoint.restore(
        tmp_path / "c",
        params={"w": jnp.zeros(2), "layers": (jnp.ones(1), 0)},
        state=state,
        key=jax.random.key(0),
        epoch=0,
    )
    assert report.complete
    params = report.values["params"]
    assert params["w"].tolist() == [1, 1] and params["layers"][1] == 3
    assert params["layers"][0].tolist() == [0]
    np.testing.assert_array_equal(state["kernel"].get_value(), model.kernel)
    assert report.values["key"] == jax.random.key(1) and report.values["epoch"] == 4
    assert report.values["complex"] == 1 + 2j and report.values["inf"] == float("inf")


def test_array_references(tmp_path):
    model = nnx.Dict(v=nnx.Variable(jnp.arange(3.0), ref=True), r=jax.new_ref(jnp.ones(2)))
    checkpoint.save(tmp_path / "c", model=model)
    ref = model.r
    model.v[...] = 0.0
    ref[...] = jnp.zeros(2)
    checkpoint.restore(tmp_path / "c", model=model)
    assert model.v.tolist() == [0, 1, 2] and model.r is ref and ref[...].tolist() == [1, 1]
    model.r = other = jax.new_ref(jnp.zeros(2, "float16"))
    model.v[...] += 1
    with pytest.raises(
        checkpoint.CheckpointError, match="'model.r' is a reference to float16, which"
    ):
        checkpoint.restore(tmp_path / "c", model=model, cast=None)
    assert other[...].tolist() == [0, 0] and model.v.tolist() == [1, 2, 3]


# a part, other names, other dtypes


def test_only_a_part(trained):
    items, path = trained
    model, _ = build(1)
    noise = bits(model.drop)
    report = checkpoint.restore(path, model=model, only=nnx.PathContains("blocks"))
    assert {name.split(".")[1] for name in report.restored} == {"blocks"} and report.complete
    np.testing.assert_array_equal(model.blocks[1].kernel, items["model"].blocks[1].kernel)
    assert bits(model.drop) == noise


def test_saving_only_a_part(tmp_path):
    model, _ = build()
    checkpoint.save(tmp_path / "c", model=model, only=nnx.BatchStat)
    assert list(checkpoint.info(tmp_path / "c").leaves) == ["model.norm.mean", "model.norm.var"]
    assert checkpoint.restore(tmp_path / "c", model=model, only=nnx.BatchStat).complete


def test_renaming(tmp_path):
    old = nnx.Dict(enc=nnx.List([linear(i) for i in range(2)]), head=linear(5))
    checkpoint.save(tmp_path / "c", net=old)
    new = nnx.Dict(body=nnx.Dict(l0=linear(7), l1=linear(8)), head=linear(9))
    report = checkpoint.restore(
        tmp_path / "c",
        model=new,
        rename={"net.enc.{i}.*": "model.body.l{i}.*", "net.**": "model.**"},
    )
    assert report.complete
    assert ("net.enc.1.kernel", "model.body.l1.kernel") in report.renamed
    np.testing.assert_array_equal(new.body.l1.kernel, old.enc[1].kernel)
    assert "renamed, 6: net.enc.0.bias to model.body.l0.bias, " in repr(report)


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (
            {"model.kernle": "model.x"},
            r"no stored name matches 'model\.kernle' \(near: model\.kernel\)\.",
        ),
        (
            {"*.kernel": "model.bias"},
            r"both 'model\.\w+' and 'model\.\w+' would become 'model\.bias'",
        ),
        ({"model.*": "model.{i}"}, r"'model\.\{i\}' has i, which 'model\.\*' does not have"),
    ],
)
def test_renamings_that_are_wrong(tmp_path, rename, message):
    model = linear()
    checkpoint.save(tmp_path / "c", model=model)
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.restore(tmp_path / "c", model=model, rename=rename)


def test_dtypes(tmp_path):
    half = linear(param_dtype=jnp.bfloat16)
    full = linear(1)
    checkpoint.save(tmp_path / "half", model=half)
    report = checkpoint.restore(tmp_path / "half", model=full)
    assert full.kernel.dtype == jnp.float32 and report.cast[0].stored == "bfloat16[3]"
    assert "cast, 2: model.bias: stored bfloat16[3], wanted float32[3], " in repr(report)
    full.kernel[...] = 1 / 3
    checkpoint.save(tmp_path / "full", model=full)
    before = bits(half)
    with pytest.raises(
        checkpoint.MismatchError, match="(?s)float32.*cast=True casts with .*cast=None keeps"
    ):
        checkpoint.restore(tmp_path / "full", model=half)
    assert bits(half) == before
    checkpoint.restore(tmp_path / "full", model=half, cast=True)
    assert half.kernel.dtype == jnp.bfloat16 and half.kernel[0, 0] == jnp.bfloat16(1 / 3)
    assert not checkpoint.restore(tmp_path / "full", model=half, cast=None).cast
    assert half.kernel.dtype == jnp.float32


@pytest.mark.parametrize("place", ["free", "committed", "abstract", "NumPy"])
@pytest.mark.parametrize("file", ["checkpoint", "safetensors", "mapping"])
@pytest.mark.parametrize(
    ("values", "fits"),
    [
        (np.array([7, -(2**31)]), True),
        (np.array([2**40 + 5]), False),
        (np.array([2**32 - 1], "uint64"), True),
        (np.array([2**32], "uint64"), False),
        (np.array([1 / 3, np.inf, np.nan]), True),
        (np.array([1e300]), False),
    ],
)
def test_64_bits_without_x64(tmp_path, values, fits, file, place):
    """`cast=None` keeps dtypes; where JAX has none of 64 bits the report says so, or it is refused."""
    stored = nnx.Dict(v=nnx.Variable(values))
    small = jax.dtypes.canonicalize_dtype(values.dtype)
    mapping = nnx.checkpoint.Mapping([nnx.checkpoint.Rule("v", "v")])
    checkpoint.save(tmp_path / "c", model=stored)
    nnx.save_safetensors(tmp_path / "s.safetensors", stored)
    exported = mapping.export(stored)
    read = {
        "checkpoint": lambda model, cast: checkpoint.restore(
            tmp_path / "c", model=model, cast=cast
        ),
        "safetensors": lambda model, cast: nnx.load_safetensors(
            tmp_path / "s.safetensors", model, cast=cast
        ),
        "mapping": lambda model, cast: mapping.load(exported, model, cast=cast),
    }[file]
    zeros = np.zeros(values.shape, small)
    made = {
        "free": lambda: jnp.asarray(zeros),
        "committed": lambda: jax.device_put(zeros, jax.devices()[3]),
        "abstract": lambda: jax.ShapeDtypeStruct(zeros.shape, zeros.dtype),
        "NumPy": lambda: zeros,
    }[place]
    model = nnx.Dict(v=nnx.Variable(made()))
    before = model.v.get_value()
    if place == "NumPy":
        assert not read(model, None).cast and model.v.get_value().dtype == values.dtype
        np.testing.assert_array_equal(model.v.get_value(), values)
        return
    if not fits:
        message = f"v' is stored as {values.dtype}, with values that {small} does not have, .*x64"
        with pytest.raises(checkpoint.CheckpointError, match=message):
            read(model, None)
        assert model.v.get_value() is before
    for cast in (None, True) if fits else (True,):
        (change,) = read(model, cast).cast
        assert change[1:] == (f"{values.dtype}[{len(values)}]", f"{small}[{len(values)}]")
        assert model.v.dtype == small
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(model.v, values.astype(small))


def test_a_stored_number_has_the_dtype_of_the_array_that_it_becomes(tmp_path):
    checkpoint.save(tmp_path / "c", x=3)
    report = checkpoint.restore(tmp_path / "c", x=jnp.zeros((), "float16"), cast=None)
    assert report.values["x"].dtype == "float16" and report.values["x"] == 3
    assert [m.stored for m in report.cast] == ["Python int"]


def test_what_orbax_wrote_is_a_key_only_in_the_form_of_its_data(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    data = {"right": jnp.arange(2, dtype="uint32"), "more": jnp.zeros((3, 2), "uint32")}
    with ocp.StandardCheckpointer() as checkpointer:
        for name, value in {**data, "real": jnp.zeros(2)}.items():
            checkpointer.save(tmp_path / name, {"key": value})
    streams = nnx.Dict(key=nnx.Variable(jax.random.key(5)))
    for name, stored in (("more", r"uint32\[3,2\]"), ("real", r"float32\[2\]")):
        with pytest.raises(checkpoint.MismatchError, match=f"stored {stored}, wanted key"):
            checkpoint.restore(tmp_path / name, streams=streams)
    assert streams.key.value == jax.random.key(5)
    checkpoint.restore(tmp_path / "right", streams=streams)
    assert jax.random.key_data(streams.key.value).tolist() == [0, 1]


def test_keys_are_not_arrays(tmp_path):
    checkpoint.save(tmp_path / "c", x=jax.random.key(0))
    other_key = jax.random.key(0, impl="rbg")
    for other in (jnp.zeros(2, "uint32"), jnp.uint32(0), other_key, 3):
        with pytest.raises(
            checkpoint.MismatchError, match=r"stored key<threefry2x32>\[\], wanted"
        ) as caught:
            checkpoint.restore(tmp_path / "c", x=other, cast=True)
        assert "cast=True casts" not in str(caught.value)
        assert ("wrap_key_data makes a key" in str(caught.value)) is (other is not other_key)


@pytest.mark.parametrize("cast", [False, True, None])
@pytest.mark.parametrize("file", ["checkpoint", "safetensors"])
def test_keys_of_another_implementation_are_not_cast(tmp_path, file, cast):
    """The message says what to do, which works."""

    def read(impl, **options):
        streams = nnx.Rngs(jax.random.key(5, impl=impl))
        if file == "checkpoint":
            checkpoint.restore(tmp_path / "c", rngs=streams, cast=cast, **options)
        else:
            nnx.load_safetensors(tmp_path / "c.safetensors", streams, cast=cast, **options)
        return streams

    saved = nnx.Rngs(0)
    saved()
    checkpoint.save(tmp_path / "c", rngs=saved)
    nnx.save_safetensors(tmp_path / "c.safetensors", saved)
    message = (
        r"random keys of threefry2x32 cannot be cast to rbg: .*, impl='threefry2x32'\)\), .*RngKey"
    )
    with pytest.raises(checkpoint.MismatchError, match=message) as caught:
        read("rbg")
    assert "cast=True casts" not in str(caught.value)
    assert read("threefry2x32")() == saved()
    assert read("rbg", only=nnx.Not(nnx.RngKey)).default.count.value == 1


# what does not match


def test_strict_names_both_sides_and_the_remedy(tmp_path):
    checkpoint.save(tmp_path / "c", model=nnx.Dict(first=linear(), size=nnx.Param(jnp.ones(3))))
    model = nnx.Dict(frist=linear(1), size=nnx.Param(jnp.ones(4)))
    before = bits(model)
    with pytest.raises(checkpoint.MismatchError) as caught:
        checkpoint.restore(tmp_path / "c", model=model)
    text = str(caught.value)
    assert "(of model) does not match the objects, and nothing was changed." in text
    assert (
        "missing, 2: model.frist.bias (near: model.first.bias), model.frist.kernel (near: " in text
    )
    assert "unexpected, 2: model.first.bias, model.first.kernel" in text
    assert "misshapen, 1: model.size: stored float32[3], wanted float32[4]" in text
    assert 'rename={"model.first.**": "model.frist.**"} restores by another name' in text
    assert caught.value.report.missing == ("model.frist.bias", "model.frist.kernel")
    assert bits(model) == before


@pytest.mark.parametrize(
    ("near", "name", "remedy"),
    [
        ("a.kernel", "b.kernel", 'rename={"a.**": "b.**"}'),
        ("a.first.kernel", "b.kernel", 'rename={"a.first.**": "b.**"}'),
        ("a.kernel", "kernel", 'rename={"a.kernel": "kernel"}'),
        ("kernel", "a.kernel", 'rename={"kernel": "a.kernel"}'),
    ],
)
def test_the_remedy_renames_what_differs(near, name, remedy):
    assert checkpoint.Report("c", (), (name,), (near,), near={name: near}).remedy() == remedy


def test_without_strict_what_matches_is_restored(tmp_path):
    old = nnx.Dict(a=linear(), gone=linear())
    checkpoint.save(tmp_path / "c", model=old)
    model = nnx.Dict(a=linear(1), new=linear(2))
    kept = bits(model.new)
    report = checkpoint.restore(tmp_path / "c", model=model, strict=False)
    assert report.restored == ("model.a.bias", "model.a.kernel") and not report.complete
    assert report.missing == ("model.new.bias", "model.new.kernel")
    assert report.unexpected == ("model.gone.bias", "model.gone.kernel")
    np.testing.assert_array_equal(model.a.kernel, old.a.kernel)
    assert bits(model.new) == kept


def test_an_abstract_leaf_is_not_left_without_a_value(tmp_path):
    checkpoint.save(tmp_path / "c", model=nnx.Dict(a=linear()))
    model = nnx.eval_shape(lambda: nnx.Dict(a=linear(), b=linear()))
    with pytest.raises(
        checkpoint.MismatchError,
        match=r"2 abstract leaves, such as model\.b\.bias, have no value",
    ):
        checkpoint.restore(tmp_path / "c", model=model, strict=False)


def test_what_cannot_be_saved(tmp_path):
    deleted = linear()
    deleted.kernel.get_value().delete()
    abstract = nnx.eval_shape(linear)
    for model, message in (
        (deleted, r"'model\.kernel' has been deleted, probably donated"),
        (abstract, r"'model\.bias' is abstract: it has no value to save"),
        (nnx.Variable(object()), r"'model' is a object, which a checkpoint cannot contain"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=message):
            checkpoint.save(tmp_path / "c", model=model)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"Pass what is to be saved or restored by n"
    ):
        checkpoint.save(tmp_path / "c")

    @nnx.jit
    def inside(model):
        checkpoint.save(tmp_path / "c", model=model)

    with pytest.raises(checkpoint.CheckpointError, match=r"'model\.bias' is traced: save and rest"):
        inside(linear())
    assert not (tmp_path / "c").exists()


OPTIONS = {
    "save": ("only", "overwrite"),
    "restore": ("only", "rename", "strict", "cast"),
    "Manager.save": ("only", "force", "metrics"),
    "Manager.restore": ("only", "rename", "strict", "cast"),
}


@pytest.mark.parametrize("kind", ["object", "number", "text", "arrays", "list"])
@pytest.mark.parametrize(
    ("call", "name"), [(call, name) for call, names in OPTIONS.items() for name in names]
)
def test_an_item_with_the_name_of_an_option_is_refused(tmp_path, call, name, kind):
    item = {
        "object": nnx.MultiMetric(loss=nnx.metrics.Average("loss")),
        "number": 3,
        "text": "x",
        "arrays": {"a": jnp.ones(3)},
        "list": [nnx.Linear(1, 1, rngs=nnx.Rngs(0))],
    }[kind]
    model, path = linear(), tmp_path / "1"
    if "restore" in call:
        checkpoint.save(path, model=linear(1))
    before = bits(model)
    with checkpoint.Manager(tmp_path) as manager:
        function = getattr(manager if "Manager" in call else checkpoint, call.split(".")[-1])
        message = f"{call}: `{name}` is an option, and got .* under another name"
        if name == "only":
            message += "|is not a filter|only='x' matches none of the 2 leaves of model, such as"
        with pytest.raises((checkpoint.CheckpointError, TypeError), match=message):
            function(1 if "Manager" in call else path, model=model, **{name: item})
    assert bits(model) == before and path.exists() is ("restore" in call)


@pytest.mark.parametrize("name", sorted({name for names in OPTIONS.values() for name in names}))
def test_items_with_the_name_of_another_calls_option(tmp_path, name):
    """`save` stores an item called `strict`; `restore` brings it back under another name."""
    item, new = linear(3), linear()
    if name in OPTIONS["save"]:
        return
    checkpoint.save(tmp_path / "c", **{name: item})
    if name in OPTIONS["restore"]:
        checkpoint.restore(tmp_path / "c", other=new, rename={f"{name}.**": "other.**"})
    else:
        checkpoint.restore(tmp_path / "c", **{name: new})
    assert bits(new) == bits(item)


# folders


def test_an_existing_folder_is_not_overwritten_unasked(tmp_path):
    path = tmp_path / "c"
    checkpoint.save(path, step=1)
    with pytest.raises(FileExistsError, match="pass overwrite=True to replace it when the new"):
        checkpoint.save(path, step=2)
    checkpoint.save(path, step=2, overwrite=True)
    assert checkpoint.info(path).values == {"step": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(FileExistsError, match="is not a checkpoint, and is not overwritten"):
        checkpoint.save(tmp_path / "mine", step=2, overwrite=True)


@pytest.mark.parametrize("there", [False, True])
def test_a_replacement_that_was_interrupted_is_found_and_completed(tmp_path, there):
    """A complete checkpoint beside the path is newer than the one that is there, if any."""
    checkpoint.save(tmp_path / "c", step=1)
    (tmp_path / "c").rename(tmp_path / ".c.new")
    if there:
        (tmp_path / "c/arrays").mkdir(parents=True)  # half removed
    assert checkpoint.info(tmp_path / "c").values == {"step": 1}
    assert checkpoint.restore(tmp_path / "c", step=0).values["step"] == 1
    with pytest.raises(FileExistsError):
        checkpoint.save(tmp_path / "c", step=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_a_checkpoint_is_one_of_orbax(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    checkpoint.save(tmp_path / "c", model=linear())
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        args = ocp.args.Composite(arrays=ocp.args.PyTreeRestore())
        arrays = checkpointer.restore(tmp_path / "c", args=args).arrays
    assert {name: a.shape for name, a in arrays.items()} == {
        "model.bias": (3,),
        "model.kernel": (2, 3),
    }


@pytest.mark.parametrize("form", ["state", "dict"])
def test_trees_that_orbax_wrote_by_hand(tmp_path, form):
    ocp = pytest.importorskip("orbax.checkpoint")
    model, optimizer = build()
    kinds = nnx.Any(nnx.Param, nnx.BatchStat, nnx.RngState)
    with ocp.StandardCheckpointer() as checkpointer:
        state = nnx.state(model, kinds)
        nnx.pop(state, nnx.PathContains("empty"))
        checkpointer.save(tmp_path / "c", state if form == "state" else nnx.to_pure_dict(state))
    new, _ = build(1)
    selected = nnx.All(
        nnx.Any(nnx.Param, nnx.BatchStat, nnx.RngState), nnx.Not(nnx.PathContains("empty"))
    )
    report = checkpoint.restore(tmp_path / "c", model=new, only=selected)
    assert report.complete
    assert bits(nnx.state(new, selected)) == bits(nnx.state(model, selected))
    assert checkpoint.info(tmp_path / "c").leaves["blocks.1.kernel"] == "float32[4,4]"
    found = checkpoint.values(tmp_path / "c")
    np.testing.assert_array_equal(found["blocks"]["1"]["kernel"], model.blocks[1].kernel)
    with pytest.raises(
        checkpoint.CheckpointError, match="as one tree: restore one item of it, not mod"
    ):
        checkpoint.restore(tmp_path / "c", model=new, optimizer=optimizer)


# devices


def mesh(shape, names, devices=None):
    kinds = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.make_mesh(shape, names, kinds, devices=devices)


def test_onto_another_mesh(tmp_path):
    model = linear(features=8)
    values = np.asarray(model.kernel)
    eight = NamedSharding(mesh((2, 4), ("x", "y")), P("x", "y"))
    model.kernel.set_value(jax.device_put(values, eight))
    checkpoint.save(tmp_path / "c", model=model)
    four = NamedSharding(mesh((4,), ("z",), jax.devices()[4:]), P(None, "z"))
    other = linear(1, features=8)
    other.kernel.set_value(jax.device_put(other.kernel.get_value(), four))
    checkpoint.restore(tmp_path / "c", model=other)
    assert other.kernel.get_value().sharding == four
    np.testing.assert_array_equal(other.kernel, values)
    one = linear(2, features=8)
    checkpoint.restore(tmp_path / "c", model=one)
    kernel = one.kernel.get_value()
    assert len(kernel.devices()) == 1 and not kernel.committed
    np.testing.assert_array_equal(kernel, values)


def test_an_annotated_abstract_model_comes_onto_the_mesh(tmp_path):
    def annotated():
        metadata = {"out_sharding": (None, "model")}
        return linear(features=8, kernel_metadata=metadata)

    model = annotated()
    checkpoint.save(tmp_path / "c", model=model)
    with jax.set_mesh(mesh((8,), ("model",))):
        abstract = nnx.eval_shape(annotated)
        checkpoint.restore(tmp_path / "c", model=abstract)
    assert abstract.kernel.get_value().sharding.spec == P(None, "model")
    np.testing.assert_array_equal(abstract.kernel, model.kernel)


@pytest.mark.parametrize("kind", list(jax.sharding.AxisType)[:2])
@pytest.mark.parametrize("file", ["checkpoint", "safetensors"])
def test_an_abstract_model_on_a_mesh_with_any_axes(tmp_path, file, kind):
    """`jax.make_mesh` makes explicit axes: traced arrays are on the shape of a mesh, without devices."""

    def build():
        return nnx.Linear(8, 16, rngs=nnx.Rngs(0), kernel_metadata={"sharding": ("x", "y")})

    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    checkpoint.save(tmp_path / "c", model=model)
    nnx.save_safetensors(tmp_path / "s.safetensors", model)
    here = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))
    with jax.set_mesh(here):
        abstract = nnx.eval_shape(build)

    def read():
        if file == "checkpoint":
            return checkpoint.restore(tmp_path / "c", model=abstract)
        return nnx.load_safetensors(tmp_path / "s.safetensors", abstract)

    if kind == jax.sharding.AxisType.Explicit:
        other = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
        for mesh, known in ((None, "none"), (other, "x=4, y=2")):
            message = (
                rf"(bias|kernel)' is abstract, on a mesh of x=2, y=4 .* in use is {known}\. Rest"
            )
            with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
                with pytest.raises(checkpoint.CheckpointError, match=message):
                    read()
            assert isinstance(abstract.kernel.get_value(), jax.ShapeDtypeStruct)
    with jax.set_mesh(here):
        read()
    assert abstract.kernel.get_value().sharding == NamedSharding(here, P("x", "y"))
    assert len(abstract.bias.get_value().devices()) == 8
    np.testing.assert_array_equal(abstract.kernel, model.kernel)


def test_a_mesh_that_does_not_divide_what_is_stored(tmp_path):
    checkpoint.save(tmp_path / "c", model=linear())
    abstract = nnx.eval_shape(linear)
    where = NamedSharding(mesh((8,), ("model",)), P(None, "model"))
    kernel = jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=where)
    abstract.kernel.set_value(kernel)
    with pytest.raises(checkpoint.CheckpointError, match="does not divide: ") as caught:
        checkpoint.restore(tmp_path / "c", model=abstract)
    assert str(caught.value).startswith("'model.kernel' was saved as float32[2,3], which ")
    assert abstract.kernel.get_value() is kernel
    assert isinstance(abstract.bias.get_value(), jax.ShapeDtypeStruct)


def test_a_mesh_of_other_processes(tmp_path, monkeypatch):
    """What the devices of other processes have is not there to be read or saved."""
    model = linear()
    checkpoint.save(tmp_path / "c", model=model)
    where = NamedSharding(mesh((1,), ("model",)), P())
    model.kernel.set_value(jax.device_put(model.kernel.get_value(), where))
    before = bits(model)
    monkeypatch.setattr(NamedSharding, "addressable_devices", frozenset())
    message = "'model.kernel' has no shard on process 0: its sharding is over 1 devices of other"
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.restore(tmp_path / "c", model=model)
    assert bits(model) == before
    monkeypatch.setattr(type(model.kernel.get_value()), "addressable_shards", [])
    message = "'model.(bias|kernel)' has no shard on this process; a checkpoint needs arr"
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.save(tmp_path / "d", model=model)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


# damage


def small(tmp_path):
    path = tmp_path / "c"
    numbers = np.random.default_rng(0).normal(size=3000).astype("float32")
    checkpoint.save(
        path, model=nnx.Dict(w=nnx.Param(jnp.asarray(numbers)), v=nnx.Param(jnp.ones(3)))
    )
    return path


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_damaged_files_change_nothing(tmp_path, how):
    path = small(tmp_path)
    refused = 0
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        content = file.read_bytes()
        middle = len(content) // 2
        if how == "gone":
            file.unlink()
        else:
            file.write_bytes(content[:middle])
        model = nnx.Dict(w=nnx.Param(jnp.zeros(3000)), v=nnx.Param(jnp.zeros(3)))
        try:
            checkpoint.restore(path, model=model)
        except (checkpoint.DamagedError, checkpoint.NotFoundError) as error:
            assert str(path) in str(error)
            assert not model.w.any() and not model.v.any()
            refused += 1
        else:  # a file that is not needed
            assert model.v.tolist() == [1, 1, 1] and model.w.any()
        file.write_bytes(content)
    assert refused >= 4


def test_what_is_there_instead_of_a_checkpoint(tmp_path):
    def message(name):
        with pytest.raises(checkpoint.NotFoundError, match="No checkpoint at") as caught:
            checkpoint.restore(tmp_path / name, step=0)
        return str(caught.value)

    assert message("nothing").endswith("the folder does not exist.")
    (tmp_path / "empty").mkdir()
    assert message("empty").endswith("the folder is empty.")
    (tmp_path / ".killed.new.orbax-checkpoint-tmp").mkdir()
    assert "only the unfinished .killed.new.orbax-checkpoint-tmp is there" in message("killed")
    nnx.save_safetensors(tmp_path / "a.safetensors", linear())
    assert "it is a file, not a folder; nnx.load_safetensors reads" in message("a.safetensors")
    with checkpoint.Manager(tmp_path / "run") as manager:
        manager.save(5, step=5)
    assert "a folder of several (steps 5): open it with nnx.checkpoint.Manager" in message("run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").touch()
    assert message("mine").endswith("the folder contains notes.txt.")


def test_descriptions_that_are_not_ours(tmp_path):
    path = small(tmp_path)
    file = path / "nnxlite/metadata"
    about = json.loads(file.read_text())
    model = nnx.Dict(w=nnx.Param(jnp.zeros(3000)), v=nnx.Param(jnp.zeros(3)))

    def refusal(changed):
        file.write_text(json.dumps(changed))
        with pytest.raises(checkpoint.CheckpointError) as caught:
            checkpoint.restore(path, model=model)
        assert not model.w.any()
        return str(caught.value)

    assert "by a later version of nnxlite (format 99; this version reads 3). Upg" in refusal(
        {**about, "format": 99}
    )
    assert "nnxlite/metadata is damaged (KeyError: 'format')" in refusal({})
    (other := tmp_path / "by_orbax").mkdir()
    for damaged, message in (
        (file, r"c: nnxlite/metadata is damaged \(JSONDecodeError: Exp"),
        (other / "_METADATA", "by_orbax is damaged or cannot be read: "),
    ):
        damaged.write_text("{")
        with pytest.raises(checkpoint.DamagedError, match=message):
            checkpoint.restore(path if damaged is file else other, model=model)
    assert not model.w.any() and not model.v.any()
    leaves = about["leaves"]
    other = {**leaves["model.w"], "shape": [10**12]}
    larger = {**about, "leaves": {**leaves, "model.w": other}}
    assert "stored float32[1000000000000], wanted float32[3000]" in refusal(larger)
    about["leaves"] = {**leaves, "model.w": {**leaves["model.w"], "shape": [1500, 2]}}
    model.w = nnx.Param(jnp.zeros((1500, 2)))
    assert "damaged: 'model.w' is not what was saved (float32[3000], saved as" in refusal(about)


def test_saving_removes_nothing_that_belongs_to_others(tmp_path):
    """Names are not patterns: `run[1]` is not `run1`, and `.run.newest` is not left over of `run`."""
    others = [tmp_path / name for name in (".run1.new", ".run.newest", ".run.new.txt")]
    for other in others:
        other.mkdir()
    left = tmp_path / ".run[1].new.orbax-checkpoint-tmp"
    left.mkdir()
    for name in ("run", "run[1]", "*"):
        checkpoint.save(tmp_path / name, step=1)
        assert checkpoint.restore(tmp_path / name, step=0).values["step"] == 1
    assert all(other.exists() for other in others) and not left.exists()


def test_what_a_file_says_cannot_control_a_terminal(tmp_path):
    checkpoint.save(tmp_path / "c", **{"a\x1b[2J": 1, "b": nnx.Dict()})
    with pytest.raises(checkpoint.MismatchError) as caught:
        checkpoint.restore(tmp_path / "c", **{"a\x1b[2J": "", "c\r": 1})
    for text in (
        str(caught.value),
        repr(caught.value.report),
        repr(checkpoint.info(tmp_path / "c")),
    ):
        assert r"a\x1b[2J" in text and "\x1b" not in text and "\r" not in text


def test_an_array_that_is_described_and_not_there(tmp_path):
    path = small(tmp_path)
    file = path / "nnxlite/metadata"
    about = json.loads(file.read_text())
    about["leaves"]["model.z"] = about["leaves"]["model.v"]
    file.write_text(json.dumps(about))
    sizes = {"v": 3, "w": 3000, "z": 3}
    model = nnx.Dict(**{name: nnx.Param(jnp.zeros(size)) for name, size in sizes.items()})
    with pytest.raises(checkpoint.DamagedError, match=r"model\.z"):
        checkpoint.restore(path, model=model)
    assert not any(model[name].any() for name in sizes)


def test_a_disk_that_fails_leaves_nothing(tmp_path, monkeypatch):
    ocp = pytest.importorskip("orbax.checkpoint")

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "save", fail)
    message = f"could not be written into {tmp_path}, and those .* No space left on device"
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.save(tmp_path / "c", model=linear())
    assert list(tmp_path.iterdir()) == []


def test_without_orbax_the_message_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r'Orbax: pip install "nnxlite\[checkpoint\]"') as caught:
        checkpoint.save(tmp_path / "c", model=linear())
    assert caught.value.name == "orbax" and list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_format_1_stays_readable(tmp_path):
    """`format_1` was written on Python 3.11 with JAX 0.10.2, after three steps of training."""
    model, optimizer = build(1)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    items = {"model": model, "optimizer": optimizer, "metrics": metrics}
    folder = shutil.copytree(Path(__file__).parent / "format_1", tmp_path / "c")
    report = checkpoint.restore(folder, **items, cast=None)
    assert report.complete and report.values["position"] == 3
    found = hashlib.sha256(repr(sorted(bits(*items.values()).items())).encode()).hexdigest()
    assert found.startswith("fa6b51b6f12ef36f")


TRANSFORMATIONS = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "lion": lambda: optax.lion(1e-2),
    "lbfgs": lambda: optax.lbfgs(1e-2, memory_size=2, linesearch=None),
    "multi steps": lambda: optax.MultiSteps(optax.sgd(1e-2, momentum=0.9), 2),
    "by path": lambda: nnx.by_path({"kernel": optax.adam(1e-2), "**": optax.sgd(1e-2)}),
    "masked": lambda: optax.masked(optax.adam(1e-2), nnx.State({"bias": True, "kernel": False})),
    "noise": lambda: optax.noisy_sgd(1e-2, key=jax.random.key(3)),
    "nesterov": lambda: optax.apply_if_finite(optax.sgd(1e-2, momentum=0.9, nesterov=True), 3),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_states_of_transformations_and_averages(tmp_path, name):
    def new(seed):
        model = linear(seed)
        return (
            model,
            nnx.Optimizer(model, TRANSFORMATIONS[name](), wrt=nnx.Param),
            nnx.EMA(model, decay=0.9),
        )

    def train(model, optimizer, ema):
        grads = nnx.grad(lambda model: (model(jnp.ones((1, 2))) ** 2).sum())(model)
        optimizer.update(model, grads)
        ema.update(model)

    run = new(0)
    train(*run)
    checkpoint.save(tmp_path / "c", run=list(run))
    resumed = new(1)
    assert checkpoint.restore(tmp_path / "c", run=list(resumed)).complete
    assert bits(*resumed) == bits(*run)
    for each in (run, resumed):
        train(*each)
    assert bits(*resumed) == bits(*run)


def test_the_size_of_a_checkpoint_is_that_of_its_arrays(tmp_path):
    checkpoint.save(tmp_path / "c", w=jnp.ones((3, 2)), b=jnp.ones(5, "bfloat16"), step=7)
    assert checkpoint.info(tmp_path / "c").nbytes == 3 * 2 * 4 + 5 * 2


def test_a_checkpoint_of_format_2_stays_readable():
    """`format_2` was written before checkpoints had no checksums; it has plain data."""
    found = checkpoint.values(Path(__file__).parent / "format_2")
    assert found["settings"] == {"a": [1, None, b"xy", (2.5, "t")], "empty": {}}
    assert found["z"] == 1 + 2j
    np.testing.assert_array_equal(found["model"]["kernel"], linear().kernel)
