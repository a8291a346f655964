"""What the page can do to a job: three buttons behind one token."""

from __future__ import annotations

from typing import NamedTuple

from hubring.ps.markup import Html, element
from hubring.ps.page.table import headed


class Action(NamedTuple):
    """One button.

    Attributes:
        path: Where its form is sent.
        label: What is written on it.
        effect: What it brings about.
        sure: What is asked before; empty: nothing.
    """

    path: str
    label: str
    effect: str
    sure: str = ""


ACTIONS = (
    Action("/checkpoint", "Write a checkpoint", "Of the next step that all shards reach; training goes on."),
    Action(
        "/drain",
        "Drain",
        "Every worker finishes its step and leaves, a checkpoint is written, and the server ends.",
        "Drain? Every worker leaves after its step, and then the server ends.",
    ),
    Action(
        "/end",
        "End the job",
        "For everyone and at once, in the midst of a step: its last work may not be saved.",
        "End the job for everyone, at once, in the midst of a step?",
    ),
)


def controls(refreshing: bool) -> Html:
    """The form, which nothing replaces while somebody types.

    Args:
        refreshing: A browser without JavaScript loads the page again and again, and would lose the token:
            such a page has the form only where a script shows it, and a link to one that stays.
    """
    token = element(
        "p",
        element("label", "Token", for_="token"),
        element(
            "input",
            id="token",
            name="token",
            type="password",
            autocomplete="off",
            required=True,
            aria_describedby="token-said",
        ),
        element("small", "as ps-server start shows it after #token=", id="token-said"),
    )
    form = element(
        "form",
        token,
        element("ul", *(element("li", *_button(each)) for each in ACTIONS)),
        element("p", id="answer", role="status"),
        id="actions",
        method="post",
        action=ACTIONS[0].path,
        hidden=refreshing,
    )
    link = element("a", "Hold this page still", href="/?still=1#controls")
    still = element("noscript", element("p", link, " to type the token: it loads itself again and again."))
    return headed("controls", "Controls", still if refreshing else None, form)


def _button(action: Action) -> tuple[Html, Html]:
    name = action.path[1:]
    button = element(
        "button",
        action.label,
        formaction=action.path,
        aria_describedby=f"{name}-effect",
        data_sure=action.sure or None,
    )
    return button, element("span", action.effect, id=f"{name}-effect")
