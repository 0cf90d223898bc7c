"""A state in a file: written whole or not at all, and refused with a clear error if it is damaged.

`torch.save`, `torch.distributed.checkpoint` and trainers' own checkpoints can hold a state as well. `save`
and `load` are for loops that write their own files, and for safetensors. With `save_local` and `load_local`
each process has its own file, and nothing is sent.

Examples:
    >>> from tempfile import TemporaryDirectory
    >>> from thinwire import PowerSGD
    >>> from thinwire.plan import ParameterSpec
    >>> from thinwire.simulation import Simulation
    >>> weight = ParameterSpec("weight", (64, 32), (32, 1), torch.float32)
    >>> state = Simulation(PowerSGD(matrix_rank=2), [(weight,)], num_workers=2).state_dicts()[0]
    >>> with TemporaryDirectory() as folder:
    ...     save(state, f"{folder}/sync.pt")
    ...     load(f"{folder}/sync.pt")["parameters"]
    (('weight', (64, 32)),)
"""

from __future__ import annotations

import json
import os
import secrets
import zipfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from thinwire.errors import CheckpointError, ConfigError, MissingExtraError, StateError
from thinwire.sync import GradientSync
from thinwire.sync.state import check_kind, merge, position_of, updated

__all__ = ["load", "load_local", "merge", "save", "save_local"]

SAFETENSORS = ".safetensors"
LOCAL_NAME = "thinwire_{}.pt"


def save(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a state that `state_dict` returned, on any one process: all have the same state.

    For the state of a single process, from `local_state_dict`, use `save_local`.

    The file is written whole or not at all, even if saving is interrupted or several processes save to one
    path (the last one wins). It is first written next to `path`, as `<name>.<16 hexadecimal digits>.part`,
    and then renamed; the umask gives its mode. A process that is killed while it saves leaves the `.part`
    file behind. It is never read, and can be deleted when nothing is being saved.

    Cost: the file is flushed to disk; safetensors' format also needs the state's size in memory.

    Args:
        state: From a `GradientSync`, a `LocalSGD`, a `PowerSGDState` or an aggregator.
        path: With the suffix ".safetensors" it is written in that format, otherwise as `torch.save` does.

    Raises:
        StateError: It is not such a state.
        ConfigError: The path names no file.
        CheckpointError: It can't be written, for example to a full disk. An existing file stays as it was.
        MissingExtraError: safetensors is not installed.
    """
    _check(state)  # before a good file is replaced by one that could not be loaded
    path = Path(path)
    if not path.name:
        raise ConfigError(f"path must be that of a file, got {str(path)!r}")
    safetensors = _safetensors() if path.suffix == SAFETENSORS else None
    # In the same folder: a rename is atomic only within one file system.
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        file = part.open("xb")  # x: always a new file, never through an existing link
        try:
            with file:
                if safetensors is None:
                    torch.save(dict(state), file)
                else:
                    tensors: dict[str, torch.Tensor] = {}
                    plain = _plain(state, tensors)
                    file.write(safetensors.save(tensors, {"thinwire": json.dumps(plain)}))
                # On disk before the rename: otherwise a crash could leave an empty file under the name.
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # torch raises a RuntimeError if a write fails
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise CheckpointError(
            f"{path} can't be written: {getattr(cause, 'strerror', None) or cause}; any file that was there "
            "is unchanged: free space, or save elsewhere"
        ) from cause


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a state that `save` or `torch.save` wrote, for `load_state_dict`.

    The file is opened once, so it may be saved again meanwhile. Cost: memory for the file beside the state.

    Raises:
        StateError: The file is damaged, empty, or not a Thinwire state. (safetensors' format has no
            checksums: only a truncated file is detected.)
        MissingExtraError: safetensors is not installed.
        OSError: The file can't be opened.
    """
    path = Path(path)
    # Opened once: a concurrent save replaces the file, and a second open would read the new one.
    with path.open("rb") as file:
        if not file.peek(1):
            raise StateError(f"{path} can't be read: it is empty; load an earlier file")
        try:
            if path.suffix == SAFETENSORS:
                data = file.read()
                # The file starts with the header's length in 8 bytes; then comes the header, JSON.
                header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
                plain = json.loads(header["__metadata__"]["thinwire"])
                state: Any = _nested(plain, _safetensors().load(data))
            else:
                # torch.load checks no CRCs. With `torch.serialization.set_crc32_options(False)` they are 0.
                with zipfile.ZipFile(file) as archive:
                    has_crcs = any(member.CRC for member in archive.infolist())
                    if has_crcs and (damaged := archive.testzip()) is not None:
                        raise StateError(f"{damaged} in it is damaged")
                file.seek(0)
                # Weights only: any other pickle could run code. What is open can't be mapped (`load.mmap`).
                state = torch.load(file, weights_only=True, map_location="cpu", mmap=False)
            _check(state)
        except MissingExtraError:
            raise
        except Exception as error:  # readers raise all kinds of errors for a damaged file
            raise StateError(f"{path} can't be read: {error}; load an earlier file") from error
    return dict(state)


def save_local(sync: GradientSync, folder: str | os.PathLike[str]) -> None:
    """Write this process's state into a folder, without communication. Call it on every process.

    The file is `thinwire_<rank>.pt`. Files that an earlier save with more processes left in the folder are
    removed. Cost: `GradientSync.local_state_dict` and `save`.

    Args:
        sync: The handle of the model.
        folder: Created if missing. If each machine has its own disk, it holds that machine's files.

    Raises:
        StepError: A step is in progress.
        StateError: See `GradientSync.local_state_dict`.
        CheckpointError: The file can't be written.
    """
    folder, position = Path(folder), sync.position
    folder.mkdir(parents=True, exist_ok=True)
    save(sync.local_state_dict(), folder / LOCAL_NAME.format(position.rank))
    # Only now: if this process can't save, the files of the earlier save stay.
    if position.rank == 0:
        current = {LOCAL_NAME.format(rank) for rank in range(position.world_size)}
        for file in folder.glob(LOCAL_NAME.format("*")):
            if file.name not in current:
                file.unlink(missing_ok=True)


def load_local(sync: GradientSync, folder: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Load what `save_local` has written. Call it on every process.

    With the same number of processes and the same layout, each reads its own file and continues bit for bit.
    With another number or layout, each reads all files and loads what `merge` returns, which keeps the mean
    residual. If machines have their own disks, copy all files to each of them first.

    Args:
        sync: The handle of the model.
        folder: The folder given to `save_local`.
        strict: See `GradientSync.load_state_dict`.

    Raises:
        StateError: A file is missing, damaged, or of a different model.
        StepError: A step is in progress.
    """
    folder = Path(folder)
    own = folder / LOCAL_NAME.format(sync.position.rank)
    state = load(own) if own.exists() else None
    if state is None or position_of(state) != sync.position:
        files = sorted(folder.glob(LOCAL_NAME.format("*")))
        if not files:
            raise StateError(f"{folder} contains no file from save_local(); load an earlier folder")
        state = merge(map(load, files))
    sync.load_state_dict(state, strict=strict)


def _check(state: object) -> None:
    """Raise if this is no state of a `GradientSync` or `LocalSGD`; `load_state_dict` checks the rest."""
    check_kind(updated(state), {"version", "step"}, "state_dict()")


def _plain(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a value as JSON can hold it: tensors are moved into `tensors` and replaced by their numbers."""
    if isinstance(value, torch.Tensor):
        number = str(len(tensors))
        tensors[number] = value.contiguous()
        return {"tensor": number}
    if isinstance(value, Mapping):
        return {"mapping": [[key, _plain(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_plain(item, tensors) for item in value]}
    return value


def _nested(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Invert `_plain`."""
    if not isinstance(plain, dict):
        return plain
    ((kind, held),) = plain.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "mapping":
        return {key: _nested(item, tensors) for key, item in held}
    return {"list": list, "tuple": tuple}[kind](_nested(item, tensors) for item in held)


def _safetensors() -> Any:
    try:
        return import_module("safetensors.torch")
    except ImportError as error:
        raise MissingExtraError(
            ".safetensors files need the package safetensors: pip install '.[safetensors]' in a clone of "
            "Thinwire"
        ) from error
