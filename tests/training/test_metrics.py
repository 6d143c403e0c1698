"""Metrics: figures over batches, masks, composition, and messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.training.metrics import Accuracy, Average, MetricState, Welford

LOGITS = jnp.array([[1.0, 2.0], [2.0, 1.0], [0.0, 1.0]])
LABELS = jnp.array([1, 1, 1])


def values_of(metric):
    return {path: np.asarray(v.value) for path, v in nnx.to_flat_state(nnx.state(metric))}


@pytest.mark.parametrize(
    ("values", "mask", "total", "count"),
    [
        ([1.0, 3.0, np.nan], [True, True, False], 4, 2),
        (np.ones((3, 2)), [[True]] * 2 + [[False]], 4, 4),  # the reference counts two rows
        ([1.0, 2.0, 3.0], [0, 2, 1], 7, 3),  # numbers are weights
        ([1.0, 2.0, 3.0], [0.75, 0.75, 1.0], 5.25, 2),
        (2.0, False, 0, 0),
        (np.ones(1000, jnp.bfloat16), None, 1000, 1000),  # summed in float32
        (np.ones(4, "bool"), [0.5, 0.5, 1.5, 0.0], 2.5, 2),  # weights are not rounded to integers
        (np.ones(2049), np.ones(2049, jnp.bfloat16), 2049, 2049),  # the count is exact
        (np.full(4, 200, "uint8"), np.full(4, 2), 1600, 8),
        (np.full(4, 60000, "float16"), np.full(4, 2), 480000, 8),
    ],
)
def test_an_average_with_a_mask(values, mask, total, count):
    average = Average()
    for times in (1, 2):
        average.update(values=jnp.asarray(values), mask=None if mask is None else jnp.array(mask))
        found = average.total.value, average.count.value
        assert found == (times * total, times * count)


@pytest.mark.parametrize("shape", [(), (5,), (3, 5)])
@pytest.mark.parametrize("mask", [[1, 0, 1, 0, 1], [[True, False, True, True, False]] * 3])
def test_values_and_masks_are_broadcast_together(shape, mask):
    """A loss that is one number, and the mask of the batch: as in the reference."""
    mask, values = jnp.array(mask), 2 * jnp.ones(shape)
    average, spread = Average(), Welford()
    average.update(values=values, mask=mask)
    spread.update(values=values, mask=mask)
    number = int(jnp.broadcast_to(mask, jnp.broadcast_shapes(shape, mask.shape)).sum())
    assert average.count.value == spread.count.value == number
    assert average.total.value == 2 * number and spread.compute().mean == 2


BATCH = {"logits": LOGITS, "labels": LABELS}


@pytest.mark.parametrize(
    ("metric", "given", "message"),
    [
        (Average("loss"), {"b": 3, "a": 4}, r"Average.update: .* 'loss'; given: a, b\."),
        (Average("loss"), {}, "given: none"),
        (Average("loss"), {"loss": "q"}, "needs numbers as 'loss', got str"),
        (Welford(), {"loss": 3}, "Welford.update: Expected keyword argument 'values'"),
        (Average(), {"values": np.ones(3), "mask": np.ones(2)}, r"float32\[2\] .* values float64"),
        (Accuracy(), BATCH | {"labels": LABELS[:, None]}, r"multi-class.*ndim\+1.*3, 2.*3, 1\]"),
        (Accuracy(threshold=0.5), BATCH, "binary classification, .*==labels.ndim, got"),
        (Accuracy(), BATCH | {"labels": LABELS * 1.0}, r"jnp.int32, or another .*float32\[3\]"),
        (Accuracy(), BATCH | {"labels": LABELS[:2]}, r"\[3, 2\] and labels int32\[2\] are of d"),
        (Accuracy(), {"logits": LOGITS}, "labels"),
    ],
)
def test_a_refused_batch_changes_nothing(metric, given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        metric.update(**given)
    assert metric.count.value == 0


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
def test_welford_of_numpys_precision(dtype, masked):
    """Values near 1e8 differ by less than float32 can tell."""
    values = (2e8 + 4 * np.random.default_rng(0).normal(size=50)).astype(dtype)
    metric = Welford()
    metric.update(values=values, **({"mask": jnp.ones(50)} if masked else {}))
    deviation = metric.compute().standard_deviation
    np.testing.assert_allclose(deviation, values.astype(float).std(), rtol=1e-5)
    assert {v.dtype.name for v in values_of(metric).values()} == {"float32", "int32"}


def test_numbers_of_64_bits():
    average = Average()
    for values, mask in ((np.array([2**40, 2**41]), None), (np.int64(2**40), np.array([0, 1, 2]))):
        average.update(values=values, mask=mask)
    assert average.count.value == 5 and float(average.total.value) == 6 * 2**40
    with jax.enable_x64(True):
        for dtype in ("float64", "int64"):
            metric, given = Welford(), jnp.asarray(1e12 + np.arange(50.0)).astype(dtype)
            nnx.jit(lambda metric, x: metric.update(values=x))(metric, given)
            np.testing.assert_allclose(metric.m2.value, np.arange(50.0).var() * 50, rtol=1e-6)
            assert metric.mean.value.dtype == metric.m2.value.dtype == jnp.float32


def test_welford_ignores_what_is_masked_and_empty_batches_and_is_reset():
    masked, plain = Welford("x"), Welford("x")
    x = jnp.array([1.0, 2.0, jnp.nan, 5.0])
    masked.update(x=x, mask=jnp.array([1, 1, 0, 1]))
    plain.update(x=x[jnp.array([0, 1, 3])])
    np.testing.assert_allclose(masked.compute().mean, plain.compute().mean, rtol=1e-6)
    np.testing.assert_allclose(masked.m2.value, plain.m2.value, rtol=1e-6)
    before = values_of(masked)
    masked.update(x=x, mask=jnp.zeros(4))
    masked.update(x=jnp.zeros(0))
    np.testing.assert_equal(values_of(masked), before)
    masked.reset()
    assert all((v == 0).all() for v in values_of(masked).values())
    assert jnp.isnan(masked.compute().standard_deviation)


@pytest.mark.parametrize(
    ("threshold", "logits", "labels"),
    [
        (0.5, [0.5, 0.5, 0.1], [1, 1, 0]),
        (0.0, [2.0, -2.0, 0.0, -3.0], [1, -1, 2, -1]),
        (0.5, [0.9, 0.1, 0.7], np.array([255, 0, 128], "uint8")),
        (0.5, [0.9, 0.1], [True, False]),
        (0.5, [jnp.nan, 0.9], [0, 7]),
    ],
)
def test_accuracy_of_two_classes_has_labels_by_their_sign(threshold, logits, labels):
    metric = Accuracy(threshold=threshold)
    metric.update(logits=jnp.array(logits), labels=jnp.array(labels))
    assert metric.compute() == 1


def make():
    return nnx.MultiMetric(accuracy=Accuracy(), loss=Average("loss"), spread=Welford("loss"))


def test_a_stack_of_metrics_is_reset_as_a_stack():
    stack = nnx.vmap(lambda _: make())(jnp.arange(2))
    before = values_of(stack)
    update = nnx.vmap(lambda metrics: metrics.update(logits=LOGITS, labels=LABELS, loss=1.0))
    update(stack)
    stack.reset()
    np.testing.assert_equal(values_of(stack), before)
    update(stack)


def test_a_metric_without_a_mask_is_not_given_one():
    class Maskless(Average):
        def update(self, *, values):
            super().update(values=values)

    metrics = nnx.MultiMetric(split=Average(), train=Maskless())
    metrics.update(values=1.0, mask=None)
    metrics.update(values=2.0, mask={"split": False})
    assert metrics.compute() == {"split": 1.0, "train": 1.5}
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        metrics.update(values=1.0, mask=True)


def test_law_8_a_failed_update_leaves_every_metric_as_it_was():
    metrics = make()
    metrics.update(logits=LOGITS, labels=LABELS, loss=1.0)
    before = values_of(metrics)
    with pytest.raises(TypeError, match="Average.update: Expected keyword argument 'loss'") as e:
        metrics.update(logits=LOGITS, labels=LABELS)
    assert e.value.__notes__ == ["This was the metric 'loss' of MultiMetric."]
    np.testing.assert_equal(values_of(metrics), before)


def test_multi_metric_refuses_names_of_methods_and_values_that_are_no_metrics():
    for name in ("reset", "update", "compute"):
        with pytest.raises(ValueError, match=f"A metric cannot be named '{name}'"):
            nnx.MultiMetric(**{"loss": Average(), name: Average()})
    with pytest.raises(TypeError, match="'a' must be a Metric .*got int"):
        nnx.MultiMetric(a=3)


def test_the_base_says_what_a_subclass_must_define():
    class Unfinished(nnx.Metric):
        def __init__(self):
            pass

    with pytest.raises(NotImplementedError, match=r"Must override `__init__\(\)` method in Metric"):
        nnx.Metric()
    for method in ("reset", "update", "compute"):
        with pytest.raises(
            NotImplementedError, match=rf"Must override `{method}\(\)` method in Unf"
        ):
            getattr(Unfinished(), method)()


def test_metrics_are_updated_inside_jit():
    traces = []

    @nnx.jit
    def update(metrics, x):
        traces.append(None)
        metrics.update(loss=x, logits=LOGITS, labels=LABELS)

    metrics = make()
    for i in range(3):
        update(metrics, jnp.array([1.0 * i, 2.0 * i]))
    assert len(traces) == 1
    graphdef, state, rest = metrics.split(MetricState, ...)
    assert not rest and nnx.merge(graphdef, state, rest).compute()["loss"] == 1.5
    np.testing.assert_allclose(metrics.compute()["accuracy"], 2 / 3)


def test_weights_count_in_an_accuracy_too_and_its_threshold_is_a_float():
    accuracy = Accuracy()
    accuracy.update(logits=LOGITS, labels=LABELS, mask=jnp.array([0.5, 2.0, 1.5]))
    assert float(accuracy.compute()) == 0.5
    for bad in ("a", 1):
        with pytest.raises(TypeError, match="Expected threshold to be a float, or None, got"):
            Accuracy(threshold=bad)
