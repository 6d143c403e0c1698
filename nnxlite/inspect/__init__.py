"""Looking at models: text, tables and trees."""

from nnxlite.inspect._calls import CallInfo as CallInfo
from nnxlite.inspect._display import display as display
from nnxlite.inspect._tabulate import filter_rng_streams as filter_rng_streams
from nnxlite.inspect._tabulate import tabulate as tabulate
