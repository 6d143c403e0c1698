"""Many programs at once: `python -m tests.parity.fuzz --count 1000 --seed 0`."""

from __future__ import annotations

import argparse
import collections
import os
import re
import signal
import time
import traceback

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax

from tests.parity.fuzz import prelude
from tests.parity.fuzz.generate import generate
from tests.parity.fuzz.known import explain
from tests.parity.fuzz.run import Difference, Peers, compare


def report(seed: int, found: Difference) -> str:
    """A program that differs, as text that can be run."""
    program = "\n".join(found.program[: found.index + 1])
    return f"--- seed {seed}: {found}\n{program}\n"


def main() -> None:
    """Run the programs of a range of seeds and print what differs and what was covered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--show", action="store_true", help="print each program")
    parser.add_argument("--prelude", action="store_true", help="print the prelude")
    options = parser.parse_args()
    if options.prelude:
        print(prelude.TEXT)
        return
    peers = Peers()
    ended: collections.Counter[str] = collections.Counter()
    used: collections.Counter[str] = collections.Counter()
    raised: collections.Counter[str] = collections.Counter()
    rules: collections.Counter[str] = collections.Counter()
    start = time.time()

    def stop(*_: object) -> None:
        raise TimeoutError("a program took more than 100 seconds")

    signal.signal(signal.SIGALRM, stop)
    for seed in range(options.seed, options.seed + options.count):
        signal.alarm(100)
        try:
            theirs = generate(peers, seed)
        except Exception as error:
            print(f"--- seed {seed}: the generator failed: {type(error).__name__}: {error}"[:500])
            for frame in traceback.extract_tb(error.__traceback__)[-30:]:
                if "parity" in frame.filename:
                    print(f"    {frame.filename.rsplit('/')[-1]}:{frame.lineno} {frame.name}")
            ended["generator failed"] += 1
            if isinstance(error, RecursionError):
                print(
                    f"jaxlib gives no stack back here: go on with --seed {seed + 1}, in a new process"
                )
                break
            continue
        program = [step.text for step in theirs]
        if options.show:
            print(f"--- seed {seed}\n" + "\n".join(program))
        text = "\n".join(program)
        used.update(set(re.findall(r"nnx\.(?:[a-z]+\.)?\w+", text)))
        used.update(
            set(
                re.findall(
                    r"(?:graph|graph_updates|recreate_variables|copy|variables|arrays|ref|has_aux|squeeze|only|reverse|unroll)=(?:True|False|None|2)?",
                    text,
                )
            )
        )
        error = theirs[-1].error
        if error is not None:
            ended["raised in the reference"] += 1
            raised[f"{type(error).__name__}: {str(error)[:70]!r} <- {program[-1][:60]!r}"] += 1
        else:
            ended["ran to the end"] += 1
        try:
            found = compare(peers.run("ours", program), theirs)
        except Exception as error:
            print(f"--- seed {seed}: {type(error).__name__}: {error}\n" + "\n".join(program))
            ended["not compared"] += 1
            continue
        if found:
            rule = explain(found)
            if rule:
                rules[rule] += 1
            else:
                ended["differs"] += 1
                signal.alarm(200)
                if not options.no_shrink:
                    try:
                        small = peers.shrink(found)
                        found = small if not explain(small) else found
                    except TimeoutError:
                        pass
                print(report(seed, found), flush=True)
        if seed % 100 == 99:
            jax.clear_caches()
    signal.alarm(0)
    minutes = (time.time() - start) / 60
    print(f"{options.count} programs, {options.count / minutes:.0f} a minute: {dict(ended)}")
    print("rules:", dict(rules))
    print("raised:")
    for name, count in raised.most_common(40):
        print(f"  {count} {name}")
    print("used:")
    for name, count in sorted(used.items()):
        print(f"  {count} {name}", end=";")
    print()


if __name__ == "__main__":
    main()
