"""Figures inside a page: SVG by matplotlib, each an image with its content in a data: URL, so that nothing is loaded.

An SVG that is shown as an image runs no script and loads nothing, whatever text the figure contains.
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
    "svg.fonttype": "none",  # text stays text, which takes a tenth of the size of outlines
    "svg.hashsalt": "poly_epo_jax",  # the same figure gives the same bytes
    "font.family": ["DejaVu Sans", "sans-serif"],  # the layout uses the first, the widest of the common fonts
}


def image(figure: Figure, text: str) -> str:
    """HTML of the figure at its size in inches.

    Args:
      text: what the figure shows, for readers who cannot see it.
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
