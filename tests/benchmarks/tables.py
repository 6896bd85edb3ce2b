"""Tables of the recorded results, written into README.md and the pages of tests.

    python tests/benchmarks/tables.py

A table stands between `<!-- table NAME -->` and `<!-- end -->`; NAME is a function here. A test
compares them with the results.
"""

import argparse
import csv
import json
import re
from collections import defaultdict
from pathlib import Path

import learn_ppo
import learn_ressim
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "tests" / "examples" / "README.md"]
PAGES += sorted((ROOT / "tests" / "benchmarks").glob("*.md"))
RESULTS = ROOT / "tests" / "benchmarks" / "results"
ROWS = 2500  # of an iteration, in all runs on reservoirs and the rod that play one level at a time
GRIDS = {"v2": ("27×9", "57×19", "111×37", "219×73"), "rod": ("16", "32", "64", "128")}
GRIDS |= {"ks": ("64", "128", "256"), "gl": ("16", "64", "256")}
GRIDS["water"] = ("surrogate", "reduced", "1 h", "30 s")
TITLES = {case: f"ResSim-{case}" for case in ("v1", "v2", "v3", "v4")}
TITLES |= {"faults": "ResSim-v4 with faults", "rod": "heat in a rod, 100 steps"}
TITLES |= {"ks": "Kuramoto–Sivashinsky", "gl": "Ginzburg–Landau", "water": "water network"}


def read(name):
    """Return the rows of a file of results."""
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def markdown(header, rows):
    """Return a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def spread(values, form):
    """Return one or two values as they are, more as median (lowest to highest).

    A dash stands where not all seeds got there.
    """
    values = np.array(values, dtype=float)
    if np.isnan(values).any():
        return f"— ({np.isfinite(values).sum()} of {len(values)})"
    if len(values) < 3:
        return ", ".join(f"{value:{form}}" for value in values)
    return f"{np.median(values):{form}} ({values.min():{form}} to {values.max():{form}})"


def middle(values, form):
    """Return one or two values as they are, of more the median."""
    if len(values) < 3:
        return spread(values, form)
    return f"{np.median(values):{form}}"


def grouped(rows, column):
    """Return {value of the column: its rows}."""
    groups = defaultdict(list)
    for row in rows:
        groups[row[column]].append(row)
    return groups


# ------------------------------------------------------------------------------------ adaptive
EPOCHS = 5  # of an update that takes UPDATE_SECONDS for ROWS rows
UPDATE_SECONDS = 0.1
FINENESS = ["finest level", "second finest", "third finest", "fourth finest", "fifth finest"]
OTHER_RATES = {
    "only-4": "1e-4, 5 epochs",
    "rate-a": "1e-5, 20 epochs",
    "rate-b": "3e-5, 10 epochs",
}
BY_CHECKS = ("rules.py single", "rules.py halves")  # as the script's rule


def grid(case, level):
    """Return what a level of a case is called."""
    names = GRIDS.get(case, ("8²", "16²", "32²", "64²", "128²"))
    return names[level - 1]


def cases():
    """Return {case: title} of the cases that have records of the rule and of the finest level."""
    return {
        case: title
        for case, title in TITLES.items()
        if is_recorded(f"{case}-adaptive") and is_recorded(reference(case))
    }


def paths(run):
    """Return the files of a run's seeds."""
    return sorted((RESULTS / "ressim").glob(f"{run}__*.csv"))


def is_recorded(run):
    """Return whether a run has records."""
    return bool(paths(run))


def digits(case):
    """Return how the returns of a case are written."""
    return ".4f" if TITLES[case].startswith("ResSim") else ".2f"


def methods(case):
    """Return {run: label} of a case: the rule, finest level only, coarser ones, the others."""
    last = len(learn_ressim.COSTS[case])
    labels = {"adaptive": "adaptive levels", f"only-{last}": f"{grid(case, last)} only (finest)"}
    for level in range(1, last):
        labels[f"only-{level}"] = f"{grid(case, level)} only"
    labels["finest-fit"] = f"{grid(case, last)} only, values fitted at first"
    labels["halves"] = "half of the time on the coarsest level, then the finest"
    labels["multigrid"] = "Dixit & ElSheikh's rule"
    labels["multigrid-fit"] = "Dixit & ElSheikh's rule, values fitted"
    labels["together"] = "together"
    labels["published"] = "together, as published"
    labels = {f"{case}-{name}": label for name, label in labels.items()}
    if case == "v1":
        labels["v1-1level"] = "128² only, the paper's numbers"
    return labels


def arguments(run):
    """Return the options of a run, with the script's defaults."""
    parser = learn_ressim.ml.make_parser()
    words = learn_ressim.RUNS[run].split()
    if not words[0].startswith("-"):
        words = words[1:]  # the name of a rule
    given = parser.parse_args(words)
    parser.set_defaults(**learn_ressim.ml.defaults_of(given))
    return parser.parse_args(words)


def update_seconds(run):
    """Return what a row costs in an update of a run, in nominal seconds."""
    return UPDATE_SECONDS / ROWS * arguments(run).update_epochs / EPOCHS


def load(case, run):
    """Return {seed: (seconds, returns)} of a run at its evaluations.

    Seconds are nominal: steps and updates times what they cost. An update costs what its rows and
    epochs tell. Returns are those of the best parameters so far: by checks where a run made them,
    else by the evaluations themselves, which favours it.
    """
    commands = json.loads((RESULTS / "ressim" / "runs.json").read_text())
    row_seconds = update_seconds(run)
    seeds = {}
    for path in paths(run):
        rows = [row for row in read(path) if row["eval_return"]]
        simulation = simulation_seconds(case, run, rows)
        updates = row_seconds * numbers(rows, "global_step")
        returns = numbers(rows, "eval_return")
        command = commands[path.stem]["command"]
        by_checks = any(rule in command for rule in BY_CHECKS) or "adaptive" in run
        if not by_checks:
            returns = np.maximum.accumulate(returns)
        seeds[path.stem.partition("__")[2]] = simulation + updates, returns
    return seeds


def numbers(rows, name):
    """Return a column of rows as an array."""
    return np.array([float(row[name]) for row in rows])


def simulation_seconds(case, run, rows):
    """Return the nominal seconds of a run's simulation at rows of its record.

    Older records have `sim_cost`, the simulation in steps of the finest level. Newer ones have
    `seconds`, the run's clock, which counts updates, too.
    """
    finest = learn_ressim.COSTS[case][-1] / 1e3
    if run == "v1-1level":  # it has no nominal costs, and plays the finest level only
        return finest * ROWS * numbers(rows, "iteration")
    if "sim_cost" in rows[0]:
        return finest * numbers(rows, "sim_cost")
    return numbers(rows, "seconds") - charged(run) * numbers(rows, "global_step")


def charged(run):
    """Return the seconds of a row of an update on a run's own clock, by its --level-costs."""
    return learn_ressim.ml.Costs(arguments(run)).given[-1]


def recorded(case):
    """Return {run: seeds} of a case, as `load` gives them, of what is there."""
    return {run: load(case, run) for run in methods(case) if is_recorded(run)}


def final(seeds):
    """Return the return of each seed at its end."""
    return [returns[-1] for _, returns in seeds.values()]


def last_second(seeds):
    """Return how long the longest seed of a run is, in nominal seconds."""
    return max(seconds[-1] for seconds, _ in seeds.values())


def first(times, returns, target):
    """Return the time of the first return at `target` or above; NaN if there is none."""
    reached = np.flatnonzero(returns >= target)
    return times[reached[0]] if len(reached) else np.nan


def reference(case):
    """Return the run that is "finest only" of a case."""
    return f"{case}-only-{len(learn_ressim.COSTS[case])}"


def seconds_to(case, curves, run, share):
    """Return, of each seed, the seconds to a share of what finest-only gains."""
    finest = curves[reference(case)]
    start = np.mean([returns[0] for _, returns in finest.values()])
    target = start + share * (np.mean(final(finest)) - start)
    return [first(seconds, returns, target) for seconds, returns in curves[run].values()]


def rule_seconds(case, curves):
    """Return how long the runs of the adaptive rule are on average."""
    return np.mean([seconds[-1] for seconds, _ in curves[f"{case}-adaptive"].values()])


def mean_curve(seeds, times):
    """Return the mean over seeds of what is reached at some times."""
    reached = []
    for seconds, returns in seeds.values():
        latest = np.searchsorted(seconds, times, side="right") - 1
        reached.append(returns[np.maximum(latest, 0)])
    return np.mean(reached, axis=0)


def comparison(case, curves, singles=None):
    """Compare the rule with the best of `singles` at each budget, which is known only afterwards.

    `singles` are names of runs, by default those on a single level. The budgets are 20 times,
    evenly spaced on a log scale, from one iteration on the finest level to the end of the rule's
    runs. Returns the budgets (20,), the factors (20,): how much longer the rule takes to a budget's
    best result than the first single level that has it; infinite if it never does, NaN where the
    best result is not yet 5 % of what single levels gain by the end; and the shortfalls (20,): how
    far it is below the best result at the budget.
    """
    end = rule_seconds(case, curves)
    args = arguments(reference(case))
    rows = args.num_envs * args.num_steps[-1]
    step_seconds = learn_ressim.COSTS[case][-1] / 1e3
    iteration = rows * (step_seconds + update_seconds(reference(case)))
    budgets = np.geomspace(iteration, end, 20)
    times = np.geomspace(iteration / 10, end, 4000)
    if singles is None:
        singles = [name for name in curves if "-only-" in name]
    best = np.max([mean_curve(curves[name], times) for name in singles], axis=0)
    own = mean_curve(curves[f"{case}-adaptive"], times)
    start = np.mean([returns[0] for name in singles for _, returns in curves[name].values()])
    least = start + 0.05 * (best[-1] - start)

    factors = []
    shortfalls = []
    for budget in budgets:
        result = best[times <= budget * (1 + 1e-9)].max()
        seconds = first(times, own, result)
        ratio = seconds / first(times, best, result)
        ratio = np.inf if np.isnan(ratio) else ratio
        factors.append(ratio if result >= least else np.nan)
        shortfalls.append(result - own[times <= budget * (1 + 1e-9)][-1])
    return budgets, np.array(factors), np.array(shortfalls)


def factor(value):
    """Return a factor in time as text; NaN is one of no budget that counts."""
    if np.isnan(value):
        return "—"
    return f"{value:.2f}" if np.isfinite(value) else "not reached"


# ------------------------------------------------------------------------------------ equal time
WAYS = {  # of training
    "finest": "finest level alone",
    "finest-fit": "finest level alone, values fitted",
    "coarsest": "coarsest level alone",
    "best coarse": "best coarse level alone, known only afterwards",
    "halves": "half coarsest, half finest",
    "multigrid": "Dixit & ElSheikh's rule",
    "multigrid-fit": "Dixit & ElSheikh's rule, values fitted",
    "together": "all levels together",
    "adaptive": "adaptive levels",
}

# The cases that nothing was tuned on.
UNTUNED = ["v2", "faults"]


def at_equal_time(case, curves):
    """Return {way of training: (run, returns)} of a case after the seconds of the rule's run.

    A return is that of the best parameters by then, one for each seed.
    """
    budget = rule_seconds(case, curves) * (1 + 1e-9)
    reached = {
        run: np.array([mean_curve({"": seed}, [budget])[0] for seed in seeds.values()])
        for run, seeds in curves.items()
    }
    coarse = [run for run in curves if "-only-" in run and run != reference(case)]
    runs = {"finest": reference(case), "coarsest": f"{case}-only-1"}
    runs["best coarse"] = max(coarse, key=lambda run: reached[run].mean())
    others = ("finest-fit", "halves", "multigrid", "multigrid-fit", "together", "adaptive")
    runs |= {name: f"{case}-{name}" for name in others}
    return {way: (run, reached[run]) for way, run in runs.items() if run in reached}


def shares_of_best(case, curves):
    """Return {way: each seed's gain at equal time}, as a share of the highest mean gain of all."""
    start, _, _ = finest_gain(case, curves)
    reached = at_equal_time(case, curves)
    gains = {way: reached[way][1] - start for way in reached}
    best = max(gain.mean() for gain in gains.values())
    return {way: gain / best for way, gain in gains.items()}


def percent(share):
    """Return a share as text."""
    return f"{100 * share:.0f} %"


def named(case, curves, way, text):
    """Return a cell's text with the name of the best coarse level before it."""
    run, _ = at_equal_time(case, curves)[way]
    return f"{grid(case, int(run[-1]))}: {text}" if way == "best coarse" else text


def gained():
    """What each way has gained in the time of the rule's run, as `shares_of_best` tells."""
    curves = {case: recorded(case) for case in cases()}
    found = {case: shares_of_best(case, runs) for case, runs in curves.items()}
    rows = []
    for case, share in found.items():
        cells = [TITLES[case], f"{rule_seconds(case, curves[case]):,.0f}"]
        for way in WAYS:
            cell = "—"
            if way in share:
                cell = named(case, curves[case], way, percent(share[way].mean()))
            cells.append(cell)
        rows.append(cells)
    rows.append(summary("lowest share", np.min, found.values(), WAYS))
    rows.append(summary("mean share", np.mean, found.values(), WAYS))
    untuned = [found[case] for case in UNTUNED]
    rows.append(summary("mean share of v2 and v4 with faults", np.mean, untuned, WAYS))
    return markdown(["simulation", "seconds", *WAYS.values()], rows)


def mean_shares(found, way):
    """Return a way's mean share on each case that has it, of {way: each seed's share} of each."""
    return [share[way].mean() for share in found if way in share]


def summary(title, function, found, shown):
    """Return a row with a function of each way's mean shares on all cases, such as np.min."""
    cells = [f"**{title}**", ""]
    for way in shown:
        cell = percent(function(mean_shares(found, way)))
        cells.append(f"**{cell}**")
    return cells


def finest_gain(case, curves):
    """Return the finest level's first and last return, and whether it took longer than the rule."""
    finest = curves[reference(case)]
    start = np.mean([returns[0] for _, returns in finest.values()])
    took_longer = last_second(finest) > 1.2 * rule_seconds(case, curves)
    return start, np.mean(final(finest)), took_longer


def shares(case, curves):
    """Return {way: each seed's share of the finest level's whole gain at equal time}."""
    start, end, _ = finest_gain(case, curves)
    reached = at_equal_time(case, curves)
    return {way: (returns - start) / (end - start) for way, (_, returns) in reached.items()}


def outcomes(case, curves):
    """Return {way: each seed's outcome at equal time} of a case, and how an outcome is written.

    It is a share of what the finest level alone gains in its whole run, in per cent. Where that run
    is as long as the rule's, shares would say little, and returns stand in their place.
    """
    _, _, took_longer = finest_gain(case, curves)
    if took_longer:
        return {way: 100 * share for way, share in shares(case, curves).items()}, ".0f"
    reached = at_equal_time(case, curves)
    return {way: returns for way, (_, returns) in reached.items()}, digits(case)


def seeds_cell(case, curves, way):
    """Return a cell of outcomes: mean, lowest, highest and number of seeds."""
    found, form = outcomes(case, curves)
    if way not in found:
        return "—"
    values = found[way]
    mean = f"{values.mean():{form}}"
    if form == ".0f":
        mean += " %"
    text = named(case, curves, way, mean)
    if len(values) == 1:
        return f"{text}, 1 seed"
    return f"{text} ({values.min():{form}} to {values.max():{form}}), {len(values)} seeds"


def gained_seeds():
    """The seeds at equal time, as `outcomes` tell, and how long the finest level's whole run is."""
    curves = {case: recorded(case) for case in cases()}
    found = [at_equal_time(case, curves[case]) for case in curves]
    shown = [way for way in WAYS if any(way in ways for ways in found)]
    rows, of_finest = [], []
    for case, runs in curves.items():
        start, _, took_longer = finest_gain(case, runs)
        title = f"{TITLES[case]}: return, at first {start:{digits(case)}}"
        if took_longer:
            title = TITLES[case]
            of_finest.append(shares(case, runs))
        seconds = [rule_seconds(case, runs), last_second(runs[reference(case)])]
        cells = [seeds_cell(case, runs, way) for way in shown]
        rows.append([title, ", ".join(f"{second:,.0f}" for second in seconds), *cells])
    header = ["simulation", "seconds, of the finest level's whole run"]
    header += [WAYS[way] for way in shown]
    return markdown(header, [*rows, summary("lowest share", np.min, of_finest, shown)])


def time_per_level():
    """On which levels adaptive levels spend a run's time: mean, lowest and highest of the seeds."""
    header = ["simulation", "seeds", *FINENESS, "checks and measurements"]
    rows = []
    for case, title in cases().items():
        seeds = [training_seconds(case, path) for path in paths(f"{case}-adaptive")]
        levels = 100 * np.array([levels / total for levels, total in seeds])  # (seeds, L)
        cells = [title, len(seeds)]
        for level in range(levels.shape[1], 0, -1):
            share = levels[:, level - 1]
            spent = f"{share.mean():.0f} % ({share.min():.0f} to {share.max():.0f})"
            cells.append(f"{grid(case, level)}: {spent}")
        cells += ["—"] * (len(FINENESS) - levels.shape[1])
        other = 100 - levels.sum(axis=1)
        rows.append([*cells, f"{other.mean():.0f} % ({other.min():.0f} to {other.max():.0f})"])
    return markdown(header, rows)


def training_seconds(case, path):
    """Return a recorded run's seconds of training on each level (L,), and all its seconds.

    A change of level comes after a check, which is recorded. So all that was trained between two
    rows of a record was trained on the level of the later one.
    """
    run = path.name.partition("__")[0]
    rows = read(path)
    costs = np.array(learn_ressim.COSTS[case]) / 1e3 + update_seconds(run)  # of a row
    seconds = np.zeros(len(costs))
    trained = np.diff(numbers(rows, "global_step"))
    for row, count in zip(rows[1:], trained, strict=True):
        level = int(row["level"]) - 1
        seconds[level] += count * costs[level]
    last = rows[-1:]
    total = simulation_seconds(case, run, last) + update_seconds(run) * numbers(last, "global_step")
    return seconds, total[0]


# ------------------------------------------------------------------------------------ each budget
def adaptive():
    """The rule beside the best single level of each budget, a line for each simulation."""
    header = ["simulation", "median factor in time", "beside the finest level", "worst factor"]
    header += ["behind at most", "ahead or level", "end: adaptive levels"]
    header += ["best coarse level", "finest level"]
    rows = []
    for case, title in cases().items():
        curves = recorded(case)
        budgets, factors, shortfalls = comparison(case, curves)
        late = budgets >= budgets[-1] / 10
        most = shortfalls[late].max()
        _, beside_finest, _ = comparison(case, curves, [reference(case)])
        cells = [title, factor(np.nanmedian(factors)), factor(np.nanmedian(beside_finest))]
        cells.append(factor(np.nanmax(factors[late])))
        cells.append(f"{most:{digits(case)}}" if most > 0 else "never")
        cells.append(f"{(shortfalls <= 0).sum()} of 20")
        cells.append(spread(final(curves[f"{case}-adaptive"]), digits(case)))
        for run in (best_coarse(case, curves), reference(case)):
            seconds = last_second(curves[run])
            ends = spread(final(curves[run]), digits(case))
            cells.append(f"{grid(case, int(run[-1]))}, {seconds:,.0f} s: {ends}")
        rows.append(cells)
    return markdown(header, rows)


def best_coarse(case, curves):
    """Return the coarse level alone that ends highest."""
    runs = [run for run in curves if "-only-" in run and run != reference(case)]
    return max(runs, key=lambda run: np.median(final(curves[run])))


def case(case):
    """All ways of training on a case."""
    curves = recorded(case)
    header = ["training", "run", "return at the end", "s to 95 %", "s to 99 %", "s in all", "seeds"]
    rows = []
    for run, seeds in curves.items():
        cells = [methods(case)[run], f"`{run}`", spread(final(seeds), digits(case))]
        for share in (0.95, 0.99):
            cells.append(spread(seconds_to(case, curves, run, share), ",.0f"))
        cells.append(f"{last_second(seeds):,.0f}")
        rows.append([*cells, ", ".join(seeds)])
    return markdown(header, rows)


def rates():
    """64² alone with other learning rates and epochs."""
    header = ["simulation", *OTHER_RATES.values()]
    rows = []
    for case in ("v1", "v3", "v4"):
        runs = [load(case, f"{case}-{name}") for name in OTHER_RATES]
        rows.append([TITLES[case], *(spread(final(seeds), digits(case)) for seeds in runs)])
    return markdown(header, rows)


# ------------------------------------------------------------------------------------ as published
PAPER = {  # label, levels, T^l
    "v1": {
        "v1-1level": ("128² only (PPO)", [5], [50]),
        "v1-2level": ("64² + 128², step, literal", [4, 5], [70, 5]),
        "v1-3level": ("32² + 64² + 128², step, literal", [3, 4, 5], [80, 10, 5]),
        "v1-bounded": ("32² + 64² + 128², step, bounded", [3, 4, 5], [80, 10, 5]),
        "v1-64": ("64² only", [4], [50]),
        "v1-32": ("32² only", [3], [50]),
        "v1-16": ("16² only", [2], [50]),
        "v1-8": ("8² only", [1], [50]),
    },
    "v3": {
        "v3-64": ("64² only (PPO)", [4], [50]),
        "v3-step": ("32² + 64², step, literal", [3, 4], [70, 5]),
        "v3-noise": ("32² + 64², noise, bounded", [3, 4], [60, 15]),
        "v3-32": ("32² only", [3], [50]),
        "v3-16": ("16² only", [2], [50]),
        "v3-8": ("8² only", [1], [50]),
    },
}


def load_paper(case, run):
    """Return the seeds of a run with the paper's numbers, each {column: array}. `cost` is in steps
    of the finest level, of partners too; the recorded sim_cost was counted otherwise then."""
    costs, (_, levels, steps) = learn_ressim.COSTS[case], PAPER[case][run]
    members = [*zip(levels, steps), *zip(levels, steps[1:])]  # own, partners
    cost = 50 * sum(costs[level - 1] * T for level, T in members) / costs[-1]
    seeds = []
    for path in paths(run):
        rows = [row for row in read(path) if row["eval_return"]]
        seed = {name: numbers(rows, name) for name in ("eval_return", "iteration")}
        # Newer records have the run's clock only, which counts updates, too.
        clock = "sim_seconds" if "sim_seconds" in rows[0] else "seconds"
        seeds.append(seed | {"seconds": numbers(rows, clock), "cost": seed["iteration"] * cost})
    return seeds


def paper(case):
    """The runs of a case with the paper's schedule, and of its single levels, both with the paper's
    numbers: what they reach and need."""
    runs = {run: seeds for run in PAPER[case] if (seeds := load_paper(case, run))}
    single = next(iter(runs.values()))
    start = np.mean([seed["eval_return"][0] for seed in single])
    end = np.mean([seed["eval_return"][-3:].mean() for seed in single])
    header = ["training", "run", "last return", "best", "measured s to 95 %", "s to 99 %"]
    header += ["cost to 99 %", "iterations"]
    rows = []
    for run, seeds in runs.items():
        cells = [
            PAPER[case][run][0],
            f"`{run}`",
            spread([seed["eval_return"][-3:].mean() for seed in seeds], ".4f"),
        ]
        cells.append(spread([seed["eval_return"].max() for seed in seeds], ".4f"))
        for share, column in ((0.95, "seconds"), (0.99, "seconds"), (0.99, "cost")):
            target = start + share * (end - start)
            curves = [(seed[column], seed["eval_return"]) for seed in seeds]
            cells.append(spread([first(*curve, target) for curve in curves], ",.0f"))
        cells.append("/".join(f"{seed['iteration'][-1]:.0f}" for seed in seeds))
        rows.append(cells)
    return markdown(header, rows)


# ------------------------------------------------------------------------------------ ppo.py
GOALS = {
    "CartPole": "≥ 475 (solved)",
    "Acrobot": "≥ -90",
    "LunarLander": "≥ 200 (solved)",
    "MountainCar": "≥ -120",
    "Pendulum": "≥ -200",
    "Taxi": "7.93 (optimum by value iteration)",
}
MUJOCO = ("HalfCheetah", "Hopper", "Walker2d")
PUBLISHED = {  # openai/baselines-results, read off the figures
    "Pong": "18 at 2M to 3M (baselines)",
    "Breakout": "245 to 310 at 10M (baselines)",
}
RECURRENT = {
    "CartPoleHidden": "feed-forward",
    "CartPoleHidden-gru": "`--rnn gru`",
    "CartPoleHidden-lstm": "`--rnn lstm`",
    "CartPoleHidden-lstm-400k": "`--rnn lstm`",
}
LADDER = {
    "ladder-1-vpg": ("vanilla policy gradient", "Â_t = Σ_k γ^k r_{t+k}, to the end of the rollout"),
    "ladder-2-baseline": (
        "with baseline",
        "V: Â_t = Σ_k γ^k r_{t+k} − V(s_t), with V for what follows the rollout",
    ),
    "ladder-3-one-step": ("one-step actor-critic", "λ: Â_t = δ_t = r_t + γ V(s_{t+1}) − V(s_t)"),
    "ladder-4-gae": ("GAE", "λ: Â_t = δ_t + γλ Â_{t+1}"),
    "ladder-5-epochs": ("several steps per rollout", "4 epochs of 4 minibatches, no clip"),
    "ladder-6-ppo": ("PPO", "the clip, ε = 0.2"),
}


def has_options_of_cleanrl(name):
    """Return whether a run has the options of CleanRL's script for its kind of actions."""
    return name == "CartPole" or name in MUJOCO


def peer(name):
    """Return what CleanRL's script has in its runs with the same options, as `training`."""
    runs = grouped(read("cleanrl.csv"), "run")
    values = [row["episodic_return"] for row in runs[name]]
    return f"{spread(values, ',.1f')}, {len(values)} seed{'s' * (len(values) > 1)}"


def returns(names, header, last=lambda name: []):
    """Return a table of runs of ppo.py; {run: label}, and cells that are added to a line."""
    runs, rows = grouped(read("ppo.csv"), "run"), []
    for name, label in names.items():
        seeds = runs[name]
        cells = [label, f"{int(seeds[0]['steps']) / 1e6:.1f}M"]
        for column in ("episodic_return", "eval_return"):
            cells.append(spread([row[column] for row in seeds], ",.1f"))
        rows.append([*cells, len(seeds), *last(name)])
    return markdown([header, "steps", "training", "evaluation", "seeds", *last(None)], rows)


def ppo():
    """The envs where CleanRL has the same options, and the games of ppo_atari.py."""
    names = {name: learn_ppo.RUNS[name].split()[1] for name in ("CartPole", *MUJOCO)}
    header = "peer: training"
    table = returns(names, "env", lambda name: [peer(name) if name else header])
    return "\n".join([table, *atari()])


def ppo_commands():
    """The options of each env's run, and of those without a trick."""
    runs = [*GOALS, *MUJOCO, "HalfCheetah-cut", "MountainCar-plain", "Taxi-unmasked"]
    names = {name: f"`{learn_ppo.RUNS[name]}`" for name in runs}
    last = {None: "goal"} | GOALS
    return returns(names, "python ppo.py", lambda name: [last.get(name, "")])


def cleanrl():
    """CleanRL's scripts and ppo.py, each with what its own runs have: returns and speed."""
    header = ["env", "options", "ppo.py: training", "CleanRL: training", "ppo.py: steps/s"]
    header += ["CleanRL: steps/s", "ratio", "seeds"]
    ours, theirs = grouped(read("ppo.csv"), "run"), grouped(read("cleanrl.csv"), "run")
    rows = []
    for name, seeds in theirs.items():
        are_same = has_options_of_cleanrl(name)
        cells = [learn_ppo.RUNS[name].split()[1], "the same" if are_same else "of its own"]
        for runs in (ours[name], seeds):
            cells.append(spread([row["episodic_return"] for row in runs], ",.1f"))
        speeds = {
            row["seed"]: float(row["steps"]) / float(row["wall_seconds"]) for row in ours[name]
        }
        peers_speeds = {row["seed"]: float(row["steps_per_second"]) for row in seeds}
        cells.append(middle(list(speeds.values()), ",.0f"))
        cells.append(middle(list(peers_speeds.values()), ",.0f"))
        # A seed's two runs followed each other. Other options make another number of updates.
        ratios = [speeds[seed] / peers_speeds[seed] for seed in peers_speeds if seed in speeds]
        cells.append(spread(ratios, ".1f") if are_same else "—")
        rows.append([*cells, f"{len(ours[name])}, {len(seeds)}"])
    return markdown(header, rows)


def clip():
    """PPO with and without its clip, at a learning rate that is far too large."""
    forms = {"last episodic_return": ".0f", "mean approx_kl": ".3f", "last entropy": ".2f"}
    runs = [row for row in read("examples.csv") if row["example"] == "clip"]
    rows = []
    for coef in ("0.2", "10"):
        cells = grouped([r for r in runs if f"--clip-coef {coef} " in r["command"]], "what")
        values = [spread([r["value"] for r in cells[what]], form) for what, form in forms.items()]
        rows.append([coef, *values])
    return markdown(["`--clip-coef`", *forms], rows)


def recurrent():
    """CartPole with hidden velocities."""
    return returns(RECURRENT, "policy")


def ladder():
    """From vanilla policy gradient to PPO on LunarLander-v3."""

    def last(name):
        if name is None:
            return ["options", "what changes"]
        options = learn_ppo.RUNS[name].removeprefix(learn_ppo.RUNGS).strip()
        return [f"`{options}`", LADDER[name][1]]

    return returns({name: label for name, (label, _) in LADDER.items()}, "rung", last)


# ------------------------------------------------------------------------------------ Atari, speed
def atari():
    """Lines of the default runs of two games."""
    runs = grouped(read("atari.csv"), "run")
    for game, published in PUBLISHED.items():
        seeds = runs[game]
        steps = sorted({f"{int(row['steps']) / 1e6:.1f}M" for row in seeds})
        cells = [game, " to ".join(steps[:: len(steps) - 1] if len(steps) > 1 else steps)]
        cells.append(spread([row["episodic_return"] for row in seeds], ".1f"))
        cells.append(spread([row["mode"].split()[0] for row in seeds], ".1f"))
        yield "| " + " | ".join([*cells, str(len(seeds)), published]) + " |"


def atari_runs():
    """All runs of ppo_atari.py."""
    header = ["options", "seed", "steps", "training", "18 first at", "mode", "samples"]
    rows = []
    for row in read("atari.csv"):
        options = row["command"].removeprefix("python ppo_atari.py ").partition(" --seed")[0]
        reached = f"{int(row['steps_to_18']) / 1e6:.2f}M" if row["steps_to_18"] else "—"
        cells = [f"`{options}`", row["seed"], f"{int(row['steps']) / 1e6:.2f}M"]
        cells += [row["episodic_return"], reached, row["mode"] or "—", row["sampled"] or "—"]
        phases = row["by_phase"].replace(" / ", ", "), row["sampled_by_phase"].replace(" / ", ", ")
        rows.append([*cells, "; ".join(filter(None, phases)) or "—"])
    return markdown([*header, "by phase: mode; samples"], rows)


def peers():
    """Differences of an update from those of peers."""
    rows = [[r["env"], r["peer"], r["advantages"], r["weights"]] for r in read("peers.csv")]
    return markdown(["env", "peer", "advantages", "weights"], rows)


SPEED_SINCE = "2026-11-28"  # the day of the first speed that was measured with today's code


def speeds():
    """Yield case, processor, steps per second, ratio and row of what was run beside its peer."""
    for script in ("ppo", "atari"):
        for row in read(f"speed_{script}.csv"):
            case = row["case"] if script == "ppo" else f"Breakout, {row['case']}"
            name = row["processor"].partition(", 2 cores")[0].removesuffix(" Processor")
            ratio = f"{row['ratio']} ({row['lowest']} to {row['highest']})"
            yield case, name.replace("(R)", ""), f"{int(row['ours']):,}", ratio, row


def speed(age="today's"):
    """Steps per second beside Stable-Baselines3, of today's code or of `older` code."""
    header = ["case", "processor", "steps/s", "Stable-Baselines3", "ratio, median (range)"]
    rows = []
    for case, name, ours, ratio, row in speeds():
        if (row["date"] < SPEED_SINCE) == (age == "older"):
            torch = json.loads(row["versions"])["torch"].partition("+")[0]
            rows.append([case, name, ours, f"{int(row['sb3']):,}", ratio, row["pairs"], torch])
    return markdown([*header, "pairs", "torch"], rows)


def speed_best():
    """How many times as fast the defaults are, in a column per processor."""
    columns = ("Intel Xeon (with AMX)", "AMD EPYC (slow)")
    ratios = {(case, name): f"{ours}, {ratio}" for case, name, ours, ratio, _ in speeds()}
    cases = ("CartPole-v1", "HalfCheetah-v5", "Breakout, default")
    rows = [[case, *(ratios[case, name] for name in columns)] for case in cases]
    return markdown(["case", *(f"{name}: our steps/s, ratio" for name in columns)], rows)


def profile():
    """Where the time goes, in per cent."""
    parts = ("games", "policy", "update", "log", "other")
    rows = [[r["case"], *(f"{float(r[p]):.0%}" for p in parts)] for r in read("profile.csv")]
    return markdown(["case", *parts], rows)


def correlations():
    """How well levels agree with the finest one, and what they are worth: ρ, worth."""
    rows = []
    for case, title in TITLES.items():
        if (RESULTS / "analysis" / f"{case}.csv").exists():
            levels = reversed(read(f"analysis/{case}.csv"))
            cells = [f"{float(r['rho']):.2f}, {float(r['worth']):.2g}" for r in levels]
            cells = [f"{grid(case, len(cells) - i)}: {cell}" for i, cell in enumerate(cells)]
            rows.append([title, *cells[1:], *["—"] * (len(FINENESS) - len(cells))])
    return markdown(["simulation", *FINENESS[1:]], rows)


def ranks():
    """Workers and ranks."""
    header = ["case", "processes", "steps/s", "simulation s", "policy and update s"]
    names = ("steps_per_second", "simulation_seconds", "other_seconds")
    rows = read("scale_ranks.csv")
    return markdown(header, [[r["case"], r["processes"], *(r[n] for n in names)] for r in rows])


def table(name):
    """Return the table of a name: that of a function, or of one with the case after a colon."""
    function, _, case = name.partition(":")
    return globals()[function](*filter(None, [case]))


def filled(text):
    """Return a page with the tables of the results."""
    block = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return block.sub(lambda match: f"{match[1]}{table(match[2])}\n{match[3]}", text)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    for page in PAGES:
        page.write_text(filled(page.read_text()))
