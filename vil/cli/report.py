"""Write an HTML report of a run: metrics, curves, confusion matrix, images, config, machine.
Or compare several runs: their results, the settings that differ, and their curves.

  vil report runs/nano                          writes runs/nano/report.html
  vil report runs/nano --out nano.html --checkpoint last
  vil report runs/nano --no-eval                only what the run has logged; also during training
  vil report runs/nano --data /mnt/flowers DEVICE cpu
  vil report runs/a runs/b runs/c --out abc.html

Evaluates the best checkpoint on the first set in DATA.VAL or, if DATA.VAL is empty, in DATA.TEST.
The page shows the confusion matrix, the accuracy of each class, and the most confident errors and
correct predictions. KEY VALUE pairs and flags change this evaluation, not the config that the page
shows. For a detector, the page only shows what training logged; vil evaluate --pictures draws a
detector's errors.

A comparison shows what several runs of the same task have logged, and evaluates nothing. It marks
the best result of each metric.

The page is a single file of less than 3 MB, with all images and without scripts or external links.
Class and file names are escaped. With --no-eval, neither weights nor data are read.
"""

import argparse
import itertools
import logging
import os
from pathlib import Path

from vil.cli.arguments import checkpoint_argument, config_arguments, files_read, options_of
from vil.config.plugins import run_imports
from vil.utils.errors import ConfigError
from vil.utils.output_paths import output_file

log = logging.getLogger(__name__)
PAGE = "report.html"
ENDINGS = (".html", ".htm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN", help="the folder of a run; several folders are compared")
    config_arguments(parser)
    checkpoint_argument(parser, "checkpoint to evaluate (best)")
    add("--no-eval", action="store_true", help="show only what the run has logged")
    add("--out", metavar="FILE", help=f"file to write (RUN/{PAGE}); required for several runs")


def run(args: argparse.Namespace) -> int:
    from vil.workflows.report import compare_runs, write_report

    if not _is_run(args.run):
        raise ConfigError(f"{args.run} is not the folder of a run: it has no config.yaml")
    if args.config_file:
        raise ConfigError("the run's config is used: remove --config-file")
    others = list(itertools.takewhile(_is_run, args.opts))  # argparse counts them as KEY VALUE
    args.opts = args.opts[len(others) :]
    folders = list({path.resolve(): path for path in map(Path, [args.run, *others])}.values())
    if len(folders) > 1 and not args.out:
        raise ConfigError("several runs are compared in one file: add --out FILE")
    path = output_file(args.out or folders[0] / PAGE, "--out", ENDINGS, files_read(args, "out"))
    if args.opts and len(folders) > 1:
        raise ConfigError(
            f"{args.opts[0]} is not the folder of a run, and a comparison takes no KEY VALUE, "
            "because it evaluates nothing"
        )
    if args.no_eval and args.opts:
        log.warning("--no-eval is given, so these options have no effect: %s", " ".join(args.opts))
    run_imports(args.imports, ())
    if len(folders) > 1:
        compare_runs(folders, path)
    else:
        options = None if args.no_eval else options_of(args)
        write_report(folders[0], path, options, checkpoint=args.checkpoint)
    print(path)
    return 0


def _is_run(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "config.yaml"))  # False if the path is too long
