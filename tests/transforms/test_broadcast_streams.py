"""Random streams that are broadcast: the same keys each time, and one warning, at the user's line."""

import linecache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx

XS = jnp.zeros((3, 2))
P = jax.sharding.PartitionSpec


def noisy(rngs, x):
    return x + rngs.noise.uniform(x.shape)


def scanned(rngs, xs):
    return nnx.scan(noisy, in_axes=(None, 0), out_axes=0)(rngs, xs)  # the line of the scan


def mapped(rngs, xs):
    return nnx.vmap(noisy, in_axes=(None, 0))(rngs, xs)  # the line of the vmap


def mesh_of(count):
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((count, 1), ("d", "one"), axis_types=auto, devices=jax.devices()[:count])


def sharded(rngs, xs, fun=noisy, spec=None, mesh=None):
    f = nnx.shard_map(fun, mesh=mesh or mesh_of(3), in_specs=(spec, P("d")), out_specs=P("d"))
    return f(rngs, xs)  # the line of the shard_map


def waited(rngs, xs):
    def proceed(carry):
        return (carry[0] < 3) & (carry[1].noise.normal() < 9)

    def body(carry):
        return carry[0] + 1, carry[1]

    count, _ = nnx.while_loop(proceed, body, (0, rngs))  # the line of the loop
    return count


def in_jit(rngs, xs):
    return nnx.jit(scanned)(rngs, xs)


WARNED = {
    "scan": (scanned, r"is broadcast under scan\(.*nnx\.RngCount: nnx\.Carry"),
    "vmap": (
        mapped,
        r"is broadcast under vmap\(.*split_rngs\(splits=\.\.\.\).*RngState in in_axes",
    ),
    "shard_map": (sharded, r"is replicated under shard_map\(.*every device draws the same"),
    "loop": (waited, r"does not move on in cond_fun \(.*proceed\)"),
    "scan in jit": (in_jit, "is broadcast under scan"),
}


@pytest.mark.parametrize("name", WARNED)
def test_one_warning_points_at_the_users_line_and_says_what_to_do(name):
    run, text = WARNED[name]
    with pytest.warns(UserWarning, match=f"The random stream 'noise' {text}") as caught:
        run(nnx.Rngs(noise=0), XS)
    (warning,) = caught
    line = linecache.getline(warning.filename, warning.lineno).strip()
    assert line.endswith(f"# the line of the {name.split()[0]}")


def test_a_stream_in_which_nothing_is_drawn_is_no_cause_for_a_warning():
    nnx.vmap(lambda rngs, x: x, in_axes=(None, 0))(nnx.Rngs(0), XS)
    sharded(nnx.Rngs(0), XS, fun=lambda rngs, x: x)


def test_recurrent_layers_start_alike_without_a_warning():
    layer, x = nnx.RNN(nnx.GRUCell(2, 3, rngs=nnx.Rngs(0))), jnp.ones((2, 1, 2, 2))
    y = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(layer, x)
    np.testing.assert_allclose(y[1], layer(x[1]), rtol=1e-6)


def test_every_iteration_of_a_scan_draws_the_same_keys_and_warns_once():
    rngs, expected = nnx.Rngs(noise=0), nnx.Rngs(noise=0).noise.uniform((2,))
    f = nnx.scan(lambda r, x: noisy(r, x), in_axes=(None, 0), out_axes=0)
    with pytest.warns(UserWarning, match="'noise' is broadcast"):
        out = f(rngs, XS)
    np.testing.assert_allclose(out, jnp.stack([expected] * 3), rtol=1e-6)
    assert int(rngs.noise.count.value) == 0
    assert jnp.array_equal(f(rngs, XS), out)  # warnings are errors here
    assert f(nnx.Rngs(noise=5), jnp.zeros((4, 2))).shape == (4, 2)


def test_the_remedy_of_the_warning_gives_each_iteration_its_keys():
    rngs, one_by_one = nnx.Rngs(noise=0), nnx.Rngs(noise=0)
    axes = nnx.StateAxes({nnx.RngCount: nnx.Carry, ...: None})
    out = nnx.scan(noisy, in_axes=(axes, 0), out_axes=0)(rngs, XS)
    np.testing.assert_allclose(out, jnp.stack([noisy(one_by_one, x) for x in XS]), rtol=1e-6)
    assert int(rngs.noise.count.value) == 3


def test_the_condition_of_a_loop_draws_the_key_that_the_body_draws_next():
    drawn = []

    def draw(carry):
        jax.debug.callback(lambda x: drawn.append(float(x)), carry[1].noise.normal())
        return carry[0] + 1, carry[1]

    rngs = nnx.Rngs(noise=0)
    with pytest.warns(UserWarning, match="'noise' does not move on"):
        _, same = nnx.while_loop(lambda c: draw(c)[0] < 3, draw, (0, rngs))
    jax.effects_barrier()
    assert same is rngs and int(rngs.noise.count.value) == 2
    assert drawn[0] == drawn[1] and drawn[2] == drawn[3] and len(drawn) == 5


def test_specs_and_meshes_of_all_forms():
    with pytest.warns(UserWarning, match="'noise' is replicated"):
        out = sharded(nnx.Rngs(noise=0), XS, spec=nnx.StateSharding({...: P()}))
    assert jnp.array_equal(out[0], out[1])
    f = nnx.shard_map(noisy, mesh=None, in_specs=(None, P("d")), out_specs=P("d"))
    with jax.set_mesh(mesh_of(3)), pytest.warns(UserWarning, match="'noise' is replicated"):
        nnx.jit(f)(nnx.Rngs(noise=0), XS)
    with pytest.warns(UserWarning, match="'noise' is replicated"):
        sharded(nnx.Rngs(noise=0).fork(split=1), XS, fun=nnx.vmap(noisy), spec=P(None))
    f = nnx.shard_map(
        noisy, mesh=mesh_of(3), in_specs=(P(), P("one")), out_specs=P("one"), axis_names={"one"}
    )
    nnx.jit(f)(nnx.Rngs(noise=0), XS)  # mapped over one device, divided by XLA among three


def test_shards_that_draw_no_key_twice():
    def drawn_before(key, x):
        return noisy(nnx.Rngs(noise=jax.random.fold_in(key, jax.lax.axis_index("d"))), x)

    out = sharded(nnx.Rngs(noise=0).noise(), XS, fun=drawn_before)
    assert len(np.unique(out)) == 6
    assert sharded(nnx.Rngs(noise=0), XS, mesh=mesh_of(1)).shape == (3, 2)
    out = sharded(nnx.Rngs(noise=0).fork(split=3), XS, fun=nnx.vmap(noisy), spec=P("d"))
    assert len(np.unique(out)) == 6
