"""Train, be killed in the middle of it, go on in a new process, and end with the same bits.

Three processes train the same network on the scans of digits in scikit-learn, in batches that Grain
shuffles. The first one runs to the end. The second one kills itself with SIGKILL while a checkpoint is
being written; the third one goes on from the newest complete checkpoint, with the next batch after it.

    python examples/checkpoint_resume.py            # about a minute on two CPU cores
    python examples/checkpoint_resume.py --quick    # fewer steps

Result: parameters and optimizer of the resumed run have the same bits as without the interruption.
`resume.png` in the output folder shows the loss of all three.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import grain
import jax
import numpy as np
import optax
from _common import BLUE, INK, RED, options, picture
from sklearn.datasets import load_digits

import nnxlite as nnx


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
    def loss_fn(model: Network) -> jax.Array:
        logits = model(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def run(folder: Path, steps: int, kill_at: int | None = None) -> None:
    """One process: from the newest checkpoint, if there is one, to the last step."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32)
    batches = grain.MapDataset.range(len(labels)).shuffle(seed=0).repeat().batch(64)
    data = iter(batches.to_iter_dataset())
    # The seed does not matter to a process that restores.
    model = Network(nnx.Rngs(os.getpid() if (folder / "losses.csv").exists() else 0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    with nnx.checkpoint.Manager(folder / "checkpoints", keep=2) as manager:
        for step in nnx.training.loop(
            steps,
            checkpoints=manager,
            items={"model": model, "optimizer": optimizer},
            data=data,
            save_every=10,
            log=nnx.training.CSV(folder / "losses.csv"),
        ):
            rows = next(data)
            step.log(loss=train_step(model, optimizer, images[rows], labels[rows]))
            if step.number == kill_at:  # about 20 ms after a save begins
                threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
    arrays = jax.tree.leaves(nnx.state((model, optimizer), nnx.Not(nnx.RngKey)))
    bits = b"".join(np.asarray(array).tobytes() for array in arrays)
    (folder / "digest").write_text(hashlib.sha256(bits).hexdigest())


def process(folder: Path, steps: int, kill_at: int | None = None) -> None:
    """Call `run` in a new process, and see to it that it ends as it should."""
    worker = multiprocessing.get_context("spawn").Process(target=run, args=(folder, steps, kill_at))
    worker.start()
    worker.join()
    if worker.exitcode != (0 if kill_at is None else -signal.SIGKILL):
        sys.exit(f"checkpoint_resume.py: error: a process ended with {worker.exitcode}")


def main() -> None:
    chosen = options(__doc__)
    steps = 60 if chosen.quick else 600
    whole, parts = (chosen.out / "resume" / name for name in ("whole", "parts"))
    for folder in (whole, parts):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    process(whole, steps)
    process(parts, steps, kill_at=steps // 2 + 9)
    process(parts, steps)

    losses = [
        np.loadtxt(p / "losses.csv", delimiter=",", skiprows=1, usecols=(0, 2)).T
        for p in (whole, parts)
    ]
    (step, loss), (step_of_parts, loss_of_parts) = losses
    again = (
        int(np.flatnonzero(np.diff(step_of_parts) <= 0)[0]) + 1
    )  # the first one of the third process
    with picture(chosen.out / "resume.png", 7, 3.6) as figure:
        axes = figure.subplots()
        axes.plot(step, loss, color=BLUE, lw=5, label="not interrupted")
        axes.plot(step_of_parts[:again], loss_of_parts[:again], color=RED, lw=1.6, label="killed")
        axes.plot(step_of_parts[again:], loss_of_parts[again:], color=INK, lw=1.6, label="resumed")
        axes.set(xlabel="step", ylabel="cross-entropy", yscale="log")
        axes.legend()
    print(f"losses of the three: {chosen.out / 'resume.png'}")
    print(
        f"killed after step {step_of_parts[again - 1]:.0f}, resumed at step {step_of_parts[again]:.0f}"
    )
    digests = [(folder / "digest").read_text() for folder in (whole, parts)]
    print(f"parameters and optimizer: {digests[0][:16]}, resumed: {digests[1][:16]}")
    if digests[0] != digests[1]:
        sys.exit("checkpoint_resume.py: error: the resumed run ended with other bits")
    print(f"the resumed run ended with the same bits after {steps} steps")


if __name__ == "__main__":
    main()
