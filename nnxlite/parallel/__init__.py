"""Training spread over layers: stacks of them, and pipelines."""

from nnxlite.parallel._pipeline import pipeline as pipeline
from nnxlite.parallel._stacked import stack_layers as stack_layers
from nnxlite.parallel._stacked import unstack_layers as unstack_layers
