"""Evaluate weights on the test sets of a config."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from vil.builders.device import configure_device, process_group
from vil.data.workers import worker_errors
from vil.tasks import refuse_without
from vil.utils.atomic_write import replace_text
from vil.utils.global_state import preserve_global_state
from vil.utils.output_paths import make_folder, refuse_failed_writes
from vil.workflows.configure import Options, Overrides, as_options, run_config, weights_config
from vil.workflows.inference import load_for_evaluation, refuse_random_weights


@dataclass
class EvaluationResult:
    """metrics: {test set: {name: value}}. report: which weights. lines: {test set: further lines to
    print, such as a table of classes}. folder: with results.json, on rank 0. images: the files of
    the images drawn."""

    metrics: dict[str, dict[str, Any]]
    report: str
    lines: dict[str, list[str]] = field(default_factory=dict)
    folder: Path | None = None
    images: dict[str, list[Path]] = field(default_factory=dict)


def evaluate(
    source: str | Path,
    overrides: Overrides | None = None,
    *,
    checkpoint: str = "best",
    data: str | Path | None = None,
    output_dir: str | Path | None = None,
) -> dict[str, dict[str, Any]]:
    """Evaluate a run, or a file of weights, on its test sets; return {test set: metrics}.

    source: the folder of a run, or a self-describing file of weights. overrides: {"DATA.TEST":
    ["folder"]}. data: DATA.PATH. Results are also written to OUTPUT_DIR/eval. Under torchrun every
    process calls it and gets the same metrics.
    """
    options = Options(as_options(overrides), {"DATA.PATH": data, "OUTPUT_DIR": output_dir})
    if Path(source).is_dir():
        found = run_config(source, options, checkpoint=checkpoint)
    else:
        words = [f"MODEL.MODEL_PATH={source}", *options.words]
        found = weights_config(None, options._replace(words=words))
    return evaluate_config(found.cfg, found.class_names).metrics


def evaluate_config(
    cfg: CfgNode, class_names: Sequence[str] = (), *, num_worst: int = 0
) -> EvaluationResult:
    """Load MODEL.MODEL_PATH, evaluate it and write the results to OUTPUT_DIR/eval.

    class_names: of what the weights were trained on. num_worst: images of each test set with most
    mistakes to draw, where the task can. Raises CheckpointError rather than evaluate random
    weights.
    """
    refuse_random_weights(cfg)
    if num_worst:
        refuse_without(cfg, "evaluate --pictures")
    with preserve_global_state():
        device = configure_device(cfg)
        with process_group(cfg, device) as dist, worker_errors():
            task, model, report = load_for_evaluation(cfg, device, dist)
            task.test_loaders(dist)
            task.check_test_classes(class_names)
            if dist.is_main:
                task.results_folder = make_folder(Path(cfg.OUTPUT_DIR, "eval"), "OUTPUT_DIR")
            folder = task.results_folder
            metrics = task.evaluate(model)
        result = EvaluationResult(metrics, report, folder=folder)
        if folder is None:
            return result
        result.lines = {name: task.format_metrics(name, m) for name, m in metrics.items()}
        text = json.dumps(_without_nan(metrics), indent=1)
        with refuse_failed_writes(folder / "results.json", "OUTPUT_DIR"):
            replace_text(folder / "results.json", text + "\n")
        for name in metrics if num_worst else ():
            images = folder / "pictures"
            with refuse_failed_writes(images, "OUTPUT_DIR"):
                result.images[name] = task.draw_worst(name, num_worst, images)
        return result


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinity by None, which JSON has."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
