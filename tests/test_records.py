"""Records of strangers: what is not of the declared type is one line; names that leave their folder are refused."""

import json
import os
import typing

import pytest

from d2l_bert.messages import UserError
from d2l_bert.records import check_type, inside, read_record


class Part(typing.TypedDict):
    size: int
    note: typing.NotRequired[str | None]


class Record(typing.TypedDict, total=False):
    format: typing.Required[typing.Literal[1, 2]]
    parts: dict[str, Part]
    shares: list[float]


GOOD = {"format": 2, "parts": {"a": {"size": 3, "note": None, "more": []}}, "shares": [1, 0.5], "unknown": {"x": 1}}


def test_a_record_of_the_declared_type_is_read_as_it_stands(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(GOOD))
    assert read_record(tmp_path / "a.json", Record) == GOOD
    assert read_record(tmp_path / "b.json", Record) == {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "lacks the entry 'format'"),
        ({"format": 3}, "format must be"),
        ({"format": True}, "format must be"),
        ({"format": 1, "parts": []}, "parts must be an object"),
        ({"format": 1, "parts": {"a": {"size": 10**400, "note": [1]}}}, "note must be str or null"),
        ({"format": 1, "shares": [10**400]}, r"shares\[0\] must be float"),
        ({"format": 1, "parts": {"a": {}}}, "parts.a lacks the entry 'size'"),
        ({"format": 1, "parts": {"a": {"size": 1.5}}}, "parts.a.size must be int"),
        ({"format": 1, "parts": {"a": {"size": 1, "note": 7}}}, "parts.a.note must be"),
        ({"format": 1, "shares": [1, "2"]}, r"shares\[1\] must be float"),
        ({"format": 1, "shares": [True]}, r"shares\[0\] must be float"),
        ([1], "no JSON object"),
    ],
)
def test_a_record_of_another_type_is_refused_by_the_place(tmp_path, content, said):
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=said):
        read_record(tmp_path / "a.json", Record)


@pytest.mark.parametrize("text", ["", "{", '{"format": ' + "[" * 100_000, b'{"format": "\xff"}', "\0"])
def test_what_is_no_json_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match="a.json: cannot be read"):
        read_record(tmp_path / "a.json", Record)


def test_a_pipe_a_device_and_a_link_to_nothing_are_no_records(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "device.json").symlink_to("/dev/zero")
    (tmp_path / "nothing.json").symlink_to(tmp_path / "none")
    for name in ("pipe", "device", "nothing"):
        with pytest.raises(UserError, match="it is no file"):
            read_record(tmp_path / f"{name}.json")


def test_a_value_may_be_anything_only_where_that_is_declared():
    check_type({"a": [1, {"b": None}]}, object)
    with pytest.raises(ValueError, match="must be str or null"):
        check_type(1, str | None, "name")


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../a", "b/../../a", "./a", "b//a", "a\0", "..\\a", "C:a", ".."])
def test_a_name_that_leaves_its_folder_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="no file in this folder"):
        inside(tmp_path, name)


@pytest.mark.parametrize("name", ["a" * 300, "\ud800", "b/" * 3000 + "c"])
def test_a_name_that_no_file_can_have_is_one_line(tmp_path, name):
    with pytest.raises(UserError, match="do not use this folder") as error:
        inside(tmp_path, name)
    assert len(str(error.value)) < 700


def test_a_link_to_itself_and_one_to_nothing_are_no_crash(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nothing").symlink_to("gone")
    for name in ("loop", "nothing"):
        assert not inside(tmp_path, name).exists()


def test_a_link_that_leaves_its_folder_is_refused_and_those_of_the_hub_s_cache_are_not(tmp_path):
    secret = tmp_path / "id_rsa"
    folder = tmp_path / "model"
    secret.write_text("secret")
    folder.mkdir()
    (folder / "picture.png").symlink_to(secret)
    (folder / "other.png").symlink_to("plain.png")
    (folder / "plain.png").write_text("")
    with pytest.raises(UserError, match="leads out of"):
        inside(folder, "picture.png")
    assert inside(folder, "other.png").is_file() and inside(folder, "1_Pooling/config.json") is not None
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "blobs").mkdir()
    (snapshot.parents[1] / "blobs" / "0a").write_text("")
    (snapshot / "config.json").symlink_to("../../blobs/0a")
    (snapshot / "stolen.json").symlink_to(secret)
    (snapshot.parents[1] / "mine.json").write_text("")
    (snapshot / "beside.json").symlink_to("../../mine.json")
    assert inside(snapshot, "config.json").is_file()
    for name in ("stolen.json", "beside.json"):
        with pytest.raises(UserError, match="leads out of"):
            inside(snapshot, name)


def test_what_is_wrong_inside_of_a_list_is_named_where_the_entry_may_be_null(tmp_path):
    with pytest.raises(ValueError, match=r"names\[1\] must be str, got 5"):
        check_type(["a", 5], list[str] | None, "names")
