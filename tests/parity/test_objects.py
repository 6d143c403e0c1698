"""Objects, Variables, States and graphs beside the reference: lines that give the same with both."""

import copy
import dataclasses
import functools
import pickle
import typing as tp

import jax
import jax.numpy as jnp
import pytest

from tests.parity.programs import Lines, Programs, models

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference warns of its own plans

lines = Lines()
program = Programs()
X = jnp.array([1.0, 2.0])

# What is data ---------------------------------------------------------------------------------------


def holders(lib):
    class Holder(lib.Module):
        def __init__(self, value=1):
            self.v = value

    class Loose(lib.Object):
        pass

    values = {"a_ref": jax.new_ref(X), "key": jax.random.key(0), "spec": jax.P("a")}
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    return {"Holder": Holder, "Loose": Loose, "m": Holder(), "X": X, "shape": shape, **values}


VALUES = """X np.ones(2) np.float32(1) shape key 1 2.0 'a' None [] [1,2] {'a':1} {1} len jax.jit(len) spec
    jnp.float32 a_ref""".split()
FORMS = "Holder({v}) Holder(lib.data({v})) Holder(lib.static({v})) lib.is_data({v})".split()
lines("status", holders, "\n".join(form.format(v=v) for form in FORMS for v in VALUES))
lines(
    "assigning",
    holders,
    """
    m.v = [1]
    m.v = lib.data(42); m.v = 3
    del m.v; m.v = X
    jax.tree.map(lambda leaf: 'leaf', [Holder(X), Holder(lib.Param(1.0))])
    setattr(Loose(), 'a', [X, X])
    jax.tree_util.all_leaves([type('Off', (lib.Pytree,), {}, pytree=False)()])
    jax.vmap(lambda n: setattr(m, 'v', n))(jnp.arange(3))
    jax.jit(lambda x: lib.Param(x).set_value(x))(X)
    """,
)


@program()
def dataclass_fields(lib):
    @lib.dataclass
    class Foo(lib.Pytree):
        i: int = lib.data()
        x: tp.Any
        a: int
        s: str = lib.static(default="hi", kw_only=True)

    @dataclasses.dataclass(frozen=True)
    class Frozen(lib.Pytree):
        a: tp.Any
        b: int = 3

    foo, frozen = Foo(1, X, 3), Frozen(X)
    names = [f.name for f in dataclasses.fields(Foo)], Foo.__match_args__
    again = lib.merge(*lib.split(frozen)).b, copy.deepcopy(frozen).a
    equal = Foo(1, 2, 3) == Foo(1, 2, 3), hash(Frozen(1)) == hash(Frozen(1))
    return jax.tree.leaves(foo), foo.s, names, again, equal


# Containers -----------------------------------------------------------------------------------------

lines(
    "list",
    lambda lib: {"ls": lib.List([1, X, lib.Dict(w=lib.Param(X))]), "X": X},
    """
    ls[-1] is ls[2]
    type(ls[0:2])
    getattr(ls, '0'), hasattr(ls, '3'), hasattr(ls, '01')
    setattr(ls, '1', lib.Param(7))
    lib.List([1, 'a']) == lib.List([1, 'a']), lib.List() == lib.List(), lib.List([1]) == [1]
    list(lib.state(lib.List([X] * 12)))
    """,
)
lines(
    "dict",
    lambda lib: {"d": lib.Dict(a=1, b=X, c=lib.Dict(w=lib.Param(X))), "X": X},
    """
    d['a'], d.a
    d.q = X
    del d['a']
    d.pop('a')
    d.pop('zz', 3)
    d.update(a=5, z=X)
    d.clear()
    list(d.keys()), 'a' in d, 'zz' in d
    d.setdefault('k', X) is X
    lib.Dict(a=1) == lib.Dict(a=1), lib.Dict(a=1) == lib.Dict(a=2), lib.Dict(a=1) != lib.Dict(a=1)
    lib.Dict(a=1) == {'a': 1}, {'a': 1} == lib.Dict(a=1), lib.Dict() == 3
    lib.Dict(a=lib.Dict(b=1)) == lib.Dict(a=lib.Dict(b=1))
    """,
)

# Variables ------------------------------------------------------------------------------------------


def one_variable(lib):
    log = []
    note = lambda name, by: lambda v, x: (log.append((name, type(v).__name__)), x + by)[1]
    steps = {"get": 1.0, "set": 10.0, "create": 100.0}
    hooked = lib.Param(X, **{f"on_{n}_value": note(n, by) for n, by in steps.items()})

    class Doubling(lib.Variable):
        def get_value(self, **kwargs):
            return super().get_value(**kwargs) * 2

        def set_value(self, value, **kwargs):
            super().set_value(value + 1, **kwargs)

        def create_value(self, value):
            return value + 100

    class Hooked(lib.Variable):
        def on_get_value(self, value):
            return 2 * value

    v, doubling, r = lib.Param(X, tag="t"), Doubling(X), lib.Param(X, ref=True)
    kinds = {"Hooked": Hooked, "pickle": pickle, "metadata": lib.with_metadata}
    return {"v": v, "h": hooked, "log": log, "d": doubling, "r": r, "X": X, **kinds}


lines(
    "variable",
    one_variable,
    """
    [v.shape, v.ndim, v.sum(), v.T, v.tag, v.has_metadata('tag')]
    lib.Param(X, on_get_value=lambda variable, value: value[None]).shape
    v.get_metadata('nope', 3)
    v.set_value(3.0, index=0)
    v[0] = 5.0
    v[...] = 5.0
    v[...] = jnp.array([1, 2])
    v.set_raw_value(3)
    v.set_metadata({'b': 2})
    v.del_metadata('tag')
    [v.copy(), v.copy(X + 1), v.copy(tag='b').tag, v.replace(X + 2)]
    v.replace(ref=True).ref
    v.copy_from(3)
    pickle.loads(pickle.dumps(v))
    [bool(lib.Param(x)) for x in (jnp.ones(3), jnp.zeros(3), np.zeros(1), [])]
    [round(lib.Param(x), 1) for x in (jnp.array([1.25, 2.75]), 2.5, np.float32(2.5))]
    del lib.Variable({'a': 1, 'b': 2})['a']
    del v[0]
    [lib.Variable(x).get_value() for x in (1, None, {'a': 1}, np.ones(2))]
    [h.get_raw_value(), h.get_value(), h[0], h + 0, log]
    h.set_value(X); log.append(h.get_raw_value())
    [h.copy().get_raw_value(), h.replace(X).get_raw_value(), log]
    v.copy_from(h), log
    [Hooked(X).get_raw_value(), Hooked(X).get_value(), Hooked(X, on_get_value=lambda v, x: x + 1).get_value()]
    [d[...], d[0], d.value, d.get_value(), d + 1, jnp.asarray(d), list(d), d.shape]
    d[...] = jnp.array([5.0, 6.0])
    d.set_raw_value(X)
    lib.Param(lib.VariableMetadata(X, metadata={'a': 1}), a=2, b=3).get_metadata()
    lib.Param(metadata(lambda key, shape: jnp.zeros(shape), tag='t')(0, (2,)))
    [r.ref, r.copy().get_raw_value() is r.get_raw_value()]
    r[0] = 5.0; r.set_value(r.get_value() + 1)
    [lib.variable_name_from_type(k) for k in (lib.Param, lib.BatchStat, lib.Cache, lib.Perturbation)]
    dict(lib.var_defaults()), list(lib.var_defaults())
    [kind[int].__origin__ is kind for kind in (lib.State, lib.Param, lib.Sequential, lib.List)]  # newer
    """,
)


@program()
def several_names_of_one_kind(lib):
    kinds = [type(f"Named{i}", (lib.Variable,), {}) for i in range(3)]
    lib.register_variable_name("parity_first", kinds[0])
    lib.register_variable_name("parity_second", kinds[0])
    names = [lib.variable_name_from_type(kinds[0])]
    for name in ("parity_second", "parity_first"):
        lib.register_variable_name(name, kinds[1], overwrite=True)
        names.append(lib.variable_name_from_type(kinds[1]))
    lib.register_variable_name("parity_second", kinds[2], overwrite=True)
    return [*names, lib.variable_name_from_type(kinds[0], allow_register=True)]


# Modules --------------------------------------------------------------------------------------------


def net(lib):
    class Stage(lib.Module):
        def __init__(self, factor=2.0):
            self.w = lib.Param(jnp.array(factor))
            self.deterministic = False

        def __call__(self, x):
            x = self.perturb("inner", self.w * x)
            self.sow(lib.Intermediate, "out", x)
            return x

        def other(self, x):
            self.sow(lib.Intermediate, "other", x)
            return x

    class Net(lib.Module):
        def __init__(self):
            self.a = Stage()
            self.b = self.a
            self.ls = lib.List([Stage(3.0)])
            self.use_running_average = False

        def __call__(self, x):
            return self.ls[0](self.b(self.a(x)))

    class Viewed(lib.Module):
        def __init__(self):
            self.w = lib.Param(X)
            self.deterministic, self.size = False, 1

        def set_view(self, deterministic: bool | None = None, size: int | None = None):
            """Sets the mode.

            Args:
              deterministic: whether to drop nothing,
                and need no key.
              size: of it.
            """
            if deterministic is not None:
                self.deterministic = deterministic
            self.size = self.size if size is None else size

    class Open(lib.Module):
        def set_view(self, **kwargs):
            self.seen = tuple(sorted(kwargs))

    def modes(m):
        same = m.a is m.b, m.a is view.a, m.a.w is view.a.w
        return [(v.deterministic, v.size) for v in (m.a, m.c)], same

    m, stage, first = Net(), Stage(), Viewed()
    view = lib.Dict(a=first, b=first, c=Viewed())
    ones = jax.tree.map(jnp.ones_like, lib.capture(Net(), lib.Perturbation)(X)[1])
    kinds = {"I": lib.Intermediate, "P": lib.Perturbation, "Path": lib.PathContains}
    kinds |= {"C": lib.capture, "Open": Open, "X": X}
    return {"m": m, "stage": stage, "view": view, "modes": modes, "ones": ones, **kinds}


lines(
    "module",
    net,
    """
    (m(X), lib.pop(m, I))
    stage.sow(lib.Variable, 's', 1.0, reduce_fn=lambda a, b: a + b, init_fn=lambda: 0.0), stage.s
    (stage.sow('made_here', 'm', 1), type(stage.m).__name__)
    stage.perturb('p', X), stage.perturb('p', X), stage.p
    stage.perturb('q', jnp.array([1, 2]), 'named_kind'), type(stage.q).__name__
    [stage.sow(I, 's', X, capture_noop=True), stage.perturb('p', X, capture_noop=True)]  # newer
    C(m.a.other, I)(X)
    C(lambda m, x: m(x) * 2, I)(m, X)
    C(lambda ms, x: ms[0](x), I)([m], X)
    C(I)(m)(X)
    C(lambda m, x: C(m, I)(x), I)(m, X)
    C(lib.jit(lambda m, x: m(x)), I)(m, X)
    lib.jit(C(lambda m, x: m(x), I))(m, X)
    jax.jit(C(lambda m, x: m(x), I, P))(m, X)
    jax.jit(C(m, I))(X)
    C(lambda m, x: lib.grad(lambda m: m(x).sum())(m), I)(m, X)  # newer
    C(lambda x: x, I)(X)
    C(m, I, lib.Cache, method_outputs=lib.Cache)(X)
    C(m, I, method_outputs=lib.Cache)(X)
    C(m, P, init=ones)(X)
    C(m, init=ones)(X)
    stage.out = I((jnp.zeros(()),)); C(stage, I, P)(X)
    m.eval(); X + m.a.deterministic + m.use_running_average
    m.train(nowhere=1)
    m.train(deterministic=True)
    (m.set_attributes(deterministic=3), m.a.deterministic, m.ls[0].deterministic)
    (m.set_attributes(Path('ls'), deterministic=3), m.a.deterministic, m.ls[0].deterministic)
    (m.set_attributes(Path('ls'), Path('a'), deterministic=3), m.a.deterministic)
    (m.set_attributes(type(m), use_running_average=3), m.use_running_average)
    m.set_attributes(foo=1, raise_if_not_found=False)
    m.set_attributes(Path('zz'), deterministic=3)
    m.set_attributes(update=1)
    m.set_attributes()
    [(p, type(x).__name__) for p, x in m.iter_modules()]
    [(p, type(x).__name__) for p, x in lib.iter_modules([m, 3])]
    [(p, type(x).__name__) for p, x in m.iter_children()]
    [(p, type(x).__name__) for p, x in lib.iter_module_children([m, 3])]
    [(p, type(x).__name__) for p, x in lib.iter_children(m.a)]
    modes(lib.view(view, only=Path('c'), deterministic=True))
    modes(lib.view(view, deterministic=True, size=3))
    modes(lib.view(view))
    modes(lib.view(view, only=Path('a'), foo=1, raise_if_not_found=False))
    modes(lib.with_attributes(view, only=Path('c'), deterministic=True))
    lib.view_info(view, only=Path('c'))
    lib.view(Open(), foo=1, bar=2).seen
    [v.a.w.ref for v in (lib.with_vars(m, ref=True), lib.vars_as(m, ref=True, only=Path('ls')), m)]
    lib.with_vars(view, ref=True, allow_duplicates=True).a.w.ref
    lib.with_vars(m) is m
    lib.with_vars(lib.Dict(a=stage.w, b=stage.w), ref=True)
    """,
)


@program()
def private_names_of_ones_own(lib):
    class Padded(lib.Conv):
        def __init__(self):
            super().__init__(1, 1, (3,), padding="CAUSAL", rngs=lib.Rngs(0))
            self._wrap = self._inner = self._record = self._add = self._window = lib.Param(1.0)

        def _pad(self, x):
            return x * self._inner

        def __call__(self, x):
            x = self.perturb("x", super().__call__(self._pad(x)))
            self.sow(lib.Intermediate, "mean", x.mean())
            return x

    model = Padded()
    x = model(jnp.ones((1, 4, 1)))
    state = lib.state(model)
    captured = lib.capture(model, lib.Intermediate, lib.Perturbation)(jnp.ones((1, 4, 1)))
    return x, state, state["_add"] is state._add, captured[1]


# Graphs ---------------------------------------------------------------------------------------------


def shared(lib):
    """A module with a Variable at two places, another one, and something static."""
    make = lambda size=3: (lambda p: lib.Dict(
        a=p, rest=lib.List([p, 5]), b=lib.BatchStat(jnp.zeros(3)), size=size
    ))(lib.Param(jnp.ones(2)))  # fmt: skip
    doubled = lambda tree: jax.tree.map(lambda x: 2 * x, tree)
    keys = lambda t: [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(t)]
    m, packed, held = make(), lib.unpack(make()), lib.Cache({"k": jnp.ones(2)})
    v, other = lib.Param(jnp.arange(3.0)), lib.BatchStat(jnp.ones(2), tag="t")
    st, up, Counted = lib.state, lib.update, models(lib).Counted
    return {"X": X, **{name: x for name, x in locals().items() if name != "lib"}}


lines(
    "graph",
    shared,
    """
    lib.merge(*lib.unpack(make(), lib.Param, ...))
    lib.merge(lib.graphdef(m), lib.unpack(m, lib.Param, ...)[0], st(m, lib.BatchStat))
    lib.merge(st(m), packed)
    keys(packed), keys(packed) == keys(st(m))
    lib.merge(jax.jit(doubled)(packed))
    lib.merge(jax.tree_util.tree_map_with_path(lambda p, x: len(p), packed))
    packed.b = lib.BatchStat(jnp.ones(3)); m.c = lib.merge(packed)
    packed.pop('b'), dict(packed)
    packed.nothing
    del packed['a']; lib.merge(packed)
    lib.merge(lib.graphdef(m), jax.tree.leaves(st(m)))
    lib.merge(lib.graphdef(m), jax.tree.leaves(st(m))[:1])
    lib.merge(lib.graphdef(m), lib.pure(st(m)), recreate_variables=True)
    lib.merge(lib.graphdef(m), lib.pure(st(m)), recreate_variables=False)
    lib.map(lambda path, v: 2 * v[...], m, recreate_variables=False)
    up(v, *doubled(lib.split(v, lib.Param, ...)[1:]))
    up(v, *doubled(lib.split(v, lib.BatchStat, ...)[1:]))
    up(held, {'k': jnp.zeros(2)})
    up(held, lib.State({}))
    up(v, jnp.ones(3), jnp.zeros(3))
    up(m, jax.tree.map(jnp.sum, st(m)))
    lib.jit(lambda m: up(m, jax.tree.map(lambda x: x[:1], st(m))))(m)
    m.c = jnp.zeros(3); up(m, {'c': other})
    m.d = lib.data(2.0); up(m, {'d': other})
    lib.jit(lambda m: up(m, {'b': lib.Param(jnp.ones(2))}))(m)
    up(m, lib.State({'b': lib.BatchStat(X, tag=1)}), {'b': jnp.zeros(2)})
    up(m, lib.State({'b': lib.BatchStat(jnp.ones(3), tag=1)}), lib.State({'b': lib.BatchStat(jnp.zeros(3))}))
    up({'lr': 0.1, 'w': v}, {'lr': 0.2})
    up([0.1, v], {0: 0.2})
    lib.graphdef([1, 'x']) == lib.graphdef([2, 'x']), lib.graphdef(m).nodes[0].type is type(m)
    jax.tree.leaves(lib.prefix([m, jnp.ones(3)], {lib.Param: 0, ...: 1}, graph=True))
    lib.call(lib.split(lib.Dict(inner=Counted()))).inner(2.0)[0]
    (lambda g, *s: g.apply(*s).inner(2.0)[0])(*lib.split(lib.Dict(inner=Counted()), lib.Param, ...))
    [lib.unflatten(*lib.flatten(x, with_paths=False)) for x in (v, held, jnp.arange(3.0), 2.5)]
    [lib.merge(*lib.split(x, lib.BatchStat, ...)) for x in (v, held, jnp.arange(3.0), 2.5)]
    [lib.flatten(x, with_paths=False)[1] for x in ({'x': 0.5, 'y': v}, [True, None, v], [np.ones(2), [(v,)]])]
    list(lib.iter_children(3))
    lib.recursive_map(lambda path, x: 7 if path[-1:] == ('size',) else x, m)['size']
    [(p, type(x).__name__) for p, x in lib.iter_graph([m, 3, None, 'x']) if not {'_pytree__state', '_pytree__nodes', '_length'} & {*p}]
    """,
)


@program()
def contexts_are_nested(lib):
    a, v = models(lib).Counted(), lib.Param(jnp.arange(3.0))
    with lib.update_context("outer"), lib.update_context("inner"):
        with lib.split_context("outer") as outer, lib.split_context("inner") as inner:
            one, two = outer.split(a, lib.Param, ...), inner.flatten(v)
        with lib.merge_context("inner", inner=True) as inner:
            inside = inner.unflatten(*two)
        inside[...] = 2 * inside[...]
        with lib.split_context("inner") as inner:
            two = inner.flatten(inside)
        with lib.merge_context("inner", inner=False) as inner:
            same = inner.unflatten(*two) is v
        with lib.merge_context("outer", inner=True) as outer:
            copy = outer.merge(*one)
    return same, v, copy is a, copy


# Tables ---------------------------------------------------------------------------------------------


def tables(lib):
    class Net(lib.Module):
        def __init__(self, rngs):
            self.inner = lib.Linear(3, 8, rngs=rngs)
            self.norm = lib.BatchNorm(8, rngs=rngs)
            self.drop = lib.Dropout(0.5, rngs=rngs)
            self.out = lib.Linear(8, 2, rngs=rngs)

        def __call__(self, x):
            return self.encode(x, 1.0)

        def encode(self, x, scale):
            return self.out(self.drop(self.norm(self.inner(x)))) * scale

    def rows(layer, shape):
        """The rows of a table, and the fields of a row."""
        seen, all_rows = [], lambda row: seen.append(row) or True
        options = {"compute_flops": True, "compute_vjp_flops": True}
        lib.tabulate(layer, jnp.ones(shape), row_filter=all_rows, **options)
        fields = sorted(vars(seen[0]) if hasattr(seen[0], "__dict__") else seen[0]._fields)
        return fields, [(row.path, row.type.__name__, row.flops, row.vjp_flops) for row in seen]

    options = {"console_kwargs": {"width": 200, "force_terminal": False}}
    table = functools.partial(lib.tabulate, Net(lib.Rngs(0)), jnp.ones((4, 3)), **options)
    return {"table": table, "rows": rows, "rngs": lib.Rngs(0)}


lines(
    "tables",
    tables,
    """
    table()
    table(depth=0)
    table(depth=1)
    table(method="encode", scale=2.0)
    table(table_kwargs={"show_edge": False}, column_kwargs={"justify": "right"})
    rows(lib.Linear(16, 4, rngs=rngs), (4, 16))
    rows(lib.Conv(3, 4, (3, 3), rngs=rngs), (2, 8, 8, 3))
    [rows(kind(16, rngs=rngs), (4, 16)) for kind in (lib.BatchNorm, lib.LayerNorm, lib.RMSNorm)]
    """,
)


test_line = lines.test()


test_program = program.test()
