"""Where numbers come from: code, packages, machine, settings. Facts only; nothing that names a host or a person."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    "clasp-bench", "torch", "transformers", "accelerate", "gguf", "safetensors", "hydra-core", "numpy", "bitsandbytes",
)  # fmt: skip
"""The packages whose versions can change a token or a time."""

ENVIRONMENT = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""The only environment variables whose values are ever stored."""

HASH_VERSION = "1"
"""Changes whenever the same configuration would get another hash."""

PARTS_NOT_IN_SLUG = re.compile(
    r"\(r\)|\(tm\)|@.*|\b(intel|amd|nvidia|cpu|processor|\d+-core|\d+th gen)\b", re.IGNORECASE
)


def git_state(root: Path) -> dict[str, Any]:
    """`revision` and `dirty` (untracked files count) of the work tree whose top is `root`; nulls if it is none."""
    unknown: dict[str, Any] = {"revision": None, "dirty": None}
    top = _output("git", "-C", str(root), "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return unknown
    changes = _output("git", "-C", str(root), "status", "--porcelain")
    revision = _output("git", "-C", str(root), "rev-parse", "--verify", "HEAD")
    return {"revision": revision, "dirty": None if changes is None else bool(changes)}


def commit_of(state: Mapping[str, Any]) -> str:
    """A `git_state` in words: the first ten digits of the revision, and whether files had changed since."""
    changed = " with changes" if state.get("dirty") else ""
    return f"{str(state.get('revision') or 'unknown')[:10]}{changed}"


def package_versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """The installed version of each package; packages that are absent are left out."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Processor, usable cores, memory in whole GiB, system and Python; equal machines give equal answers."""
    return {
        "cpu": _cpu_model(),
        "num_cores": _num_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "os": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])} {platform.machine()}",
        "python": platform.python_version(),
    }


def accelerators() -> dict[str, Any] | None:
    """`names` of the visible devices, `driver` and `runtime` (such as cu130, from torch's build); None without one."""
    import torch

    if not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    name_of = getattr(torch.get_device_module(kind), "get_device_name", lambda index: str(kind))
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "names": [name_of(index) for index in range(torch.accelerator.device_count())],
        "driver": driver.splitlines()[0] if driver else None,
        "runtime": torch.__version__.partition("+")[2] or None,
    }


def threads() -> dict[str, Any]:
    """torch's number of threads, and how idle ones wait (null: the OpenMP library's default)."""
    import torch

    return {"num_threads": torch.get_num_threads(), "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY")}


def fingerprint(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What must agree before times are compared: the machine, its accelerators, threads, torch, and `extra`.

    `extra` is the caller's: model and revision, dtype read back, device map, attention kernel, template hash.
    """
    versions = package_versions(("torch", "transformers"))
    versions.pop("python")
    return {"machine": machine(), "accelerators": accelerators(), "threads": threads(), **versions, **extra}


def conditions() -> dict[str, Any]:
    """The state at this moment, which may differ between comparable runs: load average, the named environment."""
    return {
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "num_busy_cores": round(psutil.cpu_percent(interval=0.3) / 100 * (psutil.cpu_count() or 1), 2),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def machine_slug(machine: Mapping[str, Any], accelerators: Mapping[str, Any] | None) -> str:
    """A short folder name, such as `xeon-2c` or `xeon-16c-2xh200`, from the two functions of these names."""
    parts = [slug(PARTS_NOT_IN_SLUG.sub(" ", machine["cpu"])) or "cpu", f"{machine['num_cores']}c"]
    if accelerators is not None:
        names = [slug(PARTS_NOT_IN_SLUG.sub(" ", name)) for name in accelerators["names"]]
        parts += [f"{names.count(name)}x{name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
    return "-".join(parts)


def slug(text: str) -> str:
    """The text in lower case with every run of other characters than letters, digits and dots as one hyphen."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def config_hash(config: Mapping[str, Any], ignore: Sequence[str] = ()) -> str:
    """`v<version>:<sha256>` of the configuration without the ignored dotted keys (a key covers what is below it).

    Independent of the order of keys, of tuple or list, and of 1 or 1.0. Raises TypeError for what is not plain
    data (resolve an OmegaConf container first) and ValueError for NaN and infinity.
    """
    digest = hashlib.sha256(_canonical(_without(config, ignore)).encode()).hexdigest()
    return f"v{HASH_VERSION}:{digest}"


def differing(a: Mapping[str, Any], b: Mapping[str, Any], ignore: Sequence[str] = ()) -> list[str]:
    """The dotted keys, sorted, at which two configurations differ or that only one has; empty if hashes agree."""
    return sorted(_differences(_without(a, ignore), _without(b, ignore), ""))


def value_at(mapping: Mapping[str, Any], dotted: str) -> Any:
    """The value under a dotted key as `differing` gives it; None where there is none."""
    value: Any = mapping
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], above: str) -> list[str]:
    found: list[str] = []
    for key in a.keys() | b.keys():
        if key not in a or key not in b:
            found.append(f"{above}{key}")
        elif isinstance(a[key], Mapping) and isinstance(b[key], Mapping):
            found += _differences(a[key], b[key], f"{above}{key}.")
        elif _canonical(a[key]) != _canonical(b[key]):
            found.append(f"{above}{key}")
    return found


def _without(config: Mapping[str, Any], ignore: Sequence[str], above: str = "") -> dict[str, Any]:
    return {
        key: _without(value, ignore, f"{above}{key}.") if isinstance(value, Mapping) else value
        for key, value in config.items()
        if f"{above}{key}" not in ignore
    }


def _canonical(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    """The value with whole floats as ints and mappings as dicts with text keys."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _cpu_model() -> str:
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _output(*command: str) -> str | None:
    """What a command prints, stripped; None if it is missing, fails, or takes longer than ten seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
