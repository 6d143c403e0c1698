"""What type checkers infer of several processes."""

from __future__ import annotations

from typing import assert_type

import nnxlite as nnx

assert_type(nnx.distributed.exchange("names", "a"), list[str])
with nnx.distributed.agreed("reading"):
    pass
