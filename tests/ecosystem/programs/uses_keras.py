"""Keras with its NNX backend: fits a classifier, and runs a step of it under `nnx.jit`."""

import jax
import keras
import numpy as np
from clock import report
from flax import nnx

keras.utils.set_random_seed(0)
layers = [keras.layers.Dense(16, activation="relu") for _ in range(4)]
model = keras.Sequential([keras.layers.Input((8,)), *layers, keras.layers.Dense(3)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.Adam(1e-2), loss=loss, metrics=["accuracy"])
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
y = (x[:, 0] > 0).astype("int32")
history = model.fit(x, y, batch_size=16, epochs=5, shuffle=False, verbose=0).history
assert history["loss"][-1] < history["loss"][0]


@nnx.jit
def step(model, x):
    return model(x)


report(lambda: step(model, x[:16]), history["loss"], history["accuracy"], model(x[:16]))
