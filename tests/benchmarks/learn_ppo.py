"""Learning runs of ppo.py, recorded for the README.

    python tests/benchmarks/learn_ppo.py --jobs 2             # all of them: hours
    python tests/benchmarks/learn_ppo.py --runs LunarLander   # one of them
    python tests/benchmarks/learn_ppo.py --collect            # only summarise finished runs

Every run has one core. results/ppo.csv gets a row per run: the command, the mean return of the last
100 training episodes, mean and deviation of 50 evaluation episodes (the policy's mode), seconds,
versions; results/ppo/<run>__<seed>.csv its curve. Rows of runs that are not in RUNS_DIR stay. Seed
1 was for trials. It is recorded only where learn_cleanrl.py has runs, which have seeds 1 to 5.
"""

import argparse
import concurrent.futures
import csv
import os
import subprocess
import sys
from pathlib import Path

import learn_cleanrl
import pairs

ROOT = Path(__file__).resolve().parents[2]
RUNS_DIR = Path(os.environ.get("RUNS_DIR", ROOT / "runs" / "learn_ppo"))
RESULTS = Path(__file__).parent / "results"

# Sources: CleanRL's defaults for MuJoCo and CartPole, rl-zoo3's for Acrobot and
# MountainCar, with larger minibatches; our own trials with seed 1 for the others.
MUJOCO = (
    "--num-envs 1 --num-steps 2048 --num-minibatches 32 --update-epochs 10 --learning-rate 3e-4 "
    "--ent-coef 0 --norm-obs --norm-reward --total-timesteps 1000000"
)
LANDER = (
    "--env LunarLander-v3 --gamma 0.999 --norm-reward --no-clip-vloss --total-timesteps 1000000"
)
HIDDEN = (
    "--env hidden:CartPoleHidden-v0 --num-envs 16 --learning-rate 1e-3 --norm-obs --norm-value "
    "--total-timesteps 200000"
)
# The ladder: each rung changes one thing.
RUNGS = f"{LANDER} --learning-rate 1e-3 --num-envs 4 --num-steps 512"
ONE_STEP = f"{RUNGS} --update-epochs 1 --num-minibatches 1"
RUNS = {
    "CartPole": "--env CartPole-v1",
    "Acrobot": (
        "--env Acrobot-v1 --num-envs 16 --num-steps 256 --num-minibatches 16 --gae-lambda 0.94 "
        "--learning-rate 3e-4 --ent-coef 0 --norm-obs --total-timesteps 1000000"
    ),
    "LunarLander": (
        f"{LANDER} --num-envs 16 --num-steps 256 --num-minibatches 16 --update-epochs 8 "
        "--gae-lambda 0.98 --learning-rate 5e-4"
    ),
    "MountainCar": (
        "--env MountainCar-v0 --num-envs 16 --num-steps 16 --gae-lambda 0.98 --learning-rate 3e-4 "
        "--ent-coef 0 --norm-obs --norm-reward --total-timesteps 1000000"
    ),
    "MountainCar-plain": (
        "--env MountainCar-v0 --num-envs 16 --num-steps 16 --gae-lambda 0.98 --learning-rate 3e-4 "
        "--ent-coef 0 --total-timesteps 1000000"
    ),
    "Pendulum": (
        "--env Pendulum-v1 --gamma 0.9 --num-steps 256 --learning-rate 1e-3 --norm-reward"
    ),
    "Taxi": (
        "--env Taxi-v4 --num-envs 16 --learning-rate 1e-3 --norm-reward --total-timesteps 500000"
    ),
    "Taxi-unmasked": (
        "--env Taxi-v4 --num-envs 16 --learning-rate 1e-3 --norm-reward --total-timesteps 500000 "
        "--no-action-masks"
    ),
    "HalfCheetah": f"--env HalfCheetah-v5 {MUJOCO}",
    # All its episodes are cut by a time limit. Then nothing follows, as in CleanRL.
    "HalfCheetah-cut": f"--env HalfCheetah-v5 {MUJOCO} --no-time-limit-bootstrap",
    "Hopper": f"--env Hopper-v5 {MUJOCO}",
    "Walker2d": f"--env Walker2d-v5 {MUJOCO}",
    "CartPoleHidden": HIDDEN,
    "CartPoleHidden-gru": f"{HIDDEN} --rnn gru",
    "CartPoleHidden-lstm": f"{HIDDEN} --rnn lstm",
    "CartPoleHidden-lstm-400k": f"{HIDDEN} --rnn lstm --total-timesteps 400000",
    "ladder-1-vpg": f"{ONE_STEP} --gae-lambda 1 --no-baseline",
    "ladder-2-baseline": f"{ONE_STEP} --gae-lambda 1",
    "ladder-3-one-step": f"{ONE_STEP} --gae-lambda 0",
    "ladder-4-gae": f"{ONE_STEP} --gae-lambda 0.98",
    "ladder-5-epochs": f"{RUNGS} --gae-lambda 0.98 --clip-coef 10",
    "ladder-6-ppo": f"{RUNGS} --gae-lambda 0.98",
}
SEEDS = dict.fromkeys(learn_cleanrl.RUNS, [1, 2, 3, 4, 5])  # of all others 2, 3, 4
SEEDS["HalfCheetah-cut"] = [1, 2, 3]
COLUMNS = (
    "run seed steps episodic_return eval_return eval_sd wall_seconds command versions "
    "processor date"
).split()
CURVE = ("global_step", "wall_seconds", "episodic_return")


def run(name, seed):
    """Train, from where the run stopped if there is one, and evaluate, one thread."""
    script = [sys.executable, "-W", "ignore", str(ROOT / "ppo.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
    run_dir, options = RUNS_DIR / f"{name}__{seed}", [*RUNS[name].split(), "--seed", str(seed)]
    options += ["--log-dir", str(RUNS_DIR), "--run-name", run_dir.name]
    if (run_dir / "checkpoint.pt").exists():
        options = ["--resume", str(run_dir)]
    subprocess.run([*script, *options, "--quiet"], env=environment, check=True)
    evaluation = [*script, "--eval", str(run_dir), "--eval-episodes", "50"]
    done = subprocess.run(evaluation, env=environment, check=True, capture_output=True, text=True)
    (run_dir / "versions.json").write_text(pairs.origin()["versions"])
    (run_dir / "evaluation.txt").write_text(done.stdout)


def summarise(run_dir):
    """Return a finished run's row of results/ppo.csv; write its curve."""
    with (run_dir / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    thinned = rows[:: max(1, len(rows) // 50)]
    with (RESULTS / "ppo" / f"{run_dir.name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, CURVE, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(thinned if thinned[-1] is rows[-1] else [*thinned, rows[-1]])
    last = rows[-1]
    name, seed = run_dir.name.rsplit("__", 1)
    mean, sd = (run_dir / "evaluation.txt").read_text().split()[1:4:2]
    return {
        "run": name,
        "seed": seed,
        "steps": last["global_step"],
        "episodic_return": f"{float(last['episodic_return']):.2f}",
        "eval_return": mean,
        "eval_sd": sd,
        "wall_seconds": f"{float(last['wall_seconds']):.1f}",
        "command": f"python ppo.py {RUNS[name]} --seed {seed}",
        "versions": (run_dir / "versions.json").read_text(),
        **pairs.run_origin(run_dir),
    }


def collect():
    """Write the rows of the finished runs to results/ppo.csv, beside those of other runs."""
    (RESULTS / "ppo").mkdir(exist_ok=True)
    with (RESULTS / "ppo.csv").open() as file:
        rows = {(row["run"], row["seed"]): row for row in csv.DictReader(file)}
    for path in RUNS_DIR.glob("*/evaluation.txt"):
        row = summarise(path.parent)
        rows[row["run"], row["seed"]] = row
    with (RESULTS / "ppo.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows))


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the record")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--collect", action="store_true", help="only summarise finished runs")
    args = parser.parse_args()
    if not args.collect:
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as executor:
            runs = [
                executor.submit(run, name, seed)
                for name in args.runs
                for seed in args.seeds or SEEDS.get(name, [2, 3, 4])
            ]
        for finished in runs:
            finished.result()
    collect()


if __name__ == "__main__":
    main()
