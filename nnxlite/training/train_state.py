"""`Struct`: immutable records that are pytrees. `TrainState`: model, optimizer state, step in one."""

from __future__ import annotations

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp

from nnxlite._state._definition import State
from nnxlite.graph._graphdef import GraphDef
from nnxlite.training._leaves import compare

if tp.TYPE_CHECKING:
    import optax

M = tp.TypeVar("M")


@tp.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class Struct:
    """Base of frozen dataclasses whose fields are pytree children; subclasses need no decorator.

    A field made with `dataclasses.field(metadata={"static": True})` (or `{"pytree_node": False}`)
    is static: part of the structure, compared and hashed by JAX.

    >>> import nnxlite as nnx, jax
    >>> class Counts(nnx.metrics.Struct):
    ...     right: int
    ...     seen: int
    >>> jax.tree.leaves(Counts(3, 4).replace(seen=5))
    [3, 5]
    """

    def __init_subclass__(cls, **kwargs: tp.Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True)(cls)
        fields = dataclasses.fields(tp.cast(tp.Any, cls))
        is_static = lambda f: f.metadata.get("static") or f.metadata.get("pytree_node") is False
        static = [f.name for f in fields if is_static(f)]
        children = [f.name for f in fields if f.name not in static]
        jax.tree_util.register_dataclass(cls, data_fields=children, meta_fields=static)

    def replace(self, **updates: tp.Any) -> tp.Self:
        """A copy with other values in some fields; TypeError for a field that does not exist.

        Args:
            updates: fields by name.
        """
        return dataclasses.replace(tp.cast(tp.Any, self), **updates)


class TrainState(Struct, tp.Generic[M]):
    """The result of `nnx.split` with an optax transformation and its state.

    A subclass adds states of its own as annotated fields (batch statistics, say).

    Attributes:
        graphdef: the model's definition (static).
        params: the State to train.
        opt_state: the state of `tx`.
        step: int32, shape `()`: how often `apply_gradients` was called.
        tx: the optax transformation (static).

    >>> import nnxlite as nnx, jax, jax.numpy as jnp, optax
    >>> graphdef, params = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> state = nnx.TrainState.create(graphdef, params=params, tx=optax.sgd(0.1))
    >>> def loss_fn(params, x):
    ...     y, _ = state.apply(params)(x)
    ...     return y.sum()
    >>> state = state.apply_gradients(jax.grad(loss_fn)(state.params, jnp.ones((1, 2))))
    >>> int(state.step), state.apply("params")(jnp.ones((1, 2)))[0].shape
    (1, (1, 3))
    """

    graphdef: GraphDef[M] = dataclasses.field(metadata={"static": True})
    params: State
    opt_state: optax.OptState
    step: jax.Array
    tx: optax.GradientTransformation = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        graphdef: GraphDef[M],
        *,
        params: State,
        tx: optax.GradientTransformation,
        step: int = 0,
        **kwargs: tp.Any,
    ) -> tp.Self:
        """A train state with a new optimizer state.

        Args:
            graphdef: the definition of the model.
            params: its parameters.
            tx: the optax transformation.
            step: number of updates so far.
            **kwargs: the fields that a subclass adds.
        """
        opt_state = tx.init(tp.cast(tp.Any, params))
        return cls(graphdef, params, opt_state, jnp.asarray(step), tx, **kwargs)

    def apply(self, state: State | str, *states: State | str) -> tp.Any:
        """Call the model with these states: `state.apply("params")(x)`.

        The model gets Variables of its own: what it writes is in the result, not in the states.

        Args:
            state, states: States, or names of fields with States.

        Returns a proxy of the model, as `graphdef.apply` does, whose calls return
        `(result, (graphdef, state))`.

        Raises AttributeError for a name that is not a field.
        """
        names = [f.name for f in dataclasses.fields(tp.cast(tp.Any, self))]
        for name in (state, *states):
            if isinstance(name, str) and name not in names:
                raise AttributeError(
                    f"{type(self).__name__} has no field {name!r}; its fields: {', '.join(names)}."
                )
        given = [getattr(self, s) if isinstance(s, str) else s for s in (state, *states)]
        return self.graphdef.apply(*jax.tree.map(lambda x: x, given))  # Variables are rebuilt

    def apply_gradients(self, grads: State, **kwargs: tp.Any) -> tp.Self:
        """The train state after one update of the parameters, with its step incremented.

        Args:
            grads: of the structure of `params`.
            **kwargs: new values for other fields.

        Raises ValueError if the structure of `grads` is not that of `params`.
        """
        if jax.tree.structure(grads) != jax.tree.structure(self.params):
            wrong = compare(self.params, grads, "gradients", "parameters")
            raise ValueError(
                "The structure of the gradients is not that of the parameters: "
                f"{wrong or 'their containers or Variables differ'}. Differentiate with respect to "
                "the State in `params`."
            )
        import optax  # here, since it takes as long to import as the whole library

        params: tp.Any = self.params
        updates, opt_state = self.tx.update(tp.cast(tp.Any, grads), self.opt_state, params)
        params = optax.apply_updates(params, updates)
        return self.replace(params=params, opt_state=opt_state, step=self.step + 1, **kwargs)
