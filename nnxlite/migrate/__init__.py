"""`python -m nnxlite.migrate PATH...`: rewrites programs from Flax NNX, and lists what needs a decision.

A program is parsed by libcst, which says for each name what import it came from.  Rules look at names,
calls and imports.  Each returns edits (a span of the text and its replacement), notes (a position, the
code in question, what to do), or both.  Edits are applied to the text as it was, so that
whatever no edit covers stays byte for byte.

A rule edits where the result is certain to mean the same, and writes a note everywhere else.  What
nnxlite offers is never listed here: a name or a keyword argument of Flax is looked up in nnxlite.
A program that was rewritten has no edits left; its notes stay until someone acts on them.

>>> from nnxlite.migrate import migrate_text
>>> print(migrate_text("from flax import nnx, struct\\n").text, end="")
from flax import struct
import nnxlite as nnx

Parsing needs libcst, from the extra `migrate`; nothing is imported before the first program.
"""

from nnxlite.migrate._edits import Migration as Migration
from nnxlite.migrate._edits import Note as Note
from nnxlite.migrate._errors import UnreadableError as UnreadableError
from nnxlite.migrate._sources import migrate_notebook as migrate_notebook
from nnxlite.migrate._sources import migrate_text as migrate_text
