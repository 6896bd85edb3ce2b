"""Oracles of --analyse: levels that are the same, have nothing in common, or differ by a shift."""

import csv
import itertools
import multiprocessing
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
    args = ml.parse_args("--env ResSim-v1 --levels 1 --num-envs 10 --analyse".split())
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

    def psi(self):
        return np.array([self.t, self.start], np.float32)

    def map_from(self, other):
        self.t, self.start = other.t, other.start

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.start = 0, self.np_random.normal()
        return self.psi(), {}

    def step(self, action):
        self.t += 1
        reward = float(self.reward(self.level, action, self.start))
        return self.psi(), reward, self.t >= self.length, False, {}


def analysed(tmp_path, *options):
    """Return the row of a pair of two levels, and the finest level's."""
    options = [*SMALL, "--levels", "1", "2", "--log-dir", str(tmp_path), *options]
    return ml.analyse(ml.parse_args(["--analyse", *options]))


def line(monkeypatch, tmp_path, reward, *options, **more):
    """Return the row of a pair of Lines."""
    env = install(monkeypatch, lambda level: Line(level, reward, **more))
    return analysed(tmp_path, "--env", env, *options)[0]


@pytest.mark.parametrize("coupling", ["step", "noise"])
def test_identical_levels(monkeypatch, tmp_path, coupling):
    """Nothing differs, so that the coarse level is enough; a partner led by step does not tell."""
    reward = lambda level, action, start: start + action[0]  # noqa: E731
    row = line(monkeypatch, tmp_path, reward, "--coupling", coupling)
    assert row["difference"] == row["difference_error"] == row["kurtosis"] == 0
    assert row["rho_return"] == pytest.approx(1) and row["rho_adv"] == pytest.approx(1)
    assert row["var_ratio"] == pytest.approx(0, abs=1e-9) and row["check"] < 1
    found = {"noise": "enough on its own", "step": "no verdict"}[coupling]
    assert row["saving"] == pytest.approx(4) and row["verdict"].startswith(found)


def test_independent_levels(monkeypatch, tmp_path):
    """Each level rewards another entry of the action: that starts are alike does not count."""
    reward = lambda level, action, start: 5 * start + action[level - 1]  # noqa: E731
    row = line(monkeypatch, tmp_path, reward)
    assert abs(row["rho_return"]) < 0.35 and abs(row["rho_return"]) < 2 * row["rho_return_error"]
    assert row["saving"] < 1 and row["check"] < 1 and "drop it" in row["verdict"]


@pytest.mark.parametrize("error, verdict", [(0.15, "drop it"), (0.25, "no v"), (np.nan, "no v")])
def test_few_episodes(error, verdict):
    """A level is dropped if its ρ is surely small."""
    row = {"rho_return": 0.4, "rho_return_error": error, "kurtosis": 3, "check": 0, "saving": 1}
    row |= {"difference": 0, "return": 1}
    assert ml.verdict(row).startswith(verdict)


def test_level_with_a_known_bias(monkeypatch, tmp_path):
    """A shift of the rewards by 0.5 is one of 1.5 of returns, and does no harm."""
    reward = lambda level, action, start: action[0] + 0.5 * (level == 1)  # noqa: E731
    row = line(monkeypatch, tmp_path, reward)
    assert row["difference"] == pytest.approx(-1.5, abs=1e-5)
    assert row["rho_return"] == pytest.approx(1) and row["check"] < 1
    assert "enough on its own" in row["verdict"] and "bias 1.5" in row["verdict"]
    assert row["verdict"].endswith("diverge?")  # the shift is most of the return, which is near 0


@pytest.mark.parametrize("difference, warns", [(0.9, False), (1.1, True), (-0.6, True), (-2, True)])
def test_returns_that_differ(difference, warns):
    """By half of the larger one: a sum over cells is no mean, a solver may have diverged."""
    row = {"rho_return": 0.99, "rho_return_error": 0.01, "kurtosis": 3, "check": 0, "saving": 9}
    row |= {"difference": difference, "return": 1}
    assert ("same rewards, lengths?" in ml.verdict(row)) is warns


def test_known_correlation(monkeypatch, tmp_path):
    """Half of the coarse level's variance is its own: ρ is 1 / √2, within the error told."""
    reward = lambda level, action, start: action[0] + (level == 1) * action[1]  # noqa: E731
    row = line(monkeypatch, tmp_path, reward, "--num-envs", "100")
    assert abs(row["rho_return"] - 0.5**0.5) < 1.5 * row["rho_return_error"] < 0.12


@pytest.mark.parametrize("coupling, difference", [("noise", -2), ("step", 0)])
def test_partner_plays_its_own_episode(monkeypatch, tmp_path, coupling, difference):
    """A coarse episode of 5 steps counts whole, unless the partner is where its fine game is."""
    reward = lambda level, action, start: 1 + 1e-3 * action[0]  # noqa: E731
    row = line(monkeypatch, tmp_path, reward, "--coupling", coupling, longer=5)
    assert row["difference"] == pytest.approx(difference, abs=0.01)
    assert row["return"] == pytest.approx(5, abs=0.01)
    assert (row["check"] > 1) == (coupling == "step") == ("no verdict" in row["verdict"])


def test_levels_without_map_from(tmp_path, capsys):
    """Pairs have seeds and noise in common, in each repetition of a start."""
    row = analysed(tmp_path, "--env", "envs:make_cartpole")[0]
    assert row["difference"] == 0 and row["rho_return"] == pytest.approx(1)
    assert row["return_error"] > 0


@pytest.mark.parametrize("coupling", ["step", "noise"])
def test_consistency_on_resim(tmp_path, coupling):
    """The paper's coupling has the wrong law where coarse grids do not see the thief zones."""
    row = analysed(tmp_path, "--env", "ResSim-v3", "--coupling", coupling, "--num-envs", "10")[0]
    assert (row["check"] > 1) == (coupling == "step")


def test_saving():
    """Hand values: ρ = 0.9 with levels 4 and 68 times cheaper; ρ < 0 is as 0."""
    assert ml.saving(0.9, 1, 1 / 4)[0] == pytest.approx(1.138, abs=1e-3)
    assert ml.saving(0.9, 1, 1 / 68)[0] == pytest.approx(3.327, abs=1e-3)
    assert ml.saving(0.6, 3, 1)[1] == pytest.approx((0.36 * 4 / 0.64) ** 0.5)
    assert ml.saving(-0.5, 3, 1)[0] == pytest.approx(3 / 4)


def test_table_and_csv(tmp_path, capsys):
    """Every pair has a line and a row, levels but the finest a verdict; all in analysis.csv."""
    costs = ["--level-costs", "10", "20", "30", "1", "--num-envs", "5"]
    words = ["--analyse", *SMALL, "--env", "envs:make", "--levels", "1", "2", "3", *costs]
    rows = ml.analyse(ml.parse_args([*words, "--log-dir", str(tmp_path)]))
    out = capsys.readouterr().out.splitlines()
    # 500 steps alone on 1, 2, 3, in pairs on 1 2, 1 3, 2 3: 500 · (6 + 3 + 4 + 5) · 10 s.
    assert out[0] == "50 episodes of every level and pair: about 90000 s"
    assert out[1].split()[:4] == ["level", "against", "step_ms", "return"]
    assert [line.split()[:2] for line in out[2:5]] == [["1", "2"], ["1", "3"], ["2", "3"]]
    assert out[6].startswith("level 1: ") and out[7].startswith("level 2: ") and len(out) == 9
    (path,) = tmp_path.glob("*/analysis.csv")
    assert out[8].endswith(str(path))
    with path.open() as file:
        read = list(csv.DictReader(file))
    assert [(r["level"], r["against"]) for r in read] == [
        ("1", "2"),
        ("1", "3"),
        ("2", "3"),
        ("3", ""),
    ]
    assert float(read[1]["rho_adv"]) == rows[1]["rho_adv"] and read[1]["verdict"]
    assert float(read[3]["return"]) == rows[3]["return"] and not read[3]["rho_adv"]


def test_large_errors_are_shown_without_exponents(tmp_path, capsys, monkeypatch):
    """An error of 12 is 10, not 1e+01."""
    monkeypatch.setattr(ml, "jackknife", lambda *_: {"return": -345.6, "return_error": 12.3})
    monkeypatch.setattr(ml, "compare", lambda coarse, fine, pair: coarse | {"against": 2})
    monkeypatch.setattr(ml, "verdict", lambda *_: "none")
    analysed(tmp_path, "--env", "envs:make")
    assert "-345.6 ± 10" in capsys.readouterr().out.splitlines()[2]


def test_any_number_of_workers(tmp_path):
    """Worker processes change no number."""
    one, other = (analysed(tmp_path, "--env", "envs:make", "--num-workers", n) for n in "02")
    assert one[0] == other[0] and one[1] == other[1]


def test_run_dir(tmp_path, capsys):
    """The policy and options are those of the run, levels and coupling may be others."""
    words = ["--env", "envs:make", "--levels", "1", "2", "3", "--num-iterations", "1", "--quiet"]
    options = [*SMALL[:-4], "--num-steps", "10", "--eval-every", "0", "--log-dir", str(tmp_path)]
    run = ml.train(ml.parse_args([*words, *options, "--schedule", "together", "--num-steps"]
                                 + ["10", "5", "5"]))  # fmt: skip
    before = (run.run_dir / "checkpoint.pt").read_bytes()
    args = ml.parse_args(["--analyse", str(run.run_dir), "--levels", "2", "3"])
    assert (args.num_envs, args.coupling, args.level_costs) == (20, "noise", None)
    trained = ml.analyse(args)
    assert (run.run_dir / "analysis.csv").exists() and len(trained) == 2
    assert (run.run_dir / "checkpoint.pt").read_bytes() == before
    state = torch.load(run.run_dir / "checkpoint.pt", weights_only=True)
    state["model"]["head.mean.bias"] += 1
    torch.save(state, run.run_dir / "checkpoint.pt")
    assert ml.analyse(args)[1]["return"] != trained[1]["return"]
    with pytest.raises(SystemExit):  # one level has nothing to be compared with
        ml.parse_args(["--analyse", str(run.run_dir), "--levels", "3"])
    assert "like 1 2 3 (--analyse: two up)" in capsys.readouterr().err


def test_endless_episodes(monkeypatch, tmp_path, capsys):
    """An analysis ends, and says how many episodes it has cut."""
    monkeypatch.setattr(ml, "EVAL_STEPS", 5)  # of the 10 of an episode
    analysed(tmp_path, "--env", "envs:make")
    assert "600 episodes cut off at 5 steps" in capsys.readouterr().out  # 200 of 1, of 2, of pairs


def test_lengths_that_differ(tmp_path, monkeypatch, capsys):
    """A level whose episodes end early, as those of a solver that diverges, is told; others not."""
    for quiet in ("envs:make", "envs:make_cartpole"):  # which is random on both
        analysed(tmp_path, "--env", quiet)
    assert "does a level diverge?" not in capsys.readouterr().err
    real = envs.Levels.step

    def step(env, action):
        obs, reward, terminated, truncated, info = real(env, action)
        return obs, reward, terminated or env.level == 1 and env.t == 3, truncated, info

    monkeypatch.setattr(envs.Levels, "step", step)
    analysed(tmp_path, "--env", "envs:make")
    assert "episodes of [3.0, 10.0] steps: does a level diverge?" in capsys.readouterr().err


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("where", ["nan_reward", "step"])
def test_simulation_that_fails(monkeypatch, tmp_path, capsys, where, measured):
    """One error line names the level; what a simulation raises has its traceback below."""
    small = SMALL[: SMALL.index("--level-costs")] if measured else SMALL
    words = ["ppo", "--analyse", "--env", f"envs:make_{where}", "--levels", "1", "2", *small]
    monkeypatch.setattr(sys, "argv", [*words, "--log-dir", str(tmp_path)])
    assert ml.main() == 1
    *lines, first = capsys.readouterr().err.partition("\nTraceback")[0].splitlines()
    assert "level 2" in first and ("rewards" if where == "nan_reward" else "broken") in first
    assert lines == ["reset(seed) varies: README, Randomness"] * measured  # they count episodes


@pytest.mark.parametrize(
    "options, words",
    [
        ("--levels 1 2 --level-costs 1 2", ("--level-costs",)),
        ("--levels 1 2 --eval nowhere", ("--analyse", "--eval")),
        ("nowhere", ("nowhere",)),
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


@pytest.mark.parametrize("name", ["v1-noise", "v3-noise", "v3-step", "v4-noise", "rod-noise"])
def test_recorded_verdicts(name):
    """The verdicts of the recorded analyses are those that the script gives of their numbers."""
    with (Path(__file__).parent / f"benchmarks/results/analysis/{name}.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["verdict"]]
    assert len(rows) == {"v1": 4}.get(name[:2], 3)
    for row in rows:
        numbers = {name: float(row[name]) for name in itertools.takewhile("verdict".__ne__, row)}
        assert row["verdict"] == ml.verdict(numbers)


@pytest.mark.parametrize("reset", ["super().reset()", "super().reset(seed=seed)"])
def test_starts_that_are_not_of_the_seed(reset, tmp_path, capsys, monkeypatch):
    """No verdict on levels whose starts are chance: one line, that says so."""
    rod = (Path(ml.__file__).parent / "tests/benchmarks/rod.py").read_text()
    assert "super().reset(seed=seed)" in rod
    (tmp_path / "mine.py").write_text(rod.replace("super().reset(seed=seed)", reset))
    words = ["ppo", "--analyse", "--env", f"{tmp_path}/mine.py:make", "--levels", "1", "2", *SMALL]
    monkeypatch.setattr(sys, "argv", [*words, "--log-dir", str(tmp_path)])
    assert ml.main() == ("seed" not in reset)
    error = capsys.readouterr().err
    assert ("error: level 1 or 2: starts from one seed differ" in error) == ("seed" not in reset)


@pytest.mark.parametrize("drawn, told", [(True, False), (True, True), (False, False)])
def test_pairs_that_start_unlike(drawn, told, monkeypatch, tmp_path, capsys):
    """A seed that is not one state on both levels is told if, without map_from, it starts both."""

    class Drawn(envs.Levels):
        map_from = property()  # hasattr says no

        def reset(self, **options):
            super().reset(**options)
            self.np_random.random(self.level * told)  # another number on each level
            self.state = self.np_random.normal(size=2)
            if not drawn:  # one start, on each level a little else: no unlike pairs
                self.state = np.array([0.1, 0.3]) * (1 + 0.01 * self.level)
            return self.psi(), {}

        def psi(self):
            return self.state.astype(np.float32)

    words = ["--analyse", "--env", install(monkeypatch, Drawn), "--levels", "2", "3", *SMALL]
    ml.analyse(ml.parse_args([*words, "--log-dir", str(tmp_path)]))
    assert ("level 2 or 3: pairs start unlike" in capsys.readouterr().err) == told
