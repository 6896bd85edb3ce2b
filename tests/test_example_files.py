"""Tests of the examples rod.py and external_program.py, for simulations of one's own."""

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import ppo_multilevel

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "tests" / "examples"
sys.path.insert(0, str(EXAMPLES))

import external_program  # noqa: E402
import external_solver  # noqa: E402
from external_program import Pipe  # noqa: E402
from rod import Rod  # noqa: E402

both = pytest.mark.parametrize("make", [Rod, Pipe])
posix = pytest.mark.skipif(os.name != "posix", reason="process groups are those of POSIX")


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Have games make their folders here, and check that none is left after the test."""
    path = tmp_path / "folders"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(external_program.tempfile, "tempdir", None)  # it is a cache of TMPDIR
    yield path
    assert list(path.glob("pipe_*")) == []


@pytest.fixture
def started(folders):
    """Return a function that makes an env and resets it; close all of them in the end."""
    envs = []

    def start(make, level, seed=3):
        env = make(level)
        envs.append(env)
        env.reset(seed=seed)
        return env

    yield start
    for env in envs:
        env.close()


def actions(num_steps, seed=0):
    """Return random actions (num_steps, 4)."""
    return np.random.default_rng(seed).uniform(-1, 1, (num_steps, 4)).astype(np.float32)


def episode(env, seed=None):
    """Play an episode. Returns its observations, its rewards and the flags of its last step."""
    obs, _ = env.reset(seed=seed)
    observations = [obs]
    rewards = []
    over = (False, False)
    for action in actions(50):
        obs, reward, *over, _ = env.step(action)
        observations.append(obs)
        rewards.append(reward)
        if any(over):
            break
    return np.array(observations), np.array(rewards), tuple(over)


# Both examples ------------------------------------------------------------------------------------


@both
def test_an_episode_is_truncated_and_follows_from_its_seed(make, started):
    """A seed gives the same episode twice, and the episode after it is another one."""
    env = started(make, 1)
    observations, rewards, over = episode(env, seed=5)
    num_steps = {Rod: 20, Pipe: 10}[make]
    assert over == (False, True) and len(rewards) == num_steps
    assert observations.dtype == np.float32 and observations.shape == (num_steps + 1, 8)
    assert np.isfinite(observations).all() and (rewards < 0).all()

    others, _, _ = episode(env)
    assert not np.array_equal(others[0], observations[0])
    again, same_rewards, _ = episode(env, seed=5)
    assert np.array_equal(again, observations) and np.array_equal(same_rewards, rewards)


@both
def test_psi_is_the_observation(make, started):
    """That of reset, and that of each step."""
    env = started(make, 2)
    obs, _ = env.reset(seed=4)
    assert np.array_equal(env.psi(), obs)
    for action in actions(3):
        before = obs
        obs, *_ = env.step(action)
        assert np.array_equal(env.psi(), obs) and not np.array_equal(obs, before)


@both
def test_levels_converge(make, started):
    """The returns of the same actions differ by a few per cent, and less between fine levels."""
    returns = [episode(started(make, level), seed=5)[1].sum() for level in (1, 2, 3)]
    differences = np.abs(np.diff(returns) / returns[-1])
    assert 0.1 > differences[0] > 1.2 * differences[1] > 0 and differences[1] < 0.06


@both
def test_map_from_takes_over_a_finer_state(make, started):
    """The observation and the clock are the finer level's, and the next step is nearly so."""
    fine = started(make, 3, seed=1)
    coarse = started(make, 2, seed=2)
    num_steps = {Rod: 20, Pipe: 10}[make]
    for action in actions(num_steps - 1):
        fine.step(action)
    assert not np.allclose(coarse.psi(), fine.psi(), rtol=0.05)

    coarse.map_from(fine)
    assert np.allclose(coarse.psi(), fine.psi(), rtol=1e-6)
    results = [env.step(np.float32([1, 0, -1, 0.5])) for env in (coarse, fine)]
    assert np.allclose(results[0][0], results[1][0], rtol=0.1)
    assert [truncated for _, _, _, truncated, _ in results] == [True, True]


def test_map_from_repeats_the_cells_of_a_coarser_state(started):
    """On the way back the means of the repeated cells are the coarse ones."""
    coarse = started(Pipe, 1, seed=1)
    coarse.step(actions(1)[0])
    fine = started(Pipe, 3, seed=2)
    fine.map_from(coarse)
    assert np.array_equal(fine.read_restart(), np.repeat(coarse.read_restart(), 4))
    back = started(Pipe, 1, seed=4)
    back.map_from(fine)
    assert np.array_equal(back.read_restart(), coarse.read_restart()) and back.t == coarse.t == 1


@pytest.mark.parametrize(
    "make, schedule", [(Rod, "adaptive"), (Rod, "together"), (Pipe, "together")]
)
def test_a_short_training_run(make, schedule, tmp_path):
    """An iteration in worker processes, then another one after --resume."""
    file = {Rod: "rod.py", Pipe: "external_program.py"}[make]
    options = (
        f"--env {EXAMPLES / file}:{make.__name__} --levels 1 2 --schedule {schedule} --num-envs 2 "
        "--num-steps 2 --num-minibatches 2 --update-epochs 1 --hidden 8 --num-workers 2 --quiet "
        "--level-costs 1 1 1 --eval-every 0 --check-episodes 2 --num-iterations 1 "
        f"--log-dir {tmp_path}"
    )
    run = ppo_multilevel.train(ppo_multilevel.parse_args(options.split()))
    more = ["--resume", str(run.run_dir), "--num-iterations", "2", "--quiet"]
    resumed = ppo_multilevel.train(ppo_multilevel.parse_args(more))
    assert (run.iteration, resumed.iteration) == (1, 2)
    losses = [row["policy_loss"] for row in resumed.history[-2:]]
    assert np.isfinite(losses).all() and losses[0] == run.history[-1]["policy_loss"]


def commands():
    """Return the command lines of ppo_multilevel.py in the examples' docstrings."""
    found = []
    for path in sorted(EXAMPLES.glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())).replace("\\\n", " ")
        found += re.findall(r"^ +python ppo_multilevel\.py (.*)$", text, re.MULTILINE)
    return found


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_examples(command):
    """They have no option that the script does not have."""
    ppo_multilevel.make_parser().parse_args(shlex.split(command, comments=True))


# The external program -----------------------------------------------------------------------------


def test_solver_conserves_heat():
    """In the steady state what flows out is what the heaters supply: u T = ∫ q dx."""
    temperature, _ = external_solver.solve([0.0] * 16, [4, 1, 0, 1], 200.0, 10.0, 0.5)
    assert temperature[-1] == pytest.approx(1.5 * 1.0 / 0.1, rel=1e-6)


def test_solver_returns_the_deviation_over_time():
    """By hand, for two cells in one step: the state after the step counts."""
    # Faces: 0, 0.1 · 1 − 0.01 · 2 / 0.5 = 0.06 and 0.1 · 3; widths of 0.5; the heaters are cells 0
    # and 1 of two, so that heating[0] and heating[2] are theirs.
    temperature, deviation = external_solver.solve([1.0, 3.0], [1, 9, 2, 9], 0.5, 2.0, 0.5)
    expected = [1 + 0.5 * (-0.06 / 0.5 + 1), 3 + 0.5 * (-0.24 / 0.5 + 2)]
    assert temperature == pytest.approx(expected)
    assert deviation == pytest.approx(np.square(np.array(expected) - 2).mean())


def test_each_game_has_a_folder_that_close_removes(started, folders):
    """Two games share none, and closing one leaves the other's."""
    first = started(Pipe, 1, seed=1)
    second = started(Pipe, 1, seed=2)
    assert sorted(folders.iterdir()) == sorted([first.folder, second.folder])
    first.step(actions(1)[0])
    assert {path.name for path in first.folder.iterdir()} == {
        "input.json",
        "restart.json",
        "results.json",
    }
    first.close()
    assert list(folders.iterdir()) == [second.folder]
    second.step(actions(1)[0])
    second.close()
    second.close()  # for the second time, which does no harm
    assert list(folders.iterdir()) == []


def outlives(group, seconds=5):
    """Whether a process group has members that are not dead, even some seconds later."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        listing = subprocess.check_output(["ps", "-eo", "pgid=,stat="], text=True)
        members = [line.split() for line in listing.splitlines()]
        if not any(int(pgid) == group and stat[0] != "Z" for pgid, stat in members):
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def groups(monkeypatch):
    """Return a list that gets the process group of every program that is started."""
    found = []

    class Recorded(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__(command, **options)
            if command[0] != "ps":
                found.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    yield found
    for group in found:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


@contextmanager
def alarm(seconds, action):
    """Call a function after some seconds, and every ten more, until the block has ended."""
    handler = signal.signal(signal.SIGALRM, lambda *_: action())
    signal.setitimer(signal.ITIMER_REAL, seconds, 10)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


# The shell waits for the program, which therefore is not the process that Popen knows.
SHELL = ("sh", "-c", 'echo hello >&2; "$@"; exit $?', "sh")


@posix
@pytest.mark.parametrize("launcher, last", [((), "nothing"), (SHELL, "hello")])
def test_a_program_that_hangs_is_killed(launcher, last, started, groups):
    """The timeout raises a clear error, and no process of the program's group is left."""
    env = started(Pipe, 1)
    env.command = launcher + Pipe.command
    env.step(actions(1)[0])
    env.safety = 0  # time steps of 0 s
    env.timeout = 1.0
    begin = time.monotonic()
    message = rf"^the program was killed after 1\.0 s; the end of its stderr: {last}$"
    with alarm(10, lambda: pytest.fail("it waits for a program that hangs")):
        with pytest.raises(RuntimeError, match=message):
            env.step(actions(1)[0])
    assert time.monotonic() - begin >= 1
    assert len(groups) == 2 and not outlives(groups[-1])


@posix
def test_ctrl_c_does_not_reach_the_program_but_ends_it(started, groups):
    """It runs in a session of its own. KeyboardInterrupt in the script kills it, too."""
    env = started(Pipe, 1)
    env.safety = 0
    env.timeout = 20.0
    sessions = []

    def interrupt():
        sessions.append(os.getsid(groups[0]))
        raise KeyboardInterrupt

    with alarm(0.5, interrupt), pytest.raises(KeyboardInterrupt):
        env.step(actions(1)[0])
    assert sessions == groups != [os.getsid(0)]
    assert not outlives(groups[0])


def test_a_program_that_diverges_raises(started):
    """The program ends with exit code 0 and writes NaN; its stderr says why."""
    env = started(Pipe, 5)
    env.safety = 2
    with pytest.raises(RuntimeError, match="not finite; .*: warning: the solution has diverged$"):
        env.step(actions(1)[0])


def test_a_program_that_fails_raises(started):
    """The error has the exit code and the last line of stderr."""
    env = started(Pipe, 1)
    env.write_restart(np.zeros(17))
    with pytest.raises(RuntimeError, match="exit code 1; .*: restart.json has 17 cells, .* 16$"):
        env.step(actions(1)[0])
    env.reset()
    env.safety = "much"
    with pytest.raises(RuntimeError, match="exit code 1; the end of its stderr: TypeError: "):
        env.step(actions(1)[0])


def test_results_of_the_step_before_are_not_taken(started):
    """A program that writes nothing, or half a file, raises although it did write before."""
    env = started(Pipe, 1)
    env.step(actions(1)[0])
    env.command = (sys.executable, "-c", "")
    with pytest.raises(RuntimeError, match="left no results: .*results.json"):
        env.step(actions(1)[0])
    code = "open('results.json', 'w').write('{\"deviation\": 1')"
    env.command = (sys.executable, "-c", code)
    with pytest.raises(RuntimeError, match="left no results: .*delimiter"):
        env.step(actions(1)[0])


@posix
def test_a_hanging_program_ends_the_training(tmp_path, monkeypatch, capsys, folders):
    """The run says which game failed and how, and leaves a checkpoint but no folder."""
    path = tmp_path / "hanging.py"
    text = (EXAMPLES / "external_program.py").read_text()
    text = text.replace("timeout = 60.0", "timeout = 0.5").replace("safety = 0.5", "safety = 0")
    path.write_text(text)
    (tmp_path / "external_solver.py").write_text((EXAMPLES / "external_solver.py").read_text())
    options = (
        f"--env {path}:Pipe --levels 1 --num-envs 2 --num-steps 4 --num-workers 2 --eval-every 0 "
        f"--num-iterations 1 --num-minibatches 2 --quiet --log-dir {tmp_path}/runs"
    )
    monkeypatch.setattr(sys, "argv", ["ppo_multilevel.py", *options.split()])

    def interrupt():
        raise KeyboardInterrupt

    with alarm(20, interrupt):  # main would return another code
        assert ppo_multilevel.main() == 1
    error, *_ = capsys.readouterr().err.splitlines()
    assert "hanging.py:Pipe level 1 (seed " in error
    assert "failed in step: RuntimeError: the program was killed after 0.5 s" in error
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert (run_dir / "checkpoint.pt").exists()
    assert list(folders.iterdir()) == []
