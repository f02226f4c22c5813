"""Config keys of a run: checkpoints, logs, processes and device."""

from vil.config.rules import (
    RegistryRule,
    at_least,
    between,
    each_of,
    matches,
    not_empty,
    one_of,
    positive,
)
from vil.utils.registry import Key, Section

DECLARED = (
    Section("RUN", "Evaluation, checkpoints and fault tolerance."),
    Key("EVAL_EVERY", 1, "Epochs between evaluations.", at_least(1)),
    Key(
        "PATIENCE",
        0,
        "Stop after this many consecutive evaluations without an improvement; 0: never.",
        at_least(0),
    ),
    Key(
        "MIN_DELTA",
        0.0,
        "By how much an evaluation must be better than the last improvement to count as one "
        "for PATIENCE.",
        at_least(0),
    ),
    Key("SAVE_EVERY", 1, "Epochs between checkpoints.", at_least(1)),
    Key("SAVE_STEPS", 0, "Steps between additional checkpoints; 0: none.", at_least(0)),
    Key("KEEP", 2, "Number of checkpoints to keep besides the best one.", at_least(1)),
    Key("KEEP_EVERY", 0, "Epochs between checkpoints that are kept forever; 0: none.", at_least(0)),
    Key(
        "ALLOW_CHANGES",
        False,
        "Allow a resumed run to have another model, data or batches, and an evaluation another "
        "division of the data, for this start only (docs/guides/reliability.md).",
    ),
    Key(
        "MAX_BAD_STEPS",
        10,
        "Stop after more than this many consecutive non-finite steps (except in float16, at "
        "most half an epoch).",
        at_least(0),
    ),
    Key(
        "MAX_FAILED_SAVES",
        3,
        "Stop after this many consecutive checkpoints that could not be saved.",
        at_least(1),
    ),
    Key(
        "HANG_SECONDS",
        1800.0,
        "Print stack traces and exit if no step, evaluation batch or checkpoint completes for "
        "this long; 0: never.",
        at_least(0),
    ),
    Key(
        "GRACE_SECONDS",
        30.0,
        "Like HANG_SECONDS, after a signal such as SIGTERM or Ctrl-C. A checkpoint that is being "
        "written still has HANG_SECONDS.",
        positive,
    ),
    Section("", "The run as a whole."),
    Key("OUTPUT_DIR", "runs/default", "Folder of the run (--output_dir).", not_empty),
    Key(
        "LOG_FREQ",
        10,
        "Steps between log lines; an epoch also ends with one.",
        at_least(1),
    ),
    Key("EVALUATE", False, "Evaluate only, without training."),
    Key("OUTPUT_PERCLASS_ACC", False, "Report the accuracy of every class."),
    Section("LOG", "The log."),
    Key(
        "TRACKERS",
        ("tensorboard",),
        "Programs that get the metrics: tensorboard, wandb, mlflow (docs/reference/run_folder.md).",
        each_of("tensorboard", "wandb", "mlflow"),
    ),
    Section("DISTRIBUTED", "Training with several processes."),
    Key(
        "STRATEGY",
        "ddp",
        "ddp: replicate the model; fsdp: shard weights, gradients and optimizer state.",
        one_of("ddp", "fsdp"),
    ),
    Section("", "The run as a whole."),
    Key(
        "DISTRIBUTED_BACKEND",
        "nccl",
        "Backend of the process group for GPU runs; CPU runs use gloo.",
        one_of("nccl", "gloo", "mpi"),
    ),
    Key(
        "DEVICE",
        "auto",
        "Device of the run; auto: the first available of cuda, mps, cpu.",
        matches(r"auto|cpu|mps|cuda(:\d+)?", "auto, cpu, mps, cuda or cuda:N"),
    ),
    Key("SEED", 0, "Seed of all random numbers (--seed).", between(0, 2**32 - 1)),
    Key(
        "DETERMINISTIC",
        False,
        "Use deterministic kernels, which are slower: the same bits in every run on the same "
        "machine.",
    ),
    Key(
        "TASK",
        "classification",
        "The task. Some keys, such as DETECTION.MODEL, imply it.",
        RegistryRule("task"),
    ),
    Key(
        "IMPORTS", (), "Python files and plug-ins that register components (--import).", element=""
    ),
    Key(
        "VERSION",
        1,
        "Version of the config keys; a file without it is from the 2021 code.",
        one_of(1),
    ),
)
