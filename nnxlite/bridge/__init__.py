"""`nnx.bridge`: modules of Linen and of this library inside each other.

It needs Flax, for `flax.linen`, and is imported when it is first used.

>>> import nnxlite as nnx, flax.linen as nn, jax.numpy as jnp
>>> model = nnx.bridge.ToNNX(nn.Dense(4), rngs=nnx.Rngs(0))
>>> nnx.bridge.lazy_init(model, jnp.ones((1, 3))).kernel.shape
(3, 4)
"""

import sys

try:
    import flax.linen as _linen
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("flax"):
        raise
    raise ImportError(
        "nnx.bridge is for modules of flax.linen, and Flax is not installed: pip install flax"
    ) from error

from nnxlite.bridge import module as module
from nnxlite.bridge import variables as variables
from nnxlite.bridge import wrappers as wrappers
from nnxlite.bridge.module import *
from nnxlite.bridge.variables import NNXMeta as NNXMeta
from nnxlite.bridge.variables import with_partitioning as with_partitioning
from nnxlite.bridge.wrappers import *
from nnxlite.nn import initializers as initializers
from nnxlite.sharding.linen_rules import share_rules_with_linen

interop = wrappers  # where the reference has `linen_in_bridge_mdl` and `nnx_in_bridge_mdl`
sys.modules[f"{__name__}.interop"] = interop

share_rules_with_linen()
del _linen, share_rules_with_linen
