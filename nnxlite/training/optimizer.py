"""`Optimizer`: any optax transformation, with its state in Variables.

The parameters are those that the filter `wrt` selects, as a nested `State`.  Optax initialises its
state from this State of Variables, and updates it with arrays in place of the Variables.  The tree of
its state is preserved: an array that corresponds to a parameter (a moment, an average) becomes an
`OptVariable` with that parameter's metadata, sharding included; any other array (a count, a learning
rate) becomes an `OptArray`.

An update works on flat lists of leaves and is atomic: first the gradients are compared with the
parameters, then the results of optax are checked, and only then is anything written.

Frozen parameters (`nnx.freeze`) are not among those that `wrt` selects.  After freezing or unfreezing
some, make a new optimizer, as after any other change of the parameters.

Nothing is broadcast: gradients and state are compared with the parameters by shape, as a number that
broadcasts would train a model that nobody meant.  Gradients may have further leading axes, since some
transformations (of differential privacy) reduce them.
"""

from __future__ import annotations

import collections
import functools
import typing as tp

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from nnxlite._base.errors import filter_text, listed, path_text, short_type, warn_user
from nnxlite._base.jax import is_concrete, is_ref, new_ref
from nnxlite._state._definition import State, pure
from nnxlite._state._flat import content
from nnxlite.filters import All, Filter, Frozen, Not, PathIn
from nnxlite.graph._edit import update as update_node
from nnxlite.graph._functional import state as state_of
from nnxlite.graph._kinds import GraphNode
from nnxlite.graph._walk import iter_graph
from nnxlite.objects._fields import data
from nnxlite.objects._pytree import Pytree
from nnxlite.training._leaves import compare, flatten, is_inexact, misshapen, pairs, write_together
from nnxlite.variables._definition import changed_names, place
from nnxlite.variables._kinds import Param
from nnxlite.variables._variable import Variable, is_variable

__all__ = ["ModelAndOptimizer", "OptArray", "OptState", "OptVariable", "Optimizer"]

M = tp.TypeVar("M")
T = tp.TypeVar("T")


class Transformation(tp.Protocol):
    """The methods of an optax transformation that an `Optimizer` needs; `optax.MultiSteps` has them."""

    def init(self, params: tp.Any, /) -> tp.Any:
        """Maps parameters to the initial state of the transformation."""

    def update(self, grads: tp.Any, state: tp.Any, params: tp.Any, /) -> tp.Any:
        """Maps gradients, state and parameters to updates and the next state."""


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
    return _in_variables(tree, State({}))


def _in_variables(tree: tp.Any, params: tp.Any) -> tp.Any:
    """`to_opt_state` of the state that a transformation begins with for some parameters.

    It shares no buffer with them, so that a transform may donate both.
    """
    values = {path: content(leaf) for path, leaf in pairs(params)}
    beside, taken = _beside(params), {id(content(leaf)) for leaf in flatten(params)[0]}
    opt_state = jax.tree.map(_opt_leaf, tree, is_leaf=is_variable)
    for path, leaf in pairs(opt_state):
        value = content(leaf)
        param = next((values[path[i:]] for i in range(len(path)) if path[i:] in values), None)
        _fit_sharding(leaf, value, param)
        if id(value) in taken and isinstance(value, jax.Array):
            value = jnp.copy(value)
        value = place(value, leaf.get_metadata())
        if not leaf.ref:
            value = beside(value)
        elif isinstance(value, jax.Array):  # unless it is abstract
            value = new_ref(value)
        leaf.set_raw_value(value)
        taken.add(id(value))
    return opt_state


def _opt_leaf(leaf: tp.Any) -> OptState[tp.Any]:
    if not isinstance(leaf, Variable):
        return OptArray(leaf)
    metadata = leaf.get_metadata()
    if "optimizer_sharding" in metadata:
        metadata["out_sharding"] = metadata.pop("optimizer_sharding")
    return OptVariable.from_metadata(content(leaf), metadata)


def _explained(name: str, given: int, remedy: str) -> tp.Callable[[T], T]:
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
        wrt: a filter that selects the parameters, such as `nnx.Param`; frozen ones are left out.
        graph: False refuses models with shared references.

    Attributes:
        step: `OptState`, uint32, the number of updates.
        opt_state: the state of `tx` with `OptVariable`s and `OptArray`s as leaves; writing to them
            (a learning rate of `optax.inject_hyperparams`, say) affects the next update. What an update
            adds to it, as `optax.monitor` does, are arrays.
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
        params = state_of(model, All(wrt, Not(Frozen())), graph=graph)
        if not flatten(params)[0]:
            _warn_of_nothing(type(self).__name__, wrt, state_of(model, graph=graph))
        try:
            opt_state = tx.init(_out_of_references(params))
        except (TypeError, ValueError) as error:
            error.add_note(
                "If this is about a mask or labels: Parameters come to optax as an nnx.State with "
                "arrays as leaves. Give it a function that maps them, optax.masked(tx, lambda params: "
                "jax.tree.map(lambda x: x.ndim > 1, params)), or nnx.map_state(lambda path, x: ..., "
                "params) for masks and labels by path."
            )
            raise
        self.graph = graph
        self.step = OptState(_beside(params)(jnp.zeros((), jnp.uint32)))
        self.tx = tx
        self.opt_state = data(_in_variables(opt_state, params))
        self.wrt = wrt

    @_explained("grads", 2, "Pass both, as in optimizer.update(model, grads)")
    def update(self, model: M, grads: tp.Any, **kwargs: tp.Any) -> State[tp.Any, tp.Any]:
        """Update the parameters of `model`, the optimizer's state and the step.

        Args:
            model: of the same structure as the one the optimizer was made for.
            grads: as `nnx.grad` returns them: a State (or an object) with the parameters' paths.
                What the filter `wrt` does not select, or is frozen, is ignored.
            **kwargs: further arguments of `tx.update`, such as `value`, `grad` and `value_fn`.
                Variables in a State become arrays.

        Returns the updates that were added to the parameters, as a State of arrays.

        Raises:
            TypeError: if the model and the gradients are swapped.
            ValueError: if the paths of the gradients are not those of the parameters, their shapes do
                not end with those of the parameters (what is before is left to `tx`), the updates
                that `tx` computes have other shapes than the parameters, the model is not like the one
                the optimizer was made for, or all parameters are frozen. Nothing has changed then.
        """
        params = state_of(model, All(self.wrt, Not(Frozen())), graph=self.graph)
        leaves, treedef = flatten(params)
        if not leaves and flatten(state_of(model, self.wrt, graph=self.graph))[0]:
            raise ValueError(
                f"All parameters that wrt={filter_text(self.wrt)} selects are frozen, so there is "
                "nothing to update. nnx.unfreeze(model, filter) gives some free."
            )
        values = [content(leaf) for leaf in leaves]
        grad_values = self._nnx_match(grads, model, treedef)
        if not all(map(_ends_with, grad_values, values)):
            self._nnx_explain(params, grad_values, None)
        old, state = pure(params), pure(self.opt_state)
        import optax  # here, since it takes as long to import as the whole library

        more = {k: pure(v) if isinstance(v, (State, Variable)) else v for k, v in kwargs.items()}
        try:
            updates, new_state = self.tx.update(treedef.unflatten(grad_values), state, old, **more)
            new_params = optax.apply_updates(old, updates)
        except (TypeError, ValueError) as error:
            self._nnx_explain(params, grad_values, error)
            raise
        new_values = treedef.flatten_up_to(new_params)
        opt_leaves, new_opt_values, form = _beside_new(self.opt_state, new_state)
        wrong = misshapen(params, values, new_values, "updated", "parameter")
        if wrong or misshapen(new_state, pure(opt_leaves), new_opt_values, "updated", "state"):
            self._nnx_explain(params, grad_values, None)
        if wrong:
            raise ValueError(f"The updates change the shape of parameters: {wrong}.")

        if not all(map(is_variable, leaves)):
            update_node(model, new_params)
        opt_pairs = [*zip(opt_leaves, new_opt_values)]
        if form != flatten(self.opt_state)[1] or not all(map(is_variable, opt_leaves)):
            kept = [x if is_variable(x) else new for x, new in opt_pairs]
            self.opt_state = data(form.unflatten(kept))
        write_together([(self.step, self.step.value + 1), *opt_pairs, *zip(leaves, new_values)])
        return updates

    def _nnx_match(self, grads: tp.Any, model: tp.Any, form: tp.Any) -> list[tp.Any]:
        """The gradients in the order of the parameters, whose structure is `form`."""
        has_objects = lambda tree: any(isinstance(node, GraphNode) for _, node in iter_graph(tree))
        if not has_objects(model) and has_objects(grads):
            raise TypeError(
                f"update takes the model and then the gradients; got {type(model).__name__} and "
                f"{type(grads).__name__}. Swap them: optimizer.update(model, grads)."
            )
        nested = isinstance(grads, tp.Mapping) and not isinstance(grads, State)
        given = State(tp.cast(tp.Any, grads)) if nested else grads
        leaves, structure = flatten(given)
        if structure != form:
            frozen = dict(pairs(state_of(model, Frozen(), graph=self.graph)))
            given = state_of(given, All(self.wrt, Not(PathIn(*frozen))), graph=self.graph)
            leaves, structure = flatten(given)
        if structure == form:
            return [content(leaf) for leaf in leaves]
        wrong = compare(form.unflatten(range(form.num_leaves)), grads, "gradients", "parameters")
        raise ValueError(
            "The structure of the gradients is not that of the parameters that "
            f"wrt={filter_text(self.wrt)} selects: {wrong or 'the containers differ'}. "
            "Differentiate with respect to the same filter: nnx.grad(loss_fn, "
            "argnums=nnx.DiffState(0, wrt))."
        )

    def _nnx_explain(self, params: tp.Any, grads: list[tp.Any], error: Exception | None) -> None:
        """Raise ValueError if the shapes of the gradients or another model are the cause of an error.

        The model is another one if `tx` begins with another state for it than there is.
        """
        values = [content(leaf) for leaf in flatten(params)[0]]
        if wrong := misshapen(params, values, grads, "gradient", "parameter"):
            raise ValueError(
                f"The gradients do not have the parameters' shapes: {wrong}."
            ) from error
        try:
            start = jax.eval_shape(self.tx.init, _out_of_references(params))
        except Exception:  # a transformation that needs values; then nothing is known
            return
        name, known = type(self).__name__, dict(pairs(self.opt_state))
        of = "values it needs now" if all(map(is_variable, known.values())) else None
        wrong = compare(start, self.opt_state, f"state of the {name}", of)
        if not wrong:
            now = [content(known[path]) for path, _ in pairs(start)]
            wrong = misshapen(start, pure(flatten(start)[0]), now, "state", "needed for the model")
        if wrong:
            raise ValueError(
                f"The model is not like the one this {name} was made for: {wrong}. Make a new Optimizer "
                "after changing, freezing or unfreezing parts of a model."
            ) from error


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

    def update(self, grads: tp.Any, /, **kwargs: tp.Any) -> State[tp.Any, tp.Any]:  # pyright: ignore[reportIncompatibleMethodOverride]  # the model is an attribute
        """Update the model; see `Optimizer.update`.

        Args:
            grads: gradients of the model, as of `nnx.grad`.
            kwargs: further arguments of the optax transformation.
        """
        return super().update(self.model, grads, **kwargs)


def _warn_of_nothing(name: str, wrt: Filter, everything: tp.Any) -> None:
    """Warn that a filter matches nothing, if another one could match a floating array."""
    has_floats = lambda leaf: any(map(is_inexact, jax.tree.leaves(content(leaf))))
    found = [(path, leaf) for path, leaf in pairs(everything) if has_floats(leaf)]
    if found:
        kinds = collections.Counter(type(leaf).__name__ for _, leaf in found)
        shown = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items())
        some = listed([path_text(path) for path, _ in found], most=3)
        warn_user(
            f"{name}: wrt={filter_text(wrt)} selects nothing in the model that is not frozen, so "
            f"nothing is trained. It contains {shown} (at {some}). Choose another filter."
        )


def _beside(params: tp.Any) -> tp.Callable[[tp.Any], tp.Any]:
    """A function that places what is on no certain device where the parameters are.

    The outputs of a step lie there: one whose inputs do not is compiled a second time.
    """
    values = [x for leaf in flatten(params)[0] for x in jax.tree.leaves(content(leaf))]
    shardings = [x.sharding if is_concrete(x) and x.committed else None for x in values]
    place, *others = {x.mesh if isinstance(x, NamedSharding) else x for x in shardings} or {None}
    if place is None or others:
        return lambda value: value
    named = isinstance(place, (jax.sharding.Mesh, jax.sharding.AbstractMesh))
    target = NamedSharding(place, PartitionSpec()) if named else place
    movable = lambda value: is_concrete(value) and not value.committed
    return lambda value: jax.device_put(value, target) if movable(value) else value


def _ends_with(grad: tp.Any, value: tp.Any) -> bool:
    """Whether a gradient has the shape of its parameter, perhaps after further axes."""
    shape, last = getattr(grad, "shape", ()), getattr(value, "shape", ())
    return shape[max(0, len(shape) - len(last)) :] == last


def _out_of_references(params: tp.Any) -> tp.Any:
    """The State with arrays in place of references, as optax maps functions over parameters."""
    return jax.tree.map(lambda x: x[...] if is_ref(x) else x, params)


def _fit_sharding(leaf: OptState[tp.Any], value: tp.Any, param: tp.Any) -> None:
    """Correct the sharding annotation of a value whose shapes are not those of its parameter.

    Additional leading axes (a history of gradients) are not sharded; for unrelated shapes (a
    factored moment, one vector for each axis) the annotation is removed. `param` is None for what
    belongs to no parameter.
    """
    names = leaf.get_metadata("out_sharding", None)
    shapes, wanted = ([jnp.shape(x) for x in jax.tree.leaves(tree)] for tree in (value, param))
    if names is None or shapes == wanted or not (shapes and wanted):
        return
    extra = len(shapes[0]) - len(wanted[0])
    fits = extra > 0 and [shape[extra:] for shape in shapes] == wanted
    longer = changed_names(names, lambda names: (*[None] * extra, *names)) if fits else None
    leaf.set_metadata(out_sharding=longer)


def _beside_new(state: tp.Any, new: tp.Any) -> tuple[list[tp.Any], list[tp.Any], tp.Any]:
    """The leaves of a state where a new one has them, the new values, and the structure of both.

    `optax.monitor` adds leaves in its first update: values, like those that a user puts there.
    """
    leaves, treedef = flatten(state)
    try:
        return leaves, treedef.flatten_up_to(new), treedef
    except (TypeError, ValueError):
        known = dict(pairs(state))
        return [known.get(path, value) for path, value in pairs(new)], *flatten(new)
