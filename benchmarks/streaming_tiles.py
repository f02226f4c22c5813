"""Compare the maps of separate tiles with those of the full image (`streaming.py --only tiles`).

Shapes: c channels, H W image size in pixels, X Y grid of a stage, d channels of its map.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from shared import RESULTS

import vil
from vil.models.arch import parse_arch
from vil.models.vision_longformer import MsViT
from vil.streaming import Normalize

TILE, OVERLAP = 512, 64  # pixels
ARCH = (
    "l1,h1,d32,n1,s1,g1,p4,f7,a0_l2,h2,d64,n2,s1,g1,p2,f7,a0"
    "_l3,h4,d128,n2,s1,g1,p2,f7,a0_l4,h4,d128,n1,s1,g1,p2,f7,a0"
)
NAMES = ("water", "ice", "vegetation")
STEPS, BATCH, CROP, LEARNING_RATE = 300, 4, 256, 1e-3
TOLERANCE = 0.01  # cells with a larger `relative_difference` count as different
CHECKED = 2048  # side in pixels of the crop that the model also runs at once
FIGURE = RESULTS.parent.parent / "docs/images/streaming-tiles.png"
NORMALIZE = Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
STAGES = tuple(f"stages.{i}" for i in range(4))


def shares(pixels: torch.Tensor) -> torch.Tensor:
    """Return the shares (B, 3) of water, ice and vegetation in images (B, 3, H, W) of uint8."""
    red, green, blue = pixels.float().unbind(1)
    water = blue > red + 12
    ice = ~water & (red > 225) & (green > 225)
    plants = ~water & ~ice & (green > red)
    return torch.stack([x.float().mean((1, 2)) for x in (water, ice, plants)], 1)


def train(image: torch.Tensor) -> tuple[MsViT, float]:
    """Train a model to predict the `shares` in random crops of an image (3, H, W). Returns (model,
    mean error in the last 50 steps)."""
    torch.manual_seed(0)
    model = MsViT(parse_arch(ARCH, "longformer"), img_size=CROP, num_classes=len(NAMES))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, STEPS)
    errors = []
    for _ in range(STEPS):
        crops = random_crops(image)
        difference = model(torch.stack([NORMALIZE(crop) for crop in crops])) - shares(crops)
        optimizer.zero_grad()
        difference.square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        errors.append(difference.abs().mean().item())
    return model.eval(), sum(errors[-50:]) / 50


def random_crops(image: torch.Tensor) -> torch.Tensor:
    """Return random crops (BATCH, 3, CROP, CROP) of an image (3, H, W)."""
    tops = torch.randint(image.shape[1] - CROP, (BATCH,)).tolist()
    lefts = torch.randint(image.shape[2] - CROP, (BATCH,)).tolist()
    return torch.stack([image[:, t : t + CROP, n : n + CROP] for t, n in zip(tops, lefts)])


def starts(size: int) -> list[int]:
    """Return the first pixel of each tile along an axis of `size` pixels. The last tile ends at the
    end of the axis."""
    step = TILE - OVERLAP
    return sorted({*range(0, size - TILE, step), size - TILE})


def tile_maps(model: MsViT, image: torch.Tensor) -> Iterator[tuple[int, int, list, torch.Tensor]]:
    """Yield (top, left, maps, logits (K,)) for each tile of an image (3, H, W). maps: one map
    (d, X, Y) per stage."""
    for top in starts(image.shape[1]):
        for left in starts(image.shape[2]):
            pixels = NORMALIZE(image[:, top : top + TILE, left : left + TILE])[None]
            features, maps = model.forward_intermediates(pixels)
            yield top, left, [each[0] for each in maps], model.forward_head(features)[0]


@torch.inference_mode()
def run_tiles(model: MsViT, image: torch.Tensor, maps: list) -> torch.Tensor:
    """Assemble the maps of the tiles in `maps`, arrays (d, X, Y), and return the mean logits (K,).
    Tiles are cut by half of the overlap on each side that is not at the border of the image."""
    logits, margin, (height, width) = [], OVERLAP // 2, image.shape[1:]
    for top, left, parts, of_tile in tile_maps(model, image):
        logits.append(of_tile)
        for target, part, stride in zip(maps, parts, model.strides):
            up, west = (0 if first == 0 else margin // stride for first in (top, left))
            down = 0 if top + TILE >= height else margin // stride
            east = 0 if left + TILE >= width else margin // stride
            part = part[:, up : part.shape[1] - down, west : part.shape[2] - east]
            row, col = top // stride + up, left // stride + west
            target[:, row : row + part.shape[1], col : col + part.shape[2]] = part.numpy()
    return torch.stack(logits).mean(0)


def relative_difference(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the norm (X, Y) of the difference of each cell's features in two maps (d, X, Y),
    divided by the norm of the features in `expected`."""
    result = []
    for first in range(0, expected.shape[1], 64):
        rows = expected[:, first : first + 64]
        away = np.linalg.norm(found[:, first : first + 64] - rows, axis=0)
        result.append(away / np.linalg.norm(rows, axis=0))
    return np.concatenate(result)


def new_maps(model: MsViT, size: tuple[int, int], folder: Path, name: str) -> list[np.ndarray]:
    """Create memory-mapped arrays (d, X, Y) for the maps of all stages. size: (H, W) in pixels.
    name: beginning of the file names."""
    shapes = zip(model.channels, model.grids(size))
    return [
        np.lib.format.open_memmap(folder / f"{name}{i}.npy", "w+", np.float32, (d, *grid))
        for i, (d, grid) in enumerate(shapes)
    ]


def compare(model: MsViT, image: torch.Tensor, folder: Path) -> tuple[dict, list[np.ndarray]]:
    """Compare tiles with the streamed image. Returns (results, `relative_difference` of each
    stage)."""
    size = tuple(image.shape[1:])
    whole, tiled = (new_maps(model, size, folder, name) for name in ("whole", "tiled"))
    began = time.perf_counter()
    options = dict(outputs=("logits", *STAGES), into=dict(zip(STAGES, whole)), memory="700MiB")
    logits = vil.stream(model, image, transform=NORMALIZE, **options).logits
    middle = time.perf_counter()
    of_tiles = run_tiles(model, image, tiled)
    seconds = {"streamed": middle - began, "tiles": time.perf_counter() - middle}
    differences = [relative_difference(*pair) for pair in zip(tiled, whole)]
    return {
        "size": size,
        "different": [float((each > TOLERANCE).mean()) for each in differences],
        "median": [float(np.median(each)) for each in differences],
        "logits": dict(zip(NAMES, logits.tolist())),
        "logits_of_tiles": dict(zip(NAMES, of_tiles.tolist())),
        "true": dict(zip(NAMES, shares(image[None])[0].tolist())),
        "seconds": seconds,
    }, differences


@torch.inference_mode()
def check_crop(model: MsViT, image: torch.Tensor) -> dict:
    """Compare a streamed crop with a forward pass of the model over the same crop. Returns the
    fraction of different cells in each stage, and other differences."""
    top, left = ((n - CHECKED) // 2 for n in image.shape[1:])
    crop = NORMALIZE(image[:, top : top + CHECKED, left : left + CHECKED])
    features, maps = model.forward_intermediates(crop[None])
    streamed = vil.stream(model, crop, outputs=("logits", *STAGES), memory="400MiB")
    pairs = [(streamed[name].numpy(), each[0].numpy()) for name, each in zip(STAGES, maps)]
    differences = [relative_difference(*pair) for pair in pairs]
    logits = model.forward_head(features)[0]
    return {
        "pixels": CHECKED,
        "different": [float((each > TOLERANCE).mean()) for each in differences],
        "largest": [float(each.max()) for each in differences],
        "logits": (streamed.logits - logits).abs().max().item() / logits.abs().max().item(),
    }


def draw(image: torch.Tensor, differences: list[np.ndarray], file: Path) -> None:
    """Draw the image, and the differences between tiles and the full image in stages 2 and 3."""
    from matplotlib import pyplot

    panels = {"the image, 58 megapixels": image[:, ::8, ::8].permute(1, 2, 0).numpy()}
    for stage in (1, 2):
        name = f"tiles of {TILE} pixels, stage {stage + 1}: difference from the full image"
        panels[name] = 100 * differences[stage]
    figure, axes = pyplot.subplots(3, 1, figsize=(7, 11), layout="constrained")
    for axis, (name, panel) in zip(axes, panels.items()):
        shown = axis.imshow(panel, cmap="magma", vmin=0, vmax=20 if panel.ndim == 2 else None)
        axis.set_title(name, fontsize=10)
        axis.axis("off")
        if panel.ndim == 2:
            figure.colorbar(shown, ax=axis, label="% of the norm of the features", shrink=0.8)
    figure.savefig(file, dpi=90)
    pyplot.close(figure)


def compare_tiles(path: Path) -> dict:
    """Train a model, compare tiles with the full image, and print, draw and return the results.
    path: file of the relief map."""
    Image.MAX_IMAGE_PIXELS = None
    pixels = np.asarray(Image.open(path).convert("RGB"))
    height, width = (n // 32 * 32 for n in pixels.shape[:2])  # whole patches of all stages
    image = torch.from_numpy(pixels[:height, :width].copy()).permute(2, 0, 1)
    model, error = train(image)
    print(f"{STEPS} steps of training, mean error of the shares {error:.3f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result, differences = compare(model, image, Path(folder))
    draw(image, differences, FIGURE)
    result = {"steps": STEPS, "training_error": error} | result
    result["crop"] = check_crop(model, image)
    for stage, share in enumerate(result["different"]):
        print(f"stage {stage + 1}: {100 * share:.1f} % of the cells of tiles differ by over 1 %")
    for name in ("true", "logits", "logits_of_tiles"):
        print(f"{name:16}", {key: round(value, 4) for key, value in result[name].items()})
    print("streamed crop against the plain model:", result["crop"])
    return result
