"""Oracles of --analyse: levels that are the same, have nothing in common, or differ by a shift."""

import csv
import multiprocessing
import sys
import types

import envs
import gymnasium as gym
import numpy as np
import pytest
import torch
from test_multilevel import install

import ppo_multilevel as ml

SMALL = "--num-envs 20 --num-minibatches 2 --hidden 8 --init-log-std -1 --num-workers 0".split()
SMALL += "--level-costs 1e-3 4e-3 1".split()


def test_costs_are_measured_in_a_worker(monkeypatch):
    """A solver's threads that have run in a process are lost in those that it forks: GNU OpenMP's
    wait for ever, CUDA does not start."""

    class Threaded(envs.Levels):
        def step(self, action):
            assert multiprocessing.parent_process() is not None, "stepped before workers fork"
            return super().step(action)

    name = install(monkeypatch, Threaded)
    args = ml.parse_args(["--env", name, "--levels", "1", "2", "--num-workers", "2"])
    assert min(measured_costs(args)) > 0


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
    assert min(measured_costs(args)) > 0


def measured_costs(args):
    """Return what a step takes on each level."""
    model = ml.make_model(args)
    with ml.closing(ml.Simulations(args, model)) as sims:
        sims.measure_costs(model)
        return [sims.costs.step(level) for level in range(len(args.levels))]


class Line(gym.Env):
    """Three steps, or `longer` on level 1, from a random start; rewards as `reward` says."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-10, 10, (2,), np.float32)

    def __init__(self, level, reward, longer=3):
        self.level = level
        self.reward = reward
        self.length = longer if level == 1 else 3

    def observe(self):
        return np.array([self.t, self.start], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.start = self.np_random.normal()
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        reward = float(self.reward(self.level, action, self.start))
        return self.observe(), reward, self.t >= self.length, False, {}


def analysed(tmp_path, *options):
    """Return the rows of two levels."""
    options = [*SMALL, "--levels", "1", "2", "--log-dir", str(tmp_path), *options]
    return ml.analyse(ml.parse_args(["--analyse", *options]))


def line(monkeypatch, tmp_path, reward, measurements=1, **more):
    """Return the rows of two Lines."""
    monkeypatch.setattr(ml, "MEASUREMENTS", measurements)
    env = install(monkeypatch, lambda level: Line(level, reward, **more))
    return analysed(tmp_path, "--env", env)


def test_identical_levels(monkeypatch, tmp_path):
    """Nothing differs. The coarse level is worth more as it is cheaper, with an update of 1 s."""
    row, finest = line(monkeypatch, tmp_path, lambda level, action, start: start + action[0])
    assert row["return"] == finest["return"]
    assert row["rho"] == pytest.approx(1) and row["rho_error"] == pytest.approx(0, abs=1e-6)
    assert (row["step_ms"], finest["step_ms"]) == (1, 4)
    assert row["worth"] == pytest.approx((4 + 1) / (1 + 1))  # an update of 1,000 rows is 1 ms each
    assert (finest["rho"], finest["worth"]) == pytest.approx((1, 1))


def test_independent_levels(monkeypatch, tmp_path):
    """Each level rewards another entry of the action: that starts are alike does not count."""
    reward = lambda level, action, start: 5 * start + action[level - 1]  # noqa: E731
    row, _ = line(monkeypatch, tmp_path, reward, measurements=10)
    assert abs(row["rho"]) < 3 * row["rho_error"] and row["rho_error"] < 0.1
    assert row["worth"] < 0.1


def test_opposite_levels(monkeypatch, tmp_path):
    """A level that wants the opposite is worth nothing."""
    row, _ = line(monkeypatch, tmp_path, lambda level, action, start: (2 * level - 3) * action[0])
    assert row["rho"] == pytest.approx(-1) and row["worth"] == 0


def test_level_with_a_known_bias(monkeypatch, tmp_path):
    """A shift of the rewards by 0.5 is one of 1.5 of returns, and does no harm."""
    reward = lambda level, action, start: action[0] + 0.5 * (level == 1)  # noqa: E731
    row, finest = line(monkeypatch, tmp_path, reward)
    assert row["return"] - finest["return"] == pytest.approx(1.5, abs=1e-5)
    assert row["rho"] == pytest.approx(1)


def test_known_correlation(monkeypatch, tmp_path):
    """Half of the coarse level's variance is its own: ρ is 1 / √2, within two errors."""
    reward = lambda level, action, start: action[0] + (level == 1) * action[1]  # noqa: E731
    row, _ = line(monkeypatch, tmp_path, reward, measurements=10)
    assert abs(row["rho"] - 0.5**0.5) < 2 * row["rho_error"] < 0.12


def test_every_level_plays_whole_episodes(monkeypatch, tmp_path):
    """A coarse episode of 5 steps counts whole beside fine ones of 3."""
    reward = lambda level, action, start: 1 + 1e-3 * action[0]  # noqa: E731
    row, finest = line(monkeypatch, tmp_path, reward, longer=5)
    assert row["return"] == pytest.approx(5, abs=0.01)
    assert finest["return"] == pytest.approx(3, abs=0.01)


def test_rows_are_correlations_with_the_jackknifes_errors():
    """ρ by NumPy's corrcoef of what differs within starts; its error from leaving out each start:
    √((S − 1) / S Σ (ρ₋ₛ − mean)²)."""
    generator = np.random.default_rng(0)
    starts = np.repeat(np.arange(10), 8)
    finest = generator.normal(size=80)
    coarse = finest + generator.normal(size=80)
    args = types.SimpleNamespace(levels=[3, 5], num_envs=10, num_steps=[2, 2])
    args.level_costs = [0.25, 2.0, 10.0]
    sims = types.SimpleNamespace(args=args, costs=ml.Costs(args))

    def rho(kept):
        centred = np.stack([coarse, finest]).reshape(2, 10, 8)[:, kept]
        centred = centred - centred.mean(axis=2, keepdims=True)
        return np.corrcoef(centred.reshape(2, -1))[0, 1]

    without = np.array([rho(np.arange(10) != start) for start in range(10)])
    row, _ = ml.level_rows(sims, np.stack([coarse + 7 * starts, finest - starts]), starts)
    expected = rho(np.arange(10))
    assert row["rho"] == pytest.approx(expected)
    error = (9 / 10 * np.square(without - without.mean()).sum()) ** 0.5
    assert row["rho_error"] == pytest.approx(error)
    assert (row["level"], row["step_ms"]) == (3, 250)
    assert row["return"] == pytest.approx((coarse + 7 * starts).mean())
    assert row["worth"] == pytest.approx(expected**2 * 2.5 / 0.75)  # 10 s are 0.5 s a row


def test_table_and_csv(tmp_path, monkeypatch, capsys):
    """Every level has a line and a row; all are in analysis.csv."""
    monkeypatch.setattr(ml, "MEASUREMENTS", 2)
    words = ["--analyse", *SMALL, "--env", "envs:make", "--levels", "1", "2", "3"]
    words += ["--level-costs", "10", "20", "30", "1", "--num-envs", "6"]
    rows = ml.analyse(ml.parse_args([*words, "--log-dir", str(tmp_path)]))
    out = capsys.readouterr().out.partition("measured 2 of 2 times; ")[2].splitlines()[1:]
    names = ["level", "step_ms", "return", "rho", "rho_error", "worth"]
    assert out[0].split() == names == list(rows[0])
    assert [row.split()[0] for row in out[1:4]] == ["1", "2", "3"] and len(out) == 5
    assert float(out[2].split()[3]) == pytest.approx(rows[1]["rho"], rel=1e-3)
    (path,) = tmp_path.glob("*/analysis.csv")
    assert out[4] == f"table: {path}"
    with path.open() as file:
        read = list(csv.DictReader(file))
    assert [row["level"] for row in read] == ["1", "2", "3"]
    assert float(read[1]["rho"]) == rows[1]["rho"]


def test_any_number_of_workers(tmp_path, monkeypatch):
    """Worker processes change no number."""
    monkeypatch.setattr(ml, "MEASUREMENTS", 2)
    one, other = (analysed(tmp_path, "--env", "envs:make", "--num-workers", n) for n in "02")
    assert one == other


def test_run_dir(tmp_path, monkeypatch):
    """The policy and options are those of the run, levels may be others."""
    monkeypatch.setattr(ml, "MEASUREMENTS", 1)
    words = ["--env", "envs:make", "--levels", "1", "2", "3", "--num-iterations", "1", "--quiet"]
    words += [*SMALL, "--level-costs", "1", "2", "3", "1", "--num-steps", "10", "--eval-every", "0"]
    run = ml.train(ml.parse_args([*words, "--log-dir", str(tmp_path)]))
    before = (run.run_dir / "checkpoint.pt").read_bytes()
    words = ["--analyse", "--eval", str(run.run_dir)]
    assert ml.parse_args(words).level_costs == [1, 2, 3, 1]
    args = ml.parse_args([*words, "--levels", "2", "3"])
    assert (args.num_envs, args.level_costs) == (20, None)
    trained = ml.analyse(args)
    assert (run.run_dir / "analysis.csv").exists()
    assert [row["level"] for row in trained] == [2, 3]
    assert (run.run_dir / "checkpoint.pt").read_bytes() == before
    state = torch.load(run.run_dir / "checkpoint.pt", weights_only=True)
    state["model"]["head.output.bias"] += 1
    torch.save(state, run.run_dir / "checkpoint.pt")
    assert ml.analyse(args)[1]["return"] != trained[1]["return"]


def test_simulation_that_fails(monkeypatch, tmp_path, capsys):
    """One error line names the level; what the simulation raises has its traceback below."""
    words = ["ppo", "--analyse", "--env", "envs:make_step", "--levels", "1", "2", *SMALL]
    monkeypatch.setattr(sys, "argv", [*words, "--log-dir", str(tmp_path)])
    assert ml.main() == 1
    *lines, first = capsys.readouterr().err.partition("\nTraceback")[0].splitlines()
    assert "level 2" in first and "failed in step: RuntimeError: broken on purpose" in first
    assert lines == []


@pytest.mark.parametrize(
    "options, words",
    [
        ("--levels 1 2 --level-costs 1 2", ("--level-costs", "give 3 numbers")),
        ("--levels 3", ("--analyse", "two levels or more")),
        ("--eval nowhere", ("No such file", "nowhere")),
    ],
)
def test_wrong_options(tmp_path, capsys, monkeypatch, options, words):
    """One line says what is wrong."""
    argv = ["ppo", "--analyse", *options.split(), "--log-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    try:
        code = ml.main()
    except SystemExit as error:
        code = error.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and all(word in line for word in words)


def test_analysis_that_is_stopped(monkeypatch, tmp_path, capsys):
    """It has written and told what it has found."""
    real = ml.play_alike

    def play_alike(model, sims, number):
        if number == 3:
            raise KeyboardInterrupt
        return real(model, sims, number)

    monkeypatch.setattr(ml, "play_alike", play_alike)
    env = install(monkeypatch, lambda level: Line(level, lambda level, action, start: action[0]))
    with pytest.raises(KeyboardInterrupt):
        analysed(tmp_path, "--env", env)
    (path,) = tmp_path.glob("*/analysis.csv")
    assert path.parent.name.endswith("__analysis")  # it is not the folder of a run
    with path.open() as file:
        assert [float(row["rho"]) for row in csv.DictReader(file)] == pytest.approx([1, 1])
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert len(tables) == 3
    for number, (line, header, *rows, last) in enumerate(map(str.splitlines, tables), start=1):
        divided = "step_ms is the time of a step divided by the number of workers"
        assert line == f"measured {number} of 10 times; {divided}"
        assert header.split()[-1] == "worth"
        assert [row.split()[0] for row in rows] == ["1", "2"]
        assert last == f"table: {path}"
