"""The report of an experiment as one self-contained HTML page."""

from hubring.workers.compare.page.document import page

__all__ = ["page"]
