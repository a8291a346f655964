"""A script of Horovod for Keras, on Keras 3: `ps-run -np 2 with_keras.py`."""

import keras
from sklearn.datasets import load_digits

import hubring.horovod.keras as hvd

hvd.init()
keras.utils.set_random_seed(hvd.rank())
digits = load_digits()
own = slice(hvd.rank(), len(digits.data) // hvd.size() * hvd.size(), hvd.size())
images, labels = digits.data[own] / 16, digits.target[own]

model = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # all start with the model of rank 0
    hvd.callbacks.MetricAverageCallback(),
]
history = model.fit(images, labels, batch_size=32, epochs=3, callbacks=callbacks, verbose=0)
if hvd.rank() == 0:
    for epoch, loss in enumerate(history.history["loss"]):
        print(f"epoch {epoch + 1}  loss {loss:.6f}")
