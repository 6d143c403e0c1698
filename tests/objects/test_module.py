"""`Module`: setting modes, and views: copies in other modes that share the model's Variables."""

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

    def set_view(self, size=None, *, deterministic: bool = True, **kwargs):
        raise AssertionError("only its signature is read")


def test_attributes_of_a_class_and_properties_can_be_set():
    class Q(nnx.Module):
        mode = "a"

        def __init__(self):
            self._size = 1

        @property
        def size(self):
            return self._size

        @size.setter
        def size(self, value):
            if value < 0:
                raise ValueError("negative")
            self._size = value

    q = Q()
    q.set_attributes(mode="b", size=3)
    assert (q.mode, Q.mode, q._size) == ("b", "a", 3)
    p = Q()
    with pytest.raises(ValueError, match="negative"):
        nnx.Dict(p=p, q=q).set_attributes(mode="z", size=-1)
    assert (q.mode, q.size, p.mode, p.size) == ("b", 3, "a", 1) and "mode" not in vars(p)


def test_a_subclass_may_define_methods_with_the_names_of_functions():
    class Own(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(1))

        def split(self, x):
            raise AssertionError("the library called a method of the user's")

        update = split

    own = nnx.clone(Own())
    nnx.update(own, nnx.state(nnx.merge(*nnx.split(own))))
    nnx.jit(lambda m: setattr(m.w, "value", m.w * 2))(own)
    assert own.w.value.tolist() == [2.0]


def test_views_keep_cycles():
    model = nnx.Dict(drop=Drop())
    model.me = model
    seen = view(model, deterministic=True)
    assert seen.me is seen
    other = with_attributes(model, deterministic=True, foo=1, raise_if_not_found=False)
    assert other.drop.deterministic and other.me is other and not model.drop.deterministic


def test_a_view_can_be_made_of_a_captured_model_inside_a_transform():
    model = Drop()
    seen = lambda: view(model, deterministic=True)
    assert jax.jit(lambda x: x if seen().deterministic else -x)(1) == 1
    with pytest.raises(nnx.TraceContextError):
        jax.jit(lambda x: seen().w.set_value(x))(jnp.ones(1))


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
