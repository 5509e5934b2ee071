"""Every law holds on a device: the same tests, with tensors that live there."""
