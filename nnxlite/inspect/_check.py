"""`check`: what will go wrong silently with a model, its optimizers, and its inputs.

Each kind of finding has a function that yields the findings of this kind; `_CHECKS` lists them.  All
look at one `Subject`, the leaves and objects of a model with their paths, and none changes it.  With
inputs, the model is called on shapes, twice: once to see which modules are called and which Variables
the outputs depend on, once together with its derivative, to see which Variables have a gradient.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import filter_text, path_text, short_type
from nnxlite._base.jax import Tracer, is_concrete
from nnxlite._base.statics import captures
from nnxlite._base.text import WIDTH, can_be_read, clip
from nnxlite._state._flat import content
from nnxlite.graph._kinds import GraphNode, find_hidden, is_marked
from nnxlite.graph._walk import iter_graph
from nnxlite.inspect._calls import Path, abstract, is_called
from nnxlite.inspect._diff import numbers_of
from nnxlite.inspect._nan import is_finite, is_measured
from nnxlite.inspect._subject import Subject, is_float, parameters_in_state
from nnxlite.objects._module import Module
from nnxlite.objects._rngs import RngStream
from nnxlite.training import OptVariable
from nnxlite.variables._definition import FROZEN
from nnxlite.variables._kinds import BatchStat, Param
from nnxlite.variables._variable import Variable

__all__ = ["Finding", "Findings", "check"]

_InArrays = tp.Literal["bare array", "mixed dtypes", "weak type", "not finite", "aliased array"]
_InSettings = tp.Literal["mixed modes", "hidden data", "traced setting"]
_InStreams = tp.Literal["equal keys", "equal lanes"]
_InTraining = tp.Literal["outside wrt", "empty filter", "two optimizers"]
_InCalls = tp.Literal["never called", "no gradient"]
Kind = tp.Literal[_InArrays, _InSettings, _InStreams, _InTraining, _InCalls, "not checked"]

MAX_LINES = 20
"""How many findings of one kind the text lists."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that will go wrong silently; `str` gives it as one line.

    Attributes:
        kind: what it is, in two words; "not checked" where something kept `check` from looking.
        path: where it is: in the model, or below "optimizer" or "inputs".
        text: a sentence, with the remedy.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> model = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    >>> model.w = jnp.zeros(2)
    >>> nnx.check(model).entries[0].kind
    'bare array'
    """

    kind: Kind
    path: Path
    text: str

    def __str__(self) -> str:
        return f"{_at(self.path)}: {self.text}"


class Findings(tuple[Finding, ...]):
    """The findings of `check`: true if there are any, iterable, and readable as text.

    Attributes:
        entries: one `Finding` (kind, path, text) for each, those of one kind together.

    >>> import nnxlite as nnx
    >>> found = nnx.check(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> bool(found), len(found.entries)
    (False, 0)
    """

    @property
    def entries(self) -> tuple[Finding, ...]:
        """The findings."""
        return tuple(self)

    def __repr__(self) -> str:
        groups: dict[str, list[Finding]] = {}
        for entry in self:
            groups.setdefault(entry.kind, []).append(entry)
        lines: list[str] = []
        for kind, entries in groups.items():
            lines += [f"{kind}:", *(f"  {entry}" for entry in entries[:MAX_LINES])]
            if len(entries) > MAX_LINES:
                lines.append(f"  ... {len(entries) - MAX_LINES:,} more")
        return "\n".join(lines) or "nothing found"


def check(
    model: tp.Any, optimizer: tp.Any = None, /, *inputs: tp.Any, **named_inputs: tp.Any
) -> Findings:
    """Silent mistakes in a model, its optimizers and its inputs, each with the remedy.

    Without inputs:

    - "bare array": a floating array that is not in a Variable, where a Param was replaced by one or not,
    - "outside wrt": a Param that no optimizer trains,
    - "empty filter": an optimizer whose `wrt` selects nothing of the model,
    - "two optimizers": a parameter that several optimizers train,
    - "mixed modes": some modules in training mode, others in evaluation mode,
    - "equal keys": random streams with the same numbers, or one stream with the same in several lanes,
    - "equal lanes": a stack of Params that are equal, as if they were initialized with one key,
    - "mixed dtypes": Params or inputs of another floating dtype than the rest, where no layer says so,
    - "weak type": a Param that is a number, or took its dtype from one: a step compiles thrice,
    - "not finite": NaN or infinity in Params, running averages or an optimizer's state,
    - "traced setting": a value of a transform in a static attribute or in metadata, where it stays,
    - "hidden data": an array, Variable or module in a plain object, which is static,
    - "aliased array": one array in two Variables, of the model, an optimizer or the inputs.

    With inputs, for the call `model(*inputs)`, which is traced for its shapes only:

    - "never called": a module that is not called, and whose Variables are not used,
    - "no gradient": a parameter that the floating outputs do not depend on, or only by `stop_gradient`.

    Some findings may be on purpose, such as a frozen layer. What fails with an error is not among them.

    Args:
        model: a module, or with no inputs any pytree of some.
        optimizer: an `Optimizer`, several in a tuple, list or dict, or None.
        inputs, named_inputs: arguments of the model; arrays may be `jax.ShapeDtypeStruct`.

    Returns:
        `Findings`: false if nothing was found, else a sequence of `Finding`s (kind, path, text), and
        readable as text.  Nothing is raised: what cannot be looked at, such as a call that fails, is a
        finding of kind "not checked".  The model stays as it is.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> class Net(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.l1 = nnx.Linear(2, 3, rngs=rngs)
    ...         self.l2 = nnx.Linear(2, 3, rngs=rngs)
    ...     def __call__(self, x):
    ...         return self.l1(x)
    >>> model = Net(nnx.Rngs(0))
    >>> model.l1.bias = jnp.zeros(3)
    >>> found = nnx.check(model, None, jnp.ones((1, 2)))
    >>> [(finding.kind, finding.path) for finding in found]
    [('bare array', ('l1', 'bias')), ('never called', ('l2',))]
    >>> print(nnx.check(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), None, jnp.ones((1, 2))))
    nothing found
    """
    try:
        subject = Subject(model, optimizer, inputs, named_inputs)
    except Exception as error:  # half-built objects, containers with hidden data
        return Findings((_not_checked("the model", error),))
    found: list[Finding] = []
    for look in _CHECKS:
        try:
            found += look(subject)
        except Exception as error:  # such as a property of the user's own
            name = look.__name__.strip("_").replace("_", " ")
            found.append(_not_checked(f"for {name}", error))
    return Findings(tuple(found))


def _at(path: Path) -> str:
    """A path as text; of a long one the end."""
    text = path_text(path)
    return text if len(text) <= WIDTH else "..." + text[3 - WIDTH :]


def _not_checked(what: str, error: Exception) -> Finding:
    reason = clip(f"{type(error).__name__}: {error}".split("\n", 1)[0], 200)
    return Finding("not checked", (), f"could not check {what}: {reason}")


# Without inputs ------------------------------------------------------------------------------


def _bare_arrays(subject: Subject) -> tp.Iterator[Finding]:
    params = {
        (type(subject.owner(path)), path[-1])
        for path, leaf in subject.leaves.items()
        if isinstance(leaf, Param)
    }
    in_optimizers = set().union(*map(parameters_in_state, subject.optimizers.values()))
    for path, leaf in subject.leaves.items():
        owner = subject.owner(path)
        if isinstance(leaf, Variable) or not is_float(leaf) or not isinstance(owner, Module):
            continue
        name = type(owner).__name__
        is_ours = type(owner).__module__.startswith("nnxlite.")  # our layers have Variables only
        if is_ours or path in in_optimizers or (type(owner), path[-1]) in params:
            text = (
                f"a bare array has replaced the Variable that {name} has here, so it is not trained; "
                "assign nnx.Param(array), or write to the elements of the Variable (`[...] = array`)"
            )
        else:
            text = (
                f"a bare array in {name}, which no optimizer trains; make it an nnx.Param, or an "
                "nnx.Variable if it is a constant"
            )
        yield Finding("bare array", path, text)


def _optimizers(subject: Subject) -> tp.Iterator[Finding]:
    if not subject.optimizers:
        given = subject.optimizer
        if given is not None and not (isinstance(given, (tuple, list, dict)) and not given):
            text = (
                f"expected an nnx.Optimizer, several or None, got {short_type(given)}; inputs come "
                "after it: nnx.check(model, None, *inputs)"
            )
            yield Finding("not checked", ("optimizer",), text)
        return
    trainers: dict[Path, list[Path]] = collections.defaultdict(list)
    for optimizer, paths in subject.trained.items():
        for path in paths or ():
            trainers[path].append(optimizer)
    for path in subject.leaves:
        several = trainers.get(path, [])
        if len(several) > 1:
            names = " and ".join(map(_at, several))
            text = f"trained by {names}; give each optimizer a filter `wrt` of its own"
            yield Finding("two optimizers", path, text)
    for path, optimizer in subject.optimizers.items():
        if not subject.selected(optimizer) and not parameters_in_state(optimizer):
            text = (
                f"wrt={clip(filter_text(optimizer.wrt), 60)} selects no Variable of the model that is "
                "not frozen, so that updates change nothing; give it a filter that does, as nnx.Param"
            )
            yield Finding("empty filter", path, text)
    if None in subject.trained.values() or not trainers:
        return
    filters = ", ".join(clip(filter_text(o.wrt), 60) for o in subject.optimizers.values())
    for path, leaf in subject.leaves.items():
        if isinstance(leaf, Param) and path not in trainers and not leaf.has_metadata(FROZEN):
            text = (
                f"{type(leaf).__name__} that no optimizer trains, as wrt={filters} does not select it; "
                "change `wrt` unless it is frozen on purpose"
            )
            yield Finding("outside wrt", path, text)


_MODES = ("deterministic", "use_running_average")  # True in evaluation


def _modes(subject: Subject) -> tp.Iterator[Finding]:
    modes: dict[bool, list[tuple[Path, str]]] = {False: [], True: []}
    for path, module in subject.modules().items():
        rates = [vars(module).get(name) for name in ("rate", "dropout_rate")]
        idle = any(isinstance(rate, (int, float)) and rate == 0 for rate in rates)
        for name in _MODES:
            mode = vars(module).get(name)
            if isinstance(mode, bool) and not (idle and name == "deterministic"):
                modes[mode].append((path, name))
    few = len(modes[True]) < len(modes[False])
    if not modes[few]:
        return
    names = ("training", "evaluation")
    (other, _), *more = modes[not few]
    others = f"{_at(other)} and {len(more):,} more are" if more else f"{_at(other)} is"
    for path, name in modes[few]:
        text = (
            f"{name}={few}, {names[few]} mode, while {others} in {names[not few]} mode; "
            "call model.train() or model.eval() on the whole model"
        )
        yield Finding("mixed modes", path, text)


def _streams(subject: Subject) -> tp.Iterator[Finding]:
    used: set[Path] = set()
    if subject.is_called:
        with contextlib.suppress(Exception):  # is a finding of `_calls`
            used = subject.call.used
    seen: dict[tp.Hashable, Path] = {}
    for path, stream in subject.nodes.items():
        if not isinstance(stream, RngStream):
            continue
        if stream.tag == "carry" and (*path, "key") not in used:
            continue  # recurrent layers have one by default, for carries that are zeros by default
        key, count = stream.key.get_value(), stream.count.get_value()
        keys, counts = numbers_of(key), numbers_of(count)
        if keys is None or counts is None or not keys.size:
            continue
        content = (str(key.dtype), keys.shape, keys.tobytes(), counts.tobytes())
        first = seen.setdefault(content, path)
        if first != path:
            text = (
                f"this random stream gives the same numbers as {_at(first)}, as both have the "
                "same key and count; use other seeds, or rngs.fork()"
            )
            yield Finding("equal keys", path, text)
        lanes = np.concatenate([keys.reshape(key.size, -1), counts.reshape(-1, 1)], axis=1)
        different = len(np.unique(lanes, axis=0))
        if different < len(lanes):
            text = (
                f"this random stream has {len(lanes)} lanes, and only {different} of their keys "
                "differ; use nnx.split_rngs or rngs.split in place of one that repeats the key"
            )
            yield Finding("equal keys", path, text)


def _lanes(subject: Subject) -> tp.Iterator[Finding]:
    for path, value in subject.variables(Param).items():
        if not is_float(value) or value.ndim < 3 or value.shape[0] < 2 or not can_be_read(value):
            continue
        first, second = np.asarray(value[:2]).astype(np.float32)
        random = len(np.unique(first)) > max(2, first.size // 2)  # not zeros, ones or a pattern
        alike = random and (first == second).all()  # as most are not, the others need not be read
        if alike and (np.asarray(value).astype(np.float32) == first).all():
            text = (
                f"all {value.shape[0]} slices along the first axis are equal, as if they were "
                "initialized with one key; split the streams of the constructor: "
                f"@nnx.split_rngs(splits={value.shape[0]})"
            )
            yield Finding("equal lanes", path, text)


def _dtypes(subject: Subject) -> tp.Iterator[Finding]:
    dtypes = {p: abstract(v).dtype for p, v in subject.variables(Param).items() if is_float(v)}
    if not dtypes:
        return
    usual = collections.Counter(dtypes.values()).most_common(1)[0][0]
    said = {path: _dtype_of(subject.owner(path), "param_dtype") for path in dtypes}
    if any(dtype != (said[path] or usual) for path, dtype in dtypes.items()):
        for path, dtype in dtypes.items():
            if dtype != usual:
                text = (
                    f"{dtype}, while most Params are {usual}, so that operations on both use the "
                    "wider one; convert it, or give its layer this `param_dtype`"
                )
                yield Finding("mixed dtypes", path, text)
    known = {*dtypes.values(), *(_dtype_of(m, "dtype") for m in subject.modules().values())}
    for path, value in subject.everything.items():
        is_input = path[:1] == ("inputs",) and is_float(value)
        if is_input and (dtype := abstract(value).dtype) not in known:
            text = (
                f"{dtype}, while the Params are {usual} and no layer has this `dtype`, so that "
                "operations on both use the wider one; convert the input, or give layers a `dtype`"
            )
            yield Finding("mixed dtypes", path, text)


def _weak_types(subject: Subject) -> tp.Iterator[Finding]:
    for path, leaf in subject.leaves.items():
        if not isinstance(leaf, (Param, BatchStat)):
            continue
        value = leaf.get_raw_value()
        number = isinstance(value, (int, float, complex)) and not isinstance(value, bool)
        if number or getattr(value, "weak_type", False) is True:
            what = f"the number {value!r}" if number else f"weakly typed {short_type(value)}"
            text = (
                f"{what}, which a first update makes strongly typed, so that a step compiles up to "
                "three times; give the array a dtype, as in jnp.full((1,), -1.0, jnp.float32)"
            )
            yield Finding("weak type", path, text)


def _not_finite(subject: Subject) -> tp.Iterator[Finding]:
    for path, leaf in subject.everything.items():
        if not isinstance(leaf, (Param, BatchStat, OptVariable)):
            continue
        for value in jax.tree.leaves(content(leaf)):
            value = np.asarray(value) if isinstance(value, np.generic) else value
            is_read = is_measured(value) and can_be_read(value)
            if is_read and (wrong := value.size - int(is_finite(value).sum())):
                remedy = (
                    "assign zeros to a mean and ones to a variance"
                    if isinstance(leaf, BatchStat)
                    else "nnx.find_nan shows where they arise"
                )
                text = (
                    f"{wrong:,} of {value.size:,} numbers are NaN or infinite; restore a "
                    f"checkpoint, or {remedy}"
                )
                yield Finding("not finite", path, text)


def _dtype_of(owner: tp.Any, name: str) -> tp.Any:
    """A dtype that is a setting of an object, or None."""
    given = getattr(owner, "__dict__", {}).get(name)
    try:
        return None if given is None else jnp.dtype(given)
    except TypeError:
        return None


def _aliases(subject: Subject) -> tp.Iterator[Finding]:
    seen: dict[int, tuple[Path, tp.Any, bool]] = {}
    for path, leaf in subject.everything.items():
        is_variable = isinstance(leaf, Variable)
        for value in jax.tree.leaves(leaf.get_raw_value() if is_variable else leaf):
            if not is_concrete(value):
                continue
            first, _, in_variable = seen.setdefault(id(value), (path, value, is_variable))
            if first != path and (in_variable or is_variable):
                text = (
                    f"the same array as {_at(first)}, so that donation of one deletes both; copy "
                    "it (jnp.copy, nnx.clone(..., arrays=True)), or share the Variable to tie them"
                )
                yield Finding("aliased array", path, text)


# With inputs ---------------------------------------------------------------------------------


def _calls(subject: Subject) -> tp.Iterator[Finding]:
    if not subject.is_called:
        return
    if not isinstance(subject.model, GraphNode) or not callable(subject.model):
        name = type(subject.model).__name__
        text = f"cannot call {name} with the inputs; give a module with `__call__`"
        yield Finding("not checked", (), text)
        return
    try:
        call = subject.call
    except Exception as error:
        yield _not_checked("the call with these inputs", error)
        return
    used, called = call.used, call.called
    used_leaves = {id(subject.leaves[path]) for path in used}
    active = {path[:n] for path in called for n in range(len(path) + 1)}
    idle: set[Path] = set()
    for path, module in sorted(subject.modules().items(), key=lambda pair: len(pair[0])):
        if path in active or not is_called(module) or _is_below(path, idle):
            continue
        if not any(id(leaf) in used_leaves for _, leaf in iter_graph(module)):
            idle.add(path)
            text = (
                f"the call of the model uses neither a method nor a Variable of this "
                f"{type(module).__name__}; call it, or remove it"
            )
            yield Finding("never called", path, text)
    trained = set().union(*(paths or () for paths in subject.trained.values()))
    free = {p for p in subject.variables(Param) if not subject.leaves[p].has_metadata(FROZEN)}
    wanted = trained or free
    connected = call.connected()
    if connected is None:
        return
    for path in call.floats:
        if path in wanted and path not in connected and not _is_below(path, idle):
            text = "its gradient is zero, as the outputs " + (
                "depend on it only through stop_gradient, or an operation without a derivative"
                if path in used
                else "do not depend on it; use it in the call, or remove it"
            )
            yield Finding("no gradient", path, text)


def _is_below(path: Path, places: set[Path]) -> bool:
    return bool(places) and any(path[:n] in places for n in range(len(path) + 1))


def _hidden(subject: Subject) -> tp.Iterator[Finding]:
    for path, value in subject.settings():
        found = None if is_marked(value) else find_hidden(value, levels=100, limit=100_000)
        if found is None or is_marked(found.owner):
            continue
        kind = type(found.owner).__name__
        text = (
            f"{short_type(found.value)} in a {kind}, which is neither an nnx.Module nor a pytree: "
            f"it is static, so not trained, saved or counted. Derive {kind} from nnx.Module, or "
            "mark what is meant with nnx.static."
        )
        yield Finding("hidden data", (*path, *found.path), text)


def _traced_settings(subject: Subject) -> tp.Iterator[Finding]:
    settings = [*subject.settings()]
    for path, leaf in subject.leaves.items():
        if isinstance(leaf, Variable):
            settings += [((*path, name), x) for name, x in leaf.get_metadata().items()]
    for path, value in settings:
        traced = next((x for x in captures(value) if isinstance(x, Tracer)), None)
        if traced is not None:
            text = (
                f"contains {short_type(traced)} of a transform, which cannot be used once that has "
                "returned; pass it as an argument, or make it the value of an nnx.Variable"
            )
            yield Finding("traced setting", path, text)


_CHECKS: tp.Final = (
    _bare_arrays,
    _optimizers,
    _modes,
    _streams,
    _lanes,
    _dtypes,
    _weak_types,
    _not_finite,
    _hidden,
    _traced_settings,
    _aliases,
    _calls,
)
