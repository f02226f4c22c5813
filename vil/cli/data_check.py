"""Check the data of a config before training: counts, broken images, leaks, suggested keys.

  vil data check --data photos DATA.TRAIN folder DATA.TEST folder
  vil data check --config-file mine.yaml --data mine --sheet mine.png --json mine.json
  vil data check --config-file mine.yaml --data mine --sample 1000 DATALOADER.WORKERS 8

Opens every image of the training set and of each test set. Prints the number of images of each
class, the image sizes, images that cannot be read, duplicates within a split, duplicates across
splits (leaks), images of a single color, boxes and masks that do not fit their images, and config
values that would fit the data better. --sample opens only N images of each split.
DATALOADER.WORKERS processes read the images.

The exit code is 0 if the data can be used, even if config values must be changed as suggested. It
is 3 if the data cannot be used. Each reason is printed on a line that begins with "problem".
"""

import argparse

from vil.cli.arguments import at_least, config_arguments, files_read, resolve
from vil.utils.console import fit_to_terminal
from vil.utils.errors import ConfigError, DataError
from vil.utils.json_text import to_json
from vil.utils.output_paths import output_file, replacing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser, output="not used")
    add = parser.add_argument
    add("--sheet", metavar="FILE.png", help="write an image that shows a few images of each class")
    add("--json", metavar="FILE", help="write the result as JSON")
    add("--sample", type=at_least(1), metavar="N", help="open only N images of each split")


def run(args: argparse.Namespace) -> int:
    from vil.workflows.check_data import check_data

    cfg = resolve(args)
    files = {}
    for flag, endings in (("sheet", (".png",)), ("json", ())):
        if given := getattr(args, flag):
            inputs = files_read(args, "sheet", "json")
            path = output_file(given, f"--{flag}", endings, inputs, data=cfg.DATA.PATH)
            if path.resolve() in [file.resolve() for file in files.values()]:
                raise ConfigError(f"--{flag} {path}: --sheet writes this file; choose another name")
            files[flag] = path
    check = check_data(cfg, max_images=args.sample)
    print(fit_to_terminal("\n".join(check.lines())))
    if "sheet" in files:
        check.draw(files["sheet"])
    if "json" in files:
        with replacing(files["json"], "--json") as aside:
            aside.write_text(to_json(check.to_dict(), indent=1) + "\n", "utf-8", "replace")
    if not check.is_usable:
        raise DataError("the data cannot be used: see the lines above that begin with 'problem'")
    print("the data can be used")
    return 0
