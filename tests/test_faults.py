"""Tests of what goes wrong: games that fail now and then, full disks, NaN, signals."""

import csv
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
from contextlib import closing

import envs
import numpy as np
import pytest
import torch
from test_multilevel import install

import ppo
import ppo_atari
import ppo_multilevel

SMALL = "--num-minibatches 2 --update-epochs 1 --num-envs 4 --quiet".split()
OWN = {
    ppo: "--num-steps 16 --hidden 8".split(),
    ppo_atari: "--num-steps 8 --eval-episodes 1 --precision fp32 --noop-max 0".split(),
    ppo_multilevel: (
        "--levels 1 2 --num-steps 16 8 --hidden 8 --eval-every 0 --level-costs 1 1 1 "
        "--schedule together"
    ).split(),
}
GOOD = {ppo: "CartPole-v1", ppo_atari: "Breakout", ppo_multilevel: "envs:make"}


NAMES = ["ppo", "ppo_multilevel"]
SLOW = pytest.param(ppo_atari, marks=pytest.mark.slow)  # what it shares is tested by the others


@pytest.fixture(params=[ppo, SLOW, ppo_multilevel], ids=["ppo", "ppo_atari", "ppo_multilevel"])
def script(request):
    """Each of the scripts."""
    return request.param


@pytest.fixture(autouse=True)
def remove_runs(tmp_path):
    """Remove the runs' folders: Atari's checkpoints have 20 MB."""
    yield
    shutil.rmtree(tmp_path)


def run_main(script, monkeypatch, *options):
    """Run a script's main. Returns its exit code."""
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *options])
    return script.main()


def options(script, log_dir, env, *more):
    """Return the options of a small run."""
    return [*SMALL, *OWN[script], "--env", env, "--log-dir", str(log_dir / "runs"), *more]


def rows(run_dir):
    """Return the rows of progress.csv."""
    with (run_dir / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# Games --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["raise", "kill", "nan"])
@pytest.mark.parametrize("script", [ppo, ppo_multilevel], ids=NAMES, indirect=True)
def test_game_that_fails_once(script, tmp_path, capsys, monkeypatch, how):
    """The run ends with a line and is resumed with new games, whose seeds are others."""
    (tmp_path / "failures").mkdir()
    monkeypatch.setenv("FLAKY", f"{how}:1:{tmp_path}/failures")
    env = "envs:Flaky-v0" if script is ppo else "envs:make_flaky"
    more = "--num-workers 2 --num-iterations 3".split()
    assert run_main(script, monkeypatch, *options(script, tmp_path, env, *more)) == 1
    line, *_ = capsys.readouterr().err.splitlines()
    reason = {
        "raise": "failed in step: RuntimeError: broken on purpose",
        "kill": "died with exit code -9",
    }
    reason |= {"nan": "NaN or over 1e15 in"}
    assert re.match(rf"{script.__name__}.py: error: .*{reason[how]}", line)
    assert multiprocessing.active_children() == []
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert script.Checkpoint(run_dir).read()["games"] is None
    run = script.train(script.parse_args(["--resume", str(run_dir), "--quiet"]))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("all games start new episodes")
    assert [row["iteration"] for row in run.history] == [1, 2, 3]
    assert [row["iteration"] for row in rows(run_dir)] == ["1", "2", "3"]
    assert run.num_starts == 1
    drawn = [script.game_seeds(run.args, starts) for starts in (0, 1)]
    members = 2 * 2 - 1 if script is ppo_multilevel else 1  # there is no partner on level 1
    assert len({*np.ravel(drawn)} - {0}) == 2 * members * 4
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("how, workers", [("raise", 0), ("nan", 2)])
def test_failed_step_that_ends_an_episode(tmp_path, monkeypatch, capsys, how, workers):
    """With --failed-reward such a step is the last of its episode, with that reward."""
    (tmp_path / "failures").mkdir()
    monkeypatch.setenv("FLAKY", f"{how}:1:{tmp_path}/failures")
    more = ["--schedule", "adaptive", "--levels", "2", "--failed-reward", "-7"]
    more += ["--num-steps", "8", "--level-costs", "1", "1"]
    words = options(ppo_multilevel, tmp_path, "envs:make_flaky", *more)
    args = ppo_multilevel.parse_args(words)
    model = ppo_multilevel.make_model(args)
    seeds = ppo_multilevel.game_seeds(args, 0)
    with closing(ppo_multilevel.make_pool(args, model, seeds, workers, num_steps=8)) as pool:
        pool.call("start")
        pool.play(model, 8, sample=False)
        lines = sum(pool.call("take_failures"), [])
        assert sum(pool.call("take_failures"), []) == []
        own = {name: array[0] for name, array in pool.buffer.items()}
    (line,) = lines
    error = "RuntimeError: broken" if how == "raise" else "NaN or over 1e15 in what step"
    assert re.match(rf".*level 2 \(seed \d+, episode 1, after 4 steps\) failed: {error}", line)
    failed = own["rewards"] == -7  # (T, N)
    assert failed.sum() == 1 and failed[4].sum() == 1
    assert own["terminated"][failed].all() and own["ended"][failed].all()
    (n,) = np.flatnonzero(failed[4])
    assert np.array_equal(own["next_obs"][4, n], own["obs"][4, n])  # what was seen last
    assert own["episode_length"][4, n] == 5 and own["episode_length"][5, n] == 1


class Exploding(envs.Levels):
    """Its numbers are finite, but far too large, in the second step."""

    def step(self, action):
        obs, *rest = super().step(action)
        return obs * np.float32(1e20 if self.t == 2 else 1), *rest


class Batch(envs.Levels):
    """It can be stepped together with others, but fails then."""

    @staticmethod
    def step_batch(games, actions):
        raise RuntimeError("broken on purpose")

    def step(self, action):
        if self.t == 1:
            raise RuntimeError("broken on purpose")
        return super().step(action)


@pytest.mark.parametrize("kind", [Exploding, Batch])
def test_steps_that_fail_in_other_ways(tmp_path, monkeypatch, kind):
    """Numbers that would end a run, and simulations that are stepped together."""
    env = install(monkeypatch, kind)
    more = "--schedule adaptive --failed-reward -1 --num-steps 8 --num-iterations 1 --levels 1 2"
    args = options(ppo_multilevel, tmp_path, env, *more.split(), "--num-workers", "0")
    run = ppo_multilevel.train(ppo_multilevel.parse_args(args))
    assert run.counters["failures"] > 8  # in checks, too


def test_mistakes_are_no_failed_steps(tmp_path, monkeypatch):
    """An env of the old API, or with a reward that is no number, ends the run all the same."""

    class Old(envs.Levels):
        def step(self, action):
            return super().step(action)[:4]

    class NoReward(envs.Levels):
        def step(self, action):
            obs, _, *rest = super().step(action)
            return obs, None, *rest

    more = "--schedule adaptive --failed-reward -1 --num-steps 8 --num-iterations 1".split()
    for kind, words in ((Old, "reset must return"), (NoReward, "not a number and two flags")):
        args = options(ppo_multilevel, tmp_path, install(monkeypatch, kind), *more)
        with pytest.raises(ppo_multilevel.GameError, match=words):
            ppo_multilevel.train(ppo_multilevel.parse_args(args))


@pytest.mark.parametrize("schedule", ["adaptive", "together"])
def test_run_goes_on_after_failed_steps(tmp_path, monkeypatch, capsys, schedule):
    """They are counted in progress.csv and on the status line; each is told in a line."""
    (tmp_path / "failures").mkdir()
    monkeypatch.setenv("FLAKY", f"raise:3:{tmp_path}/failures")
    more = f"--schedule {schedule} --num-workers 2 --num-iterations 2 --level-costs 1 1 1".split()
    more += ["--check-episodes", "2", "--failed-reward", "-1"]
    words = [*options(ppo_multilevel, tmp_path, "envs:make_flaky", *more)]
    words.remove("--quiet")
    assert run_main(ppo_multilevel, monkeypatch, *words) == 0
    out, err = capsys.readouterr()
    assert len(re.findall(r"level 2 \(seed .*\) failed: RuntimeError: broken", err)) == 3
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert rows(run_dir)[-1]["failures"] == "3" and "failures 3" in out
    run = ppo_multilevel.train(
        ppo_multilevel.parse_args(["--resume", str(run_dir), "--num-iterations", "3"])
    )
    assert run.counters["failures"] == 3

    # An evaluation tells of them, too.
    (tmp_path / "others").mkdir()
    monkeypatch.setenv("FLAKY", f"raise:1:{tmp_path}/others")
    capsys.readouterr()
    words = ["--eval", str(run_dir), "--eval-level", "2", "--num-workers", "0"]
    assert run_main(ppo_multilevel, monkeypatch, *words) == 0
    assert len(re.findall(r"level 2 \(seed .*\) failed", capsys.readouterr().err)) == 1


def test_failed_steps_of_the_last_evaluation_are_counted(tmp_path, monkeypatch, capsys):
    """The row that shows an evaluation has its failures, too."""
    (tmp_path / "failures").mkdir()
    monkeypatch.setenv("FLAKY", f"raise:99:{tmp_path}/failures")
    more = "--num-workers 0 --num-iterations 2 --level-costs 1 1 1 --check-episodes 2".split()
    more += ["--eval-every", "2", "--failed-reward", "-1"]
    words = options(ppo_multilevel, tmp_path, "envs:make_flaky_evaluation", *more)
    assert run_main(ppo_multilevel, monkeypatch, *words) == 0
    (run_dir,) = (tmp_path / "runs").iterdir()
    failures = [int(row["failures"]) for row in rows(run_dir)]
    assert 3 < failures[0] == failures[1] < failures[2]
    # Three lines of each kind are shown, all are in the file.
    error = capsys.readouterr().err
    assert error.count(") failed: RuntimeError") == 6
    assert f"and {failures[0] - 3} more failed steps" in error
    lines = (run_dir / "failures.txt").read_text().splitlines()
    assert len(lines) == failures[2]
    assert re.match(
        r"iteration 0: .* level 2 \(seed \d+, episode 1, .*\) failed: Runtime", lines[0]
    )


@pytest.mark.parametrize("script", [ppo, ppo_multilevel], ids=NAMES, indirect=True)
def test_output_that_nobody_reads_any_more(script, tmp_path, capsys, monkeypatch):
    """When `| head` or `| tee` has gone, the run ends with a checkpoint of what it has learned."""
    argv = [x for x in options(script, tmp_path, GOOD[script]) if x != "--quiet"]

    def closed(*values, file=None, **options):
        if file is not sys.stderr:
            raise BrokenPipeError
        print(*values, file=file, **options)

    monkeypatch.setattr(script, "print", closed, raising=False)
    assert run_main(script, monkeypatch, *argv, "--num-iterations", "3") == 1
    assert "BrokenPipeError" in capsys.readouterr().err
    (run_dir,) = (tmp_path / "runs").iterdir()
    state = script.Checkpoint(run_dir).read()
    assert state["counters"]["iteration"] == 1 and state["games"] is not None  # all goes on


@pytest.mark.parametrize("script", [ppo, ppo_multilevel], ids=NAMES, indirect=True)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_that_cannot_be_reported(script, tmp_path, monkeypatch, signum):
    """Its message may go to a program that the same signal has ended, or to a full disk."""

    def closed(*_, **__):
        raise BrokenPipeError

    def step(pool, *command, **options):
        if command[0] == "play" and not stopped:
            stopped.append(signal.raise_signal(signum))
        return real(pool, *command, **options)

    real, stopped = script.WorkerPool.call, []
    monkeypatch.setattr(script.WorkerPool, "call", step)
    monkeypatch.setattr(script, "print", closed, raising=False)
    monkeypatch.setattr(script, "hints_of_start", lambda *_: [], raising=False)  # they play, too
    more = "--num-iterations 3 --num-workers 2".split()
    argv = options(script, tmp_path, GOOD[script], *more)
    assert run_main(script, monkeypatch, *argv) == 128 + signum
    (run_dir,) = (tmp_path / "runs").iterdir()
    state = script.Checkpoint(run_dir).read()
    assert state["counters"]["iteration"] == 1 and state["games"] is not None


@pytest.mark.parametrize(
    "script, schedule",
    [(ppo, None), (ppo_multilevel, "adaptive"), (ppo_multilevel, "together")],
    indirect=["script"],
)
def test_signal_before_the_first_row(script, tmp_path, monkeypatch, schedule):
    """The run ends before its first check and evaluation, and begins with them when resumed."""
    more = "--num-iterations 2 --num-workers 0 --eval-every 1 --eval-episodes 2".split()
    argv = options(script, tmp_path, GOOD[script], *more)
    if schedule:
        argv += ["--schedule", schedule, "--check-episodes", "2"]
    real = script.WorkerPool.call

    def call(pool, *command, **how):
        pool.call = real.__get__(pool)  # next time
        signal.raise_signal(signal.SIGTERM)
        return real(pool, *command, **how)

    with monkeypatch.context() as patch:
        patch.setattr(script.WorkerPool, "call", call)
        assert run_main(script, monkeypatch, *argv) == 128 + signal.SIGTERM
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert rows(run_dir) == []
    assert run_main(script, monkeypatch, "--resume", str(run_dir), "--quiet") == 0
    assert [row["iteration"] for row in rows(run_dir)] == ["0", "1", "2"]
    assert all(row["eval_return"] for row in rows(run_dir))
    if schedule == "adaptive":
        assert rows(run_dir)[0]["check_return"]


@pytest.mark.parametrize("iteration", [1, 3])
@pytest.mark.parametrize("script", [ppo, ppo_multilevel], ids=NAMES, indirect=True)
def test_resumed_run_does_not_repeat_the_failure(script, tmp_path, capsys, monkeypatch, iteration):
    """A state in which a game always fails: games that are saved before it come to it again. So
    they are not kept, though that iteration was saved with them; new games go other ways.
    """
    states, steps, checkpoints = set(), [], []
    name = "show" if script is ppo else "record"  # is called with what a step led to
    real, real_write = getattr(script.Game, name), script.write_file
    per_iteration = 4 * 16 if script is ppo else 4 * (16 + 8 + 8)

    def record(game, *results):
        obs, other = results[1::-1] if script is ppo else results[:2]
        if script is ppo and other == "obs":
            return real(game, *results)
        steps.append(1)
        state = obs.tobytes(), other  # the reward: observations of a coarse level are rounded
        if len(steps) == per_iteration * (iteration - 1) + 40:
            states.add(state)
        if state in states:
            raise RuntimeError("broken on purpose")
        real(game, *results)

    def write_file(path, content):
        if path.name == "checkpoint.pt":
            checkpoints.append(content)
        real_write(path, content)

    monkeypatch.setattr(script.Game, name, record)
    monkeypatch.setattr(script, "write_file", write_file)
    more = "--num-workers 0 --num-iterations 4 --save-every 1".split()
    assert run_main(script, monkeypatch, *options(script, tmp_path, GOOD[script], *more)) == 1
    assert "broken on purpose" in capsys.readouterr().err.splitlines()[0]
    (run_dir,) = (tmp_path / "runs").iterdir()
    state = script.Checkpoint(run_dir).read()
    assert state["games"] is None and state["counters"]["iteration"] == iteration - 1
    assert len(checkpoints) == iteration  # the last one is that of the failure
    if iteration == 3:  # from the games that were saved before the run fails in the same state
        (run_dir / "checkpoint.pt").write_bytes(checkpoints[-2])
        assert script.Checkpoint(run_dir).read()["games"] is not None
        assert run_main(script, monkeypatch, "--resume", str(run_dir), "--quiet") == 1
        assert "broken on purpose" in capsys.readouterr().err.splitlines()[0]
        assert script.Checkpoint(run_dir).read()["games"] is None
    assert run_main(script, monkeypatch, "--resume", str(run_dir), "--quiet") == 0
    assert capsys.readouterr().err.startswith("all games start new episodes: ")
    state = script.Checkpoint(run_dir).read()
    assert state["starts"] == (2 if iteration == 3 else 1) and state["games"] is not None
    assert [row["iteration"] for row in rows(run_dir)] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("num_workers", ["0", "1"])
def test_games_that_fail_when_a_resumed_run_starts(tmp_path, monkeypatch, num_workers):
    """Each attempt to go on has other seeds."""
    run_dir, seeds = first_run(ppo, tmp_path), []
    state = ppo.Checkpoint(run_dir).read()
    torch.save(state | {"games": None}, run_dir / "checkpoint.pt")
    real = ppo.game_seeds

    def game_seeds(*arguments):
        seeds.append(real(*arguments))
        return seeds[-1]

    def reset(*_, **__):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(ppo, "game_seeds", game_seeds)
    more = ["--resume", str(run_dir), "--num-iterations", "3", "--num-workers", num_workers]
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ppo.Game, "start", reset)
            assert run_main(ppo, monkeypatch, *more, "--quiet") == 1
    assert run_main(ppo, monkeypatch, *more, "--quiet") == 0
    assert len({*np.concatenate(seeds)}) == 3 * 4


# Files --------------------------------------------------------------------------------------------


def first_run(script, log_dir, iterations=2):
    """Train a little. Returns the run's folder."""
    more = ["--num-iterations", str(iterations), "--num-workers", "0"]
    return script.train(script.parse_args(options(script, log_dir, GOOD[script], *more))).run_dir


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_while_saving(script, tmp_path, capsys, monkeypatch):
    """One line says so; the old checkpoint is whole, and the run can be resumed from it."""
    run_dir = first_run(script, tmp_path)
    before = (run_dir / "checkpoint.pt").read_bytes()
    (run_dir / "checkpoint.partial").symlink_to("/dev/full")
    capsys.readouterr()
    more = ["--resume", str(run_dir), "--num-iterations", "5", "--save-every", "3", "--quiet"]
    assert run_main(script, monkeypatch, *more) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"{script.__name__}.py: error: .*No space left on device", line)
    assert (run_dir / "checkpoint.pt").read_bytes() == before
    assert rows(run_dir)[-1]["iteration"] == "3"
    (run_dir / "checkpoint.partial").unlink(missing_ok=True)  # there is room again
    assert run_main(script, monkeypatch, *more) == 0
    assert capsys.readouterr().err == ""
    assert [int(row["iteration"]) for row in rows(run_dir)[-5:]] == [1, 2, 3, 4, 5]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("what", ["progress.csv", "TensorBoard"])
def test_full_disk_while_logging(script, tmp_path, capsys, monkeypatch, what):
    """One line says so, also of TensorBoard's thread; the checkpoint before it is whole."""
    real = script.Run.log

    def log(run, row):
        if row["iteration"] == 3 and what == "progress.csv":
            full = open("/dev/full", "w", buffering=1, newline="")
            run.logger.csv = csv.DictWriter(full, run.logger.columns)
        if row["iteration"] == 3 and what == "TensorBoard":
            writer = run.logger.events._get_file_writer().event_writer._async_writer._writer
            writer._writer = open("/dev/full", "wb", buffering=0)
        real(run, row)

    monkeypatch.setattr(script.Run, "log", log)
    more = ["--num-iterations", "5", "--save-every", "1", "--num-workers", "0"]
    assert run_main(script, monkeypatch, *options(script, tmp_path, GOOD[script], *more)) == 1
    (run_dir,) = (tmp_path / "runs").iterdir()
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"{script.__name__}.py: error: .*No space left on device", line)
    assert script.Checkpoint(run_dir).read()["counters"]["iteration"] == 2


def test_thread_of_a_game_that_fails(script, capsys, monkeypatch):
    """Its traceback is shown, unlike that of TensorBoard's."""
    monkeypatch.setattr(threading, "excepthook", None)
    with pytest.raises(SystemExit):
        run_main(script, monkeypatch, "--eval", "nowhere")
    assert "nowhere" in capsys.readouterr().err
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    assert "ZeroDivisionError" in capsys.readouterr().err


# Training -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_loss_that_is_no_number(script, tmp_path, capsys, monkeypatch, what):
    """One line; the last checkpoint stays as it was, before the update that failed. The run is to
    be so long that its end is no date."""
    real, calls = script.losses, []

    def losses(*arguments):
        terms = real(*arguments)
        calls.append(1)
        if len(calls) < 6:  # the second minibatch of iteration 3
            return terms
        if what == "loss":
            return terms[0] * np.nan, *terms[1:]
        terms[0].register_hook(lambda gradient: gradient * np.nan)
        return terms

    monkeypatch.setattr(script, "losses", losses)
    more = ["--num-iterations", str(10**17), "--save-every", "1", "--num-workers", "0"]
    assert run_main(script, monkeypatch, *options(script, tmp_path, GOOD[script], *more)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "no finite gradient" in line
    (run_dir,) = (tmp_path / "runs").iterdir()
    state = script.Checkpoint(run_dir).read()
    assert state["counters"]["iteration"] == 2
    assert float(state["optimizer"]["state"][0]["step"]) == 4
    monkeypatch.setattr(script, "losses", real)
    more = ["--resume", str(run_dir), "--num-iterations", "3"]
    assert run_main(script, monkeypatch, *more) == 0


@pytest.mark.parametrize(
    "during, signum",
    [("rollout", signal.SIGINT), ("update", signal.SIGTERM), ("write_file", signal.SIGINT)],
)
def test_signal(script, tmp_path, capsys, monkeypatch, during, signum):
    """Whatever it interrupts, the iteration is finished and saved; the run can be resumed."""
    more = ["--num-iterations", "3", "--num-workers", "0", "--save-every", "1"]
    args = script.parse_args(options(script, tmp_path, GOOD[script], *more))
    with pytest.MonkeyPatch.context() as patch:
        real, calls = getattr(script, during), []
        when = 3 if during == "write_file" else 2  # config, progress, checkpoint

        def function(*arguments):
            calls.append(1)
            if len(calls) == when:
                signal.raise_signal(signum)
            return real(*arguments)

        patch.setattr(script, during, function)
        patch.setattr(script, "parse_args", lambda: args)
        assert script.main() == 128 + signum
    assert "stopping after this iteration" in capsys.readouterr().err
    (run_dir,) = (tmp_path / "runs").iterdir()
    iteration = script.Checkpoint(run_dir).read()["counters"]["iteration"]
    assert 1 <= iteration < 3 and len(rows(run_dir)) == iteration
    assert run_main(script, monkeypatch, "--resume", str(run_dir)) == 0
    assert capsys.readouterr().err == ""
    assert [row["iteration"] for row in rows(run_dir)] == ["1", "2", "3"]
