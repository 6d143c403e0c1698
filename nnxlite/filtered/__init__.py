"""Filtered trees and transforms: what to trace, differentiate or batch, leaf by leaf."""

from nnxlite.filtered._calls import *
from nnxlite.filtered._grad import *
from nnxlite.filtered._specs import *
from nnxlite.filtered._trees import *
