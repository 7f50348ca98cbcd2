"""Engines: what runs a model and blends. Import the one you need; each brings its own libraries."""
