"""Shared parts of the pictures: one palette, boxes and arrows as SVG, charts by matplotlib.

All pictures are drawn on white. In dark mode, the site inverts the lightness of the
pictures and keeps the hues. All colors therefore have a medium lightness, and nothing is
shown by color only. Pages show the pictures with a width of 690 pixels. This is 0.69 of the
width of pictures that consist of boxes.
"""

from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
DATA = HERE / "data"
INK, FAINT, PAPER = "#1b1f24", "#5f6772", "#ffffff"
BLUE, ORANGE, GREEN, GREY = "#2a6fb0", "#c8570b", "#1d8a66", "#7a828c"
PURPLE = "#8e6bbf"
# Fills behind text, the same hues.
PALE = {BLUE: "#dbe9f6", ORANGE: "#fbe5d3", GREEN: "#d8efe6", GREY: "#eceef1"}
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, 'DejaVu Sans Mono', monospace"


class Picture:
    """A picture of boxes, words and arrows, with its origin in the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, color: str = GREY
    ) -> None:
        """Draw a box with a frame of the same color."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'rx="6" fill="{PALE[color]}" stroke="{color}" stroke-width="1.5"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 14,
        color: str = INK,
        anchor: str = "middle",
        mono: bool = False,
        bold: bool = False,
    ) -> None:
        """Draw one line of text with its baseline at y."""
        font = f' font-family="{MONO}"' if mono else ""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" '
            f'text-anchor="{anchor}"{font}{weight}>{escape(words)}</text>'
        )

    def line(
        self,
        *points: tuple[float, float],
        color: str = INK,
        arrow: bool = False,
        dashed: bool = False,
        width: float = 1.8,
    ) -> None:
        """Draw a line through points, with or without an arrowhead at its end."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        more = ' marker-end="url(#head)"' if arrow else ""
        more += ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" '
            f'stroke-width="{width}"{more}/>'
        )

    def save(self, name: str, folder: Path = HERE) -> None:
        """Write the picture to a file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" '
            f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="{FONT}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n"
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" '
            'markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
            f'<path d="M0 0L10 5L0 10z" fill="{INK}"/></marker></defs>\n'
            f'<rect width="{self.width}" height="{self.height}" fill="{PAPER}"/>\n'
        )
        (folder / name).write_text(head + "\n".join(self.parts) + "\n</svg>\n")


def heading(picture: Picture, second: str = "") -> None:
    """Draw the title, which states the finding, and one line that explains the picture."""
    picture.text(24, 36, picture.title, 24, anchor="start", bold=True)
    if second:
        picture.text(24, 64, second, 17, FAINT, anchor="start")


def machine(about: dict) -> str:
    """Return the machine and the date of a measurement."""
    torch = about["torch"].partition("+")[0]
    threads = f"{about['threads']} thread{'s' * (about['threads'] > 1)}"
    return f"{about['name']}, {threads}, torch {torch}, {about['date']}"


def chart(title: str, second: str, width: float, height: float, columns: int = 1):
    """Return a figure and its axes, in the palette."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "optimi_func",  # the same file for the same numbers
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "figure.facecolor": PAPER,
        "font.size": 12,
    }
    plt.rcParams.update(settings)
    figure, axes = plt.subplots(
        1, columns, figsize=(width, height), layout="constrained", squeeze=False
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    figure.text(0.01, 0.012, second, fontsize=10, color=FAINT)
    line = 0.19 / height
    below = line * (1 + second.count("\n")) + 0.02
    figure.get_layout_engine().set(rect=(0, below, 1, 0.98 - below))
    return figure, axes[0]


def save(figure, name: str, folder: Path = HERE) -> None:
    """Write a chart, without the date on which it was drawn."""
    import matplotlib.pyplot as plt

    figure.savefig(folder / name, metadata={"Date": None})
    plt.close(figure)
    # Fonts by kind, as the boxes have them: whoever reads it has some of these.
    text = (folder / name).read_text().replace("'DejaVu Sans', sans-serif", FONT)
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    (folder / name).write_text(text)
