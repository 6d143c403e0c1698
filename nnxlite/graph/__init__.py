"""The graph engine: object graphs as interned definitions and leaves, and back."""

import typing as _tp

from nnxlite.graph._compare import *
from nnxlite.graph._edit import *
from nnxlite.graph._functional import *
from nnxlite.graph._graphdef import *
from nnxlite.graph._kinds import *
from nnxlite.graph._walk import *

if _tp.TYPE_CHECKING:  # names of `nnx.graphlib`, not of the root: `_paths` adds them
    from nnxlite.graph._kinds import is_graph_node as is_graph_node
    from nnxlite.graph._kinds import is_node as is_node
    from nnxlite.graph._kinds import is_node_leaf as is_node_leaf
    from nnxlite.graph._kinds import jax_to_nnx_path as jax_to_nnx_path
    from nnxlite.graph._kinds import register_graph_node_type as register_graph_node_type
