"""Serving: programs that run without the code they came from, and a known number of them."""

from nnxlite.serving._bucketed import Bucketed as Bucketed
from nnxlite.serving._bucketed import bucketed as bucketed
from nnxlite.serving._export import Exported as Exported
from nnxlite.serving._export import export as export
from nnxlite.serving._export import load_exported as load_exported
