"""When requests got their first and last token, and histograms of such times."""

import math
from collections import Counter

import attrs

BINS_PER_DOUBLING = 32
SHORTEST_S = 1e-9
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}


@attrs.frozen
class RequestTimes:
    """A finished request's times, in seconds of virtual time.

    first_token_s and finish_s: ends of the steps that sampled its first and its last token. A request without
    output has no first token: first_token_s is None.
    """

    request_id: str
    arrival_s: float
    first_token_s: float | None
    finish_s: float
    output_tokens: int

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from arrival to the end of the step that sampled it."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def time_per_output_token_s(self) -> float | None:
        """Time after the first token by the tokens after it; None with fewer than two."""
        if self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.finish_s - self.first_token_s) / (self.output_tokens - 1)


@attrs.define(eq=False)
class TimeHistogram:
    """Counts of times in bins of equal ratio, 32 to a doubling, so that memory does not grow with the count.

    mean and longest are exact, quantiles true to a bin's width, 2.2 %.
    """

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0
    bins: Counter[int] = attrs.field(factory=Counter)

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a time, finite and at least 0, `count` times; what is below a nanosecond counts as that in its bin."""
        self.count += count
        self.total_s += seconds * count
        self.longest_s = max(self.longest_s, seconds)
        self.bins[math.floor(math.log2(max(seconds, SHORTEST_S)) * BINS_PER_DOUBLING)] += count

    def quantile(self, share: float) -> float:
        """The middle of the bin that holds the time which this share of all do not exceed, at most the longest.

        ValueError for a share that is not above 0 and at most 1, or without any time.
        """
        if not self.count or not 0 < share <= 1:
            raise ValueError(f"share is {share} of {self.count} times: it must be above 0 and at most 1, of some")
        seen = 0
        for index in sorted(self.bins):
            seen += self.bins[index]
            if seen >= share * self.count:
                break
        return min(2 ** ((index + 0.5) / BINS_PER_DOUBLING), self.longest_s)

    def as_dict(self) -> dict[str, object]:
        """count, mean, longest and quantiles in seconds, and the bins as their lower edges and counts."""
        summary: dict[str, object] = {"count": self.count}
        if self.count:
            summary |= {"mean": self.total_s / self.count, "max": self.longest_s}
            summary |= {name: self.quantile(share) for name, share in QUANTILES.items()}
        edges = sorted(self.bins)
        return summary | {
            "bin_starts": [2 ** (index / BINS_PER_DOUBLING) for index in edges],
            "bin_counts": [self.bins[index] for index in edges],
        }
