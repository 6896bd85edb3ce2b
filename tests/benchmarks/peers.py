"""The update of ppo.py beside those of Stable-Baselines3 and skrl, recorded in results/peers.csv.

    pip install stable-baselines3 skrl "gymnasium[mujoco]"
    python tests/benchmarks/peers.py

Stable-Baselines3 collects a rollout. From its weights, rewards, values and ends each computes the
advantages, then takes ten Adam steps on all rows at once, without clipping of values, which all
three do in other ways. A row has the largest difference of our advantages from the peer's, over
their deviation, and of the weights after the update, over the largest way that one of them went.
"""

import argparse
import csv
import sys
import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import pairs
import stable_baselines3
import torch
from skrl.agents.torch import ppo as skrl_ppo
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, GaussianMixin, Model
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from torch import nn

RESULTS = Path(__file__).parent / "results" / "peers.csv"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo  # noqa: E402

N, T, K, LR = 8, 256, 10, 3e-4  # games, steps, epochs, step size
ENVS = {"CartPole-v1": 0.01, "Pendulum-v1": 0.01, "HalfCheetah-v5": 0.0}  # with c_e


class Rollout(BaseCallback):
    """Keeps a rollout (T, N, ...) of Stable-Baselines3, and the weights that it was made with."""

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        names = "observations actions rewards values log_probs advantages".split()
        buffer, last = self.model.rollout_buffer, self.locals
        self.rows = {name: torch.tensor(getattr(buffer, name)).float() for name in names}
        ended = np.concatenate([buffer.episode_starts[1:], last["dones"][np.newaxis]])
        self.rows["ended"] = torch.tensor(ended).bool()  # γ V of a truncation is in the reward
        self.rows["last_obs"] = torch.tensor(self.model._last_obs).float()
        self.rows["next_values"] = torch.cat([self.rows["values"][1:], last["values"].view(1, N)])
        self.weights = weights_of(self.model.policy)


def weights_of(policy):
    """Return a copy of the weights of a policy of Stable-Baselines3, under our names."""
    names = {"mlp_extractor.policy_net": "actor", "mlp_extractor.value_net": "critic"}
    names |= {"action_net": "head.output", "value_net": "value", "log_std": "head.log_std"}
    weights = {}
    for name, weight in policy.state_dict().items():
        for theirs, our in names.items():
            name = name.replace(theirs, our)
        weights[name] = weight.clone()
    return weights


def sb3(env, ent_coef):
    """Return a rollout of Stable-Baselines3, and its weights before and after the update."""
    options = {"n_steps": T, "batch_size": N * T, "n_epochs": K, "learning_rate": LR}
    options |= {"ent_coef": ent_coef, "vf_coef": 0.5, "seed": 1, "device": "cpu"}
    model = stable_baselines3.PPO("MlpPolicy", make_vec_env(env, N, seed=1), **options)
    rollout = Rollout()
    model.learn(N * T, callback=rollout)
    return rollout.rows, rollout.weights, weights_of(model.policy)


def ours(env, ent_coef, rows, weights):
    """Return the advantages (T, N) of ppo.py, and its weights after the update."""
    options = f"--env {env} --num-envs {N} --num-steps {T} --num-minibatches 1 --vf-coef 1 "
    options += f"--update-epochs {K} --no-clip-vloss --ent-coef {ent_coef}"
    with tempfile.TemporaryDirectory() as folder:
        args = ppo.parse_args([*options.split(), "--log-dir", folder])
    model = ppo.make_model(args)
    model.load_state_dict(weights)
    optimizer = ppo.make_optimizer(model, args)
    for group in optimizer.param_groups:
        group["lr"] = LR
    buffer = {
        "obs": rows["observations"],
        "logprobs": rows["log_probs"],
        "rewards": rows["rewards"],
    }
    buffer |= {"values": rows["values"], "next_values": rows["next_values"]}
    buffer |= {"terminated": rows["ended"], "truncated": torch.zeros_like(rows["ended"])}
    discrete = isinstance(model.head, ppo.Categorical)
    buffer["actions"] = rows["actions"][..., 0].long() if discrete else rows["actions"]
    batch = ppo.make_batch(buffer, model, args)
    ppo.update(model, optimizer, batch, args, torch.Generator())
    return batch["advantages"].view(T, N), model.state_dict()


def skrl_model(mixin, layers, weights, spaces):
    """Return a model of skrl with our weights of these layers, tanh between them."""

    class Network(mixin, Model):
        def __init__(self):
            Model.__init__(self, **spaces)
            mixin.__init__(self)
            shapes = [weights[f"{name}.weight"].shape for name in layers]
            linear = [nn.Linear(width, out) for out, width in shapes]
            self.net = nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2])
            self.ours = dict(zip(layers, linear, strict=True))
            for name, layer in self.ours.items():
                layer.load_state_dict({k: weights[f"{name}.{k}"] for k in ("weight", "bias")})
            if mixin is GaussianMixin:
                self.log_std = nn.Parameter(weights["head.log_std"].clone())

        def compute(self, inputs, role):
            more = {"log_std": self.log_std} if mixin is GaussianMixin else {}
            return self.net(inputs["observations"]), more

    return Network()


def skrl(env, ent_coef, rows, weights):
    """Return the advantages (T, N) of skrl, and its weights after the update."""
    with gym.make(env) as made:
        spaces = {"observation_space": made.observation_space, "action_space": made.action_space}
    spaces["device"] = "cpu"
    mixin = GaussianMixin if "head.log_std" in weights else CategoricalMixin
    policy = skrl_model(mixin, ("actor.0", "actor.2", "head.output"), weights, spaces)
    value = skrl_model(DeterministicMixin, ("critic.0", "critic.2", "value"), weights, spaces)
    cfg = {"rollouts": T, "learning_epochs": K, "mini_batches": 1, "learning_rate": LR}
    cfg |= {"entropy_loss_scale": ent_coef, "value_loss_scale": 0.5, "value_clip": 0.0}
    cfg |= {"grad_norm_clip": 0.5, "ratio_clip": 0.2}
    memory = RandomMemory(memory_size=T, num_envs=N, device="cpu")
    models = {"policy": policy, "value": value}
    agent = skrl_ppo.PPO(models=models, memory=memory, **spaces, cfg=cfg)
    agent.init()
    for group in agent.optimizer.param_groups:
        group["eps"] = 1e-5  # as in both others
    columns = {"observations": rows["observations"], "actions": rows["actions"]}
    columns |= {"rewards": rows["rewards"], "terminated": rows["ended"], "values": rows["values"]}
    columns |= {"truncated": torch.zeros_like(rows["ended"]), "log_prob": rows["log_probs"]}
    for name, column in columns.items():
        memory.get_tensor_by_name(name).copy_(column.view(T, N, -1))
    memory.filled = True
    agent._current_next_observations, agent._current_next_states = rows["last_obs"], None
    agent.enable_models_training_mode(True)
    agent.update(timestep=0, timesteps=1)
    layers = policy.ours | value.ours
    after = {f"{name}.{k}": w for name, x in layers.items() for k, w in x.state_dict().items()}
    if mixin is GaussianMixin:
        after["head.log_std"] = policy.log_std.detach()
    return memory.get_tensor_by_name("advantages")[..., 0], after


def compare(env):
    """Return {peer: (largest difference of advantages, of weights)}, relative as said above."""
    rows, weights, after_sb3 = sb3(env, ENVS[env])
    advantages, after = ours(env, ENVS[env], rows, weights)
    way = max(float((after[name] - weights[name]).abs().max()) for name in weights)
    theirs = {"Stable-Baselines3": (rows["advantages"], after_sb3)}
    theirs["skrl"] = skrl(env, ENVS[env], rows, weights)
    differences = {}
    for peer, (their, then) in theirs.items():
        our = ppo.normalised(advantages) if peer == "skrl" else advantages
        error = float((our - their).abs().max() / our.std())
        far = max(float((after[name] - then[name]).abs().max()) for name in weights)
        differences[peer] = error, far / way
    return differences


def main():
    """Compare, write the file."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    torch.set_num_threads(1)
    origin = pairs.origin("stable_baselines3", "skrl")
    table = [["env", "peer", "advantages", "weights", *origin]]
    for env in ENVS:
        for peer, (advantages, weights) in compare(env).items():
            row = [env, peer, f"{advantages:.1e}", f"{weights:.1e}"]
            table.append([*row, *origin.values()])
            print(*row, flush=True)
    with RESULTS.open("w", newline="") as file:
        csv.writer(file).writerows(table)


if __name__ == "__main__":
    main()
