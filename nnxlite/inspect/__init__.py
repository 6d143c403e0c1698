"""Looking at models: text, tables and trees."""

from nnxlite.inspect._calls import CallInfo as CallInfo
from nnxlite.inspect._check import Finding as Finding
from nnxlite.inspect._check import Findings as Findings
from nnxlite.inspect._check import check as check
from nnxlite.inspect._diff import Diff as Diff
from nnxlite.inspect._diff import array_difference as array_difference
from nnxlite.inspect._diff import diff as diff
from nnxlite.inspect._display import display as display
from nnxlite.inspect._draw import Drawing as Drawing
from nnxlite.inspect._draw import draw as draw
from nnxlite.inspect._memory import Memory as Memory
from nnxlite.inspect._memory import StepMemory as StepMemory
from nnxlite.inspect._memory import memory as memory
from nnxlite.inspect._nan import NotFinite as NotFinite
from nnxlite.inspect._nan import find_nan as find_nan
from nnxlite.inspect._tabulate import filter_rng_streams as filter_rng_streams
from nnxlite.inspect._tabulate import tabulate as tabulate
