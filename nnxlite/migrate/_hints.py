"""What to do about names that stay: one line each, and the page that says more."""

from __future__ import annotations

import typing as tp

FLAX_NNX, LINEN = "migrating/flax-nnx.md", "migrating/linen.md"
EQUINOX, HAIKU, TORCH = "migrating/equinox.md", "migrating/haiku.md", "migrating/pytorch.md"

FLAX: dict[str, tuple[str, str]] = {
    "flax.linen": ("rewrite its modules as nnx.Module, or wrap them with nnx.bridge.ToNNX", LINEN),
    "flax.training.train_state": ("use nnx.Optimizer, which contains the step too", LINEN),
    "flax.training.checkpoints": ("use nnx.checkpoint.save and restore", "checkpoints.md"),
    "flax.training.orbax_utils": ("use nnx.checkpoint.save and restore", "checkpoints.md"),
    "flax.training.dynamic_scale": ("use nnx.DynamicLossScale", "training.md"),
    "flax.training": ("keep it with Flax installed, or copy the function", FLAX_NNX),
    "flax.core": ("use plain dicts; nnx.State is not a FrozenDict", FLAX_NNX),
    "flax.struct": (
        "use nnx.dataclass with nnx.Pytree, or jax.tree_util.register_dataclass",
        FLAX_NNX,
    ),
    "flax.serialization": ("use nnx.checkpoint or nnx.save_safetensors", "checkpoints.md"),
    "flax.jax_utils": ("use jax.device_put with a sharding, or nnx.shard", "sharding.md"),
    "flax.traverse_util": (
        "use nnx.to_flat_state for States; for nested dicts keep Flax installed",
        FLAX_NNX,
    ),
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
    "Grad": ("use nnx.grad on a function that takes the module", "transforms.md"),
}
OTHER_ABSENT = (
    "it is private, or no longer exists in Flax 0.12 either; see the public names",
    FLAX_NNX,
)

EQUINOX_SAFE = frozenset(
    """
    apply_updates branched_error_if combine error_if filter filter_checkpoint
    filter_closure_convert filter_custom_jvp filter_custom_vjp filter_eval_shape filter_grad
    filter_hessian filter_jacfwd filter_jacrev filter_jit filter_jvp filter_make_jaxpr filter_pmap
    filter_pure_callback filter_shard filter_value_and_grad filter_vjp filter_vmap if_array
    is_array is_array_like is_inexact_array is_inexact_array_like partition tree_at tree_check
    tree_equal tree_flatten_one_level tree_inference tree_pformat tree_pprint
    """.split()
)
"""Names of Equinox that mean the same in nnxlite, and take modules of both libraries."""

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

LINEN_CONSTRUCTS: dict[str, str] = {
    "Module": "nnx.Module: layers are made in __init__, with their input sizes and rngs",
    "compact": "no equivalent: move the layers to __init__",
    "nowrap": "not needed: methods of an nnx.Module are ordinary",
    "Dense": "nnx.Linear(in_features, out_features, rngs=rngs)",
    "DenseGeneral": "nnx.LinearGeneral(in_features, out_features, rngs=rngs)",
    "Einsum": "nnx.Einsum(einsum_str, kernel_shape, bias_shape, rngs=rngs)",
    "Conv": "nnx.Conv(in_features, out_features, kernel_size, rngs=rngs)",
    "ConvTranspose": "nnx.ConvTranspose(in_features, out_features, kernel_size, rngs=rngs)",
    "Embed": "nnx.Embed(num_embeddings, features, rngs=rngs)",
    "BatchNorm": "nnx.BatchNorm(num_features, rngs=rngs); model.train() and model.eval() switch it",
    "LayerNorm": "nnx.LayerNorm(num_features, rngs=rngs)",
    "RMSNorm": "nnx.RMSNorm(num_features, rngs=rngs)",
    "GroupNorm": "nnx.GroupNorm(num_features, num_groups, rngs=rngs)",
    "InstanceNorm": "nnx.InstanceNorm(num_features, rngs=rngs)",
    "WeightNorm": "nnx.WeightNorm(layer, rngs=rngs)",
    "SpectralNorm": "nnx.SpectralNorm(layer, rngs=rngs)",
    "Dropout": "nnx.Dropout(rate, rngs=rngs); model.train() and model.eval() switch it",
    "Sequential": "nnx.Sequential(*layers), with the layers as arguments",
    "PReLU": "nnx.PReLU()",
    "MultiHeadDotProductAttention": "nnx.MultiHeadAttention(num_heads, in_features, rngs=rngs)",
    "MultiHeadAttention": "nnx.MultiHeadAttention(num_heads, in_features, rngs=rngs)",
    "SelfAttention": "nnx.MultiHeadAttention(num_heads, in_features, rngs=rngs), called with x",
    "LSTMCell": "nnx.LSTMCell(in_features, hidden_features, rngs=rngs)",
    "OptimizedLSTMCell": "nnx.OptimizedLSTMCell(in_features, hidden_features, rngs=rngs)",
    "GRUCell": "nnx.GRUCell(in_features, hidden_features, rngs=rngs)",
    "SimpleCell": "nnx.SimpleCell(in_features, hidden_features, rngs=rngs)",
    "RNN": "nnx.RNN(cell)",
    "Bidirectional": "nnx.Bidirectional(forward, backward)",
    "scan": "nnx.scan over a module made by nnx.vmap, or nnx.stack_layers",
    "remat_scan": "nnx.scan of nnx.remat",
    "vmap": "nnx.vmap; variable_axes become nnx.StateAxes",
    "jit": "nnx.jit",
    "remat": "nnx.remat",
    "checkpoint": "nnx.remat",
    "cond": "nnx.cond",
    "switch": "nnx.switch",
    "while_loop": "nnx.while_loop",
    "custom_vjp": "nnx.custom_vjp",
    "grad": "nnx.grad",
    "value_and_grad": "nnx.value_and_grad",
    "map_variables": "no equivalent: nnx.recursive_map, nnx.vars_as, or change the Variables",
    "share_scope": "not needed: assign the same module to two attributes",
    "apply": "call the module",
    "init": "construct the module",
    "with_partitioning": "nnx.with_partitioning",
    "with_logical_partitioning": "nnx.with_partitioning and nnx.logical_axis_rules",
    "logical_axis_rules": "nnx.logical_axis_rules",
    "Partitioned": "an nnx.Param with out_sharding=",
    "get_partition_spec": "nnx.get_partition_spec",
    "tabulate": "nnx.tabulate",
    "initializers": "nnx.initializers",
}

HAIKU_CONSTRUCTS: dict[str, str] = {
    "transform": "not needed: construct the module; nnx.split gives what apply takes",
    "transform_with_state": "not needed: state is in Variables such as nnx.BatchStat",
    "without_apply_rng": "not needed: a call takes no key; layers contain their rngs",
    "Module": "nnx.Module: layers are made in __init__, with their input sizes and rngs",
    "get_parameter": "self.name = nnx.Param(...) in __init__",
    "get_state": "self.name = nnx.Variable(...) in __init__, read by self.name[...]",
    "set_state": "self.name[...] = value",
    "next_rng_key": "self.rngs.params() or another stream of nnx.Rngs",
    "next_rng_keys": "jax.random.split(rngs())",
    "Linear": "nnx.Linear(in_features, out_features, rngs=rngs)",
    "Conv1D": "nnx.Conv(in_features, out_features, (k,), rngs=rngs)",
    "Conv2D": "nnx.Conv(in_features, out_features, (k, k), rngs=rngs)",
    "Conv3D": "nnx.Conv(in_features, out_features, (k, k, k), rngs=rngs)",
    "Conv2DTranspose": "nnx.ConvTranspose(in_features, out_features, (k, k), rngs=rngs)",
    "BatchNorm": "nnx.BatchNorm(num_features, rngs=rngs); momentum is decay_rate",
    "LayerNorm": "nnx.LayerNorm(num_features, rngs=rngs)",
    "RMSNorm": "nnx.RMSNorm(num_features, rngs=rngs)",
    "GroupNorm": "nnx.GroupNorm(num_features, num_groups, rngs=rngs)",
    "Embed": "nnx.Embed(num_embeddings, features, rngs=rngs)",
    "dropout": "nnx.Dropout(rate, rngs=rngs) as a layer",
    "Sequential": "nnx.Sequential(*layers), with the layers as arguments",
    "MultiHeadAttention": "nnx.MultiHeadAttention(num_heads, in_features, rngs=rngs)",
    "LSTM": "nnx.RNN(nnx.LSTMCell(in_features, hidden_features, rngs=rngs))",
    "GRU": "nnx.RNN(nnx.GRUCell(in_features, hidden_features, rngs=rngs))",
    "VanillaRNN": "nnx.RNN(nnx.SimpleCell(in_features, hidden_features, rngs=rngs))",
    "dynamic_unroll": "nnx.RNN(cell)",
    "static_unroll": "nnx.RNN(cell, unroll=length)",
    "Flatten": "x.reshape(x.shape[0], -1)",
    "avg_pool": "nnx.avg_pool",
    "max_pool": "nnx.max_pool",
    "nets": "write the network as an nnx.Module; nnx.MLP for nets.MLP",
    "initializers": "nnx.initializers",
    "vmap": "nnx.vmap",
    "scan": "nnx.scan",
    "remat": "nnx.remat",
    "grad": "nnx.grad",
    "value_and_grad": "nnx.value_and_grad",
    "cond": "nnx.cond",
    "switch": "nnx.switch",
    "jit": "nnx.jit",
    "lift": "not needed: a module may contain any other",
    "multi_transform": "not needed: one module with several methods",
    "data_structures": "nnx.to_flat_state, nnx.split with filters",
    "experimental": "see nnx.tabulate, nnx.remat_layers and nnx.stack_layers",
}

TORCH_CONSTRUCTS: dict[str, str] = {
    "nn.Module": "nnx.Module, without super().__init__(); forward becomes __call__",
    "nn.Parameter": "nnx.Param(array)",
    "nn.Linear": "nnx.Linear(in, out, rngs=rngs); the weight is transposed",
    "nn.Conv1d": "nnx.Conv(in, out, (k,), rngs=rngs); channels last",
    "nn.Conv2d": "nnx.Conv(in, out, (k, k), padding=..., rngs=rngs); channels last",
    "nn.Conv3d": "nnx.Conv(in, out, (k, k, k), padding=..., rngs=rngs); channels last",
    "nn.ConvTranspose2d": "nnx.ConvTranspose(in, out, (k, k), rngs=rngs); channels last",
    "nn.Embedding": "nnx.Embed(num_embeddings, features, rngs=rngs)",
    "nn.BatchNorm1d": "nnx.BatchNorm(features, momentum=1 - m, epsilon=1e-5, rngs=rngs)",
    "nn.BatchNorm2d": "nnx.BatchNorm(features, momentum=1 - m, epsilon=1e-5, rngs=rngs)",
    "nn.LayerNorm": "nnx.LayerNorm(features, epsilon=1e-5, rngs=rngs)",
    "nn.RMSNorm": "nnx.RMSNorm(features, epsilon=eps, rngs=rngs)",
    "nn.GroupNorm": "nnx.GroupNorm(features, num_groups, epsilon=1e-5, rngs=rngs)",
    "nn.Dropout": "nnx.Dropout(rate, rngs=rngs)",
    "nn.Sequential": "nnx.Sequential(*layers)",
    "nn.ModuleList": "a list of modules, or nnx.List",
    "nn.ModuleDict": "a dict of modules, or nnx.Dict",
    "nn.MultiheadAttention": "nnx.MultiHeadAttention(num_heads, in_features, rngs=rngs)",
    "nn.LSTM": "nnx.RNN(nnx.LSTMCell(in_features, hidden_features, rngs=rngs))",
    "nn.GRU": "nnx.RNN(nnx.GRUCell(in_features, hidden_features, rngs=rngs))",
    "nn.Identity": "nnx.Identity()",
    "nn.ReLU": "nnx.relu, a function",
    "nn.GELU": "functools.partial(nnx.gelu, approximate=False), a function",
    "nn.SiLU": "nnx.silu, a function",
    "nn.Softmax": "nnx.softmax, a function",
    "nn.CrossEntropyLoss": "optax.softmax_cross_entropy_with_integer_labels(...).mean()",
    "nn.MSELoss": "jnp.mean((y - target) ** 2)",
    "nn.functional": "jax.nn, jax.lax, and the activations of nnx",
    "nn.init": "nnx.initializers, given to the layer as kernel_init=",
    "optim": "optax, in nnx.Optimizer(model, tx, wrt=nnx.Param)",
    "no_grad": "not needed: gradients are computed where nnx.grad says so",
    "manual_seed": "nnx.Rngs(seed), given to the layers",
    "save": "nnx.checkpoint.save",
    "load": "nnx.checkpoint.restore; weights of torch by nnx.checkpoint.Mapping",
    "compile": "nnx.jit",
    "device": "jax.devices(), jax.device_put",
    "utils.data": "keep it, with a collate function that gives NumPy arrays",
    "utils.checkpoint": "nnx.remat",
    "nn.parallel": "nnx.shard; one program sees all devices",
    "distributed": "nnx.distributed",
}


def longest(path: str, table: tp.Container[str]) -> str:
    """The longest beginning of a dotted name that is in a table, or an empty text."""
    while path and path not in table:
        path = path.rpartition(".")[0]
    return path
