"""What layers compute, from the formulas, in NumPy and float64.

Nothing here comes from another library of layers, or from JAX.
"""

from __future__ import annotations

import math

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    """Along the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# Convolutions and pools ----------------------------------------------------------------------


def same(size, reach, stride, lower=False):
    """Zeros in front and behind so that there are `ceil(size / stride)` outputs."""
    outputs = -(-size // stride)
    total = max((outputs - 1) * stride + reach + 1 - size, 0)
    front = total - total // 2 if lower else total // 2
    return front, total - front


def pads_of(x, padding, reaches, strides):
    """How wide the padding is in front and behind, and in which mode of NumPy."""
    if padding in ("SAME", "SAME_LOWER"):
        sizes = zip(x.shape[1:-1], reaches, strides)
        pairs = [same(*numbers, padding == "SAME_LOWER") for numbers in sizes]
    elif padding in ("CIRCULAR", "REFLECT"):
        pairs = [(reach // 2, (reach + 1) // 2) for reach in reaches]
    elif padding in ("CAUSAL", "VALID"):
        pairs = [(reach if padding == "CAUSAL" else 0, 0) for reach in reaches]
    else:
        pairs = padding
    mode = {"CIRCULAR": "wrap", "REFLECT": "reflect"}.get(str(padding), "constant")
    return [(0, 0), *pairs, (0, 0)], mode


def dilated(x, dilations):
    """(batch, *spatial, features) with zeros between its elements."""
    for axis, d in enumerate(dilations, 1):
        rows = np.moveaxis(x, axis, 0)
        wide = np.zeros(((len(rows) - 1) * d + 1, *rows.shape[1:]))
        wide[::d] = rows
        x = np.moveaxis(wide, 0, axis)
    return x


def windows(x, sizes, strides, dilations):
    """The windows of (batch, *spatial, features), as (batch, *places, features, *sizes)."""
    wholes = [(n - 1) * d + 1 for n, d in zip(sizes, dilations)]
    seen = np.lib.stride_tricks.sliding_window_view(x, wholes, tuple(range(1, x.ndim - 1)))
    steps = [slice(None, None, s) for s in (*strides, 1, *dilations)]
    return seen[(slice(None), *steps)]


def correlate(x, kernel, strides, dilations, groups=1):
    """Each output is a sum over its window, with the kernel (*sizes, in / groups, out)."""
    rank = kernel.ndim - 2
    seen = windows(x, kernel.shape[:-2], strides, dilations)
    axes = [*range(rank + 1, 2 * rank + 2)], [rank, *range(rank)]
    parts = zip(np.split(seen, groups, rank + 1), np.split(kernel, groups, -1))
    return np.concatenate([np.tensordot(part, k, axes) for part, k in parts], -1)


def conv(x, kernel, bias, strides, padding, input_dilation, kernel_dilation, groups):
    reaches = [(k - 1) * d for k, d in zip(kernel.shape[:-2], kernel_dilation)]
    x = dilated(x, input_dilation)
    pairs, mode = pads_of(x, padding, reaches, strides)
    return correlate(np.pad(x, pairs, mode), kernel, strides, kernel_dilation, groups) + bias


def conv_transpose(x, kernel, bias, strides, padding, dilations, flipped):
    """A correlation of the input with zeros between its elements, and around them."""
    rank, sizes, pairs = x.ndim - 2, x.shape[1:-1], []
    if flipped:
        kernel = np.swapaxes(kernel, -1, -2)[(slice(None, None, -1),) * rank]
    reaches = [(k - 1) * d for k, d in zip(kernel.shape[:-2], dilations)]
    for axis, (reach, stride) in enumerate(zip(reaches, strides)):
        if padding in ("VALID", "CIRCULAR"):
            pairs.append((reach, max(reach, stride - 1)))
        elif padding == "SAME":
            front = reach if stride > reach else -(-(reach + stride - 1) // 2)
            pairs.append((front, reach + stride - 1 - front))
        else:
            pairs.append(padding[axis])
    wide = np.pad(dilated(x, strides), [(0, 0), *pairs, (0, 0)])
    y = correlate(wide, kernel, (1,) * rank, dilations)
    for axis, period in enumerate(np.multiply(sizes, strides), 1) if padding == "CIRCULAR" else ():
        rows = np.moveaxis(y, axis, 0)
        front = (len(rows) - period + flipped) // 2
        folded = np.zeros((period, *rows.shape[1:]))
        np.add.at(folded, (np.arange(len(rows)) - front) % period, rows)
        y = np.moveaxis(folded, 0, axis)
    return y + bias


def pool(x, kind, window, strides, padding, counts=True):
    """(batch, *spatial, features): the mean, maximum or minimum of each window."""
    reduce = {"avg": np.nansum if counts else np.nanmean, "max": np.nanmax, "min": np.nanmin}[kind]
    pairs, _ = pads_of(x, padding, [w - 1 for w in window], strides)
    wide = np.pad(x, pairs, constant_values=np.nan)
    y = reduce(windows(wide, window, strides, (1,) * len(window)), tuple(range(-len(window), 0)))
    return y / math.prod(window) if kind == "avg" and counts else y


# Normalisation -------------------------------------------------------------------------------


def moments(x, axes, mask=None, centred=True):
    """Mean and variance over some axes, of what a mask leaves; of nothing, 0 and 1."""
    mask = np.broadcast_to(True if mask is None else mask, x.shape)
    count = mask.sum(axes, keepdims=True)
    mean = lambda x: np.where(mask, x, 0).sum(axes, keepdims=True) / np.maximum(count, 1)
    center = mean(x) if centred else 0
    return center, np.where(count, mean((x - center) ** 2), 1)


def norm(x, axes, epsilon, scale, bias, feature_axes=(-1,), mask=None, centred=True):
    mean, var = moments(x, tuple(axes), mask, centred)
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
    """(batch, length, heads, depth); a query without keys sees all of them alike."""
    groups = query.shape[2] // key.shape[2]
    key, value = (np.repeat(x, groups, 2) for x in (key, value))
    logits = np.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1])
    logits = logits + (0 if bias is None else bias)
    seen = np.isfinite(logits) & (True if mask is None else np.asarray(mask) != 0)
    if is_causal:
        seen &= np.tri(*seen.shape[-2:], dtype=bool)
    return np.einsum("bhqk,bkhd->bqhd", softmax(np.where(seen, logits, -1e30)), value)


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
