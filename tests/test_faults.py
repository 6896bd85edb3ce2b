"""Tests of what goes wrong in a run: games that fail, full disks, closed output, signals."""

import csv
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import envs
import numpy as np
import pytest
import torch
from test_pool import all_ended, wait_until

import ppo
import ppo_atari
import ppo_multilevel as ml

SMALL = "--num-minibatches 2 --update-epochs 1 --num-envs 4 --eval-every 0".split()
OWN = {
    ppo: "--num-steps 16 --hidden 8".split(),
    ppo_atari: "--num-steps 2 --precision fp32 --device cpu".split(),
    ml: "--levels 1 2 --num-steps 16 8 --level-costs 1 1 1 --schedule together --hidden 8".split(),
}
GOOD = {ppo: "CartPole-v1", ppo_atari: "Breakout", ml: "envs:make"}
both = pytest.mark.parametrize("script", [ppo, ml], ids=lambda script: script.__name__)
linux = pytest.mark.skipif(sys.platform != "linux", reason="uses /proc and forks")


def words(script, log_dir, *more):
    """Return the command line of a small run in this process."""
    own = [*SMALL, *OWN[script], "--env", GOOD[script], "--num-workers", "0", "--quiet"]
    return [*own, "--log-dir", str(log_dir), *more]


def run_main(script, *options):
    """Run a script's main. Returns its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{script.__name__}.py", *options])
        return script.main()


def rows(run_dir):
    """Return the rows of progress.csv."""
    with (run_dir / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def iterations(run_dir):
    """Return the iterations of progress.csv."""
    return [int(row["iteration"]) for row in rows(run_dir)]


def saved(script, run_dir):
    """Return how many iterations the checkpoint has."""
    return script.read_checkpoint(run_dir)["counters"]["iteration"]


# Games --------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("where, num_workers", [("step", "0"), ("reset", "2")])
def test_game_that_raises(script, tmp_path, capsys, where, num_workers):
    """The first line names the game, its seed, episode and step. Its traceback follows."""
    env = f"envs:Trouble-{where}-v0" if script is ppo else f"envs:make_{where}"
    more = ["--env", env, "--num-workers", num_workers]
    assert run_main(script, *words(script, tmp_path, *more)) == 1
    first, *rest = capsys.readouterr().err.splitlines()
    name = env if script is ppo else f"{env} level 2"
    steps = 4 if where == "step" else 0
    place = rf"{name} \(seed \d+, episode 1, after {steps} steps\)"
    error = "RuntimeError: broken on purpose"
    assert re.fullmatch(rf"{script.__name__}.py: error: {place} failed in {where}: {error}", first)
    assert rest[0].startswith("Traceback") and rest[-1] == error
    assert "envs.py" in rest[-3]
    (run_dir,) = tmp_path.iterdir()
    assert saved(script, run_dir) == 0


@pytest.mark.parametrize("how", ["raise", "kill", "nan"])
def test_game_that_fails_once(tmp_path, capsys, monkeypatch, how):
    """The run ends with a line and a checkpoint, and is resumed with new episodes."""
    (tmp_path / "failures").mkdir()
    monkeypatch.setenv("FLAKY", f"{how}:1:{tmp_path}/failures")
    log_dir = tmp_path / "runs"
    more = "--env envs:Flaky-v0 --num-workers 2 --num-iterations 3".split()
    assert run_main(ppo, *words(ppo, log_dir, *more)) == 1
    reasons = {
        "raise": r"envs:Flaky-v0 \(seed .*\) failed in step: RuntimeError: broken on purpose",
        "kill": "worker [01] died with exit code -9",
        "nan": r"NaN or over 1e15 in next_obs\[0\] of envs:Flaky-v0 \(seed .*, step 4 of the",
    }
    assert re.match(f"ppo.py: error: {reasons[how]}", capsys.readouterr().err)
    assert multiprocessing.active_children() == []
    (run_dir,) = log_dir.iterdir()
    assert saved(ppo, run_dir) == 0

    assert run_main(ppo, "--resume", str(run_dir), "--quiet") == 0
    assert capsys.readouterr().err == ""
    assert iterations(run_dir) == [1, 2, 3]


FOUND = {
    "nan_reward": ("rewards", 4),
    "huge_reward": ("rewards", 4),
    "nan_obs": ("next_obs[0]", 4),
    "nan_reset": ("obs[0]", 0),
}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("where", FOUND)
def test_numbers_that_are_none(tmp_path, where):
    """ppo.py finds them after a rollout, and names the quantity, the game and the row."""
    quantity, t = FOUND[where]
    args = ppo.parse_args(words(ppo, tmp_path, "--env", f"envs:Trouble-{where}-v0"))
    with pytest.raises(ppo.GameError) as failure:
        ppo.train(args)
    found = rf"NaN or over 1e15 in {re.escape(quantity)} of envs:.*, step {t} of the rollout"
    assert re.fullmatch(found, str(failure.value))
    (run_dir,) = tmp_path.iterdir()
    weights = ppo.read_checkpoint(run_dir)["model"].values()
    assert all(torch.isfinite(value).all() for value in weights)


@pytest.mark.parametrize(
    "where, doing, error",
    [
        ("nan_reward", "step", "the reward is nan"),
        ("huge_reward", "step", "the reward is -1e[+]25"),
        ("nan_obs", "step", "an observation has NaN"),
        ("nan_reset", "reset", "an observation has NaN"),
        ("nan_psi", "map_from", "an observation has NaN"),
    ],
)
def test_numbers_of_simulations_that_are_none(tmp_path, where, doing, error):
    """ppo_multilevel.py finds them where they appear, also in what map_from leads to."""
    more = ["--env", f"envs:make_{where}", "--levels", "2", "3"]
    args = ml.parse_args(words(ml, tmp_path, *more))
    with pytest.raises(ml.GameError) as failure:
        ml.train(args)
    place = rf"envs:make_{where} level 2 \(seed \d+, episode 1, after \d steps\)"
    assert re.match(f"{place} failed in {doing}: FloatingPointError: {error}", str(failure.value))


@pytest.mark.parametrize("num_workers", ["0", "1"])
def test_game_that_calls_exit(tmp_path, capfd, monkeypatch, num_workers):
    """sys.exit(0) in a game is a failure like any other, not the end of a run that went well."""
    if num_workers != "0" and sys.platform != "linux":
        pytest.skip("spawned workers do not know the step")
    monkeypatch.setattr(envs.Scripted, "step", lambda env, action: sys.exit(0))
    more = ["--env", "envs:Quick-v0", "--num-workers", num_workers]
    assert run_main(ppo, *words(ppo, tmp_path, *more)) == 1
    first, *_, last = capfd.readouterr().err.strip().splitlines()
    assert re.fullmatch(
        r"ppo.py: error: envs:Quick-v0 \(seed .*\) failed in step: .*Exit: 0", first
    )
    assert last == "SystemExit: 0"


@pytest.mark.parametrize("num_workers, code", [("0", 128 + signal.SIGINT), ("1", 1)])
def test_game_that_raises_keyboard_interrupt(tmp_path, capfd, monkeypatch, num_workers, code):
    """It passes, as Ctrl-C does: the run ends without a word. A worker ends with its traceback."""
    if num_workers != "0" and sys.platform != "linux":
        pytest.skip("spawned workers do not know the step")

    def step(env, action):
        raise KeyboardInterrupt

    monkeypatch.setattr(envs.Scripted, "step", step)
    more = ["--env", "envs:Quick-v0", "--num-workers", num_workers]
    assert run_main(ppo, *words(ppo, tmp_path, *more)) == code
    error = capfd.readouterr().err
    if num_workers == "0":
        assert error == ""
    else:
        assert error.endswith("worker 0 died with exit code 1; try --num-workers 0\n")
        assert error.count("Traceback") == 1
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("num_workers", ["0", "2"])
def test_close_that_fails(tmp_path, capfd, monkeypatch, num_workers):
    """A line tells of each game's error. All games are closed, and the run ends well."""
    if num_workers != "0" and sys.platform != "linux":
        pytest.skip("spawned workers do not know the close")

    def close(env):
        # Envs of which only the spaces were looked at have no actions.
        if env.actions:
            raise RuntimeError("broken on purpose")

    monkeypatch.setattr(envs.Scripted, "close", close)
    more = ["--env", "envs:Quick-v0", "--num-workers", num_workers, "--num-iterations", "1"]
    assert run_main(ppo, *words(ppo, tmp_path, *more)) == 0
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert re.fullmatch(r"envs:Quick-v0 \(seed .*\) failed in close: broken on purpose", line)


def test_resumed_run_goes_another_way(tmp_path, monkeypatch):
    """It does not come to the same failure again: the noise of the lost rollout is not repeated."""
    tapes = []
    real = ppo.Game.step

    def step(game, t, action):
        tapes[-1].append(int(action))
        if len(tapes) == 1 and len(tapes[0]) == 50:
            raise ppo.GameError("broken on purpose")
        real(game, t, action)

    monkeypatch.setattr(ppo.Game, "step", step)
    tapes.append([])
    assert run_main(ppo, *words(ppo, tmp_path, "--num-iterations", "1")) == 1
    (run_dir,) = tmp_path.iterdir()
    tapes.append([])
    assert run_main(ppo, "--resume", str(run_dir), "--quiet") == 0
    assert len(tapes[1]) == 4 * 16 and tapes[0] != tapes[1][:50]


@linux
def test_worker_that_dies_during_an_update(tmp_path, capfd, monkeypatch):
    """Nobody waits for it then. The next rollout finds it dead; the iteration is saved."""
    real = ppo.update

    def update(*arguments):
        multiprocessing.active_children()[0].kill()
        return real(*arguments)

    monkeypatch.setattr(ppo, "update", update)
    assert run_main(ppo, *words(ppo, tmp_path, "--num-workers", "2")) == 1
    line = r"ppo.py: error: worker [01] died with exit code -9; try --num-workers 0\n"
    assert re.fullmatch(line, capfd.readouterr().err)
    assert multiprocessing.active_children() == []
    (run_dir,) = tmp_path.iterdir()
    assert saved(ppo, run_dir) == 1 and iterations(run_dir) == [1]


@both
def test_game_that_fails_in_an_evaluation(script, tmp_path, monkeypatch):
    """What was learned before it is saved, and the log goes on without a gap after --resume."""
    more = "--eval-every 1 --eval-episodes 2 --num-iterations 3 --save-every 0".split()

    def evaluate(*_):
        results.append(1)
        if len(results) == 3:
            raise script.GameError("broken on purpose")
        return np.ones(2)

    results = []
    monkeypatch.setattr(script, "evaluate", evaluate)
    assert run_main(script, *words(script, tmp_path, *more)) == 1
    (run_dir,) = tmp_path.iterdir()
    # ppo.py logs the iteration without its evaluation, the other script does it again.
    assert saved(script, run_dir) == (2 if script is ppo else 1)
    assert script.read_checkpoint(run_dir)["counters"]["global_step"] > 0
    assert run_main(script, "--resume", str(run_dir), "--quiet") == 0
    assert iterations(run_dir) == [0, 1, 2, 3]
    missing = "" if script is ppo else "1.0"
    assert [row["eval_return"] for row in rows(run_dir)] == ["1.0", "1.0", missing, "1.0"]


# Failed steps of simulations ----------------------------------------------------------------------


def with_failures(monkeypatch, tmp_path, how, times):
    """Have the simulations `make_flaky` fail on level 2, so many times."""
    folder = tmp_path / "failures"
    folder.mkdir()
    monkeypatch.setenv("FLAKY", f"{how}:{times}:{folder}")
    return folder


@pytest.mark.parametrize("how, num_workers", [("raise", "0"), ("nan", "2")])
def test_failed_step_ends_its_episode(tmp_path, monkeypatch, capfd, how, num_workers):
    """With --failed-reward such a step is the last of its episode, with that reward."""
    with_failures(monkeypatch, tmp_path, how, 1)
    more = "--env envs:make_flaky --levels 2 --failed-reward -7 --num-steps 8 --level-costs 1 1"
    args = ml.parse_args(words(ml, tmp_path, *more.split(), "--num-workers", num_workers))
    torch.manual_seed(0)
    model = ml.make_model(args)
    with closing(ml.Simulations(args, model)) as sims:
        sims.start(0, np.arange(4))
        (own,) = sims.play(model, ["own 0"], torch.zeros(8, 4, 2))

    line = capfd.readouterr().err
    error = "RuntimeError: broken on purpose" if how == "raise" else "FloatingPointError: .* NaN"
    place = r"envs:make_flaky level 2 \(seed [0-3], episode 1, after 4 steps\)"
    assert re.match(f"{place} failed in step: {error}", line) and line.count("\n") == 1
    failed = own["rewards"] == -7  # (T, N)
    assert torch.equal(own["failed"], failed)
    assert failed.sum() == 1 and failed[4].sum() == 1
    assert own["terminated"][failed].all() and not own["truncated"][failed].any()
    (n,) = failed[4].nonzero().flatten().tolist()
    assert torch.equal(own["next_obs"][4, n], own["obs"][4, n])  # what was seen last
    assert own["episode_length"][4, n] == 5
    # The next episode has begun, and has three steps so far.
    assert not own["terminated"][5:, n].any() and not torch.equal(
        own["obs"][5, n], own["obs"][4, n]
    )


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


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("kind", [Exploding, Batch])
def test_steps_that_fail_in_other_ways(tmp_path, monkeypatch, kind):
    """Numbers that would end a run, and simulations that could be stepped together."""
    monkeypatch.setattr(envs, "make", lambda level: kind(level))
    more = "--levels 2 --num-steps 8 --level-costs 1 1 --failed-reward -1 --num-iterations 1"
    run = ml.train(ml.parse_args(words(ml, tmp_path, *more.split())))
    # Every second step is the last of its episode.
    assert run.counters["failures"] == 4 * 4


@pytest.mark.parametrize("schedule, levels", [("adaptive", "1 2"), ("together", "2 3")])
def test_failed_steps_are_counted(tmp_path, monkeypatch, capfd, schedule, levels):
    """Each is told in a line. `failures` has those of training, on all levels, partners' too."""
    folder = with_failures(monkeypatch, tmp_path, "raise", 40)
    more = f"--env envs:make_flaky --failed-reward -1 --schedule {schedule} --levels {levels}"
    more += " --num-workers 2 --check-episodes 2 --num-iterations 2"
    assert run_main(ml, *words(ml, tmp_path / "runs", *more.split())) == 0
    line = r"make_flaky level 2 \(seed (\d+), episode .*\) failed in step: RuntimeError: broken"
    seeds = re.findall(line, capfd.readouterr().err)
    assert len(seeds) == len(list(folder.iterdir())) > 10

    (run_dir,) = (tmp_path / "runs").iterdir()
    in_training = [seed for seed in seeds if int(seed) - ml.CHECK_SEED not in (0, 1)]
    assert (len(in_training) < len(seeds)) == (schedule == "adaptive")
    assert int(rows(run_dir)[-1]["failures"]) == len(in_training)
    assert run_main(ml, "--resume", str(run_dir), "--quiet", "--num-iterations", "2") == 0
    assert int(rows(run_dir)[-1]["failures"]) == len(in_training)


def test_failed_steps_of_checks(tmp_path, capsys):
    """They count as failed steps do in what a check and an evaluation return."""
    more = "--env envs:make_step --failed-reward -1 --schedule adaptive --check-episodes 2"
    more = [*more.split(), "--eval-every", "1", "--eval-episodes", "2", "--num-iterations", "1"]
    run = ml.train(ml.parse_args(words(ml, tmp_path, *more)))
    # In a game's first episode rewards are 1, 2, 3, 4, and the fifth step fails.
    assert run.history[0]["check_return"] == run.history[0]["eval_return"] == 1 + 2 + 3 + 4 - 1
    assert "level 2 (seed 20001, episode 1, after 4 steps) failed" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["reset", "nan_psi"])
def test_only_steps_may_fail(tmp_path, where):
    """--failed-reward does not forgive a reset, or a state that cannot be taken over."""
    more = ["--env", f"envs:make_{where}", "--levels", "2", "3", "--failed-reward", "-1"]
    with pytest.raises(ml.GameError, match="level 2 .* failed in (reset|map_from): "):
        ml.train(ml.parse_args(words(ml, tmp_path, *more)))


# Files and output ---------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_while_saving(tmp_path, capsys):
    """One line says so. The old checkpoint is whole, and the run can be resumed from it."""
    assert run_main(ppo, *words(ppo, tmp_path, "--num-iterations", "2")) == 0
    (run_dir,) = tmp_path.iterdir()
    before = (run_dir / "checkpoint.pt").read_bytes()
    (run_dir / "checkpoint.partial").symlink_to("/dev/full")
    more = ["--resume", str(run_dir), "--num-iterations", "5", "--save-every", "3", "--quiet"]
    assert run_main(ppo, *more) == 1
    assert re.fullmatch("ppo.py: error: .*No space left on device.*\n", capsys.readouterr().err)
    assert (run_dir / "checkpoint.pt").read_bytes() == before
    assert iterations(run_dir) == [1, 2, 3]

    (run_dir / "checkpoint.partial").unlink()  # there is room again
    assert run_main(ppo, *more) == 0
    assert iterations(run_dir) == [1, 2, 3, 4, 5]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("what", ["progress.csv", "TensorBoard"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_full_disk_while_logging(tmp_path, capsys, monkeypatch, what):
    """A line says so, the last one. The run is saved if its checkpoint can be written."""
    real = ppo.Run.log

    def log(run, row):
        if run.iteration == 3 and what == "progress.csv":
            full = open("/dev/full", "w", buffering=1, newline="")
            run.logger.csv = csv.DictWriter(full, run.logger.columns)
        if run.iteration == 3 and what == "TensorBoard":
            writer = run.logger.events._get_file_writer().event_writer._async_writer._writer
            writer._writer = open("/dev/full", "wb", buffering=0)
        real(run, row)

    monkeypatch.setattr(ppo.Run, "log", log)
    more = ["--num-iterations", "5", "--save-every", "1"]
    assert run_main(ppo, *words(ppo, tmp_path, *more)) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert re.fullmatch("ppo.py: error: .*No space left on device.*", line)
    (run_dir,) = tmp_path.iterdir()
    # TensorBoard's file is flushed before each checkpoint.
    assert saved(ppo, run_dir) == {"progress.csv": 3, "TensorBoard": 2}[what]


@both
def test_output_that_nobody_reads_any_more(script, tmp_path, capsys, monkeypatch):
    """When `| head` has gone, the run ends with a checkpoint of what it has learned."""

    def closed(*values, file=None, **options):
        if file is not sys.stderr:
            raise BrokenPipeError("Broken pipe")
        print(*values, file=file, **options)

    monkeypatch.setattr(script, "print", closed, raising=False)
    options = words(script, tmp_path, "--num-iterations", "3")
    options.remove("--quiet")
    assert run_main(script, *options) == 1
    assert capsys.readouterr().err == f"{script.__name__}.py: error: Broken pipe\n"
    (run_dir,) = tmp_path.iterdir()
    assert saved(script, run_dir) == 1
    monkeypatch.undo()
    assert run_main(script, "--resume", str(run_dir), "--quiet") == 0
    assert iterations(run_dir) == [1, 2, 3]


def test_loss_that_is_no_number(tmp_path, capsys, monkeypatch):
    """One line; the last checkpoint stays as it was, before the update that failed."""
    calls = []

    def losses(*arguments):
        terms = real(*arguments)
        calls.append(1)
        # The second minibatch of iteration 3.
        return terms if len(calls) < 6 else (terms[0] * np.nan, *terms[1:])

    real = ppo.losses
    monkeypatch.setattr(ppo, "losses", losses)
    more = ["--num-iterations", "4", "--save-every", "1"]
    assert run_main(ppo, *words(ppo, tmp_path, *more)) == 1
    error = capsys.readouterr().err
    assert error == "ppo.py: error: no finite gradient: lower --learning-rate?\n"
    (run_dir,) = tmp_path.iterdir()
    state = ppo.read_checkpoint(run_dir)
    assert state["counters"]["iteration"] == 2
    assert float(state["optimizer"]["state"][0]["step"]) == 4


# Signals ------------------------------------------------------------------------------------------

STOPPING = "stopping after this iteration; Ctrl-C or SIGTERM once more to stop now"


@both
@pytest.mark.parametrize(
    "during, call, signum, last",
    [
        ("rollout", 2, signal.SIGINT, 2),
        ("update", 2, signal.SIGTERM, 2),
        ("evaluate", 2, signal.SIGINT, 1),
        ("write_file", 3, signal.SIGINT, 1),  # the first checkpoint, after script and config.json
    ],
)
def test_signal(script, tmp_path, capsys, monkeypatch, during, call, signum, last):
    """Whatever it interrupts, the iteration is finished and saved, and the run can be resumed."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    more = "--num-iterations 3 --save-every 1 --eval-every 1 --eval-episodes 2".split()
    with monkeypatch.context() as patch:
        real = getattr(script, during)
        calls = []
        if during == "rollout" and script is ml:
            call *= 2  # an iteration has one on each level

        def function(*arguments, **options):
            calls.append(1)
            if len(calls) == call:
                signal.raise_signal(signum)
            return real(*arguments, **options)

        patch.setattr(script, during, function)
        assert run_main(script, *words(script, tmp_path, *more)) == 128 + signum
    assert capsys.readouterr().err == f"{STOPPING}\n"
    (run_dir,) = tmp_path.iterdir()
    assert saved(script, run_dir) == last
    assert iterations(run_dir) == list(range(last + 1))

    assert run_main(script, "--resume", str(run_dir), "--quiet") == 0
    assert capsys.readouterr().err == ""
    assert iterations(run_dir) == [0, 1, 2, 3]
    assert all(row["eval_return"] for row in rows(run_dir))
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize(
    "script, owner, during",
    [
        (ppo, ppo, "Logger"),
        (ppo, ppo.Run, "start_games"),
        (ppo, ppo, "evaluate"),
        (ppo_atari, ppo_atari.Run, "start_games"),
        (ml, ml.Simulations, "measure_costs"),
        (ml, ml.Run, "start_games"),
        (ml, ml.Adaptive, "begin"),
        (ml, ml, "evaluate"),
    ],
)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_before_the_first_iteration(
    script, owner, during, signum, tmp_path, capsys, monkeypatch
):
    """It stops the run at once, without a word on iterations that are lost: there are none."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    options = words(script, tmp_path, "--eval-every", "1", "--num-iterations", "1")
    said = ""
    if owner in (ml.Adaptive, ml.Simulations):
        options += ["--schedule", "adaptive"]
    if owner is ml.Simulations:
        start = options.index("--level-costs")
        del options[start : start + 4]
        said = "measuring what steps cost\n"

    def function(*arguments, **options):
        signal.raise_signal(signum)

    monkeypatch.setattr(owner, during, function)
    assert run_main(script, *options) == 128 + signal.SIGINT
    assert capsys.readouterr().err == said
    assert not list(tmp_path.glob("*/checkpoint.pt"))
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_failure_while_costs_are_measured(tmp_path, monkeypatch):
    """The run is saved before its first iteration, and can be resumed."""
    options = words(ml, tmp_path, "--schedule", "adaptive", "--num-iterations", "1")
    start = options.index("--level-costs")
    del options[start : start + 4]

    def fail(*arguments):
        raise ml.GameError("no convergence")

    with monkeypatch.context() as patch:
        patch.setattr(ml.Simulations, "measure_costs", fail)
        assert run_main(ml, *options) == 1
    (run_dir,) = tmp_path.iterdir()
    assert saved(ml, run_dir) == 0
    assert run_main(ml, "--resume", str(run_dir), "--quiet") == 0
    assert saved(ml, run_dir) == 1


@both
def test_signal_before_a_resumed_run_goes_on(script, tmp_path, capsys, monkeypatch):
    """It stops the run at once, too. The checkpoint stays as it was."""
    assert run_main(script, *words(script, tmp_path, "--num-iterations", "1")) == 0
    (run_dir,) = tmp_path.iterdir()
    checkpoint = (run_dir / "checkpoint.pt").read_bytes()
    options = ["--resume", str(run_dir), "--quiet", "--num-iterations", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(script.Run, "start_games", lambda run: signal.raise_signal(signal.SIGTERM))
        assert run_main(script, *options) == 128 + signal.SIGINT
    assert capsys.readouterr().err == ""
    assert (run_dir / "checkpoint.pt").read_bytes() == checkpoint
    assert run_main(script, *options) == 0
    assert saved(script, run_dir) == 2


@linux
@pytest.mark.parametrize(
    "num_workers, last", [("0", signal.SIGINT), ("1", signal.SIGINT), ("1", signal.SIGTERM)]
)
def test_signal_once_more(tmp_path, capsys, monkeypatch, num_workers, last):
    """One more than a second later stops at once, though a game hangs.

    A signal of the same second is the same request: torchrun and batch systems send two.
    """
    signals = [signal.SIGINT, signal.SIGINT, signal.SIGTERM, last]
    received = []
    real_stop = ppo.Run.stop

    def stop(run, signum, frame):
        received.append(signum)
        real_stop(run, signum, frame)

    times = iter([0.0, 0.8, 0.9, 1.1, *range(100, 999, 20)])
    main = os.getpid()
    steps = []
    real = ppo.Game.step

    def step(game, t, action):
        steps.append(1)
        if len(steps) == 4 * 16 + 5:  # in iteration 2
            for signum in signals:
                os.kill(main, signum)
                time.sleep(0.05)
            time.sleep(60)
        real(game, t, action)

    clock = SimpleNamespace(monotonic=lambda: next(times), perf_counter=time.perf_counter)
    monkeypatch.setattr(ppo, "time", clock)
    monkeypatch.setattr(ppo.Run, "stop", stop)
    monkeypatch.setattr(ppo.Game, "step", step)
    more = ["--num-workers", num_workers, "--save-every", "1", "--num-iterations", "3"]
    assert run_main(ppo, *words(ppo, tmp_path, *more)) == 128 + signal.SIGINT
    assert received == signals
    assert multiprocessing.active_children() == []
    first, second = capsys.readouterr().err.splitlines()
    assert first == STOPPING
    assert second == "stopped at once; iterations since the last checkpoint are lost"
    (run_dir,) = tmp_path.iterdir()
    assert saved(ppo, run_dir) == 1 and iterations(run_dir) == [1]


@pytest.mark.parametrize("script", [ppo, ml, ppo_atari], ids=lambda script: script.__name__)
def test_env_that_takes_the_signals(script, tmp_path, capsys, monkeypatch):
    """A window library may catch them when an env is made. The run has them back after that."""
    taken = []
    real = script.make_env

    def make_env(*arguments, **options):
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda *received: taken.append(received))
        return real(*arguments, **options)

    def rollout(*arguments):
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(signal.SIGTERM)
        return real_rollout(*arguments)

    real_rollout = script.rollout
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(script, "make_env", make_env)
    monkeypatch.setattr(script, "rollout", rollout)
    # Whole games of Atari would take long.
    monkeypatch.setattr(ppo_atari.Player, "play_episodes", lambda player, seeds: np.zeros(1))
    more = "--eval-every 1 --eval-episodes 1 --num-iterations 3".split()
    try:
        # The second one comes after an evaluation, which makes envs.
        for call in (1, 4 if script is ml else 2):
            calls = []
            log_dir = tmp_path / str(call)
            assert run_main(script, *words(script, log_dir, *more)) == 128 + signal.SIGTERM
            assert capsys.readouterr().err == f"{STOPPING}\n"
    finally:
        for signum, handler in zip((signal.SIGINT, signal.SIGTERM), handlers):
            signal.signal(signum, handler)
    assert taken == []


@linux
def test_threads_that_a_fork_has_lost(tmp_path, capsys, monkeypatch):
    """A worker hangs in the first reset. A line names the fork, and one signal ends the run."""
    lines = []

    def stop():
        assert wait_until(lambda: len(lines) == 1)
        os.kill(os.getpid(), signal.SIGTERM)

    # Of the 8 seconds that workers have to end nothing is left.
    times = iter(range(0, 999, 20))
    clock = SimpleNamespace(monotonic=lambda: next(times), perf_counter=time.perf_counter)
    monkeypatch.setattr(ppo, "time", clock)
    monkeypatch.setattr(ppo, "report", lines.append)
    monkeypatch.setattr(ppo.WorkerPool, "patience", 0.3)
    options = words(ppo, tmp_path, "--env", "envs_foreign:Gauges-v0", "--num-workers", "2")
    thread = threading.Thread(target=stop)
    thread.start()
    assert run_main(ppo, *options) == 128 + signal.SIGINT
    thread.join()
    assert multiprocessing.active_children() == []
    (line,) = lines
    assert re.match("worker 0 has not answered for 0.3 seconds.*--num-workers 0.*threads", line)


def test_signal_that_cannot_be_reported(tmp_path, monkeypatch):
    """Its message may go to a program that the same signal has ended, or to a full disk."""

    def closed(*_, **__):
        raise BrokenPipeError

    def rollout(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return real(*arguments)

    real = ppo.rollout
    monkeypatch.setattr(ppo, "rollout", rollout)
    monkeypatch.setattr(ppo, "print", closed, raising=False)
    assert run_main(ppo, *words(ppo, tmp_path)) == 128 + signal.SIGTERM
    (run_dir,) = tmp_path.iterdir()
    assert saved(ppo, run_dir) == 1


def be_program(options, output):
    """Be a program of its own, whose output goes to a file."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", closefd=False)
    code = run_main(ppo, *options)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@linux
@pytest.mark.parametrize("how", ["two SIGTERM", "SIGINT to all"])
def test_program_that_is_stopped(tmp_path, how):
    """SIGTERM twice, as torchrun sends it, or Ctrl-C, which workers get too, leave a checkpoint."""
    log_dir = tmp_path / "runs"
    options = words(ppo, log_dir, *"--num-workers 2 --num-iterations 1000000".split())
    output = tmp_path / "output"
    program = multiprocessing.get_context("fork").Process(target=be_program, args=(options, output))
    program.start()

    def trains():
        return any(len(path.read_text()) > 1000 for path in log_dir.glob("*/progress.csv"))

    assert wait_until(trains, 30)
    children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
    if how == "two SIGTERM":
        os.kill(program.pid, signal.SIGTERM)
        time.sleep(0.005)
        os.kill(program.pid, signal.SIGTERM)
    else:
        os.killpg(program.pid, signal.SIGINT)
    program.join(30)
    signum = signal.SIGTERM if how == "two SIGTERM" else signal.SIGINT
    assert program.exitcode == 128 + signum
    assert output.read_text() == f"{STOPPING}\n"
    assert len(children) == 2 and all_ended(children)
    (run_dir,) = log_dir.iterdir()
    assert saved(ppo, run_dir) == iterations(run_dir)[-1] > 2
