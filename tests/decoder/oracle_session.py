"""A serving session whose every step runs on a StepRunner and on the plain decoder, and is compared."""

import attrs
import numpy as np
import torch
from oracles.plain_decoder import PlainDecoder, RowOutput, Rows

from replay_sim.batch.dispatch import CudagraphMode, StepRecord
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.decoder.step import StepOutput, StepRunner


@attrs.frozen
class Ask:
    """One request's part in one step: `length` rows after what it has computed.

    rejected: the last tokens computed so far that are dropped first, as after speculation. held: how many of
    the positions computed so far still have window KV, which sets the window start; None for all of them.
    """

    name: str
    length: int
    phase: Phase = Phase.PREFILL
    all_rows_read: bool = False
    rejected: int = 0
    held: int | None = None


def decode(name: str, length: int = 1, rejected: int = 0, held: int | None = None) -> Ask:
    return Ask(name, length, Phase.DECODE, rejected=rejected, held=held)


class Session:
    """Requests over one KV cache, which holds NaN wherever this session has written nothing.

    `tolerance` bounds the relative error of each row of each output, in the Euclidean norm; `errors`
    has them all. With `masked` False the oracle never trims: for sessions in which nothing can be trimmed.
    """

    def __init__(self, runner: StepRunner, tolerance: float, *, masked: bool = True, seed: int = 0) -> None:
        self.runner, self.tolerance, self.masked = runner, tolerance, masked
        self.oracle = PlainDecoder(runner.shape, runner.decoder.weights)
        self.random = np.random.default_rng(seed)
        self.free_blocks = self.random.permutation(runner.num_blocks).astype(np.int32).tolist()
        self.blocks: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.errors = [0.0]
        self.records: list[StepRecord] = []
        for cache in (*runner.decoder.cache.window, runner.decoder.cache.shared):
            cache[: runner.num_blocks * runner.block_size] = torch.nan

    def step(self, *asks: Ask) -> StepRecord:
        """Run one step on both, compare all that it returns, and return its record."""
        rows = [self._rows(ask) for ask in asks]
        output = self.runner.step(self._batch(asks, rows), self._tables(rows), self._ids(rows))
        trimmed = self._runs_a_replay_batch(rows, output.record)
        assert output.record.has_replay_batch == trimmed
        expected = self.oracle.step(rows, trimmed=trimmed and self.masked)
        if trimmed and self.masked:
            assert output.record.replay_rows == sum(row.kept for row in expected)
        self._compare(output, expected)
        self.records.append(output.record)
        return output.record

    def _rows(self, ask: Ask) -> Rows:
        computed = self.computed.get(ask.name, 0) - ask.rejected
        self.computed[ask.name] = computed + ask.length
        return Rows(
            request_id=ask.name,
            token_ids=self.random.integers(self.runner.shape.vocab_size, size=ask.length).tolist(),
            computed=computed,
            prefill=ask.phase is Phase.PREFILL,
            all_rows_read=ask.all_rows_read,
            window_start=0 if ask.held is None else max(0, computed - ask.held),
        )

    def _batch(self, asks: tuple[Ask, ...], rows: list[Rows]) -> Batch:
        return Batch(
            Request(ask.length, row.computed, ask.phase, ask.all_rows_read, row.window_start, ask.name)
            for ask, row in zip(asks, rows, strict=True)
        )

    def _tables(self, rows: list[Rows]) -> list[np.ndarray]:
        for row in rows:
            blocks = self.blocks.setdefault(row.request_id, [])
            while len(blocks) * self.runner.block_size < row.seq_len:
                blocks.append(self.free_blocks.pop())
        return [np.array(self.blocks[row.request_id], np.int32) for row in rows]

    def _ids(self, rows: list[Rows]) -> np.ndarray:
        return np.array([token for row in rows for token in row.token_ids], np.int32)

    def _runs_a_replay_batch(self, rows: list[Rows], record: StepRecord) -> bool:
        """S5 and D2, from the mode and padded tokens of the step."""
        threshold, window = self.runner.plan.trim_threshold, self.runner.shape.window
        if record.mode is CudagraphMode.PIECEWISE:
            return threshold is not None and record.padded_tokens >= threshold
        trims = any(row.prefill and not row.all_rows_read and len(row.token_ids) > window for row in rows)
        return record.mode is CudagraphMode.NONE and trims

    def _compare(self, output: StepOutput, expected: list[RowOutput]) -> None:
        """L6: kept rows as the oracle has them, trimmed rows zero; early aux states and logits too."""
        kept = [index for index, row in enumerate(expected) if row.kept]
        trimmed = [index for index, row in enumerate(expected) if not row.kept]
        returned = (output.hidden_states, output.pre_mix, *output.late_aux)
        for tensor in (*returned, *output.early_aux):
            assert len(tensor) == len(expected)
        for tensor in returned:
            assert not tensor[trimmed].any(), "a trimmed row is not zero"
        self._close("streams", output.hidden_states[kept], [expected[index].streams for index in kept])
        self._close("pre", output.pre_mix[kept], [expected[index].pre for index in kept])
        for place, tensor in enumerate(output.late_aux):
            self._close("late aux", tensor[kept], [expected[index].late_aux[place] for index in kept])
        for place, tensor in enumerate(output.early_aux):
            self._close("early aux", tensor, [row.early_aux[place] for row in expected])
        logits = self.runner.logits(output, torch.tensor(kept, dtype=torch.int64, device=output.pre_mix.device))
        self._close("logits", logits, [self.oracle.logits(expected[index]) for index in kept])

    def check_cache(self) -> None:
        """S4, S8, L3: every latent of the oracle lies in its slot, and nothing else was ever written."""
        cache, block_size = self.runner.decoder.cache, self.runner.block_size
        size = self.runner.num_blocks * block_size
        histories = self.oracle.histories
        layers = range(self.runner.shape.num_layers)
        pairs = [(cache.window[layer], {name: h.window[layer] for name, h in histories.items()}) for layer in layers]
        for tensor, latents in (*pairs, (cache.shared, {name: h.shared for name, h in histories.items()})):
            expected = {
                self.blocks[name][position // block_size] * block_size + position % block_size: latent
                for name, by_position in latents.items()
                for position, latent in by_position.items()
            }
            written = (~tensor[:size].isnan().any(1)).nonzero().squeeze(1).tolist()
            assert written == sorted(expected), "other slots were written than the rows'"
            self._close("cache", tensor[written], [expected[slot] for slot in written])

    def _close(self, what: str, actual: torch.Tensor, expected: list[np.ndarray]) -> None:
        if not expected:
            return
        wanted = np.array(expected).reshape(len(expected), -1)
        got = actual.to("cpu", torch.float64).numpy().reshape(wanted.shape)
        errors = np.linalg.norm(got - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        row = int(np.argmax(errors))
        assert errors[row] <= self.tolerance, f"{what} of row {row} of {len(errors)}: relative error {errors[row]:.2g}"
        self.errors.extend(errors.tolist())
