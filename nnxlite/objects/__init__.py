"""Objects: Pytree, Module, containers, random streams, and what modules can do."""

from nnxlite.objects._capture import *
from nnxlite.objects._containers import *
from nnxlite.objects._fields import *
from nnxlite.objects._module import *
from nnxlite.objects._pytree import *
from nnxlite.objects._rng_scopes import *
from nnxlite.objects._rngs import *
