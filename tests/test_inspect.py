"""Tests of examples/inspect_simulation.py: what it says of simulations that are right or wrong."""

import itertools
import shlex
import subprocess
import sys
import types
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import ppo_multilevel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "examples"))

import inspect_simulation  # noqa: E402

ROD = f"{ROOT}/tests/examples/rod.py:Rod"
NUMBERS = itertools.count()


class Pendulum(gym.Env):
    """A swing of ten steps that is right on all levels; its flaws are attributes."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    end = "terminated"
    length = 10
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
        over = self.t == self.length
        terminated = over and self.end == "terminated"
        reward = -0.1 * self.scale * abs(position)
        return self.see(), reward, terminated, over and not terminated, {}


class Choice(Pendulum):
    """Its actions are choices."""

    action_space = gym.spaces.Discrete(3, start=5)

    def step(self, action):
        assert action in self.action_space
        return super().step([action - 6])


class Still(Pendulum):
    """It always starts at the same place."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = np.ones(2)
        return self.see(), {}


class Unseeded(Pendulum):
    """Its starts are chance."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None)


class Lottery(Pendulum):
    """It draws from NumPy's own generator, which no seed of a reset sets."""

    def step(self, action):
        self.state = self.state + 1e-3 * np.random.normal(size=2)
        return super().step(action)


class SummedLottery(Lottery):
    """It does so, and its rewards are sums over cells."""

    def step(self, action):
        obs, reward, *ends = super().step(action)
        return obs, reward * 4**self.level, *ends


class Unlike(Pendulum):
    """A seed is another start on each level."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None if seed is None else seed * 10 + self.level)


class Mapped(Unlike):
    """A level can take over another one's start."""

    def psi(self):
        return self.see()

    def map_from(self, fine):
        self.state = fine.state


class UnlikeInPart(Pendulum):
    """The second entry of its state starts unlike."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state[1] = self.np_random.normal(size=self.level)[-1]
        return self.see(), {}


class UnlikeLater(Unlike):
    """Its first observation hides that levels start unlike."""

    def see(self):
        return super().see() if self.t else np.zeros(2, np.float32)


class Summed(Pendulum):
    """Its rewards are sums over cells, of which each level has four times as many."""

    def step(self, action):
        obs, reward, *ends = super().step(action)
        return obs, reward * 4**self.level, *ends


class MoreSteps(Pendulum):
    """The finer level has more control steps."""

    @property
    def length(self):
        return 10 * self.level


class Large(Pendulum):
    """Its numbers are far from 1."""

    scale = 1e4


class Small(Pendulum):
    """Its numbers are far below 1."""

    scale = 1e-6


class Physical(Pendulum):
    """Its actions are in other units."""

    action_space = gym.spaces.Box(0, 500, (1,), np.float32)

    def step(self, action):
        return super().step(action / 250 - 1)


class Narrow(Pendulum):
    """Nearly all actions are clipped."""

    action_space = gym.spaces.Box(-0.01, 0.01, (1,), np.float32)


class Apart(Pendulum):
    """The Box is where a policy's first actions hardly are."""

    action_space = gym.spaces.Box(2, 4, (1,), np.float32)

    def step(self, action):
        return super().step(action - 3)


class Torque(Pendulum):
    """Its actions are a little larger."""

    action_space = gym.spaces.Box(-2, 2, (1,), np.float32)


class Unbounded(Pendulum):
    """Every action is inside of the Box."""

    action_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)


class Cut(Pendulum):
    """Its episodes are cut after ten steps by a time limit."""

    end = "truncated"


class CutOnce(Pendulum):
    """Its coarse level is cut by a time limit, and the fine one ends."""

    @property
    def end(self):
        return "truncated" if self.level == 1 else "terminated"


class Endless(Pendulum):
    """Its episodes do not end."""

    length = -1


class Failing(Pendulum):
    """Its solver does not converge in step 6."""

    def step(self, action):
        if self.t == 5:
            raise RuntimeError("no\nconvergence")
        return super().step(action)


class FailingOnce(Pendulum):
    """Its fine level fails in step 3."""

    def step(self, action):
        if self.t == 2 and self.level == 2:
            raise RuntimeError("no convergence")
        return super().step(action)


class Shared(Pendulum):
    """Its solver has one state for all simulations."""

    state = None

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        Shared.state = self.level
        return obs, info

    def step(self, action):
        obs, reward, *ends = super().step(action)
        return obs, reward + 0.01 * (Shared.state - self.level), *ends


class SharedState(Pendulum):
    """All simulations have one state. A seed leads to the same one on all levels."""

    shared = None

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        SharedState.shared = self.state
        return obs, info

    def step(self, action):
        self.state = SharedState.shared
        result = super().step(action)
        SharedState.shared = self.state
        return result


class SharedByLevel(Pendulum):
    """The simulations of a level have one state."""

    shared = {}

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.shared[self.level] = self.state
        return obs, info

    def step(self, action):
        self.state = self.shared[self.level]
        result = super().step(action)
        self.shared[self.level] = self.state
        return result


class SharedValve(Pendulum):
    """All simulations have one valve, which is closed at first and follows the actions."""

    valve = 0.0

    def reset(self, *, seed=None, options=None):
        SharedValve.valve = 0.0
        return super().reset(seed=seed)

    def step(self, action):
        SharedValve.valve += 0.5 * (float(action[0]) - SharedValve.valve)
        return super().step([SharedValve.valve])


class Longer(Pendulum):
    """Its fine level shows an entry more than its Box has."""

    def see(self):
        return np.append(super().see(), np.float32(0)) if self.level == 2 else super().see()


class Cells(Pendulum):
    """It shows the cells of its level."""

    def __init__(self, level):
        super().__init__(level)
        self.observation_space = gym.spaces.Box(-1, 1, (10 * level,), np.float32)


class FailingByChance(Pendulum):
    """Its solver fails if NumPy's own generator draws so: in its second episode."""

    def step(self, action):
        if self.t == 5 and np.random.random() > 0.5:
            raise RuntimeError("no convergence")
        return super().step(action)


class Diverging(Pendulum):
    """Its rewards are NaN after a while."""

    def step(self, action):
        obs, reward, *ends = super().step(action)
        return obs, np.nan if self.t > 5 else reward, *ends


class Fragile(Pendulum):
    """Some starts fail."""

    def reset(self, *, seed=None, options=None):
        if seed == inspect_simulation.SEED + 3 and self.level == 2:
            raise RuntimeError("no convergence")
        return super().reset(seed=seed)


class Broken(Pendulum):
    """No start works on level 2."""

    def reset(self, *, seed=None, options=None):
        if self.level == 2:
            raise OSError("no licence")
        return super().reset(seed=seed)


class Clinging(Pendulum):
    """It cannot be closed."""

    def close(self):
        raise OSError("the licence server has gone")


class OldApi(Pendulum):
    """It has the interface of Gym, Gymnasium's predecessor."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated or truncated, info


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


@pytest.fixture
def inspected(monkeypatch, capsys):
    """Return a function that inspects a simulation: its tables, advice and command to train."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # to which each inspection adds the folder

    def inspect(make, levels="1 2", options=""):
        name = make
        if not isinstance(make, str):
            module = types.ModuleType(f"inspected_simulation_{next(NUMBERS)}")
            module.make = make
            monkeypatch.setitem(sys.modules, module.__name__, module)
            name = f"{module.__name__}:make"
        inspect_simulation.main(["--env", name, "--levels", *levels.split(), *options.split()])
        text, commands = capsys.readouterr().out.split("\n\nWhen")
        *analyse, train, compare = commands.splitlines()[2:]
        for command in (*analyse, train):
            ppo_multilevel.parse_args(shlex.split(command)[2:])  # it accepts the commands
        assert compare.startswith("python tests/examples/use_policy.py RUN_DIR --compare ")
        text, _, times = text.partition("\n\nTimes with ")
        table, *advice = text.split("\n* ")
        advice = [" ".join(piece.split()) for piece in advice]
        return table.splitlines() + times.splitlines()[2:], advice, train

    return inspect


DIFFER = "Level 1: two episodes with the same reset(seed) and actions differ."
DIFFER_2 = DIFFER.replace("1", "2")
UNLIKE = "Do levels start alike from the same seed?"
BOOTSTRAPPED = "All episodes are truncated, which is right for a plant that runs on: V stands"
ACTIONS = "The first actions are 0 ± 1, clipped to the Box, "
LENGTHS = "Episodes have 10, 20 steps on the levels."
RETURNS = "The returns of levels differ by a factor: -"
LARGEST = "The largest of returns is "
# Simulations, and how the pieces of advice on them begin, in their order.
FLAWS = {
    Pendulum: [],
    Choice: [],
    Still: [],
    Mapped: [],
    Unbounded: [],
    Clinging: [],
    Unseeded: [DIFFER, DIFFER_2, UNLIKE],
    Lottery: [DIFFER, DIFFER_2],
    Shared: [DIFFER, DIFFER_2],
    SharedState: [DIFFER, DIFFER_2],
    SharedByLevel: [DIFFER, DIFFER_2],
    SharedValve: [DIFFER, DIFFER_2],
    SummedLottery: [DIFFER, DIFFER_2, RETURNS],
    Unlike: [UNLIKE],
    UnlikeInPart: [UNLIKE],
    UnlikeLater: [UNLIKE],
    Summed: [RETURNS],
    MoreSteps: [RETURNS, LENGTHS],
    Large: ["The largest of observations is ", LARGEST],
    Small: ["The largest of observations is ", LARGEST],
    Physical: [f"{ACTIONS}0 to 500."],
    Narrow: [f"{ACTIONS}-0.01 to 0.01."],
    Apart: [f"{ACTIONS}2 to 4."],
    Torque: [f"{ACTIONS}-2 to 2. If it is not -1 to 1, half"],
    Cut: [BOOTSTRAPPED],
    CutOnce: [],
    Failing: [
        "Level 1 fails, seed 10000, step 6: RuntimeError: no convergence",
        "Level 2 fails, seed 10000, step 6: RuntimeError: no convergence",
    ],
    FailingOnce: ["Level 2 fails, seed 10000, step 3: RuntimeError: no convergence"],
    FailingByChance: [
        "Level 1 fails, seed 10000, step 6: RuntimeError: no convergence",
        DIFFER,
        "Level 2 fails, seed 10000, step 6: RuntimeError: no convergence",
        DIFFER_2,
    ],
    Diverging: [
        "Level 1 fails, seed 10000, step 6: ValueError: NaN",
        "Level 2 fails, seed 10000, step 6: ValueError: NaN",
    ],
}


@pytest.mark.parametrize("kind", FLAWS, ids=[kind.__name__ for kind in FLAWS])
def test_flaws_are_found(inspected, kind):
    """Each flaw has its advice, and there is no other one."""
    table, advice, _ = inspected(kind)
    for piece, words in zip(advice, FLAWS[kind]):
        assert piece.startswith(words)
    assert len(advice) == len(FLAWS[kind])
    assert [row.split()[0] for row in table[:3]] == ["level", "1", "2"]


class Astray(Pendulum):
    """A simulation whose reset returns an info that is no dict."""

    def reset(self, *, seed=None, options=None):
        obs, _ = super().reset(seed=seed, options=options)
        return obs, "info"


def test_levels_with_other_spaces(inspected, capsys):
    """One line says it, as in training."""
    with pytest.raises(SystemExit):
        inspected(Cells)
    assert "error: argument --levels: level 2 has" in capsys.readouterr().err


def test_episodes_that_do_not_end(inspected):
    """The inspection ends with the first one."""
    with pytest.raises(SystemExit, match="level 1: an episode has not ended in 10,000 steps"):
        inspected(Endless)


def test_check_of_gymnasium(inspected):
    """What Gymnasium's own check finds is told."""
    _, (finding,), _ = inspected(Astray)
    assert finding.startswith("Gymnasium's check_env finds: ") and "dict" in finding


@pytest.mark.parametrize(
    "env, expected", [("ResSim-v1", f"{ACTIONS}0.001 to 1."), (ROD, BOOTSTRAPPED)]
)
def test_simulations_that_are_right(inspected, env, expected):
    """Of the reservoirs, that rates are not -1 to 1; of the rod, that it goes on after its end."""
    _, advice, _ = inspected(env)
    (piece,) = advice
    assert piece.startswith(expected)


@pytest.mark.parametrize(
    "make, level, seed, text",
    [
        (Broken, 2, 10000, "no licence"),
        (OldApi, 1, 10000, "not enough values to unpack"),
        (Fragile, 2, 10003, "no convergence"),
        (Longer, 2, 10000, "an observation or a reward has the shape (3,), not (2,)"),
    ],
)
def test_simulations_that_cannot_be_inspected(inspected, make, level, seed, text):
    """An error says where a level fails before its first step is complete, and why."""
    place = f"the first step fails: level {level}, seed {seed}$"
    with pytest.raises(RuntimeError, match=place) as caught:
        inspected(make)
    assert str(caught.value.__cause__).startswith(text)


def test_options_that_answer_the_advice(inspected):
    """The next command has them, and the wrapper that the advice on actions names answers it."""
    *_, command = inspected(Large)
    assert command.endswith(" --norm-obs --norm-value --hours 0.1")

    def make(level):
        return gym.wrappers.RescaleAction(Physical(level), -1, 1)

    _, advice, _ = inspected(make)
    assert advice == []


def test_costs_of_levels(inspected, monkeypatch):
    """The table has the seconds of each level."""
    monkeypatch.setattr(inspect_simulation.time, "perf_counter", lambda: Solver.clock)
    table, *_ = inspected(Solver)
    rows = [line.split() for line in table if line]
    assert rows[1:3] == [
        ["1", "7", "2", "4", "terminated", "0"],
        ["2", "70", "20", "4", "terminated", "0"],
    ]


@pytest.mark.parametrize("workers, num_episodes", [(0, 16), (2, 16), (6, 18), (16, 16), (17, 17)])
def test_no_worker_is_idle_in_a_check(workers, num_episodes):
    """Each plays as many episodes, at least 16 together."""
    options = inspect_simulation.look_at_checks(workers)
    assert options == ["--check-episodes", str(num_episodes)] * (num_episodes != 16)


@pytest.mark.parametrize("workers, num_envs", [(2, 8), (6, 24), (16, 64), (100, 400)])
def test_timetable(inspected, monkeypatch, workers, num_envs):
    """It has the seconds of each part of a run, whose hours are those of a hundred checks."""
    monkeypatch.setattr(inspect_simulation.time, "perf_counter", lambda: Solver.clock)
    monkeypatch.setattr(inspect_simulation, "as_time", lambda seconds: f"{seconds:.1f}")
    table, _, command = inspected(Solver, options=f"--num-workers {workers}")
    times = {}
    for line in table[-9:]:
        seconds, what = line.split(maxsplit=1)
        times[what.partition(" ")[0] if what.startswith("-") else what] = float(seconds)

    fine = 70 + 50 + 3 * 10  # seconds of an episode
    both = 1.1 * fine
    num_checked = {2: 16, 6: 18, 16: 16, 100: 100}[workers]
    num_measured = {2: 64, 6: 72, 16: 64, 100: 400}[workers]
    iteration = num_envs / workers * fine  # an episode has 4 steps
    check = num_checked / workers * fine
    correlation = num_measured / workers * both
    stopping = 1.1 * (iteration + check + correlation)  # and a tenth to be sure
    hours = float(command.split()[command.split().index("--hours") + 1])
    assert 0 <= hours - 100 * check / 3600 < 0.1
    expected = {
        "at first, to measure what steps cost": 2 * both,
        "an iteration on level 2": iteration,
        f"a check, {num_checked} episodes on level 2": check,
        f"a measurement of correlations, {num_measured} episodes on every level": correlation,
        "until the first measurement, or sooner if training gains nothing": 20 * correlation,
        f"at most from a signal to the run's end (Slurm: TERM@{stopping:.0f})": stopping,
        "--hours": 3600 * hours,
        "--analyse:": 2 * both + 10 * correlation,
        "--compare:": 2 * -(-64 // workers) * fine,
    }
    assert times == pytest.approx(expected, abs=0.051)


@pytest.mark.parametrize(
    "seconds, text",
    [(0.012, "0.012 s"), (99, "99 s"), (600, "10 minutes"), (9000, "2.5 hours")],
)
def test_times(seconds, text):
    """A time has the unit that suits it."""
    assert inspect_simulation.as_time(seconds) == text


@pytest.mark.parametrize(
    "steps, workers, num_envs, num_steps",
    [
        (20, 2, 8, 20),
        (20, 0, 4, 20),
        (60, 12, 48, 50),  # 2,400 steps
        (50, 16, 48, 50),  # four for each worker were 3,200 steps
        (47, 17, 51, 44),  # 51 · 47 cannot be divided by 4
        (30, 50, 50, 30),
        (50, 64, 64, 50),  # each worker has one
        (1, 1, 4, 4),
    ],
)
def test_options_for_expensive_steps(steps, workers, num_envs, num_steps):
    """They are those of the manual, with a rollout that is not too long."""
    for seconds, expensive in ((0.09, False), (0.11, True)):
        # The reset does not count.
        seen = np.zeros(steps + 1)
        episode = inspect_simulation.Episode(seen, seen[1:], [9, *[seconds] * steps], "none", "")
        found = inspect_simulation.look_at_steps(3, [episode], workers)
        expected = (
            f"--num-envs {num_envs} --num-steps {num_steps} --num-minibatches 4 "
            "--learning-rate 3e-4 --init-log-std -1 --save-every 1 --eval-every 0"
        )
        assert " ".join(found) == expected * expensive


def test_command_for_expensive_steps(inspected, monkeypatch):
    """It has their options, on one level too. There is no advice on them for cheap steps."""
    monkeypatch.setattr(inspect_simulation.time, "perf_counter", lambda: Solver.clock)
    _, advice, command = inspected(Solver, options="--num-workers 2")
    assert advice[0].startswith("A step of level 2 takes 20 s. For such expensive steps")
    words = "--learning-rate 3e-4 --init-log-std -1 --save-every 1 --eval-every 0"
    words = f"--num-workers 2 --num-envs 8 --num-steps 4 --num-minibatches 4 {words}"
    assert command.endswith(f" --levels 1 2 {words} --hours 33.4")
    assert inspected(Solver, levels="2", options="--num-workers 2")[2].endswith(f" 2 {words}")


def test_options_are_not_broken_at_line_ends(capsys):
    """They can be copied."""
    for length in range(80, 100):
        inspect_simulation.tell(f"{'x' * length} --norm-value")
    assert capsys.readouterr().out.count("--norm-value") == 20


def test_one_level(inspected):
    """A simulation with one level can be inspected, too. Its run makes no checks."""
    table, advice, command = inspected(Pendulum, levels="2")
    assert advice == []
    assert table[1].split()[0] == "2"
    assert command.endswith(f"--levels 2 --num-workers {ppo_multilevel.num_cores()}")


def test_command_line(tmp_path):
    """An owner's command prints the tables, the advice and the next commands."""
    script = ROOT / "tests" / "examples" / "inspect_simulation.py"
    argv = [sys.executable, script, "--env", ROD, "--levels", "1", "2"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    command = f"python ppo_multilevel.py --env {ROD} --levels 1 2 --num-workers "
    command += f"{ppo_multilevel.num_cores()} --hours 0.1"
    assert done.stdout.splitlines()[-2] == command
