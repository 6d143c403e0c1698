"""`nnx.helpers`: where the reference has containers, `Sequential` and `TrainState`."""

import inspect
import typing as tp

from nnxlite.nn.combinators import Sequential as Sequential
from nnxlite.objects._containers import Dict as Dict
from nnxlite.objects._containers import List as List
from nnxlite.training import TrainState as TrainState


def has_keyword_arg(func: tp.Callable[..., tp.Any], name: str) -> bool:
    """Whether a function has a parameter that can be given by this name."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(func).parameters.get(name)
    return found is not None and found.kind in kinds
