"""Every refusal of Variables and of their registry, in one table."""

import jax.numpy as jnp

import nnxlite as nnx
from tests.messages import refused, rows

ONES = jnp.ones(2)


class Unknown(nnx.Variable): ...


@rows("""
    v[...] = jnp.ones(3)
        ValueError: broadcast
    v.q = 1
        AttributeError: Cannot set attribute q of Param ... variable.set_metadata(q=...)
    v.tag = 1
        AttributeError: Cannot set attribute tag of Param ... variable.set_metadata(tag=...)
    v.ref = 1
        AttributeError: ref
    v.hijax = 1
        AttributeError: hijax
    v.type = 1
        AttributeError: type
    del v.q
        AttributeError: Cannot delete ... variable.del_metadata('q')
    del v.tag
        AttributeError: Cannot delete ... variable.del_metadata('tag')
    v.nope
        AttributeError: 'Param' object has no attribute 'nope': ... value of type 'ArrayI
    v.__nope__
        AttributeError: 'Param' object has no attribute '__nope__'
    object.__new__(nnx.Param).tag
        AttributeError: 'Param' object has no attribute 'tag'
    v + "text"
        TypeError: unsupported operand
    None - v
        TypeError: unsupported operand
    len(nnx.Param(jnp.array(1)))
        TypeError: len() of unsized object
    v.replace(nnx.BatchStat(3))
        ValueError: Cannot replace a Param by a BatchStat
    v.copy_from(nnx.BatchStat(jnp.zeros((2, 3))))
        ValueError: Cannot copy from incompatible container, expected Param, got BatchStat. To take
        over the value alone, assign it to .value.

    r.value = jnp.ones(3)
        ValueError: Param(ref=True) refers to float32[2] ... shape (3,)
    r[...] = jnp.ones(3)
        ValueError: broadcast
    nnx.Param("text", ref=True)
        TypeError: Param(ref=True) holds ... takes an array or a number
    nnx.Param(1, hijax=True)
        ValueError: (hijax=True) is not available ... ref=True
    nnx.var_defaults(hijax=True)
        ValueError: (hijax=True) is not available ... ref=True

    v.get_metadata("zz")
        KeyError: Param has no metadata 'zz'; it has ['eager_sharding',
    v.get_metadata("tag", exclude_required=True)
        TypeError: Param.get_metadata takes a name or exclude_required, not both; got name='tag',
        exclude_required=True.
    v.get_metadata(default=3)
        TypeError: Param.get_metadata: Cannot provide a default value when 'name' is not provided; got
        default=3. Without a name it gives all the metadata.
    v.set_metadata()
        TypeError: Param.set_metadata ... takes (name, value), ... got 0 positional and 0 keyword
    v.set_metadata("a")
        TypeError: Param.set_metadata ... takes (name, value), ... got 1 positional and 0 keyword
    v.set_metadata(1, 2)
        TypeError: Param.set_metadata ... takes (name, value), ... got 2 positional and 0 keyword
    v.set_metadata("a", 1, b=2)
        TypeError: Cannot mix positional and keyword arguments in Param.set_metadata
        ... takes (name, value), ... got 2 positional and 1 keyword
    v.set_metadata(ref=True)
        ValueError: Cannot change `ref` metadata of Param from False to True ... vars_as
    v.set_metadata({"hijax": True})
        ValueError: Cannot change `hijax` metadata of Param from False to True ... vars_as
    nnx.set_metadata(nnx.Dict(v=v), hijax=True)
        ValueError: Cannot change `hijax` metadata of Param from False to True ... vars_as
    v.del_metadata("zz")
        KeyError: no metadata 'zz'
    v.del_metadata("ref")
        ValueError: Cannot delete `ref` metadata of Param
    v.del_metadata("eager_sharding")
        ValueError: Cannot delete `eager_sharding` metadata of Param
    nnx.spmd.remove_axis(named, 0, {nnx.PARTITION_NAME: "z"})
        ValueError: Param has the sharding names ('a', 'b'): axis 0 is 'a', not 'z' as the transform
        says. Give both the same name.

    nnx.register_variable_name("params", Unknown)
        ValueError: Name params already mapped to type Param ... overwrite=True
    nnx.register_variable_name("params", nnx.Param)
        ValueError: Name params already mapped to type Param
    nnx.register_variable_name("x", int)
        TypeError: Expected a Variable class for the name 'x', got
    nnx.variable_type_from_name("test_none")
        ValueError: Name test_none is not registered in the registry ... allow_register=True
    nnx.variable_name_from_type(Unknown)
        ValueError: Type Unknown is not registered in the registry ... allow_register=True
    nnx.variable_name_from_type(nnx.Variable)
        ValueError: is not registered in the registry
""")
def test_a_refusal_says_why_and_changes_nothing(line, message):
    hooks: list = []
    named = nnx.Param(
        jnp.ones((2, 3)), sharding=("a", "b"), on_remove_axis=lambda *args: hooks.append(1)
    )
    scope = {"v": nnx.Param(ONES, tag="t"), "r": nnx.Param(ONES, ref=True), "named": named}
    refused(line, message, globals() | scope)
    assert not hooks
