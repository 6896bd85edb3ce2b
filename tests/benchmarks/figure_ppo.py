"""Tables and figure of results/ppo.csv for the README: python tests/benchmarks/figure_ppo.py"""

import csv
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

RESULTS = Path(__file__).parent / "results"
LABELS = {
    "ladder-1-vpg": "vanilla policy gradient",
    "ladder-2-baseline": "with baseline",
    "ladder-3-one-step": "one-step actor-critic",
    "ladder-4-n-step": "n-step actor-critic",
    "ladder-5-gae": "GAE",
    "ladder-6-ppo": "PPO",
    "CartPoleHidden": "feed-forward",
    "CartPoleHidden-gru": "GRU",
    "CartPoleHidden-lstm": "LSTM",
}


def table(rows):
    """Print a line of the README's table per run: mean ± sd over the seeds."""
    runs = defaultdict(list)
    for row in rows:
        runs[row["run"]].append(row)
    for name, seeds in runs.items():
        cells = [name, str(len(seeds)), f"{int(seeds[0]['steps']):,}"]
        for column in ("episodic_return", "eval_return", "wall_seconds"):
            values = np.array([float(row[column]) for row in seeds])
            cells.append(f"{values.mean():,.1f} ± {values.std():.1f}")
        print("| " + " | ".join(cells) + " |")


def curves(axes, names):
    """Draw the training return of runs over steps: mean of the seeds, and their range."""
    for name in names:
        seeds = []
        for path in sorted((RESULTS / "ppo").glob(f"{name}__*.csv")):
            with path.open() as file:
                rows = [(r["global_step"], r["episodic_return"]) for r in csv.DictReader(file)]
            seeds.append(np.array(rows, dtype=float).T)
        if not seeds:
            continue
        steps = seeds[0][0]
        returns = np.stack([np.interp(steps, *seed) for seed in seeds])
        (line,) = axes.plot(steps / 1e3, returns.mean(axis=0), label=LABELS[name])
        axes.fill_between(
            steps / 1e3, returns.min(axis=0), returns.max(axis=0), alpha=0.2, color=line.get_color()
        )
    axes.set(xlabel="steps [thousands]", ylabel="return of the last 100 episodes")
    axes.grid(alpha=0.3)
    axes.legend()


def main():
    """Print the table, write results/ppo.png."""
    with (RESULTS / "ppo.csv").open() as file:
        table(list(csv.DictReader(file)))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    curves(left, [name for name in LABELS if name.startswith("ladder")])
    left.set(title="LunarLander-v3: the ladder", ylim=(-400, 300))
    curves(right, [name for name in LABELS if name.startswith("CartPole")])
    right.set_title("CartPole-v1 without velocities")
    figure.tight_layout()
    figure.savefig(RESULTS / "ppo.png", dpi=110)


if __name__ == "__main__":
    main()
