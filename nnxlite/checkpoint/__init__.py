"""Checkpoints: objects to files under readable names, and back into objects."""

from nnxlite.checkpoint._checkpoint import Info as Info
from nnxlite.checkpoint._checkpoint import info as info
from nnxlite.checkpoint._checkpoint import restore as restore
from nnxlite.checkpoint._checkpoint import save as save
from nnxlite.checkpoint._checkpoint import values as values
from nnxlite.checkpoint._manager import Manager as Manager
from nnxlite.checkpoint._mapping import Mapping as Mapping
from nnxlite.checkpoint._report import CheckpointError as CheckpointError
from nnxlite.checkpoint._report import DamagedError as DamagedError
from nnxlite.checkpoint._report import Mismatch as Mismatch
from nnxlite.checkpoint._report import MismatchError as MismatchError
from nnxlite.checkpoint._report import NotFoundError as NotFoundError
from nnxlite.checkpoint._report import Report as Report
from nnxlite.checkpoint._rules import Cast as Cast
from nnxlite.checkpoint._rules import Concatenate as Concatenate
from nnxlite.checkpoint._rules import Ignore as Ignore
from nnxlite.checkpoint._rules import Keep as Keep
from nnxlite.checkpoint._rules import MappingError as MappingError
from nnxlite.checkpoint._rules import Rearrange as Rearrange
from nnxlite.checkpoint._rules import Rule as Rule
from nnxlite.checkpoint._rules import Split as Split
from nnxlite.checkpoint._rules import Stack as Stack
from nnxlite.checkpoint._rules import Tie as Tie
from nnxlite.checkpoint._rules import Unstack as Unstack
from nnxlite.checkpoint._safetensors import load_safetensors as load_safetensors
from nnxlite.checkpoint._safetensors import save_safetensors as save_safetensors
