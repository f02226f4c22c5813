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
        "Architecture: msvit, the name of a torchvision model, or timm/<name>.",
        matches(r"[a-z][a-z0-9_]*|timm/\S+", "msvit, a torchvision name or timm/<name>"),
    ),
    Key(
        "MODEL_PATH",
        "",
        "Weights to load: the path of a file (also searched for in DATA.DATA_DIR) or of a "
        "run's folder, or a name such as ViL_Nano_Weights.DIGITS; empty: none.",
    ),
    Key("PRETRAINED", False, "Load the published weights of a torchvision or timm model."),
    Key(
        "COMPILE",
        False,
        "Compile the network with torch.compile, which takes minutes at the start and for "
        "each batch size. Needs Triton on CUDA, a C++ compiler on CPU.",
    ),
    Key(
        "COMPILE_MODE",
        "default",
        "The mode of torch.compile: default, or reduce-overhead, which records CUDA graphs, for "
        "small batches on a GPU.",
        one_of("default", "reduce-overhead"),
    ),
    Key(
        "GRAD_CHECKPOINT",
        False,
        "Activation checkpointing: recompute blocks in the backward pass, for less memory and "
        "1/3 more time.",
    ),
    Section("MODEL.VIT", "Vision transformers."),
    Key(
        "DROP",
        0.0,
        "Dropout rate of patch embeddings, attention outputs and MLP layers.",
        below_one,
    ),
    Key(
        "DROP_PATH",
        0.1,
        "Stochastic depth: drop rate of the last block. The rate increases linearly from 0 at "
        "the first block.",
        below_one,
    ),
    Key(
        "REVERSIBLE",
        False,
        "Use reversible blocks, whose activations are recomputed in the backward pass: memory "
        "hardly grows with the number of blocks, for 1/3 more time. They have the same "
        "parameters as plain blocks, but compute another function.",
    ),
    Key("NORM_EMBED", True, "Use LayerNorm in the patch embeddings."),
    Key("AVG_POOL", False, "Classify the mean of all tokens instead of the first global token."),
    Key(
        "POS_RESIZE",
        "interpolate",
        "How absolute position embeddings are adapted to another image size: interpolate "
        "them, or crop them to the first rows and columns.",
        one_of("interpolate", "crop"),
    ),
    Section("MODEL.VIT.MSVIT", "The multi-scale vision transformer."),
    Key(
        "ARCH",
        "l1,h1,d48,n1,s1,g1,p4,f7,a0_l2,h3,d96,n1,s1,g1,p2,f7,a0"
        "_l3,h3,d192,n9,s0,g1,p2,f7,a0_l4,h6,d384,n1,s0,g0,p2,f7,a0",
        "Stages joined by `_`. Each is a list of settings, a letter and a number: l stage, h "
        "heads, d width, n blocks, s 1 sparse or 0 full attention, g global tokens, p patch "
        "size, f the attention's parameter (window size, projected length, features or "
        "reduction), a 1 absolute or 0 relative position. docs/reference/arch.md explains each "
        "letter.",
    ),
    Key("SHARE_W", True, "Share the attention's projections between local and global tokens."),
    Key(
        "ATTN_TYPE",
        "longformer",
        "Attention types of the stages with s1 in ARCH. Types joined by commas alternate over "
        "the blocks of a stage. Lists joined by slashes are for stages 1, 2, ...; the last "
        "list is also for all later stages. longformerhand, longformerauto and "
        "longformer_cuda are names of the 2021 code, which also select a backend.",
        RegistryRule("attention", extra=tuple(LEGACY_ATTN_BACKENDS), several=True),
    ),
    Key(
        "BACKEND",
        "auto",
        "Backend of longformer attention: auto, a name listed by `vil info`, or two names "
        "joined by + for the forward and the backward pass. Does not change the result.",
        matches(r"[a-z]\w*(\+[a-z]\w*)?", "auto, a name, or forward+backward"),
    ),
    Key(
        "TUNE",
        False,
        "Before training, time the backends for shapes that `vil tune` has not timed, and use "
        "the fastest.",
    ),
    Key("SHARE_KV", True, "linformer: share one projection between keys and values."),
    Key(
        "PERFORMER_BATCH_MAX",
        "auto",
        "performer: stabilize the keys by their maximum over the batch instead of each image, "
        "so that the result of an image depends on the others. auto: true for weights of the "
        "2021 code, else false.",
        one_of("auto", "true", "false", "True", "False"),
    ),
    Key(
        "SR_RAGGED",
        "auto",
        "srformer, if the sides of a token grid are not multiples of the reduction f (see "
        "ARCH): pad the grid, or drop its last rows and columns. auto: drop for weights of "
        "the 2021 code, else pad.",
        one_of("auto", "pad", "drop"),
    ),
    Key("ONLY_GLOBAL", False, "longformer: local tokens attend to global tokens only."),
    Key(
        "SW_EXACT",
        0,
        "Keys that longformer attends to. 1: those at most f tokens away in x and y (exact "
        "window); 0: those in the 3 x 3 chunks around the query, within the image; -1: the "
        "same chunks, wrapped around the image.",
        one_of(-1, 0, 1),
    ),
    Key(
        "LN_EPS",
        1e-6,
        "Epsilon of every LayerNorm. The 2021 code ignored it and used 1e-6.",
        positive,
    ),
    Key(
        "MODE",
        0,
        "Chunks that longformer attends to. 0: all nine; -1: only the query's chunk; above 0: "
        "the query's chunk and, in training, one random neighbor (random shift).",
        between(-1, 8),
    ),
    Key(
        "VIL_MODE_SWITCH",
        0.75,
        "Stop random shift (MODE above 0) after this fraction of the epochs, and attend to "
        "all nine chunks.",
        probability,
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
    Key(
        "FINETUNE",
        False,
        "Reduce the augmentation of training images to resizing, random crops and flips.",
    ),
    Key("USE_TRAIN_AUG", False, "With FINETUNE.FINETUNE, keep the full augmentation."),
    Key(
        "HEAD",
        "keep",
        "What to do if the loaded weights have another number of classes. keep: raise an "
        "error; new: use a new random head; rows:FILE: keep the classes of the loaded head "
        "whose indices FILE lists.",
        matches(r"keep|new|rows:.+", "keep, new or rows:FILE"),
    ),
    Key(
        "RESIZE",
        "linear",
        "How to resize position embeddings of loaded weights. linear (as in 2021) and bicubic "
        "interpolate. extend is for another window size: it keeps the relative position "
        "embedding of each distance in tokens.",
        one_of("linear", "bicubic", "extend"),
    ),
    Key(
        "FREEZE_STAGES", 0, "Number of stages to freeze, starting with the first one.", at_least(0)
    ),
)
