"""Figures inside a page: SVG by matplotlib, each an image with its content in the address, so that nothing is loaded.

An SVG that is shown as an image runs no script and loads nothing, whatever text the figure holds.
"""

import base64
import html
import io
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from poly_epo_jax.report.figures import STYLE, lay_out

_PIXELS_PER_INCH = 96
_SVG: dict[Any, Any] = {
    "svg.fonttype": "none",  # text as text, a tenth of the size of outlines
    "svg.hashsalt": "poly_epo_jax",  # the same figure is the same bytes
    "font.family": ["DejaVu Sans", "sans-serif"],  # laid out in the first, the widest of common fonts
}


def image(figure: Figure, text: str) -> str:
    """HTML of the figure at its size in inches.

    Args:
      text: what the figure shows, for those who do not see it.
    """
    file = io.BytesIO()
    with matplotlib.rc_context(STYLE | _SVG):
        lay_out(figure)
        figure.savefig(file, format="svg", metadata={"Date": None})
    width, height = (round(inches * _PIXELS_PER_INCH) for inches in figure.get_size_inches())
    data = base64.b64encode(file.getvalue()).decode()
    return (
        f'<div class="wide"><img class="figure" width="{width}" height="{height}" alt="{html.escape(text)}" '
        f'src="data:image/svg+xml;base64,{data}"></div>'
    )
