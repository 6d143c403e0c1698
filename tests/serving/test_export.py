"""Exported calls: what they compute, what their files contain, and what is refused."""

from __future__ import annotations

import collections
import functools
import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx

Pair = collections.namedtuple("Pair", ["mean", "rest"])
X = np.linspace(-1, 1, 10, dtype=np.float32).reshape(5, 2)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.tied = self.linear.kernel

    def __call__(self, x):
        return self.norm(self.drop(self.linear(x))) + self.tied.sum()

    def scores(self, x, *, factor=1.0):
        return factor * self(x)


@pytest.fixture(scope="module")
def net():
    net = Net()
    net.eval()
    return net


@pytest.fixture(scope="module")
def exported(net):
    return nnx.export(net, X, shapes="b, 2")


@pytest.mark.quick
def test_a_module_with_any_batch_size(net, exported):
    assert exported.num_programs == 0
    for rows in (5, 3):
        np.testing.assert_allclose(exported(X[:rows]), net(X[:rows]), rtol=1e-5, atol=1e-6)
    assert exported.num_programs == 2
    np.testing.assert_array_equal(exported(jnp.asarray(X)), exported(X.astype(float)))
    assert repr(exported) == "Exported(Net: inputs=float32[b, 2], platforms=cpu, weights=8)"
    assert sum(w.shape == (2, 3) for w in exported.weights.values()) == 1  # the tied one once
    assert "linear.kernel" in exported.weights
    assert exported.platforms == ("cpu",) and exported.name == "Net"


def test_weights_can_be_put_in(net):
    exported = nnx.export(net, X)
    exported.weights["linear.kernel"] = jnp.zeros((2, 3))
    np.testing.assert_allclose(exported(X), jnp.zeros((5, 3)), atol=1e-6)
    assert net.linear.kernel[...].any()


def both(one, x, two):
    return one(x) - two(x)


def test_methods_functions_and_several_objects(net):
    np.testing.assert_allclose(nnx.export(net.scores, X)(X), net(X), rtol=1e-5, atol=1e-6)

    twice = nnx.export(functools.partial(net.scores, factor=2.0), X)
    np.testing.assert_allclose(twice(X), 2 * net(X), rtol=1e-5, atol=1e-6)
    exported = nnx.export(both, net, X, net.linear, shapes=["b, ..."])
    assert "one.norm.mean" in exported.weights and len(exported.weights) == 8
    np.testing.assert_allclose(
        exported(X[:2]), net(X[:2]) - net.linear(X[:2]), rtol=1e-5, atol=1e-6
    )
    assert nnx.export(lambda x: {"twice": 2 * x}, X)(X)["twice"].shape == (5, 2)


def everything(net, batch, key, scale):
    rows = batch["x"].shape[0]
    noise = jax.random.normal(key, (rows, 3))
    out = net(batch["x"]) + scale * noise
    return [Pair(out.mean(0), (None, {"sum": out.sum(-1)})), jax.random.split(key)]


def test_trees_keys_and_scalars(net, tmp_path):
    pytest.importorskip("flatbuffers")
    key = jax.random.key(3)
    exported = nnx.export(
        everything, net, {"x": X, "n": None}, key, 0.5, shapes=("b, 2", None, None)
    )
    exported.save(tmp_path / "call")
    for call in (exported, nnx.load_exported(tmp_path / "call")):
        pair, keys = call({"x": X[:4], "n": None}, key, 2.0)
        expected, _ = everything(net, {"x": X[:4]}, key, 2.0)
        assert type(pair).__name__ == "Pair" and pair._fields == ("mean", "rest")
        np.testing.assert_allclose(pair.mean, expected.mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            pair.rest[1]["sum"], expected.rest[1]["sum"], rtol=1e-4, atol=1e-5
        )
        assert pair.rest[0] is None and (keys == jax.random.split(key)).all()


def test_dtypes_that_numpy_does_not_know(tmp_path):
    pytest.importorskip("flatbuffers")
    layer = nnx.Linear(2, 3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    exported = nnx.export(layer, jnp.asarray(X, jnp.bfloat16), shapes="b, 2")
    exported.save(tmp_path / "call")
    loaded = nnx.load_exported(tmp_path / "call")
    assert loaded.weights["kernel"].dtype == jnp.bfloat16
    assert (
        loaded(jnp.ones((1, 2), jnp.bfloat16)) == exported(jnp.ones((1, 2), jnp.bfloat16))
    ).all()
    with zipfile.ZipFile(tmp_path / "call") as archive:
        assert np.load(archive.open("weights/kernel.npy"), allow_pickle=False).dtype == np.uint16


PROGRAM = """
import sys, numpy, jax, nnxlite as nnx
call = nnx.load_exported(sys.argv[1])
x = jax.numpy.linspace(-1, 1, 10, dtype="float32").reshape(5, 2)
numpy.save(sys.argv[2], call(x))
print(call)
print(jax.grad(lambda x: call(x).sum())(x).shape)
"""


def test_a_fresh_process_without_the_class(net, tmp_path):
    pytest.importorskip("flatbuffers")
    exported = nnx.export(net, X, shapes="b, 2", platforms=["cpu", "tpu"], vjp_order=1)
    exported.save(tmp_path / "call")
    root = Path(nnx.__file__).parents[1]
    paths = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "call", tmp_path / "out.npy"],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    text = "Exported(Net: inputs=float32[b, 2], platforms=cpu/tpu, weights=8)\n(5, 2)\n"
    assert run.stdout == text
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), net(X), rtol=1e-5, atol=1e-6)


def test_donated_arguments():
    exported = nnx.export(lambda state, x: state + x, jnp.ones(3), jnp.ones(3), donate=0)
    state, x = jnp.ones(3), jnp.ones(3)
    assert exported(state, x).tolist() == [2, 2, 2]
    assert state.is_deleted() and not x.is_deleted()


def test_donated_arguments_in_any_order(tmp_path):
    tree = {"a": jnp.ones(3), "b": jnp.zeros(3)}
    exported = nnx.export(lambda x, tree: (x - tree["a"], tree["b"]), jnp.ones(3), tree, donate=1)
    exported.save(tmp_path / "a")
    path = changed(tmp_path / "a", tmp_path / "b", in_signature(donated=[2, 1]))
    for loaded in map(nnx.load_exported, (tmp_path / "a", path)):
        tree = {"a": jnp.ones(3), "b": jnp.zeros(3)}
        difference, b = loaded(3 * jnp.ones(3), tree)
        assert difference.tolist() == [2, 2, 2] and b.tolist() == [0, 0, 0]
        assert tree["a"].is_deleted() and tree["b"].is_deleted()


def test_constraints():
    exported = nnx.export(lambda x: x.sum(-1), X, shapes="b, 2", constraints=["b <= 8", "b >= 2"])
    assert exported(X).shape == (5,)
    with pytest.raises(ValueError, match="b"):
        exported(np.ones((9, 2), np.float32))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e(), r"^Exported Net takes 1 arguments \(x\); got 0\."),
        (lambda e: e(X[0]), r"^Exported Net: x must be float32\[b, 2\]; got float32\[2\]\."),
        (lambda e: e(X[:, :1]), r"x must be float32\[b, 2\]; got float32\[5, 1\]"),
        (lambda e: e(X.astype(int)), r"x must be float32\[b, 2\]; got int32\[5, 2\]"),
        (lambda e: e([X]), r"x must be float32\[b, 2\]; got list"),
        (lambda e: e(None), r"x must be an array; got None"),
    ],
)
def test_arguments_that_do_not_match(exported, call, message):
    with pytest.raises(ValueError, match=message):
        call(exported)


def first(d):
    return d["a"][0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"b": X}, r"Exported first: d must be a dict with the keys \['a'\]; got keys \['b'\]"),
        (X, r"d must be a dict with the keys \['a'\]; got float32\[5, 2\]"),
        ({"a": [X, X]}, r"d\['a'\] must be a list of 1; got 2"),
        ({"a": X[0, 0]}, r"d\['a'\] must be a list of 1; got float32"),
    ],
)
def test_trees_that_do_not_match(wrong, message):
    exported = nnx.export(first, {"a": [X]})
    with pytest.raises(ValueError, match=message):
        exported(wrong)


def test_another_platform(net):
    exported = nnx.export(net, X, platforms=["cuda"])
    with pytest.raises(
        ValueError, match=r"for cuda, and this process runs on cpu\. Export it with"
    ):
        exported(X)


def grows(net, x):
    net.extra = nnx.Param(x)
    return x


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: nnx.export(Net(), X),
            ValueError,
            r"export: Net writes drop\.rngs\.count, norm\.mean, norm\.var\. .* call model\.eval\(\)",
        ),
        (
            lambda: nnx.export(grows, Net(), X),
            ValueError,
            "grows changes the structure of an object",
        ),
        (
            lambda: nnx.export(lambda x: x, {1: X}),
            TypeError,
            "x is a dict with the key 1; keys have",
        ),
        (
            lambda: nnx.export(lambda x: nnx.State({}), X),
            TypeError,
            "the result is a State, which a",
        ),
        (lambda: nnx.export(lambda x: "no", X), TypeError, "the result of .* is a str, not an"),
        (lambda: nnx.export(lambda x, y: x, X, "y"), TypeError, "y of .* is a str, not an array"),
        (
            lambda: nnx.export(lambda x: x, X, shapes=["b, 2", None]),
            ValueError,
            "the 1 arguments of",
        ),
        (
            lambda: nnx.export(lambda x, y: x, X, X, shapes="b, 2"),
            ValueError,
            "shapes needs an entry",
        ),
        (
            lambda: nnx.export(lambda x: x, X, shapes="b, 3"),
            ValueError,
            "different size 3 for known",
        ),
        (lambda: nnx.export(lambda x: x, {"a": X}, shapes=[{"b": "b"}]), ValueError, "argument x"),
        (lambda: nnx.export(lambda x: x, X, donate=1), ValueError, "donate is 1, and .* has 1 arg"),
        (
            lambda: nnx.export(functools.partial(both, two=Net()), Net(), X),
            TypeError,
            r"both carries objects by keyword: \['two'\]",
        ),
    ],
)
def test_calls_that_cannot_be_exported(call, error, message):
    with pytest.raises(error, match=message):
        call()


# Files --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(exported, tmp_path_factory):
    pytest.importorskip("flatbuffers")
    path = tmp_path_factory.mktemp("exported") / "call"
    exported.save(path)
    return path


def changed(path, to, edit):
    """A copy of an archive with other entries."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    edit(entries)
    with zipfile.ZipFile(to, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return to


def edited(**values):
    def edit(entries):
        manifest = json.loads(entries["manifest.json"]) | values
        entries["manifest.json"] = json.dumps(manifest).encode()

    return edit


def other_weight(entries):
    entries["weights/linear.bias.npy"] = entries["weights/norm.mean.npy"][:-1] + b"!"


def larger_weight(entries):
    entries["weights/linear.bias.npy"] += bytes(9999)


def without_signature(entries):
    manifest = json.loads(entries["manifest.json"])
    del manifest["signature"]["avals"]
    entries["manifest.json"] = json.dumps(manifest).encode()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (edited(version=9), "has version 9 of its format; this nnxlite reads version 1"),
        (edited(format="other"), "has the format 'other', not 'nnxlite.exported'"),
        (edited(sha256={}), r"was changed: it has no SHA-256 of \['program', "),
        (without_signature, r"manifest\.json is not complete: KeyError\('avals'\)"),
        (other_weight, r"was changed: the SHA-256 of weights/linear\.bias\.npy is "),
        (larger_weight, r"weights/linear\.bias\.npy has \d+ bytes, and float32\[3\] needs 12"),
        (lambda e: e.update(program=b"x"), "was changed: the SHA-256 of program is"),
        (lambda e: e.pop("weights/linear.bias.npy"), r"it lacks \['weights/linear\.bias\.npy'\]"),
        (lambda e: e.update({"../evil.py": b""}), r"the unexpected entries \['\.\./evil\.py'\]"),
        (
            lambda e: e.pop("manifest.json"),
            r"is not an exported call: it has no manifest\.json, but",
        ),
        (lambda e: e.update({"manifest.json": b"{"}), r"manifest\.json cannot be read: Expecting"),
    ],
)
def test_files_that_were_changed(saved, tmp_path, edit, message):
    path = changed(saved, tmp_path / "changed", edit)
    with pytest.raises(ValueError, match=message):
        nnx.load_exported(path)


def in_signature(**values):
    def edit(entries):
        manifest = json.loads(entries["manifest.json"])
        manifest["signature"] |= values
        entries["manifest.json"] = json.dumps(manifest).encode()

    return edit


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"avals": [["x", "float32", [float("inf")]]]}, r"\[inf\] is not a shape"),
        ({"avals": [["x", "foo", [2]]]}, "data type 'foo' not understood"),
        ({"avals": [["x", "f4,f4", [2]]]}, "'f4,f4' is not the name of a dtype"),
        ({"avals": [["x", "key:none", []]]}, "none"),
        (
            {"avals": [["x", "int32", ["batch", 4]]]},
            r"x is int32\[batch, 4\] in its manifest, and flo",
        ),
        (
            {"avals": [["x", "float32", ["batch", 5]]]},
            r"batch, 5\] in its manifest, and float32\[b",
        ),
        ({"weights": [["linear.bias", "float32", ["batch"]]]}, "a weight has a size that varies"),
        ({"weights": {}}, r"\{\} is not a list of list"),
        ({"inputs": [7]}, "its arguments do not have the leaves that it lists"),
        ({"inputs": [["set", [], [0]]]}, "is not the structure of a tree"),
        (
            {"inputs": [["namedtuple", ["A", "x\nimport os"], [0]]]},
            "is not the structure of a tree",
        ),
        ({"inputs": [["dict", [["a"]], [0]]]}, r"\[\['a'\]\] are not names"),
        ({"outputs": ["list", [], [0, 0]]}, "its results are not numbered from 0"),
        ({"outputs": ["list", [], [0, 1]]}, "its program has 1 results, and its manifest 2"),
        ({"outputs": True}, "True is not the structure of a tree"),
        ({"keys": {"0": "threefry2x32"}}, "is a result, and no keys of threefry2x32"),
        ({"keys": {"7": "threefry2x32"}}, "its results are not numbered from 0"),
        ({"donated": [7]}, "it donates what is not an argument"),
        ({"platforms": [1]}, r"\[1\] is not a list of str"),
    ],
    ids=str,
)
def test_manifests_that_lie(saved, tmp_path, values, message):
    path = changed(saved, tmp_path / "changed", in_signature(**values))
    with pytest.raises(ValueError, match=f"{path}.*{message}"):
        nnx.load_exported(path)


def test_archives_that_were_written_by_others(saved, tmp_path):
    path = tmp_path / "other"
    with zipfile.ZipFile(saved) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    with pytest.raises(ValueError, match="other was changed: 'program' is compressed"):
        nnx.load_exported(path)
    path.write_bytes(saved.read_bytes())
    with pytest.warns(UserWarning), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("program", entries["program"])
    with pytest.raises(ValueError, match="other was changed: it has 'program' twice"):
        nnx.load_exported(path)
    data = saved.read_bytes()
    at = data.index(b"PK\x01\x02") + 8
    path.write_bytes(data[:at] + bytes([data[at] | 1]) + data[at + 1 :])
    with pytest.raises(ValueError, match="other was changed: 'program' is encrypted"):
        nnx.load_exported(path)
    path.write_bytes(data.replace(b"PK\x01\x02", b"PK\x01\x09"))
    with pytest.raises(
        ValueError, match="other is damaged: Bad magic number for central directory"
    ):
        nnx.load_exported(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"(3,)", b"(10**13,)", r"cannot be read"),
        (b"(3,)", b"(9999999999999,)", r"contains float32\[9999999999999\] in 12 bytes, and its"),
        (
            b"'<f4'",
            b"'<i4'",
            r"contains int32\[3\] in 12 bytes, and its manifest says float32\[3\]",
        ),
        (b"'<f4'", b"'|O8'", r"contains object\[3\] in 12 bytes"),
        (b"False", b"True", r"contains float32\[3\] in 12 bytes"),
        (b"{", b"(", r"cannot be read"),
    ],
    ids=str,
)
def test_weights_that_claim_to_be_something_else(saved, tmp_path, old, new, message):
    """With the right hash: the header of the entry is not believed."""

    def edit(entries):
        name = "weights/linear.bias.npy"
        data = entries[name]
        start, end = 10, data.index(b"\n") + 1
        header = data[start:end].replace(old, new, 1).rstrip()
        header += b" " * (end - start - 1 - len(header)) + b"\n"
        assert header != data[start:end] and len(header) == end - start
        entries[name] = data[:start] + header + data[end:]
        manifest = json.loads(entries["manifest.json"])
        manifest["sha256"][name] = hashlib.sha256(entries[name]).hexdigest()
        entries["manifest.json"] = json.dumps(manifest).encode()

    path = changed(saved, tmp_path / "changed", edit)
    with pytest.raises(ValueError, match=f"{path}.*weights/linear.bias.npy.*{message}"):
        nnx.load_exported(path)


def test_pipes_and_folders_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match=f"{path} is not an exported call: it is not a file"):
            nnx.load_exported(path)


def forged(entries, name, data):
    """Put other data into an entry, with its digest."""
    entries[name] = data
    manifest = json.loads(entries["manifest.json"])
    manifest["sha256"][name] = hashlib.sha256(data).hexdigest()
    entries["manifest.json"] = json.dumps(manifest).encode()


def array_file(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_entries_that_were_forged_with_their_digests(saved, exported, tmp_path):
    name = "weights/linear.bias.npy"

    def refusal(entry, data):
        path = changed(saved, tmp_path / "forged", lambda entries: forged(entries, entry, data))
        with pytest.raises(ValueError) as caught:
            nnx.load_exported(path)
        return str(caught.value).removeprefix(str(path))

    with zipfile.ZipFile(saved) as archive:
        size = len(archive.read(name))
    assert refusal(name, b"x" * size).startswith(f": {name} cannot be read: ")
    whole = refusal(name, array_file(np.ones(3, "int32")))
    assert (
        whole
        == f" was changed: {name} contains int32[3] in 12 bytes, and its manifest says float32[3]."
    )
    other = jax.export.export(jax.jit(lambda x: x))(jnp.ones(2)).serialize()
    assert refusal("program", bytes(other)) == (
        " was changed: its program has 1 operands, and its manifest 9."
    )


class Masked(nnx.Module):
    def __init__(self):
        self.mask = nnx.Variable(jnp.array([True, False]))

    def __call__(self, x):
        return jnp.where(self.mask[...], x, 0)


def test_truth_values_that_are_none(tmp_path):
    pytest.importorskip("flatbuffers")
    path = tmp_path / "call"
    nnx.export(Masked(), X).save(path)
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.startswith("weights/"))
    two = array_file(np.array([2, 1], "uint8").view(bool))
    forged_path = changed(path, tmp_path / "forged", lambda entries: forged(entries, name, two))
    with pytest.raises(ValueError, match=f"was changed: {name} has bytes other than 0 and 1"):
        nnx.load_exported(forged_path)


def test_files_that_are_damaged(saved, tmp_path):
    data = saved.read_bytes()
    cut, flipped, text = tmp_path / "cut", tmp_path / "flipped", tmp_path / "text"
    cut.write_bytes(data[:-100])
    with pytest.raises(
        ValueError, match="cut is not an exported call, or only a part of one: it is no"
    ):
        nnx.load_exported(cut)
    at = data.index(b"NUMPY", data.index(b"weights/linear.kernel.npy")) + 100
    flipped.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(
        ValueError, match=r"flipped is damaged: Bad CRC-32 for file 'weights/linear\."
    ):
        nnx.load_exported(flipped)
    text.write_text("not an archive")
    with pytest.raises(ValueError, match="text is not an exported call.* begins with b'not an a'"):
        nnx.load_exported(text)

    def other_program(entries):
        entries["program"] = b"from another JAX"
        manifest = json.loads(entries["manifest.json"])
        manifest["sha256"]["program"] = hashlib.sha256(entries["program"]).hexdigest()
        entries["manifest.json"] = json.dumps(manifest | {"jax": "9.9"}).encode()

    with pytest.raises(ValueError, match=r"was written with JAX 9\.9, and JAX .* cannot read it"):
        nnx.load_exported(changed(saved, tmp_path / "other", other_program))


def test_a_save_that_fails_leaves_the_file_that_was_there(saved, exported, tmp_path, monkeypatch):
    path = tmp_path / "call"
    path.write_bytes(saved.read_bytes())

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        exported.save(path)
    assert path.read_bytes() == saved.read_bytes()
    assert [entry.name for entry in tmp_path.iterdir()] == ["call"]


def test_without_flatbuffers(exported, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(ImportError, match=r'flatbuffers: pip install "nnxlite\[serving\]"'):
        exported.save(tmp_path / "call")
    assert not list(tmp_path.iterdir())
