"""Learning runs of ppo.py, recorded in results/ppo.csv: python tests/benchmarks/learn_ppo.py

A row per run: the command, the mean return of the last 100 training episodes, the mean return of 16
evaluation episodes (the policy's mode), wall seconds (one core), versions.
"""

import csv
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "ppo.csv"
sys.path.insert(0, str(ROOT))

import ppo  # noqa: E402

RUNS = [f"--env CartPole-v1 --seed {seed}" for seed in (1, 2, 3)]
COLUMNS = "command steps episodic_return eval_return wall_seconds versions".split()


def main():
    """Train, and write RESULTS."""
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for options in RUNS:
            with tempfile.TemporaryDirectory() as folder:
                extra = ["--log-dir", folder, "--eval-every", "1000000", "--quiet"]
                run = ppo.train(ppo.parse_args([*options.split(), *extra]))
            last = run.history[-1]
            row = {"command": f"python ppo.py {options}", "steps": last["global_step"]}
            row["episodic_return"] = f"{last['episodic_return']:.2f}"
            row["eval_return"] = f"{last['eval_return']:.2f}"
            row["wall_seconds"] = f"{last['wall_seconds']:.1f}"
            row["versions"] = json.dumps(ppo.versions())
            writer.writerow(row)
            print(row, flush=True)


if __name__ == "__main__":
    main()
