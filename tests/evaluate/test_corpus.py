"""Windows: every token once, BOS in front, and what is wrong with a text in one sentence."""

import pytest

from g4tool.errors import G4Error, UsageError
from g4tool.evaluate.corpus import Text, cut, read_text, shipped_texts, spread, window_length

from .conftest import GetTiny

LENGTH = 100


def test_every_token_is_scored_once_after_bos(tiny: GetTiny) -> None:
    tokenizer = tiny("tiny-31b").tokenizer
    text = shipped_texts()[0]
    windows = cut([text], tokenizer, LENGTH)
    assert all(window.ids[0] == tokenizer.bos_id for window in windows)
    joined = [token for window in windows for token in window.ids[1:]]
    assert joined == tokenizer.encode(text.content, bos=False)
    assert [window.scored for window in windows[:-1]] == [LENGTH] * (len(windows) - 1)
    assert 0 < windows[-1].scored <= LENGTH


def test_bytes_add_up_to_the_text(tiny: GetTiny) -> None:
    text = Text("plain", "The harbour wakes before the town does. " * 40)
    windows = cut([text], tiny("tiny-31b").tokenizer, LENGTH)
    assert sum(window.nbytes for window in windows) == len(text.content.encode())


def test_a_limit_takes_whole_windows_from_all_of_the_text(tiny: GetTiny) -> None:
    tokenizer = tiny("tiny-31b").tokenizer
    texts = [Text(name, f"{name} was here again. " * 200) for name in ("one", "two")]
    everything = cut(texts, tokenizer, LENGTH)
    some = cut(texts, tokenizer, LENGTH, limit=4 * LENGTH + 7)
    assert [window.scored for window in some] == [LENGTH] * 4
    assert {window.source for window in some} == {"one", "two"}
    assert set(some) <= set(everything)
    assert cut(texts, tokenizer, LENGTH, limit=10**9) == everything


def test_windows_cross_the_sliding_window_many_times(tiny: GetTiny) -> None:
    config = tiny("tiny-31b").model.config
    assert window_length(config) == 8 * config.sliding_window
    assert window_length(config) < config.max_position_embeddings


def test_spread_is_even_and_keeps_order() -> None:
    assert spread(list(range(10)), 5) == [0, 2, 4, 6, 8]  # type: ignore[arg-type]
    assert spread(list(range(3)), 5) == [0, 1, 2]  # type: ignore[arg-type]


def test_a_text_without_a_whole_window_is_an_error(tiny: GetTiny) -> None:
    with pytest.raises(G4Error, match=r"short: \d+ tokens do not fill one window of 100"):
        cut([Text("short", "A few words.")], tiny("tiny-31b").tokenizer, LENGTH)


def test_a_limit_below_one_window_is_wrong_usage(tiny: GetTiny) -> None:
    with pytest.raises(UsageError, match="50 tokens are less than one window of 100"):
        cut(shipped_texts(), tiny("tiny-31b").tokenizer, LENGTH, limit=50)


def test_unreadable_texts(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.txt cannot be read: No such file"):
        read_text(tmp_path / "nowhere.txt")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(G4Error, match=r"empty\.txt is empty"):
        read_text(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(G4Error, match=r"latin\.txt is not UTF-8 text: byte 3"):
        read_text(tmp_path / "latin.txt")


def test_a_byte_order_mark_is_not_text(tmp_path) -> None:
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfwords")
    assert read_text(tmp_path / "marked.txt").content == "words"
