"""Sphinx builds the site from this folder: see Contributing."""

from __future__ import annotations

import importlib
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import latex2mathml.converter
from docutils import nodes

import torchrl_dist

project = "torchrl_dist"
author = copyright = "The torchrl_dist authors"
version = release = torchrl_dist.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
nb_execution_mode = "off"  # notebooks show the outputs that they are stored with
nb_merge_streams = True
nb_code_prompt_show = "Show the code of this {type}"
nb_code_prompt_hide = "Hide it"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_math_renderer = "mathml"  # see setup
copybutton_exclude = ".linenos, .gp, .go"
templates_path = ["_templates"]
suppress_warnings = ["mystnb.unknown_mime_type"]

html_theme = "furo"
html_title = "torchrl_dist"
html_static_path = ["_static"]
html_css_files = ["narrow.css"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings give shapes, units and meaning
autodoc_class_signature = "separated"
napoleon_use_ivar = True
napoleon_custom_sections = [("Iterating raises", "params_style"), ("Warns", "params_style")]
maximum_signature_line_length = 80

INVENTORIES = {
    "python": "https://docs.python.org/3/",
    "numpy": "https://numpy.org/doc/stable/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "tensordict": "https://docs.pytorch.org/tensordict/stable/",
    "torchrl": "https://docs.pytorch.org/rl/stable/",
    "gymnasium": "https://gymnasium.farama.org/",
}


# The members on the page of each class. Others serve TorchRL or this package, or are inherited.
MEMBERS = {
    "RPCBatchedCollector": "closed, policy_version, update_policy_weights_, iterator, next, start, is_running, pause, async_shutdown, stats, set_seed, get_attr, set_attr, call, render, reset, state_dict, load_state_dict, shutdown",
    "CollectReport": "shares",
    "DistributedLoss": "no_sync, set_rows, check_drift, close",
    "Ranks": "is_first, exchange, any, on_first, sums, means, own, seed, report, all_reduce, add_up",
    "Rank": "state",
    "TrainedPolicy": "predict",
    "Session": "role, is_driver, of_role, check_peers, lost, lost_reason, pid_of, remote, call, submit, stop_requested, stop_signal, wait_stop, serve, barrier, on_leave, on_end, close",
    "Remote": "call, submit",
    "Peer": "name",
    "World": "one_node, starter, from_env",
    "ForkServer": "close",
    "SharedMemmapStorage": "limiter, limiter_counts, directory, close, shape, write_count, next_slot, generations_of, write_at, fill_once, empty, get",
    "SharedCursorWriter": "extend, write_at, generations_of",
    "SharedMaxValueWriter": "extend",
    "SharedReplayBuffer": "extend, add, sample, update_tensordict_priority, update_priority, update_if_present, stats, dumps, loads",
    "SharedOfflineToOnlineReplayBuffer": "sample, update_tensordict_priority",
    "SharedPrioritizedSampler": "alpha, beta, default_priority, sample, update_priority, mark_update",
    "SharedRandomSampler": "sample",
    "SharedSliceSampler": "sample, can_sample",
    "SharedPrioritizedSliceSampler": "sample",
    "HostedReplayBuffer": "flush, close, release",
    "ReplayOwner": "capacity, release",
    "RemoteStorage": "flush, close, counters, shape, write_count, next_slot, limiter, limiter_counts, write_at, empty, generations_of, get",
    "RPCPrioritizedSampler": "alpha, beta, default_priority, sample, update_priority, mark_update",
    "RPCRandomSampler": "sample",
    "RPCSamplerWithoutReplacement": "sample, can_sample",
    "RPCSliceSampler": "sample, can_sample",
    "RPCPrioritizedSliceSampler": "sample",
    "RateLimiter": "range, difference, missing_inserts, missing_samples, check_capacity, check_batch",
}
autosummary_context = {"shown": MEMBERS}


def answers(url: str) -> bool:
    """Without a network the site is built all the same, with fewer links."""
    try:
        with urllib.request.urlopen(f"{url}objects.inv", timeout=5) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


intersphinx_mapping = {}
if not tags.has("offline"):  # noqa: F821 (Sphinx gives it)
    with ThreadPoolExecutor(len(INVENTORIES)) as pool:
        reached = dict(zip(INVENTORIES, pool.map(answers, INVENTORIES.values()), strict=True))
    intersphinx_mapping = {name: (url, None) for name, url in INVENTORIES.items() if reached[name]}
intersphinx_timeout = 5


def exists(target: str) -> bool:
    """Whether an installed package has an object of that dotted name."""
    parts = target.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def keep_as_text(app: Any, env: Any, node: Any, contnode: nodes.Node) -> nodes.Node | None:
    """Keep a reference to another package as text if no inventory lists it but the name exists.

    Ours must be on the API page.
    """
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or target.startswith("torchrl_dist"):
        return None
    return contnode if exists(target) or exists(f"builtins.{target}") else None


def show_formula(translator: Any, node: nodes.Node) -> None:
    """Write a formula as MathML, which browsers show without a script from the network."""
    block = isinstance(node, nodes.math_block)
    markup = latex2mathml.converter.convert(node.astext(), display="block" if block else "inline")
    translator.body.append(f"<p>{markup}</p>" if block else markup)
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.connect("missing-reference", keep_as_text, priority=900)  # after intersphinx
    app.add_html_math_renderer("mathml", (show_formula, None), (show_formula, None))
