"""A small loss and a batch for every class of ``torchrl.objectives`` that is distributed exactly.

Each batch has ``[rows]`` or ``[rows, STEPS]`` elements. Those of NAMES draw nothing at random when
they are computed, and no loss does under :func:`pinned`, so a batch gives the same gradients in one
piece and in several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
import torchrl.objectives as objectives
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal
from torchrl.modules import (
    MLP,
    DiffusionActor,
    DistributionalQValueActor,
    NormalParamExtractor,
    ProbabilisticActor,
    QMixer,
    QValueActor,
    QValueModule,
    ValueOperator,
)
from torchrl.objectives import LossModule, ValueEstimators

OBSERVATION, ACTION, ACTIONS, STEPS, AGENTS = 5, 2, 3, 4, 2


class PinnedNormal(Independent):
    """A Gaussian whose noise depends on its mean instead of a generator."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(Normal(loc, scale), 1)

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        normal = self.base_dist
        sample = normal.loc + normal.scale * torch.sin(997 * normal.loc.detach())
        return sample.expand(*sample_shape, *sample.shape)

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        return self.rsample(sample_shape).detach()


class StateAction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(OBSERVATION + ACTION, 1)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.layers(torch.cat([observation, action], -1))


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def gaussian_actor() -> ProbabilisticActor:
    network = nn.Sequential(mlp(OBSERVATION, 2 * ACTION), NormalParamExtractor())
    module = TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticActor(
        module, in_keys=["loc", "scale"], distribution_class=PinnedNormal, return_log_prob=True
    )


def categorical_actor() -> ProbabilisticActor:
    module = TensorDictModule(
        mlp(OBSERVATION, ACTIONS), in_keys=["observation"], out_keys=["logits"]
    )
    return ProbabilisticActor(
        module, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
    )


def deterministic_actor() -> TensorDictModule:
    network = nn.Sequential(mlp(OBSERVATION, ACTION), nn.Tanh())
    return TensorDictModule(network, in_keys=["observation"], out_keys=["action"])


def state_value() -> ValueOperator:
    return ValueOperator(mlp(OBSERVATION, 1), in_keys=["observation"])


def state_action_value() -> ValueOperator:
    return ValueOperator(StateAction(), in_keys=["observation", "action"])


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Replace random draws. A draw per row depends on the shape, or on the value to which it adds
    noise. A draw for all rows differs between ranks."""

    rank = dist.get_rank() if dist.is_initialized() else 0

    def fill(value: float) -> Callable[..., Tensor]:
        return lambda *sizes, **kw: torch.full(_size(sizes), value)

    with contextlib.ExitStack() as stack:
        for name, new in {
            "rand": fill(0.1),
            "randperm": lambda count, **kw: torch.arange(count).roll(rank),
            "randn_like": lambda x, **kw: torch.sin(997 * x.detach()),
            "randint": lambda low, high, sizes, **kw: torch.full(_size([sizes]), 2),
        }.items():
            stack.enter_context(mock.patch.object(torch, name, new))
        uniform = lambda x, low=0.0, high=1.0, **kw: x.fill_(low + 0.7 * (high - low))  # noqa: E731
        stack.enter_context(mock.patch.object(Tensor, "uniform_", uniform))
        yield


def _size(sizes: tuple) -> list[int]:
    return list(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else list(sizes)


def make(name: str, seed: int = 0, **options: object) -> LossModule:
    """Make a loss. Equal seeds give equal parameters. ``options`` are those of its class."""
    torch.manual_seed(seed)
    loss = LOSSES[name](getattr(objectives, name), options)
    if name in _WITH_RETURNS:
        with contextlib.suppress(NotImplementedError):
            loss.make_value_estimator(gamma=0.9)
    return loss


def _actor_critic(kind: type, options: dict) -> LossModule:
    return kind(gaussian_actor(), state_action_value(), **options)


def _policy(kind: type, options: dict) -> LossModule:
    return kind(categorical_actor(), state_value(), **options)


def _q_actor() -> QValueActor:
    return QValueActor(
        mlp(OBSERVATION, ACTIONS), in_keys=["observation"], action_space="categorical"
    )


def _q_table() -> TensorDictModule:
    return TensorDictModule(
        mlp(OBSERVATION, ACTIONS), in_keys=["observation"], out_keys=["action_value"]
    )


def _quantiles() -> ValueOperator:
    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp(OBSERVATION + ACTION, 5)

        def forward(self, observation: Tensor, action: Tensor) -> Tensor:
            return self.layers(torch.cat([observation, action], -1))

    return ValueOperator(Critic(), in_keys=["observation", "action"])


def _agents(kind: type, options: dict) -> LossModule:
    actor = TensorDictModule(
        mlp(OBSERVATION, ACTIONS),
        in_keys=[("agents", "observation")],
        out_keys=[("agents", "logits")],
    )
    actor = ProbabilisticActor(
        actor,
        in_keys={"logits": ("agents", "logits")},
        out_keys=[("agents", "action")],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = TensorDictModule(
        mlp(OBSERVATION, 1),
        in_keys=[("agents", "observation")],
        out_keys=[("agents", "state_value")],
    )
    loss = kind(actor, critic, **options)
    loss.set_keys(
        action=("agents", "action"),
        value=("agents", "state_value"),
        sample_log_prob="action_log_prob",
    )
    return loss


def _mixer(kind: type, options: dict) -> LossModule:
    network = TensorDictModule(
        mlp(OBSERVATION, ACTIONS),
        in_keys=[("agents", "observation")],
        out_keys=[("agents", "action_value")],
    )
    names = ("action", "action_value", "chosen_action_value")
    choice = QValueModule(
        action_value_key=("agents", "action_value"),
        out_keys=[("agents", name) for name in names],
        action_space="categorical",
    )
    local = TensorDictSequential(network, choice)
    mixer = TensorDictModule(
        QMixer(state_shape=(OBSERVATION,), mixing_embed_dim=8, n_agents=AGENTS, device="cpu"),
        in_keys=[("agents", "chosen_action_value"), "observation"],
        out_keys=["chosen_action_value"],
    )
    loss = kind(local, mixer, action_space="categorical", **options)
    loss.set_keys(action_value=("agents", "action_value"), action=("agents", "action"))
    return loss


class _World(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(OBSERVATION, 2 + OBSERVATION)

    def forward(self, observation: Tensor) -> tuple[Tensor, ...]:
        out = self.layers(observation)
        return out[..., :1], out[..., 1:2], out[..., 2:], out[..., 2:4], observation[..., :2]


def _world(kind: type, options: dict) -> LossModule:
    world = TensorDictModule(
        _World(),
        in_keys=["observation"],
        out_keys=[
            ("next", "reward"),
            ("next", "done"),
            "reconstructed_observation",
            "predicted_latent",
            "target_latent",
        ],
    )
    losses = ["reward", "done", "reconstruction", "latent"]
    return kind(world, losses=losses, **options)


class _Chunks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(OBSERVATION, STEPS * ACTION + 6)

    def forward(self, observation: Tensor, chunk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        actions, mean, deviation = self.layers(observation).split([STEPS * ACTION, 3, 3], -1)
        return actions.unflatten(-1, (STEPS, ACTION)), mean, deviation


def _chunks(kind: type, options: dict) -> LossModule:
    names = ["observation", "action_chunk"]
    return kind(TensorDictModule(_Chunks(), names, ["action_pred", "mu", "log_var"]), **options)


def _distributional(kind: type, options: dict) -> LossModule:
    actor = DistributionalQValueActor(
        MLP(OBSERVATION, (4, ACTIONS), num_cells=[8]),
        in_keys=["observation"],
        support=torch.linspace(-1.0, 1.0, 4),
        action_space="one-hot",
    )
    return kind(actor, gamma=0.9, **options)


class _Judge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(OBSERVATION + ACTION, 1)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.layers(torch.cat([observation, action], -1)).sigmoid()


def _judge(kind: type, options: dict) -> LossModule:
    names = ["observation", "action"]
    return kind(TensorDictModule(_Judge(), names, ["d_logits"]), **options)


Build = Callable[[type, dict], LossModule]

LOSSES: dict[str, Build] = {
    "A2CLoss": _policy,
    "ACTLoss": _chunks,
    "BCLoss": lambda kind, o: kind(deterministic_actor(), **o),
    "CQLLoss": lambda kind, o: _actor_critic(
        kind, {"target_entropy": -2.0, "with_lagrange": True, **o}
    ),
    "ClipPPOLoss": lambda kind, o: _policy(kind, {"normalize_advantage": True, **o}),
    "CrossQLoss": lambda kind, o: _actor_critic(kind, {"target_entropy": -2.0, **o}),
    "DDPGLoss": lambda kind, o: kind(deterministic_actor(), state_action_value(), **o),
    "DQNLoss": lambda kind, o: kind(_q_actor(), action_space="categorical", **o),
    "DTLoss": lambda kind, o: kind(deterministic_actor(), **o),
    "DiffusionBCLoss": lambda kind, o: kind(
        DiffusionActor(
            action_dim=ACTION,
            obs_dim=OBSERVATION,
            num_steps=4,
            score_network=mlp(ACTION + OBSERVATION + 1, ACTION),
        ),
        **o,
    ),
    "DiscreteCQLLoss": lambda kind, o: kind(_q_actor(), action_space="categorical", **o),
    "DiscreteIQLLoss": lambda kind, o: kind(
        categorical_actor(), _q_value_of_state(), state_value(), action_space="categorical", **o
    ),
    "DiscreteSACLoss": lambda kind, o: kind(
        categorical_actor(),
        qvalue_network=_q_table(),
        num_actions=ACTIONS,
        action_space="categorical",
        target_entropy=1.0,
        **o,
    ),
    "DistributionalDQNLoss": _distributional,
    "GAILLoss": _judge,
    "IPPOLoss": _agents,
    "IQLLoss": lambda kind, o: kind(gaussian_actor(), state_action_value(), state_value(), **o),
    "KLPENPPOLoss": lambda kind, o: _policy(kind, {"increment": 1, "decrement": 1, **o}),
    "MAPPOLoss": _agents,
    "OnlineDTLoss": lambda kind, o: kind(gaussian_actor(), target_entropy=-2.0, **o),
    "PPOLoss": _policy,
    "QMixerLoss": _mixer,
    "REDQLoss": lambda kind, o: _actor_critic(
        kind, {"target_entropy": -2.0, "num_qvalue_nets": 3, "sub_sample_len": 2, **o}
    ),
    "RNDLoss": lambda kind, o: kind(mlp(OBSERVATION, 3), mlp(OBSERVATION, 3), **o),
    "ReinforceLoss": _policy,
    "SACLoss": lambda kind, o: _actor_critic(kind, {"target_entropy": -2.0, **o}),
    "TD3BCLoss": lambda kind, o: kind(
        deterministic_actor(), state_action_value(), bounds=(-1.0, 1.0), policy_noise=0.0, **o
    ),
    "TD3Loss": lambda kind, o: kind(
        deterministic_actor(), state_action_value(), bounds=(-1.0, 1.0), policy_noise=0.0, **o
    ),
    "TQCLoss": lambda kind, o: kind(
        gaussian_actor(), _quantiles(), num_qvalue_nets=2, target_entropy=-2.0, **o
    ),
    "WorldModelLoss": _world,
}


def _q_value_of_state() -> TensorDictModule:
    return TensorDictModule(
        mlp(OBSERVATION, ACTIONS), in_keys=["observation"], out_keys=["state_action_value"]
    )


_WITH_RETURNS = frozenset(LOSSES) - {
    "ACTLoss",
    "BCLoss",
    "DTLoss",
    "DiffusionBCLoss",
    "DistributionalDQNLoss",
    "GAILLoss",
    "OnlineDTLoss",
    "RNDLoss",
    "WorldModelLoss",
}
_DISCRETE = (
    "A2CLoss",
    "ClipPPOLoss",
    "DQNLoss",
    "DiscreteCQLLoss",
    "DiscreteIQLLoss",
    "DiscreteSACLoss",
    "KLPENPPOLoss",
    "PPOLoss",
    "ReinforceLoss",
)
_OF_TIME = ("A2CLoss", "ClipPPOLoss", "KLPENPPOLoss", "PPOLoss", "ReinforceLoss", "IPPOLoss")
_OF_TIME += ("MAPPOLoss",)


def batch_for(name: str, rows: int, seed: int = 1) -> TensorDict:
    """Make a batch for the loss called ``name``: ``[rows]``, or ``[rows, STEPS]`` over time."""
    random = torch.Generator().manual_seed(seed)
    shape = [rows, STEPS] if name in _OF_TIME else [rows]

    def normal(*last: int) -> Tensor:
        return torch.empty(*shape, *last).normal_(generator=random)

    def choice(*last: int) -> Tensor:
        return (normal(*last, ACTIONS)).argmax(-1)

    terminated = normal(1) < -1.2
    after = {
        "observation": normal(OBSERVATION),
        "reward": normal(1),
        "terminated": terminated,
        "truncated": torch.zeros_like(terminated),
        "done": terminated.clone(),
    }
    batch = {"observation": normal(OBSERVATION), "next": after}
    batch["action"] = choice() if name in _DISCRETE else normal(ACTION).tanh()
    if name == "DistributionalDQNLoss":
        batch["action"] = nn.functional.one_hot(choice(), ACTIONS)
    if name in _OF_TIME:
        batch["action_log_prob"] = normal() * 0.1 - 1.1
        batch["advantage"], batch["value_target"] = normal(1), normal(1)
        batch["logits"] = normal(ACTIONS)
    if name in ("IPPOLoss", "MAPPOLoss", "QMixerLoss"):
        after["agents"] = {"observation": normal(AGENTS, OBSERVATION)}
        batch["agents"] = {"observation": normal(AGENTS, OBSERVATION), "action": choice(AGENTS)}
        if name != "QMixerLoss":
            batch["action_log_prob"] = normal(AGENTS) * 0.1 - 1.1
            batch["advantage"], batch["value_target"] = normal(AGENTS, 1), normal(AGENTS, 1)
    batch["reward2go"] = normal(1)
    batch[("vla_action", "chunk")] = normal(STEPS, ACTION)
    batch["collector_action"], batch["collector_observation"] = normal(ACTION), normal(OBSERVATION)
    return TensorDict(batch, shape)


# The losses that most tests use: classes and their options.
NAMES = {
    "dqn": ("DQNLoss", {"delay_value": True, "double_dqn": True}),
    "sac": ("SACLoss", {}),
    "discrete_sac": ("DiscreteSACLoss", {}),
    "td3": ("TD3Loss", {"delay_actor": True}),
    "ddpg": ("DDPGLoss", {"delay_actor": True, "delay_value": True}),
    "ppo": ("ClipPPOLoss", {"normalize_advantage": False}),
    "a2c_vtrace": ("A2CLoss", {}),
}


def make_loss(name: str, seed: int = 0) -> LossModule:
    kind, options = NAMES[name]
    loss = make(kind, seed, **options)
    if name == "a2c_vtrace":
        loss.make_value_estimator(ValueEstimators.VTrace, gamma=0.9)
    return loss


def make_batch(name: str, rows: int, seed: int = 1) -> TensorDict:
    """Make ``[rows]`` transitions, or ``[rows, STEPS]`` if returns are computed over time."""
    random = torch.Generator().manual_seed(seed)
    shape = [rows, STEPS] if name in ("ppo", "a2c_vtrace") else [rows]

    def normal(*last: int) -> Tensor:
        return torch.randn(*shape, *last, generator=random)

    terminated = torch.rand(*shape, 1, generator=random) < 0.1
    following = TensorDict(
        {
            "observation": normal(OBSERVATION),
            "reward": normal(1),
            "terminated": terminated,
            "truncated": torch.zeros_like(terminated),
            "done": terminated.clone(),
        },
        shape,
    )
    batch = TensorDict({"observation": normal(OBSERVATION), "next": following}, shape)
    if name in ("sac", "td3", "ddpg"):
        batch["action"] = torch.tanh(normal(ACTION))
    else:
        batch["action"] = torch.randint(ACTIONS, shape, generator=random)
    if name in ("ppo", "a2c_vtrace"):
        batch["action_log_prob"] = -1.1 + 0.1 * normal()
    if name == "ppo":
        batch["advantage"], batch["value_target"] = normal(1), normal(1)
    return batch


def total(losses: TensorDict) -> Tensor:
    return sum(losses[key] for key in losses.keys() if key.startswith("loss_") or key == "loss")


def gradients(loss: LossModule) -> dict[str, Tensor]:
    """Copy the gradients, without parameters that have none."""
    return {n: p.grad.clone() for n, p in loss.named_parameters() if p.grad is not None}
