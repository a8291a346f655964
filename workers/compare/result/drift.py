"""How far rows that agreed in their first steps are apart at the end, in words."""

from __future__ import annotations

from hubring.workers.compare.result.findings import Gate, Pair


def drift(gate: Gate) -> str:
    """Returns a sentence with every row's largest difference; empty if nothing was compared at the end."""
    worst: dict[str, Pair] = {}
    for pair in gate.pairs:
        if pair.limit and pair.steps is not None:
            other = worst.get(pair.second)
            if other is None or float(pair.final) > float(other.final):
                worst[pair.second] = pair
    if not worst:
        return ""
    one = next(iter(worst.values()))
    parts = [f"{name} {float(pair.final):.2g}" for name, pair in worst.items()]
    return (
        f"End drift, the largest difference from {one.first} after the last step: {', '.join(parts)}. After"
        f" {one.steps} steps rows must agree; later, training amplifies rounding."
    )
