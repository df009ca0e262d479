"""Files of keys: what is written, what is read back, and what is refused with a word on what to do."""

import logging
import stat

import pytest

from kvtransfer.curve import CurveKeys, load_keys, private_path, public_path, write_pair
from kvtransfer.errors import SettingsError
from tests.kvtransfer.key_world import made_keys


def test_what_was_written_is_read_back(tmp_path):
    keys = made_keys(tmp_path)
    assert {name: pair.public_key for name, pair in keys.items()} == dict(keys["decode"].known)
    assert len({pair.secret_key for pair in keys.values()}) == 3
    assert load_keys(str(tmp_path), "prefill") == keys["prefill"]
    assert load_keys(None, "prefill") is None


def test_secrets_are_for_their_owner_and_stay_out_of_repr(tmp_path):
    keys = made_keys(tmp_path)
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o700
    for name, pair in keys.items():
        assert stat.S_IMODE(private_path(tmp_path, name).stat().st_mode) == 0o600
        assert pair.secret_key.decode() not in repr(pair)
        assert pair.secret_key.decode() not in public_path(tmp_path, name).read_text()


def test_nothing_is_overwritten(tmp_path):
    made_keys(tmp_path)
    before = private_path(tmp_path, "decode").read_text()
    with pytest.raises(SettingsError, match=r"cannot write .*decode\.key_secret"):
        write_pair(tmp_path, "decode")
    assert private_path(tmp_path, "decode").read_text() == before


def test_a_node_needs_all_public_keys_and_its_own_private_one_alone(tmp_path):
    keys = made_keys(tmp_path)
    for name in ("gateway", "decode"):
        private_path(tmp_path, name).unlink()
    assert CurveKeys.load(tmp_path, "prefill") == keys["prefill"]
    with pytest.raises(SettingsError, match=r"cannot read the key .*decode\.key_secret"):
        CurveKeys.load(tmp_path, "decode")


def test_a_secret_that_others_can_read_is_said(tmp_path, caplog):
    made_keys(tmp_path)
    assert caplog.records == []
    private_path(tmp_path, "decode").chmod(0o640)
    CurveKeys.load(tmp_path, "decode")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "decode.key_secret can be read by others" in caplog.text


def test_a_missing_folder_or_key_is_said(tmp_path):
    with pytest.raises(SettingsError, match=r"no keys in .*public: make them with `kvsplice keys`"):
        CurveKeys.load(tmp_path / "nowhere", "decode")
    made_keys(tmp_path, "gateway")
    with pytest.raises(SettingsError, match=r"there is no .*decode\.key"):
        CurveKeys.load(tmp_path, "decode")


def test_halves_of_different_pairs_are_refused(tmp_path):
    made_keys(tmp_path)
    private_path(tmp_path, "prefill").replace(private_path(tmp_path, "decode"))
    with pytest.raises(SettingsError, match=r"decode\.key_secret does not belong to .*decode\.key"):
        CurveKeys.load(tmp_path, "decode")


def test_one_key_under_two_names_is_refused(tmp_path):
    made_keys(tmp_path)
    public_path(tmp_path, "copy").write_text(public_path(tmp_path, "decode").read_text())
    with pytest.raises(SettingsError, match="the same key as that of copy"):
        CurveKeys.load(tmp_path, "prefill")


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b'public-key = "short"', b"public-key = " + b"~" * 40, b"public-key = " + b"#" * 40]
)
def test_a_file_that_is_no_key_is_refused(tmp_path, content):
    made_keys(tmp_path)
    public_path(tmp_path, "bad").write_bytes(content)
    with pytest.raises(SettingsError, match=r"bad\.key is no file of a CURVE key"):
        CurveKeys.load(tmp_path, "decode")


def test_a_public_file_in_the_place_of_a_private_one_is_said(tmp_path):
    made_keys(tmp_path)
    private_path(tmp_path, "decode").write_text(public_path(tmp_path, "decode").read_text())
    with pytest.raises(SettingsError, match=r"decode\.key_secret has no secret key in it"):
        CurveKeys.load(tmp_path, "decode")


@pytest.mark.parametrize("name", ["", "../decode", "a/b", ".hidden", "a b", "x" * 65, "a\n"])
def test_names_of_keys_are_plain(tmp_path, name):
    with pytest.raises(SettingsError, match="--curve-name"):
        load_keys(str(tmp_path), name)


def test_the_key_with_the_longest_fitting_name_speaks_for_a_worker(tmp_path):
    keys = made_keys(tmp_path, "decode", "decode-1", "node7")["decode"]
    owners = {
        "decode": "decode",
        "decode-0": "decode",
        "decode-10": "decode",
        "decode-1": "decode-1",
        "decode-1-a": "decode-1",
        "node7": "node7",
        "node7-5": "node7",
        "node71": None,
        "decoder": None,
        "": None,
    }
    assert {worker_id: keys.owner_of(worker_id) for worker_id in owners} == owners
    assert keys.public_key_of("decode-1") == keys.known["decode-1"]
    with pytest.raises(SettingsError, match="no public key speaks for node71"):
        keys.public_key_of("node71")


def test_a_worker_whose_id_is_not_its_keys_is_told_before_it_connects(tmp_path):
    made_keys(tmp_path, "decode", "decode-1")
    assert load_keys(str(tmp_path), "decode", "decode-0") is not None
    with pytest.raises(
        SettingsError, match=r"--worker-id=decode-1: the key of decode does not .* that of decode-1 does"
    ):
        load_keys(str(tmp_path), "decode", "decode-1")
    with pytest.raises(SettingsError, match=r"--worker-id=w7: .* call it decode or decode-\.\.\."):
        load_keys(str(tmp_path), "decode", "w7")
