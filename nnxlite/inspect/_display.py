"""`display`: show any values, in a notebook as foldable trees, elsewhere as text."""

from __future__ import annotations

import contextlib
import sys
import typing as tp

from nnxlite._base.text import text_of


def display(*args: tp.Any) -> None:
    """Show values: in a notebook through treescope, elsewhere by printing their text form.

    Strings are printed unchanged.  A value that treescope cannot draw, such as a model nested too
    deeply, is printed too.

    Args:
        args: any values.

    >>> import nnxlite as nnx
    >>> nnx.display("sizes:", {"in": 2, "out": 3})
    sizes:
    {'in': 2, 'out': 3}
    """
    draw = _drawing_function()
    for arg in args:
        with contextlib.suppress(RecursionError):
            if draw is not None:
                draw(arg, ignore_exceptions=True, autovisualize=True)
                continue
        print(arg if isinstance(arg, str) else text_of(arg))


def _drawing_function() -> tp.Callable[..., tp.Any] | None:
    """Treescope's `display` in a notebook, else None."""
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    shell = None if ipython is None else ipython.get_ipython()
    if not hasattr(shell, "kernel"):
        return None
    import treescope

    return treescope.display
