"""The graph engine: object graphs as interned definitions and leaves, and back."""

import typing as _tp

from nnxlite.graph._compare import Difference as Difference
from nnxlite.graph._edit import pop as pop
from nnxlite.graph._edit import set_metadata as set_metadata
from nnxlite.graph._edit import update as update
from nnxlite.graph._functional import GraphState as GraphState
from nnxlite.graph._functional import PureState as PureState
from nnxlite.graph._functional import call as call
from nnxlite.graph._functional import clone as clone
from nnxlite.graph._functional import graphdef as graphdef
from nnxlite.graph._functional import merge as merge
from nnxlite.graph._functional import split as split
from nnxlite.graph._functional import state as state
from nnxlite.graph._functional import unpack as unpack
from nnxlite.graph._functional import variables as variables
from nnxlite.graph._graphdef import GraphDef as GraphDef
from nnxlite.graph._kinds import has_data as has_data
from nnxlite.graph._kinds import is_data as is_data
from nnxlite.graph._kinds import register_data_type as register_data_type
from nnxlite.graph._walk import find_duplicates as find_duplicates
from nnxlite.graph._walk import freeze as freeze
from nnxlite.graph._walk import iter_children as iter_children
from nnxlite.graph._walk import iter_graph as iter_graph
from nnxlite.graph._walk import map as map
from nnxlite.graph._walk import recursive_map as recursive_map
from nnxlite.graph._walk import to_arrays as to_arrays
from nnxlite.graph._walk import to_refs as to_refs
from nnxlite.graph._walk import unfreeze as unfreeze
from nnxlite.graph._walk import vars_as as vars_as
from nnxlite.graph._walk import with_vars as with_vars

if _tp.TYPE_CHECKING:  # names of `nnx.graphlib`, not of the root: `_paths` adds them
    from nnxlite.graph._kinds import is_graph_node as is_graph_node
    from nnxlite.graph._kinds import is_node as is_node
    from nnxlite.graph._kinds import is_node_leaf as is_node_leaf
    from nnxlite.graph._kinds import jax_to_nnx_path as jax_to_nnx_path
    from nnxlite.graph._kinds import register_graph_node_type as register_graph_node_type
