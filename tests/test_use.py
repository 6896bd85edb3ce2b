"""Tests of what one does with a trained policy: use_policy.py, code of the reference."""

import json
import math
import os
import re
import sys
from contextlib import closing
from pathlib import Path

import cv2
import envs
import envs_foreign
import gymnasium as gym
import numpy as np
import onnxruntime
import pytest
import torch

import ppo
import ppo_atari
import ppo_multilevel as ml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "examples"))

import use_policy  # noqa: E402

SMALL = "--num-minibatches 2 --update-epochs 1 --num-iterations 1 --num-workers 0 --quiet".split()
OWN = {
    ppo: "--num-envs 4 --num-steps 16 --hidden 8 --eval-episodes 4".split(),
    ppo_atari: "--num-envs 2 --num-steps 4".split(),
    ml: (
        "--num-envs 4 --levels 1 2 --num-steps 8 --hidden 8 --eval-episodes 4 --eval-every 0 "
        "--check-episodes 2"
    ).split(),
}


def parse(script, log_dir, *options):
    """Parse the options of a small run."""
    return script.parse_args([*SMALL, *OWN[script], *options, "--log-dir", str(log_dir)])


def save_run(script, log_dir, *options):
    """Write the folder of a run that has learned nothing. Returns it."""
    args = parse(script, log_dir, *options, "--run-name", "run")
    run_dir = log_dir / "run"
    run_dir.mkdir()
    script.write_config(run_dir, args)
    torch.save({"model": random_model(script, args).state_dict()}, run_dir / "checkpoint.pt")
    return run_dir


def random_model(script, args):
    """Return a model whose actions are not always the same."""
    script.seed_generators(3)
    model = script.make_model(args).cpu()
    model.head.output.weight.data.normal_()
    if script is not ppo_atari and args.norm_obs:
        model.obs_norm.update(torch.randn(50, model.obs_dim, dtype=torch.float64))
    return model


def exported(script, args, model, folder):
    """Export a model. Returns the function {name: array} → list of arrays, and its inputs."""
    use_policy.export_onnx(script, args, model, folder / "policy.onnx")
    session = onnxruntime.InferenceSession(folder / "policy.onnx")
    names = [value.name for value in session.get_inputs()]
    return lambda feed: session.run(None, {name: feed[name] for name in names}), names


# ONNX ---------------------------------------------------------------------------------------------

CASES = {
    "CartPole": (ppo, "--env CartPole-v1 --shared-net"),
    "HalfCheetah": (ppo, "--env HalfCheetah-v5 --norm-obs --layer-norm --norm-value"),
    "start": (ppo, "--env envs_spaces:Action-five-v0"),
    "MultiDiscrete": (ppo, "--env envs_spaces:Action-multi_start-v0"),
    "unsigned": (ppo, "--env envs_spaces:Action-unsigned-v0"),
    "MultiBinary": (ppo, "--env envs_spaces:Action-square-v0"),
    "matrix": (ppo, "--env envs_spaces:Action-matrix-v0"),
    "number": (ppo, "--env envs_spaces:Action-number-v0"),
    "float64": (ppo, "--env envs_spaces:Action-double-v0"),
    "float16": (ppo, "--env envs_spaces:Action-short-v0"),
    "full covariance": (ppo, "--env Pendulum-v1 --full-covariance"),
    "masks": (ppo, "--env envs_spaces:Masked-table-info-v0"),
    "GRU": (ppo, "--env CartPole-v1 --rnn gru --rnn-size 8"),
    "LSTM": (ppo, "--env HalfCheetah-v5 --rnn lstm --rnn-size 8 --norm-obs"),
    "LSTM, masks": (ppo, "--env envs_spaces:Masked-zero-info-v0 --rnn lstm --rnn-size 8"),
    "ResSim": (ml, "--env ResSim-v1 --norm-obs"),
    "levels": (ml, "--env envs:make_cartpole"),
}


def test_folder_that_is_not_of_a_run(tmp_path, capsys):
    """One line says so. The folder may be that of an analysis."""
    (tmp_path / "analysis.csv").touch()
    with pytest.raises(SystemExit):
        use_policy.main([str(tmp_path), "--film"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"error: {tmp_path} is no folder of a run: it has no config.json")


@pytest.mark.parametrize("case", CASES)
def test_onnx_policy_acts_like_the_model(case, tmp_path):
    """On the way through two episodes and more, the file gives the actions that the env gets."""
    script, options = CASES[case]
    args = parse(script, tmp_path, *options.split())
    model = random_model(script, args)
    run, names = exported(script, args, model, tmp_path)
    assert names == [name for name in ("obs", "action_mask", "state") if name in model.inputs]
    team = ["own 0"] if script is ml else []
    seen = set()
    with closing(script.Player(args, model)) as player:
        player.start(np.arange(4), *team)
        player.carry(*team, -1)
        rows = player.rows["own 0"] if script is ml else player.rows
        for _ in range(30):
            feed = {name: rows[name][0] for name in names}
            if "state" in names:
                # It is zeros where an episode starts.
                feed["state"] = feed["state"] * ~rows["starts"][0][:, None]
            actions, *state = run(feed)
            player.take_step(*team, 0)

            space = model.action_space
            expected = script.to_env(rows["actions"][0], space)
            np.testing.assert_allclose(actions, expected, rtol=2e-3, atol=1e-5)
            if isinstance(space, gym.spaces.Box):
                assert all(space.contains(action) for action in actions)
            else:
                np.testing.assert_array_equal(actions, expected)
            if state:
                np.testing.assert_allclose(state[0], rows["state"][1], rtol=1e-4, atol=1e-5)
            seen |= {str(action) for action in expected}
            player.carry(*team, 1)
    assert len(seen) > 1


def test_onnx_policy_of_pictures(tmp_path):
    """The file computes in float32, for any number of pictures."""
    args = parse(ppo_atari, tmp_path, "--precision", "bf16")
    model = random_model(ppo_atari, args)
    run, names = exported(ppo_atari, args, model, tmp_path)
    assert names == ["obs"] and not model.bf16
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (12, 84, 84, 4)) * (rng.random((12, 84, 84, 4)) < 0.3)
    pictures = pictures.astype(np.uint8)
    (actions,) = run({"obs": pictures})
    np.testing.assert_array_equal(actions, model.act(pictures))
    assert len(set(actions.tolist())) > 1


@pytest.mark.parametrize("bias, bound", [(-9.0, -0.1), (9.0, 0.3)])
def test_onnx_policy_of_a_float64_box(bias, bound, tmp_path):
    """Its actions are inside the Box in float64, on its bounds too, which float32 cannot hold."""
    args = parse(ppo, tmp_path, "--env", "envs_foreign:Valve-v0")
    model = ppo.make_model(args)
    model.head.output.bias.data.fill_(bias)
    run, _ = exported(ppo, args, model, tmp_path)
    (action,) = run({"obs": np.zeros((1, 3), np.float32)})
    assert action.dtype == np.float64 and action[0] == bound
    assert envs_foreign.Valve.action_space.contains(action[0])


@pytest.mark.parametrize("scale", envs_foreign.Bit.VALUES)
def test_onnx_policy_sees_small_differences(scale, tmp_path):
    """With --norm-obs it takes float64, and tells what differs by 1e-8 of its size."""
    args = parse(ppo, tmp_path, "--env", f"envs_foreign:Bit-{scale}-v0", "--norm-obs")
    model = random_model(ppo, args)
    low, high = envs_foreign.Bit.VALUES[scale]
    obs = np.array([[low, high], [high, high]])
    model.obs_norm.count.zero_()
    model.obs_norm.update(torch.from_numpy(obs))
    run, _ = exported(ppo, args, model, tmp_path)
    # The normalised observations are -1 and 1, and without biases the layers are odd functions.
    (actions,) = run({"obs": obs})
    assert sorted(actions.tolist()) == [0, 1]


@pytest.mark.parametrize("script", OWN, ids=lambda script: script.__name__)
def test_command_writes_a_policy(script, tmp_path, capsys):
    """The command finds out which script has made the run."""
    options = ["--env", "envs:make"] if script is ml else []
    run_dir = save_run(script, tmp_path, *options)
    use_policy.main([str(run_dir), "--onnx"])
    assert capsys.readouterr().out == f"policy: {run_dir}/policy.onnx\n"
    (obs,) = onnxruntime.InferenceSession(run_dir / "policy.onnx").get_inputs()
    entries = {ppo: [4], ppo_atari: [84, 84, 4], ml: [2]}
    assert obs.name == "obs" and obs.shape == ["batch", *entries[script]]

    found, args, model = use_policy.load(run_dir)
    assert found is script and args.eval == str(run_dir)
    saved = script.read_checkpoint(run_dir)["model"]
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    if script is ppo_atari:
        with pytest.raises(SystemExit):
            use_policy.main([str(run_dir), "--compare", "test_use:highest"])
        assert "--compare: it is not for ppo_atari.py" in capsys.readouterr().err


# Films --------------------------------------------------------------------------------------------


class Drawn(envs.Levels):
    """The line, whose first entry is a grey value; in evaluations it starts further up."""

    def __init__(self, level, evaluation=False, render_mode=None):
        super().__init__(level)
        self.evaluation = evaluation
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state += self.evaluation
        return self.psi(), {}

    def close(self):
        del self.state  # there is none before the first episode

    def render(self):
        return np.full((64, 64, 3), np.clip(128 + 50 * self.state[0], 0, 255), np.uint8)


def test_film_of_levels(tmp_path, capsys):
    """The film has a picture of each step of the first episode of an evaluation."""
    run_dir = save_run(ml, tmp_path, "--env", "test_use:Drawn")
    use_policy.main([str(run_dir), "--film"])
    assert capsys.readouterr().out == f"film: {run_dir}/video/rl-video-episode-0.mp4\n"
    film = cv2.VideoCapture(str(run_dir / "video" / "rl-video-episode-0.mp4"))
    pictures = []
    readable, picture = film.read()
    while readable:
        pictures.append(picture.mean())
        readable, picture = film.read()
    film.release()

    env = Drawn(2, evaluation=True)
    _, args, model = use_policy.load(run_dir)
    policy = ml.Policy(model)
    obs, _ = env.reset(seed=ml.EVAL_SEED)
    expected = [env.render().mean()]
    for _ in range(10):
        obs, *_ = env.step(ml.to_env(policy.act(obs[None])[0], env.action_space))
        expected.append(env.render().mean())
    np.testing.assert_allclose(pictures, expected, atol=5)  # a film is compressed


def test_film_of_a_simulation_without_pictures(tmp_path):
    """Gymnasium's message says that render_mode is missing."""
    run_dir = save_run(ml, tmp_path, "--env", "envs:make")
    with pytest.raises(ValueError, match="Render mode is None"):
        use_policy.main([str(run_dir), "--film"])


class Elsewhere(gym.Wrapper):
    """An env that works in another folder."""

    def __init__(self, env, folder):
        super().__init__(env)
        os.chdir(folder)


def test_env_that_changes_the_folder(tmp_path, monkeypatch, capsys):
    """The files of a run of ppo.py, its policy and its film are where they belong."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path)

    def make(render_mode=None):
        return Elsewhere(gym.make("CartPole-v1", render_mode=render_mode), tmp_path / "work")

    monkeypatch.delitem(gym.registry, "Elsewhere-v0", raising=False)
    gym.register("Elsewhere-v0", make)
    run = ppo.train(parse(ppo, "runs", "--env", "Elsewhere-v0", "--eval-every", "1"))
    for option in ("--onnx", "--film"):
        os.chdir(tmp_path)
        use_policy.main([f"runs/{run.run_dir.name}", option])
    assert run.run_dir == next((tmp_path / "runs").iterdir())
    names = {path.name for path in run.run_dir.rglob("*")}
    assert {"checkpoint.pt", "progress.csv", "policy.onnx", "rl-video-episode-0.mp4"} < names
    assert not list((tmp_path / "work").iterdir())


# Comparisons --------------------------------------------------------------------------------------


def highest(obs):
    """Take the last of the actions of envs_spaces:Action-five-v0, and spoil the observation."""
    obs[:] = np.nan
    return 8


def brake(obs):
    """Push towards 0."""
    return -np.clip(obs, -1, 1)


def too_strong(obs):
    """Return an action in other units than the env's."""
    return 50 * obs


def test_controller_plays_first(monkeypatch):
    """A mistake in it shows before the policy has played."""

    def mistaken(script, args, model, controller=None):
        assert controller == "mine"
        raise ValueError("no such unit")

    monkeypatch.setattr(use_policy, "play", mistaken)
    with pytest.raises(ValueError, match="no such unit"):
        use_policy.compare(ppo, None, None, "mine")


def test_numbers_of_a_comparison(monkeypatch, capsys):
    """Means, standard deviations, and the standard error of the paired differences."""
    returns = {None: np.array([1.0, 2.0, 4.0]), "mine": np.array([0.0, 2.0, 1.0])}
    monkeypatch.setattr(use_policy, "play", lambda *args: returns[args[3] if args[3:] else None])
    use_policy.compare(ppo, None, None, "mine")
    assert capsys.readouterr().out.splitlines() == [
        f"policy      {7 / 3:.4f} ± {math.sqrt(14 / 9):.4f} over 3 episodes",
        f"controller  1.0000 ± {math.sqrt(2 / 3):.4f}",
        f"difference  {4 / 3:.4f} ± {math.sqrt(7 / 3 / 3):.4f} (standard error)",
    ]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_comparison_of_levels(workers, tmp_path, capsys):
    """Both play the episodes of an evaluation, on the finest level, alone or in workers."""
    options = ["--env", "envs:make", "--num-workers", workers]
    run_dir = save_run(ml, tmp_path, *options)
    policy = ml.evaluate_run(ml.parse_args(["--eval", str(run_dir), "--eval-episodes", "5"]))
    capsys.readouterr()
    controller = []
    for seed in range(ml.EVAL_SEED, ml.EVAL_SEED + 5):
        env = envs.make(2, evaluation=True)
        obs, _ = env.reset(seed=seed)
        rewards = []
        for _ in range(10):
            obs, reward, *_ = env.step(brake(obs))
            rewards.append(reward)
        controller.append(sum(rewards))

    use_policy.main([str(run_dir), "--compare", "test_use:brake", "--episodes", "5"])
    gains = policy - controller
    assert capsys.readouterr().out.splitlines() == [
        f"policy      {policy.mean():.4f} ± {policy.std():.4f} over 5 episodes",
        f"controller  {np.mean(controller):.4f} ± {np.std(controller):.4f}",
        f"difference  {gains.mean():.4f} ± {gains.std(ddof=1) / 5**0.5:.4f} (standard error)",
    ]


@pytest.mark.parametrize("options", ["", "--rnn gru --rnn-size 8"])
def test_comparison_of_discrete_actions(options, tmp_path, capsys):
    """A controller returns the env's own actions, here 5 to 8, of which three are taken."""
    env = "envs_spaces:Action-five-v0"
    run_dir = save_run(ppo, tmp_path, "--env", env, *options.split())
    policy = ppo.evaluate_run(ppo.parse_args(["--eval", str(run_dir)]))
    capsys.readouterr()
    use_policy.main([str(run_dir), "--compare", "test_use:highest"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"policy      {policy.mean():.4f} ± {policy.std():.4f} over 4 episodes"
    assert lines[1] == "controller  24.0000 ± 0.0000"
    assert lines[2].startswith(f"difference  {policy.mean() - 24:.4f} ± ")


def test_controller_in_other_units(tmp_path):
    """An action outside the space is an error: clipped, it would be another controller."""
    run_dir = save_run(ml, tmp_path, "--env", "envs:make")
    with pytest.raises(ml.GameError, match="the controller's action .* is not in Box"):
        use_policy.main([str(run_dir), "--compare", "test_use:too_strong"])


# The reference ------------------------------------------------------------------------------------


REFERENCE = (ROOT / "tests" / "benchmarks" / "reference.md").read_text()
REFERENCE_LINE = " ".join(REFERENCE.split())


def code_of_reference(part):
    """Return the Python code in the reference that has this part."""
    blocks = re.findall(r"```python\n(.*?)```", REFERENCE, re.DOTALL)
    (code,) = [block for block in blocks if part in block]
    return code


ROD = ROOT / "tests" / "examples" / "rod.py"
PLAYED = ["CartPole-v1", "Taxi-v4", "CartPole-v1 --rnn gru"]  # plain, with masks, with memory


@pytest.mark.parametrize("env", PLAYED)
def test_code_of_reference_loads_a_policy(tmp_path, monkeypatch, env):
    """The lines, with what is said of masks and memory, play the first episode of --eval."""
    run_dir = save_run(ppo, tmp_path, "--env", *env.split())
    expected = ppo.evaluate_run(ppo.parse_args(["--eval", str(run_dir), "--eval-episodes", "1"]))
    code = code_of_reference("read_checkpoint")
    assert code.count("\n") <= 15 and "runs/my-run" in code
    sentences = r"With `--rnn` set `(.*?)` at .*? call `(.*?)`. With masks call `(.*?)`"
    start, memory, masked = re.search(sentences, REFERENCE_LINE).groups()
    if "rnn" in env:
        code = code.replace("policy.act(obs)", memory).replace("while", f"{start}\nwhile")
    if "Taxi" in env:
        code = code.replace("policy.act(obs)", masked)

    make_env = ppo.make_env
    recorded = gym.wrappers.RecordEpisodeStatistics
    monkeypatch.setattr(ppo, "make_env", lambda args: recorded(make_env(args)))
    names = {}
    exec(code.replace("runs/my-run", str(run_dir)), names)
    assert list(names["env"].return_queue) == expected.tolist()


def test_code_of_reference_loads_a_policy_of_levels(tmp_path):
    """So do they for ppo_multilevel.py with what their comments say."""
    run_dir = save_run(ml, tmp_path, "--env", "envs:make")
    expected = ml.evaluate_run(ml.parse_args(["--eval", str(run_dir), "--eval-episodes", "1"]))
    code = code_of_reference("read_checkpoint").replace("runs/my-run", str(run_dir))
    code = re.sub(r"import ppo  # or: (.*)", r"\1", code)
    code = re.sub(r"ppo\.make_env\(.*?\)(.*)# levels: (.*)", r"\2\1", code)
    code = re.sub(r"actions, state = .*levels: (.*)", r"\1", code)
    names = {"rewards": []}
    exec(code + "    rewards.append(reward)", names)
    assert sum(names["rewards"]) == pytest.approx(expected[0], rel=1e-5)


def test_code_of_reference_plots_runs(tmp_path, monkeypatch):
    """The lines plot a column of the runs in a folder."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    words = "--num-steps 64 --num-iterations 3 --quiet --log-dir runs/cheetah --num-workers 0"
    history = ppo.train(ppo.parse_args(words.split())).history
    names = {}
    exec(code_of_reference("savefig"), names)
    (line,) = names["plt"].gca().lines
    returns = [row.get("episodic_return", np.nan) for row in history]
    np.testing.assert_allclose(line.get_ydata(), returns)
    assert list(line.get_xdata()) == [row["global_step"] for row in history]
    assert (tmp_path / "runs.png").stat().st_size > 1000
    names["plt"].close()


@pytest.mark.parametrize("coupling", ["step", "noise"])
def test_rod_trains(tmp_path, coupling):
    """The rod has the same spaces and the same physics on its levels, and trains on two of them."""
    names = {}
    exec(ROD.read_text(), names)
    coarse = names["Rod"](1)
    fine = names["Rod"](2)
    fine.reset(seed=3)
    coarse.reset(seed=4)
    for _ in range(10):
        coarse.map_from(fine)
        np.testing.assert_allclose(coarse.psi(), fine.psi(), rtol=1e-6)
        rewards = [env.step(np.float32([0.5, -0.5, 0, 1]))[1] for env in (coarse, fine)]
        assert rewards[0] == pytest.approx(rewards[1], rel=0.2)
    options = f"--env {ROD}:Rod --schedule together --coupling {coupling} --num-steps 8 4"
    run = ml.train(parse(ml, tmp_path, *options.split()))
    assert (run.run_dir / "checkpoint.pt").exists()


def test_rod_needs_no_more(tmp_path):
    """One level at a time needs neither psi nor map_from; σ is 1 at first."""
    code = ROD.read_text().partition("    def map_from")[0].replace("psi", "observe")
    path = tmp_path / "bare.py"
    path.write_text(code)
    run = ml.train(parse(ml, tmp_path, "--env", f"{path}:Rod"))
    config = json.loads((run.run_dir / "config.json").read_text())
    assert config["schedule"] == "adaptive" and config["init_log_std"] == 0
    assert ml.parse_args(["--levels", "1"]).init_log_std == -2.9


SB3 = dict(learning_rate=3e-4, num_steps=2048, update_epochs=10, gamma=0.99, gae_lambda=0.95)
SB3 |= dict(clip_coef=0.2, ent_coef=0.0, vf_coef=2 * 0.5, max_grad_norm=0.5, target_kl=0)
SB3 |= dict(norm_adv="minibatch", clip_vloss=False, anneal_lr=False, hidden=[64, 64])
SB3 |= dict(activation="tanh", shared_net=False, init_log_std=0.0)


def test_options_are_the_defaults_of_sb3(tmp_path):
    """Those of `PPO("MlpPolicy", env)` of Stable-Baselines3 2.9.2, whose batch_size is 64."""
    text = REFERENCE_LINE
    options = re.search(r"with N envs, `(.*?)` \(VecNormalize: `(.*?)`", text)
    words = " ".join(options.groups()).replace("(32 N)", "96").replace(" N ", " 3 ").split()
    args = ppo.parse_args([*words, "--log-dir", str(tmp_path)])
    assert {name: getattr(args, name) for name in SB3} == SB3
    assert args.num_envs * args.num_steps / args.num_minibatches == 64
    assert args.norm_obs and args.norm_reward
