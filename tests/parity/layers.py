"""The reference, and whether the installed one is older than the one we follow."""

import pytest

flax = pytest.importorskip("flax")
from flax import nnx as ref  # noqa: E402, F401

OLDER = tuple(map(int, flax.__version__.split(".")[:3])) < (0, 12, 12)
