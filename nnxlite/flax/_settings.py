"""The options of `flax.config` that concern `flax.nnx`, as nnxlite's settings.

Flax reads the environment (`NNX_GRAPH_MODE`, `FLAX_MAX_REPR_DEPTH`, ...) when it is imported, and a
program may call `flax.config.update` later. Both set the default of nnxlite's setting; what the program
has set by `nnx.set_graph_mode` and the like comes first here as there.

Three options have no counterpart. `flax_array_ref` does nothing in Flax 0.12. `flax_hijax_variable`
makes every Variable a value of JAX, which nnxlite needs nowhere. `flax_pytree_module` is read once, when
`flax.nnx` is first imported: classes that are defined later follow it; the layers follow the variable
`FLAX_PYTREE_MODULE` alone.
"""

from __future__ import annotations

import functools
import importlib
import typing as tp

from nnxlite._base import errors as _config

SETTINGS: dict[str, _config.Setting[tp.Any]] = {
    "nnx_graph_mode": _config.GRAPH_MODE,
    "nnx_graph_updates": _config.GRAPH_UPDATES,
    "nnx_sow_capture_noop": _config.SOW_ONLY_IN_CAPTURE,
    "flax_always_shard_variable": _config.EAGER_SHARDING,
    "flax_max_repr_depth": _config.TEXT_DEPTH,
}

_DEPTH = _config.TEXT_DEPTH.default


def _read(config: tp.Any) -> None:
    for name, setting in SETTINGS.items():
        value = getattr(config, name, setting.default)  # 0.12 has gained options
        setting.default = _DEPTH if value is None else value


def follow() -> None:
    """Take the options as they are, and each later `flax.config.update`; log warnings."""
    _config.LOG_WARNINGS.default = True
    _config.UNNAMED_AXES.default = False
    config: tp.Any = getattr(importlib.import_module("flax"), "config", None)
    if config is None:  # Flax is not installed
        return
    kind = type(config)
    original = kind.update

    @functools.wraps(original)
    def update(self: tp.Any, *args: tp.Any, **kwargs: tp.Any) -> None:
        original(self, *args, **kwargs)
        _read(self)

    if not hasattr(original, "__wrapped__"):  # `importlib.reload(nnx)` comes here again
        kind.update = update
    _read(config)
    _config.PYTREES.default = config.flax_pytree_module
