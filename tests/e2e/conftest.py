import os

import pytest


@pytest.fixture
def work(tmp_path, monkeypatch):
    """An empty folder to run in, with no settings of the user's."""
    for name in [name for name in os.environ if name.startswith(("PHALANX_", "OMP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder
