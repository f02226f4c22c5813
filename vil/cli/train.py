"""Train a model from a config.

vil train --config-file digits/vil_nano.yaml --output_dir runs/nano
vil train --config-file digits/vil_nano.yaml --output_dir runs/nano --resume
vil train --config-file mine.yaml --data /data/flowers OPTIM.LR 5e-4 OPTIM.EPOCHS 100
torchrun --nproc_per_node=8 tools/train.py --config-file imagenet/vil_small_rpb.yaml --data DIR
vil train --config-file mine.yaml --dry-run     one step on made-up data: does it build and fit?
"""

import argparse
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from yacs.config import CfgNode

from vil.cli.arguments import config_arguments, resolve
from vil.config import ConfigError, dump


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in the folder, if any",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build everything, run one step on made-up data, print the memory it took and the "
        "resolved config",
    )


def run(args: argparse.Namespace) -> int:
    cfg = resolve(args)
    if args.dry_run:
        return dry_run(cfg)
    if cfg.EVALUATE:
        from vil.cli.evaluate import evaluate

        return evaluate(cfg)
    folder = Path(cfg.OUTPUT_DIR)
    if not args.resume and any(folder.glob("checkpoints/step-*")):
        raise ConfigError(
            f"{folder} already holds a run: add --resume to go on with it, "
            "or choose another --output_dir"
        )
    train_run(cfg)
    return 0


def train_run(cfg: CfgNode, max_steps: int | None = None) -> None:
    """Build all objects, then open OUTPUT_DIR and train: what cannot be built leaves no folder."""
    from vil import build, build_data
    from vil.engine import distributed
    from vil.engine.run import Run
    from vil.engine.state import State, checkpoints, resume
    from vil.engine.train import train
    from vil.layers.attention import set_progress
    from vil.report.curves import draw

    folder = Path(cfg.OUTPUT_DIR)
    bad_file = folder / "bad_samples.txt"
    device = build.set_up(cfg)
    with build.joined(cfg, device) as ranks:
        begun = bool(checkpoints(folder / "checkpoints"))
        model = build.build_model(cfg, weights_follow=begun or bool(cfg.MODEL.MODEL_PATH))
        loader = build_data.build_train_loader(cfg, ranks, device, bad_file)
        tests = build_data.build_test_loaders(cfg, ranks, device, bad_file)
        task = build.build_task(cfg, ranks, device, tests, build_data.build_links(cfg, tests))
        report = build.load_model_path(model, cfg) if cfg.MODEL.MODEL_PATH and not begun else None
        model = build.place(model, cfg, device)
        optimizer = build.build_optimizer(cfg, model)
        schedule = build.build_schedule(cfg, loader.steps_per_epoch)
        scaler = build.build_scaler(cfg, device)
        ema = build.build_ema(cfg, model)
        start = State(
            seed=cfg.SEED,
            world=ranks.world,
            batch_size=cfg.DATALOADER.BSZ * cfg.OPTIM.ACCUMULATE,
            steps_per_epoch=loader.steps_per_epoch,
            optimizer=build.optimizer_name(cfg),
        )
        with Run(folder, ranks, device) as run, relayed(run, ranks.is_main):
            if report:
                run.log.say(f"weights of {cfg.MODEL.MODEL_PATH}: {report}")
            state = resume(
                run.checkpoints,
                start,
                model,
                optimizer,
                scaler,
                ema=ema,
                ranks=ranks,
                say=run.log.say,
            )
            run.write("config.yaml", dump(cfg))
            run.write("classes.txt", "".join(f"{name}\n" for name in loader.classes))
            train(
                task,
                distributed.wrap(model, ranks, device),
                loader,
                optimizer,
                schedule,
                scaler,
                state,
                run=run,
                ranks=ranks,
                device=device,
                epochs=cfg.OPTIM.EPOCHS,
                set_progress=set_progress,
                ema=ema,
                clip_grad=cfg.OPTIM.CLIP_GRAD,
                accumulate=cfg.OPTIM.ACCUMULATE,
                drop_on_plateau=cfg.OPTIM.DROP_FACTOR if cfg.OPTIM.VAL else 0.0,
                log_freq=cfg.LOG_FREQ,
                eval_every=cfg.RUN.EVAL_EVERY,
                save_every=cfg.RUN.SAVE_EVERY,
                keep=1 if cfg.ONLY_SAVE_LAST else cfg.RUN.KEEP,
                max_steps=max_steps,
                draw=draw,
            )


@contextmanager
def relayed(run, is_main: bool) -> Iterator[None]:
    """The package's log records become lines of the run's log; other ranks' stay on stderr."""
    log, relay = logging.getLogger("vil"), logging.Handler(logging.INFO)
    level = log.level
    relay.emit = lambda record: run.log.say(record.getMessage())
    if is_main:
        log.setLevel(logging.INFO)
        log.addHandler(relay)
    log.propagate = not is_main
    try:
        yield
    finally:
        log.removeHandler(relay)
        log.setLevel(level)
        log.propagate = True


def dry_run(cfg: CfgNode) -> int:
    """One step on made-up images of the config's size and classes, in a folder that vanishes."""
    from vil.engine.log import memory_mb

    trial = cfg.clone()
    trial.defrost()
    trial.DATA.TRAIN = trial.DATA.TEST = ("fake",)
    trial.DATA.KWARGS = CfgNode(
        {"n": cfg.DATALOADER.BSZ, "size": cfg.INPUT.IMAGE_SIZE, "num_classes": cfg.DATA.NUM_CLASSES}
    )
    with tempfile.TemporaryDirectory() as folder:
        trial.OUTPUT_DIR = folder
        train_run(trial, max_steps=1)
    if os.environ.get("RANK", "0") != "0":
        return 0
    print(dump(cfg))
    size, peak = cfg.DATALOADER.BSZ, memory_mb()
    print(f"dry run: one step of {size} made-up images took {peak:.0f} MB at its peak")
    return 0
