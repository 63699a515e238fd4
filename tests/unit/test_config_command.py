"""`phalanx config`: what it prints can be used again."""

from __future__ import annotations

import json

import pytest

from phalanx.cli.config import main
from phalanx.config import JobConfig, keys, load_config
from phalanx.errors import ConfigError, UsageError


@pytest.fixture(autouse=True)
def _no_outside_settings(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("PHALANX_SITE", raising=False)


def test_output_loads_again_to_the_same_settings(tmp_path, capsys) -> None:
    first = tmp_path / "in.yaml"
    first.write_text("params: {id: 0123, lr: 1e-3, text: '7', list: [1, '1']}\nname: 12:00:00\n")
    words = ["-c", str(first), "fsdp.wrap=A,B", "--accumulate", "2", r"env.X=\${Y}"]
    assert main(words) == 0
    again = tmp_path / "out.yaml"
    again.write_text(capsys.readouterr().out)
    config = load_config([again], (), {}).config
    assert config == load_config([first], ["fsdp.wrap=A,B", "accumulate=2", r"env.X=\${Y}"], {}).config
    assert config.params == {"id": "0123", "lr": 0.001, "text": "7", "list": [1, "1"]}
    assert config.env == {"X": "${Y}"}


def test_explain_has_a_line_for_every_setting(tmp_path, capsys, monkeypatch) -> None:
    file = tmp_path / "in.yaml"
    file.write_text("seed: 3\nparams:\n  id: 0123\n")
    monkeypatch.setenv("PHALANX_PRECISION", "bf16")
    assert main(["-c", str(file), "--explain", "--nodes", "2"]) == 0
    lines = [[cell.strip() for cell in line.split("│")[1:4]] for line in capsys.readouterr().out.splitlines()]
    rows = {cells[0]: cells[1:] for cells in lines if len(cells) == 3}
    shown = {key for key in keys() if not key.startswith("sbatch.")} - {"params"}
    assert shown <= rows.keys()  # of sbatch's other options only those that are used
    assert rows["seed"] == ["3", f"{file}:1"]
    assert rows["params.id"] == ["'0123'", f"{file}:3"]
    assert rows["precision"] == ["'bf16'", "environment PHALANX_PRECISION"]
    assert rows["nodes"] == ["2", "command line"]
    assert rows["accumulate"] == ["1", "default"]


def test_schema_describes_every_setting(capsys) -> None:
    assert main(["--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["properties"].keys() == JobConfig.model_fields.keys()
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["CheckpointSettings"]["properties"]["keep"]["minimum"] == 1


def test_help_and_faults(capsys) -> None:
    assert main(["--help"]) == 0
    assert "--explain" in capsys.readouterr().out
    with pytest.raises(UsageError, match="give one of them"):
        main(["--explain", "--schema"])
    with pytest.raises(ConfigError, match="precison"):
        main(["precison=bf16"])
