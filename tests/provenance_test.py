"""What records say of the code that made them."""

from linattn_jax import provenance


def test_the_environment_names_the_commit(monkeypatch):
    monkeypatch.setenv("LINATTN_JAX_COMMIT", "abc")
    assert provenance.commit() == {"commit": "abc", "dirty": None}


def test_without_a_repository_there_is_no_commit(monkeypatch, tmp_path):
    monkeypatch.delenv("LINATTN_JAX_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    assert provenance.commit() == {"commit": None, "dirty": None}
