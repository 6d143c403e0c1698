"""promote_dtype and canonicalize_dtype."""

from __future__ import annotations

import jax.numpy as jnp

from nnxlite.nn.dtypes import promote_dtype


def test_arrays_that_agree_pass_as_they_are():
    x, y = jnp.ones(2), jnp.ones(3)
    assert promote_dtype((x, None, y))[0] is x
    assert promote_dtype((x, y), dtype=jnp.float32)[1] is y
    assert promote_dtype((x,), dtype="float32")[0] is x


def test_weak_types_become_strong():
    weak = jnp.asarray(1.0)
    assert weak.weak_type
    assert not promote_dtype((weak,))[0].weak_type
