"""`Module`: recording values, setting modes, walking over parts."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import nnxlite as nnx


class Stage(nnx.Module):
    """Doubles, and says what it saw."""

    def __init__(self, noop: bool | None = None):
        self.w = nnx.Param(jnp.array(2.0))
        self.noop = noop

    def __call__(self, x):
        x = self.perturb("inner", self.w * x, capture_noop=self.noop)
        self.seen = self.sow(nnx.Intermediate, "out", x, capture_noop=self.noop)
        return x


# sow ---------------------------------------------------------------------------------------------


def test_kinds_may_be_given_by_name():
    stage = Stage()
    stage.sow("intermediates", "a", 1)
    stage.sow("freshly_named", "b", 1)
    stage.perturb("c", 1.0, "perturbations")
    assert type(stage.a) is nnx.Intermediate and type(stage.c) is nnx.Perturbation
    assert type(stage.b) is nnx.variable_type_from_name("freshly_named")


def test_nothing_is_recorded_outside_a_capture_on_request():
    stage = Stage(noop=True)
    assert stage(3.0) == 6.0 and stage.seen is False
    assert sorted(vars(stage)) == ["noop", "seen", "w"]


# Modes -------------------------------------------------------------------------------------------


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


# Parts -------------------------------------------------------------------------------------------


def test_a_deep_model_is_walked_without_recursion():
    model = nnx.Dict()
    for _ in range(3000):
        model = nnx.Dict(below=model)
    model.set_attributes(raise_if_not_found=False, deterministic=True)
    assert sum(1 for _ in model.iter_modules()) == 3001


def test_a_subclass_may_define_methods_with_the_names_of_functions():
    class Own(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(1))

        def split(self, x):
            raise AssertionError("the library called split")

        def update(self, x):
            raise AssertionError("the library called update")

    own = nnx.clone(Own())
    nnx.update(own, nnx.state(nnx.merge(*nnx.split(own))))
    nnx.jit(lambda m: setattr(m.w, "value", m.w * 2))(own)
    assert own.w.value.tolist() == [2.0]


def test_the_first_flag_that_is_given():
    assert nnx.nn.attention.first_from(None, False, True, error_msg="which?") is False
