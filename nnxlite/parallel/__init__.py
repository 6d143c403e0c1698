"""Training spread over layers: stacks, pipelines, and what is computed again."""

from nnxlite.parallel._pipeline import pipeline as pipeline
from nnxlite.parallel._remat_layers import remat_layers as remat_layers
from nnxlite.parallel._stacked import stack_layers as stack_layers
from nnxlite.parallel._stacked import unstack_layers as unstack_layers
