"""Checkpoints of Hugging Face transformers: loaded into models written here, and saved back.

Their models have random weights, made on the spot; nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from nnxlite.checkpoint import Mapping, MismatchError, Rule, Tie

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
from safetensors.numpy import load_file  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

EXAMPLE = Path(__file__).parents[2] / "examples" / "load_pretrained.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("load_pretrained_example", EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    transformers.utils.logging.disable_progress_bar()
    return module


@pytest.fixture(scope="module")
def cases(example) -> dict[str, tuple]:
    return {case.name: case for case in example.cases(width=16, layers=2)}


def arrays_of(folder: Path) -> dict[str, np.ndarray]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def loaded(case):
    model = nnx.eval_shape(lambda: case.ours(rngs=nnx.Rngs(0)))
    assert case.mapping.load(case.theirs.state_dict(), model).complete
    return model


NAMES = ["GPT-2", "Llama", "ViT"]


@pytest.mark.parametrize("name", NAMES)
def test_loaded_from_several_files_and_saved_back(example, cases, name, tmp_path):
    case = cases[name]
    result = example.run(case, tmp_path)
    assert result.report.complete and not result.report.cast and result.files > 1
    assert result.loaded < 1e-5 and result.returned < 1e-6
    theirs, ours = (
        arrays_of(tmp_path / name / "transformers"),
        arrays_of(tmp_path / name / "nnxlite"),
    )
    assert theirs.keys() == ours.keys() and len(ours) > 20
    assert all(np.array_equal(ours[key], array) for key, array in theirs.items())


def test_one_file_in_bfloat16_and_onto_a_mesh(cases, tmp_path):
    case = cases["Llama"]
    half = type(case.theirs)(case.theirs.config).to(torch.bfloat16)
    half.load_state_dict(case.theirs.state_dict())
    half.save_pretrained(tmp_path)
    with pytest.raises(MismatchError, match="missing"):
        nnx.load_safetensors(tmp_path, nnx.eval_shape(lambda: case.ours(rngs=nnx.Rngs(0))))
    model = nnx.eval_shape(lambda: case.ours(rngs=nnx.Rngs(0)))
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        spec = P(None, "model") if path[-1] == "kernel" and "attention" in path else P()
        spec = P() if leaf.shape[1:2] == (2,) or path[-2] == "out" else spec
        leaf.value = jax.ShapeDtypeStruct(leaf.shape, "float32", sharding=NamedSharding(mesh, spec))
    report = nnx.load_safetensors(tmp_path, model, mapping=case.mapping)
    assert {(m.stored[:8], m.wanted[:7]) for m in report.cast} == {("bfloat16", "float32")}
    query = model.blocks[0].attention.query.kernel[...]
    assert query.sharding.spec == P(None, "model")
    assert query.addressable_shards[0].data.shape == (16, 1, 4)
    theirs = half.state_dict()["model.layers.0.self_attn.q_proj.weight"].float().numpy()
    assert np.array_equal(query, theirs.T.reshape(16, 4, 4))


def test_a_state_dict_in_memory_and_back(cases):
    case = cases["Llama"]
    model = loaded(case)
    expected = case.their_logits(case.theirs)
    logits = np.asarray(model(case.inputs))
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()
    exported = {
        name: torch.from_numpy(np.array(x)) for name, x in case.mapping.export(model).items()
    }
    theirs = type(case.theirs)(case.theirs.config).eval()
    assert str(theirs.load_state_dict(exported)) == "<All keys matched successfully>"
    assert np.array_equal(case.their_logits(theirs), expected)
    half = {name: x.to(torch.bfloat16) for name, x in exported.items()}
    report = case.mapping.load(half, model)
    assert len(report.cast) == len(report.restored) == len(half)


def test_weights_that_pytorch_ties(cases):
    """The state_dict has both names, what `save_pretrained` writes only one."""
    case = cases["GPT-2"]
    state = case.theirs.state_dict()
    names = ["transformer.wte.weight", "lm_head.weight"]
    assert all(name in state for name in names)
    model = nnx.eval_shape(lambda: case.ours(rngs=nnx.Rngs(0)))
    with pytest.raises(MismatchError, match="unexpected, 1: lm_head.weight"):
        case.mapping.load(state, model)
    tied = Mapping([Rule(names, "tokens.embedding", Tie()), *case.mapping.entries[1:]])
    tied.load(state, model)
    exported = tied.export(model)
    assert np.array_equal(exported[names[0]], exported[names[1]])
    theirs = type(case.theirs)(case.theirs.config).eval()
    theirs.load_state_dict({name: torch.from_numpy(np.array(x)) for name, x in exported.items()})
    assert np.array_equal(case.their_logits(theirs), case.their_logits(case.theirs))


def test_a_checkpoint_of_another_model(cases, tmp_path):
    cases["GPT-2"].theirs.save_pretrained(tmp_path)
    model = loaded(cases["Llama"])
    before = jax.tree.map(jnp.copy, nnx.state(model))
    with pytest.raises(MismatchError) as caught:
        nnx.load_safetensors(tmp_path, model, mapping=cases["Llama"].mapping)
    assert "missing, 21: tokens.embedding (as model.embed_tokens.weight)" in str(caught.value)
    assert "unexpected, 28: transformer.h.0.attn.c_attn.bias" in str(caught.value)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, before, nnx.state(model)))


def test_a_file_of_pickles_is_not_read(cases, tmp_path):
    torch.save(cases["ViT"].theirs.state_dict(), tmp_path / "pytorch_model.bin")
    model = nnx.eval_shape(lambda: cases["ViT"].ours(rngs=nnx.Rngs(0)))
    with pytest.raises(FileNotFoundError, match="can run any code and are never read here"):
        nnx.load_safetensors(tmp_path, model)
    with pytest.raises(ValueError, match="Pickles, such as files of PyTorch"):
        nnx.load_safetensors(tmp_path / "pytorch_model.bin", model)


def test_the_example_prints_a_table(example, tmp_path, capsys):
    example.main(["--quick", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    rows = [line.split("│")[1:-1] for line in printed.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert [row[0] for row in cells] == NAMES
    assert [row[3:6] for row in cells] == [["36", "0", "0"], ["21", "0", "0"], ["40", "0", "0"]]
    assert "largest difference of logits, relative to the largest logit: " in printed
    assert (tmp_path / "Llama" / "nnxlite" / "model.safetensors.index.json").is_file()


def test_the_example_says_what_to_install(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no', name='torch')")
    path = os.pathsep.join([str(tmp_path), str(EXAMPLE.parents[1])])
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--quick"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "load_pretrained.py: error: torch is not installed; install it by "
        'pip install -e ".[checkpoint,pretrained]"\n'
    )
