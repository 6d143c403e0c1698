"""Calls of modules name the operations that they record: in jaxprs, HLO and so in profiles."""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import optax
import pytest

import nnxlite as nnx

X = jnp.ones((2, 4))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.second = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.sin(self.first(x)))


class Remat(Block):
    @nnx.remat
    def __call__(self, x):
        return self.second(jnp.sin(self.first(x)))


class Child(Block):
    def __call__(self, x):
        return jnp.cos(super().__call__(x))


class Net(nnx.Module):
    def __init__(self, kind=Block):
        rngs = nnx.Rngs(0)
        self.enter = nnx.Linear(4, 4, rngs=rngs)
        self.blocks = nnx.List([kind(rngs), kind(rngs)])
        self.last = self.enter

    def __call__(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def recorded(jaxpr, outer=""):
    """The primitives of a program with their scopes, those of inner programs too."""
    for eqn in jaxpr.eqns:
        scope = "/".join(filter(None, (outer, str(eqn.source_info.name_stack))))
        values = [x for v in eqn.params.values() for x in (v if isinstance(v, tuple) else (v,))]
        programs = [getattr(value, "jaxpr", value) for value in values]
        inner = [program for program in programs if hasattr(program, "eqns")]
        for part in inner:
            yield from recorded(part, scope)
        if not inner:
            yield eqn.primitive.name, scope


def scopes(fun, *args, of="dot_general"):
    program = jax.make_jaxpr(fun)(*args)
    return [scope for name, scope in recorded(program.jaxpr) if name == of]


BLOCKS = [f"Net/blocks/{number}/{name}" for number in (0, 1) for name in ("first", "second")]


def test_calls_have_the_path_of_their_module():
    net = Net()
    expected = ["Net/enter", *BLOCKS, "Net/enter"]  # the first path of a shared module
    assert scopes(lambda x: net(x), X) == expected
    assert scopes(lambda x: net(x), X, of="sin") == ["Net/blocks/0", "Net/blocks/1"]
    graphdef, state = nnx.split(net)
    assert scopes(lambda state, x: nnx.merge(graphdef, state)(x), state, X) == expected
    assert scopes(lambda x: nnx.jit(lambda net, x: net(x))(net, x), X) == expected
    # Under a transform a module has the path of the module itself.
    assert scopes(nnx.jit(lambda net, x: net(x)), Net(Remat), X)[1:-1] == BLOCKS


def test_a_part_that_is_called_alone_has_its_path_in_the_model():
    def encode(net, x):
        return net.blocks[1](net.enter(x))

    assert scopes(nnx.jit(encode), Net(), X) == ["Net/enter", *BLOCKS[2:]]
    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    assert scopes(lambda x: layer(x), X) == ["Linear"]


def test_super_opens_no_second_scope():
    child = Child(nnx.Rngs(0))
    assert scopes(lambda x: child(x), X) == ["Child/first", "Child/second"]
    assert scopes(lambda x: child(x), X, of="cos") == ["Child"]


def test_scopes_in_a_scan_over_layers():
    @nnx.vmap
    def stack(key):
        return Block(nnx.Rngs(key))

    @nnx.jit
    def run(blocks, x):
        return nnx.scan(lambda x, block: (block(x), None), in_axes=(nnx.Carry, 0))(x, blocks)[0]

    blocks = stack(jax.random.split(jax.random.key(0), 3))
    assert scopes(run, blocks, X) == ["Block/first", "Block/second"]


def test_scopes_are_in_the_hlo_of_a_training_step():
    net = Net()
    optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(net, optimizer, x):
        grads = nnx.grad(lambda net: net(x).sum())(net)
        optimizer.update(net, grads)

    names = re.findall(r'op_name="([^"]*)"', step.lower(net, optimizer, X).compile().as_text())
    assert "jit(step)/jvp(Net)/blocks/0/first/dot_general" in names
    assert "jit(step)/transpose(jvp(Net))/blocks/1/second/dot_general" in names


def test_the_setting_turns_scopes_off_and_compiles_again():
    net, traces = Net(), []

    @nnx.jit
    def run(net, x):
        traces.append(nnx.use_named_scopes.current_value())
        return net(x)

    on = run.lower(net, X).as_text(debug_info=True)
    with nnx.use_named_scopes(False):
        off = run.lower(net, X).as_text(debug_info=True)
        assert scopes(lambda x: net(x), X) == [""] * 6
    assert "blocks/0" in on and "blocks/0" not in off
    assert traces == [True, False]


@pytest.mark.parametrize("transform", [nnx.grad, lambda f: nnx.vmap(f, in_axes=(None, 0))])
def test_what_is_not_recorded_gets_no_names(transform, monkeypatch):
    entered = []
    monkeypatch.setattr(jax, "named_scope", lambda name: entered.append(name) or nullcontext())
    net = Net()
    run = transform(lambda net, x: net(x).sum())
    run(net, X)
    assert entered == []
    jax.make_jaxpr(lambda x: run(net, x))(X)
    assert entered[:2] == ["Net", "enter"]


def test_a_failed_call_leaves_no_scope_behind():
    class Fails(nnx.Module):
        def __call__(self, x):
            raise RuntimeError("refused")

    net, fails = Net(), Fails()

    def run(x):
        with pytest.raises(RuntimeError, match="refused"):
            fails(x)
        return net(x)

    assert scopes(run, X)[0] == "Net/enter"


def test_threads_have_their_own_scopes():
    def work(net):
        return {s.split("/")[0] for _ in range(10) for s in scopes(lambda x: net(x), X)}

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(work, [Net(), Block(nnx.Rngs(0))])] == [{"Net"}, {"Block"}]


def test_half_built_and_edited_modules_are_called_all_the_same():
    class Builds(nnx.Module):
        def __init__(self, x):
            self.inner = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.plain = [self.inner]
            self.plain.append(self.plain)  # contains itself: there is no graph
            self.shape = self.inner(x).shape
            del self.plain

        def __call__(self, x):
            self.late = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            return self.late(x)

    assert scopes(lambda x: Builds(x)(x), X) == ["Linear", "Builds/late"]
