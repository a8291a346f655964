"""Which share of a step the gate's record takes, in words."""

from __future__ import annotations

from hubring.workers.compare.result.findings import Findings


def record_share(findings: Findings) -> str:
    """Returns a sentence with the smallest and the largest share of any row; empty if it was not measured."""
    known = ((row.row, row.median("record_ms"), row.median("step_mean_ms")) for row in findings.rows)
    shares = [(record / step, name) for name, record, step in known if record is not None and step]
    if not shares:
        return ""
    ends = dict.fromkeys(f"{share:.1%} ({name})" for share, name in (min(shares), max(shares)))
    found = " to ".join(ends)
    return f"The gate's own record takes {found} of a step. It is part of all times above."
