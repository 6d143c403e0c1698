"""A report: entries that can be counted, iterated and read as text."""

from __future__ import annotations

import dataclasses
import typing as tp

E = tp.TypeVar("E")


@dataclasses.dataclass(frozen=True, repr=False)
class Entries(tp.Generic[E]):
    """Base of reports: true where there is anything to report.

    Attributes:
        entries: what is reported.
    """

    entries: tuple[E, ...]

    def __bool__(self) -> bool:
        return bool(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> tp.Iterator[E]:
        return iter(self.entries)
