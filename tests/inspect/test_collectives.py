"""`collectives`: kinds, bytes, counts and origins of what the devices exchange, of known programs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from nnxlite.inspect._hlo import Program

ROWS, WIDTH, OUT = 32, 16, 64


def mesh_of(*sizes: int, names=("data", "model")):
    return jax.make_mesh(sizes, names[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def abstract(shape, mesh, *spec):
    return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, P(*spec)))


def train_step(model, optimizer, x):
    def loss_of(model):
        return (model(x) ** 2).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def abstract_training(mesh, kernel=()):
    """A model and its optimizer, abstract, with a sharding for each array."""

    def build():
        model = nnx.Linear(WIDTH, OUT, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(build)
    for path, variable in nnx.to_flat_state(nnx.state((model, optimizer))):
        shape = variable.value
        where = NamedSharding(mesh, P(*kernel) if path[-1] == "kernel" else P())
        variable.value = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)
    return model, optimizer


@pytest.mark.quick
def test_data_parallel_reduces_the_gradients():
    mesh = mesh_of(8)
    model, optimizer = abstract_training(mesh)
    report = nnx.collectives(
        nnx.jit(train_step), model, optimizer, abstract((ROWS, WIDTH), mesh, "data")
    )
    gradients = 4 * (WIDTH * OUT + OUT)
    assert report.by_kind == {"all-reduce": gradients + 4}  # the loss, too
    assert report.total_bytes == gradients + 4 and report.runs_known
    assert "all-reduce" in report and "all-gather" not in report
    assert report.sent_bytes == sum(2 * e.total_bytes * 7 // 8 for e in report.entries)
    arrays = [array for entry in report.entries for array in entry.arrays]
    assert sorted(arrays)[1:] == ["f32[64]", "f32[]"]  # XLA may transpose the kernel's
    assert {entry.group_size for entry in report.entries} == {8}
    assert {entry.runs for entry in report.entries} == {1}
    assert isinstance(model.kernel.value, jax.ShapeDtypeStruct)  # nothing ran


def test_fully_sharded_gathers_the_parameters():
    mesh = mesh_of(8)
    model, _ = abstract_training(mesh, ("data",))
    x = abstract((512, WIDTH), mesh, "data")  # to move the parameter is less than to move the data
    (gather,) = nnx.collectives(lambda model, x: model(x), model, x).entries
    assert (gather.kind, gather.bytes, gather.runs) == ("all-gather", 4 * WIDTH * OUT, 1)
    assert gather.arrays == ("f32[16,64]",) and gather.argument == "model.kernel"
    assert gather.sent_bytes == gather.bytes * 7 // 8
    assert gather.source.rpartition(":")[0] == __file__  # the call of the model, not of the layer


def test_tensor_parallel_reduces_over_its_axis():
    mesh = mesh_of(2, 4)
    x = abstract((ROWS, OUT), mesh, "data", "model")
    w = abstract((OUT, 16), mesh, "model")
    step = jax.jit(jnp.dot, out_shardings=NamedSharding(mesh, P("data")))
    report = nnx.collectives(step, x, w)
    (entry,) = report.entries
    assert (entry.kind, entry.arrays, entry.group_size) == ("all-reduce", ("f32[16,16]",), 4)
    assert entry.bytes == 4 * (ROWS // 2) * 16
    assert "dot_general" in entry.operation and entry.argument == ""


def exchange(x):
    x = jax.lax.all_to_all(x, "data", 1, 0)
    return jax.lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)])


def test_all_to_all_and_permute_and_scatter():
    mesh = mesh_of(8)
    over = functools.partial(nnx.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    report = nnx.collectives(over(exchange), abstract((64, 8), mesh, "data"))
    assert report.by_kind == {"all-to-all": 256, "collective-permute": 256}
    assert {e.kind: e.group_size for e in report.entries} == {
        "all-to-all": 8,
        "collective-permute": 8,
    }
    assert report.sent_bytes == 256 * 7 // 8 + 256
    chain = [(i, i + 1) for i in range(3)]
    shifted = over(lambda x: jax.lax.ppermute(x, "data", chain))
    assert nnx.collectives(shifted, abstract((64, 8), mesh, "data")).entries[0].group_size == 4
    scattered = over(lambda x: jax.lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True))
    (entry,) = nnx.collectives(scattered, abstract((64, 8), mesh, "data")).entries
    assert (entry.kind, entry.bytes, entry.arrays) == ("reduce-scatter", 256, ("f32[8,8]",))


def test_loops_multiply():
    mesh = mesh_of(8)
    x = abstract((64, 8), mesh, "data")

    def total(x):
        return jax.lax.psum(x, "data")

    def inner(x, _):
        return jax.lax.fori_loop(0, 3, lambda _, x: total(x) / 8, x), None

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    def step(x):
        return jax.lax.scan(inner, x, None, length=5)[0]

    report = nnx.collectives(step, x)
    (entry,) = report.entries
    assert (entry.bytes, entry.runs, entry.total_bytes) == (256, 15, 3840)
    assert report.runs == {"all-reduce": 15} and entry.runs_known

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), check_vma=False
    )
    def unknown(x, n):
        return jax.lax.fori_loop(0, n, lambda _, x: total(x) / 8, x)

    report = nnx.collectives(unknown, x, jax.ShapeDtypeStruct((), "int32"))
    assert not report.runs_known and report.entries[0].runs == 1
    assert "1?" in str(report) and "at least 256" in str(report)


def test_an_argument_is_named_inside_a_loop():
    mesh = mesh_of(8)
    model, _ = abstract_training(mesh)
    model.kernel.value = abstract((4, WIDTH, WIDTH), mesh, None, "data")
    model.bias.value = abstract((4, WIDTH), mesh)

    def forward(model, x):
        layer = lambda x, model: jnp.tanh(x @ model.kernel + model.bias)
        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, model)

    report = nnx.collectives(forward, model, abstract((512, WIDTH), mesh, "data"))
    (entry,) = report.entries
    assert (entry.kind, entry.runs, entry.argument) == ("all-gather", 4, "model.kernel")
    assert entry.arrays in (("f32[16,16]",), ("f32[1,16,16]",))


def test_every_stage_is_taken():
    mesh = mesh_of(8)
    x = abstract((16, 4), mesh, "data")
    for make in (nnx.jit, jax.jit, nnx.filter_jit):
        step = make(lambda x: x.sum(axis=0))
        x = jax.device_put(jnp.ones(x.shape), x.sharding)
        stages = [step.lower(x), step.lower(x).compile()]
        stages += [step.trace(x)] if hasattr(step, "trace") else []
        for stage in stages:
            assert nnx.collectives(stage).by_kind == {"all-reduce": 16}
    assert nnx.collectives(lambda x: x.sum(axis=0), x=x).total_bytes == 16
    assert str(nnx.collectives(lambda x: x + 1, x)) == "no collectives\n"


def test_messages():
    x = jax.ShapeDtypeStruct((2,), "float32")
    lowered = jax.jit(jnp.sin).lower(x)
    with pytest.raises(
        TypeError, match="collectives: Lowered is a stage, which has its arguments al"
    ):
        nnx.collectives(lowered, x)
    with pytest.raises(
        TypeError, match="collectives: expected a function as step, got int. Give its"
    ):
        nnx.collectives(3, x)
    with pytest.raises(
        ValueError, match="'allgather' is not a kind of collective. The kinds are all-g"
    ):
        assert "allgather" in nnx.collectives(lowered)


# Programs of other backends, by their text ----------------------------------------------------------


class Compiled:
    """A compiled stage of which only the text is known."""

    def __init__(self, body: str, head: str = "num_partitions=16") -> None:
        self.text = f"HloModule step, {head}\n\n" + body

    def as_text(self) -> str:
        return self.text


GPU = """\
%wrapped (p: bf16[4,8]) -> bf16[4,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  ROOT %a2a = bf16[4,8]{1,0} all-to-all(%p), replica_groups={{0,1},{2,3}}, dimensions={0}
}

ENTRY %main (p.0: bf16[4,8], p.1: f8e4m3fn[16]) -> bf16[32,8] {
  %p.0 = bf16[4,8]{1,0} parameter(0), metadata={op_name="model.kernel"}
  %p.1 = f8e4m3fn[16]{0:T(8,128)(2,1)S(1)} parameter(1), metadata={op_name="scales"}
  %copy = bf16[4,8]{1,0} copy(bf16[4,8]{1,0} %p.0)
  %ag = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) all-gather-start(bf16[4,8]{1,0} %copy), replica_groups=[2,8]<=[16], dimensions={0}, metadata={op_name="jit(step)/gather" source_file="/home/me/train.py" source_line=7}
  %agd = bf16[32,8]{1,0} all-gather-done((bf16[4,8]{1,0}, bf16[32,8]{1,0}) %ag)
  %rs = ((bf16[32,8], f8e4m3fn[16]), (bf16[2,8], f8e4m3fn[1])) reduce-scatter-start(%agd, /*index=1*/%p.1), replica_groups={}, dimensions={0}, to_apply=%add
  %rsd = (bf16[2,8], f8e4m3fn[1]) reduce-scatter-done(%rs)
  %as = ((bf16[4,8]), bf16[4,8]) async-start(%p.0), calls=%wrapped
  %ad = bf16[4,8] async-done(%as), calls=%wrapped
  %cp = (bf16[4,8], bf16[4,8], u32[], u32[]) collective-permute-start(%p.0), source_target_pairs={{0,0},{1,2},{2,1}}
  %cpd = bf16[4,8] collective-permute-done(%cp)
  ROOT %ar = bf16[32,8]{1,0} all-reduce(%agd), replica_groups=mesh['a'=4,'b'=4] {'a', 'b':(2)2}, to_apply=%add
}
"""  # noqa: E501 (as XLA writes it)


def test_asynchronous_operations_count_once():
    report = nnx.collectives(Compiled(GPU))
    found = {e.kind: (e.bytes, e.group_size, e.arrays) for e in report.entries}
    assert found == {
        "all-gather": (512, 8, ("bf16[32,8]",)),
        "reduce-scatter": (528, 16, ("bf16[32,8]", "f8e4m3fn[16]")),
        "all-to-all": (64, 2, ("bf16[4,8]",)),
        "collective-permute": (64, 2, ("bf16[4,8]",)),
        "all-reduce": (512, 8, ("bf16[32,8]",)),
    }
    assert len(report.entries) == 5
    gather = next(e for e in report.entries if e.kind == "all-gather")
    assert (gather.argument, gather.source) == ("model.kernel", "/home/me/train.py:7")


def test_the_table():
    text = str(nnx.collectives(Compiled(GPU)))
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in text.splitlines()
        if "│" in line
    ]
    assert rows[0][:4] == ["reduce-scatter", "1", "528", "528 B"]
    assert rows[5][:4] == ["total", "5", "1,680", "1.7 KB"]
    gather = ["all-gather", "1", "512", "512 B", "8", "bf16[32,8]", "model.kernel", "train.py:7"]
    assert gather in rows
    assert rows[6][4:] == ["16", "bf16[32,8] and 1 more", "", ""]


def test_long_reports_are_cut():
    line = "  %x{0} = f32[{1}] all-reduce(%p), replica_groups={{}}"
    lines = [line.format(n, n) for n in range(1, 51)]
    body = (
        "ENTRY %main (p: f32[4]) -> f32[4] {\n  %p = f32[4] parameter(0)\n"
        + "\n".join(lines)
        + "\n}\n"
    )
    report = nnx.collectives(Compiled(body))
    assert len(report.entries) == 50 and report.total_bytes == 800
    assert "│ 10 more" in str(report)


def test_text_that_is_no_program():
    assert nnx.collectives(Compiled("")).entries == ()
    assert Program("").entry == ""
    cut = GPU[: GPU.index("%copy =")] + '%ag = bf16[8] all-gather(%missing), replica_groups="?"\n'
    (entry,) = nnx.collectives(Compiled(cut)).entries
    assert (entry.bytes, entry.arrays, entry.group_size, entry.source) == (0, (), 16, "")
    assert "all-gather" in str(nnx.collectives(Compiled(cut)))
