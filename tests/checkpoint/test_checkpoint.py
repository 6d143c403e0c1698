"""`save` and `restore`: everything comes back, into the objects that are there, or nothing changes."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from nnxlite.checkpoint import CheckpointError, MismatchError, Rule
from nnxlite.checkpoint._contents import Contents
from nnxlite.checkpoint._loading import lossless, renaming
from tests.checkpoint.models import READ, SAVE, batch, bits, build, linear, names_in, params, step
from tests.laws.graphs import roots

checkpoint = nnx.checkpoint
average = lambda: nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "c"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = (*build(), average())
    for position in range(3):
        step(*run, batch(position))
    path = tmp_path_factory.mktemp("trained") / "last"
    rngs = nnx.Rngs(0, noise=jax.random.key(3, impl="rbg"))
    rngs.noise()
    items = {**dict(zip(("model", "optimizer", "metrics"), run)), "rngs": rngs}
    checkpoint.save(path, **items, step=3, note="abc", rate=0.1, done=False)
    return items, path


def test_everything_comes_back_and_a_restored_run_goes_on_as_if_it_had_not_ended(trained):
    items, path = trained
    items = dict(zip(items, nnx.clone(list(items.values()))))
    model, optimizer = build(1)
    rngs = nnx.Rngs(5, noise=jax.random.key(4, impl="rbg"))
    new = {"model": model, "optimizer": optimizer, "metrics": average(), "rngs": rngs}
    model.tables["name"] = "new"
    variables = lambda: {id(x) for _, x in nnx.iter_graph(model) if isinstance(x, nnx.Variable)}
    before = variables()
    report = checkpoint.restore(path, **new, cast=None)  # an average of Adam has become float32
    assert report.complete and not report.cast and not report.renamed
    assert bits(*new.values()) == bits(*items.values())
    assert model.last is model.blocks[0] and model.again is model and variables() == before
    assert type(model.host) is np.ndarray and model.tables["name"] == "old"
    others = {name: value for name, value in report.values.items() if name not in new}
    assert others == {"step": 3, "note": "abc", "rate": 0.1, "done": False}
    assert report.values["model"] is model
    for run in (items, new):
        step(*[run[name] for name in ("model", "optimizer", "metrics")], batch(3))
    assert bits(*new.values()) == bits(*items.values())


def test_names_are_readable_and_do_not_depend_on_the_order_of_attributes(trained):
    leaves = checkpoint.info(trained[1]).leaves
    assert leaves["model.blocks.1.kernel"] == "float32[4,4]"
    assert leaves["optimizer.opt_state.1.hyperparams.learning_rate"] == "float32[]"
    assert leaves["model.drop.rngs.key"] == "key<threefry2x32>[]"
    assert leaves["rngs.noise.key"] == "key<rbg>[]"
    assert leaves["model.pair.b.1"] == "Python float" and leaves["step"] == "Python int"
    forward, backward = nnx.Dict(), nnx.Dict()
    for first, second in ("ab", "ba"):
        forward[first], backward[second] = linear(), linear()
    names = lambda **items: list(Contents(items).leaves)
    assert names(m=forward) == names(m=backward)
    tables = {key: nnx.Variable(jnp.zeros(1)) for key in ("0", "a.b", "", "a/b", "%")}
    found = names(m=tables, both=[{0: jnp.zeros(1)}, {"0": jnp.zeros(2)}])
    assert found == ["both.0.0", "both.1.0", "m.%", "m.%25", "m.0", "m.a%2Eb", "m.a%2Fb"]
    alike = {"x": {0: jnp.ones(1), "0": jnp.ones(1)}, "'x'": {0: jnp.ones(1)}}
    assert len(names(m=alike)) == 3
    with pytest.raises(CheckpointError, match=r"Several arrays have the name ''x'\.0'"):
        Contents({"m": alike}, named=False)


def test_the_summary_of_a_checkpoint(trained, folder):
    found = checkpoint.info(trained[1])
    text = repr(found)
    assert text.splitlines()[0].startswith(f"{trained[1]}: ")
    assert "model: Net with 22 leaves" in text and "step: 3" in text and "note: 'abc'" in text
    assert found.aliases["model.last"] == "model.blocks.0"
    assert found.classes["model.norm.mean"] == "BatchStat"
    checkpoint.save(folder, w=jnp.ones((3, 2)), b=jnp.ones(5, "bfloat16"), step=7)
    assert checkpoint.info(folder).nbytes == 3 * 2 * 4 + 5 * 2


def test_a_saved_checkpoint_has_what_was_there_when_it_was_saved(tmp_path):
    model = linear()
    model.host = np.zeros(3)
    donated = jax.jit(lambda x: x * 100, donate_argnums=0)
    with checkpoint.Manager(tmp_path, keep=None) as manager:
        for number in range(4):
            model.kernel[...] = float(number)
            model.host[:] = number
            manager.save(number, model=model)
            model.kernel.set_value(donated(model.kernel.get_value()))
            model.host[:] = -1
    for number in range(4):
        checkpoint.restore(tmp_path / str(number), model=model)
        assert set(np.asarray(model.kernel).flat) == {float(number)} == set(model.host)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(roots)
def test_random_graphs_come_back_with_their_sharing(folder, root):
    before = nnx.clone(root)
    try:
        checkpoint.save(folder, root=root, overwrite=True)
    except CheckpointError as error:
        assert "a checkpoint cannot contain" in str(error)  # the graphs contain objects as values
        return
    contents = Contents({"root": root})
    contents.write({name: zero(leaf.value) for name, leaf in contents.leaves.items()})
    report = checkpoint.restore(folder, **contents.root)
    assert report.complete and not report.cast
    assert not nnx.diff(before, report.values["root"])


def zero(value):
    if isinstance(value, (bool, int, float, complex, str)):
        return type(value)()
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(value)
        return jax.random.wrap_key_data(data * 0, impl=str(jax.random.key_impl(value)))
    return (value * 0).astype(value.dtype)


def test_a_tied_layer_comes_back_into_two_but_two_not_into_one(trained, folder):
    items, path = trained
    model, _ = build(1, tied=False)
    kernels = model.blocks[0].kernel, model.last.kernel
    for kernel, device in zip(kernels, jax.devices()):
        kernel.set_value(jax.device_put(kernel.get_value(), device))
    assert checkpoint.restore(path, model=model).complete
    for kernel, device in zip(kernels, jax.devices()):
        np.testing.assert_array_equal(kernel, items["model"].blocks[0].kernel)
        assert kernel.get_value().devices() == {device}
    checkpoint.save(folder, model=model)
    tied, _ = build(2)
    before = bits(tied)
    with pytest.raises(MismatchError, match=r"unexpected, 2: model\.last\.bias, model\.l"):
        checkpoint.restore(folder, model=tied)
    assert bits(tied) == before


def test_what_items_share_is_stored_once(folder):
    model = linear()
    checkpoint.save(folder, model=model, pair=nnx.ModelAndOptimizer(model, optax.sgd(0.1)))
    assert sum("kernel" in name for name in checkpoint.info(folder).leaves) == 1
    other = nnx.ModelAndOptimizer(linear(1), optax.sgd(0.1))
    assert checkpoint.restore(folder, pair=other).complete
    np.testing.assert_array_equal(other.model.kernel, model.kernel)


def test_pytrees_numbers_and_states(folder):
    model, state = linear(), nnx.state(linear(1))
    saved = {"params": {"w": jnp.ones(2), "layers": (jnp.zeros(1), 3)}, "key": jax.random.key(1)}
    saved |= {"epoch": 4, "complex": 1 + 2j, "inf": float("inf"), "state": nnx.state(model)}
    checkpoint.save(folder, **saved)
    new = {"params": {"w": jnp.zeros(2), "layers": (jnp.ones(1), 0)}, "key": jax.random.key(0)}
    report = checkpoint.restore(folder, **new, state=state, epoch=0)
    assert report.complete
    assert nnx.tree_equal(report.values["params"], saved["params"])
    np.testing.assert_array_equal(state["kernel"].get_value(), model.kernel)
    assert all(report.values[name] == saved[name] for name in ("key", "epoch", "complex", "inf"))


@pytest.mark.parametrize("file", READ)
def test_array_references(tmp_path, file):
    model = nnx.Dict(v=nnx.Variable(jnp.arange(3.0), ref=True), r=jax.new_ref(jnp.ones(2)))
    SAVE[file](tmp_path, model)
    ref = model.r
    model.v[...] = 0.0
    ref[...] = jnp.zeros(2)
    READ[file](tmp_path, model)
    assert model.v.tolist() == [0, 1, 2] and model.r is ref and ref[...].tolist() == [1, 1]
    model.r = other = jax.new_ref(jnp.zeros(2, "float16"))
    model.v[...] += 1
    with pytest.raises(CheckpointError, match="r' is a reference to float16, which cannot become"):
        READ[file](tmp_path, model, cast=None)
    assert other[...].tolist() == [0, 0] and model.v.tolist() == [1, 2, 3]
    READ[file](tmp_path, model, cast=True)
    assert other[...].tolist() == [1, 1] and model.v.tolist() == [0, 1, 2]


def test_states_of_transformations_and_averages(folder):
    """Groups have masks; one counts steps and remembers differences, the other one has a key."""
    slow = optax.MultiSteps(optax.lbfgs(1e-2, 2, linesearch=None), 2).gradient_transformation()
    groups = {"kernel": slow, "bias": optax.noisy_sgd(1e-2, key=jax.random.key(3))}
    tx = optax.partition(groups, lambda params: nnx.map_state(lambda path, _: path[-1], params))

    def new(seed):
        model = linear(seed)
        return [model, nnx.Optimizer(model, tx, wrt=nnx.Param), nnx.EMA(model, decay=0.9)]

    def train(model, optimizer, ema):
        optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model)))
        ema.update(model)

    run, resumed = new(0), new(1)
    train(*run)
    checkpoint.save(folder, run=run)
    assert checkpoint.restore(folder, run=resumed).complete
    assert bits(*resumed) == bits(*run)
    for each in (run, resumed):
        train(*each)
    assert bits(*resumed) == bits(*run)


@pytest.mark.parametrize("file", READ)
def test_only_a_part(tmp_path, file):
    part = lambda seed: nnx.Dict(a=linear(seed), drop=nnx.Dropout(0.5, rngs=nnx.Rngs(seed)))
    model, new = part(0), part(1)
    noise = bits(new.drop)
    for name, options in (("whole", {}), ("part", {"only": nnx.Param})):
        (tmp_path / name).mkdir()
        SAVE[file](tmp_path / name, model, **options)
        new.a = linear(2)
        assert READ[file](tmp_path / name, new, only=nnx.Param).complete
        assert bits(new.a) == bits(model.a) and bits(new.drop) == noise
        with pytest.raises(CheckpointError, match="only=LoRAParam matches none of the 4 leaves of"):
            READ[file](tmp_path / name, new, only=nnx.LoRAParam)
    with pytest.raises(MismatchError, match=r"missing, 2: (model\.)?drop\.rngs\.count, .*ngs\.key"):
        READ[file](tmp_path / "part", new)
    with pytest.raises(CheckpointError, match="only=LoRAParam matches none of the 4 leaves of"):
        SAVE[file](tmp_path / "whole", new, only=nnx.LoRAParam)


def test_renaming(folder):
    old = nnx.Dict(enc=nnx.List([linear(i) for i in range(2)]), head=linear(5))
    checkpoint.save(folder, net=old)
    new = nnx.Dict(body=nnx.Dict(l0=linear(7), l1=linear(8)), head=linear(9))
    rename = {"net.enc.{i}.*": "model.body.l{i}.*", "net.**": "model.**"}
    report = checkpoint.restore(folder, model=new, rename=rename)
    assert report.complete
    assert ("net.enc.1.kernel", "model.body.l1.kernel") in report.renamed
    np.testing.assert_array_equal(new.body.l1.kernel, old.enc[1].kernel)
    assert "renamed, 6: net.enc.0.bias to model.body.l0.bias, " in repr(report)
    rename = {"net.head.*": "a.*", "net.head.**": "b.**"}  # the first one counts
    with pytest.raises(MismatchError, match=r"missing, 2: b\.bias"):
        checkpoint.restore(folder, a=linear(), b=linear(), rename=rename)
    assert renaming("a.kernel", "kernel") == 'rename={"a.kernel": "kernel"}'
    assert renaming("kernel", "a.kernel") == 'rename={"kernel": "a.kernel"}'


@pytest.mark.parametrize("file", READ)
def test_dtypes(tmp_path, file):
    half, full = linear(param_dtype=jnp.bfloat16), linear(1)
    SAVE[file](tmp_path, half)
    report = READ[file](tmp_path, full)
    assert full.kernel.dtype == jnp.float32 and report.cast[0].stored == "bfloat16[3]"
    assert "bias: stored bfloat16[3], wanted float32[3], " in repr(report)
    assert bits(full) != bits(half) and not READ[file](tmp_path, full, cast=None).cast
    assert bits(full) == bits(half)
    full = linear(2)
    (tmp_path / "full").mkdir()
    SAVE[file](tmp_path / "full", full)
    before = bits(half)
    with pytest.raises(MismatchError, match="(?s)float32.*cast=True casts with .*cast=None keeps"):
        READ[file](tmp_path / "full", half)
    assert bits(half) == before
    READ[file](tmp_path / "full", half, cast=True)
    np.testing.assert_array_equal(half.kernel, full.kernel.astype("bfloat16"))


@pytest.mark.parametrize("file", READ)
@pytest.mark.parametrize("value", [np.array([2**40 + 5]), np.array([1 / 3, np.inf])], ids=str)
def test_64_bits_without_x64(tmp_path, value, file):
    """`cast=None` keeps dtypes, or says that JAX does not have this one."""
    SAVE[file](tmp_path, nnx.Dict(v=nnx.Variable(value)))
    small = jax.dtypes.canonicalize_dtype(value.dtype)
    for old in (jnp.zeros(len(value), small), jax.ShapeDtypeStruct(value.shape, small)):
        model = nnx.Dict(v=nnx.Variable(old))
        message = f"v: stored {value.dtype}.*without x64 JAX has no arrays of {value.dtype}: cast=T"
        with pytest.raises(MismatchError, match=f"(?s){message}"):
            READ[file](tmp_path, model, cast=None)
        assert model.v.get_value() is old
        (change,) = READ[file](tmp_path, model, cast=True).cast
        assert change[1:] == (f"{value.dtype}[{len(value)}]", f"{small}[{len(value)}]")
        np.testing.assert_array_equal(model.v, value.astype(small))
    model = nnx.Dict(v=nnx.Variable(np.zeros(len(value), small)))
    assert not READ[file](tmp_path, model, cast=None).cast
    np.testing.assert_array_equal(model.v.get_value(), value, strict=True)


def test_a_stored_number_has_the_dtype_of_the_array_that_it_becomes(folder):
    checkpoint.save(folder, x=3.5)
    report = checkpoint.restore(folder, x=jnp.zeros((), "float16"), cast=None)
    assert report.values["x"].dtype == "float16" and report.values["x"] == 3.5
    assert [m.stored for m in report.cast] == ["Python float"]
    model, one = (nnx.Dict(v=nnx.Variable(value)) for value in (jnp.int32(0), 0))
    with pytest.raises(MismatchError, match="Python float, wanted int32.*\n  cast=True casts with"):
        checkpoint.restore(folder, x=model, cast=None, rename={"x": "x.v"})
    checkpoint.restore(folder, x=one, cast=None, rename={"x": "x.v"})
    assert model.v.value == 0 and one.v.value == 3.5  # a number has no other dtype to keep


BYTE, HALF, FLOAT8 = (jnp.zeros((), dtype) for dtype in ("int8", "float16", "float8_e4m3fn"))
UNFIT = [(300, BYTE), (2**70, BYTE), (1e5, HALF), (np.inf, FLOAT8), (np.nan, 3), (1j, 2.0)]


@pytest.mark.parametrize(("number", "old"), [*UNFIT, (1e300j, HALF + 0j)])
def test_a_number_that_does_not_fit_is_refused(folder, number, old):
    model, mapping = nnx.Dict(v=nnx.Variable(old)), checkpoint.Mapping([Rule("v", "v")])
    checkpoint.save(folder, v=number)
    refused = pytest.raises(CheckpointError, match="v' was saved as the number .* of the range of")
    with refused:
        checkpoint.restore(folder, model=model, rename={"v": "model.v"}, cast=True)
    with refused:
        mapping.load({"v": number}, model, cast=True)
    assert model.v.get_value() is old


def test_no_cast_without_a_word_changes_a_value():
    names = "bool int8 uint8 float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2".split()
    values = {name: np.arange(-128, 127).astype(jnp.dtype(name)) for name in names}
    values |= {f"int{n}": np.array([2 ** (n - 1) - 1], f"int{n}") for n in (32, 64)}
    for old, new in filter(lambda pair: lossless(*pair), itertools.permutations(values, 2)):
        cast = values[old].astype(jnp.dtype(new)).astype(jnp.dtype(old))
        np.testing.assert_array_equal(cast, values[old], strict=True)
    python = [f"Python {name}" for name in ("bool", "int", "float", "complex")]
    table = [[lossless(old, new) for new in python] for old in python]
    assert table == [[1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]]


def test_keys_are_not_arrays(folder):
    checkpoint.save(folder, x=jax.random.key(0))
    other_key = jax.random.key(0, impl="rbg")
    for other in (jnp.zeros(2, "uint32"), jnp.uint32(0), other_key, 3):
        with pytest.raises(MismatchError, match=r"stored key<threefry2x32>\[\], wanted") as caught:
            checkpoint.restore(folder, x=other, cast=True)
        assert "cast=True casts" not in str(caught.value)
        assert ("wrap_key_data makes a key" in str(caught.value)) is (other is not other_key)


def test_keys_of_another_implementation_are_not_cast(folder):
    """The message says what to do, which works."""
    saved = nnx.Rngs(0)
    saved()
    checkpoint.save(folder, streams=saved)

    def read(impl, **options):
        streams = nnx.Rngs(jax.random.key(5, impl=impl))
        checkpoint.restore(folder, streams=streams, **options)
        return streams

    message = r"random keys of threefry2x32 cannot be cast to rbg: .*, impl='threefry2x32'\)\), .*R"
    with pytest.raises(MismatchError, match=message) as caught:
        read("rbg", cast=True)
    assert "cast=True casts" not in str(caught.value)
    assert read("threefry2x32")() == nnx.clone(saved)()
    assert read("rbg", only=nnx.Not(nnx.RngKey)).default.count.value == 1


def test_renamings_that_are_wrong(folder):
    model = linear()
    checkpoint.save(folder, model=model)
    for rename, message in (
        ({"model.kernle": "model.x"}, r"no stored name matches 'model\.kernle' \(near: model\.ker"),
        ({"model.kernel": "model.bias"}, r"(?s)missing, 1: model\.kernel.*cted, 1: model\.bias"),
        ({"model.*": "model.{i}"}, r"'model\.\*', 'model\.\{i\}'.*must have the same wildcards"),
    ):
        with pytest.raises(ValueError, match=message):
            checkpoint.restore(folder, model=model, rename=rename)


def test_without_strict_what_matches_is_restored_and_nothing_is_left_without_a_value(folder):
    old = nnx.Dict(a=linear(), gone=linear())
    checkpoint.save(folder, model=old)
    model = nnx.Dict(a=linear(1), new=linear(2))
    before = bits(model.new)
    report = checkpoint.restore(folder, model=model, strict=False)
    assert report.restored == ("model.a.bias", "model.a.kernel") and not report.complete
    assert report.missing == ("model.new.bias", "model.new.kernel")
    assert report.unexpected == ("model.gone.bias", "model.gone.kernel")
    np.testing.assert_array_equal(model.a.kernel, old.a.kernel)
    assert bits(model.new) == before
    abstract = nnx.eval_shape(lambda: nnx.Dict(a=linear(), b=linear()))
    with pytest.raises(MismatchError, match=r"2 abstract leaves, such as model\.b\.bias, have no"):
        checkpoint.restore(folder, model=abstract, strict=False)


def test_what_cannot_be_saved(folder):
    deleted = linear()
    deleted.kernel.get_value().delete()
    abstract, thing = nnx.eval_shape(linear), nnx.Variable(object())
    for items, message in (
        ({"model": deleted}, r"'model\.kernel' has been deleted, probably donated"),
        ({"model": abstract}, r"'model\.bias' is abstract: it has no value to s"),
        ({"v": thing}, r"'v' is a object, which a checkpoint cannot contain"),
        ({}, r"Pass what is to be saved or restored by n"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.save(folder, **items)
    inside = nnx.jit(lambda model: checkpoint.save(folder, model=model))
    with pytest.raises(CheckpointError, match=r"'model\.bias' is traced: save and rest"):
        inside(linear())
    assert not folder.exists()


OPTIONS = {
    "save": ("only", "overwrite"),
    "restore": ("only", "rename", "strict", "cast"),
    "Manager.save": ("only", "force", "metrics"),
    "Manager.restore": ("only", "rename", "strict", "cast"),
}


@pytest.mark.parametrize("call", OPTIONS)
def test_an_item_with_the_name_of_an_option_is_refused(tmp_path, call):
    objects = average(), [nnx.Linear(1, 1, rngs=nnx.Rngs(0))]
    model, path = linear(), tmp_path / "1"
    if "restore" in call:
        checkpoint.save(path, model=linear(1))
    before = bits(model)
    manager = checkpoint.Manager(tmp_path)
    function = getattr(manager if "Manager" in call else checkpoint, call.split(".")[-1])
    for name in OPTIONS[call]:
        asked = call.replace("Manager.re", "nnx.checkpoint.re")
        message = f"{asked}: `{name}` is an option, and got "
        if name == "only":
            message += "|is not a filter|only='x' matches none of the 2 leaves of model, such as"
        for item in (*objects, 3, "x", {"a": jnp.ones(3)}):
            with pytest.raises((CheckpointError, TypeError), match=message):
                function(1 if "Manager" in call else path, model=model, **{name: item})
    assert bits(model) == before and path.exists() is ("restore" in call)


@pytest.mark.parametrize("name", ["rename", "strict", "cast", "force", "metrics"])
def test_items_with_the_name_of_another_calls_option(folder, name):
    """`save` stores an item called `strict`; `restore` brings it back under another name."""
    item, new = linear(3), linear()
    checkpoint.save(folder, **{name: item})
    if name in OPTIONS["restore"]:
        checkpoint.restore(folder, other=new, rename={f"{name}.**": "other.**"})
    else:
        checkpoint.restore(folder, **{name: new})
    assert bits(new) == bits(item)


def test_an_existing_folder_is_not_overwritten_unasked(tmp_path, folder):
    checkpoint.save(folder, step=1)
    with pytest.raises(FileExistsError, match="pass overwrite=True to replace it when the new"):
        checkpoint.save(folder, step=2)
    checkpoint.save(folder, step=2, overwrite=True)
    assert checkpoint.info(folder).values == {"step": 2} and names_in(tmp_path) == ["c"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(FileExistsError, match="is not a checkpoint, and is not overwritten"):
        checkpoint.save(tmp_path / "mine", step=2, overwrite=True)


@pytest.mark.parametrize("there", [False, True])
def test_a_replacement_that_was_interrupted_is_found_and_completed(tmp_path, folder, there):
    """A complete checkpoint beside the path is newer than the one that is there, if any."""
    checkpoint.save(folder, step=1)
    folder.rename(tmp_path / ".c.new")
    if there:
        (folder / "arrays").mkdir(parents=True)  # half removed
    assert checkpoint.info(folder).values == {"step": 1}
    assert checkpoint.restore(folder, step=0).values["step"] == 1
    with pytest.raises(FileExistsError):
        checkpoint.save(folder, step=2)
    assert names_in(tmp_path) == ["c"]


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_a_checkpoint_is_one_of_orbax(folder):
    ocp = pytest.importorskip("orbax.checkpoint")
    checkpoint.save(folder, model=linear())
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        args = ocp.args.Composite(arrays=ocp.args.PyTreeRestore())
        arrays = checkpointer.restore(folder, args=args).arrays
    shapes = {name: array.shape for name, array in arrays.items()}
    assert shapes == {"model.bias": (3,), "model.kernel": (2, 3)}


@pytest.mark.parametrize("form", ["state", "dict"])
def test_trees_that_orbax_wrote_by_hand(folder, form):
    ocp = pytest.importorskip("orbax.checkpoint")
    model, optimizer = build()
    kinds = nnx.Any(nnx.Param, nnx.BatchStat, nnx.RngState)
    selected = nnx.All(kinds, nnx.Not(nnx.PathContains("empty")))
    state = nnx.state(model, selected)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, state if form == "state" else nnx.to_pure_dict(state))
    new, _ = build(1)
    assert checkpoint.restore(folder, model=new, only=selected).complete
    assert bits(nnx.state(new, selected)) == bits(state)
    assert checkpoint.info(folder).leaves["blocks.1.kernel"] == "float32[4,4]"
    with pytest.raises(CheckpointError, match="as one tree: restore one item of it, not mod"):
        checkpoint.restore(folder, model=new, optimizer=optimizer)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "one", jnp.arange(3))
    assert checkpoint.restore(folder / "one", x=jnp.zeros(3, int)).values["x"].tolist() == [0, 1, 2]


def mesh(shape, names, devices=None, kind=jax.sharding.AxisType.Auto):
    return jax.make_mesh(shape, names, (kind,) * len(names), devices=devices)


@pytest.mark.parametrize("file", READ)
def test_shardings_and_commitment_are_those_of_the_model(tmp_path, file):
    values, here = np.arange(64, dtype="f4").reshape(8, 8), mesh((2, 4), ("x", "y"))
    sharded = NamedSharding(here, P("x", "y"))
    SAVE[file](tmp_path, params(**{name: jax.device_put(values, sharded) for name in "abcd"}))
    four = NamedSharding(mesh((4,), ("z",), jax.devices()[4:]), P(None, "z"))
    model = params(a=jax.device_put(values * 0, four), b=jnp.zeros((8, 8)))
    model.c = nnx.Param(jax.device_put(values * 0, jax.devices()[3]))
    abstract = jax.ShapeDtypeStruct((8, 8), "float32")
    model.d = nnx.Param(abstract, sharding=("y", None), mesh=here)
    READ[file](tmp_path, model)
    for variable in model.values():
        np.testing.assert_array_equal(variable, values)
    assert model.a[...].sharding == four
    assert not model.b[...].committed and len(model.b[...].devices()) == 1
    assert model.c[...].devices() == {jax.devices()[3]} and model.c[...].committed
    assert model.d[...].sharding == NamedSharding(here, P("y", None))


@pytest.mark.parametrize("kind", list(jax.sharding.AxisType)[:2])
@pytest.mark.parametrize("file", READ)
def test_an_annotated_abstract_model_comes_onto_a_mesh_with_any_axes(tmp_path, file, kind):
    """`jax.make_mesh` makes explicit axes: traced arrays are on the shape of a mesh, without devices."""
    annotated = lambda: linear(features=16, kernel_metadata={"sharding": ("x", "y")})
    model = linear(features=16)
    SAVE[file](tmp_path, model)
    here = mesh((2, 4), ("x", "y"), kind=kind)
    with jax.set_mesh(here):
        abstract = nnx.eval_shape(annotated)
    if kind == jax.sharding.AxisType.Explicit:
        for used, known in ((None, "none"), (mesh((4, 2), ("x", "y"), kind=kind), "x=4, y=2")):
            message = rf"(bias|kernel)' is abstract, on a mesh of x=2, y=4 .* use is {known}\. Rest"
            with contextlib.nullcontext() if used is None else jax.set_mesh(used):
                with pytest.raises(CheckpointError, match=message):
                    READ[file](tmp_path, abstract)
            assert isinstance(abstract.kernel.get_value(), jax.ShapeDtypeStruct)
    with jax.set_mesh(here):
        READ[file](tmp_path, abstract)
    assert abstract.kernel.get_value().sharding == NamedSharding(here, P("x", "y"))
    assert len(abstract.bias.get_value().devices()) == 8
    np.testing.assert_array_equal(abstract.kernel, model.kernel)


def test_a_mesh_that_does_not_divide_what_is_stored(folder):
    checkpoint.save(folder, model=linear())
    abstract = nnx.eval_shape(linear)
    where = NamedSharding(mesh((8,), ("model",)), P(None, "model"))
    kernel = jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=where)
    abstract.kernel.set_value(kernel)
    message = r"^'model.kernel' was saved as float32\[2,3\], which .* does not divide: "
    with pytest.raises(CheckpointError, match=message):
        checkpoint.restore(folder, model=abstract)
    assert abstract.kernel.get_value() is kernel
    assert isinstance(abstract.bias.get_value(), jax.ShapeDtypeStruct)


def test_a_mesh_of_other_processes(tmp_path, folder, monkeypatch):
    """What the devices of other processes have is not there to be read or saved."""
    model = linear()
    checkpoint.save(folder, model=model)
    where = NamedSharding(mesh((1,), ("model",)), P())
    model.kernel.set_value(jax.device_put(model.kernel.get_value(), where))
    before = bits(model)
    monkeypatch.setattr(NamedSharding, "addressable_devices", frozenset())
    message = "'model.kernel' has no shard on process 0: its sharding is over 1 devices of other"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.restore(folder, model=model)
    assert bits(model) == before
    monkeypatch.setattr(type(model.kernel.get_value()), "addressable_shards", [])
    message = "'model.(bias|kernel)' has no shard on this process; a checkpoint needs arr"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(tmp_path / "d", model=model)
    assert names_in(tmp_path) == ["c"]
