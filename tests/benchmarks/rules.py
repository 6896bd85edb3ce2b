"""Other rules than the climb's, for comparison; what they take beside it are their options.

python tests/benchmarks/rules.py multigrid --env ResSim-v4
python tests/benchmarks/rules.py pairs --env ResSim-v4
"""

import argparse
import functools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_multilevel as ml  # noqa: E402


class Multigrid(ml.Climb):
    """The adaptive multigrid rule of Dixit & ElSheikh (2022, arXiv 2207.03253): the next level when
    the return on the current one, evaluated after every iteration, has changed by at most TOLERANCE
    over EVALUATIONS. Nothing is played on the finest level before, and the values are not fitted.
    Evaluations are played from the starts of a climb's checks, and charged."""

    EVALUATIONS, TOLERANCE = 25, 0.002
    SAVED = ["level", "refit", "seen"]

    def __init__(self, args):
        super().__init__(args)
        self.refit, self.seen = False, []

    def begin(self, run):
        """Return what is logged at first."""
        return {"level": self.args.levels[0]}

    def review(self, run, own, partners):
        """Evaluate on the level; go to the next one if nothing changes any more."""
        args, level = self.args, self.level
        seeds = ml.CHECK_SEED + np.arange(args.check_episodes)
        name = args.levels[level]
        pool = ml.one_level_pool(args, run.model, seeds, 0, name, validation=True)
        with ml.closing(pool):
            mean = float(ml.evaluate(run.model, pool)[0].mean())
            steps = pool.arrays["steps"].sum()
        run.counters["sim_cost"] += float(steps) * args.level_costs[level] / args.level_costs[-2]
        self.seen = [*self.seen, mean][-self.EVALUATIONS :]
        full, change = len(self.seen) == self.EVALUATIONS, np.ptp(self.seen) / abs(mean)
        if full and change <= self.TOLERANCE and level < len(args.levels) - 1:
            print(f"level {args.levels[level]} → {args.levels[level + 1]}", flush=True)
            self.level, self.seen = level + 1, []
        return {"level": args.levels[level], "check_return": mean}


class Pairs(ml.Climb):
    """The climb, whose rungs above the coarsest train on a pair: many steps one level below, few
    pairs of the level itself and its partner, weighed as --schedule together does with --control
    auto and --num-steps 'T auto'."""

    def __init__(self, args):
        super().__init__(args)
        self.rungs = {}
        for level in range(1, len(args.levels)):
            costs = [*args.level_costs[level - 1 : level + 1], args.level_costs[-1]]
            rung = {"levels": args.levels[level - 1 : level + 1], "level_costs": costs}
            rung |= {"num_steps": [args.num_steps[0], "auto"], "control": "auto"}
            self.rungs[level] = ml.Together(argparse.Namespace(**vars(args) | rung))

    def plan(self):
        """Return what the next iteration does."""
        plan = super().plan()
        if self.level:
            pair = self.rungs[self.level].plan()
            plan = pair._replace(levels=[self.level - 1, self.level], refit=plan.refit)
        return plan

    def review(self, run, own, partners):
        """Measure the pairs, then do as a climb does."""
        if self.level:
            self.rungs[self.level].review(run, own, partners)
        return super().review(run, own, partners)

    def seconds(self, level):
        """Return what an iteration on a level index takes."""
        if not level:
            return super().seconds(level)
        coarse, fine, update = self.rungs[level].args.level_costs
        below, pairs = self.rungs[level].plan().num_steps
        return self.args.num_envs * (below * coarse + pairs * (fine + coarse)) + update


def rollout_of_pairs(real, rule, model, pool, level, T, args, generator):
    """As the real `rollout`, but a pair's lower level has no partners."""
    schedule = "together" if level == rule.level else "climb"
    args = argparse.Namespace(**vars(args) | {"schedule": schedule})
    return real(model, pool, level, T, args, generator)


def main():
    """Run the command line."""
    rules, parser = {"multigrid": Multigrid, "pairs": Pairs}, argparse.ArgumentParser()
    parser.add_argument("rule", choices=rules, help="then options of ppo_multilevel.py")
    chosen, options = parser.parse_known_args()
    args = ml.parse_args(options)
    rule = rules[chosen.rule](args)
    if type(rule) is Pairs:  # games with partners on all levels, which a climb does not make
        make_pool = ml.make_pool
        ml.rollout = functools.partial(rollout_of_pairs, ml.rollout, rule)

        def make_pairs(args, model, seeds, *rest, **options):
            paired = argparse.Namespace(**vars(args) | {"schedule": "together"})
            several_levels = seeds.shape[1] > 1
            return make_pool(paired if several_levels else args, model, seeds, *rest, **options)

        ml.make_pool = make_pairs
    ml.train(args, rule)


if __name__ == "__main__":
    main()
