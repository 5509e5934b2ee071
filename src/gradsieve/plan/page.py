"""A plan as one self-contained HTML file: the table, and a plot drawn as SVG."""

import html
import math
from typing import TYPE_CHECKING

from gradsieve.plan.ways import Sieved, Way

if TYPE_CHECKING:
    from gradsieve.plan.outcome import Plan

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 860, 420, 70, 20, 20, 50
SLOWEST, FASTEST, POINTS = 1e6, 4e11, 60  # bits per second of the plot
COLOURS = {"plain DDP": "#50565f", "fp16 hook": "#a87200", "gradients": "#d55e00", "weights": "#0072b2"}
OTHER = "#00855f"  # PowerSGD
DASHES = ("", "7 4", "2 4", "12 4 2 4")

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>gradsieve plan</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 900px; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: .2rem .7rem; border-bottom: 1px solid #8884; }}
th:first-child, td:first-child {{ text-align: left; }}
tr.best {{ font-weight: bold; }}
svg {{ width: 100%; height: auto; }}
svg text {{ font: 12px system-ui, sans-serif; fill: currentColor; }}
.grid {{ stroke: #8884; }}
.scroll {{ overflow-x: auto; }}
code {{ font-size: 90%; }}
</style>
</head>
<body>
<h1>gradsieve plan</h1>
<p>{head}.</p>
<p><strong>Use {recommendation}.</strong>{call}</p>
{plot}
<div class="scroll"><table>
{rows}
</table></div>
<p>"Wins below" is the bandwidth under which a way is faster than plain DDP. {notes}</p>
</body>
</html>
"""


def page(plan: "Plan") -> str:
    """The text of the HTML file."""
    heads, *rows = plan.table()
    best = plan.best.name
    lines = [_row("th", heads, ""), *(_row("td", row, ' class="best"' if row[0] == best else "") for row in rows)]
    call = f" <code>{html.escape(plan.best.call)}</code>" if plan.best.call else ""
    return _PAGE.format(
        head=html.escape(plan.head),
        recommendation=html.escape(plan.recommendation),
        call=call,
        plot=plot(plan),
        rows="\n".join(lines),
        notes=html.escape(" ".join(plan.notes)),
    )


def plot(plan: "Plan") -> str:
    """Plot milliseconds per step against bandwidth, both logarithmic; a line per way that exchanges every step."""
    ways = [way for way in plan.ways if not isinstance(way, Sieved) or way.every == 1]
    ratio = (FASTEST / SLOWEST) ** (1 / POINTS)
    rates = [SLOWEST * ratio**point for point in range(POINTS + 1)]
    curves = {way.name: [way.step(plan.link.at(bits)) * 1e3 for bits in rates] for way in ways}
    low = 10 ** math.floor(math.log10(min(map(min, curves.values()))))
    high = 10 ** math.ceil(math.log10(max(map(max, curves.values()))))

    def x(bits: float) -> float:
        share = math.log(bits / SLOWEST) / math.log(FASTEST / SLOWEST)
        return LEFT + min(max(share, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    def y(ms: float) -> float:
        return HEIGHT - BOTTOM - math.log(ms / low) / math.log(high / low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 20 * -(-len(ways) // 3)}" role="img">']
    parts.append("<title>bandwidth against milliseconds per step</title>")
    parts += [_upright(x(10.0**p), _rate_name(p)) for p in range(6, 12)]
    parts += [_level(y(10.0**p), f"{10**p:,}") for p in range(round(math.log10(low)), round(math.log10(high)) + 1)]
    parts.append(
        f'<line x1="{x(plan.link.bits):.1f}" x2="{x(plan.link.bits):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"'
    )
    parts.append('stroke="currentColor" stroke-dasharray="3 3"><title>this network</title></line>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">bandwidth per worker</text>')
    parts.append(f'<text x="14" y="{HEIGHT / 2}" transform="rotate(-90 14 {HEIGHT / 2})"')
    parts.append('text-anchor="middle">ms per step</text>')
    for place, way in enumerate(ways):
        points = " ".join(f"{x(b):.1f},{y(ms):.1f}" for b, ms in zip(rates, curves[way.name], strict=True))
        parts.append(_line(points, way, plan, place))
    return "\n".join([*parts, "</svg>"])


def _line(points: str, way: Way, plan: "Plan", place: int) -> str:
    densities = list(dict.fromkeys(each.density for each in plan.ways if isinstance(each, Sieved)))
    dash = DASHES[densities.index(way.density) % len(DASHES)] if isinstance(way, Sieved) else ""
    width = 1.2 if isinstance(way, Sieved) and way.delay else 2.2
    look = f'fill="none" stroke="{COLOURS.get(way.family, OTHER)}" stroke-width="{width}" stroke-dasharray="{dash}"'
    left, top = LEFT + place % 3 * 260, HEIGHT + 20 * (place // 3)
    name = html.escape(way.name)
    curve = f'<polyline points="{points}" {look}><title>{name}</title></polyline>'
    sample = f'<polyline points="{left},{top} {left + 34},{top}" {look}/>'
    return f'{curve}{sample}<text x="{left + 42}" y="{top + 4}">{name}</text>'


def _upright(place: float, text: str) -> str:
    line = f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    return f'{line}<text x="{place:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{text}</text>'


def _level(place: float, text: str) -> str:
    line = f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>'
    return f'{line}<text x="{LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{text}</text>'


def _rate_name(power: int) -> str:
    return f"{10 ** (power % 3)} {'MG'[power // 3 - 2]}bit/s"


def _row(tag: str, cells: tuple[str, ...], attributes: str) -> str:
    return f"<tr{attributes}>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
