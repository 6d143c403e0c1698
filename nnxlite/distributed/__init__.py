"""Several processes: exchanging texts, and failing together.

Each process runs the same program and owns some of the devices. Joining, global arrays and waiting are
JAX's: `jax.distributed.initialize`, `jax.make_array_from_callback`, `jax.experimental.multihost_utils`.
"""

from nnxlite.sharding._processes import *
