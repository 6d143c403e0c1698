"""What README.md says of this library, Flax NNX and Equinox, side by side."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import nnxlite

eqx = pytest.importorskip("equinox")
nnx = pytest.importorskip("flax.nnx")

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.parametrize("nnx", [nnxlite, nnx], ids=["nnxlite", "flax"])
def test_modules_are_pytrees_that_change_in_place_and_what_is_shared_stays_shared(nnx):
    class Pair(nnx.Module):
        def __init__(self):
            self.left = nnx.Param(jnp.ones(2))
            self.right, self.me = self.left, self

    model = Pair()

    @nnx.jit
    def double(model):
        assert model.right is model.left and model.me is model
        model.left[...] = model.left[...] * 2

    double(model)
    assert model.right is model.left and model.right[...].tolist() == [2.0, 2.0]
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(7))
    doubled = jax.tree.map(lambda x: 2 * x, layer)
    assert (doubled.kernel[...] == 2 * layer.kernel[...]).all()


def test_modules_of_equinox_are_immutable_and_copy_what_is_shared():
    layer = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    with pytest.raises(AttributeError):
        layer.weight = layer.weight * 2
    twice = eqx.filter_jit(lambda layers: layers)([layer, layer])
    assert twice[0] is not twice[1]
    assert len(jax.tree.leaves([layer, layer])) == 2 * len(jax.tree.leaves(layer))
    assert hasattr(eqx.nn, "Shared")


CYCLE = """
import equinox as eqx, jax

class Node(eqx.Module):
    others: list

node = Node([])
node.others.append(node)
jax.tree.leaves(node)
"""


def test_equinox_walks_a_cycle_without_end():
    # In another process: running out of stack inside JAX leaves the interpreter without any.
    run = subprocess.run([sys.executable, "-c", CYCLE], capture_output=True, text=True, timeout=120)
    assert run.returncode != 0 and "RecursionError" in run.stderr


def test_modules_in_a_plain_list():
    def tower(nnx):
        class Tower(nnx.Module):
            def __init__(self):
                self.layers = [nnx.Linear(2, 2, rngs=nnx.Rngs(0))]

        return Tower()

    assert len(jax.tree.leaves(nnxlite.state(tower(nnxlite)))) == 2
    with pytest.raises(ValueError, match="data"):
        tower(nnx)


def test_functions_of_each_library():
    in_flax, in_equinox = (
        "jit grad vmap scan cond tabulate display",
        "filter_jit filter_grad filter_vmap",
    )
    alone = "find_nan draw diff load_safetensors generate shard init_sharded"
    for name in f"{in_flax} {in_equinox} {alone}".split():
        assert hasattr(nnxlite, name)
        assert hasattr(nnx, name) == (name in in_flax.split())
        assert hasattr(eqx, name) == (name in in_equinox.split())
    assert hasattr(nnx.bridge, "ToNNX") and hasattr(nnxlite.bridge, "ToNNX")
    assert hasattr(nnx, "LoRA") and hasattr(nnxlite.lora, "inject")
    for name in ("filter_shard", "tree_pprint", "tree_serialise_leaves"):
        assert hasattr(eqx, name)
    assert hasattr(nnxlite.jit(lambda x: x), "explain")
    assert not hasattr(nnx.jit(lambda x: x), "explain")


def test_the_figures_beside_the_chart_are_those_it_was_drawn_from():
    figures = json.loads((Path(__file__).parents[2] / "docs" / "benchmarks.json").read_text())
    said = re.search(r"step of 72 arrays took ([\d.]+) times .*?, and ([\d.]+) times", README, re.S)
    assert said
    cases = [case for case in figures["cases"] if case["bench"] == "dispatch"]
    case = next(case for case in cases if "72 arrays" in case["case"])
    seconds = {name: figure["median"] for name, figure in case["seconds"].items()}
    assert said[1] == f"{seconds['nnxlite'] / seconds['limit']:.2f}"
    assert said[2] == f"{seconds['flax'] / seconds['limit']:.3g}"
