"""Attaches the DDP models of a training command that does not use Thinwire itself (`thinwire attach`).

The environment says what to attach. An installed Thinwire has a `.pth` file, so each Python process runs
`startup` when it starts, if THINWIRE_ATTACH is set. It waits for torch's DDP, and imports nothing
until a process builds a DDP model; then `built_model` attaches it before its first training pass.
"""
