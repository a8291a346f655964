"""The ring: every worker sums gradients with its neighbors, and steps itself."""
