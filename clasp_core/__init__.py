"""A benchmark harness for training-free speculative decoding: one loop, one model, one clock."""
