"""Programs written for Flax NNX, run as they are: `flax.nnx` is nnxlite from here on.

`import nnxlite.flax` as the first line of a program, `python -m nnxlite.flax script.py`, `-p
nnxlite.flax` for pytest, `%load_ext nnxlite.flax` in a notebook, or `NNXLITE_FLAX=1`.

A finder in front of `sys.meta_path` (`_site/nnxlite_flax_finder.py`) answers for `flax.nnx` and every
submodule. The modules it gives are named as those of Flax, and contain what nnxlite's modules of these
paths contain (`_modules.py`). The rest of Flax is what is installed. It is all or nothing: a process
that imported the other `flax.nnx` is refused.
"""

from __future__ import annotations

import importlib
import sys
import typing as tp
from pathlib import Path

_SITE = str(Path(__file__).with_name("_site"))
sys.path.insert(0, _SITE)
_finder = importlib.import_module("nnxlite_flax_finder")  # Python's start may have imported it
sys.path.remove(_SITE)


def install() -> None:
    """Make `flax.nnx` nnxlite in this process and in those it starts; a second call changes nothing.

    `import nnxlite.flax` calls it.

    Raises:
        ImportError: if `flax.nnx` of Flax was imported before, or the installed Flax is not 0.12.

    >>> import nnxlite.flax
    >>> from flax import nnx
    >>> nnx.__name__, nnx.Linear is nnxlite.Linear
    ('flax.nnx', True)
    """
    _finder.install()


def status() -> tp.Any:
    """What is replaced, and what the program asked for and did not find, as an object to print.

    >>> import nnxlite.flax
    >>> print(nnxlite.flax.status())  # doctest: +ELLIPSIS
    flax.nnx is nnxlite ...
    """
    from nnxlite.flax._modules import Status

    return Status()


def load_ipython_extension(shell: tp.Any) -> None:
    """`%load_ext nnxlite.flax` in a notebook."""
    install()


try:
    install()
except ImportError as error:
    if sys.argv[:1] != ["-m"]:
        raise
    print(error, file=sys.stderr)  # `python -m nnxlite.flax` looks for the module
    raise SystemExit(2) from None
