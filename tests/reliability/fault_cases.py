"""Calls into which faults are injected: every transform, on objects with sharing and cycles.

A `World` is some objects and a function of them, made new for each injection, so that nothing of it is
compiled.  A case is a function of a world: it makes the transformed function, and returns a call of
no arguments.  The user's functions are the ones whose name begins with `body`: faults are
injected at their lines.
"""

from __future__ import annotations

import itertools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import checkify
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import nnxlite as nnx

LANES = 2
_worlds = itertools.count(1)


def filled(number: float, *shape: int) -> jax.Array:
    """An array that is not weakly typed."""
    return jnp.full(shape, number, jnp.float32)


class Part(nnx.Module):
    """A layer with state of several kinds, sharing and a cycle."""

    def __init__(self, *lead: int) -> None:
        self.w = nnx.Param(filled(2.0, *lead, 2))
        self.tied = self.w
        self.me = self
        self.stat = nnx.BatchStat(filled(1.0, *lead, 2), note="mean")
        self.inside = nnx.Dict(owner=self, stat=self.stat)
        self.plain = [nnx.Param(filled(0.5, *lead, 2)), jnp.ones((*lead, 2))]
        self.bare = filled(3.0, *lead, 2)
        self.old = nnx.Variable(jnp.zeros((*lead, 2)))
        self.items = nnx.List([nnx.Variable(jnp.ones(lead))])
        self.training = True
        self.name = "part"


class Model(Part):
    """The same with a counter and a random stream, which no axis is mapped over."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))
        self.rngs = nnx.Rngs(3)


class World:
    """Objects, and what a function of them counts.

    Attributes:
        model, other: two arguments that share a Variable.
        stack: a model with an axis to map over.
        x: an array.
        runs: an entry for each run of a body in Python.
        salt: a number of its own, so that no program of another world serves.
    """

    def __init__(self) -> None:
        self.model = Model()
        self.other = nnx.Dict(shared=self.model.stat, extra=nnx.Variable(jnp.ones(2)))
        self.stack = Part(LANES)
        self.part = Part()
        self.training: list[tp.Any] = []
        self.x = jnp.arange(1.0, 3.0)
        self.xs = jnp.arange(4.0).reshape(LANES, 2)
        self.runs: list[str] = []
        self.salt = float(np.nextafter(0.0, 1.0)) * next(_worlds)
        self.known: list[tp.Any] = []

    def start_training(self) -> tuple[tp.Any, tp.Any]:
        """An optimizer and metrics."""
        optimizer = nnx.Optimizer(self.model, optax.adam(0.1), wrt=nnx.Param)
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
        self.training += [optimizer, metrics]
        return optimizer, metrics

    @property
    def roots(self) -> list[tp.Any]:
        """What a call may change."""
        return [self.model, self.other, self.stack, self.part, self.training]


def everything(roots: tp.Any) -> list[tp.Any]:
    """Every object and Variable below some roots."""
    return [x for _, x in nnx.iter_graph(roots) if isinstance(x, (nnx.Pytree, nnx.Variable))]


# Bodies -------------------------------------------------------------------------------------------


def values_body(world: World) -> tp.Callable[..., tp.Any]:
    """A function that writes values only."""
    runs, salt = world.runs, world.salt

    def body(model, other, x):
        runs.append("run")
        y = model.w * x + salt
        model.stat.value = model.stat.value * 0.5 + x
        other.extra[...] += 1.0
        model.items[0].value = model.items[0].value + x.sum()
        model.plain[0].value = model.plain[0].value * 1.5
        y = y * model.tied + model.plain[0]
        return y.sum() + other.extra.sum()

    return body


def structure_body(world: World) -> tp.Callable[..., tp.Any]:
    """A function that changes everything that can change."""
    runs, salt = world.runs, world.salt

    def body(model, other, x):
        runs.append("run")
        y = model.w * x + salt
        model.stat.value = model.stat.value * 0.5 + x
        model.bare = model.bare + 1.0
        model.plain[1] = model.plain[1] * 2.0
        other.extra[...] += 1.0
        model.new = nnx.Variable(x * 3.0, tag="new")
        model.again = model.new
        if hasattr(model, "old"):
            del model.old
        model.items.append(nnx.Variable(x.sum()))
        model.items[0] = other
        model.inside.back = other
        model.inside.stat = nnx.BatchStat(x - 1.0)
        model.stat.set_metadata(note="changed")
        model.eval()
        model.training = False
        model.name = model.name + "s"
        model.table = {"new": model.new, "x": x}
        other.child = nnx.Dict(owner=other, new=model.new)
        return (y * model.tied).sum() + other.extra.sum()

    return body


def with_stream(body: tp.Callable[..., tp.Any]) -> tp.Callable[..., tp.Any]:
    """A function that counts, and draws from the random stream."""

    def body_with_stream(model, other, x):
        model.count[...] += 1
        noise = jax.random.uniform(model.rngs.params())
        return body(model, other, x) + 0.0 * noise + model.count.astype(jnp.float32)

    return body_with_stream


def with_result(body: tp.Callable[..., tp.Any]) -> tp.Callable[..., tp.Any]:
    """A function that returns objects."""

    def body_with_result(model, other, x):
        y = body(model, other, x)
        return {"y": y, "model": model, "made": nnx.Variable(x)}

    return body_with_result


# Cases --------------------------------------------------------------------------------------------

Call = tp.Callable[[], tp.Any]
Case = tp.Callable[[World], Call]
CASES: dict[str, Case] = {}


def case(make: Case) -> Case:
    """Add a case."""
    CASES[make.__name__] = make
    return make


def full(world: World) -> tp.Callable[..., tp.Any]:
    """The function that does the most."""
    return with_stream(structure_body(world))


def light(world: World) -> tp.Callable[..., tp.Any]:
    """The function that changes no structure."""
    return with_stream(values_body(world))


def on_arguments(world: World, fun: tp.Any) -> Call:
    """A call with the usual arguments."""
    return lambda: fun(world.model, world.other, world.x)


def on_stack(world: World, fun: tp.Any) -> Call:
    """A call with a stacked model."""
    return lambda: fun(world.stack, world.xs)


def of_stack(body: tp.Any, *, structure: bool = True) -> tp.Any:
    """A function of one lane of a stack."""

    def body_of_lane(part, x):
        other = nnx.Dict(extra=nnx.Variable(x))
        y = body(part, other, x)
        part.items[0] = nnx.Variable(x)
        return y

    def body_of_values(part, x):
        part.stat.value = part.stat.value + x
        other = nnx.Dict(extra=nnx.Variable(x))
        return body(part, other, x)

    return body_of_lane if structure else body_of_values


@case
def jit_values(world):
    return on_arguments(world, nnx.jit(light(world)))


@case
def jit(world):
    return on_arguments(world, nnx.jit(with_result(full(world))))


@case
def jit_donated(world):
    return on_arguments(world, nnx.jit(light(world), donate="written"))


@case
def jit_donate_argnums(world):
    step = nnx.jit(full(world), donate_argnums=0)
    # Without jit the model keeps `x` itself, which the next call would donate and read.
    return lambda: step(world.model, world.other, jnp.copy(world.x))


@case
def jit_sharded(world):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    split = NamedSharding(mesh, PartitionSpec("x"))
    whole = NamedSharding(mesh, PartitionSpec())
    fun = nnx.jit(light(world), in_shardings=(whole, whole, split), out_shardings=whole)
    return on_arguments(world, fun)


@case
def jit_partial(world):
    fun = nnx.jit_partial(light(world), world.model, world.other)
    return lambda: fun(world.x)


@case
def jit_of_method(world):
    body = full(world)

    class Own(nnx.Module):
        def body(self, model, other, x):
            return body(model, other, x)

    own = Own()
    return on_arguments(world, nnx.jit(own.body))


@case
def jit_static(world):
    inner = full(world)

    def body_with_static(model, other, x, flag):
        return inner(model, other, x) * (2 if flag else 1)

    fun = nnx.jit(body_with_static, static_argnums=3)
    return lambda: fun(world.model, world.other, world.x, True)


@case
def grad(world):
    return on_arguments(world, nnx.grad(full(world)))


@case
def value_and_grad(world):
    inner = full(world)

    def body_with_aux(model, other, x):
        y = inner(model, other, x)
        return y, (y * 2, other)

    return on_arguments(world, nnx.value_and_grad(body_with_aux, has_aux=True))


@case
def vjp(world):
    inner = full(world)

    def call():
        out, pull = nnx.vjp(inner, world.model, world.other, world.x)
        return out, pull(jnp.ones(()))[2]

    return call


@case
def jvp(world):
    inner = full(world)

    def body_of_tangents(x):
        return inner(nnx.clone(world.model), nnx.clone(world.other), x)

    return lambda: nnx.jvp(body_of_tangents, (world.x,), (world.x,))


@case
def custom_vjp(world):
    return on_arguments(world, custom_vjp_of(world))


@case
def custom_vjp_jit(world):
    return on_arguments(world, nnx.jit(custom_vjp_of(world)))


def custom_vjp_of(world):
    """A differentiated function with a rule, without a call."""
    inner = light(world)

    @nnx.custom_vjp
    def fun(model, other, x):
        return inner(model, other, x)

    def body_fwd(model, other, x):
        return inner(model, other, x), x

    def body_bwd(x, cotangent):
        (d_model, d_other, _), g = cotangent
        return d_model, d_other, (g * x).astype(x.dtype)

    fun.defvjp(body_fwd, body_bwd)
    return nnx.grad(lambda m, o, x: fun(m, o, x), argnums=2)


@case
def vmap(world):
    return on_stack(world, nnx.vmap(of_stack(structure_body(world))))


@case
def vmap_jit(world):
    body = of_stack(values_body(world), structure=False)
    return on_stack(world, nnx.jit(nnx.vmap(body)))


@case
def pmap(world):
    return on_stack(world, nnx.pmap(of_stack(values_body(world), structure=False)))


@case
def shard_map(world):
    mesh = Mesh(np.array(jax.devices()[:LANES]), ("d",))
    body = of_stack(values_body(world), structure=False)

    def body_of_shard(part, x):
        return body(part, x)[None]

    spec = PartitionSpec("d")
    fun = nnx.shard_map(body_of_shard, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    return on_stack(world, fun)


@case
def scan(world):
    inner = light(world)

    def body_of_step(carry, x):
        model, other = carry
        y = inner(model, other, x)
        return (model, other), y

    fun = nnx.scan(body_of_step)
    return lambda: fun((world.model, world.other), world.xs)


@case
def scan_layers(world):
    body = of_stack(values_body(world), structure=False)

    def body_of_layer(x, part):
        return x + body(part, x)

    fun = nnx.scan(body_of_layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return lambda: fun(world.x, world.stack)


@case
def cond(world):
    first, second = full(world), full(world)

    def body_other(model, other, x):
        return second(model, other, x) * 3.0

    return lambda: nnx.cond(True, first, body_other, world.model, world.other, world.x)


@case
def switch(world):
    inner = light(world)

    def body_one(model, other, x):
        return inner(model, other, x).astype(x.dtype)  # a stream draws float64 under x64

    def body_two(model, other, x):
        other.extra[...] *= 2.0
        return x.sum()

    return lambda: nnx.switch(1, [body_one, body_two], world.model, world.other, world.x)


@case
def while_loop(world):
    inner = light(world)

    def body_cond(carry):
        return carry[3] < 2

    def body_step(carry):
        model, other, x, n = carry
        inner(model, other, x)
        return model, other, x, n + 1

    start = lambda: (world.model, world.other, world.x, 0)
    return lambda: nnx.while_loop(body_cond, body_step, start())


@case
def fori_loop(world):
    inner = light(world)

    def body_step(i, carry):
        model, other, x = carry
        inner(model, other, x)
        return model, other, x + i

    start = lambda: (world.model, world.other, world.x)
    return lambda: nnx.fori_loop(0, 2, body_step, start())


@case
def remat(world):
    return on_arguments(world, nnx.grad(nnx.remat(full(world))))


@case
def checkified(world):
    inner = full(world)

    def body_checked(model, other, x):
        y = inner(model, other, x)
        checkify.check(x.sum() >= 0, "negative")
        return y

    fun = nnx.jit(nnx.checkify(body_checked))
    return lambda: fun(world.model, world.other, world.x)[1]


@case
def eval_shape(world):
    fun = nnx.eval_shape
    inner = full(world)
    return lambda: fun(inner, world.model, world.other, world.x).shape


@case
def called(world):
    inner = full(world)

    def body_of_call(parts, x):
        return nnx.call(parts)(x)

    class Callable(nnx.Module):
        def __init__(self):
            self.model, self.other = world.model, world.other

        def __call__(self, x):
            return inner(self.model, self.other, x)

    def call():
        return body_of_call(nnx.split(nnx.clone(Callable())), world.x)[0]

    return call


@case
def filter_jit(world):
    return on_arguments(world, nnx.filter_jit(full(world)))


@case
def filter_jit_donated(world):
    fun = nnx.filter_jit(light(world), donate="all")
    return lambda: fun(world.model, world.other, world.x + 0)


@case
def filter_grad(world):
    inner = values_body(world)

    def body_of_part(part, x):
        other = nnx.Dict(extra=nnx.Variable(x))
        return inner(part, other, x)

    fun = nnx.filter_grad(body_of_part)
    return lambda: fun(world.part, world.x)


@case
def filter_vmap(world):
    return on_stack(world, nnx.filter_vmap(of_stack(structure_body(world))))


@case
def jit_grad(world):
    return on_arguments(world, nnx.jit(nnx.grad(full(world))))


@case
def jit_scan(world):
    inner = light(world)

    def body_of_step(carry, x):
        model, other = carry
        return (model, other), inner(model, other, x)

    fun = nnx.jit(nnx.scan(body_of_step))
    return lambda: fun((world.model, world.other), world.xs)


@case
def grad_vmap(world):
    inner = nnx.vmap(of_stack(values_body(world), structure=False))

    def body_of_sum(part, x):
        return inner(part, x).sum()

    return on_stack(world, nnx.grad(body_of_sum))


@case
def cond_in_jit(world):
    one, two = light(world), light(world)

    def body_of_cond(model, other, x):
        return nnx.cond(x.sum() > 0, one, two, model, other, x)

    return on_arguments(world, nnx.jit(body_of_cond))


def training_call(world, **options):
    inner = values_body(world)

    def body_of_step(model, optimizer, metrics, x):
        def loss_fn(model):
            return inner(model, nnx.Dict(extra=nnx.Variable(x)), x)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        metrics.update(loss=loss)
        return loss

    fun = nnx.jit(body_of_step, **options)
    optimizer, metrics = world.start_training()
    return lambda: fun(world.model, optimizer, metrics, world.x)


@case
def training_step(world):
    return training_call(world)


@case
def training_step_donated(world):
    return training_call(world, donate="written")


@case
def optimizer_update(world):
    grads = jax.tree.map(jnp.ones_like, nnx.state(world.model, nnx.Param))
    optimizer, _ = world.start_training()
    return lambda: optimizer.update(world.model, grads)


@case
def update(world):
    def call():
        state = jax.tree.map(lambda x: x + 1, nnx.to_pure_dict(nnx.state(world.model, nnx.Param)))
        nnx.update(world.model, state)

    return call
