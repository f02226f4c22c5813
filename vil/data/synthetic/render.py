"""Render backgrounds, clutter and digit strokes for the scenes of `scenes.py`.

All random numbers come from a numpy RandomState, which gives the same numbers in all numpy
versions. Shapes: H, W size of a scene in pixels; S side of a digit's patch. Colors are float32 in
0..1. Angles are in radians.
"""

import numpy as np
from numpy.random import RandomState

LUMA = np.array([0.299, 0.587, 0.114], np.float32)
FINE = 64  # side of an enlarged digit in pixels
# Ink level at the middle of a stroke's edge, and half the range of ink levels in the edge. Neither
# is a simple fraction, which interpolated gray levels could be exactly equal to.
INK, SOFT = 0.4417, 0.0943
OUTLINE = 0.1817  # ink level at the middle of the edge of an outline around the stroke


def noise(random: RandomState, height: int, width: int, cell: float) -> np.ndarray:
    """Return smooth random values (H, W) in 0..1 with features about `cell` pixels wide."""
    rows, columns = (knot_weights(side, cell) for side in (height, width))
    grid = random.random_sample((rows.shape[1], columns.shape[1]))
    return (rows @ grid @ columns.T).astype(np.float32)


def knot_weights(side: int, cell: float) -> np.ndarray:
    """Return the weights (side, knots) that interpolate `side` pixels smoothly from values at the
    knots. Knots are `cell` pixels apart. Each pixel uses the two knots around it."""
    places = np.arange(side) / cell
    at = places.astype(int)
    step = places - at
    step = step * step * (3 - 2 * step)
    weights = np.zeros((side, at[-1] + 2))
    weights[np.arange(side), at] = 1 - step
    weights[np.arange(side), at + 1] = step
    return weights


def directional_ramp(random: RandomState, height: int, width: int) -> np.ndarray:
    """Return a linear ramp (H, W) in a random direction. Its smallest value is 0. It rises by 1
    over the length of the scene's diagonal, so all values are in 0..1."""
    angle = random.uniform(0, 2 * np.pi)
    y, x = np.mgrid[:height, :width]
    distance = x * np.cos(angle) + y * np.sin(angle)
    return ((distance - distance.min()) / np.hypot(height, width)).astype(np.float32)


def stripes(random: RandomState, height: int, width: int) -> np.ndarray:
    """Return soft, slightly bent stripes (H, W) in 0..1."""
    bend = noise(random, height, width, 60) * random.uniform(0, 0.15)
    waves = np.sin((directional_ramp(random, height, width) + bend) * random.uniform(25, 110))
    return np.clip(0.5 + waves * random.uniform(0.4, 2), 0, 1)


def clouds(random: RandomState, height: int, width: int) -> np.ndarray:
    """Return noise (H, W) in 0..1 with features of three sizes."""
    coarse, middle, fine = (noise(random, height, width, cell) for cell in (64, 23, 9))
    return (coarse + middle / 2 + fine / 4) / 1.75


def checkerboard(random: RandomState, height: int, width: int) -> np.ndarray:
    """Return a skewed checkerboard (H, W) of zeros and ones."""
    one, other = (directional_ramp(random, height, width) * random.uniform(4, 14) for _ in range(2))
    return ((one.astype(int) + other.astype(int)) % 2).astype(np.float32)


PATTERNS = (directional_ramp, stripes, clouds, checkerboard)


def background(random: RandomState, height: int, width: int) -> np.ndarray:
    """Return a textured background (H, W, 3): a pattern of two similar colors, with blotches."""
    pattern = PATTERNS[random.randint(len(PATTERNS))](random, height, width)
    first = random.uniform(0.1, 0.9, 3)
    second = np.clip(first + random.uniform(-0.28, 0.28, 3), 0, 1)
    image = first + pattern[..., None] * (second - first)
    for cell in (40, 7):
        blotches = noise(random, height, width, cell) - 0.5
        image += blotches[..., None] * random.uniform(0, 0.22, 3)
    return image.astype(np.float32)


def add_clutter(random: RandomState, image: np.ndarray) -> None:
    """Paint semi-transparent bands, ellipses and rectangles into an image (H, W, 3), in place."""
    height, width = image.shape[:2]
    for _ in range(random.randint(1, 7)):
        shape = SHAPES[random.randint(len(SHAPES))](random, height, width)
        alpha = shape * random.uniform(0.25, 0.8)
        color = np.clip(image.mean(axis=(0, 1)) + random.uniform(-0.35, 0.35, 3), 0, 1)
        image += alpha[..., None] * (color.astype(np.float32) - image)


def band(random: RandomState, height: int, width: int) -> np.ndarray:
    """Return the mask (H, W) float32 of a straight band across the scene."""
    at, wide = random.uniform(0.1, 0.7), random.uniform(0.004, 0.05)
    return (np.abs(directional_ramp(random, height, width) - at) < wide).astype(np.float32)


def ellipse(random: RandomState, height: int, width: int) -> np.ndarray:
    """Return the mask (H, W) float32 of a filled ellipse with a soft edge."""
    x, y = random_axes(random, height, width)
    a, b = random.uniform(5, 45, 2)
    return np.clip((1 - np.hypot(x / a, y / b)) * min(a, b), 0, 1).astype(np.float32)


def rectangle(random: RandomState, height: int, width: int) -> np.ndarray:
    """Return the mask (H, W) float32 of a filled, rotated rectangle."""
    x, y = random_axes(random, height, width)
    a, b = random.uniform(4, 40, 2)
    return ((np.abs(x) < a) & (np.abs(y) < b)).astype(np.float32)


SHAPES = (band, ellipse, rectangle)


def random_axes(random: RandomState, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the coordinates (x, y) of each pixel, both (H, W), along axes that are rotated by a
    random angle around a random point of the scene."""
    angle, (row, column) = random.uniform(0, np.pi), random.uniform(0, 1, 2) * (height, width)
    y, x = np.mgrid[:height, :width]
    return rotate(x - column, y - row, angle)


def rotate(x: np.ndarray, y: np.ndarray, angle: float) -> tuple[np.ndarray, np.ndarray]:
    """Convert coordinates (x, y) to axes that are rotated by `angle` (in radians)."""
    cos, sin = np.cos(angle), np.sin(angle)
    return x * cos + y * sin, y * cos - x * sin


def enlarge(pixels: np.ndarray) -> np.ndarray:
    """Enlarge a scanned digit (8, 8) uint8 to (64, 64) float32 in 0..1, by cubic convolution (Keys
    1981)."""
    count = len(pixels)
    places = (np.arange(FINE)[:, None] + 0.5) * count / FINE - 0.5 - np.arange(count)
    far = np.abs(places)
    near = 1.5 * far**3 - 2.5 * far**2 + 1
    tail = -0.5 * far**3 + 2.5 * far**2 - 4 * far + 2
    weights = np.where(far < 1, near, np.where(far < 2, tail, 0))
    return np.clip(weights @ (pixels / 255) @ weights.T, 0, 1).astype(np.float32)


def render_ink(fine: np.ndarray, size: float, angle: float, slant: float) -> np.ndarray:
    """Scale a digit to a height of `size` pixels, rotate and slant it. Returns the ink (S, S) in
    0..1, with S = int(1.7 size) + 4.

    fine: the digit from `enlarge`. angle: in radians. slant: horizontal shear in pixels per row.
    """
    side = int(1.7 * size) + 4
    y, x = np.mgrid[:side, :side] - (side - 1) / 2
    x, y = rotate(x, y, angle)
    x = x + slant * y
    column, row = ((axis / size + 0.5) * FINE - 0.5 for axis in (x, y))
    padded = np.pad(fine, 2)
    row, column = (np.clip(axis + 2, 0, FINE + 2.999) for axis in (row, column))
    top, left = row.astype(int), column.astype(int)
    down, right = row - top, column - left
    upper = padded[top, left] * (1 - right) + padded[top, left + 1] * right
    lower = padded[top + 1, left] * (1 - right) + padded[top + 1, left + 1] * right
    return (upper * (1 - down) + lower * down).astype(np.float32)


def opacity(values: np.ndarray, middle: float = INK) -> np.ndarray:
    """Convert ink levels, the gray levels of a digit's stroke, to opacities in 0..1.

    The opacity is a soft step around the ink level `middle`.
    """
    return np.clip((values - middle) / (2 * SOFT) + 0.5, 0, 1)


def paint(random: RandomState, image: np.ndarray, layers: list[np.ndarray]) -> None:
    """Paint layers on top of each other into an image (h, w, 3), in place. A layer (h, w) contains
    the opacity of each pixel. Each layer gets a random color that contrasts with the image below.
    """
    height, width = image.shape[:2]
    for layer in layers:
        color = contrasting_color(random, image[layer > 0.5])
        shade = 1 + 0.3 * (noise(random, height, width, 20) - 0.5)
        image += layer[..., None] * (color * shade[..., None] - image)


def contrasting_color(random: RandomState, under: np.ndarray) -> np.ndarray:
    """Return a random color (3,) that contrasts in brightness with the colors `under` (n, 3).

    Samples 12 colors. Returns the first one with enough contrast or, if none has enough, the one
    with the most contrast.
    """
    mean = float((under @ LUMA).mean())
    colors = random.uniform(0, 1, (12, 3)).astype(np.float32)
    contrast = np.abs(colors @ LUMA - mean)
    good = np.flatnonzero(contrast > 0.27)
    return colors[good[0] if len(good) else contrast.argmax()]
