"""Law L7: a write from the wrong trace level is refused, names both sides, and changes nothing."""

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite.objects._capture import capture
from tests.laws import model as slow
from tests.laws.graphs import Pair

ONE = jnp.ones(2)


class Layer(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones(4), tag="t")
        self.mean = nnx.BatchStat(jnp.ones(4))
        self.array = jnp.zeros(4)
        self.size = 3


class Model(nnx.Module):
    def __init__(self):
        self.layer = Layer()
        self.items = nnx.List([1, ONE, nnx.Dict()])
        self.table = nnx.Dict(a=1)
        self.pair = Pair(nnx.Param(ONE), ONE)
        self.plain = [ONE, 5]
        self.rngs = nnx.Rngs(0)


def unflattened(m, x):
    """Into an object of the outside."""
    index = nnx.graphlib.RefMap([(m.layer, 0)])
    graphdef, flat = nnx.flatten(m.layer, ref_outer_index=index)
    nnx.unflatten(graphdef, flat, outer_index_outer_ref={0: m.layer})


WRITES = {
    "Param.value": [
        lambda m, x: setattr(m.layer.kernel, "value", x),
        lambda m, x: m.layer.kernel.set_value(x),
        lambda m, x: m.layer.kernel.__setitem__(..., x),
        lambda m, x: m.layer.kernel.__setitem__(0, 1.0),
        lambda m, x: m.layer.kernel.set_raw_value(x),
        lambda m, x: setattr(m.layer.kernel, "raw_value", x),
        lambda m, x: m.layer.kernel.copy_from(nnx.Param(x)),
        lambda m, x: m.layer.kernel.update_from_state(nnx.Param(x)),
        lambda m, x: m.layer.kernel.__iadd__(1.0),
        lambda m, x: nnx.update(m, {"layer": {"kernel": x}}),
    ],
    "Param.metadata": [
        lambda m, x: m.layer.kernel.set_metadata(a=1),
        lambda m, x: m.layer.kernel.set_metadata("a", 1),
        lambda m, x: m.layer.kernel.set_metadata({}),
        lambda m, x: nnx.set_metadata(m, tag=1),
        lambda m, x: nnx.freeze(m),
    ],
    "Param.tag": [
        lambda m, x: m.layer.kernel.del_metadata("tag"),
        lambda m, x: setattr(m.layer.kernel, "tag", x),
    ],
    "Param.__setstate__": [lambda m, x: m.layer.kernel.__setstate__(m.layer.kernel.__getstate__())],
    "Param.__class__": [lambda m, x: setattr(m.layer.kernel, "__class__", nnx.Variable)],
    "Layer.array": [
        lambda m, x: setattr(m.layer, "array", x),
        lambda m, x: delattr(m.layer, "array"),
    ],
    "Layer.size": [lambda m, x: setattr(m.layer, "size", 5)],
    "Layer.new": [lambda m, x: setattr(m.layer, "new", x)],
    "Layer.kernel": [lambda m, x: setattr(m.layer, "kernel", x)],
    "Layer.__dict__": [
        lambda m, x: setattr(m.layer, "__dict__", {}),
        lambda m, x: m.layer.__setstate__(m.layer.__getstate__()),
    ],
    "Layer.out": [lambda m, x: m.layer.sow(nnx.Intermediate, "out", x)],
    "Layer.inner": [lambda m, x: m.layer.perturb("inner", x)],
    "Layer.__captures__": [lambda m, x: capture(lambda layer: layer, nnx.Intermediate)(m.layer)],
    "Layer.None": [
        lambda m, x: nnx.update(m, {"layer": {"array": x}}),
        lambda m, x: nnx.pop(m, nnx.BatchStat),
        unflattened,
    ],
    "List.3": [lambda m, x: m.items.append(x)],
    "List.0": [
        lambda m, x: m.items.insert(0, x),
        lambda m, x: m.items.__delitem__(0),
        lambda m, x: m.items.reverse(),
    ],
    "List.1": [lambda m, x: m.items.__setitem__(1, x)],
    "Dict.a": [
        lambda m, x: m.table.__setitem__("a", x),
        lambda m, x: m.table.__delitem__("a"),
    ],
    "Model.None": [
        lambda m, x: nnx.update(m, {"plain": {0: x[:2]}}),
        lambda m, x: nnx.update(m, {"pair": {"second": x[:2]}}),
        lambda m, x: nnx.update(m, {"extra": nnx.Param(x)}),
        lambda m, x: nnx.pop(m, lambda path, leaf: path == ("plain", 0)),
    ],
    "RngCount.value": [lambda m, x: m.rngs.normal()],
}
"""The owner and attribute that an exception has as its fields, and writes that raise it."""


CASES = [(jax.jit, where, write) for where, writes in WRITES.items() for write in writes]
CASES += [(jax.vmap, where, writes[0]) for where, writes in WRITES.items()]
CASES += [(jax.grad, where, writes[-1]) for where, writes in WRITES.items()]


@pytest.mark.parametrize("transform, where, write", CASES)
def test_L7_a_write_to_what_is_captured_is_refused(transform, where, write):
    def inside(x):
        write(model, jnp.broadcast_to(x, (4,)))
        return jnp.sum(x)

    model, (owner, attribute) = Model(), where.split(".")
    for _ in range(2):  # before there is a plan, and with one
        before = slow.canonical(model)
        with pytest.raises(nnx.TraceContextError) as caught:
            transform(inside)(jnp.ones(2) if transform is jax.vmap else 1.0)
        error, text = caught.value, str(caught.value)
        assert (error.owner, str(error.attribute)) == (owner, attribute)
        assert f"Cannot mutate {owner} from a" in text or f"Cannot mutate '{owner}' from" in text
        assert "different trace level: it belongs to eager" in text and "inside a transform" in text
        assert error.attribute is None or f"write of '{attribute}'" in text
        assert "Pass the object to the transformed function as an argument" in text
        assert slow.canonical(model) == before
        nnx.split(model)


def test_a_write_inside_another_transform_of_the_same_kind_says_so():
    def loop(v):
        def body(carry, x):
            v.value = x
            return carry, x

        return jax.lax.scan(body, 0, ONE)

    with pytest.raises(nnx.TraceContextError) as error:
        nnx.jit(loop)(nnx.Variable(jnp.zeros(())))
    assert str(error.value).startswith(
        "Cannot mutate Variable from a different trace level: it belongs to a transform "
        "(DynamicJaxprTrace), and the write of 'value' happens inside another transform "
        "(DynamicJaxprTrace). Pass the object to the transformed function as an argument (nnxlite "
        "transforms, nnx.scan in place of jax.lax.scan for example, write its changes back), or"
    )


def test_an_object_from_inside_a_transform_cannot_be_changed_outside():
    kept = []
    jax.jit(lambda x: kept.append(Layer()) or x)(1.0)
    with pytest.raises(nnx.TraceContextError, match=r"belongs to a transform .* inside eager code"):
        kept[0].array = jnp.zeros(2)


def test_a_captured_variable_can_be_read_and_a_new_one_written():
    outer = nnx.Param(ONE)

    @jax.jit
    def f(x):
        inner, copied = nnx.Param(outer * x), outer.copy()
        inner += 1
        inner[0] = x
        copied.value = x * outer
        return inner.value, copied.value

    inner, copied = f(3.0)
    assert inner.tolist() == [3.0, 4.0] and copied.tolist() == [3.0, 3.0]


def test_the_check_can_be_bypassed_for_raw_values():
    v = nnx.Param(1)
    jax.jit(lambda x: v.set_raw_value(5, _unsafe_bypass_check=True) or x)(1.0)
    assert v.value == 5
