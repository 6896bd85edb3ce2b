"""Steps per second of ppo_multilevel.py with 1 and 2 ranks, in results/scale_ranks.csv.

    python tests/benchmarks/scale_ranks.py

ResSim-v1 with 100 actors for a few iterations, in turn with one process and one worker, with one
process and two workers, and as two ranks with a worker each (torchrun); then with other numbers of
actors and levels. A row has the medians over the rounds of steps per second, of the seconds of an
iteration's simulation, and of those of the rest: values, update, and what processes exchange. The
policy acts in the workers, so this belongs to the simulation. (In rows of 25 November 2026 it
belongs to the rest.) The first iterations do not count. Rows of cases that are not measured stay.
"""

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pairs
import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "scale_ranks.csv"
WARM_UP, ITERATIONS = 2, 6
RANKS = {"1 rank, 1 worker": (1, 1), "1 rank, 2 workers": (1, 2), "2 ranks, 1 worker each": (2, 1)}
TOGETHER = "--schedule together --levels 3 4 5 --num-steps 80 10 5"
CASES = {
    "three levels": f"--num-envs 100 {TOGETHER}",
    "three levels, 200 actors": f"--num-envs 200 {TOGETHER}",
    "finest level only": "--num-envs 100 --levels 5 --num-steps 10",
    "coarsest level only": "--num-envs 100 --levels 3 --num-steps 80",
}
PARTS = ("simulation_seconds", "other_seconds")
NUMBERS = ("sps", "seconds", "wall_seconds")
COLUMNS = ("case", "processes", "rounds", "steps_per_second", *PARTS, *pairs.ORIGIN)


def measure(options, num_ranks, num_workers):
    """Return the rows of a run that count, with the seconds of their parts."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        launcher = [*launcher, str(num_ranks)] if num_ranks > 1 else []
        command = [sys.executable, *launcher, str(ROOT / "ppo_multilevel.py"), *options.split()]
        command += ["--num-iterations", str(WARM_UP + ITERATIONS), "--eval-every", "0", "--quiet"]
        command += ["--num-workers", str(num_workers), "--log-dir", folder]
        subprocess.run(command, check=True, capture_output=True)
        (run_dir,) = Path(folder).iterdir()
        with (run_dir / "progress.csv").open(newline="") as file:
            rows = [{name: float(row[name]) for name in NUMBERS} for row in csv.DictReader(file)]
        # The run's clock has the seconds of simulation, spread over all workers, and of updates.
        costs = torch.load(run_dir / "checkpoint.pt", weights_only=True)["costs"]
        update = costs["update_seconds"] / len(rows)
        for row, last in zip(rows[WARM_UP:], rows[WARM_UP - 1 :]):
            simulated = row["seconds"] - last["seconds"] - update
            other = row["wall_seconds"] - last["wall_seconds"] - simulated
            row |= {"simulation_seconds": simulated, "other_seconds": other}
        return rows[WARM_UP:]


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    args = parser.parse_args()
    results = []
    origin = pairs.origin()
    if RESULTS.exists():
        with RESULTS.open(newline="") as file:
            results = [row for row in csv.DictReader(file) if row["case"] not in args.cases]
    for case in args.cases:
        seen = {name: [] for name in RANKS}
        for _ in range(args.rounds):
            for name, processes in RANKS.items():
                seen[name] += measure(CASES[case], *processes)
        for name, rows in seen.items():
            result = {"case": case, "processes": name, "rounds": args.rounds}
            result["steps_per_second"] = round(statistics.median(r["sps"] for r in rows))
            for part in PARTS:
                result[part] = f"{statistics.median(r[part] for r in rows):.3f}"
            results.append(result | origin)
            print(result, flush=True)
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(results)


if __name__ == "__main__":
    main()
