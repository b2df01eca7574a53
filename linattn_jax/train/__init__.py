"""The training step, optimizer, loop, checkpoints and metrics; reads no flags."""
