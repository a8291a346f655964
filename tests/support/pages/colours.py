"""The colours of a page's style sheet, and their luminance."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from hubring.ps.page.kit.templating import style_sheet

Vector = NDArray[np.float64]
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> Vector:
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def themed(package: str, theme: str) -> str:
    """Returns the colours of one theme from a page's style sheet."""
    css, night = style_sheet(package), r"@media screen and \(prefers-color-scheme: dark\) \{.*?\n\}\n"
    return re.sub(night, "", css, flags=re.S) if theme == "light" else "".join(re.findall(night, css, re.S))
