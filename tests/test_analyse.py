"""Oracles of --analyse: levels that are the same, have nothing in common, or differ by a shift."""

import csv
import multiprocessing
import re
import sys
from pathlib import Path

import envs
import gymnasium as gym
import numpy as np
import pytest
import torch
from test_multilevel import install

import ppo_multilevel as ml

SMALL = "--num-envs 20 --num-minibatches 2 --hidden 8 --init-log-std -1 --num-workers 0".split()
SMALL += "--level-costs 1e-3 4e-3 1".split()


def test_measured_cost_of_one_level():
    """Without others to compare with, a step takes seconds all the same."""
    args = ml.parse_args("--env ResSim-v1 --levels 1 --num-envs 10".split())
    assert 0 < ml.measured_costs(args, ml.make_model(args))[0] < 0.1


def test_costs_are_measured_in_a_worker(monkeypatch):
    """A solver's threads that have run in a process are lost in those that it forks: GNU OpenMP's
    wait for ever, CUDA does not start."""

    class Threaded(envs.Levels):
        def step(self, action):
            assert multiprocessing.parent_process() is not None, "stepped before workers fork"
            return super().step(action)

    name = install(monkeypatch, Threaded)
    args = ml.parse_args(["--env", name, "--levels", "1", "2", "--num-workers", "2"])
    assert min(ml.measured_costs(args, ml.make_model(args))) > 0


def test_costs_are_measured_with_the_batches_of_the_run(monkeypatch):
    """Of `step_batch` they depend on how many reservoirs each of the workers has."""

    class Batch(envs.Levels):
        @staticmethod
        def step_batch(games, actions):
            assert len(games) == 4
            results = [game.step(action)[:4] for game, action in zip(games, actions)]
            return [*zip(*results)]

    words = ["--env", install(monkeypatch, Batch), "--levels", "1", "2", "--num-envs", "8"]
    args = ml.parse_args([*words, "--num-workers", "2"])
    assert min(ml.measured_costs(args, ml.make_model(args))) > 0


class Line(gym.Env):
    """Three steps, or `longer` on level 1, from a random start; rewards as `reward` says."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-10, 10, (2,), np.float32)

    def __init__(self, level, reward, longer=3):
        self.level, self.reward, self.length = level, reward, longer if level == 1 else 3

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.start = 0, self.np_random.normal()
        return np.array([self.t, self.start], np.float32), {}

    def step(self, action):
        self.t += 1
        reward = float(self.reward(self.level, action, self.start))
        obs = np.array([self.t, self.start], np.float32)
        return obs, reward, self.t >= self.length, False, {}


def analysed(tmp_path, *options):
    """Return the rows of two levels."""
    options = [*SMALL, "--levels", "1", "2", "--log-dir", str(tmp_path), *options]
    return ml.analyse(ml.parse_args(["--analyse", *options]))


def line(monkeypatch, tmp_path, reward, *options, **more):
    """Return the row of the lower one of two Lines."""
    env = install(monkeypatch, lambda level: Line(level, reward, **more))
    return analysed(tmp_path, "--env", env, *options)[0]


def test_identical_levels(monkeypatch, tmp_path):
    """Nothing differs. The coarse level is worth more as it is cheaper, with an update of 1 s."""
    row = line(monkeypatch, tmp_path, lambda level, action, start: start + action[0])
    assert row["difference"] == row["difference_error"] == 0
    assert row["rho"] == pytest.approx(1) and row["rho_error"] == pytest.approx(0, abs=1e-6)
    assert row["step_ms"] == 1 and row["iteration_s"] == pytest.approx(20 * 50 * 1e-3 + 1)
    assert row["worth"] == pytest.approx((4 + 1) / (1 + 1))


def test_independent_levels(monkeypatch, tmp_path):
    """Each level rewards another entry of the action: that starts are alike does not count."""
    row = line(monkeypatch, tmp_path, lambda level, action, start: 5 * start + action[level - 1])
    assert abs(row["rho"]) < 3 * row["rho_error"] and row["rho_error"] < 0.1
    assert row["worth"] < 0.1


def test_opposite_levels(monkeypatch, tmp_path):
    """A level that wants the opposite is worth nothing."""
    row = line(monkeypatch, tmp_path, lambda level, action, start: (2 * level - 3) * action[0])
    assert row["rho"] == pytest.approx(-1) and row["worth"] == 0


def test_level_with_a_known_bias(monkeypatch, tmp_path):
    """A shift of the rewards by 0.5 is one of 1.5 of returns, and does no harm."""
    row = line(monkeypatch, tmp_path, lambda level, action, start: action[0] + 0.5 * (level == 1))
    assert row["difference"] == pytest.approx(1.5, abs=1e-5)
    assert row["rho"] == pytest.approx(1)


def test_known_correlation(monkeypatch, tmp_path):
    """Half of the coarse level's variance is its own: ρ is 1 / √2, within two errors."""
    reward = lambda level, action, start: action[0] + (level == 1) * action[1]  # noqa: E731
    row = line(monkeypatch, tmp_path, reward)
    assert abs(row["rho"] - 0.5**0.5) < 2 * row["rho_error"] < 0.12


def test_every_level_plays_whole_episodes(monkeypatch, tmp_path):
    """A coarse episode of 5 steps counts whole beside fine ones of 3."""
    row = line(monkeypatch, tmp_path, lambda level, action, start: 1 + 1e-3 * action[0], longer=5)
    assert row["difference"] == pytest.approx(2, abs=0.01)
    assert row["return"] == pytest.approx(5, abs=0.01)


def test_jackknife_of_a_mean_is_the_usual_error():
    """Of S starts with an episode each, the standard error of the mean is s / √S."""
    returns = np.random.default_rng(0).normal(size=(2, 30))
    errors = ml.jackknife_errors(returns, np.arange(30))
    assert errors["return"] == pytest.approx(returns.std(axis=1, ddof=1) / 30**0.5)
    differences = returns[0] - returns[1]
    assert errors["difference"][0] == pytest.approx(differences.std(ddof=1) / 30**0.5)


def test_table_and_csv(tmp_path, capsys):
    """Every level has a line and a row; all are in analysis.csv."""
    words = ["--analyse", *SMALL, "--env", "envs:make", "--levels", "1", "2", "3"]
    words += ["--level-costs", "10", "20", "30", "1", "--num-envs", "6"]
    rows = ml.analyse(ml.parse_args([*words, "--log-dir", str(tmp_path)]))
    out = capsys.readouterr().out.partition("measured 10 of 10 times, 0 s left\n")[2].splitlines()
    assert out[0].split()[:3] == ["level", "step_ms", "iteration_s"]
    assert [row.split()[0] for row in out[1:4]] == ["1", "2", "3"] and len(out) == 5
    (path,) = tmp_path.glob("*/analysis.csv")
    assert out[4].endswith(str(path))
    with path.open() as file:
        read = list(csv.DictReader(file))
    assert [row["level"] for row in read] == ["1", "2", "3"]
    assert float(read[1]["rho"]) == rows[1]["rho"]
    assert rows[2]["rho"] == pytest.approx(1)
    assert (rows[2]["difference"], rows[2]["worth"]) == (0, pytest.approx(1))


def test_large_errors_are_shown_without_exponents():
    """An error of 12 is 10, not 1e+01."""
    row = {"level": "1", "return": -345.6, "return_error": 12.3, "worth": 2 / 3}
    assert [ml.cell(row, name) for name in ("return", "worth")] == ["-345.6 ± 10", "0.667"]


def test_any_number_of_workers(tmp_path):
    """Worker processes change no number."""
    one, other = (analysed(tmp_path, "--env", "envs:make", "--num-workers", n) for n in "02")
    assert one == other


def test_run_dir(tmp_path, capsys):
    """The policy and options are those of the run, levels may be others."""
    words = ["--env", "envs:make", "--levels", "1", "2", "3", "--num-iterations", "1", "--quiet"]
    words += [*SMALL[:-4], "--num-steps", "10", "--eval-every", "0", "--log-dir", str(tmp_path)]
    run = ml.train(ml.parse_args(words))
    before = (run.run_dir / "checkpoint.pt").read_bytes()
    args = ml.parse_args(["--analyse", str(run.run_dir), "--levels", "2", "3"])
    assert (args.num_envs, args.level_costs) == (20, None)
    trained = ml.analyse(args)
    assert (run.run_dir / "analysis.csv").exists() and len(trained) == 2
    assert (run.run_dir / "checkpoint.pt").read_bytes() == before
    state = torch.load(run.run_dir / "checkpoint.pt", weights_only=True)
    state["model"]["head.mean.bias"] += 1
    torch.save(state, run.run_dir / "checkpoint.pt")
    assert ml.analyse(args)[1]["return"] != trained[1]["return"]
    for words in (["--analyse", str(run.run_dir)], ["--analyse"]):
        with pytest.raises(SystemExit):  # one level has nothing to be compared with
            ml.parse_args([*words, "--levels", "3"])
        assert "like 1 2 3 (--analyse: at least two)" in capsys.readouterr().err


def test_endless_episodes(monkeypatch, tmp_path, capsys):
    """An analysis ends, and says how many episodes it has cut."""
    monkeypatch.setattr(ml, "EVAL_STEPS", 5)  # of the 10 of an episode
    analysed(tmp_path, "--env", "envs:make")
    assert "120 episodes cut off at 5 steps" in capsys.readouterr().err  # 60 of each level


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("where", ["nan_reward", "step"])
def test_simulation_that_fails(monkeypatch, tmp_path, capsys, where, measured):
    """One error line names the level; what a simulation raises has its traceback below."""
    small = SMALL[: SMALL.index("--level-costs")] if measured else SMALL
    words = ["ppo", "--analyse", "--env", f"envs:make_{where}", "--levels", "1", "2", *small]
    monkeypatch.setattr(sys, "argv", [*words, "--log-dir", str(tmp_path)])
    assert ml.main() == 1
    *lines, first = capsys.readouterr().err.partition("\nTraceback")[0].splitlines()
    assert "level 2" in first and ("NaN" if where == "nan_reward" else "broken") in first
    assert lines == []


@pytest.mark.parametrize(
    "options, words",
    [
        ("--levels 1 2 --level-costs 1 2", ("--level-costs",)),
        ("--levels 1 2 --eval nowhere", ("--analyse", "--eval")),
        ("nowhere", ("nowhere",)),
        ("--coupling=step", ("--coupling", "only with --schedule together")),
        ("--schedule=together --control=1", ("--control", "only with --schedule together")),
    ],
)
def test_wrong_options(tmp_path, capsys, options, words):
    """One line names the option."""
    with pytest.raises(SystemExit) as exit_info:
        ml.parse_args(["--log-dir", str(tmp_path), "--analyse", *options.split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert exit_info.value.code == 2 and all(word in line for word in words)


def test_one_process_only(monkeypatch, tmp_path, capsys):
    """torchrun is refused, as it is for --eval."""
    monkeypatch.setattr(ml, "NUM_RANKS", 2)
    for argv in (["--analyse", "--log-dir", str(tmp_path)], ["--eval", str(tmp_path)]):
        with pytest.raises(SystemExit):
            ml.parse_args(argv)
        assert f"argument {argv[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize("reset", ["super().reset()", "super().reset(seed=seed)"])
def test_starts_that_are_not_of_the_seed(reset, tmp_path, capsys, monkeypatch):
    """ρ says nothing on levels whose starts are chance: one line says so."""
    rod = (Path(ml.__file__).parent / "tests/benchmarks/rod.py").read_text()
    assert "super().reset(seed=seed)" in rod
    (tmp_path / "mine.py").write_text(rod.replace("super().reset(seed=seed)", reset))
    monkeypatch.setattr(ml, "MEASUREMENTS", 1)
    analysed(tmp_path, "--env", f"{tmp_path}/mine.py:make")
    error = capsys.readouterr().err
    assert (ml.SEED_VARIES in error) == ("seed" not in reset)


class Hidden(Line):
    """What an episode starts from does not show before the first step."""

    def __init__(self, level, told):
        super().__init__(level, lambda level, action, start: start + action[0])
        self.told = told

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        if self.told:
            self.start = self.np_random.normal(size=self.level)[-1]
        return np.zeros_like(obs), info


@pytest.mark.parametrize("told", [False, True])
def test_levels_that_start_unlike_in_what_is_hidden(told, monkeypatch, tmp_path, capsys):
    """First observations that are all the same tell nothing: those after a step are compared."""
    env = install(monkeypatch, lambda level: Hidden(level, told))
    monkeypatch.setattr(ml, "MEASUREMENTS", 1)
    analysed(tmp_path, "--env", env)
    assert ("levels start unlike" in capsys.readouterr().err) == told


def test_analysis_that_is_stopped(monkeypatch, tmp_path, capsys):
    """It has written and told what it has found, and how long the rest would take."""
    real = ml.play_alike

    def play_alike(model, pool, args, number):
        if number == 3:
            raise KeyboardInterrupt
        return real(model, pool, args, number)

    monkeypatch.setattr(ml, "play_alike", play_alike)
    env = install(monkeypatch, lambda level: Line(level, lambda level, action, start: action[0]))
    with pytest.raises(KeyboardInterrupt):
        analysed(tmp_path, "--env", env)
    (path,) = tmp_path.glob("*/analysis.csv")
    with path.open() as file:
        assert [float(row["rho"]) for row in csv.DictReader(file)] == pytest.approx([1, 1])
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert len(tables) == 3
    for number, (line, header, *rows) in enumerate(map(str.splitlines, tables), start=1):
        assert re.fullmatch(rf"measured {number} of 10 times, \d+ s left", line)
        assert header.split()[-2:] == ["rho", "worth"]
        assert [row.split()[0] for row in rows] == ["1", "2"]


@pytest.mark.parametrize("drawn, told", [(True, False), (True, True), (False, False)])
def test_levels_that_start_unlike(drawn, told, monkeypatch, tmp_path, capsys):
    """A seed that is not one state on both levels is told if, without map_from, it starts both."""

    class Drawn(envs.Levels):
        map_from = property()  # hasattr says no

        def reset(self, **options):
            super().reset(**options)
            self.np_random.random(self.level * told)  # another number on each level
            self.state = self.np_random.normal(size=2)
            if not drawn:  # one start, on each level a little else: they are alike
                self.state = np.array([0.1, 0.3]) * (1 + 0.01 * self.level)
            return self.psi(), {}

        def psi(self):
            return self.state.astype(np.float32)

    words = ["--analyse", "--env", install(monkeypatch, Drawn), "--levels", "2", "3", *SMALL]
    monkeypatch.setattr(ml, "MEASUREMENTS", 1)
    ml.analyse(ml.parse_args([*words, "--log-dir", str(tmp_path)]))
    assert ("levels start unlike" in capsys.readouterr().err) == told


# Baselines ----------------------------------------------------------------------------------------


RULE = """
import numpy as np

def rule(obs):
    obs[:] = 0  # which is its own copy
    return np.full(2, 0.5)

def broken(obs):
    return [1.0, 2.0, 3.0]

def nothing(obs):
    pass

def undefined(obs):
    return [np.nan, 0.0]

def physical(obs):
    return [200.0, -40.0]

def half(obs):
    return [200.0, 0.5]
"""
BASED = "--levels 1 2 --num-envs 4 --num-minibatches 2 --hidden 8 --level-costs 1 2 0.1".split()
BASED += "--check-episodes 2 --eval-every 1 --eval-episodes 4 --num-iterations 2".split()


@pytest.fixture
def based(tmp_path, monkeypatch):
    """Return the options of a run whose rewards are the first entry of the action, three times."""
    (tmp_path / "rule.py").write_text(RULE)
    env = install(monkeypatch, lambda level: Line(level, lambda level, action, start: action[0]))
    words = ["--env", env, *BASED, "--log-dir", str(tmp_path / "runs")]
    return [*words, "--baseline", f"{tmp_path}/rule.py:rule"]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_baseline(based, capsys, workers):
    """The function's return stands beside every evaluation; it changes nothing of the run."""
    run = ml.train(ml.parse_args([*based, "--num-workers", workers]))
    out = capsys.readouterr().out
    assert out.count("baseline: return 1.5000 ± 0.0000\n") == 1
    assert "baseline_return 1.5" in out
    assert [row["baseline_return"] for row in run.history] == [1.5] * 3
    plain = ml.train(ml.parse_args([*based[:-2], "--num-workers", workers, "--quiet"]))
    assert plain.history[-1]["eval_return"] == run.history[-1]["eval_return"]
    assert "baseline_return" not in plain.history[-1]

    capsys.readouterr()
    resume = ["--resume", str(run.run_dir), "--num-iterations", "3", "--quiet"]
    again = ml.train(ml.parse_args([*resume, "--eval-episodes", "3"]))  # it is played again
    assert again.history[-1]["baseline_return"] == 1.5
    assert capsys.readouterr().out == "baseline: return 1.5000 ± 0.0000\n"


def test_baseline_beside_an_evaluation(based, capsys, monkeypatch):
    """--eval plays it in the same episodes, and tells what the policy gains."""
    run = ml.train(ml.parse_args([*based[:-2], "--num-workers", "0", "--quiet"]))
    words = ["ppo", "--eval", str(run.run_dir), *based[-2:]]
    monkeypatch.setattr(sys, "argv", words)
    assert ml.main() == 0
    evaluation, baseline, gain = capsys.readouterr().out.splitlines()
    assert baseline == "baseline: return 1.5000 ± 0.0000"
    returned = float(evaluation.split()[1])
    assert float(gain.split()[3]) == pytest.approx(returned - 1.5, abs=1e-3)


@pytest.mark.parametrize(
    "change, words",
    [
        (("rule.py:rule", "rule.py:none"), "argument --baseline: AttributeError: .*none"),
        (("rule.py:rule", "nowhere.py:rule"), "argument --baseline: .*no file .*nowhere.py"),
        (("--eval-every", "--save-every"), "argument --baseline: .*--eval-every"),
        (("rule.py:rule", "rule.py:broken"), r"argument --baseline: ValueError: .*into shape \(2,"),
        (("rule.py:rule", "rule.py:nothing"), r"argument --baseline: \w+Error"),
        (("rule.py:rule", "rule.py:undefined"), "argument --baseline: ValueError: NaN"),
    ],
)
def test_wrong_baseline(based, capsys, monkeypatch, change, words):
    """One line says what is wrong."""
    based = [word.replace(*change) for word in based]
    if change[0] == "--eval-every":
        based += ["--eval-every", "0"]
    monkeypatch.setattr(sys, "argv", ["ppo", *based, "--num-workers", "0", "--quiet"])
    try:
        code = ml.main()
    except SystemExit as error:
        code = error.code
    assert code in (1, 2)
    assert re.search(words, capsys.readouterr().err.splitlines()[0])


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("name, told", [("physical", True), ("half", False)])
def test_baseline_in_other_units(based, capsys, name, told, workers):
    """Actions that the Box clips make a rule look bad: a line says so."""
    based = [word.replace("rule.py:rule", f"rule.py:{name}") for word in based]
    ml.baseline_returns(ml.parse_args([*based, "--num-workers", workers]))
    line = "baseline: 100% of its last actions lie outside the Box"
    assert (line in capsys.readouterr().err) == told


def test_baseline_of_choices(tmp_path, monkeypatch):
    """A function gives the action as the env takes it: counted from `start`."""

    class Choice(Line):
        action_space = gym.spaces.Discrete(3, start=5)

    (tmp_path / "rule.py").write_text("def rule(obs):\n    return 6\n")
    env = install(monkeypatch, lambda level: Choice(level, lambda level, action, start: action))
    words = ["--env", env, *BASED, "--log-dir", str(tmp_path), "--num-workers", "0"]
    args = ml.parse_args([*words, "--baseline", f"{tmp_path}/rule.py:rule"])
    assert (ml.baseline_returns(args) == 3 * 6).all()
