"""The padded size from which on a PIECEWISE model graph breaks for the replay layers (P5)."""

from replay_sim.config import ConfigError, ServingConfig
from replay_sim.plan.capture_sizes import PIECEWISE_MODES


def trim_threshold(config: ServingConfig) -> int | None:
    """Return the trim threshold in padded tokens, or None if no model graph ever breaks for replay.

    Without PIECEWISE graphs none does, whatever the setting.

    Raises:
        ConfigError: a threshold that does not exceed the window: such a graph has nothing to trim (P5).
    """
    threshold = config.decoder_replay_trim_threshold
    if config.cudagraph_mode not in PIECEWISE_MODES:
        return None
    if threshold is not None and threshold <= config.window:
        raise ConfigError(
            f"decoder_replay_trim_threshold: {threshold} is not allowed; it must exceed window {config.window}"
        )
    return threshold
