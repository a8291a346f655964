"""The output of nccl-tests' all_reduce_perf, as it would be with a given bus bandwidth."""

from __future__ import annotations

from collections.abc import Sequence

HEAD = """\
# nThread 1 nGpus 1 minBytes {least} maxBytes {most} step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
{devices}
#
#                                                     out-of-place                   in-place
#       size         count   type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong
#        (B)    (elements)                      (us)  (GB/s) (GB/s)         (us)  (GB/s) (GB/s)
"""
SIZES = tuple(1 << power for power in range(20, 31))


def output(
    nodes: int,
    gpus: int,
    busbw: float,
    *,
    alpha: float = 0.0,
    sizes: Sequence[int] = SIZES,
    listed: bool = True,
) -> str:
    """Returns the output of `nodes` hosts.

    Args:
        nodes: Number of hosts.
        gpus: GPUs of each.
        busbw: Bytes per second.
        alpha: Seconds of an empty message.
        sizes: Bytes.
        listed: Whether the output lists its devices.
    """
    ranks = nodes * gpus
    devices = [
        f"#  Rank {rank:2} Group  0 Pid {4000 + rank} on n{rank // gpus} device {rank % gpus:2} [0x19] H100"
        for rank in range(ranks)
    ]
    share = 2 * (ranks - 1) / ranks
    rows = []
    for size in sizes:
        seconds = alpha + share * size / busbw
        cells = f"{1e6 * seconds:8.2f} {size / seconds / 1e9:6.2f} {share * size / seconds / 1e9:6.2f}      0"
        rows.append(f"{size:12} {size // 4:13}     float     sum      -1 {cells} {cells}")
    head = HEAD.format(least=sizes[0], most=sizes[-1], devices="\n".join(devices if listed else ["#"]))
    return head + "\n".join(rows) + "\n# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 91.2\n#\n"
