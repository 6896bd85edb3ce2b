"""Random options, damaged checkpoints and simulations: no run hangs, no failure is silent."""

import os
import shutil
import signal
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import ppo
import ppo_atari
import ppo_multilevel

SEED = int(os.environ.get("FUZZ_SEED", 0))  # others are as good
WRONG = ["", "x", "1,5", "1e", "é", " ", "None", "[1]", "0x10"]
NUMBERS = {int: ["1", "2", "4", "8"], float: ["0", "0.01", "0.5", "1", "1e-3"]}
# These are paths, names, costs that cannot be 0, or take long.
NOT_THESE = "-h --help --env --resume --eval --log-dir --run-name --device --level-costs".split()
NOT_THESE += ["--compile", "--analyse"]
START = {  # of every command line; options after it replace these
    ppo: "--env {env} --num-steps 8 --num-envs 2 --num-minibatches 2 --hidden 4",
    ppo_atari: "--env {env} --num-steps 4 --num-envs 2 --num-minibatches 2 --num-workers 0",
    ppo_multilevel: (
        "--env {env} --levels 1 2 --num-steps 8 4 --num-envs 2 --num-minibatches 2 --hidden 4 "
        "--num-workers 0 --check-episodes 2 --eval-episodes 1"
    ),
}
ENVS = {
    ppo: ["CartPole-v1", "Pendulum-v1", "envs_spaces:Masked-multi-info-v0"],
    ppo_atari: ["Pong", "Breakout"],
    ppo_multilevel: ["envs:make", "envs:make_line", "ResSim-v1"],
}
COUNTS = {ppo: 60, ppo_atari: 20, ppo_multilevel: 30}


@pytest.fixture(autouse=True)
def in_tmp_path(monkeypatch, tmp_path):
    """Run in an empty folder, and for five minutes at most."""
    monkeypatch.chdir(tmp_path)
    if hasattr(signal, "alarm"):
        before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("a run hangs"))
        signal.alarm(300)
    yield
    if hasattr(signal, "alarm"):
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
def outcome(monkeypatch, capfd):
    """Return a function: the script's command line → its exit code, after a look at its messages.

    0: it ran. 1: a game or a number went wrong on the way. 2: refused, with one line.
    """

    def run(script, argv):
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *argv])
        monkeypatch.setattr(sys, "path", [*sys.path])  # main appends to it
        capfd.readouterr()
        try:
            code = script.main()
        except SystemExit as error:
            code = error.code
        lines = capfd.readouterr().err.splitlines()
        assert code in (0, 1, 2), (argv, code)
        errors = [line for line in lines if line.startswith(f"{script.__name__}.py: error: ")]
        assert bool(errors) == (code > 0), (argv, lines)
        if code == 2:
            assert len(lines) == 1, (argv, lines)
        return code

    return run


def random_words(script, rng):
    """Return a random command line of a small run, and whether a word in it is a wrong one."""
    actions = [a for a in script.make_parser()._actions if a.option_strings[0] not in NOT_THESE]
    argv = START[script].format(env=rng.choice(ENVS[script])).split()
    argv += ["--num-iterations", "1", "--update-epochs", "1", "--quiet"]
    is_wrong = False
    for _ in range(rng.integers(0, 5)):
        action = rng.choice(actions)
        argv.append(str(rng.choice(action.option_strings)))
        if action.nargs == 0:
            continue
        words = list(action.choices or NUMBERS[action.type])
        if rng.random() < 0.1:
            words = WRONG
            is_wrong = True
        count = rng.integers(1, 4) if action.nargs == "+" else 1
        argv += [str(word) for word in rng.choice(words, count)]
    return argv, is_wrong


# The games of ppo_atari.py take long to start.
@pytest.mark.parametrize(
    "script",
    [ppo, pytest.param(ppo_atari, marks=pytest.mark.slow), ppo_multilevel],
    ids=lambda script: script.__name__,
)
def test_random_options(script, outcome):
    """Options are a run, or refused with a line; words that are no values are always refused."""
    rng = np.random.default_rng(SEED)
    codes = []
    for _ in range(COUNTS[script]):
        argv, is_wrong = random_words(script, rng)
        codes.append(outcome(script, argv))
        assert codes[-1] == 2 or not is_wrong, argv
    assert codes.count(0) > 2 and codes.count(2) > 2


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """The folder of a finished run of ppo.py."""
    argv = START[ppo].format(env="CartPole-v1").split()
    argv += ["--num-iterations", "1", "--quiet", "--log-dir", str(tmp_path_factory.mktemp("runs"))]
    return ppo.train(ppo.parse_args(argv)).run_dir


def damaged(content, rng):
    """Return bytes of which some are missing, doubled or other ones."""
    content = bytearray(content)
    begin, end = np.sort(rng.integers(0, len(content) + 1, 2))
    kind = rng.integers(3)
    if kind == 0:
        del content[begin:end]
    elif kind == 1:
        content[begin:begin] = content[begin:end]
    else:
        for i in rng.integers(0, len(content), rng.integers(1, 9)):
            content[i] = rng.integers(256)
    return bytes(content)


def test_damaged_checkpoints(finished_run, tmp_path, outcome):
    """A run whose checkpoint is damaged is refused with a line, or its policy can be evaluated."""
    rng = np.random.default_rng(SEED)
    copy = shutil.copytree(finished_run, tmp_path / "copy")
    content = (copy / "checkpoint.pt").read_bytes()
    codes = []
    for _ in range(30):
        (copy / "checkpoint.pt").write_bytes(damaged(content, rng))
        codes.append(outcome(ppo, ["--eval", str(copy), "--eval-episodes", "1"]))
    assert codes.count(2) > 20


def test_damaged_progress(finished_run, tmp_path, outcome):
    """A resumed run writes progress.csv anew, from the checkpoint."""
    copy = shutil.copytree(finished_run, tmp_path / "copy")
    path = copy / "progress.csv"
    content = path.read_bytes()
    path.write_bytes(damaged(content, np.random.default_rng(SEED)))
    assert path.read_bytes() != content
    assert outcome(ppo, ["--resume", str(copy), "--num-iterations", "2", "--quiet"]) == 0
    assert path.read_bytes().startswith(content) and path.read_bytes().count(b"\n") == 3


def test_damaged_simulation(tmp_path, outcome, monkeypatch):
    """A user's file that lacks lines or parts of them: no run, a run, or a game that fails in one.

    Python tells of mistakes that are found before the run begins. `main` tells of all others.
    """
    for name, spec in gym.registry.items():
        monkeypatch.setitem(gym.registry, name, spec)  # the file may replace some
    rng = np.random.default_rng(SEED)
    text = (Path(__file__).parent / "envs.py").read_text()
    codes = []
    for i in range(40):
        lines = text.splitlines(keepends=True)
        for _ in range(rng.integers(1, 4)):
            k = rng.integers(len(lines))
            lines[k] = ["", lines[k][: len(lines[k]) // 2] + "\n", lines[k] * 2][rng.integers(3)]
        path = tmp_path / f"mine{i}.py"  # a module is loaded once
        path.write_text("".join(lines))
        argv = START[ppo_multilevel].format(env=f"{path}:make").split()
        argv += "--num-iterations 1 --quiet --eval-every 0".split()
        try:
            ppo_multilevel.parse_args(argv)
        except Exception:
            codes.append(None)
        else:
            codes.append(outcome(ppo_multilevel, argv))
    assert {None, 0} <= set(codes) <= {None, 0, 1}
