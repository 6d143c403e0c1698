"""What the rest of Flax and nnxlite have in common: the rules for logical axis names.

In Flax, `nnx.logical_axis_rules` and `linen.logical_axis_rules` are one function, and the rules one
setting of `flax.core.spmd`. Here that setting is nnxlite's, which is part of the key of every compiled
program: rules that one of the two sets are those of the other.
"""

from __future__ import annotations

import importlib
import typing as tp

from nnxlite.sharding import _annotations


class _AxisRules:
    """Stands for the setting in `flax.core.spmd`."""

    @property
    def rules(self) -> tuple[tuple[str, tp.Any], ...]:
        """The rules in force."""
        return _annotations.LOGICAL_AXIS_RULES.get()

    @rules.setter
    def rules(self, rules: tp.Sequence[tuple[str, tp.Any]]) -> None:
        pairs = tuple(_annotations.rule_pairs(rules))
        _annotations.LOGICAL_AXIS_RULES.restore((pairs,) if pairs else ())


def share_rules_with_linen() -> None:
    """Share the rules with Flax, where it is installed."""
    try:
        spmd: tp.Any = importlib.import_module("flax.core.spmd")
    except ModuleNotFoundError:
        return
    if hasattr(spmd, "_axis_rules") and not isinstance(spmd._axis_rules, _AxisRules):
        present, spmd._axis_rules = spmd._axis_rules.rules, _AxisRules()
        spmd._axis_rules.rules = present
