"""Installs the finder when Python starts, then runs the next `sitecustomize` on the path.

`nnxlite.flax` puts this folder in front of PYTHONPATH, and so in front of that one.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def _next() -> None:
    """Run the next `sitecustomize` on the path, which is the one that Python would have run."""
    import importlib.machinery
    import importlib.util

    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("NNXLITE_FLAX", "0") not in ("", "0"):
    import nnxlite_flax_finder

    nnxlite_flax_finder.start()
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
_next()
