"""Figure and table of the README from results/ressim: python tests/benchmarks/figure_ressim.py

Writes results/ressim.png and prints what each run needs to reach 95 % and 99 % of the single-level
improvement: of the mean over its last three evaluations over the start, mean of the seeds. Costs
are steps, weighted by the time of a step in results/speed_ressim.csv, the evaluated grid's being 1;
the column sim_cost of these runs, made before it was counted so, is not used.
"""

import csv
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ppo_multilevel  # noqa: E402

RESULTS = Path(__file__).parent / "results"
CASES = {
    "ResSim-v1": {
        "v1-1level": "128² only (PPO)",
        "v1-2level": "64² + 128², step, literal",
        "v1-3level": "32² + 64² + 128², step, literal",
        "v1-bounded": "three levels, bounded",
        "v1-64": "64² only",
        "v1-32": "32² only",
        "v1-16": "16² only",
        "v1-8": "8² only",
    },
    "ResSim-v3": {
        "v3-64": "64² only (PPO)",
        "v3-step": "32² + 64², step, literal",
        "v3-noise": "32² + 64², noise, bounded",
        "v3-32": "32² only",
        "v3-16": "16² only",
        "v3-8": "8² only",
    },
}


def load(run):
    """Return the seeds of a run, each {column: array}."""
    seeds, runs = [], json.loads((RESULTS / "ressim" / "runs.json").read_text())["runs"]
    for path in sorted((RESULTS / "ressim").glob(f"{run}__*.csv")):
        with path.open() as file:
            rows = list(csv.DictReader(file))
        names = ("wall_seconds", "sim_seconds", "eval_return", "iteration")
        seed = {name: np.array([float(row[name]) for row in rows]) for name in names}
        seeds.append(seed | {"cost": seed["iteration"] * cost(runs[path.stem]["command"])})
    return seeds


def cost(command):
    """Return what an iteration costs, in steps of the grid that is evaluated."""
    with (RESULTS / "speed_ressim.csv").open() as file:
        step = {row["what"]: row["median"] for row in csv.DictReader(file)}
    args = ppo_multilevel.parse_args(command.split()[2:])
    levels = [*args.levels, *args.levels[:-1], args.eval_level]  # own, partners', evaluated
    *weights, unit = [float(step[f"{2**level * 4}x{2**level * 4} step"]) for level in levels]
    return args.num_envs * np.dot(weights, [*args.num_steps, *args.num_steps[1:]]) / unit


def first(seed, target, column):
    """What the first evaluation at `target` or above has cost; NaN if there is none."""
    reached = np.flatnonzero(seed["eval_return"] >= target)
    return seed[column][reached[0]] if len(reached) else np.nan


def spread(values, form):
    """Format mean ± sd; seeds that never got there make it a dash."""
    if np.isnan(values).any():
        return f"— ({np.isfinite(values).sum()} of {len(values)})"
    return f"{np.mean(values):{form}} ± {np.std(values):{form}}"


def table(case, runs):
    """Print a Markdown table of a case, costs to 95 % and 99 % of the single-level improvement."""
    single = load(next(iter(runs)))
    start = np.mean([seed["eval_return"][0] for seed in single])
    final = np.mean([seed["eval_return"][-3:].mean() for seed in single])
    print(f"\n{case}: start {start:.4f}, single level {final:.4f}")
    print("| training | last return | best | s to 95 % | s to 99 % | cost to 99 % | iterations |")
    print("|---|---|---|---|---|---|---|")
    for run, label in runs.items():
        seeds = load(run)
        if not seeds:
            continue
        cells = [spread([seed["eval_return"][-3:].mean() for seed in seeds], ".4f")]
        cells.append(spread([seed["eval_return"].max() for seed in seeds], ".4f"))
        for share, column in ((0.95, "sim_seconds"), (0.99, "sim_seconds"), (0.99, "cost")):
            target = start + share * (final - start)
            cells.append(spread([first(seed, target, column) for seed in seeds], ",.0f"))
        cells.append("/".join(f"{seed['iteration'][-1]:.0f}" for seed in seeds))
        print(f"| {label} | {' | '.join(cells)} |")


def main():
    """Print the tables and write the figure."""
    figure, axes = plt.subplots(2, 3, figsize=(15, 9), sharey="row")
    for row, (case, runs) in zip(axes, CASES.items()):
        table(case, runs)
        for ax, column, label in zip(
            row,
            ("sim_seconds", "wall_seconds", "cost"),
            ("simulation seconds", "wall seconds (one core)", "cost (finest-level steps)"),
        ):
            for i, (run, name) in enumerate(runs.items()):
                for seed in load(run):
                    x, y = seed[column][1:], seed["eval_return"][1:]
                    ax.plot(x, y, color=f"C{i}", lw=1.3, label=name)
                    name = None
            ax.set_xscale("log")
            ax.set_xlabel(label)
            ax.grid(alpha=0.3)
        row[0].set_ylabel(f"{case}: return on the evaluation fields, finest grid")
        row[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / "ressim.png", dpi=80)


if __name__ == "__main__":
    main()
