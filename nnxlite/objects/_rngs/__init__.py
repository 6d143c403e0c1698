"""Random streams: where every layer gets its keys from (`nnxlite.rnglib`).

A stream is a key and a counter.  Each draw folds the counter into the key and moves the counter on,
so one seed yields an endless sequence of keys, and both numbers are Variables that cross a
transform like any other state.  `Rngs` is a set of named streams.

Three files: `_samplers` (the distributions and initializers that a stream offers as methods),
`_streams` (`RngStream`, `Rngs`) and `_scopes` (functions that fork, split, reseed and restore every
stream of a model at once).
"""

from nnxlite.objects._rngs._samplers import KeylessInitializer as KeylessInitializer
from nnxlite.objects._rngs._samplers import Samplers as Samplers
from nnxlite.objects._rngs._scopes import SplitBackups as SplitBackups
from nnxlite.objects._rngs._scopes import backup_keys as backup_keys
from nnxlite.objects._rngs._scopes import fork_rngs as fork_rngs
from nnxlite.objects._rngs._scopes import reseed as reseed
from nnxlite.objects._rngs._scopes import restore_rngs as restore_rngs
from nnxlite.objects._rngs._scopes import split_rngs as split_rngs
from nnxlite.objects._rngs._scopes import with_rngs as with_rngs
from nnxlite.objects._rngs._streams import Rngs as Rngs
from nnxlite.objects._rngs._streams import RngStream as RngStream
from nnxlite.variables import RngCount as RngCount
from nnxlite.variables import RngKey as RngKey
from nnxlite.variables import RngState as RngState
