"""Sharding: annotations on Variables, their meaning on a mesh, abstract models."""

import typing as _tp

from nnxlite.sharding._abstract import *
from nnxlite.sharding._annotations import *

if _tp.TYPE_CHECKING:  # names of `nnx.spmd`, not of the root: `_paths` adds them
    from nnxlite.sharding._annotations import add_axis as add_axis
    from nnxlite.sharding._annotations import get_var_pspec as get_var_pspec
    from nnxlite.sharding._annotations import remove_axis as remove_axis
