"""`python -m nnxlite.flax script.py`: a new Python runs the script, with nnxlite as its `flax.nnx`."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

from nnxlite.flax import _finder

USAGE = """usage: python [options of Python] -m nnxlite.flax [--report] script.py [arguments]
       python [options of Python] -m nnxlite.flax [--report] -m module [arguments]
       python [options of Python] -m nnxlite.flax [--report] -c code [arguments]

Runs a program that is written for Flax NNX with nnxlite as its `flax.nnx`, unchanged.

  --report  print at the end what was replaced, and what the program asked for and did not find
  --help    print this text"""


def _fail(text: str) -> int:
    print(text, file=sys.stderr)
    return 2


def _options() -> list[str]:
    """The options that this Python was started with."""
    count = len(sys.orig_argv) - len(sys.argv[1:])
    given = sys.orig_argv[1:count]
    if given and given[-1] == "nnxlite.flax":  # `-m nnxlite.flax`, else `-mnnxlite.flax`
        given.pop()
    last = given.pop().removesuffix("nnxlite.flax").removesuffix("m") if given else "-"
    return given if last == "-" else [*given, last]


def _is_module(name: str) -> bool:
    """Whether there is a module, as `python -m` looks for it; imports none of its parents."""
    top, *rest = name.split(".")
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    for part in rest:
        if spec is not None:
            folders = spec.submodule_search_locations or []
            spec = importlib.machinery.PathFinder.find_spec(f"{spec.name}.{part}", folders)
    return spec is not None


def _missing(program: list[str]) -> str | None:
    """Why a program cannot be started, in one sentence."""
    match program:
        case []:
            return f"There is no script to run.\n{USAGE}"
        case ["-m" | "-c" as option]:
            return f"{option} needs {'a module' if option == '-m' else 'code'} after it."
        case ["-m", name, *_]:
            return None if _is_module(name) else f"There is no module named {name!r}."
        case ["-c", *_]:
            return None
        case [option, *_] if option.startswith("-") and option != "-":
            return f"There is no option {option}: see `python -m nnxlite.flax --help`."
        case [script, *_]:
            if script != "-" and not os.path.exists(script):
                return f"There is no script {script!r} in {os.getcwd()}."
    return None


def main(arguments: list[str]) -> int:
    """Replace this process by the program; the exit status where it cannot be started."""
    report = False
    while arguments[:1] in (["--report"], ["--help"], ["-h"]):
        if arguments.pop(0) != "--report":
            print(USAGE)
            return 0
        report = True
    if sys.flags.ignore_environment or sys.flags.no_site:
        return _fail(
            "nnxlite.flax needs PYTHONPATH and `site`: start Python without -E, -I and -S."
        )
    problem = _missing(arguments) or _finder.fault()
    if problem:
        return _fail(problem)
    if report:
        os.environ["NNXLITE_FLAX_REPORT"] = str(os.getpid())  # exec does not change it
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *_options(), *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
