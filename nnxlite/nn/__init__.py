"""Layers, one family per file."""

from nnxlite.nn import dtypes as dtypes
from nnxlite.nn import initializers as initializers
from nnxlite.nn.activations import *
from nnxlite.nn.attention import *
from nnxlite.nn.combinators import *
from nnxlite.nn.conv import *
from nnxlite.nn.embed import *
from nnxlite.nn.initializers import Initializer as Initializer
from nnxlite.nn.linear import *
from nnxlite.nn.lora import *
from nnxlite.nn.multi_head_attention import *
from nnxlite.nn.normalization import *
from nnxlite.nn.pooling import *
from nnxlite.nn.recurrent import *
from nnxlite.nn.recurrent_cells import *
from nnxlite.nn.rope import *
from nnxlite.nn.stochastic import *
from nnxlite.nn.weight_normalization import *
