"""Models on a mesh: plans, and layers that are stacked or computed again.

Apart from the annotations, which the core's layers need: these modules import all layers.
"""

from nnxlite.sharding._decide import *
from nnxlite.sharding._plan import *
from nnxlite.sharding._stacked import *
