"""Reading configs: presets by name, files by path, and one line for each file that is no config."""

import json
import os
from pathlib import Path

import pytest

from replay_sim.config import ConfigError, ServingConfig, load_config, preset_names
from replay_sim.config.presets import PRESETS

DEEP = "[" * 200_000


def test_every_preset_loads_and_names_its_source() -> None:
    for name in preset_names():
        assert isinstance(load_config(name), ServingConfig)
    for path in PRESETS.glob("*.json"):
        document = json.loads(path.read_text())
        assert document["source"]["url"].startswith("https://"), path.name
        assert document["id"], path.name


def test_every_preset_equals_its_published_entry(shared: Path) -> None:
    entries = {entry["id"]: entry for entry in json.loads((shared / "data/configs.json").read_text())["configs"]}
    for path in PRESETS.glob("*.json"):
        preset = json.loads(path.read_text())
        entry = entries[preset["id"]]
        for key in set(preset) - {"note", "window"}:
            assert preset[key] == entry[key], f"{path.name}: {key}"
        known = set(ServingConfig.__annotations__)
        missing = {key for key in known & set(entry) - set(preset) if entry[key] is not None}
        assert not missing, f"{path.name}: {missing}"


def test_the_presets_span_the_kinds_of_published_config() -> None:
    configs = {name: load_config(name) for name in preset_names()}
    explicit = [c for c in configs.values() if c.decoder_replay_cudagraph_capture_sizes]
    ruled = [c for c in configs.values() if not c.decoder_replay_cudagraph_capture_sizes]
    assert explicit and ruled
    assert any(c.capture_size_limit < c.window for c in configs.values())
    assert any(c.num_speculative_tokens == 0 for c in configs.values())
    assert any(c.cudagraph_capture_sizes is None for c in configs.values())
    assert configs["default"] == configs["b200-tp4-c8"]


def test_an_unknown_preset_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'b200-tp4-c9' is no preset .*did you mean 'b200-tp4-c8'"):
        load_config("b200-tp4-c9")


def test_a_file_gives_the_settings_that_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"window": 64, "max_num_seqs": 4, "name": "mine", "source": "me", "id": 1}))
    assert load_config(path) == ServingConfig(window=64, max_num_seqs=4)
    path.write_bytes(b"\xef\xbb\xbf{}")
    assert load_config(str(path)) == ServingConfig()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "unreadable JSON"),
        (b"{", "unreadable JSON"),
        (b"\xff\xfe", "unreadable JSON"),
        (b"[]", "must be an object"),
        (b"null", "must be an object"),
        (b'"window"', "must be an object"),
        (b'{"window": NaN}', "NaN is not a JSON number"),
        (b'{"window": 64, "window": 32}', "'window' is given twice"),
        (b'{"window": ' + b"9" * 5000 + b"}", ""),
        (b'{"window": 1e400}', "window: inf"),
        (b'{"w\\nindow": 1}', r"unknown key 'w\nindow'"),
        (b'{"\\ud800": 1}', r"unknown key '\ud800'"),
        (DEEP.encode(), "nested too deeply"),
        (b'{"window": ' + DEEP.encode() + b"}", ""),
        (b" " * (1 << 20) + b"{}", "at most 1048576 bytes"),
        (b'{"cudagraph_capture_sizes": [' + b"0," * 500_000 + b"0]}", "500001 sizes are not allowed"),
    ],
)
def test_a_hostile_file_is_one_line(content: bytes, named: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert named in message and "bad.json" in message
    assert message.isascii() and "\n" not in message and len(message) < 600


def test_what_is_no_regular_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe.json"
    os.mkfifo(fifo)
    for path in (tmp_path, fifo, Path("/dev/zero")):
        with pytest.raises(ConfigError, match="regular file"):
            load_config(path)


@pytest.mark.parametrize("name", ["no/such/file", "absent.json", "a\0b", "a\0b.json", "", "x" * 5000, "\udc80.json"])
def test_a_path_that_leads_nowhere_is_one_line(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(name)
    assert "\n" not in str(caught.value) and str(caught.value).isascii()


def test_presets_ship_with_the_package() -> None:
    assert all(path.suffix == ".json" for path in PRESETS.iterdir())
    assert len(preset_names()) >= 8
