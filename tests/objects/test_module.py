"""`Module`: recording values, setting modes, walking over parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite.objects._pytree import BoundMethod


class Stage(nnx.Module):
    """Doubles, and says what it saw."""

    def __init__(self, noop: bool | None = None):
        self.w = nnx.Param(jnp.array(2.0))
        self.noop = noop

    def __call__(self, x):
        x = self.perturb("inner", self.w * x, capture_noop=self.noop)
        self.seen = self.sow(nnx.Intermediate, "out", x, capture_noop=self.noop)
        return x


class Modes(nnx.Module):
    def __init__(self):
        self.deterministic = False
        self.use_running_average = False


# sow ---------------------------------------------------------------------------------------------


def test_kinds_may_be_given_by_name():
    stage = Stage()
    stage.sow("intermediates", "a", 1)
    stage.sow("freshly_named", "b", 1)
    stage.perturb("c", 1.0, "perturbations")
    assert type(stage.a) is nnx.Intermediate and type(stage.c) is nnx.Perturbation
    assert type(stage.b) is nnx.variable_type_from_name("freshly_named")
    for kind in (int, 3, None):
        with pytest.raises(TypeError, match="Expected a Variable class or its registered name"):
            stage.sow(kind, "d", 1)


@pytest.mark.parametrize("method", ["sow", "perturb"])
@pytest.mark.parametrize(
    "name, message",
    [
        ("noop", r"Expected 'noop' to be a Variable, got bool"),
        ("train", r"Expected 'train' to be a Variable, got method"),
        (
            "w",
            r"Expected 'w' to be of type '\w+', got 'Param'.*nnx.pop\(model, nnx.Param\)",
        ),
    ],
)
def test_a_name_that_is_taken_is_refused(method, name, message):
    stage = Stage(True)
    with pytest.raises(ValueError, match=rf"Stage\.{method}: {message}"):
        if method == "sow":
            stage.sow(nnx.Intermediate, name, 1.0)
        else:
            stage.perturb(name, 1.0)
    assert stage.w.value == 2.0


def test_nothing_is_recorded_outside_a_capture_on_request():
    stage = Stage(noop=True)
    assert stage(3.0) == 6.0 and stage.seen is False
    assert sorted(vars(stage)) == ["noop", "seen", "w"]


def test_sow_on_an_outer_module_inside_a_transform_is_refused():
    stage = Stage()
    with pytest.raises(
        nnx.TraceContextError, match="'Stage' from different .* write of '(out|inner)'"
    ):
        jax.jit(lambda x: stage(x))(1.0)
    stage(1.0)
    with pytest.raises(nnx.TraceContextError, match="Intermediate"):
        jax.jit(lambda x: stage.sow(nnx.Intermediate, "out", x))(1.0)


# perturb -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, form",
    [
        (jnp.ones(3), r"float32\[3\]"),
        (jnp.ones((1, 1)), r"float32\[1, 1\]"),
        ({"a": jnp.ones(2)}, r"{'a': 'float32\[2\]'}"),
    ],
)
def test_a_value_that_does_not_fit_its_perturbation_is_refused(value, form):
    stage = Stage()
    stage.perturb("inner", jnp.ones(2))
    message = rf"Stage.perturb: .*'inner' was made for float32\[2\], and the value is {form}"
    with pytest.raises(ValueError, match=message):
        stage.perturb("inner", value)


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


def test_unknown_attributes_are_refused_and_nothing_is_set():
    model = nnx.Dict(a=Modes())
    with pytest.raises(ValueError) as error:
        model.set_attributes(deterministic=True, foo=1, bar=2)
    assert "following attributes: ['bar', 'foo']. No module in this Dict" in str(error.value)
    with pytest.raises(ValueError, match=r"following attributes: \['deterministic'\]"):
        model.set_attributes(Stage, deterministic=True)
    assert model.a.deterministic is False
    model.set_attributes(deterministic=True, foo=1, raise_if_not_found=False)
    assert model.a.deterministic is True and not hasattr(model.a, "foo")


def test_a_value_that_an_attribute_refuses_leaves_all_as_they_were():
    model = nnx.Dict(a=Stage(), b=Modes())
    model.a.noop = nnx.data(False)
    with pytest.raises(ValueError, match="static attribute 'deterministic' of Pytree type 'Modes'"):
        model.set_attributes(noop=jnp.zeros(1), deterministic=jnp.zeros(1))
    assert model.a.noop is False and model.a._nnx_status["noop"] is True
    assert model.b.deterministic is False


def test_set_attributes_can_refuse_sharing():
    shared = Modes()
    shared.weight = nnx.Param(1.0)
    model = nnx.Dict(a=shared, b=shared)
    model.set_attributes(deterministic=1)
    with pytest.raises(ValueError, match="Duplicate Modes.*'a', 'b'"):
        model.set_attributes(deterministic=2, graph=False)
    assert shared.deterministic == 1


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
    with pytest.raises(ValueError, match="^which one?"):
        nnx.nn.attention.first_from(None, None, error_msg="which one?")


def test_a_bound_method_that_is_being_made_has_no_parts():
    made = object.__new__(BoundMethod)
    for name in ("__func__", "__self__"):
        with pytest.raises(AttributeError, match=f"^{name}$"):
            getattr(made, name)
