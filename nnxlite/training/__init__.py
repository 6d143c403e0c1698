"""Training: the loop, optimizers, metrics, averages, dtypes, and an immutable train state."""

from nnxlite.training._loop import *
from nnxlite.training.ema import EMA as EMA
from nnxlite.training.metrics import *
from nnxlite.training.optimizer import *
from nnxlite.training.optimizer import to_opt_state as to_opt_state
from nnxlite.training.precision import *
from nnxlite.training.train_state import TrainState as TrainState
