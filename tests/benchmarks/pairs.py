"""What the speed benchmarks share: two programs run in turn, each run in a process of its own."""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys

COLUMNS = ("case", "ours", "sb3", "ratio", "lowest", "highest", "pairs", "versions")


def measure(script, who, case, environment):
    """Return what function `who` of a benchmark returns for a case, in a process of its own."""
    call = [sys.executable, "-W", "ignore", script, "--only", who, case]
    environment = os.environ | environment
    done = subprocess.run(call, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(script, description, cases, functions, results, environment):
    """Run a benchmark's command line.

    `functions` are {"ours": f, "sb3": f}: a case's arguments → (steps per second, versions). Writes
    a row per case to the file `results`, beside those of other cases.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--pairs", type=int, default=5, help="runs of each of the two per case")
    parser.add_argument("--cases", nargs="+", default=list(cases), choices=cases)
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        who, case = args.only
        print(json.dumps(functions[who](*cases[case])))
        return
    rows = {}
    if results.exists():
        with results.open(newline="") as file:
            rows = {row["case"]: row for row in csv.DictReader(file)}
    for case in args.cases:
        pairs = [
            [measure(script, who, case, environment) for who in functions]
            for _ in range(args.pairs)
        ]
        ratios = [mine[0] / peers[0] for mine, peers in pairs]
        row = {"case": case, "pairs": args.pairs, "ratio": f"{statistics.median(ratios):.2f}"}
        row |= {"lowest": f"{min(ratios):.2f}", "highest": f"{max(ratios):.2f}"}
        for i, who in enumerate(functions):
            row[who] = round(statistics.median(pair[i][0] for pair in pairs))
        row["versions"] = json.dumps(pairs[0][0][1] | pairs[0][1][1])
        rows[case] = row
        print(row, flush=True)
        with results.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows.values())
