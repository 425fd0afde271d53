"""The clock, synchronisation, peak memory, energy and threads. The only place, with attention, that knows CUDA."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from clasp_core.errors import UserError

MOST_THREADS_PER_CORE = 4
"""More only wait for each other, and a huge number ends the process."""


class Mark(Protocol):
    """A moment, read without waiting for the device."""

    def seconds_until(self, later: Any) -> float:
        """Seconds from this moment to a later one; only after synchronisation."""


@dataclass(frozen=True, slots=True)
class HostMark:
    """A moment of the monotonic host clock."""

    at: float

    def seconds_until(self, later: HostMark) -> float:
        """Seconds between two host moments."""
        return later.at - self.at


@dataclass(frozen=True, slots=True)
class CudaMark:
    """A moment of a CUDA stream: an event that is recorded, not waited for."""

    event: torch.cuda.Event

    def seconds_until(self, later: CudaMark) -> float:
        """Seconds between two events of one device."""
        return float(self.event.elapsed_time(later.event)) / 1000


class Clock(Protocol):
    """What the decoding loop needs of time."""

    def now(self) -> float:
        """Seconds on the monotonic clock once every device is idle."""

    def mark(self) -> Any:
        """A moment inside the timed region, without synchronisation."""


class DeviceClock:
    """Synchronises all devices for `now`; marks the phases by events on the device where tokens are drawn."""

    def __init__(self, devices: Sequence[torch.device], drawn_on: torch.device):
        self._gpus = [device for device in devices if device.type == "cuda"]
        self._drawn_on = drawn_on

    def now(self) -> float:
        """Seconds on the monotonic clock once every device is idle."""
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)
        return time.perf_counter()

    def mark(self) -> HostMark | CudaMark:
        """A moment inside the timed region, without synchronisation."""
        if self._drawn_on.type != "cuda":
            return HostMark(time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._drawn_on))
        return CudaMark(event)


def reset_peak_memory(devices: Sequence[torch.device]) -> None:
    """Start a new measurement of peak memory where the device supports one."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(devices: Sequence[torch.device]) -> dict[str, int] | None:
    """Peak bytes allocated on each GPU since the last reset, by name such as `cuda:0`.

    Unknown on a CPU, where only the whole process has a peak.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    return {str(gpu): int(torch.cuda.max_memory_allocated(gpu)) for gpu in gpus} or None


class Nvml(Protocol):
    """What is used of NVML, NVIDIA's management library (`pynvml`)."""

    def nvmlInit(self) -> None:
        """Connect to the driver."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        """A GPU by the name that is its own on any machine and under any CUDA_VISIBLE_DEVICES."""

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int:
        """Millijoules since the driver was loaded."""


class EnergyMeter:
    """Total energy counters of some GPUs. They tick every few tens of milliseconds: short turns are coarse."""

    def __init__(self, nvml: Nvml, handles: Sequence[Any]):
        self._nvml = nvml
        self._handles = handles

    def joules(self) -> float | None:
        """Joules that the GPUs have drawn up to now, to be read as a difference; unknown where one cannot say."""
        try:
            return sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles) / 1000
        except Exception:  # a counter that fails must not cost a turn; NVML's errors are a class of the lazy import
            return None


def energy_meter(devices: Sequence[torch.device], nvml: Nvml | None = None) -> EnergyMeter | None:
    """A meter over the GPUs among `devices`; None without a GPU, without NVML, or where a GPU has no counter.

    `nvml` None imports `pynvml` here and not before, since only machines with a GPU can use it.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    if not gpus:
        return None
    try:
        if nvml is None:
            import pynvml

            nvml = pynvml
        nvml.nvmlInit()
        uuids = [f"GPU-{torch.cuda.get_device_properties(gpu).uuid}" for gpu in gpus]
        meter = EnergyMeter(nvml, [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids])
    except Exception:  # no package, no driver, a sliced GPU: energy is unknown, and the run goes on
        return None
    return meter if meter.joules() is not None else None


def set_threads(num_threads: int | None) -> int:
    """Use that many CPU threads (None: leave torch's choice) and say how many there are."""
    most = MOST_THREADS_PER_CORE * (os.cpu_count() or 1)
    if num_threads is not None:
        if not 1 <= num_threads <= most:
            raise UserError(f"num_threads is {num_threads}; it must lie between 1 and {most} here, or be null")
        torch.set_num_threads(num_threads)
    return torch.get_num_threads()


def free_memory() -> None:
    """Give freed GPU memory back, so that the next model finds it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
