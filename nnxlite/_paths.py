"""The reference's submodule paths, for names that are defined elsewhere here.

`from flax.nnx.nn.linear import Conv` is common; with `nnxlite` in place of `flax.nnx` it works as well.
"""

from __future__ import annotations

import importlib
import sys
import types

from nnxlite._state._definition import diff
from nnxlite.graph._graphdef import Static, VariableRecord

MODULES = (
    "filterlib graphlib initializers metrics module object optimizer pytreelib rnglib spmd statelib "
    "traversals variablelib"
)
"""Attributes of the package that are modules, importable under these names of the reference as well."""

PATHS: dict[str, str] = {
    "extract": "NodeStates PrefixMapping apply_updates default_split_fn from_tree is_tree_node "
    "merge_tree_node prefix to_tree",
    "filterlib": "Key",
    "graphlib": "A ApplyCaller B C F FlatState Key Leaf MergeContext Node SplitContext State "
    "IndexMap RefMap UpdateContext UpdateContextManager V Variable as_pure "
    "cached_partial current_update_context flatten iter_module_children "
    "map_state merge_context pure "
    "set_graph_mode set_graph_updates split_context unflatten update_context "
    "NodeDef NodeRef is_array_ref is_graph_node is_node is_node_leaf jax_to_nnx_path "
    "register_graph_node_type",
    "helpers": "A ApplyCaller GraphDef M Module State Variable",
    "module": "A B F Key M ModuleMeta P PytreeMeta R S State V first_from iter_children split_state",
    "nn.attention": "LinearGeneral MultiHeadAttention RoPE default_bias_init default_kernel_init "
    "dot_product_attention_with_rope first_from",
    "nn.linear": "Conv ConvTranspose Embed canonicalize_padding default_embed_init first_from",
    "nn.normalization": "SpectralNorm WeightNorm first_from",
    "nn.recurrent": "GRUCell LSTMCell Linear OptimizedLSTMCell SimpleCell default_bias_init "
    "default_kernel_init",
    "nn.stochastic": "first_from",
    "proxy_caller": "ApplyCaller",
    "pytreelib": "A Data ObjectMeta P Static Variable data dataclass register_data_type static",
    "rnglib": "A F Key RngCount RngKey RngState Rngs Variable",
    "spmd": "PARTITION_NAME add_axis get_var_pspec remove_axis",
    "statelib": "A K Key S V",
    "transforms.autodiff": "DiffState custom_vjp grad jvp remat value_and_grad vjp",
    "transforms.compilation": "Compiled JitWrapped Lowered StateSharding Traced jit jit_partial "
    "shard_map",
    "transforms.iteration": "Carry StateAxes fori_loop pmap scan transform_metadata vmap while_loop",
    "transforms.transforms": "checkify cond eval_shape make_jaxpr switch",
    "variablelib": "MISSING A B C F V use_eager_sharding using_eager_sharding",
}
"""For each submodule, further names in it; a submodule that does not exist is made of these."""

SOURCES = (
    "_base.jax transforms._trees transforms._compiles transforms._jit sharding._annotations "
    "boundary._context graph._kinds graph._graphdef graph._walk variables._definition "
    "objects._module objects._pytree objects._rngs nn.conv nn.embed nn.linear"
).split()
"""Where these names are found, if not at the root."""


def install(package: types.ModuleType) -> None:
    """Make `MODULES`, and the names of `PATHS`, importable by those paths below a package."""
    for name in MODULES.split():
        sys.modules[f"{package.__name__}.{name}"] = getattr(package, name)
    sources = [package, *[importlib.import_module(f"{package.__name__}.{x}") for x in SOURCES]]
    for path, names in PATHS.items():
        full = f"{package.__name__}.{path}"
        module = sys.modules.get(full)
        if module is None:
            module = sys.modules[full] = types.ModuleType(full, f"`nnx.{path}`: {names}.")
            parent, _, name = full.rpartition(".")
            setattr(sys.modules[parent], name, module)
        for name in names.split():
            if not hasattr(module, name):
                source = next(source for source in sources if hasattr(source, name))
                setattr(module, name, getattr(source, name))
    for path, name, value in (  # at the root other things have these names
        ("graphlib", "Static", Static),
        ("graphlib", "VariableDef", VariableRecord),
        ("statelib", "diff", diff),
    ):
        setattr(sys.modules[f"{package.__name__}.{path}"], name, value)
