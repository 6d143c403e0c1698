"""What the loop can send its numbers to: a file, TensorBoard, Weights & Biases.

Each is called with the number of a step and the numbers of that step by name, as `loop(log=...)` calls
a function of the user's.
"""

from __future__ import annotations

import csv
import functools
import os
import pathlib
import time
import typing as tp

__all__ = ["CSV", "TensorBoard", "WandB"]


class CSV:
    """A file with a line `step,name,value` for each number.

    An existing file is continued, as by a run that resumes.

    Args:
        path: of the file.

    >>> import nnxlite as nnx, tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp(), "run.csv")
    >>> for step in nnx.training.loop(2, log=nnx.training.CSV(file), progress=False):
    ...     step.log(loss=1.0 - step.number)
    >>> file.read_text().split()
    ['step,name,value', '0,loss,1.0', '1,loss,0.0']
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)

    def __call__(self, step: int, values: dict[str, float], /) -> None:
        """Append the numbers of a step.

        Args:
            step: its number.
            values: the numbers by name.
        """
        with self.path.open("a", newline="") as file:
            rows = [(step, name, value) for name, value in values.items()]
            header = [] if file.tell() else [("step", "name", "value")]
            csv.writer(file, lineterminator="\n").writerows(header + rows)


class TensorBoard:
    """Scalars in a folder that TensorBoard shows; each run writes a file there.

    Args:
        folder: of the run.
        **options: further arguments of `tensorboardX.SummaryWriter`.

    Attributes:
        writer: the `SummaryWriter` while there is something to write, for pictures and histograms; else
            None.

    Raises ImportError without tensorboardX (`pip install nnxlite[logging]`).
    """

    def __init__(self, folder: str | os.PathLike[str], **options: tp.Any) -> None:
        from tensorboardX import SummaryWriter

        self._make = functools.partial(SummaryWriter, str(folder), **options)
        self.writer: tp.Any = None

    def __call__(self, step: int, values: dict[str, float], /) -> None:
        """Write the numbers of a step.

        Args:
            step: its number.
            values: the numbers by name.
        """
        if self.writer is None:  # files of one second would have the same name
            self.writer = self._make(filename_suffix=f".{time.time_ns()}")
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Have everything in the file, and close it."""
        if self.writer is not None:
            self.writer.close()  # its `flush` does not wait for the thread that writes
            self.writer = None


class WandB:
    """A run of Weights & Biases.

    Args:
        **options: arguments of `wandb.init`: `project`, `name`, `config`, `mode`, and `id` with
            `resume="allow"` for a run that goes on.

    Attributes:
        run: what `wandb.init` returns; `run.finish()` ends it.

    Raises ImportError without wandb (`pip install nnxlite[logging]`).
    """

    def __init__(self, **options: tp.Any) -> None:
        import wandb

        self.run: tp.Any = wandb.init(**options)

    def __call__(self, step: int, values: dict[str, float], /) -> None:
        """Log the numbers of a step.

        Args:
            step: its number.
            values: the numbers by name.
        """
        self.run.log(values, step=step, commit=True)
