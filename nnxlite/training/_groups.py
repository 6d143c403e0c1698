"""`by_path`: an optax transformation for each group of parameters, by patterns of their paths."""

from __future__ import annotations

import typing as tp

from nnxlite._base.errors import listed, path_text
from nnxlite.training._leaves import flatten, paths
from nnxlite.training.patterns import Pattern

if tp.TYPE_CHECKING:
    import optax


def by_path(
    groups: tp.Mapping[str, optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """An optax transformation that treats groups of parameters differently, by their paths.

    A pattern is a path with dots, in which `*` stands for any text within one name or index, and `**`
    for any number of them: "encoder.**", "blocks.*.bias", "**.kernel". A parameter belongs to the
    first pattern that matches it.

    Args:
        groups: for each pattern the transformation of its parameters; `optax.set_to_zero()` leaves
            them as they are (as does `nnx.freeze`, which saves their gradients too).

    Returns:
        An optax transformation, for `nnx.Optimizer` or any pytree of parameters. It is made of
        `optax.partition`, with the patterns as labels.

    Raises:
        TypeError: if a pattern is not text, or what belongs to one is not a transformation.
        ValueError: if `groups` is empty; at `init`, if a parameter matches no pattern or a pattern
            gets no parameter (`"**"` may be empty).

    >>> import nnxlite as nnx, optax
    >>> model = nnx.Dict(encoder=nnx.Linear(2, 3, rngs=nnx.Rngs(0)), head=nnx.Param(1.0))
    >>> groups = {"encoder.**": optax.sgd(0.1), "**": optax.sgd(1.0)}
    >>> optimizer = nnx.Optimizer(model, nnx.by_path(groups), wrt=nnx.Param)
    >>> grads = nnx.grad(lambda m: m.encoder.bias.sum() + m.head)(model)
    >>> updates = optimizer.update(model, grads)
    >>> round(float(updates.encoder.bias[0]), 3), float(updates.head)
    (-0.1, -1.0)
    """
    import optax  # here, since it takes as long to import as the whole library

    if not groups:
        raise ValueError('by_path needs a pattern at least, such as {"**": optax.adam(1e-3)}.')
    for text, tx in groups.items():
        if not isinstance(text, str):
            raise TypeError(f"by_path takes patterns such as 'encoder.**', got {text!r}.")
        if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
            raise TypeError(
                f"by_path: {text!r} needs an optax transformation, got {type(tx).__name__}."
            )
    # As text, since a compiled step captures it: that compares by content, and a Pattern does not.
    texts = tuple(groups)

    def labels(params: tp.Any) -> tp.Any:
        patterns = [Pattern(text) for text in texts]
        names = [path_text(path) for path in paths(params)]
        found = [
            next((p.text for p in patterns if p.match(name) is not None), None) for name in names
        ]
        if None in found:
            raise ValueError(
                f"by_path: the parameter {names[found.index(None)]} matches none of the patterns "
                f"{', '.join(map(repr, texts))}. Add one for it, or '**' at the end for the rest."
            )
        for text in texts:
            if text not in found and text != "**":
                raise ValueError(
                    f"by_path: no parameter belongs to the pattern {text!r}, or all belong to one "
                    f"before it. The parameters, without frozen ones: {listed(names) or 'none'}."
                )
        return flatten(params)[1].unflatten(found)

    labelled: dict[tp.Hashable, optax.GradientTransformation] = {**groups}
    return optax.partition(labelled, labels)
