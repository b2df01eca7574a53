"""absl programs: train, evaluate, generate, bench, tokenize."""
