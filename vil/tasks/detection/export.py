"""Export a detector to an ONNX file for one image of a fixed size, and compare the two.

The export uses torchvision's own path: its detectors have branches for torch.jit.trace, whose
graph torch converts to ONNX. The file takes an image that is already resized, and normalizes it.

Shapes: n detections, H W size of the image.
"""

import copy
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.onnx import symbolic_opset9
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.transforms.v2.functional import resize

import vil
from vil.export.exporter import Difference
from vil.export.onnx import check_opset
from vil.export.runtime import open_session, quiet, require
from vil.export.trace import as_export_error, use_backend
from vil.models.arch import format_arch, format_attention
from vil.utils.atomic_write import write_aside
from vil.utils.errors import ExportError, one_line

logger = logging.getLogger(__name__)

OUTPUTS = ("boxes", "labels", "scores", "masks")
LAST_OPSET = 20  # the highest opset of the exporter for traced models
# largest differences: pixels of a box, and values of a score or of a mask's pixel
TOLERANCES = {"boxes": 1e-2, "scores": 1e-4, "masks": 1e-3}
# Operators that torch's exporter of traced models does not have, or that it rounds toward 0.
CONVERTERS = {
    "aten::mT": lambda graph, x: symbolic_opset9.transpose(graph, x, -2, -1),
    "aten::floor_divide": lambda graph, x, y: symbolic_opset9.div(graph, x, y, "floor"),
}


class FixedTransform(nn.Module):
    """Input transform of a detector for one image of a known size, which is not resized."""

    def __init__(self, transform: nn.Module, size: tuple[int, int]):
        super().__init__()
        self.normalize, self.size = transform.normalize, size
        divisor = transform.size_divisible
        height, width = (-side % divisor for side in size)
        self.padding = (0, width, 0, height)

    def forward(self, images: Sequence[Tensor], targets: None = None) -> tuple[ImageList, None]:
        batch = torch.stack([F.pad(self.normalize(image), self.padding) for image in images])
        return ImageList(batch, [self.size]), targets

    def postprocess(self, outputs: list[dict], sizes: object, originals: object) -> list[dict]:
        for output in outputs:
            if "masks" in output:
                output["masks"] = paste_masks_in_image(output["masks"], output["boxes"], self.size)
        return outputs


class FixedDetector(nn.Module):
    """A detector for images of a fixed size. It maps an image (1, 3, H, W) with values in 0..1 to
    boxes (n, 4), labels (n,), scores (n,) and, with masks, probabilities (n, 1, H, W)."""

    def __init__(self, detector: nn.Module, size: tuple[int, int]):
        super().__init__()
        self.detector = copy.deepcopy(detector).to("cpu", torch.float32)
        self.detector.transform = FixedTransform(detector.transform, size)
        self.eval()

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        (output,) = self.detector([images[0]])
        return tuple(output[name] for name in OUTPUTS if name in output)


def export_detector(
    model: nn.Module,
    path: Path,
    image: Tensor,
    *,
    opset: int | None = None,
    metadata: Mapping[str, str],
) -> list[Difference]:
    """Write a detector as an ONNX file, and compare its detections with the model's.

    image (1, 3, H, W): an example with values in 0..1, whose size becomes that of the file. opset:
    at most LAST_OPSET, the default. Returns the largest difference of an output. Raises ValueError
    if the model or the opset is not supported, ExportError if the detections differ, OSError if the
    file cannot be written, and ImportError if a package is missing.
    """
    opset = LAST_OPSET if opset is None else opset
    check_opset(opset)
    if opset > LAST_OPSET:
        raise ValueError(f"opset {opset} is not supported for a detector: at most {LAST_OPSET}")
    size, specs = tuple(image.shape[-2:]), model.attention_body.specs
    metadata = {
        **dict(vil_version=vil.__version__, input_size="x".join(map(str, size)), dynamic="none"),
        **dict(arch=format_arch(specs), attention=format_attention(specs)),
        **metadata,
    }
    detector = FixedDetector(model, size)
    with write_aside(path) as aside, use_backend(detector, "auto"), torch.no_grad():
        with quiet(), silent_stdout(), as_export_error("ONNX"):
            names = OUTPUTS[: len(detector(image))]
            for name, convert in CONVERTERS.items():
                torch.onnx.register_custom_op_symbolic(name, convert, opset)
            torch.onnx.export(
                detector,
                (image,),
                str(aside),
                dynamo=False,
                opset_version=opset,
                input_names=["images"],
                output_names=list(names),
                dynamic_axes={name: {0: "detections"} for name in names},
            )
        onnx = require("onnx")
        written = onnx.load(aside)
        onnx.helper.set_model_props(written, metadata)
        onnx.save(written, aside)
        try:
            exported = ExportedDetector(aside)
            # what the trace has taken for constant shows in another image
            found = [(detector(x), exported([x[0]])[0]) for x in (image, 0.6 * image.flip(3))]
        except Exception as error:  # onnxruntime has its own exceptions
            text = f"{path} was not written: running it failed: {one_line(error)}"
            raise ExportError(text) from error
        pairs = [(dict(zip(names, outputs)), other) for outputs, other in found]
        if not any(len(outputs["labels"]) for outputs, _ in pairs):
            logger.warning("the example image has no detection, so none was compared")
        largest = max(_compare(*pair, path) for pair in pairs)
        return [Difference(tuple(image.shape), largest)]


@contextmanager
def silent_stdout() -> Iterator[None]:
    """Discard what torch's C++ code prints in a `with` block: the graph, if the export fails."""
    sys.stdout.flush()
    saved, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(null)


class ExportedDetector(nn.Module):
    """A module that runs an exported detector, and is called like the detector in eval mode.

    Images of other sizes are stretched to that of the file, and detections are scaled back.
    """

    def __init__(self, path: Path):
        super().__init__()
        self.session = open_session(path)
        self.size = self.session.get_inputs()[0].shape[-2:]
        self.names = [output.name for output in self.session.get_outputs()]

    def forward(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        outputs = []
        for image in images:
            height, width = image.shape[-2:]
            batch = resize(image, self.size, antialias=True)[None].numpy()
            values = map(torch.from_numpy, self.session.run(self.names, {"images": batch}))
            output = dict(zip(self.names, values))
            factors = width / self.size[1], height / self.size[0]
            output["boxes"] = output["boxes"] * torch.tensor(factors * 2)
            if "masks" in output and len(output["masks"]):
                output["masks"] = F.interpolate(output["masks"], (height, width), mode="bilinear")
            elif "masks" in output:
                output["masks"] = output["masks"].new_zeros(0, 1, height, width)
            outputs.append(output)
        return outputs


def _compare(expected: dict[str, Tensor], found: dict[str, Tensor], path: Path) -> float:
    """Compare the detections of an exported file with those of the model, and return the largest
    difference of an output.

    expected, found: {name of an output: value} of the model and of the file. path: the final path
    of the file, for messages. Raises ExportError if a detection differs by more than TOLERANCES.
    """
    count, other = len(expected["labels"]), len(found["labels"])
    if count != other:
        raise ExportError(
            f"{path} was not written: it has {other} detections for an example image, but the "
            f"model has {count}"
        )
    if not count:
        return 0.0
    # the order of equal scores may differ: compare with the nearest box of the same class
    distances = (expected["boxes"][:, None] - found["boxes"]).abs().amax(dim=-1)
    distances[expected["labels"][:, None] != found["labels"]] = torch.inf
    nearest = distances.argmin(dim=1)
    largest = {
        name: (expected[name] - found[name][nearest]).abs().max().item()
        for name in TOLERANCES
        if name in expected
    }
    largest["boxes"] = distances.amin(dim=1).max().item()
    for name, value in largest.items():
        if not value <= TOLERANCES[name]:  # also if NaN
            raise ExportError(
                f"{path} was not written: its {name} for an example image differ from the model's "
                f"by {value:.1e}, but the tolerance is {TOLERANCES[name]:.1e}"
            )
    return max(largest.values())
