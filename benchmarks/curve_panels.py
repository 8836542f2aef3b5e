"""The picture of loss curves on several numbers of ranks, for a page in light or dark: a column for
each trainer, its curves above, and below how far each is from that of one rank.
"""

import io
from pathlib import Path

from PIL import Image

WIDTHS = (6.0, 3.2, 1.2)  # of lines: those that are one stay visible as three


class CurvePanels:
    """Two rows of panels. `columns` has the upper and the lower panel of each column."""

    def __init__(self, count: int, *, height: float, font: int, dark: bool) -> None:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt

        self.ink, self._paper = ("#e6edf3", "#0d1117") if dark else ("#1f2328", "#ffffff")
        light_colours = ("#0969da", "#d1570a", "#1a7f37")
        self.colours = ("#58a6ff", "#f0883e", "#3fb950") if dark else light_colours
        plt.rcParams.update(
            {"font.size": font, "text.color": self.ink, "axes.labelcolor": self.ink}
        )
        self._figure, panels = plt.subplots(
            2, count, figsize=(13, height), sharex=True, sharey="row", height_ratios=(3, 2)
        )
        self._figure.set_facecolor(self._paper)
        for panel in panels.flat:
            panel.set_facecolor(self._paper)
            panel.tick_params(colors=self.ink)
            panel.spines[["top", "right"]].set_visible(False)
            panel.spines[["left", "bottom"]].set_color(self.ink)
        self.columns = panels.T

    def save(self, place: Path, *, dpi: int) -> None:
        """Write a PNG of few colours."""
        import matplotlib.pyplot as plt

        self._figure.tight_layout()
        drawn = io.BytesIO()
        self._figure.savefig(drawn, dpi=dpi, facecolor=self._paper)
        plt.close(self._figure)
        Image.open(drawn).convert("RGB").quantize(64).save(place, optimize=True)
