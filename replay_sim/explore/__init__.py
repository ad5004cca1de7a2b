"""Exploring: figures, explorers, notebooks and the report; the only room that knows plotly and ipywidgets."""
