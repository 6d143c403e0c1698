"""Serving: programs that run without the code they came from."""

from nnxlite.serving._export import Exported as Exported
from nnxlite.serving._export import export as export
from nnxlite.serving._export import load_exported as load_exported
