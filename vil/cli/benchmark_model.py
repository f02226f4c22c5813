"""Images per second and peak memory of whole models, in evaluation and in training, in one run.

  vil benchmark model                                     vil_tiny, batch 16, and others beside it
  vil benchmark model --config-file imagenet/vil_small.yaml DATALOADER.BSZ 8 --ways fp32,bf16
  vil benchmark model --ways bf16,bf16+nhwc,bf16+compile --backends none --beside none DEVICE cuda
  vil benchmark model --ways bf16 --backends none --beside none --profile

Rows: the config's model in each of --ways, with each of --backends in the first way, and the models
of --beside (timm/<name> or torchvision's) in those ways that name a precision only. All take turns,
evaluation and training step by step; shown are medians, tensor memory beyond weights and images,
and images per second over the first row's. What cannot run says why. model.json and model.csv come
to lie in --out. --profile then takes a step of each way apart: the ten costliest operations by
module, costs-<way>.csv with all of them, and trace-<way>.json.gz for Perfetto.
"""

import argparse
from pathlib import Path

from yacs.config import CfgNode

from vil.cli.arguments import config_arguments, of_classifier, resolve
from vil.cli.benchmark import number, result_folder, split, write_csv, write_results
from vil.config import ConfigError

DEFAULT = "imagenet/vil_tiny.yaml"
BATCH = 16
WAYS = {  # parts of a way; what it does not name is as the config has it
    "fp32": {"AMP.ENABLED": False, "AMP.TF32": False},
    "tf32": {"AMP.ENABLED": False, "AMP.TF32": True},
    "bf16": {"AMP.ENABLED": True, "AMP.DTYPE": "bfloat16"},
    "fp16": {"AMP.ENABLED": True, "AMP.DTYPE": "float16"},
    "nchw": {"AMP.MEMORY_FORMAT": "nchw"},
    "nhwc": {"AMP.MEMORY_FORMAT": "nhwc"},
    "compile": {"MODEL.COMPILE": True},
    "checkpoint": {"MODEL.GRAD_CHECKPOINT": True},
}
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
BESIDE = "timm/swin_tiny_patch4_window7_224,timm/deit_tiny_patch16_224"
SHOWN = 10  # costliest operations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    add = parser.add_argument
    ways = "fp32,fp32+nhwc,bf16,bf16+nhwc,fp32+compile,bf16+compile"
    add("--ways", default=ways, metavar="A,B", help=f"of {', '.join(WAYS)}, joined by + ({ways})")
    add(
        "--backends", default="all", metavar="A,B", help="pinned in the first way: all, none, names"
    )
    add("--beside", default=BESIDE, metavar="A,B", help=f"other models, or none ({BESIDE})")
    add("--rounds", default="9", metavar="N", help="measurements of each, one more warms up (9)")
    add("--out", metavar="DIR", help="benchmarks/results/model-<machine>-<time> by default")
    add("--profile", action="store_true", help="the costliest operations of each way, and a trace")


def run(args: argparse.Namespace) -> int:
    if args.config_file is None:
        args.config_file = DEFAULT
        args.opts = [f"DATALOADER.BSZ={BATCH}", *(args.opts or ())]
    cfg = of_classifier(resolve(args), "only classifiers are measured")
    try:
        rounds, trials = number(args.rounds, "--rounds"), trials_of(cfg, args)
    except ValueError as error:
        raise ConfigError(str(error)) from error

    from vil import build
    from vil.bench.model import measure, plain
    from vil.ops.tuning import tuning_cache
    from vil.utils.machine import machine

    device = build.set_up(cfg)
    tuning_cache.load(device.type)
    about = machine(device)
    folder = result_folder(args.out, about, "model")
    print(
        f"{about['name']}, {about['threads']} threads, torch {about['torch']}; {len(trials)} rows, "
        f"{cfg.DATALOADER.BSZ} images of {cfg.INPUT.IMAGE_SIZE} px, {rounds} rounds -> {folder}"
    )
    entries = [entry(*trial) for trial in trials]
    rows = measure(entries, rounds)
    print(table(rows), flush=True)
    write_results(folder, "model", plain(rows), about)
    if args.profile:
        profile(entries, folder)
    return 0


def trials_of(cfg: CfgNode, args: argparse.Namespace) -> list[tuple[str, str, CfgNode]]:
    """(model, way, config) of each row. ValueError for an unknown way or backend."""
    from vil.ops import BACKENDS
    from vil.utils.lookup import lookup

    ways = split(args.ways, "--ways")
    keys = {
        way: {
            key: value
            for part in way.split("+")
            for key, value in lookup(WAYS, part, "way").items()
        }
        for way in ways
    }
    name = Path(args.config_file).stem if cfg.MODEL.ARCH == "msvit" else cfg.MODEL.ARCH
    trials = [(name, way, changed(cfg, keys[way])) for way in ways]
    pinned = {"all": list(BACKENDS), "none": []}.get(args.backends)
    for backend in split(args.backends, "--backends") if pinned is None else pinned:
        lookup(BACKENDS, backend, "backend")
        pin = keys[ways[0]] | {"MODEL.VIT.MSVIT.BACKEND": backend}
        trials.append((name, ways[0], changed(cfg, pin)))
    for other in [] if args.beside == "none" else split(args.beside, "--beside"):
        for way in (way for way in ways if way in PRECISIONS):
            trials.append((other, way, changed(cfg, keys[way] | {"MODEL.ARCH": other})))
    return trials


def changed(cfg: CfgNode, keys: dict) -> CfgNode:
    """The config with other values for some keys."""
    trial = cfg.clone()
    trial.defrost()
    trial.merge_from_list([word for pair in keys.items() for word in pair])
    trial.freeze()
    return trial


def entry(name: str, way: str, cfg: CfgNode) -> tuple:
    """The row of a trial, and the contender that fills it; None, and the reason, where it cannot
    be built."""
    import torch

    from vil import build
    from vil.bench.model import Contender, Row
    from vil.layers.attention import set_progress
    from vil.ops import choose
    from vil.utils.train_step import TrainStep

    backend = cfg.MODEL.VIT.MSVIT.BACKEND
    try:
        device = build.set_up(cfg)
        model = build.place(build.build_model(cfg, weights_follow=True), cfg, device)
        asked = [a for a in build.attention_cases(model, cfg, device) if a.case.needs_grad]
        taken = ", ".join(dict.fromkeys(choose(a.case, a.backend) for a in asked))
        build.compile_models(cfg, device, model)
        optimizer = build.build_optimizer(cfg, model)
    except ConfigError as error:
        return Row(name, way, backend, reason=str(error)), None
    set_progress(model, TrainStep(cfg.SEED, 0, 0, 1, 1))
    torch.manual_seed(cfg.SEED)
    side, count = cfg.INPUT.IMAGE_SIZE, cfg.DATALOADER.BSZ
    images = torch.randn(count, 3, side, side, device=device)
    one = Contender(
        model,
        optimizer,
        build.build_scaler(cfg, device),
        images.contiguous(memory_format=build.MEMORY_FORMATS[cfg.AMP.MEMORY_FORMAT]),
        torch.randint(cfg.DATA.NUM_CLASSES, (count,), device=device),
        build.amp_dtype(cfg),
        lambda: build.set_up(cfg),
    )
    return Row(name, way, taken if backend == "auto" else f"{backend}, pinned"), one


def table(rows: list) -> str:
    """A line per row."""
    names = max(len(row.model) for row in rows)
    head = (
        f"\n  {'':{names}} {'':14} {'':22}{'images per second':>20}{'x the first':>16}{'MiB':>16}"
        f"\n  {'model':{names}} {'way':14} {'attention':22}"
    )
    head += "".join(f"{title:>{w}}" for w in (10, 8, 8) for title in ("eval", "train"))
    lines = [head]
    for row in rows:
        cells = f"  {row.model:{names}} {row.way:14} {row.attention:22}"
        if row.training is None:
            lines.append(f"{cells}  {row.reason}")
            continue
        figures = (
            (row.evaluation, 10, 1), (row.training, 10, 1), (row.over_evaluation, 8, 2),
            (row.over_training, 8, 2), (row.evaluation_mib, 8, 0), (row.training_mib, 8, 0),
        )  # fmt: skip
        cells += "".join(f"{'-':>{w}}" if x is None else f"{x:{w}.{d}f}" for x, w, d in figures)
        lines.append(cells + (f"  ({row.reason})" if row.reason else ""))
    return "\n".join(lines)


def profile(entries: list, folder: Path) -> None:
    """The costliest operations of a training step in each way of the config's own model. What is
    compiled has no modules left and is passed over."""
    from vil.bench.profile import profiled

    own = entries[0][0].model
    for row, one in entries:
        if row.model != own or one is None or "pinned" in row.attention or "compile" in row.way:
            continue
        trace = folder / f"trace-{row.way}.json.gz"
        costs = profiled(one.train, one.network, one.images.device, trace)
        write_csv(folder / f"costs-{row.way}.csv", [cost._asdict() for cost in costs])
        print(f"\n  a training step of {own}, {row.way}; {trace}")
        print(f"  {'module':36}{'way':10}{'ms':>9}{'share':>8}{'calls':>7}  operator")
        for cost in costs[:SHOWN]:
            print(
                f"  {cost.module:36}{cost.way:10}{1e3 * cost.seconds:9.1f}{cost.share:8.1%}"
                f"{cost.calls:7}  {cost.operator}"
            )
