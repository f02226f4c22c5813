"""Compare two runs: the contents of their last checkpoints, and the samples of their steps."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import torch

from tests.common.small_runs import TINY, checkpoint

# All that draws random numbers: dropout, drop path, random shift, mixup, cutmix, RandAugment,
# random erasing, crops; with accumulation, an average, and checkpoints within epochs.
EVERYTHING = (
    *TINY, "DATALOADER.BSZ=8", "OPTIM.ACCUMULATE=2", "OPTIM.OPT=adamw", "OPTIM.LR=1e-3",
    "OPTIM.EMA=0.9", "OPTIM.CLIP_GRAD=1", "SOLVER.LR_POLICY=cosine", "SOLVER.WARMUP_EPOCHS=1",
    "MODEL.VIT.MSVIT.MODE=1", "MODEL.VIT.MSVIT.VIL_MODE_SWITCH=0.75", "MODEL.VIT.DROP=0.1",
    "MODEL.VIT.DROP_PATH=0.3", "AUG.MIXUP_PROB=0.8", "AUG.MIXUP=0.8", "AUG.MIXCUT=1.0",
    "AUG.TIMM_AUG.USE_TRANSFORM=True", "AUG.TIMM_AUG.RE_PROB=0.5", "LOSS.LABEL_SMOOTHING=0.1",
    "AUG.TIMM_AUG.AUTO_AUGMENT=rand-m9-mstd0.5-inc1", "RUN.SAVE_STEPS=4", "RUN.EVAL_EVERY=2",
    "SEED=3",
)  # fmt: skip
WITNESS = str(Path(__file__).with_name("witness.py"))


def fingerprint(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of a checkpoint's weights and EMA weights (the files), and of the contents
    of its state.pt, by dtype, shape and bytes: optimizer, position, and the float16 loss scale.
    Not of the plug-ins, of which one causes the fault."""
    saved = torch.load(checkpoint / "state.pt", weights_only=True)
    saved["state"].pop("imports", None)
    parts = {name: as_bytes(part) for name, part in saved.items() if part}
    parts |= {file.stem: file.read_bytes() for file in checkpoint.glob("*.safetensors")}
    return {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()}


def as_bytes(part) -> bytes:
    if isinstance(part, dict):
        return b"".join(as_bytes(key) + as_bytes(part[key]) for key in sorted(part, key=str))
    if isinstance(part, torch.Tensor):
        return repr((part.dtype, part.shape)).encode() + part.numpy().tobytes()
    return repr(part).encode()


def assert_same_end(folder, other) -> None:
    """The last checkpoints of two runs with EMA are equal, bit for bit."""
    ours, theirs = (fingerprint(checkpoint(run)) for run in (folder, other))
    assert {"model", "ema", "optimizer", "state"} <= ours.keys()
    assert ours == theirs


def order(folder) -> dict[int, list[int]]:
    """Return {step: samples of all ranks}, as logged by the witness. A repeated step must have the
    same samples."""
    places = {}
    for rank, file in enumerate(sorted(Path(folder).parent.glob(f"{Path(folder).name}.seen-*"))):
        for step, samples in map(json.loads, file.read_text().splitlines()):
            assert places.setdefault((step, rank), samples) == samples
    steps = {step: [] for step, _ in sorted(places)}
    for step, rank in sorted(places):
        steps[step] += places[step, rank]
    return steps


def miscounted(steps, per_epoch: int, images: int) -> int:
    """Count samples that occur more than once or never in an epoch, over all epochs."""
    wrong = 0
    for first in range(0, len(steps), per_epoch):
        epoch = (steps[step] for step in range(first, first + per_epoch))
        counts = Counter(sample for samples in epoch for sample in samples)
        wrong += sum(abs(counts[sample] - 1) for sample in range(images))
    return wrong
