"""Train a small network, export it, and serve it from a process that does not know its class.

    python examples/export.py            # some seconds on two CPU cores
    python examples/export.py --quick    # fewer steps and requests

Result: requests of any size run three programs, and as many scans are read right as before export.

The network tells handwritten digits (the scans ship inside scikit-learn). The file that is served,
`digits.exported`, and `export.png`, the latency of requests by their size, are in the output folder.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits

import nnxlite as nnx

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SIZES = (1, 8, 32)


class Network(nnx.Module):
    """Scans (batch, 8, 8) to logits (batch, 10)."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 16, kernel_size=(3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(4 * 4 * 16, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(images[..., None])))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        return self.head(self.drop(x.reshape(x.shape[0], -1)))


@nnx.jit
def train_step(model: Network, optimizer: nnx.Optimizer, images, labels) -> jax.Array:
    def loss_fn(model: Network) -> jax.Array:
        logits = model(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def train(images: np.ndarray, labels: np.ndarray, steps: int) -> Network:
    model = Network(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    draw = np.random.default_rng(0)
    for _ in track(range(steps), "training", console=Console(stderr=True)):
        rows = draw.integers(0, len(labels), 64)
        train_step(model, optimizer, images[rows], labels[rows])
    model.eval()
    return model


def classify(model: Network, images: jax.Array) -> dict[str, jax.Array]:
    """What the server answers: one digit, and how certain it is, for each scan."""
    probs = nnx.softmax(model(images))
    return {"digit": probs.argmax(-1), "certainty": probs.max(-1)}


def padded(program: nnx.Exported, images: np.ndarray) -> tuple[dict[str, np.ndarray], list[int]]:
    """The answers for images, in batches that are padded to the next of a few sizes; these sizes.

    Padding and cutting happen in NumPy: on the device they would be programs, one for each size.
    """
    answers, sizes = [], []
    for start in range(0, len(images), SIZES[-1]):
        rows = images[start : start + SIZES[-1]]
        size = next(size for size in SIZES if size >= len(rows))
        batch = np.pad(rows, [(0, size - len(rows)), (0, 0), (0, 0)], mode="edge")
        out = program(batch)
        answers.append({name: np.asarray(x)[: len(rows)] for name, x in out.items()})
        sizes.append(size)
    return jax.tree.map(lambda *parts: np.concatenate(parts), *answers), sizes


def serve(file: Path, requests: int) -> None:
    """The server: knows the file, and no class. Answers requests of random sizes, and measures."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8)[1500:]
    labels = labels[1500:]
    program = nnx.load_exported(file)
    for size in SIZES:
        jax.block_until_ready(program(images[:size]))  # compile before the first request
    answers, _ = padded(program, images)
    draw = np.random.default_rng(1)
    latencies, calls = [], collections.Counter()
    for _ in range(requests):
        count = int(draw.integers(1, 2 * SIZES[-1]))
        start = time.perf_counter()
        _, sizes = padded(program, images[:count])
        latencies.append((count, 1000 * (time.perf_counter() - start)))
        calls.update(sizes)
    report = {
        "program": repr(program),
        "programs": program.num_programs,
        "right": int((answers["digit"] == labels).sum()),
        "scans": len(labels),
        "calls": calls,
        "latencies": latencies,
    }
    print(json.dumps(report))


def draw_latencies(latencies: list[tuple[int, float]], path: Path) -> None:
    sizes, times = np.array(latencies).T
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    axes.plot(sizes, times, "o", color="#8aa1b4", ms=3)
    for size in SIZES:
        axes.axvline(size + 0.5, color="#d1603d", lw=0.8, ls=":")
    axes.set(xlabel="scans in a request", ylabel="milliseconds", ylim=(0, 3 * np.median(times)))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def print_table(report: dict) -> None:
    table = Table("size of the program", "calls", "requests of", "median latency")
    smallest = 1
    for size in SIZES:
        times = [ms for rows, ms in report["latencies"] if smallest <= rows <= size]
        median = f"{np.median(times):.2f} ms" if times else ""
        table.add_row(str(size), str(report["calls"][str(size)]), f"{smallest} to {size}", median)
        smallest = size + 1
    times = [ms for rows, ms in report["latencies"] if rows > SIZES[-1]]
    table.add_row("several", "", f"{smallest} and more", f"{np.median(times):.2f} ms")
    Console().print(table)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="export.py", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder; default: out")
    parser.add_argument("--quick", action="store_true", help="a short run")
    parser.add_argument("--serve", type=Path, metavar="FILE", help="be the server for this file")
    options = parser.parse_args(arguments)
    requests = 100 if options.quick else 1000
    if options.serve:
        return serve(options.serve, requests)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.exit(1, f"{parser.prog}: error: cannot write to {options.out}: {error.strerror}\n")

    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8)
    model = train(images[:1500], labels[:1500].astype(np.int32), 60 if options.quick else 400)
    expected = int((model(images[1500:]).argmax(-1) == labels[1500:]).sum())

    file = options.out / "digits.exported"
    exported = nnx.export(classify, model, jnp.ones((1, 8, 8)), shapes="batch, 8, 8")
    exported.save(file)
    command = [sys.executable, __file__, "--serve", str(file), *["--quick"] * options.quick]
    server = subprocess.run(command, capture_output=True, text=True)
    if server.returncode:
        sys.exit(f"export.py: error: the server failed\n{server.stderr}")
    report = json.loads(server.stdout.splitlines()[-1])
    draw_latencies(report["latencies"], options.out / "export.png")
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB, {report['program']}")
    print_table(report)
    print(f"latencies by size: {options.out / 'export.png'}")
    print(
        f"{requests} requests of 1 to {2 * SIZES[-1] - 1} scans ran {report['programs']} programs; "
        f"{report['right']} of {report['scans']} scans read right, {expected} before export"
    )


if __name__ == "__main__":
    main()
