"""A folder's digests: every changed file is named, and files that others have added pass."""

from pathlib import Path

import pytest

from poly_epo_jax.system.digests import DIGESTS, check_digests, write_digests


def test_what_was_changed_is_named(tmp_path: Path):
    (tmp_path / "a.bin").write_bytes(bytes(100))
    (tmp_path / "b.json").write_text("{}")
    check_digests(tmp_path)  # there are none
    write_digests(tmp_path)
    check_digests(tmp_path)
    (tmp_path / "more").write_text("of a user's own")
    check_digests(tmp_path)

    (tmp_path / "a.bin").write_bytes(bytes(99) + b"\1")
    with pytest.raises(ValueError, match=rf"^{tmp_path} is damaged: a.bin is missing or not what was written; make "):
        check_digests(tmp_path)
    (tmp_path / "b.json").unlink()
    with pytest.raises(ValueError, match=r"damaged: a.bin, b.json is missing"):
        check_digests(tmp_path)
    (tmp_path / DIGESTS).write_text("[")
    with pytest.raises(ValueError, match=rf"damaged: {DIGESTS} is missing"):
        check_digests(tmp_path)
