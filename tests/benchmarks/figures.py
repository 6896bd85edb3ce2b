"""Figures of the recorded results: python tests/benchmarks/figures.py [NAME ...]

With --record it first trains a policy, in runs/reservoir, seed 1, and records the reservoir that
`lead` shows.
"""

import argparse
import json
import math
import sys

import matplotlib

matplotlib.use("Agg")
import learn_ressim  # noqa: E402
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import pairs  # noqa: E402
import tables  # noqa: E402
from matplotlib.ticker import PercentFormatter  # noqa: E402
from tables import RESULTS, ROOT, TITLES, read  # noqa: E402

sys.path.insert(0, str(ROOT))
# A page shows a figure at 846 pixels, which is 100 to the inch here; files have twice as many.
WIDTH = 8.46
DPI = 200
plt.rcParams |= {"font.size": 8, "axes.titlesize": 9, "legend.fontsize": 7, "axes.linewidth": 0.6}
PLAIN = "{x:,.0f}"  # numbers of an axis; exponents would be too small to read
# Colours that colour-blind people can tell apart (Okabe & Ito).
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#8A8A8A"
DARK = "#606060"  # grey text
# Breakout, lowest and highest of three PPO runs after millions of steps (baselines-results, figure)
PUBLISHED = {1: (15, 25), 2: (30, 48), 10: (245, 310)}
ATARI = {  # title: {run: its label}
    "Pong": {
        "Pong": "defaults",
        "Pong-lr-5e-4": "--learning-rate 5e-4",
        "Pong-16-games": "16 games, 3 epochs, clip 0.2",
    },
    "Breakout": {"Breakout": "defaults", "Breakout-64-games": "64 games, on a GPU"},
    "Pong, by --precision": {"Pong": "bfloat16", "Pong-fp32": "float32"},
}
LEVELS = {  # name of a level: its colour
    "finest level alone": BLUE,
    "second finest": ORANGE,
    "third finest": GREEN,
    "fourth finest": RED,
    "fifth finest": PURPLE,
}
MARKERS = {  # way of training: marker, colour
    "finest": ("o", BLUE),
    "finest-fit": ("p", BLUE),
    "coarsest": ("v", ORANGE),
    "best coarse": ("D", GREY),
    "halves": ("^", PURPLE),
    "multigrid": ("s", RED),
    "multigrid-fit": ("X", RED),
    "together": ("P", GREEN),
    "adaptive": ("*", "k"),
}


# ------------------------------------------------------------------------------------ lead
SHOWN = [1, 3, 5]  # levels
LABEL = {"va": "center", "weight": "bold", "linespacing": 1.15}


def lead():
    """One reservoir on three levels, and how soon methods learn on it and on another one."""
    figure = plt.figure(figsize=(WIDTH, 3.25))
    sides = {"top": 0.865, "bottom": 0.145}
    top = 0.985

    figure.text(0.008, top, "an oil field on three levels", va="top", fontsize=9)
    figure.text(0.008, 0.885, "ResSim-v1, under one control", weight="bold")
    pictures = figure.add_gridspec(3, 1, left=0.008, right=0.13, hspace=0.1, **sides)
    draw_levels([figure.add_subplot(part) for part in pictures])
    caption = "Water (blue) displaces oil (brown). Shares:\noil produced in one episode."
    figure.text(0.008, 0.11, caption, va="top", color=DARK, linespacing=1.15)

    figure.text(0.645, top, "oil produced on the finest level", va="top", ha="center", fontsize=9)
    (enough,) = figure.add_gridspec(1, 1, left=0.295, right=0.625, **sides)
    draw_enough(figure.add_subplot(enough))
    (misleading,) = figure.add_gridspec(1, 1, left=0.675, right=0.96, **sides)
    draw_misleading(figure.add_subplot(misleading))
    return figure


def draw_levels(axes):
    """Draw the oil that a learned control leaves on three levels."""
    data = np.load(RESULTS / "reservoir.npz")
    costs = learn_ressim.COSTS["v1"]
    for ax, level in zip(axes, SHOWN, strict=True):
        water = data[f"water_{level}"][..., None].astype(float)
        # Oil is brown, water blue.
        ax.imshow((1 - water) * [0.33, 0.2, 0.12] + water * [0.2, 0.5, 0.86])
        ax.set(xticks=[], yticks=[], anchor="W")
        lines = [
            f"{len(water)} × {len(water)} cells",
            f"a step costs {costs[level - 1] / costs[0]:.0f}",
            f"{100 * data[f'return_{level}']:.1f} % of the oil",
        ]
        ax.text(1.08, 0.5, "\n".join(lines), transform=ax.transAxes, va="center", linespacing=1.4)


def draw_enough(ax):
    """Draw the race on ResSim-v1, where coarse levels are soon as good as the finest one."""
    curves = tables.recorded("v1")
    draw_race(ax, "v1", curves)
    ax.set_title("ResSim-v1: coarse levels are enough", fontsize=8, weight="bold")
    ax.set(xlim=(0.33, 2200), ylim=(0.563, 0.707))
    ax.set_yticks([0.58, 0.6, 0.62, 0.64, 0.66, 0.68])

    # When the finest level alone has its whole gain, and when others have as much.
    whole = np.median(tables.final(curves["v1-only-5"]))
    late = first_at(curves["v1-only-5"], whole)
    early = first_at(curves["v1-adaptive"], whole)
    coarsest = first_at(curves["v1-only-1"], whole)
    top = whole + 0.011
    ax.annotate("", (early, top), (late, top), arrowprops={"arrowstyle": "->", "lw": 1.2})
    ax.vlines([early, late], whole, top, color="k", lw=0.7, ls=":")
    lines = ["the finest level's result", f"{late / early:.0f} times sooner"]
    lines.append(f"(8² alone: {late / coarsest:.0f} times)")
    middle = np.sqrt(early * late)
    ax.text(middle, top + 0.004, "\n".join(lines), ha="center", linespacing=1.15)

    for level in (1, 2, 3, 4):
        seeds = curves[f"v1-only-{level}"].values()
        x = max(seconds[1] for seconds, _ in seeds)
        y = np.median([np.interp(x, seconds, returns) for seconds, returns in seeds])
        # Left of the line's first point, or below it where other lines pass.
        place = {"xytext": (-2, 3 if level == 1 else -6), "ha": "right", "va": "center"}
        if x > 2:
            place = {"xytext": (0, -4), "ha": "left", "va": "top"}
        name = tables.grid("v1", level)
        ax.annotate(name, (x, y), textcoords="offset points", color=DARK, fontsize=7.5, **place)
    ax.text(17, 0.57, "coarse levels alone", ha="center", color=DARK)
    ax.text(5.2, 0.662, "adaptive\nlevels", ha="right", **LABEL)
    ax.text(240, 0.6, "finest level\nalone", color=BLUE, **LABEL)


def draw_misleading(ax):
    """Draw the race on ResSim-v4, where the two coarsest levels lead to worse policies."""
    curves = tables.recorded("v4")
    draw_race(ax, "v4", curves)
    ax.set_title("ResSim-v4: 8² and 16² mislead", fontsize=8, weight="bold")
    ax.set(xlim=(0.8, 800), ylim=(0.51, 0.612))
    for level in (1, 2, 3):
        seeds = curves[f"v4-only-{level}"]
        place = {"xytext": (3, 0), "va": "center", "color": DARK, "fontsize": 7.5}
        where = (tables.last_second(seeds), np.median(tables.final(seeds)))
        ax.annotate(tables.grid("v4", level), where, textcoords="offset points", **place)
    ax.text(30, 0.588, "adaptive\nlevels", ha="right", **LABEL)
    ax.text(820, 0.6075, "finest level\nalone", ha="right", color=BLUE, **LABEL)


def draw_race(ax, case, curves):
    """Draw returns against time: medians, and the range of all seeds."""
    finest = len(learn_ressim.COSTS[case])
    styles = {f"{case}-only-{level}": {"color": GREY, "lw": 1.1} for level in range(1, finest)}
    styles[f"{case}-only-{finest}"] = {"color": BLUE, "lw": 1.8}
    styles[f"{case}-adaptive"] = {"color": "k", "lw": 2}
    times = np.geomspace(0.6, tables.last_second(curves[f"{case}-only-{finest}"]), 4000)
    for run, style in styles.items():
        seeds = curves[run].values()
        returns = np.array([np.interp(times, seconds, found) for seconds, found in seeds])
        shown = times >= max(seconds[1] for seconds, _ in seeds)
        shown &= times <= min(seconds[-1] for seconds, _ in seeds)
        x, y = times[shown], returns[:, shown]
        ax.plot(x, np.median(y, axis=0), **style)
        alpha = 0.08 if style["color"] == GREY else 0.15
        ax.fill_between(x, y.min(axis=0), y.max(axis=0), color=style["color"], alpha=alpha, lw=0)

    ax.set(xscale="log", xlabel="nominal seconds of simulation and learning")
    ax.xaxis.set_major_formatter(PLAIN)
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    ax.spines[["top", "right"]].set_visible(False)


def first_at(seeds, target):
    """Return when the median over seeds is first at a return."""
    times = np.geomspace(0.6, tables.last_second(seeds), 10_000)
    reached = [tables.mean_curve({"": seed}, times) for seed in seeds.values()]
    return tables.first(times, np.median(reached, axis=0), target)


# ------------------------------------------------------------------------------------ gained
def gained():
    """What each way of training has gained at equal time, a row for each simulation."""
    curves = {case: tables.recorded(case) for case in tables.cases()}
    shares = {case: tables.shares_of_best(case, runs) for case, runs in curves.items()}
    ways = tables.WAYS

    lane_height = 0.85 / len(ways)
    figure, ax = plt.subplots(figsize=(WIDTH, 0.08 * len(ways) * len(curves) + 3.2))
    for i, case in enumerate(curves):
        if i % 2 == 0:
            ax.axhspan(i - 0.5, i + 0.5, color="k", alpha=0.04, lw=0)
        # Markers of a row stand a little below each other, so that none hides another.
        for lane, way in enumerate(ways):
            y = i + lane_height * (lane - (len(ways) - 1) / 2)
            if way in shares[case]:
                draw_share(ax, way, shares[case][way], y)

    # Three last, higher rows.
    untuned = [shares[case] for case in tables.UNTUNED]
    summaries = {
        "lowest of all": (np.min, shares.values()),
        "mean of all": (np.mean, shares.values()),
        "mean of v2 and\nv4 with faults": (np.mean, untuned),
    }
    middles = [len(curves) + 0.2 + 1.4 * i for i in range(len(summaries))]
    choices = [way for way in ways if way != "best coarse"]  # nobody can choose that one
    for middle, (function, found) in zip(middles, summaries.values()):
        ax.axhspan(middle - 0.68, middle + 0.68, color="k", alpha=0.1, lw=0)
        for lane, way in enumerate(choices):
            y = middle + 1.1 / len(choices) * (lane - (len(choices) - 1) / 2)
            share = function(tables.mean_shares(found, way))
            draw_share(ax, way, np.array([share]), y)
            where = {"xytext": (8, -0.5), "textcoords": "offset points", "va": "center"}
            ax.annotate(tables.percent(share), (100 * share, y), fontsize=7, **where)

    ax.axvline(100, color="k", lw=0.8, ls="--", zorder=0)
    titles = [TITLES[case] for case in curves]
    ax.set_yticks([*range(len(curves)), *middles], [*titles, *summaries])
    for label in ax.get_yticklabels()[-len(summaries) :]:
        label.set_weight("bold")
    ax.tick_params(axis="y", length=0)
    highest = max(share.max() for found in shares.values() for share in found.values())
    ax.set(xlim=(0, max(115, 100 * highest + 2)), ylim=(middles[-1] + 0.7, -0.5))
    ax.xaxis.set_major_formatter(PercentFormatter(100, decimals=0, symbol=" %"))
    ax.set_xlabel("gain as a share of the best method's mean gain, at equal nominal time")
    ax.spines[["top", "right", "left"]].set_visible(False)

    handles = [ax.plot([], [], label=tables.WAYS[way], **marker_style(way))[0] for way in ways]
    handles += ax.plot([], [], color="k", lw=1, label="line: lowest to highest seed")
    figure.legend(handles=handles, loc="upper center", ncols=3, fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.6 / figure.get_figheight()))
    return figure


def draw_share(ax, way, shares, y):
    """Draw the mean of a way of training, and a line from its lowest seed to its highest."""
    _, color = MARKERS[way]
    ax.plot([100 * shares.min(), 100 * shares.max()], [y, y], color=color, lw=1)
    ax.plot(100 * shares.mean(), y, **marker_style(way))


def marker_style(way):
    """Return how the marker of a way of training is drawn."""
    marker, color = MARKERS[way]
    return {
        "marker": marker,
        "ls": "",
        "color": color,
        "markeredgewidth": 0.5,
        "markersize": 9.5 if way == "adaptive" else 5.5,
    }


# ------------------------------------------------------------------------------------ curves
def adaptive():
    """The rule and the single levels, a panel per case: returns against seconds."""
    cases = tables.cases()
    rows = math.ceil(len(cases) / 3)
    figure, axes = plt.subplots(rows, 3, figsize=(WIDTH, 2.5 * rows))
    for case, ax in zip(cases, axes.flat):
        curves = tables.recorded(case)
        last = len(learn_ressim.COSTS[case])
        for (name, color), level in zip(LEVELS.items(), range(last, 0, -1)):
            style = {"color": color, "lw": 1, "ls": "--" if level == last else "-"}
            seeds = curves.get(f"{case}-only-{level}", {})  # not every level has been run
            draw_seeds(ax, seeds, name, style)
        style = {"color": "k", "lw": 1.5, "zorder": 9}
        draw_seeds(ax, curves[f"{case}-adaptive"], "adaptive levels", style)

        span = f"{tables.grid(case, 1)} to {tables.grid(case, last)}"
        ax.set(xscale="log", title=f"{cases[case]}\n{span}")
        ax.xaxis.set_major_formatter(PLAIN)
        first = np.mean([returns[0] for _, returns in curves[f"{case}-adaptive"].values()])
        ax.set_ylim(-20 if case == "rod" else first - 0.2 * abs(ax.get_ylim()[1] - first))
        ax.grid(alpha=0.3)

    for ax in axes[:, 0]:
        ax.set_ylabel("return on the finest level")
    for ax in axes.flat[len(cases) :]:
        ax.axis("off")
    for ax in axes.flat[len(cases) - 3 : len(cases)]:
        ax.set_xlabel("nominal seconds")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="lower center", ncols=6, fontsize=8)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    return figure


def draw_seeds(ax, seeds, label, style):
    """Draw a line for each seed, the first with a label."""
    for seconds, returns in seeds.values():
        ax.plot(seconds[1:], returns[1:], label=label, **style)
        label = None


def ressim():
    """The runs with the paper's numbers against their cost."""
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 4.6))
    for ax, (case, runs) in zip(axes, tables.PAPER.items()):
        for i, (run, (name, *_)) in enumerate(runs.items()):
            for n, seed in enumerate(tables.load_paper(case, run)):
                x, y = seed["cost"][1:], seed["eval_return"][1:]
                style = "-" if "+" in name else "--"
                ax.plot(x, y, style, color=f"C{i}", lw=1.3, label=None if n else name)
        ax.set(xscale="log", xlabel="cost (finest-level steps)", title=TITLES[case])
        ax.xaxis.set_major_formatter(PLAIN)
        ax.grid(alpha=0.3)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
    axes[0].set_ylabel("return on the finest level")
    figure.tight_layout()
    return figure


def ppo():
    """Curves of ppo.py: mean of the seeds, and their range."""
    names = {name: label for name, (label, _) in tables.LADDER.items()} | tables.RECURRENT
    groups = {"LunarLander-v3: the ladder": tables.LADDER}
    groups["CartPole-v1 without velocities"] = [*tables.RECURRENT][:3]
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 3.2))
    groups["MuJoCo"] = tables.MUJOCO
    for ax, (title, runs) in zip(axes, groups.items()):
        for run in runs:
            curves = [read(path) for path in sorted((RESULTS / "ppo").glob(f"{run}__*.csv"))]
            curves = [
                np.array([(r["global_step"], r["episodic_return"]) for r in c], float).T
                for c in curves
            ]
            steps = curves[0][0]
            returns = np.stack([np.interp(steps, *curve) for curve in curves])
            label = names.get(run, run).strip("`")
            (line,) = ax.plot(steps / 1e6, returns.mean(axis=0), label=label)
            span = returns.min(axis=0), returns.max(axis=0)
            ax.fill_between(steps / 1e6, *span, alpha=0.2, color=line.get_color())
        ax.set(title=title, xlabel="steps [millions]")
        ax.grid(alpha=0.3)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False, ncols=2)
    axes[0].set(ylim=(-600, 300), ylabel="return of the last 100 episodes")
    figure.tight_layout()
    return figure


def atari():
    """Curves of ppo_atari.py, a panel for each group of runs."""
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 3))
    for ax, (title, names) in zip(axes, ATARI.items()):
        for color, (name, label) in enumerate(names.items()):
            for i, path in enumerate(sorted((RESULTS / "atari").glob(f"{name}__*.csv"))):
                rows = [(r["global_step"], r["episodic_return"]) for r in read(path)]
                steps, scores = np.array(rows, dtype=float).T
                ax.plot(steps / 1e6, scores, f"C{color}", lw=1, label=None if i else label)
        if title == "Breakout":
            shown = [(x, *scores) for x, scores in PUBLISHED.items()]
            ax.vlines(*zip(*shown), color="gray", lw=4, label="openai/baselines-results")
        ax.set(title=title, xlabel="steps [millions]")
        ax.grid(alpha=0.3)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False)
    axes[0].set_ylabel("score of the last 100 games")
    figure.tight_layout()
    return figure


# ------------------------------------------------------------------------------------ reservoir
def record_reservoir():
    """Record what `lead` shows of the first evaluation field, after training a policy."""
    import ppo_multilevel as ml

    if not (ROOT / "runs/reservoir").exists():
        where = ["--log-dir", str(ROOT / "runs"), "--run-name", "reservoir", "--quiet"]
        ml.train(ml.parse_args(["--env", "ResSim-v1", *where]))
    args = ml.parse_args(["--eval", str(ROOT / "runs/reservoir")])
    model = ml.make_model(args)
    model.load_state_dict(ml.read_checkpoint(args.eval)["model"])
    policy = ml.Policy(model)

    record = {"origin": json.dumps(pairs.origin())}
    for level in SHOWN:
        env = ml.make_env(args, level, evaluation=True)
        obs, _ = env.reset(seed=0, options={"field": 0})
        total = 0.0
        over = False
        while not over:
            action = ml.to_env(policy.act(obs[np.newaxis]), env.action_space)[0]
            obs, reward, over, *_ = env.step(action)
            total += reward
        record[f"return_{level}"] = total
        record[f"water_{level}"] = env.unwrapped.s.clip(0, 1).astype(np.float16)
    np.savez_compressed(RESULTS / "reservoir.npz", **record)


def main():
    """Write results/<name>.png."""
    names = ("lead", "gained", "adaptive", "ressim", "ppo", "atari")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--record", action="store_true", help="record the reservoir anew")
    args = parser.parse_args()
    if args.record:
        record_reservoir()
    for name in args.names or names:
        figure = globals()[name]()
        figure.savefig(RESULTS / f"{name}.png", dpi=DPI)


if __name__ == "__main__":
    main()
