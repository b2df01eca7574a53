"""Seeded, checkpointable grain pipelines from text, TFDS datasets and token files to batches."""
