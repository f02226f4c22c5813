"""Evaluate weights on the test sets.

  vil evaluate --run runs/nano                    the best checkpoint, with the run's own config
  vil evaluate --run runs/nano --checkpoint last
  vil evaluate --config-file imagenet/vil_small.yaml --data DIR MODEL.MODEL_PATH best.pth
  vil evaluate --run runs/nano OUTPUT_PERCLASS_ACC True
  vil evaluate MODEL.MODEL_PATH nano.safetensors DATA.TEST digits       a file of vil convert

Prints loss, top-1 and top-5, and writes them to OUTPUT_DIR/eval/results.json. Random weights are
never evaluated. A detector is evaluated as by `vil detect evaluate`.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from yacs.config import CfgNode

from vil.cli.arguments import config_arguments, resolve
from vil.cli.described import described
from vil.cli.output import written
from vil.config import ConfigError
from vil.utils.errors import CheckpointError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    run_arguments(parser)


def run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --run and --checkpoint, which `of_run` reads."""
    add = parser.add_argument
    # torchrun takes --run for an abbreviation of its own --run-path
    add(
        "--run",
        "--run-dir",
        metavar="DIR",
        help="the folder of a run: its config and one of its checkpoints",
    )
    add("--checkpoint", default="best", choices=["best", "last"], help="which one of --run")


def run(args: argparse.Namespace) -> int:
    of_weights(args)
    return evaluate(resolve(args), learned_classes(args))


def of_weights(args: argparse.Namespace) -> None:
    """Put the config of a run, or of a file that says what it is, where `resolve` finds it."""
    if args.run:
        of_run(args)
    elif not args.config_file:
        own, args.known_classes = described(args.opts or ())
        args.opts = [*own, *(args.opts or ())]


def of_run(args: argparse.Namespace) -> None:
    """Put a run's config file, folder and checkpoint where `resolve` finds them."""
    from vil.engine.checkpoint.save_load import resolve_link

    folder = Path(args.run)
    if args.config_file:
        raise ConfigError(f"--run {folder}: leave --config-file out, the run has its own")
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"--run {folder}: no config.yaml there, so it is not a run's folder")
    checkpoint = resolve_link(folder / "checkpoints", args.checkpoint)
    if checkpoint is None:
        raise CheckpointError(f"{folder} has no {args.checkpoint} checkpoint yet")
    args.config_file = str(folder / "config.yaml")
    args.output_dir = args.output_dir or str(folder)
    # the checkpoint's head is the run's own, whatever was done to the one that the run began with
    args.opts = [f"MODEL.MODEL_PATH={checkpoint}", "FINETUNE.HEAD=keep", *(args.opts or ())]


def learned_classes(args: argparse.Namespace) -> Sequence[str]:
    """What the run, or the file that says what it is, has learned; none where that is unknown."""
    file = Path(args.run or "", "classes.txt")
    if args.run and file.is_file():
        return file.read_text("utf-8", "surrogateescape").split("\n")[:-1]
    return getattr(args, "known_classes", None) or ()


def evaluate(cfg: CfgNode, learned: Sequence[str] = ()) -> int:
    """Load MODEL.MODEL_PATH, evaluate, print and write the figures."""
    if cfg.DETECTION.MODEL:
        from vil.cli import detect_evaluate

        return detect_evaluate.evaluate(cfg, learned)
    with ready(cfg) as (task, model, report, folder):
        results = task.evaluate(model)
        if folder:
            print(report)
            for name, figures in results.items():
                tell(name, figures)
                tell_classes(figures.get("per_class"), task.test_loaders[name].classes)
            write_results(folder, results)
    return 0


class Ready(NamedTuple):
    """What is evaluated. `report` says which weights; `folder` is for results, on rank 0."""

    task: Any
    model: Any
    report: str
    folder: Path | None


@contextmanager
def ready(cfg: CfgNode) -> Iterator[Ready]:
    """The task and the model with its weights, among the processes that torchrun started."""
    from vil import build, build_data
    from vil.data.workers import worker_errors

    refuse_random_weights(cfg)
    device = build.set_up(cfg)
    with build.joined(cfg, device) as ranks, worker_errors():
        model, report = loaded_model(cfg)
        model = build.place(model, cfg, device, training=False)
        build.select_attention_backends(model, cfg, device, ranks, training=False)
        build.compile_models(cfg, device, model)
        tests = build_data.build_test_loaders(cfg, ranks, device)
        task = build.build_task(cfg, ranks, device, tests, build_data.build_links(cfg, tests))
        yield Ready(task, model, report, results_folder(cfg) if ranks.is_main else None)


def tell(name: str, figures: dict[str, Any]) -> None:
    """A line of a test set's figures, as in the log of training."""
    from vil.engine.logger import pairs

    print(f"val set {name} {pairs({k: v for k, v in figures.items() if k != 'per_class'})}")


def tell_classes(table: dict[str, list[int]] | None, classes: list[str]) -> None:
    """How many of each class are right, if that was counted."""
    if table:
        for label, right, count in zip(classes, table["right"], table["count"]):
            print(f"  {label:20} {right}/{count}")


def write_results(folder: Path, results: dict[str, dict]) -> None:
    """results.json; what has no figure is null there."""
    from vil.utils.atomic_write import replace_text

    with written(folder / "results.json", "OUTPUT_DIR"):
        replace_text(folder / "results.json", json.dumps(without_nan(results), indent=1) + "\n")


def without_nan(value: Any) -> Any:
    """The same with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def loaded_model(cfg: CfgNode):
    """The model with its weights, and a line that says which."""
    from vil import build

    model = build.build_model(cfg, weights_follow=bool(cfg.MODEL.MODEL_PATH))
    if not cfg.MODEL.MODEL_PATH:
        return model, f"published weights of {cfg.MODEL.ARCH}"
    return model, build.load_model_path(model, cfg, whole=True)


def refuse_random_weights(cfg: CfgNode) -> None:
    """CheckpointError where the model, or its head, would stay as it was initialised."""
    if not (cfg.MODEL.MODEL_PATH or cfg.MODEL.PRETRAINED):
        raise CheckpointError("evaluation needs weights: set MODEL.MODEL_PATH, or give --run DIR")
    if cfg.FINETUNE.HEAD == "new":
        raise CheckpointError(
            "FINETUNE.HEAD new would evaluate a random head: keep it, or rows:FILE"
        )


def results_folder(cfg: CfgNode) -> Path:
    """OUTPUT_DIR/eval, made before hours of evaluation and not after them."""
    folder = Path(cfg.OUTPUT_DIR, "eval")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"OUTPUT_DIR {cfg.OUTPUT_DIR}: {error.strerror}") from error
    return folder
