"""Several processes: joining them, global arrays from local parts, and waiting for each other.

Each process runs the same program and owns some of the devices.
"""

from nnxlite.distributed._agreeing import ProcessError as ProcessError
from nnxlite.distributed._agreeing import agreed as agreed
from nnxlite.distributed._agreeing import barrier as barrier
from nnxlite.distributed._agreeing import exchange as exchange
from nnxlite.distributed._arrays import gather as gather
from nnxlite.distributed._arrays import local_rows as local_rows
from nnxlite.distributed._arrays import to_global as to_global
from nnxlite.distributed._arrays import to_local as to_local
from nnxlite.distributed._joining import initialize as initialize
from nnxlite.distributed._joining import shutdown as shutdown
