"""What the benchmarks share: where a result comes from; and for speed two programs run in turn,
each run in a process of its own."""

import argparse
import csv
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ORIGIN = ("command", "versions", "processor", "date")  # what every row of results ends with
COLUMNS = ("case", "ours", "sb3", "ratio", "lowest", "highest", "pairs", *ORIGIN)


def measure(script, who, case, environment):
    """Return what function `who` of a benchmark returns for a case, in a process of its own."""
    call = [sys.executable, "-W", "ignore", script, "--only", who, case]
    environment = os.environ | environment
    done = subprocess.run(call, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def processor():
    """Return the name of the processor, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def origin(*packages):
    """Return this program's ORIGIN, with the versions of these packages too, and the commit."""
    names = ("torch", "gymnasium", "numpy", "scipy", *packages)
    versions = {name: version(name) for name in names} | {"python": platform.python_version()}
    commit = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(commit, cwd=Path(__file__).parent, capture_output=True, text=True)
    versions = json.dumps(versions | {"git_commit": done.stdout.strip()})
    row = {"command": shlex.join(["python", *sys.argv]), "versions": versions}
    return row | {"processor": processor(), "date": str(datetime.date.today())}


def run_origin(run_dir):
    """Return the processor, this one's, and the day of a run's last row."""
    day = datetime.date.fromtimestamp((run_dir / "progress.csv").stat().st_mtime)
    return {"processor": processor(), "date": str(day)}


def main(script, description, cases, functions, results, environment):
    """Run a benchmark's command line.

    `functions` are {"ours": f, "sb3": f}: a case's arguments → (steps per second, versions). Writes
    a row per case to the file `results`, beside those of other cases and other processors; one with
    more pairs than this run's stays, so give another machine of the same name another --processor.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--pairs", type=int, default=5, help="runs of each of the two per case")
    parser.add_argument("--cases", nargs="+", default=list(cases), choices=cases)
    parser.add_argument("--processor", default=processor(), help="what the row calls this one")
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        who, case = args.only
        print(json.dumps(functions[who](*cases[case])))
        return
    rows, source = {}, origin()
    if results.exists():
        with results.open(newline="") as file:
            rows = {(row["case"], row["processor"]): row for row in csv.DictReader(file)}
    for case in args.cases:
        pairs = [
            [measure(script, who, case, environment) for who in functions]
            for _ in range(args.pairs)
        ]
        ratios = [mine[0] / peers[0] for mine, peers in pairs]
        row = {"case": case, "pairs": args.pairs, **source, "processor": args.processor}
        row |= {"ratio": f"{statistics.median(ratios):.2f}"}
        row |= {"lowest": f"{min(ratios):.2f}", "highest": f"{max(ratios):.2f}"}
        for i, who in enumerate(functions):
            row[who] = round(statistics.median(pair[i][0] for pair in pairs))
        row["versions"] = json.dumps(pairs[0][0][1] | pairs[0][1][1])
        print(row, flush=True)
        if args.pairs < int(rows.get((case, args.processor), row)["pairs"]):
            print("not recorded: the row that is there has more pairs")
            continue
        rows[case, args.processor] = row
        with results.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows.values())
