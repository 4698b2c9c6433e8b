"""Stages, their artifacts and the store that keeps them. Knows no Gemma and imports no torch."""
