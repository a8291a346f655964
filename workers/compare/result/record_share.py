"""Which share of a step the gate's record takes, in words."""

from __future__ import annotations

from hubring.workers.compare.result.findings import Findings


def record_share(findings: Findings) -> str:
    """Returns a sentence with the smallest and the largest share of any row; empty if it was not measured."""
    shares: dict[str, float] = {}
    for row in findings.rows:
        record, step = row.median("record_ms"), row.median("step_mean_ms")
        if record is not None and step:
            shares[row.row] = max(record / step, shares.get(row.row, 0.0))
    if not shares:
        return ""
    least, most = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    ends = dict.fromkeys((least, most))
    found = " to ".join(f"{shares[name]:.1%} ({name})" for name in ends)
    return f"The gate's own record takes {found} of a step. It is part of all times above."
