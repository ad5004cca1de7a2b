"""Measuring: runs of the real system, timing, and records with their provenance (product.md, Measuring)."""
