"""Statements about objects, Variables, States and the functions on graphs."""

from tests.parity.fuzz.grammar import HOLES, hole, made, table
from tests.parity.fuzz.scope import ATTRIBUTES, SHAPES, is_array

# Models ---------------------------------------------------------------------------------------------

KIND = "<<nnx.Param|nnx.Param|nnx.Param|nnx.BatchStat|nnx.Variable|Count|Scale>>"
FILTERED = [
    "nnx.Param",
    "nnx.Param",
    "nnx.BatchStat",
    "Count",
    "Scale",
    "nnx.Variable",
    "nnx.RngState",
]
STATIC = ["3", "'text'", "(1, 2)", "None", "2.5", "True", "jnp.tanh", "nnx.static((1, 'x'))"]


@hole
def variable(s, shape=None):
    metadata = ", <<tag='t'|tag='u'|note=1|note=(1, 2)>>" if s.chance(0.25) else ""
    return made(s, f"{KIND}({s.literal(shape)}{metadata})")


@hole
def value(s, depth=1):
    if s.depth:
        return made(s, "<<nnx.Param($array)|Count($scalar)|7|'new'>>")
    r = s.rng.random()
    if depth > 0 and r < 0.3:
        return new_model(s, depth - 1)
    if depth > 0 and r < 0.42:
        items = [value(s, depth - 1) for _ in range(s.rng.randint(1, 3))]
        named, listed = dict(zip("pqr", items)), ", ".join(items)
        keywords = ", ".join(f"{k}={v}" for k, v in named.items())
        options = [f"nnx.List([{listed}])", f"nnx.Dict({keywords})", f"nnx.data([{listed}])"]
        return s.one([*options, f"nnx.data(dict({keywords}))"])
    return variable(s) if r < 0.75 else s.literal() if r < 0.88 else s.one(STATIC)


@hole
def new_model(s, depth=None):
    depth = s.rng.randint(0, 2) if depth is None else depth
    if s.chance(0.69):
        parts = [f"{n}={value(s, depth)}" for n in s.some(ATTRIBUTES, 1, 4)]
        return f"{s.one(['Box', 'Box', 'Box', 'Plain'])}({', '.join(parts)})"
    shape, seed = s.one([(), (2,), (2, 2)]), s.rng.randint(0, 3)
    affine = f"Affine({s.literal(shape)}, {s.literal(shape)})"
    others = [f"Noisy(nnx.Rngs({seed}, noise=1))", f"Recorder({s.literal((2,))})"]
    others += [f"nnx.Linear(2, {s.one('23')}, rngs=nnx.Rngs({seed}))", f"Net(nnx.Rngs({seed}))"]
    return s.one([affine, affine, affine, *others])


@hole
def ensemble(s):
    """A model of which every leaf has two slices."""
    names = s.some(ATTRIBUTES, 1, 3)
    parts = [f"{n}={variable(s, s.one([(2,), (2, 2), (2, 3)]))}" for n in names]
    inner = f"z=Box(w=nnx.Param({s.literal((2, 2))}))"
    return f"Box({', '.join([*parts, inner] if s.chance(0.5) else parts)})"


# What a template may name --------------------------------------------------------------------------


def text_of(s, places):
    place = s.one(places)
    return place and place.text


def any_of(*kinds):
    """A hole for objects of some classes of the library or the program, which a body may write."""
    return lambda s: text_of(s, s.writable(*[getattr(s.lib, kind, kind) for kind in kinds]))


@hole
def item(s):
    """An attribute of an object that has others."""
    found = [(p.text, s.children(p.value)) for p in s.writable("Box", "Plain")]
    return s.one([text + s.one(parts)[0] for text, parts in found if len(parts) > 1])


@hole
def known(s):
    """A Variable, or sometimes an object, that is there already."""
    leaves = s.writable(s.lib.Variable)
    return text_of(s, leaves if leaves and s.chance(0.85) else s.writable(s.lib.Pytree))


@hole
def keyless(s):
    """The name of an object without random keys."""
    keys = lambda x: any("key" in str(getattr(v, "dtype", "")) for v in s.below(x))
    return s.one([n for n in s.models() if not keys(s.env[n])])


@hole
def present(s):
    """A kind of which there are Variables."""
    kinds = {type(p.value).__name__ for p in s.places() if s.is_variable(p.value)}
    names = ["Count", "Scale", "nnx.BatchStat", "nnx.Intermediate", "nnx.Param"]
    return s.one([name for name in names if name.removeprefix("nnx.") in kinds])


@hole
def filter(s, depth=2):
    r = s.rng.random()
    if r < 0.42 or (depth == 0 and r < 0.7):
        return made(s, "$kind")
    if depth > 0 and r < 0.68:
        a, b = filter(s, depth - 1), filter(s, depth - 1)
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
def state(s):
    states, models = s.named(lambda x: isinstance(x, s.lib.State)), s.models()
    if states and s.chance(0.6):
        return s.one(states)
    return f"nnx.state({s.one(models)})" if models else None


@hole
def entry(s):
    states = s.named(lambda x: isinstance(x, s.lib.State) and len(x))
    name = s.one(states)
    return name and name + s.one(s.children(s.env[name]))[0]


@hole
def mode(s, p=0.25):
    return made(s, ", graph=<<True|True|None|False>>") if s.chance(p) else ""


@hole
def write(s):
    """A new value of the same shape and dtype for a Variable."""
    found = [(p.text, s.raw(p.value)) for p in s.writable(s.lib.Variable)]
    found = [(text, x) for text, x in found if is_array(x)]
    if not found:
        return None
    text, x = s.one(found)
    shape = s.one(SHAPES) if not s.values_only and s.chance(0.06) else x.shape
    new = s.array(shape, str(x.dtype))
    return made(s, f"{text}<<[...] = {new}|[...] = {new}|.value = {new}|.set_value({new})>>")


@hole
def rebind(s):
    """A new array for an attribute that is one."""
    places = [p for p in s.places() if type(p.holder).__name__ in ("Box", "Plain")]
    places = [p for p in places if is_array(p.value) and id(p.holder) not in s.frozen]
    if not places:
        return None
    place = s.one(places)
    new = s.array(place.value.shape, str(place.value.dtype))
    # An array that is a tracer counts as static in the reference, with recent versions of JAX.
    return f"{place.text} = nnx.data({new})" if s.depth else f"{place.text} = {new}"


@hole
def calling(s):
    names = ["Affine", "Noisy", "Linear", "Net", *([] if s.values_only else ["Recorder"])]
    found = s.writable(*names)
    if not found:
        return None
    place = s.one(found)
    return f"{place.text}({s.array((2, 2) if type(place.value).__name__ == 'Net' else (2,))})"


HOLES.update(
    kind=lambda s: s.one(FILTERED),
    array=lambda s: s.array(s.one(SHAPES)),
    pair=lambda s: s.array((2,)),
    rows=lambda s: s.array((2, 3)),
    scalar=lambda s: s.scalar(),
    literal=lambda s: s.literal(),
    letter=lambda s: repr(s.one(ATTRIBUTES)),
    node=lambda s: s.node(),
    graph=lambda s: s.node(variables=0),
    object=lambda s: s.node(variables=0, containers=0),
    model=lambda s: s.one(s.models()),
    box=any_of("Box", "Plain"),
    module=any_of("Box"),
    list=any_of("List"),
    dict=any_of("Dict"),
    var=any_of("Variable"),
    written=any_of("Pytree"),
    affine=any_of("Affine"),
    recorder=any_of("Recorder", "Affine"),
)

# Statements ---------------------------------------------------------------------------------------------

table(r"""
new_model 2.0
    $m = $new_model
new_ensemble 1.0
    $m = $ensemble
write_variable 3.0 body
    $write
write_array 0.6 body
    $rebind
call_module 0.8 body
    $y = $calling
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
metadata 0.5
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
    $m = Box(a=nnx.Param($array), b=Count($scalar), c=nnx.BatchStat($pair)) ; $s = nnx.pop($m, <<Count|nnx.BatchStat|nnx.Param>>)
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
    $u = jax.tree_util.tree_map_with_path(lambda path, x: len(path), <<$state|$node>>)
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
    $m = nnx.view($object, <<deterministic|use_running_average>>=True, raise_if_not_found=False)
    $u = nnx.with_attributes($object, <<d=11|only=Box, e='other'>>, raise_if_not_found=False)
variable_methods 0.7
    $r = $var.<<copy()|replace(jnp.ones(2))|replace(note=3)|to_state()|get_metadata()|has_metadata('tag')|get_metadata('tag', None)|type>>
    $r = $var.shape, $var.ndim, str($var.dtype)
    $r = <<$var * 2 + $var|-$var, abs($var)|jnp.sum($var[...])|nnx.is_data($var)>>
    $r = nnx.variable_name_from_type(type($var), allow_register=type($var) is not nnx.Variable)
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
