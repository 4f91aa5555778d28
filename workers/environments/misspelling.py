"""Misspelt tokens in the text that a turn format puts around observations.

A special token that is misspelt is read letter by letter, and the policy never sees its turns as it was trained to.
Nothing else says so: the text is as good as any.

Example, of a tokenizer that has `<|im_start|>` and `<|im_end|>`
    `<|im_strat|>user`    -> `<|im_strat|>`, close to `<|im_start|>`
    `<|user|>`            -> `<|user|>`, close to none: the tokenizer writes its tokens so, and has no such token
    `<thinking>`, `User:` -> nothing, though the tokenizer may have `<think>`
    `</table>`, `<TD>`    -> nothing, though the tokenizer may have `<table>` and `<td>`
"""

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches

MARK_LIKE = re.compile(r"<[^\s<>]{1,64}>?|\[[^\s\[\]]{1,64}\]?|[^\s<>\[\]]{1,64}[|｜]>")
"""What may be meant as a token: a word in brackets, one of which may have been forgotten."""

BARS = ("<|", "<｜")
"""Who writes a word so means a token, where the tokenizer has others that begin so."""

BAR = re.compile("[|｜]")

PLAIN = re.compile(r"^[<\[]/?[^\W_]+/?[>\]]?$")
"""One word, as tags of documents have."""

CLOSE, CLOSER = 0.82, 0.85
"""Least likeness of a misspelt token and the one that is meant, as `difflib` measures it. Words without a bar are also
those of people: `<thinking>` is no misspelt `<think>`."""

SHORT = 3
"""A word of so few letters without a bar is like too many others: `[b]` and `<TD>` are no misspelt `<b>` and `<td>`."""


def misspelt(text: str, marks: Collection[str], *, known: str = "") -> tuple[str, str] | None:
    """A word of the text that is meant as a token and is none of `marks`, with the closest of them, if one is close.

    None if there is no such word. Words that `known` has, and not as a part of a token, are meant as they are.
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

    One without a bar may be a word of people: a short one, a tag that closes what the mark opens, a tag with
    attributes, or the plural of a mark that is a word itself.
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
    """What may be meant as a token, of the text between the marks."""
    plain = re.split("|".join(map(re.escape, longest_first)), text) if longest_first else [text]
    return [word for part in plain for word in MARK_LIKE.findall(part)]


def _letters(word: str) -> str:
    """The word without brackets, bars, dashes and case; the word itself if nothing is left."""
    return "".join(letter for letter in word if letter.isalnum()).casefold() or word
