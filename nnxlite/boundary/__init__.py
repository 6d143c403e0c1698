"""The one protocol by which objects enter and leave a JAX transform."""

from nnxlite.boundary._context import *
from nnxlite.boundary._labels import *
