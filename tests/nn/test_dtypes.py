"""promote_dtype and canonicalize_dtype."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from nnxlite.nn.dtypes import canonicalize_dtype, promote_dtype


def test_arrays_that_agree_pass_as_they_are():
    x, y = jnp.ones(2), jnp.ones(3)
    assert promote_dtype((x, None, y))[0] is x
    assert promote_dtype((x, y), dtype=jnp.float32)[1] is y
    assert promote_dtype((x,), dtype="float32")[0] is x


def test_weak_types_become_strong():
    weak = jnp.asarray(1.0)
    assert weak.weak_type
    assert not promote_dtype((weak,))[0].weak_type


@pytest.mark.parametrize(
    ("args", "options", "expected"),
    [
        ((jnp.ones(2), jnp.ones(2, jnp.bfloat16)), {}, "float32"),
        ((jnp.ones(2, jnp.bfloat16), 2.0), {}, "bfloat16"),
        ((jnp.arange(2), None), {}, "float32"),
        ((jnp.arange(2), None), {"inexact": False}, "int32"),
        ((np.ones(2), None), {"dtype": jnp.float16}, "float16"),
    ],
)
def test_arrays_come_to_one_dtype(args, options, expected):
    found = promote_dtype(args, **options)
    assert {x.dtype.name for x in found if x is not None} == {expected}
    assert (found[1] is None) == (args[1] is None)
    assert jnp.dtype(canonicalize_dtype(*args, **options)) == expected
