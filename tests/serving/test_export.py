"""Exported calls: what they compute, what their files contain, and what is refused."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import nnxlite as nnx

X = np.linspace(-1, 1, 10, dtype=np.float32).reshape(5, 2)


def near(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


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
def test_a_module_with_any_batch_size(net):
    assert (exported := nnx.export(net, X, shapes="b, 2")).num_programs == 0
    for rows in (5, 3):
        near(exported(X[:rows]), net(X[:rows]))
    assert exported.num_programs == 2
    np.testing.assert_array_equal(exported(jnp.asarray(X)), exported(X.astype(float)))
    assert repr(exported) == "Exported(Net: x=float32[b,2], platforms=cpu, weights=8)"
    assert sum(w.shape == (2, 3) for w in exported.weights.values()) == 1  # the tied one once
    assert "linear.kernel" in exported.weights
    assert exported.platforms == ("cpu",) and exported.name == "Net"


def both(one, x, two):
    return one(x) - two(x)


def test_methods_functions_and_several_objects(net):
    twice = nnx.export(functools.partial(net.scores, factor=2.0), X)
    near(twice(X), 2 * net(X))
    twice.weights["linear.kernel"] = jnp.zeros((2, 3))
    near(twice(X), jnp.zeros((5, 3)))
    assert net.linear.kernel[...].any()
    exported = nnx.export(both, net, X, net.linear, shapes=["b, ..."])
    assert "one.norm.mean" in exported.weights and len(exported.weights) == 8
    near(exported(X[:2]), net(X[:2]) - net.linear(X[:2]))
    alike = nnx.Dict({"a.b": nnx.Param(X), "a": nnx.Dict(b=nnx.Param(2 * X))})
    near(nnx.export(lambda d, weights: weights + d["a"]["b"], alike, X)(X), 3 * X)
    assert nnx.export(lambda x: {"twice": 2 * x}, X)(X)["twice"].shape == (5, 2)


def everything(net, batch, key, scale):
    rows = batch["x"].shape[0]
    out = net(batch["x"]) + scale * jax.random.normal(key, (rows, 3))
    return [(out.mean(0), (None, {"sum": out.sum(-1)})), jax.random.split(key)]


def test_trees_keys_and_scalars(net, tmp_path):
    key = jax.random.key(3)
    shapes = ("b, 2", None, None)
    exported = nnx.export(everything, net, {"x": X, "n": None}, key, 0.5, shapes=shapes)
    exported.save(tmp_path / "call")
    expected = everything(net, {"x": X[:4]}, key, 2.0)
    for call in (exported, nnx.load_exported(tmp_path / "call")):
        out = call({"x": X[:4], "n": None}, key, 2.0)
        assert jax.tree.structure(out) == jax.tree.structure(expected)
        near(out[0][0], expected[0][0])
        np.testing.assert_allclose(out[0][1][1]["sum"], expected[0][1][1]["sum"], atol=1e-4)
        assert (out[1] == expected[1]).all()


def test_what_a_file_contains(net, tmp_path):
    """Safetensors: weights of any dtype by path, and keys as their data."""
    layer = nnx.Linear(2, 3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    for dtype in ("float8_e5m2", "float8_e4m3fn", "int4", "uint4"):
        setattr(layer, dtype, nnx.Variable(jnp.array([1, 2], dtype)))
    exported = nnx.export(both, net, jnp.asarray(X, jnp.bfloat16), layer, shapes=["b, 2"])
    exported.save(tmp_path / "call")
    tensors = safetensors.numpy.load_file(tmp_path / "call")
    assert tensors.keys() == {"program", *(f"weights/{path}" for path in exported.weights)}
    np.testing.assert_array_equal(tensors["weights/two.kernel"], layer.kernel[...])
    loaded = nnx.load_exported(tmp_path / "call")
    assert repr(loaded) == repr(exported) and loaded.weights.keys() == exported.weights.keys()
    for path, weight in exported.weights.items():
        assert loaded.weights[path].dtype == weight.dtype
        assert (loaded.weights[path] == weight).all(), path
    x = jnp.ones((1, 2), jnp.bfloat16)
    assert (loaded(x) == exported(x)).all()


PROGRAM = """
import sys, numpy, jax, nnxlite as nnx
call = nnx.load_exported(sys.argv[1])
x = jax.numpy.linspace(-1, 1, 10, dtype="float32").reshape(5, 2)
numpy.save(sys.argv[2], call(x))
print(call)
print(jax.grad(lambda x: call(x).sum())(x).shape)
"""


def test_a_fresh_process_without_the_class(net, tmp_path):
    exported = nnx.export(net, X, shapes="b, 2", platforms=["cpu", "tpu"])
    exported.save(tmp_path / "call", vjp_order=1)
    paths = [str(Path(nnx.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", PROGRAM, tmp_path / "call", tmp_path / "out.npy"]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    text = "Exported(Net: x=float32[b,2], platforms=cpu/tpu, weights=8)\n(5, 2)\n"
    assert run.stdout == text
    near(np.load(tmp_path / "out.npy"), net(X))


def test_constraints_and_another_platform(net):
    exported = nnx.export(lambda x: x.sum(-1), X, shapes="b, 2", constraints=["b <= 8", "b >= 2"])
    assert exported(X).shape == (5,)
    with pytest.raises(ValueError, match="b"):
        exported(np.ones((9, 2), np.float32))
    exported = nnx.export(net, X, platforms=["cuda"])
    with pytest.raises(ValueError, match=r"'Net' was exported for platforms .*cuda.* on .*cpu"):
        exported(X)


def with_weight(exported, path, value):
    other = nnx.serving.Exported(exported.program, dict(exported.weights), "Net", ["x"])
    other.weights[path] = value
    return other(X)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e(), r"^Exported Net takes 1 arguments \(x\); got 0\."),
        (lambda e: e(X[0]), r"^Exported Net: Rank mismatch for kwargs\['x'\].*\(b, 2\).*\(2,\)"),
        (lambda e: e(X[:, :1]), r"Exported Net: Shape mismatch for kwargs\['x'\].shape\[1\]"),
        (lambda e: e(X.astype(int)), r"Dtype mismatch for kwargs\['x'\].*float32 .* int32"),
        (lambda e: e({"a": X}), r"(?s)Exported Net: .*'Net'.*kwargs\['x'\] is a .*dict"),
        (lambda e: with_weight(e, "linear.bias", jnp.ones(2)), r"\(3,\) and called with \(2,\)"),
        (lambda e: with_weight(e, "linear.more", 1.0), r"(?s)differ.*args\[0\].*ar.more'"),
    ],
)
def test_arguments_and_weights_that_do_not_match(exported, call, message):
    with pytest.raises(ValueError, match=message):
        call(exported)


def grows(net, x):
    net.extra = nnx.Param(x)
    return x


same = lambda x: x
WRITES = r"export: Net writes drop\.rngs\.count, norm\.mean, norm\.var\. .* call model\.eval\(\)"
NUMBERED = r"the argument one of both has a dict with the keys \[1\]; keys have to be strings"
OF_A_CLASS = "the result of .* has a State, which a process without this class could not make"
SHAPES = r"shapes needs an entry for each of the 1 arguments of .* not objects \(x\)"
KEYWORD = r"both carries objects by keyword: \['two'\]"
NO_ARRAY = r"type <class 'str'> .*'x'"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nnx.export(Net(), X), WRITES),
        (lambda: nnx.export(grows, Net(), X), "grows changes the structure of an obj"),
        (lambda: nnx.export(both, {1: X}, X, X), NUMBERED),
        (lambda: nnx.export(lambda x: nnx.State({}), X), OF_A_CLASS),
        (lambda: nnx.export(lambda x: "no", X), "returned a value of type <class 'str'>"),
        (lambda: nnx.export(both, X, "y", X), NO_ARRAY),
        (lambda: nnx.export(same, X, shapes=["b, 2", None]), SHAPES),
        (lambda: nnx.export(same, X, shapes="b, 3"), "different size 3 for known"),
        (lambda: nnx.export(same, {"a": X}, shapes=[{"b": "b"}]), r"\['x'\]"),
        (lambda: nnx.export(functools.partial(both, two=Net()), Net(), X), KEYWORD),
    ],
)
def test_calls_that_cannot_be_exported(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.fixture(scope="module")
def saved(exported, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "call"
    exported.save(path)
    return path


def rewrite(path, changed):
    """A file with other tensors or metadata; None removes one."""
    with safetensors.safe_open(path, "numpy") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    for name, value in changed.items():
        (tensors if isinstance(value, np.ndarray) else metadata)[name] = value
    metadata = {name: value for name, value in metadata.items() if value is not None}
    safetensors.numpy.save_file(tensors, path, metadata)


cut = lambda path: path.write_bytes(path.read_bytes()[:-100])
OTHER_JAX = {"program": np.zeros(9, np.uint8), "jax": "9.9"}
DAMAGED = "is not an exported call, or damaged"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nnxlite.exported": "9"}, "version 9 of the format; this nnxlite reads 2"),
        ({"nnxlite.exported": None}, f"{DAMAGED}: version none"),
        ({"signature": None}, f"{DAMAGED}: 'signature'"),
        ({"signature": "{"}, f"{DAMAGED}: Expecting"),
        ({"signature": "[]"}, f"{DAMAGED}: list indices must be integers"),
        (OTHER_JAX, r"its program was written with JAX 9\.9, and JAX .* cannot read it"),
        (cut, f"{DAMAGED}: Error while deserializing header"),
        (lambda path: path.write_bytes(b""), DAMAGED),
        (lambda path: path.write_text("text, and nothing else"), DAMAGED),
    ],
)
def test_files_of_others_and_damaged_ones(saved, tmp_path, change, message):
    path = shutil.copy(saved, tmp_path / "changed")
    change(path) if callable(change) else rewrite(path, change)
    with pytest.raises(ValueError, match=f"changed.*{message}"):
        nnx.load_exported(path)


def test_a_save_that_fails_leaves_the_file_that_was_there(saved, exported, tmp_path, monkeypatch):
    path = shutil.copy(saved, tmp_path / "call")
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError("No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        exported.save(path)
    assert path.read_bytes() == saved.read_bytes()
    assert [entry.name for entry in tmp_path.iterdir()] == ["call"]


@pytest.mark.parametrize("package", ["flatbuffers", "safetensors.numpy"])
def test_without_packages(saved, exported, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    for call in (lambda: exported.save(tmp_path / "call"), lambda: nnx.load_exported(saved)):
        with pytest.raises(ImportError, match=r'safetensors: pip install "nnxlite\[serving\]"'):
            call()
    assert not list(tmp_path.iterdir())
