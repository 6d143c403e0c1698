"""Every refusal of objects, containers, captures and random streams, in one table."""

import jax
import jax.numpy as jnp
import numpy as np

import nnxlite as nnx
from nnxlite.objects._pytree import BoundMethod
from tests.messages import refused, rows

ONE = jnp.ones(2)


class Affine(nnx.Module):
    def __init__(self):
        self.size = 2
        self.shift = jnp.zeros(2)
        self.scale = nnx.Param(ONE)
        self.deterministic = False

    def __call__(self):
        return self.scale

    def both(self):
        self.sow(nnx.Intermediate, "same", ONE)
        self.perturb("same", ONE)


class Declared(nnx.Pytree):
    a: nnx.Static[tuple]

    def __init__(self, a=()):
        self.a = a


class Modes(nnx.Module):
    def __init__(self):
        self.deterministic, self.other = False, nnx.data(False)

    def set_view(self, deterministic=None):
        """It has one."""


class BelowObject(nnx.Object): ...


def made(body):
    """An instance of a new class Made whose `__init__` does `body(self)`."""
    return type("Made", (nnx.Pytree,), {"__init__": body})()


def of_class(base=nnx.Pytree, namespace=(), **options):
    return type("Wrong", (base,), dict(namespace), **options)


def assigned_and_appended(value):
    def body(self):
        self.a = [ONE] if value is not ONE else []
        self.a.append(value)

    return made(body)


def name_of_a_child(net):
    net.sow(nnx.Intermediate, "a", ONE)
    net.a.sow(nnx.Intermediate, "deep", ONE)


def shared():
    layer = Modes()
    layer.weight = nnx.Param(1.0)
    return nnx.Dict(a=layer, b=layer)


def perturbed():
    layer = Affine()
    layer.perturb("inner", ONE)
    return layer


@rows("""
    nnx.Data(1)
        TypeError: Data is for annotations: `name: Data[type]`
    node.n = nnx.static(ONE)
        ValueError: annotated with nnx.static(...) when setting attribute 'n'
    node.n = nnx.static(nnx.Param(1))
        ValueError: annotated with nnx.static(...) when setting attribute 'n'
    node.size = ONE
        ValueError: data value of type ... static attribute 'size' of Pytree type 'Affine'
        ... self.size = nnx.data(...)
    node.size = [ONE]
        ValueError: data on value ... static attribute 'size' of Pytree type 'Affine'
    node.size = nnx.Param(1)
        ValueError: data value of type ... static attribute 'size' of Pytree type 'Affine'
    Declared(ONE)
        ValueError: to static attribute 'a' of Pytree type 'Declared'
    assigned_and_appended(ONE)
        ValueError: type 'list' ... 'a' of Pytree type 'Made' ... nnx.data(...) ... nnx.List(...)
        ... pytree=False
    assigned_and_appended(nnx.static(1))
        ValueError: on attribute 'Made.a' ... not be inside other structures
    made(lambda self: setattr(self, "a", [nnx.data(1), nnx.static(2)]))
        ValueError: on attribute 'Made.a' ... not be inside other structures
    made(lambda self: setattr(self, "a", nnx.data({"k": (nnx.data(1),)})))
        ValueError: on attribute 'Made.a' ... not be inside other structures
    node.size = [nnx.data(1)]
        ValueError: on attribute 'Affine.size'
    nnx.data(nnx.static(1))
        ValueError: exclude each other ... got both around ... type 'int'
    nnx.data(1, default=2)
        TypeError: nnx.data() accepts either ... got also ['default']
    nnx.static(1, kw_only=True)
        TypeError: As a dataclass field write static(default=value, ...)
    nnx.check_pytree(3)
        TypeError: check_pytree: Expected a Pytree, got int
    of_class(namespace={"__slots__": ("a",)})
        TypeError: found __slots__=('a',) in 'Wrong' ... remove __slots__
    nnx.dataclass(slots=True)(of_class(namespace={"__annotations__": {"a": int}}))
        TypeError: dataclass(slots=True) is not possible
    of_class(BelowObject, pytree=True)
        ValueError: Object is not a pytree, ... for type Wrong ... Derive it from
    of_class(other=True)
        TypeError: takes no keyword arguments
    BelowObject(1)
        TypeError: BelowObject() takes no arguments: it has no __init__.
    object.__new__(BoundMethod).__func__
        AttributeError: __func__
    object.__new__(BoundMethod).__self__
        AttributeError: __self__
    nnx.nn.attention.first_from(None, None, error_msg="which one?")
        ValueError: which one?

    items[0] = ONE
        ValueError: static attribute 0 of Pytree type 'List'
    items.append(nnx.static(ONE))
        ValueError: nnx.static(...) when setting attribute 3 of Pytree type 'List'
    items[3]
        IndexError: Index out of bounds: 3 for a List of 3
    setattr(items, "7", ONE)
        AttributeError: attribute '7' of a List of 3 items ... the next one is '3'. Use append
    items[3] = 1
        IndexError: Index out of bounds: 3 for a List of 3
    items["a"]
        TypeError: must be integers or slices, got str
    items.insert(0, [nnx.data(1)])
        ValueError: not be inside other structures
    items[0:2] = [5, nnx.static(ONE)]
        ValueError: nnx.static(...) when setting attribute
    items[0:3:2] = [1]
        ValueError: size
    items.size
        AttributeError: 'List' object has no attribute 'size'
    getattr(items, "3")
        AttributeError: 'List' object has no attribute '3'
    getattr(items, "01")
        AttributeError: 'List' object has no attribute '01'
    table["zz"]
        KeyError: 'zz' is not in the Dict; it has ['a', 'b']
    table.zz
        AttributeError: 'Dict' object has no attribute 'zz', and no item
    del table.zz
        AttributeError: zz

    node.sow(int, "d", 1)
        TypeError: Expected a Variable class or its registered name
    node.sow(nnx.Intermediate, "size", 1.0)
        ValueError: Affine.sow: Expected 'size' to be a Variable, got int
    node.sow(nnx.Intermediate, "train", 1.0)
        ValueError: Affine.sow: Expected 'train' to be a Variable, got method
    node.sow(nnx.Intermediate, "scale", 1.0)
        ValueError: Affine.sow: Expected 'scale' to be of type 'Intermediate', got 'Param'
        ... nnx.pop(model, nnx.Param)
    node.perturb("train", 1.0)
        ValueError: Affine.perturb: Expected 'train' to be a Variable, got method
    node.perturb("scale", 1.0)
        ValueError: Affine.perturb: Expected 'scale' to be of type 'Perturbation', got 'Param'
    noisy.perturb("inner", jnp.ones(3))
        ValueError: Affine.perturb: ... 'inner' was made for float32[2], and the value is float32[3]
    noisy.perturb("inner", {"a": ONE})
        ValueError: 'inner' was made for float32[2], and the value is {'a': 'float32[2]'}
    table.set_attributes(deterministic=True, foo=1, bar=2)
        ValueError: following attributes: ['bar', 'foo']. No module in this Dict
    table.set_attributes(Affine, other=True)
        ValueError: following attributes: ['other']
    table.set_attributes(other=ONE, deterministic=ONE)
        ValueError: static attribute 'deterministic' of Pytree type
    tied.set_attributes(deterministic=2, graph=False)
        ValueError: Duplicate Modes ... 'a', 'b'
    nnx.view(table, deterministic=True, foo=1, bar=2)
        ValueError: Unused keys found in nnx.view: ['bar', 'foo']. No set_view method in this Dict
    nnx.view(table, only=nnx.Param, deterministic=True)
        ValueError: ['deterministic']
    nnx.view(tied, deterministic=True, graph=False)
        ValueError: Duplicate
    nnx.view_info(tied, graph=False)
        ValueError: Duplicate
    nnx.with_attributes(table, deterministic=True, foo=1)
        ValueError: instance of the following attributes: ['foo']. No module in this Dict
    nnx.with_attributes(table, deterministic=ONE)
        ValueError: static attribute 'deterministic' of Pytree type

    nnx.capture(node, nnx.Intermediate, init={"inner": ONE})
        TypeError: `init` contains float32[2] at 'inner', but must contain Var
    nnx.capture(lambda m: m, nnx.Intermediate, init=nnx.State({"y": {"a": nnx.Perturbation(1.0)}}))(node)
        ValueError: value for 'y.a', but no module has the path 'y'
    nnx.capture(lambda m: m.perturb("a", 1.0), nnx.Perturbation, init=start)(node)
        ValueError: Affine.perturb: ... 'a' was made for float32
    nnx.capture(3, nnx.Intermediate)
        TypeError: capture takes a module or a function, got int
    nnx.capture(node, "intermediates")
        TypeError: takes classes of Variables, such as nnx.Intermediate
    nnx.capture(node, nnx.Intermediate, method_outputs="x")
        TypeError: takes classes of Variables
    nnx.capture(lambda m: m, nnx.Intermediate)(m=node)
        TypeError: model as its first positional argument
    nnx.capture(Affine.both, nnx.Intermediate, nnx.Perturbation)(node)
        ValueError: 'same' to be of type 'Perturbation', got 'Intermediate'
    nnx.capture(name_of_a_child, nnx.Intermediate)(table)
        ValueError: 'a' is the name of ... recorded 'a.deep'

    nnx.RngStream("x", tag="a")
        ValueError: Invalid rng value ... jax.random.key ... RngStream
    nnx.RngStream(np.zeros(2, np.uint32), tag="a")
        ValueError: Invalid rng value ... jax.random.key ... RngStream
    nnx.Rngs(jnp.uint32(3))
        ValueError: int32[], ... an array, traced ... jax.random.key(seed
    nnx.jit(lambda s: nnx.Rngs(s))(0)
        ValueError: int32[], ... an array, traced ... jax.random.key(seed
    nnx.Rngs(jnp.ones(1000))
        ValueError: float32[1000]
    nnx.Rngs(jax.random.PRNGKey(0, impl="rbg"))
        TypeError: shape (4,) ... jax.random.key(seed, impl
    nnx.Rngs(0, params="x")
        ValueError: Invalid rng value
    rngs.params.split("a")
        TypeError: int or a tuple of ints, got 'a'
    rngs.params.split(-1)
        ValueError: cannot be negative, got -1
    drawn()
        ValueError: 'noise' holds an array of keys ... (2,) ... restore_rngs
    drawn.split(2)
        ValueError: 'noise' holds an array of keys ... (2,) ... restore_rngs
    rngs.dropout
        AttributeError: No RngStream named 'dropout' ... 'params', 'noise'
        ... nnx.Rngs(dropout=seed)
    rngs["dropout"]
        KeyError: No RngStream named 'dropout'
    rngs()
        AttributeError: No RngStream named 'default'
    nnx.Rngs().params
        AttributeError: its streams: none
    wide.split(3)
        ValueError: 'params' holds an array of keys
    wide.split({"default": 2, "params": "a"})
        TypeError: got 'a'
    nnx.split_rngs(rngs, splits=2, squeeze=True)
        ValueError: squeeze=True is only supported for splits=1, got ... 2
    nnx.split_rngs(nnx.Dict(rngs=wide), splits=2)
        ValueError: 'params' at path rngs.params holds an array of keys
    nnx.restore_rngs([1])
        TypeError: restore_rngs takes what ... triples; got an item
    nnx.restore_rngs([(drawn, 1)])
        TypeError: restore_rngs takes what ... triples; got an item
    nnx.with_rngs(nnx.List([rngs.params, rngs.params]), fork=True, graph=False)
        ValueError: graph=True
    nnx.with_rngs(rngs, split={"params": 2}, fork="params")
        ValueError: RngStream at path ('params',) matches multiple rules: ... split matches
        ... fork match
    nnx.reseed(wide, params=3)
        ValueError: at path ('params',) ... (2,) ... policy="match_shape"
    nnx.reseed(wide, default=5, params=5)
        ValueError: Cannot reseed stream
    nnx.reseed(rngs, params=5, policy="x")
        ValueError: policy must be ... got 'x'
    nnx.reseed(rngs, params="a")
        ValueError: Invalid rng value: 'a'
    nnx.reseed(rngs, params=jax.random.split(jax.random.key(0), 2))
        ValueError: 'params' given to nnx.reseed holds an array of keys
    nnx.reseed(rngs, params=5, policy=lambda path, key, shape: None)
        ValueError: Invalid rng value: None
""")
def test_a_refusal_says_why_and_changes_nothing(line, message):
    node, modes = Affine(), Modes()
    scope = {"node": node, "items": nnx.List([1, ONE, Affine()]), "tied": shared()}
    scope |= {"table": nnx.Dict(a=Affine(), b=modes), "noisy": perturbed()}
    scope |= {"rngs": nnx.Rngs(params=1, noise=2), "drawn": nnx.RngStream(0, tag="noise").split(2)}
    scope |= {
        "wide": nnx.Rngs(0, params=jax.random.split(jax.random.key(0), 2)),
        "np": np,
        "BoundMethod": BoundMethod,
    }
    scope |= {"start": nnx.State({"a": nnx.Perturbation(ONE)})}
    refused(line, message, globals() | scope)
