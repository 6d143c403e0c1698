"""Training: optimizers, metrics, averages, loss scaling, and an immutable train state."""

from nnxlite.training._groups import by_path as by_path
from nnxlite.training.ema import EMA as EMA
from nnxlite.training.loss_scale import DynamicLossScale as DynamicLossScale
from nnxlite.training.loss_scale import LossScaleState as LossScaleState
from nnxlite.training.loss_scale import StaticLossScale as StaticLossScale
from nnxlite.training.loss_scale import all_finite as all_finite
from nnxlite.training.metrics import Accuracy as Accuracy
from nnxlite.training.metrics import Average as Average
from nnxlite.training.metrics import Metric as Metric
from nnxlite.training.metrics import MetricState as MetricState
from nnxlite.training.metrics import MultiMetric as MultiMetric
from nnxlite.training.metrics import Statistics as Statistics
from nnxlite.training.metrics import Welford as Welford
from nnxlite.training.optimizer import ModelAndOptimizer as ModelAndOptimizer
from nnxlite.training.optimizer import OptArray as OptArray
from nnxlite.training.optimizer import Optimizer as Optimizer
from nnxlite.training.optimizer import OptState as OptState
from nnxlite.training.optimizer import OptVariable as OptVariable
from nnxlite.training.optimizer import to_opt_state as to_opt_state
from nnxlite.training.precision import Policy as Policy
from nnxlite.training.precision import cast as cast
from nnxlite.training.train_state import TrainState as TrainState
