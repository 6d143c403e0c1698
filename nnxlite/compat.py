"""`nnx.compat`: the functions with `graph=True` and `graph_updates=True`, whatever the defaults are.

`nnx.compat.jit(f)` is `nnx.jit(f, graph=True, graph_updates=True)`, and so on.
"""

from __future__ import annotations

import functools

from nnxlite import boundary as _boundary
from nnxlite import graph as _graph
from nnxlite import objects as _objects
from nnxlite import sharding as _sharding
from nnxlite import transforms as _transforms
from nnxlite.objects import _rng_scopes

_graph_only = {"graph": True}
_graph_and_updates = {"graph": True, "graph_updates": True}

backup_keys = functools.partial(_rng_scopes.backup_keys, **_graph_only)
cached_partial = functools.partial(_transforms.cached_partial, **_graph_and_updates)
checkify = functools.partial(_transforms.checkify, **_graph_and_updates)
clone = functools.partial(_graph.clone, **_graph_only)
cond = functools.partial(_transforms.cond, **_graph_and_updates)
custom_vjp = functools.partial(_transforms.custom_vjp, **_graph_and_updates)
eval_shape = functools.partial(_transforms.eval_shape, **_graph_and_updates)
flatten = functools.partial(_boundary.flatten, **_graph_only)
fori_loop = functools.partial(_transforms.fori_loop, **_graph_and_updates)
fork_rngs = functools.partial(_objects.fork_rngs, **_graph_and_updates)
get_abstract_model = functools.partial(_sharding.get_abstract_model, **_graph_only)
grad = functools.partial(_transforms.grad, **_graph_and_updates)
graphdef = functools.partial(_graph.graphdef, **_graph_only)
iter_children = functools.partial(_graph.iter_children, **_graph_only)
iter_graph = functools.partial(_graph.iter_graph, **_graph_only)
iter_modules = functools.partial(_objects.iter_modules, **_graph_only)
jit = functools.partial(_transforms.jit, **_graph_and_updates)
jvp = functools.partial(_transforms.jvp, **_graph_and_updates)
pmap = functools.partial(_transforms.pmap, **_graph_and_updates)
recursive_map = functools.partial(_graph.recursive_map, **_graph_only)
remat = functools.partial(_transforms.remat, **_graph_and_updates)
reseed = functools.partial(_objects.reseed, **_graph_only)
scan = functools.partial(_transforms.scan, **_graph_and_updates)
shard_map = functools.partial(_transforms.shard_map, **_graph_and_updates)
split = functools.partial(_graph.split, **_graph_only)
split_rngs = functools.partial(_objects.split_rngs, **_graph_and_updates)
state = functools.partial(_graph.state, **_graph_only)
switch = functools.partial(_transforms.switch, **_graph_and_updates)
value_and_grad = functools.partial(_transforms.value_and_grad, **_graph_and_updates)
view = functools.partial(_objects.view, **_graph_only)
view_info = functools.partial(_objects.view_info, **_graph_only)
vjp = functools.partial(_transforms.vjp, **_graph_and_updates)
vmap = functools.partial(_transforms.vmap, **_graph_and_updates)
while_loop = functools.partial(_transforms.while_loop, **_graph_and_updates)
