"""`remat_layers`: which layers of a model compute again in the backward pass, and by which policy."""

from __future__ import annotations

import difflib
import functools
import typing as tp

import jax

from nnxlite._base.errors import MOST_PATHS, path_text
from nnxlite._base.jax import P, R, RematPolicy
from nnxlite.graph._kinds import is_graph_node
from nnxlite.objects._capture import observed
from nnxlite.objects._module import Module, iter_modules
from nnxlite.training.patterns import Pattern
from nnxlite.transforms._control import remat
from nnxlite.transforms._wrapper import name_of


def remat_layers(
    f: tp.Callable[P, R], policies: tp.Mapping[str, RematPolicy | None]
) -> tp.Callable[P, R]:
    """A function in which some modules of its arguments are called under `nnx.remat`.

    The model stays as it is. A module that is called inside another one of these is part of that call.

    Args:
        f: a function of a model, such as a loss; apply `nnx.grad` to the result.
        policies: for patterns of paths in the model ("blocks.*", "encoder.layers.0") a policy of
            `jax.checkpoint_policies`, or None: remember only the inputs. The first pattern that matches
            counts; modules that none matches are called as ever.

    Returns:
        A function of the same arguments.

    Raises:
        ValueError: when called, for a pattern that matches no module of the arguments.

    >>> import jax, jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> mlp = nnx.MLP(4, 4, width=8, depth=2, rngs=nnx.Rngs(0))
    >>> loss = lambda m, x: jnp.sum(jnp.sin(m(x)))
    >>> policies = {"layers.0": None, "layers.*": jax.checkpoint_policies.dots_saveable}
    >>> grads = nnx.grad(nnx.remat_layers(loss, policies))(mlp, jnp.ones((2, 4)))
    >>> same = nnx.grad(loss)(mlp, jnp.ones((2, 4)))
    >>> bool(jnp.allclose(grads["layers"][0]["kernel"][...], same["layers"][0]["kernel"][...]))
    True
    """
    patterns = {text: Pattern(text) for text in policies}

    @functools.wraps(f)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        chosen: dict[int, RematPolicy | None] = {}
        used, names, methods = set[str](), list[str](), list[tuple[type, str]]()
        for model in jax.tree.leaves((args, kwargs), is_leaf=is_graph_node):
            for path, module in iter_modules(model) if isinstance(model, Module) else ():
                names.append(path_text(path))
                found = [
                    t for t, pattern in patterns.items() if pattern.match(names[-1]) is not None
                ]
                used.update(found)
                if found and id(module) not in chosen:
                    chosen[id(module)] = policies[found[0]]
                    methods.append((type(module), "__call__"))
        for text in patterns.keys() - used:
            near = difflib.get_close_matches(text, names, n=3, cutoff=0.3) or names[:MOST_PATHS]
            raise ValueError(
                f"remat_layers: the pattern {text!r} matches no module among the arguments of "
                f"{name_of(f)}; there are {', '.join(near) or 'none'}."
            )

        def observer(
            call: tp.Any, module: tp.Any, name: str, args: tp.Any, kwargs: tp.Any
        ) -> tp.Any:
            if id(module) in chosen:
                return _again(call, chosen[id(module)], module, args, kwargs)
            return call(module, *args, **kwargs)

        with observed(methods, observer):
            return f(*args, **kwargs)

    return wrapper


def _again(call: tp.Any, policy: tp.Any, module: tp.Any, args: tp.Any, kwargs: tp.Any) -> tp.Any:
    """A call under `remat`; anything but arrays and objects, such as a flag, stays a constant."""
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_graph_node)
    traced = [i for i, x in enumerate(leaves) if is_graph_node(x) or isinstance(x, jax.Array)]

    def run(module: tp.Any, values: list[tp.Any]) -> tp.Any:
        filled = dict(zip(traced, values))
        every = [filled.get(i, x) for i, x in enumerate(leaves)]
        args, kwargs = treedef.unflatten(every)
        return call(module, *args, **kwargs)

    return remat(run, policy=policy)(module, [leaves[i] for i in traced])
