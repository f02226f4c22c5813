"""The plan of a streamed forward pass: what each stage keeps, and what that costs.

Shapes: X Y grid of a stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vil.utils.text_table import align

UNITS = {"": 1, "b": 1}
UNITS |= {
    f"{letter}{end}": 1024**n for n, letter in enumerate("kmgt", 1) for end in ("", "b", "ib")
}


def parse_bytes(text: int | float | str, name: str = "memory") -> int:
    """Return a number of bytes, from a number or text such as "1.5GiB" or "800 MB" (1 MB = 1 MiB).

    Raises ValueError, which names the argument `name`, for anything else and for less than 1 byte.
    """
    digits, unit = str(text).strip().lower(), ""
    while digits and not (digits[-1].isdigit() or digits[-1] == "."):
        digits, unit = digits[:-1], digits[-1] + unit
    try:
        size = int(float(digits) * UNITS[unit.strip().removesuffix("b").removesuffix("i")])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise ValueError(f"{name} must be a number of bytes such as 800MiB or 1.5GiB, got {text!r}")
    return size


def format_bytes(size: int) -> str:
    """Return a size in bytes as text of three or four digits, such as 1.25 GiB."""
    for unit, factor in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size >= factor:
            digits = 2 if size < 10 * factor else 0
            return f"{size / factor:.{digits}f} {unit}"
    return f"{size} B"


@dataclass(frozen=True)
class StagePlan:
    """What a stage does.

    name: of the module. grid: (X, Y). action: "recompute" (computed when the next stage reads it,
    never stored), or where its tokens are stored between its passes: "memory" or "scratch".
    num_passes: passes over the stage's tokens. num_barriers: those after which global tokens are
    completed. heights: rows of a strip, for each block. halo: rows that a strip needs above and
    below. store_bytes: of the stored tokens, all copies. peak_bytes: the most bytes of tensors at
    once while the stage is the one that drives the pass; 0 if another one does.
    macs, whole_macs: multiply-accumulates of matmuls, streamed and of the whole image at once.
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
    """The plan for one image size, see `vil.plan_stream`.

    size: (H, W) in pixels. outputs: names. memory: the limit in bytes. peak_bytes: the most bytes
    of tensors at once, beyond the weights, the image and arrays of the caller. output_bytes: those
    of the outputs that the caller gave no arrays for. scratch_bytes: on disk.
    """

    size: tuple[int, int]
    outputs: tuple[str, ...]
    memory: int
    peak_bytes: int
    output_bytes: int
    stages: tuple[StagePlan, ...]

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the tokens that are stored on disk."""
        return sum(stage.store_bytes for stage in self.stages if stage.action == "scratch")

    @property
    def macs(self) -> int:
        """Multiply-accumulates of all stages."""
        return sum(stage.macs for stage in self.stages)

    @property
    def work_ratio(self) -> float:
        """The matmul work divided by that of the whole image at once."""
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
        f"{min(stage.heights)} rows",
        str(stage.halo),
        format_bytes(stage.peak_bytes) if stage.peak_bytes else "-",
        f"{stage.macs / max(1, stage.whole_macs):.3f}",
    )
