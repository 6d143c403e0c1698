"""`nnxlite.flax`: a program that imports `flax.nnx` gets nnxlite, by every way of starting it."""

from __future__ import annotations

import importlib.util
import os
import sys

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
try:
    import flax.nnx.nothing
except ModuleNotFoundError as error:
    assert str(error) == "No module named 'flax.nnx.nothing'"
try:
    nnx.graph.nothing
except AttributeError as error:
    assert str(error) == "module 'flax.nnx.graph' has no attribute 'nothing'"
try:
    nnx.__nothing__
except AttributeError as error:
    assert str(error) == "module 'flax.nnx' has no attribute '__nothing__'"
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


def test_modules_are_those_of_nnxlite_by_the_names_of_flax(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(MODULES)
    assert printed("-m", "nnxlite.flax", str(script)) == ["right"]
    assert printed("-c", "import nnxlite.flax" + MODULES) == ["right"]


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
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
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


def test_the_report_of_a_program_that_misses_nothing(tmp_path):
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'from flax import nnx'])"
    done = python("-m", "nnxlite.flax", "--report", "-c", code)
    assert done.stderr.count("Nothing was missing.") == 1, done.stderr  # not in the child


CHILDREN = """
import multiprocessing, subprocess, sys
from concurrent.futures import ProcessPoolExecutor

def name():
    from flax import nnx
    import nnxlite
    return nnx.__name__ if nnx.Linear is nnxlite.Linear else "another"

if __name__ == "__main__":
    import nnxlite.flax
    for method in ("spawn", "forkserver"):
        with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
            print(pool.submit(name).result())
    code = "from flax import nnx; import nnxlite; print(nnx.Linear is nnxlite.Linear)"
    subprocess.run([sys.executable, "-c", code])
"""


def test_child_processes(tmp_path):
    (tmp_path / "script.py").write_text(CHILDREN)
    assert printed(str(tmp_path / "script.py")) == ["flax.nnx", "flax.nnx", "True"]


def test_the_plugin_of_pytest_and_its_workers(tmp_path):
    test = "from flax import nnx\nimport nnxlite\ndef test():\n    assert nnx.jit is nnxlite.jit\n"
    (tmp_path / "test_it.py").write_text(test)
    arguments = ["-q", "-W", "error", "-p", "nnxlite.flax", "--rootdir", str(tmp_path)]
    arguments += ["-n", "1"] if importlib.util.find_spec("xdist") else []
    assert "1 passed" in printed("-m", "pytest", *arguments, str(tmp_path))[-1]


def test_bad_input():
    """Without a program the usage; with one that is not there, what Python says of it."""
    done = python("-m", "nnxlite.flax")
    assert done.returncode == 2 and done.stderr.startswith("usage: python")
    assert printed("-m", "nnxlite.flax", "--help")[0].startswith("usage: python")
    for program in (["nothing.py"], ["-m", "no_such.module"], ["--repotr", "x.py"]):
        ours, pythons = python("-m", "nnxlite.flax", *program), python(*program)
        assert ours.returncode == pythons.returncode != 0
        assert ours.stderr.splitlines()[-1] == pythons.stderr.splitlines()[-1]


def test_python_that_reads_no_environment():
    code = f"import sys; sys.path[:0] = {[str(ROOT), *sys.path]}; from nnxlite.flax import __main__ as m"
    done = python("-E", "-c", f"{code}; sys.exit(m.main(['x.py']))")
    assert done.returncode == 2
    assert "needs PYTHONPATH and `site`: start Python without -E, -I and -S." in done.stderr


LATE = """
try:
    import nnxlite.flax
except ImportError as error:
    print(error)
"""


@needs_flax
def test_a_process_that_imported_flax_nnx_before_is_refused(tmp_path):
    (tmp_path / "early.py").write_text("from flax import nnx")
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    begin = "nnxlite.flax must come before the first import of flax.nnx: start the program with"
    [line] = printed("-c", "import early" + LATE, **path)
    assert line.startswith(begin)
    (tmp_path / "sitecustomize.py").write_text("import early")
    done = python("-m", "nnxlite.flax", "-c", "pass", **path)
    assert done.returncode == 2 and done.stderr.startswith(begin), done


OTHER_VERSION = """
import importlib.metadata
importlib.metadata.version = lambda name: "0.13.0"
"""


def test_another_version_of_flax(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(OTHER_VERSION)
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = python("-m", "nnxlite.flax", "-c", "pass", **path)
    assert done.returncode == 2
    begin = "nnxlite.flax stands in for flax.nnx of Flax 0.12, and Flax 0.13.0 is"
    assert done.stderr.startswith(begin)
    variables = {"PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}", "NNXLITE_FLAX": "1"}
    done = python("-c", OTHER_VERSION + "from flax import nnx", **variables)
    assert done.returncode == 1 and "ImportError: nnxlite.flax stands in" in done.stderr


WITHOUT = """
import importlib.machinery, importlib.metadata, importlib.util
find = importlib.machinery.PathFinder.find_spec
hide = lambda name, *args, **kw: None if name == "flax" else find(name, *args, **kw)
importlib.machinery.PathFinder.find_spec = hide
def version(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.version = version

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
