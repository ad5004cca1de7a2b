"""A host and a GPU whose clocks only their work moves: what the tests of timing run on in place of real ones."""

from __future__ import annotations

import attrs

CYCLES_A_MICROSECOND = 1_000


@attrs.define
class SimulatedGpu:
    """Stands for the modules `torch`, its `cuda`, and `time`: work is enqueued, and runs in order when it can.

    `host_us` and `free_us` are the host's time and that at which the device will have done all; `log` names what was
    asked of the device, in order.
    """

    host_us: float = 0.0
    free_us: float = 0.0
    log: list[str] = attrs.field(factory=list)

    @property
    def cuda(self) -> SimulatedGpu:
        return self

    def launch(self, host_us: float, device_us: float) -> None:
        """The host takes `host_us` to enqueue what keeps the device for `device_us`."""
        self.host_us += host_us
        self.free_us = max(self.free_us, self.host_us) + device_us

    def perf_counter(self) -> float:
        return self.host_us / 1e6

    def synchronize(self, _device: object) -> None:
        self.log.append("synchronize")
        self.host_us = max(self.host_us, self.free_us)

    def _sleep(self, cycles: int) -> None:
        self.log.append("sleep")
        self.launch(0.0, cycles / CYCLES_A_MICROSECOND)

    def Event(self, *, enable_timing: bool) -> SimulatedEvent:
        assert enable_timing
        return SimulatedEvent(self)


@attrs.define
class SimulatedEvent:
    """An event in the queue of the GPU."""

    gpu: SimulatedGpu
    at_us: float | None = None

    def record(self) -> None:
        self.gpu.log.append("record")
        self.at_us = max(self.gpu.free_us, self.gpu.host_us)

    def synchronize(self) -> None:
        assert self.at_us is not None
        self.gpu.log.append("wait")
        self.gpu.host_us = max(self.gpu.host_us, self.at_us)

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Milliseconds; refused, as by CUDA, before the end has come."""
        assert self.at_us is not None and end.at_us is not None and end.at_us <= self.gpu.host_us
        return (end.at_us - self.at_us) / 1e3
