"""Peer `fsdp2`: torch's `fully_shard` on the script's model, and torch's optimizer.

Every worker keeps a part of each parameter, of its gradient and of the optimizer's state. Each child of the
model is a block. Its parameters are gathered for its forward pass, freed, and gathered again for its backward
pass, which reduce-scatters their gradients.

Scripts evaluate and save on rank 0 alone. A rank cannot gather alone, so all follow one rule: after a step, a
rank's first exchange is to gather all blocks in the order of the forward pass. A rank that trains does so in
its next forward pass. A rank that evaluates, saves or calls a collective first does so at once, and its next
forward pass finds the blocks gathered.

Backward frees the blocks too, and a script can leave out the step after it, as a GradScaler does. So the same
rule holds from backward on. What every rank does for itself between the two, as the check of a loss that is
not finite, uses only its own parts.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import Module, ModuleDict, ModuleList

from hubring.ps.core.errors import ConfigError
from hubring.workers.compare.run.peers.grouped import Grouped, GroupedOptimizer
from hubring.workers.runtime import context

REDUCE_SCATTER_PASSES = {"gloo": 2, "nccl": 1}
"""Gloo's reduce-scatter is an allreduce, of which each rank keeps its part."""


class Fsdp2Optimizer(GroupedOptimizer):
    """The script's optimizer, which steps this rank's part of each parameter.

    Attributes:
        shards: This rank's part of each trained parameter, by name.
        wholes: The gathered parameters, by name. Their memory is only valid while they are gathered.

    Raises:
        ConfigError: The optimizer already has a state, or trains parameters that the model does not have, or
            the forward pass does not use a block.
    """

    shards: dict[str, Tensor]
    wholes: dict[str, Tensor]
    _gathered = _training = False
    """Whether this rank has begun to gather since the last backward or step; whether it trains."""

    @property
    def named_parameters(self) -> dict[str, Tensor]:
        """The gathered trained parameters by name."""
        self.gather()
        return self.wholes

    def gather(self) -> None:
        """Gathers the blocks that are not gathered."""
        self._gathered = True
        for block in self._order:
            block.unshard()  # does nothing if it is gathered

    settle = refresh = gather

    def _gather_first(self) -> None:
        """Gathers all blocks, unless this was begun since the last backward or step."""
        if not self._gathered:
            self.gather()

    def _watch_backward(self) -> None:
        """Makes backward, which frees the blocks, end what was begun before it."""
        alive = weakref.ref(self)  # the garbage collector cannot see torch's hooks

        def runs(_: Tensor) -> None:
            if (optimizer := alive()) is not None:
                optimizer._gathered = False

        for one in self.wholes.values():
            one.register_post_accumulate_grad_hook(runs)  # type: ignore[no-untyped-call]

    def _distribute(self, model: Module, device: torch.device) -> Callable[[int], None]:
        if self.wrapped.state:
            raise ConfigError(
                "row fsdp2 divides the parameters before the first step, and this optimizer already has a"
                " state; wrap it before it takes a step or loads a state, and do not use Adagrad"
            )
        trained = self._trained(model)
        name_of = {parameter: name for name, parameter in trained.items()}
        strange = [one for group in self.param_groups for one in group["params"] if one not in name_of]
        if any(one.requires_grad for one in strange):
            raise ConfigError("row fsdp2: the optimizer trains parameters that the model does not have")
        self._share([one.data for one in (*model.parameters(), *model.buffers())])
        blocks = blocks_of(model)
        sizes = [sum(one.nbytes for one in block.parameters()) for block in blocks]
        whole = sum(one.nbytes for one in model.parameters())
        mesh = init_device_mesh(device.type, (self._peer.size,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        self._root: Any = model
        self._blocks: list[Any] = list(blocks)
        parts = dict(model.named_parameters())
        for group in self.param_groups:
            group["params"] = [parts[name_of[one]] for one in group["params"] if one in name_of]
        self.shards = {name: parts[name] for name in trained}
        self._fix_prefetch()
        self._order: list[Any] = [model, *blocks]
        self._kept = set[Module]()
        self.gather()  # no forward pass has shown the order yet
        wholes = dict(model.named_parameters())
        self.wholes = {name: wholes[name] for name in trained}
        model.register_forward_pre_hook(self._forward_begins, prepend=True)
        for block in blocks:
            block.register_forward_pre_hook(self._block_begins, prepend=True)
        nbytes = sum(one.nbytes for one in trained.values())
        # The root's own parameters stay gathered between forward and backward.
        self._travels = whole + sum(sizes) + REDUCE_SCATTER_PASSES[self._peer.backend] * nbytes
        self._watch_backward()
        self._peer.prepares.append(self._gather_first)
        self._peer.releases.append(partial(release, model, mesh))
        return context.current().watch(self.wholes.values())

    def _fix_prefetch(self) -> None:
        """Sets what backward gathers ahead of time.

        torch would follow the forward passes since the last step, and rank 0 has one more if it evaluated.
        """
        backward = [self._root, *reversed(self._blocks)]
        for block, following in pairwise(backward):
            block.set_modules_to_backward_prefetch([following])
        backward[-1].set_modules_to_backward_prefetch([backward[-1]])  # gathered: an empty list means torch's

    def _forward_begins(self, model: Module, _: Any) -> None:
        self._training = model.training and torch.is_grad_enabled()
        if self._training:
            self._gathered, self._order = True, [self._root]
        else:
            self._gather_first()

    def _block_begins(self, block: Any, _: Any) -> None:
        if not self._training:
            self._gather_first()
        elif block in self._order:
            self._kept.add(block)  # or each use in a pass would gather it
        else:
            self._order.append(block)
        block.set_reshard_after_forward(self._training and block not in self._kept, recurse=False)

    def _take(self, closure: Callable[[], Any] | None) -> Any:
        for block in self._order:
            block.reshard()  # if the script used the model since backward
        loss = self.wrapped.step(closure)
        self._check_order()
        self._gathered = self._training = False
        self._peer.count_passes(1, self._travels)
        return loss

    def _check_order(self) -> None:
        for name, block in self._root.named_modules():
            if block in self._blocks and block not in self._order:
                raise ConfigError(
                    f"row fsdp2: the model's forward pass does not call {name}; each child of the model with"
                    " parameters must be called in every step"
                )


class Fsdp2(Grouped):
    """The process group of FSDP."""

    topology = "fsdp2"
    optimizer = Fsdp2Optimizer


def release(model: Module, mesh: DeviceMesh) -> None:
    """Removes a sharded model's references to the process group. The model can still evaluate."""
    for block in model.modules():
        if isinstance(block, FSDPModule):
            for group in block._get_fsdp_state()._fsdp_param_groups:
                vars(group.mesh_info).clear()
    mesh._pg_registry.clear()


def blocks_of(model: Module) -> list[Module]:
    """Returns the modules that are gathered one at a time: the model's children, and those of its lists.

    A child without parameters, or with parameters that others use too, is no block.
    """
    children = [
        part
        for child in model.children()
        for part in (child.children() if isinstance(child, ModuleList | ModuleDict) else [child])
    ]
    users = Counter(one for child in children for one in child.parameters())
    users.update(model.parameters(recurse=False))
    return [
        child
        for child in children
        if any(True for _ in child.parameters()) and all(users[one] == 1 for one in child.parameters())
    ]
