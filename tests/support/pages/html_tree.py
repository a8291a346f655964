"""A page as a tree of elements; checks that all tags are closed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "input"}


@dataclass
class Node:
    """One element."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[Node | str] = field(default_factory=list)

    def all(self, tag: str) -> Iterator[Node]:
        """Returns all descendants with the tag, in the order of the page."""
        for child in self.children:
            if isinstance(child, Node):
                if child.tag == tag or tag == "*":
                    yield child
                yield from child.all(tag)

    def one(self, tag: str) -> Node:
        (found,) = self.all(tag)
        return found

    def section(self, name: str) -> Node:
        """Returns the section with this id."""
        (found,) = (each for each in self.all("section") if each.attributes["id"] == name)
        return found

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Node("document")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"<{tag}> has an attribute twice: {names}"
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def html_tree(html: str) -> Node:
    """Parses a page; raises if a tag is not closed, or closed in the wrong order."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    (document,) = reader.open
    return document
