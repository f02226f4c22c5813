"""Print versions, devices, and which attention backend each stage uses and why others cannot run.

vil info
vil info --config-file imagenet/vil_tiny.yaml DEVICE cpu
"""

import argparse

from vil.cli.arguments import config_arguments, resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from vil.workflows.backends import explain_backends

    report = explain_backends(resolve(args))
    print("\n".join(report.environment))
    for request, verdicts in report.verdicts:
        print(request)
        for name, verdict, about in verdicts:
            print(f"  {name:16} {verdict:14} ({about})")
    if report.verdicts:
        print(f"{report.num_tuned} of {len(report.verdicts)} tuned, in {report.file}")
    return 0
