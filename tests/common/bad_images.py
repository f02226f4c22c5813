"""Image files that can be read, and image files that cannot."""

import io

import numpy as np
from PIL import Image

RAMP = np.add.outer(np.arange(40), np.arange(56)).astype(np.uint8)
IMAGE = Image.fromarray(np.stack([RAMP, RAMP[::-1], 255 - RAMP], axis=-1))


def encode(image, format, **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


JPEG = encode(IMAGE, "JPEG", quality=95)
PNG = encode(IMAGE, "PNG")
GREY16 = encode(Image.fromarray(RAMP.astype(np.uint16) * 256 + 7), "PNG")
GOOD = {
    "rgb.jpg": JPEG,
    "cmyk.jpg": encode(IMAGE.convert("CMYK"), "JPEG", quality=95),
    "grey16.png": GREY16,
    "palette.png": encode(IMAGE.quantize(64), "PNG"),
    "alpha.png": encode(IMAGE.convert("RGBA"), "PNG"),
    "bilevel.png": encode(IMAGE.convert("1"), "PNG"),
    "really_a_png.jpg": PNG,
    "really_a_jpeg.png": JPEG,
}
BAD = {
    "cut_at_0.jpg": JPEG[: len(JPEG) // 400],
    "cut_at_50.jpg": JPEG[: len(JPEG) // 2],
    "cut_at_98.jpg": JPEG[: len(JPEG) * 98 // 100],
    "cut.png": PNG[: len(PNG) // 2],
    "bad_checksum.png": PNG[:60] + bytes([PNG[60] ^ 255]) + PNG[61:],
    "empty.jpg": b"",
    "text.jpg": b"<html>404 Not Found</html>",
    "warned_bomb.png": encode(Image.new("1", (9500, 9500)), "PNG"),
    "refused_bomb.png": encode(Image.new("1", (14000, 13000)), "PNG"),
}
