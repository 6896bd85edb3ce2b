"""Figure and tables of the climb from results/ressim: python tests/benchmarks/figure_climb.py

Writes results/climb.png, a panel per case: returns on the evaluation fields of the finest grid
against nominal simulation seconds (steps times the nominal cost of a step on their level, checks
included). Prints for each case what every way of training reaches and needs, and the largest
shortfall of the climb against the better of "finest only" and the best coarse level, over 20
budgets from one iteration on the finest level to the end of finest-only.
"""

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import learn_ressim  # noqa: E402
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

RESULTS = Path(__file__).parent / "results"
ROWS = 2500  # of an iteration
GRIDS = ("8²", "16²", "32²", "64²", "128²")


def methods(case):
    """Return {run: label} of a case, the climb first, the finest level second."""
    last = len(learn_ressim.COSTS[case])
    finest = {f"{case}-only-{last}": f"{GRIDS[last - 1]} only (finest)"}
    if case == "v1":  # 50 minutes a run: those with the paper's learning rate and epochs
        finest = {"v1-1level": "128² only (finest; 1e-5, 20 epochs)"}
    labels = {f"{case}-climb": "climb"} | finest
    labels |= {f"{case}-only-{level}": f"{GRIDS[level - 1]} only" for level in range(1, last)}
    labels[f"{case}-finest-fit"] = f"{GRIDS[last - 1]} only, values fitted at first"
    return labels | {f"{case}-together": "together"}


def load(case, run):
    """Return {seed: (seconds, returns)} of a run at its evaluations."""
    unit, seeds = learn_ressim.COSTS[case][-1] / 1e3, {}
    for path in sorted((RESULTS / "ressim").glob(f"{run}__*.csv")):
        with path.open() as file:
            rows = [row for row in csv.DictReader(file) if row["eval_return"]]
        name = "iteration" if run == "v1-1level" else "sim_cost"  # which was counted otherwise then
        cost = np.array([float(row[name]) for row in rows]) * (ROWS if name == "iteration" else 1)
        returns = np.array([float(row["eval_return"]) for row in rows])
        seeds[path.stem.partition("__")[2]] = unit * cost, returns
    return seeds


def at(curve, budgets):
    """Return the last evaluation within each budget."""
    seconds, returns = curve
    return returns[np.searchsorted(seconds, budgets, side="right") - 1]


def first(curve, target):
    """Return the seconds to the first evaluation at `target` or above; NaN if there is none."""
    reached = np.flatnonzero(curve[1] >= target)
    return curve[0][reached[0]] if len(reached) else np.nan


def spread(values, form):
    """Format mean ± sd; seeds that never got there make it a dash."""
    if np.isnan(values).any():
        return f"— ({np.isfinite(values).sum()} of {len(values)})"
    return f"{np.mean(values):{form}} ± {np.std(values):{form}}"


def table(case, curves):
    """Print what every way of training of a case reaches, and how far the climb falls short."""
    labels, (climb, finest, *coarse) = methods(case), list(methods(case))
    single = curves[finest].values()
    start = np.mean([returns[0] for _, returns in single])
    final = np.mean([returns[-3:].mean() for _, returns in single])
    print(f"\nResSim-{case}: start {start:.4f}, finest only {final:.4f}")
    print("| training | last return | s to 95 % | s to 99 % | s in all | seeds |")
    print("|---|---|---|---|---|---|")
    for run, seeds in curves.items():
        cells = [spread([returns[-3:].mean() for _, returns in seeds.values()], ".4f")]
        for share in (0.95, 0.99):
            target = start + share * (final - start)
            cells.append(spread([first(curve, target) for curve in seeds.values()], ",.0f"))
        cells.append(f"{max(seconds[-1] for seconds, _ in seeds.values()):,.0f}")
        print(f"| {labels[run]} | {' | '.join(cells)} | {', '.join(seeds)} |")
    cost = learn_ressim.COSTS[case][-1] / 1e3
    end = max(seconds[-1] for seconds, _ in single)
    budgets = np.geomspace(ROWS * cost, end, 20)
    means = {
        run: np.mean([at(c, budgets) for c in s.values()], axis=0) for run, s in curves.items()
    }
    single = [run for run in (finest, *coarse) if run in means and "together" not in run]
    for rivals in (single, [run for run in single if "fit" not in run]):
        shortfall = np.max([means[run] for run in rivals], axis=0) - means[climb]
        worst = int(shortfall.argmax())
        line = f"shortfall against {', '.join(rivals)}: at most {shortfall[worst]:.4f}"
        print(f"{line}, at {budgets[worst]:.0f} s; ahead at {(shortfall <= 0).sum()} of 20 budgets")


def main():
    """Print the tables and write the figure."""
    figure, axes = plt.subplots(1, len(learn_ressim.COSTS), figsize=(15, 4.5))
    for ax, case in zip(axes, learn_ressim.COSTS):
        curves = {run: seeds for run in methods(case) if (seeds := load(case, run))}
        table(case, curves)
        for i, (run, seeds) in enumerate(curves.items()):
            label = methods(case)[run]
            for seconds, returns in seeds.values():
                style = {"color": "k", "lw": 2, "zorder": 9} if i == 0 else {"color": f"C{i - 1}"}
                ax.plot(seconds[1:], returns[1:], label=label, **{"lw": 1} | style)
                label = None
        ax.set_xscale("log")
        ax.set_title(f"ResSim-{case}")
        ax.set_xlabel("nominal simulation seconds")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    axes[0].set_ylim(0.6)
    axes[0].set_ylabel("return on the evaluation fields, finest grid")
    figure.tight_layout()
    figure.savefig(RESULTS / "climb.png", dpi=80)


if __name__ == "__main__":
    main()
