"""Config keys of the model and of fine-tuning."""

from vil.config.legacy import LEGACY_ATTN_BACKENDS
from vil.config.rules import (
    Conflict,
    RegistryRule,
    Rule,
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
        "The network.",
        matches(r"[a-z][a-z0-9_]*|timm/\S+", "msvit, a torchvision name or timm/<name>"),
    ),
    Key(
        "MODEL_PATH",
        "",
        "Weights to load: a file (also searched for in DATA.DATA_DIR), a run's folder, or a "
        "name such as ViL_Nano_Weights.DIGITS; empty: none.",
    ),
    Key(
        "PRETRAINED",
        False,
        "Load the published weights of a torchvision or timm model. INPUT.MEAN, STD, CROP_PCT and "
        "INTERPOLATION are those of the weights, unless they are set.",
    ),
    Key(
        "PATCH_ATTENTION",
        "",
        "Replace the attention of a timm ViT by local attention, with the arguments of "
        "vil.patch_attention as text, such as window=8; empty: keep it.",
    ),
    Key(
        "COMPILE",
        False,
        "Use torch.compile, which takes minutes at the start and for each batch size. Needs "
        "Triton on CUDA, a C++ compiler on CPU.",
    ),
    Key(
        "COMPILE_MODE",
        "default",
        "reduce-overhead records CUDA graphs, for small batches on a GPU.",
        one_of("default", "reduce-overhead"),
    ),
    Key(
        "GRAD_CHECKPOINT",
        False,
        "Recompute blocks in the backward pass, for less memory and 1/3 more time.",
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
        "Stochastic depth: drop rate of the last block, increasing linearly from 0 at the first.",
        below_one,
    ),
    Key(
        "REVERSIBLE",
        False,
        "Reversible blocks: memory hardly grows with their number, for 1/3 more time. Another "
        "function than plain blocks (docs/guides/precision.md).",
    ),
    Key("NORM_EMBED", True, "Use LayerNorm in the patch embeddings."),
    Key("AVG_POOL", False, "Classify the mean of all tokens instead of the first global token."),
    Key(
        "POS_RESIZE",
        "interpolate",
        "Adapt absolute position embeddings to another image size: interpolate them, or crop "
        "them to the first rows and columns.",
        one_of("interpolate", "crop"),
    ),
    Section("MODEL.VIT.MSVIT", "The multi-scale vision transformer."),
    Key(
        "ARCH",
        "l1,h1,d48,n1,s1,g1,p4,f7,a0_l2,h3,d96,n1,s1,g1,p2,f7,a0"
        "_l3,h3,d192,n9,s0,g1,p2,f7,a0_l4,h6,d384,n1,s0,g0,p2,f7,a0",
        "The stages (docs/reference/arch.md).",
    ),
    Key("SHARE_W", True, "Share the attention's projections between local and global tokens."),
    Key(
        "ATTN_TYPE",
        "longformer",
        "Attention of the stages with s1 in ARCH. Commas separate types that alternate over "
        "the blocks of a stage, slashes the stages; the last list is also for all later ones. "
        "longformerhand, longformerauto and longformer_cuda are names of 2021, which also "
        "select a backend.",
        RegistryRule("attention", extra=tuple(LEGACY_ATTN_BACKENDS), several=True),
    ),
    Key(
        "BACKEND",
        "auto",
        "Backend of longformer attention, as listed by `vil info`. Does not change the result.",
        matches(r"[a-z]\w*(\+[a-z]\w*)?", "auto, a name, or forward+backward"),
    ),
    Key(
        "TUNE",
        False,
        "Before training, time the backends for shapes that `vil tune` has not timed.",
    ),
    Key("SHARE_KV", True, "linformer: share one projection between keys and values."),
    Key(
        "PERFORMER_BATCH_MAX",
        "auto",
        "performer: subtract the maximum of the keys over the batch instead of each image. "
        "auto: true for weights of the 2021 code, else false.",
        one_of("auto", "true", "false", "True", "False"),
    ),
    Key(
        "SR_RAGGED",
        "auto",
        "srformer on grids that the reduction f does not divide: pad them, or drop the last "
        "rows and columns. auto: drop for weights of the 2021 code, else pad.",
        one_of("auto", "pad", "drop"),
    ),
    Key("ONLY_GLOBAL", False, "longformer: local tokens attend to global tokens only."),
    Key(
        "SW_EXACT",
        0,
        "Window of longformer. 1: tokens at most f away in x and y (exact); 0: the 3 x 3 "
        "chunks around the query; -1: these chunks, wrapped around the image.",
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
        "Chunks of longformer's window. 0: all nine; -1: only the query's; above 0: the "
        "query's and, in training, one random neighbor (random shift).",
        between(-1, 8),
    ),
    Key(
        "VIL_MODE_SWITCH",
        0.75,
        "Fraction of the epochs after which random shift stops.",
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
        "For weights with another number of classes. keep: an error; new: a random head; "
        "rows:FILE: keep the rows whose numbers FILE lists.",
        matches(r"keep|new|rows:.+", "keep, new or rows:FILE"),
    ),
    Key(
        "RESIZE",
        "linear",
        "How to resize position embeddings of loaded weights. extend, for another window, "
        "keeps the embedding of each distance in tokens; the others interpolate.",
        one_of("linear", "bicubic", "extend"),
    ),
    Key(
        "FREEZE_STAGES",
        0,
        "Number of first stages to freeze, of msvit or a timm model. In a plain ViT of timm, each "
        "block is a stage.",
        at_least(0),
    ),
    Section(
        "DISTILL",
        "Learn from a trained network, the teacher: its features with TASK distillation, which "
        "needs no labels, its feature pyramid with TASK detection, and its outputs with "
        "classification, multilabel, regression and segmentation (docs/guides/distillation.md).",
    ),
    Key(
        "TEACHER",
        "",
        "timm/NAME, dinov2_small, a run's folder, a weight file that vil convert wrote, or a name "
        "such as ViL_Nano_Weights.DIGITS; empty: none.",
    ),
    Key(
        "WEIGHTS",
        "",
        "Weights of a teacher timm/NAME, as in MODEL.MODEL_PATH; empty: the published ones.",
    ),
    Key(
        "IMAGE_SIZE",
        0,
        "Side of the teacher's images in pixels. 0: the teacher's own, with TASK distillation "
        "the one nearest to INPUT.IMAGE_SIZE whose grid is a multiple of the student's, and with "
        "TASK segmentation INPUT.IMAGE_SIZE. TASK detection does not use it.",
        at_least(0),
    ),
    Key(
        "CACHE",
        "",
        "Folder to keep the teacher's outputs in, so that each image is computed once. Training "
        "images are then not augmented; empty: no cache.",
    ),
    Key(
        "SHARE",
        0.5,
        "Share of the teacher in the loss; labels have the rest (arXiv:1503.02531).",
        probability,
    ),
    Key(
        "TEMPERATURE",
        1.0,
        "Divisor of the logits of classes of both networks before the softmax.",
        positive,
    ),
    Key(
        "SIZES",
        [],
        "Sizes of the teacher's summary and dense features, which a run of TASK distillation "
        "records.",
        Rule(lambda v: len(v) in (0, 2) and all(n > 0 for n in v), "two numbers above 0"),
        element=0,
    ),
    Conflict(
        ("DISTILL.WEIGHTS", "DISTILL.TEACHER"),
        lambda weights, teacher: bool(weights) and not teacher.startswith("timm/"),
        "only a teacher timm/NAME takes weights: any other has its own",
    ),
    Conflict(
        ("DISTILL.CACHE", "AUG.MIXUP_PROB"),
        lambda cache, mixup: bool(cache) and mixup > 0,
        "mixed images are never the same again: set AUG.MIXUP_PROB to 0, or leave out the cache",
    ),
)
