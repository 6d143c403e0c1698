"""nnxlite: mutable modules with shared references for JAX, at the cost of plain JAX.

>>> import nnxlite as nnx, jax.numpy as jnp
>>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
>>> model(jnp.ones((1, 2))).shape
(1, 3)
"""

__version__ = "0.1.0"  # the only place to change it: see docs/contributing.md

import importlib as _importlib
import importlib.util as _util
import sys as _sys
import typing as _tp

from nnxlite import _paths
from nnxlite import _state as statelib
from nnxlite import compat as compat
from nnxlite import errors as errors
from nnxlite import filters as filterlib
from nnxlite import graph as graphlib
from nnxlite import helpers as helpers
from nnxlite import lora as lora
from nnxlite import objects as module
from nnxlite import reprlib as reprlib
from nnxlite import sharding as spmd
from nnxlite import tracers as tracers
from nnxlite import training as training
from nnxlite import variables as variablelib
from nnxlite import wrappers as wrappers
from nnxlite._base.errors import NnxError as NnxError
from nnxlite._base.errors import RuntimeCheckError as RuntimeCheckError
from nnxlite._base.errors import TraceContextError as TraceContextError
from nnxlite._base.errors import set_graph_mode as set_graph_mode
from nnxlite._base.errors import set_graph_updates as set_graph_updates
from nnxlite._base.errors import use_eager_sharding as use_eager_sharding
from nnxlite._base.errors import use_named_scopes as use_named_scopes
from nnxlite._base.errors import using_eager_sharding as using_eager_sharding
from nnxlite._base.jax import A as A
from nnxlite._base.jax import M as M
from nnxlite._state import *
from nnxlite._state import traversals as traversals
from nnxlite.boundary import *
from nnxlite.filtered import *
from nnxlite.filters import All as All
from nnxlite.filters import Any as Any
from nnxlite.filters import Everything as Everything
from nnxlite.filters import Frozen as Frozen
from nnxlite.filters import Not as Not
from nnxlite.filters import Nothing as Nothing
from nnxlite.filters import OfType as OfType
from nnxlite.filters import PathContains as PathContains
from nnxlite.filters import WithTag as WithTag
from nnxlite.graph import *
from nnxlite.nn import dtypes as dtypes
from nnxlite.nn import initializers as initializers
from nnxlite.nn.activations import *
from nnxlite.nn.attention import *
from nnxlite.nn.combinators import *
from nnxlite.nn.conv import *
from nnxlite.nn.embed import *
from nnxlite.nn.initializers import Initializer as Initializer
from nnxlite.nn.linear import *
from nnxlite.nn.lora import *
from nnxlite.nn.multi_head_attention import *
from nnxlite.nn.normalization import *
from nnxlite.nn.pooling import *
from nnxlite.nn.recurrent import *
from nnxlite.nn.recurrent_cells import *
from nnxlite.nn.rope import *
from nnxlite.nn.stochastic import *
from nnxlite.nn.weight_normalization import *
from nnxlite.objects import *
from nnxlite.objects import _pytree as object
from nnxlite.objects import _pytree as pytreelib
from nnxlite.objects import _rng_scopes as rnglib
from nnxlite.sharding import *
from nnxlite.training import EMA as EMA
from nnxlite.training import Metric as Metric
from nnxlite.training import MultiMetric as MultiMetric
from nnxlite.training import TrainState as TrainState
from nnxlite.training import metrics as metrics
from nnxlite.training import optimizer as optimizer
from nnxlite.training.optimizer import *
from nnxlite.training.precision import *
from nnxlite.transforms import *
from nnxlite.variables import *

_LATER = {
    "bridge": "",
    "checkpoint": "load_safetensors save_safetensors",
    "decoding": "Generated Sampler generate sampling",
    "distributed": "",
    "inspect": "Diff Drawing Finding Findings Memory StepMemory check diff display draw find_nan memory "
    "tabulate",
    "sharding.plans": "Layout Placement Plan init_sharded make_mesh plan_layout "
    "remat_layers shard stack_layers unstack_layers",
    "serving": "Exported export load_exported",
    "summary": "",
    "visualization": "",
}
"""Packages that are imported when one of their names is first used, which keeps the import light."""

_PACKAGE_OF = {name: package for package, names in _LATER.items() for name in names.split()}

if _tp.TYPE_CHECKING:  # the names of `_LATER`, for editors and type checkers
    from nnxlite import bridge as bridge
    from nnxlite import checkpoint as checkpoint
    from nnxlite import decoding as decoding
    from nnxlite import distributed as distributed
    from nnxlite import inspect as inspect
    from nnxlite import serving as serving
    from nnxlite import summary as summary
    from nnxlite import visualization as visualization
    from nnxlite.checkpoint._weights import *
    from nnxlite.decoding import Sampler as Sampler
    from nnxlite.decoding import sampling as sampling
    from nnxlite.decoding._generate import *
    from nnxlite.inspect import display as display
    from nnxlite.inspect import find_nan as find_nan
    from nnxlite.inspect import tabulate as tabulate
    from nnxlite.inspect._check import *
    from nnxlite.inspect._diff import *
    from nnxlite.inspect._draw import *
    from nnxlite.inspect._memory import *
    from nnxlite.serving import *
    from nnxlite.sharding.plans import *
else:  # so that type checkers see a wrong name

    def __getattr__(name: str) -> _tp.Any:
        if name in _LATER:
            return _importlib.import_module(f"nnxlite.{name}")
        if package := _PACKAGE_OF.get(name):
            value = getattr(_importlib.import_module(f"nnxlite.{package}"), name)
            globals()[name] = value  # found without this function from now on
            return value
        if name == "__all__":  # `from nnxlite import *` has all names, too
            return [name for name in __dir__() if not name.startswith("_")]
        raise AttributeError(f"module 'nnxlite' has no attribute {name!r}")

    def __dir__() -> list[str]:
        _submodules = {name for name in _LATER if "." not in name}
        absent = set() if _util.find_spec("flax") else {"bridge"}  # it needs flax.linen
        return sorted({*globals(), *_submodules, *_PACKAGE_OF} - absent)


_paths.install(_sys.modules[__name__])
