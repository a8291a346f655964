"""Tests that fail today, and why. An entry that passes is an error: delete it."""

from __future__ import annotations

KNOWN: dict[str, tuple[str, str]] = {
    "test_gradients_are_halved_from_the_third_step": (
        "S8: changes that are not counted race the push",
        "halve_data-hub halve_numpy-hub",
    ),
    "test_memory_that_is_swapped_out_during_steps_keeps_its_values": (
        "a hub's answers arrive in the memory of the parameters that it was given first",
        "hub",
    ),
    "test_a_hook_of_all_optimizers_runs_once_per_step": (
        "torch runs a global hook for the DistributedOptimizer and for the optimizer in it",
        "aggregate ring alone",
    ),
    "test_the_norm_of_the_mean_gradient_is_clipped": (
        "a hub that steps sees each rank's own gradient, as documented; aggregate=True gives the mean",
        "hub",
    ),
    "test_elements_of_the_mean_gradient_are_clipped_through_data": (
        "a hub that steps sees each rank's own gradient, as documented; aggregate=True gives the mean",
        "hub",
    ),
    "test_a_shorter_window_is_clipped_by_the_norm_of_the_mean": (
        "a hub that steps sees each rank's own gradient, as documented; aggregate=True gives the mean",
        "hub",
    ),
    "test_a_running_mean_is_that_of_rank_0_in_every_forward": (
        "buffers are copied from rank 0 once, as documented; DDP does it before each forward",
        "hub aggregate ring",
    ),
    "test_a_sharpness_aware_step_is_written_into_the_loop": (
        "a hub that steps sees each rank's own gradient, as documented; aggregate=True gives the mean",
        "hub",
    ),
}
"""The reason, and patterns of the parameters, by the name of the test."""

RACES = frozenset({"test_gradients_are_halved_from_the_third_step"})
"""Tests that pass sometimes."""
