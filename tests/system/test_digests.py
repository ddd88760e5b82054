"""Digests of a folder: modified and missing files are named, and additional files are accepted."""

from pathlib import Path

import pytest

from poly_epo_jax.system.digests import DIGESTS, check_digests, write_digests


def test_modified_and_missing_files_are_named(tmp_path: Path):
    (tmp_path / "a.bin").write_bytes(bytes(100))
    (tmp_path / "b.json").write_text("{}")
    check_digests(tmp_path)  # no digests yet
    write_digests(tmp_path)
    check_digests(tmp_path)
    (tmp_path / "more").write_text("added by a user")
    check_digests(tmp_path)

    (tmp_path / "a.bin").write_bytes(bytes(99) + b"\1")
    with pytest.raises(ValueError, match=rf"^{tmp_path} .*\(a\.bin\)"):
        check_digests(tmp_path)
    (tmp_path / "b.json").unlink()
    with pytest.raises(ValueError, match=r"\(a\.bin, b\.json\)"):
        check_digests(tmp_path)
    (tmp_path / DIGESTS).write_text("[")
    with pytest.raises(ValueError, match=rf"\({DIGESTS}\)"):
        check_digests(tmp_path)
