"""`Variable`: reading, writing, copying, and what it refuses."""

import copy
import pickle
import typing as tp
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx

ONES = jnp.ones(2)


@pytest.mark.parametrize(
    "value",
    [
        *(1, 2.5, True, None, "text", (1, ONES), {"a": ONES}, np.ones(2), jax.random.key(0)),
        jax.ShapeDtypeStruct((2, 3), jnp.float32),
        {"nested": [ONES, (2, {"deep": None})]},
    ],
    ids=lambda v: type(v).__name__,
)
def test_any_value_can_be_held(value):
    v = nnx.Variable(value)
    assert v.value is value and v[...] is value and v.get_value() is value
    v.value = 3
    assert v.value == 3
    assert jax.tree.structure(nnx.Variable(value)) == jax.tree.structure(nnx.Variable(value))


def test_abstract_values_have_shape_and_dtype():
    v = nnx.Param(jax.ShapeDtypeStruct((2, 3), jnp.bfloat16))
    assert v.shape == (2, 3) and v.dtype == jnp.bfloat16 and v.ndim == 2
    v[...] = jnp.zeros((2, 3))  # takes the place of what has no content
    assert v.value.shape == (2, 3)


def test_a_variable_given_as_value_is_opened():
    v = nnx.BatchStat(nnx.Param(ONES, tag="a"))
    assert v.value is ONES and not v.has_metadata("tag")
    v.value = nnx.Param(2 * ONES)
    v[0] = nnx.Param(7.0)
    v.set_value(v)
    assert v.value.tolist() == [7.0, 2.0]


def test_type_kind_flags_and_calls():
    v = nnx.BatchStat(ONES)
    assert v.type is v.var_type is nnx.BatchStat
    assert (v.hijax, v.ref) == (False, False)
    assert nnx.Variable(lambda x, y=1: x + y)(2, y=3) == 5


@pytest.mark.parametrize(
    "start, index, value, expected",
    [
        (jnp.ones(2), ..., 5, [5.0, 5.0]),
        (jnp.ones(2), ..., jnp.array([1, 2]), [1.0, 2.0]),
        (jnp.ones((2, 2)), ..., jnp.array([1.0, 2.0]), [[1.0, 2.0], [1.0, 2.0]]),
        (jnp.ones(()), ..., 3, 3.0),
        (jnp.ones(3), 0, 5.0, [5.0, 1.0, 1.0]),
        (jnp.ones(3), slice(1, None), 0, [1.0, 0.0, 0.0]),
        (jnp.ones((2, 2)), (0, 1), 7.0, [[1.0, 7.0], [1.0, 1.0]]),
        (jnp.ones(3), jnp.array([True, False, True]), 2.0, [2.0, 1.0, 2.0]),
        (np.ones(2), ..., 3.0, [3.0, 3.0]),
        (np.ones(2), 0, 3.0, [3.0, 1.0]),
    ],
)
def test_writing_at_an_index_keeps_shape_and_dtype(start, index, value, expected):
    for write in (lambda v: v.__setitem__(index, value), lambda v: v.set_value(value, index=index)):
        v = nnx.Param(start)
        write(v)
        assert v.value.tolist() == expected and type(v.value) is type(start)
        assert v.value.dtype == start.dtype and v.value.shape == start.shape
    assert start.tolist() == np.ones(start.shape).tolist()


def test_writing_an_array_of_the_same_form_stores_it():
    v, new = nnx.Param(ONES), jnp.zeros(2)
    v[...] = new
    assert v.value is new
    v[...] = jnp.zeros(2, jnp.bfloat16)
    assert v.dtype == jnp.float32
    weak = nnx.Param(jnp.asarray(1.0))
    weak[...] = strong = jnp.ones((), jnp.float32)
    assert weak.value is strong


def test_other_values_are_replaced_at_an_ellipsis_and_copied_at_an_index():
    table = {"a": 1}
    v = nnx.Variable(table)
    v["a"] = 2
    v["b"] = 3
    assert v.value == {"a": 2, "b": 3} and table == {"a": 1} and v["b"] == 3
    for start, value in ((1, 2), (None, 3), ((1, 2), (3,)), (table, {"c": 1})):
        v = nnx.Variable(start)
        v[...] = value
        assert v.value is value


def test_an_operator_in_place_keeps_the_variable_of_an_object():
    model = nnx.Dict(v=nnx.Param(ONES))
    shared = model.v
    model.v -= jnp.ones((2, 1))
    assert model.v is shared and shared.shape == (2, 2)


def test_the_value_answers_what_other_libraries_ask_an_array_for():
    v = nnx.Param(ONES)
    assert np.array_equal(jnp.from_dlpack(v), ONES) and np.array_equal(np.from_dlpack(v), ONES)
    assert v.__array_namespace__() is ONES.__array_namespace__()
    assert not hasattr(nnx.Param(None), "__dlpack__")
    assert not hasattr(v, "__array_interface__x__") and getattr(v, "nope", 3) == 3


def test_a_value_in_a_reference_is_written_in_place():
    v = nnx.Param(jnp.array([1.0, 2.0]), ref=True)
    ref = v.get_raw_value()
    assert v.ref and v.value.tolist() == [1.0, 2.0] and v[0] == 1.0
    v[0] = 5
    v[1:] = jnp.zeros(1)
    v += 1
    assert ref[...].tolist() == v[...].tolist() == [6.0, 1.0]
    v[...] = 3
    v.value = jnp.array([3.0, 4.0])
    v.set_value(jnp.array([1, 2]))
    assert v.get_raw_value() is ref and ref[...].tolist() == [1.0, 2.0]
    assert ref.dtype == jnp.float32


def test_references_are_adopted_shared_and_exchanged():
    ref = jax.new_ref(jnp.ones(2))
    a, b = nnx.Param(ref), nnx.Param(ref)
    a[0] = 5.0
    assert a.ref and b.value.tolist() == [5.0, 1.0]
    a.value = jax.new_ref(jnp.zeros(2))
    assert a.value.tolist() == [0.0, 0.0] and b[0] == 5.0


def test_copies_of_references_are_independent():
    v = nnx.Param(jnp.ones(2), ref=True, tag="t")
    others = [v.copy(), v.replace(), copy.deepcopy(v), pickle.loads(pickle.dumps(v)), nnx.clone(v)]
    v[...] = 9.0
    for other in others:
        assert other.ref and other.tag == "t" and other.value.tolist() == [1.0, 1.0]
    assert copy.copy(v).get_raw_value() is v.get_raw_value()
    assert v.replace(jnp.zeros(3)).value.tolist() == [0.0] * 3
    out = v.replace(ref=False)
    assert not out.ref and out.value.tolist() == [9.0, 9.0] and out.replace(ref=True).ref


def now():
    return nnx.Param(1.0).ref


def test_defaults_of_references():
    assert nnx.var_defaults() == nnx.variablelib.VarDefaults(hijax=False, ref=False)
    makes_refs = nnx.jit(lambda: nnx.Param(jnp.ones(2)).ref)  # compiles for each default
    with nnx.var_defaults(ref=True) as given:
        assert now() and makes_refs() and given.ref and nnx.var_defaults().ref
        assert not nnx.Param(1.0, ref=False).ref
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(now).result()
    assert not now() and not makes_refs()
    with nnx.var_defaults(ref=False):
        nnx.var_defaults(ref=True)
        given = nnx.var_defaults()
        assert now() and given.ref and not given.hijax
        assert dict(given) == {"hijax": False, "ref": True} and "ref=True" in repr(given)
    assert not now()


def test_defaults_of_references_for_a_function():
    @nnx.var_defaults(ref=True)
    def nested(depth):
        """Its own words."""
        return [now(), *(nested(depth - 1) if depth else ())]

    @nnx.var_defaults(ref=False)
    def fails():
        raise ValueError(now())

    class Made(nnx.Module):
        @nnx.var_defaults(ref=True)
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

    assert nested.__name__ == "nested" and nested.__doc__ == "Its own words."
    assert nested(2) == [True, True, True] and not now() and Made().w.ref
    with nnx.var_defaults(ref=True):
        with pytest.raises(ValueError, match="False"):
            fails()
        assert now() and nnx.var_defaults(hijax=False)(now)()
    assert not now() and not nnx.var_defaults(hijax=False)(now)()


def test_taking_over_another_variable():
    v, w = nnx.Param(ONES, tag="t"), nnx.Param(2 * ONES, other=1)
    v.copy_from(w)
    assert v.value is w.value and v.get_metadata(exclude_required=True) == {"other": 1}
    stat = nnx.BatchStat(ONES)
    stat.update_from_state(w)
    assert stat.value is w.value and stat.other == 1
    ref = nnx.Param(jnp.zeros(2), ref=True)
    held = ref.get_raw_value()
    ref.update_from_state(w)
    assert ref.get_raw_value() is held and held[...].tolist() == [2.0, 2.0] and ref.other == 1
    v, w = nnx.Param(ONES, tags=["a"]), nnx.Param(ONES, tags=["a"])
    for new in (w, v.replace(tags=["a"])):
        w.tags.append("b")  # since the definitions were made
        v.copy_from(new)
        assert v.tags == new.tags


def test_from_metadata_runs_no_callback():
    v = nnx.Param.from_metadata(ONES, {"on_create_value": (lambda v, x: x + 1,), "tag": "t"})
    assert v.value is ONES and v.tag == "t" and not v.ref


def test_a_variable_is_a_pytree_of_its_value():
    v = nnx.Param({"a": ONES, "b": 2}, tag="t")
    pairs, treedef = jax.tree.flatten_with_path(v)
    assert [jax.tree_util.keystr(path) for path, _ in pairs] == [".value['a']", ".value['b']"]
    new = jax.tree.unflatten(treedef, [1, 2])
    assert type(new) is nnx.Param and new.tag == "t" and new.value == {"a": 1, "b": 2}
    structure = jax.tree.structure
    assert structure(nnx.Param(1, tag="t")) == structure(nnx.Param(2, tag="t"))
    assert (
        structure(nnx.Param(1)) != structure(nnx.Param(1, tag="t")) != structure(nnx.BatchStat(1))
    )
    assert jax.jit(lambda v: v * 2)(nnx.Param(3.0)) == 6.0


def test_generic_annotations_work():
    assert nnx.Param[jax.Array](ONES).value is ONES

    class Int(nnx.Variable[int]): ...

    assert Int(3) + 1 == 4 and tp.get_args(nnx.Param[jax.Array]) == (jax.Array,)
