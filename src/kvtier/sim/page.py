"""The page around the charts: one file, light or dark as the reader's system is, nothing from the network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLES = ("s0", "s1", "s2", "s3", "s4", "s5")
"""Colours of the series, in order."""
PLAIN = "plain"
"""The colour of what is there for comparison: no cache, or the optimum."""

_CSS = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #ffffff; --ink: #1d1f23; --soft: #5f6570; --rule: #e4e5e8;
  --s0: #2563c9; --s1: #d9650b; --s2: #11875d; --s3: #8a46c8; --s4: #c02a56; --s5: #8a6d00; --plain: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --page: #15171a; --card: #1d2024; --ink: #eceef1; --soft: #a3a9b4;
  --rule: #33373d; --s0: #6ea8ff; --s1: #ff9d4d; --s2: #4fd1a0; --s3: #c79bff; --s4: #ff7d9f; --s5: #e0c04f;
  --plain: #9aa1ac; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 20px 56px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 0 0 2px; }
p { margin: 0 0 10px; color: var(--soft); }
p.lead { font-size: 17px; color: var(--ink); max-width: 75ch; margin: 12px 0 20px; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 18px 0; }
.fact { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 10px 14px; }
.fact b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; }
.fact span { color: var(--soft); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 16px; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 16px 18px;
  margin: 0 0 16px; min-width: 0; }
.card p { font-size: 14px; }
svg { width: 100%; max-width: 760px; height: auto; display: block; margin: 0 auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
svg .strong { fill: var(--ink); }
svg .name { font-weight: 600; }
svg .grid { stroke: var(--rule); } svg .axis { stroke: var(--soft); }
svg .mark { stroke: var(--soft); stroke-dasharray: 3 3; }
svg .line { fill: none; stroke-width: 2.2; stroke-linejoin: round; } svg .band { stroke: none; opacity: .16; }
svg .dot { stroke: var(--card); stroke-width: 1.5; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
tr.chosen td { font-weight: 700; }
pre { overflow-x: auto; background: var(--page); border: 1px solid var(--rule); border-radius: 8px;
  padding: 12px; margin: 8px 0; }
.tabs > input { position: absolute; opacity: 0; }
.tabs > label { display: inline-block; padding: 5px 13px; margin: 0 6px 12px 0; border: 1px solid var(--rule);
  border-radius: 99px; cursor: pointer; background: var(--card); font-size: 14px; }
.tabs > .panel { display: none; }
footer { color: var(--soft); font-size: 13px; margin-top: 20px; }
"""


def _series_css() -> str:
    rules = []
    for style in (*STYLES, PLAIN):
        colour = f"var(--{style})"
        rules.append(f"svg .line.{style} {{ stroke: {colour}; }}")
        rules.append(f"svg .dot.{style}, svg .bar.{style}, svg .band.{style}, svg .name.{style} {{ fill: {colour}; }}")
    return "\n".join(rules)


def page(title: str, body: str) -> str:
    """A whole HTML document. `body` is HTML; `title` is text."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # an empty icon, so that browsers do not ask the network for one
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_CSS}{_series_css()}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def card(heading: str, note: str, content: str) -> str:
    """A chart or table with its heading and one sentence."""
    return f'<section class="card"><h2>{escape(heading)}</h2><p>{escape(note)}</p>{content}</section>'


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Large numbers: (what it is, how much)."""
    inner = "".join(
        f'<div class="fact"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in pairs
    )
    return f'<div class="facts">{inner}</div>'


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], chosen: int | None = None) -> str:
    """An HTML table. Row number `chosen` stands out."""
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join(
        f"<tr{' class=chosen' if number == chosen else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def tabs(name: str, panels: Sequence[tuple[str, str]], chosen: int) -> str:
    """Panels (label, HTML) of which one shows at a time. Works without script."""
    if len(panels) == 1:
        return panels[0][1]
    inputs = "".join(
        f'<input type="radio" name="{name}" id="{name}{i}"{" checked" if i == chosen else ""}>'
        f'<label for="{name}{i}">{escape(label)}</label>'
        for i, (label, _) in enumerate(panels)
    )
    rules = "".join(
        f"#{name}{i}:checked ~ #{name}-panel{i} {{ display: block; }} "
        f"#{name}{i}:checked + label {{ border-color: var(--s0); color: var(--s0); font-weight: 600; }} "
        f"#{name}{i}:focus-visible + label {{ outline: 2px solid var(--s0); }} "
        for i in range(len(panels))
    )
    shown = "".join(f'<div class="panel" id="{name}-panel{i}">{content}</div>' for i, (_, content) in enumerate(panels))
    return f'<style>{rules}</style><div class="tabs">{inputs}{shown}</div>'
