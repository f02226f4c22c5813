"""Detection as the training loop sees it: the detector's own losses, and average precision.

A batch has `images` (a list of (3, H, W)), `targets` (a list of dicts), `indices` and
`to(device, memory_format)`; see vil/tasks/detection/data/batch.py.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vil.engine.distributed import broadcast_object, gather_objects, unwrap
from vil.engine.task import autocast, evaluating, in_step
from vil.tasks.detection.coco_eval import (
    KINDS,
    average_precision,
    in_order,
    needed,
    of_kind,
    to_results,
)
from vil.tasks.detection.detections import from_output
from vil.utils.atomic_write import write_aside
from vil.utils.errors import SaveError


class DetectionTask:
    """Boxes, with masks or without.

    `test_loaders` are EvalLoaders of CocoDatasets, each rank its own part of the set. A detector in
    training mode gives a dict of losses for (images, targets), and in evaluation mode a list of
    dicts for (images), as torchvision's do. With `results_folder`, an evaluation writes there what
    was found, in COCO's format: `<set>_bbox.json` and `<set>_segm.json`.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        test_loaders: dict[str, Iterable],
        masks: bool,
        amp_dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        results_folder: Path | None = None,
    ):
        needed()  # not after the first epoch
        self.device, self.test_loaders = device, test_loaders
        self.kinds = ("bbox", "segm") if masks else ("bbox",)
        self.best = f"{KINDS[self.kinds[-1]]}_ap"
        self.amp_dtype, self.memory_format = amp_dtype, memory_format
        self.results_folder = results_folder

    def prepare(self, batch: Any) -> Any:
        """The batch on the device."""
        return batch.to(self.device, self.memory_format)

    def parts(self, batch: Any, count: int) -> list[Any]:
        """The batch in `count` parts of as many images each, in its order."""
        size, rest = divmod(len(batch.images), count)
        assert size > 0, f"{len(batch.images)} images in {count} parts"
        assert rest == 0, f"{len(batch.images)} images do not divide into {count} equal parts"
        cuts = [slice(start, start + size) for start in range(0, len(batch.images), size)]
        return [
            replace(
                batch,
                images=batch.images[cut],
                targets=batch.targets[cut],
                indices=batch.indices[cut],
            )
            for cut in cuts
        ]

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the detector's losses, and each of them, in fp32."""
        losses = {name: loss.float() for name, loss in model(batch.images, batch.targets).items()}
        return sum(losses.values()), {name: loss.detach() for name, loss in losses.items()}

    def evaluate(
        self, model: nn.Module, between: Callable[[], None] = lambda: None
    ) -> dict[str, dict[str, Any]]:
        """{test set: {box_ap, .., count, per_class}} in percent; see `average_precision`.

        count is the number of pictures; one that cannot be read is one in which nothing was found.
        """
        with evaluating(unwrap(model)) as plain:
            return {name: self.measure(plain, name, between) for name in self.test_loaders}

    def measure(self, model: nn.Module, name: str, between: Callable[[], None]) -> dict[str, Any]:
        """The figures of one test set. Rank 0 computes them from everybody's results, in an order
        that does not depend on who found what."""
        dataset = self.test_loaders[name].dataset
        everybody = gather_objects(self.found(model, name, between))
        figures = None
        if everybody:
            results = in_order(chain.from_iterable(everybody))
            self.write(name, results)
            figures = average_precision(dataset.annotations, results, self.kinds)
        figures = broadcast_object(figures)
        return {**figures, "count": len(dataset)}

    def found(self, model: nn.Module, name: str, between: Callable[[], None]) -> list[dict]:
        """This rank's results, on the host."""
        loader, results = self.test_loaders[name], []
        for batch in in_step(loader, between):
            batch = batch.to(self.device, self.memory_format)
            with autocast(self.device, self.amp_dtype):
                outputs = model(batch.images)
            for image, target, output in zip(batch.images, batch.targets, outputs):
                results += to_results(
                    from_output(output),
                    image_id=target["image_id"],
                    size=tuple(image.shape[-2:]),
                    category_ids=loader.dataset.category_ids,
                )
        return results

    def write(self, name: str, results: list[dict]) -> None:
        """The results of a test set, one file per kind, if there is a folder for them. SaveError
        where they cannot be written."""
        if self.results_folder is None:
            return
        for kind in self.kinds:
            file = self.results_folder / f"{name}_{kind}.json"
            try:
                with write_aside(file) as aside:
                    aside.write_text(json.dumps(of_kind(results, kind)), encoding="utf-8")
            except OSError as error:
                raise SaveError(f"{file} cannot be written: {error.strerror or error}") from error
