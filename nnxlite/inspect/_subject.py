"""What `check` looks at: a model, its optimizers and its inputs, taken apart, and one traced call."""

from __future__ import annotations

import dataclasses
import functools
import typing as tp

import jax
import jax.numpy as jnp

from nnxlite._base.jax import used_inputs
from nnxlite._base.text import is_array
from nnxlite._state._definition import State
from nnxlite.filters import All, Frozen, Not
from nnxlite.graph._functional import flat_pairs
from nnxlite.graph._kinds import GraphNode, hidden_writes_undone
from nnxlite.graph._plan import view
from nnxlite.graph._walk import iter_graph
from nnxlite.inspect._calls import PackedCall, Path, Watch, watched
from nnxlite.objects._module import Module
from nnxlite.training import ModelAndOptimizer, Optimizer
from nnxlite.variables._kinds import Intermediate
from nnxlite.variables._variable import Variable


@dataclasses.dataclass
class Subject:
    """A model, its optimizers and its inputs, taken apart.

    Attributes:
        model, optimizer, inputs, named_inputs: as given.
        everything: the leaves of all three by path, shared ones once.
        leaves: those of the model.
        nodes: the objects of the model.
        optimizers: each with its path.
    """

    model: tp.Any
    optimizer: tp.Any
    inputs: tuple[tp.Any, ...]
    named_inputs: dict[str, tp.Any]

    def __post_init__(self) -> None:
        all_inputs = {**dict(enumerate(self.inputs)), **self.named_inputs}
        starts: list[Path] = [(), ("optimizer",), ("inputs",)]
        everything = leaves_of([self.model, self.optimizer, all_inputs])
        self.everything = {(*starts[p[0]], *p[1:]): leaf for p, leaf in everything.items()}
        self.leaves = leaves_of(self.model)
        self.nodes = {p: node for p, node in iter_graph(self.model) if isinstance(node, GraphNode)}
        self.optimizers: dict[Path, tp.Any] = {
            ("optimizer", *path): node
            for path, node in iter_graph(self.optimizer)
            if isinstance(node, Optimizer)
        }

    @property
    def is_called(self) -> bool:
        """Whether there are inputs."""
        return bool(self.inputs or self.named_inputs)

    def variables(self, kind: type[Variable[tp.Any]] = Variable) -> dict[Path, tp.Any]:
        """The Variables of a kind in the model that have one array, with it."""
        values = {p: v.get_raw_value() for p, v in self.leaves.items() if isinstance(v, kind)}
        return {path: value for path, value in values.items() if is_array(value)}

    def modules(self) -> dict[Path, Module]:
        """The modules of the model."""
        return {path: node for path, node in self.nodes.items() if isinstance(node, Module)}

    def settings(self) -> tp.Iterator[tuple[Path, tp.Any]]:
        """The static attributes of the objects of the model."""
        for path, node in self.nodes.items():
            for name, value in node._nnx_dict.items():
                if node._nnx_status.get(name) is False:
                    yield (*path, name), value

    def owner(self, path: Path) -> tp.Any:
        """The innermost object around a path."""
        return next(
            (self.nodes[path[:n]] for n in reversed(range(len(path))) if path[:n] in self.nodes),
            None,
        )

    @functools.cached_property
    def call(self) -> TracedCall:
        """The call of the model with the inputs, traced."""
        return TracedCall(self.model, self.inputs, self.named_inputs, self.variables())

    @functools.cached_property
    def trained(self) -> dict[Path, set[Path] | None]:
        """For each optimizer what it trains, None where that is not known."""
        return {path: self._trained(optimizer) for path, optimizer in self.optimizers.items()}

    def selected(self, optimizer: Optimizer[tp.Any]) -> set[Path]:
        """The paths of the Variables of the model that the filter of an optimizer selects."""
        select = All(optimizer.wrt, Not(Frozen()))
        return {path for path, leaf in self.leaves.items() if select(path, leaf)}

    def _trained(self, optimizer: Optimizer[tp.Any]) -> set[Path] | None:
        """The paths of the Variables that an optimizer trains.

        An optimizer does not know its model.  It may be for a part of this one, which is found by the
        paths in the optimizer's state, if it has any.
        """
        chosen = self.selected(optimizer)
        if isinstance(optimizer, ModelAndOptimizer):
            inside = {id(leaf) for _, leaf in iter_graph(optimizer.model)}
            return {path for path in chosen if id(self.leaves[path]) in inside}
        known = parameters_in_state(optimizer)
        if not known:
            return chosen if len(self.optimizers) == 1 else None
        if known.keys() <= chosen:
            return chosen
        last = next(iter(known))
        places = [path[: -len(last)] for path in self.leaves if path[-len(last) :] == last]
        # For each part that may be the optimizer's: paths in the part, and in the model.
        parts = [{p[len(at) :]: p for p in chosen if p[: len(at)] == at} for at in places]
        parts = [part for part in parts if known.keys() <= part.keys()]
        if len(parts) > 1:
            shapes = {path: _shape(leaf) for path, leaf in self.leaves.items()}
            parts = [p for p in parts if all(shapes[p[k]] == known[k] for k in known)]
        return {*parts[0].values()} if len(parts) == 1 else None


def leaves_of(root: tp.Any) -> dict[Path, tp.Any]:
    """Variables, and arrays outside of them, by path; those with several paths once."""
    seen = view(root)
    return dict(zip(seen.graphdef.paths, seen.leaves))


def parameters_in_state(optimizer: Optimizer[tp.Any]) -> dict[Path, tuple[int, ...] | None]:
    """The paths of the parameters for which an optimizer has state, with the shape of that."""
    parts = jax.tree.leaves(optimizer.opt_state, is_leaf=lambda x: isinstance(x, State))
    return {
        path: _shape(leaf)
        for part in parts
        if isinstance(part, State)
        for path, leaf in flat_pairs(part)
        if isinstance(leaf, Variable)
    }


def _shape(leaf: tp.Any) -> tuple[int, ...] | None:
    return getattr(leaf.get_raw_value() if isinstance(leaf, Variable) else leaf, "shape", None)


def is_float(value: tp.Any) -> bool:
    return is_array(value) and jnp.issubdtype(value.dtype, jnp.floating)


class TracedCall:
    """The call of a model on shapes, as a function of the arrays in its Variables.

    Attributes:
        floats: form of the array, for each Variable with a floating one.
        used: the paths of the Variables that the outputs depend on.
        called: the paths of the objects that are called.
    """

    def __init__(
        self, model: tp.Any, args: tp.Any, kwargs: tp.Any, variables: dict[Path, tp.Any]
    ) -> None:
        self._packed = PackedCall(model, args, kwargs)
        self._before = set(leaves_of(model))
        forms = {p: jax.ShapeDtypeStruct(v.shape, v.dtype) for p, v in variables.items()}
        self.floats = {path: form for path, form in forms.items() if is_float(form)}
        self._others = {path: form for path, form in forms.items() if path not in self.floats}
        self._forms = self._packed.arrays, [*self.floats.values()], [*self._others.values()]
        self.called: set[Path] = set()

        def watch(
            call: tp.Any, path: Path, obj: tp.Any, name: str, args: tp.Any, kwargs: tp.Any
        ) -> tp.Any:
            self.called.add(path)
            return call(obj, *args, **kwargs)

        jaxpr = jax.make_jaxpr(lambda *inputs: self._run(*inputs, watch=watch))(*self._forms)
        flags = used_inputs(jaxpr)[len(self._packed.arrays) :]
        self.used = {path for path, flag in zip((*self.floats, *self._others), flags) if flag}

    def connected(self) -> set[Path] | None:
        """The paths of those with a gradient; None if it cannot be computed."""

        def derivative(arrays: tp.Any, floats: tp.Any, others: tp.Any, tangents: tp.Any) -> tp.Any:
            def outputs(floats: list[tp.Any]) -> list[tp.Any]:
                found = self._run(arrays, floats, others)
                return [x for x in found if jnp.issubdtype(x.dtype, jnp.inexact)]

            return jax.jvp(outputs, (floats,), (tangents,))[1]

        floats = self._forms[1]
        try:
            jaxpr = jax.make_jaxpr(derivative)(*self._forms, floats)
        except Exception:  # then the gradient of a loss fails as well, and not silently
            return None
        if not jaxpr.out_avals:
            return None
        flags = used_inputs(jaxpr)[-len(floats) :] if floats else []
        return {path for path, flag in zip(self.floats, flags) if flag}

    def _run(
        self, arrays: tp.Any, floats: tp.Any, others: tp.Any, watch: Watch | None = None
    ) -> list[tp.Any]:
        """The arrays in the result, and in what the modules recorded during the call."""
        model, args, kwargs = self._packed.unpack(arrays)
        values = dict(zip((*self.floats, *self._others), (*floats, *others)))
        for path, leaf in leaves_of(model).items():
            if path in values:
                leaf.set_raw_value(values[path])
        nodes = [node for _, node in iter_graph(model)]
        with hidden_writes_undone(nodes) if watch is None else watched([((), model)], watch):
            result = model(*args, **kwargs)
        recorded = [
            leaf
            for path, leaf in iter_graph(model)
            if isinstance(leaf, Intermediate)
            or (isinstance(leaf, Variable) and path not in self._before)
        ]
        found = [leaf for _, leaf in iter_graph([result, recorded])]
        raw = [leaf.get_raw_value() if isinstance(leaf, Variable) else leaf for leaf in found]
        return [x for x in jax.tree.leaves(raw) if isinstance(x, jax.Array)]
