"""The reference decoder: layers that do to memory, launches and rows what DeepSeek-V4.1-Flash's do."""
