"""`python -m nnxlite.migrate PATH...`: rewrites programs from Flax NNX, and lists what needs a decision.

A program is parsed by libcst, which says for each name what import it came from. Rules look at names,
calls and imports, and collect edits (a span of the text and its replacement) and notes (a position, the
code in question, what to do).

A rule edits where the result is certain to mean the same, and writes a note everywhere else.  What
nnxlite offers is never listed here: a name or a keyword argument of Flax is looked up in nnxlite.
A program that was rewritten has no edits left; its notes stay until someone acts on them.

>>> from nnxlite.migrate import migrate_text
>>> print(migrate_text("from flax import nnx, struct\\n").text, end="")
from flax import struct
import nnxlite as nnx

Parsing needs libcst, from the extra `migrate`; nothing is imported before the first program.
"""

from nnxlite.migrate._program import Migration as Migration
from nnxlite.migrate._program import Note as Note
from nnxlite.migrate._program import UnreadableError as UnreadableError
from nnxlite.migrate._sources import migrate_notebook as migrate_notebook
from nnxlite.migrate._sources import migrate_text as migrate_text
