"""Programs, shapes, checkpoints, shardings, callbacks and checks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.filtered.models import Tied
from tests.transforms.models import EACH


def test_a_checkpoint_has_the_options_of_jax():
    def residuals(**options):
        deep = nnx.filter_checkpoint(lambda x, name: jnp.sin(jnp.sin(jnp.sin(x))), **options)
        return str(jax.make_jaxpr(jax.grad(lambda x: deep(x, "name")))(1.0)).count(" sin ")

    assert residuals(policy=jax.checkpoint_policies.everything_saveable) < residuals()
    assert residuals(prevent_cse=False) == residuals()


def test_shard():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = nnx.filter_shard((jnp.ones(2), "name"), split)
    assert placed[0].sharding == split and placed[1] == "name"
    placed = nnx.filter_shard([jnp.ones(2), {"a": jnp.ones(4)}], [whole, split])
    assert placed[0].sharding == whole and placed[1]["a"].sharding == split
    model = nnx.filter_shard(Tied(), whole)
    assert model.first is model.second and model.first.kernel.value.sharding == whole
    inside = nnx.filter_jit(lambda x: nnx.filter_shard(x, split))(jnp.ones(2))
    assert inside.sharding.is_equivalent_to(split, 1)
    device = jax.devices()[1]
    assert nnx.filter_shard(jnp.ones(2), device).devices() == {device}


def test_pure_callback():
    def callback(tree, power, *, name):
        assert name == "n"
        return {"y": np.asarray(tree["x"]) ** power, "name": "ignored"}

    shapes = {"y": jax.ShapeDtypeStruct((2,), jnp.float32), "name": "given"}
    found = nnx.filter_pure_callback(
        callback, {"x": jnp.ones(2)}, 2, name="n", result_shape_dtypes=shapes
    )
    assert found["name"] == "given" and found["y"].tolist() == [1, 1]
    scalar = {"result_shape_dtypes": jax.ShapeDtypeStruct((), jnp.float32), "vectorized": True}
    double = lambda x: nnx.filter_pure_callback(lambda x: np.asarray(x) * 2, x, **scalar)
    assert jax.vmap(double)(jnp.arange(3.0)).tolist() == [0, 2, 4]
    with pytest.raises(Exception, match="the callback returned a result of structure"):
        nnx.filter_pure_callback(lambda x: [x], jnp.ones(()), **scalar)


def test_error_if_outside_jit():
    x = jnp.array(1.0)
    assert nnx.error_if(x, False, "no") is x
    with pytest.raises(nnx.RuntimeCheckError, match="too large"):
        nnx.error_if(x, x > 0, "too large")
    with pytest.raises(nnx.RuntimeCheckError, match="second"):
        nnx.branched_error_if(x, jnp.array([False, True]), 1, ["first", "second"])
    assert nnx.error_if(x, True, "off", on_error="off") is x
    assert np.isnan(nnx.error_if(x, True, "nan", on_error="nan"))


def failing(x):
    return nnx.error_if(x, x > 2, "too large") * 2


WAYS = [
    "jit", "pmap", "remat", "scan", "while_loop", "fori_loop", "cond", "checkify",
    "value_and_grad", "filter_jit", "filter_pmap",
]  # fmt: skip
FAILING = {
    **{name: EACH[name](failing) for name in WAYS},
    "eager": failing,
    "nnx.vmap": lambda x: nnx.vmap(failing)(x[None])[0],
    "nnx.grad": lambda x: nnx.grad(lambda x: failing(x) ** 2)(x),
    "nnx.jit, donated": nnx.jit(failing, donate_argnums=0),
    "nnx.jit of jax.jit": nnx.jit(lambda x: jax.jit(failing)(x)),
    "nnx.jit of nnx.scan": nnx.jit(EACH["scan"](failing)),
    "nnx.jit of nnx.cond": nnx.jit(lambda x: nnx.cond(x > 1, failing, lambda x: x, x)),
    "filter_jit, donated": nnx.filter_jit(failing, donate="all"),
    "ahead of time": lambda x: nnx.jit(failing).lower(x).compile()(x),
}


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize("way", FAILING)
def test_error_if_raises_one_class_with_the_text_alone(way, caplog):
    """Whatever was called before: it may succeed, fail and fail again."""
    fine, bad = jnp.array(0.0), jnp.array(5.0)
    for x in (fine, bad, bad + 1):
        if x == 0:
            jax.block_until_ready(FAILING[way](x + 0))
            continue
        with pytest.raises(nnx.RuntimeCheckError) as error:
            FAILING[way](x + 0)
        assert str(error.value) == "too large"
        assert isinstance(error.value, (RuntimeError, jax.errors.JaxRuntimeError))
        assert error.value.__cause__ is None and error.value.args == ("too large",)


@pytest.mark.parametrize("jit", [nnx.jit, nnx.filter_jit])
def test_a_failed_check_leaves_every_object_as_it_was(jit, caplog):
    @jit
    def step(model, x):
        model.count[...] += 1
        return nnx.error_if(x, x > 2, "too large\non two lines") * model.count

    model = nnx.Dict(count=nnx.Variable(jnp.array(0)))
    with pytest.raises(nnx.RuntimeCheckError, match="too large\non two lines$"):
        step(model, jnp.array(3.0))
    assert int(model.count[...]) == 0
    assert step(model, jnp.array(1.0)) == 1 and int(model.count[...]) == 1


def test_an_error_of_another_callback_is_what_it_was(caplog):
    def other(x):
        raise ValueError("RuntimeCheckError: of another kind")

    @nnx.jit
    def run(x):
        y = jax.pure_callback(other, jax.ShapeDtypeStruct((), bool), x)
        return nnx.error_if(x, x > 2, "too large") * y

    with pytest.raises(jax.errors.JaxRuntimeError, match="of another kind") as error:
        jax.block_until_ready(run(jnp.array(1.0)))
    assert type(error.value) is jax.errors.JaxRuntimeError


def test_error_if_under_transforms_of_jax():
    f = jax.jit(lambda x: nnx.error_if(x, x > 2, "too large") * 2)
    assert f(1.0) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="too large"):
        jax.block_until_ready(f(3.0))
    g = nnx.jit(lambda x, i: nnx.branched_error_if(x, x > 2, i, ["first", "second"]))
    with pytest.raises(nnx.RuntimeCheckError, match="second"):
        g(3.0, 1)
    assert jax.grad(f)(1.0) == 2
    assert jax.vmap(f)(jnp.ones(2)).tolist() == [2, 2]
    with pytest.raises(jax.errors.JaxRuntimeError, match="too large"):
        jax.block_until_ready(jax.vmap(f)(jnp.array([1.0, 3.0])))
