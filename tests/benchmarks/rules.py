"""Other rules than the script's own, for comparison. After their name come its own options.

python tests/benchmarks/rules.py multigrid --env ResSim-v4
python tests/benchmarks/rules.py multigrid-fit --env ResSim-v4          # and V is fitted
python tests/benchmarks/rules.py halves --env ResSim-v4
python tests/benchmarks/rules.py single --env ResSim-v4 --levels 3 4
python tests/benchmarks/rules.py single-fit --env ResSim-v4 --levels 4  # and V is fitted at first
"""

import argparse
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_multilevel as ml  # noqa: E402


class Multigrid(ml.Adaptive):
    """The adaptive multigrid rule of Dixit & ElSheikh (2022, arXiv 2207.03253).

    It goes to the next level when the return on the current one, evaluated after every iteration,
    has changed by at most TOLERANCE over EVALUATIONS. Nothing is played on the finest level before,
    and the values are not fitted. Evaluations are played from the starts of checks, and charged.
    """

    EVALUATIONS = 25
    TOLERANCE = 0.002

    def __init__(self, args):
        super().__init__(args)
        self.level = 0
        self.seen = []  # the latest returns on the level

    def begin(self, run):
        """Return what is logged at first."""
        return {"level": self.args.levels[0]}

    def review(self, run, own, partners, episodes):
        """Evaluate on the level; go to the next one if nothing changes any more."""
        level = self.level
        seeds = ml.CHECK_SEED + np.arange(self.args.check_episodes)
        returns, _ = run.sims.play_episodes(run.model, [f"check {level}"], seeds)
        mean = float(returns.mean())
        self.seen = [*self.seen, mean][-self.EVALUATIONS :]
        change = np.ptp(self.seen) / abs(mean)
        settled = len(self.seen) == self.EVALUATIONS and change <= self.TOLERANCE
        if settled and level < len(self.args.levels) - 1:
            print(f"level {self.args.levels[level]} → {self.args.levels[level + 1]}", flush=True)
            self.level += 1
            self.seen = []
        return {"level": self.args.levels[level], "check_return": mean}


class MultigridFit(Multigrid):
    """The same rule, with the fit of V that adaptive levels make at first and on a new level."""

    def begin(self, run):
        """Have V fitted at first. Returns what is logged."""
        self.refit = not self.args.norm_obs
        return super().begin(run)

    def review(self, run, own, partners, episodes):
        """Evaluate on the level; if it goes to the next one, V is fitted there."""
        level = self.level
        row = super().review(run, own, partners, episodes)
        # With --norm-obs the first fit is that of the second iteration.
        is_first_fit = self.args.norm_obs and run.iteration == 1
        self.refit = self.level != level or is_first_fit
        return row


def make_multigrid_teams(args):
    """Return the teams of the script's rule, with games for checks on each level."""
    teams = make_teams(args)
    check = teams.pop("check", None)
    if check:
        for level in range(len(args.levels)):
            teams[f"check {level}"] = check._replace(level=level)
    return teams


class Halves(ml.Adaptive):
    """Half of the run's time on the coarsest level, the other half on the finest.

    Nothing is measured and nothing is judged. What else the script's rule does stays: checks choose
    the best parameters and are charged, and V is fitted at first and on the finest level.
    """

    def review(self, run, own, partners, episodes):
        """Check if it is due; go to the finest level when half of the time is over."""
        row = super().review(run, own, partners, episodes)
        self.choose_level(run)
        return row

    def choose_level(self, run):
        """Choose the level by the time alone."""
        level = 0 if run.share_done() < 0.5 else len(self.args.levels) - 1
        if level != self.level:
            self.level = level
            self.refit = True
        self.window_end = math.inf  # a window's end would have the script's rule judge


class Single(ml.Adaptive):
    """Training on the first of --levels alone, with the best parameters by checks on the last.

    So its result is chosen as that of the adaptive rule is. It takes no decision, so a check costs
    nothing; there is one with each evaluation.
    """

    def begin(self, run):
        """Make the first check. Returns what is logged."""
        self.level = 0
        return {"level": self.args.levels[0], "check_return": self.check(run)}

    def review(self, run, own, partners, episodes):
        """Check before an evaluation."""
        row = {"level": self.args.levels[0]}
        if run.iteration % self.args.eval_every == 0:
            row["check_return"] = self.check(run)
        return row

    def check(self, run):
        """Make a check that costs nothing."""
        total = run.sims.costs.total
        mean = super().check(run)
        run.sims.costs.total = total
        return mean


class SingleFit(Single):
    """The same, with the fit of V that adaptive levels make at first."""

    def begin(self, run):
        """Make the first check, and fit V, with --norm-obs an iteration later."""
        self.refit = not self.args.norm_obs
        return super().begin(run)

    def review(self, run, own, partners, episodes):
        """Check before an evaluation."""
        self.refit = self.args.norm_obs and run.iteration == 1
        return super().review(run, own, partners, episodes)


make_teams = ml.make_teams  # the script's own
RULES = {
    "multigrid": Multigrid,
    "multigrid-fit": MultigridFit,
    "halves": Halves,
    "single": Single,
    "single-fit": SingleFit,
}


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rule", choices=RULES, help="then options of ppo_multilevel.py")
    chosen, options = parser.parse_known_args()
    args = ml.parse_args(options)
    # The script plays a single level by its other schedule, which makes no checks.
    args.schedule = "adaptive"
    if issubclass(RULES[chosen.rule], Multigrid):
        ml.make_teams = make_multigrid_teams
    ml.train(args, RULES[chosen.rule](args))


if __name__ == "__main__":
    main()
