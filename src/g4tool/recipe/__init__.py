"""The recipe: a typed model of the YAML, presets, overrides, and one error format."""
