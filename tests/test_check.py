"""Tests of --check: what it prints of simulations that are known, right or wrong."""

import multiprocessing
import re

import gymnasium as gym
import numpy as np
import pytest
from test_adaptive import Solver
from test_multilevel import install

import ppo_multilevel as ml

WORDS = "--levels 1 2 --num-envs 4 --num-minibatches 2 --hidden 8 --num-workers 0".split()


class Pendulum(gym.Env):
    """A swing of ten steps that is right on all levels; its flaws are attributes."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    end = "terminated"
    scale = 1.0

    def __init__(self, level):
        self.level = level

    def see(self):
        return np.float32(self.scale * self.state)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.state = self.np_random.normal(size=2)
        return self.see(), {}

    def step(self, action):
        self.t += 1
        position, speed = self.state
        speed += 0.1 * (float(action[0]) - position)
        self.state = np.array([position + 0.1 * speed / self.level, speed])
        over = self.t == 10
        terminated = over and self.end == "terminated"
        return (
            self.see(),
            -0.1 * self.scale * abs(position),
            terminated,
            over and not terminated,
            {},
        )


class Unseeded(Pendulum):
    """Its starts are chance."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None)


class Unlike(Pendulum):
    """A seed is another start on each level."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None if seed is None else seed * 10 + self.level)


class Forgetful(Pendulum):
    """It has a state that get_state forgets."""

    def get_state(self):
        return 0

    def set_state(self, state):
        pass


class Hidden(Pendulum):
    """It draws from a generator that a replay does not know."""

    private = np.random.default_rng(1)

    def step(self, action):
        self.state = self.state + 1e-3 * self.private.normal(size=2)
        return super().step(action)


class Lottery(Pendulum):
    """It draws from NumPy's own generator, which a resumed run does not have as it was."""

    def step(self, action):
        self.state = self.state + 1e-3 * np.random.normal(size=2)
        return super().step(action)


class Diverging(Pendulum):
    """Its rewards are NaN after a while."""

    def step(self, action):
        obs, reward, *ends = super().step(action)
        return obs, np.nan if self.t > 5 else reward, *ends


class Careless(Pendulum):
    """It changes the action that it gets: this is no flaw."""

    def step(self, action):
        action *= 0.5
        return super().step(action)


class Long(Pendulum):
    """Its episodes are cut after ten steps by a time limit."""

    end = "truncated"


class Large(Pendulum):
    """Its numbers are far from 1."""

    scale = 1e4


class Small(Pendulum):
    """Its numbers are far below 1."""

    scale = 1e-6


class Summed(Pendulum):
    """Its rewards are sums over cells, of which each level has four times as many."""

    def step(self, action):
        obs, reward, *ends = super().step(action)
        return obs, reward * 4**self.level, *ends


class Physical(Pendulum):
    """Its actions are in other units."""

    action_space = gym.spaces.Box(0, 500, (1,), np.float32)

    def step(self, action):
        return super().step(action / 250 - 1)


class Endless(Pendulum):
    """Its episodes do not end for a long time."""

    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        return obs, reward, self.t == 1005, False, info


def checked(monkeypatch, capsys, kind, *more):
    """Return what --check prints of a simulation: its lines, and those after the word advice."""
    ml.check_simulation(
        ml.parse_args(["--check", "--env", install(monkeypatch, kind), *WORDS, *more])
    )
    out, err = capsys.readouterr()
    facts, _, advice = out.partition("advice")
    return facts.splitlines(), [*advice.splitlines()[1:], *err.splitlines()]


# Where the same seed does not lead to the same episode, playing it again leads elsewhere, too.
VARIES = []
for level in (1, 2):
    VARIES += [f"level {level}: two episodes from the same reset(seed) differ"]
    VARIES += [
        f"level {level}: a resumed run starts a new episode: ValueError: playing its actions"
    ]
FORGETS = "a resumed run continues elsewhere: after saving and loading the next step is another"
FLAWS = {
    Pendulum: [],
    Unseeded: VARIES,
    Hidden: VARIES,
    Lottery: VARIES,
    Unlike: ["levels start unlike from the same seed"],
    Forgetful: [f"level 1: {FORGETS}", f"level 2: {FORGETS}"],
    Diverging: [
        "level 1: NaN or over 1e15 in observations or rewards",
        "level 2: NaN or over 1e15 in observations or rewards",
        "costs were not measured: NaN or over 1e15",
    ],
    Careless: [],
    Long: ["all episodes are truncated after 10 steps, so rewards are"],
    Large: ["large (up to 8.5e+03) observations: --norm-obs?", "large (up to "],
    Summed: ["returns of the levels differ: -"],
    Physical: [
        "actions are 0 ± 1 at first, the Box is 0 to 500: gymnasium.wrappers.RescaleAction?"
    ],
    Small: ["small (up to 8.5e-07) observations: --norm-obs?", "small (up to "],
}


@pytest.mark.parametrize("kind", FLAWS, ids=[kind.__name__ for kind in FLAWS])
def test_flaws_are_found(monkeypatch, capsys, kind):
    """Each flaw has its line, and there is no other one."""
    _, advice = checked(monkeypatch, capsys, kind)
    assert len(advice) == len(FLAWS[kind])
    for line, words in zip(advice, FLAWS[kind]):
        assert line.startswith(words)


@pytest.mark.parametrize("schedule", ["adaptive", "together"])
@pytest.mark.parametrize(
    "kind, words",
    [(Unseeded, ml.SEED_VARIES), (Unlike, ml.STARTS_DIFFER), (Physical, "actions are 0 ± 1")],
)
def test_a_run_says_it_at_its_start(monkeypatch, tmp_path, capsys, kind, words, schedule):
    """Once, also where costs are given, so that nothing is measured."""
    more = f"--schedule {schedule} --level-costs 1 2 0.1 --num-steps 10 --num-iterations 1"
    words_of_run = [*WORDS, *more.split(), "--quiet", "--log-dir", str(tmp_path)]
    ml.train(ml.parse_args(["--env", install(monkeypatch, kind), *words_of_run]))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(words)


def test_starts_that_fail(monkeypatch, tmp_path, capsys):
    """Where they cannot be compared a line says why; --check goes on, and so does a run."""

    class Fragile(Pendulum):
        def reset(self, *, seed=None, options=None):
            if seed in bad:
                raise RuntimeError("no convergence")
            return super().reset(seed=seed)

    words = ["--env", install(monkeypatch, Fragile), *WORDS, "--num-steps", "10"]
    compared = ml.draw_seeds(4, 1, ml.MEASURE_SEED)  # the seeds that starts are compared from
    bad = [int(compared[-1])]
    ml.check_simulation(ml.parse_args(["--check", *words]))
    out, err = capsys.readouterr()
    line = r"\nstarts were not compared: .* level 1 .*failed in reset: RuntimeError: no convergence"
    assert re.search(line, out) and "--level-costs" in out and err == ""

    more = ["--num-iterations", "1", "--quiet", "--log-dir", str(tmp_path)]
    assert ml.train(ml.parse_args([*words, *more])).iteration == 1
    assert re.search(line, "\n" + capsys.readouterr().err)


def test_options_that_answer_the_advice(monkeypatch, capsys):
    """With the options that it names there is no advice."""
    assert checked(monkeypatch, capsys, Large, "--norm-obs", "--norm-value")[1] == []
    short = ["--num-steps", "8"]
    (line,) = checked(monkeypatch, capsys, Pendulum, *short)[1]
    assert line == "an iteration is shorter than an episode: --num-steps 10?"


@pytest.mark.parametrize("reward, told", [("1", True), ("-100", False)])
def test_failed_reward_that_is_better_than_an_episode(monkeypatch, capsys, reward, told):
    """A policy would learn to fail."""
    _, advice = checked(monkeypatch, capsys, Pendulum, "--failed-reward", reward)
    assert (advice != []) == told
    if told:
        assert advice[0].startswith("--failed-reward 1 is better than an episode, which brings -")


def test_episode_that_does_not_end_for_a_long_time(monkeypatch, capsys):
    """A line asks after 1,000 steps, while the episode goes on."""
    _, advice = checked(monkeypatch, capsys, Endless)
    line = "no end after 1,000 steps: does step ever return terminated or truncated?"
    assert advice.count(line) == 4  # two episodes on two levels


def test_what_is_printed(monkeypatch, capsys):
    """A row for each level with its seconds, then scales, costs as an option, and hours."""
    monkeypatch.setattr(ml.time, "perf_counter", lambda: Solver.clock)
    lines, advice = checked(monkeypatch, capsys, Solver, "--num-steps", "4")
    rows = [line.split() for line in lines[1:3]]
    assert rows == [
        ["1", "7", "5", "1", "4", "terminated", "0"],
        ["2", "70", "50", "10", "4", "terminated", "0"],
    ]
    assert "observations: 0 to 0, entry 0 (from 0) is the largest" in lines
    assert "rewards: 0 to 0" in lines
    assert "actions: 0 ± 1 at first, clipped to -1 to 1" in lines
    assert "--level-costs 3.75 37.5 0" in lines
    hours = 100 * 4 * 4 * 37.5 / 3600  # iterations, actors, steps, seconds
    assert any(line.startswith(f"a run takes {hours:.3g} hours") for line in lines)
    assert advice == []


@pytest.mark.parametrize("schedule", ["adaptive", "together"])
def test_hours_that_are_known(monkeypatch, capsys, schedule):
    """Of together, whose iterations are of all levels, none are printed; starts are alike."""
    more = ["--schedule", schedule, "--num-steps", "10"]
    lines, advice = checked(monkeypatch, capsys, Pendulum, *more)
    assert any("hours" in line for line in lines) == (schedule == "adaptive")
    told = [line for line in advice if "its state was not saved" not in line]  # pairs need more
    assert told == [] and len(advice) == (0 if schedule == "adaptive" else 2)


def test_failed_steps(monkeypatch, capsys):
    """With --failed-reward the first one of each level is told."""

    class Failing(Pendulum):
        def step(self, action):
            if self.t == 5:
                raise RuntimeError("no convergence")
            return super().step(action)

    _, advice = checked(monkeypatch, capsys, Failing, "--failed-reward", "-1")
    assert sum("failed: RuntimeError: no convergence" in line for line in advice) == 2
    with pytest.raises(ml.GameError, match="no convergence.*to go on .*: --failed-reward"):
        checked(monkeypatch, capsys, Failing)


def test_simulations_run_in_workers(monkeypatch, capsys):
    """A solver's threads that have run in a process are lost in those that it forks."""

    class Threaded(Pendulum):
        def step(self, action):
            assert multiprocessing.parent_process() is not None, "stepped before workers fork"
            return super().step(action)

    assert checked(monkeypatch, capsys, Threaded, "--num-workers", "2")[1] == []


def test_one_level(monkeypatch, capsys):
    """A simulation with one level can be looked at, too."""
    facts, advice = checked(monkeypatch, capsys, Pendulum, "--levels", "2")
    assert advice == [] and facts[1].split()[0] == "2"


@pytest.mark.parametrize("other", ["--analyse", "--eval=x", "--resume=x"])
def test_not_with_other_work(capsys, other):
    """One line names the option."""
    with pytest.raises(SystemExit):
        ml.parse_args(["--check", other])
    assert "argument --check: not with" in capsys.readouterr().err
