"""The one protocol by which objects enter and leave a JAX transform."""

from nnxlite.boundary._context import MergeContext as MergeContext
from nnxlite.boundary._context import SplitContext as SplitContext
from nnxlite.boundary._context import UpdateContext as UpdateContext
from nnxlite.boundary._context import current_update_context as current_update_context
from nnxlite.boundary._context import flatten as flatten
from nnxlite.boundary._context import merge_context as merge_context
from nnxlite.boundary._context import split_context as split_context
from nnxlite.boundary._context import unflatten as unflatten
from nnxlite.boundary._context import update_context as update_context
from nnxlite.boundary._labels import Carry as Carry
from nnxlite.boundary._labels import DiffState as DiffState
from nnxlite.boundary._labels import StateAxes as StateAxes
from nnxlite.boundary._labels import StateSharding as StateSharding
