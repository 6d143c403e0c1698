"""Safetensors files: round trips, shardings, several files, memory, and damaged or foreign files."""

import dataclasses
import json
import os
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from nnxlite.checkpoint import DamagedError, Mapping, MismatchError, NotFoundError, Rule
from nnxlite.checkpoint import _weights as files
from tests.checkpoint.models import bits, linear, names_in
from tests.checkpoint.models import params as one

safetensors = pytest.importorskip("safetensors")
from safetensors.numpy import load_file, save_file  # noqa: E402


def test_a_file_has_plain_names_and_the_data_of_random_keys(tmp_path):
    drop = lambda i: nnx.Dropout(0.5, rngs=nnx.Rngs(i))
    new = lambda i: nnx.Dict(layers=nnx.List([linear(i), linear(i)]), dropout=drop(i))
    model, other = new(0), new(1)
    model.again, other.again = model.layers[0], other.layers[0]
    nnx.save_safetensors(tmp_path / "m.safetensors", model)
    assert names_in(tmp_path) == ["m.safetensors"]
    stored = load_file(tmp_path / "m.safetensors")
    first = "again.bias again.kernel dropout.rngs.count dropout.rngs.key".split()
    assert sorted(stored) == [*first, "layers.1.bias", "layers.1.kernel"]
    assert np.array_equal(stored["again.kernel"], model.layers[0].kernel[...])
    with safetensors.safe_open(tmp_path / "m.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
    assert bits(model) != bits(other)
    report = nnx.load_safetensors(tmp_path / "m.safetensors", other)
    assert report.complete and len(report.restored) == 6
    assert bits(model) == bits(other) and other.again is other.layers[0]
    assert other.dropout.rngs.key[...].dtype == model.dropout.rngs.key[...].dtype


def test_every_dtype(tmp_path):
    values = {name: jnp.asarray([[1, 0, 1]], name) for name in files.NAMES if "64" not in name}
    values |= {"scalar": jnp.float32(3), "empty": jnp.zeros((0, 3)), "host": np.array([1, 2**40])}
    values |= {"number": 5, "part": 2.5, "flag": True, "generic": np.float64(1 / 3)}
    model = nnx.Dict({name: nnx.Variable(value) for name, value in values.items()})
    nnx.save_safetensors(tmp_path, model)
    for _, offset, spec in files.stored_in(tmp_path / "model.safetensors").values():
        assert offset % jnp.dtype(spec.dtype).itemsize == 0
    zero = lambda x: (x * 0).astype(x.dtype) if hasattr(x, "dtype") else type(x)()
    other = nnx.Dict({name: nnx.Variable(zero(value)) for name, value in values.items()})
    report = nnx.load_safetensors(tmp_path, other)
    assert report.complete and {entry.name for entry in report.cast} == {"number", "part", "flag"}
    for name, variable in model.items():
        loaded, value = other[name].get_value(), variable.get_value()
        assert type(loaded) is type(value), name
        assert getattr(loaded, "dtype", None) == getattr(value, "dtype", None), name
        assert np.asarray(loaded).tobytes() == np.asarray(value).tobytes(), name


def test_what_the_format_does_not_have(tmp_path):
    abstract = nnx.eval_shape(lambda: linear(use_bias=False))
    unknown = "; safetensors files have arrays of bool, int8, uint8,"
    for model, message in (
        (nnx.Dict(x=nnx.Variable(np.array([1j]))), f"'x' is complex128[1]{unknown}"),
        (nnx.Dict(x=nnx.Variable(jnp.zeros(2, "int4"))), f"'x' is int4[2]{unknown}"),
        (nnx.Dict(x=nnx.Variable("a")), f"'x' is str32[]{unknown}"),
        (abstract, "'kernel' is abstract: it has no value to save."),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            nnx.save_safetensors(tmp_path, model)
    assert names_in(tmp_path) == []


def test_an_array_of_several_processes_is_refused(tmp_path, monkeypatch):
    model = one(a=jnp.zeros(2))
    kind = type(model.a.get_value())
    monkeypatch.setattr(kind, "is_fully_addressable", False)
    monkeypatch.setattr(kind, "is_fully_replicated", False)
    with pytest.raises(ValueError, match="'a' is spread over several processes. Gather it first"):
        nnx.save_safetensors(tmp_path, model)
    monkeypatch.setattr(kind, "is_fully_replicated", True)
    nnx.save_safetensors(tmp_path, model)
    assert names_in(tmp_path) == ["model.safetensors"]


def test_of_a_sharded_array_only_the_parts_that_are_needed_are_read(tmp_path, monkeypatch):
    values = np.arange(64, dtype="f4").reshape(8, 8)
    save_file({"w": values}, tmp_path / "m.safetensors")
    sharding = NamedSharding(jax.make_mesh((8,), ("x",)), P(None, "x"))
    model = nnx.Dict(k=nnx.Param(jax.ShapeDtypeStruct((8, 8), "float32", sharding=sharding)))
    read = []

    class Watched(np.ndarray):
        def __getitem__(self, index):
            part = super().__getitem__(index)
            read.append(part.shape)
            return part.view(np.ndarray)

    mapped = np.memmap
    monkeypatch.setattr(files.np, "memmap", lambda *args: mapped(*args).view(Watched))
    nnx.load_safetensors(tmp_path, model, mapping=Mapping([Rule("w", "k", "o i -> i o")]))
    assert read == [(8, 1)] * 8
    assert np.array_equal(model.k[...], values.T) and model.k[...].sharding == sharding


def pair(value):
    return one(a=jnp.full(4, value), b=jnp.full(4, value))


def loaded(folder):
    model = pair(7.0)
    nnx.load_safetensors(folder, model)
    return model


def test_saving_again_replaces_the_file_and_an_index(tmp_path):
    """What a killed save has left is overwritten; the files of others stay."""
    index = {"weight_map": {"a": "mine.safetensors", "b": "mine.safetensors"}}
    for name in (".m.safetensors.tmp", "m.safetensors.index.json", "mine.safetensors"):
        (tmp_path / name).write_text(json.dumps(index))
    for value in (1.0, 2.0):
        nnx.save_safetensors(tmp_path / "m.safetensors", pair(value))
        assert names_in(tmp_path) == ["m.safetensors", "mine.safetensors"]
        assert bits(loaded(tmp_path / "m.safetensors")) == bits(pair(value))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch, error):
    nnx.save_safetensors(tmp_path, pair(0.0))

    def fail(*args):
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(type(error)):
        nnx.save_safetensors(tmp_path, pair(1.0))
    assert bits(loaded(tmp_path)) == bits(pair(0.0)) and names_in(tmp_path) == ["model.safetensors"]


def test_a_mapping_for_files(tmp_path):
    model, other = linear(), linear(1)
    mapping = Mapping([Rule("fc.weight", "kernel", "o i -> i o"), Rule("fc.bias", "bias")])
    nnx.save_safetensors(tmp_path, model, mapping=mapping, metadata={"made by": "me"})
    assert load_file(tmp_path / "model.safetensors")["fc.weight"].shape == (3, 2)
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as file:
        assert file.metadata() == {"made by": "me"}
    report = nnx.load_safetensors(tmp_path, other, mapping=mapping)
    assert report.renamed == (("fc.weight", "kernel"), ("fc.bias", "bias"))
    assert bits(model) == bits(other)
    with pytest.raises(ValueError, match="Pass `mapping` or `rename`, not both"):
        nnx.load_safetensors(tmp_path, other, mapping=mapping, rename={"fc.*": "*"})
    nnx.save_safetensors(tmp_path, nnx.Dict(old=model))
    nnx.load_safetensors(tmp_path, other := linear(2), rename={"old.**": "**"})
    assert bits(model) == bits(other)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Small:
    """A container that refuses large values when it is put together."""

    value: jax.Array

    def __post_init__(self):
        if isinstance(self.value, (np.ndarray, jax.Array)) and (self.value > 10).any():
            raise ValueError("too large")


def test_a_value_that_cannot_be_put_together_changes_nothing(tmp_path):
    zero = jnp.zeros(2)
    small, a, z = nnx.Variable(Small(zero)), nnx.Param(zero), nnx.Param(zero)
    model = nnx.Dict(a=a, bare=zero, small=small, z=z)
    names = ("a", "bare", "small.value", "z")
    save_file({name: np.full(2, 20, "f4") for name in names}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="too large"):
        nnx.load_safetensors(tmp_path, model)
    assert not any(array.any() for array in jax.tree.leaves(nnx.state(model)))


def test_data_is_a_key_in_the_form_of_its_data_alone(tmp_path):
    keys = nnx.Dict(key=nnx.Variable(jax.random.key(5)))
    data = np.array([0, 1], "u4"), np.zeros((3, 2), "u4"), np.zeros(2, "f4"), np.zeros(4, "u4")
    for index, stored in enumerate(data):
        save_file({"key": stored}, tmp_path / f"{index}.safetensors")
        if index:
            message = r"key: stored .*, wanted key<threefry2x32>\[\]"
            with pytest.raises(MismatchError, match=message):
                nnx.load_safetensors(tmp_path / f"{index}.safetensors", keys)
    assert keys.key.value == jax.random.key(5)
    assert not nnx.load_safetensors(tmp_path / "0.safetensors", keys).cast
    assert jax.random.key_data(keys.key.value).tolist() == [0, 1]


def header(entries, data=b""):
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(2,)):
    return {"a": {"dtype": dtype, "shape": list(shape), "data_offsets": [0, 8]}}


BAD = {
    "cut": (header(entry(), bytes(8))[:-3], "is not a safetensors file, or only a part of one: "),
    "cut header": (header(entry())[:20], "is not a safetensors file, or only a part of one: "),
    "lying shape": (header(entry(shape=(2**40, 2**40)), bytes(8)), "overflow computing buffer size"),
    "dtype": (header(entry("F4", (16,)), bytes(8)), "has 'a' in the dtype F4, which JAX has no"),
    "pickle": (pickle.dumps({"a": 1}), "Pickles, such as files of PyTorch (.bin, .pt), can run any"),
    "zip": (b"PK\x03\x04" + bytes(100), "Pickles, such as files of PyTorch (.bin, .pt), can run any"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_files_that_are_damaged_or_of_another_kind(tmp_path, kind, monkeypatch):
    content, message = BAD[kind]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.safetensors").write_bytes(content)
    model = one(a=jnp.ones(2))
    with pytest.raises(DamagedError, match=re.escape(message)) as caught:
        nnx.load_safetensors("m.safetensors", model)
    assert str(caught.value).startswith("m.safetensors ")
    assert model.a[...].tolist() == [1, 1] and names_in(tmp_path) == ["m.safetensors"]


def test_paths_with_nothing_to_load(tmp_path):
    def refused(path, message):
        with pytest.raises(NotFoundError, match=re.escape(message)):
            nnx.load_safetensors(path, one(a=jnp.zeros(2)))

    refused(tmp_path / "no" / "m.safetensors", f"No such file: {tmp_path}/no/m.safetensors.")
    refused(tmp_path, f"The folder {tmp_path} has no model.safetensors; there is no file. Pickles,")
    for name in "xy":
        (tmp_path / f"{name}.safetensors").write_bytes(b"")
    refused(tmp_path, "there is x.safetensors, y.safetensors. Pass one of")


def test_a_repository_of_the_hub(tmp_path, monkeypatch):
    """Its folder in the cache, as huggingface_hub lays it out; nothing is downloaded."""
    constants = pytest.importorskip("huggingface_hub.constants")
    repository = tmp_path / "models--owner--name"
    for revision, value in (("main", 1.0), ("v2", 2.0)):
        snapshot = repository / "snapshots" / (revision * 20)[:40]
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(snapshot.name)
        nnx.save_safetensors(snapshot, one(a=jnp.full(2, value)))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = one(a=jnp.zeros(2))
    assert nnx.load_safetensors("hf://owner/name", model).complete and (model.a[...] == 1).all()
    nnx.load_safetensors("hf://owner/name@v2", model)
    assert (model.a[...] == 2).all()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"'hf://owner/name' needs huggingface_hub: pip install"):
        nnx.load_safetensors("hf://owner/name", model)


@pytest.mark.parametrize(
    ("weight_map", "kind", "message"),
    [
        ({"a": "../m.safetensors"}, DamagedError, "refers to '../m.safetensors', which is not in its"),
        ({"a": "/etc/m.safetensors"}, DamagedError, "refers to '/etc/m.safetensors', which is not in"),
        ({"a": "b.safetensors"}, NotFoundError, "lists 'b.safetensors', which is not beside it"),
        ({"b": "m.safetensors"}, DamagedError, "lists 'b' in 'm.safetensors', which does not have it."),
        (["a"], DamagedError, "is not an index of safetensors files"),
    ],
    ids=str,
)  # fmt: skip
def test_an_index_that_is_wrong(tmp_path, weight_map, kind, message):
    folder = tmp_path / "in"
    folder.mkdir()
    for place in (tmp_path, folder):
        save_file({"a": np.ones(2, "f4")}, place / "m.safetensors")
    index = folder / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    model = one(a=jnp.zeros(2))
    with pytest.raises(kind, match=re.escape(message)):
        nnx.load_safetensors(index, model)
    assert not model.a[...].any()


def test_an_index_decides_and_leaves_nothing_out(tmp_path):
    """Links out of the folder, as caches of downloads have them, are followed."""
    save_file({"a": np.ones(2, "f4"), "b": np.ones(2, "f4")}, tmp_path / "blob")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.safetensors").symlink_to(tmp_path / "blob")
    save_file({"a": np.zeros(2, "f4")}, tmp_path / "in" / "y.safetensors")
    index = tmp_path / "in" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "y.safetensors", "b": "x.safetensors"}}))
    model = one(a=jnp.full(2, 3.0), b=jnp.full(2, 3.0))
    nnx.load_safetensors(tmp_path / "in", model)
    assert model.a[...].tolist() == [0, 0] and model.b[...].tolist() == [1, 1]
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with pytest.raises(MismatchError, match="unexpected, 1: b"):
        nnx.load_safetensors(index, one(a=jnp.zeros(2)))


def test_without_the_package(tmp_path, monkeypatch):
    nnx.save_safetensors(tmp_path, pair(0.0))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=re.escape('pip install "nnxlite[checkpoint]"')):
        loaded(tmp_path)


MEMORY = """
import re, resource, sys
import jax, jax.numpy as jnp, numpy as np
import nnxlite as nnx
from nnxlite.checkpoint import Mapping, Rule
from safetensors.numpy import save_file

count, array = 24, 2**23  # 24 arrays of 8 MiB
mapping = Mapping([Rule("{i}", "{i}", "a b -> b a")])
save_file({str(i): np.full((1024, 2048), i, "f4") for i in range(count)}, sys.argv[1])

def load(n, mapping=mapping):
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = lambda i: jax.ShapeDtypeStruct((2048, 1024), "float32", sharding=where if i % 2 else None)
    model = nnx.List([nnx.Param(abstract(i)) for i in range(n)])
    nnx.load_safetensors(sys.argv[1], model, mapping=mapping, strict=False)
    return model

load(1)  # imports and the like are not counted
open("/proc/self/clear_refs", "w").write("5")  # the peak begins here
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
other = load(count)
assert [float(p[0, 0]) for p in other] == list(range(count))
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
print((peak - before) / array - count)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's figures")
def test_loading_needs_little_more_memory_than_the_result(tmp_path):
    """The array that is read, and the pages of its file."""
    env = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(Path(nnx.__file__).parents[1])}
    env["MALLOC_MMAP_THRESHOLD_"] = "1000000"  # so that freed arrays are given back
    command = [sys.executable, "-c", MEMORY, tmp_path / "m.safetensors"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 4  # in arrays; the whole model is 24
