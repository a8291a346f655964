"""Tests that fail today, and why. An entry that passes is an error: delete it."""

from __future__ import annotations

KNOWN: dict[str, tuple[str, str]] = {
    "test_changes_after_the_first_steps_are_kept": (
        "S1: if the answer to a push comes before step(), the change is taken for one after backward",
        "*-hub",
    ),
    "test_data_that_the_script_replaces_is_kept": (
        "S1: if the answer to a push comes before step(), the change is taken for one after backward",
        "*-hub",
    ),
    "test_averaged_weights_are_swapped_in_for_evaluation_and_out_again": (
        "S1: if the answer to a push comes before step(), the change is taken for one after backward",
        "hub",
    ),
    "test_a_temperature_is_kept_in_its_range": (
        "S1: if the answer to a push comes before step(), the change is taken for one after backward",
        "hub",
    ),
    "test_ranks_that_change_parameters_differently_are_told": (
        "S1: ranks that made different changes are not noticed",
        "aggregate ring",
    ),
    "test_embedding_with_max_norm_shortens_the_same_rows_on_all_ranks": (
        "S1: if the answer to a push comes before step(), the change is taken for one after backward",
        "hub",
    ),
    "test_embedding_with_max_norm_shortens_rows_of_one_rank": (
        "S1: ranks that made different changes are not noticed",
        "aggregate ring",
    ),
    "test_training_goes_on_from_the_best_weights": (
        "S1: if the answer to a push comes before step(), the change is taken for one after backward",
        "*-hub",
    ),
    "test_look_ahead_pulls_weights_back_every_two_steps": (
        "S1: if the answer to a push comes before step(), the change is taken for one after backward",
        "hub",
    ),
    "test_an_adapter_is_merged_into_the_weights_while_training_goes_on": (
        "S1: if the answer to a push comes before step(), the change is taken for one after backward",
        "hub",
    ),
    "test_gradients_are_halved_from_the_third_step": (
        "S8: changes that are not counted race the push",
        "halve_data-hub halve_numpy-hub",
    ),
    "test_the_norm_of_the_mean_gradient_is_clipped": (
        "a hub that steps sees each rank's own gradient, as documented; aggregate=True gives the mean",
        "hub",
    ),
    "test_elements_of_the_mean_gradient_are_clipped_through_data": (
        "a hub that steps sees each rank's own gradient, as documented; aggregate=True gives the mean",
        "hub",
    ),
    "test_a_hook_scales_the_accumulated_gradient": (
        "a hook after accumulation races the exchange",
        "after-aggregate after-ring",
    ),
    "test_a_shorter_window_is_clipped_by_the_norm_of_the_mean": (
        "a hub that steps sees each rank's own gradient, as documented; aggregate=True gives the mean",
        "hub",
    ),
    "test_only_rank_0_has_the_checkpoint": (
        "S9: rank 0's state is not given to other ranks",
        "aggregate ring",
    ),
    "test_the_state_is_cleared_for_a_restart": (
        "S9: optimizer.state is not the hub's state, and reads and writes of it have no effect",
        "hub",
    ),
    "test_moments_are_scaled_in_place": (
        "S9: optimizer.state is not the hub's state, and reads and writes of it have no effect",
        "hub",
    ),
    "test_moments_are_read_after_each_step": (
        "S9: optimizer.state is not the hub's state, and reads and writes of it have no effect",
        "hub",
    ),
    "test_a_saved_part_of_a_model_is_no_larger_than_it": (
        "a part of a model is saved with its whole bucket",
        "hub",
    ),
    "test_a_hook_after_the_step_clips_weights": (
        "S1: if the answer to a push comes before step(), the change is taken for one after backward",
        "*-hub",
    ),
    "test_a_step_that_the_script_replaced_runs": (
        "S1: if the answer to a push comes before step(), the change is taken for one after backward",
        "*-hub",
    ),
    "test_a_running_mean_is_that_of_rank_0_in_every_forward": (
        "buffers are copied from rank 0 once, as documented; DDP does it before each forward",
        "hub aggregate ring",
    ),
    "test_a_sharpness_aware_step_is_written_into_the_loop": (
        "a hub that steps sees each rank's own gradient, as documented; aggregate=True gives the mean",
        "hub",
    ),
    "test_a_weight_is_parametrised_after_the_optimizer_was_made": (
        "S1: if the answer to a push comes before step(), the change is taken for one after backward",
        "hub",
    ),
    "test_weights_are_pruned_and_the_pruning_is_made_permanent": (
        "S1: if the answer to a push comes before step(), the change is taken for one after backward",
        "hub",
    ),
    "test_convolutions_are_in_channels_last": ("a hub's parameters lose channels_last", "*-hub"),
    "test_a_model_is_converted_to_double_after_the_optimizer_was_made": (
        "ends with torch's error about grad_dtype, not by saying when to convert",
        "aggregate ring alone",
    ),
    "test_a_rank_that_runs_out_of_batches_is_named_with_uneven": (
        "the error says that a member is lost, and does not name uneven=True",
        "ring",
    ),
}
"""The reason, and patterns of the parameters, by the name of the test."""

RACES = frozenset(
    {
        "test_a_hook_after_the_step_clips_weights",
        "test_a_hook_scales_the_accumulated_gradient",
        "test_a_step_that_the_script_replaced_runs",
        "test_a_temperature_is_kept_in_its_range",
        "test_a_weight_is_parametrised_after_the_optimizer_was_made",
        "test_an_adapter_is_merged_into_the_weights_while_training_goes_on",
        "test_averaged_weights_are_swapped_in_for_evaluation_and_out_again",
        "test_changes_after_the_first_steps_are_kept",
        "test_convolutions_are_in_channels_last",
        "test_data_that_the_script_replaces_is_kept",
        "test_embedding_with_max_norm_shortens_rows_of_one_rank",
        "test_embedding_with_max_norm_shortens_the_same_rows_on_all_ranks",
        "test_gradients_are_halved_from_the_third_step",
        "test_look_ahead_pulls_weights_back_every_two_steps",
        "test_training_goes_on_from_the_best_weights",
        "test_weights_are_pruned_and_the_pruning_is_made_permanent",
    }
)
"""Tests that pass sometimes."""
