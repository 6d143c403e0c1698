"""Variables: mutable boxes for values, their kinds, metadata and callbacks."""

from nnxlite.variables._definition import VariableMetadata as VariableMetadata
from nnxlite.variables._kinds import ArrayRef as ArrayRef
from nnxlite.variables._kinds import BatchStat as BatchStat
from nnxlite.variables._kinds import Cache as Cache
from nnxlite.variables._kinds import Intermediate as Intermediate
from nnxlite.variables._kinds import Param as Param
from nnxlite.variables._kinds import Perturbation as Perturbation
from nnxlite.variables._kinds import RngCount as RngCount
from nnxlite.variables._kinds import RngKey as RngKey
from nnxlite.variables._kinds import RngState as RngState
from nnxlite.variables._kinds import VarDefaults as VarDefaults
from nnxlite.variables._kinds import VariableState as VariableState
from nnxlite.variables._kinds import array_ref as array_ref
from nnxlite.variables._kinds import is_array_ref as is_array_ref
from nnxlite.variables._kinds import register_variable_name as register_variable_name
from nnxlite.variables._kinds import var_defaults as var_defaults
from nnxlite.variables._kinds import variable_name_from_type as variable_name_from_type
from nnxlite.variables._kinds import variable_type_from_name as variable_type_from_name
from nnxlite.variables._kinds import with_metadata as with_metadata
from nnxlite.variables._variable import Variable as Variable
