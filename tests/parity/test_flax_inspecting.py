"""Libraries that intercept or inspect: a program prints the same by Flax and by `nnxlite.flax`."""

from __future__ import annotations

import pytest

from tests.flax.launching import printed

pytest.importorskip("flax")

PROGRAM = r"""
import abc, collections.abc, dataclasses, typing
import jax, jax.numpy as jnp, optax
from flax import nnx

def show(name, make):
    try:
        result = make()
    except Exception as error:
        result = type(error).__name__
    print(name, result)

rngs = nnx.Rngs(0)
Linear = lambda: nnx.Linear(2, 2, rngs=rngs)

# Classes: abstract, protocols, generic, dataclasses, metaclasses, several bases.
class Interface(abc.ABC):
    @abc.abstractmethod
    def f(self): ...
class Abstract(nnx.Module, Interface): ...
class Implementation(Interface, nnx.Module):
    def f(self):
        return 2
show("an abstract class", lambda: Abstract())
show("a concrete one", lambda: (Implementation().f(), isinstance(Implementation(), abc.ABC)))
class Protocol(typing.Protocol):
    def f(self): ...
show("a protocol", lambda: type("Following", (nnx.Module, Protocol), {"f": lambda self: 3})().f())
class Generic(nnx.Module, typing.Generic[typing.TypeVar("T")]):
    def __init__(self, x):
        self.x = nnx.Param(x)
show("a generic class", lambda: len(jax.tree.leaves(Generic[float](1.0))))
@dataclasses.dataclass
class Data(nnx.Module):
    a: int
    b: nnx.Param = dataclasses.field(default_factory=lambda: nnx.Param(jnp.ones(2)))
    def __post_init__(self):
        self.c = self.a + 1
show("a dataclass", lambda: (Data(1).c, Data(1) == Data(1), len(jax.tree.leaves(Data(1)))))
class Tagged(nnx.Module):
    def __init_subclass__(cls, *, tag=None, **options):
        super().__init_subclass__(**options)
        cls.tag = tag
class Own(Tagged, tag="x"): ...
class NoPytree(Tagged, tag="y", pytree=False): ...
show("__init_subclass__", lambda: (Own.tag, NoPytree.tag))
class Counting(type(nnx.Module)):
    def __call__(cls, *args):
        made = super().__call__(*args)
        made.made = True
        return made
show("a metaclass", lambda: Counting("Counted", (nnx.Module,), {})().made)
class Base:
    def __new__(cls, *args):
        made = super().__new__(cls)
        made.__dict__["made"] = 5
        return made
    def __init__(self, *args):
        self.base = 1
        super().__init__(*args)
class Several(Base, nnx.Module):
    def __init__(self):
        super().__init__()
        self.w = nnx.Param(jnp.ones(1))
show("several bases", lambda: (Several().base, Several().made, len(jax.tree.leaves(Several()))))

# Paths.
class Model(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([Linear(), nnx.Dropout(0.1, rngs=rngs)])
        self.named = nnx.Dict(a=nnx.Param(jnp.ones(1)))
        self.array = jnp.ones(2)
        self.text = "x"
        self.norm = nnx.BatchNorm(2, rngs=rngs)
    def __call__(self, x):
        return self.layers[0](x)
model = Model()
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
metric = nnx.MultiMetric(a=nnx.metrics.Accuracy(), l=nnx.metrics.Average("l"))
def paths(tree, **options):
    flat = jax.tree_util.tree_flatten_with_path(tree, **options)[0]
    return [(jax.tree_util.keystr(p), [type(k).__name__ for k in p]) for p, _ in flat]
for name, tree in dict(
    model=model, state=nnx.state(model), split=nnx.split(model, nnx.Param, ...),
    optimizer=optimizer, its=nnx.state(optimizer), rngs=nnx.Rngs(0, params=1), metric=metric,
).items():
    show(name, lambda: paths(tree))
for kind in (nnx.Variable, nnx.Linear, nnx.Module):
    show(kind.__name__, lambda: paths(model, is_leaf=lambda x: isinstance(x, kind)))

# What things are.
objects = [model, model.layers, model.named, optimizer, nnx.Rngs(0), nnx.state(model)]
objects += [model.norm.mean, metric]
kinds = [nnx.Module, nnx.Pytree, nnx.Object, nnx.Variable, nnx.BatchStat, nnx.List, nnx.Dict, dict]
show("isinstance", lambda: [[isinstance(o, k) for k in kinds] for o in objects])
for name in "MutableMapping Mapping MutableSequence Sequence Iterable Callable".split():
    show(name, lambda: [isinstance(o, getattr(collections.abc, name)) for o in objects[:7]])
show("attributes", lambda: sorted(k for k in vars(model) if not k.startswith("_")))
show("identity", lambda: (hash(model) == hash(model), model == model, model == Model()))
show("names", lambda: [k.__qualname__ for k in (nnx.Module, nnx.State, nnx.Param, nnx.Rngs, nnx.List)])

# Methods that are replaced.
def replaced(kind, name, use):
    original, calls = getattr(kind, name), []
    def method(self, *args, **kwargs):
        calls.append(type(self).__name__)
        return original(self, *args, **kwargs)
    inherited = name not in vars(kind)
    setattr(kind, name, method)
    try:
        use()
    finally:
        delattr(kind, name) if inherited else setattr(kind, name, original)
    return len(calls)
x = jnp.ones((1, 2))
def call():
    model(x), nnx.jit(lambda m, x: m(x))(model, x)
show("__call__", lambda: replaced(nnx.Linear, "__call__", call))
show("__init__", lambda: replaced(nnx.Linear, "__init__", Linear))
show("__setattr__", lambda: replaced(nnx.Module, "__setattr__", Linear))
show("train", lambda: replaced(nnx.Module, "train", model.train))
"""


def test_a_program_that_inspects():
    ours, theirs = printed("-m", "nnxlite.flax", "-c", PROGRAM), printed("-c", PROGRAM)
    assert ours == theirs
