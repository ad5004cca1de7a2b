"""Decoder replay: forward context, static buffers, movement of rows, replay layers and their graphs (B, L, G, O)."""
