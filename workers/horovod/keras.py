"""Horovod's API for Keras, for Keras 3 on torch: `import hubring.horovod.keras as hvd`.

Gradients are averaged where the optimizer applies them, also if the script's own loop does. `compile` takes
Keras 2's `experimental_run_tf_function`, which scripts for Horovod pass, and ignores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch

from hubring.ps.core.torch_internals import objects_of
from hubring.workers.horovod.alias import KERAS_3
from hubring.workers.horovod.collectives import mpi_ops
from hubring.workers.horovod.collectives.compression import Compression, Compressor
from hubring.workers.horovod.collectives.mpi_ops import *  # noqa: F403
from hubring.workers.horovod.collectives.operation import Average
from hubring.workers.horovod.functions import allgather_object as allgather_object
from hubring.workers.horovod.functions import broadcast_object as broadcast_object
from hubring.workers.horovod.world import ProcessSet, global_process_set
from hubring.workers.runtime import context

try:
    import keras
except ModuleNotFoundError as cause:
    if cause.name != "tensorflow":
        raise
    raise ImportError(f"Keras runs on tensorflow, which is not installed. {KERAS_3}") from cause
if keras.backend.backend() != "torch":
    raise ImportError(f"Keras {keras.__version__} runs on {keras.backend.backend()}. {KERAS_3}")

from hubring.workers.horovod import keras_callbacks

callbacks = keras_callbacks
broadcast_variables = keras_callbacks.broadcast_variables


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes a Keras optimizer reduce the gradients of all ranks before it applies them; returns it.

    Its class and its config stay, so Keras saves and loads the model as before. All ranks must have gradients
    of the same variables.

    Args:
        optimizer: The optimizer.
        name: Matches the exchange across ranks; None: the optimizer's name.
        compression: Compresses the gradients for the exchange.
        gradient_predivide_factor: Divides the gradients before the sum, and multiplies the result.
        op: The reduction.
        process_set: The ranks that take part.
        backward_passes_per_step: Only 1: use Keras's `gradient_accumulation_steps`.
        device_dense: Without effect, as all below: gradients are dense, and exchanged together.
        device_sparse: Without effect.
        sparse_as_dense: Without effect.
        average_aggregated_gradients: Without effect.
        num_groups: Without effect.
        groups: Without effect.
        scale_local_gradients: Without effect.

    Raises:
        ValueError: `optimizer` is none of Keras 3, or already distributed; or `backward_passes_per_step` is
            not 1.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        raise ValueError(
            f"the optimizer is a {kind}, not one of Keras 3; horovod.torch is for torch.optim. {KERAS_3}"
        )
    if "apply" in vars(optimizer):
        raise ValueError(f"the optimizer {optimizer.name} is already distributed: wrap it once")
    if backward_passes_per_step != 1:
        raise ValueError(
            f"backward_passes_per_step={backward_passes_per_step}: pass gradient_accumulation_steps to the"
            " Keras optimizer instead"
        )
    factor = gradient_predivide_factor
    _distribute(
        optimizer,
        partial(
            mpi_ops.grouped_allreduce,
            name=f"DistributedOptimizer.{name or optimizer.name}",
            compression=compression,
            op=op,
            prescale_factor=1 / factor,
            postscale_factor=factor,
            process_set=process_set,
        ),
    )
    return optimizer


def _distribute(optimizer: Any, reduce: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]) -> None:
    step = optimizer.apply

    @wraps(step)
    def apply(grads: Iterable[torch.Tensor | None], trainable_variables: Any = None) -> None:
        own = list(grads)
        reduced = iter(reduce([one for one in own if one is not None]))
        step([None if one is None else next(reduced) for one in own], trainable_variables)
        context.count_step(optimizer)

    apply.reduce = reduce  # type: ignore[attr-defined]
    optimizer.apply = apply


def _accept_keras_2(compile_model: Callable[..., None]) -> Callable[..., None]:
    @wraps(compile_model)
    def compile_any(model: Any, *args: Any, experimental_run_tf_function: Any = None, **named: Any) -> None:
        compile_model(model, *args, **named)
        inner = getattr(model.optimizer, "inner_optimizer", None)
        if inner is not None and "apply" in vars(inner):  # the loss scale then follows all ranks' gradients
            reduce = inner.apply.reduce
            del inner.apply
            _distribute(model.optimizer, reduce)

    return compile_any


keras.Model.compile = _accept_keras_2(keras.Model.compile)


def broadcast_global_variables(root_rank: int) -> None:
    """Overwrites the weights of all models of this process with the root's, and their optimizers' variables.

    Keras 3 has no global variables: these are of the models that exist, sorted by name.
    """
    found = {
        id(variable): variable
        for model in sorted(objects_of(keras.Model), key=lambda one: str(one.name))
        for variable in callbacks.variables_of(model)
    }
    broadcast_variables(found.values(), root_rank)


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Loads a saved model, and makes its optimizer a `DistributedOptimizer`.

    Args:
        filepath: A file that Keras 3 can load.
        custom_optimizers: Classes of optimizers that the file may name.
        custom_objects: Other objects that the file may name.
        compression: Compresses the gradients for the exchange.
        legacy_opts: Without effect.
    """
    named = {one.__name__: one for one in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=named)
    DistributedOptimizer(model.optimizer, compression=compression)
    return model


def allreduce(  # type: ignore[no-redef]
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: type[Compressor] = Compression.none,
) -> torch.Tensor:
    """Reduces a number, an array, a tensor or a variable over the ranks, by default to the mean."""
    return mpi_ops.allreduce(
        _tensor(value), average, name, compression, op, prescale_factor, postscale_factor
    )


def allgather(value: Any, name: str | None = None) -> torch.Tensor:  # type: ignore[no-redef]
    """Concatenates the values of all ranks along the first dimension."""
    return mpi_ops.allgather(_tensor(value), name)


def broadcast(  # type: ignore[no-redef]
    value: Any, root_rank: int, name: str | None = None
) -> torch.Tensor:
    """Returns the root's value."""
    return mpi_ops.broadcast(_tensor(value), root_rank, name)


def _tensor(value: Any) -> torch.Tensor:
    if type(value).__module__.partition(".")[0] == "tensorflow":
        raise ValueError(f"a tensor of TensorFlow cannot be exchanged. {KERAS_3}")
    value = value.value if isinstance(value, keras.Variable) else value
    return value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")
