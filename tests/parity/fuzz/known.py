"""The differences that stay on purpose, each as narrow as it can be told from outside.

Every rule has an example, a program that differs by it: `docs/differences.md` says the same in words.
A rule of the table has its name and reason, then what it is recognised by, then its example:

- `ours`, `theirs`: patterns of both sides. They are those of messages, where one library refuses or both
  do with different classes, or of values where there is a line `value`, the pattern of the place;
- `program`, `line`: what the whole program has, and the statement that differs.
"""

from __future__ import annotations

import dataclasses
import re
import typing as tp

import jax

from tests.parity.fuzz.observe import at, difference
from tests.parity.fuzz.run import Difference


@dataclasses.dataclass
class Rule:
    """A deliberate difference: its name, its reason, a program, and how it is recognised."""

    name: str
    reason: str
    example: list[str]
    matches: tp.Callable[[Difference], bool]


RULES: list[Rule] = []


def rule(name: str, reason: str, *example: str) -> tp.Any:
    """Register a rule."""

    def add(matches: tp.Callable[[Difference], bool]) -> tp.Any:
        RULES.append(Rule(name, reason, list(example), matches))
        return matches

    return add


def explain(found: Difference) -> str | None:
    """The name of the rule that a difference falls under."""
    return next((rule.name for rule in RULES if rule.matches(found)), None)


def _shown(x: tp.Any) -> str:
    return f"{type(x).__name__}: {x if isinstance(x, BaseException) else repr(x)}"


def _mentions(d: Difference, pattern: str) -> bool:
    """Whether the program has a text."""
    return re.search(pattern, "\n".join(d.program)) is not None


def _row(block: str) -> None:
    """Register a rule of the table."""
    head, *lines = block.splitlines()
    given: dict[str, str] = {}
    example = []
    for line in map(str.strip, lines):
        if re.match(r"(theirs|ours|value|program|line):", line):
            parts = re.split(r" ; (?=ours:|theirs:)", line)
            given.update({k: v.strip() for k, _, v in (part.partition(":") for part in parts)})
        else:
            names = {"MODEL": MODEL, "REFERENCE": REFERENCE}
            example.append(names.get(line, line.replace(r"\n", "\n")))
    sides = [side for side in ("ours", "theirs") if side in given]
    kinds = {
        ("theirs",): ("passes", "class"),
        ("ours",): ("raises",),
        ("ours", "theirs"): ("class",),
    }[tuple(sides)] if "value" not in given else ("value",)  # fmt: skip

    def matches(d: Difference) -> bool:
        seen = {side: _shown(getattr(d, side)) for side in sides}
        seen |= {"value": ".".join(map(str, d.where)), "line": d.text}
        said = all(re.search(given[k], text, re.DOTALL) for k, text in seen.items() if k in given)
        return d.kind in kinds and said and _mentions(d, given.get("program", ""))

    rule(*head.split(": ", 1), *example)(matches)


def _is_reference(x: tp.Any) -> bool:
    """Whether an observation is that of a Variable with `ref=True`."""
    return isinstance(x, tuple) and x[:1] == ("Variable",) and x[-1] is True


MODEL = "m = Box(a=nnx.Param(jnp.ones(2)), b=Count(jnp.zeros(2)))"
REFERENCE = "m = Box(a=nnx.Param(jnp.ones(2), ref=True), b=nnx.Param(jnp.ones(2)))"

TABLE = r"""
captured objects are handed on: Every transform takes what is bound: an object from outside may be an argument inside.
    theirs: ^TraceContextError: Cannot mutate|^ValueError: Cannot extract graph node from different trace|^TraceContextError: Trying to extract graph node|^UnexpectedTracerError
    MODEL
    f1 = nnx.scan(lambda c, v, x: (c + v.sum(), x), in_axes=(nnx.Carry, None, 0), graph_updates=False)
    r = nnx.jit(lambda x: f1(x, m.a, jnp.ones(2)))(0.0)
jit_partial takes Variables: Every transform propagates structure, and takes what is bound.
    theirs: jit_partial only supports Var
    MODEL
    r = nnx.jit_partial(lambda x, m: m.a * x, 2.0, graph_updates=False)(m)
prefixes in every mode: Settings work in every mode.
    theirs: TreeState|NodeStates|Graph nodes are not allowed as prefixes|cannot contain `State(Axes|Sharding)`
    MODEL
    r = nnx.vmap(lambda m: m.a * 2, in_axes=(nnx.prefix(m, {...: 0}, graph=True),), graph=False)(m)
annotations without a mesh: Sharding annotations need no mesh, and one mesh may follow another.
    theirs: does not match the mesh shape of the target sharding|An auto mesh context or metadata is required|^ValueError: Resource axis: .* is not found in mesh
    m = Box(a=nnx.Param(jnp.ones((8, 4)), sharding=('d', None)))
with_rngs in every mode: Settings work in every mode.
    theirs: graph_updates=True is not supported for `with_rngs`
    r = nnx.with_rngs(nnx.Rngs(0), split=2)
partial objects with arrays: An object with arrays as attributes may be a cached argument, and be given twice.
    theirs: '(jaxlib._jax.ArrayImpl|TypedNdArray)' object has no attribute 'get_raw_value'|^KeyError: \d+$
    program: cached_partial
    m = Box(a=nnx.Param(jnp.ones(2)), b=jnp.ones(2))
    r = nnx.cached_partial(nnx.jit(lambda m: m.a * m.b), m)()
static values in place of cached Variables: A cached argument may have lost a Variable since it was made.
    theirs: ^AttributeError: 'int' object has no attribute 'get_raw_value'
    MODEL
    n = nnx.with_attributes(m, a=11)
    r = nnx.cached_partial(nnx.jit(lambda m: m.b * 2), n)()
averages of sown values: An average is taken of every array, those in tuples included.
    theirs: ^TypeError: copy requires ndarray or scalar arguments, got <class 'tuple'>
    MODEL
    m.sow(nnx.Intermediate, 'seen', jnp.ones(2))
    e = nnx.EMA(m, 0.5, only=nnx.Variable)
other names in a carry: A carried object may get another name for a Variable; the reference refuses one that sorts first.
    theirs: ^TypeError: scan body function carry input and carry output must have the same pytree structure
    program: scan\(
    MODEL
    r = nnx.scan(lambda m, x: (setattr(m, 'a0', m.b), (m, x))[1])(m, jnp.ones(2))
objects on several devices: What a jitted function does not use may be on any devices.
    theirs: ^ValueError: Received incompatible devices for jitted computation. Got argument
    with jax.set_mesh(mesh_of(2, 2)):\n    w = Box(a=nnx.Param(jnp.ones((8, 4)), sharding=('d', None)))
    x = jax.device_put(jnp.ones(2), jax.devices()[0])
    r = nnx.jit(lambda w, x: x * 0.5)(w, x)
arrays of references: `clone(arrays=True)` copies what is in a reference; the other library passes the reference on.
    theirs: copy got a Ref of type|copy requires ndarray or scalar arguments, got .*Ref'
    REFERENCE
    r = nnx.clone(m, arrays=True)
the same prefix twice: What a filter leaves out and what is no argument to differentiate are both constants.
    theirs: Inconsistent aliasing.*: (False.*: None|None.*: False)
    program: grad
    MODEL
    r = nnx.grad(lambda m, b: (m.a * b).sum(), argnums=0)(m, m.b)
eval_shape of objects given twice: Without graph updates an object may be given twice everywhere; the reference refuses it here.
    theirs: ^ValueError: Duplicate
    program: eval_shape
    MODEL
    u = nnx.eval_shape(lambda m, v: m.a * v, m, m.a, graph_updates=False)
recursive_map of a cycle: A cycle is walked like any other graph.
    theirs: Found cycle in the graph
    program: recursive_map|view|with_attributes
    MODEL
    m.c = m
    r = nnx.recursive_map(lambda path, x: x, m)
averages of keys: An average of keys is the latest one; the reference multiplies them.
    theirs: multiply does not accept dtypes float32, key
    program: EMA
    k = nnx.Rngs(0)
    e = nnx.EMA(k, 0.5)
    e.update(k)
bookkeeping of references: A Variable with `ref=True` may be in a loop; the reference trips over marks of its own.
    theirs: NoUpdate|mutable array references cannot be returned
    REFERENCE
    r = nnx.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, c[1]), (0, m))
callbacks and abstract values: `as_abstract` reads raw values; callbacks belong to concrete ones.
    theirs: unsupported operand type.*ShapeDtypeStruct
    program: on_get_value
    m = Box(a=nnx.Param(jnp.ones(2), on_get_value=doubled))
    u = nnx.as_abstract(nnx.eval_shape(lambda: m))
writes that would be lost: A write to what is broadcast to `scan` raises; the reference drops it.
    ours: which is broadcast .axis None.: the writes of the iterations would be lost
    MODEL
    def f1(c, m, x):\n    m.b[...] = m.b + x\n    return c, x
    r = nnx.scan(f1, in_axes=(nnx.Carry, None, 0))(0.0, m, jnp.ones(2))
objects twice with graph=False: graph=False refuses every object that is found twice; the reference looks at Variables only, and not in loops.
    ours: Duplicate .* with graph=False does not support Variable aliasing: objects must form a tree|Duplicate .* Tree mode .graph=False. does not support shared references
    program: graph=False|set_graph_mode\(False
    m = Box(a=jnp.ones(2))
    r = nnx.jit(lambda a, b: a.a + b.a, graph=False)(m, m)
a shared array with two axes: A prefix that contradicts itself raises; the reference looks at Variables only.
    ours: Inconsistent aliasing detected: different ((in|out)_axes|differentiation) for a shared array
    m = Box(a=jnp.ones(2), b=nnx.Param(jnp.ones(2)))
    axes = nnx.StateAxes({nnx.Variable: 0, ...: None})
    r = nnx.vmap(lambda m, n: m.b * 2, in_axes=(0, axes))(m, m)
metadata of a body of a branch: Metadata set in a jitted body reaches the branch that calls it, so every branch must do it.
    ours: branch.* metadata of '
    program: nnx\.jit
    MODEL
    def f1(m):\n    nnx.jit(lambda m: m.a.set_metadata(note=3))(m)
    r = nnx.cond(True, f1, lambda m: None, m)
differentiated values in references: A reference that a differentiated function writes is written, and JAX refuses a differentiated value in one that is not differentiated; the reference drops the write.
    ours: performing a set/swap operation with a differentiated value on a non-differentiated array ref
    program: ref=True
    v = nnx.BatchStat(jnp.zeros(2), ref=True)
    def f1(x, v):\n    v[...] = x * 2\n    return (v[...] * x).sum()
    r = nnx.grad(f1)(jnp.ones(2), v)
metadata of a body of a loop: Metadata set in a jitted body reaches the loop that calls it, which cannot change it; the reference drops it.
    ours: the body changes metadata of
    program: nnx\.jit
    MODEL
    def f1(i, m):\n    nnx.jit(lambda m: m.a.set_metadata(note=3))(m)\n    return m
    r = nnx.fori_loop(0, 2, f1, m)
keyword arguments of checkify: A function under `checkify` takes keyword arguments.
    theirs: got an unexpected keyword argument
    program: checkify
    MODEL
    f1 = nnx.checkify(lambda m: m.a * 2, graph=False)
    r = f1(m=m)
writes to captured objects through a transform: An object from outside cannot be written inside a transform; the reference lets an inner transform do it, and may leave a tracer there.
    ours: TraceContextError: Cannot mutate .* from different trace level
    program: \n +f\d+ = nnx\.
    m = Box(a=jnp.ones(2))
    def f1(x):\n    f2 = nnx.remat(lambda m: setattr(m, 'c', Count(jnp.ones(()))))\n    f2(m)
    r = nnx.vmap(f1)(jnp.ones(2))
items of NumPy scalars: `variable[...] = x` writes whatever the value is.
    theirs: 'numpy\.\w+' object does not support item assignment
    m = Box(a=nnx.Param(np.float32(2.0)))
    m.a[...] = jnp.ones(())
arrays in tuples: `update` writes an array that is found in a tuple.
    theirs: Cannot set key .* on immutable node of type tuple
    m = Box(a=nnx.data((nnx.Param(jnp.ones(2)), jnp.ones(2))))
    nnx.update(m, nnx.state(m))
an object of a loop in its results: The same, where the object came in as a sequence.
    theirs: nnx.scan with graph_updates=False does not support Variable aliasing
    program: nnx\.scan
    MODEL
    f1 = nnx.scan(lambda c, x: (c, [x]), graph=False)
    r = f1(0.0, m.a)
annotated axes of another number: `update` refuses a value whose axes the annotation does not fit.
    ours: update: the value at .* its axes are annotated as
    with jax.set_mesh(mesh_of(2, 4)):\n    w = Box(a=nnx.Param(jnp.ones((8, 4)), sharding=('d', 'e')))
    nnx.update(w, jax.tree.map(lambda x: jnp.stack([x, x]), nnx.state(w)))
items of numbers: `variable[...]` reads whatever the value is.
    theirs: '(int|float|bool|complex)' object is not subscriptable
    m = Box(a=nnx.Param(2.0))
    r = m.a[...]
objects in auxiliary outputs: A differentiated function may return a new object beside its value in every mode.
    theirs: GraphDef index 0 already used
    MODEL
    f1 = nnx.value_and_grad(lambda v: (v.sum(), Box(a=1)), has_aux=True, graph_updates=False)
    r = f1(m.a)
pop from plain lists: `pop` takes Variables out of plain lists, too.
    theirs: Cannot pop key .* from node of type list
    m = Box(a=nnx.data([jnp.ones(2), nnx.Param(jnp.ones(2))]))
    s = nnx.pop(m, nnx.Param)
metadata of a bare Variable: `set_metadata` takes a Variable as a root, like every function on graphs.
    theirs: IndexError: tuple index out of range
    program: nnx\.set_metadata\(
    v = nnx.Param(jnp.ones(2))
    nnx.set_metadata(v, note=9)
entries of a State in a branch: What a branch puts into a State stays inside it, as under `jit` in both; the reference raises.
    theirs: branch outputs must have the same pytree structure
    program: replace_by_pure_dict
    MODEL
    s = jax.tree.map(lambda x: x + 1, nnx.state(m))
    def f1(s):\n    s.replace_by_pure_dict(s.to_pure_dict())
    r = nnx.cond(True, f1, lambda s: None, s)
metadata of a body in cached_partial: Metadata set in a jitted body reaches the cached argument, whose structure must stay; the reference drops it.
    ours: structure of a \w+ was changed where it must stay the same \('metadata'\).*of cached_partial
    program: nnx\.jit
    MODEL
    def f1(m):\n    nnx.jit(lambda m: m.a.set_metadata(note=3))(m)
    r = nnx.cached_partial(nnx.jit(f1), m)()
loops that remove attributes: A loop that changes the structure of its carry is refused with the reason; the reference fails inside.
    theirs: 'NodeRef' object has no attribute 'outer_index'|^ValueError: Incorrect number of leaves, expected
    m = Box(a=nnx.Param(jnp.ones(2)), c=Count(jnp.ones(2)))
    m.u = m.c
    def f1(i, c):\n    nnx.pop(c[0], nnx.Param)\n    return c
    r = nnx.fori_loop(0, 2, f1, (m, jnp.ones(2)))
items inserted before static ones: `List.insert` moves items with their kind; the reference keeps the kind of each position.
    theirs: Cannot assign data value of type .* to static attribute
    program: \.insert\(
    m = Box(a=nnx.List([(1, 2), nnx.Param(jnp.ones(2))]))
    m.a.insert(0, nnx.Param(jnp.ones(2)))
shared Variables that were popped: `pop` takes a shared Variable away from every place; the reference leaves the others.
    ours: ^AttributeError: '\w+' object has no attribute
    program: nnx\.pop\(
    m = Box(a=nnx.Param(jnp.ones(2)))
    def f1(m):\n    m.u = m.a\n    nnx.pop(m, nnx.Param)\n    return m.u.sum()
    r = nnx.eval_shape(f1, m)
recursive_map in tuples: `recursive_map` makes a tuple anew where its elements have changed.
    theirs: Cannot update key .* because the node does not support mutation
    m = Box(a=nnx.Param(jnp.ones(2)))
    r = nnx.recursive_map(lambda path, x: nnx.List([x]) if type(x).__name__ == 'Box' else x, (m,))
references that are passed twice: A reference may be a cached argument and another one, and be updated with itself.
    theirs: only one reference to a mutable array may be passed as an argument
    m = Box(a=nnx.Param(jnp.ones(2), ref=True))
    r = nnx.jit_partial(lambda p, m: None, m, graph_updates=False)(m)
metadata of one branch: With graph_updates=False metadata of a branch stays inside it; the reference raises.
    theirs: branch outputs must have the same pytree structure.*metadata
    program: graph_updates=False|set_graph_updates
    MODEL
    def f1(m):\n    m.a.set_metadata(note=3)
    r = nnx.cond(True, f1, lambda m: None, m, graph_updates=False)
states with texts: A State takes texts from a pure dict, too.
    theirs: replace(\(\) takes| expected) at least 2 (positional )?arguments
    m = nnx.with_attributes(Box(a=nnx.Param(jnp.ones(2))), a='other')
    s = nnx.state(m)
    nnx.replace_by_pure_dict(s, s.to_pure_dict())
writes to references under vmap: JAX refuses to write to a reference that is broadcast; the reference drops the write.
    ours: performing a set/swap operation with vmapped value on an unbatched array ref
    m = Box(a=nnx.Param(jnp.ones(2), ref=True))
    def f1(m, x):\n    m.a[...] = jnp.zeros(2)
    r = nnx.vmap(f1, in_axes=(None, 0))(m, jnp.ones(2))
captures of Variables that are numbers: `capture` takes a module whose Variables were mapped to numbers.
    theirs: 'int' object does not support item assignment
    program: nnx\.capture\(
    m = Affine(jnp.ones(()), jnp.ones(()))
    n = jax.tree_util.tree_map_with_path(lambda path, x: len(path), m)
    r = nnx.capture(n, nnx.Perturbation, method_outputs=nnx.Intermediate)(jnp.ones(()))
constants in a carry: The next carry may be a constant; the reference takes one from a transform for an object.
    theirs: Carry references must be the same between iterations. Got arg=.*Typed
    MODEL
    def f1(c, m):\n    r = nnx.checkify(lambda x: (x, jnp.float32(0.5)), graph_updates=False)(c)\n    return r[1][1], c
    axes = nnx.StateAxes({nnx.Variable: 0, ...: nnx.Carry})
    r = nnx.scan(f1, in_axes=(nnx.Carry, axes))(0.0, m)
jvp of references: `jvp` differentiates the value in a reference.
    theirs: `get` must be called on `Ref` types
    v = nnx.Param(jnp.array(0.75), ref=True)
    t = jax.tree.map(jnp.ones_like, v)
    r = nnx.jvp(lambda v: v[...] * 2, (v,), (t,), graph=False, graph_updates=False)
marks in references: The reference leaves marks of its own bookkeeping in a Variable with `ref=True`.
    value: ; theirs: NoUpdate|\('some',\)$
    program: ref=True
    REFERENCE
    f1 = nnx.cached_partial(nnx.jit(lambda m, x: m.a * x), m)
    r = f1(jnp.ones(2))
references stay references: `update` writes into a reference; in the other library an array takes its place.
    value: \.4$ ; ours: True ; theirs: False
    REFERENCE
    s = jax.tree.map(jnp.zeros_like, nnx.state(m))
    nnx.update(m, s)
metadata of a body: Metadata set in a body reaches the caller's Variable; the reference drops it.
    value: \b3(\.[^.]+)?$
    program: set_metadata
    MODEL
    nnx.jit(lambda m: m.a.set_metadata(note=3))(m)
items of Lists: `pop` of a List takes out what the filter selects; the reference leaves it without all items.
    value: ; theirs: without its items
    program: nnx\.pop\(
    m = nnx.List([nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2)), True])
    r = nnx.pop(m, nnx.Param)
weak types of derivatives: A differentiated or mapped function keeps weak types of what it writes, and not of cotangents; `checkify` writes values as they are.
    value: \.3$ ; ours: ^bool ; theirs: ^bool
    program: grad|vjp|jvp|checkify|vmap
    m = Box(a=nnx.Param(jnp.ones(())), b=Count(jnp.full((), 0.5)))
    def f1(m):\n    m.a[...] = 0.25 * m.b\n    return m.a * 2.0
    r = nnx.grad(f1)(m)
values that pmap leaves alone: What a function under `pmap` only reads stays where it was; the reference spreads it over devices.
    value: \.4$ ; ours: None ; theirs: ^list
    program: pmap
    m = Box(a=nnx.Param(jnp.ones((2, 2))), b=nnx.Param(jnp.ones((2, 2))))
    r = nnx.pmap(lambda m: None)(m)
averages are raw: EMA makes, reads and writes raw values; callbacks belong to the model's own use of a Variable.
    value:
    program: (?s)(?=.*EMA).*(on_[a-z]+_value|ref=True)
    m = Box(a=nnx.Param(jnp.ones(2), on_set_value=doubled))
    e = nnx.EMA(m, 0.5)
    e.update(m)
averages in float32: EMA averages values of low precision, and integers, in float32, in which small steps are not lost.
    value: \.1$ ; ours: 'float32'
    program: EMA
    m = Box(a=nnx.Param(jnp.ones(2, jnp.bfloat16)))
    e = nnx.EMA(m, 0.5)
numbers that are only read: A number that a body only reads stays what it is; `remat` of the reference leaves another.
    value: ; ours: ^int: ; theirs: ^Typed|^tuple: \('array', 'int32', \(\)
    m = Box(a=nnx.Param(jnp.ones(2)), d=nnx.data(11))
    r = nnx.remat(lambda x, m: None)(1.0, m)
private parts of Lists: `iter_graph` shows the items of a List, and not what the other library keeps beside them.
    value: ; theirs: '_length'
    line: iter_graph
    m = Box(a=nnx.List([2.5]))
    r = [p for p, v in nnx.iter_graph(m) if '_pytree' not in str(p)]
objects in and beside a partial: An object that is cached by `jit_partial` and given again is one; the reference has two.
    value:
    program: jit_partial
    m = Box(a=jnp.ones(2))
    f1 = nnx.jit_partial(lambda m, n: (setattr(m, 'a', m.a * 2), n.a)[1], m, graph_updates=False)
    r = f1(m)
the order of attributes: A call leaves the attributes of its arguments in their order; after `jit` the reference has them sorted.
    value: ; ours: ^str ; theirs: ^str
    program: Rngs\(
    line: list\(
    k = nnx.Rngs(2, noise=1)
    nnx.jit(lambda k: None)(k)
    r = list(k)
writes of what a body removes: A Variable that a body writes and removes is written, as without the transform; the reference drops the write.
    value: \.5$
    program: \n +([\w, ]+ = nnx\.pop\(|del )
    m = Box(a=nnx.Param(jnp.ones(2)))
    v = m.a
    def f1(m):\n    s = nnx.pop(m, nnx.Param)\n    s['a'][...] = s['a'] * 2
    nnx.jit(f1)(m)
NumPy arrays are not edited: A write makes a new array; the reference writes into the one that it was given.
    value: \.5$ ; ours: : [][1., 0]+$
    program: \bnp\.ones
    a = np.ones(2, np.float32)
    m = Box(a=nnx.Param(a), b=nnx.Param(a))
    m.a[...] = jnp.zeros(2)
states of other paths: `merge` finds leaves by their paths; the reference counts them, and takes them in order.
    value: ; ours: 'raised' ; theirs: 'passed'
    program: fails\(.*nnx\.merge\(
    m = Box(a=nnx.Param(jnp.ones(2)))
    r = fails(lambda: nnx.merge(nnx.graphdef(m), nnx.state({'u': m}, nnx.Param)))[0]
tracers that stay: No object keeps a tracer after a call; the reference leaves one in a captured array.
    value: ; theirs: \('tracer',\)
    m = Box(b=jnp.ones(2))
    n = nnx.clone(m, arrays=True)
    def f1(a):\n    r = nnx.jit(lambda x, y: None, graph=True)(m, a)
    nnx.jit(f1, donate_argnums=0)(n)
what is shared in a loop over trees: With graph=False objects without Variables may be shared, and leave a loop as they came in.
    value: ; ours: ^tuple: \('same' ; theirs: ^tuple: \('Object'
    program: graph=False
    m = Box(a=Box(d=3))
    r = nnx.fori_loop(0, 2, lambda i, c: c, (m, m.a), graph=False)
classes of refusals: Both refuse, with classes of their own: metadata of a carry, arguments that are no arrays, and scalars that are scanned.
    ours: have the same .* changes metadata|cannot interpret argument|has shape \(\) and no axis \d+ to scan over
    theirs: pytree node metadata does not match|is not a valid JAX type|tuple index out of range
    m = Box(a=nnx.Param(jnp.ones(2)))
    def f1(c):\n    c[1].a.set_metadata(note=3)\n    return c[0] + 1, c[1]
    r = nnx.while_loop(lambda c: c[0] < 3, f1, (jnp.array(0), m), graph=False)
"""
for _block in re.split(r"\n(?=\S)", TABLE.strip()):
    _row(_block)

if jax.__version_info__ >= (0, 11):  # before, the reference refuses as well
    _row(
        r"""references among arrays on several devices: A reference that a branch writes is written, and JAX wants it where the other arrays are; the reference drops the write.
        ours: Received incompatible devices for jitted computation
        program: ref=True
        w = jax.device_put(jnp.ones((4, 2)), NamedSharding(mesh_of(2, 4), P('d')))
        m = Box(a=nnx.Param(w), b=Count(jnp.ones(()), ref=True))
        def f1(m):\n    m.b[...] = m.b + 1\n    m.a[...] = m.a * 2
        r = nnx.cond(True, f1, lambda m: None, m)"""
    )


@rule(
    "writes of references",
    "A Variable with `ref=True` that a body writes is written, however it was passed; the reference "
    "drops the write in `grad` and in mapped transforms.",
    "m = Box(a=nnx.Param(jnp.ones(2)), b=Count(jnp.ones(()), ref=True))",
    "def f1(m):\n    m.b[...] = m.b * 2\n    return m.a.sum()",
    "r = nnx.grad(f1)(m)",
)
def _(d: Difference) -> bool:
    variable = next(
        (v for i in range(1, len(d.where)) if _is_reference(v := at(d.before, d.where[:-i]))), None
    )
    return (
        d.kind == "value"
        and variable is not None
        and difference(at(d.before, d.where), at(d.step.names, d.where)) is None
    )


@rule(
    "failed calls leave objects alone",
    "A call that raises leaves every object as it was; the reference may leave one without attributes.",
    "m = Box(a=nnx.Param(jnp.ones(2)))",
    "def f1(v):\n    nnx.jit(lambda a: None)(m)\n    return {}['missing']",
    "r = fails(lambda: nnx.remat(f1)(m.a))[0]",
)
def _(d: Difference) -> bool:
    return (
        d.kind == "value"
        and "fails(" in d.text
        and bool(d.where)
        and difference(at(d.before, d.where), at(d.mine.names, d.where)) is None
    )


@rule(
    "captured objects are looked at",
    "A function that captures an object is traced again, as the object may have changed; the "
    "reference goes on with what it saw first.",
    "m = Box(a=nnx.Param(jnp.ones(2)))",
    "@nnx.remat\ndef f1(x):\n    TICKS.append('f1')\n    n = nnx.clone(m)\n    return n.a * x",
    "r = f1(2.0)",
    "q = f1(2.0)",
)
def _(d: Difference) -> bool:
    if d.kind != "traces":
        return False
    functions = "\n".join(t for t in d.program if "def f" in t)
    mine = set(
        re.findall(r"\b[a-z]\d*\b(?= =)", "\n".join(t for t in d.program if "def f" not in t))
    )
    return bool(mine & set(re.findall(r"\b[a-z]\d*\b", functions.replace("TICKS", ""))))


@rule(
    "pop of what is shared",
    "`pop` takes a shared Variable away from every place; the reference leaves the others.",
    "v = nnx.Param(jnp.ones(2))",
    "m = Box(a=v, b=v)",
    "r = nnx.pop(m, nnx.Param)",
)
def _(d: Difference) -> bool:
    lists = isinstance(d.theirs, list) and isinstance(d.ours, list)
    more = lists and len(d.ours) < len(d.theirs) and all(x in d.theirs for x in d.ours)
    return d.kind == "value" and more and _mentions(d, r"nnx\.pop\(")


@rule(
    "loops trace in each call",
    "`cond`, `switch`, `scan`, loops and `remat` outside `jit` trace their functions in each call, so that "
    "they see what has changed; nothing is compiled again.",
    "f1 = nnx.scan(lambda c, x: (TICKS.append('f1'), (c + x, c))[1], in_axes=(nnx.Carry, 0))",
    "r = f1(0.0, jnp.ones(2))",
    "r2 = f1(0.0, jnp.ones(2))",
)
def _(d: Difference) -> bool:
    name = re.match(r"(?:\w+ = )?(\w+)\(", d.text)
    jitted = name and _mentions(
        d, rf"@nnx\.\w*jit[^\n]*\ndef {name[1]}\(|\b{name[1]} = nnx\.\w*(jit|partial)\("
    )
    loops = r"nnx\.(cond|switch|scan|remat|\w+_loop)\b"
    return d.kind == "traces" and not jitted and _mentions(d, loops)


@rule(
    "settings as they are now",
    "A function sees an object's settings and metadata as they are, edited in place or not; the reference "
    "goes on with those that it saw first.",
    "m1 = Box(a=nnx.Param(jnp.ones(2)), note=Settings(1.0))",
    "f1 = nnx.remat(lambda m: m.a * m.note.gain)",
    "r = [f1(m1)]",
    "m1.note.gain = 3.0",
    "r2 = [f1(m1)]",
)
def _(d: Difference) -> bool:
    models = re.findall(r"f\d+\((m\d+)\)", d.text)
    if (
        d.kind != "value"
        or d.where[1:2] != (1,)
        or d.where[2:3] not in [(i,) for i in range(len(models))]
    ):
        return False
    parts = at(d.mine.names, (models[d.where[2]], 2))
    note = at(parts, ("note",)) or at(parts, ("a", 3, "note"))
    gain = note[1] if isinstance(note, tuple) else None
    gain = gain[0] if isinstance(gain, list) else gain.get(0) if isinstance(gain, dict) else gain
    return d.ours == [gain, gain]


@rule(
    "settings of another model",
    "An object keeps its own settings; the reference may give it those of an equal object.",
    "m1 = Box(a=nnx.Param(jnp.ones(2)), note=Sizes(1.0))",
    "m2 = Box(a=nnx.Param(jnp.ones(2)), note=Sizes(1.0))",
    "f1 = nnx.jit(lambda m: m.a * m.note.gain)",
    "r = [f1(m1), f1(m2)]",
    "m2.note.gain = 3.0",
)
def _(d: Difference) -> bool:
    edited = re.match(r"(m\d+)(\.a)?\.note(\.gain|\[0\]) = (\S+)", d.text)
    if not edited or d.kind != "value" or d.where[0] == edited[1]:
        return False
    return d.theirs == float(edited[4]) and at(d.before, d.where) == d.ours == 1.0
