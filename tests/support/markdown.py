"""The repository's pages, taken apart: links, anchors and fenced blocks."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = ("deploy", "ps", "tests", "workers")
PAGES = sorted([*ROOT.glob("*.md"), *(page for each in FOLDERS for page in (ROOT / each).rglob("*.md"))])

_FENCED = re.compile(r"(?ms)^ *```(\w*)[^\n]*\n(.*?)^ *```$")
_CODE = re.compile(r"(?s)(`+)(?:(?!\n\n).)+?\1")
_LINK = re.compile(
    r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|^\[[^\]]+\]:\s*(\S+)|(?:src|href|srcset)=\"([^\"]+)\"", re.M
)
_HEADING = re.compile(r"(?m)^#{1,6} +(.+?)(?: +#+)?$")
_NAMED = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")


class Block(NamedTuple):
    """One fenced block of a page."""

    language: str
    line: int
    code: str


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page; `line` is that of the fence."""
    text = page.read_text()
    for found in _FENCED.finditer(text):
        yield Block(found[1], text.count("\n", 0, found.start()) + 1, found[2])


def links(page: Path) -> list[str]:
    """The targets of all links and pictures that are not in code."""
    text = _CODE.sub("", _FENCED.sub("", page.read_text()))
    return [next(filter(None, found.groups())) for found in _LINK.finditer(text)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them, and those that the page itself names."""
    text = _FENCED.sub("", page.read_text())
    seen: Counter[str] = Counter()
    found = set(_NAMED.findall(text))
    for heading in _HEADING.findall(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of a shell block; of a console block only lines with a prompt count."""
    lines = block.code.replace("\\\n", " ").splitlines()
    prompts = block.language == "console"
    assert not prompts or any(line.startswith("$ ") for line in lines), f"no prompt: {block}"
    unfinished = ""
    for line in lines:
        if prompts and not unfinished:
            if not line.startswith("$ "):
                continue
            line = line.removeprefix("$ ")
        lexer = shlex.shlex(unfinished + line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        try:
            found = [*lexer]
        except ValueError:  # a quotation goes on in the next line
            unfinished += f"{line}\n"
            continue
        unfinished = ""
        words: list[str] = []
        for word in [*found, ";"]:
            if word and set(word) <= set("();|&"):
                yield words
                words = []
            else:
                words.append(word)
    assert not unfinished, f"an unclosed quotation: {block}"
