"""A setting is declared once: flag, variable, key in TOML, help and page come from its field."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from msgspec import Struct

from hubring.ps.config import sources
from hubring.ps.config.declaration import checkpoint, cluster, data_path, debugging, declared_settings
from hubring.ps.config.sources import TABLES, load
from hubring.ps.config.terminal import CommandWithGroups, ConfigFile, options, takes
from hubring.ps.config.values import Count, Seconds

PAGE = Path(__file__).parents[3] / "deploy" / "SETTINGS.md"


class Oven(Struct, frozen=True, kw_only=True):
    """A sample of every kind of field."""

    lamp: Annotated[bool, debugging("light the lamp")] = False
    cake_count: Annotated[Count, cluster("cakes to bake")] = 3
    glaze: Annotated[Literal["sugar", "lemon"] | None, data_path("what goes on top", "the baker's")] = None
    extra: Annotated[tuple[str, ...], data_path("one more ingredient; repeatable")] = ()
    pause: Annotated[Seconds, checkpoint("seconds between looks")] = 60.0
    secret: Annotated[Path | None, debugging("the recipe", hidden=True)] = None


HELP = """\
Usage: bake [OPTIONS] [dough]

  Bake cakes.

Arguments:
  dough <str>

Cluster:
  --cake-count <int>  cakes to bake [default: 3]

Data path:
  --glaze <sugar|lemon>  what goes on top [default: the baker's]
  --extra <list[str]>    one more ingredient; repeatable

Checkpoint:
  --pause <float>  seconds between looks [default: 60]

Debugging:
  --lamp  light the lamp

Options:
  --config <path>  TOML file with the tables [server], [worker] and [submit]
  --help           Show this message and exit.
"""


def given(*words: str) -> dict[str, Any]:
    """What a command that takes the settings of the sample gets for these words."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    got: dict[str, Any] = {}

    @app.command(cls=CommandWithGroups)
    @takes(options(Oven))
    def bake(
        dough: Annotated[str | None, typer.Argument()] = None, config: ConfigFile = None, **flags: object
    ) -> None:
        """Bake cakes."""
        got.update(flags, dough=dough, config=config)

    app(list(words), prog_name="bake", standalone_mode=False)
    return got


def test_one_declaration_is_flag_variable_key_and_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "oven.toml"
    file.write_text("[oven]\ncake_count = 5\n")
    monkeypatch.setitem(TABLES, "oven", Oven)
    assert given("--cake-count", "5")["cake_count"] == 5
    assert load(Oven, {}, None, {"PS_CAKE_COUNT": "5"}) == Oven(cake_count=5)
    assert load(Oven, {}, file, {}) == Oven(cake_count=5)
    row = "| `--cake-count` | a whole number, at least 1 | 3 | cakes to bake |"
    assert row in "".join(sources.settings_rows(Oven))


def test_help_groups_flags_and_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    given("--help")
    assert capsys.readouterr().out == HELP


def test_a_flag_that_is_not_given_is_none() -> None:
    names = ["lamp", "cake_count", "glaze", "extra", "pause", "secret", "dough", "config"]
    assert given() == dict.fromkeys(names)


def test_a_given_flag_has_the_type_of_its_field() -> None:
    words = ["--lamp", "--glaze", "sugar", "--extra", "a", "--extra", "b", "--pause", "1", "--secret", "x"]
    expected = {"lamp": True, "glaze": "sugar", "extra": ["a", "b"], "pause": 1.0, "secret": Path("x")}
    assert {name: value for name, value in given(*words).items() if value is not None} == expected


def test_a_command_may_take_some_settings_of_a_config() -> None:
    assert [one.name for one in options(Oven, ["pause", "glaze"])] == ["glaze", "pause"]


@pytest.mark.parametrize("config", TABLES.values(), ids=TABLES)
def test_help_is_one_plain_line(config: type[Struct]) -> None:
    texts = [flag.help for _, flag in declared_settings(config)]
    assert [text for text in texts if not text or "\n" in text or "|" in text or text.endswith(".")] == []


def test_the_page_is_made_from_the_settings() -> None:
    assert PAGE.read_text() == sources.settings_page(), (
        "python -m hubring.ps.config.sources > deploy/SETTINGS.md"
    )
