"""Under `nnxlite.flax`, every name of every submodule of `flax.nnx` is found, or is listed here."""

from __future__ import annotations

import importlib
import json
import pkgutil
import types
from fnmatch import fnmatchcase

import pytest

from tests.flax.launching import printed

pytest.importorskip("flax")

LEFT_OUT = {
    "the bridge's files among themselves": """
        MODULE_CONTEXT ModuleBase ModuleContext ModuleState bdg_module bridge_variables bv
        current_linen_module has_setup nnx_eval_shape nnx_jit nnx_module to_linen_class""",
    "type variables": "A B C F G HA HB K KeyT M MA N P R S T TS W Fargs StrInt",
    "classes of the transforms' own, which annotate nothing": """
        BwdFn CheckifyFn CustomVjp CustomVjpFnWrapper ForiLoopBodyFn FwdFn GradFn JitFn LiftedModule
        PmapFn RNNBase ScanFn ShardMapFn Simple* Stage ValueMetadata VmapFn WhileLoopBodyFn
        WhileLoopCondFn Broadcasted general labeled resolve_kwargs split_inputs merge_inputs
        iteration""",
    "how a graph is flattened there": """
        ArrayRefDef ArrayRefOutput AuxData CallableProxy DataElem DelayedAccessor GRAPH_CONTEXT
        GenericPytree GetAttr GetItem GraphContext GraphFlatState GraphNodeImpl HasTag IndexesPytreeDef
        LEAF_ATTR LeafAttr ModuleDefApply NODE_ATTR NodeAttr NO_UPDATE NoUpdate NodeImplBase NotKey
        PYTREE_NODE_IMPL PythonRefMap PytreeNodeImpl REPEATED Repeated StaticCache StaticElem TreeNodeDef
        create_path_filters deprecated get_node_impl get_node_impl_for_type graph_pop is_node_module
        is_node_type is_pytree_node register_pytree_node_type static_cache tuple_init tuple_reduce
        variableslib MISSING""",
    "how arguments are split there": """
        ExtractIndex GraphDefState Mask Opaque OrderedDict TreeState Updates broadcast_prefix
        broadcast_prefix2 broadcast_prefix_map check_consistent_aliasing check_consistent_aliasing2
        check_no_aliases check_prefix check_same_variables clear_non_graph_nodes copy_var_structure
        extract filter_kwargs find from_tree2 get_updates insert mask_at replace_at slice_at snapshot
        to_masked to_tree2 treemap_copy_args update_carry_variables variable_changed""",
    "how text is made there": """
        ArrayRepr AttributeStatus COLOR CallInfo Color MappingReprMixin MutableArrayRepr NO_COLOR
        NestedStateRepr NoneDumper ObjectInfo PrettyMapping PrettySequence REPR_CONTEXT ReprContext
        SequenceReprMixin SizeBytes VariableRepr colorized filter_rng_streams render_object_constructor
        supports_color""",
    "Variables as values of JAX, which nnxlite needs nowhere": """
        AbstractVariable GetVariable HijaxVariable HijaxVariableMeta NewVariable OBJECT_CONTEXT
        ObjectContext PytreeState SetVariable VARIABLE_CONTEXT VarDefaultsContext VariableContext
        VariableEffect VariableMeta VariableQDD get_variable_p new_variable_p set_variable_p
        variable_effect""",
}
"""Names that Flax uses among its own files, by the reason why they are not here."""

NAMES = """
import importlib, json, sys
asked, missing = json.load(sys.stdin), {}
for path, names in asked.items():
    try:
        module = importlib.import_module(path)
    except ImportError:
        missing[path] = names
        continue
    assert module is sys.modules[path]
    missing[path] = [name for name in names if not hasattr(module, name)]
print(json.dumps(missing))
"""


def submodules(module: types.ModuleType) -> dict[str, types.ModuleType]:
    found = {module.__name__: module}
    for info in pkgutil.iter_modules(getattr(module, "__path__", ())):
        found |= submodules(importlib.import_module(f"{module.__name__}.{info.name}"))
    return found


def names_of_flax(module: types.ModuleType) -> list[str]:
    """Public names of a module that Flax defines: not what it imports from elsewhere."""

    names = []
    for name, value in vars(module).items():
        home = "__name__" if isinstance(value, types.ModuleType) else "__module__"
        if not name.startswith("_") and str(getattr(value, home, "")).startswith("flax.nnx"):
            names.append(name)
    return names


def test_every_name_is_found_by_its_path():
    asked = {
        path: names_of_flax(module)
        for path, module in submodules(importlib.import_module("flax.nnx")).items()
        if path != "flax.nnx.transforms.general"
    }
    missing = json.loads(printed("-m", "nnxlite.flax", "-c", NAMES, stdin=json.dumps(asked))[-1])
    listed = " ".join(LEFT_OUT.values()).split()
    for path, names in missing.items():
        assert not [n for n in names if not any(fnmatchcase(n, p) for p in listed)], path


STAR = "from flax.nnx import *; print(*(name for name in globals() if not name.startswith('_')))"


def test_a_star_import_brings_the_names_of_flax():
    program = ("-W", "ignore", "-c", STAR)
    ours, theirs = printed("-m", "nnxlite.flax", "-c", STAR), printed(*program)
    newer = {"RoPE", "dot_product_attention_with_rope"}  # since 0.12.12
    inside = {"deprecations"}  # which Flax happens to have imported
    assert set(ours[-1].split()) - newer == set(theirs[-1].split()) - newer - inside
