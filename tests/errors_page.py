"""The programs of docs/errors.md, and what each of them raises."""

import linecache
import re
import typing as tp
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"
SECTION = re.compile(
    r"^## (?P<title>[^\n]*)\n\n```py\n(?P<code>.*?)^```\n\n"
    r"Flax NNX:\n\n```text\n(?P<reference>.*?)^```\n\nnnxlite:\n\n```text\n(?P<ours>.*?)^```\n",
    re.MULTILINE | re.DOTALL,
)
SECTIONS = {match["title"]: match for match in SECTION.finditer(PAGE.read_text())}


def words(text: str) -> str:
    """A text in one line, without what depends on the run: addresses, and JAX's links to its docs."""
    text = re.sub(r"^See https://docs\.jax\.dev\S*$", "", text, flags=re.MULTILINE)
    return " ".join(re.sub(r"0x[0-9a-f]+", "0x...", text).split())


def raised(code: str, lib: tp.Any) -> str:
    """What a program raises with one of the libraries: the class, the message and the notes."""
    # The library names the file and line of the user's function, and looks for its source.
    linecache.cache["program.py"] = (len(code), None, code.splitlines(True), "program.py")
    names = {"nnx": lib, "jax": jax, "jnp": jnp, "optax": optax, "__name__": "program"}
    with pytest.raises(Exception) as caught:
        exec(compile(code, "program.py", "exec", dont_inherit=True), names)
    notes = [n for n in getattr(caught.value, "__notes__", ()) if "For simplicity, JAX" not in n]
    notes = [n for n in notes if not n.startswith("-----")]
    return words("\n".join([f"{caught.typename}: {str(caught.value)}", *notes]))
