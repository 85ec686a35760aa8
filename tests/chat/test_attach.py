"""@file in a message: names that no file can have are never an exception."""

import pytest

from tinychat.chat.attach import attachments, complete
from tinychat.errors import TinychatError
from tinychat.models.registry import resolve


@pytest.mark.parametrize(
    "name", ["~nosuchuser", "x" * 256, "y" * 5000, "a/" * 3000 + "b", "a\0b", "a\0/b", "@", "~", "\ud800"]
)
def test_a_word_that_is_no_file_is_left_alone(name, tmp_path):
    if name != "~":
        assert attachments(f"mail me @{name} now", tmp_path) == ()
    assert isinstance(complete(name, tmp_path), list)


@pytest.mark.parametrize("name", ["~nosuchuser/x", "./" + "x" * 256 + "/y", "./" + "a/" * 3000 + "b", "./a\0/b", "~"])
def test_a_path_that_cannot_be_read_is_one_line(name, tmp_path):
    with pytest.raises(TinychatError) as e:
        attachments(f"see @{name}", tmp_path)
    assert "\n" not in str(e.value)
    assert complete(f"{name}/", tmp_path) == [] or name == "~"


@pytest.mark.parametrize("name", ["~nosuchuser/x.gguf", "http://[::1/x.gguf"])
def test_a_model_that_cannot_be_named_so(name):
    with pytest.raises(TinychatError):
        resolve(name)
