"""What Gluon kernels of all backends have in common."""
