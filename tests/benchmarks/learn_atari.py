"""Learning runs of ppo_atari.py, recorded for the README.

    python tests/benchmarks/learn_atari.py                       # all of them: many hours
    python tests/benchmarks/learn_atari.py --runs Pong --seeds 1
    python tests/benchmarks/learn_atari.py --collect             # record the runs so far

Every run has the cores that the process may use; `taskset -c 0` and `taskset -c 1` run two side by
side. A run that was stopped is resumed, unless it has taken its steps. At the end, or by
`--collect` while none runs, results/atari.csv gets a row per run: its steps, the mean true score of
the last 100 training games and the step at which that first reached 18, mean and deviation of 16
games with the policy's mode and with its samples, either's mean by the frame at which a game
begins, modulo 4 (no-ops set that phase, and it stays: an action lasts 4 frames; these games have
them in all runs), seconds, command, machine, versions (when it was last resumed);
results/atari/<run>__<seed>.csv gets its curve. Rows of runs that are not in RUNS_DIR stay.
"""

import argparse
import csv
import math
import os
import platform
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pairs  # noqa: E402

import ppo_atari  # noqa: E402

RUNS_DIR = Path(os.environ.get("RUNS_DIR", ROOT / "runs" / "learn_atari"))
RESULTS = Path(__file__).parent / "results"
RUNS = {  # options, and the step after which the run is stopped
    "Pong": ("--env Pong --total-timesteps 10000000", 3_000_000),
    "Pong-16-games": (
        "--env Pong --num-envs 16 --num-minibatches 8 --update-epochs 3 --clip-coef 0.2 "
        "--no-anneal-clip --total-timesteps 10000000",
        1_700_000,
    ),
    "Pong-no-noops": ("--env Pong --noop-max 0 --total-timesteps 10000000", 3_000_000),
    "Pong-lr-5e-4": ("--env Pong --learning-rate 5e-4 --total-timesteps 10000000", 1_700_000),
    "Pong-fp32": ("--env Pong --total-timesteps 10000000 --precision fp32", 1_700_000),
    "Breakout": ("--env Breakout --total-timesteps 10000000", 10_000_000),
    "Breakout-64-games": (
        "--env Breakout --num-envs 64 --num-steps 32 --num-minibatches 8 --compile "
        "--total-timesteps 4900000",
        4_900_000,
    ),
}
SEEDS = {"Pong": range(1, 5)}  # of the record; else 1, 2
SEEDS |= dict.fromkeys(("Pong-fp32", "Breakout", "Breakout-64-games"), [1]) | {"Pong-no-noops": []}
COLUMNS = (
    "run seed steps episodic_return steps_to_18 mode sampled by_phase sampled_by_phase "
    "wall_seconds command precision machine versions processor date"
).split()
CURVE = ("global_step", "wall_seconds", "episodic_return")


def run(name, seed):
    """Train, from where the run stopped if there is one, and stop it after its last step."""
    script = [sys.executable, "-W", "ignore", str(ROOT / "ppo_atari.py")]
    run_dir = RUNS_DIR / f"{name}__{seed}"
    options, last = RUNS[name]
    options = [*options.split(), "--seed", str(seed)]
    options += ["--log-dir", str(RUNS_DIR), "--run-name", run_dir.name]
    if (run_dir / "checkpoint.pt").exists():
        options = ["--resume", str(run_dir)]
        if steps_taken(run_dir) >= last:
            return
    versions = pairs.origin()["versions"]
    process = subprocess.Popen([*script, *options, "--quiet"])
    while process.poll() is None:
        time.sleep(5)
        if run_dir.exists():
            (run_dir / "versions.json").write_text(versions)
        if steps_taken(run_dir) >= last:
            process.terminate()  # it finishes its iteration and saves
            process.wait()
    if process.returncode not in (0, 128 + signal.SIGTERM):
        sys.exit(f"{run_dir} failed")


def progress(run_dir):
    """Return the rows of progress.csv."""
    with (run_dir / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def steps_taken(run_dir):
    """Return the last step in progress.csv, 0 if there is none."""
    rows = progress(run_dir) if (run_dir / "progress.csv").exists() else []
    return int(rows[-1]["global_step"]) if rows else 0


def record(run_dir):
    """Return a run's row of results/atari.csv; write its curve."""
    rows = progress(run_dir)
    with (RESULTS / "atari" / f"{run_dir.name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, CURVE, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows[::10])
    last = rows[-1]
    name, seed = run_dir.name.rsplit("__", 1)
    args = ppo_atari.parse_args(["--eval", str(run_dir), "--noop-max", "30"])
    mode, phases = evaluate(args, ppo_atari.Player)
    sampled, _ = evaluate(args, Sampler)
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else torch.backends.cpu.get_cpu_capability()
    bound = 18 if args.env == "Pong" else math.inf
    # The first rows have no return: no game has ended.
    reached = [
        row["global_step"] for row in rows if float(row["episodic_return"] or "nan") >= bound
    ]
    return {
        "run": name,
        "seed": seed,
        "steps": last["global_step"],
        "episodic_return": f"{float(last['episodic_return']):.2f}",
        "steps_to_18": reached[0] if reached else "",
        "mode": f"{mode.mean():.2f} ± {mode.std():.2f}",
        "sampled": f"{sampled.mean():.2f} ± {sampled.std():.2f}",
        "by_phase": means_by_phase(mode, phases),
        "sampled_by_phase": means_by_phase(sampled, phases),
        "wall_seconds": f"{float(last['wall_seconds']):.0f}",
        "command": f"python ppo_atari.py {RUNS[name][0]} --seed {seed}",
        "precision": "bf16" if ppo_atari.make_model(args).bf16 else "fp32",
        "machine": f"{platform.machine()} {device}, {args.num_workers} core(s)",
        "versions": (run_dir / "versions.json").read_text(),
        **pairs.run_origin(run_dir),
    }


def means_by_phase(returns, phases):
    """Return the games' mean returns for the phases 0 to 3."""
    return " / ".join(f"{returns[phases == phase].mean():.1f}" for phase in range(4))


class Sampler(ppo_atari.Player):
    """A player that plays samples of the policy's actions where the mode is asked for."""

    def take_step(self, t, noise=None):
        """Act in row t, and step the games."""
        noise = self.model.head.noise(len(self.games), generator=None)
        super().take_step(t, noise.numpy())


def evaluate(args, player_class):
    """Play 16 games of a run's policy.

    Returns their scores, and for each the frame at which the policy takes over, modulo 4.
    """
    args = argparse.Namespace(**vars(args) | {"num_envs": 16, "num_steps": 1})
    ppo_atari.seed_generators(args.seed)
    model = ppo_atari.make_model(args).cpu()
    model.load_state_dict(ppo_atari.read_checkpoint(args.eval)["model"])
    seeds = ppo_atari.EVAL_SEED + np.arange(16)
    rows = ppo_atari.make_rows(args, 16)
    with closing(player_class(args, rows, 0, model)) as player:
        player.start(seeds)
        frames = [game.ale.getEpisodeFrameNumber() for game in player.games]
        return player.play_episodes(seeds), np.array(frames) % 4


def collect():
    """Write the rows of the runs to results/atari.csv, beside those of other runs."""
    (RESULTS / "atari").mkdir(exist_ok=True)
    path, rows = RESULTS / "atari.csv", {}
    if path.exists():
        with path.open() as file:
            rows = {(row["run"], row["seed"]): row for row in csv.DictReader(file)}
    for checkpoint in RUNS_DIR.glob("*/checkpoint.pt"):
        row = record(checkpoint.parent)
        rows[row["run"], row["seed"]] = row
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows))


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the record")
    parser.add_argument("--collect", action="store_true", help="record the runs so far")
    args = parser.parse_args()
    if args.collect:
        collect()
        return
    for name in args.runs:
        for seed in args.seeds or SEEDS.get(name, [1, 2]):
            run(name, seed)
    collect()


if __name__ == "__main__":
    main()
