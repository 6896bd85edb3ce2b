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
from typing import NamedTuple

import pairs
import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "speed_ppo.csv"


class Case(NamedTuple):
    """What is trained, with which numbers."""

    env: str
    num_envs: int
    num_steps: int
    num_minibatches: int
    update_epochs: int
    total_timesteps: int
    num_workers: int = 0  # of ours only
    in_numpy: bool = True  # of ours only: rollouts compute the policy's layers in NumPy
    vec_env: str = "DummyVecEnv"  # of Stable-Baselines3 only


CARTPOLE = Case("CartPole-v1", 4, 128, 4, 4, 100_000)
CHEETAH = Case("HalfCheetah-v5", 8, 2048, 32, 10, 98_304)
HUMANOID = Case("Humanoid-v5", 8, 512, 32, 4, 32_768)

CASES = {
    "CartPole-v1": CARTPOLE,
    "CartPole-v1, policy in torch": CARTPOLE._replace(in_numpy=False),
    "HalfCheetah-v5": CHEETAH,
    "HalfCheetah-v5, 1 worker": CHEETAH._replace(num_workers=1),
    "HalfCheetah-v5, 2 workers": CHEETAH._replace(num_workers=2),
    "HalfCheetah-v5, 2 workers, SubprocVecEnv": CHEETAH._replace(
        num_workers=2, vec_env="SubprocVecEnv"
    ),
    "Humanoid-v5": HUMANOID,
    "Humanoid-v5, 2 workers": HUMANOID._replace(num_workers=2),
}


def by_torch(module):
    """Return a module as a function of arrays, computed by torch."""

    def function(x):
        with torch.no_grad():
            return module(torch.from_numpy(x)).numpy()

    return function


def ours(*case):
    """Return the steps per second of ppo.py, and its versions."""
    sys.path.insert(0, str(ROOT))
    # Adam and SummaryWriter import these, but imports do not count.
    import torch._dynamo  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    import ppo

    case = Case(*case)
    if not case.in_numpy:
        ppo.as_function = by_torch
    options = f"--env {case.env} --num-envs {case.num_envs} --num-steps {case.num_steps} --quiet "
    options += f"--num-minibatches {case.num_minibatches} --update-epochs {case.update_epochs} "
    options += f"--total-timesteps {case.total_timesteps} --num-workers {case.num_workers}"
    with tempfile.TemporaryDirectory() as folder:
        args = ppo.parse_args([*options.split(), "--log-dir", folder])
        started = time.perf_counter()
        run = ppo.train(args)
        seconds = time.perf_counter() - started
    versions = json.loads(pairs.origin()["versions"])
    return run.history[-1]["global_step"] / seconds, versions


def sb3(*case):
    """Return the steps per second of Stable-Baselines3 with the same numbers, and its version."""
    import stable_baselines3
    from stable_baselines3.common import vec_env as vec_envs
    from stable_baselines3.common.env_util import make_vec_env

    case = Case(*case)
    torch.set_num_threads(1)
    vec_env = getattr(vec_envs, case.vec_env)
    model = stable_baselines3.PPO(
        "MlpPolicy",
        make_vec_env(case.env, case.num_envs, seed=1, vec_env_cls=vec_env),
        n_steps=case.num_steps,
        batch_size=case.num_envs * case.num_steps // case.num_minibatches,
        n_epochs=case.update_epochs,
        learning_rate=2.5e-4,
        clip_range_vf=0.2,
        ent_coef=0.01,
        device="cpu",
        seed=1,
    )
    started = time.perf_counter()
    model.learn(case.total_timesteps)
    seconds = time.perf_counter() - started
    return model.num_timesteps / seconds, {"stable_baselines3": stable_baselines3.__version__}


if __name__ == "__main__":
    functions = {"ours": ours, "sb3": sb3}
    pairs.main(__file__, __doc__, CASES, functions, RESULTS, {"OMP_NUM_THREADS": "1"})
