"""Pictures of bright rectangles, and detectors that know them: what the tests of detection share.

A rectangle of brightness v has class 1 + v % 3. Also a program, one process per rank: evaluates the
toy set and writes the figures.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import Dataset

from vil.data.loader import EvalLoader
from vil.engine import distributed
from vil.tasks.detection.data.batch import collate
from vil.tasks.detection.task import DetectionTask

TOY = Path(__file__)
CPU = torch.device("cpu")
CATEGORIES = [{"id": 2, "name": "red"}, {"id": 5, "name": "blue"}, {"id": 9, "name": "grün"}]
SCORES = torch.tensor([0.9, 0.6, 0.6, 0.3])


def picture(size, rectangles) -> Tensor:
    """(3, H, W) uint8 with the rectangles (x1, y1, x2, y2), of brightness 100, 101, ..."""
    image = torch.zeros(3, *size, dtype=torch.uint8)
    for number, (x1, y1, x2, y2) in enumerate(rectangles):
        image[:, y1:y2, x1:x2] = 100 + number
    return image


def drawn(seed):
    """Return an image and its rectangles of odd sizes, each in its own cell."""
    draw = np.random.default_rng(seed)
    rectangles = []
    for cell in range(int(draw.integers(0, 5))):
        x, y = draw.integers(0, 12, 2) + [45 * (cell % 2), 40 * (cell // 2)]
        width, height = draw.integers(9, 28, 2)
        rectangles.append((int(x), int(y), int(x + width), int(y + height)))
    return picture((83, 91), rectangles), rectangles


class ToySet(Dataset):
    """The interface of CocoDataset on `drawn` images; those in `broken` cannot be read."""

    collate = staticmethod(collate)
    classes = [row["name"] for row in CATEGORIES]
    category_ids = [row["id"] for row in CATEGORIES]

    def __init__(self, folder, count=7, broken=()):
        self.count, self.broken = count, broken
        self.annotations = Path(folder, "truth.json")

    def write(self):
        """The file of annotations; ids fall as numbers rise."""
        images, annotations = [], []
        for index in range(self.count):
            images.append({"id": 50 - index, "height": 83, "width": 91, "file_name": f"{index}"})
            for number, (x1, y1, x2, y2) in enumerate(drawn(index)[1]):
                row = {"image_id": 50 - index, "category_id": self.category_ids[(100 + number) % 3]}
                row["bbox"] = [x1, y1, x2 - x1, y2 - y1]
                row["segmentation"] = [[x1, y1, x1, y2, x2, y2, x2, y1]]
                annotations.append({**row, "id": len(annotations) + 1})
        truth = {"images": images, "annotations": annotations, "categories": CATEGORIES}
        self.annotations.write_text(json.dumps(truth))
        return self

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError("broken")
        image, rectangles = drawn(index)
        labels = torch.tensor([1 + (100 + n) % 3 for n in range(len(rectangles))], dtype=torch.long)
        boxes = torch.tensor(rectangles, dtype=torch.float32).reshape(-1, 4)
        masks = torch.stack([image[0] == 100 + n for n in range(len(labels))] or [image[0] > 255])
        masks = masks[: len(labels)].byte()
        return image, {"boxes": boxes, "labels": labels, "masks": masks, "image_id": 50 - index}

    def sample_name(self, index):
        return f"picture {index}"


class ToyDetector(nn.Module):
    """Finds every rectangle, each side `off` pixels too far to the right; learns nothing."""

    def __init__(self, off=0.0):
        super().__init__()
        self.off = nn.Parameter(torch.tensor(off))

    def forward(self, images, targets=None):
        if self.training:
            areas = [
                image.mean() * self.off * len(t["labels"]) for image, t in zip(images, targets)
            ]
            return {"loss_box": sum(areas) / len(areas), "loss_mask": self.off.square()}
        return [self.find((image[0] * 255).round()) for image in images]

    def find(self, bright):
        values = [int(v) for v in bright.unique() if v > 0]
        masks = torch.stack([bright == v for v in values] or [bright > 255])[: len(values)]
        places = [mask.nonzero() for mask in masks]
        boxes = [[*p.amin(0).flip(0).tolist(), *(p.amax(0).flip(0) + 1).tolist()] for p in places]
        boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
        return {
            "boxes": boxes + self.off.detach() * torch.tensor([1.0, 0, 1, 0]),
            "labels": torch.tensor([1 + v % 3 for v in values], dtype=torch.long),
            "scores": torch.tensor([SCORES[v % 4] for v in values]),
            "masks": masks[:, None].float(),
        }


class SmallBackbone(nn.Module):
    """16 channels at a stride of 16."""

    out_channels = 16

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 16, stride=16), nn.ReLU())

    def forward(self, images):
        return self.body(images)


def small_mask_rcnn():
    """torchvision's own, in seconds on a CPU."""
    torch.manual_seed(0)
    anchors = torchvision.models.detection.rpn.AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),))
    return torchvision.models.detection.MaskRCNN(
        SmallBackbone(), num_classes=1 + len(CATEGORIES), rpn_anchor_generator=anchors,
        min_size=96, max_size=128, rpn_post_nms_top_n_test=50, box_score_thresh=0.0,
        box_detections_per_img=20,
    )  # fmt: skip


def toy_task(folder, *, masks=True, rank=0, world=1, broken=(), **settings):
    dataset = ToySet(folder, broken=broken)
    loader = EvalLoader(dataset, batch_size=2, rank=rank, world=world, max_bad_fraction=0.5)
    return DetectionTask(device=CPU, test_sets={"toy": loader}, masks=masks, **settings)


def launch(world, folder):
    """`world` processes as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    processes = [
        subprocess.Popen(
            [sys.executable, TOY, folder],
            env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world)
    ]
    try:
        assert [process.wait(timeout=100) for process in processes] == [0] * world
    finally:
        for process in processes:
            process.kill()


def main(folder):
    torch.set_num_threads(1)
    place = distributed.start(None, CPU)
    ours = Path(folder, f"world-{place.world}")
    ours.mkdir(exist_ok=True)
    task = toy_task(folder, rank=place.rank, world=place.world, broken=(3,), results_folder=ours)
    figures = task.evaluate(ToyDetector(1.25))
    (ours / f"figures-{place.rank}.json").write_text(json.dumps(figures))
    distributed.stop()


if __name__ == "__main__":
    main(sys.argv[1])
