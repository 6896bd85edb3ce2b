"""Tests of what goes wrong: games that fail now and then or hang, full disks, NaN, signals."""

import csv
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time

import envs
import numpy as np
import pytest
import torch

import ppo
import ppo_atari
import ppo_multilevel

SMALL = "--num-minibatches 2 --update-epochs 1 --num-envs 4 --quiet".split()
OWN = {
    ppo: "--num-steps 16 --hidden 8".split(),
    ppo_atari: "--num-steps 8 --eval-episodes 1 --precision fp32 --noop-max 0".split(),
    ppo_multilevel: "--levels 1 2 --num-steps 16 8 --hidden 8 --eval-every 0".split(),
}
FLAKY = {ppo: "envs:Flaky-v0", ppo_atari: "Breakout", ppo_multilevel: "envs:make_flaky"}
GOOD = {ppo: "CartPole-v1", ppo_atari: "Breakout", ppo_multilevel: "envs:make"}


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


@pytest.fixture
def fail(tmp_path, monkeypatch):
    """Return a function: have the first `times` fifth steps fail."""
    if sys.platform != "linux":
        pytest.skip("spawned workers do not know the game that fails")

    class FlakyGame(ppo_atari.Game):
        def step(self, action):
            if self.length == 4:
                envs.fail_now_and_then()
            return super().step(action)

    def failing(how, times):
        (tmp_path / "failures").mkdir()
        monkeypatch.setenv("FLAKY", f"{how}:{times}:{tmp_path}/failures")
        monkeypatch.setattr(ppo_atari, "Game", FlakyGame)

    return failing


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


# Workers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["raise", "kill", "hang", "nan"])
def test_worker_that_starts_again(script, tmp_path, capsys, fail, how):
    """A worker that fails is started again, each time; the others' games go on, all is counted."""
    if how == "nan" and script is ppo_atari:
        pytest.skip("frames have no NaN")
    times = 1 if how == "nan" else 2  # NaN of two games of a worker are one failure
    fail(how, times)
    more = "--num-workers 2 --restart-workers 2 --num-iterations 3".split()
    more += ["--step-timeout", "0.5" if script is ppo_atari else "2"] if how == "hang" else []
    run = script.train(script.parse_args(options(script, tmp_path, FLAKY[script], *more)))
    lines = capsys.readouterr().err.splitlines()
    reason = {"raise": "broken on purpose", "kill": "died with exit code -9"}
    reason |= {"hang": "has not answered", "nan": "NaN or infinity in"}
    assert len(lines) == times
    for line in lines:
        assert re.match(rf"worker \d starts again: .*{reason[how]}", line)
    assert [row["iteration"] for row in run.history] == [1, 2, 3]
    assert [row["restarts"] for row in rows(run.run_dir)] == [str(times)] * 3
    assert all(torch.isfinite(value).all() for value in run.model.state_dict().values())
    assert multiprocessing.active_children() == []


def test_atari_worker_that_starts_again(tmp_path, capsys, fail):
    """It plays the whole rollout again, which is its own way."""
    test_worker_that_starts_again(ppo_atari, tmp_path, capsys, fail, "kill")


def test_more_failures_than_restarts(script, tmp_path, capsys, monkeypatch, fail):
    """Then the run ends with the error, and a checkpoint."""
    fail("raise", 3)
    more = "--num-workers 1 --restart-workers 2 --num-iterations 5".split()
    assert run_main(script, monkeypatch, *options(script, tmp_path, FLAKY[script], *more)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("worker 0 starts again") for line in lines) == 2
    assert lines[2].startswith(f"{script.__name__}.py: error: ")
    assert "broken on purpose" in lines[2]
    (run_dir,) = (tmp_path / "runs").iterdir()
    script.load_checkpoint(run_dir)


def test_episodes_of_a_failed_worker(tmp_path, fail, monkeypatch):
    """They end truncated where it failed, the next ones have other seeds; other games go on."""
    fail("raise", 1)
    more = "--num-workers 2 --restart-workers 1 --num-iterations 1".split()
    buffers, real = [], ppo.rollout
    monkeypatch.setattr(ppo, "rollout", lambda *a: buffers.append(real(*a)) or buffers[-1])
    ppo.train(ppo.parse_args(options(ppo, tmp_path, FLAKY[ppo], *more)))
    ((buffer, episodes),) = buffers
    truncated = buffer["truncated"].numpy()  # (16, 4); episodes have 10 steps
    expected = np.zeros((16, 4), bool)
    whole, failed = ([0, 1], [2, 3]) if truncated[4, 2] else ([2, 3], [0, 1])
    expected[9, whole] = expected[4, failed] = expected[14, failed] = True
    np.testing.assert_array_equal(truncated, expected)
    assert not buffer["terminated"].any()
    assert (buffer["rewards"][4, failed] == 0).all() and (buffer["rewards"][:4] != 0).all()
    assert len(episodes) == 4  # those that the failure ended are not among them
    starts = buffer["obs"][[0, 5], :][:, failed]
    assert len(starts.flatten(0, 1).unique(dim=0)) == 4


def test_pair_that_starts_again(tmp_path, fail, monkeypatch):
    """Both members of a pair that failed end truncated, and start from the same state."""
    fail("raise", 1)
    more = "--num-workers 2 --restart-workers 1 --num-iterations 1 --coupling noise".split()
    buffers, real = [], ppo_multilevel.rollout
    monkeypatch.setattr(
        ppo_multilevel, "rollout", lambda *a: buffers.append(real(*a)) or buffers[-1]
    )
    ppo_multilevel.train(
        ppo_multilevel.parse_args(options(ppo_multilevel, tmp_path, FLAKY[ppo_multilevel], *more))
    )
    (own, sync), _ = buffers[1]  # (8, 4): own level 2, its partner
    failed = own["truncated"][4].nonzero().flatten().tolist()
    assert failed in ([0, 1], [2, 3])
    assert torch.equal(own["truncated"], sync["truncated"])
    # A cell of level 1 is two of level 2: the same state rounds to numbers that are that near.
    assert ((own["obs"][5, failed] - sync["obs"][5, failed]).abs() <= 0.5).all()
    assert not (own["obs"][5, failed] == own["obs"][0, failed]).all()


def test_worker_that_hangs(script, tmp_path, capsys, monkeypatch, fail):
    """One line names the option, nobody waits, no process is left."""
    fail("hang", 1)
    more = "--num-workers 2 --step-timeout 0.5 --num-iterations 9".split()
    started = time.monotonic()
    assert run_main(script, monkeypatch, *options(script, tmp_path, FLAKY[script], *more)) == 1
    assert time.monotonic() - started < 60
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"worker \d has not answered for [\d.]+ s, see --step-timeout", line)
    assert multiprocessing.active_children() == []


def test_evaluation_that_hangs(script, tmp_path, fail):
    """The evaluation's games are timed too."""
    fail("hang", 1)
    more = "--num-workers 1 --step-timeout 0.5 --num-iterations 9 --eval-every 1".split()
    args = script.parse_args(options(script, tmp_path, FLAKY[script], *more))
    with pytest.raises(script.GameError, match="--step-timeout"):
        script.train(args)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("option", ["--step-timeout", "--restart-workers"])
def test_options_that_need_workers(script, tmp_path, capsys, option):
    """Only what runs in a process of its own can be ended or started again."""
    with pytest.raises(SystemExit) as exit_info:
        script.parse_args(
            options(script, tmp_path, GOOD[script], option, "1", "--num-workers", "0")
        )
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert option in line and "--num-workers" in line


# Files --------------------------------------------------------------------------------------------


def first_run(script, log_dir, iterations=2):
    """Train a little. Returns the run's folder."""
    more = ["--num-iterations", str(iterations), "--num-workers", "0"]
    return script.train(script.parse_args(options(script, log_dir, GOOD[script], *more))).run_dir


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("file", ["checkpoint", "games-3"])
def test_full_disk_while_saving(script, tmp_path, capsys, monkeypatch, file):
    """One line names the file; the old checkpoint is whole, and the run can be resumed from it."""
    run_dir = first_run(script, tmp_path)
    before = (run_dir / "checkpoint.pt").read_bytes()
    (run_dir / f"{file}.partial").symlink_to("/dev/full")
    capsys.readouterr()
    more = ["--resume", str(run_dir), "--num-iterations", "5", "--save-every", "3", "--quiet"]
    assert run_main(script, monkeypatch, *more) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert re.search(rf"error: .*No space left on device: '.*{file}\.(pt|pkl)'$", line)
    assert (run_dir / "checkpoint.pt").read_bytes() == before
    assert rows(run_dir)[-1]["iteration"] == "3"
    assert not (run_dir / f"{file}.partial").is_symlink()
    assert run_main(script, monkeypatch, *more) == 0
    assert "new episodes" not in capsys.readouterr().err
    assert [int(row["iteration"]) for row in rows(run_dir)[-5:]] == [1, 2, 3, 4, 5]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_while_logging(script, tmp_path, capsys, monkeypatch):
    """One line names the run's folder, as TensorBoard's files are in it too."""
    real = script.Logger.write

    def write(logger, row, **scalars):
        if row["iteration"] == 2:
            logger.csv = open("/dev/full", "w")
            logger.writer = csv.DictWriter(logger.csv, logger.columns)
        real(logger, row, **scalars)

    monkeypatch.setattr(script.Logger, "write", write)
    more = ["--num-iterations", "5", "--save-every", "1", "--num-workers", "0"]
    assert run_main(script, monkeypatch, *options(script, tmp_path, GOOD[script], *more)) == 1
    (run_dir,) = (tmp_path / "runs").iterdir()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"No space left on device: '{run_dir}'")
    assert script.load_checkpoint(run_dir)["counters"]["iteration"] == 1


# Training -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_loss_that_is_no_number(script, tmp_path, capsys, monkeypatch, what):
    """One line; the last checkpoint stays as it was, before the update that failed."""
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
    more = ["--num-iterations", "9", "--save-every", "1", "--num-workers", "0"]
    assert run_main(script, monkeypatch, *options(script, tmp_path, GOOD[script], *more)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "gradient is not finite" in line
    (run_dir,) = (tmp_path / "runs").iterdir()
    state = script.load_checkpoint(run_dir)
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
        when = 4 if during == "write_file" else 2  # config, progress, games-1 and checkpoint

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
    iteration = script.load_checkpoint(run_dir)["counters"]["iteration"]
    assert 1 <= iteration < 3 and len(rows(run_dir)) == iteration
    assert run_main(script, monkeypatch, "--resume", str(run_dir)) == 0
    assert capsys.readouterr().err == ""
    assert [row["iteration"] for row in rows(run_dir)] == ["1", "2", "3"]
