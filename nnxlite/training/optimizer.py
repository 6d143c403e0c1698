"""`Optimizer`: any optax transformation, with its state in Variables.

The parameters are those that the filter `wrt` selects, as a nested `State`.  Optax initialises its
state from this State of Variables, and updates it with arrays in place of the Variables.  The tree of
its state is preserved: an array that corresponds to a parameter (a moment, an average) becomes an
`OptVariable` with that parameter's metadata, sharding included; any other array (a count, a learning
rate) becomes an `OptArray`.

An update works on flat lists of leaves and is atomic: first the gradients are compared with the
parameters, then the results of optax are checked, and only then is anything written.

A parameter that is frozen when an optimizer is made has no state in it; once unfrozen, its state is
added by the next update.  A parameter frozen later keeps its place in the state: it gets a zero
gradient, and neither it nor its state is written.

Nothing is broadcast: gradients and state are compared with the parameters by shape, as a number that
broadcasts would train a model that nobody meant.  Gradients may have further leading axes, since some
transformations (of differential privacy) reduce them.
"""

from __future__ import annotations

import collections
import functools
import traceback
import typing as tp

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from nnxlite._base.captures import captures
from nnxlite._base.errors import filter_text, listed, path_text, short_type, warn_user
from nnxlite._base.jax import Tracer, new_ref
from nnxlite._state._definition import State
from nnxlite._state._flat import filter_state
from nnxlite.filters import All, Filter, Frozen, Not, PathIn
from nnxlite.graph._edit import update as update_node
from nnxlite.graph._functional import state as state_of
from nnxlite.graph._kinds import GraphNode
from nnxlite.graph._walk import iter_graph
from nnxlite.objects._fields import data
from nnxlite.objects._pytree import Pytree
from nnxlite.training._groups import leaving_out
from nnxlite.training._leaves import (
    TreeDef,
    compare,
    flatten,
    is_frozen,
    misshapen,
    pairs,
    paths,
    pure,
    read,
    write_together,
)
from nnxlite.variables._kinds import Param
from nnxlite.variables._metadata import changed_names, place
from nnxlite.variables._variable import Variable, is_variable

M = tp.TypeVar("M")
T = tp.TypeVar("T")
F = tp.TypeVar("F", bound=tp.Callable[..., tp.Any])
Paths: tp.TypeAlias = frozenset[tuple[tp.Any, ...]]

_NO_PATHS: Paths = frozenset()


class Transformation(tp.Protocol):
    """The methods of an optax transformation that an `Optimizer` needs; `optax.MultiSteps` has them."""

    @property
    def init(self) -> tp.Callable[[tp.Any], tp.Any]:
        """Maps parameters to the initial state of the transformation."""
        ...

    @property
    def update(self) -> tp.Callable[..., tuple[tp.Any, tp.Any]]:
        """Maps gradients, state and parameters to updates and the next state."""
        ...


class OptState(Variable[T]):
    """A Variable that belongs to an optimizer: the step, or one of the two kinds below.

    >>> import nnxlite as nnx, optax
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    >>> sorted(nnx.state(optimizer, nnx.OptState))
    ['opt_state', 'step']
    """


class OptArray(OptState[T]):
    """A value in an optimizer's state that corresponds to no parameter, such as a count.

    >>> import nnxlite as nnx, optax
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    >>> len(nnx.to_flat_state(nnx.state(optimizer, nnx.OptArray)))
    1
    """


class OptVariable(OptState[T]):
    """A value in an optimizer's state that corresponds to a parameter, with the metadata of it.

    >>> import nnxlite as nnx, optax
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    >>> len(nnx.to_flat_state(nnx.state(optimizer, nnx.OptVariable)))  # two for each parameter
    4
    """


def to_opt_state(tree: tp.Any) -> tp.Any:
    """The tree with an `OptVariable` for each Variable, and an `OptArray` for any other leaf.

    An `OptVariable` has the metadata of the Variable it replaces, in which `optimizer_sharding` becomes
    the sharding annotation.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> tree = {"mu": nnx.Param(jnp.ones(2), tag="a"), "n": jnp.array(1)}
    >>> state = nnx.optimizer.to_opt_state(tree)
    >>> type(state["mu"]).__name__, state["mu"].tag, type(state["n"]).__name__
    ('OptVariable', 'a', 'OptArray')
    """
    opt_state = jax.tree.map(_opt_leaf, tree, is_leaf=is_variable)
    for leaf in flatten(opt_state)[0]:
        _set_first_value(leaf, read(leaf))
    return opt_state


def _opt_leaf(leaf: tp.Any) -> OptState[tp.Any]:
    if not isinstance(leaf, Variable):
        return OptArray(leaf)
    metadata = leaf.get_metadata()
    if "optimizer_sharding" in metadata:
        metadata["out_sharding"] = metadata.pop("optimizer_sharding")
    return OptVariable.from_metadata(read(leaf), metadata)


def _set_first_value(leaf: OptState[tp.Any], value: tp.Any) -> None:
    """Set the first value of an optimizer's Variable, sharded, and in its reference if it has one."""
    value = place(value, leaf.get_metadata())
    in_reference = leaf.ref and isinstance(value, jax.Array)  # unless it is abstract
    leaf.set_raw_value(new_ref(value) if in_reference else value)


def _explained(name: str, given: int, remedy: str) -> tp.Callable[[F], F]:
    """A decorator for methods that had fewer arguments when an optimizer contained its model.

    Calls in the old form, with `given` positional arguments and without `name`, raise TypeError.
    """

    def decorate(method: tp.Any) -> tp.Any:
        @functools.wraps(method)
        def checked(*args: tp.Any, **kwargs: tp.Any) -> tp.Any:
            if len(args) == given and name not in kwargs:
                raise TypeError(
                    f"Missing required argument `{name}` of {method.__qualname__}. {remedy}, or use "
                    "nnx.ModelAndOptimizer, which contains the model."
                )
            return method(*args, **kwargs)

        return checked

    return decorate


class Optimizer(Pytree, tp.Generic[M]):
    """An optax transformation over the parameters of a model.

    Args:
        model: the model (or State) whose parameters will be given to `update`.
        tx: an optax transformation.
        wrt: a filter that selects the parameters, such as `nnx.Param`.
        graph: False refuses models with shared references.

    Attributes:
        step: `OptState`, uint32, the number of updates.
        opt_state: the state of `tx` with `OptVariable`s and `OptArray`s as leaves; writing to them
            (a learning rate of `optax.inject_hyperparams`, say) affects the next update.
        without_state: paths of parameters that were frozen when the optimizer was made, and since.
        tx, wrt, graph: as given.

    Raises:
        TypeError: if `tx` is not an optax transformation or `wrt` is not a filter.
        ValueError: if the transformation contains a mask or labels that do not match the parameters.

    Warns (UserWarning) if `wrt` selects nothing, as nothing is trained then.

    A traced learning rate, as in `optax.adam(rate)` within `nnx.vmap`, must not leave with the
    optimizer: `optax.inject_hyperparams(optax.adam)(rate)` stores it in the state.

    >>> import nnxlite as nnx, optax, jax.numpy as jnp
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    >>> @nnx.jit
    ... def train_step(model, optimizer, x, y):
    ...     loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    ...     optimizer.update(model, grads)
    ...     return loss
    >>> x, y = jnp.ones((4, 2)), jnp.ones((4, 3))
    >>> first, second = train_step(model, optimizer, x, y), train_step(model, optimizer, x, y)
    >>> bool(second < first), int(optimizer.step.value), optimizer.opt_state[0].mu["kernel"].shape
    (True, 2, (2, 3))
    """

    step: OptState[jax.Array]
    opt_state: tp.Any
    without_state: Paths = _NO_PATHS
    _nnx_captures_advice: tp.ClassVar[str] = (
        "Is it a learning rate? Give it to the state of the optimizer: "
        "optax.inject_hyperparams(optax.adam)(learning_rate=rate) in place of optax.adam(rate)."
    )

    @_explained("wrt", 3, "Say what is trained, as in Optimizer(model, tx, wrt=nnx.Param)")
    def __init__(
        self, model: M, tx: Transformation, *, wrt: Filter, graph: bool | None = None
    ) -> None:
        if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
            raise TypeError(
                f"tx must be an optax transformation, with init and update; got {short_type(tx)}. "
                "Wrong: Optimizer(model, optax.adam, ...). Right: Optimizer(model, "
                "optax.adam(1e-3), ...)."
            )
        params = state_of(model, wrt, graph=graph)
        if not flatten(params)[0]:
            _warn_of_nothing(type(self).__name__, wrt, state_of(model, graph=graph))
        without_state = frozenset(paths(state_of(params, Frozen())))
        if without_state:
            params = state_of(params, Not(Frozen()))
            self.without_state = without_state  # static, and only where there is something
        opt_state = initial_state(tx, params, without_state)
        self.graph = graph
        self.step = OptState(_beside(flatten(params)[0])(jnp.zeros((), jnp.uint32)))
        self.tx = tx
        self.opt_state = data(opt_state)
        self.wrt = wrt

    @_explained("grads", 2, "Pass both, as in optimizer.update(model, grads)")
    def update(self, model: M, grads: tp.Any, **kwargs: tp.Any) -> State[tp.Any, tp.Any]:
        """Update the parameters of `model`, the optimizer's state and the step.

        Frozen parameters and their state stay as they are. Parameters that have been unfrozen since
        the optimizer was made get the state that `tx` begins with.

        Args:
            model: of the same structure as the one the optimizer was made for.
            grads: as `nnx.grad` returns them: a State (or an object) with the parameters' paths.
                What the filter `wrt` does not select, or is frozen, is ignored.
            **kwargs: further arguments of `tx.update`, such as `value`, `grad` and `value_fn`.
                Variables in a State become arrays.

        Returns the updates that were added to the parameters, as a State of arrays.

        Raises:
            TypeError: if the model and the gradients are swapped.
            ValueError: if the paths of the gradients are not those of the parameters, their shapes
                would broadcast to those of the parameters (further leading axes are left to `tx`), the
                updates that `tx` computes have other shapes than the parameters, `tx` returns a tree
                of another structure, the model is not like the one the optimizer was made for, or all
                parameters are frozen. Nothing has changed then.
        """
        refuse_swapped(model, grads)
        params, frozen, old_state, without_state = self._nnx_parameters(model)
        leaves, treedef = flatten(params)
        values = [read(leaf) for leaf in leaves]
        self._nnx_check_state(old_state, params, values)
        if frozen or without_state:
            grad_values = self._nnx_match_trained(grads, params, frozen, without_state)
        else:
            grad_values = self._nnx_match(grads, params, treedef, self.wrt)
        if any(map(_broadcasts, grad_values, values)):
            self._nnx_explain(params, values, grad_values, None)
        opt_leaves, opt_treedef = flatten(old_state)
        opt_values = [read(leaf) for leaf in opt_leaves]

        pure_params = treedef.unflatten(values)
        try:
            updates, opt_state = self.tx.update(
                treedef.unflatten(grad_values),
                opt_treedef.unflatten(opt_values),
                pure_params,
                **{name: _pure_argument(value) for name, value in kwargs.items()},
            )
            import optax  # here, since it takes as long to import as the whole library

            new_params = optax.apply_updates(pure_params, updates)
        except (TypeError, ValueError) as error:
            self._nnx_explain(params, values, grad_values, error)
            _explain_masks(self.tx, treedef.unflatten(values), error)
            raise
        new_values = _same_structure(treedef, new_params, "updates")
        new_opt_values = _same_structure(opt_treedef, opt_state, "state")
        if frozen:
            new_values = _kept(params, params, frozen, values, new_values)
            new_opt_values = _kept(old_state, params, frozen, opt_values, new_opt_values)
            new_params = treedef.unflatten(new_values)
            updates = filter_state(updates, Not(PathIn(*frozen)))
        wrong = misshapen(params, values, new_values, what="updated", of="parameter")
        if wrong:
            self._nnx_explain(params, values, grad_values, None)
            raise ValueError(f"The updates change the shape of parameters: {wrong}.")

        step = self.step.value + 1
        self._nnx_adopt(old_state, without_state)
        written = [(self.step, step)]
        if all(map(is_variable, leaves)):
            written += zip(leaves, new_values, strict=True)
        else:
            update_node(model, new_params)
        written += self._nnx_new_state(opt_leaves, opt_treedef, new_opt_values)
        write_together(written)
        return updates

    def _nnx_parameters(self, model: tp.Any) -> tuple[tp.Any, Paths, tp.Any, Paths]:
        """What an update works on; changes nothing.

        Returns the parameters that have state and the paths of those that are frozen, the
        optimizer's state with that of parameters unfrozen since, and the paths of those without.
        """
        params = state_of(model, self.wrt, graph=self.graph)
        if not self.without_state and not any(map(is_frozen, flatten(params)[0])):
            return params, _NO_PATHS, self.opt_state, _NO_PATHS
        frozen = frozenset(paths(state_of(params, Frozen())))
        without_state = self.without_state & frozen
        params = state_of(params, Not(PathIn(*without_state)))
        opt_state = self.opt_state
        if without_state != self.without_state:
            new, known = initial_state(self.tx, params, without_state), dict(pairs(opt_state))
            _, treedef = flatten(new)
            opt_state = treedef.unflatten([known.get(path, leaf) for path, leaf in pairs(new)])
        return params, frozen - without_state, opt_state, without_state

    def _nnx_adopt(self, opt_state: tp.Any, without_state: Paths) -> None:
        """Store a state that includes parameters unfrozen since."""
        if without_state == self.without_state:
            return
        self.opt_state = data(opt_state)
        if without_state:
            self.without_state = without_state
        else:
            del self.without_state

    def _nnx_match_trained(
        self, grads: tp.Any, params: tp.Any, frozen: Paths, without_state: Paths
    ) -> list[tp.Any]:
        """The gradients in the order of the parameters, zero for those that are frozen."""
        trained = state_of(params, Not(PathIn(*frozen)))
        leaves, treedef = flatten(trained)
        if not leaves:
            raise ValueError(
                f"All parameters that wrt={filter_text(self.wrt)} selects are frozen, so there is "
                "nothing to update. nnx.unfreeze(model, filter) gives some free."
            )
        ignored = Not(PathIn(*frozen, *without_state))
        given = iter(self._nnx_match(grads, trained, treedef, All(self.wrt, ignored)))
        return [
            jax.tree.map(jnp.zeros_like, read(leaf)) if path in frozen else next(given)
            for path, leaf in pairs(params)
        ]

    def _nnx_match(
        self, grads: tp.Any, params: tp.Any, treedef: TreeDef, wrt: Filter
    ) -> list[tp.Any]:
        """The gradients in the order of the parameters."""
        original = grads
        if isinstance(grads, tp.Mapping) and not isinstance(grads, State):
            grads = State(tp.cast(tp.Any, grads))
        if isinstance(grads, State):
            leaves, structure = flatten(grads)
            if structure != treedef:
                grads = state_of(grads, wrt)
                leaves, structure = flatten(grads)
        else:
            grads = state_of(grads, wrt, graph=self.graph)
            leaves, structure = flatten(grads)
        if structure == treedef:
            return [read(leaf) for leaf in leaves]
        wrong = compare(params, original, what="gradients", of="parameters")
        raise ValueError(
            "The structure of the gradients is not that of the parameters that "
            f"wrt={filter_text(self.wrt)} selects: {wrong or 'the containers differ'}. "
            "Differentiate with respect to the same filter: nnx.grad(loss_fn, "
            "argnums=nnx.DiffState(0, wrt))."
        )

    def _nnx_check_state(self, opt_state: tp.Any, params: tp.Any, values: list[tp.Any]) -> None:
        """Raise ValueError where the state was made for parameters of other shapes.

        A shape that differs from its parameter's is compared with the one that `tx` begins with, since
        some transformations have state of other shapes (factored moments, a history).
        """
        _, treedef = flatten(params)
        shapes: dict[tp.Any, tp.Any] | None = None
        different: list[tuple[tp.Any, tp.Any, tp.Any]] = []
        for part in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, State)):
            if not isinstance(part, State):
                continue
            leaves, structure = flatten(part)
            if structure == treedef:
                if all(map(_same_shape, leaves, values)):
                    continue
            shapes = shapes or dict(zip(paths(params), values, strict=True))
            different += [
                (path, leaf, shapes[path])
                for path, leaf in pairs(part)
                if isinstance(leaf, OptVariable) and path in shapes
                if not _same_shape(leaf, shapes[path])
            ]
        if not different:
            return
        try:
            pure_params = treedef.unflatten(values)
            new = jax.tree.leaves(jax.eval_shape(self.tx.init, pure_params))
        except Exception:  # a transformation that needs values; then nothing is known
            return
        old, _ = flatten(opt_state)
        if len(old) == len(new) and all(
            _same_shape(a, b) for a, b in zip(old, new) if isinstance(a, OptVariable)
        ):
            return
        wrong = [
            f"{path_text(path)}: state {short_type(read(leaf))}, parameter {short_type(value)}"
            for path, leaf, value in different
        ]
        raise ValueError(
            f"The state of this {type(self).__name__} was made for parameters of other shapes: "
            f"{listed(wrong, between='; ')}. Make a new Optimizer after replacing a part of a model."
        )

    def _nnx_explain(
        self,
        params: tp.Any,
        values: list[tp.Any],
        grads: list[tp.Any],
        error: Exception | None,
    ) -> None:
        """Raise an error that says so if the gradients' shapes or another model caused one."""
        wrong = misshapen(params, values, grads, what="gradient", of="parameter")
        if wrong:
            raise ValueError(
                f"The gradients do not have the parameters' shapes: {wrong}."
            ) from error
        for part in jax.tree.leaves(self.opt_state, is_leaf=lambda x: isinstance(x, State)):
            wrong = compare(part, params, what="model", of="parameters the optimizer knows")
            if error is not None and isinstance(part, State) and wrong:
                raise ValueError(
                    f"The model is not like the one this Optimizer was made for: {wrong}. Make a "
                    "new Optimizer after changing the structure of a model."
                ) from error

    def _nnx_new_state(
        self, leaves: list[tp.Any], treedef: TreeDef, values: list[tp.Any]
    ) -> list[tuple[tp.Any, tp.Any]]:
        """The Variables to be written, and their values; other leaves are replaced in a new tree."""
        pairs = list(zip(leaves, values, strict=True))
        if not all(map(is_variable, leaves)):
            kept = [leaf if is_variable(leaf) else value for leaf, value in pairs]
            self.opt_state = data(treedef.unflatten(kept))
        return [pair for pair in pairs if is_variable(pair[0])]


class ModelAndOptimizer(Optimizer[M]):
    """An `Optimizer` that contains its model, so that `update` takes only the gradients.

    Args:
        model: the model; it becomes the attribute `model`.
        tx: an optax transformation.
        wrt: a filter that selects the parameters.

    >>> import nnxlite as nnx, optax
    >>> trained = nnx.ModelAndOptimizer(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), optax.sgd(0.1))
    >>> grads = nnx.grad(lambda m: m.bias.value.sum())(trained.model)
    >>> _ = trained.update(grads)
    >>> [round(float(b), 3) for b in trained.model.bias.value]
    [-0.1, -0.1, -0.1]
    """

    model: M

    def __init__(self, model: M, tx: Transformation, *, wrt: Filter = Param) -> None:
        super().__init__(model, tx, wrt=wrt)
        self.model = model

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]  # the model is an attribute
        self, grads: tp.Any, /, **kwargs: tp.Any
    ) -> State[tp.Any, tp.Any]:
        """Update the model; see `Optimizer.update`.

        Args:
            grads: gradients of the model, as of `nnx.grad`.
            kwargs: further arguments of the optax transformation.
        """
        return super().update(self.model, grads, **kwargs)


def initial_state(tx: Transformation, params: tp.Any, left_out: Paths) -> tp.Any:
    """The initial state of `tx`, in Variables that share no buffer with the parameters.

    Args:
        tx, params: the transformation and what it gets to see.
        left_out: paths of parameters that it does not see yet.
    """
    leaves, treedef = flatten(params)
    given = treedef.unflatten([_out_of_reference(v) for v in leaves])
    try:
        with leaving_out(left_out):
            opt_state = tx.init(given)
    except (TypeError, ValueError) as error:
        _explain_masks(tx, pure(params), error)
        raise
    beside = _beside(leaves)
    opt_state = jax.tree.map(_opt_leaf, opt_state, is_leaf=is_variable)
    shapes = {path: getattr(read(leaf), "shape", None) for path, leaf in pairs(params)}
    buffers = {id(read(leaf)) for leaf in leaves}
    for path, leaf in pairs(opt_state):
        _fit_sharding(path, leaf, shapes)
        value = read(leaf)
        if id(value) in buffers and isinstance(value, jax.Array):
            value = jnp.copy(value)  # so that a transform may donate both
        _set_first_value(leaf, value)
        if not leaf.ref:
            leaf.set_raw_value(beside(leaf.get_raw_value()))
        buffers.add(id(leaf.get_raw_value()))
    return opt_state


def _warn_of_nothing(name: str, wrt: Filter, everything: tp.Any) -> None:
    """Warn that a filter matches nothing, if another one could match a floating array."""
    found = [(path, leaf) for path, leaf in pairs(everything) if _has_floats(leaf)]
    if not found:
        return
    kinds = collections.Counter(type(leaf).__name__ for _, leaf in found)
    shown = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items())
    some = listed([path_text(path) for path, _ in found], most=3)
    warn_user(
        f"{name}: wrt={filter_text(wrt)} selects nothing in the model, so that nothing is trained. It "
        f"contains {shown} (at {some}). Choose another filter."
    )


def _has_floats(leaf: tp.Any) -> bool:
    return any(jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in jax.tree.leaves(read(leaf)))


def _beside(leaves: tp.Sequence[tp.Any]) -> tp.Callable[[tp.Any], tp.Any]:
    """A function that places what is on no certain device where the parameters are.

    The outputs of a step lie there: one whose inputs do not is compiled a second time.
    """
    values = [x for leaf in leaves for x in jax.tree.leaves(read(leaf))]
    where: set[tp.Any] = set()
    for value in values:
        if isinstance(value, Tracer) or not isinstance(value, jax.Array) or not value.committed:
            return lambda value: value
        sharding = value.sharding
        where.add(sharding.mesh if isinstance(sharding, NamedSharding) else sharding)
    if len(where) != 1:
        return lambda value: value
    [place] = where
    named = isinstance(place, (jax.sharding.Mesh, jax.sharding.AbstractMesh))
    target = NamedSharding(place, PartitionSpec()) if named else place

    def put(value: tp.Any) -> tp.Any:
        array = isinstance(value, jax.Array) and not isinstance(value, Tracer)
        return jax.device_put(value, target) if array and not value.committed else value

    return put


def refuse_swapped(model: tp.Any, grads: tp.Any) -> None:
    """Raise TypeError where gradients are given as the model, and the model as the gradients.

    Args:
        model, grads: the arguments of an update.
    """
    if isinstance(model, GraphNode) or _has_objects(model) or not _has_objects(grads):
        return
    raise TypeError(
        f"update takes the model and then the gradients; got {type(model).__name__} and "
        f"{type(grads).__name__}. Swap them: optimizer.update(model, grads)."
    )


def _has_objects(tree: tp.Any) -> bool:
    return any(isinstance(node, GraphNode) for _, node in iter_graph(tree))


def _same_shape(leaf: tp.Any, other: tp.Any) -> bool:
    """Whether two values have one shape, as far as they have one: other values are left to optax."""
    one, other = (getattr(value, "shape", None) for value in (read(leaf), read(other)))
    return one is None or other is None or one == other


def _broadcasts(grad: tp.Any, value: tp.Any) -> bool:
    """Whether a gradient is of another shape than its parameter, and is broadcast to it."""
    one, other = getattr(grad, "shape", ()), getattr(value, "shape", ())
    if one == other or not isinstance(one, tuple) or not isinstance(other, tuple):
        return False
    ends = zip(reversed(one), reversed(other))
    return len(one) <= len(other) and all(a in (1, b) for a, b in ends)


def _explain_masks(tx: tp.Any, params: tp.Any, error: Exception) -> None:
    """Raise ValueError if masks or labels in a transformation are not like the parameters.

    Those that a function returns are not known here; a note on the error says what they should be.
    Errors that do not come from JAX's functions on trees are about something else.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if not frame.f_globals.get("__name__", "").endswith("tree_util"):
        return
    structure, names = jax.tree.structure(params), paths(params)
    advice = (
        "Parameters come to optax as an nnx.State with arrays as leaves. Give it a function that maps "
        "them, optax.masked(tx, lambda params: jax.tree.map(lambda x: x.ndim > 1, params)), or "
        "groups by paths: nnx.by_path({'encoder.**': tx, '**': other})."
    )
    for item in captures(tx):
        if not isinstance(item, (State, dict, list, tuple)):
            continue
        marks = jax.tree.leaves(item)
        given = jax.tree.structure(item)
        if not marks or given == structure or not all(isinstance(x, (bool, str)) for x in marks):
            continue
        marked = any(map(is_variable, flatten(item)[0]))
        what = "masks" if all(isinstance(x, bool) for x in marks) else "labels"
        kind = type(item).__name__ + (" of Variables" if marked else "")
        there = listed([path_text(path) for path in paths(item)])
        raise ValueError(
            f"The optax transformation contains {what} as a {kind} for {there}, which is not a tree "
            f"like the parameters, a {type(params).__name__} of arrays for "
            f"{listed([path_text(path) for path in names])}. {advice}"
        ) from error
    error.add_note(f"If this is about a mask or labels: {advice}")


def _out_of_reference(leaf: tp.Any) -> tp.Any:
    """The Variable with an array in place of a reference, as optax maps functions over parameters."""
    if isinstance(leaf, Variable) and leaf.ref:
        return type(leaf).from_metadata(read(leaf), leaf.get_metadata())
    return leaf


def _fit_sharding(
    path: tuple[tp.Any, ...], leaf: OptState[tp.Any], shapes: tp.Mapping[tp.Any, tp.Any]
) -> None:
    """Correct the sharding annotation of a value whose shape is not that of its parameter.

    Additional leading axes (a history of gradients) are not sharded; for an unrelated shape (a
    factored moment) the annotation is removed.
    """
    names = leaf.get_metadata("out_sharding", None)
    shape = getattr(read(leaf), "shape", None)
    parameter = parameter_of(path, shapes)
    param_shape = None if parameter is None else shapes[parameter]
    if names is None or shape is None or param_shape is None or shape == param_shape:
        return
    extra = len(shape) - len(param_shape)
    if extra > 0 and shape[extra:] == param_shape:
        longer = changed_names(names, lambda names: (*[None] * extra, *names))
        leaf.set_metadata(out_sharding=longer)
    else:
        leaf.set_metadata(out_sharding=None)


def parameter_of(path: tuple[tp.Any, ...], known: tp.Container[tp.Any]) -> tp.Any:
    """The path of the parameter that a path in the optimizer's state ends with, or None."""
    return next((path[i:] for i in range(len(path)) if path[i:] in known), None)


def _kept(
    tree: tp.Any, params: tp.Any, frozen: Paths, old: list[tp.Any], new: list[tp.Any]
) -> list[tp.Any]:
    """The new values of a tree, but the old ones of frozen parameters."""
    known = set(paths(params))
    rows = zip(paths(tree), old, new, strict=True)
    return [a if parameter_of(path, known) in frozen else b for path, a, b in rows]


def _pure_argument(value: tp.Any) -> tp.Any:
    return pure(value) if isinstance(value, (State, Variable)) else value


def _same_structure(treedef: TreeDef, tree: tp.Any, what: str) -> list[tp.Any]:
    try:
        return treedef.flatten_up_to(tree)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The transformation returned {what} of another structure than it was given: expected "
            f"{treedef}, got {jax.tree.structure(tree)}."
        ) from error
