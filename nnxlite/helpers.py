"""`nnx.helpers`: the reference's place for containers, `Sequential` and `TrainState`."""

from nnxlite.nn.combinators import Sequential as Sequential
from nnxlite.objects import Dict as Dict
from nnxlite.objects import List as List
from nnxlite.training import TrainState as TrainState
