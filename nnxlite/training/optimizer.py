"""`Optimizer`: any optax transformation, with its state held in Variables.

The optimizer sees the parameters that its filter `wrt` selects, as a nested `State`.  Optax is
given that State with the Variables themselves when it sets up its own state, and with bare arrays
at every update.  What it returns is kept in the tree it came in: an array that stands for a
parameter (a moment, an average) becomes an `OptVariable` with that parameter's metadata, sharding
included; any other array (a count, a learning rate) an `OptArray`.

An update works on flat lists of leaves and is all or nothing: gradients are compared with the
parameters first, the results of optax are checked next, and only then is anything written.
"""

from __future__ import annotations

import functools
import typing as tp

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from nnxlite._errors import short_type
from nnxlite._jax import new_ref
from nnxlite._sharding_hook import place
from nnxlite._state import State
from nnxlite.filters import Filter
from nnxlite.graph import state as state_of
from nnxlite.graph import update as update_node
from nnxlite.objects import Pytree, data
from nnxlite.training._leaves import (
    TreeDef,
    compare,
    flatten,
    is_variable,
    misshapen,
    paths,
    pure,
    read,
    write,
)
from nnxlite.variables import Param, Variable

M = tp.TypeVar("M")
T = tp.TypeVar("T")
P = tp.ParamSpec("P")
R = tp.TypeVar("R")


class Transformation(tp.Protocol):
    """What an `Optimizer` needs of an optax transformation (also `optax.MultiSteps`)."""

    @property
    def init(self) -> tp.Callable[[tp.Any], tp.Any]:
        """From parameters to the state of the transformation."""
        ...

    @property
    def update(self) -> tp.Callable[..., tuple[tp.Any, tp.Any]]:
        """From gradients, state and parameters to updates and the next state."""
        ...


class OptState(Variable[T]):
    """A Variable that belongs to an optimizer: the step, or one of the two kinds below."""


class OptArray(OptState[T]):
    """A value in an optimizer's state that stands for no parameter, such as a count."""


class OptVariable(OptState[T]):
    """A value in an optimizer's state that stands for a parameter, with that one's metadata."""


def to_opt_state(tree: tp.Any) -> tp.Any:
    """The tree with each Variable as an `OptVariable`, and any other leaf as an `OptArray`.

    An `OptVariable` has the metadata of the Variable it replaces; `optimizer_sharding` there becomes
    its sharding annotation.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> tree = {"mu": nnx.Param(jnp.ones(2), tag="a"), "n": jnp.array(1)}
    >>> found = nnx.optimizer.to_opt_state(tree)
    >>> type(found["mu"]).__name__, found["mu"].tag, type(found["n"]).__name__
    ('OptVariable', 'a', 'OptArray')
    """
    opt_state = jax.tree.map(_opt_leaf, tree, is_leaf=is_variable)
    for leaf in flatten(opt_state)[0]:
        _begin(leaf, read(leaf))
    return opt_state


def _opt_leaf(leaf: tp.Any) -> OptState[tp.Any]:
    if not isinstance(leaf, Variable):
        return OptArray(leaf)
    metadata = leaf.get_metadata()
    if "optimizer_sharding" in metadata:
        metadata["out_sharding"] = metadata.pop("optimizer_sharding")
    return OptVariable.from_metadata(read(leaf), metadata)


def _begin(leaf: OptState[tp.Any], value: tp.Any) -> None:
    """Place the first value of an optimizer's Variable, in a reference where it is to have one."""
    value = place(value, leaf.get_metadata())
    in_reference = leaf.ref and isinstance(value, jax.Array)  # not where it is abstract
    leaf.set_raw_value(new_ref(value) if in_reference else value)


def _explained(name: str, given: int, remedy: str) -> tp.Callable[..., tp.Any]:
    """A decorator for a method that is called without an argument where it once held the model."""

    def decorate(method: tp.Callable[P, R]) -> tp.Callable[P, R]:
        @functools.wraps(method)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) == given and name not in kwargs:
                raise TypeError(
                    f"Missing required argument `{name}` of {method.__qualname__}. {remedy}, or use "
                    "nnx.ModelAndOptimizer, which holds the model."
                )
            return method(*args, **kwargs)

        return checked

    return decorate


class Optimizer(Pytree, tp.Generic[M]):
    """An optax transformation over the parameters of a model.

    Args:
        model: the model (or State) whose parameters will be given to `update`.
        tx: an optax transformation.
        wrt: a filter that says what the parameters are, such as `nnx.Param`.
        graph: False refuses models with shared references.

    Attributes:
        step: `OptState`, uint32, the number of updates.
        opt_state: the state of `tx` with `OptVariable`s and `OptArray`s as leaves; writing to them
            (a learning rate of `optax.inject_hyperparams`, say) counts from the next update on.
        tx, wrt, graph: as given.

    Raises:
        TypeError: when `tx` is no optax transformation or `wrt` is no filter.

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
        opt_state = _initial_state(tx, params)
        self.graph = graph
        self.step = OptState(jnp.zeros((), jnp.uint32))
        self.tx = tx
        self.opt_state = data(opt_state)
        self.wrt = wrt

    @_explained("grads", 2, "Pass both, as in optimizer.update(model, grads)")
    def update(self, model: M, grads: tp.Any, **kwargs: tp.Any) -> tp.Any:
        """Update the parameters of `model`, the optimizer's state and the step.

        Args:
            model: of the same structure as the one the optimizer was made for.
            grads: as `nnx.grad` returns them: a State (or an object) with the parameters' paths.
                What the filter `wrt` does not select is left out.
            **kwargs: further arguments of `tx.update`, such as `value`, `grad` and `value_fn`.
                Variables in a State become arrays.

        Returns the updates that were added to the parameters, as a State of arrays.

        Raises:
            ValueError: when the paths of the gradients are not those of the parameters, when the
                updates that `tx` makes of them have other shapes (what shapes it takes is its own
                affair), when `tx` returns something of another structure, or the model is not like
                the one the optimizer was made for. Nothing has changed then.
        """
        params = state_of(model, self.wrt, graph=self.graph)
        leaves, treedef = flatten(params)
        values = [read(leaf) for leaf in leaves]
        grad_values = self._nnx_match(grads, params, treedef)
        opt_leaves, opt_treedef = flatten(self.opt_state)
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
            raise
        new_values = _same_structure(treedef, new_params, "updates")
        new_opt_values = _same_structure(opt_treedef, opt_state, "state")
        wrong = misshapen(params, values, new_values, what="updated", of="parameter")
        if wrong:
            self._nnx_explain(params, values, grad_values, None)
            raise ValueError(f"The updates change the shape of parameters: {wrong}.")

        if all(map(is_variable, leaves)):
            for leaf, value in zip(leaves, new_values, strict=True):
                write(leaf, value)
        else:
            update_node(model, new_params)
        self._nnx_write_state(opt_leaves, opt_treedef, new_opt_values)
        self.step.value = self.step.value + 1
        return updates

    def _nnx_match(self, grads: tp.Any, params: tp.Any, treedef: TreeDef) -> list[tp.Any]:
        """The gradients in the order of the parameters."""
        given = grads
        if isinstance(grads, tp.Mapping) and not isinstance(grads, State):
            grads = State(tp.cast(tp.Any, grads))
        if isinstance(grads, State):
            leaves, found = flatten(grads)
            if found != treedef:
                grads = state_of(grads, self.wrt)
                leaves, found = flatten(grads)
        else:
            grads = state_of(grads, self.wrt, graph=self.graph)
            leaves, found = flatten(grads)
        if found == treedef:
            return [read(leaf) for leaf in leaves]
        wrong = compare(params, given, what="gradients", of="parameters")
        raise ValueError(
            "The structure of the gradients is not that of the parameters that "
            f"wrt={_filter_text(self.wrt)} selects: {wrong or 'the containers differ'}. "
            "Differentiate with respect to the same filter: nnx.grad(loss_fn, "
            "argnums=nnx.DiffState(0, wrt))."
        )

    def _nnx_explain(
        self,
        params: tp.Any,
        values: list[tp.Any],
        grads: list[tp.Any],
        error: Exception | None,
    ) -> None:
        """Raise a better error where the gradients' shapes are to blame."""
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

    def _nnx_write_state(
        self, leaves: list[tp.Any], treedef: TreeDef, values: list[tp.Any]
    ) -> None:
        """Write into the Variables in place; a leaf that is none is replaced in a new tree."""
        if all(map(is_variable, leaves)):
            for leaf, value in zip(leaves, values, strict=True):
                write(leaf, value)
            return
        for i, (leaf, value) in enumerate(zip(leaves, values, strict=True)):
            if is_variable(leaf):
                write(leaf, value)
                values[i] = leaf
        self.opt_state = data(treedef.unflatten(values))


class ModelAndOptimizer(Optimizer[M]):
    """An `Optimizer` that holds its model, so that `update` takes the gradients alone.

    Args:
        model: the model; it becomes the attribute `model`.
        tx: an optax transformation.
        wrt: a filter that says what the parameters are.

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

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]  # the model is held, not given
        self, grads: tp.Any, /, **kwargs: tp.Any
    ) -> tp.Any:
        """Update the held model; see `Optimizer.update`."""
        return super().update(self.model, grads, **kwargs)


def _initial_state(tx: Transformation, params: tp.Any) -> tp.Any:
    """The state that `tx` begins with, in Variables that share no buffer with the parameters."""
    leaves, treedef = flatten(params)
    opt_state = tx.init(treedef.unflatten([_out_of_reference(v) for v in leaves]))
    opt_state = jax.tree.map(_opt_leaf, opt_state, is_leaf=is_variable)
    shapes = {
        p: getattr(read(v), "shape", None) for p, v in zip(paths(params), leaves, strict=True)
    }
    buffers = {id(read(leaf)) for leaf in leaves}
    opt_leaves, _ = flatten(opt_state)
    for path, leaf in zip(paths(opt_state), opt_leaves, strict=True):
        _fit_sharding(path, leaf, shapes)
        value = read(leaf)
        if id(value) in buffers and isinstance(value, jax.Array):
            value = jnp.copy(value)  # so that a transform may donate both
        _begin(leaf, value)
        buffers.add(id(leaf.get_raw_value()))
    return opt_state


def _out_of_reference(leaf: tp.Any) -> tp.Any:
    """Optax maps functions over parameters, which must be arrays."""
    if isinstance(leaf, Variable) and leaf.ref:
        return type(leaf).from_metadata(read(leaf), leaf.get_metadata())
    return leaf


def _fit_sharding(
    path: tuple[tp.Any, ...], leaf: OptState[tp.Any], shapes: tp.Mapping[tp.Any, tp.Any]
) -> None:
    """Mend the sharding annotation of a value whose shape is not its parameter's.

    Leading axes that were added (a memory of past gradients) are not sharded; a shape that has
    nothing to do with the parameter's (a factored moment) has no annotation.
    """
    names = leaf.get_metadata("out_sharding", None)
    shape = getattr(read(leaf), "shape", None)
    suffixes = (path[i:] for i in range(len(path)))
    param_shape = next((shapes[s] for s in suffixes if s in shapes), None)
    if names is None or shape is None or param_shape is None or shape == param_shape:
        return
    extra = len(shape) - len(param_shape)
    if extra > 0 and shape[extra:] == param_shape:
        leaf.set_metadata(out_sharding=_with_leading_axes(names, extra))
    else:
        leaf.set_metadata(out_sharding=None)


def _with_leading_axes(annotation: tp.Any, extra: int) -> tp.Any:
    """A sharding annotation for a value with more axes in front, which are not sharded."""
    if isinstance(annotation, Format):  # its layout is for fewer axes
        annotation = annotation.sharding
    if isinstance(annotation, NamedSharding):
        spec = PartitionSpec(*[None] * extra, *annotation.spec)
        return NamedSharding(annotation.mesh, spec, memory_kind=annotation.memory_kind)
    return (*[None] * extra, *annotation)


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


def _filter_text(wrt: tp.Any) -> str:
    return wrt.__name__ if isinstance(wrt, type) else repr(wrt)
