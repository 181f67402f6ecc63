"""Replay buffers that many processes share.

The invariants, the code that guards each invariant, and the tests (``tests/replay``) that try to
break it:

=========================================  ====================================  ================
invariant                                  guard                                 tests
=========================================  ====================================  ================
a slot has one writer                      tickets and claims, ``cursor``        processes, kills
a process reads only whole rows            versions, compared after the copy:    torn
                                           ``storage.read_rows``
a row is read as before or after a patch   versions, and a count of patches:     patches
                                           ``patches.copied``
no process samples a row that is too old   bounds under the lock, at             retire,
                                           publication and in ``repair``:        contracts
                                           ``times_sampled.retire``
the best rows of all processes stay        choice and write under one lock,      ranking
                                           ``ranking.keep_best``
a row has the frames it was written with   marks and claims, ``frames``          frames
a slice is read as a whole, in one shard   ``storage.read_rows``; numbers of     slices,
                                           steps over hosts, ``slices``          contracts
a window has the rows around its anchor    numbers of rows, ``numbers``; one     windows,
                                           copy of their order, ``windows``      contracts
a priority goes to its own row only [1]_   generations, ``priorities.update``    buffer, law,
                                                                                 hosted
only published rows count and are drawn    four rules at the top of              kills, int64
                                           ``directory``
a killed process does no harm              ``DIRTY`` and ``cursor.repair``; a    kills, soak,
                                           lock that dies with its holder        interrupts
the tree's sums are sums of its leaves     marks in ``tree``                     tree, kills
draws and weights are as in one buffer     ``tree``, ``sampler``; over shards    law, shard_law,
                                           ``shard_law``                         shard_hosts
a row is drawn at most once per pass       one counter per shard, ``passes``     passes,
                                                                                 contracts
an element keeps its second coordinate     whole lines in ``cursor`` and         contracts
                                           ``split_rows``, ``dimensions``
RPC calls run in order, each once          one call under way, none repeated:    link, host,
                                           ``remote_link``                       hosted
samples per insert stay in their range     ``limiter``; ``gate`` on a node,      limiter, gate,
                                           ``totals_gate`` over hosts            limiter_hosts
a kill leaves the old or new checkpoint    one rename, ``disk``; the ring's      checkpoint,
                                           order, ``snapshot``                   checkpoint_shards
all invariants, in any order of calls      a plain model                         fuzz
=========================================  ====================================  ================

.. [1] If the C kernel was built, its ``replay_update`` compares generations. Over hosts, the client
   sends the generations to the host. If a call names only slots, generations are looked up
   among the rows that this process drew or wrote (``sampler.RecentGenerations``). Priorities of
   slots that are not found there are set without a check, and counted as ``unverified_updates``.
"""

from torchrl_dist.replay.hosts.buffer import HostedReplayBuffer, replay_buffer
from torchrl_dist.replay.hosts.owner import ReplayOwner, host_replay
from torchrl_dist.replay.hosts.samplers import (
    RPCPrioritizedSampler,
    RPCPrioritizedSliceSampler,
    RPCRandomSampler,
    RPCSamplerWithoutReplacement,
    RPCSliceSampler,
)
from torchrl_dist.replay.hosts.storage import RemoteStorage
from torchrl_dist.replay.law.limiter import RateLimiter
from torchrl_dist.replay.parts.buffer import SharedReplayBuffer
from torchrl_dist.replay.parts.offline import SharedOfflineToOnlineReplayBuffer
from torchrl_dist.replay.parts.passes import SharedSamplerWithoutReplacement
from torchrl_dist.replay.parts.sampler import (
    SharedPrioritizedSampler,
    SharedRandomSampler,
    anneal_beta,
)
from torchrl_dist.replay.parts.slices import SharedPrioritizedSliceSampler, SharedSliceSampler
from torchrl_dist.replay.parts.storage import SharedMemmapStorage
from torchrl_dist.replay.parts.writer import SharedCursorWriter, SharedMaxValueWriter

__all__ = [
    "HostedReplayBuffer",
    "RPCPrioritizedSampler",
    "RPCPrioritizedSliceSampler",
    "RPCRandomSampler",
    "RPCSamplerWithoutReplacement",
    "RPCSliceSampler",
    "RateLimiter",
    "RemoteStorage",
    "ReplayOwner",
    "SharedCursorWriter",
    "SharedMaxValueWriter",
    "SharedMemmapStorage",
    "SharedOfflineToOnlineReplayBuffer",
    "SharedPrioritizedSampler",
    "SharedPrioritizedSliceSampler",
    "SharedRandomSampler",
    "SharedReplayBuffer",
    "SharedSamplerWithoutReplacement",
    "SharedSliceSampler",
    "anneal_beta",
    "host_replay",
    "replay_buffer",
]
