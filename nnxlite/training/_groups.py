"""`by_path`: an optax transformation for each group of parameters, by patterns of their paths."""

from __future__ import annotations

import difflib
import typing as tp

from nnxlite._base.errors import MOST_PATHS, path_text
from nnxlite.training._leaves import Path, flatten, paths
from nnxlite.training.patterns import Pattern

if tp.TYPE_CHECKING:
    import optax

Patterns: tp.TypeAlias = dict[str, Pattern]
"""The patterns in their order, by text."""


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
        ValueError: if `groups` is empty; in `nnx.Optimizer(...)` and at `init`, if a parameter matches
            no pattern or a pattern gets no parameter (a final `"**"` may be empty).

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
        patterns = _compiled(texts)
        _, treedef = flatten(params)
        return treedef.unflatten([_pattern_of(path, patterns) for path in paths(params)])

    labelled: dict[tp.Hashable, optax.GradientTransformation] = {**groups}
    inner = optax.partition(labelled, labels)

    def init(params: tp.Any) -> tp.Any:
        _check_used(paths(params), _compiled(texts))
        return inner.init(params)

    return optax.GradientTransformationExtraArgs(init, inner.update)


def _compiled(texts: tp.Iterable[str]) -> Patterns:
    return {text: Pattern(text) for text in texts}


def _first(path: Path, patterns: Patterns) -> str | None:
    name = path_text(path)
    return next((text for text, p in patterns.items() if p.match(name) is not None), None)


def _pattern_of(path: Path, patterns: Patterns) -> str:
    found = _first(path, patterns)
    if found is None:
        raise ValueError(
            f"by_path: the parameter {path_text(path)} matches none of the patterns "
            f"{', '.join(map(repr, patterns))}. Add one for it, or '**' at the end for the rest."
        )
    return found


def _check_used(every: tp.Sequence[Path], patterns: Patterns) -> None:
    """Raise ValueError for a pattern that no parameter belongs to."""
    used = {_first(path, patterns) for path in every}
    names = [path_text(path) for path in every]
    *_, last = patterns
    for text, pattern in patterns.items():
        if text in used or (text == "**" == last):
            continue
        taken = [name for name in names if pattern.match(name) is not None]
        if taken:
            why = f"what it matches, such as {taken[0]}, belongs to a pattern before it"
        else:
            near = difflib.get_close_matches(text, names, n=3, cutoff=0.5) or names[:MOST_PATHS]
            why = f"there are parameters such as {', '.join(near)}" if near else "there are none"
        raise ValueError(f"by_path: no parameter belongs to the pattern {text!r}: {why}.")
