"""What random programs do: each step edits an object graph, as its three numbers choose.

A step runs in one of two worlds. In `REAL` it may be inside of a transform. In `PLAIN` the functions of
transforms run in place, on batches under `vmap`; what a transform should refuse raises `Refused` there.
All arithmetic is exact in float32, so values are compared exactly.
"""

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

import nnxlite as nnx
from tests.laws import model
from tests.laws.graphs import NAMES, Box, Count, Loose, Node, Pair, Twin
from tests.laws.model import changeable, references, remove


class World:
    """Where a program runs.

    Attributes:
        outer: the arguments of the calls that are running, as seen from outside.
        depth: in `PLAIN`, how many axes of every array are mapped by the calls that are running.
    """

    def __init__(self) -> None:
        self.outer: list[tp.Any] = []
        self.depth = 0


REAL, PLAIN = World(), World()


class Refused(Exception):
    """No transform allows this."""


class Broken(Exception):
    """What a failing program raises; it passes through `levels` calls."""

    def __init__(self, levels: int) -> None:
        super().__init__("on purpose")
        self.levels = levels


STATICS = (0, 1, "text", None, True, (1, "a"), 0.5)
KINDS = (nnx.Param, nnx.BatchStat, Count, nnx.Variable, nnx.Intermediate)
OBJECTS = (Node, Twin, Loose, nnx.List, nnx.Dict, nnx.RngStream)
MODULES = (Node, Twin)
SHAPES = ((2,), (), (2, 2), (2,), (2, 2))

# Values -------------------------------------------------------------------------------------------


def is_key(value):
    return jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def is_float(value):
    return value.dtype == np.float32


def dtype(value):
    """The dtype that a value has under every transform: an int64 of NumPy is an int32 there."""
    return jax.typeof(value).dtype


def values_in(here):
    """Every array of a graph, those inside the values of Variables included."""
    found = [x.get_raw_value() if model.is_variable(x) else x for _, x in model.leaves(here)]
    return [x for x in jax.tree.leaves(found, is_leaf=lambda x: x is None) if hasattr(x, "dtype")]


def raw(refs):
    """The raw values of Variables; None for objects."""
    return [x.get_raw_value() if model.is_variable(x) else None for x in refs]


def arithmetic(x, number):
    """Another value: modulo 16, so that numbers stay small and exact."""
    if not is_float(x):
        return (x + 1) % 16
    return pick([lambda x: 2 * x + 1, lambda x: 3 - x, lambda x: 3 * x], number)(x) % 16


def computed(w, value, number):
    if is_key(value):
        return folded(w, value, jnp.full(value.shape, number, jnp.uint32))
    if isinstance(value, jax.core.Tracer):
        return arithmetic(value, number)
    return jnp.asarray(arithmetic(np.asarray(value), number))


def folded(w, keys, numbers):
    """Other keys, each made from one and its number."""
    if not keys.ndim == numbers.ndim == w.depth:
        raise Refused
    f = jax.random.fold_in
    for _ in range(w.depth):
        f = jax.vmap(f)
    return f(keys, numbers)


def full(w, shape, number):
    return jnp.full((2,) * w.depth + shape, number, jnp.int32 if number % 2 else jnp.float32)


def copied(a):
    """Another array; where it has a place, one that has none."""
    if isinstance(a, jax.core.Tracer):
        return jnp.array(a, copy=True)
    if is_key(a):
        return jax.random.wrap_key_data(np.array(jax.random.key_data(a)))
    return jnp.array(np.array(a))


def own(variables, change=copied):
    """Give Variables arrays of their own on no certain device, to be donated or placed."""
    for x in variables:
        x.set_raw_value(jax.tree.map(change, x.get_raw_value()))


def widen(w, variables):
    """Give the arrays of Variables an axis to map, where they have none."""
    wide = lambda a: jnp.broadcast_to(a[..., None], (*a.shape, 2)) if a.ndim == w.depth else a
    own(variables, wide)


def on_read(variable, value):
    """A hook of Variables, linear like all arithmetic here."""
    return 3 - value


def on_write(variable, value):
    """The same for what is written."""
    return (value + 5) % 16


def stream(w, keys):
    made = nnx.RngStream(7, tag="noise")
    made.key.set_raw_value(jnp.broadcast_to(keys, (2,) * w.depth))
    made.count.set_raw_value(jnp.zeros((2,) * w.depth, jnp.uint32))
    return made


def drawn(w, chosen):
    if not w.depth:
        return chosen()
    count = chosen.count.get_value()
    key = folded(w, chosen.key.get_value(), count)
    chosen.count.set_value(count + 1)
    return key


# Steps that edit ----------------------------------------------------------------------------------


def pick(options, number):
    return options[number % len(options)]


def put(owner, number, value):
    """Give an object or container some content under a name, or at a place, that a number chooses."""
    if isinstance(owner, (list, nnx.List)):
        if number % 2 and len(owner):
            owner[number % len(owner)] = value
        else:
            owner.append(value)
    elif hasattr(type(owner), "__setitem__"):
        owner[pick(NAMES, number)] = value
    else:
        setattr(owner, pick(NAMES, number), value)


def variables(here):
    """The Variables with an array as value."""
    return [x for x in all_of(here, nnx.Variable) if hasattr(x.get_raw_value(), "dtype")]


def all_of(here, kind):
    return [x for x in references(here) if isinstance(x, kind)]


def write(w, here, a, b, c):
    if found := variables(here):
        chosen = pick(found, a)
        new = computed(w, chosen.get_value(), c)
        if b % 4 == 0 and dtype(new) == dtype(chosen.get_value()):  # else JAX warns of `[...] =`
            chosen[...] = new
        elif b % 4 == 1:
            chosen.value = new
        elif b % 4 == 2:  # past the hooks
            chosen.set_raw_value(computed(w, chosen.get_raw_value(), c))
        else:
            chosen.set_value(new)


def hook(w, here, a, b, c):
    """Let a function see what is read from a Variable, or written to it."""
    if found := [x for x in variables(here) if dtype(x.get_raw_value()) in (np.float32, np.int32)]:
        given = [{"on_get_value": (on_read,)}, {"on_set_value": (on_write,)}, {"on_get_value": ()}]
        pick(found, a).set_metadata(**pick(given, b))


def draw(w, here, a, b, c):
    """Draw a key from a stream, and write it where there is one already."""
    if found := all_of(here, nnx.RngStream):
        key = drawn(w, pick(found, a))
        pick([x for x in variables(here) if is_key(x.get_raw_value())], b).set_value(key)


def fork(w, here, a, b, c):
    if found := all_of(here, nnx.RngStream):
        chosen = pick(found, c)
        new = stream(w, drawn(w, chosen)) if w.depth else chosen.fork()
        put(pick(changeable(here), a), b, new)


def copy_value(w, here, a, b, c):
    if found := variables(here):
        target, source = pick(found, a), pick(found, b)
        value = source.get_value()
        if dtype(target.get_value()) == dtype(value):
            # An array that stays the same one was not written.
            again = target is source or w is REAL
            target.set_value(value if again else copied(value))


def copy_alike(w, here, a, b, c):
    """The same where the shape stays what it was."""
    if found := variables(here):
        if pick(found, a).get_value().shape == pick(found, b).get_value().shape:
            copy_value(w, here, a, b, c)


def tag(w, here, a, b, c):
    if found := all_of(here, nnx.Variable):
        pick(found, a).set_metadata(tag=b % 3)


def untag(w, here, a, b, c):
    if found := [x for x in all_of(here, nnx.Variable) if "tag" in x.get_metadata()]:
        pick(found, a).del_metadata("tag")


def share(w, here, a, b, c):
    put(pick(changeable(here), a), b, pick(references(here), c))


def new_variable(w, here, a, b, c):
    kind, found = pick(KINDS[:4], c), variables(here)
    value = full(w, pick(SHAPES, b), 0 if kind is nnx.Param else c)
    if found and a % 2 and (kind is not nnx.Param or is_float(pick(found, c).get_value())):
        value = computed(w, pick(found, c).get_value(), c)
    put(pick(changeable(here), a), b, kind(value, note="new"))


def new(w, kind):
    return stream(w, jax.random.key(7)) if kind is nnx.RngStream else kind()


def new_object(w, here, a, b, c):
    made = new(w, pick(OBJECTS, b))
    put(made, c, pick(references(here), c))
    if c % 2 and isinstance(made, MODULES):
        made.flag = bool(c % 3)
    put(pick(changeable(here), a), a + b, made)


def container(w, here, a, b, c):
    """A plain container, with an array in it, a reference and a static value."""
    some, static = pick(references(here), c), pick(STATICS, c)
    array = full(w, pick(SHAPES, a), c)
    new = [
        [array, some, static],
        (some, static, array),
        {"b": array, "a": some, 3: static},
        Pair(array, some),
        Box([array, some], "label"),
        [array, [some]],
    ]
    put(pick(changeable(here), a), a + c, pick(new, b))


def array(w, here, a, b, c):
    put(pick(changeable(here), a), b, full(w, pick(SHAPES, c), c))


def static(w, here, a, b, c):
    owner, value = pick(changeable(here), a), pick(STATICS, c)
    put(owner, b, nnx.static(value) if model.is_object(owner) else value)


def delete(w, here, a, b, c):
    owner = pick(changeable(here), a)
    if keys := [k for k, _, _ in model.children(owner)]:
        remove(owner, pick(keys, b))


def rearrange(w, here, a, b, c):
    """The other methods of lists and dicts."""
    if found := [x for x in changeable(here) if isinstance(x, (list, dict, nnx.List, nnx.Dict))]:
        owner, some = pick(found, a), pick(references(here), c)
        if isinstance(owner, (dict, nnx.Dict)):
            pick([lambda: owner.update({pick(NAMES, c): some}), owner.clear], b)()
        else:
            place = c % (len(owner) + 1)
            insert = lambda: owner.insert(place, some)
            pick([insert, owner.reverse, lambda: owner.pop(), owner.clear], b)()


def edit_static(w, here, a, b, c):
    """Edit a container in a static place, or the static part of a pytree node."""
    kinds = (list, dict, Box)
    if found := [x for _, x in model.walk(here) if isinstance(x, kinds) and x is not here]:
        owner, value = pick(found, a), pick([*STATICS, [1], {"a": 1}], c)
        if isinstance(owner, Box):
            owner.label = pick(["box", "other", "third"], b)
        else:
            put(owner, b, value)


def sow(w, here, a, b, c):
    if (modules := all_of(here, MODULES)) and (found := variables(here)):
        value = computed(w, pick(found, c).get_value(), c)
        pick(modules, a).sow(nnx.Intermediate, pick(NAMES, b % 2), value)


def pop(w, here, a, b, c):
    nnx.pop(pick(all_of(here, nnx.Pytree), a), pick(KINDS, -1 - b % 3))


def mode(w, here, a, b, c):
    if modules := all_of(here, MODULES):
        pick(modules, a).set_attributes(flag=bool(b % 2), raise_if_not_found=False)


def clone(w, here, a, b, c):
    put(pick(changeable(here), a), b, nnx.clone(pick(references(here), c)))


def merged(w, here, a, b, c):
    parts = nnx.split(pick(all_of(here, nnx.Pytree), c), nnx.Param, nnx.BatchStat, ...)
    put(pick(changeable(here), a), b, nnx.merge(*parts, copy=bool(b % 2)))


def update(w, here, a, b, c):
    chosen, kind = (
        pick(all_of(here, nnx.Pytree), a),
        pick((nnx.Param, nnx.BatchStat, nnx.Variable), b),
    )
    new = jax.tree.map(lambda value: computed(w, value, b), nnx.state(chosen, kind))
    nnx.update(chosen, new)


def outer(w, here, a, b, c):
    """Write to something from outside of the call, which raises."""
    if w.outer and (found := variables(w.outer[-1])):
        if w is PLAIN:
            raise Refused
        chosen = pick(found, a)
        if b % 2:
            # A constant: JAX's cache of an inner jit may not depend on what is outside of it.
            chosen.set_value(jnp.zeros(chosen.get_raw_value().shape))
        else:
            chosen.set_metadata(tag="from inside")
        raise AssertionError("a write from the wrong trace level went through")


def fail(w, here, a, b, c):
    if b % 3 == 0 and w is REAL:
        jnp.zeros(2) + jnp.zeros(3)
    raise Broken(0 if b % 3 == 0 else a % 2)


GROWING = (new_variable, new_object, container, clone, merged, fork)
VALUES = (draw, write, copy_alike, update)
EDITS = (
    *(copy_value, tag, untag, hook, share, array, static, delete, rearrange, sow, pop, mode, outer),
    *GROWING,
    *VALUES,
)
EDIT = {step.__name__: step for step in (*EDITS, edit_static)}
