"""``python -m torchrl_dist`` runs the command ``torchrl-dist``."""

from __future__ import annotations

from .cli import console

if __name__ == "__main__":
    console()
