"""Parts that Gluon kernels of all backends share."""
