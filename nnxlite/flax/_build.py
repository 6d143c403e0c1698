"""For setuptools: adds `nnxlite_flax.pth` to an installation, so that `NNXLITE_FLAX=1` is enough.

`pyproject.toml` names the class, and setuptools loads this file without the package around it. Python
runs the line at each start: where the variable is not set, it reads the variable, and no more.
"""

from __future__ import annotations

from pathlib import Path

from setuptools.command.build_py import build_py

LINE = (
    'import os, sys; os.environ.get("NNXLITE_FLAX", "0") in ("", "0") or '
    "sys.path.insert(0, os.path.join({folder}, 'nnxlite', 'flax', '_site'))\n"
)


class BuildWithPth(build_py):
    """A wheel has the file at its root, which is installed as site-packages; so has an editable one."""

    def run(self) -> None:
        """Build the package, and write the file."""
        super().run()
        folder, target = "sys._getframe(1).f_locals['sitedir']", self.build_lib
        if self.editable_mode:  # the package stays here
            folder = repr(str(Path(__file__).resolve().parents[2]))
            target = getattr(self.get_finalized_command("install"), "install_lib")  # noqa: B009
        Path(target, "nnxlite_flax.pth").write_text(LINE.format(folder=folder))
