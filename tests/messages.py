"""Tables of refusals: a line of a program, and below it the class and the message that it raises.

    nnx.split(layer, nnx.Param)
        ValueError: Non-exhaustive filters ... mean (BatchStat) ... Add a filter

Three dots stand for any text.  What the line is given stays as it was.
"""

import re
import textwrap
import typing as tp

import pytest

from tests.laws import model


def rows(table: str) -> tp.Any:
    """The decorator for a test of `line` and `message`."""
    found = re.findall(r"^(\S.*)\n((?: .*\n)+)", textwrap.dedent(table).strip() + "\n", re.M)
    cases = [(line, " ".join(message.split())) for line, message in found]
    return pytest.mark.parametrize("line, message", cases, ids=[line for line, _ in cases])


def refused(line: str, message: str, scope: dict[str, tp.Any]) -> None:
    """Run a line; it raises this, and the objects in its scope are the same afterwards."""
    pattern = ".*".join(
        re.escape(part) for part in message.replace(": ", ": ... ", 1).split(" ... ")
    )
    given = [x for x in scope.values() if model.is_reference(x)]
    for _ in range(2):  # before there is a plan, and with one
        before = model.canonical(given)
        with pytest.raises(Exception) as caught:
            exec(line, dict(scope))
        text = " ".join(f"{caught.typename}: {str(caught.value)}".split())
        assert re.search(pattern, text), text
        assert model.canonical(given) == before
