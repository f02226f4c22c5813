"""Every defect known of the 2021 original, and which test would fail if it came back.

A row per defect: what the original did, and the tests (file below tests/, function) that show it is
gone, or in words why it does not concern this project.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MODEL, RUN = "defects/test_model_defects.py::test_", "defects/test_run_defects.py::test_"
COMMANDS, OLD = "cli/test_commands.py::test_", "cli/test_old_commands.py::test_"
ATTENTION, TASK = "layers/test_attention.py::test_", "engine/test_classification_task.py::test_"
BACKENDS, LOADERS = "ops/test_backends.py::test_", "data/test_loaders.py::test_"

DEFECTS: dict[str, tuple[str, tuple[str, ...] | str]] = {
    "B1": ("asserted CUDA and ran everything when imported", (
        RUN + "importing_the_commands_does_nothing",
    )),
    "B2": ("tied the model to one square image size", (
        MODEL + "every_attention_takes_any_size",
        "models/test_msvit.py::test_any_image_size",
    )),
    "B3": ("had a default architecture that could not run", (
        MODEL + "the_default_architecture_runs",
    )),
    "B4": ("misspelt nhwc: images or weights converted, never both", (
        MODEL + "channels_last_reaches_weights_and_images_and_changes_no_loss",
        TASK + "autocast_and_memory_format_reach_the_model",
        "config/test_config_legacy.py::test_the_misspelt_memory_format",
    )),
    "B5": ("made every stage after an s0 one full attention", (
        "models/test_arch.py::test_full_attention_in_one_stage_does_not_stick",
    )),
    "B6": ("ignored LN_EPS", (MODEL + "ln_eps_reaches_every_norm",)),
    "B7": ("crashed on resuming with ONLY_SAVE_LAST", (RUN + "a_run_of_one_step_epochs_goes_on",)),
    "B8": ("crashed in LAMB with decay; Adam settings ignored", (
        "optim/test_optimizers.py::test_lamb_by_hand_with_decay",
        "optim/test_optimizers.py::test_betas_and_eps_are_honoured",
    )),
    "B9": ("evaluated random weights for a wrong MODEL_PATH, and saved them", (
        "cli/test_bad_input.py::test_weights_that_are_not_there",
        "cli/test_bad_input.py::test_random_weights_are_never_evaluated",
        COMMANDS + "evaluation_by_the_original_s_switch",
    )),
    "B10": ("could not read the config.yaml it saved, on every rank", (
        RUN + "a_saved_config_is_its_own_copy",
        OLD + "saved_configs_load",
        OLD + "what_yacs_prints_loads_back",
        "cli/test_torchrun.py::test_only_the_first_process_writes",
    )),
    "B11": ("filled weights by name endings; crashed on larger heads", (
        MODEL + "a_missing_norm_is_not_filled_from_another",
        "models/test_checkpoint.py::test_what_does_not_fit_is_listed_and_nothing_is_loaded",
        "models/test_checkpoint.py::test_heads_of_another_size",
    )),
    "B12": ("unpickled whatever a weight file held", (
        "cli/test_bad_input.py::test_files_that_are_not_a_state_dict",
        "engine/test_checkpoints.py::test_a_hostile_state_file_is_refused_and_not_run",
        "config/test_config_files.py::test_python_is_never_executed",
    )),
    "B13": ("miscounted multiply-accumulates", (
        ATTENTION + "macs_are_half_the_counted_flops_on_whole_chunks",
        "models/test_msvit.py::test_macs_are_half_the_counted_flops_on_whole_chunks",
    )),
    "B14": ("let padding into the softmax of cyclic windows", (
        MODEL + "cyclic_padding_is_never_seen",
        BACKENDS + "backends_equal_the_definition",
    )),
    "B15": ("failed late for an exact window with random shift", (
        "cli/test_bad_input.py::test_settings_that_cannot_be",
        ATTENTION + "wrong_settings_are_refused",
    )),
    "B16": ("always used float16 by hand; no bfloat16, no export", (
        MODEL + "the_backward_by_hand_follows_the_precision",
        BACKENDS + "autocast_does_not_change_the_computation",
        BACKENDS + "a_second_derivative_by_hand_is_refused_in_words",
        "models/test_msvit.py::test_export_with_symbolic_image_size",
    )),
    "B17": ("projected tokens twice; left parameters without gradient", (
        MODEL + "shared_keys_and_values_are_computed_once",
        MODEL + "global_attention_trains_all_it_has",
        ATTENTION + "every_parameter_gets_a_gradient",
    )),
    "B18": ("dropped all positions for a0 with three attentions", (
        MODEL + "no_attention_loses_its_positions",
    )),
    "B19": ("performer: results by batch, draws by rank, odd periods", (
        MODEL + "a_performer_s_image_does_not_depend_on_its_batch",
        "layers/test_performer.py::test_whether_an_image_depends_on_its_batch",
        "layers/test_performer.py::test_the_draw_is_a_function_of_seed_step_and_module",
        "layers/test_performer.py::"
        "test_redraws_every_1_plus_5_epochs_steps_from_the_start_of_each_epoch",
    )),
    "B20": ("srformer: dropped last rows, crashed on a single cell", (
        "layers/test_srformer.py::test_whether_tokens_of_incomplete_cells_are_seen",
        "layers/test_srformer.py::test_a_single_cell_is_not_normalised_away",
    )),
    "B21": ("reported loss over batch size; shuffled, padded evaluation", (
        TASK + "figures_do_not_depend_on_the_batch_size",
        TASK + "fewer_than_five_classes",
        LOADERS + "evaluation_is_exact",
        "cli/test_torchrun.py::test_any_number_of_processes_evaluates_alike",
    )),
    "B22": ("could not pickle its zip dataset; died of broken pictures", (
        "data/test_formats.py::test_start_methods_agree_for_every_dataset",
        "data/test_unreadable.py::test_training_replaces_counts_once_and_lists",
    )),
    "B23": ("did not start under torchrun or a new launcher", (
        OLD + "the_old_launcher_starts_two_processes",
        "cli/test_torchrun.py::test_two_processes_train_as_one",
        "engine/test_ranks.py::test_a_partial_environment_is_refused_in_one_line",
    )),
    "B24": ("lacked clipping, EMA, accumulation; lost scaler and generators", (
        RUN + "what_the_loop_lacked_changes_the_run",
        RUN + "a_run_of_one_step_epochs_goes_on",
        "engine/test_training_loop.py::test_float16_scales_the_loss_and_saves_the_scale",
        "cli/test_resume.py::test_the_weights_are_the_same_bits",
        "optim/test_schedules.py::test_a_rate_depends_on_the_step_alone",
    )),
    "B25": ("kept every epoch's checkpoint", (
        COMMANDS + "the_newest_checkpoints_and_the_best_are_kept",
    )),
    "B26": ("imported and called what is deprecated", (
        RUN + "nothing_deprecated_is_imported_or_called",
        MODEL + "a_model_with_stochastic_depth_can_be_printed",
    )),
    "B27": ("could not train on MNIST; patched only heads named fc", (
        RUN + "pictures_with_one_channel_reach_the_model",
        "models/test_foreign.py::test_any_model_at_its_size",
    )),
    "B28": ("refused odd batches with mixup", (
        RUN + "an_odd_batch_is_mixed",
        "data/test_mixup.py::test_targets_say_what_the_pixels_show",
        "data/test_mixup.py::test_nothing_to_mix_and_unknown_modes_are_refused",
    )),
    "B29": ("stopped at every loss but cross entropy", (
        RUN + "every_loss_trains",
        RUN + "a_loss_of_several_labels_is_refused_by_name",
    )),
    "B30": ("did not seed by default; equal generators on all ranks", (
        COMMANDS + "the_same_command_gives_the_same_numbers",
        "engine/test_training_loop.py::"
        "test_every_seed_step_and_rank_has_its_own_draw_and_repeats_it",
    )),
    "B31": ("kept masks of 128 image sizes", (
        MODEL + "new_image_sizes_leave_nothing_behind",
    )),
    "B32": ("advertised longformer_cuda, which was not there", (
        RUN + "the_cuda_kernel_by_its_old_name",
    )),
    "B33": ("detection: no padding mask, wrong stage frozen, norms decayed, dead weights", (
        "detection/test_pyramid.py::test_an_image_does_not_depend_on_the_sizes_of_the_others",
        "detection/test_detectors.py::test_every_parameter_learns",
        "detection/test_detector_weights.py::"
        "test_layers_and_decay_of_the_body_are_those_of_the_classifier",
        "cli/test_detect_train.py::test_stages_can_be_frozen",
    )),
    "B34": ("converted detection checkpoints without checking shapes", (
        "detection/test_detector_weights.py::test_weights_that_fit_nothing",
        "models/test_conversion.py::test_files_of_the_detection_code_give_their_backbone",
    )),
    "B35": ("contradicted itself between README, configs and checkpoints", (
        "test_configs.py::test_its_head_is_true",
    )),
    "B36": ("carried dead code and dead keys", (
        "test_docs.py::test_every_key_is_read_or_said_to_do_nothing",
    )),
}  # fmt: skip


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_no_defect_is_forgotten():
    assert list(DEFECTS) == [f"B{number}" for number in range(1, 37)]
    for what, tests in DEFECTS.values():
        assert 1 <= len(what.split()) <= 12
        assert tests


@pytest.mark.parametrize("number", DEFECTS)
def test_the_tests_named_exist(number):
    tests = DEFECTS[number][1]
    for name in tests if isinstance(tests, tuple) else ():
        file, _, function = name.partition("::")
        assert function in functions(file), name
