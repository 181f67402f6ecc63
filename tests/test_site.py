"""The site builds without a warning or a network, has every public name, and its links resolve."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "tutorials"
DEMANDS = SOURCES / "reference" / "demands.md"
PACKAGES = (
    "torchrl_dist",
    *(f"torchrl_dist.{p}" for p in ("replay", "collect", "learn", "runtime")),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = "-W -n --keep-going -q -t offline".split()
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *build, str(SOURCES), str(folder)],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_public_name_is_on_an_api_page(site: Path) -> None:
    packed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    inventory = zlib.decompress(packed).decode()
    described = {line.split()[0] for line in inventory.splitlines() if " py:" in line}
    names = {name: package for package in PACKAGES[::-1] for name in public(package)}
    missing = {f"{package}.{name}" for name, package in names.items()} - described
    assert not missing, f"put them on a page in tutorials/api: {missing}"


def test_pages_need_no_network_and_code_can_be_copied(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r"<(?:script|img)[^>]* src=\"https?:", text), page
    formulas = (site / "reference/concepts.html").read_text()
    assert "<math" in formulas and "\\epsilon" not in formulas
    assert "copybutton.js" in (site / "index.html").read_text()


def public(package: str) -> set[str]:
    return set(importlib.import_module(package).__all__) - {"__version__"}


class Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.ids |= {found[key] for key in ("id", "name") if found.get(key)}
        self.links |= {found[key] for key in ("href", "src") if found.get(key)}


def test_links_between_pages_and_their_anchors_resolve(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 30
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[target].ids if target in pages else None
            if not target.exists() or (
                parts.fragment and anchors and parts.fragment not in anchors
            ):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken, broken


@pytest.mark.parametrize("page", ["README.md", ".github/CONTRIBUTING.md"])
def test_links_of_pages_outside_the_site_resolve(page: str) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
        assert (ROOT / page).parent.joinpath(link).exists(), link


# ---- demands


def test_no_demand_is_missing_from_the_table() -> None:
    sections = DEMANDS.read_text().split("\n## ")[1:]
    numbers = [[int(n) for n in re.findall(r"^\| (\d+) \|", s, re.M)] for s in sections]
    assert numbers == [list(range(1, n + 1)) for n in (13, 10, 5, 7, 6)]


def test_tests_and_pages_that_show_a_demand_exist() -> None:
    from torchrl_dist.cli import main

    rows = re.findall(r"^\| \d+ \| .* \| (.*) \|$", DEMANDS.read_text(), re.M)
    commands = set()
    for shown in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", shown)
        parts = re.findall(r"\]\(\.\./(\S+)\) \*(.+?)\*(?=,|$)", shown)
        benches = re.findall(r"`torchrl-dist ([\w ]+)`", shown)
        assert (
            len(tests) + len(parts) + len(benches) == shown.count(", `") + shown.count(", [") + 1
        ), f"not understood: {shown}"
        for file, name in tests:
            functions = ast.walk(ast.parse((ROOT / file).read_text()))
            assert name in {f.name for f in functions if isinstance(f, ast.FunctionDef)}, name
        for file, heading in parts:
            assert heading in headings(SOURCES / file), heading
        commands |= set(benches)
    for command in commands:
        assert main([*command.split(), "--help"]) == 0, command


def headings(path: Path) -> set[str]:
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return set(re.findall(r"^#+ (.*)$", text, re.M))
