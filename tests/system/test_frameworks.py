"""Scripts of other frameworks train on the hub as they train on Gloo."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.needs import needs
from tests.support.processes.cluster import Cluster

PS_RUN = "hubring.workers.programs.ps_run"
EXAMPLES = Path(__file__).parents[2] / "workers" / "examples"

pytestmark = [
    pytest.mark.slow,
    *needs(
        all(map(find_spec, ("accelerate", "transformers", "lightning", "keras"))),
        "accelerate, transformers, lightning or keras",
        "pip install '.[frameworks]'",
    ),
]


def losses(cluster: Cluster, script: Path, *flags: str) -> tuple[list[float], str]:
    """The losses that two workers print, and all output."""
    variables = {"KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    name = f"run{len(cluster.programs)}"
    program = cluster.run(name, PS_RUN, "-np", "2", *flags, str(script), variables=variables)
    assert program.wait() == 0, program.said()
    text = program.out.read_text() + program.said()
    return [float(one) for one in re.findall(r"\bloss (\d+\.\d+)", text)], text


@pytest.mark.parametrize("name", ["accelerate", "trainer", "lightning", "keras"])
def test_a_script_of_a_framework_has_the_same_loss_on_hub_and_ring(cluster: Cluster, name: str) -> None:
    script = EXAMPLES / f"with_{name}.py"
    ring, _ = losses(cluster, script, "--as-gloo", "--topology", "ring")
    hub, said = losses(cluster, script, "--as-gloo")
    assert re.search(r"2 workers finished [1-9]\d* steps", said)
    assert hub == pytest.approx(ring, rel=1e-4)
    assert ring


JEAN_ZAY = """
import keras
import numpy as np
import horovod.tensorflow.keras as hvd

# Initialize Horovod
hvd.init()

# Build model and dataset
random = np.random.default_rng(0)
images, labels = random.random((1200, 8, 8)), random.integers(0, 10, 1200)
own = slice(hvd.rank(), None, hvd.size())
layers = keras.layers
model = keras.Sequential([keras.Input((8, 8)), layers.Flatten(), layers.Dense(10, activation="softmax")])
opt = keras.optimizers.Adam(0.001 * hvd.size())

# Horovod: add Horovod DistributedOptimizer.
opt = hvd.DistributedOptimizer(opt)

# Horovod: Specify `experimental_run_tf_function=False` to ensure TensorFlow
# uses hvd.DistributedOptimizer() to compute gradients.
model.compile(
    loss=keras.losses.SparseCategoricalCrossentropy(),
    optimizer=opt,
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(0.002, warmup_epochs=2, verbose=hvd.rank() == 0),
]

# Horovod: save checkpoints only on worker 0
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))

history = model.fit(
    images[own],
    labels[own],
    batch_size=32,
    steps_per_epoch=38 // hvd.size(),
    callbacks=callbacks,
    epochs=2,
    verbose=1 if hvd.rank() == 0 else 0,
)

# Distributed validation: a mean that is weighted by the batch size
loss = keras.losses.SparseCategoricalCrossentropy(reduction="sum")
total = count = 0.0
for start in range(0, len(labels[own]), 100):
    batch, wanted = images[own][start : start + 100], labels[own][start : start + 100]
    total += float(loss(wanted, model(batch)))
    count += len(wanted)
mean = hvd.allreduce(total, name="loss") / hvd.allreduce(count, name="count")
whole = model.evaluate(images, labels, verbose=0)[0]
print("rates", [round(rate, 6) for rate in history.history["lr"]], "loss", f"{mean.numpy():.5f} {whole:.5f}")

# What was saved goes on.
hvd.broadcast_global_variables(0)
if hvd.rank() == 0:
    again = hvd.load_model("./checkpoint-2.h5")
    print("loaded", type(again.optimizer).__name__, int(again.optimizer.iterations))
"""


@pytest.mark.parametrize("topology", ["hub", "ring"])
def test_jean_zays_script_for_keras_runs_without_its_tensorflow_lines(
    cluster: Cluster, tmp_path: Path, topology: str
) -> None:
    (script := tmp_path / "script.py").write_text(JEAN_ZAY.replace("./", f"{tmp_path}/"))
    _, text = losses(cluster, script, "--topology", topology)
    found = re.findall(r"rates (.*) loss (.*)", text)
    assert len(found) == 2
    assert found[0] == found[1], "the ranks have one model"
    rates, values = found[0]
    assert rates == "[0.0015, 0.002]"
    mean, whole = map(float, values.split())
    assert mean == pytest.approx(whole, abs=2e-5)
    assert "finished gradual learning rate warmup to 0.002" in text
    assert "loaded Adam 38" in text
    assert "2 workers finished 38 steps" in text


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("import tensorflow as tf", "Hubring trains Keras 3 on torch: set KERAS_BACKEND=torch"),
        ("import horovod.tensorflow as hvd; hvd.init()", "Hubring has no horovod.tensorflow.init, only"),
        (
            "import hubring, keras; hubring.init();"
            " hubring.DistributedOptimizer(keras.optimizers.Adam(), keras.Sequential())",
            "use hubring.horovod.keras.DistributedOptimizer (workers/examples/FRAMEWORKS.md)",
        ),
        (
            "import torch, horovod.keras as hvd; hvd.init();"
            " hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))",
            "torch.optim.sgd.SGD, not one of Keras 3",
        ),
        (
            "import accelerate, hubring, torch; hubring.init(); layer = torch.nn.Linear(1, 1);"
            " ours = accelerate.Accelerator(cpu=True).prepare(torch.optim.SGD(layer.parameters()));"
            " hubring.DistributedOptimizer(ours, layer)",
            "leave DistributedOptimizer out, and run the script with --as-gloo",
        ),
    ],
)
def test_what_belongs_to_another_framework_is_refused_with_what_to_use(
    cluster: Cluster, tmp_path: Path, line: str, told: str
) -> None:
    (script := tmp_path / "script.py").write_text(line + "\n")
    program = cluster.run("run", PS_RUN, str(script), variables={"KERAS_BACKEND": "torch"})
    assert program.wait() != 0
    assert told in program.said()
