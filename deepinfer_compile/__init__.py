"""Compile a PyTorch language model into a bundle of serving programs."""
