"""What the engine does where a serving config says nothing: vLLM's published defaults, each with its source.

Sources, for vLLM 0.2x and 0.3x as an API server:
- `EngineArgs.get_batch_defaults` (engine/arg_utils.py): 8,192 batched tokens and 1,024 sequences on GPUs of
  70 GiB and more that are not an A100; the sequences never more than the batched tokens.
- `CompilationConfig.cudagraph_capture_sizes` and `max_cudagraph_capture_size` (config/compilation.py): the
  sizes 1, 2, 4, then multiples of 8 below 256, then multiples of 16; the maximum is that of explicit sizes,
  otherwise twice the widest uniform decode, at most 512, and never more than the batched tokens.
- `CompilationConfig.cudagraph_mode`: FULL_AND_PIECEWISE.
- The server log of 0.31.1rc1 in the preset `h100-tp8-log`: decoder replay on, trim threshold 768.

One departure: the engine's default list leaves out a maximum that is not on the grid (42 becomes 40), which
sends the widest decode batches to eager; here the maximum is always a size.
"""

MODEL = "deepseek-ai/DeepSeek-V4.1-Flash"
WINDOW = 128
MAX_NUM_SEQS = 1024
MAX_NUM_BATCHED_TOKENS = 8192
CUDAGRAPH_MODE = "FULL_AND_PIECEWISE"
TRIM_THRESHOLD = 768
MAX_CAPTURE_SIZE_CEILING = 512


def default_max_num_seqs(max_num_batched_tokens: int) -> int:
    """Return the sequences of a config that does not set them, given its token budget."""
    return min(MAX_NUM_SEQS, max_num_batched_tokens)


def default_max_capture_size(max_num_seqs: int, query_len_decode: int, max_num_batched_tokens: int) -> int:
    """Return the largest model capture size of a config that sets neither it nor any size (A12).

    It counts the tokens of a decode request, not the requests alone.
    """
    return min(2 * max_num_seqs * query_len_decode, MAX_CAPTURE_SIZE_CEILING, max_num_batched_tokens)


def default_capture_sizes(maximum: int) -> tuple[int, ...]:
    """Return the model capture sizes up to `maximum`, which is always the last of them (A2)."""
    grid = [1, 2, 4, *range(8, 256, 8), *range(256, maximum + 1, 16)]
    return tuple(sorted({size for size in grid if size < maximum} | {maximum}))
