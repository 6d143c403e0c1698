"""`nnx.compat`: the functions with `graph=True` and `graph_updates=True`, whatever the defaults are.

`nnx.compat.jit(f)` is `nnx.jit(f, graph=True, graph_updates=True)`, and so on.
"""

from __future__ import annotations

import functools
import typing as tp

from nnxlite import boundary as _boundary
from nnxlite import graph as _graph
from nnxlite import objects as _objects
from nnxlite import sharding as _sharding
from nnxlite import transforms as _transforms
from nnxlite.objects import _rng_scopes

_MODES: dict[str, dict[str, bool]] = {
    "backup_keys clone flatten get_abstract_model graphdef iter_children iter_graph iter_modules "
    "recursive_map reseed split state view view_info": {"graph": True},
    "cached_partial checkify cond custom_vjp eval_shape fori_loop fork_rngs grad jit jvp pmap remat "
    "scan shard_map split_rngs switch value_and_grad vjp vmap while_loop": {
        "graph": True,
        "graph_updates": True,
    },
}
_ROOMS = (_graph, _boundary, _objects, _sharding, _transforms, _rng_scopes)

if tp.TYPE_CHECKING:

    def __getattr__(name: str) -> tp.Any: ...

else:
    for _names, _modes in _MODES.items():
        for _name in _names.split():
            _function = next(_f for room in _ROOMS if (_f := getattr(room, _name, None)))
            globals()[_name] = functools.partial(_function, **_modes)
