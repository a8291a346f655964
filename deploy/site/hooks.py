"""MkDocs hooks: the site's pages are the Markdown files of the whole repository, and not of one folder."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

SITE = Path(__file__).parent
ROOT = SITE.parent.parent
FOLDERS = ("deploy", "ps", "workers")

LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
WHOLE = re.compile(r"(?<![\w-])(?:--[a-z][\w-]*|ps-[a-z]+)(?![^<]*>)")  # outside of tags
CODE = re.compile(r"(?ms)(^ *```.*?^ *```$|`[^`\n]+`)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds all pages and pictures that are next to the code."""
    found = [*ROOT.glob("*.md")]
    for folder in FOLDERS:
        found += [*(ROOT / folder).rglob("*.md"), *(ROOT / folder).glob("images/*")]
    for path in sorted(path for path in found if SITE not in path.parents):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Removes links to files that the site has not, such as sources, and keeps their text."""
    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(lambda link: _resolved(link, page, files), part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Marks flags and programs, which site.css keeps whole."""
    return WHOLE.sub(r'<span class="whole">\g<0></span>', html)


def _resolved(link: re.Match[str], page: Page, files: Files) -> str:
    text, target = link.groups()
    path = target.partition("#")[0]
    if not path or ":" in path:  # an anchor of this page, or a URL
        return link[0]
    name = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), path))
    return link[0] if name in files.src_uris else text
