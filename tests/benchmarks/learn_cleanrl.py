"""Learning runs of CleanRL's ppo.py and ppo_continuous_action.py, recorded beside those of ppo.py.

    git clone https://github.com/vwxyzjn/cleanrl /tmp/cleanrl
    pip install tyro
    python tests/benchmarks/learn_cleanrl.py --cleanrl /tmp/cleanrl --jobs 2
    python tests/benchmarks/learn_ppo.py --jobs 2 --runs CartPole   # ours, and so on

Both have the same environments, steps, seeds and packages, one core each, and CleanRL's scripts
their own defaults. results/cleanrl.csv gets a row for each run as soon as it has ended: the mean
return of the last 100 training episodes, and the steps per second that the script printed last.

CleanRL's scripts were written for Gymnasium 0.29. Their files are left as they are. While they run,
`Vector` and `TransformObservation` below take the place of Gymnasium's own classes and do what 0.29
did: a new episode begins in the very step that ends one, and `final_info` is a list.
"""

import argparse
import concurrent.futures
import csv
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium as gym
import pairs

ROOT = Path(__file__).resolve().parents[2]
RUNS_DIR = Path(os.environ.get("RUNS_DIR", ROOT / "runs" / "learn_cleanrl"))
RECORD = Path(__file__).parent / "results" / "cleanrl.csv"
DISCRETE = "ppo.py --env-id"
BOX = "ppo_continuous_action.py --env-id"
# The environments and total steps are those of the runs of these names in learn_ppo.py.
RUNS = {
    "CartPole": f"{DISCRETE} CartPole-v1 --total-timesteps 500000",
    "LunarLander": f"{DISCRETE} LunarLander-v3 --total-timesteps 1000000",
    "MountainCar": f"{DISCRETE} MountainCar-v0 --total-timesteps 1000000",
    "Pendulum": f"{BOX} Pendulum-v1 --total-timesteps 500000",
    "HalfCheetah": f"{BOX} HalfCheetah-v5 --total-timesteps 1000000",
    "Hopper": f"{BOX} Hopper-v5 --total-timesteps 1000000",
    "Walker2d": f"{BOX} Walker2d-v5 --total-timesteps 1000000",
}
COLUMNS = "run seed steps episodic_return episodes steps_per_second wall_seconds options".split()
COLUMNS += pairs.ORIGIN
LOCK = threading.Lock()  # of the record


class Vector(gym.vector.SyncVectorEnv):
    """Environments in turn, as Gymnasium 0.29 played them."""

    def __init__(self, env_fns):
        super().__init__(env_fns, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)

    def step(self, actions):
        """Step all environments; say for each one what its episode was, if it has ended."""
        *results, infos = super().step(actions)
        if "final_info" in infos:
            episodes = infos["final_info"]["episode"]
            infos["final_info"] = [
                {"episode": {"r": total, "l": length}} if ended else None
                for ended, total, length in zip(
                    infos["_final_info"], episodes["r"], episodes["l"], strict=True
                )
            ]
        return *results, infos


class TransformObservation(gym.wrappers.TransformObservation):
    """The wrapper without a space of its own, which Gymnasium 0.29 did not ask for."""

    def __init__(self, env, func):
        super().__init__(env, func, env.observation_space)


def play(script, options):
    """Run a script of CleanRL in this process."""
    gym.vector.SyncVectorEnv = Vector
    gym.wrappers.TransformObservation = TransformObservation
    sys.argv = [script, *options]
    runpy.run_path(script, run_name="__main__")


def run(cleanrl, name, seed):
    """Train in a process of its own with one thread, and record the run."""
    words = [*RUNS[name].split(), "--seed", str(seed)]
    script = str(cleanrl / "cleanrl" / words[0])
    call = [sys.executable, "-W", "ignore", __file__, "--play", script, *words[1:]]
    output = RUNS_DIR / f"{name}__{seed}.txt"
    source = origin(cleanrl, name, seed)
    start = time.perf_counter()
    with output.open("w") as file:
        # The scripts write TensorBoard's files to the folder that they run in.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(call, cwd=RUNS_DIR, env=environment, stdout=file, check=True)

    row = {"run": name, "seed": seed, "options": " ".join(words)}
    row |= {"steps": words[words.index("--total-timesteps") + 1]}
    row |= {"wall_seconds": f"{time.perf_counter() - start:.1f}"}
    record(row | summary(output.read_text()) | source)


def summary(output):
    """Return what a run's output tells."""
    returns = [float(value) for value in re.findall(r"episodic_return=(\S+)", output)]
    return {
        "episodic_return": f"{statistics.mean(returns[-100:]):.2f}",
        "episodes": len(returns),
        "steps_per_second": re.findall(r"SPS: (\d+)", output)[-1],
    }


def origin(cleanrl, name, seed):
    """Return where a row comes from, with CleanRL's commit."""
    row = pairs.origin("mujoco", "tyro")
    commit = subprocess.check_output(["git", "-C", str(cleanrl), "rev-parse", "HEAD"], text=True)
    row["versions"] = json.dumps(json.loads(row["versions"]) | {"cleanrl": commit.strip()})
    script = "python tests/benchmarks/learn_cleanrl.py --cleanrl cleanrl"
    return row | {"command": f"{script} --runs {name} --seeds {seed}"}


def record(row):
    """Write a row to results/cleanrl.csv in the place of the same run's."""
    with LOCK:
        rows = {}
        if RECORD.exists():
            with RECORD.open(newline="") as file:
                rows = {(row["run"], row["seed"]): row for row in csv.DictReader(file)}
        rows[row["run"], str(row["seed"])] = row
        with RECORD.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows[key] for key in sorted(rows))


def main():
    """Run the command line."""
    if sys.argv[1:2] == ["--play"]:
        play(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cleanrl", type=Path, required=True, help="a checkout of CleanRL")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    args = parser.parse_args()
    RUNS_DIR.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as executor:
        runs = [
            executor.submit(run, args.cleanrl.resolve(), name, seed)
            for name in args.runs
            for seed in args.seeds
        ]
    for finished in runs:
        finished.result()


if __name__ == "__main__":
    main()
