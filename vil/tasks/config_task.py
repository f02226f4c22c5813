"""Base class of tasks that are built from a config."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from yacs.config import CfgNode

from vil.data import build as data
from vil.data.classes import match_classes
from vil.data.loader import EvalLoader, TrainLoader
from vil.engine.build import amp_dtype, memory_format
from vil.engine.distributed import DistInfo
from vil.tasks import task_entry
from vil.tasks.base import Datasets, OpenData, Task, make_metric
from vil.utils.errors import ConfigError, as_config_error

SPLIT_KEYS = ("VAL", "VAL_FRACTION", "TEST_FRACTION", "FOLDS")  # of the section DATA


class ConfigTask(Task):
    """Base class of tasks that are built from a config.

    A subclass defines open_train_set() and open_test_set(name), which return a dataset, and
    own_arguments(name), which returns the keys of DATA.KWARGS that the dataset `name` accepts.

    has_splits: whether the task supports the config keys in SPLIT_KEYS, such as DATA.VAL.
    open_test_set then has a second argument, the split to open: "val" or "test".
    max_eval_batch: maximum batch size in evaluation. Each rank has batches of max_eval_batch or
    DATALOADER.BSZ images, whichever is smaller, so metrics do not depend on the number of ranks. If
    max_eval_batch is None, the ranks divide DATALOADER.BSZ among them.
    """

    max_eval_batch: int | None = None
    accepts_any_classes = False  # whether the number of classes may differ from DATA.NUM_CLASSES
    has_splits = False

    def __init__(self, cfg: CfgNode, device: torch.device, **settings: Any):
        if not self.has_splits and (used := [key for key in SPLIT_KEYS if cfg.DATA[key]]):
            raise ConfigError(
                f"TASK {cfg.TASK} does not support {' or '.join(f'DATA.{key}' for key in used)}, "
                "because it always evaluates all images of the sets in DATA.TEST: remove this "
                "setting"
            )
        common = dict(device=device, amp_dtype=amp_dtype(cfg), memory_format=memory_format(cfg))
        super().__init__(**common, **settings)
        self.cfg = cfg
        declared = task_entry(cfg).facts.get("metrics", {})
        if declared and (cfg.EVAL.METRIC or not hasattr(self, "metric")):
            self.metric = make_metric(declared, cfg.EVAL.METRIC)

    def train_loader(
        self, dist: DistInfo, *, bad_file: Path | None = None, dataset: Dataset | None = None
    ) -> TrainLoader:
        def open_dataset() -> Dataset:
            if dataset is not None:
                return dataset
            data.check_dataset_arguments(self.cfg, self.own_arguments)
            opened = self.open_train_set()
            self._check(opened, "the training set", match=bool(self.class_names))
            return opened

        return data.build_train_loader(self.cfg, dist, self.device, open_dataset, bad_file)

    @as_config_error
    def open_split(self, name: str | None = None, part: str = "val") -> Any:
        data.check_dataset_arguments(self.cfg, self.own_arguments)
        split = ["test"] if part == "test" else []
        self.accepts_any_classes = True
        try:
            return self.open_train_set() if name is None else self.open_test_set(name, *split)
        finally:
            self.accepts_any_classes = False

    def check_num_classes(self, dataset: Any, name: str) -> None:
        """Raise ConfigError unless a dataset has DATA.NUM_CLASSES classes.

        If the attribute `accepts_any_classes` is True, the check is skipped. name: name of the
        dataset, for the error message.
        """
        if not self.accepts_any_classes:
            data.check_num_classes(self.cfg, dataset, name)

    @contextmanager
    def open_data(self) -> Iterator[OpenData]:
        with super().open_data() as opened:
            if self.cfg.DATA.VAL:
                final = {"test": self.test_loaders(DistInfo(), part="test")}
                opened = opened._replace(tests={**opened.tests, **final})
            yield opened

    def _check(self, dataset: Any, name: str, *, match: bool = True) -> None:
        """Reorder the classes of a dataset to match the model's, and read one of its images.

        match: whether to reorder the classes. If DATA.TARGETMAP is set, they are never reordered.
        name: name of the dataset, for messages. Raises DataError if the classes to reorder are not
        the classes of the model.
        """
        with suppress(OSError, AttributeError, IndexError):
            dataset.image(0)  # logs warnings about images once, not in every loader worker
        if match and not self.cfg.DATA.TARGETMAP:
            by_position = self.cfg.DATA.CLASSES == "by_position"
            match_classes(dataset, self.class_names, name, by_position=by_position)

    @as_config_error
    def test_loaders(
        self,
        dist: DistInfo,
        *,
        bad_file: Path | None = None,
        datasets: Datasets = None,
        part: str = "val",
    ) -> dict[str, EvalLoader]:
        cfg = self.cfg
        if datasets is None:
            data.check_dataset_arguments(cfg, self.own_arguments)
        key = "VAL" if part == "val" and cfg.DATA.VAL else "TEST"
        split = ["test"] if key == "TEST" and cfg.DATA.VAL else []

        def open_dataset(name: str) -> Dataset:
            opened = self.open_test_set(name, *split)
            self._check(opened, name)
            return opened

        options = dict(datasets=datasets, max_batch=self.max_eval_batch, key=key)
        self.test_sets = data.build_test_loaders(
            cfg, dist, self.device, open_dataset, bad_file, **options
        )
        return self.test_sets
