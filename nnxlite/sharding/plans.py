"""Models on a mesh: plans, and layers that are stacked or computed again.

Apart from the annotations, which the core's layers need: these modules import all layers.
"""

from nnxlite.sharding._decide import init_sharded as init_sharded
from nnxlite.sharding._decide import plan_layout as plan_layout
from nnxlite.sharding._decide import shard as shard
from nnxlite.sharding._plan import Layout as Layout
from nnxlite.sharding._plan import Placement as Placement
from nnxlite.sharding._plan import Plan as Plan
from nnxlite.sharding._plan import make_mesh as make_mesh
from nnxlite.sharding._stacked import remat_layers as remat_layers
from nnxlite.sharding._stacked import stack_layers as stack_layers
from nnxlite.sharding._stacked import unstack_layers as unstack_layers
