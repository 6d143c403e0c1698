"""Train, be killed in the middle of it, go on in a new process, and end with the same bits.

Three processes train a network on the scans of digits in scikit-learn, in batches that Grain shuffles.
The first one runs to the end. The second one kills itself with SIGKILL while it writes a checkpoint; the
third one goes on from the newest complete checkpoint, with the next batch after it.

    pip install "nnxlite[examples,checkpoint,data]"
    python examples/checkpoint_resume.py            # about a minute on two CPU cores
    python examples/checkpoint_resume.py --quick    # fewer steps

Result: parameters and optimizer of the resumed run have the same bits as without the interruption.
`resume.png` in the output folder shows the loss of all three.
"""

import hashlib
import multiprocessing
import os
import shutil
import signal
import threading
from pathlib import Path

import grain
import jax
import numpy as np
import optax
from _common import curves, options
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
    assert worker.exitcode == (0 if kill_at is None else -signal.SIGKILL), worker.exitcode


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

    read = lambda p: np.loadtxt(p / "losses.csv", delimiter=",", skiprows=1, usecols=(0, 2))
    losses, losses_of_parts = read(whole), read(parts)
    again = int(np.argmin(np.diff(losses_of_parts[:, 0]))) + 1  # where the third process begins
    killed, resumed = np.split(losses_of_parts, [again])
    series = {"not interrupted": losses, "killed": killed, "resumed": resumed}
    curves(chosen.out / "resume.png", series, "step", "cross-entropy", yscale="log")
    print(f"killed after step {killed[-1, 0]:.0f}, resumed at step {resumed[0, 0]:.0f}")
    digests = [(folder / "digest").read_text() for folder in (whole, parts)]
    print(f"parameters and optimizer: {digests[0][:16]}, resumed: {digests[1][:16]}")
    assert digests[0] == digests[1], "the resumed run ended with other bits"
    print(f"the resumed run ended with the same bits after {steps} steps")


if __name__ == "__main__":
    main()
