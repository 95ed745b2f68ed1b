"""The tables of a report, from the mappings of ``comparison.json`` alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec_lab.bench.console import speedup_text
from specdec_lab.compare.comparable import plain
from specdec_lab.compare.ledger import ROUND_PARTS
from specdec_lab.compare.tables import p_text, ratio_text, verdict_text
from specdec_lab.report.parts import Cell, Column, number_cell, table, text_cell

Entry = Mapping[str, Any]
Read = Callable[[Entry], Cell]


def _table_of(name: str, caption: str, entries: Sequence[Entry], columns: Sequence[tuple[Column, Read]]) -> str:
    rows = [[read(entry) for _, read in columns] for entry in entries]
    return table(name, caption, [column for column, _ in columns], rows)


def _label(entry: Entry) -> Cell:
    return text_cell(entry["label"] + ("" if entry["numbers"]["lossless"] else " (lossy)"))


_STRATEGY = (Column("strategy", "Its name; parameters where several have the name."), _label)


def _of(name: str, digits: int) -> Read:
    """Return a reader of one of a strategy's numbers."""
    return lambda entry: number_cell(entry["numbers"][name], digits)


def strategies_table(entries: Sequence[Entry]) -> str:
    """Return one line per strategy: how much it accepts and how fast it is."""
    columns = [
        _STRATEGY,
        (Column("prompts", "Prompts that the speed-up counts."), lambda one: number_cell(one["prompts"], 0)),
        (Column("tau", "Emitted tokens per round, bonus token included; 1 for plain decoding."), _of(_TAU, 2)),
        (Column("drafts a round", "Accepted drafts per round, bonus token excluded."), _of("mean_accepted_drafts", 2)),
        (Column("acceptance rate", "Accepted over proposed."), _of("acceptance_rate", 3)),
        (Column("tok/s", "Emitted tokens over decode time; no prefill."), _of("decode_tokens_per_second", 1)),
        (Column("end to end tok/s", "Output tokens over all time."), _of("end_to_end_tokens_per_second", 1)),
        (
            Column("speed-up", "Ratio of tok/s to the baseline's of the same run, [95 % interval over prompts]."),
            lambda one: _speedup_cell(one["numbers"]["speedup"], one["numbers"]["name"]),
        ),
        (
            Column("mean of ratios", "Mean over requests of each request's own ratio; short answers weigh as much."),
            lambda one: number_cell(one["numbers"]["speedup"]["mean_of_ratios"], 2, "x"),
        ),
        (
            Column("end to end", "Ratio of end-to-end rates, prefill included, [95 % interval over prompts]."),
            lambda one: _speedup_cell(one["numbers"]["speedup_end_to_end"], one["numbers"]["name"]),
        ),
        (
            Column("exact", "Answers identical to the baseline's + ties within rounding / compared."),
            lambda one: _exact(one["numbers"]["exactness"]),
        ),
        (Column("failed", "Requests without an answer."), _of("failed", 0)),
        (Column("run", "Number of its run."), lambda one: number_cell(one["run"], 0)),
    ]
    return _table_of("strategies", "All strategies", entries, columns)


_TAU = "mean_acceptance_length"


def _speedup_cell(speedup: Mapping[str, Any], name: str) -> Cell:
    return Cell(speedup_text(speedup, name), speedup["ratio_of_totals"])


def _exact(exactness: Mapping[str, Any]) -> Cell:
    if not exactness["compared"]:
        return Cell("-", None)
    same, ties, compared = (exactness[name] for name in ("identical", "ties", "compared"))
    return Cell(f"{same}+{ties}/{compared}", (same + ties) / compared)


def pairs_table(pairs: Sequence[Mapping[str, Any]]) -> str:
    """Return one line per pair of strategies: which is faster, as far as can be told."""
    columns = (
        Column("first", "One strategy."),
        Column("verdict", "Of the first; corrected for the number of pairs."),
        Column("second", "The other strategy."),
        Column(
            "ratio",
            "Speed of the first over the second's, each over the baseline of its run: all tokens over all seconds, "
            "[95 % bootstrap interval over prompts, not corrected].",
        ),
        Column("mean of ratios", "Mean over requests of each request's own ratio."),
        Column("prompts", "That both decoded; turns and repeats of a prompt count as one observation."),
        Column("p", "Of a paired permutation test: how often chance alone makes such a difference."),
        Column("p corrected", "For all pairs of this table (Holm). Above 0.05 nothing is told."),
        Column("unlike", "What the two differ in besides the strategy."),
    )
    rows = [
        [
            text_cell(pair["first"]),
            text_cell(verdict_text(pair)),
            text_cell(pair["second"]),
            Cell(ratio_text(pair), pair["ratio_of_totals"]),
            number_cell(pair["mean_of_ratios"], 2, "x"),
            number_cell(pair["prompts"], 0),
            Cell(p_text(pair["p_value"]), pair["p_value"]),
            Cell(p_text(pair["p_corrected"]), pair["p_corrected"]),
            text_cell(", ".join(pair["unlike"])),
        ]
        for pair in pairs
    ]
    return table("pairs", "Every pair of strategies", columns, rows)


def ledger_table(entries: Sequence[Entry]) -> str:
    """Return one line per strategy: where a round's time goes and what it has to emit."""

    def cost(name: str, digits: int) -> Read:
        return lambda one: number_cell(one["ledger"][name], digits)

    def part(name: str) -> Read:
        return lambda one: number_cell((one["ledger"]["round_parts_ms"] or {}).get(name), 2)

    meanings = {
        "draft": "The drafter.",
        "verify": "The target's forward over the tree.",
        "accept": "Choosing tokens and walking the tree, sampling included.",
        "commit": "Keeping the accepted rows of the cache.",
        "other": "Stop rule and bookkeeping.",
    }
    columns = [
        _STRATEGY,
        *((Column(f"{name} ms", f"Milliseconds a round. {meanings[name]}"), part(name)) for name in ROUND_PARTS),
        (Column("round ms", "Their sum: the mean time of a round."), cost("cycle_ms", 2)),
        (Column("nodes", "Mean nodes of a verify forward, root included."), cost("nodes_per_round", 2)),
        (
            Column("extra verify ms", "Verify beyond what the baseline's forward over one node takes."),
            cost("extra_verify_ms", 2),
        ),
        (Column("ms per extra node", "That over the nodes beyond the root."), cost("extra_node_ms", 3)),
        (
            Column("break-even tau", "Tokens that a round must emit to be as fast as the baseline: round / its round."),
            cost("break_even_acceptance_length", 2),
        ),
        (Column("tau", "Tokens that a round emits."), _of(_TAU, 2)),
        (Column("predicted", "tau over break-even tau."), cost("predicted_speedup", 2)),
        (
            Column("measured", "Ratio of decode rates to the baseline's."),
            lambda one: number_cell(one["numbers"]["speedup"]["ratio_of_totals"], 2),
        ),
        (
            Column("largest tree", "Nodes of the largest tree that was offered, root included."),
            lambda one: number_cell(one["budget"]["nodes"], 0),
        ),
    ]
    return _table_of("ledger", "Mean cost of a round", entries, columns)


def categories_table(entries: Sequence[Entry], pairs: Sequence[Mapping[str, Any]]) -> str:
    """Return one line per strategy and category."""
    columns = (
        Column("strategy", "Its name."),
        Column("category", "Of the prompts."),
        Column("prompts", "Prompts that the speed-up counts."),
        Column("tau", "Emitted tokens per round, bonus token included."),
        Column("tok/s", "Emitted tokens over decode time."),
        Column("speed-up", "Over the baseline of the same run, [95 % interval over prompts, not corrected]."),
        Column("mean of ratios", "Mean over requests of each request's own ratio."),
        Column("verdict", "Against that baseline, corrected for all pairs and categories."),
    )
    baselines = {entry["run"]: entry["label"] for entry in entries if entry["baseline"]}
    verdicts = {(pair["first"], pair["second"]): pair["by_category"] for pair in pairs}
    rows = []
    for entry in entries:
        judged = verdicts.get((entry["label"], baselines[entry["run"]]), {})
        for category, numbers in entry["numbers"]["by_category"].items():
            pair = judged.get(category)
            rows.append(
                [
                    _label(entry),
                    text_cell(category),
                    number_cell(entry["prompts_by_category"].get(category, 0), 0),
                    number_cell(numbers[_TAU], 2),
                    number_cell(numbers["decode_tokens_per_second"], 1),
                    _speedup_cell(numbers["speedup"], entry["numbers"]["name"]),
                    number_cell(numbers["speedup"]["mean_of_ratios"], 2, "x"),
                    text_cell("" if pair is None else pair["verdict"]),
                ]
            )
    return table("categories-table", "Every strategy in every category", columns, rows)


def latency_table(entries: Sequence[Entry]) -> str:
    """Return one line per strategy: percentiles of times, and memory."""

    def percentile(name: str, which: str) -> Read:
        return lambda one: number_cell((one["numbers"][name] or {}).get(which), 2)

    def bytes_of(name: str) -> Read:
        def read(one: Entry) -> Cell:
            value = one["numbers"]["memory_bytes"][name]
            return Cell("-", None) if value is None else Cell(f"{value / 2**20:.1f}", value)

        return read

    kinds = {
        "time_per_output_token_ms": ("token", "Milliseconds of decoding per emitted token, over requests"),
        "user_time_per_output_token_ms": ("user", "Milliseconds that a user waits per token, over requests"),
        "round_ms": ("round", "Milliseconds of a round, over rounds"),
    }
    columns = [
        _STRATEGY,
        *(
            (Column(f"{short} {which}", f"{meaning}: {which}."), percentile(name, which))
            for name, (short, meaning) in kinds.items()
            for which in ("p50", "p95", "p99")
        ),
        *(
            (Column(f"{name.replace('_', ' ')} MiB", "Parameters or cache, as allocated."), bytes_of(name))
            for name in ("target_weights", "draft_weights", "target_kv", "draft_kv")
        ),
        (Column("peak MiB", "Most at the end of a request; on a CPU that of the whole process."), bytes_of("peak")),
    ]
    return _table_of("latency-table", "Percentiles and memory", entries, columns)


def spec_bench_table(entries: Sequence[Entry]) -> str:
    """Return one line per strategy and sub-task, as Spec-Bench's scripts would count."""
    columns = (
        Column("strategy", "Its name."),
        Column("sub-task", "Of Spec-Bench; its eight categories of MT-bench are one."),
        Column("questions", "That the strategy and the baseline answered."),
        Column("Spec-Bench tok/s", "Mean over questions of output tokens over time, prefill included."),
        Column("Spec-Bench speed-up", "Ratio of these means. Quotes a mean of rates: long answers weigh little."),
        Column("Spec-Bench mean accepted tokens", "Tokens per round over all rounds, bonus token included."),
        Column("our speed-up", "Ratio of decode rates, all tokens over all seconds: overall only."),
    )
    rows = []
    for entry in entries:
        theirs = entry["spec_bench"]
        for task, numbers in {"overall": theirs, **theirs["by_task"]}.items():
            ours = entry["numbers"]["speedup"]["ratio_of_totals"] if task == "overall" else None
            rows.append(
                [
                    _label(entry),
                    text_cell(task),
                    number_cell(numbers["questions"], 0),
                    number_cell(numbers["tokens_per_second"], 1),
                    number_cell(numbers["speedup"], 2, "x"),
                    number_cell(numbers["mean_accepted_tokens"], 2),
                    number_cell(ours, 2, "x"),
                ]
            )
    return table("spec-bench", "Spec-Bench's own numbers, from the same answers", columns, rows)


def runs_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return one line per run: what it was made with."""
    columns = (
        Column("run", "As counted above."),
        Column("folder", "As it was given."),
        Column("created", "When its summary was made."),
        Column("target", "Name, revision and dtype."),
        Column("prompts", "Source, count and hash."),
        Column("machine", "And PyTorch's threads."),
        Column("decoding", "How tokens are chosen and drafts accepted."),
        Column("commit", "Of the checkout."),
        Column("versions", "Of what can change a number."),
    )
    rows = [
        [
            number_cell(number, 0),
            text_cell(run["folder"]),
            text_cell(run["created"]),
            text_cell(f"{run['target']['name']} {run['target']['revision'] or ''} {run['target']['dtype']}"),
            text_cell(f"{run['prompts']['source']}, {run['prompts']['count']}, {plain(run['prompts']['sha256'])}"),
            text_cell(machine_text(run)),
            text_cell(
                f"temperature {run['sampling']['temperature']:g}, {run['acceptance']}, exact={run['exact']}, "
                f"batch {run['batch_size']} x {run['repeats']}, {run['max_new_tokens']} tokens"
            ),
            text_cell(plain(run["git_sha"])),
            text_cell(plain({name: value for name, value in run["versions"].items() if value is not None})),
        ]
        for number, run in enumerate(runs, start=1)
    ]
    return table("runs", "Runs", columns, rows)


def machine_text(run: Mapping[str, Any]) -> str:
    """Return what a run was computed on."""
    machine = run["machine"]
    return f"{machine['gpu'] or machine['cpu'] or 'unknown machine'}, {machine['threads']} threads"
