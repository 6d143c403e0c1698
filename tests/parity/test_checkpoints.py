"""Checkpoints that Flax NNX wrote by Orbax come into our models, and ours into its; a renamed layer."""

import jax
import numpy as np
import optax
import pytest

import nnxlite

ocp = pytest.importorskip("orbax.checkpoint")
flax = pytest.importorskip("flax.nnx")


def build(nnx, seed):
    linear, norm = nnx.Linear(2, 3, rngs=nnx.Rngs(seed)), nnx.BatchNorm(3, rngs=nnx.Rngs(seed))
    model = nnx.Sequential(linear, norm, nnx.Dropout(0.5, rngs=nnx.Rngs(seed)))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def numbers(nnx, node):
    pairs = nnx.to_flat_state(nnx.state(node))
    values = {".".join(map(str, path)): leaf.get_value() for path, leaf in pairs}
    return {
        name: np.asarray(jax.random.key_data(v) if name.endswith("key") else v).tolist()
        for name, v in values.items()
    }


def test_a_checkpoint_of_flax_is_restored_in_one_call(tmp_path):
    for which in (0, 1):
        theirs = build(flax, 0)[which]
        path = tmp_path / str(which)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, flax.state(theirs))
        ours = build(nnxlite, 1)[which]
        assert nnxlite.checkpoint.restore(path, item=ours).complete
        assert numbers(nnxlite, ours) == numbers(flax, theirs)


def test_a_renamed_layer_is_named_here_and_by_orbax_and_passes_unseen_in_equinox(tmp_path):
    eqx = pytest.importorskip("equinox")
    make = lambda lib, name: lib.Dict({name: lib.Linear(2, 2, rngs=lib.Rngs(0))})
    nnxlite.checkpoint.save(tmp_path / "ours", model=make(nnxlite, "old"))
    remedy = r'rename=\{"model\.old\.\*\*": "mod'
    with pytest.raises(nnxlite.checkpoint.MismatchError, match=remedy):
        nnxlite.checkpoint.restore(tmp_path / "ours", model=make(nnxlite, "new"))

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", flax.state(make(flax, "old")))
        checkpointer.wait_until_finished()
        with pytest.raises(ValueError) as caught:
            checkpointer.restore(tmp_path / "orbax", flax.state(make(flax, "new")))
    assert "old" in str(caught.value) and "rename" not in str(caught.value)

    layers = [{n: eqx.nn.Linear(2, 2, key=jax.random.key(i))} for i, n in enumerate(("b", "c"))]
    eqx.tree_serialise_leaves(tmp_path / "eqx", layers[0])
    loaded = eqx.tree_deserialise_leaves(tmp_path / "eqx", layers[1])  # by position
    np.testing.assert_array_equal(loaded["c"].weight, layers[0]["b"].weight)
