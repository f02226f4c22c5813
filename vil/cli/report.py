"""Make one HTML page of a run: figures, curves, confusions, pictures, config, machine.

  vil report runs/nano                          writes runs/nano/report.html
  vil report runs/nano --out nano.html --checkpoint last
  vil report runs/nano --no-eval                what stands in the folder, also of a running run
  vil report runs/nano --data /mnt/flowers DEVICE cpu

The best checkpoint is evaluated on the run's first test set, which gives the confusions, the
accuracy of each class, and the pictures that it got most wrong and most right. KEY VALUE pairs and
flags change that evaluation, not what the page says of the run's config. The page of a detector has
what training logged: vil detect evaluate --pictures shows what it got wrong.

The file needs nothing but itself: no script, no network, pictures inside; less than 3 MB whatever
the size of the test set. All names are escaped. With --no-eval neither weights nor data are read.
"""

import argparse
import logging
import sys
from datetime import datetime
from pathlib import Path

from yacs.config import CfgNode

import vil
from vil.cli.arguments import config_arguments, resolve
from vil.cli.evaluate import loaded_model, of_run
from vil.cli.output import output_file, written
from vil.config import ConfigError, diff, dump, get_config
from vil.config.defaults import leaves
from vil.utils.errors import CheckpointError

PAGE = "report.html"
ENDINGS = (".html", ".htm")
log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN", help="the folder of a run")
    config_arguments(parser)
    add("--checkpoint", default="best", choices=["best", "last"], help="the one to evaluate (best)")
    add("--no-eval", action="store_true", help="only what stands in the folder")
    add("--out", metavar="FILE", help=f"of the page (RUN/{PAGE})")


def run(args: argparse.Namespace) -> int:
    from vil.report.page import Page, render
    from vil.report.run_record import Record
    from vil.utils.atomic_write import replace_text

    folder = Path(args.run)
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder}: no config.yaml there, so it is not a run's folder")
    if args.config_file:
        raise ConfigError("leave --config-file out: the run has its own")
    path = output_file(args.out or str(folder / PAGE), endings=ENDINGS)
    if args.no_eval and args.opts:
        log.warning("--no-eval, so without effect: %s", " ".join(args.opts))
    own = get_config(folder / "config.yaml")
    if own.DETECTION.MODEL and not args.no_eval:
        log.warning("the page of a detector has what training logged; vil detect evaluate has more")
    evaluated = None if args.no_eval or own.DETECTION.MODEL else evaluate(args)
    moment = datetime.now().astimezone().isoformat(timespec="seconds")
    with written(folder, "RUN"):
        record = Record.read(folder)
    page = Page(
        title=folder.resolve().name,
        record=record,
        settings=settings(own),
        model=model_facts(own, args.imports),
        evaluated=evaluated,
        epochs=own.OPTIM.EPOCHS,
        made=f"Made by vil {vil.__version__}, {moment}.",
    )
    with written(path):
        replace_text(path, render(page))
    print(path)
    return 0


def settings(cfg: CfgNode) -> list:
    """Every key with its value as a file has it, and its default where that is another one."""
    from vil.report.page import Setting

    changed = diff(cfg, get_config())
    return [
        Setting(key, as_yaml(value), as_yaml(changed[key][1]) if key in changed else None)
        for key, value in leaves(cfg).items()
    ]


def as_yaml(value) -> str:
    return dump(CfgNode({"value": value})).partition(":")[2].strip()


def model_facts(cfg: CfgNode, imports: list[str]):
    """The model's stages and what they cost; why it cannot be built, where it cannot."""
    import torch

    from vil import build
    from vil.cli.analyze import foreign, ours
    from vil.cli.arguments import import_file
    from vil.models.vision_longformer import MsViT
    from vil.report.page import ModelFacts

    for file in imports:
        import_file(file)
    if own := cfg.DETECTION.MODEL:
        return f"A {own} on {cfg.MODEL.VIT.MSVIT.ARCH}; what it costs depends on the picture."
    try:
        with torch.device("meta"):
            model = build.build_model(cfg, weights_follow=True)
        size = (cfg.INPUT.IMAGE_SIZE,) * 2
        rows, counts = ours(model, size) if isinstance(model, MsViT) else foreign(model, size)
    except ConfigError as error:
        return f"The model cannot be built here: {error}"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    stages = [(*row, count) for row, count in zip(rows, counts)]
    return ModelFacts(parameters, sum(counts), stages)


def evaluate(args: argparse.Namespace):
    """The checkpoint's answers to the first test set, with the pictures to show."""
    from vil import build, build_data
    from vil.cli.answers import collect
    from vil.data.workers import worker_errors
    from vil.engine.checkpoint.save_load import resolve_link, step_of
    from vil.engine.distributed import DistInfo
    from vil.tasks.classification.report import Evaluated

    if resolve_link(Path(args.run, "checkpoints"), args.checkpoint) is None:
        raise CheckpointError(f"{args.run} has no {args.checkpoint} checkpoint yet: see --no-eval")
    of_run(args)
    cfg = resolve(args)
    device, ranks = build.set_up(cfg), DistInfo()
    with worker_errors():
        model, report = loaded_model(cfg)
        print(report, file=sys.stderr)
        model = build.place(model, cfg, device, training=False)
        build.select_attention_backends(model, cfg, device, ranks, training=False)
        tests = build_data.build_test_loaders(cfg, ranks, device)
        task = build.build_task(cfg, ranks, device, tests, build_data.build_links(cfg, tests))
        test_set, loader = next(iter(tests.items()))
        answers = collect(task, model, test_set)
    same = test_set not in task.links
    return Evaluated(
        test_set=test_set,
        checkpoint=f"{args.checkpoint} checkpoint, step {step_of(Path(cfg.MODEL.MODEL_PATH)):,}",
        answers=answers,
        classes=loader.classes,
        answers_of=loader.classes if same else names_of_model(args.run, cfg.DATA.NUM_CLASSES),
        same=same,
        thumbnails=thumbnails(loader.dataset, answers),
    )


def names_of_model(folder: str, count: int) -> list[str]:
    """The lines of the run's classes.txt, or numbers."""
    from vil.utils.atomic_write import TEXT

    file = Path(folder, "classes.txt")
    names = file.read_text(**TEXT).splitlines() if file.is_file() else []
    return names if len(names) == count else [str(number) for number in range(count)]


def thumbnails(dataset, answers) -> dict[int, tuple[str, bytes | None]]:
    """{place in the answers: (the image's name, its JPEG)} of those that are shown, read again by
    their number in the set."""
    from vil.tasks.classification.report import thumbnail

    found = {}
    for place in (int(n) for places in answers.extremes().values() for n in places):
        index = int(answers.indices[place])
        try:
            data = thumbnail(dataset.image(index))
        except OSError:  # deleted meanwhile
            data = None
        found[place] = dataset.sample_name(index), data
    return found
