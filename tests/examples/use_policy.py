"""Use what a run of ppo.py, ppo_atari.py or ppo_multilevel.py has learned.

    python tests/examples/use_policy.py RUN_DIR --film
    python tests/examples/use_policy.py RUN_DIR --onnx
    python tests/examples/use_policy.py RUN_DIR --compare tests/examples/rod.py:thermostat

RUN_DIR is the run's folder. In all three the policy acts with its mode, as in --eval.

--film writes RUN_DIR/video/rl-video-episode-0.mp4. For ppo_multilevel.py the function that makes
the simulation must take `render_mode`, as Gymnasium's environments do.

--onnx writes policy.onnx, for programs without PyTorch. It needs the package onnx. The input `obs`
is what the env shows, flattened, as float64 with --norm-obs. Policies with masks have an input
`action_mask`, and those with a memory an input `state`, which is zeros at an episode's start. The
output `action` is what the env takes. With a memory `next_state` is the second output. The first
axis of each is the batch.

--compare plays the episodes of an evaluation twice, with the policy and with your own controller, a
function obs → action. It prints both mean returns, and the mean difference of the pairs of episodes
from the same seed. It is for ppo.py and ppo_multilevel.py.
"""

import argparse
import functools
import json
import os
import sys
import warnings
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder of the three scripts

import ppo  # noqa: E402
import ppo_atari  # noqa: E402
import ppo_multilevel as ml  # noqa: E402


def load(run_dir):
    """Return the script of a run, its options, and its model."""
    options = json.loads((Path(run_dir) / "config.json").read_text())
    script = ppo
    if "frameskip" in options:
        script = ppo_atari
    elif "levels" in options:
        script = ml
    args = script.parse_args(["--eval", str(run_dir)])
    script.seed_generators(args.seed)
    model = script.make_model(args).cpu()
    model.load_state_dict(script.read_checkpoint(run_dir)["model"])
    return script, args, model


# ------------------------------------------------------------------------------------ film
def film(script, args, model, folder):
    """Film the first episode of an evaluation."""
    args.eval_episodes = 1
    if script is not ml:
        # ppo.py and ppo_atari.py have RecordVideo around their env, as in --eval RUN_DIR --video.
        script.evaluate(model, args, video=folder)
        return

    with closing(ml.Player(args, model)) as player:
        (game,) = player.games["evaluation"]
        ml.close_env(game.env, game.place())
        env = ml.make_env(args, args.levels[-1], evaluation=True, render_mode="rgb_array")
        game.env = gym.wrappers.RecordVideo(env, folder, episode_trigger=lambda k: k == 0)
        player.play_episodes(["evaluation"], [ml.EVAL_SEED])


# ------------------------------------------------------------------------------------ ONNX
class ExportedPolicy(nn.Module):
    """The policy's mode as a function of tensors: raw observations in, the env's actions out."""

    def __init__(self, model, inputs):
        super().__init__()
        self.model = model
        self.inputs = inputs  # the names of what `forward` takes

    def forward(self, *tensors):
        """Return the action (M, ...), and with a memory its next state (M, S)."""
        model = self.model
        inputs = dict(zip(self.inputs, tensors, strict=True))
        if "state" not in inputs:
            pi, *_ = model(**inputs)
            return self.action(pi)

        x = model.obs_norm(inputs["obs"])
        memories, state = model.memory(x[None], None, inputs["state"])  # one step: (1, M, U)
        pi = model.head(model.actor(memories[0]), inputs.get("action_mask"))
        return self.action(pi), state

    def action(self, pi):
        """Return the mode of distributions pi (M, ·), as the env takes it."""
        space = self.model.action_space
        if isinstance(space, gym.spaces.Box):
            # Clip in the Box's precision, as in rollouts.
            low = torch.as_tensor(space.low)
            high = torch.as_tensor(space.high)
            return pi.reshape(-1, *space.shape).to(low.dtype).clamp(low, high)
        choices = [part.argmax(-1) for part in pi.split(ppo.num_choices(space), dim=-1)]
        action = torch.stack(choices, dim=-1).reshape(-1, *space.shape)
        start = np.asarray(getattr(space, "start", 0), np.int64)
        return action + torch.from_numpy(start)


def export_onnx(script, args, model, path):
    """Write the policy's mode as ONNX. Layers compute in float32."""
    if script is ppo_atari:
        model.precision = "fp32"
        inputs = {"obs": torch.zeros(1, 84, 84, 4, dtype=torch.uint8)}
    else:
        obs_type = torch.float64 if args.norm_obs else torch.float32
        inputs = {"obs": torch.zeros(1, model.obs_dim, dtype=obs_type)}
    if "action_mask" in model.inputs:
        inputs["action_mask"] = torch.ones(1, model.head.n, dtype=torch.bool)
    outputs = ["action"]
    if "state" in model.inputs:
        inputs["state"] = torch.zeros(1, model.memory.size)
        outputs.append("next_state")

    with warnings.catch_warnings():
        # The exporter warns that it has a successor, which needs one more package.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            ExportedPolicy(model, list(inputs)),
            tuple(inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=outputs,
            dynamic_axes={name: {0: "batch"} for name in (*inputs, *outputs)},
            dynamo=False,
        )


# ------------------------------------------------------------------------------------ comparison
class Controller:
    """A function obs → action that acts in the place of a player's `Policy`."""

    def __init__(self, name, model):
        self.function = ml.load_make(name)
        self.space = model.action_space
        self.has_state = isinstance(model, ppo.Model)  # whether a policy returns a memory's state

    def act(self, obs, noise=None, **_):
        """Return actions (M, ...) for observations (M, D)."""
        actions = np.stack([self.action(row.copy()) for row in obs])
        return (actions, None) if self.has_state else actions

    def action(self, obs):
        """Return the function's action, counted from 0. Raises ValueError if the env has none."""
        action = np.asarray(self.function(obs), self.space.dtype).reshape(self.space.shape)
        if not self.space.contains(action):
            raise ValueError(f"the controller's action {action} is not in {self.space}")
        return action - getattr(self.space, "start", 0)


def make_player(player_class, args, controller, model, index, count):
    """Return a player for which the policy acts, or a controller if one is named."""
    player = player_class(args, model, index, count)
    if controller:
        player.policy = Controller(controller, model)
    return player


def play(script, args, model, controller=None):
    """Play the episodes of an evaluation in all workers. Returns their returns, (E,)."""
    args.num_envs = args.eval_episodes
    maker = functools.partial(make_player, script.Player, args, controller)
    seeds = script.EVAL_SEED + np.arange(args.eval_episodes)
    with closing(script.WorkerPool(args, model, maker)) as pool:
        if script is not ml:
            return np.concatenate(pool.call("play_episodes", seeds))
        answers = pool.call("play_episodes", ["evaluation"], seeds)
    return np.concatenate([returns[0] for returns, *_ in answers])


def compare(script, args, model, controller):
    """Print how the policy and a controller, file.py:function, do in the same episodes."""
    # The controller comes first: a mistake in it shows at once.
    others = play(script, args, model, controller)
    returns = play(script, args, model)
    gains = returns - others
    error = gains.std(ddof=1) / len(gains) ** 0.5
    print(f"policy      {returns.mean():.4f} ± {returns.std():.4f} over {len(gains)} episodes")
    print(f"controller  {others.mean():.4f} ± {others.std():.4f}")
    print(f"difference  {gains.mean():.4f} ± {error:.4f} (standard error)")


def main(argv=None):
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir", type=os.path.abspath, help="the run's folder")
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--film", action="store_true", help="film an episode")
    add("--onnx", action="store_true", help="write the policy as ONNX")
    add("--compare", type=ml.env_name, help="file.py:function or module:function, obs → action")
    parser.add_argument("--episodes", type=int, help="of --compare; None: as in evaluations")
    words = parser.parse_args(argv)
    sys.path.append(".")  # where a module may lie
    if not (Path(words.run_dir) / "config.json").exists():
        parser.error(f"{words.run_dir} is no folder of a run: it has no config.json")

    script, args, model = load(words.run_dir)
    if words.film:
        film(script, args, model, f"{words.run_dir}/video")
        print(f"film: {words.run_dir}/video/rl-video-episode-0.mp4")
    elif words.onnx:
        export_onnx(script, args, model, f"{words.run_dir}/policy.onnx")
        print(f"policy: {words.run_dir}/policy.onnx")
    else:
        if script is ppo_atari:
            parser.error("argument --compare: it is not for ppo_atari.py")
        args.eval_episodes = words.episodes or args.eval_episodes
        compare(script, args, model, words.compare)


if __name__ == "__main__":
    main()
