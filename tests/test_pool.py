"""Tests of the worker pool: what workers do, how they fail, and that they always end."""

import itertools
import multiprocessing
import os
import random
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

SCRIPTS = [ppo, ppo_atari, ppo_multilevel]
SMALL = "--num-minibatches 2 --update-epochs 1 --num-envs 4 --eval-every 0 --quiet".split()
OWN = {
    ppo: "--env CartPole-v1 --num-steps 4 --hidden 8".split(),
    ppo_atari: "--env Breakout --num-steps 4 --precision fp32 --noop-max 0".split(),
    ppo_multilevel: (
        "--env envs:make --levels 1 2 --num-steps 4 --hidden 8 --schedule together "
        "--level-costs 1 1 1"
    ).split(),
}
linux = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")


@pytest.fixture(autouse=True)
def one_thread():
    """Let torch use one thread, as `train` does."""
    torch.set_num_threads(1)


# Pools of games -----------------------------------------------------------------------------------


def parse(script, *options):
    """Parse the options of a small run."""
    return script.parse_args([*SMALL, *OWN[script], *options])


class Games:
    """The pool of a script's games, which start from the seeds 0 to 3, and their rollouts."""

    def __init__(self, script, args, model):
        self.script = script
        if script is ppo_multilevel:
            self.pool = ppo_multilevel.Simulations(args, model)
            for level in (0, 1):
                self.pool.start(level, np.arange(4))
        else:
            self.pool = script.make_pool(args, model)
            self.pool.call("start", np.arange(4))

    def play(self, model, noise):
        """Play a rollout. Returns what was recorded, {name: array}."""
        if self.script is ppo_multilevel:
            buffers = self.pool.play(model, ["own 0"], noise)
            buffers += self.pool.play(model, ["own 1", "partners 1"], noise)
            found = {}
            for i, buffer in enumerate(buffers):
                found |= {f"{name} {i}": column for name, column in buffer.items()}
            return found
        self.pool.load(model)
        answers = self.pool.call("play", noise.numpy())
        rows = self.pool.rows if self.script is ppo_atari else ppo.side_by_side(answers)
        return {name: column.numpy().copy() for name, column in rows.items()}

    def close(self):
        """Close the pool."""
        self.pool.close()


def rollouts(script, model, games):
    """Play two rollouts. In the second one all weights are others, as after an update."""
    noise = model.head.noise(4 * 4, torch.Generator().manual_seed(0)).view(4, 4, -1)
    first = games.play(model, noise)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        bias = 100 * torch.arange(model.head.n)
        model.head.output.bias.copy_(bias)
    second = games.play(model, noise)

    if script is ppo_multilevel:
        np.testing.assert_array_equal(second["actions 1"], noise + bias)
    else:
        assert (second["actions"] == model.head.n - 1).all()
    return first, second


def check_workers(script, num_workers):
    """Compare what workers record with what this process does. Yields before they are asked."""
    args = parse(script, "--num-workers", "0")
    torch.manual_seed(0)
    model = script.make_model(args)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with closing(Games(script, args, model)) as games:
        ours = rollouts(script, model, games)

    model.load_state_dict(weights)
    args.num_workers = num_workers
    with closing(Games(script, args, model)) as games:
        yield
        theirs = rollouts(script, model, games)
    # Few rows are multiplied in another order than many, and may be rounded otherwise.
    for mine, other in zip(ours, theirs):
        assert mine.keys() == other.keys()
        for name, column in mine.items():
            np.testing.assert_allclose(other[name], column, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_workers_do_what_this_process_does(script):
    """Three workers record the rows that one process records, and get the weights of an update."""
    for _ in check_workers(script, 3):
        assert len(multiprocessing.active_children()) == 3
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    "script",
    [
        ppo_atari,
        *(pytest.param(script, marks=pytest.mark.slow) for script in (ppo, ppo_multilevel)),
    ],
    ids=lambda script: script.__name__,
)
def test_spawned_workers(script, monkeypatch):
    """The same where workers are spawned: all that they need is sent to them."""
    context = multiprocessing.get_context("spawn")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    for _ in check_workers(script, 1):
        (child,) = multiprocessing.active_children()
        assert type(child).__name__ == "SpawnProcess"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_players_can_be_sent(script, monkeypatch):
    """What makes a spawned worker's player can be pickled."""
    sent = []

    class Pool:
        def __init__(self, args, model, make_player):
            sent.append(multiprocessing.reduction.ForkingPickler.dumps(make_player))

    monkeypatch.setattr(script, "WorkerPool", Pool)
    args = parse(script)
    make = ppo_multilevel.Simulations if script is ppo_multilevel else script.make_pool
    make(args, torch.nn.Linear(1, 1))
    assert len(sent) == 1


@linux
def test_games_start_in_workers(tmp_path, monkeypatch):
    """A solver's threads that have run in a process may be lost in those that it forks."""
    reset = envs.Scripted.reset

    def reset_in_a_worker(env, **options):
        assert multiprocessing.parent_process() is not None, "reset before workers fork"
        return reset(env, **options)

    monkeypatch.setattr(envs.Scripted, "reset", reset_in_a_worker)
    options = ["--num-workers", "2", "--num-iterations", "1", "--log-dir", str(tmp_path)]
    assert ppo.train(parse(ppo, *options, "--env", "envs:ScriptedBox-v0")).iteration == 1


def test_file_is_loaded_once(tmp_path):
    """All games of a user's file are of one module: it may keep data, and compare classes."""
    file = tmp_path / "simulation.py"
    file.write_text((Path(__file__).parent / "envs.py").read_text())
    args = parse(ppo_multilevel, "--env", f"{file}:make_trouble", "--num-workers", "0")
    with closing(ppo_multilevel.Simulations(args, ppo_multilevel.make_model(args))) as sims:
        # `map_from` of this simulation refuses one of another class.
        sims.start(1, np.arange(4))
        (player,) = [sims.pool.player]
        assert len({type(game.env) for games in player.games.values() for game in games}) == 1


# Pools of other players ---------------------------------------------------------------------------


class Machine:
    """A player without games. It starts a program, as simulators do, and ends it when it closes."""

    def __init__(self, model, index, count):
        self.place = (index, count)
        self.program = subprocess.Popen(["sleep", "60"])

    def where(self):
        return self.place

    def pids(self):
        return [os.getpid(), self.program.pid]

    def draw(self):
        return [random.random(), np.random.random(), float(torch.rand(()))]

    def fail(self, error):
        if self.place[0] == 0:
            raise error

    def die(self):
        if self.place[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def wait(self, seconds):
        time.sleep(seconds)

    def compute(self):
        return float(torch.ones(4_000_000).exp().log().mean())

    def much(self):
        return bytes(10_000_000)

    def close(self):
        self.program.terminate()
        self.program.wait()


def make_pool(num_workers=2, num_envs=4, seed=1):
    """Return a pool of machines."""
    args = SimpleNamespace(num_workers=num_workers, num_envs=num_envs, seed=seed)
    return ppo.WorkerPool(args, torch.nn.Linear(1, 1), Machine)


@pytest.fixture
def pool():
    """A pool of machines in two workers."""
    with closing(make_pool()) as pool:
        yield pool


def send(pool, *message):
    """Have all workers carry out a command, for whose answer nobody waits."""
    for pipe, _ in pool.workers:
        pipe.send((message[0], message[1:]))


def exit_codes(pool):
    """Return how the workers have ended."""
    return [process.exitcode for _, process in pool.workers]


def state(pid):
    """Return the state of a process as one letter, or "" if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def wait_until(condition, seconds=10):
    """Wait until condition() holds. Returns whether it did in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def all_ended(pids):
    """Whether no process is left, but for zombies."""
    return all(state(pid) in ("", "Z") for pid in pids)


def test_number_of_workers(monkeypatch):
    """There are never more workers than games. Those of several ranks are numbered as one."""
    with closing(make_pool(num_workers=7, num_envs=3)) as pool:
        assert pool.call("where") == [(0, 3), (1, 3), (2, 3)]
    with closing(make_pool(num_workers=0)) as pool:
        assert pool.call("where") == [(0, 1)]

    monkeypatch.setattr(ppo, "NUM_RANKS", 2)
    monkeypatch.setattr(ppo, "RANK", 1)
    monkeypatch.setattr(ppo, "gathered_objects", lambda value: [value])
    with closing(make_pool(num_workers=7, num_envs=4)) as pool:
        assert pool.call("where") == [(2, 4), (3, 4)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_draw_other_numbers(monkeypatch, num_workers):
    """Generators that games share follow the seed, and are not the same in two processes."""

    def drawn(seed):
        with closing(make_pool(num_workers, seed=seed)) as pool:
            return np.array(pool.call("draw"))

    first = drawn(1)
    assert first.shape == (max(1, num_workers), 3)
    assert len(np.unique(first)) == first.size
    assert np.array_equal(first, drawn(1))
    assert not np.isin(drawn(2), first).any()
    monkeypatch.setattr(ppo, "NUM_RANKS", 2)
    monkeypatch.setattr(ppo, "RANK", 1)
    monkeypatch.setattr(ppo, "gathered_objects", lambda value: [value])
    assert not np.isin(drawn(1), first).any()


@linux
def test_games_in_torch():
    """A fork has none of the threads that torch's parallel loops wait for, so workers use one."""
    torch.set_num_threads(2)
    assert torch.ones(4_000_000).exp().log().mean() == pytest.approx(1)
    with closing(make_pool()) as pool:
        send(pool, "compute")
        for pipe, _ in pool.workers:
            assert pipe.poll(30), "a worker waits for threads that it does not have"
            assert pipe.recv() == pytest.approx(1)


# Failures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_command_that_fails(num_workers):
    """A GameError arrives as it is, any other error with its traceback. The pool can go on."""
    with closing(make_pool(num_workers)) as pool:
        with pytest.raises(ppo.GameError, match="^broken on purpose$"):
            pool.call("fail", ppo.GameError("broken on purpose"))
        with pytest.raises(ppo.GameError) as failure:
            pool.call("fail", KeyError("broken on purpose"))
        first, second, *_, last = str(failure.value).strip().splitlines()
        assert first == last == "KeyError: 'broken on purpose'"
        assert second.startswith("Traceback")
        assert pool.call("where")[0] == (0, max(1, num_workers))


def test_ctrl_c_in_a_command():
    """It is no failure of a game: it ends what this process does."""
    with closing(make_pool(num_workers=0)) as pool, pytest.raises(KeyboardInterrupt):
        pool.call("fail", KeyboardInterrupt())


def test_worker_that_dies(pool):
    """The error says how, whether the worker dies at work or has died before."""
    for _ in range(2):
        with pytest.raises(ppo.GameError, match="^worker 0 died with exit code -9; try --num-w"):
            pool.call("die")
    # The other worker has answered each time.
    assert not pool.workers[1][0].poll()


def test_worker_that_does_not_answer(monkeypatch, capsys):
    """A line tells of it, once. The pool waits on."""
    monkeypatch.setattr(ppo.WorkerPool, "patience", 0.1)
    with closing(make_pool(num_workers=1)) as pool:
        for _ in range(2):
            assert pool.call("wait", 0.3) == [None]
    assert capsys.readouterr().err == (
        "worker 0 has not answered for 0.1 seconds, as is normal for slow steps. If it hangs, try "
        "--num-workers 0: threads that were started before the fork are missing in it\n"
    )


def test_player_that_cannot_be_made(capfd):
    """Its error is the program's own in this process. A worker prints it, and dies."""

    def make_player(model, index, count):
        raise RuntimeError("broken on purpose")

    args = SimpleNamespace(num_workers=0, num_envs=4, seed=1)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        ppo.WorkerPool(args, torch.nn.Linear(1, 1), make_player)

    if sys.platform == "linux":
        args.num_workers = 1
        with closing(ppo.WorkerPool(args, torch.nn.Linear(1, 1), make_player)) as pool:
            with pytest.raises(ppo.GameError, match="^worker 0 died with exit code 1; try --num-w"):
                pool.call("where")
        assert capfd.readouterr().err.endswith("RuntimeError: broken on purpose\n")


# Ends ---------------------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("seconds", [0, 1])
def test_close(pool, seconds):
    """Workers end at once or when they have done what they are doing, and close their games."""
    pids = sum(pool.call("pids"), [])
    send(pool, "wait", seconds)
    began = time.monotonic()
    pool.close()
    assert seconds <= time.monotonic() - began < seconds + 5
    assert exit_codes(pool) == [0, 0]
    assert len(pids) == 4 and all_ended(pids)


def test_close_while_answers_are_sent(pool):
    """A worker does not wait for a reader of its answer, who will not come."""
    send(pool, "much")
    time.sleep(0.1)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 5
    assert exit_codes(pool) == [0, 0]


def test_busy_workers_are_killed(pool, monkeypatch):
    """All together have eight seconds, by a clock on which seven of them pass at once."""
    send(pool, "wait", 60)
    began = time.monotonic()
    clock = itertools.count(began, 7)
    monkeypatch.setattr(ppo, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    pool.close()
    assert 0.9 < time.monotonic() - began < 5
    assert exit_codes(pool) == [-signal.SIGKILL] * 2


def test_ctrl_c_while_a_pool_closes(pool, monkeypatch):
    """It ends the waiting for busy workers, and leaves none of them."""
    send(pool, "wait", 60)
    for _, process in pool.workers:
        join = process.join

        def interrupted(seconds=None, join=join):
            if seconds:
                raise KeyboardInterrupt
            join()

        monkeypatch.setattr(process, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    assert exit_codes(pool) == [-signal.SIGKILL] * 2


def be_main(pipe, message):
    """Be a main process: make a pool, tell what processes there are, and wait to be killed."""
    pool = make_pool()
    pipe.send(sum(pool.call("pids"), []))
    if message:
        send(pool, *message)
    pipe.send("sent")
    time.sleep(60)


@linux
@pytest.mark.parametrize("message", [None, ("wait", 0.5), ("much",)], ids=["idle", "busy", "sends"])
def test_main_process_that_is_killed(message):
    """Its workers end, whatever they are doing, and so do the programs that they have started."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    main = context.Process(target=be_main, args=(there, message))
    main.start()
    pids = here.recv()
    assert len(pids) == 4 and here.recv() == "sent"
    time.sleep(0.1)
    assert not all_ended(pids)
    main.kill()
    main.join()
    assert wait_until(lambda: all_ended(pids))
