"""What code around a loader relies on, and the tests that show that it holds here: none of them is lost unnoticed.

The numbers are those of the project's list of compatibility checks, of which 47 to 49, whole frameworks, have a place
of their own.
"""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.programs import ROOT

LOADER = "tests/test_loader.py::test_"
FAULTS = "tests/test_faults.py::test_"
LEASE = "tests/memory/test_lease.py::test_"
COLLATING, DRAWS, ERRORS, OBSERVED, ORDER, PROCESSES, STREAMS, TRAVEL = (
    f"tests/differential/test_{name}.py::test_"
    for name in ("collating", "draws", "errors", "observed", "order", "processes", "streams", "travel")
)
CORRUPTION, ENDS, EXITS, ORPHANS = (
    f"tests/hazards/test_{name}.py::test_" for name in ("corruption", "ends", "exits", "orphans")
)
ATTRIBUTES, CONSTRUCTOR, KINDS, OBSERVABLES, ODD, RANDOM, SAMPLERS, SHAPES, WORKER_INFO = (
    f"tests/contracts/test_{name}.py::test_"
    for name in (
        *("attributes", "constructor", "kinds", "observables", "odd_programs"),
        *("random_state", "samplers", "shapes", "worker_info"),
    )
)

CHECKS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: (
        "errors of the constructor",
        (
            LOADER + "wrong_arguments_are_torchs_own_errors",
            LOADER + "what_torch_notices_only_when_it_iterates_is_the_same_error",
            CONSTRUCTOR + "any_arguments_come_to_the_same_loader_or_to_the_same_error",
            CONSTRUCTOR + "every_value_of_every_argument_by_itself_comes_to_the_same",
        ),
    ),
    2: (
        "positional arguments",
        (
            LOADER + "the_first_thirteen_arguments_are_positional_as_torchs",
            CONSTRUCTOR + "arguments_may_be_positional_as_far_as_torchs_may",
        ),
    ),
    3: (
        "public attributes",
        (
            LOADER + "what_is_stored_in_public_is_torchs_and_the_extra_keywords_raw",
            LOADER + "a_new_loader_can_be_made_from_the_public_attributes",
            ATTRIBUTES + "whatever_torchs_loader_has_ours_has",
        ),
    ),
    4: (
        "attributes that cannot be set, and the ways around that",
        (
            LOADER + "what_torch_does_not_let_be_set_is_refused_in_its_words_with_our_name",
            LOADER + "the_ways_around_that_frameworks_use_work_and_take_effect",
            ATTRIBUTES + "what_may_not_be_set_fails_when_and_as_it_does_in_torchs_loader",
            ODD + "a_program_comes_to_the_same",
        ),
    ),
    5: (
        "attributes that can be set",
        (
            LOADER + "what_may_be_set_takes_effect_at_the_next_iteration",
            LOADER + "a_worker_init_fn_set_later_runs",
            ATTRIBUTES + "a_change_between_two_epochs_takes_effect_as_in_torchs_loader",
            ATTRIBUTES + "a_change_is_seen_by_persistent_workers_as_in_torchs_loader",
        ),
    ),
    6: ("generic subscripts", (LOADER + "the_class_can_be_subscripted_and_subclassed_generically",)),
    7: (
        "constructors that are bypassed",
        (
            LOADER + "a_subclass_may_bypass_the_constructor",
            SHAPES + "a_loader_with_the_attributes_of_another",
            SHAPES + "a_loader_whose_attributes_were_set_one_by_one",
        ),
    ),
    8: (
        "pickles and copies",
        (
            LOADER + "copies_work_and_their_end_harms_nobody",
            LOADER + "a_copy_in_the_middle_of_an_epoch_leaves_the_epoch_alone",
            ATTRIBUTES + "an_iterator_refuses_to_be_pickled_in_torchs_words",
        ),
    ),
    9: ("lengths", (LOADER + "lengths_are_torchs", LOADER + "an_iterator_has_the_length_of_its_sampler")),
    10: (
        "warnings of streams that are too long",
        (
            STREAMS + "a_stream_longer_than_it_said_is_warned_of_as_often_as_torch_does_and_in_its_words",
            OBSERVABLES + "a_length_that_was_asked_for_between_epochs_counts_from_the_next_on",
        ),
    ),
    11: (
        "global random states",
        (
            DRAWS + "the_global_generators_are_moved_exactly_as_torch_moves_them",
            RANDOM + "every_state_after_every_step_is_what_it_is_with_torch",
            RANDOM + "under_every_start_method_the_generators_are_moved_alike",
        ),
    ),
    12: (
        "a generator of the loader's own",
        (
            DRAWS + "a_generator_of_the_loaders_own_is_moved_as_torchs_and_the_global_ones_not_at_all",
            RANDOM + "every_state_after_every_step_is_what_it_is_with_torch",
            RANDOM + "a_generator_of_the_loaders_own_seeds_the_workers_as_with_torch",
        ),
    ),
    13: ("how often a sampler is begun", (ORDER + "a_samplers_iter_is_called_as_often_as_torch_calls_it",)),
    14: (
        "how far a sampler is pulled",
        (
            ORDER + "the_sampler_is_asked_for_exactly_as_much_as_torch_asks_at_every_step",
            SAMPLERS + "how_far_ahead_the_sampler_is_pulled_at_every_step_of_whole_and_of_broken_epochs",
        ),
    ),
    15: (
        "samplers without end",
        (
            ORDER + "a_sampler_without_end_serves_several_epochs_from_one_iterator",
            SAMPLERS + "a_sampler_without_end_is_pulled_no_further_than_torch_pulls_it",
            SHAPES + "one_iterator_for_all_epochs",
        ),
    ),
    16: (
        "seeds of workers",
        (
            DRAWS + "workers_are_seeded_and_draw_as_torchs",
            DRAWS + "an_early_break_moves_the_random_streams_of_persistent_workers_as_torchs",
            PROCESSES + "a_data_set_finds_the_same_environment_and_draws_the_same",
        ),
    ),
    17: (
        "what workers know of themselves",
        (
            PROCESSES + "workers_are_informed_as_torchs_and_may_change_their_data_set",
            WORKER_INFO + "every_field_says_what_it_says_in_torchs_workers",
            WORKER_INFO + "it_is_known_wherever_the_worker_runs_the_users_code_and_nowhere_else",
        ),
    ),
    18: (
        "the surroundings of workers",
        (
            PROCESSES + "a_data_set_finds_the_same_environment_and_draws_the_same",
            PROCESSES + "workers_are_children_of_the_loaders_process",
            PROCESSES + "seeding_init_function_and_iter_come_in_torchs_order",
        ),
    ),
    19: (
        "which worker makes which batch",
        (ORDER + "batches_come_from_the_workers_in_turn_and_each_epoch_begins_with_the_first",),
    ),
    20: (
        "batches out of order",
        (
            ORDER + "out_of_order_the_fast_come_first_and_none_is_lost",
            ORDER + "out_of_order_without_a_second_worker_is_in_order",
            ORDER + "out_of_order_a_worker_is_given_no_more_than_its_share",
            OBSERVABLES + "out_of_order_persistent_epochs_lose_and_repeat_nothing_and_neither_do_torchs",
        ),
    ),
    21: (
        "streams in shards",
        (
            STREAMS + "streams_come_as_from_torchs_loader",
            STREAMS + "three_uneven_shards_in_the_order_that_torch_documents",
            STREAMS + "persistent_workers_begin_their_streams_again",
        ),
    ),
    22: (
        "data sets that fetch batches",
        (
            COLLATING + "a_data_set_that_fetches_batches_is_asked_for_them_and_answered_for_unchanged",
            SAMPLERS + "a_data_set_that_fetches_batches_gets_a_list_of_what_the_sampler_yields",
        ),
    ),
    23: (
        "types registered with torch's collate",
        (
            COLLATING + "types_registered_with_torchs_collate_are_honoured_also_when_the_loader_was_there_first",
            COLLATING + "an_entry_of_torchs_collate_may_be_replaced",
        ),
    ),
    24: (
        "samples without batches",
        (
            COLLATING + "samples_are_collated_as_torch_collates_them",
            KINDS + "without_batches_samples_are_converted_as_by_torch",
            SAMPLERS + "a_batch_sampler_without_batching_hands_lists_to_the_data_set",
        ),
    ),
    25: (
        "containers",
        (
            TRAVEL + "a_batch_of_any_class_travels_in_order_with_identity_and_aliasing",
            KINDS + "a_container_arrives_with_its_class_its_attributes_and_its_identities",
            KINDS + "what_is_hard_to_compare_arrives_too",
        ),
    ),
    26: (
        "sorts of tensors",
        (
            TRAVEL + "what_a_collate_function_returns_arrives_as_from_torchs_loader",
            KINDS + "every_sort_of_tensor_arrives_as_from_torchs_workers",
            KINDS + "what_torchs_workers_do_not_send_rightly_arrives_as_it_was_made",
        ),
    ),
    27: (
        "tensors of subclasses",
        (
            TRAVEL + "what_a_collate_function_returns_arrives_as_from_torchs_loader",
            KINDS + "every_sort_of_tensor_arrives_as_from_torchs_workers",
        ),
    ),
    28: ("aliases", (TRAVEL + "a_batch_of_any_class_travels_in_order_with_identity_and_aliasing",)),
    29: ("conjugate and negative views", (TRAVEL + "what_torchs_loader_gets_wrong_arrives_right",)),
    30: (
        "batches that are all held",
        (LEASE + "ten_times_more_batches_than_slots_are_held_and_every_one_is_right",),
    ),
    31: (
        "what is derived from batches",
        (
            LEASE + "what_is_kept_of_each_batch_is_unchanged_at_the_end",
            CORRUPTION + "what_is_derived_from_a_batch_keeps_its_memory",
        ),
    ),
    32: (
        "batches that outlive what made them",
        (
            LEASE + "batches_held_over_epoch_ends_and_early_breaks_are_unchanged",
            LEASE + "batches_outlive_their_iterator_their_loader_and_its_close",
            LEASE + "batches_held_while_a_worker_is_killed_are_unchanged",
        ),
    ),
    33: (
        "writing into batches",
        (
            LEASE + "writing_into_one_batch_disturbs_neither_another_nor_a_pending_backward",
            LEASE + "each_field_of_a_batch_has_a_version_counter_of_its_own",
            SHAPES + "a_list_of_batches_is_pulled_before_any_is_used",
        ),
    ),
    34: (
        "inference, then training",
        (
            LEASE + "a_persistent_loader_first_used_in_inference_mode_can_train_afterwards",
            CORRUPTION + "batches_made_in_inference_mode_can_be_trained_on",
        ),
    ),
    35: ("saved batches", (LEASE + "saving_a_batch_writes_its_bytes_and_little_else",)),
    36: (
        "ragged batches",
        (
            TRAVEL + "batches_may_grow_shrink_and_be_empty",
            "tests/test_constrained.py::test_ragged_sizes_under_a_limit_of_twice_the_largest_batch",
        ),
    ),
    37: (
        "classes and words of errors",
        (
            ERRORS + "an_error_in_the_data_set_arrives_as_torchs_and_the_epoch_goes_on",
            ERRORS + "an_error_in_the_collate_function_arrives_as_torchs",
            OBSERVABLES + "the_original_traceback_is_told_with_its_cause",
        ),
    ),
    38: (
        "going on after errors",
        (
            ERRORS + "an_error_in_the_data_set_arrives_as_torchs_and_the_epoch_goes_on",
            ERRORS + "no_slot_is_lost_to_errors",
            OBSERVABLES + "errors_come_again_in_every_epoch_at_the_same_place_in_the_same_words",
        ),
    ),
    39: (
        "errors of init functions, batches that cannot be sent",
        (
            ERRORS + "an_error_in_the_init_function_is_what_every_batch_of_that_worker_comes_to",
            ERRORS + "what_cannot_be_sent_is_an_error_at_its_turn_that_names_the_place",
            ERRORS + "an_error_when_a_stream_begins_arrives_as_torchs",
        ),
    ),
    40: (
        "timeouts",
        (
            ERRORS + "a_batch_that_does_not_come_in_time_is_torchs_error",
            ERRORS + "after_a_timeout_the_batch_is_still_there_to_be_had",
            LOADER + "what_torch_notices_only_when_it_iterates_is_the_same_error",
        ),
    ),
    41: (
        "deaths of workers",
        (
            FAULTS + "a_fault_is_told_at_once_and_leaves_a_usable_loader",
            FAULTS + "a_worker_killed_from_outside_while_idle_is_noticed",
        ),
    ),
    42: (
        "persistent workers",
        (
            PROCESSES + "persistent_workers_stay_the_same_processes",
            PROCESSES + "an_earlier_handle_of_a_persistent_iterator_is_rewound",
            PROCESSES + "the_init_function_of_persistent_workers_runs_once",
            PROCESSES + "a_tensor_in_shared_memory_is_seen_by_persistent_workers",
            ENDS + "persistent_workers_stay_and_never_deliver_what_was_left_over",
        ),
    ),
    43: (
        "ends of iterators",
        (
            OBSERVED + "workers_are_gone_when_the_epoch_has_ended",
            ENDS + "a_dropped_loader_leaves_nothing_to_the_garbage_collector",
            FAULTS + "external_termination_and_repeated_shutdown_are_harmless",
            EXITS + "the_interpreters_exit_is_silent_and_leaves_no_process",
            ATTRIBUTES + "frameworks_may_drop_a_loaders_iterator_and_iterate_again",
            ATTRIBUTES + "a_loaders_iterator_may_be_deleted_though_torchs_persistent_loader_is_of_no_use_after_it",
            OBSERVABLES + "an_iterator_whose_workers_were_shut_down_may_be_shut_down_and_finalized_again",
        ),
    ),
    44: (
        "forked children",
        (
            EXITS + "a_child_that_exits_leaves_its_parents_workers_alone",
            WORKER_INFO + "nothing_that_a_forked_child_does_to_its_parents_iterator_reaches_the_parent",
            CORRUPTION + "a_child_that_inherits_a_loader_in_mid_epoch_iterates_afresh",
        ),
    ),
    45: (
        "interrupts, and the death of the main process",
        (
            EXITS + "ctrl_c_to_the_whole_group_prints_one_traceback",
            ORPHANS + "workers_die_with_the_main_process",
        ),
    ),
    46: (
        "warnings, and pinning",
        (
            OBSERVED + "torchs_warnings_come_as_often_and_in_the_same_words",
            OBSERVABLES + "a_missing_accelerator_is_warned_of_once_for_each_iterator",
            OBSERVABLES + "a_batch_that_can_pin_itself_is_asked_to_in_the_main_process",
            OBSERVABLES + "pinned_batches_are_pinned_as_torchs_and_custom_ones_are_asked",
        ),
    ),
    50: (
        "the shapes that libraries give to loaders",
        (
            SHAPES + "one_iterator_for_all_epochs",
            SHAPES + "workers_that_are_terminated_and_iterators_that_are_replaced",
            SHAPES + "an_iterator_in_another_that_calls_its_finalizer",
            SHAPES + "a_generator_around_the_epoch_and_a_finalizer_that_ends_the_workers",
            SHAPES + "the_iterator_takes_what_only_has_a_loaders_attributes",
            SHAPES + "a_loader_with_the_attributes_of_another",
            SHAPES + "a_loader_whose_attributes_were_set_one_by_one",
            SHAPES + "past_epochs_that_are_only_begun_and_an_end_by_force",
            SHAPES + "a_new_iterator_before_the_old_one_is_dropped",
        ),
    ),
}


@cache
def functions_of(path: str) -> frozenset[str]:
    """Names of a module's test functions."""
    module = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in module.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("number", CHECKS, ids=lambda number: f"{number}: {CHECKS[number][0]}")
def test_what_shows_that_a_contract_is_kept_is_there(number: int) -> None:
    _, shown_by = CHECKS[number]
    assert shown_by
    for node in shown_by:
        path, _, function = node.partition("::")
        assert function in functions_of(path), f"{node} is gone: name what shows it now, or write it again"


def test_no_contract_is_left_out() -> None:
    assert sorted(CHECKS) == [*range(1, 47), 50]
