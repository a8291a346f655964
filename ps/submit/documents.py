"""Writes YAML that every engine reads alike.

PyYAML writes the strings `1e3`, `0o17` and `y` without quotes; Kubernetes and Compose, with other YAML
versions, can read them as numbers or as true. This module therefore quotes every value that is a string.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

Document = Mapping[str, Any]


def dump(comment: Sequence[str], documents: Sequence[Document]) -> str:
    """Returns the documents as text, after the comment lines."""
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
    """Quotes strings except keys, and writes no YAML aliases."""

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
