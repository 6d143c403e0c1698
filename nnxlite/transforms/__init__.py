"""Transforms: those of JAX, for functions of mutable objects."""

from nnxlite.transforms._checks import *
from nnxlite.transforms._compiles import *
from nnxlite.transforms._control import *
from nnxlite.transforms._custom_vjp import *
from nnxlite.transforms._grad import *
from nnxlite.transforms._jit import *
from nnxlite.transforms._loops import *
from nnxlite.transforms._mapped import *
from nnxlite.transforms._trees import *
