"""Average gradients over all processes at first, later in a subgroup or not at all, as torch's hook does."""
# DDP compares a hook's annotations with the types themselves: no `from __future__ import annotations` here.

import logging
import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from thinwire.adapters.ddp import DDPAdapter, adapter_of_hook, completed_future, dense_buffer
from thinwire.adapters.setup import divide_by_contributors
from thinwire.algorithms.exact import WireDtype
from thinwire.checks import true_or_false, whole_count
from thinwire.comm import ProcessGroupTransport, agree, checked_group
from thinwire.comm.process_group import own_subgroup
from thinwire.errors import ConfigError
from thinwire.hooks.stateless import cast_in, checked_state, sent_mean
from thinwire.sync import Settings
from thinwire.sync.settings import OnNonfinite, checked_on_nonfinite
from thinwire.torch_private import not_compiled
from thinwire.version import __version__

logger = logging.getLogger(__name__)

NO_MACHINE = (
    "with subgroup=None the processes of each machine average, but it is unknown which share a machine; "
    "pass subgroup=, such as torch.distributed.new_subgroups(group_size=…)[0]"
)


class PostLocalSGDState:
    """Settings and step counter of `post_localSGD_hook` on one model.

    The hook averages gradients only. As in torch, a second object must average the parameters in the local
    phase, with the same number as its `warmup_steps`. `thinwire.LocalSGD` does both with one counter.

    Source: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (arXiv 1808.07217).

    Args:
        process_group: The group of the first steps, None for the default one.
        subgroup: The group of later steps. None for the processes of this machine, one per accelerator or,
            without any, as many as the launcher's `LOCAL_WORLD_SIZE`; this group is made in the first later
            step. May be set until then.
        start_localSGD_iter: Steps at the start that average over `process_group`.
        post_local_gradient_allreduce: Whether later steps average within `subgroup`, or not at all.
        on_nonfinite: Not in torch: what happens if averaged gradients are not finite; see
            `thinwire.attach`. "raise" only if nothing is averaged within subgroups.

    Attributes:
        iter: Steps so far, up to `start_localSGD_iter`; may be set to resume training.
        is_agreed: Whether all processes have compared these settings.

    Raises:
        ConfigError: A setting is of the wrong type or out of range; or "raise" with subgroups: the other
            subgroups would not raise.
        AttachError: This process is not a member of a group.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
        *,
        on_nonfinite: OnNonfinite = "nan",
    ) -> None:
        for name, group in (("process_group", process_group), ("subgroup", subgroup)):
            if group is not None:
                checked_group(group, name)
        self.process_group, self.subgroup = process_group, subgroup
        self.start_localSGD_iter = whole_count("start_localSGD_iter", start_localSGD_iter, minimum=0)
        self.post_local_gradient_allreduce = true_or_false(
            "post_local_gradient_allreduce", post_local_gradient_allreduce
        )
        self.on_nonfinite = checked_on_nonfinite(on_nonfinite)
        if self.on_nonfinite == "raise" and self.post_local_gradient_allreduce:
            raise ConfigError(
                'on_nonfinite="raise" can\'t be combined with averaging within subgroups: the processes of '
                'other subgroups would not raise; use "zero", or post_local_gradient_allreduce=False'
            )
        self.iter = 0
        self.is_agreed = False
        self._adapters: dict[dist.ProcessGroup, DDPAdapter] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> "PostLocalSGDState":
        """Return a state with the same settings and groups at step 0: a copied model has no hook."""
        # Without __init__: groups can't be copied, so the copy shares them.
        copied = PostLocalSGDState.__new__(PostLocalSGDState)
        copied.__dict__.update(self.__dict__, iter=0, is_agreed=False, _adapters={})
        return copied


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average over the group until `start_localSGD_iter`, then within the subgroup or not at all.

    Cost: one message for each bucket, of the gradient's own bytes; none in the local phase without
    `subgroup`.

    Raises:
        ConfigError: The state is of a different kind; or no subgroup was given, and the processes can't be
            divided by machine.
        GradientError: The gradients are sparse.
        AgreementError: The processes have different settings (found at the first step).
        NonfiniteError: A mean is not finite, and `on_nonfinite` is "raise" (from `backward()`).
        CommunicationError: A collective failed.
    """
    return averaged(state, bucket, None)


@not_compiled
def averaged(state: PostLocalSGDState, bucket: GradBucket, wire: WireDtype | None) -> Future[torch.Tensor]:
    """Average as `post_localSGD_hook` does, with messages in the `wire` dtype if given."""
    state, flat = checked_state(PostLocalSGDState, state), dense_buffer(bucket)
    if not state.is_agreed:
        _agree(state, wire, flat.device)
    is_local = state.iter >= state.start_localSGD_iter
    # No message, and so no check of what other processes do.
    if is_local and not state.post_local_gradient_allreduce:
        return completed_future(flat)
    if is_local and state.subgroup is None:
        # Not when the state is made: making groups is collective, and torch's hook does it here, too.
        size = _processes_per_machine()
        if size is None:
            raise ConfigError(f"local SGD can't start: {NO_MACHINE}")
        state.subgroup = own_subgroup(size, state.process_group, flat.device)
    transport = ProcessGroupTransport(state.subgroup if is_local else state.process_group, flat.device)
    # Before the step is counted: the last bucket still belongs to it.
    purpose = f"step {state.iter}, a bucket of {flat.numel()} gradients"
    if not is_local and bucket.is_last():
        state.iter += 1
        if state.iter == state.start_localSGD_iter:
            logger.info("local SGD starts after %d steps", state.iter)
    # The check covers the whole step, so its buckets must wait for one another.
    if state.on_nonfinite != "nan":
        # One adapter per group, kept: its step spans all buckets of a backward pass.
        if transport.group not in state._adapters:
            settings = Settings(on_nonfinite=state.on_nonfinite)
            state._adapters[transport.group] = adapter_of_hook(
                state, bucket, cast_in(wire), transport, settings, is_in_every_step=False
            )
        return state._adapters[transport.group].run(bucket)
    divide_by_contributors(bucket.parameters(), flat, transport.size)
    return sent_mean(flat, wire, transport, purpose)


def _agree(state: PostLocalSGDState, wire_dtype: WireDtype | None, device: torch.device) -> None:
    description = {
        "thinwire": __version__,
        "start_localSGD_iter": str(state.start_localSGD_iter),
        "post_local_gradient_allreduce": str(state.post_local_gradient_allreduce),
        "on_nonfinite": state.on_nonfinite,
        "iter": str(state.iter),
        "wire_dtype": str(wire_dtype),
    }
    # Compare at the first step: if only some processes average locally, all wait until the timeout.
    agree(ProcessGroupTransport(state.process_group, device), description, "the first step")
    state.is_agreed = True
    if state.post_local_gradient_allreduce and state.subgroup is None and _processes_per_machine() is None:
        logger.warning("step %d will fail: %s", state.start_localSGD_iter, NO_MACHINE)


def _processes_per_machine() -> int | None:
    """Return the number of processes by accelerators or launcher; None if neither is known."""
    # Like torch, assume one process per accelerator.
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(count) if count.isdecimal() else None
