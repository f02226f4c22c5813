"""Every configuration key: its default and its meaning. This file is the manual.

The tree contains that of the 2021 original, so that its YAML files and command lines work. A key's
comment (behind it or above it) says meaning, unit and special values, its default's type is its
type, CHECKS below says what is allowed. `vil config --docs docs/reference/config.md` writes it.
"""

import difflib
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from yacs.config import CfgNode

from vil.config.legacy import LEGACY_ATTN_BACKENDS
from vil.config.registries import HOMES, registry
from vil.utils.errors import ConfigError
from vil.utils.registry import Key

_C = CfgNode()

_C.INPUT = CfgNode()  # What the network is shown.
_C.INPUT.MEAN = [0.485, 0.456, 0.406]  # Subtracted from each RGB channel of an image in 0..1.
_C.INPUT.STD = [0.229, 0.224, 0.225]  # Each channel is divided by it afterwards.
_C.INPUT.IMAGE_SIZE = 224  # Side of the square crop the model is built for, in pixels.
# Part of the resized image that the evaluation crop keeps: the shorter side becomes
# int(IMAGE_SIZE / CROP_PCT) first. Fine-tuning resizes its training images in the same way.
_C.INPUT.CROP_PCT = 0.875
_C.INPUT.INTERPOLATION = 2  # How images are resized: 2 bilinear, 3 bicubic.

_C.AMP = CfgNode()  # Mixed precision and memory layout.
_C.AMP.ENABLED = False  # Compute forward and loss in AMP.DTYPE (autocast).
_C.AMP.DTYPE = "bfloat16"  # float16 scales the loss, bfloat16 does not need it.
_C.AMP.TF32 = True  # Allow TF32 in float32 matrix products and convolutions on CUDA.
_C.AMP.MEMORY_FORMAT = "nchw"  # nhwc: channels-last weights and images.

_C.AUG = CfgNode()  # Augmentation of training images.
_C.AUG.SCALE = (0.08, 1.0)  # Random resized crop: smallest and largest part of the area.
_C.AUG.RATIO = (3 / 4, 4 / 3)  # Random resized crop: smallest and largest aspect ratio.
# Brightness, contrast, saturation, hue, and the probability of applying them; not used when
# TIMM_AUG.USE_TRANSFORM is on.
_C.AUG.COLOR_JITTER = [0.4, 0.4, 0.4, 0.1, 0.0]
_C.AUG.GRAY_SCALE = 0.0  # Probability of dropping the colours; not with TIMM_AUG.USE_TRANSFORM.
_C.AUG.GAUSSIAN_BLUR = 0.0  # Probability of a blur; not with TIMM_AUG.USE_TRANSFORM.
_C.AUG.DROPBLOCK_LAYERS = [3, 4]  # Layers of DropBlock.
_C.AUG.DROPBLOCK_KEEP_PROB = 1.0  # Keep probability of DropBlock.
_C.AUG.DROPBLOCK_BLOCK_SIZE = 7  # Block side of DropBlock.
_C.AUG.MIXUP_PROB = 0.0  # Probability that a batch is mixed (mixup or cutmix); 0 switches both off.
_C.AUG.MIXUP = 0.0  # Mixup's alpha; 0 switches mixup off.
_C.AUG.MIXCUT = 0.0  # Cutmix's alpha; 0 switches cutmix off.
_C.AUG.MIXCUT_MINMAX = []  # Cutmix's smallest and largest ratio instead of its alpha.
_C.AUG.MIXUP_SWITCH_PROB = 0.5  # Where both are on: probability of cutmix.
_C.AUG.MIXUP_MODE = "batch"  # One mixing ratio per batch, per pair of images or per element.
_C.AUG.MIXCUT_AND_MIXUP = False  # Mixup and cutmix on the same batch.
_C.AUG.REPEATED_AUG = False  # Repeated augmentation: an epoch shows N/3 images three times each.
# timm's training transform. Open: further names are accepted.
_C.AUG.TIMM_AUG = CfgNode()
_C.AUG.TIMM_AUG.USE_TRANSFORM = False  # Use timm's transform instead of the plain one.
_C.AUG.TIMM_AUG.RE_PROB = 0.25  # Random erasing: probability.
_C.AUG.TIMM_AUG.RE_MODE = "pixel"  # Random erasing: fill with zeros, one colour or pixel noise.
_C.AUG.TIMM_AUG.RE_COUNT = 1  # Random erasing: largest number of boxes per image.
_C.AUG.TIMM_AUG.HFLIP = 0.5  # Probability of a horizontal flip.
_C.AUG.TIMM_AUG.VFLIP = 0.0  # Probability of a vertical flip.
_C.AUG.TIMM_AUG.COLOR_JITTER = 0.4  # Colour jitter; timm ignores it while AUTO_AUGMENT is set.
_C.AUG.TIMM_AUG.AUTO_AUGMENT = "rand-m9-mstd0.5-inc1"  # timm's policy string; empty: none.
_C.AUG.TIMM_AUG.RE_SPLIT = False  # Random erasing in splits of the batch.

_C.DATA = CfgNode()  # What is trained and evaluated on.
# Names of the training sets, which are joined: a registered dataset or a TSV set's `x.yaml`.
_C.DATA.TRAIN = ("imagenet",)
_C.DATA.TEST = ("imagenet",)  # Names of the evaluation sets; the first one decides what is best.
_C.DATA.NUM_CLASSES = 1000  # Classes of the head.
# JSON file, relative to DATA.PATH, that maps the model's classes to the test set's names.
_C.DATA.TARGETMAP = ""
_C.DATA.PATH = "./datasets"  # Root folder of the data; the flag --data sets it.
_C.DATA.DATA_DIR = "./data"  # Second place where MODEL.MODEL_PATH is looked for.
_C.DATA.MAX_BAD_FRACTION = 0.01  # Unreadable images tolerated, as a part of the set.
# Arguments of the datasets, as they stand; each set gets those that it takes. Open: any name.
_C.DATA.KWARGS = CfgNode()

_C.LOSS = CfgNode()  # What is minimised.
_C.LOSS.LOSS = "xentropy"  # Name of the loss.
_C.LOSS.LABEL_SMOOTHING = 0.0  # Share of the target spread over all classes.
_C.LOSS.FOCAL = CfgNode()  # The focal loss.
_C.LOSS.FOCAL.NORMALIZE = True  # Normalise the loss over the batch.
_C.LOSS.FOCAL.ALPHA = 1.0  # Weight of the positives.
_C.LOSS.FOCAL.GAMMA = 0.5  # Exponent: the larger, the less easy examples count.

_C.DATALOADER = CfgNode()  # How samples become batches.
_C.DATALOADER.BSZ = 128  # Images over ALL processes; OPTIM.ACCUMULATE times as many make a step.
_C.DATALOADER.RE = "no"  # Without a known meaning.
_C.DATALOADER.WORKERS = 0  # Loader processes per training process; 0 loads in the process itself.

_C.OPTIM = CfgNode()  # The optimiser and the length of the run.
_C.OPTIM.OPT = "adamw"  # Name of the optimiser; apex_* need NVIDIA's apex.
_C.OPTIM.LR = 1.0  # Peak learning rate, not scaled by the batch size.
_C.OPTIM.MOM = 0.9  # Momentum of sgd, lars, larc and qhm.
_C.OPTIM.NU = 1.0  # QHM's nu: share of the momentum in the step.
_C.OPTIM.WD = 5e-4  # Weight decay.
_C.OPTIM.WD0 = 0.0  # Weight decay of norms, embeddings and relative-bias tables.
_C.OPTIM.EPOCHS = 150  # Length of the run, in epochs.
_C.OPTIM.CLIP_GRAD = 0.0  # Largest norm of all gradients together; 0: no clipping.
# A step adds up the gradients of this many batches of BSZ images. The result is that of one larger
# batch, but for what is drawn (dropout, drop path) and for batch norms.
_C.OPTIM.ACCUMULATE = 1
# Learning rate of a layer over that of the layer above it; below 1 for fine-tuning.
_C.OPTIM.LAYER_DECAY = 1.0
# Decay of an average of the weights; 0: none. It is evaluated in their place, decides what is best,
# and is saved beside them as ema.safetensors, which evaluate, predict and MODEL_PATH prefer.
_C.OPTIM.EMA = 0.0
_C.OPTIM.WARMUP = 0  # Warm-up in epochs; SOLVER.WARMUP_EPOCHS is the one that works.
_C.OPTIM.DROP_FREQ = 50  # multistep: epochs between two drops of the learning rate.
# multistep: the epochs of the drops instead, fractions allowed; empty: DROP_FREQ.
_C.OPTIM.DROP_EPOCHS = []
_C.OPTIM.DROP_FACTOR = 10.0  # multistep and VAL: what the learning rate is divided by.
# sgd and qhm without LR_POLICY: non-zero drops the learning rate after every evaluation that is not
# the best so far.
_C.OPTIM.VAL = 0
_C.OPTIM.TEST_FREQ = 1000  # Iterations between tests.
_C.OPTIM.ADAM = CfgNode()  # The Adam family.
_C.OPTIM.ADAM.BETA1 = 0.9  # Decay of the first moment.
_C.OPTIM.ADAM.BETA2 = 0.999  # Decay of the second moment.
_C.OPTIM.ADAM.EPS = 1e-8  # Added to the denominator.

_C.SOLVER = CfgNode()  # The learning-rate schedule.
_C.SOLVER.LR_POLICY = ""  # Shape of the schedule; empty: a constant rate, without warm-up.
_C.SOLVER.WARMUP_FACTOR = 1.0 / 3  # The warm-up starts at this part of OPTIM.LR.
_C.SOLVER.WARMUP_EPOCHS = 5.0  # Length of the warm-up in epochs; fractions are allowed.
_C.SOLVER.WARMUP_METHOD = "linear"  # linear rises to OPTIM.LR, constant stays at the factor.
_C.SOLVER.MIN_LR = 0.0  # Where cosine and linear end.
_C.SOLVER.DETECT_ANOMALY = False  # torch's anomaly mode: names the operation that made a NaN; slow.
_C.SOLVER.EPOCH_BASED_SCHEDULE = False  # Change the rate per epoch instead of per iteration.
_C.SOLVER.USE_LARC = False  # Wrap sgd in LARC, layer-wise adaptive rate clipping.

_C.MODEL = CfgNode()  # The network.
_C.MODEL.ARCH = "msvit"  # msvit, a torchvision model's name, or timm/<name>.
_C.MODEL.NONLINEARITY = "celu"  # Activation of the convolutional networks.
# Weights to evaluate or to start from: a file, as given or below DATA.DATA_DIR, a run's folder, or
# a name such as ViL_Nano_Weights.DIGITS; empty: none.
_C.MODEL.MODEL_PATH = ""
_C.MODEL.PRETRAINED = False  # Pretrained weights of a torchvision or timm model.
_C.MODEL.FREEZE_CONV_BODY_AT = -1  # Stages of a convolutional network that are not trained.
# Have torch.compile make one program of the network: minutes at the start, and wherever a batch has
# another size. Needs Triton on CUDA, a C++ compiler on CPUs.
_C.MODEL.COMPILE = False
# Recompute the blocks in the backward pass: less memory, about a third more time.
_C.MODEL.GRAD_CHECKPOINT = False
_C.MODEL.VIT = CfgNode()  # Vision transformers.
_C.MODEL.VIT.DROP = 0.0  # Dropout after embedding, attention output and both MLP layers.
_C.MODEL.VIT.DROP_PATH = 0.1  # Stochastic depth of the last block; rises from 0 over the blocks.
_C.MODEL.VIT.NORM_EMBED = True  # LayerNorm in the patch embeddings.
_C.MODEL.VIT.AVG_POOL = False  # Classify the mean of all tokens, not the first global token.
# Absolute embeddings on images of another size, and those of weights made for another size:
# interpolate them, or crop their first rows and columns. Tables of full attention are always
# interpolated.
_C.MODEL.VIT.POS_RESIZE = "interpolate"
_C.MODEL.VIT.MSVIT = CfgNode()  # The multi-scale vision transformer.
# Stages joined by `_`, each a list of letter and number: l stage, h heads, d width, n blocks,
# s 1 sparse or 0 full attention, g global tokens, p patch side, f the attention's own number
# (window side, projected length, features, reduction), a 1 absolute or 0 relative position.
_C.MODEL.VIT.MSVIT.ARCH = (
    "l1,h1,d48,n1,s1,g1,p4,f7,a0_l2,h3,d96,n1,s1,g1,p2,f7,a0"
    "_l3,h3,d192,n9,s0,g1,p2,f7,a0_l4,h6,d384,n1,s0,g0,p2,f7,a0"
)
_C.MODEL.VIT.MSVIT.SHARE_W = True  # Local and global tokens share their projections.
# The attention of stages with s1: one name, or several: those joined by commas take turns over the
# blocks of a stage, parts joined by slashes belong to stage 1, 2, ..., the last one to the rest.
# longformerhand, longformerauto and longformer_cuda are the original's names and pin a backend.
_C.MODEL.VIT.MSVIT.ATTN_TYPE = "longformer"
# Who computes longformer attention: auto, a backend's name (`vil info` lists them), or
# forward+backward. Never changes the result.
_C.MODEL.VIT.MSVIT.BACKEND = "auto"
# Try the backends at the start of training where `vil tune` has not: the fastest is taken.
_C.MODEL.VIT.MSVIT.TUNE = False
_C.MODEL.VIT.MSVIT.SHARE_KV = True  # linformer: keys and values share one projection.
# performer: the largest key score is taken over the whole batch, as for the original's checkpoints,
# so that an image's result depends on the others; else over the image.
_C.MODEL.VIT.MSVIT.PERFORMER_BATCH_MAX = False
# srformer on maps that f does not divide: pad them, or drop the last rows and columns, as for the
# original's checkpoints.
_C.MODEL.VIT.MSVIT.SR_RAGGED = "pad"
_C.MODEL.VIT.MSVIT.ONLY_GLOBAL = False  # longformer: local tokens see only the global ones.
# longformer's window: 1 exact, |dx| and |dy| <= f; 0 the 3 x 3 chunks, cut at the border; -1 the
# 3 x 3 chunks, wrapped around the image.
_C.MODEL.VIT.MSVIT.SW_EXACT = 0
_C.MODEL.VIT.MSVIT.LN_EPS = 1e-6  # Epsilon of every LayerNorm. The original ignored it.
# longformer's chunks: 0 all nine, -1 only the query's own, above 0 the own one and a random
# neighbour while training (random shift).
_C.MODEL.VIT.MSVIT.MODE = 0
_C.MODEL.VIT.MSVIT.VIL_MODE_SWITCH = 0.75  # Part of the epochs after which random shift ends.

_C.FINETUNE = CfgNode()  # Starting from trained weights.
_C.FINETUNE.FINETUNE = False  # Train on resized random crops only, without further augmentation.
_C.FINETUNE.USE_TRAIN_AUG = False  # Fine-tune with the full augmentation after all.
# A head of another size than the weights': keep refuses it, new starts afresh, rows:FILE takes the
# rows of the old head whose numbers stand in FILE.
_C.FINETUNE.HEAD = "keep"
# Positions of another size: stretched, linear as in 2021, or bicubic; extend keeps relative ones at
# their distance in tokens, for another window on images of the same size.
_C.FINETUNE.RESIZE = "linear"
_C.FINETUNE.FREEZE_STAGES = 0  # Number of first stages whose parameters are not trained.

# Detectors of torchvision on the stages' maps. DATA.NUM_CLASSES counts the categories without the
# background, INPUT.IMAGE_SIZE is the longest side that positions are made for.
_C.DETECTION = CfgNode()
_C.DETECTION.MODEL = ""  # mask_rcnn, faster_rcnn or retinanet; empty: a classifier.
# Torchvision's first heads, or the second ones: deeper and with norms, and GIoU for retinanet.
_C.DETECTION.HEADS = "v1"
_C.DETECTION.FPN = CfgNode()  # The feature pyramid.
_C.DETECTION.FPN.STAGES = [1, 2, 3, 4]  # Stages that it takes; retinanet has no 1.
_C.DETECTION.FPN.CHANNELS = 256  # Of each level; retinanet's head is as wide.
_C.DETECTION.FPN.NORM = False  # A LayerNorm on each stage's map before the pyramid.
_C.DETECTION.ANCHORS = CfgNode()  # The boxes that a detector starts from.
# Side in pixels of each level's anchors, the finest first; one more than stages (the pooled level),
# for retinanet none to two more (P6, P7).
_C.DETECTION.ANCHORS.SIZES = [32, 64, 128, 256, 512]
_C.DETECTION.ANCHORS.OCTAVES = 1  # Sizes per level: side * 2^(i / OCTAVES); retinanet takes 3.
_C.DETECTION.ANCHORS.RATIOS = [0.5, 1.0, 2.0]  # Height over width.
_C.DETECTION.RPN = CfgNode()  # The region proposals of mask_rcnn and faster_rcnn.
_C.DETECTION.RPN.PRE_NMS_TRAIN = 2000  # Proposals of each level before suppression, in training.
_C.DETECTION.RPN.PRE_NMS_TEST = 1000  # The same in evaluation.
_C.DETECTION.RPN.POST_NMS_TRAIN = 1000  # Proposals of an image after suppression, in training.
_C.DETECTION.RPN.POST_NMS_TEST = 1000  # The same in evaluation.
_C.DETECTION.RPN.SAMPLES = 256  # Anchors of an image that the loss is a mean over.
_C.DETECTION.BOX = CfgNode()  # The box head of mask_rcnn and faster_rcnn.
_C.DETECTION.BOX.CHANNELS = 1024  # Width of its hidden layers.
_C.DETECTION.BOX.SAMPLES = 512  # Proposals of an image that it learns from.
_C.DETECTION.BOX.POSITIVE = 0.25  # Largest part of them that lies on an object.
# A proposal is pooled to 7 x 7 cells, each a mean of that many points squared; 0: as many as it has
# cells of the map.
_C.DETECTION.BOX.SAMPLING_RATIO = 2
_C.DETECTION.MASK = CfgNode()  # The mask head of mask_rcnn.
_C.DETECTION.MASK.CHANNELS = 256  # Width of its convolutions.
_C.DETECTION.MASK.LAYERS = 4  # Number of its convolutions before the upsampling.
_C.DETECTION.MASK.SAMPLING_RATIO = 2  # As DETECTION.BOX.SAMPLING_RATIO, of 14 x 14 cells.
_C.DETECTION.TEST = CfgNode()  # What counts as a detection.
_C.DETECTION.TEST.SCORE = 0.05  # Smallest score.
_C.DETECTION.TEST.NMS = 0.5  # Of two boxes of a class that overlap more, one goes.
_C.DETECTION.TEST.PER_IMAGE = 100  # Largest number of an image.
# Prediction cuts an image into tiles of so many pixels a side; 0: the image as a whole.
_C.DETECTION.TEST.TILE = 0
_C.DETECTION.TEST.OVERLAP = -1  # Pixels that tiles share; -1: a quarter of a tile.
_C.DETECTION.INPUT = CfgNode()  # How pictures are resized and augmented.
_C.DETECTION.INPUT.TRAIN_SIZES = [800]  # Shorter sides in training, one of them drawn.
_C.DETECTION.INPUT.TEST_SIZE = 800  # Shorter side in evaluation.
_C.DETECTION.INPUT.MAX_SIZE = 1333  # The longer side is at most this.
_C.DETECTION.INPUT.FLIP = 0.5  # Probability of a horizontal flip in training.
# Large-scale jitter instead of TRAIN_SIZES: smallest and largest factor, such as [0.1, 2.0], of
# a picture that fits MAX_SIZE; crops and padding to MAX_SIZE. Empty: none.
_C.DETECTION.INPUT.JITTER = []
_C.DETECTION.INPUT.GROUP_ASPECTS = True  # A batch has wide pictures, or tall ones.
_C.DETECTION.INPUT.KEEP_EMPTY = False  # Train on pictures without a box too.

_C.RUN = CfgNode()  # What happens between epochs, and what a run survives.
_C.RUN.EVAL_EVERY = 1  # Epochs between evaluations.
_C.RUN.SAVE_EVERY = 1  # Epochs between checkpoints.
_C.RUN.SAVE_STEPS = 0  # Steps between further checkpoints; 0: none.
_C.RUN.KEEP = 2  # Checkpoints kept besides the best one.
_C.RUN.KEEP_EVERY = 0  # Epochs between checkpoints that are never removed; 0: none.
# Resume although model, data or batches are other than they were; not kept for the next start.
# Weights of other shapes, another optimizer, another number of images in a step and of steps in an
# epoch are refused all the same.
_C.RUN.ALLOW_CHANGES = False
# Steps in a row that may be skipped because their loss or a gradient is not finite (half an epoch,
# if that is less); one more ends the run.
_C.RUN.MAX_BAD_STEPS = 10
_C.RUN.MAX_FAILED_SAVES = 3  # Checkpoints in a row that cannot be written and end the run.
# Seconds without an end of a step, an evaluation batch or a checkpoint after which the process is
# taken to hang, prints its stacks and ends; 0: never.
_C.RUN.HANG_SECONDS = 1800.0
_C.RUN.GRACE_SECONDS = 30.0  # The same after SIGTERM, SIGUSR1 or Ctrl-C.

_C.OUTPUT_DIR = "runs/default"  # Folder of the run; the flag --output_dir sets it.
_C.BACKUP_LOG_DIR = ""  # Second folder for logs.
_C.LOG_FREQ = 10  # Iterations between two log lines.
_C.EVALUATE = False  # Evaluate only.
_C.OUTPUT_PERCLASS_ACC = False  # Evaluation reports the accuracy of every class.
_C.ONLY_SAVE_LAST = 0  # Non-zero: keep only the newest checkpoint besides the best one.
_C.DISTRIBUTED = CfgNode()  # Several processes.
# ddp: each has the whole model; fsdp: weights, gradients and momenta are spread over them, each
# block gathered while it is computed.
_C.DISTRIBUTED.STRATEGY = "ddp"
_C.DISTRIBUTED_BACKEND = "nccl"  # Process group between GPUs; CPU runs use gloo.
_C.GATHER_ON_CPU = False  # Gather predictions in main memory when evaluating with many processes.
_C.DEVICE = "auto"  # auto: the first of cuda, mps, cpu that is there.
_C.SEED = 0  # Seed of every random draw; runs are always seeded. The flag --seed sets it.
_C.DETERMINISTIC = False  # Only deterministic kernels: same bits on the same machine, slower.
# What is learned: a name of the registry of tasks; detection where DETECTION.MODEL is set and
# nothing else is said.
_C.TASK = "classification"
# Python files and plug-ins that register components, run before all else; --import FILE adds one.
_C.IMPORTS = ()
_C.VERSION = 1  # Version of this tree; a file that says so is not taken for one of 2021.

# Nodes in which a file or the command line may add keys of its own.
EXTENSIBLE = ("AUG.TIMM_AUG", "DATA.KWARGS")

# What the same thing is called in Swin's and detectron2's trees, by the last name.
ALIASES = {
    "BASE_LR": "OPTIM.LR",
    "WEIGHT_DECAY": "OPTIM.WD",
    "BATCH_SIZE": "DATALOADER.BSZ",
    "IMS_PER_BATCH": "DATALOADER.BSZ",
    "NUM_WORKERS": "DATALOADER.WORKERS",
    "IMG_SIZE": "INPUT.IMAGE_SIZE",
    "DROP_PATH_RATE": "MODEL.VIT.DROP_PATH",
    "CUTMIX": "AUG.MIXCUT",
    "REPROB": "AUG.TIMM_AUG.RE_PROB",
    "WEIGHTS": "MODEL.MODEL_PATH",
    "ACCUMULATION_STEPS": "OPTIM.ACCUMULATE",
    "POOLER_SAMPLING_RATIO": "DETECTION.BOX.SAMPLING_RATIO",
}

# Accepted because old files hold them; they never did anything. Setting one earns a warning.
IGNORED_KEYS = {
    "AUG.DROPBLOCK_LAYERS": "no DropBlock was ever built",
    "AUG.DROPBLOCK_KEEP_PROB": "no DropBlock was ever built",
    "AUG.DROPBLOCK_BLOCK_SIZE": "no DropBlock was ever built",
    "AUG.MIXCUT_AND_MIXUP": "AUG.MIXUP_SWITCH_PROB decides",
    "AUG.TIMM_AUG.RE_SPLIT": "nothing hands it to timm",
    "DATALOADER.RE": "nothing reads it",
    "OPTIM.WARMUP": "SOLVER.WARMUP_EPOCHS decides",
    "OPTIM.TEST_FREQ": "RUN.EVAL_EVERY decides",
    "MODEL.NONLINEARITY": "the networks fix their activations",
    "MODEL.FREEZE_CONV_BODY_AT": "nothing reads it",
    "BACKUP_LOG_DIR": "logs have one place, OUTPUT_DIR",
    "GATHER_ON_CPU": "evaluation exchanges counts, not predictions",
}


class Rule(NamedTuple):
    """What values of one key are allowed, for the machine and for the reader."""

    holds: Callable[[Any], bool]
    sentence: str
    choices: tuple[str, ...] = ()  # among which the nearest is proposed

    def proposal(self, value: Any) -> str | None:
        """The choice most like a word of the value that is none."""
        words = [word for word in re.split("[,/]", str(value)) if word not in self.choices]
        near = difflib.get_close_matches(words[0].lower(), self.choices, 1) if words else []
        return next(iter(near), None)


def one_of(*choices: Any) -> Rule:
    shown = ", ".join(str(choice) if choice != "" else "''" for choice in choices)
    return Rule(lambda value: value in choices, f"one of {shown}", tuple(map(str, choices)))


class RegistryRule:
    """A name of a registry; those registered at run time count. Reads like a `Rule`."""

    def __init__(self, kind: str, extra: tuple[str, ...] = (), *, several: bool = False):
        """extra: further names. several: a value may join several names by , and /."""
        self.kind, self.extra, self.several = kind, extra, several

    def holds(self, value: str) -> bool:
        names = names_in(value) if self.several else [value]
        return all(name in self.choices for name in names)

    @property
    def choices(self) -> tuple[str, ...]:
        return (*registry(self.kind), *self.extra)

    @property
    def sentence(self) -> str:
        joined = ", or several joined by , and /" if self.several else ""
        return f"one of {', '.join(name or repr(name) for name in self.choices)}{joined}"

    proposal = Rule.proposal


def at_least(low: float) -> Rule:
    return Rule(lambda value: value >= low, f"at least {low}")


def between(low: float, high: float) -> Rule:
    return Rule(lambda value: low <= value <= high, f"between {low} and {high}")


def matches(pattern: str, sentence: str) -> Rule:
    return Rule(lambda value: re.fullmatch(pattern, value) is not None, sentence)


def names_in(attention: str) -> list[str]:
    """The names in a value of ATTN_TYPE."""
    return re.split("[,/]", attention)


def is_range(value: tuple[float, ...]) -> bool:
    return len(value) == 2 and 0 < value[0] <= value[1]


positive = Rule(lambda value: value > 0, "above 0")
share = between(0, 1)
below_one = Rule(lambda value: 0 <= value < 1, "at least 0 and below 1")
filled = Rule(lambda value: len(value) > 0 and "" not in value, "not empty")
folder = Rule(lambda value: value != "", "not empty")

MSVIT = "MODEL.VIT.MSVIT"
# One row per key whose type alone does not say what is allowed.
CHECKS = {
    "INPUT.MEAN": Rule(lambda value: len(value) in (1, 3), "one or three numbers"),
    "INPUT.STD": Rule(lambda v: len(v) in (1, 3) and min(v) > 0, "one or three numbers above 0"),
    "INPUT.IMAGE_SIZE": at_least(1),
    "INPUT.CROP_PCT": Rule(lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "INPUT.INTERPOLATION": one_of(2, 3),
    "AMP.DTYPE": one_of("bfloat16", "float16"),
    "AMP.MEMORY_FORMAT": one_of("nchw", "nhwc"),
    "AUG.SCALE": Rule(lambda v: is_range(v) and v[1] <= 1, "two numbers, 0 < low <= high <= 1"),
    "AUG.RATIO": Rule(is_range, "two numbers, 0 < low <= high"),
    "AUG.COLOR_JITTER": Rule(
        lambda v: len(v) == 5 and min(v) >= 0 and v[3] <= 0.5 and v[4] <= 1,
        "five numbers from 0; hue at most 0.5, probability at most 1",
    ),
    "AUG.GRAY_SCALE": share,
    "AUG.GAUSSIAN_BLUR": share,
    "AUG.MIXUP_PROB": share,
    "AUG.MIXUP": at_least(0),
    "AUG.MIXCUT": at_least(0),
    "AUG.MIXCUT_MINMAX": Rule(
        lambda v: not v or (is_range(v) and v[1] <= 1), "empty, or 0 < low <= high <= 1"
    ),
    "AUG.MIXUP_SWITCH_PROB": share,
    "AUG.MIXUP_MODE": one_of("batch", "pair", "elem"),
    "AUG.TIMM_AUG.RE_PROB": share,
    "AUG.TIMM_AUG.RE_MODE": one_of("const", "rand", "pixel"),
    "AUG.TIMM_AUG.RE_COUNT": at_least(1),
    "AUG.TIMM_AUG.HFLIP": share,
    "AUG.TIMM_AUG.VFLIP": share,
    "AUG.TIMM_AUG.COLOR_JITTER": at_least(0),
    "AUG.TIMM_AUG.AUTO_AUGMENT": matches(
        r"|(rand|augmix|originalr?|v0r?|3a)(-.*)?", "empty, or a policy: rand-..., augmix-..., v0"
    ),
    "DATA.TRAIN": filled,
    "DATA.TEST": filled,
    "DATA.NUM_CLASSES": at_least(1),
    "DATA.PATH": folder,
    "DATA.MAX_BAD_FRACTION": share,
    "LOSS.LOSS": RegistryRule("loss", extra=("multisoftmax", "mse")),
    "LOSS.LABEL_SMOOTHING": below_one,
    "LOSS.FOCAL.ALPHA": at_least(0),
    "LOSS.FOCAL.GAMMA": at_least(0),
    "DATALOADER.BSZ": at_least(1),
    "DATALOADER.WORKERS": at_least(0),
    "OPTIM.OPT": RegistryRule("optimizer"),
    "OPTIM.LR": positive,
    "OPTIM.MOM": below_one,
    "OPTIM.NU": share,
    "OPTIM.WD": at_least(0),
    "OPTIM.WD0": at_least(0),
    "OPTIM.EPOCHS": at_least(1),
    "OPTIM.CLIP_GRAD": at_least(0),
    "OPTIM.ACCUMULATE": at_least(1),
    "OPTIM.LAYER_DECAY": Rule(lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "OPTIM.EMA": below_one,
    "OPTIM.DROP_FREQ": at_least(1),
    "OPTIM.DROP_EPOCHS": Rule(
        lambda v: list(v) == sorted(v) and all(n > 0 for n in v), "empty, or ascending epochs"
    ),
    "OPTIM.DROP_FACTOR": positive,
    "OPTIM.VAL": at_least(0),
    "OPTIM.ADAM.BETA1": below_one,
    "OPTIM.ADAM.BETA2": below_one,
    "OPTIM.ADAM.EPS": positive,
    "SOLVER.LR_POLICY": RegistryRule("schedule"),
    "SOLVER.WARMUP_FACTOR": share,
    "SOLVER.WARMUP_EPOCHS": at_least(0),
    "SOLVER.WARMUP_METHOD": one_of("linear", "constant"),
    "SOLVER.MIN_LR": at_least(0),
    "MODEL.ARCH": matches(r"[a-z][a-z0-9_]*|timm/\S+", "msvit, a torchvision name or timm/<name>"),
    "MODEL.VIT.DROP": below_one,
    "MODEL.VIT.DROP_PATH": below_one,
    "MODEL.VIT.POS_RESIZE": one_of("interpolate", "crop"),
    f"{MSVIT}.ATTN_TYPE": RegistryRule(
        "attention", extra=tuple(LEGACY_ATTN_BACKENDS), several=True
    ),
    f"{MSVIT}.BACKEND": matches(r"[a-z]\w*(\+[a-z]\w*)?", "auto, a name, or forward+backward"),
    f"{MSVIT}.SR_RAGGED": one_of("pad", "drop"),
    f"{MSVIT}.SW_EXACT": one_of(-1, 0, 1),
    f"{MSVIT}.LN_EPS": positive,
    f"{MSVIT}.MODE": between(-1, 8),
    f"{MSVIT}.VIL_MODE_SWITCH": share,
    "FINETUNE.HEAD": matches(r"keep|new|rows:.+", "keep, new or rows:FILE"),
    "FINETUNE.RESIZE": one_of("linear", "bicubic", "extend"),
    "FINETUNE.FREEZE_STAGES": at_least(0),
    "DETECTION.MODEL": one_of("", "mask_rcnn", "faster_rcnn", "retinanet"),
    "DETECTION.HEADS": one_of("v1", "v2"),
    "DETECTION.FPN.STAGES": Rule(
        lambda v: v and v == sorted(set(v)) and v[0] > 0, "ascending numbers of stages from 1"
    ),
    "DETECTION.FPN.CHANNELS": at_least(1),
    "DETECTION.ANCHORS.SIZES": Rule(lambda v: v and min(v) > 0, "a number above 0 for each level"),
    "DETECTION.ANCHORS.OCTAVES": at_least(1),
    "DETECTION.ANCHORS.RATIOS": Rule(lambda v: v and min(v) > 0, "numbers above 0"),
    "DETECTION.RPN.PRE_NMS_TRAIN": at_least(1),
    "DETECTION.RPN.PRE_NMS_TEST": at_least(1),
    "DETECTION.RPN.POST_NMS_TRAIN": at_least(1),
    "DETECTION.RPN.POST_NMS_TEST": at_least(1),
    "DETECTION.RPN.SAMPLES": at_least(1),
    "DETECTION.BOX.CHANNELS": at_least(1),
    "DETECTION.BOX.SAMPLES": at_least(1),
    "DETECTION.BOX.POSITIVE": Rule(lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "DETECTION.BOX.SAMPLING_RATIO": at_least(0),
    "DETECTION.MASK.CHANNELS": at_least(1),
    "DETECTION.MASK.LAYERS": at_least(1),
    "DETECTION.MASK.SAMPLING_RATIO": at_least(0),
    "DETECTION.TEST.SCORE": below_one,
    "DETECTION.TEST.NMS": share,
    "DETECTION.TEST.PER_IMAGE": at_least(1),
    "DETECTION.TEST.TILE": at_least(0),
    "DETECTION.TEST.OVERLAP": at_least(-1),
    "DETECTION.INPUT.TRAIN_SIZES": Rule(lambda v: v and min(v) > 0, "numbers above 0"),
    "DETECTION.INPUT.TEST_SIZE": at_least(1),
    "DETECTION.INPUT.MAX_SIZE": at_least(1),
    "DETECTION.INPUT.FLIP": share,
    "DETECTION.INPUT.JITTER": Rule(lambda v: not v or is_range(v), "empty, or 0 < low <= high"),
    "RUN.EVAL_EVERY": at_least(1),
    "RUN.SAVE_EVERY": at_least(1),
    "RUN.SAVE_STEPS": at_least(0),
    "RUN.KEEP": at_least(1),
    "RUN.KEEP_EVERY": at_least(0),
    "RUN.MAX_BAD_STEPS": at_least(0),
    "RUN.MAX_FAILED_SAVES": at_least(1),
    "RUN.HANG_SECONDS": at_least(0),
    "RUN.GRACE_SECONDS": positive,
    "OUTPUT_DIR": folder,
    "LOG_FREQ": at_least(1),
    "ONLY_SAVE_LAST": at_least(0),
    "DISTRIBUTED.STRATEGY": one_of("ddp", "fsdp"),
    "DISTRIBUTED_BACKEND": one_of("nccl", "gloo", "mpi"),
    "DEVICE": matches(r"auto|cpu|mps|cuda(:\d+)?", "auto, cpu, mps, cuda or cuda:N"),
    "SEED": between(0, 2**32 - 1),
    "TASK": RegistryRule("task"),
    "VERSION": one_of(1),
}


class Conflict(NamedTuple):
    """Keys whose values, each allowed alone, do not go together."""

    keys: tuple[str, ...]
    found: Callable[..., bool]  # takes the keys' values in order
    sentence: str


CONFLICTS = (
    Conflict(
        ("DETECTION.TEST.OVERLAP", "DETECTION.TEST.TILE"),
        lambda overlap, tile: overlap >= 0 and tile == 0,
        "the overlap is that of tiles: set DETECTION.TEST.TILE (--tile), too",
    ),
    Conflict(
        ("DETECTION.TEST.OVERLAP", "DETECTION.TEST.TILE"),
        lambda overlap, tile: 0 < tile <= overlap,
        "the overlap must be smaller than the tile",
    ),
    Conflict(
        (f"{MSVIT}.SW_EXACT", f"{MSVIT}.MODE"),
        lambda exact, mode: exact == 1 and mode != 0,
        "exact window with random shift: SW_EXACT 1 has no chunks to choose from and needs MODE 0",
    ),
    Conflict(
        (f"{MSVIT}.ATTN_TYPE", f"{MSVIT}.BACKEND"),
        lambda value, backend: (
            backend != "auto" and any(n in LEGACY_ATTN_BACKENDS for n in names_in(value))
        ),
        "this ATTN_TYPE already pins a backend; write ATTN_TYPE longformer to choose another",
    ),
    Conflict(
        ("AUG.MIXUP_PROB", "AUG.MIXUP", "AUG.MIXCUT", "AUG.MIXCUT_MINMAX"),
        lambda prob, mixup, cutmix, minmax: prob > 0 and not (mixup or cutmix or minmax),
        "there is nothing to mix with: set AUG.MIXUP or AUG.MIXCUT above 0",
    ),
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
        ("OPTIM.VAL", "SOLVER.LR_POLICY"),
        lambda drops, policy: drops != 0 and policy != "",
        "the schedule would undo the drops: leave SOLVER.LR_POLICY empty",
    ),
    Conflict(
        ("OPTIM.VAL", "OPTIM.OPT"),
        lambda drops, name: drops and not registry("optimizer")[name].facts.get("drops_on_plateau"),
        "only sgd and qhm drop their rate by evaluation",
    ),
    Conflict(
        ("SOLVER.USE_LARC", "OPTIM.OPT"),
        lambda larc, name: larc and name not in ("sgd", "larc"),
        "LARC wraps sgd only",
    ),
)


def leaves(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{dotted key: value} of a tree, in its order."""
    found = {}
    for name, value in node.items():
        inner = isinstance(value, CfgNode)
        found |= leaves(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return found


def tree() -> CfgNode:
    """A fresh copy of the tree, free to be changed."""
    return _C.clone()


def tree_at(node: str) -> CfgNode:
    """A fresh copy of one node."""
    return functools.reduce(CfgNode.__getitem__, node.split("."), tree())


KEYS = leaves(_C)  # {key: default}
SECTIONS = {key[: dot.start()] for key in KEYS for dot in re.finditer(r"\.", key)} | {*EXTENSIBLE}


COMPONENT_KEYS: dict[str, Key] = {}  # those that components registered at run time added


def add_component_keys() -> None:
    """Add to the tree the keys of components that were registered at run time, each once."""
    for kind in HOMES:
        for entry in registry(kind).values():
            for key in entry.keys.values():
                if isinstance(key, Key) and key.name not in COMPONENT_KEYS:
                    _add_key(key, f"{kind} {entry.name}")


def _add_key(key: Key, owner: str) -> None:
    *path, name = key.name.split(".")
    if key.name in KEYS or key.name in SECTIONS or not all(map(str.isidentifier, [*path, name])):
        raise ConfigError(f"{owner}: the key {key.name} cannot be added, or is there already")
    node = _C
    for step in path:
        node = node.setdefault(step, CfgNode())
    node[name] = KEYS[key.name] = key.default
    SECTIONS.update(".".join(path[:depth]) for depth in range(1, len(path) + 1))
    COMPONENT_KEYS[key.name] = key
    if key.check:
        CHECKS[key.name] = Rule(key.check, key.allowed or "another value")


def is_known(key: str) -> bool:
    """Whether a key is declared or may be added. A new name in an open node that looks like a
    declared one is a typing error, and would be a silent one."""
    if key in KEYS or key in SECTIONS:
        return True
    node, _, name = key.rpartition(".")
    if node not in EXTENSIBLE or not name.isidentifier():
        return False
    declared = [last(key) for key in KEYS if key.startswith(f"{node}.")]
    return not any(likeness(name, other) >= 0.8 for other in declared)


def nearest(key: str) -> str | None:
    """The declared key most like `key`, if one is: by whole path and by last name, so that `LR`
    finds OPTIM.LR."""
    if last(key).upper() in ALIASES:
        return ALIASES[last(key).upper()]
    scores = {name: likeness(key, name) + likeness(last(key), last(name)) for name in KEYS}
    best = max(scores, key=scores.__getitem__)
    return best if scores[best] > 1 else None


def last(key: str) -> str:
    return key.rpartition(".")[2]


def likeness(given: str, name: str) -> float:
    return difflib.SequenceMatcher(None, given[:80].upper(), name, autojunk=False).ratio()


def meanings() -> dict[str, str]:
    """{key or node: its comment}, read from the source of this file, the only place they stand."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in Path(__file__).read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            above.append(line[2:])
            continue
        key = re.match(r"_C\.([\w.]+) = .*?(?:  # (.*))?$", line)
        if key:
            found[key[1]] = key[2] or " ".join(above)
        above.clear()
    for name, key in COMPONENT_KEYS.items():
        found[name] = key.meaning
        for dot in re.finditer(r"\.", name):
            found.setdefault(name[: dot.start()], "Keys of components registered at run time.")
    return found
