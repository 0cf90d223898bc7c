"""A slow network of several hosts on one machine, for trying things out: `thinwire lab`."""
