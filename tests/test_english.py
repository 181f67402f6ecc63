"""Text is in plain English: no process is a person, and words have their ordinary meaning.

The rules are in ``.github/CONTRIBUTING.md``, "Write plainly". Two of them can be checked by
pattern, in docstrings, comments, strings of three words or more, names of tests, and Markdown.

``python -m tests.test_english PATH ...`` prints what is found in these files and folders.
"""

from __future__ import annotations

import bisect
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PERSONS = "users?|anyone|people|persons?|readers?|contributors?|maintainers?|authors?|colleagues?"
# Before "is to": what an instruction is, not what a thing must do.
STEPS = (
    "aim|goal|purpose|idea|point|way|cure|remedy|fix|solution|alternative|choice|step|trick|rule"
)
# What matches a pattern, and what the text should say. All whitespace in the text is one space.
PATTERNS = {
    r"(?i:\b(?:no|some|every|any)body\b)": "no process, a process, all processes",
    r"(?i:\bwhoever\b|\bwhom\b|\bfor who\b)": "the process that",
    rf"(?i:(?<!\w)(?!(?:{PERSONS})\b)\w+,? who\b|(?:^|[^\w, ] ?)who\b)": "which, that, it",
    r"\b(?:he|him|himself|his)\b": "it, its",
    r"(?i:\bfor ever\b)": "indefinitely",
    r"(?i:\bbeside\b)": "next to, in addition to",
    r"(?i:\bbut for\b)": "except",
    r"(?<!there )(?<!There )\b(?:is|are|was|were) none\b(?! of)": "is not ...",
    r"(?<!there )(?<!There )\b(?:is|are|was|were) no "
    r"(?!longer\b|more than\b|(?:larger|smaller|greater|better|worse|faster|slower)\b)(?=\w)": (
        "is not a ..."
    ),
    rf"(?<!\w)(?!(?:{STEPS}) )\w+ (?:is|are|was|were) to (?!the\b|an?\b|say\b)(?=[a-z])": "must",
    r"(?i:\bso many\b)(?!(?: \w+)? that\b)": "that many, this many",
    r"(?i:\bgiv(?:e|es|ing|en)[ -](?:\w+ )?back\b|\bgave (?:\w+ )?back\b)": "return, release",
    r"(?i:\bas ever\b)": "as before",
    r"(?i:\bof before\b)": "earlier",
    r"(?i:\bin the place of\b)": "instead of",
    r"(?i:\bhas it that\b)": "says",
}
# Finds that may stay: the file, and the words around the find.
ALLOWED = {
    (".github/CONTRIBUTING.md", 'never "who" or "nobody"'),
    (".github/CONTRIBUTING.md", 'not "for ever"'),
    (".github/CONTRIBUTING.md", 'not "beside"'),
    (".github/CONTRIBUTING.md", 'not "is to"'),
    # in a picture that is stored with the notebook
    ("tutorials/1_one_buffer_for_all_ranks.ipynb", "who wrote which slot"),
    # a name that the table of demands has
    ("tests/runtime/test_local.py", "names whom it waited for"),
    # a heading that the table of demands names
    ("tutorials/5_does_a_receive_deadline_pay.ipynb", "## Who is in the data?"),
    ("tutorials/reference/demands.md", "*Who is in the data?*"),
}


class Find(NamedTuple):
    path: str
    line: int
    words: str
    better: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.words!r}, better: {self.better}"


class Flow:
    """Text of several lines as one line, in which each place knows its line of the file."""

    def __init__(self, lines: Iterable[tuple[int, str]]) -> None:
        self._starts: list[int] = []
        self._numbers: list[int] = []
        self.text = ""
        for number, line in lines:
            self._starts.append(len(self.text))
            self._numbers.append(number)
            words = " ".join(line.split())
            self.text += f"{words} " if words else "| "  # a paragraph ends

    def line_of(self, place: int) -> int:
        return self._numbers[bisect.bisect_right(self._starts, place) - 1]


def finds_in(path: str, flows: Iterable[Flow]) -> Iterator[Find]:
    allowed = [words for file, words in ALLOWED if file == path]
    for flow in flows:
        spans = [m.span() for words in allowed for m in re.finditer(re.escape(words), flow.text)]
        for pattern, better in PATTERNS.items():
            for match in re.finditer(pattern, flow.text):
                start, end = match.span()
                if not any(first <= start and end <= last for first, last in spans):
                    words = flow.text[max(0, start - 20) : end + 20].strip()
                    yield Find(path, flow.line_of(end - 1), words, better)


# ---- what the text of a file is


def flows_of(path: Path) -> Iterator[Flow]:
    text = path.read_text()
    if path.suffix == ".py":
        yield from python(text.splitlines())
    elif path.suffix == ".md":
        yield markdown(enumerate(text.splitlines(), 1))
    elif path.suffix == ".c":
        for comment in re.finditer(r"/\*.*?\*/|//.*", text, re.S):
            first = text.count("\n", 0, comment.start()) + 1
            yield Flow(enumerate(re.sub(r"(?m)^\s*\*|/\*|\*/", "", comment[0]).splitlines(), first))
    else:
        yield from notebook(text)


def markdown(lines: Iterable[tuple[int, str]]) -> Flow:
    return Flow((number, re.sub(r"\]\([^)]*\)", "]", line)) for number, line in lines)


def notebook(text: str) -> Iterator[Flow]:
    """Markdown, and comments and strings of code. Each line of a cell is a line of the file."""
    stored = enumerate(text.splitlines(), 1)
    for cell in json.loads(text)["cells"]:
        lines = []
        for line in cell["source"]:
            quoted = {json.dumps(line, ensure_ascii=ascii_) for ascii_ in (True, False)}
            number = next(n for n, raw in stored if raw.strip().rstrip(",") in quoted)
            lines.append((number, line.rstrip("\n")))
        if cell["cell_type"] == "markdown":
            yield markdown(lines)
        elif lines:
            code = ["" if re.match(r"\s*(%|!|\w+ = !)", line) else line for _, line in lines]
            yield from python(code, lines[0][0])


def python(lines: list[str], first: int = 1) -> Iterator[Flow]:
    """Comments, strings (those that Python joins are one text), and names of tests."""
    comment: list[tuple[int, str]] = []
    string: list[tuple[int, str]] = []
    inside = 0  # of how many f-strings, for which Python 3.12 and newer have several tokens
    before = ""
    for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
        kind, number = tokenize.tok_name[token.type], token.start[0] + first - 1
        if kind == "COMMENT":
            own_line = lines[token.start[0] - 1].strip() == token.string
            if not (own_line and comment and comment[-1][0] == number - 1):
                yield Flow(comment)
                comment = []
            comment.append((number, token.string.lstrip("#: ")))
        elif kind in ("STRING", "FSTRING_MIDDLE"):
            quotes = r"^\w*(\"{3}|'{3}|\"|')|(\"{3}|'{3}|\"|')$" if kind == "STRING" else r"^\b$"
            for offset, line in enumerate(re.sub(quotes, "", token.string).split("\n")):
                string.append((number + offset, line.replace("\\n", " | ")))
        elif kind in ("FSTRING_START", "FSTRING_END"):
            inside += 1 if kind == "FSTRING_START" else -1
        elif kind != "NL" and not inside and string:
            yield from of_three_words(string)
            string = []
        if before == "def" and token.string.startswith("test_"):
            yield Flow([(number, token.string.replace("_", " "))])
        before = token.string
    yield Flow(comment)
    yield from of_three_words(string)


def of_three_words(string: list[tuple[int, str]]) -> Iterator[Flow]:
    """Shorter ones are keys and names."""
    flow = Flow(string)
    if flow.text.count(" ") >= 3:
        yield flow


# ---- which files there are


def part_of(path: str) -> str:
    """The folder of a file whose texts are checked by one test."""
    if path.endswith(".ipynb"):
        return "tutorials/*.ipynb"
    folders = path.split("/")[:-1]
    return "/".join(folders[: 2 if folders[:1] == ["torchrl_dist"] else 1]) or "."


def files_below(path: Path) -> list[str]:
    found = [path] if path.is_file() else path.rglob("*")
    names = [file.resolve().relative_to(ROOT).as_posix() for file in found]
    return sorted(
        name
        for name in names
        if name.endswith((".py", ".md", ".c", ".ipynb")) and name != "tests/test_english.py"
    )


def all_files() -> list[str]:
    roots = ("README.md", ".github", "torchrl_dist", "tests", "tutorials")
    return [name for root in roots for name in files_below(ROOT / root)]


PARTS = sorted({part_of(path) for path in all_files()})


@pytest.mark.parametrize("part", PARTS)
def test_text_is_plain(part: str) -> None:
    files = [path for path in all_files() if part_of(path) == part]
    found = [str(find) for path in files for find in finds_in(path, flows_of(ROOT / path))]
    assert not found, "\n".join(["rewrite these, or add them to ALLOWED:", *found])


def test_exceptions_are_still_needed() -> None:
    for path, words in ALLOWED:
        texts = [flow.text for flow in flows_of(ROOT / path)]
        assert any(words in text for text in texts), f"remove from ALLOWED: {path}, {words!r}"


SAMPLE = '''
"""Called inside. Who enters
later, gets an error."""
def test_nobody_waits():  # two
    raise ValueError(f"{x} is the host: "  # between
                     f"so it stays for "
                     "ever")
# these rows are
# no numbers
KEY = "beside"
'''


def test_finds_name_their_lines() -> None:
    found = list(finds_in("sample.py", python(SAMPLE.splitlines())))
    assert sorted((find.line, find.better) for find in found) == [
        (2, "which, that, it"),
        (4, "no process, a process, all processes"),
        (7, "indefinitely"),
        (9, "is not a ..."),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "one process, whoever it is",
        "the process who waits",
        "who waits, is told",
        "one file (who wrote it)",
        "rows are none",
        "The row is no tensor",
        "the lock is to be held",
        "by so many rows",
        "the slot is given back",
        "it gives them back",
        "it has it that",
        "his slot",
    ],
)
def test_odd_english_is_found(text: str) -> None:
    assert list(finds_in("page.md", [Flow([(1, text)])]))


@pytest.mark.parametrize(
    "text",
    [
        "users who wait",
        "as told by the user, who waits",
        "the process whose rows these are",
        "there is none, and there is no file",
        "it is no longer there",
        "the aim is to wait",
        "the slot is to the left",
        "so many rows that it fails",
        "the answer is no.",
        "if `x` is None",
    ],
)
def test_plain_english_is_not_found(text: str) -> None:
    assert not list(finds_in("page.md", [Flow([(1, text)])]))


def main(paths: list[str]) -> int:
    files = [name for path in paths for name in files_below(Path(path))] or all_files()
    found = [find for path in files for find in finds_in(path, flows_of(ROOT / path))]
    print(*found, f"{len(found)} finds in {len(files)} files", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
