"""Tests of --resume: a run that was stopped goes on, with new episodes; all else is as it was."""

import csv
import json
import multiprocessing
import os
import shutil
import signal
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo
import ppo_atari
import ppo_multilevel

COMMON = "--num-envs 4 --num-minibatches 2 --update-epochs 2 --eval-episodes 2 --quiet".split()
SMALL = {
    ppo: "--env CartPole-v1 --num-steps 16 --hidden 8".split(),
    ppo_atari: "--env Breakout --num-envs 2 --num-steps 4 --noop-max 4".split(),
    ppo_multilevel: (
        "--env envs:make --levels 1 2 3 --num-steps 8 4 2 --hidden 8 --check-episodes 2 "
        "--num-workers 0 --level-costs 1e-3 2e-3 4e-3 20"
    ).split(),
}
NORMS = "--norm-reward --norm-obs --norm-value --adaptive-lr 0.01"
CASES = {
    "CartPole": (ppo, "--eval-every 2"),
    "CartPole, normalised": (ppo, f"--eval-every 3 {NORMS}"),
    "CartPole, LSTM": (ppo, "--rnn lstm --rnn-size 8 --num-workers 2"),
    "HalfCheetah": (ppo, "--env HalfCheetah-v5 --num-envs 2"),
    "Breakout": (ppo_atari, "--num-workers 2 --precision fp32"),
    "adaptive": (ppo_multilevel, "--eval-every 2 --norm-obs --norm-value"),
    "adaptive, workers": (
        ppo_multilevel,
        "--env envs:make_cartpole --num-steps 8 --num-workers 2 --level-costs 1e-3 4e-3 1e-2 20",
    ),
    "pairs, step": (
        ppo_multilevel,
        "--schedule together --coupling step --eval-every 2",
    ),
    "pairs, noise": (
        ppo_multilevel,
        "--env envs:make_line --schedule together --eval-every 0 --num-workers 2",
    ),
}
SECONDS = {"wall_seconds", "sps"}


@pytest.fixture(autouse=True)
def remove_runs(tmp_path):
    """Remove the runs' folders: Atari's checkpoints have 20 MB."""
    yield
    shutil.rmtree(tmp_path)


def parse(script, log_dir, *options):
    """Parse the options of a small run."""
    return script.parse_args([*COMMON, *SMALL[script], *options, "--log-dir", str(log_dir)])


def small_run(script, log_dir, *options, iterations=2):
    """Train a little. Returns the run."""
    return script.train(parse(script, log_dir, "--num-iterations", str(iterations), *options))


def resume(script, run_dir, *options):
    """Resume a run. Returns the run."""
    return script.train(script.parse_args(["--resume", str(run_dir), "--quiet", *options]))


def train_with_new_games(script, args, iteration):
    """Train, with new episodes in all games after some iterations, as a resumed run has them."""
    goes_on = script.Run.goes_on

    def goes_on_with_new_games(run):
        if run.iteration == iteration:
            run.start_games()
        return goes_on(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.Run, "goes_on", goes_on_with_new_games)
        return script.train(args)


def train_until(script, args, last):
    """Train, with SIGTERM in the middle of iteration `last`."""
    update = script.update
    count = []

    def update_with_signal(*arguments):
        count.append(1)
        if len(count) == last:
            signal.raise_signal(signal.SIGTERM)
        return update(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "update", update_with_signal)
        run = script.train(args)
    assert run.signal == signal.SIGTERM and run.iteration == last
    return run


def progress(run_dir):
    """Return the rows of progress.csv without what takes another time in each run."""
    with (run_dir / "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if name not in SECONDS} for row in rows]


def points(run_dir):
    """Return TensorBoard's points without what takes another time in each run."""
    events = EventAccumulator(str(run_dir)).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if "SPS" not in tag]
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


def saved(script, run_dir):
    """Return a run's checkpoint without what takes another time in each run."""
    state = script.read_checkpoint(run_dir)
    state.get("costs", {}).pop("update_seconds", None)
    for row in (state["counters"], *state["history"]):
        for name in SECONDS & row.keys():
            row.pop(name)
    return state


def equal(a, b):
    """Whether two nested lists and dicts of tensors and plain values are equal."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return np.array_equal(a, b, equal_nan=isinstance(a, float))


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_is_the_same_run(case, tmp_path, capsys):
    """2k iterations, with new episodes after k, are k, a stop, and k more: bit for bit."""
    script, options = CASES[case]
    # When adaptive is stopped it has just judged a level and chosen another one.
    k = 16 if "adaptive" in case else 3
    args = parse(script, tmp_path / "whole", "--num-iterations", str(2 * k), *options.split())
    whole = train_with_new_games(script, args, k)
    args.log_dir = str(tmp_path / "parts")
    part = train_until(script, args, k)
    if "adaptive" in case:
        assert args.levels[part.rule.level] != part.history[-1]["level"] and part.rule.refit
    capsys.readouterr()
    resumed = resume(script, part.run_dir)
    assert resumed.run_dir == part.run_dir and resumed.iteration == 2 * k
    assert_same(script, whole.run_dir, part.run_dir)


def assert_same(script, whole, resumed):
    """Compare the checkpoints, the rows of progress.csv and TensorBoard's points of two runs."""
    assert equal(saved(script, whole), saved(script, resumed))
    assert progress(whole) == progress(resumed)
    assert points(whole) == points(resumed)
    assert not list(resumed.glob("*.partial"))


def die_in_iteration(args, last):
    """Train until the process is killed in the middle of iteration `last`."""
    update = ppo.update
    count = []

    def update_and_die(*arguments):
        count.append(1)
        if len(count) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(*arguments)

    ppo.update = update_and_die
    ppo.train(args)


@pytest.mark.skipif(sys.platform != "linux", reason="the process is forked")
def test_run_that_was_killed(tmp_path):
    """kill -9 leaves rows that no checkpoint has, and perhaps half a file. A resumed run writes
    these rows again, and learns what a run learns that was not killed."""
    options = "--num-iterations 10 --save-every 3 --eval-every 4 --run-name killed".split()
    args = parse(ppo, tmp_path, *options)
    process = multiprocessing.get_context("fork").Process(target=die_in_iteration, args=(args, 9))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    killed = tmp_path / "killed"
    assert [row["iteration"] for row in progress(killed)] == [str(i) for i in range(9)]
    assert ppo.read_checkpoint(killed)["counters"]["iteration"] == 6
    # TensorBoard reads files in the order of their names, which begin with the second.
    (events,) = killed.glob("events.out.tfevents.*")
    events.rename(killed / "events.out.tfevents.0000000000.killed")
    for name in ("checkpoint.partial", "config.partial"):
        (killed / name).write_bytes(b"half")
    with (killed / "progress.csv").open("a") as file:
        file.write("9,1\r\n1")

    resume(ppo, killed)
    assert [row["iteration"] for row in progress(killed)] == [str(i) for i in range(11)]
    args.run_name = "whole"
    whole = train_with_new_games(ppo, args, 6)
    assert_same(ppo, whole.run_dir, killed)


def first_observations(monkeypatch):
    """Return a list that collects what the games of ppo.py show first in each rollout, (N, D)."""
    seen = []
    rollout = ppo.rollout

    def watched(*arguments):
        buffer = rollout(*arguments)
        seen.append(buffer["obs"][0])
        return buffer

    monkeypatch.setattr(ppo, "rollout", watched)
    return seen


def test_seeds_of_games(tmp_path, monkeypatch):
    """All games have their own, and others when the run is resumed."""
    seen = first_observations(monkeypatch)
    run = small_run(ppo, tmp_path, "--seed", "5")
    resume(ppo, run.run_dir, "--num-iterations", "3")
    seeds = []
    for rollout, iteration in ((0, 0), (2, 2)):
        own = ppo.draw_seeds(4, 5, iteration).tolist()
        starts = [gym.make("CartPole-v1").reset(seed=seed)[0] for seed in own]
        np.testing.assert_array_equal(seen[rollout], starts)
        seeds += own
    assert len(set(seeds)) == 8


def test_discounted_sums_of_new_episodes(tmp_path, monkeypatch):
    """Those of --norm-reward start anew with the games."""
    run = small_run(ppo, tmp_path, "--norm-reward")
    buffers = []
    rollout = ppo.rollout

    def watched(*arguments):
        buffers.append(rollout(*arguments))
        return buffers[-1]

    monkeypatch.setattr(ppo, "rollout", watched)
    resume(ppo, run.run_dir, "--num-iterations", "3")
    # CartPole's rewards are 1, γ is 0.99.
    for t, expected in enumerate([1, 1.99]):
        assert buffers[0]["discounted"][t].tolist() == pytest.approx([expected] * 4)


def test_other_options(tmp_path, capsys):
    """The command line wins over the run's options, which are the defaults; it is kept, too."""
    run = small_run(ppo, tmp_path, "--gamma", "0.5", "--learning-rate", "1e-3")
    more = "--total-timesteps 320 --num-workers 1 --eval-every 1 --learning-rate 2e-3"
    resumed = resume(ppo, run.run_dir, *more.split())
    assert len(resumed.pool.workers) == 1 and resumed.args.gamma == 0.5
    assert [row["iteration"] for row in resumed.history] == [1, 2, 3, 4, 5]
    assert ["eval_return" in row for row in resumed.history] == [False, False, True, True, True]
    # The rate falls linearly over the new length, from the new value.
    rates = [row["learning_rate"] for row in resumed.history]
    assert rates == pytest.approx([1e-3, 1e-3 / 2, 2e-3 * 3 / 5, 2e-3 * 2 / 5, 2e-3 / 5])
    config = json.loads((run.run_dir / "config.json").read_text())
    kept = {name: config[name] for name in ("num_iterations", "gamma", "learning_rate")}
    assert kept == {"num_iterations": 5, "gamma": 0.5, "learning_rate": 2e-3}

    again = resume(ppo, run.run_dir)
    assert again.iteration == 5 and len(again.history) == 5  # it is complete


@pytest.mark.parametrize("script", SMALL, ids=lambda script: script.__name__)
def test_run_that_is_complete(script, tmp_path, capsys):
    """One line says so, and how it becomes longer; its options stay. Nothing is said of a run that
    goes on."""
    run_dir = small_run(script, tmp_path).run_dir
    config = (run_dir / "config.json").read_text()
    lengths = ["--num-iterations 2", "--num-iterations 1"]
    if script is not ppo_multilevel:
        lengths.append("--total-timesteps 1")
    for length in ["", *lengths]:
        capsys.readouterr()
        words = [*length.split(), "--learning-rate", "0.5"]
        assert resume(script, run_dir, *words).iteration == 2
        assert (run_dir / "config.json").read_text() == config
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("the run is complete: to resume it, give ")
        assert line.endswith("--num-iterations above 2")
    assert resume(script, run_dir, "--num-iterations", "3").iteration == 3
    assert "complete" not in capsys.readouterr().err


def test_other_workers(tmp_path):
    """A run that is resumed with workers learns what it would learn without, up to rounding."""
    run_dir = small_run(ppo, tmp_path, "--env", "envs_tricks:NoiseBox-v0").run_dir
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    alone = resume(ppo, run_dir, "--num-iterations", "4")
    workers = resume(ppo, copy, "--num-iterations", "4", "--num-workers", "3")
    assert len(workers.pool.workers) == 3
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(workers.model.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def test_options_of_levels(tmp_path, capsys):
    """A length replaces that of the run, of whatever kind. What checks compare must stay."""
    run_dir = str(small_run(ppo_multilevel, tmp_path).run_dir)
    args = ppo_multilevel.parse_args(["--resume", run_dir, "--hours", "2"])
    assert (args.hours, args.num_iterations, args.finest_steps) == (2, None, None)
    for options in ("--levels 1 2", "--check-episodes 4"):
        words = [*options.split(), "--num-steps", "4", "--level-costs", "1", "2", "3"]
        words += ["4"] if "check" in options else []
        with pytest.raises(SystemExit):
            ppo_multilevel.parse_args(["--resume", run_dir, *words])
        assert (
            "argument --resume: ['levels', 'check_episodes'] must stay" in capsys.readouterr().err
        )
