"""Every comparison, table and figure of this project, by name.

    python tests/benchmarks/run.py --list
    python tests/benchmarks/run.py speed-ppo tables     # or: all, which takes days

Stable-Baselines3 and skrl get an environment of their own, runs/peers, made when it is first
needed. Every row of results/ has its command, versions with the commit, processor and day. Runs
that learn go on where they were stopped, and are copied to results/ when all are finished.
"""

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "runs" / "peers"
VERSIONS = ("stable-baselines3==2.9.2", "skrl==2.1.1")
# {name: (what it is, how long on two cores, command of tests/benchmarks)}
JOBS = {
    "peers": ("the update of ppo.py beside those of its peers", "1 minute", "peers.py"),
    "speed-ppo": ("ppo.py beside Stable-Baselines3", "20 minutes", "speed_ppo.py"),
    "speed-atari": ("ppo_atari.py beside Stable-Baselines3", "30 minutes", "speed_atari.py"),
    "speed-ressim": ("time and memory of the reservoirs", "3 minutes", "speed_ressim.py"),
    "profile": ("where the time goes, by part", "5 minutes", "profile_parts.py"),
    "analyse": ("which levels pay, by --analyse", "half an hour", "analyse.py"),
    "ranks": ("workers and ranks", "10 minutes", "scale_ranks.py"),
    "learn-ppo": ("learning runs of ppo.py", "1 hour", "learn_ppo.py --jobs 2"),
    "learn-atari": ("learning runs of ppo_atari.py", "13 hours", "learn_atari.py"),
    "learn-levels": (
        "the adaptive rule and what it is compared with",
        "15 hours",
        "learn_ressim.py --jobs 2",
    ),
    "costs": ("what a step of each level costs", "5 minutes", "speed_ressim.py --costs"),
    "reservoir": ("a run on ResSim-v1, and its picture", "5 minutes", "figures.py --record lead"),
    "tables": ("tables of all pages", "seconds", "tables.py"),
    "figures": ("figures of the recorded results", "seconds", "figures.py"),
}


def peers_python():
    """Return the Python of the peers' environment, which is made if it is not there."""
    python = PEERS / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(PEERS, with_pip=True)
        install = [python, "-m", "pip", "install", "-q", "-r", ROOT / "requirements.txt"]
        subprocess.run([*install, *VERSIONS], check=True)
    return python


def run(name):
    """Run a job, from the project's folder."""
    python = peers_python() if name in ("peers", "speed-ppo", "speed-atari") else sys.executable
    script, *options = JOBS[name][2].split()
    subprocess.run([python, f"tests/benchmarks/{script}", *options], cwd=ROOT, check=True)


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="see --list; all: all of them")
    parser.add_argument("--list", action="store_true", help="print the names")
    args = parser.parse_args()
    if unknown := {*args.names} - {*JOBS, "all"}:
        parser.error(f"no such name: {', '.join(unknown)}; see --list")
    if args.list or not args.names:
        for name, (what, duration, command) in JOBS.items():
            print(f"{name:13} {what}, {duration}: python tests/benchmarks/{command}")
    for name in JOBS if "all" in args.names else args.names:
        run(name)


if __name__ == "__main__":
    main()
