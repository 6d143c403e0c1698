"""`display`: show any values, in a notebook as foldable trees, elsewhere as text."""

from __future__ import annotations

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
        if draw is None or not _drawn(draw, arg):
            print(arg if isinstance(arg, str) else text_of(arg))


def _drawing_function() -> tp.Callable[..., tp.Any] | None:
    """Treescope's `display` in a notebook, else None."""
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    import treescope

    return treescope.display


def _drawn(draw: tp.Callable[..., tp.Any], value: tp.Any) -> bool:
    try:
        draw(value, ignore_exceptions=True, autovisualize=True)
    except RecursionError:
        return False
    return True
