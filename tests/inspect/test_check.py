"""check: each kind of silent failure is found and its text read, and healthy models have none."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np  # noqa: F401 - lines of the table use it
import optax

import nnxlite as nnx
from benchmarks.models import block_stack, chain, transformer
from tests.messages import rows
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


net = lambda: Net(nnx.Rngs(0))
adam = lambda model, wrt=nnx.Param: nnx.Optimizer(model, optax.adam(1e-3), wrt=wrt)
kinds = lambda found: [(finding.kind, ".".join(map(str, finding.path))) for finding in found]
sgd = lambda model: nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


class Scale(nnx.Module):
    def __init__(self, value):
        self.value = value

    def __call__(self, x):
        return x * self.value


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=3)(stacked)(rngs)

    def __call__(self, x):
        step = lambda layer, x: layer(x)
        return nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


class Every(nnx.Module):
    """All layers of the catalogue."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([row.make(rngs) for row in LAYERS.values()])

    def __call__(self, *xs):
        rows = zip(LAYERS.values(), self.layers, xs, strict=True)
        return [row.run(layer, x) for row, layer, x in rows]


def test_nothing_is_found_in_any_layer():
    model = Every()
    found = nnx.check(model, adam(model), *(row.x for row in LAYERS.values()))
    assert not found, found


def test_nothing_is_found_in_a_model():
    for model, x, optimizers in (
        (net(), X, (None, adam, sgd)),
        (nnx.eval_shape(net), X, (None, adam)),
        (block_stack(nnx, 2), jnp.ones((4, 8)), (adam,)),
        (transformer(nnx, 1), jax.ShapeDtypeStruct((2, 5), "int32"), (adam,)),
        (Stack(nnx.Rngs(0)), jnp.ones((1, 4)), (adam, adam)),  # JAX then has the loop's program
    ):
        for optimizer in optimizers:
            found = nnx.check(model, optimizer and optimizer(model), x)
            assert not found and len(found) == 0 and list(found) == [], found
            assert str(found) == repr(found) == "nothing found"


def test_the_model_stays_as_it_was_and_is_healthy_after_a_step():
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
    grads = nnx.jit(nnx.grad(lambda model: Net.__call__(model, X).sum()))(model)
    nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))(model, optimizer, grads)
    assert not nnx.check(model, optimizer, X)
    model.eval()
    assert not nnx.check(model, optimizer, X)


def check(edit, *args, **inputs):
    """The findings of a `net` after a program that changes it."""
    model = net()
    exec(edit, {**globals(), "m": model})
    return nnx.check(model, *args, **inputs)


class Settings(nnx.Module):
    def __init__(self, x):
        self.partial = functools.partial(jnp.add, x)
        self.closure = [lambda y: y * x]
        self.method = x.sum
        self.fine = functools.partial(jnp.add, 1.0)
        self.w = nnx.Param(jnp.ones(2), scale=(x, 1))


def two(one=0, other=0):
    streams = nnx.Rngs(one), nnx.Rngs(other)
    return nnx.Dict(zip("ab", (nnx.Dropout(0.5, rngs=rngs) for rngs in streams)))


@nnx.vmap
def stacked(rngs):
    return nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))


def drawing(init):
    cells = (nnx.SimpleCell(2, 2, carry_init=init, rngs=nnx.Rngs(i)) for i in range(2))
    return nnx.Sequential(*map(nnx.RNN, cells))


def weak(value, kind=nnx.Param):
    return nnx.Dict(a=nnx.Linear(2, 2, rngs=nnx.Rngs(0)), b=kind(value))


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


class Tied(nnx.Module):
    """A Variable of its layer is used, and not the layer."""

    def __init__(self, rngs):
        self.table = nnx.Embed(4, 2, rngs=rngs)
        self.alias = self.table.embedding

    def __call__(self, x):
        return x @ self.alias[...].T


class Router(Scale):
    def __call__(self, x):
        self.sow(nnx.Intermediate, "loss", (x * self.value[...]).sum())  # an output
        return x


@nnx.custom_vjp
def clip(layer, x):
    return layer(x)


clip.defvjp(lambda layer, x: (layer(x), None), None)  # the backward rule is not called


class Loop(nnx.Module):
    """A layer and a Param that a loop, a branch, compiled functions and rules hide."""

    def __init__(self, rngs):
        self.used, self.idle, self.clipped = (nnx.Linear(2, 2, rngs=rngs) for _ in range(3))
        self.spare = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        @nnx.jit
        def inner(self, x):
            return nnx.cond(x.sum() > 0, lambda m, x: m.used(x), lambda m, x: x, self, x)

        @nnx.scan(in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=2)
        def loop(self, x):
            return nnx.remat(inner)(self, x) + jax.lax.stop_gradient(self.spare[...])

        return loop(self, clip(self.clipped, x))


@functools.cache
def scope():
    """What the lines use; `check` changes none of it."""
    both = nnx.Dict(generator=nnx.Linear(2, 2, rngs=nnx.Rngs(0)), critic=nnx.List([net()]))
    few = nnx.Dict(generator=both.generator, critic=nnx.List([nnx.Dict(l1=both.critic[0].l1)]))
    half = nnx.Linear(2, 3, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    model, rngs, array, unused = net(), nnx.Rngs(0), jnp.ones(2), Unused(nnx.Rngs(0))
    nnx.cast(cast := net(), "bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nothing = adam(model, nnx.PathContains("head"))
    replaced = Scale(nnx.Param(array))
    trains_it = adam(replaced)
    replaced.value = jnp.ones(2)
    aliased = adam(model)
    aliased.opt_state[0].mu["l1"]["kernel"].set_raw_value(model.l1.kernel.get_raw_value())
    modes = nnx.List([net(), Net(nnx.Rngs(1))])
    modes[1].norm.eval()
    kernels = nnx.All(nnx.Param, nnx.PathContains("l1"))
    zeros, random = map(drawing, (nnx.initializers.zeros, nnx.initializers.normal()))
    shared = nnx.Dict(a=nnx.Dropout(0.5, rngs=rngs), b=nnx.Dropout(0.5, rngs=rngs), rngs=rngs)
    mixed = nnx.Sequential(half, nnx.LayerNorm(3, rngs=nnx.Rngs(0)))  # as layers ask for
    part = adam(model.l1, lambda path, leaf: path == ("kernel",))  # paths of the part
    routed, cycle, traced = Router(nnx.Param(jnp.ones(2))), [net()], []
    routed(X)
    cycle.append(cycle)
    jax.jit(lambda x: traced.append(Settings(x)))(1.0)
    return {**globals(), **locals()}


FOUND = """
check('m.l1.bias = jnp.zeros(3)')
    bare array: l1.bias: a bare array has replaced the Variable that Linear has here, so it is not
    trained; assign nnx.Param(array), or write to the elements of the Variable (`[...] = array`)
nnx.check(nnx.Dict(a=Scale(nnx.Param(jnp.ones(2))), b=Scale(jnp.ones(2))))
    bare array: b.value: a bare array has replaced the Variable that Scale has here ...
nnx.check(replaced, trains_it)
    bare array: value: a bare array has replaced the Variable that Scale has here ...
nnx.check(Scale(np.ones(2, np.float32)))
    bare array: value: a bare array in Scale, which no optimizer trains; make it an nnx.Param, or an
    nnx.Variable if it is a constant
nnx.check(Scale(jnp.arange(3)))
    nothing found
nnx.check(both, {'g': adam(both.generator), 'c': adam(both.critic)})
    nothing found
nnx.check(few, adam(few.generator))
    outside wrt: critic.0.l1.bias: Param that no optimizer trains, as wrt=Param does not select it;
    change `wrt` unless it is frozen on purpose critic.0.l1.kernel: Param that no optimizer trains ...
nnx.check(few, [sgd(few.generator), sgd(few.critic)])
    nothing found
nnx.check(model, {'a': adam(model), 'b': nothing})
    empty filter: optimizer.b: wrt=PathContains('head', exact=True) selects no Variable of the model
    that is not frozen, so that updates change nothing; give it a filter that does, as nnx.Param
kinds(nnx.check(model, nothing))
    [('empty filter', 'optimizer')]
nnx.check(model, (adam(model), part))
    nothing found
nnx.check(*traced)
    traced setting: partial: contains float32[] of a transform, which cannot be used once that has
    returned; pass it as an argument, or make it the value of an nnx.Variable closure: contains ...
    method: contains ... w.scale: contains ...
nnx.check(Settings(np.float32(1)))
    nothing found
nnx.check(model, (adam(model), adam(model, kernels)))
    two optimizers: l1.bias: trained by optimizer.0 and optimizer.1; give each optimizer a filter
    `wrt` of its own l1.kernel: trained by optimizer.0 and optimizer.1; ...
nnx.check(model, nnx.ModelAndOptimizer(model, optax.sgd(0.1)))
    nothing found
len(nnx.check(model, [nnx.ModelAndOptimizer(model, optax.sgd(0.1)), adam(model)]))
    6
check('m.drop.deterministic = True')
    mixed modes: norm: use_running_average=False, training mode, while drop is in evaluation mode;
    call model.train() or model.eval() on the whole model
nnx.check(modes)
    mixed modes: 1.norm: use_running_average=True, evaluation mode, while 0.drop and 2 more are in
    training mode; call model.train() or model.eval() on the whole model
nnx.check(two())
    equal keys: b.rngs: this random stream gives the same numbers as a.rngs, as both have the same key
    and count; use other seeds, or rngs.fork()
nnx.check(shared)
    nothing found
kinds(nnx.check(nnx.Rngs(params=0, dropout=0)))
    [('equal keys', 'params')]
nnx.check(stacked(nnx.Rngs(0).broadcast(3)))
    equal keys: layers.1.rngs: this random stream has 3 lanes, and only 1 of their keys differ; use
    nnx.split_rngs or rngs.split in place of one that repeats the key equal lanes: layers.0.kernel:
    all 3 slices along the first axis are equal, as if they were initialized with one key; split the
    streams of the constructor: @nnx.split_rngs(splits=3)
[nnx.check(zeros), nnx.check(zeros, None, jnp.ones((1, 3, 2))), nnx.check(random)]
    [nothing found, nothing found, nothing found]
kinds(nnx.check(random, None, jnp.ones((1, 3, 2))))
    [('equal keys', 'layers.1.rngs')]
check('m.l2.kernel.value = m.l2.kernel[...].astype(jnp.bfloat16)')
    mixed dtypes: l2.kernel: bfloat16, while most Params are float32, so that operations on both use
    the wider one; convert it, or give its layer this `param_dtype`
[nnx.check(mixed, None, X), nnx.check(mixed, None, X.astype('bfloat16')), nnx.check(cast)]
    [nothing found, nothing found, nothing found]
check('', None, x=X.astype(jnp.float16))
    mixed dtypes: inputs.x: float16, while the Params are float32 and no layer has this `dtype`, so
    that operations on both use the wider one; convert the input, or give layers a `dtype`
check('', None, np.ones((4, 2)))
    nothing found
check('m.l2.bias[...] = m.norm.mean[...][:2]; m.extra = nnx.Param(m.l1.kernel[...])')
    aliased array: l1.kernel: the same array as extra, so that donation of one deletes both; copy it
    (jnp.copy, nnx.clone(..., arrays=True)), or share the Variable to tie them
[f.kind for f in nnx.check(nnx.Dict(m=model, a=nnx.clone(model)))].count('aliased array')
    10
{f.kind for f in nnx.check(nnx.Dict(m=model, a=nnx.clone(model, arrays=True)))}
    {'equal keys'}
kinds(nnx.check(model, aliased))
    [('aliased array', 'optimizer.opt_state.0.mu.l1.kernel')]
kinds(nnx.check(Scale(nnx.Param(X)), None, X))
    [('aliased array', 'inputs.0')]
{f.kind for f in nnx.check(nnx.Dict(a=Scale(array), b=Scale(array)))}
    {'bare array'}
nnx.check(unused, None, X)
    never called: old: the call of the model uses neither a method nor a Variable of this Sequential;
    call it, or remove it no gradient: choice: its gradient is zero, as the outputs depend on it only
    through stop_gradient, or an operation without a derivative frozen: its gradient is zero, ...
    spare: its gradient is zero, as the outputs do not depend on it; use it in the call, or remove it
kinds(nnx.check(unused, adam(unused, nnx.All(nnx.Param, nnx.Not(nnx.PathContains('spare')))), X))
    [('outside wrt', 'spare'), ('never called', 'old'), ('no gradient', 'choice'),
    ('no gradient', 'frozen')]
[nnx.check(m, None, X) for m in (Tied(rngs), Router(nnx.Param(jnp.ones(2))), routed)]
    [nothing found, nothing found, nothing found]
kinds(nnx.check(Loop(rngs), None, X)) + kinds(nnx.check(Loop(rngs), None, X))
    [('never called', 'idle'), ('no gradient', 'spare'), ('never called', 'idle'),
    ('no gradient', 'spare')]
nnx.check(weak(jnp.full((1,), -1.0)))
    weak type: b: weakly typed float32[1], which a first update makes strongly typed, so that a step
    compiles up to three times; give the array a dtype, as in jnp.full((1,), -1.0, jnp.float32)
nnx.check(weak(1.0))
    weak type: b: the number 1.0, which a first update makes strongly typed ...
kinds(nnx.check(weak(jnp.asarray(1.0) * 2))) + kinds(nnx.check(weak(jnp.full(2, 0.0), nnx.BatchStat)))
    [('weak type', 'b'), ('weak type', 'b')]
nnx.check(weak(jnp.full((1,), -1.0, jnp.float32)))
    nothing found
[nnx.check(weak(x)) for x in (np.array([1e300, np.nan]), {'c': np.array(np.nan * 1j)}, np.array(1e300))]
    [not finite: b: 1 of 2 ..., not finite: b: 1 of 1 ..., nothing found]
[nnx.check(x) for x in (weak(np.float32('inf')), nnx.Dict(a=nnx.Param(X / 0, ref=True)))]
    [not finite: b: 1 of 1 ..., not finite: a: 8 of 8 ...]
nnx.check(model, None, jnp.ones((4, 5)))
    not checked: <root>: could not check the call with these inputs: ... 5 ...
nnx.check(cycle)
    not checked: <root>: could not check the model: ValueError: ...
nnx.check([model], None, X)
    not checked: <root>: cannot call list with the inputs; give a module with `__call__` ...
nnx.check(model, X)
    not checked: optimizer: expected an nnx.Optimizer, several or None, got float32[4, 2]; inputs come
    after it: nnx.check(model, None, *inputs)
nnx.check(model, optax.sgd(0.1))
    not checked: optimizer: expected ... got GradientTransformation ...
"""


@rows(FOUND)
def test_found(line, message):
    pattern = re.escape(message + " ").replace(r"\ \.\.\.", ".*")
    assert re.fullmatch(pattern, " ".join([*str(eval(line, scope())).split(), ""]))


def test_the_text_lists_the_first_of_a_kind():
    found = nnx.check(nnx.List([Scale(jnp.ones(2)) for _ in range(30)]))
    lines = str(found).splitlines()
    assert lines[:2] == ["bare array:", f"  {found.entries[0]}"]
    assert len(found) == 30 and len(lines) == 22 and lines[-1] == "  ... 10 more"


def test_weak_types_are_told_where_a_step_compiles_again():
    step = nnx.jit(lambda model: model.b[...] ** 2)
    for value in (jnp.full((1,), -1.0, jnp.float32), jnp.full((1,), -1.0)):
        step(weak(value))
    text = str(step.explain())
    assert "model.b: float32[1] -> weakly typed float32[1]" in text
    assert text.endswith("make the array with a dtype, as in jnp.full((1,), -1.0, jnp.float32).")
    assert "weakly typed float32[" in str(weak(value)) and "weak_type=True" in repr(weak(value))


def test_numbers_that_are_not_finite():
    model = nnx.Dict(l=nnx.Linear(2, 2, rngs=nnx.Rngs(0)), bn=nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    model.bn.mask = nnx.Variable(jnp.array([-jnp.inf, 0.0]))  # may be on purpose
    optimizer = adam(model)
    assert not nnx.check(model, optimizer)
    model.l.kernel[0, 0] = -jnp.inf
    for variable in (model.l.kernel, model.bn.var, optimizer.opt_state[0].nu["l"]["bias"]):
        variable[...] = variable[...].at[..., 1].set(jnp.nan)
    text = "numbers are NaN or infinite; restore a checkpoint, or"
    find = "nnx.find_nan shows where they arise"
    batch_stat = "assign zeros to a mean and ones to a variance"
    assert str(nnx.check(model, optimizer)).splitlines() == [
        "not finite:",
        f"  bn.var: 1 of 2 {text} {batch_stat}",
        f"  l.kernel: 3 of 4 {text} {find}",
        f"  optimizer.opt_state.0.nu.l.bias: 1 of 2 {text} {find}",
    ]


def test_half_built_objects_cycles_tracers_and_deep_models():
    for other in (None, 3, "text", {}, X, jnp.float32):
        assert not nnx.check(other)
    half = nnx.Linear.__new__(nnx.Linear)
    assert not nnx.check(half)
    assert kinds(nnx.check(half, None, X)) == [("not checked", "")]
    model = net()
    del model.l1
    assert "AttributeError" in str(nnx.check(model, adam(model), X))
    model = net()
    model.itself = model
    assert not nnx.check(model, adam(model), X)
    deep = nnx.check(chain(nnx, 1_000))  # of one array
    assert {finding.kind for finding in deep} == {"aliased array"}
    assert max(map(len, str(deep).splitlines())) < 400
    seen = []

    @nnx.jit
    def inside(model, x):
        seen.append(nnx.check(model, None, x))
        return model(x)

    inside(net(), X)
    assert not seen[0], seen
