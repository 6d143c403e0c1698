"""Views: copies in other modes that share the model's Variables."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite.objects._capture import view, view_info, with_attributes


class Drop(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(1))
        self.deterministic = False

    def set_view(self, deterministic: bool | None = None):
        """Set the mode.

        Args:
            deterministic: if True, nothing is dropped,
                and no key is needed.

        Returns:
            Nothing: not a mode.
        """
        if deterministic is not None:
            self.deterministic = deterministic


class Cached(nnx.Pytree):
    """An object that is no module, with a view of its own."""

    def __init__(self):
        self.size = 1
        self.cache = nnx.Cache(jnp.zeros(1))

    def set_view(self, size=None, *, deterministic: bool = True, **kwargs):
        if size is not None:
            self.size = size
            self.cache = nnx.Cache(jnp.zeros(size))
        self.extra = tuple(kwargs)


class Model(nnx.Module):
    def __init__(self):
        self.drop = Drop()
        self.again = self.drop
        self.table = [Drop()]
        self.plain = nnx.Param(jnp.zeros(2))


# view --------------------------------------------------------------------------------------------


def test_cycles_are_kept():
    model = Model()
    model.me = model
    seen = view(model, deterministic=True)
    assert seen.me is seen
    other = with_attributes(model, deterministic=True, foo=1, raise_if_not_found=False)
    assert other.drop.deterministic and other.me is other and not model.drop.deterministic


def test_a_view_can_be_made_of_a_captured_model_inside_a_transform():
    model = Model()
    assert (
        jax.jit(lambda x: x if view(model, deterministic=True).drop.deterministic else -x)(1) == 1
    )
    with pytest.raises(nnx.TraceContextError):
        jax.jit(lambda x: view(model, deterministic=True).plain.set_value(x))(jnp.ones(2))


# view_info ---------------------------------------------------------------------------------------


def test_view_info_lists_modes_by_class():
    assert view_info(nnx.Dict(a=Drop(), b=Drop(), c=Cached())).splitlines() == [
        "Cached:",
        "  size=None",
        "  deterministic: bool = True",
        "Drop:",
        "  deterministic: bool | None = None",
        "    if True, nothing is dropped,",
        "    and no key is needed.",
    ]
    assert view_info(nnx.Dict(a=Drop(), c=Cached()), only=nnx.OfType(Drop)).startswith("Drop:")
    assert view_info(nnx.Dict(a=1)) == ""
