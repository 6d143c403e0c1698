"""The check of the tests themselves: which messages are read."""

import dis

from tests.reliability import raises


def test_a_statement_is_reached_by_a_message_that_contains_its_text():
    readings = raises.Readings()
    readings.raised = {("no such axis", "a.py", 1), ("w", "b.py", 2), ("axes differ", "c.py", 3)}
    readings.read("vmap: 'w': no such axis.")
    assert readings.lines == {("a.py", 1)}
    readings.read("w")
    assert readings.lines == {("a.py", 1), ("b.py", 2)}


def test_only_raise_statements_of_the_library_count():
    source = "def f(x):\n    if x:\n        raise ValueError('a b')\n    return g(x)\n"
    for folder, lines in ((raises.PREFIX, [3]), ("/elsewhere/", [])):
        names = {}
        exec(compile(source, f"{folder}x.py", "exec"), names)
        code = names["f"].__code__
        readings = raises.Readings()
        for instruction in dis.get_instructions(code):
            readings.seen(code, instruction.offset, ValueError("a b"))
        assert readings.raised == {("a b", "x.py", line) for line in lines}
