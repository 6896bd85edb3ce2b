"""Speed and memory of multilevel PPO on ResSim-v1, recorded in results/speed_ressim.csv.

    python tests/benchmarks/speed_ressim.py
    python tests/benchmarks/speed_ressim.py --costs    # results/level_costs.csv

Rows: milliseconds per actor and control step on each grid (one core, 25 actors in a batch, random
actions, all 16 fields); seconds per iteration of the paper's three-level set-up (N 50, T 80 10 5, K
20, 10 minibatches, 2 workers), and of simulation in it; memory of all its processes together
(proportional set size, so that shared pages count once). `level_costs.csv` has the milliseconds of
a step on every level of ResSim-v1, v2 and the rod.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "speed_ressim.csv"
sys.path.insert(0, str(ROOT))

import pairs  # noqa: E402
import rod  # noqa: E402

import ppo_multilevel  # noqa: E402

PAPER = (
    "--env ResSim-v1 --schedule together --levels 3 4 5 --num-steps 80 10 5 --num-envs 50 "
    "--num-minibatches 10 --update-epochs 20 --vf-coef 1.0 --num-workers 2 "
    "--num-iterations 8 --eval-every 8"
).split()


def step_seconds(case, level, actors=25, episodes=5, steps=5):
    """Seconds of every step_batch call of `episodes` episodes, after one to warm up."""
    envs = [
        rod.make(level) if case == "rod" else ppo_multilevel.ResSim(case, level)
        for _ in range(actors)
    ]
    rng, seconds = np.random.default_rng(0), []
    for _ in range(episodes + 1):
        for i, env in enumerate(envs):
            env.reset(seed=i, options={"field": i % 16})
        for _ in range(steps):
            actions = rng.uniform(0.001, 1, (actors, *envs[0].action_space.shape))
            start = time.perf_counter()
            envs[0].step_batch(envs, actions)
            seconds.append(time.perf_counter() - start)
    return np.array(seconds[steps:])


def level_costs(origin):
    """Write results/level_costs.csv: what a step of each level costs, all in one run."""
    rows = [["case", "level", "ms", *origin]]
    for case, levels in {"ResSim-v1": 5, "ResSim-v2": 4, "rod": 4}.items():
        for level in range(1, levels + 1):
            ms = 1e3 * np.median(step_seconds(case, level)) / 25
            rows.append([case, level, f"{ms:.3g}", *origin.values()])
    with RESULTS.with_name("level_costs.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def memory(pid):
    """Proportional set size of a process and its descendants [MiB] (Linux)."""
    kilobytes = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            kilobytes += int(line.split()[1]) if line.startswith("Pss:") else 0
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return 0.0
    return kilobytes / 1024 + sum(memory(child) for child in children)


def iteration_seconds(options):
    """Train with these options. Returns {part: seconds of each iteration but the first}.

    The first iteration factors matrices. `Simulations.play` is replaced by one that is timed.
    """
    args = ppo_multilevel.parse_args(options)
    play = ppo_multilevel.Simulations.play
    seconds = []

    def timed(*arguments):
        began = time.perf_counter()
        buffers = play(*arguments)
        seconds.append(time.perf_counter() - began)
        return buffers

    ppo_multilevel.Simulations.play = timed
    history = ppo_multilevel.train(args).history
    ppo_multilevel.Simulations.play = play
    wall = np.diff([row["wall_seconds"] for row in history])[1:]
    simulation = np.reshape(seconds, (-1, len(args.levels))).sum(axis=1)[1:]
    parts = {"iteration: simulation": simulation, "iteration: the rest": wall - simulation}
    return parts | {"iteration": wall}


def paper_run():
    """Return the seconds of the paper's iterations and the highest memory [MiB], in a process."""
    call = [sys.executable, "-W", "ignore", __file__, "--iterations"]
    process = subprocess.Popen(call, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    highest = 0.0
    while process.poll() is None:
        highest = max(highest, memory(process.pid))
        time.sleep(0.2)
    parts = json.loads(process.stdout.read().splitlines()[-1])
    return {name: np.array(seconds) for name, seconds in parts.items()}, highest


def main():
    """Measure, print and write RESULTS."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--costs", action="store_true", help="measure level_costs.csv only")
    parser.add_argument("--iterations", action="store_true", help=argparse.SUPPRESS)
    name = pairs.processor()
    parser.add_argument("--processor", default=name, help="what the rows call this one")
    args = parser.parse_args()
    if args.iterations:
        with tempfile.TemporaryDirectory() as folder:
            parts = iteration_seconds([*PAPER, "--log-dir", folder])
        print(json.dumps({name: seconds.tolist() for name, seconds in parts.items()}))
        return
    ppo_multilevel.keep_freed_memory()  # as in training
    origin = pairs.origin() | {"processor": args.processor}
    if args.costs:
        level_costs(origin)
        return
    table = []
    for level in (5, 4, 3, 2, 1):
        ms = 1e3 * step_seconds("ResSim-v1", level) / 25
        size = ppo_multilevel.CASES["ResSim-v1"].grids[level - 1][0]
        table.append((f"{size}x{size} step", np.min(ms), np.median(ms), "ms per actor"))
    parts, highest = paper_run()
    for name, seconds in parts.items():
        table.append((name, seconds.min(), np.median(seconds), "s"))
    table.append(("memory, all processes", highest, highest, "MiB"))
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["what", "min", "median", "unit", *origin])
        for what, lowest, median, unit in table:
            row = [what, f"{lowest:.4g}", f"{median:.4g}", unit]
            writer.writerow([*row, *origin.values()])
            print(*row)


if __name__ == "__main__":
    main()
