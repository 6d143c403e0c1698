"""`python -m nnxlite.migrate PATH...`: shows what would change, and what needs a decision."""

import sys

from nnxlite.migrate._command import main

if __name__ == "__main__":
    sys.exit(main())
