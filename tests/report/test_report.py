"""The report: the same numbers as the files, nothing from anywhere else, and at work in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared_runs import DEEP, QUICK, THREE, Made, made_row, made_rows, made_run, write_run

from specdec_lab.compare.command import compare_main
from specdec_lab.report.charts import drawn
from specdec_lab.report.html import CHARTS, report_html
from specdec_lab.report.parts import Cell, Column, embedded, number_cell, table, text_cell

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
)


class Page(HTMLParser):
    """The tables of a page as ``{id: rows of (text, data-value)}``, every id, and every address that is loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[tuple[str, str | None]]]] = {}
        self.ids: list[str] = []
        self.loads: list[str] = []
        self._rows: list[list[tuple[str, str | None]]] = []
        self._cell: str | None = None
        self._value: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.ids.append(str(found["id"]))
        addresses = [found.get(name) for name in ("src", "href", "xlink:href") if tag != "a"]
        self.loads += [one for one in addresses if one and not one.startswith("#")]
        if tag == "table":
            self._rows = self.tables[str(found["id"])] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._cell, self._value = "", found.get("data-value")

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._cell is not None:
            self._rows[-1].append((self._cell, self._value))
            self._cell = None

    def column(self, name: str, title: str) -> list[str | None]:
        """Return the values of a column."""
        head, *rows = self.tables[name]
        place = [text for text, _ in head].index(title)
        return [row[place][1] for row in rows]


def written(folder: Path, *runs: Path, options: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    """Compare runs by the command and return ``comparison.json`` and the report."""
    assert compare_main([*map(str, runs), "--out", str(folder), *options]) == 0
    document = json.loads((folder / "comparison.json").read_text("utf-8"))
    return document, (folder / "report.html").read_text("utf-8")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A run folder, ``comparison.json`` and the report."""
    folder = made_run(tmp_path_factory.mktemp("runs") / "run", {**THREE, "deeper": DEEP, "ten": QUICK})
    return folder, *written(folder / "compared", folder)


def test_the_page_holds_the_numbers_of_the_files(report: tuple[Path, dict[str, Any], str]):
    """summary.json, comparison.json, the page's JSON and the cells that a reader sorts by are the same numbers."""
    folder, document, text = report
    inside = re.search(r'<script type="application/json" id="comparison">(.*?)</script>', text, re.DOTALL)
    assert inside is not None
    assert json.loads(inside.group(1)) == document
    summary = json.loads((folder / "summary.json").read_text("utf-8"))["strategies"]
    page = Page(text)

    def values(read: Any) -> list[str | None]:
        return ["" if read(one) is None else str(read(one)) for one in summary]

    assert page.column("strategies", "strategy") == [one["name"] for one in summary]
    for title, name in (
        ("tau", "mean_acceptance_length"),
        ("drafts a round", "mean_accepted_drafts"),
        ("acceptance rate", "acceptance_rate"),
        ("tok/s", "decode_tokens_per_second"),
        ("end to end tok/s", "end_to_end_tokens_per_second"),
    ):
        assert page.column("strategies", title) == values(lambda one, name=name: one[name]), title
    assert page.column("strategies", "speed-up") == values(lambda one: one["speedup"]["ratio_of_totals"])
    assert page.column("strategies", "mean of ratios") == values(lambda one: one["speedup"]["mean_of_ratios"])
    assert page.column("latency-table", "token p95") == values(lambda one: one["time_per_output_token_ms"]["p95"])
    assert page.column("latency-table", "peak MiB") == values(lambda one: one["memory_bytes"]["peak"])
    by_category = [numbers for one in summary for numbers in one["by_category"].values()]
    stated = [str(numbers["speedup"]["ratio_of_totals"]) for numbers in by_category]
    assert page.column("categories-table", "speed-up") == stated
    ratios = [str(pair["ratio_of_totals"]) for pair in document["pairs"]]
    assert page.column("pairs", "ratio") == ratios
    spec_bench = [
        numbers
        for entry in document["entries"]
        for numbers in (entry["spec_bench"], *entry["spec_bench"]["by_task"].values())
    ]
    assert page.column("spec-bench", "Spec-Bench speed-up") == [str(numbers["speedup"]) for numbers in spec_bench]


def test_the_page_stands_alone(report: tuple[Path, dict[str, Any], str]):
    """One file: no address of anything to load, a policy that forbids it, ids that are unique, and not large."""
    text = report[2]
    page = Page(text)
    assert page.loads == ["data:,"]
    assert "url(http" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert len(page.ids) == len(set(page.ids))
    assert set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text)) <= set(page.ids)
    assert len(text.encode()) < 1_000_000


def test_every_chart_is_there_and_has_words(report: tuple[Path, dict[str, Any], str]):
    """Each is named and described for those who do not see it."""
    text = report[2]
    for one in CHARTS:
        assert f'aria-labelledby="{one.name}-title {one.name}-description"' in text, one.name
    assert text.count("<figure>") == len(CHARTS)
    assert text.count('role="img"') == len(CHARTS)


def test_equal_comparisons_give_equal_pages(report: tuple[Path, dict[str, Any], str]):
    """No date and no chance in the charts, so that a change of a page is a change of a number."""
    _, document, text = report
    assert report_html(document) == text


def test_a_run_in_which_all_failed_has_a_report(tmp_path: Path):
    """Undefined numbers are dashes; a strategy without an answer, prompts of one category, and a single prompt."""
    strategies = {**THREE, "broken": Made(drafts=3)}
    rows = [row for row in made_rows(strategies, prompts=1) if row["strategy"] != "broken"]
    rng = np.random.default_rng(0)
    rows.append(made_row("broken", strategies["broken"], 0, rng, status="failed"))
    document, text = written(tmp_path / "out", write_run(tmp_path / "run", strategies, rows))
    assert [entry["numbers"]["speedup"]["ratio_of_totals"] for entry in document["entries"]][-1] is None
    assert Page(text).column("strategies", "tok/s")[-1] == ""
    assert {pair["reason"] for pair in document["pairs"]} == {"one prompt", "no request in common"}


def test_nothing_to_draw_is_no_chart():
    """A comparison of nothing defined draws nothing, instead of empty axes."""
    nothing = {"ratio_of_totals": None, "mean_of_ratios": None, "ci95": None}
    numbers = {
        "speedup": nothing,
        "decode_tokens_per_second": None,
        "mean_acceptance_length": None,
        "by_category": {},
        "acceptance_by_depth": {"offered": []},
        "proposed": 0,
        "time_per_output_token_ms": None,
        "memory_bytes": dict.fromkeys(("target_weights", "draft_weights", "target_kv", "draft_kv"), 1),
    }
    entry = {
        "label": "a",
        "baseline": False,
        "numbers": numbers,
        "ledger": {"predicted_speedup": None, "round_parts_ms": None},
    }
    found = {one.name: drawn(one.draw, [entry], one.name, one.title, one.description) for one in CHARTS}
    assert [name for name, svg in found.items() if svg is not None] == ["memory"]


def test_text_from_files_is_text_on_the_page(tmp_path: Path):
    """A label, folder or machine that holds HTML stays words; JSON inside the page cannot end its element."""
    nasty = "</script><img src=x onerror=alert(1)>&amp;"
    strategies = {**THREE, nasty: QUICK}
    _, text = written(tmp_path / "out", made_run(tmp_path / "run", strategies))
    assert "<img" not in text
    assert "onerror=alert(1)>" not in text
    assert nasty in Page(text).column("strategies", "strategy")
    inside = re.search(r'id="comparison">(.*?)</script>', embedded("comparison", {"a": nasty}))
    assert inside is not None
    assert json.loads(inside.group(1)) == {"a": nasty}
    cells = table("t", 'a "quoted" <caption>', [Column("x", 'a "meaning"')], [[text_cell(nasty)]])
    assert Page(cells).tables["t"][1][0] == (nasty, nasty)


def test_cells_keep_the_exact_value():
    """What is shown is rounded, what is sorted by is not; undefined is a dash without a value."""
    assert number_cell(1 / 3, 2, "x") == Cell("0.33x", 1 / 3)
    assert number_cell(None, 2) == Cell("-", None)


# --- in a browser ----------------------------------------------------------------------------------------------------

PROBE = """<script>
addEventListener("load", () => {
  const loaded = performance.now();
  const texts = (table, column) => [...table.tBodies[0].rows].map((row) => row.cells[column].dataset.value);
  const sorted = (id, title) => {
    const table = document.getElementById(id), heads = [...table.tHead.rows[0].cells];
    const column = heads.findIndex((head) => head.textContent === title);
    const press = () => heads[column].querySelector("button").click();
    press();
    const up = [texts(table, column), heads[column].getAttribute("aria-sort")];
    press();
    return { up, down: [texts(table, column), heads[column].getAttribute("aria-sort")] };
  };
  const charts = [...document.querySelectorAll("figure")].map((figure) => {
    const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
    const shapes = [...svg.querySelectorAll("path, use")].filter((shape) => {
      const size = shape.getBoundingClientRect();
      return size.width + size.height > 2;
    });
    return { title: figure.querySelector("h3").textContent, width: box.width, height: box.height,
      shapes: shapes.length, words: svg.querySelectorAll("text").length };
  });
  const found = {
    loaded, charts, width: innerWidth, overflow: document.documentElement.scrollWidth - innerWidth,
    numbers: sorted("strategies", "tok/s"), names: sorted("strategies", "strategy"), empty: sorted("ledger", "PLACE"),
  };
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
});
</script>""".replace("PLACE", "ms per extra node")


def in_browser(page: Path, profile: Path, size: str = "1200,900") -> tuple[str, list[str]]:
    """Open a file in a real browser and return the page as it is after loading, and the lines of its console."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser is installed (looked for {', '.join(BROWSERS)})")
    done = subprocess.run(
        [browser, *FLAGS, f"--user-data-dir={profile}", f"--window-size={size}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def probed(dom: str) -> dict[str, Any]:
    found = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None, dom[-2000:]
    return json.loads(unescape(found.group(1)))


def test_the_report_works_in_a_browser(tmp_path: Path, report: tuple[Path, dict[str, Any], str]):
    """Charts have shapes of some size, tables sort both ways, the console is clean, a telephone need not scroll."""
    _, document, text = report
    strategies = [entry["label"] for entry in document["entries"]]
    page = tmp_path / "probed.html"
    page.write_text(text.replace("</body>", PROBE + "</body>"), "utf-8")
    loaded: list[float] = []
    for size, width in (("1200,900", 1200), ("500,900", 500)):
        dom, console = in_browser(page, tmp_path / "profile", size)
        assert console == []
        found = probed(dom)
        assert found["width"] == width
        assert found["overflow"] <= 0
        loaded.append(found["loaded"])
        assert [chart["title"] for chart in found["charts"]] == [one.title for one in CHARTS]
        for chart in found["charts"]:
            assert chart["width"] > 250, chart
            assert chart["height"] > 60, chart
            assert chart["shapes"] > 5, chart
            assert chart["words"] > 3, chart
    assert min(loaded) < 2000  # milliseconds; the better of two, since other programs run here too
    rates, order = found["numbers"]["up"]
    assert order == "ascending"
    assert [float(rate) for rate in rates] == sorted(float(rate) for rate in rates)
    assert len(set(rates)) == len(strategies)
    assert found["numbers"]["down"] == [rates[::-1], "descending"]
    assert found["names"]["up"][0] == sorted(strategies)
    for values, _ in found["empty"].values():
        assert values[-1] == ""  # the baseline has no extra node: last both ways
        assert "" not in values[:-1]


def test_a_console_that_is_not_clean_is_seen(tmp_path: Path, report: tuple[Path, dict[str, Any], str]):
    """The check above can fail: an error, and something that the page's policy forbids to load."""
    text = report[2]
    page = tmp_path / "broken.html"
    page.write_text(text.replace("</body>", '<img src="absent.png"><script>nothing.at.all</script></body>'), "utf-8")
    _, console = in_browser(page, tmp_path / "profile")
    assert any("ReferenceError" in line for line in console)
    assert any("Content Security Policy" in line for line in console)
