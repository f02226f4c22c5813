"""The plan of a streamed forward pass: what each stage stores, with its memory and compute cost.

Shapes: X Y grid of a stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vil.utils.text_table import align

UNITS = {letter: 1024**n for n, letter in enumerate(("", *"kmgt"))}


def parse_bytes(text: int | float | str) -> int:
    """Convert a number, or text such as "1.5GiB" or "800 MB", to a number of bytes. MB means MiB.

    Raises ValueError for text that is not a size, and for a size below 1 byte.
    """
    digits, unit = str(text).strip().lower(), ""
    while digits and not (digits[-1].isdigit() or digits[-1] == "."):
        digits, unit = digits[:-1], digits[-1] + unit
    try:
        size = int(float(digits) * UNITS[unit.strip().removesuffix("b").removesuffix("i")])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise ValueError(f"memory must be a number of bytes such as 800MiB or 1.5GiB, got {text!r}")
    return size


def format_bytes(size: int) -> str:
    """Format a size in bytes, such as "1.25 GiB" or "800 MiB"."""
    for unit, factor in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size >= factor:
            digits = 2 if size < 10 * factor else 0
            return f"{size / factor:.{digits}f} {unit}"
    return f"{size} B"


@dataclass(frozen=True)
class StagePlan:
    """The plan of one stage, which is computed in strips of a few rows of tokens.

    name: module name. grid: (X, Y).
    action: "memory" or "scratch" (files on disk) if tokens are stored there between passes.
    "recompute" if they are not stored, but computed when the next stage reads them.
    num_passes: number of passes that compute tokens. The last pass may be one of the next stage.
    num_barriers: number of blocks that must wait for the global tokens of the previous block,
    until that block has processed all rows.
    heights: for each block, the rows in a strip.
    halo: the most rows that a strip reads above or below itself.
    store_bytes: total size of the stored tokens.
    peak_bytes: peak bytes of tensors while tokens are stored; 0 if they are not stored. The value
    of the last stage includes the final pass.
    macs: multiply-accumulates of matmuls if the image is streamed.
    whole_macs: the same if the full image is processed at once.
    """

    name: str
    grid: tuple[int, int]
    action: str
    num_passes: int
    num_barriers: int
    heights: tuple[int, ...]
    halo: int
    store_bytes: int
    peak_bytes: int
    macs: int
    whole_macs: int


@dataclass(frozen=True)
class StreamPlan:
    """The plan of a streamed forward pass for one image size, see `vil.plan_stream`.

    size: (H, W) in pixels. memory: limit in bytes. peak_bytes: peak bytes of tensors, excluding the
    weights, the image and the caller's arrays. output_bytes: bytes of the outputs for which the
    caller gave no arrays. pad: whether incomplete patches are padded, see `vil.streaming.prepare`.
    """

    size: tuple[int, int]
    outputs: tuple[str, ...]
    memory: int
    peak_bytes: int
    output_bytes: int
    stages: tuple[StagePlan, ...]
    pad: bool = False

    @property
    def scratch_bytes(self) -> int:
        """The bytes of the tokens that are stored on disk."""
        return sum(stage.store_bytes for stage in self.stages if stage.action == "scratch")

    @property
    def macs(self) -> int:
        """Multiply-accumulates of all stages if the image is streamed."""
        return sum(stage.macs for stage in self.stages)

    @property
    def work_ratio(self) -> float:
        """Multiply-accumulates if the image is streamed, divided by the multiply-accumulates if the
        full image is processed at once."""
        return self.macs / max(1, sum(stage.whole_macs for stage in self.stages))

    def __str__(self) -> str:
        rows = [_row_of(stage) for stage in self.stages]
        head = ("stage", "grid", "tokens", "passes", "barriers", "strip", "halo", "peak", "work")
        lines = [
            f"{self.size[0]} x {self.size[1]} pixels in {format_bytes(self.memory)}: "
            f"peak {format_bytes(self.peak_bytes)}, scratch {format_bytes(self.scratch_bytes)}, "
            f"work {self.work_ratio:.3f} of the whole image's "
            f"{self.macs / self.work_ratio:.3g} multiply-accumulates"
        ]
        return "\n".join([*lines, align([head, *rows])])


def _row_of(stage: StagePlan) -> Sequence[str]:
    return (
        stage.name,
        f"{stage.grid[0]} x {stage.grid[1]}",
        stage.action if stage.action == "recompute" else f"in {stage.action}",
        str(stage.num_passes),
        str(stage.num_barriers),
        f"{min(stage.heights)} rows" if stage.heights else "-",
        str(stage.halo),
        format_bytes(stage.peak_bytes) if stage.peak_bytes else "-",
        f"{stage.macs / max(1, stage.whole_macs):.3f}",
    )
