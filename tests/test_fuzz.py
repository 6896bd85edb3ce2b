"""Random options and damaged files: a run, or one line and exit code 2; no traceback, no hang."""

import json
import os
import pickle
import re
import shutil
import signal
import sys
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import pytest
import torch

import ppo
import ppo_atari
import ppo_multilevel

SEED = int(os.environ.get("FUZZ_SEED", 0))  # others are as good
WRONG = ["", "x", "nan", "inf", "-1", "1.5", "1e999", "9" * 30, "é", " ", "None", "[1]", "0x10"]
RIGHT = ["0", "1", "2", "3", "4", "8", "0.5", "0.01", "1e-3"]
NOT_THESE = "-h --help --env --resume --eval --log-dir --run-name --compile --num-workers".split()
START = {  # of every command line; options after it replace these
    ppo: "--env {env} --num-steps 8 --num-envs 2 --num-minibatches 2 --hidden 4",
    ppo_atari: "--env {env} --num-steps 4 --num-envs 2 --num-minibatches 2 --eval-episodes 1",
    ppo_multilevel: "--env {env} --levels 1 2 --num-steps 8 4 --num-envs 2 --num-minibatches 2",
}
ENVS = {  # those that are tried most are the first
    ppo: [
        "CartPole-v1",
        "CartPole-v1",
        "Pendulum-v1",
        "envs_spaces:Masked-multi-info-v0",
        "",
        "x:y",
    ],
    ppo_atari: ["Pong", "Pong", "breakout", "ALE/Nope-v5", "", "../x"],
    ppo_multilevel: ["envs:make", "envs:make", "ResSim-v1", "envs:nope", "", "a.py:b", ":", "x:"],
}
COUNTS = {ppo: 150, ppo_atari: 25, ppo_multilevel: 40}
SLOW = pytest.param(ppo_atari, marks=pytest.mark.slow)  # its games take long to start
NAMES = ["ppo", "ppo_atari", "ppo_multilevel"]
SCRIPTS = pytest.mark.parametrize("script", [ppo, SLOW, ppo_multilevel], ids=NAMES)


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
        capfd.readouterr()
        try:
            code = script.main()
        except SystemExit as error:
            code = error.code
        out, err = capfd.readouterr()
        assert code in (0, 1, 2), (argv, code)
        lines = err.splitlines()
        if code == 2:
            assert len(lines) == 1, (argv, err)
            assert re.match(rf"{script.__name__}\.py: error: ", lines[0]), (argv, err)
        if code == 1:
            assert [line for line in lines if line.startswith(f"{script.__name__}.py: error: ")]
        return code

    return run


def random_words(script, rng):
    """Return a random command line of a small run."""
    parsers = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArgumentParser, "parse_args", lambda self, _: parsers.append(self) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            script.parse_args([])
    actions = [a for a in parsers[0]._actions if a.option_strings[0] not in NOT_THESE]
    argv = START[script].format(env=rng.choice(ENVS[script])).split(" ")
    argv += ["--num-iterations", "1", "--update-epochs", "1", "--quiet"]
    for _ in range(rng.integers(0, 5)):
        action = rng.choice(actions)
        argv.append(str(rng.choice(action.option_strings)))
        if action.nargs != 0:
            words = [*RIGHT, *(action.choices or [])] if rng.random() < 0.8 else WRONG
            count = rng.integers(1, 4) if action.nargs == "+" else 1
            argv += [str(word) for word in rng.choice(words, count)]
    return argv


@SCRIPTS
def test_random_options(script, outcome):
    """Any options are either a run or refused with a line that names one."""
    rng, codes = np.random.default_rng(SEED), []
    for _ in range(COUNTS[script]):
        codes.append(outcome(script, random_words(script, rng)))
    assert codes.count(0) > 2 and codes.count(2) > 2


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """The folder of a finished run of ppo.py."""
    argv = START[ppo].format(env="CartPole-v1").split()
    argv += ["--num-iterations", "1", "--quiet", "--log-dir", str(tmp_path_factory.mktemp("runs"))]
    return ppo.train(ppo.parse_args(argv)).run_dir


def damaged(content, rng):
    """Return bytes of which some are other ones, or missing, or doubled."""
    content, kind = bytearray(content), rng.integers(3)
    begin, end = np.sort(rng.integers(0, len(content) + 1, 2))
    if kind == 0:
        del content[begin:end]
    elif kind == 1:
        content[begin:begin] = content[begin:end]
    else:
        for i in rng.integers(0, len(content), rng.integers(1, 9)):
            content[i] = rng.integers(256)
    return bytes(content)


@pytest.mark.parametrize("file", ["config.json", "checkpoint.pt", "progress.csv"])
def test_damaged_files(finished_run, tmp_path, outcome, file):
    """A run with a damaged file is continued, or refused with a line."""
    rng, codes = np.random.default_rng(SEED), []
    for i in range(30):
        copy = shutil.copytree(finished_run, tmp_path / str(i))
        (copy / file).write_bytes(damaged((finished_run / file).read_bytes(), rng))
        what = "--resume" if file == "progress.csv" or i % 2 else "--eval"
        more = ["--num-iterations", "2"] if what == "--resume" else ["--eval-episodes", "1"]
        codes.append(outcome(ppo, [what, str(copy), *more]))
    assert codes.count(0 if file == "progress.csv" else 2) > 20


def test_damaged_games(finished_run, tmp_path, outcome):
    """A run whose games' state is damaged is continued: games start new episodes."""
    rng, codes = np.random.default_rng(SEED), []
    copy = shutil.copytree(finished_run, tmp_path / "copy")
    state = ppo.Checkpoint(finished_run).read()
    ((arrays, states),) = pickle.loads(state["games"].numpy().tobytes())
    for _ in range(60):
        games = pickle.dumps([(arrays, [damaged(game, rng) for game in states])])
        state["games"] = torch.frombuffer(bytearray(games), dtype=torch.uint8)
        torch.save(state, copy / "checkpoint.pt")
        codes.append(outcome(ppo, ["--resume", str(copy), "--num-iterations", "2"]))
    assert codes.count(0) > 20


VALUES = [None, True, False, -1, 0, 1, 2.5, "x", "", [], [1], ["x"], [[1]], {}, {"a": 1}, 10**30]


def test_config_with_other_values(finished_run, tmp_path, outcome):
    """config.json is JSON, but its values are any."""
    rng, codes = np.random.default_rng(SEED), []
    config = json.loads((finished_run / "config.json").read_text())
    names = [name for name in config["options"] if name not in ("num_iterations", "num_envs")]
    copy = shutil.copytree(finished_run, tmp_path / "copy")
    for i in range(100):
        options = config["options"] | {rng.choice(names): VALUES[rng.integers(len(VALUES))]}
        if i % 10 == 0:
            kept = rng.permutation(list(options))[: rng.integers(len(options))]
            options = {name: options[name] for name in kept}
        (copy / "config.json").write_text(json.dumps(config | {"options": options}, default=str))
        codes.append(outcome(ppo, ["--eval", str(copy), "--eval-episodes", "1"]))
    assert codes.count(2) > 20


SIMULATION = """
import numpy as np
from ppo_multilevel import CASES, ResSim


def make(level, evaluation=False):
    perm = np.load(PERM)
    return ResSim(CASES["ResSim-v1"]._replace(fields=lambda *_: perm), level, evaluation)
"""


def test_damaged_permeability(tmp_path, outcome):
    """A simulation whose fields have a wrong shape, type or value, or come from a damaged file."""
    rng, good = np.random.default_rng(SEED), np.full((2, 128, 128), 1e-13)
    path = tmp_path / "perm.npy"
    (tmp_path / "mine.py").write_text(SIMULATION.replace("PERM", repr(str(path))))
    argv = f"--env {tmp_path}/mine.py:make --levels 1 --num-steps 5 --num-envs 2 --num-workers 0"
    argv += " --num-minibatches 2 --num-iterations 1 --eval-every 0 --quiet"
    fields = [good[0], good[:, :7], good * np.nan, -good, good * 0, good > 0]
    fields += [good.astype(object), good.astype(str), np.array(None)]
    codes = []
    for field in fields:
        np.save(path, field, allow_pickle=True)
        codes.append(outcome(ppo_multilevel, argv.split()))
    np.save(path, good)
    content = path.read_bytes()
    assert outcome(ppo_multilevel, argv.split()) == 0
    for _ in range(20):
        path.write_bytes(damaged(content[:200], rng) + content[200:])
        codes.append(outcome(ppo_multilevel, argv.split()))
    assert codes[:5] == [2] * 5 and codes.count(2) > 15


def test_damaged_simulation(tmp_path, outcome):
    """A user's file that lacks lines or parts of them: refused, or a game that fails in a run."""
    rng, codes = np.random.default_rng(SEED), []
    text = (Path(__file__).parent / "envs.py").read_text()
    for i in range(30):
        lines = text.splitlines(keepends=True)
        for _ in range(rng.integers(1, 4)):
            k = rng.integers(len(lines))
            lines[k] = ["", lines[k][: len(lines[k]) // 2] + "\n", lines[k] * 2][rng.integers(3)]
        path = tmp_path / f"mine{i}.py"  # a module is loaded once
        path.write_text("".join(lines))
        argv = START[ppo_multilevel].format(env=f"{path}:make").split()
        argv += "--num-iterations 1 --num-workers 0 --quiet --eval-every 0".split()
        codes.append(outcome(ppo_multilevel, argv))
    assert set(codes) >= {0, 2}
