"""Whether tokenising starves training: the fraction of time that a node waits for data.

Makes JSON lines from the Python library's own sources, varied until they are as long as asked, trains a byte-level
BPE on some of them, and tokenises all once in one process for its rate. Then two `noloco-node` processes as they
ship, one for each stage of a Llama, train on them: the first has the text and tokenises ahead of training. Prints
`data_wait`, the fraction of the time since its first step in which it waited for data, and `tokenising_by_training`,
how many times quicker text is tokenised than it is trained on.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.chain import Chain, ChainFailed, manifest_of
from reporting.report import Report, arguments_of, parser_of, run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from node.data.batches import TOKENISED_AT_ONCE, TokenisingTally, tokenised
from node.data.documents import Split, stored_documents
from node.data.sources import python_stdlib_files
from node.data.tokenizer import FileTokenizer, end_of_text_in, identity_of
from protocol.run.manifest import Manifest, manifest_from

VOCABULARY = 8_192
TRAINED_ON = 10_000_000  # bytes for the tokenizer
WORD = re.compile(r"[A-Za-z]{3,}")


def varied_sources() -> Iterator[str]:
    """The library's files again and again, another fifth of the words spelt backwards each time."""
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in python_stdlib_files()]
    for turn in range(1_000_000):

        def spelt(word: re.Match[str], turn: int = turn) -> str:
            return word[0][::-1] if turn and (len(word[0]) * 7 + ord(word[0][0]) * turn) % 5 == 0 else word[0]

        yield from (WORD.sub(spelt, text) for text in texts if text)


def write_text(path: Path, nbytes: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for text in varied_sources():
            nbytes -= len(text.encode())
            file.write(json.dumps({"text": text}) + "\n")
            if nbytes <= 0:
                return


def train_bpe(path: Path, text: Path) -> bytes:
    def some() -> Iterator[str]:
        done = 0
        with text.open() as file:
            for line in file:
                if done > TRAINED_ON:
                    return
                done += len(line)
                yield json.loads(line)["text"]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        some(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(str(path))
    return path.read_bytes()


def tokenise_all(text: Path, raw: bytes, cache: Path) -> dict[str, Any]:
    """Read all documents into a store, then tokenise each once, as training does."""
    began = time.perf_counter()
    documents = stored_documents([str(text)], "text", 16_384, Split(0.05), cache)
    read_seconds = time.perf_counter() - began
    tokenizer, tally, batch = FileTokenizer(raw, end_of_text_in(raw)), TokenisingTally(), list[str]()
    for document in documents.training(("benchmark",), 0, 0):
        batch.append(document)
        if len(batch) == TOKENISED_AT_ONCE:
            tokenised(batch, tokenizer, tally)
            batch.clear()
    nbytes, tokens = tally.rate()
    return {
        "megabytes": round(tally.nbytes / 1e6, 1),
        "documents": tally.documents,
        "reading_seconds": round(read_seconds, 1),
        "tokenising_seconds": round(tally.seconds, 1),
        "megabytes_per_second": round(nbytes / 1e6, 2),
        "tokens_per_second": round(tokens),
    }


def with_bpe(manifest: Manifest, raw: bytes) -> Manifest:
    contents = manifest.model_dump()
    contents["model"]["vocab_size"] = VOCABULARY
    contents["data"] |= {
        "source": "local", "tokenizer": identity_of(raw), "end_of_text": end_of_text_in(raw)
    }  # fmt: skip
    return manifest_from(contents)


def train(manifest: Manifest, text: Path, tokenizer: Path, cache: Path, seconds: float) -> dict[str, Any]:
    options = ["--data", str(text), "--data-cache", str(cache)]
    places: list[tuple[str, list[str]]] = [("127.0.0.1", [])] * 3
    with Chain(manifest, places, options, founding=["--tokenizer", str(tokenizer)]) as chain:
        chain.wait_for_steps(1)
        rate = chain.tokens_per_second(seconds)
        told = chain.events("data")[-1]
    return {
        "hidden": manifest.model.hidden_size,
        "trained_tokens_per_second": round(rate),
        "tokenised_tokens_per_second": told["tokens_per_second"],
        "data_wait": told["waited_fraction"],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=150.0, help="of training")
    arguments = arguments_of(parser, megabytes=1.0, hidden=64, seconds=12.0)
    report = Report("data", arguments.json)
    with tempfile.TemporaryDirectory(prefix="noloco-data-") as folder:
        text, file, cache = Path(folder, "text.jsonl"), Path(folder, "tokenizer.json"), Path(folder, "cache")
        write_text(text, int(arguments.megabytes * 1e6))
        raw = train_bpe(file, text)
        results = [tokenise_all(text, raw, cache)]
        report.tell_row(results[0])
        manifest = with_bpe(manifest_of(arguments.hidden), raw)
        results.append(train(manifest, text, file, cache, arguments.seconds))
        report.tell_row(results[1])
    quicker = results[0]["tokens_per_second"] / results[1]["trained_tokens_per_second"]
    ratios = {"data_wait": results[1]["data_wait"], "tokenising_by_training": round(quicker, 1)}
    report.conclude(ratios, results)


if __name__ == "__main__":
    run(main, ChainFailed)
