"""docs/errors.md shows what the library says today."""

from __future__ import annotations

import jax
import pytest

import nnxlite
from tests.errors_page import PAGE, SECTIONS, raised, words


def test_every_section_of_the_page_is_compared():
    assert len(SECTIONS) == PAGE.read_text().count("\n## ") >= 10


@pytest.mark.parametrize("title", SECTIONS)
def test_the_message_on_the_page_is_what_is_raised(title):
    seen, shown = raised(SECTIONS[title]["code"], nnxlite), words(SECTIONS[title]["ours"])
    if f"JAX {jax.__version__}" not in PAGE.read_text():
        shown = shown[: len(seen)]  # a newer JAX says more
    assert seen == shown
