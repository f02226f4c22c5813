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
from pathlib import Path

from yacs.config import CfgNode

from vil.cli.arguments import config_arguments, resolve
from vil.cli.changes import check_changes, to_keep
from vil.cli.relay import forward_logs, to_stderr
from vil.config import ConfigError, dump
from vil.config.defaults import leaves
from vil.utils.errors import DataError

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in the folder, if any; without --config-file by the "
        "folder's own config",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build everything, run one step on made-up data, print the memory it took and the "
        "resolved config",
    )


def run(args: argparse.Namespace) -> int:
    return begin(args, asked(args))


def asked(args: argparse.Namespace) -> CfgNode:
    """The config of the arguments: with --resume, the folder's own where none is named."""
    if args.resume and args.output_dir and not args.config_file:
        saved = Path(args.output_dir, "config.yaml")
        args.config_file = str(saved) if saved.is_file() else None
    return resolve(args)


def begin(args: argparse.Namespace, cfg: CfgNode) -> int:
    """Train, go on training, or do what else the arguments and the config say."""
    if args.dry_run:
        return dry_run(cfg)
    if cfg.EVALUATE:
        from vil.cli.evaluate import evaluate

        return evaluate(cfg)
    refuse_other_bytes(cfg)
    folder = Path(cfg.OUTPUT_DIR)
    if not args.resume and any(folder.glob("checkpoints/step-*")):
        raise ConfigError(
            f"{folder} already holds a run: add --resume to go on with it, "
            "or choose another --output_dir"
        )
    train_run(cfg)
    return 0


def refuse_other_bytes(cfg: CfgNode) -> None:
    """ConfigError for a name that is not UTF-8: the run's config could not be read again."""
    for key, value in leaves(cfg).items():
        try:
            "".join(map(str, value if isinstance(value, tuple | list) else [value])).encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{key}: {value!r} is not UTF-8: rename it or, if only the locale is not, set "
                "PYTHONUTF8=1"
            ) from None


def train_run(cfg: CfgNode, max_steps: int | None = None) -> None:
    """Build all objects, then open OUTPUT_DIR and train: what cannot be built leaves no folder."""
    from vil import build, build_data
    from vil.data.workers import worker_errors
    from vil.engine import distributed
    from vil.engine.checkpoint.manager import CheckpointPolicy
    from vil.engine.checkpoint.save_load import TrainState, checkpoints, resume
    from vil.engine.loop import train
    from vil.engine.preemption import PreemptionGuard
    from vil.engine.run_dir import RunDir, RunInUseError
    from vil.layers.attention import set_progress
    from vil.report.curves import draw

    folder = Path(cfg.OUTPUT_DIR)
    begun = bool(checkpoints(folder / "checkpoints"))
    changes = check_changes(cfg) if begun else []
    bad_file = folder / "bad_samples.txt"
    device = build.set_up(cfg)
    patience = dict(hang_seconds=cfg.RUN.HANG_SECONDS, grace_seconds=cfg.RUN.GRACE_SECONDS)
    with (
        build.joined(cfg, device) as ranks,
        PreemptionGuard(ranks, **patience) as guard,
        forward_logs(ranks.is_main) as relay,
    ):
        model = build.build_model(cfg, weights_follow=begun or bool(cfg.MODEL.MODEL_PATH))
        loader = build_data.build_train_loader(cfg, ranks, device, bad_file)
        tests = build_data.build_test_loaders(cfg, ranks, device, bad_file)
        if cfg.DETECTION.MODEL:
            build_data.warn_of_names(loader.classes, tests)
        task = build.build_task(cfg, ranks, device, tests, build_data.build_links(cfg, tests))
        if cfg.MODEL.MODEL_PATH and not begun:
            log.info(build.load_model_path(model, cfg))
        elif cfg.FINETUNE.HEAD != "keep" and not begun:
            log.warning("FINETUNE.HEAD without MODEL.MODEL_PATH: all weights start afresh")
        log.info("%s", facts(cfg, model, loader, tests))
        model = build.place(model, cfg, device)
        ema = build.build_ema(cfg, model)
        build.spread(cfg, model, ema, ranks, device)
        build.compile_models(cfg, device, model, *([ema.model] if ema else []))
        optimizer = build.build_optimizer(cfg, model)
        schedule = build.build_schedule(cfg, loader.steps_per_epoch)
        scaler = build.build_scaler(cfg, device)
        start = TrainState(
            seed=cfg.SEED,
            world=ranks.world,
            batch_size=cfg.DATALOADER.BSZ * cfg.OPTIM.ACCUMULATE,
            steps_per_epoch=loader.steps_per_epoch,
            optimizer=build.optimizer_name(cfg),
        )
        with RunDir(folder, ranks, device) as run, worker_errors():
            if distributed.broadcast_object(bool(checkpoints(run.checkpoints)) != begun):
                raise RunInUseError(
                    f"{folder} was written by another run meanwhile: choose another --output_dir, "
                    "or add --resume to go on with that one"
                )
            relay.open(run.log.say if ranks.is_main else to_stderr)
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
            for line in changes if ranks.is_main else ():
                log.warning(line)
            kept = dict(folder=folder, begun=begun, say=run.log.say)
            build.select_attention_backends(model, cfg, device, ranks, training=True, **kept)
            run.write("config.yaml", dump(to_keep(cfg)))
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
                guard=guard,
                ranks=ranks,
                device=device,
                epochs=cfg.OPTIM.EPOCHS,
                set_progress=set_progress,
                ema=ema,
                clip_grad=cfg.OPTIM.CLIP_GRAD,
                accumulate=cfg.OPTIM.ACCUMULATE,
                drop_on_plateau=cfg.OPTIM.DROP_FACTOR if cfg.OPTIM.VAL else 0.0,
                max_bad_steps=cfg.RUN.MAX_BAD_STEPS,
                log_freq=cfg.LOG_FREQ,
                rhythm=CheckpointPolicy(
                    eval_every=cfg.RUN.EVAL_EVERY,
                    save_every=cfg.RUN.SAVE_EVERY,
                    save_steps=cfg.RUN.SAVE_STEPS,
                    keep=1 if cfg.ONLY_SAVE_LAST else cfg.RUN.KEEP,
                    keep_every=cfg.RUN.KEEP_EVERY,
                    max_failed_saves=cfg.RUN.MAX_FAILED_SAVES,
                ),
                max_steps=max_steps,
                draw=draw,
            )


def facts(cfg: CfgNode, model, loader, tests: dict) -> str:
    """What is trained on what, in a line."""
    images, batch = len(loader.samples.dataset), cfg.DATALOADER.BSZ * cfg.OPTIM.ACCUMULATE
    sets = ", ".join(f"{name} {test.num_samples} images" for name, test in tests.items())
    count = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"{count:,} parameters; train on {', '.join(cfg.DATA.TRAIN)}: {images} images of "
        f"{len(loader.classes)} classes, {loader.steps_per_epoch} steps of {batch} an epoch "
        f"({images % batch} left out); evaluate on {sets}"
    )


def check_data(cfg: CfgNode) -> None:
    """Refuse what the real data would refuse; data that are not here are only mentioned, and of
    those that are drawn a few are, for as long as this takes."""
    import torch

    from vil import build_data, build_detection
    from vil.engine.distributed import DistInfo

    try:
        with tempfile.TemporaryDirectory() as folder:
            few = build_detection.few_drawn(cfg, folder)
            build_data.build_train_loader(few, DistInfo(), torch.device("cpu"))
            build_data.build_test_loaders(few, DistInfo(), torch.device("cpu"))
    except DataError as error:
        if Path(cfg.DATA.PATH).is_dir():
            raise
        log.warning("the data are not checked: %s", str(error).splitlines()[0])


def dry_run(cfg: CfgNode) -> int:
    """One step on made-up images of the config's size and classes, in a folder that vanishes."""
    from vil.engine.logger import memory_mb

    check_data(cfg)
    trial = cfg.clone()
    trial.defrost()
    made_up = "fake_boxes" if cfg.DETECTION.MODEL else "fake"
    trial.DATA.TRAIN = trial.DATA.TEST = (made_up,)
    trial.DATA.TARGETMAP = ""
    trial.MODEL.VIT.MSVIT.TUNE = False  # which may take minutes
    images = cfg.DATALOADER.BSZ * cfg.OPTIM.ACCUMULATE
    made = {"n": images, "size": cfg.INPUT.IMAGE_SIZE, "num_classes": cfg.DATA.NUM_CLASSES}
    if cfg.DETECTION.MODEL:  # the largest pictures that training may see
        given = trial.DETECTION.INPUT
        given.TRAIN_SIZES = [min(max(given.TRAIN_SIZES), given.MAX_SIZE)]
        made |= {"size": given.MAX_SIZE, "height": given.TRAIN_SIZES[0]}
    trial.DATA.KWARGS = CfgNode(made)
    with tempfile.TemporaryDirectory() as folder:
        trial.OUTPUT_DIR = trial.DATA.PATH = folder
        train_run(trial, max_steps=1)
    if os.environ.get("RANK", "0") != "0":
        return 0
    print(dump(cfg))
    print(f"dry run: one step of {images} made-up images took {memory_mb():.0f} MB at its peak")
    return 0
