"""Convert images of any mode to 8-bit RGB."""

import numpy as np
from PIL import Image


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode -> RGB. 16-bit gray is scaled: PIL would clip it at 255."""
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    return image.convert("RGB")
