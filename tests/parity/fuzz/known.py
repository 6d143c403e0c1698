"""The differences that random programs meet and that stay on purpose, each as narrow as it can be told.

Every rule has an example, a program that differs by it: `docs/differences.md` says the same in words.
A rule of the table has its name and reason, then what it is recognised by, then its example:

- `ours`, `theirs`: patterns of both sides. They are those of messages, where one library refuses or both
  do with different classes, or of values where there is a line `value`, the pattern of the place;
- `program`, `line`: what the whole program has, and the statement that differs;
- `test`: a function below.
"""

import dataclasses
import re
import typing as tp

from tests.parity.fuzz.observe import at, difference
from tests.parity.fuzz.run import Difference


@dataclasses.dataclass
class Rule:
    """A deliberate difference: its name and reason, a program, and how it is recognised."""

    name: str
    example: list[str]
    matches: tp.Callable[[Difference], bool]


def explain(found):
    return next((rule.name for rule in RULES if rule.matches(found)), None)


def shown(x):
    return f"{type(x).__name__}: {x if isinstance(x, BaseException) else repr(x)}"


TABLE = r"""
captured objects are handed on: Every transform takes what is bound: an object from outside may be an argument inside.
    theirs: ^TraceContextError: Cannot mutate|^ValueError: Cannot extract graph node from different trace|^TraceContextError: Trying to extract graph node|^UnexpectedTracerError
    example: MODEL ; f1 = nnx.scan(lambda c, v, x: (c + v.sum(), x), in_axes=(nnx.Carry, None, 0), graph_updates=False) ; r = nnx.jit(lambda x: f1(x, m.a, jnp.ones(2)))(0.0)
prefixes in every mode: Settings work in every mode.
    theirs: TreeState|NodeStates|Graph nodes are not allowed as prefixes|cannot contain `State(Axes|Sharding)`
    example: MODEL ; r = nnx.vmap(lambda m: m.a * 2, in_axes=(nnx.prefix(m, {...: 0}, graph=True),), graph=False)(m)
annotations without a mesh: Sharding annotations need no mesh, and one mesh may follow another.
    theirs: does not match the mesh shape of the target sharding|An auto mesh context or metadata is required|^ValueError: Resource axis: .* is not found in mesh
    example: m = Box(a=nnx.Param(jnp.ones((8, 4)), sharding=('d', None)))
with_rngs in every mode: Settings work in every mode.
    theirs: graph_updates=True is not supported for `with_rngs`
    example: r = nnx.with_rngs(nnx.Rngs(0), split=2)
other names in a carry: A carried object may get another name for a Variable; the reference refuses one that sorts first.
    theirs: ^TypeError: scan body function carry input and carry output must have the same pytree structure
    program: scan\(
    example: MODEL ; r = nnx.scan(lambda m, x: (setattr(m, 'a0', m.b), (m, x))[1])(m, jnp.ones(2))
objects on several devices: What a jitted function does not use may be on any devices.
    theirs: ^ValueError: Received incompatible devices for jitted computation. Got argument
    example: with jax.set_mesh(mesh_of(2, 2)):\n    w = Box(a=nnx.Param(jnp.ones((8, 4)), sharding=('d', None))) ; x = jax.device_put(jnp.ones(2), jax.devices()[0]) ; r = nnx.jit(lambda w, x: x * 0.5)(w, x)
the same prefix twice: What a filter leaves out and what is no argument to differentiate are both constants.
    theirs: Inconsistent aliasing.*: (False.*: None|None.*: False)
    program: grad
    example: MODEL ; r = nnx.grad(lambda m, b: (m.a * b).sum(), argnums=0)(m, m.b)
eval_shape of objects given twice: Without graph updates an object may be given twice everywhere; the reference refuses it here.
    theirs: ^ValueError: Duplicate
    program: eval_shape
    example: MODEL ; u = nnx.eval_shape(lambda m, v: m.a * v, m, m.a, graph_updates=False)
recursive_map of a cycle: A cycle is walked like any other graph.
    theirs: Found cycle in the graph
    program: recursive_map|view|with_attributes
    example: MODEL ; m.c = m ; r = nnx.recursive_map(lambda path, x: x, m)
writes that would be lost: A write to what is broadcast to `scan` raises; the reference drops it.
    ours: which is broadcast .axis None.: the writes of the iterations would be lost
    example: MODEL ; def f1(c, m, x):\n    m.b[...] = m.b + x\n    return c, x ; r = nnx.scan(f1, in_axes=(nnx.Carry, None, 0))(0.0, m, jnp.ones(2))
objects twice with graph=False: graph=False refuses every object that is found twice; the reference looks at Variables only, and not in loops.
    ours: Duplicate .* with graph=False does not support Variable aliasing: objects must form a tree|Duplicate .* Tree mode .graph=False. does not support shared references
    program: graph=False|set_graph_mode\(False
    example: m = Box(a=jnp.ones(2)) ; r = nnx.jit(lambda a, b: a.a + b.a, graph=False)(m, m)
a shared array with two axes: A prefix that contradicts itself raises; the reference looks at Variables only.
    ours: Inconsistent aliasing detected: different ((in|out)_axes|differentiation) for a shared array
    example: m = Box(a=jnp.ones(2), b=nnx.Param(jnp.ones(2))) ; axes = nnx.StateAxes({nnx.Variable: 0, ...: None}) ; r = nnx.vmap(lambda m, n: m.b * 2, in_axes=(0, axes))(m, m)
writes to captured objects through a transform: An object from outside cannot be written inside a transform; the reference lets an inner transform do it, and may leave a tracer there.
    ours: TraceContextError: Cannot mutate .* from different trace level
    program: \n +f\d+ = nnx\.
    example: m = Box(a=jnp.ones(2)) ; def f1(x):\n    f2 = nnx.remat(lambda m: setattr(m, 'c', Count(jnp.ones(()))))\n    f2(m) ; r = nnx.vmap(f1)(jnp.ones(2))
an object of a loop in its results: The same, where the object came in as a sequence.
    theirs: nnx.scan with graph_updates=False does not support Variable aliasing
    program: nnx\.scan
    example: MODEL ; f1 = nnx.scan(lambda c, x: (c, [x]), graph=False) ; r = f1(0.0, m.a)
annotated axes of another number: `update` refuses a value whose axes the annotation does not fit.
    ours: update: the value at .* its axes are annotated as
    example: with jax.set_mesh(mesh_of(2, 4)):\n    w = Box(a=nnx.Param(jnp.ones((8, 4)), sharding=('d', 'e'))) ; nnx.update(w, jax.tree.map(lambda x: jnp.stack([x, x]), nnx.state(w)))
objects in auxiliary outputs: A differentiated function may return a new object beside its value in every mode.
    theirs: GraphDef index 0 already used
    example: MODEL ; f1 = nnx.value_and_grad(lambda v: (v.sum(), Box(a=1)), has_aux=True, graph_updates=False) ; r = f1(m.a)
pop from plain lists: `pop` takes Variables out of plain lists, too.
    theirs: Cannot pop key .* from node of type list
    example: m = Box(a=nnx.data([jnp.ones(2), nnx.Param(jnp.ones(2))])) ; s = nnx.pop(m, nnx.Param)
metadata of a bare Variable: `set_metadata` takes a Variable as a root, like every function on graphs.
    theirs: IndexError: tuple index out of range
    program: nnx\.set_metadata\(
    example: v = nnx.Param(jnp.ones(2)) ; nnx.set_metadata(v, note=9)
entries of a State in a branch: What a branch puts into a State stays inside it, as under `jit` in both; the reference raises.
    theirs: branch outputs must have the same pytree structure
    program: replace_by_pure_dict
    example: MODEL ; s = jax.tree.map(lambda x: x + 1, nnx.state(m)) ; def f1(s):\n    s.replace_by_pure_dict(s.to_pure_dict()) ; r = nnx.cond(True, f1, lambda s: None, s)
loops that remove attributes: A loop that changes the structure of its carry is refused with the reason; the reference fails inside.
    theirs: 'NodeRef' object has no attribute 'outer_index'|^ValueError: Incorrect number of leaves, expected
    example: m = Box(a=nnx.Param(jnp.ones(2)), c=Count(jnp.ones(2))) ; m.u = m.c ; def f1(i, c):\n    nnx.pop(c[0], nnx.Param)\n    return c ; r = nnx.fori_loop(0, 2, f1, (m, jnp.ones(2)))
items inserted before static ones: `List.insert` moves items with their kind; the reference keeps the kind of each position.
    theirs: Cannot assign data value of type .* to static attribute
    program: \.insert\(
    example: m = Box(a=nnx.List([(1, 2), nnx.Param(jnp.ones(2))])) ; m.a.insert(0, nnx.Param(jnp.ones(2)))
shared Variables that were popped: `pop` takes a shared Variable away from every place; the reference leaves the others.
    ours: ^AttributeError: '\w+' object has no attribute
    program: nnx\.pop\(
    example: m = Box(a=nnx.Param(jnp.ones(2))) ; def f1(m):\n    m.u = m.a\n    nnx.pop(m, nnx.Param)\n    return m.u.sum() ; r = nnx.eval_shape(f1, m)
items of Lists: `pop` of a List takes out what the filter selects; the reference leaves it without all items.
    value: ; theirs: without its items
    program: nnx\.pop\(
    example: m = nnx.List([nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2)), True]) ; r = nnx.pop(m, nnx.Param)
weak types of derivatives: A differentiated or mapped function keeps weak types of what it writes, and not of cotangents; `checkify` writes values as they are.
    value: \.3$ ; ours: ^bool ; theirs: ^bool
    program: grad|vjp|jvp|checkify|vmap
    example: m = Box(a=nnx.Param(jnp.ones(())), b=Count(jnp.full((), 0.5))) ; def f1(m):\n    m.a[...] = 0.25 * m.b\n    return m.a * 2.0 ; r = nnx.grad(f1)(m)
private parts of Lists: `iter_graph` shows the items of a List, and not what the other library keeps beside them.
    value: ; theirs: '_length'
    line: iter_graph
    example: m = Box(a=nnx.List([2.5])) ; r = [p for p, v in nnx.iter_graph(m) if '_pytree' not in str(p)]
the order of attributes: A call leaves the attributes of its arguments in their order; after `jit` the reference has them sorted.
    value: ; ours: ^str ; theirs: ^str
    program: Rngs\(
    line: list\(
    example: k = nnx.Rngs(2, noise=1) ; nnx.jit(lambda k: None)(k) ; r = list(k)
writes of what a body removes: A Variable that a body writes and removes is written, as without the transform; the reference drops the write.
    value: \.5$
    program: \n +([\w, ]+ = nnx\.pop\(|del )
    example: m = Box(a=nnx.Param(jnp.ones(2))) ; v = m.a ; def f1(m):\n    s = nnx.pop(m, nnx.Param)\n    s['a'][...] = s['a'] * 2 ; nnx.jit(f1)(m)
states of other paths: `merge` finds leaves by their paths; the reference counts them, and takes them in order.
    value: ; ours: 'raised' ; theirs: 'passed'
    program: fails\(.*nnx\.merge\(
    example: m = Box(a=nnx.Param(jnp.ones(2))) ; r = fails(lambda: nnx.merge(nnx.graphdef(m), nnx.state({'u': m}, nnx.Param)))[0]
what is shared in a loop over trees: With graph=False objects without Variables may be shared, and leave a loop as they came in.
    value: ; ours: ^tuple: \('same' ; theirs: ^tuple: \('Object'
    program: graph=False
    example: m = Box(a=Box(d=3)) ; r = nnx.fori_loop(0, 2, lambda i, c: c, (m, m.a), graph=False)
classes of refusals: Both refuse, with classes of their own: metadata of a carry, arguments that are no arrays, and scalars that are scanned.
    ours: have the same .* changes metadata|cannot interpret argument|has shape \(\) and no axis \d+ to scan over
    theirs: pytree node metadata does not match|is not a valid JAX type|tuple index out of range
    example: m = Box(a=nnx.Param(jnp.ones(2))) ; def f1(c):\n    c[1].a.set_metadata(note=3)\n    return c[0] + 1, c[1] ; r = nnx.while_loop(lambda c: c[0] < 3, f1, (jnp.array(0), m), graph=False)
failed calls leave objects alone: A call that raises leaves every object as it was.
    test: of_failed_calls
    example: m = Box(a=nnx.Param(jnp.ones(2))) ; def f1(v):\n    nnx.jit(lambda a: None)(m)\n    return {}['missing'] ; r = fails(lambda: nnx.remat(f1)(m.a))[0]
captured objects are looked at: A function is traced again, as what it captures may have changed.
    test: of_captures
    example: m = Box(a=nnx.Param(jnp.ones(2))) ; @nnx.remat\ndef f1(x):\n    TICKS.append('f1')\n    n = nnx.clone(m)\n    return n.a * x ; r = f1(2.0) ; q = f1(2.0)
pop of what is shared: `pop` takes a shared Variable away from every place.
    test: of_popped
    example: v = nnx.Param(jnp.ones(2)) ; m = Box(a=v, b=v) ; r = nnx.pop(m, nnx.Param)
loops trace in each call: They see what has changed; nothing is compiled again.
    test: of_loops
    example: f1 = nnx.scan(lambda c, x: (TICKS.append('f1'), (c + x, c))[1], in_axes=(nnx.Carry, 0)) ; r = f1(0.0, jnp.ones(2)) ; r2 = f1(0.0, jnp.ones(2))
"""
MODEL = "m = Box(a=nnx.Param(jnp.ones(2)), b=Count(jnp.zeros(2)))"
KINDS = {"ours": ["raises"], "theirs": ["passes", "class"], "ours theirs": ["class"]}


def rule_of(block):
    head, *lines = block.splitlines()
    facts = [part for line in lines for part in re.split(r" ; (?=ours:|theirs:)", line.strip())]
    given = {key: text.strip() for key, _, text in (fact.partition(":") for fact in facts)}
    example = given.pop("example").replace("MODEL", MODEL).replace(r"\n", "\n").split(" ; ")
    if "test" in given:
        return Rule(head, example, globals()[given["test"]])
    sides = " ".join(side for side in ("ours", "theirs") if side in given)
    kinds = ["value"] if "value" in given else KINDS[sides]

    def matches(d):
        seen = {"ours": shown(d.ours), "theirs": shown(d.theirs), "line": d.text}
        seen |= {"value": ".".join(map(str, d.where)), "program": "\n".join(d.program)}
        return d.kind in kinds and all(re.search(p, seen[k], re.DOTALL) for k, p in given.items())

    return Rule(head, example, matches)


def of_failed_calls(d):
    """Whether this library left alone what differs."""
    before, after = at(d.before, d.where), at(d.mine.names, d.where)
    stays = bool(d.where) and difference(before, after) is None
    return d.kind == "value" and "fails(" in d.text and stays


def of_popped(d):
    lists = isinstance(d.theirs, list) and isinstance(d.ours, list)
    fewer = lists and len(d.ours) < len(d.theirs) and all(x in d.theirs for x in d.ours)
    return d.kind == "value" and fewer and "nnx.pop(" in "".join(d.program)


def of_captures(d):
    """Whether a function of the program names what another statement made."""
    functions = [text for text in d.program if "def f" in text]
    others = "\n".join(text for text in d.program if text not in functions)
    made = re.findall(r"\b([a-z]\d*)\b = ", others)
    read = re.findall(r"\b[a-z]\d*\b", "\n".join(functions))
    return d.kind == "traces" and not {*made}.isdisjoint(read)


def of_loops(d):
    """Whether what is traced again is no jitted function, but a loop or branch."""
    program, call = "\n".join(d.program), re.match(r"(?:\w+ = )?(\w+)\(", d.text)
    made = r"@nnx\.\w*jit[^\n]*\ndef {0}\(|\b{0} = nnx\.\w*(jit|partial)\("
    jitted = call and re.search(made.format(call[1]), program)
    loops = re.search(r"nnx\.(cond|switch|scan|remat|\w+_loop)\b", program)
    return d.kind == "traces" and not jitted and loops is not None


RULES = [rule_of(block) for block in re.split(r"\n(?=\S)", TABLE.strip())]
