"""Statements about objects, Variables, States and the functions on graphs."""

from __future__ import annotations

import typing as tp

import jax
import numpy as np

from tests.parity.fuzz.grammar import HOLES, expand, hole, statement, table
from tests.parity.fuzz.scope import ATTRIBUTES, SHAPES, Place, Scope

# Models ---------------------------------------------------------------------------------------------

KIND = "<<nnx.Param|nnx.Param|nnx.Param|nnx.BatchStat|nnx.Variable|Count|Scale>>"
STATIC = ["3", "'text'", "(1, 2)", "None", "2.5", "True", "jnp.tanh", "nnx.static((1, 'x'))"]


def made(s: Scope, template: str) -> str:
    """The text of a template that is one expression."""
    return "".join(expand(s, template) or [])


def variable(s: Scope, shape: tuple[int, ...] | None = None) -> str:
    """The text of a new Variable."""
    value, options = s.literal(shape), ""
    if s.chance(0.25):
        options = ", <<tag='t'|tag='u'|note=1|note=(1, 2)>>"
    if s.chance(0.05):
        options += ", <<on_set_value=doubled|on_get_value=doubled|on_create_value=doubled>>"
    if s.chance(0.05) and shape is None:
        value = "<<np.ones(2, np.float32)|np.float32(2.0)>>"
    elif s.chance(0.05):
        options += ", ref=True"
    return made(s, f"{KIND}({value}{options})")


def part(s: Scope, depth: int) -> str:
    """The text of what an attribute may be."""
    r = s.rng.random()
    if depth > 0 and r < 0.3:
        return module(s, depth - 1)
    if depth > 0 and r < 0.42:
        items = [part(s, depth - 1) for _ in range(s.rng.randint(1, 3))]
        listed, named = ", ".join(items), dict(zip("pqr", items))
        return s.one(
            [
                f"nnx.List([{listed}])",
                f"nnx.Dict({', '.join(f'{k}={v}' for k, v in named.items())})",
                f"nnx.data([{listed}])",
                f"nnx.data({{{', '.join(f'{k!r}: {v}' for k, v in named.items())}}})",
                f"nnx.data(({listed},))",
            ]
        )
    return variable(s) if r < 0.75 else s.literal() if r < 0.88 else s.one(STATIC)


def module(s: Scope, depth: int) -> str:
    """The text of a new graph node."""
    if s.chance(0.69):
        parts = [f"{n}={part(s, depth)}" for n in s.some(ATTRIBUTES, 1, 4)]
        return f"{s.one(['Box', 'Box', 'Box', 'Plain'])}({', '.join(parts)})"
    shape, seed = s.one([(), (2,), (2, 2)]), s.rng.randint(0, 3)
    affine = f"Affine({s.literal(shape)}, {s.literal(shape)})"
    return s.one(
        [
            *(affine, affine, affine, f"Noisy(nnx.Rngs({seed}, noise=1))"),
            f"Recorder({s.literal((2,))})",
            f"nnx.Linear(2, {s.rng.randint(2, 3)}, rngs=nnx.Rngs({seed}))",
            f"Net(nnx.Rngs({seed}))",
        ]
    )


@statement(2.0)
def new_model(s: Scope) -> str | None:
    return None if len(s.models()) >= 4 else f"{s.fresh('m')} = {module(s, s.rng.randint(0, 2))}"


@statement(1.0)
def new_ensemble(s: Scope) -> str | None:
    """A model of which every leaf has two slices."""
    if len(s.models()) >= 4:
        return None
    names = s.some(ATTRIBUTES, 1, 3)
    parts = [f"{n}={variable(s, s.one([(2,), (2, 2), (2, 3)]))}" for n in names]
    inner = f"z=Box(w=nnx.Param({s.literal((2, 2))}))"
    return f"{s.fresh('m')} = Box({', '.join([*parts, inner] if s.chance(0.5) else parts)})"


# What a template may name --------------------------------------------------------------------------


def text_of(s: Scope, places: tp.Sequence[Place]) -> str | None:
    """The text of one of some places."""
    return s.one(places).text if places else None


def writable(s: Scope, *names: str) -> list[Place]:
    """The objects of certain classes that a body may write."""
    found = [p for p in s.places() if type(p.value).__name__ in names]
    return [p for p in found if id(p.value) not in s.frozen]


def variables(s: Scope) -> list[Place]:
    """The Variables that a body may write."""
    found = [p for p in s.places() if isinstance(p.value, s.lib.Variable)]
    return [p for p in found if id(p.value) not in s.frozen]


def objects(s: Scope) -> list[Place]:
    """The objects that a body may write."""
    return [p for p in s.places() if s.is_object(p.value) and id(p.value) not in s.frozen]


def leaves_of(s: Scope, value: tp.Any) -> list[tp.Any]:
    """The Variables and arrays of a value."""
    return [p.value for p in s.below(value) if hasattr(p.value, "dtype")]


def has_keys(s: Scope, value: tp.Any) -> bool:
    """Whether random keys are among the leaves of a value."""
    return any("key" in str(x.dtype) for x in leaves_of(s, value))


@hole
def item(s: Scope) -> str | None:
    """An attribute of an object that has others."""
    found = [(p, s.children(p.value)) for p in writable(s, "Box", "Plain")]
    found = [p.text + s.one(parts)[0] for p, parts in found if len(parts) > 1]
    return s.one(found) if found else None


@hole
def known(s: Scope) -> str | None:
    """A Variable, or sometimes an object, that is there already."""
    leaves = variables(s)
    return text_of(s, leaves if leaves and s.chance(0.85) else objects(s))


@hole
def value(s: Scope) -> str:
    """A new attribute."""
    if not s.depth:
        return part(s, 1)
    return made(s, "<<nnx.Param($array)|Count($scalar)|7|'new'>>")


@hole
def keyless(s: Scope) -> str | None:
    """The name of an object without random keys."""
    found = [n for n in s.models() if not has_keys(s, s.env[n])]
    return s.one(found) if found else None


@hole
def present(s: Scope) -> str | None:
    """A kind of which there are Variables."""
    kinds = {type(p.value).__name__ for p in s.places() if isinstance(p.value, s.lib.Variable)}
    own = {"Count": "Count", "Scale": "Scale"}
    names = own | {k: f"nnx.{k}" for k in ("Param", "BatchStat", "Intermediate")}
    found = sorted(names[k] for k in kinds if k in names)
    return s.one(found) if found else None


@hole
def kind(s: Scope) -> str:
    """A type of Variable."""
    return made(s, "<<nnx.Param|nnx.Param|nnx.BatchStat|Count|Scale|nnx.Variable|nnx.RngState>>")


def some_filter(s: Scope, depth: int = 2) -> str:
    """The text of a filter of any form."""
    r = s.rng.random()
    if r < 0.42 or (depth == 0 and r < 0.7):
        return kind(s)
    if depth > 0 and r < 0.68:
        a, b = some_filter(s, depth - 1), some_filter(s, depth - 1)
        forms = "<<nnx.Not({0})|nnx.Any({0}, {1})|nnx.All({0}, {1})|({0}, {1})|[{0}, {1}]>>"
        return made(s, forms).format(a, b)
    return made(
        s,
        "<<nnx.PathContains($letter)|nnx.PathContains('a', exact=False)|nnx.OfType($kind)|"
        "nnx.WithTag('t')|'t'|...|True|False|None|nnx.Everything()|nnx.Nothing()|"
        "lambda path, x: $letter in path|lambda path, x: len(path) > 1|"
        "lambda path, x: isinstance(x, $kind)>>",
    )


@hole
def state(s: Scope) -> str | None:
    """The text of a State."""
    states, models = s.states(), s.models()
    if states and s.chance(0.6):
        return s.one(states)
    return f"nnx.state({s.one(models)})" if models else None


@hole
def entry(s: Scope) -> str | None:
    """An entry of a State."""
    states = [n for n in s.states() if len(s.env[n])]
    name = s.one(states) if states else None
    return name and f"{name}[{s.one(list(s.env[name].raw_mapping))!r}]"


def mode(s: Scope, p: float = 0.25) -> str:
    """The keyword `graph=`."""
    return made(s, ", graph=<<True|True|None|False>>") if s.chance(p) else ""


HOLES.update(
    mode=mode,
    filter=some_filter,
    variable=variable,
    array=lambda s: s.array(s.one(SHAPES)),
    pair=lambda s: s.array((2,)),
    scalar=lambda s: s.scalar(),
    literal=lambda s: s.literal(),
    letter=lambda s: repr(s.one(ATTRIBUTES)),
    node=lambda s: s.node(),
    graph=lambda s: s.node(variables=0),
    object=lambda s: s.node(variables=0, containers=0),
    model=lambda s: s.one(s.models() or [None]),
    box=lambda s: text_of(s, writable(s, "Box", "Plain")),
    module=lambda s: text_of(s, writable(s, "Box")),
    list=lambda s: text_of(s, writable(s, "List")),
    dict=lambda s: text_of(s, writable(s, "Dict")),
    var=lambda s: text_of(s, variables(s)),
    written=lambda s: text_of(s, objects(s)),
    place=lambda s: text_of(s, [p for p in s.places() if s.is_object(p.value)]),
    affine=lambda s: text_of(s, writable(s, "Affine")),
    recorder=lambda s: text_of(s, writable(s, "Recorder", "Affine")),
)

# Statements that are templates ------------------------------------------------------------------------

table(r"""
new_root 0.4
    $v = $variable
    $v = $variable
    $v = [$variable, {'k': $variable2}]
new_array 0.8
    $x = $literal
local 0.8 body
    $x = <<$array|$array|$scalar>>
add_attribute 1.2 body structural
    $box.<<a|b|c|d|e|n|o|p>> = $value
share 1.0 body structural
    $box.<<s|t|u>> = $known
remove_attribute 0.5 body structural
    del $item
edit_container 0.5 body structural
    $list.<<append(nnx.Param($array))|insert(0, nnx.Param($array))|pop()>>
    $list[0] = nnx.Param($array)
    $dict['z'] = nnx.Param($array)
metadata 0.5 body structural
    $var.set_metadata(<<note=1|note=2|note=3|'tag', 'u'>>)
metadata_of_all 0.2
    nnx.set_metadata($node<<, note=9|, only=$kind, tag='v'>>)

split 2.0 body
    $g, $s = nnx.split($node$mode) ; $m = nnx.merge($g, $s<<||, copy=True|, recreate_variables=False>>)
    $g, $s = nnx.split($node$mode) ; $m = nnx.merge($g, $s<<||, copy=True|, recreate_variables=False>>)
    $g, $s = nnx.split($keyless$mode) ; nnx.update($keyless, jax.tree.map(lambda x: x * 2, $s))
    $g, $s = nnx.split($node, $filter$mode)
    $g, $s1, $s2 = nnx.split($node, $filter, ...$mode) ; $m = nnx.merge($g, <<$s1, $s2|$s1, $s2|$s2, $s1>>)
    $g, $s1, $s2 = nnx.split($keyless, $filter, ...) ; nnx.update($keyless, jax.tree.map(jnp.zeros_like, $s1), $s2)
    $g, $s1, $s2, $s3 = nnx.split($node, $filter, $filter2, ...) ; $m = nnx.merge($g, $s1, $s3, $s2)
take_state 0.7 body
    $s = <<nnx.state|nnx.variables>>($graph$mode)
    $s = nnx.state($graph, $filter)
    $s1, $s2 = nnx.state($graph, $filter, ...$mode)
write_state 1.5
    $s = nnx.state($object, $filter) ; nnx.update($object, $s)
    $s = nnx.state($keyless<<||, $present>>) ; $s = jax.tree.map(<<lambda x: x * 2|jnp.zeros_like>>, $s) ; nnx.update($keyless, $s)
    $s = nnx.state($keyless<<||, $present>>) ; $s = jax.tree.map(lambda x: x * 3, $s) ; nnx.update($keyless, $s)
    $s1, $s2 = nnx.state($keyless, $present, ...) ; $s1 = jax.tree.map(lambda x: x * 2, $s1) ; nnx.update($keyless, $s1, $s2)
    $s = jax.tree.map(lambda x: jnp.stack([x, x]), nnx.state($keyless, $present)) ; nnx.update($keyless, $s)
graphdefs 0.5 body
    $g1 = nnx.graphdef($node) ; $g2 = nnx.graphdef($node2) ; $r = $g1 == $g2, hash($g1) == hash($g2)
pop 0.9 body structural
    $s = nnx.pop($written, <<$present|$present|nnx.All($present, nnx.PathContains('a'))>>)
    $s1, $s2 = nnx.pop($written, $present, $present2)
clone 1.0 body
    $m = nnx.clone($node<<||, variables=False|, arrays=True|, variables=True>>$mode)
map_leaves 0.9 body
    $m = nnx.map(lambda path, x: x, $node$mode<<|, recreate_variables=False>>)
    $m = nnx.map(lambda path, x: x.replace(x[...] * 2), $node$mode)
    $m = nnx.map(lambda path, x: x.replace(x[...] * 2) if isinstance(x, nnx.Param) else x, $node$mode)
    $m = nnx.map(lambda path, x: x.replace(note=len(path)) if isinstance(x, nnx.Variable) else x, $node$mode)
    $m = nnx.map(lambda path, x: nnx.Param(x[...]) if type(x) is nnx.BatchStat else x, $node$mode)
recursive_map 0.7 body
    $m = nnx.recursive_map(lambda path, x: x, $node$mode)
    $m = nnx.recursive_map(lambda path, x: nnx.List([x]) if type(x).__name__ == 'Affine' else x, $node$mode)
    $m = nnx.recursive_map(lambda path, x: Box(only=nnx.Param(jnp.zeros(2))) if type(x).__name__ == 'Plain' else x, $node)
duplicates 0.6
    $r = nnx.find_duplicates($node<<||, only=$filter>>)
iterate 1.0
    $r = [<<(p, v)|(p, type(v).__name__)|p>> for p, v in nnx.<<iter_graph|iter_modules|iter_children|iter_module_children>>($node$mode) if '_pytree' not in str(p)]
flatten 0.8 body
    $g, $t = nnx.flatten($node<<||, with_paths=True|, with_paths=False>>$mode) ; $m = nnx.unflatten($g, $t<<||, copy_variables=True|, recreate_variables=False>>)
contexts 0.6
    with nnx.split_context() as ctx:\n    $g1, $s1 = ctx.split($node<<||, ...>>)\n    $g2, $s2 = ctx.split($node2) ; with nnx.merge_context() as ctx:\n    $m1 = ctx.merge($g1, $s1)\n    $m2 = ctx.merge($g2, $s2) ; del ctx
    with nnx.split_context() as ctx:\n    $g1, $s1 = ctx.flatten($node)\n    $g2, $s2 = ctx.flatten($node2) ; with nnx.merge_context() as ctx:\n    $m1 = ctx.unflatten($g1, $s1)\n    $m2 = ctx.unflatten($g2, $s2) ; del ctx

flat_state 1.0 body
    $t = nnx.to_flat_state($state) ; $r = nnx.from_flat_state(<<$t|[(p, v) for p, v in $t]|{p: v for p, v in $t}|$t, cls=dict>>)
    $t = nnx.to_flat_state($state) ; $r = <<$t.to_nested_state()|$t.split($kind, ...)|$t.filter($filter)>>
    $t = nnx.to_flat_state($state) ; $r = $t.paths, $t.leaves, len($t)
pure_dict 1.2 body
    $s = $state ; $d = <<nnx.to_pure_dict($s)|$s.to_pure_dict()>> ; <<nnx.replace_by_pure_dict($s, $d<<||, lambda x, y: y>>)|$s.replace_by_pure_dict($d)>>
    $s = nnx.state($keyless) ; $d = jax.tree.map(lambda x: x * 3, $s.to_pure_dict()) ; <<nnx.replace_by_pure_dict($s, $d)|$s.replace_by_pure_dict($d)>>
    $d = nnx.to_pure_dict($state) ; $r = nnx.restore_int_paths($d)
divide_state 1.2 body
    $s = $state ; $s1 = <<nnx.split_state($s, ...)|$s.split($filter)|nnx.filter_state($s, $filter)|$s.filter($filter)>>
    $s = $state ; $s1, $s2 = <<nnx.split_state|nnx.filter_state>>($s, $filter, ...) ; $s3 = <<nnx.merge_state|nnx.State.merge>>(<<$s1, $s2|$s2, $s1|$s2>>)
    $s = $state ; $s1, $s2 = $s.<<split|filter>>($filter, ...) ; $s3 = <<nnx.merge_state|nnx.State.merge>>(<<$s1, $s2|$s2, $s1|$s1>>)
diff_states 0.5 body
    $r = nnx.statelib.diff($state, $state2)
walk_state 0.8 body
    $r = <<list|nnx.as_pure|nnx.pure|jax.tree.leaves>>($state)
    $r = <<nnx.map_state(lambda path, x: x, $state)|$state.map(lambda path, x: x)|jax.tree.map(lambda x: x, $state)>>
    $r = <<nnx.State($state.raw_mapping)|nnx.State.from_flat_path($state.flat_state())>>
    $r = <<len($state), list($state.keys())|'a' in $state|$state.get('a')|$state == $state>>
    $r = jax.tree.structure($state) == jax.tree.structure($state)
edit_state 0.7
    <<$entry = $variable|del $entry>>
    $s = $state ; $s['z'] = $literal
key_paths 1.0 body
    $r = keystrs(<<$state|$node>>)
    $r = jax.tree_util.tree_map_with_path(lambda path, x: len(path), <<$state|$node>>)
    $r = jax.tree.leaves(jax.tree_util.tree_map_with_path(lambda p, x: 'a' in str(p), <<$state|$node>>))
    $r = [str(p) for p, _ in jax.tree.leaves_with_path(<<$state|$node>>, is_leaf=lambda x: isinstance(x, nnx.Variable))]
jax_trees 0.9 body
    $r = <<jax.tree.leaves($node)|jax.tree.unflatten(jax.tree.structure($node), jax.tree.leaves($node))>>
    $r = <<jax.tree.map(lambda x: x, $node)|jax.tree.map(lambda x: x, $node, is_leaf=lambda x: isinstance(x, nnx.Variable))>>
    $r = len(jax.tree.leaves($node, is_leaf=lambda x: isinstance(x, nnx.Variable)))

abstract_forms 1.0
    $u = nnx.as_abstract(<<nnx.eval_shape(lambda: $graph)|nnx.state(nnx.eval_shape(lambda: $graph))>>)
    $u = nnx.eval_shape(lambda: $graph)
    $r = <<nnx.as_pure|nnx.pure|nnx.check_pytree>>($graph)
    $r = bool(nnx.has_data($graph)), bool(nnx.is_data($graph))
prefixes 0.6
    $r = jax.tree.leaves(nnx.prefix($node, <<{$kind: 0, ...: None}|{$kind: 0, ...: None}|lambda path, x: len(path)>><<||, graph=True|, graph=False>>), is_leaf=lambda x: x is None)
views 0.9 body
    $m = nnx.view($place, <<deterministic|use_running_average>>=True, raise_if_not_found=False)
    $m = nnx.with_attributes($place, <<d=11|only=Box, e='other'>>, raise_if_not_found=False)
changed_variables 0.5
    $m = nnx.vars_as($node, ref=<<True|False>><<|, only=$kind>><<|, allow_duplicates=True>>)
variable_methods 0.7
    $r = $var.<<copy()|replace(jnp.ones(2))|replace(note=3)|to_state()|get_metadata()|has_metadata('tag')|get_metadata('tag', None)|type>>
    $r = $var.shape, $var.ndim, str($var.dtype)
    $r = <<$var * 2 + $var|-$var, abs($var)|jnp.sum($var[...])|nnx.is_data($var)>>
    $r = nnx.variable_name_from_type(type($var), allow_register=True)
sow 0.5 body structural
    $module.sow(nnx.Intermediate, 'seen', $pair)
    $y = $module.perturb('inner', $pair)
capture 0.6
    $r = nnx.capture($recorder, <<nnx.Intermediate|nnx.Perturbation|nnx.Intermediate, nnx.Perturbation>><<||, method_outputs=nnx.Intermediate>>)($pair)
apply_graphdef 0.4 body
    $r = <<nnx.graphdef($affine).apply(nnx.state($affine))|nnx.call(nnx.split($affine))>>($pair)
tree_forms 0.3
    $z = nnx.to_tree(($node, $node2)) ; $m = nnx.from_tree($z)
bad_input 0.7
    $r = fails(lambda: nnx.<<split($node, nnx.Nothing())|state($node, ..., nnx.Param)|split($node, 5)>>)[0]
    $r = fails(lambda: nnx.merge(nnx.graphdef($node), <<nnx.State({})|nnx.state($node2, nnx.Param)>>))[0]
    $r = fails(lambda: nnx.<<update($model, 3)|pop($model, ...)|with_attributes($model, none_has_this=1)|view($model, none_has_this=1)|split($model, graph=False)>>)[0]
    $r = fails(lambda: $model.none_has_this)[0]
""")

# Statements that look closer at what is there ------------------------------------------------------------


@statement(0.4, body=True, structural=True)
def exchange_attributes(s: Scope) -> str | None:
    found = []
    for box in writable(s, "Box", "Plain"):
        parts = [(t, v) for t, _, v in s.children(box.value)]
        names = [t for t, v in parts if isinstance(v, (s.lib.Variable, s.lib.Pytree))]
        if len(names) > 1:
            found.append([box.text + name for name in s.some(names, 2, 2)])
    return "{0}, {1} = {1}, {0}".format(*s.one(found)) if found else None


@statement(3.0, body=True)
def write_variable(s: Scope) -> str | None:
    """A new value of the same shape and dtype."""
    found = [(p.text, p.value.get_raw_value()) for p in variables(s)]
    found = [(t, x) for t, x in found if hasattr(x, "dtype") and "key" not in str(x.dtype)]
    found = [(t, x) for t, x in found if not isinstance(x, jax.ShapeDtypeStruct)]
    if not found:
        return None
    text, raw = s.one(found)
    new = s.array(tuple(raw.shape), str(raw.dtype))
    if not s.values_only and s.chance(0.06):
        new = s.array(s.one(SHAPES))
    return made(s, f"{text}<<[...] = {new}|[...] = {new}|.value = {new}|.set_value({new})>>")


@statement(0.6, body=True)
def write_array(s: Scope) -> str | None:
    """An array attribute is rebound."""
    places = [p for p in s.places() if type(p.holder).__name__ in ("Box", "Plain")]
    places = [p for p in places if isinstance(p.value, (jax.Array, np.ndarray))]
    places = [p for p in places if not isinstance(p.value, s.lib.Variable)]
    places = [p for p in places if id(p.holder) not in s.frozen and "key" not in str(p.value.dtype)]
    if not places:
        return None
    place = s.one(places)
    new = s.array(tuple(place.value.shape), str(place.value.dtype))
    # An array that is a tracer counts as static in the reference, with recent versions of JAX.
    return f"{place.text} = nnx.data({new})" if s.depth else f"{place.text} = {new}"


@statement(0.8, body=True)
def call_module(s: Scope) -> str | None:
    """A module is called."""
    names = ["Affine", "Noisy", "Linear", "Net", *([] if s.values_only else ["Recorder"])]
    modules = writable(s, *names)
    if not modules:
        return None
    place = s.one(modules)
    shape = (2, 2) if type(place.value).__name__ == "Net" else (2,)
    return f"{s.fresh('y')} = {place.text}({s.array(shape)})"
