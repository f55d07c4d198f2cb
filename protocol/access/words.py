"""The words of an invitation, as blue-walnut-lamp: drawn from a fixed list, and read as people type them.

The list has 256 words of four to eight letters. Any two differ in their first three letters, and by three letters or
more in all, so that a slip gives a word that is not in the list. Three words are one of 2²⁴ choices: with three tries
an attacker opens one invitation in 5.6 million.
"""

from __future__ import annotations

import difflib
import re
import secrets
from functools import cache
from importlib import resources

from protocol.access.tokens import MAX_TOKEN_CHARACTERS
from protocol.errors import TokenError

WORDS = 3  # in one invitation
LIFE_SECONDS = 600.0
MOST_TRIES = 3  # wrong ones, after which the words open nothing any more
MOST_CHARACTERS = 64  # of what is typed for them
EXAMPLE = "blue-walnut-lamp"
# of an exchange, see `protocol.access.word_exchange`
MESSAGE_BYTES = 33  # of SPAKE2: the side, and a point of the curve
PROOF_BYTES = 32
MAX_SEALED_BYTES = MAX_TOKEN_CHARACTERS + 64
_LOOKS_LIKE_WORDS = re.compile(r"[A-Za-z]+([-_. ]+[A-Za-z]+){2}")


@cache
def known_words() -> tuple[str, ...]:
    """Return the list, in order."""
    return tuple(resources.files(__package__).joinpath("words.txt").read_text(encoding="utf-8").split())


def draw_words() -> str:
    """Draw the words of a new invitation with the system's random generator."""
    return "-".join(secrets.choice(known_words()) for _ in range(WORDS))


def are_words(text: str) -> bool:
    """Return whether a text has the form of an invitation's words; they may be misspelt."""
    return len(text) <= MOST_CHARACTERS and _LOOKS_LIKE_WORDS.fullmatch(text.strip()) is not None


def read_words(text: str) -> str:
    """Return words as `draw_words` writes them. Raises `TokenError` that names the first unknown one."""
    if not are_words(text):
        raise TokenError(f"An invitation has three words, as {EXAMPLE}. Ask for them again.")
    words = re.split(r"[-_. ]+", text.strip().lower())
    for word in words:
        if word not in known_words():
            near = difflib.get_close_matches(word, known_words(), n=1)
            advice = f"Did you mean {near[0]!r}?" if near else "Ask for the words again."
            raise TokenError(f"No invitation has the word {word!r}. {advice} Nothing was tried with it.")
    return "-".join(words)
