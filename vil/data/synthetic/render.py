"""What the scenes of `scenes.py` are painted with: textured grounds, clutter, strokes.

Everything is computed by numpy from a RandomState, whose numbers numpy promises never to change.
Letters: H W the size of a scene in pixels. Colours are float32 in 0..1.
"""

import numpy as np
from numpy.random import RandomState

LUMA = np.array([0.299, 0.587, 0.114], np.float32)
FINE = 64  # pixels of an enlarged digit's side
# Ink above this is stroke. No simple fraction, which cubics through 16 grey levels hit exactly.
INK, SOFT = 0.4417, 0.0943  # the middle of the edge of a stroke, and half its width
RIM = 0.1817  # the same of a rim around it


def noise(random: RandomState, height: int, width: int, cell: float) -> np.ndarray:
    """Smooth random values (H, W) in 0..1 whose bumps are about `cell` pixels wide."""
    rows, columns = (ramp(side, cell) for side in (height, width))
    grid = random.random_sample((rows.shape[1], columns.shape[1]))
    return (rows @ grid @ columns.T).astype(np.float32)


def ramp(side: int, cell: float) -> np.ndarray:
    """Weights (side, knots) of the two knots around each pixel, with a smooth step between."""
    places = np.arange(side) / cell
    at = places.astype(int)
    step = places - at
    step = step * step * (3 - 2 * step)
    weights = np.zeros((side, at[-1] + 2))
    weights[np.arange(side), at] = 1 - step
    weights[np.arange(side), at + 1] = step
    return weights


def along(random: RandomState, height: int, width: int) -> np.ndarray:
    """Each pixel's distance (H, W) along a random direction, 0..1 over the scene's diagonal."""
    angle = random.uniform(0, 2 * np.pi)
    y, x = np.mgrid[:height, :width]
    distance = x * np.cos(angle) + y * np.sin(angle)
    return ((distance - distance.min()) / np.hypot(height, width)).astype(np.float32)


def gradient(random: RandomState, height: int, width: int) -> np.ndarray:
    """From one side to the other."""
    return along(random, height, width)


def stripes(random: RandomState, height: int, width: int) -> np.ndarray:
    """Soft stripes, a little bent."""
    bend = noise(random, height, width, 60) * random.uniform(0, 0.15)
    waves = np.sin((along(random, height, width) + bend) * random.uniform(25, 110))
    return np.clip(0.5 + waves * random.uniform(0.4, 2), 0, 1)


def clouds(random: RandomState, height: int, width: int) -> np.ndarray:
    """Noise at three scales."""
    layers = [noise(random, height, width, cell) / n for n, cell in ((1, 64), (2, 23), (4, 9))]
    return sum(layers) / 1.75


def checks(random: RandomState, height: int, width: int) -> np.ndarray:
    """A tilted chequered floor."""
    one, other = (along(random, height, width) * random.uniform(4, 14) for _ in range(2))
    return ((one.astype(int) + other.astype(int)) % 2).astype(np.float32)


GROUNDS = (gradient, stripes, clouds, checks)


def ground(random: RandomState, height: int, width: int) -> np.ndarray:
    """A textured ground (H, W, 3): a pattern between two colours that are not far apart, blotches
    and grain."""
    pattern = GROUNDS[random.randint(len(GROUNDS))](random, height, width)
    first = random.uniform(0.1, 0.9, 3)
    second = np.clip(first + random.uniform(-0.28, 0.28, 3), 0, 1)
    picture = first + pattern[..., None] * (second - first)
    for cell in (40, 7):
        blotches = noise(random, height, width, cell) - 0.5
        picture += blotches[..., None] * random.uniform(0, 0.22, 3)
    return picture.astype(np.float32)


def clutter(random: RandomState, picture: np.ndarray) -> None:
    """Paint bands, ellipses and slabs into a picture (H, W, 3), half transparent: things that
    are no digits."""
    height, width = picture.shape[:2]
    for _ in range(random.randint(1, 7)):
        shape = SHAPES[random.randint(len(SHAPES))](random, height, width)
        alpha = shape * random.uniform(0.25, 0.8)
        colour = np.clip(picture.mean(axis=(0, 1)) + random.uniform(-0.35, 0.35, 3), 0, 1)
        picture += alpha[..., None] * (colour.astype(np.float32) - picture)


def band(random: RandomState, height: int, width: int) -> np.ndarray:
    """A stripe through the whole scene (H, W)."""
    at, wide = random.uniform(0.1, 0.7), random.uniform(0.004, 0.05)
    return (np.abs(along(random, height, width) - at) < wide).astype(np.float32)


def ellipse(random: RandomState, height: int, width: int) -> np.ndarray:
    """A filled ellipse (H, W) with a soft rim."""
    x, y = turned(random, height, width)
    a, b = random.uniform(5, 45, 2)
    return np.clip((1 - np.hypot(x / a, y / b)) * min(a, b), 0, 1).astype(np.float32)


def slab(random: RandomState, height: int, width: int) -> np.ndarray:
    """A filled rectangle (H, W)."""
    x, y = turned(random, height, width)
    a, b = random.uniform(4, 40, 2)
    return ((np.abs(x) < a) & (np.abs(y) < b)).astype(np.float32)


SHAPES = (band, ellipse, slab)


def turned(random: RandomState, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates x, y (H, W) in pixels around a random point, in a random direction."""
    angle, (row, column) = random.uniform(0, np.pi), random.uniform(0, 1, 2) * (height, width)
    y, x = np.mgrid[:height, :width]
    return axes(x - column, y - row, angle)


def axes(x: np.ndarray, y: np.ndarray, angle: float) -> tuple[np.ndarray, np.ndarray]:
    """The coordinates in axes that are turned by an angle."""
    cos, sin = np.cos(angle), np.sin(angle)
    return x * cos + y * sin, y * cos - x * sin


def enlarged(pixels: np.ndarray) -> np.ndarray:
    """A scan (8, 8) uint8 -> (FINE, FINE) float32 in 0..1, by cubic convolution (Keys 1981)."""
    count = len(pixels)
    places = (np.arange(FINE)[:, None] + 0.5) * count / FINE - 0.5 - np.arange(count)
    far = np.abs(places)
    near = 1.5 * far**3 - 2.5 * far**2 + 1
    tail = -0.5 * far**3 + 2.5 * far**2 - 4 * far + 2
    weights = np.where(far < 1, near, np.where(far < 2, tail, 0))
    return np.clip(weights @ (pixels / 255) @ weights.T, 0, 1).astype(np.float32)


def ink(fine: np.ndarray, size: float, angle: float, slant: float) -> np.ndarray:
    """The ink (S, S) in 0..1 of an enlarged digit that is `size` pixels high, turned by `angle`
    and slanted, with room around it."""
    side = int(1.7 * size) + 4
    y, x = np.mgrid[:side, :side] - (side - 1) / 2
    x, y = axes(x, y, angle)
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
    """Ink -> how much of the stroke's colour is seen, 0..1, with a soft edge at `middle`."""
    return np.clip((values - middle) / (2 * SOFT) + 0.5, 0, 1)


def contrasting(random: RandomState, under: np.ndarray) -> np.ndarray:
    """A colour (3,) that a person can tell from those (n, 3) under it: of a dozen draws the first
    whose brightness is far enough from theirs, or the furthest."""
    mean = float((under @ LUMA).mean())
    draws = random.uniform(0, 1, (12, 3)).astype(np.float32)
    far = np.abs(draws @ LUMA - mean)
    good = np.flatnonzero(far > 0.27)
    return draws[good[0] if len(good) else far.argmax()]
