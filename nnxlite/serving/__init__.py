"""Serving: programs that run without the code they came from."""

from nnxlite.serving._export import *
