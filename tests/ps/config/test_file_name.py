"""The content of a file where its name is expected, as in `PS_TOKEN_FILE="$(cat F)"`, is never repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hubring.ps import cli
from hubring.ps.config import terminal
from hubring.ps.config.sources import load_server, load_worker, worker_origins
from hubring.ps.config.values import address, file_name_objection
from hubring.ps.core.errors import ConfigError
from hubring.ps.security.certificate import make_certificate
from hubring.ps.security.token_file import draw_tokens
from hubring.workers.programs import ps_worker

MARK = "0123456789abcdef" * 4
"""In each secret."""

LINE = f"hubring:worker:{MARK}:{MARK}"
CONTENTS = {
    "a token": LINE,
    "all tokens": "\n".join(map(str, draw_tokens(MARK).values())),
    "a key": f"-----BEGIN PRIVATE KEY-----\n{MARK}\n-----END PRIVATE KEY-----\n",
    "some lines": f"the token {MARK}\nof the page",
    "a long text": MARK * 5,
}
FILES = ("token_file", "page_token_file", "tls_cert", "tls_key", "tls_ca")
contents = pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)


@contents
@pytest.mark.parametrize("name", FILES)
def test_no_source_of_a_setting_repeats_it(tmp_path: Path, content: str, name: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f"[server]\n{name} = '''{content}'''\n")
    sources: list[tuple[str, tuple[Any, ...]]] = [
        (f"--{name.replace('_', '-')} ...", ({name: content}, None, {})),
        (f"--{name.replace('_', '-')} ...", ({name: Path(content)}, None, {})),
        (f"PS_{name.upper()}='...' in the environment", ({}, None, {f"PS_{name.upper()}": content})),
        (f"{name} = '...' in {file} [server]", ({}, file, {})),
    ]
    for place, given in sources:
        with pytest.raises(ConfigError) as refusal:
            load_server(*given)
        assert str(refusal.value).startswith(f"{place}: the value, which is not repeated here, ")
        assert "pass the name of the file" in str(refusal.value)
        assert MARK not in str(refusal.value)


@contents
@pytest.mark.parametrize("variable", ["PS_TOKEN_FILE", "PS_CONFIG", "PS_INSECURE", "PS_SERVER"])
def test_no_variable_repeats_a_token(content: str, variable: str) -> None:
    if variable in ("PS_INSECURE", "PS_SERVER") and not content.startswith(("hubring:", "-----BEGIN")):
        return  # such a text is no secret there
    with pytest.raises(ConfigError) as refusal:
        load_worker({}, None, {variable: content})
    assert MARK not in str(refusal.value)
    if variable in ("PS_INSECURE", "PS_SERVER"):
        assert MARK not in "".join(worker_origins({}, None, {variable: content}).values())


COMMANDS = [
    (cli, ["status", "127.0.0.1:1", "--token-file"]),
    (cli, ["checkpoint", "127.0.0.1:1", "--tls-key"]),
    (cli, ["health", "127.0.0.1:1", "--tls-cert"]),
    (cli, ["token", "show", "--token-file"]),
    (cli, ["token", "show", "--output"]),
    (cli, ["token", "rotate", "127.0.0.1:1", "--token-file"]),
    (cli, ["token", "new"]),
    (cli, ["start", "--page-token-file"]),
    (cli, ["start", "--config"]),
    (cli, ["doctor", "--token-file"]),
    (ps_worker, ["--token-file"]),
]


@contents
@pytest.mark.parametrize(("program", "words"), COMMANDS, ids=[" ".join(words) for _, words in COMMANDS])
def test_no_command_line_repeats_it(
    program: Any, words: list[str], content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if words[-1] == "new" and content.startswith("-"):
        return  # an option of that name does not exist
    with pytest.raises(SystemExit) as ended:
        terminal.run(program.app, "ps-server", [*words, content])
    said = "".join(capsys.readouterr())
    assert ended.value.code == 2
    assert "the value, which is not repeated here, " in said
    assert MARK not in said


@pytest.mark.parametrize("words", [["status", "127.0.0.1:1"], ["token", "show"]])
def test_a_variable_of_a_command_is_named(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PS_TOKEN_FILE", LINE)
    with pytest.raises(SystemExit):
        terminal.run(cli.app, "ps-server", words)
    said = "".join(capsys.readouterr())
    assert "Invalid value for --token-file or PS_TOKEN_FILE: the value, which" in said
    assert MARK not in said


def test_an_address_is_not_repeated_if_it_is_a_token() -> None:
    with pytest.raises(ConfigError, match=r"address '\.\.\.': expected HOST:PORT"):
        address(LINE)


@pytest.mark.parametrize(
    "name", ["tokens", "/run/secrets/hubring/tokens", "a" * 255, "/".join(["a" * 200] * 20), "ö", "a:b"]
)
def test_names_of_files_are_no_contents(name: str) -> None:
    assert file_name_objection(name) == ""


def test_keys_and_certificates_as_they_are_made_are_contents() -> None:
    own = make_certificate()
    assert file_name_objection(own.key.decode())
    assert file_name_objection(own.certificate.decode())
