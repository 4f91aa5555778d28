"""Finds special tokens that are misspelt in the strings of a turn format.

A misspelt special token would be read letter by letter, and turns would differ from those of the policy's training.
Example, for a tokenizer that has `<|im_start|>` and `<|im_end|>`
    `<|im_strat|>user`    -> `<|im_strat|>`, close to `<|im_start|>`
    `<|user|>`            -> `<|user|>`, close to none: the tokenizer has tokens of this form, and not this token
    `<thinking>`, `User:` -> nothing, though the tokenizer may have `<think>`
    `</table>`, `<TD>`    -> nothing, though the tokenizer may have `<table>` and `<td>`
"""

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches

MARK_LIKE = re.compile(r"<[^\s<>]{1,64}>?|\[[^\s\[\]]{1,64}\]?|[^\s<>\[\]]{1,64}[|｜]>")
"""Pattern of a word that may be meant as a token: in brackets, one of which may be missing."""

BARS = ("<|", "<｜")
"""Beginnings of words that are meant as tokens, if the tokenizer has tokens that begin the same way."""

BAR = re.compile("[|｜]")

PLAIN = re.compile(r"^[<\[]/?[^\W_]+/?[>\]]?$")
"""One word in brackets, such as a tag of a document."""

CLOSE, CLOSER = 0.82, 0.85
"""Least similarity (`difflib`) of a misspelt token to the token that is meant: for words that begin with BARS, and for
other words, which people write too: `<thinking>` is no misspelt `<think>`."""

SHORT = 3
"""A word without a bar and with at most this many letters is never a misspelt token: `[b]` is no misspelt `<b>`."""


def misspelt(text: str, marks: Collection[str], *, known: str = "") -> tuple[str, str] | None:
    """Return a word of the text that is meant as a token and is not in `marks`, with the mark that is meant.

    The mark is empty if no mark is similar. None if there is no such word. Words of the text `known` are not misspelt.
    """
    longest_first = sorted(marks, key=len, reverse=True)
    meant_so = set(_words(known, longest_first))
    for word in _words(text, longest_first):
        if word in meant_so:
            continue
        alike = [mark for mark in longest_first if _may_mean(word, mark)]
        by_letters = {_letters(mark): mark for mark in alike}
        close = get_close_matches(word, alike, n=1, cutoff=CLOSE if word.startswith(BARS) else CLOSER)
        meant = by_letters.get(_letters(word)) or (close[0] if close else "")
        if meant or any(word.startswith(bar) and mark.startswith(bar) for mark in marks for bar in BARS):
            return word, meant
    return None


def _may_mean(word: str, mark: str) -> bool:
    """Whether the word may be a misspelt mark.

    A word without a bar may not if people write such words: a short word, a tag that closes what the mark opens, a tag
    with attributes, or the plural of a mark that is a word itself.
    """
    if BAR.search(word):
        return True
    word_letters, mark_letters = _letters(word), _letters(mark)
    if len(word_letters) <= SHORT or ("/" in word) is not ("/" in mark):
        return False
    if not PLAIN.search(word) or BAR.search(mark):
        return True
    closed = word.endswith((">", "]"))
    return closed and (
        word_letters == mark_letters
        or (not word_letters.startswith(mark_letters) and not mark_letters.startswith(word_letters))
    )


def _words(text: str, longest_first: Sequence[str]) -> list[str]:
    """Return the words that may be meant as tokens, from the text between the marks."""
    plain = re.split("|".join(map(re.escape, longest_first)), text) if longest_first else [text]
    return [word for part in plain for word in MARK_LIKE.findall(part)]


def _letters(word: str) -> str:
    """The word without brackets, bars, dashes and case; the word itself if nothing is left."""
    return "".join(letter for letter in word if letter.isalnum()).casefold() or word
