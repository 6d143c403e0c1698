"""Arrays as references, over single values and whole graphs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.graph._walk import to_arrays, to_refs, with_vars
from nnxlite.variables._kinds import ArrayRef, array_ref, is_array_ref
from tests.messages import refused, rows


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2), tag="t")
        self.stat = nnx.BatchStat(jnp.zeros(()))
        self.bare = jnp.zeros(3)
        self.n = 4


def test_references_copy_what_they_are_made_of_and_are_found_in_any_structure():
    array = jnp.ones(2)
    refs = to_refs([array, {"a": np.ones(2)}, array_ref(2.0), "text", 3])
    leaves = [refs[0], refs[1]["a"], refs[2]]
    assert all(is_array_ref(x) and isinstance(x, ArrayRef) for x in leaves)
    assert refs[3:] == ["text", 3]
    refs[0][...] = jnp.zeros(2)
    arrays = to_arrays(refs)
    assert array.tolist() == [1.0, 1.0] == arrays[1]["a"].tolist()
    assert isinstance(arrays[0], jax.Array) and arrays[2] == 2.0 and is_array_ref(refs[0])


def test_models():
    model = Model()
    refs = to_refs(model)
    assert refs.w.ref and refs.stat.ref and is_array_ref(refs.bare) and refs.n == 4
    assert refs.w.tag == "t" and type(refs.w) is nnx.Param and not model.w.ref
    refs.w[...] = jnp.zeros(2)
    refs.bare[...] = jnp.ones(3)
    assert model.w.value.tolist() == [1.0, 1.0] and model.bare.tolist() == [0.0] * 3
    arrays = to_arrays(refs)
    assert not arrays.w.ref and arrays.w.value.tolist() == [0.0, 0.0]
    assert arrays.bare.tolist() == [1.0] * 3 and nnx.graphdef(arrays) == nnx.graphdef(model)
    twice = to_refs(nnx.Dict(a=model, b=model))
    assert twice.a is twice.b and twice.a.w.ref


def test_a_leaf_of_which_one_path_is_chosen():
    array, ref = jnp.ones(1), array_ref(1.0)
    first = lambda path, x: path[0] == 0
    assert to_refs([array, array], only=first)[1] is array  # arrays are not shared
    for function, leaf in ((to_arrays, ref), (to_refs, nnx.Param(array))):
        with pytest.raises(ValueError, match="Found duplicate at paths"):
            function([leaf, leaf], only=first)
        assert function([leaf, leaf], only=None)[1] is leaf


@rows("""
    nnx.to_refs([ONE, ONE])
        ValueError: Found duplicate at paths: --- 0 1 ---
    nnx.to_arrays([ref, ref])
        ValueError: Found duplicate at paths: --- 0 1 ---
    nnx.to_refs(nnx.Dict(a=model, w=model.w))
        ValueError: Found duplicate at paths: --- a.w w ---
    nnx.with_vars(nnx.Dict(a=variable, b=variable), ref=True)
        ValueError: Found duplicate at paths: --- a b ---
    nnx.to_refs(endless)
        ValueError: The list at '1' contains itself
    nnx.to_arrays(endless)
        ValueError: The list at '1' contains itself
    nnx.with_vars(endless)
        ValueError: The list at '1' contains itself
    nnx.with_vars(model, hijax=True)
        ValueError: with_vars(hijax=True) is not available ... ref=True
    nnx.with_vars(nnx.Dict(a=nnx.Param("text")), ref=True)
        TypeError: Param(ref=True) ... takes an array or a number, got str
""")
def test_a_refusal_says_why_and_changes_nothing(line, message):
    endless: list = [nnx.Param(jnp.ones(1))]
    endless.append(endless)
    scope = {"endless": endless, "ONE": jnp.ones(1), "ref": array_ref(1.0), "model": Model()}
    refused(line, message, globals() | scope | {"variable": nnx.Param(jnp.ones(1))})


def test_variables_of_any_pytree_as_references():
    variable = nnx.Param(jnp.ones(1))
    assert with_vars(variable, ref=True).ref and with_vars([variable], ref=True)[0].ref
    assert with_vars(nnx.state(Model()), ref=True)["w"].ref
    both = with_vars(nnx.Dict(a=variable, b=variable), ref=True, allow_duplicates=True)
    assert both.a is both.b and both.a.ref
    with_vars(nnx.Dict(a=variable, b=variable))  # nothing to convert
    model = with_vars(Model(), mutable=False)  # is metadata
    assert model.w.get_metadata("mutable") is False and not model.w.ref
    assert with_vars(model, mutable=False).w is model.w
    assert with_vars(model, mutable=True, ref=True).w.mutable is True


def test_a_model_of_references_runs_in_jit_and_splits():
    refs = to_refs(Model())

    @jax.jit
    def step(model):
        model.w[...] += 1
        model.w[0] = 7.0
        return model.w * 1, to_arrays(model.bare), to_arrays(array_ref(jnp.zeros(1)))

    assert [x.tolist() for x in step(refs)] == [[7.0, 2.0], [0.0] * 3, [0.0]]
    assert refs.w.value.tolist() == [7.0, 2.0]
    graphdef, state = nnx.split(refs)
    assert nnx.merge(graphdef, state).w is refs.w
    assert nnx.clone(refs).w.get_raw_value() is not refs.w.get_raw_value()


LOOPED = {
    "jit": lambda f: nnx.jit(f)(1.0),
    "jax.jit": lambda f: jax.jit(f)(1.0),
    "grad": lambda f: nnx.grad(f)(1.0),
    "remat": lambda f: nnx.remat(f)(1.0),
    "scan": lambda f: nnx.scan(lambda c, x: (f(c), x))(1.0, jnp.ones(1)),
    "jax scan": lambda f: jax.lax.scan(lambda c, x: (f(c), x), 1.0, jnp.ones(1)),
    "fori_loop": lambda f: nnx.fori_loop(0, 1, lambda i, x: f(x), 1.0),
    "cond": lambda f: nnx.cond(True, f, lambda x: x, 1.0),
}


@pytest.mark.parametrize("run", LOOPED.values(), ids=LOOPED)
def test_a_captured_variable_with_a_reference_is_written_from_inside_a_transform(run):
    v = nnx.Variable(jnp.array(0.0), ref=True)
    ref = v.get_raw_value()

    def f(x):
        v[...] += 2
        return x

    for count in (1, 2):
        run(f)
        assert v.get_raw_value() is ref and float(v.value) == 2.0 * count
    with pytest.raises(nnx.TraceContextError, match="Cannot mutate Variable"):
        jax.jit(lambda x: v.set_value(jax.new_ref(x)))(1.0)
    assert v.get_raw_value() is ref


def test_references_made_inside_leave_as_new_ones():
    def make(m):
        m.cache = nnx.Cache(jnp.zeros(2), ref=True)
        m.again = nnx.Cache(m.cache.get_raw_value(), ref=True)  # the same reference
        m.raw = m.old
        m.cache[...] += 1

    m = nnx.Dict(old=jax.new_ref(jnp.ones(2)))
    made = nnx.jit(make)
    made(m)
    assert m.raw is m.old and m.cache.get_raw_value() is m.again.get_raw_value()
    first = m.cache.get_raw_value()
    own = nnx.clone(m, arrays=True)
    assert own.raw is own.old is not m.old
    assert own.cache.get_raw_value() is own.again.get_raw_value() is not first
    m.again[...] *= 5
    assert m.cache.value.tolist() == [5.0, 5.0]
    del m.again  # JAX takes each reference once
    made(m)
    assert m.cache.get_raw_value() is not first and m.cache.value.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("graph_updates", [True, False])
def test_results_with_new_references(graph_updates):
    make = lambda x: [nnx.Cache(x, ref=True), nnx.array_ref(x)]
    new = nnx.jit(make, graph_updates=graph_updates)
    (variable, ref), (other, _) = new(jnp.ones(2)), new(jnp.ones(2))
    assert variable.ref and is_array_ref(ref) and is_array_ref(variable.get_raw_value())
    variable[...] = variable + 1
    ref[...] = jnp.zeros(2)
    assert other.value.tolist() == [1.0, 1.0] and variable.value.tolist() == [2.0, 2.0]
    assert nnx.eval_shape(lambda x: nnx.Cache(x, ref=True), jnp.ones(2)).shape == (2,)


def test_a_loop_keeps_the_references_of_its_carry():
    def body(m, x):
        m.cache = nnx.Cache(m.cache + x, ref=True)
        return m, x

    m = nnx.Dict(cache=nnx.Cache(jnp.zeros(()), ref=True))
    message = "same pytree .* lives in a reference in the place of 'm.cache'"
    with pytest.raises(TypeError, match=message):
        nnx.scan(body)(m, jnp.ones(3))
    assert float(m.cache.value) == 0.0
