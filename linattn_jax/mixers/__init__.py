"""Sequence mixers as pure functions: recurrent, associative and chunkwise forms side by side."""
