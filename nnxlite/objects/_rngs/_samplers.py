"""Distributions and initializers as methods of objects that return a key when called.

`Samplers` is a table: one row for each sampling function of `jax.random` and for each factory of
`jax.nn.initializers`.  A row is a method with the same parameters except for the key, which is
drawn from the object.
"""

from __future__ import annotations

import functools
import inspect
import typing as tp

import jax

P = tp.ParamSpec("P")
R = tp.TypeVar("R")


class KeylessInitializer(tp.Protocol):
    """The result of an initializer method: an initializer that draws its own key at each call."""

    def __call__(
        self, shape: tp.Sequence[int], dtype: tp.Any = ..., out_sharding: tp.Any = None
    ) -> jax.Array:
        """An array of this shape and dtype."""
        ...


def _sampler(
    draw: tp.Callable[tp.Concatenate[tp.Any, P], R],
) -> tp.Callable[tp.Concatenate[tp.Any, P], R]:
    """A method that calls `draw` with the next key."""

    @functools.wraps(draw)
    def method(self: tp.Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return draw(self(), *args, **kwargs)

    summary = (inspect.getdoc(draw) or "").partition("\n\n")[0]
    return _describe(
        method,
        draw,
        f"{summary}\n\nThe same as `jax.random.{draw.__name__}`, with the next key.",
        keyless=True,
    )


def _initializer(
    factory: tp.Callable[P, jax.nn.initializers.Initializer],
) -> tp.Callable[tp.Concatenate[tp.Any, P], KeylessInitializer]:
    """A method that makes an initializer and supplies its key."""

    @functools.wraps(factory)
    def method(self: tp.Any, *args: P.args, **kwargs: P.kwargs) -> KeylessInitializer:
        initialize = tp.cast(tp.Callable[..., jax.Array], factory(*args, **kwargs))

        def draw(*args: tp.Any, **kwargs: tp.Any) -> jax.Array:
            return initialize(self(), *args, **kwargs)

        return draw

    name = factory.__name__
    return _describe(
        method,
        factory,
        f"The initializer `jax.nn.initializers.{name}`, without the key argument.\n\n"
        "Returns a function of `(shape, dtype)`; each call draws the next key.",
        keyless=False,
    )


def _describe(method: tp.Any, source: tp.Any, doc: str, *, keyless: bool) -> tp.Any:
    """Give a generated method a name, a signature and a docstring of its own."""
    parameters = list(inspect.signature(source).parameters.values())[1 if keyless else 0 :]
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    del method.__wrapped__
    method.__signature__ = inspect.Signature([own, *parameters])
    method.__qualname__ = f"Samplers.{method.__name__}"
    method.__module__ = __name__
    method.__doc__ = doc
    return method


class Samplers:
    """Base of `RngStream` and `Rngs`: the random functions as methods, without the key argument.

    >>> import nnxlite as nnx
    >>> rngs = nnx.Rngs(0, noise=1)
    >>> rngs.normal((2, 3)).shape, rngs.noise.bernoulli(0.5, (4,)).dtype
    ((2, 3), dtype('bool'))
    >>> kernel_init = rngs.lecun_normal()
    >>> kernel_init((3, 5)).shape
    (3, 5)
    """

    __slots__ = ()

    ball = _sampler(jax.random.ball)
    bernoulli = _sampler(jax.random.bernoulli)
    beta = _sampler(jax.random.beta)
    binomial = _sampler(jax.random.binomial)
    bits = _sampler(jax.random.bits)
    categorical = _sampler(jax.random.categorical)
    cauchy = _sampler(jax.random.cauchy)
    chisquare = _sampler(jax.random.chisquare)
    choice = _sampler(jax.random.choice)
    dirichlet = _sampler(jax.random.dirichlet)
    double_sided_maxwell = _sampler(jax.random.double_sided_maxwell)
    exponential = _sampler(jax.random.exponential)
    f = _sampler(jax.random.f)
    gamma = _sampler(jax.random.gamma)
    generalized_normal = _sampler(jax.random.generalized_normal)
    geometric = _sampler(jax.random.geometric)
    gumbel = _sampler(jax.random.gumbel)
    laplace = _sampler(jax.random.laplace)
    loggamma = _sampler(jax.random.loggamma)
    logistic = _sampler(jax.random.logistic)
    lognormal = _sampler(jax.random.lognormal)
    maxwell = _sampler(jax.random.maxwell)
    multinomial = _sampler(jax.random.multinomial)
    multivariate_normal = _sampler(jax.random.multivariate_normal)
    normal = _sampler(jax.random.normal)
    orthogonal = _sampler(jax.random.orthogonal)
    pareto = _sampler(jax.random.pareto)
    permutation = _sampler(jax.random.permutation)
    poisson = _sampler(jax.random.poisson)
    rademacher = _sampler(jax.random.rademacher)
    randint = _sampler(jax.random.randint)
    rayleigh = _sampler(jax.random.rayleigh)
    t = _sampler(jax.random.t)
    triangular = _sampler(jax.random.triangular)
    truncated_normal = _sampler(jax.random.truncated_normal)
    uniform = _sampler(jax.random.uniform)
    wald = _sampler(jax.random.wald)
    weibull_min = _sampler(jax.random.weibull_min)

    delta_orthogonal = _initializer(jax.nn.initializers.delta_orthogonal)
    glorot_normal = _initializer(jax.nn.initializers.glorot_normal)
    glorot_uniform = _initializer(jax.nn.initializers.glorot_uniform)
    he_normal = _initializer(jax.nn.initializers.he_normal)
    he_uniform = _initializer(jax.nn.initializers.he_uniform)
    kaiming_normal = he_normal
    kaiming_uniform = he_uniform
    lecun_normal = _initializer(jax.nn.initializers.lecun_normal)
    lecun_uniform = _initializer(jax.nn.initializers.lecun_uniform)
    variance_scaling = _initializer(jax.nn.initializers.variance_scaling)
    xavier_normal = glorot_normal
    xavier_uniform = glorot_uniform
