"""The operations of torch.distributed's groups, for `ProcessGroup` (before torch 2.14) and `Backend`.

Each takes the tensors in the calling thread, and returns a work at once. The exchange runs in the group's
lane. torch calls these methods from C++ too, with the interpreter's lock, from the threads of the backward
pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hubring.workers.communicators.host.reductions import SUM, TorchReduction, reduction
from hubring.workers.torch_backend.member import GroupMember, Tensors
from hubring.workers.torch_backend.staging import Staged, deal, joined, staged
from hubring.workers.torch_backend.works import GroupWork

T = TypeVar("T")

MONITOR_TAG = -1
"""The tag of the messages of `monitored_barrier`; scripts have tags from 0."""


class GroupOperations(GroupMember):
    """One group's operations, as seen by one member."""

    # Reductions.

    def allreduce(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        if any(one.is_sparse for one in tensors):
            return self.allreduce_sparse(tensors, opts)
        op, parts = reduction(_op(opts), tensors), staged(tensors)
        return self._start("all_reduce", lambda: self._reduce(parts, op), parts, tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        op = reduction(_op(opts), tensors)
        parts = staged(tensors if self._own == opts.rootRank else [one.detach().clone() for one in tensors])
        return self._start("reduce", lambda: self._reduce(parts, op), parts, tensors, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> GroupWork:
        (output,), (given,) = outputs, inputs
        return self._scatter_reduced([output], [given], opts)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> GroupWork:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> GroupWork:
        return self._scatter_reduced(outputs, [self._chunks(one) for one in inputs], opts)

    def allreduce_sparse(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        """Sums sparse tensors: every member gets all members' entries."""
        if reduction(_op(opts), tensors) != SUM:
            raise TypeError("sparse tensors support only ReduceOp.SUM: use to_dense() for others")
        given = [one.detach().coalesce() for one in tensors]

        def run() -> None:
            for tensor, one in zip(tensors, given, strict=True):
                tensor.copy_(self._sum_of_sparse(one))

        return self._start("all_reduce of sparse tensors", run, [], tensors, opts)

    # Moves.

    def broadcast(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        root = self._own == opts.rootRank
        parts = staged(tensors, read=root, write=not root)

        def run() -> None:
            for part in parts:
                self._connected().broadcast(part.data, opts.rootRank)

        return self._start("broadcast", run, parts, tensors, opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        given, into = staged(inputs, write=False), [staged(each, read=False) for each in outputs]

        def run() -> None:
            for one, parts in zip(given, into, strict=True):
                self._connected().allgather(one.data, [part.data for part in parts])

        return self._start("all_gather", run, [*given, *_flat(into)], _flat(outputs), opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        by_input = list(zip(*outputs, strict=True))
        return self.allgather(by_input, inputs, opts)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> GroupWork:
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        given, into = staged(inputs, write=False), staged(outputs, read=False)

        def run() -> None:
            for one, whole in zip(given, into, strict=True):
                self._connected().allgather(one.data, self._chunks(whole.data))

        return self._start("all_gather", run, [*given, *into], outputs, opts)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        root, given = opts.rootRank, staged(inputs, write=False)
        into = staged(outputs[0], read=False) if self._own == root else []
        what = f"gather to rank {root}"
        return self._exchange_parts(
            what, {root: given}, dict(enumerate([part] for part in into)), _flat(outputs), opts
        )

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> GroupWork:
        root, into = opts.rootRank, staged(outputs, read=False)
        given = staged(inputs[0], write=False) if self._own == root else []
        what = f"scatter from rank {root}"
        return self._exchange_parts(
            what, dict(enumerate([part] for part in given)), {root: into}, outputs, opts
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        given, into = staged(inputs, write=False), staged(outputs, read=False)
        return self._exchange_parts(
            "all_to_all",
            dict(enumerate([part] for part in given)),
            dict(enumerate([part] for part in into)),
            outputs,
            opts,
        )

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> GroupWork:
        (given,), (into,) = staged([source], write=False), staged([output], read=False)
        sent = self._rows(given, source, input_splits)
        received = self._rows(into, output, output_splits)
        return self._start(
            "all_to_all_single",
            lambda: self._connected().alltoall(sent, received),
            [given, into],
            [output],
            opts,
        )

    def barrier(self, opts: Any = None) -> GroupWork:
        mark = torch.zeros(1, dtype=torch.uint8, device="cpu")
        return self._start("barrier", lambda: self._connected().reduce(mark, SUM), [], [], opts)

    # Messages.

    def send(self, tensors: Tensors, receiver: int, tag: int = 0) -> GroupWork:
        what = f"send to rank {receiver}"
        return self._message(
            what, tensors, lambda box, data, end: box.send(data, receiver, tag, end), sends=True
        )

    def recv(self, tensors: Tensors, sender: int, tag: int = 0) -> GroupWork:
        what = f"receive from rank {sender}"
        return self._message(what, tensors, lambda box, data, end: box.receive(data, sender, tag, end))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> GroupWork:
        limit = self._timeout
        return self._message(
            "receive from any rank", tensors, lambda box, data, end: box.receive_any(data, tag, limit, end)
        )

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error on rank 0 names the members that did not call it, as Gloo's does."""
        limit = timedelta(seconds=self._seconds(opts))
        if getattr(opts, "timeout", limit) == timedelta(0):
            raise RuntimeError(f"Rank {self._own} timed out in monitoredBarrier after 0 ms")
        mark = torch.zeros(1, dtype=torch.uint8, device="cpu")
        if self._own:
            try:
                self.send([mark], 0, MONITOR_TAG).wait(limit)
                self.recv([mark], 0, MONITOR_TAG).wait(limit)
            except RuntimeError as error:
                raise RuntimeError(
                    f"Rank {self._own} successfully reached monitoredBarrier, but received errors while"
                    f" waiting for send/recv from rank 0: {error}"
                ) from error
            return
        works = {rank: self.recv([mark], rank, MONITOR_TAG) for rank in range(1, len(self._world_ranks))}
        if absent := self._absent(works, limit, wait_all_ranks):
            ranks = f"Rank {absent[0]}" if len(absent) == 1 else f"Ranks {', '.join(map(str, absent))}"
            milliseconds = limit.total_seconds() * 1e3
            raise RuntimeError(f"{ranks} failed to pass monitoredBarrier in {milliseconds:.0f} ms")
        for rank in works:
            self.send([mark], rank, MONITOR_TAG).wait(limit)

    def _absent(self, works: dict[int, GroupWork], limit: timedelta, all_ranks: bool) -> list[int]:
        """Returns the members, or the first one, whose message did not come in time."""
        absent: list[int] = []
        deadline = time.monotonic() + limit.total_seconds()
        for rank, work in works.items():
            if absent and not all_ranks:
                break
            try:
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except RuntimeError:
                absent.append(rank)
        return absent

    # How they are made.

    def _exchange_parts(
        self,
        what: str,
        sent: dict[int, Sequence[Staged]],
        received: dict[int, Sequence[Staged]],
        tensors: Tensors,
        opts: Any,
    ) -> GroupWork:
        """Starts to send and receive parts, by member."""
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")

        def run() -> None:
            outgoing, incoming = [empty] * len(self._world_ranks), [empty] * len(self._world_ranks)
            for member, parts in sent.items():
                outgoing[member] = joined(parts)
            for member, parts in received.items():
                incoming[member] = joined(parts)
            self._connected().alltoall(outgoing, incoming)
            for member, parts in received.items():
                deal(incoming[member], parts)

        parts = [part for some in (*sent.values(), *received.values()) for part in some]
        return self._start(what, run, parts, tensors, opts)

    def _reduce(self, parts: Sequence[Staged], op: TorchReduction) -> None:
        for part in parts:
            if op.factor is not None:
                part.flat.mul_(op.factor)
            if part.flat.numel():
                self._connected().reduce(part.flat, op)

    def _scatter_reduced(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> GroupWork:
        op, into = reduction(_op(opts), outputs), staged(outputs, read=False)
        given = [staged(each, write=False) for each in inputs]

        def run() -> None:
            for one, parts in zip(into, given, strict=True):
                came = [torch.empty_like(one.flat) for _ in parts]
                self._connected().alltoall(
                    [part.data for part in parts], [each.view(torch.uint8) for each in came]
                )
                if op.factor is not None:
                    for each in came:
                        each.mul_(op.factor)
                op.reduce_all(came, one.flat)

        return self._start("reduce_scatter", run, [*into, *_flat(given)], outputs, opts)

    def _sum_of_sparse(self, tensor: Tensor) -> Tensor:
        values, indices = tensor.values().cpu().contiguous(), tensor.indices().cpu().contiguous()
        size, exchange = len(self._world_ranks), self._connected()
        counts = [torch.empty(1, dtype=torch.int64, device="cpu") for _ in range(size)]
        exchange.allgather(
            torch.tensor([values.shape[0]], device="cpu").view(torch.uint8),
            [one.view(torch.uint8) for one in counts],
        )
        every_value = [values.new_empty((int(one), *values.shape[1:])) for one in counts]
        every_index = [indices.new_empty((indices.shape[0], int(one))) for one in counts]
        for own, into in ((values, every_value), (indices, every_index)):
            exchange.allgather(
                own.view(-1).view(torch.uint8), [one.view(-1).view(torch.uint8) for one in into]
            )
        whole = torch.sparse_coo_tensor(
            torch.cat(every_index, 1), torch.cat(every_value), tensor.shape, device="cpu"
        )
        return whole.coalesce().to(tensor.device)

    def _chunks(self, whole: Tensor) -> list[Tensor]:
        size = len(self._world_ranks)
        flat = whole.reshape(-1)
        if flat.numel() % size:
            raise ValueError(f"a tensor of {flat.numel()} elements cannot be divided among {size} ranks")
        return list(flat.split(max(1, flat.numel() // size))) if flat.numel() else [flat] * size

    def _rows(self, part: Staged, tensor: Tensor, splits: Sequence[int]) -> list[Tensor]:
        """Cuts the bytes of a tensor's rows."""
        size, rows = len(self._world_ranks), tensor.shape[0] if tensor.dim() else 1
        if not splits and rows % size:
            raise ValueError(f"{rows} rows cannot be divided among {size} ranks: pass split sizes")
        counts = list(splits) or [rows // size] * size
        if len(counts) != size or sum(counts) != rows:
            raise ValueError(f"split sizes {counts}: expected {size} numbers with the sum {rows}")
        each = part.data.numel() // max(1, rows)
        return list(part.data.split([count * each for count in counts]))


def _op(opts: Any) -> ReduceOp:
    return ReduceOp.SUM if opts is None else opts.reduceOp  # type: ignore[return-value]


def _flat(lists: Sequence[Sequence[T]]) -> list[T]:
    return [one for each in lists for one in each]
