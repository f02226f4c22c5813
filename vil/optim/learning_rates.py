"""Scale learning rates with the batch size."""

from typing import NamedTuple


class ScaledLr(NamedTuple):
    """The peak and the final learning rate of a schedule, after scaling to the batch size.

    rule: the scaling factor as text, such as "512 / 1024 images", or "" without scaling.
    """

    peak: float
    final: float
    rule: str = ""


def scale_lr(
    peak: float, final: float, *, batch_size: int, reference: int, scaling: str
) -> ScaledLr:
    """Scale learning rates that were chosen for batches of `reference` images to batches of
    `batch_size` images. If `reference` is 0, they are not scaled.

    scaling: "linear", by the factor batch_size / reference (Goyal et al., arXiv:1706.02677), or
    "sqrt", by its square root (Malladi et al., arXiv:2205.10287).
    """
    if not reference:
        return ScaledLr(peak, final)
    ratio, rule = batch_size / reference, f"{batch_size} / {reference}"
    if scaling == "sqrt":
        return ScaledLr(peak * ratio**0.5, final * ratio**0.5, f"sqrt({rule})")
    return ScaledLr(peak * ratio, final * ratio, f"{rule} images")


def default_scaling(optimizer: str) -> str:
    """Return the default scaling rule of an optimizer's learning rate, see `scale_lr`.

    optimizer: name of the optimizer. As in timm's train script, the rule is "sqrt" if the name
    contains "ada" or "lamb", and "linear" otherwise.
    """
    return "sqrt" if any(part in optimizer for part in ("ada", "lamb")) else "linear"
