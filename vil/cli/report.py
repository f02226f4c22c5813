"""Write an HTML report of a run: metrics, curves, confusion matrix, images, config, machine.

  vil report runs/nano                          writes runs/nano/report.html
  vil report runs/nano --out nano.html --checkpoint last
  vil report runs/nano --no-eval                only what the run has logged; also during training
  vil report runs/nano --data /mnt/flowers DEVICE cpu

Evaluates the best checkpoint on the first set in DATA.VAL or, if DATA.VAL is empty, in DATA.TEST.
The page shows the confusion matrix, the accuracy of each class, and the most confident errors and
correct predictions. KEY VALUE pairs and flags change this evaluation, not the config that the page
shows. For a detector, the page only shows what training logged; vil evaluate --pictures draws a
detector's errors.

The page is a single file of less than 3 MB, with all images and without scripts or external links.
Class and file names are escaped. With --no-eval, neither weights nor data are read.
"""

import argparse
import logging
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
    add("run", metavar="RUN", help="the folder of a run")
    config_arguments(parser)
    checkpoint_argument(parser, "checkpoint to evaluate (best)")
    add("--no-eval", action="store_true", help="show only what the run has logged")
    add("--out", metavar="FILE", help=f"file to write (RUN/{PAGE})")


def run(args: argparse.Namespace) -> int:
    from vil.workflows.report import write_report

    folder = Path(args.run)
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.yaml")
    if args.config_file:
        raise ConfigError("the run's config is used: remove --config-file")
    if args.opts and Path(args.opts[0], "config.yaml").is_file():
        raise ConfigError(
            f"unexpected argument {args.opts[0]}: expected one run (to compare the runs of a "
            "sweep, use vil sweep --output DIR --table)"
        )
    path = output_file(args.out or folder / PAGE, "--out", ENDINGS, files_read(args, "out"))
    if args.no_eval and args.opts:
        log.warning("--no-eval is given, so these options have no effect: %s", " ".join(args.opts))
    run_imports(args.imports, ())
    options = None if args.no_eval else options_of(args)
    write_report(folder, path, options, checkpoint=args.checkpoint)
    print(path)
    return 0
