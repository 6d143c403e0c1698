"""Fits a classifier by Keras with its NNX backend."""

import keras
import numpy as np
from clock import report

keras.utils.set_random_seed(0)
layers = [keras.layers.Dense(16, activation="relu") for _ in range(4)]
model = keras.Sequential([keras.layers.Input((8,)), *layers, keras.layers.Dense(3)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.Adam(1e-2), loss=loss)
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
y = (x[:, 0] > 0).astype("int32")
history = model.fit(x, y, batch_size=16, epochs=5, shuffle=False, verbose=0).history
assert history["loss"][-1] < history["loss"][0]


report(lambda: model.train_on_batch(x[:16], y[:16]), history["loss"], model(x[:16]))
