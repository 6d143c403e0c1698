"""Statements about objects, Variables, States and the functions on graphs."""

from __future__ import annotations

import dataclasses
import typing as tp

import jax
import numpy as np

from tests.parity.fuzz.scope import ATTRIBUTES, KINDS, SHAPES, Scope

Maker = tp.Callable[[Scope], "list[str] | str | None"]


@dataclasses.dataclass
class Kind:
    """A kind of statement: how it is made, how often, and where it may stand."""

    name: str
    make: Maker
    weight: float
    body: bool  # may stand in the body of a function
    structural: bool  # changes the structure of an argument


STATEMENTS: list[Kind] = []


def statement(weight: float = 1.0, body: bool = False, structural: bool = False) -> tp.Any:
    """Register a kind of statement."""

    def add(make: Maker) -> Maker:
        STATEMENTS.append(Kind(make.__name__, make, weight, body, structural))
        return make

    return add


# Models ---------------------------------------------------------------------------------------------


def variable(s: Scope, shape: tuple[int, ...] | None = None) -> str:
    """The text of a new Variable."""
    kind = s.one(KINDS)
    value = s.literal(shape)
    options = []
    if s.chance(0.12):
        options.append(s.one(["tag='t'", "tag='u'", "note=1", "note=(1, 2)"]))
    if s.chance(0.05):
        options.append(
            s.one(["on_set_value=doubled", "on_get_value=doubled", "on_create_value=doubled"])
        )
    if s.chance(0.05) and shape is None:
        value = s.one(["np.ones(2, np.float32)", "np.float32(2.0)"])
    elif s.chance(0.05):
        options.append("ref=True")
    return f"{kind}({', '.join([value, *options])})"


def part(s: Scope, depth: int) -> str:
    """The text of what an attribute may be."""
    r = s.rng.random()
    if depth > 0 and r < 0.3:
        return module(s, depth - 1)
    if depth > 0 and r < 0.42:
        items = [part(s, depth - 1) for _ in range(s.rng.randint(1, 3))]
        form = s.rng.randrange(5)
        if form == 0:
            return f"nnx.List([{', '.join(items)}])"
        if form == 1:
            return "nnx.Dict(" + ", ".join(f"{k}={v}" for k, v in zip("pqr", items)) + ")"
        if form == 2:
            return f"nnx.data([{', '.join(items)}])"
        if form == 3:
            return "nnx.data({" + ", ".join(f"{k!r}: {v}" for k, v in zip("pqr", items)) + "})"
        return f"nnx.data(({', '.join(items)},))"
    if r < 0.75:
        return variable(s)
    if r < 0.88:
        return s.literal()
    return s.one(
        ["3", "'text'", "(1, 2)", "None", "2.5", "True", "jnp.tanh", "nnx.static((1, 'x'))"]
    )


def module(s: Scope, depth: int) -> str:
    """The text of a new graph node."""
    r = s.rng.random()
    if r < 0.14:
        shape = s.one([(), (2,), (2, 2)])
        return f"Affine({s.literal(shape)}, {s.literal(shape)})"
    if r < 0.19:
        return f"Noisy(nnx.Rngs({s.rng.randint(0, 3)}, noise=1))"
    if r < 0.24:
        return f"Recorder({s.literal((2,))})"
    if r < 0.28:
        return f"nnx.Linear(2, {s.rng.randint(2, 3)}, rngs=nnx.Rngs({s.rng.randint(0, 3)}))"
    if r < 0.31:
        return f"Net(nnx.Rngs({s.rng.randint(0, 3)}))"
    names = s.some(ATTRIBUTES, 1, 4)
    parts = [f"{n}={part(s, depth)}" for n in names]
    return f"{s.one(['Box', 'Box', 'Box', 'Plain'])}({', '.join(parts)})"


@statement(2.0)
def new_model(s: Scope) -> str | None:
    if len(s.models()) >= 4:
        return None
    return f"{s.fresh('m')} = {module(s, s.rng.randint(0, 2))}"


@statement(1.0)
def new_ensemble(s: Scope) -> str | None:
    """A model of which every leaf has two slices."""
    if len(s.models()) >= 4:
        return None
    names = s.some(ATTRIBUTES, 1, 3)
    shapes = [(2,), (2, 2), (2, 3)]
    parts = [f"{n}={variable(s, s.one(shapes))}" for n in names]
    inner = f"z=Box(w=nnx.Param({s.literal((2, 2))}))"
    return f"{s.fresh('m')} = Box({', '.join([*parts, inner] if s.chance(0.5) else parts)})"


@statement(0.4)
def new_root(s: Scope) -> str | None:
    """A bare Variable, or a container of some."""
    if s.chance(0.6):
        return f"{s.fresh('v')} = {variable(s)}"
    return f"{s.fresh('v')} = [{variable(s)}, {{'k': {variable(s)}}}]"


@statement(0.8)
def new_array(s: Scope) -> str:
    return f"{s.fresh('x')} = {s.literal()}"


@statement(1.2, body=True, structural=True)
def add_attribute(s: Scope) -> str | None:
    boxes = [p for p in s.places() if s.is_object(p.value) and id(p.value) not in s.frozen]
    boxes = [p for p in boxes if type(p.value).__name__ in ("Box", "Plain")]
    if not boxes:
        return None
    box = s.one(boxes)
    name = s.one(ATTRIBUTES + "nop")
    if s.depth:
        value = s.one(
            [f"nnx.Param({s.array(s.one(SHAPES))})", f"Count({s.scalar()})", "7", "'new'"]
        )
    else:
        value = part(s, 1)
    return f"{box.text}.{name} = {value}"


@statement(1.0, body=True, structural=True)
def share(s: Scope) -> str | None:
    """A second reference to what is there: sharing, and cycles."""
    objects = [p for p in s.places() if s.is_object(p.value) and id(p.value) not in s.frozen]
    boxes = [p for p in objects if type(p.value).__name__ in ("Box", "Plain")]
    leaves = [p for p in s.places() if isinstance(p.value, s.lib.Variable)]
    leaves = [p for p in leaves if id(p.value) not in s.frozen]
    if not boxes or not (leaves or objects):
        return None
    target = s.one(leaves if leaves and s.chance(0.85) else objects)
    return f"{s.one(boxes).text}.{s.one('stu')} = {target.text}"


@statement(0.5, body=True, structural=True)
def remove_attribute(s: Scope) -> str | None:
    boxes = [p for p in s.places() if type(p.value).__name__ in ("Box", "Plain")]
    boxes = [p for p in boxes if id(p.value) not in s.frozen and len(s.children(p.value)) > 1]
    if not boxes:
        return None
    box = s.one(boxes)
    return f"del {box.text}.{s.one([k for _, k, _ in s.children(box.value)])}"


@statement(0.4, body=True, structural=True)
def exchange_attributes(s: Scope) -> str | None:
    boxes = [p for p in s.places() if type(p.value).__name__ in ("Box", "Plain")]
    found = []
    for box in boxes:
        names = [
            k for _, k, v in s.children(box.value) if isinstance(v, (s.lib.Variable, s.lib.Pytree))
        ]
        if len(names) > 1 and id(box.value) not in s.frozen:
            found.append((box.text, *s.some(names, 2, 2)))
    if not found:
        return None
    t, a, b = s.one(found)
    return f"{t}.{a}, {t}.{b} = {t}.{b}, {t}.{a}"


@statement(0.5, body=True, structural=True)
def edit_container(s: Scope) -> str | None:
    lists = [
        p for p in s.places() if isinstance(p.value, s.lib.List) and id(p.value) not in s.frozen
    ]
    dicts = [
        p for p in s.places() if type(p.value).__name__ == "Dict" and id(p.value) not in s.frozen
    ]
    new = f"nnx.Param({s.array(s.one(SHAPES))})"
    if lists and s.chance(0.7):
        t = s.one(lists).text
        return s.one(
            [f"{t}.append({new})", f"{t}.insert(0, {new})", f"{t}.pop()", f"{t}[0] = {new}"]
        )
    if dicts:
        return f"{s.one(dicts).text}['z'] = {new}"
    return None


@statement(3.0, body=True)
def write_variable(s: Scope) -> str | None:
    """A new value of the same shape and dtype."""
    leaves = [p for p in s.places() if isinstance(p.value, s.lib.Variable)]
    leaves = [p for p in leaves if id(p.value) not in s.frozen]
    abstract = jax.ShapeDtypeStruct
    leaves = [p for p in leaves if hasattr(p.value.get_raw_value(), "dtype")]
    leaves = [p for p in leaves if not isinstance(p.value.get_raw_value(), abstract)]
    leaves = [p for p in leaves if "key" not in str(p.value.get_raw_value().dtype)]
    if not leaves:
        return None
    place = s.one(leaves)
    raw = place.value.get_raw_value()
    value = s.array(tuple(raw.shape), str(raw.dtype))
    if not s.values_only and s.chance(0.06):
        value = s.array(s.one(SHAPES))
    t = place.text
    forms = [
        f"{t}[...] = {value}",
        f"{t}[...] = {value}",
        f"{t}.value = {value}",
        f"{t}.set_value({value})",
    ]
    return s.one(forms)


@statement(0.6, body=True)
def write_array(s: Scope) -> str | None:
    """An array attribute is rebound."""
    places = [p for p in s.places() if type(p.holder).__name__ in ("Box", "Plain")]
    places = [
        p
        for p in places
        if isinstance(p.value, (jax.Array, np.ndarray)) and not isinstance(p.value, s.lib.Variable)
    ]
    places = [p for p in places if id(p.holder) not in s.frozen and "key" not in str(p.value.dtype)]
    if not places:
        return None
    place = s.one(places)
    value = s.array(tuple(place.value.shape), str(place.value.dtype))
    # An array that is a tracer counts as static in the reference, with recent versions of JAX.
    return f"{place.text} = nnx.data({value})" if s.depth else f"{place.text} = {value}"


@statement(0.8, body=True)
def local(s: Scope) -> str:
    """A value under a name."""
    return f"{s.fresh('x')} = {s.array(s.one(SHAPES)) if s.chance(0.7) else s.scalar()}"


@statement(0.8, body=True)
def call_module(s: Scope) -> str | None:
    """A module is called, or one of its methods."""
    known = ("Affine", "Noisy", "Recorder", "Linear", "Net")
    modules = [
        p for p in s.places() if type(p.value).__name__ in known and id(p.value) not in s.frozen
    ]
    if s.values_only:
        modules = [p for p in modules if type(p.value).__name__ != "Recorder"]
    if not modules:
        return None
    place = s.one(modules)
    shape = (2, 2) if type(place.value).__name__ == "Net" else (2,)
    return f"{s.fresh('y')} = {place.text}({s.array(shape)})"


@statement(0.5, body=True)
def metadata(s: Scope) -> str | None:
    leaves = [
        p for p in s.places() if isinstance(p.value, s.lib.Variable) and id(p.value) not in s.frozen
    ]
    if not leaves or (s.depth and s.values_only):
        return None
    t = s.one(leaves).text
    forms = [f"{t}.set_metadata(note={s.rng.randint(0, 3)})", f"{t}.set_metadata('tag', 'u')"]
    if not s.depth:
        node = s.node()
        forms += [
            f"nnx.set_metadata({node}, note=9)",
            f"nnx.set_metadata({node}, only={kind_filter(s)}, tag='v')",
        ]
    return s.one(forms)


# Filters ---------------------------------------------------------------------------------------------


def kind_filter(s: Scope) -> str:
    """A type of Variable."""
    return s.one(
        [
            "nnx.Param",
            "nnx.Param",
            "nnx.BatchStat",
            "Count",
            "Scale",
            "nnx.Variable",
            "nnx.RngState",
        ]
    )


def some_filter(s: Scope, depth: int = 2) -> str:
    """The text of a filter of any form."""
    r = s.rng.random()
    if r < 0.42 or (depth == 0 and r < 0.7):
        return kind_filter(s)
    if depth > 0 and r < 0.68:
        a, b = some_filter(s, depth - 1), some_filter(s, depth - 1)
        return s.one(
            [
                f"nnx.Not({a})",
                f"nnx.Any({a}, {b})",
                f"nnx.All({a}, {b})",
                f"({a}, {b})",
                f"[{a}, {b}]",
            ]
        )
    return s.one(
        [
            f"nnx.PathContains({s.one(ATTRIBUTES)!r})",
            "nnx.PathContains('a', exact=False)",
            f"nnx.OfType({kind_filter(s)})",
            "nnx.WithTag('t')",
            "'t'",
            "...",
            "True",
            "False",
            "None",
            "nnx.Everything()",
            "nnx.Nothing()",
            f"lambda path, x: {s.one(ATTRIBUTES)!r} in path",
            "lambda path, x: len(path) > 1",
            f"lambda path, x: isinstance(x, {kind_filter(s)})",
        ]
    )


def filters(s: Scope, low: int = 0, high: int = 2) -> list[str]:
    """Filters that together match everything, mostly."""
    found = [some_filter(s) for _ in range(s.rng.randint(low, high))]
    if found and s.chance(0.93):
        found = [f for f in found if f not in ("...", "True", "nnx.Everything()")] + ["..."]
    return found


def mode(s: Scope, p: float = 0.25) -> str:
    """The keyword `graph=`."""
    if not s.chance(p):
        return ""
    return f", graph={s.one(['True', 'True', 'None', 'False'])}"


# Split, merge and their kin ------------------------------------------------------------------------------


@statement(2.0, body=True)
def split(s: Scope) -> list[str] | None:
    node = s.node()
    if node is None:
        return None
    g = s.fresh("g")
    found = filters(s)
    count = len(found) or 1
    names = [s.fresh("s") for _ in range(count)]
    call = f"nnx.split({', '.join([node, *found])}{mode(s)})"
    lines = [f"{g}, {', '.join(names)} = {call}"]
    if s.chance(0.7):
        order = names if s.chance(0.7) else s.some(names, count, count)
        options = s.one(["", "", "", ", copy=True", ", recreate_variables=False"])
        lines.append(f"{s.fresh('m')} = nnx.merge({', '.join([g, *order])}{options})")
    elif s.chance(0.5) and not node.startswith(("[", "(", "{")):
        lines.append(f"nnx.update({node}, {', '.join(names)})")
    return lines


@statement(1.5, body=True)
def take_state(s: Scope) -> list[str] | None:
    node = s.node(variables=0)
    if node is None:
        return None
    found = filters(s) if s.chance(0.5) else []
    names = [s.fresh("s") for _ in range(len(found) or 1)]
    function = s.one(["nnx.state", "nnx.state", "nnx.state", "nnx.variables"])
    lines = [f"{', '.join(names)} = {function}({', '.join([node, *found])}{mode(s)})"]
    if not s.depth and s.chance(0.6):
        state = s.one(names)
        scale = s.one(["lambda x: x * 2", "jnp.zeros_like", "lambda x: x", "jnp.ones_like"])
        if "Noisy" not in str(type(s.evaluate(node))) and not has_keys(s, node):
            lines.append(f"{state} = jax.tree.map({scale}, {state})")
        if not node.startswith(("[", "(", "{")):
            lines.append(f"nnx.update({node}, {s.one(['', ''])}{', '.join(names)})")
    return lines


def has_keys(s: Scope, node: str) -> bool:
    """Whether random keys are among the leaves of an expression."""
    return any("key" in str(getattr(p.value, "dtype", "")) for p in leaves_of(s, node))


def leaves_of(s: Scope, node: str) -> list[tp.Any]:
    """The places of Variables and arrays in the value of an expression."""
    s.env["_node"] = s.evaluate(node)
    found = [p for p in s.places(["_node"]) if hasattr(p.value, "dtype")]
    del s.env["_node"]
    return found


@statement(0.4)
def update_with_other_shapes(s: Scope) -> list[str] | None:
    """Stacked values are written back."""
    models = [n for n in s.models() if not has_keys(s, n)]
    if not models:
        return None
    m, t = s.one(models), s.fresh("s")
    lines = [f"{t} = jax.tree.map(lambda x: jnp.stack([x, x]), nnx.state({m}, {kind_filter(s)}))"]
    return [*lines, f"nnx.update({m}, {t})"]


@statement(0.5, body=True)
def graphdefs(s: Scope) -> list[str] | None:
    a, b = s.node(), s.node()
    if a is None or b is None:
        return None
    x, y = s.fresh("g"), s.fresh("g")
    lines = [f"{x} = nnx.graphdef({a})", f"{y} = nnx.graphdef({b})"]
    return [*lines, f"{s.fresh('r')} = {x} == {y}, hash({x}) == hash({y})"]


@statement(0.9, body=True, structural=True)
def pop(s: Scope) -> str | None:
    objects = [p for p in s.places() if s.is_object(p.value) and id(p.value) not in s.frozen]
    if not objects:
        return None
    kinds = sorted(
        {type(p.value).__name__ for p in s.places() if isinstance(p.value, s.lib.Variable)}
    )
    texts = {"Param": "nnx.Param", "BatchStat": "nnx.BatchStat", "Intermediate": "nnx.Intermediate"}
    found = [texts.get(k, k) for k in kinds if k in texts or k in ("Count", "Scale")]
    if not found:
        return None
    chosen = [s.one([s.one(found), f"nnx.All({s.one(found)}, nnx.PathContains('a'))"])]
    if s.chance(0.2):
        chosen.append(s.one(found))
    names = [s.fresh("s") for _ in chosen]
    return f"{', '.join(names)} = nnx.pop({s.one(objects).text}, {', '.join(chosen)})"


@statement(1.0, body=True)
def clone(s: Scope) -> str | None:
    node = s.node()
    options = s.one(["", "", ", variables=False", ", arrays=True", ", variables=True"])
    return node and f"{s.fresh('m')} = nnx.clone({node}{options}{mode(s)})"


@statement(0.9, body=True)
def map_leaves(s: Scope) -> str | None:
    node = s.node()
    if node is None:
        return None
    body = s.one(
        [
            "lambda path, x: x",
            "lambda path, x: x.replace(x[...] * 2) if isinstance(x, nnx.Param) else x",
            "lambda path, x: x.replace(note=len(path)) if isinstance(x, nnx.Variable) else x",
            "lambda path, x: nnx.Param(x[...]) if type(x) is nnx.BatchStat else x",
        ]
    )
    option = s.one(["", "", "", ", recreate_variables=False"])
    return f"{s.fresh('m')} = nnx.map({body}, {node}{mode(s)}{option})"


@statement(0.7, body=True)
def recursive_map(s: Scope) -> str | None:
    node = s.node()
    if node is None:
        return None
    body = s.one(
        [
            "lambda path, x: x",
            "lambda path, x: nnx.List([x]) if type(x).__name__ == 'Affine' else x",
            "lambda path, x: Box(only=nnx.Param(jnp.zeros(2))) if type(x).__name__ == 'Plain' else x",
        ]
    )
    return f"{s.fresh('m')} = nnx.recursive_map({body}, {node}{mode(s)})"


@statement(0.6)
def duplicates(s: Scope) -> str | None:
    node = s.node()
    only = s.one(["", "", f", only={some_filter(s)}"])
    return node and f"{s.fresh('r')} = nnx.find_duplicates({node}{only})"


@statement(1.0)
def iterate(s: Scope) -> str | None:
    node = s.node()
    if node is None:
        return None
    function = s.one(["iter_graph", "iter_modules", "iter_children", "iter_module_children"])
    item = s.one(["(p, v)", "(p, type(v).__name__)", "p"])
    return f"{s.fresh('r')} = [{item} for p, v in nnx.{function}({node}{mode(s)}) if '_pytree' not in str(p)]"


@statement(0.8, body=True)
def flatten(s: Scope) -> list[str] | None:
    node = s.node()
    if node is None:
        return None
    g, f = s.fresh("g"), s.fresh("t")
    option = s.one(["", "", ", with_paths=True", ", with_paths=False"])
    lines = [f"{g}, {f} = nnx.flatten({node}{option}{mode(s)})"]
    option = s.one(["", "", ", copy_variables=True", ", recreate_variables=False"])
    lines.append(f"{s.fresh('m')} = nnx.unflatten({g}, {f}{option})")
    return lines


@statement(0.6)
def contexts(s: Scope) -> list[str] | None:
    a, b = s.node(), s.node()
    if a is None or b is None:
        return None
    g, h, t, u = (s.fresh(k) for k in "gsgs")
    more = s.one(["", "", ", ..."])
    lines = [
        f"with nnx.split_context() as ctx:\n    {g}, {h} = ctx.split({a}{more})\n    {t}, {u} = ctx.split({b})",
        (
            f"with nnx.merge_context() as ctx:\n    {s.fresh('m')} = ctx.merge({g}, {h})\n"
            f"    {s.fresh('m')} = ctx.merge({t}, {u})"
        ),
    ]
    if s.chance(0.4):
        lines[0] = lines[0].replace("ctx.split", "ctx.flatten").replace(", ...", "")
        lines[1] = lines[1].replace("ctx.merge", "ctx.unflatten")
    return [*lines, "del ctx"] if not s.depth else lines


# States ------------------------------------------------------------------------------------------------


def a_state(s: Scope) -> str | None:
    """The text of a State."""
    states = s.states()
    if states and s.chance(0.6):
        return s.one(states)
    models = s.models()
    return f"nnx.state({s.one(models)})" if models else None


@statement(1.0, body=True)
def flat_state(s: Scope) -> list[str] | None:
    state = a_state(s)
    if state is None:
        return None
    f = s.fresh("t")
    lines = [f"{f} = nnx.to_flat_state({state})"]
    end = s.one(
        [
            f"nnx.from_flat_state({f})",
            f"nnx.from_flat_state([(p, v) for p, v in {f}])",
            f"nnx.from_flat_state({{p: v for p, v in {f}}})",
            f"nnx.from_flat_state({f}, cls=dict)",
            f"{f}.to_nested_state()",
            f"{f}.paths, {f}.leaves, len({f})",
            f"{f}.split({kind_filter(s)}, ...)",
            f"{f}.filter({some_filter(s)})",
        ]
    )
    return [*lines, f"{s.fresh('r')} = {end}"]


@statement(1.2, body=True)
def pure_dict(s: Scope) -> list[str] | None:
    state = a_state(s)
    if state is None:
        return None
    d, t = s.fresh("d"), s.fresh("s")
    lines = [
        f"{t} = {state}",
        f"{d} = {s.one(['nnx.to_pure_dict({})', '{}.to_pure_dict()']).format(t)}",
    ]
    if s.chance(0.6) and not has_keys(s, state):
        lines.append(f"{d} = jax.tree.map(lambda x: x * 3, {d})")
    option = s.one(["", "", ", lambda x, y: y"])
    if s.chance(0.7):
        lines.append(
            s.one([f"nnx.replace_by_pure_dict({t}, {d}{option})", f"{t}.replace_by_pure_dict({d})"])
        )
    else:
        lines.append(f"{s.fresh('r')} = nnx.restore_int_paths({d})")
    return lines


@statement(1.2, body=True)
def divide_state(s: Scope) -> list[str] | None:
    state = a_state(s)
    if state is None:
        return None
    found = filters(s, 1, 2)
    names = [s.fresh("s") for _ in found]
    t = s.fresh("s")
    form = s.one(
        ["nnx.split_state({}, {})", "{}.split({})", "nnx.filter_state({}, {})", "{}.filter({})"]
    )
    lines = [f"{t} = {state}", f"{', '.join(names)} = {form.format(t, ', '.join(found))}"]
    if s.chance(0.6):
        order = s.some(names, 1, len(names))
        join = s.one(["nnx.merge_state({})", "nnx.State.merge({})"])
        lines.append(f"{s.fresh('s')} = {join.format(', '.join(order))}")
    return lines


@statement(0.5, body=True)
def diff_states(s: Scope) -> str | None:
    a, b = a_state(s), a_state(s)
    return a and b and f"{s.fresh('r')} = nnx.statelib.diff({a}, {b})"


@statement(0.8, body=True)
def walk_state(s: Scope) -> str | None:
    state = a_state(s)
    if state is None:
        return None
    form = s.one(
        [
            "list({})",
            "len({}), list({}.keys())",
            "nnx.map_state(lambda path, x: x, {})",
            "{}.map(lambda path, x: x)",
            "nnx.as_pure({})",
            "nnx.pure({})",
            "jax.tree.map(lambda x: x, {})",
            "jax.tree.leaves({})",
            "nnx.State({}.raw_mapping)",
            "nnx.State.from_flat_path({}.flat_state())",
            "jax.tree.structure({0}) == jax.tree.structure({0})",
            "{0} == {0}",
            "'a' in {}",
            "{}.get('a')",
        ]
    )
    return f"{s.fresh('r')} = {form.format(state, state)}"


@statement(0.7)
def edit_state(s: Scope) -> str | None:
    states = [n for n in s.states() if len(s.env[n])]
    if not states:
        return None
    t = s.one(states)
    key = s.one(list(s.env[t].raw_mapping))
    return s.one(
        [f"{t}[{key!r}] = {variable(s)}", f"del {t}[{key!r}]", f"{t}['z'] = {s.literal()}"]
    )


@statement(1.0, body=True)
def key_paths(s: Scope) -> str | None:
    """Key paths, of a State, a model, or a mask made with them."""
    node = s.one([a_state(s), s.node(), s.node()])
    if node is None:
        return None
    form = s.one(
        [
            "keystrs({})",
            "keystrs({})",
            "jax.tree_util.tree_map_with_path(lambda path, x: len(path), {})",
            "jax.tree.leaves(jax.tree_util.tree_map_with_path(lambda p, x: 'a' in str(p), {}))",
            "[str(p) for p, _ in jax.tree.leaves_with_path({}, is_leaf=lambda x: isinstance(x, nnx.Variable))]",
        ]
    )
    return f"{s.fresh('r')} = {form.format(node)}"


@statement(0.9, body=True)
def jax_trees(s: Scope) -> str | None:
    """JAX's own functions of trees, given objects."""
    node = s.node()
    if node is None:
        return None
    form = s.one(
        [
            "jax.tree.leaves({})",
            "jax.tree.map(lambda x: x, {})",
            "len(jax.tree.leaves({}, is_leaf=lambda x: isinstance(x, nnx.Variable)))",
            "jax.tree.map(lambda x: x, {}, is_leaf=lambda x: isinstance(x, nnx.Variable))",
            "jax.tree.unflatten(jax.tree.structure({0}), jax.tree.leaves({0}))",
        ]
    )
    return f"{s.fresh('r')} = {form.format(node)}"


# Other functions on models --------------------------------------------------------------------------------


@statement(1.0)
def abstract_forms(s: Scope) -> str | None:
    node = s.node(variables=0)
    if node is None:
        return None
    form = s.one(
        [
            "nnx.as_abstract(nnx.eval_shape(lambda: {}))",
            "nnx.as_abstract(nnx.state(nnx.eval_shape(lambda: {})))",
            "nnx.as_pure({})",
            "nnx.pure({})",
            "nnx.eval_shape(lambda: {})",
            "bool(nnx.has_data({0})), bool(nnx.is_data({0}))",
            "nnx.check_pytree({})",
        ]
    )
    name = s.fresh("u" if "eval_shape" in form else "r")
    return f"{name} = {form.format(node)}"


@statement(0.6)
def prefixes(s: Scope) -> str | None:
    node = s.node()
    if node is None:
        return None
    rules = f"{{{kind_filter(s)}: 0, ...: None}}" if s.chance(0.7) else "lambda path, x: len(path)"
    none = "is_leaf=lambda x: x is None"
    return f"{s.fresh('r')} = jax.tree.leaves(nnx.prefix({node}, {rules}{mode(s, 0.7)}), {none})"


@statement(0.9, body=True)
def views(s: Scope) -> str | None:
    names = [p for p in s.places() if s.is_object(p.value)]
    if not names:
        return None
    place = s.one(names)
    form = s.one(
        [
            "nnx.view({}, deterministic=True, raise_if_not_found=False)",
            "nnx.view({}, use_running_average=True, raise_if_not_found=False)",
            "nnx.with_attributes({}, d=11, raise_if_not_found=False)",
            "nnx.with_attributes({}, only=Box, e='other', raise_if_not_found=False)",
        ]
    )
    return f"{s.fresh('m')} = {form.format(place.text)}"


@statement(0.5)
def changed_variables(s: Scope) -> str | None:
    node = s.node()
    if node is None:
        return None
    only = s.one(["", f", only={kind_filter(s)}"])
    dups = s.one(["", ", allow_duplicates=True"])
    return f"{s.fresh('m')} = nnx.vars_as({node}, {s.one(['ref=True', 'ref=False'])}{only}{dups})"


@statement(0.7)
def variable_methods(s: Scope) -> str | None:
    leaves = [p for p in s.places() if isinstance(p.value, s.lib.Variable)]
    if not leaves:
        return None
    t = s.one(leaves).text
    form = s.one(
        [
            "{}.copy()",
            "{}.replace(jnp.ones(2))",
            "{}.replace(note=3)",
            "{0}.to_state()",
            "{}.get_metadata()",
            "{}.has_metadata('tag')",
            "{}.get_metadata('tag', None)",
            "{0}.shape, {0}.ndim, str({0}.dtype)",
            "{0} * 2 + {0}",
            "-{0}, abs({0})",
            "jnp.sum({}[...])",
            "{}.type",
            "nnx.is_data({})",
            "nnx.variable_name_from_type(type({}), allow_register=True)",
        ]
    )
    return f"{s.fresh('r')} = {form.format(t)}"


@statement(0.5, body=True, structural=True)
def sow(s: Scope) -> str | None:
    modules = [
        p for p in s.places() if isinstance(p.value, s.lib.Module) and id(p.value) not in s.frozen
    ]
    modules = [p for p in modules if type(p.value).__name__ == "Box"]
    if not modules:
        return None
    t = s.one(modules).text
    value = s.array((2,))
    return s.one(
        [
            f"{t}.sow(nnx.Intermediate, 'seen', {value})",
            f"{s.fresh('y')} = {t}.perturb('inner', {value})",
        ]
    )


@statement(0.6)
def capture(s: Scope) -> str | None:
    names = [p for p in s.places() if type(p.value).__name__ in ("Recorder", "Affine")]
    if not names:
        return None
    place = s.one(names)
    kinds = s.one(["nnx.Intermediate", "nnx.Perturbation", "nnx.Intermediate, nnx.Perturbation"])
    option = s.one(["", "", ", method_outputs=nnx.Intermediate"])
    return f"{s.fresh('r')} = nnx.capture({place.text}, {kinds}{option})({s.array((2,))})"


@statement(0.4, body=True)
def apply_graphdef(s: Scope) -> str | None:
    names = [p for p in s.places() if type(p.value).__name__ == "Affine"]
    if not names:
        return None
    t = s.one(names).text
    x = s.array((2,))
    form = s.one(["nnx.graphdef({0}).apply(nnx.state({0}))({1})", "nnx.call(nnx.split({0}))({1})"])
    return f"{s.fresh('r')} = {form.format(t, x)}"


@statement(0.3)
def tree_forms(s: Scope) -> list[str] | None:
    a, b = s.node(), s.node()
    if a is None or b is None:
        return None
    t = s.fresh("z")
    return [f"{t} = nnx.to_tree(({a}, {b}))", f"{s.fresh('m')} = nnx.from_tree({t})"]


@statement(0.7)
def bad_input(s: Scope) -> str | None:
    """Calls that both libraries refuse."""
    node = s.node()
    models = s.models()
    if node is None or not models:
        return None
    m = s.one(models)
    call = s.one(
        [
            f"nnx.split({node}, nnx.Nothing())",
            f"nnx.state({node}, ..., nnx.Param)",
            f"nnx.merge(nnx.graphdef({node}), nnx.State({{}}))",
            f"nnx.merge(nnx.graphdef({m}), nnx.state({node}, nnx.Param))",
            f"nnx.split({node}, 5)",
            f"nnx.update({m}, 3)",
            f"nnx.pop({m}, ...)",
            f"nnx.with_attributes({m}, none_has_this=1)",
            f"{m}.none_has_this",
            f"nnx.split({m}, graph=False)",
            f"nnx.view({m}, none_has_this=1)",
        ]
    )
    return f"{s.fresh('r')} = fails(lambda: {call})[0]"
