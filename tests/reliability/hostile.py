"""Damages valid files at random, and checks what reading them does.

    python -m tests.reliability.hostile --count 2000 --seed 0

Each file that the library reads is written, changed by one of the `DAMAGES`, and read into a model. The
outcome is `right` (the values that were saved, or for a format without checksums those that the bytes
mean), or `refused` with an error that the documentation names, the path of the file in its message, and
the model as it was. Anything else is a defect: another exception, a wrong value, a half-restored
model, a read that does not end, a process that takes more memory than the file can need.

The last line that is printed counts files, outcomes and defects.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import typing as tp
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import nnxlite as nnx
from nnxlite.checkpoint._orbax import sealed
from tests.reliability.hostile_kills import print_and_exit

SECONDS = 60
"""A read that takes so long does not end."""
HEADROOM = 4 << 30
"""More memory than that, beyond what the process has, is never needed for files of some kilobytes."""


class Defect(AssertionError):
    """An outcome that is neither right nor a documented error."""


# Formats ------------------------------------------------------------------------------------------


def model(fill: bool = False) -> nnx.Dict:
    """A small model with every kind of leaf: filled, or with zeros to be replaced."""
    key = jax.random.key(7 if fill else 0)
    number = lambda x: x if fill else x * 0
    return nnx.Dict(
        w=nnx.Param(number(jnp.arange(6.0).reshape(2, 3) + 1)),
        half=nnx.Param(number(jnp.ones(4, "bfloat16"))),
        mask=nnx.Variable(jnp.array([True, False, fill])),
        key=nnx.Variable(key),
        host=nnx.Variable(number(np.arange(1, 4))),
    )


def bits(root: tp.Any) -> list[tuple[str, bytes]]:
    """All leaves as they are, bit for bit."""
    found = []
    for path, leaf in nnx.to_flat_state(nnx.state(root)):
        value = leaf.get_raw_value()
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        array = np.asarray(value)
        found.append((f"{path} {array.dtype}{array.shape}", array.tobytes()))
    return found


RIGHT = bits(model(fill=True))
BEFORE = bits(model())


@dataclasses.dataclass(frozen=True)
class Format:
    """One kind of file, or of folder.

    Attributes:
        write: writes a valid one into an empty folder.
        read: reads it, and raises `Defect` where what it gets is wrong.
        texts: the files that contain JSON, by pattern, with how they are read and written.
        errors: what reading may raise.
    """

    write: Callable[[Path], None]
    read: Callable[[Path], None]
    errors: tuple[type[Exception], ...]


def write_checkpoint(folder: Path) -> None:
    nnx.checkpoint.save(folder / "c", model=model(fill=True), step=3, rate=0.5, note="n", z=1 + 2j)


def read_checkpoint(folder: Path) -> None:
    path, target = folder / "c", model()
    with unchanged_if_refused(target):
        with contextlib.suppress(nnx.checkpoint.CheckpointError):
            repr(nnx.checkpoint.info(path))
        values = nnx.checkpoint.restore(path, model=target, step=0, rate=0.0, note="", z=0j).values
    if bits(target) != RIGHT:
        raise Defect("wrong values")
    about = json.loads((path / "nnxlite/metadata").read_bytes())["leaves"]
    for name, type_ in {"step": int, "rate": float, "note": str, "z": complex}.items():
        said = about[name]["value"]
        wanted = complex(*said) if type_ is complex else said
        if type(values[name]) is not type_ or repr(values[name]) != repr(wanted):
            raise Defect(f"{name} is {values[name]!r}, and the file says {said!r}")


def write_safetensors(folder: Path) -> None:
    nnx.save_safetensors(folder / "m.safetensors", model(fill=True))


def write_shards(folder: Path) -> None:
    nnx.save_safetensors(folder, model(fill=True), max_shard_bytes=24)


def read_safetensors(folder: Path) -> None:
    target = model()
    with unchanged_if_refused(target):
        nnx.load_safetensors(folder, target)
    said = plainly_read(folder)
    for (name, got), (_, wanted) in zip(bits(target), said, strict=True):
        if got != wanted:
            raise Defect(f"{name} is {got!r}, and the file says {wanted!r}")


def plainly_read(folder: Path) -> list[tuple[str, bytes]]:
    """The bytes of all arrays, by an independent reader of few lines that believes everything."""
    found: dict[str, bytes] = {}
    weight_map: dict[str, str] = {}
    for index in folder.glob("*.index.json"):
        weight_map = json.loads(index.read_bytes())["weight_map"]
    files = [folder / file for file in set(weight_map.values())] or folder.glob("*.safetensors")
    for path in files:
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            start, stop = entry.get("data_offsets", (0, 0))
            found[name] = data[8 + length :][start:stop]
    return [(name, found[name]) for name in sorted(model())]


def write_exported(folder: Path) -> None:
    nnx.export(served(), jnp.ones((1, 2)), shapes="b, 2").save(folder / "e")


def served() -> nnx.Linear:
    return nnx.Linear(2, 3, rngs=nnx.Rngs(0))


SERVED = np.asarray(served()(jnp.ones((2, 2))))


def read_exported(folder: Path) -> None:
    loaded = nnx.load_exported(folder / "e")
    try:
        result = loaded(*[jnp.ones((2, 2))] * len(loaded.signature.inputs))
    except ValueError as error:
        if not str(error).startswith("Exported "):
            raise
        raise ValueError(f"{folder}: {error}") from error
    (array,) = jax.tree.leaves(result)
    if np.asarray(array).tobytes() != SERVED.tobytes():
        raise Defect("another result")


@contextlib.contextmanager
def unchanged_if_refused(target: nnx.Module) -> Iterator[None]:
    """A block that leaves the target as it was if it fails."""
    try:
        yield
    except Exception as error:
        if bits(target) != BEFORE:
            raise Defect(f"half restored after {error!r}") from error
        raise


ERRORS = (nnx.checkpoint.CheckpointError,)
FORMATS = {
    "checkpoint": Format(write_checkpoint, read_checkpoint, ERRORS),
    "safetensors": Format(write_safetensors, read_safetensors, ERRORS),
    "shards": Format(write_shards, read_safetensors, ERRORS),
    "exported": Format(write_exported, read_exported, (ValueError, OSError)),
}


# Damages to bytes ---------------------------------------------------------------------------------

Bytes = bytes
ByteDamage = Callable[[Bytes, random.Random], Bytes]


def flip(data: Bytes, rng: random.Random) -> Bytes:
    at = rng.randrange(len(data) * 8)
    return data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :]


def cut(data: Bytes, rng: random.Random) -> Bytes:
    return data[: rng.randrange(len(data))]


def extend(data: Bytes, rng: random.Random) -> Bytes:
    return data + rng.randbytes(rng.choice([1, 8, 1000]))


def piece(data: Bytes, rng: random.Random) -> tuple[int, int]:
    first = rng.randrange(len(data))
    return first, min(len(data), first + rng.choice([1, 2, 8, 50]))


def remove(data: Bytes, rng: random.Random) -> Bytes:
    first, last = piece(data, rng)
    return data[:first] + data[last:]


def repeat(data: Bytes, rng: random.Random) -> Bytes:
    first, last = piece(data, rng)
    return data[:last] + data[first:last] * rng.choice([1, 100]) + data[last:]


def overwrite(data: Bytes, rng: random.Random) -> Bytes:
    first, last = piece(data, rng)
    new = rng.choice([bytes(last - first), b"\xff" * (last - first), rng.randbytes(last - first)])
    return data[:first] + new + data[last:]


def exchange(data: Bytes, rng: random.Random) -> Bytes:
    (a, b), (c, d) = sorted(piece(data, rng) for _ in range(2))
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:] if b <= c else remove(data, rng)


def renumber(data: Bytes, rng: random.Random) -> Bytes:
    """A number in the text, or the eight bytes of a length, made another."""
    if rng.random() < 0.3:
        number = rng.choice([0, 1, 2**31, 2**62, 2**63, 2**64 - 1])
        at = rng.choice([0, rng.randrange(len(data))])
        return data[:at] + struct.pack("<Q", number) + data[at + 8 :]
    digits = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
    if not digits:
        return flip(data, rng)
    at = rng.choice(digits)
    new = rng.choice([b"-1", b"1e400", b"NaN", b"1.5", b"9" * 30, b"9" * 5000, b'""', b"null"])
    return data[:at] + new + data[at + 1 :]


BYTE_DAMAGES: list[ByteDamage] = [
    flip, flip, flip, cut, extend, remove, repeat, overwrite, exchange, renumber,
]  # fmt: skip


# Damages to JSON ----------------------------------------------------------------------------------

STRANGE: list[tp.Any] = [
    None, True, False, 0, -1, 1, 2, 2**31, 2**63, 10**30, 10**400, 0.5, -0.0, math.nan, math.inf, "",
    "a", "..", "../m.safetensors", "/etc/passwd", "C:\\x", "C:x", "a\0b", "a" * 5000, "\ud800",
    "\x1b[2J", "float32", "float64", "bool", "object", "(9,9)f4", "V999999999", "key<none>",
    "key<threefry2x32>", "Python int", "Python str", "f4,f4", "F32", "BOOL", "U32", "__import__('os')",
    [], {}, [[]], [2, 3], [3, 2], [-2, -3], [2**40, 2**40], [0], [1] * 100, [math.nan], [1.5], ["2"],
    [True, False], {"a": {}}, {"crc32": 0},
]  # fmt: skip


def places(node: tp.Any) -> Iterator[tuple[tp.Any, tp.Any]]:
    """Every entry of every table and list of a tree, as its container and key."""
    keys = (
        list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    )
    for key in keys:
        yield node, key
        yield from places(node[key])


def rebuilt(tree: tp.Any, rng: random.Random) -> tp.Any:
    """A tree with one entry replaced, removed, renamed, or exchanged for another."""
    tree = copy.deepcopy(tree)
    found = list(places(tree))
    container, key = rng.choice(found)
    match rng.choice(["replace", "replace", "replace", "remove", "rename", "exchange", "nest"]):
        case "replace":
            container[key] = copy.deepcopy(rng.choice(STRANGE))
        case "remove":
            del container[key]
        case "rename":
            if isinstance(container, dict):
                new = [name for name in STRANGE if isinstance(name, str)]
                new += [other for table, other in found if table is container]
                container[rng.choice(new)] = container.pop(key)
        case "exchange":
            other, name = rng.choice(found)
            container[key], other[name] = other[name], copy.deepcopy(container[key])
        case "nest":
            for _ in range(rng.choice([1, 50])):
                container[key] = [container[key]]
    return tree


def as_text(tree: tp.Any, rng: random.Random) -> Bytes:
    """A tree as JSON, sometimes with an entry twice, deep in brackets, or in another encoding."""
    text = json.dumps(tree)
    match rng.randrange(12):
        case 0 if isinstance(tree, dict) and tree:
            name = rng.choice(list(tree))
            again = json.dumps({name: rng.choice([tree[name], rng.choice(STRANGE)])})
            text = f"{text[:-1]}, {again[1:]}"
        case 1:
            depth = rng.choice([200, 100_000])
            text = text.replace("{}", "[" * depth + "]" * depth, 1)
        case 2:
            return text.encode(rng.choice(["utf-16", "utf-8-sig", "utf-32", "latin-1"]))
        case 3:
            return text.encode() + rng.choice([b"\0", b"{}", b"\xff", b" "])
    return text.encode()


def rewrite_json(path: Path, rng: random.Random) -> None:
    path.write_bytes(as_text(rebuilt(json.loads(path.read_bytes()), rng), rng))


def rewrite_description(path: Path, rng: random.Random) -> None:
    """Of a checkpoint, with its checksum made right."""
    tree = rebuilt(json.loads(path.read_bytes()), rng)
    if rng.random() < 0.8 and isinstance(tree, dict):
        tree = sealed(tree)
    path.write_bytes(as_text(tree, rng))


def rewrite_header(path: Path, rng: random.Random) -> None:
    """Of a safetensors file, with its length made right."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    text = as_text(rebuilt(json.loads(data[8 : 8 + length]), rng), rng)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def rewrite_archive(path: Path, rng: random.Random) -> None:
    """The manifest of an exported call, or its entries, with the hashes made right."""
    with zipfile.ZipFile(path) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    manifest = json.loads(dict(entries)["manifest.json"])
    at = rng.randrange(len(entries) * 2)
    if at < len(entries) and entries[at][0] != "manifest.json":
        name, data = entries[at]
        data = rng.choice(BYTE_DAMAGES)(data, rng) if rng.random() < 0.7 else rng.choice(entries)[1]
        entries[at] = name, data
        if name.endswith(".npy") and rng.random() < 0.5:
            manifest["sha256"][name] = hashlib.sha256(data).hexdigest()
            CHANGED.add(path)
    else:
        manifest = rebuilt(manifest, rng)
    texts = {"manifest.json": as_text(manifest, rng)}
    compression = rng.choice([zipfile.ZIP_STORED] * 5 + [zipfile.ZIP_DEFLATED])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are there twice
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name, data in entries + rng.choice([[], [], [], [rng.choice(entries)]]):
                archive.writestr(name, texts.get(name, data))


CHANGED: set[Path] = set()
"""Exported calls that have other weights with the right hashes: their result is what they say."""

REWRITES: dict[str, Callable[[Path, random.Random], None]] = {
    "metadata": rewrite_description,
    "_METADATA": rewrite_json,
    "_CHECKPOINT_METADATA": rewrite_json,
    "process_0": rewrite_json,
    "_sharding": rewrite_json,
    "model.safetensors.index.json": rewrite_json,
    "e": rewrite_archive,
}


# Damages to files ---------------------------------------------------------------------------------


def missing(path: Path, rng: random.Random) -> None:
    path.unlink()


def empty(path: Path, rng: random.Random) -> None:
    path.write_bytes(b"")


def sparse(path: Path, rng: random.Random) -> None:
    """A terabyte of nothing after the content, or in its place."""
    if rng.random() < 0.5:
        path.write_bytes(b"")
    os.truncate(path, 1 << 40)


def replaced(make: Callable[[Path], None]) -> Callable[[Path, random.Random], None]:
    def damage(path: Path, rng: random.Random) -> None:
        path.unlink()
        make(path)

    return damage


def swapped(path: Path, rng: random.Random) -> None:
    """Two files of the folder change places."""
    other = rng.choice(sorted(p for p in path.parent.iterdir() if p.is_file()))
    a, b = path.read_bytes(), other.read_bytes()
    path.write_bytes(b)
    other.write_bytes(a)


def beside(path: Path, rng: random.Random) -> None:
    """Another file, with a name that differs in case."""
    other = path.with_name(path.name.swapcase() if path.name.swapcase() != path.name else "x")
    other.write_bytes(rng.randbytes(10))


FILE_DAMAGES = [
    missing, empty, sparse, swapped, beside,
    replaced(os.mkdir), replaced(os.mkfifo),
    replaced(lambda path: path.symlink_to(path)),
    replaced(lambda path: path.symlink_to("/nowhere")),
    replaced(lambda path: path.symlink_to("/dev/zero")),
    replaced(lambda path: path.symlink_to("/dev/null")),
    replaced(lambda path: path.symlink_to("..")),
]  # fmt: skip


# Running ------------------------------------------------------------------------------------------


def damaged(folder: Path, rng: random.Random) -> str:
    """Change one file of a folder; what was done, in words."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    descriptions = [path for path in files if path.name == "metadata"]
    path = rng.choice(descriptions if descriptions and rng.random() < 0.4 else files)
    way = rng.random()
    if way < 0.45 and (path.name in REWRITES or path.suffix == ".safetensors"):
        rewrite = REWRITES.get(path.name, rewrite_header)
        rewrite(path, rng)
        what = rewrite.__name__
    elif way < 0.9 and path.stat().st_size:
        change = rng.choice(BYTE_DAMAGES)
        path.write_bytes(change(path.read_bytes(), rng))
        what = change.__name__
    else:
        damage = rng.choice(FILE_DAMAGES)
        damage(path, rng)
        what = damage.__name__
    return f"{what} of {path.relative_to(folder)}"


def outcome(kind: Format, folder: Path) -> str:
    """`right`, or `refused: ERROR`; raises `Defect` for anything else."""
    try:
        with time_limit(), memory_limit(), watched(folder):
            kind.read(folder)
    except kind.errors as error:
        if str(folder) not in f"{error} {getattr(error, 'filename', '')}":
            raise Defect(f"the message does not name the file: {error}") from error
        if any(not c.isprintable() and c != "\n" for c in str(error)):
            raise Defect(f"control characters in the message: {error!s:.200}") from error
        return f"refused: {type(error).__name__}"
    except Defect as error:
        if folder / "e" in CHANGED and str(error) == "another result":
            return "right"
        raise
    except BaseException as error:
        raise Defect(f"{type(error).__name__}: {str(error)[:300]}") from error
    return "right"


WATCHED: list[tuple[Path, list[str]]] = []
"""While a file is read: its folder, and what was done that no file may cause."""


def watch(event: str, args: tuple[tp.Any, ...]) -> None:
    """An audit hook: the interpreter calls it before it runs, unpickles, opens or removes something."""
    if not WATCHED:
        return
    folder, seen = WATCHED[-1]
    if event in ("pickle.find_class", "os.system", "os.exec", "subprocess.Popen", "socket.connect"):
        seen.append(f"{event} {args}")
    elif event in (
        "open",
        "os.rename",
        "os.remove",
        "os.mkdir",
        "os.rmdir",
        "os.link",
        "os.symlink",
    ):
        path, mode = str(args[0]), args[1] if event == "open" else "w"
        writes = not isinstance(mode, str) or any(letter in mode for letter in "wax+")
        if isinstance(args[0], int) or (event == "open" and mode is None):
            return
        inside = os.path.normpath(path).startswith(str(folder))
        if (writes and not inside) or path.startswith(("/etc", "/home", "/root/.ssh")):
            seen.append(f"{event} {path} {mode}")


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """A block in which no file may run a program, unpickle a class, or lead out of its folder."""
    if watch not in HOOKS:
        HOOKS.append(watch)
        sys.addaudithook(watch)
    seen: list[str] = []
    WATCHED.append((folder, seen))
    try:
        yield
    finally:
        WATCHED.pop()
        if seen:
            raise Defect(f"reading did what no file may cause: {seen}")


HOOKS: list[tp.Any] = []
"""An audit hook stays for as long as the process lives."""


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: tp.Any) -> None:
        raise Defect(f"it does not end within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def memory_limit() -> Iterator[None]:
    """A limit on the address space: to ask for terabytes fails, instead of ending the machine."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * os.sysconf("SC_PAGE_SIZE") + HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def campaign(
    count: int, seed: int, names: tp.Sequence[str] = tuple(FORMATS), stop: bool = True
) -> collections.Counter[str]:
    """Damage and read that many files of each format; the outcomes by number.

    Raises the first `Defect`, or prints it if `stop` is false.
    """
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as root:
        for name in names:
            kind, whole = FORMATS[name], Path(root, name)
            whole.mkdir()
            kind.write(whole)
            if (got := outcome(kind, whole)) != "right":
                raise Defect(f"{name} without damage is {got}")
            for number in range(seed, seed + count):
                rng = random.Random(f"{name} {number}")
                folder = Path(root, "damaged")
                shutil.copytree(whole, folder)
                what = damaged(folder, rng)
                try:
                    got = outcome(kind, folder)
                except Defect as error:
                    got = "DEFECT"
                    text = f"{name}, seed {number}, {what}: {error}"
                    if stop:
                        raise Defect(text) from error
                    print(text, flush=True)
                counts[f"{name} {got}"] += 1
                CHANGED.discard(folder / "e")
                shutil.rmtree(folder)
    return counts


def main() -> None:
    options = argparse.ArgumentParser(description=tp.cast(str, __doc__).split("\n")[0])
    options.add_argument("--count", type=int, default=500, help="damaged files of each format")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", choices=FORMATS, action="append")
    given = options.parse_args()
    import absl.logging

    absl.logging.set_verbosity(absl.logging.FATAL)
    sys.unraisablehook = lambda _: None  # Orbax drops tasks of reads that failed
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts = campaign(given.count, given.seed, given.only or tuple(FORMATS), stop=False)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    print_and_exit(counts, f"damaged files, {grown} MiB more memory")


if __name__ == "__main__":
    main()
