"""`nnx.summary`: `tabulate`, where the reference has it."""

from nnxlite.inspect import tabulate as tabulate
