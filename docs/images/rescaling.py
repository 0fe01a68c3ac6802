"""Draws rescaling.svg, the picture at the top of the README: ``python docs/images/rescaling.py``.

The network is one unit, y = u · relu(v x₁ + w x₂). Where the unit is active it computes a x₁ + b x₂
with the slopes a = u v and b = u w, so functions are points of a plane, and the loss is the
squared distance from a goal. Both networks start at the same point. Gradient descent is computed
for both, with the same learning rate and number of steps.
"""

import math
from pathlib import Path

Weights = tuple[float, float, float]

START: Weights = (0.12, 0.7, 2.6)  # u, v, w
GOAL = (1.15, 0.55)
RATE, STEPS = 0.08, 40
LEFT, TOP, SIZE = 452, 50, 240
SPAN = (-0.08, 1.5)  # of a; b has the same scale


def rescaled(weights: Weights) -> Weights:
    """Weights in × λ and the weight out ÷ λ, where the criterion is least: there u² = v² + w²."""
    u, v, w = weights
    scale = math.sqrt(u / math.hypot(v, w))
    return u / scale, v * scale, w * scale


def descent(weights: Weights) -> list[tuple[float, float]]:
    """The slopes (a, b) at every step of gradient descent."""
    u, v, w = weights
    way = [(u * v, u * w)]
    for _ in range(STEPS):
        left = (u * v - GOAL[0], u * w - GOAL[1])
        u, v, w = (
            u - RATE * (left[0] * v + left[1] * w),
            v - RATE * left[0] * u,
            w - RATE * left[1] * u,
        )
        way.append((u * v, u * w))
    return way


def place(point: tuple[float, float]) -> tuple[float, float]:
    """Where a function lies in the drawing."""
    unit = (SPAN[1] - SPAN[0]) / 330
    return LEFT + (point[0] - SPAN[0]) / unit, TOP + SIZE - (point[1] + 0.1) / unit


def trajectory(weights: Weights, kind: str) -> str:
    points = [place(point) for point in descent(weights)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(
        f'<circle class="{kind} dot" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in points[1::3]
    )
    x, y = points[-1]
    last = f'<circle class="{kind} dot" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
    return f'<polyline class="{kind} way" points="{line}"/>{dots}{last}'


def edge(kind: str, start: tuple[float, float], end: tuple[float, float], width: str) -> str:
    ends = f'x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}"'
    return f'<line class="{kind} edge" {ends} stroke-width="{width}"/>'


def network(weights: Weights, kind: str, x: float, y: float, title: str) -> str:
    """One unit with its weights as lines, as thick as they are large."""
    u, v, w = weights
    width = [f"{1 + 4.2 * abs(value):.1f}" for value in (v, w, u)]
    ends = [(x, y - 32), (x, y + 32)]
    lines = [
        edge(kind, (a, b), (x + 110, y), thick) for (a, b), thick in zip(ends, width, strict=False)
    ]
    lines.append(edge(kind, (x + 110, y), (x + 220, y), width[2]))
    nodes = [*ends, (x + 110, y), (x + 220, y)]
    circles = [f'<circle class="node" cx="{a}" cy="{b}" r="13"/>' for a, b in nodes]
    names = ["x₁", "x₂", "relu", "y"]
    labels = [
        f'<text class="in" x="{a}" y="{b + 4}">{name}</text>'
        for (a, b), name in zip(nodes, names, strict=True)
    ]
    circles[2] = f'<circle class="node" cx="{x + 110}" cy="{y}" r="19"/>'
    head = f'<text class="{kind} head" x="{x - 16}" y="{y - 58}">{title}</text>'
    return "".join([head, *lines, *circles, *labels])


def picture() -> str:
    conditioned = rescaled(START)
    goal, start = place(GOAL), place((START[0] * START[1], START[0] * START[2]))
    rings = "".join(
        f'<circle class="ring" cx="{goal[0]:.1f}" cy="{goal[1]:.1f}" r="{radius}"/>'
        for radius in (26, 62, 104, 152, 208)
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 840 340" role="img"
  aria-labelledby="t d">
<title id="t">Same function, another way to train</title>
<desc id="d">Left: a unit before and after its incoming weights are multiplied by λ and its outgoing
weight is divided by λ. Right: the two compute the same function, so they start at one point; with
the same learning rate and number of steps gradient
descent reaches the goal from the rescaled weights, and not from the others.</desc>
<style>
  svg {{ --ground: #f7f9fa; --ink: #1d2329; --faint: #5d6770; --rule: #cfd6db;
    --plain: #c2571a; --moved: #0072b2; }}
  @media (prefers-color-scheme: dark) {{
    svg {{ --ground: #161b20; --ink: #e6e9ec; --faint: #9aa5ae; --rule: #39434b;
      --plain: #f28b52; --moved: #56b4e9; }}
  }}
  text {{ font: 15px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
    fill: var(--faint); }}
  .ground {{ fill: var(--ground); stroke: var(--rule); }}
  .head {{ font-weight: 600; font-size: 16px; }}
  text.plain {{ fill: var(--plain); }} text.moved {{ fill: var(--moved); }}
  .title {{ font-weight: 600; font-size: 16px; fill: var(--ink); }}
  .in {{ fill: var(--ink); font-size: 13px; text-anchor: middle; }}
  .factor {{ fill: var(--moved); font-weight: 600; text-anchor: middle; }}
  .node {{ fill: var(--ground); stroke: var(--faint); stroke-width: 1.4; }}
  .plain.edge, .plain.way {{ stroke: var(--plain); }}
  .moved.edge, .moved.way {{ stroke: var(--moved); }}
  .way {{ fill: none; stroke-width: 2; }}
  .plain.dot {{ fill: var(--plain); }} .moved.dot {{ fill: var(--moved); }}
  .ring {{ fill: none; stroke: var(--rule); }}
  .start {{ fill: var(--ground); stroke: var(--ink); stroke-width: 2; }}
  .goal {{ stroke: var(--ink); stroke-width: 2; }}
  /* Of the picture, not of the window: on a phone fewer words, in larger letters. */
  @media (max-width: 520px) {{
    text {{ font-size: 22px; }} .head, .title {{ font-size: 23px; }} .in {{ font-size: 17px; }}
    .note {{ display: none; }}
  }}
</style>
<clipPath id="plane"><rect x="{LEFT - 20}" y="{TOP}" width="390" height="{SIZE}"/></clipPath>
<rect class="ground" x="0.5" y="0.5" width="839" height="339" rx="10"/>
{network(START, "plain", 46, 102, "as it was")}
{network(conditioned, "moved", 46, 252, "rescaled")}
<text class="factor" x="82" y="257">× λ</text><text class="factor" x="214" y="240">÷ λ</text>
<text x="286" y="165">same</text><text x="286" y="187">function</text>
<text class="title" x="{LEFT - 46}" y="38">{STEPS} steps of gradient descent</text>
<g clip-path="url(#plane)">{rings}</g>
{trajectory(START, "plain")}
{trajectory(conditioned, "moved")}
<path class="goal" d="M{goal[0] - 6:.1f} {goal[1] - 6:.1f}l12 12m0 -12l-12 12"/>
<circle class="start" cx="{start[0]:.1f}" cy="{start[1]:.1f}" r="6"/>
<text class="note" x="{start[0] + 14:.1f}" y="{start[1] + 18:.1f}">
  one function, two sets of weights</text>
<text x="{goal[0] + 16:.1f}" y="{goal[1] + 5:.1f}">goal</text>
<text class="note" x="{LEFT - 20}" y="318">
  every point is a function, every ring an equal loss</text>
</svg>
"""


if __name__ == "__main__":
    Path(__file__).with_name("rescaling.svg").write_text(picture(), encoding="utf-8")
