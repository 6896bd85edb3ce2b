"""What levels are worth, by --analyse: results/analysis/<simulation>.csv, a minute each.

    python tests/benchmarks/analyse.py

The initial policy, seed 1, one core, the nominal costs of learn_ressim.py.
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
    levels = range(1, len(learn_ressim.COSTS[case]) + 1)
    options = learn_ressim.simulation(case, levels).split()
    options += ["--analyse", "--num-workers", "0", "--levels", *map(str, levels)]
    with tempfile.TemporaryDirectory() as folder:
        call = [sys.executable, "ppo_multilevel.py", *options, "--log-dir", folder]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(call, cwd=ROOT, env=environment, check=True)
        (path,) = Path(folder).glob("*/analysis.csv")
        with path.open(newline="") as file:
            return list(csv.DictReader(file)), " ".join(["python", "ppo_multilevel.py", *options])


def main():
    """Analyse the reservoirs and the rod, write the files."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    for case in learn_ressim.COSTS:
        if case == "water" or case in learn_ressim.CLASSES:  # they need other packages
            continue
        rows, command = analyse(case)
        origin = pairs.origin() | {"command": command}
        with (RESULTS / f"{case}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], *origin])
            writer.writeheader()
            writer.writerows(row | origin for row in rows)


if __name__ == "__main__":
    main()
