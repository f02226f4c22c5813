"""Evaluate a model on the test sets of a config."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from vil.data.build import check_extras
from vil.data.workers import worker_errors
from vil.engine.build import configure_device, process_group
from vil.engine.checkpoint.save_load import resolve_link
from vil.engine.distributed import compute_on_main
from vil.tasks import refuse_without, with_num_classes
from vil.utils.atomic_write import replace_text
from vil.utils.errors import ConfigError, in_python_words, os_error_as
from vil.utils.global_state import preserve_global_state
from vil.utils.json_text import to_json
from vil.utils.lookup import lookup
from vil.utils.output_paths import make_folder
from vil.workflows.calibration import calibrate as calibrate_checkpoint
from vil.workflows.calibration import find_checkpoint
from vil.workflows.configure import Options, Overrides, as_options, source_config
from vil.workflows.held_out import check_held_out
from vil.workflows.inference import load_for_evaluation, open_test_sets, refuse_random_weights

PARTS = ("test", "val")


@dataclass
class EvaluationResult:
    """Result of an evaluation.

    metrics: {test set: {name of a metric: value}}.
    report: text that states which weights were loaded.
    lines: {test set: lines to print, such as a table of classes}.
    folder: the folder of results.json; None on ranks other than 0.
    images: {test set: files with the worst images, on which the errors are drawn}.
    calibration: lines that state how the probabilities are calibrated, if they are.
    part: the evaluated part, "test" or "val"; "val" if the config has no separate one.
    """

    metrics: dict[str, dict[str, Any]]
    report: str
    lines: dict[str, list[str]] = field(default_factory=dict)
    folder: Path | None = None
    images: dict[str, list[Path]] = field(default_factory=dict)
    calibration: list[str] = field(default_factory=list)
    part: str = "test"


@in_python_words
def evaluate(
    source: str | Path,
    overrides: Overrides | None = None,
    *,
    checkpoint: str = "best",
    data: str | Path | None = None,
    output_dir: str | Path | None = None,
    calibrate: bool = False,
    part: str = "test",
) -> dict[str, dict[str, Any]]:
    """Evaluate a run or a weight file on the config's test sets. Returns {test set: metrics}.

    source: the folder of a run, one of its checkpoints, a folder of `vil.save_pretrained`, or a
    self-describing weight file.
    overrides: changes to the config, such as {"DATA.TEST": ["folder"]}.
    checkpoint: for the folder of a run, "best" or "last".
    data, output_dir: values for DATA.PATH and OUTPUT_DIR.
    calibrate: before the evaluation, calibrate the predicted probabilities, and store the
    calibration in calibration.json in the run's folder. The weights must be a run's checkpoint. The
    calibration is fitted to the first set in DATA.VAL or, if DATA.VAL is empty, in DATA.TEST.
    part: "test" for the sets in DATA.TEST; "val" for the sets in DATA.VAL or, if DATA.VAL is empty,
    in DATA.TEST.

    The results are also written to OUTPUT_DIR/eval, see `results_folder`. Under torchrun, every
    process calls this function and gets the same metrics.
    """
    options = Options(as_options(overrides), {"DATA.PATH": data, "OUTPUT_DIR": output_dir})
    found = source_config(source, options, checkpoint=checkpoint)
    return evaluate_config(found.cfg, found.class_names, part=part, calibrate=calibrate).metrics


def evaluate_config(
    cfg: CfgNode,
    class_names: Sequence[str] = (),
    *,
    num_worst: int = 0,
    part: str = "test",
    calibrate: bool = False,
) -> EvaluationResult:
    """Load the config's model and weights, evaluate them, and write results to `results_folder`.

    num_worst: number of images to draw per test set, those with the most errors. part: "test" or
    "val", see `evaluate`. calibrate: whether to calibrate the model before the evaluation, see
    `vil.workflows.calibration`.

    Raises CheckpointError if the config sets no weights, or if FINETUNE.HEAD is "new", which makes
    the head random.
    """
    weights, head = cfg.MODEL.MODEL_PATH, cfg.FINETUNE.HEAD
    refuse_random_weights(weights or cfg.MODEL.PRETRAINED, head)
    lookup(dict.fromkeys(PARTS), part, "part")
    check_extras([*cfg.DATA.TRAIN, *cfg.DATA.VAL, *cfg.DATA.TEST])
    cfg = with_num_classes(cfg)
    if calibrate:
        why = "--calibrate is for classes and labels: leave it out"
        refuse_without(cfg.TASK, "calibrate", why)
        checkpoint = find_checkpoint(weights, cfg.DATA.DATA_DIR, head)
        if checkpoint is None:
            raise ConfigError("--calibrate needs the checkpoint of a run: give --run DIR")
    if num_worst:
        why = "--pictures draws boxes and pixels: use vil report, which shows the worst images"
        refuse_without(cfg.TASK, "draw_worst", why)
    with preserve_global_state():
        device = configure_device(cfg)
        with process_group(cfg.DISTRIBUTED_BACKEND, device) as dist, worker_errors():
            loaded = load_for_evaluation(cfg, device, dist, class_names, calibrated=not calibrate)
            task, model = loaded.task, loaded.model
            check_held_out(cfg, task, part, *(["val"] if calibrate else []))
            calibration = [loaded.calibration] if loaded.calibration else []
            if calibrate:
                calibration = calibrate_checkpoint(checkpoint, task, model, dist)
                if not calibration:
                    text = f"TASK {cfg.TASK} does not support calibration: remove --calibrate"
                    raise ConfigError(text)
            open_test_sets(task, dist, part)
            folder = compute_on_main(
                lambda: make_folder(cfg.OUTPUT_DIR, "OUTPUT_DIR", results_folder(cfg))
            )
            folder = task.results_folder = folder if dist.is_main else None
            metrics = task.evaluate(model)
        result = EvaluationResult(
            metrics,
            loaded.report,
            folder=folder,
            calibration=calibration,
            part=part if cfg.DATA.VAL else "val",
        )
        if folder is None:
            return result
        result.lines = {name: task.format_metrics(name, m) for name, m in metrics.items()}
        text = to_json(metrics, indent=1)
        with os_error_as(ConfigError, f"OUTPUT_DIR {folder / 'results.json'}"):
            replace_text(folder / "results.json", text + "\n")
        for name in metrics if num_worst else ():
            images = folder / "pictures"
            with os_error_as(ConfigError, f"OUTPUT_DIR {images}"):
                result.images[name] = task.draw_worst(name, num_worst, images)
        return result


def results_folder(cfg: CfgNode) -> str:
    """Return the path of the folder of results below OUTPUT_DIR.

    It is eval. Exception: in the folder of a run, weights other than its best checkpoint have a
    folder of their own, such as eval/step-00000220, or eval/nano-step-00000220 for a checkpoint of
    another run, so that they do not replace the results of the best one.
    """
    run, weights = Path(cfg.OUTPUT_DIR), cfg.MODEL.MODEL_PATH
    if not (weights and (run / "config.yaml").is_file()):
        return "eval"
    checkpoint = find_checkpoint(weights, cfg.DATA.DATA_DIR, "keep")
    if checkpoint is None:
        return f"eval/{Path(weights).stem}"
    if checkpoint.run.resolve() != run.resolve():
        return f"eval/{checkpoint.run.resolve().name}-{checkpoint.name}"
    best = resolve_link(run / "checkpoints", "best")
    is_best = best is None or best.name == checkpoint.name
    return "eval" if is_best else f"eval/{checkpoint.name}"
