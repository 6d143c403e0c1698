"""Sharding: annotations on Variables, their meaning on a mesh, abstract models."""

from nnxlite.sharding._abstract import abstract_with_sharding as abstract_with_sharding
from nnxlite.sharding._abstract import as_abstract as as_abstract
from nnxlite.sharding._abstract import get_abstract_model as get_abstract_model
from nnxlite.sharding._annotations import get_named_sharding as get_named_sharding
from nnxlite.sharding._annotations import get_partition_spec as get_partition_spec
from nnxlite.sharding._annotations import logical_axis_rules as logical_axis_rules
from nnxlite.sharding._annotations import transform_metadata as transform_metadata
from nnxlite.sharding._annotations import with_partitioning as with_partitioning
