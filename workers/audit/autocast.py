"""Whether a script uses autocast."""

from __future__ import annotations

from typing import Any

from torch.amp.autocast_mode import autocast


class AutocastWatch:
    """Notes from now on whether this process enters autocast.

    Autocast rounds each rank's part of a batch by itself, so a single process with the whole batch gets other
    gradients by right. torch has no hook for it, so this wraps the method that enters it.

    Attributes:
        seen: Whether it was entered.
    """

    def __init__(self) -> None:
        self.seen = False
        enter: Any = autocast.__enter__
        self._enter = enter

        def noting(context: autocast) -> Any:
            self.seen = self.seen or bool(getattr(context, "_enabled", True))
            return enter(context)

        autocast.__enter__ = noting  # type: ignore[method-assign]

    def close(self) -> None:
        """Watches no longer."""
        autocast.__enter__ = self._enter  # type: ignore[method-assign]
