"""Print versions, devices, and which attention backend runs in each stage.

vil info
vil info --config-file imagenet/vil_tiny.yaml DEVICE cpu
vil info --config-file imagenet/vil_tiny.yaml --all     all backends, and why each is used or not
"""

import argparse

from vil.cli.arguments import config_arguments, resolve
from vil.utils.console import fit_to_terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    text = "list all backends for each attention call, and why the others are not used"
    parser.add_argument("--all", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    from vil.workflows.backends import explain_backends, find_calls

    report = explain_backends(find_calls(resolve(args)))
    print(fit_to_terminal("\n".join(report.environment)))
    for line in () if args.all else report.summary():
        print(line)
    for request, verdicts in report.verdicts if args.all else ():
        print(request)
        for name, verdict, about in verdicts:
            print(f"  {name:16} {verdict:14} ({about})")
    if report.verdicts:
        more = "" if args.all else "; --all lists the other backends, and why they do not run"
        text = (
            f"{report.num_tuned} of {len(report.verdicts)} attention calls have a tuned backend in "
            f"{report.file}{more}"
        )
        print(fit_to_terminal(text))
    return 0
