"""Small models for the streaming tests, with their plain and streamed outputs for an image."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vil.models.arch import parse_arch
from vil.models.vision_longformer import MsViT
from vil.streaming import StreamResult, prepare

PARAMETER_NOISE = 0.1  # so that biases, norms and positions matter
FP64, FP32 = 1e-12, 1e-5  # largest differences, of the largest value


def make_model(
    arch: str, attention: str = "longformer", *, dtype=torch.float64, seed: int = 0, **settings
) -> MsViT:
    """A model of 5 classes in eval mode, sized for 64 pixels, with random parameters everywhere.

    settings: of MsViT; `sw_exact` and the others of longformer also by themselves."""
    torch.manual_seed(seed)
    own = {k: settings.pop(k) for k in ("sw_exact", "mode", "share_weights") if k in settings}
    settings = {"img_size": 64, "num_classes": 5, **settings}
    arguments = {"longformer": own} if own else {}
    model = MsViT(parse_arch(arch, attention), attention_args=arguments, **settings)
    for parameter in model.parameters():
        parameter.data += PARAMETER_NOISE * torch.randn_like(parameter)
    return model.to(dtype).eval()


def make_image(size: tuple[int, int], *, dtype=torch.float64, channels: int = 3) -> Tensor:
    """A random image (c, H, W)."""
    torch.manual_seed(sum(size))
    return torch.randn(channels, *size, dtype=dtype)


def all_outputs(model: MsViT) -> tuple[str, ...]:
    """The names of all outputs."""
    return ("logits", "pooled", *(f"stages.{i}" for i in range(len(model.stages))))


@torch.no_grad()
def run_whole(model: MsViT, image: Tensor) -> dict[str, Tensor]:
    """All outputs of a model for an image at once."""
    features, maps = model.forward_intermediates(image[None])
    outputs = {f"stages.{i}": stage[0] for i, stage in enumerate(maps)}
    outputs["logits"] = model(image[None])[0]
    outputs["pooled"] = model.forward_head(features, pre_logits=True)[0]
    return outputs


def run_strips(
    model: MsViT,
    image: Tensor,
    num_chunks: int,
    outputs: Sequence[str] | None = None,
    folder=None,
) -> StreamResult:
    """Stream an image in strips of at most so many rows of chunks."""
    run = prepare(model, image, outputs=outputs or all_outputs(model))
    return run.execute(
        run.planner.with_strips(num_chunks, on_disk=folder is not None), folder=folder
    )


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of any output, relative to the output's largest value."""
    worst = 0.0
    for name, value in found.items():
        assert value.shape == expected[name].shape, name
        difference = (value.double() - expected[name].double()).abs().max()
        worst = max(worst, (difference / expected[name].double().abs().max()).item())
    return worst
