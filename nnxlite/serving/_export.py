"""`export`: a call as a program of StableHLO and its weights, which run without the code.

The program is a function of two lists of arrays: the weights, which are the Variables of all objects
among the arguments, and the leaves of the other arguments.  Neither list knows of any class, so that
`jax.export` can store it, and a process can run it, that has none of the code the model was made of.
Random keys cross as their data.

A call that writes Variables is refused: requests that are answered at the same time share no state.
"""

from __future__ import annotations

import typing as tp
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import path_text, short_type
from nnxlite._base.jax import as_integers
from nnxlite.boundary._call_def import Partition, parameter_names
from nnxlite.graph._functional import flat_pairs, merge, split
from nnxlite.graph._kinds import PYTREE, kind_of
from nnxlite.objects._pytree import Pytree
from nnxlite.serving import _trees
from nnxlite.serving._file import read, write
from nnxlite.serving._signature import Aval, Signature, dtype_name, from_data, is_key, to_data
from nnxlite.transforms._wrapper import name_of, unbind
from nnxlite.variables._variable import Variable, is_variable


class Exported:
    """A call that `export` or `load_exported` made: call it with arrays, or `save` it.

    Args:
        program: the `jax.export.Exported`.
        weights: the arrays it runs with, by path.
        signature: what it takes and returns.

    Attributes:
        program: the `jax.export.Exported`.
        weights: the arrays it runs with, by path; others of the same shapes can be put in.
        name: of the function.
        platforms: where it runs, such as `("cpu", "cuda")`.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> exported = nnx.export(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((1, 2)), shapes="b, 2")
    >>> print(exported)
    Exported(Linear: inputs=float32[b, 2], platforms=cpu, weights=2)
    >>> exported(jnp.ones((5, 2))).shape, exported(jnp.ones((7, 2))).shape
    ((5, 3), (7, 3))
    >>> exported.num_programs
    2
    """

    def __init__(
        self, program: jax.export.Exported, weights: dict[str, jax.Array], signature: Signature
    ) -> None:
        self.program = program
        self.weights = weights
        self.signature = signature
        self.name = signature.name
        self.platforms = signature.platforms

        groups = Partition(tuple(i in signature.donated for i in range(len(signature.avals))))

        def call(
            weights: list[jax.Array], donated: list[jax.Array], given: list[jax.Array]
        ) -> tp.Any:
            return program.call(weights, groups.join(donated, given))

        self._groups = groups
        self._call: tp.Any = jax.jit(call, donate_argnums=1)

    def __call__(self, *args: tp.Any) -> tp.Any:
        """The result for arguments of the shapes and dtypes that were exported.

        Args:
            *args: the arguments that are not objects, in order.

        Raises ValueError where they do not match, or on another platform.
        """
        signature, name = self.signature, f"Exported {self.name}"
        platform = jax.default_backend()
        if _canonical(platform) not in map(_canonical, self.platforms):
            raise ValueError(
                f"{name} was exported for {', '.join(self.platforms)}, and this process runs on "
                f"{platform}. Export it with platforms=({platform!r}, ...)."
            )
        if len(args) != len(signature.inputs):
            raise ValueError(
                f"{name} takes {len(signature.inputs)} arguments ({', '.join(signature.parameters)}); "
                f"got {len(args)}."
            )
        values: list[tp.Any] = []
        for label, structure, arg in zip(signature.parameters, signature.inputs, args):
            try:
                values += _trees.matching(structure, arg, label)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        leaves = [_as_operand(name, aval, x) for aval, x in zip(signature.avals, values)]
        weights = [to_data(self.weights[aval.path]) for aval in signature.weights]
        out = list(self._call(weights, *self._groups.split(leaves)))
        for i, impl in signature.keys.items():
            out[i] = jax.random.wrap_key_data(out[i], impl=impl)
        return _trees.unflatten(signature.outputs, out)

    @property
    def num_programs(self) -> int:
        """How many programs were compiled so far: one for each combination of shapes."""
        return self._call._cache_size()

    def save(self, path: tp.Any) -> None:
        """Write program and weights to one file, which appears when it is complete.

        Args:
            path: of the file; one that exists is replaced.

        Raises:
            ImportError: without the package `flatbuffers` (`pip install "nnxlite[serving]"`).
            OSError: if it cannot be written; a file that was there is then still there.
        """
        write(path, self.program, self.weights, self.signature)

    def __repr__(self) -> str:
        inputs = ", ".join(map(str, self.signature.avals))
        return (
            f"Exported({self.name}: inputs={inputs}, platforms={'/'.join(self.platforms)}, "
            f"weights={len(self.weights)})"
        )


def export(
    fun: tp.Callable[..., tp.Any],
    *args: tp.Any,
    shapes: tp.Any = None,
    constraints: tp.Sequence[str] = (),
    platforms: tp.Sequence[str] | None = None,
    donate: int | tp.Sequence[int] = (),
    vjp_order: int = 0,
) -> Exported:
    """A call as a program with weights, to be saved and run without the code that made it.

    Objects among the arguments, the model itself and the object of a method are weights, as are callable
    pytrees such as modules of Equinox: they are stored, so the exported call does not take them.  All
    other arrays are its arguments; arrays that the function captures become constants of the program.

    Args:
        fun: a module, a method of one, or a function of objects and arrays.
        *args: examples for the arguments: arrays, `jax.ShapeDtypeStruct`s, or trees of them (dicts,
            lists, tuples, named tuples).
        shapes: which dimensions may vary: for each argument that is not an object a string such as
            `"batch, 28, 28"` or `"batch, ..."`, None for all as in the example, or a tree of these;
            where there is one argument, just the string.  Equal names are equal sizes.
        constraints: what is known about sizes, such as `"batch <= 64"` or `"length == 2 * half"`.
        platforms: where it is to run, such as `("cpu", "cuda")`; by default on the present one.
        donate: the numbers of arguments, objects not counted, whose memory a call may use again.
        vjp_order: how often the saved program can be differentiated in its arguments.

    Returns:
        An `Exported`.

    Raises:
        ValueError: for a call that writes Variables, as dropout and BatchNorm in training do, or shapes
            that do not match the examples.
        TypeError: for arguments or results in containers that other processes do not know.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> model = nnx.MLP(4, 2, 8, 1, rngs=nnx.Rngs(0))
    >>> def classify(model, batch):
    ...     return {"class": model(batch["x"]).argmax(-1)}
    >>> exported = nnx.export(classify, model, {"x": jnp.ones((1, 4))}, shapes="b, 4")
    >>> exported({"x": jnp.ones((3, 4))})["class"].shape
    (3,)
    """
    name = type(fun).__name__ if issubclass(type(fun), Pytree) else name_of(fun)
    bound = unbind(fun)
    positional = [*bound.args, *args]
    if bound.kwargs:
        raise TypeError(
            f"export: {name} carries objects by keyword: {sorted(bound.kwargs)}. Pass them as arguments."
        )
    objects = [x for x in positional if _is_model(x)]
    given = [x for x in positional if not _is_model(x)]
    labels = ["self"] * len(bound.args) + _labels(fun, args)
    roots = [label for label, x in zip(labels, positional) if _is_model(x)]
    graphdef, state = split(objects)
    leaf_names = [_weight_name(path, roots) for path, _ in flat_pairs(state)]
    values, structure = jax.tree.flatten(state)
    weights = {path: jnp.asarray(x) for path, x in zip(leaf_names, values, strict=True)}
    avals = tuple(Aval(path, dtype_name(x.dtype), x.shape) for path, x in weights.items())

    inputs, leaves, paths = [], [], []
    parameters = tuple(n for n, x in zip(labels, positional) if not _is_model(x))
    for label, x in zip(parameters, given):
        own, tree, at = _trees.flatten(x, label, len(leaves))
        inputs.append(tree)
        leaves += own
        paths += at
    specs = _specs(name, parameters, given, leaves, paths, shapes, constraints)
    numbers = set(as_integers(donate))
    if not numbers <= set(range(len(given))):
        raise ValueError(f"export: donate is {donate!r}, and {name} has {len(given)} arguments.")
    donated = tuple(i for n in sorted(numbers) for i in _trees.leaves_of(inputs[n]))
    found: dict[str, tp.Any] = {}

    def run(weights: list[jax.Array], leaves: list[jax.Array]) -> list[jax.Array]:
        own = [from_data(x, aval.dtype) for x, aval in zip(weights, avals)]
        inner = merge(graphdef, jax.tree.unflatten(structure, own), copy=True)
        keyed = [from_data(x, spec[0].dtype) for x, spec in zip(leaves, specs)]
        rest = iter(_trees.unflatten(["list", [], inputs], keyed))
        inside = iter(inner)
        full = [next(inside if _is_model(x) else rest) for x in positional]
        result = bound.fun(*full)
        _refuse_written(name, graphdef, inner, own, leaf_names)
        out, found["outputs"], at = _trees.flatten(result, "the result")
        for path, x in zip(at, out):
            if not isinstance(x, (jax.Array, np.ndarray, int, float, complex, np.generic)):
                raise TypeError(f"export: {path} of {name} is a {short_type(x)}, not an array.")
        arrays = [jnp.asarray(x) for x in out]
        keys = ((i, x) for i, x in enumerate(arrays) if is_key(x))
        found["keys"] = {i: str(jax.random.key_impl(x)) for i, x in keys}
        return [to_data(x) for x in arrays]

    program = jax.export.export(jax.jit(run), platforms=platforms)(
        [jax.ShapeDtypeStruct((d := to_data(x)).shape, d.dtype) for x in weights.values()],
        [spec for _, spec in specs],
    )
    signature = Signature(
        name,
        parameters,
        tuple(inputs),
        tuple(aval for aval, _ in specs),
        found["outputs"],
        found["keys"],
        avals,
        donated,
        tuple(program.platforms),
        vjp_order,
    )
    return Exported(program, weights, signature)


def load_exported(path: tp.Any) -> Exported:
    """The call that `Exported.save` wrote; none of the code that made it is needed.

    Nothing in the file is unpickled. The program itself runs on this machine, so load only
    files from sources you trust.

    Args:
        path: of the file.

    Returns:
        An `Exported`.

    Raises:
        OSError: if there is no such file, or it cannot be opened.
        ImportError: without the package `flatbuffers` (`pip install "nnxlite[serving]"`).
        ValueError: for a file that is damaged, was changed, is of another format or a later version,
            saying what was found.

    >>> import nnxlite as nnx
    >>> try:
    ...     nnx.load_exported("none.nnx")
    ... except FileNotFoundError as error:
    ...     print(error.filename)
    none.nnx
    """
    return Exported(*read(Path(path)))


# Arguments ----------------------------------------------------------------------------------------


def _is_model(value: tp.Any) -> bool:
    """Whether an argument is weights: an object, or a module of another library, a callable pytree."""
    return isinstance(value, Pytree) or (kind_of(value) == PYTREE and callable(value))


def _labels(fun: tp.Any, positional: tp.Sequence[tp.Any]) -> list[str]:
    """A name for each argument: that of its parameter, or its number."""
    names = parameter_names(fun)[: len(positional)]
    return [*names, *[f"args[{i}]" for i in range(len(names), len(positional))]]


def _weight_name(path: tp.Any, roots: tp.Sequence[str]) -> str:
    """The path of a weight, after the name of its root if there are several."""
    number, *rest = path
    return path_text(rest if len(roots) == 1 else [roots[number], *rest])


def _specs(
    name: str,
    parameters: tp.Sequence[str],
    given: list[tp.Any],
    leaves: list[tp.Any],
    paths: list[str],
    shapes: tp.Any,
    constraints: tp.Sequence[str],
) -> list[tuple[Aval, jax.ShapeDtypeStruct]]:
    """For each leaf the array it must be, and the operand of the program."""
    for path, x in zip(paths, leaves):
        if not isinstance(x, (jax.Array, np.ndarray, np.generic, int, float, complex)) and not (
            hasattr(x, "shape") and hasattr(x, "dtype")
        ):
            raise TypeError(
                f"export: {path} of {name} is a {short_type(x)}, not an array. Set it beforehand, with "
                "functools.partial or a lambda."
            )
    structs = [jax.ShapeDtypeStruct(np.shape(x), _dtype_of(x)) for x in leaves]
    per_argument = shapes if isinstance(shapes, (list, tuple)) else [shapes] * len(given)
    if len(per_argument) != len(given) or (isinstance(shapes, str) and len(given) != 1):
        raise ValueError(
            f"export: shapes needs an entry for each of the {len(given)} arguments of {name} that are "
            f"no objects; got {shapes!r}."
        )
    texts: list[str | None] = []
    for label, x, entry in zip(parameters, given, per_argument, strict=True):
        texts += _texts(entry, x, label)
    polymorphic = jax.export.symbolic_args_specs(
        [_data_struct(s) for s in structs],
        [None if text is None or is_key(s) else text for text, s in zip(texts, structs)],
        constraints=constraints,
    )
    return [
        (Aval(path, dtype_name(s.dtype), _dims(s.shape if is_key(s) else spec.shape)), spec)
        for path, s, spec in zip(paths, structs, polymorphic)
    ]


def _texts(entry: tp.Any, tree: tp.Any, path: str) -> tp.Iterator[str | None]:
    """The text in an entry of `shapes` for each leaf of an argument."""
    if entry is None or isinstance(entry, str):
        yield from [entry] * len(jax.tree.leaves(tree))
    elif isinstance(entry, dict) and isinstance(tree, dict) and entry.keys() == tree.keys():
        for name in sorted(tree):
            yield from _texts(entry[name], tree[name], f"{path}[{name!r}]")
    elif (
        isinstance(entry, (list, tuple))
        and isinstance(tree, (list, tuple))
        and len(entry) == len(tree)
    ):
        for i, (one, x) in enumerate(zip(entry, tree, strict=True)):
            yield from _texts(one, x, f"{path}[{i}]")
    else:
        raise ValueError(
            f"export: the entry {entry!r} of shapes does not match the argument {path}, a "
            f"{type(tree).__name__}."
        )


def _dims(shape: tp.Sequence[tp.Any]) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in shape)


def _dtype_of(x: tp.Any) -> tp.Any:
    if is_key(x):
        return x.dtype
    return jax.dtypes.canonicalize_dtype(x.dtype if hasattr(x, "dtype") else jnp.result_type(x))


def _data_struct(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if not is_key(struct):
        return struct
    return jax.eval_shape(jax.random.key_data, struct)


# Calls --------------------------------------------------------------------------------------------


def _as_operand(name: str, aval: Aval, given: tp.Any) -> tp.Any:
    """A leaf of the arguments as an operand, checked."""
    value: tp.Any = given
    if isinstance(given, (int, float, complex)) and not aval.dtype.startswith("key:"):
        value = np.asarray(value, aval.dtype)
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise ValueError(f"{name}: {aval.path} must be {aval}; got {short_type(value)}.")
    dtype = dtype_name(_dtype_of(value))
    shape = tuple(value.shape)
    fits = len(shape) == len(aval.shape) and all(
        not isinstance(size, int) or size == got for size, got in zip(aval.shape, shape)
    )
    if dtype != aval.dtype or not fits:
        raise ValueError(
            f"{name}: {aval.path} must be {aval}; got {dtype}[{', '.join(map(str, shape))}]."
        )
    return to_data(value)


def _canonical(platform: str) -> str:
    return {"gpu": "cuda"}.get(platform, platform)


def _refuse_written(
    name: str, graphdef: tp.Any, inner: tp.Any, values: list[tp.Any], names: list[str]
) -> None:
    after, state = split(inner)
    now = jax.tree.leaves(state, is_leaf=is_variable)
    now = [x.get_value() if isinstance(x, Variable) else x for x in now]
    if after != graphdef or len(now) != len(values):
        raise ValueError(
            f"export: {name} changes the structure of an object (an attribute added, a value sown), "
            "which a program without the object cannot. Export a function that does not."
        )
    written = [path for path, x, y in zip(names, values, now) if x is not y]
    if written:
        some = ", ".join(written[:5]) + (", ..." if len(written) > 5 else "")
        raise ValueError(
            f"export: {name} writes {some}. A program that serves has no state: call model.eval() "
            "before (for dropout and BatchNorm), export nnx.view(model, deterministic=True, "
            "use_running_average=True), or make what it writes an argument and a result."
        )
