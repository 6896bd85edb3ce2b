"""The adaptive rule: which level it trains on, by scripted checks; what a run keeps and charges."""

import csv
import json
import re
import shutil
import time
import types
from pathlib import Path

import envs
import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_multilevel import install
from test_resume import train_until

import ppo_multilevel as ml

LARGE, VALUE = (".astype(np.float32)", ".astype(np.float32) * 30"), "--norm-value"
ROD = Path(__file__).parent / "benchmarks/rod.py"
COSTS = [1.0, 4.0, 16.0, 10.0]  # seconds of a step on three levels, and of an update
SMALL = (
    "--env ResSim-v1 --levels 1 2 3 --num-steps 5 --num-envs 4 --num-minibatches 2 --hidden 8 "
    "--update-epochs 2 --num-workers 0 --check-episodes 4 --eval-episodes 2 --quiet "
    "--level-costs 1 4 16 100 --eval-every 4"
).split()


@pytest.fixture(scope="module", autouse=True)
def measured_often():
    """Short runs measure ρ, too: it may take 30 % of the time instead of 5 %."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ml.Adaptive, "MEASURE_SHARE", 0.3)
        yield


class FakeRun:
    """What a rule needs of a run: scripted checks of four episodes, a clock, a model to keep."""

    def __init__(self, args):
        self.args, self.model, self.said = args, torch.nn.Linear(1, 1), []
        self.optimizer, self.checks = torch.optim.Adam(self.model.parameters()), []
        self.pool, self.time = types.SimpleNamespace(call=self.call), 0.0

    def call(self, command):
        assert command == "level_names"
        return [[f"{level} ({8 * level} cells)" for level in self.args.levels]]

    def seconds(self):
        return self.time

    def share_done(self):
        return 0.0

    def check(self):
        self.time += 32.0  # two steps of the third level
        mean, spread = self.checks.pop(0)
        return mean + spread * torch.tensor([-1.0, 1.0, -1.0, 1.0])


@pytest.fixture
def adaptive(monkeypatch):
    """Make a rule that has made its first check, and its run; ρ is not measured."""

    def make(levels=3, norm_obs=False, costs=COSTS):
        args = types.SimpleNamespace(num_envs=10, num_steps=[1] * levels, norm_obs=norm_obs)
        args.levels, args.quiet, args.check_episodes = [*range(1, levels + 1)], False, 4
        args.level_costs = [*costs[:levels], costs[-1]]
        rule, run = ml.Adaptive(args), FakeRun(args)
        monkeypatch.setattr(rule, "measurement_is_due", lambda run: False)
        monkeypatch.setattr(ml, "print", lambda text, **_: run.said.append(text), raising=False)
        run.model.obs_norm = ml.RunningNorm() if norm_obs else None
        run.checks.append((0.0, 0.0))
        assert rule.begin(run)["check_return"] == 0.0
        return rule, run

    return make


def iterate(rule, run, own_return=0.0):
    """Do an iteration as `train` does; return its row."""
    level = rule.level
    assert rule.plan()[:3] == ([level], [1], [])
    run.time += ml.iteration_seconds(rule.args, level)
    return rule.review(run, None, None, {level: [(own_return, 1)]})


def window(rule, run, mean, spread=0.0, own_returns=None):
    """Train until the window is over; its checks return `mean` ± `spread`. Return iterations."""
    end, iterations = rule.window_end, 0
    run.checks = [(mean, spread)] * 99
    while rule.window_end == end:
        own = own_returns[iterations % len(own_returns)] if own_returns else 0.0
        row = iterate(rule, run, own)
        iterations += 1
    assert row["check_return"] == pytest.approx(mean)
    return iterations


def test_seconds_of_unequal_steps(adaptive):
    """An iteration with fewer steps has fewer rows to learn from, too."""
    rule, _ = adaptive()
    assert [ml.iteration_seconds(rule.args, level) for level in range(3)] == [20, 50, 170]
    rule.args.num_steps = [4, 2, 1]
    assert [ml.iteration_seconds(rule.args, level) for level in range(3)] == [50, 85, 162.5]


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
    rule.rho = rho
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
    assert rule.window_end - run.time == 8 * 20 == 5 * 32
    assert window(rule, run, 1.0) == 8
    run.time = 2000.0
    rule.start_window(run)
    assert rule.window_end == 2300.0
    rule.level = 2
    rule.start_window(run)
    assert rule.window_end == 2000 + 8 * 170


def test_gain_restores_trust(adaptive):
    """A gain beyond one standard error: trust 1 for the level, twice as much for all others."""
    error = 1.0 / 3**0.5  # of four differences ±1: deviation √(4/3), over √4
    for factor, trust in ((1.01, [1.0, 0.5, 1.0]), (0.99, [0.25, 0.25, 0.6])):
        rule, run = adaptive()
        rule.trust = [0.5, 0.25, 0.6]
        window(rule, run, factor * error, 1.0)
        assert rule.trust == trust


def test_failures_lead_to_the_next_level(adaptive):
    """Without gains trust is halved until another level is worth more: 20, 50, 170 s."""
    rule, run = adaptive()
    levels = []
    for _ in range(9):
        levels.append(rule.level)
        window(rule, run, -1.0)
    # Worth 1/20, then 1/40; 1/50 after the second failure; 1/80, 1/100, 1/170 ...
    assert levels == [0, 0, 1, 0, 1, 0, 2, 1, 0]
    assert rule.trust == [2**-5, 2**-3, 0.5]


def test_gain_after_failures(adaptive):
    """What a level failed at is past once another one has changed the policy."""
    rule, run = adaptive()
    window(rule, run, -1.0)
    window(rule, run, -1.0)
    assert rule.level == 1 and rule.trust == [0.25, 1.0, 1.0]
    window(rule, run, 1.0)
    assert rule.level == 0 and rule.trust == [0.5, 1.0, 1.0]


def test_line_for_a_change_of_level(adaptive):
    """It has the simulation's own name of the level, costs, ρ and the best check."""
    rule, run = adaptive()
    rule.measurements, rule.rho = 1, [0.2, 0.912, 1.0]
    window(rule, run, 1.5)
    assert run.said == [
        "training on level 1 (8 cells): 20 s an iteration, correlation with the finest not "
        "yet measured, trust 1; best check 0.0000",
        "training on level 2 (16 cells): 50 s an iteration, correlation with the finest 0.91, "
        "trust 1; best check 1.5000",
    ]


def test_line_where_rho_cannot_be_measured(adaptive):
    """It does not show the 1 that stands for a ρ which is not known."""
    rule, run = adaptive()
    rule.measurements, rule.measured_at = 1, None
    rule.tell(run, 1)
    assert "correlation with the finest unknown" in run.said[-1]


@pytest.mark.parametrize(
    "last, told",
    [
        (
            2.5,
            "best check, 2.5000, came after 100% of the time; a longer run may gain more: --resume",
        ),
        (0.5, "best check, 1.5000, came after 62% of the time; checks have not gained since"),
    ],
)
def test_line_at_the_end(adaptive, last, told):
    """It tells whether a longer run may gain more."""
    rule, run = adaptive()
    window(rule, run, 1.5)  # the best check ends at 32 + 160 + 32 s
    run.time, run.checks = 310.0, [(last, 0.0)]
    run.share_done = lambda: 1.0
    iterate(rule, run)  # it ends at 310 + 20 + 32 s
    assert run.said[-1] == f"the {told}"


@pytest.mark.parametrize("quiet, rank", [(True, 0), (False, 1)])
def test_quiet_rule_says_nothing(adaptive, monkeypatch, quiet, rank):
    """Nor does a rank that is not the first."""
    rule, run = adaptive()
    rule.args.quiet, run.said = quiet, []
    monkeypatch.setattr(ml, "RANK", rank)
    for _ in range(3):
        window(rule, run, -1.0)
    assert rule.level == 0 and rule.trust[1] < 1 and run.said == []


@pytest.mark.parametrize("norm_obs", [False, True])
def test_first_fit_of_the_values(adaptive, norm_obs):
    """It waits for the statistics of observations, which the first iteration brings; again if the
    run goes back to parameters from before that."""
    rule, run = adaptive(norm_obs=norm_obs)
    fits = []
    for iteration in range(5):
        fits.append(rule.plan().refit)
        if norm_obs:
            run.model.obs_norm.update(torch.zeros(10))
        run.checks = [(0.0, 0.0)]
        iterate(rule, run)
        if iteration == 2:
            rule.go_back(run)
    assert fits == [not norm_obs, norm_obs, False, True, norm_obs]


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


def test_one_level(adaptive):
    """There is nothing to choose, and nothing to measure."""
    rule, run = adaptive(levels=1)
    for _ in range(3):
        window(rule, run, -1.0)
    assert rule.level == 0 and len(run.said) == 1
    run.time = 1e9
    assert not ml.Adaptive(rule.args).measurement_is_due(run)


@pytest.mark.parametrize("rho", [1.0, 0.89])
@pytest.mark.parametrize(
    "own_returns, rises", [([0, 1, 2, 3], True), ([3, 2, 1, 0], False), ([0, 9, 1, 8], False)]
)
def test_hidden_progress(adaptive, rho, own_returns, rises):
    """Worse parameters are left for the best, but not where the level's own return rises and the
    level agrees with the finest one."""
    rule, run = adaptive()
    with torch.no_grad():
        run.model.weight.fill_(7.0)
    rule.rho[0] = rho
    own = [value + 0.01 * (-1) ** i for i, value in enumerate(np.repeat(own_returns, 2))]
    assert window(rule, run, -1.0, own_returns=own) == 8
    stays = rises and rho == 1.0
    assert rule.plan().refit is not stays
    assert (float(run.model.weight.detach()) == 7.0) == stays


def test_slope_over_two_errors(adaptive):
    """By NumPy's own least squares."""
    rule, _ = adaptive()
    generator = np.random.default_rng(0)
    found = []
    for slope in (0.0, 0.1, 0.2, 0.3):
        rule.own_returns = (slope * np.arange(12) + generator.normal(size=12)).tolist()
        fitted, covariance = np.polyfit(np.arange(12), rule.own_returns, 1, cov=True)
        expected = fitted[0] > 2 * covariance[0, 0] ** 0.5
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
    assert rule.best_returns.mean() == 1.0 and rule.best_at < run.time


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
    """There is one whenever training took six times what one takes."""
    rule, run = adaptive()
    rule.window_end, run.checks, due = 1e9, [(0.0, 0.0)] * 99, []
    for iteration in range(1, 41):
        if "check_return" in iterate(rule, run):
            due.append(iteration)
    assert due == [10, 20, 30, 40]  # 6 · 32 s ≤ 10 · 20 s
    assert run.time == 40 * 20 + 5 * 32


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

    def __init__(self, level, reward, unlike=False, length=3):
        self.level, self.reward, self.unlike, self.length = level, reward, unlike, length

    def psi(self):
        return np.array([self.t, self.start], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.np_random.random(self.level if self.unlike else 0)
        self.t, self.start = 0, self.np_random.normal()
        return self.psi(), {}

    def step(self, action):
        self.t += 1
        reward = float(self.reward(self.level, action, self.start))
        return self.psi(), reward, self.t >= self.length, False, {}


class Mapped(Line):
    """The same, which can take over another level's state."""

    def map_from(self, other):
        self.t, self.start = other.t, other.start


LINE = "--levels 1 2 3 --num-envs 16 --num-minibatches 2 --hidden 8 --num-workers 0 --num-steps 3 "
LINE += "--init-log-std -1 --level-costs 1e-3 4e-3 1e-2 1e-1 --check-episodes 4 --eval-every 0"
AGREES = lambda level, action, start: 5 * start + action[0]  # noqa: E731
BLIND = lambda level, action, start: 5 * start + action[int(level == 3)]  # noqa: E731
HALF = lambda level, action, start: start + action[0] + (level < 3) * action[1]  # noqa: E731


def measured(monkeypatch, kind, reward, **options):
    """Return what playing Lines side by side gives: ρ, and a line on why it means nothing."""
    name = install(monkeypatch, lambda level: kind(level, reward, **options))
    args = ml.parse_args(["--env", name, *LINE.split()])
    model = ml.make_model(args)
    with ml.closing(ml.make_pool(args, model, ml.game_seeds(args, 0), 0)) as pool:
        returns, starts, problem = ml.play_alike(model, pool, args, 1)
    assert returns.shape == (3, 64) and len(np.unique(starts)) == 8
    return ml.correlations(returns, starts), problem


@pytest.mark.parametrize("kind", [Line, Mapped])
def test_levels_are_played_from_the_same_starts_with_the_same_noise(monkeypatch, kind):
    """Levels that are the same return the same; blind ones have nothing to do with the finest."""
    assert measured(monkeypatch, kind, AGREES) == (pytest.approx([1, 1, 1]), None)
    rho, problem = measured(monkeypatch, kind, BLIND)
    assert abs(rho[:2]).max() < 0.4 and problem is None  # of 56 free returns: two errors are .27
    assert measured(monkeypatch, kind, HALF)[0][:2] == pytest.approx([0.5**0.5] * 2, abs=0.2)


def test_starts_that_differ_between_levels(monkeypatch):
    """Without map_from a seed must be one start on all levels; with it the finest's is taken."""
    assert "levels start unlike" in measured(monkeypatch, Line, AGREES, unlike=True)[1]
    rho, problem = measured(monkeypatch, Mapped, AGREES, unlike=True)
    assert rho == pytest.approx([1, 1, 1]) and problem is None


def test_starts_that_are_chance(monkeypatch):
    """A reset that does not go by its seed is told."""

    class Chance(Line):
        def reset(self, *, seed=None, options=None):
            return super().reset(options=options)

    assert (
        "two episodes from the same reset(seed) differ" in measured(monkeypatch, Chance, AGREES)[1]
    )


def trained(monkeypatch, tmp_path, kind, reward, *words, **options):
    """Return a run on Lines, as long as 4,000 steps of the finest level take."""
    name = install(monkeypatch, lambda level: kind(level, reward, **options))
    argv = ["--env", name, *LINE.split(), "--total-cost", "4000", "--quiet", *words]
    return ml.train(ml.parse_args([*argv, "--log-dir", str(tmp_path)]))


def levels_of(run):
    """Return the levels of a run's iterations."""
    return [row["level"] for row in run.history[1:]]


def test_blind_levels_are_left(monkeypatch, tmp_path):
    """Once ρ is measured the run trains where it learns what the finest level wants."""
    run = trained(monkeypatch, tmp_path, Line, BLIND)
    assert run.rule.measurements > 1 and max(run.rule.rho[:2]) < 0.5
    levels = levels_of(run)
    assert levels[0] == 1 and levels[-1] == 3
    assert run.history[-1]["levels/rho_1"] == run.rule.rho[0]
    assert "levels/rho_1" not in run.history[1] and run.history[1]["levels/trust_1"] == 1


def test_unlike_levels_go_by_trust_alone(monkeypatch, tmp_path, capsys):
    """One line says so, and nothing is measured any more."""
    run = trained(monkeypatch, tmp_path, Line, AGREES, unlike=True)
    assert run.rule.measurements == 1 and run.rule.measured_at is None
    assert run.rule.rho == [1.0] * 3
    told = capsys.readouterr().err
    assert told.count("levels are chosen by costs and gains alone") == 1


def test_constant_returns(monkeypatch, tmp_path):
    """Where the policy changes nothing on the finest level there is nothing to correlate."""
    run = trained(monkeypatch, tmp_path, Line, lambda level, action, start: (level < 3) * action[0])
    assert run.rule.measurements > 1 and run.rule.rho == [1.0] * 3
    assert set(levels_of(run)) == {1, 2, 3}  # no gains anywhere: all have their turn
    run = trained(monkeypatch, tmp_path, Line, lambda level, action, start: (level > 1) * action[0])
    assert run.rule.rho == pytest.approx([0.03, 1, 1])


def test_diverging_level(monkeypatch, tmp_path):
    """Large returns of a few episodes make ρ small; NaN ends the run with a line that names it."""

    def diverges(level, action, start):
        return action[0] + (level == 1) * 1e6 * (action[1] > 0.5)

    run = trained(monkeypatch, tmp_path, Line, diverges)
    assert run.rule.rho[0] < 0.5 < run.rule.rho[1]

    def breaks(level, action, start):
        return np.nan if level == 2 and run else action[0]

    with pytest.raises(ml.GameError, match="NaN or infinity in returns of level 2"):
        trained(monkeypatch, tmp_path, Line, breaks)


def test_levels_that_agree(monkeypatch, tmp_path):
    """The finest level is played in checks and measurements only, as long as a cheap one gains.

    A measurement is charged 64 episodes of three steps on each level; all of them take no more of
    the time than they may.
    """
    run = trained(monkeypatch, tmp_path, Line, AGREES)
    assert run.rule.rho == pytest.approx([1, 1, 1])
    levels = levels_of(run)
    assert levels.count(1) > 0.8 * len(levels)

    costs = np.array([1e-3, 4e-3, 1e-2]) / 1e-2
    cost = 0.0
    for row in run.history:
        if row["iteration"]:
            cost += 48 * costs[row["level"] - 1]
        if "check_return" in row:
            cost += 4 * 3
    measured_cost = run.rule.measurements * 64 * 3 * costs.sum()
    assert run.counters["sim_cost"] == pytest.approx(cost + measured_cost)
    assert run.rule.measurements > 1
    assert 0.1 < measured_cost / run.counters["total_cost"] < 0.3


def test_training_goes_on_from_new_starts(monkeypatch):
    """A measurement leaves no two actors with the same episodes."""
    name = install(monkeypatch, lambda level: Line(level, AGREES))
    args = ml.parse_args(["--env", name, *LINE.split()])
    rule, model = ml.Adaptive(args), ml.make_model(args)
    with ml.closing(ml.make_pool(args, model, ml.game_seeds(args, 0), 0)) as pool:
        run = types.SimpleNamespace(model=model, pool=pool, charge=lambda *_, **__: None)
        run.seconds = lambda: 1.0
        starts = []
        for _ in range(2):
            rule.measure(run)
            starts.append(pool.arrays["obs"][ml.OWN, :, :, 1].copy())
    assert len(np.unique(np.stack(starts))) == 2 * 3 * 16


# Values on a new level ----------------------------------------------------------------------------


def test_refit_values_is_ridge_regression():
    """The value function's last layer is NumPy's least-squares fit, with a row √(λ M) of a target
    0 for each weight; Â = R − V then. Features that tell nothing do not get large weights."""
    args = ml.make_parser().parse_args(["--hidden", "6", "5"])
    model = ml.Model(3, ml.gym.spaces.Box(-1, 1, (2,)), args)
    generator = torch.Generator().manual_seed(0)
    obs = 0.1 * torch.randn(50, 3, generator=generator)
    batch = {"obs": obs, "returns": obs[:, 0] * 3 + 5 + torch.randn(50, generator=generator)}
    policy = model.head.mean.weight.clone()
    features = np.c_[model.critic(obs).detach().numpy(), np.ones(50)]
    returns = batch["returns"].numpy()
    unpenalised = np.linalg.lstsq(features, returns, rcond=None)[0]
    penalised = np.r_[features, (1e-3 * 50) ** 0.5 * np.eye(6)], np.r_[returns, np.zeros(6)]
    weights = np.linalg.lstsq(*penalised, rcond=None)[0]
    ml.refit_values(model, batch)
    np.testing.assert_allclose(batch["values"], features @ weights, rtol=1e-4)
    torch.testing.assert_close(batch["advantages"], batch["returns"] - batch["values"])
    torch.testing.assert_close(model(obs)[1], batch["values"])
    assert torch.equal(model.head.mean.weight, policy)
    assert np.linalg.norm(unpenalised[:-1]) > 5 * model.value.weight.norm()


def test_refit_advantages_are_in_the_rewards_unit():
    """Also where values are normalised ones."""
    args = ml.make_parser().parse_args(["--hidden", "6", "--norm-value"])
    model = ml.Model(3, ml.gym.spaces.Box(-1, 1, (2,)), args)
    returns = 100 + 50 * torch.randn(40)
    batch = {"obs": torch.randn(40, 3), "returns": returns, "values": torch.zeros(40)}
    ml.normalise_values(model, batch, returns)
    ml.refit_values(model, batch)
    values = model.value_norm.mean + model.value_norm.std * batch["values"]
    torch.testing.assert_close(batch["advantages"], returns - values, atol=1e-3, rtol=1e-4)
    assert batch["advantages"].std() > 10


# Runs ---------------------------------------------------------------------------------------------


def rows(run_dir):
    """Return the rows of progress.csv."""
    with (run_dir / "progress.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train on three small reservoirs, as long as 2,400 steps of the finest level take."""
    folder = str(tmp_path_factory.mktemp("runs"))
    return ml.train(ml.parse_args([*SMALL, "--total-cost", "2400", "--log-dir", folder]))


def test_run_reports_level_and_checks(run):
    """Level and check are in progress.csv; the run changes its level; the length is its cost."""
    table = rows(run.run_dir)
    levels = [int(row["level"]) for row in table]
    assert levels[0] == 1 and set(levels) > {1}
    assert float(table[0]["check_return"]) > 0.4 and float(table[-1]["check_return"]) > 0.4
    costs = [float(row["total_cost"]) for row in table]
    assert costs[-2] < 2400 <= costs[-1] and costs == sorted(costs)
    assert all(0 < float(row["sim_seconds"]) < float(row["wall_seconds"]) for row in table)
    assert {float(row["learning_rate"]) for row in table[1:]} == {run.args.learning_rate}


def test_unchanged_result_is_not_evaluated_again(tmp_path, monkeypatch):
    """As long as no check is better, the return of the evaluation before is logged again."""
    calls, evaluate = [], ml.evaluate
    monkeypatch.setattr(ml, "evaluate", lambda *a, **k: calls.append(k) or evaluate(*a, **k))
    argv = [*SMALL, "--total-cost", "800", "--eval-every", "1", "--log-dir", str(tmp_path)]
    table = rows(ml.train(ml.parse_args(argv)).run_dir)
    checks = np.array([float(row["check_return"] or -1) for row in table])
    best = np.maximum.accumulate(checks)
    better = [True, *(best[1:] > best[:-1])]
    assert sum("run" in call for call in calls) == sum(better) < len(table)  # checks have no run
    returns = [row["eval_return"] for row in table]
    assert all(returns) and len(set(returns)) == sum(better)
    assert [True, *(a != b for a, b in zip(returns[1:], returns))] == better


@pytest.mark.parametrize(
    "levels, old, new, more, words",
    [
        ("1 2", "", "", VALUE, ""),
        (
            "1 2",
            "reset(seed=seed)",
            "reset()",
            VALUE,
            "two episodes from the same reset(seed) differ",
        ),
        (
            "1 2",
            "0.2 * curvature",
            "np.random.random() * curvature",
            VALUE,
            "two episodes from the same reset(seed) differ",
        ),
        ("1", *LARGE, VALUE, "observations: --norm-obs?"),
        ("1 2", *LARGE, VALUE, "observations: --norm-obs?"),
        ("1 2", *LARGE, f"--norm-obs {VALUE}", ""),
        ("1 2", "", "", "", "returns: --norm-value?"),
        ("1", "", "", "--eval-every 1 --eval-episodes 2", "returns: --norm-value?"),
        ("1 2", "-np.square", "-1e-3 * np.square", "", ""),
    ],
)
def test_what_a_run_says_of_the_starts(levels, old, new, more, words, tmp_path, capsys):
    """Once, at its start: a line on starts that are chance, on numbers far from 1."""
    (tmp_path / "mine.py").write_text(ROD.read_text().replace(old, new))
    assert not old or old in ROD.read_text()
    options = f"--env {tmp_path}/mine.py:make --levels {levels} --num-envs 2 --num-steps 10 "
    options += "--quiet --eval-every 0 "
    options += f"--num-iterations 1 --num-minibatches 2 --num-workers 0 --log-dir {tmp_path} {more}"
    ml.train(ml.parse_args(options.split()))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(words) and words in "".join(lines)


def test_length_of_no_more_than_a_check(tmp_path, capsys):
    """Such a run learns nothing, and says so."""
    argv = [*SMALL, "--total-cost", "1", "--log-dir", str(tmp_path)]
    assert ml.train(ml.parse_args(argv)).iteration == 0
    assert "nothing learned: the first check takes --total-cost\n" in capsys.readouterr().err


def test_time_left(tmp_path, capsys):
    """The first tenth, on coarse levels, does not tell how long the rest will take."""
    argv = [*SMALL, "--total-cost", "600", "--log-dir", str(tmp_path)]
    (args := ml.parse_args(argv)).quiet = False
    ml.train(args)
    found = re.findall(r"^update \d+  (\d+)%.*?(ETA|$)", capsys.readouterr().out, re.MULTILINE)
    told = {int(share) > 10: [] for share, _ in found}
    for share, eta in found:
        told[int(share) > 10].append(eta)
    assert set(told[False]) == {""} and set(told[True]) == {"ETA"}


def test_learning_rate_falls_with_the_cost(tmp_path):
    """--anneal-lr: each iteration's rate is by the share of the run's cost before it."""
    argv = [*SMALL, "--total-cost", "300", "--anneal-lr", "--log-dir", str(tmp_path)]
    table = rows(ml.train(ml.parse_args(argv)).run_dir)
    rates = [float(row["learning_rate"]) for row in table[1:]]
    before = [float(row["total_cost"]) / 300 for row in table[:-1]]  # the first check's is in it
    assert rates == pytest.approx([1e-4 * (1 - share) for share in before]) and len(rates) > 3


def test_run_tensorboard_costs(run):
    """TensorBoard shows what a run has cost."""
    events = EventAccumulator(str(run.run_dir)).Reload()
    for name in ("sim_cost", "total_cost"):
        shown = {event.step: event.value for event in events.Scalars(f"costs/{name}")}
        table = {int(row["global_step"]): float(row[name]) for row in rows(run.run_dir)}
        assert shown == pytest.approx(table)


def test_every_step_is_charged_by_its_level(run):
    """20 steps per iteration on a level cost 20 c_l / c_L, a check 4 · 5 steps of the finest, a
    measurement 64 · 5 steps of each level, and 4 to see whether levels start alike; an update
    100 s, of which a step takes 16."""
    table, cost, measurements = rows(run.run_dir), 0.0, 0
    measurement = 324 * (1 + 4 + 16) / 16
    for row in table:
        cost += 20 * [1, 4, 16][int(row["level"]) - 1] / 16 if row["iteration"] != "0" else 0
        cost += 20 if row["check_return"] else 0
        if float(row["sim_cost"]) > cost + 0.9 * measurement:
            cost, measurements = cost + measurement, measurements + 1
        assert float(row["sim_cost"]) == pytest.approx(cost)
        updates = int(row["iteration"]) * 100 / 16
        assert float(row["total_cost"]) == pytest.approx(cost + updates)
    assert measurements == run.rule.measurements > 0
    assert float(table[-1]["sim_seconds"]) > 0


def test_best_check_is_the_runs_result(run, capsys):
    """`model` in the checkpoint, --eval and the last evaluation are the best check's parameters."""
    state = ml.Checkpoint(run.run_dir).read()
    best = max(float(row["check_return"]) for row in rows(run.run_dir) if row["check_return"])
    assert state["rule"]["best_returns"].mean() == pytest.approx(best)
    for name, value in state["model"].items():
        assert torch.equal(value, state["rule"]["best"][name])
    for name, value in run.model.state_dict().items():
        assert torch.equal(state["current"][name], value)
    returns = ml.evaluate_run(ml.parse_args(["--eval", str(run.run_dir)]))
    assert float(rows(run.run_dir)[-1]["eval_return"]) == pytest.approx(returns.mean())


def test_checks_have_fields_of_their_own(run):
    """A third set of fields: neither training's nor evaluation's; each field once."""
    args = run.args
    with ml.closing(ml.make_check_pool(args, run.model)) as pool:
        pool.call("start")
        envs = [game.env for game in pool.games.own[0]]
    assert [env.field for env in envs] == [0, 1, 2, 3] and envs[0].grid.shape == (32, 32)
    sets = [ml.ResSim("ResSim-v1", 3).grid, ml.ResSim("ResSim-v1", 3, evaluation=True).grid]
    for grid in sets:
        assert not any(np.array_equal(a, b) for a in envs[0].grid.perm for b in grid.perm)
    assert len(np.unique(envs[0].grid.perm.reshape(16, -1), axis=0)) == 16


@pytest.mark.parametrize("ranks, shares", [(2, [2, 2]), (3, [2, 1, 1]), (4, [1] * 4)])
def test_ranks_share_the_games_of_a_check(run, monkeypatch, ranks, shares):
    """Each rank has other fields, as many as the others or one more, and at least one."""
    fields = []
    monkeypatch.setattr(ml, "NUM_RANKS", ranks)
    for rank, share in enumerate(shares):
        monkeypatch.setattr(ml, "RANK", rank)
        with ml.closing(ml.make_check_pool(run.args, run.model)) as pool:
            pool.call("start")
            fields.append([game.env.field for game in pool.games.own[0]])
        assert len(fields[rank]) == share
    assert sum(fields, []) == [*range(sum(shares))]


def test_more_ranks_than_episodes_of_a_check(monkeypatch, capsys):
    """They would have to play others than the run's checks before."""
    monkeypatch.setattr(ml, "NUM_RANKS", 5)
    with pytest.raises(SystemExit):
        ml.parse_args(SMALL)
    assert "argument --check-episodes: each of the 5 ranks needs one" in capsys.readouterr().err


@pytest.mark.parametrize("last", [3, 14, 135])
def test_resume_in_the_middle(run, tmp_path, last):
    """Stopped in an iteration and resumed, the run is the uninterrupted one; ρ is measured before
    the last stop, and after it."""
    argv = [*SMALL, "--total-cost", "2400", "--log-dir", str(tmp_path)]
    stopped = train_until(ml, ml.parse_args(argv), last)
    assert stopped.iteration == last
    resumed = ml.train(ml.parse_args(["--resume", str(stopped.run_dir), "--quiet"]))
    expected = run.model.state_dict()
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert torch.equal(resumed.rule.best_returns, run.rule.best_returns)
    for row, expected_row in zip(rows(resumed.run_dir), rows(run.run_dir), strict=True):
        for name in ("level", "check_return", "eval_return", "sim_cost", "policy_loss"):
            assert row[name] == expected_row[name], name


@pytest.mark.parametrize("option", ["--total-cost", "--num-iterations"])
def test_a_longer_run(run, tmp_path, option):
    """A run that is over goes on with another length, in the same unit or another one."""
    copy = shutil.copytree(run.run_dir, tmp_path / "copy")
    length = 2600 if option == "--total-cost" else run.iteration + 20
    words = ["--resume", str(copy), "--quiet", option, str(length)]
    longer = ml.train(ml.parse_args(words))
    if option == "--total-cost":
        assert longer.counters["total_cost"] >= 2600 and longer.iteration > run.iteration
    else:
        assert longer.iteration == length


@pytest.mark.parametrize("length", [None, 40])
def test_game_that_fails_in_a_check(tmp_path, monkeypatch, length):
    """What was learned is saved; the iteration, which has no row, is done again, the last one too:
    its check and its evaluation are the run's result."""
    real, checks, weights = ml.Run.check, [], []

    def check(run):
        checks.append(run.iteration)
        if len(checks) == 3 if length is None else run.iteration == length and not weights:
            weights.append(run.model.value.weight.clone())
            raise ml.GameError("broken on purpose")
        return real(run)

    monkeypatch.setattr(ml.Run, "check", check)
    argv = [*SMALL, "--num-iterations", "40", "--log-dir", str(tmp_path)]
    with pytest.raises(ml.GameError, match="broken on purpose"):
        ml.train(ml.parse_args(argv))
    (run_dir,) = tmp_path.iterdir()
    state = ml.Checkpoint(run_dir).read()
    assert state["counters"]["iteration"] == checks[-1] - 1 > 0
    assert torch.equal(state["current"]["value.weight"], weights[0])
    assert state["counters"]["sim_cost"] > state["history"][-1]["sim_cost"]
    resumed = ml.train(ml.parse_args(["--resume", str(run_dir), "--quiet"]))
    assert [row["iteration"] for row in resumed.history] == [*range(41)]
    assert resumed.num_starts == 1
    assert resumed.history[-1]["check_return"] and resumed.history[-1]["eval_return"]


def test_nan_in_a_check(tmp_path, monkeypatch):
    """No check would ever be better than NaN."""
    monkeypatch.setattr(ml, "evaluate", lambda *_, **__: (np.full(4, np.nan), 0))
    with pytest.raises(ml.GameError, match="NaN or infinity in returns of a check, level 3"):
        ml.train(ml.parse_args([*SMALL, "--num-iterations", "1", "--log-dir", str(tmp_path)]))


def test_check_that_is_cut_off(tmp_path, monkeypatch, capsys):
    """A line says how many of its episodes did not end."""
    monkeypatch.setattr(ml, "EVAL_STEPS", 2)
    argv = [word for word in SMALL if word != "--quiet"]
    ml.train(ml.parse_args([*argv, "--num-iterations", "1", "--log-dir", str(tmp_path)]))
    assert "check: 4 episodes cut off at 2 steps" in capsys.readouterr().err


MADE = (
    "--env envs:make --levels 1 2 --level-costs 1 2 1 --num-envs 2 --num-minibatches 2 --hidden 8"
)
MADE = f"{MADE} --num-workers 0 --eval-every 0 --check-episodes 2 --quiet".split()


def test_episodic_return_is_of_one_level(tmp_path, monkeypatch):
    """Episodes of the level that a run has left do not count."""
    step = envs.Levels.step
    monkeypatch.setattr(
        envs.Levels,
        "step",
        lambda env, action: (*step(env, action)[:1], env.level, False, True, {}),
    )
    argv = [*MADE, "--num-steps", "4", "--num-iterations", "12", "--log-dir", str(tmp_path)]
    history = ml.train(ml.parse_args(argv)).history[1:]
    assert {row["level"] for row in history} == {1, 2}
    assert all(row["episodic_return"] == row["level"] for row in history)


@pytest.mark.parametrize("schedule", ["adaptive", "together"])
def test_total_timesteps(tmp_path, schedule):
    """The run ends once it has taken as many, whatever the levels' T."""
    argv = [*MADE, "--num-steps", "4", "40", "--schedule", schedule, "--total-timesteps", "500"]
    run = ml.train(ml.parse_args([*argv, "--log-dir", str(tmp_path)]))
    last = run.history[-1]["global_step"] - run.history[-2]["global_step"]
    assert 500 <= run.counters["global_step"] < 500 + last


@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_measured_costs(monkeypatch, num_workers):
    """Seconds per step, divided by the workers that there are: no more than actors."""
    args = ml.parse_args([*MADE, "--num-steps", "4", "--num-workers", str(num_workers)])
    take_a_second(monkeypatch)
    assert ml.measured_costs(args, ml.make_model(args))[:2] == [1 / min(2, num_workers)] * 2


def take_a_second(monkeypatch, coarse=1.0):
    """Have every step of a game take a second, or another time on the coarsest level."""
    play = ml.WorkerPool.play

    def timed(pool, model, num_steps, level=0, **how):
        play(pool, model, num_steps, level=level, **how)
        pool.arrays["seconds"][:] = pool.arrays["steps"] * (1 if level else coarse)

    monkeypatch.setattr(ml.WorkerPool, "play", timed)


@pytest.mark.parametrize("coarse, told", [(0.1, False), (1.4, False), (1.6, True)])
def test_coarse_steps_that_cost_more_are_told(monkeypatch, capsys, coarse, told):
    """Perhaps it is the reset that does not get cheaper."""
    args = ml.parse_args([*MADE, "--num-steps", "4"])
    take_a_second(monkeypatch, coarse)
    ml.measured_costs(args, ml.make_model(args))
    assert ("slow reset? --level-costs" in capsys.readouterr().err) == told


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
        return np.zeros(1, np.float32), 0.0, self.t == 4, False, {}


def test_costs_are_those_of_whole_episodes(monkeypatch):
    """A step's cost includes its share of reset and first step, on all levels alike."""
    monkeypatch.setattr(ml.time, "perf_counter", lambda: Solver.clock)
    options = "--levels 1 2 --num-envs 6 --num-minibatches 2 --num-workers 0 --num-steps".split()
    argv = ["--env", install(monkeypatch, Solver), *options]
    for num_steps in (50, 2):
        cost = (7 + 5 + 3) / 4
        args = ml.parse_args([*argv, str(num_steps)])
        began = Solver.clock
        costs = ml.measured_costs(args, ml.make_model(args))
        assert costs == [cost, 10 * cost, 0]
        # One actor plays: it starts three times and after an episode, and plays an iteration.
        assert Solver.clock - began < 11 * (4 * 7 + 2 * 5 + 15) + 4 * 50


@pytest.mark.parametrize("ranks, workers, expected", [(1, 0, 12.0), (1, 3, 4.0), (2, 3, 2.0)])
def test_seconds_are_spread_over_the_workers_of_all_ranks(monkeypatch, ranks, workers, expected):
    """A step costs what it takes divided by how many are taken at the same time."""
    monkeypatch.setattr(ml, "NUM_RANKS", ranks)
    pool = types.SimpleNamespace(workers=[None] * workers, arrays={"seconds": np.full(4, 3.0)})
    assert ml.simulated_seconds(pool) == expected


def test_measured_update(monkeypatch):
    """An update costs what all of its epochs do, without what the first one does once."""
    args, limits = ml.parse_args([*MADE, "--num-steps", "4"]), []

    def update(model, optimizer, batch, plan, args, generator):
        limits.append(args.target_kl)
        time.sleep(1.0 if len(limits) == 1 else 0.05)

    monkeypatch.setattr(ml, "update", update)
    assert 0.05 <= ml.measured_costs(args, ml.make_model(args))[-1] < 0.5
    assert limits == [0, 0]


def test_another_level_of_evaluations(tmp_path):
    """A run on one coarse level can be evaluated with another --eval-level. (It is not resumed with
    one, in whose steps its cost is counted: `test_options_that_a_run_has`.)"""
    argv = "--env ResSim-v1 --levels 1 --num-steps 5 --num-envs 4 --num-minibatches 2 --hidden 8"
    argv = f"{argv} --eval-episodes 2 --num-workers 0 --quiet --num-iterations 1".split()
    run = ml.train(ml.parse_args([*argv, "--log-dir", str(tmp_path)]))
    returns = [
        ml.evaluate_run(ml.parse_args(["--eval", str(run.run_dir), "--eval-level", level]))
        for level in "13"
    ]
    assert (returns[0] != returns[1]).any()


@pytest.mark.parametrize("levels", ["2", "1 2"])
def test_hours(levels, monkeypatch, tmp_path, capsys):
    """They are converted to steps of the finest level, once; a resumed run may get more of them."""
    monkeypatch.setattr(ml.time, "perf_counter", lambda: Solver.clock)
    argv = ["--env", install(monkeypatch, Solver), "--levels", *levels.split()]
    argv += "--num-envs 4 --num-minibatches 2 --num-steps 8 --hidden 8 --num-workers 0".split()
    argv += "--check-episodes 4 --eval-every 0 --quiet --log-dir".split() + [str(tmp_path)]
    run = ml.train(ml.parse_args([*argv, "--hours", "2"]))
    assert "2 hours are --total-cost 192, " in capsys.readouterr().err  # steps of 37.5 s
    options = json.loads((run.run_dir / "config.json").read_text())["options"]
    assert (options["hours"], options["total_cost"]) == (None, 192)
    an_iteration = 4 * 8 * 37.5 + 4 * 4 * 37.5  # and a check
    assert 7200 <= run.seconds() < 7200 + an_iteration

    before = run.iteration
    words = ["--resume", str(run.run_dir), "--quiet", "--hours"]
    assert ml.train(ml.parse_args([*words, "1"])).iteration == before
    assert "run complete" in capsys.readouterr().err
    again = ml.train(ml.parse_args([*words, "4"]))
    assert 4 * 3600 <= again.seconds() < 4 * 3600 + an_iteration


def test_hours_of_a_run_without_costs(monkeypatch, tmp_path, capsys):
    """A run on one level measures none unless its length goes by them."""
    argv = ["--env", install(monkeypatch, Solver), "--levels", "1", "--num-iterations", "1"]
    argv += "--num-envs 4 --num-minibatches 2 --num-steps 8 --hidden 8 --num-workers 0".split()
    run = ml.train(ml.parse_args([*argv, "--quiet", "--log-dir", str(tmp_path)]))
    with pytest.raises(SystemExit):
        ml.parse_args(["--resume", str(run.run_dir), "--hours", "1"])
    assert "--hours: this run has not measured costs" in capsys.readouterr().err


class Slowing(Solver):
    """After 40 steps of a game every step of level 1 takes three times as long."""

    def __init__(self, level):
        super().__init__(level)
        self.level = level
        self.steps = 0

    def step(self, action):
        self.steps += 1
        if self.level == 1 and self.steps > 40:
            self.factor = 3
        return super().step(action)


def test_costs_are_corrected_by_what_was_simulated(monkeypatch, tmp_path):
    """Only where they were measured: they go to progress.csv, and a resumed run keeps them.

    The cost of the finest level stays, since the run's length is counted in its steps.
    """
    monkeypatch.setattr(ml.time, "perf_counter", lambda: Solver.clock)
    argv = ["--env", install(monkeypatch, Slowing), "--levels", "1", "2", "--num-envs", "4"]
    argv += "--num-minibatches 2 --num-steps 8 --hidden 8 --num-workers 0 --quiet".split()
    argv += "--check-episodes 4 --eval-every 0 --num-iterations 12".split()
    run = ml.train(ml.parse_args([*argv, "--log-dir", str(tmp_path)]))
    costs = json.loads((run.run_dir / "config.json").read_text())["options"]["level_costs"]
    assert costs == [3.75, 37.5, 0]
    table = rows(run.run_dir)
    corrected = [row for row in table if row["levels/step_seconds_1"]]
    assert [row["iteration"] for row in corrected] == ["10"]
    assert float(corrected[0]["levels/step_seconds_2"]) == 37.5
    assert 3.75 < float(corrected[0]["levels/step_seconds_1"]) < 3 * 3.75
    assert run.args.level_costs[0] == float(corrected[0]["levels/step_seconds_1"])

    again = ml.train(ml.parse_args(["--resume", str(run.run_dir), "--num-iterations", "13"]))
    assert again.args.level_costs == run.args.level_costs
    argv += ["--level-costs", "1", "10", "1", "--log-dir", str(tmp_path / "given")]
    given = ml.train(ml.parse_args(argv))
    assert given.args.level_costs == [1, 10, 1]


def test_costs_are_without_what_is_done_once(monkeypatch):
    """A reservoir's first step factors the matrix of its field: not while time is taken."""
    args = ml.parse_args("--env ResSim-v3 --levels 1 2 --num-envs 6 --num-workers 0".split())
    step_seconds, factored = ml.step_seconds, []

    def counted(model, pool, level, *rest):
        grid = pool.games.own[level][0].env.grid
        factored.append(len(grid.factored))
        seconds = step_seconds(model, pool, level, *rest)
        factored.append(len(grid.factored))
        return seconds

    monkeypatch.setattr(ml, "step_seconds", counted)
    ml.Grid.cache_clear()
    ml.measured_costs(args, ml.make_model(args))
    assert factored[0] == factored[1] > 0 and factored[2] == factored[3] > 0


def test_costs_are_measured_once(tmp_path):
    """They are in config.json, and a resumed run keeps them."""
    argv = [*SMALL, "--num-iterations", "2", "--log-dir", str(tmp_path)]
    i = argv.index("--level-costs")
    first = ml.train(ml.parse_args(argv[:i] + argv[i + 5 :]))
    config = json.loads((first.run_dir / "config.json").read_text())
    costs = config["options"]["level_costs"]
    assert len(costs) == 4 and min(costs) > 0
    argv = ["--resume", str(first.run_dir), "--num-iterations", "3", "--quiet"]
    assert ml.train(ml.parse_args(argv)).args.level_costs == costs


def test_measuring_changes_nothing(tmp_path):
    """Given the costs that a run has measured, another one has the same weights."""
    argv = [*SMALL, "--num-iterations", "3", "--log-dir", str(tmp_path)]
    i = argv.index("--level-costs")
    first = ml.train(ml.parse_args(argv[:i] + argv[i + 5 :]))
    argv[i + 1 : i + 5] = map(str, first.args.level_costs)
    second = ml.train(ml.parse_args(argv))
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_another_rule_can_be_given(tmp_path):
    """`train` takes any object with plan, begin and review."""

    class UpAndDown(ml.Together):
        count = 0

        def plan(self):
            self.count += 1
            return ml.Plan([self.count % 3], [5], [])

    args = ml.parse_args([*SMALL, "--num-iterations", "6", "--log-dir", str(tmp_path)])
    run = ml.train(args, UpAndDown(args))
    assert run.rule.count == 6
    assert run.counters["sim_cost"] == pytest.approx(2 * 20 * (1 + 4 + 16) / 16)


# The sum with control weights ---------------------------------------------------------------------


def test_control_weights_are_the_recursion():
    """est_l = own_l + β_l (est_{l−1} − partners_l): the weighted mean is it, for any β."""
    generator, betas = np.random.default_rng(0), [0.3, 0.8]
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
    """Return the rule of a run on two levels that cost 1 and 40."""
    options = (
        "--env ResSim-v1 --schedule together --levels 2 5 --level-costs 1 40 9 --num-workers 0"
    )
    return ml.Together(ml.parse_args([*options.split(), *words]))


def test_control_weight_is_measured():
    """β = Cov/Var."""
    rule = together("--num-steps", "400", "20")
    assert rule.plan() == ([0, 1], [400, 20], [1.0], False)
    batches, partners = pairs(0.6)
    rule.review(None, batches, partners, {})
    own, sync = batches[1]["advantages"].numpy(), partners[0]["advantages"].numpy()
    (_, covariance), (_, variance) = np.cov(own, sync)
    assert rule.plan().controls[0] == pytest.approx(covariance / variance, rel=1e-4)


def test_useless_coarse_level_is_weighed_out():
    """Without correlation β tends to 0."""
    rule = together("--num-steps", "50", "5")
    rule.review(None, *pairs(0.0), {})
    assert rule.plan().controls[0] < 0.05
    rule.review(None, *pairs(-0.5), {})  # never negative
    assert 0 <= rule.plan().controls[0] < 0.05


def test_control_of_one_is_algorithm_4():
    """--control 1 keeps the weights of Algorithm 4 whatever is measured."""
    rule = together("--num-steps", "50", "5", "--control", "1")
    rule.review(None, *pairs(0.3), {})
    assert rule.plan() == ([0, 1], [50, 5], [1.0], False)


def test_mean_over_iterations():
    """What was measured before counts nine times as much as the newest iteration."""
    rule = together("--num-steps", "50", "5")
    rule.review(None, *pairs(0.9), {})
    first = rule.controls[0]
    rule.review(None, *pairs(0.1), {})
    own, partners = pairs(0.1)
    latest = np.cov(own[1]["advantages"], partners[0]["advantages"])[0, 1]
    variance = pairs(0.9)[1][0]["advantages"].var().item()
    assert rule.controls[0] == pytest.approx(0.9 * first + 0.1 * latest / variance, rel=1e-3)


class Stream(envs.Levels):
    """A flow with a stream function, `psi`."""

    def reset(self, *, seed=None, options=None):
        gym.Env.reset(self, seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 0.0, False, self.t == 10, {}


@pytest.mark.parametrize("psi", [np.zeros(3), lambda self: np.ones(3)])
def test_psi_may_be_something_else(tmp_path, monkeypatch, psi):
    """Without pairs nothing needs psi(), so its name is free."""
    monkeypatch.setattr(Stream, "psi", psi)
    monkeypatch.setattr(envs, "make_stream", Stream, raising=False)
    words = [*SMALL, "--env", "envs:make_stream", "--num-iterations", "1"]
    assert ml.train(ml.parse_args([*words, "--log-dir", str(tmp_path)])).iteration == 1
