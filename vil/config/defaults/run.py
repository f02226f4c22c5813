"""Config keys of a run: checkpoints, logs, processes and device."""

from vil.config.rules import RegistryRule, at_least, between, matches, not_empty, one_of, positive
from vil.utils.registry import Key, Section

DECLARED = (
    Section("RUN", "Evaluation, checkpoints and fault tolerance."),
    Key("EVAL_EVERY", 1, "Epochs between evaluations.", at_least(1)),
    Key(
        "PATIENCE",
        0,
        "Stop early after this many evaluations in a row whose metric, which selects the best "
        "checkpoint, did not improve; 0: never.",
        at_least(0),
    ),
    Key(
        "MIN_DELTA",
        0.0,
        "PATIENCE counts an evaluation as an improvement if it is better than the last improvement "
        "by more than this, in the unit of the metric.",
        at_least(0),
    ),
    Key("SAVE_EVERY", 1, "Epochs between checkpoints.", at_least(1)),
    Key("SAVE_STEPS", 0, "Steps between additional checkpoints; 0: none.", at_least(0)),
    Key("KEEP", 2, "Number of checkpoints to keep besides the best one.", at_least(1)),
    Key("KEEP_EVERY", 0, "Epochs between checkpoints that are kept forever; 0: none.", at_least(0)),
    Key(
        "ALLOW_CHANGES",
        False,
        "Resume with another model, data or batches; not stored for the next start. Still refused: "
        "other weight shapes, another optimizer, and another number of images per step or of steps "
        "per epoch.",
    ),
    Key(
        "MAX_BAD_STEPS",
        10,
        "Stop after more than this many consecutive skipped steps with a non-finite loss or "
        "gradient (or half an epoch, if that is less).",
        at_least(0),
    ),
    Key("MAX_FAILED_SAVES", 3, "Stop after this many consecutive failed checkpoints.", at_least(1)),
    Key(
        "HANG_SECONDS",
        1800.0,
        "Print stacks and exit if no step, evaluation batch or checkpoint ends within these "
        "seconds; 0: never.",
        at_least(0),
    ),
    Key(
        "GRACE_SECONDS",
        30.0,
        "Like HANG_SECONDS, but once SIGTERM, SIGUSR1 or Ctrl-C was received.",
        positive,
    ),
    Section("", "The run as a whole."),
    Key("OUTPUT_DIR", "runs/default", "Folder of the run (--output_dir).", not_empty),
    Key("BACKUP_LOG_DIR", "", "logs are written to OUTPUT_DIR", ignored=True),
    Key(
        "LOG_FREQ",
        10,
        "Iterations between log lines. The last line of an epoch also averages the iterations "
        "that would be left for a shorter one.",
        at_least(1),
    ),
    Key("EVALUATE", False, "Evaluate only."),
    Key("OUTPUT_PERCLASS_ACC", False, "Report the accuracy of every class."),
    Key("ONLY_SAVE_LAST", 0, "Non-zero: keep only the newest and best checkpoint.", at_least(0)),
    Section("DISTRIBUTED", "Several processes."),
    Key(
        "STRATEGY",
        "ddp",
        "ddp: replicate the model; fsdp: shard weights, gradients and optimizer state, and "
        "gather each block while it is computed.",
        one_of("ddp", "fsdp"),
    ),
    Section("", "The run as a whole."),
    Key(
        "DISTRIBUTED_BACKEND",
        "nccl",
        "Process group between GPUs; CPU runs use gloo.",
        one_of("nccl", "gloo", "mpi"),
    ),
    Key("GATHER_ON_CPU", False, "evaluation exchanges counts, not predictions", ignored=True),
    Key(
        "DEVICE",
        "auto",
        "auto: the first available of cuda, mps, cpu.",
        matches(r"auto|cpu|mps|cuda(:\d+)?", "auto, cpu, mps, cuda or cuda:N"),
    ),
    Key("SEED", 0, "Seed of all random draws (--seed).", between(0, 2**32 - 1)),
    Key("DETERMINISTIC", False, "Use deterministic kernels: same bits on one machine, slower."),
    Key(
        "TASK",
        "classification",
        "A registered task; a key of the task may imply it.",
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
