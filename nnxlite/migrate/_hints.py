"""What to do about names that stay: one line each, and the page that says more."""

from __future__ import annotations

FLAX_NNX, LINEN = "migrating/flax-nnx.md", "migrating/linen.md"
EQUINOX = "migrating/equinox.md"

FLAX: dict[str, tuple[str, str]] = {
    "flax.linen": ("rewrite its modules as nnx.Module, or wrap them with nnx.bridge.ToNNX", LINEN),
    "flax.training.train_state": ("use nnx.Optimizer, which contains the step too", LINEN),
    "flax.training.checkpoints": ("use nnx.checkpoint.save and restore", "checkpoints.md"),
    "flax.training.orbax_utils": ("use nnx.checkpoint.save and restore", "checkpoints.md"),
    "flax.training.dynamic_scale": ("keep Flax for it, or copy the recipe", "recipes/training.md"),
    "flax.training": ("keep it with Flax installed, or copy the function", FLAX_NNX),
    "flax.core": ("use plain dicts; nnx.State is not a FrozenDict", FLAX_NNX),
    "flax.struct": ("use a frozen dataclass under jax.tree_util.register_dataclass", FLAX_NNX),
    "flax.serialization": ("use nnx.checkpoint or nnx.save_safetensors", "checkpoints.md"),
    "flax.jax_utils": ("use jax.device_put with a sharding, or nnx.shard", "sharding.md"),
    "flax.traverse_util": ("use nnx.to_flat_state for States; else keep Flax installed", FLAX_NNX),
    "flax.errors": ("use nnx.errors; only TraceContextError has the same name there", FLAX_NNX),
}
OTHER_FLAX = ("keep Flax installed for it, or replace it", FLAX_NNX)

ABSENT: dict[str, tuple[str, str]] = {
    "TreeNode": ("use nnx.Pytree", FLAX_NNX),
    "GraphNode": ("use nnx.Object", FLAX_NNX),
    "ModuleMeta": ("remove it; Module has no metaclass to derive from", FLAX_NNX),
    "with_sharding_constraint": ("use jax.lax.with_sharding_constraint", "sharding.md"),
    "MutableArray": ("use nnx.ArrayRef", FLAX_NNX),
    "mutable_array": ("use nnx.array_ref", FLAX_NNX),
    "is_mutable_array": ("use nnx.is_array_ref", FLAX_NNX),
    "mutable": ("use nnx.to_refs", FLAX_NNX),
    "arrays": ("use nnx.to_arrays", FLAX_NNX),
    "use_hijax": ("remove it, or use ref=True", "differences.md"),
    "with_tag": ("use nnx.WithTag", FLAX_NNX),
    "Scan": ("use nnx.scan over stacked layers", "transforms.md"),
    "Vmap": ("use nnx.vmap on a function that makes or calls the module", "transforms.md"),
    "Jit": ("use nnx.jit on a function that takes the module", "transforms.md"),
    "Remat": ("use nnx.remat on a function that takes the module", "transforms.md"),
    "partial_init": ("make it in a function under nnx.jit; load the rest by nnx.update", FLAX_NNX),
    "Grad": ("use nnx.grad on a function that takes the module", "transforms.md"),
}
OTHER_ABSENT = ("it is private, or no longer in Flax 0.12 either; see the public names", FLAX_NNX)

KEYWORDS: dict[str, str] = {
    "state_axes": "give in_axes an nnx.StateAxes({filter: axis, ...: axis})",
    "variable_axes": "give in_axes an nnx.StateAxes({filter: axis, ...: axis})",
    "wrt": "write argnums=nnx.DiffState(0, filter)",
}
"""Arguments of earlier versions."""

EQUINOX_LEFT: dict[str, str] = {
    "Module": "an immutable pytree, as nnx.Module with frozen=True is; a plain one changes in place",
    "nn": "the layers of nnxlite take batches, and rngs= instead of key=",
    "field": "belongs to eqx.Module; use nnx.field in an nnx.Module with frozen=True",
    "static_field": "belongs to eqx.Module; use nnx.field(static=True), with frozen=True",
    "AbstractVar": "belongs to eqx.Module; use abc.abstractmethod or an annotation",
    "AbstractClassVar": "belongs to eqx.Module; use an annotation",
    "Partial": "use functools.partial, or jax.tree_util.Partial where it has to be a pytree",
    "Enumeration": "use enum.Enum, or integers inside a transform",
    "internal": "private to Equinox: keep Equinox installed for it, or replace it",
    "debug": "keep Equinox installed for it, or use nnx.checkify and nnx.find_nan",
    "tree_serialise_leaves": "use nnx.checkpoint.save; the files differ",
    "tree_deserialise_leaves": "use nnx.checkpoint.restore; the files differ",
    "clear_caches": "use jax.clear_caches",
}
OTHER_EQUINOX = "keep Equinox installed for it, or replace it"
