"""Tests of data-parallel training: two ranks do what one process does, and end together."""

import csv
import importlib
import multiprocessing
import os
import pickle
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
    ppo_atari: "--num-steps 8 --eval-episodes 1 --precision fp32 --noop-max 4".split(),
    ppo_multilevel: (
        "--env ResSim-v1 --levels 1 2 --num-steps 8 4 --hidden 8 --schedule together"
    ).split(),
}
CASES = {
    "CartPole": (ppo, "--eval-every 2 --norm-adv batch"),
    "normalised": (ppo, "--norm-obs --norm-reward --norm-value --adaptive-lr 0.01"),
    "target KL": (ppo, "--target-kl 1e-7 --num-minibatches 8"),
    "LSTM": (ppo, "--rnn lstm --rnn-size 8"),
    "Breakout": (ppo_atari, ""),
    "pairs, step": (
        ppo_multilevel,
        "--env envs:make --eval-every 2 --correction literal --schedule together --coupling step "
        "--norm-value",
    ),
    "ResSim, noise": (ppo_multilevel, "--coupling noise --norm-obs --schedule together"),
}
CASES["ResSim, adaptive"] = (
    ppo_multilevel,
    "--schedule adaptive --level-costs 1e-3 4e-3 10 --check-episodes 4 --num-iterations 24",
)
CASES["CartPole, adaptive"] = (  # whose episodes differ in length
    ppo_multilevel,
    "--schedule adaptive --env envs:make_cartpole --num-steps 8 --level-costs 1e-3 4e-3 20 "
    "--norm-value --check-episodes 4 --num-iterations 24",
)
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
    context, processes, messages = multiprocessing.get_context("fork"), [], []
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


def options(script, log_dir, *more):
    """Return the options of a small run."""
    return [*SMALL, *OWN[script], "--num-workers", "0", "--quiet", "--log-dir", str(log_dir), *more]


def rows(run_dir):
    """Return the rows of progress.csv."""
    with (run_dir / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def saved_games(state):
    """Return what a checkpoint has of the games, (arrays, states) for each rank."""
    return pickle.loads(state["games"].numpy().tobytes())


def seeds_of(script, ranks):
    """Return the seeds of all ranks' games, or of the actors' members."""
    states = sum([states for _, states in ranks], [])
    if script is ppo_multilevel:
        return [[pickle.loads(member)["seed"] for member in state] for state in states]
    return [pickle.loads(state)["seed"] for state in states]


def seeds_given(script, args, *starts):
    """Return the seeds that all ranks' games should have, or the actors' members."""
    seeds = script.game_seeds(args, *starts)
    if script is not ppo_multilevel:
        return seeds.tolist()
    own, partners = seeds
    members = [own[0]]
    for level in range(1, len(args.levels)):
        if args.schedule == "together":
            members.append(partners[level])
        members.append(own[level])
    return np.stack(members, axis=1).tolist()


@linux
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_do_what_one_does(case, tmp_path):
    """Parameters, statistics, seeds and logs are those of one process with all games."""
    script, more = CASES[case]
    one = script.train(script.parse_args(options(script, tmp_path / "one", *more.split())))
    argv = options(script, tmp_path / "two", *more.split())
    codes, messages = run_ranks(script, tmp_path, argv)
    assert (codes, messages) == ([0, 0], [[], []])
    (two,) = (tmp_path / "two").iterdir()
    expected, state = script.Checkpoint(one.run_dir).read(), script.Checkpoint(two).read()
    for name, value in expected["model"].items():
        torch.testing.assert_close(state["model"][name], value, rtol=1e-3, atol=1e-5, msg=name)
    for name in ("iteration", "global_step"):
        assert state["counters"][name] == expected["counters"][name]
    steps = [s["optimizer"]["state"][0]["step"] for s in (expected, state)]
    assert steps[0] == steps[1]
    if case not in ("ResSim, noise", "CartPole, adaptive"):  # which cannot tell their state
        seeds = [seeds_of(script, saved_games(state)) for state in (expected, state)]
        starts = (0,)
        if "adaptive" in case:  # games start anew after each measurement
            starts = (ppo_multilevel.MEASURE_SEED, state["rule"]["measurements"], 1)
        assert seeds[0] == seeds[1] == seeds_given(script, one.args, *starts)
    for row, expected_row in zip(rows(two), rows(one.run_dir), strict=True):
        for name in ("iteration", "eval_return", "episodic_return", "entropy", "value_loss"):
            value, expected_value = row[name] or "0", expected_row[name] or "0"
            assert float(value) == pytest.approx(float(expected_value), rel=1e-3, nan_ok=True)
    assert np.array(state["recent"]) == pytest.approx(np.array(expected["recent"]), rel=1e-3)
    if script is ppo_multilevel:
        costs = [float(rows(run_dir)[-1]["sim_cost"]) for run_dir in (two, one.run_dir)]
        assert costs[0] > 0 and (costs[0] == pytest.approx(costs[1]) or "adaptive" not in case)
    if "adaptive" in case:  # updates take so long that ρ is measured soon
        assert state["rule"]["measurements"] == expected["rule"]["measurements"] > 0
        assert state["rule"]["rho"] == pytest.approx(expected["rule"]["rho"], abs=1e-3)
    if case == "target KL":
        assert steps[0] < 3 * 2 * 8


@linux
@pytest.mark.parametrize("script", [ppo, ppo_multilevel], ids=lambda script: script.__name__)
def test_resume(script, tmp_path):
    """3 iterations, and 2 more in new ranks, are 5; one process alone starts new episodes."""
    argv = options(script, tmp_path / "whole", "--num-iterations", "5", "--no-anneal-lr")
    if script is ppo_multilevel:
        argv += ["--env", "envs:make"]  # which can tell its state
    assert run_ranks(script, tmp_path, argv)[0] == [0, 0]
    argv[argv.index("5")], argv[argv.index(str(tmp_path / "whole"))] = "3", str(tmp_path / "parts")
    assert run_ranks(script, tmp_path, argv)[0] == [0, 0]
    (whole,), (parts,) = (tmp_path / "whole").iterdir(), (tmp_path / "parts").iterdir()
    copy = shutil.copytree(parts, tmp_path / "copy")
    more = ["--num-iterations", "5", "--quiet"]
    codes, messages = run_ranks(script, tmp_path, ["--resume", str(parts), *more])
    assert (codes, messages) == ([0, 0], [[], []])
    models = [script.Checkpoint(run).read()["model"] for run in (whole, parts)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert [row["iteration"] for row in rows(parts)] == [row["iteration"] for row in rows(whole)]
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr(script, "report", lines.append)
        script.train(script.parse_args(["--resume", str(copy), *more]))
    assert len(lines) == 1 and lines[0].startswith("all games start new episodes: ")


@linux
@pytest.mark.parametrize("how", ["kill", "raise"])
@pytest.mark.parametrize("script", [ppo, ppo_multilevel], ids=lambda script: script.__name__)
def test_rank_that_dies(script, tmp_path, monkeypatch, how):
    """The other one ends with a line that says so; nothing hangs."""
    (tmp_path / "failures").mkdir()
    monkeypatch.setenv("FLAKY", f"{how}:1:{tmp_path}/failures")
    env = "envs:Flaky-v0" if script is ppo else "envs:make_flaky"
    argv = options(script, tmp_path / "runs", "--env", env, "--num-iterations", "100")
    argv += ["--eval-every", "0"]
    started = time.monotonic()
    codes, messages = run_ranks(script, tmp_path, argv)
    assert time.monotonic() - started < 60
    assert sorted(codes) == ([-9, 1] if how == "kill" else [1, 1])
    failed = [codes.index(-9)] if how == "kill" else []
    failed += [i for i in range(2) if "broken on purpose" in "".join(messages[i][:1])]
    assert len(failed) == 1
    (line,) = messages[1 - failed[0]]
    assert line.startswith(f"{script.__name__}.py: error: ")


@linux
def test_signal_to_one_rank(tmp_path):
    """All finish the same iteration, rank 0 saves it."""
    argv = options(ppo, tmp_path / "runs", "--num-iterations", "1000000", "--save-every", "0")
    processes, messages = start_ranks(ppo, tmp_path, argv)
    end = time.monotonic() + 60
    while not list((tmp_path / "runs").glob("*/progress.csv")) and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(0.5)
    os.kill(processes[1].pid, signal.SIGTERM)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [128 + signal.SIGTERM] * 2
    (run_dir,) = (tmp_path / "runs").iterdir()
    iteration = ppo.Checkpoint(run_dir).read()["counters"]["iteration"]
    assert iteration == int(rows(run_dir)[-1]["iteration"]) > 0
    assert len(saved_games(ppo.Checkpoint(run_dir).read())) == 2


def test_torchrun(tmp_path):
    """The real torchrun: two ranks with a worker each, one run folder, one set of status lines."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    argv = options(ppo_multilevel, tmp_path)
    argv[argv.index("--num-workers") + 1] = "1"
    argv.remove("--quiet")
    command += ["2", str(ROOT / "ppo_multilevel.py"), *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (run_dir,) = tmp_path.iterdir()
    assert len(re.findall(r"^update 3/3 ", done.stdout, re.MULTILINE)) == 1
    assert done.stdout.count(f"run folder: {run_dir}") == 1
    assert rows(run_dir)[-1]["iteration"] == "3"


REFUSED = [
    ("--num-envs 3 --num-minibatches 1", "--num-envs"),
    ("--num-envs 4 --num-minibatches 64", "--num-minibatches"),
]


@pytest.mark.parametrize("options, option", REFUSED)
@pytest.mark.parametrize("rank", [0, 1])
def test_unequal_shares(tmp_path, capsys, monkeypatch, options, option, rank):
    """Games and rows that two ranks cannot share equally: one line."""
    monkeypatch.setattr(ppo, "NUM_RANKS", 2)
    monkeypatch.setattr(ppo, "RANK", rank)
    options += f" --num-steps 16 --norm-adv off --log-dir {tmp_path}"
    with pytest.raises(SystemExit) as exit_info:
        ppo.parse_args(options.split())
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert option in line


def test_run_name_is_checked_by_rank_0(tmp_path, capsys, monkeypatch):
    """The others may come when rank 0 has made the folder."""
    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(ppo, "NUM_RANKS", 2)
    argv = ["--run-name", "mine", "--log-dir", str(tmp_path)]
    monkeypatch.setattr(ppo, "RANK", 1)
    assert ppo.parse_args(argv).run_name == "mine"
    monkeypatch.setattr(ppo, "RANK", 0)
    with pytest.raises(SystemExit):
        ppo.parse_args(argv)
    assert "--run-name" in capsys.readouterr().err


def test_signals_of_ranks(tmp_path, monkeypatch):
    """A signal that comes while the ranks agree counts next time; a second one is no Ctrl-C."""
    run, before = object.__new__(ppo.Run), signal.getsignal(signal.SIGTERM)
    run.args = ppo.parse_args(["--log-dir", str(tmp_path)])
    run.counters, run.signal, run.began, run.saved = dict(ppo.COUNTERS), None, 0.0, 0
    run.logger = ppo.Logger(tmp_path, run.args)
    monkeypatch.setattr(ppo, "NUM_RANKS", 2)

    def gathered_objects(value):
        signal.raise_signal(signal.SIGTERM)
        return [value, 0]

    monkeypatch.setattr(ppo, "gathered_objects", gathered_objects)
    signal.signal(signal.SIGTERM, run.stop)
    try:
        assert run.goes_on()
        assert not run.goes_on() and run.signal == signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    run.asked -= 2
    run.stop(signal.SIGINT, None)
    monkeypatch.setattr(ppo, "NUM_RANKS", 1)
    with pytest.raises(KeyboardInterrupt):  # as it would be without other ranks
        run.stop(signal.SIGINT, None)


def test_eval_takes_one_process(tmp_path, capsys, monkeypatch):
    """--eval under torchrun is refused."""
    run = ppo.train(ppo.parse_args(options(ppo, tmp_path)))
    capsys.readouterr()
    monkeypatch.setattr(ppo, "NUM_RANKS", 2)
    with pytest.raises(SystemExit):
        ppo.parse_args(["--eval", str(run.run_dir)])
    assert "--eval" in capsys.readouterr().err
