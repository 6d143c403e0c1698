"""docs/errors.md shows what the reference says to the same programs."""

import pytest

from tests.errors_page import SECTIONS, raised, words

flax = pytest.importorskip("flax.nnx")


@pytest.mark.parametrize("title", SECTIONS)
def test_the_reference_raises_what_the_page_says(title):
    """The class of the exception and the first sentence; the rest depends on the version of JAX."""
    section = SECTIONS[title]
    seen, shown = (
        text.split(". ")[0] for text in (raised(section["code"], flax), words(section["reference"]))
    )
    assert seen == shown
