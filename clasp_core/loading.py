"""Checkpoints of the Hub, of a folder, and of a GGUF file: what the YAMLs of `conf/model/` build.

`.config()` reads no weights, `.load()` gives a `LoadedModel`. Everything that can be refused is refused before
weights are read, as a `UserError` of one line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from clasp_core.checkpoint import Checkpoint, LoadedModel, assemble
from clasp_core.errors import UserError
from clasp_core.families import wiring_of
from clasp_core.hub import Access, access_to, commit_of, explained, is_folder
from clasp_core.placement import (
    CHECKED_POSITIONS,
    DeviceMap,
    check_memory,
    check_quantization,
    device_map_of,
    dtype_of,
    memory_shares,
    named_devices,
    needed_by_device,
    refuse_offload,
)
from clasp_core.prompting import Prompter
from clasp_core.target import Engine

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A checkpoint in Hugging Face's layout. No code of the checkpoint is ever run.

    `repo`: Hub name or local folder. `device`: cpu, cuda, cuda:N, or auto (spread over all GPUs); `device_map`
    places modules by name instead. `max_memory`: bytes or "20GiB" by GPU number or "cpu". `quantization`: None
    or "int8". `positions`: tokens for which memory is checked.
    """

    name: str
    repo: str
    dtype: str
    device: str
    prompt: str
    revision: str | None = "main"
    quantization: str | None = None
    max_memory: Mapping[int | str, int | str] | None = None
    device_map: Mapping[str, str | int] | None = None
    allow_offload: bool = False
    positions: int = CHECKED_POSITIONS

    def config(self) -> PretrainedConfig:
        """The configuration; refuses what is not there, not reachable or of an unsupported family."""
        return self._config(self._access())

    def checkpoint(self) -> Checkpoint:
        """Model and tokenizer, after all checks that need no weights."""
        dtype, access = dtype_of(self.dtype), self._access()
        check_quantization(self.quantization)
        device_map = self._device_map()
        config = self._config(access)
        access = dataclasses.replace(access, revision=self._commit(access) or access.revision)
        tokenizer = self._tokenizer(access)
        positions = min(self.positions, config.max_position_embeddings)
        shares = memory_shares(config, dtype, positions, self.quantization)
        check_memory(self.name, needed_by_device(shares, device_map), self.max_memory)
        model = self._weights(access, config, dtype, device_map)
        return Checkpoint(model, tokenizer, self.name, self.label, self.prompt, self._origin(access))

    def load(self, engine: Engine = "eager") -> LoadedModel:
        """The checkpoint, wired, checked and described."""
        return assemble(self.checkpoint(), engine)

    @property
    def label(self) -> str:
        """The name that tables show."""
        weights = f", {self.quantization} weights" if self.quantization else ""
        return f"{self.repo}{weights}"

    def _device_map(self) -> DeviceMap | None:
        """Where modules go: the explicit map, or what `device` means here."""
        if self.device_map is None:
            return device_map_of(self.device)
        return named_devices(self.device_map)

    def _access(self) -> Access:
        return access_to(self.repo, self.revision)

    def _commit(self, access: Access) -> str | None:
        return None if is_folder(self.repo) else commit_of(self.repo, access.revision)

    def _config(self, access: Access) -> PretrainedConfig:
        with explained(self.repo, access.revision):
            config = AutoConfig.from_pretrained(self.repo, **access.options())
        wiring_of(config)
        return config

    def _tokenizer(self, access: Access) -> Any:
        with explained(self.repo, access.revision):
            tokenizer = AutoTokenizer.from_pretrained(self.repo, **access.options())
        Prompter(tokenizer, self.prompt)
        return tokenizer

    def _weights(
        self, access: Access, config: PretrainedConfig, dtype: torch.dtype, device_map: DeviceMap | None
    ) -> PreTrainedModel:
        options = access.options() | {"config": config, "dtype": dtype, "attn_implementation": "sdpa"}
        if device_map != {"": "cpu"}:
            options |= {"device_map": "auto" if device_map is None else dict(device_map)}
            options |= {"max_memory": _plain_limits(self.max_memory)} if device_map is None else {}
        if self.quantization == "int8":
            options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
        with explained(self.repo, access.revision):
            model, report = AutoModelForCausalLM.from_pretrained(self.repo, output_loading_info=True, **options)
        _refuse_missing(self.repo, report["missing_keys"])
        if not self.allow_offload:
            refuse_offload(self.name, getattr(model, "hf_device_map", {}))
        return model

    def _origin(self, access: Access) -> dict[str, Any]:
        return {
            "repo": self.repo,
            "revision": self.revision,
            "commit": None if is_folder(self.repo) else access.revision,
            "quantization": self.quantization,
        }


def _plain_limits(max_memory: Mapping[int | str, int | str] | None) -> dict[int | str, int | str] | None:
    return None if max_memory is None else dict(max_memory)


def _refuse_missing(repo: str, missing: Sequence[str]) -> None:
    """Weights that the checkpoint lacks would be random numbers; nothing may be measured with them."""
    if missing:
        raise UserError(f"{repo} lacks {len(missing)} weights of its own configuration, such as {sorted(missing)[0]}")


@dataclass(frozen=True, kw_only=True)
class EmbeddedModel:
    """A GGUF file, de-quantised once into `cache_dir` and read from there; memory and speed are the dense model's.

    `sha256` is the GGUF's; the cache is rebuilt for another one, and for another release of transformers.
    """

    name: str
    gguf: str
    cache_dir: str
    sha256: str
    dtype: str
    device: str
    prompt: str

    def config(self) -> PretrainedConfig:
        """The configuration, of the cache if there is one."""
        folder = Path(self.cache_dir)
        if self._is_current(folder):
            return self._cached(folder).config()
        gguf = self._gguf()
        with explained(str(gguf)):
            return AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)

    def checkpoint(self) -> Checkpoint:
        """Model and tokenizer; the first call converts the GGUF, which takes some 30 s."""
        folder = Path(self.cache_dir)
        if not self._is_current(folder):
            self._convert(folder)
        opened = self._cached(folder).checkpoint()
        origin = {"gguf": self.gguf, "gguf_sha256": self.sha256, "dequantised": True, "quantization": None}
        return dataclasses.replace(opened, label=self.label, origin=origin)

    def load(self, engine: Engine = "eager") -> LoadedModel:
        """The checkpoint, wired, checked and described."""
        return assemble(self.checkpoint(), engine)

    @property
    def label(self) -> str:
        """The name that tables show; it says that these are not the quantised model's results."""
        model, _, scheme = Path(self.gguf).stem.rpartition(".")
        return f"{model} (GGUF {scheme} de-quantised to dense weights)"

    def _cached(self, folder: Path) -> HubModel:
        return HubModel(
            name=self.name, repo=str(folder.absolute()), dtype=self.dtype, device=self.device, prompt=self.prompt
        )

    def _stamp(self) -> dict[str, str]:
        return {"gguf_sha256": self.sha256, "transformers": transformers.__version__}

    def _is_current(self, folder: Path) -> bool:
        stamp = folder / "source.json"
        return stamp.is_file() and json.loads(stamp.read_text()) == self._stamp()

    def _gguf(self) -> Path:
        gguf = Path(self.gguf)
        fetch = f"python -m clasp_core.fetch {self.name}"
        if not gguf.is_file():
            raise UserError(f"{gguf} is not there; fetch it with `{fetch}` in the repository")
        found = hashlib.sha256(gguf.read_bytes()).hexdigest()
        if found != self.sha256:
            raise UserError(f"{gguf} has sha256 {found}, expected {self.sha256}; delete it and run `{fetch}`")
        return gguf

    def _convert(self, folder: Path) -> None:
        """De-quantise beside `folder` and move the result there whole, so that a stopped run leaves nothing half."""
        gguf = self._gguf()
        log.info("converting %s once, to %s", gguf, folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
            fresh = Path(scratch, "fresh")
            save_dense(gguf, fresh)
            (fresh / "source.json").write_text(json.dumps(self._stamp()) + "\n")
            if folder.exists():
                shutil.move(folder, Path(scratch, "old"))
            self._publish(fresh, folder)

    def _publish(self, fresh: Path, folder: Path) -> None:
        """Rename into place; if another process was first with the same content, its copy stays."""
        try:
            os.rename(fresh, folder)
        except OSError:
            if not self._is_current(folder):
                raise


def save_dense(gguf: Path, folder: Path) -> None:
    """Write a GGUF's weights (float32) and tokenizer as an ordinary checkpoint."""
    place, file = str(gguf.parent), gguf.name
    with explained(str(gguf)):
        model = AutoModelForCausalLM.from_pretrained(place, gguf_file=file, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file)
        del model.config.quantization_config
        model.hf_quantizer = None
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
