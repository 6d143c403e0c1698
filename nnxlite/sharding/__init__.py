"""Sharding: annotations on Variables, their meaning on a mesh, abstract models."""

from nnxlite.sharding._abstract import *
from nnxlite.sharding._annotations import *
