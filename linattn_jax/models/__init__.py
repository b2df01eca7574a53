"""The decoder, its presets and generation."""
