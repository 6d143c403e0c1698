"""Every public function, class and method has the parameters and defaults of the reference."""

import functools
import inspect
import types

import pytest

import nnxlite as nnx
from tests.parity.layers import OLDER, ref

SUBMODULES = ("", "metrics", "optimizer", "spmd", "statelib", "traversals", "nn.attention")
BRIDGE = ("bridge", "bridge.module", "bridge.wrappers", "bridge.variables", "bridge.interop")
MORE = {
    "jit": {"donate", "max_traces"},
    "jit_partial": {"donate", "max_traces"},
    "dataclass": {"frozen"},
    "MultiHeadAttention.__init__": {"implementation"},
    "dot_product_attention": {"implementation"},
    "dot_product_attention_with_rope": {"attention_fn"},
}
"""Parameters of ours that the reference does not have."""
DIFFERENT = {
    "GraphDef.__init__": "made by `split`",
    "NodeStates.__init__": "made by its methods",
    "UpdateContext.__init__": "made by `update_context`",
    "spmd.get_var_pspec": "the name of its one parameter",
    "Optimizer.update": "takes keywords, as theirs does in spite of its signature",
    "PureState.__init__": "the name of a type",
    **dict.fromkeys(
        ("bridge.Scope.__init__", "bridge.module.Scope.__init__"), "made by `init` and `apply`"
    ),
    "bridge.module.ModuleStackEntry.__init__": "made by them, too",
}
CHANGED = {
    *("Module.sow", "Module.perturb", "MultiHeadAttention.__call__", "Sequential.__call__"),
    *("dot_product_attention", "PureState"),
}
"""What has other parameters in an older reference."""


def get(lib, path):
    return functools.reduce(getattr, path.split(".") if path else [], lib)


SIMPLE = (types.NoneType, types.EllipsisType, bool, int, float, str)


def parameters(lib, path):
    """The parameters of a function or method, apart from `self`."""
    found = list(inspect.signature(get(lib, path)).parameters.values())
    return found[inspect.isclass(get(lib, path.rpartition(".")[0])) :]


def is_simple(default):
    """Whether a default says something by itself: not so an object that stands for "not given"."""
    parts = default if isinstance(default, tuple) else (default,)
    return default is inspect.Parameter.empty or all(isinstance(part, SIMPLE) for part in parts)


def surface():
    """The functions, the classes and their methods that both libraries have, by path."""
    for module in SUBMODULES + BRIDGE:
        theirs, ours = get(ref, module), get(nnx, module)
        for name, value in vars(theirs).items():
            path = f"{module}.{name}".lstrip(".")
            known = not name.startswith("_") and callable(value) and hasattr(ours, name)
            again = module and vars(ref).get(name) is value
            if again or not known or not str(getattr(value, "__module__", "")).startswith("flax"):
                continue
            if not inspect.isclass(value):
                yield path
            elif not issubclass(value, BaseException) and "__init__" in vars(value):
                yield f"{path}.__init__"
            for method, function in vars(value).items() if inspect.isclass(value) else ():
                public = method == "__call__" or not method.startswith("_")
                if public and isinstance(function, (types.FunctionType, classmethod)):
                    yield f"{path}.{method}"


@pytest.mark.parametrize("path", sorted({*surface()} - {*DIFFERENT}))
def test_parameters_are_those_of_the_reference(path):
    if OLDER and path in CHANGED:
        pytest.skip("the installed reference is older than the one we follow")
    more = MORE.get(path, ())
    ours = [p for p in parameters(nnx, path) if p.name not in more]
    theirs = parameters(ref, path)
    if [p.name for p in theirs] == ["args", "kwargs"]:  # which says nothing
        return
    assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in theirs]
    simple = {p.name: p.default for p in theirs if is_simple(p.default)}
    assert {p.name: p.default for p in ours if p.name in simple} == simple
