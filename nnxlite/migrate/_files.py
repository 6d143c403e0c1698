"""Files: which there are below a path, their text, and writing it all or nothing."""

from __future__ import annotations

import fnmatch
import io
import os
import stat
import tempfile
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from nnxlite.migrate._errors import UnreadableError

SUFFIXES = frozenset({".py", ".pyi", ".ipynb"})
SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
MARK = b"\xef\xbb\xbf"


def programs(paths: Iterable[Path], exclude: Sequence[str]) -> Iterator[Path]:
    """The programs among files and below directories, each once, in order.

    Directories that are hidden, and virtual environments, are left out, as is what matches a
    pattern of `exclude`: a name, or a path with slashes, with `*` and `?`.

    Raises:
        FileNotFoundError: a path does not exist.
    """
    seen: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
        for file in _below(path, exclude) if path.is_dir() else [path]:
            if file.resolve() not in seen and not _is_excluded(file, exclude):
                seen.add(file.resolve())
                yield file


def _below(directory: Path, exclude: Sequence[str]) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or _is_excluded(path, exclude):
            continue
        if path.is_dir():
            is_environment = (path / "pyvenv.cfg").exists() or path.name in SKIPPED
            if not is_environment and not path.is_symlink():
                yield from _below(path, exclude)
        elif path.suffix in SUFFIXES:
            yield path


def _is_excluded(path: Path, exclude: Sequence[str]) -> bool:
    return any(
        fnmatch.fnmatch(path.name, pattern)
        or fnmatch.fnmatch(path.as_posix(), pattern)
        or fnmatch.fnmatch(path.as_posix(), f"*/{pattern}")
        for pattern in exclude
    )


def read(path: Path) -> tuple[str, str, bytes]:
    """The text of a program, its encoding, and the mark that the file begins with, if any."""
    content = path.read_bytes()
    mark = MARK if content.startswith(MARK) else b""
    try:
        if path.suffix == ".ipynb":
            encoding = "utf-8"
        else:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content.removeprefix(mark)).readline)
        return content.removeprefix(mark).decode(encoding), encoding, mark
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UnreadableError(f"cannot be decoded: {error}") from error


def write(path: Path, text: str, encoding: str, mark: bytes) -> None:
    """Put a text in the place of that of a file, which has either of them whatever happens."""
    path = path.resolve()
    content = mark + text.encode(encoding)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
