"""Tags and words of documents are no misspelt tokens, whatever tags a tokenizer has among its tokens."""

import pytest

from rose.workers.environments.misspelling import misspelt

TAGS = ["<table>", "<td>", "<b>", "<i>", "<s>", "<h1>", "<code>", "<br>", "<sup>", "<start_of_turn>", "[INST]"]
"""As Gemma's tokenizers have beside the tokens that mark turns."""


@pytest.mark.parametrize(
    "text",
    [
        *("</table>", "<table></table>", "[b]", "[i]", "[s]", "[/s]", "[/b]", "<B>", "<TD>", "</TD>", "<tr>", "<H1>"),
        *("<br/>", "<sub>", '<table class="wide">', "<table\n", "<tables>", "</code>", "[/code]", "a <b"),
    ],
)
def test_a_tag_or_a_short_word_beside_a_token_like_it_is_no_misspelt_token(text: str) -> None:
    assert misspelt(f"user: {text}\n", TAGS) is None


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("<start_of_tum>", "<start_of_turn>"),
        ("<start_of_turn", "<start_of_turn>"),
        ("<Start_Of_Turn>", "<start_of_turn>"),
        ("[start_of_turn]", "<start_of_turn>"),
        ("<|start_of_turn|>", "<start_of_turn>"),
        ("<INST>", "[INST]"),
        ("<tabel>", "<table>"),
        ("<|b|>", "<b>"),
    ],
)
def test_a_misspelt_token_among_tags_is_found_with_the_one_that_is_meant(word: str, meant: str) -> None:
    assert misspelt(f"user: {word}\n", TAGS) == (word, meant)
