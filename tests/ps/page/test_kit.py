"""The rules of every template: what is escaped, what stays on one line, what a missing value does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from hubring.ps.page.kit.templating import Templates

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


def test_coordinates_have_two_digits_and_shares_a_sign(package: Package) -> None:
    made = package('<rect x="{{ x }}" y="{{ y }}" width="{{ x|share }}"/>')
    assert made.render("page.html", x=1 / 3, y=2.0) == '<rect x="0.33" y="2" width="33.33%"/>'


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
