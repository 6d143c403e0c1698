"""Training: the loop, optimizers, metrics, averages, loss scaling, and an immutable train state."""

from nnxlite.training._loggers import *
from nnxlite.training._loop import *
from nnxlite.training.ema import EMA as EMA
from nnxlite.training.loss_scale import *
from nnxlite.training.metrics import *
from nnxlite.training.optimizer import *
from nnxlite.training.optimizer import to_opt_state as to_opt_state
from nnxlite.training.patterns import by_path as by_path
from nnxlite.training.precision import *
from nnxlite.training.train_state import TrainState as TrainState
