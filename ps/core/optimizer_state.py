"""An optimizer's state for one slice, in torch's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STEP = "step"
"""The one tensor of torch's optimizers that counts a parameter's steps; the others have its shape."""

MASTER = "master"
"""float32 parameters, where those of the model have half precision: what the hub steps. Where there
is none, or a zero for a parameter that is not zero, the parameter is its master."""

RESIDUAL = "residual"
"""The one tensor of a mean's state: what its compression has left out so far."""

_FRESH, _CUTS = "fresh", "cuts"


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns in which dtype the hub steps parameters of this one, and keeps their state."""
    import torch

    return torch.float32 if dtype.itemsize < 4 else dtype


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """An optimizer's tensors for the parameters of one slice.

    Attributes:
        tensors: By torch's name. "step" has one float32 for each parameter with elements in the slice, in
            order. Every other tensor is flat, with the slice's length and `state_dtype`. Empty: all are
            fresh.
        fresh: The parameters without state, by their index in "step"; the tensors, but for the master,
            hold zeros for them.
        cuts: The parameters before which a shard steps apart from the one before, which can round
            differently. A checkpoint keeps it, a message does not.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    fresh: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()

    def on_host(self) -> OptimizerState:
        """Returns the state in host memory; its tensors are copies only if they were on another device."""
        tensors = {name: tensor.cpu() for name, tensor in self.tensors.items()}
        return OptimizerState(tensors, self.fresh, self.cuts)

    def saved(self) -> dict[str, Tensor]:
        """Returns the state as tensors for a checkpoint: one "step" for all parameters if they agree."""
        import torch

        saved = dict(self.tensors)
        if STEP in saved and not self.fresh and bool((saved[STEP] == saved[STEP][0]).all()):
            saved[STEP] = saved[STEP][0].clone()
        if self.cuts:
            saved[_FRESH] = torch.tensor(self.fresh, dtype=torch.int64, device="cpu")
            saved[_CUTS] = torch.tensor(self.cuts, dtype=torch.int64, device="cpu")
        return saved

    @classmethod
    def from_saved(cls, saved: Mapping[str, Tensor], parameters: int) -> OptimizerState:
        """Returns the state from `saved()` of a slice with elements of this many parameters."""
        tensors = dict(saved)
        fresh, cuts = (tensors.pop(name).tolist() if name in tensors else () for name in (_FRESH, _CUTS))
        if STEP in tensors and not tensors[STEP].dim():
            tensors[STEP] = tensors[STEP].repeat(parameters)
        return cls(tensors, tuple(fresh), tuple(cuts))
