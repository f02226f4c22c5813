"""Config keys of the optimizer and the learning-rate schedule."""

from vil.config.registries import registry
from vil.config.rules import (
    Conflict,
    RegistryRule,
    Rule,
    at_least,
    below_one,
    fraction,
    one_of,
    positive,
    probability,
)
from vil.utils.registry import Key, Section

DECLARED = (
    Section("OPTIM", "The optimizer and the length of the run."),
    Key(
        "OPT",
        "adamw",
        "The optimizer. apex_* need NVIDIA apex.",
        RegistryRule("optimizer"),
    ),
    Key("LR", 1.0, "Peak learning rate; scaled if LR_REFERENCE_BATCH is set.", positive),
    Key(
        "LR_REFERENCE_BATCH",
        0,
        "Images per step for which LR and SOLVER.MIN_LR were chosen; both are scaled to the "
        "actual number, DATALOADER.BSZ * ACCUMULATE. 0: no scaling.",
        at_least(0),
    ),
    Key(
        "LR_SCALING",
        "auto",
        "Scale by the ratio of the images per step, or by its square root. auto: sqrt for the "
        "Adam and LAMB families, else linear.",
        one_of("auto", "linear", "sqrt"),
    ),
    Key(
        "MOM",
        0.9,
        "Momentum of sgd, lars, larc, qhm and timm's optimizers that have one.",
        below_one,
    ),
    Key("NU", 1.0, "qhm: weight nu of the momentum in the update.", probability),
    Key("WD", 5e-4, "Weight decay, except for the parameters of WD0.", at_least(0)),
    Key(
        "WD0",
        0.0,
        "Weight decay of norms, global tokens, positions, relative biases and the bias of the "
        "head.",
        at_least(0),
    ),
    Key("EPOCHS", 150, "Length of the run in epochs.", at_least(1)),
    Key("CLIP_GRAD", 0.0, "Maximum global norm of the gradients; 0: no clipping.", at_least(0)),
    Key(
        "ACCUMULATE",
        1,
        "Batches of DATALOADER.BSZ images per step. The result is that of one larger batch, "
        "except for dropout, drop path and batch norms.",
        at_least(1),
    ),
    Key(
        "LAYER_DECAY",
        1.0,
        "Learning rate of a layer divided by that of the next one; 1: the same for all.",
        fraction,
    ),
    Key(
        "EMA",
        0.0,
        "Decay of the moving average of the weights; 0: none. The average is evaluated instead "
        "of the weights, and preferred where a run is loaded.",
        below_one,
    ),
    Key("DROP_FREQ", 50, "multistep: epochs between drops of the learning rate.", at_least(1)),
    Key(
        "DROP_EPOCHS",
        [],
        "multistep: epochs, also fractions, at which the learning rate drops; empty: every "
        "DROP_FREQ.",
        Rule(
            lambda v: list(v) == sorted(v) and all(n > 0 for n in v), "empty, or ascending epochs"
        ),
    ),
    Key(
        "DROP_FACTOR",
        10.0,
        "multistep and OPTIM.VAL: divisor of the learning rate at each drop.",
        positive,
    ),
    Key(
        "VAL",
        0,
        "sgd and qhm without SOLVER.LR_POLICY: if not 0, drop the learning rate after each "
        "evaluation that is not the best so far.",
        at_least(0),
    ),
    Section(
        "OPTIM.ADAM",
        "The Adam family. Optimizers of timm use their own defaults for keys that are not changed.",
    ),
    Key("BETA1", 0.9, "Adam family: decay of the first moment.", below_one),
    Key("BETA2", 0.999, "Adam family: decay of the second moment.", below_one),
    Key("EPS", 1e-8, "Adam family: epsilon that is added to the denominator.", positive),
    Section("SOLVER", "The learning-rate schedule."),
    Key(
        "LR_POLICY",
        "",
        "The schedule; empty: a constant learning rate without warm-up.",
        RegistryRule("schedule"),
    ),
    Key(
        "WARMUP_FACTOR",
        1.0 / 3,
        "Learning rate at the start of the warm-up, as a fraction of OPTIM.LR.",
        probability,
    ),
    Key("WARMUP_EPOCHS", 5.0, "Length of the warm-up in epochs; may be a fraction.", at_least(0)),
    Key(
        "WARMUP_METHOD",
        "linear",
        "linear: increase to OPTIM.LR; constant: stay at WARMUP_FACTOR until the end.",
        one_of("linear", "constant"),
    ),
    Key("MIN_LR", 0.0, "Final learning rate of the schedules cosine and linear.", at_least(0)),
    Key("DETECT_ANOMALY", False, "Enable torch's anomaly detection, which locates NaNs; slow."),
    Key(
        "EPOCH_BASED_SCHEDULE",
        False,
        "Update the learning rate once per epoch instead of every step.",
    ),
    Key("USE_LARC", False, "Wrap sgd in LARC, layer-wise adaptive rate clipping."),
    Conflict(
        ("SOLVER.LR_POLICY", "SOLVER.WARMUP_EPOCHS", "OPTIM.EPOCHS"),
        lambda policy, warmup, epochs: policy != "" and warmup > epochs,
        "the warm-up is longer than the run",
    ),
    Conflict(
        ("SOLVER.MIN_LR", "OPTIM.LR"),
        lambda low, peak: low > peak,
        "the schedule would end above its peak",
    ),
    Conflict(
        ("SOLVER.USE_LARC", "OPTIM.OPT"),
        lambda larc, name: larc and name not in ("sgd", "larc"),
        "LARC wraps sgd only",
    ),
    Conflict(
        ("OPTIM.VAL", "SOLVER.LR_POLICY"),
        lambda drops, policy: drops != 0 and policy != "",
        "the schedule would undo the drops: leave SOLVER.LR_POLICY empty",
    ),
    Conflict(
        ("OPTIM.VAL", "OPTIM.OPT"),
        lambda drops, name: drops and not registry("optimizer")[name].facts.get("drops_on_plateau"),
        "only sgd and qhm can drop their learning rate after an evaluation",
    ),
)
