"""Tests of the worker pool: start methods, games that fail, workers and runs that are killed."""

import functools
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ppo
import ppo_atari
import ppo_multilevel

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [ppo, ppo_atari, ppo_multilevel]
SMALL = "--num-minibatches 2 --update-epochs 1 --num-envs 4 --eval-every 0".split()
OWN = {
    ppo: "--num-steps 16 --hidden 8".split(),
    ppo_atari: "--num-envs 2 --num-steps 8 --eval-episodes 1 --precision fp32".split(),
    ppo_multilevel: "--levels 1 2 --num-steps 16 8 --hidden 8".split(),
}
GOOD = {ppo: "CartPole-v1", ppo_atari: "Breakout", ppo_multilevel: "envs:make"}
COMMANDS = {
    ppo: [["reset"], ["step"]],
    ppo_atari: [["reset"], ["step"], ["rollout"]],
    ppo_multilevel: [["reset"], ["step"], ["step", 1]],
}
linux = pytest.mark.skipif(sys.platform != "linux", reason="uses pgrep, ps and /dev/shm")


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.__name__)
def script(request):
    """Each of the scripts."""
    return request.param


def only(*scripts):
    """Mark a test that makes sense for some scripts only."""
    names = [script.__name__ for script in scripts]
    return pytest.mark.parametrize("script", scripts, ids=names, indirect=True)


class BadGame(ppo_atari.Game):
    """An Atari game in which `where` goes wrong: its reset, or its 5th step."""

    where = None

    def reset(self, seed=None):
        if self.where == "reset":
            raise RuntimeError("broken on purpose")
        return super().reset(seed)

    def step(self, action):
        if self.where == "step" and self.length == 4:
            raise RuntimeError("broken on purpose")
        return super().step(action)


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


def make_pool(script, args, num_workers, start_method=None, model=None):
    """Return the pool of a script's games as its make_pool does, with a start method."""
    with pytest.MonkeyPatch.context() as patch:
        real = script.WorkerPool
        patch.setattr(
            script, "WorkerPool", lambda *a, **k: real(*a, **k, start_method=start_method)
        )
        if script is ppo_multilevel:
            return script.make_pool(args, [1, 2], np.arange(12).reshape(3, 4), num_workers)
        more = (model, args.num_steps) if script is ppo_atari else ()
        return script.make_pool(args, np.arange(4), num_workers, *more)


def shared_model(args):
    """Return the Atari model, in shared memory as `train` has it, and its optimizer."""
    torch.manual_seed(0)
    model = ppo_atari.make_model(args)
    optimizer = ppo_atari.make_optimizer(model)
    return model.share_memory(), optimizer


# The pool -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_do_what_this_process_does(script, tmp_path, start_method, num_workers):
    """All start methods and numbers of workers fill the shared arrays alike."""
    if start_method == "spawn" and num_workers == 3:
        pytest.skip("spawn is slow, one worker will do")
    if start_method == "fork" and not hasattr(os, "fork"):
        pytest.skip("no fork here")
    args = parse(script, tmp_path, "--env", GOOD[script])
    model, optimizer = shared_model(args) if script is ppo_atari else (None, None)
    hows = (0, None), (num_workers, start_method)
    pools = [make_pool(script, args, *how, model) for how in hows]
    assert len(pools[1].workers) == num_workers

    def call(*command):
        for pool in pools:
            pool.call(*command)
        for name in set(pools[0].arrays) - {"seconds", "steps"}:
            np.testing.assert_array_equal(*(pool.arrays[name] for pool in pools), name)

    try:
        if script is ppo_atari:
            noise = np.random.default_rng(0).gumbel(size=pools[0].arrays["*noise"].shape)
            for pool in pools:
                pool.arrays["*noise"][:] = noise
        for command in COMMANDS[script]:
            call(*command)
        assert np.abs(pools[0].arrays["obs"]).min(axis=-1).max() > 0
        if script is ppo_atari:  # the workers have the weights that the optimizer has
            with torch.no_grad():
                for group in optimizer.param_groups:
                    group["params"][0].zero_()
            call("rollout")
            np.testing.assert_array_equal(pools[1].arrays["*actions"], noise.argmax(axis=-1))
    finally:
        for pool in pools:
            pool.close()
    assert not any(process.is_alive() for _, process in pools[1].workers)


def test_more_workers_than_games(script, tmp_path):
    """There are never more workers than games."""
    pool = make_pool(script, parse(script, tmp_path, "--env", GOOD[script]), 7)
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
    assert re.search(rf"\(seed \d+\) failed in {where}: broken on purpose", first)
    assert rest[0].startswith("Traceback") and "broken on purpose" in rest[-1]
    assert ("test_pool.py" if script is ppo_atari else "envs.py") in str(error.value)
    if where == "step":  # training had begun
        (run_dir,) = tmp_path.iterdir()
        script.load_checkpoint(run_dir)


@pytest.mark.parametrize("num_workers", ["0", "1"])
def test_game_that_cannot_be_made(tmp_path, monkeypatch, num_workers):
    """The error is the pool's, with one clear first line, in a worker and in this process."""
    args = parse(ppo, tmp_path, "--env", GOOD[ppo], "--num-workers", num_workers)

    def fail(*_, **__):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(ppo, "Game", fail)
    with pytest.raises(ppo.GameError, match="broken on purpose"):
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
@pytest.mark.parametrize("where", ["nan_reward", "nan_obs", "nan_reset"])
def test_game_that_gives_nan(script, tmp_path, capsys, monkeypatch, bad_env, where):
    """One line names the quantity, the game, its seed and level; a checkpoint is left."""
    options = [*SMALL, *OWN[script], "--quiet", "--num-workers", "0"]
    options += ["--log-dir", str(tmp_path), "--env", bad_env(where)]
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *options])
    assert script.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    quantity = "rewards" if where == "nan_reward" else "obs"
    name = bad_env(where) + (" level 2" if script is ppo_multilevel else "")
    assert re.search(rf"NaN or infinity in \w*{quantity} of {name} \(seed \d+\)$", line)
    if where == "nan_reset":
        return
    (run_dir,) = tmp_path.iterdir()
    state = script.load_checkpoint(run_dir)
    assert all(torch.isfinite(value).all() for value in state["model"].values())


def test_partner_that_gives_nan_after_map_from(tmp_path):
    """A NaN of psi() after map_from is found, before the policy has seen it."""
    options = ["--env", "envs:make_nan_psi", "--levels", "2", "3", "--num-steps", "16", "4"]
    args = parse(ppo_multilevel, tmp_path, *options, *"--num-iterations 1 --num-workers 0".split())
    with pytest.raises(ppo_multilevel.GameError, match="NaN or infinity in obs of .* level 2"):
        ppo_multilevel.train(args)


def test_evaluation_that_fails(script, tmp_path, monkeypatch):
    """A game that fails in an evaluation leaves the last iteration's checkpoint."""

    def fail(*_):
        raise script.GameError("broken on purpose")

    args = parse(script, tmp_path, "--env", GOOD[script], "--num-iterations", "3")
    args.eval_every, args.save_every, args.num_workers = 2, 0, 0
    results = iter([lambda *_: np.zeros(1), fail])
    monkeypatch.setattr(script, "evaluate", lambda *arguments: next(results)(*arguments))
    with pytest.raises(script.GameError):
        script.train(args)
    (run_dir,) = tmp_path.iterdir()
    assert script.load_checkpoint(run_dir)["counters"]["iteration"] == 2


@pytest.mark.parametrize("during", [0, 2])
def test_signal_during_an_evaluation(script, tmp_path, monkeypatch, during):
    """A signal in the evaluation of iteration 2, or of the start, leaves a checkpoint too."""
    args = parse(script, tmp_path, "--env", GOOD[script], "--num-iterations", "3")
    args.eval_every, args.save_every, args.num_workers = 2, 0, 0
    evaluations = iter([0, 2])

    def evaluate(*_):
        if next(evaluations) == during:
            signal.raise_signal(signal.SIGTERM)
        return np.zeros(1)

    monkeypatch.setattr(script, "evaluate", evaluate)
    result = script.train(args)
    assert result.signal == signal.SIGTERM
    assert script.load_checkpoint(result.run_dir)["counters"]["iteration"] == during


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
        victim = min(multiprocessing.active_children(), key=lambda process: process.pid)
        victim.kill()
        return real(*arguments)

    monkeypatch.setattr(script, "update", update)
    with pytest.raises(script.GameError, match="^worker 0 died with exit code -9$"):
        script.train(args)
    assert multiprocessing.active_children() == []
    (run_dir,) = tmp_path.iterdir()
    assert script.load_checkpoint(run_dir)["counters"]["iteration"] == 1


@linux
def test_second_signal_during_a_rollout(tmp_path, monkeypatch, capsys):
    """The first signal waits for the end of a rollout, the second does not."""
    steps = []

    def step(_):  # in the worker: 8 steps are 1.2 seconds, two of them send a signal
        time.sleep(0.15)
        steps.append(1)
        if len(steps) in (2, 6):
            os.kill(os.getppid(), signal.SIGINT)

    monkeypatch.setattr(ppo_atari.Games, "step", step)
    with pytest.raises(KeyboardInterrupt):
        ppo_atari.train(parse(ppo_atari, tmp_path, "--num-workers", "1"))
    assert multiprocessing.active_children() == []
    assert capsys.readouterr().err.count("stopping after this iteration") == 1


# Whole runs ---------------------------------------------------------------------------------------


def alive(pid):
    """Whether the process exists and is no zombie."""
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(listed.stdout.strip()) and not listed.stdout.strip().startswith("Z")


def runs(pid):
    """Whether the process computes: it does not wait for anything but a core."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"


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


@pytest.fixture(scope="module", params=["kill worker", "SIGTERM", "SIGINT", "kill main"])
def ended(request, tmp_path_factory):
    """Return a function of the script: what became of a run to which this happened."""
    log_dir = tmp_path_factory.mktemp("runs")
    yield functools.cache(lambda script: end_run(script, request.param, log_dir / script.__name__))
    shutil.rmtree(log_dir)


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
        listed = subprocess.run(["pgrep", "-P", str(main.pid)], capture_output=True, text=True)
        workers = [int(pid) for pid in listed.stdout.split()]
        if script is ppo_atari:  # all workers are in the middle of a rollout
            assert wait_until(lambda: all(map(runs, workers)), 30)
        started = time.monotonic()
        if how == "kill worker":
            os.kill(workers[0], signal.SIGKILL)
        elif how == "SIGINT":  # Ctrl-C is for all processes
            os.killpg(main.pid, signal.SIGINT)
        else:
            main.send_signal(signal.SIGKILL if how == "kill main" else signal.SIGTERM)
        out, err = main.communicate(timeout=30)
    finally:
        main.kill()
    seconds = time.monotonic() - started
    orphans = not wait_until(lambda: not any(map(alive, workers)), 5)
    (run_dir,) = log_dir.iterdir()
    result = {"how": how, "code": main.returncode, "out": out, "err": err.splitlines()}
    result |= {"seconds": seconds, "workers": workers, "orphans": orphans}
    result |= {"leaked": shared_memory() - before}
    return SimpleNamespace(**result, run_dir=run_dir)


@linux
def test_run_that_is_ended(script, ended):
    """Killed worker, SIGTERM, SIGINT, killed main process: no orphan, no leak, a checkpoint."""
    run = ended(script)
    assert len(run.workers) == 2
    assert not run.orphans
    assert run.leaked == set()
    assert run.seconds < 10
    codes = {"kill worker": 1, "SIGTERM": 143, "SIGINT": 130, "kill main": -signal.SIGKILL}
    assert run.code == codes[run.how]
    assert run.out == "" and not [line for line in run.err if "Traceback" in line]
    iteration = script.load_checkpoint(run.run_dir)["counters"]["iteration"]
    rows = (run.run_dir / "progress.csv").read_text().splitlines()
    last_row = int(rows[-1].split(",")[0])
    if run.how == "kill main":  # the checkpoint of an iteration follows its row
        assert iteration <= last_row <= iteration + 1 and run.err == []
        return
    assert last_row == iteration >= 2
    if run.how == "kill worker":
        assert re.fullmatch(rf"{script.__name__}.py: error: worker 0 died.*-9", run.err[0])
    else:
        assert len(run.err) == 1 and "stopping" in run.err[0]
