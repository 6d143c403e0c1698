"""Looking at models: text, tables and trees."""

from nnxlite.inspect._calls import CallInfo as CallInfo
from nnxlite.inspect._check import *
from nnxlite.inspect._diff import *
from nnxlite.inspect._diff import array_difference as array_difference
from nnxlite.inspect._display import display as display
from nnxlite.inspect._draw import *
from nnxlite.inspect._memory import *
from nnxlite.inspect._nan import NotFinite as NotFinite
from nnxlite.inspect._nan import find_nan as find_nan
from nnxlite.inspect._tabulate import filter_rng_streams as filter_rng_streams
from nnxlite.inspect._tabulate import tabulate as tabulate
