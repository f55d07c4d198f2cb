"""The sources of a tokenizer.json: a file, a folder that has one or can be made to, or the Hugging Face Hub."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from node.data.contents import without_mark
from node.machine.home import at_home
from node.machine.limits import optional
from node.machine.named import HUB, is_folder, is_there
from node.machine.pointers import POINTER_BYTES, pointer_in
from protocol.errors import MissingPackage, TokenizerError
from protocol.run.piece_hashes import MAX_TOKENIZER_BYTES

FILE_NAME = "tokenizer.json"
CONFIG = "tokenizer_config.json"
OTHER_FILES = ("tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "merges.txt", "vocab.txt")


def read_tokenizer(place: str) -> bytes:
    """A tokenizer.json: a file, a directory with one, or hub:NAME. Raises `TokenizerError` with what to do."""
    if place.startswith(HUB):
        return _from_hub(place.removeprefix(HUB))
    path = at_home(place)
    if is_folder(path, TokenizerError):
        if not is_there(path / FILE_NAME, TokenizerError) and others_in(path):
            return _converted(path)
        path = path / FILE_NAME
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise TokenizerError(f"{path} is a pipe or a device. Write it to a file, and name that.")
        size = facts.st_size
        if not size:
            raise TokenizerError(f"{path} is empty. Fetch it again, or name another tokenizer.json.")
        if size > MAX_TOKENIZER_BYTES:
            raise TokenizerError(
                f"{path} has {size:,} bytes; a tokenizer may have {MAX_TOKENIZER_BYTES:,} at most. "
                "Check that it is a tokenizer.json."
            )
        raw = without_mark(path.read_bytes())
        if told := pointer_in(raw[:POINTER_BYTES], path):
            raise TokenizerError(f"{path} is yet to be fetched: {told}")
        json.loads(raw)
        return raw
    except (ValueError, RecursionError):
        raise TokenizerError(
            f"{path} is not JSON. Name a Hugging Face tokenizer.json, or a folder with one."
        ) from None
    except OSError as error:
        raise TokenizerError(
            f"Cannot read the tokenizer {path} ({error.strerror}). Check the path; for one on the Hugging Face "
            f"Hub write --tokenizer {HUB}{place}."
        ) from None


def others_in(directory: Path) -> list[str]:
    """The files of a tokenizer in another form than tokenizer.json."""
    return [name for name in OTHER_FILES if is_there(directory / name, TokenizerError)]


def _converted(directory: Path) -> bytes:
    """The tokenizer.json of a folder that says, in tokenizer_config.json, what its other files are.

    Without that nothing is guessed: the same vocab.json gives other ids as GPT-2's and as Qwen's.
    """
    try:
        names_class = bool(
            json.loads((directory / CONFIG).read_text(encoding="utf-8")).get("tokenizer_class")
        )
        raw = _by_transformers(str(directory)) if names_class else b""
        vocabulary = directory / "vocab.json"
        wanted = json.loads(vocabulary.read_text(encoding="utf-8")) if vocabulary.exists() else {}
    except MissingPackage as missing:
        raise TokenizerError(
            f"{directory} has {' and '.join(others_in(directory))} but no {FILE_NAME}, which transformers can "
            f"make of them. {missing}"
        ) from None
    except Exception:  # noqa: BLE001  what the library raises differs with its version and the fault
        raw, wanted = b"", {}
    if raw and wanted.items() <= _vocabulary(raw).items():
        return raw
    raise TokenizerError(
        f"{directory} has {' and '.join(others_in(directory))} but no {FILE_NAME}, and it cannot be converted here. "
        f"Make one where the tokenizer's own library is installed, by transformers: "
        "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY); or name one with --tokenizer."
    )


def _vocabulary(raw: bytes) -> dict[str, int]:
    import tokenizers

    vocabulary: dict[str, int] = tokenizers.Tokenizer.from_str(raw.decode()).get_vocab(with_added_tokens=True)
    return vocabulary


def _by_transformers(name: str) -> bytes:
    transformers = optional("transformers", "hf")
    transformers.utils.logging.set_verbosity_error()  # what it has to say is said here, in one sentence
    raw: str = transformers.AutoTokenizer.from_pretrained(name).backend_tokenizer.to_str()
    return raw.encode()


def _from_hub(name: str) -> bytes:
    """The tokenizer.json of a model on the Hub; one that has none is converted by transformers."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        try:
            file = hf_hub_download(name, FILE_NAME)
        except EntryNotFoundError as error:
            if isinstance(error, LocalEntryNotFoundError):  # the hub was not reached
                raise
            return _by_transformers(name)
    except MissingPackage:
        raise
    except Exception as error:  # noqa: BLE001  of the network, the disk, the name and the files, by several libraries
        reason = str(error).strip().splitlines()
        raise TokenizerError(
            f"Cannot get the tokenizer {name!r} from the Hugging Face Hub "
            f"({reason[0][:120] if reason else type(error).__name__}). Check the name and the connection, or give "
            "a tokenizer.json on this machine with --tokenizer FILE."
        ) from None
    return read_tokenizer(file)
