"""Run an example in an environment that has what it needs, made in `.venv` where it is missing.

python3 examples                   # lists them
python3 examples digits --quick    # runs one; --help tells its options
"""

import ast
import difflib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / ".ci"))
import environment  # noqa: E402

EXAMPLES = {path.stem: path for path in sorted(HERE.glob("[!_]*.py"))}
NEEDS = {
    "checkpoint_resume": ["checkpoint", "data"],
    "multihost": ["checkpoint"],
    "neural_ode": ["ode"],
    "pitch": ["checkpoint", "serving", "pretrained"],
}
"""Extras that an example needs besides `examples`."""


def first_line(path):
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).splitlines()[0]


def main(arguments):
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, EXAMPLES))
        print("usage: python3 examples NAME [OPTIONS]\n")
        for name, path in EXAMPLES.items():
            print(f"  {name:{width}}  {first_line(path)}")
        return
    name = arguments[0].removesuffix(".py")
    if name not in EXAMPLES:
        near = difflib.get_close_matches(name, EXAMPLES, n=1)
        hint = f"did you mean {near[0]}?" if near else "`python3 examples` lists them"
        print(f"examples: error: there is no example {name!r}; {hint}", file=sys.stderr)
        sys.exit(2)
    environment.run(["examples", *NEEDS.get(name, [])], [EXAMPLES[name], *arguments[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])
