"""Submodules by the reference's paths: what they have in nnxlite, and under `nnxlite.flax`."""

import importlib
import json
import pkgutil
import types
from fnmatch import fnmatchcase

import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.flax.launching import printed
from tests.parity.layers import ref
from tests.parity.programs import Lines


def submodules(module):
    found = {module.__name__: module}
    for info in pkgutil.iter_modules(getattr(module, "__path__", ())):
        found |= submodules(importlib.import_module(f"{module.__name__}.{info.name}"))
    return found


MODULES = submodules(ref)


@pytest.mark.parametrize("path", [path for path in MODULES if path != "flax.nnx"])
def test_a_module_has_the_public_names_that_are_defined_there(path):
    for name, value in vars(MODULES[path]).items():
        here = getattr(value, "__module__", None) == path
        if here and hasattr(nnx, name) and value is vars(ref).get(name):
            ours = importlib.import_module(path.replace("flax.nnx", "nnxlite"))
            assert getattr(ours, name) is getattr(nnx, name), name


BORROWED = """
    module.first_from module.iter_children module.split_state module.State nn.attention.first_from
    nn.attention.default_kernel_init nn.attention.LinearGeneral nn.linear.default_kernel_init
    nn.linear.default_bias_init nn.linear.default_embed_init nn.linear.first_from
    nn.normalization.first_from nn.recurrent.default_kernel_init nn.recurrent.default_bias_init
    nn.recurrent.Linear nn.stochastic.first_from
"""
"""Names that layers of one's own take from the modules of others."""


@pytest.mark.parametrize("name", BORROWED.split())
def test_what_layers_of_ones_own_borrow(name):
    path, _, name = name.rpartition(".")
    for lib in (nnx, ref):
        assert callable(getattr(importlib.import_module(f"{lib.__name__}.{path}"), name))


lines = Lines()
lines(
    "used",
    lambda lib: {"x": jnp.arange(24).reshape(2, 3, 4), "flip": lib.nn.recurrent.flip_sequences},
    """
    [lib.nn.linear.canonicalize_padding(p, 2) for p in ("SAME", 1, (1, 2), [(0, 1), 3])]
    lib.nn.linear.canonicalize_padding((1, 2, 3), 2)
    lib.nn.linear.canonicalize_padding(None, 2)
    lib.nn.linear.canonicalize_padding(1.5, 2)
    lib.module.first_from(None, False, True, error_msg="which?")
    flip(x, None, num_batch_dims=1, time_major=False)
    flip(x, jnp.array([2, 3]), num_batch_dims=1, time_major=False)
    flip(x, jnp.array([1, 2, 2]), num_batch_dims=1, time_major=True)
    flip(x, jnp.array([[1, 2, 4], [3, 0, 2]]), num_batch_dims=2, time_major=False)
    lib.nn.recurrent.modified_orthogonal(jax.random.key(0), (3, 4), jnp.float32)
    lib.nn.recurrent.modified_orthogonal(jax.random.key(0), (3, 4), jnp.bfloat16)
    """,
)


test_line = lines.test()


# Under `nnxlite.flax` -----------------------------------------------------------------------------

LEFT_OUT = {
    "the bridge's files among themselves": """
        ModuleBase ModuleState bdg_module bridge_variables bv
        current_linen_module has_setup nnx_eval_shape nnx_jit nnx_module to_linen_class""",
    "type variables": "A B C F G HA HB K KeyT M MA N P R S T TS W Fargs StrInt",
    "classes of the transforms' own, which annotate nothing": """
        *Fn CustomVjpFnWrapper CustomVjp LiftedModule RNNBase Simple* Stage ValueMetadata Broadcasted
        general labeled resolve_kwargs split_inputs merge_inputs iteration""",
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
asked, missing, star = json.load(sys.stdin), {}, {}
for path, names in asked.items():
    try:
        module = importlib.import_module(path)
    except ImportError:
        missing[path] = names
        continue
    assert module is sys.modules[path]
    missing[path] = [name for name in names if not hasattr(module, name)]
exec("from flax.nnx import *", star)
print(json.dumps([missing, list(star)]))
"""


def names_of_flax(module):
    """Public names of a module that Flax defines: not what it imports from elsewhere."""
    names = []
    for name, value in vars(module).items():
        home = "__name__" if isinstance(value, types.ModuleType) else "__module__"
        if not name.startswith("_") and str(getattr(value, home, "")).startswith("flax.nnx"):
            names.append(name)
    return names


def test_every_name_of_flax_is_found_by_its_path_or_listed_and_a_star_import_brings_them():
    asked = {path: names_of_flax(module) for path, module in MODULES.items()}
    del asked["flax.nnx.transforms.general"]
    found = printed("-m", "nnxlite.flax", "-c", NAMES, stdin=json.dumps(asked))[-1]
    missing, ours = json.loads(found)
    listed = " ".join(LEFT_OUT.values()).split()
    for path, names in missing.items():
        assert not [n for n in names if not any(fnmatchcase(n, p) for p in listed)], path
    theirs = printed("-W", "ignore", "-c", "from flax.nnx import *; print(*globals())")[-1].split()
    newer = {"RoPE", "dot_product_attention_with_rope"}  # since 0.12.12
    inside = {"deprecations"}  # which Flax happens to have imported
    ours, theirs = ({n for n in names if n[0] != "_"} for names in (ours, theirs))
    assert ours - newer == theirs - newer - inside
