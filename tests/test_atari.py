"""Tests of ppo_atari.py: its games bit for bit against Gymnasium's wrappers, its network by torch's
functions, rollouts by literal replays, updates by formulas, runs by what they leave behind."""

import contextlib
import copy
import csv
import functools
import itertools
import math
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
    "--num-workers 0 --precision fp32 --device cpu --quiet"
).split()


def parsed(words=""):
    """Return the options of a command line, unchecked."""
    return ppo_atari.make_parser().parse_args(words.split())


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


# What a step writes: in its row, and under `obs` what the policy sees next.
RESULTS = "next_obs rewards terminated truncated ended episode_return episode_length".split()
Step = namedtuple("Step", ["obs", *RESULTS])


class Single(Game):
    """A started game that has rows of its own; its step returns what it wrote.

    With a bonus its env is a Tally.
    """

    def __init__(self, name="Breakout", seed=0, bonus=None, **options):
        args = SimpleNamespace(env=name, num_steps=1, **(OPTIONS | options))
        rows = {name: tensor.numpy() for name, tensor in ppo_atari.make_rows(args, 1).items()}
        super().__init__(args, rows, 0)
        if bonus is not None:
            self.env = Tally(self.env, bonus)
        self.start(seed, -1)

    def step(self, action):
        super().step(0, action)
        return Step(self.rows["obs"][1, 0].copy(), *(self.rows[n][0, 0].copy() for n in RESULTS))


def random_steps(game, num_steps):
    """Step a game with random actions. Yields what the steps return."""
    for action in np.random.default_rng(0).integers(game.env.action_space.n, size=num_steps):
        yield game.step(action)


def compared_steps(game, num_steps, seed=5, **options):
    """Step a game beside Gymnasium's wrappers, with random actions, and compare what both give.

    Yields what the steps return, the score of each, and how often it has reset the env.
    """
    own = Single(game, seed, **options)
    peer, tally = gymnasiums(game, **options)
    expected, _ = peer.reset(seed=seed)
    assert same(own.rows["obs"][-1, 0], expected)
    length = 0
    for action in np.random.default_rng(0).integers(own.env.action_space.n, size=num_steps):
        tally.scores.clear()
        step = own.step(action)
        expected, score, *ends, _ = peer.step(action)
        assert same(step.next_obs, expected)
        assert step.rewards == np.sign(score)
        assert [step.terminated, step.truncated] == ends
        if any(ends):
            expected, _ = peer.reset()
        assert same(step.obs, expected)
        length += 1
        assert step.ended == bool(tally.scores)
        if step.ended:
            assert (step.episode_return, step.episode_length) == (tally.scores[0], length)
            length = 0
        assert (own.score, own.length) == (tally.score, length)
        yield step, score, len(tally.scores)


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

    The return is the score of all lives, the length the number of steps, of a game.
    """
    if truncation:
        limit_frames(monkeypatch, truncation)
    seen, wanted = set(), {"score", "terminated", "ended", "next game"}
    if truncation:
        wanted.add("truncated")
    for step, score, _ in compared_steps(game, 2_000, **options):
        if "ended" in seen:
            seen.add("next game")
        if score:
            seen.add("score")
        seen |= {name for name in ("terminated", "truncated", "ended") if getattr(step, name)}
        if wanted <= seen:
            break
    assert seen == wanted


def test_noops_that_end_the_game(monkeypatch):
    """A new game starts where the no-ops reach the limit of frames, as with Gymnasium."""
    limit_frames(monkeypatch, 20)
    steps = list(compared_steps("Breakout", 25, seed=1, fire=False))
    assert {num_resets for *_, num_resets in steps} == {0, 1, 2}
    assert all(step.ended == (num_resets > 0) for step, _, num_resets in steps)

    # What the no-ops of the other game have scored is not the new one's.
    game = Single(bonus=1, fire=False)
    for seed in range(9):
        game.start(seed, -1)
        assert game.score == game.env.score == game.ale.getEpisodeFrameNumber()
    assert len(game.env.scores) > 1 + 9  # resets, more than starts


def test_time_limit(monkeypatch):
    """98 frames are 24 steps and a half: the 25th truncates, its next_obs repeats a picture."""
    limit_frames(monkeypatch, 98)
    game = Single(noop_max=0, fire=False)
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
    ends = [step.terminated for step in random_steps(Single(noop_max=0), 100)]
    length = 1 + ends.index(True)
    frames = 4 + 4 * length  # with FIRE; one of the last four loses the life
    for limit in range(frames - 3, frames + 1):
        with monkeypatch.context() as patch:
            limit_frames(patch, limit)
            game = Single(noop_max=0)
        *_, step = random_steps(game, length)
        assert step.terminated != step.truncated  # an end of the game
        assert step.ended and step.episode_length == length
        assert game.ale.getEpisodeFrameNumber() == 4 and game.ale.lives() == 5  # a new one
        if step.terminated:  # at the first frame that is not too early
            return
    raise AssertionError("no limit is the frame at which the life is lost")


def test_lives():
    """Breakout has 5 lives: 5 episodes of one game, whose frame number goes on; then a new game."""
    game, frames, ends = Single(), [], []
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
    game = Single(noop_max=0)
    game.lives = 4  # before the fifth is there
    ends = [step.terminated for step in random_steps(game, 30)]
    assert not any(ends[:20]) and any(ends)


def test_whole_games():
    """--no-episodic-life: an episode is a game, the loss of a life is no end.

    The game keeps the score of the first one since its start.
    """
    game, scores = Single(episodic_life=False), []
    for step in random_steps(game, 600):
        assert step.ended == step.terminated and not step.truncated
        if step.ended:
            scores.append(step.episode_return)
        assert game.first_return == (scores[0] if scores else None)
        if len(set(scores)) > 1:
            break
    assert len(set(scores)) > 1
    game.start(0, -1)
    assert game.first_return is None


@pytest.mark.parametrize("bonus", [-7, 0.5])
def test_return_has_every_score(bonus):
    """A return sums all rewards of a game, also those that no step gets; rewards are signs.

    No step gets what comes in the frames without action and with FIRE that start a life.
    """
    game, of_steps = Single(bonus=bonus), 0.0
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
    game = Single(name, bonus=0, noop_max=0, **options)
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


@pytest.mark.parametrize("noop_max", [0, 1, 5])
def test_noops(noop_max):
    """A game starts with 1 to --noop-max frames without action, or with none for 0."""
    game, numbers = Single(bonus=0, noop_max=noop_max, fire=False), set()
    for _ in range(5 + 5 * noop_max):
        game.game_over = True
        game.reset()
        numbers.add(game.ale.getEpisodeFrameNumber())
        assert game.env.actions == [0] * game.ale.getEpisodeFrameNumber()
    assert numbers == (set(range(1, noop_max + 1)) or {0})


@pytest.mark.parametrize("game", ["Backgammon", "VideoCheckers"])
def test_no_noops(game):
    """Where no action does nothing, a game starts without such frames, but with FIRE as others."""
    assert Single(game, bonus=0, noop_max=30).env.actions == [0] * 4
    assert Single(game, bonus=0, noop_max=30, fire=False).env.actions == []


@pytest.mark.parametrize("sticky_actions", [0.0, 0.25])
def test_seeds(sticky_actions):
    """A seed gives the same game each time, also when it starts again; another seed another."""

    def scores(game):
        return [(step.obs.astype(int).sum(), *step[2:]) for step in random_steps(game, 40)]

    game = Single(seed=1, sticky_actions=sticky_actions)
    first = scores(game)
    game.start(1, -1)
    assert scores(game) == first
    assert scores(Single(seed=1, sticky_actions=sticky_actions)) == first
    assert scores(Single(seed=2, sticky_actions=sticky_actions)) != first


NAMES = "Breakout breakout BreakoutNoFrameskip-v4 BreakoutDeterministic-v4 ALE/Breakout-v5".split()


def test_names(tmp_path):
    """Gymnasium's names and the short one are one game, with the same pictures."""
    pictures = []
    assert {ppo_atari.game_name(name) for name in NAMES} == {"Breakout"}
    for name in NAMES[1:3]:
        pictures.append([step.obs.copy() for step in random_steps(Single(name), 9)])
        np.testing.assert_array_equal(pictures[-1], pictures[0])
    assert (pictures[0][0] != pictures[0][-1]).any()
    args = ppo_atari.parse_args(["--env", "mspacmanNoFrameskip-v0", "--log-dir", str(tmp_path)])
    assert args.env == "MsPacman"


def test_options_reach_the_games(tmp_path):
    """All options of the command line are those of the games, and of the ALE in them."""
    options = "--frameskip 3 --sticky-actions 0.5 --full-action-space --no-episodic-life --no-fire"
    options = [*options.split(), "--noop-max", "7"]
    for argv, expected in ((options, (3, 7, False, None, 18, 0.5)), ([], (4, 30, True, 1, 4, 0.0))):
        args = ppo_atari.parse_args([*SMALL, *argv, "--log-dir", str(tmp_path)])
        model = ppo_atari.make_model(args)
        with contextlib.closing(ppo_atari.make_pool(args, model)) as pool:
            game = pool.player.games[1]
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


def make_model(num_actions=4, precision="fp32", scale=30):
    """Return a model whose policy prefers some actions, not the same in all states."""
    torch.manual_seed(0)
    model = Model(gym.spaces.Discrete(num_actions), precision)
    model.head.output.weight.data *= scale
    return model


def pictures(*shape):
    """Return random pictures, (*shape, 84, 84, 4)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (*shape, 84, 84, 4), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("num_actions", [4, 6, 18])
def test_network_shapes(num_actions):
    """Counted by hand: the parameters of the layers; one output per action and one value."""
    model = Model(gym.spaces.Discrete(num_actions), "fp32")
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
    exact, model, obs = make_model(6), make_model(6, "bf16"), pictures(16)
    expected, h = exact.features(obs), model.features(obs)
    assert h.dtype == torch.float32 and torch.equal(h, h.bfloat16().float())
    assert not torch.equal(h, expected)
    assert float((h - expected).detach().norm() / expected.detach().norm()) < 0.01
    pi, values = model(obs)
    assert torch.equal(pi, F.linear(h, *model.head.output.parameters()).log_softmax(dim=-1))
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
BUFFER = "obs actions rewards terminated truncated ended".split()
GAMES = f"--num-envs {N} --num-workers 0"


@contextlib.contextmanager
def started_pool(model, args):
    """The pool of games that have started from the seeds 0, 1, ..."""
    with contextlib.closing(ppo_atari.make_pool(args, model)) as pool:
        pool.call("start", np.arange(args.num_envs))
        yield pool


def rollout(model, pool, args):
    """Return the buffer of a rollout with seed 2."""
    return ppo_atari.rollout(model, pool, args, torch.Generator().manual_seed(2))


@torch.no_grad()
def replay(model, args):
    """Return what a rollout should be: games stepped one by one, with the noise of seed 2.

    A namespace: buffer {name: (T, N, ...)} with next_obs, the pictures to go on with, and the
    (return, length) of the games that ended.
    """
    num_steps, num_games = args.num_steps, args.num_envs
    options = {name: getattr(args, name) for name in OPTIONS}
    games = [Single(args.env, seed, **options) for seed in range(num_games)]
    obs = np.stack([game.obs for game in games])
    generator = torch.Generator().manual_seed(2)
    noise = model.head.noise(num_steps * num_games, generator).view(num_steps, num_games, -1)
    rows, episodes = [], []
    for t in range(num_steps):
        actions = model.act(obs, noise[t].numpy())
        steps = [game.step(action) for game, action in zip(games, actions)]
        episodes += [(step.episode_return, step.episode_length) for step in steps if step.ended]
        following, *results = map(np.stack, zip(*steps))
        rows.append([obs, actions, *results])
        obs = following
    names = ["obs", "actions", *RESULTS]
    buffer = {name: torch.from_numpy(np.stack(row)) for name, row in zip(names, zip(*rows))}
    return SimpleNamespace(buffer=buffer, obs=obs, episodes=episodes)


@pytest.fixture(scope="module")
def played():
    """A model, and what it should play."""
    model = make_model()
    return model, replay(model, parsed(f"{GAMES} --num-steps {T}"))


@pytest.mark.parametrize("num_workers, num_rollouts", [(0, 2), (2, 1)])
def test_rollout_is_a_replay(played, monkeypatch, num_workers, num_rollouts):
    """Any number of workers plays what single steps of the games and the model would.

    They play with the weights of the rollout's start, not those of their own, and go on where the
    last rollout ended. Values and log-probabilities are the model's for the rows of the buffer.
    """
    model, expected = played
    num_steps = T // num_rollouts
    args = parsed(f"{GAMES} --num-workers {num_workers} --num-steps {num_steps}")
    # Some versions of torch draw other numbers in two parts than at once.
    noise = model.head.noise(T * N, torch.Generator().manual_seed(2))
    parts = iter(noise.chunk(num_rollouts))
    monkeypatch.setattr(model.head, "noise", lambda count, generator: next(parts)[:count])
    bias = model.head.output.bias.data
    bias[0] = 1e4
    with started_pool(model, args) as pool:
        assert len(pool.workers) == num_workers
        bias.zero_()
        episodes = []
        for first in range(0, T, num_steps):
            buffer = rollout(model, pool, args)
            episodes += ppo_atari.finished_episodes(buffer)
            for name in BUFFER:
                rows = expected.buffer[name][first : first + num_steps]
                torch.testing.assert_close(buffer[name], rows, atol=0, rtol=0)
        np.testing.assert_array_equal(pool.rows["obs"][-1], expected.obs)
    assert episodes == expected.episodes
    assert expected.buffer["terminated"].sum() >= N and expected.buffer["rewards"].sum() > 0
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


def test_rollout_with_a_model_elsewhere(played, monkeypatch):
    """A copy on the CPU plays, with the weights that the model has then, in the CPU's precision."""
    args = parsed(f"{GAMES} --num-steps 3")
    expected = replay(played[0], args)
    elsewhere = copy.deepcopy(played[0])
    elsewhere.__class__, elsewhere.precision = Elsewhere, "auto"
    monkeypatch.setattr(ppo_atari, "has_bf16", lambda device_type: device_type != "cpu")
    bias = elsewhere.head.output.bias.data
    bias[0] = 1e4
    with started_pool(elsewhere, args) as pool:
        bias.zero_()
        # Then the rows go to the GPU.
        with pytest.raises((RuntimeError, AssertionError), match="(?i)cuda|nvidia"):
            rollout(elsewhere, pool, args)
        assert elsewhere.bf16 and not pool.model.bf16 and pool.model.device.type == "cpu"
        assert all(parameter.is_shared() for parameter in pool.model.parameters())
        for name in (*BUFFER, "next_obs"):
            rows = pool.rows[name][:3]
            torch.testing.assert_close(rows, expected.buffer[name], atol=0, rtol=0)


def test_next_values(monkeypatch):
    """V of the next row; of next_obs at a truncation; of where to go on at the rollout's end."""
    limit_frames(monkeypatch, 24)  # FIRE and 5 steps
    model = make_model()
    args = parsed("--num-envs 2 --num-workers 0 --num-steps 12 --noop-max 0")
    expected = replay(model, args)
    with started_pool(model, args) as pool:
        buffer = rollout(model, pool, args)
    with torch.no_grad():
        values, finals = (model(expected.buffer[name])[1] for name in ("obs", "next_obs"))
        following = torch.cat([values[1:], model(torch.from_numpy(expected.obs))[1][None]])
    truncated = buffer["truncated"]
    assert torch.equal(truncated, expected.buffer["truncated"])
    assert truncated.nonzero().tolist() == [[t, i] for t in (4, 9) for i in range(2)]
    assert not buffer["terminated"].any()
    torch.testing.assert_close(buffer["next_values"], finals.where(truncated, following))
    assert ((following - finals)[truncated].abs() > 1e-3).all()
    episodes = ppo_atari.finished_episodes(buffer)
    assert episodes == expected.episodes and [length for _, length in episodes] == [5] * 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_first_ratios(monkeypatch, precision):
    """Before the first step all ratios are 1 ± 2 %: of minibatches, and of what was drawn from.

    What actions are drawn from is float32, like the heads, also of a sure policy.
    """
    model, drawn = make_model(6, precision, scale=300), []
    sample = ppo_atari.Categorical.sample

    def drawing(head, logits, noise):
        drawn.append(torch.from_numpy(logits))
        return sample(head, logits, noise)

    monkeypatch.setattr(ppo_atari.Categorical, "sample", drawing)
    args = parsed("--env Pong --num-envs 2 --num-workers 0 --num-steps 24")
    with started_pool(model, args) as pool:
        buffer = rollout(model, pool, args)
    logits = torch.stack(drawn)
    assert logits.dtype == torch.float32 and logits.shape == (24, 2, 6)
    logprobs = logits.log_softmax(dim=-1).gather(-1, buffer["actions"][..., None])[..., 0]
    assert ((logprobs - buffer["logprobs"]).exp() - 1).abs().max() < 0.02
    batch = ppo_atari.make_batch(buffer, model, args)
    rows = torch.randperm(len(batch["obs"]), generator=torch.Generator().manual_seed(0))
    for mb_rows in rows.chunk(4):
        mb = {name: column[mb_rows] for name, column in batch.items()}
        *_, logratio = ppo_atari.losses(model, mb, 0.1, True)
        assert logratio.shape == (12,) and (logratio.exp() - 1).abs().max() < 0.02
    assert buffer["logprobs"].std() > 0.3  # far from uniform


# Update -------------------------------------------------------------------------------------------


ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-5, "weight_decay": 0, "amsgrad": False}


def update_setup(**changes):
    """Return model, optimizer, batch of 12 rows, args and generator for `update`."""
    args = {"update_epochs": 3, "num_minibatches": 4, "norm_adv": True, "clip_vloss": True}
    args |= {"vf_coef": 0.5, "ent_coef": 0.01, "max_grad_norm": 0.5, "target_kl": 0.0}
    args = SimpleNamespace(**(args | {"compile": False} | changes))
    model, obs, generator = make_model(), pictures(12), torch.Generator().manual_seed(2)
    with torch.no_grad():
        pi, values = model(obs)
    actions = torch.randint(4, (12,), generator=generator)
    shifts = torch.randn(4, 12, generator=generator)
    logprobs = pi.gather(1, actions[:, None])[:, 0] + 0.2 * shifts[0]
    batch = {"obs": obs, "actions": actions, "logprobs": logprobs, "values": values + shifts[1] / 5}
    batch |= {"advantages": shifts[2], "returns": values + shifts[3]}
    optimizer = torch.optim.Adam(model.parameters(), **ADAM)
    return model, optimizer, batch, args, torch.Generator().manual_seed(0)


def literal_loss(weights, mb, args, clip_coef):
    """Return PPO's loss and its terms on a minibatch, row after row."""
    pi, values = literal(weights, mb["obs"])
    advantages = mb["advantages"]
    if args.norm_adv:
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
        ({"clip_vloss": False, "norm_adv": False, "max_grad_norm": 1e9}, 0.05),
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


@pytest.mark.parametrize("norm_adv", [True, False])
def test_minibatches(monkeypatch, norm_adv):
    """Every epoch uses each row once; advantages are normalised per minibatch, or not at all."""
    used, real = [], ppo_atari.losses
    monkeypatch.setattr(ppo_atari, "losses", lambda m, mb, *a: used.append(mb) or real(m, mb, *a))
    *setup, generator = update_setup(norm_adv=norm_adv)
    batch = setup[2]
    expected = batch["advantages"].clone()
    ppo_atari.update(*setup, 0.1, generator)
    assert torch.equal(batch["advantages"], expected)  # the caller's stay what they were
    assert [len(mb["obs"]) for mb in used] == [3] * 12
    orders = []
    for epoch in (used[:4], used[4:8], used[8:]):
        returns = torch.cat([mb["returns"] for mb in epoch])
        orders.append((returns[:, None] == batch["returns"]).nonzero()[:, 1].tolist())
        assert sorted(orders[-1]) == list(range(12))
        pictures = torch.cat([mb["obs"] for mb in epoch])
        assert torch.equal(pictures, batch["obs"][orders[-1]])
        advantages = torch.stack([mb["advantages"] for mb in epoch])
        if norm_adv:
            assert advantages.mean(dim=1).abs().max() < 1e-6
            torch.testing.assert_close(advantages.std(dim=1), torch.ones(4))
        else:
            torch.testing.assert_close(advantages.flatten(), expected[orders[-1]])
    assert orders[0] != orders[1] != orders[2]


def test_target_kl_ends_the_update():
    """A minibatch whose KL is above the target ends it before its step."""
    for target_kl, expected in ((1e-9, 0), (1e9, 3 * 4), (0.0, 3 * 4)):
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
    """A run of three iterations with evaluations, and the ε of its updates."""
    with pytest.MonkeyPatch.context() as patch:
        clip_coefs = record_clip_coefs(patch)
        log_dir = tmp_path_factory.mktemp("run")
        result = train(log_dir, "--num-iterations", "3", "--eval-every", "3")
    result.clip_coefs = clip_coefs
    return result


def progress(run_dir):
    """Return the rows of progress.csv."""
    with (run_dir / "progress.csv").open() as file:
        return list(csv.DictReader(file))


def test_defaults(tmp_path):
    """Without options a run has the constants of the annotated implementation, and 10M steps."""
    args = vars(ppo_atari.parse_args(["--log-dir", str(tmp_path)]))
    expected = {"env": "Breakout", "num_envs": 8, "num_steps": 128, "num_iterations": 9765}
    expected |= {"update_epochs": 4, "num_minibatches": 4, "learning_rate": 2.5e-4, "gamma": 0.99}
    expected |= {"anneal_lr": True, "clip_coef": 0.1, "anneal_clip": True, "clip_vloss": True}
    expected |= {"gae_lambda": 0.95, "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5}
    expected |= {"norm_adv": True, "target_kl": 0.0, "precision": "auto"} | OPTIONS
    assert expected.items() <= args.items()


def test_rates_fall_linearly(run):
    """Learning rate and ε go to 0: all, two thirds and one third of the defaults.

    The optimizer is the one of test_update_is_literal.
    """
    rates = [row["learning_rate"] for row in run.history[1:]]
    assert rates == pytest.approx([2.5e-4, 2.5e-4 * 2 / 3, 2.5e-4 / 3])
    assert run.clip_coefs == pytest.approx([0.1, 0.1 * 2 / 3, 0.1 / 3])
    (group,) = run.optimizer.param_groups
    assert isinstance(run.optimizer, torch.optim.Adam)
    assert (ADAM | {"lr": group["lr"]}).items() <= group.items()


@pytest.mark.parametrize("kept", ["lr", "clip"])
def test_rates_without_annealing(tmp_path, monkeypatch, kept):
    """--no-anneal-lr and --no-anneal-clip each keep one of them."""
    clip_coefs, rates = record_clip_coefs(monkeypatch), {"lr": 2.5e-4, "clip": 0.1}
    options = ["--num-iterations", "2", "--num-steps", "2", f"--no-anneal-{kept}"]
    history = train(tmp_path, *options).history
    for iteration, (row, clip_coef) in enumerate(zip(history, clip_coefs, strict=True)):
        found = {"lr": row["learning_rate"], "clip": clip_coef}
        falling = {name: rate * (1 - iteration / 2) for name, rate in rates.items()}
        assert found == pytest.approx(falling | {kept: rates[kept]})


def test_run_progress(run):
    """progress.csv has a row per iteration, after the evaluation of the start."""
    rows = progress(run.run_dir)
    assert [int(row["iteration"]) for row in rows] == [0, 1, 2, 3]
    assert [int(row["global_step"]) for row in rows] == [0, 16, 32, 48]
    assert [bool(row["eval_return"]) for row in rows] == [True, False, False, True]
    names = "policy_loss value_loss approx_kl clipfrac explained_variance sps".split()
    for row in rows[1:]:
        assert all(math.isfinite(float(row[name])) for name in names)
        assert 0 < float(row["entropy"]) < math.log(4) + 1e-6
    assert run.run_dir.name.startswith("Breakout__ppo_atari__1__")


def test_episodes_are_logged(monkeypatch, tmp_path):
    """Mean return and length of the games that ended, whole ones: 8 steps each with 36 frames."""
    limit_frames(monkeypatch, 36)
    history = train(tmp_path, "--num-iterations", "2", "--noop-max", "0").history
    assert [row["episodic_length"] for row in history] == [8.0, 8.0]
    for name in ("episodic_return", "iteration_return"):
        assert [row[name] for row in history] == [0.0, 0.0]


def test_same_seed_same_parameters(run, tmp_path, capsys):
    """A seed gives bitwise the same parameters, also with workers, and without evaluations.

    --quiet prints nothing.
    """
    again = train(tmp_path, "--num-iterations", "3", "--num-workers", "2")
    assert capsys.readouterr().out == ""
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_resume(run, tmp_path, monkeypatch):
    """--resume continues counters, optimizer and rates, with the options of the run."""
    clip_coefs = record_clip_coefs(monkeypatch)
    copied = shutil.copytree(run.run_dir, tmp_path / "copy")
    words = ["--resume", str(copied), "--num-iterations", "5", "--eval-every", "0", "--quiet"]
    args = ppo_atari.parse_args(words)
    assert args.num_steps == 8 and args.precision == "fp32" and args.num_workers == 0
    resumed = ppo_atari.train(args)
    assert resumed.run_dir == copied
    assert [row["global_step"] for row in resumed.history] == [0, 16, 32, 48, 64, 80]
    rates = [row["learning_rate"] for row in resumed.history[-2:]]
    assert rates == pytest.approx([2.5e-4 * 2 / 5, 2.5e-4 / 5])
    assert clip_coefs == pytest.approx([0.1 * 2 / 5, 0.1 / 5])
    assert [int(row["iteration"]) for row in progress(copied)] == [0, 1, 2, 3, 4, 5]
    before, after = (ppo_atari.read_checkpoint(folder) for folder in (run.run_dir, copied))
    assert float(before["optimizer"]["state"][0]["step"]) == 3 * 2
    assert float(after["optimizer"]["state"][0]["step"]) == 5 * 2


@torch.no_grad()
def mode_return(model, seed, **options):
    """Return the score of a whole game with the policy's mode."""
    game = Single(seed=seed, **options)
    while True:
        pi, _ = literal(list(model.parameters()), torch.from_numpy(game.obs)[None])
        step = game.step(int(pi.argmax()))
        if step.ended:
            return step.episode_return


def test_eval(run, monkeypatch, capsys):
    """--eval prints mean ± sd of whole games with the mode, as the options say."""
    limit_frames(monkeypatch, 500)
    # Sticky actions, so that games are not all alike.
    words = ["--eval", str(run.run_dir), "--eval-episodes", "3", "--sticky-actions", "0.5"]
    returns = ppo_atari.evaluate_run(ppo_atari.parse_args(words))
    seeds = range(10_000, 10_003)
    expected = [mode_return(run.model, seed, sticky_actions=0.5) for seed in seeds]
    assert returns.tolist() == expected and len(set(expected)) > 1
    text = f"return {np.mean(expected):.4f} ± {np.std(expected):.4f} over 3 episodes of Breakout\n"
    assert capsys.readouterr().out == text


def test_video(run, monkeypatch, capsys):
    """--video writes a film of one game: a picture per frame, the screen's size, 60 a second.

    Without other options --eval repeats the run's own last evaluation.
    """
    returns = ppo_atari.evaluate_run(ppo_atari.parse_args(["--eval", str(run.run_dir)]))
    assert returns.tolist() == [run.history[-1]["eval_return"]]
    capsys.readouterr()
    limit_frames(monkeypatch, 100)
    args = ppo_atari.parse_args(["--eval", str(run.run_dir), "--video"])
    ppo_atari.evaluate_run(args)
    path = run.run_dir / "video" / "rl-video-episode-0.mp4"
    assert capsys.readouterr().out.splitlines()[1] == f"video: {path}"
    video = cv2.VideoCapture(str(path))
    read, picture = video.read()
    assert read and picture.shape == (210, 160, 3)
    assert video.get(cv2.CAP_PROP_FPS) == 60
    frames = video.get(cv2.CAP_PROP_FRAME_COUNT)
    video.release()
    assert abs(frames - (1 + 100)) <= 1  # also the one of the start; moviepy may drop the last
    screen = Single(seed=10_000).ale.getScreenRGB().astype(int)
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
    """auto is bfloat16 where that is faster."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able, raising=False)
    ppo_atari.has_bf16.cache_clear()
    model = make_model(precision=precision)
    assert model.bf16 == expected
    ppo_atari.has_bf16.cache_clear()


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
