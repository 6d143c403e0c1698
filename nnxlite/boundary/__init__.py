"""The one protocol by which objects enter and leave a JAX transform."""

from nnxlite.boundary._context import MergeContext as MergeContext
from nnxlite.boundary._context import SplitContext as SplitContext
from nnxlite.boundary._context import UpdateContext as UpdateContext
from nnxlite.boundary._context import current_update_context as current_update_context
from nnxlite.boundary._context import merge_context as merge_context
from nnxlite.boundary._context import split_context as split_context
from nnxlite.boundary._context import update_context as update_context
from nnxlite.boundary._inputs import CallDef as CallDef
from nnxlite.boundary._inputs import Inner as Inner
from nnxlite.boundary._inputs import Inputs as Inputs
from nnxlite.boundary._inputs import Site as Site
from nnxlite.boundary._inputs import enter as enter
from nnxlite.boundary._inputs import is_root as is_root
from nnxlite.boundary._outputs import Crossing as Crossing
from nnxlite.boundary._outputs import Fixed as Fixed
from nnxlite.boundary._outputs import OutDef as OutDef
from nnxlite.boundary._outputs import Outputs as Outputs
from nnxlite.boundary._outputs import fixed_structure as fixed_structure
from nnxlite.boundary._outputs import leave as leave
from nnxlite.boundary._outputs import replay as replay
from nnxlite.boundary._outputs import replay_crossing as replay_crossing
from nnxlite.boundary._prefixes import Carry as Carry
from nnxlite.boundary._prefixes import DiffState as DiffState
from nnxlite.boundary._prefixes import PrefixMapping as PrefixMapping
from nnxlite.boundary._prefixes import StateAxes as StateAxes
from nnxlite.boundary._prefixes import StateSharding as StateSharding
