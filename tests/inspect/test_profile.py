"""`profile`: floating-point operations, bytes and measured time by the path of the modules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import nnxlite as nnx
from nnxlite.inspect._profile import OUTSIDE, module_path

X = jax.ShapeDtypeStruct((5, 4), "float32")


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
        self.second = nnx.Linear(8, 4, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.abs(self.first(x)))


class Remat(Block):
    @nnx.remat
    def __call__(self, x):
        return self.second(jnp.abs(self.first(x)))


class Net(nnx.Module):
    def __init__(self, kind=Block):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([kind(rngs), kind(rngs)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


MATMUL = 2 * 5 * 4 * 8
"""Of one layer of a block."""


def step(net, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda net: net(x).sum())(net)
    optimizer.update(net, grads)
    return loss


def optimizer_of(net):
    return nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)


def test_each_module_has_its_own_operations():
    costs = nnx.profile(Net(), X)
    assert {path: cost.flops for path, cost in costs.rows.items()} == {
        "Net/blocks/0/first": MATMUL,
        "Net/blocks/0": 5 * 8,
        "Net/blocks/0/second": MATMUL,
        "Net/blocks/1/first": MATMUL,
        "Net/blocks/1": 5 * 8,
        "Net/blocks/1/second": MATMUL,
    }
    assert costs.rows["Net/blocks/0/first"].bytes == 4 * (5 * 4 + 4 * 8 + 5 * 8)
    assert costs.rows["Net/blocks/0"].bytes == 4 * 2 * 5 * 8
    assert costs.total.flops == 4 * MATMUL + 80
    assert costs.total.backward_flops == 0
    assert (costs.runs, costs.total.seconds, costs.uncounted) == (0, None, ())


def test_a_step_has_a_backward_pass_and_an_optimizer():
    net = Net()
    before = nnx.to_pure_dict(nnx.state(net))
    costs = nnx.profile(nnx.jit(step), net, optimizer_of(net), X)
    # the gradients of the kernel and of the input; the first layer needs only the former
    assert costs.rows["Net/blocks/1/second"].backward_flops >= 2 * MATMUL
    assert MATMUL <= costs.rows["Net/blocks/0/first"].backward_flops < 2 * MATMUL
    assert list(costs.rows)[-1] == OUTSIDE  # the sum and the optimizer
    assert costs.rows[OUTSIDE].flops >= 2 * (4 * 4 * 8)
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, before, nnx.to_pure_dict(nnx.state(net))))


def test_the_total_is_that_of_xla():
    net = Net()
    optimizer = optimizer_of(net)
    of_xla = nnx.jit(step).lower(net, optimizer, X).cost_analysis()["flops"]
    total = nnx.profile(step, net, optimizer, X).total
    assert total.flops + total.backward_flops == of_xla


def test_what_remat_repeats_is_backward():
    plain = nnx.profile(step, net := Net(), optimizer_of(net), X).rows
    costs = nnx.profile(step, net := Net(Remat), optimizer_of(net), X).rows
    assert costs.keys() == plain.keys()
    extra = costs["Net/blocks/0/first"].backward_flops - plain["Net/blocks/0/first"].backward_flops
    assert extra == MATMUL


def test_the_body_of_a_scan_counts_as_often_as_it_runs():
    @nnx.vmap
    def stack(key):
        return Block(nnx.Rngs(key))

    def run(blocks, x):
        return nnx.scan(lambda x, block: (block(x), None), in_axes=(nnx.Carry, 0))(x, blocks)[0]

    costs = nnx.profile(run, stack(jax.random.split(jax.random.key(0), 3)), X)
    assert costs.rows["Block/first"].flops == 3 * MATMUL


def test_loops_and_conditions():
    @nnx.jit
    def run(x, n):
        x = nnx.while_loop(
            lambda carry: carry[1] < n, lambda c: (jnp.tanh(c[0]) * 2, c[1] + 1), (x, 0)
        )[0]
        return nnx.cond(n > 3, lambda x: x @ x.T, lambda x: x[:, :1] @ x[:, :1].T, x)

    costs = nnx.profile(run, X, 3)
    assert costs.total.flops >= 2 * 5 * 4 * 5
    assert list(costs.rows) == [OUTSIDE]


def test_a_shorter_view():
    costs = nnx.profile(Net(), X)
    short = costs.to_depth(2)
    assert {path: cost.flops for path, cost in short.rows.items()} == {
        "Net/blocks": 4 * MATMUL + 80
    }
    assert short.total == costs.total
    with pytest.raises(ValueError, match=r"^depth=0: expected the longest path to show, 1 name"):
        costs.to_depth(0)


def test_times_of_a_trace(tmp_path):
    net = Net()
    optimizer, x = optimizer_of(net), jnp.ones(X.shape)
    jitted = nnx.jit(step)
    jax.block_until_ready(jitted(net, optimizer, x))
    with pytest.raises(FileNotFoundError, match=r"there is no trace \(\*.xplane.pb\) in '"):
        nnx.profile(jitted, net, optimizer, x, trace=tmp_path)
    with jax.profiler.trace(tmp_path):
        for _ in range(2):
            jax.block_until_ready(jitted(net, optimizer, x))
    costs = nnx.profile(jitted, net, optimizer, x, trace=tmp_path)
    assert costs.runs == 2
    for layer in ("Net/blocks/0/first", "Net/blocks/1/second"):
        assert (costs.rows[layer].seconds or 0) > 0
    total = sum(cost.seconds or 0 for cost in costs.rows.values())
    assert costs.total.seconds == pytest.approx(total)
    assert "mean of 2 runs" in str(costs) and "100%" in str(costs)
    (file,) = tmp_path.rglob("*.xplane.pb")
    assert nnx.profile(jitted, net, optimizer, x, trace=file).runs == 2

    def other(net, x):
        return net(x)

    with pytest.raises(ValueError, match="the program 'jit_other' does not run in the trace"):
        nnx.profile(other, net, x, trace=tmp_path)


def test_the_table():
    net = nnx.Dict(up=nnx.Linear(4, 8, use_bias=False, rngs=nnx.Rngs(0)))
    assert str(nnx.profile(lambda net, x: net.up(x), net, X)) == (
        """\
┏━━━━━━━━━┳━━━━━━━┳━━━━━━━━━━┳━━━━━━━┓
┃ module  ┃ FLOPs ┃ backward ┃ bytes ┃
┡━━━━━━━━━╇━━━━━━━╇━━━━━━━━━━╇━━━━━━━┩
│ Dict/up │   320 │        0 │ 368 B │
├─────────┼───────┼──────────┼───────┤
│ total   │   320 │        0 │ 368 B │
└─────────┴───────┴──────────┴───────┘
"""
    )


def test_something_that_is_no_function():
    with pytest.raises(TypeError, match="profile: expected a function as step, got int"):
        nnx.profile(3, X)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scope", "path"),
    [
        ("", OUTSIDE),
        ("jit(step)", OUTSIDE),
        ("jvp()", OUTSIDE),
        ("jit(step)/jvp(Net)/blocks/0", "Net/blocks/0"),
        ("transpose(jvp(Net/enter))", "Net/enter"),
        ("transpose(jvp(Net))/b/0/jvp(Net)/b/0/checkpoint/rematted_computation/l", "Net/b/0/l"),
        ("vmap(transpose(jvp(Net)))/l", "Net/l"),
    ],
)
def test_paths_in_scopes(scope, path):
    assert module_path(scope) == path
