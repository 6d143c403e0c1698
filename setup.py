"""Adds `nnxlite_flax.pth` to what is installed: `NNXLITE_FLAX=1 python script.py` needs no launcher.

Python runs the line at each start. Where the variable is not set it reads the variable, and no more.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

LINE = (
    'import os, sys; os.environ.get("NNXLITE_FLAX", "0") in ("", "0") or '
    "sys.path.insert(0, os.path.join({folder}, 'nnxlite', 'flax', '_site'))\n"
)


class BuildWithPth(build_py):
    """A wheel has the file at its root, which is installed as site-packages; so has an editable one."""

    def run(self):
        """Build the package, and write the file."""
        super().run()
        folder, target = "sys._getframe(1).f_locals['sitedir']", self.build_lib
        if self.editable_mode:  # the package stays here
            folder = repr(str(Path(__file__).parent.resolve()))
            target = self.get_finalized_command("install").install_lib
        Path(target, "nnxlite_flax.pth").write_text(LINE.format(folder=folder))


setup(cmdclass={"build_py": BuildWithPth})
