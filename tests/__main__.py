"""Run the tests in an environment that has what they need, made in `.venv` where it is missing.

python3 tests             # all but the slow ones: examples, pages, other processes, campaigns
python3 tests -m quick    # some of every package; any options of pytest
python3 tests -m ""       # all of them
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".ci"))
import environment  # noqa: E402

if __name__ == "__main__":
    os.chdir(ROOT)
    pytest = ["-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "8", "--dist", "worksteal"]
    tier = [] if "-m" in sys.argv else ["-m", "not slow"]
    environment.run(["test", "examples"], [*pytest, *tier, *sys.argv[1:]])
