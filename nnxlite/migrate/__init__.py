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

from nnxlite.migrate._program import SOURCES as _SOURCES
from nnxlite.migrate._program import Migration as Migration
from nnxlite.migrate._program import Note as Note
from nnxlite.migrate._program import UnreadableError as UnreadableError
from nnxlite.migrate._program import need_libcst as _need_libcst


def migrate_text(text: str, source: str = "nnx") -> Migration:
    """A program rewritten for nnxlite, and what needs a decision in it.

    Args:
        text: a module of Python.
        source: what it was written for: `"nnx"`; or `"equinox"`, for which there are only notes.

    Returns:
        The new text and the notes in the order of their lines.

    Raises:
        UnreadableError: it is not Python.
        ImportError: libcst is not installed.

    >>> from nnxlite.migrate import migrate_text
    >>> done = migrate_text("from flax import nnx\\nnnx.Optimizer(model, tx)\\n")
    >>> print(done.text, end="")
    import nnxlite as nnx
    nnx.ModelAndOptimizer(model, tx)
    """
    if source not in _SOURCES:
        raise ValueError(f"unknown source {source!r}; expected one of {', '.join(_SOURCES)}")
    if not any(word in text for word in _SOURCES[source]):
        return Migration(text)
    _need_libcst()
    from nnxlite.migrate._rules import Rules

    rules = Rules(text)
    getattr(rules, source)()
    return Migration(rules.edited(), tuple(sorted(rules.notes)))
