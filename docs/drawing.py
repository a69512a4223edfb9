"""Boxes, arrows and text as SVG, in the reader's color scheme. ``docs.make_diagrams`` uses it."""

from __future__ import annotations

from xml.sax.saxutils import escape

#: Text and background, then the boxes' kinds: light, dark.
COLORS = {
    "text": ("#1f2328", "#e6edf3"),
    "faint": ("#57606a", "#a3abb5"),
    "background": ("#ffffff", "#15191f"),
    "line": ("#57606a", "#a3abb5"),
    "empty": ("#eef1f4", "#262c34"),
    "blue": ("#cfe3ff", "#1d4777"),
    "green": ("#c8ecd0", "#1d5533"),
    "amber": ("#ffe2ad", "#664700"),
    "pink": ("#f9d3e3", "#682848"),
}
FONT_PX = 13
SMALL_PX = 10
#: Of a character, as a share of the font's size: that of DejaVu Sans, one of the widest.
CHARACTER = 0.58


class Drawing:
    """One diagram. Places are pixels from the top left."""

    def __init__(self, title: str, description: str, width: int, height: int) -> None:
        self.title, self.description = title, description
        self.width, self.height = width, height
        self._parts: list[str] = []
        #: x of the left and the right end, y, the words.
        self.texts: list[tuple[float, float, float, str]] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str, words: str = "") -> None:
        """Draw a rectangle of a kind of ``COLORS`` with words in its middle."""
        size = SMALL_PX if height < 20 or width < 26 else FONT_PX
        self._parts.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"/>'
        )
        if words:
            self.text(x + width / 2, y + height / 2 + size * 0.36, words, size=size)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "middle",
        kind: str = "text",
        size: int = FONT_PX,
    ) -> None:
        """Write words on the base line ``y``; ``anchor``: where ``x`` is in them, ``start``, "
        "``middle``, ``end``."""
        length = CHARACTER * size * len(words)
        left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * length
        self.texts.append((left, left + length, y, words))
        self._parts.append(
            f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
            f"{escape(words)}</text>"
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, is_dashed: bool = False) -> None:
        """Draw a line with an arrowhead at its second end."""
        self._line(x1, y1, x2, y2, 'class="line" marker-end="url(#head)"', is_dashed)

    def line(self, x1: float, y1: float, x2: float, y2: float, *, is_dashed: bool = False) -> None:
        """Draw a line without arrowheads."""
        self._line(x1, y1, x2, y2, 'class="line"', is_dashed)

    def _line(self, x1: float, y1: float, x2: float, y2: float, what: str, is_dashed: bool) -> None:
        dashes = ' stroke-dasharray="4 3"' if is_dashed else ""
        self._parts.append(f'<path {what}{dashes} d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>')

    def __str__(self) -> str:
        size = f'width="{self.width}" height="{self.height}"'
        head = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" {size}',
            'role="img" aria-labelledby="title description">',
            f'<title id="title">{escape(self.title)}</title>',
            f'<desc id="description">{escape(self.description)}</desc>',
            f"<style>{_style()}</style>",
            f'<marker id="head" {head}><path class="head" d="M0 0L8 4L0 8z"/></marker>',
            f'<rect class="background" {size} rx="6"/>',
            *self._parts,
            "</svg>",
        ]
        return "\n".join([*parts, ""])


def _style() -> str:
    light, dark = (_rules(scheme) for scheme in (0, 1))
    return (
        "text { font-family: system-ui, sans-serif } path.line { fill: none; stroke-width: 1.4 }\n"
        f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"
    )


def _rules(scheme: int) -> str:
    fills = [f"rect.{kind} {{ fill: {both[scheme]} }}" for kind, both in COLORS.items()]
    texts = [f"text.{kind} {{ fill: {COLORS[kind][scheme]} }}" for kind in ("text", "faint")]
    line = COLORS["line"][scheme]
    strokes = [f".line {{ stroke: {line} }} .head {{ fill: {line} }} rect.empty {{ stroke: {line} }}"]
    return "\n".join([*fills, *texts, *strokes])
