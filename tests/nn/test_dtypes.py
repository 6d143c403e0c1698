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


@pytest.mark.parametrize("function", [lambda x, **k: promote_dtype((x,), **k), canonicalize_dtype])
def test_a_dtype_for_whole_numbers_is_refused(function):
    with pytest.raises(ValueError, match="Dtype must be inexact: a layer computes .*, got 'int32'"):
        function(jnp.arange(2), dtype=jnp.int32)
    function(jnp.arange(2), dtype=jnp.int32, inexact=False)


@pytest.mark.parametrize("args", [None, 1.0, True])
@pytest.mark.parametrize("options", [{}, {"dtype": jnp.float32}])
def test_one_value_alone_is_refused(args, options):
    with pytest.raises(TypeError, match=rf"promote_dtype\(\(x, kernel\)\); got {args} alone"):
        promote_dtype(args, **options)


def test_without_arrays_there_is_no_dtype():
    with pytest.raises(ValueError, match="at least one array or dtype"):
        promote_dtype((None,))
