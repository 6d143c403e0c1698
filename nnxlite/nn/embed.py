"""`Embed`: a learned table of vectors, looked up by index."""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from nnxlite.nn import initializers
from nnxlite.nn._common import NO_METADATA, Arguments, Metadata, OutSharding
from nnxlite.nn.dtypes import Dtype, PromoteDtypeFn, default_promote_dtype
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.lora_kernel import LoRAKernel, adapter_of, add_adapter, thin_options, weight_of
from nnxlite.objects._module import Module, layer_name
from nnxlite.objects._rngs import Rngs
from nnxlite.variables._kinds import Param

__all__ = ["Embed"]

default_embed_init: tp.Final[Initializer] = initializers.variance_scaling(
    1.0, "fan_in", "normal", out_axis=0
)


class Embed(Module):
    """A table of `num_embeddings` vectors with `features` entries each.

    Maps indices of shape `(...)` to vectors of shape `(..., features)`.  A negative index counts from
    the end; an index outside the table gives NaN (the smallest number for integer tables), so that
    mistakes show up.  A table with one row gives that row for every index.

    Args:
        num_embeddings: number of rows.
        features: length of a row.
        dtype: dtype of the result; None for that of the table.
        param_dtype: dtype of the table.
        embedding_init: initializer of the table.
        promote_dtype: casts the table (and a query) to the dtype of the computation.
        rngs: the stream "params" is drawn once.
        embedding_metadata: metadata of the table, such as a sharding.

    Attributes:
        embedding: Param of shape (num_embeddings, features).

    Raises:
        ValueError: when called with anything but integers.
        TypeError: for a size that is not a whole number, or a query of another length.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> embed = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    >>> embed(jnp.array([[0, 4]])).shape
    (1, 2, 3)
    """

    embedding: Param[jax.Array]

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        embedding_init: Initializer = default_embed_init,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        rngs: Rngs,
        embedding_metadata: Metadata = NO_METADATA,
    ) -> None:
        arguments = Arguments(self, locals())
        sizes = arguments.sizes("num_embeddings", "features")
        self.embedding = arguments.parameter("embedding", sizes)
        self.num_embeddings = num_embeddings
        self.features = features
        self.dtype = self.embedding.dtype if dtype is None else dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype

    def __call__(self, inputs: jax.Array, out_sharding: OutSharding = None) -> jax.Array:
        """The rows at `inputs`, (...) -> (..., features).

        Args:
            inputs: integers.
            out_sharding: sharding of the result, where the mesh has explicit axes; by default that of
                the inputs, if the table is not divided.
        """
        indices = inputs if hasattr(inputs, "dtype") else jnp.asarray(inputs)
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise ValueError(
                f"{layer_name(self)}: Input type must be an integer or unsigned integer, for it looks "
                f"up rows; got {indices.dtype} of shape {indices.shape}."
            )
        if indices.dtype.itemsize < 4:  # a negative index plus the number of rows may not fit
            indices = indices.astype(jnp.int32)
        table = weight_of(self.embedding)
        (embedding,) = self.promote_dtype((table,), dtype=self.dtype, inexact=False)
        if out_sharding is None:
            out_sharding = _sharding_of_rows(embedding, indices)
        rows = _rows(embedding, indices, out_sharding)
        if not isinstance(self.embedding, LoRAKernel):
            return rows
        product = lambda one, a, out_sharding: one * _rows(a, indices, out_sharding)
        one = jnp.ones((*indices.shape, 1), rows.dtype)  # the element of a one-hot input
        return add_adapter(rows, one, self.embedding, product, {"out_sharding": out_sharding})

    def attend(self, query: jax.Array, out_sharding: OutSharding = None) -> jax.Array:
        """The scalar product of queries with every row, (..., features) -> (..., num_embeddings).

        With the table of the input embedding this is the output layer of a language model.

        Args:
            query: vectors of length `features`.
            out_sharding: sharding of the result, where the mesh has explicit axes.

        >>> import jax.numpy as jnp
        >>> import nnxlite as nnx
        >>> nnx.Embed(5, 3, rngs=nnx.Rngs(0)).attend(jnp.ones((2, 3))).shape
        (2, 5)
        """
        table = weight_of(self.embedding)
        query, embedding = self.promote_dtype((query, table), dtype=self.dtype)
        if query.shape[-1:] != embedding.shape[1:]:
            raise TypeError(
                f"{layer_name(self)}.attend expects vectors of length {embedding.shape[1]}: "
                f"`embedding` has shape {embedding.shape}; got a query of shape {query.shape}."
            )
        scores = jnp.dot(query, embedding.T, out_sharding=out_sharding)
        matrices = adapter_of(self.embedding, query.dtype)
        if matrices is None:
            return scores
        options = {"out_sharding": out_sharding}
        thin = thin_options(options, scores.ndim - 1)
        thin = jnp.dot(matrices.dropped(query), matrices.b.T, **thin)
        return scores + jnp.dot(thin, matrices.a.T, **options)


def _rows(table: jax.Array, indices: jax.Array, out_sharding: OutSharding) -> jax.Array:
    """The rows of a table at some indices; NaN where the table has no row."""
    if table.shape[0] == 1:
        return jnp.broadcast_to(table[0], (*indices.shape, table.shape[1]))
    if out_sharding is not None:
        return table.at[indices].get(mode="fill", out_sharding=out_sharding)
    return jnp.take(table, indices, axis=0)


def _sharding_of_rows(table: jax.Array, indices: jax.Array) -> NamedSharding | None:
    """The sharding of rows of a whole table, at divided indices; None except on explicit axes."""
    whole, divided = (getattr(jax.typeof(x), "sharding", None) for x in (table, indices))
    if whole is None or divided is None or any(whole.spec) or not any(divided.spec):
        return None  # automatic axes are in no type's spec
    return NamedSharding(divided.mesh, PartitionSpec(*divided.spec, None))
