"""Scale the values of a streamed image to 0..1, as `vil.data` scales those of image files.

Shapes: c channels, n rows, W columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vil.streaming.images import Normalize, Pixels
from vil.utils.errors import DataError
from vil.utils.rgb import ValueRangeError, default_range, kind_of

MAX_VALUES = 2**17  # values that are converted to float64 at a time


class ScaleAndNormalize:
    """A transform that scales values to 0..1, and then normalizes them with a mean and a std.

    mean, std: one number per channel. value_range: (low, high), the values that become 0 and 1.
    Values outside of this range are clipped.

    Without `value_range`, the range is (0, 65535) for uint16 and (0, 1) for floats. Then DataError
    is raised for floats outside of this range, and for larger or signed integers.

    uint8 images are always divided by 255, and `value_range` is ignored. NaN and Inf become 0.
    """

    def __init__(
        self,
        pixels: Pixels,
        mean: Sequence[float],
        std: Sequence[float],
        value_range: Sequence[float] = (),
    ) -> None:
        self.name, self.value_range = pixels.name, tuple(value_range)
        self.normalize = Normalize(mean, std)
        self.dtype = pixels.dtype
        if not self.is_8_bit:
            self.low, self.high = self._find_range(0.0, 0.0)

    @property
    def is_8_bit(self) -> bool:
        return self.dtype in ("uint8", "bool")

    def __call__(self, strip: Tensor) -> Tensor:
        """Scale and normalize a strip (channels, rows, columns). Returns float32 of this shape."""
        if self.is_8_bit:
            return self.normalize(strip)
        scaled = torch.empty(strip.shape, dtype=torch.float32, device=strip.device)
        rows = max(1, MAX_VALUES // (strip.shape[0] * strip.shape[2]))
        for part, out in zip(strip.split(rows, dim=1), scaled.split(rows, dim=1)):
            values = part.double()
            values = torch.where(values.isfinite(), values, self.low)
            if not self.value_range:
                self._find_range(*(limit.item() for limit in values.aminmax()))
            out.copy_(values.sub_(self.low).div_(self.high - self.low).clamp_(0, 1))
        return self.normalize(scaled)

    def _find_range(self, least: float, most: float) -> tuple[float, float]:
        """Return `value_range` or, if it is empty, the default range of the dtype.

        least, most: smallest and largest value of the image. If `value_range` is empty, raises
        DataError for a dtype without a default range, and for values outside of the default range.
        """
        if self.value_range:
            return self.value_range
        try:
            kind = "float" if "float" in self.dtype else kind_of(self.dtype)  # also torch.bfloat16
            return default_range(kind, least, most)
        except ValueRangeError as error:
            raise DataError(f"{self.name}: {error}") from error

    def __repr__(self) -> str:
        return f"ScaleAndNormalize({self.dtype}, {self.value_range}, {self.normalize})"
