"""Where the time of a training goes, by part, in results/profile.csv: one process, one core.

    python tests/benchmarks/profile_parts.py

Each of a script's functions below is timed from outside; "other" is what is left: values and
advantages of the rollout.
"""

import argparse
import csv
import functools
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pairs

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "profile.csv"
sys.path.insert(0, str(ROOT))

MUJOCO = "--env HalfCheetah-v5 --num-envs 8 --num-steps 2048 --num-minibatches 32"
CASES = {
    "CartPole-v1": ("ppo", "--env CartPole-v1 --num-iterations 150"),
    "HalfCheetah-v5": ("ppo", f"{MUJOCO} --update-epochs 10 --num-iterations 4"),
    "Breakout": ("ppo_atari", "--env Breakout --num-workers 0 --num-iterations 4"),
    "ResSim-v1, 16²": ("ppo_multilevel", "--env ResSim-v1 --levels 2 --num-iterations 30"),
    "ResSim-v1, 128²": ("ppo_multilevel", "--env ResSim-v1 --levels 5 --num-iterations 4"),
}


def timed(function, name, spent):
    """Return the function, which adds its seconds to `spent`."""

    @functools.wraps(function)
    def wrapper(*args, **options):
        started = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            spent[name] += time.perf_counter() - started

    return wrapper


def profile(script, options):
    """Return the seconds of each part of a training, but for its first iteration."""
    module, spent, marks = __import__(script), Counter(), []
    call, log = module.WorkerPool.call, module.Run.log

    def count(run, row):
        log(run, row)
        if run.iteration == 1:
            spent.clear()
            marks.append(time.perf_counter())

    actor = getattr(module, "Policy", module.Model)
    actor.act = timed(actor.act, "policy", spent)
    module.WorkerPool.call = timed(call, "games", spent)
    module.update = timed(module.update, "update", spent)
    module.Run.log = timed(count, "log", spent)
    with tempfile.TemporaryDirectory() as folder:
        words = [*options.split(), "--quiet", "--eval-every", "0", "--log-dir", folder]
        run = module.train(module.parse_args([*words, "--num-workers", "0"]))
        seconds = time.perf_counter() - marks[0]
    steps = run.history[-1]["global_step"] * (1 - 1 / run.iteration)
    spent["games"] -= spent["policy"]  # the policy acts within the call that plays the games
    return spent | {"other": seconds - sum(spent.values())}, steps, seconds


def main():
    """Profile all cases, write the table."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    parts, origin = ("games", "policy", "update", "log", "other"), pairs.origin()
    rows = [["case", "steps_per_second", *parts, *origin]]
    for case, (script, options) in CASES.items():
        spent, steps, seconds = profile(script, options)
        row = [case, round(steps / seconds), *(f"{spent[p] / seconds:.3f}" for p in parts)]
        rows.append([*row, *origin.values()])
        print(row)
    with RESULTS.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
