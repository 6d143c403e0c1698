"""`export`: a call as a program of StableHLO and its weights, which run without the code.

The program is what `jax.export` makes of a function of the weights, by path, and of the arguments by
name, so that JAX's own errors name both.  A file has the format of safetensors: the weights, the program
as bytes, and a signature as JSON in the metadata.  A process that calls it knows none of the code that
the model was made of.

A call that writes Variables is refused: requests that are answered at the same time share no state.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import typing as tp
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import importing, listed, path_text
from nnxlite._base.outline import array_text
from nnxlite.boundary._call_def import parameter_names
from nnxlite.graph._functional import flat_pairs, merge, split
from nnxlite.graph._kinds import Kind, kind_of
from nnxlite.objects._pytree import Pytree
from nnxlite.transforms._wrapper import name_of, unbind
from nnxlite.variables._variable import is_variable

__all__ = ["Exported", "export", "load_exported"]

VERSION = "2"
"""Of the format; version 1 was a zip archive, which is not read."""


Weights: tp.TypeAlias = dict[str, jax.Array]


class Exported:
    """A call that `export` or `load_exported` made: call it with arrays, or `save` it.

    Args:
        program: the `jax.export.Exported`, of the weights and of arguments by name.
        weights: the arrays it runs with, by path.
        name: of the function.
        parameters: the names of the arguments, in order.

    Attributes:
        program: the `jax.export.Exported`.
        weights: the weights by path. You may replace them with arrays of the same shape and dtype.
        name: of the function.
        platforms: where it runs, such as `("cpu", "cuda")`.
        num_programs: how many programs were compiled so far: one for each combination of shapes.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> exported = nnx.export(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((1, 2)), shapes="b, 2")
    >>> print(exported)
    Exported(Linear: inputs=float32[b,2], platforms=cpu, weights=2)
    >>> exported(jnp.ones((5, 2))).shape, exported(jnp.ones((7, 2))).shape
    ((5, 3), (7, 3))
    >>> exported.num_programs
    2
    """

    def __init__(
        self,
        program: jax.export.Exported,
        weights: Weights,
        name: str,
        parameters: tp.Iterable[str],
    ) -> None:
        self.program = program
        self.weights = weights
        self.name = name
        self.platforms = tuple(program.platforms)
        self.num_programs = 0
        self._parameters = tuple(parameters)

        def call(weights: Weights, *args: tp.Any) -> tp.Any:
            self.num_programs += 1
            try:
                return program.call(weights, **dict(zip(self._parameters, args)))
            except ValueError as error:
                raise ValueError(f"Exported {name}: {error}") from None

        self._call = jax.jit(call)

    def __call__(self, *args: tp.Any) -> tp.Any:
        """The result for arguments of the shapes and dtypes that were exported.

        Args:
            *args: the arguments that are not objects, in order.

        Raises ValueError where they or the weights do not match, or on another platform.
        """
        if len(args) != len(self._parameters):
            raise ValueError(
                f"Exported {self.name} takes {len(self._parameters)} arguments "
                f"({', '.join(self._parameters)}); got {len(args)}."
            )
        return self._call(self.weights, *args)

    def save(self, path: tp.Any, *, vjp_order: int = 0) -> None:
        """Write program and weights to one file, which appears when it is complete.

        Args:
            path: of the file; one that exists is replaced.
            vjp_order: how often the program can be differentiated in its arguments when it is loaded.

        Raises:
            ImportError: without `flatbuffers` and `safetensors` (`pip install "nnxlite[serving]"`).
            OSError: if it cannot be written; a file that was there is then still there.
        """
        numpy = _safetensors()
        path, keys, dtypes, tensors = Path(path), {}, {}, {}
        for name, weight in self.weights.items():
            if jnp.issubdtype(weight.dtype, jax.dtypes.prng_key):
                keys[name] = str(jax.random.key_impl(weight))
                weight = jax.random.key_data(weight)
            array = np.asarray(weight)
            if array.dtype.isbuiltin == 2 and array.dtype.itemsize == 1:  # float8, int4, ...
                dtypes[name], array = array.dtype.name, array.view(np.uint8)
            tensors[f"weights/{name}"] = array
        tensors["program"] = np.frombuffer(self.program.serialize(vjp_order=vjp_order), np.uint8)
        of_call = {"name": self.name, "parameters": self._parameters}
        signature = json.dumps(of_call | {"keys": keys, "dtypes": dtypes})
        metadata = {"nnxlite.exported": VERSION, "jax": jax.__version__, "signature": signature}
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            part = Path(folder) / "part"
            numpy.save_file(tensors, part, metadata)
            os.replace(part, path)

    def __repr__(self) -> str:
        _, arguments = jax.tree.unflatten(self.program.in_tree, self.program.in_avals)
        shown = lambda tree: ", ".join(map(array_text, jax.tree.leaves(tree)))
        inputs = ", ".join(f"{name}={shown(arguments[name])}" for name in self._parameters)
        places = "/".join(self.platforms)
        return f"Exported({self.name}: {inputs}, platforms={places}, weights={len(self.weights)})"


def export(
    fun: tp.Callable[..., tp.Any],
    *args: tp.Any,
    shapes: tp.Any = None,
    constraints: tp.Sequence[str] = (),
    platforms: tp.Sequence[str] | None = None,
) -> Exported:
    """A call as a program with weights, to be saved and run without the code that made it.

    Objects among the arguments, the model itself and the object of a method are weights, as are callable
    pytrees such as modules of Equinox: they are stored, so the exported call does not take them.  All
    other arrays are its arguments; arrays that the function captures become constants of the program.

    Args:
        fun: a module, a method of one, or a function of objects and arrays.
        *args: examples for the arguments: arrays, `jax.ShapeDtypeStruct`s, or dicts, lists and tuples
            of them.
        shapes: which dimensions may vary: for each argument that is not an object a string such as
            `"batch, 28, 28"` or `"batch, ..."`, None for all as in the example, or a tree of these;
            where there is one argument, just the string.  Equal names are equal sizes.
        constraints: what is known about sizes, such as `"batch <= 64"` or `"length == 2 * half"`.
        platforms: where it is to run, such as `("cpu", "cuda")`; by default on the present one.

    Returns:
        An `Exported`.

    Raises:
        ValueError: for a call that writes Variables, as dropout and BatchNorm in training do, or shapes
            that do not match the examples.
        TypeError: for arguments or results that are not arrays, or in containers that other processes
            do not know.

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
    names = parameter_names(bound.fun)[: len(positional)]
    labels = [*names, *(f"args[{i}]" for i in range(len(positional) - len(names)))]
    # A module of another library is a callable pytree.
    is_model = lambda x: isinstance(x, Pytree) or (kind_of(x) == Kind.PYTREE and callable(x))
    roots = {label: x for label, x in zip(labels, positional) if is_model(x)}
    given = {label: x for label, x in zip(labels, positional) if label not in roots}
    for label, x in given.items():
        _check_containers(jax.tree.structure(x), f"the argument {label} of {name}")
    graphdef, state = split(roots)
    values, structure = jax.tree.flatten(state)
    ours = slice(1 if len(roots) == 1 else 0, None)  # the name of a single root says nothing
    whole = {path: path_text(path[ours]) for path, _ in flat_pairs(state)}
    times = Counter(whole.values())  # the keys "a.b" and 0 look like others
    paths = [text if times[text] == 1 else str(path[ours]) for path, text in whole.items()]
    weights = {path: jnp.asarray(x) for path, x in zip(paths, values, strict=True)}
    per_argument = shapes if isinstance(shapes, (list, tuple)) else [shapes] * len(given)
    if len(per_argument) != len(given) or (isinstance(shapes, str) and len(given) != 1):
        raise ValueError(
            f"export: shapes needs an entry for each of the {len(given)} arguments of {name} that are "
            f"not objects ({', '.join(given)}); got {shapes!r}."
        )

    def run(_nnx_weights: Weights, /, **arguments: tp.Any) -> tp.Any:  # no argument has this name
        own = {path: _nnx_weights[path] for path in paths}
        inner = merge(graphdef, jax.tree.unflatten(structure, own.values()), copy=True)
        result = bound.fun(*((inner | arguments)[label] for label in labels))
        _refuse_written(name, graphdef, inner, own)
        _check_containers(jax.tree.structure(result), f"the result of {name}")
        return result

    run.__name__ = name  # for JAX's messages
    abstract, arguments = jax.eval_shape(lambda *trees: trees, weights, given)  # with dtypes of JAX
    named = dict(zip(given, per_argument))
    specs = jax.export.symbolic_args_specs(arguments, named, constraints=constraints)
    program = jax.export.export(jax.jit(run), platforms=platforms)(abstract, **specs)
    return Exported(program, weights, name, [*given])


def load_exported(path: tp.Any) -> Exported:
    """The call that `Exported.save` wrote; none of the code that made it is needed.

    Nothing in the file is unpickled. The program itself runs on this machine, so load only
    files from sources you trust.

    Args:
        path: of the file.

    Returns:
        An `Exported`.

    Raises:
        OSError: if the file does not exist or cannot be opened.
        ImportError: without `flatbuffers` and `safetensors` (`pip install "nnxlite[serving]"`).
        ValueError: for a file that is damaged, of another format, or of another version of this one,
            saying what was found.

    >>> import nnxlite as nnx
    >>> try:
    ...     nnx.load_exported("none.nnx")
    ... except FileNotFoundError as error:
    ...     print(error)
    No such file or directory: none.nnx
    """
    _safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
        version = metadata.get("nnxlite.exported", "none")
        if version != VERSION:
            raise ValueError(f"version {version} of the format; this nnxlite reads {VERSION}")
        signature = json.loads(metadata["signature"])
        name, parameters, keys = (signature[part] for part in ("name", "parameters", "keys"))
        dtypes = {path: jnp.dtype(name) for path, name in signature.get("dtypes", {}).items()}
        code = tensors.pop("program")
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not an exported call, or damaged: {error}.") from error
    try:
        program = jax.export.deserialize(bytearray(code))
    except Exception as error:
        raise ValueError(
            f"{path}: its program was written with JAX {metadata.get('jax')}, and JAX "
            f"{jax.__version__} cannot read it: {error}"
        ) from error
    arrays = {path.removeprefix("weights/"): x for path, x in tensors.items()}
    weights = {path: jnp.asarray(x.view(dtypes.get(path, x.dtype))) for path, x in arrays.items()}
    for weight, impl in keys.items():
        weights[weight] = jax.random.wrap_key_data(weights[weight], impl=impl)
    return Exported(program, weights, name, parameters)


def _safetensors() -> tp.Any:
    with importing(
        "Saving and loading exported calls needs the packages flatbuffers and safetensors: pip install "
        '"nnxlite[serving]".'
    ):
        importlib.import_module("flatbuffers")
        return importlib.import_module("safetensors.numpy")


def _check_containers(tree: tp.Any, what: str) -> None:
    """Refuse what a process without the class could not make."""
    kind, names = tree.node_data() or (tuple, None)
    wrong = None
    if kind not in (dict, list, tuple, type(None)):
        wrong = f"a {kind.__name__}, which a process without this class could not make"
    elif kind is dict and not all(isinstance(name, str) for name in names or ()):
        wrong = f"a dict with the keys {names}; keys have to be strings"
    if wrong:
        raise TypeError(f"export: {what} has {wrong}. Use dicts, lists and tuples of arrays.")
    for child in tree.children():
        _check_containers(child, what)


def _refuse_written(name: str, graphdef: tp.Any, inner: tp.Any, before: Weights) -> None:
    after, state = split(inner)
    now = [x.get_value() if is_variable(x) else x for _, x in flat_pairs(state)]
    if after != graphdef or len(now) != len(before):
        raise ValueError(
            f"export: {name} changes the structure of an object (an attribute added, a value sown), "
            "which a program without the object cannot. Export a function that does not."
        )
    written = listed([path for (path, x), y in zip(before.items(), now) if x is not y])
    if written:
        raise ValueError(
            f"export: {name} writes {written}. A program that serves has no state: call model.eval() "
            "before (for dropout and BatchNorm), export nnx.view(model, deterministic=True, "
            "use_running_average=True), or make what it writes an argument and a result."
        )
