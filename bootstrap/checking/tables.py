"""The report of `noloco manifest check` on a run: tables of its stages, and sentences on what they leave out."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bootstrap.checking.report import TOLERABLE, AssumedLinks, Hop, MemoryFigures, Report
from bootstrap.display import plain_table
from node.data.batches import window_bytes
from node.model.memory_model import backward_bytes, forward_bytes
from node.model.stage import described_parameters
from node.watch.words import duration
from protocol.run.manifest import Manifest
from protocol.windows import amount


def show_report(verdict: str, report: Report, manifest: Manifest, links: AssumedLinks) -> None:
    """Print the verdict, the tables and the sentences."""
    memory = memory_table([stage.memory_parts for stage in report.stages])
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    for subject, text in sentences(report, manifest, links).items():
        grid.add_row(subject, Text(text))
    title = f"{report.name}: {described_parameters(manifest)}"
    Console(markup=False).print(
        verdict, "", title, "", stage_table(report), "", memory, "", grid, sep="\n", highlight=False
    )


def stage_table(report: Report) -> Table:
    """One row for each stage: what one replica of it needs."""
    table = plain_table(
        f"One of {report.replicas} replicas of each of {len(report.stages)} "
        f"stage{'s' * (len(report.stages) > 1)}:",
        ("stage", "layers", "parameters", "memory", "sent in\na round", "bytes/\ntoken", "waits",
         "all-reduce,\nbytes/token"),
    )  # fmt: skip
    for stage in report.stages:
        table.add_row(
            str(stage.stage),
            str(stage.layers),
            _count(stage.parameters),
            amount(stage.memory),
            amount(round(stage.round.sent)),
            _short(stage.round.per_token),
            duration(stage.round.seconds),
            _short(stage.all_reduce.per_token),
        )
    return table


def sentences(report: Report, manifest: Manifest, links: AssumedLinks) -> dict[str, str]:
    """Say in sentences, by subject, what the table leaves out."""
    outer = manifest.outer
    worst = max(report.stages, key=lambda stage: stage.round.seconds)
    where = f"at {links.mbit:g} Mbit/s and {links.latency * 1000:g} ms one way"
    said = {
        "round": f"{outer.inner_steps} inner steps of {report.tokens_per_step:,} tokens: "
        f"{report.tokens_per_round:,} tokens a replica.",
        "averaging": _averaging(report, manifest),
    }
    if worst.round.seconds:
        said["waiting"] = (
            f"{duration(worst.round.seconds)} a round {where}; less than {TOLERABLE:.0%} of the time if an inner "
            f"step takes {duration(report.least_step_seconds)} or more."
        )
    elif worst.round.sent:
        said["waiting"] = (
            f"none: {amount(round(worst.round.sent))} travel while training goes on, "
            f"{duration(links.seconds(worst.round.sent))} {where}."
        )
    if worst.all_reduce.seconds:
        said["all-reduce"] = (
            f"of float32 gradients in every inner step instead: {duration(worst.all_reduce.seconds)} a step, "
            f"{duration(worst.all_reduce.seconds * outer.inner_steps)} a round."
        )
    if report.hop is not None:
        said["pipeline"] = _pipeline(report.hop, report, manifest)
    said["memory"] = (
        "by formula, beside about 0.6 GiB of the program; a node measures before it serves, and gets by with "
        'anything from "together" down to "at least". '
        f"Stage 0 holds {amount(window_bytes(manifest.data))} of text beside it, to shuffle (data.shuffle_window)."
    )
    said["stability"] = _stability(report)
    if report.notes:
        said["note"] = "\n".join(report.notes)
    if report.study:
        said["study"] = report.study
    return said


def _pipeline(hop: Hop, report: Report, manifest: Manifest) -> str:
    wire, forward, back = manifest.wire, forward_bytes(manifest), backward_bytes(manifest)
    microbatches = report.tokens_per_round // manifest.tokens_per_microbatch
    return (
        f"{_short(hop.forward)} bytes a token and hop forward ({wire.activations}, labels included), "
        f"{_short(hop.back)} back ({wire.gradients}); {duration(hop.seconds)} a hop and microbatch. A microbatch "
        f"of {manifest.inner.sequences} × {manifest.data.sequence_tokens:,} tokens is {amount(forward)} forward and "
        f"{amount(back)} back, the {microbatches:,} of a round {amount(microbatches * (forward + back))}."
    )


def _averaging(report: Report, manifest: Manifest) -> str:
    outer, wire = manifest.outer, manifest.wire
    if outer.method == "local":
        return "never (outer.method local)."
    if outer.method == "diloco":
        share = 2 * (report.replicas - 1) / report.replicas
        return f"over all replicas: {share:.2f} states ({wire.gossip}) out and as many in, each round."
    what = {
        "none": f"{_state(outer.fragments)} ({wire.gossip}) out and one in, each round",
        "phi-early": f"φ ({wire.gossip}) during the round and Δ ({wire.progress}) at its end, out and in",
    }[outer.overlap]
    return f"with one random partner: {what}; a small sample of φ goes along."


def _state(fragments: int) -> str:
    return "one state" if fragments == 1 else f"one of {fragments} fragments of the state"


def _stability(report: Report) -> str:
    found = report.stability
    if found is None:
        return "nothing holds the replicas together."
    line = f"γ {found.gamma:g} is at {found.gamma / found.bound:.0%} of its bound {found.bound:.3g}. "
    if found.spread == 0:
        return line + "Replicas stay equal."
    return line + (
        f"{report.replicas} replicas settle {found.spread:.3f} times s apart (standard deviations; s: of the noise "
        "that a round adds to each by itself, which goes with the learning rate)."
    )


def _count(number: int) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 1e7 else f"{number:,}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def memory_table(figures: list[MemoryFigures]) -> Table:
    """One row for each stage: what one replica of it keeps in memory, at its fastest and at least."""
    unit, name = (2**30, "GiB") if max(each.whole for each in figures) >= 2**30 else (2**20, "MiB")
    table = plain_table(
        f"Memory of one replica in {name}, float32; with a GPU, averaging to messages are the host's:",
        ("stage", "weights,\nmomenta", "averag-\ning", "check-\npoint", "mes-\nsages", "microb.\nkept",
         "microb.\nat work", "in\nflight", "to-\ngether", "at\nleast"),
        is_dense=True,
    )  # fmt: skip
    for stage, each in enumerate(figures):
        cost, buffers = each.microbatch, each.buffers
        parts = [each.state, buffers.averaging, buffers.checkpoint, buffers.messages, cost.kept, cost.peak]
        columns = [f"{part / unit:.1f}" for part in (*parts, each.whole, each.least)]
        table.add_row(str(stage), *columns[:6], str(each.in_flight), *columns[6:])
    return table
