"""Update contexts: the four steps, identity, sharing, structure changes, refusals."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx


class Foo(nnx.Module):
    pass


class Box(nnx.Module):
    def __init__(self, *values):
        self.values = nnx.List([nnx.Param(jnp.asarray(v)) for v in values])


def crossing(change, tag="ctx"):
    """A function that applies `change` to its objects inside `jax.jit`, in the four steps."""

    @jax.jit
    def inside(*parts):
        with nnx.merge_context(tag, inner=True) as ctx:
            objects = [ctx.merge(*part) for part in parts]
        change(*objects)
        with nnx.split_context(tag) as ctx:
            return [ctx.split(x) for x in objects]

    @nnx.update_context(tag)
    def outside(*objects):
        with nnx.split_context(tag) as ctx:
            parts = [ctx.split(x) for x in objects]
        out = inside(*parts)
        with nnx.merge_context(tag, inner=False) as ctx:
            return [ctx.merge(*part) for part in out]

    return outside


def test_values_metadata_and_new_objects_arrive_in_the_same_variables():
    m = Foo()
    m.p = nnx.Param(jnp.ones(2), tag="a")
    kept = m.p

    def change(m):
        m.p[...] = m.p + 1
        m.p.set_metadata("tag", "b")
        m.q = nnx.BatchStat(m.p * 2)
        m.r = jnp.zeros(3)
        m.parts = nnx.List([m.p, Foo()])

    crossing(change)(m)
    assert m.p is kept and m.parts[0] is kept
    assert kept.value.tolist() == [2.0, 2.0]
    assert kept.tag == "b"
    assert m.q.value.tolist() == [4.0, 4.0]
    assert m.r.shape == (3,)
    assert type(m.parts[1]) is Foo


def test_what_is_written_inside_arrives_with_the_last_merge_or_nowhere():
    m = Box(1.0)

    def unchanged():
        return float(m.values[0].value) == 1.0 and not hasattr(m, "extra")

    with nnx.update_context("x"):
        with nnx.split_context("x") as ctx:
            parts = ctx.split(m)
        with nnx.merge_context("x", inner=True) as ctx:
            inside = ctx.merge(*parts)
        assert inside is not m and inside.values[0] is not m.values[0]
        inside.values[0][...], inside.extra = 5.0, 1
        with nnx.split_context("x") as ctx:
            out = ctx.split(inside)

        def merge(x):
            with nnx.merge_context("x", inner=False) as ctx:
                assert ctx.merge(*out) is m
            return x

        with pytest.raises(nnx.TraceContextError, match="Box"):
            jax.jit(merge)(1.0)  # into objects of another trace
        assert unchanged()
        merge(1.0)
    assert float(m.values[0].value) == 5.0 and m.extra == 1


def test_a_failing_function_leaves_the_objects_alone_and_closes_the_context():
    m = Box(1.0)

    def change(m):
        m.values[0][...] = 2.0
        m.extra = 1
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        crossing(change)(m)
    assert float(m.values[0].value) == 1.0
    assert not hasattr(m, "extra")
    with pytest.raises(ValueError, match="No update context found for tag 'ctx'"):
        nnx.current_update_context("ctx")


def test_split_with_filters_and_flatten():
    m = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    with nnx.split_context() as ctx:
        graphdef, params, rest = ctx.split(m, nnx.Param, ...)
        again = ctx.split(m)
        flat = ctx.flatten(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
        raw = ctx.flatten(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), with_paths=False)
        two = ctx.flatten(nnx.BatchNorm(1, rngs=nnx.Rngs(0)), nnx.Param, ...)
    assert sorted(params) == ["bias", "scale"] and sorted(rest) == ["mean", "var"]
    assert again[1] == nnx.State({}) and again[0] != graphdef
    assert flat[1].paths == (("bias",), ("kernel",))
    assert [type(x).__name__ for x in raw[1]] == ["ArrayImpl", "ArrayImpl"]
    assert [len(f) for f in two[1:]] == [2, 2]
    with nnx.merge_context() as ctx:
        first = ctx.merge(graphdef, params, rest)
        assert ctx.merge(*again) is first
        assert ctx.unflatten(*flat).kernel is flat[1].leaves[1]
        assert ctx.unflatten(*raw).kernel.shape == (1, 1)
        assert ctx.unflatten(*two).scale.shape == (1,)


def test_split_contexts_number_objects_for_the_context_they_belong_to():
    m = Foo()
    with nnx.update_context("x") as context:
        with nnx.split_context("x") as first:
            parts = first.split(m)
        assert (first.is_inner, context.outer_index_outer_ref) == (False, {0: m})
        with nnx.merge_context("x", inner=True) as merged:
            inside = merged.merge(*parts)
        assert context.outer_index_inner_ref == {0: inside}
        assert context.inner_ref_outer_index[inside] == 0
        with nnx.split_context("x") as second:
            graphdef, _ = second.split(inside)
        assert second.is_inner
        assert graphdef.outer == (0,)
        assert context.inner_ref_outer_index is context.outer_index_inner_ref is None
    assert context.outer_ref_outer_index is None


def test_a_context_keeps_nothing_alive_after_its_end():
    m = Box(1.0)
    inner = []

    crossing(lambda m: inner.append(weakref.ref(m)))(m)
    outer = weakref.ref(m)
    del m
    gc.collect()
    assert inner[0]() is None
    assert outer() is None


def test_an_unknown_tag_names_the_tags_there_are():
    assert repr(nnx.update_context("here")) == "update_context('here')"
    with nnx.update_context("here"):
        with pytest.raises(ValueError, match=r"tag 'there' \(active tags: 'here'\)"):
            nnx.current_update_context("there")
        with pytest.raises(ValueError, match="inner_merge must be specified"):
            nnx.merge_context("here").__enter__()
    for step in (nnx.split_context, nnx.merge_context):
        with pytest.raises(ValueError, match=r"tag 'there' \(active tags: none is active\)"):
            step("there").__enter__()


def test_a_step_that_has_ended_and_filters_without_paths():
    model = nnx.Dict(a=nnx.Param(jnp.ones(2)))
    with nnx.split_context() as split:
        graphdef, state = split.split(model)
        with pytest.raises(ValueError, match="only with with_paths=True: pass it, or no filters"):
            split.flatten(model, nnx.Param, with_paths=False)
    with nnx.merge_context() as merge:
        merge.merge(graphdef, state)
    for call, name in [
        (lambda: split.split(model), "SplitContext"),
        (lambda: split.flatten(model), "SplitContext"),
        (lambda: merge.merge(graphdef, state), "MergeContext"),
        (lambda: merge.unflatten(graphdef, [jnp.ones(2)]), "MergeContext"),
    ]:
        with pytest.raises(
            AttributeError, match=f"This {name} has ended: .* inside the `with` block"
        ):
            call()


def test_metadata_of_a_captured_variable_are_not_changed_from_inside():
    """Nor is anything else that the refused call wrote."""
    variable = nnx.Param(jnp.ones(2))

    @nnx.jit
    def tag(variable, own):
        variable.set_metadata(tag=1)
        own[...] += 1

    @nnx.jit
    def outer(x):
        own = nnx.Param(x)
        with pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate Param"):
            tag(variable, own)
        return own[...]

    assert outer(1.0) == 1.0 and not variable.has_metadata("tag")
