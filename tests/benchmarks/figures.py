"""Figures of the recorded results: python tests/benchmarks/figures.py [NAME ...]

`reservoir` trains a policy first, in runs/reservoir, seed 1; the others need the results only, and
are made if no name is given.
"""

import argparse
import sys
from contextlib import closing

import matplotlib

matplotlib.use("Agg")
import learn_ressim  # noqa: E402
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import tables  # noqa: E402
from tables import RESULTS, ROOT, TITLES, read  # noqa: E402

sys.path.insert(0, str(ROOT))
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


def adaptive():
    """The rule and the single levels, a panel per case: returns against seconds."""
    figure, axes = plt.subplots(2, 4, figsize=(16, 8))
    for case, ax in zip(tables.cases(), axes.flat):
        curves = tables.recorded(case)
        last = len(learn_ressim.COSTS[case])
        for below in reversed(range(last)):
            style = {"color": f"C{below}", "lw": 1.2, "ls": "-" if below else "--"}
            name = f"{tables.grid(case, last - below)} alone"
            draw_seeds(ax, curves[f"{case}-only-{last - below}"], name, style)
        style = {"color": "k", "lw": 2, "zorder": 9}
        draw_seeds(ax, curves[f"{case}-adaptive"], "adaptive rule", style)

        ax.set(xscale="log")
        ax.set_title(TITLES[case])
        ax.set_xlabel("nominal seconds")
        rises_late = case in ("v3", "v4", "ks", "gl")
        ax.legend(fontsize=8, loc="upper left" if rises_late else "lower right")
        first = np.mean([returns[0] for *_, returns in curves[f"{case}-adaptive"].values()])
        ax.set_ylim(-20 if case == "rod" else first - 0.2 * abs(ax.get_ylim()[1] - first))
        ax.grid(alpha=0.3)
    for ax in axes[:, 0]:
        ax.set_ylabel("return on the finest grid")
    for ax in axes.flat[len(tables.cases()) :]:
        ax.axis("off")
    return figure


def draw_seeds(ax, seeds, label, style):
    """Draw a line for each seed, the first with a label."""
    for seconds, _, returns in seeds.values():
        ax.plot(seconds[1:], returns[1:], label=label, **style)
        label = None


def ressim():
    """The runs with the paper's numbers against their cost."""
    figure, axes = plt.subplots(1, 2, figsize=(13, 5))
    for ax, (case, runs) in zip(axes, tables.PAPER.items()):
        for i, (run, (name, *_)) in enumerate(runs.items()):
            for n, seed in enumerate(tables.load_paper(case, run)):
                x, y = seed["cost"][1:], seed["eval_return"][1:]
                style = "-" if "+" in name else "--"
                ax.plot(x, y, style, color=f"C{i}", lw=1.3, label=None if n else name)
        ax.set(xscale="log", xlabel="cost (finest-level steps)", title=TITLES[case])
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    axes[0].set_ylabel("return on the evaluation fields, finest grid")
    return figure


def ppo():
    """Curves of ppo.py: mean of the seeds, and their range."""
    names = {name: label for name, (label, _) in tables.LADDER.items()} | tables.RECURRENT
    groups = {"LunarLander-v3: the ladder": tables.LADDER}
    groups["CartPole-v1 without velocities"] = [*tables.RECURRENT][:3]
    figure, axes = plt.subplots(1, 3, figsize=(16, 4.2))
    groups["MuJoCo"] = ["HalfCheetah", "Hopper", "Walker2d"]
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
        ax.set(title=title, xlabel="steps [millions]", ylabel="return of the last 100 episodes")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8, loc="lower right" if title == "LunarLander-v3: the ladder" else None)
    axes[0].set_ylim(-600, 300)
    return figure


def atari():
    """Curves of ppo_atari.py, a panel for each group of runs."""
    figure, axes = plt.subplots(1, 3, figsize=(16, 4.2))
    for ax, (title, names) in zip(axes, ATARI.items()):
        for color, (name, label) in enumerate(names.items()):
            for i, path in enumerate(sorted((RESULTS / "atari").glob(f"{name}__*.csv"))):
                rows = [(r["global_step"], r["episodic_return"]) for r in read(path)]
                steps, scores = np.array(rows, dtype=float).T
                ax.plot(steps / 1e6, scores, f"C{color}", label=None if i else label)
        if title == "Breakout":
            shown = [(x, *scores) for x, scores in PUBLISHED.items()]
            ax.vlines(*zip(*shown), color="gray", lw=4, label="openai/baselines-results")
        ax.set(title=title, xlabel="steps [millions]", ylabel="score of the last 100 games")
        ax.grid(alpha=0.3)
        ax.legend(loc="lower right")
    return figure


def pictures():
    """Breakout as it is, and as the policy sees it."""
    import ppo_atari

    args = ppo_atari.parse_args(["--env", "Breakout"])
    rows = {name: tensor.numpy() for name, tensor in ppo_atari.make_rows(args, 1).items()}
    game = ppo_atari.Game(args, rows, 0)
    with closing(game.env):
        game.start(seed=1, t=0)
        for t in range(60):
            game.step(t, [2, 2, 3, 0][t % 4])
        frame = game.ale.getScreenRGB()
    figure, axes = plt.subplots(1, 5, figsize=(13, 3.4), width_ratios=[1.1, 1, 1, 1, 1])
    axes[0].imshow(frame)
    axes[0].set_title("Breakout")
    for i, ax in enumerate(axes[1:]):
        ax.imshow(game.obs[..., i], cmap="gray")
        ax.set_title(("three actions ago", "two", "one", "now")[i])
    for ax in axes:
        ax.axis("off")
    return figure


def learned(args):
    """Return the mode of a run's policy as a function obs → action."""
    import ppo_multilevel as ml

    model = ml.make_model(args)
    model.load_state_dict(ml.read_checkpoint(args.eval)["model"])
    policy = ml.Policy(model)

    def control(obs):
        return ml.to_env(policy.act(obs[np.newaxis]), model.action_space)[0]

    return control


def play(env, obs, control):
    """Play an episode on from its first observation. Returns its return."""
    total, over = 0.0, False
    while not over:
        obs, reward, over, *_ = env.step(control(obs))
        total += reward
    return total


def drawn(env):
    """Return a picture (ny, nx, 3) of a reservoir: oil brown, water blue, wells white and red."""
    import ppo_multilevel as ml

    water = ml.refine(env.s, env.case.grids[-1])[..., None].clip(0, 1)
    image = (1 - water) * [84, 52, 30] + water * [44, 123, 214]
    image[env.case.injectors] = 255, 255, 255
    image[env.case.producers] = 230, 30, 30
    return image.astype(np.uint8)


def reservoir():
    """The first evaluation field on three grids after an episode with a learned policy."""
    import ppo_multilevel as ml

    if not (ROOT / "runs/reservoir").exists():
        where = ["--log-dir", str(ROOT / "runs"), "--run-name", "reservoir", "--quiet"]
        ml.train(ml.parse_args(["--env", "ResSim-v1", *where]))
    args = ml.parse_args(["--eval", str(ROOT / "runs/reservoir")])
    control = learned(args)
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.7))
    for ax, level in zip(axes[1:], (1, 3, len(ml.CASES[args.env].grids))):
        env = ml.make_env(args.env, level, evaluation=True)
        obs, _ = env.reset(seed=0, options={"field": 0})
        total = play(env, obs, control)
        ax.imshow(drawn(env.unwrapped))
        cells = "×".join(map(str, env.unwrapped.grid.shape))
        ax.set_title(f"{cells} cells: {total:.3f} of the oil")
    axes[0].imshow(np.log(env.unwrapped.grid.perm[0] / ml.MILLIDARCY), cmap="viridis")
    axes[0].set_title("log permeability")
    for ax in axes:
        ax.axis("off")
    return figure


def opm():
    """The rock of an evaluation of OPM Flow after an episode: equal rates, a rule, a policy.

    The policy is that of the run runs/opm_flow, which examples/opm_flow.py has the command for.
    """
    import ppo_multilevel as ml

    sys.path.insert(0, str(ROOT / "tests" / "examples"))
    import opm_flow

    args = ml.parse_args(["--eval", str(ROOT / "runs/opm_flow")])
    controls = {"equal rates": opm_flow.equal, "hand-written": opm_flow.against_water}
    controls["learned policy"] = learned(args)
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.7))
    for ax, (name, control) in zip(axes[1:], controls.items()):
        env = opm_flow.Flow(args.levels[-1])
        obs, _ = env.reset(seed=ml.EVAL_SEED)
        total = play(env, obs, control)
        ax.imshow(env.render())
        ax.set_title(f"{name}: {total:.3f}")
        env.close()
    env = opm_flow.Flow(args.levels[-1])
    env.np_random = np.random.default_rng(ml.EVAL_SEED)
    axes[0].imshow(np.log(env.draw_permeability()), cmap="viridis")
    axes[0].set_title("log permeability")
    for ax in axes:
        ax.axis("off")
    return figure


def main():
    """Write results/<name>.png."""
    usual, parser = ("adaptive", "ressim", "ppo", "atari", "pictures"), argparse.ArgumentParser()
    parser.add_argument(
        "names", nargs="*", help=f"{', '.join(usual)} (the default); reservoir, opm"
    )
    for name in parser.parse_args().names or usual:
        figure = globals()[name]()
        figure.tight_layout()
        figure.savefig(RESULTS / f"{name}.png", dpi=75)


if __name__ == "__main__":
    main()
