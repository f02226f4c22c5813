"""Print versions, devices, and for each stage which attention backend runs and why not the others.

vil info
vil info --config-file imagenet/vil_tiny.yaml DEVICE cpu
"""

import argparse

from vil.cli.arguments import config_arguments, resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from vil.workflows.backends import explain_backends
    from vil.workflows.environment import describe_backend, describe_environment

    report = explain_backends(resolve(args))
    for line in describe_environment(report.device):
        print(line)
    for request, verdicts in zip(report.requests, report.verdicts):
        print(request)
        for name, verdict in verdicts.items():
            print(f"  {name:16} {verdict:14} ({describe_backend(name)})")
    if report.requests:
        print(f"{report.num_tuned} of {len(report.requests)} tuned, in {report.file}")
    return 0
