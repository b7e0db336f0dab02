"""results.json for programs, table.md for people, the same table on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dflash_jax import plain_json
from dflash_jax.weights.atomic import replacing
from infer.bench.arms import AR

RESULTS, TABLE = "results.json", "table.md"
COLUMNS = ("arm", "tokens/s", "x ar", "x ar, CPU time", "tau", "rows", "ms/round", "differ")
STAGES = ("arm", "draft", "verify", "accept", "commit", "round", "GB/s", "GFLOP/s")
_WIDTH = 110  # of the table with its intervals


def save(folder: Path, results: Mapping[str, Any]) -> None:
    for name, text in ((RESULTS, plain_json.text(results, indent=1) + "\n"), (TABLE, markdown(results))):
        with replacing(folder / name) as file:
            file.write(text.encode())


def markdown(results: Mapping[str, Any]) -> str:
    lines = [f"# {title(results)}", "", results["method"], ""]
    if "stages" in results:
        lines += ["## Stages alone", "", ceiling(results), ""]
        lines += ["| " + " | ".join(STAGES) + " |", "|---" + "|---:" * (len(STAGES) - 1) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in stage_rows(results["stages"])]
        lines.append("")
    for name, dataset in results["datasets"].items():
        lines += [f"## {name}: {heading(dataset)}", ""]
        lines += ["| " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * (len(COLUMNS) - 1) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in rows(dataset)]
        lines += ["", *(f"- {said}" for said in compared(dataset))]
        lines += ["", "Rounds by accepted candidates, and acceptance by position:", ""]
        lines += [f"- {said}" for said in acceptance(dataset)]
        lines.append("")
    return "\n".join(lines)


def show(results: Mapping[str, Any], console: Console) -> None:
    """On a terminal that is too narrow, without the intervals."""
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    narrow = console.width < _WIDTH
    console.print(title(results), highlight=False, soft_wrap=True)
    for name, dataset in results["datasets"].items():
        table = Table(title=f"{name}: {heading(dataset)}", title_justify="left")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "arm" else "right")
        for row in rows(dataset):
            table.add_row(*(text.partition(" [")[0] for text in row) if narrow else row)
        console.print(table)
        for said in compared(dataset):
            console.print(said, highlight=False, soft_wrap=True)
    if "stages" in results:
        table = Table(title="stages alone, ms", title_justify="left")
        for column in STAGES:
            table.add_column(column, justify="left" if column == "arm" else "right")
        for row in stage_rows(results["stages"]):
            table.add_row(*row)
        console.print(table)
        console.print(ceiling(results), highlight=False, soft_wrap=True)
    compiling = sum(sum(start.values()) for start in results["compile_seconds"])
    console.print(
        "tokens/s: of decoding, median and quartiles over prompts; x ar: median of paired ratios to autoregressive "
        "decoding, 95 % interval; tau: tokens per round; rows: verified per round; differ: answers with other "
        f"tokens than ar. Compiled in {compiling:.0f} s, apart.",
        highlight=False,
        soft_wrap=True,
    )


def title(results: Mapping[str, Any]) -> str:
    settings, draft = results["settings"], results["draft"]
    sampled = "greedy" if not settings["temperature"] else f"temperature {settings['temperature']:g}"
    return (
        f"target {results['target']['source']}, draft {draft['source'] if draft else 'none'}, {results['dtype']} on "
        f"{results['hardware']['device']}, {sampled}, {settings['max_new_tokens']} new tokens"
    )


def heading(dataset: Mapping[str, Any]) -> str:
    left = dataset["left_out"]
    return f"{dataset['prompts']} prompts" + (f" ({left} too long, left out)" if left else "")


def rows(dataset: Mapping[str, Any]) -> Iterator[list[str]]:
    """One per arm, a text for each of COLUMNS."""
    for arm, of in dataset["arms"].items():
        speed = of["tokens_per_second"]
        yield [
            arm,
            spread(speed["median"], speed["q1"], speed["q3"], ".1f"),
            ratio(of["ratio"]),
            number(of["cpu_ratio"]["median"], ".2f"),
            number(of["tau"], ".2f"),
            number(of["rows_per_round"], ".1f"),
            number(of["round_ms"], ".1f"),
            differing(of["differences"]),
        ]


def compared(dataset: Mapping[str, Any]) -> Iterator[str]:
    for pair in dataset["comparisons"]:
        speed, computed = ratio(pair["ratio"]), ratio(pair["cpu_ratio"])
        tau = number(pair["tau_ratio"], ".2f")
        yield f"{pair['arm']} against {pair['to']}: speed {speed}, in CPU time {computed}, tau x {tau}"
    for arm, of in dataset["arms"].items():
        if of.get("of_possible") is not None:
            yield f"{arm}: {of['of_possible']:.2f} of tau * t_ar / (t_draft + t_verify), each timed alone"


def stage_rows(stages: Mapping[str, Any]) -> Iterator[list[str]]:
    """One per arm, a text for each of STAGES: milliseconds, then what the verify achieves of the ceilings."""
    for arm, of in stages.items():
        times = [number(of[f"{name}_ms"], ".1f") for name in STAGES[1:6]]
        if arm == AR:
            times[0] = "-"  # its round has a stage of that name, which makes a block of the anchor
        yield [
            arm,
            *times,
            f"{of['verify_bytes_per_second'] / 1e9:.1f} ({of['verify_bytes_share']:.0%})",
            f"{of['verify_flops_per_second'] / 1e9:.0f} ({of['verify_flops_share']:.0%})",
        ]


def ceiling(results: Mapping[str, Any]) -> str:
    most = results["ceiling"]
    return (
        f"After a prompt of {results['prompt_tokens']} tokens. GB/s, GFLOP/s: of weights, in the verify, and their "
        f"share of what large products reach on this device: {most['bytes_per_second'] / 1e9:.1f} GB/s "
        f"(matrix and vector), {most['flops_per_second'] / 1e9:.0f} GFLOP/s (two matrices)."
    )


def acceptance(dataset: Mapping[str, Any]) -> Iterator[str]:
    for arm, of in dataset["arms"].items():
        if of["acceptance_by_position"]:
            rounds = ", ".join(f"{n}: {count}" for n, count in enumerate(of["histogram"]))
            yield f"{arm}: {rounds}; {', '.join(f'{share:.2f}' for share in of['acceptance_by_position'])}"


def differing(same: Mapping[str, int]) -> str:
    """0, "2 near-ties", "1 SUSPICIOUS, 1 near-tie"."""
    near, bad = same["near_ties"], same["suspicious"]
    parts = [f"{bad} SUSPICIOUS"] * bool(bad) + [f"{near} near-tie{'s' * (near > 1)}"] * bool(near)
    return ", ".join(parts) or "0"


def ratio(of: Mapping[str, float | None]) -> str:
    return spread(of["median"], of["low"], of["high"], ".2f")


def spread(middle: float | None, low: float | None, high: float | None, form: str) -> str:
    if middle is None:
        return "-"
    return f"{middle:{form}}" + ("" if low is None else f" [{low:{form}}-{high:{form}}]")


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
