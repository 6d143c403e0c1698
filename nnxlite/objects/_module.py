"""`Module`: the base of layers and models.

A Module is a `Pytree` that can also record values of a forward pass (`sow`, `perturb`), set modes
on itself and all modules below it (`train`, `eval`, `set_attributes`), and iterate over its parts.

A recorded value becomes an attribute of the module that recorded it, or, inside `nnx.capture`, of its
record.  The record is in an attribute as well (`__captures__`), so that it passes through transforms
like any other state.
"""

from __future__ import annotations

import types
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.config import GRAPH_MODE, SOW_ONLY_IN_CAPTURE
from nnxlite._base.errors import short_type
from nnxlite.filters import Filter, to_predicate
from nnxlite.graph._plan import checked_view, nodes_by_number
from nnxlite.graph._rebuild import Path
from nnxlite.graph._walk import children_of_node, iter_children, iter_graph
from nnxlite.objects._frozen import freeze
from nnxlite.objects._pytree import Pytree
from nnxlite.objects._scopes import scoped
from nnxlite.variables._definition import MISSING
from nnxlite.variables._kinds import Perturbation, variable_name_from_type, variable_type_from_name
from nnxlite.variables._variable import Variable

T = tp.TypeVar("T")
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
            freeze(cls)
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
    _set_or_restore(writes)


def _set_or_restore(writes: tp.Sequence[tuple[Module, str, tp.Any]]) -> None:
    """Set attributes of objects; if one rejects its value, restore all of them."""
    before: dict[int, tuple[Module, dict[str, tp.Any], dict[tp.Any, bool]]] = {}
    try:
        for module, name, value in writes:
            former = dict(module._nnx_dict), dict(module._nnx_status)
            setattr(module, name, value)
            before.setdefault(id(module), (module, *former))
    except BaseException:
        for module, attributes, status in before.values():
            module._nnx_renew("__dict__", attributes, status)
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

    >>> from nnxlite.objects import first_from
    >>> first_from(None, False, True, error_msg="give `deterministic`")
    False
    """
    for arg in args:
        if arg is not None:
            return arg
    raise ValueError(error_msg)
