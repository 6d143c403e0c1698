"""`nnx.errors`: the exceptions of the library."""

from nnxlite._base.errors import NnxError as NnxError
from nnxlite._base.errors import RuntimeCheckError as RuntimeCheckError
from nnxlite._base.errors import TraceContextError as TraceContextError

FlaxError = NnxError
"""The base class under the name that it has in the reference."""
