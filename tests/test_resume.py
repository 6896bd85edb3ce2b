"""Tests of --resume: a run that was stopped goes on as if nothing had happened."""

import csv
import json
import pickle
import shutil
import signal
import time
from pathlib import Path

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
    ppo: "--num-steps 16 --hidden 8".split(),
    ppo_atari: "--num-steps 16 --noop-max 4".split(),
    ppo_multilevel: "--num-steps 8 4 2 --levels 1 2 3 --hidden 8 --num-workers 0".split(),
}
NORMS = "--norm-reward --norm-obs --norm-value --adaptive-lr 0.01"
CASES = {
    "CartPole": (ppo, "--env CartPole-v1 --eval-every 2"),
    "CartPole, normalised": (ppo, f"--env CartPole-v1 {NORMS}"),
    "CartPole, LSTM": (ppo, "--env CartPole-v1 --rnn lstm --rnn-size 8 --num-workers 2"),
    "HalfCheetah": (ppo, "--env HalfCheetah-v5 --num-envs 2"),
    "Breakout": (ppo_atari, "--env Breakout --num-workers 0 --eval-every 4 --eval-episodes 1"),
    "Breakout, sticky": (ppo_atari, "--env Breakout --num-workers 2 --sticky-actions 0.25"),
    "ResSim, step": (ppo_multilevel, "--env ResSim-v1 --eval-every 2"),
    "ResSim, noise": (ppo_multilevel, "--env ResSim-v1 --coupling noise --num-workers 2"),
    "no map_from": (ppo_multilevel, "--env envs:make_cartpole"),
}
SECONDS = {"wall_seconds", "sim_seconds", "sim_cost", "sps"}


@pytest.fixture(autouse=True)
def remove_runs(tmp_path):
    """Remove the runs' folders: Atari's checkpoints have 20 MB."""
    yield
    shutil.rmtree(tmp_path)


def parse(script, log_dir, *options):
    """Parse the options of a small run."""
    return script.parse_args([*COMMON, *SMALL[script], *options, "--log-dir", str(log_dir)])


def train_until(script, args, last):
    """Train, with SIGTERM in the middle of iteration `last`."""
    with pytest.MonkeyPatch.context() as patch:
        real, count = script.update, []

        def update(*arguments):
            count.append(1)
            if len(count) == last:
                signal.raise_signal(signal.SIGTERM)
            return real(*arguments)

        patch.setattr(script, "update", update)
        run = script.train(args)
    assert run.signal == signal.SIGTERM and len(count) == last
    return run


def log(run_dir):
    """Return what a run has logged, without times: rows of progress.csv, TensorBoard's points."""
    with (run_dir / "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows = [{k: v for k, v in r.items() if k.rpartition("_")[2] != "seconds"} for r in rows]
    rows = [{k: v for k, v in row.items() if k not in SECONDS} for row in rows]
    events = EventAccumulator(str(run_dir)).Reload()
    tags = set(events.Tags()["scalars"]) - {"charts/SPS"}
    return rows, {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


def equal(a, b):
    """Whether two nested lists and dicts of tensors, arrays and plain values are equal."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return np.array_equal(a, b, equal_nan=isinstance(a, (float, np.ndarray)))


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_is_the_same_run(case, tmp_path, capsys):
    """6 iterations are 3, a stop, and 3 more: parameters, optimizer, generators, games, logs."""
    script, options = CASES[case]
    args = parse(script, tmp_path / "whole", "--num-iterations", "6", *options.split())
    whole = script.train(args)
    args.log_dir = str(tmp_path / "parts")
    Path(args.log_dir).mkdir()
    part = train_until(script, args, 3)
    assert len(part.history) < len(whole.history)
    (events,) = part.run_dir.glob("events*")
    while int(time.time()) <= int(events.name.split(".")[3]):
        time.sleep(0.05)  # TensorBoard reads files in the order of the seconds in their names
    more = ["--num-workers", "3"] if case == "CartPole, LSTM" else []  # which are no difference
    resumed = resume(script, part.run_dir, *more)
    assert capsys.readouterr().err.count("\n") == (2 if case == "no map_from" or more else 1)
    assert resumed.run_dir == part.run_dir
    saved = [script.load_checkpoint(run.run_dir) for run in (whole, resumed)]
    for state in saved:
        for name in SECONDS & state["counters"].keys():
            assert state["counters"].pop(name) > 0
    assert equal(*saved)
    files = [run.run_dir / "games-6.pkl" for run in (whole, resumed)]
    games = [pickle.loads(file.read_bytes()[32:])[0] for file in files]  # after the checksum
    for name in ("arrays", "seeds", "recent", "made_of"):
        first, second = (state[name] for state in games)
        if name == "arrays":
            first.pop("seconds", None), second.pop("seconds", None)
        assert equal(first, second), name
    assert None not in games[0]["states"]
    assert equal(*(log(run.run_dir) for run in (whole, resumed)))
    assert [path.name for path in part.run_dir.glob("games*")] == ["games-6.pkl"]
    assert not list(part.run_dir.glob("*.partial"))


SLOW = pytest.param(ppo_atari, marks=pytest.mark.slow)  # what it shares is tested by the others
NAMES = ["ppo", "ppo_atari", "ppo_multilevel"]
SCRIPTS = pytest.mark.parametrize("script", [ppo, SLOW, ppo_multilevel], ids=NAMES)
GOOD = {ppo: "CartPole-v1", ppo_atari: "Breakout", ppo_multilevel: "envs:make"}


def small_run(script, log_dir, *options, iterations=2):
    """Train a little. Returns the run."""
    options = ["--env", GOOD[script], "--num-workers", "0", *options]
    return script.train(parse(script, log_dir, "--num-iterations", str(iterations), *options))


def resume(script, run_dir, *options):
    """Resume a run. Returns the run."""
    return script.train(script.parse_args(["--resume", str(run_dir), "--quiet", *options]))


def test_seeds_in_the_config(tmp_path, monkeypatch):
    """They are those that the games start from."""
    buffers, real = [], ppo.rollout
    monkeypatch.setattr(ppo, "rollout", lambda *a: buffers.append(real(*a)[0]) or real(*a))
    run = small_run(ppo, tmp_path, iterations=1)
    seeds = json.loads((run.run_dir / "config.json").read_text())["game_seeds"]
    first = [gym.make("CartPole-v1").reset(seed=seed)[0] for seed in seeds]
    np.testing.assert_array_equal(buffers[0]["obs"][0], first)
    assert len(set(seeds)) == 4


def test_games_that_cannot_be_pickled(tmp_path, capsys):
    """They start new episodes with new seeds, and the log says so once."""
    first = small_run(ppo, tmp_path, "--env", "LunarLander-v3")
    before = json.loads((first.run_dir / "config.json").read_text())["game_seeds"]
    capsys.readouterr()
    second = resume(ppo, first.run_dir, "--num-iterations", "3")
    err = capsys.readouterr().err
    assert "4 games start new episodes: they could not be saved\n" in err and err.count("\n") == 2
    after = json.loads((first.run_dir / "config.json").read_text())["game_seeds"]
    assert len({*before, *after}) == 8
    assert [row["iteration"] for row in second.history] == [3]


@SCRIPTS
@pytest.mark.parametrize("damage", ["missing", "cut", "other games"])
def test_games_that_cannot_be_restored(script, tmp_path, capsys, damage):
    """Without a fitting file of games the run goes on with new episodes, and says why."""
    run_dir = small_run(script, tmp_path).run_dir
    path, options = run_dir / "games-2.pkl", ["--num-iterations", "3"]
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        options += ["--num-envs", "2"]
    capsys.readouterr()
    resumed = resume(script, run_dir, *options)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("all games start new episodes: ")]
    assert len(lines) == 2
    assert [row["iteration"] for row in resumed.history] == [3]
    assert (run_dir / "games-3.pkl").exists() and not path.exists()


@SCRIPTS
def test_changed_options_are_named(script, tmp_path, capsys):
    """Options given beside --resume are named with their old values, others are not."""
    run_dir = small_run(script, tmp_path).run_dir
    capsys.readouterr()
    resume(script, run_dir, *"--num-iterations 3 --gamma 0.5 --ent-coef 0.25".split())
    old = script.parse_args([]).ent_coef
    expected = "num_iterations 3 (was 2), gamma 0.5 (was 0.99), ent_coef 0.25 (was {})"
    (line,) = capsys.readouterr().err.splitlines()
    assert set(line.removeprefix("options changed: ").split(", ")) == set(
        expected.format(old).split(", ")
    )
    resume(script, run_dir)
    assert capsys.readouterr().err == ""


@SCRIPTS
@pytest.mark.parametrize("option", ["--seed 5", "--log-dir elsewhere", "--run-name other"])
def test_options_that_resume_refuses(script, tmp_path, capsys, option):
    """A seed that would have no effect, a folder that is not the run's."""
    run_dir = small_run(script, tmp_path, iterations=1).run_dir
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        script.parse_args(["--resume", str(run_dir), *option.split()])
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert option.split()[0] in line


@SCRIPTS
def test_games_whose_state_does_not_fit(script, tmp_path, capsys, monkeypatch):
    """As after an upgrade of a package: new episodes, and a line says why."""
    run_dir = small_run(script, tmp_path).run_dir

    def set_state(game, state):
        raise ValueError("there is another wrapper")

    monkeypatch.setattr(script.Game, "set_state", set_state)
    capsys.readouterr()
    resumed = resume(script, run_dir, "--num-iterations", "3")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 + 4  # options changed; four games, or actors
    assert all("starts a new episode: there is another wrapper" in line for line in lines[1:])
    assert [row["iteration"] for row in resumed.history] == [3]


def test_options_that_a_resumed_run_cannot_honour(tmp_path, capsys):
    """Parameters that are learned, and rates that adapt themselves."""
    env = ["--env", "Pendulum-v1"]
    run_dir = small_run(ppo, tmp_path, *env, "--adaptive-lr", "0.01", iterations=1).run_dir
    for option in ("--init-log-std", "--learning-rate", "--value-learning-rate"):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            ppo.parse_args(["--resume", str(run_dir), option, "0.5"])
        (line,) = capsys.readouterr().err.splitlines()
        assert option in line


@SCRIPTS
def test_run_that_died_while_saving(script, tmp_path, capsys):
    """Games saved for a checkpoint that never came are not used, and are removed."""
    run_dir = small_run(script, tmp_path).run_dir
    shutil.copy(run_dir / "games-2.pkl", run_dir / "games-7.pkl")
    (run_dir / "checkpoint.partial").write_bytes(b"half")
    capsys.readouterr()
    resumed = resume(script, run_dir, "--num-iterations", "3")
    assert "new episodes" not in capsys.readouterr().err
    assert [row["iteration"] for row in resumed.history] == [3]
    assert [path.name for path in run_dir.glob("games-*")] == ["games-3.pkl"]


class Counter(gym.Env):
    """An env that keeps a number, and says itself what its state is if `says`."""

    observation_space = gym.spaces.Box(0, 99, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, says=False, other=None):
        self.count, self.other = 0, other
        if says:
            self.other = lambda: 0  # which cannot be pickled
            self.get_state, self.set_state = lambda: self.count, lambda state: self.take(state)

    def take(self, state):
        self.count = 100 + state


def test_env_says_its_state():
    """get_state and set_state of an env are used where it has both, within its wrappers."""
    envs = [gym.wrappers.TimeLimit(Counter(says=True), 10) for _ in range(2)]
    envs[0].unwrapped.count, envs[0]._elapsed_steps = 5, 3
    ppo.set_env_state(envs[1], ppo.env_state(envs[0]))
    assert envs[1].unwrapped.count == 105 and envs[1]._elapsed_steps == 3


def test_env_without_a_way_to_tell_its_state():
    """What cannot be pickled, or another env that would lose its state, is not saved."""
    env = Counter(says=True)
    env.get_state = lambda player: 1 / 0  # another meaning, or a failure
    assert ppo.env_state(env) is None
    assert ppo.env_state(Counter(other=lambda: 0)) is None
    assert ppo.env_state(Counter(other=gym.make("HalfCheetah-v5"))) is None
    assert ppo.env_state(Counter(other=[1, 2])) is not None
