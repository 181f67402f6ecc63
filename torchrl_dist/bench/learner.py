"""How fast are the recipes' gradient steps, compared with the same arithmetic written by hand?

    torchrl-dist bench learner --json learner.jsonl

All peers train the same networks with the same settings, on the same random rows, in this process
with one thread. Each round measures all peers of a recipe in turn, and the table shows medians.
``ppo-2-ranks`` is measured in two other processes, which average their gradients (gloo).

- ``ours``: the update of the recipe.
- ``plain``: the same arithmetic in plain PyTorch, as one would write it for one algorithm.
- ``torchrl``: TorchRL's loss and target updater, as its own examples use them.
- ``compiled``: ``plain`` with ``torch.compile``. This needs a C++ compiler and takes minutes.

Updates: ``dqn`` and ``pixels`` (observations uint8 [4, 84, 84], the convolutions of Mnih et al.
2015) are double Q-learning with priorities. ``sac`` has two critics. One update of ``ppo`` learns
from a whole batch: it computes advantages, and then makes one gradient step per minibatch and
epoch. In ``ppo-2-ranks``, each rank learns from such a batch, and both ranks together normalize
their advantages, average their gradients and measure the divergence; ``torchrl`` only averages
gradients. ``vtrace`` is IMPALA's update, without the normalization of rewards.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional

from torchrl_dist.bench import command
from torchrl_dist.bench.results import append_json
from torchrl_dist.ui import show_table

PEERS = ("ours", "plain", "torchrl")
COMPILED = "compiled"
TWO_RANKS = "ppo-2-ranks"
_WARM_UP = 3
_TIMEOUT_S = 600.0  # limit for the processes that average their gradients

Update = Callable[[], Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and options to ``parser``."""
    command.describe(parser, __doc__, run)
    command.add_names(parser, "--recipes", RECIPES)
    text = f"measure {COMPILED}, too"
    parser.add_argument("--compiled", action="store_true", help=text)
    command.add_figures(parser, rounds=7, seconds=0.5)


def run(options: argparse.Namespace) -> int:
    """Measure, and print a table. Blocks for a minute.

    Returns:
        0; 130 or 143 after SIGINT or SIGTERM.

    Raises:
        ConfigurationError: a folder is missing.
    """
    from torchrl_dist.collect.loop.one_thread import torch_threads

    command.check_folders(options.json)
    lines: list[dict[str, Any]] = []

    def measure_all() -> int:
        for recipe in options.recipes:
            lines.extend(measure(recipe, options.rounds, options.seconds, options.compiled))
        return 0

    with torch_threads(1):
        status = command.until_stopped(measure_all)
    _print(lines)
    append_json(options.json, "learner", lines, seconds=options.seconds, rounds=options.rounds)
    return status


def measure(recipe: str, rounds: int, seconds: float, compiled: bool) -> list[dict[str, Any]]:
    """Return one line per peer, with the median time of an update."""
    if recipe == TWO_RANKS and not dist.is_initialized():
        return _on_two_ranks(recipe, rounds, seconds, compiled)
    torch.manual_seed(0)
    updates = RECIPES[recipe](compiled)
    for update in updates.values():
        for _ in range(_WARM_UP):
            update()
    found: dict[str, list[float]] = {peer: [] for peer in updates}
    peers = list(updates)
    for round_ in range(rounds):
        shift = round_ % len(peers)
        for peer in [*peers[shift:], *peers[:shift]]:
            found[peer].append(_time_of(updates[peer], seconds))
    ms = {peer: 1e3 * statistics.median(times) for peer, times in found.items()}
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return [
        {"recipe": recipe, "peer": peer, "ranks": ranks, "ms": ms[peer],
         "of_plain": ms["plain"] / ms[peer]}
        for peer in updates
    ]  # fmt: skip


def _time_of(update: Update, seconds: float) -> float:
    from torchrl_dist.learn import Ranks

    ranks, count, start = Ranks(), 0, time.perf_counter()
    while not ranks.any(time.perf_counter() - start > seconds):  # all ranks count alike
        update()
        count += 1
    return (time.perf_counter() - start) / count


def _on_two_ranks(*args: Any) -> list[dict[str, Any]]:
    """Call :func:`measure` on both ranks of a new process group, and return rank 0's lines."""
    from torchrl_dist.bench.processes import Launcher, on_ranks

    environment = {"GLOO_SOCKET_IFNAME": "lo", "RL_WARNINGS": "False"}
    with Launcher() as launcher, command.folder_in(Path(tempfile.gettempdir())) as folder:
        return launcher.run(
            on_ranks, 2, _TIMEOUT_S, _on_rank, str(folder), *args,
            folder=folder, timeout_s=_TIMEOUT_S, environment=environment,
        )  # fmt: skip


def _on_rank(rank: int, folder: str, *args: Any) -> list[dict[str, Any]]:
    """Join a process group of two ranks, and call :func:`measure`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )  # fmt: skip
    try:  # a rank that fails leaves the group, so that the other also fails instead of waiting
        return measure(*args)
    finally:
        dist.destroy_process_group()


def _print(lines: list[dict[str, Any]]) -> None:
    rows = [
        (line["recipe"], line["peer"], f"{line['ms']:.2f}", f"{line['of_plain']:.2f}")
        for line in lines
    ]
    show_table(
        "Gradient steps (one thread, medians)",
        ("update", "peer", "ms", "rate / plain"),
        rows,
        left=("update", "peer"),
    )


def _on(loss: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    return torch.compile(loss) if compiled else loss


def _average(weights: list[Tensor]) -> None:
    """Average the gradients over the ranks, as in CleanRL's ppo_atari_multigpu.py."""
    grads = [weight.grad for weight in weights if weight.grad is not None]
    flat = torch.cat([grad.view(-1) for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


def _normalized(advantage: Tensor) -> Tensor:
    """Subtract the mean over all ranks' rows, and divide by their standard deviation."""
    if not dist.is_initialized():
        return (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    sums = torch.stack([advantage.sum(), torch.tensor(float(advantage.numel()))])
    dist.all_reduce(sums)
    total, count = sums
    deviation = advantage - total / count
    squares = deviation.square().sum()
    dist.all_reduce(squares)
    return deviation / ((squares / (count - 1)).sqrt() + 1e-8)


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor, norm: float | None = None) -> None:
    optimizer.zero_grad()
    loss.backward()
    if dist.is_initialized():
        _average(optimizer.param_groups[0]["params"])
    if norm is not None:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], norm)
    optimizer.step()


def _compared(
    ours: Update, torchrl: Update, plain: Callable[[bool], Update], compiled: bool
) -> dict[str, Update]:
    """Return the peers' updates. ``plain(compiled)`` makes the update in plain PyTorch."""
    updates = {"ours": ours, "plain": plain(False), "torchrl": torchrl}
    return updates | ({COMPILED: plain(True)} if compiled else {})


def _transitions(rows: int, observation: Callable[[], Tensor], **more: Tensor) -> TensorDict:
    """Return random rows with the entries ``more``, such as the actions."""
    after = {
        "observation": observation(),
        "reward": torch.randn(rows, 1),
        "terminated": torch.rand(rows, 1) < 0.1,
        "done": torch.zeros(rows, 1, dtype=torch.bool),
    }
    return TensorDict({"observation": observation(), **more, "next": after}, [rows])


# ---- double Q-learning


def _dqn(compiled: bool, pixels: bool = False) -> dict[str, Update]:
    from torchrl_dist.bench import train_torchrl
    from torchrl_dist.recipes.apex import ApexConfig, dqn_learner
    from torchrl_dist.recipes.parts.environments import Images
    from torchrl_dist.recipes.parts.networks import QNetwork

    config = ApexConfig(hidden=(512,)) if pixels else ApexConfig()
    network = QNetwork(Images((4, 84, 84), 255.0) if pixels else 4, 2, config.hidden)
    rows = config.batch_size

    def observation() -> Tensor:
        if pixels:
            return torch.randint(0, 256, (rows, 4, 84, 84), dtype=torch.uint8)
        return torch.randn(rows, 4)

    batch = _transitions(
        rows,
        observation,
        action=torch.randint(2, (rows,)),
        priority_weight=torch.rand(rows),
        steps_to_next_obs=torch.randint(1, 4, (rows, 1)),
    )
    rate, norm, tau = config.learning_rate, config.max_grad_norm, config.target_tau
    ours = dqn_learner.DQNLearner(
        dqn_learner.DQNLoss(copy.deepcopy(network), config.gamma),
        learning_rate=rate,
        target_tau=tau,
        max_grad_norm=norm,
    )

    def plain(compiled: bool) -> Update:
        net, target = copy.deepcopy(network), copy.deepcopy(network).requires_grad_(False)
        weights: list[Tensor] = list(net.parameters())
        targets: list[Tensor] = list(target.parameters())
        optimizer = torch.optim.Adam(weights, lr=rate, fused=True)

        def loss_of(
            now: Tensor, action: Tensor, reward: Tensor, after: Tensor, ended: Tensor,
            steps: Tensor, weight: Tensor,
        ) -> tuple[Tensor, Tensor]:  # fmt: skip
            with torch.no_grad():
                best = net(after).argmax(1, keepdim=True)
                goal = reward + config.gamma**steps * target(after).gather(1, best) * ~ended
            value = net(now).gather(1, action[:, None])
            error = functional.smooth_l1_loss(value, goal, reduction="none").squeeze(1)
            return (error * weight).sum() / weight.sum(), (goal - value.detach()).abs()

        chosen = _on(loss_of, compiled)

        def update() -> None:
            after = batch["next"]
            loss, error = chosen(
                batch["observation"], batch["action"], after["reward"], after["observation"],
                after["terminated"], batch["steps_to_next_obs"], batch["priority_weight"],
            )  # fmt: skip
            _descend(optimizer, loss, norm)
            torch._foreach_lerp_(targets, weights, tau)
            batch["td_error"] = error

        return update

    def torchrl() -> Update:
        loss, target = train_torchrl.double_dqn(copy.deepcopy(network), config)
        optimizer = torch.optim.Adam(loss.parameters(), lr=rate)

        def update() -> None:
            _descend(optimizer, loss(batch)["loss"], norm)
            target.step()

        return update

    return _compared(lambda: ours.update(batch), torchrl(), plain, compiled)


# ---- soft actor-critic


def _sac(compiled: bool) -> dict[str, Update]:
    from torchrl_dist.bench import train_torchrl
    from torchrl_dist.recipes.parts.environments import look_at
    from torchrl_dist.recipes.parts.networks import PolicySpec
    from torchrl_dist.recipes.sac import SACConfig
    from torchrl_dist.recipes.sac import recipe as sac
    from torchrl_dist.recipes.sac.loss import SACLoss

    config = SACConfig()
    task = look_at(config.env, continuous="bounded")
    spec = PolicySpec.of(task, config.policy_kind, config.hidden)
    network: Any = spec.network()
    critics: list[nn.Module] = [sac.ActionValue(task, config.hidden) for _ in range(2)]
    rows, entropy = config.batch_size, sac.target_entropy(task)
    action = torch.rand(rows, len(task.action_low)) * 4 - 2
    batch = _transitions(rows, lambda: torch.randn(rows, task.observation_size), action=action)
    policy, own = copy.deepcopy(network), copy.deepcopy(critics)
    loss = SACLoss(policy, own, gamma=config.gamma, target_entropy=entropy)
    nothing: Any = SimpleNamespace()
    ours = sac.SAC(config, nothing, policy, loss, nothing, nothing, torch.device("cpu"))

    def plain(compiled: bool) -> Update:
        net, first, second = (copy.deepcopy(each) for each in (network, *critics))
        targets = [copy.deepcopy(each).requires_grad_(False) for each in critics]
        log_alpha = torch.zeros((), requires_grad=True)
        critic_weights: list[Tensor] = [*first.parameters(), *second.parameters()]
        target_weights: list[Tensor] = [w for each in targets for w in each.parameters()]
        rate = config.learning_rate
        optimizer = torch.optim.Adam(
            [*net.parameters(), *critic_weights, log_alpha], lr=rate, fused=True
        )

        def draw(seen: Tensor) -> tuple[Tensor, Tensor]:
            middle, scale = net(seen)
            raw = middle + scale * torch.randn_like(middle)
            squashed = 2 * (0.6931472 - raw - functional.softplus(-2 * raw))
            density = -(((raw - middle) / scale) ** 2) / 2 - scale.log() - 0.9189385 - squashed
            return raw.tanh() * (net.high - net.low) / 2 + (net.high + net.low) / 2, density.sum(-1)

        def loss_of(now: Tensor, action: Tensor, reward: Tensor, after: Tensor, ended: Tensor
                    ) -> Tensor:  # fmt: skip
            alpha = log_alpha.detach().exp()
            with torch.no_grad():
                later, density = draw(after)
                value = torch.min(*(each(after, later) for each in targets))
                goal = reward + config.gamma * ~ended * (value - alpha * density[:, None])
            total = functional.mse_loss(first(now, action), goal)
            total = total + functional.mse_loss(second(now, action), goal)
            drawn, density = draw(now)
            for weight in critic_weights:
                weight.requires_grad_(False)
            value = torch.min(first(now, drawn), second(now, drawn)).squeeze(-1)
            for weight in critic_weights:
                weight.requires_grad_(True)
            total = total + (alpha * density - value).mean()
            return total - log_alpha * (density.detach().mean() + entropy)

        chosen = _on(loss_of, compiled)

        def update() -> None:
            after = batch["next"]
            _descend(optimizer, chosen(
                batch["observation"], batch["action"], after["reward"], after["observation"],
                after["terminated"],
            ))  # fmt: skip
            torch._foreach_lerp_(target_weights, critic_weights, config.target_tau)

        return update

    theirs = train_torchrl.SAC(config, task, spec)
    return _compared(lambda: ours._update(batch), lambda: theirs.update(batch), plain, compiled)


# ---- policy gradients


def _rollout(envs: int, steps: int) -> TensorDict:
    done = torch.rand(envs, steps, 1) < 0.02
    return TensorDict(
        {
            "observation": torch.randn(envs, steps, 4),
            "action": torch.randint(2, (envs, steps)),
            "action_log_prob": torch.full((envs, steps), -0.6931472),
            "policy_version": torch.zeros(envs, steps, dtype=torch.int64),
            "next": {
                "observation": torch.randn(envs, steps, 4),
                "reward": torch.ones(envs, steps, 1),
                "done": done,
                "terminated": done,
            },
        },
        [envs, steps],
    )


def _policy_gradient(recipe: str, compiled: bool) -> dict[str, Update]:
    from torchrl_dist.bench import train_torchrl
    from torchrl_dist.recipes.ddppo import DDPPOConfig
    from torchrl_dist.recipes.ddppo import recipe as ddppo
    from torchrl_dist.recipes.impala import ImpalaConfig
    from torchrl_dist.recipes.impala import recipe as impala
    from torchrl_dist.recipes.parts.actor_critic import A2CLoss, PPOLoss
    from torchrl_dist.recipes.parts.environments import look_at
    from torchrl_dist.recipes.parts.networks import PolicySpec, ValueNetwork
    from torchrl_dist.recipes.training.loop import Start

    config: Any = DDPPOConfig(learners=1)
    if recipe == "vtrace":
        config = ImpalaConfig(normalize_rewards=False)
    task = look_at(config.env, continuous="none")
    spec = PolicySpec.of(task, config.policy_kind, config.hidden)
    network: Any = spec.network()
    critic = ValueNetwork(task.inputs, config.hidden)
    steps = config.frames_per_batch // config.envs_per_collector
    data = _rollout(config.envs_per_collector, steps)
    stub: Any = SimpleNamespace(
        policy_version=0, update_policy_weights_=lambda: None,
        frames_per_batch=config.frames_per_batch,
    )  # fmt: skip
    own, value = copy.deepcopy(network), copy.deepcopy(critic)
    coefs = {"entropy_coef": config.entropy_coef, "critic_coef": config.critic_coef}
    cpu = torch.device("cpu")
    if recipe == "ppo":
        from torchrl_dist.learn import DistributedLoss

        loss: Any = DistributedLoss(PPOLoss(own, value, clip=config.clip, **coefs))
        ours: Any = ddppo.DDPPO(config, own, value, loss, stub, cpu, Start(), loss.ranks)
    else:
        loss = A2CLoss(own, value, **coefs)
        ours = impala.Impala(config, own, value, loss, stub, cpu, Start())

    def plain(compiled: bool) -> Update:
        net, judge = copy.deepcopy(network), copy.deepcopy(critic)
        weights = [*net.parameters(), *judge.parameters()]
        optimizer = torch.optim.Adam(
            weights, lr=config.learning_rate, eps=1e-5, betas=ours.betas, fused=True
        )

        def loss_of(now: Tensor, action: Tensor, before: Tensor, advantage: Tensor, goal: Tensor
                    ) -> tuple[Tensor, Tensor]:  # fmt: skip
            logits = net(now).log_softmax(-1)
            density = logits.gather(1, action[:, None]).squeeze(1)
            change = density - before
            if recipe == "ppo":
                ratio = change.exp()
                clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
                gain = torch.min(ratio * advantage, clipped * advantage).mean()
            else:
                gain = (density * advantage).mean()
            bonus = -(logits.exp() * logits).sum(-1).mean()
            error = functional.mse_loss(judge(now).squeeze(-1), goal)
            total = config.critic_coef * error - gain - config.entropy_coef * bonus
            return total, -change.detach().mean()

        chosen = _on(loss_of, compiled)

        def update() -> None:
            after = data["next"]
            now, action, before = data["observation"], data["action"], data["action_log_prob"]
            with torch.no_grad():
                here, there = judge(now).squeeze(-1), judge(after["observation"]).squeeze(-1)
                alive, on = ~after["terminated"].squeeze(-1), ~after["done"].squeeze(-1)
                reward = after["reward"].squeeze(-1)
                trace = config.gamma * on
                error = reward + config.gamma * alive * there - here
                if recipe == "ppo":
                    trace = trace * config.gae_lambda
                else:
                    density = net(now).log_softmax(-1).gather(-1, action[..., None]).squeeze(-1)
                    ratio = (density - before).exp()
                    rho = ratio.clamp(max=config.rho_bar)
                    error, trace = rho * error, trace * ratio.clamp(max=config.c_bar)
                sums, later = torch.empty_like(error), torch.zeros_like(error[:, 0])
                for step in reversed(range(error.shape[1])):
                    later = error[:, step] + trace[:, step] * later
                    sums[:, step] = later
                goal = here + sums
                if recipe == "ppo":
                    advantage = _normalized(sums)
                else:
                    following = torch.cat([goal[:, 1:], there[:, -1:]], 1)
                    following = torch.where(on, following, there)
                    advantage = rho * (reward + config.gamma * alive * following - here)
            flat = [x.flatten(0, 1) for x in (now, action, before, advantage, goal)]
            if recipe != "ppo":
                _descend(optimizer, chosen(*flat)[0], config.max_grad_norm)
                return
            for _ in range(config.epochs):
                for rows in torch.randperm(len(flat[0])).tensor_split(config.minibatches):
                    total, divergence = chosen(*(x[rows] for x in flat))
                    _descend(optimizer, total, config.max_grad_norm)
            if dist.is_initialized():
                dist.all_reduce(divergence)
            float(divergence)  # the recipe also computes this number, for its report

        return update

    theirs: Any = train_torchrl.LEARNERS[config.recipe](config, task, spec)
    if dist.is_initialized():
        theirs.optimizer.register_step_pre_hook(
            lambda optimizer, *_: _average(optimizer.param_groups[0]["params"])
        )
    return _compared(
        lambda: ours.learn(data.clone(False), 0), lambda: theirs.learn(data.clone(False), 0),
        plain, compiled,
    )  # fmt: skip


RECIPES: dict[str, Callable[[bool], dict[str, Update]]] = {
    "dqn": _dqn,
    "pixels": lambda compiled: _dqn(compiled, pixels=True),
    "sac": _sac,
    "ppo": lambda compiled: _policy_gradient("ppo", compiled),
    TWO_RANKS: lambda compiled: _policy_gradient("ppo", compiled),
    "vtrace": lambda compiled: _policy_gradient("vtrace", compiled),
}
