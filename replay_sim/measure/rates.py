"""The device's and the host's rates, measured beside the steps: copy bandwidth, a large product, a small launch."""

from __future__ import annotations

import time

import numpy as np
import torch

from replay_sim.measure.roofline import Rates
from replay_sim.measure.timing import time_arms

COPY_BYTES = {"cuda": 1 << 32, "cpu": 1 << 25}
PRODUCT_SIZE = {"cuda": 8192, "cpu": 512}
LAUNCH_SAMPLES, LAUNCHES_A_SAMPLE = 20, 100


def measure_rates(device: torch.device, seed: int) -> Rates:
    """Bytes a second, read plus written, of a large copy, and operations a second of a square bfloat16 product."""
    rates = Rates(_copy_bandwidth(device), _product_rate(device, seed))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rates


def rate_settings(rates: Rates) -> dict[str, object]:
    """The rates as settings of a record, which `rates_of` reads."""
    return {
        "copy_bandwidth_gbps": round(rates.bandwidth / 1e9, 1),
        "matmul_tflops": round(rates.matmul / 1e12, 3),
    }


def launch_us(device: torch.device, samples: int = LAUNCH_SAMPLES) -> float:
    """The median host microseconds of one small eager operation: how fast the host is just then."""
    left, right = (torch.ones(64, device=device) for _ in range(2))
    out = torch.empty_like(left)
    found = []
    for _ in range(samples):
        began = time.perf_counter()
        for _ in range(LAUNCHES_A_SAMPLE):
            torch.add(left, right, out=out)
        found.append((time.perf_counter() - began) * 1e6 / LAUNCHES_A_SAMPLE)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return round(float(np.median(found)), 3)


def _copy_bandwidth(device: torch.device) -> float:
    nbytes = COPY_BYTES[device.type]
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = time_arms({"copy": lambda _: target.copy_(source)}, device, rounds=10, warm_up=2)["copy"]
    return 2 * nbytes / (timing.device_us * 1e-6)


def _product_rate(device: torch.device, seed: int) -> float:
    size = PRODUCT_SIZE[device.type]
    generator = torch.Generator(device).manual_seed(seed)
    left, right = (torch.randn(size, size, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    timing = time_arms({"product": lambda _: torch.mm(left, right, out=out)}, device, rounds=10, warm_up=2)["product"]
    return 2 * size**3 / (timing.device_us * 1e-6)
