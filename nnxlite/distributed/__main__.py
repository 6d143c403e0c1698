"""`python -m nnxlite.distributed --processes 4 script.py ...`: several processes on this machine."""

import sys

from nnxlite.distributed._launcher import main

if __name__ == "__main__":
    sys.exit(main())
