"""`nnxlite.flax`: a program that imports `flax.nnx` gets nnxlite, by every way of starting it.

Also what libraries use of Flax beyond its public names (`private_names.py` is a program that does), what
programs print under the hook, and what pickles contain.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from tests.flax.launching import ROOT, SITE, printed, python

HAS_FLAX = importlib.util.find_spec("flax") is not None
needs_flax = pytest.mark.skipif(not HAS_FLAX, reason="needs Flax")

MODULES = """
import flax.nnx as nnx, flax.nnx.nn.linear, importlib, inspect, pickle, sys
from flax import nnx as again
from flax.nnx import Module, graph, statelib
from flax.nnx.nn.linear import Conv
import nnxlite
assert nnx is again and nnx.__name__ == "flax.nnx" and sys.modules["flax"].nnx is nnx
assert (nnx.Linear, Module, Conv) == (nnxlite.Linear, nnxlite.Module, nnxlite.Conv)
assert sys.modules["flax.nnx.graph"] is graph is nnx.graph and graph.split is nnx.split
assert nnx.nn.recurrent.initializers is nnx.nn.initializers is nnx.initializers
assert nnx.filter_jit is nnxlite.filter_jit and nnx.tabulate is nnxlite.tabulate
for name in dir(nnx):
    assert name == "bridge" or hasattr(nnx, name), name
assert importlib.reload(nnx) is nnx and nnx.Linear is nnxlite.Linear
written = pickle.dumps(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
assert b"flax" not in written and type(pickle.loads(written)) is nnx.Linear
assert inspect.getmodule(nnx.Linear).__name__ == "nnxlite.nn.linear"
assert nnx.nn.linear.__file__ == nnxlite.nn.linear.__file__ and nnx.__path__ == []
inspect_before = inspect
from flax.nnx import *
assert Linear is nnxlite.Linear and inspect is inspect_before and filter(None, [1])

# A name that is replaced is replaced where the layers look it up.
from unittest import mock
original = nnxlite.nn.normalization.lax
layers, plain = flax.nnx.nn.attention, nnxlite.nn.attention
with mock.patch("flax.nnx.nn.attention.combine_masks", 1), mock.patch.object(nnx, "own", 2, create=True):
    assert plain.combine_masks == layers.combine_masks == 1 and nnx.own == 2
assert plain.combine_masks is layers.combine_masks is nnx.combine_masks and not hasattr(nnx, "own")
with mock.patch("flax.nnx.nn.attention.lax", 4):
    assert plain.lax == 4
assert plain.lax is layers.lax is original and nnx.nn.linear is nnxlite.nn.linear
with mock.patch.object(layers, "split", 3, create=True):  # a name of another module
    assert layers.split == 3 and nnx.split is nnxlite.split
assert layers.split is nnxlite.split

# A function that names modules of ours and nothing else compiles once: they are known as such.
traces = []
apply = nnx.jit(lambda f, x: (traces.append(1), f(x))[1], static_argnums=0)
for _ in range(3):
    apply(lambda x: nnx.relu(x), 1.0)
assert len(traces) == 1

try:
    from flax.nnx import Lniear
except ImportError as error:
    assert "cannot import name 'Lniear' from 'flax.nnx'" in str(error)
for name in ("flax.nnx.nothing", "flax.nnx.nn._normalizing"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert str(error) == f"No module named {name!r}"
assert importlib.util.find_spec("flax.nnx.nothing") is None
for name, attribute in (("flax.nnx.graph", "nothing"), ("flax.nnx", "__nothing__")):
    try:
        getattr(sys.modules[name], attribute)
    except AttributeError as error:
        assert str(error) == f"module {name!r} has no attribute {attribute!r}"
import nnxlite.flax
nnxlite.flax.install()
nnxlite.flax.load_ipython_extension(None)
status = nnxlite.flax.status()
assert {"flax.nnx.Lniear", "flax.nnx.nothing", "flax.nnx.graph.nothing"} <= status.missing.keys()
assert "flax.nnx.nn.linear" in status.replaced
assert status.missing["flax.nnx.graph.nothing"][0][0] == "__main__"
assert f"flax.nnx is nnxlite {nnxlite.__version__}" in repr(status)
print("right")
"""


def path_of(folder):
    return {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}


PROGRAM = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
from flax import nnx
import jax
hasattr(nnx, "nothing")
print(sys.argv[1:], jax.device_count(), sys.flags.quiet, sys.flags.utf8_mode, __name__)
print([f for f in sys.path if "_site" in f])
"""


def test_a_script_a_module_and_code_are_run_as_by_python(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "sitecustomize.py").write_text("print('the next sitecustomize')")
    path = path_of(tmp_path)
    first = "the next sitecustomize"
    for flags, program in (
        (["-q", "-X", "utf8", "-m", "nnxlite.flax"], [str(tmp_path / "program.py")]),
        (["-qXutf8", "-mnnxlite.flax", "--report"], ["-m", "program"]),
        (["-Xutf8", "-qm", "nnxlite.flax"], ["-c", PROGRAM]),
    ):
        done = python(*flags, *program, "a", "--report", **path)
        lines = done.stdout.splitlines()
        assert lines == [first, first, "['a', '--report'] 3 1 1 __main__", "[]"], done.stderr
        reported = "Missing: flax.nnx.nothing, asked for by __main__ line 6." in done.stderr
        assert reported == ("--report" in flags)


CHILDREN = """
import multiprocessing, subprocess, sys
from concurrent.futures import ProcessPoolExecutor

def name():
    from flax import nnx
    import nnxlite
    return nnx.__name__ if nnx.Linear is nnxlite.Linear else "another"

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
            print(pool.submit(name).result())
    code = "from flax import nnx; import nnxlite; print(nnx.Linear is nnxlite.Linear)"
    subprocess.run([sys.executable, "-c", code])
"""


def test_child_processes(tmp_path):
    (tmp_path / "script.py").write_text(CHILDREN)
    done = python("-m", "nnxlite.flax", "--report", str(tmp_path / "script.py"))
    assert done.stdout.splitlines() == ["flax.nnx", "flax.nnx", "True"], done.stderr
    assert done.stderr.count("Nothing was missing.") == 1, done.stderr  # not in the children


def test_the_plugin_of_pytest_and_its_workers(tmp_path):
    test = "from flax import nnx\nimport nnxlite\ndef test():\n    assert nnx.jit is nnxlite.jit\n"
    (tmp_path / "test_it.py").write_text(test)
    arguments = ["-q", "-W", "error", "-p", "nnxlite.flax", "--rootdir", str(tmp_path)]
    arguments += ["-n", "1"] if importlib.util.find_spec("xdist") else []
    assert "1 passed" in printed("-m", "pytest", *arguments, str(tmp_path))[-1]


OTHER_VERSION = """
import importlib.metadata
importlib.metadata.version = lambda name: "0.13.0"
"""
AS_MODULE, LATE = ("-m", "nnxlite.flax", "-c", "pass"), "from flax import nnx; import nnxlite.flax"
OTHER = ("-c", OTHER_VERSION + "from flax import nnx")
STANDS_IN = "nnxlite.flax stands in for flax.nnx of Flax"
FIRST = "nnxlite.flax must come before the first import of flax.nnx: start the program with"
NO_ENVIRONMENT = f"""
import sys
sys.path[:0] = {[str(ROOT), *sys.path]}
from nnxlite.flax import __main__ as m
sys.exit(m.main(['x.py']))
"""
WRONG = {  # arguments, what `sitecustomize` does, the exit status, and how the message begins
    "no program": (("-m", "nnxlite.flax"), "", 2, "usage: python"),
    "no environment": (("-E", "-c", NO_ENVIRONMENT), "", 2, "nnxlite.flax needs PYTHONPATH and"),
    "another version": (AS_MODULE, OTHER_VERSION, 2, f"{STANDS_IN} 0.12, and Flax 0.13.0 is"),
    "one that is seen late": (OTHER, None, 1, f"ImportError: {STANDS_IN}"),
    "after Flax": (AS_MODULE, "from flax import nnx", 2, FIRST),
    "in a program after Flax": (("-c", LATE), "", 1, f"ImportError: {FIRST}"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_process_that_cannot_begin_says_why(name, tmp_path):
    if "after" in name and not HAS_FLAX:
        pytest.skip("needs Flax")
    arguments, start, status, text = WRONG[name]
    (tmp_path / "sitecustomize.py").write_text(start or "")
    hook = {"PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}", "NNXLITE_FLAX": "1"}
    done = python(*arguments, **(hook if start is None else path_of(tmp_path)))
    line = done.stderr.splitlines()[-1 if status == 1 else 0]
    assert done.returncode == status and line.startswith(text), done.stderr


@pytest.mark.parametrize("program", [["nothing.py"], ["-m", "no_such.module"]], ids=" ".join)
def test_of_a_program_that_is_not_there_python_says_so(program):
    ours, pythons = python("-m", "nnxlite.flax", *program), python(*program)
    assert ours.returncode == pythons.returncode != 0
    assert ours.stderr.splitlines()[-1] == pythons.stderr.splitlines()[-1]


WITHOUT = """
import importlib.machinery, importlib.metadata, importlib.util
find = importlib.machinery.PathFinder.find_spec
hide = lambda name, *args, **kw: None if name == "flax" else find(name, *args, **kw)
importlib.machinery.PathFinder.find_spec = hide
def version(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.version = version

import nnxlite
assert "bridge" not in dir(nnxlite)
try:
    nnxlite.bridge
except ImportError as error:
    assert str(error).endswith("and Flax is not installed: pip install flax")
else:
    raise AssertionError("nnxlite.bridge")
import nnxlite.flax
import flax
from flax import nnx
from flax.nnx import *
assert flax.nnx is nnx and nnx.__name__ == "flax.nnx" and not hasattr(flax, "linen")
sentence = "Flax is not installed, so that the package `flax` has `nnx` alone, which is nnxlite: flax.li"
for code in ("import flax.linen", "from flax import linen", "from flax.linen import Dense"):
    try:
        exec(code)
    except (ImportError, AttributeError) as error:
        assert str(error).startswith(sentence), error
    else:
        raise AssertionError(code)
try:
    flax.linen
except AttributeError as error:
    assert str(error).startswith(sentence)
assert "Flax is not installed." in str(nnxlite.flax.status())
print("right")
"""


def test_where_flax_is_not_installed():
    assert printed("-c", WITHOUT) == ["right"]


SETTINGS = """
from flax import config
from flax import nnx
import jax
nested = nnx.Dict(a=nnx.Dict(b=nnx.Dict(c=1)))
class Own(nnx.Module):
    def __init__(self):
        self.part = nnx.Param(1.0)
    def __call__(self):
        return nnx.Module.sow(self, nnx.Intermediate, "seen", 1)
print(nnx.set_graph_mode.current_value(), nnx.set_graph_updates.current_value())
print(nnx.using_eager_sharding(), "..." in repr(nested), Own()())
print(repr(nnx.Param(1.0)), repr(nnx.Param(1.0, eager_sharding=False)))
print([len(jax.tree.leaves(x)) for x in (Own(), nnx.Linear(1, 1, rngs=nnx.Rngs(0)))])
for name, value, read in (
    ("nnx_graph_mode", False, nnx.set_graph_mode.current_value),
    ("nnx_graph_updates", False, nnx.set_graph_updates.current_value),
    ("flax_always_shard_variable", False, nnx.using_eager_sharding),
    ("flax_max_repr_depth", 1, lambda: "..." in repr(nested)),
):
    config.update(name, value)
    print(name, read())
with config.temp_flip_flag("always_shard_variable", True):
    print(nnx.using_eager_sharding())
with nnx.set_graph_mode(True):
    print(nnx.set_graph_mode.current_value())
config.update("flax_max_repr_depth", None)
print("..." in repr(nested), nnx.using_eager_sharding())
"""

VARIABLES = {
    **dict.fromkeys(("NNX_GRAPH_MODE", "NNX_GRAPH_UPDATES", "FLAX_ALWAYS_SHARD_VARIABLE"), "0"),
    **dict.fromkeys(("FLAX_MAX_REPR_DEPTH", "NNX_SOW_CAPTURE_NOOP"), "1"),
    "FLAX_PYTREE_MODULE": "0",
}


@needs_flax
def test_options_of_flax_have_their_effect():
    """Beside Flax in the same versions, with no variable and with all of them."""
    for variables in ({}, VARIABLES):
        program = ("-W", "ignore", "-c", SETTINGS)
        there = printed(*program, **variables)
        assert printed("-m", "nnxlite.flax", "-c", SETTINGS, **variables) == there


# Beyond public names -------------------------------------------------------------------------------

PRIVATE = Path(__file__).with_name("private_names.py")


@needs_flax
def test_the_same_program_prints_the_same_under_flax():
    lines = printed("-W", "ignore", "-m", "nnxlite.flax", str(PRIVATE))
    assert len(lines) > 50 and lines == printed("-W", "ignore", str(PRIVATE))


OTHERS = """
import copy, pickle, sys, warnings
import jax, jax.numpy as jnp
from flax import nnx
from flax.nnx import deprecations, ids
import flax.nnx.nn.linear

assert ids.uuid() != ids.uuid() and ids.UUID(1) == ids.UUIDManager()() and hash(ids.UUID(1))

@deprecations.deprecated
def current(x):
    return x + 1

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert current(1) == 2 and current.__name__ == "current"
assert [str(w.message) for w in caught] == ["This function is deprecated. Use current instead."]

# A Variable with a way to pickle of its own, which fills the private slots.
class Weight(nnx.Variable):
    def __getstate__(self):
        state = nnx.Variable.__getstate__(self)
        return {"value": state["_raw_value"], "metadata": state["_var_metadata"]}
    def __setstate__(self, state):
        assert not hasattr(self, "_var_metadata")
        object.__setattr__(self, "_raw_value", state["value"])
        object.__setattr__(self, "_trace_state", nnx.tracers.TraceState())
        object.__setattr__(self, "_var_metadata", state["metadata"])

sys.modules["__main__"].Weight = Weight
weight = Weight(jnp.ones(2), tag="x")
for other in (pickle.loads(pickle.dumps(weight)), copy.deepcopy(weight)):
    assert other.tag == "x" and other[...].tolist() == [1, 1]
    assert other._trace_state == weight._trace_state
live = weight._var_metadata
live.update(more=1)
assert weight.more == 1 and live == weight._var_metadata and {**live} == live.copy() == live | {}
assert live["tag"] == "x" and len(live) == len([*live]) and "tag" in repr(live)
assert pickle.loads(pickle.dumps(live)) == live.copy()
weight._var_metadata = {"tag": "y"}
assert weight.get_metadata(exclude_required=True) == {"tag": "y"} and not weight.ref

# The statuses of attributes; another status than before.
class Net(nnx.Module):
    def __init__(self):
        self.rate = 0.5

net = Net()
assert jax.tree.leaves(net) == []
net._pytree__nodes = net._pytree__nodes.update({"rate": True, "absent": True})
assert jax.tree.leaves(net) == [0.5] and hash(net._pytree__nodes) and "rate" in repr(net._pytree__nodes)

# The trace of an object, read and given.
states = []
def make(x):
    inner = Net()
    assert inner._pytree__state.trace_state.is_valid() and not net._pytree__state.trace_state.is_valid()
    inner._pytree__state = net._pytree__state
    states.append(inner)
    return x
jax.eval_shape(make, 1.0)
states[0].rate = 1.0
assert "eager" in repr(states[0]._pytree__state) and states[0].rate == 1.0
assert pickle.loads(pickle.dumps(net._pytree__state._trace_state)).is_valid()
print("right")
"""


# Programs, all in one process ----------------------------------------------------------------------

RULES = """
from flax import linen, nnx
import jax.numpy as jnp
weights = nnx.Param(jnp.ones((8, 8)), out_sharding=("embed", "mlp"), eager_sharding=False)
specs = []
step = nnx.jit(lambda p: specs.append(str(nnx.get_partition_spec(p).get_value())) or p + 1)
step(weights)
with linen.logical_axis_rules((("embed", "x"), ("mlp", "y"))):
    step(weights), step(weights)
step(weights)
print(*specs)
with linen.logical_axis_rules(("embed", "x")):
    pass
"""
UNREADABLE = """
from flax.nnx import graphlib
graphlib.GraphDef.__new__(graphlib.GraphDef)  # which a pickle of Flax begins with
"""
STATUSES = """
import jax
from flax import nnx
node = nnx.Dict()
vars(node).update({"_pytree__nodes": {"size": True, "_pytree__nodes": False}, "size": 3, "name": "x"})
print(list(nnx.state(node)), jax.tree.leaves(node), nnx.clone(node).name)
"""
WARNINGS = """
import jax.numpy as jnp
from flax import nnx
class Schedule:  # no Module, no pytree: static
    def __init__(self): self.betas = jnp.ones(2)
class Net(nnx.Module):
    def __init__(self): self.schedule, self.rngs = Schedule(), nnx.Rngs(0)
model = nnx.merge(*nnx.split(Net()))
draw = nnx.vmap(lambda net, x: x + net.rngs.noise.normal(()), in_axes=(None, 0))
print(draw(model, jnp.ones(2)).shape)
"""
STACKED = """
import jax
import jax.numpy as jnp
from flax import nnx
make = lambda key: nnx.Param(jnp.zeros((4, 2)), out_sharding=("rows", None))
named = nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: "layers"})
keys = jnp.arange(3)
for make in (nnx.vmap(make), nnx.scan(make, in_axes=0, out_axes=0), named):
    print(make(keys).get_metadata()["out_sharding"])
"""
PRINTED = {
    "modules are those of nnxlite by the names of Flax": (MODULES, "right\n"),
    "what else is private is there": (OTHERS, "right\n"),
    "the rules of Linen are part of the key of a program": (
        RULES,
        *("P('embed', 'mlp') P('x', 'y')\n", "ValueError: A logical axis rule is a pair"),
    ),
    "a GraphDef of Flax says what to pickle": (
        UNREADABLE,
        "TypeError: A pickled GraphDef of Flax cannot be read here: pickle the state",
    ),
    "statuses written to the dict of an object count": (STATUSES, "['size'] [3] x\n"),
    "warnings that Flax does not give are logged": (
        WARNINGS,
        *("(2,)", "'schedule.betas' is a float32[2] in a Schedule"),
        "The random stream 'default'",
    ),
    "an axis is named in annotations only where the program asks for it": (
        STACKED,
        "('rows', None)\n('rows', None)\n('layers', 'rows', None)\n",
    ),
}
"""Programs, and texts that they print or raise."""

RUN = """
import contextlib, io, json, sys, traceback, warnings
warnings.simplefilter("error", UserWarning)
import nnxlite.flax
found = {}
for name, program in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()) as found[name]:
        with contextlib.redirect_stderr(found[name]):
            try:
                exec(program, {"__name__": "__main__"})
            except Exception:
                traceback.print_exc()
print(json.dumps({name: text.getvalue() for name, text in found.items()}))
"""


@pytest.fixture(scope="module")
def texts():
    """What the programs print, except those that need Flax where it is not installed."""
    programs = {name: source for name, (source, *_) in PRINTED.items()}
    chosen = {name: text for name, text in programs.items() if HAS_FLAX or "linen" not in text}
    return json.loads(printed("-c", RUN, stdin=json.dumps(chosen))[-1])


@pytest.mark.parametrize("name", PRINTED)
def test_a_program_prints_what_it_should(name, texts):
    if name not in texts:
        pytest.skip("needs Flax")
    assert [text for text in PRINTED[name][1:] if text not in texts[name]] == [], texts[name]


WRITE = """
import nnxlite.flax, optax, pickle, sys
from flax import nnx
model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
graphdef, state = nnx.split(model)
with open(sys.argv[1], "wb") as file:
    pickle.dump([model, graphdef, state, nnx.to_flat_state(state), nnx.Rngs(0)], file)
print(float(model.layers[0].kernel.sum()))
"""
READ = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    model, graphdef, state, flat, rngs = pickle.load(file)
again = graphdef.merge(state)
print(float(again.layers[0].kernel.sum()), type(again).__module__.split(".")[0], "flax" in sys.modules)
"""


def test_pickles_written_under_the_hook_need_no_hook(tmp_path):
    (total,) = printed("-c", WRITE, str(tmp_path / "file"))
    assert printed("-c", READ, str(tmp_path / "file")) == [f"{total} nnxlite False"]
    with_hook = printed("-c", "import nnxlite.flax" + READ, str(tmp_path / "file"))
    assert with_hook[0].startswith(f"{total} nnxlite")


DOCTESTS = """
import doctest, importlib, pkgutil, nnxlite.flax
names = [info.name for info in pkgutil.iter_modules(nnxlite.flax.__path__, "nnxlite.flax.")]
names.remove("nnxlite.flax._build")  # for setuptools alone
for module in map(importlib.import_module, ["nnxlite.flax", *names]):
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert not failed
"""


def test_examples():
    printed("-c", DOCTESTS)
