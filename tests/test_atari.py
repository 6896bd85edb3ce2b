"""Tests of ppo_atari.py: its games bit for bit against Gymnasium's wrappers, its network by torch's
functions, rollouts by literal replays, updates by formulas, runs by what they leave behind."""

import contextlib
import copy
import csv
import functools
import io
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import cv2
import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ppo_atari
from ppo_atari import Game, Model

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = {"frameskip": 4, "sticky_actions": 0.0, "full_action_space": False}
OPTIONS |= {"episodic_life": True, "noop_max": 30, "fire": True}  # the defaults
SMALL = (
    "--num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 1 --eval-episodes 1 "
    "--num-workers 0 --precision fp32 --device cpu"
).split()


# Game ---------------------------------------------------------------------------------------------


class Tally(gym.Wrapper):
    """Counts what a game's env is told and gives: its actions, the score of each game.

    Every frame's reward gets a bonus.
    """

    def __init__(self, env, bonus=0):
        super().__init__(env)
        self.bonus, self.actions, self.score, self.scores = bonus, [], 0.0, []

    def reset(self, **options):
        self.scores.append(self.score)
        self.actions, self.score = [], 0.0
        return self.env.reset(**options)

    def step(self, action):
        obs, reward, *ends = self.env.step(action)
        self.actions.append(int(action))
        self.score += reward + self.bonus
        return obs, reward + self.bonus, *ends


class Lives(gym.Wrapper):
    """An episode ends with a life; the game is only reset when it is over."""

    def reset(self, seed=None, **_):
        if seed is None and not game_over(self):
            self.env.step(0)
        else:
            self.env.reset(seed=seed)
        if game_over(self):
            self.env.reset()
        return self.env._get_obs(), {}


class Fire(gym.Wrapper):
    """An episode starts with FIRE; should that be the end of the game, with the next game's."""

    def reset(self, **options):
        self.env.reset(**options)
        obs, *_ = self.env.step(self.env.unwrapped.get_action_meanings().index("FIRE"))
        return self.reset() if game_over(self) else (obs, {})


def game_over(env):
    """Return whether a game has ended, of itself or by truncation."""
    return env.unwrapped.ale.game_over(with_truncation=True)


def gymnasiums(
    game, frameskip=4, noop_max=30, episodic_life=True, fire=True, sticky_actions=0, **options
):
    """Return the env that Gymnasium's wrappers make, its pictures (4, 84, 84), and a Tally."""
    options |= {"frameskip": 1, "repeat_action_probability": sticky_actions}
    env = gym.make(f"ALE/{game}-v5", obs_type="grayscale", disable_env_checker=True, **options)
    env = tally = Tally(env)
    env = gym.wrappers.AtariPreprocessing(
        env, noop_max=noop_max, frame_skip=frameskip, terminal_on_life_loss=episodic_life
    )
    env = Lives(env) if episodic_life else env
    env = Fire(env) if fire else env
    return gym.wrappers.FrameStackObservation(env, 4), tally


def same(obs, expected):
    """Return whether pictures (84, 84, 4) are those of (4, 84, 84)."""
    return np.array_equal(obs.transpose(2, 0, 1), expected)


def limit_frames(patch, frames):
    """Have games end by truncation after so many frames."""
    make = functools.partial(gym.make, max_num_frames_per_episode=frames)
    patch.setattr(gym, "make", make)


Step = namedtuple("Step", ["obs", *ppo_atari.RESULTS])


class Single(Game):
    """A game that has arrays of its own; its step takes the action and returns what it wrote."""

    def __init__(self, name="Breakout", seed=0, **options):
        flags = ("terminated", "truncated", "ended", "finished")
        arrays = {name: np.zeros(1, "bool") for name in flags}
        arrays |= {name: np.zeros((1, 84, 84, 4), "uint8") for name in ("obs", "next_obs")}
        arrays |= {name: np.zeros(1, "int64") for name in ("actions", "episode_length")}
        arrays |= {name: np.zeros(1) for name in ("episode_return", "first_return")}
        arrays["rewards"] = np.zeros(1, "float32")
        super().__init__(SimpleNamespace(env=name, **(OPTIONS | options)), 0, seed, arrays)

    def step(self, action):
        self.arrays["actions"][0] = action
        super().step()
        return Step(*(self.arrays[name][0] for name in Step._fields))


def new_game(name="Breakout", seed=0, bonus=None, **options):
    """Return a game at its start; with a bonus its env is a Tally."""
    game = Single(name, seed, **options)
    game.env = game.env if bonus is None else Tally(game.env, bonus)
    game.start()
    return game


def random_steps(game, num_steps):
    """Step a game with random actions. Yields what the steps return."""
    for action in np.random.default_rng(0).integers(game.env.action_space.n, size=num_steps):
        yield game.step(action)


@pytest.mark.parametrize(
    "game, options, truncation",
    [
        ("Breakout", {}, None),
        ("Pong", {}, None),
        ("SpaceInvaders", {}, None),
        ("Breakout", {"episodic_life": False, "fire": False}, None),
        ("Breakout", {"sticky_actions": 0.25, "full_action_space": True, "noop_max": 0}, None),
        ("Breakout", {"frameskip": 3, "fire": False}, None),
        ("Breakout", {"frameskip": 1}, None),
        ("Breakout", {}, 401),
    ],
    ids=str,
)
def test_game_is_gymnasiums(monkeypatch, game, options, truncation):
    """Steps are those of Gymnasium's wrappers: pictures bit for bit, rewards, ends and returns.

    The return is the score of all lives, the length the number of steps, of a game so far.
    """
    if truncation:
        limit_frames(monkeypatch, truncation)
    own = new_game(game, 5, **options)
    peer, tally = gymnasiums(game, **options)
    assert same(own.obs, peer.reset(seed=5)[0])
    tally.scores.clear()
    ends, rewards, lengths = [], set(), [0]
    for action in np.random.default_rng(0).integers(own.env.action_space.n, size=2_000):
        step = own.step(action)
        expected, peer_reward, *peer_ends, _ = peer.step(action)
        assert same(step.next_obs, expected)
        assert step.rewards == np.sign(peer_reward)
        assert [step.terminated, step.truncated] == peer_ends
        if any(peer_ends):
            expected, _ = peer.reset()
        assert same(step.obs, expected)
        lengths[-1] += 1
        assert step.ended == bool(tally.scores) and step.episode_length == lengths[-1]
        assert step.episode_return == (tally.scores.pop() if step.ended else tally.score)
        lengths += [0] if step.ended else []
        ends.append(peer_ends)
        rewards.add(peer_reward)
        if len(lengths) > (1 if len(ends) > 600 else 2) and len(rewards) > 1:
            break
    assert len(lengths) > 1 and len(rewards) > 1
    assert any(truncated for _, truncated in ends) == bool(truncation)
    assert any(terminated for terminated, _ in ends)


def test_time_limit(monkeypatch):
    """98 frames are 24 steps and a half: the 25th truncates, its next_obs repeats a picture."""
    limit_frames(monkeypatch, 98)
    game = new_game(noop_max=0, fire=False)
    for t in range(1, 51):
        before = game.obs.copy()
        step = game.step(2 + t % 2)
        assert not step.terminated and step.truncated == step.ended == (t % 25 == 0)
        np.testing.assert_array_equal(step.next_obs[..., :3], before[..., 1:])
        assert np.array_equal(step.next_obs[..., 3], before[..., 3]) == step.truncated
        if step.truncated:
            assert (step.episode_return, step.episode_length) == (0.0, 25)
            assert game.ale.getEpisodeFrameNumber() == 0
            assert (step.obs == step.obs[..., :1]).all() and (step.obs != step.next_obs).any()


def test_life_lost_at_the_time_limit(monkeypatch):
    """Both kinds of end at once count as terminated, and the next game is a new one."""
    ends = [step.terminated for step in random_steps(new_game(noop_max=0), 100)]
    length = 1 + ends.index(True)
    frames = 4 + 4 * length  # with FIRE; one of the last four loses the life
    for limit in range(frames - 3, frames + 1):
        with monkeypatch.context() as patch:
            limit_frames(patch, limit)
            game = new_game(noop_max=0)
        *_, step = random_steps(game, length)
        assert step.terminated != step.truncated  # an end of the game
        assert step.ended and step.episode_length == length
        assert game.ale.getEpisodeFrameNumber() == 4 and game.ale.lives() == 5  # a new one
        if step.terminated:  # at the first frame that is not too early
            return
    raise AssertionError("no limit is the frame at which the life is lost")


def test_lives():
    """Breakout has 5 lives: 5 episodes of one game, whose frame number goes on; then a new game."""
    game, frames, ends = new_game(), [], []
    frames.append(game.ale.getEpisodeFrameNumber())
    for step in random_steps(game, 1_000):
        frames.append(game.ale.getEpisodeFrameNumber())
        if step.terminated:
            ends.append(step.ended)
            assert game.ale.lives() == (5 if step.ended else 5 - len(ends))
        if step.ended:
            break
        # The step's frames, and of the next life's start those without action and with FIRE.
        taken = frames[-1] - frames[-2]
        assert 8 < taken <= 12 if step.terminated else taken == 4
    assert ends == [False, False, False, False, True]
    assert step.episode_length == len(frames) - 1
    assert frames[-1] <= 30 + 4 < frames[-2]


def test_life_won():
    """One life more, as some games give, ends nothing; the next one that is lost does."""
    game = new_game(noop_max=0)
    game.lives = 4  # before the fifth is there
    ends = [step.terminated for step in random_steps(game, 30)]
    assert not any(ends[:20]) and any(ends)


def test_whole_games():
    """--no-episodic-life: an episode is a game, the loss of a life is no end."""
    game = new_game(episodic_life=False)
    steps = list(random_steps(game, 600))
    assert [step.ended for step in steps] == [step.terminated for step in steps]
    assert sum(step.ended for step in steps) > 1


@pytest.mark.parametrize("bonus", [-7, 0.5])
def test_return_has_every_score(bonus):
    """A return sums all rewards of a game, also those that no step gets; rewards are signs.

    No step gets what comes in the frames without action and with FIRE that start a life.
    """
    game, of_steps = new_game(bonus=bonus), 0.0
    before = game.env.score
    for step in random_steps(game, 1_000):
        assert step.rewards == np.sign(bonus)
        if step.ended:
            break
        of_steps += 4 * bonus
    total = step.episode_return
    assert total == game.env.scores[-1]
    assert abs(before) > 4 * abs(bonus) and abs(total) > abs(of_steps) + abs(before)


@pytest.mark.parametrize(
    "name, options, expected",
    [
        ("Breakout", {}, [1] * 4),
        ("Breakout", {"frameskip": 3}, [1] * 3),
        ("Breakout", {"fire": False}, []),
        ("MsPacman", {}, []),  # has no FIRE
        ("MsPacman", {"full_action_space": True}, [1] * 4),
    ],
    ids=str,
)
def test_fire(name, options, expected):
    """An episode starts with FIRE where the game has it; before, a new life has a step without."""
    game = new_game(name, bonus=0, noop_max=0, **options)
    assert game.env.actions == expected
    meanings = game.env.unwrapped.get_action_meanings()
    assert all(meanings[action] == "FIRE" for action in expected)
    assert game.ale.getEpisodeFrameNumber() == len(expected)
    for action in itertools.cycle([1, 0, 0, 0, 0, 0, 0, 0]):  # FIRE, in MsPacman UP
        game.env.actions.clear()
        if game.step(action).terminated:
            break
    skip = options.get("frameskip", 4)
    start = game.env.actions[-skip - len(expected) :]
    assert start == [0] * skip + expected and 0 < len(game.env.actions) - len(start) <= skip


@pytest.mark.parametrize("noop_max", [0, 1, 8])
def test_noops(noop_max):
    """A game starts with 1 to --noop-max frames without action, or with none for 0."""
    game, numbers = new_game(bonus=0, noop_max=noop_max, fire=False), set()
    for _ in range(5 + 10 * noop_max):
        game.game_over = True
        game.reset()
        numbers.add(game.ale.getEpisodeFrameNumber())
        assert game.env.actions == [0] * game.ale.getEpisodeFrameNumber()
    assert numbers == (set(range(1, noop_max + 1)) or {0})


@pytest.mark.parametrize("game", ["Backgammon", "VideoCheckers"])
def test_no_noops(game):
    """Where no action does nothing, a game starts without such frames, but with FIRE as others."""
    assert new_game(game, bonus=0, noop_max=30).env.actions == [0] * 4
    assert new_game(game, bonus=0, noop_max=30, fire=False).env.actions == []


@pytest.mark.parametrize("sticky_actions", [0.0, 0.25])
def test_seeds(sticky_actions):
    """A seed gives the same game each time, also when it starts again; another seed another."""

    def scores(game):
        return [(game.obs.astype(int).sum(), *step[2:]) for step in random_steps(game, 80)]

    game = new_game(seed=1, sticky_actions=sticky_actions)
    first = scores(game)
    game.start()
    assert scores(game) == first
    assert scores(new_game(seed=1, sticky_actions=sticky_actions)) == first
    assert scores(new_game(seed=2, sticky_actions=sticky_actions)) != first


NAMES = "Breakout breakout BreakoutNoFrameskip-v4 BreakoutDeterministic-v4 ALE/Breakout-v5".split()


def test_names(tmp_path):
    """Gymnasium's names and the short one are one game, with the same pictures."""
    pictures = []
    assert {ppo_atari.game_name(name) for name in NAMES} == {"Breakout"}
    for name in NAMES[1:3]:
        pictures.append([step.obs.copy() for step in random_steps(new_game(name), 9)])
        np.testing.assert_array_equal(pictures[-1], pictures[0])
    assert (pictures[0][0] != pictures[0][-1]).any()
    args = ppo_atari.parse_args(["--env", "mspacmanNoFrameskip-v0", "--log-dir", str(tmp_path)])
    assert args.env == "MsPacman"


def test_options_reach_the_games(tmp_path):
    """All options of the command line are those of the games, and of the ALE in them."""
    options = "--frameskip 3 --sticky-actions 0.5 --full-action-space --no-episodic-life --no-fire"
    options = [*options.split(), "--noop-max", "7", "--log-dir", str(tmp_path)]
    for argv, expected in ((options, (3, 7, False, None, 18, 0.5)), ([], (4, 30, True, 1, 4, 0.0))):
        args = ppo_atari.parse_args([*argv, "--log-dir", str(tmp_path)])
        model = ppo_atari.make_model(args)
        with contextlib.closing(ppo_atari.make_pool(args, model, np.arange(2), 0)) as pool:
            game = pool.games.games[1]
            found = game.args.frameskip, game.noop_max, game.args.episodic_life, game.fire
            stickiness = game.ale.getFloat("repeat_action_probability")
            assert (*found, game.env.action_space.n, stickiness) == expected
            assert game.ale.getInt("frame_skip") == 1
        assert model.head.n == expected[4]


# Model --------------------------------------------------------------------------------------------


def literal(weights, obs):
    """Return log-probabilities and values of the network, computed in NCHW and float32.

    `weights` are those of the five layers and of the value, weight before bias.
    """
    first, second, third, last, policy, value = zip(weights[::2], weights[1::2])
    x = obs.permute(0, 3, 1, 2).contiguous().float() / 255
    x = F.relu(F.conv2d(x, *first, stride=4))
    x = F.relu(F.conv2d(x, *second, stride=2))
    x = F.relu(F.conv2d(x, *third)).flatten(1)
    x = F.relu(F.linear(x, *last))
    return F.log_softmax(F.linear(x, *policy), dim=1), F.linear(x, *value)[:, 0]


def weights_of(model):
    """Return copies of a model's parameters, in the order that `literal` takes them."""
    return [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]


def make_model(num_actions=4, bf16=False, scale=30):
    """Return a model whose policy prefers some actions, not the same in all states."""
    torch.manual_seed(0)
    model = Model(gym.spaces.Discrete(num_actions), bf16)
    model.head.logits.weight.data *= scale
    return model


def pictures(*shape):
    """Return random pictures, (*shape, 84, 84, 4)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (*shape, 84, 84, 4), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("num_actions", [4, 6, 18])
def test_network_shapes(num_actions):
    """Counted by hand: the parameters of the layers; one output per action and one value."""
    model = Model(gym.spaces.Discrete(num_actions))
    layers = 4 * 32 * 8 * 8 + 32, 32 * 64 * 4 * 4 + 64, 64 * 64 * 3 * 3 + 64, 64 * 7 * 7 * 512 + 512
    heads = 513 * num_actions + 513
    assert sum(layers) == 1_684_128
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(layers) + heads
    for shape in ((3,), (2, 3)):
        pi, values = model(pictures(*shape))
        assert pi.shape == (*shape, num_actions) and values.shape == shape
        torch.testing.assert_close(pi.exp().sum(dim=-1), torch.ones(shape))
    rows, _ = model(pictures(2, 3).flatten(0, 1))
    torch.testing.assert_close(pi.flatten(0, 1), rows)


def test_initial_weights():
    """Rows (or columns) of a layer's weight are orthogonal, of its gain's length; biases are 0."""
    parameters, gains = [*make_model(6, scale=1).parameters()], [2**0.5] * 4 + [0.1, 1.0]
    for weight, bias, gain in zip(parameters[::2], parameters[1::2], gains, strict=True):
        assert not bias.any()
        rows = weight.detach().flatten(1)
        assert rows.shape[0] <= rows.shape[1] and rows.shape[0] == len(bias)
        expected = gain**2 * torch.eye(len(bias))
        torch.testing.assert_close(rows @ rows.T, expected, atol=1e-5, rtol=0)


def test_network_is_literal():
    """Outputs are those of torch's functions in another memory layout."""
    model, obs = make_model(6), pictures(5)
    pi, values = model(obs)
    expected_pi, expected_values = literal(weights_of(model), obs)
    torch.testing.assert_close(pi, expected_pi)
    torch.testing.assert_close(values, expected_values)
    assert pi.std() > 0.1 and values.std() > 0.01


def test_bfloat16():
    """Features are bfloat16 numbers near those of float32; heads, weights, gradients float32."""
    exact, model, obs = make_model(6), make_model(6, bf16=True), pictures(16)
    expected, h = exact.features(obs), model.features(obs)
    assert h.dtype == torch.float32 and torch.equal(h, h.bfloat16().float())
    assert not torch.equal(h, expected)
    assert float((h - expected).detach().norm() / expected.detach().norm()) < 0.01
    pi, values = model(obs)
    assert torch.equal(pi, F.linear(h, *model.head.logits.parameters()).log_softmax(dim=-1))
    assert torch.equal(values, F.linear(h, *model.value.parameters())[:, 0])
    (pi.square().sum() + values.sum()).backward()
    for parameter in model.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert parameter.grad.any()


def test_network_refuses_other_pictures():
    """Floats would be divided by 255 unseen, and channels must be last."""
    for obs in (pictures(2).float(), pictures(2).permute(0, 3, 1, 2), pictures()[..., :3]):
        with pytest.raises(AssertionError):
            make_model()(obs)


# Rollout ------------------------------------------------------------------------------------------

T, N = 48, 3
BUFFER = "obs actions rewards terminated truncated".split()


def make_pool(model, num_workers=0, num_steps=T, start_method=None, env="Breakout", **options):
    """Return a pool of N games that have started."""
    args = SimpleNamespace(env=env, seed=1, **(OPTIONS | options))
    with pytest.MonkeyPatch.context() as patch:
        pool = functools.partial(ppo_atari.WorkerPool, start_method=start_method)
        patch.setattr(ppo_atari, "WorkerPool", pool)
        pool = ppo_atari.make_pool(args, model, np.arange(N), num_workers, num_steps)
    pool.call("start")
    return pool


def rollout(model, pool):
    """Return the buffer of a rollout with seed 2, and its episodes."""
    args = SimpleNamespace(num_steps=len(pool.buffer["noise"]), num_envs=N)
    return ppo_atari.rollout(model, pool, args, torch.Generator().manual_seed(2))


@torch.no_grad()
def replay(model, num_steps=T, **options):
    """Return what a rollout should be: games stepped one by one, with the noise of seed 2.

    A namespace: buffer {name: (T, N, ...)} with next_obs, the pictures to go on with, and the
    (return, length) of the games that ended.
    """
    games = [new_game(seed=seed, **options) for seed in range(N)]
    obs = np.stack([game.obs for game in games])
    generator = torch.Generator().manual_seed(2)
    noise = model.head.noise(num_steps * N, generator).view(num_steps, N, model.head.n)
    rows, episodes = [], []
    for t in range(num_steps):
        arrays = {"obs": obs, "actions": np.zeros(N, np.int64)}
        model.act(arrays, noise[t].numpy())
        steps = [copy.deepcopy(game.step(a)) for game, a in zip(games, arrays["actions"])]
        episodes += [(step.episode_return, step.episode_length) for step in steps if step.ended]
        following, *results = map(np.stack, zip(*steps))
        rows.append([obs, arrays["actions"], *results])
        obs = following
    names = ["obs", "actions", *ppo_atari.RESULTS]
    buffer = {name: torch.from_numpy(np.stack(row)) for name, row in zip(names, zip(*rows))}
    return SimpleNamespace(buffer=buffer, obs=obs, episodes=episodes)


@pytest.fixture(scope="module")
def played():
    """A model, and what it should play."""
    model = make_model()
    model.share_memory()
    return model, replay(model)


SPAWNED = pytest.param(1, "spawn", marks=pytest.mark.slow)  # test_pool.py has it, too


@pytest.mark.parametrize("num_workers, start_method", [(0, None), (2, None), SPAWNED])
def test_rollout_is_a_replay(played, num_workers, start_method):
    """Any number of workers plays what single steps of the games and the model would.

    They play with the weights of the rollout's start, not those of their own. Values and
    log-probabilities are the model's for the rows of the buffer.
    """
    model, expected = played
    bias = model.head.logits.bias.data
    bias[0] = 1e4
    with contextlib.closing(make_pool(model, num_workers, T, start_method)) as pool:
        bias.zero_()
        buffer, episodes = rollout(model, pool)
        for name in BUFFER:
            torch.testing.assert_close(buffer[name], expected.buffer[name], atol=0, rtol=0)
        np.testing.assert_array_equal(pool.arrays["obs"], expected.obs)
    assert episodes == expected.episodes
    assert buffer["terminated"].sum() >= N and buffer["rewards"].sum() > 0
    with torch.no_grad():
        pi, values = model(buffer["obs"])
    torch.testing.assert_close(buffer["values"], values)
    logprobs = pi.gather(-1, buffer["actions"][..., None])[..., 0]
    torch.testing.assert_close(buffer["logprobs"], logprobs)
    assert logprobs.std() > 0.1 and len(buffer["actions"].unique()) == 4


class Elsewhere(Model):
    """A model that says it is on a GPU, until it comes to the CPU."""

    device = torch.device("cuda")

    def cpu(self):
        """Be a Model."""
        self.__class__ = Model
        return self


def test_precision_of_a_copy(played, monkeypatch):
    """A copy on the CPU computes in bfloat16 if the model does and the CPU should; none is idle."""
    for on_gpu, on_cpu in [(True, True), (True, False), (False, True)]:
        elsewhere = copy.deepcopy(played[0])
        elsewhere.__class__, elsewhere.bf16 = Elsewhere, on_gpu
        monkeypatch.setattr(ppo_atari, "has_bf16", lambda device, fast=on_cpu: fast)
        player = ppo_atari.model_of_workers(elsewhere)
        assert player is not elsewhere and player.bf16 == (on_gpu and on_cpu)
        assert all(parameter.is_shared() for parameter in player.parameters())


@pytest.mark.parametrize("num_workers, start_method", [(2, None), SPAWNED])
def test_rollout_with_a_model_elsewhere(played, num_workers, start_method, monkeypatch):
    """A copy on the CPU plays, with the weights that the model has then."""
    model, expected = played
    elsewhere = copy.deepcopy(model)
    elsewhere.__class__, elsewhere.bf16 = Elsewhere, True
    bias = elsewhere.head.logits.bias.data
    bias[0] = 1e4
    monkeypatch.setattr(ppo_atari, "has_bf16", lambda device: device.type != "cpu")
    with contextlib.closing(make_pool(elsewhere, num_workers, T, start_method)) as pool:
        bias.zero_()
        # What is next goes to the GPU.
        with pytest.raises((RuntimeError, AssertionError), match="(?i)cuda|nvidia"):
            rollout(elsewhere, pool)
        assert not pool.player.bf16 and pool.player.device.type == "cpu"
        buffer = pool.buffer
        for name in (*BUFFER, "next_obs"):
            np.testing.assert_array_equal(buffer[name], expected.buffer[name].numpy())
        returns, lengths = (buffer[f"episode_{name}"] for name in ("return", "length"))
        ended = buffer["ended"]
        assert [*zip(returns[ended], lengths[ended])] == expected.episodes


def test_rollouts_go_on(played, monkeypatch):
    """The second rollout starts where the first one ended."""
    model, expected = played
    # Some versions of torch draw other numbers in two parts than at once.
    noise = iter(model.head.noise(T * N, torch.Generator().manual_seed(2)).chunk(2))
    monkeypatch.setattr(model.head, "noise", lambda *_: next(noise))
    with contextlib.closing(make_pool(model, 0, T // 2)) as pool:
        args = SimpleNamespace(num_steps=T // 2, num_envs=N)
        halves = [ppo_atari.rollout(model, pool, args, None)[0] for _ in range(2)]
        # Both are views of the same arrays, which now hold the second one.
        for name in BUFFER:
            assert torch.equal(halves[1][name], expected.buffer[name][T // 2 :]), name


def test_next_values(monkeypatch):
    """V of the next row; of next_obs at a truncation; of where to go on at the rollout's end."""
    limit_frames(monkeypatch, 60)  # FIRE and 14 steps
    model = make_model()
    expected = replay(model, 30, noop_max=0)
    with contextlib.closing(make_pool(model, 0, 30, noop_max=0)) as pool:
        buffer, episodes = rollout(model, pool)
    with torch.no_grad():
        values, finals = (model(expected.buffer[name])[1] for name in ("obs", "next_obs"))
        following = torch.cat([values[1:], model(torch.from_numpy(expected.obs))[1][None]])
    truncated = buffer["truncated"]
    assert torch.equal(truncated, expected.buffer["truncated"])
    assert truncated.nonzero().tolist() == [[t, i] for t in (13, 27) for i in range(N)]
    assert not buffer["terminated"].any()
    torch.testing.assert_close(buffer["next_values"], finals.where(truncated, following))
    assert ((following - finals)[truncated].abs() > 1e-3).all()
    assert episodes == expected.episodes and [length for _, length in episodes] == [14] * 6


def test_workers_see_the_optimizers_weights():
    """What the optimizer changes is what workers act with in the next rollout."""
    model = make_model()
    optimizer = ppo_atari.make_optimizer(model, SimpleNamespace(learning_rate=1e-3))
    model.head.logits.bias.data[2] = 1e4
    with contextlib.closing(make_pool(model, 2, 4)) as pool:
        assert (rollout(model, pool)[0]["actions"] == 2).all()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data.zero_()  # a uniform policy
        buffer, _ = rollout(model, pool)
        expected = pool.buffer["noise"].argmax(axis=-1)
        np.testing.assert_array_equal(buffer["actions"].numpy(), expected)
        assert len(np.unique(expected)) > 1 and not model.head.logits.bias.any()


PRECISIONS = pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])


@PRECISIONS
def test_first_ratios(monkeypatch, bf16):
    """Before the first step all ratios are 1 ± 2 %: of minibatches, and of what was drawn from.

    What actions are drawn from is float32, like the heads, also of a sure policy.
    """
    model, drawn = make_model(6, bf16, scale=300), []
    sample = model.head.sample

    def drawing(logp, noise):
        drawn.append(logp)
        return sample(logp, noise)

    monkeypatch.setattr(model.head, "sample", drawing)
    with contextlib.closing(make_pool(model, 0, 32, env="Pong")) as pool:
        buffer, _ = rollout(model, pool)
    pi = torch.stack(drawn)
    assert pi.dtype == torch.float32 and pi.shape == (32, N, 6)
    logprobs = pi.gather(-1, buffer["actions"][..., None])[..., 0]
    assert ((logprobs - buffer["logprobs"]).exp() - 1).abs().max() < 0.02
    args = SimpleNamespace(gamma=0.99, gae_lambda=0.95)
    batch = ppo_atari.make_batch(buffer, model, args)
    rows = torch.randperm(len(batch["obs"]), generator=torch.Generator().manual_seed(0))
    for mb_rows in rows.chunk(4):
        mb = {name: column[mb_rows] for name, column in batch.items()}
        *_, logratio = ppo_atari.losses(model, mb, 0.1, True)
        assert logratio.shape == (24,) and (logratio.exp() - 1).abs().max() < 0.02
    assert buffer["logprobs"].std() > 0.3  # far from uniform


# Update -------------------------------------------------------------------------------------------


def update_setup(**changes):
    """Return model, optimizer, batch of 12 rows, args and generator for `update`."""
    args = {"update_epochs": 3, "num_minibatches": 4, "norm_adv": "minibatch", "clip_vloss": True}
    args |= {"vf_coef": 0.5, "ent_coef": 0.01, "max_grad_norm": 0.5, "target_kl": None}
    args |= {"compile": False, "learning_rate": 1e-3}
    args = SimpleNamespace(**(args | changes))
    model, obs, generator = make_model(), pictures(12), torch.Generator().manual_seed(2)
    with torch.no_grad():
        pi, values = model(obs)
    actions = torch.randint(4, (12,), generator=generator)
    shifts = torch.randn(4, 12, generator=generator)
    logprobs = pi.gather(1, actions[:, None])[:, 0] + 0.2 * shifts[0]
    batch = {"obs": obs, "actions": actions, "logprobs": logprobs, "values": values + shifts[1] / 5}
    batch |= {"advantages": shifts[2], "returns": values + shifts[3]}
    optimizer = ppo_atari.make_optimizer(model, args)
    return model, optimizer, batch, args, torch.Generator().manual_seed(0)


def literal_loss(weights, mb, args, clip_coef):
    """Return PPO's loss and its terms on a minibatch, row after row."""
    pi, values = literal(weights, mb["obs"])
    advantages = mb["advantages"]
    if args.norm_adv == "minibatch":
        mean = advantages.sum() / len(advantages)
        deviation = ((advantages - mean).square().sum() / (len(advantages) - 1)).sqrt()
        advantages = (advantages - mean) / deviation
    terms = []
    for i, action in enumerate(mb["actions"].tolist()):
        ratio = (pi[i, action] - mb["logprobs"][i]).exp()
        limited = ratio.clamp(1 - clip_coef, 1 + clip_coef)
        objective = torch.minimum(ratio * advantages[i], limited * advantages[i])
        error = (values[i] - mb["returns"][i]).square()
        if args.clip_vloss:
            old = mb["values"][i]
            near = torch.minimum(torch.maximum(values[i], old - clip_coef), old + clip_coef)
            error = torch.maximum(error, (near - mb["returns"][i]).square())
        entropy = -(pi[i].exp() * pi[i]).sum()
        kl, clipped = ratio - 1 - ratio.log(), ((ratio - 1).abs() > clip_coef).float()
        terms.append(torch.stack([-objective, error / 2, entropy, kl, clipped]))
    terms = torch.stack(terms).mean(dim=0)
    return terms[0] + args.vf_coef * terms[1] - args.ent_coef * terms[2], terms.detach()


@pytest.mark.parametrize(
    "changes, clip_coef",
    [
        ({}, 0.1),
        ({"clip_vloss": False, "norm_adv": "off", "max_grad_norm": 1e9}, 0.05),
        ({"vf_coef": 1.0, "ent_coef": 0.1, "max_grad_norm": 0.01}, 0.2),
    ],
    ids=str,
)
def test_update_is_literal(changes, clip_coef):
    """An epoch of two minibatches against formulas: loss, clipped gradient, Adam; and its means."""
    setup = update_setup(update_epochs=1, num_minibatches=2, **changes)
    model, optimizer, batch, args, generator = setup
    weights, rows = weights_of(model), torch.randperm(12, generator=copy_of(generator))
    moments, seen = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights], []
    row = ppo_atari.update(*setup[:4], clip_coef, generator)
    for k, mb_rows in enumerate((rows[:6], rows[6:]), start=1):
        mb = {name: column[mb_rows] for name, column in batch.items()}
        loss, terms = literal_loss(weights, mb, args, clip_coef)
        seen.append(terms)
        gradients = torch.autograd.grad(loss, weights)
        norm = sum(gradient.square().sum() for gradient in gradients).sqrt()
        assert (norm > args.max_grad_norm) == (args.max_grad_norm < 1)
        scale = min(1.0, args.max_grad_norm / float(norm))
        for weight, gradient, (m, v) in zip(weights, gradients, moments):
            m += 0.1 * (scale * gradient - m)
            v += 0.001 * ((scale * gradient).square() - v)
            slope = (v / (1 - 0.999**k)).sqrt() + 1e-5
            weight.data -= 1e-3 * m / (1 - 0.9**k) / slope
    for weight, parameter in zip(weights, model.parameters(), strict=True):
        torch.testing.assert_close(parameter, weight, atol=2e-5, rtol=0)
    names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")
    expected = dict(zip(names, torch.stack(seen).mean(dim=0).tolist()))
    assert row == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert 0 < row["clipfrac"] < 1


def copy_of(generator):
    """Return a generator in the same state."""
    return torch.Generator().set_state(generator.get_state())


@pytest.mark.parametrize("norm_adv", ["minibatch", "batch", "off"])
def test_minibatches(monkeypatch, norm_adv):
    """Every epoch uses each row once; advantages are normalised per minibatch, once or never."""
    used, real = [], ppo_atari.losses
    monkeypatch.setattr(ppo_atari, "losses", lambda m, mb, *a: used.append(mb) or real(m, mb, *a))
    *setup, generator = update_setup(norm_adv=norm_adv)
    batch = setup[2]
    expected = batch["advantages"].clone()
    ppo_atari.update(*setup, 0.1, generator)
    assert torch.equal(batch["advantages"], expected)  # the caller's stay what they were
    assert [len(mb["obs"]) for mb in used] == [3] * 12
    if norm_adv == "batch":
        expected = (expected - expected.mean()) / expected.std()
    orders = []
    for epoch in (used[:4], used[4:8], used[8:]):
        returns = torch.cat([mb["returns"] for mb in epoch])
        orders.append((returns[:, None] == batch["returns"]).nonzero()[:, 1].tolist())
        assert sorted(orders[-1]) == list(range(12))
        pictures = torch.cat([mb["obs"] for mb in epoch])
        assert torch.equal(pictures, batch["obs"][orders[-1]])
        advantages = torch.stack([mb["advantages"] for mb in epoch])
        if norm_adv == "minibatch":
            assert advantages.mean(dim=1).abs().max() < 1e-6
            torch.testing.assert_close(advantages.std(dim=1), torch.ones(4))
        else:
            torch.testing.assert_close(advantages.flatten(), expected[orders[-1]])
    assert orders[0] != orders[1] != orders[2]


def test_target_kl_ends_the_update():
    """A minibatch whose KL is above the target ends it before its step."""
    for target_kl, expected in ((1e-9, 0), (1e9, 3 * 4), (None, 3 * 4)):
        model, optimizer, *rest, generator = update_setup(target_kl=target_kl)
        before, steps = weights_of(model), []
        optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        row = ppo_atari.update(model, optimizer, *rest, 0.1, generator)
        assert len(steps) == expected and row["approx_kl"] > 0
        same = all(torch.equal(*pair) for pair in zip(before, model.parameters()))
        assert same == (expected == 0)


# Runs ---------------------------------------------------------------------------------------------


def train(log_dir, *options):
    """Train on Breakout in this process."""
    return ppo_atari.train(ppo_atari.parse_args([*SMALL, "--log-dir", str(log_dir), *options]))


@pytest.fixture
def clip_coefs(monkeypatch):
    """A list that gets the ε of each update."""
    return record_clip_coefs(monkeypatch)


def record_clip_coefs(patch):
    """Have `update` append its ε to the list that is returned."""
    seen, real = [], ppo_atari.update

    def update(model, optimizer, batch, args, clip_coef, generator):
        seen.append(clip_coef)
        return real(model, optimizer, batch, args, clip_coef, generator)

    patch.setattr(ppo_atari, "update", update)
    return seen


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three iterations with evaluations, what it printed and the ε of its updates."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        clip_coefs = record_clip_coefs(patch)
        log_dir = tmp_path_factory.mktemp("run")
        result = train(log_dir, "--num-iterations", "3", "--eval-every", "3")
    result.clip_coefs, result.printed = clip_coefs, out.getvalue().splitlines()
    return result


def progress(run_dir):
    """Return the rows of progress.csv."""
    with (run_dir / "progress.csv").open() as file:
        return list(csv.DictReader(file))


def test_rates_fall_linearly(run):
    """Learning rate and ε go to 0: all, two thirds and one third of the defaults."""
    rates = [row["learning_rate"] for row in run.history[1:]]
    assert rates == pytest.approx([2.5e-4, 2.5e-4 * 2 / 3, 2.5e-4 / 3])
    assert run.clip_coefs == pytest.approx([0.1, 0.1 * 2 / 3, 0.1 / 3])


@pytest.mark.parametrize("kept", ["lr", "clip"])
def test_rates_without_annealing(tmp_path, monkeypatch, kept):
    """--no-anneal-lr and --no-anneal-clip each keep one of them."""
    clip_coefs, rates = record_clip_coefs(monkeypatch), {"lr": 2.5e-4, "clip": 0.1}
    history = train(tmp_path, "--num-iterations", "4", f"--no-anneal-{kept}").history
    for iteration, (row, clip_coef) in enumerate(zip(history, clip_coefs, strict=True)):
        found = {"lr": row["learning_rate"], "clip": clip_coef}
        falling = {name: rate * (1 - iteration / 4) for name, rate in rates.items()}
        assert found == pytest.approx(falling | {kept: rates[kept]})


def test_run_prints(run):
    """The first line says what is played; one per update follows; the last names the folder."""
    first, start, *updates, last = run.printed
    assert first == (
        "Breakout: frameskip 4, sticky_actions 0.0, full_action_space False, episodic_life True, "
        "noop_max 30, fire True, num_workers 0, precision fp32"
    )
    assert start.startswith("update 0/3") and len(updates) == 3
    for i, line in enumerate(updates, start=1):
        assert re.search(rf"update {i}/3 .*\b{16 * i}\b.*ETA", line)
    assert str(run.run_dir) in last


def test_defaults(tmp_path):
    """Without options a run has the constants of the annotated implementation, and 10M steps."""
    args = vars(ppo_atari.parse_args(["--log-dir", str(tmp_path)]))
    expected = {"env": "Breakout", "num_envs": 8, "num_steps": 128, "num_iterations": 9765}
    expected |= {"update_epochs": 4, "num_minibatches": 4, "learning_rate": 2.5e-4, "gamma": 0.99}
    expected |= {"anneal_lr": True, "clip_coef": 0.1, "anneal_clip": True, "clip_vloss": True}
    expected |= {"gae_lambda": 0.95, "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5}
    expected |= {"norm_adv": "minibatch", "target_kl": 0.0, "precision": "auto"} | OPTIONS
    assert expected.items() <= args.items()


def test_run_config(run):
    """config.json has all options and versions; the folder's name says what ran."""
    config = json.loads((run.run_dir / "config.json").read_text())
    expected = OPTIONS | {"env": "Breakout", "clip_coef": 0.1, "num_envs": 2, "anneal_clip": True}
    expected |= {"precision": "fp32", "compile": False, "num_iterations": 3, "gamma": 0.99}
    assert expected.items() <= config["options"].items()
    assert config["versions"]["torch"] == torch.__version__
    assert run.run_dir.name.startswith("Breakout__ppo_atari__1__")


def test_run_progress(run):
    """progress.csv has a row per iteration, after the evaluation of the start, and all columns."""
    rows = progress(run.run_dir)
    names = (
        "iteration global_step wall_seconds sps episodic_return episodic_length eval_return "
        "eval_cut learning_rate policy_loss value_loss entropy approx_kl clipfrac "
        "explained_variance"
    ).split()
    assert list(rows[0]) == names
    assert [int(row["iteration"]) for row in rows] == [0, 1, 2, 3]
    assert [int(row["global_step"]) for row in rows] == [0, 16, 32, 48]
    assert [bool(row["eval_return"]) for row in rows] == [True, False, False, True]
    for row in rows[1:]:
        for name in ("policy_loss", "value_loss", "approx_kl", "clipfrac", "sps"):
            assert math.isfinite(float(row[name]))
        assert 0 < float(row["entropy"]) < math.log(4) + 1e-6


def test_run_tensorboard(run):
    """TensorBoard finds CleanRL's tags at the global steps of progress.csv."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.run_dir))
    events.Reload()
    charts = {f"charts/{name}" for name in ("SPS", "learning_rate", "eval_return")}
    names = "policy_loss value_loss entropy approx_kl clipfrac".split()
    assert charts | {f"losses/{name}" for name in names} <= set(events.Tags()["scalars"])
    values = events.Scalars("losses/value_loss")
    assert [event.step for event in values] == [16, 32, 48]
    expected = [row["value_loss"] for row in run.history[1:]]
    assert [event.value for event in values] == pytest.approx(expected)
    first, image = events.Images("eval/end")
    assert first.step == 0
    picture = cv2.imdecode(np.frombuffer(image.encoded_image_string, np.uint8), 0)
    arrays = run.eval_pool.arrays
    (last, *_) = np.flatnonzero(arrays["ended"])
    assert image.step == 48 and np.array_equal(picture, arrays["next_obs"][last, ..., 3])


def test_run_checkpoint(run):
    """checkpoint.pt loads without running code and holds the model, optimizer and counters."""
    state = torch.load(run.run_dir / "checkpoint.pt", weights_only=True)
    assert state["counters"]["iteration"] == 3 and state["counters"]["global_step"] == 48
    model = make_model()
    model.load_state_dict(state["model"])
    for ours, theirs in zip(model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert float(state["optimizer"]["state"][0]["step"]) == 3 * 2


def test_episodes_are_logged(monkeypatch, tmp_path):
    """Mean return and length of the games that ended, whole ones: 8 steps each with 36 frames."""
    limit_frames(monkeypatch, 36)
    history = train(tmp_path, "--num-iterations", "2", "--noop-max", "0", "--quiet").history
    assert [row["episodic_length"] for row in history] == [8.0, 8.0]
    assert [row["episodic_return"] for row in history] == [0.0, 0.0]


@pytest.mark.parametrize("num_workers", ["0", "2"])
def test_same_seed_same_parameters(run, tmp_path, capsys, num_workers):
    """A seed gives bitwise the same parameters, with and without workers or evaluations.

    --quiet prints nothing.
    """
    options = ["--num-iterations", "3", "--num-workers", num_workers, "--quiet"]
    again = train(tmp_path, *options)
    assert capsys.readouterr().out == ""
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_resume(run, tmp_path, clip_coefs):
    """--resume continues counters, optimizer and rates, and appends to progress.csv."""
    copy = shutil.copytree(run.run_dir, tmp_path / "copy")
    args = ppo_atari.parse_args(
        f"--resume {copy} --num-iterations 5 --eval-every 0 --quiet".split()
    )
    assert args.num_steps == 8 and args.precision == "fp32" and args.num_workers == 0
    resumed = ppo_atari.train(args)
    assert resumed.run_dir == copy
    assert [row["global_step"] for row in resumed.history] == [0, 16, 32, 48, 64, 80]
    rates = [row["learning_rate"] for row in resumed.history[-2:]]
    assert rates == pytest.approx([2.5e-4 * 2 / 5, 2.5e-4 / 5])
    assert clip_coefs == pytest.approx([0.1 * 2 / 5, 0.1 / 5])
    assert [int(row["iteration"]) for row in progress(copy)] == [0, 1, 2, 3, 4, 5]
    state = torch.load(copy / "checkpoint.pt", weights_only=True)
    assert float(state["optimizer"]["state"][0]["step"]) == 5 * 2


@torch.no_grad()
def mode_return(model, seed, **options):
    """Return score and length of a whole game with the policy's mode."""
    game = new_game(seed=seed, **options)
    while True:
        pi, _ = literal(list(model.parameters()), torch.from_numpy(game.obs)[None])
        step = game.step(pi.argmax())
        if step.ended:
            return step.episode_return, step.episode_length


def test_eval(run, monkeypatch, tmp_path, capsys):
    """--eval prints mean ± sd of whole games with the mode, as the run's options say."""
    limit_frames(monkeypatch, 500)
    copy = shutil.copytree(run.run_dir, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["options"]["sticky_actions"] = 0.5  # so that games are not all alike
    (copy / "config.json").write_text(json.dumps(config))
    options = f"--eval {copy} --eval-episodes 3".split()
    returns = ppo_atari.evaluate_run(ppo_atari.parse_args(options))
    seeds = range(10_000, 10_003)
    expected = [mode_return(run.model, seed, sticky_actions=0.5)[0] for seed in seeds]
    assert returns.tolist() == expected and len(set(expected)) > 1
    text = f"return {np.mean(expected):.4f} ± {np.std(expected):.4f} over 3 episodes of Breakout\n"
    assert capsys.readouterr().out == text


def test_eval_is_the_runs(run):
    """Without other options --eval repeats the run's own last evaluation."""
    returns = ppo_atari.evaluate_run(ppo_atari.parse_args(["--eval", str(run.run_dir)]))
    assert returns.tolist() == [run.history[-1]["eval_return"]]


def test_video(run, monkeypatch, capsys):
    """--video writes a film of one game: a picture per frame, the screen's size, 60 a second."""
    limit_frames(monkeypatch, 100)
    args = ppo_atari.parse_args(["--eval", str(run.run_dir), "--video"])
    ppo_atari.evaluate_run(args)
    path = run.run_dir / "video.mp4"
    assert capsys.readouterr().out.splitlines()[1] == f"video: {path}"
    video = cv2.VideoCapture(str(path))
    read, picture = video.read()
    assert read and picture.shape == (210, 160, 3)
    assert video.get(cv2.CAP_PROP_FPS) == 60
    frames = video.get(cv2.CAP_PROP_FRAME_COUNT)
    video.release()
    assert abs(frames - (1 + 100)) <= 1  # also the one of the start; moviepy may drop the last
    screen = new_game(seed=10_000).ale.getScreenRGB().astype(int)
    assert np.abs(picture[..., ::-1] - screen).mean() < 5 < np.abs(picture - screen).mean()


@pytest.mark.parametrize(
    "precision, able, expected",
    [
        ("auto", {"avx512_bf16": True}, True),
        ("auto", {"amx_bf16": True, "avx512_fp16": True}, True),
        ("auto", {"avx512_bf16": True, "avx512_fp16": True}, False),
        ("auto", {"avx2": True}, False),
        ("fp32", {"avx512_bf16": True}, False),
        ("bf16", {}, True),
    ],
)
def test_precision(monkeypatch, precision, able, expected):
    """auto is bfloat16 where that is faster; a model and the first line show the choice."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able, raising=False)
    args = SimpleNamespace(env="Pong", device="cpu", precision=precision, num_workers=0, **OPTIONS)
    model = ppo_atari.make_model(args)
    assert model.bf16 == expected
    assert ppo_atari.settings(args, model).endswith("precision bf16" if expected else "fp32")


@pytest.mark.slow
def test_compile(tmp_path):
    """--compile trains too: losses are finite, and those of the run without it."""
    command = [sys.executable, "ppo_atari.py", *SMALL, "--num-iterations", "2", "--quiet"]
    rows = []
    for option in ("--compile", "--no-compile"):
        log_dir = tmp_path / option
        subprocess.run([*command, option, "--log-dir", str(log_dir)], cwd=ROOT, check=True)
        (run_dir,) = log_dir.iterdir()
        rows.append(progress(run_dir))
    for name in ("policy_loss", "value_loss", "entropy"):
        compiled, plain = ([float(row[name]) for row in run] for run in rows)
        assert compiled == pytest.approx(plain, rel=1e-2, abs=1e-3) and len(compiled) == 2
