"""What layers compute, from the formulas, in NumPy and float64; loops where a loop says more.

Nothing here comes from another library of layers, or from JAX.
"""

from __future__ import annotations

import itertools
import math

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    """Along the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


_erf = np.vectorize(math.erf, otypes=[float])
SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805

ACTIVATIONS = {
    "celu": lambda x: np.maximum(x, 0) + np.minimum(0, np.expm1(x)),
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "gelu": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu, exact": lambda x: x / 2 * (1 + _erf(x / math.sqrt(2))),
    "glu": lambda x: x[..., : x.shape[-1] // 2] * sigmoid(x[..., x.shape[-1] // 2 :]),
    "hard_sigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
    "hard_silu": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "hard_swish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "hard_tanh": lambda x: np.clip(x, -1, 1),
    "identity": lambda x: x,
    "leaky_relu": lambda x: np.where(x >= 0, x, 0.01 * x),
    "log_sigmoid": lambda x: -np.logaddexp(0, -x),
    "log_softmax": lambda x: np.log(softmax(x)),
    "logsumexp": lambda x: np.log(np.exp(x).sum()),
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "selu": lambda x: SELU_SCALE * np.where(x > 0, x, SELU_ALPHA * np.expm1(x)),
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "soft_sign": lambda x: x / (1 + np.abs(x)),
    "softmax": softmax,
    "softplus": lambda x: np.logaddexp(0, x),
    "standardize": lambda x: (
        (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    ),
    "swish": lambda x: x * sigmoid(x),
    "tanh": np.tanh,
}


# Convolutions and pools ----------------------------------------------------------------------


def same(size, reach, stride, lower=False):
    """Zeros in front and behind so that there are `ceil(size / stride)` outputs."""
    outputs = -(-size // stride)
    total = max((outputs - 1) * stride + reach + 1 - size, 0)
    front = total - total // 2 if lower else total // 2
    return front, total - front


def padded(x, padding, reaches, strides):
    """(*spatial, features) with its padding, of which the name, or pairs of numbers, is given."""
    for axis, (reach, stride) in enumerate(zip(reaches, strides)):
        size = x.shape[axis]
        front, back, mode = 0, 0, "zero"
        if padding in ("SAME", "SAME_LOWER"):
            front, back = same(size, reach, stride, padding == "SAME_LOWER")
        elif padding == "CAUSAL":
            front = reach
        elif padding in ("CIRCULAR", "REFLECT"):
            front, back, mode = reach // 2, (reach + 1) // 2, padding
        elif padding != "VALID":
            front, back = padding[axis]
        rows = []
        for i in range(-front, size + back):
            if mode == "CIRCULAR":
                i %= size
            elif mode == "REFLECT":
                period = max(2 * (size - 1), 1)
                i = min(i % period, -i % period)
            row = np.take(x, i, axis) if 0 <= i < size else np.zeros_like(np.take(x, 0, axis))
            rows.append(row)
        x = np.stack(rows, axis)
    return x


def dilated(x, dilations):
    """(*spatial, features) with zeros between its elements."""
    for axis, d in enumerate(dilations):
        sizes = list(x.shape)
        sizes[axis] = (sizes[axis] - 1) * d + 1
        wide = np.zeros(sizes)
        wide[tuple(slice(None, None, d) if a == axis else slice(None) for a in range(x.ndim))] = x
        x = wide
    return x


def windows(places, kernel, strides, dilations):
    """The places of a window, each with all offsets in it and the positions that they reach."""
    for place in itertools.product(*map(range, places)):
        for offset in itertools.product(*map(range, kernel)):
            steps = zip(place, strides, offset, dilations)
            yield place, offset, tuple(p * s + o * d for p, s, o, d in steps)


def correlate(x, kernel, strides, dilations, groups=1):
    """(*spatial, in) and (*kernel, in / groups, out): each output is a sum over its window."""
    reaches = [(k - 1) * d for k, d in zip(kernel.shape, dilations)]
    sizes = [(n - r - 1) // s + 1 for n, r, s in zip(x.shape, reaches, strides)]
    outs, ins = kernel.shape[-1] // groups, kernel.shape[-2]
    y = np.zeros((*sizes, kernel.shape[-1]))
    for place, offset, at in windows(sizes, kernel.shape[:-2], strides, dilations):
        for g in range(groups):
            columns = slice(g * outs, (g + 1) * outs)
            y[place][columns] += x[at][g * ins : (g + 1) * ins] @ kernel[offset][:, columns]
    return y


def conv(x, kernel, bias, strides, padding, input_dilation, kernel_dilation, groups):
    reaches = [(k - 1) * d for k, d in zip(kernel.shape, kernel_dilation)]
    rows = []
    for example in x:
        wide = padded(dilated(example, input_dilation), padding, reaches, strides)
        rows.append(correlate(wide, kernel, strides, kernel_dilation, groups))
    return np.stack(rows) + bias


def conv_transpose(x, kernel, bias, strides, padding, dilations, flipped):
    """Each input adds its multiple of the kernel to a window of the output.

    Where the kernel is not flipped by the caller, the window has it back to front.
    """
    rank = x.ndim - 2
    if flipped:
        kernel = np.swapaxes(kernel, -1, -2)
    else:
        kernel = kernel[(slice(None, None, -1),) * rank]
    rows = []
    for example in x:
        sizes = [
            (n - 1) * s + (k - 1) * d + 1
            for n, s, k, d in zip(example.shape, strides, kernel.shape, dilations)
        ]
        full = np.zeros((*sizes, kernel.shape[-1]))
        places = example.shape[:rank], kernel.shape[:rank], strides, dilations
        for place, offset, at in windows(*places):
            full[at] += example[place] @ kernel[offset]
        for axis in range(rank):
            n, s = example.shape[axis], strides[axis]
            reach = (kernel.shape[axis] - 1) * dilations[axis]
            full = _cut(full, axis, n, s, reach, padding, flipped)
        rows.append(full)
    return np.stack(rows) + bias


def _cut(full, axis, n, stride, reach, padding, flipped):
    """The part of a full output along one axis that the padding leaves."""
    full = np.moveaxis(full, axis, 0)
    size = full.shape[0]
    if padding in ("VALID", "CIRCULAR"):
        # Windows of inputs that would come next, with a stride larger than the kernel.
        full = np.concatenate([full, np.zeros((max(stride - reach - 1, 0), *full.shape[1:]))])
        if padding == "CIRCULAR":
            period = n * stride
            surplus = full.shape[0] - period
            front = (surplus + flipped) // 2
            out = np.zeros((period, *full.shape[1:]))
            for i, row in enumerate(full):
                out[(i - front) % period] += row
            full = out
    elif padding == "SAME":
        total = reach + 1 + stride - 2
        front = reach if stride > reach else -(-total // 2)
        start = reach - front
        out = np.zeros((n * stride, *full.shape[1:]))
        for i in range(n * stride):
            if 0 <= i + start < size:
                out[i] = full[i + start]
        full = out
    else:
        front, back = padding[axis]
        start, count = reach - front, (n - 1) * stride + 1 + front + back - reach
        out = np.zeros((count, *full.shape[1:]))
        for i in range(count):
            if 0 <= i + start < size:
                out[i] = full[i + start]
        full = out
    return np.moveaxis(full, 0, axis)


def pool(x, kind, window, strides, padding, counts=True):
    """(batch, *spatial, features): the mean, maximum or minimum of each window."""
    reduce = {"avg": np.nansum if counts else np.nanmean, "max": np.nanmax, "min": np.nanmin}[kind]
    spatial, rank = x.shape[1:-1], len(window)
    if padding == "SAME":
        padding = [same(n, w - 1, s) for n, w, s in zip(spatial, window, strides)]
    elif padding == "VALID":
        padding = [(0, 0)] * rank
    sizes = [(n + sum(p) - w) // s + 1 for n, p, w, s in zip(spatial, padding, window, strides)]
    wide = np.pad(x, [(0, 0), *padding, (0, 0)], constant_values=np.nan)
    seen = {}
    for place, _, at in windows(sizes, window, strides, (1,) * rank):
        seen.setdefault(place, []).append(wide[(slice(None), *at)])
    y = np.stack([reduce(elements, 0) for elements in seen.values()], 1)
    y = y.reshape(len(x), *sizes, -1)
    return y / math.prod(window) if kind == "avg" and counts else y


# Normalisation -------------------------------------------------------------------------------


def moments(x, axes, mask=None, centred=True):
    """Mean and variance over some axes, one group of elements after the other."""
    mask = np.broadcast_to(True if mask is None else np.asarray(mask) != 0, x.shape)
    rest = [a for a in range(x.ndim) if a not in axes]
    shape = [1 if a in axes else n for a, n in enumerate(x.shape)]
    mean, var = np.zeros(shape), np.ones(shape)
    for place in itertools.product(*(range(x.shape[a]) for a in rest)):
        index = [slice(None)] * x.ndim
        for a, i in zip(rest, place):
            index[a] = i
        chosen = x[tuple(index)][mask[tuple(index)]]
        at = tuple(index[a] if a in rest else 0 for a in range(x.ndim))
        if chosen.size:
            mean[at] = chosen.sum() / chosen.size if centred else 0
            var[at] = ((chosen - mean[at]) ** 2).sum() / chosen.size
    return mean, var


def norm(x, axes, epsilon, scale, bias, feature_axes=(-1,), mask=None, centred=True):
    axes = [a % x.ndim for a in axes]
    mean, var = moments(x, axes, mask, centred)
    along = [n if a - x.ndim in feature_axes else 1 for a, n in enumerate(x.shape)]
    y = (x - mean) / np.sqrt(var + epsilon)
    y = y if scale is None else y * scale.reshape(along)
    return y if bias is None else y + bias.reshape(along)


def group_norm(x, groups, epsilon, scale, bias, mask=None, axes=None):
    axes = range(1, x.ndim) if axes is None else axes
    mask = np.broadcast_to(True if mask is None else mask, x.shape)
    parts = [np.split(array, groups, -1) for array in (x, mask)]
    y = [norm(part, axes, epsilon, None, None, mask=keep) for part, keep in zip(*parts)]
    return np.concatenate(y, -1) * scale + bias


# Attention -----------------------------------------------------------------------------------


def rope(x, theta, positions):
    """(..., length, depth): pairs of features as complex numbers, turned by an angle."""
    half = x.shape[-1] // 2
    y = np.zeros_like(x)
    positions = np.broadcast_to(positions, x.shape[:-1])
    for place in np.ndindex(*x.shape[:-1]):
        for i in range(half):
            angle = positions[place] * theta ** (-2 * i / x.shape[-1])
            turned = complex(x[place][i], x[place][i + half]) * np.exp(1j * angle)
            y[place][i], y[place][i + half] = turned.real, turned.imag
    return y


def attention(query, key, value, bias=None, mask=None, is_causal=False):
    """(batch, length, heads, depth), a query of one head at a time."""
    batch, queries, heads, depth = query.shape
    keys, groups = key.shape[1], key.shape[2]
    full = (batch, heads, queries, keys)
    bias = np.broadcast_to(0.0 if bias is None else bias, full)
    mask = np.broadcast_to(True if mask is None else np.asarray(mask) != 0, full)
    y = np.zeros((batch, queries, heads, value.shape[-1]))
    for b, h, q in np.ndindex(batch, heads, queries):
        group = h // (heads // groups)
        seen = [
            k
            for k in range(keys)
            if mask[b, h, q, k] and (k <= q or not is_causal) and bias[b, h, q, k] > -np.inf
        ]
        if seen:
            logits = [
                query[b, q, h] @ key[b, k, group] / math.sqrt(depth) + bias[b, h, q, k]
                for k in seen
            ]
            weights = softmax(np.array(logits))
        else:
            seen, weights = range(keys), np.full(keys, 1 / max(keys, 1))
        for k, weight in zip(seen, weights):
            y[b, q, h] += weight * value[b, k, group]
    return y


def multi_head(p, x, kv=None, causal=False, theta=None):
    """The layer, with its parameters by path; the depth of the heads is that of the kernels."""

    def project(name, z):
        y = np.einsum("bti,ihd->bthd", z, p[f"{name}.kernel"])
        return y + p.get(f"{name}.bias", 0)

    kv = x if kv is None else kv
    query, key, value = project("query", x), project("key", kv), project("value", kv)
    if "query_ln.scale" in p:
        query = norm(query, [-1], 1e-6, p["query_ln.scale"], None)
        key = norm(key, [-1], 1e-6, p["key_ln.scale"], None)
    if theta is not None:  # positions are the axis before the heads
        query, key = (rope(z, theta, np.arange(z.shape[1])[:, None]) for z in (query, key))
    y = attention(query, key, value, is_causal=causal)
    return np.einsum("bthd,hdo->bto", y, p["out.kernel"]) + p.get("out.bias", 0)


# Recurrence ----------------------------------------------------------------------------------


def simple_step(p, h, x):
    new = np.tanh(x @ p["dense_i.kernel"] + p["dense_i.bias"] + h @ p["dense_h.kernel"])
    return new, new


def lstm_step(p, carry, x):
    c, h = carry
    if "dense_i.kernel" in p:
        i, f, g, o = np.split(
            x @ p["dense_i.kernel"] + h @ p["dense_h.kernel"] + p["dense_h.bias"], 4, -1
        )
    else:
        i, f, g, o = (
            x @ p[f"{a}.kernel"] + h @ p[f"{b}.kernel"] + p[f"{b}.bias"]
            for a, b in (("ii", "hi"), ("if_", "hf"), ("ig", "hg"), ("io", "ho"))
        )
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    h = sigmoid(o) * np.tanh(c)
    return (c, h), h


def gru_step(p, h, x):
    a = np.split(x @ p["dense_i.kernel"] + p["dense_i.bias"], 3, -1)
    b = np.split(h @ p["dense_h.kernel"], 3, -1)
    r, z = sigmoid(a[0] + b[0]), sigmoid(a[1] + b[1])
    n = np.tanh(a[2] + r * b[2])
    h = (1 - z) * n + z * h
    return h, h


def rnn(step, carry, x, lengths=None, reverse=False, keep_order=False):
    """(batch, time, features): sequence by sequence. Outputs of padding are NaN.

    Returns the outputs, and the carry at the end of each sequence.
    """
    batch, time = x.shape[:2]
    lengths = [time] * batch if lengths is None else lengths
    parts = carry if isinstance(carry, tuple) else (carry,)
    ends, outputs = [], np.full((batch, time, parts[-1].shape[-1]), np.nan)
    for b in range(batch):
        now = tuple(part[b] for part in parts)
        now = now if isinstance(carry, tuple) else now[0]
        order = range(lengths[b])[::-1] if reverse else range(lengths[b])
        for count, t in enumerate(order):
            now, y = step(now, x[b, t])
            outputs[b, t if keep_order or not reverse else count] = y
        ends.append(now)
    if isinstance(carry, tuple):
        return outputs, tuple(np.stack(part) for part in zip(*ends))
    return outputs, np.stack(ends)
