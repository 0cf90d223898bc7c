"""A slow network of several machines on one computer, for trying things out: `thinwire lab`."""
