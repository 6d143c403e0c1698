"""A program that does to `flax.nnx` what Keras does; it prints the same under Flax and nnxlite.

Its Variable keeps attributes in `__dict__` and mirrors them into `_var_metadata`, reads and writes its
value as `_raw_value`, and is given another trace, as are its layers, which write around `__setattr__`.
"""

import copy
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class Base:
    """Not a Variable: gives the subclass below a `__dict__`."""

    @property
    def name(self):
        return self._name


class Weight(Base, nnx.Variable):
    def __init__(self, value, name, **metadata):
        nnx.Variable.__init__(self, jnp.zeros(()), **metadata)
        self._name, self.trainable = name, True
        object.__setattr__(self, "_raw_value", jnp.asarray(value))

    @property
    def _value(self):
        return self._raw_value

    @property
    def value(self):
        value = self._raw_value
        if "on_get_value" in self._var_metadata:
            value = self._var_metadata["on_get_value"](self, value)
        return value

    def assign(self, value):
        if "on_set_value" in self._var_metadata:
            value = self._var_metadata["on_set_value"](self, value)
        object.__setattr__(self, "_raw_value", value)


def mirrored(self, name, value):
    if name not in ("_raw_value", "_trace_state", "_var_metadata"):
        self._var_metadata[name] = value
    object.__setattr__(self, name, value)


Weight.__setattr__ = mirrored


class Layer(nnx.Module, pytree=False):
    def __new__(cls, *args, **kwargs):
        new = super().__new__(cls)
        vars(new)["_pytree__state"] = nnx.pytreelib.PytreeState()
        return new

    def __init__(self, value, name):
        self.built, self.layers = False, []
        self.weight = Weight(value, name)
        self.layers = Tracked([self.weight])  # not a container: static from here on

    def __setattr__(self, name, value):
        if name == "built":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __call__(self, x):
        return x * self.weight.value if self.built else 0 * x


class Tracked(list): ...


numbers = lambda array: np.asarray(array).tolist()
layer = Layer([1.0, 2.0], "w")
x = jnp.ones(2)
print("attributes", layer.weight.name, layer.weight._var_metadata["_name"], layer.weight.trainable)
print("not built", numbers(nnx.jit(lambda m: m(x))(layer)))
layer.built = True  # around `__setattr__`, after the layer was in a program
print("built", numbers(nnx.jit(lambda m: m(x))(layer)), numbers(nnx.clone(layer)(x)))

# One value, by whichever name it is written or read.
WRITES = {
    "update": lambda m: nnx.update(m, jax.tree.map(lambda v: v + 1, nnx.state(m))),
    "assign": lambda m: m.weight.assign(m.weight._value * 3),
    "set_value": lambda m: m.weight.set_value(jnp.array([5.0, 6.0])),
    "raw": lambda m: m.weight.set_raw_value(jnp.array([7.0, 8.0])),
    "[...]": lambda m: m.weight.__setitem__(..., jnp.array([9.0, 1.0])),
    "jit": nnx.jit(lambda m: m.weight.assign(m.weight.value + 1)),
    "vmap": nnx.vmap(lambda m: m.weight.assign(m.weight.value + 1)),
    "scan": nnx.scan(lambda m: (m.weight.assign(m.weight.value * 2), 0)[1:], in_axes=0, out_axes=0),
    "merge": lambda m: nnx.update(m, nnx.split(nnx.merge(*nnx.split(m)))[1]),
}
for name, write in WRITES.items():
    write(layer)
    weight = layer.weight
    reads = (weight._raw_value, weight.value, weight[...], weight.get_value(), nnx.state(layer))
    print(name, *[numbers(value) for value in jax.tree.leaves(reads)], numbers(layer(x)))
grads = nnx.grad(lambda m: m(x).sum(), argnums=nnx.DiffState(0, Weight))(layer)
print("grad", *map(numbers, jax.tree.leaves(grads)))

# Attributes survive whatever makes another Variable.
weight.trainable = False
COPIES = {
    "copy": copy.copy,
    "clone": nnx.clone,
    "replace": lambda v: v.replace(jnp.zeros(2)),
    "tree": lambda v: jax.tree.map(lambda x: x, v),
    "merge": lambda v: nnx.merge(*nnx.split(nnx.Dict(v=v)))["v"],
    "state": lambda v: nnx.state(nnx.Dict(v=v))["v"],
}
for name, make in COPIES.items():
    other = make(weight)
    print(name, type(other) is Weight, other.name, other.trainable)
look = lambda w: print("inside", w.name, w.trainable, w._var_metadata["_name"])
nnx.jit(lambda m: look(m.weight))(layer)

weight._var_metadata["tag"] = "new"
print("metadata", weight.tag, weight.get_metadata("tag"), "tag" in weight._var_metadata)
del weight._var_metadata["tag"]
print("deleted", weight.has_metadata("tag"))
weight._var_metadata["on_get_value"] = lambda variable, value: value * 10
print("hook", numbers(weight.value), numbers(layer(x)), numbers(nnx.jit(lambda m: m(x))(layer)))

# Made while a shape is inferred, and moved to the trace around it.
made = []


def infer(y):
    with jax.ensure_compile_time_eval():
        new = Layer([1.0, 1.0], "inner")
    outside = layer.weight._trace_state._jax_trace
    own = vars(new).get("_pytree__state", new._pytree__state)
    for state in (new.weight._trace_state, own._trace_state):
        object.__setattr__(state, "_jax_trace", outside)
    made.append(new)
    return y


jax.eval_shape(infer, 1.0)
(new,) = made
print("moved", new.weight._trace_state.is_valid(), new._pytree__state._trace_state.is_valid())
new.built, new.extra = True, 1
nnx.jit(lambda m: m.weight.assign(m.weight.value + 1))(new)
print("written", numbers(new.weight.value), new.extra)


class Open(Layer):
    open = False

    def _check_valid_context(self, error_msg):
        if not self.open:
            super()._check_valid_context(error_msg)


guarded = Open([1.0], "guarded")


def assign(y):
    guarded.note = "inside"
    return y


def refused(call):
    try:
        call()
    except Exception as error:
        print(type(error).__name__)


refused(lambda: jax.eval_shape(assign, 1.0))
Open.open = True
jax.eval_shape(assign, 1.0)
print(guarded.note)
print("may write", weight._can_update, weight._check_can_update())
look = lambda y: print("may write", weight._can_update, refused(weight._check_can_update))
jax.eval_shape(look, 1.0)


class Plain(nnx.Module):
    def __init__(self):
        self.w, self.n = nnx.Param(1.0), 2

    def __call__(self):  # a `ToNNX` of one's own asks both
        print(self._pytree__state.initializing, nnx.bridge.module.MODULE_CONTEXT.module_stack)


plain = nnx.bridge.lazy_init(Plain())
for plain._pytree__state._initializing in (True, False):
    nnx.clone(plain)()
print(sorted(nnx.variables(plain)))
print(plain._pytree__nodes["w"], plain._pytree__nodes["n"], plain._object__nodes["w"])
print(Plain._pytree__is_pytree, Layer._pytree__is_pytree, plain._pytree__state.is_setup)
print(sorted(path for path, _ in nnx.iter_graph(nnx.Dict(m=plain))))
print(sorted(path for path, _ in nnx.graph.iter_graph([plain, plain])))

linear, normalization = nnx.nn.linear, nnx.nn.normalization
print(linear._conv_dimension_numbers((2, 3, 4, 5)), linear._canonicalize_tuple(3))
print(linear._normalize_axes((-1, 0), 3))
print(*(normalization._canonicalize_axes(4, axes) for axes in (1, -1, (0, -1), [2, 0], (1, 1))))
x = jnp.sin(jnp.arange(40.0)).reshape(2, 5, 4)
mask = jnp.arange(40).reshape(2, 5, 4) % 3 > 0
for axes in ((0, 1), -1, [2], (-2, -1)):
    for options in ({}, {"use_mean": False}, {"use_fast_variance": False}, {"mask": mask}):
        for dtype in (None, jnp.bfloat16):
            mean, var = normalization._compute_stats(x, axes, dtype, **options)
            print(mean.dtype, mean.shape, crc32(np.asarray(mean)), crc32(np.asarray(var)))
mean, var = normalization._compute_stats(x, (0, 1), None)
four = jnp.arange(4.0)
for scale, bias in ((None, None), (four, None), (four, jnp.ones(4, jnp.float16))):
    for dtype in (None, jnp.bfloat16):
        y = normalization._normalize(x, mean, var, scale, bias, (0, 1), (-1,), dtype, 1e-5)
        print(y.dtype, numbers(y.astype(jnp.float32))[0][0])
variance = lambda x: normalization._compute_stats(x, 0, None, axis_name="i")[1]
print(jax.vmap(variance, axis_name="i")(x), normalization._abs_sq(jnp.array([1 + 2j])))
print(normalization._l2_normalize(jnp.array([3.0, 4.0])))
