"""Several processes: joining them, global arrays from local parts, and waiting for each other.

Each process runs the same program and owns some of the devices.
"""

from nnxlite.sharding._processes import ProcessError as ProcessError
from nnxlite.sharding._processes import agreed as agreed
from nnxlite.sharding._processes import barrier as barrier
from nnxlite.sharding._processes import exchange as exchange
from nnxlite.sharding._processes import gather as gather
from nnxlite.sharding._processes import initialize as initialize
from nnxlite.sharding._processes import local_rows as local_rows
from nnxlite.sharding._processes import shutdown as shutdown
from nnxlite.sharding._processes import to_global as to_global
from nnxlite.sharding._processes import to_local as to_local
