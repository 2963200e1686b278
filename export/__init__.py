"""From a checkpoint to a bundle, and the proof that both compute the same."""
