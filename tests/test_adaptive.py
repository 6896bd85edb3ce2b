"""The adaptive rule: which level it trains on, by scripted checks; what a run keeps and charges."""

import csv
import json
import shutil
import sys
import types
from pathlib import Path

import envs
import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_multilevel import install

import ppo_multilevel as ml

COSTS = [1.0, 4.0, 16.0, 10.0]  # seconds of a step on three levels, and of an update
SMALL = (
    "--env ResSim-v1 --levels 1 2 3 --num-steps 5 --num-envs 4 --num-minibatches 2 --hidden 8 "
    "--update-epochs 2 --num-workers 0 --check-episodes 4 --eval-episodes 2 --quiet "
    "--level-costs 1 4 16 300 --eval-every 4"
).split()


@pytest.fixture(scope="module", autouse=True)
def measured_often():
    """Short runs measure ρ, too: it may take half of the time instead of 5 %."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ml.Adaptive, "MEASURE_SHARE", 0.5)
        yield


class FakeRun:
    """What a rule needs of a run: scripted checks of four episodes, a clock, a model to keep."""

    def __init__(self, args):
        self.args = args
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.iteration = 0
        self.checks = []  # the mean and the spread of the next ones
        self.share = 0.0
        self.sims = types.SimpleNamespace(costs=ml.Costs(args), play_episodes=self.play_episodes)

    def seconds(self):
        return self.sims.costs.total

    def share_done(self):
        return self.share

    def play_episodes(self, model, teams, seeds):
        assert model is self.model and teams == ["check"]
        assert seeds.tolist() == [20_000, 20_001, 20_002, 20_003]
        self.sims.costs.total += 32.0  # two steps of the third level
        mean, spread = self.checks.pop(0)
        return mean + spread * np.array([[-1.0, 1.0, -1.0, 1.0]]), None


@pytest.fixture
def adaptive(monkeypatch):
    """Make a rule that has made its first check, and its run; ρ is not measured."""

    def make(levels=3, norm_obs=False, costs=COSTS):
        args = types.SimpleNamespace(num_envs=10, num_steps=[1] * levels, norm_obs=norm_obs)
        args.levels = list(range(1, levels + 1))
        args.quiet = False
        args.check_episodes = 4
        args.level_costs = [*costs[:levels], costs[-1]]
        rule = ml.Adaptive(args)
        run = FakeRun(args)
        monkeypatch.setattr(rule, "measurement_is_due", lambda run: False)
        monkeypatch.setattr(rule, "early_measurement_is_due", lambda run: False)
        run.model.obs_norm = ml.RunningNorm() if norm_obs else None
        run.checks.append((0.0, 0.0))
        assert rule.begin(run)["check_return"] == 0.0
        return rule, run

    return make


def iteration_seconds(run, level):
    """Return what an iteration on a level takes."""
    return run.args.num_envs * run.args.num_steps[level] * run.sims.costs.row(level)


def iterate(rule, run, own_return=0.0):
    """Do an iteration as `train` does; return its row."""
    level = rule.level
    assert rule.plan()[:2] == ([level], [])
    run.iteration += 1
    run.sims.costs.total += iteration_seconds(run, level)
    return rule.review(run, None, None, [(own_return, 1)])


def window(rule, run, mean, spread=0.0, own_returns=None):
    """Train until the window is over; its checks return `mean` ± `spread`. Return iterations."""
    end = rule.window_end
    iterations = 0
    run.checks = [(mean, spread)] * 99
    while rule.window_end == end:
        own = own_returns[iterations % len(own_returns)] if own_returns else 0.0
        row = iterate(rule, run, own)
        iterations += 1
    assert row["check_return"] == pytest.approx(mean)
    return iterations


@pytest.mark.parametrize(
    "costs, rho, chosen",
    [
        (COSTS, [1, 1, 1], 0),  # the cheapest, as long as nothing is known
        (COSTS, [0.5, 1, 1], 1),  # .25 / 20 < 1 / 50
        (COSTS, [0.3, 0.5, 1], 2),  # .09 / 20 and .25 / 50 < 1 / 170
        (COSTS, [0.35, 0.5, 1], 0),  # .1225 / 20 > 1 / 170
        ([5.0, 5.0, 5.0, 10.0], [1, 1, 1], 2),  # of equals the finest
        ([16.0, 4.0, 1.0, 10.0], [1, 1, 1], 2),  # coarse levels that cost more than fine ones
    ],
)
def test_level_by_correlation_and_cost(adaptive, costs, rho, chosen):
    """trust · ρ² / seconds decides, by hand."""
    rule, run = adaptive(costs=costs)
    rule.rho = torch.tensor(rho, dtype=torch.float64)
    rule.choose_level(run)
    assert rule.level == chosen


def test_level_whose_iterations_have_fewer_steps(adaptive):
    """It does not look cheaper for that: what counts is the time for a row."""
    rule, run = adaptive(levels=2, costs=[1.0, 1.1, 0.0])
    rule.args.num_steps = [10, 1]
    rule.choose_level(run)
    assert rule.level == 0


def test_length_of_a_window(adaptive):
    """At least eight iterations, five checks and 15 % of the time; checks count as time."""
    rule, run = adaptive()
    assert rule.window_end - run.seconds() == 8 * 20 == 5 * 32
    assert window(rule, run, 1.0) == 8
    run.sims.costs.total = 2000.0
    rule.choose_level(run)
    assert rule.window_end == 2300.0
    rule.rho[:2] = 0.03
    rule.choose_level(run)
    assert rule.level == 2 and rule.window_end == 2000 + 8 * 170


def test_gain_restores_trust(adaptive):
    """A gain beyond one standard error: trust 1 for the level, twice as much for all others."""
    error = 1.0 / 3**0.5  # of four differences ±1: deviation √(4/3), over √4
    for factor, trust in ((1.01, [1.0, 0.5, 1.0]), (0.99, [0.125, 0.25, 0.6])):
        rule, run = adaptive()
        rule.trust = torch.tensor([0.25, 0.25, 0.6], dtype=torch.float64)
        window(rule, run, factor * error, 1.0)
        assert rule.trust.tolist() == trust


def test_any_check_of_the_window_may_gain(adaptive):
    """What counts is the best one, not the one at the window's end."""
    rule, run = adaptive()
    rule.trust[:] = 0.25
    run.checks = [(2.0, 0.0)]
    rule.check(run)
    window(rule, run, -1.0)
    assert rule.trust.tolist() == [1.0, 0.5, 0.5]
    window(rule, run, 1.0)  # less than the best one of before
    assert rule.trust.tolist() == [0.5, 0.5, 0.5]


def test_failures_lead_to_the_next_level(adaptive):
    """Without gains trust is halved until another level is worth more: 20, 50, 170 s."""
    rule, run = adaptive()
    levels = []
    for _ in range(9):
        levels.append(rule.level)
        window(rule, run, -1.0)
    # Worth 1/20, then 1/40; 1/50 after the second failure; 1/80, 1/100, 1/170 ...
    assert levels == [0, 0, 1, 0, 1, 0, 2, 1, 0]
    assert rule.trust.tolist() == [2**-5, 2**-3, 0.5]


def test_gain_after_failures(adaptive):
    """What a level failed at is past once another one has changed the policy."""
    rule, run = adaptive()
    window(rule, run, -1.0)
    window(rule, run, -1.0)
    assert rule.level == 1 and rule.trust.tolist() == [0.25, 1.0, 1.0]
    window(rule, run, 1.0)
    assert rule.level == 0 and rule.trust.tolist() == [0.5, 1.0, 1.0]


def test_line_for_a_change_of_level(adaptive, capsys):
    """It has the correlation, the trust and the best check; a quiet rule says nothing."""
    rule, run = adaptive()
    rule.measurements = 1
    rule.rho = torch.tensor([0.2, 0.912, 1.0], dtype=torch.float64)
    window(rule, run, 1.5)
    assert capsys.readouterr().err.splitlines() == [
        "training on level 1: correlation with the finest not yet measured, trust 1; "
        "best check 0.0000",
        "training on level 2: correlation with the finest 0.91, trust 1; best check 1.5000",
    ]
    rule.args.quiet = True
    while rule.level == 1:
        window(rule, run, -1.0)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("norm_obs", [False, True])
def test_first_fit_of_the_values(adaptive, norm_obs):
    """With --norm-obs it waits for the statistics of observations, which the first iteration
    brings; it is made again where the run goes back."""
    rule, run = adaptive(norm_obs=norm_obs)
    fits = []
    for iteration in range(5):
        fits.append(rule.plan().refit)
        run.checks = [(0.0, 0.0)]
        iterate(rule, run)
        if iteration == 2:
            rule.go_back(run)
    assert fits == [not norm_obs, norm_obs, False, True, False]


def test_values_are_fitted_on_another_level(adaptive):
    """Once, in its first iteration."""
    rule, run = adaptive(levels=2)
    fits = []
    while rule.level == 0 or len(fits) < 2:
        run.checks = [(0.0, 0.0)]
        iterate(rule, run)
        if rule.level == 1:
            fits.append(rule.plan().refit)
    assert fits == [True, False]


@pytest.mark.parametrize("levels", [1, 2])
def test_one_level(adaptive, levels):
    """Of a single level there is nothing to choose."""
    rule, run = adaptive(levels=levels)
    chosen = set()
    for _ in range(3):
        chosen.add(rule.level)
        window(rule, run, -1.0)
    assert chosen == set(range(levels))


def test_when_a_measurement_is_due(adaptive, monkeypatch):
    """60 episodes on each level may take 5 % of the time since the last ones, which is at least
    half of the time before."""
    monkeypatch.setattr(ml.Adaptive, "MEASURE_SHARE", 0.05)
    rule, run = adaptive()
    needed = 60 * 2 * (1 + 4 + 16) / 4  # at 2 / 4 steps an episode: a check of four takes 32 s
    for measured_at, due in ((0, needed / 0.05), (1e4, 1e4 + needed / 0.05), (1e6, 1.5e6)):
        rule.measured_at = measured_at
        found = []
        for run.sims.costs.total in (due - 1, due + 1):
            found.append(ml.Adaptive.measurement_is_due(rule, run))
        assert found == [False, True]


@pytest.mark.parametrize(
    "seconds, share, gained, measured, due",
    [
        (631, 0.05, False, 0, True),
        (629, 0.04, False, 0, False),  # training has not taken as long as the measurement takes
        (1260, 0.101, False, 0, False),  # that is over 5 % of a run of 12,475 seconds
        (1260, 0.099, False, 0, True),
        (1260, 0.099, True, 0, False),
        (1260, 0.099, False, 1, False),
    ],
)
def test_when_an_early_measurement_is_due(
    adaptive, monkeypatch, seconds, share, gained, measured, due
):
    """60 episodes on each level take 630 seconds, see the test above."""
    monkeypatch.setattr(ml.Adaptive, "MEASURE_SHARE", 0.05)
    rule, run = adaptive()
    run.sims.costs.total = seconds
    run.share = share
    rule.has_gained = gained
    rule.measurements = measured
    assert ml.Adaptive.early_measurement_is_due(rule, run) == due


def test_first_failure_is_judged_by_the_measured_rho(adaptive, monkeypatch):
    """The level's own returns rise, but it turns out not to agree with the finest one."""
    rule, run = adaptive()

    def measure(run):
        rule.rho[0] = 0.3

    monkeypatch.setattr(rule, "early_measurement_is_due", lambda run: True)
    monkeypatch.setattr(rule, "measure", measure)
    with torch.no_grad():
        run.model.weight.fill_(7.0)
    own = np.arange(8.0) + 0.01 * (-1) ** np.arange(8)
    assert window(rule, run, -1.0, own_returns=own.tolist()) == 8
    assert float(run.model.weight.detach()) != 7.0  # back to the best parameters
    assert rule.level == 1


def test_a_gain_makes_an_early_measurement_needless(adaptive):
    """A window that gains says that the level agrees well enough."""
    rule, run = adaptive()
    window(rule, run, -1.0)
    assert not rule.has_gained
    window(rule, run, 1.0)
    assert rule.has_gained


@pytest.mark.parametrize("rho", [1.0, 0.89])
@pytest.mark.parametrize(
    "own_returns, rises", [([0, 1, 2, 3], True), ([3, 2, 1, 0], False), ([0, 9, 1, 8], False)]
)
def test_hidden_progress(adaptive, rho, own_returns, rises):
    """Worse parameters are left for the best, but not where the level's own return rises and the
    level agrees with the finest one."""
    rule, run = adaptive()
    rule.has_gained = True
    with torch.no_grad():
        run.model.weight.fill_(7.0)
    rule.rho[0] = rho
    own = [value + 0.01 * (-1) ** i for i, value in enumerate(np.repeat(own_returns, 2))]
    assert window(rule, run, -1.0, own_returns=own) == 8
    stays = rises and rho == 1.0
    assert rule.plan().refit is not stays
    assert (float(run.model.weight.detach()) == 7.0) == stays


@pytest.mark.parametrize("rho, stays", [(None, True), (0.71, True), (0.69, False)])
def test_first_failures_go_back_only_if_the_level_misleads(adaptive, monkeypatch, rho, stays):
    """The best parameters are still the first ones. Without a measurement nothing is gone back."""
    rule, run = adaptive()

    def measure(run):
        rule.rho[0] = rho

    monkeypatch.setattr(rule, "early_measurement_is_due", lambda run: rho is not None)
    monkeypatch.setattr(rule, "measure", measure)
    with torch.no_grad():
        run.model.weight.fill_(7.0)
    assert window(rule, run, -1.0) == 8
    assert (float(run.model.weight.detach()) == 7.0) == stays


def test_slope_over_two_errors(adaptive):
    """By the textbook's formula: the error is √(RSS / (n − 2) / Σ (x − x̄)²)."""
    rule, _ = adaptive()
    generator = np.random.default_rng(0)
    x = np.arange(12) - 5.5
    found = []
    for slope in (0.0, 0.1, 0.2, 0.3):
        y = slope * x + generator.normal(size=12)
        rule.own_returns = y.tolist()
        fitted = (x @ y) / (x @ x)
        residuals = y - y.mean() - fitted * x
        expected = fitted > 2 * (residuals @ residuals / 10 / (x @ x)) ** 0.5
        assert rule.progress_is_hidden() == expected
        found.append(expected)
    assert set(found) == {True, False}
    rule.own_returns = [0.0, 1.0, 2.0]  # three points tell little
    assert not rule.progress_is_hidden()


def test_best_parameters_are_kept_and_restored(adaptive):
    """The best check's weights and Adam's state are kept; a failed window goes back to them."""
    rule, run = adaptive()
    with torch.no_grad():
        run.model.weight.fill_(7.0)
    window(rule, run, 1.0)
    best = run.model.weight.clone()
    with torch.no_grad():
        run.model.weight.fill_(8.0)
    window(rule, run, 0.5)
    assert torch.equal(run.model.weight, best) and torch.equal(rule.best["weight"], best)
    assert rule.best_returns.mean() == 1.0


def test_adam_of_the_best_check_stays_as_it_is(adaptive):
    """Training goes on from Adam's state of then, and may come back to it a second time."""
    rule, run = adaptive()
    for _ in range(3):
        run.model(torch.ones(1)).backward()
        run.optimizer.step()
        rule.best_optimizer = (
            rule.best_optimizer if rule.best_optimizer["state"] else run.optimizer.state_dict()
        )
        rule.go_back(run)
        assert run.optimizer.state_dict()["state"][0]["step"] == 1
    assert rule.best_optimizer["state"][0]["step"] == 1


def test_checks_within_a_window(adaptive):
    """There is one whenever training took six times what one takes, and at the run's end, where
    no window begins any more."""
    rule, run = adaptive()
    rule.window_end = 1e9
    run.checks = [(0.0, 0.0)] * 99
    due = [i for i in range(1, 41) if "check_return" in iterate(rule, run)]
    assert due == [10, 20, 30, 40]  # 6 · 32 s ≤ 10 · 20 s
    assert run.seconds() == 40 * 20 + 5 * 32

    rule.window_end = 0.0
    run.share = 1.0
    assert "check_return" in iterate(rule, run)
    assert rule.window_end == 0.0 and rule.trust.tolist() == [1, 1, 1]


# Correlations ------------------------------------------------------------------------------------


def test_correlations_by_hand():
    """Within a start: what differs between starts does not count."""
    starts = np.array([0, 0, 0, 1, 1])
    finest = np.array([1.0, 2.0, 3.0, 10.0, 12.0])
    opposite = -finest
    shifted = 5 + 2 * finest + np.array([0, 0, 0, 70, 70])
    half = np.array([1.0, 1.0, 1.0, 0.0, 2.0])
    constant = np.full(5, 0.1)
    found = ml.correlations(np.stack([opposite, shifted, half, constant, finest]), starts)
    # Within starts the finest is −1, 0, 1, −1, 1 and half is 0, 0, 0, −1, 1.
    assert found == pytest.approx([-1, 1, 2 / (2 * 4) ** 0.5, 0, 1])
    assert (ml.correlations(np.stack([finest, constant]), starts) == 0).all()


class Line(gym.Env):
    """Three steps from a random start, or from its own on level 1; rewards as `reward` says."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-10, 10, (2,), np.float32)

    def __init__(self, level, reward, unlike=False):
        self.level = level
        self.reward = reward
        self.unlike = unlike

    def observe(self):
        return np.array([self.t, self.start], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.np_random.random(self.level if self.unlike else 0)
        self.t = 0
        self.start = self.np_random.normal()
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        reward = float(self.reward(self.level, action, self.start))
        return self.observe(), reward, self.t >= 3, False, {}


class Mapped(Line):
    """The same, which can take over another level's state."""

    def psi(self):
        return self.observe()

    def map_from(self, other):
        self.t = other.t
        self.start = other.start


class Chance(Line):
    """The same, whose starts do not go by the seed."""

    def reset(self, *, seed=None, options=None):
        return super().reset(options=options)


LINE = (
    "--levels 1 2 3 --num-envs 16 --num-minibatches 2 --hidden 8 --num-workers 0 --num-steps 3 "
    "--init-log-std -1 --level-costs 1e-3 4e-3 1e-2 4e-1 --check-episodes 4 --eval-every 0 --quiet"
).split()
AGREES = lambda level, action, start: 5 * start + action[0]  # noqa: E731
BLIND = lambda level, action, start: 5 * start + action[int(level == 3)]  # noqa: E731
HALF = lambda level, action, start: start + action[0] + (level < 3) * action[1]  # noqa: E731


def simulations(monkeypatch, kind, reward, **options):
    """Return a model and its Simulations of Lines."""
    name = install(monkeypatch, lambda level: kind(level, reward, **options))
    args = ml.parse_args(["--env", name, *LINE])
    model = ml.make_model(args)
    return model, ml.Simulations(args, model)


def measured(monkeypatch, kind, reward, **options):
    """Return ρ of Lines that are played side by side."""
    model, sims = simulations(monkeypatch, kind, reward, **options)
    with ml.closing(sims):
        returns, starts = ml.play_alike(model, sims, 1)
    assert returns.shape == (3, 64) and len(np.unique(starts)) == 8
    return ml.correlations(returns, starts)


@pytest.mark.parametrize("kind", [Line, Mapped])
def test_levels_are_played_from_the_same_starts_with_the_same_noise(monkeypatch, kind, capsys):
    """Levels that are the same return the same; blind ones have nothing to do with the finest."""
    assert measured(monkeypatch, kind, AGREES) == pytest.approx([1, 1, 1])
    rho = measured(monkeypatch, kind, BLIND)
    assert abs(rho[:2]).max() < 0.4  # of 56 free returns: two errors are .27
    assert measured(monkeypatch, kind, HALF)[:2] == pytest.approx([0.5**0.5] * 2, abs=0.2)
    assert capsys.readouterr().err == ""


def test_starts_that_differ_between_levels(monkeypatch, capsys):
    """Without map_from a seed must be one start on all levels: a line says if it is none. With it
    the finest's is taken."""
    told = "levels start unlike from the same seed, so correlations mean little\n"
    measured(monkeypatch, Line, AGREES, unlike=True)
    assert capsys.readouterr().err == told
    measured(monkeypatch, Chance, AGREES)
    assert capsys.readouterr().err == told
    assert measured(monkeypatch, Mapped, AGREES, unlike=True) == pytest.approx([1, 1, 1])
    assert capsys.readouterr().err == ""


def test_start_agreement():
    """Levels vary with the finest one if it varies; other units or another mean do no harm."""
    generator = np.random.default_rng(0)
    finest, other = generator.normal(size=(2, 20, 3)).astype(np.float32)

    def agreement(*levels):
        return ml.start_agreement(np.stack(levels))

    assert agreement(finest, 3 * finest + 5, finest) == pytest.approx([1, 1, 1])
    both = np.corrcoef((finest - finest.mean(0)).flat, (other - other.mean(0)).flat)[0, 1]
    assert agreement(finest, other, finest) == pytest.approx([1, both, 1]) and abs(both) < 0.5
    assert agreement(np.zeros_like(finest), finest) == pytest.approx([0, 1])
    # What float32 rounds off the mean of equal numbers is no difference between them.
    for value in np.linspace(0.1, 2, 50, dtype=np.float32):
        same = np.full((20, 3), value)
        assert list(agreement(1.01 * same, -same, same)) == [1, 1, 1]
        assert list(agreement(finest, same)) == [1, 1]


def trained(monkeypatch, tmp_path, kind, reward, steps, **options):
    """Return a run on Lines, as long as so many steps of the finest level take."""
    name = install(monkeypatch, lambda level: kind(level, reward, **options))
    words = ["--env", name, *LINE, "--finest-steps", str(steps), "--log-dir", str(tmp_path)]
    return ml.train(ml.parse_args(words))


def levels_of(run):
    """Return the levels of a run's iterations."""
    return [row["level"] for row in run.history[1:]]


def test_blind_levels_are_left(monkeypatch, tmp_path):
    """Once ρ is measured the run trains where it learns what the finest level wants."""
    run = trained(monkeypatch, tmp_path, Line, BLIND, 2500)
    assert run.rule.measurements > 1 and max(run.rule.rho[:2]) < 0.5
    levels = levels_of(run)
    assert levels[0] == 1 and levels[-1] == 3
    assert run.history[-1]["levels/rho_1"] == run.rule.rho[0]
    assert "levels/rho_1" not in run.history[1] and run.history[1]["levels/trust_1"] == 1


def test_constant_returns(monkeypatch, tmp_path):
    """Where the policy changes nothing on the finest level there is nothing to correlate."""
    still = lambda level, action, start: (level < 3) * action[0]  # noqa: E731
    run = trained(monkeypatch, tmp_path, Line, still, 1600)
    assert run.rule.measurements > 0 and run.rule.rho.tolist() == [1.0] * 3
    assert set(levels_of(run)) == {1, 2, 3}  # no gains anywhere: all have their turn
    still = lambda level, action, start: (level > 1) * action[0]  # noqa: E731
    run = trained(monkeypatch, tmp_path, Line, still, 1000)
    assert run.rule.rho == pytest.approx([0.03, 1, 1])


def test_diverging_level(monkeypatch, tmp_path):
    """Large returns of a few episodes make ρ small."""

    def diverges(level, action, start):
        return action[0] + (level == 1) * 1e6 * (action[1] > 0.5)

    run = trained(monkeypatch, tmp_path, Line, diverges, 1000)
    assert run.rule.rho[0] < 0.5 < run.rule.rho[1]


def test_levels_that_agree(monkeypatch, tmp_path):
    """The finest level is played in checks and measurements only, as long as a cheap one gains;
    all measurements take no more of the time than they may."""
    run = trained(monkeypatch, tmp_path, Line, AGREES, 2500)
    assert run.rule.rho == pytest.approx([1, 1, 1])
    levels = levels_of(run)
    assert levels.count(1) > 0.8 * len(levels)
    seconds = run.rule.measurements * 64 * 3 * (1e-3 + 4e-3 + 1e-2)
    assert run.rule.measurements > 1
    assert 0.1 < seconds / run.seconds() < 0.5


def test_training_goes_on_from_new_starts(monkeypatch):
    """A measurement leaves no two actors with the same episodes."""
    model, sims = simulations(monkeypatch, Line, AGREES)
    rule = ml.Adaptive(sims.args)
    run = types.SimpleNamespace(args=sims.args, model=model, sims=sims)
    run.seconds = lambda: 1.0
    run.start_games = lambda: ml.Run.start_games(run)
    starts = []
    with ml.closing(sims):
        for run.iteration in (0, 9):
            rule.measure(run)
            for level in range(3):
                starts.append(sims.pool.player.rows[f"own {level}"]["obs"][-1, :, 1].copy())
    assert len(np.unique(np.stack(starts))) == 2 * 3 * 16


# Values on a new level ----------------------------------------------------------------------------


def test_refit_values_is_ridge_regression():
    """The value function's last layer is NumPy's least-squares fit, with a row √(λ M) of a target
    0 for each weight; Â = R − V then. Features that tell nothing do not get large weights."""
    args = ml.make_parser().parse_args(["--hidden", "6", "5"])
    model = ml.Model(3, gym.spaces.Box(-1, 1, (2,)), args)
    generator = torch.Generator().manual_seed(0)
    obs = 0.1 * torch.randn(50, 3, generator=generator)
    batch = {"obs": obs, "returns": obs[:, 0] * 3 + 5 + torch.randn(50, generator=generator)}
    policy = model.head.output.weight.clone()
    features = np.c_[model.critic(obs).detach().numpy(), np.ones(50)]
    returns = batch["returns"].numpy()
    unpenalised = np.linalg.lstsq(features, returns, rcond=None)[0]
    penalised = np.r_[features, (1e-3 * 50) ** 0.5 * np.eye(6)], np.r_[returns, np.zeros(6)]
    weights = np.linalg.lstsq(*penalised, rcond=None)[0]
    ml.refit_values(model, batch)
    np.testing.assert_allclose(batch["values"], features @ weights, rtol=1e-4)
    torch.testing.assert_close(batch["advantages"], batch["returns"] - batch["values"])
    torch.testing.assert_close(model(obs)[1], batch["values"])
    assert torch.equal(model.head.output.weight, policy)
    assert np.linalg.norm(unpenalised[:-1]) > 5 * model.value.weight.norm()


def test_refit_advantages_are_in_the_rewards_unit():
    """Also where values are normalised ones."""
    args = ml.make_parser().parse_args(["--hidden", "6", "--norm-value"])
    model = ml.Model(3, gym.spaces.Box(-1, 1, (2,)), args)
    returns = 100 + 50 * torch.randn(40)
    batch = {"obs": torch.randn(40, 3), "returns": returns, "values": torch.zeros(40)}
    ml.normalise_values(model, batch, returns)
    ml.refit_values(model, batch)
    values = model.value_norm.mean + model.value_norm.std * batch["values"]
    torch.testing.assert_close(batch["advantages"], returns - values, atol=1e-3, rtol=1e-4)
    assert batch["advantages"].std() > 10


# Runs ---------------------------------------------------------------------------------------------

STOPS = (3, 14, 40)  # before these iterations the games of the run start anew


def rows(run_dir):
    """Return the rows of progress.csv."""
    with (run_dir / "progress.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train on three small reservoirs, as long as 2,400 steps of the finest level take."""
    goes_on = ml.Run.goes_on

    def start_anew(run):
        if run.iteration in STOPS:
            run.start_games()
        return goes_on(run)

    words = [*SMALL, "--finest-steps", "2400", "--log-dir", str(tmp_path_factory.mktemp("runs"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ml.Run, "goes_on", start_anew)
        return ml.train(ml.parse_args(words))


# Levels are those that commit 625529d, a rewrite before, chose with the same seeds of the games.
# So are checks until the first failure, after which training does not go back any more.
RECORDED_LEVELS = [1] + 7 * [1] + 8 * [2] + 8 * [3]
RECORDED_CHECKS = {0: 0.562733, 6: 0.554699, 7: 0.554844, 13: 0.557923, 15: 0.559877}
RECORDED_CHECKS |= {19: 0.561835, 23: 0.564678}


def test_recorded_choices(tmp_path):
    """With given costs the rule has chosen these levels, by checks that returned so much."""
    words = [*SMALL, "--num-iterations", "24", "--log-dir", str(tmp_path)]
    history = ml.train(ml.parse_args(words)).history[:24]
    assert [row["level"] for row in history] == RECORDED_LEVELS
    checks = {row["iteration"]: row["check_return"] for row in history if "check_return" in row}
    assert checks == pytest.approx(RECORDED_CHECKS, abs=2e-5)


def test_run_reports_level_and_checks(run):
    """Level and check are in progress.csv; the run changes its level; the length is its time."""
    table = rows(run.run_dir)
    levels = [int(row["level"]) for row in table]
    assert levels[0] == 1 and set(levels) > {1}
    assert float(table[0]["check_return"]) > 0.4 and float(table[-1]["check_return"]) > 0.4
    seconds = [float(row["seconds"]) for row in table]
    assert seconds[-2] < 2400 * 16 <= seconds[-1] and seconds == sorted(seconds)
    assert {float(row["learning_rate"]) for row in table[1:]} == {run.args.learning_rate}


def test_run_is_in_tensorboard(run):
    """So are the run's clock and what is known of a level."""
    events = EventAccumulator(str(run.run_dir)).Reload()
    for tag, name in {"charts/seconds": "seconds", "levels/trust_2": "levels/trust_2"}.items():
        shown = {event.step: event.value for event in events.Scalars(tag)}
        table = {int(row["global_step"]): float(row[name]) for row in rows(run.run_dir)}
        assert shown == pytest.approx(table)


def test_every_step_is_charged_by_its_level(run):
    """An iteration is charged 20 steps on its level and an update, a check 4 · 5 steps of the
    finest, a measurement 64 · 5 steps of each level."""
    seconds = 0.0
    measurements = 0
    measurement = 64 * 5 * (1 + 4 + 16)
    for row in run.history:
        if row["iteration"]:
            seconds += 20 * [1, 4, 16][row["level"] - 1] + 300
        if "check_return" in row:
            seconds += 4 * 5 * 16
        if row["seconds"] > seconds + 0.9 * measurement:
            seconds += measurement
            measurements += 1
        assert row["seconds"] == pytest.approx(seconds)
    assert measurements == run.rule.measurements > 1


def test_unchanged_result_is_not_evaluated_again(tmp_path, monkeypatch):
    """As long as no check is better, the return of the evaluation before is logged again."""
    calls = []
    evaluate = ml.evaluate
    monkeypatch.setattr(ml, "evaluate", lambda *a: calls.append(a) or evaluate(*a))
    words = [*SMALL, "--num-iterations", "25", "--eval-every", "1", "--log-dir", str(tmp_path)]
    table = rows(ml.train(ml.parse_args(words)).run_dir)
    checks = np.array([float(row["check_return"] or -1) for row in table])
    best = np.maximum.accumulate(checks)
    better = [True, *(best[1:] > best[:-1])]
    assert len(calls) == sum(better) > 1
    returns = [row["eval_return"] for row in table]
    assert all(returns) and len(set(returns)) == sum(better)
    assert [True, *(a != b for a, b in zip(returns[1:], returns))] == better


def test_length_of_no_more_than_a_check(tmp_path):
    """Such a run learns nothing."""
    words = [*SMALL, "--finest-steps", "1", "--log-dir", str(tmp_path)]
    run = ml.train(ml.parse_args(words))
    assert run.iteration == 0
    assert run.history[0].keys() > {"check_return", "eval_return"}


def test_learning_rate_falls_with_the_time(tmp_path, monkeypatch):
    """--anneal-lr: each iteration's rate is by the share of the run's length before it, also where
    a window has failed and Adam's state is that of the best check."""
    rates = []
    update = ml.update

    def noted(model, optimizer, *rest):
        rates.append(optimizer.param_groups[0]["lr"])
        return update(model, optimizer, *rest)

    monkeypatch.setattr(ml, "update", noted)
    words = [*SMALL, "--finest-steps", "300", "--anneal-lr", "--log-dir", str(tmp_path)]
    run = ml.train(ml.parse_args(words))
    assert min(run.rule.trust) < 1
    before = [row["seconds"] / (300 * 16) for row in run.history[:-1]]  # with the first check's
    assert rates == pytest.approx([1e-4 * (1 - share) for share in before])


def test_best_check_is_the_runs_result(run):
    """`model` in the checkpoint, --eval and the last evaluation are the best check's parameters;
    --eval plays another level if it is told to."""
    state = ml.read_checkpoint(run.run_dir)
    best = max(float(row["check_return"]) for row in rows(run.run_dir) if row["check_return"])
    assert state["rule"]["best_returns"].mean() == pytest.approx(best)
    for name, value in state["model"].items():
        assert torch.equal(value, state["rule"]["best"][name])
    for name, value in run.model.state_dict().items():
        assert torch.equal(state["current"][name], value)
    returns = ml.evaluate_run(ml.parse_args(["--eval", str(run.run_dir)]))
    assert float(rows(run.run_dir)[-1]["eval_return"]) == pytest.approx(returns.mean())
    others = ml.evaluate_run(ml.parse_args(["--eval", str(run.run_dir), "--levels", "1"]))
    assert (returns != others).all()


def test_checks_have_fields_of_their_own(run):
    """A third set of fields: neither training's nor evaluation's; each field once."""
    player = ml.Player(run.args, run.model)
    player.start(ml.CHECK_SEED + np.arange(4), "check")
    games = [game.env for game in player.games["check"]]
    assert [env.field for env in games] == [0, 1, 2, 3] and games[0].grid.shape == (32, 32)
    for name in ("own 2", "evaluation"):
        grid = player.games[name][0].env.grid
        assert grid.shape == (32, 32)
        assert not any(np.array_equal(a, b) for a in games[0].grid.perm for b in grid.perm)
    assert len(np.unique(games[0].grid.perm.reshape(16, -1), axis=0)) == 16


@pytest.mark.parametrize("count, shares", [(2, [2, 2]), (3, [2, 1, 1]), (5, [1, 1, 1, 1, 0])])
def test_processes_share_the_games_of_a_check(run, count, shares):
    """Each has other fields, and all together play the run's checks; one may have none."""
    seeds = ml.CHECK_SEED + np.arange(4)
    players = [ml.Player(run.args, run.model, index, count) for index in range(count)]
    parts = [player.play_episodes(["check"], seeds) for player in players]
    assert [len(returns[0]) for returns, *_ in parts] == shares
    assert sum(steps[0] for _, _, steps, _ in parts) == 4 * 5
    (whole,), *_ = ml.Player(run.args, run.model).play_episodes(["check"], seeds)
    assert np.concatenate([returns[0] for returns, *_ in parts]) == pytest.approx(whole)
    assert len(np.unique(whole)) == 4


def without_times(history):
    """Return the rows of a history without what takes another time in each run."""
    rows = []
    for row in history:
        rows.append({name: row[name] for name in row if name not in ("wall_seconds", "sps")})
    return rows


def test_resume_in_the_middle(run, tmp_path, monkeypatch):
    """Stopped three times and resumed, a run is the one whose games started anew there, bit for
    bit; ρ is measured before the last stop, and after it."""
    goes_on = ml.Run.goes_on
    words = [*SMALL, "--finest-steps", "2400", "--run-name", "parts", "--log-dir", str(tmp_path)]
    measurements = []
    for stop in (*STOPS, 1000):

        def goes_on_until(run, stop=stop):
            return run.iteration < stop and goes_on(run)

        monkeypatch.setattr(ml.Run, "goes_on", goes_on_until)
        part = ml.train(ml.parse_args(words))
        words = ["--resume", str(tmp_path / "parts"), "--quiet"]
        measurements.append(part.rule.measurements)
        if stop < 1000:
            assert part.iteration == stop
    assert 0 < measurements[-2] < measurements[-1]

    for name, value in run.model.state_dict().items():
        assert torch.equal(part.model.state_dict()[name], value), name
    for name, value in run.rule.best.items():
        assert torch.equal(part.rule.best[name], value), name
    assert torch.equal(part.rule.best_returns, run.rule.best_returns)
    assert torch.equal(part.generator.get_state(), run.generator.get_state())
    expected = run.optimizer.state_dict()["state"]
    for i, state in part.optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, expected[i][name]) for name, value in state.items())
    for row, expected in zip(without_times(part.history), without_times(run.history), strict=True):
        assert row == pytest.approx(expected, nan_ok=True)
    assert without_times(rows(part.run_dir)) == without_times(rows(run.run_dir))


def test_a_longer_run(run, tmp_path):
    """A run that is over goes on with another length, in the same unit or another one."""
    words = ["--resume", str(shutil.copytree(run.run_dir, tmp_path / "copy")), "--quiet"]
    longer = ml.train(ml.parse_args([*words, "--finest-steps", "2800"]))
    assert longer.seconds() >= 2800 * 16 and longer.iteration > run.iteration
    longest = ml.train(ml.parse_args([*words, "--num-iterations", str(longer.iteration + 3)]))
    assert longest.iteration == longer.iteration + 3


def test_game_that_fails_in_a_check(tmp_path, monkeypatch):
    """What was learned is saved. The iteration, which is not logged, is done again."""
    real = ml.Adaptive.check
    weights = []

    def check(rule, run):
        if run.iteration == 7:
            weights.append(run.model.value.weight.clone())
            raise ml.GameError("broken on purpose")
        return real(rule, run)

    words = [*SMALL, "--num-iterations", "12", "--log-dir", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(ml.Adaptive, "check", check)
        with pytest.raises(ml.GameError, match="broken on purpose"):
            ml.train(ml.parse_args(words))
    (run_dir,) = tmp_path.iterdir()
    state = ml.read_checkpoint(run_dir)
    assert state["counters"]["iteration"] == 6
    assert torch.equal(state["current"]["value.weight"], weights[0])
    resumed = ml.train(ml.parse_args(["--resume", str(run_dir), "--quiet"]))
    assert [row["iteration"] for row in resumed.history] == list(range(13))
    assert resumed.history[-1].keys() > {"check_return", "eval_return"}


def test_check_that_does_not_end(tmp_path, monkeypatch):
    """An episode of too many steps is an error that says which game it is."""
    monkeypatch.setattr(ml, "MOST_STEPS", 2)
    words = [*SMALL, "--num-iterations", "1", "--log-dir", str(tmp_path)]
    place = r"ResSim-v1 level 3 \(seed 20000, episode 1, after 2 steps\)"
    with pytest.raises(ml.GameError, match=f"{place}: an episode takes over 2 steps"):
        ml.train(ml.parse_args(words))


def test_episodic_return_is_of_one_level(tmp_path, monkeypatch):
    """Episodes of the level that a run has left do not count."""
    step = envs.Levels.step
    monkeypatch.setattr(
        envs.Levels,
        "step",
        lambda env, action: (*step(env, action)[:1], env.level, False, True, {}),
    )
    words = (
        "--env envs:make --levels 1 2 --level-costs 1 2 1 --num-envs 2 --num-minibatches 2 "
        "--hidden 8 --num-workers 0 --eval-every 0 --check-episodes 2 --quiet --num-steps 4 "
        "--num-iterations 12"
    )
    history = ml.train(ml.parse_args([*words.split(), "--log-dir", str(tmp_path)])).history[1:]
    assert {row["level"] for row in history} == {1, 2}
    for row in history:
        assert row["episodic_return"] == row["level"] == row["iteration_return"]


def test_another_rule_can_be_given(tmp_path):
    """`train` takes any object with plan, begin and review."""

    class UpAndDown(ml.Together):
        count = 0

        def plan(self):
            self.count += 1
            return ml.Plan([self.count % 3])

    args = ml.parse_args([*SMALL, "--num-iterations", "6", "--log-dir", str(tmp_path)])
    run = ml.train(args, UpAndDown(args))
    assert run.rule.count == 6
    assert run.seconds() == pytest.approx(2 * 20 * (1 + 4 + 16) + 6 * 300)


def rule_run(monkeypatch, tmp_path, *words):
    """Return the rows of a run of tests/benchmarks/rules.py."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "benchmarks")
    import rules

    monkeypatch.setattr(rules.Multigrid, "EVALUATIONS", 2)
    monkeypatch.setattr(rules.Multigrid, "TOLERANCE", 1.0)
    monkeypatch.setattr(ml, "make_teams", ml.make_teams)  # what it replaces comes back
    monkeypatch.setattr(sys, "argv", ["rules", *words, "--log-dir", str(tmp_path)])
    rules.main()
    (run_dir,) = tmp_path.iterdir()
    return rows(run_dir)


def test_multigrid_rule(tmp_path, monkeypatch):
    """It goes on to the next level once two evaluations are alike, and is charged for them."""
    table = rule_run(monkeypatch, tmp_path, "multigrid", *SMALL, "--num-iterations", "6")
    assert [row["level"] for row in table] == ["1", "1", "1", "2", "2", "3", "3"]
    seconds = [20 * 2 * cost + 300 for cost in (1, 1, 4, 4, 16, 16)]  # as many steps in both
    assert [float(row["seconds"]) for row in table[1:]] == np.cumsum(seconds).tolist()
    assert len({row["check_return"] for row in table}) == 7


def record_fits(monkeypatch):
    """Return a list that gets "fit" for each fit of V, and "update" for each update."""
    events = []

    def recorded(name, function):
        def call(*args):
            events.append(name)
            return function(*args)

        return call

    monkeypatch.setattr(ml, "refit_values", recorded("fit", ml.refit_values))
    monkeypatch.setattr(ml, "update", recorded("update", ml.update))
    return events


@pytest.mark.parametrize("options, first", [([], 0), (["--norm-obs"], 1)])
def test_multigrid_rule_with_fits(tmp_path, monkeypatch, options, first):
    """Levels and clock are those of the rule without fits; V is fitted at first and on new levels.

    With --norm-obs the first fit comes one iteration later.
    """
    events = record_fits(monkeypatch)
    words = [*SMALL, *options, "--num-iterations", "6"]
    table = rule_run(monkeypatch, tmp_path, "multigrid-fit", *words)
    assert [row["level"] for row in table] == ["1", "1", "1", "2", "2", "3", "3"]
    assert float(table[-1]["seconds"]) == 20 * 2 * (1 + 1 + 4 + 4 + 16 + 16) + 6 * 300
    expected = ["update"] * 6
    for iteration in (4, 2, first):
        expected.insert(iteration, "fit")
    assert events == expected


@pytest.mark.parametrize("options, first", [([], 0), (["--norm-obs"], 1)])
def test_halves_rule(tmp_path, monkeypatch, options, first):
    """Half of the run is on the coarsest level, half on the finest; checks are charged."""
    events = record_fits(monkeypatch)
    words = [*SMALL, *options, "--num-iterations", "8"]
    table = rule_run(monkeypatch, tmp_path, "halves", *words)
    assert [row["level"] for row in table] == ["1"] * 5 + ["3"] * 4  # with that before training
    checks = [row for row in table if row["check_return"]]
    assert len(checks) > 2 and checks[0] is table[0] and checks[-1] is table[-1]
    seconds = 4 * (20 * 1 + 300) + 4 * (20 * 16 + 300) + len(checks) * float(table[0]["seconds"])
    assert float(table[-1]["seconds"]) == pytest.approx(seconds)
    assert not [name for name in table[0] if "rho" in name]
    expected = ["update"] * 8
    for iteration in (4, first):
        expected.insert(iteration, "fit")
    assert events == expected


@pytest.mark.parametrize("levels, costs", [("1 3", "1 16 300"), ("3", "16 300")])
def test_single_rule(tmp_path, monkeypatch, levels, costs):
    """It trains on the first level, with checks on the last one that cost nothing."""
    words = ["--levels", *levels.split(), "--level-costs", *costs.split(), "--eval-every", "2"]
    table = rule_run(monkeypatch, tmp_path, "single", *SMALL, *words, "--num-iterations", "4")
    assert {row["level"] for row in table} == {levels[0]}
    assert [bool(row["check_return"]) for row in table] == [True, False, True, False, True]
    assert float(table[0]["check_return"]) == pytest.approx(RECORDED_CHECKS[0], abs=2e-5)
    cost = float(costs.split()[0])
    assert float(table[-1]["seconds"]) == 4 * (20 * cost + 300)


@pytest.mark.parametrize("options, first", [([], 0), (["--norm-obs"], 1)])
def test_single_rule_with_a_fit(tmp_path, monkeypatch, options, first):
    """V is fitted once, before the first update, or the second one; the clock is the same."""
    events = record_fits(monkeypatch)
    words = [*SMALL, *options, "--levels", "3", "--level-costs", "16", "300"]
    table = rule_run(monkeypatch, tmp_path, "single-fit", *words, "--num-iterations", "4")
    assert float(table[-1]["seconds"]) == 4 * (20 * 16 + 300)
    expected = ["update"] * 4
    expected.insert(first, "fit")
    assert events == expected


# Costs --------------------------------------------------------------------------------------------


def costs(given=None, num_steps=(1, 1, 1)):
    """Return the Costs of three levels with ten actors."""
    args = types.SimpleNamespace(num_envs=10, num_steps=list(num_steps), levels=[1, 2, 3])
    args.level_costs = given
    return ml.Costs(args)


def test_seconds_of_unequal_steps():
    """An iteration with fewer steps has fewer rows to learn from, too."""
    for num_steps, expected in (([1, 1, 1], [20, 50, 170]), ([4, 2, 1], [50, 85, 162.5])):
        given = costs(COSTS, num_steps)
        assert [10 * T * given.row(level) for level, T in enumerate(num_steps)] == expected


def test_costs_are_means_of_what_was_seen(monkeypatch):
    """The clock goes by what steps and updates took; without seconds steps are charged at the
    mean; an update takes as long as that of the slowest rank."""
    seen = costs()
    seen.count_steps(0, 10, 30.0)
    assert (seen.step(0), seen.row(0), seen.total) == (3, 3, 30)
    seen.count_steps(0, 10, 10.0)
    seen.count_steps(0, 5)
    assert (seen.step(0), seen.total) == (2, 50)
    seen.count_update(100, 20.0)
    monkeypatch.setattr(ml, "gathered_objects", lambda seconds: [seconds, 3 * seconds])
    seen.count_update(100, 20.0)
    assert (seen.row(0), seen.total) == (2 + 80 / 200, 130)


def test_given_costs_are_the_clock():
    """Whatever steps and updates took."""
    given = costs(COSTS)
    given.count_steps(1, 5, 1e9)
    given.count_update(10, 1e9)
    assert (given.step(1), given.row(1), given.total) == (4, 5, 5 * 4 + 10)


def test_seconds_are_spread_over_the_processes():
    """What they take at the same time counts once. Games of checks, which do things of their own
    once, are charged at what steps of training take."""
    rows = {"rewards": np.zeros((5, 2), np.float32)}
    answers = {"play": [([rows], [seconds]) for seconds in (6.0, 12.0, 18.0)]}
    answers["play_episodes"] = [
        (np.zeros((2, 3)), np.zeros((2, 3, 1)), [7, 8], [seconds, 100.0]) for seconds in (4.0, 8.0)
    ]
    pool = types.SimpleNamespace(load=lambda model: None)
    pool.call = lambda command, *_: answers[command]
    teams = {"own 0": ml.Team(0, 6, 5), "check": ml.Team(0, 6, 1, {"validation": True})}
    sims = types.SimpleNamespace(pool=pool, costs=costs(), teams=teams)
    (buffer,) = ml.Simulations.play(sims, None, ["own 0"], torch.zeros(5, 6, 1))
    assert buffer["rewards"].shape == (5, 6)
    assert (sims.costs.total, sims.costs.step(0)) == (12, 12 / 30)
    ml.Simulations.play_episodes(sims, None, ["own 0", "check"], np.zeros(6))
    cost = (12 + 6) / (30 + 14)
    assert sims.costs.step(0) == pytest.approx(cost)
    assert sims.costs.total == pytest.approx(12 + 6 + 16 * cost)


class Solver(gym.Env):
    """Resets take 7 seconds, first steps 5, others 1, on level 2 ten times as long; 4 steps."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    clock = 0.0

    def __init__(self, level):
        self.factor = 10 ** (level - 1)

    def take(self, seconds):
        Solver.clock += seconds * self.factor

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.take(7)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.take(1 if self.t else 5)
        self.t += 1
        return np.zeros(1, np.float32), float(action[0]), self.t == 4, False, {}


@pytest.fixture
def solver(monkeypatch):
    """Return the options of runs on Solvers, by whose clock the scripts go."""
    monkeypatch.setattr(ml.time, "perf_counter", lambda: Solver.clock)
    options = "--num-envs 4 --num-minibatches 2 --num-steps 8 --hidden 8 --num-workers 0 "
    options += "--check-episodes 4 --eval-every 0 --quiet"
    return ["--env", install(monkeypatch, Solver), *options.split()]


@pytest.mark.parametrize("num_steps", ["2", "50"])
def test_costs_are_those_of_whole_episodes(solver, num_steps):
    """A step's cost includes its share of reset and first step, on all levels alike."""
    args = ml.parse_args([*solver, "--levels", "1", "2", "--num-steps", num_steps])
    model = ml.make_model(args)
    with ml.closing(ml.Simulations(args, model)) as sims:
        began = Solver.clock
        sims.measure_costs(model)
    cost = (7 + 5 + 3) / 4
    assert [sims.costs.row(level) for level in range(2)] == [cost, 10 * cost]
    assert sims.costs.total == 0
    # One actor plays two episodes. It starts before and after each.
    assert Solver.clock - began == 11 * 2 * (2 * 7 + 5 + 3)


@pytest.mark.parametrize("levels", ["2", "1 2"])
def test_hours(solver, levels, tmp_path, capsys):
    """A run is as long as they say, by what it has measured; a resumed run may get more of them. It
    measures anew, since it may have other workers, on another machine, unless it is complete."""
    words = [*solver, "--levels", *levels.split(), "--log-dir", str(tmp_path)]
    run = ml.train(ml.parse_args([*words, "--hours", "1"]))
    assert "the run takes 1 hours of simulation and updates" in capsys.readouterr().err
    assert json.loads((run.run_dir / "config.json").read_text())["hours"] == 1
    an_iteration = 4 * 8 * 37.5 + 4 * 4 * 37.5  # and a check
    assert 3600 <= run.seconds() < 3600 + an_iteration
    assert run.sims.costs.step(len(run.args.levels) - 1) == 37.5

    words = ["--resume", str(run.run_dir), "--quiet", "--hours"]
    capsys.readouterr()
    again = ml.train(ml.parse_args([*words, "0.5"]))
    assert again.iteration == run.iteration and again.seconds() == run.seconds()
    # It takes no episodes to say so.
    said = capsys.readouterr().err
    assert said.startswith("the run is complete") and "measuring" not in said
    again = ml.train(ml.parse_args([*words, "2"]))
    assert 7200 <= again.seconds() < 7200 + an_iteration
    assert again.sims.costs.step(len(run.args.levels) - 1) == 37.5


def test_length_of_a_run():
    """--hours, --finest-steps, or a hundred iterations on the finest level."""
    args = types.SimpleNamespace(hours=2.0, finest_steps=7, num_envs=10, num_steps=[4, 2, 1])
    args.levels = [1, 2, 3]
    assert ml.run_length(args, costs(COSTS)) == 7200
    args.hours = None
    assert ml.run_length(args, costs(COSTS)) == 7 * 16
    args.finest_steps = None
    assert ml.run_length(args, costs(COSTS)) == 100 * 10 * 16


def test_measuring_changes_nothing(solver, tmp_path):
    """Given the costs that a run has measured, another one has the same weights."""
    words = [*solver, "--levels", "1", "2", "--num-iterations", "3", "--log-dir", str(tmp_path)]
    first = ml.train(ml.parse_args(words))
    second = ml.train(ml.parse_args([*words, "--level-costs", "3.75", "37.5", "0"]))
    assert [row["seconds"] for row in first.history] == [row["seconds"] for row in second.history]
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_costs_are_without_what_is_done_once(monkeypatch):
    """A reservoir's first step factors the matrix of its field: not while time is taken."""
    words = "--env ResSim-v3 --levels 1 2 --num-envs 6 --num-workers 0 --num-minibatches 6"
    args = ml.parse_args(words.split())
    model = ml.make_model(args)
    real = ml.Player.finish_episodes
    factored = []

    def counted(player, name, games, noise_seeds):
        grid = games[0].env.grid
        before = len(grid.factored)
        steps = real(player, name, games, noise_seeds)
        factored.append((before, len(grid.factored)))
        return steps

    monkeypatch.setattr(ml.Player, "finish_episodes", counted)
    ml.Grid.cache_clear()
    with ml.closing(ml.Simulations(args, model)) as sims:
        sims.measure_costs(model)
    *_, coarse, fine = factored
    assert coarse[0] == coarse[1] > 0 and fine[0] == fine[1] > 0
    assert min(sims.costs.steps) == 6 * 5  # of the second time


# The sum with control weights ---------------------------------------------------------------------


def test_control_weights_are_the_recursion():
    """est_l = own_l + β_l (est_{l−1} − partners_l): the weighted mean is it, for any β."""
    generator = np.random.default_rng(0)
    betas = [0.3, 0.8]
    own = [generator.normal(size=n) for n in (12, 6, 3)]
    sync = [None, generator.normal(size=6), generator.normal(size=3)]
    estimate = own[0].mean()
    for mine, partners, beta in zip(own[1:], sync[1:], betas):
        estimate = mine.mean() + beta * (estimate - partners.mean())
    order = np.concatenate([own[0], sync[1], own[1], sync[2], own[2]])  # as `minibatches` has them
    weights = ml.signed_weights([12, 6, 3], 1, 1, betas)
    assert (weights.numpy() * order).mean() == pytest.approx(estimate, rel=1e-6)
    fine_only = ml.signed_weights([12, 6, 3], 1, 1, [1.0, 0.0])
    assert (fine_only[:-3] == 0).all() and (fine_only[-3:] == 30 / 3).all()


def pairs(rho, n=4000, shift=0.0):
    """Return own batches of two levels and the partners', whose advantages are correlated."""
    a, b, c = torch.randn(3, n, generator=torch.Generator().manual_seed(0))
    fine = rho * b + (1 - rho**2) ** 0.5 * c + shift
    return [{"advantages": a}, {"advantages": fine}], [{"advantages": b}]


def together(*words):
    """Return the rule of a run on two levels."""
    options = "--env ResSim-v1 --schedule together --levels 2 5 --num-workers 0"
    return ml.Together(ml.parse_args([*options.split(), *words]))


def test_control_weight_is_measured():
    """β = Cov/Var, which is logged, too."""
    rule = together("--num-steps", "400", "20")
    assert rule.plan() == ([0, 1], [1.0], False)
    batches, partners = pairs(0.6)
    row = rule.review(None, batches, partners, [])
    own = batches[1]["advantages"].numpy()
    sync = partners[0]["advantages"].numpy()
    (_, covariance), (_, variance) = np.cov(own, sync)
    assert rule.plan().controls[0] == pytest.approx(covariance / variance, rel=1e-4)
    assert row == {"levels/control_5": rule.plan().controls[0]}


def test_useless_coarse_level_is_weighed_out():
    """Without correlation β tends to 0."""
    rule = together("--num-steps", "50", "5")
    rule.review(None, *pairs(0.0), [])
    assert rule.plan().controls[0] < 0.05
    rule.review(None, *pairs(-0.5), [])  # never negative
    assert 0 <= rule.plan().controls[0] < 0.05


def test_control_of_one_is_algorithm_4():
    """--control 1 keeps the weights of Algorithm 4 whatever is measured."""
    rule = together("--num-steps", "50", "5", "--control", "1")
    assert rule.review(None, *pairs(0.3), []) == {}
    assert rule.plan() == ([0, 1], [1.0], False)


def test_mean_over_iterations():
    """What was measured before counts nine times as much as the newest iteration."""
    rule = together("--num-steps", "50", "5")
    rule.review(None, *pairs(0.9), [])
    first = rule.controls[0]
    rule.review(None, *pairs(0.1), [])
    own, partners = pairs(0.1)
    latest = np.cov(own[1]["advantages"], partners[0]["advantages"])[0, 1]
    variance = pairs(0.9)[1][0]["advantages"].var().item()
    assert rule.controls[0] == pytest.approx(0.9 * first + 0.1 * latest / variance, rel=1e-3)
