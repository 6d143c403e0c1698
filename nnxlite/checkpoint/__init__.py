"""Checkpoints: objects to files under readable names, and back into objects."""

from nnxlite.checkpoint._checkpoint import *
from nnxlite.checkpoint._manager import Manager as Manager
from nnxlite.checkpoint._report import *
from nnxlite.checkpoint._rules import *
from nnxlite.checkpoint._weights import *
from nnxlite.checkpoint._weights import Mapping as Mapping
