"""The results as text, on one screen of 80 columns."""

import statistics
import textwrap
from typing import Any

COLUMNS = 80


def page(report: dict[str, Any]) -> str:
    lines = [*_head(report), "", *_checks(report)]
    if report["speeds"]:
        lines += ["", *_speeds(report)]
    if report["link"]:
        lines += ["", *_link(report["link"])]
    verdict = "all checks passed" if report["ok"] else "some checks FAILED: please send us this report, with --json"
    return "\n".join([*lines, "", f"{verdict}, {report['seconds']} s"]) + "\n"


def _head(report: dict[str, Any]) -> list[str]:
    first = report["machines"][0]
    versions = ("python", "torch", "triton", "numba", "cuda", "rocm", "nccl")
    words = [f"gradsieve {first['gradsieve']}", *(f"{name} {first[name]}" for name in versions if first[name])]
    lines = _wrapped(", ".join(words), "")
    hosts = len({each["host"] for each in report["machines"]})
    backends = ", ".join(sorted({each["backend"] for each in report["machines"]}))
    lines.append(_cut(f"workers  {report['workers']} on {hosts} host(s), backend {backends}"))
    kinds: dict[str, int] = {}
    for each in report["machines"]:
        words_ = f"{each['device'].split(':')[0]}: {each['device_name']}; kernels: {each['kernels']}"
        kinds[words_] = kinds.get(words_, 0) + 1
    return lines + [line for kind, count in kinds.items() for line in _wrapped(f"{count} x {kind}", " " * 9)]


def _checks(report: dict[str, Any]) -> list[str]:
    lines = []
    for check in report["checks"]:
        lines.append(_cut(f"{'ok  ' if check['ok'] else 'FAIL'} {check['name']:<22}{_passed(check)}"))
        for failure in check["failures"][:3]:
            lines += _wrapped(failure, " " * 5)
    return lines


def _passed(check: dict[str, Any]) -> str:
    return str(check["detail"]) if check["ok"] else f"failed on {len(check['failures'])} worker(s)"


def _speeds(report: dict[str, Any]) -> list[str]:
    """The median over workers."""
    lines = [f"{'kernel':<22}{'MB moved':>10}{'ms':>10}{'GB/s':>10}{'of a copy':>12}"]
    for rows in zip(*report["speeds"], strict=True):
        seconds = statistics.median(row["seconds"] for row in rows)
        part = statistics.median(row["of_copy"] for row in rows)
        size = rows[0]["bytes"]
        figures = f"{size / 1e6:>10.2f}{1e3 * seconds:>10.3f}{size / seconds / 1e9:>10.2f}{100 * part:>10.0f} %"
        lines.append(f"{rows[0]['kernel']:<22}{figures}")
    return lines


def _link(found: dict[str, Any]) -> list[str]:
    bandwidths, latencies = found["to_next_bytes_per_s"], found["to_next_latency_s"]
    slowest = min(range(len(bandwidths)), key=bandwidths.__getitem__)
    return [
        f"{'network':<22}{'latency':>16}{'bandwidth':>18}   messages of {found['message_bytes'] / 1e6:.3g} MB",
        f"{'all-reduce':<22}{_ms(found['all_reduce_latency_s']):>16}{_rate(found['all_reduce_bytes_per_s']):>18}",
        f"{'to the next, median':<22}{_ms(statistics.median(latencies)):>16}"
        f"{_rate(statistics.median(bandwidths)):>18}",
        f"{'to the next, slowest':<22}{_ms(max(latencies)):>16}{_rate(bandwidths[slowest]):>18}   "
        f"from worker {slowest}",
    ]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.1f} MB/s"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, initial_indent=indent, subsequent_indent=indent)


def _cut(line: str) -> str:
    return line if len(line) <= COLUMNS else line[: COLUMNS - 3] + "..."
