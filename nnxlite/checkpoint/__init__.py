"""Checkpoints: objects to files under readable names, and back into objects."""

from nnxlite.checkpoint._checkpoint import Info as Info
from nnxlite.checkpoint._checkpoint import info as info
from nnxlite.checkpoint._checkpoint import restore as restore
from nnxlite.checkpoint._checkpoint import save as save
from nnxlite.checkpoint._diff import diff as diff
from nnxlite.checkpoint._errors import CheckpointError as CheckpointError
from nnxlite.checkpoint._errors import DamagedError as DamagedError
from nnxlite.checkpoint._errors import MismatchError as MismatchError
from nnxlite.checkpoint._errors import NotFoundError as NotFoundError
from nnxlite.checkpoint._manager import Manager as Manager
from nnxlite.checkpoint._report import Mismatch as Mismatch
from nnxlite.checkpoint._report import Report as Report
