"""Write the results of a benchmark to a folder, with a description of the machine."""

import csv
import re

import torch

from vil.utils.atomic_write import replace_text
from vil.utils.json_text import to_json
from vil.utils.machine import machine, slug
from vil.utils.output_paths import make_folder


class ResultFolder:
    """Folder for the results of one benchmark. Constructing the object creates the folder.

    out: path, by default benchmarks/results/<what>-<machine>-<time>. what: name of the benchmark
    and of its result files, such as "attention" for attention.csv.
    """

    def __init__(self, out: str | None, what: str, device: torch.device):
        self.what, self.machine = what, machine(device)
        moment = re.sub(r"\D", "", self.machine["date"])[:12]
        default = f"benchmarks/results/{what}-{slug(self.machine['name'])}-{moment}"
        self.folder = make_folder(out or default, "--out")

    def title(self, extent: str, rounds: int) -> str:
        """Format a heading for the benchmark, with the machine and the folder of the results.
        extent: size of the benchmark, such as "3 models, 5 paths". rounds: number of repeated
        measurements."""
        return (
            f"{self.machine['name']}, {self.machine['threads']} threads, "
            f"torch {self.machine['torch']}; {extent}, {rounds} rounds -> {self.folder}"
        )

    def write(self, rows: list[dict]) -> None:
        """Write the rows to <what>.csv, where <what> is the name of the benchmark. Write the rows
        and a description of the machine to <what>.json."""
        text = to_json({"machine": self.machine, "rows": rows}, indent=1)
        replace_text(self.folder / f"{self.what}.json", text + "\n")
        self.write_csv(self.what, rows)

    def write_csv(self, name: str, rows: list[dict]) -> None:
        """Write the rows to <name>.csv. A list, such as [56, 56], is written as 56x56."""
        with (self.folder / f"{name}.csv").open("w", newline="") as stream:
            lines = csv.DictWriter(stream, list(rows[0]))
            lines.writeheader()
            for row in rows:
                lines.writerow(
                    {k: "x".join(map(str, v)) if type(v) is list else v for k, v in row.items()}
                )
