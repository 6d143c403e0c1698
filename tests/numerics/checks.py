"""What is checked of every case: values, gradients, small dtypes, and unusual batches.

Each function goes through a family of cases with few compilations, and returns how many results it
compared and what was wrong. Double precision must be on where the name says `double`.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

import nnxlite as nnx
from tests.numerics.cases import Case, expected, inputs_of, made, parameters

SINGLE = 60
"""Units of rounding that a result in float32 may be off, where it is of size 1."""

DOUBLE = 2e-12
"""The same in float64, absolute and relative."""

HALF_DTYPES = {"float16": jnp.finfo("float16").eps, "bfloat16": jnp.finfo("bfloat16").eps}


class Result(tp.NamedTuple):
    """How many results were compared, and a line for each that is wrong."""

    compared: int
    wrong: list[str]


def all_at_once(cases: list[Case]) -> tp.Callable[..., tp.Any]:
    """The calls of all cases as one program."""

    @nnx.jit
    def run(layers, inputs):
        return [case.call(layer, *x) for case, layer, x in zip(cases, layers, inputs)]

    return run


def difference(actual, desired, unit: float) -> str | None:
    """What is wrong with a result; NaN in what is desired stands for anything."""
    actual = np.asarray(actual, np.float64)
    if actual.shape != desired.shape:
        return f"shape {actual.shape}, not {desired.shape}"
    desired = np.where(np.isnan(desired), actual, desired)
    if not actual.size:
        return None
    size = np.abs(desired).max()
    error = np.abs(actual - desired).max()
    if not np.isfinite(actual).all() or not error <= unit * max(size, 1):
        return f"off by {error:.3g}, in units {error / unit / max(size, 1):.3g} (size {size:.3g})"
    return None


def compare(cases, actual, desired, units, dtypes=None) -> Result:
    wrong = []
    for i, (case, y, z) in enumerate(zip(cases, actual, desired, strict=True)):
        message = difference(y, z, units[i])
        if dtypes is not None and y.dtype != dtypes[i]:
            message = f"dtype {y.dtype}, not {dtypes[i]}"
        if message:
            wrong.append(f"{case.name}: {message}")
    return Result(len(cases), wrong)


def values(cases: list[Case], dtype: str, seed: int = 0) -> Result:
    """Results in float32 or (with double precision on) float64."""
    layers = [made(case, seed, param_dtype=dtype, dtype=dtype) for case in cases]
    inputs = [inputs_of(case, seed, dtype) for case in cases]
    desired = [expected(case, layer, x) for case, layer, x in zip(cases, layers, inputs)]
    actual = all_at_once(cases)(layers, inputs)
    unit = DOUBLE if dtype == "float64" else SINGLE * jnp.finfo(dtype).eps
    return compare(cases, actual, desired, [unit] * len(cases), [dtype] * len(cases))


def values_of_half_precision(
    cases: list[Case], half: str, seed: int = 0, *, mixed: bool = False
) -> Result:
    """Results where inputs are of half precision, and so are parameters, or (mixed) `dtype` only."""
    types = {"param_dtype": "float32" if mixed else half}
    types |= {"dtype": half} if mixed else {}
    layers = [made(case, seed, **types) for case in cases]
    inputs = [inputs_of(case, seed, half) for case in cases]
    desired = [expected(case, layer, x) for case, layer, x in zip(cases, layers, inputs)]
    actual = all_at_once(cases)(layers, inputs)
    units = [case.half * HALF_DTYPES[half] for case in cases]
    dtypes = [jnp.dtype(dtype_of_result(case, half, mixed)) for case in cases]
    return compare(cases, actual, desired, units, dtypes)


def dtype_of_result(case: Case, half: str, mixed: bool) -> str:
    name = case.name
    wide = name.startswith("RoPE")  # as it says
    if mixed:  # the carry of a cell is in the dtype of the parameters, and keeps it in an RNN
        wide |= name.startswith(("RNN", "Bidirectional"))
        wide &= "SimpleCell, reverse" not in name
    else:  # running averages count; rotated queries are float32; a SimpleCell has a dtype of its own
        wide |= name.startswith("BatchNorm") or "RoPE" in name or "decoding" in name
        wide |= "SimpleCell" in name and "carry" not in name
    return "float32" if wide else half


# Gradients -----------------------------------------------------------------------------------


def through_scan(case: Case, layer, inputs):
    """The layer for each of a stack of inputs, in a scan that carries all but parameters."""
    axes = nnx.StateAxes({nnx.Param: None, ...: nnx.Carry})
    return nnx.scan(case.call, in_axes=(axes, *(0 for _ in inputs)), out_axes=0)(layer, *inputs)


def through_vmap(case: Case, layer, inputs):
    return nnx.vmap(case.call, in_axes=(None, *(0 for _ in inputs)))(layer, *inputs)


def through_loop(case: Case, layer, inputs, call=None):
    call = case.call if call is None else call
    return jnp.stack([call(layer, *(x[i] for x in inputs)) for i in range(2)])


def through_remat(case: Case, layer, inputs):
    return through_loop(case, layer, inputs, nnx.remat(case.call))


ROUTES = {
    "a loop": through_loop,
    "scan": through_scan,
    "vmap": through_vmap,
    "remat": through_remat,
}


def suits(case: Case, route: str) -> bool:
    if route == "vmap":
        return case.stateless
    return route != "scan" or not case.name.startswith(("WeightNorm", "SpectralNorm"))


def gradients_in_double(cases: list[Case], route: str, seed: int = 0, order: int = 1) -> Result:
    """Derivatives along a random direction against central differences of the plain loop.

    The gradients are those of all Params and all floating inputs. Of second order: the derivative of
    the gradient, against differences of the gradient.
    """
    cases = [case for case in cases if case.smooth and suits(case, route)]
    if not cases:
        return Result(0, [])
    layers = [made(case, seed, param_dtype="float64", dtype="float64") for case in cases]
    graphdef, params, rest = nnx.split(layers, nnx.Param, ...)
    given = [inputs_of(case, seed) for case in cases]
    is_float = [[jnp.issubdtype(x.dtype, jnp.floating) for x in xs] for xs in given]
    inputs = [[x if f else None for x, f in zip(xs, fs)] for xs, fs in zip(given, is_float)]
    rng = np.random.default_rng(seed)
    weights = [
        rng.normal(size=(2, *y.shape))
        for y in nnx.eval_shape(
            lambda layers: [c.call(x, *a) for c, x, a in zip(cases, layers, given)], layers
        )
    ]

    def losses(layers, inputs, run):
        out = []
        for case, layer, own, also, weight in zip(cases, layers, inputs, given, weights):
            pairs = [
                jnp.stack([b, b]) if a is None else jnp.stack([a, a * 0.5])
                for a, b in zip(own, also)
            ]
            out.append((run(case, layer, pairs) * weight).sum())
        return jnp.stack(out)

    @jax.jit
    def plain(params, inputs):
        layers = nnx.merge(graphdef, params, rest, copy=True)
        return losses(layers, inputs, through_loop)

    def gradient(params, inputs):
        layers = nnx.merge(graphdef, params, rest, copy=True)
        total = lambda layers, inputs: losses(layers, inputs, ROUTES[route]).sum()
        return nnx.grad(total, argnums=(0, 1))(layers, inputs)

    point = jax.tree.map(np.asarray, (params, inputs))
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape), point)
    step = 1e-5

    def moved(by):
        return jax.tree.map(lambda x, v: jnp.asarray(x + by * v), point, direction)

    def leaves(tree, i):
        if isinstance(tree, list) or i in tree:
            return jax.tree.leaves(tree[i])
        return []

    def along(tree):
        """The products with the direction, for each case."""
        return [
            sum(
                float(np.sum(np.asarray(g) * np.asarray(v)))
                for part, other in zip(tree, direction)
                for g, v in zip(leaves(part, i), leaves(other, i), strict=True)
            )
            for i in range(len(cases))
        ]

    if order == 1:
        actual = along(jax.jit(gradient)(*moved(0.0)))
        ahead, behind = (np.asarray(plain(*moved(by))) for by in (step, -step))
        desired = (ahead - behind) / (2 * step)
        tolerance = 2e-8
    else:
        tangents = jax.tree.map(jnp.asarray, direction)
        actual = along(jax.jit(lambda p, t: jax.jvp(gradient, p, t)[1])(moved(0.0), tangents))
        compiled = jax.jit(gradient)
        ahead, behind = (np.asarray(along(compiled(*moved(by)))) for by in (step, -step))
        desired = (ahead - behind) / (2 * step)
        tolerance = 2e-7
    wrong = [
        f"{case.name} through {route}, order {order}: {a!r}, not {d!r}"
        for case, a, d in zip(cases, actual, desired)
        if not abs(a - d) <= tolerance * max(abs(d), 10)
    ]
    return Result(len(cases), wrong)


# Batches -------------------------------------------------------------------------------------

BATCHES = {
    "no example": (lambda x: x[:0], lambda case: True),
    "one example": (lambda x: x[:1], lambda case: True),
    "no batch axis": (lambda x: x[0], lambda case: case.unbatched),
    "two batch axes": (lambda x: x[None], lambda case: case.unbatched),
    "an empty batch axis more": (lambda x: x[None][:0], lambda case: case.unbatched),
}


def batches(cases: list[Case], seed: int = 0) -> Result:
    """Batches of other shapes give the same for each example; without one, gradients are zero."""
    compared, wrong = 0, []
    for name, (change, suitable) in BATCHES.items():
        chosen = [c for c in cases if c.batched and len(c.inputs) == 1 and suitable(c)]
        if not chosen:
            continue
        layers = [made(case, seed) for case in chosen]
        inputs = [inputs_of(case, seed, "float32") for case in chosen]
        desired = [change(expected(c, layer, x)) for c, layer, x in zip(chosen, layers, inputs)]
        inputs = [(change(x),) for (x,) in inputs]
        run = all_at_once(chosen)
        result = compare(chosen, run(layers, inputs), desired, [SINGLE * 1.2e-7] * len(chosen))
        compared += result.compared
        wrong += [f"{name}: {line}" for line in result.wrong]
        if name == "no example":
            layers = [made(case, seed) for case in chosen]

            @nnx.jit
            def gradient(layers, inputs, chosen=chosen):
                def loss(layers):
                    ys = [c.call(layer, *x) for c, layer, x in zip(chosen, layers, inputs)]
                    return sum(y.sum() for y in ys)

                return nnx.grad(loss)(layers)

            for case, grads in zip(chosen, gradient(layers, inputs), strict=True):
                compared += 1
                if any(np.any(np.asarray(g) != 0) for g in jax.tree.leaves(grads)):
                    wrong.append(f"{name}: {case.name}: the gradient is not zero")
    return Result(compared, wrong)


__all__ = ["batches", "gradients_in_double", "parameters", "values", "values_of_half_precision"]
