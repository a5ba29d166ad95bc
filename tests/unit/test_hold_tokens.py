"""The text in which a hold's token travels."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucxkv.errors import ParamInvalid
from ucxkv.holds import MAX_WORDS, Token, token_of

WORD = st.integers(1, 2**64 - 1)
TOKENS = st.builds(Token, st.integers(1, MAX_WORDS - 1), WORD, st.integers(0, 2**64 - 1))
HEX = "0123456789abcdef"


@given(TOKENS)
def test_there_and_back(token: Token) -> None:
    text = token.text()
    assert token_of(text) == token
    assert len(text) == 40
    assert set(text) <= set(HEX)


@given(TOKENS, TOKENS)
def test_two_tokens_have_two_texts(one: Token, other: Token) -> None:
    assert (one == other) == (one.text() == other.text())


@given(TOKENS, st.integers(0, 39), st.sampled_from(HEX))
def test_a_changed_digit_is_another_token_or_none(token: Token, place: int, digit: str) -> None:
    text = token.text()
    changed = text[:place] + digit + text[place + 1 :]
    try:
        found = token_of(changed)
    except ParamInvalid:
        assert changed != text
    else:
        assert (found == token) == (changed == text)
        assert found.text() == changed


@given(st.text() | st.text(HEX) | st.text(HEX, min_size=40, max_size=40))
def test_any_text(text: str) -> None:
    """It is refused, or stands for exactly one token, whose text it is."""
    try:
        token = token_of(text)
    except ParamInvalid:
        return
    plain = "".join(text.split()).lower()
    assert token.text() == plain
    assert 0 < token.slot < MAX_WORDS
    assert token.word


@given(TOKENS, st.integers(0, 39))
def test_cut_short_or_made_longer(token: Token, length: int) -> None:
    for text in (token.text()[:length], token.text() + "0" * (length + 1)):
        with pytest.raises(ParamInvalid, match="token"):
            token_of(text)


@given(TOKENS, st.sampled_from(sorted(set(string.printable) - set(string.hexdigits))))
def test_other_characters(token: Token, other: str) -> None:
    with pytest.raises(ParamInvalid):
        token_of(other + token.text()[1:])


@pytest.mark.parametrize("slot", [0, MAX_WORDS, 2**32 - 1])
@given(word=WORD)
def test_words_no_hold_can_have(slot: int, word: int) -> None:
    with pytest.raises(ParamInvalid):
        token_of(Token(slot, word, 1).text())


def test_the_word_zero() -> None:
    with pytest.raises(ParamInvalid):
        token_of(Token(1, 0, 1).text())


@pytest.mark.parametrize("value", [b"00" * 20, 7, 1.5, ("a",), object(), bytearray(20)])
def test_other_types(value: object) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        token_of(value)
