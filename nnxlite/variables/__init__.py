"""Variables: mutable boxes for values, their kinds, metadata and callbacks."""

from nnxlite.variables._definition import *
from nnxlite.variables._kinds import *
from nnxlite.variables._variable import *
