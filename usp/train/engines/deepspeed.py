"""Training with DeepSpeed ZeRO 0 to 3 over dp x sp, on NCCL and on gloo.

All ranks of dp x sp are DeepSpeed's data-parallel world: sequence parallelism happens inside attention, where DeepSpeed
does not see it. DeepSpeed averages gradients over that world and this toolkit sums them, so every loss is multiplied
by the number of ranks before its backward.

Facts about DeepSpeed 0.19 that this file works around:
- It detects the accelerator, and on a CPU compiles a shared-memory collective on first use. On CPU it is given an
  accelerator that compiles nothing, so that all communication uses gloo.
- It reads the environment variable LOCAL_RANK, which torchrun sets.
- It keeps process groups in globals: one engine per process, over the world.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from usp.hf.disk import stored_tensors
from usp.hf.stage import CausalLMStage
from usp.losses import Head
from usp.optimizers import AdamW
from usp.parallel import ParallelMesh

from .base import MicroBatch, count_choices, loss_share

MOMENTS = ("exp_avg", "exp_avg_sq")
LARGEST_BUCKET = 50_000_000  # elements of gradients that are reduced together


class DeepSpeedEngine:
    """An `Engine` over one stage with plain parameters, equal on every rank or at least set on rank 0.

    param_dtype: dtype of forward and backward. Master weights and gradient reduction are fp32.
    offload: keep master weights and optimizer states in host memory, and update them there; not in stage 0.

    Raises ValueError for a model with parameters that are not trained, and RuntimeError where DeepSpeed is not
    installed. `usp.train.validate` refuses degrees and dtypes that DeepSpeed does not support.
    """

    def __init__(
        self,
        stages: Sequence[CausalLMStage],
        mesh: ParallelMesh,
        *,
        zero: int,
        optimizer: AdamW,
        param_dtype: torch.dtype = torch.float32,
        offload: bool = False,
    ) -> None:
        stored = {name: x for stage in stages for name, x in stored_tensors(stage.model).items()}
        if untrained := [name for name, x in stored.items() if not x.requires_grad]:
            raise ValueError(f"DeepSpeed does not support {untrained[0]}, which is not trained: use engine=fsdp2")
        self.stages, self.stage, self.mesh, self.zero = stages, stages[0], mesh, zero
        self.parameters = dict(self.stage.model.named_parameters())
        self.deepspeed = load_deepspeed(mesh.device_type)
        self.optimizer = optimizer.over(self.parameters.values(), (), mesh)
        host = {"device": "cpu", "pin_memory": mesh.device_type == "cuda"} if offload else None
        shapes = [p.shape for p in self.parameters.values()]
        with _own_errors_only():
            self.engine, *_ = self.deepspeed.initialize(
                model=self.stage,
                optimizer=self.optimizer,
                config=deepspeed_config(zero, param_dtype, shapes, host, overlap=mesh.device_type == "cuda"),
                dist_init_required=False if self.deepspeed.comm.is_initialized() else None,
            )
        if zero == 3:  # the loss reads the head's weight without calling the head
            head = cast(nn.Linear, self.stage.model.get_output_embeddings())
            self.deepspeed.zero.register_external_parameter(self.stage, head.weight)
        # AdamW would create moments in the first step, where ZeRO 1 and 2 find only the first group's parts.
        for flat in self._flat_groups():
            self.optimizer.state[cast(nn.Parameter, flat)].update(optimizer.first_state(flat))
        if self.zero in (1, 2):
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def forward_backward(self, micro_batches: Sequence[MicroBatch], head: Head) -> Tensor:
        count_choices(self.stages, self.mesh, micro_batches, calls=[self.engine])
        share = torch.zeros((), device=self.mesh.device_type)
        for number, batch in enumerate(micro_batches, start=1):
            self.engine.set_gradient_accumulation_boundary(number == len(micro_batches))
            inputs = {key: value for key, value in batch.items() if key != "input_ids"}
            loss = self.engine(batch["input_ids"], **inputs, head=head)
            self.engine.backward(loss * dist.get_world_size(), scale_wrt_gas=False)
            share += loss.detach()
        return share

    def evaluate(self, micro_batches: Sequence[MicroBatch], head: Head) -> Tensor:
        return loss_share(self.stages, self.mesh, micro_batches, head, calls=[self.engine])

    def step(self, learning_rate: float, max_norm: float) -> float:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.zero == 0:
            return self._whole_step(max_norm)
        self.engine.optimizer.clip_grad = max_norm
        self.engine.step()  # skips the update and clears the gradients if the norm is not finite
        return float(self.engine.get_global_grad_norm())

    def _whole_step(self, max_norm: float) -> float:
        """Clip and update in stage 0, where DeepSpeed only sums gradients over ranks."""
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), max_norm).item()
        if math.isfinite(norm):
            self.engine.step()
        self.engine.zero_grad()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Return copies, sharded over all ranks; one parameter at a time is gathered. See `Engine`."""
        step = next(iter(self.optimizer.state.values()))["step"]
        state: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            state[f"model.{name}"] = self._sharded(self._whole(parameter))
            for key in MOMENTS:
                state[f"optimizer.{name}.{key}"] = self._sharded(self._whole(parameter, key))
            state[f"optimizer.{name}.step"] = step.detach().clone().cpu()
        return state

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            self._put(parameter, _full(state[f"model.{name}"]))
            for key in MOMENTS:
                self._put(parameter, _full(state[f"optimizer.{name}.{key}"]), key)
            step = state[f"optimizer.{name}.step"]
        for moments in self.optimizer.state.values():  # by DeepSpeed's flat groups: all parameters have the same step
            moments["step"].copy_(step)

    def _flat_groups(self) -> list[Tensor]:
        """Return what AdamW updates on this rank: parameters, or one vector of parts of all parameters of a group."""
        if self.zero == 0:
            return list(self.parameters.values())
        for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
            if hasattr(self.engine.optimizer, name):
                return list(getattr(self.engine.optimizer, name))
        raise AssertionError(f"unknown ZeRO optimizer {type(self.engine.optimizer).__name__}")

    def _whole(self, parameter: nn.Parameter, key: str | None = None) -> Tensor:
        if self.zero == 0:
            return parameter.detach() if key is None else self.optimizer.state[parameter][key]
        if key is None:
            return self.deepspeed.utils.safe_get_full_fp32_param(parameter)
        return self.deepspeed.utils.safe_get_full_optimizer_state(parameter, key)

    def _put(self, parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
        if self.zero == 0:
            (parameter if key is None else self.optimizer.state[parameter][key]).copy_(value)
            return
        # ZeRO-3 cuts the flat value into equal parts; the last may extend past its end.
        padded = nn.functional.pad(value.flatten(), (0, -value.numel() % dist.get_world_size()))
        value_or_padded = padded if self.zero == 3 else value
        if key is not None:
            self.deepspeed.utils.safe_set_full_optimizer_state(parameter, value_or_padded, key)
            return
        self.deepspeed.utils.safe_set_full_fp32_param(parameter, value_or_padded)
        if self.zero < 3:
            parameter.copy_(value)
            return
        with self.deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if dist.get_rank() == 0:
                parameter.copy_(value)

    def _sharded(self, whole: Tensor) -> Tensor:
        ranks = self.mesh.device_mesh("loss")
        parts = whole.chunk(ranks.size())
        rank = ranks.get_local_rank()
        local = (parts[rank] if rank < len(parts) else whole[:0]).clone()
        return DTensor.from_local(local, ranks, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


def deepspeed_config(
    zero: int,
    param_dtype: torch.dtype,
    shapes: Sequence[torch.Size],
    offload: Mapping[str, Any] | None,
    overlap: bool = False,
) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a model whose parameters have `shapes`; `offload` of the optimizer,
    `overlap` of communication with computation, on GPUs. Batch sizes are only DeepSpeed's bookkeeping: the engine says
    which micro-batch is the last."""
    vectors = [shape.numel() for shape in shapes if len(shape) < 2]
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": param_dtype == torch.bfloat16, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": zero,
            "overlap_comm": overlap,
            "reduce_bucket_size": min(LARGEST_BUCKET, sum(shape.numel() for shape in shapes)),
            # ZeRO-3 replicates parameters smaller than this: all vectors and no matrix larger than them.
            "stage3_param_persistence_threshold": max(vectors, default=0) + 1,
            "offload_optimizer": offload,
        },
        "zero_force_ds_cpu_optimizer": False,  # its own is compiled on first use; torch's fused AdamW runs on the CPU
    }


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@contextmanager
def _own_errors_only() -> Iterator[None]:
    """Silence DeepSpeed's warnings about deliberate choices of this file."""
    logger, is_error = logging.getLogger("DeepSpeed"), lambda record: record.levelno >= logging.ERROR
    logger.addFilter(is_error)
    try:
        yield
    finally:
        logger.removeFilter(is_error)


def load_deepspeed(device_type: str) -> Any:
    """Import and set up deepspeed for "cuda" or "cpu"; on CPU it compiles nothing and communicates over gloo. Raises
    RuntimeError if it is not installed."""
    try:
        with _own_errors_only():
            import deepspeed
    except ImportError as error:
        raise RuntimeError("engine=deepspeed needs deepspeed: pip install 'usp-toolkit[deepspeed]'") from error
    # DeepSpeed calls torch's collectives by deprecated names, which users cannot change.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if device_type == "cpu":
        from deepspeed.accelerator import set_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        class GlooAccelerator(CPU_Accelerator):
            """A CPU accelerator without operators that need compiling."""

            def create_op_builder(self, op_name: str) -> None:
                return None

        set_accelerator(GlooAccelerator())
    return deepspeed
