"""What levels are worth, by --analyse: results/analysis/<simulation>.csv, some minutes each.

    python tests/benchmarks/analyse.py --cases v1 rod

The initial policy of the runs of learn_ressim.py, with their options, on one core. As there, ks and
gl need the package controlgym, and water needs wntr.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import learn_ressim
import pairs

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "analysis"


def analyse(case):
    """Return the rows of an analysis, and its command."""
    options = [*learn_ressim.RUNS[f"{case}-adaptive"].split(), "--analyse"]
    with tempfile.TemporaryDirectory() as folder:
        call = [sys.executable, "ppo_multilevel.py", *options, "--log-dir", folder]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(call, cwd=ROOT, env=environment, check=True)
        (path,) = Path(folder).glob("*/analysis.csv")
        with path.open(newline="") as file:
            return list(csv.DictReader(file)), " ".join(["python", "ppo_multilevel.py", *options])


def main():
    """Analyse simulations, write the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    cases = [*learn_ressim.COSTS]
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases, help="default: all")
    for case in parser.parse_args().cases:
        rows, command = analyse(case)
        origin = pairs.origin() | {"command": command}
        with (RESULTS / f"{case}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], *origin])
            writer.writeheader()
            writer.writerows(row | origin for row in rows)


if __name__ == "__main__":
    main()
