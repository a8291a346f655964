"""The rules of every template, and colours that can be told from their paper."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from hubring.ps.page.kit.templating import Templates
from tests.support.pages.colours import TO_XYZ, linear, themed

Package = Callable[[str], Templates]


@pytest.fixture(params=["folder", "link"])
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Package:
    """Makes a package with one template, `page.html`, in a folder or behind a relative link to one."""

    def make(text: str) -> Templates:
        folder = tmp_path / ("leaflet" if request.param == "folder" else "elsewhere")
        (folder / "templates").mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "templates" / "page.html").write_text(text)
        if request.param == "link":
            (tmp_path / "leaflet").symlink_to("elsewhere")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "leaflet", raising=False)
        return Templates("leaflet")

    return make


def test_text_is_escaped_and_markup_is_not(package: Package) -> None:
    made = package(
        "{% macro b(x) %}<b>{{ x }}</b>{% endmacro %}<p title='{{ x }}'>{{ b(x) }}{{ b(x) ~ x }}</p>"
    )
    text = "&lt;i&gt; &amp; &#34;"
    assert made.render("page.html", x='<i> & "') == (
        f"<p title='{text}'><b>{text}</b><b>{text}</b>{text}</p>"
    )


def test_a_number_and_its_unit_stay_on_one_line_but_not_in_what_is_copied(package: Package) -> None:
    made = package("<p>{{ x }}</p><pre>{{ x|e }}</pre>")
    assert made.render("page.html", x="5 ms, 3 % and 2 workers") == (
        "<p>5\u00a0ms, 3\u00a0% and 2 workers</p><pre>5 ms, 3 % and 2 workers</pre>"
    )


def test_a_line_break_beside_a_tag_is_nothing_and_a_space_elsewhere(package: Package) -> None:
    made = package("<p>\n  one\n  {{ x }}\n  {% if x %}\n    <b>two</b> three\n  {% endif %}\n</p>\n")
    assert made.render("page.html", x="a\n b") == "<p>one a\n b<b>two</b> three</p>"


def test_a_value_that_is_missing_is_an_error(package: Package) -> None:
    with pytest.raises(UndefinedError, match="'absent' is undefined"):
        package("<p>{{ absent }}</p>").render("page.html")


def test_a_page_finds_the_kits_templates(package: Package) -> None:
    made = package('{% extends "base.html" %}{% block body %}<p>here</p>{% endblock %}').render("page.html")
    assert made.startswith("<!doctype html>")
    assert made.endswith("<body><p>here</p></body></html>")


WORDS = ("ink", "soft", "good", "held", "bad", "calm", "gone", "accent")


def colours(theme: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", themed("hubring.ps.page", theme)))


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("paper", ["paper", "raised"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_word_can_be_read_on_its_paper(theme: str, paper: str, name: str) -> None:
    found = {each: float((TO_XYZ @ linear(value))[1]) for each, value in colours(theme).items()}
    low, high = sorted((found[paper], found[name]))
    assert (high + 0.05) / (low + 0.05) >= 4.5
