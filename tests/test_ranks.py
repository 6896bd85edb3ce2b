"""Tests of data-parallel training: two ranks do what one process does, and end together."""

import csv
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import ppo
import ppo_atari
import ppo_multilevel

ROOT = Path(__file__).resolve().parent.parent
SMALL = "--num-envs 4 --num-minibatches 2 --update-epochs 2 --num-iterations 3".split()
OWN = {
    ppo: "--env CartPole-v1 --num-steps 16 --hidden 8".split(),
    ppo_atari: "--num-steps 4 --precision fp32 --noop-max 4 --num-iterations 2".split(),
    ppo_multilevel: (
        "--env envs:make --levels 1 2 --num-steps 8 4 --hidden 8 --check-episodes 4 "
        "--level-costs 1e-3 4e-3 20"
    ).split(),
}
CASES = {
    # Five games are not shared equally.
    "CartPole": (
        ppo,
        "--num-envs 5 --eval-every 2 --norm-adv batch --norm-obs --norm-reward --norm-value "
        "--adaptive-lr 0.01",
    ),
    "LSTM, target KL": (
        ppo,
        "--rnn lstm --rnn-size 8 --target-kl 1e-4 --learning-rate 1e-2 --update-epochs 8",
    ),
    "Breakout": (ppo_atari, "--num-envs 3"),
    "pairs, step": (
        ppo_multilevel,
        "--eval-every 2 --correction literal --schedule together --coupling step --norm-value",
    ),
    "pairs, noise": (
        ppo_multilevel,
        "--env envs:make_line --schedule together --norm-obs --eval-every 0",
    ),
    # Its episodes differ in length. Updates take so long that ρ is measured soon.
    "adaptive": (
        ppo_multilevel,
        "--env envs:make_cartpole --num-steps 8 --norm-value --num-envs 8 --num-iterations 24",
    ),
}
linux = pytest.mark.skipif(sys.platform != "linux", reason="the ranks are forked")


@pytest.fixture(autouse=True)
def remove_runs(tmp_path):
    """Remove the runs' folders: Atari's checkpoints have 20 MB."""
    yield
    shutil.rmtree(tmp_path)


def run_rank(script, argv, environment, errors):
    """Be one of the processes that torchrun starts."""
    os.environ |= environment
    importlib.reload(script)  # which looks at these when it is imported
    sys.stderr = open(errors, "w", buffering=1)
    sys.argv = [f"{script.__name__}.py", *argv]
    code = script.main()
    sys.stderr.flush()
    os._exit(code)


def start_ranks(script, tmp_path, argv, num_ranks=2):
    """Start what torchrun starts. Returns the processes and the files of their messages."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = []
    messages = []
    for i in range(num_ranks):
        environment = {"RANK": i, "LOCAL_RANK": i, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
        environment |= {"LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1"}
        environment |= {"TORCHELASTIC_RUN_ID": "test"}
        environment = {name: str(value) for name, value in environment.items()}
        messages.append(tmp_path / f"rank{i}")
        arguments = (script, argv, environment, messages[-1])
        processes.append(context.Process(target=run_rank, args=arguments))
        processes[-1].start()
    return processes, messages


def run_ranks(script, tmp_path, argv):
    """Run two ranks. Returns their exit codes and messages."""
    processes, messages = start_ranks(script, tmp_path, argv)
    for process in processes:
        process.join(120)
        assert process.exitcode is not None, "a rank hangs"
    return [p.exitcode for p in processes], [m.read_text().splitlines() for m in messages]


def options(script, log_dir, name, *more):
    """Return the options of a small run with a name."""
    place = ["--log-dir", str(log_dir), "--run-name", name]
    return [*SMALL, *OWN[script], "--num-workers", "0", "--quiet", *more, *place]


def rows(run_dir):
    """Return the rows of progress.csv."""
    with (run_dir / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def assert_same(script, one, two):
    """Compare what two runs have learned and logged, up to rounding."""
    expected = script.read_checkpoint(one)
    state = script.read_checkpoint(two)
    for name, value in expected["model"].items():
        torch.testing.assert_close(state["model"][name], value, rtol=1e-3, atol=1e-5, msg=name)
    for name in ("iteration", "global_step"):
        assert state["counters"][name] == expected["counters"][name]
    steps = [s["optimizer"]["state"][0]["step"] for s in (expected, state)]
    assert steps[0] == steps[1]
    assert np.array(state["recent"]) == pytest.approx(np.array(expected["recent"]), rel=1e-3)
    names = "iteration eval_return episodic_return entropy value_loss learning_rate".split()
    for row, expected_row in zip(rows(two), rows(one), strict=True):
        for name in names:
            value = float(row[name] or 0)
            assert value == pytest.approx(float(expected_row[name] or 0), rel=1e-3, nan_ok=True)
    return expected, state


@linux
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_do_what_one_does(case, tmp_path):
    """Parameters, statistics, rules, clocks and logs are those of one process with all games."""
    script, more = CASES[case]
    one = script.train(script.parse_args(options(script, tmp_path, "one", *more.split())))
    codes, messages = run_ranks(script, tmp_path, options(script, tmp_path, "two", *more.split()))
    assert (codes, messages) == ([0, 0], [[], []])
    expected, state = assert_same(script, one.run_dir, tmp_path / "two")
    if script is ppo_multilevel:
        assert state["seconds"] == pytest.approx(expected["seconds"])
    if case == "adaptive":
        rules = [s["rule"] for s in (state, expected)]
        assert rules[0]["measurements"] == rules[1]["measurements"] > 0
        assert rules[0]["level"] == rules[1]["level"]
        torch.testing.assert_close(rules[0]["rho"], rules[1]["rho"], atol=1e-3, rtol=0)
        assert torch.equal(rules[0]["trust"], rules[1]["trust"])
        assert len({row["level"] for row in expected["history"]}) > 1
    if case == "LSTM, target KL":
        assert 0 < expected["optimizer"]["state"][0]["step"] < 3 * 8 * 2


@linux
@pytest.mark.parametrize("script", [ppo, ppo_multilevel], ids=lambda script: script.__name__)
def test_resume(script, tmp_path):
    """A run of two ranks is resumed by two ranks, or by one process, which then do the same."""
    assert run_ranks(script, tmp_path, options(script, tmp_path, "two"))[0] == [0, 0]
    copy = shutil.copytree(tmp_path / "two", tmp_path / "copy")
    more = ["--num-iterations", "5", "--quiet"]
    words = ["--resume", str(tmp_path / "two"), *more]
    assert run_ranks(script, tmp_path, words) == ([0, 0], [[], []])
    one = script.train(script.parse_args(["--resume", str(copy), *more]))
    assert one.iteration == 5
    assert_same(script, copy, tmp_path / "two")


@linux
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_rank_that_fails(tmp_path, monkeypatch, how):
    """If a game fails all ranks say so. If a rank dies the other one does. Nothing hangs."""
    (tmp_path / "failures").mkdir()
    monkeypatch.setenv("FLAKY", f"{how}:1:{tmp_path}/failures")
    argv = options(ppo, tmp_path, "run", "--env", "envs:Flaky-v0", "--num-iterations", "100")
    codes, messages = run_ranks(ppo, tmp_path, argv)
    if how == "raise":
        assert codes == [1, 1]
        for lines in messages:
            assert lines[0].startswith("ppo.py: error: envs:Flaky-v0 (seed ")
            assert lines[0].endswith("failed in step: RuntimeError: broken on purpose")
        assert (tmp_path / "run" / "checkpoint.pt").exists()
    else:
        assert sorted(codes) == [-9, 1]
        (line,) = messages[codes.index(1)]
        assert re.match(r"ppo.py: error: rank [01] has lost another one: ", line)


@linux
def test_signal_to_one_rank(tmp_path):
    """All finish the same iteration, rank 0 saves it."""
    argv = options(ppo, tmp_path, "run", "--num-iterations", "1000000", "--save-every", "0")
    processes, _ = start_ranks(ppo, tmp_path, argv)
    path = tmp_path / "run" / "progress.csv"
    end = time.monotonic() + 60
    while time.monotonic() < end and not (path.exists() and len(rows(path.parent)) > 1):
        time.sleep(0.05)
    os.kill(processes[1].pid, signal.SIGTERM)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [128 + signal.SIGTERM] * 2
    iteration = ppo.read_checkpoint(path.parent)["counters"]["iteration"]
    assert iteration == int(rows(path.parent)[-1]["iteration"]) > 0


def test_torchrun(tmp_path):
    """The real torchrun: two ranks with a worker each, one run folder, one set of status lines."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    argv = options(ppo, tmp_path, "run")
    argv[argv.index("--num-workers") + 1] = "1"
    argv.remove("--quiet")
    command += ["2", str(ROOT / "ppo.py"), *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^iteration 3 \(100%\) ", done.stdout, re.MULTILINE)) == 1
    assert done.stdout.count(f"run folder: {tmp_path / 'run'}") == 1
    assert [row["iteration"] for row in rows(tmp_path / "run")] == ["1", "2", "3"]


def test_unequal_shares(tmp_path, capsys, monkeypatch):
    """A minibatch that two ranks cannot share equally is refused in a line."""
    monkeypatch.setattr(ppo, "NUM_RANKS", 2)
    words = f"--num-envs 4 --num-steps 16 --num-minibatches 64 --norm-adv off --log-dir {tmp_path}"
    with pytest.raises(SystemExit) as exit_info:
        ppo.parse_args(words.split())
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "argument --num-minibatches: 128, over all ranks, must divide N · T" in line


def test_signals_of_ranks(tmp_path, monkeypatch):
    """A signal that comes while the ranks agree counts next time; a second one is the same."""
    run = object.__new__(ppo.Run)
    run.args = ppo.parse_args(["--log-dir", str(tmp_path)])
    run.counters = dict(ppo.COUNTERS)
    run.signal = run.asked = None
    before = [(signum, signal.getsignal(signum)) for signum in ppo.SIGNALS]

    def gathered_objects(value):
        signal.raise_signal(signal.SIGTERM)
        return [value, 0]

    monkeypatch.setattr(ppo, "gathered_objects", gathered_objects)
    try:
        assert run.goes_on()
        assert not run.goes_on() and run.signal == signal.SIGTERM
    finally:
        for signum, handler in before:
            signal.signal(signum, handler)
    run.asked -= 2
    with pytest.raises(KeyboardInterrupt):
        run.stop(signal.SIGTERM, None)


def test_signal_after_that_of_another_rank():
    """A rank that stops since another one was asked to is then asked itself, as torchrun does."""
    run = object.__new__(ppo.Run)
    run.signal = signal.SIGTERM  # the other rank's
    run.asked = None
    run.stop(signal.SIGTERM, None)
    run.stop(signal.SIGTERM, None)
    assert run.signal == signal.SIGTERM
