"""Linear-attention sequence mixers for JAX: pure functions under one signature."""
