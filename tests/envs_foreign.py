"""Environments as other people write them: ids `envs_foreign:<id>-v0`, or classes for levels."""

import concurrent.futures
import decimal
import multiprocessing
import random

import gymnasium as gym
import numpy as np
import torch


class Small(gym.Env):
    """Episodes of five steps: `see` gives the observation, `pay` the reward of an action."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    old_reset = False
    old_step = False

    def __init__(self, level=1):
        pass

    def see(self):
        return self.np_random.normal(size=3).astype(np.float32)

    def pay(self, action):
        return -float(np.square(action).sum())

    def info(self):
        return {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        obs = self.see()
        return obs if self.old_reset else (obs, self.info())

    def step(self, action):
        self.t += 1
        reward = self.pay(action)
        if self.old_step:
            return self.see(), reward, self.t == 5, {}
        return self.see(), reward, False, self.t == 5, self.info()


class Gradient(Small):
    """The reward is found with torch's autograd, as in a differentiable simulator."""

    def pay(self, action):
        x = torch.tensor(action, requires_grad=True)
        (gradient,) = torch.autograd.grad(x.square().sum(), x)
        return -float(gradient.abs().sum())


class Double(Small):
    """Its library sets torch's default type, as some solvers do at import."""

    def __init__(self, level=1):
        torch.set_default_dtype(torch.float64)


class Surrogate(Small):
    """A network predicts what it shows. Its module has switched gradients off for good."""

    def __init__(self, level=1):
        torch.set_grad_enabled(False)
        self.net = torch.nn.Linear(3, 3)

    def see(self):
        return self.net(torch.ones(3)).numpy()


class Lottery(Small):
    """Rewards from all generators that all code of a process shares."""

    def pay(self, action):
        return random.random() + np.random.rand() + float(torch.rand(()))


class Bit(Small):
    """One number far from 1 tells which of two actions pays."""

    VALUES = {
        "nano": (-1e-9, 1e-9),
        "epoch": (1.7e9, 1.7e9 + 60),  # seconds since 1970
        "utm": (4.5e6, 4.5e6 + 0.2),  # metres on a map
    }
    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, scale="epoch", level=1):
        self.values = self.VALUES[scale]

    def see(self):
        self.bit = int(self.np_random.integers(2))
        return np.array([self.values[self.bit], self.values[1]])  # the second is constant

    def step(self, action):
        reward = float(action == self.bit)
        self.t += 1
        return self.see(), reward, False, self.t == 20, {}


class Int32(Small):
    """A seed of a C library is an int32."""

    def reset(self, *, seed=None, options=None):
        assert seed is None or seed < 2**31
        return super().reset(seed=seed)


class Reward(Small):
    """A reward that is no number."""

    def __init__(self, reward):
        self.reward = reward

    def pay(self, action):
        return self.reward


class Text(Small):
    """It shows text that looks like numbers, after a while."""

    def see(self):
        return ["1.5", "2", "3"] if self.t == 2 else np.zeros(3)


class Objects(Small):
    """It shows an array of objects."""

    def see(self):
        return np.array([None, 1.0, 2.0], object)


class Tensor(Small):
    """It shows a tensor that belongs to a graph of autograd."""

    def see(self):
        return torch.ones(3, requires_grad=True)


class Integers(Small):
    """It shows numbers of all kinds."""

    KINDS = [[True, False, True], [1, 2, 3], np.float16([1, 2, 3]), torch.ones(3)]

    def see(self):
        return self.KINDS[self.t % 4]


class Pump(Small):
    """It cannot be closed before its first episode, which makes what it closes."""

    def reset(self, **options):
        self.simulator = {"is_open": True}
        return super().reset(**options)

    def close(self):
        self.simulator.clear()


class Parallel(Small):
    """It has a process of its own."""

    def reset(self, **options):
        process = multiprocessing.get_context("fork").Process(target=int)
        process.start()
        process.join()
        return super().reset(**options)


class ParallelMake(Parallel):
    """It starts the process when it is made."""

    def __init__(self, level=1):
        Parallel.reset(self)

    def reset(self, **options):
        return Small.reset(self, **options)


class Gauges(Small):
    """Threads of its module read what it shows. They do not survive a fork."""

    EXECUTOR = concurrent.futures.ThreadPoolExecutor(1)

    def __init__(self, level=1):
        self.offset = self.EXECUTOR.submit(float, 0).result()

    def see(self):
        return np.array([*self.EXECUTOR.map(float, range(3))])


class OldReset(Small):
    """The API of Gym before 0.26."""

    old_reset = True


class OldStep(Small):
    """The same in `step`."""

    old_step = True


class OldPlane(OldReset):
    """Its observations are no vectors, so a wrapper flattens them, and unpacks what it gets."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3, 2), np.float32)

    def see(self):
        return np.zeros((3, 2), np.float32)


class Careless(Small):
    """Its own code unpacks three numbers as two."""

    def see(self):
        x, y = super().see()
        return np.float32([x, y, 0])


class Shop(Small):
    """Three actions, of which the third pays 1. The mask comes in some form."""

    action_space = gym.spaces.Discrete(3)

    def __init__(self, mask=None, after=(0, 1, 2, 3, 4, 5), attribute=None):
        self.mask = mask
        self.after = after  # the steps after which info has the mask
        if attribute:
            setattr(self, attribute, np.array([1, 1, 0]))

    def pay(self, action):
        return float(action == 2)

    def info(self):
        has_mask = self.mask is not None and self.t in self.after
        return {"action_mask": self.mask} if has_mask else {}


class Changing(Shop):
    """Its mask [1, 1, 0] becomes [0, 1, 1] after the first step."""

    def info(self):
        return {"action_mask": [0, 1, 1] if self.t else [1, 1, 0]}


class Menu(Shop):
    """Its mask is in what it shows, and perhaps in info too."""

    observation_space = gym.spaces.Dict(
        {"state": Small.observation_space, "action_mask": gym.spaces.MultiBinary(3)}
    )

    def see(self):
        return {"state": super().see(), "action_mask": np.int8([1, 1, 0])}


class Valve(Small):
    """A Box of float64 whose bounds float32 does not have."""

    action_space = gym.spaces.Box(-0.1, 0.3, (1,), np.float64)

    def pay(self, action):
        assert self.action_space.contains(action)
        return -float(action[0])


INFINITE = float("inf")
ENVS = {
    "Gradient": (Gradient, {}),
    "Double": (Double, {}),
    "Lottery": (Lottery, {}),
    "Bit-nano": (Bit, {"scale": "nano"}),
    "Bit-epoch": (Bit, {"scale": "epoch"}),
    "Bit-utm": (Bit, {"scale": "utm"}),
    "Int32": (Int32, {}),
    "Reward-none": (Reward, {"reward": None}),
    "Reward-list": (Reward, {"reward": [1.0]}),
    "Reward-tuple": (Reward, {"reward": (1.0,)}),
    "Reward-decimal": (Reward, {"reward": decimal.Decimal(1)}),
    "OldReset": (OldReset, {}),
    "OldStep": (OldStep, {}),
    "OldPlane": (OldPlane, {}),
    "Careless": (Careless, {}),
    "Shop-flags": (Shop, {"mask": [1, 1, 0]}),
    "Shop-additive": (Shop, {"mask": [0, 0, -INFINITE]}),
    "Shop-large": (Shop, {"mask": [0, 0, -1e9]}),
    "Shop-indices": (Shop, {"mask": [0, 1]}),
    "Shop-padded": (Shop, {"mask": [0, 1, 1]}),
    "Shop-changing": (Changing, {}),
    "Shop-bools": (Shop, {"mask": [False, True, True]}),
    "Shop-array": (Shop, {"mask": np.int8([0, 1, 1])}),
    "Shop-nan": (Shop, {"mask": [1, 1, float("nan")]}),
    "Shop-reset": (Shop, {"mask": [1, 1, 0], "after": [0]}),
    "Shop-late": (Shop, {"mask": [1, 1, 0], "after": [1, 2, 3, 4, 5]}),
    "Shop-no_method": (Shop, {"attribute": "action_masks"}),
    "Menu": (Menu, {}),
    "Menu-info": (Menu, {"mask": [1, 1, 0]}),
    "Valve": (Valve, {}),
    "Surrogate": (Surrogate, {}),
    "Text": (Text, {}),
    "Objects": (Objects, {}),
    "Tensor": (Tensor, {}),
    "Integers": (Integers, {}),
    "Pump": (Pump, {}),
    "Parallel": (Parallel, {}),
    "ParallelMake": (ParallelMake, {}),
    "Gauges": (Gauges, {}),
}
for name, (env, options) in ENVS.items():
    if f"{name}-v0" not in gym.registry:
        gym.register(f"{name}-v0", env, kwargs=options)
