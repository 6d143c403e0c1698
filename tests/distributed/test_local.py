"""What can be said without a second process: shardings, bad arguments, and how processes meet."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from nnxlite.checkpoint import _orbax
from nnxlite.checkpoint._checkpoint import contents_of
from nnxlite.checkpoint._report import together
from nnxlite.sharding import _processes


def over(*spec, **axes) -> NamedSharding:
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
    return NamedSharding(mesh, P(*spec))


# Arrays -------------------------------------------------------------------------------------------


def test_a_batch_goes_to_all_devices_and_comes_back():
    sharding = over("data", data=8)
    assert nnx.distributed.local_rows(sharding, 16).tolist() == list(range(16))
    batch = {"x": np.ones((16, 3), "float32"), "y": jnp.arange(16)}
    whole = nnx.distributed.to_global(batch, sharding)
    assert whole["x"].sharding == whole["y"].sharding == sharding
    for back in (nnx.distributed.to_local(whole), nnx.distributed.gather(whole)):
        assert isinstance(back["y"], np.ndarray) and back["y"].tolist() == list(range(16))


def test_batches_and_shardings_that_do_not_go_together():
    rows, to_global = nnx.distributed.local_rows, nnx.distributed.to_global
    sharding = over("data", data=4, model=2)
    two = NamedSharding(sharding.mesh, P("data", "model"))
    odd = {"a": np.ones(4), "b": np.ones((8, 2))}
    whole = (
        r"^nnx.distributed.local_rows: a batch of 10 rows does not divide on the mesh data=4, mod"
    )
    of_b = r"batch\['b'\]: .* is one of a batch of shape \(8, 2\), and size is 4"
    for call, message in (
        (lambda: rows(sharding, 10), whole + r"el=2: .*4 times.* rows, or pad the last batch\.$"),
        (
            lambda: to_global({"x": np.ones(10)}, sharding),
            r"batch\['x'\]: .*axis 0 is part.* 4 times",
        ),
        (lambda: to_global(odd, sharding, size=4), of_b),
        (lambda: to_global(np.ones(8), two), "batch: .* only valid for values of rank at least 2"),
    ):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            call()
    with pytest.raises(TypeError, match="sharding is a SingleDeviceSharding; pass a NamedSharding"):
        rows(SingleDeviceSharding(jax.devices()[0]), 4)


# Arguments ----------------------------------------------------------------------------------------


@pytest.fixture
def unset(monkeypatch):
    """An environment that says nothing about processes."""
    for name in (_processes.ADDRESS, _processes.COUNT, _processes.INDEX):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_arguments_that_cannot_be(unset):
    initialize = nnx.distributed.initialize
    with pytest.raises(ValueError, match="an address and two numbers.*'num_processes': 2"):
        initialize(num_processes=2, process_id=0)
    unset.setenv("JAX_PROCESS_ID", "one")
    with pytest.raises(ValueError, match="two numbers.*has .*'process_id': 'one'.*JAX_PROCESS_ID"):
        initialize("127.0.0.1:9", 2)


def test_what_is_not_passed_comes_from_the_environment(unset):
    seen = []
    unset.setattr(
        jax.distributed, "initialize", lambda *known, **given: seen.append((known, given))
    )
    unset.setenv("JAX_COORDINATOR_ADDRESS", "host:1")
    unset.setenv("JAX_NUM_PROCESSES", "3")
    nnx.distributed.initialize(process_id=2, initialization_timeout=5)
    options = {"initialization_timeout": 5, "cluster_detection_method": "deactivate"}
    assert seen == [(("host:1", 3, 2), options)]


def test_alone_nothing_happens(unset):
    nnx.distributed.initialize()
    assert jax.process_count() == 1
    nnx.distributed.barrier("alone")
    with pytest.raises(KeyError), nnx.distributed.agreed("alone"):
        raise KeyError


# Failing together ---------------------------------------------------------------------------------


class Service:
    """JAX's coordination service, as process 0 sees it; the others say what is given, or are away."""

    def __init__(self, *others):
        self.others = others

    def key_value_set(self, key, text):
        self.pairs = [(key, text)]

    def wait_at_barrier(self, folder, milliseconds):
        if not self.others:
            raise RuntimeError("DEADLINE_EXCEEDED: Barrier timed out.")
        texts = enumerate(self.others, start=1)
        self.pairs += [(f"{folder}/{index}", json.dumps(text)) for index, text in texts]

    def key_value_dir_get(self, folder):
        return self.pairs

    def key_value_delete(self, key):
        pass


def answered_by(monkeypatch, *others):
    """As process 0 of several, of which the others give these texts when they exchange."""
    seen = Service(*others), len(others) + 1, 0
    monkeypatch.setattr(_processes, "coordination", lambda: seen)


def test_an_error_is_not_hidden_by_those_that_do_not_come(monkeypatch):
    monkeypatch.setattr(_processes, "coordination", lambda: (Service(), 3, 1))
    with pytest.raises(TimeoutError) as late, nnx.distributed.agreed("reading", timeout=5):
        pass
    assert str(late.value).startswith(
        "reading: 1 of 3 processes came within 5 s; not there: 0, 2. Each of them has to make the same "
    )
    with pytest.raises(KeyError, match="'column'"), nnx.distributed.agreed("reading", timeout=5):
        raise KeyError("column")


def test_a_new_shape_that_not_all_have(monkeypatch):
    monkeypatch.setattr(_processes, "coordination", lambda: (Service(), 2, 0))
    with pytest.raises(TimeoutError) as error:
        nnx.distributed.to_global({"x": np.ones((24, 5), "float32")}, over("data", data=8))
    assert str(error.value).startswith(
        "nnx.distributed.to_global: this process has a batch of a new shape, batch['x'] float32[24, 5] "
        "of [24, 5], and not all others do. Give each batch the same number of rows in all processes."
    )


def test_what_failed_elsewhere_fails_here(monkeypatch):
    answered_by(monkeypatch, "", "OSError: the disk is full", "KeyError: 'x'")
    message = r"^reading: process 2 failed \(also: 3\): OSError: the disk is full$"
    with pytest.raises(nnx.distributed.ProcessError, match=message) as caught:
        with nnx.distributed.agreed("reading"):
            pass
    assert caught.value.kind == "OSError"


def test_a_checkpoint_that_failed_elsewhere_fails_here_with_an_error_of_the_class(monkeypatch):
    for name, kind in (
        ("DamagedError", nnx.checkpoint.DamagedError),
        ("FileExistsError", FileExistsError),
        ("OSError", nnx.checkpoint.CheckpointError),
    ):
        answered_by(monkeypatch, f"{name}: it is cut short")
        with pytest.raises(kind, match=f"^reading: process 1 failed: {name}: it is cut short$"):
            with together("reading"):
                pass


def test_parts_that_differ_between_processes(monkeypatch):
    sharding = over("data", data=8)
    forms = ["batch['x'] float32[40, 3] of [40, 3]", "batch['y'] int32[40] of [40]"]
    batch = {"x": np.ones((40, 3), "float32"), "y": np.ones(40, "int32")}
    answered_by(monkeypatch, json.dumps(forms))
    nnx.distributed.to_global(batch, sharding)
    answered_by(monkeypatch, json.dumps([forms[0].replace("40", "32"), forms[1]]))
    nnx.distributed.to_global(batch, sharding)  # known to agree: nobody is asked again
    short = {"x": batch["x"][:24], "y": batch["y"]}
    with pytest.raises(ValueError, match="the parts of a batch differ") as caught:
        nnx.distributed.to_global(short, sharding)
    assert str(caught.value).startswith(
        "nnx.distributed.to_global: the parts of a batch differ: process 0 has batch['x'] "
        "float32[24, 3] of [24, 3], process 1 has batch['x'] float32[32, 3] of [32, 3]. All processes"
    )
    answered_by(monkeypatch, json.dumps(["batch['x']: it is global"]))
    with pytest.raises(ValueError, match=r"process 1 has batch\['x'\]: it is global"):
        nnx.distributed.to_global({"x": batch["x"][:16]}, sharding)


def test_arrays_that_this_process_has_no_part_of(monkeypatch):
    """Of several processes, told apart by the devices that this one is said to have."""
    sharding = over("data", data=8)
    whole = jax.device_put(jnp.arange(8.0), sharding)
    monkeypatch.setattr(type(whole), "is_fully_addressable", False)
    with pytest.raises(ValueError, match="batch: this array is global already; pass the part of t"):
        nnx.distributed.to_global(whole, sharding)
    monkeypatch.setattr(NamedSharding, "addressable_devices", frozenset())
    with pytest.raises(ValueError, match="mesh data=8 has no device of process 0. Make it of j"):
        nnx.distributed.to_global(np.ones(8), sharding)
    monkeypatch.setattr(type(whole), "addressable_shards", [])
    message = r"to_local: array\['loss'\]: no part of it is on the devices of this process"
    with pytest.raises(ValueError, match=message):
        nnx.distributed.to_local({"loss": whole})


def test_parts_that_are_no_block(monkeypatch):
    sharding = over("data", "model", data=2, model=2)
    whole = jax.device_put(jnp.ones((4, 4)), sharding)
    three = (whole + 0).addressable_shards[:3]  # each array caches its own
    monkeypatch.setattr(type(whole), "is_fully_addressable", False)
    monkeypatch.setattr(type(whole), "addressable_shards", three)
    message = (
        r"to_local: array: what the devices of this process have of \(4, 4\) is not a rectangular"
    )
    with pytest.raises(ValueError, match=message):
        nnx.distributed.to_local(whole)


def test_processes_that_save_different_things(monkeypatch):
    """The messages; that all processes get them is tested with processes."""

    def refusal(theirs):
        asked = []

        def answer(name, text):
            asked.append(text)
            return [text, "another hash" if len(asked) == 1 else json.dumps(theirs)]

        monkeypatch.setattr(_orbax, "exchange", answer)
        with pytest.raises(nnx.checkpoint.CheckpointError) as caught:
            _orbax.check_same_in_all({"w": "float32[2]"}, {"w": np.ones(2, "float32")})
        assert len(asked[0]) == 64  # one hash, unless something differs
        return str(caught.value), json.loads(asked[1])

    _, mine = refusal({})
    start = "is on no mesh of all processes, and differs: in process 0 it is"
    for theirs, first, second in (
        (
            {},
            f"'w' {start} float32[2] of hash ",
            ", in process 1 not saved. A checkpoint has one v",
        ),
        ({**mine, "b": "Python int 3"}, f"'b' {start} not saved", ", in process 1 Python int 3. A"),
        ({"w": "float32[3]"}, f"'w' {start} float32[2] of hash", ", in process 1 float32[3]. A c"),
    ):
        text, _ = refusal(theirs)
        assert text.startswith(first) and second in text


def test_a_part_that_cannot_be_written(monkeypatch, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    content = _orbax.content_of(contents_of({"w": jnp.ones(2)}))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    answered_by(monkeypatch, "OSError: No space left on device")
    path = _orbax.folder(tmp_path / "c")
    message = (
        f"could not be written into {tmp_path}, and .*process 1 failed: OSError: No space left"
    )
    with pytest.raises(nnx.checkpoint.CheckpointError, match=message):
        _orbax.write(path, content)
    assert list(tmp_path.iterdir()) == []
