"""check: each kind of silent failure is found and its text read, and healthy models have none."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx
from benchmarks.models import block_stack, chain, transformer
from tests.nn.catalogue import LAYERS

X = jnp.ones((4, 2))


class Net(nnx.Module):
    """Two layers with normalisation and dropout."""

    def __init__(self, rngs):
        self.l1 = nnx.Linear(2, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.l2 = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.l2(self.drop(nnx.relu(self.norm(self.l1(x)))))


def net():
    return Net(nnx.Rngs(0))


def adam(model, wrt=nnx.Param):
    return nnx.Optimizer(model, optax.adam(1e-3), wrt=wrt)


def kinds(found):
    return [(finding.kind, ".".join(map(str, finding.path))) for finding in found]


def only(found):
    [finding] = found
    return finding


class Run(nnx.Module):
    """Makes a layer of the catalogue a model that is called."""

    def __init__(self, layer, run):
        self.layer = layer
        self.run = run

    def __call__(self, x):
        return self.run(self.layer, x)


# Healthy models ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_found_in_a_layer(name):
    layer = LAYERS[name]
    model = Run(layer.make(nnx.Rngs(0)), layer.run)
    optimizer = adam(model) if nnx.state(model, nnx.Param) else None  # one for nothing warns
    found = nnx.check(model, optimizer, layer.x)
    assert not found, found


TOKENS = jnp.zeros((2, 5), jnp.int32)


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (net, X),
        (lambda: block_stack(nnx, 3), jnp.ones((4, 8))),
        (lambda: transformer(nnx, 2), TOKENS),
        (lambda: transformer(nnx, 2), jax.ShapeDtypeStruct((2, 5), "int32")),
        (lambda: nnx.eval_shape(net), X),
    ],
)
def test_nothing_is_found_in_a_model(make, x):
    model = make()
    for optimizer in (None, adam(model), nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)):
        found = nnx.check(model, optimizer, x)
        assert not found and len(found) == 0 and list(found) == [], found
        assert str(found) == repr(found) == "nothing found"


def test_nothing_is_found_after_training():
    model = net()
    optimizer = adam(model)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda model: model(X).sum())(model))

    step(model, optimizer)
    assert not nnx.check(model, optimizer, X)
    model.eval()
    assert not nnx.check(model, optimizer, X)


def test_a_stack_of_layers_under_vmap_and_scan():
    class Stack(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=3)
            @nnx.vmap
            def make(rngs):
                return nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))

            self.layers = make(rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def forward(layer, x):
                return layer(x)

            return forward(self.layers, x)

    model = Stack(nnx.Rngs(0))
    for _ in range(2):  # a second time although JAX has the program of the loop
        assert not nnx.check(model, adam(model), jnp.ones((1, 4)))


def test_the_model_stays_as_it_was():
    class Sowing(Net):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x)
            self.calls = 1
            return super().__call__(x)

    model = Sowing(nnx.Rngs(0))
    optimizer = adam(model)
    graphdef, state = nnx.split((model, optimizer))
    before = jax.tree.map(jnp.copy, state)
    assert not nnx.check(model, optimizer, X)
    after, state = nnx.split((model, optimizer))
    assert after == graphdef and not nnx.diff(before, state)
    assert not hasattr(model, "seen") and not hasattr(model, "calls")
    assert "__call__" not in vars(nnx.Linear)["__call__"].__dict__
    assert model.drop.rngs.count[...] == 0


# Each kind -----------------------------------------------------------------------------------


def test_a_param_replaced_by_a_bare_array():
    model = net()
    model.l1.bias = jnp.zeros(3)
    finding = only(nnx.check(model))
    assert (finding.kind, finding.path) == ("bare array", ("l1", "bias"))
    assert str(finding) == (
        "l1.bias: a bare array has replaced the Variable that Linear has here, so it is not trained; "
        "assign nnx.Param(array), or write to the elements of the Variable (`[...] = array`)"
    )


class Scale(nnx.Module):
    def __init__(self, value):
        self.value = value

    def __call__(self, x):
        return x * self.value


def test_a_bare_array_in_a_class_of_the_users():
    model = nnx.Dict(a=Scale(nnx.Param(jnp.ones(2))), b=Scale(jnp.ones(2)))
    assert "has replaced the Variable that Scale has here" in only(nnx.check(model)).text
    alone = only(nnx.check(Scale(np.ones(2, np.float32))))
    assert alone.text == (
        "a bare array in Scale, which no optimizer trains; make it an nnx.Param, or an nnx.Variable if "
        "it is a constant"
    )
    model = Scale(nnx.Param(jnp.ones(2)))
    optimizer = adam(model)
    model.value = jnp.ones(2)
    assert "has replaced" in nnx.check(model, optimizer).entries[0].text
    assert not nnx.check(Scale(jnp.arange(3)))


def test_params_outside_wrt():
    model = net()
    found = nnx.check(model, adam(model, nnx.PathContains("l1")), X)
    expected = [
        ("outside wrt", f"{p}") for p in ("l2.bias", "l2.kernel", "norm.bias", "norm.scale")
    ]
    assert kinds(found) == expected
    assert found.entries[0].text == (
        "Param that no optimizer trains, as wrt=PathContains(l1, exact=True) does not select it; "
        "change `wrt` unless it is frozen on purpose"
    ) or found.entries[0].text.startswith("Param that no optimizer trains, as wrt=PathContains(")


def test_a_filter_that_selects_nothing():
    model = net()
    with pytest.warns(UserWarning, match="selects nothing"):
        nothing = adam(model, nnx.PathContains("head"))
    found = nnx.check(model, nothing)
    assert kinds(found) == [("empty filter", "optimizer")]
    assert found.entries[0].text == (
        "wrt=PathContains('head', exact=True) selects no Variable of the model that is not frozen, so "
        "that updates change nothing; give it a filter that does, as nnx.Param"
    )
    assert kinds(nnx.check(model, {"a": adam(model), "b": nothing})) == [
        ("empty filter", "optimizer.b")
    ]
    part = adam(model.l1, lambda path, leaf: path == ("kernel",))  # paths of the part
    assert not nnx.check(model, (adam(model), part))


class Settings(nnx.Module):
    def __init__(self, x):
        self.partial = functools.partial(jnp.add, x)
        self.closure = [lambda y: y * x]
        self.method = x.sum
        self.fine = functools.partial(jnp.add, 1.0)
        self.w = nnx.Param(jnp.ones(2), scale=(x, 1))


def test_settings_that_are_traced():
    models = []

    @jax.jit
    def leak(x):
        models.append(Settings(x))
        return x

    leak(1.0)
    found = nnx.check(models[0])
    assert kinds(found) == [
        ("traced setting", path) for path in ("partial", "closure", "method", "w.scale")
    ]
    assert found.entries[3].text == (
        "contains float32[] of a transform, which cannot be used once that has returned; pass it as an "
        "argument, or make it the value of an nnx.Variable"
    )
    assert not nnx.check(Settings(np.float32(1)))


def test_optimizers_of_parts():
    model = nnx.Dict(
        generator=nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
        critic=nnx.Sequential(nnx.Linear(2, 1, rngs=nnx.Rngs(1))),
    )
    generator, critic = adam(model.generator), adam(model.critic)
    assert not nnx.check(model, {"g": generator, "c": critic})
    found = nnx.check(model, generator)
    assert kinds(found) == [
        ("outside wrt", "critic.layers.0.bias"),
        ("outside wrt", "critic.layers.0.kernel"),
    ]
    stateless = [nnx.Optimizer(part, optax.sgd(0.1), wrt=nnx.Param) for part in model.values()]
    assert not nnx.check(model, stateless)  # nothing says which is for which


def test_a_parameter_in_two_optimizers():
    model = net()
    kernels = adam(model, nnx.All(nnx.Param, nnx.PathContains("l1")))
    found = nnx.check(model, (adam(model), kernels))
    assert kinds(found) == [("two optimizers", "l1.bias"), ("two optimizers", "l1.kernel")]
    assert found.entries[0].text == (
        "trained by optimizer.0 and optimizer.1; give each optimizer a filter `wrt` of its own"
    )
    trained = nnx.ModelAndOptimizer(model, optax.sgd(0.1))
    assert not nnx.check(model, trained)
    assert len(nnx.check(model, [trained, adam(model)])) == 6


def test_some_modules_in_training_and_some_in_evaluation_mode():
    model = net()
    model.drop.deterministic = True
    finding = only(nnx.check(model))
    assert (finding.kind, finding.path) == ("mixed modes", ("norm",))
    assert finding.text == (
        "use_running_average=False, training mode, while drop is in evaluation mode; call model.train() "
        "or model.eval() on the whole model"
    )
    model = nnx.List([net(), net()])
    model[1].norm.eval()
    found = [finding for finding in nnx.check(model) if finding.kind == "mixed modes"]
    assert kinds(found) == [("mixed modes", "1.norm")]
    assert "evaluation mode, while 0.drop and 2 more are in training mode" in found[0].text


def test_two_streams_with_equal_keys():
    model = nnx.Dict(a=nnx.Dropout(0.5, rngs=nnx.Rngs(0)), b=nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    finding = only(nnx.check(model))
    assert (finding.kind, finding.path) == ("equal keys", ("b", "rngs"))
    assert finding.text == (
        "this random stream gives the same numbers as a.rngs, as both have the same key and count; "
        "use other seeds, or rngs.fork()"
    )
    rngs = nnx.Rngs(0)
    shared = nnx.Dict(a=nnx.Dropout(0.5, rngs=rngs), b=nnx.Dropout(0.5, rngs=rngs), rngs=rngs)
    assert not nnx.check(shared)
    assert kinds(nnx.check(nnx.Rngs(params=0, dropout=0))) == [("equal keys", "params")]


def test_a_stream_with_equal_keys_across_lanes():
    @nnx.vmap
    def make(rngs):
        return nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))

    found = nnx.check(make(nnx.Rngs(0).broadcast(3)))
    assert kinds(found) == [("equal keys", "layers.1.rngs"), ("equal lanes", "layers.0.kernel")]
    assert found.entries[0].text == (
        "this random stream has 3 lanes, and only 1 of their keys differ; use nnx.split_rngs or "
        "rngs.split in place of one that repeats the key"
    )
    assert found.entries[1].text == (
        "all 3 slices along the first axis are equal, as if they were initialized with one key; split "
        "the streams of the constructor: @nnx.split_rngs(splits=3)"
    )


class Drawing(nnx.Module):
    """An RNN cell of which the carry is random, and none of the library's."""

    def __init__(self, init):
        self.rnns = nnx.List(
            nnx.RNN(nnx.SimpleCell(2, 2, carry_init=init, rngs=nnx.Rngs(i))) for i in range(2)
        )

    def __call__(self, x):
        for rnn in self.rnns:
            x = rnn(x)
        return x


def test_streams_of_carries_count_where_they_matter():
    x = jnp.ones((1, 3, 2))
    zeros, random = (Drawing(init) for init in (nnx.initializers.zeros, nnx.initializers.normal()))
    assert not nnx.check(zeros) and not nnx.check(zeros, None, x) and not nnx.check(random)
    assert kinds(nnx.check(random, None, x)) == [("equal keys", "rnns.1.rngs")]


def test_params_in_several_dtypes():
    model = net()
    model.l2.kernel.value = model.l2.kernel[...].astype(jnp.bfloat16)
    finding = only(nnx.check(model))
    assert (finding.kind, finding.path) == ("mixed dtypes", ("l2", "kernel"))
    assert finding.text == (
        "bfloat16, while most Params are float32, so that operations on both use the wider one; "
        "convert it, or give its layer this `param_dtype`"
    )


def test_dtypes_that_layers_ask_for():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(2, 3, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=rngs),
        nnx.LayerNorm(3, rngs=rngs),
    )
    assert not nnx.check(model, None, X) and not nnx.check(model, None, X.astype("bfloat16"))
    whole = net()
    nnx.update(whole, jax.tree.map(lambda x: x.astype("bfloat16"), nnx.state(whole, nnx.Param)))
    assert not nnx.check(whole)


def test_inputs_of_another_dtype():
    model = net()
    finding = only(nnx.check(model, None, x=X.astype(jnp.float16)))
    assert (finding.kind, finding.path) == ("mixed dtypes", ("inputs", "x"))
    assert finding.text == (
        "float16, while the Params are float32 and no layer has this `dtype`, so that operations on "
        "both use the wider one; convert the input, or give layers a `dtype`"
    )
    assert not nnx.check(model, None, np.ones((4, 2)))  # JAX makes it float32


def test_one_array_in_two_variables():
    model = net()
    model.l2.bias[...] = model.norm.mean[...][:2]
    model.extra = nnx.Param(model.l1.kernel[...])
    finding = only(nnx.check(model))
    assert (finding.kind, finding.path) == ("aliased array", ("l1", "kernel"))
    assert finding.text == (
        "the same array as extra, so that donation of one deletes both; copy it (jnp.copy, "
        "nnx.clone(..., arrays=True)), or share the Variable to tie them"
    )


def test_arrays_aliased_by_clone_and_in_optimizers():
    model = net()
    clones = nnx.Dict(model=model, average=nnx.clone(model))
    found = [finding for finding in nnx.check(clones) if finding.kind == "aliased array"]
    assert len(found) == len(jax.tree.leaves(nnx.state(model)))
    copied = nnx.check(nnx.Dict(model=model, average=nnx.clone(model, arrays=True)))
    assert {finding.kind for finding in copied} == {"equal keys"}
    optimizer = adam(model)
    optimizer.opt_state[0].mu["l1"]["kernel"].set_raw_value(model.l1.kernel.get_raw_value())
    assert kinds(nnx.check(model, optimizer)) == [
        ("aliased array", "optimizer.opt_state.0.mu.l1.kernel")
    ]
    assert kinds(nnx.check(Scale(nnx.Param(X)), None, X)) == [("aliased array", "inputs.0")]
    array = jnp.ones(2)  # two of them outside of Variables are not donated alone
    assert {f.kind for f in nnx.check(nnx.Dict(a=Scale(array), b=Scale(array)))} == {"bare array"}


class Unused(Net):
    """Has a layer that nobody calls, and Params that do not matter."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.old = nnx.Sequential(nnx.Linear(2, 2, rngs=rngs))
        self.spare = nnx.Param(jnp.ones(2))
        self.frozen = nnx.Param(jnp.ones(2))
        self.choice = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        chosen = jnp.argmax(self.choice[...])
        return super().__call__(x) * jax.lax.stop_gradient(self.frozen[...]) + chosen


def test_modules_never_called_and_params_without_gradient():
    model = Unused(nnx.Rngs(0))
    found = nnx.check(model, adam(model), X)
    flat = "depend on it only through stop_gradient, or an operation without a derivative"
    idle = "uses neither a method nor a Variable of this Sequential; call it, or remove it"
    none = "do not depend on it; use it in the call, or remove it"
    assert (
        str(found)
        == f"""\
never called:
  old: the call of the model {idle}
no gradient:
  choice: its gradient is zero, as the outputs {flat}
  frozen: its gradient is zero, as the outputs {flat}
  spare: its gradient is zero, as the outputs {none}"""
    )
    assert not nnx.check(model, adam(model))
    few = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("spare")))
    assert ("no gradient", "spare") not in kinds(nnx.check(model, adam(model, few), X))
    assert ("outside wrt", "spare") in kinds(nnx.check(model, adam(model, few), X))


def test_gradients_inside_loops_branches_and_compiled_functions():
    class Loop(nnx.Module):
        def __init__(self, rngs):
            self.used = nnx.Linear(2, 2, rngs=rngs)
            self.idle = nnx.Linear(2, 2, rngs=rngs)
            self.spare = nnx.Param(jnp.ones(2))

        def __call__(self, x):
            @nnx.jit
            def inner(self, x):
                return nnx.cond(x.sum() > 0, lambda m, x: m.used(x), lambda m, x: x, self, x)

            @nnx.scan(in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=2)
            def loop(self, x):
                return nnx.remat(inner)(self, x) + jax.lax.stop_gradient(self.spare[...])

            return loop(self, x)

    model = Loop(nnx.Rngs(0))
    for _ in range(2):
        found = nnx.check(model, None, X)
        assert kinds(found) == [("never called", "idle"), ("no gradient", "spare")]


def test_a_module_whose_variables_are_used_counts_as_called():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Embed(4, 2, rngs=rngs)
            self.alias = self.table.embedding

        def __call__(self, x):
            return x @ self.alias[...].T

    assert not nnx.check(Tied(nnx.Rngs(0)), None, X)


def test_what_is_recorded_is_an_output():
    class Router(nnx.Module):
        def __init__(self):
            self.gate = nnx.Param(jnp.ones(2))

        def __call__(self, x):
            self.sow(nnx.Intermediate, "loss", (x * self.gate[...]).sum())
            return x

    model = Router()
    assert not nnx.check(model, None, X)
    model(X)
    assert not nnx.check(model, None, X)


def test_custom_derivatives():
    @nnx.custom_vjp
    def clip(layer, x):
        return layer(x)

    def forward(layer, x):
        return layer(x), (layer, x)

    def backward(residuals, g):
        raise AssertionError("it is not called")

    clip.defvjp(forward, backward)

    class Clipped(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(2, 2, rngs=rngs)
            self.spare = nnx.Param(jnp.ones(2))

        def __call__(self, x):
            return clip(self.layer, x)

    assert kinds(nnx.check(Clipped(nnx.Rngs(0)), None, X)) == [("no gradient", "spare")]


# Odd models ----------------------------------------------------------------------------------


def test_a_call_that_fails():
    finding = only(nnx.check(net(), None, jnp.ones((4, 5))))
    assert (finding.kind, finding.path) == ("not checked", ())
    assert finding.text.startswith("could not check the call with these inputs: ")
    assert "5" in finding.text and "\n" not in finding.text


def test_models_and_optimizers_of_other_types():
    finding = only(nnx.check([net()], None, X))
    assert finding.text == "cannot call list with the inputs; give a module with `__call__`"
    finding = only(nnx.check(net(), X))
    assert finding.path == ("optimizer",)
    assert finding.text == (
        "expected an nnx.Optimizer, several or None, got float32[4, 2]; inputs come after it: "
        "nnx.check(model, None, *inputs)"
    )
    assert "got GradientTransformation" in only(nnx.check(net(), optax.sgd(0.1))).text
    for model in (None, 3, "text", {}, X, jnp.float32):
        assert not nnx.check(model)


def test_half_built_objects_cycles_tracers_and_deep_models():
    class Half(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            raise RuntimeError

    half = Half.__new__(Half)
    assert not nnx.check(half)
    assert only(nnx.check(half, None, X)).kind == "not checked"
    model = net()
    del model.l1
    assert "AttributeError" in only(nnx.check(model, adam(model), X)).text
    model = net()
    model.drop.rngs.key.set_raw_value(None)
    assert isinstance(str(nnx.check(model, None, X)), str)
    model = net()
    model.itself = model
    assert not nnx.check(model, adam(model), X)
    deleted = net()
    jax.tree.map(lambda x: x.delete(), nnx.state(deleted))
    assert isinstance(str(nnx.check(deleted, None, X)), str)
    deep = nnx.check(chain(nnx, 2_000))  # of one array
    assert {finding.kind for finding in deep} == {"aliased array"}
    assert max(map(len, str(deep).splitlines())) < 400
    seen = []

    @nnx.jit
    def inside(model, x):
        seen.append(nnx.check(model, None, x))
        return model(x)

    inside(net(), X)
    assert not seen[0], seen


def test_containers_that_cannot_be_walked():
    cycle = [net()]
    cycle.append(cycle)
    finding = only(nnx.check(cycle))
    assert finding.kind == "not checked"
    assert finding.text.startswith("could not check the model: ValueError: ")


def test_many_findings_of_a_kind_are_counted():
    model = nnx.List([Scale(jnp.ones(2)) for _ in range(30)])
    found = nnx.check(model)
    lines = str(found).splitlines()
    assert len(found) == 30 and len(lines) == 22
    assert lines[0] == "bare array:" and lines[-1] == "  ... 10 more"


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: nnx.Param(jnp.full((1,), -1.0)), "weakly typed float32\\[1\\]"),
        (lambda: nnx.Param(jnp.asarray(1.0)), "weakly typed float32\\[\\]"),
        (lambda: nnx.Param(jnp.asarray(1.0) * 2), "weakly typed float32\\[\\]"),
        (lambda: nnx.Param(1.0), "the number 1.0"),
        (lambda: nnx.BatchStat(jnp.full(2, 0.0)), "weakly typed float32\\[2\\]"),
    ],
)
def test_weak_types(make, what):
    model = nnx.Dict(a=nnx.Linear(2, 2, rngs=nnx.Rngs(0)), b=make())
    [finding] = nnx.check(model)
    assert (finding.kind, finding.path) == ("weak type", ("b",))
    assert re.match(
        f"{what}, which a first update .*give the array a dtype, as in jnp.full", finding.text
    )
    if "weakly" in what:
        assert "weakly typed float32[" in str(model) and "weak_type=True" in repr(model)


def test_weak_types_are_told_where_a_step_compiles_again():
    strong = nnx.Dict(w=nnx.Param(jnp.full((1,), -1.0, jnp.float32)))
    weak = nnx.Dict(w=nnx.Param(jnp.full((1,), -1.0)))
    assert not nnx.check(strong) and "weak" not in str(strong) + repr(strong)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda m: (m.w[...] ** 2).sum())(model))

    optimizers = [nnx.Optimizer(m, optax.adam(0.1), wrt=nnx.Param) for m in (strong, weak)]
    step(strong, optimizers[0])
    step(weak, optimizers[1])
    text = str(step.explain())
    assert "model.w: float32[1] -> weakly typed float32[1]" in text
    assert text.endswith("make the array with a dtype, as in jnp.full((1,), -1.0, jnp.float32).")


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_numbers_that_are_not_finite(bad):
    model = nnx.Dict(l=nnx.Linear(2, 2, rngs=nnx.Rngs(0)), bn=nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    model.bn.mask = nnx.Variable(jnp.array([-jnp.inf, 0.0]))  # may be on purpose
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    assert not nnx.check(model, optimizer)
    for variable in (model.l.kernel, model.bn.var, optimizer.opt_state[0].nu["l"]["bias"]):
        variable[...] = variable[...].at[..., 1].set(bad)
    found = [f for f in nnx.check(model, optimizer) if f.kind == "not finite"]
    assert [f.path for f in found] == [
        ("bn", "var"), ("l", "kernel"), ("optimizer", "opt_state", 0, "nu", "l", "bias")
    ]  # fmt: skip
    assert [f.text.split(" numbers")[0] for f in found] == ["1 of 2", "2 of 4", "1 of 2"]
    assert "ones to a variance; DynamicLossScale.value_and_grad restores" in found[0].text
    assert "restore a checkpoint, or nnx.find_nan shows where they arise" in found[1].text
