"""Tests of the worker pool: start methods, games that fail, workers and runs that are killed."""

import functools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import envs
import numpy as np
import pytest
import torch

import ppo
import ppo_atari
import ppo_multilevel

ROOT = Path(__file__).resolve().parent.parent
SLOW = pytest.mark.slow  # what it shares with ppo.py is tested there
SCRIPTS = [ppo, ppo_atari, ppo_multilevel]
SMALL = "--num-minibatches 2 --update-epochs 1 --num-envs 4 --eval-every 0".split()
OWN = {
    ppo: "--num-steps 16 --hidden 8".split(),
    ppo_atari: "--num-envs 2 --num-steps 8 --eval-episodes 1 --precision fp32".split(),
    ppo_multilevel: (
        "--levels 1 2 --num-steps 16 8 --hidden 8 --schedule together --level-costs 1 1 1"
    ).split(),
}
GOOD = {ppo: "CartPole-v1", ppo_atari: "Breakout", ppo_multilevel: "envs:make"}
COMMANDS = {
    ppo: [["start"], ["step"]],
    ppo_atari: [["start"], ["step"]],
    ppo_multilevel: [["start"], ["step", 0], ["step", 1, "noise"], ["step", 1, "step"]],
}
linux = pytest.mark.skipif(sys.platform != "linux", reason="uses /proc and /dev/shm")


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.__name__)
def script(request):
    """Each of the scripts."""
    return request.param


def only(*scripts):
    """Mark a test that makes sense for some scripts only."""
    names = [script.__name__ for script in scripts]
    return pytest.mark.parametrize("script", scripts, ids=names, indirect=True)


atari_slow = pytest.mark.parametrize(
    "script",
    [ppo, pytest.param(ppo_atari, marks=SLOW), ppo_multilevel],
    ids=[script.__name__ for script in SCRIPTS],
    indirect=True,
)


class BadGame(ppo_atari.Game):
    """An Atari game in which `where` goes wrong: its reset, or its 5th step."""

    where = None

    def reset(self, seed=None):
        if self.where == "reset":
            raise RuntimeError("broken on purpose")
        return super().reset(seed)

    def step(self):
        if self.where == "step" and self.length == 4:
            raise RuntimeError("broken on purpose")
        super().step()


@pytest.fixture
def bad_env(script, monkeypatch):
    """Return a function: `where` → the name of an env in which that goes wrong."""

    def name(where):
        if script is ppo_atari:
            monkeypatch.setattr(BadGame, "where", where)
            monkeypatch.setattr(ppo_atari, "Game", BadGame)
            return GOOD[script]
        return f"envs:Trouble-{where}-v0" if script is ppo else f"envs:make_{where}"

    return name


@pytest.fixture(autouse=True)
def remove_runs(tmp_path):
    """Remove the run's folder: Atari's checkpoints have 20 MB."""
    yield
    shutil.rmtree(tmp_path)


def parse(script, log_dir, *options):
    """Parse the options of a small run."""
    options = [*SMALL, *OWN[script], *options, "--quiet", "--log-dir", str(log_dir)]
    return script.parse_args(options)


def run_main(script, monkeypatch, log_dir, *options):
    """Run a script's main on a small run. Returns its exit code."""
    options = [*SMALL, *OWN[script], "--quiet", "--log-dir", str(log_dir), *options]
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *options])
    return script.main()


def make_pool(script, args, model, num_workers, start_method=None):
    """Return the pool of a script's games as its make_pool does, with a start method."""
    with pytest.MonkeyPatch.context() as patch:
        real = script.WorkerPool
        patch.setattr(
            script, "WorkerPool", lambda *a, **k: real(*a, **k, start_method=start_method)
        )
        return script.make_pool(args, model, script.game_seeds(args, 0), num_workers)


def make_model(script, args):
    """Return a model."""
    torch.manual_seed(0)
    return script.make_model(args)


# The pool -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_do_what_this_process_does(script, tmp_path, start_method, num_workers):
    """All start methods and numbers of workers fill the shared arrays alike."""
    if start_method == "spawn" and num_workers == 3:
        pytest.skip("spawn is slow, one worker will do")
    if start_method == "fork" and num_workers == 1 and script is ppo_atari:
        pytest.skip("Atari is slow, three workers will do")
    if start_method == "fork" and not hasattr(os, "fork"):
        pytest.skip("no fork here")
    args = parse(script, tmp_path, "--env", GOOD[script], "--num-envs", "4")
    model = make_model(script, args)
    hows = (0, None), (num_workers, start_method)
    pools = [make_pool(script, args, model, *how) for how in hows]
    assert len(pools[1].workers) == num_workers

    def compare(*arrays):
        for name in set(arrays[0]) - {"seconds"}:
            np.testing.assert_array_equal(*(each[name] for each in arrays), name)

    try:
        noise = np.random.default_rng(0).gumbel(size=pools[0].buffer["noise"].shape)
        for pool in pools:
            pool.buffer["noise"][:] = noise
        for command in COMMANDS[script]:
            for pool in pools:
                pool.call(*command)
            compare(*(pool.arrays for pool in pools))
        assert np.abs(pools[0].arrays["obs"]).min(axis=-1).max() > 0
        with torch.no_grad():  # the workers have the weights that an update would leave
            for parameter in model.parameters():
                parameter.zero_()
        for pool in pools:
            pool.play(model, len(noise))
        compare(*(pool.arrays for pool in pools))
        compare(*(pool.buffer for pool in pools))
        actions = pools[1].buffer["actions"]
        if script is ppo_multilevel:  # a Gaussian with mean 0 and σ 1
            np.testing.assert_allclose(actions[ppo_multilevel.OWN], noise, rtol=1e-6)
        else:
            np.testing.assert_array_equal(actions, noise.argmax(axis=-1))
    finally:
        for pool in pools:
            pool.close()
    assert not any(process.is_alive() for _, process in pools[1].workers)


def test_arrays_are_aligned(tmp_path):
    """By the alignment of an array torch may round otherwise: two pools would not do the same."""
    args = parse(ppo, tmp_path, "--env", "CartPole-v1", "--num-envs", "3")
    for _ in range(3):
        pool = make_pool(ppo, args, make_model(ppo, args), 0)
        arrays = [*pool.arrays.values(), *pool.buffer.values()]
        assert {array.ctypes.data % 64 for array in arrays} == {0}


def test_more_workers_than_games(script, tmp_path):
    """There are never more workers than games."""
    args = parse(script, tmp_path, "--env", GOOD[script], "--num-envs", "4")
    pool = make_pool(script, args, make_model(script, args), 7)
    pool.close()
    assert len(pool.workers) == 4


@pytest.mark.parametrize("num_workers", ["0", "2"])
@pytest.mark.parametrize("where", ["step", "reset"])
def test_game_that_raises(script, tmp_path, bad_env, where, num_workers):
    """The error names the game and its seed first, then has the game's own traceback."""
    if script is ppo_atari and num_workers != "0" and sys.platform != "linux":
        pytest.skip("spawned workers do not know BadGame")
    env = bad_env(where)
    options = ["--env", env, "--num-workers", num_workers]
    with pytest.raises(script.GameError) as error:
        script.train(parse(script, tmp_path, *options))
    first, *rest = str(error.value).splitlines()
    assert env in first
    assert ("level 2" in first) == (script is ppo_multilevel)
    place = "" if script is ppo_atari else r", episode \d+, after \d+ steps"
    reason = "RuntimeError: broken on purpose"
    assert re.search(rf"\(seed \d+{place}\) failed in {where}: {reason}", first)
    assert rest[0].startswith("Traceback") and "broken on purpose" in rest[-1]
    assert ("test_pool.py" if script is ppo_atari else "envs.py") in str(error.value)
    if where == "step":  # training had begun
        (run_dir,) = tmp_path.iterdir()
        script.Checkpoint(run_dir).read()


@pytest.mark.parametrize("num_workers", ["0", "1"])
def test_game_that_cannot_be_made(tmp_path, monkeypatch, num_workers):
    """The error is the pool's if a worker makes it, and the game's own in this process."""
    if num_workers != "0" and sys.platform != "linux":
        pytest.skip("spawned workers do not know fail")
    args = parse(ppo, tmp_path, "--env", GOOD[ppo], "--num-workers", num_workers)

    def fail(*_, **__):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(ppo, "Game", fail)
    with pytest.raises(ppo.GameError if num_workers == "1" else RuntimeError, match="broken on"):
        ppo.train(args)


def test_file_is_loaded_once(tmp_path):
    """All games of a user's file are of one module: it may keep data, and compare classes."""
    text = (Path(__file__).parent / "envs.py").read_text()
    (tmp_path / "simulation.py").write_text(text + "\n\nLOADS = []\n")
    env = f"{tmp_path / 'simulation.py'}:make_trouble"
    args = parse(ppo_multilevel, tmp_path / "runs", "--env", env, "--num-iterations", "1")
    args.num_workers = 0
    ppo_multilevel.train(args)


@only(ppo, ppo_multilevel)
@pytest.mark.parametrize("where", ["nan_reward", "huge_reward", "nan_obs", "nan_reset"])
def test_game_that_gives_nan(script, tmp_path, capsys, monkeypatch, bad_env, where):
    """One line names the quantity, the game and the step; a checkpoint is left."""
    options = [*SMALL, *OWN[script], "--quiet", "--num-workers", "0"]
    options += ["--log-dir", str(tmp_path), "--env", bad_env(where)]
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *options])
    assert script.main() == 1
    *hints, line = capsys.readouterr().err.splitlines()
    counts_episodes = script is ppo_multilevel
    assert hints == [ppo_multilevel.SEED_VARIES] * counts_episodes
    found = {"nan_obs": ("next_obs[0]", 4), "nan_reset": ("obs[0]", 0)}
    name, t = found.get(where, ("rewards", 4))
    who = "level 2, actor 0" if script is ppo_multilevel else "game 0"
    what = f"NaN or over 1e15 in {name} of {who}"
    assert line.endswith(f": error: {what}, step {t}")
    (run_dir,) = tmp_path.iterdir()
    state = script.Checkpoint(run_dir).read()
    assert state["counters"]["iteration"] == 0 and state["games"] is None
    assert all(torch.isfinite(value).all() for value in state["model"].values())


def test_partner_that_gives_nan_after_map_from(tmp_path):
    """A NaN of psi() after map_from is found, before an update has seen it."""
    options = ["--env", "envs:make_nan_psi", "--levels", "2", "3", "--num-steps", "16", "4"]
    args = parse(ppo_multilevel, tmp_path, *options, *"--num-iterations 1 --num-workers 0".split())
    found = r"^NaN or over 1e15 in obs\[0\] of level 2, actor 0, step 0"
    with pytest.raises(ppo_multilevel.GameError, match=found):
        ppo_multilevel.train(args)


@linux
def test_games_start_in_workers(tmp_path, monkeypatch):
    """A solver's threads that have run in a process may be lost in those that it forks. (What masks
    there are, only a reset tells: that of an env whose actions have none is not called before.)"""
    reset = envs.Scripted.reset

    def reset_in_a_worker(env, **options):
        assert multiprocessing.parent_process() is not None, "reset before workers fork"
        return reset(env, **options)

    monkeypatch.setattr(envs.Scripted, "reset", reset_in_a_worker)
    options = "--env envs:ScriptedBox-v0 --num-workers 2 --num-envs 2 --num-steps 8"
    assert ppo.train(parse(ppo, tmp_path, *options.split(), "--num-iterations", "1")).saved == 1


@pytest.mark.parametrize("num_workers", ["0", "1"])
def test_game_that_calls_exit(tmp_path, capfd, monkeypatch, num_workers):
    """sys.exit(0) in a game is a failure like any other, not the end of a run that went well."""
    if num_workers != "0" and sys.platform != "linux":
        pytest.skip("spawned workers do not know step")
    monkeypatch.setattr(ppo.Game, "step", lambda game: sys.exit(0))
    assert run_main(ppo, monkeypatch, tmp_path, "--num-workers", num_workers) == 1
    first, *rest = capfd.readouterr().err.strip().splitlines()
    assert re.match(
        r"ppo.py: error: CartPole-v1 \(seed \d+.*\) failed in step: .*SystemExit", first
    )
    assert rest[0].startswith("Traceback") and rest[-1] == "SystemExit: 0"
    assert multiprocessing.active_children() == []


@linux
def test_keyboard_interrupt_in_a_worker(tmp_path, capfd, monkeypatch):
    """Of a worker that a game interrupts there is one line first, and nothing of its own."""

    def step(game):
        raise KeyboardInterrupt

    monkeypatch.setattr(ppo.Game, "step", step)
    assert run_main(ppo, monkeypatch, tmp_path, "--num-workers", "1") == 1
    first, *rest = capfd.readouterr().err.strip().splitlines()
    assert re.match(r"ppo.py: error: .*KeyboardInterrupt: \(in step, .*test_pool.py:\d+\)$", first)
    assert rest[0].startswith("Traceback") and rest[-1] == "KeyboardInterrupt"
    assert sum(line.startswith("Traceback") for line in rest) == 1
    assert multiprocessing.active_children() == []


@atari_slow
def test_evaluation_that_fails(script, tmp_path, monkeypatch):
    """A game that fails in an evaluation leaves the last iteration's checkpoint."""

    def fail(*_, **__):
        raise script.GameError("broken on purpose")

    args = parse(script, tmp_path, "--env", GOOD[script], "--num-iterations", "3")
    args.eval_every, args.save_every, args.num_workers = 2, 0, 0
    results = iter([lambda *_, **__: (np.zeros(1), 0), fail])
    monkeypatch.setattr(script, "evaluate", lambda *a, **k: next(results)(*a, **k))
    with pytest.raises(script.GameError):
        script.train(args)
    (run_dir,) = tmp_path.iterdir()
    assert script.Checkpoint(run_dir).read()["counters"]["iteration"] == 2


@atari_slow
@pytest.mark.parametrize("during", [0, 2])
def test_signal_during_an_evaluation(script, tmp_path, monkeypatch, during):
    """A signal ends the evaluation of iteration 2 or of the start; a resumed run makes it again;
    a checkpoint is left too."""
    args = parse(script, tmp_path, "--env", GOOD[script], "--num-iterations", "3")
    args.eval_every, args.save_every, args.num_workers = 2, 0, 0
    cuts, real = [], script.evaluate

    def evaluate(*arguments, run):
        if cuts or run.iteration != during:
            return np.zeros(1), 0
        signal.raise_signal(signal.SIGTERM)
        returns, cut = real(*arguments, run=run)
        cuts.append(cut)
        return returns, cut

    monkeypatch.setattr(script, "evaluate", evaluate)
    result = script.train(args)
    assert result.signal == signal.SIGTERM
    assert cuts == [args.eval_episodes]  # before their first step
    assert np.isnan(result.history[-1]["eval_return"])
    assert script.Checkpoint(result.run_dir).read()["counters"]["iteration"] == during
    assert iterations(result.run_dir) == list(range(during + 1))
    resumed = script.train(script.parse_args(["--resume", str(result.run_dir), "--quiet"]))
    assert iterations(result.run_dir) == [0, 1, 2, 3]
    assert [row.get("eval_return") for row in resumed.history] == [0, None, 0, 0]


@atari_slow
@pytest.mark.parametrize("during", [0, 2])
def test_game_that_fails_in_an_evaluation(script, tmp_path, monkeypatch, during):
    """The evaluation is made again by a resumed run, in which nothing fails."""
    args = parse(script, tmp_path, "--env", GOOD[script], "--num-iterations", "3")
    args.eval_every, args.save_every, args.num_workers = 2, 0, 0

    def evaluate(*arguments, run):
        if run.iteration == during:
            raise script.GameError("broken on purpose")
        return np.zeros(1), 0

    monkeypatch.setattr(script, "evaluate", evaluate)
    with pytest.raises(script.GameError, match="on purpose"):
        script.train(args)
    (run_dir,) = tmp_path.iterdir()
    assert script.Checkpoint(run_dir).read()["counters"]["iteration"] == during
    monkeypatch.setattr(script, "evaluate", lambda *_, run: (np.zeros(1), 0))
    resumed = script.train(script.parse_args(["--resume", str(run_dir), "--quiet"]))
    assert iterations(run_dir) == [0, 1, 2, 3]
    assert [row.get("eval_return") for row in resumed.history] == [0, None, 0, 0]


def iterations(run_dir):
    """Return the first column of progress.csv."""
    return [int(x.split(",")[0]) for x in (run_dir / "progress.csv").read_text().splitlines()[1:]]


@atari_slow
def test_handlers_are_put_back(script, tmp_path):
    """train leaves the process's signal handlers as they were."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    script.train(parse(script, tmp_path, "--env", GOOD[script], "--num-iterations", "1"))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize("iterations", ["1", "9"])
def test_worker_that_dies_during_an_update(script, tmp_path, monkeypatch, iterations):
    """Nobody waits for it then. The next rollout or save finds it dead; the iteration is saved."""
    options = ["--env", GOOD[script], "--num-workers", "2", "--num-iterations", iterations]
    args = parse(script, tmp_path, *options)
    real = script.update

    def update(*arguments):
        children = multiprocessing.active_children()  # named by number; pids may begin anew
        victim = min(children, key=lambda process: int(process.name.rpartition("-")[2]))
        victim.kill()
        return real(*arguments)

    monkeypatch.setattr(script, "update", update)
    with pytest.raises(
        script.GameError, match=r"^worker 0 with games 0 to \d died with exit code -9$"
    ):
        script.train(args)
    assert multiprocessing.active_children() == []
    (run_dir,) = tmp_path.iterdir()
    assert script.Checkpoint(run_dir).read()["counters"]["iteration"] == 1


@linux
@pytest.mark.parametrize("where", ["games", "update"])
def test_run_that_is_stopped_at_once(script, tmp_path, monkeypatch, where):
    """By a second Ctrl-C, in iteration 3. If games are busy, one of which may hang, what is
    complete is saved, and goes on with new games; an update that is half done is not."""
    real_call, real_update, updates, stopped = script.Games.call, script.update, [], []

    def stop():
        stopped.append(1)
        for seconds in (1.1, 0.1):
            signal.raise_signal(signal.SIGINT)
            time.sleep(seconds)

    def update(*arguments):
        updates.append(1)
        where == "update" and len(updates) == 3 and stop()
        return real_update(*arguments)

    def call(games, *arguments, **options):
        where == "games" and len(updates) == 2 and not stopped and stop()
        return real_call(games, *arguments, **options)

    monkeypatch.setattr(script, "update", update)
    monkeypatch.setattr(script.Games, "call", call)
    options = ["--env", GOOD[script], "--num-workers", "0", "--save-every", "0"]
    assert run_main(script, monkeypatch, tmp_path, *options, "--num-iterations", "3") == 130
    (run_dir,) = tmp_path.iterdir()
    assert stopped and (run_dir / "checkpoint.pt").exists() == (where == "games")
    if where == "games":
        state = script.Checkpoint(run_dir).read()
        assert state["counters"]["iteration"] == 2 and state["games"] is None
        run = script.train(script.parse_args(["--resume", str(run_dir), "--quiet"]))
        assert [run.iteration, run.num_starts] == [3, 1]


@linux
@pytest.mark.parametrize("num_workers", ["0", "1"])
def test_second_signal_during_a_rollout(tmp_path, monkeypatch, capsys, num_workers):
    """The first Ctrl-C waits for the end of a rollout, one of the same moment is the same request.
    One more than a second later stops at once, and says which checkpoint there is.
    """
    waits, steps, main = {70: 0.005, 72: 1.1, 74: 0.2}, [], os.getpid()  # in iteration 2

    def step(game):
        steps.append(1)
        if len(steps) in waits:
            os.kill(main, signal.SIGINT)
            time.sleep(waits[len(steps)])
        real(game)

    real = ppo.Game.step
    monkeypatch.setattr(ppo.Game, "step", step)
    more = ["--num-workers", num_workers, "--save-every", "1", "--num-iterations", "3"]
    assert run_main(ppo, monkeypatch, tmp_path, *more) == 128 + signal.SIGINT
    assert multiprocessing.active_children() == []
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("stopping after this iteration")
    assert second == "stopped at once; iterations since the last checkpoint may be lost"
    (run_dir,) = tmp_path.iterdir()
    assert iterations(run_dir) == [1]
    state = ppo.Checkpoint(run_dir).read()
    assert state["counters"]["iteration"] == 1 and state["games"] is not None


@pytest.mark.parametrize("where", ["make_pool", "step"])
def test_second_signal_before_there_is_a_checkpoint(tmp_path, monkeypatch, capsys, where):
    """One is made then, without games, one of which may hang; not while the run is set up."""

    def wait(*args):
        for seconds in (1.1, 0.1):
            signal.raise_signal(signal.SIGINT)
            time.sleep(seconds)

    monkeypatch.setattr(ppo if where == "make_pool" else ppo.Game, where, wait)
    assert run_main(ppo, monkeypatch, tmp_path, "--num-workers", "0") == 128 + signal.SIGINT
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("stopped at once") and "None" not in line
    states = [ppo.Checkpoint(path.parent).read() for path in tmp_path.rglob("checkpoint.pt")]
    found = [(state["counters"]["iteration"], state["games"]) for state in states]
    assert found == ([] if where == "make_pool" else [(0, None)])


# Whole runs ---------------------------------------------------------------------------------------


def process(pid):
    """Return the state of a process and its parent; "" and 0 if it is gone."""
    with suppress(OSError):
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return state, int(parent)
    return "", 0


def alive(pid):
    """Whether the process exists and is no zombie."""
    return process(pid)[0] not in ("", "Z")


def runs(pid):
    """Whether the process computes: it does not wait for anything but a core."""
    return process(pid)[0] == "R"


def wait_until(condition, seconds):
    """Wait until condition() holds. Returns whether it did in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def shared_memory():
    """Return the names of what multiprocessing and torch keep in /dev/shm."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("pym-", "psm_", "torch_"))}


HOWS = ("two SIGTERM", "SIGINT", "SIGTERM", "kill worker", "kill main")
ENDS = {(ppo, how) for how in HOWS[:2]} | {(ppo, "kill main")}
ENDS |= {(ppo_atari, "kill worker")}  # its workers are in the middle of a rollout then
ENDS = [
    pytest.param(script, how, marks=() if (script, how) in ENDS else SLOW)
    for script in SCRIPTS
    for how in HOWS
]


class Drawer:
    """A game that draws by the generators of `random`, NumPy and torch, not by one of its own."""

    def __init__(self, *_, **options):
        self.drawn = (random.random(), np.random.random(), float(torch.rand(())))

    def get_state(self):
        return self.drawn


def test_workers_draw_other_numbers(script, tmp_path, monkeypatch):
    """Generators that games share are not the same in all workers, and follow the seed."""
    monkeypatch.setattr(script, "Game", Drawer)
    monkeypatch.setattr(script.Games, "close", lambda games: None)
    model = make_model(script, parse(script, tmp_path))

    def drawn(seed):
        args = parse(script, tmp_path, "--seed", str(seed), "--num-envs", "4")
        with closing(make_pool(script, args, model, 4)) as pool:
            return np.array(sum(pool.call("get_state"), [])).reshape(-1, 3)

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert len(first) >= 4 and len(np.unique(first)) == first.size
    assert len(np.unique(np.concatenate([first, other]))) == 2 * first.size
    assert np.array_equal(first, again)
    monkeypatch.setattr(script, "NUM_RANKS", 2)
    monkeypatch.setattr(script, "RANK", 1)
    assert not np.isin(drawn(1), first).any()


class Solvers:
    """Games of which each starts a program; game 0 fails with an error if it is to."""

    def __init__(self, error, rows, *_):
        self.programs = [subprocess.Popen(["sleep", "60"]) for _ in rows]
        self.rows, self.error = rows, error

    def call(self, command):
        if command == "fail" and 0 in self.rows:
            raise self.error("broken on purpose")
        if command == "close":
            for program in self.programs:
                program.terminate()
                program.wait()
        return [program.pid for program in self.programs]


def solve(make_pool, pipe):
    """Have workers start programs, tell their pids, wait to be killed."""
    pipe.send(sum(make_pool().call("start"), []))
    time.sleep(60)


@linux
@pytest.mark.parametrize("how", ["close", "fail", "kill main"])
def test_programs_of_games_end(script, how):
    """What games have started ends by their close, however the run ends."""
    make_games = functools.partial(Solvers, script.GameError)
    make_pool = functools.partial(script.WorkerPool, make_games, {}, {}, 4, 2, None)
    if how == "kill main":
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        main = context.Process(target=solve, args=(make_pool, there))
        main.start()
        pids = here.recv()
        main.kill()
        main.join()
    else:
        pool = make_pool()
        pids = sum(pool.call("start"), [])
        if how == "fail":
            with pytest.raises(script.GameError, match="broken on purpose"):
                pool.call("fail")
        started = time.monotonic()
        pool.close()
        assert time.monotonic() - started < 4  # else workers have been killed
    assert len(pids) == 4 and wait_until(lambda: not any(map(alive, pids)), 10)


class Slow:
    """Games that take `seconds` for every command, `close` too."""

    def __init__(self, seconds, rows, *_):
        self.seconds = seconds

    def call(self, command):
        time.sleep(self.seconds)


@linux
@only(ppo)  # the pool is the same text in all scripts
@pytest.mark.parametrize("error, seconds", [(None, 6), (KeyboardInterrupt, 60)])
def test_close_waits(script, capsys, error, seconds):
    """Games have half a minute to close, but five seconds after Ctrl-C; who is killed is told."""
    pool = script.WorkerPool(functools.partial(Slow, seconds), {}, {}, 2, 2, None)
    started = time.monotonic()
    with suppress(KeyboardInterrupt), closing(pool):
        if error:
            raise error
    assert 5 <= time.monotonic() - started < 10
    assert ("killed: workers with busy games" in capsys.readouterr().err) == bool(error)
    assert [process.exitcode for _, process in pool.workers] == [-9 if error else 0] * 2


def end_run(script, how, log_dir):
    """Start a run without end, wait until it trains, do `how` to it. Returns what is left."""
    command = [sys.executable, str(ROOT / f"{script.__name__}.py"), "--env", GOOD[script]]
    command += [*SMALL, *OWN[script], "--num-workers", "2"]
    command += ["--save-every", "1" if how == "kill main" else "0"]
    command += ["--num-steps", "32"] if script is ppo_atari else []  # a rollout of 0.1 seconds
    command += ["--num-iterations", "1000000", "--log-dir", str(log_dir), "--quiet"]
    before = shared_memory()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    main = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    try:

        def trains():
            assert main.poll() is None, main.communicate()
            rows = [path.read_text().count("\n") for path in log_dir.glob("*/progress.csv")]
            return bool(rows) and rows[0] >= 3

        assert wait_until(trains, 90)
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        workers = [pid for pid in pids if process(pid)[1] == main.pid]
        if script is ppo_atari:  # all workers are in the middle of a rollout
            assert wait_until(lambda: all(map(runs, workers)), 30)
        started = time.monotonic()
        if how == "kill worker":
            os.kill(workers[0], signal.SIGKILL)
        elif how == "SIGINT":  # Ctrl-C is for all processes
            os.killpg(main.pid, signal.SIGINT)
        elif how == "two SIGTERM":  # as GNU timeout and torchrun send them
            main.send_signal(signal.SIGTERM)
            time.sleep(0.005)
            main.send_signal(signal.SIGTERM)
        else:
            main.send_signal(signal.SIGKILL if how == "kill main" else signal.SIGTERM)
        out, err = main.communicate(timeout=30)
    finally:
        main.kill()
    seconds = time.monotonic() - started
    orphans = not wait_until(lambda: not any(map(alive, workers)), 5)
    (run_dir,) = log_dir.iterdir()
    result = {"code": main.returncode, "out": out, "err": err.splitlines()}
    result |= {"seconds": seconds, "workers": workers, "orphans": orphans}
    result |= {"leaked": shared_memory() - before}
    return SimpleNamespace(**result, run_dir=run_dir)


@linux
@pytest.mark.parametrize("script, how", ENDS, indirect=["script"])
def test_run_that_is_ended(script, how, tmp_path):
    """Killed worker, SIGTERM, SIGINT, killed main process: no orphan, no leak, a checkpoint."""
    run = end_run(script, how, tmp_path)
    assert len(run.workers) == 2
    assert not run.orphans
    assert run.leaked == set()
    assert run.seconds < 10
    codes = {"kill worker": 1, "SIGTERM": 143, "two SIGTERM": 143, "SIGINT": 130}
    assert run.code == (codes | {"kill main": -signal.SIGKILL})[how]
    assert run.out == "" and not [line for line in run.err if "Traceback" in line]
    iteration = script.Checkpoint(run.run_dir).read()["counters"]["iteration"]
    rows = (run.run_dir / "progress.csv").read_text().splitlines()
    last_row = int(rows[-1].split(",")[0])
    if how == "kill main":  # the checkpoint of an iteration follows its row
        assert iteration <= last_row <= iteration + 1 and run.err == []
        return
    assert last_row == iteration >= 2
    if how == "kill worker":
        assert re.fullmatch(
            rf"{script.__name__}.py: error: worker 0 with games .* died .*-9", run.err[0]
        )
    else:
        assert len(run.err) == 1 and "stopping" in run.err[0]


class Torch:
    """Games that compute in torch, with as many threads as there are."""

    def __init__(self, rows, *_):
        pass

    def call(self, command):
        return float(torch.ones(4_000_000).exp().log().mean())


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
@atari_slow
def test_games_in_torch(script):
    """A fork has none of the threads that torch's parallel loops wait for, so workers use one."""
    code = f"import {script.__name__} as s, test_pool; test_pool.torch.set_num_threads(2);"
    code += "test_pool.Torch(0).call(0);"
    code += "pool = s.WorkerPool(test_pool.Torch, {}, {}, 2, 2, None);"
    code += "print(pool.call('step')); pool.close()"
    path = os.pathsep.join([str(Path(script.__file__).parent), str(Path(__file__).parent)])
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env=os.environ | {"PYTHONPATH": path}, timeout=60, stdout=-1)
    assert json.loads(done.stdout) == pytest.approx([1.0, 1.0], rel=1e-6)
