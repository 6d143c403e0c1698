"""Several processes: joining them, global arrays from local parts, and waiting for each other.

Each process runs the same program and owns some of the devices.
"""

from nnxlite.sharding._processes import *
