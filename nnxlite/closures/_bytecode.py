"""Which names code refers to, read from its bytecode."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import types
import typing as tp

TESTED = frozenset({(3, 11), (3, 12), (3, 13)})
"""The versions of CPython whose bytecode is understood."""


def is_tested() -> bool:
    """Whether this interpreter is one whose bytecode is understood."""
    return sys.version_info[:2] in TESTED and sys.implementation.name == "cpython"


class Name(tp.NamedTuple):
    """A name from outside that code reads: a captured variable (`is_cell`), or a global or builtin.

    `attributes` are read from it one after the other, as `("numpy", "sin")` in `jax.numpy.sin`.
    """

    name: str
    is_cell: bool
    attributes: tuple[str, ...]


class References(tp.NamedTuple):
    """What code refers to.

    Attributes:
        names: the names from outside that it reads.
        counters: names to which it only adds a constant, and whether each is a cell.
        attributes: every attribute name in it.
    """

    names: tuple[Name, ...]
    counters: tuple[tuple[str, bool], ...]
    attributes: frozenset[str]


_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_IGNORED = ("CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL")


# Key: the code, which never changes. Bound: 4096. Threads: as lru_cache. Reading one function takes
# about 50 us and is needed several times in each eager call of a loop: `benchmarks --only eager`.
@functools.lru_cache(maxsize=4096)
def references(code: types.CodeType) -> References | None:
    """What code refers to, inner functions included; None where it imports or assigns outer names."""
    names: dict[Name, None] = {}
    counters: dict[tuple[str, bool], None] = {}
    attributes: set[str] = set()
    stores = 0
    pending = [code]
    while pending:
        part = pending.pop()
        pending += [c for c in part.co_consts if isinstance(c, types.CodeType)]
        ops = [op for op in dis.get_instructions(part) if op.opname not in _IGNORED]
        for i, op in enumerate(ops):
            action, _, scope = op.opname.partition("_")
            is_cell = "DEREF" in scope
            if op.opname in _ATTRIBUTES:
                attributes.add(op.argval)
            elif action == "IMPORT":
                return None
            elif not (is_cell or "GLOBAL" in scope or op.opname == "LOAD_NAME"):
                continue
            elif is_cell and op.argval not in code.co_freevars:
                continue  # a variable of the function itself
            elif action != "LOAD":
                stores += 1
            elif _is_increment(ops[i : i + 4]):
                counters[op.argval, is_cell] = None
                stores -= 1
            else:
                chain = itertools.takewhile(lambda op: op.opname in _ATTRIBUTES, ops[i + 1 :])
                names[Name(op.argval, is_cell, tuple(op.argval for op in chain))] = None
    if stores or any((name, is_cell) in counters for name, is_cell, _ in names):
        return None
    return References(tuple(names), tuple(counters), frozenset(attributes))


def _is_increment(ops: list[dis.Instruction]) -> bool:
    """Whether instructions begin with those of `n += 1`."""
    load, *rest = (op.opname for op in ops)
    store = load.replace("LOAD", "STORE")
    return rest == ["LOAD_CONST", "BINARY_OP", store] and ops[0].argval == ops[3].argval
