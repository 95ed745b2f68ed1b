"""A traced answer for a terminal, a pipe or an HTML page, drawn with rich."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.rule import Rule
from rich.segment import Segment
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text
from rich.tree import Tree
from transformers import PreTrainedTokenizerBase

from specdec_lab.bench.trace import (
    TokenOrigin,
    attribute_tokens,
    most_accepted_round,
    printable,
    readable,
    target_tokens,
    token_text,
    tokens_of_round,
)
from specdec_lab.decode import Generation, Round
from specdec_lab.errors import InputError

PREFILL_STYLE = "#000000 on #c9ccd1"
BONUS_STYLES = ("#000000 on #f4c27a", "#000000 on #f8d9a8")  # two tones keep neighbouring rounds apart
DRAFT_STYLES = (
    "#000000 on #d3f0dc",
    "#000000 on #aee3c0",
    "#000000 on #86d3a4",
    "#000000 on #5fc08a",
    "#000000 on #45ab86",
    "#ffffff on #2c8577",
    "#ffffff on #226b6d",
    "#ffffff on #1a5260",
)  # by depth from 1; deeper drafts share the last

PAGE_WIDTH = 110
"""Columns of the HTML page."""

TREE_INDENT = 4
"""Columns that rich indents each depth of a tree by."""

LABEL_WIDTH = 60
"""Columns that a node's own words may take before they wrap."""


@dataclass(frozen=True)
class Trace:
    """One answer and what is needed to show it.

    Attributes:
        prompt: the user's words.
        title: strategy, target and whatever else tells the answer from others.
        totals: name and value of each counter, as the benchmark defines them; ``None`` prints as a dash.
    """

    generation: Generation
    prompt: str
    title: str
    tokenizer: PreTrainedTokenizerBase | None
    totals: Mapping[str, float | int | str | None]


def render_trace(trace: Trace, *, coloured: bool, round_number: int | None = None) -> RenderableType:
    """Return everything there is to show, from prompt to totals; print it with ``crop=False``.

    Args:
        coloured: whether colours tell the origins apart; else brackets do.
        round_number: whose tree to draw, from 1; ``None`` takes the first round with the most accepted drafts.

    Raises:
        InputError: a round that the answer does not have.
    """
    rounds, origins = trace.generation.rounds, attribute_tokens(trace.generation)
    chosen = most_accepted_round(rounds) if round_number is None else round_number - 1
    if chosen is not None and not 0 <= chosen < len(rounds):
        remedy = f"this answer has rounds 1 to {len(rounds)}" if rounds else "this answer has no round"
        raise InputError("round", round_number, remedy)
    tokens = len(trace.generation.request.prompt_ids)
    prompt = Text("\n".join(printable(line) for line in trace.prompt.splitlines()))
    parts: list[RenderableType] = [
        Panel(prompt, title=Text(f"prompt · {tokens} tokens as rendered"), title_align="left"),
        Panel(answer_text(trace.tokenizer, origins, coloured), title=Text(trace.title), title_align="left"),
        legend(coloured, max((played.accepted for played in rounds), default=0)),
    ]
    if chosen is None:
        parts.append(Text("\nThe first token ended the answer: there was no round."))
    else:
        parts += [
            _heading("rounds"),
            round_table(trace.tokenizer, rounds, origins, chosen, coloured),
            _heading(f"tree of round {chosen + 1}"),
            draft_tree(trace.tokenizer, rounds[chosen], tokens_of_round(origins, chosen), coloured),
        ]
    return Group(*parts, _heading("totals"), totals_table(trace.totals))


def answer_text(tokenizer: PreTrainedTokenizerBase | None, origins: Sequence[TokenOrigin], coloured: bool) -> Text:
    """Return the answer, each token marked by who produced it; newlines are shown and kept."""
    return _marked([printable(token_text(tokenizer, o.token)).replace("⏎", "⏎\n") for o in origins], origins, coloured)


def legend(coloured: bool, depth: int) -> Text:
    """Return what the marks of the answer mean.

    Args:
        depth: deepest accepted draft, so that no colour is explained that does not occur.
    """
    if not coloured:
        return Text("⟪prefill's token⟫ ⟦accepted drafts│by│depth⟧ target's own tokens")
    text = Text(" ")
    text.append(" prefill ", style=PREFILL_STYLE)
    text.append("  ")
    text.append(" target's own ", style=BONUS_STYLES[0])
    if depth:
        text.append("  accepted draft, by depth ")
    for at in range(min(depth, len(DRAFT_STYLES))):
        text.append(f" {at + 1}{'+' if at + 1 == len(DRAFT_STYLES) < depth else ''} ", style=DRAFT_STYLES[at])
    return text


def round_table(
    tokenizer: PreTrainedTokenizerBase | None,
    rounds: Sequence[Round],
    origins: Sequence[TokenOrigin],
    chosen: int,
    coloured: bool,
) -> Table:
    """Return one line per round; ``chosen`` is marked as the one whose tree is drawn."""
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    for name in ("round", "nodes", "depth", "accepted", "bonus"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("tokens", ratio=1, overflow="fold")
    for index, played in enumerate(rounds):
        emitted = tokens_of_round(origins, index)
        shown = [readable(token_text(tokenizer, origin.token)) for origin in emitted]
        counts = (played.proposed_nodes, played.proposed, played.accepted, played.bonus)
        number = f"▸ {index + 1}" if index == chosen else str(index + 1)
        style = "bold" if index == chosen else None
        table.add_row(number, *map(str, counts), _marked(shown, emitted, coloured), style=style)
    return table


def draft_tree(
    tokenizer: PreTrainedTokenizerBase | None, played: Round, emitted: Sequence[TokenOrigin], coloured: bool
) -> RenderableType:
    """Return the offered tree of one round: accepted path marked, the target's own token where it is known."""
    wanted = target_tokens(played, emitted)
    style_of = {origin.node: _style(origin) for origin in emitted if origin.node is not None}
    branches: dict[int, Tree] = {}
    depths: list[int] = []
    for node, (token, parent) in enumerate(zip(played.tokens, played.parents, strict=True)):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        label = Text(no_wrap=True)
        label.append(f" {readable(token_text(tokenizer, token))} ", style=style_of.get(node, "") if coloured else "")
        label.append(f" node {node} · depth {depths[node]}" if node else " root", style="dim")
        if node in style_of:
            label.append(" · ✓ accepted", style="bold green")
        elif parent in wanted:
            label.append(" · ✗ rejected", style="red")
        if node in wanted:
            label.append(" · target says ", style="dim")
            label.append(readable(token_text(tokenizer, wanted[node])), style="bold")
        guides = "green" if node in wanted else "bright_black"
        branches[node] = Tree(label, guide_style=guides) if parent < 0 else branches[parent].add(label)
        branches[node].guide_style = guides
    return _AtLeastThisWide(branches[0], TREE_INDENT * max(depths) + LABEL_WIDTH)


def totals_table(totals: Mapping[str, float | int | str | None]) -> Table:
    """Return names and values in two columns."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for name, value in totals.items():
        shown = "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
        table.add_row(Text(name), Text(shown))
    return table


def write_html(trace: Trace, path: Path, round_number: int | None = None) -> None:
    """Write the trace as one HTML page that needs no other file.

    Raises:
        InputError: a path that cannot be written, or a round that the answer does not have.
    """
    console = Console(
        record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor", no_color=False, width=PAGE_WIDTH
    )
    console.print(render_trace(trace, coloured=True, round_number=round_number), crop=False)
    page = console.export_html(theme=DEFAULT_TERMINAL_THEME, inline_styles=True, code_format=_PAGE)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError("html", str(path), f"it cannot be written ({error.strerror}); give another file") from None


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Trace of one answer</title>
<style>
body {{ color: {foreground}; background: {background}; margin: 2rem; }}
pre {{ font: 14px/1.45 "DejaVu Sans Mono", Menlo, Consolas, monospace; }}
</style>
</head>
<body>
<pre><code style="font-family: inherit">{code}</code></pre>
</body>
</html>
"""


@dataclass(frozen=True)
class _AtLeastThisWide:
    """Renders something with so many columns even where the console has fewer, so that a deep tree stays a tree."""

    inner: RenderableType
    columns: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segments in console.render_lines(
            self.inner, options.update(width=max(self.columns, options.max_width)), pad=False
        ):
            yield from segments
            yield Segment.line()


def _heading(text: str) -> Rule:
    return Rule(Text(text, style="bold"), style="dim", align="left")


def _style(origin: TokenOrigin) -> str:
    if origin.source == "prefill":
        return PREFILL_STYLE
    if origin.depth is not None:
        return DRAFT_STYLES[min(origin.depth, len(DRAFT_STYLES)) - 1]
    return BONUS_STYLES[(origin.round or 0) % 2]


def _marked(shown: Sequence[str], origins: Sequence[TokenOrigin], coloured: bool) -> Text:
    """Join token texts, each marked by its source; without colours, the accepted drafts of a round share brackets."""
    text = Text()
    for at, (words, origin) in enumerate(zip(shown, origins, strict=True)):
        if coloured:
            text.append(words, style=_style(origin))
        elif origin.source == "prefill":
            text.append(f"⟪{words}⟫")
        elif origin.source == "draft":
            following = origins[at + 1] if at + 1 < len(origins) else None
            last = following is None or following.source != "draft" or following.round != origin.round
            text.append(f"{'⟦' if origin.depth == 1 else '│'}{words}{'⟧' if last else ''}")
        else:
            text.append(words)
    return text
