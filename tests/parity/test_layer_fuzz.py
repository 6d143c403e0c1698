"""Random programs with layers, run by this library and by the reference.

What each line assigns, the state of the layer after it, or the error that it raises is an outcome.

`NNXLITE_FUZZ=3000` sets the number of programs, `NNXLITE_FUZZ_FIRST` the first seed. A failure shows
the seed, the program with the line that differs, and what differs in both outcomes.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.parity.batches import batches, differences
from tests.parity.layer_fuzz import HELPERS, Writer
from tests.parity.layers import OLDER, ref

pytestmark = pytest.mark.skipif(OLDER, reason="the reference is older than the one we follow")


def run(lines, lib):
    """What each line assigns and leaves behind, in a form that both libraries share."""
    names, outcomes = {**HELPERS, "lib": lib}, []
    for line in lines:
        target, _, text = line.partition(" = ")
        try:
            value = names[target] = eval(text, names)
            left = plain(lib, names.get("layer"))
            outcomes.append((None if target == "_" else plain(lib, value), left))
        except Exception as error:
            return [*outcomes, error]
    return outcomes


def plain(lib, value):
    """A value in a form that both libraries share."""
    if isinstance(value, lib.State):
        return [
            (
                path,
                type(leaf).__name__,
                sorted(getattr(leaf, "get_metadata", dict)()),
                plain(lib, leaf),
            )
            for path, leaf in lib.to_flat_state(value)
        ]
    if isinstance(value, lib.Pytree):
        static = {
            k: repr(v)
            for k, v in vars(value).items()
            if isinstance(v, (bool, int, float, str)) and not k.startswith("_")
        }
        return type(value).__name__, static, plain(lib, lib.state(value))
    if isinstance(value, lib.Variable):
        return plain(lib, value.get_raw_value())
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        return "array", str(value.dtype), value.weak_type, np.asarray(value)
    if isinstance(value, jax.ShapeDtypeStruct):
        return "struct", str(value.dtype), value.weak_type, value.shape
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *[plain(lib, v) for v in value]]
    if isinstance(value, dict):
        return [(k, plain(lib, v)) for k, v in sorted(value.items())]
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value).__name__, str(value.dtype), np.asarray(value)
    return value if isinstance(value, (bool, int, float, str)) else type(value).__name__


def unequal(one, other, ulps):
    """The first parts that differ, of values in the form of `plain`; arrays in more than last bits."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return None if one.shape == other.shape and close(one, other, ulps) else (one, other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) == len(other):
            return next((d for a, b in zip(one, other) if (d := unequal(a, b, ulps))), None)
        return one, other
    return None if type(one) is type(other) and one == other else (one, other)


def close(one, other, ulps):
    """Whether two arrays differ by so many units in the last place of the largest element."""
    if np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"):
        return True
    if not jnp.issubdtype(one.dtype, jnp.inexact):
        return False
    epsilon = float(jnp.finfo(one.dtype).eps) * ulps
    wide = np.complex128 if one.dtype.kind == "c" else np.float64
    one, other = one.astype(wide), other.astype(wide)
    finite = np.abs(other[np.isfinite(other)])
    largest = max(finite.max(initial=0.0), 1e-6)
    with np.errstate(all="ignore"):
        return bool(np.allclose(one, other, rtol=0, atol=epsilon * largest, equal_nan=True))


LENIENT = [
    ("RNN", "Expected rngs to be a jax.Array, int, Rngs, or bool"),
    ("layer", "RNGs must be provided to initialize|qr does not accept dtype"),
    ("RNN|layer", "scan body function carry input and carry output must have equal types"),
    ("layer", "object has no attribute 'dtype'|should be a jax array"),
    ("layer", "Cannot broadcast to shape with fewer dimensions|dynamic_update_slice requires"),
    ("layer", "integer modulo by zero"),
    ("pool", r"safe_zip\(\) argument 1"),  # numbers as padding, beside several batch axes
    ("mask", "cannot reshape array of shape .* into shape"),
]
"""What the reference refuses and this library takes: patterns of a line, and of the message."""


def difference(lines, mine, theirs, ulps=1):
    """The first line with different outcomes in two libraries, with both; None without one."""
    ours, others = run(lines, mine), run(lines, theirs)
    if _raise_alike(ours[-1], others[-1], len(ours) <= len(others)):
        return None
    for number, (line, one, other) in enumerate(zip(lines, ours, others)):
        found = (one, other)
        if not (isinstance(one, Exception) or isinstance(other, Exception)):
            found = unequal(one, other, ulps * (8 if re.search("grad|jit|vmap", line) else 1))
        elif any(re.search(a, line) and re.search(b, str(other)) for a, b in LENIENT):
            return None
        if found:
            text = "\n".join(f"{'>' if i == number else ' '} {x}" for i, x in enumerate(lines))
            shown = "".join(
                f"\n{lib.__name__}: {_shown(x)}" for lib, x in zip((mine, theirs), found)
            )
            return text + shown
    return None


def _raise_alike(mine, theirs, early):
    """Whether two programs end with an error of one class, or one that is better here."""
    if not (isinstance(mine, Exception) and isinstance(theirs, Exception) and early):
        return False
    ordinary = (TypeError, ValueError)
    return (
        type(mine) is type(theirs)
        or (isinstance(mine, ordinary) and not isinstance(theirs, ordinary))
        or "Dropout scales what it keeps" in str(mine)  # said before the stream is looked for
    )


def _shown(value):
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {str(value)[:300]}"
    return str(value)[:600]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", batches(160))
def test_both_do_the_same(start):
    text = differences(start, lambda seed: difference(Writer(seed).lines, nnx, ref))
    assert not text, text


def test_the_same_seed_gives_the_same_program():
    assert Writer(7).lines == Writer(7).lines != Writer(8).lines
