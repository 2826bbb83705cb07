"""Draws what a terminal showed, colours included, as an SVG without outside fonts.

tmux capture-pane -e -p -t SESSION | python -m scripts.make_terminal_picture TITLE docs/demo.svg
"""

import io
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 100
# rich's own frame, without the web font that it names.
FORMAT = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px;
line-height: {line_height}px; }} .{unique_id}-title {{ font-size: 18px; font-family: sans-serif; }}
{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}"
height="{terminal_height}"/></clipPath>{lines}</defs>
{chrome}<g transform="translate({terminal_x}, {terminal_y})"
clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


def main(title: str, picture: Path) -> None:
    """Read the screen from standard input and draw it."""
    console = Console(record=True, width=COLUMNS, force_terminal=True, file=io.StringIO())
    for line in sys.stdin.read().rstrip().splitlines():
        console.print(Text.from_ansi(line))
    picture.write_text(console.export_svg(title=title, code_format=FORMAT))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
