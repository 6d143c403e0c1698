"""The launcher, with processes that do not need JAX: what it prints, its status, and no orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from nnxlite.distributed import _launcher

JOIN = (
    "import os, pathlib; "
    "pathlib.Path(os.environ['NNXLITE_JOINED'], os.environ['JAX_PROCESS_ID']).touch()\n"
)


@pytest.fixture
def launched(tmp_path, capfd, monkeypatch):
    """Launch a program; its status, and what came out and on the error stream."""
    monkeypatch.setattr(_launcher, "GRACE", 0.5)
    monkeypatch.setattr(_launcher, "SAVING", 0.5)
    before = signal.getsignal(signal.SIGTERM)

    def launch(program: str, *options: str, count: int = 3, join: bool = True, arguments=()):
        path = tmp_path / "program.py"
        path.write_text((JOIN if join else "") + textwrap.dedent(program))
        status = _launcher.main(["-n", str(count), *options, str(path), *arguments])
        out = capfd.readouterr()
        return status, out.out, out.err

    yield launch
    signal.signal(signal.SIGTERM, before)


def test_each_process_knows_its_number(launched):
    program = """
    import sys
    e = os.environ
    print(e["JAX_PROCESS_ID"], e["JAX_NUM_PROCESSES"], end=" ")
    print(e["XLA_FLAGS"][-9:], e["JAX_PLATFORMS"], *sys.argv[1:])
    """
    given = ("--devices-per-process", "7")
    status, out, err = launched(program, *given, arguments=("--quick", "x"))
    assert status == 0 and err == ""
    assert sorted(out.splitlines()) == [f"[{i}] {i} 3 e_count=7 cpu --quick x" for i in range(3)]


def test_the_first_one_that_fails_ends_all(launched):
    program = """
    import sys, time
    if os.environ["JAX_PROCESS_ID"] == "1":
        print("no data", file=sys.stderr)
        sys.exit(3)
    time.sleep(100)
    """
    begin = time.monotonic()
    status, out, err = launched(program)
    assert status == 3 and "[1] no data" in out and time.monotonic() - begin < 50
    lines = err.splitlines()
    assert lines[0].startswith("nnxlite.distributed: process 1 of 3 ended with status 3 after ")
    assert lines[0].endswith(" s; ending the other 2.")
    assert lines[1:] == ["nnxlite.distributed: the last lines of process 1:", "    no data"]


def test_one_that_is_killed(launched):
    program = """
    import signal, time
    if os.environ["JAX_PROCESS_ID"] == "0":
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(100)
    """
    status, _, err = launched(program, count=2)
    assert status == 128 + signal.SIGSEGV
    assert "process 0 of 2 was killed by SIGSEGV after " in err


def test_one_that_never_joins(launched):
    program = f"""
    import os, time
    if os.environ["JAX_PROCESS_ID"] != "2":
        {JOIN.strip()}
    time.sleep(100)
    """
    status, _, err = launched(program, "--timeout", "0.2", join=False)
    assert status == 1
    assert "after 0.2 s these processes have not joined the others: 2. Each has to call" in err


def test_one_that_ends_without_joining(launched):
    status, _, err = launched("", count=1, join=False)
    assert status == 1
    assert "process 0 of 1 ended without joining the others. The script has to call nnx" in err


def test_options_that_cannot_be(capsys):
    for arguments, text in {
        ("-n", "0", __file__): "has to be at least 1",
        ("-n", "2", "nowhere.py"): "there is no file nowhere.py",
    }.items():
        with pytest.raises(SystemExit) as error:
            _launcher.main(arguments)
        assert error.value.code == 2 and text in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_launcher(tmp_path, number):
    program = tmp_path / "program.py"
    program.write_text(
        JOIN + "import time, subprocess, sys\n"
        f"pathlib.Path({str(tmp_path)!r}, f'pid{{os.getpid()}}').touch()\n"
        "time.sleep(100)\n"
    )
    command = [sys.executable, "-m", "nnxlite.distributed", "-n", "2", str(program)]
    root = Path(__file__).parents[2]
    launcher = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(root)}, stderr=subprocess.PIPE, text=True
    )
    with launcher:
        try:
            for _ in range(600):
                if len(pids := [int(p.name[3:]) for p in tmp_path.glob("pid*")]) == 2:
                    break
                time.sleep(0.05)
            launcher.send_signal(number)
            _, err = launcher.communicate(timeout=60)
        finally:
            launcher.kill()
    assert launcher.returncode == (-number if number == signal.SIGKILL else 130)
    if number != signal.SIGKILL:
        assert "nnxlite.distributed: interrupted; ending all processes." in err
    for _ in range(200):
        if not any(map(_runs, pids)):
            break
        time.sleep(0.05)
    assert [pid for pid in pids if _runs(pid)] == []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
