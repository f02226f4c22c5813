"""Config keys of a run: checkpoints, logs, processes and device."""

from vil.config.rules import RegistryRule, at_least, between, matches, not_empty, one_of, positive
from vil.utils.registry import Key, Section

DECLARED = (
    Section("RUN", "Evaluation, checkpoints and fault tolerance."),
    Key("EVAL_EVERY", 1, "Epochs between evaluations.", at_least(1)),
    Key(
        "PATIENCE",
        0,
        "Early stopping: stop after this many consecutive evaluations without an improvement "
        "of the metric that selects the best checkpoint; 0: never.",
        at_least(0),
    ),
    Key(
        "MIN_DELTA",
        0.0,
        "Early stopping: an evaluation is an improvement only if its metric is better than at "
        "the last improvement by more than this.",
        at_least(0),
    ),
    Key("SAVE_EVERY", 1, "Epochs between checkpoints.", at_least(1)),
    Key("SAVE_STEPS", 0, "Steps between additional checkpoints; 0: none.", at_least(0)),
    Key("KEEP", 2, "Number of checkpoints to keep besides the best one.", at_least(1)),
    Key("KEEP_EVERY", 0, "Epochs between checkpoints that are kept forever; 0: none.", at_least(0)),
    Key(
        "ALLOW_CHANGES",
        False,
        "Allow a resumed run to have another model, data or batches; applies only to this "
        "start. Still an error: other weight shapes, another optimizer, and another number of "
        "images per step or of steps per epoch.",
    ),
    Key(
        "MAX_BAD_STEPS",
        10,
        "Stop after more than this many consecutive skipped steps with a non-finite loss or "
        "gradient. Except in float16, the limit is at most half an epoch.",
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
        "Print stack traces and exit if no step, evaluation batch or checkpoint is completed "
        "for this many seconds; 0: never.",
        at_least(0),
    ),
    Key(
        "GRACE_SECONDS",
        30.0,
        "Like HANG_SECONDS, but after SIGTERM, SIGUSR1 or Ctrl-C. While a checkpoint is being "
        "written, HANG_SECONDS still applies.",
        positive,
    ),
    Section("", "The run as a whole."),
    Key("OUTPUT_DIR", "runs/default", "Folder of the run (--output_dir).", not_empty),
    Key(
        "LOG_FREQ",
        10,
        "Steps between log lines. If the steps of an epoch are not a multiple of it, the last "
        "line of the epoch includes the remaining steps.",
        at_least(1),
    ),
    Key("EVALUATE", False, "Evaluate only, without training."),
    Key("OUTPUT_PERCLASS_ACC", False, "Report the accuracy of every class."),
    Section("DISTRIBUTED", "Training with several processes."),
    Key(
        "STRATEGY",
        "ddp",
        "ddp: replicate the model; fsdp: shard weights, gradients and optimizer state, and "
        "gather the weights of each block while it is computed.",
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
        "Name of the task. Some keys of a task, such as DETECTION.MODEL, imply it.",
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
