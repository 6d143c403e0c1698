"""What type checkers infer of Variables; `test_types.py` runs it and the other files here."""

from __future__ import annotations

import typing as tp
from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np

import nnxlite as nnx

x = jnp.ones((3, 3))
param = nnx.Param(jnp.ones(3))

# Kinds

assert_type(param, nnx.Param[jax.Array])
assert_type(nnx.Variable(0), nnx.Variable[int])
assert_type(nnx.BatchStat(x), nnx.BatchStat[jax.Array])
assert_type(nnx.Cache(x), nnx.Cache[jax.Array])
assert_type(nnx.Intermediate((x,)), nnx.Intermediate[tuple[jax.Array]])
assert_type(nnx.Perturbation(x), nnx.Perturbation[jax.Array])
assert_type(nnx.LoRAParam(x), nnx.LoRAParam[jax.Array])
assert_type(nnx.OptState(x), nnx.OptState[jax.Array])
assert_type(nnx.OptArray(x), nnx.OptArray[jax.Array])
assert_type(nnx.OptVariable(x), nnx.OptVariable[jax.Array])
assert_type(nnx.RngKey(jax.random.key(0)), nnx.RngKey[jax.Array])
assert_type(nnx.RngCount(jnp.zeros((), jnp.uint32)), nnx.RngCount[jax.Array])
assert_type(nnx.RngState(x), nnx.RngState[jax.Array])
assert_type(nnx.VariableState(x), nnx.Variable[jax.Array])

# Values

assert_type(param.value, jax.Array)
assert_type(param.raw_value, jax.Array)
assert_type(param[...], jax.Array)
assert_type(param[0], jax.Array)
assert_type(param[0:2], jax.Array)
assert_type(param.get_value(), jax.Array)
assert_type(param.get_value(index=0), jax.Array)
assert_type(param.get_raw_value(), jax.Array)
assert_type(nnx.Variable(0).value, int)
assert_type(nnx.Variable(0)[...], int)
assert_type(nnx.Variable({"a": 1})["a"], tp.Any)
assert_type(param.copy(), nnx.Param[jax.Array])
assert_type(param.replace(x), nnx.Param[jax.Array])
assert_type(param.type, type[nnx.Param[jax.Array]])
param.value = jnp.zeros(3)
param[0] = 1.0
param.set_value(jnp.ones(3))

# Operators

assert_type(param + 1, jax.Array)
assert_type(1 - param, jax.Array)
assert_type(2.0 * param, jax.Array)
assert_type(param / param, jax.Array)
assert_type(param // 2, jax.Array)
assert_type(param % 2, jax.Array)
assert_type(param**2, jax.Array)
assert_type(2**param, jax.Array)
assert_type(x @ param, jax.Array)
assert_type(param @ x, jax.Array)
assert_type(x + param, jax.Array)
assert_type(nnx.Param(jnp.array(3)) << 1, jax.Array)
assert_type(nnx.Param(jnp.array(True)) & True, jax.Array)
assert_type(-param, jax.Array)
assert_type(~nnx.Param(jnp.array(True)), jax.Array)
assert_type(abs(param), jax.Array)
assert_type(round(param), jax.Array)
assert_type(divmod(param, 2), tuple[jax.Array, jax.Array])
assert_type(param < 1, jax.Array)
assert_type(param >= param, jax.Array)
assert_type(param == param, jax.Array)
assert_type(param != 0, jax.Array)
assert_type(float(param[0]), float)
assert_type(bool(param), bool)
assert_type(len(param), int)
assert_type(np.asarray(param).ndim, int)
same = param
assert {param: 1}[param] == 1
param += 1
assert_type(param, nnx.Param[jax.Array])
assert param is same

# Members of the array

assert_type(param.shape, tuple[int, ...])
assert_type(param.dtype, np.dtype[tp.Any])
assert_type(param.ndim, int)
assert_type(param.size, int)
assert_type(param.T, jax.Array)
assert_type(param.sum(), jax.Array)
assert_type(param.mean(axis=0, keepdims=True), jax.Array)
assert_type(param.astype(jnp.float16), jax.Array)
assert_type(param.reshape(3, 1), jax.Array)
assert_type(param.at[0].set(1), jax.Array)
assert_type(param.max(), jax.Array)
assert_type(param.sharding, jax.sharding.Sharding)

# Metadata and names

assert_type(param.sharding_names, tp.Any)
assert_type(param.has_metadata("tag"), bool)
assert_type(nnx.Param(x, tag="a").tag, tp.Any)
assert_type(nnx.VariableMetadata(x).raw_value, jax.Array)
zeros = nnx.initializers.zeros_init()
with_tag = nnx.with_metadata(nnx.initializers.lecun_normal(), tag="head")
assert_type(nnx.Param(with_tag(jax.random.key(0), (3, 3))), nnx.Param[jax.Array])
assert_type(nnx.Param(zeros(jax.random.key(0), (3,))), nnx.Param[jax.Array])
sharded = nnx.with_partitioning(nnx.initializers.ones_init(), ("model",))
assert_type(nnx.Param(sharded(jax.random.key(0), (3,))), nnx.Param[jax.Array])
assert_type(nnx.var_defaults(), nnx.VarDefaults)
assert_type(nnx.variable_name_from_type(nnx.Param), str)
assert_type(nnx.variable_type_from_name("params"), type[nnx.Variable[tp.Any]])


@nnx.register_variable_name("momenta of the type tests")
class Momentum(nnx.Variable[jax.Array]):
    pass


assert_type(Momentum(x).value, jax.Array)
assert_type(nnx.is_array_ref(nnx.array_ref(x)), bool)
assert isinstance(nnx.array_ref(x), nnx.ArrayRef)


def without_parameter(variable: nnx.Param) -> None:
    assert_type(variable.value, tp.Any)
    assert_type(variable[...], tp.Any)


without_parameter(param)
