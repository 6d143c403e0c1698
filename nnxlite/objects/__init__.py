"""Objects: Pytree, Module, containers, random streams, and what modules can do."""

from nnxlite.objects._capture import capture as capture
from nnxlite.objects._capture import view as view
from nnxlite.objects._capture import view_info as view_info
from nnxlite.objects._capture import with_attributes as with_attributes
from nnxlite.objects._containers import Dict as Dict
from nnxlite.objects._containers import List as List
from nnxlite.objects._fields import Data as Data
from nnxlite.objects._fields import Static as Static
from nnxlite.objects._fields import data as data
from nnxlite.objects._fields import dataclass as dataclass
from nnxlite.objects._fields import field as field
from nnxlite.objects._fields import static as static
from nnxlite.objects._module import Module as Module
from nnxlite.objects._module import iter_module_children as iter_module_children
from nnxlite.objects._module import iter_modules as iter_modules
from nnxlite.objects._pytree import Object as Object
from nnxlite.objects._pytree import Pytree as Pytree
from nnxlite.objects._pytree import check_pytree as check_pytree
from nnxlite.objects._rng_scopes import fork_rngs as fork_rngs
from nnxlite.objects._rng_scopes import reseed as reseed
from nnxlite.objects._rng_scopes import restore_rngs as restore_rngs
from nnxlite.objects._rng_scopes import split_rngs as split_rngs
from nnxlite.objects._rng_scopes import with_rngs as with_rngs
from nnxlite.objects._rngs import Rngs as Rngs
from nnxlite.objects._rngs import RngStream as RngStream
