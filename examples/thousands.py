"""What it takes to train a decoder of 70 billion parameters on 1,024 devices, found out on a laptop.

Nothing is allocated: the model is abstract, a plan says where its arrays would lie, and the training
step is compiled for 1,024 virtual devices and not run. The tables show the bytes of parameters and
optimizer for each device and host, the memory of a step, what devices exchange, and what start-up and
restore take.

    python examples/thousands.py            # half a minute on two CPU cores, 1 GB of memory
    python examples/thousands.py --quick    # 2 layers on 16 devices

Result: tables of the bytes, collectives and seconds of a step, without any array of the model.

`--devices`, `--tensor`, `--layers`, `--sequences` and `--length` describe other runs. The rates that
make seconds of bytes and operations are assumptions: `--flops`, `--network`, `--links`, `--storage`.
"""

from __future__ import annotations

import argparse
import functools
import time
import typing as tp
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from rich.console import Console
from rich.table import Table

import nnxlite as nnx

WIDTH, HEADS, KV_HEADS, HIDDEN, VOCABULARY = 8192, 64, 8, 28672, 128256

LITTLE_CODE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Machine code for this CPU is not wanted: spend little time on it."""


class Block(nnx.Module):
    """Attention and a gated perceptron, each on normalised inputs and added to them."""

    def __init__(self, *, rngs: nnx.Rngs):
        norm = functools.partial(nnx.RMSNorm, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        rope = nnx.RoPE(theta=500_000.0)
        self.norm1, self.norm2 = norm(), norm()
        self.attention = nnx.MultiHeadAttention(
            HEADS,
            WIDTH,
            num_kv_heads=KV_HEADS,
            use_bias=False,
            dtype=jnp.bfloat16,
            attention_fn=functools.partial(nnx.dot_product_attention_with_rope, rope=rope),
            decode=False,
            rngs=rngs,
        )
        self.gate, self.up = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN)
        self.down = linear(HIDDEN, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), is_causal=True).astype(x.dtype)
        y = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Decoder(nnx.Module):
    """The sizes of Llama 3 70B; layers are stacked, scanned, and computed again in the backward pass."""

    def __init__(self, layers: int, *, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        make = nnx.vmap(lambda key: Block(rngs=nnx.Rngs(key)))
        self.blocks = make(jax.random.split(rngs.params(), layers))
        self.norm = nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.batch: NamedSharding | None = None

    def __call__(self, tokens: jax.Array) -> jax.Array:
        @nnx.remat
        def layer(x: jax.Array, block: Block) -> jax.Array:
            x = block(x)
            return x if self.batch is None else jax.lax.with_sharding_constraint(x, self.batch)

        run = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(self.norm(run(self.tokens(tokens), self.blocks)))


def build(layers: int) -> tuple[Decoder, nnx.Optimizer[Decoder]]:
    """Model and optimizer, in float32."""
    model = Decoder(layers, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)


@nnx.jit(donate="written")
def train_step(
    model: Decoder, optimizer: nnx.Optimizer[Decoder], tokens: jax.Array, targets: jax.Array
) -> jax.Array:
    """One step of AdamW; the mean loss."""

    def loss_of(model: Decoder) -> jax.Array:
        logits = model(tokens).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def arguments(words: tp.Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line, or of a list of words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="2 layers on 16 devices")
    add("--devices", type=int)
    add("--layers", type=int)
    add("--tensor", type=int, default=8, help="devices of a tensor-parallel group")
    add("--per-host", type=int, default=8, help="devices of a host")
    add("--sequences", type=int, default=4, help="sequences of each group in a step")
    add("--length", type=int, default=4096, help="tokens of a sequence")
    add("--flops", type=float, default=400e12, help="operations a second of a device")
    add("--network", type=float, default=50e9, help="bytes a second of a device between hosts")
    add("--links", type=float, default=450e9, help="bytes a second of a device within a host")
    add("--storage", type=float, default=2e9, help="bytes a second that a host reads")
    add("--unconstrained", action="store_true", help="let XLA choose where activations lie")
    add("--operations", action="store_true", help="list every collective, too")
    add("--out", type=Path, help="folder for a copy of the tables")
    options = parser.parse_args(words)
    options.devices = options.devices or (16 if options.quick else 1024)
    options.layers = options.layers or (2 if options.quick else 80)
    return options


# What it prints ------------------------------------------------------------------------------------


class Clock:
    """Seconds since the last look, by name."""

    def __init__(self) -> None:
        self.last, self.seconds = time.perf_counter(), dict[str, float]()

    def took(self, what: str) -> None:
        now = time.perf_counter()
        self.seconds[what], self.last = now - self.last, now


def gb(size: float) -> str:
    """Bytes as GB, or MB."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"


def table(title: str, *columns: str) -> Table:
    """A table with names on the left and figures on the right."""
    made = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left")
    return made


def sizes(layout: nnx.Layout, options: argparse.Namespace) -> Table:
    """What of the state is global, on a host, on a device."""
    made = table("State", "", "parameters", "optimizer", "together")
    parameters = [entry for entry in layout.entries if entry.path[0] == 0]
    rest = [entry for entry in layout.entries if entry.path[0] != 0]
    whole = [sum(entry.bytes for entry in part) for part in (parameters, rest)]
    each = [sum(entry.bytes_per_device for entry in part) for part in (parameters, rest)]
    on_host = [size * options.per_host for size in each]
    for name, figures in (("global", whole), ("host", on_host), ("device", each)):
        made.add_row(name, *map(gb, figures), gb(sum(figures)))
    return made


def memory(layout: nnx.Layout, analysis: tp.Any, options: argparse.Namespace) -> Table:
    """Memory of one device in a step: by the plan, by XLA, and by arithmetic."""
    saved = options.layers * options.sequences * options.length * WIDTH * 2
    batch = 2 * options.sequences * options.length * 4
    made = table("Memory of a device in a step", "", "bytes", "by")
    made.add_row("parameters and optimizer", gb(layout.bytes_per_device), "plan")
    made.add_row("all arguments", gb(analysis.argument_size_in_bytes), "XLA")
    made.add_row("... beside the state: tokens", gb(batch), "arithmetic")
    made.add_row("intermediate", gb(analysis.temp_size_in_bytes), "XLA, for CPUs")
    made.add_row("... of which inputs of the layers", gb(saved), "arithmetic")
    made.add_row("results in new memory", gb(_new(analysis)), "XLA")
    return made


def _new(analysis: tp.Any) -> int:
    return analysis.output_size_in_bytes - analysis.alias_size_in_bytes


def purpose(entry: nnx.Collective, groups: int) -> str:
    """What a collective is for."""
    if entry.kind == "all-gather" and entry.argument.startswith("model"):
        return "weights gathered"
    if entry.kind == "all-reduce":
        return "gradients reduced" if entry.group_size == groups else "activations summed"
    return "rest"


def exchange(report: nnx.Collectives, options: argparse.Namespace) -> Table:
    """What the devices exchange, by purpose, and what it costs on accelerators."""
    made = table(
        "Exchange of a device in a step",
        *("", "devices", "runs", "bytes", "on accelerators", "sent", "seconds"),
    )
    by_purpose: dict[str, list[nnx.Collective]] = {}
    groups = options.devices // options.tensor
    for entry in report.entries:
        by_purpose.setdefault(purpose(entry, groups), []).append(entry)
    for name, entries in by_purpose.items():
        size = sum(entry.total_bytes for entry in entries)
        runs = sum(entry.runs for entry in entries)
        # The program computes in bfloat16, which CPUs exchange as float32, and it keeps a part of each
        # gradient, which accelerators take from a reduce-scatter: half of an all-reduce is sent.
        sent = sum(entry.sent_bytes for entry in entries) / 2
        sent = sent / 2 if name == "gradients reduced" else sent
        group = entries[0].group_size
        rate = options.links if group <= options.per_host else options.network
        cells = f"{group}", f"{runs:,}", gb(size), gb(size / 2), gb(sent), f"{sent / rate:.2f}"
        made.add_row(name, *cells)
    return made


def planned(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, options: argparse.Namespace
) -> tuple[Decoder, nnx.Optimizer[Decoder], nnx.Layout]:
    """Abstract model and optimizer with the shardings of a plan, and the layout."""
    model, optimizer = nnx.eval_shape(lambda: build(options.layers))
    layout = nnx.shard((model, optimizer), mesh, "fsdp+tensor")
    if not options.unconstrained:
        model.batch = layout.batch
    return model, optimizer, layout


def batch_of(layout: nnx.Layout, options: argparse.Namespace) -> jax.ShapeDtypeStruct:
    """The tokens of a step on all devices."""
    shape = options.devices // options.tensor * options.sequences, options.length
    return jax.ShapeDtypeStruct(shape, "int32", sharding=layout.batch)


def count_of(model: Decoder) -> int:
    """The number of parameters."""
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def main(options: argparse.Namespace) -> None:
    """Print the tables."""
    console, clock = Console(width=110, highlight=False, record=True), Clock()
    groups, hosts = options.devices // options.tensor, max(1, options.devices // options.per_host)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
    mesh = jax.make_mesh(
        (groups, options.tensor), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2
    )
    clock.took("devices")
    model, optimizer, layout = planned(mesh, options)
    clock.took("abstract model and plan")
    tokens: tp.Any = batch_of(layout, options)
    lowered = train_step.lower(model, optimizer, tokens, tokens)
    clock.took("step: trace and lower")
    compiled = lowered.compile(compiler_options=LITTLE_CODE)
    clock.took("step: compile")
    places = [x.sharding for x in jax.tree.leaves(nnx.state((model, optimizer)))]
    arrays = lambda: jax.tree.leaves(nnx.state(build(options.layers)))
    born = (
        jax.jit(arrays, out_shardings=places).lower().compile(compiler_options=LITTLE_CODE)
    )  # as nnx.init_sharded does
    clock.took("initialisation: trace and compile")
    report = nnx.collectives(compiled)

    count = count_of(model)
    console.print(
        f"{count:,} parameters, {options.layers} layers; {options.devices:,} devices on {hosts:,} "
        f"hosts: fsdp={groups}, tensor={options.tensor}; {tokens.size:,} tokens a step"
    )
    console.print(sizes(layout, options))
    analysis = compiled.memory_analysis()
    console.print(memory(layout, analysis, options))

    by_kind = table("Collectives of the program, for CPUs", "", "runs", "bytes of a device")
    for kind, size in report.by_kind.items():
        by_kind.add_row(kind, f"{report.runs[kind]:,}", gb(size))
    console.print(by_kind)
    console.print(exchange(report, options))
    operations = 8 * count * tokens.size / options.devices
    console.print(
        f"Arithmetic of a device: {operations / 1e12:,.0f} TFLOP, {operations / options.flops:.2f} s at "
        f"{options.flops / 1e12:.0f} TFLOP/s (8 operations for each parameter and token)\n"
    )

    start = table("Start-up", "", "figure")
    for what, seconds in clock.seconds.items():
        start.add_row(what, f"{seconds:.1f} s")
    needed: tp.Any = born.memory_analysis()
    start.add_row("initialisation: intermediate bytes of a device", gb(needed.temp_size_in_bytes))
    start.add_row(
        "restore: bytes that a host reads", gb(layout.bytes_per_device * options.per_host)
    )
    seconds = layout.bytes_per_device * options.per_host / options.storage
    start.add_row(f"restore at {gb(options.storage)}/s", f"{seconds:.1f} s")
    start.add_row("peak memory of this process", gb(peak_memory()))
    console.print(start)
    if options.operations:
        print(report)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        console.save_text(str(options.out / "thousands.txt"))


def peak_memory() -> int:
    """The most memory that this process ever had, in bytes; 0 where there is no /proc."""
    try:
        with open("/proc/self/status") as status:
            line = next(line for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(arguments())
