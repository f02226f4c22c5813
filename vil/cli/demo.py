"""Serve a page to try a model on: drop an image, see its classes, boxes or masks, and click on a
point to see what it attends to.

  vil demo                            the shipped small weights, which read digits
  vil demo runs/photos                the best checkpoint of a run
  vil demo model.safetensors          a file of `vil convert`
  vil demo runs/photos --port 8000 DEVICE cuda

Only this machine can open the page, unless --host is another of its addresses: --host 0.0.0.0 shows
it to everybody who can reach this machine. Ctrl-C ends it.
"""

import argparse
import sys
from pathlib import Path

from vil.cli.arguments import checkpoint_argument

SHIPPED = "vil_nano"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = f"folder of a run, a weight file, or a name of a model ({SHIPPED})"
    add("source", metavar="SOURCE", nargs="?", default=SHIPPED, help=text)
    add("opts", metavar="KEY VALUE", nargs="*", help="set config keys")
    checkpoint_argument(parser, "checkpoint of a run (best)")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=int, default=7860, help="port to listen on (7860); 0: any that is free")


def run(args: argparse.Namespace) -> int:
    from vil.workflows.demo import Demo, DemoServer
    from vil.workflows.inference import load_for_inference

    model = load_for_inference(args.source, args.opts, checkpoint=args.checkpoint)
    print(model.report, file=sys.stderr)
    with DemoServer(Demo(model, Path(args.source).name), args.host, args.port) as server:
        print(f"{server.url} (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
