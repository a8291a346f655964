"""YAML as the engines read it.

Kubernetes and Compose read another YAML than PyYAML writes: `1e3`, `0o17` or `y` are
plain text to the one and a number or true to the other. So every value that is
text is written in double quotes, and means the same to all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

Document = Mapping[str, Any]


def dump(comment: Sequence[str], documents: Sequence[Document]) -> str:
    """Text of these documents, in order, behind lines of comment."""
    head = "".join(f"# {line}\n" for line in comment)
    body = yaml.dump_all(
        documents,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=sys.maxsize,
        default_flow_style=False,
    )
    return head + body


class _Dumper(yaml.SafeDumper):
    """Quotes text but for the keys, which are ours; writes what occurs twice twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        for key, _ in node.value:
            key.style = None
        return node


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')


_Dumper.add_representer(str, _quoted)
