"""Config keys of the model and of fine-tuning."""

from vil.config.legacy import LEGACY_ATTN_BACKENDS
from vil.config.rules import (
    Conflict,
    RegistryRule,
    at_least,
    below_one,
    between,
    matches,
    names_in,
    one_of,
    positive,
    probability,
)
from vil.utils.registry import Key, Section

DECLARED = (
    Section("MODEL", "The network."),
    Key(
        "ARCH",
        "msvit",
        "msvit, a torchvision model, or timm/<name>.",
        matches(r"[a-z][a-z0-9_]*|timm/\S+", "msvit, a torchvision name or timm/<name>"),
    ),
    Key("NONLINEARITY", "celu", "the networks fix their activations", ignored=True),
    Key(
        "MODEL_PATH",
        "",
        "Weights to load: a file, also relative to DATA.DATA_DIR, a run's folder, or a name "
        "such as ViL_Nano_Weights.DIGITS; empty: none.",
    ),
    Key("PRETRAINED", False, "Load pretrained weights of a torchvision or timm model."),
    Key("FREEZE_CONV_BODY_AT", -1, "nothing reads it", ignored=True),
    Key(
        "COMPILE",
        False,
        "Compile the network with torch.compile: takes minutes at the start and for each "
        "batch size. Needs Triton on CUDA, a C++ compiler on CPU.",
    ),
    Key("GRAD_CHECKPOINT", False, "Recompute blocks in backward: less memory, 1/3 more time."),
    Section("MODEL.VIT", "Vision transformers."),
    Key("DROP", 0.0, "Dropout of embedding, attention output and MLP layers.", below_one),
    Key("DROP_PATH", 0.1, "Stochastic depth of the last block; the first has 0.", below_one),
    Key(
        "REVERSIBLE",
        False,
        "Run blocks in two streams that backward recomputes: memory hardly grows with their "
        "number, 1/3 more time. Has the same parameters as plain blocks, but computes another "
        "function.",
    ),
    Key("NORM_EMBED", True, "Use LayerNorm in the patch embeddings."),
    Key("AVG_POOL", False, "Classify the mean of all tokens, not the first global token."),
    Key(
        "POS_RESIZE",
        "interpolate",
        "Absolute position embeddings for another image size: interpolate, or crop to the "
        "first rows and columns. Those of full attention are always interpolated.",
        one_of("interpolate", "crop"),
    ),
    Section("MODEL.VIT.MSVIT", "The multi-scale vision transformer."),
    Key(
        "ARCH",
        "l1,h1,d48,n1,s1,g1,p4,f7,a0_l2,h3,d96,n1,s1,g1,p2,f7,a0"
        "_l3,h3,d192,n9,s0,g1,p2,f7,a0_l4,h6,d384,n1,s0,g0,p2,f7,a0",
        "Stages joined by `_`, each a list of letter and number: l stage, h heads, d width, n "
        "blocks, s 1 sparse or 0 full attention, g global tokens, p patch size, f the "
        "attention's parameter (window size, projected length, features, reduction), a 1 "
        "absolute or 0 relative position.",
    ),
    Key("SHARE_W", True, "Share projections between local and global tokens."),
    Key(
        "ATTN_TYPE",
        "longformer",
        "Attention of the stages with s1. Names joined by commas alternate over the blocks of "
        "a stage; parts joined by slashes are for stage 1, 2, ..., the last one also for the "
        "rest. longformerhand, longformerauto and longformer_cuda are the original's names "
        "and pin a backend.",
        RegistryRule("attention", extra=tuple(LEGACY_ATTN_BACKENDS), several=True),
    ),
    Key(
        "BACKEND",
        "auto",
        "Backend of longformer attention: auto, a name (see `vil info`), or forward+backward. "
        "Does not change the result.",
        matches(r"[a-z]\w*(\+[a-z]\w*)?", "auto, a name, or forward+backward"),
    ),
    Key("TUNE", False, "Time backends that `vil tune` did not time, and use the fastest."),
    Key("SHARE_KV", True, "linformer: share one projection between keys and values."),
    Key(
        "PERFORMER_BATCH_MAX",
        "auto",
        "performer: take the maximum key score over the batch instead of the image. An image's "
        "result then depends on the others. auto: true with weights of the original.",
        one_of("auto", "true", "false", "True", "False"),
        neutral=("false", "False"),
    ),
    Key(
        "SR_RAGGED",
        "auto",
        "srformer on maps that f does not divide: pad them, or drop the last rows and "
        "columns. auto: drop with weights of the original, else pad.",
        one_of("auto", "pad", "drop"),
        neutral=("pad",),
    ),
    Key("ONLY_GLOBAL", False, "longformer: local tokens attend to global tokens only."),
    Key(
        "SW_EXACT",
        0,
        "longformer's window: 1 exact, |dx| and |dy| <= f; 0 the 3 x 3 chunks, cut at the "
        "border; -1 the 3 x 3 chunks, wrapped around the image.",
        one_of(-1, 0, 1),
    ),
    Key(
        "LN_EPS",
        1e-6,
        "Epsilon of every LayerNorm. The original code ignored it and trained with 1e-6.",
        positive,
    ),
    Key(
        "MODE",
        0,
        "longformer's chunks: 0 all nine, -1 only the query's chunk, above 0 the query's "
        "chunk and a random neighbor while training (random shift).",
        between(-1, 8),
    ),
    Key(
        "VIL_MODE_SWITCH", 0.75, "End random shift after this fraction of the epochs.", probability
    ),
    Conflict(
        ("MODEL.VIT.MSVIT.SW_EXACT", "MODEL.VIT.MSVIT.MODE"),
        lambda exact, mode: exact == 1 and mode != 0,
        "exact window with random shift: SW_EXACT 1 has no chunks to choose from and needs MODE 0",
    ),
    Conflict(
        ("MODEL.VIT.MSVIT.ATTN_TYPE", "MODEL.VIT.MSVIT.BACKEND"),
        lambda value, backend: (
            backend != "auto" and any(n in LEGACY_ATTN_BACKENDS for n in names_in(value))
        ),
        "this ATTN_TYPE already pins a backend; write ATTN_TYPE longformer to choose another",
    ),
    Section("FINETUNE", "Fine-tuning of trained weights."),
    Key("FINETUNE", False, "Augment training images only by resizing, random crops and flips."),
    Key("USE_TRAIN_AUG", False, "Fine-tune with the full augmentation."),
    Key(
        "HEAD",
        "keep",
        "If the loaded weights have a head of another size: keep raises an error, new starts with "
        "a random head, rows:FILE takes the rows of their head whose indices are in FILE.",
        matches(r"keep|new|rows:.+", "keep, new or rows:FILE"),
    ),
    Key(
        "RESIZE",
        "linear",
        "If the loaded position embeddings have another size: linear (as in 2021) or bicubic "
        "interpolation; extend keeps relative ones at their distance in tokens, for another window "
        "on images of the same size.",
        one_of("linear", "bicubic", "extend"),
    ),
    Key("FREEZE_STAGES", 0, "Number of first stages to freeze.", at_least(0)),
)
