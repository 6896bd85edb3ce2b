"""Tests of --resume: a run that was stopped goes on as if nothing had happened."""

import csv
import json
import pickle
import shutil
import signal
import time
from pathlib import Path

import envs
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
    "CartPole, normalised": (ppo, f"--env CartPole-v1 --eval-every 3 {NORMS}"),
    "CartPole, LSTM": (ppo, "--env CartPole-v1 --rnn lstm --rnn-size 8 --num-workers 2"),
    "HalfCheetah": (ppo, "--env HalfCheetah-v5 --num-envs 2"),
    "Breakout": (ppo_atari, "--env Breakout --num-envs 2 --num-workers 0 --eval-every 4"),
    "Breakout, workers": (
        ppo_atari,
        "--env Breakout --num-envs 2 --num-workers 2 --full-action-space --eval-every 3",
    ),
    "pairs, step": (
        ppo_multilevel,
        "--env envs:make --eval-every 2 --schedule together --coupling step --control 1",
    ),
    "pairs, noise": (
        ppo_multilevel,
        "--env envs:make --eval-every 3 --schedule together --num-workers 2",
    ),
    "no map_from": (ppo_multilevel, "--env envs:make_line --schedule together"),
    "adaptive": (ppo_multilevel, "--env ResSim-v1 --schedule adaptive --eval-every 2"),
    "adaptive, replayed": (
        ppo_multilevel,
        "--env envs:make_cartpole --schedule adaptive --eval-every 2 --num-workers 2",
    ),
    "its own state": (ppo, "--env envs:Line-v0 --num-workers 2"),
    "wrappers": (ppo, "--env envs:Rescaled-v0"),
    "LunarLander": (ppo, "--env LunarLander-v3"),
}
SECONDS = {"wall_seconds", "sim_seconds", "sim_cost", "total_cost", "sps"}


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


def without_times(rows):
    """Return rows without what takes another time in each run."""
    rows = [{k: v for k, v in r.items() if k.rpartition("_")[2] != "seconds"} for r in rows]
    return [{k: v for k, v in row.items() if k not in SECONDS} for row in rows]


def log(run_dir):
    """Return what a run has logged, without times: rows of progress.csv, TensorBoard's points."""
    with (run_dir / "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows = without_times(rows)
    events = EventAccumulator(str(run_dir)).Reload()
    tags = {tag for tag in events.Tags()["scalars"] if "SPS" not in tag and "costs/" not in tag}
    return rows, {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


def saved_games(state):
    """Take the games out of a checkpoint. Returns (arrays, states) for each rank."""
    return pickle.loads(state.pop("games").numpy().tobytes())


def equal(a, b):
    """Whether two nested lists and dicts of tensors, arrays and plain values are equal."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return np.array_equal(a, b, equal_nan=isinstance(a, (float, np.ndarray)))


# By default Breakout is resumed with workers only.
CASE_PARAMS = [
    pytest.param(case, marks=pytest.mark.slow if case == "Breakout" else ()) for case in CASES
]


@pytest.mark.parametrize("case", CASE_PARAMS)
def test_resumed_run_is_the_same_run(case, tmp_path, capsys, monkeypatch):
    """6 iterations are 3, a stop, and 3 more: parameters, optimizer, generators, games, logs; also
    if an evaluation is due at the stop, which cuts it short: it is made again."""
    script, options = CASES[case]
    if case == "LunarLander":
        pytest.importorskip("Box2D", reason="not among the requirements on Python 3.14")
    monkeypatch.setattr(ppo_atari, "EVAL_STEPS", 40)  # a whole episode takes seconds
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
    before = capsys.readouterr().err
    assert before.startswith("stopping after this iteration") and before.count("\n") == 1
    resumed = resume(script, part.run_dir, *more)
    assert capsys.readouterr().err == "" and not hasattr(resumed, "states")  # may be large
    assert len(resume(script, part.run_dir).history) == len(whole.history)  # nothing more
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("run complete; longer: --")
    assert resumed.run_dir == part.run_dir
    saved = [script.Checkpoint(run.run_dir).read() for run in (whole, resumed)]
    for state in saved:
        state.pop("starts")  # a resumed run counts one more
        for name in ("simulated_seconds", "level_costs", "corrects_costs"):  # were measured
            state.pop(name, None)
        for name in SECONDS & state["counters"].keys():
            assert state["counters"].pop(name) > 0
        state["history"] = without_times(state["history"])
    games = [saved_games(state) for state in saved]
    for ((arrays, states),) in games:
        arrays.pop("seconds", None)
        assert None not in states
    assert equal(*([arrays for arrays, _ in ranks] for ranks in games))
    assert equal(*saved)
    assert equal(*(log(run.run_dir) for run in (whole, resumed)))
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


def iterations(run):
    """Return the iterations that a run has logged, without the evaluation before the first one."""
    return [row["iteration"] for row in run.history if row["iteration"]]


def first_observations(monkeypatch):
    """Return a list that collects what the games of ppo.py show first in each rollout, (N, D)."""
    seen, real = [], ppo.rollout

    def rollout(*arguments):
        buffer, episodes = real(*arguments)
        seen.append(buffer["obs"][0])
        return buffer, episodes

    monkeypatch.setattr(ppo, "rollout", rollout)
    return seen


def test_seeds(tmp_path, monkeypatch):
    """The games start from them, and each has its own."""
    seen = first_observations(monkeypatch)
    run = small_run(ppo, tmp_path, iterations=1)
    seeds = ppo.game_seeds(run.args, 0)
    first = [gym.make("CartPole-v1").reset(seed=int(seed))[0] for seed in seeds]
    np.testing.assert_array_equal(seen[0], first)
    assert len(set(seeds)) == 4
    assert "game_seeds" not in json.loads((run.run_dir / "config.json").read_text())


def test_games_that_cannot_be_replayed(tmp_path, capsys, monkeypatch):
    """They start new episodes with new seeds, each time, and the log says so once."""
    seen = first_observations(monkeypatch)
    run = small_run(ppo, tmp_path, "--env", "envs:Secret-v0", iterations=1)
    assert capsys.readouterr().err == ""
    seeds = {*ppo.game_seeds(run.args, 0)}
    for starts in (1, 2):
        run = resume(ppo, run.run_dir, "--num-iterations", str(1 + starts))
        err = capsys.readouterr().err
        assert err.startswith("4 of 4 games start new episodes: ") and err.count("\n") == 1
        assert "playing its actions again led elsewhere" in err
        assert run.num_starts == starts
        own = ppo.game_seeds(run.args, starts)
        seeds |= {*own}
        first = [gym.make("envs:Secret-v0").reset(seed=int(seed))[0] for seed in own]
        np.testing.assert_array_equal(seen[-1][:, 0], np.array(first)[:, 0])
        assert iterations(run) == [*range(1, 2 + starts)]
    assert len(seeds) == 3 * 4


@SCRIPTS
@pytest.mark.parametrize("damage", ["missing", "cut", "other ranks"])
def test_games_that_cannot_be_restored(script, tmp_path, capsys, damage):
    """Without fitting games the run goes on with new episodes, and says why."""
    run_dir = small_run(script, tmp_path).run_dir
    state = script.Checkpoint(run_dir).read()
    if damage == "missing":
        state["games"] = None
    elif damage == "cut":
        state["games"] = state["games"][:-100]
    else:
        games = pickle.dumps(2 * saved_games(state))
        state["games"] = torch.frombuffer(bytearray(games), dtype=torch.uint8)
    torch.save(state, run_dir / "checkpoint.pt")
    capsys.readouterr()
    resumed = resume(script, run_dir, "--num-iterations", "3")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("all games start new episodes: ")
    assert iterations(resumed) == [1, 2, 3]
    assert resumed.num_starts == 1
    assert script.Checkpoint(run_dir).read()["games"] is not None
    resume(script, run_dir, "--num-iterations", "4")
    assert capsys.readouterr().err == ""


@SCRIPTS
def test_checkpoint_of_an_older_version(script, tmp_path, capsys):
    """Its policy can be evaluated. One line says that the run cannot be resumed."""
    run_dir = small_run(script, tmp_path).run_dir
    state = script.Checkpoint(run_dir).read()
    del state[script.NEWEST_ENTRY]
    torch.save(state, run_dir / "checkpoint.pt")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        script.parse_args(["--resume", str(run_dir)])
    (line,) = capsys.readouterr().err.splitlines()
    assert "older version of this script, which only --eval can use" in line
    assert script.parse_args(["--eval", str(run_dir)]).eval == str(run_dir)


@SCRIPTS
def test_options_that_may_change(script, tmp_path, capsys):
    """Length of the run, workers, evaluation, saving, device; what is given again as it was."""
    run = small_run(script, tmp_path, "--gamma", "0.5")
    more = "--num-iterations 3 --num-workers 1 --eval-every 1 --eval-episodes 1 --save-every 1"
    more += " --device cpu --gamma 0.5 --num-envs 4"
    capsys.readouterr()
    resumed = resume(script, run.run_dir, *more.split())
    assert capsys.readouterr().err == ""
    assert len(resumed.pool.workers) == 1 and "eval_return" in resumed.history[-1]
    assert iterations(resumed) == [1, 2, 3]
    config = json.loads((run.run_dir / "config.json").read_text())["options"]
    assert config["num_iterations"] == 3 and config["eval_every"] == 1


OTHERS = "--seed 5,--log-dir elsewhere,--run-name other,--num-envs 2,--learning-rate 0.5"
OTHERS = [*OTHERS.split(","), "--norm-adv batch", "--gamma 0.5 --num-iterations 3"]


@SCRIPTS
def test_options_that_resume_refuses(script, tmp_path, capsys):
    """All others, by name: folders that are not the run's, what would have no or half an effect."""
    run_dir = small_run(script, tmp_path, iterations=1).run_dir
    others = [*OTHERS, *(["--init-log-std 1", "--value-learning-rate 1"] if script is ppo else [])]
    for option in others:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            script.parse_args(["--resume", str(run_dir), *option.split()])
        assert exit_info.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        name = option.split()[0].replace("--no-", "--")
        assert line.startswith(f"{script.__name__}.py: error: argument {name}: ")
    assert not Path("elsewhere").exists()


@SCRIPTS
def test_run_that_was_started_in_another_way(script, tmp_path, monkeypatch):
    """Its config.json may name the folder of all runs as older scripts did, from where they ran."""
    monkeypatch.chdir(tmp_path)
    run_dir = small_run(script, tmp_path, iterations=1).run_dir
    config = json.loads((run_dir / "config.json").read_text())
    config["options"]["log_dir"] = "."
    (run_dir / "config.json").write_text(json.dumps(config))
    assert script.parse_args(["--resume", run_dir.name]).log_dir == str(tmp_path)


@SCRIPTS
def test_games_whose_state_does_not_fit(script, tmp_path, capsys, monkeypatch):
    """As after an upgrade of a package: new episodes, and a line says why."""
    run_dir = small_run(script, tmp_path).run_dir

    def set_state(game, state):
        raise ValueError("there is another wrapper")

    monkeypatch.setattr(script.Game, "set_state", set_state)
    capsys.readouterr()
    resumed = resume(script, run_dir, "--num-iterations", "3")
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "4 of 4 games start new episodes: ValueError: there is another wrapper"
    assert iterations(resumed) == [1, 2, 3]


def test_games_without_a_state(tmp_path, capsys, monkeypatch):
    """They start new episodes, and so do the discounted sums of --norm-reward."""
    monkeypatch.setattr(ppo.Game, "get_state", lambda game: None)
    run_dir = small_run(ppo, tmp_path, "--norm-reward").run_dir
    rollout, buffers = ppo.rollout, []

    def watched(*arguments):
        buffers.append(rollout(*arguments)[0])
        return buffers[-1], []

    monkeypatch.setattr(ppo, "rollout", watched)
    capsys.readouterr()
    assert resume(ppo, run_dir, "--num-iterations", "4").num_starts == 1
    assert "4 of 4 games start new episodes: its state was not saved" in capsys.readouterr().err
    for t, expected in enumerate([1, 1.99]):  # CartPole's rewards are 1, γ is 0.99
        assert buffers[0]["discounted"][t].tolist() == pytest.approx([expected] * 4)


@SCRIPTS
def test_run_that_died_while_saving(script, tmp_path, capsys):
    """Half a file, or rows of iterations that no checkpoint has, are not used, and are removed."""
    run_dir = small_run(script, tmp_path).run_dir
    for name in ("checkpoint.partial", "config.partial"):
        (run_dir / name).write_bytes(b"half")
    with (run_dir / "progress.csv").open("a") as file:
        file.write("3,1\r\n4")
    capsys.readouterr()
    resumed = resume(script, run_dir, "--num-iterations", "3")
    assert capsys.readouterr().err == ""
    assert iterations(resumed) == [1, 2, 3]
    assert [row["iteration"] for row in log(run_dir)[0]][-3:] == ["1", "2", "3"]
    assert not list(run_dir.glob("*.partial"))


# Games --------------------------------------------------------------------------------------------


def started_game(env_id, **options):
    """Return a started game of ppo.py, and the arrays that it writes to."""
    args = ppo.parse_args(["--env", env_id, "--num-envs", "1", "--num-minibatches", "1"])
    model = ppo.make_model(args)
    pool = ppo.make_pool(args, model, np.array([7]), 0)
    pool.call("start")
    return pool.games.games[0], pool.arrays


def play(game, arrays, num_steps, seed):
    """Take random steps. Returns what the game shows after each, (num_steps, D + 4)."""
    game.env.action_space.seed(seed)
    names = ("rewards", "ended", "episode_return", "episode_length")
    shown = []
    for _ in range(num_steps):
        arrays["actions"][0] = game.env.action_space.sample() - getattr(game.space, "start", 0)
        game.step()
        shown.append([*arrays["obs"][0], *(arrays[name][0] for name in names)])
    return np.array(shown)


REPLAYED = "CartPole-v1 HalfCheetah-v5 Hopper-v5 Taxi-v4 Pendulum-v1 FrozenLake-v1 Blackjack-v1"
REPLAYED += " Acrobot-v1 LunarLander-v3 envs:Rescaled-v0"


@pytest.mark.parametrize("steps", [7, 230])
@pytest.mark.parametrize("env", REPLAYED.split())
def test_replay(env, steps):
    """A game that is resumed in the middle of its first or a later episode goes on bit for bit."""
    if env == "LunarLander-v3":
        pytest.importorskip("Box2D", reason="not among the requirements on Python 3.14")
    game, arrays = started_game(env)
    play(game, arrays, steps, seed=0)
    state = game.get_state()
    other, others = started_game(env)
    for name, array in arrays.items():
        others[name][:] = array
    assert other.resume(state) is None
    np.testing.assert_array_equal(play(other, others, 20, 1), play(game, arrays, 20, 1))
    states = [pickle.loads(each.get_state()) for each in (game, other)]
    assert equal(*states)


def test_replay_that_leads_elsewhere():
    """The game starts a new episode, and says why."""
    game, arrays = started_game("envs:Secret-v0")
    play(game, arrays, 3, seed=0)
    other, others = started_game("envs:Secret-v0")
    for name, array in arrays.items():
        others[name][:] = array
    assert other.resume(game.get_state()).endswith("playing its actions again led elsewhere")
    assert others["ended"][0] and other.actions == []


def test_generator_of_another_kind(monkeypatch):
    """An env may use NumPy's old generator: it plays, and starts a new episode when resumed."""
    game, arrays = started_game("envs:Line-v0")
    monkeypatch.setattr(envs.Line, "get_state", property(), raising=False)  # hasattr says no
    game.env.unwrapped.np_random = np.random.RandomState(0)
    play(game, arrays, 25, seed=0)
    state = game.get_state()
    other, others = started_game("envs:Line-v0")
    assert other.resume(state).endswith("led elsewhere") and others["ended"][0]


def test_long_episode_is_not_replayed(monkeypatch):
    """Beyond MAX_REPLAY steps nothing is kept, and the state is None."""
    monkeypatch.setattr(ppo.Game, "MAX_REPLAY", 5)
    game, arrays = started_game("Pendulum-v1")
    play(game, arrays, 5, seed=0)
    assert game.get_state() is not None
    play(game, arrays, 10, seed=0)
    assert game.get_state() is None and len(game.actions) == 6


def test_env_says_its_state():
    """get_state and set_state of an env are used, within wrappers that have no state."""
    game, arrays = started_game("envs:Line-v0")
    assert ppo.state_keeper(game.env) is game.env.unwrapped
    play(game, arrays, 4, seed=0)
    other, _ = started_game("envs:Line-v0")
    other.env.unwrapped.step = None  # nothing is replayed
    assert other.resume(game.get_state()) is None
    assert other.env.unwrapped.t == 4
    np.testing.assert_array_equal(other.env.unwrapped.state, game.env.unwrapped.state)


def test_state_within_a_wrapper_that_has_one():
    """A time limit would lose its count: the env is replayed instead. So is MuJoCo."""
    rescaled = gym.wrappers.ClipAction(gym.wrappers.RescaleAction(envs.Line(2), -1, 1))
    assert ppo.state_keeper(rescaled) is ppo_multilevel.state_keeper(rescaled) is rescaled.unwrapped
    assert ppo.state_keeper(gym.wrappers.TimeLimit(gym.make("envs:Line-v0"), 10)) is None
    assert ppo.state_keeper(gym.make("HalfCheetah-v5")) is None  # it has set_state only


@pytest.mark.parametrize("failure", ["raises", "cannot be pickled"])
def test_state_that_cannot_be_saved(monkeypatch, failure):
    """The game has none then, and starts a new episode when it is resumed."""
    game, arrays = started_game("envs:Line-v0")
    returned = {"raises": lambda: 1 / 0, "cannot be pickled": lambda: lambda: 0}
    monkeypatch.setattr(game.env.unwrapped, "get_state", returned[failure])
    assert game.get_state() is None
    assert game.resume(None) == "its state was not saved"
    assert arrays["ended"][0]
