"""A Python that has this project and some of its extras: the one in `.venv`, made where missing.

`python3 examples NAME` and `python3 tests` start with any CPython from 3.11 up and nothing
installed, so only the standard library is used here.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# What an extra installs, by the names to import: whether they are there is seen without a network.
EXTRAS = {
    "examples": "sklearn matplotlib",
    "checkpoint": "einops orbax.checkpoint safetensors",
    "data": "grain",
    "serving": "flatbuffers safetensors",
    "pretrained": "huggingface_hub torch transformers",
    "ode": "diffrax",
    "test": "pytest xdist hypothesis cloudpickle einops orbax.checkpoint safetensors flatbuffers libcst",
}


def python_with(extras):
    """The Python of `.venv` with the project and these extras, which are installed if missing."""
    if sys.version_info < (3, 11):  # noqa: UP036 (this file runs with whatever Python there is)
        sys.exit(f"nnxlite needs Python 3.11 or newer, and this is {sys.version.split()[0]}")
    folder = ROOT / ".venv"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        print(f"Making a virtual environment in {folder}", flush=True)
        # Python 3.11 would bring a setuptools that has known holes.
        venv.create(folder, with_pip=True, upgrade_deps=True)
    names = ["nnxlite", *(name for extra in extras for name in EXTRAS[extra].split())]
    # -P: the project counts as installed only where it is, not because this is its folder.
    imports = [python, "-P", "-c", "import " + ", ".join(names)]
    if subprocess.run(imports, cwd=ROOT, capture_output=True).returncode:
        print(f"Installing nnxlite[{','.join(extras)}] and what it needs", flush=True)
        install = [python, "-m", "pip", "install", "-q", "-e", f".[{','.join(extras)}]"]
        if failed := subprocess.run(install, cwd=ROOT).returncode:
            sys.exit(failed)
    return python


def run(extras, arguments):
    """Go on as `python ARGUMENTS...` in the environment with these extras."""
    python = python_with(extras)
    if os.name == "nt":  # where exec would give the prompt back before the program ends
        sys.exit(subprocess.run([python, *arguments]).returncode)
    os.execv(python, [str(python), *map(str, arguments)])
