"""Checkpoints of Hugging Face transformers: loaded into models written here, and saved back.

Their models have random weights, made on the spot; nothing is downloaded.
"""

import os
import typing as tp

import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.checkpoint import Ignore, Mapping, MismatchError
from tests.checkpoint import huggingface

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
from safetensors.numpy import load_file  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

NAMES = ["GPT-2", "Llama"]
TOKENS = np.random.default_rng(0).integers(0, 101, (2, 13))


class Case(tp.NamedTuple):
    """A model of transformers with random weights, biases and norms too, and the same one here."""

    theirs: tp.Any
    mapping: Mapping
    kind: type[nnx.Module]

    def ours(self):
        return nnx.eval_shape(lambda: self.kind(self.theirs.config, rngs=nnx.Rngs(0)))


def their_logits(model):
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS.copy())).logits.numpy()


@pytest.fixture(scope="module")
def cases():
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    sizes = {"n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 4}
    gpt2 = transformers.GPT2Config(vocab_size=101, **sizes, bos_token_id=0, eos_token_id=0)
    sizes = {"hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    llama = transformers.LlamaConfig(vocab_size=101, **sizes, **heads)
    models = transformers.GPT2LMHeadModel(gpt2).eval(), transformers.LlamaForCausalLM(llama).eval()
    for parameter in (p for model in models for p in model.parameters()):
        parameter.data += 0.1 * torch.randn_like(parameter)
    return {
        "GPT-2": Case(models[0], huggingface.gpt2_mapping(), huggingface.GPT2),
        "Llama": Case(models[1], huggingface.llama_mapping(), huggingface.Llama),
    }


def arrays_of(folder):
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


@pytest.mark.parametrize("name", NAMES)
def test_loaded_from_several_files_and_saved_back(cases, name, tmp_path):
    case, there, back = cases[name], tmp_path / "transformers", tmp_path / "nnxlite"
    case.theirs.save_pretrained(there, max_shard_size=20_000)
    model = case.ours()
    report = nnx.load_safetensors(there, model, mapping=case.mapping)
    assert report.complete and not report.cast and len(list(there.glob("*.safetensors"))) > 1
    expected = their_logits(case.theirs)
    logits = np.asarray(nnx.jit(lambda model, x: model(x))(model, TOKENS))
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()

    nnx.save_safetensors(back, model, mapping=case.mapping)
    theirs, ours = arrays_of(there), arrays_of(back)
    assert theirs.keys() == ours.keys() and len(ours) > 20
    assert all(np.array_equal(ours[key], array) for key, array in theirs.items())
    case.theirs.config.save_pretrained(back)
    assert np.array_equal(their_logits(type(case.theirs).from_pretrained(back).eval()), expected)


def test_weights_that_pytorch_ties(cases):
    """The state_dict has both names, what `save_pretrained` writes only one; they have gradients."""
    case = cases["GPT-2"]
    state = case.theirs.state_dict(keep_vars=True)
    model = case.ours()
    with pytest.raises(MismatchError, match="unexpected, 1: lm_head.weight"):
        case.mapping.load(state, model)
    tied = Mapping([*case.mapping.entries, Ignore("lm_head.weight")])
    tied.load(state, model)
    exported = tied.export(model)
    exported["lm_head.weight"] = exported["transformer.wte.weight"]
    theirs = type(case.theirs)(case.theirs.config).eval()
    theirs.load_state_dict({name: torch.from_numpy(np.array(x)) for name, x in exported.items()})
    assert np.array_equal(their_logits(theirs), their_logits(case.theirs))
