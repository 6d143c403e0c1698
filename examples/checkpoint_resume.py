"""Train, be killed in the middle of it, go on in a new process, and end with the same bits.

Three processes train the same network on the scans of digits in scikit-learn. The first one runs to the
end. The second one kills itself with SIGKILL while a checkpoint is being written; the third one goes on
from the newest complete checkpoint. The parameters of the first and the third are compared bit by bit.

    python examples/checkpoint_resume.py            # about a minute on two CPU cores
    python examples/checkpoint_resume.py --quick    # fewer steps

Result: parameters and optimizer of the resumed run have the same bits as without the interruption.
`resume.png` in the output folder shows the loss of all three.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import nnxlite as nnx

BATCH = 64
EVERY = 10  # steps from one checkpoint to the next


class Network(nnx.Module):
    """Two layers, with statistics and noise, which have to be restored as well."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.norm = nnx.BatchNorm(128, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


@nnx.jit
def train_step(model: Network, optimizer: nnx.Optimizer, images, labels) -> jax.Array:
    def loss_of(model: Network) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
        return losses.mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def batch(position: int, images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The batch of a position: always the same one, whichever process asks."""
    rows = np.random.default_rng(position).integers(len(labels), size=BATCH)
    return images[rows], labels[rows]


def run(folder: Path, steps: int, kill_at: int | None) -> None:
    """One process: from the newest checkpoint, if there is one, to the last step."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32)
    losses: dict[int, float] = {}
    with nnx.checkpoint.Manager(folder, keep=2, every=EVERY) as manager:
        seed = 0 if manager.latest is None else os.getpid()  # what is restored depends on no seed
        model = Network(nnx.Rngs(seed))
        optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
        start = 0
        if manager.latest is not None:
            start = manager.restore(model=model, optimizer=optimizer).values["position"]
        for position in range(start + 1, steps + 1):
            losses[position] = float(train_step(model, optimizer, *batch(position, images, labels)))
            if position == kill_at:  # 20 ms after the save below begins
                threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
                (folder / "losses.json").write_text(json.dumps(losses))
            manager.save(position, model=model, optimizer=optimizer, position=position)
            if position == kill_at:
                manager.wait()
    arrays = [
        np.asarray(leaf).tobytes()
        for leaf in jax.tree.leaves(nnx.state((model, optimizer), nnx.Not(nnx.RngKey)))
    ]
    digest = hashlib.sha256(b"".join(arrays)).hexdigest()
    print(json.dumps({"start": start, "losses": losses, "digest": digest}))


def process(folder: Path, steps: int, kill_at: int | None = None) -> dict | None:
    """What a process says at its end; None for one that was killed."""
    command = [sys.executable, __file__, "--worker", str(folder), "--steps", str(steps)]
    if kill_at is not None:
        command += ["--kill-at", str(kill_at)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == -signal.SIGKILL:
        return None
    if done.returncode != 0:
        sys.exit(f"checkpoint_resume.py: error: a process failed:\n{done.stderr}")
    return json.loads(done.stdout)


def draw(runs: dict[str, dict[int, float]], path: Path) -> None:
    import matplotlib  # here, since the other processes draw nothing

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    styles = {
        "not interrupted": ("#8aa1b4", 5),
        "killed": ("#b3261e", 1.6),
        "resumed": ("#1b6e53", 1.6),
    }
    for name, losses in runs.items():
        colour, width = styles[name]
        axes.plot(list(losses), list(losses.values()), color=colour, lw=width, label=name)
    axes.set(xlabel="step", ylabel="cross-entropy", yscale="log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder; default: out")
    parser.add_argument("--quick", action="store_true", help="a short run")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kill-at", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.worker:
        return run(options.worker, options.steps, options.kill_at)
    steps = 60 if options.quick else 600
    for name in ("whole", "parts"):
        shutil.rmtree(options.out / name, ignore_errors=True)
    kill_at = steps // 2 + EVERY
    whole = process(options.out / "whole", steps)
    killed = process(options.out / "parts", steps, kill_at=kill_at)
    if whole is None or killed is not None:
        sys.exit("checkpoint_resume.py: error: the second process was not killed, or the first was")
    resumed = process(options.out / "parts", steps)
    if resumed is None:
        sys.exit("checkpoint_resume.py: error: the third process was killed")
    before = json.loads((options.out / "parts/losses.json").read_text())

    table = Table("process", "steps", "parameters and optimizer (SHA-256)")
    table.add_row("not interrupted", f"1 to {steps}", whole["digest"][:16])
    table.add_row("killed while saving", f"1 to {kill_at}", "")
    table.add_row("resumed", f"{resumed['start'] + 1} to {steps}", resumed["digest"][:16])
    Console().print(table)
    runs = {"not interrupted": whole["losses"], "killed": before, "resumed": resumed["losses"]}
    draw(
        {name: {int(k): v for k, v in run.items()} for name, run in runs.items()},
        options.out / "resume.png",
    )
    print(f"losses of the three: {options.out / 'resume.png'}")
    if whole["digest"] != resumed["digest"]:
        sys.exit("checkpoint_resume.py: error: the resumed run ended with other bits")
    print(f"the resumed run ended with the same bits after {steps} steps")


if __name__ == "__main__":
    main()
