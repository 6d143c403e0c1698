"""`tabulate`: what the table says, and that the model is as it was."""

from __future__ import annotations

import collections
import io
import threading

import jax
import jax.numpy as jnp
import pytest

from nnxlite.graph._functional import merge, split
from nnxlite.inspect import filter_rng_streams, tabulate
from nnxlite.inspect._calls import arguments_text, layout, trace_calls
from nnxlite.nn import BatchNorm, Dropout, Linear, Sequential
from nnxlite.objects._containers import Dict, List
from nnxlite.objects._module import Module
from nnxlite.objects._rngs import Rngs, RngStream
from nnxlite.transforms._jit import jit
from nnxlite.variables._kinds import Cache, Param
from nnxlite.variables._variable import Variable

PLAIN = {"console_kwargs": {"width": 200, "force_terminal": False}}
X = jnp.ones((4, 3))
HEAD = Linear(2, 7, rngs=Rngs(1))


class Block(Module):
    def __init__(self, din, dout, rngs):
        self.linear = Linear(din, dout, rngs=rngs)
        self.bn = BatchNorm(dout, rngs=rngs)
        self.drop = Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return jax.nn.relu(self.drop(self.bn(self.linear(x))))


class Net(Module):
    def __init__(self):
        rngs = Rngs(0)
        self.first = Block(3, 5, rngs)
        self.rest = List([Block(5, 2, rngs)])
        self.scale = Param(jnp.ones(2), tag="gain")

    def __call__(self, x, twice=False, *, head=None):
        x = self.first(x)
        for block in self.rest:
            x = block(x)
        x = x * self.scale
        return head(x) if head is not None else (x + x if twice else x)


def rows_of(obj, *args, **options):
    rows = []
    tabulate(obj, *args, row_filter=lambda row: rows.append(row) or True, **options)
    return rows


def cells(text):
    """The cells of each line of a table."""
    split_lines = [line.strip("│").split("│") for line in text.splitlines() if "│" in line]
    return [[cell.rstrip()[1:] for cell in line] for line in split_lines]


def shown(rows):
    return [(row.path, row.type.__name__) for row in rows if filter_rng_streams(row)]


def test_rows_are_the_calls_in_order():
    model = Net()
    rows = rows_of(model, X)
    wanted = [((), "Net")]
    for path in [("first",), ("rest", 0)]:
        parts = [("linear", "Linear"), ("bn", "BatchNorm"), ("drop", "Dropout")]
        wanted += [(path, "Block"), *(((*path, name), kind) for name, kind in parts)]
    assert shown(rows) == wanted
    assert [row.call_order for row in rows] == list(range(len(rows)))
    assert rows[-1].inputs_repr == ""  # a random stream takes nothing
    assert rows[-1].type is RngStream
    assert rows[-1].outputs.dtype == jax.random.key(0).dtype
    first = rows[1]
    assert (first.object_id, first.inputs_repr) == (id(model.first), "float32[4,3]")
    assert (first.outputs.shape, first.outputs.dtype) == ((4, 5), jnp.float32)
    assert (first.flops, first.vjp_flops) == (None, None)
    text = tabulate(model, X, row_filter=lambda row: True, **PLAIN)
    assert "RngStream" in text and "scale: float32[2] (tag='gain')" in text
    for depth in (0, 1, 2):
        assert shown(rows_of(model, X, depth=depth)) == [w for w in wanted if len(w[0]) <= depth]


def twice(layer, x):
    """A part of a model that runs under a transform."""
    return layer(layer(x))


def rebuilt(layer, x):
    graphdef, state = split(layer)
    return jax.checkpoint(lambda state, x: merge(graphdef, state)(x))(state, x)


class Louder(Linear):
    """Its call of `super` makes no row of its own."""

    def __call__(self, x):
        return 2 * super().__call__(x)


@pytest.mark.parametrize("run", [twice, jit(twice), rebuilt])
def test_an_object_makes_one_row_wherever_it_is_called(run):
    class Outer(Module):
        def __init__(self):
            self.layer = Sequential(Louder(3, 3, rngs=Rngs(0)), Dropout(0.5, rngs=Rngs(0)))
            self.alias = self.layer.layers[0]

        def __call__(self, x):
            return run(self.layer, x)

    model = Outer()
    for _ in range(2):  # again, although JAX has the program
        rows = [path for path, _ in shown(rows_of(model, X))]
        assert rows == [(), ("layer",), ("alias",), ("layer", "layers", 1)]
    assert "Total Parameters: 14 (60 B)" in tabulate(model, X, **PLAIN)


@pytest.mark.parametrize(
    ("args", "kwargs", "inputs"),
    [
        ((True,), {}, "- float32[4,3]\n- True"),
        (("[red]",), {}, "- float32[4,3]\n- '[red]'"),
        ((), {"head": HEAD}, "- float32[4,3]\nhead: Linear"),
    ],
)
def test_arguments_that_are_not_arrays_stay_concrete(args, kwargs, inputs):
    assert rows_of(Net(), X, *args, **kwargs)[0].inputs_repr == inputs
    assert inputs.splitlines()[-1] in tabulate(Net(), X, *args, **PLAIN, **kwargs)


def test_own_variables_in_containers_are_shown_by_path():
    class Bag(Module):
        def __init__(self):
            self.items = List([Param(jnp.ones(2)), Param(jnp.ones(3))])
            self.plain = [Param(jnp.ones(4))]
            self.named = Dict(a=Cache({"k": jnp.ones(5)}))
            self.number = Param(2.0)

        def __call__(self):
            return self.items[0]

    text = tabulate(Bag(), **PLAIN)
    for line in ("items/0: float32[2]", "items/1: float32[3]", "plain/0: float32[4]", "named/a:"):
        assert line in text
    assert "k: float32[5]" in text
    assert "9 (36 B)" in text


def test_abstract_inputs_and_abstract_models():
    model = Linear(3, 2, rngs=Rngs(0))
    wanted = tabulate(model, X, **PLAIN)
    assert tabulate(model, jax.ShapeDtypeStruct((4, 3), jnp.float32), **PLAIN) == wanted
    for name in ("kernel", "bias"):
        v = getattr(model, name)
        v.value = jax.ShapeDtypeStruct(v.shape, v.dtype)
    assert tabulate(model, X, **PLAIN) == wanted


class Counter(Module):
    def __init__(self):
        self.net = Net()
        self.count = Variable(jnp.array(0))

    def __call__(self, x):
        self.count += 1
        self.last = self.count.value
        return self.net(x)


def test_the_model_is_as_it_was_and_flops_are_those_of_the_whole_program():
    model = Counter()
    graphdef, before = split(model)
    call = Block.__dict__["__call__"]
    text = repr(model)
    [row, *_] = rows_of(model, X, compute_flops=True, compute_vjp_flops=True)
    after_graphdef, after = split(model)
    assert after_graphdef is graphdef and model.count.value == 0
    assert all(a is b for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after)))
    assert Block.__dict__["__call__"] is call and repr(model) == text
    program = jax.jit(lambda state, x: merge(graphdef, state)(x))
    assert row.flops == program.lower(before, X).cost_analysis()["flops"]


def test_an_error_inside_the_model_comes_out_and_classes_are_as_they_were():
    class Child(Linear):
        pass

    model = Sequential(Child(3, 3, rngs=Rngs(0)), lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tabulate(model, X)
    assert "__call__" not in Child.__dict__
    assert Child.__call__ is Linear.__call__
    assert not hasattr(model, "_watched_label")


def test_variables_in_references():
    class Held(Module):
        def __init__(self):
            self.w = Param(jnp.ones((3, 2)), ref=True)

        def __call__(self, x):
            self.w += 1
            return x @ self.w

    model = Held()
    text = tabulate(model, X, compute_flops=True, **PLAIN)
    assert "w: float32[3,2]" in text
    assert model.w.value.sum() == 6


def test_each_layer_runs_once_for_all_the_rows_around_it():
    runs = []

    class Inner(Module):
        def __init__(self, rngs):
            self.linear = Linear(3, 3, rngs=rngs)
            self.norm = BatchNorm(3, rngs=rngs)
            self.rngs = rngs

        def __call__(self, x, scale=1.0, *, flag=True):
            runs.append((type(scale), flag))
            return self.norm(self.linear(x)) * scale + self.rngs.normal(())

    class Outer(Module):
        def __init__(self, rngs):
            self.inner = Inner(rngs)

        def __call__(self, x):
            return self.inner(x, 2.0, flag=False)

    rows = rows_of(Outer(Rngs(0)), jnp.ones((2, 3)), compute_flops=True, compute_vjp_flops=True)
    assert runs == [(float, False)]
    flops = {row.path: row.flops for row in rows}
    assert flops[()] == flops["inner",] > flops["inner", "linear"] > 0
    whole, *_ = rows
    assert whole.vjp_flops > whole.flops


def test_flops_of_the_call_and_of_its_gradient():
    row = rows_of(Linear(3, 2, rngs=Rngs(0)), X, compute_flops=True, compute_vjp_flops=True)[0]
    product, bias = 2 * 4 * 3 * 2, 4 * 2
    assert row.flops == product + bias
    assert row.vjp_flops == 3 * product + bias + 3 * 2  # dW, dx, and the sum over the batch for db
    text = tabulate(Linear(3, 2, rngs=Rngs(0)), X, compute_flops=True, **PLAIN)
    assert " flops " in text
    assert "vjp_flops" not in text


def test_flops_where_xla_counts_compiled_programs_alone(monkeypatch):
    def none(backend=None):
        raise RuntimeError("no CPU")

    monkeypatch.setattr(jax, "local_devices", none)
    monkeypatch.setattr(jax.stages.Lowered, "cost_analysis", lambda lowered: None)
    row = rows_of(Linear(3, 2, rngs=Rngs(0)), X, compute_flops=True)[0]
    assert row.flops == 2 * 4 * 3 * 2 + 4 * 2


def test_the_text_is_without_colours_and_as_wide_as_needed_by_default():
    text = tabulate(Net(), X)
    assert "\x1b[" not in text and "…" not in text
    assert "\x1b[" in tabulate(Net(), X, console_kwargs={"force_terminal": True})


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (3, {}, ValueError, "Expected a Module or another graph object, got int"),
        (HEAD, {"method": "forward"}, AttributeError, "Linear has no method 'forward' to tabulate"),
        (HEAD, {"depth": -1}, ValueError, "depth=-1: expected the length of the longest path"),
    ],
)
def test_bad_arguments(model, options, error, message):
    with pytest.raises(error, match=message):
        tabulate(model, X, **options)


def test_layout_of_arguments():
    Pair = collections.namedtuple("Pair", ["a", "b"])
    assert layout(Pair(X, 1)) == "a: float32[4,3]\nb: 1"
    assert layout([{"k": [X]}, []]) == "- k:\n    - float32[4,3]\n- []"
    assert layout(Param(X)) == "float32[4,3]"
    assert layout(None) == "None"
    assert layout(()) == "()"
    assert arguments_text((), {}) == ""
    assert trace_calls(Linear(3, 2, rngs=Rngs(0)), "__call__", (X,), {})[0].path == ()


class Codec(Module):
    def __init__(self):
        self.inner = Linear(3, 3, rngs=Rngs(0))

    def __call__(self, x):
        return self.decode(self._plain(self.encode(x))) + self.encode(x) + self.encode(x[:1])

    def encode(self, x, *, power=1):
        return self.inner(x) ** power

    def decode(self, x):
        return x

    def parts(self, x):
        return {"code": self.encode(x, power=2), "raw": (x, "note")}

    def _plain(self, x):
        return x

    @staticmethod
    def helper(x):
        return x


def test_public_methods_make_rows_of_their_own():
    assert [(row.path, row.inputs_repr) for row in rows_of(Codec(), X)] == [
        ((), "float32[4,3]"),
        (("encode",), "float32[4,3]"),
        (("inner",), "float32[4,3]"),
        (("decode",), "float32[4,3]"),
        (("encode",), "float32[1,3]"),  # another form of the inputs is another row
        (("inner",), "float32[1,3]"),
    ]
    assert [row.path for row in rows_of(Codec(), X, depth=0)] == [()]
    assert [row.path for row in rows_of(Codec(), X, depth=0, method="encode")] == [("encode",)]
    table = cells(tabulate(Codec(), X, method="parts", **PLAIN))
    assert [row[0] for row in table if row[0]] == ["parts", "encode", "inner"]
    outputs = ["code: float32[4,3]", "raw:", "  - float32[4,3]", "  - 'note'"]
    assert [row[3] for row in table[:4]] == outputs
    assert [row[2] for row in table if row[0] == "encode"] == ["- float32[4,3]"]


class Tied(Module):
    def __init__(self):
        self.encoder = Linear(1_000, 40, use_bias=False, rngs=Rngs(0))
        self.decoder = Dict(kernel=self.encoder.kernel)
        self.other = List([Linear(40, 40, use_bias=False, rngs=Rngs(1))])
        self.other[0].twin = self.encoder.kernel

    def __call__(self, x):
        return self.other[0](self.encoder(x)) @ self.decoder.kernel.T


def test_what_is_shared_counts_once_and_sums_are_below_their_columns():
    assert (
        tabulate(Tied(), jnp.ones((2, 1_000)), compute_flops=True)
        == """\
                                             Tied Summary                                              
┏━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┓
┃ path    ┃ type   ┃ inputs          ┃ outputs         ┃   flops ┃ Param                              ┃
┡━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┩
│         │ Tied   │ float32[2,1000] │ float32[2,1000] │ 326,400 │ decoder/kernel: float32[1000,40]   │
│         │        │                 │                 │         │                                    │
│         │        │                 │                 │         │ 41,600 (166.4 KB)                  │
├─────────┼────────┼─────────────────┼─────────────────┼─────────┼────────────────────────────────────┤
│ encoder │ Linear │ float32[2,1000] │ float32[2,40]   │ 160,000 │ kernel: shared with decoder/kernel │
├─────────┼────────┼─────────────────┼─────────────────┼─────────┼────────────────────────────────────┤
│ other/0 │ Linear │ float32[2,40]   │ float32[2,40]   │   6,400 │ kernel: float32[40,40]             │
│         │        │                 │                 │         │ twin: shared with decoder/kernel   │
│         │        │                 │                 │         │                                    │
│         │        │                 │                 │         │ 1,600 (6.4 KB)                     │
├─────────┼────────┼─────────────────┼─────────────────┼─────────┼────────────────────────────────────┤
│         │        │                 │           Total │ 326,400 │ 41,600 (166.4 KB)                  │
└─────────┴────────┴─────────────────┴─────────────────┴─────────┴────────────────────────────────────┘
                                                                                                       
                                  Total Parameters: 41,600 (166.4 KB)                                  
"""  # noqa: W291, W293 - rich fills the lines
    )


def test_a_closed_terminal_is_none_and_threads_do_not_see_each_other(monkeypatch):
    layer = Block(3, 2, Rngs(0))
    wanted, results, calls = tabulate(layer, X), [], []

    def call():
        calls.extend(Linear(3, 2, rngs=Rngs(0))(X).shape for _ in range(20))

    make = lambda: results.append(tabulate(Block(3, 2, Rngs(0)), X))
    threads = [threading.Thread(target=f) for f in (make, call, make)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [wanted] * 2 and calls == [(4, 2)] * 20
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr("sys.stdout", stream)
        assert tabulate(layer, X) == wanted


def test_a_narrow_table_folds_what_is_too_long():
    text = tabulate(Tied(), jnp.ones((2, 1_000)), console_kwargs={"width": 60})
    assert max(map(len, text.splitlines())) <= 60
    rows = cells(text)
    assert "".join(row[0] for row in rows) == "encoderother/0"
    assert "".join(row[2] for row in rows[:2]) == "float32[2,1000]"
    assert "".join(row[4] for row in rows[:4]) == "decoder/kernel:float32[1000,40]"
