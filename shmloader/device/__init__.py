"""How batches reach the accelerator."""
