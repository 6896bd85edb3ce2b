"""Steps per second of ppo.py and of Stable-Baselines3's PPO, recorded in results/speed_ppo.csv.

    pip install stable-baselines3 "gymnasium[mujoco]"
    python tests/benchmarks/speed_ppo.py

Both get the same numbers and one thread; they run in turn, each run in a process of its own. A row
has the median of both in steps per second over the whole training (env, policy, update, logging;
neither start nor imports), and the median, lowest and highest ratio of a pair of runs.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import pairs

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "speed_ppo.csv"

# env, num_envs, num_steps, num_minibatches, update_epochs, total_timesteps; of ours only: number of
# workers, whether rollouts run the policy in NumPy
CASES = {
    "CartPole-v1": ("CartPole-v1", 4, 128, 4, 4, 100_000, 0, True),
    "CartPole-v1, policy in torch": ("CartPole-v1", 4, 128, 4, 4, 100_000, 0, False),
    "HalfCheetah-v5": ("HalfCheetah-v5", 8, 2048, 32, 10, 98_304, 0, True),
    "HalfCheetah-v5, 1 worker": ("HalfCheetah-v5", 8, 2048, 32, 10, 98_304, 1, True),
    "HalfCheetah-v5, 2 workers": ("HalfCheetah-v5", 8, 2048, 32, 10, 98_304, 2, True),
    "Humanoid-v5": ("Humanoid-v5", 8, 512, 32, 4, 32_768, 0, True),
    "Humanoid-v5, 2 workers": ("Humanoid-v5", 8, 512, 32, 4, 32_768, 2, True),
}


def ours(env, num_envs, num_steps, num_minibatches, update_epochs, total_timesteps, workers, fast):
    """Return the steps per second of ppo.py, and its versions."""
    sys.path.insert(0, str(ROOT))
    import torch._dynamo  # noqa: F401, Adam and SummaryWriter import them: imports do not count
    import torch.utils.tensorboard  # noqa: F401

    import ppo

    if not fast:
        ppo.fast_act = lambda model: model.act
    options = f"--env {env} --num-envs {num_envs} --num-steps {num_steps} --quiet "
    options += f"--num-minibatches {num_minibatches} --update-epochs {update_epochs} "
    options += f"--total-timesteps {total_timesteps} --num-workers {workers}"
    with tempfile.TemporaryDirectory() as folder:
        args = ppo.parse_args([*options.split(), "--log-dir", folder])
        started = time.perf_counter()
        run = ppo.train(args)
        seconds = time.perf_counter() - started
        versions = json.loads((run.run_dir / "config.json").read_text())["versions"]
    return run.history[-1]["global_step"] / seconds, versions


def sb3(env, num_envs, num_steps, num_minibatches, update_epochs, total_timesteps, *_):
    """Return the steps per second of Stable-Baselines3 with the same numbers, and its version."""
    import stable_baselines3
    import torch
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    model = stable_baselines3.PPO(
        "MlpPolicy",
        make_vec_env(env, num_envs, seed=1),
        n_steps=num_steps,
        batch_size=num_envs * num_steps // num_minibatches,
        n_epochs=update_epochs,
        learning_rate=2.5e-4,
        clip_range_vf=0.2,
        ent_coef=0.01,
        device="cpu",
        seed=1,
    )
    started = time.perf_counter()
    model.learn(total_timesteps)
    seconds = time.perf_counter() - started
    return model.num_timesteps / seconds, {"stable_baselines3": stable_baselines3.__version__}


if __name__ == "__main__":
    functions = {"ours": ours, "sb3": sb3}
    pairs.main(__file__, __doc__, CASES, functions, RESULTS, {"OMP_NUM_THREADS": "1"})
