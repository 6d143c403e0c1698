"""`cast` and `Policy`: dtypes of parameters, computations and results."""

import jax
import jax.numpy as jnp
import optax
import pytest

import nnxlite as nnx

IDS = jnp.array([[1, 2]])
BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.head = nnx.Linear(4, 4, rngs=rngs)
        self.tied = self.head
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(()))
        self.steps = nnx.Variable(jnp.array(0))
        self.array = nnx.data(jnp.ones(2))

    def __call__(self, ids):
        return self.tied(self.head(self.norm(self.embed(ids))))


def make():
    return Net(nnx.Rngs(0))


def dtypes(model):
    pairs = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): leaf.dtype.name for path, leaf in pairs}


def test_cast_changes_floats_and_nothing_else():
    model = make()
    before, kernel = dtypes(model), model.head.kernel
    nnx.cast(model, "bfloat16")
    after = dtypes(model)
    assert after == {p: "bfloat16" if d == "float32" else d for p, d in before.items()}
    assert set(after.values()) == {"bfloat16", "int32", "uint32", "key<fry>"}
    assert model.head.kernel is kernel and model.tied is model.head
    assert model.head.param_dtype == model.norm.param_dtype == BF16 and model.head.dtype is None
    assert model(IDS).dtype == model.embed.dtype == BF16
    nnx.cast(model, jnp.float32)
    assert dtypes(model) == before and model.embed.dtype == model.head.param_dtype == F32


def test_only_and_keep():
    model, keep = make(), [nnx.PathContains("norm"), nnx.PathContains("bias")]
    nnx.cast(model, "bfloat16", only=nnx.Param, keep=keep)
    cast_ones = {path for path, dtype in dtypes(model).items() if dtype == "bfloat16"}
    assert cast_ones == {"embed.embedding", "head.kernel", "scale"}
    assert model.norm.param_dtype == F32 and model.head.param_dtype == BF16
    attention = nnx.MultiHeadAttention(2, 4, normalize_qk=True, rngs=nnx.Rngs(0), decode=False)
    nnx.cast(attention, "bfloat16", only=nnx.PathContains("out"))
    assert attention.out.param_dtype == BF16 and attention.param_dtype == F32
    nnx.cast(attention, "bfloat16")  # also a layer without parameters of its own
    assert attention.query.param_dtype == attention.param_dtype == BF16


def test_optimizers_are_cast_where_asked():
    trained = nnx.ModelAndOptimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.adam(0.1))
    moment = lambda: trained.opt_state[0].mu.kernel.dtype
    trained.loss = nnx.metrics.Average()
    nnx.Policy("bfloat16").apply(trained)
    assert (trained.model.dtype, trained.model.kernel.dtype, moment()) == (BF16, BF16, F32)
    nnx.cast(trained, "float32")
    assert (trained.model.kernel.dtype, moment()) == (F32, F32)
    nnx.cast(trained, "bfloat16", only=nnx.OptState)
    assert (trained.model.kernel.dtype, moment()) == (F32, BF16)
    nnx.cast(trained, "bfloat16")
    assert trained.loss.total.dtype == F32


def test_abstract_models_single_variables_and_jit():
    abstract = nnx.eval_shape(make)
    nnx.cast(abstract, "float16")
    assert dtypes(abstract)["head.kernel"] == "float16"
    weight = nnx.Param({"a": jnp.ones(2), "n": jnp.arange(2)})
    nnx.cast(weight, "float16")
    assert [x.dtype.name for x in weight[...].values()] == ["float16", "int32"]
    model = make()
    nnx.jit(lambda m: nnx.cast(m, "float16"))(model)
    assert dtypes(model)["head.kernel"] == "float16" and model.head.param_dtype == jnp.float16


@pytest.mark.quick
def test_a_policy_is_a_value_and_sets_what_layers_store_and_compute_in():
    model = make()
    policy = nnx.Policy(param="float32", compute="bfloat16", output="float32")
    policy.apply(model)
    assert set(dtypes(model).values()) == set(dtypes(make()).values())
    assert (model.embed.dtype, model.head.dtype, model.norm.dtype) == (BF16, BF16, F32)
    assert model.norm(model.embed(IDS)).dtype == F32
    logits = model(IDS)
    assert logits.dtype == BF16
    assert policy.cast_output({"logits": logits, "n": 1})["logits"].dtype == F32
    same = nnx.Policy(compute=jnp.bfloat16, output=jnp.dtype("float32"))
    assert (
        same == policy and hash(same) == hash(policy) and nnx.Policy("float16").output == "float16"
    )
    grads = nnx.eval_shape(nnx.grad(lambda m: policy.cast_output(m(IDS)).sum()), model)
    assert grads.head.kernel.dtype == F32


def test_norms_layers_to_keep_and_parts():
    model = make()
    nnx.Policy("bfloat16", keep=nnx.PathContains("head")).apply(model)
    found = dtypes(model)
    assert found["head.kernel"] == found["norm.scale"] == "float32"
    assert found["embed.embedding"] == found["scale"] == found["array"] == "bfloat16"
    assert model.head.dtype == F32 and model(IDS).dtype == F32
    part = make()
    nnx.Policy("bfloat16").apply(part, nnx.Embed)
    assert dtypes(part)["embed.embedding"] == "bfloat16" and dtypes(part)["scale"] == "float32"
    assert part.head.dtype is None


REF = nnx.Param(jnp.ones(2), ref=True)
KEEP_HEAD = "Policy.apply with `keep`: the filter 'head'"
FLOATS = "is not a floating dtype, in which a model could compute. These are float16, bfl"


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (lambda m: nnx.cast(m, "bfloat"), f"cast: 'bfloat' {FLOATS}"),
        (lambda m: nnx.cast(m, "int8"), f"cast: 'int8' {FLOATS}"),
        (lambda m: nnx.cast(m, None), f"cast: None {FLOATS}"),
        (lambda m: nnx.cast([m, REF], "float16"), "1 is an array ref.*, whose dtype is fixed. C"),
        (lambda m: nnx.cast(m, "float16", only=nnx.PathContains("haed")), "ing array .* 'head'"),
        (lambda m: nnx.cast(m, "float16", keep=nnx.RngKey), "RngKey matches no floating array"),
        (lambda m: nnx.Policy(compute=int), f"Policy: 'int64' {FLOATS}"),
        (lambda m: nnx.Policy(keep=3), "3 of type 'int' is not a filter"),
        (lambda m: nnx.Policy().apply(m, nnx.Conv), "Conv matches no layer .* kinds Embed, La"),
        (lambda m: nnx.Policy().apply(nnx.Dict(a=1)), "Ellip.* matches no layer of Dict. It has n"),
        (lambda m: nnx.Policy(keep="head").apply(m), KEEP_HEAD),
    ],
)
def test_a_refused_cast_or_policy_changes_nothing(apply, message):
    model = make()
    with pytest.raises((ValueError, TypeError), match=message):
        apply(model)
    assert dtypes(model) == dtypes(make()) and model.head.dtype is None


def test_a_policy_is_seen():
    model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.LayerNorm(2, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((1, 2), jnp.float32)
    assert "params / compute" not in nnx.tabulate(model, x)
    nnx.Policy(compute="bfloat16").apply(model)
    table = nnx.tabulate(model, x)
    assert "params / compute" in table and "float32 / bfloat16" in table
    assert "float32 / float32" in table
    assert "Linear(in_features=2, out_features=2, dtype=bfloat16)" in str(model)
