"""The mathematics, one file an optimizer: tensors and scalars, nothing else."""
