"""`Module`: the base of layers and models.

A Module is a `Pytree` that can also record values of a forward pass (`sow`, `perturb`), set modes
on itself and all modules below it (`train`, `eval`, `set_attributes`), and iterate over its parts.

A recorded value becomes an attribute of the module that recorded it, or, inside `nnx.capture`, of its
record.  The record is in an attribute as well (`__captures__`), so that it passes through transforms
like any other state.

While JAX records a program, each call of a module runs in a `jax.named_scope` for profiles, HLO and
messages: the outermost module by its class, those inside it by their path.
"""

from __future__ import annotations

import functools
import threading
import types
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import (
    GRAPH_MODE,
    NAMED_SCOPES,
    SOW_ONLY_IN_CAPTURE,
    listed,
    path_text,
    short_type,
)
from nnxlite._base.jax import EAGER, drop_hidden_frames, is_deleted, is_recording, trace_state
from nnxlite.filters import Filter, to_predicate
from nnxlite.graph._plan import checked_view, nodes_by_number
from nnxlite.graph._rebuild import Path, entered_objects
from nnxlite.graph._walk import children_of_node, iter_children, iter_graph
from nnxlite.objects._pytree import Pytree, freeze_class
from nnxlite.variables._definition import MISSING
from nnxlite.variables._kinds import Perturbation, variable_name_from_type, variable_type_from_name
from nnxlite.variables._variable import Variable

__all__ = ["Module", "iter_module_children", "iter_modules"]

T = tp.TypeVar("T")
C = tp.TypeVar("C", bound=tp.Callable[..., tp.Any])
Kind: tp.TypeAlias = type[Variable[tp.Any]]

CAPTURES = "__captures__"
"""Name of the attribute for the record of a capture."""


def _append(values: tp.Any, value: tp.Any) -> tp.Any:
    return (*values, value)


class Module(Pytree):
    """Base of layers and models.

    Attributes that are arrays, Variables or objects are data: `state`, `grad` and the transforms
    see them. All others are settings, part of the structure. Assign layers to attributes, or put
    them into a `List` or `Dict`. An object may be at several paths: it stays one object through
    every transform.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> class Double(nnx.Module):
    ...     def __init__(self):
    ...         self.factor = nnx.Param(jnp.array(2.0))
    ...     def __call__(self, x):
    ...         return self.factor * x
    >>> Double()(3.0)
    Array(6., dtype=float32, weak_type=True)

    What concerns a whole model starts at its root:

    >>> class Net(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])
    ...         self.dropout = nnx.Dropout(0.5, rngs=rngs)
    ...     def __call__(self, x):
    ...         for layer in self.layers:
    ...             x = self.dropout(layer(x))
    ...         return x
    >>> net = Net(nnx.Rngs(0))
    >>> net.eval()
    >>> net(jnp.ones((1, 2))).shape, net.dropout.deterministic
    ((1, 2), True)
    >>> sorted(nnx.state(net, nnx.Param)["layers"])
    [0, 1]

    With `class Foo(nnx.Module, frozen=True)` instances are immutable; see `nnxlite.field`.
    """

    __slots__ = ()

    def __init_subclass__(cls, *, frozen: bool = False, **kwargs: tp.Any) -> None:
        super().__init_subclass__(**kwargs)
        if frozen or cls._nnx_frozen:
            cls._nnx_frozen = True
            freeze_class(cls)
        call = cls.__dict__.get("__call__")
        if isinstance(call, types.FunctionType):
            cls.__call__ = scoped(call)

    # recording -------------------------------------------------------------------------------

    def sow(
        self,
        variable_type: Kind | str,
        name: str,
        value: tp.Any,
        reduce_fn: tp.Callable[[tp.Any, tp.Any], tp.Any] = _append,
        init_fn: tp.Callable[[], tp.Any] = tuple,
        capture_noop: bool | None = None,
    ) -> bool:
        """Record a value under a name, to be read, popped or captured after the call.

        Args:
            variable_type: the kind of Variable to record in, or its registered name.
            name: name of the attribute.
            value: what to record, any pytree.
            reduce_fn: combines what is recorded so far with the value; by default appends to a tuple.
            init_fn: returns what is recorded before the first value; by default an empty tuple.
            capture_noop: True means to record nothing outside `nnx.capture`.

        Returns:
            Whether anything was recorded: inside `nnx.capture`, only the kinds it asks for are.

        Raises:
            ValueError: if the name is that of another attribute, or of a Variable of another kind.

        >>> import nnxlite as nnx
        >>> class Halve(nnx.Module):
        ...     def __call__(self, x):
        ...         self.sow(nnx.Intermediate, "seen", x)
        ...         return x / 2
        >>> halve = Halve()
        >>> halve(halve(8.0))
        2.0
        >>> nnx.pop(halve, nnx.Intermediate)["seen"].value
        (8.0, 4.0)
        """

        def reduced(so_far: tp.Any) -> tp.Any:
            return reduce_fn(init_fn() if so_far is MISSING else so_far, value)

        recorded = self._nnx_recorded("sow", variable_type, name, capture_noop, reduced)
        return recorded is not MISSING

    def perturb(
        self,
        name: str,
        value: T,
        variable_type: str | Kind = Perturbation,
        capture_noop: bool | None = None,
    ) -> T:
        """Add a Variable, zero at first, to a value: its gradient is that of the value.

        The first call makes the Variable (zeros of the value's shape and dtype); differentiate a
        later call with respect to it.

        Args:
            name: name of the attribute.
            value: an intermediate value, any pytree of arrays.
            variable_type: the kind of Variable, or its registered name.
            capture_noop: True means to return the value unchanged outside `nnx.capture`.

        Returns:
            The sum; or the value itself inside a `nnx.capture` that does not ask for this kind.

        Raises:
            ValueError: if the name is that of another attribute, or the structure or shape of the
                value is not that of the Variable.

        >>> import nnxlite as nnx, jax.numpy as jnp
        >>> class Square(nnx.Module):
        ...     def __call__(self, x):
        ...         return (self.perturb("inner", 2 * x) ** 2).sum()
        >>> square, x = Square(), jnp.array([1.0, 3.0])
        >>> _ = square(x)
        >>> graphdef, inner = nnx.split(square)
        >>> jax.grad(lambda inner: nnx.merge(graphdef, inner)(x))(inner)["inner"].value
        Array([ 4., 12.], dtype=float32)
        """

        def unchanged(so_far: tp.Any) -> tp.Any:
            return jax.tree.map(jnp.zeros_like, value) if so_far is MISSING else so_far

        recorded = self._nnx_recorded("perturb", variable_type, name, capture_noop, unchanged)
        return value if recorded is MISSING else self._nnx_add(name, recorded, value)

    def _nnx_recorded(
        self,
        method: str,
        variable_type: Kind | str,
        name: str,
        capture_noop: bool | None,
        change: tp.Callable[[tp.Any], tp.Any],
    ) -> tp.Any:
        """Record `change(so_far)` (of MISSING for nothing), and return it; MISSING if it is refused."""
        kind = _kind(variable_type)
        record: tp.Any
        (record,) = self._nnx_dict.get(CAPTURES, (None,))
        owner: tp.Any = record or self
        if record is None:
            refuses = SOW_ONLY_IN_CAPTURE.given(capture_noop)
        else:
            refuses = kind not in record.__kinds__
        if refuses:
            return MISSING
        recorded = getattr(owner, name, MISSING)
        if recorded is MISSING:
            recorded = kind(change(MISSING))
            setattr(owner, name, recorded)
            return recorded.get_value()
        if type(recorded) is not kind:
            found, remedy = type(recorded).__name__, "Record under another name"
            expected = f"a Variable, got {found}"
            if isinstance(recorded, Variable):
                expected = f"of type '{kind.__name__}', got '{found}'"
                remedy += f", or remove it first: nnx.pop(model, nnx.{found})"
            raise ValueError(
                f"{type(self).__name__}.{method}: Expected {name!r} to be {expected}. {remedy}."
            )
        so_far = recorded.get_value()
        new = change(so_far)
        if new is not so_far:
            recorded.set_value(new)
        return new

    def _nnx_add(self, name: str, perturbation: tp.Any, value: tp.Any) -> tp.Any:
        same_structure = jax.tree.structure(perturbation) == jax.tree.structure(value)
        if not same_structure or not all(
            jax.tree.leaves(jax.tree.map(_broadcasts, perturbation, value))
        ):
            raise ValueError(
                f"{type(self).__name__}.perturb: the perturbation {name!r} was made for "
                f"{_forms(perturbation)}, and the value is {_forms(value)}. Remove it with "
                "nnx.pop(model, nnx.Perturbation), and call the model once to make a new one."
            )
        return jax.tree.map(jnp.add, perturbation, value)

    # modes -----------------------------------------------------------------------------------

    def train(self, **attributes: tp.Any) -> None:
        """Set training mode on this module and all below it.

        Existing attributes `deterministic` and `use_running_average` become False.

        Args:
            attributes: further attributes to set, as in `set_attributes`.

        >>> import nnxlite as nnx
        >>> model = nnx.Sequential(nnx.Dropout(0.5, deterministic=True, rngs=nnx.Rngs(0)))
        >>> model.train()
        >>> model.layers[0].deterministic
        False
        """
        self.set_attributes(
            deterministic=False, use_running_average=False, raise_if_not_found=False, **attributes
        )

    def eval(self, **attributes: tp.Any) -> None:
        """Set evaluation mode on this module and all below it.

        Existing attributes `deterministic` and `use_running_average` become True.

        Args:
            attributes: further attributes to set, as in `set_attributes`.

        >>> import nnxlite as nnx
        >>> model = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
        >>> model.eval()
        >>> model.layers[0].deterministic
        True
        """
        self.set_attributes(
            deterministic=True, use_running_average=True, raise_if_not_found=False, **attributes
        )

    def set_attributes(
        self,
        *filters: Filter,
        raise_if_not_found: bool = True,
        graph: bool | None = None,
        **attributes: tp.Any,
    ) -> None:
        """Set attributes on those of this module and all below it that have them already.

        Args:
            filters: select the modules that any of them matches; without filters, all.
            raise_if_not_found: whether each attribute must exist in some module.
            graph: False refuses shared references.
            attributes: names and new values.

        Raises:
            ValueError: for an attribute that no module has, or a value that an attribute rejects.
                No attribute has changed then.

        >>> import nnxlite as nnx
        >>> model = nnx.Dict(a=nnx.Dropout(0.5), b=nnx.Dropout(0.5))
        >>> model.set_attributes(nnx.PathContains("a"), rate=0.1)
        >>> model.a.rate, model.b.rate
        (0.1, 0.5)
        """
        set_existing(self, filters or ..., attributes, raise_if_not_found, graph)

    # parts -----------------------------------------------------------------------------------

    def iter_modules(self) -> tp.Iterator[tuple[Path, Module]]:
        """Every (path, module) of this module and all below it; see `nnx.iter_modules`."""
        return iter_modules(self)

    def iter_children(self) -> tp.Iterator[tuple[tp.Any, tp.Any]]:
        """The (name, child) pairs of the direct children; see `nnx.iter_children`."""
        return iter_children(self)


def is_kind(value: tp.Any) -> tp.TypeGuard[Kind]:
    """Whether a value is a kind of Variable."""
    return isinstance(value, type) and issubclass(value, Variable)


def _kind(given: Kind | str) -> Kind:
    if isinstance(given, str):
        return variable_type_from_name(given, allow_register=True)
    if is_kind(given):
        return given
    raise TypeError(
        f"Expected a Variable class or its registered name, such as nnx.Intermediate or "
        f"{variable_name_from_type(Perturbation)!r}, got {given!r}."
    )


def _broadcasts(perturbation: tp.Any, value: tp.Any) -> bool:
    """Whether the sum with `perturbation` has the shape of the value."""
    try:
        return jnp.broadcast_shapes(np.shape(perturbation), np.shape(value)) == np.shape(value)
    except ValueError:
        return False


def _forms(value: tp.Any) -> str:
    return str(jax.tree.map(lambda x: short_type(jnp.asarray(x)), value))


def set_existing(
    node: tp.Any,
    only: Filter,
    attributes: tp.Mapping[str, tp.Any],
    raise_if_not_found: bool,
    graph: bool | None = None,
) -> None:
    """Set attributes on the modules of a graph that a filter matches and that have them already.

    Raises ValueError, before anything is set, for an attribute that none of them has.
    """
    chosen: list[Module] | None = None
    if only is not ...:
        matches = to_predicate(only)
        chosen = [m for path, m in iter_modules(node, graph=graph) if matches(path, m)]
    elif not GRAPH_MODE.given(graph):
        checked_view(node, graph, "set_attributes")
    graphdef, node_of = nodes_by_number(node)
    missing, writes = set(attributes), []
    for name, value in attributes.items():
        modules: tp.Iterable[Module | None] = chosen or ()
        if chosen is None:  # where many have the value already, one of these stands for all
            modules = map(node_of, graphdef.candidates(Module, name, value))
        for module in modules:
            if module is None:
                continue
            old = module._nnx_dict.get(name, MISSING)
            if old is MISSING and getattr(module, name, MISSING) is MISSING:
                continue
            missing.discard(name)
            if old is not value:
                writes.append((module, name, value))
    if missing and raise_if_not_found:
        raise ValueError(
            f"Could not find at least one instance of the following attributes: {sorted(missing)}. "
            f"No module in this {type(node).__name__} that the filters match has them; correct the "
            "names, or pass raise_if_not_found=False."
        )
    before: dict[int, tuple[Module, dict[str, tp.Any], dict[tp.Any, bool]]] = {}
    try:
        for module, name, value in writes:
            former = dict(module._nnx_dict), dict(module._nnx_status)
            setattr(module, name, value)
            before.setdefault(id(module), (module, *former))
    except BaseException:  # one rejects its value: restore all
        for changed, values, status in before.values():
            changed._nnx_renew("__dict__", values, status)
        raise


def iter_modules(
    module: tp.Any, /, *, graph: bool | None = None
) -> tp.Iterator[tuple[Path, Module]]:
    """Every (path, module) of a graph, the root included; each module once, children first.

    Args:
        module: a Module, or any pytree with modules.
        graph: False refuses shared references.

    Returns:
        An iterator of pairs; a path is a tuple of names, keys and indices.

    >>> import nnxlite as nnx
    >>> model = nnx.Dict(head=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> [(path, type(m).__name__) for path, m in nnx.iter_modules(model)]
    [(('head',), 'Linear'), ((), 'Dict')]
    """
    for path, value in iter_graph(module, graph=graph):
        if isinstance(value, Module):
            yield path, value


def iter_module_children(
    node: tp.Any, /, *, graph: bool | None = None
) -> tp.Iterator[tuple[tp.Any, Pytree]]:
    """The (name, object) pairs of the direct children that are graph objects, without Variables.

    Args:
        node: a graph object or a plain container.
        graph: accepted for compatibility; direct children cannot form a cycle.

    Returns:
        An iterator of pairs.

    >>> import nnxlite as nnx
    >>> model = nnx.Dict(head=nnx.Linear(2, 3, rngs=nnx.Rngs(0)), scale=nnx.Param(1.0))
    >>> [name for name, child in nnx.iter_module_children(model)]
    ['head']
    """
    for name, child in children_of_node(node):
        if isinstance(child, Pytree):
            yield name, child


def first_from(*args: T | None, error_msg: str) -> T:
    """The first argument that is not None, such as a flag of the call before one of the layer.

    Raises ValueError, with `error_msg`, if all are None.

    >>> from nnxlite.objects._module import first_from
    >>> first_from(None, False, True, error_msg="give `deterministic`")
    False
    """
    for arg in args:
        if arg is not None:
            return arg
    raise ValueError(error_msg)


Parts: tp.TypeAlias = dict[int, tuple[Path, tp.Any]]
"""The nodes in an object, with their paths, by `id`."""


class _Calls(threading.local):
    """The modules whose calls are running in a thread, outermost first.

    With each, where its call has a scope, its parts as far as they are known.
    """

    def __init__(self) -> None:
        self.running: list[tuple[tp.Any, Parts | None]] = []


_calls = _Calls()


def scoped(call: C) -> C:
    """The `__call__` of a module class, as one that names the operations it records.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> class Net(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs)])
    ...     def __call__(self, x):
    ...         return jnp.sin(self.layers[0](x))
    >>> net = Net(nnx.Rngs(0))
    >>> program = jax.make_jaxpr(lambda x: net(x))(jnp.ones((1, 2)))
    >>> [str(eqn.source_info.name_stack) for eqn in program.eqns][-3:]
    ['Net/layers/0', 'Net/layers/0', 'Net']
    """

    @functools.wraps(call)
    def __call__(self: tp.Any, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        return called(call, self, *args, **kwargs)

    return tp.cast(C, __call__)


def called(call: tp.Any, module: tp.Any, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
    """Call a module; inside a trace, in a scope with its name."""
    running = _calls.running
    again = bool(running) and running[-1][0] is module  # such as by `super().__call__`
    is_eager = trace_state.value is EAGER
    has_scope = not (is_eager or again) and NAMED_SCOPES.get() and is_recording()
    name = _scope_name(module, running) if has_scope else ""
    depth = len(running)
    try:
        running.append((module, {} if has_scope else None))
        if not has_scope:
            return call(module, *args, **kwargs)
        with jax.named_scope(name):
            return call(module, *args, **kwargs)
    except Exception as error:
        note_deleted(error, type(module).__name__, lambda: variables_by_path(module))
        if not is_eager and not hasattr(error, "_nnx_layer"):
            vars(error)["_nnx_layer"] = layer_name(module)  # of the innermost one
        drop_hidden_frames(error)
        raise
    finally:
        del running[depth:]  # also where an interrupt came before the first line


def _scope_name(module: tp.Any, running: list[tuple[tp.Any, Parts | None]]) -> str:
    """The path in the module whose call is running, or the class and path of the outermost model."""
    around = next(((m, parts) for m, parts in reversed(running) if parts is not None), None)
    if around is not None:
        parent, parts = around
        if id(module) not in parts:  # as where the call made it
            parts.update(nodes_by_id(parent))
        if id(module) in parts:
            return "/".join(map(str, parts[id(module)][0]))
    owner, path = owner_of(module, entered_objects()) or (module, ())
    outermost = [type(owner).__name__] if around is None or not path else []
    return "/".join([*outermost, *map(str, path)])


def owner_of(layer: tp.Any, candidates: tp.Iterable[tp.Any]) -> tuple[tp.Any, Path] | None:
    """The first object of some that contains a layer, and its path there; None if there is none."""
    for owner in candidates:
        if owner is not layer:
            path, _ = nodes_by_id(owner).get(id(layer), (None, None))
            if path is not None:
                return owner, path
    return None


def nodes_by_id(owner: tp.Any) -> Parts:
    """Everything in an object; nothing if that is half built."""
    try:
        return {id(value): (path, value) for path, value in iter_graph(owner)}
    except Exception:  # the message that needs the name matters more
        return {}


def layer_name(layer: tp.Any) -> str:
    """For example "Linear at `blocks.1` of Net", or "Linear" if no model that contains it is known."""
    name = type(layer).__name__
    found = owner_of(layer, [*entered_objects(), *(module for module, _ in _calls.running)])
    if found is None:
        return name
    owner, path = found
    return f"{name} at `{path_text(path)}` of {type(owner).__name__}"


def note_layer(error: Exception, layer: tp.Any) -> None:
    """Add a note to an error raised by a function that a layer called: the name of that layer."""
    error.add_note(f"This was called by {layer_name(layer)}.")


def note_deleted(
    error: Exception, of: str, named: tp.Callable[[], tp.Iterable[tuple[str, tp.Any]]]
) -> None:
    """Add a note to JAX's error for a deleted array: which arrays are gone, and how to keep a copy.

    Args:
        error: any error; only that one gets the note, once.
        of: what was called.
        named: gives its arrays, or pytrees of arrays, by name.
    """
    if type(error) is not RuntimeError or "has been deleted" not in str(error):
        return
    if any(_COPY in note for note in getattr(error, "__notes__", ())):
        return  # of a module inside this one
    gone = [
        name for name, value in named() if any(map(is_deleted, jax.tree_util.tree_leaves(value)))
    ]
    if gone:
        error.add_note(
            f"The arrays at {listed(gone)} of {of} are gone: a call that donates has reused their "
            "memory. An object that nnx.clone or nnx.merge has made shares its arrays with the first. "
            f"{_COPY}, before that call, makes a copy with arrays of its own."
        )


_COPY = "nnx.clone(model, arrays=True)"


def variables_by_path(owner: tp.Any) -> list[tuple[str, tp.Any]]:
    """The values of the Variables in an object."""
    parts = nodes_by_id(owner).values()
    return [(path_text(path), v.get_raw_value()) for path, v in parts if isinstance(v, Variable)]
