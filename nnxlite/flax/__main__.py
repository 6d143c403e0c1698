"""`python -m nnxlite.flax script.py`: a new Python runs the script, with nnxlite as its `flax.nnx`."""

from __future__ import annotations

import os
import sys

from nnxlite.flax import _finder

USAGE = """usage: python [options of Python] -m nnxlite.flax [--report] script.py [arguments]
       python [options of Python] -m nnxlite.flax [--report] -m module [arguments]
       python [options of Python] -m nnxlite.flax [--report] -c code [arguments]

Runs a program that is written for Flax NNX with nnxlite as its `flax.nnx`, unchanged.

  --report  print at the end what was replaced, and what the program asked for and did not find
  --help    print this text"""


def _options() -> list[str]:
    """The options that this Python was started with."""
    count = len(sys.orig_argv) - len(sys.argv[1:])
    given = sys.orig_argv[1:count]
    if given and given[-1] == "nnxlite.flax":  # `-m nnxlite.flax`, else `-mnnxlite.flax`
        given.pop()
    last = given.pop().removesuffix("nnxlite.flax").removesuffix("m") if given else "-"
    return given if last == "-" else [*given, last]


def main(arguments: list[str]) -> int:
    """Replace this process by the program; the exit status where it cannot be started.

    Python itself says what is wrong with the name of a script, a module or an option.
    """
    report = arguments[:1] == ["--report"]
    program = arguments[report:]
    if not program or program[0] in ("--help", "-h"):
        print(USAGE, file=sys.stdout if program else sys.stderr)
        return 0 if program else 2
    problem = _finder.fault()
    if sys.flags.ignore_environment or sys.flags.no_site:
        problem = "nnxlite.flax needs PYTHONPATH and `site`: start Python without -E, -I and -S."
    if problem:
        print(problem, file=sys.stderr)
        return 2
    if report:
        os.environ["NNXLITE_FLAX_REPORT"] = str(os.getpid())  # exec does not change it
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *_options(), *program])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
