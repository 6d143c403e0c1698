"""`nnx.visualization`: `display`, where the reference has it."""

from nnxlite.inspect import display as display
