"""Shared by the status page and the comparison report: templates, charts, number formats, a style sheet."""
