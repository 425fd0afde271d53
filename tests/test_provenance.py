"""Provenance: hashes and differences agree, machines have names, and nothing private is stored."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clasp_core import provenance
from clasp_core.provenance import config_hash, differing, git_state, machine_slug

CONFIG: dict[str, Any] = {
    "model": {"name": "tiny", "dtype": "float32"},
    "method": {"clasp": {"num_skipped": 4, "skips": [1, 2]}},
    "generation": {"temperature": 0.0, "stop": None},
    "tracker": {"mode": "offline"},
}


def changed(dotted: str, value: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(CONFIG))
    *above, last = dotted.split(".")
    node = config
    for key in above:
        node = node.setdefault(key, {})
    node[last] = value
    return config


def test_hash_is_the_same_in_every_release() -> None:
    """Planted value: if this changes, HASH_VERSION must change too, or old runs cannot be resumed."""
    canonical = '{"a":{"b":[1,"\\u00fc",null,true]},"c":0.5}'
    expected = f"v1:{hashlib.sha256(canonical.encode()).hexdigest()}"
    assert config_hash({"c": 0.5, "a": {"b": (1.0, "ü", None, True)}}) == expected


def test_hash_ignores_order_containers_and_whole_floats() -> None:
    shuffled = dict(reversed(CONFIG.items()))
    assert config_hash(shuffled) == config_hash(CONFIG)
    assert config_hash(changed("generation.temperature", 0)) == config_hash(CONFIG)
    assert config_hash(changed("method.clasp.skips", (1, 2))) == config_hash(CONFIG)


@pytest.mark.parametrize(
    ("dotted", "value"),
    [
        ("model.dtype", "bfloat16"),
        ("method.clasp.num_skipped", 5),
        ("method.clasp.skips", [2, 1]),
        ("generation.temperature", False),
        ("generation.stop", "null"),
        ("generation.top_p", None),
        ("method.swift", {}),
        ("model", "tiny"),
    ],
)
def test_hashes_differ_exactly_when_a_key_differs(dotted: str, value: Any) -> None:
    other = changed(dotted, value)
    assert differing(CONFIG, other) == differing(other, CONFIG) == [dotted]
    assert config_hash(CONFIG) != config_hash(other)


def test_ignored_keys_and_all_below_them_do_not_count() -> None:
    other = changed("tracker.mode", "online")
    assert differing(CONFIG, other) == ["tracker.mode"]
    for ignore in (["tracker"], ["tracker.mode"]):
        assert config_hash(CONFIG, ignore) == config_hash(other, ignore)
        assert differing(CONFIG, other, ignore) == []
    assert config_hash(CONFIG, ["track", "mode"]) == config_hash(CONFIG)


def test_configuration_that_is_not_plain_data_is_refused() -> None:
    with pytest.raises(TypeError):
        config_hash({"path": Path("x")})
    with pytest.raises(ValueError, match="JSON"):
        config_hash({"p": float("nan")})


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    commands = ["init -q", "-c user.name=t -c user.email=t@t commit -q --allow-empty -m start"]
    for command in commands:
        subprocess.run(["git", "-C", str(tmp_path), *command.split()], check=True)
    return tmp_path


def test_git_state_tells_clean_from_dirty(repository: Path) -> None:
    clean = git_state(repository)
    assert len(clean["revision"]) == 40
    assert clean["dirty"] is False
    (repository / "new.py").write_text("x = 1\n")
    assert git_state(repository) == {"revision": clean["revision"], "dirty": True}


def test_git_state_is_unknown_below_or_outside_a_work_tree(repository: Path) -> None:
    below = repository / "site-packages"
    below.mkdir()
    unknown = {"revision": None, "dirty": None}
    assert git_state(below) == git_state(repository / "absent") == unknown


def test_git_state_is_unknown_without_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert git_state(repository) == {"revision": None, "dirty": None}


def test_versions_name_what_is_installed_only() -> None:
    found = provenance.package_versions(["pytest", "no-such-package"])
    assert found == {"python": platform.python_version(), "pytest": pytest.__version__}


@pytest.mark.parametrize(
    ("cpu", "gpus", "expected"),
    [
        ("Intel(R) Xeon(R) Processor", None, "xeon-2c"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", None, "xeon-2c"),
        ("AMD EPYC 7763 64-Core Processor", ["NVIDIA H200"], "epyc-7763-2c-h200"),
        ("13th Gen Intel(R) Core(TM) i7-13700K", None, "core-i7-13700k-2c"),
        ("Apple M3 Pro", None, "apple-m3-pro-2c"),
        ("Intel", ["NVIDIA A100-SXM4-80GB"] * 2, "cpu-2c-2xa100-sxm4-80gb"),
    ],
)
def test_slug_is_a_short_folder_name(cpu: str, gpus: list[str] | None, expected: str) -> None:
    accelerators = None if gpus is None else {"names": gpus}
    assert machine_slug({"cpu": cpu, "num_cores": 2}, accelerators) == expected


def test_fingerprint_is_plain_and_the_same_at_the_next_call() -> None:
    first = provenance.fingerprint({"dtype": "float32"})
    assert differing(first, provenance.fingerprint({"dtype": "float32"})) == []
    assert json.loads(json.dumps(first)) == first
    assert {"machine", "accelerators", "threads", "torch", "transformers", "dtype"} == set(first)
    assert first["machine"]["memory_gib"] > 0
    assert first["machine"]["num_cores"] >= 1


def test_threads_are_read_back_and_the_wait_policy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert provenance.threads() == {"num_threads": 1, "omp_wait_policy": "PASSIVE"}
    finally:
        torch.set_num_threads(before)


def test_accelerator_facts_come_from_the_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Devices:
        @staticmethod
        def get_device_name(index: int) -> str:
            return f"GPU {index}"

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: Devices)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(provenance, "_output", lambda *command: "580.65\n580.65")
    expected = {"names": ["GPU 0", "GPU 1"], "driver": "580.65", "runtime": "cu130"}
    assert provenance.accelerators() == expected


def test_nothing_private_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "planted-secret")
    monkeypatch.setenv("HF_TOKEN", "planted-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(platform, "node", lambda: "planted-host")
    stored = json.dumps([provenance.conditions(), provenance.fingerprint({}), provenance.package_versions()])
    assert "planted-" not in stored
    assert str(Path.home()) not in stored
    assert provenance.conditions()["environment"].keys() <= set(provenance.ENVIRONMENT)
    assert provenance.conditions()["environment"]["OMP_NUM_THREADS"] == "1"
    assert len(provenance.conditions()["load_average"]) == 3
