"""The example of 1,024 devices: its page has its figures, and a program exchanges what it says."""

from __future__ import annotations

import collections
import importlib.util
import io
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from rich.console import Console

import nnxlite as nnx

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def thousands():
    spec = importlib.util.spec_from_file_location("thousands", ROOT / "examples" / "thousands.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(table):
    console = Console(file=io.StringIO(), width=110)
    with console.capture() as capture:
        console.print(table)
    return [line.strip() for line in capture.get().splitlines() if "│" in line]


def gathered(layout, groups):
    """Bytes of weights that a device gathers in a step: those of layers twice, the others once.

    An embedding is looked up where it is, unless "fsdp" divides its rows.
    """
    weights = {e.path[1:]: e for e in layout.entries if e.path[0] == 0}
    kernels = [e for path, e in weights.items() if path[-1] == "kernel"]
    embedding = weights["tokens", "embedding"]
    if "fsdp" in (embedding.spec[0] or ()):
        kernels.append(embedding)
    times = {"tokens": 1, "blocks": 2, "head": 1}
    return sum(times[e.path[1]] * e.bytes_per_device * groups for e in kernels)


def test_the_page_has_the_figures_of_the_plan(thousands):
    page = (ROOT / "docs" / "thousands.md").read_text()
    options = thousands.arguments([])
    mesh = AbstractMesh((128, 8), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    model, _, layout = thousands.planned(mesh, options)
    assert f"{thousands.count_of(model):,} parameters, 80 layers" in page
    assert f"{thousands.batch_of(layout, options).size:,} tokens a step" in page
    for line in lines(thousands.sizes(layout, options)):
        assert line in page
    assert (
        thousands.gb(gathered(layout, 128)) == "68.98 GB"
    )  # and the scales of norms, a little more
    assert "│ weights gathered   │     128 │ 1,603 │  68.99 GB │" in page
    assert f"handles {len(layout.entries)} arrays" in page


def test_a_small_step_exchanges_what_arithmetic_says(thousands, monkeypatch):
    for name, size in {"WIDTH": 256, "HEADS": 8, "HIDDEN": 512, "VOCABULARY": 1024}.items():
        monkeypatch.setattr(thousands, name, size)
    words = "--devices 8 --tensor 4 --per-host 4 --layers 3 --length 128 --sequences 8"
    options = thousands.arguments(words.split())
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    model, optimizer, layout = thousands.planned(mesh, options)
    tokens = thousands.batch_of(layout, options)
    lowered = thousands.train_step.lower(model, optimizer, tokens, tokens)
    compiled = lowered.compile(thousands.LITTLE_CODE)
    analysis = compiled.memory_analysis()
    assert analysis.argument_size_in_bytes == layout.bytes_per_device + 2 * tokens.size * 4 // 2
    # What comes on top: the inputs of the layers, in bfloat16, at least.
    saved = options.layers * options.sequences * options.length * thousands.WIDTH * 2
    assert analysis.temp_size_in_bytes > saved
    found = collections.Counter()
    for entry in nnx.collectives(compiled).entries:
        if entry.bytes >= 2**16:  # all but the scales of norms and the loss
            found[thousands.purpose(entry, 2)] += entry.total_bytes
    assert found["weights gathered"] == gathered(layout, 2)
    activations = options.sequences * options.length * thousands.WIDTH * 4
    # Eight in a layer, one for the embedding, one for the head.
    assert found["activations summed"] == (8 * options.layers + 2) * activations
    parameters = sum(e.bytes_per_device * 2 for e in layout.entries if e.path[0] == 0)
    assert found["gradients reduced"] == pytest.approx(parameters, rel=0.15)  # some by all-to-all
