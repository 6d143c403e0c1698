"""Transforms: JAX's own, over the one boundary."""

from nnxlite.transforms._control import cond as cond
from nnxlite.transforms._control import fori_loop as fori_loop
from nnxlite.transforms._control import switch as switch
from nnxlite.transforms._control import while_loop as while_loop
from nnxlite.transforms._custom_vjp import custom_vjp as custom_vjp
from nnxlite.transforms._grad import grad as grad
from nnxlite.transforms._grad import value_and_grad as value_and_grad
from nnxlite.transforms._jit import jit as jit
from nnxlite.transforms._mapped import pmap as pmap
from nnxlite.transforms._mapped import shard_map as shard_map
from nnxlite.transforms._mapped import vmap as vmap
from nnxlite.transforms._partial import cached_partial as cached_partial
from nnxlite.transforms._partial import jit_partial as jit_partial
from nnxlite.transforms._remat import remat as remat
from nnxlite.transforms._scan import scan as scan
from nnxlite.transforms._shapes import checkify as checkify
from nnxlite.transforms._shapes import eval_shape as eval_shape
from nnxlite.transforms._shapes import make_jaxpr as make_jaxpr
from nnxlite.transforms._trees import NodeStates as NodeStates
from nnxlite.transforms._trees import from_tree as from_tree
from nnxlite.transforms._trees import prefix as prefix
from nnxlite.transforms._trees import to_tree as to_tree
from nnxlite.transforms._vjp import jvp as jvp
from nnxlite.transforms._vjp import vjp as vjp
from nnxlite.variables import PARTITION_NAME as PARTITION_NAME
