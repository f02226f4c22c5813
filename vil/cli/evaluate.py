"""Evaluate weights on the test sets.

  vil evaluate --run runs/nano                    the best checkpoint, with the run's own config
  vil evaluate --run runs/nano --checkpoint last
  vil evaluate --config-file imagenet/vil_small.yaml --data DIR MODEL.MODEL_PATH best.pth
  vil evaluate --run runs/nano OUTPUT_PERCLASS_ACC True
  vil evaluate MODEL.MODEL_PATH nano.safetensors DATA.TEST digits       a file of vil convert

Prints loss, top-1 and top-5, and writes them to OUTPUT_DIR/eval/results.json. Random weights are
never evaluated.
"""

import argparse
import json
from pathlib import Path

from yacs.config import CfgNode

from vil.cli.arguments import config_arguments, resolve
from vil.cli.described import described
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
    return evaluate(resolve(args))


def of_weights(args: argparse.Namespace) -> None:
    """Put the config of a run, or of a file that says what it is, where `resolve` finds it."""
    if args.run:
        of_run(args)
    elif not args.config_file:
        own, args.known_classes = described(args.opts or ())
        args.opts = [*own, *(args.opts or ())]


def of_run(args: argparse.Namespace) -> None:
    """Put a run's config file, folder and checkpoint where `resolve` finds them."""
    from vil.engine.state import pointer

    folder = Path(args.run)
    if args.config_file:
        raise ConfigError(f"--run {folder}: leave --config-file out, the run has its own")
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"--run {folder}: no config.yaml there, so it is not a run's folder")
    checkpoint = pointer(folder / "checkpoints", args.checkpoint)
    if checkpoint is None:
        raise CheckpointError(f"{folder} has no {args.checkpoint} checkpoint yet")
    args.config_file = str(folder / "config.yaml")
    args.output_dir = args.output_dir or str(folder)
    # the checkpoint's head is the run's own, whatever was done to the one that the run began with
    args.opts = [f"MODEL.MODEL_PATH={checkpoint}", "FINETUNE.HEAD=keep", *(args.opts or ())]


def evaluate(cfg: CfgNode) -> int:
    """Load MODEL.MODEL_PATH, evaluate, print and write the figures."""
    from vil import build, build_data
    from vil.data.workers import deaths_named
    from vil.engine.log import pairs
    from vil.utils.files import replace_text

    refuse_random_weights(cfg)
    device = build.set_up(cfg)
    with build.joined(cfg, device) as ranks, deaths_named():
        model, report = loaded_model(cfg)
        model = build.place(model, cfg, device, training=False)
        build.settle_backends(model, cfg, device, ranks, training=False)
        build.compile_models(cfg, device, model)
        tests = build_data.build_test_loaders(cfg, ranks, device)
        task = build.build_task(cfg, ranks, device, tests, build_data.build_links(cfg, tests))
        folder = results_folder(cfg) if ranks.is_main else None
        results = task.evaluate(model)
        if not ranks.is_main:
            return 0
        print(report)
        for name, figures in results.items():
            table = figures.get("per_class")
            print(f"val set {name} {pairs({k: v for k, v in figures.items() if k != 'per_class'})}")
            if table:
                classes = task.test_loaders[name].classes
                print(
                    "\n".join(
                        f"  {label:20} {right}/{count}"
                        for label, right, count in zip(classes, table["right"], table["count"])
                    )
                )
        replace_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    return 0


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
