"""`tabulate`: what the table says, and that the model is as it was; bytes by kind and device."""

import collections
import io
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import nnxlite as nnx
from nnxlite.inspect import filter_rng_streams
from tests.messages import refused, rows

X = jnp.ones((4, 3))
ALL = {"compute_flops": True, "compute_vjp_flops": True}
linear = lambda din=3, dout=2, **options: nnx.Linear(din, dout, **options, rngs=nnx.Rngs(0))


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = linear(3, 5)
        self.rest = nnx.List([nnx.BatchNorm(5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])
        self.scale = nnx.Param(jnp.ones(5), tag="gain")

    def __call__(self, x, twice=False, *, head=None):
        x = self.first(x)
        for layer in self.rest:
            x = layer(x)
        x = x * self.scale
        return head(x) if head is not None else (x + x if twice else x)


def rows_of(obj, *args, **options):
    made = []
    nnx.tabulate(obj, *args, row_filter=lambda row: made.append(row) or True, **options)
    return made


def cells(text):
    split_lines = [line.strip("│").split("│") for line in text.splitlines() if "│" in line]
    return [[cell.rstrip()[1:] for cell in line] for line in split_lines]


def test_rows_are_the_calls_in_order():
    """That they are those of the reference is tested beside it."""
    model = Net()
    made = rows_of(model, X)
    shown = [row.path for row in made if filter_rng_streams(row)]
    assert shown == [(), ("first",), ("rest", 0), ("rest", 1)]
    assert [row.call_order for row in made] == list(range(len(made)))
    assert made[1].object_id == id(model.first)
    stream = made[-1]
    assert (stream.type, stream.inputs_repr) == (nnx.RngStream, "")
    assert stream.outputs.dtype == jax.random.key(0).dtype
    text = nnx.tabulate(model, X, row_filter=lambda row: True)
    assert "RngStream" in text and "scale: float32[5] (tag='gain')" in text


def twice(layer, x):
    """A part of a model that runs under a transform."""
    return layer(layer(x))


def rebuilt(layer, x):
    graphdef, state = nnx.split(layer)
    return jax.checkpoint(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)


class Louder(nnx.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)  # makes no row of its own

    def __setattr__(self, name, value):
        assert not name.startswith("_watched")  # no attribute of this class
        super().__setattr__(name, value)


@pytest.mark.parametrize("run", [twice, nnx.jit(twice), rebuilt], ids=["plain", "jit", "rebuilt"])
def test_an_object_makes_one_row_wherever_it_is_called(run):
    class Outer(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.layer = nnx.Sequential(Louder(3, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
            self.alias = self.layer.layers[0]

        def __call__(self, x):
            return run(self.layer, x)

    model = Outer()
    for _ in range(2):  # again, although JAX has the program
        paths = [row.path for row in rows_of(model, X) if filter_rng_streams(row)]
        assert paths == [(), ("layer",), ("alias",), ("layer", "layers", 1)]
    assert "Total Parameters: 14 (60 B)" in nnx.tabulate(model, X)


Pair = collections.namedtuple("Pair", ["a", "b"])


def test_arguments_by_their_form():
    """Only arrays become abstract; `[red]` is no colour."""
    for args, kwargs, inputs in (
        ((True,), {}, "- float32[4,3]\n- True"),
        (("[red]",), {}, "- float32[4,3]\n- '[red]'"),
        ((), {"head": linear(5)}, "- float32[4,3]\nhead: Linear"),
    ):
        assert rows_of(Net(), X, *args, **kwargs)[0].inputs_repr == inputs
        assert inputs.splitlines()[-1] in nnx.tabulate(Net(), X, *args, **kwargs)
    for value, text in (
        (Pair(X, 1), "a: float32[4,3]\nb: 1"),
        ([{"k": [X]}, []], "- k:\n    - float32[4,3]\n- []"),
        (nnx.Param(X), "float32[4,3]"),
        (None, "None"),
        ((), "()"),
    ):
        assert rows_of(nnx.Identity(), value)[0].inputs_repr == text


def test_own_variables_in_containers_are_shown_by_path():
    class Bag(nnx.Module):
        def __init__(self):
            self.items = nnx.List([nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(3))])
            self.plain = [nnx.Param(jnp.ones(4))]
            self.named = nnx.Dict(a=nnx.Cache({"k": jnp.ones(5)}))
            self.number = nnx.Param(2.0)

        def __call__(self):
            return self.items[0]

    text = nnx.tabulate(Bag())
    for line in ("items/0: float32[2]", "items/1: float32[3]", "plain/0: float32[4]", "named/a:"):
        assert line in text
    assert "k: float32[5]" in text and "9 (36 B)" in text


def test_abstract_inputs_and_abstract_models():
    model = linear()
    wanted = nnx.tabulate(model, X)
    assert nnx.tabulate(model, jax.ShapeDtypeStruct((4, 3), jnp.float32)) == wanted
    assert nnx.tabulate(nnx.eval_shape(linear), X) == wanted


class Counter(nnx.Module):
    """Writes to a Variable and to a reference, and gets an attribute."""

    def __init__(self):
        self.net = Net()
        self.count = nnx.Variable(jnp.array(0))
        self.calls = nnx.Variable(jnp.array(0), ref=True)

    def __call__(self, x):
        self.count += 1
        self.calls += 1
        self.last = self.count.value
        return self.net(x)


def test_the_model_is_as_it_was_and_flops_are_those_of_the_whole_program():
    model = Counter()
    graphdef, before = nnx.split(model)
    call, text = nnx.Linear.__dict__["__call__"], repr(model)
    [row, *_] = rows_of(model, X, **ALL)
    after_graphdef, after = nnx.split(model)
    assert after_graphdef is graphdef and model.count.value == model.calls.value == 0
    assert all(a is b for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after)))
    assert nnx.Linear.__dict__["__call__"] is call and repr(model) == text
    program = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    assert row.flops == program.lower(before, X).cost_analysis()["flops"]


def test_an_error_inside_the_model_comes_out_and_classes_are_as_they_were():
    class Child(nnx.Linear):
        pass

    model = nnx.Sequential(Child(3, 3, rngs=nnx.Rngs(0)), lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        nnx.tabulate(model, X)
    assert "__call__" not in Child.__dict__ and Child.__call__ is nnx.Linear.__call__
    assert not hasattr(model, "_watched_label")


def test_each_layer_runs_once_for_all_the_rows_around_it():
    runs = []

    class Inner(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.rngs = linear(3, 3), rngs

        def __call__(self, x, scale=1.0, *, flag=True):
            runs.append((type(scale), flag))
            return self.linear(x) * scale + self.rngs.normal(())

    class Outer(nnx.Module):
        def __init__(self, rngs):
            self.inner = Inner(rngs)

        def __call__(self, x):
            return self.inner(x, 2.0, flag=False)

    made = rows_of(Outer(nnx.Rngs(0)), X, **ALL)
    assert runs == [(float, False)]
    flops = {row.path: row.flops for row in made}
    assert flops[()] == flops["inner",] > flops["inner", "linear"] > 0
    assert made[0].vjp_flops > made[0].flops


def test_flops_where_xla_counts_compiled_programs_alone(monkeypatch):
    def none(backend=None):
        raise RuntimeError("no CPU")

    monkeypatch.setattr(jax, "local_devices", none)
    monkeypatch.setattr(jax.stages.Lowered, "cost_analysis", lambda lowered: None)
    assert rows_of(linear(), X, compute_flops=True)[0].flops == 2 * 4 * 3 * 2 + 4 * 2


def test_the_text_is_without_colours_and_as_wide_as_needed_by_default():
    text = nnx.tabulate(Net(), X)
    assert "\x1b[" not in text and "…" not in text
    assert "\x1b[" in nnx.tabulate(Net(), X, console_kwargs={"force_terminal": True})


@rows("""
    nnx.tabulate(3, X)
        ValueError: Expected a Module or another graph object, got int
    nnx.tabulate(linear(), X, method="forward")
        AttributeError: Linear has no method 'forward' to tabu
    nnx.tabulate(linear(), X, depth=-1)
        ValueError: depth=-1: expected the length of the longest path
""")
def test_bad_arguments(line, message):
    refused(line, message, globals())


class Codec(nnx.Module):
    def __init__(self):
        self.inner = linear(3, 3)

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
    table = cells(nnx.tabulate(Codec(), X, method="parts"))
    assert [row[0].strip() for row in table if row[0].strip()] == ["parts", "encode", "inner"]
    outputs = ["code: float32[4,3]", "raw:", "  - float32[4,3]", "  - 'note'"]
    assert [row[3] for row in table[:4]] == outputs
    assert [row[2] for row in table if row[0] == "encode"] == ["- float32[4,3]"]


class Tied(nnx.Module):
    def __init__(self):
        self.encoder = linear(1_000, 40, use_bias=False)
        self.decoder = nnx.Dict(kernel=self.encoder.kernel)
        self.other = nnx.List([linear(40, 40, use_bias=False)])
        self.other[0].twin = self.encoder.kernel

    def __call__(self, x):
        return self.other[0](self.encoder(x)) @ self.decoder.kernel.T


def test_what_is_shared_counts_once_and_sums_are_below_their_columns():
    text = nnx.tabulate(Tied(), jnp.ones((2, 1_000)), compute_flops=True)
    found = [",".join(cell.strip() for cell in row) for row in cells(text)]
    assert [row for row in found if row.strip(",")] == [
        ",Tied,float32[2,1000],float32[2,1000],326,400,decoder/kernel: float32[1000,40]",
        ",,,,,41,600 (166.4 KB)",
        "encoder,Linear,float32[2,1000],float32[2,40],160,000,kernel: shared with decoder/kernel",
        "other/0,Linear,float32[2,40],float32[2,40],6,400,kernel: float32[40,40]",
        ",,,,,twin: shared with decoder/kernel",
        ",,,,,1,600 (6.4 KB)",
        ",,,Total,326,400,41,600 (166.4 KB)",
    ]
    assert text.splitlines()[0].strip() == "Tied Summary"
    assert text.splitlines()[-1].strip() == "Total Parameters: 41,600 (166.4 KB)"


def test_a_narrow_table_folds_what_is_too_long():
    text = nnx.tabulate(Tied(), jnp.ones((2, 1_000)), console_kwargs={"width": 60})
    assert max(map(len, text.splitlines())) <= 60
    table = cells(text)
    assert "".join(row[0] for row in table) == "encoderother/0"
    assert "".join(row[2] for row in table[:2]) == "float32[2,1000]"
    assert "".join(row[4] for row in table[:4]) == "decoder/kernel:float32[1000,40]"


def test_a_closed_terminal_is_none_and_threads_do_not_see_each_other(monkeypatch):
    wanted, results, calls = nnx.tabulate(Net(), X), [], []
    call = lambda: calls.extend(linear()(X).shape for _ in range(20))
    make = lambda: results.append(nnx.tabulate(Net(), X))
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
        assert nnx.tabulate(Net(), X) == wanted


# `memory` ---------------------------------------------------------------------------------------


def trained():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def test_bytes_by_kind_and_device():
    model, optimizer = trained()
    used = nnx.memory(model, optimizer)
    params = 4 * (2 * 3 + 3 + 3 + 3)
    wanted = {"Param": params, "BatchStat": 4 * 6, "optimizer state": 2 * params + 8}
    assert used.by_kind == wanted
    assert used.total == sum(wanted.values()) and used.step is None
    assert used.by_device == {"cpu:0": used.total}


def test_what_is_shared_counts_once():
    model, _ = trained()
    used = nnx.memory(model)
    model.again = model.layers[0].kernel
    both = nnx.ModelAndOptimizer(model, optax.sgd(0.1))
    assert nnx.memory(model).by_kind == used.by_kind
    assert nnx.memory(model, both).by_kind == {**used.by_kind, "optimizer state": 4}
    model.alias = nnx.Param(model.again[...])  # another Variable around the same array
    assert nnx.memory(model).total == used.total


def test_arrays_that_are_not_on_a_device():
    deleted = jnp.ones(3)
    deleted.delete()
    used = nnx.memory(
        {
            "host": nnx.Param(np.ones(4, np.int8)),
            "abstract": nnx.Param(jax.ShapeDtypeStruct((5,), "float32")),
            "deleted": nnx.Param(deleted),
            "bare": jnp.ones(7, "int8"),
            "tree": nnx.Cache({"k": jnp.ones(2, "int8"), "n": 3}),
            "key": nnx.RngKey(jax.random.key(0)),
            "scalar": 3,
            "lazy": nnx.Dict(x=type("Lazy", (), {"shape": property(lambda self: 1 / 0)})()),
        }
    )
    assert used.by_device == {"not allocated": 20, "cpu:0": 17, "deleted": 12, "host": 4}
    assert used.by_kind["other arrays"] == 7 and used.by_kind["Cache"] == 2
    sizes, model = [], nnx.Dict(w=nnx.Param(jnp.ones(2)))
    nnx.jit(lambda model: sizes.append(nnx.memory(model).by_device))(model)
    assert sizes == [{"not allocated": 8}]


def test_sharded_and_replicated_arrays():
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    split = jax.device_put(jnp.ones((4, 2)), NamedSharding(mesh, PartitionSpec("x")))
    copied = jax.device_put(jnp.ones(3), NamedSharding(mesh, PartitionSpec()))
    used = nnx.memory(nnx.Dict(split=nnx.Param(split), copied=nnx.Param(copied)))
    assert used.by_kind == {"Param": 32 + 12}
    assert used.by_device == {"cpu:0": 16 + 12, "cpu:1": 16 + 12}


def test_what_a_step_needs_is_from_the_compiled_program():
    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: model(x).sum())(model))

    model, optimizer = trained()
    x = jax.ShapeDtypeStruct((4, 2), "float32")
    used = nnx.memory(model, optimizer, step, x).step
    found = step.lower(model, optimizer, x).compile().memory_analysis()
    assert used.arguments == found.argument_size_in_bytes >= nnx.memory(model, optimizer).total + 32
    assert used.temporary == found.temp_size_in_bytes
    assert used.peak == used.arguments + used.outputs - used.aliased + used.temporary
    plain = nnx.memory(model, None, lambda model, x, *, scale: model(x) * scale, x, scale=2.0).step
    assert plain.outputs >= 4 * 3 * 4
    assert model.layers[0].kernel[...].shape == (2, 3)  # nothing was run
    assert "│ step: peak " in str(
        nnx.memory(model, None, lambda model: model.layers[0].kernel.sum())
    )
    with pytest.raises(
        TypeError, match=r"memory: expected a function as step, got ShapeDtypeStruct"
    ):
        nnx.memory(model, optimizer, x)
