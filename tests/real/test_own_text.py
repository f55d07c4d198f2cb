"""A run on text of one's own with a tokenizer of one's own: real daemons, stopped and started again."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.real.daemons import NodeDaemon, SeedDaemon, run_tool
from tests.real.test_wrong_inputs import assert_refused, run
from tests.unit.corpora import as_hub_layout, as_jsonl, made_up
from tests.unit.tokenizers_made_here import bpe

DOCUMENTS = made_up(400)


def test_a_run_on_json_lines_with_a_bpe_goes_on_after_a_stop_and_is_evaluated(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(bpe())
    text = as_jsonl(tmp_path / "text.jsonl", DOCUMENTS, "body")
    data = ("--data", text, "--text-field", "body")
    seed = SeedDaemon(tmp_path / "run", "--preset", "tiny", "--tokenizer", str(tokenizer))
    join = ("--join", seed.join_address())
    last = NodeDaemon(tmp_path / "last", *join, "--stage", "1")
    first = NodeDaemon(tmp_path / "first", *join, "--stage", "0", *data)
    first.wait_for_step(5)
    assert (tmp_path / "first" / "tokenizer.json").read_bytes() == bpe()
    signed = (tmp_path / "run" / "tokenizer.hashes").read_bytes()
    assert (tmp_path / "first" / "tokenizer.hashes").read_bytes() == signed, "it came by its pieces"
    assert first.leave() == 0, first.output
    done = first.step

    again = NodeDaemon(tmp_path / "first", *join, "--stage", "0", *data)
    again.wait_for_step(done + 5)
    assert again.events("restored")[-1]["step"] == done
    cache = ("--data-cache", str(tmp_path / "cache"))
    measured = run_tool("eval", *join, *data, "--held-out", "--sequences", "8", *cache)
    assert re.search(r"\d\.\d+ nats per token.* on 1,024 tokens", measured.stdout), measured
    assert again.leave() == 0, again.output
    last.leave()

    other = tmp_path / "other.json"
    other.write_bytes(bpe(special=("<|endoftext|>", "<|more|>")))
    wrong = ("--host", "127.0.0.1", "--no-relay", "--stage", "0", "--tokenizer", str(other))
    assert_refused(
        run("node.cli", *join, *data, *wrong, cwd=tmp_path), "not the tokenizer of run", "--tokenizer"
    )
    seed.kill()


def test_wrong_data_and_tokenizers_end_a_local_swarm_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_bytes(bpe())
    place = as_hub_layout(tmp_path / "dataset", DOCUMENTS)
    swarm = ("swarm", "--state-dir", "run", "--summary", "summary.json")
    assert_refused(
        run("bootstrap.tools_cli", *swarm, "--tokenizer", "no.json", cwd=tmp_path), "not a tokenizer", "Give"
    )
    wrong_field = ("--data", place, "--text-field", "body", "--tokenizer", "tokenizer.json")
    assert_refused(
        run("bootstrap.tools_cli", *swarm, *wrong_field, cwd=tmp_path), "no column 'body'", "id, text"
    )
    assert not json.loads((tmp_path / "summary.json").read_text())["complete"]
