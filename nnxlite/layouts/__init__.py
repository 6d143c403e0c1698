"""Layouts: where the arrays of a model lie on a mesh of devices, by a plan."""

from nnxlite.layouts._layout import Layout as Layout
from nnxlite.layouts._mesh import make_mesh as make_mesh
from nnxlite.layouts._placement import Placement as Placement
from nnxlite.layouts._plan import Plan as Plan
from nnxlite.layouts._shard import init_sharded as init_sharded
from nnxlite.layouts._shard import plan_layout as plan_layout
from nnxlite.layouts._shard import shard as shard
