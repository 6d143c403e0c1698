"""States: nested mappings from keys to leaves, and their flat form (`nnx.statelib`).

A `State` is what `split` and `state` give and `merge` and `update` take: the leaves of an object
graph (Variables, arrays, or anything else), filed under the path that leads to each.  Every inner
mapping is itself a `State`, stored in its parent, so `state["a"]` is the same object each time and
what is written to it the parent sees.  A `FlatState` is the same thing as a sorted sequence of
(path, leaf) pairs.  `split_state` and `merge_state`, `to_flat_state` and `from_flat_state` are
inverses (empty inner mappings hold no leaf, and vanish on the way).

Order.  A State keeps the order in which keys were put in, but wherever leaves are counted off (as
a pytree, in a FlatState) keys are sorted: numbers by value, then strings, then the rest.  That
order depends on nothing but the keys.

Versions.  Every edit of a State changes its version, see `nnxlite._base.interning`.

All of it is iterative: depth is bounded by memory, not by Python's recursion limit.
"""

from nnxlite._state._definition import *
from nnxlite._state._flat import *
